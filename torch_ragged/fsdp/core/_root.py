"""What happens when: in the forward, the backward and between iterations of the modules under one root.

::

    FSDPState (above)     the hooks of a module. They ask
    FSDPStateContext      the root: the start and the end of an iteration and of a backward pass, for all modules
    ModuleState           one module: unshard, prefetch, reshard, reduce. It calls
    FSDPParamGroup        its groups of parameters

Nothing here hooks a module, or moves data.
"""

from __future__ import annotations

import functools
import itertools
import operator
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.distributed.fsdp import MixedPrecisionPolicy

from torch_ragged._register._torch import backward_id, dynamo_disabled, profiler_range
from torch_ragged.fsdp.comm._call_log import CallLog
from torch_ragged.fsdp.core._forward_order import Call, Event, ForwardOrder
from torch_ragged.fsdp.core._fsdp_param_group import FSDPCommContext, FSDPParamGroup
from torch_ragged.fsdp.core.encodings._plain import Phase
from torch_ragged.fsdp.core.encodings._spmd_types import untyped
from torch_ragged.fsdp.core.optional._roll_call import RollCall

__all__ = ["FSDPStateContext", "GradientReductionHandle", "ModuleState"]


def numbered(groups: list[FSDPParamGroup]) -> list[FSDPParamGroup]:
    """``groups``, with numbers that are equal on all ranks. One rank may make a memory report alone: its groups get none."""
    for group in groups:
        if not group.plan.runs_on_meta:
            group.named.take_number()
    return groups


