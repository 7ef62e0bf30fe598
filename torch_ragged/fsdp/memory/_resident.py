"""Resident: the keeper of parameters that stay gathered until an optimizer step (ZeRO-1, ZeRO-2, hierarchical sharding)."""

from __future__ import annotations

import torch
from torch.distributed.tensor import Replicate, Shard

from torch_ragged.fsdp.comm._collectives import Collectives, Work, done
from torch_ragged.fsdp.comm._hierarchical import Levels
from torch_ragged.fsdp.core._dbuffer import DBuffer, MemoryLog
from torch_ragged.fsdp.core.encodings._plain import Encoding, Shards
from torch_ragged.fsdp.core.keepers._keeper import Keeper

__all__ = ["Resident"]


class Resident(Keeper):
    """Keeps parameters gathered, in their compute dtype, until the optimizer changes them.

    If a node has one rank (ZeRO-1, ZeRO-2), it keeps the whole gathered buffer. Otherwise the rank with index j in its node
    keeps the shards of the ranks with index j in all nodes. Forward and backward all-gather within the node only::

        gathered      | n0 j0 | n0 j1 | n1 j0 | n1 j1 |
        resident at j0    ^               ^                one all-gather across nodes, once per optimizer step
        within a node | n0 j0   n0 j1 |                    one all-gather within the node for the shards of each node,
                                      | n1 j0   n1 j1 |    all in place

    Args:
        levels: the nodes, and the process groups within and across them.
        log: records the bytes that are kept.
    """

    def __init__(self, levels: Levels, log: MemoryLog) -> None:
        self.levels, self._log = levels, log
        self.keeps_buffer = levels.within is None
        self._kept: DBuffer | None = None
        self._versions: list[int] | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self._kept is None else self._kept.nbytes

    def invalidate(self) -> None:
        self._versions = None

    def reset(self) -> None:
        self._log.note(-self.nbytes)
        self._kept = self._versions = None

    def all_gather(self, shards: Shards, encoding: Encoding, versions: list[int], collectives: Collectives) -> Work:
        """Fill the gathered buffer. If the resident parameters have these ``versions``, all-gather within the node only."""
        # Versions count operations, which are equal on all ranks. So ranks agree on whether to all-gather across nodes.
        is_current, self._versions = versions == self._versions, versions
        if self.keeps_buffer:
            return done if is_current else encoding.all_gather(shards, collectives)
        gathered, sharded = encoding.buffer, shards.buffer
        if self._kept is None:
            form = gathered.flat.dtype, gathered.flat.device
            with torch.inference_mode(False):  # Later forwards in other modes write to it, too.
                self._kept = DBuffer(
                    gathered.layout, (Replicate(), Shard(0)), gathered.rank, *form, log=self._log, levels=self.levels
                )
            is_current = False
        if not is_current:
            # Wait: the all-gather within the node reads the result.
            sharded.redistribute(self._kept.placements, collectives, out=self._kept).wait()
        return self._kept.redistribute((Replicate(), Replicate()), collectives, out=gathered)
