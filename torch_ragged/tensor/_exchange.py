"""What two ownerships have in common, as boxes with offsets on both sides, as parts of storage, and as views of tensors.

Plans of all kinds stand on it: redistributions, transfers, the optimizers' gathers, random draws. It must not know who sends,
or in which order. Only the functions at the end touch tensors::

    source | a a a a | b b b b |         target | c c c c c c | d d |

    common     a and c: 4 elements from offset 0 of the source, to offset 0 of the target
               b and c: 2 elements from offset 4 of the source, to offset 4 of the target
               b and d: ...
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from torch_ragged.tensor._ownership import Box, Owned, boxes_of_interval, coordinate_at

__all__ = [
    "Common",
    "Part",
    "clipped",
    "common",
    "merged_parts",
    "overlap",
    "paired_views",
    "part_of",
    "parts_on",
    "parts_within",
    "views_of",
]

# --- boxes ---------------------------------------------------------------------------------------------------------


def overlap(
    offsets: Sequence[int], sizes: Sequence[int], others: Sequence[int], extent: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Offsets and sizes of what two boxes of a tensor share; None if they share nothing."""
    starts = tuple(map(max, offsets, others))
    found = tuple([min(a + n, b + m) - start for a, n, b, m, start in zip(offsets, sizes, others, extent, starts)])
    return (starts, found) if not found or min(found) > 0 else None


def clipped(box: Box, offsets: Sequence[int], sizes: Sequence[int]) -> Box | None:
    """The part of ``box`` in another box of the tensor, where it lies in the same local tensor; None if they share nothing."""
    found = overlap(box.offsets, box.sizes, offsets, sizes)
    return None if found is None else Box(*found, _offset(box, found[0]), box.local_strides)


def _offset(box: Box, at: Sequence[int]) -> int:
    """The offset, in the local tensor, of the element ``at`` of the whole tensor."""
    return box.local_offset + sum([(a - o) * stride for a, o, stride in zip(at, box.offsets, box.local_strides)])


class Common(NamedTuple):
    """A box that two local tensors have in common: its sizes, and offset and strides in both."""

    sizes: tuple[int, ...]
    offsets: tuple[int, int]
    strides: tuple[tuple[int, ...], tuple[int, ...]]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def part(self, side: int) -> Part:
        """The elements in the storage of the first (0) or the second (1) local tensor."""
        return part_of(self.offsets[side], self.sizes, self.strides[side])


def common(source: Owned, target: Owned) -> list[Common]:
    """What two local tensors have in common: in storage order of the source, then of the target."""
    found = []
    for s, t in itertools.product(source.boxes, target.boxes):
        shared = overlap(s.offsets, s.sizes, t.offsets, t.sizes)
        if shared is not None:
            starts, sizes = shared
            found.append(Common(sizes, (_offset(s, starts), _offset(t, starts)), (s.local_strides, t.local_strides)))
    return found


# --- parts of storage ----------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """A part of a local tensor's storage, described as for ``torch.as_strided``; a contiguous part is 1-D."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def is_contiguous(self) -> bool:
        return self.strides == (1,)


def part_of(offset: int, sizes: tuple[int, ...], strides: Sequence[int]) -> Part:
    """The part at ``offset`` with ``sizes`` and ``strides``, as 1-D if it is contiguous."""
    numel = 1
    for size, stride in zip(reversed(sizes), reversed(strides)):
        if size != 1 and stride != numel:
            return Part(offset, sizes, tuple(strides))
        numel *= size
    return Part(offset, (numel,), (1,))


def merged_parts(parts: Iterable[Part]) -> tuple[Part, ...]:
    """The parts, with neighbours in storage joined."""
    result: list[Part] = []
    for part in parts:
        last = result[-1] if result else None
        if last and last.is_contiguous and part.is_contiguous and last.offset + last.numel == part.offset:
            result[-1] = Part(last.offset, (last.numel + part.numel,), (1,))
        else:
            result.append(part)
    return tuple(result)


def parts_on(found: Iterable[Common], side: int) -> tuple[Part, ...]:
    """The parts of one local tensor, in the order of ``found``."""
    return merged_parts(each.part(side) for each in found)


def parts_within(parts: Sequence[Part], start: int, stop: int) -> Iterator[Part]:
    """The elements ``[start, stop)`` of ``parts`` one after another, each in row-major order."""
    for part in parts:
        for at, sizes in boxes_of_interval(part.sizes, max(start, 0), min(stop, part.numel)):
            yield part_of(part.offset + sum(i * stride for i, stride in zip(at, part.strides)), sizes, part.strides)
        start, stop = start - part.numel, stop - part.numel


# --- views of tensors ----------------------------------------------------------------------------------------------


def views_of(local: torch.Tensor, boxes: Iterable[Box]) -> list[torch.Tensor]:
    """Each box of a local tensor, with the dimensions of the global tensor."""
    if local.is_contiguous():
        offset = local.storage_offset()
        return [local.as_strided(box.sizes, box.local_strides, offset + box.local_offset) for box in boxes]
    return [local[_box_slices(coordinate_at(box.local_offset, local.shape), box.sizes)] for box in boxes]


def paired_views(local: torch.Tensor, whole: torch.Tensor, boxes: Sequence[Box]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each box of a local tensor, as its view there and as its view in the whole tensor."""
    return zip(views_of(local, boxes), [whole[_box_slices(box.offsets, box.sizes)] for box in boxes])


def _box_slices(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple([slice(start, start + size) for start, size in zip(offsets, sizes)])
