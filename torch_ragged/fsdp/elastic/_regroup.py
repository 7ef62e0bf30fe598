"""The steps of ``reshard_to`` for one group: check it, plan it on another mesh, and give the new group what the old one had.

It moves no elements, and issues no collective but those that make process groups of neighbours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Union

import torch
from torch import nn

from torch_ragged.fsdp.comm._hierarchical import Levels
from torch_ragged.fsdp.core._fsdp_api import Offload
from torch_ragged.fsdp.core._fsdp_init import layout_of
from torch_ragged.fsdp.core._fsdp_param import Distribution, FoundParam, FSDPParam, GroupPlan, keep_grad_dtype
from torch_ragged.fsdp.core._fsdp_param_group import FSDPParamGroup
from torch_ragged.fsdp.core._mesh import DataParallelMesh, device_of
from torch_ragged.fsdp.core.encodings._spmd_types import attributes_of
from torch_ragged.fsdp.core.keepers._neighbours import Neighbours
from torch_ragged.fsdp.memory._resident import Resident

__all__ = [
    "Kept",
    "check_kept",
    "check_movable",
    "check_supported",
    "copy_settings",
    "keep_as",
    "kept_by",
    "mesh_of_groups",
    "plan_on",
]

Kept = Union[int, str, None]
"""What stays gathered between uses: k of ``reshard_after_forward=k``, "all" (ZERO1, ZERO2), or None."""


def mesh_of_groups(groups: Sequence[FSDPParamGroup], call: str) -> DataParallelMesh:
    """The mesh of all ``groups``. ``call`` is the name of what the user calls, for errors.

    Raises:
        ValueError: they have several meshes, or tensor parallelism, or ``dp_mesh_dims``.
    """
    first = groups[0].dp
    for group in groups:
        if group.dp.spmd is not None:
            raise ValueError(
                f"{group.names} was sharded by parallelize, or with dp_mesh_dims, which {call} does not support: save a "
                "checkpoint, and load it on the new ranks"
            )
        for param in group.params:
            if param.distribution.is_dtensor:
                raise ValueError(
                    f"{param.fqn} was a DTensor before fully_shard (tensor or expert parallelism): {call} supports data "
                    "parallelism only"
                )
        if group.dp.mesh != first.mesh:
            raise ValueError(
                f"{group.names} is sharded over {group.dp.mesh}, {groups[0].names} over {first.mesh}: {call} takes parameters "
                "of one mesh"
            )
    return first


def check_supported(group: FSDPParamGroup, call: str) -> None:
    """Raise if ``group`` has an ``Offload``, HIERARCHICAL, or a tensor type with its own all-gather: it stays so.

    Raises:
        ValueError: it has one. The text names ``call``, which the user calls.
    """
    if isinstance(group.plan.offload, Offload):
        raise ValueError(
            f"{group.names} was sharded with {group.plan.offload}, which {call} does not support: save a checkpoint, and load "
            "it on the other mesh"
        )
    if group.shards.are_typed:
        raise ValueError(f"{group.names} is of a type with its own all-gather, which {call} does not support")
    if group.dp.levels is not None:
        raise ValueError(f"{group.names} was sharded with HIERARCHICAL, which {call} does not support")


def check_movable(group: FSDPParamGroup, call: str) -> None:
    """Raise if ``group`` has something now that would be lost, or that :func:`check_supported` refuses.

    Raises:
        ValueError: it has collectives or memory that belong to its mesh.
        RuntimeError: it is on the meta device, or has gradients that are not in ``.grad`` yet.
    """
    check_supported(group, call)
    if group.dp.is_member and group.is_meta:
        raise RuntimeError(f"{group.names} on the meta device: materialize parameters before {call}")
    if group.is_pending or group.is_unsynchronized:
        raise RuntimeError(
            f"{group.names} has gradients that are not reduced yet, and would be lost: run a backward that reduces them, or "
            f"drop them with reset_iter_state(), before {call}"
        )
    process_groups = group.process_groups
    if group.collectives is not process_groups:
        raise ValueError(
            f"{group.names} has collectives that belong to its mesh: close a monitor and call set_collectives('nccl') before "
            f"{call}, and choose them again after it"
        )
    if group.pools[0].is_required or group.encoding.keeps_storage:
        raise ValueError(
            f"{group.names} has persistent buffers, as a captured model needs them: call set_persistent_buffers(False), or "
            f"set_keep_unsharded_storage(False), before {call}, and capture again after it"
        )
    if process_groups.separate_groups:
        raise ValueError(
            f"{group.names} has a second process group: call set_separate_reduce_scatter_group(False) before {call}"
        )


def plan_on(group: FSDPParamGroup, dp: DataParallelMesh, weights: Sequence[int] | None = None) -> GroupPlan:
    """The plan of the same parameters on another mesh. The planner runs; no memory is allocated.

    Raises:
        ValueError: as the planner.
    """
    device = device_of(dp.mesh)
    found = []
    for param in group.params:
        like = _stand_in(param, device)
        distribution = Distribution(param.fqn, like, dp, param.distribution.shard_dim)
        found.append(FoundParam(param.fqn, param.registered_names, like, distribution))
    # Blocks depend on shapes and granularity, not on the mesh. So the old specs are those of the new layout.
    layout = layout_of(found[0].distribution, group.layout.tensors, dp.ranks, group.layout.alignment, weights)
    return dataclasses.replace(group.plan, params=found, dp=dp, layout=layout)


def _stand_in(param: FSDPParam, device: torch.device) -> nn.Parameter:
    """A parameter of zeros without memory of its own, in the position of the one that the user gave to ``fully_shard``."""
    zero = torch.zeros((), dtype=param.sharded.dtype, device=device)
    like = nn.Parameter(zero.expand(param.distribution.shape), requires_grad=param.sharded.requires_grad)
    keep_grad_dtype(param.sharded, like)
    vars(like).update(attributes_of(param.sharded))
    return like


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
    """Raise if what stays gathered, or a placement, does not fit to the mesh ``dp``, or to ``weights``.

    Raises:
        ValueError: a parameter placed as ``Shard``, float8 or neighbours meet ``weights``; the number of neighbours does not
            divide the number of shards, or ``ZERO1`` and ``ZERO2`` meet HSDP.
    """
    kept = kept_by(group)
    if weights is not None:
        reasons = {
            "is placed as Shard": group.params[0].distribution.shard_dim is not None,
            "is all-gathered as float8": group.plan.tile is not None,
            f"has reshard_after_forward={kept}": isinstance(kept, int),
            "has a custom collective": bool(
                group.process_groups.custom_all_gather or group.process_groups.custom_reduce_scatter
            ),
        }
        why = next((reason for reason, is_so in reasons.items() if is_so), None)
        if why is not None:
            raise ValueError(f"{group.names} {why}, which weights={tuple(weights)} do not support: leave weights out")
    if isinstance(kept, int) and dp.ranks % kept:
        raise ValueError(
            f"{group.names} has reshard_after_forward={kept}, which does not divide {dp.ranks} shards: call "
            "set_reshard_after_forward(True) before reshard_to"
        )
    if kept == "all" and dp.has_replicas:
        raise ValueError(f"{group.names} was sharded with ZERO1 or ZERO2, which take a 1-D mesh, got {dp.mesh}")


def keep_as(group: FSDPParamGroup, kept: Kept) -> None:
    """Let ``group`` keep ``kept`` gathered, unless this rank is not in its mesh. Neighbours make a process group."""
    shards = group.dp.shard_group
    if shards is None:
        return
    if isinstance(kept, int) and 1 < kept < group.dp.ranks:
        group.keep(Neighbours.among(shards, group.rank, kept, group.memory.gathered))
    elif kept == "all":
        group.keep(Resident(Levels(shards, None), group.memory.gathered))
