"""Orders that mix tensors of several blocks, which fit where no sorted order does.

At each shard boundary only the tensor that lies across it can waste elements: as many as its cut misses a block by. Where
every block but the smallest would miss, an order that always has a tensor of the smallest block at hand wastes nothing;
consumed in proportion, these last to the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_ragged.fsdp.layout._packing import Kind, advance

__all__ = ["interleaved_order"]

_WIDTH = 8  # states kept for each number of tensors placed
_BAND = 2  # tensors that a class may be ahead of its share, or behind
_MAX_CLASSES = 8

_State = tuple[tuple[int, ...], int, int, Any]
"""How many tensors of each class are placed, the position after them, the padding so far, and their order as a linked list."""


def interleaved_order(kinds: Sequence[Kind], ranks: int, shard: int) -> list[int] | None:
    """An order in which tensors fit into ``ranks`` shards of ``shard`` elements; None if this search finds none.

    A dynamic program over how many tensors of each class (those of equal blocks, in the given order) are placed: the least
    position for each such count, for counts near the proportional mix. Its cost is that of placing a few dozen orders.
    """
    classes: dict[tuple[int, int], list[int]] = {}
    for index, kind in enumerate(kinds):
        classes.setdefault((kind.block, kind.period if kind.unit == kind.period else 0), []).append(index)
    if len(classes) > _MAX_CLASSES:
        return None
    members = list(classes.values())
    spans = [shard % kind.unit == 0 for kind in kinds]
    slack = ranks * shard - sum(kind.numel for kind in kinds)
    states: list[_State] = [((0,) * len(members), 0, 0, None)]
    for placed in range(1, len(kinds) + 1):
        shares = [len(own) * placed / len(kinds) for own in members]
        limits = [(max(0, share - _BAND - 1), min(len(own) - 1, share + _BAND - 1)) for own, share in zip(members, shares)]
        found: dict[tuple[int, ...], _State] = {}
        for counts, position, padding, chain in states:
            for c, (low, high) in enumerate(limits):
                if not low <= counts[c] <= high:
                    continue
                index = members[c][counts[c]]
                end = advance(position, kinds[index], 1, shard, spans[index])
                if end is None or (waste := padding + end - position - kinds[index].numel) > slack:
                    continue
                key = (*counts[:c], counts[c] + 1, *counts[c + 1 :])
                if key not in found or end < found[key][1]:
                    found[key] = (key, end, waste, (index, chain))
        states = sorted(found.values(), key=_padding)[:_WIDTH]
        if not states:
            return None
    order, chain = [], states[0][3]
    while chain is not None:
        index, chain = chain
        order.append(index)
    return order[::-1]


def _padding(state: _State) -> tuple[int, tuple[int, ...]]:
    return state[2], state[0]
