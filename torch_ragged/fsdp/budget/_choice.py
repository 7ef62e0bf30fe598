"""The choice of fit as arithmetic: which units are recomputed or offloaded, where states lie, and what stays unsharded.

It must not know a module, and equal numbers give equal choices on all ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from torch_ragged.fsdp.budget._dry_run import Curve

__all__ = ["Choice", "Needs", "NothingFits", "Offloading", "Saving", "cheapest", "extremes"]

_STARTS = 3
"""So many of the cheapest candidates are improved by exchanges, if units have two ways to save memory."""

_FRACTIONS = 10_000
"""Fractions of states are multiples of 1 / 10,000."""


class NothingFits(ValueError):
    """No choice needs as little memory as was given.

    Attributes:
        least: bytes with which one fits.
    """

    def __init__(self, least: int) -> None:
        super().__init__(f"the least of all choices needs {least:,} bytes")
        self.least = least


class Offloading(NamedTuple):
    """What it takes to hold the activations of a unit elsewhere.

    Attributes:
        seconds: of a step that compute waits for copies.
        nbytes: elsewhere.
        left: bytes of its activations that stay.
    """

    seconds: float
    nbytes: int
    left: int


class Saving(NamedTuple):
    """A unit that does not keep its activations: its forward runs again in backward, or they are offloaded."""

    unit: str
    is_offloaded: bool = False


@dataclass(frozen=True)
class Needs:
    """What a step needs of memory and time.

    Attributes:
        curve: of a step that recomputes all units.
        seconds: of the recomputation of each unit that may be recomputed.
        unsharded: bytes of the parameters of each unit that may stay unsharded.
        fixed: bytes beside the curve that no choice changes.
        states: bytes of optimizer states that may lie elsewhere.
        elsewhere: the most bytes elsewhere, of states and activations.
        seconds_per_byte: of a state that lies elsewhere, in each step.
        window, most_windows: states elsewhere are stepped through windows on the device: bytes of these if all states are
            elsewhere and no window is full, and the most.
        offloads: of the units whose activations may be offloaded.
        staging: bytes of memory through which these go.
    """

    curve: Curve
    seconds: Mapping[str, float]
    unsharded: Mapping[str, int]
    fixed: int
    states: int = 0
    elsewhere: int = 0
    seconds_per_byte: float = 0.0
    window: int = 0
    most_windows: int = 0
    offloads: Mapping[str, Offloading] = field(default_factory=dict)
    staging: int = 0

    def seconds_of(self, saving: Saving) -> float:
        return self.offloads[saving.unit].seconds if saving.is_offloaded else self.seconds[saving.unit]


@dataclass(frozen=True)
class Choice:
    """What is chosen.

    Attributes:
        recomputed: units whose forward runs again in backward.
        offloaded: units whose activations are elsewhere from forward to backward.
        fraction: of the states, what lies elsewhere.
        unsharded: units that stay unsharded from forward to backward.
        peak: bytes in all.
        moment: the one with the peak, such as "backward of blocks.0".
        seconds: how much longer a step takes than with all memory.
    """

    recomputed: frozenset[str]
    offloaded: frozenset[str]
    fraction: float
    unsharded: tuple[str, ...]
    peak: int
    moment: str
    seconds: float


_Savings = frozenset[Saving]  # At most one of a unit.


class _Peaks:
    """The curve of a step as vectors over moments.

    Attributes:
        units: those that may keep their activations, in the order of backward.
        savings: what each of these may do in place of it.
        stays: by unit, what the peaks are more if it stays unsharded.
    """

    def __init__(self, needs: Needs) -> None:
        curve = needs.curve
        self.least = torch.tensor(curve.peaks, dtype=torch.int64, device="cpu")
        kept: dict[str, torch.Tensor] = {}
        offloaded: dict[str, torch.Tensor] = {}
        self.stays: dict[str, torch.Tensor] = {}
        totals: Counter[str] = Counter()
        for call in curve.calls:
            totals[call.unit] += call.kept
        for call in curve.calls:
            self._add(kept, call.unit, curve.kept_of(call))
            if call.unit in needs.offloads:
                left = needs.offloads[call.unit].left * call.kept // max(1, totals[call.unit])
                self._add(offloaded, call.unit, curve.offloaded_of(call, left))
            if needs.unsharded.get(call.unit):
                self._add(self.stays, call.unit, curve.unsharded_of(call, needs.unsharded[call.unit]))
        self.units = list(kept)
        self.all_kept = sum(kept.values(), self.least)
        rows = {Saving(unit): kept[unit] for unit in self.units if unit in needs.seconds}
        rows.update({Saving(unit, True): kept[unit] - offloaded[unit] for unit in self.units if unit in offloaded})
        self.savings = list(rows)
        self._numbers = {saving: number for number, saving in enumerate(rows)}
        # The last row: there may be no saving.
        self.rows = torch.stack([*rows.values(), torch.zeros_like(self.least)])

    def _add(self, vectors: dict[str, torch.Tensor], unit: str, more: Mapping[int, int]) -> None:
        vector = vectors.setdefault(unit, torch.zeros_like(self.least))
        for at, nbytes in more.items():
            vector[at] += nbytes

    def row(self, saving: Saving) -> torch.Tensor:
        """What the peaks are less with it."""
        return self.rows[self._numbers[saving]]

    def of(self, savings: _Savings) -> torch.Tensor:
        # One sum of rows: the search asks for thousands of sets, and a sum of vectors one by one takes seconds of all ranks.
        return self.all_kept - self.rows[[*(self._numbers[saving] for saving in savings), -1]].sum(0)


def cheapest(needs: Needs, device_bytes: int) -> Choice:
    """The choice within ``device_bytes`` that adds the least time, as far as single exchanges find it.

    Raises:
        NothingFits: there is none.
    """
    peaks = _Peaks(needs)
    priced = {units: price for units in _candidates(needs, peaks) if (price := _price(needs, peaks, units, device_bytes))}
    if not priced:
        raise NothingFits(extremes(needs)[0])
    starts = sorted(priced, key=priced.__getitem__)[: _STARTS if needs.offloads else 1]
    found = [_improved(needs, peaks, savings, priced[savings], device_bytes) for savings in starts]
    (seconds, fraction), savings = min(found, key=lambda each: each[0])
    beside = needs.fixed + _staging(needs, savings) + _held_states(needs, fraction)
    held, unsharded = peaks.of(savings), []
    for unit, vector in peaks.stays.items():  # Backward needs the last ones of forward first.
        if int((held + vector).max()) <= device_bytes - beside:
            held = held + vector
            unsharded.append(unit)
    at = int(held.argmax())
    recomputed, offloaded = (
        frozenset(saving.unit for saving in savings if saving.is_offloaded == is_offloaded) for is_offloaded in (False, True)
    )
    label = needs.curve.labels[at]
    return Choice(recomputed, offloaded, fraction, tuple(reversed(unsharded)), beside + int(held[at]), label, seconds)


def _price(needs: Needs, peaks: _Peaks, savings: _Savings, device_bytes: int) -> tuple[float, float] | None:
    """The seconds that ``savings`` add to a step, and the fraction of states that has to leave; None: it does not fit."""
    elsewhere = needs.elsewhere - sum(needs.offloads[saving.unit].nbytes for saving in savings if saving.is_offloaded)
    if elsewhere < 0:
        return None
    room = device_bytes - needs.fixed - _staging(needs, savings) - int(peaks.of(savings).max())
    fraction = _fraction(needs, room, elsewhere)
    if fraction is None:
        return None
    return sum(map(needs.seconds_of, sorted(savings))) + fraction * needs.states * needs.seconds_per_byte, fraction


def _staging(needs: Needs, savings: _Savings) -> int:
    return needs.staging if any(saving.is_offloaded for saving in savings) else 0


def _improved(
    needs: Needs, peaks: _Peaks, savings: _Savings, best: tuple[float, float], device_bytes: int
) -> tuple[tuple[float, float], _Savings]:
    """``savings`` and its price, with single ones left out, or exchanged for others, as long as that costs less."""
    while True:
        exchanged = (each for out in sorted(savings) for each in _exchanges(needs, peaks, savings, out, device_bytes))
        priced = [(price, units) for units in exchanged if (price := _price(needs, peaks, units, device_bytes))]
        found = min(priced, key=lambda each: each[0], default=None)
        if found is None or found[0][0] >= best[0]:
            return best, savings
        best, savings = found


def _exchanges(needs: Needs, peaks: _Peaks, savings: _Savings, out: Saving, device_bytes: int) -> Iterator[_Savings]:
    """``savings`` without ``out``: with no other one, with one, and with as many of the cheapest as it takes."""
    rest = savings - {out}
    yield rest
    taken = {saving.unit for saving in rest}
    others = [saving for saving in peaks.savings if saving != out and saving.unit not in taken]
    others.sort(key=lambda saving: (needs.seconds_of(saving), saving))
    for saving in others:
        yield rest | {saving}
    for saving in others:
        if saving.unit in taken:
            continue
        taken.add(saving.unit)
        rest |= {saving}
        if _price(needs, peaks, rest, device_bytes) is not None:
            break
    for saving in sorted(rest, key=lambda saving: (-needs.seconds_of(saving), saving)):
        if _price(needs, peaks, rest - {saving}, device_bytes) is not None:  # Not all of them may be needed any more.
            rest -= {saving}
    yield rest


def _candidates(needs: Needs, peaks: _Peaks) -> Iterator[_Savings]:
    """Sets of savings: the first ones of an order. In forward's order, a peak late in backward falls first."""
    yield frozenset()
    recomputed = [saving for saving in reversed(peaks.savings) if not saving.is_offloaded]
    offloaded = [saving for saving in reversed(peaks.savings) if saving.is_offloaded]
    cheaper: dict[str, Saving] = {}
    for saving in sorted(peaks.savings, key=lambda saving: (needs.seconds_of(saving), saving)):
        cheaper.setdefault(saving.unit, saving)
    mixed = [cheaper[unit] for unit in reversed(peaks.units) if unit in cheaper]
    for order in (recomputed, *([offloaded, mixed] if offloaded else [])):
        most = {saving: max(1, int(peaks.row(saving).max())) for saving in order}
        by_rate = sorted(order, key=lambda saving: needs.seconds_of(saving) / most[saving])  # noqa: B023
        for savings in (order, by_rate, _by_effect(needs, peaks, order)):
            for count in range(1, len(savings) + 1):
                yield frozenset(savings[:count])


