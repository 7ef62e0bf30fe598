"""What happens when: in the forward, the backward and between iterations of the modules under one root.

::

    FSDPState (above)     the hooks of a module. They ask
    FSDPStateContext      the root: the start and the end of an iteration and of a backward pass, for all modules
    ModuleState           one module: unshard, prefetch, reshard, reduce. It calls
    FSDPParamGroup        its groups of parameters

Nothing here hooks a module, or moves data.
"""

from __future__ import annotations

import contextlib
import itertools
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
from torch_ragged.fsdp.core.encodings._spmd_types import untyped
from torch_ragged.fsdp.core.optional._roll_call import RollCall

__all__ = ["BackwardPass", "FSDPStateContext", "GradientReductionHandle", "ModuleState"]


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
                self.unshard()
                self._must_refresh = True
                # After the wait for this module, whose all-gather must not be delayed by the next one's.
                for neighbour in self._prefetch(self.forward_prefetch, root.last_order, call.position, step=1):
                    neighbour._must_refresh = True  # It may never be called.
        if needs_backward:
            # Here and in backward: if backward raises here, this rank still knows that other ranks accumulate gradients.
            self._note_accumulation()
            if self.is_optional and call.order is not None:
                call.order.watch_entry(call.position)
        return call

    def leave_call(self, needs_backward: bool, stays_unsharded: bool) -> None:
        """The call of an optional module on another rank ends: reshard as that rank does."""
        self.watch_optional_exit(self.calls.pop(), needs_backward)
        if not stays_unsharded and (self.reshard_after_forward or not needs_backward):
            self.reshard(keep=needs_backward)

    def watch_optional_exit(self, call: Call, needs_backward: bool) -> None:
        """Backward may reach the end of an optional call, on any rank."""
        # All ranks record this event, also ranks whose backward does not reach it. Their orders must be equal.
        if call.order is not None and needs_backward:
            call.order.watch_exit(call.position)

    def unshard(self) -> None:
        """All-gather the parameters, unless they are unsharded, and register them in the modules."""
        # Issue all before waiting for one: the all-gathers of a module's groups are in flight together.
        for group in self.groups:
            group.unshard(wait=False)
        for group in self.groups:
            group.unshard()
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
        counted_by, self._gathers_in = self._gathers_in, None
        if counted_by is not None:
            counted_by.gathers -= 1
        return counted_by is not None

    def _prefetch(
        self, chosen: Sequence[ModuleState] | None, order: ForwardOrder | None, position: int, step: int
    ) -> list[ModuleState]:
        """Issue the all-gathers of ``chosen``, or of the next module in ``order``; return the states whose were issued.

        If the limit of all-gathers ahead of use is reached, an all-gather is issued when its module runs.
        """
        started = []
        # These conditions are equal on all ranks: the order, the all-gathers in flight, and the holders of slots.
        for state in self._next(order, position, step) if chosen is None else chosen:
            is_gathered, can_start = True, self.comm.gathers < self.comm.max_gathers
            for group in state.groups:
                is_gathered &= group.is_gathered
                can_start &= group.has_slot
            if can_start and not is_gathered:
                for group in state.groups:
                    group.unshard(wait=False)
                self.comm.gathers += 1
                state._gathers_in = self.comm
                started.append(state)
        return started

    def _next(self, order: ForwardOrder | None, position: int, step: int) -> list[ModuleState]:
        """The next module with parameters in ``order``, if this forward has followed it up to here."""
        states: list[Any] = order.states if order else []
        neighbour = position + step
        in_order = position >= 0 and 0 <= neighbour < len(states) and states[position] is self
        # In forward, an optional module may run on no rank. Backward follows the order within each thread only.
        while in_order and (
            not states[neighbour].groups
            or (states[neighbour] is self and len(self.modules) > 1)
            or (states[neighbour].is_optional and step > 0)
            or (step < 0 and not order.share_thread(position, neighbour))  # type: ignore[union-attr]
        ):
            neighbour += step
            in_order = 0 <= neighbour < len(states)
        return [states[neighbour]] if in_order else []

    # -- backward --------------------------------------------------------------------------------------------------

    def pre_backward(self, order: ForwardOrder | None, position: int) -> None:
        """Unshard for the backward of a call, and prefetch the module before. Equal on all ranks: see ``ForwardOrder``."""
        self._in_backward = True
        # First: if this rank raises below, it still knows which gradients other ranks reduce.
        self._expect_gradients()
        if self.groups and self.unshard_in_backward:
            with profiler_range("pre_backward", self.fqn):
                self.unshard()
                self._prefetch(self.backward_prefetch, order, position, step=-1)

    def _expect_gradients(self) -> None:
        """This rank or another one may get gradients: all ranks will reduce."""
        for group in self.groups:
            group.expect_gradients()
        self._note_accumulation()

    def expect_unsharded(self) -> None:
        """At the end of a pass: groups that are still unsharded may have gradients on any rank, without a forward."""
        # Equal on all ranks, as unshard() is. A rank without gradients contributes zeros.
        if self.reduces_unused:
            for group in self.groups:
                if group.is_unsharded and not group.was_reached:
                    group.expect_gradients()

    def _note_accumulation(self) -> None:
        if self._accumulates:
            for group in self.groups:
                group.note_accumulation()

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
        groups = [group for group in self.groups if group.needs_reduction]
        for group in groups:
            group.collect_assigned()
        if self._accumulates:
            for group in groups:
                group.accumulate_gradients()
            return
        if not groups:
            return
        # This limits the memory of gradients in flight. All ranks reach it in one order, as HSDP's all-reduces need it.
        oldest = self.comm.beyond(groups[0].settings.max_reductions)
        self.comm.forget(oldest)
        for reduction in oldest:
            reduction.finish()
        for group in groups:
            group.reduce_gradients()
        self.comm.reducing.append([group.reduction for group in groups])

    @property
    def _accumulates(self) -> bool:
        """Whether backward leaves gradients unreduced, for a later pass."""
        if not self.requires_gradient_sync:
            return True
        return self.reduces_last_only and not self.root_state.is_last_backward

    def end_backward(self) -> None:
        """The pass is over, and ``.grad`` is set."""
        if self._must_refresh and self.root_state.calls:  # Forward itself ran this backward, and uses the parameters.
            return
        if self.reshard_after_backward or not all(group.is_unsharded for group in self.groups):
            self.reshard()
        else:
            self._must_refresh = False  # They are valid until the optimizer steps, which group.is_outdated notices.

    def drop_backward(self) -> bool:
        """Drop the gradients of the backward pass; return whether there were any."""
        self._in_backward = False
        self._must_refresh = True
        self.comm.forget([group.reduction for group in self.groups])
        dropped = [group.drop_gradients() for group in self.groups]
        return any(dropped)


