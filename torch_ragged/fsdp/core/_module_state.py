"""ModuleState: the groups of one module after ``fully_shard``, and what they do in a step.

It has no hooks, and does not know when: the root and the hooks of ``FSDPState`` call it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from torch_ragged._register._torch import profiler_range
from torch_ragged.fsdp.core._comm_context import FSDPCommContext
from torch_ragged.fsdp.core._forward_order import Call, ForwardOrder
from torch_ragged.fsdp.core._fsdp_param_group import FSDPParamGroup
from torch_ragged.fsdp.core._grad_reduction import GradReduction

__all__ = ["ModuleState", "numbered"]


def numbered(groups: list[FSDPParamGroup]) -> list[FSDPParamGroup]:
    """``groups``, with numbers that are equal on all ranks. One rank may make a memory report alone: its groups get none."""
    for group in groups:
        if not group.plan.runs_on_meta:
            group.named.take_number()
    return groups


class ModuleState:
    """The groups of one module, or of several modules that share them, and the knobs that users set.

    Attributes:
        modules: the modules of one call of ``fully_shard``.
        groups: the groups of their parameters: several if these differ in mesh, dtype or kind of placement.
        calls: the forward calls that run now; the innermost is the last.
        reduces_last_only: whether gradients stay unreduced until the root's ``is_last_backward`` (``ZERO1``).
        comm: the limits on communication, which the states under one root share.
        unshard_in_backward: whether backward needs the parameters.
        is_optional: whether ranks may skip the module in forward. So are the modules inside an optional one.
        reduces_unused: whether a group without gradients on this rank takes part in collectives.
        forward_prefetch, backward_prefetch: the states to all-gather ahead; None: the next one.
        root_state: the state of the root; this one until the root's first forward.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        groups: list[FSDPParamGroup],
        mp_policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | None,
        is_optional: bool = False,
    ) -> None:
        self.is_optional = is_optional
        self.modules, self.groups, self.mp_policy = tuple(modules), numbered(groups), mp_policy
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.requires_gradient_sync = True
        self.reduces_last_only = False
        self.is_last_backward = True
        self.finalizes_manually = False
        self.unshard_in_backward = True
        self.reduces_unused = True
        self.post_optim_event: torch.Event | None = None
        self.forward_prefetch: Sequence[ModuleState] | None = None
        self.backward_prefetch: Sequence[ModuleState] | None = None
        self.is_root = False
        self.calls: list[Call] = []
        self._in_backward = False  # Between pre- and post-backward. A forward call then is a recomputation.
        self._still_to_run = set(self.modules)  # The modules that have not run since the last reshard.
        self._must_refresh = False  # Unsharded parameters may be out of date in the next iteration.
        self.fqn = ""
        self._root_state = weakref.ref(self)
        self.comm: FSDPCommContext[GradReduction] = FSDPCommContext()

    @property
    def name(self) -> str:
        return ", ".join(type(module).__name__ for module in self.modules)

    @property
    def root_state(self) -> ModuleState:
        return self._root_state() or self  # If the root was deleted, this module may become one.

    # -- forward ---------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """A forward begins: reshard parameters that an earlier forward left unsharded, since the shards may have changed."""
        self.calls.clear()
        self._still_to_run = set(self.modules)
        if self._must_refresh or any(group.is_outdated for group in self.groups):
            self.reshard()
        # After resharding: the user's parameters are registered in the modules then, and all-gathers read the shards.
        for group in self.groups:
            group.load_replaced()
            group.expire_resident()
            group.is_unhooked = False

    def unshard(self) -> None:
        """All-gather the parameters, unless they are unsharded, and register them in the modules."""
        # Issue all before waiting for one: the all-gathers of a module's groups are in flight together.
        for group in self.groups:
            group.unshard(wait=False)
        for group in self.groups:
            group.unshard()
        self.comm.forget_gathering(self)

    def reshard(self, keep: bool = False) -> None:
        """Free the unsharded parameters. If ``keep``, the keeper may keep a part for backward."""
        self.comm.forget_gathering(self)
        for group in self.groups:
            group.reshard(keep)
        # A kept part has the current values. If a new forward begins before backward, it drops the part.
        self._must_refresh = any(group.keeper is not None and group.keeper.holds_part for group in self.groups)

    def _prefetch(
        self, chosen: Sequence[ModuleState] | None, order: ForwardOrder | None, position: int, step: int
    ) -> list[ModuleState]:
        """Issue the all-gathers of ``chosen``, or of the next module in ``order``; return the states whose were issued.

        If the limit of all-gathers ahead of use is reached, an all-gather is issued when its module runs.
        """
        states = self._next(order, position, step) if chosen is None else chosen
        started = []
        # These conditions are equal on all ranks: the order, the all-gathers in flight, and the holders of slots.
        for state in states:
            is_gathered = all(group.is_gathered for group in state.groups)
            can_start = all(group.has_slot for group in state.groups)
            if not is_gathered and can_start and self.comm.may_gather_ahead:
                for group in state.groups:
                    group.unshard(wait=False)
                self.comm.add_gathering(state)
                started.append(state)
        return started

    def _next(self, order: ForwardOrder | None, position: int, step: int) -> list[ModuleState]:
        """The next module with parameters in ``order``, if this forward has followed it up to here."""
        states: list[Any] = order.states if order else []
        neighbour = position + step
        in_order = position >= 0 and 0 <= neighbour < len(states) and states[position] is self
        # In forward, an optional module may run on no rank. Backward follows the order within each thread only.
        while in_order and (
            not states[neighbour].groups
            or (states[neighbour] is self and len(self.modules) > 1)
            or (states[neighbour].is_optional and step > 0)
            or (step < 0 and not order.share_thread(position, neighbour))  # type: ignore[union-attr]
        ):
            neighbour += step
            in_order = 0 <= neighbour < len(states)
        return [states[neighbour]] if in_order else []

    # -- backward --------------------------------------------------------------------------------------------------

    def pre_backward(self, order: ForwardOrder | None, position: int) -> None:
        """Unshard for the backward of a call, and prefetch the module before. Equal on all ranks: see ``ForwardOrder``."""
        self._in_backward = True
        # First: if this rank raises below, it still knows which gradients other ranks reduce.
        self._expect_gradients()
        if self.groups and self.unshard_in_backward:
            with profiler_range("pre_backward", self.fqn):
                self.unshard()
                self._prefetch(self.backward_prefetch, order, position, step=-1)

    def _expect_gradients(self) -> None:
        """This rank or another one may get gradients: all ranks will reduce."""
        for group in self.groups:
            group.expect_gradients()
        self._note_accumulation()

    def expect_unsharded(self) -> None:
        """At the end of a pass: groups that are still unsharded may have gradients on any rank, without a forward."""
        # Equal on all ranks, as unshard() is. A rank without gradients contributes zeros.
        if self.reduces_unused:
            for group in self.groups:
                if group.is_unsharded and not group.was_reached:
                    group.expect_gradients()

    def _note_accumulation(self) -> None:
        if self._accumulates:
            for group in self.groups:
                group.note_accumulation()

    def post_backward(self, is_last: bool) -> None:
        """Reshard after the backward of a call; after the last call in backward, reduce the gradients of all calls."""
        if not self._in_backward:
            return
        self._in_backward = False
        with profiler_range("post_backward", self.fqn):
            # Reshard first: the cast of gradients and the reduction may use the memory that this frees.
            if self.reshard_after_backward and (is_last or len(self.modules) == 1):
                self.reshard()
            # Gradients of all calls are reduced together, once.
            if is_last:
                self.reduce_gradients()

    def reduce_gradients(self) -> None:
        """Issue the reduce-scatters of groups that backward has reached; or let their gradients accumulate."""
        groups = [group for group in self.groups if group.needs_reduction]
        for group in groups:
            group.collect_assigned()
        if self._accumulates:
            for group in groups:
                group.accumulate_gradients()
            return
        if not groups:
            return
        # This limits the memory of gradients in flight. All ranks reach it in one order, as HSDP's all-reduces need it.
        oldest = self.comm.beyond(groups[0].settings.max_reductions)
        self.comm.forget(oldest)
        for reduction in oldest:
            reduction.finish()
        for group in groups:
            group.reduce_gradients()
        self.comm.add_reduction([group.reduction for group in groups])

    @property
    def _accumulates(self) -> bool:
        """Whether backward leaves gradients unreduced, for a later pass."""
        if not self.requires_gradient_sync:
            return True
        return self.reduces_last_only and not self.root_state.is_last_backward

    def end_backward(self) -> None:
        """The pass is over, and ``.grad`` is set."""
        self.comm.forget([group.reduction for group in self.groups])
        if self._must_refresh and self.root_state.calls:  # Forward itself ran this backward, and uses the parameters.
            return
        if self.reshard_after_backward or not all(group.is_unsharded for group in self.groups):
            self.reshard()
        else:
            self._must_refresh = False  # They are valid until the optimizer steps, which group.is_outdated notices.

    def drop_backward(self) -> bool:
        """Drop the gradients of the backward pass; return whether there were any."""
        self._in_backward = False
        self._must_refresh = True
        self.comm.forget([group.reduction for group in self.groups])
        dropped = [group.drop_gradients() for group in self.groups]
        return any(dropped)
