"""FSDPCommContext: the limits on the communication of the groups that share it.

It issues no collective and waits for none: it answers whether one may be issued, and which ones have to end before.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Generic, TypeVar

__all__ = ["FSDPCommContext"]

Reduction = TypeVar("Reduction")
"""A reduce-scatter that was issued: the gradients of a group."""


class FSDPCommContext(Generic[Reduction]):
    """Limits for all groups under a root, or under several roots (``share_comm_ctx``).

    Attributes:
        max_gathers: how many modules' all-gathers may be issued ahead of use.
        reducing: the reduce-scatters in flight, the oldest first. An entry holds the groups of one module.
    """

    def __init__(self) -> None:
        self.max_gathers = 2
        # Weak references: a module that outlives its model must not keep the shards of a prefetched module.
        self._gathering: list[weakref.ref[object]] = []
        self.reducing: list[Sequence[Reduction]] = []

    @property
    def may_gather_ahead(self) -> bool:
        """Whether one more all-gather may be issued ahead of use. Equal on all ranks: garbage collection does not change it."""
        return len(self._gathering) < self.max_gathers

    def add_gathering(self, state: object) -> None:
        """The all-gathers of a state were issued ahead of use."""
        self._gathering.append(weakref.ref(state))

    def forget_gathering(self, state: object) -> bool:
        """The all-gathers of a state were used or dropped; return whether they had been issued ahead of use."""
        if not self._gathering:  # Mostly: asked whenever a module is unsharded or resharded.
            return False
        count = len(self._gathering)
        self._gathering = [each for each in self._gathering if each() is not state]
        return len(self._gathering) < count

    def beyond(self, max_reductions: int) -> list[Reduction]:
        """The oldest reductions in flight, which must end so that fewer than ``max_reductions`` are in flight.

        The oldest first: collectives end in the order of issue.
        """
        excess = max(0, len(self.reducing) - max_reductions + 1)
        return [gradients for entry in self.reducing[:excess] for gradients in entry]

    def add_reduction(self, entry: Sequence[Reduction]) -> None:
        """The groups of a module have issued their reduce-scatters."""
        self.reducing.append(entry)

    def forget(self, gradients: Sequence[Reduction]) -> None:
        """These groups have finished or dropped their reductions."""
        mine = {id(each) for each in gradients}
        self.reducing = [entry for entry in self.reducing if not mine.intersection(map(id, entry))]
