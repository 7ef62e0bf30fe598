"""A training step as arithmetic: what each group costs, and when the schedule of fully_shard lets it run.

Costs are seconds per rank: collectives are rings with a latency and a bandwidth (alpha-beta), compute is given per group.
:func:`play` goes through one forward and backward in the order in which torch_ragged/fsdp/core/_fsdp_state.py issues things:

- forward: wait for the group's all-gather, start the next group's, compute, reshard;
- backward: the same the other way round; behind it wait for the reduce-scatter in flight, start this group's;
- all-gathers and reduce-scatters share one communicator, which runs them one by one in the order of issue, each behind the
  compute that was issued before it; all-reduces over replicas (HSDP) have a communicator of their own;
- the host issues everything, and may run ahead of the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.predict.network import Link, Network

__all__ = ["FSDP2", "RAGGED", "GroupCost", "Link", "Network", "Schedule", "Step", "play"]


@dataclass(frozen=True)
class GroupCost:
    """Seconds that one group takes.

    Attributes:
        forward, backward: compute.
        gather, reduce: its all-gather and reduce-scatter.
        all_reduce: of the reduced shard over replicas.
        copy_out: copies from what was gathered to the parameters, in each of forward and backward.
        copy_in: copies of gradients to what is reduced.
        stays: gathered from forward to backward.
    """

    forward: float
    backward: float
    gather: float
    reduce: float
    all_reduce: float = 0.0
    copy_out: float = 0.0
    copy_in: float = 0.0
    stays: bool = False


@dataclass(frozen=True)
class Schedule:
    """How collectives, compute and the host go side by side.

    Attributes:
        prefetches_forward: the next group's all-gather is started before this one's forward; else that is left to the host,
            which on a device runs ahead of it to the same effect, but not on a CPU.
        overlaps: collectives run beside compute. False: everything in turn, as where they need the same cores.
        reduces_replicas_late: the all-reduce is issued where the reduce-scatter is waited for, not right behind it.
        copies_in_backward: if true, gradients are copied as they come; if false, after the reduce-scatter in flight has ended.
        agrees: a small all-reduce ends backward, of ``agreement`` seconds.
        host: seconds of Python per group in forward, and again in backward.
        ahead: how many groups' all-gathers are issued ahead, by prefetch lists.
        runs_ahead: the host issues without waiting (GPU); else its time adds to compute (CPU).
    """

    prefetches_forward: bool = True
    overlaps: bool = True
    reduces_replicas_late: bool = True
    copies_in_backward: bool = True
    agrees: bool = True
    agreement: float = 0.0
    host: float = 0.0
    ahead: int = 1
    runs_ahead: bool = True


RAGGED = Schedule()
FSDP2 = Schedule(prefetches_forward=False, reduces_replicas_late=False, copies_in_backward=False, agrees=False)


@dataclass
class Step:
    """One forward and backward that was played.

    Attributes:
        seconds: from begin to end.
        compute: seconds of it in forward and backward.
        issued: (collective, group) in the order of issue.
        intervals: (what, group, begin, end) of all that ran.
    """

    seconds: float = 0.0
    compute: float = 0.0
    issued: list[tuple[str, int]] = field(default_factory=list)
    intervals: list[tuple[str, int, float, float]] = field(default_factory=list)

    @property
    def exposed(self) -> float:
        """Seconds in which the model is not computed: waits, and copies."""
        return self.seconds - self.compute


def play(groups: Sequence[GroupCost], schedule: Schedule = RAGGED) -> Step:
    """Forward through ``groups``, in order, and backward."""
    return _Player(groups, schedule).play()


class _Player:
    """Clocks of the device's compute, of the host, and of the two communicators."""

    def __init__(self, groups: Sequence[GroupCost], schedule: Schedule) -> None:
        self._groups, self._schedule, self._step = groups, schedule, Step()
        self._compute = self._host = 0.0
        self._free = {"shards": 0.0, "replicas": 0.0}
        self._gathered: dict[int, float] = {}  # group -> when its parameters are there
        self._copied: list[float] = []  # when each group's parameters were copied out in forward
        self._reducing: list[tuple[int, float]] = []  # at most one group, and when it is reduced
        self._ends: list[float] = []  # what the end of backward waits for

    def play(self) -> Step:
        last = len(self._groups) - 1
        for index in range(last + 1):
            self._gather(index)
            self._wait(self._gathered[index])
            if self._schedule.prefetches_forward or self._schedule.ahead > 1:
                for other in range(index + 1, min(index + self._schedule.ahead, last) + 1):
                    self._gather(other)
            self._run("copy_out", index)
            self._copied.append(self._compute)
            self._forward(index)
        for index in range(last, -1, -1):
            self._backward(index)
        self._finish()
        self._step.seconds = self._compute
        return self._step

    def _forward(self, index: int) -> None:
        self._run("forward", index)
        # A host that runs ahead issues the next all-gather while this group is computed. FSDP2 has it wait for the copies
        # of the group before this one, since their source is freed.
        if not self._schedule.prefetches_forward and self._schedule.runs_ahead and index + 1 < len(self._groups):
            self._gather(index + 1, behind=self._copied[index - 1] if index else 0.0)
        if not self._groups[index].stays:
            del self._gathered[index]

    def _backward(self, index: int) -> None:
        was_there = index in self._gathered and self._groups[index].stays
        self._gather(index)
        self._wait(self._gathered[index])
        for other in range(index - 1, max(index - self._schedule.ahead, 0) - 1, -1):
            self._gather(other)
        if not was_there:
            self._run("copy_out", index)
        self._run("backward", index)
        del self._gathered[index]
        if self._schedule.copies_in_backward:
            self._run("copy_in", index)
        if self._reducing:
            self._wait_for_reduction()
        if not self._schedule.copies_in_backward:
            self._run("copy_in", index)
        end = self._issue("reduce", index, "shards")
        self._reducing.append((index, end))
        if self._groups[index].all_reduce and not self._schedule.reduces_replicas_late:
            self._ends.append(self._issue("all_reduce", index, "replicas", behind=end))

    def _finish(self) -> None:
        if self._schedule.agrees:
            begin = max(self._compute, self._free["shards"])
            self._compute = self._free["shards"] = begin + self._schedule.agreement
            self._step.issued.append(("agree", 0))
        self._wait_for_reduction()
        for end in self._ends:
            self._wait(end)

    def _wait_for_reduction(self) -> None:
        index, end = self._reducing.pop()
        self._wait(end)
        if self._groups[index].all_reduce and self._schedule.reduces_replicas_late:
            self._ends.append(self._issue("all_reduce", index, "replicas"))

    def _gather(self, index: int, behind: float | None = None) -> None:
        if index not in self._gathered:
            self._gathered[index] = self._issue("gather", index, "shards", behind)

    def _issue(self, what: str, index: int, communicator: str, behind: float | None = None) -> float:
        """Start a collective, ``behind`` the compute issued so far if None; returns when it ends."""
        begin = max(self._free[communicator], self._compute if behind is None else behind, self._host)
        end = begin + getattr(self._groups[index], what)
        self._free[communicator] = end
        self._step.issued.append((what, index))
        self._step.intervals.append((what, index, begin, end))
        if not self._schedule.overlaps:
            self._compute = max(self._compute, end)
        return end

    def _run(self, what: str, index: int) -> None:
        """Compute; the host spends its time on a group here."""
        seconds, host = getattr(self._groups[index], what), 0.0
        if what in ("forward", "backward"):
            host = self._schedule.host
            self._step.compute += seconds
        self._host += host
        begin = max(self._compute, self._host) if self._schedule.runs_ahead else self._compute + host
        if seconds:
            self._step.intervals.append((what, index, begin, begin + seconds))
        self._compute = begin + seconds

    def _wait(self, end: float) -> None:
        self._compute = max(self._compute, end)
