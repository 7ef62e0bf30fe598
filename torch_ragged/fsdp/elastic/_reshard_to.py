"""``reshard_to``: moves a model that trains, and its optimizers, to another mesh. It writes no file."""

from __future__ import annotations

import dataclasses
import functools
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Union

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torch_ragged import transfer
from torch_ragged._ranks.agreement import agreement
from torch_ragged._ranks.groups import device_of, device_of_messages, group_of
from torch_ragged.fsdp._groups import module_states
from torch_ragged.fsdp.comm._collectives import WrappedCollectives
from torch_ragged.fsdp.core._fsdp_init import GroupPolicyPart, layout_of, make_group
from torch_ragged.fsdp.core._fsdp_param import Distribution, FoundParam, keep_attributes
from torch_ragged.fsdp.core._fsdp_param_group import FSDPParamGroup
from torch_ragged.fsdp.core._fsdp_state import FSDPState
from torch_ragged.fsdp.core._hooks import map_tensors
from torch_ragged.fsdp.core._kit import Draft, FeaturePart, GroupPlan, Need, PlainPart, Terms, check_pairs
from torch_ragged.fsdp.core._mesh import DataParallelMesh
from torch_ragged.fsdp.core._neighbours import Neighbours, NeighboursPart
from torch_ragged.fsdp.core._param_swap import load_replaced
from torch_ragged.fsdp.elastic._dormant_group import OutsideMesh
from torch_ragged.fsdp.elastic._optimizer_states import OptimizerStates, Told, compare_options
from torch_ragged.fsdp.elastic._weights import WeightsPart
from torch_ragged.fsdp.gates._untrained import note_replaced
from torch_ragged.fsdp.layout._weighted import check_weights
from torch_ragged.fsdp.memory._resident import ZERO2, Resident

__all__ = ["Description", "ModelMove", "check_no_hooks", "checked_states", "mesh_of_states", "part_of_move", "reshard_to"]

_CALL = "reshard_to"
Kept = Union[int, str, None]
"""What stays gathered between uses: k of ``reshard_after_forward=k``, "all" (ZERO1, ZERO2), or None."""


