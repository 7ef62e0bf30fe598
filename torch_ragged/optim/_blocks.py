"""Blocks of matrices: which parameters have blocks, which rank holds each block, and at which offset of its local tensor.

Everything follows from the global shape, never from the size of a local shard, so that numerics do not depend on the number of
ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Optional

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from torch_ragged.granularity import Granularity, blocks
from torch_ragged.optim._base import placed_of
from torch_ragged.optim._gather import Placed
from torch_ragged.optim._matrix_groups import MATRIX_NDIMS
from torch_ragged.tensor._cut_placement import cut_of
from torch_ragged.tensor._ownership import Chunk, Listed, Run, row_major
from torch_ragged.tensor._units import Units
from torch_ragged.tensor.placement_types import RaggedShard, normalize_placements
from torch_ragged.tensor.strided_placement_types import StridedRaggedShard

__all__ = [
    "BlockLayout",
    "BlockPolicy",
    "Region",
    "aligned_placements",
    "block_edges",
    "flat_indices",
    "grid_placements",
    "block_layout_of",
    "regions_of",
    "regions_within",
]

_MOST_SCALES = 0.1
"""The most bytes of scales per element. A parameter whose matrices are too narrow for this limit has no blocks."""


@dataclass(frozen=True)
class BlockPolicy:
    """Decides which parameters have blocks, and of which size. 8-bit optimizers quantize per block.

    A policy is also an ``orig_param_policy``: ``fully_shard(..., orig_param_policy=policy)`` keeps every block whole on one
    rank, so that the optimizer needs no communication. A parameter of two dimensions (a matrix), three or four (a stack of
    matrices) has blocks if it has at least ``min_numel`` elements and its scales need at most 0.1 byte per element. Blocks at
    the lower and the right edge of a matrix may be smaller. No block is in two matrices.

    Args:
        block: (height, width) of a block. One integer is the width of blocks of height 1.
        min_numel: a parameter with fewer elements has no blocks.

    Raises:
        ValueError: a size of ``block`` is not a positive integer, or ``min_numel`` is not an integer >= 0.
    """

    block: tuple[int, int] = (32, 32)
    min_numel: int = 4096

    def __post_init__(self) -> None:
        given = self.block
        block = (1, given) if isinstance(given, int) and not isinstance(given, bool) else given
        is_pair = isinstance(block, tuple) and len(block) == 2
        if not is_pair or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in block):
            raise ValueError(f"block must be a positive integer or a pair of them (height, width), got {given!r}")
        if not isinstance(self.min_numel, int) or self.min_numel < 0:
            raise ValueError(f"min_numel must be an integer >= 0, got {self.min_numel!r}")
        object.__setattr__(self, "block", block)

    def __call__(self, fqn: str, param: torch.Tensor) -> Optional[Granularity]:
        """The granularity that keeps the parameter's blocks whole; None if the parameter has no blocks."""
        return blocks(*self.block) if self.is_blocked(tuple(param.shape)) else None

    def is_blocked(self, shape: Sequence[int]) -> bool:
        """Whether a parameter of this global shape has blocks."""
        numel = math.prod(shape)
        if len(shape) not in MATRIX_NDIMS or numel < max(self.min_numel, 1):
            return False
        # Two moments, with a float32 scale per block each. An optimizer with one moment keeps to the same limit: then one
        # policy serves several optimizers.
        return 2 * 4 * math.prod(self.grid(shape)) <= _MOST_SCALES * numel

    def grid(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The number of blocks along each dimension. The leading dimensions of a stack are unchanged."""
        height, width = self.block
        return (*shape[:-2], -(-shape[-2] // height), -(-shape[-1] // width))


# --- which rank holds which blocks ----------------------------------------------------------------------------------


def grid_placements(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[Placement, ...], policy: BlockPolicy
) -> tuple[Placement, ...] | None:
    """The placements of the grid of blocks, if ``placements`` cut no block; None if they cut one.

    Then each rank's shard of the grid has exactly the blocks of its shard of the parameter. ``shape`` and ``placements`` are
    the parameter's.
    """
    local, result = list(shape), list[Placement]()
    is_even, factor, has_run = True, 1, False
    uneven = set[int]()
    for placement, size in zip(normalize_placements(placements, shape, mesh_shape), mesh_shape):
        cut = cut_of(placement)
        # Not known: which of these cuts a grid of blocks could follow. Their blocks are redistributed.
        if isinstance(cut, Listed) or (isinstance(cut, Chunk) and not cut.is_plain):
            return None
        if isinstance(cut, Chunk):
            dim = cut.dim
            if not (dim == 0 and factor > 1):  # Otherwise this Shard selects among the split_factor parts of a strided run.
                unit = policy.block[dim - len(shape) + 2] if dim >= len(shape) - 2 else 1
                chunk = -(-local[dim] // size)
                # Another cut of parts of several sizes is at another place in each.
                if (chunk % unit and chunk < local[dim]) or dim in uneven:
                    return None
                if local[dim] % size:
                    is_even = False
                    uneven.add(dim)
                local[dim] = chunk
            result.append(placement)
        elif isinstance(cut, Run):
            factor = cut.split_factor
            run = _grid_run(cut, (local[0] // factor, *local[1:]), policy)
            if run is None:
                return None
            has_run = True
            result.append(run)
        else:
            result.append(placement)
    # A run counts in equal units of the parts that other mesh dimensions leave. Parts of several sizes would need runs of their
    # own.
    if has_run and not is_even:
        return None
    return normalize_placements(tuple(result), policy.grid(shape), mesh_shape)


def _grid_run(run: Run, shape: tuple[int, ...], policy: BlockPolicy) -> Placement | None:
    """The placement that cuts the grid of blocks of ``shape``, a piece of the run, where ``run`` cuts the elements.

    None if the run cuts inside a band, which is a row of blocks.
    """
    height, ndims, factor = policy.block[0], run.ndims, run.split_factor
    if factor > 1 and len(shape) == 2 and shape[0] % height:
        return None  # Two of the ``factor`` parts would share a band.
    rows, columns = shape[-2:]
    bands, edge = -(-rows // height), 0
    unit, done = math.prod(shape) // run.units.total, 0
    runs: list[tuple[int, int]] = []
    for units, ranks in run.units.runs:
        for _ in range(ranks if units else 0):
            edge += unit * units
            row, within = divmod(edge, columns)
            matrix, row = divmod(row, rows)
            if within or row % height:
                return None
            before, done = done, matrix * bands + row // height
            runs.append((done - before, 1))
        runs += [] if units else [(0, ranks)]
    dims, grid_units = tuple(range(len(shape) - 1)), Units(runs)
    if ndims <= len(shape) - 2:
        dims, grid_units = tuple(range(ndims)), run.units
    return RaggedShard(dims, grid_units) if factor == 1 else StridedRaggedShard(dims, grid_units, factor)


def aligned_placements(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: Sequence[Placement], policy: BlockPolicy
) -> tuple[Placement, ...]:
    """Placements that cut no block, to replace ``placements`` that cut one.

    The first mesh dimension that is not replicated gets an even share of the bands for each of its ranks. All other mesh
    dimensions replicate.
    """
    # Bands are counted through all matrices of a stack, so that few large matrices are spread, too. Ranks along the other mesh
    # dimensions update the same blocks, with the same bits.
    cutting = next((i for i, p in enumerate(placements) if not isinstance(p, Replicate)), 0)
    rows, height = shape[-2], policy.block[0]
    bands = -(-rows // height)
    total, ranks = bands * math.prod(shape[:-2]), mesh_shape[cutting]

    def first_row(band: int) -> int:
        return band // bands * rows + band % bands * height

    edges = [first_row(total * rank // ranks) for rank in range(ranks + 1)]
    run = RaggedShard(tuple(range(len(shape) - 1)), tuple(b - a for a, b in zip(edges, edges[1:])))
    return tuple(run if i == cutting else Replicate() for i in range(len(mesh_shape)))


# --- offsets of blocks in a local tensor ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Region:
    """A contiguous part of a local tensor that consists of whole blocks.

    Attributes:
        start: the offset of the region in the flat local tensor, in elements.
        sizes: the numbers of matrices, rows and columns.
        origin: the flat index of the first element in the global tensor.
        strides: the strides of the global tensor, in elements: from one matrix, row and column to the next.
        first_block: the offset of its scales in the flat local grid.
        grid: the number of blocks along each of ``sizes``.
    """

    start: int
    sizes: tuple[int, int, int]
    origin: int
    strides: tuple[int, int, int]
    first_block: int
    grid: tuple[int, int, int]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The region of a flat local tensor, as a (matrices, rows, columns) view."""
        return flat[self.start : self.start + self.numel].view(self.sizes)

    def scales(self, flat: torch.Tensor) -> torch.Tensor:
        """The scales of the region's blocks, as a view of a flat local grid of shape ``grid``."""
        return flat[self.first_block : self.first_block + math.prod(self.grid)].view(self.grid)

    def indices(self, device: torch.device) -> torch.Tensor:
        """The flat global index of every element, int64, of shape ``sizes``."""
        return _indices(self.origin, self.sizes, self.strides, device)


@dataclass(frozen=True)
class BlockLayout:
    """Which blocks of a parameter this rank holds.

    Attributes:
        aligned: placements with whole blocks on all ranks; None if those of the parameter keep them whole.
        grid: the placements of the grid of blocks. Of a plain tensor: none.
        regions: this rank's blocks, in ``aligned`` or the parameter's placements.
    """

    aligned: Optional[tuple[Placement, ...]] = None
    grid: tuple[Placement, ...] = ()
    regions: tuple[Region, ...] = ()


def block_layout_of(param: torch.Tensor, policy: BlockPolicy, most: int) -> BlockLayout | None:
    """The layout of the blocks of ``param``, in regions of about ``most`` elements at most; None if it has no blocks.

    The elements of a block beyond the edge of a matrix count, too. No communication.
    """
    shape, placed = tuple(param.shape), placed_of(param)
    if not policy.is_blocked(shape):
        return None
    most = max(1, most * math.prod(shape) // (math.prod(policy.grid(shape)) * math.prod(policy.block)))
    if not isinstance(param, DTensor):
        return BlockLayout(regions=tuple(regions_of(placed, (), policy, most)))
    mesh_shape, coordinate = tuple(param.device_mesh.shape), param.device_mesh.get_coordinate()
    # From shapes and placements alone: all ranks of the mesh find the same placements, and so the same collectives. Regions are
    # of this rank.
    placements, aligned = tuple(param.placements), None
    grid = grid_placements(shape, mesh_shape, placements, policy)
    if grid is None:
        aligned = aligned_placements(shape, mesh_shape, placements, policy)
        grid = grid_placements(shape, mesh_shape, aligned, policy)
        placed = placed_of(param, aligned)
    assert grid is not None
    return BlockLayout(aligned, grid, () if coordinate is None else tuple(regions_of(placed, tuple(coordinate), policy, most)))


def flat_indices(placed: Placed, coordinate: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The flat global index of every element of the local tensor at ``coordinate``: int64, one-dimensional."""
    mine, strides = placed.owned(coordinate), row_major(placed.shape)
    result = torch.empty(mine.numel, dtype=torch.int64, device=device)
    for box in mine.boxes:
        origin = sum(offset * stride for offset, stride in zip(box.offsets, strides))
        result.as_strided(box.sizes, box.local_strides, box.local_offset).copy_(_indices(origin, box.sizes, strides, device))
    return result


def _indices(origin: int, sizes: Sequence[int], strides: Sequence[int], device: torch.device) -> torch.Tensor:
    result = torch.full((1,) * len(sizes), origin, dtype=torch.int64, device=device)
    for dim, (size, stride) in enumerate(zip(sizes, strides)):
        shape = [1] * len(sizes)
        shape[dim] = size
        result = result + (torch.arange(size, device=device) * stride).view(shape)
    return result


def regions_of(placed: Placed, coordinate: tuple[int, ...], policy: BlockPolicy, most: int) -> list[Region]:
    """The local tensor of the rank at ``coordinate``, as regions of whole blocks with about ``most`` elements at most.

    Call it only for placements that :func:`grid_placements` accepts: they cut no block.
    """
    return [part for region in _whole_regions(placed, coordinate, policy) for part in _split_region(region, policy, most)]


def block_edges(regions: Sequence[Region], policy: BlockPolicy) -> list[tuple[int, int]]:
    """Where a local tensor can be cut between bands of blocks: the element and the block that begin there, and both ends."""
    edges = [(0, 0)]
    for region in regions:
        for band in _split_region(region, policy, 1):
            edges.append((band.start + band.numel, band.first_block + math.prod(band.grid)))
    return edges


def regions_within(regions: Sequence[Region], policy: BlockPolicy, start: int, stop: int, block: int) -> list[Region]:
    """The regions of a run of the local tensor, with offsets in this run.

    Args:
        start, stop: the run's elements, which begin and end at :func:`block_edges`.
        block: the first block of the run.
    """
    found = []
    for region in regions:
        # A region within the run stays whole: one update instead of one for each band.
        is_inside = start <= region.start and region.start + region.numel <= stop
        for part in [region] if is_inside else _split_region(region, policy, 1):
            if start <= part.start and part.start + part.numel <= stop:
                found.append(replace(part, start=part.start - start, first_block=part.first_block - block))
    return found


def _whole_regions(placed: Placed, coordinate: tuple[int, ...], policy: BlockPolicy) -> Iterator[Region]:
    rows, columns = placed.shape[-2:]
    (height, width), block = policy.block, 0
    # The rank's scales are in the order of its boxes: so a count of blocks says where the scales of each box begin. This holds
    # because a grid is cut in the same order as the elements.
    for box in placed.owned(coordinate).boxes:
        if not box.numel:
            continue
        (*_, row, column), (*_, high, wide) = box.offsets, box.sizes
        for start, size, full, unit in ((row, high, rows, height), (column, wide, columns, width)):
            assert start % unit == 0 and (start + size == full or size % unit == 0), "a block is cut"
        strides, local_offset = (rows * columns, columns, 1), box.local_offset
        for matrix, count in _stacks(placed.shape[:-2], box.offsets[:-2], box.sizes[:-2]):
            grid = (count, -(-high // height), -(-wide // width))
            origin = (matrix * rows + row) * columns + column
            yield Region(local_offset, (count, high, wide), origin, strides, block, grid)
            local_offset, block = local_offset + count * high * wide, block + math.prod(grid)


def _stacks(shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """The matrices of a box, by its leading dimensions: for each run of neighbours, the first index and the number."""
    per = math.prod(shape[1:])
    if not shape:
        yield 0, 1
    elif sizes[1:] == shape[1:]:
        yield offsets[0] * per, sizes[0] * per
    else:  # (experts, 2), of which it has the gates only, or the ups.
        for expert in range(offsets[0], offsets[0] + sizes[0]):
            yield expert * per + offsets[1], sizes[1]


def _split_region(region: Region, policy: BlockPolicy, most: int) -> Iterator[Region]:
    """Split a region with more than ``most`` elements: between matrices, or a single matrix between bands of blocks."""
    (count, rows, columns), (_, bands, across) = region.sizes, region.grid
    if region.numel <= most:
        yield region
    elif count > 1:
        per = max(1, most // (rows * columns))
        for first in range(0, count, per):
            some = min(per, count - first)
            part = Region(
                region.start + first * rows * columns,
                (some, rows, columns),
                region.origin + first * region.strides[0],
                region.strides,
                region.first_block + first * bands * across,
                (some, bands, across),
            )
            yield from _split_region(part, policy, most)
    else:
        height = policy.block[0]
        per = max(1, most // (height * columns))
        for band in range(0, bands, per):
            some, row = min(per, bands - band), band * height
            yield Region(
                region.start + row * columns,
                (1, min(some * height, rows - row), columns),
                region.origin + row * region.strides[1],
                region.strides,
                region.first_block + band * across,
                (1, some, across),
            )
