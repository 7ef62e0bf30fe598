"""Hooks: when parameters are gathered and given back, and when gradients are reduced.

Per module: pre-forward gathers (and prefetches the next group), post-forward gives back, pre-backward gathers again (and
prefetches the group before), post-backward reduces and gives back. What ends a backward pass runs once, at the root.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils import _pytree as pytree

from torch_ragged.fsdp._param_group import ParamGroup

__all__ = ["ModuleState", "RootContext"]


@dataclass
class RootContext:
    """What the states under one root share.

    ``order`` is the order of forward calls since the root was called, ``last_order`` that of the root's call before: the
    next group is prefetched by it. ``reducing`` is the group whose reduce-scatter is under way: at most one, so that at
    most two gradient buffers are held.
    """

    states: list[ModuleState] = field(default_factory=list)
    order: list[ModuleState] = field(default_factory=list)
    last_order: list[ModuleState] = field(default_factory=list)
    callback_queued: bool = False
    reducing: ParamGroup | None = None


class ModuleState:
    """The state that ``fully_shard`` keeps for one module, and its hooks."""

    def __init__(
        self, module: nn.Module, group: ParamGroup | None, mp_policy: MixedPrecisionPolicy, reshard_after_forward: bool | None
    ) -> None:
        self.module, self.group, self.mp_policy = module, group, mp_policy
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.requires_gradient_sync = True
        self.context: RootContext | None = None
        self.is_root = False
        self._in_backward = False  # between pre- and post-backward: a forward call is a recomputation
        self._open_calls = 0  # forward calls whose backward has not come through yet
        self._positions: list[int] = []  # where calls that are in their forward stand in the order
        self._needs_reduction = False  # backward came here since the last reduction
        self._keeps_from_forward = False  # gathered by a forward that has not given the parameters back
        module.register_forward_pre_hook(self._pre_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(self._post_forward)

    # -- root ------------------------------------------------------------------------------------------------------

    def _become_root(self) -> None:
        """The first module called is the root; those inside it share its context."""
        self.context, self.is_root = RootContext(), True
        for module in self.module.modules():
            state = getattr(module, "_ragged_fsdp_state", None)
            if state is None:
                continue
            if state is not self and state.is_root:
                raise RuntimeError(
                    f"{type(state.module).__name__} ran its forward before the module around it and became a root: run "
                    "the outermost fully_shard module first"
                )
            state.context = self.context
            self.context.states.append(state)
        if self.reshard_after_forward is None:
            self.reshard_after_forward = False  # The root's parameters are wanted first in backward.
        for state in self.context.states:
            if state.reshard_after_forward is None:
                state.reshard_after_forward = True

    def _start_iteration(self) -> None:
        assert self.context is not None
        for state in self.context.states:
            if state._keeps_from_forward and state.group is not None:  # The shards may have changed since.
                state.group.reshard()
            state._keeps_from_forward = False
            if state.group is not None:
                state.group.adopt_sharded()
        self.context.last_order, self.context.order = self.context.order, []

    # -- forward ---------------------------------------------------------------------------------------------------

    def _pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._in_backward:
            return None
        if self.context is None:
            self._become_root()
        context = self.context
        assert context is not None
        if self.is_root:
            self._start_iteration()
        if self.mp_policy.cast_forward_inputs and self.mp_policy.param_dtype:
            args, kwargs = _cast((args, kwargs), self.mp_policy.param_dtype)
        position = len(context.order)
        context.order.append(self)
        if self.group is not None:
            self.group.unshard()
            self._keeps_from_forward = True
            self._prefetch(context.last_order, position, step=1)
        if torch.is_grad_enabled():
            args, kwargs = self._watch_inputs(args, kwargs)
            self._positions.append(position)
        return args, kwargs

    def _prefetch(self, order: list[ModuleState], position: int, step: int) -> None:
        """Start the all-gather of the next group in ``order``, if it ran the same way up to here."""
        neighbour = position + step
        in_order = 0 <= neighbour < len(order) and order[position] is self
        while in_order and order[neighbour].group is None:
            neighbour += step
            in_order = 0 <= neighbour < len(order)
        if in_order:
            group = order[neighbour].group
            assert group is not None
            group.unshard(wait=False)

    def _post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self._in_backward:
            return None
        if self.group is not None:
            if self.reshard_after_forward or not torch.is_grad_enabled():
                self.group.reshard()
                self._keeps_from_forward = False
        if self.mp_policy.output_dtype is not None:
            output = _cast(output, self.mp_policy.output_dtype)
        if torch.is_grad_enabled():
            watched = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
            position = self._positions.pop()
            if watched:
                self._open_calls += 1
                assert self.context is not None
                hook = self._pre_backward_hook(self.context, self.context.order, position)
                for tensor in watched:
                    tensor.register_hook(hook)
        return output

    # -- backward --------------------------------------------------------------------------------------------------

    def _pre_backward_hook(
        self, context: RootContext, order: list[ModuleState], position: int
    ) -> Callable[[torch.Tensor], None]:
        def hook(gradient: torch.Tensor) -> None:
            self._queue_callback(context)
            if self._in_backward:
                return
            self._in_backward = self._needs_reduction = True
            if self.group is not None:
                self.group.unshard()
                self._prefetch(order, position, step=-1)

        return hook

    def _watch_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Have autograd say when the gradients of all inputs are there: then backward is through with this module."""
        leaves, tree = pytree.tree_flatten((args, kwargs))
        watched = [i for i, t in enumerate(leaves) if isinstance(t, torch.Tensor) and t.requires_grad]
        if watched:
            outputs = _PostBackward.apply(self, *(leaves[i] for i in watched))
            for i, tensor in zip(watched, outputs):
                leaves[i] = tensor
        return pytree.tree_unflatten(leaves, tree)

    def post_backward(self) -> None:
        """Backward is through with one call of this module: reduce after the last call, give the parameters back."""
        if not self._in_backward:
            return
        self._in_backward = False
        self._open_calls = max(0, self._open_calls - 1)
        group, context = self.group, self.context
        if group is None or context is None:
            return
        if self.reshard_after_backward:
            group.reshard()
            self._keeps_from_forward = False
        if self._open_calls == 0:
            self._reduce(group, context)

    def _reduce(self, group: ParamGroup, context: RootContext) -> None:
        if not (self._needs_reduction and group.is_trainable and self.requires_gradient_sync):
            return
        self._needs_reduction = False
        if context.reducing is not None:
            context.reducing.finish_reduction()
        group.start_reduction()
        context.reducing = group

    def _queue_callback(self, context: RootContext) -> None:
        if not context.callback_queued:
            context.callback_queued = True
            Variable._execution_engine.queue_callback(lambda: _end_backward(context))


