"""A stand-in for symmetric memory: the ranks of a host map each other's device memory. Barriers are collectives of one element.

Multicast instructions are stood in for, too: a load of a sum reads the memory of all ranks.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

_multicast: dict[int, Handle] = {}
"""By multicast address, which is that of the rank's own memory."""


class Handle:
    """What ``torch.distributed._symmetric_memory.rendezvous`` returns."""

    def __init__(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        self.rank, self.world_size, self._own = group.rank(), group.size(), tensor
        places: list[Any] = [None] * self.world_size
        dist.all_gather_object(places, torch.ops.rehearsal.where(tensor), group=group)
        self.tensors = [
            tensor if rank == self.rank else torch.ops.rehearsal.peer(tensor, *place) for rank, place in enumerate(places)
        ]
        self._group = dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True)
        self._flag = torch.zeros(1, device=tensor.device)
        self.multicast_ptr = tensor.data_ptr()
        _multicast[self.multicast_ptr] = self

    def get_remote_tensor(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The memory of a rank."""
        return self.tensors[rank].view(torch.uint8).view(dtype).view(sizes)

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """Order the current stream behind the work that the current streams of all ranks hold."""
        dist.all_reduce(self._flag, group=self._group)


def _load_sum(address: int, output: torch.Tensor) -> None:
    start = max(each for each in _multicast if each <= address)
    handle, first = _multicast[start], (address - start) // output.itemsize
    parts = [each.view(output.dtype)[first : first + output.numel()].float() for each in handle.tensors]
    output.copy_(torch.stack(parts).sum(0))


def _all_gather(shard: torch.Tensor, group_name: str, gathered: torch.Tensor) -> torch.Tensor:
    handle = _multicast[gathered.data_ptr()]
    handle.barrier()
    for each in handle.tensors:
        each.view(torch.uint8)[handle.rank * shard.numel() :][: shard.numel()].copy_(shard)
    handle.barrier()
    return gathered


def installed() -> Any:
    """A context in which symmetric memory and multicast of the package are those of this file."""
    import contextlib

    import torch.distributed._symmetric_memory as symm_mem

    from torch_ragged.fsdp.comm import _choice
    from torch_ragged.fsdp.comm.experimental import _multicast as multicast

    stack = contextlib.ExitStack()
    # torch asks the driver, which has no stand-in.
    stack.enter_context(mock.patch.object(torch.cuda, "can_device_access_peer", lambda device, peer: device != peer))
    stack.enter_context(mock.patch.object(symm_mem, "empty", torch.zeros))
    stack.enter_context(mock.patch.object(symm_mem, "rendezvous", Handle))
    stack.enter_context(mock.patch.object(multicast, "load_sum", _load_sum))
    problems = {"symm": "windows of NCCL have no stand-in"}
    stack.enter_context(mock.patch.object(_choice, "_problems_of_gpu", lambda group, device: problems))
    stack.enter_context(mock.patch.object(torch.ops.symm_mem, "multimem_all_gather_out", _all_gather))
    return stack
