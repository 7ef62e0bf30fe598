"""8-bit codes with one scale per block, and stochastic rounding. Results do not depend on how a tensor is cut over ranks.

Values are divided by the largest magnitude of their block and stored as the nearest entry of a code book of 256 numbers.
Source of the code books: Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (ICLR 2022), section 2. The Triton
kernel repeats every operation of this module in the same order: change both together.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TypeVar

import torch

__all__ = ["BOOKS", "code_book", "dequantize", "encode", "hash32", "quantize", "round_to_bfloat16"]

BOOKS = ("dynamic", "linear")
_MASK = 0xFFFFFFFF


@lru_cache(maxsize=64)
def code_book(kind: str, signed: bool, device: torch.device) -> torch.Tensor:
    """The 256 values of a code book in ascending order: float32, in [-1, 1] if ``signed``, otherwise in [0, 1].

    ``"linear"`` has equal steps and contains 0 and 1. ``"dynamic"`` has 0, 1 and seven decades below 1; each decade has twice
    as many values as the decade below. This gives relative precision for large values and range for small values.
    """
    # Made on the host in float64, and rounded once: so the numbers are the same on all devices. The result is cached and
    # shared: nothing may write to it.
    if kind == "linear":
        steps = torch.arange(256, dtype=torch.float64, device="cpu")
        return ((steps - 127) / 128 if signed else steps / 255).float().to(device)
    values = [0.0, 1.0]
    for decade in range(7):
        count = 2**decade if signed else 2 ** (decade + 1)
        edges = [0.1 + 0.9 * i / count for i in range(count + 1)]
        middles = [10.0 ** (decade - 6) * (a + b) / 2 for a, b in zip(edges, edges[1:])]
        values += [*middles, *(-value for value in middles)] if signed else middles
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


def encode(normalized: torch.Tensor, kind: str, signed: bool) -> torch.Tensor:
    """The codes (uint8) of float32 values in [-1, 1] or [0, 1]: the nearest value of the book, found by arithmetic.

    There are two exceptions. Without a sign, only 0 gets code 0: a positive value gets at least code 1. A second moment that
    rounds to 0 beside a first moment that does not would make a step of ``m / eps``, hundreds of learning rates. With a sign,
    near half of the dynamic book's smallest number, a value may get code 0 although this is up to 6e-8 farther away than the
    nearest.

    A search in a table takes one step per bit, which would cost a GPU more than the memory traffic of an Adam step. Instead,
    each number of the dynamic book is the middle of a cell. In one decade all cells have equal width, and the decade has twice
    as many cells as the decade below. Therefore the cell number as a function of the value is a straight line in each decade,
    and each line is flatter than the one below. The cell number is the minimum of the seven lines. One correction is needed:
    the cell below a decade is narrower than the decade's first cell, so a fifth of the first cell is nearer to the cell below.
    In the lowest decade, nearly a fifth of the first cell is nearer to 0. Each operation rounds once, in the order of the
    kernel, without fused multiply-adds.
    """
    if kind == "linear":
        line = normalized * 128.0 + 127.0 if signed else normalized * 255.0
        codes = line.clamp_(min=0.0).round_()
        return (codes if signed else torch.maximum(codes, normalized > 0)).to(torch.uint8)
    magnitude = normalized.abs()
    line = magnitude * (1e6 / 0.9) + 8 / 9
    for decade in range(1, 7):
        torch.minimum(line, (magnitude * (1e6 / 0.9 * 0.2**decade)).add_(8 / 9 * 2**decade), out=line)
    if not signed:
        line.mul_(2.0).sub_(1.0)
    whole = (line - 0.5).round_()
    cell = whole.int()
    is_first = (cell & (cell - 1 if signed else cell + 1)) == 0  # First cells of decades have numbers 2**k, or 2**k - 1.
    cell -= (is_first & (line - whole < 0.2)).int()
    top = 128 if signed else 255
    # The largest entry, 1.0, lies at the end of the last cell, whose middle is at top - 0.5. So the border between both is at
    # top - 0.25.
    cell.masked_fill_(line >= top - 0.25, top)
    if not signed:
        return torch.maximum(cell, magnitude > 0).to(torch.uint8)
    return torch.where(normalized < 0, 127 - cell.clamp(max=127), 127 + cell).to(torch.uint8)


def dequantize(codes: torch.Tensor, scales: torch.Tensor, book: torch.Tensor) -> torch.Tensor:
    """The float32 values of uint8 ``codes``. The shape of ``scales`` must broadcast to that of ``codes``, (..., h, ..., w)."""
    return book[codes.int()] * scales


def quantize(values: torch.Tensor, dims: tuple[int, ...], kind: str, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes (uint8) and scales (float32) of float32 ``values``. ``dims`` are the dimensions of a block.

    The scales have size one in each of ``dims``. A block of zeros, or of magnitudes below the smallest normal number, has scale
    0. If a block has a NaN, its scale is NaN.
    """
    scales = values.abs().amax(dims, keepdim=True)
    # The inverse of a subnormal number may be infinite. Besides, some devices take subnormal numbers for 0, and codes must not
    # depend on the device.
    scales = torch.where(scales < 2.0**-126, 0.0, scales)
    inverse = torch.where(scales == 0, 0.0, 1.0 / torch.where(scales == 0, 1.0, scales))
    return encode(values * inverse, kind, signed), scales


_Integers = TypeVar("_Integers", int, torch.Tensor)


def hash32(value: _Integers) -> _Integers:
    """A 32-bit hash of an integer, or of each int64 of a tensor: each input bit changes half of the output bits.

    Source: Wellons' "lowbias32".
    """
    value = value & _MASK
    # A product may leave the range of int64. It wraps around then, and its low 32 bits are those of the exact product.
    value = ((value ^ (value >> 16)) * 0x7FEB352D) & _MASK
    value = ((value ^ (value >> 15)) * 0x846CA68B) & _MASK
    return value ^ (value >> 16)


def round_to_bfloat16(values: torch.Tensor, indices: torch.Tensor, key: int | torch.Tensor) -> torch.Tensor:
    """Round float32 values to bfloat16, up or down at random, such that the expected result is the value.

    The random bits of an element depend only on its index in the global tensor and on ``key``, not on the shard.

    Args:
        values: float32.
        indices: int64, of the shape of ``values``: the flat global index of every element.
        key: 32 bits, different for each tensor and step; an int64 tensor without dimensions is not read on the host.
    """
    # 16 random bits are added to the 16 bits that bfloat16 lacks. A carry rounds the magnitude up: its probability is the part
    # that rounding cuts off.
    noise = hash32((indices & _MASK) ^ hash32((indices >> 32) ^ key)) & 0xFFFF
    bits = (values.contiguous().view(torch.int32) + noise.int()) & -0x10000
    # The carry of a NaN could reach its sign, and leave the bits of a number.
    return torch.where(values.isfinite(), bits.view(torch.float32), values).to(torch.bfloat16)
