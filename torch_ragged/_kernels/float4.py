"""Quantize tiles of matrices to float4 codes, two in a byte, with one 8-bit exponent per tile: the format MXFP4.

The codes are e2m1: a sign and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6. A tile is 32 elements of a row. Its scale is a power of two,
whose exponent is stored (e8m0). Source: Open Compute Project, "Microscaling Formats (MX) Specification 1.0" (2023), section
6.3: the exponent is that of the largest magnitude, less 2. So this magnitude divided by the scale is from 4 to 8, and what is
above 6 becomes 6. Values are rounded to nearest, ties to even.

====================  ==========================================================================================
a tile of             is dequantized to
====================  ==========================================================================================
zeros, or magnitudes  zeros
below 2**-129
finite values         values with an error of at most 1/4 of themselves, or 1/16 of the tile's largest magnitude
a NaN or an infinity  NaN in all elements, so that the error is noticed
====================  ==========================================================================================
"""

from __future__ import annotations

import torch

from torch_ragged._kernels._choice import on_device_of, runs_triton
from torch_ragged._kernels.tiles import TileTable

__all__ = ["PER_BYTE", "TILE", "dequantize", "quantize"]

TILE = (1, 32)
"""The height and width of a tile."""

PER_BYTE = 2
"""Codes in a byte. The first element of a pair is in the lower four bits."""

_BIAS, _NAN = 127, 255
_LARGEST_EXPONENT = 2  # Of a code: 6 is 1.5 times 2**2.
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def quantize(values: torch.Tensor, codes: torch.Tensor, table: TileTable, scales: torch.Tensor) -> None:
    """Write the codes and exponents of all runs of ``table``. One kernel launch on CUDA; no communication.

    Args:
        values: flat; float32, bfloat16 or float16.
        codes: flat uint8. Those of a run start at byte ``run.codes``.
        table: the runs. Their numbers of columns are multiples of a tile's.
        scales: flat int8, for the bits of the exponents. Those of a run start at ``run.scales``.
    """
    _run_float4("quantize", values, codes, table, scales)


def dequantize(values: torch.Tensor, codes: torch.Tensor, table: TileTable, scales: torch.Tensor) -> None:
    """The inverse of :func:`quantize`, with the same arguments: writes ``values``, rounded to their dtype."""
    _run_float4("dequantize", values, codes, table, scales)


def _run_float4(name: str, values: torch.Tensor, codes: torch.Tensor, table: TileTable, scales: torch.Tensor) -> None:
    if not table.runs or values.is_meta:
        return
    if runs_triton(values):
        from torch_ragged._kernels import _triton_float4 as kernels

        with on_device_of(values):
            getattr(kernels, name)(values, codes, scales, table)
        return
    for run in table.runs:
        of_run = values[run.values : run.values + run.numel], codes[run.codes : run.codes + run.numel // PER_BYTE]
        exponents = scales[run.scales : run.scales + run.numel // TILE[1]].view(torch.uint8)
        (_quantize_float4 if name == "quantize" else _dequantize_float4)(*of_run, exponents)


def _quantize_float4(values: torch.Tensor, codes: torch.Tensor, exponents: torch.Tensor) -> None:
    tiles = values.view(-1, TILE[1]).float()
    # The exponent of a subnormal number is 0, and that of a NaN or an infinity is 255.
    largest = tiles.abs().amax(1).view(torch.int32) >> 23
    exponent = torch.where(largest == _NAN, _NAN, (largest - _LARGEST_EXPONENT).clamp(min=0))
    scaled = tiles.abs() * _power(2 * _BIAS - exponent)[:, None]
    code = (scaled > 0.25).to(torch.uint8)  # Ties go to the even code: below it they do not count, above it they do.
    for bound, counts in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        code += (scaled >= bound) if counts else (scaled > bound)
    code |= tiles.signbit().to(torch.uint8) << 3
    low, high = code.view(-1, PER_BYTE).unbind(1)
    codes.copy_(low | high << 4)
    exponents.copy_(exponent)


def _dequantize_float4(values: torch.Tensor, codes: torch.Tensor, exponents: torch.Tensor) -> None:
    code = torch.stack((codes & 15, codes >> 4), 1).view(-1, TILE[1])
    positive = torch.tensor(_VALUES, device=values.device)
    scale = torch.where(exponents == _NAN, torch.nan, _power(exponents.int()))
    values.copy_((torch.cat((positive, -positive))[code.int()] * scale[:, None]).view(-1))


def _power(exponent: torch.Tensor) -> torch.Tensor:
    """2 to the power of ``exponent - 127``, exact: its bits, which for the smallest are those of a subnormal number."""
    return torch.where(exponent <= 0, 1 << 22, exponent.int() << 23).int().view(torch.float32)
