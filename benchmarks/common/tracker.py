"""Counters of memory, collectives and calls for any FSDP or plan: they look at what the code does, not at whose it is.

Memory: a storage counts from the first operation that returns a tensor on it until it is freed or resized to nothing, in
the order of the host. That is what a caching allocator sees, which reuses a block as soon as the host has let it go.

Collectives: ``torch.distributed``'s functions are replaced by ones that note their name and bytes, and do nothing.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from torch_ragged.fsdp.comm import _collectives

__all__ = ["CallCounter", "CollectiveLog", "DispatchCounter", "IssuedCollectives", "MemoryTracker"]

_META = tuple(f"{Path(torch.__file__).parent}/{name}" for name in ("_prims", "_refs", "_meta_registrations", "_decomp"))
"""Kernels of the meta device that are written in Python."""


class MemoryTracker(TorchDispatchMode):
    """Bytes of the storages on ``device`` that live, as a timeline.

    Attributes:
        timeline: (event, bytes) after every change; an event is the number of operations seen so far.
        live: bytes now.
        peak: the most so far.
        marks: (event, label) where :meth:`mark` was called.
    """

    def __init__(self, device: str = "meta") -> None:
        super().__init__()
        self._device = device
        self._sizes: dict[int, int] = {}
        self._event = 0
        self.live = self.peak = 0
        self.timeline: list[tuple[int, int]] = [(0, 0)]
        self.marks: list[tuple[int, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._event += 1
        for leaf in tree_iter(result):
            if isinstance(leaf, torch.Tensor):
                self.see(leaf)
        return result

    def __enter__(self) -> MemoryTracker:
        resize = torch.UntypedStorage.resize_

        def noted(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._sizes:
                self._set(storage._cdata, storage.nbytes())
            return result

        self._patch = mock.patch.object(torch.UntypedStorage, "resize_", noted)
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.stop()

    def see(self, tensor: torch.Tensor) -> None:
        """Count the storage of ``tensor``, if it is not counted already."""
        tensor = getattr(tensor, "_local_tensor", tensor)
        if tensor.device.type != self._device:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = 0
            weakref.finalize(storage, self._forget, key).atexit = False
        self._set(key, storage.nbytes())

    def mark(self, label: str) -> None:
        """Name this moment."""
        self.marks.append((self._event, label))

    def reset_peak(self) -> None:
        """Forget what was; the peak is what lives now."""
        self.peak, self._event = self.live, 0
        self.timeline, self.marks = [(0, self.live)], []

    def _set(self, key: int, nbytes: int) -> None:
        before = self._sizes[key]
        if nbytes != before:
            self._sizes[key] = nbytes
            self.live += nbytes - before
            self.peak = max(self.peak, self.live)
            self.timeline.append((self._event, self.live))

    def _forget(self, key: int) -> None:
        self._set(key, 0)
        del self._sizes[key]


class DispatchCounter(TorchDispatchMode):
    """The number of operators that reach torch's dispatcher, in ``count``."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class CallCounter:
    """The number of calls of Python functions in this thread, in ``count``, without meta kernels: no device has these.

    In another thread, such as autograd's, ``sys.setprofile(counter.see)`` counts.
    """

    count = _depth = 0

    def __enter__(self) -> CallCounter:
        sys.setprofile(self.see)
        return self

    def __exit__(self, *error: Any) -> None:
        sys.setprofile(None)

    def see(self, frame: Any, event: str, argument: Any) -> None:
        if event == "call" and (self._depth or frame.f_code.co_filename.startswith(_META)):
            self._depth += 1
        elif event == "return" and self._depth:
            self._depth -= 1
        else:
            self.count += event == "call"


class _Done:
    """A collective that has ended."""

    def wait(self) -> None:
        return None


class CollectiveLog:
    """Collectives in their ``order``; by kind, their number (``calls``) and the bytes of their larger buffers (``nbytes``)."""

    KINDS = ("all_gather", "reduce_scatter", "all_reduce")

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()
        self.order: list[str] = []

    def clear(self) -> None:
        self.order.clear()
        self.calls.clear()
        self.nbytes.clear()

    def _counting(self, kind: str) -> Callable[..., _Done]:
        def collective(*args: Any, **options: Any) -> _Done:
            tensors = [value for value in (*args, *options.values()) if isinstance(value, torch.Tensor)]
            self.calls[kind] += 1
            self.order.append(kind)
            self.nbytes[kind] += max(tensor.nbytes for tensor in tensors)
            return _Done()

        return collective

    @contextlib.contextmanager
    def installed(self) -> Iterator[CollectiveLog]:
        """Count in place of communicating. FSDP2 looks the functions up at each call, torch_ragged keeps two of them."""
        gather, scatter = self._counting("all_gather"), self._counting("reduce_scatter")
        with contextlib.ExitStack() as stack:
            for module, names in (
                (dist, ("all_gather_single", "all_gather_into_tensor")),
                (_collectives, ("all_gather_single",)),
            ):
                for name in names:
                    if hasattr(module, name):
                        stack.enter_context(mock.patch.object(module, name, gather))
            for module, names in (
                (dist, ("reduce_scatter_single", "reduce_scatter_tensor")),
                (_collectives, ("_reduce_scatter",)),
            ):
                for name in names:
                    if hasattr(module, name):
                        stack.enter_context(mock.patch.object(module, name, scatter))
            stack.enter_context(mock.patch.object(dist, "all_reduce", self._counting("all_reduce")))
            yield self


class IssuedCollectives(TorchDispatchMode):
    """Counts the collectives of the code in its ``with`` block, however it issues them; they run as before.

    Attributes:
        order: (kind, bytes of the larger buffer) of each.
    """

    KINDS = {
        "allgather": "all-gather",
        "reducescatter": "reduce-scatter",
        "allreduce": "all-reduce",
        "alltoall": "all-to-all",
        "sharddimalltoall": "all-to-all",
        "broadcast": "broadcast",
    }
    """By the beginning of an operator's name, without underscores."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[tuple[str, int]] = []

    @property
    def calls(self) -> Counter[str]:
        """The number of collectives of each kind."""
        return Counter(kind for kind, _ in self.order)

    @property
    def nbytes(self) -> Counter[str]:
        """The bytes of the larger buffers, by kind."""
        total: Counter[str] = Counter()
        for kind, nbytes in self.order:
            total[kind] += nbytes
        return total

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # DTensor's turn: it issues collectives of local tensors.
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional", "_dtensor"):
            name = func._overloadpacket.__name__.replace("_", "")
            kind = next((kind for start, kind in self.KINDS.items() if name.startswith(start)), None)
            if kind is not None:
                tensors = [leaf for leaf in tree_iter((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
                self.order.append((kind, max(tensor.nbytes for tensor in tensors)))
        return result
