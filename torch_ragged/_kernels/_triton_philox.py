"""The Triton kernel of :mod:`torch_ragged._kernels.philox`: each thread computes the random bits of one element.

Sums after products are fused where torch's compiler fuses them (``fma``), and nowhere else. Logarithm, sine and cosine are
those of CUDA's device library that CURAND uses. In Triton's interpreter they are NumPy's, and normal numbers differ a little.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from torch_ragged._kernels._triton_rounding import INTERPRETED, round_to
from torch_ragged._kernels.distributions import Sampling
from torch_ragged._kernels.regions import Drawn

__all__ = ["launch_draw", "draw_kernel"]

_DRAW_BLOCK, _DRAW_WARPS = 1024, 4
_UNIT = tl.constexpr(2.0**-32)  # CURAND_2POW32_INV
_ANGLE = tl.constexpr(1.4629181199765639e-09)  # CURAND_2POW32_INV_2PI: the product of 2**-32 and 2 pi in float32
_UNIT_64 = tl.constexpr(2.0**-53)  # CURAND_2POW53_INV_DOUBLE
_PI = tl.constexpr(3.141592653589793)


@triton.jit
def _words(seed, call, thread):  # type: ignore[no-untyped-def]
    """The four words of a call, int64, of a thread."""
    low, high = (call & 0xFFFFFFFF).to(tl.uint32), (call >> 32).to(tl.uint32)
    third = thread.to(tl.uint32)
    return tl.philox(seed.to(tl.uint64), low, high, third, third * 0)


@triton.jit
def _normal(x, y, is_odd):  # type: ignore[no-untyped-def]
    """The sine or the cosine of a pair by Box and Muller, from two words."""
    u = tl.fma(x.to(tl.float32), _UNIT, _UNIT / 2)
    angle = tl.fma(y.to(tl.float32), _ANGLE, _ANGLE / 2)
    if INTERPRETED:
        logarithm, sine, cosine = tl.log(u), tl.sin(angle), tl.cos(angle)
    else:
        logarithm, sine, cosine = libdevice.log(u), libdevice.fast_sinf(angle), libdevice.fast_cosf(angle)
    return tl.where(is_odd, cosine, sine) * tl.sqrt_rn(logarithm * -2.0)


@triton.jit
def _wide(x, y):  # type: ignore[no-untyped-def]
    """The 53 bits that CURAND takes from two words."""
    return (x.to(tl.uint64) ^ (y.to(tl.uint64) << 21)).to(tl.float64)


@triton.jit
def _normal_64(x, y, is_odd):  # type: ignore[no-untyped-def]
    """As :func:`_normal`, from two numbers of 53 bits."""
    u = tl.fma(x, _UNIT_64, _UNIT_64 / 2)
    angle = tl.fma(y, _UNIT_64 * 2, _UNIT_64)
    if INTERPRETED:
        logarithm, sine, cosine = tl.log(u), tl.sin(angle * _PI), tl.cos(angle * _PI)
    else:
        logarithm, sine, cosine = libdevice.log(u), libdevice.sinpi(angle), libdevice.cospi(angle)
    return tl.where(is_odd, cosine, sine) * tl.sqrt(logarithm * -2.0)


@triton.jit
def _to(values, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Round floats, or integers by way of float32, to ``dtype``."""
    if dtype == tl.float64:
        values = values.to(tl.float64)
    else:
        values = round_to(values.to(tl.float32), dtype)
    return values


