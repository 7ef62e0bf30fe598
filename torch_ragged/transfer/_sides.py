"""Sides: which ranks hold which part of each tensor, before or after a transfer. Integers only: no processes, no tensors.

::

    Spec (4, 6) on ranks 4 to 7, (2, 2), (Replicate, Shard(0))        holders     ranks 4, 6: rows 0, 1
                                                                                  ranks 5, 7: rows 2, 3
"""

from __future__ import annotations

import functools
import hashlib
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Union

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from torch_ragged.tensor._cut_placement import cuts_of
from torch_ragged.tensor._global_layout import GlobalLayout, coverage_problem, global_layout_of
from torch_ragged.tensor._ownership import Box, Cut, Owned, Whole, coordinate_at, index_at, owned, owned_near
from torch_ragged.tensor._redistribute import warn_of_order
from torch_ragged.tensor.placement_types import normalize_placements

__all__ = [
    "AnySpec",
    "BoxSpec",
    "Holder",
    "ListedSide",
    "Ranks",
    "RelocatedSide",
    "Side",
    "Spec",
    "TensorSide",
    "is_extra_state",
    "merged_specs",
    "named_values",
    "specs_of",
]


class Holder(NamedTuple):
    """Global ranks that hold equal elements of a tensor, at equal offsets of their local tensors called ``key``."""

    ranks: tuple[int, ...]
    key: str | None  # None: the name of the tensor.
    owned: Owned


class Side(Protocol):
    """One side of a transfer."""

    @property
    def names(self) -> Sequence[str]:
        """The tensors, by their names on the source side."""

    @property
    def ranks(self) -> frozenset[int]:
        """All global ranks that hold something."""

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of the local tensors."""

    def geometry(self, name: str) -> object:
        """What is equal for tensors that lie alike: a hashable key."""

    def replicas(self, name: str) -> int:
        """About how many ranks hold one element."""

    def held_by(self, name: str, rank: int) -> Iterable[Holder]:
        """The parts of a tensor that ``rank`` holds; each holder has elements."""

    def near(self, name: str, piece: Owned) -> Iterable[Holder]:
        """At least the holders that have elements of ``piece``."""

    def lines(self) -> Iterator[str]:
        """A line for each tensor, for comparison between ranks."""


class ListedSide:
    """A side that lists the holders of each tensor. Names and shapes are those of the source's tensors."""

    def __init__(
        self, shapes: dict[str, tuple[int, ...]], dtypes: dict[str, torch.dtype], holders: dict[str, list[Holder]]
    ) -> None:
        self.shapes, self._dtypes, self._holders = shapes, dtypes, holders

    @property
    def names(self) -> Sequence[str]:
        return list(self.shapes)

    @functools.cached_property
    def ranks(self) -> frozenset[int]:
        return frozenset(rank for holders in self._holders.values() for holder in holders for rank in holder.ranks)

    def dtype(self, name: str) -> torch.dtype:
        return self._dtypes[name]

    def geometry(self, name: str) -> object:
        return name

    def replicas(self, name: str) -> int:
        return max((len(holder.ranks) for holder in self._holders[name]), default=1)

    def held_by(self, name: str, rank: int) -> Iterator[Holder]:
        return (holder for holder in self._holders[name] if rank in holder.ranks)

    def near(self, name: str, piece: Owned) -> Iterable[Holder]:
        # All of them: a superset is enough, as atoms_of() intersects each with the piece.
        return self._holders[name]


@dataclass(frozen=True)
class Ranks:
    """The global ranks of a mesh in row-major order, and its shape: a ``DeviceMesh`` without process groups."""

    ranks: tuple[int, ...]
    shape: tuple[int, ...]

    @functools.cached_property
    def _text(self) -> str:
        shown = ", ".join(map(str, self.ranks[:8])) + (", ..." if len(self.ranks) > 8 else "")
        # Ranks compare this text (Side.lines): two long lists that begin alike must not have one text.
        code = hashlib.sha256(repr(self.ranks).encode()).hexdigest()[:8]
        return f"a mesh of shape {self.shape} of ranks {shown}" + (f" (#{code})" if len(self.ranks) > 8 else "")

    def __str__(self) -> str:
        return self._text

    @staticmethod
    def of(mesh: DeviceMesh | Ranks | torch.Tensor | Sequence[int]) -> Ranks:
        """The ranks of a mesh, of an integer tensor of ranks in the shape of a mesh, or of a list of ranks."""
        if isinstance(mesh, Ranks):
            return mesh
        if isinstance(mesh, DeviceMesh):
            mesh = mesh.mesh
        table = torch.as_tensor(mesh, dtype=torch.int64, device="cpu")
        ranks = tuple(table.flatten().tolist())
        if len(set(ranks)) < len(ranks) or min(ranks, default=-1) < 0:
            raise ValueError(f"a mesh of the ranks {ranks}: give at least one rank, and each rank once")
        return Ranks(ranks, tuple(table.shape))


