"""The layout of a group of tensors in one buffer of equal shards: one tensor after the other, or the rows of all in each shard.

A layout is integers only: it owns no memory and does not know the rank of its process.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from torch_ragged.granularity import TensorSpec
from torch_ragged.tensor._units import Units
from torch_ragged.tensor.placement_types import RaggedShard

__all__ = ["BufferLayout", "RowsLayout", "TensorSpec", "rows_layout"]

_numel_of = operator.attrgetter("numel")


@dataclass(frozen=True)
class BufferLayout:
    """The offset of each tensor in a buffer of ``ranks`` shards, with ``shard_numel`` elements each.

    Three tensors on three ranks; ``.`` is padding::

        | a a a a b b | b b b b c c | c c c c c . |
         `- rank 0 --´ `- rank 1 --´ `- rank 2 --´

    Attributes:
        tensors: in the order given by the user.
        offsets: the offset of each tensor, in elements from the start of the buffer.
        shard_numel: elements of each rank's shard (S).
        ranks: the number of shards.
        alignment: ``shard_numel`` is a multiple of it.
        lower_bound: no layout of these tensors has a smaller ``shard_numel``.
        forced_by: the reason for the lower bound, in words.
        order: the name of the order in which the planner laid out the tensors.

    Raises:
        ValueError: tensors overlap or extend beyond the buffer, a shard boundary is inside a block, or ``shard_numel`` is not
            a positive multiple of ``alignment``.
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
            raise ValueError(f"shard_numel must be a positive multiple of alignment {self.alignment}, got {self.shard_numel}")
        if len(self.offsets) != len(self.tensors):
            raise ValueError(f"each tensor needs one offset, got {len(self.tensors)} tensors and {len(self.offsets)} offsets")
        end, previous, shard = 0, "the start of the buffer", self.shard_numel
        for offset, numel, index in sorted(zip(self.offsets, map(_numel_of, self.tensors), range(len(self.tensors)))):
            tensor = self.tensors[index]
            if offset < end:
                raise ValueError(f"{tensor.name} at offset {offset} overlaps {previous}, which ends at {end}")
            end, previous = offset + numel, tensor.name
            if shard - offset % shard < numel and tensor.block > 1:
                self._check_cuts(offset, tensor)
        if end > self.numel:
            raise ValueError(f"{previous} ends at {end}, beyond the buffer of {self.numel} elements")

    def _check_cuts(self, offset: int, tensor: TensorSpec) -> None:
        """Raise if a shard boundary is inside a block of ``tensor``."""
        shard = self.shard_numel
        if tensor.segments:
            for start, stop, block in tensor.runs:
                # The first boundary in this run. If shards have whole blocks, all other boundaries in it are like the first.
                first = start + (-(offset + start)) % shard
                for cut in range(first, min(stop, first + shard + 1), shard):
                    if (cut - start) % block:
                        raise ValueError(
                            f"shard boundary {(offset + cut) // shard} cuts {tensor.name} at element {cut}, inside a block of "
                            f"{block} elements (blocks are counted from element {start} to {stop} there)"
                        )
            return
        numel, block, period = tensor.numel, tensor.block, tensor.period or tensor.numel
        first = shard - offset % shard
        if first + shard < numel and first % period % block == 0:
            if shard % (block if period == numel or period % block == 0 else period) == 0:
                return  # The first cut is between blocks and a shard has whole blocks: all other cuts are between blocks too.
        for cut in range(first, numel, shard):
            if cut % period % block:
                anew = f" (blocks are counted anew every {period} elements)" if tensor.period else ""
                raise ValueError(
                    f"shard boundary {(offset + cut) // shard} cuts {tensor.name} at element {cut}, inside a block of {block} "
                    f"elements{anew}"
                )

    @functools.cached_property  # Asked of each buffer, as ``gaps`` is.
    def edges(self) -> Sequence[int]:
        """Where each rank's shard begins in the buffer, and, last, the end of the buffer."""
        return range(0, (self.ranks + 1) * self.shard_numel, self.shard_numel)

    @functools.cached_property
    def numel(self) -> int:
        """Elements of the whole buffer."""
        return self.edges[-1]

    @property
    def _smallest(self) -> int:
        """Elements of the smallest buffer with shards of these proportions. All buffers are multiples of it."""
        return self.ranks * self.alignment

    @property
    def padding_numel(self) -> int:
        """Elements of the buffer that belong to no tensor."""
        return self.numel - self._used

    @property
    def _used(self) -> int:
        return sum(map(_numel_of, self.tensors))

    @property
    def padding_fraction(self) -> float:
        """Padding relative to the elements of the tensors."""
        return self.padding_numel / max(1, self._used)

    @property
    def bound_fraction(self) -> float:
        """The padding at the lower bound, which no layout of these tensors avoids, relative to their elements."""
        used = self._used
        return (self.lower_bound * self.numel // self.shard_numel - used) / max(1, used)

    @property
    def granularity_fraction(self) -> float:
        """The padding beyond that of single elements in aligned shards, relative to the elements of the tensors."""
        used, smallest = self._used, self._smallest
        return (self.numel - max(1, -(-used // smallest)) * smallest) / max(1, used)

    def shard_range(self, rank: int) -> tuple[int, int]:
        """The interval of the buffer that is the shard of ``rank``: start and stop, in elements."""
        return self.edges[rank], self.edges[rank + 1]

    def local_range(self, index: int, rank: int) -> tuple[int, int]:
        """The part of tensor ``index`` that ``rank`` holds: start and stop, in elements of the tensor."""
        offset, numel = self.offsets[index], self.tensors[index].numel
        return min(max(self.edges[rank] - offset, 0), numel), min(max(self.edges[rank + 1] - offset, 0), numel)

    def interval(self, index: int, rank: int) -> tuple[int, int]:
        """Where the part of tensor ``index`` that ``rank`` holds begins and ends in its shard; (0, 0) if there is none."""
        start, stop = self.local_range(index, rank)
        begin = max(self.offsets[index] - self.edges[rank], 0)
        return (begin, begin + stop - start) if stop > start else (0, 0)

    def placement(self, index: int) -> RaggedShard:
        """The RaggedShard of tensor ``index``: the number of slices along the sharded dimensions that each rank holds."""
        tensor = self.tensors[index]
        if not tensor.numel:  # Any units describe an empty tensor. A single unit divides the slices of every tensor.
            return RaggedShard(tensor.dims, Units([(1, 1), (0, self.ranks - 1)]))
        unit, shard, start = math.prod(tensor.shape[len(tensor.dims) :]), self.shard_numel, self.offsets[index]
        stop = start + tensor.numel
        first, last = start // shard, (stop - 1) // shard  # Ranks.
        in_first, in_last = min(stop, (first + 1) * shard) - start, stop - last * shard
        # Runs of no ranks are dropped: most tensors are on few of many ranks.
        runs = [(0, first), (in_first // unit, 1), (shard // unit, last - first - 1), (in_last // unit, min(last - first, 1))]
        return RaggedShard(tensor.dims, Units([*runs, (0, self.ranks - last - 1)]))

    @functools.cached_property
    def free_boundaries(self) -> tuple[int, ...]:
        """The shards, 0 always among them, at whose start no tensor is cut: there the buffer may begin, too."""
        crossed = [0] * (self.ranks + 1)
        for offset, tensor in zip(self.offsets, self.tensors):
            first, stop = offset // self.shard_numel + 1, -(-(offset + tensor.numel) // self.shard_numel)
            if first < stop:
                crossed[first] += 1
                crossed[stop] -= 1
        return tuple(shard for shard, count in enumerate(itertools.accumulate(crossed[:-1])) if not count)

    def rotated(self, shard: int) -> BufferLayout:
        """The same layout, beginning with ``shard``, one of :attr:`free_boundaries`: its contents go to rank 0."""
        offsets = [(offset - shard * self.shard_numel) % self.numel for offset in self.offsets]
        return dataclasses.replace(self, offsets=tuple(offsets))

    def packed(self, count: int) -> BufferLayout:
        """The layout of the same buffer with ``count`` elements in each byte, in bytes. Whole blocks then are whole bytes.

        Raises:
            ValueError: an offset, a block or a last dimension is no whole number of bytes.
        """
        numbers = [*self.offsets, self.shard_numel, self.alignment, self.lower_bound]
        if any(number % count for number in numbers):
            raise ValueError(
                f"offsets and the alignment {self.alignment} must be multiples of {count} elements: {self.offsets}"
            )
        offsets = tuple(offset // count for offset in self.offsets)
        sizes = {name: getattr(self, name) // count for name in ("shard_numel", "alignment", "lower_bound")}
        return dataclasses.replace(self, tensors=tuple(t.packed(count) for t in self.tensors), offsets=offsets, **sizes)

    @functools.cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """The padding: (start, stop) of each interval of the buffer that belongs to no tensor."""
        gaps, end = [], 0
        for offset, numel in sorted(zip(self.offsets, map(_numel_of, self.tensors))):
            if offset > end:
                gaps.append((end, offset))
            end = offset + numel
        return tuple(gaps) + (((end, self.numel),) if end < self.numel else ())

    def describe(self, name: str, itemsize: int) -> str:
        """One line of text: ranks, shard size, padding, bytes per collective."""
        return (
            f"{name}: {len(self.tensors)} tensors on {self.ranks} ranks, shard {self.shard_numel:,} elements, padding "
            f"{100 * self.padding_fraction:.2f}% (lower bound {100 * self.bound_fraction:.2f}%), "
            f"{self.numel * itemsize:,} bytes per collective, order {self.order}"
        )


@dataclass(frozen=True)
class RowsLayout(BufferLayout):
    """Each shard has this rank's rows of every tensor, one tensor after the other.

    Two tensors of five rows and of two rows on three ranks; ``.`` is padding::

        | a a b | a a b | a . . |

    So a tensor is not contiguous in the buffer: :meth:`sizes` has its form there. ``offsets`` count from the start of a shard,
    and are equal in all shards. A block is a row.
    """

    def __post_init__(self) -> None:
        offsets, end = _packed_offsets(self.tensors, self.ranks)
        if self.offsets != offsets or self.shard_numel != end:
            raise ValueError(
                f"a shard of rows has its tensors at offsets {offsets} of {end} elements, got {self.offsets} of "
                f"{self.shard_numel}"
            )

    def rows(self, index: int) -> int:
        """The rows of tensor ``index`` in each shard. The last ones are padding if the number of ranks does not divide them."""
        return _rows_per_shard(self.tensors[index], self.ranks)[0]

    def sizes(self, index: int) -> tuple[int, ...]:
        """The sizes of tensor ``index`` in the buffer: the ranks, the rows of a shard, and the sizes of a row."""
        return (self.ranks, self.rows(index), *self.tensors[index].shape[1:])

    def local_range(self, index: int, rank: int) -> tuple[int, int]:
        numel, part = self.tensors[index].numel, math.prod(_rows_per_shard(self.tensors[index], self.ranks))
        return min(rank * part, numel), min((rank + 1) * part, numel)

    def interval(self, index: int, rank: int) -> tuple[int, int]:
        (start, stop), begin = self.local_range(index, rank), self.offsets[index]
        return (begin, begin + stop - start) if stop > start else (0, 0)

    def placement(self, index: int) -> RaggedShard:
        if not self.tensors[index].numel:
            return super().placement(index)
        _, row = _rows_per_shard(self.tensors[index], self.ranks)
        ranges = [self.local_range(index, rank) for rank in range(self.ranks)]
        return RaggedShard((0,), Units([((stop - start) // row, 1) for start, stop in ranges]))

    @functools.cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """None, unless all tensors are empty: the padding of a tensor's last rows is written with the tensor."""
        return () if any(tensor.numel for tensor in self.tensors) else ((0, self.numel),)


def rows_layout(tensors: Sequence[TensorSpec], ranks: int) -> RowsLayout:
    """The layout of ``tensors``, whose blocks are rows. There is no padding between them."""
    offsets, shard = _packed_offsets(tensors, ranks)
    why = f"Shard(0) of {tensors[0].name}{f' and {len(tensors) - 1} more' if len(tensors) > 1 else ''}"
    return RowsLayout(tuple(tensors), offsets, shard, ranks, 1, lower_bound=shard, forced_by=why, order="rows")


def _packed_offsets(tensors: Sequence[TensorSpec], ranks: int) -> tuple[tuple[int, ...], int]:
    """The offset of each tensor in a shard, and the elements of a shard, which is not empty."""
    offsets, end = [], 0
    for spec in tensors:
        offsets.append(end)
        end += math.prod(_rows_per_shard(spec, ranks))
    return tuple(offsets), max(1, end)


def _rows_per_shard(spec: TensorSpec, ranks: int) -> tuple[int, int]:
    """The rows of a tensor in each shard, and the elements of a row; 0 if the tensor is empty."""
    return -(-spec.shape[0] // ranks), spec.numel // spec.shape[0] if spec.numel else 0
