"""``fully_shard``, and what groups it has made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from torch_ragged._register._torch import flatten
from torch_ragged.fsdp._fsdp_module import FSDPModule, check_reshard_after_forward, make_fsdp_module
from torch_ragged.fsdp.comm._agreement import agree, agreement
from torch_ragged.fsdp.comm._hierarchical import HierarchicalCollectives, Levels
from torch_ragged.fsdp.core._distribution import has_extension
from torch_ragged.fsdp.core._errors import InvalidArgument
from torch_ragged.fsdp.core._float8 import Float8Policy
from torch_ragged.fsdp.core._fsdp_api import BufferPlacements
from torch_ragged.fsdp.core._fsdp_init import RegisteredNames, ShardPlacementFn, find_params, make_group, plan_groups
from torch_ragged.fsdp.core._fsdp_param_group import FSDPParamGroup
from torch_ragged.fsdp.core._fsdp_state import STATE, FSDPState
from torch_ragged.fsdp.core._group_plan import GroupPlan
from torch_ragged.fsdp.core._mesh import DataParallelMesh, device_of
from torch_ragged.fsdp.core._neighbours import Neighbours
from torch_ragged.fsdp.core._resident import Resident
from torch_ragged.fsdp.layout._buffer_layout import BufferLayout
from torch_ragged.granularity import OrigParamPolicy

__all__ = ["buffer_layouts", "fully_shard", "module_states", "named_groups"]

_sharded_originals = WeakTensorKeyDictionary()


@overload
def fully_shard(module: nn.Module, **options: Any) -> FSDPModule: ...
@overload
def fully_shard(module: list[nn.Module], **options: Any) -> list[FSDPModule]: ...
def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy = OffloadPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    orig_param_policy: OrigParamPolicy | None = None,
    placements: BufferPlacements | None = None,
) -> Any:
    """Shard ``module``'s parameters over ``mesh`` in one buffer, gathered and reduced in place around its computation.

    FSDP2's semantics: apply it to submodules first, then to the root; each call makes one group of the parameters not
    yet in a group. Parameters become DTensors placed as :class:`~torch_ragged.RaggedShard`; the module's class becomes a
    subclass of :class:`FSDPModule`. Every rank is expected to hold the same parameter values.

    Collectives: here one all-reduce of 24 bytes per mesh dimension, by which a call that is wrong on one rank, or differs
    between ranks, is an error on all before anything is changed; another one ahead of it with ``dp_mesh_dims`` or
    ``HIERARCHICAL``, which make process groups. Per step and group one all-gather in forward, one in backward
    (if resharded), one reduce-scatter, with HSDP one all-reduce of the shard; and per backward one all-reduce of a byte per
    parameter, by which ranks agree on unused parameters. Parameters of several meshes, dtypes or compute dtypes, and those that
    are placed as ``Shard``, have buffers and collectives of their own in the group: a sum has one dtype.

    Args:
        module: the module to shard, in place; or a list of modules whose parameters make one group. The group is gathered for
            the first of them that runs and resharded after the last.
        mesh: a 1-D mesh; or a 2-D mesh (HSDP), whose first dimension are replicas and whose second one shards, for parameters
            placed as ``(Replicate(), RaggedShard)``. All ranks where None, on the accelerator (the CPU without one). Plain
            parameters and buffers move to its device, and inputs of the root to an accelerator. Parameters that are DTensors
            on other dimensions of the same mesh (tensor and expert parallelism) keep their placements behind these:
            ``(StridedRaggedShard, Shard(0))``, ``(RaggedShard, Shard(1))``.
        reshard_after_forward: free the unsharded parameters after forward. None: True, but False for the root. A number
            of ranks: keep, on each, that part of the gathered buffer, so that backward gathers among so few neighbours;
            registered are the sharded parameters meanwhile. Types with their own all-gather take it as True.
        shard_placement_fn: ``parameter -> placement``: a granularity, as below; ``Shard(d)``, which makes it a plain FSDP2
            parameter with a buffer of its own (that dimension lies first in it, the parameter is a view); torch's
            ``ShardPlacementResult``, with a mesh of its own; or None.
        mp_policy: dtypes to compute, reduce and return in, as in the installed FSDP2: without a ``reduce_dtype``, gradients
            are reduced in ``param_dtype`` before torch 2.15, in the parameters' dtype from it on. A :class:`Float8Policy`
            has matrices all-gathered as 8-bit codes.
        offload_policy: ``CPUOffloadPolicy()`` keeps sharded parameters, their gradients and so the optimizer on the CPU.
        ignored_params: parameters that stay as they are: not sharded, nor their gradients reduced.
        dp_mesh_dims: torch's ``DataParallelMeshDims``: ``mesh`` is the whole mesh, these of its dimensions are data-parallel
            (several names are flattened). Parameters are DTensors on it, replicated there.
        orig_param_policy: ``(fqn, parameter) -> granularity``: what may not be cut. None: everything may be. With a list,
            names begin with the module's index in it.
        placements: what stays gathered and unreduced between uses, ``ZERO1``, ``ZERO2``, ``ZERO3`` or ``HIERARCHICAL``; None:
            ``ZERO3`` on a 1-D mesh, HSDP on a 2-D one. See :class:`BufferPlacements`.

    Returns:
        ``module``.

    Raises:
        ValueError: ``mesh`` is not as above, or this rank is not part of it; the module is sharded already, or holds parameters
            that are, DTensors on a device other than the mesh's, tied to an already sharded one, cut unevenly by model
            parallelism, or trainable integers; ``reshard_after_forward`` does not divide the shards; a ``Float8Policy``
            with ``placements`` that stay gathered; ranks disagree.
        TypeError: ``module`` is not an ``nn.Module``, ``mesh`` not a ``DeviceMesh``, ``reshard_after_forward`` not a bool, int
            or None, or the policy returns something else than a granularity.
        RuntimeError: another rank raised.
    """
    mesh = _default_mesh() if mesh is None else mesh
    _check_mesh(mesh)
    ranks, device = _groups_of(mesh), device_of(mesh)
    with agreement(ranks, device, "fully_shard") as claim:
        modules = _root_modules(module)
        ranks += _model_groups(modules, mesh)
        DataParallelMesh.check(mesh, dp_mesh_dims)
        makes_groups = _check_placements(mesh, dp_mesh_dims, placements) or dp_mesh_dims is not None
        if isinstance(mp_policy, Float8Policy) and placements is not None and placements.stay_gathered:
            raise ValueError(f"Float8Policy does not go with {placements}, where gathered parameters stay: use ZERO3 or HSDP")
        claim += [f"dp_mesh_dims {dp_mesh_dims}, placements {placements}"] * makes_groups
    with agreement(ranks, device, "fully_shard") as claim:
        dp, levels = _with_levels(DataParallelMesh.of(mesh, dp_mesh_dims), placements)
        found = _check_modules(modules, mesh, reshard_after_forward, dp, ignored_params or set())
        plans = plan_groups(found, dp, mp_policy, offload_policy, orig_param_policy, shard_placement_fn)
        casts: list[Any] = [mp_policy.param_dtype, mp_policy.reduce_dtype, mp_policy.output_dtype]
        casts += [mp_policy.tile] if isinstance(mp_policy, Float8Policy) else []
        casts.append(mp_policy.cast_forward_inputs)
        claim += _claim(plans, reshard_after_forward, tuple(casts), offload_policy, placements)
    _move(modules, found, device)
    for plan in plans:
        for param in plan.params:
            _sharded_originals[param.value] = param.fqn
    groups = [make_group(plan) for plan in plans]
    for plan in plans:
        plan.params.clear()  # The originals' memory goes here.
    if not isinstance(reshard_after_forward, (bool, type(None))):
        reshard_after_forward = _keep_parts(groups, reshard_after_forward)
    if levels is not None:
        _stay_gathered(groups, levels)
    state = FSDPState(modules, groups, mp_policy, reshard_after_forward)
    state.reduces_last_only = placements is not None and placements.stay_unreduced
    for each in modules:
        make_fsdp_module(each, state)
    return module


def _state(module: nn.Module) -> FSDPState | None:
    """``fully_shard.state(module)``, as FSDP2's: what it keeps for ``module``; None if it was not called on it."""
    return getattr(module, STATE, None)


