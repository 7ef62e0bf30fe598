"""Hooks: when parameters are gathered and given back, and when gradients are reduced.

Per module: pre-forward gathers (and prefetches the next group), post-forward gives back, pre-backward gathers again (and
prefetches the group before), post-backward reduces and gives back. What ends a backward pass runs once, at the root.
"""

from __future__ import annotations

import warnings
import weakref
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
    next group is prefetched by it. ``reducing`` are the groups whose reduce-scatter is under way: one, unless more are
    allowed, so that at most two gradient buffers are held. ``callback`` is what autograd runs at the end of the backward
    under way; autograd alone holds it, and drops it if the backward raises.
    """

    states: list[ModuleState]
    order: list[ModuleState] = field(default_factory=list)
    last_order: list[ModuleState] = field(default_factory=list)
    callback: weakref.ref[Callable[[], None]] | None = None
    reducing: list[ParamGroup] = field(default_factory=list)

    @property
    def in_forward(self) -> bool:
        """Whether the root is in its forward."""
        return bool(self.states[0]._positions)

    @property
    def in_backward(self) -> bool:
        """Whether this code runs in a backward pass of these modules that has not raised."""
        return self.callback is not None and self.callback() is not None and torch._C._current_graph_task_id() != -1

    def queue_callback(self) -> None:
        """Have autograd end the backward under way with :func:`_end_backward`."""
        if self.in_backward:
            return
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "torch_ragged.fsdp does not support create_graph=True: the parameters are given back at the end of backward"
            )
        self.forget_raised_backward()

        def callback() -> None:
            _end_backward(self)

        self.callback = weakref.ref(callback)
        Variable._execution_engine.queue_callback(callback)

    def forget_raised_backward(self) -> None:
        """Drop what a backward that raised left behind: else no later one would set gradients."""
        if self.callback is not None and not self.in_backward and self.forget_backward():
            warnings.warn(
                "a backward pass raised: its gradients, and those accumulated without gradient sync, are dropped", stacklevel=2
            )

    def forget_backward(self) -> bool:
        """Drop reductions under way and gradients not yet in ``.grad``; says whether there were any."""
        self.callback = None
        self.reducing.clear()
        return any([state.forget_backward() for state in self.states])


class ModuleState:
    """The state that ``fully_shard`` keeps for one module, and its hooks."""

    def __init__(
        self, module: nn.Module, group: ParamGroup | None, mp_policy: MixedPrecisionPolicy, reshard_after_forward: bool | None
    ) -> None:
        self.module, self.group, self.mp_policy = module, group, mp_policy
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.requires_gradient_sync = True
        self.max_reductions = 1
        self.unshard_in_backward = True
        self.post_optim_event: torch.Event | None = None
        self.forward_prefetch: list[ModuleState] | None = None
        self.backward_prefetch: list[ModuleState] | None = None
        self.context: RootContext | None = None
        self.is_root = False
        self._in_backward = False  # between pre- and post-backward: a forward call is a recomputation
        self._open_calls = 0  # forward calls whose backward has not come through yet
        self._positions: list[int] = []  # where calls that are in their forward stand in the order
        self._needs_reduction = False  # backward came here since the last reduction
        self._must_refresh = False  # what is gathered may be out of date at the next iteration
        if group is not None:
            group.on_gradient = self._on_gradient
        module.register_forward_pre_hook(self._pre_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(self._post_forward, always_call=True)

    # -- root ------------------------------------------------------------------------------------------------------

    def _become_root(self) -> RootContext:
        """The first module called is the root; those inside it share its context."""
        found = [getattr(module, "_ragged_fsdp_state", None) for module in self.module.modules()]
        states: list[ModuleState] = [state for state in found if state is not None]
        for state in states:
            if state.context is not None:
                raise RuntimeError(
                    f"{type(state.module).__name__} ran its forward before the module around it and became a root, or is "
                    "part of another root: run the outermost fully_shard module first"
                )
        _check_one_mesh([state.group for state in states if state.group is not None])
        context = RootContext(states)
        self.is_root = True
        if self.reshard_after_forward is None:
            self.reshard_after_forward = False  # The root's parameters are wanted first in backward.
        for state in states:
            state.context = context
            if state.reshard_after_forward is None:
                state.reshard_after_forward = True
        return context

    def _start_iteration(self, context: RootContext) -> None:
        for state in context.states:
            event, state.post_optim_event = state.post_optim_event, None
            if event is not None:
                event.wait()
            state._refresh()
        context.last_order, context.order = context.order, []

    def _refresh(self) -> None:
        """Have the forward that begins gather anew what an earlier one left gathered: the shards may have changed since."""
        self._positions.clear()
        if self._must_refresh or (self.group is not None and self.group.is_outdated):
            self.give_back()
        if self.group is not None:
            self.group.adopt_sharded()

    def give_back(self) -> None:
        """Give the gathered parameters back."""
        self._must_refresh = False
        if self.group is not None:
            self.group.reshard()

    def forget_backward(self) -> bool:
        """Be as before the backward under way; says whether gradients were dropped."""
        self._in_backward = self._needs_reduction = False
        self._open_calls = 0
        self._must_refresh = True
        return self.group is not None and self.group.drop_gradients()

    def reset(self) -> None:
        """Be as before the forward or backward under way."""
        self.forget_backward()
        self._positions.clear()
        self.give_back()

    # -- forward ---------------------------------------------------------------------------------------------------

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
        position = -1  # Calls outside the root's forward have no place in the order.
        if self.is_root or context.in_forward:
            position = len(context.order)
            context.order.append(self)
        self._positions.append(position)
        if self.group is not None:
            self.group.unshard()
            self._must_refresh = True
            for neighbour in self._prefetch(self.forward_prefetch, context.last_order, position, step=1):
                neighbour._must_refresh = True  # It may never be called.
        if torch.is_grad_enabled():
            args, kwargs = self._watch_inputs(args, kwargs)
        return args, kwargs

    def _prefetch(
        self, chosen: list[ModuleState] | None, order: list[ModuleState], position: int, step: int
    ) -> list[ModuleState]:
        """Start the all-gathers of the ``chosen`` modules, or of the next in ``order``; returns whose they are."""
        states = self._next(order, position, step) if chosen is None else chosen
        for state in states:
            if state.group is not None:
                state.group.unshard(wait=False)
        return states

    def _next(self, order: list[ModuleState], position: int, step: int) -> list[ModuleState]:
        """The next module with parameters in ``order``, if it ran the same way up to here."""
        neighbour = position + step
        in_order = position >= 0 and 0 <= neighbour < len(order) and order[position] is self
        while in_order and order[neighbour].group is None:
            neighbour += step
            in_order = 0 <= neighbour < len(order)
        return [order[neighbour]] if in_order else []

    def _post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Runs also, with None as output, if forward raised."""
        context = self.context
        if context is None:
            return output
        if self.mp_policy.output_dtype is not None:
            output = _cast(output, self.mp_policy.output_dtype)
        if self._in_backward and context.in_backward:
            return output
        position = self._positions.pop() if self._positions else -1
        leaves = pytree.tree_leaves(output)
        needs_backward = torch.is_grad_enabled()
        must_stay = needs_backward and not self._watch_outputs(leaves, context, position)
        if self.group is not None and any(isinstance(t, torch.Tensor) and self.group.unsharded.holds(t) for t in leaves):
            must_stay = True  # The output is a parameter or a view of one.
        if (self.reshard_after_forward or not needs_backward) and not must_stay:
            self.give_back()
        return output

    # -- backward --------------------------------------------------------------------------------------------------

    def _watch_outputs(self, leaves: list[Any], context: RootContext, position: int) -> bool:
        """Have autograd say when backward comes to an output; False if tensors may hide in objects unknown to pytree."""
        watched = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad and not t.is_leaf]
        if watched:
            self._open_calls += 1
            hook = self._pre_backward_hook(context, context.order, position)
            for tensor in watched:
                tensor.register_hook(hook)
        return bool(watched) or all(leaf is None or isinstance(leaf, (torch.Tensor, int, float, str)) for leaf in leaves)

    def _pre_backward_hook(
        self, context: RootContext, order: list[ModuleState], position: int
    ) -> Callable[[torch.Tensor], None]:
        def hook(gradient: torch.Tensor) -> None:
            context.queue_callback()
            if self._in_backward:
                return
            self._in_backward = self._needs_reduction = True
            if self.group is not None and self.unshard_in_backward:
                self.group.unshard()
                self._prefetch(self.backward_prefetch, order, position, step=-1)

        return hook

    def _on_gradient(self) -> None:
        """A parameter got a gradient, in whatever way backward came to it."""
        (self.context or self._become_root()).queue_callback()
        self._needs_reduction = True

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
            self.give_back()
        if self._open_calls == 0:
            self._reduce(group, context)

    def _reduce(self, group: ParamGroup, context: RootContext) -> None:
        if not (self._needs_reduction and group.is_trainable and self.requires_gradient_sync):
            return
        self._needs_reduction = False
        while len(context.reducing) >= self.max_reductions:
            context.reducing.pop(0).finish_reduction()
        group.start_reduction()
        context.reducing.append(group)

    def end_backward(self, context: RootContext) -> None:
        """Backward is at its end, and gradients are set."""
        self._open_calls = 0
        if context.in_forward and self._must_refresh:  # Forward itself computes gradients, and goes on with these parameters.
            return
        if self.group is None:
            return
        if self.reshard_after_backward or not self.group.is_unsharded:
            self.give_back()


