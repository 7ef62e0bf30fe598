"""Static modules: inside of them, local tensors flow and only the plan's boundaries run. DTensor takes no part.

It must not change a result: a module becomes static only if, on the inputs of a warm-up, it computes the bits of eager mode.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.utils import _pytree as pytree
from torch.utils._debug_mode import DebugMode
from torch.utils._python_dispatch import _disable_current_modes

from torch_ragged._register._torch import backward_id, current_autograd_node, next_sequence_number
from torch_ragged.random._tape import read_state, write_state
from torch_ragged.spmd._boundary import Redistribution
from torch_ragged.spmd._gradients import Leaf, PendingGradients, has_hooks
from torch_ragged.spmd._move import Move, Placed, can_move, clean, differentiable_once, is_even, make_dtensor, move_dtensor
from torch_ragged.spmd._resolved import Resolved
from torch_ragged.tensor.placement_types import has_ragged, whole_shape

__all__ = ["StaticModules", "StaticReport"]


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


_UNEVEN = "is cut unevenly: local sizes do not tell the global ones"
_Bits = dict[Any, bytes]
"""Digests of the local tensors of one module: ("out", index), ("grad out", index), ("grad in", index), ("param", name)."""


@dataclass
class _Seen:
    """What the warm-up saw of one module: the placements of its tensors, in the order of pytree leaves, and what forbids it.

    A tensor that is no DTensor has None; ``plain`` says which of its dimensions are 1. Gradients are known after backward.
    """

    inputs: list[Optional[Placed]] = field(default_factory=list)
    plain: list[Any] = field(default_factory=list)
    outputs: list[Optional[Placed]] = field(default_factory=list)
    input_grads: dict[int, Placed] = field(default_factory=dict)
    output_grads: dict[int, Placed] = field(default_factory=dict)
    param_grads: dict[str, Placed] = field(default_factory=dict)
    calls: int = 0
    bits: _Bits = field(default_factory=dict)


class StaticModules:
    """Finds the static modules of a parallelized model at its first call with gradients, and runs them.

    At that call, the model runs forward and backward in eager mode while every module's placements are recorded. The outermost
    modules in which nothing else than local ops and boundaries happened become static. The model runs once more, on the same
    inputs and random state. Modules whose outputs or gradients have other bits, or that raise, become eager again, and their
    children are tried. Gradients, buffers and the random states are restored.

    Ranks agree: a module that has other bits on one rank is eager on all. Collectives: those of two or more steps, and in each
    round one all-gather of objects per mesh dimension.
    """

    def __init__(
        self, model: nn.Module, mesh: DeviceMesh, resolved: Resolved, changes: Sequence[Any], gradients: PendingGradients
    ) -> None:
        self.report: Optional[StaticReport] = None
        self._model, self._mesh, self._gradients = model, mesh, gradients
        self._redistributions = [change for change in changes if isinstance(change, Redistribution)]
        self._names = {module: name for name, module in model.named_modules()}
        # In these modules, rules make DTensors of local tensors.
        self._reasons = {each.module: "a rule for factories makes DTensors in it" for each in resolved.factories}
        self._reasons |= {
            each.module: "a rule annotates a tensor of it" for each in resolved.boundaries if each.action == "annotate"
        }
        self._regions: dict[str, _Region] = {}
        self._is_warming = False
        model.register_forward_pre_hook(self._first_call, with_kwargs=True, prepend=True)

    def _first_call(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if self.report is not None or self._is_warming or not torch.is_grad_enabled():
            return
        if not any(param.requires_grad for param in model.parameters()):  # Gradients could not be compared.
            return
        self._is_warming = True
        try:
            with self._gradients.without_hooks(model.parameters()):
                self._warm_up(args, kwargs)
        finally:
            self._is_warming = False

    def _warm_up(self, args: Any, kwargs: dict[str, Any]) -> None:
        states = {device: read_state(device) for device in {"cpu", self._mesh.device_type}}
        grads = {param: param.grad for param in self._model.parameters()}
        buffers = {buffer: buffer.detach().clone() for buffer in self._model.buffers()}

        def restore() -> None:
            for device, state in states.items():
                write_state(device, state)
            with torch.no_grad():
                for buffer, value in buffers.items():
                    buffer.copy_(value)
            for param in self._model.parameters():
                param.grad = None

        def restore_all() -> None:
            restore()
            for param in self._model.parameters():
                param.grad = grads.get(param)

        watch = _Watch(self._names, self._redistributions)
        restore()
        try:
            with watch.recording():
                has_gradients = self._step(args, kwargs)
        except Exception as error:
            restore_all()
            if not _cannot_be_named(error):
                raise  # The model's own, perhaps on this rank alone: a further try would leave the others waiting.
            self.report = StaticReport((), {"": f"watching it raises {_first_line(error)}"})
            return
        if not has_gradients:
            restore_all()
            return
        self._reasons = {**self._of_all_ranks(watch.reasons), **self._reasons}
        watch.reasons = dict(self._reasons)
        chosen = list(self._outermost(watch, "", frozenset()))
        while True:
            restore()
            self._regions = {
                name: _Region(self._model.get_submodule(name), watch.seen[name], watch, self._mesh, self._gradients)
                for name in chosen
            }
            wrong = self._of_all_ranks(self._differences(watch, args, kwargs))
            for region in self._regions.values():
                region.finish(keep=not wrong)
            if not wrong:
                break
            # Equal modules of other layers do the same: they are not tried again.
            alike = {re.sub(r"\d+", "*", name): reason for name, reason in wrong.items()}
            wrong |= {name: alike[kind] for name in chosen if (kind := re.sub(r"\d+", "*", name)) in alike}
            self._reasons.update(wrong)
            chosen = [name for name in chosen if name not in wrong]
            for name in wrong:
                chosen += self._outermost(watch, name, frozenset(self._reasons))
        restore_all()
        self.report = StaticReport(tuple(chosen), {**self._of_all_ranks(watch.draws), **watch.reasons, **self._reasons})

    def _of_all_ranks(self, reasons: dict[str, str]) -> dict[str, str]:
        """What any rank says of modules, in the same order on all ranks."""
        for dim in range(self._mesh.ndim):
            group = self._mesh.get_group(dim)
            received: list[dict[str, str]] = [{}] * group.size()
            dist.all_gather_object(received, reasons, group=group)
            reasons = {}
            for part in received:
                reasons = {**part, **reasons}
        return dict(sorted(reasons.items()))

    def _step(self, args: Any, kwargs: dict[str, Any]) -> bool:
        """One forward and backward; whether there was a tensor to begin backward at."""
        output = self._model(*args, **kwargs)
        leaves = [leaf for leaf in _leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if leaves:
            leaves[0].sum().backward()
        return bool(leaves)

    def _outermost(self, watch: _Watch, name: str, tried: frozenset[str]) -> Iterator[str]:
        """The outermost modules, from ``name`` on inwards, that may be static."""
        module = self._model.get_submodule(name)
        if name not in tried and watch.allows(name, module):
            yield name
            return
        for child, _ in module.named_children():
            yield from self._outermost(watch, f"{name}.{child}" if name else child, tried)

    def _differences(self, watch: _Watch, args: Any, kwargs: dict[str, Any]) -> dict[str, str]:
        """The static modules that compute something else than eager mode, with the reason.

        Wrong values of one module make those of modules after it wrong. So only modules with the right inputs are told.
        """
        try:
            self._step(args, kwargs)
        except Exception as error:
            name = next((name for name, region in self._regions.items() if region.is_inside), None)
            if not self._regions:
                raise
            where = "forward" if name is not None else "backward"
            reason = f"on local tensors, its {where} raises {_first_line(error)}"
            return dict.fromkeys([name] if name is not None else self._regions, reason)
        for kind, given in (("out", "in"), ("param", "grad out"), ("grad in", "grad out")):
            wrong = {}
            for name, region in self._regions.items():
                eager, static = watch.seen[name].bits, region.bits
                other = [key for key, bits in eager.items() if key[0] == kind and static.get(key) != bits]
                has_equal_inputs = all(static.get(key) == bits for key, bits in eager.items() if key[0] == given)
                if other and has_equal_inputs:
                    wrong[name] = f"on local tensors, {_what(other[0])} has other bits"
            if wrong:
                return wrong
        return {}


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)}".splitlines()[0].removesuffix(": ")


def _cannot_be_named(error: Exception) -> bool:
    """Whether torch has no text for the placements of a redistribution that it watches. They are equal on all ranks."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code.co_name == "stringify_transform_infos" for frame, _ in frames)


