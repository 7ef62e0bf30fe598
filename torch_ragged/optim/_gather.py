"""Gather whole matrices to their roots, compute there, and send the results back, with many matrices per collective.

All ranks must issue equal collectives in equal order, so nothing here may depend on local data: plans follow from placements.

One step with two flights (``|`` is a wait)::

    gather 0   gather 1 | compute 0   scatter 0 | compute 1   scatter 1 | unpack 0 | unpack 1

Each gather and each scatter is one ``all_to_all_single`` over all ranks of the mesh. A step has two per direction, for any
number of small matrices, and up to eight for large ones; only ``max_root_bytes`` can cause more. The root receives the parts of
a matrix from the ranks of its own replica. It sends the result to every rank that holds a part. The root copies its own part.
If a flight moves nothing between ranks, it issues no collective. This is Algorithm 2 of the RaggedShard paper (redistribute to
the root's RaggedShard, compute, redistribute back), with the transfers of many parameters packed together.

If ranks share a matrix, each of them gets the whole matrix, computes some of its rows, and sends these back. In between, they
exchange rows, all ranks of a flight in one all-to-all. Meanwhile, they compute the other flight::

    gather 0   gather 1 | compute 0   rows 0 | compute 1   rows 1 | compute 0   rows 0 | compute 1   rows 1 | ...
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torch_ragged.optim._roots import Stack
from torch_ragged.tensor._carry import Pending, packed_views, part_view
from torch_ragged.tensor._exchange import Part, common, part_of
from torch_ragged.tensor._ownership import Box, Cut, Owned, Run, Whole, coordinate_at, index_at, owned, owned_near, row_major
from torch_ragged.tensor._redistribute import all_to_all, mesh_group

__all__ = ["Batch", "Compute", "GatherToRoot", "Placed", "Share", "Spot", "owners_of", "mesh_ranks"]


@dataclass(frozen=True)
class Placed:
    """How a parameter is cut over a mesh: its global shape, the mesh's shape and one cut per mesh dimension.

    Its matrices are the whole parameter, or one segment of it: ``segment`` is the dimension, the first index and the size.
    """

    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    cuts: tuple[Cut, ...]
    segment: tuple[int, int, int] | None = None

    @property
    def matrices(self) -> tuple[int, ...]:
        """The shape of the stack of its matrices."""
        if self.segment is None:
            return self.shape
        dim, _, size = self.segment
        return (*self.shape[:dim], size, *self.shape[dim + 1 :])

    def owned(self, coordinate: tuple[int, ...]) -> Owned:
        """The boxes that the rank at ``coordinate`` holds."""
        return owned(self.shape, self.mesh_shape, self.cuts, coordinate)

    def matrix(self, position: int, rows: tuple[int, int] | None = None) -> Owned:
        """The matrix at index ``position`` of the stack, as the only box of a rank; or some of its rows, in the whole matrix.

        ``rows`` are the first one and the one behind the last, along the smaller size of the matrix.
        """
        shape = (*(1 for _ in self.shape[:-2]), *self.matrices[-2:])
        sizes, offsets, strides, start = list(shape), [*coordinate_at(position, self.shape[:-2]), 0, 0], row_major(shape), 0
        if self.segment is not None:
            offsets[self.segment[0]] = self.segment[1]
        if rows is not None:
            dim = len(shape) - (2 if shape[-2] <= shape[-1] else 1)
            sizes[dim], start = rows[1] - rows[0], strides[dim] * rows[0]
            offsets[dim] += rows[0]
        return Owned(shape, (Box(tuple(offsets), tuple(sizes), start, strides),), flat=False)

    def holders(self, position: int, coordinate: tuple[int, ...], replicas: bool) -> list[tuple[int, Owned]]:
        """Ranks with their boxes: a superset of the ranks that hold a part of the matrix at index ``position``.

        If ``replicas`` is True, all ranks count; if False, only those of the replica of ``coordinate``.
        """
        dims = tuple(i for i, cut in enumerate(self.cuts) if replicas or not isinstance(cut, Whole))
        return owned_near(self.shape, self.mesh_shape, self.cuts, coordinate, dims, self.matrix(position), in_mesh=True)

    @property
    def is_replicated(self) -> bool:
        """Whether more than one rank holds an element."""
        return any(isinstance(cut, Whole) and size > 1 for cut, size in zip(self.cuts, self.mesh_shape))


def mesh_ranks(mesh: DeviceMesh | None) -> tuple[int, int]:
    """This rank's row-major index in the mesh, and the number of ranks; (0, 1) without a mesh."""
    if mesh is None:
        return 0, 1
    return index_at(mesh.get_coordinate() or (), tuple(mesh.shape)), mesh.size()


