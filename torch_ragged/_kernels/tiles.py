"""The offsets of tiles of matrices in flat memory, as a table for one kernel launch. Computes with integers only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

__all__ = ["LARGEST", "SMALLEST", "TileRun", "TileTable", "matrix_runs"]

LARGEST = 448.0
"""The largest value of float8 e4m3."""

SMALLEST = 2.0**-100
"""If all magnitudes of a tile are below this, it counts as zeros: the reciprocal of its scale could be infinite."""


@dataclass(frozen=True)
class TileRun:
    """A contiguous run of matrices, each cut into tiles. Tiles at the lower and the right edge may be smaller.

    Attributes:
        values: the offset of the run in a flat tensor of values.
        codes: the offset of the run in a flat tensor of codes.
        scales: the offset of its first scale. Scales are ordered by matrix, row of tiles, column of tiles.
        sizes: the numbers of matrices, rows and columns.
    """

    values: int
    codes: int
    scales: int
    sizes: tuple[int, int, int]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def grid(self, tile: tuple[int, int]) -> tuple[int, int, int]:
        """The number of matrices, and of tiles along the rows and the columns of each matrix."""
        matrices, rows, columns = self.sizes
        return matrices, -(-rows // tile[0]), -(-columns // tile[1])


def matrix_runs(start: int, stop: int, rows: int, columns: int) -> Iterator[tuple[int, tuple[int, int, int]]]:
    """Split the interval [``start``, ``stop``) of a flat stack of ``rows`` x ``columns`` matrices into runs.

    Both ends must be multiples of ``columns``. Yields (offset in the stack, (matrices, rows, columns)) for up to three runs:
    the end of a matrix, whole matrices, the beginning of a matrix.
    """
    size = rows * columns
    while start < stop:
        into = start % size
        if into or stop - start < size:
            length = min(size - into, stop - start)
            sizes = (1, length // columns, columns)
        else:
            length = (stop - start) // size * size
            sizes = (length // size, rows, columns)
        yield start, sizes
        start += length


class TileTable:
    """Runs of tiles, and the assignment of their parts to the programs of a kernel.

    Args:
        runs: the runs; each has at least one element.
        tile: height and width of a tile.
    """

    PROGRAM_ROWS = 64
    """Rows per program if tiles are one row high."""

    def __init__(self, runs: Sequence[TileRun], tile: tuple[int, int]) -> None:
        self.runs, self.tile = tuple(runs), tile
        self._on: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    @classmethod
    def of_one(cls, sizes: tuple[int, int, int], tile: tuple[int, int], device: torch.device) -> TileTable:
        """The table of one run at offset 0, made on ``device`` without a copy from the host: a CUDA graph may capture it."""
        table = cls([TileRun(0, 0, 0, sizes)], tile)
        programs = math.prod(table.runs[0].grid(table.program))
        numbers = torch.zeros(1, 6, dtype=torch.int64, device=device)
        numbers[0, 4], numbers[0, 5] = sizes[1:]
        table._on[device] = torch.zeros(programs, dtype=torch.int32, device=device), numbers
        return table

    @property
    def is_aligned(self) -> bool:
        """Whether the offsets of all rows, in values and codes, are multiples of 16, so that a thread may read 16 bytes."""
        return all(run.values % 16 == run.codes % 16 == run.sizes[2] % 16 == 0 for run in self.runs)

    @property
    def program(self) -> tuple[int, int]:
        """The rows and columns per program: one tile, or several tiles of one row each."""
        return (self.tile[0] if self.tile[0] > 1 else self.PROGRAM_ROWS), self.tile[1]

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The table on ``device``, copied in the first call: the run of each program (int32) and six int64 of each run.

        The six numbers are: first program, ``values``, ``codes``, ``scales``, rows, columns.
        """
        if device not in self._on:
            numbers: list[tuple[int, ...]] = []
            counts: list[int] = []
            for run in self.runs:
                numbers.append((sum(counts), run.values, run.codes, run.scales, *run.sizes[1:]))
                counts.append(math.prod(run.grid(self.program)))
            repeats = torch.tensor(counts, device="cpu")
            owners = torch.arange(len(counts), dtype=torch.int32, device="cpu").repeat_interleave(repeats)
            self._on[device] = owners.to(device), torch.tensor(numbers, dtype=torch.int64, device="cpu").view(-1, 6).to(device)
        return self._on[device]
