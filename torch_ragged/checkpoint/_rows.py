"""Fill a model from a checkpoint that has its weights under other names, stacked by layer, or fused in another order.

DCP's read items say where each piece of a shard lies in the files. Nothing here reads a file or communicates.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from torch_ragged.checkpoint._data import ObjectPlanner
from torch_ragged.checkpoint._errors import CheckpointError, listed
from torch_ragged.checkpoint._layouts import held_boxes
from torch_ragged.tensor._ownership import boxes_of_interval, index_at

__all__ = ["RowPlanner", "StoredRows"]


@dataclass(frozen=True)
class StoredRows:
    """Rows ``start`` to ``stop`` of a tensor of a checkpoint, or of one of the tensors that are stacked in it.

    ::

        StoredRows("model.layers.3.mlp.up_proj.weight")                 # all rows
        StoredRows("decoder.layers.mlp.linear_fc1.weight", (3,), 64)    # of layer 3, from row 64 on

    Attributes:
        name: of the tensor in the checkpoint.
        index: of the first dimensions: the layer, or the layer and the expert.
        start, stop: rows of the rest: all its dimensions but the last one count rows. Of a vector, rows are elements. ``stop``
            None is the end.
    """

    name: str
    index: tuple[int, ...] = ()
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True)
class _Source:
    """Rows of a parameter from ``first`` on; they are stored as rows of ``lead`` from ``start`` on, behind ``index``."""

    first: int
    count: int
    name: str
    index: tuple[int, ...]
    lead: tuple[int, ...]
    start: int


class RowPlanner(ObjectPlanner):
    """A planner for ``dcp.load``, which reads each tensor from the rows of others: fused, split, stacked or renamed.

    ::

        planner = RowPlanner(
            {
                "mlp.gate_up.weight": [StoredRows("mlp.gate_proj.weight"), StoredRows("mlp.up_proj.weight")],
                "norm.weight": [StoredRows("decoder.layers.input_layernorm.weight", (0,))],
            }
        )
        dcp.load(model.state_dict(), storage_reader=HuggingFaceStorageReader(path), planner=planner)

    A tensor has the rows of its list one behind the other: all its dimensions but the last one count rows. Values are cast to
    its dtype. Tensors under any placements are filled, on any number of ranks, and each rank reads what it owns. A tensor that
    is not named is read from the tensor of its name. Objects are read as data, as :func:`load` does.

    Args:
        rows: for each name in the state dict, the rows that the tensor has in the checkpoint.

    Raises:
        TypeError: a value of ``rows`` is no list of StoredRows.
        CheckpointError: from ``dcp.load``, on all ranks as DCP's CheckpointException and before anything is read: the
            checkpoint has no such tensor or rows, rows have other sizes, or they are not all rows of a tensor.
    """

    def __init__(self, rows: Mapping[str, Sequence[StoredRows]]) -> None:
        super().__init__()
        self.rows = {name: tuple(parts) for name, parts in rows.items()}
        for name, parts in self.rows.items():
            if not all(isinstance(part, StoredRows) for part in parts):
                raise TypeError(f"RowPlanner takes a list of StoredRows for {name}, got {parts!r}")
        self._targets: list[torch.Tensor] = []  # By the index of an item's destination.

    def create_local_plan(self) -> LoadPlan:
        """The plan of this rank: a read item for each stored piece of each box of rows that it owns."""
        assert self.metadata is not None
        tensors = {name: value for name, value in self.state_dict.items() if isinstance(value, torch.Tensor)}
        problems = [f"{name} is no tensor of the state dict" for name in self.rows if name not in tensors]
        sources: dict[str, list[_Source]] = {}
        for name, value in tensors.items():
            try:
                sources[name] = self._sources(name, _whole_shape(value))
            except ValueError as error:
                problems.append(f"{name} {error}")
        if problems:
            raise CheckpointError(f"the checkpoint cannot fill the state dict:{listed(problems)}")
        others = {name: value for name, value in self.state_dict.items() if name not in tensors}
        items = create_default_local_load_plan(others, self.metadata, not self.allow_partial_load).items
        self._targets.clear()
        for name, value in tensors.items():
            items += self._items(name, value, sources[name])
        return LoadPlan(items)

    def _sources(self, name: str, shape: tuple[int, ...]) -> list[_Source]:
        """Where the rows of a tensor of ``shape`` are stored. Raises ValueError if they are not."""
        assert self.metadata is not None
        lead, columns = shape[:-1] if len(shape) > 1 else shape, shape[-1:] if len(shape) > 1 else ()
        sources, first = [], 0
        for part in self.rows.get(name, (StoredRows(name),)):
            stored = self.metadata.state_dict_metadata.get(part.name)
            if not isinstance(stored, TensorStorageMetadata):
                raise ValueError(f"is read from {part.name}, which is no tensor of the checkpoint")
            rest = tuple(stored.size)[len(part.index) :]
            if len(part.index) > len(stored.size) or any(not 0 <= i < n for i, n in zip(part.index, stored.size)):
                raise ValueError(f"is read from {part.name} at {part.index}, which has shape {tuple(stored.size)}")
            inner = rest[: len(rest) - len(columns)]
            start, stop = part.start, math.prod(inner) if part.stop is None else part.stop
            if len(rest) < len(columns) or rest[len(inner) :] != columns or not 0 <= start <= stop <= math.prod(inner):
                raise ValueError(
                    f"of shape {shape} is read from rows {start} to {stop} of {part.name}, which has shape {rest}"
                    f"{f' at {part.index}' if part.index else ''} in the checkpoint"
                )
            sources.append(_Source(first, stop - start, part.name, part.index, inner, start))
            first += stop - start
        if first != math.prod(lead):
            raise ValueError(f"of shape {shape} has {math.prod(lead)} rows, and is read from {first}")
        return sources

    def _items(self, name: str, value: torch.Tensor, sources: Sequence[_Source]) -> Iterator[ReadItem]:
        assert self.metadata is not None
        has_columns = len(_whole_shape(value)) > 1
        for first, column, view in _row_runs(name, value):
            for source in sources:
                start, stop = max(first, source.first), min(first + len(view), source.first + source.count)
                if start >= stop:
                    continue
                offset = source.start - source.first
                at = start - first
                for offsets, sizes in boxes_of_interval(source.lead, start + offset, stop + offset):
                    count = math.prod(sizes)
                    where = (*source.index, *offsets, *((column,) if has_columns else ()))
                    box = (*(1,) * len(source.index), *sizes, *view.shape[1:])
                    target, at = view[at : at + count].view(box), at + count
                    yield from self._read_items(name, source.name, where, target)

    def _read_items(self, name: str, stored: str, where: tuple[int, ...], target: torch.Tensor) -> Iterator[ReadItem]:
        """Items that fill ``target`` with the stored tensor's box at ``where``."""
        assert self.metadata is not None
        entry = self.metadata.state_dict_metadata[stored]
        assert isinstance(entry, TensorStorageMetadata)
        chunk = ChunkStorageMetadata(torch.Size(where), target.shape)
        index = MetadataIndex(name, index=len(self._targets))
        self._targets.append(target)
        for item in create_read_items_for_chunk_list(stored, entry, [chunk]):
            yield dataclasses.replace(item, dest_index=index)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        assert index.index is not None
        return self._targets[index.index]


def _whole_shape(value: torch.Tensor) -> tuple[int, ...]:
    return tuple(value.size())  # Of a tensor with a layout, too, this is the shape of the whole one.


def _row_runs(name: str, value: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor]]:
    """What this rank holds of a tensor: the first row, the first column, and a view of rows that follow each other."""
    lead = _whole_shape(value)[:-1] if len(_whole_shape(value)) > 1 else _whole_shape(value)
    for box, view in held_boxes(name, value):
        outer = max(len(lead) - 1, 0)
        for at in itertools.product(*map(range, box.sizes[:outer])):
            start = (*(o + i for o, i in zip(box.offsets, at)), *box.offsets[outer : len(lead)])
            part = view[at] if lead else view.view(1)
            yield index_at(start, lead), box.offsets[-1] if len(box.offsets) > 1 else 0, part
