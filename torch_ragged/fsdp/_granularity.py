"""Granularity: how finely a parameter may be cut over ranks, and what ``orig_param_policy`` returns."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Optional

import torch

__all__ = ["Granularity", "OrigParamPolicy", "blocks", "elements", "rows", "tensor"]


@dataclass(frozen=True)
class Granularity:
    """The smallest piece of a parameter that stays on one rank.

    Attributes:
        kind: ``"elements"``, ``"rows"`` or ``"tensor"``.
        size: how many of them make a block.
        within: whether blocks must not straddle the matrices of a parameter with more than two dimensions.
        text: how the user wrote it.

    A *row* is a slice along the last dimension of a tensor of two or more dimensions (a fused (E, R, C) expert weight
    has E * R rows), one element of a 1-D tensor, and the whole of a 0-D tensor.
    """

    kind: str
    size: int
    within: bool
    text: str

    def dims(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The RaggedShard dims of a parameter of ``shape`` cut at this granularity."""
        if self.kind == "tensor":
            return ()
        if self.kind == "elements" or len(shape) < 2:
            return tuple(range(len(shape)))
        return tuple(range(len(shape) - 1))

    def block_numel(self, shape: Sequence[int]) -> int:
        """Elements of one block of a parameter of ``shape``; the last block of the parameter may be shorter."""
        numel = max(math.prod(shape), 1)
        if self.kind == "tensor":
            return numel
        if len(shape) < 2 or self.kind == "elements":
            return 1 if self.within else min(self.size, numel)
        per_row, per_matrix = max(shape[-1], 1), max(shape[-2], 1)
        block = self.size
        if self.within and len(shape) > 2 and per_matrix % self.size:
            block = per_matrix  # Blocks do not tile a matrix: whole matrices are the finest cut that breaks none.
        return min(block * per_row, numel)


OrigParamPolicy = Callable[[str, torch.nn.Parameter], Optional[Granularity]]
"""``(fully qualified name, parameter) -> granularity``; None means element-wise."""


def elements() -> Granularity:
    """Cut anywhere: no padding beyond alignment."""
    return Granularity("elements", 1, False, "elements()")


def rows(n: int = 1) -> Granularity:
    """Keep every ``n`` consecutive rows together.

    Raises:
        ValueError: ``n`` is not a positive integer.
    """
    return Granularity("rows", _positive("rows", n), False, f"rows({n})")


def blocks(h: int, w: int) -> Granularity:
    """Keep every ``h`` x ``w`` block of every matrix whole.

    Storage is row-major, so that a rank holds whole bands of ``h`` rows, whatever ``w`` is. Blocks do not straddle
    the matrices of a parameter with more than two dimensions: if ``h`` does not divide its matrices, matrices stay
    whole. Parameters of fewer than two dimensions have no such blocks and are cut anywhere.

    Raises:
        ValueError: ``h`` or ``w`` is not a positive integer.
    """
    _positive("blocks", w)
    return Granularity("rows", _positive("blocks", h), True, f"blocks({h}, {w})")


def tensor() -> Granularity:
    """Keep the whole parameter on one rank."""
    return Granularity("tensor", 1, False, "tensor()")


def _positive(name: str, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}() takes positive integers, got {value!r}")
    return value
