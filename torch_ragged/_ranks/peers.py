"""Peers: which ranks still live after a collective has failed, and PeerError, which names the others.

It issues no collective. While all ranks are well it writes one line to the store per process, and nothing else.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import hashlib
import hmac
import itertools
import json
import multiprocessing
import operator
import os
import secrets
import socket
import struct
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from multiprocessing.util import Finalize
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist

from torch_ragged._ranks.process import Process, myself, process_state_of
from torch_ragged._ranks.store import GROUP_ENDED, SharedStore, is_one_host

__all__ = [
    "WaitingCall",
    "CollectiveFailed",
    "Fate",
    "HELD",
    "Issued",
    "PeerError",
    "Peers",
    "STANDSTILL",
    "Ticket",
    "Tracker",
    "Whereabouts",
    "calls_of",
    "differing_settings",
    "fates_of",
    "is_of_backend",
    "is_watched",
    "issued_on",
    "listen",
    "name_of",
    "named",
    "peers_named",
    "tracker",
    "wait_for",
]


HELD = 4.0  # Seconds.
"""After so long in one call, without work and without traffic, a thread counts as held."""

_MOST_BUSY = 0.05
"""A thread that waits uses less than this part of a CPU."""

_MOST_BYTES = 2**16
"""A process that waits for another one writes less, in files and to the network."""

_REMEMBERED = 64
"""So many collectives of a process group are remembered by name."""

_INSIDE = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), str(Path(os.__file__).parent), "<string>")
"""Files of torch, of this package and of Python, and hooks on torch."""

_WRAPPER_FRAMES = ("wrapper", "decorate_context", "inner", "named")
_COLLECTIVES = ("_wait_all", "all_gather", "all_reduce", "all_to_all", "broadcast", "reduce_scatter")
_COMMUNICATING = tuple(f"{os.sep}torch{os.sep}{name}" for name in ("_ops.py", "distributed/distributed_c10d.py"))


class Ticket(NamedTuple):
    """One collective of a process group, by its number among those of this package."""

    group: weakref.ref[dist.ProcessGroup]
    number: int


class Issued:
    """The collectives of a process group that this process has issued: how many, and the last ones by name."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self.name = weakref.ref(group), group.group_name  # A destroyed group may not tell it any more.
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
    if group not in _issued:
        _issued[group] = Issued(group)
    return _issued[group]


def named(collective: str, parameters: str) -> str:
    """A collective and what it carries, which may be empty. Made only if a rank asks: a step has many collectives."""
    return f"{collective} of {parameters}" if parameters else collective


class WaitingCall(Protocol):
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

    @property
    def patience(self) -> float:
        """Seconds more than :data:`HELD` until a thread in it counts as held."""


class _CallOfTorch(NamedTuple):
    what: str
    ranks: Callable[[], Sequence[int]]
    tickets: Sequence[Ticket] = ()
    patience: float = 0.0


_calls: dict[int, list[peers_named]] = {}


