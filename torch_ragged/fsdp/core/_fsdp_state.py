"""FSDPState: the state of a module after ``fully_shard``, and the module hooks that unshard, reshard and reduce.

::

    pre-forward     unshard this module's groups; prefetch the next ones
    post-forward    reshard
    pre-backward    unshard again; prefetch the groups before
    post-backward   reshard; reduce the gradients
    root post-backward callback, once per pass: reduce all other gradients, set ``.grad``, reshard everything

It moves no data: its groups do.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from torch_ragged._register._torch import backward_id, dynamo_disabled, dynamo_disabled_in_backward, profiler_range
from torch_ragged.fsdp.core._backward_pass import BackwardPass
from torch_ragged.fsdp.core._comm_context import FSDPCommContext
from torch_ragged.fsdp.core._forward_order import Call, ForwardOrder
from torch_ragged.fsdp.core._fsdp_param_group import FSDPParamGroup
from torch_ragged.fsdp.core._tensors import map_tensors, tensors_in
from torch_ragged.fsdp.core._used_params import used_anywhere

__all__ = ["STATE", "FSDPState", "FSDPStateContext"]

STATE = "_ragged_fsdp_state"
"""The attribute under which a module keeps its state."""


class FSDPStateContext:
    """The data that the states under one root share.

    Each state has its own context until the root's first forward. From then on, all states under the root share one.

    Attributes:
        states: the states under the root, in the order of ``modules()``; the root's is the first.
        is_initialized: whether the root has run its first forward.
        order: the calls of the root's current or last forward.
        last_order: the calls of the forward before it. Prefetching follows ``last_order``.
        backward: the backward pass.
    """

    def __init__(self, states: list[FSDPState], is_initialized: bool) -> None:
        self.states, self.is_initialized = states, is_initialized
        self.order, self.last_order = ForwardOrder(), ForwardOrder()
        self.backward = BackwardPass(self)

    @property
    def groups(self) -> list[FSDPParamGroup]:
        return [group for state in self.states for group in state.groups]

    @property
    def all_states(self) -> list[FSDPState]:
        """``states`` under FSDP2's name, which the pipeline schedules of torch 2.11 to 2.13 read."""
        return self.states

    @property
    def in_forward(self) -> bool:
        """Whether the root is in its forward."""
        return bool(self.states[0].calls)

    def start_iteration(self) -> None:
        """The root's forward begins."""
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
            if state.comm.forget_gathering(state):
                state.reshard()

    # -- the end of backward ---------------------------------------------------------------------------------------

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
        self._mark_accumulating(True)
        self.backward.pause()

    def start_reductions(self) -> None:
        """Reduce the gradients that no module's post-backward has reduced."""
        self.backward.finish_orders()
        # In the order of modules, not of gradients: autograd's order may differ between ranks.
        for state in reversed(self.states):
            state.post_backward(is_last=True)
            state.reduce_gradients()

    def end_backward(self) -> None:
        """End a backward pass: reduce all other gradients, agree on unused parameters, set ``.grad``, reshard.

        Collectives: the reductions not issued yet, and per mesh one all-reduce of a byte per parameter.
        """
        with profiler_range("root_post_backward_callback", self.states[0].fqn), self.backward.raised_on_error():
            self.start_reductions()
            # These groups do not set .grad now. Finish their reductions, too: none stays in flight after its backward.
            for group in self.groups:
                if group.gradients.keeps_shards:
                    group.gradients.finish_reduction()
            # Equal on all ranks, as are the collectives below: a group is reduced if pre-backward ran on any rank.
            reduced = [group for group in self.groups if group.gradients.was_reduced]
            for mesh in dict.fromkeys(group.dp.key for group in reduced):
                members = [group for group in reduced if group.dp.key == mesh]
                used = used_anywhere(members)
                for group in members:
                    group.finish_gradients([next(used) for _ in group.params])
            self._mark_accumulating(not reduced and any(group.is_trainable for group in self.groups))
            for state in self.states:
                state.end_backward()
            # Last: if anything above raises, the pass counts as one that raised, and its gradients are dropped.
            self.backward.finish()

    def _mark_accumulating(self, is_accumulating: bool) -> None:
        for group in self.groups:
            group.gradients.is_accumulating = is_accumulating

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


