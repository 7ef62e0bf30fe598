"""Fit many items into a limited number of characters or lines, for text pictures. Computes with integers only."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeVar

__all__ = ["ends", "share"]

T = TypeVar("T")


def share(sizes: Sequence[int], room: int) -> list[int]:
    """``sizes`` if their sum is at most ``room``; otherwise numbers to scale whose sum is ``room``, each at least one.

    If there are more sizes than ``room``, each gets one and the sum exceeds ``room``.
    """
    total, free = sum(sizes), room - len(sizes)
    if total <= room:
        return list(sizes)
    edges = [count + max(free, 0) * edge // total for count, edge in enumerate([0, *itertools.accumulate(sizes)])]
    return [stop - start for start, stop in itertools.pairwise(edges)]


def ends(items: Sequence[T], room: int) -> tuple[Sequence[T], int, Sequence[T]]:
    """The first items, the number of hidden items, and the last items, such that all fit into ``room`` lines.

    If all items fit, all are first items. Otherwise one line is left for the number of hidden items.
    """
    if len(items) <= room:
        return items, 0, ()
    head, tail = room // 2, (room - 1) // 2
    return items[:head], len(items) - head - tail, items[len(items) - tail :]
