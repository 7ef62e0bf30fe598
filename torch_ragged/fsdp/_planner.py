"""The planner: the smallest equal shards that hold a group of tensors without cutting their blocks.

For a fixed order and shard size, placing each tensor as early as possible is exact and takes O(n). Feasibility is not
monotone in the shard size S: a tensor that contains whole shards needs S to be a multiple of its block, one that
crosses a single boundary does not. So for each set of block sizes allowed to contain whole shards, the search runs over
multiples of their least common multiple, where feasibility is monotone, and keeps the smallest S of all sets and orders.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from torch_ragged.fsdp._layout import BufferLayout, TensorSpec, total_numel

__all__ = ["place", "plan_layout", "smallest_shard"]

_MAX_SUBSET_BLOCKS = 5  # Above it, only prefixes of the ascending block sizes are tried, not all subsets.


def plan_layout(tensors: Sequence[TensorSpec], ranks: int, alignment: int = 1) -> BufferLayout:
    """Lay ``tensors`` out over ``ranks`` equal shards, the same on every rank without communication.

    Several orders are tried and the best is kept; the order given wins ties, so that debugging stays easy.

    Args:
        tensors: what to lay out, in the user's order.
        ranks: number of shards.
        alignment: the shard size is a multiple of it, in elements.

    Returns:
        A validated layout, with a lower bound on the shard size of any layout.

    Raises:
        ValueError: no tensors, ``ranks`` or ``alignment`` below 1, or a block size below 1.
    """
    tensors = tuple(tensors)
    if not tensors or ranks < 1 or alignment < 1:
        raise ValueError(f"plan_layout needs tensors, ranks >= 1 and alignment >= 1, got {len(tensors)}, {ranks}, {alignment}")
    for tensor in tensors:
        if tensor.block < 1:
            raise ValueError(f"{tensor.name}: block of {tensor.block} elements, expected at least 1")
    bound = lower_bound(tensors, ranks, alignment)
    best: tuple[int, str, list[int]] | None = None
    for name, order in _orders(tensors).items():
        ordered = [tensors[i] for i in order]
        shard = smallest_shard(ordered, ranks, alignment, bound, None if best is None else best[0])
        if shard is not None and (best is None or shard < best[0]):
            best = (shard, name, order)
            if shard == bound:
                break
    assert best is not None, "one shard that holds everything always fits"
    shard, name, order = best
    placed = place([tensors[i] for i in order], ranks, shard)
    assert placed is not None
    offsets = dict(zip(order, placed))
    return BufferLayout(tensors, tuple(offsets[i] for i in range(len(tensors))), shard, ranks, alignment, bound, name)


def lower_bound(tensors: Sequence[TensorSpec], ranks: int, alignment: int) -> int:
    """A shard size below which nothing fits: everything must fit, and so must the largest block."""
    blocks = [min(tensor.block, tensor.numel) for tensor in tensors]
    return max(alignment, _round_up(max(-(-total_numel(tensors) // ranks), *blocks), alignment))


def _orders(tensors: Sequence[TensorSpec]) -> dict[str, list[int]]:
    indices = list(range(len(tensors)))
    return {
        "given": indices,
        "block ascending": sorted(indices, key=lambda i: tensors[i].block),
        "block descending": sorted(indices, key=lambda i: -tensors[i].block),
        "size descending": sorted(indices, key=lambda i: -tensors[i].numel),
    }


def place(tensors: Sequence[TensorSpec], ranks: int, shard: int, spanning: frozenset[int] | None = None) -> list[int] | None:
    """Offsets of ``tensors`` placed in order, each as early as possible, in ``ranks`` shards; None if they do not fit.

    Args:
        spanning: block sizes whose tensors may contain whole shards (all where None).
    """
    offsets, position = [], 0
    for tensor in tensors:
        offset = _earliest(tensor, position, shard, spanning)
        if offset is None or offset + tensor.numel > ranks * shard:
            return None
        offsets.append(offset)
        position = offset + tensor.numel
    return offsets


def _earliest(tensor: TensorSpec, position: int, shard: int, spanning: frozenset[int] | None) -> int | None:
    """The first offset from ``position`` on at which no shard boundary cuts a block of ``tensor``.

    If it does not work out in the shard of ``position`` nor in the next one, it works out nowhere: within a shard, the
    earliest aligned start leaves the least behind the boundary, and all further shards are alike.
    """
    may_span = shard % tensor.block == 0 and (spanning is None or tensor.block in spanning)
    boundary = _round_up(position + 1, shard)
    for start, end in ((position, boundary), (boundary, boundary + shard)):
        if start + tensor.numel <= end:
            return start
        offset = start + (end - start) % tensor.block
        crosses_one = offset + tensor.numel <= end + shard
        if offset < end and (crosses_one or may_span):
            return offset
    return None


def smallest_shard(
    tensors: Sequence[TensorSpec], ranks: int, alignment: int, bound: int, below: int | None = None
) -> int | None:
    """The smallest shard size at which ``tensors`` fit in this order; None if none is smaller than ``below``."""
    best = below
    for spanning in _spanning_sets(tensors):
        step = math.lcm(alignment, *spanning)
        low = -(-bound // step)
        high = -(-_upper_bound(tensors) // step) if best is None else (best - 1) // step
        if high < low or place(tensors, ranks, high * step, spanning) is None:
            continue
        while low < high:
            middle = (low + high) // 2
            if place(tensors, ranks, middle * step, spanning) is None:
                low = middle + 1
            else:
                high = middle
        best = high * step
        if best == bound:
            break
    return best if best != below else None


def _upper_bound(tensors: Sequence[TensorSpec]) -> int:
    return max(1, total_numel(tensors))


def _spanning_sets(tensors: Sequence[TensorSpec]) -> list[frozenset[int]]:
    """Sets of block sizes to try; one that divides another member costs nothing, so blocks of 1 are in all."""
    sizes = sorted({tensor.block for tensor in tensors})
    free = {size for size in sizes if size == 1}
    rest = [size for size in sizes if size > 1]
    if len(rest) <= _MAX_SUBSET_BLOCKS:
        subsets = itertools.chain.from_iterable(itertools.combinations(rest, n) for n in range(len(rest) + 1))
        return [frozenset(free.union(subset)) for subset in subsets]
    return [frozenset(free.union(rest[:n])) for n in range(len(rest) + 1)]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
