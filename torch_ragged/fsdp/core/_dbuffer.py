"""DBuffer: the tensors of a layout in one flat allocation per rank, with a placement like a DTensor's."""

from __future__ import annotations

import functools
import itertools
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from torch_ragged._kernels.casts import scaled_copy_
from torch_ragged._register._torch import accelerator_stream, storage_ids
from torch_ragged.fsdp.comm._collectives import Collectives, Levels, Work, wait_all
from torch_ragged.fsdp.comm._reduction import Reduction
from torch_ragged.fsdp.layout._buffer_layout import BufferLayout, RowsLayout

__all__ = [
    "ALLOCATOR",
    "Borrowed",
    "BufferMemory",
    "DBuffer",
    "GroupMemory",
    "MemoryLog",
    "MemoryPool",
    "allocate_storage",
    "copy_stream",
    "current_stream",
    "free_storage",
    "in_buffer_form",
    "is_out_of_memory",
    "order_behind",
]


_moments = itertools.count()
"""One counter for all logs of the process. It orders the events of several logs."""


@dataclass(eq=False)
class MemoryLog:
    """The allocations (positive) and frees (negative) of one kind of buffer: the bytes and the moment of each.

    Attributes:
        is_recording: whether it records now.
        events: (moment, bytes) of each allocation and free since :meth:`start`.
    """

    is_recording: bool = False
    events: list[tuple[int, int]] = field(default_factory=list)

    def start(self) -> None:
        """Drop earlier records, and record from now on."""
        self.is_recording, self.events = True, []

    def stop(self) -> None:
        """Stop recording, and drop all records."""
        self.is_recording, self.events = False, []

    def note(self, nbytes: int) -> None:
        """Record ``nbytes`` that were allocated, or freed if negative."""
        if self.is_recording:  # Mostly not: without a monitor, a long run would collect events without end.
            self.events.append((next(_moments), nbytes))


NO_LOG = MemoryLog()
"""Of buffers that no report counts. It never records."""


@dataclass(eq=False)
class GroupMemory:
    """The logs of one group.

    Attributes:
        gathered: the buffers of gathered parameters, and the memory of keepers.
        gradients: the buffers of unreduced gradients.
        reduced: the reduced shards, which become ``.grad``.
    """

    gathered: MemoryLog = field(default_factory=MemoryLog)
    gradients: MemoryLog = field(default_factory=MemoryLog)
    reduced: MemoryLog = field(default_factory=MemoryLog)


def allocate_storage(tensor: torch.Tensor, log: MemoryLog) -> None:
    """Allocate the storage of ``tensor``, unless it is allocated. ``tensor`` must fill it. Its contents are undefined."""
    storage = tensor.untyped_storage()
    # By the storage, not a new tensor: what autograd has saved of the old one is valid again.
    if storage.nbytes() == 0:
        storage.resize_(tensor.numel() * tensor.element_size())
        log.note(storage.nbytes())


