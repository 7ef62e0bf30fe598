"""Packing tensors into equal shards in a given order: each as early as possible, no block cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from torch_ragged.fsdp.layout._buffer_layout import TensorSpec

__all__ = ["Kind", "advance", "fits", "place"]


class Kind(NamedTuple):
    """What the planner knows of a tensor: ``numel`` elements, cut only at multiples of ``block`` counted from each ``period``.

    ``unit``: the tensor can contain whole shards if these are multiples of it.
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
    """Offsets of tensors placed in order, each as early as possible, in ``ranks`` shards of ``shard``; None if too few."""
    offsets, position = [], 0
    for kind in kinds:
        end = advance(position, kind, 1, shard, shard % kind.unit == 0)
        if end is None or end > ranks * shard:
            return None
        offsets.append(end - kind.numel)
        position = end
    return offsets


def advance(position: int, kind: Kind, count: int, shard: int, may_span: bool) -> int | None:
    """Where ``count`` equal tensors end that are placed one after another, as early as possible from ``position`` on.

    ``may_span`` says whether they may contain whole shards. None where one fits nowhere: if a tensor does not work out in the
    shard of ``position`` nor from the start of the next one, it never does, since all further shards are alike. One step for
    all tensors that lie in one shard, one for each that crosses a boundary.
    """
    numel, block, period = kind.numel, kind.block, kind.period
    while count:
        room = shard - position % shard
        inside = min(room // numel, count) if numel else count
        if inside:
            position += inside * numel
            count -= inside
            continue
        gap = room % period % block  # So that the boundary falls between blocks.
        if gap >= room or not (may_span or numel <= room - gap + shard):
            position += room
            if numel <= shard:
                continue
            gap = shard % period % block
            if gap >= shard or not (may_span or numel <= 2 * shard - gap):
                return None
        position += gap + numel
        count -= 1
    return position


def fits(runs: Sequence[tuple[Kind, int]], ranks: int, shard: int, spans: Mapping[Kind, bool]) -> bool:
    position = 0
    for kind, count in runs:
        end = advance(position, kind, count, shard, spans[kind])
        if end is None or end > ranks * shard:
            return False
        position = end
    return True
