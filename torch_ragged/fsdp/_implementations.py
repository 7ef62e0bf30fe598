"""The implementations of a group's collectives by name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from torch_ragged.fsdp._agreement import problems_of_ranks
from torch_ragged.fsdp._capabilities import problems_of
from torch_ragged.fsdp._copy_engine import CopyEngineCollectives
from torch_ragged.fsdp._multicast import MulticastCollectives, SymmetricSlabs
from torch_ragged.fsdp._param_group import ParamGroup
from torch_ragged.fsdp._peer_memory import HostPeerMemory, PeerMemory, SymmetricPeerMemory
from torch_ragged.fsdp._resident import HierarchicalCollectives

__all__ = ["IMPLEMENTATIONS", "Implementation", "check_name", "choose"]

_logger = logging.getLogger("torch_ragged.fsdp")

IMPLEMENTATIONS = ("nccl", "symm", "copy_engine", "multimem", "auto")

_TRIED = {"nccl": (), "symm": ("symm",), "copy_engine": ("copy_engine",), "multimem": ("multimem", "symm")}
"""By name, what is tried in turn; behind it stands the process group."""

_AUTO = {"cuda": ("symm",), "cpu": ("copy_engine",)}

_LARGEST_SLOT = {"cuda": 64 << 20, "cpu": 16 << 20}
"""Bytes; what is larger goes in pieces. A rank has two slots for gathers and two for reductions, for all groups of a model."""


@dataclass(frozen=True)
class Implementation:
    """What the ranks of a process group have agreed on.

    Attributes:
        name: of it.
        install: gives a parameter group its collectives.
        allocate: what the group's gathered parameters and gradients must be made by, at addresses that stay; None for any.
    """

    name: str
    install: Callable[[ParamGroup], None]
    allocate: Callable[[int, torch.dtype], torch.Tensor] | None = None


def check_name(name: Any) -> None:
    """Raise if there is no implementation of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"collectives must be one of {', '.join(map(repr, IMPLEMENTATIONS))}, got {name!r}")


def choose(name: str, group: dist.ProcessGroup, members: Sequence[ParamGroup]) -> Implementation:
    """What the parameter groups ``members``, with shards over ``group``, are to use; the same on all ranks, who all call this.

    Where ``name`` cannot be had, one line on the group's first rank says why, and the next best is taken.
    """
    device = members[0].device
    tried = _AUTO.get(device.type, ()) if name == "auto" else _TRIED[name]
    problems = problems_of(group, device) if tried else {}
    tell = _logger.info if name == "auto" else _logger.warning
    for candidate in tried:
        made, problem = None, problems.get(candidate) or _problem_of_members(members)
        if not problem:
            made, problem = _made_everywhere(candidate, group, members)
        if made is not None:
            return made
        if group.rank() == 0:
            tell("set_collectives(%r): no %s for process group %s: %s", name, candidate, group.group_name, problem)
    if name == "nccl" and dist.get_backend(group) != dist.Backend.NCCL and group.rank() == 0:
        tell("set_collectives('nccl'): process group %s has the backend %s", group.group_name, dist.get_backend(group))
    return Implementation("nccl", _use_process_groups)


def _use_process_groups(member: ParamGroup) -> None:
    member.collectives = member.process_groups


def _problem_of_members(members: Sequence[ParamGroup]) -> str:
    if any(isinstance(member.process_groups, HierarchicalCollectives) for member in members):
        return "HIERARCHICAL has its own, within and across nodes"
    return ""


def _made_everywhere(name: str, group: dist.ProcessGroup, members: Sequence[ParamGroup]) -> tuple[Implementation | None, str]:
    """The implementation, or why ranks could not make it."""
    made, problem = None, ""
    try:
        made = _MAKERS[name](group, members)
    except Exception as error:  # Whatever it is, the others wait to hear of it.
        problem = str(error) or type(error).__name__
    problem = problems_of_ranks(problem, group)
    return (None if problem else made), problem


# -- makers --------------------------------------------------------------------------------------------------------------


def _make_copy_engine(group: dist.ProcessGroup, members: Sequence[ParamGroup]) -> Implementation:
    device = members[0].device
    gathered = max(member.layout.shard_numel * member.param_dtype.itemsize for member in members)
    reduced = max(member.layout.numel * member.reduce_dtype.itemsize for member in members)
    slots = [min(-(-nbytes // 4096) * 4096, _LARGEST_SLOT[device.type]) for nbytes in (gathered, reduced)]
    memories: list[PeerMemory] = [
        SymmetricPeerMemory(group, device, nbytes, priority) if device.type == "cuda" else HostPeerMemory(group, nbytes)
        for nbytes, priority in zip(slots, (-1, 0))  # Forward waits for gathers, nothing for reductions.
    ]

    def install(member: ParamGroup) -> None:
        member.collectives = CopyEngineCollectives(member.process_groups, group, *memories)

    return Implementation("copy_engine", install)


def _make_symm(group: dist.ProcessGroup, members: Sequence[ParamGroup]) -> Implementation:
    device = members[0].device
    pool = members[0].process_groups.memory_pool(device, is_symmetric=True)
    if pool is None:
        raise RuntimeError(f"the backend {dist.get_backend(group)} has no allocator of its own")

    def allocate(numel: int, dtype: torch.dtype) -> torch.Tensor:
        with torch.cuda.use_mem_pool(pool):
            return torch.empty(numel, dtype=dtype, device=device)

    allocate(1 << 20, torch.uint8)  # Registers a window: what cannot be had is found out here.
    return Implementation("symm", _use_process_groups, allocate)


def _make_multimem(group: dist.ProcessGroup, members: Sequence[ParamGroup]) -> Implementation:
    slabs = SymmetricSlabs(group, members[0].device)
    if not slabs.handle(slabs.allocate(1 << 20, torch.uint8)).multicast_ptr:
        raise RuntimeError("torch could not set up multicast")

    def install(member: ParamGroup) -> None:
        member.collectives = MulticastCollectives(member.process_groups, group, slabs)

    return Implementation("multimem", install, slabs.allocate)


_MAKERS = {"symm": _make_symm, "copy_engine": _make_copy_engine, "multimem": _make_multimem}
