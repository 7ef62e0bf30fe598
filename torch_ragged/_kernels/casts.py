"""Scale and cast a tensor, and copy it to another tensor or add it: each element is read once, written once, rounded once.

Never allocates on CUDA if the Triton kernel runs.
"""

from __future__ import annotations

import torch

from torch_ragged._kernels._choice import on_device_of, runs_triton

__all__ = ["scaled_copy_"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def scaled_copy_(
    out: torch.Tensor, source: torch.Tensor, scale: float = 1.0, accumulate: bool = False, non_blocking: bool = False
) -> torch.Tensor:
    """``out = scale * source``, or ``out += scale * source``, computed in float32 and rounded to the dtype of ``out``.

    On CUDA, one Triton kernel runs, with results bitwise equal to the torch operations that run elsewhere. The kernel needs
    contiguous tensors of float32, bfloat16 or float16 on one device. In all other cases the torch operations run.

    Args:
        out, source: tensors of equal shape and any dtypes. ``source`` may be on another device.
        scale: the factor of ``source``. The product is rounded to float32 before the sum.
        accumulate: if True, add to ``out``; if False, overwrite it.
        non_blocking: the option of ``copy_``, used if the devices differ.

    Returns:
        ``out``.

    Raises:
        ValueError: the shapes differ.
    """
    if out.shape != source.shape:
        raise ValueError(
            f"scaled_copy_ takes tensors of one shape, got source {tuple(source.shape)} and out {tuple(out.shape)}"
        )
    is_ours = out.dtype in _DTYPES and source.dtype in _DTYPES and out.device == source.device
    if is_ours and runs_triton(out) and out.is_contiguous() and source.is_contiguous():
        if out.numel():
            from torch_ragged._kernels import _triton_casts as kernels

            with on_device_of(out):
                kernels.launch_scaled_copy(out, source, scale, accumulate)
        return out
    if scale != 1.0:
        source = source.to(torch.promote_types(source.dtype, torch.float32)) * scale
    return out.add_(source) if accumulate else out.copy_(source, non_blocking=non_blocking)
