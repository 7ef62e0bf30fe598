"""GradReduction: the reduction of a group's gradients, from the gradient buffer to ``.grad``.

It does not decide when to reduce, or in which dtype gradients are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Protocol

import torch
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor, Partial, Shard

from torch_ragged._kernels.casts import scaled_copy_
from torch_ragged._register._torch import GradientUse, backward_id, dtensor_like, dtensor_of, gradient_use, profiler_range
from torch_ragged.fsdp.comm._collectives import NamedCollectives, Work
from torch_ragged.fsdp.comm._reduction import Reduction
from torch_ragged.fsdp.core._dbuffer import NO_LOG, DBuffer, MemoryLog, copy_stream, current_stream, order_behind
from torch_ragged.fsdp.core._fsdp_param import FSDPParam
from torch_ragged.fsdp.core._grad_buffer import GradBuffer
from torch_ragged.fsdp.core._mesh import DataParallelMesh
from torch_ragged.tensor._api import spec_of

__all__ = ["GradReduction", "GradientState", "GradientUser", "GradientView", "ReductionSettings", "check_hooks_run_once"]

_SUM = Reduction(divisor=1.0, sum_only=True)


class GradientState(Enum):
    """Where a group's gradients are, on their way from autograd to ``.grad``.

    ::

        EMPTY  --a gradient-->  ACCUMULATING  --start()-->  REDUCING  --wait()-->  REDUCED  --set_grads()-->  EMPTY
          `--------------------------------------start()-------^                      |
                                ACCUMULATING <--a later gradient----------------------|
                                                            REDUCING <--start()-------'

    ``drop()`` leads to EMPTY from each state. The state may differ between ranks: a rank may have no gradient.
    """

    EMPTY = auto()
    """All gradients are in ``.grad``."""
    ACCUMULATING = auto()
    """Gradients are in the gradient buffer."""
    REDUCING = auto()
    """A reduce-scatter that reads the gradient buffer is in flight."""
    REDUCED = auto()
    """The gradient buffer is free. An all-reduce over replicas may be in flight, or a second step may follow in ``finish()``.

    Or the reduce-scatter has failed: then there is no shard until the gradients are dropped.
    """


class GradientUser(Protocol):
    """Uses the reduced gradients of groups (``FSDPParamGroup``) within backward, as an optimizer that steps there.

    Attributes:
        communicates: whether :meth:`use` does, equal on all ranks. Then they call it at one point of the order that they share.
    """

    communicates: bool

    def before_reduction(self, group: Any, is_only_one: bool) -> None:
        """Gradients of ``group`` are reduced next. It may raise: ranks call this in the same order.

        Args:
            is_only_one: whether :meth:`use` may be called before the end of the pass. Equal on all ranks.
        """

    def use(self, group: Any) -> None:
        """``.grad`` of ``group`` is complete. Ranks call this at different moments of a pass, unless it ``communicates``."""

    def finish(self, groups: Sequence[Any]) -> None:
        """A pass ends, whose ``groups`` were given to :meth:`use`: return when they are used. It must not raise."""

    def drop(self, group: Any) -> None:
        """A pass of ``group`` has raised, or is dropped."""

    def wait(self) -> None:
        """Return when nothing is in use: a pass that raised may have left something."""


class GradientView(Protocol):
    """Between passes: what ``.grad`` shows of a group whose gradients wait for a later reduction."""

    def shows(self, index: int) -> bool:
        """Whether it shows what waits of parameter ``index``, which it does if the parameter is trained."""

    def is_incomplete(self, index: int) -> bool:
        """Whether ``.grad`` lacks what waits of a parameter that it shows. A program may have set another gradient since."""

    def reduced(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """The reduced part of ``gradient``, which is ``.grad`` of a parameter."""

    def take_back(self) -> None:
        """Gradients may change next: set ``.grad`` to its reduced part. The view is not used again."""


@dataclass
class ReductionSettings:
    """What the user has set of a group's reductions.

    Attributes:
        reduction: the divisor and kind of the reduction.
        requires_all_reduce: whether backward reduces over replicas.
        reduce_hook: is called with each reduced shard.
        max_reductions: how many modules' reduce-scatters may be in flight.
        view: makes the view of gradients that wait, given the reduction, and whether any rank has some in its gradient buffer.
    """

    reduction: Reduction = field(default_factory=Reduction)
    requires_all_reduce: bool = True
    reduce_hook: Callable[[torch.Tensor], None] | None = None
    max_reductions: int = 1
    view: Callable[[GradReduction, bool], GradientView] | None = None


class GradReduction:
    """The reductions of a group, one after the other.

    ::

        GradBuffer
           | start(): one reduce-scatter; if it sends the narrow dtype, a second one for gradients in a wider dtype
        output     DBuffer S, or (P, S), reduce_dtype
           | finish(): over nodes, a reduce-scatter to (S, S); an all-reduce of what is pending over the model's mesh
           | dimensions, and one over replicas (HSDP) to (R, S)
        reduced    DBuffer S, reduce_dtype             the sum of all reductions since ``.grad`` was set
           | set_grads(): a cast, a copy to the CPU (which has begun when the reduction ended), or nothing
        .grad      views of a DBuffer S                DTensors placed as their parameters

    Args:
        buffer: the unreduced gradients. It is freed when a reduce-scatter has read it.
        sharded: the buffer of the shards. ``.grad`` gets its layout, dtype and device.
        collectives: the collectives that reduce.
        dp: the mesh.
        settings: what the user has set.
        log: records when reduced shards are allocated and freed.

    Attributes:
        in_flight: the reduce-scatter in flight. Ranks may differ in when they have waited for it.
        kept: shards that wait, reduced within each replica only. All ranks have them, or none.
        intervals: where each parameter's elements begin and end in a shard.
        is_set: whether ``.grad`` was set before the end of this pass. Ranks may differ.
    """

    def __init__(
        self,
        buffer: GradBuffer,
        sharded: DBuffer,
        collectives: NamedCollectives,
        dp: DataParallelMesh,
        settings: ReductionSettings,
        log: MemoryLog,
    ) -> None:
        self.buffer, self.params, self._device = buffer, buffer.params, buffer.device
        self.sharded, self._collectives, self._dp, self.settings, self._log = sharded, collectives, dp, settings, log
        self.intervals = [sharded.layout.interval(index, sharded.rank) for index in range(len(self.params))]
        self._placements = dp.placements  # Of reduced shards.
        self.in_flight: Work | None = None
        self._output: DBuffer | None = None  # The output of either, also after it has ended.
        self._all_reduce: tuple[Work, DBuffer] | None = None  # In flight, with the buffer that it reduces in place.
        self._reduced: DBuffer | None = None  # Reduced over all ranks.
        self._moved: tuple[DBuffer, torch.Event] | None = None  # With offload: its copy to the CPU, in flight.
        self.kept: DBuffer | None = None
        self.is_set = False
        self._has_failed = False  # Whether the last reduce-scatter failed: its gradients are in no buffer.
        self._pending: dict[tuple[int, ...], list[int]] = {}  # What the output is pending on: see GradBuffer.pending.

    @property
    def state(self) -> GradientState:
        """Where the gradients are."""
        if self.in_flight is not None:
            # Read from what is there, not kept beside it: gradients may come at any time, by a hook of autograd.
            return GradientState.REDUCING
        if self.buffer.holds_gradients:
            return GradientState.ACCUMULATING
        return GradientState.REDUCED if self.buffers() or self._has_failed else GradientState.EMPTY

    def buffers(self) -> list[DBuffer]:
        """The reduced shards that are not in ``.grad`` yet."""
        in_all_reduce = None if self._all_reduce is None else self._all_reduce[1]
        return [buffer for buffer in (self._reduced, self.kept, self._output, in_all_reduce) if buffer is not None]

    @property
    def keeps_shards(self) -> bool:
        """Whether reduced shards wait for a later backward that reduces over replicas: see ``requires_all_reduce``."""
        return self._dp.has_replicas and not self.settings.requires_all_reduce

    @property
    def was_reduced(self) -> bool:
        """Whether this backward pass reduced gradients over all ranks."""
        return self.is_set or not (self._output is self._all_reduce is self._reduced is None)

    def start(self, is_one_pass: bool) -> None:
        """Issue one reduce-scatter. A parameter without a gradient on this rank contributes zeros.

        Args:
            is_one_pass: whether no rank holds gradients of an earlier pass. Equal on all ranks.
        """
        buffer, reduction = self.buffer, self.settings.reduction
        # Sums over passes are in reduce_dtype, and are sent in it. Gradients of one pass may be sent as they came: equal on all
        # ranks, as it follows from dtypes, layouts and carriers.
        is_narrow = is_one_pass and buffer.dtype != buffer.reduce_dtype
        sends_narrow = is_narrow and buffer.wide_gradients.allow_narrow(self._collectives, self._device)
        source = buffer.completed(widens=not sends_narrow)
        # A new one each time: it becomes ``.grad``, which the user may keep.
        output = self._shards(is_partial=True, log=self._log)
        if sends_narrow:
            work = buffer.wide_gradients.reduce_scatter(self._collectives, output.flat, source.flat, reduction)
        else:
            work = source.redistribute(output.placements, self._collectives, output, reduction)
        self.in_flight, self._output, self._has_failed = work, output, False
        if self._dp.counts_once:
            self._pending = buffer.pending(forgets=True)

    def wait(self) -> None:
        """Wait for the reduce-scatter in flight and free its input. It issues no collective and calls no user hook."""
        if self.in_flight is None:
            return
        work, self.in_flight = self.in_flight, None
        output, self._output = self._output, None  # If the wait raises, there is no output.
        try:
            work.wait()
        except BaseException:
            self._has_failed = True  # They count as not in ``.grad``, so that an optimizer's step warns.
            raise
        finally:  # Also if the wait raises: the next backward pass must not add to these gradients.
            self.buffer.free()
        # Only now: an output without a complete sum must not reach ``.grad``.
        self._output = output

    def finish(self, takes_kept: bool = False) -> None:
        """Wait for the reduce-scatter in flight, free its input, and issue what follows. All ranks call it in one order.

        That is the reduce-scatter over nodes (HIERARCHICAL), and the all-reduce of the shard (HSDP).

        Args:
            takes_kept: whether shards that wait for the all-reduce are reduced if there is no output. Equal on all ranks.
        """
        self.wait()
        output, self._output = self._output, None
        if output is not None:
            if self._dp.levels is not None:
                try:
                    output = self._over_nodes(output)
                except BaseException:
                    self._has_failed = True
                    raise
            pending, self._pending = self._pending, {}
            if pending:  # Of parameters that the model has distributed.
                self._reduce_pending(output, pending)
        elif takes_kept:
            output, self.kept = self.kept, None
        if output is None:
            return
        # The all-reduce of an earlier reduction of this group: results are added in the order of the reductions.
        if self._all_reduce is not None:
            self._finish_all_reduce()
        if self.kept is not None:
            output.flat.add_(self.kept.flat)
            self._log.note(-self.kept.nbytes)
            self.kept = None
        if not self._dp.has_replicas:
            self._add_reduced(output)
        elif self.keeps_shards:
            # In the same pass on all ranks, since the setting is.
            self.kept = output
        else:
            with profiler_range("all_reduce", self._collectives.fqn):
                # In flight while other groups compute. All ranks issue it in one order, see FSDPState.reduce_gradients.
                work = output.redistribute(self._placements, self._collectives, reduction=self.settings.reduction)
                self._all_reduce = work, output

    def _shards(self, is_partial: bool, log: MemoryLog = NO_LOG) -> DBuffer:
        """A new buffer of reduced shards: ``is_partial`` over the first of two mesh dimensions, or over none."""
        like, placements = self.sharded, self._placements
        if is_partial and len(placements) > 1:
            placements = Partial(), *placements[1:]
        dtype = self.buffer.reduce_dtype
        return DBuffer(like.layout, placements, like.rank, dtype, self._device, log=log, levels=self._dp.levels)

    def _shard_at_home(self, dtype: torch.dtype) -> DBuffer:
        """A new buffer where the sharded parameters are, which becomes ``.grad``."""
        like = self.sharded
        return DBuffer(like.layout, Shard(0), like.rank, dtype, like.flat.device, like.is_pinned, log=self._log)

    def _over_nodes(self, output: DBuffer) -> DBuffer:
        """Reduce the output of a reduce-scatter within nodes over the nodes, and wait for it."""
        # Not in wait(): a rank with a late gradient waits for its group's reduction before others, and another rank without
        # this gradient does not. Their second steps would meet those of other groups, and swap gradients.
        shards, reduction = self._shards(is_partial=False, log=output.log), self.settings.reduction
        with profiler_range("reduce_scatter_second_step", self._collectives.fqn):
            output.redistribute(shards.placements, self._collectives, shards, reduction.rest()).wait()
        output.free()
        return shards

    def _reduce_pending(self, output: DBuffer, pending: dict[tuple[int, ...], list[int]]) -> None:
        """Add what is pending over mesh dimensions of the model: one all-reduce of all such shards in this group.

        Ranks along these dimensions have the same shards, and run the same program. If a shard has no element of these
        parameters, its ranks issue the all-reduce, too: all ranks count the same collectives.
        """
        for dims, indices in pending.items():
            views = [output.flat[begin:end] for begin, end in (self.intervals[index] for index in indices)]
            flat = torch.cat(views)
            group = self.params[indices[0]].distribution.group_over(dims)
            self._collectives.all_reduce(flat, _SUM, group).wait()
            torch._foreach_copy_(views, flat.split([view.numel() for view in views]))

    def _finish_all_reduce(self) -> None:
        assert self._all_reduce is not None
        (work, output), self._all_reduce = self._all_reduce, None
        work.wait()
        self._add_reduced(output)

    def _add_reduced(self, output: DBuffer) -> None:
        if self.settings.reduce_hook is not None:
            # Before it is added to earlier reductions: the hook sees each reduction once.
            self.settings.reduce_hook(output.flat)
        if self._reduced is None:
            self._reduced = output
        else:
            self._drop_copy()  # Of the first part of the sum.
            self._reduced.flat.add_(output.flat)
            self._log.note(-output.nbytes)
        if self.sharded.is_pinned:
            self._begin_copy(self._reduced)

    def _begin_copy(self, reduced: DBuffer) -> None:
        """Copy the reduced shard to the CPU, while backward goes on. :meth:`set_grads` waits for it."""
        dtypes = {param.sharded.grad_dtype or reduced.flat.dtype for param in self.params}
        if len(dtypes) > 1:
            return
        moved = self._shard_at_home(dtypes.pop())
        stream = copy_stream(reduced.flat.device)
        # A stream of its own: on the current one, the rest of backward would wait for the copy.
        order_behind(stream, current_stream(reduced.flat.device))
        with stream:
            scaled_copy_(moved.flat, reduced.flat, non_blocking=True)
        self._moved = moved, stream.record_event()

    def _copied(self) -> DBuffer:
        """The copy on the CPU, when it is complete."""
        assert self._moved is not None
        (moved, event), self._moved = self._moved, None
        event.synchronize()  # The host waits: an optimizer on the CPU may read it at once.
        return moved

    def _drop_copy(self) -> None:
        """Its memory is pinned memory of the CPU, which may be given to others when no copy writes to it."""
        if self._moved is not None:
            self._log.note(-self._copied().nbytes)

    def set_grads_early(self, used_anywhere: Iterable[bool] | None) -> bool:
        """Before the end of backward: set ``.grad``, if it is known to be complete; return whether it was set.

        Args:
            used_anywhere: as of :meth:`set_grads`, if ranks have agreed on it: all of them set ``.grad`` now. None: this rank
                decides alone. It knows the answer if the reduction has ended and it has used each parameter itself.
        """
        if self.is_set or (self._reduced is None and self._all_reduce is None):
            return False
        used = [param.was_used for param in self.params]
        if used_anywhere is None:
            if self.in_flight is not None or self._all_reduce is not None or self.buffer.holds_gradients:
                return False
            for param, is_used in zip(self.params, used):
                sharded: Any = param.sharded
                # Ranks come here at different moments, or not at all. So a hook added since forward, which may communicate,
                # waits.
                has_hooks = sharded._backward_hooks or sharded._post_accumulate_grad_hooks
                if has_hooks or (sharded.requires_grad and not is_used):
                    return False
        self.set_grads(used if used_anywhere is None else used_anywhere)
        for param, is_used in zip(self.params, used):  # Other ranks ask at the end of the pass.
            param.was_used = is_used
        self.is_set = True
        return True

    def set_grads(self, used_anywhere: Iterable[bool]) -> None:
        """At the end of backward: add the reduced shard to ``.grad`` of every parameter that some rank used."""
        if self.is_set and not self.buffers() and self.in_flight is None:
            self.is_set = False
            for param, _ in zip(self.params, used_anywhere):
                param.was_used = False
            return
        self.finish()
        if self._all_reduce is not None:
            self._finish_all_reduce()
        reduced, self._reduced = self._reduced, None
        assert reduced is not None
        shards: dict[torch.dtype, DBuffer] = {}
        copied = None if self._moved is None else self._copied()
        for param in self.params:
            dtype = param.sharded.grad_dtype or reduced.flat.dtype
            if dtype in shards:  # Mostly, all parameters have one.
                continue
            if (reduced.flat.dtype, reduced.flat.device) == (dtype, self.sharded.flat.device):
                shards[dtype] = reduced
            elif copied is not None and copied.flat.dtype == dtype:
                shards[dtype] = copied
            else:
                moved = shards[dtype] = self._shard_at_home(dtype)
                scaled_copy_(moved.flat, reduced.flat)  # This blocks: an optimizer on the CPU may read it at once.
        if reduced not in shards.values():
            self._log.note(-reduced.nbytes)
        unused = {*shards.values()}  # Of which nothing becomes ``.grad``: they are added to what is there, and freed.
        for param, (begin, end), is_used in zip(self.params, self.intervals, used_anywhere):
            param.was_used = False
            sharded: Any = param.sharded
            if not is_used:
                continue
            # Each gradient has its own version counter, as a tensor of the optimizer.
            shard = shards[sharded.grad_dtype or reduced.flat.dtype]
            gradient: Any = self.gradient(param, shard.flat.data[begin:end])
            # Autograd would run these hooks for a leaf: before it adds to .grad, and after that. Optimizers that step in
            # backward are hooks of the second kind.
            has_hooks = sharded._backward_hooks or sharded._post_accumulate_grad_hooks
            if has_hooks and backward_id() != -1:  # Otherwise it was checked when the pass ended.
                check_hooks_run_once(param)
            for hook in (sharded._backward_hooks or {}).values():
                changed = hook(gradient)
                gradient = gradient if changed is None else changed
            if sharded.grad is None:
                sharded.grad = gradient
                unused.discard(shard)
            else:
                sharded.grad.add_(gradient)
            for hook in (sharded._post_accumulate_grad_hooks or {}).values():
                hook(sharded)
        self._log.note(-sum(each.nbytes for each in unused))

    def gradient(self, param: FSDPParam, flat: torch.Tensor) -> DTensor:
        local, like = param.distribution.local(flat), param.sharded
        if flat.dtype == like.dtype:
            return dtensor_like(local, like)  # type: ignore[arg-type]
        return dtensor_of(local, spec_of(like.device_mesh, like.placements, like.shape, flat.dtype))  # type: ignore

    def drop(self) -> bool:
        """Drop the gradients that are not in ``.grad`` yet; return whether there were any."""
        self._drop_copy()
        had_any = self.state is not GradientState.EMPTY
        # Forget everything before the waits: waiting for a collective that failed raises.
        in_flight = [self.in_flight, None if self._all_reduce is None else self._all_reduce[0]]
        for shard in self.buffers():
            self._log.note(-shard.nbytes)
        self.in_flight = self._output = self._all_reduce = self._reduced = self.kept = None
        self._has_failed = self.is_set = False
        self._pending = {}
        self.buffer.drop()
        # Other ranks take part in these collectives, so they must end here, too. Their input is freed after that.
        try:
            for work in in_flight:
                if work is not None:
                    work.wait()
        finally:
            self.buffer.free()
        return had_any

    def reduced_copy(self, source: DBuffer | None) -> DBuffer:
        """Collective: what :meth:`start` and :meth:`finish` would make of ``source`` and the kept shards, in new memory.

        Args:
            source: unreduced gradients; None: no rank has any.
        """
        # As they do it, so that bits are those of the reduction that follows.
        copy, reduction = self._shards(is_partial=True), self.settings.reduction
        # Equal on all ranks, as each step of the reduction is: the program reads on all of them.
        if source is not None:
            source.redistribute(copy.placements, self._collectives, copy, reduction).wait()
            copy = copy if self._dp.levels is None else self._over_nodes(copy)
            self._reduce_pending(copy, self.buffer.pending())
        else:
            copy.flat.zero_()
        if self.kept is not None:
            copy.flat.add_(self.kept.flat)
        if self._dp.has_replicas:
            copy.redistribute(self._placements, self._collectives, reduction=reduction).wait()
        return copy


def check_hooks_run_once(param: FSDPParam) -> None:
    """In backward: hooks on a sharded parameter run for its whole gradient. Autograd runs them for what reaches the shard, too.

    Raises:
        RuntimeError: this backward has both parts.
    """
    sharded: Any = param.sharded
    # A frozen one gets no gradient, and autograd has no node for it.
    has_hooks = sharded.requires_grad and (sharded._backward_hooks or sharded._post_accumulate_grad_hooks)
    if has_hooks and gradient_use(get_gradient_edge(sharded).node) is not GradientUse.NONE:
        raise RuntimeError(
            f"the hooks on {param.fqn!r} would run twice in this backward: its unit has used it, and so has code outside of "
            "the unit's forward, which got the shards. Move that code into the unit's forward, or remove the hooks"
        )
