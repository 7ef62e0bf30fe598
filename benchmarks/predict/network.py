"""Collectives as arithmetic: rings and trees with a latency and a bandwidth (alpha-beta)."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Link", "Network"]


@dataclass(frozen=True)
class Link:
    """``latency``: seconds per hop of a ring. ``bandwidth``: bytes per second and rank."""

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Network:
    """Nodes of ``per_node`` ranks, joined ``within`` a node and ``across`` nodes; each rank has a card to other nodes.

    A ring of n ranks moves its buffer in n - 1 steps of an n-th each. One that spans nodes is as slow as the cards of the
    ranks that it has in a node, together (parallel rings use all of them), or as a rank's link within the node.
    """

    within: Link
    across: Link
    per_node: int = 8

    def all_gather(self, nbytes: float, ranks: int, in_node: int | None = None) -> float:
        """Seconds to gather ``nbytes`` over ``ranks``, of which ``in_node`` are in one node (as many as fit where None)."""
        if ranks == 1:
            return 0.0
        in_node = min(ranks, self.per_node) if in_node is None else in_node
        nodes = math.ceil(ranks / in_node)
        latency = (nodes - 1) * self.across.latency + (ranks - nodes) * self.within.latency
        return latency + nbytes * (ranks - 1) / ranks / self._bandwidth(nodes, in_node)

    reduce_scatter = all_gather  # The same ring the other way round; adding up is not what bounds it.

    def all_reduce(self, nbytes: float, ranks: int, in_node: int | None = None) -> float:
        """Seconds to reduce ``nbytes`` over ``ranks``: a reduce-scatter and an all-gather; or, where that is faster, a tree of
        nodes, up and down, each with a ring in it. Few bytes take the latency of the tree."""
        if ranks == 1:
            return 0.0
        in_node = min(ranks, self.per_node) if in_node is None else in_node
        nodes = math.ceil(ranks / in_node)
        latency = math.ceil(math.log2(nodes)) * self.across.latency + (in_node - 1) * self.within.latency
        tree = latency + nbytes / self._bandwidth(nodes, in_node)
        return 2 * min(tree, self.all_gather(nbytes, ranks, in_node))

    def _bandwidth(self, nodes: int, in_node: int) -> float:
        """Bytes per second of a rank's ring."""
        if nodes == 1:
            return self.within.bandwidth
        together = in_node * self.across.bandwidth
        return together if in_node == 1 else min(self.within.bandwidth, together)
