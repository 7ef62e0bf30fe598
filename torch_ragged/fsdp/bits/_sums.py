"""Sums of the bits of tensors that nobody writes for a while: if memory changes a bit, the sum is another. No communication."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor

from torch_ragged._register._torch import local_tensor

__all__ = ["CorruptionFound", "StillTensors", "Sums", "sums_of"]


class CorruptionFound(RuntimeError):
    """The memory of this rank has changed bits that nobody wrote, or it computes other bits than other ranks."""


Sums = tuple[int, int]
"""128 bits: the sum of all words of 8 bytes, and that of the words times odd numbers, which other orders change."""

_CHUNK_WORDS = 2**15  # Of a chunk, which stays in a cache.


def sums_of(tensor: torch.Tensor) -> Sums:
    """The sums of a dense tensor's bits. A change of one bit changes both."""
    flat = tensor.detach().reshape(-1)
    if flat.data_ptr() % 8:
        flat = flat.clone()  # A view as words must be aligned.
    raw = flat.view(torch.uint8)
    whole = raw.numel() // 8 * 8
    words = raw[:whole].view(torch.int64)
    plain = int.from_bytes(bytes(raw[whole:].tolist()), "little")  # The rest, as one word.
    weighted = plain
    for number, chunk in enumerate(words.split(_CHUNK_WORDS) if whole else ()):
        plain += int(chunk.sum())
        # The upper half at the place of the lower one: of a high bit alone, products with odd numbers would be equal for all
        # words, and two changes no change.
        mixed = chunk ^ (chunk >> 32)
        weighted += (2 * number + 3) * int((mixed * _odd_numbers(chunk.device)[: chunk.numel()]).sum())
    return plain % 2**64, weighted % 2**64


@functools.lru_cache(maxsize=8)
def _odd_numbers(device: torch.device) -> torch.Tensor:
    return torch.arange(1, 2 * _CHUNK_WORDS, 2, device=device)


class StillTensors:
    """Tensors with their sums, until :meth:`changed` compares them. Of a DTensor, the local tensor counts.

    What torch writes counts the version of a tensor: such a tensor is not compared, and neither is one that was replaced.
    """

    def __init__(self) -> None:
        self._kept: dict[str, tuple[weakref.ref[torch.Tensor], tuple[int, ...], Sums]] = {}

    def note(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Keep the sums of these tensors, as they are now, in place of those of before."""
        self._kept = {}
        for name, tensor in tensors:
            self._keep(name, tensor)

    def _keep(self, name: str, tensor: torch.Tensor) -> None:
        self._kept[name] = weakref.ref(tensor), _written_state(tensor), sums_of(_local(tensor))

    def changed(self, now: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """The names of tensors in ``now`` whose bits have changed since :meth:`note`, although nothing has written to them.

        Of those that were written to since, the sums are kept as they are now.
        """
        found = []
        for name, tensor in now:
            if name in self._kept:
                kept, state, sums = self._kept[name]
                if kept() is not tensor or _written_state(tensor) != state:
                    self._keep(name, tensor)
                elif sums_of(_local(tensor)) != sums:
                    found.append(name)
        return found


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def _written_state(tensor: torch.Tensor) -> tuple[int, ...]:
    """It is another one after a write or an exchange. An op on a DTensor counts there, one on its local tensor there only."""
    local = _local(tensor)
    return tensor._version, local._version, local.data_ptr()
