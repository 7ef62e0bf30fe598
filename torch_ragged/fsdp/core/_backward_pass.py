"""BackwardPass: the backward pass over the modules under a root: whether it runs, which calls it has reached, its end.

It moves no data: states and groups ask it, and tell it which call's backward has begun.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from torch.autograd import Variable

from torch_ragged._register._torch import backward_id, dynamo_disabled
from torch_ragged.fsdp.core._forward_order import Event, ForwardOrder
from torch_ragged.fsdp.core._spmd_types import untyped

__all__ = ["BackwardPass"]


class Root(Protocol):
    """The methods of the root that a pass calls."""

    def drop_raised_backward(self) -> None:
        """Drop the gradients of a pass that raised."""

    def run_skipped(self, order: ForwardOrder, events: Sequence[Event]) -> None:
        """Run events that backward has skipped on this rank."""

    def root_post_backward(self) -> None:
        """Autograd has reached the end of the pass."""


class BackwardPass:
    """The backward pass of the modules under one root; one object for all passes, one after the other.

    ::

        start()          a hook of autograd runs; the first one in a pass has autograd call the root at its end
        reach(order)     its events are those of one forward of the root
        root_post_backward() of the root
        finish()         gradients are in ``.grad``; or pause(), if ``finalize_backward`` ends it

    Args:
        root: the context of the modules, with the root post-backward callback. The pass has a weak reference to it: groups hold
            the pass, and a module that outlives its model must not keep the other modules alive.

    Attributes:
        is_unfinished: whether a pass has ended, and ``finalize_backward`` has not been called since then.
        handle: the handle of a ``finalize_backward`` that was not waited for yet.
    """

    def __init__(self, root: Root) -> None:
        self._root = weakref.ref(root)
        # Only autograd holds the running pass, and drops it if backward raises. So a dead reference means: it raised.
        self._running: Callable[[], _Running | None] | None = None
        self.is_unfinished = False
        self.handle: object | None = None
        self._closed = ""

    @property
    def is_running(self) -> bool:
        """Whether this code runs in a backward pass of these modules that has not raised."""
        return self._running is not None and self._running() is not None and backward_id() != -1

    @property
    def has_raised(self) -> bool:
        """Whether the last pass was started and did not reach its end."""
        return self._running is not None and not self.is_running

    def start(self) -> None:
        """Let autograd call the root at the end of the current pass. If the pass was started before, do nothing.

        Raises:
            RuntimeError: the root module was deleted, or :meth:`close` was called.
        """
        if self._closed:
            raise RuntimeError(self._closed)
        # Any hook may be the first of a pass, and ranks may differ in it. So all hooks call this method.
        if self.is_running:
            return
        root = self._root()
        if root is None:
            raise RuntimeError("the root of this fully_shard module was deleted: run the module's forward before backward")
        # A pass that raised has left gradients. This pass must not add to them.
        root.drop_raised_backward()
        running = _Running(root)
        self._running = weakref.ref(running)
        Variable._execution_engine.queue_callback(running)

    def drop_raised(self) -> None:
        """If the last pass raised, drop its gradients."""
        root = self._root()
        if root is not None and self.has_raised:
            root.drop_raised_backward()

    @property
    def _orders(self) -> list[ForwardOrder]:
        """The orders that the pass has reached."""
        running = None if self._running is None else self._running()
        return [] if running is None else running.orders

    def reach(self, order: ForwardOrder) -> None:
        """Backward has reached a call in ``order``, so it has finished all later forwards."""
        # Autograd runs later forwards first: on every rank, the calls of orders reached before are finished.
        if order not in self._orders:
            self.finish_orders()
            order.restart()
            self._orders.append(order)

    def is_in(self, order: ForwardOrder) -> bool:
        """Whether backward has reached a call in ``order``."""
        return order in self._orders

    def finish_orders(self) -> None:
        """Backward reaches no further call of the orders that it has reached."""
        root = self._root()
        for order in self._orders:
            assert root is not None  # Autograd holds it in a pass.
            root.run_skipped(order, order.finish())

    def pause(self) -> None:
        """The pass is over; others may follow before ``finalize_backward``."""
        # Not running: the next backward queues a callback of its own.
        self.is_unfinished, self._running = True, None

    def finish(self) -> None:
        """The pass is over, and ``.grad`` is set."""
        self.is_unfinished, self._running = False, None

    @contextlib.contextmanager
    def raised_on_error(self) -> Iterator[None]:
        """If the block raises, set ``has_raised``, also if the block runs outside of autograd."""
        try:
            yield
        except BaseException:
            self._running = _none_runs
            raise

    def close(self, why: str) -> None:
        """From now on, a pass raises ``why``: the memory of the forward that it belongs to is freed."""
        self._closed = why

    def forget(self) -> None:
        """Return to the state before any pass."""
        self._running = self.handle = None
        self.is_unfinished = False


def _none_runs() -> None:
    """A dead reference, as to a pass that autograd has dropped."""


class _Running:
    """The running pass, which autograd calls at its end. It holds the states of all modules, so it must not live longer."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self.orders: list[ForwardOrder] = []

    @dynamo_disabled
    @untyped
    def __call__(self) -> None:
        self._root.root_post_backward()