def calls_of(thread: int) -> list[peers_named]:
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
        settings: what the root of the last forward communicates by, by name.
    """

    text: str
    call: str = ""
    ranks: list[int] | None = None
    is_held: bool = False
    tickets: list[tuple[str, int]] = field(default_factory=list)
    issued: dict[str, dict[int, str]] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)

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
    """Looks at one thread from time to time, and sees whether it stays in one call.

    Attributes:
        forward: the root module whose forward has begun last, and how many it has begun; empty before the first one.
        settings: returns a function that returns what this root communicates by; None if there is no such root.
        failed: the collective that has failed, while this process finds out why.
    """

    def __init__(self) -> None:
        self.forward: tuple[str, int] | tuple[()] = ()
        self.settings: Callable[[], Callable[[], dict[str, str]] | None] = lambda: None
        self.failed = ""
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
            stack = _stack_of(self._thread)
            if not stack:
                return Whereabouts("at the end of its program")
            where = _where(stack)
            block = next(reversed(calls_of(self._thread)), None)
            call: WaitingCall | None = block or _call_of_torch(stack)
            # Equal as long as no function of the stack goes on. (A tuple of a generator would be seen unfinished by a program
            # that calls gc.get_objects(), which ends this thread by an error.)
            token: object = (id(block), block.entered) if block else tuple([(id(frame), frame.f_lasti) for frame in stack])
            now, cpu, written = time.monotonic(), _cpu_time(self._thread), _bytes_written()
            spent = cpu - self._cpu
            if token != self._token or spent > 0.1 + _MOST_BUSY * (now - self._since) or written - self._written > _MOST_BYTES:
                self._token, self._since, self._cpu, self._written = token, now, cpu, written
            settings = (self.settings() or dict)()
            if call is None:
                return Whereabouts(where, settings=settings)
            ranks = call.ranks()
            return Whereabouts(
                f"in {call.what}, called {where}",
                call.what,
                list(ranks) if ranks else None,
                now - self._since >= HELD + call.patience,
                [(group.group_name, ticket.number) for ticket in call.tickets if (group := ticket.group()) is not None],
                {each.name: each.as_numbers() for each in list(_issued.values())},
                settings,
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


def _stack_of(thread: int) -> list[FrameType]:
    """The frames of a thread, the innermost first; none if it has ended."""
    # While the thread runs, ``f_back`` of its frames may lead to freed memory. So the thread must not run between the first
    # frame and the last: iterators of C alone make the list, and the interpreter gives the GIL away between bytecodes only.
    # Before Python 3.12, its garbage collector may run code of its own there.
    frames = itertools.islice(map(operator.methodcaller("get", thread), iter(sys._current_frames, None)), 1)
    walk = itertools.accumulate(itertools.chain(frames, itertools.repeat("f_back")), getattr)
    collects = gc.isenabled() and sys.version_info < (3, 12)
    if collects:  # Not known: how to do without. If the program switches it off in this moment, it is on again afterwards.
        gc.disable()
    try:
        return list(itertools.takewhile(bool, walk))
    finally:
        if collects:
            gc.enable()


def _where(stack: Sequence[FrameType]) -> str:
    """The innermost function that is the program's own; torch and other packages may lie below Python's own folder."""
    own = (frame for frame in stack if not frame.f_code.co_filename.startswith(_INSIDE))
    frame = next(own, stack[0])
    return f"in {frame.f_code.co_name} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"


def _call_of_torch(stack: Sequence[FrameType]) -> _CallOfTorch | None:
    """The collective of torch in which a thread waits; None if it does something else.

    The call has the name of the outermost function of torch or of this package, as ``barrier`` or ``full_tensor``.
    """
    frame = stack[0]
    name, given = frame.f_code.co_name, None
    # Before Python 3.13, ``f_locals`` holds what it has shown until the function returns: the program's tensors would live on.
    # So it is read only of functions that end with their collective. A redistribution calls the group itself, by these names.
    if frame.f_code.co_filename.startswith(_INSIDE[1]) and name in _COLLECTIVES:
        given = frame.f_locals.get("group")
    is_own = isinstance(given, dist.ProcessGroup)
    if not is_own and not frame.f_code.co_filename.endswith(_COMMUNICATING):
        return None
    if frame.f_code.co_filename.endswith("_ops.py"):
        # An op that its constructor is making has no name yet: to ask for it raises RecursionError.
        if frame.f_code.co_name == "__init__" or "c10d" not in str(frame.f_locals.get("self")):
            return None
    group: dist.ProcessGroup | None = given if is_own else None
    for outer in itertools.takewhile(lambda frame: frame.f_code.co_filename.startswith(_INSIDE), stack):
        if outer.f_code.co_filename.endswith(_COMMUNICATING[1]):
            group = group or outer.f_locals.get("group") or dist.group.WORLD
        if outer.f_code.co_name not in _WRAPPER_FRAMES and not outer.f_code.co_name.startswith("_"):
            name = outer.f_code.co_name
    # Messages between two ranks wait for one of the group: which one is not known.
    if not isinstance(group, dist.ProcessGroup) or any(part in name for part in ("send", "recv", "p2p")):
        return _CallOfTorch(name, lambda: ())
    return _CallOfTorch(f"{name} of process group {group.group_name}", lambda: dist.get_process_group_ranks(group))


STANDSTILL = "standstill"
"""The name of the part of the store in which a rank reports that ranks wait for each other; its key is ``text``."""

_SLICE = timedelta(seconds=2)
"""After so long a wait for a collective, a rank looks whether other ranks have reported a failure."""

_SLICES_BEFORE_PROBE = 5
"""After so many slices, a rank also looks whether the next rank's process lives."""

