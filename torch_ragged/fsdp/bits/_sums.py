"""Sums of the bits of tensors that nobody writes for a while: if memory changes a bit, the sum is another. No communication."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor

from torch_ragged._register._torch import local_tensor

__all__ = ["CorruptionFound", "StillTensors", "lines_of", "sums_of"]


class CorruptionFound(RuntimeError):
    """The memory of this rank has changed bits that nobody wrote, or it computes other bits than other ranks."""


_ROW_WORDS = 256
_FEW_WORDS = 2**11  # Sums of fewer words take longer than a copy, and more memory.
_CHUNK_ROWS = 2**8  # Of a chunk, which stays in a cache for the second sum.


def lines_of(tensor: torch.Tensor) -> torch.Tensor:
    """What a change of one bit of a dense tensor changes: its words of 8 bytes, or if these are many, sums of them::

        words in columns    3  1  4
                            1  5  9     lines of many: 4 6 13 (columns), 8 15 (rows)

    Two changed words are in two columns or in two rows, so that they cannot cancel in both sums.
    """
    flat = tensor.detach().reshape(-1)
    if flat.data_ptr() % 8:
        flat = flat.clone()  # A view as words must be aligned.
    lines = []
    if left := flat.nbytes % 8:
        raw = flat.view(torch.uint8)
        flat, lines = raw[:-left], [raw[-left:].to(torch.int64)]
    words = flat.view(torch.int64)
    if words.numel() <= _FEW_WORDS:
        return torch.cat([words, *lines])
    left = words.numel() % _ROW_WORDS
    columns = words.new_zeros(_ROW_WORDS)
    if left:
        lines.append(words[-left:])
        words = words[:-left]
    for chunk in words.view(-1, _ROW_WORDS).split(_CHUNK_ROWS):
        columns += chunk.sum(0)
        lines.append(chunk.sum(1))
    return torch.cat([columns, *lines])


def sums_of(tensor: torch.Tensor) -> tuple[int, int]:
    """128 bits: two sums of the lines times odd numbers, which other orders change. A change of one bit changes one of them."""
    lines = lines_of(tensor)
    odd = 2 * torch.arange(lines.numel(), device=lines.device) + 1
    # The upper half at the position of the lower one: of a high bit alone, products with odd numbers would be equal for all
    # words, and two changes no change.
    mixed = lines ^ (lines >> 32 & 2**32 - 1)
    return int((lines * odd).sum()), int((mixed * odd).sum())


class StillTensors:
    """Tensors with their lines, until :meth:`changed` compares them. Of a DTensor, the local tensor counts.

    What torch writes counts the version of a tensor: such a tensor is not compared, and neither is one that was replaced.
    """

    def __init__(self) -> None:
        self._kept: dict[str, tuple[weakref.ref[torch.Tensor], tuple[int, ...], torch.Tensor]] = {}

    def note(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Keep the lines of these tensors, as they are now."""
        for name, tensor in tensors:
            self._kept[name] = weakref.ref(tensor), _written_state(tensor), lines_of(_local(tensor))

    def changed(self, now: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """The names of tensors in ``now`` whose bits have changed since :meth:`note`, although nothing has written to them.

        Of those that are new, or were written to since, the lines are kept as they are now.
        """
        found = []
        for name, tensor in now:
            kept, state, lines = self._kept.get(name, (None, None, None))
            if lines is None or kept() is not tensor or _written_state(tensor) != state:
                self.note([(name, tensor)])
            elif not lines_of(_local(tensor)).equal(lines):
                found.append(name)
        return found


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def _written_state(tensor: torch.Tensor) -> tuple[int, ...]:
    """It is another one after a write or an exchange. An op on a DTensor counts there, one on its local tensor there only."""
    local = _local(tensor)
    return tensor._version, local._version, local.data_ptr()
