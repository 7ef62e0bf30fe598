"""monitor: the time, the bytes and the memory of training steps, as a row of numbers per step.

It must not communicate, and must not change what a step computes.
"""

from __future__ import annotations

import contextlib
import functools
import numbers
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from torch_ragged._register._torch import profiler_range
from torch_ragged.fsdp._groups import module_states, named_groups
from torch_ragged.fsdp.comm._collectives import Work, WrappedCollectives
from torch_ragged.fsdp.core._fsdp_param_group import FSDPParamGroup
from torch_ragged.fsdp.tools._memory_report import optimizers_or_makers, transient_nbytes
from torch_ragged.fsdp.tools._peak_flops import device_peak, flops_per_token_of
from torch_ragged.fsdp.tools._replay import high_water
from torch_ragged.fsdp.tools._timeline import StreamClock, Timeline, timeline_of

__all__ = ["Monitor", "monitor"]

_TIMED_KINDS = ("all_gather", "reduce_scatter", "other")
_TIERS = ("tier_read", "tier_write", "tier_exposed")


def monitor(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    *,
    flops_per_token: float | None = None,
    peak_flops: float | None = None,
) -> Monitor:
    """Watch the training steps of ``model`` until the end of the ``with`` block, or until :meth:`Monitor.close`.

    ::

        with monitor(model, optimizer) as watch:
            for batch in data:
                ...                             # forward, backward, optimizer.step()
                row = watch.step(tokens=n)      # a flat dict of floats, for a logger
                bar.set_postfix_str(watch.postfix())

    It does not communicate. ``torch.profiler`` works without a monitor: collectives are always ranges with the name of their
    group. ``torch_ragged::all_gather (blocks.3)`` is the call, ``torch_ragged::all_gather_wait (blocks.3)`` is the wait. The
    steps of the optimizers are timed.

    Args:
        model: a model with modules on which ``fully_shard`` was called.
        optimizer: the optimizer, or several of them.
        flops_per_token: for ``mfu``, the FLOPs per token of a forward and a backward of the whole model. None: 6 per element of
            the trained parameters and 4 per element of the frozen ones, without those that only an ``nn.Embedding`` has. This
            leaves out the products of attention, and counts all experts. Give the number for experts, for long sequences, and
            for a stage of a pipeline, because ``model`` is then not the whole model.
        peak_flops: for ``mfu``, the most FLOPs per second of the device of one rank. None: those of dense bfloat16 products,
            from a table of GPUs. On a CPU, an unknown GPU or a part of one (MIG), there is no ``mfu`` then.

    Raises:
        ValueError: ``fully_shard`` was called on no module of ``model``, or another monitor watches it.
        TypeError: ``optimizer`` is neither an optimizer nor several of them, or a number of FLOPs is no number > 0.
    """
    return Monitor(model, optimizer, flops_per_token=flops_per_token, peak_flops=peak_flops)