fully_shard.state = _state  # type: ignore[attr-defined]


def buffer_layouts(module: nn.Module) -> dict[str, BufferLayout]:
    """The plan of each group under ``module``, by the name of the module that ``fully_shard`` was called on."""
    return {name: group.layout for name, group in named_groups(module).items()}


def named_groups(module: nn.Module) -> dict[str, FSDPParamGroup]:
    """The groups under ``module`` by the name of their module; of several of one module, later ones with a number."""
    groups: dict[str, FSDPParamGroup] = {}
    for name, state in _states(module).items():
        groups.update({f"{name}[{i}]" if i else name: group for i, group in enumerate(state.groups)})
    return groups


def module_states(module: nn.Module) -> dict[str, FSDPState]:
    """The state of each module under ``module`` that ``fully_shard`` was called on, by its name; once for a list of modules.

    Raises:
        ValueError: there is none.
    """
    states = _states(module) if isinstance(module, nn.Module) else {}
    if not states:
        raise ValueError(
            f"expected a module that torch_ragged.fsdp.fully_shard was called on, or one that holds such modules, got "
            f"{type(module).__name__} without any: call fully_shard first"
        )
    return states


def _states(module: nn.Module) -> dict[str, FSDPState]:
    states: dict[FSDPState, str] = {}
    for name, child in module.named_modules():
        if hasattr(child, STATE):
            states.setdefault(getattr(child, STATE), name or "root")
    return {name: state for state, name in states.items()}


