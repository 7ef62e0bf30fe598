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
        self._entered: list[contextlib.ExitStack] = []

    def enter(self, module: nn.Module, args: Any) -> None:
        stack = contextlib.ExitStack()
        if torch.is_inference_mode_enabled() and not self._entered:  # A model may call itself.
            stack.enter_context(viewing_in_inference())
        if torch.is_inference_mode_enabled():
            self._entered.append(stack)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._entered:
            self._entered.pop().close()
