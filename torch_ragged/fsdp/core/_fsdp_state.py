"""Hooks: when parameters are gathered and given back, and when gradients are reduced.

Per module: pre-forward gathers (and prefetches the next group), post-forward gives back, pre-backward gathers again (and
prefetches the group before), post-backward reduces and gives back. What ends a backward pass runs once, at the root.
"""

from __future__ import annotations

import functools
import itertools
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.distributed.fsdp import MixedPrecisionPolicy

from torch_ragged._register._torch import backward_id, dynamo_disabled
from torch_ragged.fsdp.core._forward_order import Call, ForwardOrder
from torch_ragged.fsdp.core._fsdp_param_group import FSDPParamGroup
from torch_ragged.fsdp.core._tensors import map_tensors, tensors_in

__all__ = ["FSDPCommContext", "GradientReductionHandle", "FSDPState", "FSDPStateContext"]


@dataclass(eq=False)
class FSDPCommContext:
    """What bounds the communication of the states that share it (those under one root, or ``share_comm_ctx``).

    ``reducing`` are the states whose reduce-scatter is under way: one, unless more are allowed, so that at most two gradient
    buffers are held; over gloo it is through before a group of another module acquires one. ``gathering`` are those whose
    all-gather was started ahead of need: at most ``max_gathers``.
    """

    reducing: list[FSDPState] = field(default_factory=list)
    gathering: list[FSDPState] = field(default_factory=list)
    max_gathers: int = 2


@dataclass
class FSDPStateContext:
    """What the states under one root share.

    ``order`` is the order of forward calls since the root was called, ``last_order`` that of the root's call before: the
    next group is prefetched by it. ``in_use`` are the orders that the backward under way goes through. ``callback`` is what
    autograd runs at its end; autograd alone holds it, and drops it if the backward raises. ``is_unfinished`` is whether a
    backward awaits ``finalize_backward``, and ``pending`` the handle of one that has begun.
    """

    states: list[FSDPState]
    order: ForwardOrder = field(default_factory=ForwardOrder)
    last_order: ForwardOrder = field(default_factory=ForwardOrder)
    in_use: list[ForwardOrder] = field(default_factory=list)
    callback: weakref.ref[Callable[[], None]] | None = None
    is_unfinished: bool = False
    pending: GradientReductionHandle | None = None

    @property
    def all_states(self) -> list[FSDPState]:
        """As FSDP2 names ``states``: the pipeline schedules of torch 2.11 to 2.13 read it."""
        return self.states

    @property
    def in_forward(self) -> bool:
        """Whether the root is in its forward."""
        return bool(self.states[0]._calls)

    @property
    def in_backward(self) -> bool:
        """Whether this code runs in a backward pass of these modules that has not raised."""
        return self.callback is not None and self.callback() is not None and backward_id() != -1

    def queue_callback(self) -> None:
        """Have autograd end the backward pass that runs now with :meth:`end_backward`."""
        if self.in_backward:
            return
        self.forget_raised_backward()
        callback = functools.partial(self._root_post_backward)
        self.in_use = []
        self.callback = weakref.ref(callback)
        Variable._execution_engine.queue_callback(callback)

    @dynamo_disabled
    def _root_post_backward(self) -> None:
        """Runs when autograd has come to the end of a backward pass."""
        if self.states[0].finalizes_manually:
            self.pause_backward()
        else:
            self.end_backward()

    def use(self, order: ForwardOrder) -> None:
        """Backward comes to a call in ``order``: it is through with what ran behind that forward."""
        if order not in self.in_use:
            self.finish_orders()
            order.restart()
            self.in_use.append(order)

    def finish_orders(self) -> None:
        """Backward comes to no further call of the orders in use."""
        for order in self.in_use:
            order.finish()

    def pause_backward(self) -> None:
        """A backward pass is through, others may follow before ``finalize_backward``."""
        self.finish_orders()
        for state in self.states:
            state.end_of_call(is_last=True)
        self._accumulate(True)
        self.is_unfinished, self.callback = True, None

    def _accumulate(self, is_accumulating: bool) -> None:
        for state in self.states:
            for group in state.groups:
                group.gradients.is_accumulating = is_accumulating

    def start_reductions(self) -> None:
        """Reduce what is left."""
        self.finish_orders()
        for state in reversed(self.states):
            state.end_of_call(is_last=True)
            state.reduce()

    def end_backward(self) -> None:
        """Reduce what is left, agree on which parameters were used, set gradients and give everything back."""
        self.start_reductions()
        groups = [group for state in self.states for group in state.groups]
        for group in groups:
            if group.gradients.keeps_shards:
                group.gradients.finish_reduction()
        reduced = [group for group in groups if group.gradients.was_reduced]
        for mesh in dict.fromkeys(group.dp.key for group in reduced):
            members = [group for group in reduced if group.dp.key == mesh]
            used = _used_anywhere(members)
            for group in members:
                group.finish_gradients([next(used) for _ in group.params])
        self._accumulate(not reduced and any(group.is_trainable for group in groups))
        for state in self.states:
            state.end_backward(self)
        self.is_unfinished, self.callback = False, None

    def forget_raised_backward(self) -> None:
        """Drop what a backward that raised left behind: else no later one would set gradients."""
        if self.callback is not None and not self.in_backward and self.forget_backward():
            warnings.warn(
                "a backward pass raised: its gradients, and those accumulated without gradient sync, are dropped", stacklevel=2
            )

    def forget_backward(self) -> bool:
        """Drop reductions under way and gradients not yet in ``.grad``; says whether there were any."""
        self.callback = self.pending = None
        self.is_unfinished, self.in_use = False, []
        return any([state.forget_backward() for state in self.states])


