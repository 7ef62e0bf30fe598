"""InterleavedShard: fused tensors, of which each segment is cut by itself. It must not know the ragged placements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Union

from torch_ragged.tensor._cut_placement import CutPlacement
from torch_ragged.tensor._ownership import Chunk

__all__ = ["InterleavedShard", "is_int"]

_MOST_SEGMENTS = 65536


class InterleavedShard(CutPlacement):
    """Cut a tensor dimension into segments, and give each rank an even chunk of every segment.

    A fused weight holds several matrices, one behind the other: query, key and value, or gate and up. Tensor parallelism must
    cut each of them by itself. A rank's local tensor has its chunk of each segment, in order. A (8, 2) tensor of three segments
    of 4, 2 and 2 rows under ``InterleavedShard(0, (2, 1, 1))`` on 2 ranks::

        row 0  | q0 |  rank 0         row 4  | k0 |  rank 0         local tensor of rank 0:  q0 q1 k0 v0
        row 1  | q1 |  rank 0         row 5  | k1 |  rank 1         local tensor of rank 1:  q2 q3 k1 v1
        row 2  | q2 |  rank 1         row 6  | v0 |  rank 0
        row 3  | q3 |  rank 1         row 7  | v1 |  rank 1

    Sizes are relative: ``(2, 1, 1)`` and ``(4, 2, 2)`` are equal, and an integer ``n`` means ``n`` equal segments. So the
    placement survives views that split or merge what lies inside of a row: (8, 2) to (16,). Several equal segments own the
    same elements as torch's ``_StridedShard(dim, split_factor=n)``, one segment the same as ``Shard(dim)``: a redistribution
    between them moves nothing.

    Ops that treat the rows of ``dim`` alike (element-wise, matrix products, reductions, norms and attention over other
    dimensions) run locally. ``split`` at the edges of segments runs locally and gives each output its segments; ``cat`` puts
    segments together. Other ops gather first, as for ``Shard``, or raise.

    Legal placements on other mesh dimensions are Replicate, Partial, Shard and InterleavedShard of any dimension. To the
    left of ``InterleavedShard(0)`` over ``n`` ranks, FSDP uses ``StridedRaggedShard(..., split_factor=n)``; to the left of
    ``InterleavedShard(d)``, a RaggedShard with at most ``d`` dims.

    Source: veScale's InterleavedShard, with segments of different sizes.

    Args:
        dim: the tensor dimension. A negative value is normalized against the tensor when the placement is used.
        sizes: the sizes of the segments, as positive integers that count as ratios; or the number of equal segments.

    Raises:
        ValueError: a size is less than 1, or there is none. When it is used: the sizes do not divide the dimension in these
            proportions, or the ranks of the mesh dimension do not divide a segment.
        TypeError: the dimension or a size is not an integer.
    """

    __slots__ = ("_dim", "_ratios")
    is_flat = False

    _dim: int
    _ratios: tuple[int, ...]

    def __init__(self, dim: int, sizes: Union[int, Sequence[int]]) -> None:
        super().__init__()
        given: Any = tuple(sizes) if isinstance(sizes, Sequence) else sizes
        if not is_int(dim) or not all(map(is_int, given if isinstance(given, tuple) else (given,))):
            raise TypeError(f"InterleavedShard takes a dimension and integers, got dim={dim!r}, sizes={sizes!r}")
        count = given if isinstance(given, int) else len(given)
        if not 1 <= count <= _MOST_SEGMENTS or (isinstance(given, tuple) and min(given) < 1):
            raise ValueError(
                "InterleavedShard sizes must be positive integers, one per segment, or the number of segments, of which there "
                f"are 1 to {_MOST_SEGMENTS}, got {sizes!r}"
            )
        values = (1,) * given if isinstance(given, int) else given
        divisor = math.gcd(*values)
        object.__setattr__(self, "_dim", dim)
        object.__setattr__(self, "_ratios", tuple(size // divisor for size in values))

    @property
    def dim(self) -> int:
        """The tensor dimension, as given."""
        return self._dim

    @property
    def ratios(self) -> tuple[int, ...]:
        """The sizes of the segments in lowest terms."""
        return self._ratios

    @property
    def cut(self) -> Chunk:
        return Chunk(self._dim, ratios=self._ratios if len(self._ratios) > 1 else ())

    def is_shard(self, dim: int | None = None) -> bool:
        return dim is None or dim == self._dim

    def normalize(self, ndim: int, ranks: int | None = None, mesh_dim: int = 0) -> InterleavedShard:
        return self if self._dim >= 0 else self.move_to(self._dim + ndim)

    def move_to(self, dim: int) -> InterleavedShard:
        return InterleavedShard(dim, self._ratios)

    def segments(self, size: int) -> tuple[int, ...]:
        """The sizes of the segments of a dimension of ``size``.

        Raises:
            ValueError: the sizes do not divide the dimension in their proportions.
        """
        return Chunk(self._dim, ratios=self._ratios).segments(size)

    def fits(self, size: int, ranks: int) -> bool:
        """Whether the placement can cut a dimension of ``size`` over ``ranks``."""
        unit, rest = divmod(size, sum(self._ratios))
        return not rest and all(unit * ratio % ranks == 0 for ratio in self._ratios)

    def __reduce__(self) -> tuple[Any, ...]:
        return InterleavedShard, (self._dim, self._ratios)

    def __repr__(self) -> str:
        # In lowest terms: caches may hand out an equal placement that was written otherwise, on some ranks only.
        return f"InterleavedShard(dim={self._dim}, sizes={len(self._ratios) if set(self._ratios) == {1} else self._ratios})"

    def __str__(self) -> str:
        return f"IS({self._dim})[{','.join(map(str, self._ratios))}]"


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
