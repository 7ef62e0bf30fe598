"""8-bit Adam in one pass over memory: a kernel that dequantizes, updates, quantizes and writes the blocks of many parameters.

Its twin is ``torch_ragged.optim._adam8bit.update_region``: both must round every operation equally. One launch handles a table
of regions, which are parts of parameters made of whole blocks. Therefore the number of launches does not grow with the number
of parameters.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl

from torch_ragged._kernels._triton_rounding import round_to

__all__ = ["FLOAT_FIELDS", "INTEGER_FIELDS", "PER_PROGRAM", "step_kernel", "step_regions"]

PER_PROGRAM = 4
"""Blocks per program, computed one after the other: the program reads the table once for all of them."""

INTEGER_FIELDS = (
    *("program", "param", "gradient", "m_codes", "m_scales", "v_codes", "v_scales"),
    *("rows", "columns", "blocks", "origin", "matrix_stride", "row_stride", "key"),
)
"""Integers of a region: its first program, addresses, sizes, origin and strides in the global tensor, rounding key."""

FLOAT_FIELDS = ("shrink", "decay", "beta1", "beta2", "rest1", "rest2", "eps", "step_size", "correction")
"""Floats of a region's step: those of ``AdamStep``; ``rest`` is 1 - beta."""

_TRITON_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _hash32(value):  # type: ignore[no-untyped-def]
    value = (value ^ (value >> 16)) * 0x7FEB352D
    value = (value ^ (value >> 15)) * 0x846CA68B
    return value ^ (value >> 16)


@triton.jit
def _rounded_to_even(values):  # type: ignore[no-untyped-def]
    """Round ``values`` in [0, 255] to integers, ties to even. After adding 2**23, the low bits are the integer."""
    return (values + 8388608.0).to(tl.int32, bitcast=True) & 255


@triton.jit
def _encode(normalized, dynamic: tl.constexpr, signed: tl.constexpr):  # type: ignore[no-untyped-def]
    """``encode`` of ``torch_ragged.optim._quantize``, with equal operations in equal order."""
    if not dynamic:
        if signed:
            return _rounded_to_even(tl.maximum(normalized * 128.0 + 127.0, 0.0)).to(tl.uint8)
        return tl.maximum(_rounded_to_even(normalized * 255.0), (normalized > 0.0).to(tl.int32)).to(tl.uint8)
    magnitude = tl.abs(normalized)
    line = magnitude * (1e6 / 0.9) + 8 / 9
    for decade in tl.static_range(1, 7):
        line = tl.minimum(line, magnitude * (1e6 / 0.9 * 0.2**decade) + 8 / 9 * 2**decade)
    if not signed:
        line = line * 2.0 - 1.0
    whole = (line - 0.5) + 8388608.0
    cell = whole.to(tl.int32, bitcast=True) & 255
    is_first = (cell & (cell - 1 if signed else cell + 1)) == 0
    cell = tl.where(is_first & (line - (whole - 8388608.0) < 0.2), cell - 1, cell)
    if not signed:
        return tl.maximum(tl.where(line >= 254.75, 255, cell), (normalized > 0.0).to(tl.int32)).to(tl.uint8)
    cell = tl.where(line >= 127.75, 128, cell)
    return tl.where(normalized < 0.0, 127 - tl.minimum(cell, 127), 127 + cell).to(tl.uint8)


