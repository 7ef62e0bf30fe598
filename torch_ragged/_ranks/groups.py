"""Process groups: those of a mesh, and those of any ranks, created by their members only: other ranks need not take part."""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import inspect
import math
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

__all__ = [
    "backend_of",
    "can_order_groups",
    "device_of",
    "device_of_messages",
    "end_messages",
    "group_name",
    "group_of",
    "groups_of",
    "is_gloo",
    "is_nccl",
    "ranks_ascend",
    "timeout_of",
]

group_name: contextvars.ContextVar[str | None] = contextvars.ContextVar("group_name", default=None)
"""The name of the process group that :func:`group_of` creates. A hook on torch passes it on, because torch would derive a name
from the number of existing groups, and members may have different numbers of groups."""

can_order_groups = "sort_ranks" in inspect.signature(dist.new_group).parameters
"""Whether a process group may have its ranks in another order than the ascending one."""

_UNUSED_TAG = 1 << 20

# Weak keys: when the default group is destroyed, all its groups are dropped too.
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[object, ...], dist.ProcessGroup]] = weakref.WeakKeyDictionary()

_is_gloo: weakref.WeakKeyDictionary[dist.ProcessGroup, bool] = weakref.WeakKeyDictionary()
_is_nccl: weakref.WeakKeyDictionary[dist.ProcessGroup, bool] = weakref.WeakKeyDictionary()
"""Both are asked several times per collective, and slow to find out."""


_ascending: weakref.WeakKeyDictionary[DeviceMesh, dict[tuple[int, ...], bool]] = weakref.WeakKeyDictionary()


def device_of(mesh: DeviceMesh) -> torch.device:
    """This rank's device in ``mesh``."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def groups_of(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """The process groups of the mesh's dimensions. None if this rank is not in the mesh: it agrees with no other rank."""
    return [] if mesh.get_coordinate() is None else mesh.get_all_groups()


def ranks_ascend(mesh: DeviceMesh, mesh_dims: tuple[int, ...]) -> bool:
    """Whether the ranks along ``mesh_dims`` are in ascending order everywhere in ``mesh``, as those of torch's groups are."""
    known = _ascending.setdefault(mesh, {})
    if mesh_dims not in known:
        order = (*(dim for dim in range(mesh.ndim) if dim not in mesh_dims), *mesh_dims)
        with _disable_current_modes():  # torch.compile traces on fake tensors, and the ranks are no part of the graph.
            lines = mesh.mesh.permute(order).reshape(-1, math.prod(mesh.size(dim) for dim in mesh_dims))
            known[mesh_dims] = bool((lines.diff() > 0).all())
    return known[mesh_dims]


def group_of(ranks: Sequence[int], purpose: str = "", parent: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """The process group of ``ranks`` for one ``purpose``. The first call creates it; it lives as long as the default group.

    All members must call this function, for several groups in the same order. If ``ranks`` are all ranks of ``parent`` and
    ``purpose`` is empty, ``parent`` is returned.

    Args:
        ranks: global ranks; their order is that of the group. Torch 2.11 has groups of ascending ranks only.
        purpose: groups of equal ranks and different purposes are different groups, with separate communicators.
        parent: a group of these ranks, and perhaps of more; None: the default group. The new group has its backend and its
            present timeout. Groups of different parents are different groups.
    """
    world = dist.group.WORLD
    assert world is not None
    parent = parent or world
    # The parent and not its timeout: members have the same parent, but each may have set a timeout of its own.
    key = (*ranks, purpose, "" if parent is world else parent.group_name)
    known = _made.setdefault(world, {})
    if key not in known:
        is_parent = not purpose and list(ranks) == dist.get_process_group_ranks(parent)
        known[key] = parent if is_parent else _make_group(world, parent, ranks, repr(key))
    group, device = known[key], device_of_messages(parent)
    timeout = timeout_of(parent, device)
    if timeout_of(group, device) != timeout:  # It has changed since the group was made.
        group.set_timeout(timeout)
    return group


def device_of_messages(group: dist.ProcessGroup) -> torch.device:
    """The device of messages between ranks: the accelerator, unless the group's backend is gloo."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None or dist.get_backend(group) == dist.Backend.GLOO:
        return torch.device("cpu")
    return torch.device(device.type, torch.accelerator.current_device_index())


def is_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether gloo carries the collectives of ``group`` for tensors on ``device``."""
    if device.type != "cpu":
        return False
    found = _is_gloo.get(group)
    if found is None:
        gloo = getattr(dist, "ProcessGroupGloo", None)  # Builds of torch without gloo do not have this name.
        found = _is_gloo[group] = gloo is not None and isinstance(backend_of(group, device), gloo)
    return found


def is_nccl(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether NCCL carries the collectives of ``group`` for tensors on ``device``.

    The name of the group's backend does not tell: a group of ``init_process_group()`` has gloo for the CPU beside it.
    """
    if device.type == "cpu":
        return False
    found = _is_nccl.get(group)
    if found is None:
        name = getattr(backend_of(group, device), "name", None)
        found = _is_nccl[group] = callable(name) and name() == dist.Backend.NCCL
    return found


def end_messages(group: dist.ProcessGroup, device: torch.device) -> None:
    """End all that is in flight on ``group`` here, with an error: nothing will match it. The group is not usable any more.

    Otherwise its buffers stay in use, and ``destroy_process_group`` waits for it until the group's timeout.
    """
    if device.type != "cpu":
        group.abort()
        return
    # gloo's abort() closes nothing, but a receive that waits in vain closes all connections of the group. From each peer: one
    # from a dead peer fails at once, and closes none.
    for peer in [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]:
        with contextlib.suppress(RuntimeError):
            work = dist.irecv(torch.empty(1, device="cpu"), peer, group=group, tag=_UNUSED_TAG)
            assert work is not None
            work.wait(timedelta(milliseconds=1))


def _make_group(world: dist.ProcessGroup, parent: dist.ProcessGroup, ranks: Sequence[int], key: str) -> dist.ProcessGroup:
    name = group_name.set("ragged_" + hashlib.sha256(key.encode()).hexdigest()[:16])
    # If the default group is bound to a device, new_group would split its communicator: a collective of all ranks.
    device, world.bound_device_id = world.bound_device_id, None
    try:
        how: dict[str, Any] = {} if list(ranks) == sorted(ranks) else {"sort_ranks": False}
        timeout = timeout_of(parent, device_of_messages(parent))
        return dist.new_group(list(ranks), timeout, dist.get_backend(parent), use_local_synchronization=True, **how)
    finally:
        world.bound_device_id = device
        group_name.reset(name)


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The backend that carries the collectives of ``group`` for tensors on ``device``. (2.11 to 2.15)

    If a group has no backends per device, as in torch's multi-threaded tests, the result is the group itself.
    """
    try:
        return group._get_backend(device)
    except RuntimeError:
        return group


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long collectives of ``group`` on ``device`` wait for other ranks; for backends without options, torch's default.

    (2.11 to 2.15)
    """
    options = getattr(backend_of(group, device), "options", None)
    return default_pg_timeout if options is None else options._timeout
