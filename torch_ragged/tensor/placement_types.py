"""RaggedShard, and the cut by which each placement describes itself to ``_ownership``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from torch_ragged.tensor._ownership import Chunk, Cut, Run, Whole, check_cuts, chunk_range, run_range
from torch_ragged.tensor._units import Units
from torch_ragged.tensor.interleaved_placement_types import InterleavedShard, has_interleaved

__all__ = [
    "RaggedShard",
    "block_local_shape",
    "block_split",
    "cuts_of",
    "has_own_rules",
    "has_ragged",
    "is_block_shard",
    "normalize_placements",
    "whole_shape",
    "with_blocks_ragged",
]

_Self = TypeVar("_Self", bound="_Ragged")


_ragged_types: set[type] = set()


class _Ragged(Placement):
    """The base of ragged placements: an immutable value of dims and units. Units compare as ratios: (1, 1) equals (2, 2)."""

    __slots__ = ("_dims", "_hash", "_key", "_units")

    _dims: tuple[int, ...]
    _units: Units
    _key: tuple[Any, ...]
    _hash: int
    redistribute_view: Callable[..., torch.Tensor] | None = None
    """Moves local tensors that are not flat; None if ``_redistribute`` plans for the placement."""

    def __init_subclass__(cls) -> None:
        _ragged_types.add(cls)

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

    @property
    def cut(self) -> Run:
        """How the placement cuts a tensor, for :func:`torch_ragged.tensor._ownership.owned`."""
        raise NotImplementedError

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether each rank holds a part only: True. With ``dim``: whether the placement may cut this dimension.

        Programs ask this to know whether they must reduce over the mesh. It does not mean that the placement is a ``Shard``.
        """
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

    def normalize(self: _Self, ndim: int) -> _Self:
        """This placement with non-negative ``dims`` for a tensor of ``ndim`` dimensions.

        Raises:
            ValueError: the dims are not a prefix of the dimensions of such a tensor.
        """
        dims = tuple(d + ndim if d < 0 else d for d in self._dims)
        if dims != tuple(range(len(dims))) or len(dims) > ndim:
            raise ValueError(
                f"{type(self).__name__} dims must be a prefix (0, ..., k-1) of the tensor's {ndim} dimensions, got {self._dims}"
            )
        return self if dims == self._dims else self.replace_dims(dims)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable: cannot set {name!r}; make a new placement")

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

        Of ``n`` blocks, each rank owns ``ceil(n / ranks)``, except the last ranks, which own the rest or nothing. If a block is
        a slice of the trailing dimensions, this is the ownership of ``BlockShard((block_numel,))`` in torch's proposal.

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

    @classmethod
    def from_block_shard(cls, placement: Any, shape: Sequence[int], ranks: int) -> RaggedShard:
        """The RaggedShard that owns what torch's ``BlockShard`` owns of a tensor of ``shape`` on ``ranks`` ranks.

        ::

            RaggedShard.from_block_shard(BlockShard((5,)), (3, 4, 5), 2)     # rows of 5 elements: 6 of 12 on each rank
            RaggedShard(dims=(0, 1), local_units=(6, 6))

        The local tensors differ: that of ``BlockShard`` is a matrix of whole rows, here ``(6, 5)``, the other one is flat. Any
        object with the fields ``block_numels`` and ``block_repeats`` counts as a ``BlockShard``.

        Raises:
            ValueError: blocks of several sizes, or of another size than the last dimensions of the tensor have together; or
                blocks that are slices of dimension 0, for which torch has ``Shard(0)``; or the tensor has no elements.

        Source: branches of pytorch/pytorch (test/distributed/tensor/test_block_shard.py). No released torch has it yet.
        """
        split = block_split(placement, shape)
        return cls.of_blocks(shape, math.prod(shape[split:]), ranks)

    def to_block_shard(self, shape: Sequence[int], block_shard: Callable[[tuple[int, ...]], Any]) -> Any:
        """torch's ``BlockShard`` that owns what this placement owns of a tensor of ``shape``.

        Args:
            block_shard: makes the placement from ``block_numels``: torch's class ``BlockShard``.

        Raises:
            ValueError: no BlockShard owns that: ranks do not have equal numbers of rows of the last dimensions, all but the
                last ones, or the rows are slices of dimension 0.
        """
        shape, ranks = tuple(shape), len(self._units)
        numel = math.prod(shape)
        owned = [run_range(numel, self._units, rank) for rank in range(ranks)] if numel % self._units.total == 0 else []
        # The split that the dims say first: several may own the same, with local tensors of other shapes.
        for split in sorted(range(2, len(shape) + 1), key=lambda k: k != len(self._dims)):
            row = math.prod(shape[split:])
            if numel and owned == [
                (start * row, stop * row) for start, stop in (chunk_range(numel // row, ranks, rank) for rank in range(ranks))
            ]:
                return block_shard((row,))
        raise ValueError(
            f"{self!r} of a tensor of shape {shape} has no BlockShard, which gives each rank an equal number of rows of the "
            "last dimensions, and the last ranks the rest: redistribute to RaggedShard.of_blocks(shape, block_numel, ranks), "
            "or to Shard(0) for slices of dimension 0"
        )

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


def is_block_shard(placement: Any) -> bool:
    """Whether a placement is torch's ``BlockShard``, which no released torch has: it is known by its fields."""
    return hasattr(placement, "block_numels") and hasattr(placement, "block_repeats")


def block_split(placement: Any, shape: Sequence[int]) -> int:
    """The dimension from which on a ``BlockShard`` keeps slices of a tensor of ``shape`` whole. Its local tensor has these.

    Raises:
        ValueError: as :meth:`RaggedShard.from_block_shard`.
    """
    shape, numels = tuple(shape), tuple(placement.block_numels)
    if len(set(numels)) != 1:
        raise ValueError(
            f"{placement!r} has blocks of several sizes, which torch does not support either: give one block_numel"
        )
    split = next((k for k in range(len(shape) + 1) if math.prod(shape[k:]) == numels[0]), None)
    if split is None or not math.prod(shape):
        raise ValueError(
            f"{placement!r} does not fit a tensor of shape {shape}: its {numels[0]} elements must be a slice of the last "
            f"dimensions, such as {[math.prod(shape[k:]) for k in range(2, len(shape) + 1)]} elements"
        )
    if split < 2:
        raise ValueError(f"{placement!r} of a tensor of shape {shape} has blocks of whole slices of dimension 0: use Shard(0)")
    return split


def with_blocks_ragged(
    placements: tuple[Placement, ...], shape: Sequence[int], mesh_shape: Sequence[int]
) -> tuple[Placement, ...]:
    """The placements, with a RaggedShard of equal ownership in the place of each ``BlockShard``.

    Raises:
        ValueError: as :meth:`RaggedShard.from_block_shard`, or another placement cuts the tensor, too.
    """
    if not any(map(is_block_shard, placements)):
        return placements
    if any(not isinstance(p, (Replicate, Partial)) for p in placements if not is_block_shard(p)) or (
        sum(map(is_block_shard, placements)) > 1
    ):
        raise ValueError(
            f"{placements}: a BlockShard can stand beside Replicate and Partial only: use RaggedShard, which can stand beside "
            "Shard"
        )
    return tuple(
        RaggedShard.from_block_shard(p, shape, ranks) if is_block_shard(p) else p for p, ranks in zip(placements, mesh_shape)
    )


def block_local_shape(placements: tuple[Placement, ...], shape: Sequence[int], local_numel: int) -> tuple[int, ...] | None:
    """The shape of a local tensor with ``local_numel`` elements if a placement is a ``BlockShard``: whole rows; else None."""
    split = next((block_split(p, shape) for p in placements if is_block_shard(p)), None)
    return None if split is None else (local_numel // math.prod(shape[split:]), *shape[split:])


def has_ragged(placements: Sequence[Placement]) -> bool:
    """Whether any of the placements is ragged."""
    for placement in placements:  # Every redistribution of plain DTensors runs this: isinstance takes four times as long.
        if type(placement) in _ragged_types:
            return True
    return False


def has_own_rules(placements: Sequence[Placement]) -> bool:
    """Whether any of the placements is ragged or interleaved, so that DTensor's own rules do not know it."""
    return has_ragged(placements) or has_interleaved(placements)


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
    """Check placements, one of them ragged or interleaved, against a tensor shape and a mesh shape; normalize negative dims.

    Of torch's ``BlockShard``, the result has the RaggedShard of equal ownership.

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
    placements = with_blocks_ragged(placements, shape, mesh_shape)
    result = tuple(_normalize(p, i, len(shape), size) for i, (p, size) in enumerate(zip(placements, mesh_shape)))
    check_cuts(tuple(shape), tuple(mesh_shape), cuts_of(result))
    operations = {p.reduce_op for p in result if isinstance(p, Partial)}
    if len(operations) > 1 and not operations <= {"sum", "avg"}:
        raise ValueError(f"{result} mixes reductions that do not commute: redistribute one of them to Replicate first")
    return result


def _normalize(placement: Placement, mesh_dim: int, ndim: int, size: int) -> Placement:
    if isinstance(placement, _Ragged):
        if len(placement.units) != size:
            raise ValueError(
                f"{placement!r} has {len(placement.units)} local_units, but mesh dimension {mesh_dim} has "
                f"{size} ranks: give one number of units per rank"
            )
        return placement.normalize(ndim)
    if isinstance(placement, InterleavedShard):
        return placement.normalize(ndim)
    if isinstance(placement, _StridedShard) and placement.dim < 0:
        return _StridedShard(placement.dim + ndim, split_factor=placement.split_factor)
    if isinstance(placement, Shard) and placement.dim < 0:
        return Shard(placement.dim + ndim)
    return placement


def cuts_of(placements: tuple[Placement, ...]) -> tuple[Cut, ...]:
    """The cut of each placement, for :func:`torch_ragged.tensor._ownership.owned`.

    Raises:
        ValueError: the type of a placement is unknown here.
    """
    cuts: list[Cut] = []
    for placement in placements:
        if isinstance(placement, (_Ragged, InterleavedShard)):
            cuts.append(placement.cut)
        elif isinstance(placement, _StridedShard):
            cuts.append(Chunk(placement.dim, int(placement.split_factor)))
        elif isinstance(placement, Shard):
            cuts.append(Chunk(placement.dim))
        elif isinstance(placement, (Replicate, Partial)):
            cuts.append(Whole())
        else:
            raise ValueError(
                f"{placement} cannot be combined with a ragged placement: use Replicate, Partial, Shard, InterleavedShard or a "
                "ragged placement"
            )
    return tuple(cuts)
