"""Sharding rules of ops on ragged DTensors, by op family, as in ``torch/distributed/tensor/_ops``.

A rule must not give an answer that could make a wrong value, shape or stride. It reads an :class:`OpCall` and returns a
:class:`Sharding`: the placements that tensor arguments need for the op to run on local tensors, and the placements of the
outputs. A *decomposition* computes an op by a function on DTensors. If an op has no decomposition and all its rules raise
:class:`NoLocalWay`, ``_dispatch`` replicates the ragged arguments or raises ``NotImplementedError``.
"""

import functools

import torch

from torch_ragged.tensor._ops import _loss_ops, _math_ops, _pointwise_ops, _tensor_ops  # noqa: F401  (they register their rules)
from torch_ragged.tensor._ops._attention_ops import register_cpu_attention
from torch_ragged.tensor._ops._foreach_ops import call_per_mesh
from torch_ragged.tensor._ops._interleaved_ops import interleaved_rule, interleaved_view_rule
from torch_ragged.tensor._ops._pointwise_ops import family_rule, list_rule, pointwise_rule
from torch_ragged.tensor._ops._row_ops import row_rule
from torch_ragged.tensor._ops._rows import RaggedRows, has_ragged_rows, redistribute_rows
from torch_ragged.tensor._ops._rules import (
    Layout,
    NoLocalWay,
    NormPartial,
    OpCall,
    OpRule,
    Sharding,
    decomposition_of,
    dims_from_the_front,
    fits_out,
    is_random,
    is_row_major,
    is_written,
    returns_alias,
    rule,
    rule_of,
    unsupported,
    written_leaves,
)
from torch_ragged.tensor._ops._view_ops import view_rule

__all__ = [
    "Layout",
    "NoLocalWay",
    "NormPartial",
    "OpCall",
    "RaggedRows",
    "Sharding",
    "call_per_mesh",
    "decomposition_of",
    "dims_from_the_front",
    "fits_out",
    "has_ragged_rows",
    "list_rule",
    "redistribute_rows",
    "register_cpu_attention",
    "is_random",
    "is_row_major",
    "is_written",
    "returns_alias",
    "rules_of",
    "unsupported",
    "written_leaves",
]


def rules_of(op: torch._ops.OpOverload) -> list[OpRule]:
    """The rules that may answer for ``op``, best first: its own or its family's, that of segments, of views, of whole rows.

    The last resort of an element-wise op is to move strided views to the placements of a flat tensor.
    """
    own = rule_of(op)
    if own is None and (family := family_rule(op)) is not None:
        own = rule(op)(family)  # Registered, so that the search by name runs once.
    first = [own] if own is not None else []
    if returns_alias(op) and own is None:
        return [interleaved_view_rule, view_rule]
    last = [functools.partial(own, with_views=True)] if own in (pointwise_rule, list_rule) else []
    return [*first, interleaved_rule, row_rule, *last]
