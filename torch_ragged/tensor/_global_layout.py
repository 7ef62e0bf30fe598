"""GlobalLayout: the boxes of a local tensor in the four fields that torch and FlexShard use. No communication, no tensors.

``owned_boxes`` says the same with offsets and strides of storage. This file converts between the two, and checks that the boxes
of all ranks are one whole tensor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, Optional

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from torch_ragged.tensor._exchange import overlap
from torch_ragged.tensor._owned_boxes import owned_part
from torch_ragged.tensor._ownership import Box, coordinate_at, row_major
from torch_ragged.tensor.interleaved_placement_types import is_int

__all__ = ["GlobalLayout", "coverage_problem", "global_layout_of"]

_FIELDS = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
_BoxRegion = tuple[tuple[int, ...], tuple[int, ...]]  # Offsets and sizes of a box of the global tensor.


@dataclass(frozen=True)
class GlobalLayout:
    """Which boxes of a global tensor a rank's local tensor holds, and where.

    ::

        rows 1 and 2 of a (4, 3) tensor, in a local tensor of shape (2, 3)

        GlobalLayout(global_shape=(4, 3), global_offsets=((1, 0),), local_offsets=((0, 0),), local_sizes=((2, 3),))

        layout = GlobalLayout.of(param)                                # export: a DTensor's boxes on this rank
        local = param.to_local().view(layout.local_shape)              # each box is a slice of this view
        layout.boxes(local.shape)                                      # import: as owned_boxes has them

    Box ``i`` begins at ``global_offsets[i]`` of the global tensor and at ``local_offsets[i]`` of the local tensor, and has the
    shape ``local_sizes[i]``. The local tensor has as many dimensions as the global one, and may have padding beside the boxes.
    These are the fields of torch's ``CheckpointableTensor`` and of FlexShard's layouts.

    One form is added: in a 1-D local tensor, ``local_offsets[i]`` may be one number for a box of any dimensions. The elements
    of the box then follow each other from there, in row-major order. A run of elements that begins and ends inside of rows is
    at most ``2 * ndim - 1`` such boxes. As slices, it is a box per row.

    Args:
        global_shape: of the whole tensor.
        global_offsets, local_offsets, local_sizes: one tuple per box; empty if the rank holds nothing.

    Raises:
        TypeError: a field is not made of tuples of integers. :meth:`of` takes any sequences.
        ValueError: the fields have different numbers of boxes, or a box has another number of dimensions, is not in the global
            tensor, or overlaps another one, in the global tensor or in the local one.

    Source: pytorch#189492 (``CheckpointableTensor``), pytorch#190445 (random numbers for such boxes).
    """

    global_shape: tuple[int, ...]
    global_offsets: tuple[tuple[int, ...], ...]
    local_offsets: tuple[tuple[int, ...], ...]
    local_sizes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        for name in _FIELDS:
            value = getattr(self, name)
            rows = (value,) if name == "global_shape" else value
            if not isinstance(rows, tuple) or not all(isinstance(row, tuple) and all(map(is_int, row)) for row in rows):
                expected = "a tuple of integers" if name == "global_shape" else "a tuple with one tuple of integers per box"
                raise TypeError(f"GlobalLayout: {name} must be {expected}, got {value!r}: GlobalLayout.of(fields) converts")
        counts = tuple(len(getattr(self, name)) for name in _FIELDS[1:])
        if len(set(counts)) > 1:
            raise ValueError(
                f"GlobalLayout: global_offsets, local_offsets and local_sizes must have one entry per box, got {counts} entries"
            )
        ndim = len(self.global_shape)
        for i, (start, local, sizes) in enumerate(self._rows()):
            if len(start) != ndim or len(sizes) != ndim or len(local) not in (1, ndim):
                raise ValueError(
                    f"GlobalLayout: box {i} has global offsets {start}, sizes {sizes} and local offsets {local}: a box of the "
                    f"shape {self.global_shape} needs {ndim} numbers each, or one local offset in a 1-D local tensor"
                )
            if (
                any(not 0 <= o <= o + n <= size for o, n, size in zip(start, sizes, self.global_shape))
                or min(sizes, default=0) < 0
            ):
                raise ValueError(
                    f"GlobalLayout: box {i} with offsets {start} and sizes {sizes} is not in the global shape "
                    f"{self.global_shape}"
                )
            if min(local, default=0) < 0:
                raise ValueError(f"GlobalLayout: box {i} has local offsets {local}: give numbers of at least 0")
        if len({len(local) for local in self.local_offsets}) > 1:
            raise ValueError(
                f"GlobalLayout: local_offsets {self.local_offsets[:4]} have different numbers of dimensions: all boxes are in "
                "one local tensor"
            )
        for where, regions in (("global", list(zip(self.global_offsets, self.local_sizes))), ("local", self._local_regions())):
            pair = _overlapping(regions)
            if pair is not None:
                one, other = (f"offsets {regions[i][0]} and sizes {regions[i][1]}" for i in pair)
                raise ValueError(
                    f"GlobalLayout: boxes {pair[0]} and {pair[1]} overlap in the {where} tensor: {one}; {other}: give each "
                    "element once"
                )

    @classmethod
    def of(
        cls,
        source: Any,
        mesh_shape: Optional[Sequence[int]] = None,
        placements: Optional[Sequence[Placement]] = None,
        coordinate: Optional[Sequence[int]] = None,
        *,
        flat: bool = False,
    ) -> GlobalLayout:
        """The layout of a DTensor on this rank; of a shape on any rank; or of an object with the four fields.

        Args:
            source: a DTensor under any placements; a shape, with the other arguments, as for :func:`owned_boxes`; or an object
                with the four fields: a layout of FlexShard, or a tensor that torch calls a ``CheckpointableTensor``.
            mesh_shape, placements, coordinate: as for :func:`owned_boxes`.
            flat: for a DTensor or a shape: whether local offsets are single numbers of the flat local tensor. False: boxes are
                slices of the local tensor viewed as :attr:`local_shape`, as torch and FlexShard expect them; a ragged
                local tensor that cuts rows then has a box for each row.

        Returns:
            the boxes that this rank holds; none if it is not in the mesh. Under Partial, they hold values to be reduced.

        Raises:
            TypeError, ValueError: as for :func:`owned_boxes`; or the four fields are no layout, as above.
        """
        if not isinstance(source, DTensor) and all(hasattr(source, name) for name in _FIELDS):
            shape, *fields = (getattr(source, name) for name in _FIELDS)
            return cls(_ints(shape, "global_shape"), *(_tuples(rows, name) for name, rows in zip(_FIELDS[1:], fields)))
        if not isinstance(source, (DTensor, Sequence)):
            raise TypeError(
                f"GlobalLayout.of takes a DTensor, a shape, or an object with {', '.join(_FIELDS)}, got {type(source).__name__}"
            )
        shape = tuple(source.shape if isinstance(source, DTensor) else source)
        part = owned_part(source, mesh_shape, placements, coordinate)
        boxes = [box for box in part.boxes if box.numel] if part is not None else []
        if flat:
            pieces = [piece for box in boxes for piece in _contiguous_pieces(box)]
            return cls._from([(piece, (piece.local_offset,)) for piece in pieces], shape)
        if part is None or part.flat:
            return cls._from(list(_slices(boxes)), shape)
        return cls._from([(box, coordinate_at(box.local_offset, part.local_shape)) for box in boxes], shape)

    @classmethod
    def _from(cls, boxes: Iterable[tuple[Box, tuple[int, ...]]], shape: tuple[int, ...]) -> GlobalLayout:
        pairs = list(boxes)
        offsets, sizes = tuple(box.offsets for box, _ in pairs), tuple(box.sizes for box, _ in pairs)
        return cls(shape, offsets, tuple(local for _, local in pairs), sizes)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The smallest shape of a local tensor that has all boxes. A local tensor with padding is larger."""
        regions = self._local_regions()
        if not regions:
            return (0, *self.global_shape[1:])
        return tuple(max(start[d] + sizes[d] for start, sizes in regions) for d in range(len(regions[0][0])))

    @property
    def numel(self) -> int:
        """The elements that the rank holds."""
        return sum(math.prod(sizes) for sizes in self.local_sizes)

    def boxes(
        self, local_shape: Optional[Sequence[int]] = None, local_strides: Optional[Sequence[int]] = None
    ) -> tuple[Box, ...]:
        """The boxes as :func:`owned_boxes` returns them, in the order of the local tensor's storage, without empty ones.

        Args:
            local_shape: of the local tensor; None: :attr:`local_shape`, without padding.
            local_strides: of the local tensor; None: contiguous.

        Raises:
            ValueError: a box is not in a local tensor of this shape.
        """
        shape = self.local_shape if local_shape is None else tuple(local_shape)
        strides = row_major(shape) if local_strides is None else tuple(local_strides)
        found = []
        for (start, local, sizes), region in zip(self._rows(), self._local_regions()):
            if len(region[0]) != len(shape) or any(o + n > size for o, n, size in zip(*region, shape)):
                raise ValueError(
                    f"GlobalLayout: the box with local offsets {local} and sizes {sizes} is not in a local tensor of shape "
                    f"{shape}: give a local tensor of at least {self.local_shape}"
                )
            if math.prod(sizes):
                own = strides if len(local) == len(sizes) else tuple(strides[0] * stride for stride in row_major(sizes))
                found.append(Box(start, sizes, sum(o * stride for o, stride in zip(local, strides)), own))
        return tuple(sorted(found, key=lambda box: box.local_offset))

    def _rows(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
        return zip(self.global_offsets, self.local_offsets, self.local_sizes)

    def _local_regions(self) -> list[_BoxRegion]:
        """The boxes in the local tensor: of its own number of dimensions."""
        return [(o, n if len(o) == len(n) else (math.prod(n),)) for _, o, n in self._rows()]


def global_layout_of(value: object) -> GlobalLayout | None:
    """The layout of a plain local tensor that carries the four fields; None for any other value.

    Raises:
        TypeError, ValueError: the fields are no layout, or do not fit the local tensor.
    """
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return None
    if not all(hasattr(value, name) for name in _FIELDS):
        return None
    layout = GlobalLayout.of(value)
    layout.boxes(value.shape)
    return layout


def coverage_problem(shape: tuple[int, ...], held: Mapping[int, Sequence[Box]]) -> str | None:
    """Why the boxes of all ranks are not one whole tensor; None if they are. Replicas hold equal boxes.

    Args:
        shape: of the global tensor.
        held: the boxes of each rank. A rank's own boxes do not overlap.
    """
    owners: dict[_BoxRegion, int] = {}
    for rank, boxes in held.items():
        for box in boxes:
            owners.setdefault((box.offsets, box.sizes), rank)
    regions = list(owners)
    pair = _overlapping(regions)
    if pair is not None:
        one, other = (regions[i] for i in pair)
        return (
            f"the box {one} of rank {owners[one]} and the box {other} of rank {owners[other]} overlap in part: ranks that hold "
            "equal elements must have equal boxes"
        )
    covered = sum(math.prod(sizes) for _, sizes in regions)
    if covered == math.prod(shape):
        return None
    gap, total = _gap(shape, regions), math.prod(shape)
    return f"no rank holds the element {gap}: the boxes of all ranks have {covered} of {total} elements"


def _gap(shape: tuple[int, ...], regions: Sequence[_BoxRegion]) -> tuple[int, ...]:
    """The first element that is in no region. Regions do not overlap, and one such element exists."""
    if not shape:
        return ()
    edges = {0, *(start[0] + sizes[0] for start, sizes in regions)}
    for i in sorted(edge for edge in edges if edge < shape[0]):  # A gap begins at 0, or where a region ends.
        inner = [(start[1:], sizes[1:]) for start, sizes in regions if start[0] <= i < start[0] + sizes[0]]
        if sum(math.prod(sizes) for _, sizes in inner) < math.prod(shape[1:]):
            return (i, *_gap(shape[1:], inner))
    raise AssertionError("the regions cover the tensor")


def _overlapping(regions: Sequence[_BoxRegion]) -> tuple[int, int] | None:
    """The indices of two regions with a common element."""
    numbers = [i for i, (_, sizes) in enumerate(regions) if math.prod(sizes)]
    if len(numbers) < 2:
        return None
    ndim = len(regions[0][0])
    if ndim == 0:
        return numbers[0], numbers[1]
    # A sweep along the dimension with the most different offsets: there may be a box for each row of a large matrix.
    dim = max(range(ndim), key=lambda d: len({regions[i][0][d] for i in numbers}))
    numbers.sort(key=lambda i: regions[i][0][dim])
    active: list[int] = []
    for i in numbers:
        start, sizes = regions[i]
        active = [j for j in active if regions[j][0][dim] + regions[j][1][dim] > start[dim]]
        for j in active:
            other, others = regions[j]
            if overlap(start, sizes, other, others):
                return min(i, j), max(i, j)
        active.append(i)
    return None


def _contiguous_pieces(box: Box) -> Iterator[Box]:
    """The box in pieces that are contiguous in the local tensor, of as many whole dimensions as possible."""
    dims, numel = len(box.sizes), 1
    while dims and (box.sizes[dims - 1] == 1 or box.local_strides[dims - 1] == numel):
        dims -= 1
        numel *= box.sizes[dims]
    return _single_boxes(box, dims)


def _single_boxes(box: Box, dims: int) -> Iterator[Box]:
    """The box in pieces of size 1 in its first ``dims`` dimensions. They are contiguous if the other dimensions are."""
    for at in itertools.product(*map(range, box.sizes[:dims])):
        offsets = (*(o + i for o, i in zip(box.offsets, at)), *box.offsets[dims:])
        sizes = (*(1,) * dims, *box.sizes[dims:])
        yield Box(offsets, sizes, box.local_offset + sum(i * s for i, s in zip(at, box.local_strides)), row_major(sizes))


def _slices(boxes: Sequence[Box]) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """The boxes of a flat local tensor as slices of one view of it, which has as many dimensions as they, with their offsets.

    The view is ``(1, ..., 1, n, *inner)``, where all boxes have the inner sizes::

        (4, 6), rows 1 and 2               view (2, 6)      one box
        (4, 6), elements 4 to 16           view (1, 13)     a box for each of the rows 0, 1, 2
        (3, 4, 5), rows 2 to 7 of 12       view (1, 6, 5)   a box for each matrix
    """
    pieces = [piece for box in boxes for piece in _contiguous_pieces(box)]
    if not pieces:
        return
    ndim = len(pieces[0].sizes)
    if ndim == 0:
        yield pieces[0], ()
        return
    outer = next(k for k in range(1, ndim + 1) if len({piece.sizes[k:] for piece in pieces}) == 1)
    unit = math.prod(pieces[0].sizes[outer:])
    for single in itertools.chain(*(_single_boxes(piece, outer - 1) for piece in pieces)):
        yield single, (*(0,) * (outer - 1), single.local_offset // unit, *(0,) * (ndim - outer))


def _ints(values: Any, name: str) -> tuple[int, ...]:
    try:
        return tuple(index(value) for value in values)
    except TypeError as error:
        raise TypeError(f"GlobalLayout: {name} must be made of integers, got {values!r}") from error


def _tuples(rows: Any, name: str) -> tuple[tuple[int, ...], ...]:
    if not isinstance(rows, Iterable):
        raise TypeError(f"GlobalLayout: {name} must have one entry per box, got {rows!r}")
    return tuple(_ints(row, name) for row in rows)