@dataclass(frozen=True)
class Spec:
    """What a plan must know of a tensor. Any rank can write it, also one outside of the mesh, and without a process group.

    Args:
        shape: of the whole tensor.
        dtype: of the local tensors.
        mesh: a ``DeviceMesh``, or its global ranks as an integer tensor in the mesh's shape.
        placements: one per mesh dimension.

    Raises:
        ValueError: the placements have no meaning together, or for this shape or mesh; a rank is twice in the mesh.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    mesh: Ranks
    placements: tuple[Placement, ...]

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        mesh: DeviceMesh | Ranks | torch.Tensor | Sequence[int],
        placements: Sequence[Placement],
    ) -> None:
        shape, ranks = tuple(shape), Ranks.of(mesh)
        # Ranks compare specs, and one may write Shard(-1) where another one has Shard(1) of a DTensor.
        normalized = normalize_placements(tuple(placements), shape, ranks.shape)
        for name, value in (("shape", shape), ("dtype", dtype), ("mesh", ranks), ("placements", normalized)):
            object.__setattr__(self, name, value)

    @staticmethod
    def of(tensor: DTensor) -> Spec:
        """The spec of a DTensor, also on ranks outside of its mesh."""
        warn_of_order(tensor.device_mesh, tensor.placements)
        return Spec(tuple(tensor.shape), tensor.dtype, _ranks_of(tensor.device_mesh), tensor.placements)

    @property
    def ranks(self) -> frozenset[int]:
        """The global ranks of the mesh."""
        return frozenset(self.mesh.ranks)

    @property
    def has_partial(self) -> bool:
        """Whether a placement is Partial: the value is a reduction over ranks."""
        return any(isinstance(placement, Partial) for placement in self.placements)

    def describes(self, other: Spec) -> bool:
        """Whether ``other`` is this spec, or one of the copies that this spec has on submeshes of its mesh."""
        if other == self:
            return True
        # merged_specs() has put the meshes of several ranks one above the other. A rank still gives a DTensor on its own mesh.
        copies, size = self.mesh.shape[:1], len(other.mesh.ranks)
        return (
            copies + other.mesh.shape == self.mesh.shape
            and (Replicate(), *other.placements) == self.placements
            and (self.shape, self.dtype) == (other.shape, other.dtype)
            and any(self.mesh.ranks[i * size :][:size] == other.mesh.ranks for i in range(*copies))
        )

    def __str__(self) -> str:
        return f"shape {self.shape}, {self.dtype}, {self.mesh}, {self.placements}"


class _Held(NamedTuple):
    """What a rank holds of a tensor: the boxes in a local tensor of this shape."""

    rank: int
    local_shape: tuple[int, ...]
    boxes: tuple[Box, ...]

    @property
    def regions(self) -> frozenset[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Offsets and sizes of the boxes in the whole tensor."""
        return frozenset((box.offsets, box.sizes) for box in self.boxes)


