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
host) may *share* a matrix: each computes some of its blocks, and they exchange rows. The root is the first of them. While the
matrices of one flight exchange rows, those of the other are computed. Matrices are shared only if the most loaded rank ends
earlier.
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
"""Flights of a step whose matrices are small: enough to overlap transfers with computation."""

MOST_FLIGHTS = 8
FLIGHT_BYTES = 2**28
"""With more matrices, a step has up to ``MOST_FLIGHTS`` of at least so many bytes, whose transfer still takes much longer than
the latency of a collective. Only the first gather and the last scatter have no computation to overlap with."""

_CLOSE_TIMES = 1.02
"""Two times whose ratio is smaller are taken for equal: the model is not more exact."""


@dataclass(frozen=True)
class Stack:
    """The planner's description of a parameter.

    Attributes:
        shape: the global shape, of two to four dimensions.
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
    def work(self) -> float:
        """The work of each of the ranks that share a matrix."""
        return self.cost / self.split

    @property
    def exchange(self) -> float:
        """The cost of what each of these ranks receives from the others, in the unit of ``cost``."""
        return (1 - 1 / self.split) * self.exchange_cost

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
        time: when the most loaded rank ends, with its exchanges, in the unit of the costs.
        exchange: the sum of the exchanges of all ranks.
    """

    of: tuple[tuple[int, ...], ...]
    splits: tuple[int, ...]
    loads: tuple[float, ...]
    time: float
    exchange: float

    @property
    def imbalance(self) -> float:
        """The largest load divided by the mean load; 1.0 is perfect balance, or no work."""
        mean = sum(self.loads) / len(self.loads)
        return max(self.loads) / mean if mean else 1.0


def assign_roots(stacks: Sequence[Stack], ranks: int, shares: Optional[Sequence[float]] = None) -> Roots:
    """Choose the root of every matrix, and how many ranks share it. All ranks choose the same, by the arguments alone.

    With ``shares``, the load of a rank counts in proportion to its share: a rank that has few elements gets few matrices, and
    one without elements gets none. So do the states at the roots.

    If the matrices of a stack are whole on their owners, the owners are the roots; of several replicas, the least loaded. Of
    the other matrices, those of equal cost are shared by equal numbers of ranks. A search changes one of these numbers at a
    time, until no change makes the step shorter. Among assignments that are about as short, it prefers few exchanges.
    """
    kinds = list(dict.fromkeys((stack.cost, stack.blocks) for stack in stacks if stack.owners is None))
    # Floats, but equal on all ranks: each computes them from the same integers, by the same operations on its CPU.
    shares = tuple(shares) if shares is not None else (1.0,) * ranks
    legal = [
        [split for split in range(1, min(blocks, ranks) + 1) if blocks % split == 0 and _teams(shares, split)]
        for _, blocks in kinds
    ]
    found: dict[tuple[int, ...], Roots] = {}

    def assigned(splits: tuple[int, ...]) -> Roots:
        if splits not in found:
            of_kind = dict(zip(kinds, splits))
            found[splits] = _assign(
                [s if s.owners is not None else replace(s, split=of_kind[s.cost, s.blocks]) for s in stacks], shares
            )
        return found[splits]

    def time_of(splits: tuple[int, ...]) -> float:
        return assigned(splits).time

    mean = sum(stack.cost * stack.count for stack in stacks) / ranks
    best = tuple(1 for _ in kinds)
    if time_of(best) > _CLOSE_TIMES * mean:  # One change may make it worse, and several better: so there are several starts.
        limits = [mean / 2**halvings for halvings in range(4)]
        starts = [
            tuple(next((n for n in splits if cost / n <= limit), splits[-1]) for (cost, _), splits in zip(kinds, legal))
            for limit in limits
        ]
        best = min([best, *starts], key=time_of)
    # It ends: each turn is shorter than the one before, and there are finitely many. No clock is read, because ranks must end
    # with the same roots.
    while time_of(best) > _CLOSE_TIMES * mean:
        changed = [(*best[:index], split, *best[index + 1 :]) for index, splits in enumerate(legal) for split in splits]
        shortest = min([best, *changed], key=time_of)
        if shortest == best:
            break
        best = shortest
    about = _CLOSE_TIMES * time_of(best)
    return min((roots for roots in found.values() if roots.time <= about), key=lambda roots: (roots.exchange, roots.time))


def _teams(shares: Sequence[float], split: int) -> list[int]:
    """The first ranks of the neighbours that may share a matrix."""
    return [start for start in range(0, len(shares) - split + 1, split) if min(shares[start : start + split]) > 0]


