"""GradientReductionHandle: a handle on gradient reductions in flight, to wait for them. It reduces nothing itself."""

from __future__ import annotations

from torch_ragged.fsdp.core._fsdp_state_context import FSDPStateContext

__all__ = ["GradientReductionHandle"]


class GradientReductionHandle:
    """A handle on reductions that :meth:`FSDPModule.finalize_backward` has issued."""

    def __init__(self, context: FSDPStateContext) -> None:
        self._context: FSDPStateContext | None = context
        if context.backward.handle is not None:
            raise RuntimeError("wait for the handle of the last finalize_backward before finalizing backward again")
        if not context.is_initialized:  # No forward has run.
            self._context = None
            return
        with context.backward.raised_on_error():
            context.start_reductions()
        context.backward.handle = self

    def wait(self) -> None:
        """Finish the reductions, set ``.grad`` and reshard. A second call does nothing.

        Raises:
            RuntimeError: ``reset_iter_state`` has dropped the reductions.
        """
        context, self._context = self._context, None
        if context is None:
            return
        if context.backward.handle is not self:
            raise RuntimeError("the gradients of this handle were dropped by reset_iter_state")
        context.backward.handle = None
        context.end_backward()
