"""Rounds: the atoms of one rank in the order in which they travel, in rounds of limited size. Integers only.

::

    tensors    a                b                  c
    slices     a[0]  a[1]  a[2] b                  c           a large tensor is cut into several windows
    rounds     --0-- --1-- --2------               --3--       on no rank, a round needs more than the budget
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from torch_ragged.transfer._atoms import Atom, Copy, Window, atoms_of, windows_of, within
from torch_ragged.transfer._sides import Side

__all__ = ["Slice", "rounds_of", "slices_of", "wire_dtype"]


_STRAIGHT_BYTES = 1 << 16
"""From this size on, a message of its own costs less than packing and unpacking."""


class Slice(NamedTuple):
    """A tensor, or a window of a large one, as one rank sees it.

    ``dtype`` is that of the elements on their way, ``target_dtype`` that of the target. ``casts`` is whether the source or the
    target has another one than ``dtype``. ``stretches`` is what the rank stages of its local tensors, by their keys: intervals
    ``[start, stop)`` of elements. ``staging`` is the bytes that the rank needs for all buffers.
    """

    name: str
    dtype: torch.dtype
    target_dtype: torch.dtype
    atoms: tuple[Atom, ...]
    copies: tuple[Copy, ...]
    casts: bool
    stretches: tuple[tuple[str | None, int, int], ...] = ()
    staging: int = 0

    def goes_straight(self, atom: Atom) -> bool:
        """Whether an atom travels from local tensor to local tensor without buffers. Equal on all its ranks."""
        return not self.casts and atom.numel * self.dtype.itemsize >= _STRAIGHT_BYTES and atom.is_contiguous


def wire_dtype(source: torch.dtype, target: torch.dtype) -> torch.dtype:
    """The smaller of two dtypes: casts to fewer bytes are made by the sender, others by the receiver."""
    return target if target.itemsize <= source.itemsize else source


def slices_of(
    source: Side,
    target: Side,
    shapes: Mapping[str, tuple[int, ...]],
    rank: int,
    budget: int,
    finer: int = 1,
    staged: Collection[str] = (),
    packs_all: bool = False,
) -> list[Slice]:
    """The slices of all tensors; ranks have them in the same order, with their own atoms.

    Args:
        shapes: of the whole tensors, by name.
        budget: bytes of the buffers of one round. A tensor is cut if a rank might need more for it.
        finer: cut into smaller windows by this factor.
        staged: the tensors whose windows are copied before they are read.
        packs_all: count buffers for what goes straight, too, and those in which element deltas are made.

    Raises:
        ValueError: the budget is too small for one element.
    """
    spreads = len(target.ranks) > len(source.ranks)
    # By itemsize, because a round has one: its buffers have one dtype. Not known: whether an order of large to small gains
    # anything.
    names = sorted(shapes, key=lambda name: -wire_dtype(source.dtype(name), target.dtype(name)).itemsize)
    known: dict[object, tuple[tuple[Atom, ...], tuple[Copy, ...]]] = {}
    slices = []
    for name in names:
        dtype, shape = wire_dtype(source.dtype(name), target.dtype(name)), shapes[name]
        # A spread element is sent and received at most twice on one rank; a direct one is sent to at most all replicas.
        needed = (4 if spreads else 1 + target.replicas(name)) * dtype.itemsize * (1 + packs_all)
        if name in staged:
            needed += source.dtype(name).itemsize
        if needed > budget and 0 not in shape:
            raise ValueError(
                f"max_bytes is too small: {name} needs at least {2 * needed} bytes for one element "
                f"of {dtype}, sent to {target.replicas(name)} replicas"
            )
        # A stretch may be longer than its window, so that one tensor needs finer windows than this bound. Those of others stay
        # at one element at least.
        for window in windows_of(shape, max(budget // (finer * needed), 1)):
            # A model has many tensors that lie alike: they share their atoms. Windows follow from shapes and the budget, so
            # that the n-th slice is the same one on all ranks.
            key: object = (source.geometry(name), target.geometry(name), window)
            if key not in known:
                known[key] = atoms_of(source, target, name, rank, window, spreads)
            stretches = tuple(_window_stretches(source, name, rank, window)) if name in staged else ()
            casts = source.dtype(name) != target.dtype(name)
            found = Slice(name, dtype, target.dtype(name), *known[key], casts, stretches)
            packed = sum(_packed_numel(atom, rank) for atom in found.atoms if packs_all or not found.goes_straight(atom))
            if packs_all:  # A delta is never longer than its atom. The sender makes it, and then packs it.
                packed += sum(atom.numel for atom in found.atoms if atom.sender == rank)
            copied = sum(stop - start for _, start, stop in stretches)
            slices.append(found._replace(staging=dtype.itemsize * packed + source.dtype(name).itemsize * copied))
    return slices


def _window_stretches(source: Side, name: str, rank: int, window: Window | None) -> Iterator[tuple[str | None, int, int]]:
    """Where the elements of a window lie in the local tensors of ``rank``: a window is one stretch of each."""
    for holder in source.held_by(name, rank):
        boxes = [box for box in within(holder.owned, window).boxes if box.numel]
        if boxes:
            last = [box.local_offset + sum((n - 1) * step for n, step in zip(box.sizes, box.local_strides)) for box in boxes]
            yield holder.key, min(box.local_offset for box in boxes), max(last) + 1


def _packed_numel(atom: Atom, rank: int) -> int:
    """The elements in buffers of ``rank``: sent, received, and passed on."""
    if atom.sender != rank and atom.receivers[0] == rank:
        return atom.numel * len(atom.receivers)
    return atom.numel


def rounds_of(itemsizes: Sequence[int], staging: torch.Tensor, budget: int) -> list[range]:
    """Ranges of slices such that in each range, all elements have one size and no rank needs more than ``budget`` bytes.

    Args:
        itemsizes: of each slice, in bytes.
        staging: int64 ``(slices, ranks)``: the bytes that each rank needs for each slice.
    """
    rounds, start = [], 0
    held = torch.zeros_like(staging[0]) if itemsizes else staging
    for i, (itemsize, needed) in enumerate(zip(itemsizes, staging)):
        total = held + needed
        # A round has one slice at least. Plan._scheduled() has cut windows until each fits alone.
        if i > start and (itemsize != itemsizes[start] or int(total.max()) > budget):
            rounds.append(range(start, i))
            start, total = i, needed
        held = total
    return [*rounds, range(start, len(itemsizes))] if itemsizes else []
