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

A GPU has a counter in place of a sequence: the threads of a grid take the next elements in turns, and each turn moves the
counter by 4. A chunk is one turn of the largest grid, 4 MB of float32 on an H100. Chunks without elements of this rank only
move the counter. :func:`_turn_of` finds the size of a turn by a trial, too; if none fits, a draw is made whole. No GPU has run
it yet.
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
    length, least, counter = numel, _BLOCK, None
    if local.device.type == "cpu" and _is_serial(sampler.op, sampler.dtype):
        itemsize = spread * sampler.dtype.itemsize + sum(value.dtype.itemsize for value in values)
        length = max(_CHUNK_BYTES // itemsize // _BLOCK, 1) * _BLOCK
    elif (found := _counter_of(sampler, local.device, bool(values))) is not None and numel > found.turn:
        length, least, counter, spread = found.turn, 0, found, 1
    room = length if counter else min(length + least, numel)
    scratch = torch.empty(room * spread, dtype=sampler.dtype, device=local.device)[::spread]
    beside = [value.new_zeros(room) for value in values]
    mine, *mine_beside = ([view.permute(order) for view in views_of(tensor, boxes)] for tensor in (local, *values))
    for start, stop, moves in _plan(tuple(shape), order, tuple((box.offsets, box.sizes) for box in boxes), length, least):
        chunk = scratch if counter else scratch[: stop - start]  # A turn is whole, also the last one.
        if counter and not moves:
            counter.skip()
            continue
        if in_blocks and not counter and not moves and stop < numel:
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


@dataclass
class _Counter:
    """A GPU's generator, and the number of elements that one turn of the largest grid draws."""

    generator: Any
    turn: int

    def skip(self) -> None:
        self.generator.set_offset(self.generator.get_offset() + 4)


def _counter_of(sampler: Sampler, device: torch.device, has_values: bool) -> _Counter | None:
    """None if this draw must be whole: on another device, with values, in a graph that is captured, or if a trial fails."""
    if device.type != "cuda" or has_values or torch.cuda.is_current_stream_capturing():
        return None
    generator = sampler.generator or torch.cuda.default_generators[device.index or 0]
    key = (sampler.op, sampler.dtype, device)
    if key not in _turns:
        _turns[key] = _turn_of(sampler, generator, device)
    turn = _turns[key]
    return None if turn is None else _Counter(generator, turn)


_turns: dict[Any, Optional[int]] = {}


def _turn_of(sampler: Sampler, generator: Any, device: torch.device) -> int | None:
    """The elements of one turn: 4 or 2 per thread. A trial draws two turns and a half, whole and in turns."""
    properties = torch.cuda.get_device_properties(device)
    threads = properties.multi_processor_count * (properties.max_threads_per_multi_processor // 256) * 256
    state = generator.get_state()
    for turn in (4 * threads, 2 * threads):
        whole = torch.empty(2 * turn + turn // 2, dtype=sampler.dtype, device=device)
        sampler.fill(whole)
        after = generator.get_state()
        generator.set_state(state)
        scratch, is_equal = whole.new_empty(turn), True
        for part in whole.split(turn):
            sampler.fill(scratch)
            is_equal = is_equal and torch.equal(part, scratch[: len(part)])
        is_equal = is_equal and torch.equal(generator.get_state(), after)
        generator.set_state(state)
        if is_equal:
            return turn
    return None


# --- which elements of a chunk go where --------------------------------------------------------------------------------

_Move = tuple[int, tuple[slice, ...], tuple[int, ...], tuple[int, ...], int]
"""The number of a box, a part of it, and where this part lies in the chunk: sizes, strides, offset. Dimensions are in the
order of memory."""
_Chunk = tuple[int, int, tuple[_Move, ...]]
"""Start, stop and moves of a chunk."""


def _plan(shape: tuple[int, ...], order: tuple[int, ...], boxes: tuple[Any, ...], length: int, least: int) -> Iterable[_Chunk]:
    """The chunks of a draw, of ``length`` elements; the last one has at least ``least``.

    Short plans are kept: a dropout comes back in every step.
    """
    if math.prod(shape) <= 16 * length and len(boxes) <= 64:
        return _kept_plan(shape, order, boxes, length, least)
    return _chunks(shape, order, boxes, length, least)


@lru_cache(maxsize=512)
def _kept_plan(*arguments: Any) -> tuple[_Chunk, ...]:
    return tuple(_chunks(*arguments))


def _chunks(
    shape: tuple[int, ...], order: tuple[int, ...], boxes: tuple[Any, ...], length: int, least: int
) -> Iterator[_Chunk]:
    numel, start = math.prod(shape), 0
    shape = tuple(shape[dim] for dim in order)
    owned = [([offsets[dim] for dim in order], [sizes[dim] for dim in order]) for offsets, sizes in boxes]
    while start < numel:
        stop = numel if numel - start <= length or numel - start < length + least else start + length
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
