"""The orders of tensors that the planner tries. Nothing here chooses the shard size.

Interleaved orders mix tensors of different block sizes, for shard sizes at which no sorted order fits. Padding arises at shard
boundaries: if one would be inside a block, the tensor there starts later. Tensors of the smallest block need the least padding.
So a good order has one of them at every boundary, and uses them in proportion, so that some are left for the last boundaries.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from torch_ragged.fsdp.layout._packing import Kind, advance, may_span

__all__ = ["interleaved_order", "permutations", "sorted_and_permuted"]

_MAX_COUNTED = 64  # The number of tensors whose orders are counted.
_BEAM_WIDTH = 8  # The number of states that the search keeps after each tensor.
_BAND = 2  # The number of tensors by which a class may differ from its proportional share.
_MAX_CLASSES = 8  # With more classes, the search takes too long.

_SearchState = tuple[tuple[int, ...], int, int, Any]
"""The number of laid-out tensors of each class, the offset after them, their padding, and their order as a linked list."""


def sorted_and_permuted(kinds: Sequence[Kind], most: int) -> Iterator[tuple[str, list[int]]]:
    """Orders by size and by block, with their names; then all orders, if at most ``most`` of them differ."""
    indices = range(len(kinds))
    yield "block ascending", sorted(indices, key=lambda i: kinds[i].block)
    yield "block descending", sorted(indices, key=lambda i: -kinds[i].block)
    yield "size descending", sorted(indices, key=lambda i: -kinds[i].numel)
    yield "size ascending", sorted(indices, key=lambda i: kinds[i].numel)
    yield "block ascending, size descending", sorted(indices, key=lambda i: (kinds[i].block, -kinds[i].numel))

    def orders(left: dict[Kind, list[int]]) -> Iterator[list[int]]:
        """Of orders that only swap equal tensors, one."""
        if not left:
            yield []
        for kind, (first, *others) in left.items():
            rest = {k: others if k == kind else v for k, v in left.items()}
            for tail in orders({k: v for k, v in rest.items() if v}):
                yield [first, *tail]

    if permutations(kinds) <= most:
        grouped: dict[Kind, list[int]] = {}
        for index, kind in enumerate(kinds):
            grouped.setdefault(kind, []).append(index)
        for order in orders(grouped):
            yield "permuted", order


def permutations(kinds: Sequence[Kind]) -> float:
    """The number of orders that differ; infinite if there are many tensors."""
    if len(kinds) > _MAX_COUNTED:
        return math.inf
    return math.factorial(len(kinds)) // math.prod(map(math.factorial, Counter(kinds).values()))


def interleaved_order(kinds: Sequence[Kind], ranks: int, shard: int) -> list[int] | None:
    """An order in which tensors fit into ``ranks`` shards of ``shard`` elements; None if this search finds none.

    A class is the tensors of one block size, in the given order. A dynamic program keeps, for counts of laid-out tensors per
    class, the order that ends at the smallest offset. It looks at counts near the proportional mix only.
    """
    classes: dict[tuple[int, int], list[int]] = {}
    for index, kind in enumerate(kinds):
        classes.setdefault((kind.block, kind.period if kind.unit == kind.period else 0), []).append(index)
    if len(classes) > _MAX_CLASSES:
        return None
    members = list(classes.values())
    spans = [may_span(kind, shard) for kind in kinds]
    slack = ranks * shard - sum(kind.numel for kind in kinds)
    states: list[_SearchState] = [((0,) * len(members), 0, 0, None)]
    for count in range(1, len(kinds) + 1):
        shares = [len(own) * count / len(kinds) for own in members]
        limits = [(max(0, share - _BAND - 1), min(len(own) - 1, share + _BAND - 1)) for own, share in zip(members, shares)]
        found: dict[tuple[int, ...], _SearchState] = {}
        for counts, offset, padding, chain in states:
            for c, (low, high) in enumerate(limits):
                if not low <= counts[c] <= high:
                    continue
                index = members[c][counts[c]]
                end = advance(offset, kinds[index], 1, shard, spans[index])
                if end is None or (waste := padding + end - offset - kinds[index].numel) > slack:
                    continue
                key = (*counts[:c], counts[c] + 1, *counts[c + 1 :])
                if key not in found or end < found[key][1]:
                    found[key] = (key, end, waste, (index, chain))
        states = sorted(found.values(), key=lambda state: (state[2], state[0]))[:_BEAM_WIDTH]
        if not states:
            return None
    order, chain = [], states[0][3]
    while chain is not None:
        index, chain = chain
        order.append(index)
    return order[::-1]
