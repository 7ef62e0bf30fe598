"""CallLog: the calls of sharded modules in a forward. All ranks must make the same calls, in the same order.

Otherwise, the all-gather of one module meets that of another module on another rank: ranks would wait for each other for ever,
or compute with wrong parameters. A log issues no collective. Ranks compare calls through the store of their process group, and
only calls that are not those of the last forward.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import weakref
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch.distributed as dist

from torch_ragged._peers import Peers, announce, name_of, peers_named
from torch_ragged._store import SharedStore

__all__ = ["CallLog", "wait_for"]

_SLICE = timedelta(seconds=2)
"""After so long a wait, a rank looks whether other ranks have made other calls."""

_SLICES_BEFORE_PROBE = 5
"""After so many slices, a rank also looks whether the next rank's process lives."""

_PATIENCE = 10.0  # Seconds.
"""How long a rank that has seen a difference waits for the reports of the others, so that its error names all ranks."""

_CONTEXT = 6
"""So many roots predict the next one: schedules of pipelines run several roots in a period."""

_END = "the end of the forward"
_logs: weakref.WeakSet[CallLog] = weakref.WeakSet()
_counts: defaultdict[tuple[int, tuple[int, ...]], itertools.count[int]] = defaultdict(itertools.count)


class CallLog:
    """The calls of one root's forward on this rank.

    ::

        last forward    root  a  b  c  end
        rank 0          root  a  b              b is expected: rank 0 issues its all-gather, and waits
        rank 1          root  a  c              c is not: rank 1 reports it in the store, and waits for all ranks to report it
                                                after some seconds, both ranks read in the store that they differ, and raise

    If all ranks report the same call, they go on, and expect the calls that followed it in the last forward.

    Ranks compare the roots that they run, too (:class:`_RootLog`), before a root's first all-gather. A forward that gathers
    nothing, and makes the calls of the last one, is not compared: ranks may accumulate different numbers of passes.

    Args:
        ranks: the global ranks that must make the same calls.
        timeout: how long a rank waits for the reports of the others.
        root: the root's name, different from those of other roots.
    """

    def __init__(self, ranks: Sequence[int], timeout: timedelta, root: str) -> None:
        self._root, self._roots = root, _RootLog.of(ranks, timeout)
        self._must_enter = False  # Whether a forward runs that the log of roots does not know.
        # The same number on all of these ranks, since they call their roots in the same order.
        self._set_up(ranks, timeout, next(_counts[dist.get_rank(), tuple(ranks)]))

    def _set_up(self, ranks: Sequence[int], timeout: timedelta, name: object) -> None:
        self._ranks, self._rank, self._timeout = tuple(ranks), dist.get_rank(), timeout
        self._store = SharedStore(f"calls/{name_of(self._ranks)}/{name}")
        # So that other ranks find this process, and this rank their reports, if a collective fails.
        announce()
        Peers.of(self._ranks)
        self._forward = 0
        self._calls: list[str] = []
        self._last: list[str] = []
        self._next = 0  # The position of the expected call in the last forward.
        self._reported: tuple[int, int] | None = None
        self._used: list[str] = []  # Keys of the last report, which no rank reads any more.

    def start(self) -> None:
        """A forward of the root begins."""
        self._start()
        self._must_enter = True

    def _start(self) -> None:
        self._last, self._calls, self._next = self._calls, [], 0
        self._forward += 1
        _logs.add(self)

    @property
    def is_current(self) -> bool:
        """Whether the process group of this log still exists."""
        return self._store.is_current

    def before_collective(self) -> None:
        """This forward is about to issue a collective. Raises as :meth:`add` does, if ranks run different roots."""
        if self._must_enter:
            self._must_enter = False
            self._roots.enter(self._root)

    def add(self, call: str) -> None:
        """A module is called. Without communication if the last forward had this call here.

        Raises:
            PeerError: another rank died, or made no call within the timeout.
            RuntimeError: another rank makes another call.
        """
        is_expected = self._next < len(self._last) and self._last[self._next] == call
        if not is_expected:
            self.before_collective()
        self._calls.append(call)
        if is_expected:
            self._next += 1
            return
        self._agree(len(self._calls) - 1)
        with contextlib.suppress(ValueError):
            self._next = self._last.index(call, self._next) + 1

    def finish(self) -> None:
        """The forward of the root ends. Raises as :meth:`add` does."""
        self.add(_END)
        self._must_enter = False

    def check(self) -> None:
        """This rank has waited for long: if another rank has reported a call that this rank did not make, raise.

        Raises:
            RuntimeError: ranks differ.
        """
        if not self._store.has("report"):
            return
        forward, position = map(int, self._store.get("report").split())
        calls = {self._forward: self._calls, self._forward - 1: self._last}.get(forward, [])
        if position >= len(calls):  # This rank has not come to this call yet.
            return
        self._report(forward, position, calls[position])
        if len(set(self._answers(forward, position).values())) < 2:
            return
        # The other ranks look into the store, too.
        self._store.wait([self._key(forward, position, f"rank {rank}") for rank in self._ranks], _PATIENCE)
        _logs.discard(self)  # Later waits, of other models, must not raise this again.
        raise RuntimeError(_difference(self._answers(forward, position)))

    def _agree(self, position: int) -> None:
        """Return when all ranks have reported the call at ``position``."""
        call, peers = self._calls[position], Peers.of(self._ranks)
        with peers_named(f"the forward of {call}", "", lambda: self._ranks):
            # Before the report, so that a rank that waits elsewhere finds it.
            self._store.set("report", f"{self._forward} {position}")
            self._report(self._forward, position, call)
            deadline = time.monotonic() + self._timeout.total_seconds()
            while not self._store.wait([self._key(self._forward, position, "all")], _SLICE.total_seconds()):
                self.check()
                Peers.check_all()
                missing = [rank for rank in self._ranks if rank not in self._answers(self._forward, position)]
                peers.check_alive(missing)
                if time.monotonic() > deadline:
                    waited = f"rank {self._rank} waited {self._timeout.total_seconds():g} s for the other ranks to call it"
                    raise peers.error(f"the forward of {call}", f"{waited}, and ranks {missing} called no module")

    def _report(self, forward: int, position: int, call: str) -> None:
        if self._reported == (forward, position):
            return
        self._reported = (forward, position)
        used, parts = self._used, (f"rank {self._rank}", f"call {call}", "all")
        self._used = [self._key(forward, position, part) for part in parts]
        own, count, everyone = self._used
        self._store.set(own, call)
        if self._store.add(count, 1) == len(self._ranks):
            self._store.set(everyone, "")
            # All ranks have reported this call, so none reads the last one's keys.
            for key in used[1:]:
                self._store.delete(key)
        if used:
            self._store.delete(used[0])

    def _answers(self, forward: int, position: int) -> dict[int, str]:
        """The calls that ranks have reported."""
        keys = {rank: self._key(forward, position, f"rank {rank}") for rank in self._ranks}
        return {rank: self._store.get(key) for rank, key in keys.items() if self._store.has(key)}

    def _key(self, forward: int, position: int, part: str) -> str:
        return f"{forward}/{position}/{part}"


