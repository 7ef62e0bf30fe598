"""UnitForward: the forward of a module, whose activations autograd keeps, backward makes again, or a tier holds.

It must not decide which of these: :func:`fit` does.
"""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torch_ragged._register._torch import dynamo_disabled
from torch_ragged.fsdp.budget._activations import ActivationOffload
from torch_ragged.fsdp.core._hooks import tensors_in

__all__ = ["ActivationMode", "KnownInputs", "UnitForward"]


class ActivationMode(str, enum.Enum):
    """What happens to what autograd saves of a forward until backward."""

    KEPT = "kept"
    RECOMPUTED = "recomputed"
    OFFLOADED = "offloaded"


@dataclass(eq=False)
class KnownInputs:
    """The shapes of a module's inputs in the dry run, beyond which the peak of a step is not known.

    Attributes:
        is_open: whether it learns shapes; later, larger ones are an error.
    """

    name: str
    is_open: bool = True
    _shapes: set[tuple[torch.Size, ...]] = field(default_factory=set)

    def look(self, args: Any, kwargs: Any) -> None:
        """Learn the shapes of the tensors in a forward's arguments, or compare them.

        Raises:
            ValueError: a tensor is larger in some dimension than in each forward of the dry run, or there are more tensors.
        """
        shapes = tuple(tensor.shape for tensor in tensors_in((args, kwargs))[0])
        if self.is_open:  # Later shapes are not kept: lengths that vary would fill the memory of a long run.
            self._shapes.add(shapes)
        if shapes in self._shapes or any(_holds(known, shapes) for known in self._shapes):
            return
        # No other choice is made here: on this rank alone, its recomputations could wait for other ranks' collectives.
        known = ", or ".join(map(_shapes_text, sorted(self._shapes)[:4])) or "no such call"
        raise ValueError(
            f"the forward of {self.name} got tensors of shapes {_shapes_text(shapes)}, and the steps of fit had {known}: the "
            "peak is not known. Call fit with a step that has the largest inputs of each kind"
        )


def _shapes_text(shapes: tuple[torch.Size, ...]) -> str:
    return ", ".join(str(tuple(shape)) for shape in shapes) or "no tensors"


def _holds(known: tuple[torch.Size, ...], shapes: tuple[torch.Size, ...]) -> bool:
    return len(shapes) <= len(known) and all(
        len(shape) == len(other) and all(size <= most for size, most in zip(shape, other))
        for shape, other in zip(shapes, known)
    )


@dataclass(eq=False)
class UnitForward:
    """In the place of ``module.forward``, inside of the hooks of ``fully_shard``. If it is recomputed::

        pre-backward    unshard
        backward        forward of the module again, then its gradients
        post-backward   reshard

    So the parameters are there, and backward has no other collectives than without it. Bits are the same: random numbers are
    drawn again from the same state.

    Attributes:
        inputs: looks at the inputs of forwards with gradients.
        activations: of these forwards. If one rank recomputes, all do: a forward may have collectives of its own.
        offload: of all units of a model; None: no unit's activations are offloaded.
        moved_nbytes: of activations that have left, of all forwards.
        watch: wraps the function that runs in forward, and again in backward if it is recomputed. None: nothing looks at it.
    """

    module: nn.Module
    inputs: KnownInputs
    activations: ActivationMode = ActivationMode.KEPT
    offload: ActivationOffload | None = None
    moved_nbytes: int = 0
    watch: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    _before: Any = field(init=False)  # What the program has put in the place of the class's forward.

    def __post_init__(self) -> None:
        self._before = self.module.__dict__.get("forward")
        self.module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inner: Callable[..., Any] = self._before or functools.partial(type(self.module).forward, self.module)
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        if not torch.compiler.is_compiling():  # A graph is made for each kind of shapes; its root looks at them.
            self.inputs.look(args, kwargs)
        if self.watch is not None:
            inner = self.watch(inner)
        if self.activations is ActivationMode.OFFLOADED:
            return self._offloaded(inner, args, kwargs)
        is_recomputed = self.activations is ActivationMode.RECOMPUTED
        output = checkpoint(inner, *args, use_reentrant=False, **kwargs) if is_recomputed else inner(*args, **kwargs)
        if self.offload is not None:
            self.offload.end_forward(output)
        return output

    @functools.partial(dynamo_disabled, recursive=False)  # What it calls may be compiled.
    def _offloaded(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        assert self.offload is not None
        output, nbytes = self.offload.run(self.module, inner, args, kwargs)
        self.moved_nbytes += nbytes
        return output

    @property
    def __signature__(self) -> Any:
        """As programs ask for it, which pass a forward the arguments that it takes."""
        return inspect.signature(self._before or functools.partial(type(self.module).forward, self.module))

    def remove(self) -> None:
        """The module has its own forward again. If the program has wrapped this one since, it keeps its activations."""
        self.activations, self.offload = ActivationMode.KEPT, None
        if self.module.__dict__.get("forward") is self:
            del self.module.__dict__["forward"]
            if self._before is not None:
                self.module.forward = self._before
