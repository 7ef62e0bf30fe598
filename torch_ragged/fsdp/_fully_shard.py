"""``fully_shard``: makes parameter groups of modules. It moves parameters once, and trains nothing."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.tensor import DTensor, Partial
from typing_extensions import Unpack  # Of torch.

from torch_ragged._ranks.agreement import agree_on_groups, agreement, before_groups, forget_equal_meshes, text_of
from torch_ragged._ranks.groups import device_of, groups_of
from torch_ragged.fsdp._fsdp_module import FSDPModule, check_bool, make_fsdp_module
from torch_ragged.fsdp._options import FullyShardOptions
from torch_ragged.fsdp._spmd_types import AnnotationPart
from torch_ragged.fsdp._state_dict import take_parts
from torch_ragged.fsdp._upcoming import OffloadByName
from torch_ragged.fsdp.core._fsdp_init import (
    CPUOffloadPart,
    GroupPolicyPart,
    RegisteredNames,
    ShardPlacementFn,
    find_params,
    make_group,
    plan_groups,
)
from torch_ragged.fsdp.core._fsdp_param import InvalidArgument, has_extension, owner_of
from torch_ragged.fsdp.core._fsdp_param_group import FSDPParamGroup
from torch_ragged.fsdp.core._fsdp_state import FSDPState, state_of
from torch_ragged.fsdp.core._hooks import hook_modules
from torch_ragged.fsdp.core._kit import FeaturePart, GroupPlan, Kit, Need, PlainPart, Terms, check_pairs
from torch_ragged.fsdp.core._mesh import OUTSIDE, DataParallelMesh
from torch_ragged.fsdp.core._neighbours import NeighboursPart
from torch_ragged.fsdp.elastic._dormant_group import OutsideMesh
from torch_ragged.fsdp.elastic._weights import WeightsPart
from torch_ragged.fsdp.gates._gate import gate_of
from torch_ragged.fsdp.gates._untrained import note_ignored, note_replaced, sharded_originals
from torch_ragged.fsdp.grads._compute_parameter import compute_parameter
from torch_ragged.fsdp.grads._fsdp_grad import UnsynchronizedView
from torch_ragged.fsdp.memory._resident import BufferPlacements
from torch_ragged.granularity import Granularity, GroupPolicy, OrigParamPolicy

__all__ = ["fully_shard", "parts_of"]


@overload
def fully_shard(module: nn.Module, **options: Unpack[FullyShardOptions]) -> FSDPModule: ...
@overload
def fully_shard(module: list[nn.Module], **options: Unpack[FullyShardOptions]) -> list[FSDPModule]: ...
@before_groups("fully_shard")  # A rank with a wrong mesh or module does not know all ranks that wait for it.
def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy | Mapping[str, OffloadPolicy] = OffloadPolicy(),
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    orig_param_policy: OrigParamPolicy | None = None,
    placements: BufferPlacements | None = None,
    optional: bool = False,
    weights: Sequence[int] | None = None,
    check_replicas: bool = True,
) -> Any:
    """Keep only a shard of the parameters on each rank, and all-gather them for the module's forward and backward (FSDP2)::

        for layer in model.layers:
            fully_shard(layer)  # submodules first
        fully_shard(model)  # then the root; the optimizer after it

    Each call makes one group, of the parameters under ``module`` that are in no group yet. They become DTensors placed as
    :class:`~torch_ragged.RaggedShard`, in one buffer that is all-gathered and reduce-scattered in place, without a copy. The
    module's class becomes a subclass of :class:`FSDPModule`, and the call returns ``module``. All ranks must hold the same
    parameter values before it.

    Collectives:

    - In this call: one all-reduce of 24 bytes per mesh dimension; a second one with ``dp_mesh_dims``, ``HIERARCHICAL`` or
      ``Offload(parameters="files")``, which make process groups and files. In the first call with a mesh, ranks also compare
      its process groups through their store. If a call is wrong on one rank, or differs between ranks, all ranks raise before
      anything is changed.
    - Per step and group: one all-gather in forward, one in backward if the group was resharded, and one reduce-scatter. HSDP
      adds one all-reduce of the shard.
    - Per backward pass: one all-reduce of a byte per parameter, by which ranks agree on unused parameters.
    - In the root's first forward, with replicas: one all-reduce of 16 bytes over them and one of 8 bytes over each other mesh
      dimension, by which ranks check that replicas hold equal parameters.

    Each mesh, dtype and compute dtype among the parameters of a call has its own buffers and collectives: a reduction has one
    of each. So has each parameter placed as ``Shard``, and so have all parameters whose tensor types have their own all-gather.

    Args:
        module: the module to shard, in place; or a list of modules whose parameters make one group. The group is all-gathered
            for the first module of the list that runs, and resharded after the last one.
        mesh: a 1-D mesh of shards; or a 2-D mesh (HSDP) of replicas (first dimension) and shards (second dimension), for
            parameters placed as ``(Replicate(), RaggedShard)``. None: all ranks, on the accelerator if there is one; without a
            process group, ``init_process_group()`` is called first. On a rank outside of the mesh, the module is dormant
            (parameters without local elements, no forward) until :func:`reshard_to`, without a collective. Plain parameters and
            buffers move to the mesh's device, inputs of the root to an accelerator. Parameters that are DTensors on other
            dimensions of the same mesh (tensor or expert parallelism) keep these placements, behind the new ones:
            ``(StridedRaggedShard, Shard(0))``, ``(RaggedShard, Shard(1))``.
        reshard_after_forward: whether to free the unsharded parameters after forward. None: False for the root, True for other
            modules. An integer k: free them, but each of k neighbouring ranks keeps one k-th of the gathered buffer, and
            backward all-gathers among these k ranks only. For tensor types with their own all-gather, an integer means True.
        shard_placement_fn: a function ``parameter -> placement``: a granularity, as below; ``Shard(d)``, for a parameter that
            is sharded as by FSDP2; torch's ``ShardPlacementResult``, which also names a mesh; or None.
        mp_policy: the dtypes of computation, reduction and outputs, as in the installed FSDP2. If it has no ``reduce_dtype``,
            gradients are reduced in the parameters' ``grad_dtype``, if it is set (if several are: in the dtype that holds all);
            otherwise in ``param_dtype`` (before torch 2.15) or in the parameters' dtype (since torch 2.15). With a
            :class:`Float8Policy`, matrices are all-gathered as 8-bit codes.
        offload_policy: with ``CPUOffloadPolicy()``, sharded parameters, their gradients and the optimizer are on the CPU. With
            an :class:`Offload`, states of an :func:`offloaded` optimizer are in host memory, or these and parameters in files.
            A dict ``{name: policy}``, as :func:`cpu_offload_by_budget` makes it, offloads parameters by their names.
        ignored_params: an iterable of parameters that are not sharded, and whose gradients are not reduced. Others that are
            trained without ``fully_shard`` cause a warning.
        dp_mesh_dims: torch's ``DataParallelMeshDims``, the names of data-parallel dimensions of ``mesh``, which is the whole
            mesh. All parameters must be DTensors on it, with ``Replicate()`` on these dimensions; or plain tensors with
            annotations of the package ``spmd_types``.
        orig_param_policy: a function ``(fqn, parameter) -> granularity``, which says what must not be cut. None: a parameter
            may be cut anywhere. If ``module`` is a list, each name begins with the module's index in the list. A
            :class:`~torch_ragged.granularity.GroupPolicy`, as ``torch_ragged.optim.muon_policy`` makes, sees a whole buffer.
        placements: what stays gathered or unreduced between uses: see :class:`BufferPlacements`. None: ``ZERO3`` on a 1-D
            mesh, HSDP on a 2-D mesh.
        optional: ranks may skip ``module`` in forward, as a vision tower for a batch of text. It costs votes, which the host
            waits for: see "Modules that some ranks skip" in docs/fsdp.md.
        weights: an integer per rank of the shards, at least 0, as ``[3, 2, 0]``. Shards are in proportion to them: see "Unequal
            ranks" in docs/meshes.md. None: equal shards.
        check_replicas: whether the first forward of the root, and ``checkpoint.save``, raise on all ranks if replicas (HSDP)
            hold other values of these parameters, as after other seeds. False: they may differ, as in DiLoCo and torchft.

    Raises:
        ValueError: an argument is not as above; a list has a module twice; a module or a parameter is sharded already, by this
            function or torch's; a parameter is a DTensor on another device, or on a mesh that cannot be joined with ``mesh``,
            is tied to a sharded one, is cut unevenly by model parallelism, or is a trainable integer; two features exclude each
            other (docs/combinations.md); or ranks disagree. docs/errors.md has all of them.
        TypeError: an argument has another type than above, a policy's dtype is no floating-point dtype, or a function does not
            take the arguments above, or returns something else.
        OSError: a folder of ``Offload(parameters="files")`` is missing or read-only, or has too little space.
        PeerError: another rank died, or did not make this call within the timeout.
        RuntimeError: another rank raised. If its ``mesh`` or ``module`` is not usable at all, others raise a ValueError after
            two seconds, and the process groups in which they waited end.
    """
    if mesh is None:  # All ranks. As in FSDP2, torchrun needs no ``init_process_group``.
        if not dist.is_initialized():
            dist.init_process_group()
        mesh = init_device_mesh(_default_device().type, (dist.get_world_size(),))
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"fully_shard expects a DeviceMesh, as init_device_mesh makes it, as mesh, got {mesh!r}")
    # First: a rank whose arguments are wrong must tell those of model parallelism, too.
    ranks, device = groups_of(mesh), device_of(mesh)
    ranks += _model_groups(module, ranks)
    agree_on_groups(mesh)
    forget_equal_meshes(mesh)
    with agreement(ranks, device, "fully_shard") as claim:
        modules, ignored = _root_modules(module), set() if ignored_params is None else _ignored_set(ignored_params)
        _check_types(offload_policy, optional, check_replicas, mp_policy, placements)
        if orig_param_policy is not None:
            _check_function("orig_param_policy", orig_param_policy, "fqn, parameter", "rows(32)")
        if shard_placement_fn is not None:
            _check_function("shard_placement_fn", shard_placement_fn, "parameter", "Shard(0)")
        DataParallelMesh.check(mesh, dp_mesh_dims)
        options = {
            "dp_mesh_dims": dp_mesh_dims,
            "reshard_after_forward": reshard_after_forward,
            "mp_policy": mp_policy,
            "offload_policy": offload_policy,
            "placements": placements,
            "optional": bool(optional),
            "weights": weights,
        }
        parts = parts_of({**options, "module": modules, "mesh": mesh, "orig_param_policy": orig_param_policy})
        if "spmd_types" in sys.modules:  # Otherwise there are no annotations in this process.
            parts.append(AnnotationPart())
        check_pairs(parts)
        if placements is not None:
            placements.check_mesh(mesh, dp_mesh_dims)
        # What users write, which must be equal on all ranks. The results of the two functions are compared below.
        named = [name for each in modules for name, param in each.named_parameters() if param in ignored] if ignored else []
        shape = (mesh.device_type, tuple(mesh.shape), mesh.mesh_dim_names)
        options = {"mesh": shape, **options, "check_replicas": bool(check_replicas), "ignored_params": named}
        written = []
        for name, option in options.items():
            written.append(f"{name}: {option.text() if isinstance(option, FeaturePart) else text_of(option)}")
        for part in parts:
            if part.makes_groups:
                claim[:] = written
    with agreement(ranks, device, "fully_shard") as claim:
        dp = DataParallelMesh.of(mesh, dp_mesh_dims)
        for part in parts:
            dp = part.shards_over(dp)
        found = _check_modules(modules, mesh, reshard_after_forward, dp, ignored)
        plans = plan_groups(found, dp, parts, mp_policy, orig_param_policy, shard_placement_fn)
        claim += written + _claim_of_plans(plans, list(found))
    plans = [dataclasses.replace(plan, compute_parameter=compute_parameter) for plan in plans]
    _move(modules, found if dp.is_member else {}, device)
    kits, groups, may_fail = list[Kit](), list[FSDPParamGroup](), False
    with torch.inference_mode(False):  # Later steps train these parameters.
        for plan in plans:
            kits.append(kit := Kit(plan))
            for part in plan.parts:
                # A keeper may make process groups, which all ranks do at one moment, after they have agreed.
                kit.keeper = part.keeper(plan.dp, kit.encoding, kit.memory.gathered) or kit.keeper
                may_fail |= part.may_fail_alone
    with agreement(ranks, device, "fully_shard") if may_fail else nullcontext([]) as claim:  # type: ignore[attr-defined]
        for kit in kits:
            groups.append(make_group(kit.plan, kit))
        claim.append("groups")  # One may fail on one rank: then no rank replaces a parameter.
    if ignored:
        note_ignored(ignored)
    owners: dict[nn.Module, str] = {}
    for plan in plans:
        for param in plan.params:
            note_replaced(param.value, param.fqn, *param.registered_names[0])
            owners.update(param.registered_names)
    for group in groups:
        group.settings.view = UnsynchronizedView
        group.register()
    if not isinstance(reshard_after_forward, (bool, type(None))):
        reshard_after_forward = reshard_after_forward > 1
    state = FSDPState(modules, groups, mp_policy, reshard_after_forward, optional, gate_of)
    hook_modules(state)
    state.checks_replicas = check_replicas
    state.reduces_last_only = placements is not None and placements.gradients[0] == Partial()
    for each in modules:
        make_fsdp_module(each, state)
    for owner in owners:
        owner.register_load_state_dict_pre_hook(take_parts)
    return module


fully_shard.state = state_of  # type: ignore[attr-defined]  # As in FSDP2: the state of a module, or None.


def parts_of(arguments: Mapping[str, Any]) -> list[FeaturePart]:
    """The parts of the arguments of ``fully_shard``, in the order in which they equip a group. What is absent brings none."""
    parts: list[FeaturePart | None] = []
    for name in _EQUIP:
        value = arguments.get(name)
        if isinstance(value, FeaturePart):  # A policy of this package, or of a user.
            parts.append(value)
        elif name == "module" and value is not None and len(value) > 1:
            parts.append(PlainPart(Terms("a list of several modules", breaks=(Need.ONE_MODULE,))))
        elif name == "optional" and value:
            parts.append(PlainPart(Terms("optional=True", {Need.ONE_MODULE: ": call fully_shard for each of them"})))
        elif name == "dp_mesh_dims" and value is not None:
            given = "parallelize" if getattr(value, "counts_once", False) else f"dp_mesh_dims={value}"
            terms = Terms(given, {Need.IN_MESH: OUTSIDE}, breaks=(Need.MOVABLE, Need.OWN_MESH))
            parts.append(PlainPart(terms, makes_groups=True))
        elif name == "offload_policy" and isinstance(value, Mapping):
            parts.append(OffloadByName.of(value))
        elif name == "offload_policy" and isinstance(value, CPUOffloadPolicy):
            parts.append(CPUOffloadPart(value.pin_memory))
        elif name == "weights" and value is not None:
            parts.append(WeightsPart.of(value))
        elif name == "orig_param_policy" and isinstance(value, GroupPolicy):
            parts.append(GroupPolicyPart(value))
        elif name == "reshard_after_forward" and isinstance(value, int) and not isinstance(value, bool):
            parts.append(NeighboursPart(value))
        elif name == "mesh" and value is not None and value.get_coordinate() is None:
            parts.append(OutsideMesh.of(value))
    return list(filter(None, parts))


_EQUIP: tuple[str, ...] = ("module", "optional", "dp_mesh_dims", "offload_policy", "mp_policy", "weights", "orig_param_policy")
_EQUIP += ("reshard_after_forward", "placements", "mesh")
"""The arguments that bring parts. The mesh is the last one: it takes away what the others have chosen."""


# -- checks --------------------------------------------------------------------------------------------------------------


def _default_device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if accelerator is None else accelerator


def _model_groups(module: Any, known: list[dist.ProcessGroup]) -> list[dist.ProcessGroup]:
    """The process groups of the meshes that the parameters to shard are distributed over, without ``known`` ones."""
    meshes: dict[DeviceMesh, None] = {}
    for each in module if isinstance(module, (list, tuple)) else [module]:
        for param in each.parameters() if isinstance(each, nn.Module) else ():
            if isinstance(param, DTensor):
                meshes[param.device_mesh] = None
    found: list[dist.ProcessGroup] = []
    for other in meshes:
        found += [group for group in groups_of(other) if group not in known]
    return found


def _root_modules(module: Any) -> tuple[nn.Module, ...]:
    """The modules to shard. A module inside another one of the list is left out."""
    if isinstance(module, nn.Module):
        return (module,)
    modules = tuple(module) if isinstance(module, (list, tuple)) else ()
    if not modules or not all(isinstance(each, nn.Module) for each in modules):
        raise TypeError(
            f"fully_shard expects an nn.Module or a list of them, got {module if modules else type(module).__name__}"
        )
    inside: set[nn.Module] = set()
    for index, each in enumerate(modules):
        if each in modules[:index]:
            raise InvalidArgument(f"fully_shard got a {type(each).__name__} twice in one list: name each module once")
        inside.update(list(each.modules())[1:])
    return tuple(each for each in modules if each not in inside)


def _ignored_set(params: Any) -> set[nn.Parameter]:
    """``ignored_params`` as a set."""
    found = list(params) if isinstance(params, Iterable) and not isinstance(params, (str, torch.Tensor)) else [params]
    for param in found:
        if not isinstance(param, torch.Tensor):
            raise TypeError(
                f"ignored_params expects a set of parameters, got {param!r} in it: pass the parameters themselves, as "
                "{model.head.weight} or set(model.head.parameters()), not names or modules"
            )
    return set(found)


def _check_types(offload_policy: Any, optional: Any, check_replicas: Any, mp_policy: Any, placements: Any) -> None:
    """Raise if an argument has another type, such as the class of a policy."""
    policies = offload_policy.values() if isinstance(offload_policy, Mapping) else [offload_policy or OffloadPolicy()]
    if not all(isinstance(policy, OffloadPolicy) for policy in policies):  # FSDP2 takes None, too.
        raise TypeError(
            f"offload_policy={offload_policy!r} is no policy: pass offload_policy=CPUOffloadPolicy(), which "
            "torch.distributed.fsdp has, or a dict of policies by the parameters' names, or leave it out"
        )
    check_bool("fully_shard", "optional", optional)
    check_bool("fully_shard", "check_replicas", check_replicas)
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        example = mp_policy if isinstance(mp_policy, torch.dtype) else torch.bfloat16
        raise TypeError(
            f"mp_policy={mp_policy!r} is no policy: pass mp_policy=MixedPrecisionPolicy(param_dtype={example}), which "
            "torch.distributed.fsdp has"
        )
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(mp_policy, name)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(
                f"{name}={dtype!r} of mp_policy is no floating-point dtype of torch: pass one, such as {name}=torch.bfloat16, "
                "or None"
            )
    if placements is not None and not isinstance(placements, BufferPlacements):
        raise TypeError(
            f"placements={placements!r} is a {type(placements).__name__}: pass ZERO1, ZERO2, ZERO3 or HIERARCHICAL, which "
            "torch_ragged.fsdp has (placements=ZERO2)"
        )


def _check_function(name: str, function: Any, arguments: str, result: str) -> None:
    """Raise if the argument ``name`` is no function, or takes other ``arguments`` than ``fully_shard`` gives."""
    if isinstance(function, Granularity):
        raise TypeError(
            f"{name}={function.text} is a granularity: pass a function that returns one for each parameter, {name}=lambda "
            f"{arguments}: {function.text}"
        )
    example = f"{name}=lambda {arguments}: {result}"
    if not callable(function):
        raise TypeError(f"{name}={function!r} is no function: pass one of ({arguments}), such as {example}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # It is written in C.
        return
    try:
        signature.bind(*arguments.split(", "))
    except TypeError as error:
        given = f"{getattr(function, '__name__', type(function).__name__)}{signature}"
        raise TypeError(
            f"{name} got {given}, which fully_shard cannot call with ({arguments}): {error}. Pass a function of these "
            f"arguments, such as {example}"
        ) from error


def _check_modules(
    modules: Sequence[nn.Module],
    mesh: DeviceMesh,
    reshard_after_forward: Any,
    dp: DataParallelMesh,
    ignored: set[nn.Parameter],
) -> dict[str, tuple[nn.Parameter, RegisteredNames]]:
    """Check the modules and their parameters, and return the parameters to shard."""
    of_torch: dict[nn.Parameter, str] = {}  # Sharded by torch's fully_shard, with the name of the module that it was called on.
    for module in modules:
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
            raise ValueError(f"fully_shard cannot shard a {type(module).__name__}, which has no forward: shard its members")
        if state_of(module):
            raise InvalidArgument(f"{type(module).__name__} is sharded by fully_shard already: call it once for each module")
        for name, each in module.named_modules():
            if isinstance(each, TorchFSDPModule) and not isinstance(each, FSDPModule):
                of_torch.update(dict.fromkeys(each.parameters(), name or type(each).__name__))  # type: ignore[attr-defined]
    value = reshard_after_forward
    if not isinstance(value, (int, type(None))):
        raise TypeError(f"reshard_after_forward must be True, False, a number of ranks or None, got {value!r}")
    if isinstance(value, int) and not isinstance(value, bool) and (value < 1 or dp.ranks % value):
        raise ValueError(f"If passing reshard_after_forward as an int, it should be a factor of {dp.ranks}, not {value}")
    found = find_params(modules, ignored, state_of)
    for fqn, (param, _) in found.items():
        if param in of_torch:
            raise ValueError(
                f"{fqn} is sharded by torch.distributed.fsdp.fully_shard already, which was called on {of_torch[param]}: call "
                "the fully_shard of torch_ragged.fsdp on all modules of a model, or that of torch"
            )
        if owner := owner_of(param):
            raise ValueError(
                f"{fqn} is sharded already, as {owner.fqn} of an earlier fully_shard call: call fully_shard on the inner "
                "modules first (for block in model.blocks: fully_shard(block)), and on the model around them last"
            )
        if param.device.type not in (mesh.device_type, "meta") and (isinstance(param, DTensor) or has_extension(param)):
            raise ValueError(f"{fqn} is on {param.device}, the mesh on {mesh.device_type}: move the module first")
        if param in sharded_originals:
            raise ValueError(
                f"{fqn} is tied to {sharded_originals[param]}, which another fully_shard has sharded: keep tied parameters in "
                "one group, by calling fully_shard on a module that holds both only"
            )
    return found


def _move(modules: Sequence[nn.Module], found: dict[str, tuple[nn.Parameter, RegisteredNames]], device: torch.device) -> None:
    """Move the parameters to shard, and the modules' buffers, to ``device``. Those on the meta device stay there."""
    tensors: list[torch.Tensor] = []
    for param, _ in found.values():
        if not isinstance(param, DTensor):
            tensors.append(param)
    sharded: set[nn.Module] = set()  # By earlier calls, which have moved their buffers.
    for module in modules:
        for each in module.modules():  # A module before those inside it.
            if each not in modules and state_of(each):
                sharded.update(each.modules())
            if each not in sharded:
                tensors += each.buffers(recurse=False)
    for tensor in tensors:
        if tensor.device.type not in (device.type, "meta"):
            tensor.data = tensor.data.to(device)


