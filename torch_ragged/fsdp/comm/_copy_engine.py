"""All-gather and reduce-scatter by copies between the ranks' memory: no process group, and on a GPU no SMs for the copies."""

from __future__ import annotations

import dataclasses
import functools

import torch
import torch.distributed as dist

from torch_ragged.fsdp.comm._collectives import (
    ProcessGroupCollectives,
    ReduceScatterTraits,
    Reduction,
    Work,
    as_real,
    reduced,
    wait_all,
)
from torch_ragged.fsdp.comm._gloo import sum_parts
from torch_ragged.fsdp.comm._peer_memory import PeerMemory, Step

__all__ = ["CopyEngineCollectives"]


class CopyEngineCollectives:
    """Collectives over :class:`PeerMemory`; what they do not cover goes to the process group.

    ::

        all-gather       each rank copies its shard into its own slot          | signal |  and reads all others' slots
        reduce-scatter   each rank copies each part into the slot of its owner | signal |  who adds up its own slot

    Parts are added in the order of the ranks and rounded once on the CPU, as by ``torch.sum`` on a GPU; bfloat16 and float16 in
    float32. What is larger than a slot goes in pieces. Buffers may lie anywhere: a gather copies a shard twice on its own rank,
    a reduction a part twice on its owner.

    Args:
        process_groups: of the same ranks; used for other groups, for replicas, and where custom collectives are set.
        gathers, reductions: memory for each, so that one need not wait for the other.
    """

    def __init__(
        self, process_groups: ProcessGroupCollectives, group: dist.ProcessGroup, gathers: PeerMemory, reductions: PeerMemory
    ) -> None:
        self._process_groups, self._group = process_groups, group
        self._gathers, self._reductions = gathers, reductions
        self.all_reduce, self.all_reduce_max = process_groups.all_reduce, process_groups.all_reduce_max

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup | None = None) -> Work:
        if group not in (None, self._group) or self._process_groups.custom_all_gather is not None:
            return self._process_groups.all_gather(output, shard, group)
        memory = self._gathers
        outputs, source = _bytes(output).chunk(memory.size), _bytes(shard)
        works = []
        for start in range(0, source.numel(), memory.slot_nbytes):
            stop = min(start + memory.slot_nbytes, source.numel())
            parts = [each[start:stop] for each in outputs]
            works.append(memory.exchange(*_gather(source[start:stop], parts, memory.rank), nbytes=stop - start))
        return wait_all(works)

    def reduce_scatter(self, output: torch.Tensor, buffer: torch.Tensor, reduction: Reduction) -> Work:
        if self._process_groups.custom_reduce_scatter is not None:
            return self._process_groups.reduce_scatter(output, buffer, reduction)
        issue = functools.partial(self._sum, as_real(output), as_real(buffer))
        return reduced(issue, self._group, buffer, output, dataclasses.replace(reduction, sum_only=True))

    def reduce_scatter_traits(self, device: torch.device) -> ReduceScatterTraits:
        adds_wide = device.type == "cpu" and self._process_groups.custom_reduce_scatter is None
        return ReduceScatterTraits(adds_wide, holds_second_buffer=False)

    def _sum(self, output: torch.Tensor, buffer: torch.Tensor, op: object, divisor: float) -> Work:
        memory = self._reductions
        piece = memory.slot_nbytes // (memory.size * buffer.element_size())
        works = []
        for start in range(0, output.numel(), piece):
            stop = min(start + piece, output.numel())
            target = output[start:stop]
            parts = [each[start:stop] for each in buffer.chunk(memory.size)]
            steps = _scatter_and_sum(parts, target, memory.rank, divisor)
            works.append(memory.exchange(*steps, nbytes=memory.size * parts[0].nbytes))
        return wait_all(works)


def _gather(shard: torch.Tensor, outputs: list[torch.Tensor], rank: int) -> tuple[Step, Step]:
    """What to write and to read to have the ``shard`` of each rank in one of ``outputs``; all are bytes."""
    others = [(rank + step) % len(outputs) for step in range(1, len(outputs))]  # Each rank begins with another one.

    def write(slots: list[torch.Tensor]) -> None:
        slots[rank][: shard.numel()].copy_(shard)
        if outputs[rank].data_ptr() != shard.data_ptr():
            outputs[rank].copy_(shard)

    def read(slots: list[torch.Tensor]) -> None:
        for other in others:
            outputs[other].copy_(slots[other][: shard.numel()])

    return write, read


def _scatter_and_sum(parts: list[torch.Tensor], output: torch.Tensor, rank: int, divisor: float) -> tuple[Step, Step]:
    """What to write and to read to have the sum over ranks of ``parts[rank]``, divided, in ``output``."""
    ranks, numel, nbytes, dtype = len(parts), output.numel(), parts[rank].nbytes, parts[rank].dtype

    def rows(slot: torch.Tensor) -> torch.Tensor:
        return slot[: ranks * nbytes].view(dtype).view(ranks, numel)

    def write(slots: list[torch.Tensor]) -> None:
        for step in range(ranks):
            owner = (rank + step) % ranks
            rows(slots[owner])[rank].copy_(parts[owner])

    def read(slots: list[torch.Tensor]) -> None:
        if output.device.type == "cpu":
            sum_parts(rows(slots[rank]).unbind(), output, divisor)
            return
        torch.sum(rows(slots[rank]), 0, dtype=output.dtype, out=output)  # One kernel.
        if divisor != 1:
            output.div_(divisor)

    return write, read


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)
