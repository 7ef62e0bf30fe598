"""The sharding of CPU attention on plain DTensors: torch has rules for the kernels of GPUs only.

It must not change a rule that torch has.
"""

from __future__ import annotations

import functools
import math
from typing import Optional

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, RuntimeSchemaInfo
from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy
from torch.distributed.tensor.placement_types import Placement

__all__ = ["register_cpu_attention"]

_OPS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: (2, 3),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (3, 6),
}
"""The number of outputs, and of inputs without the mask: all have batches, heads and rows as dimensions 0, 1 and 2."""


def register_cpu_attention() -> None:
    """Give DTensor the rule of ``scaled_dot_product_attention`` on CPU.

    Batch and heads may be sharded. Queries may be sharded along the sequence (context parallelism) if keys and values are
    whole, and if the mask is a tensor: ``is_causal`` counts rows from the first one of a rank.
    """
    propagator = DTensor._op_dispatcher.sharding_propagator
    known = [table for name, table in vars(propagator).items() if name.endswith("strategy_funcs")]
    for op, counts in _OPS.items():
        if not any(op in table for table in known):
            propagator.register_op_strategy(op, functools.partial(_strategy, *counts), RuntimeSchemaInfo(needs_pytree=True))


def _strategy(outputs: int, inputs: int, schema: OpSchema) -> OpStrategy:
    specs = [a.strategies[0].output_spec for a in schema.args_schema if isinstance(a, OpStrategy)]
    query, key = [spec for spec in specs if len(spec.shape) == 4][inputs // 6 : inputs // 6 + 2]  # Backward: after a gradient.
    mask = schema.kwargs_schema.get("attn_mask")
    mask_spec = None if mask is None else mask.strategies[0].output_spec  # type: ignore[attr-defined]
    mesh, rows, whole = schema.get_mesh_from_args(), Shard(2), Replicate()
    is_causal = bool(schema.args_schema[inputs + 1]) if len(schema.args_schema) > inputs + 1 else False
    by_rows: list[Optional[Placement]] = (
        [rows, rows, rows, whole, whole]
        if outputs == 2  # Backward: keys and values get a part of their gradient from each rank.
        else [rows, Partial(), Partial(), rows, rows, whole, whole, rows, rows]
    )
    choices: list[list[Optional[Placement]]] = [] if is_causal else [by_rows]
    choices += [[placement] * (outputs + inputs) for placement in (whole, Shard(0), Shard(1))]
    if mask_spec is not None:
        for choice in choices:
            placement = choice[0]
            dim = placement.dim - 4 + mask_spec.ndim if isinstance(placement, Shard) else -1
            choice.append(Shard(dim) if dim >= 0 and mask_spec.shape[dim] > 1 else whole)
    found = expand_to_full_mesh_op_strategy(mesh, schema, choices, input_index=outputs)
    if mask_spec is not None:  # DTensor redistributes no tensor that is passed by keyword; under a plan, its handler does.
        fitting = [each for each in found.strategies if each.input_specs[-1].placements == mask_spec.placements]  # type: ignore[index]
        found.strategies = fitting or found.strategies
    if key.shape[1] != query.shape[1]:  # If heads are cut unevenly, ranks would hold queries of other heads than keys.
        heads = math.gcd(query.shape[1], key.shape[1])
        found.strategies = [each for each in found.strategies if heads % _ranks_of_heads(each) == 0]
    return found


def _ranks_of_heads(strategy: OpSpec) -> int:
    """The number of ranks among which the heads are cut."""
    spec = strategy.input_specs[0]  # type: ignore[index]
    return math.prod([spec.mesh.size(dim) for dim, placement in enumerate(spec.placements) if placement == Shard(1)])
