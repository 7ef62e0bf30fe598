"""Which unsharded parameters let matmuls write their gradients into the gradient buffer of their group, and where to."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import torch
from torch import nn

from torch_ragged._register._torch import as_plain_tensors
from torch_ragged.fsdp.core._fsdp_param_group import FSDPParamGroup
from torch_ragged.fsdp.grads._weight_gradient import ComputeParameter, allows_split_backward

__all__ = ["compute_parameter"]


def compute_parameter(group: FSDPParamGroup, index: int, value: torch.Tensor) -> nn.Parameter | None:
    """The unsharded parameter of ``value`` whose matmuls write into the gradient buffer; None: a plain parameter is as good."""
    # The buffer must take the gradient as the matmul computes it: the same dtype and order of elements, and no sum over the
    # model's ranks before it.
    has_layout = not group.shards.are_typed and group.param_dtype == group.grad_buffer.dtype
    reduces = group.params[index].distribution.reduces_gradient
    if not (value.ndim in (2, 3) and value.is_floating_point() and has_layout and not reduces and allows_split_backward()):
        return None
    made: Any
    if group.encoding.computes_in_buffer:
        made = ComputeParameter(value)
    elif hasattr(value, "gradient_target"):  # A weight that holds codes.
        made = nn.Parameter(value)
    else:
        return None
    # Weakly: autograd keeps the parameter of a graph that outlives the model, and the group holds the memory of its buffers.
    made.gradient_target = _Target(weakref.ref(group), index)
    return made


@dataclasses.dataclass
class _Target:
    """Where a matmul writes the gradient of one parameter. Autograd saves it, so it has only a weak reference to the group."""

    _group: weakref.ref[FSDPParamGroup]
    _index: int

    def begin(self) -> tuple[torch.Tensor, bool] | None:
        group = self._group()
        if group is None:
            return None
        # A graph may outlive its model: without the group, above, autograd gets the gradient itself.
        param = group.params[self._index]
        with as_plain_tensors():
            param.sync_requires_grad()
            hooks = getattr(param.unsharded, "_post_accumulate_grad_hooks", None) or {}
            # Hooks of the user must see the gradient, so that it goes through autograd.
            if not param.requires_grad or param.unsharded._backward_hooks or len(hooks) > 1:  # One hook is ours.
                return None
        group.before_gradient()
        if not group.grad_buffer.is_open:
            group.make_room()
        view, holds_gradient = group.grad_buffer.target(self._index)
        return param.distribution.gathered(view), holds_gradient

    def done(self) -> None:
        group = self._group()
        assert group is not None
        group.grad_buffer.mark(self._index)
        group.needs_reduction = group.needs_reduction or group.was_reached or group.is_unhooked  # As in add_gradient().
