"""Rounding to narrow floats in Triton: the GPU's conversions, or operations with equal results in Triton's interpreter.

The GPU rounds to nearest, ties to even. The interpreter alone would truncate, and has no NaN of float8.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

__all__ = ["INTERPRETED", "from_float8", "round_to", "to_float8"]

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def _nearest(values, dropped: tl.constexpr):  # type: ignore[no-untyped-def]
    """Round float32 ``values`` to ``dropped`` fewer bits, to nearest, ties to even. NaN and infinity are unchanged."""
    bits = values.to(tl.uint32, bitcast=True)
    rounded = (bits + ((1 << (dropped - 1)) - 1) + ((bits >> dropped) & 1)) >> dropped << dropped
    return tl.where(tl.abs(values) < float("inf"), rounded.to(tl.float32, bitcast=True), values)


@triton.jit
def round_to(values, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Round float32 ``values`` to ``dtype``, to nearest, ties to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        values = _nearest(values, 16)
    return values.to(dtype)


@triton.jit
def to_float8(values):  # type: ignore[no-untyped-def]
    """The e4m3 codes (uint8) of float32 ``values`` of at most 448, to nearest, ties to even; 127 or 255 for a NaN."""
    if INTERPRETED:
        magnitude = tl.abs(values)
        # Below 2**-6, codes are multiples of 2**-9, which is the last bit of float32 numbers near 2**14: adding 2**14 rounds.
        rounded = tl.where(magnitude < 0.015625, (magnitude + 16384.0) - 16384.0, _nearest(magnitude, 20))
        codes = tl.where(values == values, rounded.to(tl.float8e4nv).to(tl.uint8, bitcast=True), 127)
        sign = (values.to(tl.uint32, bitcast=True) >> 24) & 128
        codes = (codes.to(tl.uint32) | sign).to(tl.uint8)
    else:
        codes = values.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return codes


@triton.jit
def from_float8(codes):  # type: ignore[no-untyped-def]
    """The float32 values of e4m3 ``codes`` (uint8)."""
    values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    if INTERPRETED:
        values = tl.where((codes & 127) == 127, float("nan"), values)
    return values
