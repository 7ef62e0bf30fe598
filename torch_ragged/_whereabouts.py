"""Whereabouts: the call in which this process waits for other ranks, as these can ask. Nothing here communicates.

It must not change what the training thread does: it only looks at its stack.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

__all__ = ["HELD", "Call", "Issued", "Ticket", "Tracker", "Whereabouts", "calls_of", "issued_on", "named", "tracker"]

HELD = 4.0  # Seconds.
"""After so long in one call, without work and without traffic, a thread counts as held."""

_MOST_BUSY = 0.05
"""A thread that waits uses less than this part of a CPU."""

_MOST_BYTES = 2**16
"""A process that waits for another one writes less, in files and to the network."""

_REMEMBERED = 64
"""So many collectives of a process group are remembered by name."""

_INSIDE = (str(Path(torch.__file__).parent), str(Path(__file__).parent), str(Path(os.__file__).parent), "<string>")
"""Files of torch, of this package and of Python, and hooks on torch."""

_WRAPPERS = ("wrapper", "decorate_context", "inner", "named")
_COMMUNICATING = tuple(f"{os.sep}torch{os.sep}{name}" for name in ("_ops.py", "distributed/distributed_c10d.py"))


class Ticket(NamedTuple):
    """One collective of a process group, by its number among those of this package."""

    group: weakref.ref[dist.ProcessGroup]
    number: int


class Issued:
    """The collectives of a process group that this process has issued: how many, and the last ones by name."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self._count = 0
        self._names: deque[tuple[str, str]] = deque(maxlen=_REMEMBERED)

    def issue(self, collective: str, parameters: str = "") -> Ticket:
        """Note one that is about to be issued. Ranks that run the same program note the same ones, in the same order."""
        self._count += 1
        self._names.append((collective, parameters))
        return Ticket(self._group, self._count)

    def as_numbers(self) -> dict[int, str]:
        """The last ones, by number."""
        names = list(self._names)
        return {number: named(*each) for number, each in enumerate(names, self._count - len(names) + 1)}


_issued: weakref.WeakKeyDictionary[dist.ProcessGroup, Issued] = weakref.WeakKeyDictionary()


def issued_on(group: dist.ProcessGroup) -> Issued:
    """The collectives of ``group``."""
    return _issued.setdefault(group, Issued(group))


def named(collective: str, parameters: str) -> str:
    """A collective and what it carries, which may be empty. Made only if a rank asks: a step has many collectives."""
    return f"{collective} of {parameters}" if parameters else collective


class Call(Protocol):
    """A call in which a thread may wait."""

    @property
    def what(self) -> str:
        """What it does."""

    @property
    def ranks(self) -> Callable[[], Sequence[int]]:
        """Returns the global ranks that take part; none if they are not known."""

    @property
    def tickets(self) -> Sequence[Ticket]:
        """Its collectives, if they were issued with a ticket."""


class _CallOfTorch(NamedTuple):
    what: str
    ranks: Callable[[], Sequence[int]]
    tickets: Sequence[Ticket] = ()


_calls: dict[int, list[Call]] = {}


def calls_of(thread: int) -> list[Call]:
    """The calls that a thread is in, the innermost last."""
    return _calls.setdefault(thread, [])


