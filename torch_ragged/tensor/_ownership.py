"""Ownership: which elements of a tensor each mesh coordinate holds, and at which offsets of its local tensor.

It is pure integer arithmetic and must not depend on processes, tensors or placements. Local shapes, redistribution, checkpoint
chunks and debug pictures all follow from it. A placement describes itself to this module as one *cut* per mesh dimension
(:class:`Whole`, :class:`Chunk`, :class:`Run` or :class:`Listed`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, Union

from torch_ragged.tensor._units import Units

__all__ = [
    "Box",
    "Chunk",
    "Cut",
    "Listed",
    "Owned",
    "Run",
    "Whole",
    "boxes_of_interval",
    "check_cuts",
    "chunk_range",
    "coordinate_at",
    "has_single_boxes",
    "in_order",
    "index_at",
    "is_nested",
    "owned",
    "owned_near",
    "piece_shape",
    "row_major",
    "run_range",
]


@dataclass(frozen=True)
class Whole:
    """The mesh dimension does not cut the tensor (Replicate, Partial)."""


@dataclass(frozen=True)
class Chunk:
    """The mesh dimension cuts tensor dimension ``dim`` as ``torch.chunk`` does (Shard).

    With a ``split_factor`` the dimension is first cut into that many pieces, and each rank gets its chunk of every
    piece (_StridedShard). With ``ratios`` it is first cut into segments in these proportions, and each rank gets an equal chunk
    of every segment (InterleavedShard).
    """

    dim: int
    split_factor: int = 1
    ratios: tuple[int, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether each rank gets one chunk of the dimension."""
        return self.split_factor == 1 and not self.ratios

    def pieces(self, size: int, parts: int) -> Iterator[tuple[int, int]]:
        """Start and stop of the pieces of a dimension of ``size``, of each of which every one of ``parts`` ranks gets a chunk.

        Raises:
            ValueError: the ``ratios`` do not divide the dimension, or ``parts`` does not divide a segment.
        """
        if not self.ratios:
            yield from (chunk_range(size, self.split_factor, piece) for piece in range(self.split_factor))
            return
        unit, rest = divmod(size, sum(self.ratios))
        if rest or any(unit * ratio % parts for ratio in self.ratios):
            raise ValueError(
                f"InterleavedShard(dim={self.dim}, sizes={self.ratios}) cannot cut a dimension of size {size} over {parts} "
                f"rank{'s' * (parts > 1)}: the sum of the sizes must divide the dimension, and the number of ranks each segment"
            )
        start = 0
        for ratio in self.ratios:
            yield start, start + unit * ratio
            start += unit * ratio

    def segments(self, size: int) -> tuple[int, ...]:
        """The sizes of the segments of a dimension of ``size``, of each of which every rank gets a chunk. Raises as above."""
        return tuple([stop - start for start, stop in self.pieces(size, 1)])


@dataclass(frozen=True)
class Run:
    """The mesh dimension cuts the row-major storage into runs of units (RaggedShard).

    ``ndims`` is the length of the dimension prefix whose slices may not be cut; ``units[r]`` is the number of
    units of rank ``r``. With a ``split_factor`` tensor dimension 0 is first cut into that many even pieces, and each
    rank gets its run of every piece (StridedRaggedShard). A ``Chunk(0)`` on a mesh dimension to the right then selects pieces.
    """

    ndims: int
    units: Units
    split_factor: int = 1


