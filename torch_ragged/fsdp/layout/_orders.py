"""The orders of tensors that a planner tries, and the search for the smallest size that works.

Nothing here knows how tensors are laid out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from torch_ragged.fsdp.layout._packing import Kind

__all__ = ["distinct_orders", "first_that_works", "permutations", "sorted_orders"]

_MAX_COUNTED = 64  # The number of tensors whose orders are counted.


def sorted_orders(kinds: Sequence[Kind]) -> Iterator[tuple[str, list[int]]]:
    """Orders by size and by block, with their names."""
    indices = range(len(kinds))
    yield "block ascending", sorted(indices, key=lambda i: kinds[i].block)
    yield "block descending", sorted(indices, key=lambda i: -kinds[i].block)
    yield "size descending", sorted(indices, key=lambda i: -kinds[i].numel)
    yield "size ascending", sorted(indices, key=lambda i: kinds[i].numel)
    yield "block ascending, size descending", sorted(indices, key=lambda i: (kinds[i].block, -kinds[i].numel))


def permutations(kinds: Sequence[Kind]) -> float:
    """The number of orders that differ; infinite if there are many tensors."""
    return (
        math.inf
        if len(kinds) > _MAX_COUNTED
        else math.factorial(len(kinds)) // math.prod(map(math.factorial, Counter(kinds).values()))
    )


def distinct_orders(kinds: Sequence[Kind]) -> Iterator[list[int]]:
    """All orders. Of orders that only swap equal tensors, it yields one."""
    if not kinds:
        yield []
        return

    def orders(left: dict[Kind, list[int]]) -> Iterator[list[int]]:
        if not left:
            yield []
        for kind, (first, *others) in left.items():
            rest = {k: others if k == kind else v for k, v in left.items()}
            for tail in orders({k: v for k, v in rest.items() if v}):
                yield [first, *tail]

    grouped: dict[Kind, list[int]] = {}
    for index, kind in enumerate(kinds):
        grouped.setdefault(kind, []).append(index)
    yield from orders(grouped)


def first_that_works(works: Callable[[int], bool], low: int, high: int) -> int | None:
    """The first number from ``low`` to ``high`` for which ``works`` is true; None if there is none.

    If ``works`` is true for a number, it must be true for all larger ones. The search is fast if the answer is near ``low``.
    """
    if low > high or not works(high):
        return None
    failed, reach = low - 1, 1
    while low < high and not works(low):
        failed, low, reach = low, min(low + reach, high), 2 * reach
    while low - failed > 1:
        middle = (failed + low) // 2
        if works(middle):
            low = middle
        else:
            failed = middle
    return low