class FSDPState:
    """The state of one module, or of several modules that share their groups, and the module hooks.

    Attributes:
        modules: the modules of one call of ``fully_shard``.
        groups: the groups of their parameters: several if these differ in mesh, dtype or kind of placement.
        calls: the forward calls that run now; the innermost is the last.
        reduces_last_only: whether gradients stay unreduced until the root's ``is_last_backward`` (``ZERO1``).
        max_reductions: how many modules' reduce-scatters may be in flight.
        unshard_in_backward: whether backward needs the parameters.
        reduces_unused: whether a group without gradients on this rank takes part in collectives.
        forward_prefetch, backward_prefetch: the states to all-gather ahead; None: the next one.
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
        self.reduces_last_only = False
        self.is_last_backward = True
        self.finalizes_manually = False
        self.max_reductions = 1
        self.unshard_in_backward = True
        self.reduces_unused = True
        self.post_optim_event: torch.Event | None = None
        self.forward_prefetch: list[FSDPState] | None = None
        self.backward_prefetch: list[FSDPState] | None = None
        self.is_root = False
        self.calls: list[Call] = []
        self._in_backward = False  # Between pre- and post-backward. A forward call then is a recomputation.
        self._still_to_run = set(self.modules)  # The modules that have not run since the last reshard.
        self._must_refresh = False  # Unsharded parameters may be out of date in the next iteration.
        self.fqn = ""
        # The root owns the context; before the first forward, each state owns one.
        self._owned_context: FSDPStateContext | None = FSDPStateContext([self], is_initialized=False)
        self._share(self._owned_context, FSDPCommContext())
        for module in self.modules:
            module.register_forward_pre_hook(self._pre_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._post_forward, always_call=True)

    @property
    def name(self) -> str:
        return ", ".join(type(module).__name__ for module in self.modules)

    # -- the root --------------------------------------------------------------------------------------------------

    @property
    def context(self) -> FSDPStateContext:
        """The context that this state shares with the others under its root."""
        context = self._context()
        if context is None:  # The root was deleted: this module may become a root.
            context = self._owned_context = FSDPStateContext([self], is_initialized=False)
            self._share(context, FSDPCommContext())
        return context

    @property
    def comm(self) -> FSDPCommContext:
        return self._comm

    def share_comm(self, comm: FSDPCommContext) -> None:
        """Let ``comm`` limit this state's communication."""
        self._comm = comm
        for group in self.groups:
            group.gradients.comm = comm

    def _share(self, context: FSDPStateContext, comm: FSDPCommContext) -> None:
        # By a weak reference: a module that outlives its model must not keep the shards of all others.
        self._context = weakref.ref(context)
        self.share_comm(comm)
        for group in self.groups:
            group.gradients.backward = context.backward

    def _lazy_init(self) -> None:
        """Make this module the root, as its forward runs first. All states under it share its context from now on."""
        found = [getattr(module, STATE, None) for root in self.modules for module in root.modules()]
        states: list[FSDPState] = list(dict.fromkeys(state for state in found if state is not None))
        for state in states:
            if state.context.is_initialized:
                raise RuntimeError(
                    f"{state.name} became a root when it ran its forward before the module around it, or it is "
                    "part of another root: run the forward of the outermost fully_shard module first"
                )
        for group in [group for state in states for group in state.groups]:
            group.check_late_extensions()
        context = self._owned_context = FSDPStateContext(states, is_initialized=True)
        self.is_root = True
        if self.reshard_after_forward is None:
            self.reshard_after_forward = False  # Backward needs the root's parameters first.
        for state in states:
            state._share(context, self.comm)
            if state is not self:
                state._owned_context = None
            if state.reshard_after_forward is None:
                state.reshard_after_forward = True
        for name, module in (pair for root in self.modules for pair in root.named_modules()):
            if hasattr(module, STATE):
                getattr(module, STATE)._set_name(name or "root")

    def _set_name(self, fqn: str) -> None:
        """Set the name, unless another module of this state has set it."""
        self.fqn = self.fqn or fqn
        for index, group in enumerate(self.groups):
            group.fqn = group.gradients.fqn = f"{self.fqn}[{index}]" if index else self.fqn

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

    def unshard(self) -> None:
        """All-gather the parameters, unless they are unsharded, and register them in the modules."""
        # Issue all before waiting for one: the all-gathers of a module's groups are in flight together.
        for group in self.groups:
            group.unshard(wait=False)
        for group in self.groups:
            group.unshard()
        self.comm.forget_gathering(self)

    def reshard(self, keep: bool = False) -> None:
        """Free the unsharded parameters. If ``keep``, the keeper may keep a part for backward."""
        self.comm.forget_gathering(self)
        for group in self.groups:
            group.reshard(keep)
        # A kept part has the current values. If a new forward begins before backward, it drops the part.
        self._must_refresh = any(group.keeper.holds_part for group in self.groups)

    def reset(self) -> None:
        """Return to the state before the current forward and backward."""
        self.drop_backward()
        self.calls.clear()
        self.reshard()

    # -- forward ---------------------------------------------------------------------------------------------------

    @dynamo_disabled
    def _pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.context.is_initialized:
            self._lazy_init()
        context = self.context
        if self.mp_policy.cast_forward_inputs and self.mp_policy.param_dtype:
            args, kwargs = _cast((args, kwargs), self.mp_policy.param_dtype)
        if self._in_backward and context.backward.is_running:  # Activation checkpointing recomputes this call.
            return args, kwargs
        context.drop_raised_backward()
        if not context.backward.is_running:  # A forward inside backward belongs to the same iteration.
            if self.is_root:
                context.start_iteration()
            elif not context.in_forward:  # The user calls this module by itself.
                self.refresh()
        if self.is_root:
            args, kwargs = self._to_device(args, kwargs)
        call = Call(context.order if self.is_root or context.in_forward else None, self)
        self.calls.append(call)
        with profiler_range("pre_forward", self.fqn):
            if self.groups:
                self.unshard()
                self._must_refresh = True
                # After the wait for this module, whose all-gather must not be delayed by the next one's.
                for neighbour in self._prefetch(self.forward_prefetch, context.last_order, call.position, step=1):
                    neighbour._must_refresh = True  # It may never be called.
        if torch.is_grad_enabled():
            # Here and in backward: if backward raises here, this rank still knows that other ranks accumulate gradients.
            self._note_accumulation()
            args, kwargs = self._watch_inputs(args, kwargs, call)
        return args, kwargs

    def _to_device(self, args: Any, kwargs: Any) -> Any:
        """The root's inputs on the device of its parameters. On the CPU they stay where they are, as with FSDP2."""
        device = next((group.device for group in self.context.groups), None)
        if device is None or device.type in ("cpu", "meta"):
            return args, kwargs
        return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), (args, kwargs))

    def _prefetch(
        self, chosen: list[FSDPState] | None, order: ForwardOrder | None, position: int, step: int
    ) -> list[FSDPState]:
        """Issue the all-gathers of ``chosen``, or of the next module in ``order``; return the states whose were issued.

        If the limit of all-gathers ahead of use is reached, an all-gather is issued when its module runs.
        """
        states = self._next(order.states if order else [], position, step) if chosen is None else chosen
        started = []
        # These conditions are equal on all ranks: the order, the all-gathers in flight, and the holders of slots.
        for state in states:
            is_gathered = all(group.is_gathered for group in state.groups)
            can_start = all(group.has_slot for group in state.groups)
            if not is_gathered and can_start and self.comm.may_gather_ahead:
                for group in state.groups:
                    group.unshard(wait=False)
                self.comm.add_gathering(state)
                started.append(state)
        return started

    def _next(self, order: list[Any], position: int, step: int) -> list[FSDPState]:
        """The next module with parameters in ``order``, if this forward has followed it up to here."""
        neighbour = position + step
        in_order = position >= 0 and 0 <= neighbour < len(order) and order[position] is self
        while in_order and (not order[neighbour].groups or (order[neighbour] is self and len(self.modules) > 1)):
            neighbour += step
            in_order = 0 <= neighbour < len(order)
        return [order[neighbour]] if in_order else []

    @dynamo_disabled
    def _post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Reshard after forward. If forward raised, this runs with None as output."""
        context = self.context
        if not context.is_initialized:
            return output
        if self.mp_policy.output_dtype is not None:
            output = _cast(output, self.mp_policy.output_dtype)
        if self._in_backward and context.backward.is_running:
            return output
        call = self.calls.pop() if self.calls else Call(None, self)
        tensors, opaque = tensors_in(output)
        # If only a tensor inside an opaque output may reach backward, no hook would unshard again: stay unsharded.
        needs_backward = torch.is_grad_enabled()
        must_stay = needs_backward and not self._watch_outputs(tensors, context, call) and opaque
        if any(group.holds(tensor) for group in self.groups for tensor in tensors):
            must_stay = True  # The output is a parameter or a view of one.
        # Modules that share their groups reshard once, after the last of them.
        self._still_to_run.discard(module)
        if self.is_root and not needs_backward:
            context.drop_unused_prefetches()
        if self._still_to_run or must_stay:
            return output
        self._still_to_run = set(self.modules)
        if self.reshard_after_forward or not needs_backward:
            self.reshard(keep=needs_backward)
        return output

    # -- backward --------------------------------------------------------------------------------------------------

    def _watch_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Let post-backward run when autograd has the gradients of all inputs."""
        watched = [t for t in tensors_in((args, kwargs))[0] if t.requires_grad]
        if not watched:
            return args, kwargs
        if call.order is not None:
            call.order.watch_entry(call.position)
        outputs = iter(_PostBackward.apply(self, call, *watched))
        return map_tensors(lambda t: next(outputs) if t.requires_grad else t, (args, kwargs))

    def _watch_outputs(self, outputs: list[torch.Tensor], context: FSDPStateContext, call: Call) -> bool:
        """Let pre-backward run when backward reaches an output; return whether it can reach one."""
        watched = [t for t in outputs if t.requires_grad and not t.is_leaf]
        if not watched:
            return False
        if call.order is not None:
            call.order.watch_exit(call.position)
        # Hooks hold the context of this forward: the module may have another root when backward runs.
        for tensor in watched:
            tensor.register_hook(functools.partial(self._pre_backward, context, call))
            base = tensor._base
            if base is not None and base.grad_fn is not None:  # An in-place operation on a view removes the first hook.
                base.grad_fn.register_prehook(functools.partial(self._pre_backward_of_base, context, call))
        return True

    @dynamo_disabled_in_backward
    def _pre_backward_of_base(self, context: FSDPStateContext, call: Call, gradients: Any) -> None:
        if call.begun_in != backward_id():
            self._pre_backward(context, call, gradients)

    @dynamo_disabled_in_backward
    def _pre_backward(self, context: FSDPStateContext, call: Call, gradients: Any) -> None:
        """Backward has reached an output of a call."""
        context.backward.start()
        if self._in_backward:
            return
        call.begun_in = backward_id()
        if call.order is not None:
            # First, take part for later calls that backward skips here: other ranks unshard and reduce for them now.
            context.backward.reach(call.order)
            call.order.begin(call.position)
        self.pre_backward(call.order, call.position)

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
            group.gradients.needs_reduction |= group.is_trainable
        self._note_accumulation()

    def _note_accumulation(self) -> None:
        if self._accumulates:
            for group in self.groups:
                group.gradients.note_accumulation()

    def watch_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """With ``create_graph=True``: unshard when a later backward reaches the nodes that computed these gradients.

        ``gradients`` are those of a call's inputs. Their nodes read the parameters again, before the later backward reaches the
        outputs of the call.
        """
        context = self.context
        for gradient in gradients:
            if gradient is not None and gradient.requires_grad:
                gradient.register_hook(functools.partial(self._pre_double_backward, context))

    @dynamo_disabled_in_backward
    def _pre_double_backward(self, context: FSDPStateContext, gradient: torch.Tensor) -> None:
        context.backward.start()
        self._expect_gradients()
        self.unshard()

    @dynamo_disabled_in_backward
    def _post_backward(self, call: Call) -> None:
        """Autograd has the gradients of all inputs of a call."""
        if self._in_backward:
            if call.order is not None and self.context.backward.is_in(call.order):
                call.order.end(call.position)
            self.post_backward(call.is_first)

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
        groups = [group for group in self.groups if group.gradients.needs_reduction]
        if self._accumulates:
            # Gradients accumulate in reduce_dtype: many passes in a narrow dtype would lose precision.
            for group in groups:
                group.gradients.note_accumulation()
                group.gradients.widen()
            return
        if not groups:
            return
        # This limits the memory of gradients in flight. All ranks reach it in one order, as HSDP's all-reduces need it.
        self.comm.finish_reductions(self.max_reductions)
        for group in groups:
            group.reduce_gradients()
        self.comm.add_reduction([group.gradients for group in groups])

    @property
    def _accumulates(self) -> bool:
        """Whether backward leaves gradients unreduced, for a later pass."""
        waits = self.reduces_last_only and self.context.is_initialized and not self.context.states[0].is_last_backward
        return waits or not self.requires_gradient_sync

    def end_backward(self) -> None:
        """The pass is over, and ``.grad`` is set."""
        self.comm.forget([group.gradients for group in self.groups])
        if self.context.in_forward and self._must_refresh:  # Forward itself ran this backward, and uses the parameters.
            return
        if self.reshard_after_backward or not all(group.is_unsharded for group in self.groups):
            self.reshard()
        else:
            self._must_refresh = False  # They are valid until the optimizer steps, which group.is_outdated notices.

    def drop_backward(self) -> bool:
        """Drop the gradients of the backward pass; return whether there were any."""
        self._in_backward = False
        self._must_refresh = True
        self.comm.forget([group.gradients for group in self.groups])
        dropped = [group.gradients.drop() for group in self.groups]
        return any(dropped)

    # -- what pipeline schedules call ------------------------------------------------------------------------------
    # The schedules of torch 2.11 to 2.13 reduce gradients by FSDP2's private names; those of 2.15 call public methods.

    @property
    def _state_ctx(self) -> FSDPStateContext:
        return self.context

    @property
    def _comm_ctx(self) -> FSDPCommContext:
        return self.comm

    @property
    def _fsdp_param_groups(self) -> list[FSDPParamGroup]:
        """Empty: :meth:`_root_post_backward_final_callback` reduces the gradients of all groups."""
        return []

    @property
    def _fsdp_param_group(self) -> None:
        """The same for torch 2.11, whose states have one group or none."""

    def _root_post_backward_final_callback(self) -> None:
        """Reduce the gradients that micro-batches have accumulated, set ``.grad`` and reshard."""
        self.context.end_backward()


class _PostBackward(torch.autograd.Function):
    """Identity on a module's inputs. Its backward runs when autograd has the gradients of all of them."""

    @staticmethod
    def forward(ctx: Any, state: FSDPState, call: Call, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.state, ctx.call = state, call
        ctx.set_materialize_grads(False)  # An unused input has no gradient, not one of zeros.
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():
            ctx.state.watch_gradients(gradients)
        ctx.state._post_backward(ctx.call)
        return (None, None, *gradients)


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, values)
