"""A flat tensor scaled, cast and written or added to another: one read of each, one write, rounded once."""

from __future__ import annotations

import torch

from torch_ragged._kernels._choice import device_of, runs_triton

__all__ = ["scaled_copy_"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def scaled_copy_(
    out: torch.Tensor, source: torch.Tensor, scale: float = 1.0, accumulate: bool = False, non_blocking: bool = False
) -> torch.Tensor:
    """``out = scale * source``, or ``out += scale * source``, computed in float32 and rounded to the dtype of ``out``.

    On CUDA one Triton kernel, bitwise equal to the torch operations that run elsewhere. float32, bfloat16 and float16 have
    it; other dtypes, devices that differ and tensors that are not contiguous go torch's way.

    Args:
        out, source: of one shape and any dtypes; ``source`` may be on another device.
        scale: applied before the sum, its product rounded to float32.
        accumulate: add to what ``out`` holds.
        non_blocking: as of ``copy_``, where the devices differ.

    Returns:
        ``out``.

    Raises:
        ValueError: the shapes differ.
    """
    if out.shape != source.shape:
        raise ValueError(f"scaled_copy_ takes tensors of one shape, got {tuple(source.shape)} into {tuple(out.shape)}")
    is_ours = out.dtype in _DTYPES and source.dtype in _DTYPES and out.device == source.device
    if is_ours and runs_triton(out) and out.is_contiguous() and source.is_contiguous():
        if out.numel():
            from torch_ragged._kernels import _triton_casts as kernels

            with device_of(out):
                kernels.scaled_copy_(out, source, scale, accumulate)
        return out
    if scale != 1.0:
        source = source.to(torch.promote_types(source.dtype, torch.float32)) * scale
    return out.add_(source) if accumulate else out.copy_(source, non_blocking=non_blocking)
