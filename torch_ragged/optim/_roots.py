"""Roots: which rank computes with which whole matrix. Integer planning only: works offline, for any number of ranks.

A parameter is a *stack* of matrices: one for two dimensions, one per expert for a fused (E, R, C) weight. Every matrix gets one
root, the ranks being those of the whole mesh in row-major order, replicas of HSDP included: they share the matrices out. The
roots of a stack never descend, so that "stack at its roots" is a RaggedShard over the flattened mesh::

    stack of 5 matrices, roots (0, 0, 2, 2, 3)   =   RaggedShard((0,), (2, 0, 2, 1))

Balance is on the cost that the optimizer gives per matrix, by the rule of the longest processing time first (Graham 1969): the
dearest matrix goes to the rank with the least to do. Each root then splits its matrices into *flights*, which are gathered,
computed and sent back one after another, the transfers of the next one under way while this one computes.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Optional

__all__ = ["Roots", "Stack", "assign_roots", "split_flights"]

FLIGHTS = 2
"""Flights per step, where the bytes at a root do not force more: enough to overlap transfers with computation."""


@dataclass(frozen=True)
class Stack:
    """A parameter as the planner sees it.

    Attributes:
        shape: of the parameter, two dimensions or three.
        cost: of the computation with one of its matrices, in any unit.
        owners: where every matrix is whole on some rank already: for each replica, the rank of each matrix. Else None.
        kind: matrices are computed in one batch only if their shapes and kinds are equal.
    """

    shape: tuple[int, ...]
    cost: float
    owners: Optional[tuple[tuple[int, ...], ...]] = None
    kind: Hashable = None

    @property
    def count(self) -> int:
        """Number of matrices."""
        return math.prod(self.shape[:-2])

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of each matrix."""
        return self.shape[-2], self.shape[-1]


@dataclass(frozen=True)
class Roots:
    """The root of each matrix.

    Attributes:
        of: for each stack the rank of each of its matrices, which never descend within a stack.
        loads: the cost at each rank.
    """

    of: tuple[tuple[int, ...], ...]
    loads: tuple[float, ...]

    @property
    def imbalance(self) -> float:
        """The largest load over the mean load; 1.0 is perfect, and what it is with nothing to do."""
        mean = sum(self.loads) / len(self.loads)
        return max(self.loads) / mean if mean else 1.0


def assign_roots(stacks: Sequence[Stack], ranks: int) -> Roots:
    """Choose the root of every matrix, the same on every rank: a function of its arguments only.

    A stack whose matrices are whole somewhere stays there; of several replicas the least loaded one computes it.
    """
    loads = [0.0] * ranks
    of: list[tuple[int, ...]] = [()] * len(stacks)
    order = sorted(range(len(stacks)), key=lambda index: (-stacks[index].cost, index))
    for index in order:
        owners = stacks[index].owners
        if owners is not None:
            of[index] = min(owners, key=lambda roots: (max((loads[r] for r in roots), default=0.0), roots))
            for rank in of[index]:
                loads[rank] += stacks[index].cost
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    for index in order:
        stack = stacks[index]
        if stack.owners is None:  # Its matrices cost the same: any order of their roots gives the same loads.
            chosen = []
            for _ in range(stack.count):
                load, rank = heap[0]
                heapq.heapreplace(heap, (load + stack.cost, rank))
                chosen.append(rank)
            of[index] = tuple(sorted(chosen))
    for load, rank in heap:
        loads[rank] = load
    return Roots(tuple(of), tuple(loads))


def split_flights(
    stacks: Sequence[Stack], of: Sequence[Sequence[int]], itemsize: int, max_root_bytes: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """The flight of each matrix: as few flights as there can be, at most two unless ``max_root_bytes`` forces more.

    Each root spreads its matrices over the flights by cost, so that all roots are equally busy in each.

    Args:
        stacks, of: the stacks and the roots of their matrices.
        itemsize: bytes of an element of a gathered matrix.
        max_root_bytes: what a root may hold of gathered matrices in one flight; no limit where None.

    Raises:
        ValueError: a single matrix is larger than ``max_root_bytes``.
    """
    for stack in stacks:
        size = math.prod(stack.matrix) * itemsize
        if max_root_bytes is not None and stack.count and size > max_root_bytes:
            raise ValueError(
                f"a matrix of {stack.matrix[0]} x {stack.matrix[1]} elements takes {size:,} bytes at its root, more than "
                f"max_root_bytes={max_root_bytes:,}: raise the limit, or keep this parameter out of the matrix groups"
            )
    at_root: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for index in sorted(range(len(stacks)), key=lambda index: (-stacks[index].cost, index)):
        for position, root in enumerate(of[index]):
            at_root[root].append((index, position))
    most = max(map(len, at_root.values()), default=0)
    for flights in itertools.count(min(FLIGHTS, max(1, most))):
        result = [[0] * stack.count for stack in stacks]
        if all(_fill_flights(stacks, mine, flights, itemsize, max_root_bytes, result) for mine in at_root.values()):
            return tuple(map(tuple, result))
    raise AssertionError("unreachable: with a flight per matrix every matrix has room")


def _fill_flights(
    stacks: Sequence[Stack],
    matrices: Sequence[tuple[int, int]],
    flights: int,
    itemsize: int,
    max_bytes: int | None,
    result: list[list[int]],
) -> bool:
    """Spread one root's matrices, dearest first, each to the flight with the least cost that has room; False if none has."""
    costs, sizes = [0.0] * flights, [0] * flights
    for index, position in matrices:
        size = math.prod(stacks[index].matrix) * itemsize
        open_flights = [f for f in range(flights) if max_bytes is None or sizes[f] + size <= max_bytes]
        if not open_flights:
            return False
        flight = min(open_flights, key=lambda f: (costs[f], f))
        result[index][position] = flight
        costs[flight] += stacks[index].cost
        sizes[flight] += size
    return True
