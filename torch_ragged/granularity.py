"""Granularity: how finely a parameter may be cut over ranks. An ``orig_param_policy`` returns one per parameter.

Granularities describe shapes only: they never see ranks or values.
"""

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
    """The planner's description of a tensor.

    No shard boundary may be inside a block of ``block`` elements. Blocks are counted from the start of the tensor; the last one
    may be shorter. If ``period`` is not 0, blocks are counted anew every ``period`` elements, and the last block of each period
    may be shorter. For example, a period is one matrix of a fused tensor, so that no block is in two matrices.

    Attributes:
        name: the name of the parameter, for errors and reports.
        shape: the global shape.
        dims: the ``dims`` of the RaggedShard that cuts the tensor.
        block: elements per block.
        period: elements per period; 0 for none.
        dtype: the planner checks that all tensors of a buffer have one dtype; None if it is not known.

    Raises:
        ValueError: ``block`` is not a positive integer, a size or ``period`` is negative, or the tensor is not a multiple of
            ``period``.
    """

    name: str
    shape: tuple[int, ...]
    dims: tuple[int, ...]
    block: int
    period: int = 0
    dtype: Optional[torch.dtype] = None

    def __post_init__(self) -> None:
        if not isinstance(self.block, int) or self.block < 1:
            raise ValueError(f"{self.name}: block must be an integer of at least 1, got {self.block!r}")
        if min(self.shape, default=0) < 0:
            raise ValueError(f"{self.name}: sizes must be at least 0, got shape {self.shape}")
        if self.period < 0 or (self.period and self.numel % self.period):
            raise ValueError(f"{self.name}: period must be 0 or divide its {self.numel} elements, got {self.period}")

    @cached_property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Granularity:
    """The smallest block of a parameter that stays on one rank. :func:`elements`, :func:`rows`, ... construct it.

    A *row* is a slice along the last dimension of a tensor of two or more dimensions: a fused (E, R, C) expert weight has E * R
    rows. A row of a 1-D tensor is one element. A 0-D tensor is one row.

    Attributes:
        kind: ``"elements"``, ``"rows"`` or ``"tensor"``.
        size: the number of elements or rows per block.
        within: a dimension. No block is in two slices of the dimensions up to this one; negative counts from the end. None sets
            no such limit.
        text: the call that constructs it, such as ``rows(2)``.
    """

    kind: str
    size: int
    within: Optional[int]
    text: str

    def tensor_spec(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> TensorSpec:
        """The planner's description of a parameter of ``shape`` with this granularity."""
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
        """Elements after which blocks are counted anew; 0 for none."""
        if self.within is None:
            return 0
        within = self.within if self.within >= 0 else self.within + len(shape)
        period = math.prod(shape[within + 1 :]) if 0 <= within <= len(shape) - 3 else 0
        return period if period < math.prod(shape) else 0


OrigParamPolicy = Callable[[str, torch.nn.Parameter], Optional[Granularity]]
"""``(fully qualified name, parameter) -> granularity``. None has the meaning of :func:`elements`."""


def elements() -> Granularity:
    """Cut between any two elements. This needs no padding except for alignment."""
    return Granularity("elements", 1, None, "elements()")


def rows(n: int = 1, within: Optional[int] = None) -> Granularity:
    """Keep every ``n`` consecutive rows together.

    Args:
        n: rows per block.
        within: a dimension. Rows are counted anew for each slice of the dimensions up to this one, so that no block is in two
            slices. Use 0 for a fused expert weight (E, R, C) if ``n`` does not divide R: 128 does not divide 2,880, for
            example. If slices of a parameter do not have several rows, ``within`` has no effect.

    Raises:
        ValueError: ``n`` is not a positive integer, or ``within`` is neither an integer nor None.
    """
    _positive("rows", n)
    if within is not None and (not isinstance(within, int) or isinstance(within, bool)):
        raise ValueError(f"rows(within=) takes a dimension (an integer) or None, got {within!r}")
    return Granularity("rows", n, within, f"rows({n})" if within is None else f"rows({n}, within={within})")


def blocks(h: int, w: int) -> Granularity:
    """Keep every ``h`` x ``w`` block of every matrix whole.

    Storage is row-major. Therefore a rank holds whole bands of ``h`` rows, for any ``w``. If a parameter has more than two
    dimensions, no band is in two matrices, and the last band of each matrix may be lower. A parameter of fewer than two
    dimensions has no such blocks and is cut between any two elements.

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
