"""Whole rows: the slices of a ragged tensor that each rank holds, and RaggedRows, the placement of strided views.

Users must not create RaggedRows; only ops do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from torch_ragged.tensor._local_tensor import coordinate_of, on_each_rank
from torch_ragged.tensor._ops._rules import Spec
from torch_ragged.tensor._ownership import Run
from torch_ragged.tensor._redistribute import redistribute_local
from torch_ragged.tensor._units import Units
from torch_ragged.tensor.placement_types import RaggedShard, _Ragged

__all__ = ["RaggedRows", "Rows", "flat_cut", "flat_placement", "has_ragged_rows", "redistribute_rows", "rows_of"]


class RaggedRows(_Ragged):
    """A strided view of a RaggedShard tensor: any dimensions ``dims`` are cut into units, the local tensor has all dimensions.

    Views such as ``t()``, ``x[:, :3]`` and ``split`` of inner dimensions have this placement if the result is not row-major,
    because no flat local tensor can alias it. A (4, 3) tensor ``x`` under ``RaggedShard((0,), (1, 2, 0, 1))`` has a (3, 4)
    ``x.t()`` under ``RaggedRows((1,), (1, 2, 0, 1))``::

        rank 0    rank 1   rank 2  rank 3
        | a0 |  | b0 c0 |   |  |   | d0 |
        | a1 |  | b1 c1 |   |  |   | d1 |
        | a2 |  | b2 c2 |   |  |   | d2 |

    If several dimensions are cut together, ``dims`` has the outermost in storage first, and the local tensor has size 1 in all
    of them except the last. ``distribute_tensor`` does not accept it. ``redistribute`` to Replicate or Shard leads back.
    """

    __slots__ = ()

    def __init__(self, dims: Sequence[int], local_units: Sequence[int]) -> None:
        super().__init__(range(len(dims)), local_units, *dims)
        object.__setattr__(self, "_dims", tuple(dims))

    @property
    def cut(self) -> Run:
        raise ValueError(
            f"{self!r} is the placement of a strided view of whole rows, which flat local tensors cannot hold: "
            "redistribute it to Replicate or Shard first"
        )

    def normalize(self, ndim: int, ranks: int | None = None, mesh_dim: int = 0) -> RaggedRows:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return RaggedRows, (self._dims, self._units)

    def __repr__(self) -> str:
        return f"RaggedRows(dims={self._dims}, local_units={self._units!r})"

    def __str__(self) -> str:
        return f"RR({','.join(map(str, self._dims))})[{self._units}]"


def has_ragged_rows(placements: Sequence[Placement]) -> bool:
    """Whether the local tensor is a strided view with all dimensions instead of a flat tensor."""
    return any(isinstance(p, RaggedRows) for p in placements)


@dataclass(frozen=True)
class Rows:
    """The cut of a tensor into whole slices over ``dims``: rank ``r`` of ``mesh_dim`` holds ``counts[r]`` slices.

    If the local tensor is ``flat``, ``dims`` is a prefix of the tensor's dimensions.
    """

    mesh_dim: int
    dims: tuple[int, ...]
    counts: Units
    flat: bool

    def count(self, spec: Spec) -> int:
        """The number of slices of this rank; 0 on a rank outside the mesh."""
        coordinate = coordinate_of(spec.mesh)
        return self.counts[coordinate[self.mesh_dim]] if coordinate is not None else 0

    def local_shape(self, shape: Sequence[int], count: int) -> tuple[int, ...]:
        """The shape of ``count`` slices: all dimensions of the tensor, the cut ones as (1, ..., 1, count)."""
        sizes = list(shape)
        for dim in self.dims[:-1]:
            sizes[dim] = 1
        sizes[self.dims[-1]] = count
        return tuple(sizes)


def _only_ragged(spec: Spec) -> tuple[int, RaggedShard | RaggedRows] | None:
    """The mesh dimension and placement of a ragged cut; None if another mesh dimension shards the tensor too."""
    sharded = [(i, p) for i, p in enumerate(spec.placements) if not isinstance(p, (Replicate, Partial))]
    mesh_dim, placement = sharded[0] if len(sharded) == 1 else (0, None)
    return (mesh_dim, placement) if isinstance(placement, (RaggedShard, RaggedRows)) else None


def rows_of(spec: Spec) -> Rows | None:
    """The whole slices that ranks hold, over as few leading dimensions as the units allow.

    None if the tensor is 0-D or empty, or if another mesh dimension shards it too.
    """
    only = _only_ragged(spec)
    if only is None or not spec.shape:
        return None
    mesh_dim, placement = only
    units, total = placement.units, placement.units.total
    if isinstance(placement, RaggedRows):
        size = math.prod(spec.shape[d] for d in placement.dims)
        return Rows(mesh_dim, placement.dims, units.scaled(size, total), flat=False)
    if 0 in spec.shape[: max(len(placement.dims), 1)]:
        return None
    for length in range(1, len(spec.shape) + 1):
        prefix = math.prod(spec.shape[:length])
        if all([u * prefix % total == 0 for u in units.values]):
            return Rows(mesh_dim, tuple(range(length)), units.scaled(prefix, total), flat=True)
    return None


def flat_cut(spec: Spec) -> tuple[int, Units] | None:
    """The mesh dimension that cuts the row-major storage, and the number of elements of each rank.

    None for strided views, and if another mesh dimension shards the tensor too.
    """
    only = _only_ragged(spec)
    if only is None or isinstance(only[1], RaggedRows):
        return None
    units = only[1].units
    return only[0], units.scaled(math.prod(spec.shape), units.total)


def flat_placement(shape: Sequence[int], counts: Units) -> RaggedShard:
    """The placement, over as few dimensions as possible, under which ranks hold ``counts`` elements of the storage."""
    if not counts.total:
        return RaggedShard(tuple(range(len(shape))), Units([(1, len(counts))]))
    for length in range(min(len(shape), 1), len(shape) + 1):
        inner = math.prod(shape[length:])
        if all([count % inner == 0 for count in counts.values]):
            return RaggedShard(tuple(range(length)), counts.scaled(1, inner))
    raise AssertionError(f"a cut of {shape} into {counts} elements")


def redistribute_rows(
    local: torch.Tensor,
    mesh: DeviceMesh,
    shape: Sequence[int],
    source: tuple[Placement, ...],
    target: tuple[Placement, ...],
) -> torch.Tensor:
    """:func:`redistribute_local` from or to a strided view, on a permuted tensor with the cut dimensions in front.

    It issues the collectives of that redistribution. To or from another ragged placement, which has no meaning for the permuted
    dimensions, it takes two: between them, the cut dimension is under Shard, so no rank has more than its part.
    """
    at, view = next((i, p) for side in (source, target) for i, p in enumerate(side) if isinstance(p, RaggedRows))
    if any(isinstance(p, _Ragged) and p != view for p in (*source, *target)):
        side, shard = source if view in source else target, Shard(view.dims[0])
        between: tuple[Placement, ...] = (*side[:at], shard, *side[at + 1 :])
        # Two exchanges, where one by way of Replicate would hold the whole tensor on each rank.
        for here, there in ((source, between), (between, target)):
            if has_ragged_rows((*here, *there)):
                local = redistribute_rows(local, mesh, shape, here, there)
            else:
                local = redistribute_local(local, mesh, shape, here, there).wait()
        return local
    order = [*view.dims, *(d for d in range(len(shape)) if d not in view.dims)]
    inverse = sorted(range(len(order)), key=order.__getitem__)
    front = RaggedShard(tuple(range(len(view.dims))), view.units)

    def in_front(placement: Placement) -> Placement:
        if isinstance(placement, _StridedShard):
            return _StridedShard(inverse[placement.dim], split_factor=placement.split_factor)
        if isinstance(placement, Shard):
            return Shard(inverse[placement.dim])
        return front if placement == view else placement

    moved = [shape[d] for d in order]
    flat = local.permute(order).contiguous()
    source_front, target_front = tuple(map(in_front, source)), tuple(map(in_front, target))
    flat = flat.view(-1) if view in source else flat
    out = redistribute_local(flat, mesh, moved, source_front, target_front).wait()

    def in_order(out: torch.Tensor) -> torch.Tensor:
        if view in target:
            units, mine = view.units, (coordinate_of(mesh) or ())[target.index(view)]
            count = math.prod(moved[: len(view.dims)]) * units[mine] // units.total
            out = out.view([1] * (len(view.dims) - 1) + [count] + moved[len(view.dims) :])
        return out.permute(inverse).contiguous()

    return on_each_rank(in_order, out)


RaggedRows.redistribute_view = staticmethod(redistribute_rows)
