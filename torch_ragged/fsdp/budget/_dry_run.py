"""The dry run: what a step holds, moment by moment, when each unit is recomputed, and what it would hold if some are not.

It must not change the model: no optimizer steps, and random number generators and buffers are as before afterwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import random
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import CheckpointError

from torch_ragged.fsdp.budget._recompute import Recompute
from torch_ragged.fsdp.core._fsdp_param_group import FSDPParamGroup
from torch_ragged.fsdp.tools._timeline import StreamClock

__all__ = ["Curve", "DryRun", "RecordedCall", "unchanged"]

_RANGE, _GATHER = "torch_ragged::fit", "torch_ragged::all_gather ("
_STEPS_FOR_BYTES, _STEPS_FOR_TIMES = 2, 2
"""So many steps are run for their bytes and for their times, after one to warm up."""


class RecordedCall(NamedTuple):
    """One forward of a unit in the dry run. Moments are indices of :class:`Curve`.

    Attributes:
        begin, end: of its forward.
        gather: when the all-gather for backward is issued.
        again, again_ends: of its recomputation in backward.
        kept: bytes that the recomputation has made and autograd holds: what the unit keeps if it is not recomputed.
        working: the most bytes in the recomputation beyond those before it.
    """

    unit: str
    begin: int
    end: int
    gather: int
    again: int
    again_ends: int
    kept: int
    working: int


@dataclass
class Curve:
    """The memory of a step that recomputes each unit, between moments at which a forward or a recomputation begins or ends.

    Attributes:
        peaks: the most bytes between a moment and the next one, beside what was allocated before the step.
        labels: what begins at the moment, such as "forward of blocks.0".
        starts: the bytes at the moment.
    """

    peaks: list[int]
    starts: list[int]
    labels: list[str]
    calls: list[RecordedCall]

    def least(self, others: Sequence[Curve]) -> Curve:
        """The least peaks of steps with equal calls: threads of gloo, and Python's garbage collector, free sooner or later."""
        alike = [other for other in others if other.labels == self.labels]
        peaks = [min(column) for column in zip(self.peaks, *(other.peaks for other in alike))]
        return dataclasses.replace(self, peaks=peaks)

    def kept_of(self, call: RecordedCall) -> dict[int, int]:
        """By moment, what the peak there is at least more if the unit of ``call`` keeps its activations."""
        more = dict.fromkeys(range(call.end, call.again), call.kept)
        for at in range(call.begin, call.end):  # Within it, nothing that autograd saves is freed.
            more[at] = max(0, self.starts[call.begin] + call.working - self.peaks[at])
        for at in range(call.again, call.again_ends):
            more[at] = max(0, self.starts[call.again] + call.kept - self.peaks[at])
        return more

    def unsharded_of(self, call: RecordedCall, nbytes: int) -> dict[int, int]:
        """By moment, what stays allocated if the unit's parameters stay unsharded from forward to backward."""
        return dict.fromkeys(range(call.end, call.gather), nbytes)