@dataclass(frozen=True)
class BoxSpec:
    """What a plan must know of a tensor that ranks hold as boxes, without a mesh and placements. Any rank can write it.

    ::

        transfer.BoxSpec.of(torch.float32, {4: layout_of_rank_4, 5: layout_of_rank_5})

    Attributes:
        shape: of the whole tensor.
        dtype: of the local tensors.
        held: the boxes of each rank, by ascending ranks.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    held: tuple[_Held, ...]
    has_partial = False

    @staticmethod
    def of(dtype: torch.dtype, layouts: Mapping[int, GlobalLayout]) -> BoxSpec:
        """The spec of local tensors without padding.

        Args:
            layouts: what each global rank holds: a :class:`~torch_ragged.GlobalLayout` or an object with its four fields. Ranks
                that are not named hold nothing. A rank that knows only its own layout may give only that: ``plan()`` joins the
                specs of all ranks.

        Raises:
            ValueError: there is no layout, layouts are of different global shapes, or a layout is none.
            TypeError: ``layouts`` is no mapping of ranks to layouts.
        """
        if not isinstance(layouts, Mapping):
            raise TypeError(f"BoxSpec.of takes a mapping of global ranks to layouts, got {type(layouts).__name__}")
        found = {rank: GlobalLayout.of(layout) for rank, layout in sorted(layouts.items())}
        shapes = {layout.global_shape for layout in found.values()}
        if len(shapes) != 1:
            raise ValueError(f"BoxSpec.of takes layouts of one global shape, got {len(found)} layouts of {sorted(shapes)}")
        held = tuple(_Held(rank, layout.local_shape, layout.boxes()) for rank, layout in found.items())
        return BoxSpec(shapes.pop(), dtype, held)

    @staticmethod
    def of_local(tensor: torch.Tensor, layout: GlobalLayout, rank: int) -> BoxSpec:
        """The spec of one rank's local tensor."""
        held = _Held(rank, tuple(tensor.shape), layout.boxes(tensor.shape))
        return BoxSpec(layout.global_shape, tensor.dtype, (held,))

    @property
    def ranks(self) -> frozenset[int]:
        """The global ranks that hold elements."""
        return frozenset(each.rank for each in self.held if each.boxes)

    def of_rank(self, rank: int) -> _Held | None:
        """What ``rank`` holds; None if it has no part in the tensor."""
        return next((each for each in self.held if each.rank == rank), None)

    def problem(self) -> str | None:
        """Why the boxes of all ranks are not one whole tensor; None if they are."""
        return coverage_problem(self.shape, {each.rank: each.boxes for each in self.held})

    def as_source(self) -> BoxSpec:
        """Without ranks whose elements another rank holds in a local tensor that is laid out differently: it is read once."""
        # Ranks with equal boxes are one holder, and share the load. Two layouts of the same elements would be two holders, and
        # a receiver would get each element from both.
        first: dict[object, tuple[Box, ...]] = {}
        kept = tuple(each for each in self.held if first.setdefault(each.regions, each.boxes) == each.boxes)
        return self if len(kept) == len(self.held) else BoxSpec(self.shape, self.dtype, kept)

    def __str__(self) -> str:
        return f"shape {self.shape}, {self.dtype}, boxes {[tuple(each) for each in self.held]}"


AnySpec = Union[Spec, BoxSpec]

_known_ranks: weakref.WeakKeyDictionary[DeviceMesh, Ranks] = weakref.WeakKeyDictionary()
"""The ranks of each mesh: a model has hundreds of tensors on one."""


def _ranks_of(mesh: DeviceMesh) -> Ranks:
    known = _known_ranks.get(mesh)
    if known is None:
        known = _known_ranks[mesh] = Ranks.of(mesh)
    return known


def is_extra_state(name: str) -> bool:
    """Whether a name of a ``state_dict()`` is of a module's ``get_extra_state()``: an object that lies on no mesh."""
    return name.rpartition(".")[2] == "_extra_state"


def named_values(given: object, what: str) -> dict[str, Any]:
    """What is given to ``plan()`` or ``run()``, by name: a module's ``state_dict()``, a mapping, or pairs. No extra states.

    Raises:
        TypeError: it is none of these.
    """
    pairs = given.state_dict() if isinstance(given, nn.Module) else given
    pairs = list(pairs.items() if isinstance(pairs, Mapping) else pairs if isinstance(pairs, Iterable) else [None])
    if not all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs):
        raise TypeError(
            f"{what} takes a module, a mapping of names to tensors, or (name, tensor) pairs, got {type(given).__name__}"
        )
    return {name: value for name, value in pairs if not is_extra_state(name)}


