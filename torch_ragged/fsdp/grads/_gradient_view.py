"""UnsynchronizedView: while gradients of a group wait for a later reduction, ``.grad`` is an ``FSDPGrad``."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial

from torch_ragged.fsdp.core._dbuffer import Borrowed, DBuffer
from torch_ragged.fsdp.core._grad_reduction import GradReduction
from torch_ragged.fsdp.grads._fsdp_grad import FSDPGrad

__all__ = ["UnsynchronizedView"]


class UnsynchronizedView:
    """Sets ``.grad`` of the parameters of one group. It is the ``GradSource`` of their FSDPGrads."""

    has_memory = True

    def __init__(self, reduction: GradReduction, holds_unreduced: bool) -> None:
        self._reduction, self._holds_unreduced = reduction, holds_unreduced
        self._shown: dict[int, FSDPGrad] = {}  # By parameter. The same parameters on all ranks.
        self._copy: DBuffer | None = None  # What reading one of them has reduced. Equal on all ranks: reading is collective.
        # Also of parameters that this rank has not used: another rank may have, and reading is a collective of all of them.
        for index, param in enumerate(reduction.params):
            sharded: Any = param.sharded
            if sharded.requires_grad:
                dtype = sharded.grad_dtype or reduction.buffer.reduce_dtype
                sharded.grad = self._shown[index] = FSDPGrad(self, index, sharded, dtype, sharded.grad)

    def take_back(self) -> None:
        self._copy, shown, self._shown = None, self._shown, {}
        for index, grad in shown.items():
            param = self._reduction.params[index]
            sharded: Any = param.sharded
            if isinstance(sharded.grad, FSDPGrad) and sharded.grad.reads(self, index):
                sharded.grad = grad.reduced
                continue
            # The program has set another gradient, or None: that replaces the parts which wait, too.
            for part in self.local_components(index).values():
                part.zero_()
            param.has_gradient, param.was_used, param.pending = False, False, None

    def reduced(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        return gradient.reduced if isinstance(gradient, FSDPGrad) else gradient

    def shows(self, index: int) -> bool:
        return index in self._shown

    # -- what an FSDPGrad asks: GradSource -------------------------------------------------------------------------

    is_published = shows

    def why_not_published(self) -> str:
        return "this FSDPGrad is out of date: a later backward or synchronization has begun. Read .grad again"

    def local_components(self, index: int) -> dict[str, torch.Tensor]:
        parts, reduction = {}, self._reduction
        if (unreduced := reduction.buffer.accumulated(index)) is not None:
            parts["unreduced"] = unreduced
        if reduction.kept is not None:
            begin, end = reduction.intervals[index]
            parts["partial"] = reduction.kept.flat[begin:end]
        return parts

    def component(self, index: int, name: str) -> DTensor | None:
        part, param = self.local_components(index).get(name), self._reduction.params[index]
        if part is None:
            return None
        sums = Partial(self._reduction.settings.reduction.partial_op)
        if name == "unreduced":
            return param.distribution.unreduced(part, param.pending or (), sums)
        return param.distribution.partial(part, param.sharded, sums)  # type: ignore[arg-type]

    def note_change(self) -> None:
        self._copy = None

    def reduced_copy(self, index: int, dtype: torch.dtype) -> DTensor:
        reduction = self._reduction
        if reduction.settings.reduce_hook is not None:
            raise RuntimeError(
                "reading a gradient that is not synchronized would call the hook of set_all_reduce_hook, or leave it out: call "
                "synchronize_gradients() on every rank first"
            )
        # One reduction for all parameters of the group. All ranks have a copy or none, as all of them read, and change, alike.
        if self._copy is None:
            self._copy = reduction.reduced_copy(_unreduced(reduction) if self._holds_unreduced else None)
        begin, end = reduction.intervals[index]
        flat = self._copy.flat[begin:end].to(reduction.sharded.flat.device, dtype, copy=True)
        return reduction.gradient(reduction.params[index], flat)


def _unreduced(reduction: GradReduction) -> DBuffer:
    """A copy of the gradient buffer in ``reduce_dtype``, with zeros where this rank has no gradient."""
    buffer, like = reduction.buffer, reduction.sharded
    flat = torch.zeros(like.layout.numel, dtype=buffer.reduce_dtype, device=buffer.device)
    copy = DBuffer(like.layout, Partial(), like.rank, flat.dtype, flat.device, pool=Borrowed(flat))
    for index in range(len(reduction.params)):
        if (view := buffer.accumulated(index)) is not None:
            copy.tensor(index).copy_(view)
    return copy
