"""The placements of this package, and how any placement describes its cut of a tensor to ``_ownership``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from torch_ragged._ownership import Chunk, Cut, Run, Whole, check_cuts

__all__ = ["RaggedShard", "StridedRaggedShard", "cuts_of", "fsdp_placement", "has_ragged", "normalize_placements"]

_Self = TypeVar("_Self", bound="_Ragged")


_ragged_types: set[type] = set()


class _Ragged(Placement):
    """What the two placements share: an immutable value of dims and units, compared by relative units."""

    __slots__ = ("_dims", "_hash", "_key", "_local_units")

    _dims: tuple[int, ...]
    _local_units: tuple[int, ...]
    _key: tuple[Any, ...]
    _hash: int

    def __init_subclass__(cls) -> None:
        _ragged_types.add(cls)

    def __init__(self, dims: Sequence[int], local_units: Sequence[int], *more: int) -> None:
        super().__init__()
        name = type(self).__name__
        dims, units = _int_tuple(name, "dims", dims), _int_tuple(name, "local_units", local_units)
        if all(d >= 0 for d in dims) and dims != tuple(range(len(dims))):
            raise ValueError(f"{name} dims must be a prefix (0, ..., k-1) of the tensor's dimensions, got {dims}")
        if any(u < 0 for u in units) or not any(units):
            raise ValueError(f"{name} local_units must be integers >= 0, one per rank and not all zero, got {units}")
        divisor = math.gcd(*units)
        key = (dims, tuple(u // divisor for u in units), *more)
        # The hash is asked for at every operator call: computed once, since there may be a thousand units.
        for attribute, value in (("_dims", dims), ("_local_units", units), ("_key", key), ("_hash", hash((name, key)))):
            object.__setattr__(self, attribute, value)

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimension prefix, as given."""
        return self._dims

    @property
    def local_units(self) -> tuple[int, ...]:
        """The units of each rank, as given."""
        return self._local_units

    @property
    def cut(self) -> Run:
        """How the placement cuts a tensor, for :func:`torch_ragged._ownership.owned`."""
        raise NotImplementedError

    def replace_dims(self: _Self, dims: tuple[int, ...]) -> _Self:
        """The same placement over other ``dims``."""
        raise NotImplementedError

    def normalize(self: _Self, ndim: int) -> _Self:
        """This placement with non-negative ``dims`` for a tensor of ``ndim`` dimensions.

        Raises:
            ValueError: the dims are no prefix of the dimensions of such a tensor.
        """
        dims = tuple(d + ndim if d < 0 else d for d in self._dims)
        if dims != tuple(range(len(dims))) or len(dims) > ndim:
            raise ValueError(
                f"{type(self).__name__} dims must be a prefix (0, ..., k-1) of the tensor's {ndim} dimensions, got {self._dims}"
            )
        return self if dims == self._dims else self.replace_dims(dims)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable: cannot set {name!r}")

    def __copy__(self: _Self) -> _Self:
        return self

    def __deepcopy__(self: _Self, memo: dict[int, Any]) -> _Self:
        return self

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return type(self) is type(other) and self._hash == other._hash and self._key == other._key  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return self._hash

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        return repr(self), {type(self).__name__: type(self)}