@triton.jit(
    do_not_specialize=[
        *("numel", "start", "threads", "seed", "first_call", "float0", "float1", "float2", "first", "count"),
        *("size0", "size1", "size2", "step0", "step1", "step2", "step3", "stride0", "stride1", "stride2", "stride3"),
    ]
)
def draw_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    numel: tl.int64,
    start: tl.int64,
    threads: tl.int32,
    seed: tl.uint64,
    first_call: tl.int64,
    float0: tl.float64,
    float1: tl.float64,
    float2: tl.float64,
    first: tl.int64,
    count: tl.uint64,
    size0: tl.int64,
    size1: tl.int64,
    size2: tl.int64,
    step0: tl.int64,
    step1: tl.int64,
    step2: tl.int64,
    step3: tl.int64,
    stride0: tl.int64,
    stride1: tl.int64,
    stride2: tl.int64,
    stride3: tl.int64,
    dims: tl.constexpr,
    index: tl.constexpr,
    kind: tl.constexpr,
    lanes: tl.constexpr,
    vector: tl.constexpr,
    is_bool: tl.constexpr,
    block: tl.constexpr,
):
    # Dimension 0 is the innermost one. Elements are counted in ``index``, because divisions of int64 cost as much as Philox.
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = place < numel
    rest = place.to(index)
    element, at = start.to(index), tl.zeros((block,), tl.int64)
    if dims > 1:
        here, rest = rest % size0.to(index), rest // size0.to(index)
        element, at = element + here * step0.to(index), at + here.to(tl.int64) * stride0
    if dims > 2:
        here, rest = rest % size1.to(index), rest // size1.to(index)
        element, at = element + here * step1.to(index), at + here.to(tl.int64) * stride1
    if dims > 3:
        here, rest = rest % size2.to(index), rest // size2.to(index)
        element, at = element + here * step2.to(index), at + here.to(tl.int64) * stride2
    # The outermost dimension has the last step and stride.
    element, at = element + rest * step3.to(index), at + rest.to(tl.int64) * stride3

    if vector > 0:
        turn, within = element // vector, element % vector
        thread, turn = turn % threads.to(index), turn // threads.to(index)
        calls: tl.constexpr = (vector + 3) // 4
        call, lane = turn * calls + within // 4, within % 4
    else:
        thread, turn = element % threads.to(index), element // threads.to(index)
        call, lane = turn // lanes, turn % lanes
    a, b, c, d = _words(seed, first_call.to(tl.int64) + call.to(tl.int64), thread)
    is_second = lane >= lanes // 2
    x, y = tl.where(is_second, c, a), tl.where(is_second, d, b)
    is_odd = lane % 2 == 1

    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if kind == "integers":
        if lanes == 4:
            bits = tl.where(is_odd, y, x).to(tl.uint64)
        else:
            bits = (x.to(tl.uint64) << 32) | y.to(tl.uint64)
        whole = (bits % count.to(tl.uint64)).to(tl.int64) + first.to(tl.int64)
        if is_bool:
            values = (whole != 0).to(dtype)
        elif dtype.is_floating():
            values = _to(whole, dtype)
        else:
            values = whole.to(dtype)
    else:
        # Parameters in full precision, also in the interpreter; the host has rounded them.
        base, factor = tl.full((block,), float0, tl.float64), tl.full((block,), float1, tl.float64)
        if lanes == 4:
            u = tl.fma(tl.where(is_odd, y, x).to(tl.float32), _UNIT, _UNIT / 2)
        else:
            u = tl.fma(_wide(x, y), _UNIT_64, _UNIT_64 / 2)
        if kind == "bernoulli":
            values = (u.to(tl.float64) < base).to(tl.float32).to(dtype)
        elif kind == "uniform":
            drawn = _to(tl.fma(u, factor.to(u.dtype), base.to(u.dtype)), dtype).to(u.dtype)
            high = tl.full((block,), float2, tl.float64).to(u.dtype)
            values = _to(tl.where(drawn == high, base.to(u.dtype), drawn), dtype)  # CURAND's numbers are in (0, 1].
        else:
            if lanes == 4:
                drawn = _normal(x, y, is_odd)
            else:
                drawn = _normal_64(_wide(a, b), _wide(c, d), is_odd)
            values = _to(tl.fma(drawn, factor.to(drawn.dtype), base.to(drawn.dtype)), dtype)
    tl.store(out_ptr + at, values, mask=inside)


def launch_draw(
    out: torch.Tensor, region: Drawn, distribution: Sampling, numel: int, threads: int, seed: int, call: int
) -> None:
    """One launch on the current device.

    Args:
        numel, threads: of the whole draw.
        call: the number of the draw's first call, which is a fourth of the generator's offset.
    """
    memory = out.view(torch.uint8) if out.dtype == torch.bool else out
    # Inner dimensions first, and then the outermost one, which has no size.
    outermost, *inner = region.dims
    sizes, steps, strides = zip(*reversed(inner), *[(1, 0, 0)] * (4 - len(region.dims)), outermost)
    draw_kernel[(triton.cdiv(region.numel, _DRAW_BLOCK),)](
        memory.as_strided((1,), (1,), memory.storage_offset() + region.offset),
        region.numel,
        region.start,
        threads,
        seed % 2**64,
        call,
        *distribution.floats,
        *distribution.integers,
        *sizes[:3],
        *steps,
        *strides,
        dims=len(region.dims),
        index=tl.int32 if numel < 2**31 else tl.int64,
        kind=distribution.kind,
        lanes=distribution.lanes,
        vector=distribution.vector,
        is_bool=out.dtype == torch.bool,
        block=_DRAW_BLOCK,
        num_warps=_DRAW_WARPS,
        enable_fp_fusion=False,
        enable_reflect_ftz=False,  # As torch's compiler: denormal numbers are kept.
    )
