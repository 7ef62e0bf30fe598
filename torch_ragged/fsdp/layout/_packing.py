"""Packing tensors into equal shards in a given order: each tensor at the smallest offset at which no block is cut."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from torch_ragged.fsdp.layout._buffer_layout import TensorSpec
from torch_ragged.granularity import ElementRun

__all__ = ["Kind", "advance", "first_that_works", "fits", "last_cut", "may_span", "place", "run_at"]


class Kind(NamedTuple):
    """The planner's view of a tensor, without its name and shape. Tensors of equal kind are interchangeable."""

    numel: int  # The number of elements.
    block: int  # The tensor is cut at multiples of it only. If it has segments, the elements of their largest block.
    period: int  # After so many elements, blocks are counted anew.
    unit: int  # If the shard size is a multiple of it, the tensor can contain whole shards.
    grain: int  # All cuts are at multiples of it. So are the sizes of all shards that the tensor contains.
    runs: tuple[ElementRun, ...] = ()  # Where a tensor with segments is cut; empty for other tensors.

    @staticmethod
    def of(tensor: TensorSpec) -> Kind:
        return _fused(tensor.runs, tensor.period) if tensor.segments else _kind(tensor.numel, tensor.block, tensor.period)


@lru_cache(maxsize=65536)
def _kind(numel: int, block: int, period: int) -> Kind:
    period = min(period or numel, numel)
    block = min(block, period) or 1
    unit = block if period == numel or period % block == 0 else period
    return Kind(numel, block, period or 1, unit, math.gcd(block, unit))


@lru_cache(maxsize=65536)
def _fused(runs: tuple[ElementRun, ...], period: int) -> Kind:
    numel = runs[-1][1]
    if len({(stop - start, block) for start, stop, block in runs}) == 1:
        period = runs[0][1]
    grain = math.gcd(*[start for start, _, _ in runs], *[block for start, stop, block in runs if stop - start > block])
    # If shards are whole periods, all boundaries are like the first one. So they are if shards have whole blocks of all sizes,
    # and one boundary can be between blocks in every run. (Chinese remainder theorem: if it can be in every two of them.)
    unit, step = period or numel, math.lcm(*[block for _, _, block in runs])
    pairs = itertools.combinations({(start % block, block) for start, _, block in runs}, 2)
    if step < unit and all((first - second) % math.gcd(one, other) == 0 for (first, one), (second, other) in pairs):
        unit = step
    return Kind(numel, max(block for _, _, block in runs), period or numel, unit, grain, runs)


def place(kinds: Sequence[Kind], ranks: int, shard: int) -> list[int] | None:
    """The smallest offsets of tensors in this order, in ``ranks`` shards of ``shard`` elements; None if they do not fit."""
    offsets, offset = [], 0
    for kind in kinds:
        end = advance(offset, kind, 1, shard, may_span(kind, shard))
        if end is None or end > ranks * shard:
            return None
        offsets.append(end - kind.numel)
        offset = end
    return offsets


def advance(offset: int, kind: Kind, count: int, shard: int, spans: bool) -> int | None:
    """The offset after ``count`` tensors of ``kind``, each laid out at the smallest possible offset, from ``offset`` on.

    All tensors that fit in the rest of a shard take one step together. A tensor across a boundary takes one step; it may
    contain whole shards if ``spans``. None if a tensor fits at no offset. This is certain if it fits neither in the shard of
    ``offset`` nor from the start of the next one, because all other shards are like the next one.
    """
    numel, block, period, runs = kind.numel, kind.block, kind.period, kind.runs
    while count:
        room = shard - offset % shard
        inside = min(room // numel, count) if numel else count
        if inside:
            offset += inside * numel
            count -= inside
            continue
        # After this gap, the shard boundary is between two blocks.
        gap = room - last_cut(kind, room, shard, spans) if runs else room % period % block
        if gap >= room or not (spans or numel <= room - gap + shard):
            offset += room
            if numel <= shard:
                continue
            gap = shard - last_cut(kind, shard, shard, spans) if runs else shard % period % block
            if gap >= shard or not (spans or numel <= 2 * shard - gap):
                return None
        offset += gap + numel
        count -= 1
    return offset


def may_span(kind: Kind, shard: int) -> bool:
    """Whether a tensor of ``kind`` may contain shards of this size. For one with segments, :func:`last_cut` finds out."""
    return bool(kind.runs) or shard % kind.unit == 0


def last_cut(kind: Kind, room: int, shard: int, spans: bool) -> int:
    """The last cut up to ``room`` in a tensor with segments; 0: none. If ``spans``, no later boundary cuts a block, either."""
    if not spans:
        start, _, block = run_at(kind.runs, room)
        return room - (room - start) % block
    while room > 0 and (back := _back(kind, room, shard)):
        room -= back
    return max(room, 0)


def _back(kind: Kind, cut: int, shard: int) -> int:
    """0 if boundaries at ``cut`` and every ``shard`` elements after it cut no block; or a step back: smaller ones cut one."""
    while cut < kind.numel:
        start, stop, block = run_at(kind.runs, cut)
        if past := (cut - start) % block:
            return past
        others = (stop - cut - 1) // shard  # More boundaries in this run.
        if others and shard % block:
            return cut - start + 1  # One of them cuts a block, until this one is in an earlier run.
        cut += (others + 1) * shard
    return 0


def run_at(runs: Sequence[ElementRun], cut: int) -> ElementRun:
    """The run that begins at ``cut``, or the last one that begins before it."""
    return runs[bisect_left(runs, (cut + 1,)) - 1]


def fits(runs: Sequence[tuple[Kind, int]], ranks: int, shard: int, spans: Mapping[Kind, bool]) -> bool:
    """Whether tensors fit: ``runs`` are kinds in order with their counts, ``spans`` says which may contain whole shards."""
    offset = 0
    for kind, count in runs:
        end = advance(offset, kind, count, shard, spans[kind])
        if end is None or end > ranks * shard:
            return False
        offset = end
    return True


def first_that_works(works: Callable[[int], bool], low: int, high: int) -> int | None:
    """The first number from ``low`` to ``high`` that works, as all larger ones do; None: none. Fast if it is near ``low``."""
    if low > high or not works(high):
        return None
    failed, reach = low - 1, 1
    while low < high and not works(low):
        failed, low, reach = low, min(low + reach, high), 2 * reach
    between = range(failed + 1, low)
    return failed + 1 + bisect_left(between, True, key=works)
