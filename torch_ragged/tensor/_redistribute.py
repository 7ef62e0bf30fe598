"""Redistribution to and from the ragged placements: a pair of placements gives a plan of steps.

It must not make the full tensor on a rank unless the target says Replicate. An element travels only if its owner changes.

==================================  ===============================================================================
change                              step
==================================  ===============================================================================
cut -> Replicate                    small: all-gather if the pieces are even; otherwise one uneven all-to-all, or one broadcast
                                    per owner if an all-to-all would need a much larger send buffer. Large: in place, by
                                    ``_carry``, with no other memory than the result
Replicate -> cut                    local copy
cut -> another cut                  one uneven all-to-all, on the flattened mesh if several mesh dimensions take part
Partial -> cut                      reduce-scatter if the pieces are even; otherwise uneven all-to-alls and a local reduction
                                    in rank order, or one reduce per owner if that takes fewer collectives
Partial -> Replicate                all-reduce
cut or Replicate -> Partial         local: every other rank contributes the identity of the reduction
equal ownership                     none: the local tensor is aliased
==================================  ===============================================================================

A cut is any of Shard, _StridedShard, RaggedShard, StridedRaggedShard. If a cut on one mesh dimension is nested in the cut that
a pending reduction on another mesh dimension would make, the reduction is an all-reduce. If torch.compile traces or a mode
such as CommDebugMode watches, collectives are operators of ``torch.ops._c10d_functional``, which have results of their own (so
all tensors count as small); otherwise the process group is called itself, which takes a tenth of their host time.
"""

from __future__ import annotations

import functools
import math
import operator
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from torch_ragged._ranks.groups import can_order_groups, group_of, ranks_ascend
from torch_ragged.tensor import _carry
from torch_ragged.tensor._carry import Pending, copy_into, covers, part_view
from torch_ragged.tensor._cut_placement import cuts_of, has_flat
from torch_ragged.tensor._exchange import Part, paired_views
from torch_ragged.tensor._local_tensor import LocalTensor, as_rank, coordinate_of, coordinates_of, local_tensors, peers_of
from torch_ragged.tensor._ownership import Whole, owned
from torch_ragged.tensor._route import Exchange, Fill, Gather, Move, Reduce, Route, Step

__all__ = [
    "AllReduce",
    "CARRIED",
    "REDUCTIONS",
    "all_to_all",
    "broadcast_local",
    "mesh_group",
    "plan_of",
    "in_order_of",
    "is_permuted",
    "redistribute_local",
    "run_steps",
    "warn_of_order",
]

# If the send (or receive) buffer of one all-to-all exceeds the tensor by this factor, other collectives are used.
_MAX_BUFFER_RATIO = 2

_SMALLEST_IN_PLACE = 2**17, 2**20
"""If the mean shard has fewer bytes, one collective that needs memory twice is faster than a broadcast per shard.

First, of even shards; then, of those that are all-gathered by an all-to-all. Measured over gloo on 2, 4 and 8 ranks of a host.
"""

_IDENTITY = {"sum": -0.0, "avg": -0.0, "max": -math.inf, "min": math.inf}
REDUCTIONS = frozenset(_IDENTITY)
"""The reductions of a Partial that this module redistributes."""


CARRIED = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
CARRIED |= {torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool}
"""The dtypes that every backend sends and reduces."""