def reshard_to(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    mesh: DeviceMesh,
    *,
    group: dist.ProcessGroup | None = None,
    weights: Sequence[int] | None = None,
    stateful: Sequence[Stateful] = (),
    left: Sequence[int] | None = None,
) -> None:
    """Move a model that :func:`fully_shard` has sharded, and its optimizers, to another mesh, without a checkpoint.

    ::

        whole, fewer = init_device_mesh("cpu", (8,)), DeviceMesh("cpu", list(range(7)))    # on all 8 ranks
        reshard_to(model, optimizer, fewer)     # rank 7 leaves: it keeps a model without shards, and trains no more
        reshard_to(model, optimizer, whole)     # rank 7 has shards again
        reshard_to(model, optimizer, whole, weights=[2] * 4 + [1] * 4)      # the first ranks have more memory

    Call it between steps, on the root module. Parameters, gradients and all states of the optimizers move; the buffers of
    groups are planned for the new mesh. The parameters become other objects: those in the optimizers are exchanged, and other
    references, such as lists of parameters, are out of date. An optimizer that is not passed keeps the old ones, and its next
    step warns. Optimizers, their groups, and learning rate schedulers stay the same objects. Compiled modules compile again;
    captured graphs must be captured again.

    A rank outside of the old mesh calls ``fully_shard(..., mesh=old)`` before, as ranks of that mesh do, perhaps with a model
    on the meta device, and makes its optimizer. Its model is dormant: it has no shards, and its forward raises. Here it takes
    options (such as ``lr``) and steps of the optimizers, buffers and parameters that are not sharded from the lowest rank of
    the old mesh. In later steps, ranks compare the options: a scheduler that was forgotten is an error on all ranks. A rank
    outside of the new mesh becomes dormant, and its optimizers have no states. It may end.

    Args:
        model: the root, the outermost module that ``fully_shard`` was called on, or a module around it. All its sharded
            parameters are on one mesh, a 1-D one or HSDP's.
        optimizer: an optimizer, a list of them, or None. Their parameters are sharded parameters of ``model``. Optimizers with
            states that are not placed as parameters have a method ``empty_state``, as those of ``torch_ragged.optim``.
        mesh: the new mesh: 1-D, or 2-D for HSDP, of the same device type. It may have any number of ranks.
        group: the process group of all ranks that call; None: the default group. It must have all ranks of both meshes. If
            ranks that left have ended, pass a group without them, such as ``mesh.get_group()`` of the present mesh.
        weights: as for :func:`fully_shard`, one per rank of the new shards; None: equal shards, also if the old ones were not.
            ``mesh`` may be the present one.
        stateful: objects with a ``state_dict`` that is equal on all ranks, such as schedulers and a ``GradScaler``, in one
            order. A rank outside of the old mesh loads the states of its lowest rank, with tensors on the CPU.
        left: the ranks that have shards now, equal on all ranks, if ranks have died since the models of ranks that join were
            made. None: the ranks of the models' mesh.

    Memory: until the call ends, old and new shards exist together.

    Collectives, over ``group``: two all-reduces of 24 bytes, a broadcast of a description, those that move the elements, and a
    broadcast of each buffer if ranks join. With ``reshard_after_forward=k``, neighbours make a process group. In later steps,
    the comparisons: all-gathers of up to 48 bytes over ``mesh``.

    Raises:
        ValueError: ``model`` is not sharded, or is sharded with tensor parallelism, ``dp_mesh_dims``, ``HIERARCHICAL``, a
            tensor type with its own all-gather, persistent buffers or other collectives than the mesh's; a parameter has
            hooks on its gradient; ``mesh`` or ``weights`` do not fit; an optimizer holds another parameter, or a state of
            unknown placement; or ranks disagree.
        TypeError: ``mesh`` is not a ``DeviceMesh``, ``optimizer`` is not an optimizer, or one of ``stateful`` has no state.
        RuntimeError: a forward or backward runs; there are gradients that are not in ``.grad`` yet; parameters are on the meta
            device; or another rank raised. All ranks raise, and the model and the optimizers are unchanged, but resharded.
    """
    if not dist.is_initialized():
        raise RuntimeError("reshard_to needs a process group: call torch.distributed.init_process_group() first")
    world = dist.group.WORLD if group is None else group
    if not isinstance(world, dist.ProcessGroup):  # torch gives another object to ranks that are not in a group.
        raise ValueError(f"rank {dist.get_rank()} is not in the group passed to reshard_to: call it on the ranks of the group")
    device = device_of_messages(world)
    with agreement([world], device, _CALL) as claim:
        states = checked_states(model, _CALL)
        old = mesh_of_states(states, _CALL)
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(f"reshard_to expects a DeviceMesh, as init_device_mesh makes it, got {mesh!r}")
        if mesh.device_type != old.mesh.device_type:
            raise ValueError(
                f"the model is on {old.mesh.device_type}, the mesh on {mesh.device_type}: reshard_to keeps the device"
            )
        ranks = dist.get_process_group_ranks(world)
        for each, its_ranks in ((old.mesh, left or _ranks_in(old.mesh)), (mesh, _ranks_in(mesh))):
            if outside := sorted(set(its_ranks) - set(ranks)):
                raise ValueError(
                    f"{each} has the ranks {outside[:8]}, which are not in the group of {len(ranks)} ranks that call "
                    "reshard_to: pass a group with all ranks of both meshes"
                )
        new = DataParallelMesh.of(mesh)
        check_no_hooks(states, _CALL)
        move = ModelMove(model, states, optimizer, old, new, _CALL, weights, stateful, left)
        own = move.description() if old.is_member else None
        lowest = min(move.old_ranks)
        try:  # Before the others wait for it: options may be of any type.
            message = [pickle.dumps(own) if dist.get_rank() == lowest else b""]
        except Exception as error:
            raise TypeError(
                f"reshard_to cannot send the options and states of the optimizers and of stateful to other ranks: {error}"
            ) from error
        claim += move.lines()
    # After the agreement: no rank has raised, so all of them are here, and the lowest one has pickled its message.
    dist.broadcast_object_list(message, src=lowest, group=world, device=device)  # Two broadcasts.
    with agreement([world], device, _CALL) as claim:
        told: Description = pickle.loads(message[0])
        if own is not None and own.lines != told.lines:
            pairs = zip([*own.lines, "nothing more"], [*told.lines, "nothing more"])
            here, there = next(pair for pair in pairs if pair[0] != pair[1])
            raise ValueError(f"ranks of the mesh differ: rank {dist.get_rank()} has {here}, its lowest rank has {there}")
        # Within the agreement: if an allocation, or a state dict, fails on one rank, all ranks raise before any element moves.
        # The old groups are still registered. New and old shards are in memory from here on.
        move.make_groups(told)
        source = move.source() if old.is_member else None
        target = move.target(told) if new.is_member else None
        if not old.is_member:
            move.load_stateful(told)
        claim.append("ready to move")
    with torch.no_grad():
        # Into new memory: until finish(), the model and the optimizers of the old mesh are as before, also if a rank dies in
        # the transfer.
        transfer.plan(source, target, group=world).run(source, target)
        move.send_whole_tensors(world)
    # It holds the old states of all optimizers. Without it, finish() frees those of one optimizer after another.
    del source
    move.finish(told, target or {}, world, takes_told=not old.is_member)


