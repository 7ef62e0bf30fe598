"""Process groups of meshes: ranks agree that they have the same ones, before a collective needs it."""

from __future__ import annotations

import os
import weakref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torch_ragged._ranks.agreement import agree_on_group
from torch_ragged._ranks.groups import timeout_of
from torch_ragged._register._torch import forget_shardings

__all__ = ["agree_on_groups", "device_of", "forget_equal_meshes", "groups_of", "is_debug"]

_agreed: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
"""The process groups that ranks have compared."""

_groups_of_meshes: dict[int, list[weakref.ref[dist.ProcessGroup]]] = {}
"""By the hash of a mesh, which equal meshes have in common, the process groups of the last of them."""


def is_debug() -> bool:
    """Whether ranks compare each collective: ``TORCH_RAGGED_DEBUG=1``. It must be equal on all ranks."""
    return os.environ.get("TORCH_RAGGED_DEBUG", "0") not in ("", "0")


def forget_equal_meshes(mesh: DeviceMesh) -> None:
    """Drop what DTensor remembers of a mesh that is equal to ``mesh`` and has other process groups. No communication.

    Each call of ``init_device_mesh`` makes groups, and equal meshes are one key of DTensor's cache of ops. So a parameter on
    the second mesh would be on the first one, but only on ranks that remember the op: ranks would then wait for each other in
    collectives of different groups.
    """
    groups = [] if mesh.get_coordinate() is None else [weakref.ref(group) for group in mesh.get_all_groups()]
    if _groups_of_meshes.setdefault(hash(mesh), groups) != groups:
        _groups_of_meshes[hash(mesh)] = groups
        forget_shardings()


def device_of(mesh: DeviceMesh) -> torch.device:
    """This rank's device in ``mesh``."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def groups_of(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """The process groups of the mesh's dimensions. None if this rank is not in the mesh: it agrees with no other rank."""
    return [] if mesh.get_coordinate() is None else [mesh.get_group(dim) for dim in range(mesh.ndim)]


def agree_on_groups(mesh: DeviceMesh, call: str = "fully_shard") -> None:
    """Raise on all ranks if they pass meshes with different process groups. No collective.

    Ranks compare a group once, or with ``TORCH_RAGGED_DEBUG=1`` in each call.

    Raises:
        ValueError: they do.
        PeerError: a rank died, or did not make this call within the timeout.
    """
    for dim, group in enumerate(groups_of(mesh)):
        if group.size() == 1 or dist.get_backend(group) == "fake" or (group in _agreed and not is_debug()):
            continue
        where = f"a mesh of shape {tuple(mesh.shape)} with ranks {mesh.mesh.tolist()}, dimension {dim}"
        claim = f"process group {group.group_name} of {where}{', TORCH_RAGGED_DEBUG=1' if is_debug() else ''}"
        agree_on_group(group, claim, call, timeout_of(group, device_of(mesh)).total_seconds())
        _agreed.add(group)