# -- the root ------------------------------------------------------------------------------------------------------------


class FSDPStateContext:
    """The data that the states under one root share.

    Each state has its own context until the root's first forward. From then on, all states under the root share one.

    Attributes:
        states: the states under the root, in the order of ``modules()``; the root's is the first.
        is_initialized: whether the root has run its first forward.
        order: the calls of the root's current or last forward.
        last_order: the calls of the forward before it. Prefetching follows ``last_order``.
        backward: the backward pass.
        log: compares calls between ranks; None if there is one rank, or if nothing is communicated.
        roll_call: lets ranks take part in optional modules; None if there are none.
    """

    def __init__(
        self,
        states: Sequence[ModuleState],
        is_initialized: bool = False,
        log: CallLog | None = None,
        roll_call: RollCall | None = None,
    ) -> None:
        self.states, self.is_initialized, self.log, self.roll_call = states, is_initialized, log, roll_call
        self.order, self.last_order = ForwardOrder(), ForwardOrder()
        self.backward = BackwardPass(self)

    @property
    def groups(self) -> list[FSDPParamGroup]:
        return [group for state in self.states for group in state.groups]

    @property
    def all_states(self) -> Sequence[ModuleState]:
        """``states`` under FSDP2's name, which the pipeline schedules of torch 2.11 to 2.13 read."""
        return self.states

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

    def run_skipped(self, order: ForwardOrder, events: Sequence[Event]) -> None:
        """Run the events of calls that backward has skipped on this rank: other ranks unshard and reduce for them now."""
        for position, is_pre_backward in events:
            state: Any = order.states[position]
            if is_pre_backward:
                state.pre_backward(order, position)
            else:
                state.post_backward(order.is_first(position))

    def root_post_backward(self) -> None:
        """Autograd has reached the end of a backward pass."""
        if self.states[0].finalizes_manually:
            self.pause_backward()
        else:
            self.end_backward()

    def pause_backward(self) -> None:
        """A backward pass is over; others may follow before ``finalize_backward``."""
        # Other ranks may have reached modules that backward did not reach here: take part in their collectives.
        self.backward.finish_orders()
        for state in self.states:
            state.post_backward(is_last=True)
        # Even if gradients were reduced: the next pass uses the same parameters, so resident ones stay.
        self._end_pass(is_accumulating=True)
        self.backward.pause()

    def start_reductions(self) -> None:
        """Reduce the gradients that no module's post-backward has reduced."""
        self.backward.finish_orders()
        # In the order of modules, not of gradients: autograd's order may differ between ranks.
        for state in reversed(self.states):
            state.post_backward(is_last=True)
            state.expect_unsharded()
            state.reduce_gradients()

    def end_backward(self) -> None:
        """End a backward pass: reduce all other gradients, agree on unused parameters, set ``.grad``, reshard.

        Collectives: the reductions not issued yet, and per mesh one all-reduce of a byte per parameter.
        """
        with profiler_range("root_post_backward_callback", self.states[0].fqn), self.backward.raised_on_error():
            self.start_reductions()
            # These groups do not set .grad now. Finish their reductions, too: none stays in flight after its backward.
            for group in self.groups:
                if group.reduction.keeps_shards:
                    group.reduction.finish()
            # Equal on all ranks, as are the collectives below: a group is reduced if pre-backward ran on any rank.
            reduced = [group for group in self.groups if group.reduction.was_reduced]
            for mesh in dict.fromkeys(group.dp.key for group in reduced):
                members = [group for group in reduced if group.dp.key == mesh]
                used = _used_anywhere(members)
                for group in members:
                    group.finish_gradients([next(used) for _ in group.params])
            self._end_pass(not reduced and any(group.is_trainable for group in self.groups))
            self.states[0].comm.forget([group.reduction for group in self.groups])
            for state in self.states:
                state.end_backward()
            # Last: if anything above raises, the pass counts as one that raised, and its gradients are dropped.
            self.backward.finish()

    def _end_pass(self, is_accumulating: bool) -> None:
        for group in self.groups:
            group.end_pass(is_accumulating)

    def drop_raised_backward(self) -> None:
        """If the last backward raised, drop its gradients: the next pass must not add to them."""
        if self.backward.has_raised and self.drop_backward():
            warnings.warn(
                "a backward pass raised: its gradients, and those accumulated without gradient sync, are dropped", stacklevel=2
            )

    def drop_backward(self) -> bool:
        """Drop reductions in flight and gradients that are not in ``.grad`` yet; return whether there were any."""
        self.backward.forget()
        had_any = False
        for state in self.states:
            had_any |= state.drop_backward()
        return had_any


