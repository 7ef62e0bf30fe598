"""``fully_shard``: makes parameter groups of modules. It moves parameters once, and trains nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.tensor import DTensor, Partial

from torch_ragged._ranks.agreement import agree, agreement
from torch_ragged._ranks.claims import text_of
from torch_ragged._ranks.meshes import agree_on_groups, device_of, forget_equal_meshes, groups_of
from torch_ragged.fsdp._fsdp_module import FSDPModule, check_reshard_after_forward, make_fsdp_module
from torch_ragged.fsdp._spmd_types import AnnotationPart
from torch_ragged.fsdp.core._fsdp_api import InvalidArgument, check_bool
from torch_ragged.fsdp.core._fsdp_init import (
    CPUOffloadPart,
    GroupPolicyPart,
    RegisteredNames,
    ShardPlacementFn,
    find_params,
    make_group,
    plan_groups,
)
from torch_ragged.fsdp.core._fsdp_param import has_extension, owner_of
from torch_ragged.fsdp.core._fsdp_state import FSDPState, state_of
from torch_ragged.fsdp.core._hooks import hook_modules
from torch_ragged.fsdp.core._kit import FeaturePart, GroupPlan, Kit, Need, PlainPart, Terms, check_pairs
from torch_ragged.fsdp.core._mesh import OUTSIDE, DataParallelMesh
from torch_ragged.fsdp.core._state_dict import take_parts
from torch_ragged.fsdp.core.keepers._neighbours import NeighboursPart
from torch_ragged.fsdp.elastic._dormant_group import OutsideMesh
from torch_ragged.fsdp.elastic._weights import WeightsPart
from torch_ragged.fsdp.gates._gate import gate_of
from torch_ragged.fsdp.gates._untrained import (
    note_ignored,
    note_replaced,
    sharded_originals,
    watch_optimizers,
)
from torch_ragged.fsdp.memory._resident import BufferPlacements
from torch_ragged.granularity import Granularity, GroupPolicy, OrigParamPolicy

__all__ = ["fully_shard", "parts_of"]


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
    module's class becomes a subclass of :class:`FSDPModule`. All ranks must hold the same parameter values before the call.

    Collectives:

    - In this call: one all-reduce of 24 bytes per mesh dimension. In the first call with a mesh, ranks also compare its process
      groups through their store. If a call is wrong on one rank, or differs between ranks, all
      ranks raise before anything is changed. ``dp_mesh_dims`` and ``HIERARCHICAL`` make process groups, and need a second one,
      and so does ``Offload(parameters="files")``, which makes files.
    - Per step and group: one all-gather in forward, one in backward if the group was resharded, and one reduce-scatter. HSDP
      adds one all-reduce of the shard.
    - Per backward pass: one all-reduce of a byte per parameter, by which ranks agree on unused parameters.
    - In the root's first forward, with replicas: one all-reduce of 16 bytes over them and one of 8 bytes over each other mesh
      dimension, by which ranks check that replicas hold equal parameters.

    A reduction has one dtype and one mesh. So if the parameters of a call differ in mesh, dtype or compute dtype, each kind has
    its own buffers and collectives. Each parameter placed as ``Shard`` has its own, too, and so have all parameters together
    whose tensor types have their own all-gather.

    Args:
        module: the module to shard, in place; or a list of modules whose parameters make one group. The group is all-gathered
            for the first module of the list that runs, and resharded after the last one.
        mesh: a 1-D mesh of shards; or a 2-D mesh (HSDP) of replicas (first dimension) and shards (second dimension), for
            parameters placed as ``(Replicate(), RaggedShard)``. None: all ranks, on the accelerator, or on the CPU if there is
            no accelerator; without a process group, ``init_process_group()`` is called first, as by FSDP2. A rank outside of
            the mesh may call ``fully_shard``, too, without a collective: its module is then dormant (parameters without local
            elements, no forward) until :func:`reshard_to`. Plain parameters and buffers move to the mesh's device. Inputs of
            the root move to an accelerator. If parameters are DTensors on other dimensions of the same mesh (tensor or expert
            parallelism), they keep these placements, behind the new ones: ``(StridedRaggedShard, Shard(0))``,
            ``(RaggedShard, Shard(1))``.
        reshard_after_forward: whether to free the unsharded parameters after forward. None: False for the root, True for other
            modules. An integer k: free them, but each of k neighbouring ranks keeps one k-th of the gathered buffer, and
            backward all-gathers among these k ranks only. The sharded parameters are registered meanwhile. For tensor types
            with their own all-gather, an integer means True.
        shard_placement_fn: a function ``parameter -> placement``. It returns a granularity, as below; or ``Shard(d)``, for a
            parameter that is sharded as by FSDP2, in a buffer of its own; or torch's ``BlockShard``, whose blocks of whole rows
            are then not cut: the planner chooses their owners; or torch's ``ShardPlacementResult``, which also names a mesh; or
            None.
        mp_policy: the dtypes of computation, reduction and outputs, as in the installed FSDP2. If it has no ``reduce_dtype``,
            gradients are reduced in ``param_dtype`` (before torch 2.15) or in the parameters' dtype (since torch 2.15). With a
            :class:`Float8Policy`, matrices are all-gathered as 8-bit codes.
        offload_policy: with ``CPUOffloadPolicy()``, sharded parameters and their gradients are on the CPU. So the optimizer
            runs there. With an :class:`Offload`, a part of the states of an :func:`offloaded` optimizer is in host memory, or
            states and parameters are in files.
        ignored_params: an iterable of parameters that are not sharded, and whose gradients are not reduced. A parameter that is
            added later, and is trained without ``fully_shard``, causes a warning, unless it was ever in ``ignored_params``.
        dp_mesh_dims: torch's ``DataParallelMeshDims``. ``mesh`` is then the whole mesh, and ``dp_mesh_dims`` names its
            data-parallel dimensions; several names are flattened into one dimension. All parameters must be DTensors on
            ``mesh``, with ``Replicate()`` on these dimensions; or plain tensors with annotations of the package ``spmd_types``.
            The model computes with such a plain tensor, and its sharded parameter is a DTensor on ``mesh``.
        orig_param_policy: a function ``(fqn, parameter) -> granularity``, which says what must not be cut. None: a parameter
            may be cut anywhere. If ``module`` is a list, each name begins with the module's index in the list. A
            :class:`~torch_ragged.granularity.GroupPolicy`, as ``torch_ragged.optim.muon_policy`` makes, sees a whole buffer.
        placements: what stays gathered or unreduced between uses: ``ZERO1``, ``ZERO2``, ``ZERO3`` or ``HIERARCHICAL``. None:
            ``ZERO3`` on a 1-D mesh, HSDP on a 2-D mesh. See :class:`BufferPlacements`.
        optional: ranks may skip ``module`` in forward, as a vision tower if their batch has text only. It costs votes, which
            the host waits for: see "Modules that some ranks skip" in docs/fsdp.md.
        weights: an integer per rank of the shards, at least 0, as ``[3, 2, 0]``. Shards are in proportion to them: the last
            rank holds nothing, but gathers, computes and reduces like the others. None: equal shards. See "Unequal ranks" in
            docs/meshes.md.
        check_replicas: whether the first forward of the root, and ``checkpoint.save``, raise on all ranks if replicas (HSDP)
            hold other values of these parameters, as after other seeds. False: they may differ, as in DiLoCo and torchft.
            Buffers and ``ignored_params`` are not compared. A replica that a program changes after the first forward is found
            at the next ``checkpoint.save``: a comparison in each step would read all shards.

    Returns:
        ``module``.

    Raises:
        ValueError: ``mesh`` is not as above; a list has a module twice; ``module`` is sharded already; a parameter is sharded
            already, by this function or torch's, is a DTensor on another device than the mesh's, on a dimension of
            ``mesh``, or on a mesh that cannot be joined with ``mesh``, is tied to a sharded parameter, is cut unevenly by model
            parallelism, or is a trainable integer; ``reshard_after_forward`` does not divide the number of shards;
            ``weights`` are not one integer per rank, at least 0; two features exclude each other (docs/combinations.md lists
            them); or ranks disagree.
        TypeError: ``module`` is not an ``nn.Module``, ``mesh`` is not a ``DeviceMesh``, ``reshard_after_forward`` is not a
            bool, int or None, ``placements`` are no ``BufferPlacements``, ``mp_policy`` is no ``MixedPrecisionPolicy`` of
            floating-point dtypes, ``offload_policy`` is no ``OffloadPolicy``, ``ignored_params`` has something other than
            parameters, ``orig_param_policy`` or ``shard_placement_fn`` is no function of its arguments, or
            ``orig_param_policy`` returns something other than a granularity.
        OSError: a folder of ``Offload(parameters="files")`` is missing or read-only, or has too little space.
        PeerError: another rank died, or did not make this call within the timeout.
        RuntimeError: another rank raised.
    """
    mesh = _default_mesh() if mesh is None else mesh
    _check_mesh(mesh)
    # First: a rank whose arguments are wrong must tell those of model parallelism, too.
    ranks, device = groups_of(mesh) + _model_groups(module, mesh), device_of(mesh)
    agree_on_groups(mesh)
    forget_equal_meshes(mesh)
    with agreement(ranks, device, "fully_shard") as claim:
        modules, ignored = _root_modules(module), _parameters(ignored_params)
        _check_offload_policy(offload_policy)
        check_bool("fully_shard", "optional", optional)
        check_bool("fully_shard", "check_replicas", check_replicas)
        _check_mp_policy(mp_policy)
        if placements is not None and not isinstance(placements, BufferPlacements):
            raise TypeError(
                f"placements={placements!r} is a {type(placements).__name__}: pass ZERO1, ZERO2, ZERO3 or HIERARCHICAL, which "
                "torch_ragged.fsdp has (placements=ZERO2)"
            )
        _check_function("orig_param_policy", orig_param_policy)
        _check_function("shard_placement_fn", shard_placement_fn)
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
        parts += AnnotationPart.of_process()
        check_pairs(parts)
        if placements is not None:
            placements.check_mesh(mesh, dp_mesh_dims)
        # What users write, which must be equal on all ranks. The results of the two functions are compared below.
        shape = (mesh.device_type, tuple(mesh.shape), mesh.mesh_dim_names)
        options = {"mesh": shape, **options, "check_replicas": bool(check_replicas), "ignored_params": _names(modules, ignored)}
        texts = {name: each.text() if isinstance(each, FeaturePart) else text_of(each) for name, each in options.items()}
        written = [f"{name}: {text}" for name, text in texts.items()]
        claim += written if any(part.makes_groups for part in parts) else []
    with agreement(ranks, device, "fully_shard") as claim:
        dp = DataParallelMesh.of(mesh, dp_mesh_dims)
        for part in parts:
            dp = part.shards_over(dp)
        found = _check_modules(modules, mesh, reshard_after_forward, dp, ignored)
        plans = plan_groups(found, dp, parts, mp_policy, orig_param_policy, shard_placement_fn)
        claim += written + _claim(plans, list(found))
    _move(modules, found if dp.is_member else {}, device)
    may_fail = any(part.may_fail_alone for plan in plans for part in plan.parts)
    with torch.inference_mode(False):  # Later steps train these parameters.
        kits = [Kit.of(plan).with_keeper() for plan in plans]
    with agreement(ranks, device, "fully_shard") if may_fail else nullcontext([]) as claim:  # type: ignore[attr-defined]
        groups = [make_group(plan, kit) for plan, kit in zip(plans, kits)]
        claim.append("groups")  # One may fail on one rank: then no rank replaces a parameter.
    note_ignored(ignored)
    watch_optimizers()
    for param in [param for plan in plans for param in plan.params]:
        note_replaced(param.value, param.fqn, *param.registered_names[0])
    for group in groups:
        group.register_sharded()
    if not isinstance(reshard_after_forward, (bool, type(None))):
        reshard_after_forward = reshard_after_forward > 1
    state = FSDPState(modules, groups, mp_policy, reshard_after_forward, optional, gate_of)
    hook_modules(state)
    state.checks_replicas = check_replicas
    state.reduces_last_only = placements is not None and placements.gradients[0] == Partial()
    for each in modules:
        make_fsdp_module(each, state)
    for owner in dict.fromkeys(owner for _, registered in found.values() for owner, _ in registered):
        owner.register_load_state_dict_pre_hook(take_parts)
    return module