@dataclass(frozen=True)
class Description:
    """What the lowest rank of the old mesh tells all others."""

    requires_grad: dict[str, bool]  # By the name of the parameter.
    gradients: dict[str, torch.dtype]  # Of ``.grad``, of parameters that have one.
    kept: list[Kept]  # Of each group.
    optimizers: list[Told]
    stateful: list[Any]  # State dicts.

    @property
    def lines(self) -> list[str]:
        """The description in lines that must be equal on all ranks with shards."""
        lines = [f"{name} {'trained' if value else 'frozen'}" for name, value in self.requires_grad.items()]
        lines += [f"gradient {name} {dtype}" for name, dtype in self.gradients.items()]
        return [*lines, f"kept {self.kept}", *(f"state {line}" for told in self.optimizers for line in told.lines)]


class ModelMove:
    """The groups and optimizers of one model on their way from the mesh ``old`` to ``new``.

    Nothing is changed before :meth:`finish`, except that all modules are resharded.
    """

    def __init__(
        self,
        model: nn.Module,
        states: Sequence[FSDPState],
        optimizer: Any,
        old: DataParallelMesh,
        new: DataParallelMesh,
        call: str,
        weights: Sequence[int] | None = None,
        stateful: Sequence[Stateful] = (),
        left: Sequence[int] | None = None,
    ) -> None:
        self._model, self._states, self._old, self._new = model, states, old, new
        self.old_ranks = list(left or _ranks_in(old.mesh))
        self._old_shape = "any shape" if left else tuple(old.mesh.shape)  # A rank that joins may know that of before a death.
        self._call = call
        self.stateful: list[Any] = list(stateful) if isinstance(stateful, (list, tuple)) else [stateful]
        for each in self.stateful:
            # A module or an optimizer is not equal on all ranks by its nature.
            if isinstance(each, (nn.Module, torch.optim.Optimizer)) or not isinstance(each, Stateful):
                raise TypeError(
                    f"{call}(stateful=) takes a list of objects with state_dict and load_state_dict, such as schedulers, got "
                    f"{type(each).__name__}"
                )
        self._weights = weights if weights is None else check_weights(weights, new.ranks)
        self._groups = [group for state in states for group in state.groups]
        for group in self._groups:
            check_movable(group, call)
            check_kept(group, new, self._weights)
        for state in states:
            state.reshard()
        for group in self._groups:
            load_replaced(group)
        names = {param: name for name, param in model.named_parameters()}
        self._sharded: dict[str, nn.Parameter] = {}
        for param in [param for group in self._groups for param in group.params]:
            if param.sharded not in names:
                raise ValueError(f"{param.fqn} is not registered in the {type(model).__name__} passed to {call}")
            name, placements, gradient = names[param.sharded], param.sharded.placements, param.sharded.grad  # type: ignore
            if gradient is not None and getattr(gradient, "placements", None) != placements:
                raise ValueError(
                    f"{name} has a gradient that is not placed as the parameter, as {placements}: set it to None, or "
                    "redistribute it, before reshard_to"
                )
            self._sharded[name] = param.sharded
        self._names = {param: name for name, param in self._sharded.items()}
        given = list(optimizer) if isinstance(optimizer, (list, tuple)) else [] if optimizer is None else [optimizer]
        self.optimizers = [OptimizerStates(each, self._names, f"optimizer {i}", call) for i, each in enumerate(given)]
        self._made: list[FSDPParamGroup] = []
        self._new_params: dict[str, nn.Parameter] = {}  # Those of the new groups.

    @functools.cached_property
    def _plans(self) -> list[GroupPlan]:
        return [plan_on(group, self._new, self._weights) for group in self._groups]

    def lines(self) -> list[str]:
        """The move in lines that must be equal on all ranks, also on those without shards."""
        new = tuple(self._new.mesh.shape)
        lines = [f"from a mesh of {self._old_shape} over ranks {self.old_ranks}"]
        lines.append(f"to a mesh of {new} over ranks {_ranks_in(self._new.mesh)}")
        lines.append(f"weights {self._weights}")
        for group, plan in zip(self._groups, self._plans):
            lines.append(f"group of {group.names}, {group.param_dtype}: shards of {plan.layout.shard_numel}")
            lines += [f"{self._names[p.sharded]} {tuple(p.sharded.shape)} {p.sharded.dtype}" for p in group.params]
            lines.append(f"at {plan.layout.offsets}")
            # A rank that joins would divide by another number, and train its shards with other gradients; or send other bytes.
            lines.append(f"{group.settings.reduction}, requires_all_reduce={group.settings.requires_all_reduce}")
            view = group.settings.view
            lines.append(f"reduce_wire={group.process_groups.wire}, gradient_view={view and view.__name__}")  # type: ignore
        lines += [f"{state.name} requires_gradient_sync={state.requires_gradient_sync}" for state in self._states]
        lines += [f"optimizer {line}" for each in self.optimizers for line in each.lines]
        lines += [f"stateful {type(each).__name__}" for each in self.stateful]
        return lines + [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, *_, tensor in self.whole_tensors()]

    def whole_tensors(self) -> list[tuple[str, nn.Module, str, torch.Tensor]]:
        """All buffers, and parameters in no group: the full name, the module, the name in it, the tensor."""
        found = []
        for prefix, module in self._model.named_modules():
            for name, tensor in (*module._buffers.items(), *module._parameters.items()):
                if tensor is None or tensor in self._names:
                    continue
                fqn = f"{prefix}.{name}" if prefix else name
                if isinstance(tensor, DTensor):
                    raise ValueError(f"{fqn} is a DTensor that is in no group of fully_shard: reshard_to cannot move it")
                found.append((fqn, module, name, tensor))
        return found

    def send_whole_tensors(self, world: dist.ProcessGroup) -> None:
        """Give buffers, and parameters in no group, of the lowest rank to ranks that join. One broadcast for each."""
        root, rank, device = min(self.old_ranks), dist.get_rank(), device_of(self._new.mesh)
        joining, is_root = sorted(set(_ranks_in(self._new.mesh)) - set(self.old_ranks)), rank == root
        # Other ranks have these tensors, or need none. They do not wait for those that join: this group is made by its members
        # alone.
        if not joining or rank not in (root, *joining):
            return
        group = group_of(sorted([root, *joining]), parent=world)
        replaced: dict[torch.Tensor, torch.Tensor] = {}  # A tensor may have several names.
        for _, module, name, tensor in self.whole_tensors():
            # A tensor with several names is sent for each: ranks may differ in what is tied, and would otherwise wait for each
            # other in broadcasts of different tensors.
            # One broadcast after another, in the order of modules. Names, shapes and dtypes were compared before, so the ranks
            # have the same tensors in the same order.
            made = tensor.detach().contiguous() if is_root else torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            if tensor.numel():
                dist.broadcast(made.view(-1).view(torch.uint8), src=root, group=group)
            if not is_root and not tensor.is_meta:
                tensor.copy_(made)
            elif not is_root:
                if tensor not in replaced:
                    replaced[tensor] = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
                setattr(module, name, replaced[tensor])

    def description(self) -> Description:
        """What ranks without shards must know. Call it on a rank with shards."""
        return Description(
            {name: param.requires_grad for name, param in self._sharded.items()},
            {name: param.grad.dtype for name, param in self._sharded.items() if param.grad is not None},
            [kept_by(group) for group in self._groups],
            [each.told() for each in self.optimizers],
            [map_tensors(lambda tensor: tensor.detach().cpu(), each.state_dict()) for each in self.stateful],
        )

    def load_stateful(self, told: Description) -> None:
        """Let the ``stateful`` objects load what ``told`` has of them. Call it on ranks that join, or after a death."""
        for each, state in zip(self.stateful, told.stateful):
            each.load_state_dict(state)

    def make_groups(self, told: Description) -> None:
        """Make the new groups, which allocates their shards. They are not registered yet."""
        for old, plan in zip(self._groups, self._plans):
            new = make_group(plan)
            for before, after in zip(old.params, new.params):
                name = self._names[before.sharded]
                after.sharded.requires_grad_(told.requires_grad[name])
                self._new_params[name] = after.sharded
            copy_settings(old, new)
            self._made.append(new)

    def source(self, gradients: bool = True) -> dict[str, DTensor]:
        """All tensors of this rank, as they are. Call it on a rank of the old mesh."""
        moved: dict[str, Any] = {f"parameter.{name}": param.detach() for name, param in self._sharded.items()}
        if gradients:
            moved |= {f"gradient.{name}": param.grad for name, param in self._sharded.items() if param.grad is not None}
        for states in self.optimizers:
            moved |= states.source()
        return moved

    def target(self, told: Description) -> dict[str, DTensor]:
        """The same tensors in new memory, uninitialized. Call it on a rank of the new mesh, after :meth:`make_groups`."""
        moved: dict[str, Any] = {f"parameter.{name}": param.detach() for name, param in self._new_params.items()}
        for name, dtype in told.gradients.items():
            moved[f"gradient.{name}"] = torch.empty_like(self._new_params[name].detach(), dtype=dtype)
        for states, of_optimizer in zip(self.optimizers, told.optimizers):
            moved |= states.target(of_optimizer, self._new_params)
        return moved

    def finish(self, told: Description, moved: Mapping[str, torch.Tensor], world: dist.ProcessGroup, takes_told: bool) -> None:
        """Exchange groups, parameters and states. The old ones are freed when nothing refers to them.

        ``world`` has all ranks of the new mesh. If it ``takes_told``, a rank takes the options and single states of ``told``.
        """
        for name, param in self._new_params.items():
            param.grad = moved.get(f"gradient.{name}")
        for states, of_optimizer in zip(self.optimizers, told.optimizers):
            states.move_to(self._new_params, moved, of_optimizer, not takes_told, self._new.is_member)
        # Neighbours make process groups here, in the order of groups, on all ranks of the new mesh: as ``told`` says, and not
        # as this rank has it, which may have joined.
        for kept, new in zip(told.kept, self._made):
            keep_as(new, kept)
        made = iter(self._made)
        for state in self._states:
            state.replace_groups([next(made) for _ in state.groups])
            for group in state.groups:
                group.register()
        for name, param in self._sharded.items():  # Another optimizer may hold the old ones.
            path, _, key = name.rpartition(".")
            note_replaced(param, name, self._model.get_submodule(path), key, self._call, f", or pass it to {self._call}")
        for states in self.optimizers:
            # Last: its process group is made by the ranks of the new mesh, after everything of this rank is exchanged.
            compare_options(states.optimizer, self._new.mesh, world)