# --- planning ------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=16384)
def plan_of(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    source: tuple[Placement, ...],
    target: tuple[Placement, ...],
    coordinate: tuple[int, ...],
) -> tuple[Step, ...]:
    """The steps by which the rank at ``coordinate`` changes ``source`` to ``target`` placements.

    Kinds and order of the steps are equal on all ranks: they depend on the placements and not on ``coordinate``. The cost of a
    plan grows with the number of ranks, not with the size of the tensor. Plans are cached.
    """
    route = Route(shape, mesh_shape, coordinate, cuts_of(source))
    pairs = list(enumerate(zip(source, target)))
    reductions = {i: s.reduce_op for i, (s, t) in pairs if isinstance(s, Partial) and s != t}
    fills = {i: t.reduce_op for i, (s, t) in pairs if isinstance(t, Partial) and s != t}
    goal = list(cuts_of(target))
    for i in fills:  # If a piece can keep its owner until the fill, it need not be all-gathered.
        kept = [*goal[:i], route.cuts[i], *goal[i + 1 :]]
        if route.is_free(i, kept):
            goal = kept
    only_cuts = all(isinstance(a, Whole) for i, (a, b) in enumerate(zip(route.cuts, goal)) if a != b and i not in reductions)
    if only_cuts and all(route.is_free(i, goal) for i in reductions):
        route.move(tuple(Whole() if i in reductions else cut for i, cut in enumerate(goal)))  # A local cut, so less to reduce.
    for i, operation in reductions.items():
        onto_owners = route.is_free(i, route.replace(i, goal[i]))
        route.reduce(i, operation, goal[i] if onto_owners else Whole())
    route.move(tuple(goal))
    for i, operation in reversed(fills.items()):  # A nested cut must become pending before the cut that contains it.
        route.fill(i, operation)
    return tuple(route.steps)


# --- execution -----------------------------------------------------------------------------------------------------


def redistribute_local(
    local: torch.Tensor,
    mesh: DeviceMesh,
    shape: Sequence[int],
    source: tuple[Placement, ...],
    target: tuple[Placement, ...],
    is_async: bool = False,
) -> Pending:
    """Move ``local`` from ``source`` to ``target`` placements, by the collectives of the table above.

    Args:
        local: the local tensor under ``source``; 1-D if ``source`` contains a ragged placement.
        shape: the global shape.

        is_async: whether the caller may wait later. If not, the last collective too is waited for.

    Returns:
        the local tensor under ``target``, perhaps still in flight. It aliases ``local`` if every rank keeps its elements.

    Raises:
        ValueError: the type of a placement is unknown, a Partial averages integers, or a Partial reduces numbers of a dtype
            without that order, or of a dtype that no backend adds.
    """
    _check_reductions(local.dtype, source, target)
    if (everywhere := local_tensors(local)) is not None:
        return _redistribute_on_all_ranks(everywhere, mesh, tuple(shape), source, target)
    if local.dtype not in CARRIED:
        return _redistribute_as_carried(local, mesh, shape, source, target, is_async)
    warn_of_order(mesh, source)
    warn_of_order(mesh, target)
    return run_steps(plan_of(tuple(shape), tuple(mesh.shape), source, target, _coordinate(mesh)), local, mesh, is_async)


def is_permuted(stride: Sequence[int]) -> bool:
    """Whether a tensor's elements lie in memory in another order than row-major, or one for several."""
    return 0 in stride or not all(map(operator.ge, stride, stride[1:]))


