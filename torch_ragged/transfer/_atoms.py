"""Atoms: the elements that one rank sends to others in a transfer. Integers only: no processes, no tensors.

If one holder of the source and one holder of the target have elements in common, these are a *region*. The ranks of the target
that do not hold the region in the source too are its receivers. An atom is a region, or a part of it, on its way::

    direct     0 -> 4      0 -> 5          each receiver gets the region from a rank of the source
    spread     0 -> 4 -> 5                 each receiver gets one part of the region from the source,
               0 -> 5 -> 4                 and then the other parts from the other receivers

Every receiver gets each element once. Ranks of the source send each element once if regions are spread.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch_ragged.tensor._ownership import Box, Owned, boxes_of_interval, row_major
from torch_ragged.tensor._route import Part, merged_parts, part_of
from torch_ragged.transfer._sides import Holder, Side

__all__ = ["Atom", "Copy", "Shared", "Window", "atoms_of", "parts_within", "windows_of"]

Window = tuple[tuple[int, ...], tuple[int, ...]]  # Offsets and sizes of a box of the tensor.


class Atom(NamedTuple):
    """Elements on their way from ``sender`` to ``receivers``; the first receiver passes them on to the others.

    ``source`` are parts of the sender's local tensor, ``target`` are parts of each receiver's, with elements in the same order.
    """

    sender: int
    receivers: tuple[int, ...]
    numel: int
    source_key: str | None
    target_key: str | None
    source: tuple[Part, ...]
    target: tuple[Part, ...]

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements are one stretch of memory on both ends."""
        return all(len(parts) == 1 and parts[0].is_contiguous for parts in (self.source, self.target))


class Shared(NamedTuple):
    """A box that two local tensors have in common: its sizes, and offset and strides in both."""

    sizes: tuple[int, ...]
    offsets: tuple[int, int]
    strides: tuple[tuple[int, ...], tuple[int, ...]]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def part(self, side: int) -> Part:
        return part_of(self.offsets[side], self.sizes, self.strides[side])

    def within(self, start: int, stop: int) -> Iterator[Shared]:
        """The elements ``[start, stop)`` of this box, in row-major order."""
        for at, sizes in boxes_of_interval(self.sizes, start, stop):
            source, target = (
                offset + sum(i * stride for i, stride in zip(at, strides))
                for offset, strides in zip(self.offsets, self.strides)
            )
            yield Shared(sizes, (source, target), self.strides)


class Copy(NamedTuple):
    """Elements that a rank holds before and after."""

    source_key: str | None
    target_key: str | None
    boxes: tuple[Shared, ...]


def parts_within(parts: Sequence[Part], start: int, stop: int) -> Iterator[Part]:
    """The elements ``[start, stop)`` of ``parts`` one after another, each in row-major order."""
    for part in parts:
        for at, sizes in boxes_of_interval(part.sizes, max(start, 0), min(stop, part.numel)):
            yield part_of(part.offset + sum(i * stride for i, stride in zip(at, part.strides)), sizes, part.strides)
        start, stop = start - part.numel, stop - part.numel


