"""``parallelize``: a plan is carried out on a model. It reads the records of ``resolve``, and must not read rules."""

from __future__ import annotations

import copy
import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from torch_ragged._ranks.agreement import agreement, forget_equal_meshes
from torch_ragged._ranks.groups import device_of_messages
from torch_ragged._register._spmd import compute_as_one_device
from torch_ragged.fsdp import fully_shard
from torch_ragged.fsdp.core._fsdp_init import refuse_shared_memory
from torch_ragged.fsdp.gates._untrained import note_replaced, note_root
from torch_ragged.granularity import Granularity
from torch_ragged.random import materialize, single_device
from torch_ragged.random._deferred import is_deferred, keep_origins
from torch_ragged.spmd._added import add_later
from torch_ragged.spmd._boundary import add_boundaries
from torch_ragged.spmd._copied import DeepCopy
from torch_ragged.spmd._factories import add_factories
from torch_ragged.spmd._generate import add_generate
from torch_ragged.spmd._gradients import PendingGradients
from torch_ragged.spmd._inference import add_inference
from torch_ragged.spmd._inputs import compare_inputs
from torch_ragged.spmd._plan import Plan
from torch_ragged.spmd._resolve import resolve
from torch_ragged.spmd._resolved import Resolved, ResolvedTensor, UnitRecord
from torch_ragged.spmd._static import StaticModules
from torch_ragged.spmd._text import compared_text
from torch_ragged.tensor._read import compare_reads
from torch_ragged.tensor.interleaved_placement_types import InterleavedShard

__all__ = ["parallelize", "run_placements"]


@dataclass(frozen=True)
class UnitDims:
    """The mesh dimensions of a unit, in the form of torch's ``DataParallelMeshDims``, which torch 2.11 does not have.

    ``counts_once`` tells ``fully_shard`` that gradients are those of a single device: they are added, not averaged, and one
    that is ``Replicate()`` on these dimensions counts once.
    """

    shard: tuple[str, ...]
    replicate: tuple[str, ...]
    counts_once: bool = True

    @property
    def shard_names(self) -> tuple[str, ...]:
        return self.shard

    @property
    def replicate_names(self) -> tuple[str, ...]:
        return self.replicate


