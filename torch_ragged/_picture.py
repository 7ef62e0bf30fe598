"""Fitting many things into little room; for text pictures."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeVar

__all__ = ["ends", "share"]

T = TypeVar("T")


def share(sizes: Sequence[int], room: int) -> list[int]:
    """The sizes, if ``room`` is enough for them; else shares of ``room`` to scale, but at least one for each size."""
    total, free = sum(sizes), room - len(sizes)
    if total <= room:
        return list(sizes)
    edges = [count + max(free, 0) * edge // total for count, edge in enumerate([0, *itertools.accumulate(sizes)])]
    return [stop - start for start, stop in itertools.pairwise(edges)]


def ends(items: Sequence[T], room: int) -> tuple[Sequence[T], int, Sequence[T]]:
    """All items if there is room; else the first and the last ones, and how many between them give way to one line."""
    if len(items) <= room:
        return items, 0, ()
    head, tail = room // 2, (room - 1) // 2
    return items[:head], len(items) - head - tail, items[len(items) - tail :]
