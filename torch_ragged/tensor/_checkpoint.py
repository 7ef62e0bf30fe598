"""Checkpoint chunks of ragged DTensors for torch.distributed.checkpoint (DCP).

Chunks follow from ownership alone: nothing here communicates or copies the shard. A run that cuts rows becomes at most
``2 * ndim - 1`` boxes; a strided run becomes at most so many per interval. Each box is a view of the flat local tensor, and DCP
writes from it and reads into it. The view is contiguous, except if the tensor also has a _StridedShard.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from torch_ragged.tensor._api import ragged_extension
from torch_ragged.tensor._cut_placement import cuts_of
from torch_ragged.tensor._local_tensor import coordinate_of
from torch_ragged.tensor._ownership import Box, owned, row_major
from torch_ragged.tensor._placement_extension import CheckpointExtension

__all__ = ["RaggedCheckpoint", "chunk_boxes", "dcp_chunks_of", "own_storage", "shard_at", "write_items_of"]


def chunk_boxes(tensor: DTensor) -> tuple[Box, ...]:
    """The boxes of ``tensor`` that this rank holds, in the order of its local tensor.

    If the tensor has no elements, the first rank of the mesh gets one empty box, so that a checkpoint contains the tensor.
    """
    mesh = tensor.device_mesh
    coordinate = coordinate_of(mesh)
    if coordinate is None:
        return ()
    if tensor.numel() == 0:
        first = not any(coordinate)
        return (Box((0,) * tensor.ndim, tuple(tensor.shape), 0, row_major(tensor.shape)),) if first else ()
    cuts = cuts_of(tensor.placements)
    boxes = owned(tuple(tensor.shape), tuple(mesh.shape), cuts, coordinate).boxes
    return tuple(box for box in boxes if box.numel)  # An empty chunk would have the offset, so the key, of another one.


class RaggedCheckpoint(CheckpointExtension):
    """DCP's protocol for ragged DTensors: one chunk per box, each a view of the local tensor."""

    def create_chunk_list(self, tensor: DTensor) -> list[ChunkStorageMetadata]:
        return dcp_chunks_of(chunk_boxes(tensor))

    def create_write_items(self, fqn: str, tensor: DTensor) -> list[WriteItem]:
        return write_items_of(fqn, chunk_boxes(tensor), tensor.detach().to_local(), tensor.size())  # type: ignore[attr-defined]

    def get_tensor_shard(self, tensor: DTensor, index: MetadataIndex) -> torch.Tensor:
        """The view of the local tensor for the chunk ``index``.

        Raises:
            ValueError: this rank holds no box at ``index.offset``.
        """
        return shard_at(index, chunk_boxes(tensor), tensor.detach().to_local(), tensor.shape)  # type: ignore[attr-defined]

    def from_full(self, tensor: DTensor, full: torch.Tensor, device: torch.device) -> DTensor:
        if tensor.is_meta:
            tensor = torch.empty_like(tensor, device=device)  # type: ignore[assignment]
        local = tensor.detach().to_local()  # type: ignore[attr-defined]
        for box in chunk_boxes(tensor):
            part = full[tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes))]
            _view_of_box(local, box).copy_(part)
        return tensor


def dcp_chunks_of(boxes: Sequence[Box]) -> list[ChunkStorageMetadata]:
    """DCP's chunk of each box."""
    return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in boxes]


def write_items_of(fqn: str, boxes: Sequence[Box], local: torch.Tensor, size: torch.Size) -> list[WriteItem]:
    """DCP's write item of each box of a tensor of global ``size``. ``local`` is the local tensor without gradients."""
    properties = TensorProperties.create_from_tensor(local)
    if hasattr(properties, "strides"):  # Since torch 2.15. Those of a local tensor mean nothing for the whole one.
        properties.strides = None
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=size),
        )
        for chunk in dcp_chunks_of(boxes)
    ]


def shard_at(index: MetadataIndex, boxes: Sequence[Box], local: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The view of ``local`` for the box at ``index.offset``; of the first box if there is no offset.

    Raises:
        ValueError: no box is there.
    """
    for box in boxes:
        if index.offset is None or tuple(index.offset) == box.offsets:
            return own_storage(_view_of_box(local, box))
    raise ValueError(f"{index.fqn}: this rank holds no chunk at offset {index.offset} of {tuple(shape)}")


def _view_of_box(local: torch.Tensor, box: Box) -> torch.Tensor:
    if local.dim() != 1 or box.local_strides != row_major(box.sizes):  # Not flat: all cuts are chunks.
        return local.as_strided(box.sizes, box.local_strides, local.storage_offset() + box.local_offset)
    # Tensor types, such as quantized optimizer states, have view(), but not as_strided(), and may slice along blocks only.
    numel = math.prod(box.sizes)
    try:
        part = local if numel == local.numel() else local[box.local_offset : box.local_offset + numel]
        return part.view(box.sizes)
    except (NotImplementedError, ValueError) as error:
        raise TypeError(
            f"{type(local).__name__}, the type of a local tensor of {local.numel()} elements, has no view of its elements from "
            f"{box.local_offset} on as {box.sizes} ({error}): keep its rows and blocks whole, by orig_param_policy"
        ) from error


def own_storage(view: torch.Tensor) -> torch.Tensor:
    """A tensor on the memory of ``view`` whose storage has exactly these bytes. DCP copies a tensor that has a larger storage.

    If ``view`` is not on the CPU or not contiguous, it is returned unchanged. Autograd does not see writes through the result:
    they do not increase the version counter of ``view``.
    """
    is_plain = type(view) is torch.Tensor and view.device.type == "cpu" and view.is_contiguous()
    if not is_plain or not view.nbytes or (storage := view.untyped_storage()).nbytes() == view.nbytes:
        return view
    start = view.storage_offset() * view.element_size()
    part = storage[start : start + view.nbytes]
    return torch.empty(0, dtype=view.dtype, device="cpu").set_(part, 0, view.shape, view.stride())


ragged_extension.checkpoint = RaggedCheckpoint()
