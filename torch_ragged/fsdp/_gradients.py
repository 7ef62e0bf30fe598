"""GradientBuffers: the gradients of a group on their way from autograd to ``.grad``."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Shard

from torch_ragged._register._torch import as_plain_tensors, dtensor_of
from torch_ragged.fsdp._collectives import Collectives, Reduction, Work
from torch_ragged.fsdp._dbuffer import DBuffer
from torch_ragged.fsdp._distribution import Distribution
from torch_ragged.fsdp._layout import BufferLayout
from torch_ragged.fsdp._managed_param import ManagedParam
from torch_ragged.fsdp._weight_gradient import GradientTarget

__all__ = ["GradientBuffers"]


class GradientBuffers:
    """Where a group's gradients are, and their reduction.

    ::

        unreduced  DBuffer Partial(), reduce_dtype     weight gradients of matmuls are computed in their views, others are
                                                   copied (cast, added) there once
           | reduce-scatter
        reduced    DBuffer Shard(0), reduce_dtype      then an all-reduce over replicas (HSDP)
           | a cast, a copy to the CPU, or nothing
        .grad      views of a DBuffer Shard(0)         DTensors placed as their parameters

    Attributes:
        collectives: what reduces.
        reduction: how.
        requires_all_reduce: whether backward reduces over replicas.
        reduce_hook: called with each reduced shard.
        is_accumulating: whether the last backward left gradients for a later one to add to and reduce.
        on_gradient: called when a parameter has got a gradient.
        pool: where the memory of unreduced gradients comes from.
    """

    def __init__(self, params: list[ManagedParam], layout: BufferLayout, rank: int, has_replicas: bool) -> None:
        self._params, self._layout, self._rank, self._has_replicas = params, layout, rank, has_replicas
        self.reduction = Reduction()
        self.requires_all_reduce = True
        self.is_accumulating = False
        self.reduce_hook: Callable[[torch.Tensor], None] | None = None
        self.on_gradient: Callable[[], None] | None = None
        self.pool: torch.cuda.MemPool | None = None
        self.collectives: Collectives

    def place(self, device: torch.device, reduce_dtype: torch.dtype, sharded: DBuffer) -> None:
        """Reduce on ``device`` in ``reduce_dtype``, for a ``.grad`` like the ``sharded`` buffer; what there was is dropped."""
        self._device, self.reduce_dtype, self._sharded = device, reduce_dtype, sharded
        self._unreduced: DBuffer | None = None
        self._views: list[torch.Tensor] = []
        self._forms = [_Form(self._params[index].distribution, self._layout, index) for index in range(len(self._params))]
        self._reduction: tuple[Work, DBuffer] | None = None
        self._all_reduce: tuple[Work, DBuffer] | None = None
        self._reduced: DBuffer | None = None
        self._kept: DBuffer | None = None  # reduced within each replica only

    def buffers(self) -> dict[str, list[DBuffer]]:
        """The buffers, by what they hold: ``gradients`` are not reduced yet."""
        under_way = [pending[1] for pending in (self._reduction, self._all_reduce) if pending is not None]
        reduced = [buffer for buffer in (self._reduced, self._kept, *under_way) if buffer is not None]
        return {"gradients": [] if self._unreduced is None else [self._unreduced], "reduced": reduced}

    # -- from autograd ---------------------------------------------------------------------------------------------

    def hook(self, index: int) -> Callable[[torch.Tensor], None]:
        """A post-accumulate hook that moves a gradient into the buffer as soon as autograd has it, and drops it."""
        reference = weakref.ref(self)  # Autograd's hooks are invisible to the garbage collector.

        def hook(unsharded: torch.Tensor) -> None:
            buffers = reference()
            assert buffers is not None
            buffers._take(index, unsharded)

        return hook

    def _take(self, index: int, unsharded: torch.Tensor) -> None:
        param = self._params[index]
        with as_plain_tensors():
            gradient, unsharded.grad = unsharded.grad, None
            if gradient is None:  # Backward came here with no gradient, or it was written in place.
                return
            param.sync_requires_grad()
        if not param.requires_grad:  # frozen since forward
            return
        view = self.views()[index]
        gradient = param.distribution.gradient(gradient)
        if param.has_gradient:
            view.add_(gradient)
        else:
            view.copy_(gradient)
        del gradient
        self.done(index)

    def target(self, index: int) -> GradientTarget:
        """Where a matmul may write the gradient of a parameter itself."""
        return _Target(weakref.ref(self), index)

    def begin(self, index: int) -> tuple[torch.Tensor, bool] | None:
        """The view to write a gradient to, and whether it holds one already; None where autograd has to have the gradient."""
        param = self._params[index]
        with as_plain_tensors():
            param.sync_requires_grad()
            hooks = getattr(param.unsharded, "_post_accumulate_grad_hooks", None) or {}
            if not param.requires_grad or param.unsharded._backward_hooks or len(hooks) > 1:  # One hook is ours.
                return None
        return param.distribution.gathered(self.views()[index]), param.has_gradient

    def done(self, index: int) -> None:
        """The view of a parameter holds its gradient."""
        self._params[index].has_gradient = True
        if self.on_gradient is not None:
            self.on_gradient()

    def views(self) -> list[torch.Tensor]:
        """The unreduced buffer's view of each parameter; the buffer is (re-)acquired if it is not there."""
        self.finish_reduction()  # It may still be read.
        if self._unreduced is None:
            self._unreduced = DBuffer(self._layout, Partial(), self._rank, self.reduce_dtype, self._device, pool=self.pool)
            self._unreduced.zero_padding()
            self._views = [self._unreduced.tensor(index) for index in range(len(self._params))]
        elif not self._unreduced.is_allocated:
            self._unreduced.pool = self.pool
            self._unreduced.allocate()
            self._unreduced.zero_padding()
        return self._views

    # -- reduction -------------------------------------------------------------------------------------------------

    def start_reduction(self) -> None:
        """Start one reduce-scatter. A parameter without a gradient here contributes zeros."""
        for param, view in zip(self._params, self.views()):
            if not param.has_gradient:
                view.zero_()
            param.was_used, param.has_gradient = param.was_used or param.has_gradient, False
        assert self._unreduced is not None
        output = DBuffer(self._layout, Shard(0), self._rank, self.reduce_dtype, self._device)
        self._reduction = (self._unreduced.reduce_scatter_to(output, self.collectives, self.reduction), output)

    def finish_reduction(self) -> None:
        """Wait for the reduce-scatter under way, release the unreduced buffer and start the all-reduce of the shard."""
        if self._reduction is None:
            return
        (work, output), self._reduction = self._reduction, None
        work.wait()
        assert self._unreduced is not None
        self._unreduced.release()
        self._finish_all_reduce()
        if self._kept is not None:
            output.flat.add_(self._kept.flat)
            self._kept = None
        if self.keeps_shards:
            self._kept = output
        elif self._has_replicas:
            self._all_reduce = (self.collectives.all_reduce(output.flat, self.reduction), output)
        else:
            self._add_reduced(output)

    def _finish_all_reduce(self) -> None:
        if self._all_reduce is not None:
            (work, output), self._all_reduce = self._all_reduce, None
            work.wait()
            self._add_reduced(output)

    def _add_reduced(self, output: DBuffer) -> None:
        if self.reduce_hook is not None:
            self.reduce_hook(output.flat)
        if self._reduced is None:
            self._reduced = output
        else:
            self._reduced.flat.add_(output.flat)

    @property
    def keeps_shards(self) -> bool:
        """Whether replicas do not reduce (``requires_all_reduce``): shards are kept for a later backward, not in ``.grad``."""
        return self._has_replicas and not self.requires_all_reduce

    @property
    def was_reduced(self) -> bool:
        """Whether this backward pass reduced gradients."""
        return any(part is not None for part in (self._reduction, self._all_reduce, self._reduced))

    @property
    def is_pending(self) -> bool:
        """Whether there are gradients here that are not in ``.grad`` yet."""
        return self.was_reduced or self._kept is not None or any(param.has_gradient for param in self._params)

    # -- to .grad --------------------------------------------------------------------------------------------------

    def finish(self, used_anywhere: list[bool]) -> None:
        """At the end of backward: add the reduced shard to ``.grad`` of every parameter that some rank used."""
        self.finish_reduction()
        self._finish_all_reduce()
        reduced, self._reduced = self._reduced, None
        assert reduced is not None
        like = self._sharded
        if (reduced.flat.dtype, reduced.flat.device) != (like.flat.dtype, like.flat.device):
            moved = DBuffer(self._layout, Shard(0), self._rank, like.flat.dtype, like.flat.device, like.is_pinned)
            moved.flat.copy_(reduced.flat)  # On the CPU it is there when this returns: an optimizer may read it at once.
            reduced = moved
        for index, (param, is_used) in enumerate(zip(self._params, used_anywhere)):
            param.was_used = False
            sharded = param.sharded
            if not is_used:
                continue
            gradient = self._forms[index].of(reduced)
            sharded.grad = gradient if sharded.grad is None else sharded.grad.add_(gradient)
            for hook in (getattr(sharded, "_post_accumulate_grad_hooks", None) or {}).values():
                hook(sharded)

    def drop(self) -> bool:
        """Forget the gradients that are not in ``.grad`` yet; says whether there were any."""
        had_any = self.is_pending
        for pending in (self._reduction, self._all_reduce):
            if pending is not None:
                pending[0].wait()
        self._reduction = self._all_reduce = self._reduced = self._kept = None
        self.is_accumulating = False
        for param in self._params:
            param.has_gradient = param.was_used = False
        if self._unreduced is not None:
            self._unreduced.release()
        return had_any