def _what(key: Any) -> str:
    kind, index = key
    return {
        "out": f"output {index}",
        "param": f"the gradient of {index}",
        "grad in": f"the gradient of input {index}, which is added up in another order,",
    }[kind]


# -- what happens in eager mode --------------------------------------------------------------------------------------------


class _Watch(DebugMode):
    """Records what each module does in one eager forward and backward."""

    def __init__(self, names: dict[nn.Module, str], redistributions: Sequence[Redistribution]) -> None:
        super().__init__()
        self.seen: dict[str, _Seen] = {}
        self.reasons: dict[str, str] = {}
        self._spans: dict[str, tuple[int, int]] = {}
        self.moves: dict[Redistribution, list[Any]] = {each: [] for each in redistributions}
        self.draws: dict[str, str] = {}
        """Modules that draw random numbers, with the op."""
        self.shares: dict[tuple[nn.Module, str], tuple[int, ...]] = {}
        """Replicated parameters that an op took as pending a sum, such as the bias of a row-parallel layer: by module and name,
        as units register another object between uses. The sizes of the mesh dimensions of the sum."""
        self._args: Any = ()
        self._is_local = False
        self._names = names
        self._stack: list[str] = []
        self.handles: list[Any] = []
        """Hooks on modules and parameters, which outlive the step."""

    def allows(self, name: str, module: nn.Module) -> bool:
        """Whether nothing in the module, and in all of its submodules, forbids that it is static."""
        inside = {each for each in self.seen if each == name or not name or each.startswith(f"{name}.")}
        seen = self.seen.get(name)
        if name in self.draws:
            self.forbid(name, self.draws[name])
        if seen is None or any(each in self.reasons for each in inside) or not any(seen.inputs):
            return False
        islands = self.islands(name)
        for each in inside & set(self.draws):
            if each not in islands:
                self.forbid(each, self.draws[each])
                return False
        if not all(self._has_known_gradients(each) for each in (name, *islands)):
            return False
        uneven = next((key for key, param in module.named_parameters() if not _is_even(param)), None)
        if uneven is not None:
            self.forbid(name, f"{uneven} {_UNEVEN}")
        return uneven is None and any(isinstance(param, DTensor) for param in module.parameters())

    def islands(self, name: str) -> list[str]:
        """The modules inside of ``name`` that draw random numbers and do nothing else, such as dropout."""
        modules = {known: module for module, known in self._names.items()}
        return [
            each
            for each in self.draws
            if each != name and (not name or each.startswith(f"{name}.")) and not list(_of(modules[each]))
        ]

    def _has_known_gradients(self, name: str) -> bool:
        """Whether local tensors can flow into the module and out of it."""
        seen = self.seen[name]
        pairs = [(p, seen.input_grads.get(i)) for i, p in enumerate(seen.inputs)]
        pairs += [(p, seen.output_grads.get(i)) for i, p in enumerate(seen.outputs)]
        for placements, grads in pairs:
            if placements is not None and not can_move(placements):
                return False
            if placements is not None and grads is not None and not all(map(_goes_with, placements, grads)):
                told = "".join(map(str, grads))
                self.forbid(
                    name, f"the gradient of a tensor under {''.join(map(str, placements))} is {told}: add a rule with grad="
                )
                return False
        return True

    def _module_of_backward(self) -> Optional[str]:
        """The innermost module whose forward made the node of autograd that runs now: nodes are numbered as they are made."""
        node = current_autograd_node()
        number = -1 if node is None else node._sequence_nr()
        around = [(stop - start, name) for name, (start, stop) in self._spans.items() if start <= number < stop]
        return min(around)[1] if around else None

    def recording(self) -> Any:
        return _Recording(self)

    # -- hooks

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        name = self._names[module]
        if backward_id() >= 0:  # Recomputation for backward.
            self._stack.append(name)
            return
        leaves = pytree.tree_leaves((args, kwargs))
        self._stack.append(name)
        self._forbid_dataclasses(name, leaves)
        seen = self.seen.setdefault(name, _Seen())
        seen.calls += 1
        self._spans[name] = (next_sequence_number(), 0)
        if seen.calls > 1:
            self.forbid(name, "it runs more than once in a forward")
        if not all(map(_is_even, leaves)):
            self.forbid(name, f"its input {_UNEVEN}")
        seen.inputs = self._record(leaves, seen.input_grads, seen.bits, "grad in")
        seen.plain = _plain(leaves)
        seen.bits.update({("in", i): _bits(leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)})
        for inner, param in module.named_parameters():
            if isinstance(param, DTensor) and param.requires_grad:
                self.handles.append(param.register_hook(functools.partial(self._note_param, seen, inner)))

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        name = self._stack.pop()
        if backward_id() >= 0:
            return
        self._spans[name] = (self._spans[name][0], next_sequence_number())
        seen, leaves = self.seen[name], pytree.tree_leaves(output)
        self._forbid_dataclasses(name, leaves)
        seen.outputs = self._record(leaves, seen.output_grads, seen.bits, "grad out")
        if not all(map(_is_even, leaves)):
            self.forbid(name, f"its output {_UNEVEN}")
        seen.bits.update({("out", i): _bits(leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)})

    def _forbid_dataclasses(self, name: str, leaves: list[Any]) -> None:
        """pytree takes a dataclass for a leaf, so a static module would not see the tensors in it."""
        for leaf in filter(_is_dataclass, leaves):
            if any(isinstance(each, torch.Tensor) for each in _leaves(leaf)):
                kind = type(leaf).__name__
                self.forbid(name, f"a {kind} enters or leaves it: static modules see tensors in tuples, lists and dicts only")

    def _record(self, leaves: list[Any], grads: dict[int, Placed], bits: _Bits, kind: str) -> list[Optional[Placed]]:
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, DTensor) and leaf.requires_grad:

                def note(grad: Any, index: int = index) -> None:
                    grads[index] = grad.placements
                    bits[kind, index] = _bits(grad)

                leaf.register_hook(note)
        return [leaf.placements if isinstance(leaf, DTensor) else None for leaf in leaves]

    def _note_param(self, seen: _Seen, inner: str, grad: Any) -> None:
        seen.param_grads[inner] = grad.placements
        seen.bits["param", inner] = _bits(grad)

    def observe(self, change: Redistribution) -> Callable[..., None]:
        def note(given: Placed, wanted: Placed, result: DTensor) -> None:
            record: list[Any] = [given, wanted, wanted]
            self.moves[change].append(record)
            if not _is_even(result):
                self.forbid(change.boundary.module, f"a tensor at its boundary {_UNEVEN}")
            if result.requires_grad:
                result.register_hook(lambda grad: record.__setitem__(2, grad.placements))

        return note

    def forbid(self, name: str, reason: str) -> None:
        self.reasons.setdefault(name, reason)

    # -- ops

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._stack and torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs or {}):
            self.draws.setdefault(self._stack[-1], f"{func} draws random numbers: those of one device need its placements")
        if any(isinstance(arg, DTensor) for arg in args):  # Not what DTensor runs to find shapes.
            self._op, self._args = func, args
        return super().__torch_dispatch__(func, types, args, kwargs)

    def record_redistribute_calls(self, arg: Any, src_placement: Any, dst_placement: Any, *rest: Any, **options: Any) -> Any:
        if self._is_local:  # Told again, by what carries it out.
            return contextlib.nullcontext()
        param = self._args[arg] if isinstance(arg, int) and arg < len(self._args) else None
        if self._stack and isinstance(param, nn.Parameter) and _becomes_pending(src_placement, dst_placement):
            pairs = zip(param.device_mesh.shape, src_placement.placements, dst_placement.placements)  # type: ignore[attr-defined]
            shares = tuple([size for size, old, new in pairs if old != new])
            owners = ((module, key) for module in self._names for key, each in module._parameters.items() if each is param)
            self.shares.update(dict.fromkeys(owners, shares))
            return self._local()
        told = "->".join("".join(map(str, getattr(each, "placements", each))) for each in (src_placement, dst_placement))
        if self._stack:
            self.forbid(self._stack[-1], f"{self._op} redistributes {told}: add a rule that does it at a module's boundary")
        elif (name := self._module_of_backward()) is not None:
            self.forbid(name, f"in backward, {self._op} redistributes {told}: add a rule with grad= or grad_dst=")
        return super().record_redistribute_calls(arg, src_placement, dst_placement, *rest, **options)

    @contextlib.contextmanager
    def _local(self) -> Iterator[None]:
        self._is_local = True
        try:
            yield
        finally:
            self._is_local = False