def parallelize(
    model: nn.Module,
    plan: Plan,
    mesh: DeviceMesh,
    *,
    mode: str = "eager",
    promote: bool = True,
    compare_every: int = 8,
) -> nn.Module:
    """Distribute an unchanged ``model`` over ``mesh`` as ``plan`` says. It computes what it computes on a single device::

        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))
        model = deferred_init(lambda: LlamaForCausalLM(config))       # no memory yet
        model = parallelize(model, plan, mesh)                        # the same object
        loss = model(input_ids=ids, labels=ids).loss                  # ids: the whole batch, on every rank
        loss.backward()                                               # the script stays that of a single device

    What happens:

    - Parameters and buffers become DTensors on ``mesh``; those of units are sharded by ``fully_shard``. A model that
      ``deferred_init`` made gets its values here: those of a single device, to the bit, and each rank draws only its own.
    - Tensors that enter and leave modules are redistributed where the plan says so. Between these boundaries, DTensor finds the
      placements, and communicates where an op needs it.
    - The inputs of the model have one of two forms. Whole batch: all ranks pass equal tensors, and a rule such as
      ``shard("<in:ids>", Shard(0), "dp")`` takes this rank's rows. Own rows: each rank passes its own, as a
      ``DistributedSampler`` gives them, and the rule is ``own_rows("<in:ids>", "dp")``.
    - Ranks compare their inputs and random generators. If they differ from what the plan says, all ranks raise.
    - ``torch_ragged.random.single_device`` is switched on, for the whole process: random ops draw the numbers of one device.
    - What the script reads, as by ``loss.item()``, ``ids.tolist()`` or ``f"{loss:.3f}"``, is the value of the whole tensor. All
      ranks must read it. If one rank reads alone, all ranks raise.
    - Plain parameters that are set in the model later become DTensors: ``Replicate()``, from rank 0's values, or as the plan
      says of a parameter with this name and shape.
    - Gradients are sums over the whole batch, as on a single device. Those that no unit reduces are reduced when backward ends,
      in buckets.

    Optimizers, ``clip_grad_norm_``, checkpoints and ``state_dict`` take the DTensors as they are. Call it before making the
    optimizer.

    Args:
        model: a module with its parameters on the device of ``mesh``, equal on all ranks; or from ``deferred_init``.
        plan: see :class:`Plan`.
        mesh: all ranks of it call this. Its dimensions have names.
        mode: ``"eager"``: DTensors flow through the model. ``"static"``: local tensors flow through the modules in which only
            local ops and boundaries of the plan happen, so that DTensor costs nothing there. The second call finds these
            modules: a module is static if it computes the same on DTensors and on local tensors, op by op, its gradients too,
            and only for calls with the same shapes, attributes, modes and hooks. ``model.static_modules.report`` names them,
            and for other modules the op, and the rule to add.
        compare_every: inputs and the states of the random generators are compared in the first 8 calls of ``model``, then in
            every call of which the number is a multiple of this one (inputs of own rows in each call), and before each
            checkpoint. All calls since the last comparison are compared, so a difference is found within so many calls.
        promote: whether a plain tensor that meets a DTensor counts as ``Replicate()``, for the whole process. If not, such an
            op is an error of DTensor.

    Collectives: one or two all-reduces of 24 bytes per mesh dimension; one broadcast per tensor and mesh dimension of a model
    that has values (none for a deferred one); those of ``fully_shard``, for units. It makes a process group of all ranks of
    ``mesh``: an all-reduce of 24 bytes there comes before each read of a tensor that is not ``Replicate()``. Each
    comparison of inputs is one all-gather of less than 100 bytes on meshes of up to three dimensions.

    Returns:
        ``model``. Its attribute ``plan_ir`` has the records that are carried out; ``print(model.plan_ir)`` shows a table.

    Raises:
        PlanError: the plan does not fit the model or the mesh. Every rank raises, before anything is changed; the text lists
            all that is wrong. If ``fully_shard`` refuses a unit, its error is raised, and the model is as before.
        TypeError: ``model``, ``plan``, ``mesh`` or ``promote`` is of another type.
        ValueError: this rank is not in ``mesh``; ``mode`` is another word; ``compare_every`` is no
            integer from 1 to 1024; a parameter is a DTensor already, or has hooks; ranks
            call it with different plans, models or options, of which the text has both; or ``model`` is parallelized already.

    Source: veScale's eager-mode SPMD, sections 4 and 5.
    """
    is_mesh, world = isinstance(mesh, DeviceMesh), dist.group.WORLD
    # Alone: this rank has no group of the mesh, so no rank waits for it.
    if is_mesh and mesh.get_coordinate() is None:
        raise ValueError(f"parallelize: rank {dist.get_rank()} is not in {mesh}: call it on the ranks of the mesh only")
    groups = [mesh.get_group(dim) for dim in range(mesh.ndim)] if is_mesh else [world] if world is not None else []
    # Without a mesh, most meshes of the other ranks have the group of all ranks.
    alone: AbstractContextManager[list[str]] = nullcontext([])
    with agreement(groups, device_of_messages(groups[0]), "parallelize") if groups else alone as claim:
        if not is_mesh:
            raise TypeError(f"parallelize: mesh must be a DeviceMesh, got a {type(mesh).__name__}: pass init_device_mesh(...)")
        if hasattr(model, "plan_ir"):
            raise ValueError(f"this {type(model).__name__} is parallelized already: build a new model for another plan")
        if mode not in ("eager", "static"):
            raise ValueError(f"parallelize: mode must be 'eager' or 'static', got {mode!r}")
        if not isinstance(promote, bool):
            raise TypeError(f"parallelize: promote must be True or False, got {promote!r}")
        if type(compare_every) is not int or not 1 <= compare_every <= 1024:
            raise ValueError(f"parallelize: compare_every must be an integer from 1 to 1024, got {compare_every!r}")
        # Inside of the block: from here to its end, an error of one rank is an error of all. Nothing has been changed or sent
        # so far.
        forget_equal_meshes(mesh)
        resolved = resolve(plan, model, mesh)
        placed = next((name for name, param in model.named_parameters() if isinstance(param, DTensor)), None)
        if placed is not None:
            raise ValueError(f"parallelize: {placed} is a DTensor already: give a model whose parameters are plain tensors")
        hooked = next((n for n, p in model.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks), None)
        if hooked is not None:
            raise ValueError(
                f"parallelize: {hooked} has a hook, which its DTensor would not have: register hooks after parallelize"
            )
        # Two parameters that are the same view of one memory stay so: their local tensors share theirs.
        refuse_shared_memory(model.named_parameters(), but_equal_views=True)
        claim += [
            f"mode={mode!r}",
            f"promote={promote}",
            f"compare_every={compare_every}",
            *[rule.text(compared_text) for rule in plan.rules],
            # Ranks with other shapes or names would meet in broadcasts of other sizes.
            *_lines_of(model),
        ]
        # Blanks of a table depend on its other lines, and the first line that differs is in the error.
        claim += [" ".join(line.split()) for line in resolved.text(compared_text).splitlines()]
    # References to the old parameters: until this call returns, a model with values has them beside its shards.
    before = [(module, type(module), _copied(vars(module))) for module in model.modules()]
    try:
        # From here on collectives are issued, in the order of the records. They are equal on all ranks, as ranks have agreed on
        # plan and model.
        changes, gradients = _carry_out(model, resolved, mesh)
        _install(model, resolved, mesh, mode, compare_every, changes, gradients)
    except BaseException:  # A unit's options that fully_shard refuses, on all ranks.
        for module, kind, attributes in before:
            module.__class__ = kind
            vars(module).clear()
            vars(module).update(attributes)
        raise
    # An optimizer that was made before trains nothing, and says so.
    for module, _, attributes in before:
        for name, param in attributes["_parameters"].items():
            if param is not None:
                note_replaced(param, name, module, name, "parallelize")
    # These hold for the whole process. They come last, so that a call that raises switches nothing on.
    single_device()
    compute_as_one_device(promote)
    compare_reads(mesh)
    return model


