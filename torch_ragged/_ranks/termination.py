"""Termination: a rank that torchrun ends tells in its log where it was, and which rank has failed.

It issues no collective, and changes nothing of how the process ends: only when, by a few seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

import torch.distributed as dist

from torch_ragged._ranks.peers import PeerError, fates_of, is_of_backend, tracker
from torch_ragged._ranks.store import GROUP_ENDED, SharedStore

__all__ = ["tell_when_terminated"]

_TERMINATION_LIMIT = 10.0  # Seconds.
"""How long the end of the process waits for the answers of other ranks. torchrun kills it after 30 s."""

_logger = logging.getLogger("torch_ragged")


def tell_when_terminated() -> None:
    """Under torchrun, from now on: when this rank gets SIGTERM, it logs what it did and which ranks have failed.

    torchrun ends all ranks of a host 0.1 to 0.3 s after one has failed. The others then wait in a collective, and would find
    out after seconds. While the main thread waits in gloo or NCCL, Python runs no handler of a signal. It only writes the
    signal's number to a file descriptor, at once::

        main thread   waits in a collective ................................................ the process ends by SIGTERM
        SIGTERM                x  -> wakeup fd
        this thread                  logs where the main thread is, asks the other ranks, logs which have died, ends the process

    If the program has a handler of SIGTERM, the main thread calls it after that, and it decides alone how the process ends.
    What another library has set as wakeup fd gets each signal, too.
    """
    global _termination
    is_main = threading.current_thread() is threading.main_thread()  # No other thread may install it.
    if _termination is not None or not is_main or not dist.is_torchelastic_launched():
        return
    if signal.getsignal(signal.SIGTERM) in (None, signal.SIG_IGN):  # None: a handler that is not Python's.
        return
    _termination = _Termination()


class _Termination:
    def __init__(self) -> None:
        self._lock, self._teller = threading.RLock(), threading.Thread(target=_tell_of_others, name="termination", daemon=True)
        self._is_told = False
        self._ours, theirs = os.pipe()
        os.set_blocking(theirs, False)
        self._chained = signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
        # Also if there was none: without a handler of Python's, nothing is written.
        self._handler: Any = signal.signal(signal.SIGTERM, self._handle)
        threading.Thread(target=self._run, name="termination", daemon=True).start()
        # Not atexit: its functions run after executors have stopped, by which this rank asks others. From Python 3.9 on.
        threading._register_atexit(self._end)  # type: ignore[attr-defined]
        # A forked child, such as a data loader's worker, must not write its own signals to its parent's descriptor.
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Nothing is told from now on: the state before this object."""
        signal.set_wakeup_fd(self._chained)
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._handler)

    def _end(self) -> None:
        """The program ends. If a collective of torch's own has failed, this rank tells which ranks have failed."""
        error = getattr(sys, "last_value", None)  # What no function of the program has caught.
        if isinstance(error, RuntimeError) and not isinstance(error, PeerError) and is_of_backend(error):
            self._tell_of_others()
        self._forget()
        # A thread that is in a call of C++ when Python ends would end the process by SIGABRT.
        if self._teller.is_alive():
            self._teller.join(_TERMINATION_LIMIT)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """The main thread runs Python: it waits here until this rank has told, and goes on as without this object."""
        self._tell()
        if callable(self._handler):
            self._handler(number, frame)
        else:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    def _run(self) -> None:
        while True:
            numbers = os.read(self._ours, 64)
            if self._chained != -1:
                with contextlib.suppress(OSError):
                    os.write(self._chained, numbers)
            if signal.SIGTERM not in numbers:
                continue
            self._tell()
            if self._handler == signal.SIG_DFL and signal.getsignal(signal.SIGTERM) == self._handle:
                # As signal.signal(), which only the main thread may call: it may wait for ever.
                ctypes.pythonapi.PyOS_setsig(signal.SIGTERM, ctypes.c_void_p(int(signal.SIG_DFL)))
                os.kill(os.getpid(), signal.SIGTERM)

    def _tell(self) -> None:
        """Tell of this rank and of the others, once. The main thread and this object's thread may come here."""
        with self._lock:
            if not self._is_told:
                self._is_told = True
                _tell_of_this_rank()
        self._tell_of_others()

    def _tell_of_others(self) -> None:
        """Returns when it is told, or after :data:`_TERMINATION_LIMIT`: the store may not answer."""
        with self._lock:
            if self._teller.ident is None:
                self._teller.start()
        self._teller.join(_TERMINATION_LIMIT)


def _this_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", -1))


def _tell_of_this_rank() -> None:
    where = tracker.look().text
    doing = f"finds out why {tracker.failed} has failed, called {where}" if tracker.failed else f"is {where}"
    last = ". Its last forward is number {1} of {0}".format(*tracker.forward) if tracker.forward else ""
    _logger.error("rank %d: torchrun sends SIGTERM to this process, which %s%s", _this_rank(), doing, last)


def _tell_of_others() -> None:
    rank = _this_rank()
    with contextlib.suppress(*GROUP_ENDED):
        store = SharedStore("termination")
        store.set(f"rank {rank}", "")  # This rank is about to end, and is not the cause.
        fates = fates_of([other for other in range(dist.get_world_size()) if other != rank])
        failed = {other: fate for other, fate in fates.items() if not fate.is_alive or fate.where is None}
        told = [f"rank {other} {fate.text}" for other, fate in failed.items() if not store.has(f"rank {other}")]
        _logger.error("rank %d: %s", rank, "; ".join(told) or "no other rank has failed: look at the launcher's log")


_termination: _Termination | None = None
