"""Activations elsewhere: what autograd saves of a module's forward lies in host memory, or in files, until its backward.

It must not decide of which modules: :func:`fit` does. It must not change a bit: tensors come back with their strides, and those
that shared memory share it again.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from torch_ragged._register._torch import dtensor_of, dynamo_disabled, dynamo_disabled_in_backward, storage_ids
from torch_ragged.fsdp.core._fsdp_param import local_of
from torch_ragged.fsdp.core._fsdp_param_group import FSDPParamGroup
from torch_ragged.fsdp.core._hooks import tensors_in
from torch_ragged.fsdp.files._scratch_file import BLOCK, ScratchFile

__all__ = ["ActivationOffload", "STAGING"]

STAGING = 1 << 22
"""Bytes of memory through which a file is read, and of that through which one is written."""

_LEAST = 4096
"""Smaller storages stay: they are many, and together small."""


class ActivationOffload:
    """The activations of a model's units on this rank. ::

        forward     | 0     | 1     | 2     |
        write               | 0     | 1     |
        in memory     0       0 1     1 2       2
        backward                              | 2     | 1     | 0     |
        read                                  | 1     | 0     |

    At the end of a forward, a unit's activations begin to leave; at the end of the next unit's forward, their memory is free.
    They come back while backward of the next unit runs. Those of the last unit stay.

    Args:
        to: a folder for files; None: page-locked host memory.
        groups: whose unsharded parameters must not leave, which are freed at other times than activations.
    """

    def __init__(self, device: torch.device, to: str | None, groups: Sequence[FSDPParamGroup]) -> None:
        self.tier: _Tier = _HostTier(device) if to is None else _FileTier(to)
        self._groups = groups
        self._last: weakref.ref[_OffloadedCall] | None = None  # The last forward, whose activations may be on their way.

    def run(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> tuple[Any, int]:
        """A forward whose activations leave, and how many bytes do. Dynamo may compile the forward, and nothing else."""
        call = self._begin(module)
        with torch.autograd.graph.saved_tensors_hooks(call.pack, _SavedTensor.unpack):
            output = forward(*args, **kwargs)
        return output, self._end(call, (args, kwargs, output), output)

    @dynamo_disabled
    def _begin(self, module: nn.Module) -> _OffloadedCall:
        tensors = (*module.parameters(), *module.buffers())
        return _OffloadedCall(storage for tensor in tensors for storage in storage_ids(tensor))

    @dynamo_disabled
    def _end(self, call: _OffloadedCall, around: Any, output: Any) -> int:
        self.end_forward(output, call)  # First, so that one unit at a time is on its way.
        # The next unit saves the outputs, and the one before has made the inputs: to move them would free nothing.
        used = {storage for tensor in tensors_in(around)[0] for storage in storage_ids(tensor)}
        return call.leave(self.tier, used, [group for group in self._groups if group.is_unsharded])

    @dynamo_disabled
    def end_forward(self, output: Any, call: _OffloadedCall | None = None) -> None:
        """A unit's forward has ended, and what has left before it is no longer needed. None: its own activations stay."""
        before = None if self._last is None else self._last()
        self._last = None if call is None else weakref.ref(call)
        if before is None:
            return
        before.settle()  # Not earlier: it was copied while this unit computed.
        reference = weakref.ref(before)  # Weak: a graph that is kept must not keep what lies elsewhere of another one.

        @dynamo_disabled_in_backward
        def read_ahead(gradient: torch.Tensor) -> None:
            if (call := reference()) is not None:
                call.fetch()

        for tensor in tensors_in(output)[0]:
            if tensor.requires_grad:
                tensor.register_hook(read_ahead)


