"""Transfer plans: the parts that one rank packs, sends, receives and unpacks to change the placements of a tensor.

A plan follows from ownership alone and must not depend on tensors or processes. It is a sequence of steps, each with at most
one collective. Most steps change one mesh dimension while the other dimensions keep their cuts. Such a step is a 1-D
problem on the piece of the tensor that the other dimensions leave. If both sides cut that piece into consecutive
stretches of its storage (RaggedShard, Shard(0)), the splits follow from the boundaries, and nothing is packed::

    before | 0 0 0 1 1 1 2 2 2 |     rank 0 sends 1 element to itself and 2 to rank 1,
    after  | 0 1 1 1 1 1 1 2 2 |     rank 2 sends 1 to rank 1 and 2 to itself

If one side cuts columns (``Shard(d)``), storage order is kept too, and a rank's stretch is spread over the columns' owners.
Only strided cuts, and exchanges over several mesh dimensions, are computed box by box.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, Union

from torch_ragged.tensor._exchange import Common, Part, common, merged_parts, part_of, parts_on
from torch_ragged.tensor._ownership import (
    Chunk,
    Cut,
    Owned,
    Run,
    Whole,
    check_cuts,
    is_nested,
    owned,
    owned_near,
    piece_shape,
)
from torch_ragged.tensor._units import Units

__all__ = [
    "Exchange",
    "Fill",
    "Gather",
    "Move",
    "Reduce",
    "Route",
    "Slab",
    "Step",
    "most_of_slab",
]


_FEW = 64  # ranks
_MOST_SLABS = 16
_SMALLEST_SLAB = 2**20
"""Elements. More slabs need less memory beside the whole, and more collectives: slabs of a quarter take half as long again."""


@dataclass(frozen=True)
class Move:
    """No communication: ``sends`` of the old local tensor become ``receives`` of the new one.

    If ``stays``, the new local tensor is an alias of the old one.
    """

    sends: tuple[Part, ...]
    receives: tuple[Part, ...]
    local_shape: tuple[int, ...]
    stays: bool = False


@dataclass(frozen=True)
class Exchange:
    """One uneven all-to-all over ``mesh_dims``: an element travels only if its owner changes.

    ``send_splits[p]`` elements of the packed ``sends`` go to peer ``p``. ``receive_splits[p]`` elements come from peer ``p``.
    They fill ``receives`` of the new local tensor in order.
    """

    mesh_dims: tuple[int, ...]
    send_splits: Sequence[int]
    receive_splits: Sequence[int]
    sends: tuple[Part, ...]
    receives: tuple[Part, ...]
    local_shape: tuple[int, ...]


class Slab(NamedTuple):
    """The stretch ``[start, stop)`` of a gathered storage: it has ``splits[p]`` elements of peer ``p``, of this rank ``sends``.

    ``receives`` are parts of a tensor that holds only this stretch.
    """

    start: int
    stop: int
    splits: Sequence[int]
    sends: tuple[Part, ...]
    receives: tuple[Part, ...]


@dataclass(frozen=True)
class Gather:
    """Every rank of ``mesh_dim`` gets the ``sends`` of all ranks: ``splits[p]`` elements of peer ``p`` fill ``receives``.

    The old local tensor is what ``cut`` gives to ``rank`` of a piece of ``shape``, the new one is that piece.
    """

    mesh_dim: int
    splits: Sequence[int]
    sends: tuple[Part, ...]
    receives: tuple[Part, ...]
    local_shape: tuple[int, ...]
    rank: int
    shape: tuple[int, ...]
    cut: Cut

    @functools.cached_property
    def is_straight(self) -> bool:
        """Whether the shards, one after another, are the new local tensor. Equal on all ranks of ``mesh_dim``."""
        return not self.receives or (len(self.receives) == 1 and self.receives[0].is_contiguous)

    @functools.cached_property
    def skew(self) -> float:
        """The largest shard over the mean one: 1 if shards are even."""
        total = math.prod(self.shape)
        return max(self.splits) * len(self.splits) / total if total else 1

    @functools.cached_property
    def slabs(self) -> tuple[Slab, ...]:
        """The all-gather as several of less memory: equal ones on all ranks of ``mesh_dim``, and at most 16 or so."""
        numel, shape = math.prod(self.shape), self.shape
        count = min(numel // _SMALLEST_SLAB, _MOST_SLABS)
        if self.is_straight or count < 2:
            return (Slab(0, numel, self.splits, self.sends, self.receives),)
        # If slabs end with whole rows of columns, the shards of a slab are as even as those of the whole.
        row = next((math.prod(shape[dim:]) for dim in range(len(shape)) if math.prod(shape[:dim]) >= 4 * count), 1)
        edges = [*range(0, numel, -(-numel // row // count) * row), numel]
        size, rank = len(self.splits), self.rank
        return tuple(_slab(shape, self.cut, size, rank, start, stop) for start, stop in itertools.pairwise(edges))


def most_of_slab(numel: int) -> int:
    """The most elements of a slab of a tensor, or of a piece of it: more than that many are never put in order at a time."""
    return max(numel // _MOST_SLABS, 2 * _SMALLEST_SLAB) * 5 // 4


@dataclass(frozen=True)
class Reduce:
    """Reduce over ``mesh_dim`` by ``operation``, straight onto owners: peer ``p`` gets ``splits[p]`` of the ``sends``.

    The reduced elements fill ``receives``. If ``splits`` is None, all ranks get all elements (all-reduce).
    """

    mesh_dim: int
    operation: str
    splits: Sequence[int] | None
    sends: tuple[Part, ...]
    receives: tuple[Part, ...]
    local_shape: tuple[int, ...]


@dataclass(frozen=True)
class Fill:
    """No communication: make a local tensor that is whole on ``mesh_dim``: this rank's part, and the identity elsewhere.

    If ``was_whole``, the old local tensor was whole too, so one rank's contribution may be enough.
    """

    mesh_dim: int
    operation: str
    was_whole: bool
    sends: tuple[Part, ...]
    receives: tuple[Part, ...]
    local_shape: tuple[int, ...]


Step = Union[Move, Exchange, Gather, Reduce, Fill]


class Route:
    """The steps from one set of cuts to another, for the rank at ``coordinate``; one method call builds each step.

    Every rank of the mesh builds the same kinds of steps in the same order, because they depend on cuts and not on coordinates.
    """

    def __init__(
        self, shape: tuple[int, ...], mesh_shape: tuple[int, ...], coordinate: tuple[int, ...], cuts: Sequence[Cut]
    ) -> None:
        self.shape, self.mesh_shape, self.coordinate = shape, mesh_shape, coordinate
        self.cuts = tuple(cuts)
        self.steps: list[Step] = []

    def replace(self, mesh_dim: int, cut: Cut) -> tuple[Cut, ...]:
        """The current cuts with another one on ``mesh_dim``."""
        return (*self.cuts[:mesh_dim], cut, *self.cuts[mesh_dim + 1 :])

    def is_free(self, mesh_dim: int, cuts: Sequence[Cut]) -> bool:
        """Whether ``cuts`` are legal, and another cut of ``mesh_dim`` would not change ownership on other mesh dimensions."""
        if any(is_nested(inner, cuts[mesh_dim]) for inner in cuts[mesh_dim + 1 :]):
            return False
        if any(_depends(outer, cuts[mesh_dim]) for outer in cuts[:mesh_dim]):
            return False
        try:
            check_cuts(self.shape, self.mesh_shape, tuple(cuts))
        except ValueError:
            return False
        return True

    # -- steps -----------------------------------------------------------------------------------------------------

    def move(self, target: tuple[Cut, ...]) -> None:
        """Change ownership to ``target``: by no step, by a local step, by all-gathers, or by one exchange."""
        if target == self.cuts:
            return
        changed = [i for i, (old, new) in enumerate(zip(self.cuts, target)) if old != new]
        affected = [
            j
            for j in range(len(target))
            if j in changed
            or any(i < j and (is_nested(self.cuts[j], self.cuts[i]) or is_nested(target[j], target[i])) for i in changed)
            or any(j < i and (_depends(self.cuts[j], self.cuts[i]) or _depends(target[j], target[i])) for i in changed)
        ]
        crossed = [i for i in affected if not isinstance(self.cuts[i], Whole) and self.mesh_shape[i] > 1]
        if not crossed:
            self._cut(target)
        elif affected == changed == crossed and all(isinstance(target[i], Whole) for i in changed):
            # The last cut is all-gathered first, so that each all-gather is orthogonal to the remaining cuts. A strided run is
            # orthogonal to the chunks that select its pieces, and contiguous as long as they do: it comes before these chunks.
            for i in sorted(changed, key=lambda i: (not _is_strided(self.cuts[i]), -i)):
                self._gather(i)
        elif affected == changed == crossed and len(changed) == 1:
            self._exchange_dim(changed[0], target)
        else:
            self._exchange(tuple(crossed), target)
        last = self.steps[-1]
        if isinstance(last, Move) and last.stays and not self._stay_elsewhere(crossed, affected, target):
            # Alias only if all ranks can. Otherwise an in-place op on the result would change the source on some ranks.
            everything = _everything(math.prod(last.local_shape))
            self.steps[-1] = Move(everything, everything, last.local_shape)
        self.cuts = target

    def reduce(self, mesh_dim: int, operation: str, cut: Cut) -> None:
        """Reduce the pending values on ``mesh_dim`` onto their owners under ``cut``."""
        local_shape = self._owned(self.replace(mesh_dim, cut)).local_shape
        if isinstance(cut, Whole):
            everything = _everything(math.prod(local_shape))
            self.steps.append(Reduce(mesh_dim, operation, None, everything, everything, local_shape))
            return
        size, rank = self.mesh_shape[mesh_dim], self.coordinate[mesh_dim]
        shape, cut_of_piece = self._piece(mesh_dim, cut)
        back = _slab(shape, cut_of_piece, size, rank, 0, math.prod(shape))  # The all-gather that would undo it.
        self.steps.append(Reduce(mesh_dim, operation, back.splits, back.receives, back.sends, local_shape))
        self.cuts = self.replace(mesh_dim, cut)

    def fill(self, mesh_dim: int, operation: str) -> None:
        """Make the tensor pending on ``mesh_dim``: each rank contributes the elements that it holds."""
        target = self.replace(mesh_dim, Whole())
        here, there = self._owned(self.cuts), self._owned(target)
        shared, was_whole = common(here, there), isinstance(self.cuts[mesh_dim], Whole)
        self.steps.append(Fill(mesh_dim, operation, was_whole, parts_on(shared, 0), parts_on(shared, 1), there.local_shape))
        self.cuts = target

    def _cut(self, target: tuple[Cut, ...]) -> None:
        """Each rank selects its new elements from those that it holds. No communication."""
        here, there = self._owned(self.cuts), self._owned(target)
        shared, stays = common(here, there), _contents(here) == _contents(there)
        self.steps.append(Move(parts_on(shared, 0), parts_on(shared, 1), there.local_shape, stays))

    def _gather(self, mesh_dim: int) -> None:
        size, rank = self.mesh_shape[mesh_dim], self.coordinate[mesh_dim]
        shape, cut = self._piece(mesh_dim, self.cuts[mesh_dim])
        target = self.replace(mesh_dim, Whole())
        parts = _slab(shape, cut, size, rank, 0, math.prod(shape))[2:]
        self.steps.append(Gather(mesh_dim, *parts, self._owned(target).local_shape, rank, shape, cut))
        self.cuts = target

    def _exchange_dim(self, mesh_dim: int, target: tuple[Cut, ...]) -> None:
        """An exchange on one mesh dimension; the cuts of all other mesh dimensions are orthogonal to it."""
        size, rank = self.mesh_shape[mesh_dim], self.coordinate[mesh_dim]
        local_shape = self._owned(target).local_shape
        shape, before = self._piece(mesh_dim, self.cuts[mesh_dim])
        same_shape, after = self._piece(mesh_dim, target[mesh_dim])
        assert shape == same_shape
        old, new = (_stretches(shape, cut, size) for cut in (before, after))
        old_columns, new_columns = (_columns(shape, cut, size) for cut in (before, after))
        step: Step
        if old is not None and new is not None:
            step = _exchange_stretches(mesh_dim, old, new, rank, local_shape)
        elif old is not None and new_columns is not None:
            step = _exchange_columns(mesh_dim, old, new_columns, rank, local_shape, to_columns=True)
        elif new is not None and old_columns is not None:
            step = _exchange_columns(mesh_dim, new, old_columns, rank, local_shape, to_columns=False)
        else:
            held, wanted = ([owned(shape, (size,), (cut,), (p,)) for p in range(size)] for cut in (before, after))
            if [*map(_contents, held)] == [*map(_contents, wanted)]:  # Equal on all ranks: each checks all peers.
                step = Move((), (), local_shape, stays=True)
            else:
                sends = {peer: common(held[rank], other) for peer, other in enumerate(wanted)}
                receives = {peer: common(other, wanted[rank]) for peer, other in enumerate(held)}
                step = _exchange_of((mesh_dim,), size, sends, receives, local_shape)
        self.steps.append(step)

    def _exchange(self, mesh_dims: tuple[int, ...], target: tuple[Cut, ...]) -> None:
        """An exchange among the ranks that differ only in ``mesh_dims``, in row-major order over ``mesh_dims``."""
        here, there = self._owned(self.cuts), self._owned(target)
        if self._all_stay(mesh_dims, target):
            self.steps.append(Move((), (), there.local_shape, stays=True))
            return
        size = math.prod(self.mesh_shape[i] for i in mesh_dims)
        near = functools.partial(owned_near, self.shape, self.mesh_shape)
        sends = {peer: common(here, after) for peer, after in near(target, self.coordinate, mesh_dims, here)}
        receives = {peer: common(before, there) for peer, before in near(self.cuts, self.coordinate, mesh_dims, there)}
        self.steps.append(_exchange_of(mesh_dims, size, sends, receives, there.local_shape))

    def _stay_elsewhere(self, crossed: Sequence[int], affected: Sequence[int], target: tuple[Cut, ...]) -> bool:
        """Whether every rank keeps its elements, if the ranks that differ from this one only in ``crossed`` do."""
        elsewhere = {i: size for i, size in enumerate(self.mesh_shape) if size > 1 and i not in crossed}
        if not any(i in affected or isinstance(self.cuts[i], Run) for i in elsewhere):
            # Of chunks, the first rank has the largest and the last rank the smallest. If they are alike, so are all groups.
            others = tuple(Whole() if i in crossed else cut for i, cut in enumerate(self.cuts))
            first = tuple(0 if i in elsewhere else here for i, here in enumerate(self.coordinate))
            last = tuple(elsewhere.get(i, here + 1) - 1 for i, here in enumerate(self.coordinate))
            if len({piece_shape(self.shape, self.mesh_shape, others, where) for where in (first, last)}) == 1:
                return True
        return self._all_stay(range(len(target)), target)

    def _all_stay(self, mesh_dims: Sequence[int], target: tuple[Cut, ...]) -> bool:
        """Whether no rank that differs from this one only in ``mesh_dims`` owns another element than before.

        It is equal on all these ranks, because each rank checks every peer until one differs.
        """
        ranges = [range(size) if i in mesh_dims else (self.coordinate[i],) for i, size in enumerate(self.mesh_shape)]
        pairs = (
            [owned(self.shape, self.mesh_shape, cuts, where) for cuts in (self.cuts, target)]
            for where in itertools.chain([self.coordinate], itertools.product(*ranges))
        )
        return all(_contents(before) == _contents(after) for before, after in pairs)

    # -- geometry --------------------------------------------------------------------------------------------------

    def _owned(self, cuts: tuple[Cut, ...]) -> Owned:
        return owned(self.shape, self.mesh_shape, cuts, self.coordinate)

    def _piece(self, mesh_dim: int, cut: Cut) -> tuple[tuple[int, ...], Cut]:
        """The shape of the piece that the cuts of the other mesh dimensions leave, and ``cut`` in terms of that piece."""
        others = self.replace(mesh_dim, Whole())
        shape = piece_shape(self.shape, self.mesh_shape, others, self.coordinate)
        run = next((other for other in others if isinstance(other, Run)), None)
        if run is not None and isinstance(cut, Chunk):  # In the piece, the prefix that the run cuts is one dimension.
            return shape, replace(cut, dim=max(cut.dim - max(run.ndims, run.split_factor > 1) + 1, 0))
        if isinstance(cut, Run) and cut.split_factor > 1:
            inner = zip(self.cuts[mesh_dim + 1 :], self.mesh_shape[mesh_dim + 1 :])
            chosen = math.prod(n for each, n in inner if isinstance(each, Chunk) and each.dim == 0 and each.split_factor == 1)
            return shape, Run(cut.ndims, cut.units, cut.split_factor // chosen)
        return shape, cut


def _slab(shape: tuple[int, ...], cut: Cut, size: int, rank: int, start: int, stop: int) -> Slab:
    """The stretch ``[start, stop)`` of the storage of ``shape`` that ``cut`` gives to ``size`` ranks."""
    stretches, columns, numel = _stretches(shape, cut, size), _columns(shape, cut, size), math.prod(shape)
    if stretches is not None and stop - start == numel:
        splits = _splits(stretches)
        return Slab(start, stop, splits, _everything(splits[rank]), _everything(numel))
    if columns is not None:
        before, own = columns.counts(rank, (0, start, stop))
        sends = (Part(before, (own,), (1,)),) if own else ()
        return Slab(start, stop, columns.splits(start, stop), sends, columns.spread(start, stop))
    if stop - start == numel:
        whole = owned(shape, (), (), ())
    else:
        whole = owned(shape, (3,), (Run(len(shape), Units.of((start, stop - start, numel - stop))),), (1,))
    peers = {p: common(owned(shape, (size,), (cut,), (p,)), whole) for p in range(size)}
    receives = parts_on(itertools.chain(*peers.values()), 1)
    return Slab(start, stop, _numels(peers, size), parts_on(peers[rank], 0), receives)


# --- stretches of storage ------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _stretches(shape: tuple[int, ...], cut: Cut, size: int) -> Units | None:
    """The elements of each of ``size`` ranks if ``cut`` gives each rank one stretch of the storage of ``shape``, else None."""
    if isinstance(cut, Run) and cut.split_factor == 1:
        return cut.units.scaled(math.prod(shape) // cut.units.total)
    if isinstance(cut, Chunk) and cut.is_plain and math.prod(shape[: cut.dim]) == 1:
        rows, inner = shape[cut.dim], math.prod(shape[cut.dim + 1 :])
        step = -(-rows // size)
        return Units([(step, size)]).within(0, rows).scaled(inner)
    return None


def _differences(bounds: Sequence[int]) -> tuple[int, ...]:
    return tuple(map(operator.sub, bounds[1:], bounds))


def _splits(counts: Units) -> Sequence[int]:
    """The elements of each rank in the form that a step stores: for few ranks a tuple, which is faster to read; else runs."""
    return counts if len(counts) > _FEW else tuple(counts)


def _everything(numel: int) -> tuple[Part, ...]:
    return (Part(0, (numel,), (1,)),) if numel else ()


def _exchange_stretches(mesh_dim: int, old: Units, new: Units, rank: int, local_shape: tuple[int, ...]) -> Step:
    if old == new:
        return Move((), (), local_shape, stays=True)
    sends, receives = (_splits(b.within(a.before(rank), a.before(rank + 1))) for a, b in ((old, new), (new, old)))
    return Exchange((mesh_dim,), sends, receives, _everything(old[rank]), _everything(new[rank]), local_shape)


# --- columns -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Columns:
    """A storage of rows of ``row`` elements, all cut into the same columns: ``bounds`` within a row, one column per rank.

    A rank's local tensor holds its column of all rows, in storage order.
    """

    row: int
    bounds: tuple[int, ...]

    def counts(self, rank: int, bounds: Sequence[int]) -> tuple[int, ...]:
        """The number of elements of each stretch of storage between ``bounds`` that lie in the column of ``rank``."""
        row, first, last = self.row, self.bounds[rank], self.bounds[rank + 1]
        width = last - first
        # A conditional costs half as much as min and max, and there may be a thousand bounds.
        return _differences([x // row * width + (first if (c := x % row) < first else last if c > last else c) for x in bounds])

    def splits(self, start: int, stop: int) -> tuple[int, ...]:
        """The number of elements of the stretch ``[start, stop)`` that lie in the column of each rank."""
        row = self.row
        before, after, rows = start % row, stop % row, stop // row - start // row
        total = [rows * x + (x if x < after else after) - (x if x < before else before) for x in self.bounds]
        return _differences(total)

    def spread(self, start: int, stop: int) -> tuple[Part, ...]:
        """The stretch ``[start, stop)`` as parts of a tensor that holds only this stretch: rank by rank, each in storage order.

        If the stretch starts or stops inside a column, the column gives up to three parts. Neighbours in the same rows are one
        part::

            columns  0 0 1 1 2 2 3 3     column 0 is one part, column 1 two parts,
                           x x x x x     columns 2 and 3 are one
                     x x x x x x x x
        """
        row, width = self.row, self.bounds[1]
        begin, end, last = start % row, stop % row, stop // row - start // row
        parts: list[Part] = []

        def add(column: int, columns: int, width: int, first: int, rows: int) -> None:
            if width > 0 and rows > 0:
                parts.append(part_of(first * row + column - begin, (columns, rows, width), (width, row, 1)))

        edges = sorted({0, *(x // width for x in (begin, end, row)), *(-(-x // width) for x in (begin, end, row))})
        for low, high in zip(edges, edges[1:]):
            a, b = low * width, min(low * width + width, row)
            if a < begin < b or a < end < b:
                add(max(a, begin), 1, (b if last else min(b, end)) - max(a, begin), 0, 1)
                add(a, 1, b - a, 1, last - 1)
                add(a, 1, min(b, end) - a, last, min(last, 1))
            else:
                first = int(a < begin)
                add(a, high - low, b - a, first, last + (a < end) - first)
        return merged_parts(parts)


@lru_cache(maxsize=4096)
def _columns(shape: tuple[int, ...], cut: Cut, size: int) -> _Columns | None:
    """The columns into which ``cut`` cuts the storage of ``shape``; None if it cuts stretches or the storage is empty."""
    if not isinstance(cut, Chunk) or not cut.is_plain or not math.prod(shape) or math.prod(shape[: cut.dim]) == 1:
        return None
    width, inner = shape[cut.dim], math.prod(shape[cut.dim + 1 :])
    step = -(-width // size)
    full = width // step
    bounds = range(0, (full + 1) * step * inner, step * inner)  # At most one more than the ranks.
    return _Columns(width * inner, (*bounds, *(width * inner,) * (size + 1 - len(bounds))))


def _exchange_columns(
    mesh_dim: int, stretches: Units, columns: _Columns, rank: int, local_shape: tuple[int, ...], to_columns: bool
) -> Step:
    """An exchange from stretches of storage to columns, or back."""
    rows, widths = stretches.total // columns.row, _differences(columns.bounds)
    bounds = [0, *itertools.accumulate(stretches)]
    if all(
        length == rows * width and columns.counts(p, bounds[p : p + 2]) == (length,)
        for p, (length, width) in enumerate(zip(stretches, widths))
    ):
        return Move((), (), local_shape, stays=True)
    start, stop = bounds[rank], bounds[rank + 1]
    of_stretch = (columns.splits(start, stop), columns.spread(start, stop))
    of_columns = columns.counts(rank, bounds)
    everything = _everything(sum(of_columns))
    if to_columns:
        return Exchange((mesh_dim,), of_stretch[0], of_columns, of_stretch[1], everything, local_shape)
    return Exchange((mesh_dim,), of_columns, of_stretch[0], everything, of_stretch[1], local_shape)


# --- boxes ---------------------------------------------------------------------------------------------------------


def _exchange_of(
    mesh_dims: tuple[int, ...],
    size: int,
    sends: dict[int, list[Common]],
    receives: dict[int, list[Common]],
    local_shape: tuple[int, ...],
) -> Step:
    """The exchange of the common parts with each of ``size`` peers, in ascending order; peers without any may be missing."""
    return Exchange(
        mesh_dims,
        _numels(sends, size),
        _numels(receives, size),
        parts_on(itertools.chain(*sends.values()), 0),
        parts_on(itertools.chain(*receives.values()), 1),
        local_shape,
    )


def _depends(run: Cut, segments: Cut) -> bool:
    """Whether a strided run cuts what ``segments`` of dimension 0, on a mesh dimension to its right, leave (``in_order``)."""
    return _is_strided(run) and isinstance(segments, Chunk) and segments.dim == 0 and bool(segments.ratios)


def _is_strided(cut: Cut) -> bool:
    return isinstance(cut, Run) and cut.split_factor > 1


def _contents(piece: Owned) -> list[object]:
    """The boxes of a local tensor that hold elements; they do not depend on its number of dimensions."""
    return [box for box in piece.boxes if box.numel]


def _numels(peers: dict[int, list[Common]], size: int) -> tuple[int, ...]:
    numels = [0] * size
    for peer, found in peers.items():
        numels[peer] = sum(each.numel for each in found)
    return tuple(numels)
