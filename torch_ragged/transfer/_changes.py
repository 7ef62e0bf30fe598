"""Changes: which elements of the source a run must send again, for ``run(delta=...)``.

The sender of an atom decides, because only it has seen both the old and the new elements. It tells all receivers of the atom.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Literal, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torch_ragged._redistribute import part_view
from torch_ragged._transfer import Part

__all__ = ["Candidate", "Changes", "Delta", "checksum"]

Delta = Literal["version", "checksum"]

_CHUNK = 1 << 20  # Elements whose weights are in memory at a time.
_SEEDS = (0x243F6A8885A308D3, 0x13198A2E03707344)


class Candidate(NamedTuple):
    """Elements that this rank may send: parts of the flat local tensor ``flat``."""

    key: Hashable
    flat: torch.Tensor
    parts: tuple[Part, ...]


class Changes:
    """What this rank has sent. The memory of one plan; it holds no tensor."""

    def __init__(self) -> None:
        self._how: Delta | None = None
        self._sent: dict[Hashable, object] = {}
        self._next: dict[Hashable, object] = {}

    def of(self, candidates: Sequence[Candidate], how: Delta) -> list[bool]:
        """For each candidate, whether it may differ from what was sent in the last run of the same kind."""
        if how != self._how:
            self._sent, self._how = {}, how
        states: Iterable[object]
        if how == "version":
            states = [_Version(each.flat) for each in candidates]
        else:
            sums = [checksum([part_view(each.flat, part) for part in each.parts]) for each in candidates]
            states = torch.stack(sums).tolist() if sums else []
        self._next = {each.key: state for each, state in zip(candidates, states)}
        return [self._sent.get(key) != state for key, state in self._next.items()]

    def commit(self) -> None:
        """The run is complete."""
        self._sent, self._next = self._next, {}

    def forget(self) -> None:
        """The next run sends all elements."""
        self._sent, self._next = {}, {}


class _Version:
    """The memory of a tensor and its version counter. Equal if no operation of torch has written to it in between."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # While a weak reference exists, no new storage gets the same address.
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._state = (self._storage.cdata, tensor.data_ptr(), tensor._version)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Version) and self._state == other._state

    __hash__ = None  # type: ignore[assignment]


def checksum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Two sums, modulo 2**64, of all words of the tensors, each times its own pseudo-random odd weight: int64 ``(2,)``.

    A single changed element changes both sums for certain. Several changes cancel with a probability of about 2**-60. Words
    have at most 32 bits: the highest bits of two longer ones could cancel for any odd weights.
    """
    sums = torch.zeros(2, dtype=torch.int64, device=parts[0].device)
    start = 0
    for part in parts:
        words = _words(part)
        for chunk in words.split(_CHUNK):
            index = torch.arange(start, start + chunk.numel(), device=chunk.device)
            for i, seed in enumerate(_SEEDS):
                sums[i] += (chunk.to(torch.int64) * _weights(index, seed)).sum()
            start += chunk.numel()
    return sums


def _words(part: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor as 1-D integers of at most 4 bytes."""
    flat = part.contiguous().view(-1)
    return flat.view({1: torch.uint8, 2: torch.int16}.get(flat.element_size(), torch.int32))


def _weights(index: torch.Tensor, seed: int) -> torch.Tensor:
    """A pseudo-random odd int64 for each index (the finalizer of splitmix64)."""
    x = index * -7046029254386353131 + seed
    x = (x ^ (x >> 30)) * -4658895280553007687
    x = (x ^ (x >> 27)) * -7723592293110705685
    return (x ^ (x >> 31)) | 1
