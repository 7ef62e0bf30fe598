"""A tensor of a checkpoint that is read from its file when its elements are asked for, and only these.

transformers joins checkpoint tensors to parameters with torch's own functions (``stack``, ``cat``, ``chunk``, ``transpose``).
On lazy tensors these functions read nothing: they give another lazy tensor, which knows where its elements are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["LazyTensor"]

Ranges = tuple[range, ...]
"""A box: for each dimension, the indices that are wanted, without gaps."""


class LazyTensor:
    """A tensor with a shape, and a function that reads a box of it.

    torch's functions that are in the table below stay lazy. Any other one gets the whole tensor, read from its file.

    Attributes:
        shape: of the whole tensor.
    """

    def __init__(self, shape: Sequence[int], read: Callable[[Ranges], torch.Tensor]) -> None:
        self.shape = torch.Size(shape)
        self._read = read

    @staticmethod
    def of(source: Any, dtype: torch.dtype | None) -> LazyTensor:
        """The tensor of a file's ``source``, cast to ``dtype``: a slice of ``safetensors.safe_open``, or a tensor."""
        shape = source.shape if isinstance(source, torch.Tensor) else source.get_shape()

        def read(box: Ranges) -> torch.Tensor:
            part = source[tuple(slice(each.start, each.stop) for each in box)] if box else source[...]
            return part if dtype is None else part.to(dtype)

        return LazyTensor(shape, read)

    def read(self, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """The elements of the box at ``offsets``, of shape ``sizes``; nothing else is read."""
        return self._read(tuple(range(offset, offset + size) for offset, size in zip(offsets, sizes)))

    def whole(self) -> torch.Tensor:
        """All elements."""
        return self._read(tuple(map(range, self.shape)))

    def dim(self) -> int:
        return len(self.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def contiguous(self) -> LazyTensor:
        """Itself: what is read is contiguous, or is copied from."""
        return self

    def transpose(self, dim0: int, dim1: int) -> LazyTensor:
        return _transpose(self, dim0, dim1)

    def chunk(self, chunks: int, dim: int = 0) -> tuple[LazyTensor, ...]:
        return _chunk(self, chunks, dim)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.whole(), name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.whole()[index]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple[Any, ...] = (), keywords: Any = None) -> Any:
        keywords = keywords or {}
        if function in _LAZY:
            return _LAZY[function](*args, **keywords)
        plain = torch.utils._pytree.tree_map_only(LazyTensor, LazyTensor.whole, (args, keywords))
        return function(*plain[0], **plain[1])


def _as_lazy(tensor: LazyTensor | torch.Tensor) -> LazyTensor:
    return tensor if isinstance(tensor, LazyTensor) else LazyTensor.of(tensor, None)


def _replaced(box: Ranges, dim: int, wanted: range) -> Ranges:
    return (*box[:dim], wanted, *box[dim + 1 :])


def _stack(tensors: Sequence[Any], dim: int = 0) -> LazyTensor:
    parts = [_as_lazy(each) for each in tensors]
    shape, dim = parts[0].shape, dim % (parts[0].ndim + 1)

    def read(box: Ranges) -> torch.Tensor:
        inner = (*box[:dim], *box[dim + 1 :])
        return torch.stack([parts[i]._read(inner) for i in box[dim]], dim)

    return LazyTensor((*shape[:dim], len(parts), *shape[dim:]), read)


def _cat(tensors: Sequence[Any], dim: int = 0) -> LazyTensor:
    parts = [_as_lazy(each) for each in tensors]
    shape, dim = parts[0].shape, dim % parts[0].ndim

    def read(box: Ranges) -> torch.Tensor:
        found, start = [], 0
        for part in parts:
            size = part.shape[dim]
            first, end = max(box[dim].start - start, 0), min(box[dim].stop - start, size)
            if first < end:
                found.append(part._read(_replaced(box, dim, range(first, end))))
            start += size
        return torch.cat(found, dim)

    return LazyTensor((*shape[:dim], sum(part.shape[dim] for part in parts), *shape[dim + 1 :]), read)


def _chunk(tensor: LazyTensor, chunks: int, dim: int = 0) -> tuple[LazyTensor, ...]:
    dim %= tensor.ndim
    size = tensor.shape[dim]
    step = math.ceil(size / chunks)
    return tuple(_narrow_lazy(tensor, dim, start, min(step, size - start)) for start in range(0, size, step))


def _narrow_lazy(tensor: LazyTensor, dim: int, start: int, length: int) -> LazyTensor:
    def read(box: Ranges) -> torch.Tensor:
        return tensor._read(_replaced(box, dim, range(box[dim].start + start, box[dim].stop + start)))

    return LazyTensor((*tensor.shape[:dim], length, *tensor.shape[dim + 1 :]), read)


def _transpose(tensor: LazyTensor, dim0: int, dim1: int) -> LazyTensor:
    dim0, dim1 = dim0 % tensor.ndim, dim1 % tensor.ndim

    def swapped(values: Sequence[Any]) -> tuple[Any, ...]:
        result = list(values)
        result[dim0], result[dim1] = result[dim1], result[dim0]
        return tuple(result)

    return LazyTensor(swapped(tensor.shape), lambda box: tensor._read(swapped(box)).transpose(dim0, dim1))


_LAZY: dict[Any, Callable[..., Any]] = {torch.stack: _stack, torch.cat: _cat, torch.chunk: _chunk, torch.transpose: _transpose}
