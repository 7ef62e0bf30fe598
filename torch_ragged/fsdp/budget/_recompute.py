"""Recompute: the forward of a module, which backward may run again instead of keeping what autograd saves.

It must not decide: :func:`fit` does.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["Recompute"]


@dataclass(eq=False)
class Recompute:
    """In the place of ``module.forward``, inside of the hooks of ``fully_shard``::

        pre-backward    unshard
        backward        forward of the module again, then its gradients
        post-backward   reshard

    So the parameters are there, and backward has no other collectives than without it. Bits are the same: random numbers are
    drawn again from the same state.

    Attributes:
        is_on: whether forwards with gradients are recomputed. Equal on all ranks: a forward may have collectives of its own.
        watch: wraps the function that runs in forward and again in backward. None: nothing looks at it.
    """

    module: nn.Module
    is_on: bool = False
    watch: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    _before: Any = field(init=False)  # What the program has put in the place of the class's forward.

    def __post_init__(self) -> None:
        self._before = self.module.__dict__.get("forward")
        self.module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inner: Callable[..., Any] = self._before or functools.partial(type(self.module).forward, self.module)
        if not torch.is_grad_enabled() or not self.is_on:
            return inner(*args, **kwargs)
        if self.watch is not None:
            inner = self.watch(inner)
        return checkpoint(inner, *args, use_reentrant=False, **kwargs)

    @property
    def __signature__(self) -> Any:
        """As programs ask for it, which pass a forward the arguments that it takes."""
        return inspect.signature(self._before or functools.partial(type(self.module).forward, self.module))

    def remove(self) -> None:
        """The module has its own forward again. If the program has wrapped this one since, it recomputes nothing any more."""
        self.is_on = False
        if self.module.__dict__.get("forward") is self:
            del self.module.__dict__["forward"]
            if self._before is not None:
                self.module.forward = self._before
