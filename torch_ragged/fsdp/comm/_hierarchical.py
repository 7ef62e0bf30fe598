"""Reduce-scatters in two steps for ``HIERARCHICAL``: within each node, then across nodes.

All-gathers stay one collective over all ranks here; ``core/keepers/_resident.py`` gathers within and across nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from torch_ragged.fsdp.comm._collectives import ProcessGroupCollectives, TwoStepWork, Work, wait_all
from torch_ragged.fsdp.comm._reduction import Reduction

__all__ = ["HierarchicalCollectives", "Levels"]


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


class HierarchicalCollectives(ProcessGroupCollectives):
    """Reduces gradients within each node, then across nodes. Each step is a reduce-scatter."""

    def __init__(self, levels: Levels, everything: dist.ProcessGroup) -> None:
        super().__init__(everything)
        assert levels.within is not None
        self._levels = levels
        self._within, self._across = ProcessGroupCollectives(levels.within), ProcessGroupCollectives(levels.across)
        self.reducers = (self._within, self._across)

    def reduce_scatter(self, output: torch.Tensor, buffer: torch.Tensor, reduction: Reduction) -> Work:
        # One reduce-scatter within this node for the shards of each node, because these are contiguous in the buffer. Rank j of
        # this node gets shard j of every node. All ranks of a node issue them in the order of nodes.
        partial = output.new_empty(self._levels.nodes * output.numel())
        parts = zip(partial.split(output.numel()), buffer.split(self._levels.per_node * output.numel()))
        works = [self._within.reduce_scatter(part, node, reduction) for part, node in parts]
        return TwoStepWork(wait_all(works), lambda: self._across.reduce_scatter(output, partial, reduction.rest()))
