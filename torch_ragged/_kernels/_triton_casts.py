"""The Triton kernel of :mod:`torch_ragged._kernels.casts`, with the roundings of its twin."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from torch_ragged._kernels._triton_rounding import round_to

__all__ = ["launch_scaled_copy", "scaled_copy_kernel"]

_CAST_BLOCK, _CAST_WARPS = 2048, 8  # 8 elements per thread: 16 bytes of a narrow dtype, two times 16 of float32


@triton.jit
def scaled_copy_kernel(  # type: ignore[no-untyped-def]
    out_ptr, source_ptr, numel, scale, scales: tl.constexpr, accumulates: tl.constexpr, block: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < numel
    values = tl.load(source_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if scales:
        values = values * scale
    if accumulates:
        values = tl.load(out_ptr + at, mask=inside, other=0.0).to(tl.float32) + values
    tl.store(out_ptr + at, round_to(values, out_ptr.dtype.element_ty), mask=inside)


def launch_scaled_copy(out: torch.Tensor, source: torch.Tensor, scale: float, accumulate: bool) -> None:
    """The twin's operation, for contiguous tensors with at least one element, on the current device."""
    numel = out.numel()
    scaled_copy_kernel[(triton.cdiv(numel, _CAST_BLOCK),)](
        out,
        source,
        numel,
        float(scale),
        scales=scale != 1.0,
        accumulates=accumulate,
        block=_CAST_BLOCK,
        num_warps=_CAST_WARPS,
        enable_fp_fusion=False,  # The twin rounds the product before the sum.
    )