# -- one group ---------------------------------------------------------------------------------------------------------


def mesh_of_states(states: Sequence[FSDPState], call: str) -> DataParallelMesh:
    """The mesh of all groups, of which none was made with what stays on its mesh, such as an ``Offload``."""
    groups = [group for state in states for group in state.groups]
    first = groups[0].dp
    for group in groups:
        check_pairs([part_of_move(call), *group.plan.parts])
        if group.dp.mesh != first.mesh:
            raise ValueError(
                f"{group.names} is sharded over {group.dp.mesh}, {groups[0].names} over {first.mesh}: {call} takes parameters "
                "of one mesh"
            )
    return first


def part_of_move(call: str) -> FeaturePart:
    """What ``call`` brings, which moves groups to another mesh."""
    return PlainPart(Terms(call, {Need.MOVABLE: ": save a checkpoint, and load it on the other mesh"}))


def check_movable(group: FSDPParamGroup, call: str) -> None:
    """Raise if ``group`` has something now that would be lost."""
    if group.dp.is_member and group.is_meta:
        raise RuntimeError(f"{group.names} on the meta device: materialize parameters before {call}")
    if group.is_pending or group.is_unsynchronized:
        raise RuntimeError(
            f"{group.names} has gradients that are not reduced yet, and would be lost: run a backward that reduces them, or "
            f"drop them with reset_iter_state(), before {call}"
        )
    collectives: Any = group.collectives
    while isinstance(collectives, WrappedCollectives) and collectives.follows_model:
        collectives = collectives.inner
    if collectives is not group.process_groups:
        raise ValueError(
            f"{group.names} has collectives that belong to its mesh: close a monitor and call set_collectives('nccl') before "
            f"{call}, and choose them again after it"
        )
    if group.pools[0].is_required or group.encoding.keeps_storage:
        raise ValueError(
            f"{group.names} has persistent buffers, as a captured model needs them: call set_persistent_buffers(False), or "
            f"set_keep_unsharded_storage(False), before {call}, and capture again after it"
        )
    if group.process_groups.separate_groups:
        raise ValueError(
            f"{group.names} has a second process group: call set_separate_reduce_scatter_group(False) before {call}"
        )


