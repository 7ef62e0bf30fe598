"""Bytes per collective, and memory per rank under ZeRO-1, 2 and 3.

It must count padding, because collectives move it and buffers store it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torch_ragged.offline._model_plan import Sharding

__all__ = ["Collective", "Memory", "Precision", "collectives", "zero_memory"]

_SHARD_ALIGNMENT_BYTES = 128  # As fully_shard lays buffers out.


@dataclass(frozen=True)
class Precision:
    """The dtypes of a training run.

    Attributes:
        param: the dtype of the parameters in compute, and in all-gathers.
        reduce: the dtype of gradients in reduce-scatters.
        optimizer: the dtype of the optimizer's values.
        states: the number of optimizer values per parameter: 3 for Adam's two moments and a master copy.
    """

    param: torch.dtype = torch.bfloat16
    reduce: torch.dtype = torch.float32
    optimizer: torch.dtype = torch.float32
    states: int = 3

    @property
    def alignment(self) -> int:
        """The alignment of shards in elements. It makes a shard a multiple of 128 bytes in ``param`` and in ``reduce``."""
        return max(1, _SHARD_ALIGNMENT_BYTES // min(self.param.itemsize, self.reduce.itemsize))


@dataclass(frozen=True)
class Collective:
    """Bytes of one kind of collective.

    Attributes:
        largest: bytes of the largest group.
        total: bytes of all groups together.
    """

    largest: int
    total: int


@dataclass(frozen=True)
class Memory:
    """Bytes per rank, padding included. Activations, and buffers that exist during one layer only, are not counted."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def collectives(sharding: Sharding, precision: Precision, replicas: int = 1) -> dict[str, Collective]:
    """Bytes of the buffers of collectives, padding included.

    An all-gather fills the whole buffer of a group, all shards of it. A reduce-scatter reads the whole buffer. If there are
    several replicas (HSDP), the ranks with the same shard then all-reduce it.
    """
    largest, total, ranks = sharding.largest_shard_numel, sharding.shard_numel, sharding.ranks
    param, reduce = precision.param.itemsize, precision.reduce.itemsize
    moved = {
        "all_gather": Collective(ranks * largest * param, ranks * total * param),
        "reduce_scatter": Collective(ranks * largest * reduce, ranks * total * reduce),
    }
    if replicas > 1:
        moved["all_reduce"] = Collective(largest * reduce, total * reduce)
    return moved


def zero_memory(sharding: Sharding, precision: Precision) -> dict[int, Memory]:
    """Memory per rank by ZeRO stage.

    Stage 1 shards the optimizer's values, stage 2 also the gradients, stage 3 also the parameters. Unsharded values count as
    whole buffers, with their padding. Replicas (HSDP) do not change the memory per rank.
    """
    shard = sharding.shard_numel
    whole = sharding.ranks * shard
    optimizer = shard * precision.states * precision.optimizer.itemsize
    param, reduce = precision.param.itemsize, precision.reduce.itemsize
    return {
        1: Memory(whole * param, whole * reduce, optimizer),
        2: Memory(whole * param, shard * reduce, optimizer),
        3: Memory(shard * param, shard * reduce, optimizer),
    }
