"""Roots: which rank computes with which whole matrix.

Plans with integers only: no tensors and no process groups, so it works offline for any number of ranks.

A parameter is a *stack* of matrices: one matrix if it has two dimensions, one per expert for a fused (E, R, C) weight. Every
matrix gets one *root*, a rank of the whole mesh in row-major order. HSDP's replicas count too, so they share the work. The
roots of a stack never descend, so that "stack at its roots" is a RaggedShard over the flattened mesh::

    stack of 5 matrices, roots (0, 0, 2, 2, 3)   =   RaggedShard((0,), (2, 0, 2, 1))

The optimizer gives a cost per matrix. Ranks are balanced by the rule "longest processing time first" (Graham 1969): the most
expensive matrix goes to the rank with the lowest load. Each root then splits its matrices into *flights*. One flight after the
other is gathered, computed and sent back; the gather of the next flight is in flight while this flight computes.
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
"""Flights per step, if ``max_root_bytes`` does not require more. Two are enough to overlap transfers with computation."""


@dataclass(frozen=True)
class Stack:
    """The planner's description of a parameter.

    Attributes:
        shape: the global shape, of two or three dimensions.
        cost: the cost of the computation with one of its matrices, in any unit.
        owners: for each replica, the rank that holds each whole matrix; None if a matrix is cut.
        kind: matrices share a batch only if their shapes and kinds are equal.
    """

    shape: tuple[int, ...]
    cost: float
    owners: Optional[tuple[tuple[int, ...], ...]] = None
    kind: Hashable = None

    @property
    def count(self) -> int:
        """The number of matrices."""
        return math.prod(self.shape[:-2])

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of each matrix."""
        return self.shape[-2], self.shape[-1]


@dataclass(frozen=True)
class Roots:
    """The root of each matrix.

    Attributes:
        of: for each stack, the root of each of its matrices. Roots never descend within a stack.
        loads: the sum of the costs at each rank.
    """

    of: tuple[tuple[int, ...], ...]
    loads: tuple[float, ...]

    @property
    def imbalance(self) -> float:
        """The largest load divided by the mean load; 1.0 is perfect balance, or no work."""
        mean = sum(self.loads) / len(self.loads)
        return max(self.loads) / mean if mean else 1.0


def assign_roots(stacks: Sequence[Stack], ranks: int) -> Roots:
    """Choose the root of every matrix. The result depends only on the arguments, so all ranks choose equal roots.

    If the matrices of a stack are whole on their owners, the owners are the roots; of several replicas, the least loaded.
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
        if stack.owners is None:  # All matrices of a stack have equal costs, so sorting their roots keeps the loads.
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
    """The flight of each matrix: as few flights as possible, and at most two if ``max_root_bytes`` permits.

    Each root spreads its matrices over the flights by cost, so that all roots have nearly equal work in each flight.

    Args:
        stacks, of: the stacks and the roots of their matrices.
        itemsize: the bytes of an element of a gathered matrix.
        max_root_bytes: the most bytes of gathered matrices at a root in one flight; None is no limit.

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
    raise AssertionError("unreachable: with one flight per matrix, every matrix fits")


def _fill_flights(
    stacks: Sequence[Stack],
    matrices: Sequence[tuple[int, int]],
    flights: int,
    itemsize: int,
    max_bytes: int | None,
    result: list[list[int]],
) -> bool:
    """Assign each matrix of one root, in order of falling cost, to the cheapest flight with room. False if none has room."""
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