def check_no_hooks(states: Sequence[FSDPState], call: str) -> None:
    """Raise if a sharded parameter has hooks. They would stay at the old object, and an optimizer in them would never step."""
    for param in [param for state in states for group in state.groups for param in group.params]:
        sharded: Any = param.sharded
        if sharded._backward_hooks or sharded._post_accumulate_grad_hooks:
            raise ValueError(
                f"{param.fqn} has hooks on its gradient, and is another object after {call}: remove them before it, and "
                "register them on the new parameters after it"
            )


def plan_on(group: FSDPParamGroup, dp: DataParallelMesh, weights: Sequence[int] | None = None) -> GroupPlan:
    """The plan of the same parameters on another mesh. The planner runs; no memory is allocated."""
    device = device_of(dp.mesh)
    found = []
    # Blocks depend on shapes and granularity, not on the mesh. So the old specs are those of the new layout.
    for param, spec in zip(group.params, group.layout.tensors):
        # Zeros without memory of their own, in the position of the parameter that the user gave to ``fully_shard``.
        zeros = torch.zeros((), dtype=param.sharded.dtype, device=device).expand(param.distribution.shape)
        like = nn.Parameter(zeros, requires_grad=param.sharded.requires_grad)
        keep_attributes(param.sharded, like)
        distribution = Distribution(param.fqn, like, dp, param.distribution.shard_dim)
        found.append(FoundParam(param.fqn, param.registered_names, like, distribution, spec))
    parts = [*_parts_of(group), *filter(None, [WeightsPart.of(weights), OutsideMesh.of(dp.mesh)])]
    layout = layout_of(Draft(found, group.layout.tensors, dp.ranks, group.layout.alignment), parts)
    return dataclasses.replace(group.plan, params=found, dp=dp, layout=layout, parts=tuple(parts))


