"""Gathering whole matrices to their roots, computing there, and sending the results back, many matrices per collective.

One step, with two flights (``|`` waits)::

    gather 0   gather 1 | compute 0   scatter 0 | compute 1   scatter 1 | unpack 0 | unpack 1

Each gather and each scatter is one ``all_to_all_single`` over all ranks of the mesh, so that their number per step is at most
two per direction whatever the number of matrices (more only where ``max_root_bytes`` asks for it). A piece of a matrix travels
to the root from the root's own replica, and the result from the root to every rank that holds a piece. What a root holds itself
is copied, and a flight in which nothing moves issues no collective at all. This is Algorithm 2 of the paper (redistribute to
the root's RaggedShard, compute, redistribute back) with the transfers of many parameters packed together.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torch_ragged._ownership import Box, Cut, Owned, Run, Whole, owned, owned_near, row_major
from torch_ragged._redistribute import all_to_all, mesh_group
from torch_ragged._transfer import Part, common_parts
from torch_ragged.optim._roots import Stack

__all__ = ["Batch", "Compute", "GatherToRoot", "Placed", "Spot", "owners_of", "mesh_ranks"]


@dataclass(frozen=True)
class Placed:
    """How a parameter lies on a mesh: its global shape, the mesh's shape and a cut per mesh dimension."""

    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    cuts: tuple[Cut, ...]

    def owned(self, coordinate: tuple[int, ...]) -> Owned:
        """What the rank at ``coordinate`` holds."""
        return owned(self.shape, self.mesh_shape, self.cuts, coordinate)

    def matrix(self, position: int) -> Owned:
        """The matrix at ``position`` of the stack, as if a rank held just it."""
        sizes = (*(1 for _ in self.shape[:-2]), *self.shape[-2:])
        offsets = (*_coordinate(position, self.shape[:-2]), 0, 0)
        return Owned(sizes, (Box(offsets, sizes, 0, row_major(sizes)),), flat=False)

    def holders(self, position: int, coordinate: tuple[int, ...], replicas: bool) -> list[tuple[int, Owned]]:
        """The ranks that may hold a part of a matrix, and what they own: all, or those in the replica of ``coordinate``."""
        cut_dims = tuple(i for i, cut in enumerate(self.cuts) if replicas or not isinstance(cut, Whole))
        matrix = self.matrix(position)
        near = owned_near(self.shape, self.mesh_shape, self.cuts, coordinate, cut_dims, matrix)
        sizes = tuple(self.mesh_shape[i] for i in cut_dims)
        result = []
        for index, piece in near:
            where = list(coordinate)
            for dim, value in zip(cut_dims, _coordinate(index, sizes)):
                where[dim] = value
            result.append((_rank(where, self.mesh_shape), piece))
        return result

    @property
    def is_replicated(self) -> bool:
        """Whether some element lies on more than one rank."""
        return any(isinstance(cut, Whole) and size > 1 for cut, size in zip(self.cuts, self.mesh_shape))