@triton.jit
def _requantize(moment, inside, codes, scales, at, block, dynamic: tl.constexpr, signed: tl.constexpr):  # type: ignore[no-untyped-def]
    # A maximum of floats may drop a NaN. As integers, magnitudes have the same order, and NaN is the largest.
    largest = tl.max(moment.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    scale = tl.where(largest < 2.0**-126, 0.0, largest)
    inverse = tl.where(scale == 0.0, 0.0, tl.div_rn(1.0, tl.where(scale == 0.0, 1.0, scale)))
    tl.store(codes + at, _encode(moment * inverse, dynamic, signed), mask=inside)
    tl.store(scales + block, scale)


@triton.jit
def _round_up_or_down(values, index, key):  # type: ignore[no-untyped-def]
    """Round float32 ``values`` to bfloat16 (in float32), up with the probability that makes the expected result exact."""
    noise = _hash32(index.to(tl.uint32) ^ _hash32((index >> 32).to(tl.uint32) ^ key.to(tl.uint32))) & 0xFFFF
    rounded = ((values.to(tl.uint32, bitcast=True) + noise) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(values) < float("inf"), rounded, values)


@triton.jit
def step_kernel(  # type: ignore[no-untyped-def]
    owners_ptr,
    integers_ptr,
    floats_ptr,
    signed_book_ptr,
    unsigned_book_ptr,
    param_type: tl.constexpr,
    gradient_type: tl.constexpr,
    param_bytes: tl.constexpr,
    gradient_bytes: tl.constexpr,
    vector: tl.constexpr,
    dynamic: tl.constexpr,
    stochastic: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    tile_height: tl.constexpr,
    tile_width: tl.constexpr,
    per_program: tl.constexpr,
):
    program = tl.program_id(0)
    region = tl.load(owners_ptr + program).to(tl.int64)
    integers, floats = integers_ptr + region * 14, floats_ptr + region * 9
    param = tl.load(integers + 1).to(tl.pointer_type(param_type))
    gradient = tl.load(integers + 2).to(tl.pointer_type(gradient_type))
    m_codes = tl.load(integers + 3).to(tl.pointer_type(tl.uint8))
    v_codes = tl.load(integers + 5).to(tl.pointer_type(tl.uint8))
    rows, columns = tl.load(integers + 7).to(tl.int32), tl.load(integers + 8).to(tl.int32)
    blocks = tl.load(integers + 9).to(tl.int32)
    if vector > 1:  # An equal width for all tensors: otherwise threads would have to exchange the loaded elements.
        param, gradient = tl.multiple_of(param, vector * param_bytes), tl.multiple_of(gradient, vector * gradient_bytes)
        m_codes, v_codes, columns = (
            tl.multiple_of(m_codes, vector),
            tl.multiple_of(v_codes, vector),
            tl.multiple_of(columns, 16),
        )
    m_scales = tl.load(integers + 4).to(tl.pointer_type(tl.float32))
    v_scales = tl.load(integers + 6).to(tl.pointer_type(tl.float32))
    shrink, decay = tl.load(floats), tl.load(floats + 1)
    beta1, beta2, rest1, rest2 = tl.load(floats + 2), tl.load(floats + 3), tl.load(floats + 4), tl.load(floats + 5)
    eps, step_size, correction = tl.load(floats + 6), tl.load(floats + 7), tl.load(floats + 8)
    bands, across = (rows + height - 1) // height, (columns + width - 1) // width
    # One dimension, so that all accesses, including look-ups in the books, have one order of elements over the threads.
    element = tl.arange(0, tile_height * tile_width)
    in_block_row, in_block_column = element // tile_width, element % tile_width
    at = in_block_row * columns + in_block_column
    first = (program - tl.load(integers).to(tl.int32)) * per_program
    for number in range(per_program):
        block = first + number
        if block < blocks:
            matrix, within = block // (bands * across), block % (bands * across)
            row, column = (within // across) * height, (within % across) * width
            inside = (in_block_row < tl.minimum(rows - row, height)) & (in_block_column < tl.minimum(columns - column, width))
            start = (matrix.to(tl.int64) * rows + row) * columns + column
            p = tl.load(param + start + at, mask=inside, other=0.0).to(tl.float32)
            g = tl.load(gradient + start + at, mask=inside, other=0.0).to(tl.float32)
            m = tl.load(signed_book_ptr + tl.load(m_codes + start + at, mask=inside, other=0).to(tl.int32)) * tl.load(
                m_scales + block
            )
            v = tl.load(unsigned_book_ptr + tl.load(v_codes + start + at, mask=inside, other=0).to(tl.int32)) * tl.load(
                v_scales + block
            )
            g = g + p * decay
            m = tl.where(inside, m * beta1 + g * rest1, 0.0)
            v = tl.where(inside, v * beta2 + g * g * rest2, 0.0)
            p = p * shrink - tl.div_rn(m, tl.sqrt_rn(v) * correction + eps) * step_size
            if stochastic:
                index = tl.load(integers + 10) + matrix * tl.load(integers + 11)
                index += (row + in_block_row) * tl.load(integers + 12) + column + in_block_column
                p = _round_up_or_down(p, index, tl.load(integers + 13))
            tl.store(param + start + at, round_to(p, param_type), mask=inside)
            _requantize(m, inside, m_codes + start, m_scales, at, block, dynamic, True)
            _requantize(v, inside, v_codes + start, v_scales, at, block, dynamic, False)


def step_regions(
    integers: Sequence[tuple[int, ...]],
    floats: Sequence[tuple[float, ...]] | torch.Tensor,
    books: tuple[torch.Tensor, torch.Tensor],
    types: tuple[torch.dtype, torch.dtype],
    block: tuple[int, int],
    dynamic: bool,
    stochastic: bool,
    keys: torch.Tensor | None = None,
    pinned: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Step all regions with one launch. The device of ``books`` must be the current one.

    Args:
        integers: for each region, :data:`INTEGER_FIELDS` without the first.
        floats: for each region, :data:`FLOAT_FIELDS`; or a float32 tensor of them on the device.
        books: the signed and the unsigned code book.
        types: the dtypes of parameters and gradients.
        block: height and width of a block.
        dynamic: True for the dynamic code book, False for the linear one.
        stochastic: whether parameters, which are bfloat16 then, are rounded stochastically.
        keys: the rounding keys of the regions, on the device; None: those of ``integers``.
        pinned: pinned memory to copy ``integers`` from, so that a CUDA graph may capture the copy; None: they are copied now.

    Returns:
        what the launch reads, beside the addresses in ``integers``: a CUDA graph reads it in each replay.
    """
    device = books[0].device
    columns, blocks = INTEGER_FIELDS.index("columns") - 1, INTEGER_FIELDS.index("blocks") - 1
    programs, owners = _programs(tuple(-(-region[blocks] // PER_PROGRAM) for region in integers), device)
    table = torch.tensor([(program, *region) for program, region in zip(programs, integers)], dtype=torch.int64, device="cpu")
    if pinned is not None:
        table = pinned.copy_(table)
    on_device = table.to(device, non_blocking=True)
    if keys is not None:
        on_device[:, INTEGER_FIELDS.index("key")] = keys
    if not isinstance(floats, torch.Tensor):
        floats = torch.tensor(floats, dtype=torch.float32, device="cpu").to(device, non_blocking=True)
    divisible = (region[i] % 16 for region in integers for i in (0, 1, 2, 4, columns))
    tile = triton.next_power_of_2(block[0]), triton.next_power_of_2(block[1])
    step_kernel[(len(owners),)](
        owners,
        on_device,
        floats,
        *books,
        param_type=_TRITON_TYPES[types[0]],
        gradient_type=_TRITON_TYPES[types[1]],
        param_bytes=types[0].itemsize,
        gradient_bytes=types[1].itemsize,
        vector=1 if any(divisible) else vector_of(types),
        dynamic=dynamic,
        stochastic=stochastic,
        height=block[0],
        width=block[1],
        tile_height=tile[0],
        tile_width=tile[1],
        per_program=PER_PROGRAM,
        num_warps=warps(tile),
        enable_fp_fusion=False,  # The twin rounds after each operation.
    )
    return [owners, table, *books]


def vector_of(types: tuple[torch.dtype, torch.dtype]) -> int:
    """Elements per load of a thread: 16 bytes of the wider of the two dtypes."""
    return 16 // max(dtype.itemsize for dtype in types)


def warps(tile: tuple[int, int]) -> int:
    """Warps of a program: 8 elements per thread, at least one warp and at most eight."""
    return max(1, min(8, tile[0] * tile[1] // 256))


@lru_cache(maxsize=256)
def _programs(counts: tuple[int, ...], device: torch.device) -> tuple[tuple[int, ...], torch.Tensor]:
    """The first program of each region, and the region (int32) of each program."""
    owners = torch.arange(len(counts), dtype=torch.int32, device="cpu").repeat_interleave(torch.tensor(counts, device="cpu"))
    return tuple(itertools.accumulate(counts, initial=0)), owners.to(device)
