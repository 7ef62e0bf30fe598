"""Quantize tiles of matrices to float8 codes with one float32 scale per tile.

The codes are e4m3 ("fn": no infinities, largest value 448). Source: Micikevicius et al., "FP8 Formats for Deep Learning"
(2022). The scale of a tile is its largest magnitude divided by 448. Its codes are its values divided by the scale, rounded to
nearest, ties to even.

====================  ==========================================================================================
a tile of             is dequantized to
====================  ==========================================================================================
zeros, or magnitudes  zeros (scale 0)
below 2**-100
finite values         values with a relative error of 2**-4 or an error of 2**-10 scales, plus a rounding to the dtype
a NaN or an infinity  NaN in all elements, so that the error is noticed
====================  ==========================================================================================
"""

from __future__ import annotations

import torch

from torch_ragged._kernels._choice import ADA, on_device_of, runs_triton
from torch_ragged._kernels.tiles import LARGEST, SMALLEST, TileRun, TileTable

__all__ = ["TILES", "dequantize", "quantize"]

TILES = ((128, 128), (1, 128))


def quantize(values: torch.Tensor, buffer: torch.Tensor, table: TileTable, scales: torch.Tensor | None = None) -> None:
    """Write the codes and scales of all runs of ``table``. One kernel launch on CUDA; no communication.

    Args:
        values: flat; float32, bfloat16 or float16.
        buffer: flat uint8. The codes of a run start at byte ``run.codes``, its float32 scales at byte 4 * ``run.scales``.
        table: the runs, with their offsets in ``values`` and ``buffer``.
        scales: flat float32, for the scales, which are not in ``buffer`` then. Those of a run start at ``run.scales``.
    """
    _run("quantize", values, buffer, table, scales)


def dequantize(values: torch.Tensor, buffer: torch.Tensor, table: TileTable, scales: torch.Tensor | None = None) -> None:
    """The inverse of :func:`quantize`, with the same arguments: writes ``values``, rounded to their dtype."""
    _run("dequantize", values, buffer, table, scales)


def _run(name: str, values: torch.Tensor, buffer: torch.Tensor, table: TileTable, scales: torch.Tensor | None) -> None:
    if not table.runs or values.is_meta:
        return
    scales = buffer.view(torch.float32) if scales is None else scales
    if runs_triton(values, ADA):
        from torch_ragged._kernels import _triton_float8 as kernels

        with on_device_of(values):
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
    """(matrices, rows, columns) as (matrices, tiles, height, tiles, width). Tiles beyond the edges are padded with zeros."""
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
