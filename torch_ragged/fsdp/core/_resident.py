"""Resident: parameters that stay gathered over some ranks between optimizer steps (ZeRO-2, hierarchical sharding)."""

from __future__ import annotations

import torch

from torch_ragged._kernels.casts import scaled_copy_
from torch_ragged.fsdp.comm._collectives import Collectives, Work, done, wait_all
from torch_ragged.fsdp.comm._hierarchical import Levels
from torch_ragged.fsdp.core._dbuffer import DBuffer

__all__ = ["Resident"]


class Resident:
    """What one rank keeps of its group's parameters, in the dtype to compute with, while they are current.

    With one rank per node (ZeRO-1, ZeRO-2) that is everything: the gathered buffer, which is not freed. Otherwise it is the
    slots of the ranks with its index in all nodes, and only those of a node are gathered for forward and backward::

        gathered      | n0 j0 | n0 j1 | n1 j0 | n1 j1 |
        resident at j0    ^               ^                one all-gather across nodes, once per optimizer step
        within a node | n0 j0   n0 j1 |                    one all-gather within the node per node's worth of slots,
                                      | n1 j0   n1 j1 |    each in place
    """

    def __init__(self, levels: Levels) -> None:
        self._levels = levels
        self._flat: torch.Tensor | None = None
        self._versions: list[int] | None = None

    @property
    def is_everything(self) -> bool:
        """Whether the gathered buffer itself stays."""
        return self._levels.within is None

    @property
    def nbytes(self) -> int:
        """Bytes kept beside the gathered buffer."""
        return 0 if self._flat is None else self._flat.nbytes

    def invalidate(self) -> None:
        """The parameters may have changed: gather across nodes next time."""
        self._versions = None

    def reset(self) -> None:
        """Forget everything: buffers have changed."""
        self._flat = self._versions = None

    def gather(self, sharded: DBuffer, gathered: DBuffer, versions: list[int], collectives: Collectives) -> Work:
        """Fill ``gathered``, in full only if what is resident is not that of ``versions`` of the parameters."""
        is_current, self._versions = versions == self._versions, versions
        if self.is_everything:
            return done if is_current else gathered.all_gather_from(sharded, collectives)
        gathered.allocate()
        nodes, per_node, shard = self._levels.nodes, self._levels.per_node, sharded.layout.shard_numel
        if self._flat is None or not is_current:
            if self._flat is None:
                with torch.inference_mode(False):  # Later forwards write to it in other modes too.
                    self._flat = gathered.flat.new_empty(nodes * shard)
            mine = self._flat.narrow(0, sharded.rank // per_node * shard, shard)
            scaled_copy_(mine, sharded.flat, non_blocking=True)
            collectives.all_gather(self._flat, mine, self._levels.across).wait()
        parts = zip(gathered.flat.split(per_node * shard), self._flat.split(shard))
        return wait_all([collectives.all_gather(node, part, self._levels.within) for node, part in parts])
