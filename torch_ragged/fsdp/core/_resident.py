"""Resident: parameters that stay gathered over some ranks between optimizer steps (ZeRO-2, hierarchical sharding)."""

from __future__ import annotations

import torch

from torch_ragged._kernels.casts import scaled_copy_
from torch_ragged.fsdp.comm._collectives import Collectives, Work, done, wait_all
from torch_ragged.fsdp.comm._hierarchical import Levels
from torch_ragged.fsdp.core._encoding import Encoding
from torch_ragged.fsdp.core._keeper import Keeper
from torch_ragged.fsdp.core._memory_log import MemoryLog
from torch_ragged.fsdp.core._shards import Shards

__all__ = ["Resident"]


class Resident(Keeper):
    """Keeps parameters gathered, in the dtype to compute with, until the optimizer changes them.

    With one rank per node (ZeRO-1, ZeRO-2) that is everything: the gathered buffer, which is not freed. Otherwise it is the
    slots of the ranks with its index in all nodes, and only those of a node are gathered for forward and backward::

        gathered      | n0 j0 | n0 j1 | n1 j0 | n1 j1 |
        resident at j0    ^               ^                one all-gather across nodes, once per optimizer step
        within a node | n0 j0   n0 j1 |                    one all-gather within the node per node's worth of slots,
                                      | n1 j0   n1 j1 |    each in place

    Args:
        levels: the nodes, and the process groups within and across them.
        log: records what is kept.
    """

    gathers_each_pass = False

    def __init__(self, levels: Levels, log: MemoryLog) -> None:
        self.levels, self._log = levels, log
        self.keeps_buffer = levels.within is None
        self._flat: torch.Tensor | None = None
        self._versions: list[int] | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self._flat is None else self._flat.nbytes

    def invalidate(self) -> None:
        self._versions = None

    def reset(self) -> None:
        self._log.note(-self.nbytes)
        self._flat = self._versions = None

    def all_gather(self, shards: Shards, encoding: Encoding, versions: list[int], collectives: Collectives) -> Work:
        """Fill the gathered buffer, in full only if what is resident is not that of ``versions`` of the parameters."""
        # Versions count operations, which are the same on all ranks: they agree on whether to gather across nodes.
        is_current, self._versions = versions == self._versions, versions
        if self.keeps_buffer:
            return done if is_current else encoding.all_gather(shards, collectives)
        gathered, sharded = encoding.buffer, shards.buffer
        gathered.allocate()
        nodes, per_node, shard = self.levels.nodes, self.levels.per_node, sharded.layout.shard_numel
        if self._flat is None or not is_current:
            if self._flat is None:
                with torch.inference_mode(False):  # Later forwards write to it in other modes too.
                    self._flat = gathered.flat.new_empty(nodes * shard)
                self._log.note(self._flat.nbytes)
            mine = self._flat.narrow(0, sharded.rank // per_node * shard, shard)
            scaled_copy_(mine, sharded.flat, non_blocking=True)
            # The all-gather within the node reads what this one brings.
            collectives.all_gather(self._flat, mine, self.levels.across).wait()
        parts = zip(gathered.flat.split(per_node * shard), self._flat.split(shard))
        return wait_all([collectives.all_gather(node, part, self.levels.within) for node, part in parts])
