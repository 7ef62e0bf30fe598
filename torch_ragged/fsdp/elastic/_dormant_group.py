"""DormantGroup: the group of a rank that is not in the mesh. It knows the layout, and holds no shard.

It issues no collective and allocates no memory. ``reshard_to`` puts another group in its position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torch_ragged._ranks.groups import device_of
from torch_ragged.fsdp.core._fsdp_param import FoundParam, FSDPParam, keep_attributes
from torch_ragged.fsdp.core._fsdp_param_group import FSDPParamGroup
from torch_ragged.fsdp.core._kit import FeaturePart, Kit, Need, Terms
from torch_ragged.fsdp.core.encodings._plain import Encoding, Phase, Shards

__all__ = ["DormantGroup", "OutsideMesh"]


@dataclass(frozen=True, eq=False)
class OutsideMesh(FeaturePart):
    """This rank is not in the mesh: its groups are dormant, until ``reshard_to``."""

    rank: int
    mesh: DeviceMesh | str

    @property
    def terms(self) -> Terms:
        return Terms(f"rank {self.rank}, which is not in the mesh {self.mesh}", breaks=(Need.IN_MESH,))

    @classmethod
    def of(cls, mesh: DeviceMesh) -> OutsideMesh | None:
        """The part of this rank; None if it is in ``mesh``."""
        return cls(dist.get_rank(), mesh) if mesh.get_coordinate() is None else None

    def equip(self, kit: Kit) -> None:
        if not kit.plan.runs_on_meta:
            kit.shards, kit.encoding = Shards(kit.layout, kit.rank), Encoding(kit.layout, kit.rank)
            kit.group_type = DormantGroup


class DormantGroup(FSDPParamGroup):
    """A group whose buffers are on the meta device, and whose sharded parameters are DTensors without local elements.

    These parameters are on the mesh's device (if offloaded: on the CPU), so that any optimizer can be made with them. The
    settings of the user, such as a divisor of gradients, are stored as in other groups.
    """

    has_shards = False

    def _allocate(self, device: torch.device, dtype: torch.dtype) -> None:
        # The layout and its views are those of a rank with shards, so that reshard_to can compare and plan on this rank, too.
        super()._allocate(torch.device("meta"), dtype)

    def _init_param(self, index: int, found: FoundParam) -> FSDPParam:
        device = torch.device("cpu") if self.offloads_params else device_of(self.dp.mesh)
        nothing = torch.empty(0, dtype=found.value.dtype, device=device)
        sharded = nn.Parameter(found.distribution.sharded(nothing, self.layout, index), found.value.requires_grad)
        keep_attributes(found.value, sharded)
        return FSDPParam(found.fqn, found.registered_names, found.distribution, sharded, requires_grad=sharded.requires_grad)

    def unshard(self, wait: bool = True, phase: Phase = Phase.BOTH) -> None:
        """Raise: this rank takes part in no all-gather."""
        self.check_awake()

    def check_awake(self) -> None:
        """Raise: only ranks of the mesh run the module."""
        raise RuntimeError(
            f"rank {dist.get_rank()} is not in the mesh {self.dp.mesh}, and holds no shards of {self.names}: only ranks of the "
            "mesh run the module. To give this rank shards, call reshard_to(model, optimizer, mesh) on all ranks, with a mesh "
            "that has this rank"
        )

    check_forward = check_awake
