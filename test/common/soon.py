"""Ranks that notice soon that they wait in vain: tests need not wait as long as programs, whose ranks may only be late."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from unittest import mock

from torch_ragged._ranks import agreement, peers, standstill
from torch_ragged.fsdp.comm import _call_log
from torch_ragged.transfer import _watch

__all__ = ["soon"]

_SLICE = 0.2  # Seconds.


@contextlib.contextmanager
def soon() -> Iterator[None]:
    """The package's timers on this rank are a fifth of what they are. Also a decorator of what ranks run, below ``@ranks``."""
    slice_ = datetime.timedelta(seconds=_SLICE)
    with contextlib.ExitStack() as stack:
        for module, values in {
            peers: {"HELD": 0.8, "_SLICE": slice_, "_PATIENCE": 2.0},
            standstill: {"_PERIOD": 0.2, "_PAUSE": 0.8, "_NOTICE": 0.3},
            agreement: {"_ANSWER_SLICE": _SLICE},
            _call_log: {"_CALL_SLICE": slice_, "_FIRST_SLICE": slice_, "_CALL_PATIENCE": 2.0},
            _watch: {"_TRANSFER_SLICE": _SLICE, "_TRANSFER_PATIENCE": 2.0},
        }.items():
            for name, value in values.items():
                stack.enter_context(mock.patch.object(module, name, value))
        yield
