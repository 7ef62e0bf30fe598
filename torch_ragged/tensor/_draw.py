"""The elements that a rank owns of one random draw: the numbers that a single device would give to these elements.

It must not know placements or communicate, and it never allocates the global tensor. A *sampler* fills a tensor in place. A
draw goes through the global tensor in its order in memory, in chunks: it samples each chunk, keeps the elements of this rank,
and drops the others. Afterwards the generator has the state that a single device's would have.

Chunks give the values of one call because CPU kernels take numbers from the generator element by element. There are two
exceptions:

- ``normal_`` of at least 16 contiguous elements transforms blocks of 16, and draws the last 16 elements anew if the last block
  is not full. Therefore chunks are multiples of 16, and no chunk is shorter. Any other ``normal_`` goes element by element, as
  it does for a chunk that is not contiguous.
- A build with MKL draws one seed per call of ``bernoulli_`` and ``exponential_`` on processors of Intel. :func:`_is_serial`
  finds that out by a trial. Such a draw is made whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Optional

import torch

from torch_ragged.tensor._ownership import Box, boxes_of_interval, row_major

__all__ = ["Sampler", "draw_owned", "views_of"]

_aten = torch.ops.aten
_CHUNK_BYTES = 256 * 1024  # Of a chunk, with its values: half of a core's cache, far below 1 MiB.
_BLOCK = 16  # Elements of a block of normal_.
_TRIALS = {_aten.bernoulli_.float: 0.5, _aten.exponential_.default: 1.0}  # The ops that MKL may draw, and an argument.


@dataclass(frozen=True)
class Sampler:
    """A way to fill tensors with random numbers.

    Attributes:
        op: the in-place op that draws.
        fill: ``fill(chunk, *values)`` runs it on a chunk; each of ``values`` has the chunk's shape, such as probabilities.
        dtype: the dtype of the elements.
        generator: None is the default generator of the device.
    """

    op: torch._ops.OpOverload
    fill: Callable[..., Any]
    dtype: torch.dtype
    generator: Optional[torch.Generator] = None


def draw_owned(
    sampler: Sampler,
    shape: Sequence[int],
    stride: Sequence[int],
    boxes: Sequence[Box],
    local: torch.Tensor,
    values: Sequence[torch.Tensor] = (),
) -> None:
    """Write this rank's elements of one draw of a global tensor to ``local``, and advance the generator past the whole draw.

    Args:
        shape, stride: of the global tensor. A single device draws in the order of memory.
        boxes: what ``local`` holds. Their offsets and strides count elements of a contiguous tensor of ``local``'s shape.
        local: may have any strides.
        values: tensors with the shape of ``local``, such as probabilities. The elements of other ranks are drawn with zeros,
            since they take the same numbers from the generator.
    """
    numel = math.prod(shape)
    if not numel or local.is_meta:
        return
    order = tuple(sorted(range(len(shape)), key=lambda dim: -stride[dim]))
    numbers = numel * (2 if sampler.dtype.is_complex else 1)
    in_blocks = sampler.op is _aten.normal_.default and numbers >= _BLOCK and _is_contiguous(shape, stride)
    # An element by element normal_ gets every second element of the scratch memory, so that it is not contiguous.
    spread = 2 if sampler.op is _aten.normal_.default and not in_blocks else 1
    length = numel
    if local.device.type == "cpu" and _is_serial(sampler.op, sampler.dtype):
        itemsize = spread * sampler.dtype.itemsize + sum(value.dtype.itemsize for value in values)
        length = max(_CHUNK_BYTES // itemsize // _BLOCK, 1) * _BLOCK
    room = min(length + _BLOCK, numel)
    scratch = torch.empty(room * spread, dtype=sampler.dtype, device=local.device)[::spread]
    beside = [value.new_zeros(room) for value in values]
    mine, *mine_beside = ([view.permute(order) for view in views_of(tensor, boxes)] for tensor in (local, *values))
    for start, stop, moves in _plan(tuple(shape), order, tuple((box.offsets, box.sizes) for box in boxes), length):
        chunk = scratch[: stop - start]
        if in_blocks and not moves and stop < numel:
            chunk.uniform_(generator=sampler.generator)  # It takes the same numbers as normal_, without its logarithms.
            continue
        chunks = [memory[: stop - start].zero_() for memory in beside]
        for number, selection, sizes, strides, offset in moves:
            for inner, outer in zip(chunks, mine_beside):
                inner.as_strided(sizes, strides, offset).copy_(outer[number][selection])
        sampler.fill(chunk, *chunks)
        for number, selection, sizes, strides, offset in moves:
            drawn = chunk.as_strided(sizes, [step * spread for step in strides], offset * spread)
            mine[number][selection].copy_(drawn)


def _is_contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """As torch defines it: strides of dimensions of size 1 do not count."""
    return all(size == 1 or given == wanted for size, given, wanted in zip(shape, stride, row_major(shape)))


def views_of(local: torch.Tensor, boxes: Iterable[Box]) -> list[torch.Tensor]:
    """Each box of a local tensor, with the dimensions of the global tensor."""
    if local.is_contiguous():
        offset = local.storage_offset()
        return [local.as_strided(box.sizes, box.local_strides, offset + box.local_offset) for box in boxes]
    strides, views = row_major(local.shape), []
    for box in boxes:
        starts = [box.local_offset // step % size for step, size in zip(strides, local.shape)]
        views.append(local[tuple(slice(start, start + size) for start, size in zip(starts, box.sizes))])
    return views


@cache
def _is_serial(op: torch._ops.OpOverload, dtype: torch.dtype) -> bool:
    """Whether two halves of a tensor get the numbers of the whole: a trial of 32 elements with a generator of its own."""
    if op not in _TRIALS:
        return True
    whole, halves, generator = torch.empty(32, dtype=dtype), torch.empty(32, dtype=dtype), torch.Generator()
    op(whole, _TRIALS[op], generator=generator.manual_seed(0))
    generator.manual_seed(0)
    for half in halves.chunk(2):
        op(half, _TRIALS[op], generator=generator)
    return torch.equal(whole, halves)


# --- which elements of a chunk go where --------------------------------------------------------------------------------

_Move = tuple[int, tuple[slice, ...], tuple[int, ...], tuple[int, ...], int]
"""The number of a box, a part of it, and where this part lies in the chunk: sizes, strides, offset. Dimensions are in the
order of memory."""
_Chunk = tuple[int, int, tuple[_Move, ...]]
"""Start, stop and moves of a chunk."""


def _plan(shape: tuple[int, ...], order: tuple[int, ...], boxes: tuple[Any, ...], length: int) -> Iterable[_Chunk]:
    """The chunks of a draw. Short plans are kept: a dropout comes back in every step."""
    if math.prod(shape) <= 16 * length and len(boxes) <= 64:
        return _kept_plan(shape, order, boxes, length)
    return _chunks(shape, order, boxes, length)


@lru_cache(maxsize=512)
def _kept_plan(shape: tuple[int, ...], order: tuple[int, ...], boxes: tuple[Any, ...], length: int) -> tuple[_Chunk, ...]:
    return tuple(_chunks(shape, order, boxes, length))


def _chunks(shape: tuple[int, ...], order: tuple[int, ...], boxes: tuple[Any, ...], length: int) -> Iterator[_Chunk]:
    numel, start = math.prod(shape), 0
    shape = tuple(shape[dim] for dim in order)
    owned = [([offsets[dim] for dim in order], [sizes[dim] for dim in order]) for offsets, sizes in boxes]
    while start < numel:
        stop = numel if numel - start < length + _BLOCK else start + length
        yield start, stop, tuple(_moves(shape, owned, start, stop))
        start = stop


def _moves(
    shape: Sequence[int], owned: Sequence[tuple[Sequence[int], Sequence[int]]], start: int, stop: int
) -> Iterator[_Move]:
    strides = row_major(shape)
    for offsets, sizes in boxes_of_interval(shape, start, stop):
        for number, (low, extent) in enumerate(owned):
            first = [max(a, b) for a, b in zip(offsets, low)]
            last = [min(a + m, b + n) for a, m, b, n in zip(offsets, sizes, low, extent)]
            if all(a < b for a, b in zip(first, last)):
                selection = tuple(slice(a - b, c - b) for a, b, c in zip(first, low, last))
                offset = sum(a * step for a, step in zip(first, strides)) - start
                yield number, selection, tuple(b - a for a, b in zip(first, last)), strides, offset