def _used_anywhere(groups: Sequence[FSDPParamGroup]) -> Iterator[bool]:
    """For each parameter, whether any rank has a gradient for it. One small all-reduce.

    A rank reads the result only if it has a parameter without a gradient. Otherwise it need not block on a GPU.
    """
    # Issue it on all ranks, also if this rank has all gradients: another rank may need this rank's answer.
    local = [param.was_used for group in groups for param in group.params]
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


# -- the backward pass ---------------------------------------------------------------------------------------------------


class BackwardPass:
    """The backward pass of the modules under one root; one object for all passes, one after the other.

    ::

        start()          a hook of autograd runs; the first one in a pass has autograd call the root at its end
        reach(order)     its events are those of one forward of the root
        root_post_backward() of the root
        finish()         gradients are in ``.grad``; or pause(), if ``finalize_backward`` ends it

    Args:
        root: the context of the modules, with the root post-backward callback. The pass has a weak reference to it: groups hold
            the pass, and a module that outlives its model must not keep the other modules alive.

    Attributes:
        is_unfinished: whether a pass has ended, and ``finalize_backward`` has not been called since then.
        handle: the handle of a ``finalize_backward`` that was not waited for yet.
    """

    def __init__(self, root: FSDPStateContext) -> None:
        self._root = weakref.ref(root)
        # Only autograd holds the running pass, and drops it if backward raises. So a dead reference means: it raised.
        self._running: Callable[[], _Running | None] | None = None
        self.is_unfinished = False
        self.handle: object | None = None
        self._closed = ""

    @property
    def is_running(self) -> bool:
        """Whether this code runs in a backward pass of these modules that has not raised."""
        return self._running is not None and self._running() is not None and backward_id() != -1

    @property
    def has_raised(self) -> bool:
        """Whether the last pass was started and did not reach its end."""
        return self._running is not None and not self.is_running

    def start(self) -> None:
        """Let autograd call the root at the end of the current pass. If the pass was started before, do nothing.

        Raises:
            RuntimeError: the root module was deleted, or :meth:`close` was called.
        """
        if self._closed:
            raise RuntimeError(self._closed)
        # Any hook may be the first of a pass, and ranks may differ in it. So all hooks call this method.
        if self.is_running:
            return
        root = self._root()
        if root is None:
            raise RuntimeError("the root of this fully_shard module was deleted: run the module's forward before backward")
        # A pass that raised has left gradients. This pass must not add to them.
        root.drop_raised_backward()
        running = _Running(root)
        self._running = weakref.ref(running)
        Variable._execution_engine.queue_callback(running)

    def drop_raised(self) -> None:
        """If the last pass raised, drop its gradients."""
        root = self._root()
        if root is not None and self.has_raised:
            root.drop_raised_backward()

    @property
    def _orders(self) -> list[ForwardOrder]:
        """The orders that the pass has reached."""
        running = None if self._running is None else self._running()
        return [] if running is None else running.orders

    def reach(self, order: ForwardOrder) -> None:
        """Backward has reached a call in ``order``, so it has finished all later forwards."""
        # Autograd runs later forwards first: on every rank, the calls of orders reached before are finished.
        if order not in self._orders:
            self.finish_orders()
            order.restart()
            self._orders.append(order)

    def is_in(self, order: ForwardOrder) -> bool:
        """Whether backward has reached a call in ``order``."""
        return order in self._orders

    def finish_orders(self) -> None:
        """Backward reaches no further call of the orders that it has reached."""
        root = self._root()
        for order in self._orders:
            assert root is not None  # Autograd holds it in a pass.
            root.run_skipped(order, order.finish())

    def pause(self) -> None:
        """The pass is over; others may follow before ``finalize_backward``."""
        # Not running: the next backward queues a callback of its own.
        self.is_unfinished, self._running = True, None

    def finish(self) -> None:
        """The pass is over, and ``.grad`` is set."""
        self.is_unfinished, self._running = False, None

    @contextlib.contextmanager
    def raised_on_error(self) -> Iterator[None]:
        """If the block raises, set ``has_raised``, also if the block runs outside of autograd."""
        try:
            yield
        except BaseException:
            self._running = _none_runs
            raise

    def close(self, why: str) -> None:
        """From now on, a pass raises ``why``: the memory of the forward that it belongs to is freed."""
        self._closed = why

    def forget(self) -> None:
        """Return to the state before any pass."""
        self._running = self.handle = None
        self.is_unfinished = False


