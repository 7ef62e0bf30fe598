"""Watch: waits for the collectives of a transfer, and looks in the store whether another rank has failed. No collective."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from torch_ragged._ranks.groups import end_messages
from torch_ragged._ranks.peers import fates_of
from torch_ragged._ranks.standstill import announce
from torch_ragged._ranks.store import SharedStore
from torch_ragged.transfer._errors import TransferError

__all__ = ["Lost", "Watch", "end_messages"]

_TRANSFER_SLICE = 1.0  # Seconds.
"""After so long a wait, a rank looks whether another rank has failed."""

_TRANSFER_PATIENCE = 10.0  # Seconds.
"""How long a rank whose collective failed waits for the reports of the others. A rank without a report is taken for dead."""


class Lost(Exception):
    """A collective did not end: another rank failed, died or hangs."""


class _Waiter:
    """Waits for works. If they never end, only a thread stays behind until their group's own timeout."""

    def __init__(self, works: Sequence[dist.Work], polls: bool) -> None:
        self._works, self._polls = works, polls
        self._error: RuntimeError | None = None
        self._ended = threading.Event()
        if not polls:  # gloo has no question whether a message has arrived, and a wait with a timeout breaks its connections.
            threading.Thread(target=self._wait, daemon=True).start()

    def has_ended(self, patience: float) -> bool:
        """Wait so many seconds; return whether all works have ended.

        Raises:
            Lost: one has failed.
        """
        if self._polls:  # A wait that blocks could not be left any more.
            deadline = time.monotonic() + patience
            while not all(work.is_completed() for work in self._works):
                if time.monotonic() > deadline:
                    return False
                # Short, because each wait takes up to so much longer. Without it, this loop would keep the interpreter busy,
                # which other threads need.
                time.sleep(0.0002)
            # It returns at once, makes the current stream wait, and raises what went wrong.
            self._wait()
        elif not self._ended.wait(patience):
            return False
        if self._error is not None:
            raise Lost(str(self._error)) from self._error
        self._works = []
        return True

    def _wait(self) -> None:
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            self._error = error
        self._ended.set()


class Watch:
    """One run of a plan: each rank that fails reports it, so that the others end too, and name it.

    Args:
        ranks: the global ranks that run the plan.
        key: the name of the run, equal on these ranks and different from other runs.
        timeout: how long a rank waits for one collective.
        device: of the collectives.
    """

    def __init__(self, ranks: Sequence[int], key: str, timeout: timedelta, device: torch.device) -> None:
        self._polls = device.type != "cpu"
        self._ranks, self._rank, self._timeout = tuple(ranks), dist.get_rank(), timeout
        # A key of each run: the report of a run that failed before is not taken for one of this run.
        self._store = SharedStore(f"transfer/{key}")
        # A plan may be the first call of this package. From here on, other ranks can ask where this process is.
        announce()

    def wait(self, works: Sequence[dist.Work]) -> None:
        """Wait for collectives and messages.

        Raises:
            Lost: one failed, another rank has reported a failure, or the timeout has passed.
        """
        if not works:
            return
        deadline = time.monotonic() + self._timeout.total_seconds()
        waiter = _Waiter(works, self._polls)
        while not waiter.has_ended(_TRANSFER_SLICE):
            if self._store.has("failed"):
                raise Lost("another rank failed")
            if time.monotonic() > deadline:
                raise Lost(f"no answer within {self._timeout.total_seconds():g} s")

    def failed(self, error: Exception, doing: str, tensors: tuple[str, ...]) -> TransferError:
        """Report that this rank fails, wait shortly for the reports of the others, and make one error of all of them.

        A rank that only follows the failure of others reports an empty text. A rank without any report is dead, or hangs.
        """
        own = "" if isinstance(error, Lost) else f"{type(error).__name__}: {error}"
        shown = ", ".join(tensors[:3]) + (f" and {len(tensors) - 3} more" if len(tensors) > 3 else "")
        start = f"{doing} failed while {shown or 'no tensor'} was on its way: "
        end = ". The source is unchanged. The target is not complete"
        try:
            # The report first. A rank that finds "failed" reports too, and then reads the reports.
            self._store.set(f"rank {self._rank}", own)
            self._store.set("failed", "")
            # A rank that waits looks once in a second, so it has reported by then.
            missing, deadline = list(self._ranks), time.monotonic() + _TRANSFER_PATIENCE
            while missing and (left := deadline - time.monotonic()) > 0:
                self._store.wait([f"rank {rank}" for rank in missing], min(left, _TRANSFER_SLICE))
                missing = [rank for rank in missing if not self._store.has(f"rank {rank}")]
                missing = [rank for rank, fate in fates_of(missing).items() if fate.is_alive]  # Others report no more.
            reports = {rank: self._store.get(f"rank {rank}") for rank in self._ranks if self._store.has(f"rank {rank}")}
            silent = fates_of([rank for rank in self._ranks if rank not in reports])
        except RuntimeError as lost:  # The process that has the store has died.
            return TransferError(f"{start}{error}. The store of the process group does not answer ({lost}){end}", tensors)
        causes = [f"rank {rank}: {text}" for rank, text in reports.items() if text]
        causes += [f"rank {rank} {fate.text}" for rank, fate in silent.items()]
        ranks = tuple(rank for rank in self._ranks if rank in silent or reports[rank])
        return TransferError(start + ("; ".join(causes) or f"rank {self._rank}: {error}") + end, tensors, ranks)