def free_storage(tensor: torch.Tensor, log: MemoryLog) -> None:
    """Free the storage of ``tensor``. The tensor is valid again after :func:`allocate_storage`."""
    storage = tensor.untyped_storage()
    if storage.nbytes():
        log.note(-storage.nbytes())
    storage.resize_(0)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` is an allocation's that finds no memory."""
    # On the CPU, torch has no type for it.
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def current_stream(device: torch.device) -> torch.Stream | None:
    """The current stream of ``device``; None if the device has none."""
    if device.type in ("cpu", "meta"):
        return None
    # Not torch.accelerator.current_stream(), which looks for the kind of accelerator: this is asked for every gradient.
    return accelerator_stream(device.index)


@functools.cache
def copy_stream(device: torch.device) -> torch.Stream:
    """The stream of ``device`` for copies to the CPU beside the computation."""
    return torch.Stream(device)


def order_behind(stream: torch.Stream | None, other: torch.Stream | None) -> None:
    """Later work of ``stream`` waits for the work that ``other`` holds now. Equal streams cost nothing."""
    if stream is None or other is None or stream == other:
        return
    # A capture has waited for the device before it began, and may not wait for streams outside of it.
    if _is_capturing(stream) == _is_capturing(other):
        stream.wait_stream(other)


def _is_capturing(stream: torch.Stream) -> bool:
    if stream.device.type != "cuda":
        return False
    with stream:
        return torch.cuda.is_current_stream_capturing()


_NO_POOL: AbstractContextManager[object] = nullcontext()


class BufferMemory:
    """The memory of one buffer: a storage of its own, which is allocated and freed as a whole. It is allocated when it is made.

    Memory belongs to the stream on which it is allocated: the allocator gives it to later work of that stream at once.
    :meth:`free` orders this stream behind the current one. If the memory was used on further streams, the current stream must
    be ordered behind them first.

    Args:
        flat: fills its storage.
        pool: allocates the storage again; None: torch's allocator.

    Attributes:
        keeps_address: whether the memory has the same address after each :meth:`allocate`.
    """

    keeps_address = False

    def __init__(self, flat: torch.Tensor, pool: torch.cuda.MemPool | None = None) -> None:
        self.flat, self.nbytes, self._pool = flat, flat.nbytes, pool
        self._stream = current_stream(flat.device)

    @property
    def is_allocated(self) -> bool:
        return self.flat.untyped_storage().nbytes() == self.nbytes

    @property
    def is_free(self) -> bool:
        """Whether :meth:`allocate` can be called: no other buffer uses this memory."""
        return True

    def allocate(self) -> None:
        self._stream = current_stream(self.flat.device)
        with _NO_POOL if self._pool is None else torch.cuda.use_mem_pool(self._pool):
            self.flat.untyped_storage().resize_(self.nbytes)

    def free(self) -> None:
        if self._stream is not None:
            # The allocator may give the memory to the next work of its stream, while the current one still uses it.
            order_behind(self._stream, current_stream(self.flat.device))
        self.flat.untyped_storage().resize_(0)


class MemoryPool:
    """Makes the memory of buffers, by torch's allocator.

    Args:
        pool: a pool of torch, as one of memory that NCCL has registered; None: any memory.

    Attributes:
        is_required: whether buffers must lie in this pool. If not, they may borrow other memory.
    """

    def __init__(self, pool: torch.cuda.MemPool | None = None) -> None:
        self.is_required, self._pool = pool is not None, pool

    def memory(self, numel: int, dtype: torch.dtype, device: torch.device, is_pinned: bool) -> BufferMemory:
        with _NO_POOL if self._pool is None else torch.cuda.use_mem_pool(self._pool):
            return BufferMemory(torch.empty(numel, dtype=dtype, device=device, pin_memory=is_pinned), self._pool)


ALLOCATOR = MemoryPool()


class Borrowed(MemoryPool):
    """One tensor that has another owner and fills its storage. Freeing the buffer drops the reference to it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def memory(self, numel: int, dtype: torch.dtype, device: torch.device, is_pinned: bool) -> BufferMemory:
        return _BorrowedMemory(self._tensor.view(-1))  # Flat as every buffer, and still the owner's storage.


class _BorrowedMemory(BufferMemory):
    """Memory of another owner. After :meth:`free`, it cannot be allocated again."""

    def free(self) -> None:
        # The owner's memory stays as it is: autograd or a hook of the user may hold it longer.
        self.flat = torch.empty_like(self.flat[:0])


class DBuffer:
    """A group's tensors in one flat allocation, with a placement for each mesh dimension, as a DTensor.

    ======================  ============  ==================================  =============================
    mesh dimensions         placements    ``flat`` on each rank               ``tensor(i)``
    ======================  ============  ==================================  =============================
    shards                  S             its shard, (S,)                     1-D view of its interval of i
    shards                  R; P          all shards, (ranks * S,)            view of i with its shape
    replicas, shards        R, S; P, S    its shard, (S,)                     1-D view of its interval of i
    nodes, ranks of a node  S, S          its shard, (S,)                     1-D view of its interval of i
    nodes, ranks of a node  R, S; P, S    a shard of each node, (nodes * S,)  none
    ======================  ============  ==================================  =============================

    S is ``Shard(0)``, R is ``Replicate()``, P is ``Partial()``, whose sum over the dimension is not computed yet. One placement
    stands for all mesh dimensions: R and P are whole buffers there, too.

    Views stay at fixed offsets in the storage, which is allocated and freed as a whole. So a view is valid whenever the
    storage is allocated. Views have their own version counters: autograd does not see that the buffer is filled again.

    In a :class:`WeightedLayout`, each rank has its own S, which may be 0. In a :class:`RowsLayout`, a whole tensor has the
    sizes (ranks, rows of a shard, ...), and its rows may be padded.

    Args:
        layout: the offset of each tensor.
        placements: a tuple as above, or one placement.
        rank: this rank among the shards.
        is_pinned: whether the memory is page-locked memory of the CPU, for copies to a GPU.
        pool: makes the memory.
        log: records when memory is allocated and freed.
        levels: the process groups of both mesh dimensions, if shards lie over both.

    Attributes:
        placements: as above, always a tuple.
        memory: the memory, which has one length and one dtype.
        flat: the whole buffer, 1-D.
        nbytes: bytes of the buffer when it is allocated.
    """

    def __init__(
        self,
        layout: BufferLayout,
        placements: Placement | tuple[Placement, ...],
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        is_pinned: bool = False,
        pool: MemoryPool = ALLOCATOR,
        log: MemoryLog = NO_LOG,
        levels: Levels | None = None,
    ) -> None:
        self.placements = placements = placements if isinstance(placements, tuple) else (placements,)
        for each in placements:
            # A ragged placement says which elements a rank has. Here the layout does: every rank has one interval of the
            # buffer.
            if not isinstance(each, (Shard, Replicate, Partial)):
                raise ValueError(f"DBuffer placement must be Shard(0), Replicate() or Partial(), got {each}")
        self.layout, self.rank, self.is_pinned, self.levels = layout, rank, is_pinned, levels
        start, stop = layout.edges[rank], layout.edges[rank + 1]
        numel = stop - start
        self.is_sharded, own = isinstance(placements[-1], Shard), 0  # Where this rank's shard begins in the buffer.
        if not self.is_sharded:
            numel, own = layout.numel, start  # R and P: all shards, in the order of ranks.
        elif levels is not None and not isinstance(placements[0], Shard):
            # Between the two steps of HIERARCHICAL, a rank holds the shards of all ranks with its index in their nodes: one per
            # node.
            self.is_sharded, own = False, rank // levels.per_node * numel
            numel *= levels.nodes
        self._own = slice(own, own + stop - start)
        self._gap_views: tuple[torch.Tensor, ...] | None = None  # As bytes.
        self.nbytes, self.log = numel * dtype.itemsize, log
        log.note(self.nbytes)
        self.memory = pool.memory(numel, dtype, device, is_pinned)
        self.flat = self.memory.flat

    @property
    def resident_nbytes(self) -> int:
        """Bytes that the buffer holds now: ``nbytes``, or 0 if it is freed."""
        return self.nbytes if self.is_allocated else 0

    @property
    def is_allocated(self) -> bool:
        """Whether the buffer has its memory now. If not, :meth:`allocate` gets it."""
        return self.memory.is_allocated

    def allocate(self) -> None:
        """Allocate the memory, unless it is allocated. Its contents are undefined.

        Raises:
            RuntimeError: another buffer uses this one's slot.
        """
        if self.memory.is_allocated:
            return
        self.memory.allocate()
        self.log.note(self.nbytes)

    def free(self) -> None:
        """Free the memory. Views stay, and are valid again after :meth:`allocate`."""
        if self.log.is_recording and self.memory.is_allocated:
            self.log.note(-self.nbytes)
        # Before the next allocation, not when Python drops the last view: autograd may keep views until backward.
        self.memory.free()
        if self.flat is not self.memory.flat:  # Of a borrowed buffer, the references are dropped.
            self.flat, self._gap_views = self.memory.flat, None

    def replace(self, flat: torch.Tensor) -> None:
        """Use the memory of another tensor, of the same length, from now on."""
        self.flat, self.memory.flat, self._gap_views = flat, flat, None

    def tensor(self, index: int) -> torch.Tensor:
        """The part of tensor ``index`` in this buffer, as a view with its own version counter."""
        flat = self.flat.data  # Autograd must not see that the buffer is filled again: it may have saved the view.
        if self.is_sharded:
            begin, end = self.layout.interval(index, self.rank)
            return flat[begin:end]
        tensor = self.layout.tensors[index]
        offset = self.layout.offsets[index]
        if isinstance(self.layout, RowsLayout):
            # Rows of a tensor are apart in the buffer: between those of two ranks lie other tensors' rows.
            sizes = self.layout.sizes(index)
            return flat.view(self.layout.ranks, -1)[:, offset : offset + math.prod(sizes[1:])].view(sizes)
        return flat[offset : offset + tensor.numel].view(tensor.shape)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor``, or a tensor that it wraps, lies in the memory of this buffer."""
        if not self.memory.is_allocated:
            return False
        # By storage, not by address: the allocator uses the address of a freed tensor again.
        mine = self.flat.untyped_storage()._cdata
        if type(tensor) is torch.Tensor and tensor.layout == torch.strided:  # Asked of each parameter, several times a step.
            return tensor.untyped_storage()._cdata == mine
        return mine in storage_ids(tensor)

    def shard(self) -> torch.Tensor:
        """This rank's shard: the whole of a sharded buffer, or a slice of another one. No copy."""
        return self.flat if self.is_sharded else self.flat[self._own]

    def zero_padding(self) -> None:
        """Fill the padding with zeros, so that reductions do not read undefined values. One operation for all gaps."""
        if self._gap_views is None:  # Once: each backward zeroes it, and to make the views takes longer than to zero them.
            start, sizes, at = self.layout.edges[self.rank] if self.is_sharded else 0, list[int](), 0
            for begin, end in self.layout.gaps:
                begin, end = max(begin - start, 0), min(end - start, self.flat.numel())
                if begin < end:
                    sizes += [(begin - at) * self.flat.itemsize, (end - begin) * self.flat.itemsize]
                    at = end
            # As bytes: not all dtypes have the operation.
            self._gap_views = self.flat[:at].view(torch.uint8).split(sizes)[1::2] if sizes else ()
        if self._gap_views:
            torch._foreach_zero_(self._gap_views)

    def redistribute(
        self,
        placements: tuple[Placement, ...],
        collectives: Collectives,
        out: DBuffer | None = None,
        reduction: Reduction = Reduction(),
    ) -> Work:
        """Issue the collective over the one mesh dimension in which ``placements`` differ from those of this buffer.

        ======  ================  ========================================================================================
        change  collective
        ======  ================  ========================================================================================
        S to R  all-gather        to ``out``, which is allocated if necessary. If its dtype or device is another one, this
                                  rank's shard is first cast, or copied from the CPU, into its slice of ``out``
        P to S  reduce-scatter    to ``out``
        P to R  all-reduce        in place
        ======  ================  ========================================================================================

        Shards of one node are contiguous. So within nodes, there is one collective for each node's, in the order of nodes.

        Args:
            out: gets the result; None: this buffer.
            reduction: how P is reduced.
        """
        before, runs, group = self.placements, 1, None
        if len(before) < len(placements):
            before *= len(placements)
        # By class: placements of torch compare slowly, and this runs in each collective.
        dim = len(before) - 1 if type(before[-1]) is not type(placements[-1]) else 0
        if out is None:
            self.placements = placements
            return collectives.all_reduce(self.flat, reduction)  # Each rank has all elements already: no other buffer.
        levels = self.levels or out.levels
        if levels is not None:
            # Within a node for each node's shards; then once over nodes. Ranks of a node are neighbours in the order of shards.
            runs, group = (levels.nodes, levels.within) if dim else (1, levels.across)
        source, reduces = self.flat, isinstance(before[dim], Partial)
        if not reduces:
            out.allocate()  # Not before: a group that is not in use holds no unsharded parameters.
            # Cast into this rank's slice: the all-gather then needs no other buffer, and sends the dtype of ``out``.
            if (source.dtype, source.device) != (out.flat.dtype, out.flat.device):
                source = scaled_copy_(out.shard(), source, non_blocking=True)
        works = []
        # The same number on all ranks, and in one order: each rank has all nodes' shards.
        for target, part in ((out.flat, source),) if runs == 1 else zip(out.flat.chunk(runs), source.chunk(runs)):
            if reduces:
                works.append(collectives.reduce_scatter(target, part, reduction, group))
            else:
                works.append(collectives.all_gather(target, part, group))
        return works[0] if runs == 1 else wait_all(works)


def in_buffer_form(tensor: torch.Tensor, layout: BufferLayout, index: int) -> torch.Tensor:
    """``tensor`` with the sizes of ``DBuffer.tensor(index)``. A view, or a copy if rows have to be padded with zeros."""
    if not isinstance(layout, RowsLayout):
        return tensor
    sizes = layout.sizes(index)
    # The last ranks may have fewer rows, or none. Shards are equal, so their missing rows are padding, and are reduced, too.
    missing = sizes[0] * sizes[1] - tensor.shape[0]
    if missing:
        tensor = torch.nn.functional.pad(tensor, (*(0, 0) * (tensor.ndim - 1), 0, missing))
    return tensor.reshape(sizes)
