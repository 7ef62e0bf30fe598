"""From torch's hooks to the state of a module: which of its methods run when, in forward and in backward.

::

    pre-forward     unshard this module's groups; prefetch the next ones
    post-forward    reshard
    pre-backward    unshard again; prefetch the groups before
    post-backward   reshard; reduce the gradients
    root post-backward callback, once per pass: reduce all other gradients, set ``.grad``, reshard everything

It moves no data: the groups do.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from torch_ragged._register._spmd_types import annotated_as, untyped
from torch_ragged._register._torch import (
    GradientUse,
    backward_id,
    current_autograd_node,
    dynamo_disabled,
    dynamo_disabled_in_backward,
    gradient_use,
    next_sequence_number,
)
from torch_ragged.fsdp.core._forward_order import Call
from torch_ragged.fsdp.core._fsdp_state import FSDPState, FSDPStateContext
from torch_ragged.fsdp.core.encodings._plain import Phase

__all__ = ["hook_modules", "map_tensors", "tensors_in"]


def hook_modules(state: FSDPState) -> None:
    """From now on, torch tells ``state`` of each forward and backward of its modules."""
    hooks = _Hooks(state)
    state._pre_forward, state._post_forward = hooks.pre_forward, hooks.post_forward
    for module in state.modules:
        # Before the user's own pre-hooks, which may read parameters. After forward also if it raised, so that calls stay
        # paired.
        module.register_forward_pre_hook(hooks.pre_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(hooks.post_forward, always_call=True)


class _Hooks:
    """The hooks of the modules of one state.

    They hold what only they need: the probe, and when the last forward ended.
    """

    def __init__(self, state: FSDPState) -> None:
        self._state = state
        self._probe: torch.Tensor | None = None
        self._ended_at = 0  # The number of the first autograd node after the last forward.

    # -- forward ---------------------------------------------------------------------------------------------------

    @dynamo_disabled
    @untyped
    def pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state = self._state
        if not state.context.is_initialized:
            state.become_root()
        context, policy = state.context, state.mp_policy
        if policy.cast_forward_inputs and policy.param_dtype:
            args, kwargs = _cast((args, kwargs), policy.param_dtype)
        in_backward = context.in_backward
        if in_backward and state.in_backward:  # Activation checkpointing recomputes this call.
            return args, kwargs
        # The recomputation of a module around it calls this one. Other ranks may have no such call, and do not gather.
        if in_backward and state.is_optional and not all(group.is_unsharded for group in state.groups):
            raise RuntimeError(
                f"{state.fqn} is optional and is recomputed in backward together with other modules, so that other ranks "
                "cannot take part in its all-gather: checkpoint the optional module by itself, with use_reentrant=False"
            )
        # The last backward may have raised on this rank. Its gradients must not be added to those of this iteration.
        if context.current is not None:
            context.drop_raised_backward()
        if not in_backward:  # A forward inside backward belongs to the same iteration.
            if state.is_root or not context.in_forward:
                context.forwards += torch.is_grad_enabled()
            if state.is_root:
                context.start_iteration()
            elif not context.in_forward:  # The user calls this module by itself.
                state.refresh()
        device = context.groups[0].device if state.is_root and context.groups else None
        if device is not None and device.type not in ("cpu", "meta"):  # On the CPU they stay where they are, as with FSDP2.
            args, kwargs = map_tensors(lambda tensor: tensor.to(device, non_blocking=True), (args, kwargs))
        has_grad = torch.is_grad_enabled()
        gate = None if context.gate is None else context.gate_for(state)
        call = state.enter_call(context, has_grad if gate is None else gate.before_call(state, has_grad))
        # Post-backward runs when autograd has the gradients of all inputs. If no input has one, there is no node: then the end
        # of the pass runs it, in the order of modules.
        watched = [tensor for tensor in tensors_in((args, kwargs))[0] if tensor.requires_grad] if has_grad else ()
        if watched:
            if call.order is not None and not state.is_optional:
                call.order.watch(call.position, is_exit=False)
            call.probe = self._probe_of_groups()
            outputs = iter(_PostBackward.apply(self, call, call.probe, *watched))
            args, kwargs = map_tensors(lambda t: next(outputs) if t.requires_grad else t, (args, kwargs))
        return args, kwargs

    @dynamo_disabled
    @untyped
    def post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Reshard after forward. If forward raised, this runs with None as output."""
        state = self._state
        context = state.context
        if not context.is_initialized:  # Pre-forward has raised before it found a root.
            return output
        if state.mp_policy.output_dtype is not None:
            output = _cast(output, state.mp_policy.output_dtype)
        if state.in_backward and context.in_backward:
            return output
        # Not in a recomputation, above: backward needs the parameters next, and the first call has set its hooks.
        needs_backward, (tensors, opaque) = torch.is_grad_enabled(), tensors_in(output)
        watched = [tensor for tensor in tensors if needs_backward and tensor.requires_grad and not tensor.is_leaf]
        # If only a tensor inside an opaque output may reach backward, no hook would unshard again: stay unsharded.
        must_stay = needs_backward and opaque and not watched
        for group in state.groups:  # The same if the output is a parameter or a view of one.
            for tensor in tensors:
                must_stay |= group.encoding.holds(tensor)
        # A checkpoint recomputes this forward for a node inside of it, or for the first one behind it, which backward has
        # reached before an output: backward needs the parameters next.
        node = current_autograd_node() if needs_backward else None
        if node is None:
            self._ended_at = next_sequence_number()
        must_stay |= node is not None and node._sequence_nr() <= self._ended_at
        gate = None if context.gate is None else context.gate_for(state)
        # For an optional module, other ranks wait here, and reshard or stay unsharded as this one does. A call that has raised
        # does not wait for them: they may be in an all-gather that this rank will not join, and the error must come out.
        if gate is not None and (output is not None or not state.calls or not state.calls[-1].has_raised):
            needs_backward, must_stay = gate.after_call(state, needs_backward, must_stay)
        elif gate is not None and state.is_root:
            gate.forward_raised()
        call = state.leave_call(module, needs_backward, must_stay, is_watched=bool(watched))
        # Hooks hold the context of this forward: the module may have another root when backward runs.
        for tensor in watched:
            # On each output: ranks may differ in which gradient comes first, and only the first one of a call acts.
            tensor.register_hook(functools.partial(self.pre_backward, context, call, False))
            base = tensor._base
            if base is not None and base.grad_fn is not None:  # An in-place operation on a view removes the first hook.
                base.grad_fn.register_prehook(functools.partial(self.pre_backward, context, call, True))
        return output

    # -- backward --------------------------------------------------------------------------------------------------

    @dynamo_disabled_in_backward
    def pre_backward(self, context: FSDPStateContext, call: Call, is_base: bool, gradients: Any) -> None:
        """Backward has reached an output of a call, or the base that an output is a view of."""
        if is_base and call.begun_in == backward_id():  # The output's own hook has run in this pass.
            return
        state, current = self._state, context.start_backward()
        if state.in_backward:
            return
        # Not for further outputs of a call, or if backward is in another call of this module already.
        call.begun_in = backward_id()
        if not state.requires_gradient_sync:
            self._check_split_backward(call)
        if call.order is not None:
            # First, take part for later calls that backward skips here: other ranks unshard and reduce for them now.
            context.reach(call.order)
            for event in call.order.reach(call.position, is_exit=True):
                context.run_skipped(call.order, event)
        state.pre_backward(current, call.order, call.position)

    @dynamo_disabled_in_backward
    def pre_double_backward(self, context: FSDPStateContext, gradient: torch.Tensor) -> None:
        """A later backward has reached the nodes that have computed the gradients of a call's inputs."""
        current = context.start_backward()
        for group in self._state.groups:
            group.expect_gradients(current, self._state.accumulates)
        self._state.unshard(Phase.BOTH)

    @dynamo_disabled_in_backward
    def post_backward(self, call: Call) -> None:
        """Autograd has the gradients of all inputs of a call."""
        state, order = self._state, call.order
        if not state.in_backward:
            return
        context = state.context
        if order is not None and order in context.orders:
            for event in order.reach(call.position, is_exit=False):
                context.run_skipped(order, event)
        state.post_backward(order is None or order.is_first(call.position))

    # -- pipelines -------------------------------------------------------------------------------------------------

    def _probe_of_groups(self) -> torch.Tensor | None:
        """A leaf without elements, an input of each call whose inputs have gradients. A pass for those alone leaves it out."""
        if self._probe is None and self._state.groups:  # One for all calls: it has no value, and gets no gradient.
            with torch.inference_mode(False):
                self._probe = torch.empty(0, device=self._state.groups[0].device, requires_grad=True)
        return self._probe

    def _check_split_backward(self, call: Call) -> None:
        """Raise if a pipeline schedule that splits backward would lose gradients of this module.

        Such a schedule (zero bubble) looks up the registered parameters, computes the gradients of inputs, and later those of
        the parameters that it has found. It does not find unsharded parameters if they are not registered before backward.

        Raises:
            RuntimeError: the parameters are sharded in a backward that computes the gradients of inputs only.
        """
        root = self._state.context.states[0]
        is_pipeline = root.finalizes_manually or not root.is_last_backward
        if not is_pipeline or torch.is_grad_enabled() or call.probe is None:
            return
        if gradient_use(get_gradient_edge(call.probe).node) is not GradientUse.NONE:
            return
        for group in self._state.groups:
            if group.is_trainable and not group.is_unsharded:
                raise RuntimeError(
                    f"{group.names} was resharded after forward, and this backward computes the gradients of inputs only: a "
                    "pipeline schedule that computes the gradients of parameters later, such as ZBVZeroBubble, would lose "
                    "them. Pass reshard_after_forward=False to fully_shard"
                )


