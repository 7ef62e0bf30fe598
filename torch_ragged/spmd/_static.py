"""Static modules: inside of them, local tensors flow and only the plan's boundaries run. DTensor takes no part.

It must not change a result: a module is static for a call only if a trial has shown, for a call with the same facts, that its
local ops are those of eager mode. Any other call runs in eager mode.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from torch_ragged._register._torch import backward_id, functorch_is_active
from torch_ragged.spmd._boundary import Redistribution, Shared, as_dtensor, is_own_hook, local_moves
from torch_ragged.spmd._gradients import Leaf, PendingGradients, has_hooks, witness
from torch_ragged.spmd._move import Placed, clean, differentiable_once, make_dtensor, move_dtensor
from torch_ragged.spmd._resolved import Resolved
from torch_ragged.spmd._static_facts import Facts, NoFacts, modes
from torch_ragged.spmd._static_trial import Found, Island, Refused, count_uses, edge_of, is_even_dtensor, try_module

__all__ = ["StaticModules", "StaticReport"]

_KINDS = 64
"""Kinds of calls of one module that are remembered: a call of a further kind runs in eager mode."""


@dataclass(frozen=True)
class StaticReport:
    """Which modules are static, and why others are not.

    Attributes:
        modules: the names of the outermost static modules.
        reasons: for each other module in which something happened that a static module cannot do: what.
    """

    modules: tuple[str, ...]
    reasons: dict[str, str]

    def __str__(self) -> str:
        lines = [f"static: {', '.join(name or '(root)' for name in self.modules) or 'no module'}"]
        return "\n".join([*lines, *(f"eager: {name or '(root)'}: {reason}" for name, reason in self.reasons.items())])


class StaticModules:
    """Finds the static modules of a parallelized model, and runs them.

    A call of a module has *facts*: placements, shapes and types of its arguments, the modes of torch, hooks, and all
    attributes, globals and closures that its code may read (:class:`Facts`). The first call with new facts runs in eager
    mode. Before the second one, the module runs forward and backward on copies, on DTensors and on local tensors, without
    communication. If both runs compute the same, op by op, the module is static for calls with these facts; if not, it is
    eager, and its children are tried. A module that is static at its outermost is one region: local tensors flow through it.

    Ranks need not agree: a static call and an eager one issue the same collectives in the same order, with the same bytes.
    So a rank on which facts differ does not leave others waiting. No collective is issued to find static modules.
    """

    def __init__(
        self, model: nn.Module, mesh: DeviceMesh, resolved: Resolved, changes: Sequence[Any], gradients: PendingGradients
    ) -> None:
        self.mesh, self.gradients = mesh, gradients
        self.changes = [change for change in changes if isinstance(change, Redistribution)]
        self._regions: dict[str, _Region] = {}
        makers = {each.module for each in resolved.factories}  # Their rules hold in all modules in them, too.
        reasons = {
            name: "a rule for factories makes DTensors in it"
            for name, _ in model.named_modules()
            if any(_is_in(name, each) for each in makers)
        }
        reasons |= {each.module: "a rule annotates a tensor of it" for each in resolved.boundaries if each.action == "annotate"}
        for name, module in model.named_modules():
            self._regions[name] = _Region(self, module, name)
        for name, reason in reasons.items():
            self.forbid(name, reason)
        for name, region in self._regions.items():
            region.around = [other for outer, other in self._regions.items() if _is_in(name, outer)]
        self._watched: list[tuple[_Kind, int, Any]] = []
        model.register_forward_pre_hook(self._begin_forward, prepend=True)
        model.register_forward_hook(self._end_forward)
        for region in self._regions.values():
            inner = [each for each in region.module.modules() if each is not region.module]
            has_units = any(isinstance(each, FSDPModule) for each in inner)  # They are called with DTensors.
            if has_units or not any(isinstance(param, DTensor) for param in region.module.parameters()):
                region.make_eager()

    def _begin_forward(self, *_: Any) -> None:
        _now.begin_forward()
        self._watched.clear()

    def watch_uses(self, kind: _Kind, leaves: Sequence[Any]) -> None:
        """When this forward ends, note how often the inputs of a call in eager mode were used."""
        inputs = [(i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, DTensor) and leaf.requires_grad]
        if torch.is_grad_enabled() and inputs:
            self._watched += [(kind, index, edge_of(leaf)) for index, leaf in inputs]
        else:
            kind.is_watched = True

    def _end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        watched, self._watched = self._watched, []
        if not watched:
            return
        # What the script may use: outputs, and what modules have stored.
        kept = [
            value
            for each in module.modules()
            for name, value in vars(each).items()
            if name not in _OF_MODULES and isinstance(value, _KEPT)
        ]
        ends = [leaf for leaf in _tensors_in((output, kept)) if leaf.requires_grad]
        used = [*map(edge_of, ends)]
        edges: dict[Any, Any] = {position: edge for position, (_, _, edge) in enumerate(watched)}
        params = self.gradients.edges()
        uses = count_uses(ends, {**edges, **{edge: edge for each in params.values() for edge in each}})
        for position, (kind, index, edge) in enumerate(watched):
            kind.uses[index] = max(uses[position] + used.count(edge), kind.uses.get(index, 0))
            kind.is_watched = True
        for param, each in params.items():
            if sum(uses[edge] for edge in each) > 1 and self.gradients.share(param):
                for region in self._regions.values():
                    region.forget(param)

    @property
    def report(self) -> StaticReport:
        """What was found so far: no module is static before its second call."""
        static = [name for name, region in self._regions.items() if region.is_static]
        told = {name: region.reason or region.other_facts() for name, region in self._regions.items()}
        reasons = {name: reason for name, reason in told.items() if reason}
        outermost = [n for n in static if not any(n != other and _is_in(n, other) for other in static)]
        draws = {name: reason for n in outermost for name, reason in self._regions[n].draws().items()}
        return StaticReport(tuple(outermost), {**draws, **reasons})

    def forbid(self, name: str, reason: str) -> None:
        """A module is eager from now on, for ``reason``, and so are those around it. Those in it are tried."""
        for other, region in self._regions.items():
            if _is_in(name, other):
                region.make_eager(reason if other == name else "")
            elif _is_in(other, name):
                region.wake()

    def now_static(self, static: _Region) -> None:
        """Modules in a static one cost nothing: their own hooks go. They come again if it becomes eager."""
        for name, region in self._regions.items():
            if region is not static and _is_in(name, static.name):
                region.sleep()


def _is_in(name: str, outer: str) -> bool:
    return not outer or name == outer or name.startswith(f"{outer}.")


class _Now:
    """What runs on local tensors now.

    Attributes:
        region: the static module that runs, or is on trial: modules in it do nothing of their own, also those of other models.
        found: what its trial found.
    """

    region: Optional[_Region] = None
    found: Optional[Found] = None

    def enter(self, region: _Region, found: Optional[Found]) -> None:
        self.region, self.found, local_moves.of = region, found, None if found is None else found.moves

    def leave(self) -> None:
        self.region, self.found, local_moves.of = None, None, None

    def begin_forward(self) -> None:
        """A call that was interrupted from the keyboard has left local tensors behind."""
        if self.region is not None and backward_id() < 0 and not self.region.is_on_trial:
            self.region.unbind()
            self.leave()


_now = _Now()


class _Call:
    """A call in eager mode. The hooks on its outputs have it, so it lives as long as its graph of autograd."""


@dataclass
class _Kind:
    """Calls of a module with the same facts.

    Attributes:
        arrivals: the placements of the gradients that reached outputs.
        uses: how often each input was used, in the whole model.
        found: what the trial found; None before it, or if it refused.
        reason: why calls of this kind are eager, for good.
        is_watched: whether there was one, in eager mode.
        pending: those in eager mode whose backward may still come. It may compute a checkpoint again, which must be eager, too.
        is_stale: whether a gradient has arrived under other placements than those of the trial.
        changes: how often that was so.
    """

    arrivals: dict[int, Placed] = field(default_factory=dict)
    uses: dict[int, int] = field(default_factory=dict)
    found: Optional[Found] = None
    reason: Optional[str] = None
    is_watched: bool = False
    pending: weakref.WeakSet[_Call] = field(default_factory=weakref.WeakSet)
    is_stale: bool = False
    changes: int = 0

    def arrive(self, index: int, placements: Placed) -> None:
        self.arrivals[index] = placements
        self.is_stale = True
        self.changes += 1
        if self.changes > 3:
            self.reason = "gradients of its outputs arrive under other placements from step to step: add a rule with grad="


@dataclass
class _State:
    """The kinds of calls of a module with the same :class:`Facts`."""

    facts: Facts
    reason: Optional[str]
    kinds: dict[Any, _Kind] = field(default_factory=dict)


class _Region(Shared):
    """One module of a model in static mode.

    At its entry, DTensors become local tensors; at its exit, local tensors become DTensors, if the call is of a kind that is
    static.
    """

    def __init__(self, owner: StaticModules, module: nn.Module, name: str) -> None:
        self.module, self.name = module, name
        self.gradients = owner.gradients
        self.reason: Optional[str] = None
        """Why the module is eager for good; an empty text: because of a module in it; None: it is not."""
        self.is_on_trial = False
        self.leaves: list[Leaf] = []
        """Of the call that runs."""
        self.around: list[_Region] = []
        """This region and those that it is in."""
        self._used_before = -1
        """The number of the backward before which its parameters were last used."""
        self._leaves: list[Leaf] = []
        self._owner = owner
        self._states: list[_State] = []
        self._running: list[tuple[str, Optional[_Kind]]] = []
        self._params = [
            _LocalParam(vars(each), each._parameters, key, f"{prefix}.{key}" if prefix else key)
            for prefix, each in module.named_modules()
            for key, param in each._parameters.items()
            if param is not None
        ]
        self._buffers = [(each, key) for each in module.modules() for key in each._buffers]
        self._handles: list[Any] = []
        self._island_hooks: dict[nn.Module, list[Any]] = {}
        self.wake()

    @property
    def is_static(self) -> bool:
        return any(kind.found for state in self._states for kind in state.kinds.values())

    def draws(self) -> dict[str, str]:
        """The modules in it that draw random numbers, with the op."""
        found = [kind.found for state in self._states for kind in state.kinds.values() if kind.found is not None]
        return {name: reason for each in found for name, reason in each.draws.items()}

    def other_facts(self) -> Optional[str]:
        """Why no call is static, if each has other facts than those before it."""
        if self.is_static or len(self._states) < 3:
            return None
        return f"each call finds another value of {self._states[1].facts.changed()}"

    def wake(self) -> None:
        """Look at calls of the module, unless it is eager for good."""
        if self.reason is None and not self._handles:
            # After the plan's boundaries at the entry, before those at the exit: what the module itself sees.
            self._handles = [
                self.module.register_forward_pre_hook(self._enter, with_kwargs=True),
                self.module.register_forward_hook(self._leave, prepend=True, always_call=True),
            ]

    def sleep(self) -> None:
        for handle in (*self._handles, *(handle for handles in self._island_hooks.values() for handle in handles)):
            handle.remove()
        self._handles, self._states, self._running = [], [], []
        self._island_hooks.clear()

    def make_eager(self, reason: str = "") -> None:
        """The module runs in eager mode from now on."""
        self.reason = self.reason or reason
        self.sleep()

    # -- calls

    def _enter(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        # The copy of a module has its hooks, and parameters that are not those of the region.
        if _now.region is not None or module is not self.module or functorch_is_active():
            return None
        leaves, tree = pytree.tree_flatten((args, kwargs))
        state, kind = self._kind_of(leaves, tree)
        self._running.append(("eager", None))
        found = None if state is None or kind is None else self._found_for(state, kind, leaves, tree)
        # Before one backward, parameters may be used several times. Only the first use is by leaves. Its gradient arrives last,
        # and is added to the sum of the others, as in eager mode.
        backward, is_first = self.gradients.backwards, self._used_before != self.gradients.backwards
        if torch.is_grad_enabled():
            for region in (self,) if found is not None else self.around:
                region._used_before = backward
        if found is None:
            return None
        self._running[-1] = ("static", kind)
        _now.enter(self, found)
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, DTensor):
                spec = found.input_grads.get(index)
                leaves[index] = _ToLocal.apply(leaf, spec or leaf._spec, None if spec else clean(leaf.placements))
        self._bind(found, is_first)
        return pytree.tree_unflatten(leaves, tree)

    def _found_for(self, state: _State, kind: _Kind, leaves: Sequence[Any], tree: Any) -> Optional[Found]:
        """What a trial of this kind of calls found, perhaps now; None: this call is eager."""
        if kind.reason is not None and backward_id() < 0:
            kind.found = None  # Not before: a checkpoint whose forward was static is computed again as it was.
        if kind.reason is not None and kind.found is None:
            return None
        # Time: the first call of a kind is watched, and a later one is tried, when the gradients of the first have arrived.
        if kind.found is None or kind.is_stale:
            # A call that activation checkpointing runs again is as the first one was.
            if kind.found is None and (backward_id() >= 0 or not kind.is_watched or kind.pending):
                self._running[-1] = ("watched", kind)
                if backward_id() < 0:
                    self._owner.watch_uses(kind, leaves)
                return None
            if backward_id() < 0:
                self._try(state, kind, leaves, tree)
        return kind.found

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self._running or _now.region not in (None, self) or module is not self.module:
            return None
        state, kind = self._running.pop()
        if state == "static":
            _now.leave()
            self.unbind()
        if output is None or kind is None:  # It raised, or it ran in eager mode.
            return None
        leaves, tree = pytree.tree_flatten(output)
        if state == "watched":
            call = _Call()
            for index, leaf in enumerate(leaves):
                if isinstance(leaf, DTensor) and leaf.requires_grad and not leaf.is_leaf:
                    leaf.register_hook(functools.partial(_note_arrival, kind, call, index))
                    if backward_id() < 0:
                        kind.pending.add(call)
            return None
        assert kind.found is not None
        for index, (leaf, spec) in enumerate(zip(leaves, kind.found.outputs)):
            if spec is None:
                continue
            if not leaf.requires_grad:
                leaves[index] = DTensor(leaf, spec, requires_grad=False)  # type: ignore[call-arg]
                continue
            known = [each.param for each in self.leaves[:1]]
            leaves[index] = _FromLocal.apply(leaf, self, kind, index, spec, witness, *known)
        return pytree.tree_unflatten(leaves, tree)

    def _kind_of(self, leaves: Sequence[Any], tree: Any) -> tuple[Optional[_State], Optional[_Kind]]:
        """The kind of a call; None: it cannot be static."""
        key = [tree, modes()]
        for leaf in leaves:
            if isinstance(leaf, DTensor):
                mesh = self._owner.mesh
                if (leaf.device_mesh is not mesh and leaf.device_mesh != mesh) or not is_even_dtensor(leaf):
                    return None, None
                key += (leaf.placements, leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad)
            elif isinstance(leaf, torch.Tensor):
                key += (leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad, type(leaf))
            elif leaf is None or isinstance(leaf, (bool, int, float, complex, str, torch.dtype, torch.device)):
                key += (type(leaf), leaf)
            else:  # An object may keep tensors, such as a cache of keys: they are DTensors.
                return None, None
        whole = tuple(key)
        state = next((each for each in self._states if each.facts.hold()), None)
        if state is None:
            state = self._new_state()
            if state is None:
                return None, None
        if state.reason is not None:
            return None, None
        kind = state.kinds.get(whole)
        if kind is None:
            if len(state.kinds) >= _KINDS:
                return None, None
            kind = state.kinds[whole] = _Kind()
        return state, kind

    def _new_state(self) -> Optional[_State]:
        if len(self._states) >= _KINDS:
            return None
        try:
            state = _State(Facts(self.module), _users_hook(self.module, self.name))
        except NoFacts as error:
            self._owner.forbid(self.name, str(error))
            return None
        self._states.insert(0, state)
        return state

    def _try(self, state: _State, kind: _Kind, leaves: Sequence[Any], tree: Any) -> None:
        """See whether calls of this kind can be static, on copies of tensors. The module is as before afterwards."""
        owner = self._owner
        kind.found, kind.is_stale, self.is_on_trial = None, False, True
        _now.enter(self, None)  # Modules in it are called on trial, and must not watch or try themselves.
        try:
            kind.found = try_module(
                self.module, self.name, leaves, tree, kind.arrivals, owner.changes, owner.mesh, self._run_on_trial(tree)
            )
            changed = state.facts.changed()
            if changed is not None:
                raise Refused(self.name, f"its forward changes {changed}")
            for index, inside in kind.found.uses.items():
                # Eager mode adds up all gradients of a tensor one by one; a static module adds up its own first.
                if inside > 1 and kind.uses.get(index, 0) > inside:
                    raise Refused(self.name, f"the gradient of input {index} would be added up in another order")
        except Refused as refused:
            kind.found, kind.reason = None, refused.reason
            if not self.is_static:  # Not only for calls of this kind.
                owner.forbid(refused.module, refused.reason)
            return
        finally:
            state.facts.restore()
            self.is_on_trial = False
            _now.leave()
        owner.now_static(self)
        for module in kind.found.islands:
            if module not in self._island_hooks:
                self._island_hooks[module] = [
                    module.register_forward_pre_hook(self._to_island, with_kwargs=True),
                    module.register_forward_hook(self._from_island, prepend=True),
                ]
        state.facts = Facts(self.module)  # Hooks of this object have changed, and nothing else.

    def _run_on_trial(self, tree: Any) -> Any:
        def run(found: Found, leaves: Sequence[Any], params: dict[str, Any]) -> Any:
            _now.enter(self, found)
            hooks = []
            for each in self._params:
                local = params[each.name]
                each.attributes[each.key] = _pending_if(local, found.shares.get(each.name))
            for module in found.islands:
                if module not in self._island_hooks:
                    hooks.append(module.register_forward_pre_hook(self._to_island, with_kwargs=True))
                    hooks.append(module.register_forward_hook(self._from_island, prepend=True))
            args, kwargs = pytree.tree_unflatten(list(leaves), tree)
            try:
                return self.module.forward(*args, **kwargs)
            finally:
                for hook in hooks:
                    hook.remove()
                self.unbind()

        return run

    # -- parameters and buffers

    def _bind(self, found: Found, by_leaves: bool) -> None:
        """While the module runs, attributes of the instances are local tensors."""
        for each in self._params:
            param: Any = each.registered[each.key]
            spec = found.param_grads.get(each.name)
            if not by_leaves and spec is not None and param.requires_grad:
                each.attributes[each.key] = _pending_if(_ToLocal.apply(param, spec, None), found.shares.get(each.name))
                continue
            is_known = param is each.of and spec is each.spec and param._local_tensor.data_ptr() == each.address
            is_known = is_known and param.requires_grad == each.requires_grad and not (each.leaf and has_hooks(param))
            local = each.local if is_known else self._local_of(each, param, spec)
            if local is not None:
                each.attributes[each.key] = _pending_if(local, found.shares.get(each.name))
        self.leaves = self._leaves if by_leaves else []
        for owner, key in self._buffers:
            buffer = owner._buffers.get(key)
            if isinstance(buffer, DTensor):
                vars(owner)[key] = buffer._local_tensor

    def unbind(self) -> None:
        for each in self._params:
            each.attributes.pop(each.key, None)
        for owner, key in self._buffers:
            vars(owner).pop(key, None)

    def _local_of(self, each: _LocalParam, param: Any, spec: Any) -> Optional[torch.Tensor]:
        """What a parameter's attribute is while the module runs; kept until the parameter or its memory is another one."""
        each.of, each.spec = None, spec
        if not isinstance(param, DTensor):
            return None
        if param.requires_grad and spec is not None:
            each.leaf = self.gradients.leaf_of(param, spec.placements)  # type: ignore[arg-type]
            if each.leaf is None:  # A unit's: gathered anew for each forward. Or one with hooks: autograd goes to it.
                self._leaves = [leaf for leaf in self._leaves if leaf.param is not param]
                return _ToLocal.apply(param, spec, None)
            each.local = each.leaf.local
        else:
            each.local, each.leaf = param._local_tensor.detach(), None
        each.of, each.address, each.requires_grad = param, param._local_tensor.data_ptr(), param.requires_grad
        self._leaves = list({id(other.leaf): other.leaf for other in self._params if other.leaf is not None}.values())
        return each.local

    def forget(self, param: Any) -> None:
        """Make what stands for a parameter anew."""
        for each in self._params:
            if each.registered.get(each.key) is param:
                each.of = each.leaf = None
        self._leaves = [leaf for leaf in self._leaves if leaf.param is not param]

    # -- modules in it that draw

    def _to_island(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        island = self._island(module)
        if island is None:
            return None
        leaves, tree = pytree.tree_flatten((args, kwargs))
        for index, spec in enumerate(island.inputs):
            if spec is not None:
                leaves[index] = _OfIsland.apply(leaves[index], spec, island.input_grads.get(index, clean(spec.placements)))
        return pytree.tree_unflatten(leaves, tree)

    def _from_island(self, module: nn.Module, args: Any, output: Any) -> Any:
        island = self._island(module)
        if island is None:
            return None
        leaves, tree = pytree.tree_flatten(output)
        for index, spec in enumerate(island.outputs):
            if spec is not None:
                leaves[index] = _ToLocal.apply(leaves[index], spec, island.output_grads.get(index, clean(spec.placements)))
        return pytree.tree_unflatten(leaves, tree)

    def _island(self, module: nn.Module) -> Optional[Island]:
        return None if _now.found is None else _now.found.islands.get(module)


@dataclass
class _LocalParam:
    """A parameter of a static module. While the module runs, its attribute is a local tensor on the same memory.

    The attribute of the instance hides the registered parameter, which optimizers and ``state_dict`` see as before.

    Attributes:
        attributes, registered: those of the module that has the parameter.
        spec: that of its gradient; None: it has none.
        of, address, requires_grad: the parameter and its memory, for which ``local`` and ``leaf`` were made.
    """

    attributes: dict[str, Any]
    registered: dict[str, Any]
    key: str
    name: str
    spec: Any = None
    of: Any = None
    address: int = 0
    requires_grad: bool = False
    local: Optional[torch.Tensor] = None
    leaf: Optional[Leaf] = None


_KEPT = (torch.Tensor, list, tuple, dict)
_OF_MODULES = set(vars(nn.Module()))


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in containers, and in objects in them."""
    leaves = pytree.tree_leaves(value)
    inner = [list(vars(leaf).values()) for leaf in leaves if not isinstance(leaf, torch.Tensor) and hasattr(leaf, "__dict__")]
    return [leaf for leaf in (*leaves, *pytree.tree_leaves(inner)) if isinstance(leaf, torch.Tensor)]


def _users_hook(module: nn.Module, name: str) -> Optional[str]:
    """Why hooks of the user keep a module eager: they are called with DTensors, and may do anything with them."""
    for inner, each in module.named_modules():
        for kind in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"):
            for hook in getattr(each, kind).values():
                if not is_own_hook(hook):
                    where = ".".join(filter(None, (name, inner))) or "the model"
                    return f"a hook on {where} is called with DTensors"
    return None


def _note_arrival(kind: _Kind, call: _Call, index: int, gradient: Any) -> None:
    kind.pending.discard(call)
    if isinstance(gradient, DTensor):
        kind.arrivals[index] = gradient.placements


def _pending_if(local: torch.Tensor, shares: Any) -> torch.Tensor:
    return _ToPending.apply(local, shares) if shares else local


class _ToPending(torch.autograd.Function):
    """A replicated local tensor as one that is pending a sum, as DTensor does it. Its gradient is that of the whole."""

    @staticmethod
    def forward(ctx, local, shares):  # type: ignore[no-untyped-def]
        for size in shares:
            local = local / size
        return local

    @staticmethod
    @differentiable_once
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return gradient, None


class _ToLocal(torch.autograd.Function):
    """A DTensor's local tensor. Its gradient has ``spec``, or the shape of ``spec`` and placements ``grads``."""

    @staticmethod
    def forward(ctx, tensor, spec, grads):  # type: ignore[no-untyped-def]
        ctx.spec, ctx.grads = spec, grads
        local = tensor._local_tensor
        return local.view_as(local)

    @staticmethod
    @differentiable_once
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        if ctx.grads is None:
            return DTensor(gradient, ctx.spec, requires_grad=False), None, None
        return make_dtensor(gradient.contiguous(), ctx.spec.mesh, ctx.grads, ctx.spec.shape), None, None


class _FromLocal(torch.autograd.Function):
    """A DTensor on an output of a region. Its gradient is brought to the placements of the trial.

    Gradients of parameters accumulate on leaves of their own. One parameter is an input here, so that a backward for parameters
    alone passes here and raises. All of them would cost a tenth of a small step.
    """

    @staticmethod
    def forward(ctx, local, region, kind, index, spec, *params):  # type: ignore[no-untyped-def]
        ctx.gradients, ctx.leaves = region.gradients, region.leaves  # Of this call: the next one may be of another kind.
        ctx.kind, ctx.index, ctx.mesh, ctx.params = kind, index, spec.mesh, len(params)
        ctx.grads = kind.found.output_grads.get(index)
        return DTensor(local, spec, requires_grad=local.requires_grad)

    @staticmethod
    @differentiable_once
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        ctx.gradients.collect(ctx.leaves)
        gradient = as_dtensor(gradient, ctx.mesh)  # Behind a backward hook, that of an unused output is plain zeros.
        if gradient.placements != ctx.grads:
            # The value is right; another order of sums than in eager mode, in this step alone.
            ctx.kind.arrive(ctx.index, gradient.placements)
            gradient = move_dtensor(gradient, ctx.grads)  # Perhaps to a sum that is pending, which DTensor's method refuses.
        return gradient._local_tensor, None, None, None, None, *(None,) * ctx.params


class _OfIsland(torch.autograd.Function):
    """A DTensor on a local tensor in a region, for a module that draws."""

    @staticmethod
    def forward(ctx, local, spec, grads):  # type: ignore[no-untyped-def]
        ctx.grads = grads
        return DTensor(local, spec, requires_grad=local.requires_grad)

    @staticmethod
    @differentiable_once
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        if gradient.placements != ctx.grads:
            gradient = move_dtensor(gradient, ctx.grads)
        return gradient._local_tensor, None, None
