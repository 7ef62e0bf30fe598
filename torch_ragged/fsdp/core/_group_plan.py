"""GroupPlan: the input of a parameter group. It allocates no memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from torch_ragged.fsdp.core._distribution import Distribution
from torch_ragged.fsdp.core._mesh import DataParallelMesh
from torch_ragged.fsdp.layout._buffer_layout import BufferLayout

__all__ = ["FoundParam", "GroupPlan"]


@dataclass(frozen=True, eq=False)
class FoundParam:
    """A parameter as the user made it, with the modules and names it is registered under (several if tied)."""

    fqn: str
    registered_names: list[tuple[nn.Module, str]]
    value: nn.Parameter
    distribution: Distribution


@dataclass(frozen=True, eq=False)
class GroupPlan:
    """The input of one group: parameters of one dtype and one compute dtype, on one mesh.

    Attributes:
        param_dtype, reduce_dtype: as in the mixed precision policy.
        offload: whether shards are on the CPU.
        tile: if not None, parameters are all-gathered as float8 in these tiles.
        runs_on_meta: whether the group trains on the meta device, as memory reports do.
    """

    params: list[FoundParam]
    dp: DataParallelMesh
    layout: BufferLayout
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    offload: OffloadPolicy
    mp_policy: MixedPrecisionPolicy
    tile: tuple[int, int] | None = None
    runs_on_meta: bool = False
