"""The states of a group: of its parameters, and of its gradients, with the transitions between them."""

from __future__ import annotations

from enum import Enum, auto

__all__ = ["GradientState", "ShardedState", "check_transition"]


class ShardedState(Enum):
    """Which parameters are registered in a group's modules, and whether the unsharded ones are allocated.

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
    """The state of a group's gradients, on their way from autograd to ``.grad``.

    ::

        EMPTY  --a gradient-->  ACCUMULATING  --start_reduction()-->  REDUCING  --wait-->  REDUCED  --finish()-->  EMPTY
          `----------------start_reduction()-----------------------------^                   |
                                ACCUMULATING <--a later gradient-----------------------------|
                                                             REDUCING <--start_reduction()---'

    ``drop()`` leads to EMPTY from each state. The state may differ between ranks: a rank may have no gradient.
    """

    EMPTY = auto()
    """All gradients are in ``.grad``."""
    ACCUMULATING = auto()
    """Gradients are in the gradient buffer."""
    REDUCING = auto()
    """A reduce-scatter that reads the gradient buffer is in flight."""
    REDUCED = auto()
    """The reduced shard is complete, and the gradient buffer is free. An all-reduce over replicas may be in flight."""


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
    """Raise if a group must not go from ``state`` to ``following``.

    Raises:
        RuntimeError: the transition is not legal. The text has the group's ``name``.
    """
    if following not in _TRANSITIONS[state]:
        raise RuntimeError(f"{name} cannot go from {state.name} to {following.name}")
