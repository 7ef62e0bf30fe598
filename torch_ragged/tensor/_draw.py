"""The elements that a rank owns of one random draw: the numbers that a single device would give to these elements.

It must not know placements or communicate, and it never allocates the global tensor. On a CPU, a draw goes through the global
tensor in its order in memory, in chunks: it samples each chunk, keeps the elements of this rank, and drops the others.
Afterwards the generator has the state that a single device's would have. A GPU's generator is a counter, which needs no chunks
(:mod:`_counter`).

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
from collections.abc import Sequence
from functools import cache

import torch
from torch._subclasses import FakeTensor

from torch_ragged.tensor._counter import draw_by_counter, way_of
from torch_ragged.tensor._exchange import views_of
from torch_ragged.tensor._ownership import Box, row_major
from torch_ragged.tensor._sampler import Sampler, chunks_of

__all__ = ["draw_owned"]

_aten = torch.ops.aten
_CHUNK_BYTES = 256 * 1024  # Of a chunk, with its values: half of a core's cache, far below 1 MiB.
_BLOCK = 16  # Elements of a block of normal_.
_TRIALS = {_aten.bernoulli_.float: 0.5, _aten.exponential_.default: 1.0}  # The ops that MKL may draw, and an argument.


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
    if local.is_meta:  # Without effect, unless the local tensor's type records what is written to it.
        sampler.op(local, *sampler.args, *values)
    if not numel or local.is_meta or isinstance(local, FakeTensor):
        return
    way = None if values else way_of(sampler, local, numel)
    if way is not None:
        draw_by_counter(way, sampler, shape, stride, boxes, local)
        return
    order = sorted(range(len(shape)), key=lambda dim: -stride[dim])
    is_normal = sampler.op is _aten.normal_.default and local.device.type == "cpu"
    in_blocks = is_normal and numel * (1 + sampler.dtype.is_complex) >= _BLOCK and _is_contiguous(shape, stride)
    # An element by element normal_ gets every second element of the scratch memory, so that it is not contiguous.
    spread = 2 if is_normal and not in_blocks else 1
    length = numel
    if local.device.type == "cpu" and _is_serial(sampler.op, sampler.dtype):
        itemsize = spread * sampler.dtype.itemsize + sum(value.dtype.itemsize for value in values)
        length = max(_CHUNK_BYTES // itemsize // _BLOCK, 1) * _BLOCK
    room = min(length + _BLOCK, numel)
    scratch = torch.empty(room * spread, dtype=sampler.dtype, device=local.device)[::spread]
    beside = [value.new_zeros(room) for value in values]
    mine, *mine_beside = ([view.permute(order) for view in views_of(tensor, boxes)] for tensor in (local, *values))
    for start, stop, moves in chunks_of(shape, order, boxes, 0, numel, length, _BLOCK):
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


@cache
def _is_serial(op: torch._ops.OpOverload, dtype: torch.dtype) -> bool:
    """Whether two halves of a tensor get the numbers of the whole: a trial of 32 elements with a generator of its own."""
    if op not in _TRIALS:
        return True
    whole, halves = torch.empty(2, 32, dtype=dtype, device="cpu")
    generator = torch.Generator()
    op(whole, _TRIALS[op], generator=generator.manual_seed(0))
    generator.manual_seed(0)
    for half in halves.chunk(2):
        op(half, _TRIALS[op], generator=generator)
    return torch.equal(whole, halves)
