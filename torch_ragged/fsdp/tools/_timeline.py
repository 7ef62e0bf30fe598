"""Timeline: what one training step did when, as a picture and as a trace.

Importing this file must not need matplotlib: ``save()`` imports it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["StreamClock", "TimelineSpan", "Timeline", "between", "timeline_of"]

_COLOURS = {
    "compute": "#8fa8c8",
    "optimizer": "#9c86b8",
    "exposed": "#d1495b",
    "all_gather": "#edae49",
    "reduce_scatter": "#66a182",
    "other": "#9a9a9a",
    "tier_read": "#c9a66b",
    "tier_write": "#7f9c6b",
    "tier_exposed": "#b5525c",
}
_NARROW = 0.06  # Of the width of the picture: the least width of a bar that has a name in it.


@dataclass(frozen=True)
class TimelineSpan:
    """A part of a step.

    Attributes:
        kind: ``compute``, ``optimizer``, ``exposed`` (a wait for a collective), or the collective from its issue to the end of
            its wait: ``all_gather``, ``reduce_scatter`` or ``other``. Of an offloaded optimizer: ``tier_read`` and
            ``tier_write``, states that move, and ``tier_exposed``, the part of ``optimizer`` that waits for them.
        name: the name of the group whose collective it is; otherwise empty.
        begin, end: seconds since the step began. A collective that an earlier step issued begins before 0.
    """

    kind: str
    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """One step of this rank, as :attr:`Monitor.timeline` has it. ::

        compute         |#####..####|##..######|     |     the rest of the step
        optimizer       |           |          |#####|
        exposed         |     ##    |  ##      |     |     the step waits for a collective
        all_gather      |#######    |####      |     |     from the issue to the end of the wait
        reduce_scatter  |           |     #### |     |
        tier_read       |           |          |###  |     states of an offloaded optimizer

    ``compute``, ``optimizer`` and ``exposed`` fill the step without overlap.

    Attributes:
        seconds: the length of the step.
        spans: by kind, then by time.
        rank: the global rank.
    """

    seconds: float
    spans: tuple[TimelineSpan, ...]
    rank: int = 0

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline to a file.

        ``.json`` is a trace that https://ui.perfetto.dev and chrome://tracing open. ``.png`` and ``.svg`` are a picture.

        Raises:
            ValueError: the path has another ending. Nothing is written.
            ImportError: a picture needs matplotlib, which is not installed.
        """
        kind = Path(path).suffix
        if kind not in (".json", ".png", ".svg"):
            raise ValueError(f"a timeline is saved to a .json, .png or .svg file, got {str(path)!r}: use one of these endings")
        if kind == ".json":
            Path(path).write_text(json.dumps(self._trace()) + "\n")
            return
        if importlib.util.find_spec("matplotlib") is None:
            raise ImportError(f"drawing {str(path)!r} needs matplotlib: run pip install matplotlib, or save a .json trace")
        self._draw(str(path), kind[1:])

    def _tracks(self) -> list[list[TimelineSpan]]:
        """Rows of spans that do not overlap: one for each kind, and more for collectives that are in flight at once."""
        rows: list[list[TimelineSpan]] = []
        for kind in _COLOURS:
            mine: list[list[TimelineSpan]] = []
            for span in sorted((span for span in self.spans if span.kind == kind), key=lambda span: span.begin):
                free = next((row for row in mine if row[-1].end <= span.begin), None)
                if free is None:
                    mine.append([span])
                else:
                    free.append(span)
            rows += mine
        return rows

    @property
    def _start(self) -> float:
        """Where the picture and the trace begin: with the step, or with a collective of an earlier one."""
        return min([0.0, *(span.begin for span in self.spans)])

    def _trace(self) -> dict[str, Any]:
        """Chrome's trace event format. Its moments are microseconds and must not be negative."""
        start = self._start
        where = {"pid": self.rank}
        events: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", **where, "args": {"name": f"rank {self.rank}"}}]
        for row, spans in enumerate(self._tracks()):
            where["tid"] = row
            events.append({"name": "thread_name", "ph": "M", **where, "args": {"name": spans[0].kind}})
            events.append({"name": "thread_sort_index", "ph": "M", **where, "args": {"sort_index": row}})
            for span in spans:
                text = f"{span.kind} ({span.name})" if span.name else span.kind
                times = {"ts": 1e6 * (span.begin - start), "dur": 1e6 * (span.end - span.begin)}
                events.append({"name": text, "cat": span.kind, "ph": "X", **where, **times})
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def _draw(self, path: str, kind: str) -> None:
        import matplotlib
        from matplotlib.figure import Figure

        tracks = self._tracks()
        figure = Figure(figsize=(11, 1.2 + 0.36 * len(tracks)), layout="constrained")
        axes = figure.subplots()
        start, least = self._start, _NARROW * (self.seconds - self._start)
        for row, spans in enumerate(tracks):
            bars = [(1000 * span.begin, 1000 * (span.end - span.begin)) for span in spans]
            axes.broken_barh(bars, (row - 0.4, 0.8), color=_COLOURS[spans[0].kind], edgecolor="white", linewidth=0.3)
            for span in spans:
                if span.name and span.end - span.begin > least:
                    axes.text(1000 * (span.begin + span.end) / 2, row, span.name, ha="center", va="center", fontsize=7)
        # Only the first row of a kind has its name.
        kinds = [spans[0].kind for spans in tracks]
        names = [kind.replace("_", "-") if row == kinds.index(kind) else "" for row, kind in enumerate(kinds)]
        axes.set_yticks(range(len(tracks)), names)
        axes.invert_yaxis()
        axes.set_xlim(1000 * start, 1000 * self.seconds)
        exposed = sum(span.end - span.begin for span in self.spans if span.kind == "exposed")
        share = exposed / max(self.seconds, 1e-9)
        axes.set(
            xlabel="milliseconds", title=f"rank {self.rank}: {1000 * self.seconds:.1f} ms, {share:.0%} in exposed collectives"
        )
        with matplotlib.rc_context({"svg.hashsalt": "torch_ragged", "svg.fonttype": "none"}):
            figure.savefig(path, format=kind, dpi=150)