def _coordinate(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The coordinate of row-major ``index`` in ``shape``."""
    result = []
    for size in reversed(shape):
        index, position = divmod(index, size)
        result.append(position)
    return tuple(reversed(result))


def _rank(coordinate: Sequence[int], mesh_shape: Sequence[int]) -> int:
    rank = 0
    for position, size in zip(coordinate, mesh_shape):
        rank = rank * size + position
    return rank


def mesh_ranks(mesh: DeviceMesh | None) -> tuple[int, int]:
    """This rank's row-major index in the mesh, and the number of ranks; (0, 1) without a mesh."""
    if mesh is None:
        return 0, 1
    return _rank(mesh.get_coordinate() or (), tuple(mesh.shape)), mesh.size()


def owners_of(placed: Placed) -> tuple[tuple[int, ...], ...] | None:
    """For each replica the rank that holds each matrix whole, if every matrix is whole somewhere; else None.

    Only owners that never descend count, as those of a stack at its roots do not.
    """
    count = math.prod(placed.shape[:-2])
    whole_dims = [i for i, cut in enumerate(placed.cuts) if isinstance(cut, Whole)]
    replicas = math.prod(placed.mesh_shape[i] for i in whole_dims)
    run = next((i for i, cut in enumerate(placed.cuts) if isinstance(cut, Run)), None)
    along = _owners_along(placed, run) if run is not None and len(whole_dims) == len(placed.cuts) - 1 else None
    result = []
    for replica in range(replicas):
        start = [0] * len(placed.mesh_shape)
        for dim, value in zip(whole_dims, _coordinate(replica, [placed.mesh_shape[i] for i in whole_dims])):
            start[dim] = value
        if along is None or run is None:
            owners = [_owner(placed, position, tuple(start)) for position in range(count)]
        else:
            owners = [None if o is None else _rank([*start[:run], o, *start[run + 1 :]], placed.mesh_shape) for o in along]
        if None in owners or owners != sorted(owners):  # type: ignore[type-var]
            return None
        result.append(tuple(owners))
    return tuple(result)  # type: ignore[arg-type]


def _owners_along(placed: Placed, mesh_dim: int) -> list[int | None] | None:
    """The owner of each matrix along the mesh dimension of a plain run, all others being whole; None for other cuts.

    :func:`_owner` finds the same, in a thousand times the time for a thousand ranks.
    """
    cut = placed.cuts[mesh_dim]
    if not isinstance(cut, Run) or cut.split_factor > 1:
        return None
    unit, size = math.prod(placed.shape) // cut.units.total, math.prod(placed.shape[-2:])
    owners: list[int | None] = []
    for start in range(0, size * math.prod(placed.shape[:-2]), max(size, 1)):
        rank = cut.units.owner(start // unit)
        owners.append(rank if start + size <= unit * cut.units.before(rank + 1) else None)
    return owners


def _owner(placed: Placed, position: int, coordinate: tuple[int, ...]) -> int | None:
    matrix = placed.matrix(position)
    for rank, piece in placed.holders(position, coordinate, replicas=False):
        shared = sum(part.numel for part, _ in common_parts(piece, matrix))
        if shared:
            return rank if shared == matrix.numel else None
    return None


@dataclass(frozen=True)
class Spot:
    """A matrix: the stack it is of, and its position there."""

    stack: int
    position: int


@dataclass
class Batch:
    """Matrices of one shape and kind that a root computes together: a (len(spots), rows, columns) tensor."""

    shape: tuple[int, int]
    kind: Hashable
    spots: list[Spot] = field(default_factory=list)


Compute = Callable[[Batch, torch.Tensor], torch.Tensor]
"""``(batch, (B, rows, columns) tensor) -> (B, rows, columns) tensor``: what a root does with its matrices."""


@dataclass
class _Lane:
    """What one flight moves in one direction, as seen by this rank.

    ``sends[peer]`` and ``receives[peer]`` are, in the order that they travel, the parts of flat tensors that are cut out and
    filled; ``copies`` are the pairs that stay here. A part is (index of the tensor, part of it).
    """

    sends: dict[int, list[tuple[int, Part]]] = field(default_factory=lambda: defaultdict(list))
    receives: dict[int, list[tuple[int, Part]]] = field(default_factory=lambda: defaultdict(list))
    copies: list[tuple[tuple[int, Part], tuple[int, Part]]] = field(default_factory=list)
    moves: bool = False  # whether anything travels between any two ranks


@dataclass
class _Flight:
    gather: _Lane = field(default_factory=_Lane)
    scatter: _Lane = field(default_factory=_Lane)
    batches: list[Batch] = field(default_factory=list)
    slots: list[tuple[int, int]] = field(default_factory=list)  # (batch, place in it) of each of this root's matrices


class GatherToRoot:
    """The transfers of one set of parameters between their shards and the roots of their matrices.

    Args:
        stacks: the parameters, the same on every rank and in the same order.
        placed: how each lies on the mesh.
        roots, flights: of each matrix of each stack.
        mesh: whose ranks take part; None for plain tensors, of which every rank computes its own.

    Raises:
        NotImplementedError: the ranks of a mesh of several dimensions are not in ascending order.
    """

    def __init__(
        self,
        stacks: Sequence[Stack],
        placed: Sequence[Placed],
        roots: Sequence[Sequence[int]],
        flights: Sequence[Sequence[int]],
        mesh: DeviceMesh | None,
    ) -> None:
        self.rank, self.ranks = mesh_ranks(mesh)
        self.group = None if mesh is None or self.ranks == 1 else mesh_group(mesh, tuple(range(mesh.ndim)))
        self._placed = placed
        self._coordinate = () if mesh is None else tuple(mesh.get_coordinate() or ())
        self._mine = [each.owned(self._coordinate) for each in placed]
        self.flights = [_Flight() for _ in range(1 + max((f for row in flights for f in row), default=-1))]
        for index, stack in enumerate(stacks):
            for position in range(stack.count if math.prod(stack.shape) else 0):
                self._add(index, position, stack, roots[index][position], self.flights[flights[index][position]])

    def _add(self, index: int, position: int, stack: Stack, root: int, flight: _Flight) -> None:
        placed, mine, me = self._placed[index], self._mine[index], self.rank
        whole = stack.owners is not None
        flight.gather.moves |= not whole
        flight.scatter.moves |= not whole or placed.is_replicated
        matrix = placed.matrix(position)
        pairs = common_parts(mine, matrix)
        if root != me:
            at_root = _coordinate(root, placed.mesh_shape)
            same_replica = all(a == b for a, b, cut in zip(at_root, self._coordinate, placed.cuts) if isinstance(cut, Whole))
            if pairs and same_replica:
                flight.gather.sends[root] += [(index, here) for here, _ in pairs]
            if pairs:
                flight.scatter.receives[root] += [(index, here) for here, _ in pairs]
            return
        slot = len(flight.slots)
        flight.slots.append(_place_in_batch(flight.batches, stack, Spot(index, position)))
        flight.gather.copies += [((index, here), (slot, there)) for here, there in pairs]
        flight.scatter.copies += [((slot, there), (index, here)) for here, there in pairs]
        if self.ranks == 1:
            return
        for peer, piece in placed.holders(position, self._coordinate, replicas=False):
            if peer != me:
                flight.gather.receives[peer] += [(slot, there) for _, there in common_parts(piece, matrix)]
        for peer, piece in placed.holders(position, self._coordinate, replicas=True):
            if peer != me:
                flight.scatter.sends[peer] += [(slot, there) for _, there in common_parts(piece, matrix)]

    def run(
        self, inputs: Sequence[torch.Tensor], compute: Compute, dtype: torch.dtype, device: torch.device
    ) -> list[torch.Tensor]:
        """Gather, compute and scatter: at most one collective per flight and direction.

        Args:
            inputs: this rank's part of each stack, of any dtype.
            compute: called for every batch of this root.
            dtype: that matrices travel in, to the root and back.
            device: of the matrices.

        Returns:
            this rank's part of the results, flat, in ``dtype``.
        """
        flat = [each.contiguous().view(-1) for each in inputs]
        results = [torch.empty(piece.numel, dtype=dtype, device=device) for piece in self._mine]
        gathers: dict[int, tuple[list[torch.Tensor], list[torch.Tensor], Any]] = {}
        scatters = []
        for number, flight in enumerate(self.flights):
            for ahead in range(number, min(number + 2, len(self.flights))):
                if ahead not in gathers:
                    gathers[ahead] = self._start_gather(self.flights[ahead], flat, dtype, device)
            batches, slots, received = gathers.pop(number)
            _finish(flight.gather, received, slots)
            computed = [compute(batch, data) for batch, data in zip(flight.batches, batches)]
            del batches, slots
            out = [computed[batch][place].reshape(-1) for batch, place in flight.slots]
            scatters.append((flight.scatter, _start(flight.scatter, out, results, self.group, self.ranks, dtype, device)))
        for lane, received in scatters:
            _finish(lane, received, results)
        return results

    def _start_gather(
        self, flight: _Flight, flat: list[torch.Tensor], dtype: torch.dtype, device: torch.device
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], Any]:
        batches = [torch.empty(len(batch.spots), *batch.shape, dtype=dtype, device=device) for batch in flight.batches]
        slots = [batches[batch][place].view(-1) for batch, place in flight.slots]
        return batches, slots, _start(flight.gather, flat, slots, self.group, self.ranks, dtype, device)


def _place_in_batch(batches: list[Batch], stack: Stack, spot: Spot) -> tuple[int, int]:
    for number, batch in enumerate(batches):
        if (batch.shape, batch.kind) == (stack.matrix, stack.kind):
            batch.spots.append(spot)
            return number, len(batch.spots) - 1
    batches.append(Batch(stack.matrix, stack.kind, [spot]))
    return len(batches) - 1, 0


def _view(tensors: Sequence[torch.Tensor], place: tuple[int, Part]) -> torch.Tensor:
    index, part = place
    flat = tensors[index]
    return flat.as_strided(part.sizes, part.strides, flat.storage_offset() + part.offset)


def _start(
    lane: _Lane,
    sources: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None,
    ranks: int,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor | None:
    """Copy what stays, and start what travels: what is received, perhaps still under way, or None."""
    if lane.copies:
        places = [_view(targets, there) for _, there in lane.copies]
        values = [_view(sources, here).reshape(place.shape) for (here, _), place in zip(lane.copies, places)]
        torch._foreach_copy_(places, values)
    if not lane.moves or group is None:
        return None
    outgoing = [place for peer in range(ranks) for place in lane.sends.get(peer, ())]
    packed = torch.empty(sum(part.numel for _, part in outgoing), dtype=dtype, device=device)
    if outgoing:
        slices = packed.split([part.numel for _, part in outgoing])
        values = [_view(sources, place) for place in outgoing]
        torch._foreach_copy_([piece.view(value.shape) for piece, value in zip(slices, values)], values)
    return all_to_all(packed, _splits(lane.receives, ranks), _splits(lane.sends, ranks), group)


def _splits(places: dict[int, list[tuple[int, Part]]], ranks: int) -> list[int]:
    return [sum(part.numel for _, part in places.get(peer, ())) for peer in range(ranks)]


def _finish(lane: _Lane, received: torch.Tensor | None, targets: Sequence[torch.Tensor]) -> None:
    """Wait for what travels and put it into its places."""
    if received is None:
        return
    received = torch.ops._c10d_functional.wait_tensor(received)
    incoming = [place for peer in sorted(lane.receives) for place in lane.receives[peer]]
    if incoming:
        places = [_view(targets, place) for place in incoming]
        slices = received.split([part.numel for _, part in incoming])
        torch._foreach_copy_(places, [piece.view(place.shape) for piece, place in zip(slices, places)])
