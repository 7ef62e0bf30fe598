"""Bytes per collective, memory per rank under ZeRO-1, 2 and 3, and what fits if a part of it lies in host memory or in files.

It must count padding, because collectives move it and buffers store it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from torch_ragged.fsdp.files._scratch_file import MAPPED_IN_MEMORY
from torch_ragged.fsdp.offload._tiers import FILE_NUMEL, WINDOW_NUMEL, WINDOWS
from torch_ragged.offline._model_plan import Sizes

__all__ = [
    "Budget",
    "CollectiveBytes",
    "Fit",
    "RankMemory",
    "Precision",
    "collectives",
    "offload_fits",
    "weighted_memory",
    "zero_memory",
]

_SHARD_ALIGNMENT_BYTES = 128  # As fully_shard lays buffers out.


@dataclass(frozen=True)
class Precision:
    """The dtypes of a training run.

    Attributes:
        param: the dtype of the parameters in compute, and in all-gathers.
        reduce: the dtype of gradients in reduce-scatters.
        optimizer: the dtype of the optimizer's values.
        states: the number of optimizer values per parameter, beside the parameter: 2 for Adam's moments.
        shard: the dtype of the sharded parameters, which the optimizer updates, and of their gradients.
    """

    param: torch.dtype = torch.bfloat16
    reduce: torch.dtype = torch.float32
    optimizer: torch.dtype = torch.float32
    states: int = 2
    shard: torch.dtype = torch.float32

    @property
    def alignment(self) -> int:
        """The alignment of shards in elements. It makes a shard a multiple of 128 bytes in ``param`` and in ``reduce``."""
        return _SHARD_ALIGNMENT_BYTES // min(self.param.itemsize, self.reduce.itemsize)


@dataclass(frozen=True)
class CollectiveBytes:
    """Bytes of one kind of collective.

    Attributes:
        largest: bytes of the largest group.
        total: bytes of all groups together.
    """

    largest: int
    total: int


@dataclass(frozen=True)
class RankMemory:
    """Bytes per rank, padding included. Activations, and buffers that exist during one layer only, are not counted."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def collectives(sharding: Sizes, precision: Precision, replicas: int = 1) -> dict[str, CollectiveBytes]:
    """Bytes of the buffers of collectives, padding included.

    An all-gather fills the whole buffer of a group, all shards of it. A reduce-scatter reads the whole buffer. If there are
    several replicas (HSDP), the ranks with the same shard then all-reduce it.
    """
    largest, total = sharding.largest_shard_numel, sharding.shard_numel
    param, reduce = precision.param.itemsize, precision.reduce.itemsize
    moved = {
        "all_gather": CollectiveBytes(sharding.whole(largest) * param, sharding.whole(total) * param),
        "reduce_scatter": CollectiveBytes(sharding.whole(largest) * reduce, sharding.whole(total) * reduce),
    }
    if replicas > 1:
        moved["all_reduce"] = CollectiveBytes(largest * reduce, total * reduce)
    return moved


def zero_memory(sharding: Sizes, precision: Precision) -> dict[int, RankMemory]:
    """Memory per rank by ZeRO stage.

    Stage 1 shards the optimizer's values, stage 2 also the gradients, stage 3 also the parameters. Unsharded values count as
    whole buffers, with their padding; beside unsharded parameters, the shards count if they have another dtype. Replicas
    (HSDP) do not change the memory per rank. With weights, it is that of the rank with the largest shard: see
    :func:`weighted_memory`.
    """
    numel = sharding.shard_numel
    shard, whole = numel * precision.shard.itemsize, sharding.whole(numel)
    unsharded = whole * precision.param.itemsize + (shard if precision.shard != precision.param else 0)
    optimizer = numel * precision.states * precision.optimizer.itemsize
    return {
        1: RankMemory(unsharded, whole * precision.reduce.itemsize, optimizer),
        2: RankMemory(unsharded, shard, optimizer),
        3: RankMemory(shard, shard, optimizer),
    }


def weighted_memory(sharding: Sizes, precision: Precision) -> dict[int, RankMemory]:
    """Memory under ZeRO-3 of a rank of each weight, the largest one first."""
    largest, own = max(sharding.weights), zero_memory(sharding, precision)[3]
    return {
        weight: RankMemory(*(part * weight // largest for part in (own.parameters, own.gradients, own.optimizer)))
        for weight in sorted(set(sharding.weights), reverse=True)
    }


@dataclass(frozen=True)
class Budget:
    """The bytes of each rank."""

    device: int
    host: int
    files: int


@dataclass(frozen=True)
class Fit:
    """A training run under ZeRO-3 and one ``offload_policy``, within a budget.

    Attributes:
        policy: the ``offload_policy`` of the model as it is.
        scale: how many times as large the model may be.
        needed: the bytes of each rank, for the model as it is.
        used: these bytes; None if it does not fit.
    """

    policy: str
    scale: float
    needed: Budget
    used: Budget | None


def offload_fits(sharding: Sizes, precision: Precision, budget: Budget) -> dict[str, Fit]:
    """What fits on an accelerator: without offload, and by each kind of ``Offload``, that of the least traffic first."""
    memory = zero_memory(sharding, precision)[3]
    state_bytes = precision.states * precision.optimizer.itemsize  # Of an element.
    moved, fixed = memory.optimizer, memory.parameters + memory.gradients
    device_windows, file_windows = 2 * WINDOW_NUMEL * state_bytes, WINDOWS * FILE_NUMEL * state_bytes
    # Of parameters in files: the largest shards of groups.
    shards = sorted((shard for count, shard in sharding.shards for _ in range(min(count, MAPPED_IN_MEMORY))), reverse=True)
    pages = sum(shards[:MAPPED_IN_MEMORY]) * precision.shard.itemsize
    # A part of the states in host memory: what does not fit on the device, beside the two windows through which it is copied.
    beside = budget.device - device_windows
    leaving = max(0, fixed + moved - beside)
    fraction = min(1.0, math.ceil(10_000 * leaving / moved) / 10_000) if moved else 0.0
    part = math.ceil(fraction * moved)
    fits = {
        "no offload": ("None", budget.device / memory.total, Budget(memory.total, 0, 0)),
        "optimizer": (
            f"Offload({fraction:g})",
            min((beside + budget.host) / memory.total, beside / fixed),
            Budget(memory.total - part + device_windows, part, 0),
        ),
        "parameters": ("Offload(parameters=True)", budget.host / memory.total, Budget(0, memory.total, 0)),
        "files": (
            "Offload(parameters=True, to=folder)",
            min((budget.host - file_windows) / fixed, budget.files / moved if moved else math.inf),
            Budget(0, fixed + file_windows, moved),
        ),
        "all in files": (
            'Offload(parameters="files", to=folder)',
            min((budget.host - file_windows) / (memory.gradients + pages), budget.files / (memory.total - memory.gradients)),
            Budget(0, memory.gradients + pages + file_windows, memory.total - memory.gradients),
        ),
    }
    return {
        kind: Fit(policy, max(0.0, scale), needed, needed if scale >= 1 else None)
        for kind, (policy, scale, needed) in fits.items()
    }
