"""Process groups of any ranks, made by their members alone."""

from __future__ import annotations

import contextvars
import hashlib
import weakref
from collections.abc import Sequence

import torch.distributed as dist

__all__ = ["group_name", "group_of"]

group_name: contextvars.ContextVar[str | None] = contextvars.ContextVar("group_name", default=None)
"""The name of the process group that is being made: its members must agree on it, whatever other groups each of them has."""

# Weak, so that groups are forgotten when the world's is destroyed, and theirs with it.
_known: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[object, ...], dist.ProcessGroup]] = weakref.WeakKeyDictionary()


def group_of(ranks: Sequence[int], purpose: str = "") -> dist.ProcessGroup:
    """The group of ``ranks``, in ascending order, for one ``purpose``; all members call it, in the same order of groups.

    It is made when first asked for, and kept as long as the world's is; of all ranks and for no purpose, it is the world's.
    """
    world = dist.group.WORLD
    assert world is not None
    known = _known.setdefault(world, {})
    key = (*ranks, purpose)
    if key not in known:
        is_world = len(ranks) == world.size() and not purpose
        known[key] = world if is_world else _make_group(world, ranks, f"{tuple(ranks)}{purpose}")
    return known[key]


def _make_group(world: dist.ProcessGroup, ranks: Sequence[int], key: str) -> dist.ProcessGroup:
    name = group_name.set("ragged_" + hashlib.sha1(key.encode(), usedforsecurity=False).hexdigest())
    # A world that is bound to a device would split its communicator, which all of its ranks must take part in.
    device, world.bound_device_id = world.bound_device_id, None
    try:
        return dist.new_group(list(ranks), use_local_synchronization=True)
    finally:
        world.bound_device_id = device
        group_name.reset(name)
