"""Levels: the process groups of two mesh dimensions, over both of which shards lie (``HIERARCHICAL``). It moves no data."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

__all__ = ["Levels"]


@dataclass(frozen=True, eq=False)
class Levels:
    """The ranks of a buffer as ``nodes`` nodes of ``per_node`` consecutive ranks each, with two process groups of this rank.

    Rank j of node n holds shard ``n * per_node + j``.

    Attributes:
        across: the ranks with the same j in all nodes.
        within: the ranks of this rank's node; None if a node has one rank.
    """

    across: dist.ProcessGroup
    within: dist.ProcessGroup | None

    @property
    def nodes(self) -> int:
        return self.across.size()

    @property
    def per_node(self) -> int:
        return 1 if self.within is None else self.within.size()
