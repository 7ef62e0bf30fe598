"""Copies, casts, fills and factories, which run on the local tensors, and ops that return one value to every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from torch_ragged.tensor._ops._pointwise_ops import pointwise_rule
from torch_ragged.tensor._ops._rows import has_ragged_rows, rows_of
from torch_ragged.tensor._ops._rules import (
    NoLocalWay,
    OpCall,
    Sharding,
    decomposition,
    is_row_major,
    rule,
    tensor_leaves,
    unsupported,
)
from torch_ragged.tensor.placement_types import RaggedShard

aten = torch.ops.aten

rule(
    aten.alias.default,
    aten.clone.default,
    aten.copy_.default,
    aten.detach.default,
    aten.detach_.default,
    aten._to_copy.default,
    aten.empty_like.default,
    aten.fill.Scalar,
    aten.fill.Tensor,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.full_like.default,
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
    aten.masked_fill_.Scalar,
    aten.masked_fill_.Tensor,
    aten.ones_like.default,
    aten.zero_.default,
    aten.zeros_like.default,
)(pointwise_rule)


@rule(aten.index_put.default, aten.index_put_.default)
def masked_put_rule(call: OpCall) -> Sharding:
    """``tensor[mask] = number``, with a mask of the tensor's shape: element-wise, as ``masked_fill``."""
    tensor, indices, value = call.args[:3]
    (mask, *others) = indices
    if others or mask is None or mask.tensor_meta.dtype != torch.bool or mask.shape != tensor.shape or value.shape:
        raise NoLocalWay("it writes elements by index")
    return pointwise_rule(call)


@rule(
    aten.new_empty.default, aten.new_full.default, aten.new_ones.default, aten.new_zeros.default, aten.new_empty_strided.default
)
def new_factory_rule(call: OpCall) -> Sharding:
    """A new tensor of the same shape gets the argument's placements, as in DTensor; of another shape it is replicated."""
    (spec,) = tensor_leaves(call)
    (meta,) = call.torch.output_meta()
    clean = tuple(Replicate() if isinstance(p, Partial) else p for p in spec.placements)
    rows = rows_of(spec) if has_ragged_rows(spec.placements) else None
    if (
        meta is None
        or meta.shape != spec.shape
        or not is_row_major(meta)
        or (rows and rows.dims != tuple(range(len(rows.dims))))
    ):
        return Sharding([(spec.placements, None)], (Replicate(),) * spec.mesh.ndim)
    if rows:
        clean = (*clean[: rows.mesh_dim], RaggedShard(rows.dims, rows.counts), *clean[rows.mesh_dim + 1 :])
    strided = call.op is aten.new_empty_strided.default

    def run(local: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        size = (local.numel(),) if rows else tuple(local.shape)  # That of a ragged placement is flat.
        return local.new_empty(size, **kwargs) if strided else call.op(local, size, *args[1:], **kwargs)

    return Sharding([(spec.placements, None)], clean, run)


@decomposition(aten.eye.out, aten.eye.m_out)
def eye(op: torch._ops.OpOverload, *sizes: int, out: DTensor) -> DTensor:
    """``nn.init.eye_``: every rank makes the whole matrix and keeps its own part. No communication."""
    if tuple(out.shape) != (sizes[0], sizes[-1]):
        raise unsupported(op, [out], f"out= must have the shape of the result, {(sizes[0], sizes[-1])}")  # type: ignore
    whole = torch.eye(sizes[0], sizes[-1], dtype=out.dtype, device=out.device)
    out.copy_(DTensor.from_local(whole, out.device_mesh, [Replicate()] * out.device_mesh.ndim, run_check=False))
    return out


@decomposition(aten._local_scalar_dense.default)
def item(op: torch._ops.OpOverload, tensor: DTensor) -> Any:
    """``item()``: every rank gets the owner's value. One broadcast."""
    return op(tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim).to_local())


@decomposition(aten.equal.default)
def equal(op: torch._ops.OpOverload, left: DTensor, right: DTensor) -> bool:
    """``torch.equal``: the same answer on every rank. One all-reduce of a count."""
    if left.shape != right.shape:
        return False
    different = torch.ne(left, right).sum()
    return bool(different.full_tensor() == 0)  # type: ignore[attr-defined]


@decomposition(aten._amp_foreach_non_finite_check_and_unscale_.default)
def unscale_(op: torch._ops.OpOverload, tensors: list[DTensor], found: torch.Tensor, inverse: torch.Tensor) -> None:
    """``GradScaler.unscale_``: it runs locally, then one all-reduce per mesh dimension tells whether any rank found inf or NaN.

    So all ranks skip the optimizer step, or no rank does.
    """
    here, scale = (t.to_local() if isinstance(t, DTensor) else t for t in (found, inverse))
    op([t.to_local() if isinstance(t, DTensor) else t for t in tensors], here, scale)
    for mesh in dict.fromkeys(t.device_mesh for t in tensors if isinstance(t, DTensor)):
        everywhere = DTensor.from_local(here, mesh, [Partial("max")] * mesh.ndim, run_check=False).full_tensor()
        here.copy_(everywhere)
