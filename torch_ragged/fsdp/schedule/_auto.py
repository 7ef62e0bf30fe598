"""set_schedule: sets a schedule, or finds one from the next passes of a model that trains.

It must not change what a pass computes: passes that are recorded wait for each collective at once, and have the same bits.
"""

from __future__ import annotations

import dataclasses
import logging
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torch_ragged._ranks.agreement import agreement, gather_numbers, text_of
from torch_ragged._ranks.groups import device_of_messages
from torch_ragged._ranks.peers import PeerError
from torch_ragged._register._torch import dynamo_disabled
from torch_ragged.fsdp._groups import device_of_states, process_groups_of
from torch_ragged.fsdp.core._fsdp_state import FSDPState
from torch_ragged.fsdp.schedule._play import PartCosts, recorded_costs
from torch_ragged.fsdp.schedule._schedule import Schedule
from torch_ragged.fsdp.schedule._search import Knobs, ScheduleSearch
from torch_ragged.fsdp.schedule._trace import Trace
from torch_ragged.fsdp.tools._timeline import StreamClock, Timeline

__all__ = ["AutoSchedule", "set_schedule"]

_schedule_log = logging.getLogger("torch_ragged.fsdp")
_CALL = "set_schedule"
_RECORDED = "set_schedule, after the recorded steps,"
_PASSES = 3
"""How many passes are recorded, after one that is not: kernels and communicators are made in the first one."""


def set_schedule(states: Mapping[str, FSDPState], schedule: str | Schedule, extra_bytes: int) -> AutoSchedule | None:
    """See :meth:`FSDPModule.set_schedule`."""
    groups = process_groups_of(states.values())
    with agreement(groups, device_of_states(states.values()), _CALL) as claim:
        if isinstance(extra_bytes, bool) or not isinstance(extra_bytes, int):
            raise ValueError(f"{_CALL} extra_bytes must be a number of bytes, such as 2 * 2**30, got {extra_bytes!r}")
        if not isinstance(schedule, Schedule) and schedule != "auto":
            raise ValueError(f'{_CALL} takes "auto" or a Schedule, got {schedule!r}')
        if any(group.pools[0].is_required for state in states.values() for group in state.groups):
            raise RuntimeError(
                f"{_CALL} changes how many modules are unsharded at a time, and persistent buffers have slots for a fixed "
                "number: call it before set_persistent_buffers or set_collectives"
            )
        # A spare of elastic.run would join later without the schedule that the others have found, and issue in another order.
        if schedule == "auto" and not all(group.dp.is_member for state in states.values() for group in state.groups):
            raise ValueError(
                f'{_CALL}("auto") records steps, and rank {dist.get_rank()}, outside of the mesh, makes none: find one '
                "in a run without this rank, and give it on all ranks"
            )
        if isinstance(schedule, Schedule):
            schedule.check(states)
        claim.append(f"{_CALL}({text_of(schedule)}, {extra_bytes})")
    if isinstance(schedule, Schedule):
        schedule.set_on(states)
        return None
    return AutoSchedule(states, extra_bytes)


