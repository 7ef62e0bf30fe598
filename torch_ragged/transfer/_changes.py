"""Checksums of elements, by which ``run(delta=...)`` finds out which atoms a receiver lacks. They are computed on the device.

The sender and each receiver of an atom compute it of what they hold now. So no plan remembers what was sent, and no way to
write to a tensor is missed, on either side. Version counters would cost nothing, but they see little: writes to a DTensor do
not count for its local tensor, and those through ``.data``, NumPy or a kernel count for none.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch

from torch_ragged.tensor._carry import pack, part_view
from torch_ragged.tensor._exchange import Part, parts_within

__all__ = ["checksum", "chunk_bytes", "chunks"]

# Digits of pi. They are fixed, because both ends of an atom need equal weights, in different processes.
_SEEDS = (0x243F6A8885A308D3, 0x13198A2E03707344), (0x082EFA98EC4E6C89, 0x452821E638D01377)


def checksum(flat: torch.Tensor, parts: Sequence[Part], dtype: torch.dtype) -> torch.Tensor:
    """Two sums, modulo 2**64, of the 32-bit words of the elements of ``parts`` as ``dtype``: int64 ``(2,)``, on the device.

    Each word is multiplied by a pseudo-random odd weight of its place in its chunk, and each chunk's sum by one of the chunk.
    Both ends of an atom have the same elements in the same order, so they have the same chunks. A single changed word changes
    both sums for certain. Several changes cancel with a probability of about 2**-54 if only the highest bits of words change,
    and less otherwise. Words of 64 bits would cancel far more often.
    """
    words = chunk_bytes(flat.device) // 4
    sums = torch.stack([_sums(chunk, _weights(flat.device, words, _SEEDS[0])) for chunk in _word_chunks(flat, parts, dtype)])
    return (sums * _weights(flat.device, max(len(sums), words), _SEEDS[1])[:, : len(sums)].t()).sum(0)


def chunk_bytes(device: torch.device) -> int:
    """Bytes that are worked on at a time: those that fit into a core's cache, or that keep an accelerator busy."""
    return 1 << 18 if device.type == "cpu" else 1 << 22


def chunks(flat: torch.Tensor, parts: Sequence[Part], dtype: torch.dtype, size: int) -> Iterator[torch.Tensor]:
    """The elements of ``parts`` as ``dtype``, one after another, in 1-D tensors of ``size``: views where that is possible."""
    numel = sum(part.numel for part in parts)
    whole = part_view(flat, parts[0]) if len(parts) == 1 and parts[0].is_contiguous and flat.dtype == dtype else None
    for start in range(0, numel, size):
        stop = min(start + size, numel)
        if whole is not None:
            yield whole[start:stop]
        else:
            chunk = torch.empty(stop - start, dtype=dtype, device=flat.device)
            pack(chunk, flat, list(parts_within(parts, start, stop)))
            yield chunk


def _word_chunks(flat: torch.Tensor, parts: Sequence[Part], dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """The elements of ``parts`` one after another, as 1-D int32 words; a last word is filled up with zeros."""
    for chunk in chunks(flat, parts, dtype, chunk_bytes(flat.device) // dtype.itemsize):
        raw = chunk.view(torch.uint8)
        if raw.storage_offset() % 4:
            raw = raw.clone()  # It cannot be viewed as words.
        if len(raw) % 4:
            raw = torch.cat([raw, raw.new_zeros(-len(raw) % 4)])
        yield raw.view(torch.int32)


def _sums(words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    weights = weights[:, : len(words)]
    if words.device.type == "cpu":  # A dot product needs no memory for the products, and accelerators have none of integers.
        # int64 wraps around, which is the arithmetic modulo 2**64.
        wide = words.to(torch.int64)
        return torch.stack([torch.dot(wide, row) for row in weights])
    return (words * weights).sum(1)


@functools.lru_cache(maxsize=8)
def _weights(device: torch.device, count: int, seeds: tuple[int, int]) -> torch.Tensor:
    """Pseudo-random odd numbers (the finalizer of splitmix64): int64 ``(2, count)``."""
    index = torch.arange(count, device=device)
    rows = []
    for seed in seeds:
        x = index * -7046029254386353131 + seed
        for bits, factor in ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1)):
            # Without copies of the sign, which int64 shifts in: with them, two numbers would become one.
            x = (x ^ (x >> bits & (1 << 64 - bits) - 1)) * factor
        # Odd: then no change of a word is lost by the product, which an even weight could shift out.
        rows.append(x | 1)
    return torch.stack(rows)
