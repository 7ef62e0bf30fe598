"""GradBuffer: the gradients of a group before they are reduced. It holds them and adds to them; it reduces nothing."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import Partial

from torch_ragged._kernels.casts import scaled_copy_
from torch_ragged.fsdp.comm._wide_gradients import WideGradients
from torch_ragged.fsdp.core._dbuffer import Borrowed, DBuffer, MemoryLog, MemoryPool, current_stream, order_behind
from torch_ragged.fsdp.core._fsdp_param import FSDPParam
from torch_ragged.fsdp.layout._buffer_layout import BufferLayout

__all__ = ["GradBuffer", "register_last"]

_LARGEST_SMALL = 2**14
"""Elements of the largest gradient that is not copied by itself. They stay in memory until the reduction."""


class GradBuffer:
    """The unreduced gradients of a group, in one buffer of the layout of its parameters.

    ::

        unreduced  DBuffer Partial(), dtype            matmuls write weight gradients into its views; other gradients are
                                                       copied (cast, added) into them once. On a GPU, small ones are copied
                                                       together, by one kernel
           | only if reduce_dtype is wider than dtype, and if the collectives do not add in reduce_dtype or if gradients have
           | accumulated: one cast or one addition of the whole buffer, which is then freed
        widened    DBuffer Partial(), reduce_dtype     gradients in a wider dtype are added here

    It is allocated by the first gradient. Its user must not write to it while a collective reads it.

    Autograd runs a node on the stream of its forward, so gradients may be written on several streams. They are ordered behind
    the allocation, and what reads or frees the buffer is ordered behind them.

    Args:
        params: the parameters of the group. Each one's ``has_gradient`` and ``was_used`` are kept here.
        layout: the offset of each gradient.
        rank: this rank among the shards.
        device: of the computation.
        param_dtype: the dtype that the model computes with.
        reduce_dtype: the dtype that gradients are added in, over passes and over ranks.
        pool: makes the memory of the buffers.
        log: records when they are allocated and freed.

    Attributes:
        dtype: the dtype that gradients are written in: the narrower one of the two.
        may_borrow: whether :meth:`borrow` may return True.
        holds_gradients: whether a gradient was written since the buffer was freed.
        is_open: whether a gradient can be written without an allocation.
    """

    def __init__(
        self,
        params: list[FSDPParam],
        layout: BufferLayout,
        rank: int,
        device: torch.device,
        param_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        pool: MemoryPool,
        log: MemoryLog,
    ) -> None:
        self.params, self._layout, self._rank, self.device = params, layout, rank, device
        self._pool, self._log = pool, log
        self.reduce_dtype = reduce_dtype
        self.dtype = param_dtype if reduce_dtype.itemsize > param_dtype.itemsize else reduce_dtype
        # A reduction in float16 divides the buffer in place, against overflow.
        self.may_borrow = len(params) == 1 and not pool.is_required and reduce_dtype != torch.float16
        self.holds_gradients = self.is_open = self._holds_sum = False
        self._is_borrowed = False  # Whether autograd's gradient is the buffer now.
        self._unreduced: DBuffer | None = None
        self._widened: DBuffer | None = None
        self._views: list[torch.Tensor] = []  # Of ``_unreduced``, one per parameter.
        self._small: dict[int, torch.Tensor] = {}  # Gradients that are not copied yet, by parameter.
        self._streams: list[torch.Stream] = []  # Those that write to the buffer; the first one has allocated it.

    @functools.cached_property
    def wide_gradients(self) -> WideGradients:
        """The gradients of this backward pass in a wider dtype than ``dtype``."""
        indices = [index for index, param in enumerate(self.params) if param.may_be_wide]
        return WideGradients(self._layout, self._rank, indices)

    def buffers(self) -> list[DBuffer]:
        """All buffers, freed ones too."""
        return [buffer for buffer in (self._unreduced, self._widened) if buffer is not None]

    # -- gradients in ------------------------------------------------------------------------------------------------

    def views(self) -> list[torch.Tensor]:
        """The view of each parameter, to write to on the current stream. The buffer is allocated if necessary."""
        stream = current_stream(self.device)
        if self.is_open:  # Mostly: for all but the first gradient of a pass.
            if stream is not None and stream not in self._streams:
                # The memory may have had another use before, which the allocating stream is ordered behind.
                order_behind(stream, self._streams[0])
                self._streams.append(stream)
            return self._views
        if stream is not None:
            self._gather_streams(stream)
        before, is_borrowed = self._unreduced, self._is_borrowed
        unreduced = self._unreduced = self._allocated(None if is_borrowed else before, self.dtype)
        if before is not None and is_borrowed:  # Its owner, such as a user's hook, may read it later.
            unreduced.flat.copy_(before.flat)
            before.free()
            self._views, self._is_borrowed = [], False
        if not self._views:
            self._views = [unreduced.tensor(index) for index in range(len(self.params))]
        self.is_open = True
        return self._views

    def target(self, index: int) -> tuple[torch.Tensor, bool]:
        """The view of a parameter, to write to on the current stream, and whether it holds a gradient to add to."""
        # Without streams, as on the CPU, nothing is to be ordered once the buffer is open.
        views = self._views if self.is_open and not self._streams else self.views()
        view, holds_gradient = views[index], self.params[index].has_gradient
        if holds_gradient and self._streams:
            self._copy_small()
            self._gather_streams(current_stream(self.device))  # The first gradient may be of another stream.
        return view, holds_gradient

    def _gather_streams(self, stream: torch.Stream | None) -> None:
        """Order ``stream``, the current one, behind all that has been written. Later writers are ordered behind it."""
        for other in self._streams:
            order_behind(stream, other)
        self._streams = [] if stream is None else [stream]

    def borrow(self, gradient: torch.Tensor) -> bool:
        """If autograd's gradient fills the buffer, as a large embedding's may, use it as the buffer; return whether it does.

        The gradient is only read: a hook of the user may have kept it. After the reduction the reference is dropped.
        """
        is_all = gradient.numel() == self._layout.numel and gradient.dtype == self.dtype
        if not is_all or type(gradient) is not torch.Tensor or gradient.layout != torch.strided:
            return False
        is_storage = gradient.is_contiguous() and gradient.untyped_storage().nbytes() == gradient.nbytes
        if not is_storage or self.is_open or self._is_borrowed:
            return False
        self._unreduced = DBuffer(
            self._layout, Partial(), self._rank, self.dtype, self.device, pool=Borrowed(gradient), log=self._log
        )
        self._views, self._is_borrowed = [self._unreduced.tensor(0)], True
        self._gather_streams(current_stream(self.device))
        self.mark(0)
        return True

    def add(self, index: int, gradient: torch.Tensor) -> None:
        """Copy a gradient in the form of the buffer into it, or add it."""
        # The buffer would round it. Sums over ranks and passes have reduce_dtype, so this is the only place where bits could be
        # lost.
        if gradient.dtype.itemsize > self.dtype.itemsize and self.dtype != self.reduce_dtype:
            # Norms compute such gradients, and these are few. If they become many, all gradients are kept in ``reduce_dtype``.
            self.views()
            self.wide_gradients.keep(index, gradient.to(self.reduce_dtype))
            self.params[index].was_used = self.holds_gradients = True
            if self.wide_gradients.are_many:
                self.widen()
                self.dtype, self._unreduced, self._widened, self._views = self.reduce_dtype, self._widened, None, []
                self._holds_sum = False  # views() opens the wide buffer, at the latest for the reduction.
                for param in self.params:
                    param.has_gradient = param.was_used
            return
        # The one copy on a gradient's way: it casts too.
        view, holds_gradient = self.target(index)
        if holds_gradient:
            view.add_(gradient)
        elif self._streams and gradient.numel() <= _LARGEST_SMALL and type(gradient) is torch.Tensor:
            self._small[index] = gradient  # It is read later, and never written.
        else:
            view.copy_(gradient)
        self.params[index].has_gradient = self.holds_gradients = True

    def _copy_small(self) -> None:
        """Copy the small gradients, by one kernel: on a GPU, a copy of a bias takes as long as the launch of one."""
        if self._small:
            streams, current = self._streams, current_stream(self.device)
            self._gather_streams(current)
            torch._foreach_copy_([self._views[index] for index in self._small], list(self._small.values()))
            self._small.clear()
            for stream in streams:  # They may get the memory of these gradients next.
                order_behind(stream, current)

    def mark(self, index: int) -> None:
        """The view of a parameter holds its gradient now."""
        self.params[index].has_gradient = self.holds_gradients = True

    # -- gradients out -----------------------------------------------------------------------------------------------

    def widen(self) -> None:
        """Cast the gradients of a backward pass to ``reduce_dtype``, or add them to those of earlier passes."""
        if self.dtype == self.reduce_dtype or self._unreduced is None or not (self.is_open or self._is_borrowed):
            return
        self._close()
        self._widened = self._allocated(self._widened, self.reduce_dtype, is_overwritten=True)
        # One pass over memory, for the cast and the addition.
        scaled_copy_(self._widened.flat, self._unreduced.flat, accumulate=self._holds_sum)
        self._holds_sum = True
        self._free_unreduced()
        # They were never in the narrow buffer, so they keep their bits.
        for index, gradient in self.wide_gradients.popped():
            self._widened.tensor(index).add_(gradient)

    def accumulated(self, index: int) -> torch.Tensor | None:
        """Between passes: the view of a parameter's sum over passes, to read or write; None if this rank has none."""
        param = self.params[index]
        if not (param.has_gradient or param.was_used):
            return None
        if self._widened is not None and self._holds_sum:
            return self._widened.tensor(index)
        if not param.has_gradient:
            return None
        views = self.views()  # The buffer's own memory: a borrowed gradient is a hook's, which must not change.
        self._copy_small()
        self._gather_streams(current_stream(self.device))
        return views[index]

    def completed(self, widens: bool) -> DBuffer:
        """The buffer to reduce. A parameter without a gradient on this rank contributes zeros.

        Args:
            widens: whether it has ``reduce_dtype``. Otherwise it has ``dtype``, and :attr:`wide_gradients` has the rest.
        """
        assert widens or not self._holds_sum, "gradients of earlier passes have accumulated"
        # All ranks reduce, so a rank without gradients allocates a buffer of zeros.
        if not (self._holds_sum or self.is_open or self._is_borrowed):
            self.views()
        # All ranks decide alike here, see GradReduction.start: a collective has one dtype.
        if widens and self.dtype != self.reduce_dtype:
            self.widen()
            source = self._widened
        else:
            self._close()
            source = self._unreduced
            if not widens:
                # Other ranks expect wide gradients of some parameters only: round the rest, of matmuls that write in place.
                for index, gradient in self.wide_gradients.popped(only_unexpected=True):
                    self.views()[index].add_(gradient)
        assert source is not None
        return source

    def pending(self, forgets: bool = False) -> dict[tuple[int, ...], list[int]]:
        """The parameters whose gradients are pending a sum, by the mesh dimensions of the model."""
        found: dict[tuple[int, ...], list[int]] = {}
        for index, param in enumerate(self.params):
            if param.pending:
                found.setdefault(param.pending, []).append(index)
            if forgets:
                param.pending = None
        return found

    def _close(self) -> None:
        """Complete the gradients of a pass, with zeros for parameters without a gradient on this rank.

        From here on, the current stream reads them.
        """
        if self._streams:
            self._copy_small()
            self._gather_streams(current_stream(self.device))
        for param, view in zip(self.params, self._views):
            if not param.has_gradient:
                view.zero_()
            param.was_used, param.has_gradient = param.was_used or param.has_gradient, False

    # -- memory ------------------------------------------------------------------------------------------------------

    def free(self) -> None:
        """Free the memory. Reduced gradients are elsewhere."""
        self.holds_gradients, self._holds_sum, self._streams = False, False, []
        self._free_unreduced()
        if self._widened is not None:
            self._widened.free()

    def drop(self) -> None:
        """Forget all gradients. :meth:`free` follows, when no collective reads the buffer."""
        self.holds_gradients = False
        # References only: autograd, or a hook of the user, may hold these tensors longer.
        self.wide_gradients.kept.clear()
        self._small.clear()
        for param in self.params:
            param.has_gradient = param.was_used = False
            param.pending = None
            param.unsharded.grad = None  # A program may have assigned it.

    def _free_unreduced(self) -> None:
        self.is_open = False
        if self._unreduced is not None:
            self._unreduced.free()
            if self._is_borrowed:
                # The memory is its owner's: the reference is dropped, and the next pass makes a buffer of its own.
                self._unreduced, self._views, self._is_borrowed = None, [], False

    def _allocated(self, buffer: DBuffer | None, dtype: torch.dtype, is_overwritten: bool = False) -> DBuffer:
        """Allocate ``buffer``, or a new one if it is None, and return it. ``is_overwritten``: the caller writes all of it."""
        if buffer is None:
            buffer = DBuffer(self._layout, Partial(), self._rank, dtype, self.device, pool=self._pool, log=self._log)
        else:
            buffer.allocate()  # Nothing, if it holds sums.
        # Padding is reduced, too. Old memory there may hold NaN, which debuggers and sums over a buffer would see.
        if not is_overwritten:
            buffer.zero_padding()
        return buffer


def register_last(param: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Register a post-accumulate hook that stays the last one: hooks that the model registers later see the gradient."""
    own = param.register_post_accumulate_grad_hook(hook)
    register = functools.partial(_register_before, weakref.ref(param), own.id)
    param.register_post_accumulate_grad_hook = register  # type: ignore[method-assign]


def _register_before(param: weakref.ref[torch.Tensor], own: int, hook: Callable[[torch.Tensor], None]) -> Any:
    """``param.register_post_accumulate_grad_hook(hook)``, before the hook with the id ``own``."""
    tensor = param()
    assert tensor is not None
    handle = torch.Tensor.register_post_accumulate_grad_hook(tensor, hook)
    hooks = tensor._post_accumulate_grad_hooks
    hooks[own] = hooks.pop(own)  # Not move_to_end: autograd iterates over the dict below the OrderedDict.
    return handle
