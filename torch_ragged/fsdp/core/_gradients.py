"""GradientBuffers: the gradients of a group on their way from autograd to ``.grad``.

It does not decide when to reduce: the states do.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.distributed.tensor import Partial, Shard

from torch_ragged._kernels.casts import scaled_copy_
from torch_ragged._register._torch import as_plain_tensors, backward_id, dynamo_disabled_in_backward, profiler_range
from torch_ragged.fsdp.comm._collectives import Collectives, Reduction, Work, wait_all
from torch_ragged.fsdp.comm._wide_gradients import WideGradients
from torch_ragged.fsdp.core._comm_context import FSDPCommContext
from torch_ragged.fsdp.core._dbuffer import DBuffer, MemoryPool, in_buffer_form
from torch_ragged.fsdp.core._fsdp_param import FSDPParam
from torch_ragged.fsdp.core._group_state import GradientState, moved
from torch_ragged.fsdp.core._memory_log import GroupMemory
from torch_ragged.fsdp.core._spmd_types import untyped
from torch_ragged.fsdp.core._weight_gradient import GradientTarget
from torch_ragged.fsdp.layout._buffer_layout import BufferLayout
from torch_ragged.fsdp.layout._rows_layout import RowsLayout

__all__ = ["GradientBuffers"]


class Pass(Protocol):
    """The backward pass of the modules under a root."""

    def start(self) -> None:
        """A pass has begun, if it is not known."""

    def drop_raised(self) -> None:
        """If the last pass raised, drop its gradients."""


class GradientBuffers:
    """The gradient buffers of a group, and the reduction of its gradients.

    ::

        unreduced  DBuffer Partial(), dtype            matmuls write weight gradients into its views; other gradients are
                                                       copied (cast, added) into them once
           | only if reduce_dtype is wider than dtype, and if the collectives do not add in reduce_dtype or if gradients have
           | accumulated: one cast or one addition of the whole buffer, which is then freed
        widened    DBuffer Partial(), reduce_dtype     gradients in a wider dtype are added here
           | one reduce-scatter; if it reads ``unreduced``, a second one for gradients in a wider dtype
        reduced    DBuffer Shard(0), reduce_dtype      then an all-reduce over replicas (HSDP)
           | a cast, a copy to the CPU, or nothing
        .grad      views of a DBuffer Shard(0)         DTensors placed as their parameters

    Attributes:
        fqn: the name of the group's module; empty before the root's first forward.
        collectives: the collectives that reduce.
        reduction: the divisor and kind of the reduction.
        dtype: the dtype of unreduced gradients.
        requires_all_reduce: whether backward reduces over replicas.
        may_hold_sum: whether gradients may have accumulated since the last reduction, on any rank. Equal on all ranks: they
            make the same calls of :meth:`note_accumulation`, also if their own backward raises.
        comm: the limits on the communication of all groups under the root.
        backward: the backward pass of the modules under the root.
        max_reductions: how many modules' reduce-scatters may be in flight.
        reduce_hook: is called with each reduced shard.
        is_accumulating: whether the last backward left its gradients unreduced, for a later one.
        needs_reduction: whether backward has reached the group since the last reduction, on any rank. Equal on all ranks after
            pre-backward, which sets it and runs on all ranks.
        was_reached: whether pre-backward of the current pass has reached the group, on any rank.
        is_unhooked: whether backward may reach the group without a pre-backward, because forward returned a parameter, or
            tensors inside an object that is no container. Equal on all ranks.
        pool: the memory pool of unreduced gradients; None: the allocator.
    """

    def __init__(
        self, params: list[FSDPParam], layout: BufferLayout, rank: int, has_replicas: bool, memory: GroupMemory
    ) -> None:
        self._params, self._layout, self._rank, self._has_replicas = params, layout, rank, has_replicas
        self._memory, self._has_rows = memory, isinstance(layout, RowsLayout)
        self.fqn = ""
        self.reduction = Reduction()
        self.requires_all_reduce = True
        self.may_hold_sum = False
        self.is_accumulating = self.was_reached = self.is_unhooked = False
        self.reduce_hook: Callable[[torch.Tensor], None] | None = None
        self.comm: FSDPCommContext[GradientBuffers] = FSDPCommContext()
        self.backward: Pass
        self._reached_in = -1  # The number of the autograd pass whose pre-backward has reached the group last.
        self.max_reductions = 1
        self.pool: MemoryPool | None = None
        self.collectives: Collectives

    def place(self, device: torch.device, param_dtype: torch.dtype, reduce_dtype: torch.dtype, sharded: DBuffer) -> None:
        """Prepare for gradients of parameters in ``param_dtype`` on ``device``, which are reduced in ``reduce_dtype``.

        ``.grad`` gets the dtype and device of the ``sharded`` buffer. Earlier gradients that are not in ``.grad`` are dropped.
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
        self._output: DBuffer | None = None  # The output of the reduce-scatter, also after it has ended.
        self._all_reduce: tuple[Work, DBuffer] | None = None  # In flight, with the buffer that it reduces in place.
        self._reduced: DBuffer | None = None  # Reduced over all ranks.
        self._kept: DBuffer | None = None  # Reduced within each replica only.

    def set_pool(self, pool: MemoryPool | None) -> None:
        """From now on, allocate unreduced gradients from ``pool``. There must be none now."""
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
        """Whether there are gradients that are not in ``.grad`` yet."""
        return self._state is not GradientState.EMPTY

    def _move_to(self, state: GradientState) -> None:
        self._state = moved(lambda: f"the gradients of {self._params[0].fqn}", self._state, state)

    # -- from autograd ---------------------------------------------------------------------------------------------

    def register_hook(self, index: int) -> None:
        """Register a post-accumulate hook that copies a gradient into the buffer, and frees autograd's tensor.

        It stays the last one: hooks that the model registers on the unsharded parameter see the gradient.
        """
        unsharded = self._params[index].unsharded
        # Autograd's hooks are invisible to the garbage collector.
        own = unsharded.register_post_accumulate_grad_hook(functools.partial(_take, weakref.ref(self), index))
        register = functools.partial(_register_before, weakref.ref(unsharded), own.id)
        unsharded.register_post_accumulate_grad_hook = register  # type: ignore[method-assign]

    def _take(self, index: int, unsharded: torch.Tensor) -> None:
        # Autograd's tensor is freed as soon as it is copied: at most one gradient exists outside of the buffer.
        gradient = _popped_gradient(unsharded)
        if gradient is not None:  # Otherwise there is none, or a matmul has written it into the buffer.
            self._start_backward()  # It may drop gradients of an earlier pass, so this one is out of ``.grad`` before.
            self._collect(index, gradient)

    def _collect(self, index: int, gradient: torch.Tensor) -> None:
        """Copy the gradient of a parameter into the buffer."""
        param = self._params[index]
        with as_plain_tensors():
            param.sync_requires_grad()
        if not param.requires_grad:  # It was frozen after forward.
            return
        has_graph = gradient.requires_grad
        if has_graph:  # create_graph=True: as with FSDP2, ``.grad`` itself has no graph.
            gradient = gradient.detach()
        gradient = param.distribution.gradient(gradient)
        if self._has_rows:
            gradient = in_buffer_form(gradient, self._layout, index)
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
        self.done(index)

    def collect_assigned(self) -> None:
        """Collect gradients that a program has assigned to ``.grad`` of unsharded parameters.

        No hook runs for them. Pipeline schedules that split backward in two (zero bubble) compute them by
        ``torch.autograd.grad`` and assign them.
        """
        for index, param in enumerate(self._params):
            gradient = _popped_gradient(param.unsharded)
            if gradient is not None:
                self._collect(index, gradient)

    def target(self, index: int) -> GradientTarget:
        """Where a matmul may write the gradient of a parameter."""
        return _Target(weakref.ref(self), index)

    def begin(self, index: int) -> tuple[torch.Tensor, bool] | None:
        """The view to write a gradient to, and whether to add to it; None if autograd needs the gradient itself."""
        param = self._params[index]
        with as_plain_tensors():
            param.sync_requires_grad()
            hooks = getattr(param.unsharded, "_post_accumulate_grad_hooks", None) or {}
            if not param.requires_grad or param.unsharded._backward_hooks or len(hooks) > 1:  # One hook is ours.
                return None
        self._start_backward()
        return param.distribution.gathered(self.views()[index]), param.has_gradient

    def done(self, index: int) -> None:
        """The view of a parameter holds its gradient now."""
        self._params[index].has_gradient = True
        self._note_gradient()

    def _note_gradient(self) -> None:
        """There is a gradient to reduce: in this pass, or in a later one that other ranks reach, too."""
        # A parameter that was unsharded by hand may be used outside of forward, on this rank alone: then no rank expects its
        # gradient in this pass. It waits for the next pass that reaches the group, as in FSDP2.
        self.needs_reduction |= self.was_reached or self.is_unhooked
        if self._state is not GradientState.ACCUMULATING:
            self._move_to(GradientState.ACCUMULATING)

    def expect(self, is_trainable: bool) -> None:
        """Backward has reached the group, on this rank or on another one."""
        self.was_reached, self._reached_in = True, backward_id()
        self.needs_reduction |= is_trainable

    def end_pass(self, is_accumulating: bool) -> None:
        """A backward pass has ended."""
        self.was_reached, self.is_accumulating = False, is_accumulating

    def _start_backward(self) -> None:
        """Before a gradient is written: the gradients of a pass that raised are dropped."""
        if self._reached_in == backward_id():  # Mostly: pre-backward has started this pass.
            return
        if self.was_reached or self.is_unhooked:
            self.backward.start()
        else:
            self.backward.drop_raised()

    def views(self) -> list[torch.Tensor]:
        """The view of each parameter in the unreduced buffer, to write to. The buffer is allocated if necessary."""
        unreduced = self._unreduced
        if self._views and self._reduce_scatter is None and unreduced is not None:
            if unreduced.is_allocated and not unreduced.is_borrowed:
                return self._views
        # A reduce-scatter in flight still reads the buffer. Ranks may wait at different times: waiting issues no collective.
        self.wait_for_reduction()
        borrowed = self._unreduced if self._is_borrowing else None
        self._unreduced = self._allocated(None if borrowed else self._unreduced, self.dtype)
        if borrowed is not None:  # Its owner, such as a user's hook, may read it later.
            self._unreduced.flat.copy_(borrowed.flat)
            borrowed.free()
            self._views = []
        if not self._views:
            self._views = [self._unreduced.tensor(index) for index in range(len(self._params))]
        return self._views

    def _borrows(self, gradient: torch.Tensor) -> bool:
        """If autograd's gradient fills the buffer, as a large embedding's may, use it as the buffer; return whether it does.

        The gradient is only read: a hook of the user may have kept it. After the reduction the reference is dropped.
        """
        is_all = len(self._params) == 1 and gradient.numel() == self._layout.numel and gradient.dtype == self.dtype
        if not is_all or type(gradient) is not torch.Tensor or gradient.layout != torch.strided or self.pool is not None:
            return False
        if self.reduce_dtype == torch.float16:  # Its reduction divides the buffer in place, against overflow.
            return False
        self.wait_for_reduction()
        is_storage = gradient.is_contiguous() and gradient.untyped_storage().nbytes() == gradient.nbytes
        if not is_storage or (self._unreduced is not None and self._unreduced.is_allocated):
            return False
        self._unreduced = self._partial(self.dtype, borrowed=gradient)
        self._views = [self._unreduced.tensor(0)]
        return True

    @property
    def _is_borrowing(self) -> bool:
        """Whether the unreduced buffer is a gradient of autograd, which must not be written to."""
        return self._unreduced is not None and self._unreduced.is_borrowed

    def _free(self) -> None:
        """Free all memory for unreduced gradients."""
        self._free_unreduced()
        if self._widened is not None:
            self._widened.free()

    def _free_unreduced(self) -> None:
        if self._unreduced is not None:
            is_borrowing = self._is_borrowing
            self._unreduced.free()
            if is_borrowing:
                self._unreduced, self._views = None, []

    def _allocated(self, buffer: DBuffer | None, dtype: torch.dtype) -> DBuffer:
        """Allocate ``buffer``, or a new one if it is None, and return it."""
        if buffer is not None and buffer.is_allocated:
            return buffer
        # Other groups' reductions may have to end first, so that their memory is free. They are waited for if they hold a
        # second buffer, as over gloo: on a GPU, waiting would block the stream and save no memory. They are not finished, as
        # that issues HSDP's all-reduce: all ranks must issue it at the same moment, and they allocate at different ones.
        for gradients in self.comm.beyond(self.max_reductions):
            gradients.wait_for_second_buffer()
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
        """Keep a wide gradient outside of the unreduced buffer, which would round it.

        Norms compute such gradients, and these are few. If they become many, all gradients are kept in ``reduce_dtype``.
        """
        self.views()
        kept = self._wide.get(index)
        # Not in place: a hook of the user may have kept the first gradient.
        self._wide[index] = gradient.to(self.reduce_dtype) if kept is None else kept + gradient.to(self.reduce_dtype)
        self._params[index].was_used = True
        if not self.wide_gradients.are_few and self.wide_gradients.are_many(self._wide.values()):
            self.widen()
            self.dtype, self._unreduced, self._widened, self._views = self.reduce_dtype, self._widened, None, []
            for param in self._params:
                param.has_gradient = param.was_used
        self._note_gradient()

    # -- reduction -------------------------------------------------------------------------------------------------

    def widen(self) -> None:
        """At the end of a backward pass: cast its gradients to ``reduce_dtype``, or add them to those of earlier passes."""
        is_in_flight = self._state is GradientState.REDUCING  # There is no new gradient since then.
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
        """Complete the unreduced buffer: write zeros for parameters without a gradient on this rank."""
        for param, view in zip(self._params, self._views):
            if not param.has_gradient:
                view.zero_()
            param.was_used, param.has_gradient = param.was_used or param.has_gradient, False

    def start_reduction(self, reduces_narrow: bool = False) -> None:
        """Issue one reduce-scatter. A parameter without a gradient on this rank contributes zeros.

        Args:
            reduces_narrow: send gradients in ``dtype``, and wide gradients in a second reduce-scatter. Equal on all ranks.
        """
        self.needs_reduction = False
        self.finish_reduction()
        # Collect. All ranks reduce, so a rank without gradients allocates a buffer of zeros.
        holds_sum = self._widened is not None and self._widened.is_allocated
        assert not (reduces_narrow and holds_sum), "gradients of earlier passes have accumulated"
        if not holds_sum and not self._is_borrowing:
            self.views()
        # Cast, unless the collectives add in reduce_dtype themselves.
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
        """Whether gradients can be sent in ``dtype`` and added in ``reduce_dtype``."""
        is_narrow = self.dtype != self.reduce_dtype and not self.may_hold_sum and self.wide_gradients.are_few
        return is_narrow and self.collectives.reduce_scatter_traits(self._device).adds_wide

    def _round_unexpected(self, unreduced: DBuffer) -> None:
        """Round wide gradients of parameters for which other ranks expect none: those that matmuls write in place."""
        for index in [index for index in self._wide if index not in self.wide_gradients]:
            unreduced.tensor(index).add_(self._wide.pop(index))

    @property
    def wide_gradients(self) -> WideGradients:
        """The gradients that may have a wider dtype than ``dtype``."""
        if self._wide_gradients is None:
            indices = [index for index, param in enumerate(self._params) if param.may_be_wide]
            self._wide_gradients = WideGradients(self._layout, self._rank, indices)
        return self._wide_gradients

    def note_accumulation(self) -> None:
        """A backward pass leaves its gradients unreduced, on this rank or on another one."""
        self.may_hold_sum = True

    def wait_for_second_buffer(self) -> None:
        """If the reduce-scatter in flight holds a second buffer, wait for it."""
        if self.collectives.reduce_scatter_traits(self._device).holds_second_buffer:
            self.wait_for_reduction()

    def wait_for_reduction(self) -> None:
        """Wait for the reduce-scatter in flight and free its input. It issues no collective and calls no user hook."""
        if self._reduce_scatter is None:
            return
        work, self._reduce_scatter = self._reduce_scatter, None
        output, self._output = self._output, None  # If the wait raises, there is no output.
        try:
            with profiler_range("reduce_scatter_wait", self.fqn):
                work.wait()
        finally:  # Also if the wait raises: the next backward pass must not add to these gradients.
            self._free()
            self._move_to(GradientState.REDUCED)
        self._output = output

    def finish_reduction(self) -> None:
        """Wait for the reduce-scatter in flight, free its input, and issue the all-reduce of the shard (HSDP)."""
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
        """Whether reduced shards wait for a later backward that reduces over replicas: see ``requires_all_reduce``."""
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
        if self._state is GradientState.REDUCED:  # Otherwise gradients of a later pass accumulate.
            self._move_to(GradientState.EMPTY)
        like = self._sharded
        if (reduced.flat.dtype, reduced.flat.device) != (like.flat.dtype, like.flat.device):
            placing = (self._layout, Shard(0), self._rank, like.flat.dtype, like.flat.device, like.is_pinned)
            moved = DBuffer(*placing, log=self._memory.reduced)
            scaled_copy_(moved.flat, reduced.flat)  # This blocks: an optimizer on the CPU may read it at once.
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
        """Drop the gradients that are not in ``.grad`` yet; return whether there were any."""
        had_any = self.is_pending
        # Reset everything before the waits: waiting for a collective that failed raises.
        in_flight = [self._reduce_scatter, None if self._all_reduce is None else self._all_reduce[0]]
        for buffer in self._reduced_buffers():
            self._memory.reduced.note(-buffer.nbytes)
        self._state = GradientState.EMPTY
        self._reduce_scatter = self._output = self._all_reduce = self._reduced = self._kept = None
        self._wide.clear()
        self.needs_reduction = self.is_accumulating = self.was_reached = False
        for param in self._params:
            param.has_gradient = param.was_used = False
            param.unsharded.grad = None  # A program may have assigned it.
        # Other ranks take part in these collectives, so they must end here, too. Their input is freed after that.
        try:
            for work in in_flight:
                if work is not None:
                    work.wait()
        finally:
            self._free()
        return had_any