class _PostBackward(torch.autograd.Function):
    """Identity on a module's inputs; its backward runs when backward is through with the module."""

    @staticmethod
    def forward(ctx: Any, state: ModuleState, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.state = state
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.state.post_backward()
        return (None, *gradients)


def _end_backward(context: RootContext) -> None:
    """Reduce what is left, agree on which parameters were used, set gradients and give everything back."""
    context.callback_queued = False
    for state in reversed(context.states):
        state.post_backward()
        if state.group is not None:
            state._reduce(state.group, context)
    reduced = [state.group for state in context.states if state.group is not None and state.group.was_reduced]
    if reduced:
        used = _used_anywhere(reduced)
        for group in reduced:
            group.set_gradients([next(used) for _ in group.params])
    context.reducing = None
    for state in context.states:
        if state.group is not None and (state.reshard_after_backward or not state.group.is_unsharded):
            state.group.reshard()
            state._keeps_from_forward = False
        state._open_calls = 0
        state._positions.clear()


def _used_anywhere(groups: list[ParamGroup]) -> Any:
    """For every parameter in turn, whether any rank had a gradient of it. One small all-reduce per backward.

    A rank reads the answer only if it has a parameter without a gradient, so that a GPU need not be waited for.
    """
    local = [param.was_used for group in groups for param in group.params]
    flags = torch.tensor(local, dtype=torch.uint8, device=groups[0].unsharded.flat.device)
    groups[0].collectives.all_reduce_max(flags).wait()
    if all(local):
        return iter(local)
    trainable = [p.sharded is not None and p.sharded.requires_grad for group in groups for p in group.params]
    if all(used or not needed for used, needed in zip(local, trainable)):
        return iter(local)
    return iter([bool(flag) for flag in flags.tolist()])


def _cast(values: Any, dtype: torch.dtype) -> Any:
    def cast(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if is_float else value

    return pytree.tree_map(cast, values)
