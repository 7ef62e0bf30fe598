"""FSDPState: the hooks of a module after ``fully_shard``, which unshard, reshard and reduce at the right moments.

::

    pre-forward     unshard this module's groups; prefetch the next ones
    post-forward    reshard
    pre-backward    unshard again; prefetch the groups before
    post-backward   reshard; reduce the gradients
    root post-backward callback, once per pass: reduce all other gradients, set ``.grad``, reshard everything

It moves no data: its groups do.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

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
from torch_ragged.fsdp.core._fsdp_param_group import FSDPCommContext, FSDPParamGroup
from torch_ragged.fsdp.core._root import FSDPStateContext, ModuleState, numbered
from torch_ragged.fsdp.core._untrained import note_root, refuse_other_replicas, warn_of_unsharded
from torch_ragged.fsdp.core.encodings._plain import Phase
from torch_ragged.fsdp.core.encodings._spmd_types import annotated_as, untyped
from torch_ragged.fsdp.core.optional._roll_call import call_log_of, roll_call_of

__all__ = ["STATE", "FSDPState", "map_tensors", "state_of", "tensors_in"]

STATE = "_ragged_fsdp_state"
"""The attribute under which a module keeps its state."""


def state_of(module: nn.Module) -> FSDPState | None:
    """The state of ``module`` itself, or None. A CheckpointWrapper would answer ``getattr`` for the module inside it."""
    return module.__dict__.get(STATE)


class FSDPState(ModuleState):
    """A :class:`ModuleState` with the hooks on its modules, which ask the root when to do what."""

    _probe: torch.Tensor | None = None
    _ended_at = 0  # The number of the first autograd node after the last forward.

    def __init__(
        self,
        modules: Sequence[nn.Module],
        groups: list[FSDPParamGroup],
        mp_policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | None,
        is_optional: bool = False,
    ) -> None:
        super().__init__(modules, groups, mp_policy, reshard_after_forward, is_optional)
        self._mp_policy = mp_policy  # NeMo AutoModel computes the logits in the dtype of its head's policy.
        # The root owns the context; before the first forward, each state owns one.
        self._owned_context: FSDPStateContext | None = FSDPStateContext([self])
        self.join(self._owned_context, self.comm)
        for module in self.modules:
            # Before the user's own pre-hooks, which may read parameters. After forward also if it raised, so that calls stay
            # paired.
            module.register_forward_pre_hook(self._pre_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._post_forward, always_call=True)

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
        self._context, self._root_state, self.comm = weakref.ref(context), weakref.ref(context.states[0]), comm
        self._comm_ctx = comm
        for index, group in enumerate(self.groups):
            name = f"{self.fqn}[{index}]" if self.fqn and index else self.fqn
            group.join(name, comm, self._context, context.log)

    def replace_groups(self, groups: list[FSDPParamGroup]) -> None:
        """Use other groups of the same parameters, registered by their caller. A root is found anew by the next forward.

        All states under a root do this together, and all ranks: the order of the last forward, which decides what is
        prefetched, is then unknown on all of them.
        """
        self.context.close("reshard_to has moved the parameters after this forward: run the forward again, then backward")
        self.groups, self.is_root = numbered(groups), False
        self.calls.clear()
        self._in_backward, self._must_refresh, self._still_to_run = False, False, set(self.modules)
        self._owned_context = FSDPStateContext([self])
        self.join(self._owned_context, self.comm)

    def _lazy_init(self) -> None:
        """Make this module the root, as its forward runs first. All states under it share its context from now on."""
        found = [state_of(module) for root in self.modules for module in root.modules()]
        states: list[FSDPState] = list(dict.fromkeys(state for state in found if state is not None))
        for state in states:
            # Two roots cannot become one: each has an order of its own forwards, and ranks may differ in which one ran first.
            if state.context.is_initialized:
                raise RuntimeError(
                    f"{state.name} became a root when it ran its forward before the module around it, or it is "
                    "part of another root: run the forward of the outermost fully_shard module first"
                )
        # All checks are before the first change: after an error, each state is its own root, as before.
        groups = [group for state in states for group in state.groups]
        for group in groups:
            group.check_awake()
        for group in groups:
            group.check_late_extensions()
        # On all ranks in the same order, since they call their roots in one: a log takes the next number for its ranks.
        log, roll_call = call_log_of(states), roll_call_of(self.modules, states)
        context = self._owned_context = FSDPStateContext(states, True, log, roll_call)
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
        # Only warnings from here on: the root is complete.
        note_root(self.modules)
        if torch.is_grad_enabled():
            warn_of_unsharded(self.modules, context.groups)

    def reset(self) -> None:
        """Return to the state before the current forward and backward."""
        self.drop_backward()
        self.calls.clear()
        self.reshard()

    # -- forward ---------------------------------------------------------------------------------------------------

    @dynamo_disabled
    @untyped
    def _pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.context.is_initialized:
            # The module whose forward runs first is the root. All ranks run the same one first, so they agree on it.
            self._lazy_init()
        context = self.context
        if self.mp_policy.cast_forward_inputs and self.mp_policy.param_dtype:
            args, kwargs = _cast((args, kwargs), self.mp_policy.param_dtype)
        if self._in_backward and context.in_backward:  # Activation checkpointing recomputes this call.
            return args, kwargs
        # The recomputation of a module around it calls this one. Other ranks may have no such call, and do not gather.
        if self.is_optional and context.in_backward and not all(group.is_unsharded for group in self.groups):
            raise RuntimeError(
                f"{self.fqn} is optional and is recomputed in backward together with other modules, so that other ranks cannot "
                "take part in its all-gather: checkpoint the optional module by itself"
            )
        # The last backward may have raised on this rank. Its gradients must not be added to those of this iteration.
        context.drop_raised_backward()
        if not context.in_backward:  # A forward inside backward belongs to the same iteration.
            if self.is_root:
                context.start_iteration()
                if not context.has_checked_replicas:
                    self._check_replicas(context)
            elif not context.in_forward:  # The user calls this module by itself.
                self.refresh()
        device = context.groups[0].device if self.is_root and context.groups else None
        if device is not None and device.type not in ("cpu", "meta"):  # On the CPU they stay where they are, as with FSDP2.
            args, kwargs = map_tensors(lambda tensor: tensor.to(device, non_blocking=True), (args, kwargs))
        call = self.enter_call(context, needs_backward=self._meet(is_exit=False)[0])
        # Post-backward runs when autograd has the gradients of all inputs. If no input has one, there is no node: then the end
        # of the pass runs it, in the order of modules.
        watched = [t for t in tensors_in((args, kwargs))[0] if t.requires_grad] if torch.is_grad_enabled() else ()
        if watched:
            if call.order is not None and not self.is_optional:
                call.order.watch(call.position, is_exit=False)
            call.probe = self.probe()
            outputs = iter(_PostBackward.apply(self, call, call.probe, *watched))
            args, kwargs = map_tensors(lambda t: next(outputs) if t.requires_grad else t, (args, kwargs))
        return args, kwargs

    def _check_replicas(self, context: FSDPStateContext) -> None:
        """In the first forward, when the user has loaded parameters: an error if replicas have other ones."""
        # Ranks make sure that they run the same root. If they differ, the next forward compares again.
        if context.log is not None:
            context.log.before_collective()
        checked = [group for state in context.states if state.checks_replicas for group in state.groups]
        refuse_other_replicas(self.modules, checked)
        context.has_checked_replicas = True

    def _meet(self, is_exit: bool, stays_unsharded: bool = False) -> tuple[bool, bool]:
        """Agree with other ranks on the next call, or the end of one.

        Returns:
            whether backward may reach the call, and ``stays_unsharded``: for an optional module, on any rank.

        Raises:
            RuntimeError: another rank calls another module, which is not optional.
        """
        context, own = self.context, (torch.is_grad_enabled(), stays_unsharded)
        in_order = not context.in_backward and (self.is_root or context.in_forward)
        # Calls in a backward, and those of an inner module by itself, are not compared: other ranks need not make them.
        if not in_order or context.log is None:
            return own
        if context.roll_call is not None:
            # A vote is a collective, too. Before it, ranks make sure that they run the same root.
            context.log.before_collective()
        if self.is_optional:
            return context.meet((self, is_exit), stays_unsharded)
        # The end of other calls issues no collective.
        if context.roll_call is not None and is_exit is self.is_root:
            context.meet(None)
        if not is_exit:
            context.log.add(self.fqn)
        elif self.is_root:
            context.log.finish()
        return own

    @dynamo_disabled
    @untyped
    def _post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Reshard after forward. If forward raised, this runs with None as output."""
        context = self.context
        if not context.is_initialized:
            return output
        if self.mp_policy.output_dtype is not None:
            output = _cast(output, self.mp_policy.output_dtype)
        if self._in_backward and context.in_backward:
            return output
        # Not in a recomputation, above: backward needs the parameters next, and the first call has set its hooks.
        needs_backward, (tensors, opaque) = torch.is_grad_enabled(), tensors_in(output)
        watched = [tensor for tensor in tensors if needs_backward and tensor.requires_grad and not tensor.is_leaf]
        # If only a tensor inside an opaque output may reach backward, no hook would unshard again: stay unsharded.
        must_stay = needs_backward and opaque and not watched
        # The same if the output is a parameter or a view of one.
        must_stay |= any(group.encoding.holds(tensor) for group in self.groups for tensor in tensors)
        # A checkpoint recomputes this forward for a node inside of it, which backward has reached before an output.
        node = current_autograd_node() if needs_backward else None
        if node is None:
            self._ended_at = next_sequence_number()
        must_stay |= node is not None and node._sequence_nr() < self._ended_at
        if output is not None or not self.calls or not self.calls[-1].has_raised:  # Otherwise, other ranks do not wait for it.
            # For an optional module, other ranks wait here, and reshard or stay unsharded as this one does.
            needs_backward, must_stay = self._meet(is_exit=True, stays_unsharded=must_stay)
        for group in self.groups:
            group.is_unhooked |= must_stay
        if must_stay and needs_backward:
            self.gather_for_backward()
        # There is none if pre-forward has raised.
        call = self.calls.pop() if self.calls else Call(None, self)
        # Of an optional call, all ranks record it, also ranks whose backward does not reach it: their orders must be equal.
        if call.order is not None and (needs_backward if self.is_optional else watched):
            call.order.watch(call.position, is_exit=True)
        # Hooks hold the context of this forward: the module may have another root when backward runs.
        for tensor in watched:
            # On each output: ranks may differ in which gradient comes first, and only the first one of a call acts.
            tensor.register_hook(functools.partial(self._pre_backward, context, call, False))
            base = tensor._base
            if base is not None and base.grad_fn is not None:  # An in-place operation on a view removes the first hook.
                base.grad_fn.register_prehook(functools.partial(self._pre_backward, context, call, True))
        # Modules that share their groups reshard once, after the last of them.
        self._still_to_run.discard(module)
        if self.is_root and not needs_backward:
            # With a backward to come, its end reshards them.
            context.drop_unused_prefetches()
        if self._still_to_run or must_stay:
            return output
        self._still_to_run = set(self.modules)
        if self.reshard_after_forward or not needs_backward:
            self.reshard(keep=needs_backward)
        return output

    # -- backward --------------------------------------------------------------------------------------------------

    @dynamo_disabled_in_backward
    @untyped
    def _pre_backward(self, context: FSDPStateContext, call: Call, is_base: bool, gradients: Any) -> None:
        """Backward has reached an output of a call, or the base that an output is a view of."""
        if is_base and call.begun_in == backward_id():
            return
        context.start_backward()
        if self._in_backward:
            return
        # Not for further outputs of a call, or if backward is in another call of this module already.
        call.begun_in = backward_id()
        if not self.requires_gradient_sync:
            self.check_split_backward(call)
        if call.order is not None:
            # First, take part for later calls that backward skips here: other ranks unshard and reduce for them now.
            context.reach(call.order)
            for event in call.order.reach(call.position, is_exit=True):
                context.run_skipped(call.order, event)
        self.pre_backward(call.order, call.position)

    @dynamo_disabled_in_backward
    def _pre_double_backward(self, context: FSDPStateContext, gradient: torch.Tensor) -> None:
        context.start_backward()
        for group in self.groups:
            group.expect_gradients(self.accumulates)
        self.unshard(Phase.BOTH)

    @dynamo_disabled_in_backward
    @untyped
    def _post_backward(self, call: Call) -> None:
        """Autograd has the gradients of all inputs of a call."""
        if self._in_backward:
            context, order = self.context, call.order
            if order is not None and order in context.orders:
                for event in order.reach(call.position, is_exit=False):
                    context.run_skipped(order, event)
            self.post_backward(order is None or order.is_first(call.position))

    # -- pipelines -------------------------------------------------------------------------------------------------

    def probe(self) -> torch.Tensor | None:
        """A leaf without elements, an input of each call whose inputs have gradients. A pass for those alone leaves it out."""
        if self._probe is None and self.groups:
            with torch.inference_mode(False):
                self._probe = torch.empty(0, device=self.groups[0].device, requires_grad=True)
        return self._probe

    def check_split_backward(self, call: Call) -> None:
        """Raise if a pipeline schedule that splits backward would lose gradients of this module.

        Such a schedule (zero bubble) looks up the registered parameters, computes the gradients of inputs, and later those of
        the parameters that it has found. It does not find unsharded parameters if they are not registered before backward.

        Raises:
            RuntimeError: the parameters are sharded in a backward that computes the gradients of inputs only.
        """
        root = self.root_state
        is_pipeline = root.finalizes_manually or not root.is_last_backward
        if not is_pipeline or torch.is_grad_enabled() or call.probe is None:
            return
        if gradient_use(get_gradient_edge(call.probe).node) is not GradientUse.NONE:
            return
        for group in self.groups:
            if group.is_trainable and not group.is_unsharded:
                raise RuntimeError(
                    f"{group.names} was resharded after forward, and this backward computes the gradients of inputs only: a "
                    "pipeline schedule that computes the gradients of parameters later, such as ZBVZeroBubble, would lose "
                    "them. Pass reshard_after_forward=False to fully_shard"
                )

    # What other programs read and call by FSDP2's private names, also ``_comm_ctx`` and ``_mp_policy``. The schedules of torch
    # 2.11 to 2.13 reduce gradients by them; those of 2.15 call methods of ``FSDPModule``.

    _state_ctx = context
    _fsdp_param_groups: Sequence[FSDPParamGroup] = ()  # _root_post_backward_final_callback() reduces the gradients of all.

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


class _PostBackward(torch.autograd.Function):
    """Identity on a module's inputs. Its backward runs when autograd has the gradients of all of them."""

    @staticmethod
    def forward(
        ctx: Any, state: FSDPState, call: Call, probe: torch.Tensor | None, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.state, ctx.call = state, call
        ctx.set_materialize_grads(False)  # An unused input has no gradient, not one of zeros.
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        state: FSDPState = ctx.state
        # With create_graph=True, a later backward reaches the nodes that have computed these gradients, and these read the
        # parameters again, before it reaches the outputs of the call.
        for gradient in gradients if torch.is_grad_enabled() else ():
            if gradient is not None and gradient.requires_grad:
                gradient.register_hook(functools.partial(state._pre_double_backward, state.context))
        state._post_backward(ctx.call)
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
    if isinstance(value, torch.Tensor):
        return [value], False
    tensors: list[torch.Tensor] = []
    opaque: list[Any] = []

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

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