class _OffloadedCall:
    """One forward of a unit.

    Its states: saving, until :meth:`leave`; leaving, until :meth:`settle`; away, until :meth:`fetch`; back.

    Args:
        stays: storages that do not leave.
    """

    def __init__(self, stays: Iterable[int]) -> None:
        self._stays = set(stays)
        self._storages: dict[int, _SavedStorage] = {}
        self._moving: list[weakref.ref[_SavedStorage]] = []  # Weak: autograd holds what it still needs.
        self._copy: _Copy | None = None
        self._is_away = self._is_back = False

    @dynamo_disabled_in_backward  # In forward, too: autograd calls it.
    def pack(self, tensor: torch.Tensor) -> _SavedTensor:
        tensor = tensor.detach()  # Otherwise an output would hold the node that saves it, which would never be freed.
        local = local_of(tensor)
        storage = _movable(local)
        if storage is None or storage._cdata in self._stays:
            return _SavedTensor(tensor, local, None)
        found = self._storages.get(storage._cdata)
        if found is None:
            found = self._storages[storage._cdata] = _SavedStorage(self, local)
        return _SavedTensor(tensor, local, found)

    def leave(self, tier: _Tier, used: set[int], groups: Sequence[FSDPParamGroup]) -> int:
        """All but what is ``used`` outside of the forward begins to leave. Returns its bytes."""
        storages, self._storages = self._storages, {}  # Otherwise they would hold each other.
        moving = [
            each
            for key, each in storages.items()
            if key not in used and each.packed and not any(group.encoding.holds(each.local) for group in groups)
        ]
        self._moving = [weakref.ref(each) for each in moving]
        sources = [_bytes_of(each.local) for each in moving]
        self._copy = tier.write(sources) if sources else None
        return sum(source.nbytes for source in sources)

    def settle(self) -> None:
        """Their memory may be used by others."""
        if self._copy is None or self._is_away:
            return
        self._copy.settle()
        self._is_away = True
        for storage in filter(None, (reference() for reference in self._moving)):
            for packed in storage.packed:
                packed.leave()
            del storage.local

    def fetch(self) -> None:
        """Begin to bring back what is away."""
        if not self._is_away or self._is_back:
            return
        assert self._copy is not None
        self._is_back = True
        for reference, whole in zip(self._moving, self._copy.read()):
            storage = reference()
            if storage is not None:
                storage.back = whole

    def await_back(self) -> None:
        self.fetch()
        assert self._copy is not None
        self._copy.await_read()


class _SavedStorage:
    """Memory that tensors of one call share. Autograd holds it by what was packed, and it holds the call.

    Attributes:
        local: one of the tensors, until their memory is free.
        packed: all of them.
        back: the bytes, after they came back.
    """

    def __init__(self, call: _OffloadedCall, local: torch.Tensor) -> None:
        self.call, self.local = call, local
        self.packed: weakref.WeakSet[_SavedTensor] = weakref.WeakSet()
        self.back: torch.Tensor | None = None


class _SavedTensor:
    """A tensor that autograd has saved. Torch does not look at the version of a tensor that it gets from a hook: this does.

    Args:
        storage: None: the tensor stays.
    """

    def __init__(self, tensor: torch.Tensor, local: torch.Tensor, storage: _SavedStorage | None) -> None:
        self._tensor: torch.Tensor | None = tensor
        self._version, self._was_written = _writes_of(local), False
        self._layout = local.dtype, local.storage_offset(), local.shape, local.stride()
        self._storage = storage
        if storage is not None:
            storage.packed.add(self)

    def leave(self) -> None:
        """The tensor's memory is free."""
        tensor, self._tensor = self._tensor, None
        assert tensor is not None
        # A write since then came before or after the copy has read it: nobody knows which values left.
        self._was_written = _writes_of(local_of(tensor)) != self._version
        self._spec = tensor._spec if isinstance(tensor, DTensor) else None

    @dynamo_disabled_in_backward
    def unpack(self) -> torch.Tensor:
        """The tensor.

        Raises:
            RuntimeError: it was written after autograd had saved it, as torch raises for all saved tensors.
        """
        tensor = self._tensor
        if self._was_written or (tensor is not None and _writes_of(local_of(tensor)) != self._version):
            raise RuntimeError(
                f"a tensor of shape {tuple(self._layout[2])} that backward needs was modified by an inplace operation after "
                "forward: write to a clone of it"
            )
        if tensor is not None:
            return tensor
        assert self._storage is not None
        self._storage.call.await_back()
        whole = self._storage.back
        assert whole is not None
        dtype, *layout = self._layout
        local = torch.empty(0, dtype=dtype, device=whole.device).set_(whole.untyped_storage(), *layout)
        return local if self._spec is None else dtensor_of(local, self._spec)


