"""FSDPStateContext: what the states under one root share, and the start and the end of an iteration.

It has no hooks: the states call it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from torch_ragged._register._torch import profiler_range
from torch_ragged.fsdp.comm._call_log import CallLog
from torch_ragged.fsdp.core._backward_pass import BackwardPass
from torch_ragged.fsdp.core._comm_context import FSDPCommContext
from torch_ragged.fsdp.core._forward_order import Event, ForwardOrder
from torch_ragged.fsdp.core._fsdp_param_group import FSDPParamGroup
from torch_ragged.fsdp.core._roll_call import RollCall
from torch_ragged.fsdp.core._used_params import used_anywhere

__all__ = ["FSDPStateContext"]


class State(Protocol):
    """The members of a state that its context uses."""

    groups: list[FSDPParamGroup]
    calls: list[Any]
    fqn: str
    finalizes_manually: bool
    post_optim_event: torch.Event | None

    @property
    def comm(self) -> FSDPCommContext[Any]: ...
    def refresh(self) -> None: ...
    def reshard(self) -> None: ...
    def post_backward(self, is_last: bool) -> None: ...
    def expect_unsharded(self) -> None: ...
    def reduce_gradients(self) -> None: ...
    def end_backward(self) -> None: ...
    def drop_backward(self) -> bool: ...


class FSDPStateContext:
    """The data that the states under one root share.

    Each state has its own context until the root's first forward. From then on, all states under the root share one.

    Attributes:
        states: the states under the root, in the order of ``modules()``; the root's is the first.
        is_initialized: whether the root has run its first forward.
        order: the calls of the root's current or last forward.
        last_order: the calls of the forward before it. Prefetching follows ``last_order``.
        backward: the backward pass.
        log: compares calls between ranks; None if there is one rank, or if nothing is communicated.
        roll_call: lets ranks take part in optional modules; None if there are none.
    """

    def __init__(self, states: Sequence[State], is_initialized: bool) -> None:
        self.states, self.is_initialized = states, is_initialized
        self.order, self.last_order = ForwardOrder(), ForwardOrder()
        self.backward = BackwardPass(self)
        self.log: CallLog | None = None
        self.roll_call: RollCall | None = None

    @property
    def groups(self) -> list[FSDPParamGroup]:
        return [group for state in self.states for group in state.groups]

    @property
    def all_states(self) -> Sequence[State]:
        """``states`` under FSDP2's name, which the pipeline schedules of torch 2.11 to 2.13 read."""
        return self.states

    @property
    def in_forward(self) -> bool:
        """Whether the root is in its forward."""
        return bool(self.states[0].calls)

    def start_iteration(self) -> None:
        """The root's forward begins."""
        if self.log is not None:
            self.log.start()
        for state in self.states:
            # An optimizer on another stream may still write to the shards that the next all-gathers read.
            event, state.post_optim_event = state.post_optim_event, None
            if event is not None:
                event.wait()
            state.refresh()
        # Prefetching follows the last forward: all ranks have completed it, in the same order.
        self.last_order, self.order = self.order, ForwardOrder()

    def drop_unused_prefetches(self) -> None:
        """After a forward without backward: reshard modules that were prefetched and did not run."""
        # All ranks prefetch in the same order. So they have issued, and drop, the same all-gathers.
        for state in self.states:
            if state.comm.forget_gathering(state):
                state.reshard()

    # -- backward --------------------------------------------------------------------------------------------------

    def run_skipped(self, order: ForwardOrder, events: Sequence[Event]) -> None:
        """Run the events of calls that backward has skipped on this rank: other ranks unshard and reduce for them now."""
        for position, is_pre_backward in events:
            state: Any = order.states[position]
            if is_pre_backward:
                state.pre_backward(order, position)
            else:
                state.post_backward(order.is_first(position))

    def root_post_backward(self) -> None:
        """Autograd has reached the end of a backward pass."""
        if self.states[0].finalizes_manually:
            self.pause_backward()
        else:
            self.end_backward()

    def pause_backward(self) -> None:
        """A backward pass is over; others may follow before ``finalize_backward``."""
        # Other ranks may have reached modules that backward did not reach here: take part in their collectives.
        self.backward.finish_orders()
        for state in self.states:
            state.post_backward(is_last=True)
        # Even if gradients were reduced: the next pass uses the same parameters, so resident ones stay.
        self._end_pass(is_accumulating=True)
        self.backward.pause()

    def start_reductions(self) -> None:
        """Reduce the gradients that no module's post-backward has reduced."""
        self.backward.finish_orders()
        # In the order of modules, not of gradients: autograd's order may differ between ranks.
        for state in reversed(self.states):
            state.post_backward(is_last=True)
            state.expect_unsharded()
            state.reduce_gradients()

    def end_backward(self) -> None:
        """End a backward pass: reduce all other gradients, agree on unused parameters, set ``.grad``, reshard.

        Collectives: the reductions not issued yet, and per mesh one all-reduce of a byte per parameter.
        """
        with profiler_range("root_post_backward_callback", self.states[0].fqn), self.backward.raised_on_error():
            self.start_reductions()
            # These groups do not set .grad now. Finish their reductions, too: none stays in flight after its backward.
            for group in self.groups:
                if group.gradients.keeps_shards:
                    group.gradients.finish_reduction()
            # Equal on all ranks, as are the collectives below: a group is reduced if pre-backward ran on any rank.
            reduced = [group for group in self.groups if group.gradients.was_reduced]
            for mesh in dict.fromkeys(group.dp.key for group in reduced):
                members = [group for group in reduced if group.dp.key == mesh]
                used = used_anywhere(members)
                for group in members:
                    group.finish_gradients([next(used) for _ in group.params])
            self._end_pass(not reduced and any(group.is_trainable for group in self.groups))
            for state in self.states:
                state.end_backward()
            # Last: if anything above raises, the pass counts as one that raised, and its gradients are dropped.
            self.backward.finish()

    def _end_pass(self, is_accumulating: bool) -> None:
        for group in self.groups:
            group.gradients.end_pass(is_accumulating)

    def drop_raised_backward(self) -> None:
        """If the last backward raised, drop its gradients: the next pass must not add to them."""
        if self.backward.has_raised and self.drop_backward():
            warnings.warn(
                "a backward pass raised: its gradients, and those accumulated without gradient sync, are dropped", stacklevel=2
            )

    def drop_backward(self) -> bool:
        """Drop reductions in flight and gradients that are not in ``.grad`` yet; return whether there were any."""
        self.backward.forget()
        had_any = False
        for state in self.states:
            had_any |= state.drop_backward()
        return had_any