def _lines_of(model: nn.Module) -> list[str]:
    """What must be equal on all ranks, before the values of rank 0 are sent: a line per tensor, then a line per module."""
    lines = [f"a {'deferred' if is_deferred(model) else 'plain'} model"]
    named = {"parameter": model.named_parameters(), "buffer": model.named_buffers()}
    for kind, name, value in [(kind, *each) for kind, tensors in named.items() for each in tensors]:
        # Devices may differ: distribute_tensor moves values to the mesh's device. The meta device has none.
        notes = [", frozen"] * (kind == "parameter" and not value.requires_grad) + [", on the meta device"] * value.is_meta
        lines.append(f"the {kind} {name} of {value.dtype} and shape {tuple(value.shape)}{''.join(notes)}")
    for name, module in model.named_modules():
        options = re.sub(r"0x[0-9a-f]+|:\d+", "", module.extra_repr())  # Addresses and indices of devices differ.
        lines.append(f"{f'the module {name}' if name else 'the model'}, {type(module).__qualname__}({options})")
    return lines


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    """Attributes of a module, with copies of its dicts of parameters, submodules, hooks and the like."""
    return {name: copy.copy(value) if isinstance(value, (dict, set)) else value for name, value in attributes.items()}


_Gradients = list[tuple[nn.Parameter, tuple[Placement, ...]]]
"""The parameters that are in no unit, with the placements of their gradients."""


def _carry_out(model: nn.Module, resolved: Resolved, mesh: DeviceMesh) -> tuple[list[Any], _Gradients]:
    """Place the parameters and buffers. Hooks of boundaries come before those of units, which see what a boundary returns."""
    deferred = is_deferred(model)
    # Before anything is replaced: a shard of a deferred tensor is drawn later as a part of this whole.
    keep_origins(model)
    _distribute(model, resolved, mesh)
    changes = _add_rules(model, resolved, mesh)
    others = [record for record in resolved.tensors if record.is_parameter and record.unit is None]
    for unit in resolved.units:
        _shard_unit(model, unit, resolved, mesh, {model.get_parameter(record.name) for record in others})
    # After the units, so that each rank draws the elements that it keeps, and never has a whole parameter.
    if deferred:
        materialize(model)
    # After materialize(), which replaces parameters: hooks on an old one would never be called.
    gradients = [(model.get_parameter(record.name), _gradient_placements(record)) for record in others]
    return changes, [each for each in gradients if each[0].is_floating_point() or each[0].is_complex()]


def _add_rules(model: nn.Module, resolved: Resolved, mesh: DeviceMesh) -> list[Any]:
    changes = add_boundaries(model, resolved.boundaries, mesh)
    add_factories(model, resolved.factories, mesh)
    return changes


