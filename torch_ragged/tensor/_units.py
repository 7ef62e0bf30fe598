"""Units: the number of units of each rank of a mesh dimension, stored as runs of ranks with equal numbers.

This module imports nothing of torch. A tensor of a large model is on few of thousands of ranks, so runs save time and memory:
both grow with the number of runs. Only iteration takes time per rank.
"""

from __future__ import annotations

import itertools
import operator
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

__all__ = ["Units"]

_SHORT = 32  # Up to this number of ranks, repr and str have the units of each rank.


class Units(Sequence[int]):
    """One integer >= 0 per rank, immutable. Indexing and iteration work as for a tuple of integers.

    ``(0, 0, 0, 5, 7, 7, 0, 0)`` is four runs of ``(units, ranks)``::

        Units([(0, 3), (5, 1), (7, 2), (0, 2)])

    Args:
        runs: ``(units, ranks)`` of each run, in rank order. Runs without ranks are dropped; equal neighbours are joined.
    """

    __slots__ = ("_ends", "_hash", "_sums", "_values")

    def __init__(self, runs: Iterable[tuple[int, int]]) -> None:
        values: list[int] = []
        ends: list[int] = []
        end = 0
        for units, ranks in runs:
            if ranks < 1:
                continue
            end += ranks
            if values and values[-1] == units:
                ends[-1] = end
            else:
                values.append(units)
                ends.append(end)
        self._set(tuple(values), tuple(ends))

    def _set(self, values: tuple[int, ...], ends: tuple[int, ...]) -> None:
        """Set the fields. Each rank of run ``i`` has ``values[i]`` units; the run ends before rank ``ends[i]``."""
        self._values, self._ends = values, ends
        lengths = map(operator.sub, ends, (0, *ends))
        self._sums = tuple(itertools.accumulate(map(operator.mul, values, lengths)))  # Units up to the end of each run.
        self._hash = hash((values, ends))

    @staticmethod
    def of(units: Sequence[int]) -> Units:
        """The Units of a sequence with one integer per rank. No Python code runs per rank."""
        if isinstance(units, Units):
            return units
        found, count = Units.__new__(Units), len(units)
        changes = itertools.compress(range(1, count), map(operator.ne, units[1:], units))
        ends = (*changes, count) if count else ()
        found._set(tuple([units[end - 1] for end in ends]), ends)
        return found

    @property
    def runs(self) -> Iterator[tuple[int, int]]:
        """``(units, ranks)`` of each run."""
        return zip(self._values, self._lengths)

    @property
    def _lengths(self) -> Iterator[int]:
        """The number of ranks of each run."""
        return map(operator.sub, self._ends, (0, *self._ends))

    @property
    def values(self) -> tuple[int, ...]:
        """The units per rank of each run."""
        return self._values

    @property
    def key(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Plain tuples that are equal if and only if the units are. Comparing and hashing them runs no Python code."""
        return self._values, self._ends

    @property
    def total(self) -> int:
        """The units of all ranks."""
        return self._sums[-1] if self._sums else 0

    def before(self, rank: int) -> int:
        """The sum of the units of all ranks before ``rank``, from 0 to the number of ranks."""
        run = bisect_left(self._ends, rank)
        return self._sums[run] - (self._ends[run] - rank) * self._values[run]

    def owner(self, unit: int) -> int:
        """The rank that has unit number ``unit``. Units are numbered from 0 over the ranks in order."""
        run = bisect_right(self._sums, unit)
        return self._ends[run] - 1 - (self._sums[run] - 1 - unit) // self._values[run]

    def owners(self) -> Iterator[int]:
        """The ranks with at least one unit."""
        starts = (0, *self._ends)
        return itertools.chain.from_iterable(
            [range(start, end) for units, start, end in zip(self._values, starts, self._ends) if units]
        )

    def scaled(self, numerator: int, denominator: int = 1) -> Units:
        """All units times ``numerator / denominator``. The products must be integers."""
        if not numerator:
            return Units([(0, len(self))])
        found = Units.__new__(Units)
        found._set(tuple([units * numerator // denominator for units in self._values]), self._ends)
        return found

    def within(self, start: int, stop: int) -> Units:
        """For each rank, the number of its units whose numbers are in ``[start, stop)``."""
        ranks, start, stop = len(self), max(start, 0), min(stop, self.total)
        if start >= stop:
            return Units([(0, ranks)])
        first, last = self.owner(start), self.owner(stop - 1)
        if first == last:
            return Units([(0, first), (stop - start, 1), (0, ranks - first - 1)])
        runs, position = [(0, first), (self.before(first + 1) - start, 1)], first + 1
        for run in range(bisect_right(self._ends, position), len(self._ends)):
            if position >= last:
                break
            end = min(self._ends[run], last)
            runs.append((self._values[run], end - position))
            position = end
        return Units([*runs, (stop - self.before(last), 1), (0, ranks - last - 1)])

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, rank: Any) -> Any:
        if isinstance(rank, slice):
            return tuple(self)[rank]
        if not -len(self) <= rank < len(self):
            raise IndexError(f"rank {rank} is out of range: these are the units of {len(self)} ranks")
        return self._values[bisect_right(self._ends, rank % len(self))]

    def __iter__(self) -> Iterator[int]:
        if len(self._values) == len(self):  # One run per rank.
            return iter(self._values)
        return itertools.chain.from_iterable(map(itertools.repeat, self._values, self._lengths))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Units):
            return NotImplemented
        return self._hash == other._hash and self._ends == other._ends and self._values == other._values

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return Units, (tuple(self.runs),)

    def __repr__(self) -> str:
        """The tuple as a Python expression: ``(1, 2, 0, 1)``. For many ranks, ``(0,) * 60 + (5, 7) + (0,) * 2``."""
        if len(self) <= _SHORT:
            return repr(tuple(self))
        parts: list[str] = []
        for single, runs in itertools.groupby(self.runs, key=lambda run: run[1] == 1):
            if single:
                parts.append(repr(tuple([units for units, _ in runs])))
            else:
                parts += [f"({units},) * {ranks}" for units, ranks in runs]
        return " + ".join(parts)

    def __str__(self) -> str:
        """The units, separated by commas: ``1,2,0,1``. For many ranks, ``0*60,5,7,0*2``."""
        if len(self) <= _SHORT:
            return ",".join(map(str, self))
        return ",".join(str(units) if ranks == 1 else f"{units}*{ranks}" for units, ranks in self.runs)
