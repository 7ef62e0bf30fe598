"""Kernels that show what a part of another one does; imported where triton is."""

import triton
import triton.language as tl

from torch_ragged._kernels._triton_adam8bit import _encode


@triton.jit
def encode_kernel(values_ptr, codes_ptr, numel, dynamic: tl.constexpr, signed: tl.constexpr, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    values = tl.load(values_ptr + at, mask=at < numel, other=0.0)
    tl.store(codes_ptr + at, _encode(values, dynamic, signed), mask=at < numel)
