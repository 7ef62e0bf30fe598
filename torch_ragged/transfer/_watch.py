"""Watch: waits for the collectives of a transfer, and looks in the store whether another rank has failed. No collective."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torch_ragged._register._torch import default_store
from torch_ragged.transfer._errors import TransferError

__all__ = ["Lost", "Watch"]

_SLICE = timedelta(seconds=1)
"""After so long a wait, a rank looks whether another rank has failed."""

_PATIENCE = timedelta(seconds=10)
"""How long a rank whose collective failed waits for the reports of the others. A rank without a report is taken for dead."""


class Lost(Exception):
    """A collective did not end: another rank failed, died or hangs."""


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
        self._store = dist.PrefixStore(f"torch_ragged/transfer/{key}", default_store())

    def wait(self, work: Any) -> None:
        """Wait for a collective.

        Raises:
            Lost: it failed, another rank has reported a failure, or the timeout has passed.
        """
        deadline = time.monotonic() + self._timeout.total_seconds()
        while not self._ends(work):
            if self._store.check(["failed"]):
                raise Lost("another rank failed")
            if time.monotonic() > deadline:
                raise Lost(f"no answer within {self._timeout.total_seconds():g} s")

    def _ends(self, work: Any) -> bool:
        """Wait for a slice of time; return whether the collective has ended."""
        if self._polls:  # A wait with a timeout would abort NCCL's communicator.
            deadline = time.monotonic() + _SLICE.total_seconds()
            while not work.is_completed():
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.0002)
        try:
            work.wait(*(() if self._polls else (_SLICE,)))
            return True
        except RuntimeError as error:
            if not work.is_completed():
                return False
            try:
                work.wait()  # It has failed; or it has ended just after the slice.
            except RuntimeError:
                raise Lost(str(error)) from error
            return True

    def failed(self, error: Exception, doing: str, tensors: tuple[str, ...]) -> TransferError:
        """Report that this rank fails, wait shortly for the reports of the others, and make one error of all of them.

        A rank that only follows the failure of others reports an empty text. A rank without any report is dead, or hangs.
        """
        own = "" if isinstance(error, Lost) else f"{type(error).__name__}: {error}"
        shown = ", ".join(tensors[:3]) + (f" and {len(tensors) - 3} more" if len(tensors) > 3 else "")
        start = f"{doing} failed while {shown or 'no tensor'} was on its way: "
        end = ". The source is unchanged. The target is not complete"
        try:
            self._store.set(f"rank {self._rank}", own)
            self._store.set("failed", "")
            keys = {rank: f"rank {rank}" for rank in self._ranks}
            with contextlib.suppress(RuntimeError):
                self._store.wait(list(keys.values()), _PATIENCE)
            reports = {rank: self._store.get(key).decode() for rank, key in keys.items() if self._store.check([key])}
        except RuntimeError as lost:  # The process that has the store has died.
            return TransferError(f"{start}{error}. The store of the process group does not answer ({lost}){end}", tensors)
        silent = [rank for rank in self._ranks if rank not in reports]
        causes = [f"rank {rank}: {text}" for rank, text in reports.items() if text]
        causes += [f"rank {rank} died or hangs" for rank in silent]
        ranks = tuple(rank for rank in self._ranks if rank in silent or reports[rank])
        return TransferError(start + ("; ".join(causes) or f"rank {self._rank}: {error}") + end, tensors, ranks)