def _popped_gradient(param: torch.Tensor) -> torch.Tensor | None:
    """``param.grad``, which is None afterwards."""
    with as_plain_tensors():
        gradient, param.grad = param.grad, None
        return gradient


def _register_before(param: weakref.ref[torch.Tensor], own: int, hook: Callable[[torch.Tensor], None]) -> Any:
    """``param.register_post_accumulate_grad_hook(hook)``, before the hook with the id ``own``."""
    tensor = param()
    assert tensor is not None
    handle = torch.Tensor.register_post_accumulate_grad_hook(tensor, hook)
    hooks = tensor._post_accumulate_grad_hooks
    hooks[own] = hooks.pop(own)  # Not move_to_end: autograd iterates over the dict below the OrderedDict.
    return handle


@dynamo_disabled_in_backward
@untyped
def _take(reference: weakref.ref[GradientBuffers], index: int, unsharded: torch.Tensor) -> None:
    buffers = reference()
    assert buffers is not None
    buffers._take(index, unsharded)


class _Target:
    """The gradient target of one parameter. Autograd saves it, so it has only a weak reference to the buffers."""

    def __init__(self, buffers: weakref.ref[GradientBuffers], index: int) -> None:
        self._buffers, self._index = buffers, index

    def begin(self) -> tuple[torch.Tensor, bool] | None:
        buffers = self._buffers()
        return None if buffers is None else buffers.begin(self._index)

    def done(self) -> None:
        buffers = self._buffers()
        assert buffers is not None
        buffers.done(self._index)
