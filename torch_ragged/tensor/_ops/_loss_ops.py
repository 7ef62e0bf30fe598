"""Losses with ``reduction="mean"``, and the likelihood loss of ``cross_entropy``: local sums divided by the global number.

No kernel here may average, because it would divide by the number of local rows. Before 2.15, torch's rule for ``Shard``
averages these averages. That is wrong if rows have different weights or ranks have different numbers of rows.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from torch_ragged.tensor._ops._rules import argument_position, decomposition, wide

aten = torch.ops.aten

_EACH, _MEAN, _TOTAL = range(3)  # The numbers of aten's enum.


def _reduction(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    position = argument_position(op, "reduction")
    return args[position] if position < len(args) else kwargs.get("reduction", _MEAN)


def _call(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], reduction: int) -> Any:
    """Call the op with another ``reduction``."""
    position = argument_position(op, "reduction")
    if position < len(args):
        return op(*args[:position], reduction, *args[position + 1 :], **kwargs)
    return op(*args, **{**kwargs, "reduction": reduction})


@decomposition(
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.huber_loss.default,
    aten.soft_margin_loss.default,
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_with_logits.default,
)
def mean_loss(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """The average of an element-wise loss; the result is pending a sum. No communication."""
    return aten.mean.default(_call(op, args, kwargs, _EACH)) if _reduction(op, args, kwargs) == _MEAN else NotImplemented


@decomposition(
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss_backward.default,
    aten.huber_loss_backward.default,
    aten.soft_margin_loss_backward.default,
    aten.binary_cross_entropy_backward.default,
)
def mean_loss_backward(op: torch._ops.OpOverload, gradient: Any, *args: Any, **kwargs: Any) -> Any:
    """The backward of the sum, for a gradient divided by the number of elements. No communication."""
    if _reduction(op, (gradient, *args), kwargs) != _MEAN:
        return NotImplemented
    dtype, count = args[0].dtype, math.prod(torch.broadcast_shapes(args[0].shape, args[1].shape))
    if wide(dtype) != dtype:  # The divided gradient may be too small for 16 bits.
        gradient, *args = (t.to(wide(dtype)) if isinstance(t, torch.Tensor) else t for t in (gradient, *args))  # type: ignore
    return _call(op, (gradient / max(count, 1), *args), kwargs, _TOTAL).to(dtype)


@decomposition(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss_forward(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """The average: the loss, pending a sum, divided by the weight of all rows. One all-reduce of that weight.

    Backward needs the weight too. Under torch's ``Shard(0)``, backward issues this all-reduce.
    """
    if _reduction(op, args, kwargs) != _MEAN:
        return NotImplemented
    losses, _ = _call(op, args, kwargs, _EACH)
    _, weight = _call(op, args, kwargs, _TOTAL)
    weight = weight.redistribute(placements=[Replicate()] * weight.device_mesh.ndim)
    dtype = wide(losses.dtype)
    return (losses.sum(dtype=dtype) / weight.to(dtype)).to(losses.dtype), weight


@decomposition(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def nll_loss_backward(op: torch._ops.OpOverload, gradient: Any, *args: Any, **kwargs: Any) -> Any:
    """The backward, which divides the gradient of an average by the total weight and ignores that weight otherwise.

    No communication.
    """
    weight, reduction = args[-1], _reduction(op, (gradient, *args), kwargs)
    if reduction == _MEAN:
        return _call(op, (gradient / weight, *args), kwargs, _TOTAL)
    if all(p.is_replicate() for p in weight.placements):
        return NotImplemented
    unused = DTensor.from_local(weight.to_local(), weight.device_mesh, [Replicate()] * weight.device_mesh.ndim, run_check=False)
    return op(gradient, *args[:-1], unused, **kwargs)
