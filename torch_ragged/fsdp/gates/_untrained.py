"""Warnings and errors of parameters that a step would not train, or would train differently on each rank. FSDP2 is silent.

Nothing here changes a module, the values of a parameter or an optimizer. It looks at the first forward of a root, at the steps
of an optimizer, at errors of backward, and when a root's state dict is made.
"""

from __future__ import annotations

import re
import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from torch_ragged._ranks.comparison import first_difference
from torch_ragged._ranks.groups import device_of_messages
from torch_ragged._register._torch import (
    backward_error_handlers,
    backward_id,
    backward_input_checks,
    is_wrapper,
    process_groups,
)
from torch_ragged.fsdp.core._fsdp_param import FSDPParam, group_by_param, local_of, owner_of
from torch_ragged.fsdp.core._fsdp_param_group import FSDPParamGroup, all_groups
from torch_ragged.tensor._replaced import replaced as replaced_params

__all__ = [
    "note_ignored",
    "note_replaced",
    "note_root",
    "refuse_other_replicas",
    "sharded_originals",
    "unsharded_under",
    "warn_of_unsharded",
]

sharded_originals = WeakTensorKeyDictionary()
"""The parameters that ``fully_shard`` has replaced, with their names."""

_ignored = WeakTensorKeyDictionary()  # Those that the user reduces, and those that a warning has named.
_roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_STEPS_LOOKED_AT = 2  # The first step may be the one without gradients by which a checkpoint makes the optimizer's states.


class _Look(NamedTuple):
    """What is known of an optimizer: how many parameters it had, how many looks are left, and the groups of its parameters."""

    params: int
    looks: int
    groups: weakref.WeakSet[FSDPParamGroup]


_seen: weakref.WeakKeyDictionary[Optimizer, _Look] = weakref.WeakKeyDictionary()
_optimizer_hooks: list[Any] = []
_ADVICE = (
    "Their gradients are not reduced, so that ranks diverge. Call fully_shard on a module that has them, after all modules are "
    "in place. If you reduce these gradients yourself, name the parameters in ignored_params of fully_shard"
)


def note_replaced(
    param: nn.Parameter, fqn: str, module: nn.Module, name: str, call: str = "fully_shard", remedy: str = ""
) -> None:
    """``call`` has replaced ``param``, ``name`` of ``module``: an optimizer that holds it trains nothing. A warning says so."""
    sharded_originals[param], replaced_params[param] = fqn, (weakref.ref(module), name, call, remedy)
    _seen.clear()  # Also optimizers that have made steps may hold it.
    if not _optimizer_hooks:
        # From now on, look at each optimizer of this process before its first steps, and count each step as a write.
        _optimizer_hooks.append(register_optimizer_step_pre_hook(_before_step))
        _optimizer_hooks.append(register_optimizer_step_post_hook(_after_step))


def note_ignored(params: Iterable[torch.Tensor]) -> None:
    for param in params:
        if not isinstance(param, DTensor):  # No warning asks for them, and torch cannot convert one that has a weak reference.
            _ignored[param] = None


def note_root(roots: Sequence[nn.Module]) -> None:
    """Warnings name parameters as these modules do."""
    _roots.update(roots)


def unsharded_under(roots: Sequence[nn.Module], groups: Sequence[FSDPParamGroup]) -> dict[nn.Parameter, str]:
    """The trainable parameters under ``roots`` that are in none of ``groups``, with their names. None of one rank."""
    if not _has_ranks():
        return {}
    managed = {(module, name) for group in groups for param in group.params for module, name in param.registered_names}
    found: dict[nn.Parameter, str] = {}
    for root in roots:
        for prefix, module in root.named_modules():
            for name, param in module._parameters.items():
                if param is not None and (module, name) not in managed and _is_alone(param):
                    found.setdefault(param, f"{prefix}.{name}" if prefix else name)
    return found


