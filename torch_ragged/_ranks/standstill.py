"""Standstill: ranks that wait for each other in different calls raise within seconds, and their errors name the calls.

It issues no collective. One thread per process looks once a second; it starts no question while its own training thread works.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time

import torch
import torch.distributed as dist

from torch_ragged._ranks.groups import end_messages, is_gloo
from torch_ragged._ranks.peers import (
    STANDSTILL,
    Fate,
    Peers,
    Whereabouts,
    differing_settings,
    fates_of,
    is_watched,
    listen,
    shown,
    tracker,
)
from torch_ragged._ranks.store import GROUP_ENDED, SharedStore
from torch_ragged._ranks.termination import tell_when_terminated
from torch_ragged._register._torch import process_groups

__all__ = ["announce", "look_for_standstill", "standstill"]

_PERIOD = 1.0  # Seconds.
"""How often a process looks where its training thread is."""

_PAUSE = 4.0  # Seconds, and 5 ms more for each rank.
"""After one rank has asked all ranks where they are, no rank asks again for so long."""

_NOTICE = 1.5  # Seconds.
"""How long the rank that has found a standstill waits for the others to log it, before connections close."""

_LOOKS = 4
"""So often a rank that has found a standstill looks, a period apart, while other ranks are in calls and may go on."""

_LONGEST_END = 5.0  # Seconds.
"""So long the end of a program waits for the thread that watches."""

_ADVICE = (
    "All ranks must make the same calls in the same order: the same number of forwards and backwards, and of calls that "
    "communicate, such as barrier, clip_grad_norm_, full_tensor or save. Let all ranks run an evaluation, or let one rank run "
    "it on a copy of the model that is not sharded"
)

_ADVICE_ON_MESHES = "All ranks must pass the same mesh, and call this equally often"

_CPU = torch.device("cpu")
_logger = logging.getLogger("torch_ragged")


def announce() -> None:
    """Let the other ranks find and ask this process, and watch its training thread. Once per default process group."""
    listen()
    if is_watched():
        _watch.start()
        tell_when_terminated()


def look_for_standstill() -> None:
    """This rank has waited for long in the store. Raise if a rank that it has collectives with has failed, or can never come.

    Closed connections end no such wait. If no thread watches, as over NCCL, this call does: here, this rank waits for sure.

    Raises:
        CollectiveFailed: a rank has failed, or ranks wait for each other in different calls.
    """
    _watch.look_here()
    Peers.check_all(probes=True)


def standstill(fates: dict[int, Fate]) -> set[int]:
    """The ranks that can never go on, by what is known of all ranks.

    A rank can never go on if it waits in a call for a rank that can never go on, or that has ended, and that does not take part
    in this call. Only ranks that have been in one call for long, without work and without traffic, are taken into account::

        rank 0   all-gather of layer 1 (of ranks 0, 1)        waits for rank 1
        rank 1   barrier (of all ranks)                       waits for rank 0, and for rank 2, which computes

        ranks 0 and 1 wait for each other: nothing that rank 2 does lets them go on
    """
    stuck = {rank for rank, fate in fates.items() if not fate.is_alive or (fate.where is not None and fate.where.is_held)}
    all_stand = len(stuck) == len(fates)
    while True:
        free = {rank for rank in stuck if fates[rank].is_alive and not _missing(rank, fates, all_stand) & stuck}
        if not free:
            return stuck
        stuck -= free


def _missing(rank: int, fates: dict[int, Fate], all_stand: bool) -> set[int]:
    """The ranks that ``rank`` waits for: they do not take part in its call yet."""
    where = fates[rank].where
    assert where is not None
    if where.ranks is None and not all_stand:  # It may wait for any other rank, such as one that computes.
        return set()
    others = set(fates if where.ranks is None else where.ranks) - {rank}
    return {other for other in others & set(fates) if not _takes_part(fates[other], where)}


def _takes_part(fate: Fate, where: Whereabouts) -> bool:
    """Whether another rank has come to the call of ``where`` too. A collective may have been issued long before the wait."""
    if not fate.is_alive or fate.where is None:
        return False
    if not where.tickets:  # A call has several waits: a rank in its all-reduce, which has a ticket, is in another one.
        return not fate.where.tickets and (fate.where.call, fate.where.ranks) == (where.call, where.ranks)
    for group, number in where.tickets:
        mine, its = where.issued.get(group, {}), fate.where.issued.get(group, {})
        is_passed = bool(its) and number < min(its)
        if not is_passed and (number not in its or its[number] != mine.get(number)):
            return False
    return True


def _standstill_text(fates: dict[int, Fate], stuck: set[int]) -> str:
    """What the ranks do, for the errors of all of them."""
    waiting = {rank: fates[rank].where for rank in sorted(stuck)}
    # One call with several sets of ranks, as of different meshes: its name alone would say that all ranks are in the same call.
    sets: dict[str, set[tuple[int, ...]]] = {}
    for where in waiting.values():
        if where is not None and where.ranks is not None:
            sets.setdefault(where.call, set()).add(tuple(where.ranks))
    ranks: dict[str, list[int]] = {}
    for rank, where in waiting.items():
        text = "at the end of its program" if where is None else where.text
        if where is not None and where.ranks is not None and len(sets[where.call]) > 1:
            text = text.replace(where.call, f"{where.call} with {shown(where.ranks)}", 1)
        if not fates[rank].error:
            ranks.setdefault(text, []).append(rank)
    parts = "; ".join([f"{shown(some)} {text}" for text, some in ranks.items()])
    if errors := [f"rank {rank} {fates[rank].text}; read its log" for rank in waiting if fates[rank].error]:
        return f"{'; '.join(errors)}. The others wait for it: {parts}"
    advice = _ADVICE if len(sets) != 1 or len(ranks) == 1 or None in waiting.values() else _ADVICE_ON_MESHES
    return f"ranks wait for each other in different calls: {parts}. {differing_settings(fates)}{advice}"


class _Watch:
    """The thread that looks whether the training thread is held and, if so, whether ranks wait for each other."""

    def __init__(self) -> None:
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._told: SharedStore | None = None  # The store whose standstill this process has logged.
        atexit.register(self._end)

    def start(self) -> None:
        # NCCL has a watchdog of its own, and a thread that waits for a GPU's work may be anywhere.
        if not all(part.endswith("gloo") for part in dist.get_backend_config().split(",")):
            return
        with self._lock:
            if self._thread is None or not self._thread.is_alive():  # Not alive: this is a forked child.
                self._thread = threading.Thread(target=self._run, name="standstill", daemon=True)
                self._thread.start()

    def _end(self) -> None:
        self._stop.set()
        # If it is in a call of C++ when Python ends, the process ends by SIGABRT. It may just close this rank's connections.
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(_LONGEST_END)

    def _run(self) -> None:
        while not self._stop.wait(_PERIOD):
            self._look_if_held()

    def look_here(self) -> None:
        if is_watched() and (self._thread is None or not self._thread.is_alive()):
            self._look_if_held()

    def _look_if_held(self) -> None:
        with contextlib.suppress(*GROUP_ENDED):
            if tracker.look().is_held and dist.is_initialized():
                self._look()

    def _look(self) -> None:
        store = SharedStore(STANDSTILL)
        if self._told is not None and self._told.is_current:
            return
        if not store.has("text") and not self._find(store):
            return
        self._told, text = store, store.get("text")
        Peers.stand_still(store, text)
        _logger.error("rank %d: %s", dist.get_rank(), text)
        # Calls that wait in the backend, also torch's own, raise now: their connections close.
        for group in process_groups():
            with contextlib.suppress(*GROUP_ENDED):  # The program may destroy this one and go on with others.
                if is_gloo(group, _CPU):
                    end_messages(group, _CPU)

    def _find(self, store: SharedStore) -> bool:
        """Ask all ranks where they are, unless another rank has asked lately. Returns whether they wait for each other."""
        size, now = dist.get_world_size(), time.time()
        asked = store.get("asked") if store.has("asked") else ""
        if asked and abs(now - float(asked)) < _PAUSE + 0.005 * size:
            return False
        if store.swap("asked", asked, str(now)) != str(now):
            return False
        for _ in range(_LOOKS):
            fates = fates_of(range(size))
            stuck = standstill(fates)
            if dist.get_rank() not in stuck:
                return False
            # A rank that has come to its call a moment later waits in vain, too, and is to be named.
            if not any(fate.where is not None and fate.where.call and rank not in stuck for rank, fate in fates.items()):
                break
            time.sleep(_PERIOD)
        store.set("text", _standstill_text(fates, stuck))
        time.sleep(_NOTICE)
        return True


_watch = _Watch()
