"""BackwardPass: what a backward pass over the modules of a root knows: whether it runs, how far it is, what ends it.

It moves no data: states and groups ask it, and tell it which call's backward has begun.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Protocol

from torch.autograd import Variable

from torch_ragged._register._torch import backward_id, dynamo_disabled
from torch_ragged.fsdp.core._forward_order import ForwardOrder

__all__ = ["BackwardPass"]


class Root(Protocol):
    """What a pass needs of its root."""

    def drop_raised_backward(self) -> None:
        """Drop the gradients of a pass that raised."""

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
        root: the context of the modules, which has the root post-backward callback. By a weak reference: groups hold the pass,
            and a module that outlives its model must not keep the others alive.

    Attributes:
        is_unfinished: whether a pass has ended that awaits ``finalize_backward``.
        handle: of the ``finalize_backward`` that was begun and not waited for.
    """

    def __init__(self, root: Root) -> None:
        self._root = weakref.ref(root)
        # Autograd alone holds the pass that runs, and drops it if the backward raises: so this tells a pass that raised.
        self._running: Callable[[], _Running | None] | None = None
        self.is_unfinished = False
        self.handle: object | None = None

    @property
    def is_running(self) -> bool:
        """Whether this code runs in a backward pass of these modules that has not raised."""
        return self._running is not None and self._running() is not None and backward_id() != -1

    @property
    def has_raised(self) -> bool:
        """Whether a pass was started that did not reach its end."""
        return self._running is not None and not self.is_running

    def start(self) -> None:
        """Have autograd call the root when the pass that runs now is over. Does nothing if the pass has been started.

        Raises:
            RuntimeError: the root module was deleted.
        """
        # Any hook may be the first in a pass: which one it is differs between ranks, and what it does must not.
        if self.is_running:
            return
        root = self._root()
        if root is None:
            raise RuntimeError("the root of this fully_shard module was deleted: run the module's forward before backward")
        # A pass that raised has left gradients, which would be added to those of this pass.
        root.drop_raised_backward()
        running = _Running(root)
        self._running = weakref.ref(running)
        Variable._execution_engine.queue_callback(running)

    @property
    def _orders(self) -> list[ForwardOrder]:
        """The orders that the pass has reached."""
        running = None if self._running is None else self._running()
        return [] if running is None else running.orders

    def reach(self, order: ForwardOrder) -> None:
        """Backward has reached a call in ``order``: all of a forward that ran later has been passed."""
        # Autograd runs later forwards first, so the calls of orders reached before are all passed, on every rank.
        if order not in self._orders:
            self.finish_orders()
            order.restart()
            self._orders.append(order)

    def is_in(self, order: ForwardOrder) -> bool:
        """Whether backward has reached a call in ``order``."""
        return order in self._orders

    def finish_orders(self) -> None:
        """Backward reaches no further call of the orders it is in."""
        for order in self._orders:
            order.finish()

    def pause(self) -> None:
        """The pass is over; others may follow before ``finalize_backward``."""
        # Not running: the next backward queues a callback of its own.
        self.is_unfinished, self._running = True, None

    def finish(self) -> None:
        """The pass is over, and gradients are set."""
        self.is_unfinished, self._running = False, None

    @contextlib.contextmanager
    def raised_on_error(self) -> Iterator[None]:
        """If the block raises, the pass counts as one that raised, also if autograd does not run it: see ``has_raised``."""
        try:
            yield
        except BaseException:
            self._running = _none_runs
            raise

    def forget(self) -> None:
        """As if no pass had begun."""
        self._running = self.handle = None
        self.is_unfinished = False


def _none_runs() -> None:
    """In place of a reference to a pass that autograd has dropped."""


class _Running:
    """A pass that runs: what autograd calls at its end. The orders hold the states of all modules, and so live no longer."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self.orders: list[ForwardOrder] = []

    @dynamo_disabled
    def __call__(self) -> None:
        self._root.root_post_backward()
