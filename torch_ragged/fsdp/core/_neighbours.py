"""Neighbours: the keeper of ``reshard_after_forward=k``, which keeps gathered parameters from forward to backward only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from torch_ragged._ranks.groups import group_of
from torch_ragged.fsdp.comm._collectives import Collectives, Work
from torch_ragged.fsdp.core._dbuffer import MemoryLog
from torch_ragged.fsdp.core._kit import FeaturePart, Need, Terms
from torch_ragged.fsdp.core._mesh import DataParallelMesh
from torch_ragged.fsdp.core.encodings._plain import Encoding, Keeper, Shards

__all__ = ["Neighbours", "NeighboursPart"]


@dataclass(frozen=True)
class NeighboursPart(FeaturePart):
    """``reshard_after_forward=size``."""

    size: int

    @property
    def terms(self) -> Terms:
        instead = ": pass reshard_after_forward=True or False"
        needs = {
            Need.EQUAL_SHARDS: f", because neighbours keep equal parts{instead}",
            Need.FREED: f", which keeps parameters gathered by itself{instead}, or leave placements out",
        }
        return Terms(f"reshard_after_forward={self.size}", needs)

    def keeper(self, dp: DataParallelMesh, encoding: Encoding, log: MemoryLog) -> Keeper | None:
        """None if this is the whole group or a single rank, or if the group computes with other memory than the buffer.

        Making the process group of the neighbours is a collective.
        """
        # With k = 1, nothing is resharded. If all ranks kept a part each, it would be the shard again.
        if dp.shard_group is None or not encoding.computes_in_buffer or not 1 < self.size < dp.ranks:
            return None
        # Neighbours in the order of shards: what they keep lies one after the other in the gathered buffer.
        first = dp.rank - dp.rank % self.size
        ranks = dist.get_process_group_ranks(dp.shard_group)[first : first + self.size]
        return Neighbours(self.size, dp.rank - first, group_of(ranks, parent=dp.shard_group), log)


class Neighbours(Keeper):
    """``reshard_after_forward=k``: each of k neighbouring ranks keeps one k-th of the gathered buffer.

    ::

        gathered   | shard 0 | shard 1 | shard 2 | shard 3 |      4 ranks, k = 2
        kept by    |  rank 0, rank 2   |  rank 1, rank 3   |      {0, 1} and {2, 3} are neighbours

    Backward all-gathers among the neighbours, to the same offsets.

    Args:
        size: k.
        index: the index of this rank among its neighbours.
        group: the process group of the neighbours.
        log: records the bytes that are kept.
    """

    def __init__(self, size: int, index: int, group: dist.ProcessGroup, log: MemoryLog) -> None:
        self.size, self.group, self._index, self._log = size, group, index, log
        self._kept: torch.Tensor | None = None

    def twin(self, log: MemoryLog) -> Neighbours:
        return Neighbours(self.size, 0, self.group, log)

    @property
    def nbytes(self) -> int:
        return 0 if self._kept is None else self._kept.nbytes

    @property
    def holds_part(self) -> bool:
        return self._kept is not None

    def keep(self, encoding: Encoding) -> None:
        """Copy this rank's part out of the gathered buffer, so that its storage can be freed as a whole."""
        gathered = encoding.buffer
        # Whole shards, as k divides their number. So parts are equal, and one after the other.
        numel = gathered.flat.numel() // self.size
        self._kept = gathered.flat.narrow(0, self._index * numel, numel).clone()
        self._log.note(self._kept.nbytes)

    def all_gather(self, shards: Shards, encoding: Encoding, versions: list[int], collectives: Collectives) -> Work:
        """If the neighbours keep the parameters, all-gather among them. Otherwise all-gather the shards."""
        if self._kept is None:
            # All ranks keep a part after the same forward calls, so that all take the same way here.
            return encoding.all_gather(shards, collectives)
        gathered = encoding.buffer
        gathered.allocate()
        # The whole buffer is filled again: each of the neighbours sends the shards of all ranks in its part.
        return collectives.all_gather(gathered.flat, self._kept, self.group)

    def drop(self) -> None:
        if self._kept is not None:
            self._log.note(-self._kept.nbytes)
        self._kept = None
