"""FSDPCommContext: the limits on the communication of the groups that share it.

It issues no collective: groups ask it before they all-gather ahead of use, allocate gradients, or reduce.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol

__all__ = ["FSDPCommContext", "InFlight"]


class InFlight(Protocol):
    """A reduce-scatter that was issued: the gradients of a group."""

    def wait_for_second_buffer(self) -> None:
        """If it holds a second buffer, wait for it."""

    def finish_reduction(self) -> None:
        """Wait for it, and free its input."""


class FSDPCommContext:
    """Limits for all groups under a root, or under several roots (``share_comm_ctx``).

    Attributes:
        max_gathers: how many modules' all-gathers may be issued ahead of use.
        reducing: the reduce-scatters in flight, the oldest first. An entry holds the groups of one module.
    """

    def __init__(self) -> None:
        self.max_gathers = 2
        # Weak references: a module that outlives its model must not keep the shards of a prefetched module.
        self._gathering: list[weakref.ref[object]] = []
        self.reducing: list[Sequence[InFlight]] = []

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

    def wait_for_room(self, max_reductions: int) -> None:
        """Before gradients are allocated: wait for the oldest reductions until fewer than ``max_reductions`` are in flight.

        This waits only for reductions that hold a second buffer, as over gloo. On a GPU it would block the stream and save no
        memory.
        """
        # Do not finish them: finishing issues HSDP's all-reduce, and all ranks must issue that at the same moment.
        excess = len(self.reducing) - max_reductions + 1
        for entry in self.reducing[: max(0, excess)]:
            for gradients in entry:
                gradients.wait_for_second_buffer()

    def add_reduction(self, entry: Sequence[InFlight]) -> None:
        """The groups of a module have issued their reduce-scatters."""
        self.reducing.append(entry)

    def finish_reductions(self, max_reductions: int) -> None:
        """Before a reduce-scatter is issued: finish the oldest ones until fewer than ``max_reductions`` are in flight."""
        # The oldest first: collectives end in the order of issue.
        while len(self.reducing) >= max_reductions:
            for gradients in self.reducing.pop(0):
                gradients.finish_reduction()

    def forget(self, gradients: Sequence[InFlight]) -> None:
        """These groups have finished or dropped their reductions."""
        mine = {id(each) for each in gradients}
        self.reducing = [entry for entry in self.reducing if not mine.intersection(map(id, entry))]
