"""Shard sizes of two other schemes, to compare with: FSDP2's chunks of dimension 0, and a buffer of whole rows.

They must not import these schemes: they depend on shapes and blocks only. Padding is ranks * shard size - elements, as for this
package.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch_ragged.fsdp import TensorSpec

__all__ = ["RowBuffer", "fsdp2_shard"]


def fsdp2_shard(tensors: Sequence[TensorSpec], ranks: int) -> int:
    """Elements of each rank's shard if FSDP2 shards ``tensors`` over ``ranks``.

    FSDP2 cuts each tensor with ``torch.chunk`` on dimension 0, and pads the piece of each rank to the size of the first piece:
    ceil(shape[0] / ranks) slices. FSDP2 has no blocks, so the blocks of ``tensors`` have no effect. FSDP2 refuses a 0-D tensor;
    here, it counts as a tensor of shape (1,).
    """
    return sum(-(-_slice_count(tensor) // ranks) * _slice_numel(tensor) for tensor in tensors)


@dataclass(frozen=True)
class RowBuffer:
    """A buffer whose shards are multiples of the least common multiple (LCM) of all tensors' rows, as in Megatron-FSDP.

    A *unit* of a tensor is a slice of dimension 0. If the tensor has a block, the unit is the LCM of slice and block, or the
    LCM of slice and period if blocks do not fill the period. A *cell* is the LCM of all units and the alignment. Shards are
    whole cells. So if a tensor begins at a cell's start, no shard boundary cuts its units.

    - A tensor of at least one cell begins at a cell's start. If it does not fill its last cell, the rest of this cell is free.
      The next such tensor may use it: if its own remainder fits there and its units tile it, its remainder goes there first and
      the tensor ends at a cell's end.
    - Smaller tensors go to free rests of cells, the largest tensor first. If none has room, they go to new cells, by first fit.
    - A shard is never larger than all tensors together.

    Attributes:
        offsets: the offset of each tensor, in elements from the start of the buffer.
        cell: the elements of a cell.
        cells: the number of cells that the buffer needs.
        numel: the elements of all tensors, rounded up to the alignment.
    """

    offsets: tuple[int, ...]
    cell: int
    cells: int
    numel: int

    @classmethod
    def pack(cls, tensors: Sequence[TensorSpec], alignment: int) -> RowBuffer:
        """The buffer of ``tensors``. It does not depend on the number of ranks."""
        cell = math.lcm(alignment, *map(_unit, tensors))
        offsets, rooms, cells = _pack_large(tensors, cell)
        small = [index for index, tensor in enumerate(tensors) if index not in offsets]
        for index in sorted(small, key=lambda index: -tensors[index].numel):
            numel = tensors[index].numel
            found = next((number for number, (_, room) in enumerate(rooms) if numel <= room), None)
            if found is None:
                found, cells = len(rooms), cells + 1
                rooms.append(((cells - 1) * cell, cell))
            offsets[index], room = rooms[found]
            rooms[found] = (offsets[index] + numel, room - numel)
        total = sum(tensor.numel for tensor in tensors)
        packed = tuple(offsets[index] for index in range(len(tensors)))
        return cls(packed, cell, cells, max(1, -(-total // alignment)) * alignment)

    def shard(self, ranks: int) -> int:
        """Elements of each of ``ranks`` shards."""
        return min(max(1, -(-self.cells // ranks)) * self.cell, self.numel)


def _pack_large(tensors: Sequence[TensorSpec], cell: int) -> tuple[dict[int, int], list[tuple[int, int]], int]:
    """Lay out the tensors of at least one cell: their offsets, the free rests of cells (start, size), the number of cells."""
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


def _slice_count(tensor: TensorSpec) -> int:
    return tensor.shape[0] if tensor.shape else 1


def _slice_numel(tensor: TensorSpec) -> int:
    return math.prod(tensor.shape[1:])


def _unit(tensor: TensorSpec) -> int:
    block, period = max(1, min(tensor.block, tensor.numel)), tensor.period
    if tensor.segments:  # The multiples of all blocks, if segments start at them.
        block = math.lcm(*[block for _, _, block in tensor.runs])
        block = tensor.numel if any(start % block for start, _, block in tensor.runs) else block
        period = 0
    if period % block:  # Blocks are counted anew in each period and do not fill it: only cuts between periods cut no block.
        block = period
    return math.lcm(max(1, _slice_numel(tensor)), block)