@dataclass(frozen=True)
class Whereabouts:
    """Where the training thread of a process is.

    Attributes:
        text: for errors.
        call: the call in which it waits for other ranks, equal on ranks that are in the same call; empty if it does not wait.
        ranks: the global ranks that take part in the call; None if they are not known.
        is_held: whether it has been there for long, without work and without traffic.
        tickets: the collectives that it waits for, as (process group, number).
        issued: the last collectives of each process group, by number.
    """

    text: str
    call: str = ""
    ranks: list[int] | None = None
    is_held: bool = False
    tickets: list[tuple[str, int]] = field(default_factory=list)
    issued: dict[str, dict[int, str]] = field(default_factory=dict)

    def to_json(self) -> str:
        """As a text, for the rank that asks."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Whereabouts:
        """What another rank has sent."""
        values = json.loads(text)
        issued = {group: {int(number): what for number, what in each.items()} for group, each in values["issued"].items()}
        return cls(**{**values, "issued": issued, "tickets": [(group, number) for group, number in values["tickets"]]})


class Tracker:
    """Looks at one thread from time to time, and sees whether it stays in one call."""

    def __init__(self) -> None:
        self._thread, self._lock = threading.main_thread().ident, threading.Lock()
        self._token: object = None
        self._since, self._cpu, self._written = time.monotonic(), 0.0, 0

    def watch_this_thread(self) -> None:
        """The calling thread is the one that trains."""
        self._thread = threading.get_ident()

    def look(self) -> Whereabouts:
        """Where the thread is now. Called once a second, and when another rank asks."""
        with self._lock:
            assert self._thread is not None
            frame = sys._current_frames().get(self._thread)
            if frame is None:
                return Whereabouts("at the end of its program")
            where = _where(frame)
            calls = calls_of(self._thread)
            call: Call | None = calls[-1] if calls else _call_of_torch(frame)
            token: object = id(call) if calls else _token_of(frame)
            now, cpu, written = time.monotonic(), _cpu_time(self._thread), _bytes_written()
            spent = cpu - self._cpu
            if token != self._token or spent > 0.1 + _MOST_BUSY * (now - self._since) or written - self._written > _MOST_BYTES:
                self._token, self._since, self._cpu, self._written = token, now, cpu, written
            if call is None:
                return Whereabouts(where)
            ranks = call.ranks()
            return Whereabouts(
                f"in {call.what}, called {where}",
                call.what,
                list(ranks) if ranks else None,
                now - self._since >= HELD,
                [(group.group_name, ticket.number) for ticket in call.tickets if (group := ticket.group()) is not None],
                {group.group_name: each.as_numbers() for group, each in list(_issued.items())},
            )


tracker = Tracker()
"""Of the thread that trains: the one whose root has run its first forward last; before that, the main thread."""


def _cpu_time(thread: int) -> float:
    """Seconds of CPU that a thread has used; 0 where this is not known."""
    with contextlib.suppress(AttributeError, OSError):
        return time.clock_gettime(time.pthread_getcpuclockid(thread))
    return 0.0


def _bytes_written() -> int:
    """Bytes that this process has written, to files and sockets; 0 where this is not known."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        with open("/proc/self/io") as file:
            return int(next(line for line in file if line.startswith("wchar")).split()[1])
    return 0


def _token_of(frame: FrameType | None) -> tuple[tuple[int, int], ...]:
    """Equal as long as no function of the stack goes on."""
    found = []
    while frame is not None:
        found.append((id(frame), frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


def _where(frame: FrameType | None) -> str:
    """The innermost function that is the program's own; torch and other packages may lie below Python's own folder."""
    innermost = frame
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back
    frame = frame or innermost
    assert frame is not None
    return f"in {frame.f_code.co_name} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"


def _call_of_torch(frame: FrameType) -> _CallOfTorch | None:
    """The collective of torch in which a thread waits; None if it does something else.

    The call has the name of the outermost function of torch or of this package, as ``barrier`` or ``full_tensor``.
    """
    if not frame.f_code.co_filename.endswith(_COMMUNICATING):
        return None
    if frame.f_code.co_filename.endswith("_ops.py") and "c10d" not in str(frame.f_locals.get("self")):
        return None
    name, outer = frame.f_code.co_name, frame
    group: dist.ProcessGroup | None = None
    while outer.f_code.co_filename.startswith(_INSIDE):
        if outer.f_code.co_filename.endswith(_COMMUNICATING[1]):
            group = group or outer.f_locals.get("group") or dist.group.WORLD
        if outer.f_code.co_name not in _WRAPPERS and not outer.f_code.co_name.startswith("_"):
            name = outer.f_code.co_name
        if outer.f_back is None:
            break
        outer = outer.f_back
    # Messages between two ranks wait for one of the group: which one is not known.
    if not isinstance(group, dist.ProcessGroup) or any(part in name for part in ("send", "recv", "p2p")):
        return _CallOfTorch(name, lambda: ())
    return _CallOfTorch(f"{name} of process group {group.group_name}", lambda: dist.get_process_group_ranks(group))
