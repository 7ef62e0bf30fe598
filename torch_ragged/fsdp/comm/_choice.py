"""The choice of an implementation of the collectives by its name; the same on all ranks.

Nothing here changes a parameter group: ``set_collectives`` installs the implementation that was chosen.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from torch_ragged._ranks.agreement import problems_of_ranks
from torch_ragged._ranks.groups import is_nccl
from torch_ragged.fsdp.comm._capabilities import problems_of
from torch_ragged.fsdp.comm._collectives import Collectives, ProcessGroupCollectives
from torch_ragged.fsdp.comm.experimental._copy_engine import CopyEngineCollectives
from torch_ragged.fsdp.comm.experimental._multicast import MulticastCollectives, SymmetricSlabs
from torch_ragged.fsdp.comm.experimental._peer_memory import HostPeerMemory, PeerMemory, SymmetricPeerMemory

__all__ = ["IMPLEMENTATIONS", "Implementation", "Traffic", "check_name", "choose"]

_logger = logging.getLogger("torch_ragged.fsdp")

IMPLEMENTATIONS = ("nccl", "symm", "copy_engine", "multimem", "auto")

_AUTO = {"cpu": "copy_engine"}
"""By type of device: the implementation that ``auto`` tries. On GPUs ``auto`` is the process group, as long as the other
implementations are experimental there: what is known of them is rehearsed or modelled (docs/hopper.md)."""

_LARGEST_SLOT = {"cuda": 64 << 20, "cpu": 16 << 20}
"""Bytes of the largest slot, by type of device. A larger transfer is cut into pieces. A rank has two slots for all-gathers and
two for reductions. All parameter groups with shards over one process group share them."""


@dataclass(frozen=True)
class Traffic:
    """The transfers of all parameter groups that have their shards over one process group.

    Attributes:
        device: the device of their buffers.
        process_groups: the collectives of each parameter group.
        gathered_nbytes: bytes of the largest shard that is all-gathered.
        reduced_nbytes: bytes of the largest buffer that is reduce-scattered.
    """

    device: torch.device
    process_groups: Sequence[ProcessGroupCollectives]
    gathered_nbytes: int
    reduced_nbytes: int


@dataclass(frozen=True)
class Implementation:
    """The implementation of the collectives that the ranks of a process group have agreed on.

    Attributes:
        name: its name in :data:`IMPLEMENTATIONS`.
        collectives: makes a parameter group's collectives from those of its process groups.
        allocate: allocates memory for gathered parameters and for gradients, which must stay at its address. None if the
            implementation works on any memory.
    """

    name: str
    collectives: Callable[[ProcessGroupCollectives], Collectives]
    allocate: Callable[[int, torch.dtype], torch.Tensor] | None = None


def check_name(name: Any) -> None:
    """Check that there is an implementation with this name.

    Raises:
        ValueError: there is none.
    """
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"collectives must be one of {', '.join(map(repr, IMPLEMENTATIONS))}, got {name!r}")


def choose(name: str, group: dist.ProcessGroup, traffic: Traffic) -> Implementation:
    """The implementation for all parameter groups with shards over ``group``. All ranks call this and get the same answer.

    If ``name`` is unavailable, one log line on the group's first rank says why, and the process group is used. On GPUs one log
    line says that an implementation is experimental.
    """
    device, is_first = traffic.device, group.rank() == 0
    wanted = _AUTO.get(device.type, "nccl") if name == "auto" else name
    if wanted == "nccl":
        if name == "nccl" and not is_nccl(group, device) and is_first:
            text = "set_collectives('nccl'): process group %s has the backend %s, whose collectives are used"
            _logger.warning(text, group.group_name, dist.get_backend(group))
        return Implementation("nccl", _process_groups)
    # Making an implementation is collective. All ranks make it or none does: the name was agreed on, and problems are equal on
    # all ranks.
    made, problem = None, problems_of(group, device).get(wanted) or _problem_of(traffic)
    if not problem:
        made, problem = _made_everywhere(wanted, group, traffic)
    if made is None:
        log = _logger.info if name == "auto" else _logger.warning
        if is_first:
            log("set_collectives(%r): no %s for process group %s: %s", name, wanted, group.group_name, problem)
        return Implementation("nccl", _process_groups)
    if device.type == "cuda" and is_first:
        text = "set_collectives(%r): experimental: it has not run on several GPUs yet (process group %s)"
        _logger.warning(text, name, group.group_name)
    return made


def _process_groups(process_groups: ProcessGroupCollectives) -> Collectives:
    return process_groups


def _problem_of(traffic: Traffic) -> str:
    # Equal on all ranks: fully_shard has compared the placements of all ranks.
    if any(each.levels is not None for each in traffic.process_groups):
        return "HIERARCHICAL has its own collectives, within and across nodes"
    return ""


def _made_everywhere(name: str, group: dist.ProcessGroup, traffic: Traffic) -> tuple[Implementation | None, str]:
    """The implementation; or None and the reason, if any rank fails to make it."""
    made, problem = None, ""
    try:
        made = _MAKERS[name](group, traffic)
    except Exception as error:  # Any error: the other ranks wait for this rank in the all-gather below.
        problem = str(error) or type(error).__name__
    problem = problems_of_ranks(problem, group)
    # A rank that succeeded drops its implementation too: collectives need all ranks.
    return (None if problem else made), problem


# -- makers --------------------------------------------------------------------------------------------------------------


def _make_copy_engine(group: dist.ProcessGroup, traffic: Traffic) -> Implementation:
    device, nbytes = traffic.device, (traffic.gathered_nbytes, traffic.reduced_nbytes)
    # Equal on all ranks, as shards are: ranks cut transfers into the same pieces. Memory is allocated in pages of 4096 bytes.
    slots = [min(-(-each // 4096) * 4096, _LARGEST_SLOT[device.type]) for each in nbytes]
    # One memory for all-gathers and one for reductions, so that neither waits for the other. All-gathers have the higher
    # priority, because forward waits for them and compute does not wait for reductions.
    memories: list[PeerMemory] = [
        SymmetricPeerMemory(group, device, slot, priority) if device.type == "cuda" else HostPeerMemory(group, slot)
        for slot, priority in zip(slots, (-1, 0))
    ]
    return Implementation("copy_engine", lambda process_groups: CopyEngineCollectives(process_groups, group, *memories))


def _make_symm(group: dist.ProcessGroup, traffic: Traffic) -> Implementation:
    pool = traffic.process_groups[0].memory_pool(traffic.device, is_symmetric=True)
    if pool is None:
        raise RuntimeError(f"the backend {dist.get_backend(group)} has no memory allocator of its own")

    def allocate(numel: int, dtype: torch.dtype) -> torch.Tensor:
        with torch.cuda.use_mem_pool(pool):
            return torch.empty(numel, dtype=dtype, device=traffic.device)

    # The first allocation registers a window. If the backend cannot do this, it raises here, where ranks can still agree on
    # another implementation.
    allocate(1 << 20, torch.uint8)
    return Implementation("symm", _process_groups, allocate)


def _make_multimem(group: dist.ProcessGroup, traffic: Traffic) -> Implementation:
    slabs = SymmetricSlabs(group, traffic.device)
    # The address is known after an allocation only. Without one, the kernels would fail in the first training step.
    if not slabs.handle(slabs.allocate(1 << 20, torch.uint8)).multicast_ptr:
        raise RuntimeError("torch could not set up multicast: symmetric memory has no multicast address")
    return Implementation("multimem", lambda process_groups: MulticastCollectives(process_groups, group, slabs), slabs.allocate)


_MAKERS = {"symm": _make_symm, "copy_engine": _make_copy_engine, "multimem": _make_multimem}
"""By name: the function that makes the implementation. All ranks of the process group call it."""
