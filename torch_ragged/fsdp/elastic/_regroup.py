"""The steps of ``reshard_to`` for one group: check it, plan it on another mesh, and give the new group what the old one had.

It moves no elements, and issues no collective but those that make process groups of neighbours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Union

import torch
from torch import nn

from torch_ragged.fsdp.core._fsdp_init import GroupPolicyPart, layout_of
from torch_ragged.fsdp.core._fsdp_param import Distribution, FoundParam, keep_grad_dtype
from torch_ragged.fsdp.core._fsdp_param_group import FSDPParamGroup
from torch_ragged.fsdp.core._kit import Draft, FeaturePart, GroupPlan, Need, PlainPart, Terms, check_pairs
from torch_ragged.fsdp.core._mesh import DataParallelMesh, device_of
from torch_ragged.fsdp.core.encodings._spmd_types import attributes_of
from torch_ragged.fsdp.core.keepers._neighbours import Neighbours, NeighboursPart
from torch_ragged.fsdp.elastic._dormant_group import OutsideMesh
from torch_ragged.fsdp.elastic._weights import WeightsPart
from torch_ragged.fsdp.memory._resident import ZERO2, Resident

__all__ = [
    "Kept",
    "check_kept",
    "check_movable",
    "copy_settings",
    "keep_as",
    "kept_by",
    "mesh_of_groups",
    "part_of_move",
    "plan_on",
]

Kept = Union[int, str, None]
"""What stays gathered between uses: k of ``reshard_after_forward=k``, "all" (ZERO1, ZERO2), or None."""


def mesh_of_groups(groups: Sequence[FSDPParamGroup], call: str) -> DataParallelMesh:
    """The mesh of all ``groups``, of which none was made with what stays on its mesh, such as an ``Offload``."""
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
    if group.collectives is not group.process_groups:
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


def plan_on(group: FSDPParamGroup, dp: DataParallelMesh, weights: Sequence[int] | None = None) -> GroupPlan:
    """The plan of the same parameters on another mesh. The planner runs; no memory is allocated."""
    device = device_of(dp.mesh)
    found = []
    for param in group.params:
        # Zeros without memory of their own, in the position of the parameter that the user gave to ``fully_shard``.
        zeros = torch.zeros((), dtype=param.sharded.dtype, device=device).expand(param.distribution.shape)
        like = nn.Parameter(zeros, requires_grad=param.sharded.requires_grad)
        keep_grad_dtype(param.sharded, like)
        vars(like).update(attributes_of(param.sharded))
        distribution = Distribution(param.fqn, like, dp, param.distribution.shard_dim)
        found.append(FoundParam(param.fqn, param.registered_names, like, distribution))
    parts = [*_parts_of(group), *filter(None, [WeightsPart.of(weights), OutsideMesh.of(dp.mesh)])]
    # Blocks depend on shapes and granularity, not on the mesh. So the old specs are those of the new layout.
    layout = layout_of(Draft(found, group.layout.tensors, dp.ranks, group.layout.alignment), parts)
    return dataclasses.replace(group.plan, params=found, dp=dp, layout=layout, parts=tuple(parts))


def _parts_of(group: FSDPParamGroup) -> list[FeaturePart]:
    """What stays of the parts of ``group``: not those of its mesh, and what a policy has chosen is in the layout."""
    return [part for part in group.plan.parts if not isinstance(part, (WeightsPart, OutsideMesh, GroupPolicyPart))]


def copy_settings(old: FSDPParamGroup, new: FSDPParamGroup) -> None:
    """Give ``new`` what the user has set on ``old`` by methods of ``FSDPModule``."""
    new.join(old.fqn, new.comm)
    vars(new.settings).update(vars(old.settings))
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
