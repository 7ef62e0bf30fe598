"""StoredTensor: a tensor whose elements lie in a store, such as a file. It is read and written run by run.

For state dicts that do not fit into memory: a checkpoint reads or fills one box after the other.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

__all__ = ["Store", "StoredTensor"]


class Store(Protocol):
    """Where the elements lie: ``numel`` of them in a row, of ``dtype``."""

    numel: int
    dtype: torch.dtype

    def read(self, start: int, stop: int) -> torch.Tensor:
        """The elements ``start`` to ``stop``, in new memory on the CPU."""

    def write(self, start: int, data: torch.Tensor) -> None:
        """Replace the elements from ``start`` on. ``data`` has their bytes: a 1-D tensor of uint8."""


class StoredTensor(torch.Tensor):
    """A tensor without memory. It reads its elements in each operation that uses them; ``copy_`` writes them.

    ::

        state = StoredTensor(store)              # reads nothing
        part = state[1000:2000].view(10, 100)    # a view, which reads nothing
        part.copy_(saved)                        # writes 1000 elements to the store
        part.read()                              # a plain tensor with 1000 elements

    Operators that do not write return plain tensors. Those that write, other than ``copy_``, raise ``RuntimeError``.

    Args:
        store: where the elements lie.
        like: a tensor on the meta device that views them; None: all of them, 1-D.
    """

    store: Store
    _like: torch.Tensor

    @staticmethod
    def __new__(cls, store: Store, like: torch.Tensor | None = None) -> StoredTensor:
        like = torch.empty(store.numel, dtype=store.dtype, device="meta") if like is None else like
        self = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, like.shape, like.stride(), like.storage_offset(), dtype=like.dtype, device=torch.device("cpu")
        )
        self.store, self._like = store, like
        return self

    def __init__(self, *args: Any) -> None:
        pass

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StoredTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    def untyped_storage(self) -> torch.UntypedStorage:
        """A storage without memory, of the size of this tensor: DCP copies a tensor whose storage is larger."""
        return torch.empty(self.nbytes, dtype=torch.uint8, device="meta").untyped_storage()

    def data_ptr(self) -> int:
        raise RuntimeError("a StoredTensor has no memory: use read()")

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read().contiguous().__reduce_ex__(protocol)

    def is_pinned(self, *args: Any) -> bool:
        """False, without a read."""
        return False

    def read(self) -> torch.Tensor:
        """A plain tensor with the elements. Only the run that they span is read."""
        first, last = self._span()
        return self._of(self.store.read(first, last), first)

    def write(self, source: torch.Tensor) -> None:
        """Replace the elements by those of ``source``, which is broadcast and cast as ``copy_`` does."""
        first, last = self._span()
        if self._like.is_contiguous() and self.nbytes == (last - first) * self.store.dtype.itemsize:
            # The bytes as they are: those of a file may begin anywhere, where wider elements could not.
            values = source.to("cpu", self.dtype).expand(self.shape).contiguous()
            self.store.write(first, values.view(-1).view(torch.uint8))
            return
        run = self.store.read(first, last)
        self._of(run, first).copy_(source)
        self.store.write(first, run.view(torch.uint8))

    def _span(self) -> tuple[int, int]:
        """The first element of the store that this tensor views, and the one behind its last."""
        if not self.numel():
            return 0, 0
        like, width, whole = self._like, self.dtype.itemsize, self.store.dtype.itemsize
        first = like.storage_offset()
        last = first + 1 + sum((size - 1) * stride for size, stride in zip(like.shape, like.stride()))
        return first * width // whole, -(-last * width // whole)

    def _of(self, run: torch.Tensor, first: int) -> torch.Tensor:
        """The view of a run of elements that begins at ``first``."""
        like = self._like
        if not self.numel():
            return run.new_empty(like.shape, dtype=like.dtype)
        offset = like.storage_offset() - first * self.store.dtype.itemsize // self.dtype.itemsize
        return run.view(like.dtype).as_strided(like.shape, like.stride(), offset)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, first = kwargs or {}, args[0] if args else None
        if isinstance(first, StoredTensor):
            if func is torch.ops.aten.copy_.default:
                first.write(args[1].read() if isinstance(args[1], StoredTensor) else args[1])
                return first
            if func._schema.is_mutable:
                raise RuntimeError(f"{func} writes to a tensor whose elements lie in a file, or in two memories: use copy_")
            if any(result.alias_info is not None for result in func._schema.returns):
                likes = func(first._like, *args[1:], **kwargs)
                return pytree.tree_map_only(torch.Tensor, lambda like: StoredTensor(first.store, like), likes)
        args, kwargs = pytree.tree_map_only(StoredTensor, StoredTensor.read, (args, kwargs))
        return func(*args, **kwargs)