class Monitor:
    """The object that :func:`monitor` returns. Each row of :meth:`step` has these keys, for this rank, since the last row:

    ============================  ====================================================================================
    ``step_s``                    seconds of the step
    ``tokens_per_s``              ``tokens`` of :meth:`step` per second; only if ``tokens`` was given
    ``mfu``                       model FLOPs utilization: ``tokens_per_s * flops_per_token / (ranks * peak_flops)``, with the
                                  ``tokens`` of all ranks; only if ``tokens`` was given, and :attr:`peak_flops` is known
    ``optimizer_s``               seconds in ``optimizer.step()``; 0 if ``monitor`` was not given the optimizer
    ``exposed_s``                 seconds in which the step waited for collectives: the sum of ``<kind>_exposed_s``
    ``compute_s``                 the rest of ``step_s``: forward, backward, data, collectives that are not watched
    ``<kind>_s``                  seconds from the issue of each collective to the end of its wait: an upper bound
    ``<kind>_exposed_s``          seconds in the waits for collectives
    ``<kind>_calls``              the number of collectives issued
    ``<kind>_bytes``              bytes of the gathered or reduced buffers: the shards of all ranks, padding included
    ``memory_peak_bytes``         GPU: most bytes of tensors in the step. CPU: largest resident set of the process so far
    ``memory_reserved_bytes``     GPU: most bytes that the allocator reserved in the step. CPU: resident set now
    ``buffer_bytes``              bytes of the groups' buffers now: sharded, gathered, and gradients not reduced yet
    ``buffer_peak_bytes``         most bytes of the groups' buffers at one moment of the step. The peak of
                                  :func:`memory_report` also has ``.grad``, the optimizer's states, and the second buffer
                                  of gloo's reduce-scatter
    ``tier_<way>_s``              only for offloaded optimizers: seconds in which states were read from files, or written.
                                  Of copies between host memory and a GPU, only bytes are counted
    ``tier_<way>_bytes``          bytes of these states; ``<way>`` is ``read`` or ``write``
    ``tier_exposed_s``            seconds of ``optimizer_s`` in which the step waited for reads
    ============================  ====================================================================================

    ``<kind>`` is ``all_gather``, ``reduce_scatter`` or ``other``. ``other`` is all other collectives of the groups, and blocks
    in :meth:`collective`. Collectives that DTensor issues, as in ``clip_grad_norm_``, are not watched.

    On a CPU, seconds are measured on the host. On a GPU, they are measured on the current stream by events, and a wait is the
    time for which the stream waits. :meth:`step` then waits for the stream, and :meth:`restart` resets the allocator's peaks.

    Attributes:
        flops_per_token: the FLOPs per token of ``mfu``.
        peak_flops: the FLOPs per second that ``mfu`` takes for the device of one rank. None: unknown, and rows have no ``mfu``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Iterable[Optimizer] | None = None,
        *,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
    ) -> None:
        module_states(model)
        for name, value in (("flops_per_token", flops_per_token), ("peak_flops", peak_flops)):
            is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
            if value is not None and not (is_number and value > 0):
                raise TypeError(f"monitor takes a number > 0 as {name}, such as 1e9, or None, got {value!r}")
        self._groups = named_groups(model)
        if any(isinstance(group.collectives, _WatchedCollectives) for group in self._groups.values()):
            raise ValueError("another monitor watches this model: close() it first")
        optimizers = optimizers_or_makers(optimizer, "monitor")
        for each in optimizers:
            if isinstance(each, type) or not hasattr(each, "register_step_pre_hook"):
                raise TypeError(f"monitor got {each!r} as optimizer: give the torch.optim.Optimizer that trains the model")
        devices = {group.device for group in self._groups.values()}
        self._sharded = sum(group.sharded.nbytes for group in self._groups.values())
        self._device = next((device for device in devices if device.type == "cuda"), torch.device("cpu"))
        self._clock = StreamClock(self._device.type == "cuda")
        self.flops_per_token = flops_per_token_of(model) if flops_per_token is None else float(flops_per_token)
        self.peak_flops = device_peak(self._device) if peak_flops is None else float(peak_flops)
        memories = [group.memory for group in self._groups.values()]
        self._logs = [("buffers", log) for memory in memories for log in (memory.gathered, memory.gradients)]
        self._undo: list[Callable[[], None]] = [log.stop for _, log in self._logs]
        self._is_open = True
        self._row: dict[str, float] = {}
        # Of optimizers that offloaded() has made: kind, bytes, begin and end by the clock of the host.
        self._tiers: list[tuple[str, int, float, float]] = []
        self._timeline: Timeline | None = None
        self.restart()
        for name, group in self._groups.items():
            self._undo.append(_WatchedCollectives(group, self, name).stop)
        for each in optimizers:
            self._undo.append(each.register_step_pre_hook(self._before_optimizer).remove)
            self._undo.append(each.register_step_post_hook(self._after_optimizer).remove)
        self._offloaded = [each for each in optimizers if hasattr(each, "watch_tiers")]
        for each in self._offloaded:
            each.watch_tiers(self._tiers)
            self._undo.append(functools.partial(each.watch_tiers, None))

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    @property
    def timeline(self) -> Timeline:
        """When all this was in the step of the last row. Raise a RuntimeError if there is no row yet."""
        if self._timeline is None:
            raise RuntimeError("this monitor has no timeline before its first row: call watch.step() after a training step")
        return self._timeline

    def close(self) -> None:
        """Stop watching, and remove the monitor from collectives and optimizers."""
        while self._undo:
            self._undo.pop()()
        self._is_open = False

    # -- rows ------------------------------------------------------------------------------------------------------

    def restart(self) -> None:
        """Begin the next row now, and drop all numbers since the last row. Call it after an evaluation or a checkpoint."""
        self._popped_tiers()
        self._begin_row()

    def _begin_row(self) -> None:
        # Moments are marks of the clock. A collective has its kind, its name, and when it was issued, waited for and ended.
        self._collectives: list[tuple[str, str, Any, Any, Any]] = []
        self._optimizers: list[tuple[Any, Any]] = []
        self._optimizer_began: Any = None
        self._counts = Counter[str]()
        self._held = sum(transient_nbytes(group) for group in self._groups.values())
        for _, log in self._logs:
            log.start()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        self._start, self._host_start = self._clock.mark(), time.perf_counter()

    def step(self, tokens: float | None = None) -> dict[str, float]:
        """End the step of so many ``tokens``. Returns its row, with the keys above, and begins the next row.

        Give the tokens of all ranks to get the throughput of all ranks.

        Raises:
            TypeError: ``tokens`` is no number.
            RuntimeError: the monitor is closed.
        """
        if tokens is not None and not isinstance(tokens, (numbers.Real, torch.Tensor)):
            raise TypeError(f"the step() of a monitor takes the number of tokens of this step, or nothing, got {tokens!r}")
        if not self._is_open:
            raise RuntimeError("the monitor is closed: call step() inside its with block")
        at = functools.partial(self._clock.seconds, self._start)
        seconds = at(self._clock.mark())
        collectives = [(kind, name, at(a), at(b), at(c)) for kind, name, a, b, c in self._collectives]
        optimizers = [(at(begin), at(end)) for begin, end in self._optimizers]
        events = self._popped_tiers()
        tiers = [(kind, begin - self._host_start, end - self._host_start) for kind, _, begin, end in events]
        rank = dist.get_rank() if dist.is_initialized() else 0
        self._timeline = timeline_of(seconds, collectives, optimizers, rank, tiers)
        row: dict[str, float] = {"step_s": seconds, **dict.fromkeys(("optimizer_s", "exposed_s", "compute_s"), 0.0)}
        if tokens is not None:
            row["tokens_per_s"] = tokens / max(seconds, 1e-9)
            if self.peak_flops is not None:
                ranks = dist.get_world_size() if dist.is_initialized() else 1
                row["mfu"] = row["tokens_per_s"] * self.flops_per_token / (ranks * self.peak_flops)
        for kind in ("optimizer", "exposed", "compute", *_TIMED_KINDS, *(_TIERS if self._offloaded else ())):
            row[f"{kind}_s"] = sum(span.end - span.begin for span in self._timeline.spans if span.kind == kind)
        for kind in _TIMED_KINDS:
            row[f"{kind}_exposed_s"] = sum(ended - waited for name, _, _, waited, ended in collectives if name == kind)
            row |= {key: self._counts[key] for key in (f"{kind}_calls", f"{kind}_bytes")}
        for kind in ("tier_read", "tier_write") if self._offloaded else ():
            row[f"{kind}_bytes"] = sum(nbytes for name, nbytes, _, _ in events if name == kind)
        row["memory_peak_bytes"], row["memory_reserved_bytes"] = self._memory()
        peak = sum(high_water(self._logs, {"buffers": self._held})[1].values())
        row["buffer_bytes"] = self._sharded + sum(transient_nbytes(group) for group in self._groups.values())
        row["buffer_peak_bytes"] = self._sharded + peak
        self._row = {key: float(value) for key, value in row.items()}
        self._begin_row()
        return dict(self._row)

    def _popped_tiers(self) -> list[tuple[str, int, float, float]]:
        """What tiers did since the last call. Threads append to the list, so that it is never replaced."""
        count = len(self._tiers)
        events = self._tiers[:count]
        del self._tiers[:count]
        return events

    def postfix(self) -> str:
        """The last row in a few words, for a progress bar. Empty before the first row."""
        row = self._row
        if not row:
            return ""
        speed = f"{row['tokens_per_s']:,.0f} tokens/s" if "tokens_per_s" in row else f"{row['step_s']:.3f} s/step"
        speed += f", MFU {row['mfu']:.1%}" if "mfu" in row else ""
        share = row["exposed_s"] / max(row["step_s"], 1e-9)
        whose = "GPU" if self._device.type == "cuda" else "process"
        return f"{speed}, {share:.0%} in collectives, peak of the {whose} {row['memory_peak_bytes'] / 2**30:.2f} GiB"

    def _memory(self) -> tuple[float, float]:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device), torch.cuda.max_memory_reserved(self._device)
        # The largest resident set of this process so far, and that of now: 0 if the system has no ``/proc``.
        try:
            with open("/proc/self/status") as file:
                sizes = {key: value for key, _, value in (line.partition(":") for line in file)}
        except OSError:
            return 0.0, 0.0
        return tuple(1024.0 * int(sizes[key].split()[0]) if key in sizes else 0.0 for key in ("VmHWM", "VmRSS"))  # type: ignore

    # -- watching --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def collective(self, nbytes: int = 0, name: str = "own") -> Iterator[None]:
        """Count the ``with`` block as one collective of kind ``other``, of ``nbytes``, with all of its time exposed."""
        self._count("other", nbytes)
        begin = self._clock.mark()
        with profiler_range("collective", name):
            yield
        self._collectives.append(("other", name, begin, begin, self._clock.mark()))

    def _count(self, kind: str, nbytes: int) -> None:
        self._counts[f"{kind}_calls"] += 1
        self._counts[f"{kind}_bytes"] += nbytes

    def _before_optimizer(self, *args: Any) -> None:
        self._optimizer_began = self._clock.mark()

    def _after_optimizer(self, *args: Any) -> None:
        if self._optimizer_began is not None:  # If the row began during the optimizer's step, there is no beginning.
            self._optimizers.append((self._optimizer_began, self._clock.mark()))
            self._optimizer_began = None


class _WatchedCollectives(WrappedCollectives):
    """The collectives of a group, of any implementation, watched by a monitor."""

    def __init__(self, group: FSDPParamGroup, watch: Monitor, name: str) -> None:
        super().__init__(group.collectives)
        self._group, self._watch, self._name = group, watch, name
        group.collectives = self

    def stop(self) -> None:
        if self._group.collectives is self:  # Otherwise, set_collectives() has replaced them, and they stay.
            self._group.collectives = self.inner

    def issue(self, name: str, largest: torch.Tensor, *arguments: Any) -> Work:
        watch, kind = self._watch, name if name in ("all_gather", "reduce_scatter") else "other"
        watch._count(kind, largest.nbytes)
        issued = watch._clock.mark()  # Before the call, so that a synchronous collective has its time.
        work = super().issue(name, largest, *arguments)
        return _WatchedWork(work, watch, kind, self._name, issued)


class _WatchedWork:
    """A collective in flight, watched by a monitor."""

    def __init__(self, work: Work, watch: Monitor, kind: str, name: str, issued: Any) -> None:
        self._work, self._watch, self._begun = work, watch, (kind, name, issued)

    def wait(self) -> None:
        clock = self._watch._clock
        waited = clock.mark()
        self._work.wait()
        self._watch._collectives.append((*self._begun, waited, clock.mark()))
