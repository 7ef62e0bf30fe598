"""ShardedState: whether a group's modules have the sharded or the unsharded parameters."""

from __future__ import annotations

from enum import Enum, auto

__all__ = ["TRANSITIONS", "ShardedState"]


class ShardedState(Enum):
    """What a group's modules have registered, and whether the unsharded parameters are there.

    ::

        SHARDED  --unshard(wait=False)-->  GATHERING  --unshard()-->  UNSHARDED  --reshard()-->  SHARDED
                                               `----------------reshard()---------------------------^
    """

    SHARDED = auto()
    """The sharded DTensors are registered; the unsharded buffer is free."""
    GATHERING = auto()
    """The same, with an all-gather in flight."""
    UNSHARDED = auto()
    """The unsharded parameters are registered."""


TRANSITIONS = {
    ShardedState.SHARDED: {ShardedState.GATHERING},
    ShardedState.GATHERING: {ShardedState.UNSHARDED, ShardedState.SHARDED},
    ShardedState.UNSHARDED: {ShardedState.SHARDED},
}