def specs_of(given: object, side: str) -> dict[str, AnySpec]:
    """The spec of each tensor. Plain tensors, such as buffers, count as replicated on all ranks of the DTensors beside them.

    If there are no DTensors beside them, but local tensors with layouts, they count as replicated on all ranks that give them.

    Raises:
        TypeError: a value is neither a tensor nor a spec.
        ValueError: there are plain tensors, and no mesh of the DTensors beside them has all ranks of these DTensors; or the
            four fields of a tensor are no layout.
    """
    specs: dict[str, AnySpec] = {}
    plain: dict[str, torch.Tensor] = {}
    for name, value in (pairs := named_values(given, f"plan({side}=)")).items():
        try:
            layout = global_layout_of(value)
            if layout is not None:
                specs[name] = BoxSpec.of_local(value, layout, dist.get_rank())
            elif isinstance(value, DTensor):
                specs[name] = Spec.of(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"plan({side}=): {name}: {error}") from error
        if isinstance(value, (Spec, BoxSpec)):
            specs[name] = value
        elif not isinstance(value, torch.Tensor):
            raise TypeError(
                f"plan({side}=): {name} is {type(value).__name__}, expected a DTensor, with_layout(tensor, layout) or a "
                "transfer.Spec"
            )
        elif name not in specs:
            plain[name] = value
    if plain:
        meshes = {spec.mesh for spec in specs.values() if isinstance(spec, Spec)}
        if not meshes:  # A model that is not sharded, or boxes: each rank that gives a tensor has all of it.
            for name, value in plain.items():
                whole = GlobalLayout.of(tuple(value.shape), (1,), [Replicate()], (0,))
                specs[name] = BoxSpec.of_local(value, whole, dist.get_rank())
            return {name: specs[name] for name in pairs}
        # Pipeline stages have meshes without common ranks. Then nothing says which of them holds a plain tensor.
        ranks = sorted({rank for mesh in meshes for rank in mesh.ranks})
        if not any(len(mesh.ranks) == len(ranks) for mesh in meshes):
            raise ValueError(
                f"plan({side}=): {next(iter(plain))} is a plain tensor, and of {len(meshes)} meshes of the DTensors, none "
                "has all ranks: give a DTensor, with_layout(tensor, layout), or a transfer.Spec, so that the ranks that hold "
                "it are known"
            )
        mesh = meshes.pop() if len(meshes) == 1 else Ranks(tuple(ranks), (len(ranks),))
        for name, value in plain.items():
            specs[name] = Spec(tuple(value.shape), value.dtype, mesh, [Replicate()] * len(mesh.shape))
    return {name: specs[name] for name in pairs}


def merged_specs(given: Mapping[int, Mapping[str, AnySpec]], side: str) -> dict[str, AnySpec]:
    """One spec of each tensor, from what different ranks give.

    A model with tensor parallelism has a mesh of its own on each rank: ``mesh["tp"]``, or ``mesh["dp"]`` for parameters
    without it. Such meshes share no ranks, and each has the whole tensor. They become rows of one mesh::

        ranks 0, 1 give      mesh (0, 1)             (Shard(0),)
        ranks 2, 3 give      mesh (2, 3)             (Shard(0),)
        merged               mesh ((0, 1), (2, 3))   (Replicate(), Shard(0))

    Of a tensor that ranks hold as boxes, each rank gives its own: these are joined.

    Args:
        given: specs by the first rank that gives them.

    Raises:
        ValueError: ranks give different names, or specs that differ otherwise.
    """
    first = min(given)
    for rank, specs in given.items():
        for name in (*specs, *given[first]):
            if name not in specs or name not in given[first]:
                has, lacks = (rank, first) if name in specs else (first, rank)
                raise ValueError(
                    f"plan({side}=): {name} is given on rank {has}, and not on rank {lacks}, which gives other tensors: "
                    "give equal names on all ranks, or None"
                )
    merged: dict[str, AnySpec] = {}
    for name in given[first]:
        owners: dict[AnySpec, int] = {}
        # By ascending ranks, so that all ranks put the meshes into one order.
        for rank in sorted(given):
            owners.setdefault(given[rank][name], rank)
        if len(owners) == 1:
            merged[name] = next(iter(owners))
            continue
        boxes = [spec for spec in owners if isinstance(spec, BoxSpec)]
        if len(boxes) == len(owners):
            merged[name] = _joined_spec(boxes, list(owners.values()), f"plan({side}=): {name}")
            continue
        copies = [spec for spec in owners if isinstance(spec, Spec)]
        ranks = tuple(rank for spec in copies for rank in spec.mesh.ranks)
        alike = {(spec.shape, spec.dtype, spec.placements, spec.mesh.shape) for spec in copies}
        # Meshes with a rank in common are no copies: this rank holds one of the two tensors.
        if boxes or len(alike) > 1 or len(set(ranks)) < len(ranks):
            (one, here), (other, there) = list(owners.items())[:2]
            raise ValueError(
                f"plan({side}=): {name} differs between ranks: rank {here} has {one}, rank {there} has {other}: give equal "
                "tensors on all ranks, or tensors that lie alike on meshes without common ranks"
            )
        mesh = Ranks(ranks, (len(copies), *copies[0].mesh.shape))
        merged[name] = Spec(copies[0].shape, copies[0].dtype, mesh, (Replicate(), *copies[0].placements))
    return merged