def _none_runs() -> None:
    """A dead reference, as to a pass that autograd has dropped."""


class _Running:
    """The running pass, which autograd calls at its end. It holds the states of all modules, so it must not live longer."""

    def __init__(self, root: FSDPStateContext) -> None:
        self._root = root
        self.orders: list[ForwardOrder] = []

    @dynamo_disabled
    @untyped
    def __call__(self) -> None:
        self._root.root_post_backward()


class GradientReductionHandle:
    """A handle on reductions that :meth:`FSDPModule.finalize_backward` has issued."""

    def __init__(self, context: FSDPStateContext) -> None:
        self._context: FSDPStateContext | None = context
        if context.backward.handle is not None:
            raise RuntimeError("wait for the handle of the last finalize_backward before finalizing backward again")
        if not context.is_initialized:  # No forward has run.
            self._context = None
            return
        with context.backward.raised_on_error():
            context.start_reductions()
        context.backward.handle = self

    def wait(self) -> None:
        """Finish the reductions, set ``.grad`` and reshard. A second call does nothing.

        Raises:
            RuntimeError: ``reset_iter_state`` has dropped the reductions.
        """
        context, self._context = self._context, None
        if context is None:
            return
        if context.backward.handle is not self:
            raise RuntimeError("the gradients of this handle were dropped by reset_iter_state")
        context.backward.handle = None
        context.end_backward()
