"""Tiles of matrices as float8 codes, each tile with a scale.

e4m3 ("fn": no infinities, largest value 448), as in Micikevicius et al., "FP8 Formats for Deep Learning" (2022). A tile's scale
is its largest magnitude over 448, in float32; its codes are its values over the scale, rounded to nearest, ties to even.

====================  ==========================================================================================
a tile of             comes back as
====================  ==========================================================================================
zeros, or magnitudes  zeros (scale 0)
below 2**-100
finite values         values within 2**-4 of themselves, or within 2**-10 of the scale, and one rounding to the dtype
a NaN or an infinity  NaN everywhere: it cannot be overlooked
====================  ==========================================================================================
"""

from __future__ import annotations

import torch

from torch_ragged._kernels._choice import ADA, device_of, runs_triton
from torch_ragged._kernels.tiles import LARGEST, SMALLEST, TileRun, TileTable

__all__ = ["TILES", "dequantize", "quantize"]

TILES = ((128, 128), (1, 128))


def quantize(values: torch.Tensor, buffer: torch.Tensor, table: TileTable) -> None:
    """Write the codes and scales of all runs of ``table``. One kernel launch on CUDA; no communication.

    Args:
        values: flat, float32, bfloat16 or float16.
        buffer: flat uint8: codes at bytes ``run.codes``, float32 scales at every fourth byte from 4 * ``run.scales`` on.
        table: which values, and where their codes and scales go.
    """
    _run("quantize", values, buffer, table)


def dequantize(values: torch.Tensor, buffer: torch.Tensor, table: TileTable) -> None:
    """The opposite of :func:`quantize`, with the same arguments: writes ``values``, rounded to their dtype."""
    _run("dequantize", values, buffer, table)


def _run(name: str, values: torch.Tensor, buffer: torch.Tensor, table: TileTable) -> None:
    if not table.runs or values.is_meta:
        return
    scales = buffer.view(torch.float32)
    if runs_triton(values, ADA):
        from torch_ragged._kernels import _triton_float8 as kernels

        with device_of(values):
            getattr(kernels, name)(values, buffer, scales, table)
        return
    for run in table.runs:
        (_quantize_run if name == "quantize" else _dequantize_run)(values, buffer, scales, run, table.tile)


def _quantize_run(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, run: TileRun, tile: tuple[int, int]) -> None:
    tiles = _tiles_of(values[run.values : run.values + run.numel].view(run.sizes), tile).float()
    largest = tiles.abs().amax((2, 4), keepdim=True)
    scale = torch.where(largest < SMALLEST, 0.0, largest / LARGEST)
    inverse = torch.where(scale == 0, 0.0, 1 / scale)
    quantized = (tiles * inverse).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
    codes[run.codes : run.codes + run.numel].view(run.sizes).copy_(_matrices_of(quantized, run))
    _scales_of(scales, run, tile).copy_(scale.view(run.grid(tile)))


def _dequantize_run(
    values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, run: TileRun, tile: tuple[int, int]
) -> None:
    tiles = _tiles_of(codes[run.codes : run.codes + run.numel].view(run.sizes), tile)
    scale = _scales_of(scales, run, tile)[:, :, None, :, None]
    wide = tiles.contiguous().view(torch.float8_e4m3fn).float() * scale
    values[run.values : run.values + run.numel].view(run.sizes).copy_(_matrices_of(wide, run))


def _tiles_of(matrices: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
    """(matrices, rows, columns) as (matrices, tiles, height, tiles, width), zeros beyond the edges."""
    (height, width), (count, rows, columns) = tile, matrices.shape
    padding = (0, -columns % width, 0, -rows % height)
    if any(padding):
        matrices = torch.nn.functional.pad(matrices, padding)
    return matrices.view(count, -1, height, matrices.shape[2] // width, width)


def _matrices_of(tiles: torch.Tensor, run: TileRun) -> torch.Tensor:
    count, bands, height, across, width = tiles.shape
    return tiles.reshape(count, bands * height, across * width)[:, : run.sizes[1], : run.sizes[2]]


def _scales_of(scales: torch.Tensor, run: TileRun, tile: tuple[int, int]) -> torch.Tensor:
    grid = run.grid(tile)
    return scales[run.scales : run.scales + grid[0] * grid[1] * grid[2]].view(grid)
