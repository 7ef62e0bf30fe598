"""The collectives of a group whose shards are in proportion to weights. Nothing here knows of parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from torch_ragged.fsdp.comm import _gloo
from torch_ragged.fsdp.comm._call_log import wait_for
from torch_ragged.fsdp.comm._collectives import (
    ProcessGroupCollectives,
    Reduction,
    ScaledWork,
    Work,
    all_gather_single,
    as_real,
    division_of,
)

__all__ = ["UnequalCollectives"]


class UnequalCollectives(ProcessGroupCollectives):
    """An all-gather is a broadcast of each shard to its place, and a reduce-scatter is a reduction of each part to its rank.

    NCCL issues these broadcasts, or reductions, as one call. Over gloo, small shards are padded to the largest one and
    all-gathered, and a reduce-scatter is an all-to-all and a local sum in the order of ranks, as with equal shards: sums have
    the same bits. A rank of weight 0 sends no shard, and gets none.

    Args:
        weights: of the ranks of ``group``: the elements of a buffer are divided in proportion to them.
    """

    def __init__(self, group: dist.ProcessGroup | None, replicas: dist.ProcessGroup | None, weights: Sequence[int]) -> None:
        super().__init__(group, replicas)
        self._weights = tuple(weights)

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup | None = None) -> Work:
        assert self._group is not None and group is None, "shards of weights are gathered by all of their ranks"
        if shard.dtype.itemsize == 1:
            output, shard = output.view(torch.uint8), shard.view(torch.uint8)
        output, shard = as_real(output), as_real(shard)
        parts = self._parts(output)
        if self._over_gloo[self._group, output.device.type]:
            largest = max(parts, key=torch.Tensor.numel)  # Equal on all ranks, unlike ``shard``.
            if _gloo.is_worth_broadcasts(largest, self._group):
                return _gloo.all_gather(parts, shard, self._group)
            return _Padded(parts, shard, largest.numel(), self._group)
        return self._issue(dist.all_gather, None, parts, shard, group=self._group)

    def reduce_scatter(
        self, output: torch.Tensor, buffer: torch.Tensor, reduction: Reduction, group: dist.ProcessGroup | None = None
    ) -> Work:
        assert group is None, "shards of weights are reduced over all of their ranks"
        group = self.separate_groups.get(self._group, self._group)
        assert group is not None
        how = division_of(group, output, reduction)
        if how.before > 1:
            buffer.div_(how.before)
        output, buffer = as_real(output), as_real(buffer)
        if self._over_gloo[group, buffer.device.type]:
            sizes = [part.numel() for part in self._parts(buffer)]
            return _gloo.reduce_scatter(output, buffer, group, how.after, sizes)
        work = self._issue(dist.reduce_scatter, None, output, self._parts(buffer), op=how.op, group=group)
        return work if how.after == 1 else ScaledWork(work, output, how.after)

    def _parts(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        unit = buffer.numel() // sum(self._weights)
        return list(buffer.split([weight * unit for weight in self._weights]))


class _Padded:
    """An all-gather of shards that are padded to the largest one. ``wait()`` copies them to their places."""

    def __init__(self, parts: Sequence[torch.Tensor], shard: torch.Tensor, numel: int, group: dist.ProcessGroup) -> None:
        ranks = group.size()
        own, gathered = shard.new_zeros(numel), shard.new_empty(ranks, numel)
        own[: shard.numel()] = shard
        work = all_gather_single(gathered.view(-1), own, group=group, async_op=True)
        assert work is not None, "this rank is not part of the collective's process group"
        self._work, self._parts, self._gathered, self._own = work, parts, gathered, own

    def wait(self) -> None:
        wait_for(self._work)
        with torch.inference_mode():
            for part, padded in zip(self._parts, self._gathered):
                part.copy_(padded[: part.numel()])
        self._parts = ()  # A second wait() copies nothing: the parts may have been written since.