def _writes_of(local: torch.Tensor) -> int:
    return -1 if local.is_inference() else local._version


def _movable(local: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage of a tensor that may leave. Other kinds of tensors, whose memory is not one storage as it is, stay."""
    is_plain = type(local) is torch.Tensor and local.layout is torch.strided and not local.is_quantized
    if not is_plain or local.is_meta or local.is_conj() or local.is_neg() or local.is_inference():
        return None
    storage = local.untyped_storage()
    return None if storage.nbytes() < _LEAST else storage


def _bytes_of(local: torch.Tensor) -> torch.Tensor:
    """All bytes of the tensor's storage."""
    return torch.empty(0, dtype=torch.uint8, device=local.device).set_(local.untyped_storage())  # type: ignore[call-overload, no-any-return]


# -- tiers ---------------------------------------------------------------------------------------------------------------


class _Copy(Protocol):
    """The bytes of some tensors in a tier. What it wrote to is free when it is deleted."""

    def settle(self) -> None:
        """What the current stream does next may write to the memory of the sources."""

    def read(self) -> list[torch.Tensor]:
        """After :meth:`settle`: new tensors, which have the bytes after :meth:`await_read`."""

    def await_read(self) -> None: ...


class _Tier:
    """Parts of memory or files, each for one call. They stay for the next steps."""

    def __init__(self) -> None:
        self._free: list[tuple[int, Any]] = []

    def reserve(self, sizes: Iterable[int]) -> None:
        """Allocate now what calls of these ``sizes`` take.

        Raises:
            OSError: the folder is missing or read-only, or has no space.
        """
        self._free += [(nbytes, self._allocate(nbytes)) for nbytes in sizes]

    def keep(self, sizes: Iterable[int]) -> None:
        """Free all but what calls of these ``sizes`` take."""
        kept = []
        for nbytes in sorted(sizes, reverse=True):
            if (part := self._smallest(nbytes)) is not None:
                self._free.remove(part)
                kept.append(part)
        self._free = kept  # What is in use now is not kept: it may be larger.

    def take(self, owner: _Copy, nbytes: int) -> Any:
        """A part of at least ``nbytes``, until ``owner`` is deleted."""
        part = self._smallest(nbytes)
        if part is None:
            part = nbytes, self._allocate(nbytes)
        else:
            self._free.remove(part)
        weakref.finalize(owner, self._free.append, part).atexit = False
        return part[1]

    def _smallest(self, nbytes: int) -> tuple[int, Any] | None:
        return min((part for part in self._free if part[0] >= nbytes), key=lambda part: part[0], default=None)

    def write(self, sources: Sequence[torch.Tensor]) -> _Copy:
        """Begin to copy them. They must not be freed before :meth:`_Copy.settle`."""
        raise NotImplementedError

    def _allocate(self, nbytes: int) -> Any:
        raise NotImplementedError


class _HostTier(_Tier):
    """Page-locked host memory, and a stream for each direction."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.inward, self.outward = device, torch.Stream(device), torch.Stream(device)

    def write(self, sources: Sequence[torch.Tensor]) -> _Copy:
        return _HostCopy(self, sources)

    def _allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


class _HostCopy:
    # What copies in flight read and write: no other kernel gets this memory before the current stream has waited for them.
    _sources: Sequence[torch.Tensor] = ()
    _targets: Sequence[torch.Tensor] = ()

    def __init__(self, tier: _HostTier, sources: Sequence[torch.Tensor]) -> None:
        self._tier = tier
        sizes = [source.nbytes for source in sources]
        memory: torch.Tensor = tier.take(self, sum(sizes))
        self._parts = memory[: sum(sizes)].split(sizes)
        self._written, self._filled = torch.Event(tier.device), torch.Event(tier.device)
        tier.outward.wait_stream(torch.accelerator.current_stream(tier.device))  # The kernels that make the sources.
        with tier.outward:
            for part, source in zip(self._parts, sources):
                part.copy_(source, non_blocking=True)
        self._written.record(tier.outward)
        self._sources = sources

    def settle(self) -> None:
        torch.accelerator.current_stream(self._tier.device).wait_event(self._written)
        self._sources = ()

    def __del__(self) -> None:
        if self._sources:  # Of the last unit: backward has used its own memory.
            self.settle()
        if self._targets:  # A graph was dropped.
            self.await_read()

    def read(self) -> list[torch.Tensor]:
        inward = self._tier.inward
        targets = [torch.empty(part.shape, dtype=torch.uint8, device=self._tier.device) for part in self._parts]
        inward.wait_stream(torch.accelerator.current_stream(self._tier.device))  # Kernels may still use this memory.
        with inward:
            for part, target in zip(self._parts, targets):
                target.copy_(part, non_blocking=True)
        self._filled.record(inward)
        self._targets = targets
        return targets

    def await_read(self) -> None:
        torch.accelerator.current_stream(self._tier.device).wait_event(self._filled)
        self._targets = ()


class _FileTier(_Tier):
    """Scratch files, and a thread for each direction. The threads call no torch."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = folder
        # Direct I/O needs addresses that are multiples of a block, and torch aligns tensors to 64 bytes.
        self.outward, self.inward = (mmap.mmap(-1, STAGING) for _ in range(2))
        self.writer, self.reader = (ThreadPoolExecutor(1, thread_name_prefix="torch_ragged-activations") for _ in range(2))

    def write(self, sources: Sequence[torch.Tensor]) -> _Copy:
        return _FileCopy(self, sources)

    def _allocate(self, nbytes: int) -> ScratchFile:
        return ScratchFile(self._folder, dist.get_rank(), _padded(nbytes))


class _FileCopy:
    def __init__(self, tier: _FileTier, sources: Sequence[torch.Tensor]) -> None:
        self._tier, self._sources = tier, sources
        self._sizes = [source.nbytes for source in sources]
        self._file: ScratchFile = tier.take(self, sum(self._sizes))
        self._written = tier.writer.submit(self._write, [source.data_ptr() for source in sources])
        self._filled: Future[None] | None = None

    def settle(self) -> None:
        self._written.result()  # It raises what the thread has raised: the sources are still there then.
        self._sources = ()

    def read(self) -> list[torch.Tensor]:
        targets = [torch.empty(size, dtype=torch.uint8, device="cpu") for size in self._sizes]
        self._filled = self._tier.reader.submit(self._fill, list(targets), [target.data_ptr() for target in targets])
        return targets

    def await_read(self) -> None:
        assert self._filled is not None
        self._filled.result()

    def _write(self, addresses: Sequence[int]) -> None:
        staging = self._tier.outward
        for offset, size, parts in _staged_parts(self._sizes):
            for index, begin, at, count in parts:
                # This call releases the interpreter's lock, and torch's copy would start threads.
                ctypes.memmove(_start_of(staging) + at, addresses[index] + begin, count)
            self._file.write(memoryview(staging)[:size], offset)

    def _fill(self, targets: list[torch.Tensor], addresses: Sequence[int]) -> None:
        staging = self._tier.inward
        for offset, size, parts in _staged_parts(self._sizes):
            self._file.read(memoryview(staging)[:size], offset)
            for index, begin, at, count in parts:
                ctypes.memmove(addresses[index] + begin, _start_of(staging) + at, count)
        # This thread has held them: a graph may be dropped while they are filled. It may live on a little longer than the wait.
        targets.clear()


def _start_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _padded(nbytes: int) -> int:
    return -(-nbytes // BLOCK) * BLOCK


def _staged_parts(sizes: Sequence[int]) -> Iterator[tuple[int, int, list[tuple[int, int, int, int]]]]:
    """Tensors of these ``sizes`` in a row, cut into parts of the staging memory.

    For each part: its offset in the file, its size there, and the ranges of tensors in it, as (tensor, offset in the tensor,
    offset in the part, bytes).
    """
    offset = at = 0
    parts: list[tuple[int, int, int, int]] = []
    for index, size in enumerate(sizes):
        begin = 0
        while begin < size:
            count = min(STAGING - at, size - begin)
            parts.append((index, begin, at, count))
            begin, at = begin + count, at + count
            if at == STAGING:
                yield offset, STAGING, parts
                offset, at, parts = offset + STAGING, 0, []
    if parts:
        yield offset, _padded(at), parts
