"""When: what the modules under one root do in forward, in backward and between iterations, and in which order.

::

    hooks (above)       torch calls them before and after each forward and backward of a module. They ask
    FSDPStateContext    the root: the start and the end of an iteration and of a backward pass, for all modules
    Pass                one backward pass: what is true in it, and only in it
    FSDPState           one module: unshard, prefetch, reshard, reduce. It calls
    FSDPParamGroup      its groups of parameters

Nothing here hooks a module, or moves data.
"""

from __future__ import annotations

import functools
import itertools
import operator
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from torch_ragged._register._spmd_types import untyped
from torch_ragged._register._torch import backward_id, dynamo_disabled, profiler_range
from torch_ragged.fsdp.core._forward_order import Call, Event, ForwardOrder, Pass
from torch_ragged.fsdp.core._fsdp_param_group import FSDPCommContext, FSDPParamGroup
from torch_ragged.fsdp.core._grad_reduction import check_hooks_run_once
from torch_ragged.fsdp.core._param_swap import load_replaced
from torch_ragged.fsdp.core.encodings._plain import Phase

__all__ = ["STATE", "FSDPState", "FSDPStateContext", "Gate", "GradientReductionHandle", "numbered", "state_of"]

STATE = "_ragged_fsdp_state"
"""The attribute under which a module keeps its state."""


def state_of(module: nn.Module) -> FSDPState | None:
    """The state of ``module`` itself, or None. A CheckpointWrapper would answer ``getattr`` for the module inside it."""
    return module.__dict__.get(STATE)


class Gate(Protocol):
    """Lets ranks agree on the calls of a root's forward, before these communicate. Without a gate, a forward asks nothing.

    Attributes:
        before_collective: is called before each all-gather. It must not hold the states: groups keep it.
    """

    before_collective: Callable[[], None]

    def start(self) -> None:
        """The root's forward begins."""

    def before_call(self, state: FSDPState, needs_backward: bool) -> bool:
        """A call begins; return whether backward may reach it, on any rank that makes the call.

        Until it is next on all ranks, this rank takes part in the calls of others: :meth:`FSDPState.enter_call`.
        """

    def after_call(self, state: FSDPState, needs_backward: bool, must_stay: bool) -> tuple[bool, bool]:
        """A call ends; return whether backward may reach it and whether it stays unsharded, on any rank that makes the call."""

    def forward_raised(self) -> None:
        """The root's forward has raised on this rank, which asks nothing more in it."""


def numbered(groups: list[FSDPParamGroup]) -> list[FSDPParamGroup]:
    """``groups``, with numbers that are equal on all ranks. One rank may make a memory report alone: its groups get none."""
    for group in groups:
        if not group.plan.runs_on_meta:
            group.named.take_number()
    return groups


