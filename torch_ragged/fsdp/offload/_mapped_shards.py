"""MappedShards: sharded parameters in a scratch file that is mapped into memory.

They do not decide when parameters are used: the group and the optimizer say it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from torch_ragged.fsdp.core._dbuffer import ALLOCATOR, Borrowed, MemoryPool
from torch_ragged.fsdp.core.encodings._plain import Shards
from torch_ragged.fsdp.files._mapped_file import MappedFile
from torch_ragged.fsdp.layout._buffer_layout import BufferLayout

__all__ = ["MappedShards"]


class MappedShards(Shards):
    """Shards whose buffer is a :class:`MappedFile`: the DTensors of parameters are views of the file.

    ::

        file       | shard of a | shard of b | shard of c | padding |    one file per group and rank
           | mapped into memory
        buffer     DBuffer Shard(0)
    """

    _file: MappedFile | None = None  # None: on the meta device, or without elements.

    def __init__(self, layout: BufferLayout, rank: int, folder: str) -> None:
        super().__init__(layout, rank)
        self._folder = folder

    def allocate(self, dtype: torch.dtype, device: torch.device, is_pinned: bool, pool: MemoryPool = ALLOCATOR) -> None:
        start, stop = self._layout.shard_range(self._rank)
        nbytes = (stop - start) * dtype.itemsize
        self._file = None
        if device.type != "meta" and nbytes:
            self._file = MappedFile(self._folder, dist.get_rank(), nbytes)
            pool = Borrowed(torch.frombuffer(self._file.memory, dtype=torch.uint8).view(dtype))
        super().allocate(dtype, device, is_pinned=False, pool=pool)

    def prepare(self, in_step: bool = False) -> None:
        if self._file is not None:
            self._file.use(in_step)

    def release(self) -> None:
        if self._file is not None:
            self._file.release()

    def check(self) -> None:
        if self._file is not None:
            self._file.check()

    @property
    def file_nbytes(self) -> int:
        return 0 if self._file is None else self._file.nbytes
