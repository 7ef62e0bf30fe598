"""What ``torch_ragged.spmd.parallelize`` changes in torch, for the whole process. An import changes nothing of it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor import _collective_utils as costs
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpStrategy
from torch.distributed.tensor._ops import utils as op_utils
from torch.distributed.tensor.parallel import loss
from torch.distributed.tensor.placement_types import _StridedShard

from torch_ragged._register._hook import OPERATORS, Hook, has, hooks
from torch_ragged._register._torch import drop_advice_to_flatten
from torch_ragged.tensor._ops import returns_alias
from torch_ragged.tensor._plain_ops import all_ops, plain_handlers
from torch_ragged.tensor._read import methods_of_one_device

__all__ = ["compute_as_before", "compute_as_one_device", "compute_as_torch", "viewing_in_inference"]

hooks.append(
    Hook(
        "OpDispatcher._allow_implicit_replication, _custom_op_handlers, _propagate_op_sharding_dispatch_slow_path, "
        "loss._disable_custom_loss_ops, _ops.utils.redistribute_cost, _ops.utils.expand_to_full_mesh_op_strategy, "
        "DTensor.tolist, numpy, data, __dlpack__, __format__ and __deepcopy__, "
        "after torch_ragged.spmd.parallelize; the logger of _redistribute, also after fully_shard of DTensors",
        "plain tensors that meet DTensors count as replicated; averages of losses are those of all rows, after loss_parallel() "
        "too; an op that torch cannot shard runs on replicated tensors; if an op's arguments fit, torch compares no other ways "
        "to place them; the cost of such a way takes no search; what a script reads is the value of the whole tensor; no "
        "advice to flatten mesh dimensions is logged",
        OPERATORS,
        lambda: (
            hasattr(type(DTensor._op_dispatcher), "_allow_implicit_replication")
            and has(DTensor._op_dispatcher.sharding_propagator.propagate, "op_info")
            and hasattr(loss, "_disable_custom_loss_ops")
            and has(op_utils.redistribute_cost, "current_spec", "target_spec")
            and has(op_utils.expand_to_full_mesh_op_strategy, "mesh", "op_schema", "single_mesh_dim_strategies", "input_index")
            and callable(torch._C._clear_DTensor_sharding_propagator_cache)
            and has(costs._compute_placement_transition_cost, "mesh_topo", "mesh_dim", "comm_bytes_gb")
        ),
        install=None,  # ``compute_as_one_device`` does it.
    )
)


_original: list[Any] = []
"""What torch had, while it is replaced: the dispatcher's handlers and its promotion of plain tensors, the end of
``loss_parallel``, which removes all handlers of losses, the cost of a redistribution, the strategies of an op, and
methods of DTensor."""


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
        _original.extend((op_utils.redistribute_cost, op_utils.expand_to_full_mesh_op_strategy))
        methods = methods_of_one_device()
        _original.append({name: vars(DTensor).get(name) for name in methods})
        for name, method in methods.items():
            setattr(DTensor, name, method)
        drop_advice_to_flatten()
        loss._disable_custom_loss_ops, op_utils.redistribute_cost = _end_loss_parallel, _redistribute_cost
        op_utils.expand_to_full_mesh_op_strategy = _strategies_that_fit
        torch._C._clear_DTensor_sharding_propagator_cache()  # Views that it knows would copy, and lose what is written to them.
    all_ops.run = True
    handlers.update(plain_handlers())
    dispatcher._allow_implicit_replication = promote


@functools.cache
def _views() -> tuple[Any, ...]:
    """The ops of ATen that return views."""
    packets = [
        each for each in map(functools.partial(getattr, torch.ops.aten), dir(torch.ops.aten)) if hasattr(each, "overloads")
    ]
    return tuple([op for each in packets for name in each.overloads() if returns_alias(op := getattr(each, name))])


@contextlib.contextmanager
def viewing_in_inference() -> Iterator[None]:
    """Inside of it, ``inference_mode`` views DTensors that were made outside of that mode, such as parameters.

    A view of a tensor from outside is no tensor of inference mode, but the DTensor that torch makes of it is one. So torch
    raises "Cannot set version_counter for inference tensor". (2.11 to 2.15)
    """
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers

    def view(op: Any, args: Any, kwargs: Any) -> Any:
        del handlers[op]
        try:
            if not isinstance(args[0], DTensor) or args[0].is_inference():
                return op(*args, **kwargs)
            with torch.inference_mode(False), torch.no_grad(), torch._C._AutoDispatchBelowADInplaceOrView():
                return op(*args, **kwargs)
        finally:
            handlers[op] = view

    added = dict.fromkeys([op for op in _views() if op not in handlers], view)
    handlers.update(added)
    try:
        yield
    finally:
        for op in added:
            del handlers[op]


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


def _strategies_that_fit(
    mesh: Any, op_schema: Any, single_mesh_dim_strategies: list[Any], *, input_index: int = 1, **options: Any
) -> Any:
    """torch's strategies of an op; only those that move nothing, if there are any, because torch would choose one of these.

    torch makes all products of an op's strategies over the mesh dimensions, with costs: of 7 strategies, 343 on three mesh
    dimensions, 50 ms and more per op. That is most of the first step of a plan.
    """
    expand = _original[4]
    given = [each.strategies[0].output_spec for each in (*op_schema.args_strategy, *op_schema.kwargs_strategy)]

    def fits(strategy: Any, dim: int) -> bool:
        wanted = [placement for placement in strategy[input_index:] if placement is not None]
        return len(wanted) == len(given) and all(spec.placements[dim] == p for spec, p in zip(given, wanted))

    if all(spec.mesh == mesh for spec in given):
        fitting = [[row for row in single_mesh_dim_strategies if fits(row, dim)] for dim in range(mesh.ndim)]
        if all(fitting):
            rows = [row for row in single_mesh_dim_strategies if any(row in each for each in fitting)]
            found = expand(mesh, op_schema, rows, input_index=input_index, **options).strategies
            moving_nothing = [
                each
                for each in found
                if [spec.placements for spec in each.input_specs] == [spec.placements for spec in given]
                and not any(cost for costs in each.redistribute_cost for cost in costs)
            ]
            if moving_nothing:
                return OpStrategy(moving_nothing)
    return expand(mesh, op_schema, single_mesh_dim_strategies, input_index=input_index, **options)


def compute_as_torch() -> None:
    """Undo :func:`compute_as_one_device`."""
    if not _original:
        return
    dispatcher = DTensor._op_dispatcher
    handlers: dict[Any, Any] = dispatcher._custom_op_handlers
    kept, promotes, *functions, methods = _original
    loss._disable_custom_loss_ops, op_utils.redistribute_cost, op_utils.expand_to_full_mesh_op_strategy = functions
    drop_advice_to_flatten(False)
    for name, method in methods.items():
        if method is None:  # DTensor has that of Tensor.
            delattr(DTensor, name)
        else:
            setattr(DTensor, name, method)
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