class DryRun:
    """Runs ``step`` with the units recomputed: to warm up, for its bytes, and for its times.

    Args:
        units: by name.
        groups: by the name of a unit, those of its parameters.
        device: whose memory counts.
    """

    def __init__(
        self, units: Mapping[str, Sequence[Recompute]], groups: Mapping[str, Sequence[FSDPParamGroup]], device: torch.device
    ) -> None:
        self._units, self._groups, self._device = units, groups, device
        self._clock = StreamClock(device.type == "cuda")
        self._times: list[list[tuple[str, Any, Any]]] = []  # Of each timed step.

    def run(self, step: Callable[[], Any]) -> tuple[Curve, dict[str, float]]:
        """The curve, and the seconds of each unit's forward.

        Raises:
            ValueError: a unit makes other tensors when it runs again.
        """
        try:
            step()
            with self._watched(self._named):
                curves = [self._recorded(step) for _ in range(_STEPS_FOR_BYTES)]
            with self._watched(self._timed):
                for _ in range(_STEPS_FOR_TIMES):
                    self._times.append([])
                    step()
        except CheckpointError as error:
            raise ValueError(
                "fit cannot recompute a module whose forward makes other tensors when it runs again, such as one that adds to "
                "a cache of keys and values (in transformers, give use_cache=False): run steps in which all units can be "
                "recomputed"
            ) from error
        seconds: dict[str, float] = {}
        for calls in zip(*self._times):  # One call, in each of the steps: the fastest one was disturbed least.
            name = calls[0][0]
            seconds[name] = seconds.get(name, 0.0) + min(self._clock.seconds(begin, end) for _, begin, end in calls)
        # The last ones: modules of a static plan are on trial in their first calls.
        return curves[-1].least(curves[:-1]), seconds

    def _recorded(self, step: Callable[[], Any]) -> Curve:
        gc.collect()  # Otherwise, cycles of earlier steps may be freed in this one.
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            step()
        return self._curve(profiler)

    @contextlib.contextmanager
    def _watched(self, watch: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
        for name, recomputes in self._units.items():
            for each in recomputes:
                each.watch = functools.partial(watch, name)
        try:
            yield
        finally:
            for each in (each for recomputes in self._units.values() for each in recomputes):
                each.watch = None

    def _named(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        phases = iter(("forward", *["again"] * 1000))

        def run(*args: Any, **kwargs: Any) -> Any:
            with record_function(f"{_RANGE}/{next(phases)}/{name}"):
                try:
                    return function(*args, **kwargs)
                except BaseException as error:
                    # A recomputation ends by an exception as soon as it has all tensors. Its frames hold others.
                    traceback.clear_frames(error.__traceback__)
                    raise

        return _untraced(run)

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            begin = self._clock.mark()
            try:
                return function(*args, **kwargs)
            finally:
                if not runs:
                    self._times[-1].append((name, begin, self._clock.mark()))
                runs.append(None)

        runs: list[None] = []
        return _untraced(run)

    def _curve(self, profiler: Any) -> Curve:
        """From the allocator's events, and the ranges around forwards and recomputations."""
        points: list[tuple[int, int, str, int, int]] = []  # (nanoseconds, order, what, bytes, thread)
        for event in profiler.profiler.kineto_results.events():
            name, begin, thread = event.name(), event.start_ns(), event.start_thread_id()
            if name == "[memory]":
                if (event.device_type() == torch._C._autograd.DeviceType.CPU) == (self._device.type == "cpu"):
                    points.append((begin, 1, "", event.nbytes(), thread))
            elif name.startswith(_GATHER):
                points.append((begin, 2, f"gather/{name[len(_GATHER) : -1]}", 0, thread))
            elif name.startswith(_RANGE):
                what = name[len(_RANGE) + 1 :]
                points.append((begin, 2, what, 0, thread))
                points.append((begin + event.duration_ns(), 0, f"{what} ends", 0, thread))
        curve = Curve([0], [0], ["forward"], [])
        forwards: dict[str, list[tuple[int, int]]] = {}  # Of each unit, those that were not run again yet: begin and end.
        open_at: dict[str, _Open] = {}
        gathers: dict[str, int] = {}  # The last one of each group.
        held, others = 0, defaultdict[int, _ThreadBytes](_ThreadBytes)
        ours = {thread for _, _, what, _, thread in points if what}  # Forwards and recomputations run on these.
        for _, _, what, nbytes, thread in sorted(points):
            if not what:
                held += nbytes
                others[thread].add(nbytes)
                # What threads of gloo allocate while a collective is in flight differs from step to step.
                curve.peaks[-1] = max(curve.peaks[-1], held - sum(each.own for at, each in others.items() if at not in ours))
                for each in open_at.values():
                    each.add(nbytes if each.thread == thread else 0)
                continue
            start = what.removesuffix(" ends")
            phase, _, name = start.partition("/")
            at = len(curve.peaks)
            curve.peaks.append(held - sum(each.own for other, each in others.items() if other not in ours))
            curve.starts.append(curve.peaks[-1])
            if phase == "gather":  # Only a moment: what begins then has begun before.
                gathers[name] = at
                curve.labels.append(curve.labels[-1])
                continue
            after = "after " if phase == "forward" and what != start else ""
            curve.labels.append(f"{after}{'forward' if phase == 'forward' else 'backward'} of {name}")
            if what == start:
                open_at[what] = _Open(at=at, thread=thread)
                continue
            begun = open_at.pop(start)
            if phase == "forward":
                forwards.setdefault(name, []).append((begun.at, at))
            elif forwards.get(name):
                begin, end = forwards[name].pop()
                issued = [gathers.get(group.fqn, 0) for group in self._groups[name]]
                gather = min([moment for moment in issued if moment > end], default=begun.at)
                curve.calls.append(RecordedCall(name, begin, end, gather, begun.at, at, max(0, begun.held), begun.most))
        return curve


@dataclass
class _ThreadBytes:
    """What one thread has allocated and freed since some moment.

    Attributes:
        held: bytes; negative if it has freed what others have allocated.
        least, most: of ``held``.
    """

    held: int = 0
    least: int = 0
    most: int = 0

    def add(self, nbytes: int) -> None:
        self.held += nbytes
        self.least, self.most = min(self.least, self.held), max(self.most, self.held)

    @property
    def own(self) -> int:
        """What it has allocated itself, and not freed."""
        return self.held - self.least


@dataclass
class _Open(_ThreadBytes):
    """The same, of the thread of a forward or recomputation, since that began at the moment ``at``."""

    at: int = 0
    thread: int = 0


def _untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which a compiled module calls as it is; what it calls may be compiled."""
    is_loaded = "torch._dynamo" in sys.modules  # It takes a second, and nothing is compiled without it.
    return torch.compiler.disable(function, recursive=False) if is_loaded else function


@contextlib.contextmanager
def unchanged(model: nn.Module, device: torch.device) -> Iterator[None]:
    """A block after which generators, buffers and gradients are as before it."""
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    generator = random.getstate()
    devices = [] if device.type == "cpu" else [device]
    try:
        with torch.random.fork_rng(devices, device_type=device.type):
            yield
    finally:
        random.setstate(generator)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in buffers and buffers[name].shape == buffer.shape:
                    buffer.copy_(buffers[name])
        for param in model.parameters():
            param.grad = None
