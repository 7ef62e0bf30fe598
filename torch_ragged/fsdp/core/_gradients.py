"""GradientBuffers: the gradients of a group on their way from autograd to ``.grad``."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import Partial, Shard

from torch_ragged._kernels.casts import scaled_copy_
from torch_ragged._register._torch import as_plain_tensors, dynamo_disabled, profiler_range
from torch_ragged.fsdp.comm._collectives import Collectives, Reduction, Work, wait_all
from torch_ragged.fsdp.comm._wide_gradients import WideGradients
from torch_ragged.fsdp.core._backward_pass import BackwardPass
from torch_ragged.fsdp.core._comm_context import FSDPCommContext
from torch_ragged.fsdp.core._dbuffer import DBuffer, MemoryPool
from torch_ragged.fsdp.core._fsdp_param import FSDPParam
from torch_ragged.fsdp.core._group_state import GradientState, check_transition
from torch_ragged.fsdp.core._memory_log import GroupMemory
from torch_ragged.fsdp.core._weight_gradient import GradientTarget
from torch_ragged.fsdp.layout._buffer_layout import BufferLayout

__all__ = ["GradientBuffers"]


class GradientBuffers:
    """Where a group's gradients are, and their reduction.

    ::

        unreduced  DBuffer Partial(), dtype            weight gradients of matmuls are computed in their views, others are
                                                   copied (cast, added) there once
           | if reduce_dtype is wider than param_dtype, and the collectives do not sum in it themselves, or earlier backward
           | passes have left gradients: one cast of the whole buffer, or one addition; then the buffer is freed
        widened    DBuffer Partial(), reduce_dtype      gradients that came in a wider dtype are added here
           | reduce-scatter; of gradients that came in a wider dtype another one, if it reads what is not widened
        reduced    DBuffer Shard(0), reduce_dtype      then an all-reduce over replicas (HSDP)
           | a cast, a copy to the CPU, or nothing
        .grad      views of a DBuffer Shard(0)         DTensors placed as their parameters

    Attributes:
        fqn: of the group's module, once the root has run its first forward.
        collectives: what reduces.
        reduction: how.
        dtype: of the gradients as they come.
        requires_all_reduce: whether backward reduces over replicas.
        may_hold_sum: whether a backward pass may have left gradients unreduced since the last reduction, on any rank. Equal on
            all ranks: they make the same calls of :meth:`note_accumulation`, also where their own backward raises.
        comm: what bounds the communication of all groups under the root.
        backward: the backward pass of the modules under the root.
        max_reductions: how many modules' reduce-scatters may be in flight.
        reduce_hook: called with each reduced shard.
        is_accumulating: whether the last backward left gradients for a later one to accumulate and reduce.
        needs_reduction: whether backward has reached the group since the last reduction, on any rank. Pre-backward sets it, and
            runs on all ranks alike.
        pool: where the memory of unreduced gradients comes from.
    """

    def __init__(
        self, params: list[FSDPParam], layout: BufferLayout, rank: int, has_replicas: bool, memory: GroupMemory
    ) -> None:
        self._params, self._layout, self._rank, self._has_replicas = params, layout, rank, has_replicas
        self._memory = memory
        self.fqn = ""
        self.reduction = Reduction()
        self.requires_all_reduce = True
        self.may_hold_sum = False
        self.is_accumulating = False
        self.reduce_hook: Callable[[torch.Tensor], None] | None = None
        self.comm = FSDPCommContext()
        self.backward: BackwardPass
        self.max_reductions = 1
        self.pool: MemoryPool | None = None
        self.collectives: Collectives

    def place(self, device: torch.device, param_dtype: torch.dtype, reduce_dtype: torch.dtype, sharded: DBuffer) -> None:
        """Expect gradients of parameters in ``param_dtype`` on ``device``, and reduce them in ``reduce_dtype``.

        ``.grad`` is like the ``sharded`` buffer. Gradients that are here are dropped.
        """
        self._device, self.reduce_dtype, self._sharded = device, reduce_dtype, sharded
        self.dtype = param_dtype if reduce_dtype.itemsize > param_dtype.itemsize else reduce_dtype
        self.needs_reduction = False
        self._state = GradientState.EMPTY
        self._unreduced: DBuffer | None = None
        self._widened: DBuffer | None = None
        self._wide: dict[int, torch.Tensor] = {}  # Gradients of this backward pass that would be rounded, by parameter.
        self._wide_gradients: WideGradients | None = None
        self._views: list[torch.Tensor] = []
        self._reduce_scatter: Work | None = None  # In flight, in the state REDUCING.
        self._output: DBuffer | None = None  # Its output; after it, until that goes to one of the following.
        self._all_reduce: tuple[Work, DBuffer] | None = None  # In flight, and what it reduces in place.
        self._reduced: DBuffer | None = None  # Reduced over all ranks.
        self._kept: DBuffer | None = None  # Reduced within each replica only.

    def set_pool(self, pool: MemoryPool | None) -> None:
        """Allocate unreduced gradients from ``pool`` from now on. There are none now."""
        self.pool, self._unreduced, self._widened, self._views = pool, None, None, []

    def buffers(self) -> dict[str, list[DBuffer]]:
        """The buffers, by their contents: ``gradients`` are not reduced yet."""
        unreduced = [buffer for buffer in (self._unreduced, self._widened) if buffer is not None]
        return {"gradients": unreduced, "reduced": self._reduced_buffers()}

    def _reduced_buffers(self) -> list[DBuffer]:
        in_all_reduce = None if self._all_reduce is None else self._all_reduce[1]
        return [buffer for buffer in (self._reduced, self._kept, self._output, in_all_reduce) if buffer is not None]

    @property
    def is_pending(self) -> bool:
        """Whether there are gradients here that are not in ``.grad`` yet."""
        return self._state is not GradientState.EMPTY

    def _move_to(self, state: GradientState) -> None:
        check_transition(f"the gradients of {self._params[0].fqn}", self._state, state)
        self._state = state

    # -- from autograd ---------------------------------------------------------------------------------------------

    def hook(self, index: int) -> Callable[[torch.Tensor], None]:
        """A post-accumulate hook that moves a gradient into the buffer as soon as autograd has it, and drops it."""
        return functools.partial(_take, weakref.ref(self), index)  # Autograd's hooks are invisible to the garbage collector.

    def _take(self, index: int, unsharded: torch.Tensor) -> None:
        param = self._params[index]
        # Autograd's tensor is let go as soon as it is copied: at most one gradient exists outside of the buffer.
        with as_plain_tensors():
            gradient, unsharded.grad = unsharded.grad, None
            if gradient is None:  # Backward came here with no gradient, or it was written in place.
                return
            param.sync_requires_grad()
        if not param.requires_grad:  # frozen since forward
            return
        self._start_backward()
        has_graph = gradient.requires_grad
        if has_graph:  # create_graph=True: as with FSDP2, ``.grad`` itself has no graph.
            gradient = gradient.detach()
        gradient = param.distribution.gradient(gradient)
        if not has_graph and self._borrows(gradient):
            self.done(index)
            return
        if gradient.dtype.itemsize > self.dtype.itemsize and self.dtype != self.reduce_dtype:
            self._keep_wide(index, gradient)
            return
        # The one copy on a gradient's way: it casts too.
        view = self.views()[index]
        if param.has_gradient:
            view.add_(gradient)
        else:
            view.copy_(gradient)
        del gradient
        self.done(index)

    def target(self, index: int) -> GradientTarget:
        """Where a matmul may write the gradient of a parameter."""
        return _Target(weakref.ref(self), index)

    def begin(self, index: int) -> tuple[torch.Tensor, bool] | None:
        """The view to write a gradient to, and whether it holds one already; None where autograd has to have the gradient."""
        param = self._params[index]
        with as_plain_tensors():
            param.sync_requires_grad()
            hooks = getattr(param.unsharded, "_post_accumulate_grad_hooks", None) or {}
            if not param.requires_grad or param.unsharded._backward_hooks or len(hooks) > 1:  # One hook is ours.
                return None
        self._start_backward()
        return param.distribution.gathered(self.views()[index]), param.has_gradient

    def done(self, index: int) -> None:
        """The view of a parameter holds its gradient."""
        self._params[index].has_gradient = True
        self._note_gradient()

    def _note_gradient(self) -> None:
        """A gradient is here, which backward has to reduce."""
        self.needs_reduction = True
        if self._state is not GradientState.ACCUMULATING:
            self._move_to(GradientState.ACCUMULATING)

    def _start_backward(self) -> None:
        """Before a gradient is written: starting a pass drops the gradients of one that raised."""
        self.backward.start()  # No hook may have run: a parameter may be used outside of its module.

    def views(self) -> list[torch.Tensor]:
        """The unreduced buffer's view of each parameter; the buffer is allocated if it is not."""
        # A reduce-scatter in flight still reads the buffer. Each rank may wait when it has to: waiting issues no collective.
        self.wait_for_reduction()
        self._unreduced = self._allocated(self._unreduced, self.dtype)
        if not self._views:
            self._views = [self._unreduced.tensor(index) for index in range(len(self._params))]
        return self._views

    def _borrows(self, gradient: torch.Tensor) -> bool:
        """Use autograd's gradient itself as the buffer if it fills it, as a large embedding's does, and copy nothing.

        After its reduction the reference is dropped, and the memory not freed: it may have other users.
        """
        is_all = len(self._params) == 1 and gradient.numel() == self._layout.numel and gradient.dtype == self.dtype
        if not is_all or type(gradient) is not torch.Tensor or gradient.layout != torch.strided or self.pool is not None:
            return False
        self.wait_for_reduction()
        is_storage = gradient.is_contiguous() and gradient.untyped_storage().nbytes() == gradient.nbytes
        if not is_storage or (self._unreduced is not None and self._unreduced.is_allocated):
            return False
        self._unreduced = self._partial(self.dtype, borrowed=gradient)
        self._views = []
        self.views()
        return True

    def _free(self) -> None:
        """Free all memory for unreduced gradients."""
        self._free_unreduced()
        if self._widened is not None:
            self._widened.free()

    def _free_unreduced(self) -> None:
        if self._unreduced is not None:
            self._unreduced.free()
            if self._unreduced.is_borrowed:
                self._unreduced, self._views = None, []

    def _allocated(self, buffer: DBuffer | None, dtype: torch.dtype) -> DBuffer:
        """``buffer``, or a new one, allocated."""
        if buffer is not None and buffer.is_allocated:
            return buffer
        # Other groups' reductions may have to end first, so that their memory is free.
        self.comm.wait_for_room(self.max_reductions)
        if buffer is None:
            buffer = self._partial(dtype, pool=self.pool)
        else:
            buffer.pool = self.pool
            buffer.allocate()
        buffer.zero_padding()
        return buffer

    def _partial(self, dtype: torch.dtype, **memory: Any) -> DBuffer:
        """A buffer for unreduced gradients."""
        return DBuffer(self._layout, Partial(), self._rank, dtype, self._device, log=self._memory.gradients, **memory)

    def _keep_wide(self, index: int, gradient: torch.Tensor) -> None:
        """Keep a gradient beside the buffer until this is widened, as it would be rounded there.

        As norms compute them, they are few. Where they may be many, gradients come in ``reduce_dtype`` once they are.
        """
        self.views()
        kept = self._wide.get(index)
        self._wide[index] = gradient.to(self.reduce_dtype) if kept is None else kept.add_(gradient)
        self._params[index].was_used = True
        if not self.wide_gradients.are_few and self.wide_gradients.are_many(self._wide.values()):
            self.widen()
            self.dtype, self._unreduced, self._widened, self._views = self.reduce_dtype, self._widened, None, []
            for param in self._params:
                param.has_gradient = param.was_used
        self._note_gradient()

    # -- reduction -------------------------------------------------------------------------------------------------

    def widen(self) -> None:
        """At the end of a backward pass: what it brought is cast to ``reduce_dtype``, or added to what is there already."""
        is_in_flight = self._state is GradientState.REDUCING  # And nothing has come since.
        if is_in_flight or self.dtype == self.reduce_dtype or self._unreduced is None or not self._unreduced.is_allocated:
            return
        self._close()
        holds_sum = self._widened is not None and self._widened.is_allocated
        self._widened = self._allocated(self._widened, self.reduce_dtype)
        scaled_copy_(self._widened.flat, self._unreduced.flat, accumulate=holds_sum)
        self._free_unreduced()
        for index, gradient in self._wide.items():
            self._widened.tensor(index).add_(gradient)
        self._wide.clear()

    def _close(self) -> None:
        """The unreduced buffer is complete: a parameter without a gradient on this rank has zeros."""
        for param, view in zip(self._params, self._views):
            if not param.has_gradient:
                view.zero_()
            param.was_used, param.has_gradient = param.was_used or param.has_gradient, False

    def start_reduction(self, reduces_narrow: bool = False) -> None:
        """Start one reduce-scatter. A parameter without a gradient here contributes zeros.

        Args:
            reduces_narrow: reduce gradients as they came, and what came wide beside them; the same on all ranks.
        """
        self.needs_reduction = False
        self.finish_reduction()
        # Collect. Ranks reduce together, so a rank without any gradient allocates a buffer of zeros.
        holds_sum = self._widened is not None and self._widened.is_allocated
        assert not (reduces_narrow and holds_sum), "gradients left by earlier passes"
        if not holds_sum:
            self.views()
        # Cast, unless the collectives take gradients as they came.
        if reduces_narrow or self.dtype == self.reduce_dtype:
            self._close()
            source = self._unreduced
        else:
            self.widen()
            source = self._widened
        assert source is not None and source.is_allocated
        if reduces_narrow:
            self._round_unexpected(source)
        # Reduce.
        output = DBuffer(self._layout, Shard(0), self._rank, self.reduce_dtype, self._device, log=self._memory.reduced)
        self._reduce_scatter = source.reduce_scatter_to(output, self.collectives, self.reduction)
        self._output, self.may_hold_sum = output, False
        self._move_to(GradientState.REDUCING)
        if reduces_narrow and self.wide_gradients:
            wide, self._wide = self._wide, {}
            beside = self.wide_gradients.reduce(wide, output.flat, self.collectives, self.reduction)
            self._reduce_scatter = wait_all([self._reduce_scatter, beside])

    @property
    def can_reduce_narrow(self) -> bool:
        """Whether gradients can be reduced as they came, to be added up in ``reduce_dtype``."""
        is_narrow = self.dtype != self.reduce_dtype and not self.may_hold_sum and self.wide_gradients.are_few
        return is_narrow and self.collectives.reduce_scatter_traits(self._device).adds_wide

    def _round_unexpected(self, unreduced: DBuffer) -> None:
        """Of parameters that matmuls use, the other ranks know of no gradients but in ``dtype``."""
        for index in [index for index in self._wide if index not in self.wide_gradients]:
            unreduced.tensor(index).add_(self._wide.pop(index))

    @property
    def wide_gradients(self) -> WideGradients:
        """Of the parameters whose gradients may come wide."""
        if self._wide_gradients is None:
            indices = [index for index, param in enumerate(self._params) if param.may_be_wide]
            self._wide_gradients = WideGradients(self._layout, self._rank, indices)
        return self._wide_gradients

    def note_accumulation(self) -> None:
        """A backward pass leaves its gradients unreduced, on this rank or on another."""
        self.may_hold_sum = True

    def wait_for_second_buffer(self) -> None:
        """Wait for the reduce-scatter in flight if it holds a buffer beside its input."""
        if self.collectives.reduce_scatter_traits(self._device).holds_second_buffer:
            self.wait_for_reduction()

    def wait_for_reduction(self) -> None:
        """Wait for the reduce-scatter in flight and free its input. Issues no collective, and calls no hook of the user's."""
        if self._reduce_scatter is None:
            return
        work, self._reduce_scatter = self._reduce_scatter, None
        output, self._output = self._output, None  # Of one that fails there is none.
        try:
            with profiler_range("reduce_scatter_wait", self.fqn):
                work.wait()
        finally:  # Also if it fails: the next backward pass must not add to what is left.
            self._free()
            self._move_to(GradientState.REDUCED)
        self._output = output

    def finish_reduction(self) -> None:
        """Wait for the reduce-scatter in flight, free its input and issue the all-reduce of the shard."""
        self.wait_for_reduction()
        output, self._output = self._output, None
        if output is None:
            return
        # The all-reduce of an earlier reduction of this group: results are added in the order of the reductions.
        self._finish_all_reduce()
        if self._kept is not None:
            output.flat.add_(self._kept.flat)
            self._memory.reduced.note(-self._kept.nbytes)
            self._kept = None
        if self.keeps_shards:
            self._kept = output
        elif self._has_replicas:
            with profiler_range("all_reduce", self.fqn):
                self._all_reduce = (self.collectives.all_reduce(output.flat, self.reduction), output)
        else:
            self._add_reduced(output)

    def _finish_all_reduce(self) -> None:
        if self._all_reduce is not None:
            (work, output), self._all_reduce = self._all_reduce, None
            with profiler_range("all_reduce_wait", self.fqn):
                work.wait()
            self._add_reduced(output)

    def _add_reduced(self, output: DBuffer) -> None:
        if self.reduce_hook is not None:
            self.reduce_hook(output.flat)
        if self._reduced is None:
            self._reduced = output
        else:
            self._reduced.flat.add_(output.flat)
            self._memory.reduced.note(-output.nbytes)

    @property
    def keeps_shards(self) -> bool:
        """Whether replicas do not reduce (``requires_all_reduce``): shards are kept for a later backward, not in ``.grad``."""
        return self._has_replicas and not self.requires_all_reduce

    @property
    def was_reduced(self) -> bool:
        """Whether this backward pass reduced gradients."""
        return any(part is not None for part in (self._output, self._all_reduce, self._reduced))

    # -- to .grad --------------------------------------------------------------------------------------------------

    def finish(self, used_anywhere: list[bool]) -> None:
        """At the end of backward: add the reduced shard to ``.grad`` of every parameter that some rank used."""
        self.finish_reduction()
        self._finish_all_reduce()
        reduced, self._reduced = self._reduced, None
        assert reduced is not None
        if self._state is GradientState.REDUCED:  # Otherwise a later pass has left gradients to accumulate.
            self._move_to(GradientState.EMPTY)
        like = self._sharded
        if (reduced.flat.dtype, reduced.flat.device) != (like.flat.dtype, like.flat.device):
            placing = (self._layout, Shard(0), self._rank, like.flat.dtype, like.flat.device, like.is_pinned)
            moved = DBuffer(*placing, log=self._memory.reduced)
            scaled_copy_(moved.flat, reduced.flat)  # There when this returns: an optimizer on the CPU may read it at once.
            self._memory.reduced.note(-reduced.nbytes)
            reduced = moved
        for index, (param, is_used) in enumerate(zip(self._params, used_anywhere)):
            param.was_used = False
            sharded = param.sharded
            if not is_used:
                continue
            gradient = param.distribution.sharded_like(reduced.tensor(index), sharded)  # type: ignore[arg-type]
            sharded.grad = gradient if sharded.grad is None else sharded.grad.add_(gradient)
            for hook in (getattr(sharded, "_post_accumulate_grad_hooks", None) or {}).values():
                hook(sharded)

    def drop(self) -> bool:
        """Forget the gradients that are not in ``.grad`` yet; says whether there were any."""
        had_any = self.is_pending
        # Forgotten before they are waited for: waiting for a collective that failed raises.
        in_flight = [self._reduce_scatter, None if self._all_reduce is None else self._all_reduce[0]]
        for buffer in self._reduced_buffers():
            self._memory.reduced.note(-buffer.nbytes)
        self._state = GradientState.EMPTY
        self._reduce_scatter = self._output = self._all_reduce = self._reduced = self._kept = None
        self._wide.clear()
        self.needs_reduction = self.is_accumulating = False
        for param in self._params:
            param.has_gradient = param.was_used = False
        # Collectives that other ranks take part in have to end here too; their input is freed after that only.
        try:
            for work in in_flight:
                if work is not None:
                    work.wait()
        finally:
            self._free()
        return had_any


@dynamo_disabled
def _take(reference: weakref.ref[GradientBuffers], index: int, unsharded: torch.Tensor) -> None:
    buffers = reference()
    assert buffers is not None
    buffers._take(index, unsharded)


class _Target:
    """Where one parameter's gradient goes. Autograd saves it, so that it must not keep the buffers alive."""

    def __init__(self, buffers: weakref.ref[GradientBuffers], index: int) -> None:
        self._buffers, self._index = buffers, index

    def begin(self) -> tuple[torch.Tensor, bool] | None:
        buffers = self._buffers()
        return None if buffers is None else buffers.begin(self._index)

    def done(self) -> None:
        buffers = self._buffers()
        assert buffers is not None
        buffers.done(self._index)
