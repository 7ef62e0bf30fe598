"""Ops on plain DTensors of which torch's own rule gives another result than a single device, or none.

It must not know when: :func:`torch_ragged.spmd.parallelize` gives the dispatcher these handlers. The rules of ragged DTensors
give a single device's results always.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.utils import _pytree as pytree

from torch_ragged.tensor._ops import decomposition_of
from torch_ragged.tensor._placement_extension import extension_of

__all__ = ["plain_handlers"]

_aten = torch.ops.aten
# Averages: torch averages the ranks' averages. That is wrong if ranks have other numbers of rows, or of rows that count.
_LOSSES = """
    mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy binary_cross_entropy_with_logits
    mse_loss_backward smooth_l1_loss_backward huber_loss_backward soft_margin_loss_backward binary_cross_entropy_backward
    nll_loss_forward nll_loss2d_forward nll_loss_backward nll_loss2d_backward
""".split()
# The number of rows of the result depends on values, which no rank knows alone.
_OF_VALUES = "nonzero masked_select _unique2 unique_consecutive unique_dim bincount".split()


def plain_handlers() -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """A handler for the dispatcher, for each of these ops."""
    losses = {getattr(_aten, name).default: _loss for name in _LOSSES}
    return {**losses, **{getattr(_aten, name).default: _gathered for name in _OF_VALUES}}


def _loss(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The sum over all rows, divided by their number or weight."""
    if (found := _of_extension(op, args, kwargs)) is not NotImplemented:
        return found
    function = decomposition_of(op)
    result = NotImplemented if function is None else function(op, *args, **kwargs)
    return _by_torch(op, args, kwargs) if result is NotImplemented else result


def _gathered(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The op on whole tensors, which every rank computes. One all-gather per tensor that is not replicated."""
    if (found := _of_extension(op, args, kwargs)) is not NotImplemented:
        return found
    mesh = next(leaf.device_mesh for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, DTensor))
    everywhere = [Replicate()] * mesh.ndim

    def whole(leaf: Any) -> Any:
        return leaf.redistribute(placements=everywhere)._local_tensor if isinstance(leaf, DTensor) else leaf

    result = op(*pytree.tree_map(whole, args), **pytree.tree_map(whole, kwargs))

    def wrapped(leaf: Any) -> Any:
        return DTensor.from_local(leaf, mesh, everywhere, run_check=False) if isinstance(leaf, torch.Tensor) else leaf

    return pytree.tree_map(wrapped, result)


def _of_extension(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, DTensor) and (extension := extension_of(leaf.placements)) is not None:
            return extension.op_extension(op).dispatch(op, args, kwargs)
    return NotImplemented


def _by_torch(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The op by torch's own rule, without its handler."""
    dispatcher = DTensor._op_dispatcher
    op_info = dispatcher.unwrap_to_op_info(op, args, kwargs)
    dispatcher.sharding_propagator.propagate(op_info)
    sharding = op_info.output_sharding
    assert sharding is not None
    local = dispatcher._dispatch_get_local_results_slow_path(op, args, op_info)
    return dispatcher.wrap(local, sharding.output_spec)
