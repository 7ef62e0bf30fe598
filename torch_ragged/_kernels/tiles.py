"""Where the tiles of matrices lie in flat memory, as a table that one kernel launch goes through."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

__all__ = ["LARGEST", "SMALLEST", "TileRun", "TileTable", "matrix_runs"]

LARGEST = 448.0
"""The largest float8 code of a tile, e4m3's."""

SMALLEST = 2.0**-100
"""A tile with no larger magnitude counts as zeros: the reciprocal of its scale could be infinite."""


@dataclass(frozen=True)
class TileRun:
    """A contiguous run of matrices, each cut into tiles; those at the lower and right edge may be smaller.

    Attributes:
        values: where it begins in a flat tensor of values.
        codes: where it begins in a flat tensor of codes.
        scales: where the scales of its tiles begin, row by row of tiles, matrix after matrix.
        sizes: matrices, rows, columns.
    """

    values: int
    codes: int
    scales: int
    sizes: tuple[int, int, int]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def grid(self, tile: tuple[int, int]) -> tuple[int, int, int]:
        """Matrices, and tiles along the rows and columns of each."""
        matrices, rows, columns = self.sizes
        return matrices, -(-rows // tile[0]), -(-columns // tile[1])


def matrix_runs(start: int, stop: int, rows: int, columns: int) -> Iterator[tuple[int, tuple[int, int, int]]]:
    """The interval from ``start`` to ``stop`` of a flat stack of matrices of ``rows`` x ``columns``, as runs.

    Whole rows only. Yields where each run begins in the stack, and its (matrices, rows, columns): the end of a matrix, whole
    ones, the beginning of one; those that are there.
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
    """Runs of tiles, and which program of a kernel does which part of them.

    Args:
        runs: of matrices with elements.
        tile: height and width of a tile.
    """

    PROGRAM_ROWS = 64
    """Rows that a program does where tiles are one row high."""

    def __init__(self, runs: Sequence[TileRun], tile: tuple[int, int]) -> None:
        self.runs, self.tile = tuple(runs), tile
        self._on: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def is_aligned(self) -> bool:
        """Whether all rows begin at multiples of 16 values and codes, so that a thread may read 16 bytes at once."""
        return all(run.values % 16 == run.codes % 16 == run.sizes[2] % 16 == 0 for run in self.runs)

    @property
    def program(self) -> tuple[int, int]:
        """The rows and columns that a program does: a tile, or several of one row each."""
        return (self.tile[0] if self.tile[0] > 1 else self.PROGRAM_ROWS), self.tile[1]

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """For each program its run (int32), and for each run its numbers (int64, 6): copied to ``device`` the first time.

        The numbers: first program, ``values``, ``codes``, ``scales``, rows, columns.
        """
        if device not in self._on:
            numbers: list[tuple[int, ...]] = []
            counts: list[int] = []
            for run in self.runs:
                numbers.append((sum(counts), run.values, run.codes, run.scales, *run.sizes[1:]))
                counts.append(math.prod(run.grid(self.program)))
            owners = torch.arange(len(counts), dtype=torch.int32).repeat_interleave(torch.tensor(counts))
            self._on[device] = owners.to(device), torch.tensor(numbers, dtype=torch.int64).view(-1, 6).to(device)
        return self._on[device]
