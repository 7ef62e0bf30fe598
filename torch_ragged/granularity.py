"""Granularity: how finely a parameter may be cut over ranks, and what ``orig_param_policy`` returns."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Optional

import torch

__all__ = ["Granularity", "OrigParamPolicy", "TensorSpec", "blocks", "elements", "rows", "tensor"]


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to lay out: its name and shape, the RaggedShard dims it is cut along, and the size of its blocks.

    No shard boundary may fall inside a block of ``block`` elements, counted from the tensor's start; the last
    block may be shorter. With a ``period`` blocks are counted anew every ``period`` elements, and the last one of each
    may be shorter: matrices of a fused tensor, whose blocks must not straddle two of them. ``dtype`` is for the planner
    to check: a buffer has one.

    Raises:
        ValueError: ``block`` is no positive integer, a size or ``period`` is negative, or periods do not fill the tensor.
    """

    name: str
    shape: tuple[int, ...]
    dims: tuple[int, ...]
    block: int
    period: int = 0
    dtype: Optional[torch.dtype] = None

    def __post_init__(self) -> None:
        if not isinstance(self.block, int) or self.block < 1:
            raise ValueError(f"{self.name}: block of {self.block} elements, expected an integer of at least 1")
        if min(self.shape, default=0) < 0:
            raise ValueError(f"{self.name}: shape {self.shape} has a negative size")
        if self.period < 0 or (self.period and self.numel % self.period):
            raise ValueError(f"{self.name}: {self.numel} elements are not made of whole periods of {self.period} elements")

    @cached_property
    def numel(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Granularity:
    """The smallest piece of a parameter that stays on one rank; made by :func:`elements`, :func:`rows` and so on.

    Attributes:
        kind: ``"elements"``, ``"rows"`` or ``"tensor"``.
        size: how many of them make a block.
        within: blocks do not straddle two slices of the dimensions up to this one (negative: from the end); None if they may.
        text: how the user wrote it.

    A *row* is a slice along the last dimension of a tensor of two or more dimensions (a fused (E, R, C) expert weight
    has E * R rows), one element of a 1-D tensor, and the whole of a 0-D tensor.
    """

    kind: str
    size: int
    within: Optional[int]
    text: str

    def tensor_spec(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> TensorSpec:
        """What the planner is told of a parameter of ``shape`` that is cut at this granularity."""
        shape = tuple(shape)
        return TensorSpec(name, shape, self._dims(shape), self._block(shape), self._period(shape), dtype)

    def _dims(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if self.kind == "tensor":
            return ()
        if self.kind == "elements" or len(shape) < 2:
            return tuple(range(len(shape)))
        return tuple(range(len(shape) - 1))

    def _block(self, shape: tuple[int, ...]) -> int:
        numel = max(math.prod(shape), 1)
        if self.kind == "tensor":
            return numel
        if self.kind == "elements":
            return 1
        if len(shape) < 2:
            return 1 if self.within is not None else min(self.size, numel)
        return min(self.size * max(shape[-1], 1), self._period(shape) or numel)

    def _period(self, shape: tuple[int, ...]) -> int:
        """Elements after which blocks are counted anew; 0 for never."""
        if self.within is None:
            return 0
        within = self.within if self.within >= 0 else self.within + len(shape)
        period = math.prod(shape[within + 1 :]) if 0 <= within <= len(shape) - 3 else 0
        return period if period < math.prod(shape) else 0


OrigParamPolicy = Callable[[str, torch.nn.Parameter], Optional[Granularity]]
"""``(fully qualified name, parameter) -> granularity``; None means element-wise."""


def elements() -> Granularity:
    """Cut anywhere: no padding beyond alignment."""
    return Granularity("elements", 1, None, "elements()")


def rows(n: int = 1, within: Optional[int] = None) -> Granularity:
    """Keep every ``n`` consecutive rows together.

    Args:
        n: rows of a block.
        within: count rows anew for each slice of the dimensions up to this one, so that no block straddles two: 0 for
            fused expert weights (E, R, C), where blocks of 128 rows do not divide the 2,880 rows of an expert. Parameters
            without slices of several rows ignore it.

    Raises:
        ValueError: ``n`` is not a positive integer, or ``within`` not an integer.
    """
    _positive("rows", n)
    if within is not None and (not isinstance(within, int) or isinstance(within, bool)):
        raise ValueError(f"rows(within=) takes a dimension or None, got {within!r}")
    return Granularity("rows", n, within, f"rows({n})" if within is None else f"rows({n}, within={within})")


def blocks(h: int, w: int) -> Granularity:
    """Keep every ``h`` x ``w`` block of every matrix whole.

    Storage is row-major, so that a rank holds whole bands of ``h`` rows, whatever ``w`` is. Bands do not straddle the
    matrices of a parameter with more than two dimensions; the last band of each may be lower. Parameters of fewer than
    two dimensions have no such blocks and are cut anywhere.

    Raises:
        ValueError: ``h`` or ``w`` is not a positive integer.
    """
    _positive("blocks", w)
    return Granularity("rows", _positive("blocks", h), -3, f"blocks({h}, {w})")


def tensor() -> Granularity:
    """Keep the whole parameter on one rank."""
    return Granularity("tensor", 1, None, "tensor()")


def _positive(name: str, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}() takes positive integers, got {value!r}")
    return value
