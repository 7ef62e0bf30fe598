"""The gate of a root: ranks agree on its calls, so that no all-gather of one module meets that of another one.

It moves no parameters: it calls the states whose calls other ranks make.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from torch_ragged._ranks.groups import device_of, timeout_of
from torch_ragged.fsdp.comm._call_log import CallLog
from torch_ragged.fsdp.core._fsdp_state import FSDPState, Gate
from torch_ragged.fsdp.gates._roll_call import RollCall, roll_call_of
from torch_ragged.fsdp.gates._untrained import note_root, refuse_other_replicas, warn_of_unsharded

__all__ = ["OptionalGate", "RootGate", "gate_of"]


def gate_of(states: Sequence[FSDPState]) -> Gate | None:
    """The gate of a root, in its first forward; None if the mesh has one rank, or if ranks are simulated.

    ``states`` are those under the root; the root's is the first.
    """
    log, roll_call = _call_log_of(states), roll_call_of(states[0].modules, states)
    note_root(states[0].modules)
    groups = [group for state in states for group in state.groups]
    if torch.is_grad_enabled():
        warn_of_unsharded(states[0].modules, groups)
    if log is None:
        return None
    return RootGate(states, log) if roll_call is None else OptionalGate(states, log, roll_call)


class RootGate:
    """All ranks make the same calls, in the same order, and begin with equal replicas. The log compares the calls."""

    def __init__(self, states: Sequence[FSDPState], log: CallLog) -> None:
        self._states, self.log, self._has_checked_replicas = states, log, False
        # Groups keep it: of the log, which does not hold the states.
        self.before_collective: Callable[[], None] = log.before_collective

    def start(self) -> None:
        # Hooks run in the middle of backward, on all ranks or on none.
        hooked = [group.fqn or "root" for state in self._states for group in state.groups if group.has_hooks]
        self.log.start(f" with hooks on gradients of {', '.join(hooked)}" if hooked else "")

    def before_call(self, state: FSDPState, needs_backward: bool) -> bool:
        if not self._has_checked_replicas:  # In the first forward, when the user has loaded parameters.
            # Ranks make sure that they run the same root. If they differ, the next forward compares again.
            self.before_collective()
            checked = [group for each in self._states if each.checks_replicas for group in each.groups]
            refuse_other_replicas(self._states[0].modules, checked)
            self._has_checked_replicas = True
        self.log.add(state.fqn)
        return needs_backward

    def after_call(self, state: FSDPState, needs_backward: bool, must_stay: bool) -> tuple[bool, bool]:
        # The end of other calls issues no collective.
        if state.is_root:
            self.log.finish()
        return needs_backward, must_stay


class OptionalGate(RootGate):
    """The same, and ranks that skip an optional module take part in its calls.

    A vote precedes each event of an optional module, the pre-forward of each other module, and the end of the root's forward.
    """

    def __init__(self, states: Sequence[FSDPState], log: CallLog, roll_call: RollCall) -> None:
        super().__init__(states, log)
        self._roll_call = roll_call

    def before_call(self, state: FSDPState, needs_backward: bool) -> bool:
        if state.is_optional:
            return self._meet(state, is_exit=False)[0]
        if not state.is_root:
            self._meet(None)
        return super().before_call(state, needs_backward)

    def after_call(self, state: FSDPState, needs_backward: bool, must_stay: bool) -> tuple[bool, bool]:
        if state.is_optional:
            return self._meet(state, is_exit=True, stays_unsharded=must_stay)
        if state.is_root:
            self._meet(None)
        return super().after_call(state, needs_backward, must_stay)

    def _meet(self, state: FSDPState | None, is_exit: bool = False, stays_unsharded: bool = False) -> tuple[bool, bool]:
        """Return when this event is next on all ranks that have it, and take part in the events before it.

        Args:
            state: of an optional module; None: when no rank has such an event.
            is_exit: whether its call ends, and does not begin.
            stays_unsharded: whether this rank must not reshard at the end of the call.

        Returns:
            whether gradients are enabled, and whether the module stays unsharded, on any rank that has the event.
        """
        event = None if state is None else (state, is_exit)
        self.before_collective()  # A vote is a collective, too: ranks make sure that they run the same root.
        while True:
            agreed, needs = self._roll_call.agree(event, stays_unsharded)
            if agreed is None or agreed == event:
                return needs
            other, ends = agreed
            if ends:
                other.leave_call(other.modules[0], *needs)
            else:
                other.enter_call(other.context, needs[0])


def _call_log_of(states: Sequence[FSDPState]) -> CallLog | None:
    """The log of the calls under a root; None if there is one rank, or if the ranks are simulated."""
    groups = [group for state in states for group in state.groups]
    group = max(groups, key=lambda group: group.dp.mesh.size(), default=None)
    # A report that runs on one rank alone must not wait for others.
    if group is None or group.plan.runs_on_meta or group.dp.mesh.size() == 1:
        return None
    shard_group = group.dp.shard_group or group.dp.replicate_group
    assert shard_group is not None
    # Its ranks exist in this process only.
    if dist.get_backend(shard_group) == "fake":
        return None
    # Names of modules are known under one root only. Groups are numbered in the order of their construction.
    root = f"{type(states[0].modules[0]).__name__} with {group.names} in group {group.named.number}"
    return CallLog(sorted(group.dp.mesh.mesh.flatten().tolist()), timeout_of(shard_group, device_of(group.dp.mesh)), root)
