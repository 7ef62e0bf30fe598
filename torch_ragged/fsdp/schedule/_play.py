"""A pass as arithmetic: given the seconds of its parts, when each part runs, and a time that no schedule is below.

It must not know a module: what it needs of one is in the moments of a :class:`Trace`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch_ragged.fsdp.schedule._trace import END, Moment
from torch_ragged.fsdp.tools._timeline import TimelineSpan

__all__ = ["PartCosts", "Played", "least_seconds", "play", "recorded_costs"]

_FORWARD = ("forward", "forward ends")
_COMPUTED_FIRST = (*_FORWARD, "again", "again runs", "again ends")
"""Marks whose computation runs before what is issued behind them."""
_TIMELINE_KINDS = ("all_gather", "reduce_scatter")


@dataclass(frozen=True)
class PartCosts:
    """Seconds of the parts of a pass.

    Attributes:
        compute: of the computation that follows a mark, by the mark's key.
        collectives: by ("forward" or "backward", kind, group).
        issues: of the host, which computes nothing while it issues a collective. 0 on a GPU, whose host is ahead.
    """

    compute: Mapping[tuple[str, str], float]
    collectives: Mapping[tuple[str, str, str], float]
    issues: Mapping[tuple[str, str, str], float] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The names of the parts: those of a pass with the same calls are equal."""
        return " ".join(map("/".join, (*self.compute, *self.collectives)))

    @property
    def seconds(self) -> list[float]:
        """In the order of ``compute``, then of ``collectives``, then of ``issues``."""
        return [*self.compute.values(), *self.collectives.values(), *self.issues.values()]

    def of(self, moment: Moment, is_backward: bool) -> tuple[float, float]:
        """Of a collective, and of its issue. An all-gather that no recorded backward has had is as in forward."""
        phases = ("backward", "forward") if is_backward else ("forward", "backward")
        keys = [(phase, moment.key[0], moment.key[1]) for phase in phases]
        known = next((key for key in keys if key in self.collectives), None)
        return (0.0, 0.0) if known is None else (self.collectives[known], self.issues.get(known, 0.0))


@dataclass
class Played:
    """A pass that was played.

    Attributes:
        seconds: from the first computation or collective to the last one.
        spans: what ran when. Collectives are there for the time on their link.
    """

    seconds: float = 0.0
    spans: list[TimelineSpan] = field(default_factory=list)


def recorded_costs(moments: Sequence[Moment], seconds: Callable[[object], float]) -> PartCosts:
    """The costs of a pass in which each collective was waited for at once. ``seconds`` of a moment of its clock."""
    compute: dict[tuple[str, str], float] = {}
    collectives: dict[tuple[str, str, str], float] = {}
    issues: dict[tuple[str, str, str], float] = {}
    last, phase, spent = None, "forward", 0.0
    for moment in moments:
        if moment.what == "mark":
            now = seconds(moment.begin)
            if last is not None:
                compute[last[0]] = max(0.0, now - last[1] - spent)
            last, spent = (moment.key, now), 0.0
            phase = "backward" if moment.key[0] not in _FORWARD else phase
        elif moment.what == "issue":
            took = seconds(moment.end) - seconds(moment.begin)
            key = phase, moment.key[0], moment.key[1]
            collectives[key], issues[key] = took, seconds(moment.issued) - seconds(moment.begin)
            spent += took
    compute[END] = 0.0
    return PartCosts(compute, collectives, issues)


def play(moments: Sequence[Moment], costs: PartCosts) -> Played:
    """When the parts of a pass run if collectives of one link run one after the other, beside computation.

    Computation after a mark of a forward runs before what is issued behind the mark: post-forward, and pre-forward of the next
    module. After a mark of backward it runs after it: pre-backward and post-backward issue first.
    """
    played, now = Played(), 0.0
    free: dict[int, float] = defaultdict(float)  # By link.
    ends: dict[tuple[str, str], float] = {}  # Of collectives in flight.
    later, is_backward = 0.0, False

    def compute(took: float) -> float:
        if took:
            played.spans.append(TimelineSpan("compute", "", now, now + took))
        return now + took

    for moment in moments:
        if moment.what == "mark":
            now, later = compute(later), costs.compute.get(moment.key, 0.0)
            is_backward = is_backward or moment.key[0] not in _FORWARD
            if moment.key[0] in _COMPUTED_FIRST:
                now, later = compute(later), 0.0
        elif moment.what == "issue":
            took, issue = costs.of(moment, is_backward)
            begin = max(now, free[moment.link])
            end = begin + took
            now += issue
            ends[moment.key] = free[moment.link] = end
            kind, name = moment.key
            played.spans.append(TimelineSpan(kind if kind in _TIMELINE_KINDS else "other", name, begin, end))
        elif (end := ends.pop(moment.key, now)) > now:
            played.spans.append(TimelineSpan("exposed", moment.key[1], now, end))
            now = end
    played.seconds = max([now, *free.values()])
    return played


