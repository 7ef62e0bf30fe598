"""Tiles: a plan as regular boxes, as many-to-many collectives take them. Integers only: no processes, no tensors.

::

    (8, 6), ragged rows 3, 5 on ranks 0, 1  ->  columns on ranks 2, 3

    tile    box                  source                      target
    0       rows 0 to 2          rank 0, (3, 6)              ranks 2, 3 as (1, 2), Shard(1), (3, 3) each
    1       rows 3 to 7          rank 1, (5, 6)              ranks 2, 3 as (1, 2), Shard(1), (5, 3) each

NVIDIA's M2N (nccl-extensions) moves one tensor between two disjoint meshes of consecutive ranks. On each side one mesh
dimension shards evenly along a tensor dimension, and the other one replicates. A tile is a box of a tensor with two of them. A
box that each rank holds whole counts as sharded over one rank, as M2N has it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from torch_ragged.tensor._exchange import clipped
from torch_ragged.tensor._ownership import Box, row_major
from torch_ragged.transfer._sides import Side, TensorSide

__all__ = ["Tile", "TileSide", "Tiles", "tiles_of"]

_MOVED = {
    *(torch.int8, torch.uint8, torch.int32, torch.uint32, torch.int64, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32, torch.float64),
}
"""The dtypes of M2N."""

_MOST_SOURCES, _MOST_TARGETS = 16, 64
"""So many shards of the source may feed one shard of the target, and so many of the target be fed by one, in M2N 0.1.0."""


class _Block(NamedTuple):
    """A box of the tensor, the ranks that hold it at equal strides of their local tensors, and the name of these."""

    box: Box
    ranks: tuple[int, ...]
    key: str | None


@dataclass(frozen=True)
class TileSide:
    """The ranks that hold a tile before or after, and where it lies in their local tensors.

    Attributes:
        start_rank: the first rank. The others follow it, in row-major order of ``mesh_shape``.
        mesh_shape: two dimensions.
        placements: one ``Shard(dim)`` and one ``Replicate()``.
        local_shape: of the part of the tile that each rank holds.
        local_offsets: of the first element in the flat local tensor, one per rank, in elements.
        local_strides: in the flat local tensor, equal on all ranks.
        key: the name of the local tensor in an engine; None: the name of the tile's tensor.
    """

    start_rank: int
    mesh_shape: tuple[int, int]
    placements: tuple[Placement, Placement]
    local_shape: tuple[int, ...]
    local_offsets: tuple[int, ...]
    local_strides: tuple[int, ...]
    key: str | None = None

    @property
    def ranks(self) -> range:
        """The global ranks."""
        return range(self.start_rank, self.start_rank + math.prod(self.mesh_shape))

    @property
    def is_contiguous(self) -> bool:
        """Whether each rank's part is one stretch of memory. M2N takes others only as copies."""
        pairs = zip(self.local_shape, self.local_strides, row_major(self.local_shape))
        return all(size == 1 or stride == wanted for size, stride, wanted in pairs)

    @property
    def shards(self) -> tuple[int, int]:
        """The tensor dimension that is sharded, and over how many ranks."""
        axis = next(i for i, placement in enumerate(self.placements) if isinstance(placement, Shard))
        return self.placements[axis].dim, self.mesh_shape[axis]  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Tile:
    """A box of a tensor that one collective can move.

    Attributes:
        name: of the tensor in the source.
        offsets, sizes: of the box in the whole tensor.
        source, target: the ranks on both sides. They are disjoint, but for a local tile.
    """

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    source: TileSide
    target: TileSide

    @property
    def is_local(self) -> bool:
        """Whether one rank holds the tile before and after: it copies, and no collective is needed."""
        return self.source.ranks == self.target.ranks


@dataclass(frozen=True)
class Tiles:
    """All tiles of a plan: :meth:`Plan.tiles` makes it.

    Attributes:
        tiles: in the order of the plan's tensors. On each rank of the target, each element is in one tile.
        refused: why a tensor has no tiles, by its name.
    """

    tiles: tuple[Tile, ...]
    refused: Mapping[str, str] = field(default_factory=dict)


def tiles_of(source: Side, target: Side, shapes: Mapping[str, tuple[int, ...]], max_dims: int) -> Tiles:
    """The tiles of a plan, as few as one per tensor: if a side is no even mesh, the tensor is cut."""
    tiles: list[Tile] = []
    refused = {}
    for name, shape in shapes.items():
        problem = _tile_problem(source, target, name, shape, max_dims)
        if problem:
            refused[name] = problem
        elif math.prod(shape):
            sides = (sorted(_pieces(side, name), key=lambda each: (each.box.offsets, each.ranks)) for side in (source, target))
            tiles += _tiles_of_tensor(name, shape, *sides)
    return Tiles(tuple(tiles), refused)


def _tile_problem(source: Side, target: Side, name: str, shape: tuple[int, ...], max_dims: int) -> str:
    old, new = source.dtype(name), target.dtype(name)
    if isinstance(source, TensorSide) and source.specs[name].has_partial:
        return "the source is Partial: redistribute it first"
    if old != new:
        return f"the source is {old} and the target {new}: cast the source first"
    if old not in _MOVED:
        return f"{old} is not moved: view it as another dtype of {old.itemsize} bytes"
    if not 1 <= len(shape) <= max_dims:
        return f"it has {len(shape)} dimensions: view it with 1 to {max_dims}"
    return ""


