"""The Triton kernel of :mod:`torch_ragged._kernels.symmetric`: one program per tile of the lower triangle.

It must not tune itself at run time. Two ranks could choose different configurations, and then the bits of a result would depend
on the rank that computes it. ``benchmarks/gpu/gpu_kernels.py --tune`` times the configurations. Programs visit the triangle in
square groups of tiles, so that programs that run at the same time share rows of ``x`` in the L2 cache.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch
import triton
import triton.language as tl

from torch_ragged._kernels._triton_rounding import INTERPRETED, round_to

__all__ = ["CONFIGURATIONS", "Configuration", "product", "product_kernel"]


class Configuration(NamedTuple):
    """The sizes of the kernel, with ``warps`` and ``stages`` of a program.

    A tile has ``tile`` rows and columns; a program multiplies ``step`` columns of ``x`` at a time; a group has ``group`` tiles
    per side.
    """

    tile: int
    step: int
    group: int
    warps: int
    stages: int


CONFIGURATIONS = (
    Configuration(128, 64, 8, 8, 3),
    Configuration(128, 64, 8, 8, 4),
    Configuration(128, 32, 8, 8, 4),
    Configuration(128, 64, 12, 8, 3),
    Configuration(64, 64, 16, 4, 4),
)
"""The kernel uses the first; the benchmark compares all."""


@triton.jit
def _tile_of(program, group: tl.constexpr):  # type: ignore[no-untyped-def]
    """The row and the column, in tiles, of a program's tile. Programs visit the lower triangle one row of groups at a time."""
    number, within = program // (group * group), program % (group * group)
    row = ((tl.sqrt(8.0 * number.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    row = tl.where(row * (row + 1) // 2 > number, row - 1, row)  # The rounded square root may be off by one.
    row = tl.where((row + 1) * (row + 2) // 2 <= number, row + 1, row)
    column = number - row * (row + 1) // 2
    return row * group + within % group, column * group + within // group


@triton.jit
def product_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    addend_ptr,
    out_ptr,
    size,
    x_batch_stride,
    x_row_stride,
    x_column_stride,
    addend_batch_stride,
    addend_row_stride,
    addend_column_stride,
    beta,
    alpha,
    inner: tl.constexpr,
    has_addend: tl.constexpr,
    tile: tl.constexpr,
    step: tl.constexpr,
    group: tl.constexpr,
):
    tile_row, tile_column = _tile_of(tl.program_id(0), group)
    # Groups at the diagonal and at the lower edge have tiles outside of the triangle: skip them.
    if tile_column <= tile_row and tile_row * tile < size:
        batch = tl.program_id(1).to(tl.int64)
        rows, columns = tile_row * tile + tl.arange(0, tile), tile_column * tile + tl.arange(0, tile)
        steps = tl.arange(0, step)
        x = x_ptr + batch * x_batch_stride
        left = x + (rows.to(tl.int64)[:, None] * x_row_stride + steps[None, :] * x_column_stride)
        right = x + (columns.to(tl.int64)[None, :] * x_row_stride + steps[:, None] * x_column_stride)
        total = tl.zeros((tile, tile), tl.float32)
        for first in range(0, inner, step):
            a = tl.load(left, mask=(rows < size)[:, None] & (steps < inner - first)[None, :], other=0.0)
            b = tl.load(right, mask=(columns < size)[None, :] & (steps < inner - first)[:, None], other=0.0)
            if INTERPRETED:  # The interpreter would multiply the bit patterns of bfloat16 as integers.
                a, b = a.to(tl.float32), b.to(tl.float32)
            total = tl.dot(a, b, total, input_precision="ieee")
            left += step * x_column_stride
            right += step * x_column_stride
        total = total * alpha
        row, column = rows.to(tl.int64)[:, None], columns.to(tl.int64)[None, :]
        inside = (row < size) & (column < size)
        if has_addend:
            addend = addend_ptr + batch * addend_batch_stride + (row * addend_row_stride + column * addend_column_stride)
            total += tl.load(addend, mask=inside, other=0.0).to(tl.float32) * beta
        result = round_to(total, tl.bfloat16)
        if (
            tile_row == tile_column
        ):  # Mirrored elements may be summed in another order: copy one to the other, so that both are equal.
            result = tl.where(column <= row, result, tl.trans(result))
        out = out_ptr + batch * size * size
        tl.store(out + (row * size + column), result, mask=inside)
        row, column = rows.to(tl.int64)[None, :], columns.to(tl.int64)[:, None]
        tl.store(out + (column * size + row), tl.trans(result), mask=(row < size) & (column < size))


def product(
    x: torch.Tensor, addend: Optional[torch.Tensor], beta: float, alpha: float, configuration: Configuration = CONFIGURATIONS[0]
) -> torch.Tensor:
    """``beta * addend + alpha * x @ x.mT`` on the current device. ``addend`` is symmetric, or None for no addend."""
    tile, step, group, warps, stages = configuration
    batch = x if x.ndim == 3 else x.unsqueeze(0)
    added = batch if addend is None else addend.view(batch.shape)
    count, size, inner = batch.shape
    out = torch.empty(count, size, size, dtype=x.dtype, device=x.device)
    groups = triton.cdiv(triton.cdiv(size, tile), group)
    if out.numel():
        product_kernel[(groups * (groups + 1) // 2 * group * group, count)](
            batch,
            added,
            out,
            size,
            *batch.stride(),
            *added.stride(),
            float(beta),
            float(alpha),
            inner=inner,
            has_addend=addend is not None,
            tile=tile,
            step=step,
            group=group,
            num_warps=warps,
            num_stages=stages,
        )
    return out.view(*x.shape[:-1], size)
