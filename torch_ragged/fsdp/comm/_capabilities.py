"""The implementations of collectives that the ranks of a process group can use, decided from the facts of all ranks.

Nothing here allocates memory for an implementation.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from torch_ragged._ranks.groups import backend_of
from torch_ragged._register._torch import has_multicast
from torch_ragged.fsdp.comm.experimental._peer_memory import host_of

__all__ = ["Facts", "problems_of", "why_not"]


@dataclass
class Facts:
    """The facts that one rank knows about itself.

    Attributes:
        host: an id of its host; equal for ranks that can share CPU memory.
        gpu: the id of its GPU; empty on the CPU.
        out_of_reach: ids of the GPUs that the rank sees and whose memory its own GPU cannot access.
        may_overlap: whether ranks on one GPU may share symmetric memory.
        problems: by name of an implementation, why this rank cannot use it.
    """

    host: str = ""
    gpu: str = ""
    out_of_reach: frozenset[str] = frozenset()
    may_overlap: bool = False
    problems: dict[str, str] = field(default_factory=dict)


_known: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, str]] = weakref.WeakKeyDictionary()


def problems_of(group: dist.ProcessGroup, device: torch.device) -> dict[str, str]:
    """By name of an implementation, why the ranks of ``group`` cannot use it; the same on all ranks.

    The first call for a group costs one all-gather of objects.
    """
    # All ranks know a group or none does, because all ranks of a group call this together.
    if group not in _known:
        try:
            mine = _facts(group, device)
        except Exception as error:  # Not raised: the other ranks wait for this rank in the all-gather below.
            problem = f"{type(error).__name__}: {error}"
            mine = Facts(problems=dict.fromkeys(("symm", "copy_engine", "multimem"), problem))
        facts = [Facts()] * group.size()
        dist.all_gather_object(facts, mine, group=group)
        _known[group] = why_not(facts)
    return _known[group]


def why_not(facts: Sequence[Facts]) -> dict[str, str]:
    """By name of an implementation, the first reason why ranks with these facts cannot use it."""
    found: dict[str, str] = {}
    for rank, mine in enumerate(facts):
        for name, why in mine.problems.items():
            found.setdefault(name, f"rank {rank}: {why}")
    for name in ("copy_engine", "multimem"):
        why = _not_together(facts, may_overlap=name == "copy_engine" and all(mine.may_overlap for mine in facts))
        if why:
            found.setdefault(name, why)
    return found


def _not_together(facts: Sequence[Facts], may_overlap: bool) -> str:
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


def _facts(group: dist.ProcessGroup, device: torch.device) -> Facts:
    facts = Facts()
    try:
        facts.host = host_of()
    except OSError as error:
        facts.problems = dict.fromkeys(("copy_engine", "multimem"), str(error))
    if device.type == "cuda":
        facts.gpu = _gpu(device.index)
        others = [index for index in range(torch.cuda.device_count()) if index != device.index]
        facts.out_of_reach = frozenset(
            _gpu(index) for index in others if not torch.cuda.can_device_access_peer(device.index, index)
        )
        facts.may_overlap = os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "") not in ("", "0")
        facts.problems |= {name: why for name, why in _problems_of_gpu(group, device).items() if why}
    else:
        facts.problems |= dict.fromkeys(("symm", "multimem"), f"it is for GPUs, parameters are on {device.type}")
    return facts


def _gpu(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _problems_of_gpu(group: dist.ProcessGroup, device: torch.device) -> dict[str, str]:
    backend = backend_of(group, device)
    registers = hasattr(backend, "register_mem_pool") and backend.supports_tensor_alloc(device)
    problems = {"symm": "" if registers else f"the backend {dist.get_backend(group)} cannot register memory"}
    try:
        import torch.distributed._symmetric_memory as symm_mem

        has_memory = symm_mem.get_backend(device) is not None
    except ImportError:
        has_memory = False
    problems["copy_engine"] = "" if has_memory else "torch has no symmetric memory for this device"
    problems["multimem"] = problems["copy_engine"] or _problem_of_multicast(device)
    return problems


def _problem_of_multicast(device: torch.device) -> str:
    if torch.cuda.get_device_capability(device) < (9, 0):
        return "multimem instructions need compute capability 9.0 (Hopper)"
    if not has_multicast(device):
        return "this GPU has no multicast: no NVSwitch, or a driver without it"
    if not hasattr(torch.ops.symm_mem, "multimem_all_gather_out"):
        return "this torch has no multimem_all_gather_out"
    try:
        import triton  # noqa: F401
    except ImportError:
        return "Triton is not installed"
    return ""
