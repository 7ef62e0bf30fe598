"""Shard sizes of other schemes, to compare with: FSDP2's dim-0 chunks, and a buffer of shards of whole rows.

Both depend on shapes and blocks alone. Their padding counts as the package's: ranks * shard size - elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch_ragged.fsdp import TensorSpec

__all__ = ["RowBuffer", "fsdp2_shard"]


def fsdp2_shard(tensors: Sequence[TensorSpec], ranks: int) -> int:
    """Elements of each rank's shard where FSDP2 shards ``tensors`` over ``ranks``.

    FSDP2 cuts each tensor with ``torch.chunk`` on dimension 0 and pads every rank's piece to the size of the first:
    ceil(shape[0] / ranks) slices. It knows no blocks, so those of the tensors are not looked at. A 0-D tensor, which it
    refuses, counts as one of shape (1,).
    """
    return sum(-(-_slices(tensor) // ranks) * _slice_numel(tensor) for tensor in tensors)


@dataclass(frozen=True)
class RowBuffer:
    """A buffer whose shards are multiples of the least common multiple of the rows of all its tensors, in the way of
    Megatron-FSDP's row-only buffer.

    A *unit* of a tensor is a slice of dimension 0, or the least common multiple of that and the tensor's block if it has
    one (of that and the period, where blocks do not fill it). A *cell* is the least common multiple of all units and of the
    alignment. Shards are whole cells, so that no boundary cuts a unit of a tensor that begins on a cell. In detail:

    - A tensor of a cell or more begins on a cell. If whole cells do not fill it, its last cell has room left: the next
      such tensor whose own remainder fits there (and whose units tile it) ends on a cell, with its remainder first.
    - Tensors smaller than a cell go, largest first, where room is left, then by first fit into cells of their own.
    - A shard need never be larger than all tensors together.

    Attributes:
        offsets: of each tensor, in elements from the start of the buffer.
        cell: elements of a cell.
        cells: how many of them the buffer needs.
        numel: elements of all tensors, rounded up to the alignment.
    """

    offsets: tuple[int, ...]
    cell: int
    cells: int
    numel: int

    @classmethod
    def pack(cls, tensors: Sequence[TensorSpec], alignment: int) -> RowBuffer:
        """The buffer of ``tensors``; the same for any number of ranks."""
        cell = math.lcm(alignment, *map(_unit, tensors))
        offsets, rooms, cells = _pack_large(tensors, cell)
        small = [index for index, tensor in enumerate(tensors) if index not in offsets]
        for index in sorted(small, key=lambda index: -tensors[index].numel):
            numel = tensors[index].numel
            slot = next((slot for slot, (_, room) in enumerate(rooms) if numel <= room), None)
            if slot is None:
                slot, cells = len(rooms), cells + 1
                rooms.append(((cells - 1) * cell, cell))
            offsets[index], room = rooms[slot]
            rooms[slot] = (offsets[index] + numel, room - numel)
        total = sum(tensor.numel for tensor in tensors)
        packed = tuple(offsets[index] for index in range(len(tensors)))
        return cls(packed, cell, cells, max(1, -(-total // alignment)) * alignment)

    def shard(self, ranks: int) -> int:
        """Elements of each of ``ranks`` shards."""
        return min(max(1, -(-self.cells // ranks)) * self.cell, self.numel)


def _pack_large(tensors: Sequence[TensorSpec], cell: int) -> tuple[dict[int, int], list[tuple[int, int]], int]:
    """Offsets of the tensors of a cell or more, the rooms (start, size) left between them, and the cells they take."""
    offsets: dict[int, int] = {}
    rooms: list[tuple[int, int]] = []
    waiting = [index for index, tensor in enumerate(tensors) if tensor.numel >= cell]
    cells = 0
    while waiting:
        index = waiting.pop(0)
        whole, rest = divmod(tensors[index].numel, cell)
        offsets[index] = cells * cell
        cells += whole
        if not rest:
            continue
        start, cells = cells * cell + rest, cells + 1
        room = cell - rest
        fitting = (i for i in waiting if 0 < tensors[i].numel % cell <= room and tensors[i].numel % _unit(tensors[i]) == 0)
        partner = next(fitting, None)
        if partner is not None:
            waiting.remove(partner)
            whole, rest = divmod(tensors[partner].numel, cell)
            offsets[partner] = cells * cell - rest
            cells, room = cells + whole, room - rest
        rooms.append((start, room))
    return offsets, rooms, cells


def _slices(tensor: TensorSpec) -> int:
    return tensor.shape[0] if tensor.shape else 1


def _slice_numel(tensor: TensorSpec) -> int:
    return math.prod(tensor.shape[1:])


def _unit(tensor: TensorSpec) -> int:
    block, period = max(1, min(tensor.block, tensor.numel)), tensor.period
    if period % block:  # Blocks that begin anew in each period, and do not fill it: cuts between periods harm none.
        block = period
    return math.lcm(max(1, _slice_numel(tensor)), block)