def _state(module: nn.Module) -> FSDPState | None:
    """``fully_shard.state(module)``, as in FSDP2: the state of ``module``, or None if ``fully_shard`` was not called on it."""
    return state_of(module)


fully_shard.state = _state  # type: ignore[attr-defined]


# -- checks --------------------------------------------------------------------------------------------------------------


def _root_modules(module: Any) -> tuple[nn.Module, ...]:
    """The modules to shard. A module inside another one of the list is left out."""
    modules = (module,) if isinstance(module, nn.Module) else tuple(module) if isinstance(module, (list, tuple)) else ()
    if not modules or not all(isinstance(each, nn.Module) for each in modules):
        raise TypeError(
            f"fully_shard expects an nn.Module or a list of them, got {module if modules else type(module).__name__}"
        )
    twice = next((each for index, each in enumerate(modules) if each in modules[:index]), None)
    if twice is not None:
        raise InvalidArgument(f"fully_shard got a {type(twice).__name__} twice in one list: name each module once")
    inside = {child for each in modules for child in each.modules() if child is not each}
    return tuple(each for each in modules if each not in inside)


def _parameters(ignored: Any) -> set[nn.Parameter]:
    """``ignored_params`` as a set."""
    found = list(ignored) if isinstance(ignored, Iterable) and not isinstance(ignored, (str, torch.Tensor)) else [ignored]
    wrong = [each for each in found if not isinstance(each, torch.Tensor)]
    if ignored is not None and wrong:
        raise TypeError(
            f"ignored_params expects a set of parameters, got {wrong[0]!r} in it: pass the parameters themselves, as "
            "{model.head.weight} or set(model.head.parameters()), not names or modules"
        )
    return set(found) if ignored is not None else set()