def _assign(stacks: Sequence[Stack], shares: Sequence[float]) -> Roots:
    """The roots for given numbers of ranks that share a matrix."""
    ranks = len(shares)
    work = [0.0] * ranks
    of: list[tuple[int, ...]] = [()] * len(stacks)
    # Ties are broken by index, here and by rank in the heap: all ranks must choose alike.
    order = sorted(range(len(stacks)), key=lambda index: (-stacks[index].work, index))
    for index in order:
        owners = stacks[index].owners
        if owners is not None:
            of[index] = min(owners, key=lambda roots: (max((work[r] for r in roots), default=0.0), roots))
            for rank in of[index]:
                work[rank] += stacks[index].cost
    loads = [load / share if share else 0.0 for load, share in zip(work, shares)]
    # Large teams come first. Smaller ones, and single matrices, can fill up what they leave uneven.
    for split in sorted({stack.split for stack in stacks}, reverse=True):
        # Ranks that share a matrix wait for each other, so the most loaded one counts.
        team_loads = {start: max(loads[start : start + split]) for start in _teams(shares, split)}
        team_shares = {start: min(shares[start : start + split]) for start in team_loads}
        heap: list[tuple[float, int]] = []  # What each team's load would be with one matrix more.
        last = None
        for index in order:
            stack = stacks[index]
            if stack.owners is None and stack.split == split:
                # The heap has loads with one more matrix of this work. For another work, the order of teams may differ.
                if stack.work != last:
                    heap = [(load + stack.work / team_shares[start], start) for start, load in team_loads.items()]
                    heapq.heapify(heap)
                    last = stack.work
                chosen = []
                for _ in range(stack.count):
                    load, start = heap[0]
                    team_loads[start] = load
                    heapq.heapreplace(heap, (load + stack.work / team_shares[start], start))
                    chosen.append(start)
                    for rank in range(start, start + split):
                        work[rank] += stack.work
                of[index] = tuple(sorted(chosen))  # All matrices of a stack have equal costs.
        for start, load in team_loads.items():
            loads[start : start + split] = [load] * split
    splits = tuple(stack.split for stack in stacks)
    time = max(work) if set(splits) <= {1} else _time(stacks, of, ranks)
    exchange = sum(stack.split * stack.count * stack.exchange for stack in stacks)
    return Roots(tuple(of), splits, tuple(work), time, exchange)


def _time(stacks: Sequence[Stack], of: Sequence[Sequence[int]], ranks: int) -> float:
    """When the last rank ends: while one of two flights exchanges rows, the other one is computed."""
    work, exchange = ([[0.0] * FLIGHTS for _ in range(ranks)] for _ in range(2))
    in_flights = _fill_flights(stacks, _matrices_in_order(stacks, of), FLIGHTS, 0, None)
    assert in_flights is not None  # There is no limit.
    for stack, roots, flights in zip(stacks, of, in_flights):
        for root, flight in zip(roots, flights):
            for rank in range(root, root + stack.split):
                work[rank][flight] += stack.work
                exchange[rank][flight] += stack.exchange
    return max(max(sum(w), sum(e), *map(sum, zip(w, e))) for w, e in zip(work, exchange))


def split_flights(
    stacks: Sequence[Stack], of: Sequence[Sequence[int]], itemsize: int, max_root_bytes: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """The flight of each matrix. There are two flights, or more if matrices are large or ``max_root_bytes`` is small.

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
        # From shapes alone: all ranks raise, before anything is sent.
        if max_root_bytes is not None and stack.count and size > max_root_bytes:
            raise ValueError(
                f"a matrix of {stack.matrix[0]} x {stack.matrix[1]} elements takes {size:,} bytes at its root, more than "
                f"max_root_bytes={max_root_bytes:,}: raise the limit, or keep this parameter out of the matrix groups"
            )
    matrices = _matrices_in_order(stacks, of)
    counts: Counter[int] = Counter()
    nbytes: Counter[int] = Counter()
    for index, _, team in matrices:
        counts.update(team)
        nbytes.update(dict.fromkeys(team, math.prod(stacks[index].matrix) * itemsize))
    wanted = max(nbytes.values(), default=0) // FLIGHT_BYTES
    # All ranks wait for the slowest one in each flight: a flight must have room for the largest matrix beside others.
    total = sum(stack.work * stack.split * stack.count for stack in stacks)
    largest = max((stack.work for stack in stacks if stack.count), default=0.0)
    even = int(total / len(counts) / largest) if largest else 1
    wanted = max(FLIGHTS, min(MOST_FLIGHTS, wanted, even))
    for flights in itertools.count(min(wanted, max(counts.values(), default=1))):
        result = _fill_flights(stacks, matrices, flights, itemsize, max_root_bytes)
        if result is not None:
            return result
    raise AssertionError("unreachable: with enough flights, every matrix has one of its own")


def _matrices_in_order(stacks: Sequence[Stack], of: Sequence[Sequence[int]]) -> list[tuple[int, int, range]]:
    """All matrices, with the ranks that compute each, in the order in which they are assigned to flights.

    Matrices that several ranks share come first: these ranks must agree on their flight.
    """
    order = sorted(range(len(stacks)), key=lambda i: (stacks[i].split == 1, -stacks[i].work - stacks[i].exchange, i))
    return [
        (index, position, range(root, root + stacks[index].split)) for index in order for position, root in enumerate(of[index])
    ]


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
        # By loads of all ranks that share the matrix: they must be in the same flight. Every rank fills the flights of all
        # ranks, as it takes part in their all-to-alls.
        flight = min(fits, key=lambda f: (max(costs[rank][f] for rank in team), f))
        result[index][position] = flight
        for rank in team:
            costs[rank][flight] += stacks[index].work + stacks[index].exchange
            sizes[rank][flight] += size
    return tuple(map(tuple, result))
