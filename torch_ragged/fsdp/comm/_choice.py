"""The choice of an implementation of the collectives, for ``set_collectives``, from the facts of all ranks; the same on all."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from torch_ragged._ranks.agreement import problems_of_ranks
from torch_ragged._ranks.groups import backend_of, is_nccl
from torch_ragged._register._torch import has_multicast
from torch_ragged.fsdp.comm._collectives import Collectives, ProcessGroupCollectives
from torch_ragged.fsdp.comm.experimental._copy_engine import CopyEngineCollectives
from torch_ragged.fsdp.comm.experimental._multicast import MulticastCollectives, SymmetricSlabs
from torch_ragged.fsdp.comm.experimental._peer_memory import HostPeerMemory, PeerMemory, SymmetricPeerMemory, host_of

__all__ = ["IMPLEMENTATIONS", "RankFacts", "Implementation", "Traffic", "choose_implementation", "why_not"]

_logger = logging.getLogger("torch_ragged.fsdp")

IMPLEMENTATIONS = ("nccl", "symm", "copy_engine", "multimem", "auto")

_AUTO = {"cpu": "copy_engine"}
"""By type of device: the implementation that ``auto`` tries. On GPUs ``auto`` is the process group, as long as the other
implementations are experimental there: what is known of them is rehearsed or modelled (docs/measurements.md)."""

_LARGEST_SLOT = {"cuda": 64 << 20, "cpu": 16 << 20}
"""Bytes of the largest slot, by type of device. A larger transfer is cut into pieces."""


@dataclass(frozen=True)
class Traffic:
    """The transfers of all parameter groups that have their shards over one process group."""

    device: torch.device
    process_groups: Sequence[ProcessGroupCollectives]  # The collectives of each parameter group.
    gathered_nbytes: int  # Of the largest shard that is all-gathered.
    reduced_nbytes: int  # Of the largest buffer that is reduce-scattered.


@dataclass(frozen=True)
class Implementation:
    """The implementation of the collectives that the ranks of a process group have agreed on."""

    name: str
    collectives: Callable[[ProcessGroupCollectives], Collectives]  # Makes those of a parameter group.
    # Allocates gathered parameters and gradients, which must stay at their addresses; None if any memory will do.
    allocate: Callable[[int, torch.dtype], torch.Tensor] | None = None


_PROCESS_GROUPS = Implementation("nccl", lambda process_groups: process_groups)


def choose_implementation(name: str, group: dist.ProcessGroup, traffic: Traffic) -> Implementation:
    """The implementation for all parameter groups with shards over ``group``. All ranks call this and get the same answer.

    If ``name`` is unavailable, one log line on the group's first rank says why, and the process group is used.
    """
    device, is_first = traffic.device, group.rank() == 0
    wanted = _AUTO.get(device.type, "nccl") if name == "auto" else name
    if wanted == "nccl":
        if name == "nccl" and not is_nccl(group, device) and is_first:
            text = "set_collectives('nccl'): process group %s has the backend %s, whose collectives are used"
            _logger.warning(text, group.group_name, dist.get_backend(group))
        return _PROCESS_GROUPS
    # Making an implementation is collective. All ranks make it or none does: the name was agreed on, and problems are equal on
    # all ranks. So is what follows from placements, which fully_shard has compared.
    made, problem = _PROCESS_GROUPS, problems_of(group, device).get(wanted, "")
    if not problem and any(each.levels is not None for each in traffic.process_groups):
        problem = "HIERARCHICAL has its own collectives, within and across nodes"
    if not problem:
        try:
            made = _MAKERS[wanted](group, traffic)
        except Exception as error:  # Any error: the other ranks wait for this rank in the all-gather below.
            problem = str(error) or type(error).__name__
        problem = problems_of_ranks(problem, group)
    if problem:
        log = _logger.info if name == "auto" else _logger.warning
        if is_first:
            log("set_collectives(%r): no %s for process group %s: %s", name, wanted, group.group_name, problem)
        return _PROCESS_GROUPS  # Also on a rank that succeeded: collectives need all ranks.
    if device.type == "cuda" and is_first:
        text = "set_collectives(%r): experimental: it has not run on several GPUs yet (process group %s)"
        _logger.warning(text, name, group.group_name)
    return made


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
    return Implementation("symm", _PROCESS_GROUPS.collectives, allocate)


def _make_multimem(group: dist.ProcessGroup, traffic: Traffic) -> Implementation:
    slabs = SymmetricSlabs(group, traffic.device)
    # The address is known after an allocation only. Without one, the kernels would fail in the first training step.
    if not slabs.handle(slabs.allocate(1 << 20, torch.uint8)).multicast_ptr:
        raise RuntimeError("torch could not set up multicast: symmetric memory has no multicast address")
    return Implementation("multimem", lambda process_groups: MulticastCollectives(process_groups, group, slabs), slabs.allocate)


_MAKERS = {"symm": _make_symm, "copy_engine": _make_copy_engine, "multimem": _make_multimem}
"""By name: the function that makes the implementation. All ranks of the process group call it."""


# -- what ranks can use --------------------------------------------------------------------------------------------------


@dataclass
class RankFacts:
    """The facts that one rank knows about itself."""

    host: str = ""  # An id, equal for ranks that can share CPU memory.
    gpu: str = ""  # Its id; empty on the CPU.
    out_of_reach: frozenset[str] = frozenset()  # Ids of the GPUs that it sees, and whose memory its own GPU cannot access.
    may_overlap: bool = False  # Whether ranks on one GPU may share symmetric memory.
    problems: dict[str, str] = field(default_factory=dict)  # By name of an implementation, why this rank cannot use it.


_known_choices: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, str]] = weakref.WeakKeyDictionary()


def problems_of(group: dist.ProcessGroup, device: torch.device) -> dict[str, str]:
    """By name of an implementation, why ``group`` cannot use it; alike on all ranks. The first call all-gathers objects."""
    # All ranks know a group or none does, because all ranks of a group call this together.
    if group not in _known_choices:
        try:
            mine = _facts(group, device)
        except Exception as error:  # Not raised: the other ranks wait for this rank in the all-gather below.
            mine = RankFacts(problems=dict.fromkeys(_MAKERS, f"{type(error).__name__}: {error}"))
        facts = [RankFacts()] * group.size()
        dist.all_gather_object(facts, mine, group=group)
        _known_choices[group] = why_not(facts)
    return _known_choices[group]


def why_not(facts: Sequence[RankFacts]) -> dict[str, str]:
    """By name of an implementation, the first reason why ranks with these facts cannot use it."""
    found: dict[str, str] = {}
    for rank, mine in enumerate(facts):
        for name, why in mine.problems.items():
            found.setdefault(name, f"rank {rank}: {why}")
    may_overlap = all(mine.may_overlap for mine in facts)
    for name, overlaps in (("copy_engine", may_overlap), ("multimem", False)):
        if why := _not_together(facts, overlaps):
            found.setdefault(name, why)
    return found


def _not_together(facts: Sequence[RankFacts], may_overlap: bool) -> str:
    """Why the ranks cannot access each other's memory; empty if they can."""
    if len(facts) == 1:
        return "there is one rank only"
    owners: dict[str, int] = {}
    for rank, mine in enumerate(facts):
        if mine.host != facts[0].host:
            return f"rank {rank} is on another host than rank 0"
        if mine.gpu and owners.setdefault(mine.gpu, rank) != rank and not may_overlap:
            return f"ranks {owners[mine.gpu]} and {rank} are on one GPU"
        for other, theirs in enumerate(facts):
            if theirs.gpu in mine.out_of_reach:
                return f"the GPU of rank {rank} has no access to that of rank {other}"
    return ""


