"""Copies, casts, fills and factories: they run on the local tensors as they are."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from torch_ragged._ops._pointwise_ops import pointwise_rule
from torch_ragged._ops._rules import OpCall, Sharding, decomposition, rule, tensor_leaves

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


@rule(aten.new_empty.default, aten.new_full.default, aten.new_ones.default, aten.new_zeros.default)
def new_factory_rule(call: OpCall) -> Sharding:
    """A new tensor of a shape of its own belongs to no rank in particular: replicated."""
    (spec,) = tensor_leaves(call)
    return Sharding([(spec.placements, None)], (Replicate(),) * spec.mesh.ndim)


@decomposition(aten._local_scalar_dense.default)
def item(op: torch._ops.OpOverload, tensor: DTensor) -> Any:
    """``item()``: every rank gets the value of the owner. One broadcast."""
    return op(tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim).to_local())


@decomposition(aten.equal.default)
def equal(op: torch._ops.OpOverload, left: DTensor, right: DTensor) -> bool:
    """``torch.equal``: the same answer on every rank. One all-reduce of a count."""
    if left.shape != right.shape:
        return False
    different = torch.ne(left, right).sum()
    return bool(different.full_tensor() == 0)
