"""Gradients that come in a wider dtype than their group's, on their way beside a narrow reduce-scatter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from torch_ragged.fsdp.comm._collectives import Collectives, Reduction, Work
from torch_ragged.fsdp.core._dbuffer import DBuffer
from torch_ragged.fsdp.layout._buffer_layout import BufferLayout

__all__ = ["WideGradients"]

_LARGEST_PART = 1 / 16
"""Of a group's buffer, up to which wide gradients are few."""


class WideGradients:
    """The gradients of those parameters of a group that may come wide, cut where the group's shards are.

    ::

        the group's buffer     | x x a a | a x x x | x x x b | x x x x |      of gradients a and b
        sent beside it         | a a | a . | b . | . . |                      each rank's part as long as the longest

    Args:
        layout: of the group.
        indices: the parameters, the same on all ranks.

    Attributes:
        are_few: whether it costs little to send them beside the others, or to keep them.
    """

    def __init__(self, layout: BufferLayout, rank: int, indices: Sequence[int]) -> None:
        self._layout, self._rank, self._indices = layout, rank, frozenset(indices)
        self._pieces = [_pieces(layout, each, indices) for each in range(layout.ranks)]
        self._part = max(sum(stop - start for _, _, start, stop in pieces) for pieces in self._pieces)
        self.are_few = self._part * layout.ranks <= layout.numel * _LARGEST_PART

    def __contains__(self, index: int) -> bool:
        return index in self._indices

    def __bool__(self) -> bool:
        """Whether there is anything to send, on any rank."""
        return self._part > 0

    def are_many(self, gradients: Iterable[torch.Tensor]) -> bool:
        """Whether it is better to have a group's buffer wide than to keep these beside it."""
        return sum(gradient.numel() for gradient in gradients) > self._layout.numel * _LARGEST_PART

    def reduce(
        self, gradients: dict[int, torch.Tensor], output: DBuffer, collectives: Collectives, reduction: Reduction
    ) -> Work:
        """Reduce those that this rank has, in the dtype of ``output``, to which ``wait()`` adds them. One reduce-scatter."""
        received = output.flat.new_empty(self._part)
        packed = received.new_zeros(len(self._pieces) * self._part)
        for part, pieces in zip(packed.split(self._part), self._pieces):
            for index, place, start, stop in pieces:
                if index in gradients:
                    part[place : place + stop - start] = gradients[index].reshape(-1)[start:stop]
        return _Added(self, collectives.reduce_scatter(received, packed, reduction), received, output)

    def add(self, received: torch.Tensor, output: DBuffer) -> None:
        """Add this rank's part to its shard."""
        for index, place, start, stop in self._pieces[self._rank]:
            output.tensor(index).add_(received[place : place + stop - start])


def _pieces(layout: BufferLayout, rank: int, indices: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """What lies in the shard of ``rank``: the parameter, the place in its part, start and stop in the gradient."""
    pieces, place = [], 0
    for index in indices:
        start, stop = layout.local_range(index, rank)
        if stop > start:
            pieces.append((index, place, start, stop))
            place += stop - start
    return pieces


class _Added:
    """A reduction whose result is added to that of another one, which was waited for before."""

    def __init__(self, wide: WideGradients, work: Work, received: torch.Tensor, output: DBuffer) -> None:
        self._wide, self._work, self._received, self._output = wide, work, received, output

    def wait(self) -> None:
        self._work.wait()
        self._wide.add(self._received, self._output)
