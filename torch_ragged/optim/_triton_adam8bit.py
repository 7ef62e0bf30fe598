"""One pass over memory for an 8-bit Adam step: a Triton program per block dequantises, updates, quantises and writes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from torch_ragged.optim._adam8bit import AdamStep, Moments
from torch_ragged.optim._blocks import Region
from torch_ragged.optim._quantize import code_book, midpoints

__all__ = ["update_region"]


@triton.jit
def _hash32(value):  # type: ignore[no-untyped-def]
    value = (value ^ (value >> 16)) * 0x7FEB352D
    value = (value ^ (value >> 15)) * 0x846CA68B
    return value ^ (value >> 16)


@triton.jit
def _quantize(values, middles_ptr):  # type: ignore[no-untyped-def]
    """How many of the 255 ascending midpoints are smaller: a binary search in eight steps."""
    code = tl.zeros(values.shape, tl.int32)
    for power in tl.static_range(7, -1, -1):
        middle = tl.load(middles_ptr + code + ((1 << power) - 1))
        code = tl.where(middle < values, code + (1 << power), code)
    return code


@triton.jit
def _requantize(moment, inside, codes_ptr, scales_ptr, at, place, middles_ptr):  # type: ignore[no-untyped-def]
    scale = tl.max(tl.abs(moment))
    is_nan = tl.max((moment != moment).to(tl.int32))
    scale = tl.where(is_nan > 0, float("nan"), scale)
    normalized = tl.div_rn(moment, tl.zeros(moment.shape, tl.float32) + tl.where(scale == 0, 1.0, scale))
    tl.store(codes_ptr + at, _quantize(normalized, middles_ptr).to(tl.uint8), mask=inside)
    tl.store(scales_ptr + place, scale)


@triton.jit(do_not_specialize=("key",))
def _step_kernel(  # type: ignore[no-untyped-def]
    param_ptr,
    gradient_ptr,
    m_codes_ptr,
    m_scales_ptr,
    v_codes_ptr,
    v_scales_ptr,
    signed_book_ptr,
    signed_middles_ptr,
    unsigned_book_ptr,
    unsigned_middles_ptr,
    rows,
    columns,
    bands,
    across,
    origin,
    matrix_stride,
    row_stride,
    shrink,
    decay,
    beta1,
    beta2,
    rest1,
    rest2,
    eps,
    step_size,
    correction,
    key,
    narrow: tl.constexpr,
    stochastic: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    tile_height: tl.constexpr,
    tile_width: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    matrix, within = place // (bands * across), place % (bands * across)
    in_block_row, in_block_column = tl.arange(0, tile_height)[:, None], tl.arange(0, tile_width)[None, :]
    row = (within // across) * height + in_block_row
    column = (within % across) * width + in_block_column
    inside = (row < rows) & (column < columns) & (in_block_row < height) & (in_block_column < width)
    at = (matrix * rows + row) * columns + column
    p = tl.load(param_ptr + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gradient_ptr + at, mask=inside, other=0.0).to(tl.float32)
    m_codes = tl.load(m_codes_ptr + at, mask=inside, other=0).to(tl.int32)
    v_codes = tl.load(v_codes_ptr + at, mask=inside, other=0).to(tl.int32)
    m = tl.load(signed_book_ptr + m_codes) * tl.load(m_scales_ptr + place)
    v = tl.load(unsigned_book_ptr + v_codes) * tl.load(v_scales_ptr + place)
    g = g + p * decay
    m = tl.where(inside, m * beta1 + g * rest1, 0.0)
    v = tl.where(inside, v * beta2 + g * g * rest2, 0.0)
    denominator = tl.div_rn(tl.sqrt_rn(v), tl.zeros(v.shape, tl.float32) + correction) + eps
    p = p * shrink - tl.div_rn(m, denominator) * step_size
    if narrow:  # To bfloat16: to nearest, ties to even, or up as often as the remainder says.
        bits = p.to(tl.uint32, bitcast=True)
        if stochastic:
            index = origin + matrix * matrix_stride + row * row_stride + column
            noise = _hash32(index.to(tl.uint32) ^ _hash32((index >> 32).to(tl.uint32) ^ key.to(tl.uint32))) & 0xFFFF
        else:
            noise = 0x7FFF + ((bits >> 16) & 1)
        rounded = ((bits + noise) & 0xFFFF0000).to(tl.float32, bitcast=True)
        p = tl.where(tl.abs(p) < float("inf"), rounded, p)
    tl.store(param_ptr + at, p.to(param_ptr.dtype.element_ty), mask=inside)
    _requantize(m, inside, m_codes_ptr, m_scales_ptr, at, place, signed_middles_ptr)
    _requantize(v, inside, v_codes_ptr, v_scales_ptr, at, place, unsigned_middles_ptr)


def update_region(
    region: Region,
    block: tuple[int, int],
    code: str,
    numbers: AdamStep,
    param: torch.Tensor,
    gradient: torch.Tensor,
    moments: Moments,
) -> None:
    """As :func:`torch_ragged.optim._adam8bit.update_region`, equal to it within one code; one kernel launch."""
    books = [table(code, signed, param.device) for signed in (True, False) for table in (code_book, midpoints)]
    _, rows, columns = region.sizes
    count, bands, across = region.grid
    _step_kernel[(count * bands * across,)](
        region.of(param),
        region.of(gradient),
        region.of(moments.m_codes),
        region.scales(moments.m_scales),
        region.of(moments.v_codes),
        region.scales(moments.v_scales),
        *books,
        rows,
        columns,
        bands,
        across,
        region.origin,
        region.strides[0],
        region.strides[1],
        numbers.shrink,
        numbers.decay,
        numbers.beta1,
        numbers.beta2,
        1 - numbers.beta1,
        1 - numbers.beta2,
        numbers.eps,
        numbers.step_size,
        numbers.correction,
        numbers.rounding_key or 0,
        narrow=param.dtype == torch.bfloat16,
        stochastic=numbers.rounding_key is not None,
        height=block[0],
        width=block[1],
        tile_height=triton.next_power_of_2(block[0]),
        tile_width=triton.next_power_of_2(block[1]),
    )
