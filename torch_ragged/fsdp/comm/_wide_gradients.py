"""Reduce-scatters that send the narrow dtype of backward and add in a wider one, and the gradients that came wide already."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch

from torch_ragged.fsdp.comm._collectives import Collectives, Then, Work, wait_all
from torch_ragged.fsdp.comm._reduction import Reduction
from torch_ragged.fsdp.layout._buffer_layout import BufferLayout

__all__ = ["WideGradients"]

_LARGEST_PART = 1 / 16
"""Wide gradients are few if they are at most this fraction of their group's buffer."""


class WideGradients:
    """The gradients of one backward pass that are wider than their group's buffer, which would round them.

    They are kept beside the buffer. A second reduce-scatter sends them, cut at the boundaries of the group's shards.

    ::

        the group's buffer     | x x a a | a x x x | x x x b | x x x x |      a and b are wide gradients
        the second buffer      | a a | a . | b . | . . |                      one part per rank, padded to the longest part

    ``indices``: the parameters that may have wide gradients, the same on all ranks.
    """

    def __init__(self, layout: BufferLayout, rank: int, indices: Sequence[int]) -> None:
        self._layout, self._rank, self._indices = layout, rank, frozenset(indices)
        self.kept: dict[int, torch.Tensor] = {}  # By parameter. Ranks may differ.
        # Of all ranks, because this rank packs its gradients for each of them.
        self._intervals = [_gradient_intervals(layout, each, indices) for each in range(layout.ranks)]
        # The longest part on any rank: a reduce-scatter has parts of one size.
        self._part = max(sum(stop - start for _, _, start, stop in intervals) for intervals in self._intervals)
        # Whether sending or keeping them beside the other gradients costs little. Equal on all ranks, as the layout and the
        # indices are. It depends on no gradient: these may differ between ranks.
        self.are_few = self._part * layout.ranks <= layout.numel * _LARGEST_PART

    def keep(self, index: int, gradient: torch.Tensor) -> None:
        kept = self.kept.get(index)
        # Not in place: a hook of the user may have kept the first gradient.
        self.kept[index] = gradient if kept is None else kept + gradient

    @property
    def are_many(self) -> bool:
        """Whether a wide buffer for the whole group costs less than keeping them beside it."""
        # A rank decides this alone: it changes where the rank accumulates, and no collective.
        return not self.are_few and sum(each.numel() for each in self.kept.values()) > self._layout.numel * _LARGEST_PART

    def popped(self, only_unexpected: bool = False) -> Iterator[tuple[int, torch.Tensor]]:
        """The parameters and their gradients, which are dropped. ``only_unexpected``: those that other ranks do not expect."""
        for index in list(self.kept):
            if not (only_unexpected and index in self._indices):
                yield index, self.kept.pop(index)

    def allow_narrow(self, collectives: Collectives, device: torch.device) -> bool:
        """Whether gradients need no cast to the wide dtype before the reduce-scatter. Equal on all ranks."""
        return self.are_few and collectives.reduce_scatter_traits(device).adds_wide

    def reduce_scatter(
        self, collectives: Collectives, output: torch.Tensor, buffer: torch.Tensor, reduction: Reduction
    ) -> Work:
        """Reduce the narrow ``buffer`` and, by a second reduce-scatter, what is kept. ``wait()`` adds both in ``output``."""
        narrow = collectives.reduce_scatter(output, buffer, reduction)
        if not self._part:  # No rank has an element of a wide gradient.
            return narrow
        received = output.new_empty(self._part)
        # Zeros: a rank without some of the gradients must still take part for the other ranks.
        packed = received.new_zeros(len(self._intervals) * self._part)
        wide = dict(self.popped())
        for part, intervals in zip(packed.split(self._part), self._intervals):
            for index, offset, start, stop in intervals:
                if index in wide:
                    part[offset : offset + stop - start] = wide[index].reshape(-1)[start:stop]
        work = collectives.reduce_scatter(received, packed, reduction)
        # wait_all() waits in this order, so that the addition reads both results.
        return wait_all([narrow, Then(work, functools.partial(self._add, received, output))])

    def _add(self, received: torch.Tensor, output: torch.Tensor) -> None:
        for index, offset, start, stop in self._intervals[self._rank]:
            first = self._layout.offsets[index] + start - self._layout.edges[self._rank]
            output[first : first + stop - start].add_(received[offset : offset + stop - start])


def _gradient_intervals(layout: BufferLayout, rank: int, indices: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """The pieces of gradients in the shard of ``rank``: parameter, offset in the part, start and stop in the gradient."""
    intervals, offset = [], 0
    for index in indices:
        start, stop = layout.local_range(index, rank)
        if stop > start:
            intervals.append((index, offset, start, stop))
            offset += stop - start
    return intervals
