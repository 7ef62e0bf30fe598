"""``plan()``: how tensors get from some ranks and placements to others. ``Plan.run()`` moves them. A plan holds no tensors."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping
from datetime import timedelta
from typing import NamedTuple, Union

import torch
import torch.distributed as dist
from torch import nn

from torch_ragged._ranks.agreement import agree
from torch_ragged._ranks.groups import device_of_messages, group_of, timeout_of
from torch_ragged.transfer._background import Handle, in_background, in_turn
from torch_ragged.transfer._check import Readable, check_memory, checked_shapes, completed, held_tensors, read_once, side_of
from torch_ragged.transfer._elements import Baseline, Delta
from torch_ragged.transfer._engine_layout import EngineLayout
from torch_ragged.transfer._execution import Execution
from torch_ragged.transfer._pulls import PullLayout
from torch_ragged.transfer._rounds import Slice, rounds_of, slices_of
from torch_ragged.transfer._sides import AnySpec, RelocatedSide, Side, TensorSide
from torch_ragged.transfer._staging import Staged
from torch_ragged.transfer._tiles import Tiles, tiles_of
from torch_ragged.transfer._watch import Watch, end_messages

__all__ = ["Plan", "plan"]

Tensors = Union[nn.Module, Mapping[str, torch.Tensor], Iterable[tuple[str, torch.Tensor]]]
Described = Union[nn.Module, Mapping[str, Union[torch.Tensor, AnySpec]], Iterable[tuple[str, Union[torch.Tensor, AnySpec]]]]

_plan_counts = {"plans": 0, "failures": 0}
"""Of this process. After a failure, collectives may still be in flight on its group: later plans use a new group."""


def plan(
    source: Union[Described, RelocatedSide, None],
    target: Union[Described, EngineLayout, PullLayout, None],
    *,
    max_bytes: int = 1 << 28,
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
    strict: bool = True,
) -> Plan:
    """Plan the messages that change ``source`` placements into ``target`` placements, on any ranks.

    ::

        plan = transfer.plan(trainer_weights, engine_weights)     # once
        plan.run(trainer_weights, engine_weights)                 # after every step

    All ranks of ``group`` must call it. A rank that does not know one side gives None for it, and gets it from the others.

    Args:
        source: a module, whose ``state_dict()`` is taken; a mapping of names to DTensors or specs; or pairs of them, such as
            ``model.named_parameters()``. Meshes may exclude this rank. A tensor may lie on another mesh on other ranks, without
            common ranks, as under tensor parallelism: each mesh has all of it. A Partial is reduced when the plan runs. A plain
            local tensor may carry its layout (:func:`~torch_ragged.with_layout`): then each rank gives its own boxes, which
            are joined. Other plain tensors count as replicated on all ranks of the DTensors, or, if there are none, on all
            ranks that give them. Extra states of modules are left out.
        target: the same, without Partial; an :class:`EngineLayout`; or of each rank its :class:`PullLayout`. A dtype may differ
            from the source's: a cast to fewer bytes is made before elements travel, others after.
        max_bytes: the most bytes of buffers on one rank while the plan runs, copies of sources that are not contiguous or
            Partial included. A tensor that needs more is moved in pieces.
        group: the process group of all ranks that call; None: all ranks.
        timeout: how long a rank waits for one collective; None: the timeout of ``group``.
        strict: whether each source tensor must have a target. Each target must have a source in any case.

    Raises:
        ValueError: names or shapes differ; no rank gives a side; ranks give different sides; a rank of a mesh is not in the
            group; ``max_bytes`` is too small; a target has a Partial; boxes of ranks overlap in part, are not in the tensor,
            or leave elements out. On all ranks.
        TypeError: a dtype cannot be cast, or a value is no tensor. On all ranks, or a RuntimeError on others.

    Collectives: three all-reduces of 24 bytes, an all-gather of 32 bytes, an all-gather of 8 bytes per tensor and rank, and a
    broadcast of each description of a side, if ranks have different ones, or none.
    """
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise RuntimeError("transfer.plan() needs a process group: call torch.distributed.init_process_group() first")
    ranks = dist.get_process_group_ranks(group)
    if dist.get_rank() not in ranks:
        raise ValueError(f"rank {dist.get_rank()} is not in the group: only ranks {ranks} may call plan()")
    device = device_of_messages(group)
    known: list[Side | None] = [None, None]
    problem: Exception | None = None
    try:
        if not isinstance(max_bytes, int) or isinstance(max_bytes, bool) or max_bytes < 1:
            raise ValueError(f"plan(max_bytes=) takes a positive number of bytes, got {max_bytes!r}")
        known = [side_of(source, "source"), side_of(target, "target")]
    except Exception as error:  # Any: other ranks would wait for this one.
        problem = error
    # Before the all-gather in completed(): a rank that raised without it would leave the others waiting there. Ranks with other
    # limits would cut other windows, and send messages that match no receive.
    agree([group], device, "transfer.plan", f"{max_bytes=}, {strict=}, {timeout=}", problem)
    # The largest of all ranks: ranks may have made other plans before, or seen other failures.
    sides, counts = completed(known, [_plan_counts["plans"] + 1, _plan_counts["failures"]], group, device)
    _plan_counts.update(plans=counts[0], failures=counts[1])
    problem = None
    try:
        # All ranks check both whole sides, not only their parts, so all of them find the same problem.
        shapes = checked_shapes(sides[0], sides[1], ranks, strict)
    except Exception as error:
        problem = error
    agree([group], device, "transfer.plan", "", problem)
    return Plan(read_once(sides[0]), sides[1], shapes, max_bytes, group, timeout)


class _Schedule(NamedTuple):
    """The slices of this rank, in rounds; windows of large tensors are cut ``finer`` by this factor."""

    slices: list[Slice]
    rounds: list[range]
    finer: int


class Plan:
    """What each rank sends and receives, in rounds. Made by :func:`plan`; it may run many times.

    Attributes:
        source, target: the two sides.
        shapes: of the whole tensors, by name.
        ranks: the global ranks of the group.
        is_complete: whether the last run has filled the target. False before the first run, from the call of a run to its end,
            and after a run that failed or was refused.
        last_sent_bytes: what this rank sent in the last run.
        last_peak_bytes: the most bytes of buffers on this rank in the last run.
    """

    def __init__(
        self,
        source: Side,
        target: Side,
        shapes: Mapping[str, tuple[int, ...]],
        max_bytes: int,
        group: dist.ProcessGroup,
        timeout: timedelta | None,
    ) -> None:
        self.source, self.target, self.shapes, self.max_bytes = source, target, dict(shapes), max_bytes
        self.is_complete = False
        self.last_sent_bytes = self.last_peak_bytes = 0
        self._device, self._rank = device_of_messages(group), dist.get_rank()
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self._timeout = timeout or timeout_of(group, self._device)
        self._sends_all = False
        # Its own communicator: a run may be in the background.
        self._group = group_of(self.ranks, f"transfer {_plan_counts['failures']}", group)
        self._has_failed = False
        # Equal on all ranks, as completed() has taken the largest: it is in the keys of runs in the store.
        self._number = _plan_counts["plans"]
        self._runs = 0
        assert isinstance(source, TensorSide)
        self._partial = frozenset(name for name in self.shapes if source.specs[name].has_partial)
        # By whether sources are not contiguous, and whether elements travel. Runs add what they need.
        self._schedules = {(False, False): self._scheduled(self._partial)}

    @property
    def rounds(self) -> int:
        """The number of rounds."""
        return len(self._schedules[False, False].rounds)

    def slices_of(self, rank: int) -> list[Slice]:
        """What a rank sends, receives and copies of each tensor, or piece of a large one, in the order of the plan."""
        return self._slices_of(rank, self._schedules[False, False].finer, self._partial)

    def tiles(self, max_dims: int = 3) -> Tiles:
        """The plan as regular tiles, for many-to-many collectives: NVIDIA's M2N (nccl-extensions) takes a tile per call.

        ::

            for tile in plan.tiles().tiles:             # equal on all ranks
                if not tile.is_local:
                    reshard(tile.source, tile.target)   # meshes of consecutive ranks, Shard and Replicate, equal local shapes

        A tensor is one tile if both sides are such meshes, and have no rank in common. Otherwise it is cut: by the boxes of the
        source, and these by the boxes of the target. Tiles of few elements are slow: ragged sides that cut rows have many.

        Args:
            max_dims: the most dimensions of a tensor. M2N takes up to 3.

        Returns:
            the tiles, and by name the reason for each tensor without tiles: a Partial source, another dtype in the target, a
            dtype that is not moved, or too many dimensions. ``Plan.run`` moves these, too. The tiles do not know ``max_bytes``.

        Issues no collective.
        """
        return tiles_of(self.source, self.target, self.shapes, max_dims)

    def _slices_of(self, rank: int, finer: int, staged: Collection[str], packs_all: bool = False) -> list[Slice]:
        return slices_of(self.source, self.target, self.shapes, rank, max(self.max_bytes // 2, 1), finer, staged, packs_all)

    def _scheduled(self, staged: Collection[str], packs_all: bool = False) -> _Schedule:
        """The slices of this rank, and rounds in which no rank needs more than its half of ``max_bytes``."""
        budget, finer = max(self.max_bytes // 2, 1), 1
        while True:
            problem, slices = None, []
            try:
                slices = self._slices_of(self._rank, finer, staged, packs_all)
            except Exception as error:
                problem = error
            # Before the all-gather below, in which the others would wait for a rank that cannot make its slices.
            agree([self._group], self._device, "transfer.plan", "", problem)
            # No tensors. All ranks return here, as slices are of tensors and windows, and a rank has them also if it holds
            # nothing.
            if not slices:
                return _Schedule([], [], finer)
            mine = torch.tensor([each.staging for each in slices], dtype=torch.int64, device=self._device)
            everyone = [torch.empty_like(mine) for _ in self.ranks]
            dist.all_gather(everyone, mine, group=self._group)
            staging = torch.stack(everyone, dim=1).cpu()
            # The maximum is over all ranks, so all of them return here, or all cut finer. Windows of one element end the loop.
            if int(staging.max()) <= budget:
                return _Schedule(slices, rounds_of([each.dtype.itemsize for each in slices], staging, budget), finer)
            if finer > budget:  # More ranks read one element than slices_of() takes for its replicas.
                raise ValueError(f"max_bytes is too small: a rank needs {2 * int(staging.max())} bytes for single elements")
            finer *= 2

    def run(
        self,
        source: Tensors | None = None,
        target: Union[Tensors, PullLayout, None] = None,
        *,
        delta: Delta | None = None,
        async_op: bool = False,
    ) -> Handle | None:
        """Move all elements. All ranks of the group must call it.

        Args:
            source: the tensors of the source, as for :func:`plan`: a module, a mapping or pairs. They may be others than
                those of ``plan()`` that lie alike. A rank that holds none of them may give None.
            target: the tensors of the target, which are written in place, also if they were made in inference mode. For an
                engine: plain local tensors by the engine's names, or the :class:`PullLayout` of this rank. They must not share
                memory with the source.
            delta: ``"checksum"``: send only what differs between source and target now. Senders and receivers compare
                checksums of 128 bits of what they hold, cast to the target's dtype. So it does not matter how a tensor was
                written, on which side, or whether it is a new tensor. It costs one pass over the source and over the target,
                and buffers of up to 1 MB on a CPU and 64 MB on an accelerator. A :class:`Baseline`: the same, and receivers
                that hold the baseline get only the elements whose bits differ from it, with their positions, if that is
                shorter. This costs three more passes over the source, the baseline's memory on ranks that send, buffers of
                11 MB on a CPU and 170 MB on an accelerator, and more rounds: large parts count for ``max_bytes``, too.
            async_op: return a handle at once; the run goes on in the background. Do not change the source and do not use the
                target until its ``wait()`` returns. Runs of one group happen in order.

        Returns:
            None, or the handle if ``async_op``; then its ``wait()`` raises the errors below.

        Raises:
            TypeError, ValueError: a tensor is missing, has another shape, dtype or placement than planned, is not contiguous,
                or shares memory with the other side. Nothing has been written, and every rank raises.
            TransferError: a rank failed or died while elements were on their way. Every other rank raises it within
                the timeout. The source is unchanged, and the target is not complete.
            RuntimeError: an earlier run of this plan has failed on its way.

        Collectives: two all-reduces of 32 bytes, one of 24 bytes, all-reduces of the windows of a Partial, and messages between
        pairs of ranks: per round one for all small parts, and one for each part of 64 KiB or more that is contiguous on both
        ends. The first run with a source that is not contiguous, or with a Baseline, also agrees on rounds for it. With
        ``delta``, also two all-to-alls per round, of 24 bytes for each part that one rank may send to another.
        """
        if self._has_failed:  # On all ranks. Collectives of the failed run may still be in flight on the group.
            raise RuntimeError("a run of this plan has failed, and its process group is not usable: make the plan anew")
        given: list[dict[str, Readable]] = [{}, {}]
        problem: Exception | None = None
        try:
            if isinstance(delta, Baseline):
                delta.enter(self._group)
            elif delta not in (None, "checksum"):
                raise ValueError(f'run(delta=) takes None, "checksum" or a transfer.Baseline, got {delta!r}')
            # In the call, also of a run in the background: its tensors are those that the caller has now.
            given = [held_tensors(source, self.source, "source"), held_tensors(target, self.target, "target")]
            check_memory(given[0], given[1], self._device)
            # Its all-reduces are on the groups of the mesh, on which training has collectives at the same time. With two
            # threads, their order could differ between ranks.
            if async_op and any(isinstance(each, Staged) and each.reductions for each in given[0].values()):
                raise ValueError("run(async_op=True) cannot reduce a Partial in the background: redistribute the source first")
        except Exception as error:
            problem = error
        # A call that is refused counts, too: the number is part of the key, which must be equal on all ranks. The problem is
        # not raised here, as the other ranks wait for this one in the first all-reduce of the run.
        self._runs += 1
        self.is_complete = False
        written = {
            name: tensor for name, tensor in given[1].items() if isinstance(tensor, torch.Tensor)
        }  # No target is staged.
        run = functools.partial(self._run, given[0], written, problem, delta, f"{self._number}/{self._runs}")
        if async_op:
            handle = in_background(self._group, self._device, run)
            if isinstance(delta, Baseline):
                delta.leave(self._group, handle)
            return handle
        in_turn(self._group, run)
        return None

    def forget(self) -> None:
        """Let the next run with ``delta`` send all elements. All ranks must call it, or the ranks that send."""
        self._sends_all = True

    def _run(
        self,
        source: dict[str, Readable],
        target: dict[str, torch.Tensor],
        problem: Exception | None,
        delta: Delta | None,
        key: str,
    ) -> None:
        self.is_complete = False  # Again: an earlier run in the background may have ended since the call.
        kind = 2 if isinstance(delta, Baseline) else 1 if delta else 0
        watch = Watch(self.ranks, f"{self._group.group_name}/{key}", self._timeout, self._device)
        execution = Execution(
            *self._schedules[False, False][:2],
            source,
            target,
            self._group,
            self._device,
            watch,
            only_changed=delta is not None,
            baseline=delta if isinstance(delta, Baseline) else None,
            sends_all=self._sends_all,
        )
        try:
            with torch.inference_mode():  # Only in this mode, tensors that were made in it may be written. Others may, too.
                # Two answers on delta tell whether ranks differ: the smallest is the largest.
                in_place = not any(isinstance(each, Staged) and name not in self._partial for name, each in source.items())
                answers = [problem is None, kind, -kind, in_place]
                fine = torch.tensor(answers, dtype=torch.int64, device=self._device)
                watch.wait([dist.all_reduce(fine, dist.ReduceOp.MIN, self._group, async_op=True)])
                # These numbers are equal on all ranks, so all take the same branches. If a rank has a problem, nothing travels,
                # and agree() below raises on all ranks.
                is_agreed, lowest, negative, all_in_place = fine.tolist()
                if is_agreed and lowest == -negative:
                    problem = self._schedule(not all_in_place, kind == 2)
                if is_agreed and lowest == -negative and problem is None:
                    execution.slices, execution.rounds, _ = self._schedules[not all_in_place, kind == 2]
                    execution.run()
                    # A rank whose run is complete waits for the others: all ranks succeed, or all raise. On an accelerator, the
                    # host waits here for the copies, too, as the collective is behind them on the stream.
                    watch.wait([dist.all_reduce(fine, dist.ReduceOp.MIN, self._group, async_op=True)])
        except Exception as error:
            # Unmatched messages may stay on the group. A plan that is made later has a group of another name.
            self._has_failed = True
            _plan_counts["failures"] += 1
            failure = watch.failed(error, "Plan.run()", execution.on_their_way)
            # What is in flight would keep its buffers, and destroy_process_group() would wait for it until the timeout.
            end_messages(self._group, self._device)
            raise failure from error
        self.last_sent_bytes, self.last_peak_bytes = execution.sent_bytes, execution.peak_bytes
        advice = "give it tensors as planned, and an equal delta on all ranks"
        claim = f"delta {(None, 'checksum', 'a Baseline')[kind]}"
        agree([self._group], self._device, "Plan.run()", claim, problem, advice)
        self._sends_all = self._sends_all and delta is None
        self.is_complete = True

    def _schedule(self, stages: bool, packs_all: bool) -> Exception | None:
        """Make a schedule if no run has needed it yet; the problem on all ranks, if ``max_bytes`` is too small for it.

        Args:
            stages: for sources that are not contiguous.
            packs_all: for element deltas.
        """
        if (stages, packs_all) not in self._schedules:
            try:
                # It agrees and gathers on the plan's group: all ranks make it in the same run. What it raises depends on shapes
                # and ``max_bytes`` only, so all ranks raise it.
                staged = self.shapes if stages else self._partial
                self._schedules[stages, packs_all] = self._scheduled(staged, packs_all)
            except ValueError as error:
                return error
        return None