class StreamClock:
    """Moments and the seconds between them, on the host; or on the current CUDA stream, where a moment is an event."""

    def __init__(self, is_cuda: bool) -> None:
        self._is_cuda = is_cuda

    def mark(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        if not self._is_cuda:
            return end - begin
        begin.synchronize()  # It may be on another stream than the end.
        end.synchronize()
        return begin.elapsed_time(end) / 1000


def between(taken: Iterable[tuple[float, float]], begin: float, end: float) -> list[tuple[float, float]]:
    """The parts of ``begin`` to ``end`` that no interval of ``taken`` covers."""
    free, at = [], begin
    for start, stop in sorted(taken):
        if start > at:
            free.append((at, min(start, end)))
        at = max(at, stop)
        if at >= end:
            return free
    return [*free, (at, end)]


def timeline_of(
    seconds: float,
    collectives: Iterable[tuple[str, str, float, float, float]],
    optimizers: Iterable[tuple[float, float]],
    rank: int,
    tiers: Iterable[tuple[str, float, float]] = (),
) -> Timeline:
    """The timeline of a step. A wait within an optimizer's step is a wait. What is neither is compute.

    A collective has its kind, its name, and the moments of its issue, of the begin of the wait, and of its end.
    """
    spans, waits = [TimelineSpan(kind, "", begin, end) for kind, begin, end in tiers], []
    for kind, name, issued, waited, ended in collectives:
        spans += [TimelineSpan(kind, name, issued, ended), TimelineSpan("exposed", name, waited, ended)]
        waits.append((waited, ended))
    steps = [part for begin, end in optimizers for part in between(waits, begin, end)]
    spans += [TimelineSpan("optimizer", "", *part) for part in steps]
    spans += [TimelineSpan("compute", "", *part) for part in between([*waits, *steps], 0.0, seconds)]
    order = list(_COLOURS)
    return Timeline(seconds, tuple(sorted(spans, key=lambda span: (order.index(span.kind), span.begin))), rank)