@dataclass(frozen=True)
class _SharedRegion:
    """The elements that a holder of the source and a holder of the target have in common."""

    source: Holder
    target: Holder
    shared: tuple[Shared, ...]

    @property
    def order(self) -> tuple[object, ...]:
        """Sorts the regions of a tensor in the same way on all ranks."""
        return (self.source.ranks, self.target.ranks, self.target.key or "", self.target.owned.boxes[0].local_offset)

    @functools.cached_property
    def receivers(self) -> tuple[int, ...]:
        have = set(self.source.ranks)
        return tuple(rank for rank in self.target.ranks if rank not in have)

    def atoms(self, spreads: bool) -> Iterator[Atom]:
        senders, receivers = self.source.ranks, self.receivers
        # Other regions start with another sender, so that the senders of many regions get about equal loads.
        turn = sum(self.target.ranks) % len(senders)
        if spreads and len(receivers) > len(senders):
            numel = sum(shared.numel for shared in self.shared)
            for i, receiver in enumerate(receivers):
                start, stop = (numel * j // len(receivers) for j in (i, i + 1))
                if start < stop:
                    others = (*receivers[:i], *receivers[i + 1 :])
                    yield self._atom(senders[(turn + i) % len(senders)], (receiver, *others), self._within(start, stop))
        else:
            for i, receiver in enumerate(receivers):
                yield self._atom(senders[(turn + i) % len(senders)], (receiver,), self.shared)

    def copy(self) -> Copy:
        return Copy(self.source.key, self.target.key, self.shared)

    def _atom(self, sender: int, receivers: tuple[int, ...], shared: Sequence[Shared]) -> Atom:
        source, target = (merged_parts(each.part(side) for each in shared) for side in (0, 1))
        numel = sum(each.numel for each in shared)
        return Atom(sender, receivers, numel, self.source.key, self.target.key, source, target)

    def _within(self, start: int, stop: int) -> tuple[Shared, ...]:
        found: list[Shared] = []
        for shared in self.shared:
            found += shared.within(max(start, 0), min(stop, shared.numel))
            start, stop = start - shared.numel, stop - shared.numel
        return tuple(found)


def _regions(source: Holder, targets: Sequence[Holder], window: Window | None) -> Iterator[_SharedRegion]:
    for target in targets:
        shared = tuple(_shared_boxes(source.owned, target.owned, window))
        if shared:
            yield _SharedRegion(source, target, shared)


def _shared_boxes(source: Owned, target: Owned, window: Window | None) -> Iterator[Shared]:
    for s, t in itertools.product(source.boxes, target.boxes):
        starts = tuple(map(max, s.offsets, t.offsets))
        stops = tuple(min(a + n, b + m) for a, n, b, m in zip(s.offsets, s.sizes, t.offsets, t.sizes))
        if window is not None:
            starts = tuple(map(max, starts, window[0]))
            stops = tuple(min(stop, a + n) for stop, a, n in zip(stops, *window))
        sizes = tuple(stop - start for start, stop in zip(starts, stops))
        if not sizes or min(sizes) > 0:
            offsets = tuple(
                box.local_offset + sum((a - o) * n for a, o, n in zip(starts, box.offsets, box.local_strides)) for box in (s, t)
            )
            yield Shared(sizes, offsets, (s.local_strides, t.local_strides))  # type: ignore[arg-type]


def atoms_of(
    source: Side, target: Side, name: str, rank: int, window: Window | None, spreads: bool
) -> tuple[tuple[Atom, ...], tuple[Copy, ...]]:
    """What ``rank`` sends, passes on and receives of a tensor, and what it copies, within a box of it.

    All ranks of an atom have it in the same order among the atoms of the tensor.

    Args:
        window: a box of the tensor; None: the whole tensor.
        spreads: whether a region with more receivers than senders is passed on between its receivers.
    """
    sent, received, copies = [], [], []
    for holder in source.held_by(name, rank):
        for region in _regions(holder, list(target.near(name, _owned_within(holder.owned, window))), window):
            sent.append(region)
            if rank in region.target.ranks:
                copies.append(region)
    for holder in target.held_by(name, rank):
        near = source.near(name, _owned_within(holder.owned, window))
        for region in (region for other in near for region in _regions(other, [holder], window)):
            if rank not in region.source.ranks:
                received.append(region)
    regions = sorted((*sent, *received), key=lambda region: region.order)
    atoms = (atom for region in regions for atom in region.atoms(spreads))
    mine = tuple(atom for atom in atoms if atom.sender == rank or rank in atom.receivers)
    return mine, tuple(region.copy() for region in copies)


def _owned_within(piece: Owned, window: Window | None) -> Owned:
    """What lies in the window, for its bounds only."""
    if window is None:
        return piece
    boxes = []
    for box in piece.boxes:
        starts = tuple(map(max, box.offsets, window[0]))
        sizes = tuple(min(a + n, b + m) - s for a, n, b, m, s in zip(box.offsets, box.sizes, *window, starts))
        if not sizes or min(sizes) > 0:
            boxes.append(Box(starts, sizes, 0, row_major(sizes)))
    return Owned((sum(box.numel for box in boxes),), tuple(boxes), flat=True)


def windows_of(shape: Sequence[int], numel: int) -> list[Window | None]:
    """Boxes that cut a tensor of ``shape`` into consecutive stretches of its storage, of at most ``numel`` elements each.

    They are slices of one dimension, of each index of the dimensions before it: few, and simple to intersect::

        shape (4, 6), numel 14        rows 0, 1 | rows 2, 3
        shape (4, 6), numel 4         row 0: columns 0 to 3 | row 0: columns 4, 5 | row 1: ...
    """
    if math.prod(shape) <= numel:
        return [None]
    dim = next(d for d in range(len(shape)) if math.prod(shape[d + 1 :]) <= numel)
    rows = numel // math.prod(shape[dim + 1 :])
    windows: list[Window | None] = []
    for before in itertools.product(*map(range, shape[:dim])):
        for start in range(0, shape[dim], rows):
            sizes = (*(1,) * dim, min(rows, shape[dim] - start), *shape[dim + 1 :])
            windows.append(((*before, start, *(0,) * (len(shape) - dim - 1)), sizes))
    return windows
