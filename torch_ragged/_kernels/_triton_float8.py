"""The Triton kernels of :mod:`torch_ragged._kernels.float8`, with the roundings of their twins.

One program handles one tile. If tiles are one row high, one program handles 64 tiles.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from torch_ragged._kernels._triton_rounding import from_float8, round_to, to_float8
from torch_ragged._kernels.tiles import LARGEST, SMALLEST, TileTable

__all__ = ["dequantize", "dequantize_kernel", "quantize", "quantize_kernel", "tile_of_program"]

_LARGEST, _SMALLEST = tl.constexpr(LARGEST), tl.constexpr(SMALLEST)
_WARPS = 8  # Warps of a program that encodes.
_STEP_ROWS = 32  # Rows that a program decodes at a time: rows are independent, and fewer need fewer registers.


@triton.jit
def tile_of_program(owners_ptr, numbers_ptr, aligned: tl.constexpr, height: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """This program's run (offsets of values, codes and scales; rows; columns) and tile (matrix, first row, first column)."""
    program = tl.program_id(0)
    run = numbers_ptr + tl.load(owners_ptr + program).to(tl.int64) * 6
    within = program - tl.load(run)
    values, codes, scales = tl.load(run + 1), tl.load(run + 2), tl.load(run + 3)
    rows, columns = tl.load(run + 4), tl.load(run + 5)
    if aligned:
        values, codes, columns = tl.multiple_of(values, 16), tl.multiple_of(codes, 16), tl.multiple_of(columns, 16)
    bands, across = (rows + height - 1) // height, (columns + width - 1) // width
    matrix, within = within // (bands * across), within % (bands * across)
    row, column = (within // across) * height, (within % across) * width
    return values, codes, scales, rows, columns, matrix, row, column


@triton.jit
def quantize_kernel(  # type: ignore[no-untyped-def]
    values_ptr,
    codes_ptr,
    scales_ptr,
    owners_ptr,
    numbers_ptr,
    aligned: tl.constexpr,
    per_row: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
):
    values, codes, scales, rows, columns, matrix, row, column = tile_of_program(owners_ptr, numbers_ptr, aligned, height, width)
    at_row, at_column = row + tl.arange(0, height)[:, None], column + tl.arange(0, width)[None, :]
    inside = (at_row < rows) & (at_column < columns)
    at = (matrix * rows + at_row) * columns + at_column
    x = tl.load(values_ptr + values + at, mask=inside, other=0.0).to(tl.float32)
    # A maximum of floats may drop a NaN. As integers, magnitudes have the same order, and NaN is the largest.
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    across = (columns + width - 1) // width
    if per_row:
        largest = tl.max(bits, axis=1, keep_dims=True).to(tl.float32, bitcast=True)
        at_scale = (matrix * rows + at_row) * across + column // width
        has_scale = at_row < rows
    else:
        largest = tl.max(tl.max(bits, axis=1, keep_dims=True), axis=0, keep_dims=True).to(tl.float32, bitcast=True)
        at_scale = (
            (matrix * ((rows + height - 1) // height) + row // height) * across + column // width + tl.zeros((1, 1), tl.int64)
        )
        has_scale = tl.full((1, 1), 1, tl.int1)
    scale = tl.where(largest < _SMALLEST, 0.0, tl.div_rn(largest, tl.full(largest.shape, _LARGEST, tl.float32)))
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), tl.where(scale == 0.0, 1.0, scale))
    inverse = tl.where(scale == 0.0, 0.0, inverse)
    normalized = x * inverse
    # Two comparisons instead of a clamp, because a comparison with NaN is false and so keeps the NaN.
    normalized = tl.where(normalized > _LARGEST, _LARGEST, tl.where(normalized < -_LARGEST, -_LARGEST, normalized))
    tl.store(codes_ptr + codes + at, to_float8(normalized), mask=inside)
    tl.store(scales_ptr + scales + at_scale, scale, mask=has_scale)


@triton.jit
def dequantize_kernel(  # type: ignore[no-untyped-def]
    values_ptr,
    codes_ptr,
    scales_ptr,
    owners_ptr,
    numbers_ptr,
    aligned: tl.constexpr,
    per_row: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    step: tl.constexpr,
):
    values, codes, scales, rows, columns, matrix, row, column = tile_of_program(owners_ptr, numbers_ptr, aligned, height, width)
    at_column = column + tl.arange(0, width)[None, :]
    across = (columns + width - 1) // width
    for first in tl.static_range(0, height, step):
        at_row = row + first + tl.arange(0, step)[:, None]
        inside = (at_row < rows) & (at_column < columns)
        at = (matrix * rows + at_row) * columns + at_column
        if per_row:  # Loaded as a vector: from a column, Triton would load the scale again for every element.
            lines = row + first + tl.arange(0, step)
            scale = tl.load(
                scales_ptr + scales + (matrix * rows + lines) * across + column // width, mask=lines < rows, other=0.0
            )
            scale = scale[:, None]
        else:
            band = matrix * ((rows + height - 1) // height) + row // height
            scale = tl.load(scales_ptr + scales + band * across + column // width)
        x = from_float8(tl.load(codes_ptr + codes + at, mask=inside, other=0))
        tl.store(values_ptr + values + at, round_to(x * scale, values_ptr.dtype.element_ty), mask=inside)


def quantize(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, table: TileTable) -> None:
    """The twin's operation, on the current device."""
    _launch(quantize_kernel, (values, codes, scales), table, num_warps=_WARPS)


def dequantize(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, table: TileTable) -> None:
    """The twin's operation, on the current device."""
    _launch(dequantize_kernel, (values, codes, scales), table, step=_STEP_ROWS, num_warps=4)


def _launch(kernel: Any, tensors: tuple[torch.Tensor, ...], table: TileTable, **options: int) -> None:
    owners, numbers = table.on(tensors[0].device)
    height, width = table.program
    options = {"aligned": table.is_aligned, "per_row": table.tile[0] == 1, "height": height, "width": width, **options}
    kernel[(len(owners),)](*tensors, owners, numbers, **options, enable_fp_fusion=False)
