"""The states of a group: of its parameters, and of its gradients, with the transitions between them."""

from __future__ import annotations

from enum import Enum, auto

__all__ = ["GradientState", "ShardedState", "check_transition"]


class ShardedState(Enum):
    """What a group's modules have registered, and whether the unsharded parameters are there.

    ::

        SHARDED  --unshard(wait=False)-->  GATHERING  --unshard()-->  UNSHARDED  --reshard()-->  SHARDED
                                               `----------------reshard()---------------------------^

    Equal on all ranks between the hooks of modules.
    """

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

    EMPTY = auto()
    """There is none that is not in ``.grad``."""
    ACCUMULATING = auto()
    """Backward passes have left gradients in the gradient buffer."""
    REDUCING = auto()
    """A reduce-scatter reads the gradient buffer."""
    REDUCED = auto()
    """The reduced shard is here, and the gradient buffer free. An all-reduce over replicas may be in flight."""


_TRANSITIONS: dict[Enum, set[Enum]] = {
    ShardedState.SHARDED: {ShardedState.GATHERING},
    ShardedState.GATHERING: {ShardedState.UNSHARDED, ShardedState.SHARDED},
    ShardedState.UNSHARDED: {ShardedState.SHARDED},
    GradientState.EMPTY: {GradientState.ACCUMULATING, GradientState.REDUCING},
    GradientState.ACCUMULATING: {GradientState.REDUCING, GradientState.EMPTY},
    GradientState.REDUCING: {GradientState.REDUCED, GradientState.EMPTY},
    GradientState.REDUCED: {GradientState.ACCUMULATING, GradientState.REDUCING, GradientState.EMPTY},
}


def check_transition(name: str, state: Enum, following: Enum) -> None:
    """Raise if a group may not go from ``state`` to ``following``.

    Raises:
        RuntimeError: it may not; the text has the group's ``name``.
    """
    if following not in _TRANSITIONS[state]:
        raise RuntimeError(f"{name} cannot go from {state.name} to {following.name}")