def _joined_spec(specs: Sequence[BoxSpec], givers: Sequence[int], what: str) -> BoxSpec:
    """One spec of what the ranks ``givers`` say of a tensor, each of other ranks, or equal of the same ones."""
    for spec, giver in zip(specs, givers):
        if (spec.shape, spec.dtype) != (specs[0].shape, specs[0].dtype):
            raise ValueError(
                f"{what} differs between ranks: rank {givers[0]} has shape {specs[0].shape} and {specs[0].dtype}, rank {giver} "
                f"has shape {spec.shape} and {spec.dtype}: give layouts of one global tensor"
            )
    held: dict[int, _Held] = {}
    for spec, giver in zip(specs, givers):
        for each in spec.held:
            if held.setdefault(each.rank, each) != each:
                raise ValueError(f"{what}: rank {giver} gives other boxes of rank {each.rank} than another rank does")
    return BoxSpec(specs[0].shape, specs[0].dtype, tuple(held[rank] for rank in sorted(held)))


@dataclass(frozen=True)
class _Layout:
    """Where the elements of a tensor of ``shape`` lie on a mesh, under ``cuts``."""

    shape: tuple[int, ...]
    mesh: Ranks
    cuts: tuple[Cut, ...]

    @functools.cached_property
    def _cut_dims(self) -> tuple[int, ...]:
        return tuple(i for i, cut in enumerate(self.cuts) if not isinstance(cut, Whole))

    @functools.cached_property
    def replica_ranks(self) -> tuple[tuple[int, ...], ...]:
        """For each index over the mesh dimensions that cut, in row-major order: the ranks that hold that piece."""
        table = torch.tensor(self.mesh.ranks, device="cpu").view(self.mesh.shape)
        whole = [i for i in range(len(self.cuts)) if i not in self._cut_dims]
        pieces = math.prod(self.mesh.shape[i] for i in self._cut_dims)
        # Mesh dimensions that cut come first: each row has the ranks of one piece.
        return tuple(tuple(sorted(row)) for row in table.permute(*self._cut_dims, *whole).reshape(pieces, -1).tolist())

    @functools.cached_property
    def _coordinates(self) -> dict[int, tuple[int, ...]]:
        return {rank: coordinate_at(i, self.mesh.shape) for i, rank in enumerate(self.mesh.ranks)}

    def held_by(self, rank: int) -> Iterator[Holder]:
        coordinate = self._coordinates.get(rank)
        if coordinate is None:
            return
        piece = owned(self.shape, self.mesh.shape, self.cuts, coordinate)
        if piece.numel:
            index = index_at([coordinate[i] for i in self._cut_dims], [self.mesh.shape[i] for i in self._cut_dims])
            yield Holder(self.replica_ranks[index], None, piece)

    def near(self, piece: Owned) -> Iterator[Holder]:
        start = (0,) * len(self.cuts)
        for index, other in owned_near(self.shape, self.mesh.shape, self.cuts, start, self._cut_dims, piece):
            if other.numel:
                yield Holder(self.replica_ranks[index], None, other)


@functools.lru_cache(maxsize=65536)
def _layout_of(shape: tuple[int, ...], mesh: Ranks, placements: tuple[Placement, ...]) -> _Layout:
    return _Layout(shape, mesh, cuts_of(placements))