# -- checks --------------------------------------------------------------------------------------------------------------


def _root_modules(module: Any) -> tuple[nn.Module, ...]:
    """The modules to shard, less those inside others of the list."""
    modules = (module,) if isinstance(module, nn.Module) else tuple(module) if isinstance(module, (list, tuple)) else ()
    if not modules or not all(isinstance(each, nn.Module) for each in modules):
        raise TypeError(
            f"fully_shard expects an nn.Module or a list of them, got {module if modules else type(module).__name__}"
        )
    inside = {child for each in modules for child in each.modules() if child is not each}
    return tuple(dict.fromkeys(each for each in modules if each not in inside))


def _check_modules(
    modules: Sequence[nn.Module],
    mesh: DeviceMesh,
    reshard_after_forward: Any,
    dp: DataParallelMesh,
    ignored: set[nn.Parameter],
) -> dict[str, tuple[nn.Parameter, RegisteredNames]]:
    """The parameters to shard, once everything about them is as it should be."""
    for module in modules:
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
            raise ValueError(f"fully_shard cannot shard a {type(module).__name__}, which has no forward: shard its members")
        if hasattr(module, STATE):
            raise InvalidArgument(f"{type(module).__name__} is sharded by fully_shard already: call it once for each module")
    check_reshard_after_forward(reshard_after_forward, dp.ranks)
    found = find_params(modules, ignored, lambda module: hasattr(module, STATE))
    for fqn, (param, _) in found.items():
        if param.device.type not in (mesh.device_type, "meta") and (isinstance(param, DTensor) or has_extension(param)):
            raise ValueError(f"{fqn} is on {param.device}, the mesh on {mesh.device_type}: move the module first")
        if param in _sharded_originals:
            raise ValueError(
                f"{fqn} is tied to {_sharded_originals[param]}, which another fully_shard has sharded: keep tied parameters in "
                "one group, by calling fully_shard on a module that holds both only"
            )
    return found


def _move(modules: Sequence[nn.Module], found: dict[str, tuple[nn.Parameter, RegisteredNames]], device: torch.device) -> None:
    """Move the parameters to shard, and the buffers beside them, to where they are computed with; none from the meta device."""
    tensors = [param for param, _ in found.values() if not isinstance(param, DTensor)]
    inside = {child for module in modules for child in module.modules() if child not in modules and hasattr(child, STATE)}
    sharded = {each for child in inside for each in child.modules()}
    tensors += [
        b for module in modules for each in module.modules() if each not in sharded for b in each.buffers(recurse=False)
    ]  # type: ignore[misc]
    for tensor in tensors:
        if tensor.device.type not in (device.type, "meta"):
            tensor.data = tensor.data.to(device)


def _keep_parts(groups: Sequence[FSDPParamGroup], size: int) -> bool:
    """Have ``size`` neighbours keep gathered parameters between them; all of them is not keeping, one is keeping everything.

    If a group computes with other memory than it gathers, it has no buffer to keep a part of: it is resharded.
    """
    for group in groups:
        shards = group.dp.shard_group
        if group.encoding.computes_in_buffer and 1 < size < group.dp.ranks and shards is not None:
            group.keeper = Neighbours.among(shards, group.rank, size, group.memory.gathered)
    return size > 1