def _pieces(side: Side, name: str) -> Iterator[_Block]:
    """The boxes of a side, each once."""
    known: set[tuple[tuple[int, ...], str | None, int]] = set()
    for rank in sorted(side.ranks):
        for holder in side.held_by(name, rank):
            # An engine holds several parts of one tensor in one local tensor: the first offset tells them apart.
            mark = (holder.ranks, holder.key, min(box.local_offset for box in holder.owned.boxes))
            if mark not in known:
                known.add(mark)
                yield from (_Block(box, holder.ranks, holder.key) for box in holder.owned.boxes if box.numel)


def _tiles_of_tensor(name: str, shape: tuple[int, ...], sources: Sequence[_Block], targets: Sequence[_Block]) -> Iterator[Tile]:
    """One tile, or one per source box and regular target, or one per box that a source and a target have in common."""
    whole = Box((0,) * len(shape), shape, 0, (0,) * len(shape))
    before, after = _mesh_side(whole, sources), _mesh_side(whole, targets)
    if before is not None and after is not None and set(before.ranks).isdisjoint(after.ranks) and _fits(shape, before, after):
        yield Tile(name, whole.offsets, whole.sizes, before, after)
        return
    for i, piece in enumerate(sources):
        sender = piece.ranks[i % len(piece.ranks)]  # Replicas send about equal loads.
        here = [(clipped(each.box, piece.box.offsets, piece.box.sizes), each) for each in targets]
        shared = [_Block(box, each.ranks, each.key) for box, each in here if box is not None]
        after = _mesh_side(piece.box, shared)
        before = _single(piece.box, (sender,), piece.key)
        if after is not None and set(piece.ranks).isdisjoint(after.ranks) and _fits(piece.box.sizes, before, after):
            yield Tile(name, piece.box.offsets, piece.box.sizes, before, after)
            continue
        for box, ranks, key in shared:
            part = clipped(piece.box, box.offsets, box.sizes)
            assert part is not None
            # A rank with the box on both sides copies it: as a receiver, it would be on both sides of a call.
            for rank in (rank for rank in ranks if rank in piece.ranks):
                yield Tile(name, box.offsets, box.sizes, _single(part, (rank,), piece.key), _single(box, (rank,), key))
            for run in _consecutive([rank for rank in ranks if rank not in piece.ranks]):
                yield Tile(name, box.offsets, box.sizes, _single(part, (sender,), piece.key), _single(box, run, key))


def _fits(sizes: Sequence[int], source: TileSide, target: TileSide) -> bool:
    """Whether no shard shares elements with more shards of the other side than M2N takes."""
    (dim, sources), (other, targets) = source.shards, target.shards
    feeding, fed = (
        (_overlaps(sizes[dim], targets, sources), _overlaps(sizes[dim], sources, targets))
        if dim == other
        else (sources, targets)
    )
    return feeding <= _MOST_SOURCES and fed <= _MOST_TARGETS


def _overlaps(size: int, parts: int, others: int) -> int:
    """The most of ``others`` even parts of a dimension that one of ``parts`` even parts overlaps."""
    step, other = size // parts, size // others
    return max((start + step - 1) // other - start // other + 1 for start in range(0, size, step))


def _single(box: Box, ranks: Sequence[int], key: str | None) -> TileSide:
    """Consecutive ranks that all hold the whole tile."""
    offsets = (box.local_offset,) * len(ranks)
    return TileSide(ranks[0], (len(ranks), 1), (Replicate(), Shard(0)), box.sizes, offsets, box.local_strides, key)


def _consecutive(ranks: Sequence[int]) -> Iterator[list[int]]:
    run: list[int] = []
    for rank in ranks:
        if run and rank != run[-1] + 1:
            yield run
            run = []
        run.append(rank)
    if run:
        yield run


def _mesh_side(box: Box, pieces: Sequence[_Block]) -> TileSide | None:
    """The pieces, which are parts of ``box``, as one mesh; None if they are not even parts on consecutive ranks."""
    if not pieces:
        return None
    first = pieces[0]
    alike = {(each.box.sizes, each.box.local_strides, each.key, len(each.ranks)) for each in pieces}
    cut = [d for d in range(len(box.sizes)) if first.box.sizes[d] != box.sizes[d]]
    if len(alike) > 1 or len(cut) > 1:
        return None
    count, copies = len(pieces), len(first.ranks)
    if not cut:
        is_run = list(first.ranks) == list(range(first.ranks[0], first.ranks[0] + copies))
        return _single(first.box, first.ranks, first.key) if count == 1 and is_run else None
    (dim,) = cut
    pieces = sorted(pieces, key=lambda each: each.box.offsets[dim])
    size = first.box.sizes[dim]
    if [each.box.offsets[dim] for each in pieces] != list(range(box.offsets[dim], box.offsets[dim] + box.sizes[dim], size)):
        return None
    if count * size != box.sizes[dim]:
        return None
    start = min(rank for each in pieces for rank in each.ranks)
    # Consecutive ranks hold either the parts of one copy, or the copies of one part.
    for mesh_shape, placements, rank_of in (
        ((copies, count), (Replicate(), Shard(dim)), lambda copy, part: start + copy * count + part),
        ((count, copies), (Shard(dim), Replicate()), lambda copy, part: start + part * copies + copy),
    ):
        if all(each.ranks == tuple(rank_of(copy, part) for copy in range(copies)) for part, each in enumerate(pieces)):
            offset_of = {rank: each.box.local_offset for each in pieces for rank in each.ranks}
            offsets = tuple(offset_of[rank] for rank in sorted(offset_of))
            strides = first.box.local_strides
            return TileSide(start, mesh_shape, placements, first.box.sizes, offsets, strides, first.key)
    return None
