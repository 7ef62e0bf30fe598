"""Ownership: which elements of a tensor a mesh coordinate holds, and where they lie in its local tensor.

This is the single source for local shapes, redistribution, checkpoint chunks and debug pictures. It is pure
integer arithmetic: it knows neither processes, nor tensors, nor placements. A placement describes itself to
this module as one *cut* per mesh dimension (:class:`Whole`, :class:`Chunk` or :class:`Run`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Union

__all__ = ["Box", "Chunk", "Cut", "Owned", "Run", "Whole", "boxes_of_interval", "chunk_range", "owned", "run_range"]


@dataclass(frozen=True)
class Whole:
    """The mesh dimension does not cut the tensor (Replicate, Partial)."""


@dataclass(frozen=True)
class Chunk:
    """The mesh dimension cuts tensor dimension ``dim`` as ``torch.chunk`` does (Shard)."""

    dim: int


@dataclass(frozen=True)
class Run:
    """The mesh dimension cuts the row-major storage into runs of units (RaggedShard).

    ``ndims`` is the length of the dimension prefix whose slices may not be cut; ``units[r]`` is the number of
    units of rank ``r``.
    """

    ndims: int
    units: tuple[int, ...]


Cut = Union[Whole, Chunk, Run]


@dataclass(frozen=True)
class Box:
    """A box of the global tensor (one offset and one size per dimension), at a place in the local tensor.

    ``local_offset`` counts elements of the local tensor's storage; a box of a flat local tensor is contiguous there.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local_offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True)
class Owned:
    """What one mesh coordinate holds: the shape of its local tensor and the boxes in it, in storage order.

    ``flat`` says whether the local tensor is the 1-D concatenation of its boxes (some cut is a :class:`Run`)
    or has the shape of its only box.
    """

    local_shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    flat: bool

    @property
    def numel(self) -> int:
        return math.prod(self.local_shape)


def chunk_range(size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and stop of chunk ``index`` when ``size`` elements are cut into ``parts`` as ``torch.chunk`` does."""
    step = -(-size // parts)
    return min(index * step, size), min((index + 1) * step, size)


def run_range(numel: int, units: Sequence[int], index: int) -> tuple[int, int]:
    """Start and stop of rank ``index`` in a flat range of ``numel`` elements cut by ``units`` (section 2 of the design)."""
    unit = numel // sum(units)
    start = unit * sum(units[:index])
    return start, start + unit * units[index]


def boxes_of_interval(shape: Sequence[int], start: int, stop: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut the flat row-major interval ``[start, stop)`` of ``shape`` into boxes, in storage order.

    At most ``2 * ndim - 1`` boxes come out: a ragged head, whole slices, a ragged tail, for every dimension::

        shape (4, 6), interval [4, 21)         . . . . H H
                                               M M M M M M
                                               M M M M M M
                                               T T T . . .

    Returns:
        (offsets, sizes) of each box; empty for an empty interval.
    """
    if start >= stop:
        return []
    if not shape:
        return [((), ())]
    inner = math.prod(shape[1:])
    first, head = divmod(start, inner)
    last, tail = divmod(stop, inner)

    def within(row: int, a: int, b: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        return [((row, *offsets), (1, *sizes)) for offsets, sizes in boxes_of_interval(shape[1:], a, b)]

    if head and first == last:
        return within(first, head, tail)
    boxes = []
    if head:
        boxes += within(first, head, inner)
        first += 1
    if first < last:
        boxes.append(((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])))
    if tail:
        boxes += within(last, 0, tail)
    return boxes


@lru_cache(maxsize=65536)
def owned(shape: tuple[int, ...], mesh_shape: tuple[int, ...], cuts: tuple[Cut, ...], coordinate: tuple[int, ...]) -> Owned:
    """What the rank at ``coordinate`` of a mesh of ``mesh_shape`` owns of a tensor of ``shape`` under ``cuts``.

    Cuts apply from left to right, each to the piece that the cuts before it left over.

    Raises:
        ValueError: the cuts have no meaning together (two runs; a chunk of a dimension that a run may cut), or
            the units of a run do not divide the prefix that they cut.
    """
    offsets, sizes = [0] * len(shape), list(shape)
    run: tuple[int, int, int] | None = None  # length of the prefix, start and stop of the run in it
    for mesh_dim, cut in enumerate(cuts):
        if isinstance(cut, Chunk):
            if cut.dim >= len(shape):
                raise ValueError(f"Shard({cut.dim}) on a tensor of shape {shape}: it has no dimension {cut.dim}")
            if run is not None and cut.dim < run[0]:
                raise ValueError(
                    f"Shard({cut.dim}) after a RaggedShard over dims {tuple(range(run[0]))} of the same tensor would cut "
                    "its units. Shard first and keep units whole: use (StridedRaggedShard, Shard) instead, or give "
                    f"RaggedShard at most {cut.dim} dims"
                )
            start, stop = chunk_range(sizes[cut.dim], mesh_shape[mesh_dim], coordinate[mesh_dim])
            offsets[cut.dim] += start
            sizes[cut.dim] = stop - start
        elif isinstance(cut, Run):
            if run is not None:
                raise ValueError(
                    f"two RaggedShard placements on one tensor of shape {shape} (mesh dimension {mesh_dim} is the "
                    "second): use one RaggedShard on a flattened mesh dimension instead"
                )
            check_units(tuple(sizes), cut)
            start, stop = run_range(math.prod(sizes[: cut.ndims]), cut.units, coordinate[mesh_dim])
            run = (cut.ndims, start, stop)
    if run is None:
        return Owned(tuple(sizes), (Box(tuple(offsets), tuple(sizes), 0),), flat=False)
    return _owned_run(offsets, sizes, *run)


def check_units(shape: tuple[int, ...], cut: Run) -> None:
    """Raise ``ValueError`` unless the units of ``cut`` divide the dimension prefix of ``shape`` evenly."""
    if cut.ndims > len(shape):
        raise ValueError(
            f"RaggedShard over dims {tuple(range(cut.ndims))} on a tensor of shape {shape}: it has only {len(shape)} dimensions"
        )
    prefix, total = math.prod(shape[: cut.ndims]), sum(cut.units)
    if prefix % total:
        raise ValueError(
            f"RaggedShard(dims={tuple(range(cut.ndims))}, local_units={cut.units}) cannot cut shape {shape}: its {prefix} "
            f"slices along these dims do not divide into {total} units. Choose units whose sum divides {prefix}"
        )


def _owned_run(offsets: list[int], sizes: list[int], ndims: int, start: int, stop: int) -> Owned:
    """The boxes of a run ``[start, stop)`` over the first ``ndims`` dimensions of a box, flattened one after another."""
    inner = math.prod(sizes[ndims:])
    boxes, local_offset = [], 0
    for prefix_offsets, prefix_sizes in boxes_of_interval(sizes[:ndims], start, stop) if inner else []:
        where = tuple(o + p for o, p in zip(offsets, prefix_offsets)) + tuple(offsets[ndims:])
        box = Box(where, prefix_sizes + tuple(sizes[ndims:]), local_offset)
        boxes.append(box)
        local_offset += box.numel
    return Owned(((stop - start) * inner,), tuple(boxes), flat=True)