def _parts_of(group: FSDPParamGroup) -> list[FeaturePart]:
    """What stays of the parts of ``group``: not those of its mesh, and what a policy has chosen is in the layout."""
    return [part for part in group.plan.parts if not isinstance(part, (WeightsPart, OutsideMesh, GroupPolicyPart))]


def copy_settings(old: FSDPParamGroup, new: FSDPParamGroup) -> None:
    """Give ``new`` what the user has set on ``old`` by methods of ``FSDPModule``."""
    new.join(old.fqn, new.comm)
    vars(new.settings).update(vars(old.settings))
    new.process_groups.wire = old.process_groups.wire
    new.process_groups.custom_all_gather = old.process_groups.custom_all_gather
    new.process_groups.custom_reduce_scatter = old.process_groups.custom_reduce_scatter


def kept_by(group: FSDPParamGroup) -> Kept:
    """What stays gathered after reshard."""
    if isinstance(group.keeper, Neighbours):
        return group.keeper.size
    return "all" if isinstance(group.keeper, Resident) else None


def check_kept(group: FSDPParamGroup, dp: DataParallelMesh, weights: Sequence[int] | None = None) -> None:
    """Raise if what stays gathered, or a placement, does not fit to the mesh ``dp``, or to ``weights``."""
    kept, own = kept_by(group), group.process_groups
    # The user may have set another ``reshard_after_forward`` since.
    parts = [part for part in _parts_of(group) if not isinstance(part, NeighboursPart) or isinstance(kept, int)]
    if own.custom_all_gather or own.custom_reduce_scatter:
        custom = Terms(f"the custom collective of {group.names}", {Need.EQUAL_SHARDS: ": leave weights out"})
        parts.append(PlainPart(custom))
    check_pairs([*parts, *filter(None, [WeightsPart.of(weights)])])
    if isinstance(kept, int) and dp.ranks % kept:
        raise ValueError(
            f"{group.names} has reshard_after_forward={kept}, which does not divide {dp.ranks} shards: call "
            "set_reshard_after_forward(True) before reshard_to"
        )
    if kept == "all" and dp.has_replicas:
        raise ValueError(f"{group.names} was sharded with ZERO1 or ZERO2, which take a 1-D mesh, got {dp.mesh}")


