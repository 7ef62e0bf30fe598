"""BoxTensor: a plain local tensor together with its layout, as a value of state dicts.

Each rank describes what it holds: no mesh, no placements, no communication. The whole tensor is never made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor

from torch_ragged.tensor._checkpoint import dcp_chunks_of, shard_at, write_items_of
from torch_ragged.tensor._global_layout import GlobalLayout
from torch_ragged.tensor._ownership import Box, row_major

__all__ = ["BoxTensor", "with_layout"]


def with_layout(tensor: torch.Tensor, layout: Any) -> BoxTensor:
    """A plain local tensor together with its layout: what transfers, checkpoints and DCP take like a DTensor.

    ::

        layout = GlobalLayout((4, 3), ((1, 0),), ((0, 0),), ((2, 3),))           # rows 1 and 2 of a (4, 3) tensor
        dcp.save({"w": with_layout(local, layout)}, checkpoint_id=path)          # each rank writes its boxes
        transfer.plan({"w": with_layout(local, layout)}, engine_weights)

    Args:
        tensor: a plain tensor, such as a parameter. Its memory is shared, and the tensor itself is not changed. If it is flat,
            as that of a ragged DTensor, and boxes are not, it is viewed as the layout's ``local_shape``.
        layout: a :class:`GlobalLayout`, or an object with its four fields.

    Returns:
        an alias of the local tensor, without gradients, of the local shape. It has the four fields as attributes, as torch's
        ``CheckpointableTensor`` has. Operators on it return plain tensors.

    Raises:
        TypeError: ``tensor`` is a DTensor, which has placements, or no tensor; or the fields are not made of integers.
        ValueError: the fields are no layout, or a box is not in the local tensor.
    """
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, DTensor):
        raise TypeError(f"with_layout takes a plain local tensor, got {type(tensor).__name__}: a DTensor has placements")
    found, alias = GlobalLayout.of(layout), tensor.detach()
    shape = found.local_shape
    if alias.ndim == 1 and alias.shape != shape and alias.is_contiguous() and alias.numel() == math.prod(shape):
        alias = alias.view(shape)  # Flat, as ragged shards lie, and described as others expect it.
    found.boxes(alias.shape)
    alias = alias.as_subclass(BoxTensor)
    alias.global_layout = found
    return alias


class BoxTensor(torch.Tensor):
    """A local tensor with its layout; :func:`with_layout` makes it. It has DCP's methods of tensors with several chunks.

    Attributes:
        global_layout: the layout.
    """

    global_layout: GlobalLayout

    @property
    def global_shape(self) -> tuple[int, ...]:
        return self.global_layout.global_shape

    @property
    def global_offsets(self) -> tuple[tuple[int, ...], ...]:
        return self.global_layout.global_offsets

    @property
    def local_offsets(self) -> tuple[tuple[int, ...], ...]:
        return self.global_layout.local_offsets

    @property
    def local_sizes(self) -> tuple[tuple[int, ...], ...]:
        return self.global_layout.local_sizes

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Results are plain: of most operators, the layout would be wrong.
        return torch.Tensor.__torch_function__(func, (torch.Tensor,), args, kwargs or {})

    def size(self, dim: Any = None) -> Any:
        """Without ``dim``, the global shape, as DTensor has it: before torch 2.15, DCP compares it with the saved one."""
        return torch.Size(self.global_shape) if dim is None else self.shape[dim]

    def _boxes(self) -> tuple[Box, ...]:
        if 0 in self.global_shape:  # Of equal chunks of several ranks, one is written: the checkpoint contains the tensor.
            shape = self.global_shape
            return (Box((0,) * len(shape), shape, 0, row_major(shape)),)
        return self.global_layout.boxes(self.shape, self.stride())

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return dcp_chunks_of(self._boxes())

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        return write_items_of(fqn, self._boxes(), self.detach(), torch.Size(self.global_shape))

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return shard_at(index, self._boxes(), self.detach(), self.global_shape)

    def __deepcopy__(self, memo: dict[int, Any]) -> BoxTensor:
        return with_layout(self.detach().clone(), self.global_layout)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return with_layout, (self.detach(), self.global_layout)