class _RootLog(CallLog):
    """The roots that run forward, one after the other: a forward with one call for each. All ranks run the same roots.

    A root is expected if it followed the last roots before. Otherwise, ranks compare it.
    """

    _known: ClassVar[dict[tuple[int, ...], _RootLog]] = {}

    @classmethod
    def of(cls, ranks: Sequence[int], timeout: timedelta) -> _RootLog:
        """The log of all roots of these ranks."""
        known = cls._known.get(tuple(ranks))
        if known is None or not known.is_current:
            known = cls._known[tuple(ranks)] = _RootLog(ranks, timeout)
        return known

    def __init__(self, ranks: Sequence[int], timeout: timedelta) -> None:
        self._set_up(ranks, timeout, "roots")
        self._before: tuple[str, ...] = ()
        self._followed: dict[tuple[str, ...], str] = {}

    def enter(self, root: str) -> None:
        """A root's forward is about to communicate. Raises as :meth:`add` does."""
        self._start()
        self._calls.append(root)
        if self._followed.get(self._before) != root:
            self._agree(0)
        self._followed[self._before] = root
        self._before = (*self._before, root)[-_CONTEXT:]


def _difference(answers: dict[int, str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, call in answers.items():
        ranks.setdefault(call, []).append(rank)
    called = "; ".join(
        f"rank{'s' if len(some) > 1 else ''} {', '.join(map(str, some))}: {call}" for call, some in ranks.items()
    )
    return (
        f"ranks called different modules in forward ({called}). All ranks must call the same fully_shard modules, in the same "
        "order. If a rank may skip a module, such as a vision tower for a batch of text, shard it with "
        "fully_shard(module, optional=True)"
    )


def wait_for(work: Any) -> None:
    """``work.wait()`` for a collective of gloo. After some seconds, look whether ranks have made different calls.

    Raises:
        RuntimeError: they have; or the collective has failed, here or on another rank.
    """
    for slices in itertools.count(1):
        try:
            work.wait(_SLICE)
            return
        except RuntimeError:
            if work.is_completed():  # The collective has failed; or it has ended just after the timeout.
                work.wait()
                return
            for log in [log for log in _logs if log.is_current]:
                log.check()
            Peers.check_all(probes=slices >= _SLICES_BEFORE_PROBE)