_PATIENCE = 10.0  # Seconds.
"""How long a rank waits for the reports of ranks whose processes live."""

_PROBE = 3.0  # Seconds.
"""How long a rank waits for the answer of another rank's host, after a collective has failed."""

_LONG_PROBE = 20.0  # Seconds.
"""The same while nothing has failed yet: a network that loses packets takes several attempts."""

_LONGEST_ERROR = 300
"""So many characters of the error that has ended a rank are told to others."""

_SIOCGIFADDR = 0x8915
"""What Linux calls the question for the address of an interface."""

_CALLERS = 32
"""So many callers may be connected at once."""


class PeerError(RuntimeError):
    """A collective failed, because another rank died, hangs, or is not reachable. Restart the run from a checkpoint.

    Attributes:
        ranks: the global ranks that died or did not answer, as far as this rank knows.
        collective: what failed, such as ``"all-gather"``.
        parameters: what it carried: the name of the first parameter and the number of the others; empty if it carried none.
    """

    def __init__(self, text: str, ranks: tuple[int, ...] = (), collective: str = "", parameters: str = "") -> None:
        super().__init__(text)
        self.ranks, self.collective, self.parameters = ranks, collective, parameters

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.ranks, self.collective, self.parameters)


def name_of(ranks: Sequence[int]) -> str:
    """A name for a set of ranks in the store, equal on all of them."""
    return f"{len(ranks)}-{hashlib.sha256(repr(tuple(ranks)).encode()).hexdigest()[:16]}"


def shown(ranks: Sequence[int]) -> str:
    """Some ranks, for errors: at most eight of them."""
    text = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}"
    return f"{text} and {len(ranks) - 8} more" if len(ranks) > 8 else text