def _claim_of_plans(plans: Sequence[GroupPlan], names: Sequence[str]) -> list[str]:
    """The plans as lines of text, which must be equal on all ranks, also on those of model parallelism.

    Devices may differ: programs load the weights on rank 0, keep the other ranks on the meta device, and broadcast afterwards.
    """
    pairs = {}
    for plan in plans:
        for param, spec in zip(plan.params, plan.layout.tensors):
            pairs[param.fqn] = param, spec
    # In the order of the modules. The first line that differs is in the error.
    lines = [f"{len(names)} parameters{f', {names[0]} to {names[-1]}' if names else ''}"]
    for name in names:
        param, spec = pairs[name]
        cut, frozen = param.distribution.shard_dim, "" if param.value.requires_grad else ", frozen"
        lines.append(f"{name} of {param.value.dtype} and shape {param.distribution.text}{frozen}")
        where = (spec.text or "in single elements") if cut is None else f"along dimension {cut}"
        lines.append(f"orig_param_policy or shard_placement_fn of {name}: cut {where}")
    for plan in plans:
        layout, mesh = plan.layout, plan.dp.mesh
        casts = f"param_dtype {plan.param_dtype}, reduce_dtype {plan.reduce_dtype}"
        where = f"{layout.ranks} shards of {layout.shard_numel} elements, on a mesh of {tuple(mesh.shape)}"
        dims = f" {mesh.mesh_dim_names}" if mesh.mesh_dim_names else ""
        lines.append(f"a buffer of {layout.tensors[0].name} and others with {casts}, in {where}{dims}")
        for spec, offset in zip(layout.tensors, layout.offsets):
            lines.append(f"{spec.name} {spec.shape} at {offset}")
    return lines
