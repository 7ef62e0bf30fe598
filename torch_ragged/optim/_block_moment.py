"""A moment in 8 bits: codes of a byte per element and one float32 scale per block, in the places of the parameter.

Numerics do not depend on the number of ranks: blocks follow from the global shape, and no block is cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torch_ragged.optim._base import local, local_shape_placed, zeros_placed
from torch_ragged.optim._blocks import BlockLayout, BlockPolicy, Region
from torch_ragged.optim._quantize import code_book, dequantize, quantize

__all__ = [
    "blocks_of",
    "decoded",
    "encode_to",
    "matrices_of",
    "moment_nbytes",
    "moment_shapes",
    "update_moment",
    "zero_moment",
]

_CODE = "dynamic"


def moment_shapes(name: str, shape: tuple[int, ...], policy: BlockPolicy) -> dict[str, tuple[int, ...]]:
    """The global shapes of the two states of a moment, by name."""
    return {f"{name}_codes": shape, f"{name}_scales": policy.grid(shape)}


def zero_moment(name: str, param: torch.Tensor, layout: BlockLayout, policy: BlockPolicy) -> dict[str, torch.Tensor]:
    """The two states of a moment of zeros: the codes have the placements of ``param``, the scales those of its blocks."""
    shape = tuple(param.shape)
    codes, scales = moment_shapes(name, shape, policy)
    if isinstance(param, DTensor):
        mesh, grid = param.device_mesh, policy.grid(shape)
        return {
            codes: zeros_placed(shape, torch.uint8, mesh, param.placements, param),
            scales: zeros_placed(grid, torch.float32, mesh, layout.grid, param),
        }
    return {
        codes: torch.zeros(shape, dtype=torch.uint8, device=param.device),
        scales: torch.zeros(policy.grid(shape), dtype=torch.float32, device=param.device),
    }


def moment_nbytes(param: torch.Tensor, layout: BlockLayout, policy: BlockPolicy) -> int:
    """The bytes of this rank's codes and scales."""
    grid = policy.grid(tuple(param.shape))
    if isinstance(param, DTensor):
        grid = local_shape_placed(grid, param.device_mesh, layout.grid)
    return local(param).numel() + 4 * math.prod(grid)


def update_moment(
    name: str,
    state: dict[str, Any],
    layout: BlockLayout,
    policy: BlockPolicy,
    gradient: torch.Tensor,
    update: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Decode a moment, change it, and encode it again, block by block.

    Args:
        gradient: the local gradient.
        update: called with a part of the moment, to change in place, and the same part of the gradient, both float32; it must
            round element by element. It may see zeros beyond the edges of a matrix, and must leave zeros of both zero.

    Returns:
        what ``update`` returns, in float32, of the shape of ``gradient``. It is computed with the moment before it is rounded.
    """
    # Memory: a float32 tensor of the size of the gradient. Moments are in float32 for one region at a time.
    flat, block = gradient.contiguous().view(-1), policy.block
    codes, scales = (local(state[f"{name}_{part}"]).view(-1) for part in ("codes", "scales"))
    result = torch.empty(len(flat), dtype=torch.float32, device=flat.device)
    # No block is cut between ranks. So the largest magnitude of a block here is that of the whole tensor, without
    # communication.
    for region in layout.regions:
        moment = decoded(region, block, codes, scales, _CODE, True)
        change = update(moment, blocks_of(region, flat, block).float())
        encode_to(codes, scales, region, moment, _CODE, True)
        region.of(result).copy_(matrices_of(region, change))
    return result.view(gradient.shape)


def blocks_of(region: Region, flat: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The region of a local tensor as (matrices, blocks, height, blocks, width), with zeros beyond the edges of a matrix."""
    (_, rows, columns), (bands, across), (height, width) = region.sizes, region.grid[1:], block
    padding = (0, across * width - columns, 0, bands * height - rows)
    matrices = torch.nn.functional.pad(region.of(flat), padding) if any(padding) else region.of(flat)
    return matrices.view(-1, bands, height, across, width)


def matrices_of(region: Region, blocks: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`blocks_of`: (matrices, rows, columns)."""
    count, bands, height, across, width = blocks.shape
    return blocks.reshape(count, bands * height, across * width)[:, : region.sizes[1], : region.sizes[2]]


def decoded(
    region: Region, block: tuple[int, int], codes: torch.Tensor, scales: torch.Tensor, code: str, signed: bool
) -> torch.Tensor:
    """The float32 moment of a region, as :func:`blocks_of` has it, of flat local ``codes`` and ``scales``."""
    moment = dequantize(blocks_of(region, codes, block), _region_scales(region, scales), code_book(code, signed, codes.device))
    count, bands, height, across, width = moment.shape
    matrices = moment.view(count, bands * height, across * width)
    matrices[:, region.sizes[1] :] = 0.0  # Padding has code 0, which does not stand for 0.0.
    matrices[:, :, region.sizes[2] :] = 0.0
    return moment


def encode_to(codes: torch.Tensor, scales: torch.Tensor, region: Region, moment: torch.Tensor, code: str, signed: bool) -> None:
    """The inverse of :func:`decoded`: writes the codes and the scales of a region."""
    quantized, maxima = quantize(moment, (2, 4), code, signed)
    region.of(codes).copy_(matrices_of(region, quantized))
    region.scales(scales).copy_(maxima.view(region.grid))


def _region_scales(region: Region, scales: torch.Tensor) -> torch.Tensor:
    return region.scales(scales).view(-1, region.grid[1], 1, region.grid[2], 1)