def shares_of(placed: Sequence[Placed]) -> tuple[float, ...] | None:
    """Each rank's share of the elements of parameters on one mesh, whose mean is 1; None if the shares are about equal.

    Equal on all ranks. Shards of equal sizes differ by padding, and by blocks that are not cut: shares count as equal up to a
    factor of 2, so that these do not unbalance the work. A rank without elements has no share.
    """
    shape = placed[0].mesh_shape if placed else ()
    shares = torch.ones(1, dtype=torch.float64, device="cpu")
    for dim, size in enumerate(shape):
        along = torch.zeros(size, dtype=torch.float64, device="cpu")
        for each in placed:
            cut, start = each.cuts[dim], 0
            for units, ranks in cut.units.runs if isinstance(cut, Run) else ((1, size),):
                total = cut.units.total if isinstance(cut, Run) else size
                along[start : start + ranks] += math.prod(each.shape) * units / total
                start += ranks
        shares = torch.outer(shares, along).flatten()
    shares /= shares.mean()
    if not shares.isfinite().all() or 2 * shares.min() >= shares.max():
        return None
    return tuple(shares.tolist())


def owners_of(placed: Placed) -> tuple[tuple[int, ...], ...] | None:
    """For each replica, the rank that holds each whole matrix. None if a matrix is cut, or if these ranks ever descend.

    Descending ranks are excluded because the matrices of a stack at its roots are a RaggedShard, whose owners never descend.
    """
    count = math.prod(placed.shape[:-2])
    replicas = [range(size) if isinstance(cut, Whole) else (0,) for cut, size in zip(placed.cuts, placed.mesh_shape)]
    cut_dims = [i for i, cut in enumerate(placed.cuts) if not isinstance(cut, Whole)]
    along = _owners_along(placed, cut_dims[0]) if len(cut_dims) == 1 else None
    result = []
    for start in itertools.product(*replicas):
        if along is None:
            owners = [_owner(placed, position, start) for position in range(count)]
        else:
            before, behind = start[: cut_dims[0]], start[cut_dims[0] + 1 :]
            owners = [None if o is None else index_at((*before, o, *behind), placed.mesh_shape) for o in along]
        if None in owners or owners != sorted(owners):  # type: ignore[type-var]
            return None
        result.append(tuple(owners))
    return tuple(result)  # type: ignore[arg-type]