def in_order_of(local: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """``local`` with its dimensions in memory in the order of ``stride``, which is that of the whole tensor.

    A collective makes row-major tensors. A permuted DTensor stays permuted when it is redistributed, and an expanded one stays
    expanded: its local tensors must be so, too, or what can be viewed by the whole one's strides cannot be viewed by theirs.
    """
    if local.ndim != len(stride) or not is_permuted(stride):
        return local
    shape = local.shape
    for dim in [dim for dim, step in enumerate(stride) if step == 0 and shape[dim] > 1]:
        local = local.narrow(dim, 0, 1)
    # One copy more, in the memory of this rank's part: nothing is sent again.
    order = sorted(range(local.ndim), key=lambda dim: -stride[dim])
    return local.permute(order).contiguous().permute([order.index(dim) for dim in range(local.ndim)]).expand(shape)


def run_steps(steps: Sequence[Step], local: torch.Tensor, mesh: DeviceMesh, is_async: bool = False) -> Pending:
    """Carry out the steps of :func:`plan_of` on a local tensor of a dtype in ``CARRIED``."""
    result, is_watched = Pending(local, tuple(local.shape)), _is_watched(local)
    comm = _FUNCTIONAL if is_async or is_watched else _DIRECT
    gathers = [] if is_watched else [step for step in steps if isinstance(step, Gather)]
    memory: list[torch.Tensor] = []
    in_place = bool(gathers) and _is_worth_broadcasts(gathers[-1], local.itemsize)
    for step in steps:
        flat = result.wait().contiguous().view(-1)
        if in_place and isinstance(step, Gather):
            memory = memory or _carry.memory_of(gathers, flat)
            group, is_last = mesh_group(mesh, (step.mesh_dim,)), step is steps[-1]
            result = _carry.all_gather(step, flat, memory.pop(0), group, is_async=is_async and is_last)
        else:
            result = _RUN[type(step)](step, flat, mesh, comm)
    return result


def _is_worth_broadcasts(last: Gather, itemsize: int) -> bool:
    """Whether all-gathers are in place. Equal on all their ranks: when the last one begins, these ranks hold equal pieces."""
    takes_all_to_all = 1 < last.skew <= _MAX_BUFFER_RATIO
    return math.prod(last.shape) * itemsize >= len(last.splits) * _SMALLEST_IN_PLACE[takes_all_to_all]


class AllReduce:
    """The step from Partial to Replicate on one mesh dimension, for local tensors of any shape: it needs no plan."""

    def __init__(self, operation: str, mesh: DeviceMesh, mesh_dim: int) -> None:
        self._operation, self._mesh, self._mesh_dim = operation, mesh, mesh_dim
        self._group, self._options = mesh_group(mesh, (mesh_dim,)), dist.AllreduceOptions()
        self._options.reduceOp = _OPERATIONS["sum" if operation == "avg" else operation]

    def __call__(self, local: torch.Tensor) -> torch.Tensor:
        if _is_watched(local):
            kernel = "sum" if self._operation == "avg" else self._operation
            reduced = _FUNCTIONAL.wait(_FUNCTIONAL.all_reduce(local.contiguous(), kernel, self._group))
        else:
            reduced = local.clone(memory_format=torch.contiguous_format)
            self._group.allreduce([reduced], self._options).wait()
        return reduced / self._mesh.size(self._mesh_dim) if self._operation == "avg" else reduced


def _coordinate(mesh: DeviceMesh) -> tuple[int, ...]:
    return coordinate_of(mesh) or ()


def _reductions(source: tuple[Placement, ...], target: tuple[Placement, ...]) -> set[str]:
    """How the Partials that come or go reduce."""
    return {p.reduce_op for p, q in (*zip(source, target), *zip(target, source)) if isinstance(p, Partial) and p != q}


def _check_reductions(dtype: torch.dtype, source: tuple[Placement, ...], target: tuple[Placement, ...]) -> None:
    operations = _reductions(source, target)
    if dtype in CARRIED and "avg" in operations and not dtype.is_floating_point:
        raise ValueError(f"redistribution from {source} to {target}: Partial('avg') needs floating point, got {dtype}: cast it")
    if dtype not in CARRIED and not operations <= ({"sum", "avg"} if dtype in (torch.complex64, torch.complex128) else set()):
        raise ValueError(
            f"redistribution from {source} to {target}: cannot reduce {dtype} by {', '.join(sorted(operations))}: cast it"
        )


def _redistribute_as_carried(
    local: torch.Tensor,
    mesh: DeviceMesh,
    shape: Sequence[int],
    source: tuple[Placement, ...],
    target: tuple[Placement, ...],
    is_async: bool,
) -> Pending:
    """The same for dtypes that backends do not know: as pairs of reals, or bytes, in a last dimension that is never cut."""
    local = local.resolve_conj().resolve_neg()
    parts = torch.view_as_real(local) if _reductions(source, target) else local.contiguous().unsqueeze(-1).view(torch.uint8)
    width, dtype = parts.shape[-1], local.dtype
    pending = redistribute_local(parts, mesh, (*shape, width), source, target, is_async)  # Steps read it as flat memory.
    numel = math.prod(pending.local_shape) // width
    local_shape = (numel,) if has_flat(target) else pending.local_shape[:-1]

    put_in_order = pending.unpack

    def unpack(data: torch.Tensor) -> torch.Tensor:
        data = data if put_in_order is None else put_in_order(data)
        return data.view(-1).view(dtype) if data.numel() else data.new_empty(0, dtype=dtype)

    return replace(pending, local_shape=local_shape, unpack=unpack, dtype=dtype)


def _redistribute_on_all_ranks(
    held: dict[int, torch.Tensor],
    mesh: DeviceMesh,
    shape: tuple[int, ...],
    source: tuple[Placement, ...],
    target: tuple[Placement, ...],
) -> Pending:
    """The same under ``LocalTensorMode``: the plans of all ranks, step by step. Nothing is sent, and sums add in rank order.

    Raises:
        ValueError: a rank of the mesh has no local tensor, or one of another size.
    """
    places = coordinates_of(mesh)  # Ranks outside of the mesh keep what they hold.
    if missing := sorted(places.keys() - held.keys()):
        raise ValueError(f"redistribution of a LocalTensor on {mesh}: it has no local tensors of ranks {missing}")
    for rank, place in places.items():
        numel = owned(shape, tuple(mesh.shape), cuts_of(source), place).numel
        if held[rank].numel() != numel:
            raise ValueError(
                f"redistribution of shape {shape} {source} under LocalTensorMode: rank {rank} has {held[rank].numel()} "
                f"elements, expected {numel}: make the DTensor under the mode, so that it has the local tensors of all ranks"
            )
    plans = {rank: plan_of(shape, tuple(mesh.shape), source, target, place) for rank, place in places.items()}
    for turn in range(len(next(iter(plans.values())))):
        steps = {rank: steps[turn] for rank, steps in plans.items()}
        flat = {rank: held[rank].contiguous().view(-1) for rank in places}
        packed = {rank: _pack(flat[rank], step.sends) for rank, step in steps.items()}
        for rank, step in steps.items():
            with as_rank(rank):
                if isinstance(step, (Move, Fill)):
                    held[rank] = _RUN[type(step)](step, flat[rank], mesh, _DIRECT).wait()
                else:
                    received = _received(rank, mesh, steps, packed)
                    unpack = _unpacking(step.receives, step.local_shape)
                    held[rank] = (received if unpack is None else unpack(received)).view(step.local_shape)
    result = LocalTensor(held)
    return Pending(result, tuple(result.shape))


def _received(rank: int, mesh: DeviceMesh, steps: dict[int, Any], packed: dict[int, torch.Tensor]) -> torch.Tensor:
    """What the collective of a step would give to ``rank``: from the ``packed`` tensors of the ranks of its group."""
    step = steps[rank]
    peers = peers_of(rank, mesh, step.mesh_dims if isinstance(step, Exchange) else (step.mesh_dim,))
    at = peers.index(rank)
    if isinstance(step, Gather):
        return torch.cat([packed[peer] for peer in peers])
    if isinstance(step, Exchange):
        return torch.cat([packed[peer].split(list(steps[peer].send_splits))[at] for peer in peers])
    rows = [packed[peer] if step.splits is None else packed[peer].split(list(step.splits))[at] for peer in peers]
    reduced = _reduce_rows(rows, "sum" if step.operation == "avg" else step.operation)
    reduced = reduced.clone() if len(rows) == 1 else reduced
    return reduced / len(peers) if step.operation == "avg" else reduced


def broadcast_local(
    tensor: torch.Tensor, mesh: DeviceMesh, shape: Sequence[int], placements: tuple[Placement, ...]
) -> torch.Tensor:
    """This rank's local tensor, under ``placements``, of the replicated ``tensor`` expanded to ``shape``.

    Only the elements of this rank are made; the expansion is never materialized. No communication.
    """
    coordinate = _coordinate(mesh)
    mine = owned(tuple(shape), tuple(mesh.shape), cuts_of(placements), coordinate)
    result = tensor.new_empty(mine.numel)
    for part, whole in paired_views(result, tensor.expand(tuple(shape)), mine.boxes):
        part.copy_(whole)
    return result.view(mine.local_shape)


def _run_move(step: Move, flat: torch.Tensor, mesh: DeviceMesh, comm: _Functional) -> Pending:
    if step.stays:
        return Pending(flat, step.local_shape)
    packed = _pack(flat, step.sends)
    if packed is flat:  # Only equal ownership may give an alias.
        packed = flat.clone()
    unpack = _unpacking(step.receives, step.local_shape)
    return Pending(packed if unpack is None else unpack(packed), step.local_shape)


def _run_exchange(step: Exchange, flat: torch.Tensor, mesh: DeviceMesh, comm: _Functional) -> Pending:
    packed = _pack(flat, step.sends)
    received = comm.all_to_all(packed, step.receive_splits, step.send_splits, mesh_group(mesh, step.mesh_dims))
    return Pending(received, step.local_shape, _unpacking(step.receives, step.local_shape), comm.in_flight)


def _run_gather(step: Gather, flat: torch.Tensor, mesh: DeviceMesh, comm: _Functional) -> Pending:
    group, rank = mesh_group(mesh, (step.mesh_dim,)), _coordinate(mesh)[step.mesh_dim]
    splits, size, flat = tuple(step.splits), len(step.splits), _pack(flat, step.sends)
    unpack = _unpacking(step.receives, step.local_shape)
    if step.skew == 1:
        received = comm.all_gather(flat, size, group)
    elif step.skew <= _MAX_BUFFER_RATIO:
        received = comm.all_to_all(flat.expand(size, -1).contiguous().view(-1), splits, (splits[rank],) * size, group)
    else:
        pieces = [
            comm.broadcast(flat if owner == rank else flat.new_empty(split), owner, group)
            for owner, split in enumerate(splits)
            if split
        ]
        if len(pieces) > 1:
            gathered = torch.cat([comm.wait(piece) for piece in pieces])
            return Pending(gathered, step.local_shape, unpack)
        received = pieces[0]
    return Pending(received, step.local_shape, unpack, comm.in_flight)


def _run_reduce(step: Reduce, flat: torch.Tensor, mesh: DeviceMesh, comm: _Functional) -> Pending:
    """Reduce onto owners. If owners are uneven, sums add in rank order; if they are even, the backend chooses the order."""
    group, rank = mesh_group(mesh, (step.mesh_dim,)), _coordinate(mesh)[step.mesh_dim]
    size, splits = mesh.size(step.mesh_dim), None if step.splits is None else tuple(step.splits)
    average = step.operation == "avg"
    kernel = "sum" if average else step.operation

    unpack_parts = _unpacking(step.receives, step.local_shape)

    def pending(data: torch.Tensor, in_flight: bool, combine: Callable[..., torch.Tensor] | None = None) -> Pending:
        def unpack(data: torch.Tensor) -> torch.Tensor:
            reduced = data if combine is None else combine(data)
            reduced = reduced / size if average else reduced
            return reduced if unpack_parts is None else unpack_parts(reduced)

        return Pending(data, step.local_shape, unpack if combine or average or unpack_parts else None, in_flight)

    if splits is None:
        return pending(comm.all_reduce(flat, kernel, group), comm.in_flight)
    packed, own = _pack(flat, step.sends), splits[rank]
    if len(set(splits)) == 1:
        return pending(comm.reduce_scatter(packed, kernel, size, group), comm.in_flight)
    owners = [owner for owner, split in enumerate(splits) if split]
    rounds = -(-max(splits) * size // (_MAX_BUFFER_RATIO * sum(splits)))
    if rounds == 1:
        received = comm.all_to_all(packed, (own,) * size, splits, group)
        return pending(received, comm.in_flight, lambda data: _reduce_rows(data.view(size, own).unbind(), kernel))
    if len(owners) <= rounds:
        pieces = packed.split(splits)
        _groups_by_name[group.group_name] = group
        reduce = _reduce if type(flat) is torch.Tensor else torch.ops.ragged_shard.reduce
        reduced = [reduce(pieces[owner], kernel, owner, group.group_name) for owner in owners]
        return pending(reduced[owners.index(rank)] if own else flat.new_empty(0), False)
    return pending(_reduce_in_rounds(packed, splits, rank, kernel, group, rounds, comm), False)


def _reduce_in_rounds(
    packed: torch.Tensor,
    splits: tuple[int, ...],
    rank: int,
    kernel: str,
    group: dist.ProcessGroup,
    rounds: int,
    comm: _Functional,
) -> torch.Tensor:
    """Reduce one slice of every owner's interval per round: otherwise the largest owner needs a full-length row per rank.

    The number of rounds is equal on all ranks: it follows from ``splits``, which all ranks know.
    """
    size, pieces, reduced = len(splits), packed.split(splits), []
    for turn in range(rounds):
        ranges = [(split * turn // rounds, split * (turn + 1) // rounds) for split in splits]
        slices = torch.cat([piece[start:stop] for piece, (start, stop) in zip(pieces, ranges)])
        sends = tuple(stop - start for start, stop in ranges)
        received = comm.wait(comm.all_to_all(slices, (sends[rank],) * size, sends, group))
        reduced.append(_reduce_rows(received.view(size, sends[rank]).unbind(), kernel))
    return torch.cat(reduced)


def _reduce_rows(rows: Sequence[torch.Tensor], operation: str) -> torch.Tensor:
    """Reduce row by row: then the order of additions is the rank order for any length."""
    combine: Any = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[operation]
    return functools.reduce(combine, rows)


def _run_fill(step: Fill, flat: torch.Tensor, mesh: DeviceMesh, comm: _Functional) -> Pending:
    size, rank = mesh.size(step.mesh_dim), _coordinate(mesh)[step.mesh_dim]
    identity = _fill_value(flat.dtype, step.operation)
    if step.was_whole:
        contributes = step.operation != "sum" or rank == 0
        return Pending(flat.clone() if contributes else torch.full_like(flat, identity), step.local_shape)
    packed = _pack(flat * size if step.operation == "avg" else flat, step.sends)
    result = flat.new_full((math.prod(step.local_shape),), identity)
    copy_into(result, packed, step.receives)
    return Pending(result, step.local_shape)


def _fill_value(dtype: torch.dtype, operation: str) -> float | int | bool:
    """The identity of a reduction. For sums it is minus zero, so that even -0.0 comes back bitwise."""
    if dtype.is_floating_point or dtype.is_complex:
        return _IDENTITY[operation]
    if dtype == torch.bool:
        return operation == "min"
    return {"max": torch.iinfo(dtype).min, "min": torch.iinfo(dtype).max}.get(operation, 0)


_RUN: dict[type, Callable[[Any, torch.Tensor, DeviceMesh, _Functional], Pending]] = {
    Move: _run_move,
    Exchange: _run_exchange,
    Gather: _run_gather,
    Reduce: _run_reduce,
    Fill: _run_fill,
}


# --- packing -------------------------------------------------------------------------------------------------------


def _pack(flat: torch.Tensor, parts: Sequence[Part]) -> torch.Tensor:
    """The parts of a local tensor, one after another; ``flat`` itself if the parts cover it in order."""
    if covers(parts, flat.numel()):
        return flat
    if not parts:
        return flat.new_empty(0)
    return torch.cat([part_view(flat, part).reshape(-1) for part in parts])


def _unpacking(parts: Sequence[Part], local_shape: tuple[int, ...]) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """A function that makes the flat local tensor from its packed parts; None if the packed parts are that tensor."""
    numel = math.prod(local_shape)
    if covers(parts, numel):
        return None

    def unpack(packed: torch.Tensor) -> torch.Tensor:
        result = packed.new_empty(numel)
        copy_into(result, packed, parts)
        return result

    return unpack


# --- collectives ---------------------------------------------------------------------------------------------------


class _Functional:
    """torch's functional collectives: torch.compile traces them, and modes see them. Their results must be waited for."""

    in_flight = True

    @staticmethod
    def all_reduce(flat: torch.Tensor, operation: str, group: dist.ProcessGroup) -> torch.Tensor:
        return torch.ops._c10d_functional.all_reduce(flat, operation, group.group_name)

    @staticmethod
    def reduce_scatter(flat: torch.Tensor, operation: str, size: int, group: dist.ProcessGroup) -> torch.Tensor:
        return torch.ops._c10d_functional.reduce_scatter_tensor(flat, operation, size, group.group_name)

    @staticmethod
    def all_gather(flat: torch.Tensor, size: int, group: dist.ProcessGroup) -> torch.Tensor:
        return torch.ops._c10d_functional.all_gather_into_tensor(flat, size, group.group_name)

    @staticmethod
    def all_to_all(
        packed: torch.Tensor, receive_splits: Sequence[int], send_splits: Sequence[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        return torch.ops._c10d_functional.all_to_all_single(packed, list(receive_splits), list(send_splits), group.group_name)

    @staticmethod
    def broadcast(flat: torch.Tensor, root: int, group: dist.ProcessGroup) -> torch.Tensor:
        return torch.ops._c10d_functional.broadcast(flat, root, group.group_name)

    @staticmethod
    def wait(data: torch.Tensor) -> torch.Tensor:
        return torch.ops._c10d_functional.wait_tensor(data)


class _Direct(_Functional):
    """The same by calls of the process group, which are waited for at once: on a GPU, by the current stream.

    ``dist.all_reduce`` and the like are not used: within a coalescing context they would only be noted.
    """

    in_flight = False

    @staticmethod
    def all_reduce(flat: torch.Tensor, operation: str, group: dist.ProcessGroup) -> torch.Tensor:
        options, result = dist.AllreduceOptions(), flat.clone()
        options.reduceOp = _OPERATIONS[operation]
        group.allreduce([result], options).wait()
        return result

    @staticmethod
    def reduce_scatter(flat: torch.Tensor, operation: str, size: int, group: dist.ProcessGroup) -> torch.Tensor:
        options, result = dist.ReduceScatterOptions(), flat.new_empty(flat.numel() // size)
        options.reduceOp = _OPERATIONS[operation]
        group._reduce_scatter_base(result, flat, options).wait()
        return result

    @staticmethod
    def all_gather(flat: torch.Tensor, size: int, group: dist.ProcessGroup) -> torch.Tensor:
        result = flat.new_empty(flat.numel() * size)
        group._allgather_base(result, flat).wait()
        return result

    @staticmethod
    def all_to_all(
        packed: torch.Tensor, receive_splits: Sequence[int], send_splits: Sequence[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        result = packed.new_empty(sum(receive_splits))
        group.alltoall_base(result, packed, list(receive_splits), list(send_splits)).wait()
        return result

    @staticmethod
    def broadcast(flat: torch.Tensor, root: int, group: dist.ProcessGroup) -> torch.Tensor:
        options, result = dist.BroadcastOptions(), flat.clone()
        options.rootRank = root
        group.broadcast([result], options).wait()
        return result

    @staticmethod
    def wait(data: torch.Tensor) -> torch.Tensor:
        return data


_FUNCTIONAL, _DIRECT = _Functional(), _Direct()
_OPERATIONS: dict[str, Any] = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
all_to_all = _FUNCTIONAL.all_to_all


def _is_watched(tensor: torch.Tensor) -> bool:
    """Whether a trace or a mode must see the collectives."""
    return type(tensor) is not torch.Tensor or torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None


def _reduce(tensor: torch.Tensor, operation: str, root: int, group_name: str) -> torch.Tensor:
    """Reduce onto rank ``root`` of a group, by one ``dist.reduce``. On other ranks the result has no defined values.

    torch's functional collectives lack this collective. If torch.compile traces, it is an operator of its own.
    """
    result = tensor.clone()
    dist.reduce(result, group=_groups_by_name[group_name], group_dst=root, op=getattr(dist.ReduceOp, operation.upper()))
    return result


@torch.library.custom_op("ragged_shard::reduce", mutates_args=())
def _traced_reduce(tensor: torch.Tensor, operation: str, root: int, group_name: str) -> torch.Tensor:
    return _reduce(tensor, operation, root, group_name)


@_traced_reduce.register_fake
def _(tensor: torch.Tensor, operation: str, root: int, group_name: str) -> torch.Tensor:
    return torch.empty_like(tensor)


def mesh_group(mesh: DeviceMesh, mesh_dims: tuple[int, ...]) -> dist.ProcessGroup:
    """The group of the ranks that differ from this rank only in ``mesh_dims``, in mesh order.

    A group over several mesh dimensions, or of ranks that do not ascend, is made at first use, by its members alone, and lives
    as long as the world's group.

    Raises:
        NotImplementedError: the ranks along ``mesh_dims`` are not in ascending order, and torch always sorts the ranks of a
            group (2.11). On all ranks of the mesh.
    """
    ascends = ranks_ascend(mesh, mesh_dims)
    if len(mesh_dims) == 1 and ascends:
        return mesh.get_group(mesh_dims[0])
    # Not get_local_rank(): that is the position in the group of the mesh dimension.
    where = tuple(slice(None) if dim in mesh_dims else index for dim, index in enumerate(_coordinate(mesh)))
    if not ascends and not can_order_groups:
        raise NotImplementedError(
            f"redistribution over dimensions {mesh_dims} of {mesh}: its ranks are not in ascending order, and this version of "
            "torch sorts the ranks of each process group. Use a mesh whose ranks ascend, or torch 2.13"
        )
    with _disable_current_modes():
        ranks = mesh.mesh[where].flatten().tolist()
    return group_of(ranks, parent=mesh.get_group(mesh_dims[0]) if len(mesh_dims) == 1 else None)


def warn_of_order(mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
    """Warn if torch itself may have put the parts of a plain DTensor elsewhere than ``mesh`` says. Once per process.

    Torch's collectives of DTensors take a mesh coordinate for the position in a process group, whose ranks ascend. So if those
    of the mesh do not, ``distribute_tensor`` and ``full_tensor`` follow one order; local cuts, ``from_local`` and DCP the
    other one. Here, the mesh decides.
    """
    if any(isinstance(p, Shard) and not ranks_ascend(mesh, (dim,)) for dim, p in enumerate(placements)):
        warnings.warn(_ORDER, stacklevel=2)


_ORDER = (
    "a DTensor has Shard on a mesh whose ranks are not in ascending order. torch_ragged places its parts by mesh coordinates, "
    "as DCP does. torch's own distribute_tensor, full_tensor and redistribute place them by the order of ranks, so what they "
    "have placed is read in another order here: use a mesh whose ranks ascend along each dimension"
)


_groups_by_name: weakref.WeakValueDictionary[str, dist.ProcessGroup] = weakref.WeakValueDictionary()
