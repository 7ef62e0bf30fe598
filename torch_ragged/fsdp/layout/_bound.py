"""Lower bounds on the shard size, each with its reason in words. They hold for every layout, in any order of tensors."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Optional

from torch_ragged.fsdp.layout._buffer_layout import TensorSpec
from torch_ragged.fsdp.layout._packing import Kind

__all__ = ["Bound", "lower_bound"]

_MAX_RAISES = 16  # Groups of models need 3. If the loop stops early, the bound is lower, and still a bound.


@dataclass(frozen=True)
class Bound:
    """A lower bound on the shard size, and the reason in words."""

    shard: int  # No layout has a smaller one, in elements.
    why: str
    tensor: Optional[int] = None  # The index of the tensor that forces the bound; None if no single one does.

    def explain(self, tensors: Sequence[TensorSpec]) -> str:
        return self.why if self.tensor is None else f"{tensors[self.tensor].name}: {self.why}"


def lower_bound(kinds: Sequence[Kind], ranks: int, alignment: int) -> Bound:
    """A lower bound on the shard size S, which holds for every order of tensors.

    All elements must fit into ``ranks`` shards, and a block must fit into one shard. From there, three rules raise the bound,
    until none excludes it: see docs/planner.md. One that excludes S excludes all sizes from S up to the bound that it returns.
    """
    total = sum(kind.numel for kind in kinds)
    bounds = [Bound(-(-total // ranks), f"all {total:,} elements must fit into {ranks:,} shards")]
    largest = max(range(len(kinds)), key=lambda i: min(kinds[i].block, kinds[i].numel))
    block = min(kinds[largest].block, kinds[largest].numel)
    bounds.append(Bound(block, f"a block of {block:,} elements must fit into one shard", largest))
    # max() returns the first of equal bounds: the simplest reason, then the largest divisor.
    best = max(bounds, key=lambda bound: _round_up(bound.shard, alignment))
    best = replace(best, shard=max(alignment, _round_up(best.shard, alignment)))
    counts = Counter(kinds)
    blocks = sorted({kind.grain for kind in kinds if kind.runs or (kind.numel % kind.block == 0 and kind.block > 1)})
    common = {math.gcd(a, b) for a, b in itertools.combinations(blocks[-8:], 2)}
    divisors = sorted({*blocks, *common} - {1}, reverse=True)
    for _ in range(_MAX_RAISES):
        raised = [best, *(_of_divisor(counts, ranks, divisor, best) for divisor in divisors)]
        raised += [_of_whole_shards(kinds, alignment, best), _of_single_cuts(counts, ranks, alignment, best)]
        farthest = max(raised, key=lambda bound: _round_up(bound.shard, alignment))
        if farthest is best:
            break
        best = replace(farthest, shard=_round_up(farthest.shard, alignment))
    return best


def _of_divisor(counts: Mapping[Kind, int], ranks: int, divisor: int, bound: Bound) -> Bound:
    """Raise ``bound`` if tensors that are cut at multiples of ``divisor`` only do not fit.

    These tensors take at most ``full`` elements of a shard: the largest multiple in it. Another tensor of n elements touches at
    most ``2 + (n - 2) // S`` shards. All shards that no other tensor touches lose ``S - full`` elements. Up to the next
    multiple, a larger S leaves ``full`` as it is, and other tensors touch no more shards.
    """
    whole = total = touched = 0
    for kind, count in counts.items():
        total += kind.numel * count
        if kind.numel % divisor == kind.grain % divisor == 0:
            whole += kind.numel * count
        elif kind.numel:
            touched += (2 + (kind.numel - 2) // bound.shard) * count
    full, untouched = bound.shard // divisor * divisor, ranks - touched
    if whole > ranks * full:
        multiples = -(-whole // (divisor * ranks))
        why = f"{whole // divisor:,} pieces of {divisor:,} elements on {ranks:,} ranks: {multiples:,} on some rank"
        return Bound(multiples * divisor, why)
    if untouched <= 0 or total <= touched * bound.shard + untouched * full:
        return bound
    why = f"only multiples of {divisor:,} elements in at least {untouched:,} of {ranks:,} shards"
    return Bound(min(full + divisor, -(-(total - untouched * full) // touched)), why)


def _of_single_cuts(counts: Mapping[Kind, int], ranks: int, alignment: int, bound: Bound) -> Bound:
    """Raise ``bound`` if the tensors that are cut once take more shards than there are.

    A tensor of more than S elements that cannot contain a whole shard has two parts, each at one end of a shard. Parts are
    multiples of ``divisor``: a shard has at most ``full`` elements of them, and a part of the shortest tensor has at least
    ``rest``. Then ``n = full // rest`` such tensors take n + 1 shards; docs/planner.md has the proof.
    """
    cut = {kind: count for kind, count in counts.items() if kind.numel > bound.shard and bound.shard % kind.grain}
    if not cut:
        return bound
    longest = max(kind.numel for kind in cut)
    # Shards inside a longer tensor have no parts.
    inside = sum(max(0, (kind.numel + 1) // longest - 1) * count for kind, count in counts.items())
    best, end, number, divisor = bound, longest, 0, 0
    for kind in sorted(cut, key=lambda kind: (-kind.numel, -kind.grain)):
        number += cut[kind]
        divisor = math.gcd(divisor, kind.grain, kind.numel)
        full = bound.shard // divisor * divisor
        rest = kind.numel - full
        n = full // rest
        # If the shard is a multiple of its blocks, the tensor can contain a whole shard: this proof ends there.
        end = min(end, _round_up(bound.shard + 1, math.lcm(alignment, kind.grain)))
        if number * (n + 1) > (ranks - inside) * n:
            larger = _round_up(-(-(n + 1) * kind.numel // (n + 2)), divisor)  # From this size on, n is larger.
            what = f"{number:,} tensor{'s' * (number > 1)} of at least {kind.numel:,} elements"
            why = f"{ranks:,} smaller shards cannot hold {what}, as each is cut once"
            best = max(best, Bound(min(end, larger), why), key=lambda bound: bound.shard)
    return best


def _of_whole_shards(kinds: Sequence[Kind], alignment: int, bound: Bound) -> Bound:
    """Raise ``bound`` until the shard is a multiple of the blocks of all tensors, and segments, of more than two shards.

    Such a tensor contains a whole shard at every offset.
    """
    parts: dict[_BoundPart, int] = {}
    for index, kind in reversed(list(enumerate(kinds))):  # Of tensors of equal kind, the first one is named.
        parts[_BoundPart(kind.numel, kind.grain, kind, True)] = index
        parts.update({_BoundPart(stop - start, block, kind, False): index for start, stop, block in kind.runs})
    while True:
        inside = [part for part in parts if part.numel > 2 * bound.shard]
        shard = _round_up(bound.shard, math.lcm(alignment, *[part.unit for part in inside]))
        if shard == bound.shard:
            return bound
        part = max((part for part in inside if bound.shard % part.unit), key=lambda part: (part.unit, part.numel))
        what = f"its {part.numel:,} elements contain" if part.is_whole else f"a segment of {part.numel:,} elements contains"
        why = f"{what} a whole shard, which must be a multiple of {part.unit:,}"
        smallest = min(part.numel for part in inside)  # If a shard is half of this part, the part need not contain one.
        bound = Bound(min(shard, _round_up(-(-smallest // 2), alignment)), why, parts[part])


class _BoundPart(NamedTuple):
    """A tensor, or a segment of one. If it contains a whole shard, the shard size is a multiple of ``unit``."""

    numel: int
    unit: int
    kind: Kind
    is_whole: bool


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
