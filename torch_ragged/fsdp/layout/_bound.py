"""Lower bounds on the shard size, each with its reason in words.

Nothing here depends on the order of tensors: the bounds hold for every layout.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Optional

from torch_ragged.fsdp.layout._buffer_layout import TensorSpec
from torch_ragged.fsdp.layout._packing import Kind

__all__ = ["Bound", "lower_bound"]


@dataclass(frozen=True)
class Bound:
    """A lower bound on the shard size.

    Attributes:
        shard: no layout has a smaller shard, in elements.
        why: the reason, in words.
        tensor: the index of the tensor that forces the bound; None if no single tensor does.
    """

    shard: int
    why: str
    tensor: Optional[int] = None

    def explain(self, tensors: Sequence[TensorSpec]) -> str:
        """The reason, with the name of the tensor that forces the bound."""
        return self.why if self.tensor is None else f"{tensors[self.tensor].name}: {self.why}"


def lower_bound(kinds: Sequence[Kind], ranks: int, alignment: int) -> Bound:
    """The largest of four lower bounds on the shard size S, which hold for every order of tensors.

    - All elements must fit into ``ranks`` shards.
    - A block must fit into one shard.
    - If tensors are cut at multiples of ``d`` elements only, a shard holds at most ``floor(S / d)`` of these multiples.
    - A tensor of more than ``2 * S`` elements contains a whole shard at every offset. So S must be a multiple of its block.
    """
    total = sum(kind.numel for kind in kinds)
    bounds = [Bound(-(-total // ranks), f"all {total:,} elements must fit into {ranks:,} shards")]
    largest = max(range(len(kinds)), key=lambda i: min(kinds[i].block, kinds[i].numel))
    block = min(kinds[largest].block, kinds[largest].numel)
    bounds.append(Bound(block, f"a block of {block:,} elements must fit into one shard", largest))
    bounds += [bound for divisor in _divisors(kinds) if (bound := _of_divisor(kinds, ranks, divisor)) is not None]
    # max() returns the first of equal bounds: the simplest reason, then the largest divisor.
    best = max(bounds, key=lambda bound: _round_up(bound.shard, alignment))
    return _of_whole_shards(kinds, alignment, replace(best, shard=max(alignment, _round_up(best.shard, alignment))))


def _divisors(kinds: Sequence[Kind]) -> list[int]:
    blocks = sorted({math.gcd(kind.block, kind.unit) for kind in kinds if kind.numel % kind.block == 0 and kind.block > 1})
    common = {math.gcd(a, b) for a, b in itertools.combinations(blocks[-8:], 2)}
    return sorted({*blocks, *common} - {1}, reverse=True)


def _of_divisor(kinds: Sequence[Kind], ranks: int, divisor: int) -> Bound | None:
    whole = sum(kind.numel for kind in kinds if kind.numel % divisor == kind.block % divisor == kind.unit % divisor == 0)
    multiples = -(-whole // (divisor * ranks))
    why = f"{whole // divisor:,} pieces of {divisor:,} elements on {ranks:,} ranks: {multiples:,} on some rank"
    return Bound(multiples * divisor, why) if whole else None


def _of_whole_shards(kinds: Sequence[Kind], alignment: int, bound: Bound) -> Bound:
    """Raise ``bound`` until, for every tensor of more than two shards, the shard is a multiple of the tensor's blocks."""
    while True:
        inside = {kind: index for index, kind in reversed(list(enumerate(kinds))) if kind.numel > 2 * bound.shard}
        units = {kind: math.gcd(kind.block, kind.unit) for kind in inside}
        shard = _round_up(bound.shard, math.lcm(alignment, *units.values()))
        if shard == bound.shard:
            return bound
        kind = max((kind for kind in inside if bound.shard % units[kind]), key=lambda kind: (units[kind], kind.numel))
        why = f"its {kind.numel:,} elements contain a whole shard, which must be a multiple of {units[kind]:,}"
        smallest = min(kind.numel for kind in inside)  # If a shard is half of this tensor, the tensor need not contain one.
        bound = Bound(min(shard, _round_up(-(-smallest // 2), alignment)), why, inside[kind])


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
