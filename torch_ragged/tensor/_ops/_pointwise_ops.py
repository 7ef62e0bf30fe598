"""Element-wise ops and their in-place, ``out=``, foreach and fused-optimizer forms.

If all tensors have the same placements, no op here may communicate. One tensor leads: the tensor that is written to, otherwise
the first ragged one. Other tensors of its shape are redistributed to its placements. Replicated tensors of smaller shapes are
broadcast to its shape locally.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from torch_ragged.tensor._cut_placement import has_flat, has_own_rules
from torch_ragged.tensor._ops._rows import has_ragged_rows
from torch_ragged.tensor._ops._rules import NoLocalWay, OpCall, OpRule, Sharding, Spec, tensor_leaves

__all__ = ["family_rule", "pointwise_rule"]

aten = torch.ops.aten

_KEEPS_VALUES = ("detach", "alias", "clone")  # The contributions of ranks to a Partial may stay as they are.

Wanted = tuple[tuple[Placement, ...], "torch.Size | None"]


def family_rule(op: torch._ops.OpOverload) -> OpRule | None:
    """The rule of an op that torch tags as element-wise, or of its foreach or fused form; None for other ops."""
    name = op._schema.name.split("::")[-1]
    if op.namespace not in ("aten", "prims") or torch.Tag.nondeterministic_seeded in op.tags:
        return None
    if torch.Tag.pointwise in op.tags:
        return pointwise_rule
    if name.startswith("_foreach_"):
        return list_rule if _is_pointwise_name(name.removeprefix("_foreach_")) else None
    if name.startswith(("_fused_sgd", "_fused_adam", "_fused_adagrad")):
        return list_rule
    return None


def _is_pointwise_name(name: str) -> bool:
    if name.rstrip("_") in ("copy", "zero", "clone"):
        return True
    if name == "max":  # _foreach_max reduces each tensor; max of two tensors is another overload.
        return False
    packet = getattr(aten, name.rstrip("_"), None)  # torch does not tag all forms in place, such as ``abs_``.
    return packet is not None and any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads())


def pointwise_rule(call: OpCall, with_views: bool = False) -> Sharding:
    """All tensors follow the leader; every output has its shape and placements. ``with_views``: so do strided views."""
    specs = tensor_leaves(call)
    leader = _leader(call, specs, with_views)
    _check_out(call, specs, leader)
    returns = len(call.op._schema.returns)
    outputs: Any = leader.placements if returns == 1 else [leader.placements] * returns
    return Sharding([_follow_leader(call, spec, leader, specs) for spec in specs], outputs)


def list_rule(call: OpCall, with_views: bool = False) -> Sharding:
    """Lists of tensors: at each index, all tensors follow the leader of that index, on its mesh."""
    lists = [arg for arg in call.args if isinstance(arg, (list, tuple)) and arg and hasattr(arg[0], "placements")]
    columns = list(zip(*lists))
    leaders = [_leader(call, column, with_views) for column in columns]
    inputs: list[Wanted] = []
    for arg in call.args:
        if any(arg is candidate for candidate in lists):
            inputs += [_follow_leader(call, spec, leader, column) for spec, leader, column in zip(arg, leaders, columns)]
        elif hasattr(arg, "placements"):
            if arg.shape:
                raise NoLocalWay("a tensor beside tensor lists must be a scalar")
            inputs.append(_replicated(arg))
    for value in call.kwargs.values():
        if hasattr(value, "placements") and not _is_replicated_spec(value):
            raise NoLocalWay("a tensor given by keyword must be replicated")
    if not call.op._schema.returns:
        return Sharding(inputs, None)
    return Sharding(inputs, [leader.placements for leader in leaders], meshes=[leader.mesh for leader in leaders])


def _leader(call: OpCall, specs: Any, with_views: bool) -> Spec:
    """The tensor that decides the shape and placements of the outputs."""
    ragged = [spec for spec in specs if has_own_rules(spec.placements)]
    flat = [spec for spec in ragged if not has_ragged_rows(spec.placements)]
    leader = specs[0] if call.is_inplace or not ragged else (flat or ragged)[0]
    if len(flat) < len(ragged) and not (with_views and leader in flat):
        raise NoLocalWay("strided views can only run as rows")
    if call.name not in _KEEPS_VALUES and any(isinstance(p, Partial) for p in leader.placements):
        raise NoLocalWay("a Partial tensor must be reduced first")
    shape = torch.broadcast_shapes(*(spec.shape for spec in specs)) if ragged else leader.shape
    if tuple(shape) != tuple(leader.shape):
        raise NoLocalWay(f"a ragged tensor cannot be broadcast to {tuple(shape)}")
    return leader


def _check_out(call: OpCall, specs: list[Spec], leader: Spec) -> None:
    for value in call.kwargs.values():
        if hasattr(value, "placements") and (value.placements != leader.placements or value.shape != leader.shape):
            raise NoLocalWay(f"out= must be {tuple(leader.shape)} {leader.placements}")


def _follow_leader(call: OpCall, spec: Spec, leader: Spec, specs: Any) -> Wanted:
    if spec.shape == leader.shape and (spec.shape or not _is_replicated_spec(spec)):
        return leader.placements, None
    if not spec.shape:
        return _replicated(spec)
    if not _is_replicated_spec(spec) or not has_flat(leader.placements):
        raise NoLocalWay(f"only a replicated tensor can be broadcast to a ragged {tuple(leader.shape)}")
    return leader.placements, leader.shape


def _is_replicated_spec(spec: Spec) -> bool:
    return all(p.is_replicate() for p in spec.placements)


def _replicated(spec: Spec) -> Wanted:
    """The placements of a scalar: replicated, because a local op broadcasts it, so it must be equal on every rank."""
    return (Replicate(),) * spec.mesh.ndim, None
