"""Runs of plans in the background. Runs on one group happen in the order of their calls, one at a time.

All ranks call in the same order, so the collectives of two runs never mix.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.distributed as dist

__all__ = ["Handle", "in_background", "in_turn"]

# One thread per group, so that two runs never have messages in flight on one group at a time. Weak: the thread ends when the
# group is gone.
_workers: weakref.WeakKeyDictionary[dist.ProcessGroup, ThreadPoolExecutor] = weakref.WeakKeyDictionary()


class Handle:
    """A run of a plan in the background."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        """Return when the target is complete, on an accelerator too: the run has waited for its stream.

        Raises:
            TransferError: the run failed, here or on another rank.
        """
        self._future.result()

    def is_completed(self) -> bool:
        """Whether :meth:`wait` would return, or raise, at once."""
        return self._future.done()


def in_turn(group: dist.ProcessGroup, work: Callable[[], None]) -> None:
    """Do ``work`` after the earlier works of ``group`` in the background, on this thread."""
    if group in _workers:
        # An empty work ends when all works before it have ended. If one of them fails, its handle raises, not this wait.
        _workers[group].submit(lambda: None).result()
    work()


def in_background(group: dist.ProcessGroup, device: torch.device, work: Callable[[], None]) -> Handle:
    """Start ``work`` after the earlier works of ``group``. On an accelerator it sees what the current stream has written."""
    if group not in _workers:
        _workers[group] = ThreadPoolExecutor(1, thread_name_prefix="transfer")
    stream = None
    if device.type != "cpu":
        # A stream of its own: on the caller's stream, training would queue behind the copies of the run. It waits for what the
        # caller's stream has been given so far. This is asked here, as each thread has a current stream of its own.
        stream = torch.Stream(device)
        stream.wait_stream(torch.accelerator.current_stream(device))

    def on_stream() -> None:
        with stream or contextlib.nullcontext():
            work()

    return Handle(_workers[group].submit(on_stream))
