"""The choice among implementations of the collectives, by name; the same on all ranks.

Nothing here touches a parameter group: its owner installs what was chosen.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from torch_ragged.fsdp.comm._agreement import problems_of_ranks
from torch_ragged.fsdp.comm._capabilities import problems_of
from torch_ragged.fsdp.comm._collectives import Collectives, ProcessGroupCollectives
from torch_ragged.fsdp.comm._copy_engine import CopyEngineCollectives
from torch_ragged.fsdp.comm._hierarchical import HierarchicalCollectives
from torch_ragged.fsdp.comm._multicast import MulticastCollectives, SymmetricSlabs
from torch_ragged.fsdp.comm._peer_memory import HostPeerMemory, PeerMemory, SymmetricPeerMemory

__all__ = ["IMPLEMENTATIONS", "Implementation", "Traffic", "check_name", "choose"]

_logger = logging.getLogger("torch_ragged.fsdp")

IMPLEMENTATIONS = ("nccl", "symm", "copy_engine", "multimem", "auto")

_TRIED = {"nccl": (), "symm": ("symm",), "copy_engine": ("copy_engine",), "multimem": ("multimem", "symm")}
"""By name, what is tried in this order; the last resort is the process group."""

_AUTO = {"cuda": ("symm",), "cpu": ("copy_engine",)}

_LARGEST_SLOT = {"cuda": 64 << 20, "cpu": 16 << 20}
"""Bytes. Larger transfers go in pieces. A rank has two slots for all-gathers, two for reductions: for all groups of a model."""


@dataclass(frozen=True)
class Traffic:
    """What the parameter groups with shards over one process group will send.

    Attributes:
        device: of their buffers.
        process_groups: the collectives of each parameter group.
        gathered_nbytes: of the largest shard that is all-gathered.
        reduced_nbytes: of the largest buffer that is reduce-scattered.
    """

    device: torch.device
    process_groups: Sequence[ProcessGroupCollectives]
    gathered_nbytes: int
    reduced_nbytes: int


@dataclass(frozen=True)
class Implementation:
    """What the ranks of a process group have agreed on.

    Attributes:
        name: of it.
        collectives: makes a parameter group's collectives from those of its process groups.
        allocate: allocates the group's gathered parameters and gradients, at fixed addresses; None if any memory will do.
    """

    name: str
    collectives: Callable[[ProcessGroupCollectives], Collectives]
    allocate: Callable[[int, torch.dtype], torch.Tensor] | None = None


def check_name(name: Any) -> None:
    """Raise if there is no implementation of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"collectives must be one of {', '.join(map(repr, IMPLEMENTATIONS))}, got {name!r}")


def choose(name: str, group: dist.ProcessGroup, traffic: Traffic) -> Implementation:
    """What the parameter groups with shards over ``group`` will use; all ranks call this and get the same.

    If ``name`` is unavailable, one log line on the group's first rank says why, and the next best is used.
    """
    device = traffic.device
    tried = _AUTO.get(device.type, ()) if name == "auto" else _TRIED[name]
    problems = problems_of(group, device) if tried else {}
    tell = _logger.info if name == "auto" else _logger.warning
    for candidate in tried:
        made, problem = None, problems.get(candidate) or _problem_of(traffic)
        if not problem:
            made, problem = _made_everywhere(candidate, group, traffic)
        if made is not None:
            return made
        if group.rank() == 0:
            tell("set_collectives(%r): no %s for process group %s: %s", name, candidate, group.group_name, problem)
    if name == "nccl" and dist.get_backend(group) != dist.Backend.NCCL and group.rank() == 0:
        tell("set_collectives('nccl'): process group %s has the backend %s", group.group_name, dist.get_backend(group))
    return Implementation("nccl", _process_groups)


def _process_groups(process_groups: ProcessGroupCollectives) -> Collectives:
    return process_groups


def _problem_of(traffic: Traffic) -> str:
    if any(isinstance(each, HierarchicalCollectives) for each in traffic.process_groups):
        return "HIERARCHICAL has its own, within and across nodes"
    return ""


def _made_everywhere(name: str, group: dist.ProcessGroup, traffic: Traffic) -> tuple[Implementation | None, str]:
    """The implementation, or why ranks could not make it."""
    made, problem = None, ""
    try:
        made = _MAKERS[name](group, traffic)
    except Exception as error:  # Any error: the other ranks wait for this one's answer.
        problem = str(error) or type(error).__name__
    problem = problems_of_ranks(problem, group)
    return (None if problem else made), problem


# -- makers --------------------------------------------------------------------------------------------------------------


def _make_copy_engine(group: dist.ProcessGroup, traffic: Traffic) -> Implementation:
    device, nbytes = traffic.device, (traffic.gathered_nbytes, traffic.reduced_nbytes)
    slots = [min(-(-each // 4096) * 4096, _LARGEST_SLOT[device.type]) for each in nbytes]
    memories: list[PeerMemory] = [
        SymmetricPeerMemory(group, device, slot, priority) if device.type == "cuda" else HostPeerMemory(group, slot)
        for slot, priority in zip(slots, (-1, 0))  # Forward waits for all-gathers, nothing waits for reductions.
    ]
    return Implementation("copy_engine", lambda process_groups: CopyEngineCollectives(process_groups, group, *memories))


def _make_symm(group: dist.ProcessGroup, traffic: Traffic) -> Implementation:
    pool = traffic.process_groups[0].memory_pool(traffic.device, is_symmetric=True)
    if pool is None:
        raise RuntimeError(f"the backend {dist.get_backend(group)} has no allocator of its own")

    def allocate(numel: int, dtype: torch.dtype) -> torch.Tensor:
        with torch.cuda.use_mem_pool(pool):
            return torch.empty(numel, dtype=dtype, device=traffic.device)

    allocate(1 << 20, torch.uint8)  # Registers a window, so that a backend that cannot raises here.
    return Implementation("symm", _process_groups, allocate)


def _make_multimem(group: dist.ProcessGroup, traffic: Traffic) -> Implementation:
    slabs = SymmetricSlabs(group, traffic.device)
    if not slabs.handle(slabs.allocate(1 << 20, torch.uint8)).multicast_ptr:
        raise RuntimeError("torch could not set up multicast")
    return Implementation("multimem", lambda process_groups: MulticastCollectives(process_groups, group, slabs), slabs.allocate)


_MAKERS = {"symm": _make_symm, "copy_engine": _make_copy_engine, "multimem": _make_multimem}