class AutoSchedule:
    """Records the next passes under a root, and sets the schedule that it finds.

    All ranks decide by the number of forwards with gradients since it began, which is equal on all of them.

    Attributes:
        schedule: what was found; None: nothing yet, or nothing that is faster.
        search: plays passes under other schedules; None: nothing is recorded yet.
        knobs: of the schedule that was found.
    """

    def __init__(self, states: Mapping[str, FSDPState], extra_bytes: int) -> None:
        self.schedule: Schedule | None = None
        self.search: ScheduleSearch | None = None
        self.knobs: Knobs | None = None
        self._states, self._extra_bytes = dict(states), extra_bytes
        root = next(iter(states.values()))
        self._clock = StreamClock(device_of_states(states.values()).type == "cuda")
        self._trace = Trace(states, self._clock.mark, in_turn=True)
        self._forwards = 0
        self._costs: list[PartCosts] = []
        self._problem = ""
        self._hook = root.modules[0].register_forward_pre_hook(self._before_forward, prepend=True)

    def close(self) -> None:
        """Record nothing more."""
        self._hook.remove()
        self._trace.close()

    @dynamo_disabled
    def _before_forward(self, module: torch.nn.Module, args: Any) -> None:
        root = next(iter(self._states.values()))
        if self._trace.is_over:  # What the program does between passes is in none.
            self._trace.stop()
        # Equal on all ranks: evaluations and micro-batches without gradient sync are no passes of their own.
        if not torch.is_grad_enabled() or root.context.in_backward:
            return
        if not all(state.requires_gradient_sync for state in self._states.values()):
            self._trace.stop()
            return
        self._forwards += 1
        if self._forwards > 2:
            self._take()
        if self._forwards == 2 + _PASSES:
            self.close()
            self._decide()
        elif self._forwards > 1:
            self._trace.start()

    def _take(self) -> None:
        """Keep the costs of the pass that has ended."""
        trace = self._trace
        self._problem = self._problem or trace.problem or ("" if trace.is_over else "a forward without a backward")
        first = next((moment.begin for moment in trace.moments if moment.begin is not None), None)
        if first is not None and not self._problem:
            self._costs.append(recorded_costs(trace.moments, lambda moment: self._clock.seconds(first, moment)))
            if self._costs[0].text != self._costs[-1].text:
                self._problem = "passes differ in their calls"

    def _decide(self) -> None:
        """Find the schedule from what all ranks have recorded, and set it on all of them, or on none."""
        groups, device = process_groups_of(self._states.values()), device_of_states(self._states.values())
        root = next(iter(self._states.values()))
        try:
            with agreement(groups, device, _RECORDED) as claim:
                claim.append(self._costs[0].text if self._costs else "")
                if any(state.is_optional for state in self._states.values()):
                    raise ValueError("ranks may skip optional modules")
                if self._problem:
                    raise ValueError(self._problem)
            costs, trace = self._over_ranks(groups), self._trace
            with agreement(groups, device, _RECORDED) as claim:
                claim.append("search")
                order: list[Any] = list(root.context.order.states)
                how = trace.activations, trace.calls, self._extra_bytes
                self.search = search = ScheduleSearch(self._states, order, costs, *how)
                # One rank searches: ranks may differ in the sizes of their shards.
                knobs = search.best() if all(group.rank() == 0 for group in groups) else None
        except PeerError:
            raise
        except (RuntimeError, ValueError) as error:
            # Training goes on: no rank has changed anything.
            _schedule_log.warning("set_schedule has found no schedule, and settings are as before: %s", error)
            return
        numbers = self._spread([0] * (1 + len(Knobs._fields)) if knobs is None else [1, *knobs], groups)
        if not numbers[0]:
            _schedule_log.info("set_schedule keeps the settings: no schedule within the memory is faster")
            return
        self.knobs = Knobs(*numbers[1:])
        found = search.evaluate(self.knobs)
        self.schedule = dataclasses.replace(
            search.schedule(self.knobs),
            seconds=found.seconds,
            bound_seconds=search.bound,
            start_seconds=search.start.seconds,
            peak_bytes=found.peak,
            start_peak_bytes=search.start.peak,
            timeline=Timeline(found.seconds, tuple(found.played.spans), dist.get_rank()),
        )
        self.schedule.set_on(self._states)
        _schedule_log.info("set_schedule has set:\n%s", self.schedule)

    def _over_ranks(self, groups: Sequence[dist.ProcessGroup]) -> PartCosts:
        """The medians of the passes. Of ranks: the slowest computation, and the fastest collective.

        A collective waits for the last rank that issues it, on which it takes its own time: the least of all ranks.
        """
        own = [statistics.median(values) for values in zip(*(costs.seconds for costs in self._costs))]
        first = self._costs[0]
        count, end = len(first.compute), len(first.compute) + len(first.collectives)
        for group in groups:
            numbers = torch.tensor([int(1e9 * value) for value in own], dtype=torch.int64, device=device_of_messages(group))
            columns = list(zip(*gather_numbers(numbers, group, _CALL)))
            own = [(min if count <= at < end else max)(column) / 1e9 for at, column in enumerate(columns)]
        return PartCosts(
            dict(zip(first.compute, own)), dict(zip(first.collectives, own[count:])), dict(zip(first.issues, own[end:]))
        )

    def _spread(self, numbers: list[int], groups: Sequence[dist.ProcessGroup]) -> list[int]:
        """``numbers`` of the rank that is the first one of each group."""
        for group in groups:
            sent = torch.tensor(numbers, dtype=torch.int64, device=device_of_messages(group))
            numbers = gather_numbers(sent, group, _CALL)[0]
        return numbers