_Extent = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a box."""


class _Lister(Protocol):
    """A hashable value that lists boxes: see ``CutPlacement.boxes``."""

    def boxes(self, shape: tuple[int, ...], ranks: int) -> Sequence[Sequence[_Extent]]: ...


@dataclass(frozen=True)
class Listed:
    """The mesh dimension gives each rank the boxes that ``lister`` lists for it, of the first ``ndims`` dimensions.

    No other mesh dimension may cut the tensor.
    """

    lister: _Lister
    ndims: int


Cut = Union[Whole, Chunk, Run, Listed]


@dataclass(frozen=True)
class Box:
    """A box of the global tensor (one offset and one size per dimension), and where it lies in the local tensor.

    ``local_offset`` and ``local_strides`` count elements of the local tensor's storage, as for ``torch.as_strided``.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local_offset: int
    local_strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The elements of the box."""
        return math.prod(self.sizes)


@dataclass(frozen=True)
class Owned:
    """What one mesh coordinate holds: the shape of its local tensor and the boxes in it, in storage order.

    If ``flat``, the local tensor is 1-D (a cut is a :class:`Run` or :class:`Listed`). Otherwise it has as many dimensions as
    the tensor.
    """

    local_shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    flat: bool

    @property
    def numel(self) -> int:
        """The elements of the local tensor."""
        return math.prod(self.local_shape)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor of ``shape``."""
    stride, strides = 1, []
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))


