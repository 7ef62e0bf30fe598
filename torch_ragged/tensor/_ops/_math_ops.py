"""Reductions over all elements: a local result that is pending (Partial), or one all-gather of a value per rank.

No rule may all-gather the tensor itself.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Shard

from torch_ragged.tensor._cut_placement import has_own_rules
from torch_ragged.tensor._local_tensor import on_each_rank
from torch_ragged.tensor._ops._rows import rows_of
from torch_ragged.tensor._ops._rules import NoLocalWay, NormPartial, OpCall, Sharding, decomposition, rule, tensor_leaves, wide

aten = torch.ops.aten


def _pending_outputs(spec: Any, pending: Any, call: OpCall) -> tuple[Any, ...]:
    """Output placements: replicated mesh dimensions stay replicated, sharded ones become pending a reduction."""
    if any(isinstance(p, Partial) and (call.op is not aten.sum.default or pending != p) for p in spec.placements):
        raise NoLocalWay("a Partial tensor must be reduced first")
    return tuple(p if p.is_replicate() else pending for p in spec.placements)


@rule(aten.sum.default)
def sum_rule(call: OpCall) -> Sharding:
    (spec,) = tensor_leaves(call)
    return Sharding([(spec.placements, None)], _pending_outputs(spec, Partial("sum"), call))


def _norm_placement(order: float) -> Partial | NormPartial:
    return Partial("sum") if order == 0 else NormPartial(order)


@rule(aten.linalg_vector_norm.default)
def vector_norm_rule(call: OpCall) -> Sharding:
    """The p-norm over all elements, for 0 <= p < inf."""
    (spec,) = tensor_leaves(call)
    if call.argument("dim") or call.argument("keepdim", False) or not 0 <= call.argument("ord", 2) < math.inf:
        raise NoLocalWay("its norms are over some dimensions only, or their order has no sum over shards")
    return Sharding([(spec.placements, None)], _pending_outputs(spec, _norm_placement(call.argument("ord", 2)), call))


@rule(aten._foreach_norm.Scalar)
def foreach_norm_rule(call: OpCall) -> Sharding:
    """The p-norm of every tensor of a list that may mix ragged and other placements."""
    specs = tensor_leaves(call)
    order = call.argument("ord", 2)
    outputs: Any = [_pending_outputs(spec, _norm_placement(order), call) for spec in specs]
    return Sharding([(spec.placements, None) for spec in specs], outputs)


@decomposition(aten._foreach_norm.Scalar)
def foreach_norm(op: torch._ops.OpOverload, tensors: list[DTensor], order: float = 2, dtype: Any = None) -> Any:
    if 0 <= order < math.inf:
        return NotImplemented
    return [aten.linalg_vector_norm.default(t, order, dtype=dtype) for t in tensors]


@decomposition(aten._foreach_max.default)
def foreach_max(op: torch._ops.OpOverload, tensors: list[torch.Tensor]) -> Any:
    return [aten.amax.default(tensor) for tensor in tensors]


@decomposition(aten.linalg_vector_norm.default)
def vector_norm(
    op: torch._ops.OpOverload, tensor: Any, order: float = 2, dim: Any = None, keepdim: bool = False, **kwargs: Any
) -> Any:
    if not _names_all_dims(tensor, dim):
        return NotImplemented
    if dim or keepdim:
        return _kept(tensor, keepdim, op(tensor, order, **kwargs))
    if order != math.inf:
        return NotImplemented
    dtype = kwargs.get("dtype")
    return _extreme(torch.abs(tensor if dtype is None else tensor.to(dtype)), "amax")


@decomposition(aten.sum.dim_IntList)
def sum_dim(op: torch._ops.OpOverload, tensor: DTensor, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    return _kept(tensor, keepdim, aten.sum.default(tensor, **kwargs)) if _names_all_dims(tensor, dim) else NotImplemented


@decomposition(aten.mean.default)
def mean(op: torch._ops.OpOverload, tensor: DTensor, *, dtype: torch.dtype | None = None) -> Any:
    """The sum divided by the number of elements, since shards may differ in length. It accumulates at least in float32."""
    result = dtype or tensor.dtype
    if not (result.is_floating_point or result.is_complex):
        raise RuntimeError(f"mean(): could not infer output dtype. Input dtype must be floating point, got {result}")
    average = aten.sum.default(tensor, dtype=wide(result)) / tensor.numel() if tensor.numel() else tensor.sum() * math.nan
    return average.to(result)


@decomposition(aten.mean.dim)
def mean_dim(op: torch._ops.OpOverload, tensor: DTensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """The same if all cut dimensions are averaged. Other averages are left to torch's rule."""
    if _names_all_dims(tensor, dim):
        return _kept(tensor, keepdim, aten.mean.default(tensor, dtype=dtype))
    if not tensor.ndim:  # Its dimensions 0 and -1 are the tensor.
        return _kept(tensor, keepdim, aten.mean.default(tensor, dtype=dtype))
    dims = {d % tensor.ndim for d in ([dim] if isinstance(dim, int) else dim)}
    rows, result = rows_of(tensor._spec), dtype or tensor.dtype
    if rows is None or not dims >= set(rows.dims) or not result.is_floating_point:
        return NotImplemented
    count = math.prod(tensor.shape[d] for d in dims)
    return (aten.sum.dim_IntList(tensor, list(dims), keepdim, dtype=wide(result)) / count).to(result)


