"""MemoryLog: a record of the allocations and frees of a group's buffers.

It records only while a monitor or a memory report uses it. It allocates no memory itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import torch

__all__ = ["GroupMemory", "MemoryLog", "allocate_storage", "free_storage", "high_water"]

_moments = itertools.count()
"""One counter for all logs of the process. It orders the events of several logs."""


class MemoryLog:
    """The allocations (positive) and frees (negative) of one kind of buffer: the bytes and the moment of each."""

    def __init__(self) -> None:
        self._events: list[tuple[int, int]] | None = None

    def start(self) -> None:
        """Drop earlier records, and record from now on."""
        self._events = []

    def stop(self) -> None:
        """Stop recording, and drop all records."""
        self._events = None

    @property
    def events(self) -> list[tuple[int, int]]:
        """(moment, bytes) of each allocation and free since :meth:`start`."""
        return self._events or []

    def note(self, nbytes: int) -> None:
        """Record ``nbytes`` that were allocated, or freed if negative."""
        if self._events is not None:
            self._events.append((next(_moments), nbytes))


class GroupMemory:
    """The logs of one group.

    Attributes:
        gathered: the buffers of gathered parameters, and the memory of keepers.
        gradients: the buffers of unreduced gradients.
        reduced: the reduced shards, which become ``.grad``.
    """

    def __init__(self) -> None:
        self.gathered, self.gradients, self.reduced = MemoryLog(), MemoryLog(), MemoryLog()


def high_water(logs: Iterable[tuple[str, MemoryLog]], start: Mapping[str, int]) -> tuple[int, dict[str, int]]:
    """The moment with the largest sum over all logs, and the bytes of each kind at that moment.

    Args:
        logs: pairs of a kind and a log.
        start: the bytes of each kind when the logs were started.

    Returns:
        the moment (-1: the start), and the bytes by kind.
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
    """Allocate the storage of ``tensor``, unless it is allocated. ``tensor`` must fill it. Its contents are undefined."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        storage.resize_(tensor.numel() * tensor.element_size())
        if log is not None:
            log.note(storage.nbytes())


def free_storage(tensor: torch.Tensor, log: MemoryLog | None = None) -> None:
    """Free the storage of ``tensor``. The tensor is valid again after :func:`allocate_storage`."""
    storage = tensor.untyped_storage()
    if log is not None and storage.nbytes():
        log.note(-storage.nbytes())
    storage.resize_(0)