class _Form:
    """What makes the DTensor of a parameter's gradient of a reduced buffer: found once, since specs take time to make."""

    def __init__(self, distribution: Distribution, layout: BufferLayout, index: int) -> None:
        self._distribution, self._layout, self._index = distribution, layout, index
        self._like: tuple[Any, torch.Size, tuple[int, ...], int] | None = None

    def of(self, reduced: DBuffer) -> DTensor:
        """The gradient, as a view of ``reduced``."""
        if self._like is None:
            gradient = self._distribution.sharded(reduced.tensor(self._index), self._layout, self._index)
            local = gradient.to_local()
            self._like = (gradient._spec, local.shape, local.stride(), local.storage_offset())
            return gradient
        spec, *geometry = self._like
        return dtensor_of(reduced.flat.detach().as_strided(*geometry), spec)


class _Target:
    """The place of one parameter's gradient. What autograd saves must not keep the buffers alive."""

    def __init__(self, buffers: weakref.ref[GradientBuffers], index: int) -> None:
        self._buffers, self._index = buffers, index

    def begin(self) -> tuple[torch.Tensor, bool] | None:
        buffers = self._buffers()
        return None if buffers is None else buffers.begin(self._index)

    def done(self) -> None:
        buffers = self._buffers()
        assert buffers is not None
        buffers.done(self._index)