def _owners_along(placed: Placed, mesh_dim: int) -> list[int | None] | None:
    """The owner of each matrix along the mesh dimension ``mesh_dim``, if this has a plain run; None for other cuts.

    All other mesh dimensions must replicate. :func:`_owner` gives the same result, but its time grows with the number of ranks.
    """
    cut = placed.cuts[mesh_dim]
    if not isinstance(cut, Run) or cut.split_factor > 1 or placed.segment is not None:
        return None
    unit, size = math.prod(placed.shape) // cut.units.total, math.prod(placed.shape[-2:])
    owners: list[int | None] = []
    for start in range(0, size * math.prod(placed.shape[:-2]), max(size, 1)):
        rank = cut.units.owner(start // unit)
        owners.append(rank if start + size <= unit * cut.units.before(rank + 1) else None)
    return owners


def _owner(placed: Placed, position: int, coordinate: tuple[int, ...]) -> int | None:
    matrix = placed.matrix(position)
    for rank, held in placed.holders(position, coordinate, replicas=False):
        shared = sum(each.numel for each in common(held, matrix))
        if shared:
            return rank if shared == matrix.numel else None
    return None


@dataclass(frozen=True)
class Spot:
    """One matrix: the index of its stack, and the index of the matrix in this stack. Segments are stacks of their own."""

    stack: int
    position: int


@dataclass
class Batch:
    """Matrices of equal shape and kind that a root computes together, as one (len(spots), rows, columns) tensor.

    Or one matrix that ranks share: ``rows`` are the first row that this rank computes, and the one behind its last.
    """

    shape: tuple[int, int]
    kind: Hashable
    spots: list[Spot] = field(default_factory=list)
    rows: tuple[int, int] | None = None


Compute = Callable[[Batch, torch.Tensor], torch.Tensor]
"""``(batch, (B, rows, columns) tensor) -> (B, rows, columns) tensor``: the computation of a root with its matrices."""

Share = Callable[[Batch, torch.Tensor], Generator[torch.Tensor, None, torch.Tensor]]
"""The same for a matrix that ranks share. It yields each tensor whose other rows it needs; they are there when it goes on."""


@dataclass
class _Lane:
    """The transfers of one flight in one direction, for this rank.

    ``sends[peer]`` and ``receives[peer]`` list, in the order of transfer, the parts of flat tensors to read and to fill.
    ``copies`` lists the pairs (source, target) that stay on this rank. Each part is (index of the tensor, part of it).
    """

    sends: dict[int, list[tuple[int, Part]]] = field(default_factory=lambda: defaultdict(list))
    receives: dict[int, list[tuple[int, Part]]] = field(default_factory=lambda: defaultdict(list))
    copies: list[tuple[tuple[int, Part], tuple[int, Part]]] = field(default_factory=list)
    moves: bool = False  # Whether any two ranks exchange data. Equal on all ranks: it follows from placements and roots.


@dataclass
class _Flight:
    gather: _Lane = field(default_factory=_Lane)
    scatter: _Lane = field(default_factory=_Lane)
    exchanges: list[_Lane] = field(default_factory=list)  # Between ranks that share matrices; a part's tensor is a batch.
    batches: list[Batch] = field(default_factory=list)
    matrices: list[tuple[int, int]] = field(default_factory=list)  # (batch, index in it) of each matrix of this root


class GatherToRoot:
    """The transfers of a set of parameters between their shards and the roots of their matrices.

    Args:
        stacks: the parameters, or the segments of parameters, equal on all ranks and in equal order.
        placed: how the parameter of each stack is cut over the mesh.
        tensors: for each stack, the index of its parameter.
        roots, flights: for each stack, the root and the flight of each of its matrices. The root is the first of the ranks that
            share a matrix.
        mesh: the mesh of the parameters. None for plain tensors: then every rank computes all matrices.

    Raises:
        NotImplementedError: the mesh has several dimensions and its ranks are not in ascending order.
    """

    def __init__(
        self,
        stacks: Sequence[Stack],
        placed: Sequence[Placed],
        tensors: Sequence[int],
        roots: Sequence[Sequence[int]],
        flights: Sequence[Sequence[int]],
        mesh: DeviceMesh | None,
    ) -> None:
        self.rank, self.ranks = mesh_ranks(mesh)
        # The first plan of a mesh with several dimensions makes this process group. All ranks of the mesh make the plan in the
        # same step.
        self.group = None if mesh is None or self.ranks == 1 else mesh_group(mesh, tuple(range(mesh.ndim)))
        self._placed, self.tensors = placed, tensors
        self._coordinate = () if mesh is None else tuple(mesh.get_coordinate() or ())
        # Once for each parameter: its segments lie in one local tensor.
        self._mine = [placed[tensors.index(each)].owned(self._coordinate) for each in dict.fromkeys(tensors)]
        # All ranks have all flights, also those that they compute nothing in: each flight is an all-to-all of all ranks.
        self.flights = [_Flight() for _ in range(1 + max((f for row in flights for f in row), default=-1))]
        for index, stack in enumerate(stacks):
            for position in range(stack.count if math.prod(stack.shape) else 0):
                self._add(index, position, stack, roots[index][position], self.flights[flights[index][position]])

    def _add(self, index: int, position: int, stack: Stack, root: int, flight: _Flight) -> None:
        placed, tensor, me = self._placed[index], self.tensors[index], self.rank
        mine, matrix = self._mine[tensor], placed.matrix(position)
        whole = stack.owners is not None
        # Before this rank looks for its own parts: a rank without parts must know, too, that the others exchange data.
        flight.gather.moves |= not whole
        # A matrix that is whole on its root needs no gather. But each other replica gets the result from there.
        flight.scatter.moves |= not whole or placed.is_replicated
        shared = common(mine, matrix)
        for member, rank in enumerate(range(root, root + stack.split)):
            piece = matrix if stack.split == 1 else placed.matrix(position, stack.rows_of(member))
            back = shared if stack.split == 1 else common(mine, piece)
            # A message has no offsets: sender and receiver list its parts in the same order, by stack, position and box. Both
            # ask common() for the boxes of the rank that holds them, in the matrix.
            if rank == me:
                number = len(flight.matrices)
                rows = None if stack.split == 1 else stack.rows_of(member)
                flight.matrices.append(_add_to_batch(flight.batches, stack, Spot(index, position), rows))
                flight.gather.copies += [((tensor, each.part(0)), (number, each.part(1))) for each in shared]
                flight.scatter.copies += [((number, each.part(1)), (tensor, each.part(0))) for each in back]
                if self.ranks > 1:
                    for peer, held in placed.holders(position, self._coordinate, replicas=False):
                        if peer != me:
                            flight.gather.receives[peer] += [(number, each.part(1)) for each in common(held, matrix)]
                    for peer, held in placed.holders(position, self._coordinate, replicas=True):
                        if peer != me:
                            flight.scatter.sends[peer] += [(number, each.part(1)) for each in common(held, piece)]
                continue
            # Each of these ranks receives from one replica only. Every replica that holds a part receives the result.
            at_rank = coordinate_at(rank, placed.mesh_shape)
            same_replica = all(a == b for a, b, cut in zip(at_rank, self._coordinate, placed.cuts) if isinstance(cut, Whole))
            if shared and same_replica:
                flight.gather.sends[rank] += [(tensor, each.part(0)) for each in shared]
            if back:
                flight.scatter.receives[rank] += [(tensor, each.part(0)) for each in back]
        if stack.split > 1:
            self._add_exchanges(stack, root, flight)

    def _add_exchanges(self, stack: Stack, root: int, flight: _Flight) -> None:
        """What the ranks that share the last matrix send each other: each its rows, to all others."""
        # Before the return: the other ranks take part in these all-to-alls, with nothing to send. Or the ranks that share would
        # wait.
        flight.exchanges += [_Lane(moves=True) for _ in stack.exchanges[len(flight.exchanges) :]]
        if not root <= self.rank < root + stack.split:
            return
        batch = flight.matrices[-1][0]
        for lane, width in zip(flight.exchanges, stack.exchanges):
            parts = []
            for member in range(stack.split):
                start, stop = stack.rows_of(member)
                parts.append((batch, part_of(start * width, ((stop - start) * width,), (1,))))
            for member, part in enumerate(parts):
                if root + member != self.rank:
                    lane.sends[root + member].append(parts[self.rank - root])
                    lane.receives[root + member].append(part)

    def run(
        self, inputs: Sequence[torch.Tensor], compute: Compute, share: Share, dtype: torch.dtype, device: torch.device
    ) -> list[torch.Tensor]:
        """Gather, compute and scatter. Issues at most one all-to-all per flight and direction, and those of shared matrices.

        Args:
            inputs: this rank's local tensor of each parameter, of any dtype.
            compute: called for every batch of this root.
            share: called for every matrix that this rank shares.
            dtype: the dtype of the transfers, to the root and back, and of the matrices at the root.
            device: the device of the matrices.

        Returns:
            the local tensor of each parameter's result, flat, in ``dtype``.
        """
        # Copies only of what is not contiguous. They live until the end, because the last flight reads them, too.
        flat = [each.contiguous().view(-1) for each in inputs]
        # One tensor for each parameter: several flights fill it. So the updates of all parameters of the mesh exist together at
        # the end.
        results = [torch.empty(held.numel, dtype=dtype, device=device) for held in self._mine]
        scatters: list[Pending] = []
        # At most two flights at a time. Each goes on until its next transfer is in flight; then it is the other's turn.
        coming = (self._fly(flight, flat, results, scatters, compute, share, dtype, device) for flight in self.flights)
        # The order of turns follows from the numbers of flights and of exchanges, which all ranks have in common, never from
        # the time that anything takes. So all ranks issue the same all-to-alls in the same order.
        active: deque[Generator[None, None, None]] = deque()
        landed = object()
        while True:
            for flight in itertools.islice(coming, 2 - len(active)):
                next(flight)
                active.append(flight)
            if not active:
                break
            flight = active.popleft()
            if next(flight, landed) is not landed:
                active.append(flight)
        # Last: unpacking waits for the transfer, and no computation should wait for it. The memory of all scatters lives until
        # here.
        for pending in scatters:
            pending.wait()
        return results

    def _fly(
        self,
        flight: _Flight,
        flat: list[torch.Tensor],
        results: list[torch.Tensor],
        scatters: list[Pending],
        compute: Compute,
        share: Share,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Generator[None, None, None]:
        """One flight, up to its scatter, which is added to ``scatters``. Yields while its gather or its rows are in flight."""
        # From here until its scatter is packed, a flight holds its matrices. So at most two flights' matrices are in memory.
        batches = [torch.empty(len(batch.spots), *batch.shape, dtype=dtype, device=device) for batch in flight.batches]
        matrices = [batches[batch][index].view(-1) for batch, index in flight.matrices]
        pending = _start(flight.gather, flat, matrices, self.group, self.ranks, dtype, device)
        yield
        pending.wait()
        # It holds the received memory, which is as large as the matrices. It is free before the computation needs memory.
        del pending
        computed, waiting = list(batches), list(batches)
        alone = (number for number, batch in enumerate(flight.batches) if batch.rows is None)
        shared = {
            number: share(batch, batches[number]) for number, batch in enumerate(flight.batches) if batch.rows is not None
        }
        for lane in (*flight.exchanges, None):  # Shared matrices go on together, from one exchange of rows to the next.
            for number, each in list(shared.items()):
                try:
                    waiting[number] = next(each).view(-1)
                except StopIteration as end:
                    computed[number] = end.value
                    del shared[number]
            if lane is not None:
                pending = _start(lane, waiting, waiting, self.group, self.ranks, dtype, device)
                for number in itertools.islice(alone, 1):  # While the rows are in flight.
                    computed[number] = compute(flight.batches[number], batches[number])
                yield
                pending.wait()
                del pending
        for number in alone:
            computed[number] = compute(flight.batches[number], batches[number])
        del batches, matrices, waiting  # Free the inputs of this flight before the scatter allocates.
        # A copy of tall matrices, whose results are transposed. It ends when the parts are packed.
        out = [computed[batch][index].reshape(-1) for batch, index in flight.matrices]
        scatters.append(_start(flight.scatter, out, results, self.group, self.ranks, dtype, device))


def _add_to_batch(batches: list[Batch], stack: Stack, spot: Spot, rows: tuple[int, int] | None) -> tuple[int, int]:
    """Append ``spot`` to the batch of its shape and kind. Returns the index of the batch and the index in it."""
    for number, batch in enumerate(batches):
        if rows is None and (batch.shape, batch.kind, batch.rows) == (stack.matrix, stack.kind, None):
            batch.spots.append(spot)
            return number, len(batch.spots) - 1
    batches.append(Batch(stack.matrix, stack.kind, [spot], rows))
    return len(batches) - 1, 0


def _start(
    lane: _Lane,
    sources: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None,
    ranks: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Pending:
    """Copy the parts that stay on this rank, and issue the all-to-all for the others: a wait for it copies what has arrived."""
    if lane.copies:
        views = [part_view(targets[i], there) for _, (i, there) in lane.copies]
        values = [part_view(sources[i], here).reshape(view.shape) for ((i, here), _), view in zip(lane.copies, views)]
        torch._foreach_copy_(views, values)
    # Not by what this rank sends: if any two ranks exchange data, all ranks must issue the collective.
    if not lane.moves or group is None:
        return Pending(torch.empty(0, dtype=dtype, device=device), (0,))
    outgoing = [part for peer in range(ranks) for part in lane.sends.get(peer, ())]
    packed = torch.empty(sum(part.numel for _, part in outgoing), dtype=dtype, device=device)
    if outgoing:
        values = [part_view(sources[i], part) for i, part in outgoing]
        torch._foreach_copy_(packed_views(packed, [part for _, part in outgoing]), values)
    incoming = [part for peer in sorted(lane.receives) for part in lane.receives[peer]]

    # It runs in wait(), and keeps the targets alive until then.
    def unpack(received: torch.Tensor) -> torch.Tensor:
        if incoming:
            views = [part_view(targets[i], part) for i, part in incoming]
            torch._foreach_copy_(views, packed_views(received, [part for _, part in incoming]))
        return received

    received = all_to_all(packed, _splits_of_parts(lane.receives, ranks), _splits_of_parts(lane.sends, ranks), group)
    return Pending(received, tuple(received.shape), unpack, in_flight=True)


def _splits_of_parts(parts: dict[int, list[tuple[int, Part]]], ranks: int) -> list[int]:
    return [sum(part.numel for _, part in parts.get(peer, ())) for peer in range(ranks)]
