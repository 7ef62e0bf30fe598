"""The search for a schedule: steps of stand-ins under other settings, played with recorded times, within a bound of memory.

It must not touch the model, and communicates nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch_ragged.fsdp.core._fsdp_state import FSDPState
from torch_ragged.fsdp.schedule._play import PartCosts, Played, least_seconds, play
from torch_ragged.fsdp.schedule._schedule import Schedule, UnitSchedule
from torch_ragged.fsdp.schedule._trace import Moment, Trace
from torch_ragged.fsdp.tools._replay import Activations, CallFacts, Replay

__all__ = ["Knobs", "ScheduleSearch", "NoSchedule"]

_WINDOWS = (1, 2, 3, 4, 6, 8, 12)
"""Windows that are tried, in sizes of the largest module."""
_MOST_REDUCTIONS = 4
_SLOWER = 1.25
"""Collectives vary: a schedule is judged by the recorded ones and by ones that take so much longer. So it has some slack."""
_EQUAL = 0.002
"""Schedules whose times differ by no larger part are equal: the one with less memory is chosen."""


class NoSchedule(ValueError):
    """A pass has an order that no schedule can be predicted for, or the bound of memory is too small."""


class Knobs(NamedTuple):
    """What is searched.

    Attributes:
        forward, backward: bytes of parameters that all-gathers may be ahead of use; always the next module.
        reductions: how many modules' reduce-scatters may be in flight.
        unsharded: how many modules stay unsharded from forward to backward: those that backward reaches first.
    """

    forward: int
    backward: int
    reductions: int
    unsharded: int


class _Found(NamedTuple):
    """A pass under some knobs.

    Attributes:
        seconds: predicted.
        score: the mean of ``seconds`` and of the time if collectives take longer.
        peak: bytes of buffers and activations.
    """

    seconds: float
    score: float
    peak: int
    played: Played
    moments: list[Moment]


class ScheduleSearch:
    """Plays a pass of the modules of ``states`` under schedules.

    Args:
        states: by name.
        order: the calls of a forward.
        costs: of the parts of the pass.
        activations: bytes that autograd keeps of each module.
        calls: what the order of the pass depends on.
        extra_bytes: how far the peak of a pass may be above that of the present settings.

    Raises:
        NoSchedule: the stand-ins do not make the calls that the costs are of.
    """

    def __init__(
        self,
        states: Mapping[str, FSDPState],
        order: Sequence[FSDPState],
        costs: PartCosts,
        activations: Mapping[str, int],
        calls: CallFacts = CallFacts(),
        extra_bytes: int = 0,
    ) -> None:
        self._costs, self._order = costs, order
        slower = {key: _SLOWER * seconds for key, seconds in costs.collectives.items()}
        self._slower = dataclasses.replace(costs, collectives=slower)
        kept = {name: Activations(nbytes) for name, nbytes in activations.items()}
        self._replay = Replay(dict(states), kept, calls)
        self._states = self._replay.states
        self._trace = Trace(self._states)
        self._found: dict[Knobs, _Found] = {}
        # As the first forward, it finds the order that prefetching follows by itself; and it makes micro-batches the last one.
        self._run()
        self.start = self._run()
        self.limit = self.start.peak + extra_bytes
        marks = [moment.key for moment in self.start.moments if moment.what == "mark"]
        if marks != list(costs.compute):
            raise NoSchedule("the stand-ins of the modules do not follow the order of its calls")
        in_order = {
            phase: [name for what, name in marks if what == phase and "/" not in name] for phase in ("forward", "backward")
        }
        self._forward, self._backward = in_order["forward"], in_order["backward"]
        self.nbytes = {
            name: sum(group.layout.numel * group.param_dtype.itemsize for group in state.groups)
            for name, state in self._states.items()
        }
        free = (name for name in self._backward if _may_change(self._states[name]) and self.nbytes[name])
        self._keepable = [name for name in free if not self._states[name].is_root]
        least = self.evaluate(Knobs(0, 0, 1, 0))
        # In every schedule, activations and these modules are in memory between forward and backward: no room for others.
        held = sum(self.nbytes[name] for name, state in self._states.items() if state.reshard_after_forward is False)
        room = self.limit - sum(activations.values()) - held
        self.bound = least_seconds(least.moments, costs, {name: self.nbytes[name] for name in self._keepable}, room)

    def _run(self) -> _Found:
        self._trace.start()
        _, held = self._replay.play(self._order)
        self._trace.stop()
        moments = self._trace.moments
        played, slower = play(moments, self._costs), play(moments, self._slower)
        score = (played.seconds + slower.seconds) / 2
        return _Found(played.seconds, score, sum(held.values()), played, moments)

    def evaluate(self, knobs: Knobs) -> _Found:
        """The pass under ``knobs``: its time, and its peak of buffers and activations."""
        if knobs not in self._found:
            self.schedule(knobs).set_on(self._states)
            self._found[knobs] = self._run()
        return self._found[knobs]

    def best(self) -> Knobs | None:
        """The fastest schedule within the bound of memory; None: the present settings are within it, and none is faster.

        One setting after the other is changed, as long as that is faster.

        Raises:
            NoSchedule: no schedule is within the bound.
        """
        largest, whole = max(self.nbytes.values()), sum(self.nbytes.values())
        windows = sorted({min(count * largest, whole) for count in _WINDOWS} | {whole})
        counts = sorted({0, 1, 2, 3, 4, 6, 8, 12, *range(16, len(self._keepable), 8), len(self._keepable)})
        values = (windows, windows, range(1, _MOST_REDUCTIONS + 1), [each for each in counts if each <= len(self._keepable)])
        now = Knobs(windows[0], windows[0], 1, 0)
        for _ in range(3):
            before = now
            for name, given in zip(Knobs._fields, values):
                now = self._fastest([now, *(now._replace(**{name: value}) for value in given)]) or now
            if now == before:
                break
        chosen = self._fastest(list(self._found))
        if chosen is None and self.start.peak > self.limit:
            least = min(found.peak for found in self._found.values())
            raise NoSchedule(
                f"the peak of buffers and activations may have {self.limit:,} bytes, and the least of all schedules has "
                f"{least:,}: give more extra_bytes"
            )
        is_faster = chosen is not None and self._found[chosen].score <= self.start.score * (1 - _EQUAL)
        return chosen if is_faster or self.start.peak > self.limit else None

    def _fastest(self, candidates: Sequence[Knobs]) -> Knobs | None:
        fits = [(knobs, self.evaluate(knobs)) for knobs in candidates]
        fits = [(knobs, found) for knobs, found in fits if found.peak <= self.limit]
        if not fits:
            return None
        fastest = min(found.score for _, found in fits)
        near = [(found.peak, knobs) for knobs, found in fits if found.score <= fastest * (1 + _EQUAL)]
        return min(near)[1]

    def schedule(self, knobs: Knobs) -> Schedule:
        """``knobs`` as a schedule."""
        unsharded = self._keepable[: knobs.unsharded]
        units = []
        for name in self._forward:
            reshard = None if name not in self._keepable else name not in unsharded
            ahead = [
                self._window(self._forward, name, knobs.forward),
                self._window([each for each in self._backward if each not in unsharded or each == name], name, knobs.backward),
            ]
            units.append(UnitSchedule(name, reshard, *ahead))
        return Schedule(tuple(units), knobs.reductions)

    def _window(self, order: Sequence[str], name: str, nbytes: int) -> tuple[str, ...]:
        """The modules behind ``name`` with together at most ``nbytes``: the next one in any case."""
        if name not in order:
            return ()
        chosen: list[str] = []
        for other in order[order.index(name) + 1 :]:
            nbytes -= self.nbytes[other]
            if nbytes < 0 and any(self.nbytes[each] for each in chosen):
                break
            chosen.append(other)
        return tuple(each for each in chosen if self.nbytes[each])


def _may_change(state: FSDPState) -> bool:
    """Whether the schedule may say if the module is resharded after forward: not if a keeper does."""
    return all(group.keeper is None for group in state.groups)
