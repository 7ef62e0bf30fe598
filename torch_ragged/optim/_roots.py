"""Roots: which rank computes with which whole matrix.

Plans with integers only: no tensors and no process groups, so it works offline for any number of ranks.

A parameter is a *stack* of matrices: one matrix if it has two dimensions, one per expert for a fused (E, R, C) weight. Every
matrix gets one *root*, a rank of the whole mesh in row-major order. HSDP's replicas count too, so they share the work. The
roots of a stack never descend, so that "stack at its roots" is a RaggedShard over the flattened mesh::

    stack of 5 matrices, roots (0, 0, 2, 2, 3)   =   RaggedShard((0,), (2, 0, 2, 1))

The optimizer gives a cost per matrix. Ranks are balanced by the rule "longest processing time first" (Graham 1969): the most
expensive matrix goes to the rank with the lowest load. Each root then splits its matrices into *flights*. One flight after the
other is gathered, computed and sent back; the gather of the next flight is in flight while this flight computes.

Few large matrices leave most ranks without work. If the computation has blocks of rows, some neighbours (2, 4, 8 ranks of one
host) may *share* a matrix: each computes some of its blocks, and they exchange rows. The root is the first of them. Sharing
costs exchanges. So it is chosen only where the most loaded rank has less to do, with the exchanges as a part of its load.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
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
        blocks: the blocks of rows in which a matrix is computed, also by one rank. A matrix has rows along its smaller size.
        exchanges: for each exchange between ranks that share a matrix, how many elements of each row they exchange.
        exchange_cost: the cost of all exchanges of a matrix, in the unit of ``cost``, if each row comes from another rank.
        split: the number of ranks that share each matrix: the root and those behind it.
    """

    shape: tuple[int, ...]
    cost: float
    owners: Optional[tuple[tuple[int, ...], ...]] = None
    kind: Hashable = None
    blocks: int = 1
    exchanges: tuple[int, ...] = ()
    exchange_cost: float = 0.0
    split: int = 1

    @property
    def count(self) -> int:
        """The number of matrices."""
        return math.prod(self.shape[:-2])

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of each matrix."""
        return self.shape[-2], self.shape[-1]

    @property
    def loads(self) -> tuple[float, float]:
        """The work of each of the ranks that share a matrix, and this work with the exchanges."""
        return self.cost / self.split, self.cost / self.split + (1 - 1 / self.split) * self.exchange_cost

    def rows_of(self, member: int) -> tuple[int, int]:
        """The first row that a rank computes, and the one behind its last: the rank ``member`` behind the root."""
        size, each = -(-min(self.matrix) // self.blocks), self.blocks // self.split
        return min(member * each * size, min(self.matrix)), min((member + 1) * each * size, min(self.matrix))


@dataclass(frozen=True)
class Roots:
    """The root of each matrix.

    Attributes:
        of: for each stack, the root of each of its matrices. Roots never descend within a stack.
        splits: for each stack, the number of ranks that share each of its matrices.
        loads: the sum of the costs at each rank.
        time: the load of the most loaded rank, with its exchanges.
    """

    of: tuple[tuple[int, ...], ...]
    splits: tuple[int, ...]
    loads: tuple[float, ...]
    time: float

    @property
    def imbalance(self) -> float:
        """The largest load divided by the mean load; 1.0 is perfect balance, or no work."""
        mean = sum(self.loads) / len(self.loads)
        return max(self.loads) / mean if mean else 1.0


def assign_roots(stacks: Sequence[Stack], ranks: int) -> Roots:
    """Choose the root of every matrix, and how many ranks share it. All ranks choose the same, by the arguments alone.

    If the matrices of a stack are whole on their owners, the owners are the roots; of several replicas, the least loaded.
    """
    best, splits, limit = _assign(stacks, ranks), [1] * len(stacks), sum(stack.cost * stack.count for stack in stacks) / ranks
    finest = [_split(stack, ranks, 0.0) for stack in stacks]
    while splits != finest:  # Smaller pieces are balanced better, and need more exchanges.
        finer = [_split(stack, ranks, limit) for stack in stacks]
        if finer != splits:
            roots = _assign([replace(stack, split=split) for stack, split in zip(stacks, finer)], ranks)
            best = min(best, roots, key=lambda each: each.time)
        splits, limit = finer, limit / 2
    return best


def _split(stack: Stack, ranks: int, limit: float) -> int:
    """The fewest ranks that must share each matrix so that none computes more than ``limit`` with it."""
    if stack.owners is not None:
        return 1
    legal = [split for split in range(1, min(stack.blocks, ranks) + 1) if stack.blocks % split == 0]
    return next((split for split in legal if stack.cost / split <= limit), legal[-1])


def _assign(stacks: Sequence[Stack], ranks: int) -> Roots:
    work, times = [0.0] * ranks, [0.0] * ranks
    of: list[tuple[int, ...]] = [()] * len(stacks)
    order = sorted(range(len(stacks)), key=lambda index: (-stacks[index].loads[1], index))
    for index in order:
        owners = stacks[index].owners
        if owners is not None:
            of[index] = min(owners, key=lambda roots: (max((times[r] for r in roots), default=0.0), roots))
            for rank in of[index]:
                work[rank] += stacks[index].cost
                times[rank] += stacks[index].cost
    for split in sorted({stack.split for stack in stacks}, reverse=True):
        # Ranks that share a matrix wait for each other, so the most loaded one counts.
        heap = [(max(times[start : start + split]), start) for start in range(0, ranks - split + 1, split)]
        heapq.heapify(heap)
        for index in order:
            stack = stacks[index]
            if stack.owners is None and stack.split == split:
                chosen = []
                for _ in range(stack.count):
                    time, start = heap[0]
                    heapq.heapreplace(heap, (time + stack.loads[1], start))
                    chosen.append(start)
                    for rank in range(start, start + split):
                        work[rank] += stack.loads[0]
                of[index] = tuple(sorted(chosen))  # All matrices of a stack have equal costs.
        for time, start in heap:
            times[start : start + split] = [time] * split
    return Roots(tuple(of), tuple(stack.split for stack in stacks), tuple(work), max(times))


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
    # Matrices that several ranks share come first: the ranks must agree on their flights.
    matrices = [
        (index, position, range(root, root + stacks[index].split))
        for index in sorted(range(len(stacks)), key=lambda index: (stacks[index].split == 1, -stacks[index].loads[1], index))
        for position, root in enumerate(of[index])
    ]
    counts = Counter(rank for _, _, team in matrices for rank in team)
    for flights in itertools.count(min(FLIGHTS, max(counts.values(), default=1))):
        result = _fill_flights(stacks, matrices, flights, itemsize, max_root_bytes)
        if result is not None:
            return result
    raise AssertionError("unreachable: with enough flights, every matrix has one of its own")


def _fill_flights(
    stacks: Sequence[Stack],
    matrices: Sequence[tuple[int, int, range]],
    flights: int,
    itemsize: int,
    max_bytes: int | None,
) -> tuple[tuple[int, ...], ...] | None:
    """Assign each matrix, in order of falling cost, to the cheapest flight with room at its ranks. None if none has room."""
    result = [[0] * stack.count for stack in stacks]
    costs: defaultdict[int, list[float]] = defaultdict(lambda: [0.0] * flights)
    sizes: defaultdict[int, list[int]] = defaultdict(lambda: [0] * flights)
    for index, position, team in matrices:
        size = math.prod(stacks[index].matrix) * itemsize
        fits = [f for f in range(flights) if max_bytes is None or all(sizes[rank][f] + size <= max_bytes for rank in team)]
        if not fits:
            return None
        flight = min(fits, key=lambda f: (max(costs[rank][f] for rank in team), f))
        result[index][position] = flight
        for rank in team:
            costs[rank][flight] += stacks[index].loads[1]
            sizes[rank][flight] += size
    return tuple(map(tuple, result))
