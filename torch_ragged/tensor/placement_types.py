"""RaggedShard, and the check of placements that stand together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeVar

from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from torch_ragged.tensor._cut_placement import CutPlacement, chunk_of, cuts_of, of_dim
from torch_ragged.tensor._ownership import Run, check_cuts
from torch_ragged.tensor._units import Units

__all__ = ["RaggedShard", "normalize_placements", "whole_shape"]

_Self = TypeVar("_Self", bound="_Ragged")


class _Ragged(CutPlacement):
    """The base of ragged placements: a value of dims and units. Units compare as ratios: (1, 1) equals (2, 2)."""

    __slots__ = ("_dims", "_hash", "_key", "_units")

    _dims: tuple[int, ...]
    _units: Units
    _key: tuple[Any, ...]
    _hash: int

    def __init__(self, dims: Sequence[int], local_units: Sequence[int], *more: int) -> None:
        super().__init__()
        name = type(self).__name__
        dims, units = _int_tuple(name, "dims", dims), local_units
        if not isinstance(units, Units):
            units = Units.of(_int_tuple(name, "local_units", units))
        if min(dims, default=0) >= 0 and dims != tuple(range(len(dims))):
            raise ValueError(f"{name} dims must be a prefix (0, ..., k-1) of the tensor's dimensions, got {dims}")
        values, ends = units.key
        if min(values, default=0) < 0 or not any(values):
            raise ValueError(f"{name} local_units must be integers >= 0, one per rank and not all zero, got {units!r}")
        divisor = math.gcd(*values)
        key = (dims, values if divisor == 1 else tuple([u // divisor for u in values]), ends, *more)
        # Every operator call asks for the hash: it is computed once.
        for attribute, value in (("_dims", dims), ("_units", units), ("_key", key), ("_hash", hash((name, key)))):
            object.__setattr__(self, attribute, value)

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimension prefix, as given."""
        return self._dims

    @property
    def local_units(self) -> tuple[int, ...]:
        """The units of each rank, as given. Each call makes a new tuple; :attr:`units` has the same values at no such cost."""
        return tuple(self._units)

    @property
    def units(self) -> Units:
        """The units of each rank, kept as runs of ranks with equal units: their memory does not grow with the ranks."""
        return self._units

    def is_shard(self, dim: int | None = None) -> bool:
        return dim is None or dim in self._dims

    @property
    def dim(self) -> int:
        """Not an attribute: a program that reads it would compute the offsets of ``Shard(dim)``, which are others.

        Raises:
            AttributeError: always.
        """
        raise AttributeError(
            f"{self!r} has no dim, as it does not cut one dimension into chunks: use torch_ragged.owned_boxes(tensor), "
            "tensor.full_tensor(), or redistribute(placements=[Shard(dim)])"
        )

    def replace_dims(self: _Self, dims: tuple[int, ...]) -> _Self:
        """The same placement over other ``dims``."""
        raise NotImplementedError

    def normalize(self: _Self, ndim: int, ranks: int | None = None, mesh_dim: int = 0) -> _Self:
        if ranks is not None and len(self._units) != ranks:
            raise ValueError(
                f"{self!r} has {len(self._units)} local_units, but mesh dimension {mesh_dim} has {ranks} ranks: give one "
                "number of units per rank"
            )
        dims = tuple(d + ndim if d < 0 else d for d in self._dims)
        if dims != tuple(range(len(dims))) or len(dims) > ndim:
            raise ValueError(
                f"{type(self).__name__} dims must be a prefix (0, ..., k-1) of the tensor's {ndim} dimensions, got {self._dims}"
            )
        return self if dims == self._dims else self.replace_dims(dims)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return type(self) is type(other) and self._hash == other._hash and self._key == other._key  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return self._hash


