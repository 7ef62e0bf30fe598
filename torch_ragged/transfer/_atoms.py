"""Atoms: the elements that one rank sends to others in a transfer. Integers only: no processes, no tensors.

If one holder of the source and one holder of the target have elements in common, these are a *region*. The ranks of the target
that do not hold the region in the source too are its receivers. An atom is a region, or a part of it, on its way::

    direct     0 -> 4      0 -> 5          each receiver gets the region from a rank of the source
    spread     0 -> 4 -> 5                 each receiver gets one part of the region from the source,
               0 -> 5 -> 4                 and then the other parts from the other receivers

Every receiver gets each element once. Ranks of the source send each element once if regions are spread.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch_ragged.tensor._exchange import Common, Part, clipped, common, merged_parts, parts_on, parts_within
from torch_ragged.tensor._ownership import Owned
from torch_ragged.transfer._sides import Holder, Side

__all__ = ["Atom", "Copy", "Window", "atoms_of", "windows_of", "within"]

Window = tuple[tuple[int, ...], tuple[int, ...]]  # Offsets and sizes of a box of the tensor.


class Atom(NamedTuple):
    """Elements on their way from ``sender`` to ``receivers``; the first receiver passes them on to the others.

    ``source`` are parts of the sender's local tensor, ``target`` are parts of each receiver's, with elements in the same order.
    """

    sender: int
    receivers: tuple[int, ...]
    numel: int
    source_key: str | None
    target_key: str | None
    source: tuple[Part, ...]
    target: tuple[Part, ...]

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements are one stretch of memory on both ends."""
        return all(len(parts) == 1 and parts[0].is_contiguous for parts in (self.source, self.target))


class Copy(NamedTuple):
    """Elements that a rank holds before and after."""

    source_key: str | None
    target_key: str | None
    boxes: tuple[Common, ...]


@dataclass(frozen=True)
class _SharedRegion:
    """The elements that a holder of the source and a holder of the target have in common."""

    source: Holder
    target: Holder
    shared: list[Common]

    @property
    def order(self) -> tuple[object, ...]:
        """Sorts the regions of a tensor in the same way on all ranks."""
        return (self.source.ranks, self.target.ranks, self.target.key or "", self.target.owned.boxes[0].local_offset)

    @functools.cached_property
    def receivers(self) -> tuple[int, ...]:
        # A rank with these elements on both sides copies them, and receives nothing.
        have = set(self.source.ranks)
        return tuple(rank for rank in self.target.ranks if rank not in have)

    def atoms(self, spreads: bool) -> Iterator[Atom]:
        senders, receivers = self.source.ranks, self.receivers
        # Other regions start with another sender, so that the senders of many regions get about equal loads.
        turn, numel = sum(self.target.ranks) % len(senders), sum(each.numel for each in self.shared)
        both, keys = [parts_on(self.shared, side) for side in (0, 1)], (self.source.key, self.target.key)
        for i, receiver in enumerate(receivers):
            sender = senders[(turn + i) % len(senders)]
            # If there are as many senders as receivers, each receiver has one of its own: passing on would only add messages.
            if not spreads or len(receivers) <= len(senders):
                yield Atom(sender, (receiver,), numel, *keys, *both)
                continue
            start, stop = (numel * j // len(receivers) for j in (i, i + 1))
            if start < stop:
                # Both sides cut the region at the same elements, as their parts have them in one order.
                pieces = [merged_parts(parts_within(parts, start, stop)) for parts in both]
                yield Atom(sender, (receiver, *receivers[:i], *receivers[i + 1 :]), stop - start, *keys, *pieces)


def atoms_of(
    source: Side, target: Side, name: str, rank: int, window: Window | None, spreads: bool
) -> tuple[tuple[Atom, ...], tuple[Copy, ...]]:
    """What ``rank`` sends, passes on and receives of a tensor, and what it copies, within a box of it.

    All ranks of an atom have it in the same order among the atoms of the tensor.

    Args:
        window: a box of the tensor; None: the whole tensor.
        spreads: whether a region with more receivers than senders is passed on between its receivers.
    """
    # First the regions that this rank may send, then those that it lacks. Regions of which it is only one of several possible
    # senders are here, too: atoms() chooses the sender by the ranks of both sides, equally everywhere.
    regions: list[_SharedRegion] = []
    copies = []
    for holder in source.held_by(name, rank):
        piece = within(holder.owned, window)
        for other in target.near(name, piece):
            if shared := common(piece, other.owned):
                regions.append(_SharedRegion(holder, other, shared))
                if rank in other.ranks:
                    copies.append(Copy(holder.key, other.key, tuple(shared)))
    for holder in target.held_by(name, rank):
        piece = within(holder.owned, window)
        for other in source.near(name, piece):
            # If this rank is among the holders, it was found above.
            if rank not in other.ranks and (shared := common(other.owned, piece)):
                regions.append(_SharedRegion(other, holder, shared))
    regions.sort(key=lambda region: region.order)
    atoms = (atom for region in regions for atom in region.atoms(spreads))
    return tuple(atom for atom in atoms if atom.sender == rank or rank in atom.receivers), tuple(copies)


def within(piece: Owned, window: Window | None) -> Owned:
    """What of a local tensor lies in the window."""
    if window is None:
        return piece
    boxes = tuple(filter(None, [clipped(box, *window) for box in piece.boxes]))
    return Owned((sum(box.numel for box in boxes),), boxes, flat=True)


def windows_of(shape: Sequence[int], numel: int) -> list[Window | None]:
    """Boxes that cut a tensor of ``shape`` into consecutive stretches of its storage, of at most ``numel`` elements each.

    They are slices of one dimension, of each index of the dimensions before it: few, and simple to intersect::

        shape (4, 6), numel 14        rows 0, 1 | rows 2, 3
        shape (4, 6), numel 4         row 0: columns 0 to 3 | row 0: columns 4, 5 | row 1: ...
    """
    if math.prod(shape) <= numel:
        return [None]
    dim = next(d for d in range(len(shape)) if math.prod(shape[d + 1 :]) <= numel)
    rows = numel // math.prod(shape[dim + 1 :])
    windows: list[Window | None] = []
    for before in itertools.product(*map(range, shape[:dim])):
        for start in range(0, shape[dim], rows):
            sizes = (*(1,) * dim, min(rows, shape[dim] - start), *shape[dim + 1 :])
            windows.append(((*before, start, *(0,) * (len(shape) - dim - 1)), sizes))
    return windows
