"""Checkpoint chunks of ragged DTensors, from ownership alone: no communication, no gather, no copy of the shard.

A run that cuts rows becomes at most ``2 * ndim - 1`` boxes (per piece, for a strided one); each is a view of the flat local
tensor, contiguous but beside a _StridedShard, which torch.distributed.checkpoint (DCP) writes from and reads into.
"""

from __future__ import annotations

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from torch_ragged._ownership import Box, owned, row_major
from torch_ragged.placement_types import cuts_of

__all__ = ["create_chunk_list", "create_write_items", "get_tensor_shard", "owned_boxes"]


def owned_boxes(tensor: DTensor) -> tuple[Box, ...]:
    """The boxes of ``tensor`` that this rank holds, in the order of its local tensor.

    A tensor without elements has one empty box, at the first rank, so that a checkpoint does not forget it.
    """
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ()
    if tensor.numel() == 0:
        first = not any(coordinate)
        return (Box((0,) * tensor.ndim, tuple(tensor.shape), 0, row_major(tensor.shape)),) if first else ()
    cuts = cuts_of(tensor.placements)
    return owned(tuple(tensor.shape), tuple(mesh.shape), cuts, tuple(coordinate)).boxes


def create_chunk_list(tensor: DTensor) -> list[ChunkStorageMetadata]:
    """DCP's description of what this rank holds: offsets and sizes of each box."""
    return [ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes)) for box in owned_boxes(tensor)]


def create_write_items(fqn: str, tensor: DTensor) -> list[WriteItem]:
    """One DCP write item per box."""
    properties = TensorProperties.create_from_tensor(tensor.detach().to_local())
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=tensor.size()),
        )
        for chunk in create_chunk_list(tensor)
    ]


def get_tensor_shard(tensor: DTensor, index: MetadataIndex) -> torch.Tensor:
    """The box at ``index.offset`` as a view of the local tensor.

    Raises:
        ValueError: this rank holds no box there.
    """
    local = tensor.detach().to_local()
    for box in owned_boxes(tensor):
        if index.offset is None or tuple(index.offset) == box.offsets:
            return local.as_strided(box.sizes, box.local_strides, local.storage_offset() + box.local_offset)
    raise ValueError(f"{index.fqn}: this rank holds no chunk at offset {index.offset} of {tuple(tensor.shape)}")