class Peers:
    """The ranks that take part in the same collectives. If one of them fails, it reports it, so that the others end too.

    ::

        rank 0   all-gather fails: connection closed     reports, asks for reports   "rank 2 died: process 411 on host a ..."
        rank 1   waits in another collective             finds the report            "rank 2 died: ..."
        rank 2   killed: no report, and its process does not listen any more

    After a failure the process groups of these ranks are of no use: each later wait fails with the same ranks named.

    Args:
        ranks: their global ranks.
    """

    _known: ClassVar[dict[tuple[int, ...], Peers]] = {}
    _standstill: ClassVar[tuple[SharedStore, str] | None] = None

    @classmethod
    def stand_still(cls, store: SharedStore, text: str) -> None:
        """Ranks wait for each other: each wait and each error of this process says so from now on, as ``text``."""
        cls._standstill = store, text

    @classmethod
    def of(cls, ranks: Sequence[int]) -> Peers:
        """The peers with these ranks; one object per default process group."""
        cls._known = {key: each for key, each in cls._known.items() if each._store.is_current}
        return cls._known.setdefault(tuple(sorted(ranks)), Peers(ranks))

    @classmethod
    def check_all(cls, probes: bool = False) -> None:
        """This rank has waited for long: if a rank that it has collectives with has failed, raise.

        Args:
            probes: also look whether the process of the next rank lives, in the background. A later call raises if not. If a
                host is lost, the rank before its first one finds out, long before the collective's timeout.

        Raises:
            CollectiveFailed: a rank has reported a failure, or is not reachable.
        """
        if cls._standstill is not None and cls._standstill[0].is_current:
            raise CollectiveFailed(cls._standstill[1])
        current = peers_named.current_ranks()
        for peers in list(cls._known.values()):
            # After a failure, the ranks that are left may go on with each other.
            has_gone_on = peers._blame is not None and not (set(peers._blame[0]) or set(peers._ranks)) & current
            if not peers._store.is_current or has_gone_on:
                continue
            if peers._store.has("failed"):
                raise CollectiveFailed("another rank has reported that a collective failed")
            if probes:
                peers._check_next()

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = tuple(sorted(ranks))
        self._store = SharedStore(f"peers/{name_of(self._ranks)}")
        self._blame: tuple[tuple[int, ...], str] | None = None
        self._probe: _Probe | None = None

    def _check_next(self) -> None:
        if self._probe is None or self._probe.is_stale:
            index = self._ranks.index(dist.get_rank())
            self._probe = _Probe(self._ranks[(index + 1) % len(self._ranks)])
        self._probe.check()

    def check_alive(self, ranks: Sequence[int]) -> None:
        """This rank has waited long for ``ranks``: if the process of one of them has ended, raise.

        Raises:
            CollectiveFailed: it has.
        """
        if not all(fate.is_alive for fate in fates_of(ranks).values()):
            raise CollectiveFailed("this rank waited for it")

    def error(self, collective: str, cause: object, parameters: str = "") -> PeerError:
        """Report that ``collective`` failed on this rank, and make one error of what is known of all ranks.

        This takes up to 11 s, if there are ranks whose processes live and which do not report.
        """
        if self._blame is None:
            try:
                self._blame = self._find_blame(f"{collective}: {cause}")
            except RuntimeError as lost:
                self._blame = (), f"{cause}. {_store_host()} is lost, too, or the network to it: {lost}"
        ranks, text = self._blame
        what = f"{collective} of {parameters}" if parameters else collective
        return PeerError(f"{what} failed: {text}", ranks, collective, parameters)

    def _find_blame(self, own: str) -> tuple[tuple[int, ...], str]:
        """The ranks that have failed, and a text that names them."""
        # This rank's connections may close before it has seen the report itself.
        standstill = SharedStore(STANDSTILL)
        if standstill.has("text"):
            return (), standstill.get("text")
        # Other ranks may wait for this rank in collectives of other meshes.
        for peers in {id(each): each for each in (self, *self._known.values()) if each._store.is_current}.values():
            peers._store.set(f"rank {dist.get_rank()}", own)
            peers._store.set("failed", "")
        fates: dict[int, Fate] = {}
        for seconds in (1.0, _PATIENCE):
            self._store.wait([f"rank {rank}" for rank in self._ranks], seconds)
            present = [rank for rank in self._ranks if self._store.has(f"rank {rank}")]
            fates = fates_of([rank for rank in self._ranks if rank not in present])
            # If a process has ended, the cause is found. Processes that live may report yet.
            if not all(fate.is_alive for fate in fates.values()):
                break
        gone = {rank: fate for rank, fate in fates.items() if not fate.is_alive}
        # Ranks that live may only be late. They are named if no other rank is.
        named = gone or fates
        if named:
            text = "; ".join(f"rank {rank} {fate.text}" for rank, fate in named.items())
            return tuple(named), f"{text}. This rank: {own}. Look at the log of these ranks, and restart from a checkpoint"
        reports = "; ".join(f"rank {rank}: {self._store.get(f'rank {rank}')}" for rank in self._ranks)
        settings = differing_settings(fates_of(self._ranks))
        text = "all ranks live, so the network failed, or a collective took longer than its timeout"
        return (), f"{f'all ranks live. {settings}' if settings else f'{text}: '}{reports}"


class CollectiveFailed(RuntimeError):
    """A collective failed on this rank or on another one. :class:`peers_named` makes a PeerError of it."""


Named = TypeVar("Named", bound="peers_named")


