"""Encoding: what an all-gather sends for a group's parameters, and the memory that the model computes with.

It knows no modules and no states: the group says when to gather, to decode and to free.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import Replicate

from torch_ragged.fsdp.comm._collectives import Collectives, Work
from torch_ragged.fsdp.core._dbuffer import DBuffer, MemoryPool
from torch_ragged.fsdp.core._fsdp_param import FSDPParam
from torch_ragged.fsdp.core._memory_log import MemoryLog
from torch_ragged.fsdp.core._shards import Shards
from torch_ragged.fsdp.core._slots import Slot
from torch_ragged.fsdp.layout._buffer_layout import BufferLayout

__all__ = ["Encoding"]


class Encoding:
    """Plain parameters: the all-gather fills the buffer that the model computes with.

    ::

        shards     DBuffer Shard(0), original dtype
           | a cast, or a copy from the CPU, straight into this rank's slot; or nothing
           | all-gather, in place
        buffer     DBuffer Replicate(), param_dtype; unsharded parameters are views of it

    A group calls ``make_buffers`` once, and ``all_gather``, ``decode`` and ``free`` in each use. Other encodings override what
    they do in another way.

    Attributes:
        buffer: what is gathered, once it is decoded.
        computes_in_buffer: whether unsharded parameters are views of ``buffer``. Their gradients then have its layout.
        makes_params: whether :meth:`decode` makes the unsharded parameter, of a tensor type of the user's.
        keeps_storage: unsharded parameters stay allocated, at their addresses, when they are resharded.
    """

    computes_in_buffer = True
    makes_params = False
    buffer: DBuffer

    def __init__(self, layout: BufferLayout, rank: int) -> None:
        self._layout, self._rank = layout, rank
        self.keeps_storage = False

    def make_buffers(self, dtype: torch.dtype, device: torch.device, pool: MemoryPool | None, log: MemoryLog) -> None:
        """New buffers for parameters that are computed with in ``dtype`` on ``device``; :meth:`free` them after use.

        Args:
            pool: where their memory comes from, if not from the allocator.
            log: records when they are allocated and freed.
        """
        self._log = log
        self.buffer = DBuffer(self._layout, Replicate(), self._rank, dtype, device, pool=pool, log=log)

    def buffers(self) -> list[DBuffer]:
        """All buffers, freed ones too."""
        return [self.buffer]

    @property
    def nbytes_beside(self) -> int:
        """Bytes allocated beside the buffers."""
        return 0

    @property
    def numel_by_dtype(self) -> dict[torch.dtype, int]:
        """Elements of the buffers, by dtype: what persistent buffers have to hold."""
        return {self.buffer.flat.dtype: self._layout.numel}

    @property
    def has_slot(self) -> bool:
        """Whether an all-gather can be issued: no other group uses the slots of the buffers."""
        return all(buffer.is_free for buffer in self.buffers())

    def compute_tensor(self, index: int) -> torch.Tensor:
        """The memory of an unsharded parameter, in the shape that the model computes with."""
        return self.buffer.tensor(index)

    def all_gather(self, shards: Shards, collectives: Collectives) -> Work:
        """Allocate, and issue the all-gather."""
        return self.buffer.all_gather_from(shards.buffer, collectives)

    def decode(self, shards: Shards, keeps_buffer: bool) -> torch.Tensor | None:
        """The all-gather is done: make parameters of what it brought, if that is encoded.

        Args:
            keeps_buffer: whether ``buffer`` has to stay allocated.

        Returns:
            a tensor to compute with, if it is a new one (``makes_params``).
        """
        return None

    def free(self, keeps_buffer: bool) -> None:
        """Free the unsharded parameters, but for a ``buffer`` that has to stay."""
        keeps_storage = self.keeps_storage and not isinstance(self.buffer.pool, Slot)  # A slot keeps its address anyway.
        if not keeps_storage and not keeps_buffer:
            self.buffer.free()

    def free_replaced(self) -> None:
        """Free all memory, also what ``keeps_storage`` keeps: :meth:`make_buffers` follows, and both together may not fit."""
        keeps_storage, self.keeps_storage = self.keeps_storage, False
        self.free(keeps_buffer=False)
        self.keeps_storage = keeps_storage

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor``, or a tensor that it wraps, is an unsharded parameter or a view of one."""
        return self.buffer.holds(tensor)

    def is_intact(self, param: FSDPParam, local: torch.Tensor) -> bool:
        """Whether the memory of an unsharded parameter, whose local tensor is ``local``, is still the encoding's."""
        return param.unsharded.dtype == self.buffer.flat.dtype and self.holds(local)
