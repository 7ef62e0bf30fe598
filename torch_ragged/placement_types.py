"""The placements of this package, and how any placement describes its cut of a tensor to ``_ownership``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from torch_ragged._ownership import Chunk, Cut, Run, Whole, owned

__all__ = ["RaggedShard", "cuts_of", "has_ragged", "normalize_placements"]


class RaggedShard(Placement):
    """Cut a tensor's row-major storage into units and give each rank of a mesh dimension a run of them.

    The tensor's leading dimensions ``dims`` hold ``P = prod(shape[:len(dims)])`` slices, which make
    ``U = sum(local_units)`` equal units; rank ``r`` owns ``local_units[r]`` of them, after those of the ranks
    before it. Its local tensor is 1-D and contiguous. A (4, 3) tensor under ``RaggedShard((0,), (1, 2, 0, 1))``::

        row 0   | a0 a1 a2 |   rank 0: [a0 a1 a2]
        row 1   | b0 b1 b2 |   rank 1: [b0 b1 b2 c0 c1 c2]
        row 2   | c0 c1 c2 |   rank 2: []
        row 3   | d0 d1 d2 |   rank 3: [d0 d1 d2]

    It is a value: hashable, comparable (units are relative, ``(1, 1)`` equals ``(2, 2)``), picklable. It is not
    a ``Shard``, so code that handles ``Shard`` never takes it for one.

    Source: veScale-FSDP's RaggedShard; RFC pytorch#169320.

    Args:
        dims: the prefix ``(0, ..., k-1)`` of the tensor's dimensions; ``()`` makes the whole tensor one unit.
            Negative values are normalised against the tensor when the placement is used.
        local_units: one integer >= 0 per rank of the mesh dimension, not all zero.

    Raises:
        ValueError: ``dims`` is no prefix, a unit is negative, or all units are zero.
        TypeError: a dimension or unit is not an integer.
    """

    __slots__ = ("_dims", "_key", "_local_units")

    _dims: tuple[int, ...]
    _local_units: tuple[int, ...]
    _key: tuple[Any, ...]

    def __init__(self, dims: Sequence[int], local_units: Sequence[int]) -> None:
        super().__init__()
        dims, units = _int_tuple("dims", dims), _int_tuple("local_units", local_units)
        if all(d >= 0 for d in dims) and dims != tuple(range(len(dims))):
            raise ValueError(f"RaggedShard dims must be a prefix (0, ..., k-1) of the tensor's dimensions, got {dims}")
        if any(u < 0 for u in units) or not any(units):
            raise ValueError(f"RaggedShard local_units must be integers >= 0, one per rank and not all zero, got {units}")
        divisor = math.gcd(*units)
        object.__setattr__(self, "_dims", dims)
        object.__setattr__(self, "_local_units", units)
        object.__setattr__(self, "_key", (dims, tuple(u // divisor for u in units)))

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimension prefix, as given."""
        return self._dims

    @property
    def local_units(self) -> tuple[int, ...]:
        """The units of each rank, as given."""
        return self._local_units

    def normalize(self, ndim: int) -> RaggedShard:
        """This placement with non-negative ``dims`` for a tensor of ``ndim`` dimensions.

        Raises:
            ValueError: the dims are no prefix of the dimensions of such a tensor.
        """
        dims = tuple(d + ndim if d < 0 else d for d in self._dims)
        if dims != tuple(range(len(dims))) or len(dims) > ndim:
            raise ValueError(
                f"RaggedShard dims must be a prefix (0, ..., k-1) of the tensor's {ndim} dimensions, got {self._dims}"
            )
        return self if dims == self._dims else RaggedShard(dims, self._local_units)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"RaggedShard is immutable: cannot set {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return RaggedShard, (self._dims, self._local_units)

    def __copy__(self) -> RaggedShard:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> RaggedShard:
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RaggedShard) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"RaggedShard(dims={self._dims}, local_units={self._local_units})"

    def __str__(self) -> str:
        return f"RS({','.join(map(str, self._dims))})[{','.join(map(str, self._local_units))}]"

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        return repr(self), {"RaggedShard": RaggedShard}


torch.serialization.add_safe_globals([RaggedShard])


def _int_tuple(name: str, values: Sequence[int]) -> tuple[int, ...]:
    if isinstance(values, int) or not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
        raise TypeError(f"RaggedShard {name} must be a sequence of integers, got {values!r}")
    return tuple(values)


def has_ragged(placements: Sequence[Placement]) -> bool:
    """Whether any of the placements is one of this package's."""
    return any(isinstance(p, RaggedShard) for p in placements)


def normalize_placements(
    placements: Sequence[Placement], shape: Sequence[int], mesh_shape: Sequence[int]
) -> tuple[Placement, ...]:
    """Check placements that hold a RaggedShard against a tensor shape and a mesh shape; normalise negative dims.

    Raises:
        ValueError: there is not one placement per mesh dimension, a RaggedShard has not one unit count per
            rank, its units do not divide the tensor, or the placements have no meaning together.
    """
    if len(placements) != len(mesh_shape):
        raise ValueError(
            f"placements must name one placement per mesh dimension: got {len(placements)} for a mesh of shape "
            f"{tuple(mesh_shape)}"
        )
    result: list[Placement] = []
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, RaggedShard):
            if len(placement.local_units) != mesh_shape[mesh_dim]:
                raise ValueError(
                    f"{placement!r} has {len(placement.local_units)} local_units, but mesh dimension {mesh_dim} has "
                    f"{mesh_shape[mesh_dim]} ranks: give one unit count per rank"
                )
            placement = placement.normalize(len(shape))
        elif isinstance(placement, Shard) and placement.dim < 0:
            placement = Shard(placement.dim + len(shape))
        result.append(placement)
    cuts = cuts_of(tuple(result))
    # Uneven chunks to the left of a run leave pieces of different sizes: each must fit the units.
    for coordinate in itertools.product(
        *(range(size) if isinstance(cut, Chunk) else (0,) for cut, size in zip(cuts, mesh_shape))
    ):
        owned(tuple(shape), tuple(mesh_shape), cuts, coordinate)
    return tuple(result)


def cuts_of(placements: tuple[Placement, ...]) -> tuple[Cut, ...]:
    """The cut of each placement, for :func:`torch_ragged._ownership.owned`.

    Raises:
        ValueError: a placement is none of Replicate, Partial, Shard, RaggedShard.
    """
    cuts: list[Cut] = []
    for placement in placements:
        if isinstance(placement, RaggedShard):
            cuts.append(Run(len(placement.dims), placement.local_units))
        elif isinstance(placement, Shard):
            cuts.append(Chunk(placement.dim))
        elif isinstance(placement, (Replicate, Partial)):
            cuts.append(Whole())
        else:
            raise ValueError(f"{placement} cannot stand beside a RaggedShard: use Replicate, Partial, Shard or RaggedShard")
    return tuple(cuts)
