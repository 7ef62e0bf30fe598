"""Gradients of parameters that no unit shards: reduced once, after backward, in buckets.

It must not know units: fully_shard reduces the gradients of its parameters.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.utils.weak import WeakTensorKeyDictionary

from torch_ragged._ranks.peers import peers_named
from torch_ragged._register._torch import GradientUse, backward_id, dtensor_of, gradient_use
from torch_ragged.spmd._move import make_dtensor
from torch_ragged.tensor._api import spec_of
from torch_ragged.tensor._redistribute import mesh_group

__all__ = ["Leaf", "LeavesOfCall", "PendingGradients", "has_hooks", "witness"]

_BUCKET = 64 * 2**20
"""Bytes of one all-reduce, at most: larger ones are no faster, and need as much memory again."""


@dataclass
class Leaf:
    """A leaf of autograd on the local memory of a parameter, for static modules: autograd accumulates there, without DTensor.

    Attributes:
        local: the leaf.
        order: that of the parameter among those that are reduced.
        spec: of its gradient, a DTensor's.
        goal, pending: what :func:`_goal` and :func:`_sum_dims` say of this gradient.
    """

    param: torch.nn.Parameter
    local: torch.Tensor
    order: int
    spec: Any
    goal: tuple[Placement, ...]
    pending: tuple[int, ...] | None


@dataclass(eq=False)
class LeavesOfCall:
    """The leaves that a call of a static module uses.

    Attributes:
        specs: of the gradients of parameters, where this backward brings other ones than those of the leaves.
        by_eager: gradients of parameters that eager mode has computed, in place of those on the leaves.
    """

    leaves: Sequence[Leaf] = ()
    specs: dict[torch.nn.Parameter, Any] = field(default_factory=dict)
    by_eager: dict[torch.nn.Parameter, Any] | None = None

    def spec_of(self, leaf: Leaf) -> Any:
        return self.specs.get(leaf.param, leaf.spec)


_Arrived = tuple[torch.nn.Parameter, torch.Tensor, Any, tuple[Placement, ...], Optional[tuple[int, ...]]]
"""A gradient of one backward: the parameter, the local tensor, its spec, and what :func:`_goal` and :func:`_sum_dims` say."""


@dataclass
class _Pass:
    """What one backward has to reduce.

    Attributes:
        events: in the order of backward, parameters whose gradients have arrived in ``.grad``, and calls of static modules.
        diverted: gradients that did not go to ``.grad``.
    """

    events: list[Any] = field(default_factory=list)
    diverted: dict[torch.nn.Parameter, DTensor] = field(default_factory=dict)


class PendingGradients:
    """Brings gradients to the placements that the plan says, when backward has ended.

    A gradient may be pending a sum over several mesh dimensions, as that of a norm's weight is over data-parallel and
    sequence-parallel ranks. Gradients that are pending over the same dimensions are added in one buffer: one all-reduce over
    all these dimensions per 64 MB. Others are redistributed one by one. ``.grad`` of earlier backwards is reduced already:
    the gradients of a further one are reduced by themselves, and then added to it.

    Args:
        params: each parameter with the placements of its gradient.
    """

    def __init__(self, params: Iterable[tuple[torch.nn.Parameter, tuple[Placement, ...]]], mesh: DeviceMesh) -> None:
        # Weak: a script may replace a parameter in each step, and the old one is freed with its last gradient.
        self._wanted: MutableMapping[Any, tuple[Placement, ...]] = WeakTensorKeyDictionary()
        # All ranks reduce in this order, whether modules of theirs are static or not.
        self._order: MutableMapping[Any, int] = WeakTensorKeyDictionary()
        self._added = 0
        self._mesh = mesh
        self._passes: dict[int, _Pass] = {}
        self._without: torch.nn.Parameter | None = None
        self.backwards = 0
        """How many backwards have ended."""
        self._leaves: dict[torch.nn.Parameter, dict[tuple[Placement, ...], Leaf]] = {}
        self._shared: set[torch.nn.Parameter] = set()
        for param, placements in params:
            self.add(param, placements)

    def add(self, param: torch.nn.Parameter, placements: tuple[Placement, ...]) -> None:
        """From now on, bring the gradients of ``param`` to ``placements``, too."""
        # The order of addition is that of the model, or of additions on which ranks have agreed: it is equal on all ranks.
        self._wanted[param], self._order[param] = placements, self._added
        self._added += 1
        trains = param.requires_grad
        # Only this hook keeps this object alive. Python's collector sees neither a node of autograd nor all that torch holds of
        # the other kind of hook: a cycle through them, which a parameter of this object would close, stays for ever.
        param.requires_grad_().register_hook(functools.partial(self._divert, param))
        param.register_post_accumulate_grad_hook(functools.partial(_note_gradient, weakref.ref(self)))
        param.requires_grad_(trains)  # A frozen parameter may train later.

    def forget(self, param: torch.nn.Parameter) -> None:
        """A module has another parameter in place of ``param`` now: later calls have leaves of that one."""
        self._leaves.pop(param, None)

    def placements_of(self, param: torch.nn.Parameter) -> tuple[Placement, ...] | None:
        """To which placements the gradients of ``param`` are brought; None: a unit does it."""
        return self._wanted.get(param)

    def leaf_of(self, param: torch.nn.Parameter, placements: tuple[Placement, ...]) -> Leaf | None:
        """A leaf of ``param`` whose gradient has ``placements``; None: it is in a unit, has hooks, or is shared."""
        if param not in self._wanted or has_hooks(param) or param in self._shared:
            return None
        local = param._local_tensor.detach()  # type: ignore[attr-defined]
        # Modules that share a parameter share its leaf: autograd adds their gradients, as in eager mode, before the reduction.
        leaves = self._leaves.setdefault(param, {})
        known = leaves.get(placements)
        # A parameter whose memory is another one gets another leaf. Graphs on the old leaf keep it.
        if known is None or known.local.data_ptr() != local.data_ptr():
            spec = spec_of(self._mesh, placements, param.shape, param.dtype)
            goal = _goal(placements, self._wanted[param])
            known = Leaf(param, local.requires_grad_(), self._order[param], spec, goal, _sum_dims(placements, goal))
            leaves[placements] = known
        return known

    def share(self, param: torch.nn.Parameter) -> bool:
        """From now on, ``param`` has no leaf: a forward uses it several times, and not all of them may be in static modules.

        Returns:
            whether it had leaves before.
        """
        is_new = param not in self._shared
        self._shared.add(param)
        return is_new

    def edges(self) -> dict[torch.nn.Parameter, list[tuple[Any, int]]]:
        """Where in autograd's graph the gradients of each parameter go: its own node, and those of its leaves."""
        leaves = {param: [get_gradient_edge(leaf.local) for leaf in each.values()] for param, each in self._leaves.items()}
        return {
            param: [(edge.node, edge.output_nr) for edge in (get_gradient_edge(param), *leaves.get(param, ()))]
            for param in self._wanted
            if param.requires_grad
        }

    def collect(self, call: LeavesOfCall) -> None:
        """When this backward has ended, add the gradients of the leaves of ``call`` to those of their parameters.

        Raises:
            RuntimeError: a parameter has got a hook since forward, which would not be called.
        """
        for each in call.leaves:
            if has_hooks(each.param):
                raise RuntimeError(
                    f"a parameter of shape {tuple(each.param.shape)} in a static module got a hook between forward and "
                    "backward: register hooks on parameters before forward"
                )
        # A parameter that this backward was asked for has its gradient on a leaf, which autograd does not return. It would look
        # as if it had none.
        if _is_partial():
            self.backwards += 1
            for each in call.leaves:
                if _use_of(each.param) is not GradientUse.NONE:
                    raise RuntimeError(
                        "torch.autograd.grad and backward(inputs=) do not find a parameter of shape "
                        f"{tuple(each.param.shape)} in a static module: call backward(), or parallelize with mode='eager'"
                    )
        events = self._begin().events
        # By identity: a module that is called twice has two calls, which may share a leaf. The gradient on the leaf is taken
        # with the first of them.
        if not any(call is each for each in events):
            events.append(call)

    def _divert(self, param: torch.nn.Parameter, gradient: Any) -> torch.Tensor | None:
        """Before autograd adds to ``.grad``: a sum of a reduced and a pending gradient would be reduced at once, by itself.

        Autograd gets minus zeros, which change no bit of ``.grad``. So it is as before if this backward fails.
        """
        earlier: Any = param.grad
        # Of the parameter by which a static module is found in the graph, nothing arrives here.
        self._without = param if gradient is None else None
        if not isinstance(earlier, DTensor) or not isinstance(gradient, DTensor) or torch.is_grad_enabled():
            return None
        # A leaf may have a gradient of this backward, too, to which autograd would add this one first in eager mode.
        is_alone = param not in self._leaves
        if earlier.placements == gradient.placements and is_alone or not earlier.dtype.is_floating_point:
            return None
        # Users' hooks see this gradient, and the whole sum. torch.autograd.grad returns this gradient.
        if has_hooks(param) or _is_partial() and _use_of(param) is not GradientUse.ACCUMULATED:
            return None
        # Until this backward ends: beside .grad, which is reduced, there is a second gradient, as large as the parameter.
        self._begin().diverted[param] = gradient
        local = earlier._local_tensor
        # One element, expanded: it takes no memory of the size of a gradient.
        zeros = local.new_full((), -0.0).expand(local.shape)
        return DTensor(zeros, earlier._spec, requires_grad=False)  # type: ignore[call-arg,no-any-return]

    def begin_forward(self, *_: Any) -> None:
        """Forget what a backward that raised has left. Recomputation in a backward forgets nothing."""
        # A pass that has ended is not there any more: what is left has raised. .grad of parameters that it has reached keeps
        # what autograd has added to it.
        if backward_id() < 0 and self._passes:
            self._passes.clear()
            for leaves in self._leaves.values():
                for leaf in leaves.values():
                    leaf.local.grad = None

    def _begin(self) -> _Pass:
        # By its number: a reentrant checkpoint runs a backward inside of a backward.
        task = backward_id()
        if task not in self._passes:
            self._passes[task] = _Pass()
            # Autograd calls it when this backward ends. Any hook may be the first one of a backward: all call this.
            Variable._execution_engine.queue_callback(functools.partial(self._reduce, task))  # type: ignore[attr-defined]
        return self._passes[task]

    def _note(self, param: Any) -> None:
        if param is not self._without:
            self._begin().events.append(param)

    def _reduce(self, task: int) -> None:
        # Before the pass is dropped: if this raises, begin_forward() still finds it, and clears the gradients on leaves.
        self._check_specs(self._passes.get(task, _Pass()))
        this = self._passes.pop(task, _Pass())
        self.backwards += 1
        parts: dict[int, list[tuple[torch.Tensor, Any, Leaf | None]]] = {}  # By the order of the parameter.
        params: dict[int, torch.nn.Parameter] = {}
        for event in this.events:
            if isinstance(event, torch.nn.Parameter):
                grad: Any = this.diverted.get(event, event.grad)
                if isinstance(grad, DTensor):
                    # Put back when it is reduced. A diverted one is added to .grad then, which stays.
                    if event not in this.diverted:
                        event.grad = None
                    parts.setdefault(self._order[event], []).append((grad._local_tensor, grad._spec, None))
                    params[self._order[event]] = event
                continue
            for each in event.leaves:
                params[each.order] = each.param
                local_grad = each.local.grad
                if not each.param.requires_grad:  # Frozen since forward: autograd itself would not accumulate, either.
                    each.local.grad = None
                    continue
                if event.by_eager is not None:
                    grad, each.local.grad = event.by_eager.get(each.param), None
                    if grad is not None:
                        # torch.autograd.grad may return one tensor for two parameters, and .grad must be its own memory.
                        parts.setdefault(each.order, []).append((grad._local_tensor.clone(), grad._spec, None))
                elif local_grad is not None:
                    spec = event.spec_of(each) if event.specs else each.spec
                    parts.setdefault(each.order, []).append((local_grad, spec, each if spec is each.spec else None))
                    each.local.grad = None
        arrived: list[_Arrived] = []
        # Assumed: all ranks have gradients of the same parameters, as DTensor runs the same ops on all of them. A rank that
        # lacks one would all-reduce a shorter buffer, and the others would wait or raise.
        for order in sorted(parts):
            given = parts.pop(order)
            local, spec, leaf = given[0]
            if len(given) == 1 and leaf is not None:
                arrived.append((leaf.param, local, spec, leaf.goal, leaf.pending))
                continue
            # Autograd adds the gradients of one backward to each other, as they come, before they are reduced.
            total: Any = DTensor(local, spec, requires_grad=False)  # type: ignore[call-arg]
            for more, other, _ in given[1:]:
                total = total + DTensor(more, other, requires_grad=False)  # type: ignore[call-arg]
            param = params[order]
            goal = _goal(total.placements, self._wanted[param])
            arrived.append((param, total._local_tensor, total._spec, goal, _sum_dims(total.placements, goal)))
        for param, grad in self._reduced(arrived):
            if param.grad is None:
                param.grad = grad
            else:
                # A sum of reduced gradients: one backward after the other is reduced by itself, as .grad may be read between
                # them.
                param.grad += grad

    @staticmethod
    def _check_specs(this: _Pass) -> None:
        """Before anything is sent: autograd has added what several calls have brought to a leaf.

        Raises:
            RuntimeError: they have brought gradients of other placements.
        """
        calls = [event for event in this.events if isinstance(event, LeavesOfCall)]
        if not any(call.specs or call.by_eager for call in calls):
            return
        known: dict[int, Any] = {}
        for call in calls:
            for leaf in call.leaves:
                placed = call.spec_of(leaf).placements if call.by_eager is None else call
                if placed != known.setdefault(id(leaf), placed):
                    raise RuntimeError(
                        f"two forwards bring gradients to a parameter of shape {tuple(leaf.param.shape)} of a static module in "
                        "one backward, the first after a backward with retain_graph=True, and their placements differ: call "
                        "backward() for each forward, or parallelize with mode='eager'"
                    )

    def _reduced(self, arrived: list[_Arrived]) -> list[tuple[torch.nn.Parameter, DTensor]]:
        """The gradients with the placements that the plan says. It empties ``arrived``: buckets are freed one by one."""
        results: list[tuple[torch.nn.Parameter, DTensor]] = []
        buckets: dict[tuple[tuple[int, ...], torch.dtype], list[_Arrived]] = {}
        arrived.reverse()
        while arrived:
            param, local, spec, goal, pending = each = arrived.pop()
            if pending:
                buckets.setdefault((pending, local.dtype), []).append(each)
                continue
            grad = dtensor_of(local, spec, requires_grad=local.requires_grad)
            results.append((param, grad if pending == () else grad.redistribute(placements=goal)))
        for (dims, _), alike in buckets.items():
            waiting = _buckets_of(alike)[::-1]
            alike.clear()
            while waiting:
                bucket = waiting.pop()
                reduced = self._all_reduced(dims, [each[1] for each in bucket])
                for (param, _, spec, goal, _), local in zip(bucket, reduced):
                    results.append((param, make_dtensor(local, self._mesh, goal, spec.shape)))
        return results

    def _all_reduced(self, dims: tuple[int, ...], locals_: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        # A buffer of at most _BUCKET bytes, or of one gradient: it lives as long as the reduced gradients, which are views of
        # it. Never in the gradient's own memory: another parameter's gradient, or a tensor that a hook of the user has kept,
        # may be a view of it. (Autograd gives p and q one memory for p.view(-1) + q.view(-1).)
        flat = torch.cat([local.reshape(-1) for local in locals_])
        group = mesh_group(self._mesh, dims)
        with peers_named("all-reduce", "gradients", functools.partial(dist.get_process_group_ranks, group)):
            # One group of all these mesh dimensions: its ranks hold summands of the same elements, in the same order.
            # Synchronous: there is no backward left to run beside it.
            dist.all_reduce(flat, group=group)
        return [part.view(local.shape) for part, local in zip(flat.split([local.numel() for local in locals_]), locals_)]


witness = torch.zeros((), device="cpu", requires_grad=True)
"""A leaf that each static module's output depends on, without a gradient: a backward that accumulates all gradients has it."""
_witness_node = get_gradient_edge(witness).node


def has_hooks(param: Any) -> bool:
    """Whether a parameter of :class:`PendingGradients` has hooks of the user, which autograd calls with its gradient."""
    # One of each kind is that of add().
    return len(param._backward_hooks) > 1 or len(param._post_accumulate_grad_hooks) > 1


def _is_partial() -> bool:
    """Whether this backward is one of some tensors only: it was given them."""
    # Autograd accumulates in each leaf of the graph, unless it was given inputs: then it passes over the witness.
    return gradient_use(_witness_node) is not GradientUse.ACCUMULATED


def _use_of(param: torch.nn.Parameter) -> GradientUse:
    """What this backward does with the gradient of a parameter."""
    return gradient_use(get_gradient_edge(param).node)


def _note_gradient(pending: weakref.ref[PendingGradients], param: torch.nn.Parameter) -> None:
    """A gradient has arrived in ``.grad``."""
    this = pending()
    if this is not None:
        this._note(param)


def _goal(given: Sequence[Placement], wanted: Sequence[Placement]) -> tuple[Placement, ...]:
    """A gradient may stay pending. One that is whole or cut is not made pending: torch refuses it, and nobody gains."""
    return tuple([old if isinstance(new, Partial) else new for old, new in zip(given, wanted)])


def _sum_dims(given: Sequence[Placement], wanted: Sequence[Placement]) -> tuple[int, ...] | None:
    """The mesh dimensions over which a gradient is only pending a sum; None if something else changes."""
    dims = []
    for dim, (old, new) in enumerate(zip(given, wanted)):
        if old == new:
            continue
        if not (type(old) is Partial and old.reduce_op == "sum" and isinstance(new, Replicate)):
            return None
        dims.append(dim)
    return tuple(dims)


def _buckets_of(arrived: Sequence[_Arrived]) -> list[list[_Arrived]]:
    """Runs of gradients of at most ``_BUCKET`` bytes."""
    buckets: list[list[_Arrived]] = [[]]
    size = 0
    for each in arrived:
        nbytes = each[1].nbytes
        # By sizes alone, which are equal on all ranks that add these gradients: their buckets are the same ones.
        if buckets[-1] and size + nbytes > _BUCKET:
            buckets.append([])
            size = 0
        buckets[-1].append(each)
        size += nbytes
    return buckets