def _of(module: nn.Module) -> Iterator[Any]:
    """What a module has: submodules, parameters, buffers."""
    yield from module.children()
    yield from module.parameters()
    yield from module.buffers()


def _becomes_pending(src: Any, dst: Any) -> bool:
    """Whether a whole tensor becomes one that is pending a sum, without communication."""
    pairs = [(a, b) for a, b in zip(src.placements, dst.placements) if a != b]
    return all(a.is_replicate() and type(b) is Partial and b.reduce_op == "sum" for a, b in pairs)


def _draws(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a random op draws here: attention does for its dropout only."""
    position = next((i for i, argument in enumerate(func._schema.arguments) if argument.name == "dropout_p"), None)
    if position is None:
        return True
    return bool(args[position] if position < len(args) else kwargs.get("dropout_p", 0))


class _Recording:
    """While it is entered: hooks on every module, and the mode."""

    def __init__(self, watch: _Watch) -> None:
        self._watch = watch

    def __enter__(self) -> None:
        for module in self._watch._names:
            # After the plan's boundaries at the entry, before those at the exit: what the module itself sees.
            self._watch.handles.append(module.register_forward_pre_hook(self._watch.enter, with_kwargs=True))
            # Also after an error, with which activation checkpointing ends a call that it runs again.
            self._watch.handles.append(module.register_forward_hook(self._watch.leave, prepend=True, always_call=True))
        for change in self._watch.moves:
            change.observe = self._watch.observe(change)
        self._watch.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._watch.__exit__(*exception)
        for handle in self._watch.handles:
            handle.remove()
        for change in self._watch.moves:
            change.observe = None


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _leaves(value: Any) -> list[Any]:
    """The leaves of a value, also those in dataclasses."""
    found: list[Any] = []
    for leaf in pytree.tree_leaves(value):
        inner = [getattr(leaf, each.name, None) for each in dataclasses.fields(leaf)] if _is_dataclass(leaf) else None
        found += [leaf] if inner is None else _leaves(inner)
    return found


def _bits(value: Any) -> bytes:
    local = value._local_tensor if isinstance(value, DTensor) else value
    with _disable_current_modes():
        return hashlib.sha256(local.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).digest()


# -- static modules --------------------------------------------------------------------------------------------------------


class _Region:
    """One static module: at its entry, DTensors become local tensors; at its exit, local tensors become DTensors.

    If it is called with other placements than in the warm-up, with uneven shards, or without gradients and with an object that
    may keep tensors, that call runs in eager mode.
    """

    def __init__(self, module: nn.Module, seen: _Seen, watch: _Watch, mesh: DeviceMesh, gradients: PendingGradients) -> None:
        self.is_inside = False
        self.bits: _Bits = {}
        self._checks = True
        self._gradient_hooks: list[Any] = []
        self._seen, self.mesh, self.sizes = seen, mesh, tuple(mesh.shape)
        self._gradients = gradients
        self.leaves: list[Leaf] = []
        self._params = [
            _LocalParam(
                vars(owner), owner._parameters, key, name, seen.param_grads.get(name), watch.shares.get((owner, key), ())
            )
            for prefix, owner in module.named_modules()
            for key, param in owner._parameters.items()
            for name in (f"{prefix}.{key}" if prefix else key,)
            if param is not None
        ]
        self._buffers = [(owner, key) for owner in module.modules() for key in owner._buffers]
        inside = {watch._names[each] for each in module.modules()}
        self._moves: list[Redistribution] = []
        for change, records in watch.moves.items():
            boundary = change.boundary
            is_own = boundary.module == watch._names[module]  # At the region's own entry and exit, DTensors flow.
            if boundary.module in inside and not is_own and records:
                src, dst, grad = records[0]
                change.static = Move(
                    mesh, src, dst, grad, clean(src) if boundary.grad_dst is None else _spoken(boundary.grad_dst, src)
                )
                self._moves.append(change)
        self._handles = [
            module.register_forward_pre_hook(self._enter, with_kwargs=True),
            module.register_forward_hook(self._leave, prepend=True, always_call=True),
        ]
        names = {name: each for each, name in watch._names.items()}
        for name in watch.islands(watch._names[module]):
            island = _Island(self, watch.seen[name])
            self._handles.append(names[name].register_forward_pre_hook(island.enter, with_kwargs=True))
            self._handles.append(names[name].register_forward_hook(island.leave, prepend=True))

    def finish(self, *, keep: bool) -> None:
        """End the warm-up. The module stays static, or becomes eager again."""
        self._checks = False
        for hook in self._gradient_hooks:
            hook.remove()
        if not keep:
            for handle in self._handles:
                handle.remove()
            for change in self._moves:
                change.static = None

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.is_inside = False  # It may be set by a call that raised.
        leaves, tree = pytree.tree_flatten((args, kwargs))
        if [leaf.placements if isinstance(leaf, DTensor) else None for leaf in leaves] != self._seen.inputs:
            return None
        # A plain tensor is whole: with the rows of the whole batch, it would not fit the local ones.
        if _plain(leaves) != self._seen.plain or not all(map(_is_even, leaves)):
            return None
        # A cache of keys lives for several calls, of which some may run in eager mode: it must not get local tensors.
        if not torch.is_grad_enabled() and any(map(_holds_state, leaves)):
            return None
        if self._checks and backward_id() < 0:  # Not where activation checkpointing runs it again.
            self.bits = {("in", i): _bits(leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        for index, (leaf, placements) in enumerate(zip(leaves, self._seen.inputs)):
            if placements is not None:
                grads = self._seen.input_grads.get(index, clean(placements))
                self._check(leaf, "grad in", index)
                leaves[index] = _ToLocal.apply(leaf, grads)
        for each in self._params:
            param: Any = each.registered[each.key]
            is_known = param is each.of and param._local_tensor.data_ptr() == each.address
            is_known = is_known and param.requires_grad == each.requires_grad and not (each.leaf and has_hooks(param))
            local = each.local if is_known else self._local_of(each, param)
            if local is not None:
                self._check(local, "param", each.name)
                each.attributes[each.key] = _ToPending.apply(local, each.shares) if each.shares else local
        for owner, key in self._buffers:
            buffer = owner._buffers[key]
            if isinstance(buffer, DTensor):
                owner.__dict__[key] = buffer._local_tensor
        self.is_inside = True
        return pytree.tree_unflatten(leaves, tree)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self.is_inside:
            return None
        for each in self._params:
            each.attributes.pop(each.key, None)
        for owner, key in self._buffers:
            owner.__dict__.pop(key, None)
        if output is None:  # It raised.
            return None
        self.is_inside = False
        leaves, tree = pytree.tree_flatten(output)
        if self._checks and backward_id() < 0:
            self.bits.update({("out", i): _bits(leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)})
        for index, (leaf, placements) in enumerate(zip(leaves, self._seen.outputs)):
            if placements is not None and isinstance(leaf, torch.Tensor):
                grads = self._seen.output_grads.get(index, clean(placements))
                self._check(leaf, "grad out", index)
                leaves[index] = _FromLocal.apply(leaf, self, placements, grads)
        return pytree.tree_unflatten(leaves, tree)

    def _local_of(self, each: _LocalParam, param: Any) -> Optional[torch.Tensor]:
        """What a parameter's attribute is while the module runs; kept until the parameter or its memory is another one."""
        if not isinstance(param, DTensor):
            return None
        grads = each.grads or param.placements
        address = param._local_tensor.data_ptr()
        tied = next((o for o in self._params if o is not each and o.of is param and o.address == address), None)
        if tied is not None:
            each.local, each.leaf = tied.local, tied.leaf
        elif param.requires_grad:
            each.leaf = self._gradients.leaf_of(param, grads)  # type: ignore[arg-type]
            if each.leaf is None:  # A unit's: gathered anew for each forward. Or one with hooks: autograd goes to it.
                each.of, self.leaves = None, [leaf for leaf in self.leaves if leaf.param is not param]
                return _ToLocal.apply(param, grads)
            each.local = each.leaf.local
        else:
            each.local, each.leaf = param._local_tensor, None
        each.of, each.address, each.requires_grad = param, address, param.requires_grad
        self.leaves = list({id(other.leaf): other.leaf for other in self._params if other.leaf is not None}.values())
        return each.local

    def collect(self) -> None:
        """Backward passes the outputs: when it ends, the leaves have gradients."""
        self._gradients.collect(self.leaves)

    def _check(self, local: torch.Tensor, kind: str, key: Any) -> None:
        """In the warm-up: note the bits of a gradient."""
        if self._checks and local.requires_grad:
            self._gradient_hooks.append(local.register_hook(lambda grad: self.bits.__setitem__((kind, key), _bits(grad))))


class _Island:
    """A module inside of a static one that draws random numbers: DTensors tell it which of one device's numbers are its own."""

    def __init__(self, region: _Region, seen: _Seen) -> None:
        self._region, self._seen = region, seen

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self._region.is_inside:
            return None
        leaves, tree = pytree.tree_flatten((args, kwargs))
        for index, placements in enumerate(self._seen.inputs):
            if placements is not None:
                grads = self._seen.input_grads.get(index, clean(placements))
                leaves[index] = _FromLocal.apply(leaves[index], self._region, placements, grads)
        return pytree.tree_unflatten(leaves, tree)

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self._region.is_inside:
            return None
        leaves, tree = pytree.tree_flatten(output)
        for index, placements in enumerate(self._seen.outputs):
            if placements is not None:
                leaves[index] = _ToLocal.apply(leaves[index], self._seen.output_grads.get(index, clean(placements)))
        return pytree.tree_unflatten(leaves, tree)


@dataclass
class _LocalParam:
    """A parameter of a static module. While the module runs, its attribute is a local tensor on the same memory.

    The attribute of the instance hides the registered parameter, which optimizers and ``state_dict`` see as before.

    Attributes:
        attributes, registered: those of the module that has the parameter.
        grads: the placements of its gradient; None: its own.
        shares: as of :class:`_Watch`.
        of, address, requires_grad: the parameter and its memory, for which ``local`` and ``leaf`` were made.
    """

    attributes: dict[str, Any]
    registered: dict[str, Any]
    key: str
    name: str
    grads: Optional[Placed]
    shares: tuple[int, ...] = ()
    of: Any = None
    address: int = 0
    requires_grad: bool = False
    local: Optional[torch.Tensor] = None
    leaf: Optional[Leaf] = None


def _is_even(value: Any) -> bool:
    """Whether all ranks have equally much of a tensor, so that the global shape follows from the local one."""
    if not isinstance(value, DTensor) or has_ragged(value.placements):  # A unit's: it takes even shards only.
        return True
    return is_even(value.shape, value.placements, tuple(value.device_mesh.shape))


def _plain(leaves: Sequence[Any]) -> list[Optional[tuple[bool, ...]]]:
    """Of each plain tensor, which dimensions are 1, so that they broadcast; None for anything else."""
    return [
        tuple([size == 1 for size in leaf.shape]) if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor) else None
        for leaf in leaves
    ]