class ModuleState:
    """The groups of one module, or of several modules that share them, and the knobs that users set.

    Attributes:
        modules: the modules of one call of ``fully_shard``.
        groups: the groups of their parameters: several if these differ in mesh, dtype or kind of placement.
        calls: the forward calls that run now; the innermost is the last.
        checks_replicas: whether replicas must hold equal parameters.
        reduces_last_only: whether gradients stay unreduced until the root's ``is_last_backward`` (``ZERO1``).
        comm: the limits on communication, which the states under one root share.
        unshard_in_backward: whether backward needs the parameters.
        is_optional: whether ranks may skip the module in forward. So are the modules inside an optional one.
        reduces_unused: whether a group without gradients on this rank takes part in collectives.
        forward_prefetch, backward_prefetch: the states to all-gather ahead; None: the next one.
        root_state: the state of the root; this one until the root's first forward.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        groups: list[FSDPParamGroup],
        mp_policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | None,
        is_optional: bool = False,
    ) -> None:
        self.is_optional = is_optional
        self.modules, self.groups, self.mp_policy = tuple(modules), numbered(groups), mp_policy
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.requires_gradient_sync = True
        self.checks_replicas = True
        self.reduces_last_only = False
        self.is_last_backward = True
        self.finalizes_manually = False
        self.unshard_in_backward = True
        self.reduces_unused = True
        self.post_optim_event: torch.Event | None = None
        self.forward_prefetch: Sequence[ModuleState] | None = None
        self.backward_prefetch: Sequence[ModuleState] | None = None
        self.is_root = False
        self.calls: list[Call] = []
        self._in_backward = False  # Between pre- and post-backward. A forward call then is a recomputation.
        self._still_to_run = set(self.modules)  # The modules that have not run since the last reshard.
        self._must_refresh = False  # Unsharded parameters may be out of date in the next iteration.
        self._gathers_in: FSDPCommContext | None = None  # What counts the all-gathers that were issued ahead of use.
        self.fqn = ""
        self._root_state = weakref.ref(self)
        self.comm: FSDPCommContext = FSDPCommContext()

    @property
    def name(self) -> str:
        return ", ".join(type(module).__name__ for module in self.modules)

    @property
    def root_state(self) -> ModuleState:
        return self._root_state() or self  # If the root was deleted, this module may become one.

    # -- forward ---------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """A forward begins: reshard parameters that an earlier forward left unsharded, since the shards may have changed."""
        self.calls.clear()
        self._still_to_run = set(self.modules)
        if self._must_refresh or any(group.is_outdated for group in self.groups):
            self.reshard()
        # After resharding: the user's parameters are registered in the modules then, and all-gathers read the shards.
        for group in self.groups:
            group.load_replaced()
            group.expire_resident()
            group.is_unhooked = False

    def enter_call(self, root: FSDPStateContext, needs_backward: bool) -> Call:
        """A call begins, on this rank or, if the module is optional, on another one: unshard, and prefetch the next module."""
        call = Call(root.order if self.is_root or root.in_forward else None, self)
        self.calls.append(call)
        with profiler_range("pre_forward", self.fqn):
            if self.groups:
                self.unshard(self._forward_phase(needs_backward))
                self._must_refresh = True
                if needs_backward:  # A tensor inside of the module may be in the loss, and no output.
                    for group in self.groups:
                        group.is_unhooked = True
                # After the wait for this module, whose all-gather must not be delayed by the next one's.
                for neighbour in self._prefetch(self.forward_prefetch, root.last_order, call.position, 1, needs_backward):
                    neighbour._must_refresh = True  # It may never be called.
        if needs_backward:
            # Here and in backward: if backward raises here, this rank still knows that other ranks accumulate gradients.
            if self.accumulates:
                for group in self.groups:
                    group.note_accumulation()
            if self.is_optional and call.order is not None:
                call.order.watch(call.position, is_exit=False)
        return call

    def leave_call(self, needs_backward: bool, stays_unsharded: bool) -> None:
        """The call of an optional module on another rank ends: reshard as that rank does."""
        call = self.calls.pop()
        # As on the ranks that make the call: orders are equal on all ranks, also on those whose backward does not reach it.
        if call.order is not None and needs_backward:
            call.order.watch(call.position, is_exit=True)
        if not stays_unsharded and (self.reshard_after_forward or not needs_backward):
            self.reshard(keep=needs_backward)
        elif stays_unsharded and needs_backward:
            self.gather_for_backward()

    def gather_for_backward(self) -> None:
        """The parameters stay unsharded until backward, which no hook announces: all-gather what it uses beside forward."""
        for group in self.groups:
            if group.encoding.has_phases:
                group.unshard(phase=Phase.BOTH)

    def _forward_phase(self, needs_backward: bool) -> Phase:
        return Phase.BOTH if needs_backward and not self.reshard_after_forward else Phase.FORWARD

    def unshard(self, phase: Phase) -> None:
        """All-gather the parameters for ``phase``, unless they are unsharded, and register them in the modules."""
        # Issue all before waiting for one: the all-gathers of a module's groups are in flight together.
        for group in self.groups:
            group.unshard(wait=False, phase=phase)
        for group in self.groups:
            group.unshard(phase=phase)
        self.end_gathering()

    def reshard(self, keep: bool = False) -> None:
        """Free the unsharded parameters. If ``keep``, the keeper may keep a part for backward."""
        self.end_gathering()
        self._must_refresh = False
        for group in self.groups:
            group.reshard(keep)
            # A kept part has the current values. If a new forward begins before backward, it drops the part.
            self._must_refresh |= group.keeper is not None and group.keeper.holds_part

    def end_gathering(self) -> bool:
        """The all-gathers were used or dropped; return whether they had been issued ahead of use."""
        # Given back where it was counted: the state may have joined other limits meanwhile.
        counted_by, self._gathers_in = self._gathers_in, None
        if counted_by is not None:
            counted_by.gathers -= 1
        return counted_by is not None

    def _prefetch(
        self,
        chosen: Sequence[ModuleState] | None,
        order: ForwardOrder | None,
        position: int,
        step: int,
        needs_backward: bool = True,
    ) -> list[ModuleState]:
        """Issue the all-gathers of ``chosen``, or of the next module in ``order``; return the states whose were issued.

        If the limit of all-gathers ahead of use is reached, an all-gather is issued when its module runs.
        """
        if chosen is None:
            states: list[Any] = [] if order is None else order.states
            at = position + step
            in_order = position >= 0 and 0 <= at < len(states) and states[position] is self
            # In forward, an optional module may run on no rank. Backward follows the order within each thread only.
            while in_order and (
                not states[at].groups
                or (states[at] is self and len(self.modules) > 1)
                or (states[at].is_optional and step > 0)
                or (step < 0 and order is not None and order.thread_of[position] is not order.thread_of[at])
            ):
                at += step
                in_order = 0 <= at < len(states)
            chosen = states[at : at + 1] if in_order else ()
        started = []
        # These conditions are equal on all ranks: the order, the all-gathers in flight, and the holders of slots.
        for state in chosen:
            is_gathered, can_start = True, self.comm.gathers < self.comm.max_gathers
            for group in state.groups:
                is_gathered &= group.is_gathered
                can_start &= group.pools[0] is None or group.encoding.has_slot  # Persistent buffers take turns in slots.
            if can_start and not is_gathered:
                phase = state._forward_phase(needs_backward) if step > 0 else Phase.BACKWARD
                for group in state.groups:
                    group.unshard(wait=False, phase=phase)
                self.comm.gathers += 1
                state._gathers_in = self.comm
                started.append(state)
        return started

    # -- backward --------------------------------------------------------------------------------------------------

    def pre_backward(self, order: ForwardOrder | None, position: int) -> None:
        """Unshard for the backward of a call, and prefetch the module before. Equal on all ranks: see ``ForwardOrder``."""
        self._in_backward = True
        # First: if this rank raises below, it still knows which gradients other ranks reduce.
        for group in self.groups:
            group.expect_gradients(self.accumulates)
        if self.groups and self.unshard_in_backward:
            with profiler_range("pre_backward", self.fqn):
                self.unshard(Phase.BACKWARD)
                self._prefetch(self.backward_prefetch, order, position, step=-1)

    def post_backward(self, is_last: bool) -> None:
        """Reshard after the backward of a call; after the last call in backward, reduce the gradients of all calls."""
        if not self._in_backward:
            return
        self._in_backward = False
        with profiler_range("post_backward", self.fqn):
            # Reshard first: the cast of gradients and the reduction may use the memory that this frees.
            if self.reshard_after_backward and (is_last or len(self.modules) == 1):
                self.reshard()
            # Gradients of all calls are reduced together, once.
            if is_last:
                self.reduce_gradients()

    def reduce_gradients(self) -> None:
        """Issue the reduce-scatters of groups that backward has reached; or let their gradients accumulate."""
        groups = []
        for group in self.groups:
            if group.needs_reduction:
                group.collect_assigned()
                groups.append(group)
        if not groups:
            return
        if self.accumulates:
            for group in groups:
                group.accumulate_gradients()
            return
        # Reductions of one group follow each other before the end of a pass only in schedules of pipelines.
        is_only_one = not self.root_state.finalizes_manually
        for group in groups:  # First: all ranks raise here, or none.
            if group.gradient_user is not None and not group.reduction.keeps_shards:
                group.gradient_user.before_reduction(group, is_only_one)
        # This limits the memory of gradients in flight. All ranks reach it in one order, as HSDP's all-reduces need it.
        oldest = self.comm.beyond(groups[0].settings.max_reductions)
        self.comm.forget(oldest)
        for group in oldest:
            group.reduction.finish()
            if group.gradient_user is not None and is_only_one and group.reduction.set_grads_early():
                group.gradient_user.use(group)
        for group in groups:
            group.reduce_gradients()
        self.comm.reducing.append(groups)

    @property
    def accumulates(self) -> bool:
        """Whether backward leaves gradients unreduced, for a later pass."""
        if not self.requires_gradient_sync:
            return True
        return self.reduces_last_only and not self.root_state.is_last_backward

    def end_backward(self, in_forward: bool) -> None:
        """The pass is over, and ``.grad`` is set. If ``in_forward``, forward itself ran this backward."""
        if in_forward and self._must_refresh:  # It uses the parameters.
            return
        if self.reshard_after_backward or not all(group.is_unsharded for group in self.groups):
            self.reshard()
        else:
            self._must_refresh = False  # They are valid until the optimizer steps, which group.is_outdated notices.

    def drop_backward(self) -> bool:
        """Drop the gradients of the backward pass; return whether there were any."""
        self._in_backward = False
        self._must_refresh = True
        self.comm.forget(self.groups)
        had_any = False
        for group in self.groups:
            had_any |= group.drop_gradients()
        return had_any


# -- the root ------------------------------------------------------------------------------------------------------------


class FSDPStateContext:
    """The root: what the states under it share, and the only owner of when they do what.

    Each state has its own context until the root's first forward. From then on, all states under the root share one.

    ::

        forward            start_iteration()
        first hook         start_backward()       has autograd call the root at the end of the pass
        hooks              reach(order)           backward is in this forward; run_skipped() for what this rank skips in it
        end of the pass    end_backward(), or pause_backward() if ``finalize_backward`` ends it later

    Attributes:
        states: the states under the root, in the order of ``modules()``; the root's is the first.
        groups: their groups.
        is_initialized: whether the root has run its first forward.
        log: compares calls between ranks; None if there is one rank, or if nothing is communicated.
        roll_call: lets ranks take part in optional modules; None if there are none.
        orders: the orders that backward has reached in this pass.
        order: the calls of the root's current or last forward.
        last_order: the calls of the forward before it. Prefetching follows ``last_order``.
        awaits_finalize: whether a backward pass has ended, and ``finalize_backward`` has not been called since then.
        handle: the handle of a ``finalize_backward`` that was not waited for yet.
        has_checked_replicas: whether replicas were found equal in a forward.
    """

    def __init__(
        self,
        states: Sequence[ModuleState],
        is_initialized: bool = False,
        log: CallLog | None = None,
        roll_call: RollCall | None = None,
    ) -> None:
        self.states, self.is_initialized, self.log, self.roll_call = states, is_initialized, log, roll_call
        self.all_states = states  # FSDP2's name for them, which the pipeline schedules of torch 2.11 to 2.13 read.
        self.groups = [group for state in states for group in state.groups]
        self.order, self.last_order = ForwardOrder(), ForwardOrder()
        self.orders: list[ForwardOrder] = []
        self.awaits_finalize = False
        self.handle: object | None = None
        self._closed = ""
        self.has_checked_replicas = False
        # Only autograd holds the callback of a running pass, and drops it if backward raises: a dead reference means that.
        self._running: Callable[[], object] | None = None

    def close(self, why: str) -> None:
        """From now on, a backward raises ``why``: the memory of the forward that it belongs to is freed."""
        self._closed = why

    # -- forward ---------------------------------------------------------------------------------------------------

    @property
    def in_forward(self) -> bool:
        """Whether the root is in its forward."""
        return bool(self.states[0].calls)

    def start_iteration(self) -> None:
        """The root's forward begins."""
        if self.log is not None:
            self.log.start()
        for state in self.states:
            # An optimizer on another stream may still write to the shards that the next all-gathers read.
            event, state.post_optim_event = state.post_optim_event, None
            if event is not None:
                event.wait()
            state.refresh()
        # Prefetching follows the last forward: all ranks have completed it, in the same order.
        self.last_order, self.order = self.order, ForwardOrder()

    def drop_unused_prefetches(self) -> None:
        """After a forward without backward: reshard modules that were prefetched and did not run."""
        # All ranks prefetch in the same order. So they have issued, and drop, the same all-gathers.
        for state in self.states:
            if state.end_gathering():
                state.reshard()

    def meet(self, event: tuple[ModuleState, bool] | None, stays_unsharded: bool = False) -> tuple[bool, bool]:
        """Return when ``event`` is next on all ranks that have it, and take part in the events before it.

        Args:
            event: a call of an optional module begins, or ends; None: when no rank has such an event.
            stays_unsharded: whether this rank must not reshard at the end of the call.

        Returns:
            whether gradients are enabled, and whether the module stays unsharded, on any rank that has the event.
        """
        assert self.roll_call is not None
        while True:
            agreed, needs = self.roll_call.agree(event, stays_unsharded)
            if agreed == event:
                return needs
            assert agreed is not None
            state: Any = agreed[0]
            if agreed[1]:
                state.leave_call(*needs)
            else:
                state.enter_call(self, needs[0])

    # -- backward --------------------------------------------------------------------------------------------------

    @property
    def in_backward(self) -> bool:
        """Whether this code runs in a backward pass of these modules that has not raised."""
        return self._running is not None and self._running() is not None and backward_id() != -1

    def start_backward(self, takes_part: bool = False) -> None:
        """Let autograd call the root at the end of the current pass. If the pass was started before, do nothing.

        Args:
            takes_part: whether a gradient came from inside of a module of the last forward. Then this rank takes part in the
                collectives of that forward's calls, also if its backward reaches none of their outputs.

        Raises:
            RuntimeError: :meth:`close` was called.
        """
        if self._closed:
            raise RuntimeError(self._closed)
        # Any hook may be the first of a pass, and ranks may differ in it. So all hooks call this method.
        # The first one of the pass has started it: autograd would call each callback.
        if self.in_backward:
            return
        if self._running is not None:  # A pass that raised has left gradients. This pass must not add to them.
            self.drop_raised_backward()
        callback = functools.partial(_root_post_backward, self)
        self._running, self.orders = weakref.ref(callback), []
        Variable._execution_engine.queue_callback(callback)
        # Other ranks may have reached an output. The latest calls are last in this order, and autograd has not passed them.
        if takes_part:
            self.reach(self.order)

    def reach(self, order: ForwardOrder) -> None:
        """Backward has reached a call in ``order``, so it has finished all later forwards."""
        # Autograd runs later forwards first: on every rank, the calls of orders reached before are finished.
        if order not in self.orders:
            self.finish_orders()
            order.restart()
            self.orders.append(order)

    def finish_orders(self) -> None:
        """Backward reaches no further call of the orders that it has reached."""
        for order in self.orders:
            for event in order.finish():
                self.run_skipped(order, event)

    def run_skipped(self, order: ForwardOrder, event: Event) -> None:
        """Run an event of a call that backward has skipped on this rank: other ranks unshard or reduce for it now."""
        state: Any = order.states[event.position]
        if event.is_pre_backward:
            state.pre_backward(order, event.position)
        else:
            state.post_backward(order.is_first(event.position))

    def pause_backward(self) -> None:
        """A backward pass is over; others may follow before ``finalize_backward``."""
        # Other ranks may have reached modules that backward did not reach here: take part in their collectives.
        self.finish_orders()
        for state in self.states:
            state.post_backward(is_last=True)
        # Even if gradients were reduced: the next pass uses the same parameters, so resident ones stay.
        for group in self.groups:
            group.end_pass(is_accumulating=True, publishes=False)  # Not in the middle of a schedule.
        # Not running: the next backward queues a callback of its own.
        self.awaits_finalize, self._running, self.orders = True, None, []

    def start_reductions(self) -> None:
        """Reduce the gradients that no module's post-backward has reduced."""
        try:
            self.finish_orders()
            # In the order of modules, not of gradients: autograd's order may differ between ranks.
            for state in reversed(self.states):
                state.post_backward(is_last=True)
                # Groups that are still unsharded may have gradients on any rank, without a forward. Equal on all ranks, as
                # unshard() is: a rank without gradients contributes zeros.
                for group in state.groups if state.reduces_unused else ():
                    if not group.was_reached and group.is_unsharded:
                        group.expect_gradients()
                state.reduce_gradients()
        except BaseException:  # Also outside of autograd: the pass counts as one that raised, and its gradients are dropped.
            self._running = lambda: None  # A dead reference, as to a pass that autograd has dropped.
            raise

    def end_backward(self) -> None:
        """End a backward pass: reduce all other gradients, agree on unused parameters, set ``.grad``, reshard.

        Collectives: the reductions not issued yet, and per mesh one all-reduce of a byte per parameter.
        """
        with profiler_range("root_post_backward_callback", self.states[0].fqn):
            self.start_reductions()
            try:
                reduced: dict[Any, list[FSDPParamGroup]] = {}
                for group in self.groups:
                    # Such a group does not set .grad now. Finish its reduction, too: none stays in flight after its backward.
                    if group.dp.has_replicas and group.reduction.keeps_shards:
                        group.reduction.finish()
                    # Equal on all ranks, as are the collectives below: a group is reduced if pre-backward ran on any rank.
                    if group.reduction.was_reduced:
                        reduced.setdefault(group.dp.key, []).append(group)
                for groups in reduced.values():
                    used = _used_anywhere(groups)
                    for group in groups:
                        was_set = group.reduction.is_set
                        group.reduction.set_grads(used)
                        if group.gradient_user is not None and not was_set:
                            group.gradient_user.use(group)
                        # All ranks set .grad in the same pass, so what they keep gathered is out of date on all of them.
                        group.invalidate_kept()
                used_by: dict[Any, list[FSDPParamGroup]] = {}
                for group in itertools.chain.from_iterable(reduced.values()):
                    if group.gradient_user is not None:
                        used_by.setdefault(group.gradient_user, []).append(group)
                for user, groups in used_by.items():
                    user.finish(groups)
                is_accumulating = not reduced and any(group.is_trainable for group in self.groups)
                for group in self.groups:
                    group.end_pass(is_accumulating)
                self.states[0].comm.forget(self.groups)
                in_forward = bool(self.states[0].calls)
                for state in self.states:
                    state.end_backward(in_forward)
            except BaseException:
                self._running = lambda: None
                raise
            # Last: if anything above raises, the gradients of this pass are dropped before the next one.
            self.awaits_finalize, self._running, self.orders = False, None, []

    def synchronize_gradients(self) -> None:
        """Reduce all gradients that wait, set ``.grad`` and reshard. The settings that made them wait are as before afterwards.

        Collectives: those of a backward with gradient sync, for groups with such gradients. None if there are none.
        """
        if self.in_forward or backward_id() != -1:
            raise RuntimeError("synchronize_gradients must be called outside of forward and backward")
        self.drop_raised_backward()
        for group in self.groups:
            group.reduction.take_back()
        if any(group.is_unsynchronized for group in self.groups):
            self._reduce_waiting()
        # The step follows: gathered parameters would be out of date, and model.parameters() must be what it changes.
        for state in self.states:
            state.reshard()

    def _reduce_waiting(self) -> None:
        """End a backward pass as if gradient sync, and the reduction over replicas, were on."""
        root, before = self.states[0], [(state, state.requires_gradient_sync) for state in self.states]
        is_last, needed = root.is_last_backward, [(group.settings, group.settings.requires_all_reduce) for group in self.groups]
        try:
            root.is_last_backward = True
            for state in self.states:
                state.requires_gradient_sync = True
            for settings, _ in needed:
                settings.requires_all_reduce = True
            self.start_reductions()
            for group in self.groups:
                group.reduction.finish()
                group.reduction.reduce_kept()
            self.end_backward()
        finally:
            root.is_last_backward = is_last
            for state, requires_sync in before:
                state.requires_gradient_sync = requires_sync
            for settings, requires_all_reduce in needed:
                settings.requires_all_reduce = requires_all_reduce

    def drop_raised_backward(self) -> None:
        """If the last backward raised, drop its gradients: the next pass must not add to them."""
        if self._running is not None and not self.in_backward and self.drop_backward():
            warnings.warn(
                "a backward pass raised: its gradients, and those accumulated without gradient sync, are dropped", stacklevel=2
            )

    def drop_backward(self) -> bool:
        """Drop reductions in flight and gradients that are not in ``.grad`` yet; return whether there were any."""
        self._running, self.handle, self.orders = None, None, []
        self.awaits_finalize = had_any = False
        for state in self.states:
            had_any |= state.drop_backward()
        return had_any