def _check_placements(mesh: DeviceMesh, dims: Any, placements: BufferPlacements | None) -> bool:
    """Whether ``placements`` need more process groups than the mesh has.

    Raises:
        ValueError: they are for a mesh with another number of dimensions, or do not go with ``dp_mesh_dims``.
    """
    ndim = mesh.ndim if dims is None else bool(dims.replicate_names) + bool(dims.shard_names)
    if placements is None:
        return False
    if len(placements.optimizer) != ndim:
        raise ValueError(f"{placements} is for a mesh with {len(placements.optimizer)} dimensions, got {ndim} of {mesh}")
    if not placements.stay_gathered or ndim == 1:
        return False
    if dims is not None:
        raise ValueError("HIERARCHICAL does not go with dp_mesh_dims: pass the two data-parallel dimensions as the mesh")
    return True


def _with_levels(dp: DataParallelMesh, placements: BufferPlacements | None) -> tuple[DataParallelMesh, Levels | None]:
    """The mesh that the optimizer's shards are on; and over which ranks parameters stay gathered, if they do."""
    if placements is None or not placements.stay_gathered:
        return dp, None
    if dp.mesh.ndim == 1:
        return dp, Levels(dp.mesh.get_group(), None)
    flat = DataParallelMesh.of(flatten(dp.mesh))
    return flat, Levels(dp.mesh.get_group(0), dp.mesh.get_group(1))


def _stay_gathered(groups: Sequence[FSDPParamGroup], levels: Levels) -> None:
    for group in groups:
        if not group.encoding.makes_params:  # Its type keeps nothing gathered.
            group.keeper = Resident(levels, group.memory.gathered)
        if levels.within is not None and group.dp.shard_group is not None:
            group.process_groups = group.collectives = HierarchicalCollectives(levels, group.dp.shard_group)


def _default_mesh() -> DeviceMesh:
    """All ranks, on the accelerator; on the CPU without one."""
    return init_device_mesh(_default_device().type, (dist.get_world_size(),))


def _default_device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if accelerator is None else accelerator


def _check_mesh(mesh: Any) -> None:
    """Raise where there is no telling whom to agree with: all ranks hear of what is no mesh, none of a mesh of others."""
    if isinstance(mesh, DeviceMesh):
        if mesh.get_coordinate() is None:
            DataParallelMesh.check(mesh)
        return
    problem = TypeError(f"fully_shard expects a DeviceMesh, as init_device_mesh makes it, as mesh, got {mesh!r}")
    if dist.is_initialized():
        agree([dist.GroupMember.WORLD], _default_device(), "fully_shard", "", problem)  # type: ignore[list-item]
    raise problem


def _groups_of(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    return [mesh.get_group(dim) for dim in range(mesh.ndim)]


def _model_groups(modules: Sequence[nn.Module], mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """The process groups of the meshes that the modules' parameters are distributed over, but for those of ``mesh``."""
    params = [param for module in modules for param in module.parameters() if isinstance(param, DTensor)]
    meshes = dict.fromkeys(param.device_mesh for param in params)
    known = _groups_of(mesh)
    return [group for other in meshes for group in _groups_of(other) if group not in known]


def _claim(plans: Sequence[GroupPlan], *options: Any) -> list[str]:
    """What must be equal on all ranks, those of model parallelism too: the plans and the options, as lines."""
    lines = [f"options {options}"]
    for plan in plans:
        layout, mesh = plan.layout, plan.dp.mesh
        where = f"{layout.ranks} shards of {layout.shard_numel}, on a mesh of {tuple(mesh.shape)} {mesh.mesh_dim_names or ''}"
        lines.append(f"{plan.param_dtype} {plan.reduce_dtype}, {where}{f', float8 in {plan.tile}' if plan.tile else ''}")
        for param, spec, offset in zip(plan.params, layout.tensors, layout.offsets):
            value = f"{spec.name} {spec.shape} {param.value.dtype} {'' if param.value.requires_grad else 'frozen '}"
            blocks = f"in blocks of {spec.block}/{spec.period} at {offset}"
            lines.append(f"{value}on {param.value.device.type} {blocks}, {param.distribution.text}")
    return lines
