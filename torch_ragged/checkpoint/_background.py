"""Saves in the background: one per process is in flight at most, and it ends before process groups and the process do.

Nothing here writes a file or issues a collective: ``_api`` starts a save and tells its outcome.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import logging
import multiprocessing
import os
import sys
import threading
from concurrent import futures
from pathlib import Path

from torch_ragged._register._distributed import before_groups_end

__all__ = ["BackgroundSave", "wait_for_save"]

_logger = logging.getLogger("torch_ragged.checkpoint")
_save_numbers = itertools.count()
_in_flight: BackgroundSave | None = None
_unasked: dict[int, int] = {}  # Failed saves whose outcome the program has not asked for: the step, by the save's number.


class BackgroundSave(futures.Future[Path]):
    """A save in flight in the background; ``result()`` is the folder of its checkpoint.

    ::

        main thread   async_save(step 1)   train   async_save(step 2) waits ...... returns   the program ends: waits
        background                  [ save of step 1 .......................... ]      [ save of step 2 ......... ]

    The save issues collectives on its process group, which the main thread may use for the next call of this package. Two
    threads of one rank have no order, and ranks could issue them in different orders. Therefore each call waits for it first.

    Args:
        step: the step of the checkpoint.
    """

    def __init__(self, step: int) -> None:
        global _in_flight
        super().__init__()
        self.step, self._number = step, next(_save_numbers)
        self.set_running_or_notify_cancel()  # From now on, cancel() has no effect: the other ranks take part in the save.
        _wait_at_the_end()
        _in_flight = self

    def end(self, outcome: Path | Exception) -> None:
        """The save has ended on all ranks: with a checkpoint in this folder, or with an error."""
        global _in_flight
        if isinstance(outcome, Path):
            self.set_result(outcome)
        else:
            _unasked[self._number] = self.step
            _logger.error("step %d was not saved in the background: %s", self.step, outcome)
            self.set_exception(outcome)
        _in_flight = None

    def forget(self) -> None:
        """The save was never started: ``async_save`` itself raises."""
        global _in_flight
        _in_flight = None

    def result(self, timeout: float | None = None) -> Path:
        """The folder of the checkpoint, when the save has ended; raises if it failed."""
        self.exception(timeout)
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error of the save, when it has ended; None if it did not fail."""
        failure = super().exception(timeout)
        _unasked.pop(self._number, None)
        return failure


def wait_for_save() -> None:
    """Wait until no save of this process is in flight in the background. Its outcome is for the caller of ``async_save``."""
    if _in_flight is not None:
        futures.wait([_in_flight])


@functools.cache
def _wait_at_the_end() -> None:
    """From now on, the end of the program and ``dist.destroy_process_group`` wait for the save in flight."""
    before_groups_end(wait_for_save)
    # Not atexit: its functions run after executors have stopped, and a save that fails needs threads to find the cause. Both
    # are before the interpreter destroys process groups. It exists from Python 3.9 on.
    threading._register_atexit(_at_the_end)  # type: ignore[attr-defined]
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_begin_anew)


def _begin_anew() -> None:
    """A forked child, such as a data loader's worker, has no thread that saves: it must not wait for one."""
    global _in_flight
    _in_flight = None
    _unasked.clear()


def _at_the_end() -> None:
    """The main thread has ended. Wait for the save in flight, and let the exit code tell of failures."""
    save, has_failed = _in_flight, False
    try:
        wait_for_save()
    except BaseException as error:  # A second Ctrl-C, or a signal's handler: the program ends now, and the save with it.
        if save is not None:
            _unasked[save._number] = save.step
            _logger.error("the wait for step %d was interrupted by %s: it may not be saved", save.step, type(error).__name__)
        raise
    finally:
        has_failed = bool(_unasked)
        if has_failed:
            steps = ", ".join(map(str, sorted(_unasked.values())))
            _logger.error("exit code 1: async_save failed at step %s, and the program did not ask for its result()", steps)
            atexit.register(_exit_with_1)  # As the last one, so that it is called first.
            _unasked.clear()  # A child of multiprocessing that was not forked comes here twice.
    if has_failed and multiprocessing.parent_process() is not None:
        raise SystemExit(1)  # A forked one has no atexit, and has not yet returned its exit code.


def _exit_with_1() -> None:
    """Run what is left of ``atexit``, and end the process: Python itself has chosen its exit code before."""
    atexit.unregister(_exit_with_1)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(1)
