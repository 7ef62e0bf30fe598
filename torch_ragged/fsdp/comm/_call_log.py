"""CallLog: the calls of sharded modules in a forward. All ranks must make the same calls, in the same order.

Otherwise, the all-gather of one module meets that of another module: ranks would wait for each other for ever, or compute with
wrong parameters. Ranks compare only calls that are not those of the last forward, through the store of their process group.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import time
import weakref
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from torch_ragged._ranks.peers import Peers, fates_of, name_of, peers_named, shown, tracker
from torch_ragged._ranks.peers import wait_for as _wait_for
from torch_ragged._ranks.standstill import announce, look_for_standstill
from torch_ragged._ranks.store import SharedStore

__all__ = ["CallLog", "Predictor", "wait_for_call"]

_CALL_SLICE = timedelta(seconds=2)
"""After so long a wait, a rank looks whether other ranks have made other calls."""

_FIRST_SLICE = timedelta(seconds=1)
"""After so long a wait for a call that was not expected, a rank reports it: before the others look for a report."""

_CALL_PATIENCE = 10.0  # Seconds.
"""How long a rank that has seen a difference waits for the reports of the others, so that its error names all ranks. So long,
too, ranks that may compare their calls do not count as held: the modules say more than that ranks wait."""

_CONTEXT = 6
"""So many forwards predict the next one: schedules of pipelines run several roots in a period."""

_MOST_PATHS, _MOST_CONTEXTS = 16, 1024
"""So many different forwards are remembered, and what has followed so many sequences of forwards."""

_NO_GRADIENTS = " without gradients"
_END = "the end of the forward"
_logs: weakref.WeakSet[CallLog] = weakref.WeakSet()
_call_counts: defaultdict[tuple[int, tuple[int, ...]], itertools.count[int]] = defaultdict(itertools.count)
_left: defaultdict[tuple[int, tuple[int, ...]], list[tuple[SharedStore, list[str]]]] = defaultdict(list)
"""By rank and ranks, the keys that deleted logs have left in their stores."""


class CallLog:
    """The calls of one root's forward on this rank.

    ::

        expected        root  a  b  c  end
        rank 0          root  a  b              b is expected: rank 0 issues its all-gather, and waits
        rank 1          root  a  c              c is not: rank 1 counts itself in the store, and waits until all ranks have
                                                after some seconds, both ranks see in the store that they differ, and raise

    If all ranks count themselves for the same call, they go on. :class:`Predictor` says what is expected.

    Ranks compare the roots that they run, too (:class:`_RootLog`), before a root's first all-gather. A forward that gathers
    nothing, and makes the expected calls, is not compared: ranks may accumulate different numbers of passes.

    The global ``ranks`` must make the same calls. Each root has another name.
    """

    def __init__(self, ranks: Sequence[int], timeout: timedelta, root: str, name: str = "") -> None:
        self.root, self._ranks, self._rank, self._timeout = root, tuple(ranks), dist.get_rank(), timeout
        self._must_enter, self._note = False, ""  # Whether a forward runs that the log of roots does not know.
        tracker.watch_this_thread()
        # The same number on all of these ranks, since they call their roots in the same order.
        name = name or str(next(_call_counts[self._rank, self._ranks]))
        self._store = SharedStore(f"calls/{name_of(self._ranks)}/{name}")
        # So that other ranks find this process, and this rank their reports, if a collective fails.
        announce()
        Peers.of(self._ranks)
        self._forward = 0
        self._calls: list[str] = []
        self._last: list[str] = []
        self._paths = Predictor()
        self._expected: tuple[str, ...] = ()
        self._next = 0  # The position of the expected call in ``_expected``.
        self._counted: set[tuple[int, int]] = set()  # The calls of this forward and the last one that count this rank.
        self._used: list[str] = []  # The keys of the last agreement, which no rank reads any more.
        # Keys of the last forward are in use until all ranks have made a later call: of another root, if this one is deleted.
        left = _left[self._rank, self._ranks]
        weakref.finalize(self, lambda store, keys: left.append((store, keys)), self._store, self._used).atexit = False

    def start(self, note: str = "") -> None:
        """A forward of the root begins. All ranks must have the same ``note``, which the error names."""
        self._note = note
        self._start()
        tracker.forward = self.root, self._forward
        self._expected = self._paths.expected()
        self._must_enter = True

    def _start(self) -> None:
        self._last, self._calls, self._next = self._calls, [], 0
        self._forward += 1
        self._counted = {at for at in self._counted if at[0] >= self._forward - 1}
        _logs.add(self)

    @property
    def is_current(self) -> bool:
        return self._store.is_current

    def before_collective(self) -> None:
        """This forward is about to issue a collective. Raises as :meth:`add` does, if ranks run different roots."""
        if self._must_enter:
            self._must_enter = False
            # One rank may run an evaluation that the others do not run.
            root = f"{self.root}{self._note}{'' if torch.is_grad_enabled() else _NO_GRADIENTS}"
            _RootLog.of(self._ranks, self._timeout).enter(root)

    def add(self, call: str) -> None:
        """A module is called. Without communication if the call is expected.

        A PeerError if another rank died, or made no call within the timeout, a RuntimeError if it makes another call.
        """
        if self._is_expected(call):
            self._calls.append(call)
            return
        self.before_collective()
        self._calls.append(call)
        self._agree(len(self._calls) - 1)
        # All ranks have made this call. They go on as in the last forward that began in the same way.
        similar = self._paths.beginning_with(self._calls)
        if similar is not None:
            self._expected, self._next = similar, len(self._calls)
            return
        with contextlib.suppress(ValueError):  # Some modules are left out, or run again.
            self._next = self._expected.index(call, self._next) + 1

    def finish(self) -> None:
        """The forward of the root ends. No rank waits: the next call that differs is seen by both ranks."""
        self._calls.append(_END)
        self._paths.add(tuple(self._calls))
        self._must_enter = False

    def _is_expected(self, call: str) -> bool:
        is_expected = self._next < len(self._expected) and self._expected[self._next] == call
        self._next += is_expected
        return is_expected

    def check(self) -> None:
        """This rank has waited for long: raise a RuntimeError if another rank waits for a call that this rank did not make."""
        if not self._store.has("report"):
            return
        forward, position = map(int, self._store.get("report").split())
        calls = {self._forward: self._calls, self._forward - 1: self._last}.get(forward, [])
        if position >= len(calls):  # This rank has not come to this call yet.
            return
        self._count(forward, position, calls[position])
        self._compare(forward, position, calls[position])

    def _compare(self, forward: int, position: int, call: str) -> None:
        first, differs, calls, count = (self._key(forward, position, part) for part in ("first", "differs", "calls", "count"))
        if self._store.first(first, call) != call:
            self._store.set(differs, "")
        if not self._store.has(differs):
            return
        # Each rank names itself, and waits for the others, so that the error of all ranks names all of them.
        self._store.append(calls, f"{json.dumps([self._rank, call])}\n")
        if self._store.add(count, 1) == len(self._ranks):
            self._store.set(self._key(forward, position, "named"), "")
        self._store.wait([self._key(forward, position, "named")], _CALL_PATIENCE)
        _logs.discard(self)  # Later waits, of other models, must not raise this again.
        ranks: dict[str, list[int]] = {}
        for rank, other in sorted(dict(map(json.loads, self._store.get(calls).splitlines())).items()):
            ranks.setdefault(other, []).append(rank)
        called = "; ".join(f"{shown(some)}: {other}" for other, some in ranks.items())
        if len({each.removesuffix(_NO_GRADIENTS) for each in ranks}) == 1:
            raise RuntimeError(
                f"ranks ran a forward with gradients and without them ({called}). All must be in torch.no_grad(), or none. "
                "Let all ranks run an evaluation, or let one rank run it on a copy of the model that is not sharded"
            )
        raise RuntimeError(
            f"ranks called different modules in forward ({called}). All ranks must call the same fully_shard modules, in the "
            "same order. If a rank may skip a module, such as a vision tower for a batch of text, shard it with "
            "fully_shard(module, optional=True)"
        )

    def _agree(self, position: int) -> None:
        """Return when all ranks make the call at ``position``: one counter in the store, and the wait for it."""
        call, peers, left = self._calls[position], Peers.of(self._ranks), _left[self._rank, self._ranks]
        # Of logs of which all ranks have ended the last forward, if they come here.
        deleted = [left.pop() for _ in range(len(left))]
        with peers_named(f"the forward of {call}", "", lambda: self._ranks, patience=_CALL_PATIENCE):
            everyone = self._count(self._forward, position, call)
            deadline = time.monotonic() + self._timeout.total_seconds()
            slices = itertools.chain([_FIRST_SLICE], itertools.repeat(_CALL_SLICE))
            while not self._store.wait([everyone], next(slices).total_seconds()):
                # Another rank may wait for a call that was expected here, so that this rank did not count itself. First: ranks
                # that wait look for the report, of which there is one.
                self.check()
                self._store.set("report", f"{self._forward} {position}")
                self._compare(self._forward, position, call)
                look_for_standstill()
                if time.monotonic() > deadline:
                    waited = f"rank {self._rank} waited {self._timeout.total_seconds():g} s for the other ranks to call it"
                    where = "; ".join(f"rank {rank} {fate.text}" for rank, fate in fates_of(self._ranks).items())
                    raise peers.error(f"the forward of {call}", f"{waited}: {where}")
            for store, keys in deleted:  # Each rank does, since another one may delete its log later.
                for key in keys if store.is_current else ():
                    store.delete(key)

    def _count(self, forward: int, position: int, call: str) -> str:
        """Count this rank for a call, once. Returns the key that is set when all ranks have been counted for it."""
        # By the name of the call: ranks with different calls have different counters, and none of these gets full.
        name = hashlib.sha256(call.encode()).hexdigest()[:16]
        counter, everyone = self._key(forward, position, name), self._key(forward, position, f"{name} everyone")
        at = forward, position
        if at in self._counted:
            return everyone
        used: list[str] = []
        if at > max(self._counted, default=(0, 0)):  # Otherwise, the keys of a later call are in use.
            used, self._used[:] = list(self._used), [counter, everyone]
        self._counted.add(at)
        if self._store.add(counter, 1) == len(self._ranks):
            # All ranks have been counted for this call, so none reads the keys of the last one. Before the others go on: the
            # rank with the store may end its program then.
            for key in used:
                self._store.delete(key)
            self._store.set(everyone, "")
        return everyone

    def _key(self, forward: int, position: int, part: str) -> str:
        return f"{forward}/{position}/{part}"


class Predictor:
    """The next forward: the one that followed the last ones before, as "encode" after "encode, decode, encode, decode".

    Equal on all ranks whose forwards were equal.
    """

    def __init__(self) -> None:
        self._before: tuple[int, ...] = ()
        self._followed: dict[tuple[int, ...], tuple[str, ...]] = {}
        self._paths: dict[tuple[str, ...], None] = {}  # The last ones that differ, the latest last.

    def expected(self) -> tuple[str, ...]:
        """The calls of the next forward; empty if nothing is known."""
        # After the longest sequence of forwards that is known.
        return next((self._followed[context] for context in _ends_of(self._before) if context in self._followed), ())

    def beginning_with(self, calls: Sequence[str]) -> tuple[str, ...] | None:
        """The latest path that begins with ``calls``: after a call that was not expected, a forward is to go on so."""
        start = tuple(calls)
        return next((path for path in reversed(self._paths) if path[: len(start)] == start and len(path) > len(start)), None)

    def add(self, path: tuple[str, ...]) -> None:
        self._paths.pop(path, None)
        self._paths[path] = None
        if len(self._paths) > _MOST_PATHS:
            del self._paths[next(iter(self._paths))]
        if len(self._followed) > _MOST_CONTEXTS:  # Forwards follow each other without a pattern.
            self._followed.clear()
        for context in _ends_of(self._before):
            self._followed[context] = path
        self._before = (*self._before, hash(path))[-_CONTEXT:]


def _ends_of(sequence: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [sequence[start:] for start in range(len(sequence) + 1)]


class _RootLog(CallLog):
    """The roots that run forward, one after the other: a forward with one call for each. All ranks run the same roots."""

    _known: ClassVar[dict[tuple[int, ...], _RootLog]] = {}

    @classmethod
    def of(cls, ranks: tuple[int, ...], timeout: timedelta) -> _RootLog:
        known = cls._known.get(ranks)
        if known is None or not known.is_current:
            known = cls._known[ranks] = _RootLog(ranks, timeout, "", "roots")
        return known

    def enter(self, root: str) -> None:
        """A root's forward is about to communicate. Raises as :meth:`add` does."""
        self._start()
        self._calls.append(root)
        if self._paths.expected() != (root,):
            self._agree(0)
        self._paths.add((root,))


def wait_for_call(work: Any) -> None:
    """``work.wait()`` for a collective of gloo. Raises if it fails, or if ranks make different calls, after some seconds."""

    def look() -> None:
        for log in [log for log in _logs if log.is_current]:
            log.check()

    _wait_for(work, look)
