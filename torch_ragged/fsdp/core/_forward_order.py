"""ForwardOrder: the calls in one forward of the root, and the order in which backward reaches them on all ranks. And Pass.

It calls nothing: it says which events a rank has to run, and the root runs them.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd import Variable

from torch_ragged._register._torch import backward_id

__all__ = ["Call", "Event", "ForwardOrder", "Pass"]


class Member(Protocol):
    """What the order reads of a state."""

    modules: tuple[Any, ...]
    groups: list[Any]
    reduces_unused: bool
    is_optional: bool


class Event(NamedTuple):
    """What a rank has to run for a call that its own backward does not reach: pre-backward, or post-backward."""

    position: int
    is_pre_backward: bool


NONE_HANDLED = (id(None), id(None))


def handled_exception() -> tuple[int, int]:
    """The exception that is handled now, and its traceback, which changes if it is raised again."""
    # Their ids: a traceback holds the frames of the program, and a call lives until its backward.
    _, error, traceback = sys.exc_info()
    return id(error), id(traceback)


class Call:
    """One forward call of a module: its position in the order, and whether backward has reached it.

    Calls outside of the root's forward, such as recomputations, have no ``order``.

    Attributes:
        handled: the exception that was being handled when the call began, as in an ``except`` block.
    """

    def __init__(self, order: ForwardOrder | None, state: Member) -> None:
        self.order = order
        self.position = -1 if order is None else order.enter(state)
        self.begun_in = -1  # The last backward pass that reached it.
        self.handled = handled_exception()
        self.probe: torch.Tensor | None = None  # An input of the call, by which pre-backward knows what a pass is for.

    @property
    def has_raised(self) -> bool:
        """Whether the call that ends now has raised an exception."""
        return handled_exception() not in (NONE_HANDLED, self.handled)


class _Events(list[tuple[int, bool]]):
    """The events of the calls of one thread: (position, whether it is the exit); backward has reached those from ``at`` on."""

    at = 0


class ForwardOrder:
    """The calls in one forward of the root, in their order, and the progress of backward.

    ::

        forward     enter 0   enter 1   exit 1   enter 2   exit 2   exit 0
        backward    <-----------------------------------------------------

    Autograd runs the nodes of a graph in the reverse order of their creation. So if it reaches one of these events, later calls
    that it has not reached have no gradient on this rank. Other ranks may have gradients for them, and unshard and reduce. This
    rank then does the same, with gradients of zeros. So the order of collectives is equal on all ranks.

    Autograd numbers the nodes of each thread from 0. So if forward runs a branch in another thread, the reverse order holds
    among the calls of one thread only, and each thread has its own events.

    Attributes:
        states: the state of each call, by position.
        thread_of: its thread. Not by number: numbers are used again.
    """

    def __init__(self) -> None:
        self.states: list[Member] = []
        self.thread_of: list[threading.Thread] = []
        self._first: dict[Member, int] = {}
        self._threads: dict[threading.Thread, _Events] = {}  # By thread, in the order of their first event.
        self._at: dict[tuple[int, bool], tuple[_Events, int]] = {}  # By event: the events of its thread, and its index there.
        self.restart()

    # -- forward ---------------------------------------------------------------------------------------------------

    def enter(self, state: Member) -> int:
        """A call begins; returns its position."""
        self.states.append(state)
        self.thread_of.append(threading.current_thread())
        return len(self.states) - 1

    def watch(self, position: int, is_exit: bool) -> None:
        """Autograd will call pre-backward for the exit of this call, or post-backward for its entry."""
        state, events = self.states[position], self._threads.setdefault(self.thread_of[position], _Events())
        self._at[position, is_exit] = events, len(events)
        events.append((position, is_exit))
        if is_exit:
            # Exits come in the order of ends, inner calls first, so that a later one may belong to an earlier call.
            self._first[state] = min(position, self._first.get(state, position))

    def is_first(self, position: int) -> bool:
        """Whether no call of the same module before this one has a backward."""
        return self._first.get(self.states[position], position) >= position

    def neighbour(self, state: Member, position: int, step: int) -> Member | None:
        """The state to all-gather ahead at this call of ``state``: that of the next call (step 1) or of the one before (-1)."""
        if not (0 <= position < len(self.states) and self.states[position] is state):
            return None
        at = position + step
        while 0 <= at < len(self.states):
            other = self.states[at]
            # In forward, an optional module may run on no rank. Backward follows the order within each thread only.
            is_certain = not other.is_optional if step > 0 else self.thread_of[position] is self.thread_of[at]
            if is_certain and other.groups and not (other is state and len(state.modules) > 1):
                return other
            at += step
        return None

    # -- backward --------------------------------------------------------------------------------------------------

    def restart(self) -> None:
        """A backward pass begins."""
        for events in self._threads.values():
            events.at = len(events)
        # Calls whose pre-backward this rank ran for others: no hook of autograd will run their post-backward.
        self._skipped: set[int] = set()

    def reach(self, position: int, is_exit: bool) -> list[Event]:
        """Backward has reached the end of a call or, last, its beginning; returns the events that this rank has skipped."""
        return self._advance_to(*self._at[position, is_exit])

    def finish(self) -> list[Event]:
        """Backward reaches no further call; returns the events of all calls that it has skipped."""
        skipped = []
        for events in self._threads.values():
            skipped += self._advance_to(events, -1)
        return skipped

    def _advance_to(self, events: _Events, event: int) -> list[Event]:
        # From the latest event to earlier ones: the order in which other ranks, which have these gradients, run their hooks.
        skipped = []
        for position, is_exit in reversed(events[event + 1 : events.at]):
            state = self.states[position]
            if is_exit and state.reduces_unused:
                self._skipped.add(position)
                skipped.append(Event(position, is_pre_backward=True))
            # For calls that this rank has reached, autograd calls it; but not if an optional module's inputs have no gradient.
            elif position in self._skipped or (state.is_optional and not is_exit):
                skipped.append(Event(position, is_pre_backward=False))
        events.at = min(events.at, max(event, 0))  # A later output of a call that was reached before has nothing to skip.
        return skipped


class Pass:
    """One backward pass under a root. What states and groups know of it ends with it.

    Groups keep it, also if it raised: it must not hold the states of a model that may be deleted.

    Args:
        at_end: autograd calls it when the pass ends; None: the pass is outside of autograd.

    Attributes:
        is_over: whether it has ended or was dropped. What states and groups know of it is void then. The root alone writes it.
    """

    def __init__(self, at_end: Callable[[], None] | None = None) -> None:
        self.is_over = False
        self._at_end: Callable[[], object] | None = None
        if at_end is not None:
            # Only autograd holds it from here on, and drops it if backward raises: a dead reference means that.
            self._at_end = weakref.ref(at_end)
            Variable._execution_engine.queue_callback(at_end)

    @property
    def is_running(self) -> bool:
        """Whether this code runs in this pass, which has not raised."""
        return self._at_end is not None and self._at_end() is not None and backward_id() != -1

    def fail(self) -> None:
        """It has raised: the next pass or forward drops its gradients."""
        self._at_end = None