def _check_modules(
    modules: Sequence[nn.Module],
    mesh: DeviceMesh,
    reshard_after_forward: Any,
    dp: DataParallelMesh,
    ignored: set[nn.Parameter],
) -> dict[str, tuple[nn.Parameter, RegisteredNames]]:
    """Check the modules and their parameters, and return the parameters to shard."""
    for module in modules:
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
            raise ValueError(f"fully_shard cannot shard a {type(module).__name__}, which has no forward: shard its members")
        if state_of(module):
            raise InvalidArgument(f"{type(module).__name__} is sharded by fully_shard already: call it once for each module")
    check_reshard_after_forward(reshard_after_forward, dp.ranks)
    found = find_params(modules, ignored, lambda module: state_of(module) is not None)
    of_torch = _sharded_by_torch(modules)
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


def _sharded_by_torch(modules: Sequence[nn.Module]) -> dict[nn.Parameter, str]:
    """The parameters under modules that torch's ``fully_shard`` was called on, with the name of such a module."""
    named = [pair for module in modules for pair in module.named_modules()]
    torchs = [(name, isinstance(each, TorchFSDPModule) and not isinstance(each, FSDPModule), each) for name, each in named]
    theirs = [(name, each) for name, is_torchs, each in torchs if is_torchs]
    return {param: name or type(each).__name__ for name, each in theirs for param in each.parameters()}


