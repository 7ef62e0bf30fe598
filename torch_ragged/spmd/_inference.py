"""``torch.inference_mode`` around a parallelized model: its forward may view parameters and buffers, as on one device.

It must not do anything in other modes: a training step pays two calls that look at the mode.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from torch_ragged._register._spmd import viewing_in_inference

__all__ = ["add_inference"]


def add_inference(model: nn.Module) -> None:
    """Register hooks around the forward of ``model``, before all others and after all others."""
    views = _Views()
    model.register_forward_pre_hook(views.enter, prepend=True)
    model.register_forward_hook(views.leave, always_call=True)


class _Views:
    def __init__(self) -> None:
        self._entered: list[contextlib.AbstractContextManager[None]] = []

    def enter(self, module: nn.Module, args: Any) -> None:
        if torch.is_inference_mode_enabled():
            # A model may call itself: the outer call has the handlers, and keeps them until it ends.
            context = contextlib.nullcontext() if self._entered else viewing_in_inference()
            context.__enter__()
            self._entered.append(context)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._entered:
            self._entered.pop().__exit__(None, None, None)
