"""Gradients that come in a wider dtype than their group's: they are sent beside a reduce-scatter in the narrow dtype."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from torch_ragged.fsdp.comm._collectives import Collectives, Reduction, Work
from torch_ragged.fsdp.layout._buffer_layout import BufferLayout

__all__ = ["WideGradients"]

_LARGEST_PART = 1 / 16
"""Of a group's buffer, up to which wide gradients are few."""


class WideGradients:
    """The gradients of those parameters of a group that may come wide, cut where the group's shards are.

    ::

        the group's buffer     | x x a a | a x x x | x x x b | x x x x |      of gradients a and b
        sent beside it         | a a | a . | b . | . . |                      one part per rank, as long as the longest

    Args:
        layout: of the group.
        rank: this rank among the shards.
        indices: the parameters, the same on all ranks.

    Attributes:
        are_few: whether it costs little to send them beside the others, or to keep them. Equal on all ranks.
    """

    def __init__(self, layout: BufferLayout, rank: int, indices: Sequence[int]) -> None:
        self._layout, self._rank, self._indices = layout, rank, frozenset(indices)
        self._intervals = [_intervals(layout, each, indices) for each in range(layout.ranks)]
        self._part = max(sum(stop - start for _, _, start, stop in intervals) for intervals in self._intervals)
        self.are_few = self._part * layout.ranks <= layout.numel * _LARGEST_PART

    def __contains__(self, index: int) -> bool:
        return index in self._indices

    def __bool__(self) -> bool:
        """Whether any rank sends something."""
        return self._part > 0

    def are_many(self, gradients: Iterable[torch.Tensor]) -> bool:
        """Whether a wide buffer for the whole group costs less than keeping these gradients beside it."""
        return sum(gradient.numel() for gradient in gradients) > self._layout.numel * _LARGEST_PART

    def reduce(
        self, gradients: dict[int, torch.Tensor], output: torch.Tensor, collectives: Collectives, reduction: Reduction
    ) -> Work:
        """Reduce the gradients that this rank has, in the dtype of ``output``; ``wait()`` adds them to it. One reduce-scatter.

        Args:
            gradients: by parameter; a missing one counts as zeros.
            output: the rank's shard, (S,), which another reduce-scatter has filled before ``wait()`` is called.
        """
        received = output.new_empty(self._part)
        packed = received.new_zeros(len(self._intervals) * self._part)
        for part, intervals in zip(packed.split(self._part), self._intervals):
            for index, offset, start, stop in intervals:
                if index in gradients:
                    part[offset : offset + stop - start] = gradients[index].reshape(-1)[start:stop]
        return _Added(self, collectives.reduce_scatter(received, packed, reduction), received, output)

    def add(self, received: torch.Tensor, output: torch.Tensor) -> None:
        """Add this rank's part to its shard."""
        for index, offset, start, stop in self._intervals[self._rank]:
            first = self._layout.offsets[index] + start - self._rank * self._layout.shard_numel
            output[first : first + stop - start].add_(received[offset : offset + stop - start])


def _intervals(layout: BufferLayout, rank: int, indices: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """What lies in the shard of ``rank``: the parameter, the offset in the rank's part, start and stop in the gradient."""
    intervals, offset = [], 0
    for index in indices:
        start, stop = layout.local_range(index, rank)
        if stop > start:
            intervals.append((index, offset, start, stop))
            offset += stop - start
    return intervals


class _Added:
    """A reduce-scatter whose result is added to that of another one, which was waited for before."""

    def __init__(self, wide: WideGradients, work: Work, received: torch.Tensor, output: torch.Tensor) -> None:
        self._wide, self._work, self._received, self._output = wide, work, received, output

    def wait(self) -> None:
        self._work.wait()
        self._wide.add(self._received, self._output)
