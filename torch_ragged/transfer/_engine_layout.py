"""EngineLayout: what an inference engine holds, as a plain description: names, shapes, and boxes or intervals by rank.

It knows neither engines nor process groups. Tensors of the source may be fused, split or stacked in the engine's tensors::

    source    q (8, 4)   k (2, 4)   v (2, 4)         engine    qkv (12, 4)      rows of q, then of k, then of v
                                                     rank 4    rows 0-3 of q, row 0 of k, row 0 of v
                                                     rank 5    rows 4-7 of q, row 1 of k, row 1 of v
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Union

import torch

from torch_ragged.tensor._exchange import clipped, overlap
from torch_ragged.tensor._ownership import Box, Owned, boxes_of_interval, chunk_range, row_major
from torch_ragged.transfer._sides import Holder, ListedSide

__all__ = ["EngineLayout", "EngineSide"]

EngineRegion = Union[tuple[int, int], tuple[Sequence[int], Sequence[int]]]
"""A flat interval (start, stop) of a tensor's row-major elements, or a box (offsets, sizes)."""


@dataclass(frozen=True)
class _EngineTensor:
    """A tensor of an engine: its shape, what ranks hold of it, and where tensors of the source lie in it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    held: tuple[tuple[int, tuple[Box, ...]], ...]  # (rank, boxes in the order of its local tensor)
    parts: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]  # (source name, its shape, its offsets)


class EngineLayout:
    """The tensors of an engine. It is the target of a :func:`plan`.

    ::

        layout = EngineLayout(torch.bfloat16)
        layout.add("embed", (1000, 64), [(4, ((0, 0), (500, 64))), (5, ((500, 0), (500, 64)))])
        layout.add_sharded("qkv", {"q": (64, 64), "k": (16, 64), "v": (16, 64)}, ranks=(4, 5))

    Args:
        dtype: of the engine's tensors, if :meth:`add` is given no other.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.tensors: dict[str, _EngineTensor] = {}

    def add(
        self,
        name: str,
        shape: Sequence[int],
        held: Iterable[tuple[int, EngineRegion]],
        *,
        parts: Iterable[tuple[str, Sequence[int], Sequence[int]]] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Add a tensor of the engine.

        Args:
            name: of the tensor in the engine, and in the target that ``run()`` gets.
            shape: of the whole tensor. No rank needs to hold it whole.
            held: ``(rank, region)`` pairs. A region is a flat interval ``(start, stop)`` or a box ``(offsets, sizes)``. If a
                rank has several regions, its local tensor has them one after another, each in row-major order. Several ranks
                may have the same regions.
            parts: ``(source name, source shape, offsets)``: where each tensor of the source lies in this one. Offsets are those
                of its first element. They are negative if the source is larger than this tensor, which then is a part of it.
                Shapes with fewer dimensions get dimensions of size 1 in front. None: the source's tensor of this name.
            dtype: of the local tensors.

        Raises:
            ValueError: the name was added before; a region is not in the tensor; parts overlap or do not cover the tensor.
        """
        whole = tuple(shape)
        if name in self.tensors:
            raise ValueError(f"EngineLayout.add: {name} was added before")
        boxes: dict[int, list[Box]] = {}
        for rank, region in held:
            own = boxes.setdefault(rank, [])
            start = sum(box.numel for box in own)
            own += _boxes(name, whole, region, start)
        placed = [(name, whole, (0,) * len(whole))] if parts is None else [(n, tuple(s), tuple(o)) for n, s, o in parts]
        tensor = _EngineTensor(whole, dtype or self.dtype, tuple((r, tuple(own)) for r, own in boxes.items()), tuple(placed))
        _check_parts(name, tensor)
        self.tensors[name] = tensor

    def add_sharded(
        self,
        name: str,
        sources: Mapping[str, Sequence[int]],
        ranks: Sequence[int],
        dim: int | None = 0,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Add a tensor that concatenates tensors of the source in dimension 0, each cut into even chunks over ``ranks``.

        This is how engines hold fused projections (q, k, v; gate, up) under tensor parallelism: a rank has its chunk of each.

        Args:
            sources: shapes by name, in the order of the concatenation. They are equal but for dimension 0.
            ranks: the ranks of one tensor-parallel group. If a rank is named more than once, or a source has fewer rows than
                ranks, use :meth:`add`.
            dim: the dimension that is cut; None: each rank holds the whole tensor.

        Raises:
            ValueError: shapes differ in other dimensions, or do not divide evenly.
        """
        shapes = [tuple(shape) for shape in sources.values()]
        if len({shape[1:] for shape in shapes}) != 1 or not all(shapes):
            raise ValueError(f"EngineLayout.add_sharded: {name} concatenates shapes {shapes}, which differ beyond dimension 0")
        starts = [0, *itertools.accumulate(shape[0] for shape in shapes)]
        rest = (0,) * (len(shapes[0]) - 1)
        held: list[tuple[int, EngineRegion]] = []
        for index, rank in enumerate(ranks):
            for start, shape in zip(starts, shapes):
                offsets, sizes = [start, *rest], list(shape)
                if dim is not None:
                    if shape[dim] % len(ranks):
                        raise ValueError(
                            f"EngineLayout.add_sharded: {name}: {shape} does not divide into {len(ranks)} in dim {dim}"
                        )
                    low, high = chunk_range(shape[dim], len(ranks), index)
                    offsets[dim], sizes[dim] = offsets[dim] + low, high - low
                held.append((rank, (offsets, sizes)))
        parts = [(source, shape, (start, *rest)) for source, shape, start in zip(sources, shapes, starts)]
        self.add(name, (starts[-1], *shapes[0][1:]), held, parts=parts, dtype=dtype)

    def lines(self) -> Iterator[str]:
        """A line for each tensor."""
        for name, tensor in self.tensors.items():
            yield f"{name}: {tensor}"


def _boxes(name: str, shape: tuple[int, ...], region: EngineRegion, start: int) -> list[Box]:
    first, second = region
    if isinstance(first, int) and isinstance(second, int):
        if not 0 <= first <= second <= math.prod(shape):
            raise ValueError(
                f"EngineLayout.add: {name}: interval [{first}, {second}) is not in its {math.prod(shape)} elements"
            )
        found = boxes_of_interval(shape, first, second)
    else:
        offsets, sizes = tuple(first), tuple(second)  # type: ignore[arg-type]
        fits = len(offsets) == len(sizes) == len(shape)
        if not fits or any(not 0 <= o <= o + n <= size for o, n, size in zip(offsets, sizes, shape)):
            raise ValueError(f"EngineLayout.add: {name}: the box {(offsets, sizes)} is not in shape {shape}")
        found = [(offsets, sizes)] if math.prod(sizes) else []
    boxes = []
    for offsets, sizes in found:
        boxes.append(Box(offsets, sizes, start, row_major(sizes)))
        start += math.prod(sizes)
    return boxes


def _check_parts(name: str, tensor: _EngineTensor) -> None:
    """Each element of the tensor must come from exactly one part."""
    boxes: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
    for source, shape, offsets in tensor.parts:
        ndim = max(len(shape), len(tensor.shape))
        if len(offsets) != ndim:
            raise ValueError(f"EngineLayout.add: {name}: the offsets {offsets} of {source} need {ndim} numbers")
        part = overlap(offsets, _in_front(shape, ndim), (0,) * ndim, _in_front(tensor.shape, ndim))
        if part is None:
            raise ValueError(f"EngineLayout.add: {name}: {source} of shape {shape} at {offsets} has no element of it")
        for other, *box in boxes:
            if overlap(*part, *box):
                raise ValueError(f"EngineLayout.add: {name}: {source} and {other} overlap")
        boxes.append((source, *part))
    covered = sum(math.prod(sizes) for *_, sizes in boxes)
    # Parts do not overlap, so that equal sizes mean that each element has a source.
    if covered != math.prod(tensor.shape):
        raise ValueError(f"EngineLayout.add: the parts of {name} cover {covered} of its {math.prod(tensor.shape)} elements")


def _in_front(numbers: Sequence[int], ndim: int, fill: int = 1) -> tuple[int, ...]:
    return (*(fill,) * (ndim - len(numbers)), *numbers)


class EngineSide(ListedSide):
    """The target side of an :class:`EngineLayout`: what ranks hold of each tensor of the source."""

    def __init__(self, layout: EngineLayout) -> None:
        self.tensors = dict(layout.tensors)
        super().__init__({}, {}, {})
        for key, tensor in self.tensors.items():
            # Ranks with equal boxes are replicas: one holder, whose ranks may pass elements on to each other.
            by_boxes: dict[tuple[Box, ...], list[int]] = {}
            for rank, boxes in tensor.held:
                by_boxes.setdefault(boxes, []).append(rank)
            for name, shape, offsets in tensor.parts:
                if self.shapes.setdefault(name, shape) != shape or self._dtypes.setdefault(name, tensor.dtype) != tensor.dtype:
                    raise ValueError(
                        f"EngineLayout: {name} has shapes {self.shapes[name]} and {shape}, or dtypes {self._dtypes[name]} and "
                        f"{tensor.dtype}, in different tensors: give each source one shape and one dtype"
                    )
                holders = self._holders.setdefault(name, [])
                for boxes, ranks in by_boxes.items():
                    own = _in_source(boxes, tensor.shape, shape, offsets)
                    if own.boxes:
                        holders.append(Holder(tuple(sorted(ranks)), key, own))

    def lines(self) -> Iterator[str]:
        return (f"{name}: {tensor}" for name, tensor in self.tensors.items())

    def local_numel(self, key: str, rank: int) -> int:
        """The elements of a rank's local tensor."""
        return sum(box.numel for held, boxes in self.tensors[key].held for box in boxes if held == rank)


def _in_source(boxes: Sequence[Box], shape: Sequence[int], source: Sequence[int], offsets: Sequence[int]) -> Owned:
    """The elements of the boxes that lie in a tensor of shape ``source`` at ``offsets``, in the source's coordinates."""
    ndim, found = len(offsets), []
    keep = ndim - len(source)  # Dimensions of size 1 in front, which only the engine's tensor has.
    for box in boxes:
        starts, strides = _in_front(box.offsets, ndim, 0), _in_front(box.local_strides, ndim, 0)
        whole = Box(starts, _in_front(box.sizes, ndim), box.local_offset, strides)
        part = clipped(whole, offsets, _in_front(source, ndim))
        if part is not None:
            at = tuple(a - o for a, o in zip(part.offsets, offsets))
            found.append(Box(at[keep:], part.sizes[keep:], part.local_offset, strides[keep:]))
    return Owned((sum(box.numel for box in found),), tuple(found), flat=True)
