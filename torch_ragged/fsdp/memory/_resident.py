"""``BufferPlacements`` (ZeRO-1, 2, 3, hierarchical), and Resident, which keeps parameters gathered until an optimizer step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from torch_ragged._register._torch import flatten
from torch_ragged.fsdp.comm._collectives import Collectives, Levels, Work, done
from torch_ragged.fsdp.core._dbuffer import DBuffer, MemoryLog
from torch_ragged.fsdp.core._kit import FeaturePart, Need, Terms
from torch_ragged.fsdp.core._mesh import DataParallelMesh
from torch_ragged.fsdp.core.encodings._plain import Encoding, Keeper, Shards

__all__ = ["HIERARCHICAL", "ZERO1", "ZERO2", "ZERO3", "BufferPlacements", "Resident"]


@dataclass(frozen=True)
class BufferPlacements(FeaturePart):
    """The placements of a group's buffers between uses, one per mesh dimension, for ``fully_shard(placements=)``.

    =================  ======  ============  ============  ============  =================================================
    name               mesh    parameters    gradients     optimizer     per step and group
    =================  ======  ============  ============  ============  =================================================
    ``ZERO3``          1-D     S             S             S             all-gather in forward and backward, reduce
    ``ZERO2``          1-D     R             S             S             all-gather once, reduce
    ``ZERO1``          1-D     R             P             S             all-gather once, reduce once per optimizer step
    HSDP, the default  2-D     R, S          R, S          R, S          as ZERO3 within a replica, all-reduce across
    ``HIERARCHICAL``   2-D     R, S          S, S          S, S          all-gather across once, within twice; reduce both
    =================  ======  ============  ============  ============  =================================================

    S is ``Shard(0)``, R is ``Replicate()``, P is ``Partial()``. With P, gradients stay unreduced until the last backward of an
    optimizer step: see ``set_is_last_backward``. DTensor parameters, ``.grad`` and checkpoints have the optimizer's
    placement. Parameters that are all-gathered once serve one forward and its backward, and the next passes, as long as
    gradients accumulate unreduced. (Rajbhandari et al., ZeRO, 2020; Wang et al., ZeRO++, 2023.)

    Raises:
        ValueError: the three placements are in no row above.
    """

    parameters: tuple[Placement, ...]
    gradients: tuple[Placement, ...]
    optimizer: tuple[Placement, ...]

    def __post_init__(self) -> None:
        if (self.parameters, self.gradients, self.optimizer) not in _TERMS:
            raise ValueError(
                f"{self} is not supported; expected ZERO1, ZERO2 or ZERO3 on a 1-D mesh, HIERARCHICAL or HSDP, all three "
                "(Replicate(), Shard(0)), on a 2-D one"
            )

    @property
    def stay_gathered(self) -> bool:
        """Whether parameters stay gathered, at least over the first mesh dimension, although optimizer state is sharded."""
        return self.parameters[0] != self.optimizer[0]

    @property
    def terms(self) -> Terms:
        return _TERMS[self.parameters, self.gradients, self.optimizer]

    @property
    def makes_groups(self) -> bool:  # type: ignore[override]
        return self.stay_gathered and len(self.optimizer) == 2  # HIERARCHICAL.

    def check_mesh(self, mesh: DeviceMesh, dims: Any) -> None:
        """Raise if they are for a mesh with another number of data-parallel dimensions."""
        ndim = mesh.ndim if dims is None else bool(dims.replicate_names) + bool(dims.shard_names)
        if len(self.optimizer) != ndim:
            raise ValueError(f"{self.terms.given} is for a mesh with {len(self.optimizer)} dimensions, got {ndim} of {mesh}")

    def shards_over(self, dp: DataParallelMesh) -> DataParallelMesh:
        """Both dimensions as one, whose groups know the two."""
        if not self.makes_groups:
            return dp
        flat = DataParallelMesh.of(flatten(dp.mesh))
        flat.levels = Levels(dp.mesh.get_group(0), dp.mesh.get_group(1))
        return flat

    def keeper(self, dp: DataParallelMesh, encoding: Encoding, log: MemoryLog) -> Keeper | None:
        """None if nothing stays gathered, or if a tensor type has its own all-gather."""
        if not self.stay_gathered or dp.shard_group is None or encoding.makes_params:
            return None
        return Resident(dp.levels or Levels(dp.shard_group, None), log)


class Resident(Keeper):
    """Keeps parameters gathered, in their compute dtype, until the optimizer changes them.

    If a node has one rank (ZeRO-1, ZeRO-2), it keeps the whole gathered buffer. Otherwise the rank with index j in its node
    keeps the shards of the ranks with index j in all nodes. Forward and backward all-gather within the node only::

        gathered      | n0 j0 | n0 j1 | n1 j0 | n1 j1 |
        resident at j0    ^               ^                one all-gather across nodes, once per optimizer step
        within a node | n0 j0   n0 j1 |                    one all-gather within the node for the shards of each node,
                                      | n1 j0   n1 j1 |    all in place
    """

    def __init__(self, levels: Levels, log: MemoryLog) -> None:
        self.levels, self._log = levels, log
        self.keeps_buffer = levels.within is None
        self._kept: DBuffer | None = None
        self._versions: list[int] | None = None

    def twin(self, log: MemoryLog) -> Resident:
        return Resident(self.levels, log)

    @property
    def nbytes(self) -> int:
        return 0 if self._kept is None else self._kept.nbytes

    def invalidate(self) -> None:
        self._versions = None

    def reset(self) -> None:
        self._log.note(-self.nbytes)
        self._kept = self._versions = None

    def all_gather(self, shards: Shards, encoding: Encoding, versions: list[int], collectives: Collectives) -> Work:
        """Fill the gathered buffer. If the resident parameters have these ``versions``, all-gather within the node only."""
        # Versions count operations, which are equal on all ranks. So ranks agree on whether to all-gather across nodes.
        is_current, self._versions = versions == self._versions, versions
        if self.keeps_buffer:
            return done if is_current else encoding.all_gather(shards, collectives)
        gathered = encoding.buffer
        if self._kept is None:
            form = gathered.layout, (_R, _S), gathered.rank, gathered.flat.dtype, gathered.flat.device
            with torch.inference_mode(False):  # Later forwards in other modes write to it, too.
                self._kept = DBuffer(*form, log=self._log, levels=self.levels)
            is_current = False
        if not is_current:
            # Wait: the all-gather within the node reads the result.
            shards.buffer.redistribute(self._kept.placements, collectives, out=self._kept).wait()
        return self._kept.redistribute((Replicate(), Replicate()), collectives, out=gathered)


_S, _R, _P = Shard(0), Replicate(), Partial()
_TERMS: dict[tuple[tuple[Placement, ...], ...], Terms] = {
    ((_S,), (_S,), (_S,)): Terms("ZERO3"),
    ((_R,), (_S,), (_S,)): Terms("ZERO2", breaks=(Need.FREED,)),
    ((_R,), (_P,), (_S,)): Terms("ZERO1", breaks=(Need.FREED,)),
    ((_R, _S), (_R, _S), (_R, _S)): Terms("HSDP"),
    ((_R, _S), (_S, _S), (_S, _S)): Terms(
        "HIERARCHICAL",
        {
            Need.EQUAL_SHARDS: ": use a 1-D mesh, or HSDP",
            Need.IN_MESH: ": call fully_shard on ranks of the mesh only, or use HSDP, which leaves placements out",
            Need.OWN_MESH: ", by which parameters are DTensors on the whole mesh: leave placements out, for HSDP, or pass the "
            "two data-parallel dimensions as the mesh",
        },
        breaks=(Need.FREED, Need.MOVABLE),
    ),
}

ZERO3, ZERO2, ZERO1, _, HIERARCHICAL = (BufferPlacements(*row) for row in _TERMS)