def _move(modules: Sequence[nn.Module], found: dict[str, tuple[nn.Parameter, RegisteredNames]], device: torch.device) -> None:
    """Move the parameters to shard, and the modules' buffers, to ``device``. Those on the meta device stay there."""
    tensors = [param for param, _ in found.values() if not isinstance(param, DTensor)]
    inside = {child for module in modules for child in module.modules() if child not in modules and state_of(child)}
    sharded = {each for child in inside for each in child.modules()}
    tensors += [
        b for module in modules for each in module.modules() if each not in sharded for b in each.buffers(recurse=False)
    ]  # type: ignore[misc]
    for tensor in tensors:
        if tensor.device.type not in (device.type, "meta"):
            tensor.data = tensor.data.to(device)


def parts_of(arguments: Mapping[str, Any]) -> list[FeaturePart]:
    """The parts of the arguments of ``fully_shard``, in the order in which they equip a group. What is absent brings none."""
    given = [(arguments[name], part_of) for name, part_of in _PARTS.items() if name in arguments]
    parts = [value if isinstance(value, FeaturePart) else part_of(value) for value, part_of in given]
    return [part for part in parts if part is not None]


def _part_of_dims(dims: Any) -> FeaturePart:
    given = "parallelize" if getattr(dims, "counts_once", False) else f"dp_mesh_dims={dims}"
    return PlainPart(Terms(given, {Need.IN_MESH: OUTSIDE}, breaks=(Need.MOVABLE, Need.OWN_MESH)), makes_groups=True)