class RaggedShard(_Ragged):
    """Cut a tensor's row-major storage into units and give each rank of a mesh dimension a run of them.

    The tensor's leading dimensions ``dims`` hold ``P = prod(shape[:len(dims)])`` slices. These form
    ``U = sum(local_units)`` equal units. Rank ``r`` owns ``local_units[r]`` units, which follow the units of rank ``r - 1``.
    Its local tensor is 1-D and contiguous. A (4, 3) tensor under ``RaggedShard((0,), (1, 2, 0, 1))``::

        row 0   | a0 a1 a2 |   rank 0: [a0 a1 a2]
        row 1   | b0 b1 b2 |   rank 1: [b0 b1 b2 c0 c1 c2]
        row 2   | c0 c1 c2 |   rank 2: []
        row 3   | d0 d1 d2 |   rank 3: [d0 d1 d2]

    It is a value: hashable, picklable and comparable (units are relative: ``(1, 1)`` equals ``(2, 2)``). It is not
    a ``Shard``, so code that handles ``Shard`` never mistakes it for one.

    Legal placements on other mesh dimensions are Replicate, Partial, any Shard to its left (applied first), and
    ``Shard(d)`` with ``d >= len(dims)`` to its right.

    Source: veScale-FSDP's RaggedShard; RFC pytorch#169320.

    Args:
        dims: the prefix ``(0, ..., k-1)`` of the tensor's dimensions; ``()`` makes the whole tensor one unit.
            Negative values are normalized against the tensor when the placement is used.
        local_units: one integer >= 0 per rank of the mesh dimension, not all zero.

    Raises:
        ValueError: ``dims`` is not a prefix, a unit is negative, or all units are zero.
        TypeError: a dimension or unit is not an integer.
    """

    __slots__ = ()

    def __init__(self, dims: Sequence[int], local_units: Sequence[int]) -> None:
        super().__init__(dims, local_units)

    @classmethod
    def of_blocks(cls, shape: Sequence[int], block_numel: int, ranks: int) -> RaggedShard:
        """Cut a tensor of ``shape`` into blocks of ``block_numel`` consecutive elements; each rank owns a run of whole blocks.

        Of ``n`` blocks, each rank owns ``ceil(n / ranks)``, except the last ranks, which own the rest or nothing.

        Raises:
            ValueError: ``block_numel`` or ``ranks`` is not a positive integer, or a block does not divide the tensor.
        """
        numel = math.prod(shape)
        if min(block_numel, ranks) < 1 or numel % block_numel or not numel:
            raise ValueError(
                f"RaggedShard.of_blocks cannot cut a tensor of shape {tuple(shape)} into blocks of {block_numel} elements for "
                f"{ranks} ranks: pass positive numbers, and a block that divides the {numel} elements"
            )
        count = numel // block_numel
        dims = next(k for k in range(len(shape) + 1) if math.prod(shape[:k]) % count == 0)
        most = -(-count // ranks)
        return cls(range(dims), [min(most, max(0, count - rank * most)) for rank in range(ranks)])

    @property
    def cut(self) -> Run:
        """Runs of the flattened ``dims``: rank ``r`` has ``local_units[r]`` units."""
        return Run(len(self._dims), self._units)

    def replace_dims(self, dims: tuple[int, ...]) -> RaggedShard:
        return RaggedShard(dims, self._units)

    def __reduce__(self) -> tuple[Any, ...]:
        return RaggedShard, (self._dims, self._units)

    def __repr__(self) -> str:
        return f"RaggedShard(dims={self._dims}, local_units={self._units!r})"

    def __str__(self) -> str:
        return f"RS({','.join(map(str, self._dims))})[{self._units}]"


def _int_tuple(placement: str, name: str, values: Sequence[int]) -> tuple[int, ...]:
    are_integers = not isinstance(values, int)
    for kind in set(map(type, values)) if are_integers else ():
        are_integers = are_integers and issubclass(kind, int) and kind is not bool
    if not are_integers:
        expected = "an integer" if name == "split_factor" else "a sequence of integers"
        raise TypeError(f"{placement} {name} must be {expected}, got {values[0] if name == 'split_factor' else values!r}")
    return tuple(values)


def whole_shape(local: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int]) -> tuple[int, ...]:
    """The global shape of a local tensor of shape ``local`` if all shards are even. No placement is ragged."""
    shape = list(local)
    for placement, ranks in zip(placements, mesh_shape):
        if placement.is_shard() or isinstance(placement, _StridedShard):  # torch's strided shard says no in some versions.
            shape[placement.dim] *= ranks  # type: ignore[attr-defined]
    return tuple(shape)


def normalize_placements(
    placements: tuple[Placement, ...], shape: tuple[int, ...], mesh_shape: tuple[int, ...]
) -> tuple[Placement, ...]:
    """Check placements, one of which says itself how it cuts, against a tensor shape and a mesh shape; normalize negative dims.

    It is integer arithmetic without communication: all ranks that pass the same arguments get the same result or error.

    Raises:
        ValueError: the number of placements is not the number of mesh dimensions, the number of units is not the number of
            ranks, the units do not divide the tensor, or the placements have no meaning together.
    """
    units = tuple([placement.units.key for placement in placements if isinstance(placement, _Ragged)])
    return _normalized(placements, units, shape, mesh_shape)


@lru_cache(maxsize=65536)
def _normalized(
    placements: tuple[Placement, ...], units: tuple[Any, ...], shape: tuple[int, ...], mesh_shape: tuple[int, ...]
) -> tuple[Placement, ...]:
    """As above. ``units`` completes the cache key: (1, 1) and (2, 2) make equal placements, legal for other tensors."""
    if len(placements) != len(mesh_shape):
        raise ValueError(
            f"placements must have one placement per mesh dimension: got {len(placements)} for a mesh of shape {mesh_shape}"
        )
    result = tuple(_normalize(p, i, len(shape), size) for i, (p, size) in enumerate(zip(placements, mesh_shape)))
    check_cuts(tuple(shape), tuple(mesh_shape), cuts_of(result))
    operations = {p.reduce_op for p in result if isinstance(p, Partial)}
    if len(operations) > 1 and not operations <= {"sum", "avg"}:
        raise ValueError(f"{result} mixes reductions that do not commute: redistribute one of them to Replicate first")
    return result


def _normalize(placement: Placement, mesh_dim: int, ndim: int, ranks: int) -> Placement:
    if isinstance(placement, CutPlacement):
        return placement.normalize(ndim, ranks, mesh_dim)
    chunk = chunk_of(placement)
    return of_dim(placement, chunk.dim + ndim) if chunk is not None and chunk.dim < 0 else placement
