"""Granularity: how finely a parameter may be cut over ranks. An ``orig_param_policy`` returns one per parameter.

Granularities describe shapes only: they never see ranks or values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Optional, Union

import torch

__all__ = [
    "Granularity",
    "GroupPolicy",
    "OrigParamPolicy",
    "Segments",
    "TensorSpec",
    "blocks",
    "elements",
    "rows",
    "segments",
    "tensor",
]

ElementRun = tuple[int, int, int]
"""``(start, stop, block)``: a part of a tensor with a cut every ``block`` elements from ``start`` on, and with no other."""


@dataclass(frozen=True)
class TensorSpec:
    """The planner's description of a tensor.

    No shard boundary may be inside a block of ``block`` elements. Blocks are counted from the start of the tensor; the last one
    may be shorter. If ``period`` is not 0, blocks are counted anew every ``period`` elements, and the last block of each period
    may be shorter. For example, a period is one matrix of a fused tensor, so that no block is in two matrices.

    The segments of a fused weight, such as queries, keys and values, may have blocks of different sizes: then each is described
    by a spec of its own in ``segments``, and no block is in two segments. :meth:`fused` makes such a description.

    Attributes:
        name: the name of the parameter, for errors and reports.
        shape: the global shape.
        dims: the ``dims`` of the RaggedShard that cuts the tensor.
        block: elements per block; with ``segments``, of the largest one.
        period: elements per period; 0 for none.
        dtype: the planner checks that all tensors of a buffer have one dtype; None if it is not known.
        segments: the segments of a period, in the order of storage. Empty if all blocks have one size.

    Raises:
        ValueError: ``block`` is not a positive integer, a size or ``period`` is negative, the tensor is not a multiple of
            ``period``, or ``segments`` do not fill a period or have another largest block.
    """

    name: str
    shape: tuple[int, ...]
    dims: tuple[int, ...]
    block: int
    period: int = 0
    dtype: Optional[torch.dtype] = None
    segments: tuple[TensorSpec, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.block, int) or self.block < 1:
            raise ValueError(f"{self.name}: block must be an integer of at least 1, got {self.block!r}")
        if min(self.shape, default=0) < 0:
            raise ValueError(f"{self.name}: sizes must be at least 0, got shape {self.shape}")
        if self.period < 0 or (self.period and self.numel % self.period):
            raise ValueError(f"{self.name}: period must be 0 or divide its {self.numel} elements, got {self.period}")
        if self.segments:
            period, filled = self.period or self.numel, sum(segment.numel for segment in self.segments)
            if filled != period:
                raise ValueError(f"{self.name}: segments must have the {period} elements of a period together, got {filled}")
            largest = max(segment.block for segment in self.segments)
            if self.block != largest:
                raise ValueError(f"{self.name}: block must be {largest}, the largest of the segments, got {self.block}")

    @staticmethod
    def fused(name: str, shape: Sequence[int], segments: Sequence[TensorSpec], dtype: torch.dtype | None = None) -> TensorSpec:
        """The description of a fused tensor, from those of its segments: they lie along the first dimension that they have.

        If one size of blocks says the same, the result has no segments: 4 and 2 rows in blocks of 2 are 6 rows in such blocks.
        """
        shape, segments = tuple(shape), tuple(segments)
        dim = len(shape) - len(segments[0].shape)
        dims = tuple(range(dim + max(1, *(len(segment.dims) for segment in segments))))
        numel, period = math.prod(shape), math.prod(shape[dim:])
        block = max(segment.block for segment in segments)
        spec = TensorSpec(name, shape, dims, block, period if period < numel else 0, dtype, segments)
        lengths = {(stop - start, block) for start, stop, block in spec.runs} or {(0, 1)}
        if len(lengths) > 1 or (len(spec.runs) > 1 and not spec.period):
            return spec
        ((length, block),) = lengths
        return TensorSpec(name, shape, dims, block, length if length < numel else 0, dtype)

    @cached_property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def packed(self, count: int) -> TensorSpec:
        """The description of the tensor with ``count`` elements in each byte, along its last dimension.

        Raises:
            ValueError: its last dimension or a block is no whole number of bytes.
        """
        if self.shape[-1] % count or self.block % count or self.period % count:
            raise ValueError(
                f"{self.name} of shape {self.shape} in blocks of {self.block} cannot have {count} elements in each byte"
            )
        segments = tuple(segment.packed(count) for segment in self.segments)
        shape = (*self.shape[:-1], self.shape[-1] // count)
        return replace(self, shape=shape, block=self.block // count, period=self.period // count, segments=segments, dtype=None)

    @cached_property
    def runs(self) -> tuple[ElementRun, ...]:
        """All places where the tensor may be cut: runs of equal blocks, as few as possible, in the order of storage."""
        runs: list[ElementRun] = []
        for numel, block in self._parts():
            start, stop, last = runs[-1] if runs else (0, 0, 0)
            # After whole blocks, blocks of the same size go on, and a shorter one can end the run.
            if last and (stop - start) % last == 0 and (block == last or block == numel < last):
                runs[-1] = (start, stop + numel, last)
            else:
                runs.append((stop, stop + numel, block))
        return tuple(runs)

    def _parts(self) -> list[tuple[int, int]]:
        """The elements and the block of each part in which blocks are counted from its start. Empty parts are left out."""
        if not self.numel:
            return []
        period = self.period or self.numel
        parts = [part for segment in self.segments for part in segment._parts()]
        return (parts or [(period, min(self.block, period))]) * (self.numel // period)

    def whole_slices(self, ndims: int) -> TensorSpec:
        """The same tensor, cut between whole slices of its first ``ndims`` dimensions only."""
        unit, dims = math.prod(self.shape[ndims:]), self.dims[:ndims]
        if not self.numel:
            return self
        if self.segments:
            inner = ndims - (len(self.shape) - len(self.segments[0].shape))  # Of these, the dimensions of a segment.
            if inner > 0:
                parts = [segment.whole_slices(inner) for segment in self.segments]
                return TensorSpec.fused(self.name, self.shape, parts, self.dtype)
            return TensorSpec(self.name, self.shape, dims, unit, 0, self.dtype)  # Each slice has all segments.
        period = self.period if self.period % unit == 0 else 0
        block = min(math.lcm(self.block, unit), period or self.numel)
        return TensorSpec(self.name, self.shape, dims, block, period, self.dtype)

    @property
    def text(self) -> str:
        """Where the tensor may be cut, in words; empty if anywhere."""
        if self.segments:
            return "segments: " + "; ".join(f"{part.numel} elements{part.text and ' '}{part.text}" for part in self.segments)
        anew = f", counted anew every {self.period}" if self.period else ""
        return f"in blocks of {self.block} elements{anew}" if self.block > 1 else ""


@dataclass(frozen=True)
class Granularity:
    """The smallest block of a parameter that stays on one rank. :func:`elements`, :func:`rows`, ... construct it.

    A *row* is a slice along the last dimension of a tensor of two or more dimensions: a fused (E, R, C) expert weight has E * R
    rows. A row of a 1-D tensor is one element. A 0-D tensor is one row.

    Attributes:
        kind: ``"elements"``, ``"rows"``, ``"tensor"`` or ``"segments"``.
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
        numel, dims, block, period = max(math.prod(shape), 1), tuple(range(len(shape))), 1, 0
        if self.kind == "tensor":
            dims, block = (), numel
        elif self.kind == "rows" and len(shape) < 2:
            block = min(self.size, numel) if self.within is None else 1
        elif self.kind == "rows":
            if self.within is not None:
                within = self.within if self.within >= 0 else self.within + len(shape)
                period = math.prod(shape[within + 1 :]) if 0 <= within <= len(shape) - 3 else 0
                period = period if period < numel else 0  # One slice: blocks are counted once.
            dims, block = dims[:-1], min(self.size * max(shape[-1], 1), period or numel)
        return TensorSpec(name, shape, dims, block, period, dtype)