_SEVERAL = PlainPart(Terms("a list of several modules", breaks=(Need.ONE_MODULE,)))
_OPTIONAL = PlainPart(Terms("optional=True", {Need.ONE_MODULE: ": call fully_shard for each of them"}))

_PARTS: dict[str, Callable[[Any], FeaturePart | None]] = {
    "module": lambda given: _SEVERAL if len(given) > 1 else None,
    "optional": lambda given: _OPTIONAL if given else None,
    "dp_mesh_dims": lambda given: None if given is None else _part_of_dims(given),
    "offload_policy": lambda given: CPUOffloadPart(given.pin_memory) if isinstance(given, CPUOffloadPolicy) else None,
    "mp_policy": lambda given: None,  # Torch's own is no part.
    "weights": WeightsPart.of,
    "orig_param_policy": lambda given: GroupPolicyPart(given) if isinstance(given, GroupPolicy) else None,
    "reshard_after_forward": lambda k: NeighboursPart(k) if isinstance(k, int) and not isinstance(k, bool) else None,
    "placements": lambda given: None,
    "mesh": OutsideMesh.of,  # The last one: it takes away what the others have chosen.
}
"""By argument, what makes the part of a value that is none itself."""


def _default_mesh() -> DeviceMesh:
    """All ranks, on the accelerator, or on the CPU if there is none. As in FSDP2, torchrun needs no ``init_process_group``."""
    if not dist.is_initialized():
        dist.init_process_group()
    return init_device_mesh(_default_device().type, (dist.get_world_size(),))


def _default_device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if accelerator is None else accelerator


def _check_mesh(mesh: Any) -> None:
    """Raise if ``mesh`` is not a mesh, which has process groups over which ranks can agree. All ranks raise."""
    if isinstance(mesh, DeviceMesh):
        return
    problem = TypeError(f"fully_shard expects a DeviceMesh, as init_device_mesh makes it, as mesh, got {mesh!r}")
    if dist.is_initialized():
        agree([dist.GroupMember.WORLD], _default_device(), "fully_shard", "", problem)  # type: ignore[list-item]
    raise problem