class _PostBackward(torch.autograd.Function):
    """Identity on a module's inputs. Its backward runs when autograd has the gradients of all of them."""

    @staticmethod
    def forward(
        ctx: Any, hooks: _Hooks, call: Call, probe: torch.Tensor | None, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.hooks, ctx.call = hooks, call
        ctx.set_materialize_grads(False)  # An unused input has no gradient, not one of zeros.
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        hooks: _Hooks = ctx.hooks
        # With create_graph=True, a later backward reaches the nodes that have computed these gradients, and these read the
        # parameters again, before it reaches the outputs of the call.
        for gradient in gradients if torch.is_grad_enabled() else ():
            if gradient is not None and gradient.requires_grad:
                gradient.register_hook(functools.partial(hooks.pre_double_backward, hooks._state.context))
        hooks.post_backward(ctx.call)
        return (None, None, None, *gradients)


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, values)


# -- tensors in inputs and outputs -----------------------------------------------------------------------------------------

_WITHOUT_TENSORS = (type(None), int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Apply ``function`` to each tensor in ``value``: in pytree's containers, sets, packed sequences and dataclasses.

    Containers in the result are new, of the same type. Other objects are not changed. A result has its tensor's annotation of
    ``spmd_types``: ``function`` must not change values, but for their dtype.
    """
    # Mostly tensors in plain containers, twice in each forward: pytree takes ten times as long.
    if isinstance(value, torch.Tensor):
        return annotated_as(value, function(value))
    if isinstance(value, _WITHOUT_TENSORS):
        return value
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([map_tensors(function, part) for part in value])
    if kind is dict:
        return {key: map_tensors(function, part) for key, part in value.items()}
    return pytree.tree_map(lambda leaf: _map_leaf(function, leaf), value, is_leaf=_is_packed)


def tensors_in(value: Any) -> tuple[list[torch.Tensor], bool]:
    """The tensors that :func:`map_tensors` finds, in its order; and whether other objects may hide more tensors."""
    tensors: list[torch.Tensor] = []
    opaque: list[Any] = []

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    waiting = [value]
    while waiting:
        value = waiting.pop()
        kind = type(value)
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif kind is tuple or kind is list or kind is dict:
            waiting += reversed(value.values() if kind is dict else value)
        elif not isinstance(value, _WITHOUT_TENSORS):
            for leaf in pytree.tree_leaves(value, is_leaf=_is_packed):
                _map_leaf(collect, leaf, opaque)
    return tensors, bool(opaque)


def _is_packed(value: Any) -> bool:
    """To pytree a packed sequence is a tuple of four tensors, but ``batch_sizes`` must stay on the CPU."""
    return isinstance(value, PackedSequence)


def _map_leaf(function: Callable[[torch.Tensor], torch.Tensor], leaf: Any, opaque: list[Any] | None = None) -> Any:
    """:func:`map_tensors` of a pytree leaf. Objects that are not changed, and may hold tensors, are appended to ``opaque``."""
    if isinstance(leaf, torch.Tensor):
        return annotated_as(leaf, function(leaf))
    is_dataclass = dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)
    if not is_dataclass and not isinstance(leaf, (set, frozenset, PackedSequence)):
        if opaque is not None and not isinstance(leaf, _WITHOUT_TENSORS):
            opaque.append(leaf)
        return leaf

    def inside(part: Any) -> Any:
        return pytree.tree_map(lambda inner: _map_leaf(function, inner, opaque), part, is_leaf=_is_packed)

    if isinstance(leaf, PackedSequence):
        data = annotated_as(leaf.data, function(leaf.data))
        orders = [None if order is None else order.to(data.device) for order in (leaf.sorted_indices, leaf.unsorted_indices)]
        return PackedSequence(data, leaf.batch_sizes, *orders)
    if isinstance(leaf, (set, frozenset)):
        return type(leaf)(inside(part) for part in leaf)
    result = copy.copy(leaf)
    for field in dataclasses.fields(leaf):
        if hasattr(leaf, field.name):
            object.__setattr__(result, field.name, inside(getattr(leaf, field.name)))  # It may be frozen.
    return result
