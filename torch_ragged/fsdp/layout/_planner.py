"""The planner: the smallest equal shards that hold a group of tensors without cutting their blocks.

For a fixed order and shard size S, the smallest offset for each tensor is optimal and takes O(n). Feasibility is not monotone
in S: if a tensor contains whole shards, S must be a multiple of its block; if it crosses one boundary only, S need not be. So
the search goes through the sets of blocks whose tensors may contain whole shards. For each set, it tries multiples of their
least common multiple, where feasibility is monotone. ``docs/planner.md`` has the proofs, the cost and the measurements.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from torch_ragged.fsdp.layout._bound import Bound, lower_bound
from torch_ragged.fsdp.layout._buffer_layout import BufferLayout, TensorSpec
from torch_ragged.fsdp.layout._orders import interleaved_order, permutations, sorted_and_permuted
from torch_ragged.fsdp.layout._packing import Kind, first_that_works, fits, last_cut, may_span, place
from torch_ragged.fsdp.layout._weighted import check_weights, plan_weighted

__all__ = ["plan_layout", "smallest_shard"]

_MAX_SUBSET_BLOCKS = 5  # For more blocks, the search tries prefixes of the ascending blocks instead of all subsets.
_MAX_PERMUTATIONS = 720  # Up to so many distinct orders, all are tried.
_MAX_MIXED = 6  # The number of shard sizes for which the planner looks for interleaved orders.
_MAX_UNEVEN = 32  # The number of shard sizes for which the planner looks whether a tensor with segments can contain shards.
_CLOSE = 1e-4  # If the shard size is within this fraction of the bound, the planner does not look for interleaved orders.


def plan_layout(
    tensors: Sequence[TensorSpec],
    ranks: int,
    alignment: int = 1,
    *,
    order: str = "auto",
    threshold: float = 0.0,
    weights: Sequence[int] | None = None,
) -> BufferLayout:
    """Lay ``tensors`` out over ``ranks`` equal shards. Every rank computes the same layout, without communication.

    Args:
        tensors: the tensors to lay out, in the user's order. All have one dtype.
        ranks: the number of shards.
        alignment: the shard size is a multiple of it, in elements.
        order: ``"auto"`` uses another order if it makes shards smaller by more than ``threshold``. ``"default"`` keeps the
            user's order, so that the buffer has the order of the module.
        threshold: a fraction of the shard size in the user's order. With ``weights``, it must be 0.
        weights: an integer per rank, at least 0: shards are in proportion to them. A rank of weight 0 has no elements. The
            smallest shards of an order are then found near the bound only, so they may be larger than necessary.

    Returns:
        A validated layout, with a lower bound on the shard size of any layout and its reason. Groups with the same sizes and
        blocks are planned once.

    Raises:
        ValueError: ``tensors`` is empty or has several dtypes, or another argument is out of range.
    """
    tensors = tuple(tensors)
    for name, value in (("ranks", ranks), ("alignment", alignment)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"plan_layout: {name} must be a positive integer, got {value!r}")
    if order not in ("auto", "default"):
        raise ValueError(f"plan_layout: order must be 'auto' or 'default', got {order!r}")
    if not 0 <= threshold < math.inf:
        raise ValueError(f"plan_layout: threshold must be a finite fraction of the shard size, at least 0, got {threshold!r}")
    if not tensors:
        raise ValueError("plan_layout: tensors must have at least one tensor, got none")
    named: dict[Any, str] = {}  # By dtype, its first tensor.
    offsets, end, block = [], 0, 1
    for tensor in tensors:
        named.setdefault(tensor.dtype, tensor.name)
        offsets.append(end)
        end, block = end + tensor.numel, max(block, tensor.block)
    if len(named) > 1:
        examples = ", ".join(f"{dtype} ({name})" for dtype, name in named.items())
        raise ValueError(f"plan_layout: all tensors must have one dtype, got {examples}: plan the tensors of each dtype apart")
    if threshold and weights is not None:
        raise ValueError(f"plan_layout: threshold={threshold!r} with weights={weights!r} is not supported: leave one out")
    if weights is not None and len(set(reduced := check_weights(weights, ranks))) > 1:
        return plan_weighted(tensors, reduced, alignment, order)
    if block == 1:  # They lie one behind the other, cut anywhere. The search would find the same.
        shard = max(1, -(-end // (ranks * alignment))) * alignment
        why = f"all {end:,} elements must fit into {ranks:,} shards"
        return BufferLayout(tensors, tuple(offsets), shard, ranks, alignment, shard, why, "given")
    kinds = tuple(Kind.of(tensor) for tensor in tensors)
    shard, found, name, bound = _plan(kinds, ranks, alignment, order, threshold)
    return BufferLayout(tensors, found, shard, ranks, alignment, bound.shard, bound.explain(tensors), name)


@lru_cache(maxsize=4096)
def _plan(
    kinds: tuple[Kind, ...], ranks: int, alignment: int, policy: str, threshold: float
) -> tuple[int, tuple[int, ...], str, Bound]:
    bound = lower_bound(kinds, ranks, alignment)
    order, name, best = list(range(len(kinds))), "given", smallest_shard(kinds, ranks, alignment, bound.shard)
    assert best is not None, "a shard that holds all tensors fits"
    if policy == "auto" and best > bound.shard:
        below = math.ceil(best - threshold * best)
        for improved in _improvements(kinds, ranks, alignment, bound.shard, below):
            name, order, best = improved
    found = place([kinds[i] for i in order], ranks, best)
    assert found is not None
    return best, tuple(offset for _, offset in sorted(zip(order, found))), name, bound


def _improvements(
    kinds: tuple[Kind, ...], ranks: int, alignment: int, bound: int, below: int
) -> Iterator[tuple[str, list[int], int]]:
    """Orders with shards smaller than ``below``, each smaller than the last: (name, order, shard size). Stops at the bound."""
    for name, order in sorted_and_permuted(kinds, _MAX_PERMUTATIONS):
        shard = smallest_shard([kinds[i] for i in order], ranks, alignment, bound, below)
        if shard is not None:
            yield name, order, shard
            below = shard
        if below == bound:
            return
    if permutations(kinds) <= _MAX_PERMUTATIONS or below <= bound * (1 + _CLOSE):
        return
    for shard in _round_shards(kinds, alignment, bound, below):
        mixed = interleaved_order(kinds, ranks, shard)
        if mixed is not None:
            yield "interleaved", mixed, shard
            return


def _round_shards(kinds: Iterable[Kind], alignment: int, bound: int, below: int) -> list[int]:
    """Shard sizes from ``bound`` to ``below`` at which cuts repeat: multiples of a block or of a divisor of two blocks."""
    units = sorted({kind.block for kind in kinds if kind.block > 1})
    common = {math.gcd(a, b) for a, b in itertools.combinations(units[-_MAX_SUBSET_BLOCKS:], 2)}
    steps = [math.lcm(alignment, unit) for unit in {*units, *common}]
    shards = {(-(-bound // step) + n) * step for step in steps for n in range(_MAX_MIXED)}
    return sorted(shard for shard in shards if shard < below)[:_MAX_MIXED]


# --- the smallest shard of an order --------------------------------------------------------------------------------


def smallest_shard(kinds: Sequence[Kind], ranks: int, alignment: int, bound: int, below: int | None = None) -> int | None:
    """The smallest shard size, from ``bound`` on, at which tensors fit in this order; None if it is not less than ``below``.

    For a tensor with segments, let L be the least common multiple of its blocks, and c an element that is whole blocks from the
    start of every run. If it fits with S, it fits with S' of at least S + L. With S, the first boundary is at r, at most the
    rest of the shard. The rest of the shard of S' is larger by L or more, so one of the elements c + k * L is between r and
    this rest. So the tensor has as many elements before the boundary, or more, and ends no later.
    """
    runs = [(kind, len(list(same))) for kind, same in itertools.groupby(kinds)]
    enough = max(alignment, sum(kind.numel for kind in kinds))  # At this size, one shard holds all tensors.
    best = below
    for step in _steps({kind for kind, _ in runs}, alignment, bound):
        spans = {kind: step % kind.unit == 0 for kind, _ in runs}
        low = -(-bound // step)
        high = max(low, -(-enough // step)) if best is None else (best - 1) // step
        found = first_that_works(lambda multiple: fits(runs, ranks, multiple * step, spans), low, high)
        if found is not None:
            best = found * step
        if best == bound:
            break
    fused = frozenset(kind for kind, _ in runs if kind.runs)
    for shard in _uneven_shards(fused, alignment, bound) if fused else ():
        if best is not None and shard >= best:
            break
        if fits(runs, ranks, shard, {kind: may_span(kind, shard) for kind, _ in runs}):
            best = shard
            break
    return None if best == below else best


@lru_cache(maxsize=4096)
def _uneven_shards(fused: frozenset[Kind], alignment: int, bound: int) -> list[int]:
    """The first shard sizes, from ``bound`` on, at which one of the ``fused`` tensors can contain a whole shard."""
    # The boundaries of the shard may be in different segments, so its size need not be a multiple of their blocks.
    found: set[int] = set()
    for kind in fused:
        step = math.lcm(alignment, kind.grain)
        sizes = range(-(-bound // step) * step, kind.numel, step)[:_MAX_UNEVEN]
        found.update(size for size in sizes if last_cut(kind, min(size, kind.numel - size - 1), size, True))
    return sorted(found)


def _steps(kinds: Iterable[Kind], alignment: int, bound: int) -> list[int]:
    """The numbers whose multiples are tried as shard sizes, smallest first: one per set of units."""
    # Tensors of these units may contain whole shards, which only tensors of at least ``bound`` elements can do.
    units = sorted({kind.unit for kind in kinds if kind.numel >= bound})
    if len(units) <= _MAX_SUBSET_BLOCKS:
        subsets = [subset for n in range(len(units) + 1) for subset in itertools.combinations(units, n)]
    else:
        subsets = [tuple(units[:n]) for n in range(len(units) + 1)]
    return sorted({math.lcm(alignment, *subset) for subset in subsets})
