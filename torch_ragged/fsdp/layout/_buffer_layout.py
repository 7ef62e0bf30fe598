"""The layout of a group of tensors in one buffer of equal shards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch_ragged._units import Units
from torch_ragged.granularity import TensorSpec
from torch_ragged.placement_types import RaggedShard

__all__ = ["BufferLayout", "TensorSpec"]


@dataclass(frozen=True)
class BufferLayout:
    """Where each tensor lies in a buffer of ``ranks`` shards of ``shard_numel`` elements each; it validates itself.

    Three tensors on three ranks; ``.`` is padding::

        | a a a a b b | b b b b c c | c c c c c . |
         `- rank 0 --´ `- rank 1 --´ `- rank 2 --´

    Attributes:
        tensors: in the order given by the user.
        offsets: of each tensor, in elements from the start of the buffer.
        shard_numel: elements of each rank's shard (S).
        ranks: number of shards.
        alignment: ``shard_numel`` is a multiple of it.
        lower_bound: no layout of these tensors has a smaller ``shard_numel``.
        forced_by: why, in words: the tensor or the divisor that forces it.
        order: name of the order that the planner laid the tensors out in.

    Raises:
        ValueError: tensors overlap or leave the buffer, a shard boundary cuts a block, or shards are unaligned.
    """

    tensors: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]
    shard_numel: int
    ranks: int
    alignment: int
    lower_bound: int
    forced_by: str
    order: str

    def __post_init__(self) -> None:
        if self.shard_numel <= 0 or self.shard_numel % self.alignment:
            raise ValueError(f"shard of {self.shard_numel} elements is not a positive multiple of {self.alignment}")
        if len(self.offsets) != len(self.tensors):
            raise ValueError(f"{len(self.tensors)} tensors, but {len(self.offsets)} offsets")
        position, previous, shard = 0, "the start of the buffer", self.shard_numel
        for offset, numel, index in sorted(
            zip(self.offsets, [tensor.numel for tensor in self.tensors], range(len(self.tensors)))
        ):
            tensor = self.tensors[index]
            if offset < position:
                raise ValueError(f"{tensor.name} at {offset} overlaps {previous}, which ends at {position}")
            position, previous = offset + numel, tensor.name
            if shard - offset % shard < numel:
                self._check_cuts(offset, tensor)
        if position > self.numel:
            raise ValueError(f"{previous} ends at {position}, beyond the buffer of {self.numel} elements")

    def _check_cuts(self, offset: int, tensor: TensorSpec) -> None:
        """Raise if one of the shard boundaries inside ``tensor`` falls inside a block."""
        shard, numel, block, period = self.shard_numel, tensor.numel, tensor.block, tensor.period or tensor.numel
        first = shard - offset % shard
        if first + shard < numel and first % period % block == 0:
            if shard % (block if period == numel or period % block == 0 else period) == 0:
                return  # All further cuts are like the first.
        for cut in range(first, numel, shard):
            if cut % period % block:
                where = f"shard boundary {(offset + cut) // shard} cuts {tensor.name} at {cut}"
                raise ValueError(
                    f"{where}, inside a block of {block}{f', counted from each {period}' if tensor.period else ''}"
                )

    @property
    def numel(self) -> int:
        """Elements of the whole buffer."""
        return self.ranks * self.shard_numel

    @property
    def padding_numel(self) -> int:
        """Elements of the buffer that belong to no tensor."""
        return self.numel - sum(tensor.numel for tensor in self.tensors)

    def padding_nbytes(self, itemsize: int) -> int:
        """Bytes of padding in a buffer of elements of ``itemsize`` bytes."""
        return self.padding_numel * itemsize

    @property
    def padding_fraction(self) -> float:
        """Padding relative to the elements of the tensors."""
        return self.padding_numel / max(1, self.numel - self.padding_numel)

    @property
    def bound_fraction(self) -> float:
        """The padding that no layout of these tensors could avoid, relative to their elements."""
        used = self.numel - self.padding_numel
        return (self.ranks * self.lower_bound - used) / max(1, used)

    @property
    def granularity_fraction(self) -> float:
        """The padding beyond what single elements in aligned shards would need, relative to the elements of the tensors."""
        used = self.numel - self.padding_numel
        smallest = max(1, -(-used // (self.ranks * self.alignment))) * self.alignment
        return self.ranks * (self.shard_numel - smallest) / max(1, used)

    def local_range(self, index: int, rank: int) -> tuple[int, int]:
        """Start and stop, in elements of the tensor, of what ``rank`` holds of tensor ``index``."""
        offset, numel = self.offsets[index], self.tensors[index].numel
        start = rank * self.shard_numel - offset
        return min(max(start, 0), numel), min(max(start + self.shard_numel, 0), numel)

    def placement(self, index: int) -> RaggedShard:
        """The RaggedShard of tensor ``index``: each rank's share in slices of the prefix that it is cut along."""
        tensor = self.tensors[index]
        if not tensor.numel:  # Without elements any units do; a single one divides every prefix.
            return RaggedShard(tensor.dims, Units([(1, 1), (0, self.ranks - 1)]))
        shards = Units([(self.shard_numel, self.ranks)])
        unit, offset = math.prod(tensor.shape[len(tensor.dims) :]), self.offsets[index]
        return RaggedShard(tensor.dims, shards.within(offset, offset + tensor.numel).scaled(1, unit))

    def gaps(self) -> tuple[tuple[int, int], ...]:
        """The padding: (start, stop) of each stretch of the buffer that belongs to no tensor."""
        gaps, position = [], 0
        for offset, tensor in sorted(zip(self.offsets, self.tensors), key=lambda pair: (pair[0], pair[1].numel)):
            if offset > position:
                gaps.append((position, offset))
            position = offset + tensor.numel
        return tuple(gaps) + (((position, self.numel),) if position < self.numel else ())

    def describe(self, name: str, itemsize: int) -> str:
        """One line for people: ranks, shard size, padding, bytes per collective."""
        return (
            f"{name}: {len(self.tensors)} tensors on {self.ranks} ranks, shard {self.shard_numel:,} elements, padding "
            f"{100 * self.padding_fraction:.2f}% (bound {100 * self.bound_fraction:.2f}%), "
            f"{self.numel * itemsize:,} bytes per collective, order {self.order}"
        )


def total_numel(tensors: Sequence[TensorSpec]) -> int:
    """Elements of all tensors."""
    return sum(tensor.numel for tensor in tensors)