def keep_as(group: FSDPParamGroup, kept: Kept) -> None:
    """Let ``group`` keep ``kept`` gathered, unless this rank is not in its mesh. Neighbours make a process group."""
    part = NeighboursPart(kept) if isinstance(kept, int) else ZERO2 if kept == "all" else None
    if part is not None:
        group.keep(part.keeper(group.dp, group.encoding, group.memory.gathered))


def checked_states(model: nn.Module, call: str, runs: bool = False) -> list[FSDPState]:
    """The states of the modules of ``model``. No forward or backward runs, unless ``runs`` says that one may."""
    states = list(module_states(model).values())
    known, first = set(states), {state.context: state for state in reversed(states)}
    for context, state in first.items():  # Each is shared by all states under a root.
        if not known.issuperset(context.states):
            raise ValueError(
                f"{state.name} is part of a larger model that fully_shard was called on: pass the root, the outermost "
                f"fully_shard module, to {call}"
            )
    for state in states if not runs else ():
        context = state.context
        if state.calls or context.in_backward or context.awaits_finalize:
            raise RuntimeError(
                f"{state.name} is in a forward or backward: call {call} between steps, after finalize_backward() if it is "
                "called by hand, or after reset_iter_state() if forward or backward raised"
            )
    if not any(state.groups for state in states):
        raise ValueError(f"fully_shard has found no parameters in {type(model).__name__}: there is nothing to move")
    return states


def _ranks_in(mesh: DeviceMesh) -> list[int]:
    return mesh.mesh.flatten().tolist()
