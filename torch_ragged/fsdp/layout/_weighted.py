"""Shards in proportion to weights: their layout, and its planner."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from torch_ragged.fsdp.layout._bound import Bound
from torch_ragged.fsdp.layout._buffer_layout import BufferLayout, TensorSpec
from torch_ragged.fsdp.layout._orders import sorted_and_permuted
from torch_ragged.fsdp.layout._packing import Kind, first_that_works, run_at
from torch_ragged.tensor._units import Units
from torch_ragged.tensor.placement_types import RaggedShard

__all__ = ["WeightedLayout", "check_weights", "plan_weighted"]

_MAX_SHARES = 4096  # The largest sum of weights: shards are multiples of aligned units, of which the buffer has so many.
_MAX_SCANNED = 512  # The number of units per step size that are tried one by one, from the bound on.
_MAX_WEIGHTED_PERMUTATIONS = 120  # Up to so many distinct orders, all are tried.
_MAX_CUTS = 256  # The number of cuts that are tried for a tensor whose blocks are not uniform, before it starts a shard.


@dataclass(frozen=True)
class WeightedLayout(BufferLayout):
    """The shard of rank r has ``weights[r] * unit`` elements. A rank of weight 0 has none.

    Two tensors on three ranks of weights 3, 2 and 0; ``.`` is padding::

        | a a a a b b | b b b . |  |
         `- rank 0 --´ `- 1 ---´  `- rank 2

    ``shard_numel`` and ``lower_bound`` are of the largest shard.
    """

    weights: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        largest = max(self.weights)
        if len(self.weights) != self.ranks or self.shard_numel <= 0 or self.shard_numel % (largest * self.alignment):
            raise ValueError(
                f"a layout of weights {self.weights} for {self.ranks} ranks needs a positive multiple of alignment "
                f"{self.alignment} per weight, got {self.shard_numel} elements in the largest shard"
            )
        edges, end = self.edges, 0
        for offset, tensor in sorted(zip(self.offsets, self.tensors, strict=True), key=lambda pair: (pair[0], pair[1].numel)):
            if offset < end:
                raise ValueError(f"{tensor.name} at offset {offset} overlaps the tensor before it, which ends at {end}")
            end, kind = offset + tensor.numel, Kind.of(tensor)
            for edge in edges[bisect_right(edges, offset) :]:
                if edge < end and _past(kind, edge - offset):
                    raise ValueError(
                        f"the shard boundary at {edge} cuts {tensor.name} at element {edge - offset}, inside a block"
                    )
        if end > edges[-1]:
            raise ValueError(f"the last tensor ends at {end}, beyond the buffer of {edges[-1]} elements")

    @property
    def _smallest(self) -> int:
        return sum(self.weights) * self.alignment

    @cached_property
    def edges(self) -> tuple[int, ...]:
        unit = self.shard_numel // max(self.weights)
        return tuple(unit * before for before in itertools.accumulate(self.weights, initial=0))

    def placement(self, index: int) -> RaggedShard:
        tensor, offset = self.tensors[index], self.offsets[index]
        if not tensor.numel:
            return super().placement(index)
        shards = Units([(stop - start, 1) for start, stop in itertools.pairwise(self.edges)])
        unit = math.prod(tensor.shape[len(tensor.dims) :])
        return RaggedShard(tensor.dims, shards.within(offset, offset + tensor.numel).scaled(1, unit))

    @property
    def free_boundaries(self) -> tuple[int, ...]:  # type: ignore[override]
        """Only the start: from another shard on, ranks would have other weights."""
        return (0,)


def check_weights(weights: Any, ranks: int) -> tuple[int, ...]:
    """``weights``, without their common divisor. A ValueError says what is wrong with them."""
    given = tuple(weights) if isinstance(weights, Sequence) and not isinstance(weights, (str, bytes)) else ()
    is_valid = all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in given)
    if len(given) != ranks or not is_valid or not any(given):
        raise ValueError(
            f"weights={weights!r} must be {ranks} integers, one per rank of the shards, at least 0 and not all 0: pass "
            f"weights={[2] + [1] * (ranks - 1)} for a first rank with twice the shard of the others"
        )
    divisor = math.gcd(*given)
    reduced = tuple(each // divisor for each in given)
    if sum(reduced) > max(_MAX_SHARES, 16 * ranks):
        about = [round(64 * each / max(given)) for each in given]
        raise ValueError(
            f"weights={weights!r} have no large common divisor, so a buffer would need {sum(reduced):,} aligned "
            f"units: round them, such as weights={about}"
        )
    return reduced


def plan_weighted(tensors: tuple[TensorSpec, ...], weights: tuple[int, ...], alignment: int, order: str) -> BufferLayout:
    """Lay ``tensors`` out over shards in proportion to ``weights``: see :func:`plan_layout`, which checks all arguments."""
    kinds = tuple(Kind.of(tensor) for tensor in tensors)
    unit, offsets, name, bound = _weighted_plan(kinds, weights, alignment, order)
    largest, why = max(weights), bound.explain(tensors)
    lower, shard = bound.shard * largest, unit * largest
    return WeightedLayout(tensors, offsets, shard, len(weights), alignment, lower, why, name, weights)


@lru_cache(maxsize=1024)
def _weighted_plan(
    kinds: tuple[Kind, ...], weights: tuple[int, ...], alignment: int, policy: str
) -> tuple[int, tuple[int, ...], str, Bound]:
    """The unit, the offset of each tensor, the name of the order, and the bound on the unit."""
    bound = _lower_bound(kinds, weights, alignment)
    order, name, best = list(range(len(kinds))), "given", _smallest_unit(kinds, weights, alignment, bound.shard, None)
    assert best is not None, "a largest shard that holds all tensors fits"
    if policy == "auto" and best > bound.shard:
        for other, candidate in sorted_and_permuted(kinds, _MAX_WEIGHTED_PERMUTATIONS):
            unit = _smallest_unit([kinds[i] for i in candidate], weights, alignment, bound.shard, best)
            if unit is not None:
                best, name, order = unit, other, candidate
            if best == bound.shard:
                break
    found = _place([kinds[i] for i in order], weights, best)
    assert found is not None
    return best, tuple(offset for _, offset in sorted(zip(order, found))), name, bound


def _lower_bound(kinds: Sequence[Kind], weights: Sequence[int], alignment: int) -> Bound:
    """No layout has a smaller unit. All elements must fit, each block must, and so must the pieces of each common divisor."""
    total, shares, largest = sum(kind.numel for kind in kinds), sum(weights), max(weights)
    longest = max(range(len(kinds)), key=lambda i: min(kinds[i].block, kinds[i].numel))
    block = min(kinds[longest].block, kinds[longest].numel)
    bounds = [
        Bound(-(-total // shares), f"all {total:,} elements must fit into shards of weights {tuple(weights)}"),
        Bound(-(-block // largest), f"a block of {block:,} elements must fit into the largest shard", longest),
    ]
    for divisor in {kind.grain for kind in kinds} - {1}:
        pieces = sum(kind.numel for kind in kinds if kind.numel % divisor == kind.grain % divisor == 0) // divisor
        why = f"{pieces:,} pieces of {divisor:,} elements in shards of weights {tuple(weights)}"
        unit = first_that_works(lambda unit: sum(each * unit // divisor for each in weights) >= pieces, 0, pieces * divisor)
        bounds.append(Bound(unit or 0, why))
    best = max(bounds, key=lambda bound: -(-bound.shard // alignment))
    return Bound(max(1, -(-best.shard // alignment)) * alignment, best.why, best.tensor)


def _smallest_unit(kinds: Sequence[Kind], weights: Sequence[int], alignment: int, bound: int, below: int | None) -> int | None:
    """The smallest unit found, from ``bound`` on, at which tensors fit in this order; None if it is not less than ``below``.

    If a unit fits, a larger one may not: its boundaries are elsewhere. At multiples of all blocks, they are at the same places
    of the blocks, so there a larger one does fit, and the search ends. Before that, units near the bound are tried one by one.
    """
    units = {kind.unit for kind in kinds}
    common, best = math.lcm(alignment, *units), below
    # At multiples of these, the shards of a weight are whole blocks of a tensor.
    whole = {unit // math.gcd(unit, weight) for unit in units for weight in weights if weight}
    for step in sorted({alignment, common, *(math.lcm(alignment, each) for each in whole)}):
        low = -(-bound // step)
        high = low + _MAX_SCANNED if best is None else min(low + _MAX_SCANNED, (best - 1) // step)
        found = next((each * step for each in range(low, high + 1) if _place(kinds, weights, each * step) is not None), None)
        best = best if found is None else found
        if best == bound:
            break
    if best is None:
        enough = -(-sum(kind.numel for kind in kinds) // common) + 1
        multiple = first_that_works(lambda each: _place(kinds, weights, each * common) is not None, 1, enough)
        assert multiple is not None
        best = multiple * common
    return None if best == below else best


def _place(kinds: Sequence[Kind], weights: Sequence[int], unit: int) -> list[int] | None:
    edges = [unit * before for before in itertools.accumulate(filter(None, weights))]
    offsets, offset = [], 0
    for kind in kinds:
        found = _smallest_offset(kind, offset, edges)
        if found is None:
            return None
        offsets.append(found)
        offset = found + kind.numel
    return offsets


def _smallest_offset(kind: Kind, offset: int, edges: Sequence[int]) -> int | None:
    """The smallest offset, from ``offset`` on, at which no boundary cuts a block; None if the buffer ends before."""
    numel = kind.numel
    is_uniform = not kind.runs and (kind.period == numel or kind.period % kind.block == 0)
    while offset + numel <= edges[-1]:
        index = bisect_right(edges, offset)
        if not numel or offset + numel <= edges[index]:
            return offset
        edge, cut = edges[index], edges[index] - offset
        for _ in range(_MAX_CUTS):
            while cut > 0 and (past := _past(kind, cut)):
                cut -= past
            start = edge - cut
            if cut <= 0 or start + numel > edges[-1]:
                break
            inside = edges[index + 1 : bisect_right(edges, start + numel - 1)]
            if not any(_past(kind, other - start) for other in inside):
                return start
            if is_uniform:
                break  # A smaller cut has the same boundaries inside, at the same places of the blocks, and maybe more.
            cut -= 1
        offset = edge
    return None


def _past(kind: Kind, cut: int) -> int:
    """How far ``cut`` is behind the start of a block: 0 if it cuts none."""
    if kind.runs:
        start, _, block = run_at(kind.runs, cut)
        return (cut - start) % block
    return cut % kind.period % kind.block