class FSDPState:
    """The state that ``fully_shard`` keeps for one module, or for several that share their groups, and its hooks.

    Attributes:
        modules: that ``fully_shard`` was called on together.
        groups: of their parameters: one, unless these differ in mesh, dtype or kind of placement; none without parameters.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        groups: list[FSDPParamGroup],
        mp_policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | None,
    ) -> None:
        self.modules, self.groups, self.mp_policy = tuple(modules), groups, mp_policy
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.requires_gradient_sync = True
        self.reduces_last_only = False  # keep gradients unreduced until ``is_last_backward`` of the root
        self.is_last_backward = True
        self.finalizes_manually = False
        self.max_reductions = 1
        self.unshard_in_backward = True
        self.reduces_unused = True
        self.post_optim_event: torch.Event | None = None
        self.forward_prefetch: list[FSDPState] | None = None
        self.backward_prefetch: list[FSDPState] | None = None
        self._context: weakref.ref[FSDPStateContext] | None = None
        self._own_context: FSDPStateContext | None = (
            None  # The root's: a module that outlives it must not keep the others' shards.
        )
        self.comm = FSDPCommContext()
        self.is_root = False
        self._in_backward = False  # between pre- and post-backward: a forward call is a recomputation
        self._calls: list[Call] = []  # those that are in their forward
        self._still_to_run = set(self.modules)  # of several modules, those that have not run since the groups were given back
        self._must_refresh = False  # what is gathered may be out of date at the next iteration
        for group in groups:
            group.gradients.on_gradient = self._on_gradient
            group.gradients.make_room = self._make_room
        for module in self.modules:
            module.register_forward_pre_hook(self._pre_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._post_forward, always_call=True)

    @property
    def name(self) -> str:
        return ", ".join(type(module).__name__ for module in self.modules)

    @property
    def context(self) -> FSDPStateContext | None:
        """What this state shares with the others under its root; None before the first forward, and without a root."""
        return None if self._context is None else self._context()

    # -- root ------------------------------------------------------------------------------------------------------

    def _become_root(self) -> FSDPStateContext:
        """The first module called is the root; those inside it share its context."""
        found = [getattr(module, "_ragged_fsdp_state", None) for root in self.modules for module in root.modules()]
        states: list[FSDPState] = list(dict.fromkeys(state for state in found if state is not None))
        for state in states:
            if state.context is not None:
                raise RuntimeError(
                    f"{state.name} ran its forward before the module around it and became a root, or is "
                    "part of another root: run the outermost fully_shard module first"
                )
        for group in [group for state in states for group in state.groups]:
            group.check_late_extensions()
        context = self._own_context = FSDPStateContext(states)
        self.is_root = True
        if self.reshard_after_forward is None:
            self.reshard_after_forward = False  # The root's parameters are wanted first in backward.
        for state in states:
            state._context, state.comm = weakref.ref(context), self.comm
            if state.reshard_after_forward is None:
                state.reshard_after_forward = True
        return context

    def _start_iteration(self, context: FSDPStateContext) -> None:
        for state in context.states:
            event, state.post_optim_event = state.post_optim_event, None
            if event is not None:
                event.wait()
            state._refresh()
        context.last_order, context.order = context.order, ForwardOrder()

    def _refresh(self) -> None:
        """Have the forward that begins gather anew what an earlier one left gathered: the shards may have changed since."""
        self._calls.clear()
        self._still_to_run = set(self.modules)
        if self._must_refresh or any(group.is_outdated for group in self.groups):
            self.give_back()
        for group in self.groups:
            group.adopt_sharded()
            group.distrust_resident()

    def unshard(self) -> None:
        """Gather the parameters, and make them the modules'."""
        for group in self.groups:
            group.unshard(wait=False)
        for group in self.groups:
            group.unshard()
        if self in self.comm.gathering:
            self.comm.gathering.remove(self)

    def give_back(self, keep: bool = False) -> None:
        """Give the gathered parameters back, but for the part that neighbours ``keep`` for backward."""
        if self in self.comm.gathering:
            self.comm.gathering.remove(self)
        for group in self.groups:
            group.reshard(keep)
        self._must_refresh = any(group.keeps_part for group in self.groups)

    def forget_backward(self) -> bool:
        """Be as before the backward under way; says whether gradients were dropped."""
        self._in_backward = False
        self._must_refresh = True
        if self in self.comm.reducing:
            self.comm.reducing.remove(self)
        return any([group.gradients.drop() for group in self.groups])

    def reset(self) -> None:
        """Be as before the forward or backward under way."""
        self.forget_backward()
        self._calls.clear()
        self.give_back()

    # -- forward ---------------------------------------------------------------------------------------------------

    @dynamo_disabled
    def _pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        context = self.context or self._become_root()
        if self.mp_policy.cast_forward_inputs and self.mp_policy.param_dtype:
            args, kwargs = _cast((args, kwargs), self.mp_policy.param_dtype)
        if self._in_backward and context.in_backward:
            return args, kwargs
        context.forget_raised_backward()
        if not context.in_backward:
            if self.is_root:
                self._start_iteration(context)
            elif not context.in_forward:  # called by itself
                self._refresh()
        if self.is_root:
            args, kwargs = self._to_device(args, kwargs)
        call = Call(context.order if self.is_root or context.in_forward else None, self)
        self._calls.append(call)
        if self.groups:
            self.unshard()
            self._must_refresh = True
            for neighbour in self._prefetch(self.forward_prefetch, context.last_order, call.position, step=1):
                neighbour._must_refresh = True  # It may never be called.
        if torch.is_grad_enabled():
            for group in self.groups:  # On all ranks, also where backward raises.
                group.gradients.may_hold_sum |= self._leaves_gradients
            args, kwargs = self._watch_inputs(args, kwargs, call)
        return args, kwargs

    def _to_device(self, args: Any, kwargs: Any) -> Any:
        """The root's inputs where its parameters are; on the CPU they stay, as with FSDP2."""
        device = next((group.device for state in self.context.states for group in state.groups), None)  # type: ignore[union-attr]
        if device is None or device.type in ("cpu", "meta"):
            return args, kwargs
        return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), (args, kwargs))

    def _prefetch(
        self, chosen: list[FSDPState] | None, order: ForwardOrder | None, position: int, step: int
    ) -> list[FSDPState]:
        """Start the all-gathers of the ``chosen`` modules, or of the next in ``order``; returns whose they are.

        No more are started than may be ahead of their use; those left out are gathered when they are needed.
        """
        states = self._next(order.states if order else [], position, step) if chosen is None else chosen
        started, gathering = [], self.comm.gathering
        for state in states:
            is_gathered = all(group.is_gathered for group in state.groups)
            can_start = all(group.has_place for group in state.groups)  # Else it is gathered in its turn.
            if not is_gathered and can_start and len(gathering) < self.comm.max_gathers:
                for group in state.groups:
                    group.unshard(wait=False)
                gathering.append(state)
                started.append(state)
        return started

    def _next(self, order: list[FSDPState], position: int, step: int) -> list[FSDPState]:
        """The next module with parameters in ``order``, if it ran the same way up to here."""
        neighbour = position + step
        in_order = position >= 0 and 0 <= neighbour < len(order) and order[position] is self
        while in_order and (not order[neighbour].groups or (order[neighbour] is self and len(self.modules) > 1)):
            neighbour += step
            in_order = 0 <= neighbour < len(order)
        return [order[neighbour]] if in_order else []

    @dynamo_disabled
    def _post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Runs also, with None as output, if forward raised."""
        context = self.context
        if context is None:
            return output
        if self.mp_policy.output_dtype is not None:
            output = _cast(output, self.mp_policy.output_dtype)
        if self._in_backward and context.in_backward:
            return output
        call = self._calls.pop() if self._calls else Call(None, self)
        tensors, opaque = tensors_in(output)
        needs_backward = torch.is_grad_enabled()
        must_stay = needs_backward and not self._watch_outputs(tensors, context, call) and opaque
        if any(group.holds(tensor) for group in self.groups for tensor in tensors):
            must_stay = True  # The output is a parameter or a view of one.
        self._still_to_run.discard(module)
        if self._still_to_run or must_stay:
            return output
        self._still_to_run = set(self.modules)
        if self.reshard_after_forward or not needs_backward:
            self.give_back(keep=needs_backward)
        return output

    # -- backward --------------------------------------------------------------------------------------------------

    def _watch_outputs(self, outputs: list[torch.Tensor], context: FSDPStateContext, call: Call) -> bool:
        """Have autograd say when backward comes to an output; False if there is none that it can come to."""
        watched = [t for t in outputs if t.requires_grad and not t.is_leaf]
        if not watched:
            return False
        if call.order is not None:
            call.order.watch_exit(call.position)

        for tensor in watched:
            tensor.register_hook(functools.partial(self._pre_backward, context, call))
            base = tensor._base
            if base is not None and base.grad_fn is not None:  # An in-place operation on a view takes the first hook away.
                base.grad_fn.register_prehook(functools.partial(self._pre_backward_of_base, context, call))
        return True

    @dynamo_disabled
    def _pre_backward_of_base(self, context: FSDPStateContext, call: Call, gradients: Any) -> None:
        if call.begun_in != backward_id():
            self._pre_backward(context, call, gradients)

    @dynamo_disabled
    def _pre_backward(self, context: FSDPStateContext, call: Call, gradients: Any) -> None:
        context.queue_callback()
        if self._in_backward:
            return
        call.begun_in = backward_id()
        if call.order is not None:
            context.use(call.order)
            call.order.begin(call.position)
        self.begin_backward(call.order, call.position)

    def begin_backward(self, order: ForwardOrder | None, position: int) -> None:
        """Gather for the backward of a call, and prefetch the group before."""
        self._in_backward = True
        self._expect_gradients()
        if self.groups and self.unshard_in_backward:
            self.unshard()
            self._prefetch(self.backward_prefetch, order, position, step=-1)

    def _expect_gradients(self) -> None:
        for group in self.groups:
            group.gradients.needs_reduction |= group.is_trainable
            group.gradients.may_hold_sum |= self._leaves_gradients

    def watch_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """With ``create_graph=True``: have autograd say when a later backward comes to what computed these gradients.

        They are those of a call's inputs. What computed them reads the parameters again, before the later backward comes to
        the outputs of the call.
        """
        context = self.context or self._become_root()
        for gradient in gradients:
            if gradient is not None and gradient.requires_grad:
                gradient.register_hook(functools.partial(self._pre_double_backward, context))

    @dynamo_disabled
    def _pre_double_backward(self, context: FSDPStateContext, gradient: torch.Tensor) -> None:
        context.queue_callback()
        self._expect_gradients()
        self.unshard()

    def _on_gradient(self) -> None:
        """A parameter got a gradient, in whatever way backward came to it."""
        (self.context or self._become_root()).queue_callback()

    def _make_room(self) -> None:
        """Wait for the earliest reductions under way, so that fewer than are allowed are beside the gradient buffer to come.

        Where a buffer under reduction has another one beside it; a GPU's stream would wait here for nothing.
        """
        for state in self.comm.reducing[: max(0, len(self.comm.reducing) - self.max_reductions + 1)]:
            for group in state.groups:
                if group.collectives.holds_second_buffer(group.device):
                    group.gradients.wait_for_reduction()

    def _watch_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Have autograd say when the gradients of all inputs are there: then backward is through with this call."""
        watched = [t for t in tensors_in((args, kwargs))[0] if t.requires_grad]
        if not watched:
            return args, kwargs
        if call.order is not None:
            call.order.watch_entry(call.position)
        outputs = iter(_PostBackward.apply(self, call, *watched))
        return map_tensors(lambda t: next(outputs) if t.requires_grad else t, (args, kwargs))

    @dynamo_disabled
    def post_backward(self, call: Call) -> None:
        """Backward is through with a call."""
        if self._in_backward:
            if call.order is not None and self.context is not None and call.order in self.context.in_use:
                call.order.end(call.position)
            self.end_of_call(call.is_first)

    def end_of_call(self, is_last: bool) -> None:
        """Give the parameters back; reduce after the last call that backward comes to, which is the first in forward."""
        if not self._in_backward:
            return
        self._in_backward = False
        if self.reshard_after_backward and (is_last or len(self.modules) == 1):
            self.give_back()
        if is_last:
            self.reduce()

    def reduce(self) -> None:
        """Start the reduction of gradients that backward has brought here."""
        groups = [group for group in self.groups if group.gradients.needs_reduction]
        if self._leaves_gradients:
            for group in groups:
                group.gradients.may_hold_sum = True
                group.gradients.widen()
            return
        if not groups:
            return
        reducing = self.comm.reducing
        while len(reducing) >= self.max_reductions:
            for group in reducing.pop(0).groups:
                group.gradients.finish_reduction()
        for group in groups:
            group.gradients.start_reduction(self.reduces_narrow(group))
        reducing.append(self)

    @property
    def _leaves_gradients(self) -> bool:
        """Whether backward leaves gradients unreduced, for later ones to add to."""
        waits = self.reduces_last_only and self.context is not None and not self.context.states[0].is_last_backward
        return waits or not self.requires_gradient_sync

    def reduces_narrow(self, group: FSDPParamGroup) -> bool:
        """Whether the next reduction of a group is of gradients as they came: then all ranks know that it is.

        They do where every pass gathers the group, so that all have made the same ones since the last one. Of a group that
        stays gathered, ranks may add up the gradients of different numbers of passes.
        """
        return group.neighbours is None and group.resident is None and group.gradients.can_reduce_narrow

    def end_backward(self, context: FSDPStateContext) -> None:
        """Backward is at its end, and gradients are set."""
        if self in self.comm.reducing:
            self.comm.reducing.remove(self)
        if context.in_forward and self._must_refresh:  # Forward itself computes gradients, and goes on with these parameters.
            return
        if self.reshard_after_backward or not all(group.is_unsharded for group in self.groups):
            self.give_back()
        else:
            self._must_refresh = False  # Until the optimizer steps, which group.is_outdated notices, the parameters are valid.

    # -- what pipeline schedules call ------------------------------------------------------------------------------
    # Those of torch 2.11 to 2.13 reach into FSDP2's private state to reduce gradients; 2.15's call public methods.

    @property
    def _state_ctx(self) -> FSDPStateContext:
        return self.context or self._become_root()

    @property
    def _comm_ctx(self) -> FSDPCommContext:
        return self.comm

    @property
    def _fsdp_param_groups(self) -> list[FSDPParamGroup]:
        """Empty: :meth:`_root_post_backward_final_callback` reduces all gradients, so that no group has to."""
        return []

    def _root_post_backward_final_callback(self) -> None:
        """Reduce the gradients that micro-batches have accumulated, set ``.grad`` and reshard."""
        self._state_ctx.end_backward()