@decomposition(aten.dist.default)
def dist(op: torch._ops.OpOverload, left: DTensor, right: DTensor, p: float = 2) -> Any:
    return aten.linalg_vector_norm.default(left - right, p)


@decomposition(aten.max.default, aten.min.default)
def extreme(op: torch._ops.OpOverload, tensor: DTensor) -> Any:
    return _extreme(tensor, "amax" if op is aten.max.default else "amin")


@decomposition(aten.amax.default, aten.amin.default)
def extreme_dim(op: torch._ops.OpOverload, tensor: DTensor, dim: Any = (), keepdim: bool = False) -> Any:
    if not _names_all_dims(tensor, dim):
        return NotImplemented
    result = _extreme(tensor, "amax" if op is aten.amax.default else "amin")
    return result if result is NotImplemented else _kept(tensor, keepdim, result)


@decomposition(aten.all.default, aten.any.default)
def all_or_any(op: torch._ops.OpOverload, tensor: DTensor) -> Any:
    """Whether all (any) elements are true: the smallest (largest) element."""
    if not tensor.numel():
        return NotImplemented
    result = _extreme(tensor != 0, "amin" if op is aten.all.default else "amax")
    return result.to(torch.uint8) if tensor.dtype == torch.uint8 and result is not NotImplemented else result


def _names_all_dims(tensor: Any, dim: Any) -> bool:
    """Whether ``dim`` names all dimensions of a tensor; an empty ``dim`` means all."""
    if not isinstance(tensor, DTensor):
        return False
    dims = [dim] if isinstance(dim, int) else list(dim or [])
    return not dims or sorted(d % max(tensor.ndim, 1) for d in dims) == list(range(tensor.ndim))


def _kept(tensor: Any, keepdim: bool, result: Any) -> Any:
    """``result`` of a reduction over all elements; with ``keepdim``, all dimensions are kept with size 1."""
    return result.view([1] * tensor.ndim) if keepdim else result


def _extreme(tensor: Any, kind: str) -> Any:
    """The largest or smallest element, where NaN wins: one all-gather of a value per rank.

    A rank without elements contributes the least (largest) value of the dtype. An all-reduce may drop a NaN.
    """
    if not has_own_rules(tensor.placements):
        return getattr(torch, kind)(tensor)
    if any(isinstance(p, Partial) for p in tensor.placements) or not tensor.numel() or tensor.dtype.is_complex:
        return NotImplemented
    own = on_each_rank(_own_extreme, tensor.to_local(), kind)
    mesh = tensor.device_mesh
    spread = [p if p.is_replicate() else Shard(0) for p in tensor.placements]
    values = DTensor.from_local(own, mesh, spread, run_check=False).full_tensor()
    return DTensor.from_local(getattr(values, kind)(), mesh, run_check=False)


def _own_extreme(local: torch.Tensor, kind: str) -> torch.Tensor:
    """The largest or smallest element of this rank, as one element; the bound of the dtype if it has none."""
    if local.numel():
        return getattr(local, kind)().reshape(1)
    if local.dtype.is_floating_point:
        return local.new_full((1,), -math.inf if kind == "amax" else math.inf)
    limits = torch.iinfo(local.dtype) if local.dtype != torch.bool else None
    low, high = (limits.min, limits.max) if limits else (False, True)
    return local.new_full((1,), low if kind == "amax" else high)
