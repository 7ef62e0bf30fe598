"""Collectives in two levels: ranks of one node, then ranks of the same index in all nodes (``HIERARCHICAL``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from torch_ragged.fsdp.comm._collectives import ProcessGroupCollectives, Reduction, Work, wait_all

__all__ = ["HierarchicalCollectives", "Levels"]


@dataclass(frozen=True, eq=False)
class Levels:
    """A buffer's ranks as ``nodes`` of ``per_node`` consecutive ones, with the process groups of this rank's.

    Rank j of node n has slot ``n * per_node + j``. ``across`` has the ranks with the same j, ``within`` those of the same node.
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
    """Reduces gradients within each node first, then across nodes: each a reduce-scatter."""

    def __init__(self, levels: Levels, everything: dist.ProcessGroup) -> None:
        super().__init__(everything)
        assert levels.within is not None
        self._levels = levels
        self._within, self._across = ProcessGroupCollectives(levels.within), ProcessGroupCollectives(levels.across)
        self.reducers = (self._within, self._across)

    def reduce_scatter(self, output: torch.Tensor, buffer: torch.Tensor, reduction: Reduction) -> Work:
        partial = output.new_empty(self._levels.nodes * output.numel())
        parts = zip(partial.split(output.numel()), buffer.split(self._levels.per_node * output.numel()))
        works = [self._within.reduce_scatter(part, node, reduction) for part, node in parts]
        # A divisor of the user's is applied once.
        rest = Reduction(None if reduction.divisor is None else 1.0, reduction.sum_only)
        return _Then(wait_all(works), lambda: self._across.reduce_scatter(output, partial, rest))


class _Then:
    """A collective that follows another: started when that one is waited for."""

    def __init__(self, first: Work, second: Callable[[], Work]) -> None:
        self._first, self._second = first, second

    def wait(self) -> None:
        self._first.wait()
        self._second().wait()
