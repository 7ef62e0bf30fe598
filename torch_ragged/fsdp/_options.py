"""The keywords of ``fully_shard`` as types, for editors and type checkers. It must not check or read any of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Optional, TypedDict, Union

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from torch_ragged.fsdp.core._fsdp_init import ShardPlacementFn
from torch_ragged.fsdp.memory._resident import BufferPlacements
from torch_ragged.granularity import Granularity, OrigParamPolicy

__all__ = ["FullyShardOptions", "InstallOptions", "UnitOptions"]


class _ShardOptions(TypedDict, total=False):
    reshard_after_forward: Optional[Union[bool, int]]
    shard_placement_fn: Optional[ShardPlacementFn]
    mp_policy: MixedPrecisionPolicy
    offload_policy: Union[OffloadPolicy, Mapping[str, OffloadPolicy]]
    orig_param_policy: Optional[OrigParamPolicy]
    placements: Optional[BufferPlacements]
    optional: bool
    weights: Optional[Sequence[int]]
    check_replicas: bool


class UnitOptions(_ShardOptions, total=False):
    """The options of ``Plan.unit``: a plan has the mesh, and shards all parameters of a unit."""

    granularity: Granularity


class InstallOptions(_ShardOptions, total=False):
    """The options of ``integrations.install``: programs pass the module and the mesh."""

    ignored_params: Optional[Iterable[nn.Parameter]]
    dp_mesh_dims: Any


class FullyShardOptions(InstallOptions, total=False):
    """All keywords of ``fully_shard``, which has their meaning and their defaults."""

    mesh: Optional[DeviceMesh]
