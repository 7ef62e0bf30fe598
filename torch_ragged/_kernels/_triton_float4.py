"""The Triton kernels of :mod:`torch_ragged._kernels.float4`, with the results of their twins.

One program handles 64 rows of one column of tiles.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from torch_ragged._kernels._triton_float8 import tile_of_program
from torch_ragged._kernels._triton_rounding import round_to
from torch_ragged._kernels.tiles import TileTable

__all__ = ["dequantize", "dequantize_float4_kernel", "quantize", "quantize_float4_kernel"]


@triton.jit
def _tile_places(owners_ptr, numbers_ptr, aligned: tl.constexpr, height: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """The offsets of this program's values, codes and scales, and which of its rows are in the matrix."""
    values, codes, scales, rows, columns, matrix, row, column = tile_of_program(owners_ptr, numbers_ptr, aligned, height, width)
    lines = matrix * rows + row + tl.arange(0, height)
    first = lines[:, None] * columns + column
    at = values + first + tl.arange(0, width)[None, :]
    at_codes = codes + first // 2 + tl.arange(0, width // 2)[None, :]
    at_scales = scales + lines * (columns // width) + column // width
    return at, at_codes, at_scales, row + tl.arange(0, height) < rows


@triton.jit
def quantize_float4_kernel(  # type: ignore[no-untyped-def]
    values_ptr,
    codes_ptr,
    scales_ptr,
    owners_ptr,
    numbers_ptr,
    aligned: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
):
    at, at_codes, at_scales, here = _tile_places(owners_ptr, numbers_ptr, aligned, height, width)
    inside = here[:, None]
    x = tl.load(values_ptr + at, mask=inside, other=0.0).to(tl.float32)
    bits = x.to(tl.int32, bitcast=True)
    # As integers, magnitudes have the order of floats, and a NaN is the largest: its exponent is 255, as that of infinity.
    largest = tl.max(bits & 0x7FFFFFFF, axis=1) >> 23
    exponent = tl.where(largest == 255, 255, tl.maximum(largest - 2, 0))
    inverse = (tl.minimum(254 - exponent, 254) << 23).to(tl.float32, bitcast=True)
    scaled = tl.abs(x) * inverse[:, None]
    # Ties go to the even code: below it they do not count, above it they do.
    code = (scaled > 0.25).to(tl.int32) + (scaled >= 0.75).to(tl.int32) + (scaled > 1.25).to(tl.int32)
    code += (scaled >= 1.75).to(tl.int32) + (scaled > 2.5).to(tl.int32) + (scaled >= 3.5).to(tl.int32)
    code += (scaled > 5.0).to(tl.int32)
    code |= (bits >> 28) & 8
    low, high = tl.split(tl.reshape(code, (height, width // 2, 2)))
    tl.store(codes_ptr + at_codes, (low | (high << 4)).to(tl.uint8), mask=inside)
    tl.store(scales_ptr + at_scales, exponent.to(tl.uint8).to(tl.int8, bitcast=True), mask=here)


@triton.jit
def dequantize_float4_kernel(  # type: ignore[no-untyped-def]
    values_ptr,
    codes_ptr,
    scales_ptr,
    owners_ptr,
    numbers_ptr,
    aligned: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
):
    at, at_codes, at_scales, here = _tile_places(owners_ptr, numbers_ptr, aligned, height, width)
    inside = here[:, None]
    packed = tl.load(codes_ptr + at_codes, mask=inside, other=0).to(tl.int32)
    code = tl.reshape(tl.join(packed & 15, packed >> 4), (height, width))
    # The bits of a code's value: its exponent and its one bit of mantissa. 1 is 0.5, and 0 is 0.
    magnitude = code & 7
    bits = tl.where(magnitude > 1, ((magnitude >> 1) + 126) << 23 | (magnitude & 1) << 22, magnitude * (126 << 23))
    value = bits.to(tl.float32, bitcast=True)
    value = tl.where(code > 7, -value, value)
    exponent = tl.load(scales_ptr + at_scales, mask=here, other=0).to(tl.uint8, bitcast=True).to(tl.int32)
    power = tl.where(exponent == 0, 1 << 22, tl.where(exponent == 255, 0x7FC00000, exponent << 23))
    x = value * power.to(tl.float32, bitcast=True)[:, None]
    tl.store(values_ptr + at, round_to(x, values_ptr.dtype.element_ty), mask=inside)


def quantize(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, table: TileTable) -> None:
    """The twin's operation, on the current device."""
    _launch_float4(quantize_float4_kernel, (values, codes, scales), table)


def dequantize(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, table: TileTable) -> None:
    """The twin's operation, on the current device."""
    _launch_float4(dequantize_float4_kernel, (values, codes, scales), table)


def _launch_float4(kernel: Any, tensors: tuple[torch.Tensor, ...], table: TileTable) -> None:
    owners, numbers = table.on(tensors[0].device)
    height, width = table.program
    options = {"aligned": table.is_aligned, "height": height, "width": width}
    kernel[(len(owners),)](*tensors, owners, numbers, **options, num_warps=4, enable_fp_fusion=False)
