"""The choice of fit as arithmetic: which units are recomputed, which part of the states lies elsewhere, what stays unsharded.

It must not know a module, and equal numbers give equal choices on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from torch_ragged.fsdp.budget._dry_run import Curve

__all__ = ["Choice", "Needs", "NothingFits", "cheapest", "extremes"]

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


@dataclass(frozen=True)
class Needs:
    """What a step needs of memory and time.

    Attributes:
        curve: of a step that recomputes all units.
        seconds: of the recomputation of each unit that may be recomputed.
        unsharded: bytes of the parameters of each unit that may stay unsharded.
        fixed: bytes beside the curve that no choice changes.
        states: bytes of optimizer states that may lie elsewhere.
        elsewhere: the most of them that there is room for.
        seconds_per_byte: of a state that lies elsewhere, in each step.
        window, most_windows: states elsewhere are stepped through windows on the device: bytes of these if all states are
            elsewhere and no window is full, and the most.
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


@dataclass(frozen=True)
class Choice:
    """What is chosen.

    Attributes:
        recomputed: units whose forward runs again in backward.
        fraction: of the states, what lies elsewhere.
        unsharded: units that stay unsharded from forward to backward.
        peak: bytes in all.
        moment: the one with the peak, such as "backward of blocks.0".
        seconds: how much longer a step takes than with all memory.
    """

    recomputed: frozenset[str]
    fraction: float
    unsharded: tuple[str, ...]
    peak: int
    moment: str
    seconds: float


class _Peaks:
    """The curve of a step as vectors over moments.

    Attributes:
        units: those with a row in ``kept``, in the order of backward.
        kept: by unit and moment, what the peak is more if the unit is not recomputed.
        stays: by unit, what the peaks are more if it stays unsharded.
    """

    def __init__(self, needs: Needs) -> None:
        curve = needs.curve
        self.least = torch.tensor(curve.peaks, dtype=torch.int64, device="cpu")
        kept: dict[str, torch.Tensor] = {}
        self.stays: dict[str, torch.Tensor] = {}
        for call in curve.calls:
            self._add(kept, call.unit, curve.kept_of(call))
            if needs.unsharded.get(call.unit):
                self._add(self.stays, call.unit, curve.unsharded_of(call, needs.unsharded[call.unit]))
        self.units = list(kept)
        self.kept = torch.stack([*kept.values(), torch.zeros_like(self.least)])  # The last row: there may be no unit.

    def _add(self, vectors: dict[str, torch.Tensor], unit: str, more: Mapping[int, int]) -> None:
        vector = vectors.setdefault(unit, torch.zeros_like(self.least))
        for at, nbytes in more.items():
            vector[at] += nbytes

    def of(self, recomputed: frozenset[str] | set[str]) -> torch.Tensor:
        # One sum of rows: the search asks for thousands of sets, and a sum of vectors one by one takes seconds of all ranks.
        keeps = torch.tensor([*(unit not in recomputed for unit in self.units), False], device="cpu")
        return self.least + self.kept[keeps].sum(0)


def cheapest(needs: Needs, device_bytes: int) -> Choice:
    """The choice within ``device_bytes`` that adds the least time, as far as single exchanges find it.

    Raises:
        NothingFits: there is none.
    """
    peaks = _Peaks(needs)
    priced = [(price, units) for units in _candidates(needs, peaks) if (price := _price(needs, peaks, units, device_bytes))]
    if not priced:
        raise NothingFits(extremes(needs)[0])
    recomputed = _improved(needs, peaks, min(priced, key=lambda each: each[0])[1], device_bytes)
    price = _price(needs, peaks, recomputed, device_bytes)
    assert price is not None
    seconds, fraction = price
    room = device_bytes - needs.fixed - _held_states(needs, fraction)
    held, unsharded = peaks.of(recomputed), []
    for unit, vector in peaks.stays.items():  # Backward needs the last ones of forward first.
        if int((held + vector).max()) <= room:
            held = held + vector
            unsharded.append(unit)
    at = int(held.argmax())
    total = needs.fixed + _held_states(needs, fraction) + int(held[at])
    return Choice(recomputed, fraction, tuple(reversed(unsharded)), total, needs.curve.labels[at], seconds)


def _price(needs: Needs, peaks: _Peaks, recomputed: frozenset[str], device_bytes: int) -> tuple[float, float] | None:
    """The seconds that ``recomputed`` adds to a step, and the fraction of states that has to leave; None: it does not fit."""
    fraction = _fraction(needs, device_bytes - needs.fixed - int(peaks.of(recomputed).max()))
    if fraction is None:
        return None
    return sum(needs.seconds[unit] for unit in sorted(recomputed)) + fraction * needs.states * needs.seconds_per_byte, fraction