@dynamo_disabled
@untyped
def _root_post_backward(root: FSDPStateContext) -> None:
    """Autograd has reached the end of a backward pass."""
    if root.states[0].finalizes_manually:
        root.pause_backward()
    else:
        root.end_backward()


def _used_anywhere(groups: Sequence[FSDPParamGroup]) -> Iterator[bool]:
    """For each parameter, whether any rank has a gradient for it. One small all-reduce.

    A rank reads the result only if it has a parameter without a gradient. Otherwise it need not block on a GPU.
    """
    # Issue it on all ranks, also if this rank has all gradients: another rank may need this rank's answer.
    local: list[bool] = []
    for group in groups:
        local += map(operator.attrgetter("was_used"), group.params)
    flags = torch.ones(len(local), dtype=torch.uint8, device=groups[0].device)
    start = 0
    for is_used, run in itertools.groupby(local):  # Fills: a copy from the host would block, and break a capture.
        stop = start + len(list(run))
        if not is_used:
            flags[start:stop].zero_()
        start = stop
    with profiler_range("unused_parameters_all_reduce", groups[0].fqn):
        groups[0].named.all_reduce_max(flags).wait()
    if all(local) or flags.is_meta:  # A memory report runs a step on the meta device, without other ranks.
        return iter(local)
    # A frozen parameter has no gradient on any rank.
    trainable = [param.sharded.requires_grad for group in groups for param in group.params]
    if all(used or not needed for used, needed in zip(local, trainable)):
        return iter(local)
    return iter([bool(flag) for flag in flags.tolist()])


class GradientReductionHandle:
    """A handle on reductions that :meth:`FSDPModule.finalize_backward` has issued."""

    def __init__(self, context: FSDPStateContext) -> None:
        self._context: FSDPStateContext | None = context
        if context.handle is not None:
            raise RuntimeError("wait for the handle of the last finalize_backward before finalizing backward again")
        if not context.is_initialized:  # No forward has run.
            self._context = None
            return
        context.start_reductions()
        context.handle = self

    def wait(self) -> None:
        """Finish the reductions, set ``.grad`` and reshard. A second call does nothing.

        Raises:
            RuntimeError: ``reset_iter_state`` has dropped the reductions.
        """
        context, self._context = self._context, None
        if context is None:
            return
        if context.handle is not self:
            raise RuntimeError("the gradients of this handle were dropped by reset_iter_state")
        context.handle = None
        context.end_backward()
