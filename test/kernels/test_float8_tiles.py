"""Tiles of float8 codes against the definition, element by element: the twin of the kernel, for any sizes."""

import math

import pytest
import torch

from torch_ragged._kernels import float8
from torch_ragged._kernels.tiles import TileRun, TileTable, matrix_runs

SIZES = [(1, 1, 1), (1, 128, 128), (2, 130, 257), (3, 5, 300), (1, 300, 3)]


@pytest.mark.parametrize("tile", float8.TILES)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_times_scales_are_the_values_within_half_a_code(tile, sizes, dtype):
    count, rows, columns = sizes
    run = TileRun(3, 8, 40, sizes)  # Offsets must not matter.
    values = torch.full((3 + run.numel,), math.nan, dtype=dtype)
    matrices = values[3:].view(sizes)
    generator = torch.Generator().manual_seed(0)
    matrices.copy_(torch.randn(sizes, generator=generator) * torch.logspace(-4, 4, rows)[:, None])
    scales = torch.full((40 + math.prod(run.grid(tile)),), math.nan)
    codes = torch.full((8 + run.numel,), 77, dtype=torch.uint8)
    float8.quantize(values, codes, TileTable([run], tile), scales)
    assert codes[:8].eq(77).all() and scales[:40].isnan().all(), "nothing outside of the run is written"
    back = torch.empty_like(values, dtype=torch.float32)
    float8.dequantize(back, codes, TileTable([run], tile), scales)
    grid = scales[40:].view(run.grid(tile))
    for matrix in range(count):
        for row in range(0, rows, tile[0]):
            for column in range(0, columns, tile[1]):
                here = (matrix, slice(row, row + tile[0]), slice(column, column + tile[1]))
                given, found = matrices[here].double(), back[3:].view(sizes)[here].double()
                scale = grid[matrix, row // tile[0], column // tile[1]].double()
                assert scale.item() == pytest.approx(given.abs().max().item() / 448, rel=1e-6)
                assert ((found - given).abs() <= given.abs() * 2**-4 + scale * 2**-10).all()


@pytest.mark.parametrize("tile", float8.TILES)
def test_zeros_stay_zeros_and_a_nan_or_an_infinity_makes_its_tile_nan(tile):
    values = torch.ones(1, 256, 256)
    values[0, :128, :128], values[0, 3, 200], values[0, 200, 5] = 0.0, math.nan, -math.inf
    values[0, 255, 255] = 2.0**-120
    run = TileRun(0, 0, 0, (1, 256, 256))
    codes, scales = torch.empty(256 * 256, dtype=torch.uint8), torch.empty(math.prod(run.grid(tile)))
    table, back = TileTable([run], tile), torch.empty(256 * 256)
    float8.quantize(values.view(-1), codes, table, scales)
    float8.dequantize(back, codes, table, scales)
    back = back.view(256, 256)
    assert back[:128, :128].eq(0).all()
    rows = (slice(0, 128), slice(128, 256)) if tile[0] > 1 else (slice(3, 4), slice(200, 201))
    assert back[rows[0], 128:].isnan().all() and back[rows[1], :128].isnan().all()
    assert back.isnan().sum() == 2 * 128 * (rows[0].stop - rows[0].start) and back[255, 254] == 1.0 and back[255, 255] == 0.0


def test_runs_cover_an_interval_of_a_stack_once():
    for start, stop in ((0, 60), (5, 60), (5, 10), (15, 55), (20, 40), (0, 0)):
        runs = list(matrix_runs(start, stop, 4, 5))
        covered = [element for offset, sizes in runs for element in range(offset, offset + math.prod(sizes))]
        assert covered == list(range(start, stop)) and len(runs) <= 3
        assert all(sizes[0] == 1 or (sizes[1] == 4 and offset % 20 == 0) for offset, sizes in runs)


def test_the_table_of_one_run_is_the_same_without_a_copy():
    for sizes, tile in (((1, 70, 300), (1, 128)), ((2, 200, 128), (128, 128)), ((1, 1, 1), (1, 128))):
        made = TileTable.of_one(sizes, tile, torch.device("cpu")).on(torch.device("cpu"))
        copied = TileTable([TileRun(0, 0, 0, sizes)], tile).on(torch.device("cpu"))
        assert all(torch.equal(one, two) and one.dtype == two.dtype for one, two in zip(made, copied, strict=True))
