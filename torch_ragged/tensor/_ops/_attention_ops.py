"""The sharding of CPU attention on plain DTensors: torch has rules for the kernels of GPUs only.

It must not change a rule that torch has.
"""

from __future__ import annotations

import functools
import math
from typing import Optional

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, RuntimeSchemaInfo
from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy
from torch.distributed.tensor.placement_types import Placement

__all__ = ["register_cpu_attention"]

_OPS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: (2, 3),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (3, 6),
}
"""The number of outputs, and of inputs without the mask: all have batches as dimension 0 and heads as dimension 1."""


def register_cpu_attention() -> None:
    """Give DTensor the rule of ``scaled_dot_product_attention`` on CPU: batch and heads may be sharded, nothing else."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    known = [table for name, table in vars(propagator).items() if name.endswith("strategy_funcs")]
    for op, counts in _OPS.items():
        if not any(op in table for table in known):
            propagator.register_op_strategy(op, functools.partial(_strategy, *counts), RuntimeSchemaInfo(needs_pytree=True))


def _strategy(outputs: int, inputs: int, schema: OpSchema) -> OpStrategy:
    specs = [a.strategies[0].output_spec for a in schema.args_schema if isinstance(a, OpStrategy)]
    query, key = [spec for spec in specs if len(spec.shape) == 4][inputs // 6 : inputs // 6 + 2]  # Backward: after a gradient.
    mask = schema.kwargs_schema.get("attn_mask")
    mask_shape = None if mask is None else mask.strategies[0].output_spec.shape
    mesh = schema.get_mesh_from_args()
    choices: list[list[Optional[Placement]]] = []
    for placement in (Replicate(), Shard(0), Shard(1)):
        choice: list[Optional[Placement]] = [placement] * (outputs + inputs)
        if mask_shape is not None:
            is_cut = isinstance(placement, Shard) and len(mask_shape) == 4 and mask_shape[placement.dim] > 1
            choice.append(placement if is_cut else Replicate())
        choices.append(choice)
    found = expand_to_full_mesh_op_strategy(mesh, schema, choices, input_index=outputs)
    if key.shape[1] != query.shape[1]:  # If heads are cut unevenly, ranks would hold queries of other heads than keys.
        heads = math.gcd(query.shape[1], key.shape[1])
        found.strategies = [each for each in found.strategies if heads % _ranks_of_heads(each) == 0]
    return found


def _ranks_of_heads(strategy: OpSpec) -> int:
    """The number of ranks among which the heads are cut."""
    spec = strategy.input_specs[0]  # type: ignore[index]
    return math.prod([spec.mesh.size(dim) for dim, placement in enumerate(spec.placements) if placement == Shard(1)])
