"""PipelineState: what other programs read and call of a state by FSDP2's private names, such as torch's pipeline schedules.

The schedules of torch 2.11 to 2.13 reduce gradients by these names; those of 2.15 call methods of ``FSDPModule``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import MixedPrecisionPolicy

from torch_ragged._register._torch import GradientUse, gradient_use
from torch_ragged.fsdp.core._comm_context import FSDPCommContext
from torch_ragged.fsdp.core._forward_order import Call
from torch_ragged.fsdp.core._fsdp_param_group import FSDPParamGroup
from torch_ragged.fsdp.core._module_state import ModuleState

__all__ = ["PipelineState"]


class PipelineState(ModuleState):
    """The part of :class:`FSDPState` that other programs know. Attributes are those of ``FSDPState``."""

    _probe: torch.Tensor | None = None

    @property
    def context(self) -> Any:
        raise NotImplementedError

    @property
    def _state_ctx(self) -> Any:
        return self.context

    @property
    def _comm_ctx(self) -> FSDPCommContext[Any]:
        return self.comm

    @property
    def _mp_policy(self) -> MixedPrecisionPolicy:
        """NeMo AutoModel computes the logits in the dtype of its head's policy."""
        return self.mp_policy

    @property
    def _fsdp_param_groups(self) -> list[FSDPParamGroup]:
        """Empty: :meth:`_root_post_backward_final_callback` reduces the gradients of all groups."""
        return []

    @property
    def _fsdp_param_group(self) -> _Reduction | None:
        """Programs call its ``post_backward()`` for each state under a root, and some do not call the root's callback then."""
        return _Reduction(self.context) if self.context.states[0] is self else None

    def _root_post_backward_final_callback(self) -> None:
        """Reduce the gradients that micro-batches have accumulated, set ``.grad`` and reshard."""
        self.context.end_backward()

    def probe(self) -> torch.Tensor | None:
        """A leaf without elements, an input of each call whose inputs have gradients. A pass for those alone leaves it out."""
        if self._probe is None and self.groups:
            with torch.inference_mode(False):
                self._probe = torch.empty(0, device=self.groups[0].device, requires_grad=True)
        return self._probe

    def check_split_backward(self, call: Call) -> None:
        """Raise if a pipeline schedule that splits backward would lose gradients of this module.

        Such a schedule (zero bubble) looks up the registered parameters, computes the gradients of inputs, and later those of
        the parameters that it has found. It does not find unsharded parameters if they are not registered before backward.

        Raises:
            RuntimeError: the parameters are sharded in a backward that computes the gradients of inputs only.
        """
        root = self.root_state
        is_pipeline = not self.requires_gradient_sync and (root.finalizes_manually or not root.is_last_backward)
        if not is_pipeline or torch.is_grad_enabled() or call.probe is None:
            return
        if gradient_use(get_gradient_edge(call.probe).node) is not GradientUse.NONE:
            return
        for group in self.groups:
            if group.is_trainable and not group.is_unsharded:
                raise RuntimeError(
                    f"{group.names} was resharded after forward, and this backward computes the gradients of inputs only: a "
                    "pipeline schedule that computes the gradients of parameters later, such as ZBVZeroBubble, would lose "
                    "them. Pass reshard_after_forward=False to fully_shard"
                )


class _Reduction:
    """In place of FSDP2's group, of the root's state only: it reduces the gradients of all states under the root."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def post_backward(self) -> None:
        self._context.end_backward()
