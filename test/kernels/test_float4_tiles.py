"""Tiles of float4 codes against the definition of MXFP4, element by element, in float64."""

import math

import pytest
import torch

from torch_ragged._kernels import float4
from torch_ragged._kernels.tiles import TileRun, TileTable

CODES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def round_trip(values, offset=0):
    """The codes, the exponents and the dequantized values of a stack of matrices, of which each begins at an offset."""
    run = TileRun(offset, offset, offset, tuple(values.shape))
    flat = torch.cat([torch.full((offset,), math.nan, dtype=values.dtype), values.reshape(-1)])
    codes = torch.full((offset + run.numel // 2,), 77, dtype=torch.uint8)
    scales = torch.full((offset + run.numel // 32,), 77, dtype=torch.int8)
    float4.quantize(flat, codes, TileTable([run], float4.TILE), scales)
    assert codes[:offset].eq(77).all() and scales[:offset].eq(77).all(), "nothing outside of the run is written"
    back = torch.full_like(flat, 3.0, dtype=torch.float32)
    float4.dequantize(back, codes, TileTable([run], float4.TILE), scales)
    assert back[:offset].eq(3.0).all()
    return codes[offset:], scales[offset:].view(torch.uint8), back[offset:].view(values.shape)


def by_definition(tile):
    """The exponent and the values of one tile, in Python's numbers."""
    largest = max(map(abs, tile))
    if largest == 0:
        return 0, [0.0] * len(tile)
    exponent = max(math.floor(math.log2(largest)) - 2, -127)
    found = []
    for value in tile:
        scaled = abs(value) / 2.0**exponent
        # The nearest code; of two, the even one.
        nearest = min(range(8), key=lambda code: (abs(CODES[code] - min(scaled, 6.0)), code % 2))
        found.append(math.copysign(CODES[nearest] * 2.0**exponent, value))
    return exponent + 127, found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offset", [0, 5])
def test_each_element_has_the_nearest_code_of_its_tile(dtype, offset):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, 5, 96, generator=generator) * torch.logspace(-6, 4, 5)[:, None]
    values[0, 0, :32] = torch.arange(32) / 8.0  # Ties.
    values[1, 4, 32:64] = 0.0
    values[1, 3, 0] = -0.0
    values = values.to(dtype)
    codes, exponents, back = round_trip(values, offset)
    wanted = [by_definition(tile) for tile in values.reshape(-1, 32).double().tolist()]
    assert exponents.tolist() == [exponent for exponent, _ in wanted]
    assert back.double().view(-1, 32).tolist() == [found for _, found in wanted]
    assert len(codes) * 2 == values.numel() and codes.view(torch.uint8)[:2].tolist() == (codes[:2] & 255).tolist()


def test_codes_lie_in_the_order_of_elements():
    values = torch.tensor([*CODES, *(-code for code in CODES)]).repeat(2).view(1, 1, 32)
    codes, exponents, back = round_trip(values)
    low_first = [low | high << 4 for low, high in zip(range(0, 16, 2), range(1, 16, 2))]
    assert codes.tolist() == low_first * 2 and exponents.tolist() == [127] and torch.equal(back, values)


def test_extreme_magnitudes_and_what_is_no_number():
    for largest in (2.0**-126, 1e-38, 3e38, 2.0**127):
        tile = torch.linspace(-1, 1, 32) * largest
        _, _, back = round_trip(tile.view(1, 1, 32))
        assert back.isfinite().all() and (back.view(-1) - tile).abs().max() <= 0.26 * largest, largest
    for wrong in (math.nan, math.inf, -math.inf):
        values = torch.ones(1, 2, 64)
        values[0, 1, 40] = wrong
        _, exponents, back = round_trip(values)
        assert exponents.tolist() == [125, 125, 125, 255]
        assert back[0, 1, 32:].isnan().all() and back.isnan().sum() == 32 and (back[0, 0] == 1.0).all()