def least_seconds(moments: Sequence[Moment], costs: PartCosts, keepable: Mapping[str, int], room: int) -> float:
    """A time that no schedule is below: of compute, of each link, and of each chain of both.

    - A pass has the all-gathers of the first modules, then the computation from the last of these on to the end of any later
      module, then all reductions from this module on.
    - A link carries all of its collectives.
    - No all-gather for backward is issued in forward.

    Args:
        moments: of a pass in which each module that may stay unsharded is resharded after forward.
        keepable: bytes of the modules that may stay unsharded; with all-gathers for backward of these, the link has less to do.
        room: bytes that may stay unsharded from forward to backward.
    """
    forward, backward = _split_pass(moments)
    links = {moment.link for moment in moments if moment.what == "issue"}
    first = max((_chains(forward, costs, False, link, {}, 0) for link in links), default=_compute_of(forward, costs))
    last = max((_chains(backward, costs, True, link, keepable, room) for link in links), default=_compute_of(backward, costs))
    return first + last


def _split_pass(moments: Sequence[Moment]) -> tuple[Sequence[Moment], Sequence[Moment]]:
    """Forward and backward: no all-gather for backward is issued before backward begins."""
    starts = [at for at, moment in enumerate(moments) if moment.what == "mark" and moment.key[0] not in _FORWARD]
    at = starts[0] if starts else len(moments)
    return moments[:at], moments[at:]


def _compute_of(moments: Iterable[Moment], costs: PartCosts) -> float:
    return sum(costs.compute.get(moment.key, 0.0) for moment in moments if moment.what == "mark")


def _chains(
    moments: Sequence[Moment], costs: PartCosts, is_backward: bool, link: int, keepable: Mapping[str, int], room: int
) -> float:
    """The longest chain of a half that begins or ends with collectives of ``link``."""
    gathers: dict[str, float] = {}  # By module.
    reductions: list[tuple[float, float]] = []  # Seconds, and the computation before the issue.
    tail: dict[int, float] = defaultdict(float)  # By link, what is issued when all is computed.
    starts: dict[str, float] = defaultdict(float)  # The computation before each module.
    total, done, next_part, is_over = _compute_of(moments, costs), 0.0, 0.0, False
    for moment in moments:
        if moment.what == "mark":
            done, next_part = done + next_part, costs.compute.get(moment.key, 0.0)
            is_over |= moment.key == END
            if moment.key[0] in ("forward", "again runs", "backward"):
                starts.setdefault(moment.key[1].partition("/")[0], done)
        elif moment.what == "issue":
            took, unit = costs.of(moment, is_backward)[0], moment.key[1].partition("[")[0]
            if is_over:
                tail[moment.link] += took
            if moment.link == link and moment.key[0] == "all_gather" and not is_over:
                gathers[unit] = gathers.get(unit, 0.0) + took
            elif moment.link == link:
                reductions.append((took, done))
    # (Computation before it, seconds of all-gathers before it), in the order in which modules begin, not of issue.
    begins = [(0.0, 0.0)]
    known: list[str] = []
    for unit in sorted(gathers, key=lambda unit: starts[unit]):
        known.append(unit)
        least = sum(gathers[each] for each in known) - _saved(known, gathers, keepable, room)
        begins.append((starts[unit], least))
    # (Computation before it, seconds of all reductions from there on).
    ends, behind = [(total, max(tail.values(), default=0.0))], 0.0
    for took, before in reversed(reductions):
        behind += took
        ends.append((before, behind))
    chains = [least + before - start + rest for start, least in begins for before, rest in ends if start <= before]
    return max(*chains, begins[-1][1] + behind)


def _saved(units: Sequence[str], seconds: Mapping[str, float], nbytes: Mapping[str, int], room: int) -> float:
    """Most seconds of all-gathers that ``room`` bytes save: those with most seconds a byte, the last one in part."""
    saved, left = 0.0, float(max(room, 0))
    held = [unit for unit in units if nbytes.get(unit)]
    for unit in sorted(held, key=lambda unit: seconds[unit] / nbytes[unit], reverse=True):
        part = min(1.0, left / nbytes[unit])
        saved += part * seconds[unit]
        left -= part * nbytes[unit]
    return saved
