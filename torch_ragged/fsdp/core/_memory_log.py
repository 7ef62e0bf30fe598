"""MemoryLog: the bytes that a group's buffers hold, as they change.

It records only while a monitor or a memory report reads it. It allocates nothing itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import torch

__all__ = ["GroupMemory", "MemoryLog", "allocate_storage", "free_storage", "high_water"]

_moments = itertools.count()
"""One count for all logs of the process: it puts the events of several logs in order."""


class MemoryLog:
    """The allocations (positive) and frees (negative) of one kind of buffer, in bytes, with the moment of each."""

    def __init__(self) -> None:
        self._events: list[tuple[int, int]] | None = None

    def start(self) -> None:
        """Record from now on; what was recorded before is dropped."""
        self._events = []

    def stop(self) -> None:
        """Record no more, and drop what was recorded."""
        self._events = None

    @property
    def events(self) -> list[tuple[int, int]]:
        """(moment, bytes) of each allocation and free since :meth:`start`."""
        return self._events or []

    def note(self, nbytes: int) -> None:
        """``nbytes`` were allocated, or freed if negative."""
        if self._events is not None:
            self._events.append((next(_moments), nbytes))


class GroupMemory:
    """The logs of one group.

    Attributes:
        gathered: of gathered parameters, and of what is kept of them.
        gradients: of gradients that are not reduced yet.
        reduced: of reduced shards on their way to ``.grad``, where they stay.
    """

    def __init__(self) -> None:
        self.gathered, self.gradients, self.reduced = MemoryLog(), MemoryLog(), MemoryLog()


def high_water(logs: Iterable[tuple[str, MemoryLog]], start: Mapping[str, int]) -> tuple[int, dict[str, int]]:
    """The moment at which logs of several kinds held most together, and the bytes of each kind then.

    Args:
        logs: each with the kind that it counts as.
        start: bytes of each kind when the logs were started.

    Returns:
        moment (-1: the start was the highest) and bytes by kind.
    """
    events = sorted((moment, nbytes, kind) for kind, log in logs for moment, nbytes in log.events)
    now = dict(start)
    total = most = sum(now.values())
    best = (-1, dict(now))
    for moment, nbytes, kind in events:
        now[kind] += nbytes
        total += nbytes
        if total > most:
            most, best = total, (moment, dict(now))
    return best


def allocate_storage(tensor: torch.Tensor, log: MemoryLog | None = None) -> None:
    """Allocate the storage of ``tensor``, which fills it, unless it is allocated; its contents are undefined."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        storage.resize_(tensor.numel() * tensor.element_size())
        if log is not None:
            log.note(storage.nbytes())


def free_storage(tensor: torch.Tensor, log: MemoryLog | None = None) -> None:
    """Free the storage of ``tensor``; the tensor is valid again after :func:`allocate_storage`."""
    storage = tensor.untyped_storage()
    if log is not None and storage.nbytes():
        log.note(-storage.nbytes())
    storage.resize_(0)
