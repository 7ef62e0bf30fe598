"""BorrowedEncoding: on a mesh of one rank, the shards are the whole parameters. The model computes with them in place.

It allocates nothing, unless parameters are cast, or copied from the CPU.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import Replicate

from torch_ragged.fsdp.core._dbuffer import Borrowed, DBuffer, MemoryLog, MemoryPool
from torch_ragged.fsdp.core.encodings._plain import Encoding, Shards
from torch_ragged.fsdp.layout._buffer_layout import BufferLayout

__all__ = ["BorrowedEncoding", "plain_encoding"]


class BorrowedEncoding(Encoding):
    """Unsharded parameters that are views of the shards, at fixed addresses.

    ::

        shards     DBuffer Shard(0)       | a | b | c | padding |
        buffer     DBuffer Replicate()    the same memory, if dtype and device are equal

    Args:
        shards: the shards of the group.
    """

    def __init__(self, layout: BufferLayout, rank: int, shards: Shards) -> None:
        super().__init__(layout, rank)
        self._shards, self._borrows = shards, False

    def make_buffers(self, dtype: torch.dtype, device: torch.device, pool: MemoryPool, log: MemoryLog) -> None:
        flat = self._shards.buffer.flat
        self._borrows = not pool.is_required and (flat.dtype, flat.device) == (dtype, device)
        if self._borrows:
            self.buffer = DBuffer(self._layout, Replicate(), self._rank, dtype, device, pool=Borrowed(flat))
        else:
            super().make_buffers(dtype, device, pool, log)

    def buffers(self) -> list[DBuffer]:
        return [] if self._borrows else super().buffers()

    def free(self, keeps_buffer: bool) -> None:
        if not self._borrows:
            super().free(keeps_buffer)


def plain_encoding(layout: BufferLayout, rank: int, shards: Shards) -> Encoding:
    """The encoding of plain parameters."""
    return BorrowedEncoding(layout, rank, shards) if layout.ranks == 1 else Encoding(layout, rank)
