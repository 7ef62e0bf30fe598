"""The states of a group: of its parameters, and of its gradients, with the transitions between them."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import TypeVar

__all__ = ["GradientState", "ShardedState", "moved"]


class ShardedState(Enum):
    """Which parameters are registered in a group's modules, and whether the unsharded ones are allocated.

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
    """The state of a group's gradients, on their way from autograd to ``.grad``.

    ::

        EMPTY  --a gradient-->  ACCUMULATING  --start_reduction()-->  REDUCING  --wait-->  REDUCED  --finish()-->  EMPTY
          `----------------start_reduction()-----------------------------^                   |
                                ACCUMULATING <--a later gradient-----------------------------|
                                                             REDUCING <--start_reduction()---'

    ``drop()`` leads to EMPTY from each state. The state may differ between ranks: a rank may have no gradient.
    """

    following: tuple[GradientState, ...]

    EMPTY = auto()
    """All gradients are in ``.grad``."""
    ACCUMULATING = auto()
    """Gradients are in the gradient buffer."""
    REDUCING = auto()
    """A reduce-scatter that reads the gradient buffer is in flight."""
    REDUCED = auto()
    """The reduced shard is complete, and the gradient buffer is free. An all-reduce over replicas may be in flight."""


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
        RuntimeError: a group must not go from ``state`` to ``following``.
    """
    if following not in state.following:
        raise RuntimeError(f"{names()} cannot go from {state.name} to {following.name}")
    return following
