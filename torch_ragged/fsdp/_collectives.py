"""The collectives of a parameter group, as a protocol; implemented over a process group (gloo, NCCL)."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

__all__ = ["Collectives", "ProcessGroupCollectives", "Work"]

# torch 2.13 renamed the two and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Work(Protocol):
    """A collective under way; after ``wait()`` its result may be used on the current stream."""

    def wait(self) -> object: ...


class Collectives(Protocol):
    """What a group needs. All calls return at once; their tensors must stay alive and untouched until ``wait()``."""

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor) -> Work:
        """Fill ``output`` (ranks * S elements) with every rank's ``shard`` (S); ``shard`` may be its slice of ``output``."""

    def reduce_scatter(self, output: torch.Tensor, buffer: torch.Tensor) -> Work:
        """Average ``buffer`` (ranks * S elements) over ranks; this rank's slice goes to ``output`` (S)."""

    def all_reduce_max(self, tensor: torch.Tensor) -> Work:
        """Element-wise maximum over ranks, in place."""


class ProcessGroupCollectives:
    """Collectives of one process group. The same code serves gloo and NCCL.

    With NCCL, the work of a collective starts behind what the current stream holds when it is issued and overlaps what
    comes after; ``wait()`` orders the current stream behind it, without blocking the host.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._averages = dist.get_backend(group) == dist.Backend.NCCL

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor) -> Work:
        return _work(_all_gather(output, shard, group=self._group, async_op=True))

    def reduce_scatter(self, output: torch.Tensor, buffer: torch.Tensor) -> Work:
        size = self._group.size()
        if self._averages and output.dtype != torch.float16 and size > 1:
            op = dist.ReduceOp.AVG
            return _work(_reduce_scatter(output, buffer, op=op, group=self._group, async_op=True))
        # float16 has little range: part of the division goes before the sum, part behind it.
        before = _power_of_two_near_root(size) if output.dtype == torch.float16 else 1
        if before > 1:
            buffer.div_(before)
        work = _work(_reduce_scatter(output, buffer, group=self._group, async_op=True))
        return _ScaledWork(work, output, size / before)

    def all_reduce_max(self, tensor: torch.Tensor) -> Work:
        return _work(dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group, async_op=True))


class _ScaledWork:
    """A collective whose output is divided once it is there."""

    def __init__(self, work: Work, output: torch.Tensor, divisor: float) -> None:
        self._work, self._output, self._divisor = work, output, divisor

    def wait(self) -> None:
        self._work.wait()
        if self._divisor != 1:
            self._output.div_(self._divisor)
        self._divisor = 1


def _work(work: dist.Work | None) -> Work:
    assert work is not None, "a collective on a group that this rank is not part of"
    return work


def _power_of_two_near_root(size: int) -> int:
    factor = 1
    while size % factor == 0 and size / factor > factor:
        factor *= 2
    return factor