class RaggedShard(_Ragged):
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

    Beside it on other mesh dimensions may stand Replicate, Partial, Shard to its left (applied first), and
    ``Shard(d)`` to its right for ``d >= len(dims)``.

    Source: veScale-FSDP's RaggedShard; RFC pytorch#169320.

    Args:
        dims: the prefix ``(0, ..., k-1)`` of the tensor's dimensions; ``()`` makes the whole tensor one unit.
            Negative values are normalised against the tensor when the placement is used.
        local_units: one integer >= 0 per rank of the mesh dimension, not all zero.

    Raises:
        ValueError: ``dims`` is no prefix, a unit is negative, or all units are zero.
        TypeError: a dimension or unit is not an integer.
    """

    __slots__ = ()

    def __init__(self, dims: Sequence[int], local_units: Sequence[int]) -> None:
        super().__init__(dims, local_units)

    @property
    def cut(self) -> Run:
        return Run(len(self._dims), self._local_units)

    def replace_dims(self, dims: tuple[int, ...]) -> RaggedShard:
        return RaggedShard(dims, self._local_units)

    def __reduce__(self) -> tuple[Any, ...]:
        return RaggedShard, (self._dims, self._local_units)

    def __repr__(self) -> str:
        return f"RaggedShard(dims={self._dims}, local_units={self._local_units})"

    def __str__(self) -> str:
        return f"RS({','.join(map(str, self._dims))})[{','.join(map(str, self._local_units))}]"


class StridedRaggedShard(_Ragged):
    """RaggedShard of a tensor that was first cut by ``Shard(0)`` on mesh dimensions to the right.

    Tensor or expert parallelism shards first, FSDP second, yet FSDP's mesh dimension comes first: dimension 0 is
    cut into ``split_factor`` even pieces, and each rank owns its run of units of *every* piece. ``Shard(0)`` over
    ``split_factor`` ranks to the right then chooses one piece. A (4, 2) tensor on a (2, 2) mesh under
    ``(StridedRaggedShard((0, 1), (1, 3), split_factor=2), Shard(0))``::

                          mesh column 0             mesh column 1
        row 0  | a0 a1 |  (0, 0): [a0]              (0, 1): [c0]
        row 1  | b0 b1 |  (1, 0): [a1 b0 b1]        (1, 1): [c1 d0 d1]
        row 2  | c0 c1 |
        row 3  | d0 d1 |  rows 0-1 are piece 0, rows 2-3 piece 1

    Where nothing chooses (``Replicate`` to the right), the 1-D local tensor holds the runs of all pieces in order.

    Source: veScale-FSDP's StridedRaggedShard; torch's ``_StridedShard`` is the like for even shards.

    Args:
        dims, local_units: as for :class:`RaggedShard`, of each piece.
        split_factor: number of pieces: the ranks that shard dimension 0 to the right (or a multiple).

    Raises:
        ValueError: as :class:`RaggedShard`; ``split_factor`` is less than 1.
        TypeError: a dimension, unit or the split factor is not an integer.
    """

    __slots__ = ("_split_factor",)

    _split_factor: int

    def __init__(self, dims: Sequence[int], local_units: Sequence[int], split_factor: int) -> None:
        (factor,) = _int_tuple("StridedRaggedShard", "split_factor", (split_factor,))
        if factor < 1:
            raise ValueError(f"StridedRaggedShard split_factor must be a number of pieces >= 1, got {factor}")
        object.__setattr__(self, "_split_factor", factor)
        super().__init__(dims, local_units, factor)

    @property
    def split_factor(self) -> int:
        """The number of pieces of dimension 0."""
        return self._split_factor

    @property
    def cut(self) -> Run:
        return Run(len(self._dims), self._local_units, self._split_factor)

    def replace_dims(self, dims: tuple[int, ...]) -> StridedRaggedShard:
        return StridedRaggedShard(dims, self._local_units, self._split_factor)

    def __reduce__(self) -> tuple[Any, ...]:
        return StridedRaggedShard, (self._dims, self._local_units, self._split_factor)

    def __repr__(self) -> str:
        return f"StridedRaggedShard(dims={self._dims}, local_units={self._local_units}, split_factor={self._split_factor})"

    def __str__(self) -> str:
        units = ",".join(map(str, self._local_units))
        return f"SRS({','.join(map(str, self._dims))})[{units}]/{self._split_factor}"


torch.serialization.add_safe_globals([RaggedShard, StridedRaggedShard])


def _int_tuple(placement: str, name: str, values: Sequence[int]) -> tuple[int, ...]:
    if isinstance(values, int) or not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
        expected = "an integer" if name == "split_factor" else "a sequence of integers"
        raise TypeError(f"{placement} {name} must be {expected}, got {values[0] if name == 'split_factor' else values!r}")
    return tuple(values)


def has_ragged(placements: Sequence[Placement]) -> bool:
    """Whether any of the placements is one of this package's."""
    for placement in placements:  # Asked of every redistribution of plain DTensors: isinstance takes four times as long.
        if type(placement) in _ragged_types:
            return True
    return False


@lru_cache(maxsize=65536)
def normalize_placements(
    placements: tuple[Placement, ...], shape: tuple[int, ...], mesh_shape: tuple[int, ...]
) -> tuple[Placement, ...]:
    """Check placements that hold a ragged one against a tensor shape and a mesh shape; normalise negative dims.

    Raises:
        ValueError: there is not one placement per mesh dimension, a ragged placement has not one unit count per
            rank, its units do not divide the tensor, or the placements have no meaning together.
    """
    if len(placements) != len(mesh_shape):
        raise ValueError(
            f"placements must name one placement per mesh dimension: got {len(placements)} for a mesh of shape {mesh_shape}"
        )
    result = tuple(_normalize(p, i, len(shape), size) for i, (p, size) in enumerate(zip(placements, mesh_shape)))
    check_cuts(tuple(shape), tuple(mesh_shape), cuts_of(result))
    operations = {p.reduce_op for p in result if isinstance(p, Partial)}
    if len(operations) > 1 and not operations <= {"sum", "avg"}:
        raise ValueError(f"{result} mixes reductions that do not commute: reduce one mesh dimension first")
    return result