def warn_of_unsharded(roots: Sequence[nn.Module], groups: Sequence[FSDPParamGroup]) -> None:
    if found := unsharded_under(roots, groups):
        note_ignored(found)
        warnings.warn(
            f"{_listed(list(found.values()))} under {type(roots[0]).__name__}: fully_shard has not sharded these parameters, "
            f"which were added or replaced after it. {_ADVICE}",
            stacklevel=2,
        )


def refuse_other_replicas(roots: Sequence[nn.Module], groups: Sequence[FSDPParamGroup]) -> None:
    """Raise on all ranks if replicas (HSDP) hold other values of a parameter: they would train apart for ever.

    Collectives: those of :func:`first_difference` for each mesh with replicas. The error has names under ``roots``.
    """
    by_mesh: dict[tuple[DeviceMesh, dist.ProcessGroup], list[FSDPParamGroup]] = {}
    for group in groups:
        replicas = group.dp.replicate_group
        # A memory report runs on one rank alone. Simulated ranks send nothing, and neither does a group that was destroyed.
        if replicas is None or replicas.size() == 1 or group.plan.runs_on_meta or replicas not in process_groups():
            continue
        if dist.get_backend(replicas) != "fake":
            by_mesh.setdefault((group.params[0].sharded.device_mesh, replicas), []).append(group)  # type: ignore[attr-defined]
    for (mesh, replicas), members in by_mesh.items():
        params = [param for group in members for param in group.params]
        parts = [(index, part) for index, param in enumerate(params) for part in _parts(local_of(param.sharded))]
        # Also the groups of model parallelism: all ranks raise.
        others = [each for each in map(mesh.get_group, range(mesh.ndim)) if each is not replicas and each.size() > 1]
        device = device_of_messages(replicas)
        first = first_difference([part for _, part in parts], replicas, others, device, "the comparison of replicas")
        if first is not None:
            _roots.update(roots)
            names = members[0].dp.mesh.mesh_dim_names
            raise ValueError(
                f"{_names([params[parts[first][0]].registered_names[0]])[0]} has other values on some replicas (mesh dimension "
                f"{names[0] if names else 0}), which would train apart: call torch.manual_seed with one seed on all ranks "
                "before the model is made, load one checkpoint or state dict on all ranks, or pass check_replicas=False to "
                "fully_shard if replicas may differ (DiLoCo, torchft)"
            )