def _improved(needs: Needs, peaks: _Peaks, recomputed: frozenset[str], device_bytes: int) -> frozenset[str]:
    """``recomputed`` with single units left out, or exchanged for others, as long as that costs less."""
    best = _price(needs, peaks, recomputed, device_bytes)
    while True:
        exchanged = (each for out in sorted(recomputed) for each in _exchanges(needs, peaks, recomputed, out, device_bytes))
        priced = [(price, units) for units in exchanged if (price := _price(needs, peaks, units, device_bytes))]
        found = min(priced, key=lambda each: each[0], default=None)
        if found is None or best is None or found[0][0] >= best[0]:
            return recomputed
        best, recomputed = found


def _exchanges(
    needs: Needs, peaks: _Peaks, recomputed: frozenset[str], out: str, device_bytes: int
) -> Iterator[frozenset[str]]:
    """``recomputed`` without ``out``: with no other unit, with one, and with as many of the cheapest as it takes."""
    rest = recomputed - {out}
    yield rest
    others = sorted((needs.seconds[unit], unit) for unit in peaks.units if unit in needs.seconds and unit not in recomputed)
    for _, unit in others:
        yield rest | {unit}
    for _, unit in others:
        rest |= {unit}
        if _price(needs, peaks, rest, device_bytes) is not None:
            break
    for unit in sorted(rest, key=lambda unit: (-needs.seconds[unit], unit)):  # Not all of them may be needed any more.
        if _price(needs, peaks, rest - {unit}, device_bytes) is not None:
            rest -= {unit}
    yield rest


def _candidates(needs: Needs, peaks: _Peaks) -> Iterator[frozenset[str]]:
    """Sets of units to recompute: the first ones of an order. In forward's order, a peak late in backward falls first."""
    order = [unit for unit in reversed(peaks.units) if unit in needs.seconds]
    most = dict(zip(peaks.units, peaks.kept.amax(1).tolist()))
    by_rate = sorted(order, key=lambda unit: needs.seconds[unit] / max(1, most[unit]))
    yield frozenset()
    for units in (order, by_rate, _by_effect(needs, peaks, order)):
        for count in range(1, len(units) + 1):
            yield frozenset(units[:count])


def _by_effect(needs: Needs, peaks: _Peaks, order: Sequence[str]) -> list[str]:
    """First the unit whose recomputation lowers the peak by most bytes a second, then the next one beside it."""
    left, chosen, held = list(order), [], peaks.of(frozenset())
    rows = dict(zip(peaks.units, peaks.kept))
    while left:
        top = int(held.max())
        effects = [(top - int((held - rows[unit]).max())) / max(needs.seconds[unit], 1e-9) for unit in left]
        unit = left.pop(effects.index(max(effects)))
        held = held - rows[unit]
        chosen.append(unit)
    return chosen


def _held_states(needs: Needs, fraction: float) -> int:
    """Bytes of states and windows on the device."""
    windows = min(needs.most_windows, math.ceil(fraction * needs.window))
    return needs.states - math.floor(fraction * needs.states) + windows


def _fraction(needs: Needs, room: int) -> float | None:
    """The smallest fraction of states elsewhere with which the rest fits into ``room``; None: there is none."""
    if needs.states <= room:
        return 0.0
    most = _most_elsewhere(needs)
    low, high = 1, int(most * _FRACTIONS)
    if high < 1 or _held_states(needs, high / _FRACTIONS) > room:
        return None
    while low < high:  # Windows grow with the fraction, and more slowly than what leaves.
        middle = (low + high) // 2
        low, high = (low, middle) if _held_states(needs, middle / _FRACTIONS) <= room else (middle + 1, high)
    return low / _FRACTIONS


def _most_elsewhere(needs: Needs) -> float:
    return min(1.0, needs.elsewhere / needs.states) if needs.states else 0.0


def extremes(needs: Needs) -> tuple[int, int]:
    """The least bytes of all choices, and the bytes with which nothing is recomputed and no state lies elsewhere."""
    peaks, most = _Peaks(needs), int(_most_elsewhere(needs) * _FRACTIONS) / _FRACTIONS
    states = min(_held_states(needs, 0.0), _held_states(needs, most))
    least = needs.fixed + int(peaks.of(set(needs.seconds)).max()) + states
    return least, needs.fixed + int(peaks.of(frozenset()).max()) + needs.states