class peers_named:
    """A context: if its block raises an error of a backend (gloo, NCCL), it raises a :class:`PeerError` that names the ranks.

    One object may be entered many times, also by several threads: of a block it keeps nothing.

    Args:
        collective: for the error.
        parameters: what the collective carries, for the error; may be empty.
        ranks: returns the global ranks that take part; called if the block takes long, and after an error.
        tickets: the collectives that the block waits for, if they were issued with one.
        patience: seconds more than :data:`HELD` until this rank counts as held; for a block that finds the cause by itself.
    """

    def __init__(
        self,
        collective: str,
        parameters: str,
        ranks: Callable[[], Sequence[int]],
        tickets: Sequence[Ticket] = (),
        patience: float = 0.0,
    ) -> None:
        self._collective, self._parameters, self.ranks, self.tickets = collective, parameters, ranks, tickets
        self.patience = patience
        self.entered = 0

    @property
    def what(self) -> str:
        """What the block does, as other ranks read it while it waits."""
        return named(self._collective, self._parameters)

    @staticmethod
    def current_ranks() -> set[int]:
        """The ranks of the innermost context of this thread."""
        calls = calls_of(threading.get_ident())
        return set(calls[-1].ranks()) if calls else set()

    def __enter__(self: Named) -> Named:
        self.entered += 1  # A thread that is in a later block has not been held in the first one.
        _calls.setdefault(threading.get_ident(), []).append(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        _calls[threading.get_ident()].pop()
        if error is None:
            return
        if isinstance(error, RuntimeError) and not isinstance(error, PeerError) and is_of_backend(error):
            tracker.failed = self.what
            try:
                failure = Peers.of(self.ranks()).error(self._collective, error, self._parameters)
            finally:
                tracker.failed = ""
            raise failure from error


def is_of_backend(error: RuntimeError) -> bool:
    """Whether a process group's backend has raised ``error``: another rank, or the network, may be the cause."""
    # gloo's errors are plain RuntimeErrors. Most begin with the path of its source.
    is_of_gloo = any(part in str(error) for part in ("gloo", "Application timeout caused pair closure"))
    return is_of_gloo or isinstance(error, (CollectiveFailed, dist.DistError))


def wait_for(work: Any, look: Callable[[], None] = lambda: None) -> None:
    """``work.wait()`` for a collective of gloo, with a look from time to time whether other ranks have failed.

    Args:
        work: the collective in flight.
        look: is called after each slice of the wait, and may raise.

    Raises:
        RuntimeError: the collective has failed, here or on another rank.
    """
    for slices in itertools.count(1):
        try:
            work.wait(_SLICE)
            return
        except RuntimeError:
            if work.is_completed():  # The collective has failed; or it has ended just after the timeout.
                work.wait()
                return
            look()
            Peers.check_all(probes=slices >= _SLICES_BEFORE_PROBE)


# -- processes -----------------------------------------------------------------------------------------------------------


def is_watched() -> bool:
    """Whether ranks may ask this process where it is. The environment variable TORCH_RAGGED_WATCH=0 switches it off."""
    return os.environ.get("TORCH_RAGGED_WATCH") != "0"


class _Listener:
    """A socket that listens as long as this process lives, and tells callers with its token where this process is.

    The store hands out the address and the token, so only ranks of the same job know them. The kernel accepts the connection,
    also while Python computes: a rank that connects knows that the process lives.
    """

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._token = secrets.token_hex(16)
        self._lock = threading.Lock()
        self._announced: SharedStore | None = None
        self._process, self._rank = os.getpid(), -1
        atexit.register(self._stop)
        # Not atexit: no thread starts there since Python 3.12, and the store needs one. It exists from Python 3.9 on.
        threading._register_atexit(self._tell_end)  # type: ignore[attr-defined]
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._close)  # A data loader's worker must not answer for this process.

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _stop(self) -> None:
        """The program has ended: this process takes part in no collective any more, even if it does not end yet."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # This also ends the thread.
            self._close()

    def _tell_end(self) -> None:
        """The program ends, perhaps by an error. Others wait for this rank in vain, and see only that its process ends."""
        # In a child of multiprocessing, the error still propagates; torch's mp.spawn exits while it handles the error.
        error = sys.exc_info()[1] or getattr(sys, "last_value", None)
        if isinstance(error, SystemExit):
            error = error.__context__
        # An error of a collective is about another rank, or the network.
        is_cause = error is not None and not isinstance(error, PeerError)
        if isinstance(error, RuntimeError) and is_of_backend(error):
            is_cause = False
        # Ranks that wait in their first call find no socket of this one.
        if os.getpid() != self._process or not (is_cause or self._socket is None):
            return
        with contextlib.suppress(*GROUP_ENDED):
            store, rank = self._announced or SharedStore("processes"), self._rank if self._announced else dist.get_rank()
            if is_cause or not store.has(f"ended {rank}"):
                store.set(f"ended {rank}", _text_of_error(error) if error is not None and is_cause else "")

    def announce(self) -> None:
        with self._lock:
            if self._announced is not None and self._announced.is_current:
                return
            store, place = SharedStore("processes"), asdict(myself())
            if is_watched():
                address = _own_address()
                place.update(address=address, port=self._listen(address), token=self._token)
            store.set(f"rank {dist.get_rank()}", json.dumps(place))
            if self._announced is None and multiprocessing.parent_process() is not None:
                Finalize(None, self._tell_end, exitpriority=0)
            self._announced, self._rank, self._process = store, dist.get_rank(), os.getpid()

    def _listen(self, address: str) -> int:
        """The port on which this process listens at ``address``, and at no other one."""
        if self._socket is not None and self._socket.getsockname()[0] != address:  # The last process group had another network.
            self._socket.shutdown(socket.SHUT_RDWR)
            self._close()
        if self._socket is None:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            self._socket = socket.create_server((address, 0), family=family, backlog=1024)
            run = functools.partial(_serve_peers, self._socket, self._token)
            threading.Thread(target=run, name="whereabouts", daemon=True).start()
        return int(self._socket.getsockname()[1])


def _serve_peers(server: socket.socket, token: str) -> None:
    slots = threading.Semaphore(_CALLERS)
    while True:
        try:
            caller, _ = server.accept()
        except OSError:  # The process ends.
            return
        if not slots.acquire(blocking=False):  # A caller that connects and sends nothing must not keep others waiting.
            caller.close()
            continue
        with contextlib.suppress(RuntimeError):  # No thread can start while Python ends.
            threading.Thread(target=_answer, args=(caller, token, slots), name="whereabouts", daemon=True).start()


def _answer(caller: socket.socket, token: str, slots: threading.Semaphore) -> None:
    """Tell a caller where this process is, if it sends the token. Others get no byte."""
    try:
        with contextlib.suppress(OSError, *GROUP_ENDED), caller:
            caller.settimeout(_PROBE)
            if hmac.compare_digest(caller.recv(len(token), socket.MSG_WAITALL), token.encode()):
                caller.sendall(tracker.look().to_json().encode())
    finally:
        slots.release()


_listener = _Listener()


def listen() -> None:
    """Tell the other ranks where this process can be found, once per default process group: one write to the store."""
    _listener.announce()


def _text_of_error(error: BaseException) -> str:
    """The error that ends this program, and the innermost line of the program's own that has raised it."""
    lines = list(traceback.walk_tb(error.__traceback__))
    own = [each for each in lines if not each[0].f_code.co_filename.startswith(_INSIDE)] or lines
    where = f" ({os.path.basename(own[-1][0].f_code.co_filename)}:{own[-1][1]})" if own else ""
    return f"{type(error).__name__}: {str(error).strip().partition(os.linesep)[0][:_LONGEST_ERROR]}{where}"


