"""``owned_boxes``: what a rank holds of a tensor, for programs that read or write shards themselves. No communication."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional, Union

from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from torch_ragged.tensor._cut_placement import cuts_of
from torch_ragged.tensor._local_tensor import coordinate_of
from torch_ragged.tensor._ownership import Box, Owned, owned
from torch_ragged.tensor.placement_types import normalize_placements

__all__ = ["owned_boxes", "owned_part"]


def owned_boxes(
    tensor: Union[DTensor, Sequence[int]],
    mesh_shape: Optional[Sequence[int]] = None,
    placements: Optional[Sequence[Placement]] = None,
    coordinate: Optional[Sequence[int]] = None,
) -> tuple[Box, ...]:
    """What a rank holds of a tensor, as boxes of the whole tensor, each with its offset and strides in the local tensor.

    ::

        owned_boxes((4, 6), (2,), [RaggedShard((0, 1), (4, 20))], (0,))        # the first 4 elements: part of a row
        (Box(offsets=(0, 0), sizes=(1, 4), local_offset=0, local_strides=(4, 1)),)

        for box in owned_boxes(param):                                          # read this rank's part of a file
            part = param.to_local().view(-1).as_strided(box.sizes, box.local_strides, box.local_offset)
            part.copy_(whole[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes))])

    Args:
        tensor: a DTensor under any placements; or the shape of one, with the other arguments. The second form needs neither a
            process group nor a mesh, and answers for any rank.
        mesh_shape: the sizes of the mesh dimensions.
        placements: one per mesh dimension.
        coordinate: of the rank in the mesh.

    Returns:
        boxes that contain all elements of the local tensor, in the order of its storage. Empty if the rank holds none, or is
        not in the mesh. Offsets and strides count elements of a contiguous local tensor. Under Partial, a box holds values
        that are still to be reduced.

    Raises:
        TypeError: some, but not all, arguments of the second form are given.
        ValueError: the placements have no meaning together, or the coordinate is not in the mesh.
    """
    part = owned_part(tensor, mesh_shape, placements, coordinate)
    return () if part is None else tuple(box for box in part.boxes if box.numel)


def owned_part(
    tensor: Union[DTensor, Sequence[int]],
    mesh_shape: Optional[Sequence[int]] = None,
    placements: Optional[Sequence[Placement]] = None,
    coordinate: Optional[Sequence[int]] = None,
) -> Optional[Owned]:
    """As :func:`owned_boxes`, with the shape of the local tensor; None if the rank is not in the mesh."""
    rest = (mesh_shape, placements, coordinate)
    if isinstance(tensor, DTensor):
        if any(each is not None for each in rest):
            raise TypeError("owned_boxes(dtensor) takes no mesh_shape, placements or coordinate: a DTensor has its own")
        mesh_shape, placements = tuple(tensor.device_mesh.shape), tensor.placements
        coordinate, shape = coordinate_of(tensor.device_mesh), tuple(tensor.shape)
        if coordinate is None:
            return None
    else:
        shape = tuple(tensor)
    if mesh_shape is None or placements is None or coordinate is None:
        raise TypeError("owned_boxes(shape) needs mesh_shape, placements and coordinate, too")
    mesh_shape, coordinate = tuple(mesh_shape), tuple(coordinate)
    if len(coordinate) != len(mesh_shape) or any(not 0 <= i < size for i, size in zip(coordinate, mesh_shape)):
        raise ValueError(f"owned_boxes: the coordinate {coordinate} is not in a mesh of shape {mesh_shape}")
    cuts = cuts_of(normalize_placements(tuple(placements), shape, mesh_shape))
    return owned(shape, mesh_shape, cuts, coordinate)