def coordinate_at(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The coordinate of row-major ``index`` in ``shape``."""
    result = []
    for size in reversed(shape):
        index, value = divmod(index, size)
        result.append(value)
    return tuple(reversed(result))


def index_at(coordinate: Sequence[int], shape: Sequence[int]) -> int:
    """The row-major index of ``coordinate`` in ``shape``."""
    index = 0
    for value, size in zip(coordinate, shape):
        index = index * size + value
    return index


def chunk_range(size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and stop of chunk ``index`` when ``size`` elements are cut into ``parts`` as ``torch.chunk`` does."""
    step = -(-size // parts)
    return min(index * step, size), min((index + 1) * step, size)


def run_range(numel: int, units: Units, index: int) -> tuple[int, int]:
    """Start and stop of rank ``index`` in a flat range of ``numel`` elements cut by ``units``, as RaggedShard defines it."""
    unit = numel // units.total
    return unit * units.before(index), unit * units.before(index + 1)


def boxes_of_interval(shape: Sequence[int], start: int, stop: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut the flat row-major interval ``[start, stop)`` of ``shape`` into boxes, in storage order.

    The result has at most ``2 * ndim - 1`` boxes: a ragged head, whole slices and a ragged tail, for every dimension::

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

    Cuts apply from left to right, each to the piece that the previous cuts leave.

    Raises:
        ValueError: the cuts have no meaning together (two runs; a chunk of a dimension that a run may cut; uneven
            pieces under a strided run), or the units of a run do not divide the prefix that they cut.
    """
    return _piece_of(shape, mesh_shape, cuts, coordinate).owned()


@lru_cache(maxsize=65536)
def has_single_boxes(shape: tuple[int, ...], mesh_shape: tuple[int, ...], cuts: tuple[Cut, ...]) -> bool:
    """Whether what each rank owns is one box of the tensor, which may be empty. All ranks get the same answer."""
    ranks = [range(1 if isinstance(cut, Whole) else parts) for cut, parts in zip(cuts, mesh_shape)]
    for coordinate in itertools.product(*ranks):
        boxes = _piece_of(shape, mesh_shape, cuts, coordinate).owned().boxes
        count = sum(box.numel > 0 for box in boxes)
        if count > 1 or (count == 0 and not shape):  # A tensor without dimensions has no empty box.
            return False
    return True


def owned_near(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    cuts: tuple[Cut, ...],
    coordinate: tuple[int, ...],
    mesh_dims: tuple[int, ...],
    other: Owned,
    in_mesh: bool = False,
) -> list[tuple[int, Owned]]:
    """A superset of the ranks whose elements overlap ``other``. Ranks differ from ``coordinate`` only in ``mesh_dims``.

    Returns:
        for each rank: its index, in row-major order over ``mesh_dims`` or, if ``in_mesh``, over the whole mesh; and what it
        owns.
    """
    if not other.numel:
        return []
    lows = [min(box.offsets[d] for box in other.boxes) for d in range(len(shape))]
    highs = [max(box.offsets[d] + box.sizes[d] for box in other.boxes) for d in range(len(shape))]
    bounds = list(zip(lows, highs))
    counted = range(len(mesh_shape)) if in_mesh else sorted(mesh_dims)
    strides = dict(zip(counted, row_major([mesh_shape[mesh_dim] for mesh_dim in counted])))
    pieces = [(0, _Piece(shape))]
    for mesh_dim, cut in in_order(cuts, mesh_shape):
        parts, stride, smaller = mesh_shape[mesh_dim], strides.get(mesh_dim, 0), []
        for rank, piece in pieces:
            for index in piece.indices_near(cut, parts, bounds) if mesh_dim in mesh_dims else (coordinate[mesh_dim],):
                part = piece if isinstance(cut, Whole) else piece.copy()
                part.apply(cut, parts, index)
                if part.may_share(bounds):
                    smaller.append((rank + index * stride, part))
        pieces = smaller
    return [(rank, piece.owned()) for rank, piece in sorted(pieces, key=lambda pair: pair[0])]


@lru_cache(maxsize=65536)
def in_order(cuts: tuple[Cut, ...], mesh_shape: tuple[int, ...]) -> tuple[tuple[int, Cut], ...]:
    """The cuts with their mesh dimensions, in the order in which they apply: from left to right, with one exception.

    If segments of dimension 0 are cut to the right of a strided run, the chunks of dimension 0 apply before the run. The
    run then cuts what they leave: its own pieces are not those of the segments.

    Raises:
        ValueError: the run has other pieces than such chunks leave.
    """
    pairs = list(enumerate(cuts))
    for mesh_dim, cut in pairs:
        if not isinstance(cut, Run) or cut.split_factor == 1:
            continue
        first = [pair for pair in pairs[mesh_dim + 1 :] if isinstance(pair[1], Chunk) and pair[1].dim == 0]
        if not any(isinstance(chunk, Chunk) and chunk.ratios for _, chunk in first):
            continue
        ranks = math.prod(mesh_shape[each] for each, _ in first)
        if cut.split_factor != ranks:
            raise ValueError(
                f"StridedRaggedShard with split_factor={cut.split_factor} to the left of an InterleavedShard(dim=0): the "
                f"split_factor must be the number of ranks that shard dimension 0 to its right, {ranks}"
            )
        rest = [pair for pair in pairs[mesh_dim + 1 :] if pair not in first]
        return (*pairs[:mesh_dim], *first, (mesh_dim, Run(cut.ndims, cut.units)), *rest)
    return tuple(pairs)


def _piece_of(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], cuts: tuple[Cut, ...], coordinate: tuple[int, ...]
) -> _Piece:
    piece = _Piece(shape)
    for mesh_dim, cut in in_order(cuts, mesh_shape):
        piece.apply(cut, mesh_shape[mesh_dim], coordinate[mesh_dim])
    return piece


class _Piece:
    """The part of a tensor that remains while cuts are applied one after another.

    ``segments[d]`` are the remaining index ranges (start, stop) of dimension ``d``, in order: one range, or several after a
    strided chunk. ``_run`` is the run that was applied, if any. ``_prefix`` is the shape of the leading dimensions that it
    cuts. ``_runs`` are the remaining flat intervals of that prefix, one per piece of a strided run. ``_listed`` are the
    boxes of a listed cut, which no other cut may change.
    """

    def __init__(self, shape: Sequence[int]) -> None:
        self.segments, self._whole = [[(0, size)] for size in shape], tuple(shape)
        self._run: Run | None = None
        self._runs: list[tuple[int, int]] = []
        self._prefix: tuple[int, ...] = ()
        self._listed: tuple[_Extent, ...] | None = None
        self._lister: _Lister | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple([sum([stop - start for start, stop in ranges]) for ranges in self.segments])

    def copy(self) -> _Piece:
        other = _Piece.__new__(_Piece)
        vars(other).update(vars(self), segments=list(self.segments))
        return other

    def may_share(self, bounds: Sequence[tuple[int, int]]) -> bool:
        """Whether an element may lie in the box of ``bounds``: (start, stop) of each dimension."""
        if self._listed is not None:
            near = tuple([low for low, _ in bounds]), tuple([high - low for low, high in bounds])
            return any(_overlap(extent, near) for extent in self._listed)
        for ranges, (low, high) in zip(self.segments, bounds):
            if not any(start < high and low < stop for start, stop in ranges):
                return False
        return self._run is None or bool(self._runs_near(bounds))

    def _runs_near(self, bounds: Sequence[tuple[int, int]]) -> Sequence[int]:
        """The indices of the run's pieces that may have elements in the box of ``bounds``; all indices in complex cases."""
        if not self._prefix or len(self.segments[0]) > 1:
            return range(len(self._runs))
        inner, first = math.prod(self._prefix[1:]), self.segments[0][0][0]
        low, high = ((bound - first) * inner for bound in bounds[0])
        return [piece for piece, (start, stop) in enumerate(self._runs) if start < high and low < stop]

    def indices_near(self, cut: Cut, parts: int, bounds: Sequence[tuple[int, int]]) -> Iterable[int]:
        """The ranks, of ``parts`` under ``cut``, that may own elements in the box of ``bounds``; all ranks in complex cases."""
        dim = cut.dim if isinstance(cut, Chunk) else 0
        if self._run and cut == Chunk(0) and len(self._runs) % parts == 0:
            return sorted({piece * parts // len(self._runs) for piece in self._runs_near(bounds)})
        if isinstance(cut, (Whole, Listed)) or self._run or not self.segments or len(self.segments[dim]) > 1:
            return range(parts)
        start, stop = self.segments[dim][0]
        low, high = (min(max(bound, start), stop) - start for bound in bounds[dim])
        if isinstance(cut, Chunk):
            step = -(-(stop - start) // parts) or 1
            return range(low // step, min(-(-high // step), parts)) if cut.is_plain else range(parts)
        rows = (stop - start) // cut.split_factor  # The rows of each piece, if the run is strided.
        inner = math.prod(self.shape[1 : cut.ndims])
        unit = rows * inner // cut.units.total
        if not unit or high - low > rows:
            return range(parts)
        near: set[int] = set()
        for piece in range(low // rows, -(-high // rows)):
            first, last = max(low - piece * rows, 0) * inner, min(high - piece * rows, rows) * inner
            if first < last:
                near.update(range(cut.units.owner(first // unit), cut.units.owner((last - 1) // unit) + 1))
        return sorted(near)

    def indices_of_all_shapes(self, cut: Cut, parts: int) -> Iterable[int]:
        """A few ranks, of ``parts`` under ``cut``, whose pieces together have every shape that occurs."""
        if not isinstance(cut, Chunk) or cut.ratios:
            return (0,)
        if cut.split_factor > 1 or cut.dim >= len(self.segments):
            return range(parts)
        size = self.shape[cut.dim]
        after_full_ones = size // (-(-size // parts) or 1)
        return {0, min(after_full_ones, parts - 1), parts - 1}

    def apply(self, cut: Cut, parts: int, index: int) -> None:
        """Keep only the part of this piece that the rank at ``index`` of ``parts`` gets under ``cut``."""
        if self._listed is not None and not isinstance(cut, Whole):
            raise ValueError(f"a second cut beside {self._lister}: {_ALONE}")
        if isinstance(cut, Chunk):
            self._apply_chunk(cut, parts, index)
        elif isinstance(cut, Run):
            self._apply_run(cut, index)
        elif isinstance(cut, Listed):
            self._apply_listed(cut, parts, index)

    def _apply_chunk(self, cut: Chunk, parts: int, index: int) -> None:
        shape = self.shape
        if cut.dim >= len(shape):
            raise ValueError(f"Shard({cut.dim}) on a tensor of {len(shape)} dimensions: shard a dimension that the tensor has")
        pieces = list(cut.pieces(shape[cut.dim], parts))  # It checks the ratios, also for one rank.
        if parts == 1:
            return
        if self._run is not None and cut.dim < max(self._run.ndims, self._run.split_factor > 1):
            self._choose_pieces(cut, parts, index)
            return
        ranges = []
        for start, stop in pieces:
            first, last = chunk_range(stop - start, parts, index)
            ranges.append((start + first, start + last))
        self.segments[cut.dim] = [part for start, stop in ranges for part in _within(self.segments[cut.dim], start, stop)]

    def _choose_pieces(self, cut: Chunk, parts: int, index: int) -> None:
        """A ``Chunk(0)`` after a strided run: the rank keeps some of the run's pieces."""
        assert self._run is not None
        ndims, strided = self._run.ndims, self._run.split_factor
        if cut != Chunk(0) or strided == 1:
            kind = "Shard" if cut.is_plain else "InterleavedShard" if cut.ratios else "_StridedShard"
            name = f"{kind}({cut.dim})"
            raise ValueError(
                f"{name} to the right of a ragged placement over dims {tuple(range(ndims))} would cut its units. Use "
                f"(StridedRaggedShard, Shard(0)) instead, or give the ragged placement at most {cut.dim} dims"
            )
        if len(self._runs) % parts:
            raise ValueError(
                f"Shard(0) over {parts} ranks to the right of a StridedRaggedShard with split_factor={strided}: the "
                "split_factor must be the number of ranks that shard dimension 0 to its right, or a multiple of that number"
            )
        keep = len(self._runs) // parts
        self._runs = self._runs[index * keep : (index + 1) * keep]

    def _apply_run(self, cut: Run, index: int) -> None:
        shape = self.shape
        if self._run is not None:
            raise ValueError("two ragged placements on one tensor: use one RaggedShard on a flattened mesh dimension instead")
        if cut.split_factor > 1 and (not shape or shape[0] % cut.split_factor):
            raise ValueError(
                f"StridedRaggedShard with split_factor={cut.split_factor} on a piece of shape {shape}: uneven Shard(0) under "
                f"a StridedRaggedShard has no meaning. Dimension 0 must be a multiple of {cut.split_factor}: pad it, or shard "
                "another dimension"
            )
        rows = shape[0] // cut.split_factor if shape else 1
        check_units((rows, *shape[1:]) if shape else (), cut)
        prefix = rows * math.prod(shape[1 : cut.ndims]) if cut.ndims else 1
        start, stop = run_range(prefix, cut.units, index)
        self._run, self._prefix = cut, shape[: cut.ndims]
        if cut.ndims or cut.split_factor == 1:
            self._runs = [(piece * prefix + start, piece * prefix + stop) for piece in range(cut.split_factor)]
        else:  # Each piece is one unit, so a run holds whole pieces of dimension 0.
            self._prefix = shape[:1]
            self._runs = [(piece * rows + start * rows, piece * rows + stop * rows) for piece in range(cut.split_factor)]

    def _apply_listed(self, cut: Listed, parts: int, index: int) -> None:
        if self._run is not None or any(ranges != [(0, size)] for ranges, size in zip(self.segments, self._whole)):
            raise ValueError(f"a second cut beside {cut.lister}: {_ALONE}")
        self._lister, self._listed = cut.lister, _boxes_of(cut, self._whole, parts)[index]

    def collapsed_shape(self) -> tuple[int, ...]:
        """The shape; if a run cuts a prefix, the prefix counts as one dimension. Listed boxes count as one dimension."""
        if self._listed is not None:
            return (sum(math.prod(sizes) for _, sizes in self._listed),)
        if self._run is None:
            return self.shape
        return (sum(stop - start for start, stop in self._runs), *self.shape[len(self._prefix) :])

    def owned(self) -> Owned:
        shape = self.shape
        if self._listed is not None:
            starts = itertools.accumulate((math.prod(sizes) for _, sizes in self._listed), initial=0)
            found = [Box(at, sizes, start, row_major(sizes)) for (at, sizes), start in zip(self._listed, starts)]
            return Owned(self.collapsed_shape(), tuple(found), flat=True)
        if self._run is None:
            return Owned(shape, tuple(self._boxes([0] * len(shape), shape, 0, row_major(shape))), flat=False)
        boxes: list[Box] = []
        rest, local_offset = shape[len(self._prefix) :], 0
        inner = math.prod(rest)
        for start, stop in _joined(self._runs):
            for offsets, sizes in boxes_of_interval(self._prefix, start, stop) if inner else []:
                local = (*sizes, *rest)
                boxes += self._boxes([*offsets, *(0,) * len(rest)], local, local_offset, row_major(local))
                local_offset += math.prod(local)
        return Owned((inner * sum(stop - start for start, stop in self._runs),), tuple(boxes), flat=True)

    def _boxes(
        self, offsets: Sequence[int], sizes: Sequence[int], local_offset: int, strides: tuple[int, ...]
    ) -> Iterator[Box]:
        """The global boxes of a box of this piece, which starts at ``local_offset`` of the local tensor."""
        if all([len(ranges) == 1 for ranges in self.segments]):  # The common case is one box: it takes less than half the time.
            starts = tuple([ranges[0][0] + offset for ranges, offset in zip(self.segments, offsets)])
            yield Box(starts, tuple(sizes), local_offset, strides)
            return
        ranges = []
        for dim, (offset, size) in enumerate(zip(offsets, sizes)):
            index, parts = 0, []
            for start, stop in _within(self.segments[dim], offset, offset + size) or [(self._start(dim), self._start(dim))]:
                parts.append((start, stop - start, index))
                index += stop - start
            ranges.append(parts)
        for box in itertools.product(*ranges):
            starts, lengths, indices = zip(*box) if box else ((), (), ())
            local = local_offset + sum(index * stride for index, stride in zip(indices, strides))
            yield Box(tuple(starts), tuple(lengths), local, strides)

    def _start(self, dim: int) -> int:
        return self.segments[dim][0][0] if self.segments[dim] else 0


_ALONE = "it lists boxes of the whole tensor. Use Replicate or Partial on the other mesh dimensions"


@lru_cache(maxsize=4096)
def _boxes_of(cut: Listed, shape: tuple[int, ...], ranks: int) -> tuple[tuple[_Extent, ...], ...]:
    """The boxes of each rank, over all dimensions of ``shape``.

    Raises:
        ValueError: the lists are not one per rank, a box is not in the tensor, or an element is in no box or in several.
    """
    prefix, rest = shape[: cut.ndims], shape[cut.ndims :]
    if len(prefix) < cut.ndims:
        raise ValueError(f"{cut.lister} on a tensor of shape {shape}: it cuts the first {cut.ndims} dimensions")
    lists = cut.lister.boxes(prefix, ranks)
    if problem := _fault_of(lists, prefix, ranks):
        raise ValueError(f"{cut.lister}.boxes({prefix}, {ranks}) lists {problem}: each element must be in one box, of one rank")
    whole = (0,) * len(rest)
    return tuple([tuple([((*at, *whole), (*sizes, *rest)) for at, sizes in each if math.prod(sizes)]) for each in lists])


def _fault_of(lists: Sequence[Sequence[_Extent]], shape: tuple[int, ...], ranks: int) -> str:
    """Why ``lists`` are not the boxes of ``ranks`` ranks that together have each element of ``shape`` once; otherwise empty."""
    if len(lists) != ranks:
        return f"the boxes of {len(lists)} ranks"
    boxes = sorted([(tuple(offsets), tuple(sizes)) for each in lists for offsets, sizes in each])
    for offsets, sizes in boxes:
        if not len(offsets) == len(sizes) == len(shape) or min(0, *offsets, *sizes) < 0:
            return f"a box at {offsets} of {sizes}"
        if any(offset + size > whole for offset, size, whole in zip(offsets, sizes, shape)):
            return f"a box at {offsets} of {sizes}, which is not in the tensor"
    for index, one in enumerate(boxes if shape else ()):
        end = one[0][0] + one[1][0]
        # Later boxes begin at the same row or below: those that begin below the last row of this one have nothing of it.
        for other in itertools.takewhile(lambda other, end=end: other[0][0] < end, boxes[index + 1 :]):  # type: ignore[misc]
            if _overlap(one, other):
                return f"an element twice, in the boxes at {one[0]} of {one[1]} and at {other[0]} of {other[1]}"
    numel = sum(math.prod(sizes) for _, sizes in boxes)
    return "" if numel == math.prod(shape) else f"{numel} of {math.prod(shape)} elements"


def _overlap(one: _Extent, other: _Extent) -> bool:
    """Whether two boxes have an element in common."""
    return all(a < b + n and b < a + m for a, m, b, n in zip(one[0], one[1], other[0], other[1]))


def _joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Index ranges without the empty ones; neighbours are joined."""
    result: list[tuple[int, int]] = []
    for start, stop in ranges:
        if start < stop:
            result.append((result.pop()[0] if result and result[-1][1] == start else start, stop))
    return result


def _within(ranges: Sequence[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """The part ``[start, stop)`` of the concatenation of index ranges; empty ranges are left out, neighbours are joined."""
    result, before = [], 0
    for first, last in ranges:
        low, high = max(start, before), min(stop, before + last - first)
        result.append((first + low - before, first + high - before))
        before += last - first
    return _joined(result)


def piece_shape(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], cuts: tuple[Cut, ...], coordinate: tuple[int, ...]
) -> tuple[int, ...]:
    """The shape of what ``coordinate`` owns under ``cuts``; the prefix that a run cuts counts as one dimension."""
    return _piece_of(shape, mesh_shape, cuts, coordinate).collapsed_shape()


def is_nested(inner: Cut, outer: Cut) -> bool:
    """Whether ``inner`` cuts the pieces that ``outer``, on a mesh dimension to its left, leaves.

    If not, the two are orthogonal: the part that a rank owns under one cut does not depend on the other.
    """
    if not isinstance(outer, Chunk):
        return False  # A chunk to the right of a run cuts other dimensions, or selects pieces of a strided run.
    if isinstance(inner, Chunk):
        return inner.dim == outer.dim
    return isinstance(inner, Run) and outer.dim < max(inner.ndims, inner.split_factor > 1)


def check_cuts(shape: tuple[int, ...], mesh_shape: tuple[int, ...], cuts: tuple[Cut, ...]) -> None:
    """Raise the ``ValueError`` of :func:`owned` if ``cuts`` are illegal for any rank of the mesh.

    All ranks check all shapes of pieces, so all ranks raise the same error.
    """
    pieces = [_Piece(shape)]  # Uneven chunks leave pieces of different shapes: one piece of each shape is checked further.
    for mesh_dim, cut in in_order(cuts, mesh_shape):
        parts = mesh_shape[mesh_dim]
        by_shape: dict[tuple[int, ...], _Piece] = {}
        for piece in pieces:
            for index in piece.indices_of_all_shapes(cut, parts):
                smaller = piece.copy()
                smaller.apply(cut, parts, index)
                by_shape.setdefault(smaller.shape, smaller)
        pieces = list(by_shape.values())


def check_units(shape: tuple[int, ...], cut: Run) -> None:
    """Raise ``ValueError`` unless the units of ``cut`` divide the dimension prefix of ``shape`` evenly."""
    name = "RaggedShard" if cut.split_factor == 1 else "StridedRaggedShard"
    dims = tuple(range(cut.ndims))
    if cut.ndims > len(shape):
        raise ValueError(f"{name} over dims {dims} on a tensor of shape {shape}: give at most {len(shape)} dims")
    prefix, total = math.prod(shape[: cut.ndims]), cut.units.total
    if prefix % total:
        piece = "" if cut.split_factor == 1 else f"each of the {cut.split_factor} pieces of "
        raise ValueError(
            f"{name}(dims={dims}, local_units={cut.units!r}) cannot cut {piece}shape {shape}: its {prefix} "
            f"slices over these dims do not divide into {total} units. Choose units whose sum divides {prefix}"
        )
