"""Elements of a draw as few strided regions, each for one launch of a kernel. Computes with integers only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Drawn", "joined", "regions"]

_MOST_DIMS = 4  # Of a region: as many as the kernel has arguments for.


@dataclass(frozen=True)
class Drawn:
    """Elements of a draw, and where they lie in a tensor.

    Attributes:
        start: the number of the first element in the draw.
        offset: its offset in the tensor, in elements.
        dims: the size of each dimension, its step in the draw and its stride in the tensor, outermost first.
    """

    start: int
    offset: int
    dims: tuple[tuple[int, ...], ...]

    @property
    def numel(self) -> int:
        return math.prod(size for size, _, _ in self.dims)


def regions(found: Iterable[Drawn]) -> list[Drawn]:
    """The same elements in few regions, each for one launch: an interval, a box and equally spaced boxes are one."""
    result: list[Drawn] = []
    for region in found:
        region = Drawn(region.start, region.offset, tuple(joined(region.dims)) or ((1, 1, 1),))
        if result and _continues(result[-1], region):
            last = result.pop()
            region = Drawn(last.start, last.offset, ((last.numel + region.numel, 1, 1),))
        result.append(region)
    return [part for region in _spaced(result) for part in _with_few_dims(region)]


def _continues(one: Drawn, other: Drawn) -> bool:
    """Whether two intervals are one."""
    is_flat = all(len(region.dims) == 1 and region.dims[0][1:] == (1, 1) for region in (one, other))
    return is_flat and (one.start + one.numel, one.offset + one.numel) == (other.start, other.offset)


def _spaced(found: Sequence[Drawn]) -> Iterator[Drawn]:
    """Runs of equal boxes at equal distances are boxes with one more dimension."""
    at = 0
    while at < len(found):
        first, count, distance = found[at], 1, (0, 0)
        for last, region in zip(found[at:], found[at + 1 :]):
            apart = (region.start - last.start, region.offset - last.offset)
            if region.dims != first.dims or (count > 1 and apart != distance):
                break
            count, distance = count + 1, apart
        dims = ((count, *distance), *first.dims) if count > 1 else first.dims
        yield Drawn(first.start, first.offset, tuple(joined(dims)) or ((1, 1, 1),))
        at += count


def _with_few_dims(region: Drawn) -> Iterator[Drawn]:
    if len(region.dims) <= _MOST_DIMS:
        yield region
        return
    (size, step, stride), *inner = region.dims
    for index in range(size):
        yield from _with_few_dims(Drawn(region.start + index * step, region.offset + index * stride, tuple(inner)))


def joined(dims: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Dimensions as (size, step, step ...), outermost first; two are one if all steps of the outer one continue the inner's."""
    result: list[tuple[int, ...]] = []
    for size, *steps in dims:
        if size == 1:
            continue
        if result and all(outer == size * inner for outer, inner in zip(result[-1][1:], steps)):
            size *= result.pop()[0]
        result.append((size, *steps))
    return result