class FSDPState:
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
    """

    # What other programs read and call by FSDP2's private names. The schedules of torch 2.11 to 2.13 reduce gradients by
    # them; those of 2.15 call methods of ``FSDPModule``.
    _pre_forward: Callable[..., Any]  # torch's register_fsdp_forward_method calls both: _hooks.register() sets them.
    _post_forward: Callable[..., Any]
    _fsdp_param_groups: Sequence[FSDPParamGroup] = ()  # _root_post_backward_final_callback() reduces the gradients of all.

    def __init__(
        self,
        modules: Sequence[nn.Module],
        groups: list[FSDPParamGroup],
        mp_policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | None,
        is_optional: bool = False,
        gate_of: Callable[[Sequence[FSDPState]], Gate | None] | None = None,
    ) -> None:
        self.is_optional, self._gate_of = is_optional, gate_of
        self.modules, self.groups, self.mp_policy = tuple(modules), numbered(groups), mp_policy
        self._mp_policy = mp_policy  # NeMo AutoModel computes the logits in the dtype of its head's policy.
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
        self.forward_prefetch: Sequence[FSDPState] | None = None
        self.backward_prefetch: Sequence[FSDPState] | None = None
        self.is_root = False
        self.calls: list[Call] = []
        self._pass: Pass | None = None  # Between pre- and post-backward. A forward call then is a recomputation.
        self._still_to_run = set(self.modules)  # The modules that have not run since the last reshard.
        self._must_refresh = False  # Unsharded parameters may be out of date in the next iteration.
        self._gathers_in: FSDPCommContext | None = None  # What counts the all-gathers that were issued ahead of use.
        self.fqn = ""
        # The root owns the context; before the first forward, each state owns one.
        self._owned_context: FSDPStateContext | None = FSDPStateContext([self])
        self.join(self._owned_context, FSDPCommContext())

    @property
    def name(self) -> str:
        return ", ".join(type(module).__name__ for module in self.modules)

    # -- the root --------------------------------------------------------------------------------------------------

    @property
    def context(self) -> FSDPStateContext:
        """The context that this state shares with the others under its root."""
        context = self._context()
        if context is None:  # The root was deleted: this module may become a root.
            context = self._owned_context = FSDPStateContext([self])
            self.join(context, FSDPCommContext())
        return context

    def join(self, context: FSDPStateContext, comm: FSDPCommContext) -> None:
        """Share the context of a root, and the limits on communication of this root or of several."""
        # By a weak reference: a module that outlives its model must not keep the shards of all others.
        self._context = weakref.ref(context)
        self.comm = self._comm_ctx = comm
        before_collective = None if context.gate is None else context.gate.before_collective
        for index, group in enumerate(self.groups):
            group.join(f"{self.fqn}[{index}]" if self.fqn and index else self.fqn, comm, self._context, before_collective)

    def become_root(self) -> None:
        """The forward of this module runs first: from now on, all states under it share its context.

        All ranks run the same module first, so they agree on the root.

        Raises:
            RuntimeError: a module inside has another root, or this rank holds no shards.
            ValueError: as the gate raises it.
        """
        found = [state_of(module) for root in self.modules for module in root.modules()]
        states = list(dict.fromkeys(state for state in found if state is not None))
        for state in states:
            # Two roots cannot become one: each has an order of its own forwards, and ranks may differ in which one ran first.
            if state.context.is_initialized:
                raise RuntimeError(
                    f"{state.name} became a root when it ran its forward before the module around it, or it is "
                    "part of another root: run the forward of the outermost fully_shard module first"
                )
        # All checks are before the first change: after an error, each state is its own root, as before.
        for group in [group for state in states for group in state.groups]:
            group.check_forward()
        # On all ranks in the same order, since they call their roots in one: a gate takes the next number for its ranks.
        gate = None if self._gate_of is None else self._gate_of(states)
        context = self._owned_context = FSDPStateContext(states, True, gate)
        self.is_root = True
        for name, module in (pair for root in self.modules for pair in root.named_modules()):
            if own := state_of(module):
                own.fqn = own.fqn or name or "root"  # Unless another module of this state has set it.
        if self.reshard_after_forward is None:
            self.reshard_after_forward = False  # Backward needs the root's parameters first.
        for state in states:
            state.join(context, self.comm)
            if state is not self:
                state._owned_context = None
            if state.reshard_after_forward is None:
                state.reshard_after_forward = True

    def replace_groups(self, groups: list[FSDPParamGroup]) -> None:
        """Use other groups of the same parameters, registered by their caller. A root is found anew by the next forward.

        All states under a root do this together, and all ranks: the order of the last forward, which decides what is
        prefetched, is then unknown on all of them.
        """
        self.context.close("reshard_to has moved the parameters after this forward: run the forward again, then backward")
        self.groups, self.is_root = numbered(groups), False
        self.calls.clear()
        self._pass, self._must_refresh, self._still_to_run = None, False, set(self.modules)
        self._owned_context = FSDPStateContext([self])
        self.join(self._owned_context, self.comm)

    def reset(self) -> None:
        """Return to the state before the current forward and backward."""
        self.drop_backward()
        self.calls.clear()
        self.reshard()

    _state_ctx = context

    @property
    def _fsdp_param_group(self) -> Any:
        """Programs call its ``post_backward()`` for each state under a root, and some do not call the root's callback then.

        That of the root's state reduces the gradients of all states under the root. For other states, this is None.
        """
        context = self.context
        return SimpleNamespace(post_backward=context.end_backward) if context.states[0] is self else None

    def _root_post_backward_final_callback(self) -> None:
        """Reduce the gradients that micro-batches have accumulated, set ``.grad`` and reshard."""
        self.context.end_backward()

    # -- forward ---------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """A forward begins: reshard parameters that an earlier forward left unsharded, since the shards may have changed."""
        self.calls.clear()
        self._still_to_run = set(self.modules)
        is_outdated = self._must_refresh
        for group in self.groups:
            is_outdated |= group.is_outdated
        if is_outdated:
            self.reshard()
        # After resharding: the user's parameters are registered in the modules then, and all-gathers read the shards.
        is_accumulating = self.context.is_accumulating
        for group in self.groups:
            if not group.is_unsharded and group.replaced():
                load_replaced(group)
            if group.keeper is not None and not is_accumulating:  # Otherwise, no optimizer has changed a parameter since then.
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
                    group.may_hold_sum = True
            if self.is_optional and call.order is not None:
                call.order.watch(call.position, is_exit=False)
        return call

    def leave_call(self, module: nn.Module, needs_backward: bool, must_stay: bool, is_watched: bool = True) -> Call:
        """A call ends, on this rank or, if the module is optional, on another one: reshard, unless it must stay unsharded.

        Args:
            is_watched: whether autograd will tell this rank that backward has reached an output of the call.
        """
        # There is none if pre-forward has raised.
        call = self.calls.pop() if self.calls else Call(None, self)
        for group in self.groups:
            group.is_unhooked |= must_stay
        if must_stay and needs_backward:
            # No hook will announce backward: all-gather what it uses beside forward.
            for group in self.groups:
                if group.encoding.has_phases:
                    group.unshard(phase=Phase.BOTH)
        # Of an optional call, all ranks record it, also ranks whose backward does not reach it: their orders must be equal.
        if call.order is not None and (needs_backward if self.is_optional else is_watched):
            call.order.watch(call.position, is_exit=True)
        # Modules that share their groups reshard once, after the last of them.
        self._still_to_run.discard(module)
        if self.is_root and not needs_backward:
            # With a backward to come, its end reshards them.
            self.context.drop_unused_prefetches()
        if not self._still_to_run and not must_stay:
            self._still_to_run = set(self.modules)
            if self.reshard_after_forward or not needs_backward:
                self.reshard(keep=needs_backward)
        return call

    def _forward_phase(self, needs_backward: bool) -> Phase:
        return Phase.BOTH if needs_backward and not self.reshard_after_forward else Phase.FORWARD

    def unshard(self, phase: Phase) -> None:
        """All-gather the parameters for ``phase``, unless they are unsharded, and register them in the modules."""
        if len(self.groups) > 1:  # Issue all before waiting for one: a module's all-gathers are in flight together.
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
        chosen: Sequence[FSDPState] | None,
        order: ForwardOrder | None,
        position: int,
        step: int,
        needs_backward: bool = True,
    ) -> list[FSDPState]:
        """Issue the all-gathers of ``chosen``, or of the next module in ``order``; return the states whose were issued.

        If the limit of all-gathers ahead of use is reached, an all-gather is issued when its module runs.
        """
        if chosen is None:
            neighbour: Any = None if order is None else order.neighbour(self, position, step)
            chosen = () if neighbour is None else (neighbour,)
        started = []
        # These conditions are equal on all ranks: the order, the all-gathers in flight, and the holders of slots.
        for state in chosen:
            is_gathered, can_start = True, self.comm.gathers < self.comm.max_gathers
            for group in state.groups:
                is_gathered &= group.is_gathered
                can_start &= not group.pools[0].is_required or group.encoding.has_slot  # They may take turns in slots.
            if can_start and not is_gathered:
                phase = state._forward_phase(needs_backward) if step > 0 else Phase.BACKWARD
                for group in state.groups:
                    group.unshard(wait=False, phase=phase)
                self.comm.gathers += 1
                state._gathers_in = self.comm
                started.append(state)
        return started

    # -- backward --------------------------------------------------------------------------------------------------

    @property
    def in_backward(self) -> bool:
        """Whether this rank is between the pre-backward and the post-backward of a call of this module."""
        return self._pass is not None and not self._pass.is_over

    def pre_backward(self, current: Pass, order: ForwardOrder | None, position: int) -> None:
        """Unshard for the backward of a call, and prefetch the module before. Equal on all ranks: see ``ForwardOrder``."""
        self._pass = current
        # First: if this rank raises below, it still knows which gradients other ranks reduce.
        for group in self.groups:
            group.expect_gradients(current, self.accumulates)
        if self.groups and self.unshard_in_backward:
            with profiler_range("pre_backward", self.fqn):
                self.unshard(Phase.BACKWARD)
                self._prefetch(self.backward_prefetch, order, position, step=-1)

    def post_backward(self, is_last: bool) -> None:
        """Reshard after the backward of a call; after the last call in backward, reduce the gradients of all calls."""
        if not self.in_backward:
            return
        self._pass = None
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
        is_only_one = not self.context.states[0].finalizes_manually
        for group in groups:  # First: all ranks raise here, or none.
            if group.gradient_user is not None and not group.reduction.keeps_shards:
                group.gradient_user.before_reduction(group, is_only_one)
        # This limits the memory of gradients in flight. All ranks reach it in one order, as HSDP's all-reduces need it.
        oldest = self.comm.beyond(groups[0].settings.max_reductions)
        self.comm.forget(oldest)
        for group in oldest:
            group.reduction.finish()
            # A backward of several forwards may reduce the group again: then its hooks wait for the end.
            has_hooks = group.has_hooks and self.context.forwards < 2
            user = group.gradient_user
            if is_only_one and (has_hooks or user is not None):
                # Hooks of the user run here, at one point of the order that all ranks share. They may communicate.
                is_shared = has_hooks or (user is not None and user.communicates)
                used = _used_anywhere([group]) if is_shared and group.reduction.was_reduced else None
                if group.reduction.set_grads_early(used) and user is not None:
                    user.use(group)
        for group in groups:
            group.reduce_gradients()
        self.comm.reducing.append(groups)

    @property
    def accumulates(self) -> bool:
        """Whether backward leaves gradients unreduced, for a later pass."""
        if not self.requires_gradient_sync:
            return True
        return self.reduces_last_only and not self.context.states[0].is_last_backward

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
        self._pass, self._must_refresh = None, True
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
        hooks              reach(order)           backward is in this forward; run_skipped() for each event that this rank skips
        end of the pass    end_backward(), or pause_backward() if ``finalize_backward`` ends it later

    Attributes:
        states: the states under the root, in the order of ``modules()``; the root's is the first.
        groups: their groups.
        is_initialized: whether the root has run its first forward.
        gate: lets ranks agree on calls; None: nothing has to be agreed.
        current: the backward pass that runs, or that has raised; None: the last one has ended.
        orders: the orders of calls that it has reached.
        order: the calls of the root's current or last forward.
        last_order: the calls of the forward before it. Prefetching follows ``last_order``.
        forwards: how many forwards with gradients have begun since the last pass. Equal on all ranks, as calls are.
        is_accumulating: whether the last pass has left its gradients unreduced, for a later one. Equal on all ranks.
        awaits_finalize: whether a backward pass has ended, and ``finalize_backward`` has not been called since then.
        handle: the handle of a ``finalize_backward`` that was not waited for yet.
    """

    def __init__(self, states: Sequence[FSDPState], is_initialized: bool = False, gate: Gate | None = None) -> None:
        self.states, self.is_initialized, self.gate = states, is_initialized, gate
        self.all_states = states  # FSDP2's name for them, which the pipeline schedules of torch 2.11 to 2.13 read.
        self.groups = [group for state in states for group in state.groups]
        self.order, self.last_order = ForwardOrder(), ForwardOrder()
        self.current: Pass | None = None
        self.orders: list[ForwardOrder] = []
        self.is_accumulating = self.awaits_finalize = False
        self.forwards = 0
        self.handle: object | None = None
        self._closed = ""

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
        for group in self.groups:
            group.find_hooks()
        if self.gate is not None:
            self.gate.start()
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

    def gate_for(self, state: FSDPState) -> Gate | None:
        """The gate of a call of ``state`` that begins or ends now."""
        # Calls in a backward, and those of an inner module by itself, are not compared: other ranks need not make them.
        return self.gate if (state.is_root or self.in_forward) and not self.in_backward else None

    # -- backward --------------------------------------------------------------------------------------------------

    @property
    def in_backward(self) -> bool:
        """Whether this code runs in a backward pass of these modules that has not raised."""
        return self.current is not None and self.current.is_running

    def start_backward(self, takes_part: bool = False) -> Pass:
        """The current pass, at whose end autograd calls the root. Any hook may be the first of a pass: all call this.

        Args:
            takes_part: whether a gradient came from inside of a module of the last forward. Then this rank takes part in the
                collectives of that forward's calls, also if its backward reaches none of their outputs.

        Raises:
            RuntimeError: :meth:`close` was called.
        """
        if self._closed:
            raise RuntimeError(self._closed)
        # One object for the whole pass: ranks may differ in which hook of it comes first.
        if self.current is not None and self.current.is_running:
            return self.current
        if self.current is not None:
            self.drop_raised_backward()  # A pass that raised has left gradients. This pass must not add to them.
        current = self.current = Pass(functools.partial(_root_post_backward, self))
        # Other ranks may have reached an output. The latest calls are last in this order, and autograd has not passed them.
        if takes_part:
            self.reach(self.order)
        return current

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
        """Run the event of a call that backward has skipped on this rank: other ranks unshard or reduce for it now."""
        state: Any = order.states[event.position]
        if event.is_pre_backward:
            state.pre_backward(self.current, order, event.position)
        else:
            state.post_backward(order.is_first(event.position))

    def pause_backward(self) -> None:
        """A backward pass is over; others may follow before ``finalize_backward``."""
        current = self.current  # None, if a hook of this pass has dropped its gradients.
        try:
            # Other ranks may have reached modules that backward did not reach here: take part in their collectives.
            self.finish_orders()
            for state in self.states:
                state.post_backward(is_last=True)
            # Now: at finalize_backward(), autograd does not tell any more where this pass has been.
            for group in self.groups:
                for param in group.params if group.has_hooks and group.was_reached else ():
                    check_hooks_run_once(param)
        except BaseException:
            # As in end_backward(): the next pass drops these gradients, on all ranks.
            if current is not None:
                current.fail()
            raise
        # Not running: the next backward queues a callback of its own.
        self.awaits_finalize = True
        # Even if gradients were reduced: the next pass uses the same parameters, so resident ones stay.
        self._end_pass(is_accumulating=True)

    def _end_pass(self, is_accumulating: bool) -> None:
        if self.current is not None:
            self.current.is_over = True
        self.current, self.orders, self.is_accumulating, self.forwards = None, [], is_accumulating, 0

    def start_reductions(self) -> Pass:
        """Reduce the gradients that no module's post-backward has reduced; return the pass, which has not ended yet."""
        # Outside of autograd, too: if this raises, the pass counts as one that raised, and its gradients are dropped.
        current = self.current = self.current or Pass()
        try:
            self.finish_orders()
            # In the order of modules, not of gradients: autograd's order may differ between ranks.
            for state in reversed(self.states):
                state.post_backward(is_last=True)
                # Groups that are still unsharded may have gradients on any rank, without a forward. Equal on all ranks, as
                # unshard() is: a rank without gradients contributes zeros.
                for group in state.groups if state.reduces_unused else ():
                    if not group.was_reached and group.is_unsharded:
                        group.expect_gradients(current)
                state.reduce_gradients()
        except BaseException:
            current.fail()
            raise
        return current

    def end_backward(self) -> None:
        """End a backward pass: reduce all other gradients, agree on unused parameters, set ``.grad``, reshard.

        Collectives: the reductions not issued yet, and per mesh one all-reduce of a byte per parameter.
        """
        with profiler_range("root_post_backward_callback", self.states[0].fqn):
            current = self.start_reductions()
            try:
                reduced: dict[Any, list[FSDPParamGroup]] = {}
                for group in self.groups:
                    # Such a group does not set .grad now. Finish its reduction, too: none stays in flight after its backward.
                    if group.dp.has_replicas and group.reduction.keeps_shards:
                        group.reduction.finish()
                    # Equal on all ranks, as are the collectives below: a group is reduced if pre-backward ran on any rank.
                    if group.reduction.was_reduced:
                        reduced.setdefault(group.dp.key, []).append(group)
                used_by: dict[Any, list[FSDPParamGroup]] = {}
                for groups in reduced.values():
                    used = _used_anywhere(groups)
                    for group in groups:
                        was_set, user = group.reduction.is_set, group.gradient_user
                        group.reduction.set_grads(used)
                        if user is not None:
                            used_by.setdefault(user, []).append(group)
                            if not was_set:
                                user.use(group)
                        # All ranks set .grad in the same pass, so what they keep gathered is out of date on all of them.
                        if group.keeper is not None:
                            group.keeper.invalidate()
                for user, groups in used_by.items():
                    user.finish(groups)
                for group in self.groups:
                    group.show_waiting()
                self.states[0].comm.forget(self.groups)
                in_forward = self.in_forward
                for state in self.states:
                    state.end_backward(in_forward)
            except BaseException:
                current.fail()
                raise
            # Last: if anything above raises, the gradients of this pass are dropped before the next one.
            self.awaits_finalize = False
            self._end_pass(not reduced and any(group.is_trainable for group in self.groups))

    def synchronize_gradients(self) -> None:
        """Reduce all gradients that wait, set ``.grad`` and reshard. The settings that made them wait are as before afterwards.

        Collectives: those of a backward with gradient sync, for groups with such gradients. None if there are none.
        """
        if self.in_forward or backward_id() != -1:
            raise RuntimeError("synchronize_gradients must be called outside of forward and backward")
        self.drop_raised_backward()
        for group in self.groups:
            group.take_back()
        if any(group.is_unsynchronized for group in self.groups):
            self._reduce_waiting()
        # The step follows: gathered parameters would be out of date, and model.parameters() must be what it changes.
        for state in self.states:
            state.reshard()

    def _reduce_waiting(self) -> None:
        """End a backward pass as if gradient sync, and the reduction over replicas, were on."""
        settings: list[tuple[Any, str]] = [(self.states[0], "is_last_backward")]
        settings += [(state, "requires_gradient_sync") for state in self.states]
        settings += [(group.settings, "requires_all_reduce") for group in self.groups]
        before = [getattr(*setting) for setting in settings]
        try:
            for owner, name in settings:
                setattr(owner, name, True)
            self.start_reductions()
            for group in self.groups:
                group.reduction.finish(takes_kept=True)
            self.end_backward()
        finally:
            for (owner, name), value in zip(settings, before):
                setattr(owner, name, value)

    def drop_raised_backward(self) -> None:
        """If the last backward raised, drop its gradients: the next pass must not add to them."""
        if self.current is not None and not self.in_backward and self.drop_backward():
            warnings.warn(
                "a backward pass raised: its gradients, and those accumulated without gradient sync, are dropped", stacklevel=2
            )

    def drop_backward(self) -> bool:
        """Drop reductions in flight and gradients that are not in ``.grad`` yet; return whether there were any."""
        self.handle, self.awaits_finalize, had_any = None, False, False
        self._end_pass(is_accumulating=False)
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
        self._pass, context.current = context.start_reductions(), None  # A forward may run before the wait.
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
        context.handle, context.current = None, self._pass
        context.end_backward()
