"""WeightsPart: what ``fully_shard(weights=)`` brings. It neither plans unequal shards nor moves them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch_ragged.fsdp.comm._collectives import UnequalCollectives
from torch_ragged.fsdp.core._kit import Draft, FeaturePart, Kit, Need, Terms
from torch_ragged.fsdp.layout._weighted import WeightedLayout, check_weights

__all__ = ["WeightsPart"]


@dataclass(frozen=True)
class WeightsPart(FeaturePart):
    """The argument ``weights``."""

    weights: Sequence[int]

    @property
    def terms(self) -> Terms:
        are_equal = all(each == self.weights[0] for each in self.weights)
        return Terms(f"weights={self.weights!r}", breaks=() if are_equal else (Need.EQUAL_SHARDS,))

    @classmethod
    def of(cls, weights: Any) -> WeightsPart | None:
        """The part of the argument; None if there are none."""
        if weights is not None and (not isinstance(weights, Sequence) or isinstance(weights, (str, bytes))):
            raise TypeError(f"weights={weights!r} is no list: pass an integer per rank of the shards, as weights=[3, 2, 0]")
        return None if weights is None else cls(weights)

    def arrange(self, draft: Draft) -> None:
        draft.weights = check_weights(self.weights, draft.ranks)

    def equip(self, kit: Kit) -> None:
        dp, layout = kit.plan.dp, kit.layout
        if dp.shard_group is not None and isinstance(layout, WeightedLayout):
            kit.collectives = UnequalCollectives(dp.shard_group, dp.replicate_group, layout.weights)
