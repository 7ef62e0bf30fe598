"""Redistribution to and from RaggedShard: a pair of placements -> a transfer plan -> one collective.

Per mesh dimension (``numel`` elements, ``m`` ranks; "gain" is what a rank must receive):

=====================  ==========================================================================
Ragged -> Replicate    all-gather if the units are even; else one uneven all-to-all, or one broadcast per
                       owner where an all-to-all would need a much larger send buffer
Replicate -> Ragged    local copy
Ragged <-> Ragged,     one uneven all-to-all; an element travels only if its owner changes
Ragged <-> Shard
Partial -> Ragged      reduce-scatter if the units are even; else one uneven all-to-all and a local reduction in rank
                       order, or one reduce per owner where that would need a much larger buffer
Ragged -> Partial      local: every other rank contributes the identity of the reduction
=====================  ==========================================================================

Collectives go through ``torch.ops._c10d_functional`` so that they trace and CommDebugMode counts them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from torch_ragged._ownership import Box, Cut, owned, run_range
from torch_ragged.placement_types import RaggedShard, cuts_of

__all__ = ["TransferPlan", "broadcast_local", "redistribute_local", "transfer_plan"]

# Above this ratio of send (or receive) buffer to tensor, one collective per owner is used instead of one all-to-all.
_MAX_BUFFER_RATIO = 2

_IDENTITY = {"sum": -0.0, "avg": -0.0, "max": -math.inf, "min": math.inf}


@dataclass(frozen=True)
class TransferPlan:
    """What one rank packs for, and unpacks from, every rank of a group, in rank order.

    ``sends[r]`` are the boxes of this rank's local tensor that rank ``r`` gets, ``receives[r]`` the boxes of this
    rank's new local tensor that come from rank ``r``; both in the same order on either side. Offsets are relative
    to the box of ``source`` / ``target`` named first in each pair.
    """

    send_splits: tuple[int, ...]
    receive_splits: tuple[int, ...]
    sends: tuple[tuple[tuple[Box, Box], ...], ...]
    receives: tuple[tuple[tuple[Box, Box], ...], ...]


def redistribute_local(
    local: torch.Tensor,
    mesh: DeviceMesh,
    shape: Sequence[int],
    source: tuple[Placement, ...],
    target: tuple[Placement, ...],
) -> torch.Tensor:
    """Move ``local`` from ``source`` to ``target`` placements, at least one of which is a RaggedShard.

    Args:
        local: the local tensor under ``source``; 1-D where ``source`` holds a RaggedShard.
        shape: the global shape.

    Returns:
        the local tensor under ``target``. It aliases ``local`` if both own the same elements.

    Raises:
        NotImplementedError: another mesh dimension shards the tensor too, or a placement is of an unknown kind.
    """
    steps = _steps(tuple(shape), source, target)
    for mesh_dim, before, after in steps:
        local = _redistribute_dim(local, mesh, mesh_dim, tuple(shape), before, after)
    return local


def _steps(
    shape: tuple[int, ...], source: tuple[Placement, ...], target: tuple[Placement, ...]
) -> list[tuple[int, Placement, Placement]]:
    """The changes to make, one mesh dimension at a time: first those that give up a shard, then those that make one."""
    for placements in (source, target):
        sharded = [p for p in placements if not isinstance(p, (Replicate, Partial))]
        if len(sharded) > 1:
            raise NotImplementedError(
                f"redistribution from {source} to {target}: a tensor with a RaggedShard can be redistributed only where no "
                f"other mesh dimension shards it, got {len(sharded)} sharded mesh dimensions"
            )
    changes = [(i, s, t) for i, (s, t) in enumerate(zip(source, target)) if s != t]
    if any(isinstance(p, Partial) and isinstance(q, Partial) for _, p, q in changes):
        raise NotImplementedError(f"redistribution from {source} to {target}: one Partial cannot become another")
    return sorted(changes, key=lambda change: not isinstance(change[2], (Replicate, Partial)))


def _redistribute_dim(
    local: torch.Tensor, mesh: DeviceMesh, mesh_dim: int, shape: tuple[int, ...], source: Placement, target: Placement
) -> torch.Tensor:
    group, size, rank = mesh.get_group(mesh_dim), mesh.size(mesh_dim), mesh.get_local_rank(mesh_dim)
    numel = math.prod(shape)
    if isinstance(source, RaggedShard) and isinstance(target, Replicate):
        return _gather(local, source.local_units, numel, group, rank).view(shape)
    if isinstance(source, RaggedShard) and isinstance(target, Partial):
        return _to_partial(local, source.local_units, shape, size, rank, target.reduce_op)
    if isinstance(source, Replicate) and isinstance(target, RaggedShard):
        mine = owned(shape, (size,), cuts_of((target,)), (rank,))
        pieces = [_narrow(local, box.offsets, box.sizes).reshape(-1) for box in mine.boxes]
        return torch.cat(pieces) if pieces else local.new_empty(0)
    if isinstance(source, Partial) and isinstance(target, RaggedShard):
        return _reduce(local.reshape(-1), target.local_units, group, rank, source.reduce_op)
    if isinstance(source, (RaggedShard, Shard)) and isinstance(target, (RaggedShard, Shard)):
        return _exchange(local, shape, cuts_of((source,))[0], cuts_of((target,))[0], group, rank)
    if not isinstance(source, RaggedShard) and not isinstance(target, RaggedShard):
        raise NotImplementedError(
            f"redistribution from {source} to {target} on mesh dimension {mesh_dim} together with a RaggedShard on "
            "another: redistribute one mesh dimension at a time"
        )
    raise NotImplementedError(f"redistribution from {source} to {target}: redistribute to Replicate() in between")


def broadcast_local(
    tensor: torch.Tensor, mesh: DeviceMesh, shape: Sequence[int], placements: tuple[Placement, ...]
) -> torch.Tensor:
    """What this rank holds, under ragged ``placements``, of the replicated ``tensor`` expanded to ``shape``; 1-D.

    Only elements of this rank are made, the expansion is never materialised. No communication.
    """
    coordinate = tuple(mesh.get_local_rank(dim) for dim in range(mesh.ndim))
    mine = owned(tuple(shape), tuple(mesh.shape), cuts_of(placements), coordinate)
    expanded = tensor.expand(tuple(shape))
    pieces = [_narrow(expanded, box.offsets, box.sizes).reshape(-1) for box in mine.boxes]
    return torch.cat(pieces) if pieces else tensor.new_empty(0)


def _narrow(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(offsets, sizes)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


# --- Ragged -> Replicate -------------------------------------------------------------------------------------------


def _gather(local: torch.Tensor, units: tuple[int, ...], numel: int, group: dist.ProcessGroup, rank: int) -> torch.Tensor:
    size = len(units)
    if len(set(units)) == 1:
        return _wait(_c10d().all_gather_into_tensor(local, size, group.group_name))
    splits = [stop - start for start, stop in (run_range(numel, units, r) for r in range(size))]
    if max(splits) * size <= _MAX_BUFFER_RATIO * numel:
        return _all_to_all(local.repeat(size), splits, [splits[rank]] * size, group)
    pieces = []
    for owner, split in enumerate(splits):
        if split:
            piece = local if owner == rank else local.new_empty(split)
            pieces.append(_wait(_c10d().broadcast(piece, owner, group.group_name)))
    return torch.cat(pieces) if pieces else local


# --- Ragged -> Partial, Partial -> Ragged --------------------------------------------------------------------------


def _to_partial(
    local: torch.Tensor, units: tuple[int, ...], shape: tuple[int, ...], size: int, rank: int, op: str
) -> torch.Tensor:
    if op not in _IDENTITY:
        raise NotImplementedError(f"redistribution from RaggedShard to Partial({op!r}): redistribute to Replicate()")
    full = local.new_full((math.prod(shape),), _fill_value(local.dtype, op))
    start, stop = run_range(full.numel(), units, rank)
    full[start:stop] = local * size if op == "avg" else local
    return full.view(shape)


def _fill_value(dtype: torch.dtype, op: str) -> float | int | bool:
    """The identity of the reduction ``op``; minus zero for sums, so that even a sum of -0.0 comes back bitwise."""
    if dtype.is_floating_point or dtype.is_complex:
        return _IDENTITY[op]
    if dtype == torch.bool:
        return op == "min"
    return {"max": torch.iinfo(dtype).min, "min": torch.iinfo(dtype).max}.get(op, 0)


def _reduce(local: torch.Tensor, units: tuple[int, ...], group: dist.ProcessGroup, rank: int, op: str) -> torch.Tensor:
    """Reduce whole tensors straight onto the owners of their intervals."""
    if op not in _IDENTITY:
        raise NotImplementedError(f"redistribution from Partial({op!r}) to RaggedShard: redistribute to Replicate() first")
    size, numel = len(units), local.numel()
    intervals = [run_range(numel, units, r) for r in range(size)]
    own = intervals[rank][1] - intervals[rank][0]
    largest = max(stop - start for start, stop in intervals)
    kernel = "sum" if op == "avg" else op
    if len(set(units)) == 1:
        reduced = _wait(_c10d().reduce_scatter_tensor(local.contiguous(), kernel, size, group.group_name))
    elif largest * size <= _MAX_BUFFER_RATIO * numel:
        received = _all_to_all(local, [own] * size, [stop - start for start, stop in intervals], group)
        reduced = _reduce_rows(received.view(size, own), kernel)
    else:
        reduced = local.new_empty(0)
        for owner, (start, stop) in enumerate(intervals):
            if start < stop:
                piece = local[start:stop].clone()
                dist.reduce(piece, group=group, group_dst=owner, op=getattr(dist.ReduceOp, kernel.upper()))
                reduced = piece if owner == rank else reduced
    return reduced / size if op == "avg" else reduced


def _reduce_rows(rows: torch.Tensor, op: str) -> torch.Tensor:
    """Reduce row by row, so that the order of additions is the rank order whatever the length."""
    result = rows[0].clone()
    combine: Any = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[op]
    for row in rows[1:]:
        combine(result, row, out=result)
    return result


# --- Ragged <-> Ragged, Ragged <-> Shard ---------------------------------------------------------------------------


def _exchange(
    local: torch.Tensor, shape: tuple[int, ...], source: Cut, target: Cut, group: dist.ProcessGroup, rank: int
) -> torch.Tensor:
    size = group.size()
    plan, stays = transfer_plan(shape, source, target, size, rank)
    here, there = (owned(shape, (size,), (cut,), (rank,)) for cut in (source, target))
    if stays:
        return local.reshape(there.local_shape)
    if local.numel() != here.numel:
        raise AssertionError(f"local tensor of {tuple(local.shape)} where {here.local_shape} was expected")
    packed = _pack(local.reshape(here.local_shape), plan.sends)
    received = _all_to_all(packed, list(plan.receive_splits), list(plan.send_splits), group)
    return _unpack(received, there.local_shape, plan.receives)


@lru_cache(maxsize=4096)
def transfer_plan(shape: tuple[int, ...], source: Cut, target: Cut, size: int, rank: int) -> tuple[TransferPlan, bool]:
    """The plan of ``rank`` for moving a tensor of ``shape`` from ``source`` to ``target`` over ``size`` ranks.

    Returns:
        the plan, and whether no element changes its owner on any rank (and storage order stays), so that every rank
        keeps its local tensor. Its cost grows with the number of ranks, not with the size of the tensor.
    """
    before = [owned(shape, (size,), (source,), (r,)) for r in range(size)]
    after = [owned(shape, (size,), (target,), (r,)) for r in range(size)]
    stays = all(
        [(b.offsets, b.sizes) for b in s.boxes if b.numel] == [(b.offsets, b.sizes) for b in t.boxes if b.numel]
        for s, t in zip(before, after)
    )
    sends = tuple(tuple(_intersections(before[rank].boxes, peer.boxes, own_first=True)) for peer in after)
    receives = tuple(tuple(_intersections(peer.boxes, after[rank].boxes, own_first=False)) for peer in before)
    splits = [tuple(sum(part.numel for _, part in pairs) for pairs in side) for side in (sends, receives)]
    return TransferPlan(splits[0], splits[1], sends, receives), stays


def _intersections(source: Sequence[Box], target: Sequence[Box], own_first: bool) -> list[tuple[Box, Box]]:
    """Pairs (own box, common part) of all overlapping boxes, in storage order of the source, then of the target."""
    pairs = []
    for s, t in itertools.product(source, target):
        starts = tuple(map(max, s.offsets, t.offsets))
        stops = tuple(min(a + n, b + k) for a, n, b, k in zip(s.offsets, s.sizes, t.offsets, t.sizes))
        if all(a < b for a, b in zip(starts, stops)):
            own = s if own_first else t
            inside = tuple(a - o for a, o in zip(starts, own.offsets))
            pairs.append((own, Box(inside, tuple(b - a for a, b in zip(starts, stops)), own.local_offset)))
    return pairs


def _views(local: torch.Tensor, pairs: Sequence[tuple[Box, Box]]) -> list[torch.Tensor]:
    flat = local.view(-1)
    return [
        _narrow(flat[own.local_offset : own.local_offset + own.numel].view(own.sizes), part.offsets, part.sizes)
        for own, part in pairs
    ]


def _in_storage_order(pairs: Sequence[tuple[Box, Box]]) -> bool:
    """Whether the parts, one after another, are the storage of the local tensor from its start."""
    position = 0
    for own, part in pairs:
        start = own.local_offset + sum(o * math.prod(own.sizes[d + 1 :]) for d, o in enumerate(part.offsets))
        if start != position or part.sizes[1:] != own.sizes[1:]:
            return False
        position += part.numel
    return True


def _pack(local: torch.Tensor, sends: Sequence[Sequence[tuple[Box, Box]]]) -> torch.Tensor:
    pairs = [pair for per_rank in sends for pair in per_rank]
    local = local.contiguous()
    if _in_storage_order(pairs):
        return local.view(-1)
    return torch.cat([view.reshape(-1) for view in _views(local, pairs)])


def _unpack(
    received: torch.Tensor, local_shape: tuple[int, ...], receives: Sequence[Sequence[tuple[Box, Box]]]
) -> torch.Tensor:
    pairs = [pair for per_rank in receives for pair in per_rank]
    if _in_storage_order(pairs):
        return received.view(local_shape)
    result = received.new_empty(local_shape)
    views = _views(result, pairs)
    for view, piece in zip(views, received.split([view.numel() for view in views])):
        view.copy_(piece.view(view.shape))
    return result


# --- collectives ---------------------------------------------------------------------------------------------------


def _c10d():  # type: ignore[no-untyped-def]
    return torch.ops._c10d_functional


def _wait(tensor: torch.Tensor) -> torch.Tensor:
    return _c10d().wait_tensor(tensor)


def _all_to_all(
    packed: torch.Tensor, receive_splits: list[int], send_splits: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    return _wait(_c10d().all_to_all_single(packed.contiguous(), receive_splits, send_splits, group.group_name))
