"""The dry run: what a step holds, moment by moment, when each unit is recomputed, and what it would hold if some are not.

It must not change the model: no optimizer steps, and random number generators and buffers are as before afterwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import random
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import CheckpointError, set_checkpoint_early_stop

from torch_ragged._ranks.peers import PeerError
from torch_ragged._register._torch import backward_id
from torch_ragged.fsdp.budget._unit_forward import ActivationMode, UnitForward
from torch_ragged.fsdp.core._dbuffer import is_out_of_memory
from torch_ragged.fsdp.core._fsdp_param import local_of
from torch_ragged.fsdp.core._fsdp_param_group import FSDPParamGroup
from torch_ragged.fsdp.core._hooks import tensors_in
from torch_ragged.fsdp.tools._timeline import StreamClock

__all__ = ["Before", "Curve", "DryRun", "RecordedCall", "unchanged"]

_RANGE, _GATHER = "torch_ragged::fit", "torch_ragged::all_gather ("
_STEPS_FOR_BYTES, _STEPS_FOR_TIMES = 2, 2
"""So many steps are run for their bytes and for their times, after one to warm up."""


class RecordedCall(NamedTuple):
    """One forward of a unit in the dry run. Moments are indices of :class:`Curve`.

    Attributes:
        begin, end: of its forward.
        gather: when the all-gather for backward is issued.
        again, again_ends: of its recomputation in backward.
        kept: bytes that the recomputation has made and autograd holds: what the unit keeps if it is not recomputed. 0 of a
            call that did not run again: ``again`` and ``again_ends`` are ``end``.
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
        always: units that every choice recomputes: a forward of theirs did not run again.
        repeated: units with a forward that several backwards need.
    """

    peaks: list[int]
    starts: list[int]
    labels: list[str]
    calls: list[RecordedCall]
    always: frozenset[str] = frozenset()
    repeated: frozenset[str] = frozenset()

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

    def offloaded_of(self, call: RecordedCall, left: int) -> dict[int, int]:
        """The same if the activations of ``call``, but ``left`` bytes, are offloaded by an :class:`ActivationOffload`."""
        more = self.kept_of(call)
        following = min((other for other in self.calls if other.begin >= call.end), key=lambda other: other.begin, default=call)
        if following is not call:  # They are there until its forward has ended, and from its backward on.
            more.update(dict.fromkeys(range(following.end, min(following.again, call.again)), left))
        return more

    def unsharded_of(self, call: RecordedCall, nbytes: int) -> dict[int, int]:
        """By moment, what stays allocated if the unit's parameters stay unsharded from forward to backward."""
        return dict.fromkeys(range(call.end, call.gather), nbytes)


