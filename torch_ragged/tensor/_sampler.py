"""What a draw is, and which of its elements a rank keeps. Integers and views only: it draws nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Optional

import torch

from torch_ragged.tensor._exchange import overlap
from torch_ragged.tensor._ownership import Box, boxes_of_interval, row_major

__all__ = ["DrawChunk", "Keep", "Sampler", "chunks_of"]


@dataclass(frozen=True)
class Sampler:
    """A way to fill tensors with random numbers.

    Attributes:
        op: the in-place op that draws.
        args: its arguments behind the tensor.
        dtype: the dtype of the elements.
        generator: None is the default generator of the device.
    """

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    dtype: torch.dtype
    generator: Optional[torch.Generator] = None

    def fill(self, chunk: torch.Tensor, *values: torch.Tensor) -> None:
        """Run the op on a chunk. Each of ``values`` has the chunk's shape, such as probabilities."""
        self.op(chunk, *self.args, *values, generator=self.generator)


# --- which elements of a chunk go where --------------------------------------------------------------------------------

Keep = tuple[int, tuple[slice, ...], tuple[int, ...], tuple[int, ...], int]
"""The number of a box, a part of it, and where this part lies in the chunk: sizes, strides, offset. Dimensions are in the
order of memory."""
DrawChunk = tuple[int, int, tuple[Keep, ...]]
"""Start, stop and moves of a chunk."""


def chunks_of(
    shape: Sequence[int], order: list[int], boxes: Sequence[Box], start: int, stop: int, length: int, least: int = 0
) -> Iterable[DrawChunk]:
    """The chunks of the elements from ``start`` to ``stop`` of a draw, of ``length`` elements; the last has at least ``least``.

    Short plans are kept: a dropout comes back in every step.

    Args:
        order: the dimensions in the order of memory.
        boxes: what this rank keeps.
    """
    owned = tuple((box.offsets, box.sizes) for box in boxes)
    arguments = tuple(shape), tuple(order), owned, start, stop, length, least
    return _kept_plan(*arguments) if stop - start <= 16 * length and len(boxes) <= 64 else _chunks(*arguments)


@lru_cache(maxsize=512)
def _kept_plan(*arguments: Any) -> tuple[DrawChunk, ...]:
    return tuple(_chunks(*arguments))


def _chunks(
    shape: tuple[int, ...], order: tuple[int, ...], boxes: tuple[Any, ...], start: int, stop: int, length: int, least: int
) -> Iterator[DrawChunk]:
    shape = tuple(shape[dim] for dim in order)
    owned = [([offsets[dim] for dim in order], [sizes[dim] for dim in order]) for offsets, sizes in boxes]
    while start < stop:
        end = stop if stop - start <= length + least else start + length
        yield start, end, tuple(_moves(shape, owned, start, end))
        start = end


def _moves(shape: Sequence[int], owned: Sequence[tuple[Sequence[int], Sequence[int]]], start: int, stop: int) -> Iterator[Keep]:
    strides = row_major(shape)
    for offsets, sizes in boxes_of_interval(shape, start, stop):
        for number, (low, extent) in enumerate(owned):
            if (shared := overlap(offsets, sizes, low, extent)) is not None:
                first, lengths = shared
                selection = tuple(slice(a - b, a - b + n) for a, b, n in zip(first, low, lengths))
                yield number, selection, lengths, strides, sum(a * step for a, step in zip(first, strides)) - start
