"""The states of a group: of its parameters, and of its gradients, with the transitions between them."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import TypeVar

__all__ = ["GradientState", "ShardedState", "moved"]


class ShardedState(Enum):
    """What a group's modules have registered, and whether the unsharded parameters are there.

    ::

        SHARDED  --unshard(wait=False)-->  GATHERING  --unshard()-->  UNSHARDED  --reshard()-->  SHARDED
                                               `----------------reshard()---------------------------^

    Equal on all ranks between the hooks of modules.
    """

    following: tuple[ShardedState, ...]

    SHARDED = auto()
    """The sharded DTensors are registered; the unsharded buffer is free."""
    GATHERING = auto()
    """The same, with an all-gather in flight."""
    UNSHARDED = auto()
    """The unsharded parameters are registered."""


class GradientState(Enum):
    """Where a group's gradients are, on their way from autograd to ``.grad``.

    ::

        EMPTY  --a gradient-->  ACCUMULATING  --start_reduction()-->  REDUCING  --wait-->  REDUCED  --finish()-->  EMPTY
          `----------------start_reduction()-----------------------------^                   |
                                ACCUMULATING <--a gradient that comes later------------------|
                                                             REDUCING <--start_reduction()---'

    ``drop()`` leads to EMPTY from each of them. May differ between ranks: one of them may have had no gradient.
    """

    following: tuple[GradientState, ...]

    EMPTY = auto()
    """There is none that is not in ``.grad``."""
    ACCUMULATING = auto()
    """Backward passes have left gradients in the gradient buffer."""
    REDUCING = auto()
    """A reduce-scatter reads the gradient buffer."""
    REDUCED = auto()
    """The reduced shard is here, and the gradient buffer free. An all-reduce over replicas may be in flight."""


# A tuple on the member itself, not a dict of members: looking these up calls Enum.__hash__, several times a step.
ShardedState.SHARDED.following = (ShardedState.GATHERING,)
ShardedState.GATHERING.following = (ShardedState.UNSHARDED, ShardedState.SHARDED)
ShardedState.UNSHARDED.following = (ShardedState.SHARDED,)
GradientState.EMPTY.following = (GradientState.ACCUMULATING, GradientState.REDUCING)
GradientState.ACCUMULATING.following = (GradientState.REDUCING, GradientState.EMPTY)
GradientState.REDUCING.following = (GradientState.REDUCED, GradientState.EMPTY)
GradientState.REDUCED.following = (GradientState.ACCUMULATING, GradientState.REDUCING, GradientState.EMPTY)


State = TypeVar("State", ShardedState, GradientState)


def moved(names: Callable[[], str], state: State, following: State) -> State:
    """The state after ``state``: ``following``, if that is legal.

    Args:
        names: returns what goes through these states, for the error.

    Raises:
        RuntimeError: a group may not go from ``state`` to ``following``.
    """
    if following not in state.following:
        raise RuntimeError(f"{names()} cannot go from {state.name} to {following.name}")
    return following