class DryRun:
    """Runs ``step`` with the units recomputed: to compare what they compute twice, for its bytes, and for its times.

    Args:
        units: by name.
        groups: by the name of a unit, those of its parameters.
        device: whose memory counts.

    Attributes:
        blocked: units that must not be recomputed, and why. They keep their activations in the steps that are recorded.
    """

    def __init__(
        self, units: Mapping[str, Sequence[UnitForward]], groups: Mapping[str, Sequence[FSDPParamGroup]], device: torch.device
    ) -> None:
        self._units, self._groups, self._device = units, groups, device
        self.blocked: dict[str, str] = {}
        self._clock = StreamClock(device.type == "cuda")
        self._traits: list[tuple[str, list[list[torch.Tensor]]]] = []  # Of each forward's outputs, and of those again.
        self._again, self._has_raised = "", False  # The unit that has run again last, and whether it has not returned.
        self._numbers = itertools.count()  # Of calls.
        self._times: list[list[tuple[str, Any, Any]]] = []  # Of each timed step.

    def run(
        self, step: Callable[[], Any], before: Before, largest: Callable[[Sequence[int]], list[int]]
    ) -> tuple[Curve, dict[str, float]]:
        """The curve, and the seconds of each unit's forward.

        Args:
            before: the model, before the first step.
            largest: numbers of this rank to the largest ones of all ranks. It is called once.

        Raises:
            ValueError: a unit makes other tensors when it runs again, or raises.
        """
        try:
            # Otherwise a recomputation ends when it has all tensors, before the outputs that are compared.
            with self._watched(self._compared), set_checkpoint_early_stop(False):
                step()
        except Exception as error:
            if not isinstance(error, CheckpointError) and (not self._has_raised or _is_no_fault_of(error)):
                raise
            what = "makes other tensors" if isinstance(error, CheckpointError) else f"raises {type(error).__name__}"
            raise ValueError(
                f"fit cannot recompute {self._again}: its forward {what} when it runs again, as one that adds to a cache of "
                "keys and values (in transformers, give use_cache=False): run steps in which all units can be recomputed"
            ) from error
        self._block(before)
        names = list(self._units)
        # Equal on all ranks: if one rank kept what others recompute, it would leave out the collectives of that forward.
        for name, is_blocked in zip(names, largest([name in self.blocked for name in names])):
            if is_blocked:
                self.blocked.setdefault(name, "it is not recomputed on another rank")
                for each in self._units[name]:
                    each.activations = ActivationMode.KEPT
        with self._watched(self._named):
            curves = [self._recorded(step) for _ in range(_STEPS_FOR_BYTES)]
        with self._watched(self._timed):
            for _ in range(_STEPS_FOR_TIMES):
                self._times.append([])
                step()
        seconds: dict[str, float] = {}
        for calls in zip(*self._times):  # One call, in each of the steps: the fastest one was disturbed least.
            name = calls[0][0]
            seconds[name] = seconds.get(name, 0.0) + min(self._clock.seconds(begin, end) for _, begin, end in calls)
        # The last ones: modules of a static plan are on trial in their first calls.
        return curves[-1].least(curves[:-1]), seconds

    def try_offload(self, step: Callable[[], Any], names: Iterable[str]) -> dict[str, int]:
        """A step in which the activations of these units are offloaded: bytes of each that leave."""
        tried = {name: self._units[name] for name in names}
        for each in itertools.chain(*tried.values()):
            each.activations, each.moved_nbytes = ActivationMode.OFFLOADED, 0
        step()
        for each in itertools.chain(*tried.values()):
            each.activations = ActivationMode.RECOMPUTED
        return {name: sum(each.moved_nbytes for each in units) for name, units in tried.items()}

    def _block(self, before: Before) -> None:
        for name, traits in self._traits:
            if not all(_are_alike(traits[0], others) for others in traits[1:]):
                self.blocked.setdefault(name, "its forward computes other values when it runs again")
        for name, recomputes in self._units.items():
            written = (before.written_in(each.module) for each in recomputes)
            if (buffer := next(filter(None, written), None)) is not None:
                self.blocked[name] = f"its forward writes {buffer}"

    def _compared(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        traits: list[list[torch.Tensor]] = []

        def run(*args: Any, **kwargs: Any) -> Any:
            if traits:
                self._again, self._has_raised = name, True
            elif backward_id() != -1:  # A checkpoint around it runs it again, which would make three forwards of two.
                self.blocked[name] = "it is inside of an activation checkpoint"
            result = function(*args, **kwargs)
            self._has_raised = False
            # Numbers, not the outputs: these would stay in memory until backward, in the step that must need the least. Of the
            # local tensor: a collective here would be one more than in training.
            with torch.no_grad():
                found = [local_of(tensor.detach()) for tensor in tensors_in(result)[0]]
                traits.append([_traits_of(tensor) for tensor in found if tensor.layout is torch.strided])
            return result

        self._traits.append((name, traits))
        return _untraced(run)

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
        number, phases = next(self._numbers), itertools.chain(["forward"], itertools.repeat("again"))

        def run(*args: Any, **kwargs: Any) -> Any:
            with record_function(f"{_RANGE}/{next(phases)}/{number}/{name}"):
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
        forwards: dict[str, tuple[int, int]] = {}  # Of each call, by its number and name: begin and end.
        again: dict[str, list[RecordedCall]] = {}
        open_at: dict[str, _Open] = {}
        gathers: dict[str, list[int]] = {}  # Of each group.
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
            phase, _, key = start.partition("/")
            at = len(curve.peaks)
            curve.peaks.append(held - sum(each.own for other, each in others.items() if other not in ours))
            curve.starts.append(curve.peaks[-1])
            if phase == "gather":  # Only a moment: what begins then has begun before.
                gathers.setdefault(key, []).append(at)
                curve.labels.append(curve.labels[-1])
                continue
            name = key.partition("/")[2]
            after = "after " if phase == "forward" and what != start else ""
            curve.labels.append(f"{after}{'forward' if phase == 'forward' else 'backward'} of {name}")
            if what == start:
                open_at[what] = _Open(at=at, thread=thread)
                continue
            begun = open_at.pop(start)
            if phase == "forward":
                forwards[key] = begun.at, at
            elif key in forwards:
                issued = self._issued(gathers, name, forwards[key][1]) or begun.at
                gather = min(issued, begun.at)  # A later one is for another backward of the same graph.
                call = RecordedCall(name, *forwards[key], gather, begun.at, at, max(0, begun.held), begun.most)
                again.setdefault(key, []).append(call)
        # What a call would keep is not known if it never ran again. Recomputing its unit costs no time then.
        names = {key: key.partition("/")[2] for key in forwards}
        curve.always = frozenset(name for key, name in names.items() if key not in again and name not in self.blocked)
        curve.repeated = frozenset(names[key] for key, calls in again.items() if len(calls) > 1)
        for key, (begin, end) in forwards.items():
            if names[key] not in curve.always and key in again:
                # Until the last time, if there are several: with retain_graph.
                kept, working = (max(column) for column in zip(*((call.kept, call.working) for call in again[key])))
                curve.calls.append(again[key][-1]._replace(kept=kept, working=working))
            elif issued := self._issued(gathers, names[key], end):
                curve.calls.append(RecordedCall(names[key], begin, end, issued, end, end, 0, 0))
        curve.calls.sort(key=lambda call: max(call.gather, call.again))  # The order of backward.
        return curve

    def _issued(self, gathers: Mapping[str, Sequence[int]], name: str, end: int) -> int:
        """The moment after ``end`` at which the first all-gather of a unit is issued; 0: there is none."""
        return min((at for group in self._groups[name] for at in gathers.get(group.fqn, ()) if at > end), default=0)


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


def _is_no_fault_of(error: Exception) -> bool:
    """Whether a forward that raises ``error`` is not at fault: memory or another rank is."""
    return isinstance(error, PeerError) or (isinstance(error, RuntimeError) and is_out_of_memory(error))


def _traits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Numbers that are other ones if the values are, made without a copy of the tensor."""
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    flat = flat.view(torch.uint8) if flat.itemsize == 1 else flat  # Torch has no sums of 8-bit floating-point numbers.
    even, odd = (part.sum(dtype=torch.float64) for part in (flat[::2], flat[1::2]))
    norm = torch.linalg.vector_norm(flat, dtype=torch.float64) if flat.is_floating_point() else even.abs() + odd.abs()
    return torch.stack([even, odd, norm])


def _are_alike(outputs: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Equal on a CPU. Kernels of an accelerator may add in other orders each time, which is no change of a program."""
    return len(outputs) == len(others) and all(
        torch.allclose(one, other, rtol=0.0, atol=0.0 if one.is_cpu else 1e-3 * float(one[2]), equal_nan=True)
        for one, other in zip(outputs, others)
    )


class Before:
    """The buffers of a model, the training modes of its modules and the generators, as they are now."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._python = model, random.getstate()
        self._numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
        self._buffers = [
            _Buffer(module, name, buffer, local_of(buffer).detach().clone(), _writes_to(buffer))
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._modes = {module: module.training for module in model.modules()}

    def written_in(self, module: nn.Module) -> str | None:
        """The name of a buffer of ``module`` that was written since, or replaced by other values."""
        inside = {child: name for name, child in module.named_modules()}
        for each in self._buffers:
            if each.module in inside:
                now = each.module._buffers.get(each.name)
                if (now is each.buffer and _writes_to(now) != each.version) or not each.has_values_of(now):
                    return f"{inside[each.module]}.{each.name}".lstrip(".")
        return None

    def restore(self) -> None:
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        for module, mode in self._modes.items():
            module.training = mode
        for each in self._buffers:
            each.module._buffers[each.name] = each.buffer
            if not each.has_values_of(each.buffer):  # A write counts, and expanded buffers take none.
                with torch.inference_mode(each.buffer.is_inference()), torch.no_grad():
                    local_of(each.buffer).copy_(each.values)
        for param in self._model.parameters():
            param.grad = None


class _Buffer(NamedTuple):
    module: nn.Module
    name: str
    buffer: torch.Tensor
    values: torch.Tensor
    version: int

    def has_values_of(self, other: torch.Tensor | None) -> bool:
        if other is None or (other.shape, other.dtype) != (self.buffer.shape, self.buffer.dtype):
            return False
        return _raw_of(local_of(other)).equal(_raw_of(self.values))


def _raw_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _writes_to(buffer: torch.Tensor) -> int:
    return -1 if buffer.is_inference() else buffer._version


@contextlib.contextmanager
def unchanged(model: nn.Module, device: torch.device) -> Iterator[Before]:
    """A block after which generators, buffers, training modes and gradients are as before it."""
    before = Before(model)
    try:
        with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
            yield before
    finally:
        before.restore()