class Fate:
    """What is known of another rank's process: whether it is alive, and where it is, if it has answered.

    ``error``: what has ended its program, if it was an error.
    """

    def __init__(self, is_alive: bool, text: str, where: Whereabouts | None = None, error: str = "") -> None:
        self.is_alive, self.text, self.where, self.error = is_alive, text, where, error


def fates_of(ranks: Sequence[int]) -> dict[int, Fate]:
    """What happened to the processes of these global ranks, by a connection to each. It takes up to 3 s."""
    store = SharedStore("processes")
    places: dict[int, dict[str, Any]] = {
        rank: json.loads(store.get(f"rank {rank}")) for rank in ranks if store.has(f"rank {rank}")
    }
    with ThreadPoolExecutor(32) as threads:  # A host that is lost answers none of its ranks' probes.
        fates = dict(zip(ranks, threads.map(lambda rank: _fate(places.get(rank), _PROBE), ranks)))
    for rank in [rank for rank, fate in fates.items() if fate.where is None and store.has(f"ended {rank}")]:
        error = store.get(f"ended {rank}")
        fates[rank] = Fate(False, f"ended by {error}" if error else "died: its program has ended", error=error)
    return fates


def differing_settings(fates: dict[int, Fate]) -> str:
    """A sentence on the settings that differ between ranks, with a space behind it; empty if none does.

    Ranks whose last forwards were of other roots have no setting in common.
    """
    of_rank = {rank: fate.where.settings for rank, fate in sorted(fates.items()) if fate.where and fate.where.settings}
    told = []
    for name in next(iter(of_rank.values()), ()):
        ranks: dict[str, list[int]] = {}
        for rank, settings in of_rank.items():
            if name in settings:
                ranks.setdefault(settings[name], []).append(rank)
        if len(ranks) > 1:
            told.append(f"{name} is {' and '.join(f'{value} on {shown(some)}' for value, some in ranks.items())}")
    return f"Settings differ: {'; '.join(told)}. " if told else ""


