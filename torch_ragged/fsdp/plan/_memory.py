"""Bytes per collective, and memory per rank under ZeRO-1, 2 and 3."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torch_ragged.fsdp.plan._model_plan import Sharding

__all__ = ["Collective", "Memory", "Precision", "collectives", "zero_memory"]

_SHARD_ALIGNMENT_BYTES = 128  # As fully_shard lays buffers out.


@dataclass(frozen=True)
class Precision:
    """Element types of a training run.

    Attributes:
        param: of the parameters that the model computes with, which the all-gather moves.
        reduce: of the gradients, which the reduce-scatter moves.
        optimizer: of the optimizer's values.
        states: how many values the optimizer keeps per parameter: 3 are Adam's two moments and a master copy.
    """

    param: torch.dtype = torch.bfloat16
    reduce: torch.dtype = torch.float32
    optimizer: torch.dtype = torch.float32
    states: int = 3

    @property
    def alignment(self) -> int:
        """Elements that a shard size is a multiple of, so that shards are whole multiples of 128 bytes in either type."""
        return max(1, _SHARD_ALIGNMENT_BYTES // min(self.param.itemsize, self.reduce.itemsize))


@dataclass(frozen=True)
class Collective:
    """Bytes of one kind of collective: of the largest group, and of all groups together."""

    largest: int
    total: int


@dataclass(frozen=True)
class Memory:
    """Bytes per rank, padding included; activations and buffers that live for one layer only are not counted."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def collectives(sharding: Sharding, precision: Precision, replicas: int = 1) -> dict[str, Collective]:
    """Bytes of the buffers that collectives work on, padding included.

    An all-gather fills, and a reduce-scatter reads, the whole buffer of a group, all shards of it. With more than one
    replica (HSDP), ranks that hold the same shard then all-reduce it.
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

    Stage 1 shards the optimizer's values, stage 2 the gradients too, stage 3 the parameters too. What is not sharded
    counts as whole buffers, with their padding. Replicas (HSDP) do not change it.
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