class _PostBackward(torch.autograd.Function):
    """Identity on a module's inputs; its backward runs when backward is through with the module."""

    @staticmethod
    def forward(ctx: Any, state: FSDPState, call: Call, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.state, ctx.call = state, call
        ctx.set_materialize_grads(False)  # An unused input has no gradient, not one of zeros.
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():
            ctx.state.watch_gradients(gradients)
        ctx.state.post_backward(ctx.call)
        return (None, None, *gradients)


class GradientReductionHandle:
    """A handle on reductions that :meth:`FSDPModule.finalize_backward` has started."""

    def __init__(self, context: FSDPStateContext | None) -> None:
        self._context = context
        if context is None:  # No forward was run.
            return
        if context.pending is not None:
            raise RuntimeError("wait for the handle of the last finalize_backward before finalizing backward again")
        context.start_reductions()
        context.pending = self

    def wait(self) -> None:
        """Finish the reductions, set ``.grad`` and give parameters back. Nothing happens the second time.

        Raises:
            RuntimeError: the reductions were dropped, by ``reset_iter_state``.
        """
        context, self._context = self._context, None
        if context is None:
            return
        if context.pending is not self:
            raise RuntimeError("the gradients of this handle were dropped by reset_iter_state")
        context.pending = None
        context.end_backward()


def _used_anywhere(groups: list[FSDPParamGroup]) -> Any:
    """For every parameter in turn, whether any rank had a gradient of it. One small all-reduce per mesh and backward.

    A rank reads the answer only if it has a parameter without a gradient, so that a GPU need not be waited for.
    """
    local = [param.was_used for group in groups for param in group.params]
    flags = torch.ones(len(local), dtype=torch.uint8, device=groups[0].device)
    position = 0
    for is_used, run in itertools.groupby(local):  # By fills: a copy from the host would wait for the GPU, and break a capture.
        stop = position + len(list(run))
        if not is_used:
            flags[position:stop].zero_()
        position = stop
    groups[0].collectives.all_reduce_max(flags).wait()
    if all(local):
        return iter(local)
    trainable = [param.sharded.requires_grad for group in groups for param in group.params]
    if all(used or not needed for used, needed in zip(local, trainable)):
        return iter(local)
    return iter([bool(flag) for flag in flags.tolist()])


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, values)
