"""The collectives of a group whose shards are in proportion to weights. Nothing here knows of parameters."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from torch_ragged._ranks.groups import is_gloo
from torch_ragged.fsdp.comm import _gloo
from torch_ragged.fsdp.comm._collectives import ProcessGroupCollectives, Then, Work, all_gather_single, as_real, divided

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

    def _gather(self, output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> Work:
        assert group is self._group, "shards of weights are gathered by all of their ranks"
        parts = self._parts(output)
        if not is_gloo(group, output.device):
            return self._issue(dist.all_gather, None, parts, shard, group=group)
        largest = max(parts, key=torch.Tensor.numel)  # Equal on all ranks, unlike ``shard``.
        if _gloo.is_worth_broadcasts(largest, group):
            return _gloo.all_gather(parts, shard, group)
        # Padded to the largest one. ``wait()`` copies them to their places.
        own, gathered = shard.new_zeros(largest.numel()), shard.new_empty(len(parts), largest.numel())
        own[: shard.numel()] = shard
        work = self._issue(all_gather_single, None, gathered.view(-1), own, group=group)
        return Then(work, functools.partial(_unpad, parts, gathered, own))

    def _scatter(self, output: torch.Tensor, buffer: torch.Tensor, group: dist.ProcessGroup, op: Any, divisor: float) -> Work:
        output, buffer = as_real(output), as_real(buffer)
        parts = self._parts(buffer)
        if op is dist.ReduceOp.SUM and is_gloo(group, buffer.device):
            return _gloo.reduce_scatter(output, buffer, group, divisor, [part.numel() for part in parts])
        return divided(self._issue(dist.reduce_scatter, None, output, parts, op=op, group=group), output, divisor)

    def _parts(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        unit = buffer.numel() // sum(self._weights)
        return list(buffer.split([weight * unit for weight in self._weights]))


def _unpad(parts: Sequence[torch.Tensor], gathered: torch.Tensor, own: torch.Tensor) -> None:
    """Copy padded shards to their places. ``own``, this rank's, must live until then: the collective has read it."""
    with torch.inference_mode():
        for part, padded in zip(parts, gathered):
            part.copy_(padded[: part.numel()])
