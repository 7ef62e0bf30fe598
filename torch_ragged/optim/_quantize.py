"""8-bit codes with a scale per block, and stochastic rounding, both independent of how a tensor is cut over ranks.

Code books as in Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (ICLR 2022), section 2: values are divided by
the largest magnitude of their block and stored as the nearest entry of a book of 256 numbers.
"""

from __future__ import annotations

from functools import lru_cache

import torch

__all__ = ["BOOKS", "code_book", "dequantize", "encode", "hash32", "quantize", "round_to_bfloat16"]

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


def encode(normalized: torch.Tensor, kind: str, signed: bool) -> torch.Tensor:
    """The codes (uint8) of float32 values in [-1, 1] or [0, 1]: the nearest of the book, by arithmetic.

    But about half of the dynamic book's smallest number: what is taken for 0 there is up to 6e-8 farther than the nearest.

    A search in a table, a step for every bit, would cost a GPU more than the memory traffic of an Adam step. A number of the
    dynamic book is the middle of a cell. Over a decade cells have equal width, and there are twice as many as in the decade
    below, so that the place of a value among all cells is a line over each decade, each flatter than the last, and everywhere
    the least of the seven lines. Of the first cell of a decade a fifth is nearer to the last one below, which is narrower by as
    much; of the very first nearly a fifth to 0. Each operation rounds once, in an order that the kernel keeps: no fused
    multiply-adds.
    """
    if kind == "linear":
        place = normalized * 128.0 + 127.0 if signed else normalized * 255.0
        return place.clamp_(min=0.0).round_().to(torch.uint8)
    magnitude = normalized.abs()
    place = magnitude * (1e6 / 0.9) + 8 / 9
    for decade in range(1, 7):
        torch.minimum(place, (magnitude * (1e6 / 0.9 * 0.2**decade)).add_(8 / 9 * 2**decade), out=place)
    if not signed:
        place.mul_(2.0).sub_(1.0)
    whole = (place - 0.5).round_()
    cell = whole.int()
    is_first = (cell & (cell - 1 if signed else cell + 1)) == 0
    cell -= (is_first & (place - whole < 0.2)).int()
    top = 128 if signed else 255
    cell.masked_fill_(place >= top - 0.25, top)
    return (torch.where(normalized < 0, 127 - cell.clamp(max=127), 127 + cell) if signed else cell).to(torch.uint8)


def dequantize(codes: torch.Tensor, scales: torch.Tensor, book: torch.Tensor) -> torch.Tensor:
    """float32 values of uint8 ``codes``, of shape (..., h, ..., w) that ``scales`` broadcast against."""
    return book[codes.int()] * scales


def quantize(values: torch.Tensor, dims: tuple[int, ...], kind: str, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (uint8) and scales (float32, ``dims`` kept with size one) of float32 ``values``; ``dims`` are those of a block.

    A block of zeros, or of magnitudes below the smallest normal number, has scale 0. A NaN makes its block's scale NaN.
    """
    scales = values.abs().amax(dims, keepdim=True)
    scales = torch.where(scales < 2.0**-126, 0.0, scales)
    inverse = torch.where(scales == 0, 0.0, 1.0 / torch.where(scales == 0, 1.0, scales))
    return encode(values * inverse, kind, signed), scales


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