def _holds_state(value: Any) -> bool:
    """Whether a value is an object with attributes, such as a cache of keys."""
    return hasattr(value, "__dict__") and not isinstance(value, torch.Tensor) and not callable(value)


def _goes_with(placement: Any, grad: Any) -> bool:
    """Whether local autograd can compute with a gradient of these placements."""
    if isinstance(placement, Partial):
        return grad.is_replicate()
    return grad == placement or (placement.is_replicate() and type(grad) is Partial and grad.reduce_op == "sum")


def _spoken(told: Sequence[Any], default: Placed) -> Placed:
    return tuple([new or old for new, old in zip(told, clean(default))])


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
    """A DTensor's local tensor, whose gradient has known placements."""

    @staticmethod
    def forward(ctx, tensor, grads):  # type: ignore[no-untyped-def]
        ctx.spec, ctx.grads = tensor._spec, grads
        local = tensor._local_tensor
        return local.view_as(local)

    @staticmethod
    @differentiable_once
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return make_dtensor(gradient.contiguous(), ctx.spec.mesh, ctx.grads, ctx.spec.shape), None


class _FromLocal(torch.autograd.Function):
    """A DTensor on an output of a region. Its gradient is brought to the placements of the warm-up."""

    @staticmethod
    def forward(ctx, local, region, placements, grads):  # type: ignore[no-untyped-def]
        ctx.region, ctx.grads = region, grads
        local = local.contiguous()
        return make_dtensor(local, region.mesh, placements, whole_shape(local.shape, placements, region.sizes))

    @staticmethod
    @differentiable_once
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        ctx.region.collect()
        if gradient.placements != ctx.grads:
            gradient = move_dtensor(gradient, ctx.grads)  # Perhaps to a sum that is pending, which DTensor's method refuses.
        return gradient._local_tensor, None, None, None
