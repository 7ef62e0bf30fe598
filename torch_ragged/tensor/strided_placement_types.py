"""StridedRaggedShard, for FSDP on top of tensor or expert parallelism, and the choice of FSDP's placement for a tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from torch.distributed.tensor.placement_types import Placement

from torch_ragged.tensor._cut_placement import chunk_of, cut_of
from torch_ragged.tensor._ownership import Chunk, Run, Whole
from torch_ragged.tensor.placement_types import RaggedShard, _int_tuple, _Ragged, normalize_placements

__all__ = ["StridedRaggedShard", "fsdp_placement"]


class StridedRaggedShard(_Ragged):
    """RaggedShard of a tensor that was first cut by ``Shard(0)`` on mesh dimensions to the right.

    Tensor or expert parallelism shards first and FSDP second, but FSDP's mesh dimension comes first. So dimension 0 is
    cut into ``split_factor`` even pieces, and each rank owns its run of units of *every* piece. ``Shard(0)`` over
    ``split_factor`` ranks to the right then selects one piece. A (4, 2) tensor on a (2, 2) mesh under
    ``(StridedRaggedShard((0, 1), (1, 3), split_factor=2), Shard(0))``::

                          mesh column 0             mesh column 1
        row 0  | a0 a1 |  (0, 0): [a0]              (0, 1): [c0]
        row 1  | b0 b1 |  (1, 0): [a1 b0 b1]        (1, 1): [c1 d0 d1]
        row 2  | c0 c1 |
        row 3  | d0 d1 |  rows 0-1 are piece 0, rows 2-3 piece 1

    If no mesh dimension to the right shards dimension 0, the 1-D local tensor holds the runs of all pieces in order.

    Source: veScale-FSDP's StridedRaggedShard; torch's ``_StridedShard`` is its equivalent for even shards.

    Args:
        dims, local_units: as for :class:`RaggedShard`, of each piece.
        split_factor: the number of pieces: the number of ranks that shard dimension 0 to the right, or a multiple of it.

    Raises:
        ValueError: as :class:`RaggedShard`; ``split_factor`` is less than 1.
        TypeError: a dimension, unit or the split factor is not an integer.
    """

    __slots__ = ("_split_factor",)

    _split_factor: int

    def __init__(self, dims: Sequence[int], local_units: Sequence[int], split_factor: int) -> None:
        (factor,) = _int_tuple("StridedRaggedShard", "split_factor", (split_factor,))
        if factor < 1:
            raise ValueError(f"StridedRaggedShard split_factor must be an integer >= 1, the number of pieces, got {factor}")
        object.__setattr__(self, "_split_factor", factor)
        super().__init__(dims, local_units, factor)

    @property
    def split_factor(self) -> int:
        """The number of pieces of dimension 0."""
        return self._split_factor

    @property
    def cut(self) -> Run:
        """As of RaggedShard, in each of ``split_factor`` pieces of dimension 0."""
        return Run(len(self._dims), self._units, self._split_factor)

    def replace_dims(self, dims: tuple[int, ...]) -> StridedRaggedShard:
        return StridedRaggedShard(dims, self._units, self._split_factor)

    def __reduce__(self) -> tuple[Any, ...]:
        return StridedRaggedShard, (self._dims, self._units, self._split_factor)

    def __repr__(self) -> str:
        return f"StridedRaggedShard(dims={self._dims}, local_units={self._units!r}, split_factor={self._split_factor})"

    def __str__(self) -> str:
        return f"SRS({','.join(map(str, self._dims))})[{self._units}]/{self._split_factor}"


def fsdp_placement(
    shape: Sequence[int],
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    *,
    ranks: int,
    granularity: int = 1,
    local_numels: Sequence[int] | None = None,
) -> RaggedShard | StridedRaggedShard:
    """The ragged placement with which FSDP shards a tensor that tensor or expert parallelism may have sharded before.

    Put it to the left of ``placements``, on a mesh dimension of ``ranks``: ``[fsdp_placement(...), *placements]``.

    ======================  ==========================================================================================
    ``placements`` contain  result
    ======================  ==========================================================================================
    no Shard                RaggedShard over the fewest leading dimensions whose slices are whole in every cut
    ``Shard(0)``            the same for each piece: StridedRaggedShard, whose split_factor is the number of pieces
    ``Shard(d)``, d > 0     at most ``d`` dimensions; cuts fall on multiples of ``lcm(granularity, prod(local_shape[d:]))``
    InterleavedShard        as ``Shard`` of its dimension
    ======================  ==========================================================================================

    Args:
        shape: the tensor's global shape.
        placements: the tensor's placements before FSDP.
        mesh_shape: the shape of the mesh of ``placements``.
        ranks: the size of FSDP's mesh dimension.
        granularity: elements of the local piece that stay together; cuts fall on multiples of it.
        local_numels: elements of the local piece for each rank; if None, as even as the granularity allows.

    Raises:
        ValueError: the tensor is sharded unevenly, or has a placement that no ragged one can be combined with; the
            ``local_numels`` do not add up to the piece, or cut inside a block or a sharded dimension.
    """
    shape, mesh_shape = tuple(shape), tuple(mesh_shape)
    placed = normalize_placements(tuple(placements), shape, mesh_shape)
    local, factor = _even_piece(shape, placed, mesh_shape)
    depth = min((chunk.dim for p in placed if (chunk := chunk_of(p)) is not None and chunk.dim > 0), default=len(shape))
    numel = math.prod(local)
    block = math.lcm(granularity, math.prod(local[depth:]) or 1)
    if local_numels is None:
        blocks = [-(-numel // block) * rank // ranks for rank in range(ranks + 1)]
        local_numels = [min(b * block, numel) - min(a * block, numel) for a, b in zip(blocks, blocks[1:])]
    edges = [0, *itertools.accumulate(local_numels)]
    if len(local_numels) != ranks or edges[-1] != numel or any(edge % block and edge != numel for edge in edges):
        raise ValueError(
            f"local_numels {tuple(local_numels)} cannot cut a local piece of shape {tuple(local)} over {ranks} ranks: give one "
            f"number per rank; they must add up to {numel}, and each cut must fall on a multiple of {block}"
        )
    if not numel:
        units, dims = (1,) + (0,) * (ranks - 1), 0
    else:
        dims = next(k for k in range(depth + 1) if all(edge % math.prod(local[k:]) == 0 for edge in edges))
        units = tuple(n // math.prod(local[dims:]) for n in local_numels)
    prefix = tuple(range(dims))
    return RaggedShard(prefix, units) if factor == 1 else StridedRaggedShard(prefix, units, factor)


def _even_piece(
    shape: tuple[int, ...], placements: tuple[Placement, ...], mesh_shape: tuple[int, ...]
) -> tuple[list[int], int]:
    """The local shape after the even shards of ``placements``, and the number of pieces into which they cut dimension 0."""
    local, pieces = list(shape), 1
    for placement, size in zip(placements, mesh_shape):
        cut = cut_of(placement)
        if isinstance(cut, Whole):
            continue
        if not isinstance(cut, Chunk) or cut.split_factor > 1:
            raise ValueError(f"FSDP cannot shard a tensor placed as {placement}: redistribute it to Replicate or Shard first")
        if local[cut.dim] % size:
            raise ValueError(
                f"dimension {cut.dim} of shape {shape} is sharded unevenly over {size} ranks: FSDP needs even pieces. Pad the "
                "dimension, or shard another dimension"
            )
        local[cut.dim] //= size
        pieces *= size if cut.dim == 0 else 1
    return local, pieces