def _install(
    model: nn.Module,
    resolved: Resolved,
    mesh: DeviceMesh,
    mode: str,
    compare_every: int,
    changes: list[Any],
    gradients: _Gradients,
) -> None:
    """Add what a model under a plan has besides its tensors, boundaries and units: it belongs to this model alone."""
    pending = PendingGradients(gradients, mesh)
    model.register_forward_pre_hook(pending.begin_forward)
    model.plan_ir = resolved  # type: ignore[assignment]
    if mode == "static":
        model.static_modules = StaticModules(model, mesh, resolved, changes, pending)  # type: ignore[assignment]
    compare_inputs(model, resolved.boundaries, mesh, compare_every)
    add_inference(model)
    add_generate(model, resolved.boundaries, mesh)
    note_root([model])
    planned = {
        name: (record.shape, run_placements(record), _gradient_placements(record))
        for record in resolved.tensors
        if record.is_parameter
        for name in (record.name, *record.aliases)
    }
    # Last: from here on, a registered parameter is taken for one that the script adds.
    add_later(model, mesh, planned, pending)

    def install_on_copy(original: nn.Module, copied: nn.Module) -> None:
        params = dict(copied.named_parameters())  # Of the script's, too, which came later.
        alike = [(params[name], pending.placements_of(param)) for name, param in original.named_parameters()]
        of_gradients = [(param, placements) for param, placements in alike if placements is not None]
        _install(copied, resolved, mesh, mode, compare_every, _add_rules(copied, resolved, mesh), of_gradients)

    model.__deepcopy__ = DeepCopy(model, install_on_copy)  # type: ignore[assignment]


def _distribute(model: nn.Module, resolved: Resolved, mesh: DeviceMesh) -> None:
    """Parameters and buffers become DTensors with the placements with which the model computes. Tied ones stay tied."""
    for record in resolved.tensors:
        placements = run_placements(record)
        owner, name = _owner_module(model, record.name)
        value = getattr(owner, name)
        # A broadcast or scatter from rank 0, per mesh dimension: replicas are equal then, also if ranks had other values.
        placed: Any = distribute_tensor(value.detach(), mesh, placements)
        if record.is_parameter:
            placed = nn.Parameter(placed, requires_grad=value.requires_grad)
            # Marks of the model's code, such as ``no_weight_decay``.
            vars(placed).update(vars(value))
        for alias in (record.name, *record.aliases):
            owner, name = _owner_module(model, alias)
            (owner._parameters if record.is_parameter else owner._buffers)[name] = placed


def _owner_module(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    module, _, tensor = name.rpartition(".")
    return model.get_submodule(module), tensor


def run_placements(record: ResolvedTensor) -> tuple[Placement, ...]:
    """The placements on the whole mesh with which the model computes; a cut of fused segments cuts each of them."""
    return tuple([_of_segments(placement, record) for placement in record.run])


def _of_segments(placement: Placement, record: ResolvedTensor) -> Placement:
    segments = record.segments
    if segments is None or not placement.is_shard(segments.dim):
        return placement
    return InterleavedShard(segments.dim, segments.sizes)


def _gradient_placements(record: ResolvedTensor) -> tuple[Placement, ...]:
    own = run_placements(record)
    return tuple([wanted or placement for wanted, placement in zip(record.grad or (None,) * len(own), own)])


def _shard_unit(model: nn.Module, unit: UnitRecord, resolved: Resolved, mesh: DeviceMesh, others: set[nn.Parameter]) -> None:
    """One call of fully_shard, which does not take ``others``: the parameters that are in no unit."""
    module, options = model.get_submodule(unit.module), dict(unit.options)
    granularity: Granularity | None = options.pop("granularity", None)
    if granularity is not None:
        fused = {
            id(model.get_parameter(record.name)): record.segments.granularity(granularity, len(record.shape))
            for record in resolved.tensors
            if record.is_parameter and record.segments is not None
        }
        options["orig_param_policy"] = lambda name, param: fused.get(id(param), granularity)
    ignored = {param for param in module.parameters() if param in others}
    dims = UnitDims(unit.shard, unit.replicate)
    fully_shard(module, mesh=mesh, dp_mesh_dims=dims, ignored_params=ignored, **options)
    # FSDP averages gradients of ranks. Here they are summands of one gradient.
    module.set_gradient_divide_factor(1.0)  # type: ignore[operator]