def _by_effect(needs: Needs, peaks: _Peaks, order: Sequence[Saving]) -> list[Saving]:
    """First the one that lowers the peak by most bytes a second, then the next one beside it."""
    left, chosen, held = list(order), [], peaks.of(frozenset())
    while left:
        top = int(held.max())
        effects = [(top - int((held - peaks.row(each)).max())) / max(needs.seconds_of(each), 1e-9) for each in left]
        saving = left.pop(effects.index(max(effects)))
        held = held - peaks.row(saving)
        chosen.append(saving)
    return chosen


def _held_states(needs: Needs, fraction: float) -> int:
    """Bytes of states and windows on the device."""
    windows = min(needs.most_windows, math.ceil(fraction * needs.window))
    return needs.states - math.floor(fraction * needs.states) + windows


def _fraction(needs: Needs, room: int, elsewhere: int) -> float | None:
    """The smallest fraction of states elsewhere with which the rest fits into ``room``; None: there is none."""
    if needs.states <= room:
        return 0.0
    low, high = 1, int(_most_elsewhere(needs, elsewhere) * _FRACTIONS)
    if high < 1 or _held_states(needs, high / _FRACTIONS) > room:
        return None
    while low < high:  # Windows grow with the fraction, and more slowly than what leaves.
        middle = (low + high) // 2
        low, high = (low, middle) if _held_states(needs, middle / _FRACTIONS) <= room else (middle + 1, high)
    return low / _FRACTIONS


def _most_elsewhere(needs: Needs, elsewhere: int) -> float:
    return min(1.0, elsewhere / needs.states) if needs.states else 0.0


def extremes(needs: Needs) -> tuple[int, int]:
    """The least bytes of all choices, and the bytes with which nothing is recomputed, offloaded or elsewhere."""
    peaks, most = _Peaks(needs), int(_most_elsewhere(needs, needs.elsewhere) * _FRACTIONS) / _FRACTIONS
    states = min(_held_states(needs, 0.0), _held_states(needs, most))
    # To recompute needs no more than to offload: a forward that runs again ends with what would come back.
    recomputed = frozenset(saving for saving in peaks.savings if not saving.is_offloaded)
    least = needs.fixed + int(peaks.of(recomputed).max()) + states
    return least, needs.fixed + int(peaks.all_kept.max()) + needs.states