def _model_groups(module: Any, mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """The process groups of the meshes that the parameters to shard are distributed over, without those of ``mesh``."""
    modules = [each for each in (module if isinstance(module, (list, tuple)) else [module]) if isinstance(each, nn.Module)]
    params = [param for each in modules for param in each.parameters() if isinstance(param, DTensor)]
    meshes = dict.fromkeys(param.device_mesh for param in params)
    known = groups_of(mesh)
    return [group for other in meshes for group in groups_of(other) if group not in known]


def _names(modules: Sequence[nn.Module], params: set[nn.Parameter]) -> list[str]:
    """The names of those of ``params`` that are in the modules."""
    return [name for each in modules for name, param in each.named_parameters() if param in params] if params else []


def _claim(plans: Sequence[GroupPlan], names: Sequence[str]) -> list[str]:
    """The plans as lines of text, which must be equal on all ranks, also on those of model parallelism.

    Devices may differ: programs load the weights on rank 0, keep the other ranks on the meta device, and broadcast afterwards.
    """
    pairs = {param.fqn: (param, spec) for plan in plans for param, spec in zip(plan.params, plan.layout.tensors)}
    # In the order of the modules. The first line that differs is in the error.
    lines = [f"{len(names)} parameters{f', {names[0]} to {names[-1]}' if names else ''}"]
    for param, spec in map(pairs.__getitem__, names):
        value, frozen, cut = param.value, "" if param.value.requires_grad else ", frozen", param.distribution.shard_dim
        lines.append(f"{param.fqn} of {value.dtype} and shape {param.distribution.text}{frozen}")
        where = (spec.text or "in single elements") if cut is None else f"along dimension {cut}"
        lines.append(f"orig_param_policy or shard_placement_fn of {param.fqn}: cut {where}")
    for plan in plans:
        layout, mesh = plan.layout, plan.dp.mesh
        casts = f"param_dtype {plan.param_dtype}, reduce_dtype {plan.reduce_dtype}"
        where = f"{layout.ranks} shards of {layout.shard_numel} elements, on a mesh of {tuple(mesh.shape)}"
        names = f" {mesh.mesh_dim_names}" if mesh.mesh_dim_names else ""
        lines.append(f"a buffer of {layout.tensors[0].name} and others with {casts}, in {where}{names}")
        lines += [f"{spec.name} {spec.shape} at {offset}" for spec, offset in zip(layout.tensors, layout.offsets)]
    return lines


_EXAMPLES = {
    "orig_param_policy": ("fqn, parameter", "rows(32)"),
    "shard_placement_fn": ("parameter", "Shard(0)"),
}
"""By argument of ``fully_shard``: the arguments of such a function, and what it may return."""


def _check_mp_policy(mp_policy: Any) -> None:
    """Raise if ``mp_policy`` is no policy, or has a dtype that parameters cannot have.

    Raises:
        TypeError: it is.
    """
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


def _check_offload_policy(offload_policy: Any) -> None:
    """Raise if ``offload_policy`` is no policy, such as the class of one. FSDP2 would ignore it; it takes None, too.

    Raises:
        TypeError: it is.
    """
    if offload_policy is not None and not isinstance(offload_policy, OffloadPolicy):
        raise TypeError(
            f"offload_policy={offload_policy!r} is no policy: pass offload_policy=CPUOffloadPolicy(), which "
            "torch.distributed.fsdp has, or leave it out"
        )


def _check_function(name: str, function: Any) -> None:
    """Raise if ``function`` cannot be called as the argument ``name`` of ``fully_shard`` is.

    Raises:
        TypeError: it is no function, or takes other arguments.
    """
    if function is None:
        return
    arguments, result = _EXAMPLES[name]
    example = f"{name}=lambda {arguments}: {result}"
    if isinstance(function, Granularity):
        raise TypeError(
            f"{name}={function.text} is a granularity: pass a function that returns one for each parameter, {name}=lambda "
            f"{arguments}: {function.text}"
        )
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
