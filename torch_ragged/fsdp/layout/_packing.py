"""Packing tensors into equal shards in a given order: each tensor at the smallest offset at which no block is cut.

Nothing here chooses the order or the shard size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from torch_ragged.fsdp.layout._buffer_layout import TensorSpec

__all__ = ["Kind", "advance", "fits", "place"]


class Kind(NamedTuple):
    """The planner's view of a tensor, without its name and shape. Tensors of equal kind are interchangeable.

    Attributes:
        numel: the number of elements.
        block: the tensor is cut at multiples of ``block`` only.
        period: blocks are counted anew every ``period`` elements.
        unit: if the shard size is a multiple of ``unit``, the tensor can contain whole shards.
    """

    numel: int
    block: int
    period: int
    unit: int

    @staticmethod
    def of(tensor: TensorSpec) -> Kind:
        return _kind(tensor.numel, tensor.block, tensor.period)


@lru_cache(maxsize=65536)
def _kind(numel: int, block: int, period: int) -> Kind:
    period = min(period or numel, numel)
    block = min(block, period) or 1
    return Kind(numel, block, period or 1, block if period == numel or period % block == 0 else period)


def place(kinds: Sequence[Kind], ranks: int, shard: int) -> list[int] | None:
    """The smallest offsets of tensors in this order, in ``ranks`` shards of ``shard`` elements; None if they do not fit."""
    offsets, offset = [], 0
    for kind in kinds:
        end = advance(offset, kind, 1, shard, shard % kind.unit == 0)
        if end is None or end > ranks * shard:
            return None
        offsets.append(end - kind.numel)
        offset = end
    return offsets


def advance(offset: int, kind: Kind, count: int, shard: int, may_span: bool) -> int | None:
    """The offset after ``count`` tensors of ``kind``, each laid out at the smallest possible offset, from ``offset`` on.

    All tensors that fit in the rest of a shard take one step together. A tensor across a boundary takes one step.

    Args:
        offset: the offset to start from.
        kind: the kind of the tensors.
        count: the number of tensors.
        shard: the shard size.
        may_span: whether a tensor may contain whole shards.

    Returns:
        None if a tensor fits at no offset. This is certain if it fits neither in the shard of ``offset`` nor from the start of
        the next shard, because all other shards are like the next one.
    """
    numel, block, period = kind.numel, kind.block, kind.period
    while count:
        room = shard - offset % shard
        inside = min(room // numel, count) if numel else count
        if inside:
            offset += inside * numel
            count -= inside
            continue
        gap = room % period % block  # After this gap, the shard boundary is between two blocks.
        if gap >= room or not (may_span or numel <= room - gap + shard):
            offset += room
            if numel <= shard:
                continue
            gap = shard % period % block
            if gap >= shard or not (may_span or numel <= 2 * shard - gap):
                return None
        offset += gap + numel
        count -= 1
    return offset


def fits(runs: Sequence[tuple[Kind, int]], ranks: int, shard: int, spans: Mapping[Kind, bool]) -> bool:
    """Whether tensors fit into ``ranks`` shards of ``shard`` elements.

    Args:
        runs: in order, each kind with the number of its tensors in a row.
        ranks: the number of shards.
        shard: the shard size.
        spans: for each kind, whether a tensor may contain whole shards.
    """
    offset = 0
    for kind, count in runs:
        end = advance(offset, kind, count, shard, spans[kind])
        if end is None or end > ranks * shard:
            return False
        offset = end
    return True
