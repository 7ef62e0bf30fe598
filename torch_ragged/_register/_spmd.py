"""What ``torch_ragged.spmd.parallelize`` changes in torch, for the whole process. An import changes nothing of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor import _collective_utils as costs
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._ops import utils as op_utils
from torch.distributed.tensor.parallel import loss
from torch.distributed.tensor.placement_types import _StridedShard

from torch_ragged._register._hook import OPERATORS, Hook, has, hooks
from torch_ragged.tensor._plain_ops import all_ops, plain_handlers

__all__ = ["compute_as_before", "compute_as_one_device", "compute_as_torch"]

hooks.append(
    Hook(
        "OpDispatcher._allow_implicit_replication, _custom_op_handlers, _propagate_op_sharding_dispatch_slow_path, "
        "loss._disable_custom_loss_ops, _ops.utils.redistribute_cost, after torch_ragged.spmd.parallelize",
        "plain tensors that meet DTensors count as replicated; averages of losses are those of all rows, after loss_parallel() "
        "too; an op that torch cannot shard runs on replicated tensors; the cost of an op's strategy takes no search",
        OPERATORS,
        lambda: (
            hasattr(type(DTensor._op_dispatcher), "_allow_implicit_replication")
            and has(DTensor._op_dispatcher.sharding_propagator.propagate, "op_info")
            and hasattr(loss, "_disable_custom_loss_ops")
            and has(op_utils.redistribute_cost, "current_spec", "target_spec")
            and callable(torch._C._clear_DTensor_sharding_propagator_cache)
            and has(costs._compute_placement_transition_cost, "mesh_topo", "mesh_dim", "comm_bytes_gb")
        ),
        install=None,  # ``compute_as_one_device`` does it.
    )
)


_original: list[Any] = []
"""What torch had, while it is replaced: the dispatcher's handlers and its promotion of plain tensors, the end of
``loss_parallel``, which removes all handlers of losses, and the cost of a redistribution."""


def compute_as_one_device(promote: bool) -> None:
    """Let ops on plain DTensors give the results of a single device where torch's own rules do not.

    Args:
        promote: whether plain tensors that meet DTensors count as ``Replicate()``.
    """
    dispatcher = DTensor._op_dispatcher
    handlers: dict[Any, Any] = dispatcher._custom_op_handlers
    if not _original:
        kept = {op: handlers.get(op) for op in plain_handlers()}
        _original.extend((kept, dispatcher._allow_implicit_replication, loss._disable_custom_loss_ops))
        _original.append(op_utils.redistribute_cost)
        loss._disable_custom_loss_ops, op_utils.redistribute_cost = _end_loss_parallel, _redistribute_cost
        torch._C._clear_DTensor_sharding_propagator_cache()  # Views that it knows would copy, and lose what is written to them.
    all_ops.run = True
    handlers.update(plain_handlers())
    dispatcher._allow_implicit_replication = promote


def _end_loss_parallel() -> None:
    _original[2]()
    DTensor._op_dispatcher._custom_op_handlers.update(plain_handlers())


def _redistribute_cost(current_spec: DTensorSpec, target_spec: DTensorSpec) -> float:
    """torch's cost of a redistribution, by which it chooses the strategy of an op; without a search if a shard is strided.

    Of strided shards, torch searches all orders of cuts for the cheapest way, for each strategy of each op: seconds per op on
    meshes of two dimensions, minutes on three. This sum over mesh dimensions has the same costs of a step. The way of the
    strategy that is chosen is still torch's.
    """
    is_strided = any(isinstance(p, _StridedShard) for p in (*current_spec.placements, *target_spec.placements))
    if not is_strided or current_spec.shard_order is None or target_spec.shard_order is None:
        return _original[3](current_spec, target_spec)  # type: ignore[no-any-return]
    mesh, topology = current_spec.mesh, costs.MeshTopoInfo.build_from_mesh(current_spec.mesh)
    cost, size = 0.0, costs.spec_to_bytes(current_spec) / current_spec.num_shards / 2**30
    for dim in reversed(range(mesh.ndim)):  # Cuts are undone from the last one on.
        now, then = current_spec.placements[dim], target_spec.placements[dim]
        if now != then:
            now, then = [Shard(each.dim) if isinstance(each, _StridedShard) else each for each in (now, then)]
            if now == then:
                then = Shard(-1)  # Another cut of a dimension costs what a cut of another dimension costs.
            step, size = costs._compute_placement_transition_cost(now, then, topology, dim, size)
            cost += step
    return cost


def compute_as_torch() -> None:
    """Undo :func:`compute_as_one_device`."""
    if not _original:
        return
    dispatcher = DTensor._op_dispatcher
    handlers: dict[Any, Any] = dispatcher._custom_op_handlers
    kept, promotes, loss._disable_custom_loss_ops, op_utils.redistribute_cost = _original
    for op, handler in kept.items():
        if handler is None:
            handlers.pop(op, None)
        else:
            handlers[op] = handler
    dispatcher._allow_implicit_replication = promotes
    all_ops.run = False
    _original.clear()


@contextlib.contextmanager
def compute_as_before() -> Iterator[None]:
    """What :func:`compute_as_one_device` changes inside of the context is undone at its end."""
    before = DTensor._op_dispatcher._allow_implicit_replication if _original else None
    try:
        yield
    finally:
        if before is None:
            compute_as_torch()
        else:
            DTensor._op_dispatcher._allow_implicit_replication = before
