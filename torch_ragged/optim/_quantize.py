"""8-bit codes with a scale per block, and stochastic rounding, both independent of how a tensor is cut over ranks.

Code books as in Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (ICLR 2022), section 2: values are divided by
the largest magnitude of their block and stored as the nearest entry of a book of 256 numbers.
"""

from __future__ import annotations

from functools import lru_cache

import torch

__all__ = ["BOOKS", "code_book", "dequantize", "hash32", "midpoints", "quantize", "round_to_bfloat16"]

BOOKS = ("dynamic", "linear")
_MASK = 0xFFFFFFFF


@lru_cache(maxsize=64)
def code_book(kind: str, signed: bool, device: torch.device) -> torch.Tensor:
    """The 256 values of a book in ascending order, float32 in [-1, 1] or [0, 1].

    ``"linear"``: equal steps, 0 and 1 among them. ``"dynamic"``: seven decades below 1, the higher the more finely cut, and 0
    and 1: relative precision for large values, range for small ones.
    """
    if kind == "linear":
        steps = torch.arange(256, dtype=torch.float64)
        return ((steps - 127) / 128 if signed else steps / 255).float().to(device)
    values = [0.0, 1.0]
    for decade in range(7):
        count = 2**decade if signed else 2 ** (decade + 1)
        edges = [0.1 + 0.9 * i / count for i in range(count + 1)]
        middles = [10.0 ** (decade - 6) * (a + b) / 2 for a, b in zip(edges, edges[1:])]
        values += [*middles, *(-value for value in middles)] if signed else middles
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


@lru_cache(maxsize=64)
def midpoints(kind: str, signed: bool, device: torch.device) -> torch.Tensor:
    """The 255 numbers halfway between neighbours of a book: the code of x is how many of them are smaller."""
    book = code_book(kind, signed, device)
    return (book[1:] + book[:-1]) / 2


def dequantize(codes: torch.Tensor, scales: torch.Tensor, book: torch.Tensor) -> torch.Tensor:
    """float32 values of uint8 ``codes``, of shape (..., h, ..., w) that ``scales`` broadcast against."""
    return book[codes.int()] * scales


def quantize(values: torch.Tensor, dims: tuple[int, ...], middles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (uint8) and scales (float32, ``dims`` kept with size one) of float32 ``values``; ``dims`` are those of a block.

    A block of zeros has scale 0. A NaN makes its block's scale NaN.
    """
    scales = values.abs().amax(dims, keepdim=True)
    normalized = values / torch.where(scales == 0, 1.0, scales)
    return torch.bucketize(normalized, middles, out_int32=True).to(torch.uint8), scales


def hash32(value: int) -> int:
    """A 32-bit mix of an integer in which every input bit changes half of the output bits (Wellons' "lowbias32")."""
    value &= _MASK
    value = ((value ^ (value >> 16)) * 0x7FEB352D) & _MASK
    value = ((value ^ (value >> 15)) * 0x846CA68B) & _MASK
    return value ^ (value >> 16)


def _hash32(value: torch.Tensor) -> torch.Tensor:
    value = ((value ^ (value >> 16)) * 0x7FEB352D) & _MASK
    value = ((value ^ (value >> 15)) * 0x846CA68B) & _MASK
    return value ^ (value >> 16)


def round_to_bfloat16(values: torch.Tensor, indices: torch.Tensor, key: int) -> torch.Tensor:
    """Round float32 to bfloat16 up or down at random, the expectation being the value.

    The random bits of an element are a function of its index in the global tensor and of ``key`` only.

    Args:
        values: float32.
        indices: int64 of the same shape: the flat index of every element.
        key: of this tensor in this step, 32 bits.
    """
    noise = _hash32((indices & _MASK) ^ _hash32((indices >> 32) ^ key)) & 0xFFFF
    bits = (values.contiguous().view(torch.int32) + noise.int()) & -0x10000
    return torch.where(values.isfinite(), bits.view(torch.float32), values).to(torch.bfloat16)