@dataclass(frozen=True)
class Segments(Granularity):
    """The granularity of a fused weight: one for each of its segments. :func:`segments` constructs it.

    Attributes:
        sizes: the size of each segment along ``dim``.
        granularities: the granularity of each segment.
        dim: the dimension along which the segments lie, one after the other.
    """

    sizes: tuple[int, ...]
    granularities: tuple[Granularity, ...]
    dim: int

    def tensor_spec(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> TensorSpec:
        """The planner's description of a fused weight of ``shape``.

        Raises:
            ValueError: as :meth:`check`.
        """
        shape, dim = tuple(shape), self.check(name, shape)
        pairs = zip(self.sizes, self.granularities)
        parts = [each.tensor_spec(f"segment {i}", (size, *shape[dim + 1 :])) for i, (size, each) in enumerate(pairs)]
        return TensorSpec.fused(name, shape, parts, dtype)

    def check(self, name: str, shape: Sequence[int]) -> int:
        """The dimension of the segments of a parameter of ``shape``, not negative.

        Raises:
            ValueError: ``shape`` has no dimension ``dim``, or another size there; or segments along it are not contiguous.
        """
        shape, ndim = tuple(shape), len(shape)
        if not -ndim <= self.dim < ndim or sum(self.sizes) != shape[self.dim]:
            raise ValueError(
                f"{name}: the sizes of {self.text} add up to {sum(self.sizes)}, the shape is {shape}: give sizes that add up "
                f"to its dimension {self.dim}, or another granularity for this parameter"
            )
        dim = self.dim % ndim
        if dim and dim == ndim - 1:
            raise ValueError(
                f"{name}: each row of {shape} has all segments of dimension {dim}, so {self.text} cannot cut between them: "
                "give a granularity of whole rows, without segments"
            )
        return dim

    def with_sizes(self, sizes: Sequence[int]) -> Segments:
        """The same granularities for segments of other ``sizes``, such as those on one rank of tensor parallelism."""
        return segments(sizes, self.granularities, self.dim)


OrigParamPolicy = Callable[[str, torch.nn.Parameter], Optional[Granularity]]
"""``(fully qualified name, parameter) -> granularity``. None has the meaning of :func:`elements`."""


class GroupPolicy:
    """An ``orig_param_policy`` that sees all parameters of a buffer at once, and chooses its layout.

    A subclass defines :meth:`choose`, from integers alone: all ranks must choose the same.
    """

    def choose(
        self, params: Sequence[tuple[str, Any]], ranks: int, plan: Callable[[Sequence[Optional[Granularity]]], Any]
    ) -> Any:
        """The layout of a buffer.

        Args:
            params: the parameters by name; only their shapes may be read. Of one that tensor parallelism cuts, ``plan`` lays
                out this rank's part.
            ranks: the shards of the buffer.
            plan: one granularity per parameter, or None for single elements -> a ``BufferLayout`` of this package.

        Returns:
            one of the layouts that ``plan`` has returned, or such a layout rotated.
        """
        raise NotImplementedError

    def __call__(self, fqn: str, param: torch.nn.Parameter) -> Optional[Granularity]:
        """Single elements: :meth:`choose` decides."""
        return None


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


def segments(sizes: Sequence[int], granularity: Union[Granularity, Sequence[Granularity]], dim: int = 0) -> Segments:
    """Cut each segment of a fused weight by a granularity of its own, as if it was a parameter of its own::

        segments((4096, 1024, 1024), rows(128))                          # q, k, v: blocks are counted anew in each
        segments((4096, 1024, 1024), [tensor(), rows(64), rows(64)])     # q stays whole
        segments((2880, 2880), rows(128), dim=1)                         # gate and up of fused experts (E, 2 * 2880, C)

    No block is in two segments, and the weight may be cut between two segments. Sizes are those of the whole weight. If tensor
    parallelism cuts the same dimension, it must cut each segment by itself, as ``InterleavedShard(dim, sizes)`` does: then
    each rank has a part of each segment, with blocks counted from its start.

    Args:
        sizes: the size of each segment along ``dim``, in order. They add up to the size of the parameter.
        granularity: one for all segments, or one for each.
        dim: the dimension along which the segments lie. If it is not the first one, each slice of the dimensions before it has
            all segments.

    Raises:
        TypeError: ``granularity`` is neither a granularity nor some of them, or has segments itself; or ``dim`` is no integer.
        ValueError: a size is not a positive integer, there is none, or there are not as many granularities as sizes.
    """
    if not isinstance(sizes, Sequence) or not sizes:
        raise ValueError(f"segments() takes the size of each segment, such as (4096, 1024, 1024), got {sizes!r}")
    sizes = tuple([_positive("segments", size) for size in sizes])
    some = tuple(granularity) if isinstance(granularity, Sequence) else (granularity,)
    each = some if isinstance(granularity, Sequence) else some * len(sizes)
    for part in each:
        if not isinstance(part, Granularity) or isinstance(part, Segments):
            got = part.text if isinstance(part, Segments) else repr(part)
            raise TypeError(f"segments() takes elements(), rows(n), blocks(h, w) or tensor() for each segment, got {got}")
    if len(each) != len(sizes):
        raise ValueError(f"segments() takes one granularity, or one for each of the {len(sizes)} segments, got {len(each)}")
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise TypeError(f"segments(dim=) takes an integer, got {dim!r}")
    texts = f"[{', '.join(part.text for part in each)}]" if isinstance(granularity, Sequence) else each[0].text
    return Segments("segments", 1, None, f"segments({sizes}, {texts}{f', dim={dim}' if dim else ''})", sizes, each, dim)


def _positive(name: str, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}() takes positive integers, got {value!r}")
    return value