class _BoxLayout:
    """Where the elements of a tensor lie that ranks hold as boxes."""

    def __init__(self, spec: BoxSpec) -> None:
        ranks_of: dict[tuple[Box, ...], list[int]] = {}
        for each in spec.held:
            if each.boxes:
                ranks_of.setdefault(each.boxes, []).append(each.rank)
        self._holders = [
            Holder(tuple(ranks), None, Owned((sum(box.numel for box in boxes),), boxes, flat=True))
            for boxes, ranks in ranks_of.items()
        ]

    @property
    def replica_ranks(self) -> tuple[tuple[int, ...], ...]:
        return tuple(sorted((holder.ranks for holder in self._holders), key=len, reverse=True)) or ((),)

    def held_by(self, rank: int) -> Iterator[Holder]:
        return (holder for holder in self._holders if rank in holder.ranks)

    def near(self, piece: Owned) -> Iterable[Holder]:
        return self._holders


@functools.lru_cache(maxsize=65536)
def _box_layout_of(shape: tuple[int, ...], held: tuple[_Held, ...]) -> _BoxLayout:
    """Tensors that lie alike have one layout. It has no dtype."""
    return _BoxLayout(BoxSpec(shape, torch.float32, held))


class TensorSide:
    """A side of DTensors, and of local tensors with layouts."""

    def __init__(self, specs: Mapping[str, AnySpec]) -> None:
        self.specs = dict(specs)
        # Tensors that lie alike share one layout. It is their geometry, by which slices_of() computes their atoms once.
        self._layouts: dict[str, _Layout | _BoxLayout] = {
            name: _layout_of(s.shape, s.mesh, s.placements) if isinstance(s, Spec) else _box_layout_of(s.shape, s.held)
            for name, s in self.specs.items()
        }

    @property
    def names(self) -> Sequence[str]:
        return list(self.specs)

    @functools.cached_property
    def ranks(self) -> frozenset[int]:
        meshes = {spec.mesh for spec in self.specs.values() if isinstance(spec, Spec)}
        boxes = (spec.ranks for spec in self.specs.values() if isinstance(spec, BoxSpec))
        return frozenset().union(*(mesh.ranks for mesh in meshes), *boxes)

    def dtype(self, name: str) -> torch.dtype:
        return self.specs[name].dtype

    def geometry(self, name: str) -> object:
        return self._layouts[name]

    def replicas(self, name: str) -> int:
        return len(self._layouts[name].replica_ranks[0])

    def held_by(self, name: str, rank: int) -> Iterable[Holder]:
        return self._layouts[name].held_by(rank)

    def near(self, name: str, piece: Owned) -> Iterable[Holder]:
        return self._layouts[name].near(piece)

    def lines(self) -> Iterator[str]:
        for name, spec in self.specs.items():
            yield f"{name}: {spec}"


class RelocatedSide(TensorSide):
    """A side whose pieces other ranks hold now: of each rank of the specs' meshes, a copy on the rank ``holders[rank]``.

    ``run()`` gets the flat local tensors by the keys of :meth:`key`. Of replicas, the first that has a holder counts.
    """

    def __init__(self, specs: Mapping[str, Spec], holders: Mapping[int, int]) -> None:
        super().__init__(specs)
        self.holders = dict(holders)

    @staticmethod
    def key(name: str, rank: int) -> str:
        """The name of the copy of a rank's local tensor."""
        return f"{name} of rank {rank}"

    @functools.cached_property
    def ranks(self) -> frozenset[int]:
        return frozenset(self.holders.values())

    def geometry(self, name: str) -> object:
        return name

    def held_by(self, name: str, rank: int) -> Iterator[Holder]:
        for owner, holder in self.holders.items():
            for piece in super().held_by(name, owner) if holder == rank else ():
                moved = self._moved(name, piece)
                # A rank may keep copies of several replicas of one piece. All readers take that of the first one (_moved).
                if moved.key == self.key(name, owner):
                    yield moved

    def near(self, name: str, piece: Owned) -> Iterator[Holder]:
        return (self._moved(name, other) for other in super().near(name, piece))

    def _moved(self, name: str, piece: Holder) -> Holder:
        owner = next(rank for rank in piece.ranks if rank in self.holders)
        return Holder((self.holders[owner],), self.key(name, owner), piece.owned)

    def lines(self) -> Iterator[str]:
        yield f"holders {self.holders}"
        yield from super().lines()