def _parts(local: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with memory that a local tensor is made of. On the meta device there are no values."""
    if is_wrapper(local):
        inside = [getattr(local, name) for name in local.__tensor_flatten__()[0]]  # type: ignore[attr-defined]
        return [part for each in inside if isinstance(each, torch.Tensor) for part in _parts(each)]
    return [local.new_empty(0, device="cpu") if local.is_meta else local]


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Fused kernels, foreach kernels of DTensors and offload write to parameters without a change of their version counters, by
    which the next forward sees that gathered ones are outdated."""
    if torch.compiler.is_compiling():
        return
    # Also those without elements on this rank: ranks must all-gather alike.
    params = [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
    torch.autograd.graph.increment_version([param for param in params if owner_of(param) is not None])


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    # Every step of every optimizer calls this: after the first two, it asks each of its groups one question. torch.compile
    # traces it.
    if torch.compiler.is_compiling():
        return
    look, count = _seen.get(optimizer), sum(len(group["params"]) for group in optimizer.param_groups)
    params: list[torch.Tensor] = []
    if look is None or look.looks or look.params != count:
        params = [param for group in optimizer.param_groups for param in group["params"]]
    if look is None or look.params != count:
        look = _Look(count, _STEPS_LOOKED_AT, weakref.WeakSet(group for _, group in _sharded_of(params)))
    waiting = [group for group in look.groups if group.is_unsynchronized]
    if waiting and backward_id() == -1:  # Optimizers that step in backward do so while other groups reduce.
        _refuse_unsynchronized(optimizer, waiting)
    if not look.looks:
        return
    _refuse_unsharded(optimizer, params)
    _refuse_promoted(optimizer, params)
    _refuse_gathered(optimizer, params)
    texts = []
    replaced = [replaced_params[param] for param in params if param in replaced_params]
    if names := _names((module(), name) for module, name, *_ in replaced):
        *_, call, remedy = replaced[0]
        texts.append(
            f"has parameters that {call} has replaced since: {_listed(names)}. Its step does not train the model: make the "
            f"optimizer and its groups (such as those of matrix_groups) of model.parameters() after {call}{remedy}"
        )
    texts += _of_detached(params) + _of_alone(optimizer, params) + _of_offload(optimizer, params)
    # Not of groups that accumulate: the program has set .grad, as DCP does to make states, or the step was refused above.
    pending = [owner for owner, group in _sharded_of(params) if group.is_pending and not group.is_unsynchronized]
    if pending and backward_id() == -1:
        names = _names(owner.registered_names[0] for owner in pending)
        texts.append(
            f"makes a step while gradients of its parameters are not reduced: {_listed(names)}. They are not in .grad, so that "
            "this step does not use them. A backward used parameters that unshard() has gathered, outside of a forward: the "
            "next backward of their modules reduces them"
        )
    _seen[optimizer] = look._replace(looks=0 if texts else look.looks - 1)
    for text in texts:
        warnings.warn(f"{type(optimizer).__name__} {text}", stacklevel=3)


def _refuse_unsynchronized(optimizer: Optimizer, waiting: Sequence[FSDPParamGroup]) -> None:
    """An error on all ranks, at every step: without it, a step would leave gradients out, or use a part of them."""
    # If a program has set ``.grad`` since then, the step uses what it has set: DCP makes an optimizer's states by such a step.
    found = {
        id(param.sharded): param.registered_names[0]
        for group in waiting
        for index, param in enumerate(group.params)
        if group.view is None or not group.view.shows(index) or group.view.is_incomplete(index)
    }
    params = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
    if names := _names(found[id(param)] for param in params if id(param) in found):
        raise RuntimeError(
            f"{type(optimizer).__name__} makes a step while gradients of its parameters are not synchronized: "
            f"{_listed(names)}. Call synchronize_gradients() of the root module before the step; or, before the last backward "
            "of a step, set_requires_gradient_sync(True) (if you use them, also set_requires_all_reduce(True) and "
            "set_is_last_backward(True)), and finalize_backward() after a pipeline schedule"
        )


def _refuse_unsharded(optimizer: Optimizer, params: Sequence[torch.Tensor]) -> None:
    """An error, since such a step is always lost: the next all-gather overwrites what it writes."""
    params = [param for param in params if owner_of(param) is None]
    if not params:  # There may be as many optimizers as parameters.
        return
    unsharded = {id(param.unsharded): param.registered_names[0] for group in all_groups for param in group.params}
    if names := _names(unsharded[id(param)] for param in params if id(param) in unsharded):
        raise RuntimeError(
            f"{type(optimizer).__name__} has unsharded parameters: {_listed(names)}. It was made of model.parameters() between "
            "a forward and its backward, or after a forward without one, when a module was not resharded. The next all-gather "
            "would overwrite what a step writes to them: make the optimizer before the first forward, or after model.reshard()"
        )


def _refuse_promoted(optimizer: Optimizer, params: Sequence[torch.Tensor]) -> None:
    """An error in place of an assertion of torch without a text."""
    promoted = [param for param in params if isinstance(param.grad, DTensor) and not isinstance(param, DTensor)]
    if promoted:
        raise RuntimeError(
            f"{type(optimizer).__name__} has plain parameters, of which the gradients are DTensors: {_described(promoted)}. "
            "They were used beside a parallelized model. Make them DTensors: set them in the model itself after parallelize, "
            "or call parallelize on their module, with Plan().default(Replicate())"
        )


def _refuse_gathered(optimizer: Optimizer, params: Sequence[torch.Tensor]) -> None:
    """An error, since such a step is lost: torch's rule of view_as_real gathers these, and the step writes to a copy."""
    if isinstance(optimizer, SGD) or not _is_torchs(optimizer):
        return
    owners = [owner for owner, _ in _sharded_of(params) if owner.sharded.is_complex() and owner.distribution.is_uneven]
    if names := _names(owner.registered_names[0] for owner in owners):
        raise RuntimeError(
            f"{type(optimizer).__name__} has complex parameters that Shard({owners[0].distribution.shard_dim}) does not cut "
            f"evenly: {_listed(names)}. Torch would gather them, and the step would be lost: return None for them from "
            "shard_placement_fn, so that they get a ragged placement, or train them with SGD"
        )


def _is_torchs(optimizer: Optimizer) -> bool:
    """Whether its steps are those of a class of ``torch.optim``, or of a subclass, perhaps in pieces: :func:`offloaded`."""
    bases = (base for base in type(optimizer).__mro__ if base is not Optimizer)
    return any(base.__module__.startswith("torch.optim") for base in bases) or getattr(optimizer, "follows_offload", False)


def _of_detached(params: Sequence[torch.Tensor]) -> list[str]:
    """Tensors that share their memory with sharded parameters, but get no gradients: those of a state dict."""
    others = [param for param in params if isinstance(param, DTensor) and not isinstance(param, nn.Parameter)]
    memories = [_memory_of(param) for param in others if not param.requires_grad and param.grad is None]
    if not any(memories):
        return []
    owners = {_memory_of(param.sharded): param.registered_names[0] for group in all_groups for param in group.params}
    names = _names(owners[memory] for memory in memories if memory is not None and memory in owners)
    if not names:
        return []
    return [
        f"has tensors that share memory with parameters, and are not the parameters: {_listed(names)}. They get no gradients, "
        "so that its step does not train the model: give it model.parameters(), not the values of a state_dict"
    ]


def _memory_of(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Where a DTensor's local tensor begins, and its shape. None if it has no storage."""
    local = local_of(tensor)
    if type(local) is not torch.Tensor or not local.untyped_storage().nbytes():
        return None
    # A parameter without elements on this rank is a view of its group's shards, too.
    return local.untyped_storage().data_ptr(), local.storage_offset(), tensor.shape


def _of_alone(optimizer: Optimizer, params: Sequence[torch.Tensor]) -> list[str]:
    """Parameters with gradients in no group, if the optimizer has sharded ones, too: otherwise it may train another model."""
    alone = [param for param in params if _is_alone(param) and param.grad is not None and param not in replaced_params]
    if not alone or not _has_ranks() or not _sharded_of(params):
        return []
    note_ignored(alone)
    texts = _described(alone, optimizer.param_groups)
    return [f"trains parameters that fully_shard has not sharded, beside sharded ones: {texts}. {_ADVICE}"]


def _of_offload(optimizer: Optimizer, params: Sequence[torch.Tensor]) -> list[str]:
    """A policy without effect: the states of an ordinary optimizer lie where its parameters do."""
    if getattr(optimizer, "follows_offload", False):
        return []
    policies = {}
    for owner, group in _sharded_of(params):
        policy = next((part for part in group.plan.parts if getattr(part, "moves_states", False)), None)
        if policy is not None:
            policies[owner.registered_names[0]] = policy
    if not policies:
        return []
    names, name, policy = _names(policies), type(optimizer).__name__, next(iter(policies.values()))
    return [
        f"keeps all of its states beside the parameters, and fully_shard(..., offload_policy={policy!r}) has no effect on "
        f"them: {_listed(names)}. Make the optimizer that follows the policy by offloaded({name}, model, ...), or leave the "
        "policy out"
    ]


def _sharded_of(params: Iterable[torch.Tensor]) -> list[tuple[FSDPParam, FSDPParamGroup]]:
    """Those of ``params`` that lie in a group, with it."""
    owners = [owner for param in params if (owner := owner_of(param)) is not None]
    return [(owner, group_by_param[id(owner)]) for owner in owners if id(owner) in group_by_param]


def _is_alone(param: torch.Tensor) -> bool:
    return param.requires_grad and not isinstance(param, DTensor) and param not in _ignored


def _has_ranks() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _names(owners: Iterable[tuple[nn.Module | None, str]]) -> list[str]:
    """The names under a root of what modules have under ``name``."""
    if not (pairs := list(owners)):
        return []
    prefixes: dict[Any, str] = {module: prefix for root in _roots for prefix, module in root.named_modules()}
    return [f"{prefixes[module]}.{name}" if prefixes.get(module) else name for module, name in pairs]


def _described(params: Sequence[torch.Tensor], named: Sequence[dict[str, Any]] = ()) -> str:
    """Parameters in no group, by their names under a root or in the parameter groups ``named``, or by their shapes."""
    names: dict[Any, str] = {param: name for root in _roots for name, param in root.named_parameters()}
    for group in named:
        names.update(zip(group["params"], group.get("param_names", ())))
    return _listed([names.get(param, f"a parameter of shape {tuple(param.shape)}") for param in params])


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _refuse_resharded(error: RuntimeError) -> None:
    """Raise an error that names the group, if ``error`` is of parameters that are resharded. (2.11 to 2.15)"""
    text, groups = str(error), sorted(all_groups, key=lambda group: group.fqn)
    if found := re.search(r"modified by an inplace operation.* is at version (\d+)", text, re.DOTALL):
        groups = [group for group in groups if group.guard.refuses(int(found[1]))]
    elif found := re.search(r"setStorage: .* storage offset (\d+),.* out of bounds for storage of size 0", text):
        # Autograd makes a view of a DTensor again before it compares versions. Equal modules have equal offsets.
        groups = [group for group in groups if group.guard.refuses_view(int(found[1]))]
    elif "mixed torch.Tensor and DTensor" in text:  # A checkpoint recomputes a part of a module with the sharded parameters.
        owners = [owner_of(param) for param in _innermost_parameters(error) if param is not None]
        groups = [group for group in groups if any(param in owners for param in group.params)][:1]
    else:
        return
    if groups:
        modules = " or ".join(dict.fromkeys([group.fqn or "root" for group in groups]))
        raise RuntimeError(
            f"backward needs {groups[0].names} of the module {modules}, which is resharded: the loss uses a tensor "
            "from inside of this module (that an attribute, a hook or a list has kept, or of an earlier forward or backward), "
            "and backward has not reached an output of the module first. Return the tensor from the module's forward; or pass "
            "reshard_after_forward=False to its fully_shard and, for several backward passes of one forward or one backward "
            "pass of several forwards, call set_reshard_after_backward(False)"
        ) from error


def _refuse_sharded_inputs(outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
    """``inputs`` of ``torch.autograd.grad`` or ``backward(inputs=)`` are sharded parameters: forward has used other ones."""
    # With ``allow_unused=True``, autograd would return None, or the gradient of the uses of the sharded ones only.
    owners = {id(owner.unsharded): owner for each in inputs if (owner := owner_of(each)) is not None}
    if not owners:
        return
    used: list[FSDPParam] = []
    seen: set[Any] = set()
    nodes = [each.node if isinstance(each, GradientEdge) else each.grad_fn for each in outputs]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes.extend([edge[0] for edge in node.next_functions])
            if (owner := owners.get(id(getattr(node, "variable", None)))) is not None:  # Of a leaf.
                used.append(owner)
    if used:
        names, group = _names(owner.registered_names[0] for owner in used), group_by_param.get(id(used[0]))
        raise RuntimeError(
            "torch.autograd.grad or backward(inputs=) got sharded parameters, and forward has computed with unsharded ones: "
            f"{_listed(names)} of the module {(group and group.fqn) or 'root'}. Call backward() and read .grad, which is "
            "reduced over ranks; or, for the gradients of this rank alone, pass reshard_after_forward=False to fully_shard of "
            "this module, and give torch.autograd.grad its parameters after the forward"
        )


def _innermost_parameters(error: BaseException) -> list[torch.Tensor | None]:
    trace, module = error.__traceback__, None
    while trace is not None:
        each = trace.tb_frame.f_locals.get("self")
        module, trace = (each if isinstance(each, nn.Module) else module), trace.tb_next
    return [] if module is None else list(module._parameters.values())


backward_error_handlers.append(_refuse_resharded)
backward_input_checks.append(_refuse_sharded_inputs)