def _facts(group: dist.ProcessGroup, device: torch.device) -> RankFacts:
    found = RankFacts(problems=dict.fromkeys(("symm", "multimem"), f"it is for GPUs, parameters are on {device.type}"))
    if device.type == "cuda":
        ids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
        others = [index for index in range(len(ids)) if index != device.index]
        found.gpu = ids[device.index]
        found.out_of_reach = frozenset(ids[i] for i in others if not torch.cuda.can_device_access_peer(device.index, i))
        found.may_overlap = os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "") not in ("", "0")
        found.problems = {name: why for name, why in _problems_of_gpu(group, device).items() if why}
    try:
        found.host = host_of()
    except OSError as error:
        found.problems = dict.fromkeys(("copy_engine", "multimem"), str(error)) | found.problems
    return found


def _problems_of_gpu(group: dist.ProcessGroup, device: torch.device) -> dict[str, str]:
    """By name of an implementation, why this rank's GPU cannot use it; empty if it can."""
    backend = backend_of(group, device)
    registers = hasattr(backend, "register_mem_pool") and backend.supports_tensor_alloc(device)
    try:  # Not each build of torch for GPUs has it: then this rank says so, and all ranks use the process group.
        import torch.distributed._symmetric_memory as symm_mem

        has_memory = symm_mem.get_backend(device) is not None
    except ImportError:
        has_memory = False
    no_memory = "" if has_memory else "torch has no symmetric memory for this device"
    return {
        "symm": "" if registers else f"the backend {dist.get_backend(group)} cannot register memory",
        "copy_engine": no_memory,
        "multimem": no_memory or _problem_of_multicast(device),
    }


def _problem_of_multicast(device: torch.device) -> str:
    if torch.cuda.get_device_capability(device) < (9, 0):
        return "multimem instructions need compute capability 9.0 (Hopper)"
    if not has_multicast(device):
        return "this GPU has no multicast: no NVSwitch, or a driver without it"
    try:
        import triton  # noqa: F401
    except ImportError:
        return "Triton is not installed"
    return ""
