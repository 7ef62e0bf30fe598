"""The layout of tensors that are cut by ``Shard(0)`` and share a buffer.

A layout is integers only: it owns no memory and does not know the rank of its process.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from torch_ragged.fsdp.layout._buffer_layout import BufferLayout, TensorSpec
from torch_ragged.tensor._units import Units
from torch_ragged.tensor.placement_types import RaggedShard

__all__ = ["RowsLayout", "rows_layout"]


@dataclass(frozen=True)
class RowsLayout(BufferLayout):
    """Each shard has this rank's rows of every tensor, one tensor after the other.

    Two tensors of five rows and of two rows on three ranks; ``.`` is padding::

        | a a b | a a b | a . . |

    So a tensor is not contiguous in the buffer: :meth:`sizes` has its form there. ``offsets`` count from the start of a shard,
    and are equal in all shards. A block is a row.
    """

    def __post_init__(self) -> None:
        offsets, end = _packed(self.tensors, self.ranks)
        if self.offsets != offsets or self.shard_numel != end:
            raise ValueError(
                f"a shard of rows has its tensors at offsets {offsets} of {end} elements, got {self.offsets} of "
                f"{self.shard_numel}"
            )

    def rows(self, index: int) -> int:
        """The rows of tensor ``index`` in each shard. The last ones are padding if the number of ranks does not divide them."""
        return _rows(self.tensors[index], self.ranks)

    def sizes(self, index: int) -> tuple[int, ...]:
        """The sizes of tensor ``index`` in the buffer: the ranks, the rows of a shard, and the sizes of a row."""
        return (self.ranks, self.rows(index), *self.tensors[index].shape[1:])

    def local_range(self, index: int, rank: int) -> tuple[int, int]:
        numel, part = self.tensors[index].numel, self.rows(index) * _row(self.tensors[index])
        return min(rank * part, numel), min((rank + 1) * part, numel)

    def local_offset(self, index: int, rank: int) -> int:
        return self.offsets[index]

    def placement(self, index: int) -> RaggedShard:
        if not self.tensors[index].numel:
            return super().placement(index)
        ranges = [self.local_range(index, rank) for rank in range(self.ranks)]
        return RaggedShard((0,), Units([((stop - start) // _row(self.tensors[index]), 1) for start, stop in ranges]))

    @functools.cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """None, unless all tensors are empty: the padding of a tensor's last rows is written with the tensor."""
        return () if any(tensor.numel for tensor in self.tensors) else ((0, self.numel),)


def rows_layout(tensors: Sequence[TensorSpec], ranks: int) -> RowsLayout:
    """The layout of ``tensors``, whose blocks are rows. There is no padding between them."""
    offsets, shard = _packed(tensors, ranks)
    why = f"Shard(0) of {tensors[0].name}{f' and {len(tensors) - 1} more' if len(tensors) > 1 else ''}"
    return RowsLayout(tuple(tensors), offsets, shard, ranks, 1, lower_bound=shard, forced_by=why, order="rows")


def _packed(tensors: Sequence[TensorSpec], ranks: int) -> tuple[tuple[int, ...], int]:
    """The offset of each tensor in a shard, and the elements of a shard, which is not empty."""
    offsets, end = [], 0
    for spec in tensors:
        offsets.append(end)
        end += _rows(spec, ranks) * _row(spec)
    return tuple(offsets), max(1, end)


def _rows(spec: TensorSpec, ranks: int) -> int:
    return -(-spec.shape[0] // ranks)


def _row(spec: TensorSpec) -> int:
    """The elements of a row; 0 if the tensor is empty."""
    return spec.numel // spec.shape[0] if spec.numel else 0