def fsdp_placement(
    shape: Sequence[int],
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    *,
    ranks: int,
    granularity: int = 1,
    local_numels: Sequence[int] | None = None,
) -> RaggedShard | StridedRaggedShard:
    """The ragged placement by which FSDP shards a tensor that tensor or expert parallelism may have sharded before.

    It is to stand to the left of ``placements``, on a mesh dimension of ``ranks``: ``[fsdp_placement(...), *placements]``.

    ======================  ==========================================================================================
    ``placements`` hold     result
    ======================  ==========================================================================================
    no Shard                RaggedShard over the fewest leading dimensions whose slices are whole in every cut
    ``Shard(0)``            the same of each of its pieces: StridedRaggedShard with a split_factor of their number
    ``Shard(d)``, d > 0     at most ``d`` dimensions; cuts fall on multiples of ``lcm(granularity, prod(local_shape[d:]))``
    ======================  ==========================================================================================

    Args:
        shape, placements, mesh_shape: the tensor's global shape, how it is placed, and on a mesh of what shape.
        ranks: the size of FSDP's mesh dimension.
        granularity: elements of the local piece that stay together; cuts fall on multiples of it.
        local_numels: elements of the local piece for each rank; as even as the granularity allows where None.

    Raises:
        ValueError: the tensor is sharded unevenly, or by a placement beside which no ragged one can stand; the
            ``local_numels`` do not add up, or cut where the granularity or a sharded dimension forbids it.
    """
    shape, mesh_shape = tuple(shape), tuple(mesh_shape)
    placed = normalize_placements(tuple(placements), shape, mesh_shape)
    local, factor = _even_piece(shape, placed, mesh_shape)
    depth = min((p.dim for p in placed if isinstance(p, Shard) and p.dim > 0), default=len(shape))
    numel = math.prod(local)
    block = math.lcm(granularity, math.prod(local[depth:]) or 1)
    if local_numels is None:
        blocks = [-(-numel // block) * rank // ranks for rank in range(ranks + 1)]
        local_numels = [min(b * block, numel) - min(a * block, numel) for a, b in zip(blocks, blocks[1:])]
    edges = [sum(local_numels[:rank]) for rank in range(ranks + 1)]
    if len(local_numels) != ranks or edges[-1] != numel or any(edge % block and edge != numel for edge in edges):
        raise ValueError(
            f"local_numels {tuple(local_numels)} cannot cut a local piece of shape {tuple(local)} over {ranks} ranks: give one "
            f"number per rank, which add up to {numel} and are multiples of {block} but for the last"
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
    """The local shape that even shards leave over, and the number of pieces into which they cut dimension 0."""
    local, pieces = list(shape), 1
    for placement, size in zip(placements, mesh_shape):
        if isinstance(placement, (_Ragged, _StridedShard)):
            raise ValueError(
                f"a tensor placed as {placement} cannot be sharded by FSDP too: redistribute to Replicate or Shard first"
            )
        if isinstance(placement, Shard):
            dim = placement.dim
            if local[dim] % size:
                raise ValueError(
                    f"dimension {dim} of shape {shape} is sharded unevenly over {size} ranks: FSDP needs even pieces. Pad the "
                    "dimension, or shard another one"
                )
            local[dim] //= size
            pieces *= size if dim == 0 else 1
    return local, pieces


def _normalize(placement: Placement, mesh_dim: int, ndim: int, size: int) -> Placement:
    if isinstance(placement, _Ragged):
        if len(placement.local_units) != size:
            raise ValueError(
                f"{placement!r} has {len(placement.local_units)} local_units, but mesh dimension {mesh_dim} has "
                f"{size} ranks: give one unit count per rank"
            )
        return placement.normalize(ndim)
    if isinstance(placement, _StridedShard) and placement.dim < 0:
        return _StridedShard(placement.dim + ndim, split_factor=placement.split_factor)
    if isinstance(placement, Shard) and placement.dim < 0:
        return Shard(placement.dim + ndim)
    return placement


def cuts_of(placements: tuple[Placement, ...]) -> tuple[Cut, ...]:
    """The cut of each placement, for :func:`torch_ragged._ownership.owned`.

    Raises:
        ValueError: a placement is of a kind that is unknown here.
    """
    cuts: list[Cut] = []
    for placement in placements:
        if isinstance(placement, _Ragged):
            cuts.append(placement.cut)
        elif isinstance(placement, _StridedShard):
            cuts.append(Chunk(placement.dim, int(placement.split_factor)))
        elif isinstance(placement, Shard):
            cuts.append(Chunk(placement.dim))
        elif isinstance(placement, (Replicate, Partial)):
            cuts.append(Whole())
        else:
            raise ValueError(
                f"{placement} cannot stand beside a ragged placement: use Replicate, Partial, Shard, RaggedShard or "
                "StridedRaggedShard"
            )
    return tuple(cuts)
