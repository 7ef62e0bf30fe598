"""Neighbours: the few ranks that keep a gathered buffer between them from forward to backward."""

from __future__ import annotations

import torch
import torch.distributed as dist

from torch_ragged._groups import group_of
from torch_ragged.fsdp.comm._collectives import Collectives, Work
from torch_ragged.fsdp.core._dbuffer import DBuffer

__all__ = ["Neighbours"]


class Neighbours:
    """``reshard_after_forward=k``: each of k neighbouring ranks keeps one k-th of the gathered buffer.

    ::

        gathered   | slot 0 | slot 1 | slot 2 | slot 3 |      4 ranks, k = 2
        kept by    | rank 0, rank 2  | rank 1, rank 3  |      {0, 1} and {2, 3} are neighbours

    Backward gathers among them, to the same offsets. Making the group of neighbours is the only communication here.

    Args:
        shards: the process group of all shards.
        rank: this rank in it.
        size: k.
    """

    def __init__(self, shards: dist.ProcessGroup, rank: int, size: int) -> None:
        self.size, self._index = size, rank % size
        first = rank - self._index
        self.group = group_of(dist.get_process_group_ranks(shards)[first : first + size])
        self._kept: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that are kept now."""
        return 0 if self._kept is None else self._kept.nbytes

    @property
    def holds(self) -> bool:
        return self._kept is not None

    def keep(self, gathered: DBuffer) -> None:
        """Copy this rank's part out of ``gathered``, so that its storage can be freed as a whole."""
        numel = gathered.flat.numel() // self.size
        self._kept = gathered.flat.narrow(0, self._index * numel, numel).clone()

    def gather(self, gathered: DBuffer, collectives: Collectives) -> Work:
        """Fill ``gathered`` from what the neighbours keep. One all-gather among them."""
        assert self._kept is not None
        gathered.allocate()
        return collectives.all_gather(gathered.flat, self._kept, self.group)

    def drop(self) -> None:
        """Keep nothing any more."""
        self._kept = None
