"""All-gather and reduce-scatter as copies between the memories of the ranks. On a GPU, copy engines make them, not SMs."""

from __future__ import annotations

import torch
import torch.distributed as dist

from torch_ragged.fsdp.comm._collectives import (
    ProcessGroupCollectives,
    ReduceScatterTraits,
    Work,
    WrappedCollectives,
    as_real,
    wait_all,
)
from torch_ragged.fsdp.comm._gloo import sum_parts
from torch_ragged.fsdp.comm._reduction import SUMS, Reduction
from torch_ragged.fsdp.comm.experimental._peer_memory import Half, PeerMemory

__all__ = ["CopyEngineCollectives"]


class CopyEngineCollectives(WrappedCollectives):
    """Collectives over :class:`PeerMemory`. Calls that they do not support go to the process group.

    ::

        all-gather       each rank writes its shard to its own slot           | signal |  each rank reads the other ranks' slots
        reduce-scatter   each rank writes each part to the slot of its owner  | signal |  each rank adds up its own slot

    A transfer that is larger than a slot is cut into pieces. Buffers may be in any memory, because all data passes through the
    slots: two memories, so that an all-gather and a reduce-scatter do not wait for each other. ``process_groups``, of the same
    ranks, serve other groups, replicas, and custom collectives.
    """

    def __init__(
        self, process_groups: ProcessGroupCollectives, group: dist.ProcessGroup, gathers: PeerMemory, reductions: PeerMemory
    ) -> None:
        super().__init__(process_groups)
        self._process_groups, self._group = process_groups, group
        self._gathers, self._reductions = gathers, reductions

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup | None = None) -> Work:
        if group not in (None, self._group) or self._process_groups.custom_all_gather is not None:
            return super().all_gather(output, shard, group)
        memory = self._gathers
        outputs, source = output.view(torch.uint8).chunk(memory.size), shard.view(torch.uint8)
        works = []
        # All ranks cut at the same offsets, because shards and slots have one size on all ranks. So exchanges match in number.
        for start in range(0, source.numel(), memory.slot_nbytes):
            stop = min(start + memory.slot_nbytes, source.numel())
            parts = [each[start:stop] for each in outputs]
            works.append(memory.exchange(*_gather_halves(source[start:stop], parts, memory.rank), nbytes=stop - start))
        return wait_all(works)

    def reduce_scatter(
        self, output: torch.Tensor, buffer: torch.Tensor, reduction: Reduction, group: dist.ProcessGroup | None = None
    ) -> Work:
        if group not in (None, self._group) or self._process_groups.custom_reduce_scatter is not None:
            return super().reduce_scatter(output, buffer, reduction, group)
        _, divisor = reduction.begin(output, buffer, self._group.size(), SUMS)
        output, buffer, memory = as_real(output), as_real(buffer), self._reductions
        # A slot receives a piece from every rank, itself included. Each piece has whole elements, so that it can be added.
        piece = memory.slot_nbytes // (memory.size * buffer.element_size())
        works = []
        for start in range(0, output.numel(), piece):
            stop = min(start + piece, output.numel())
            parts = [each[start:stop] for each in buffer.chunk(memory.size)]
            steps = _scatter_and_sum(parts, output[start:stop], memory.rank, divisor)
            works.append(memory.exchange(*steps, nbytes=memory.size * parts[0].nbytes))
        return wait_all(works)

    def reduce_scatter_traits(self, device: torch.device) -> ReduceScatterTraits:
        # No second buffer: a rank receives parts in its slots, which stay allocated.
        adds_wide = device.type == "cpu" and self._process_groups.custom_reduce_scatter is None
        return ReduceScatterTraits(adds_wide, holds_second_buffer=False)


def _gather_halves(shard: torch.Tensor, outputs: list[torch.Tensor], rank: int) -> tuple[Half, Half]:
    """The two halves of an exchange that fills ``outputs`` with the ``shard`` of each rank. All tensors are bytes."""
    # Each rank begins with the rank after it: if all began with rank 0, they would share the links of rank 0.
    others = [(rank + step) % len(outputs) for step in range(1, len(outputs))]

    def write(slots: list[torch.Tensor]) -> None:
        slots[rank][: shard.numel()].copy_(shard)
        # Nothing to copy if the caller gathers in place.
        if outputs[rank].data_ptr() != shard.data_ptr():
            outputs[rank].copy_(shard)

    def read(slots: list[torch.Tensor]) -> None:
        for other in others:
            outputs[other].copy_(slots[other][: shard.numel()])

    return write, read


def _scatter_and_sum(parts: list[torch.Tensor], output: torch.Tensor, rank: int, divisor: float) -> tuple[Half, Half]:
    """The two halves of an exchange that sums ``parts[rank]`` over ranks into ``output``, and divides it by ``divisor``."""
    ranks, numel, nbytes, dtype = len(parts), output.numel(), parts[rank].nbytes, parts[rank].dtype

    def rows(slot: torch.Tensor) -> torch.Tensor:
        return slot[: ranks * nbytes].view(dtype).view(ranks, numel)

    def write(slots: list[torch.Tensor]) -> None:
        # Each rank writes its own row of every slot, so ranks never write to the same bytes. Each begins with itself, so that
        # ranks do not all write to one rank at a time.
        for step in range(ranks):
            owner = (rank + step) % ranks
            rows(slots[owner])[rank].copy_(parts[owner])

    def read(slots: list[torch.Tensor]) -> None:
        if output.device.type == "cpu":
            sum_parts(rows(slots[rank]).unbind(), output, divisor)
            return
        torch.sum(rows(slots[rank]), 0, dtype=output.dtype, out=output)  # One kernel, which reads each part once.
        if divisor != 1:
            output.div_(divisor)

    return write, read