class _Probe:
    """Asks in the background whether the process of ``rank`` lives."""

    def __init__(self, rank: int) -> None:
        self._rank, self._fate, self._begin = rank, Fate(True, ""), time.monotonic()
        threading.Thread(target=self._run, name="probe", daemon=True).start()

    @property
    def is_stale(self) -> bool:
        return time.monotonic() - self._begin > 2 * _LONG_PROBE

    def check(self) -> None:
        """Raise CollectiveFailed if the answer has come that it does not live."""
        if not self._fate.is_alive:
            raise CollectiveFailed(f"rank {self._rank} {self._fate.text}")

    def _run(self) -> None:
        with contextlib.suppress(*GROUP_ENDED):  # If the store is lost, this rank's other calls of it raise.
            store = SharedStore("processes")
            if store.has(f"rank {self._rank}"):
                self._fate = _fate(json.loads(store.get(f"rank {self._rank}")), _LONG_PROBE)


def _fate(place: dict[str, Any] | None, patience: float) -> Fate:
    """What happened to the process that has announced ``place``."""
    if place is None:
        return Fate(True, "has not answered")
    process, address = Process(place["host"], place["pid"], place["started"]), place.get("address", "")
    host = process.host.partition("/")[0]
    state = process_state_of(process)
    if state == "stopped":
        return Fate(True, f"is stopped: {process}")
    if state == "gone":
        return Fate(False, f"died: {process} has ended")
    if not address or (_is_loopback(address) and host != socket.gethostname()):  # From here, nothing is known.
        return Fate(True, f"has not answered: {process}")
    try:
        with socket.create_connection((address, place["port"]), timeout=patience) as connection:
            where = _where_is(connection, place["token"])
    except ConnectionRefusedError:
        return Fate(False, f"died: {process} has ended")
    except OSError as error:
        return Fate(False, f"is not reachable: host {host} ({address}) does not answer ({error})")
    if where is None:
        return Fate(True, f"lives and has not answered: {process} hangs, or does something else")
    return Fate(True, f"lives and has not answered: {process} is {where.text}", where)


def _where_is(connection: socket.socket, token: str) -> Whereabouts | None:
    """What the process at the other end says; None if it says nothing in time, as one that was stopped."""
    with contextlib.suppress(OSError, ValueError):
        connection.settimeout(_PROBE)
        connection.sendall(token.encode())
        return Whereabouts.from_json(b"".join(iter(lambda: connection.recv(2**16), b"")))
    return None


def _is_loopback(address: str) -> bool:
    """Whether only this host reaches an address."""
    return address.startswith("127.") or address == "::1"


def _own_address() -> str:
    """The address under which the other ranks reach this process; a loopback address if all of them are on this host."""
    if is_one_host():
        return "127.0.0.1"
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        with contextlib.suppress(ImportError, OSError):  # NCCL also takes beginnings of names, and names to leave out.
            return _address_of(os.environ.get(variable, "").partition(",")[0])
    # The one by which this host reaches the store's host; without such a name, by which it reaches others (a documentation
    # address). A datagram socket sends nothing here.
    for host in filter(None, (os.environ.get("MASTER_ADDR"), "192.0.2.1")):
        with contextlib.suppress(OSError):
            family, _, _, _, target = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0])
    return "127.0.0.1"


def _address_of(interface: str) -> str:
    """The IPv4 address of a network interface of Linux."""
    import fcntl  # Windows does not have it.

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)[20:24])


def _store_host() -> str:
    where = f"at {os.environ['MASTER_ADDR']} " if "MASTER_ADDR" in os.environ else ""
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return f"The store of the process group {where}(in {'torchrun' if has_agent else 'the process of rank 0'})"
