"""Shards, Encoding, Keeper: where a group's shards lie, what an all-gather of them sends, and what stays gathered after use.

None of them decides when to all-gather, decode, keep or free: the group does.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from torch_ragged.fsdp.comm._collectives import Collectives, Work
from torch_ragged.fsdp.core._dbuffer import ALLOCATOR, NO_LOG, Borrowed, DBuffer, MemoryLog, MemoryPool
from torch_ragged.fsdp.core._fsdp_param import Distribution, FSDPParam, local_of
from torch_ragged.fsdp.layout._buffer_layout import BufferLayout

__all__ = ["Encoding", "Keeper", "Phase", "Shards"]


class Phase(enum.Flag):
    """What unsharded parameters are used for next. An encoding may have other planes for each."""

    FORWARD = enum.auto()
    BACKWARD = enum.auto()
    BOTH = FORWARD | BACKWARD


class Shards:
    """All shards in one buffer, in the parameters' original dtype.

    ::

        buffer     DBuffer Shard(0)    | shard of a | shard of b | shard of c | padding |

    If a tensor type has its own all-gather, it holds its shard itself: see ``TypeShards``.

    Attributes:
        buffer: the shards. ``.grad`` has the buffer's dtype and device, and is pinned if the buffer is.
        are_typed: whether tensor types hold the shards themselves.
        params: the parameters that were made of the shards. The group sets it.
    """

    buffer: DBuffer
    are_typed = False
    params: Sequence[FSDPParam] = ()

    def __init__(self, layout: BufferLayout, rank: int) -> None:
        self._layout, self._rank = layout, rank

    def allocate(self, dtype: torch.dtype, device: torch.device, is_pinned: bool, pool: MemoryPool = ALLOCATOR) -> None:
        """Make a new buffer for parameters of ``dtype``."""
        self.buffer = DBuffer(self._layout, Shard(0), self._rank, dtype, device, is_pinned, pool)
        # The all-gather sends the padding, too. Old memory there may hold NaN, which sums over a buffer would see.
        self.buffer.zero_padding()
        self._storage = self.buffer.flat.untyped_storage()._cdata

    def prepare(self, in_step: bool = False) -> None:
        """A pass reads all shards next, or a step reads and writes them. Plain ones are in memory."""

    def release(self) -> None:
        """All shards were written, and are not used soon."""

    def check(self) -> None:
        """Raise ``OSError`` if what was written to the shards may be lost."""

    @property
    def file_nbytes(self) -> int:
        """The bytes that lie in a file."""
        return 0

    def store(self, index: int, distribution: Distribution, value: torch.Tensor) -> None:
        """Copy this rank's interval of a whole parameter into the buffer."""
        if value.is_meta:  # Nothing to copy. But the type of the values may record what is written to a shard later.
            if index == 0:
                self.buffer.replace(local_of(value).detach().new_empty(self.buffer.flat.numel()))
                self._storage = self.buffer.flat.untyped_storage()._cdata
            return
        # All ranks have the whole parameter here, with equal values: each copies its interval, and nothing is sent.
        start, stop = self._layout.local_range(index, self._rank)
        self.buffer.tensor(index).copy_(distribution.flat(value)[start:stop])

    def load(self, index: int, local: torch.Tensor) -> None:
        """Copy the local tensor of a sharded parameter into the buffer."""
        # Flat: a parameter that is cut by rows has the shape of its rows, and the buffer has none.
        self.buffer.tensor(index).copy_(local.reshape(-1))

    def dtensor(self, index: int, distribution: Distribution) -> DTensor:
        """The sharded parameter, as a view of the buffer."""
        return distribution.sharded(self.buffer.tensor(index), self._layout, index)

    def holds(self, local: torch.Tensor) -> bool:
        """Whether ``local``, the local tensor of a sharded parameter, lies in the buffer."""
        if local.dtype != self.buffer.flat.dtype:
            return False
        if type(local) is torch.Tensor:  # Asked of each parameter in each forward.
            # A number, not a tensor's method: a step asks as many times as there are parameters.
            return local.untyped_storage()._cdata == self._storage
        return self.buffer.holds(local)

    def convert_meta(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """``function`` materializes the parameters, as in ``Module.to_empty``. :meth:`allocate` follows."""


class Encoding:
    """Plain parameters: the all-gather fills the buffer that the model computes with.

    ::

        shards     DBuffer Shard(0), original dtype
           | a cast, or a copy from the CPU, straight into this rank's slot; or nothing
           | all-gather, in place
        buffer     DBuffer Replicate(), param_dtype; unsharded parameters are views of it

    On a mesh of one rank, the shards are the whole parameters. If they need no cast and no copy, the model computes with them
    in place, and ``buffer`` is the same memory, which is never freed.

    A group calls ``make_buffers`` once, and ``all_gather``, ``decode`` and ``free`` in each use. Subclasses override the
    methods in which they differ.

    Args:
        shards: those of a mesh of one rank; None: there are more ranks, or the model computes with other memory.

    Attributes:
        buffer: the gathered parameters, after ``decode``.
        computes_in_buffer: whether unsharded parameters are views of ``buffer``. Then their gradients have its layout.
        makes_params: whether :meth:`decode` makes the unsharded parameters, of the user's tensor types.
        keeps_storage: whether :meth:`free` keeps the memory of unsharded parameters, so that their addresses stay.
        phase: what the next :meth:`all_gather` is for.
        has_phases: whether backward has unsharded parameters of its own.
    """

    computes_in_buffer = True
    makes_params = False
    phase = Phase.BOTH
    has_phases = False
    buffer: DBuffer

    def __init__(self, layout: BufferLayout, rank: int, shards: Shards | None = None) -> None:
        self._layout, self._rank, self._shards = layout, rank, shards
        self.keeps_storage = self._borrows = False

    def lacks(self, phase: Phase) -> bool:
        """Whether unsharded parameters cannot be used in ``phase`` before a call of :meth:`add`."""
        return False

    def add(self, phase: Phase, shards: Shards, collectives: Collectives) -> None:
        """All-gather what ``phase`` needs beside what is unsharded, and wait for it."""
        raise AssertionError(f"{type(self).__name__} lacks nothing")

    def make_buffers(self, dtype: torch.dtype, device: torch.device, pool: MemoryPool, log: MemoryLog) -> None:
        """Make buffers for a computation in ``dtype`` on ``device``. They are allocated: call :meth:`free` after use.

        Args:
            pool: makes the memory of the buffers.
            log: records when they are allocated and freed.
        """
        self._log, self._borrows = log, False
        if self._shards is not None and not pool.is_required:
            flat = self._shards.buffer.flat
            if (flat.dtype, flat.device) == (dtype, device):
                self._borrows, pool = True, Borrowed(flat)
        # Borrowed memory is in no log: the shards own it.
        log_of_buffer = NO_LOG if self._borrows else log
        self.buffer = DBuffer(self._layout, Replicate(), self._rank, dtype, device, pool=pool, log=log_of_buffer)

    def buffers(self) -> list[DBuffer]:
        """All buffers that own their memory, freed ones too."""
        return [] if self._borrows else [self.buffer]

    @property
    def nbytes_beside(self) -> int:
        """Bytes allocated outside of the buffers."""
        return 0

    @property
    def has_slot(self) -> bool:
        """Whether an all-gather can be issued: no other group uses the slots of the buffers."""
        # Equal on all ranks, or one would issue an all-gather ahead of use, and another one would not.
        for buffer in self.buffers():
            if not buffer.memory.is_free:
                return False
        return True

    def compute_tensor(self, index: int) -> torch.Tensor:
        """The memory of an unsharded parameter, in the parameter's shape."""
        return self.buffer.tensor(index)

    def all_gather(self, shards: Shards, collectives: Collectives) -> Work:
        """Allocate the buffers, and issue the all-gather."""
        # In the dtype of the computation: a rank casts its shard, and the others receive the result.
        return shards.buffer.redistribute(self.buffer.placements, collectives, out=self.buffer)

    def decode(self, shards: Shards, keeps_buffer: bool) -> Sequence[torch.Tensor] | None:
        """After the all-gather: decode the gathered bytes. Plain parameters need no decoding.

        Args:
            keeps_buffer: whether ``buffer`` stays allocated.

        Returns:
            if ``makes_params`` and this is the first call, the tensors to compute with; otherwise None.
        """
        return None

    def free(self, keeps_buffer: bool) -> None:
        """Free the unsharded parameters. If ``keeps_buffer``, ``buffer`` stays allocated."""
        # A slot has its address for itself already: freeing it lets other groups use it, and its views stay.
        keeps_storage = self.keeps_storage and not self.buffer.memory.keeps_address
        if not (keeps_storage or keeps_buffer or self._borrows):
            self.buffer.free()

    def free_replaced(self) -> None:
        """Free all memory, also what ``keeps_storage`` keeps: :meth:`make_buffers` follows, and both together may not fit."""
        keeps_storage, self.keeps_storage = self.keeps_storage, False
        self.free(keeps_buffer=False)
        self.keeps_storage = keeps_storage

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor``, or a tensor that it wraps, is an unsharded parameter or a view of one."""
        return self.buffer.holds(tensor)


class Keeper:
    """What the group calls. Without a keeper, each all-gather starts from the shards.

    Attributes:
        keeps_buffer: whether the gathered buffer itself stays allocated.
    """

    keeps_buffer = False

    def twin(self, log: MemoryLog) -> Keeper:
        """A keeper like this one that keeps nothing yet, for a memory report. Its bytes go to ``log``."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes kept beside the gathered buffer."""
        return 0

    @property
    def holds_part(self) -> bool:
        """Whether this rank keeps a part of the gathered parameters from forward to backward now."""
        return False

    def all_gather(self, shards: Shards, encoding: Encoding, versions: list[int], collectives: Collectives) -> Work:
        """Fill the gathered buffer with the parameters in the given ``versions``. At most one all-gather of the shards."""
        raise NotImplementedError

    def keep(self, encoding: Encoding) -> None:
        """Forward is over: keep a part of the gathered parameters for backward."""

    def drop(self) -> None:
        """Free the part kept for backward."""

    def invalidate(self) -> None:
        """The parameters may have changed: the next all-gather starts from the shards."""

    def reset(self) -> None:
        """The group has new buffers: free everything that was kept."""