class _PostBackward(torch.autograd.Function):
    """Identity on a module's inputs; its backward runs when backward is through with the module."""

    @staticmethod
    def forward(ctx: Any, state: ModuleState, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.state = state
        ctx.set_materialize_grads(False)  # An unused input has no gradient, not one of zeros.
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.state.post_backward()
        return (None, *gradients)


def _check_one_mesh(groups: list[ParamGroup]) -> None:
    """All groups of a root reduce with the same ranks: what ends a backward is one collective for all."""
    for group in groups:
        ranks, first = group.mesh.mesh.tolist(), groups[0].mesh.mesh.tolist()
        if ranks != first:
            raise ValueError(
                f"fully_shard modules under one root are on different meshes: {groups[0].params[0].fqn} on ranks {first}, "
                f"{group.params[0].fqn} on ranks {ranks}. Pass the same mesh to every fully_shard"
            )


def _end_backward(context: RootContext) -> None:
    """Reduce what is left, agree on which parameters were used, set gradients and give everything back."""
    for state in reversed(context.states):
        state.post_backward()
        if state.group is not None:
            state._reduce(state.group, context)
    groups = [state.group for state in context.states if state.group is not None]
    for group in groups:
        if group.keeps_shards:
            group.finish_reduction()
    reduced = [group for group in groups if group.was_reduced]
    if reduced:
        used = _used_anywhere(reduced)
        for group in reduced:
            group.set_gradients([next(used) for _ in group.params])
    context.reducing.clear()
    for state in context.states:
        state.end_backward(context)
    context.callback = None


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
