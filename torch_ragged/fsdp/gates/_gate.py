"""The gate of a root: ranks agree on its calls, so that no all-gather of one module meets that of another one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from torch_ragged._ranks.agreement import reduce_min
from torch_ragged._ranks.groups import device_of, timeout_of
from torch_ragged._ranks.peers import tracker
from torch_ragged.fsdp.comm._call_log import CallLog
from torch_ragged.fsdp.core._fsdp_param_group import FSDPParamGroup
from torch_ragged.fsdp.core._fsdp_state import FSDPState, Gate
from torch_ragged.fsdp.gates._untrained import note_root, refuse_other_replicas, warn_of_unsharded

__all__ = ["OptionalGate", "RollCall", "RootGate", "gate_of", "roll_call_of"]

OptionalEvent = tuple[FSDPState, bool]
"""A state and whether its call ends: its pre-forward, or its post-forward."""


def gate_of(states: Sequence[FSDPState]) -> Gate | None:
    """The gate of a root, whose state is the first, in its first forward; None if there is one rank, or ranks are simulated."""
    groups = [group for state in states for group in state.groups]
    log, roll_call = _call_log_of(states[0], groups), roll_call_of(states[0].modules, states)
    note_root(states[0].modules)
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
        self._settings = weakref.WeakMethod(self.settings)

    def start(self) -> None:
        # Hooks run in the middle of backward, on all ranks or on none.
        hooked = [group.fqn or "root" for state in self._states for group in state.groups if group.has_hooks]
        self.log.start(f" with hooks on gradients of {', '.join(hooked)}" if hooked else "")
        tracker.settings = self._settings

    def settings(self) -> dict[str, str]:
        """What the collectives of forward and backward depend on, and must be equal on all ranks; for errors."""
        return {f"{name} of {self.log.root}": _majority_of(self._states, value) for name, value in _SETTINGS.items()}

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

    def forward_raised(self) -> None:
        pass  # The next forward's calls are compared anew.


class OptionalGate(RootGate):
    """The same, and ranks that skip an optional module take part in its calls.

    A vote precedes each event of an optional module, the pre-forward of each other module, and the end of the root's forward.
    """

    def __init__(self, states: Sequence[FSDPState], log: CallLog, roll_call: RollCall) -> None:
        super().__init__(states, log)
        self._roll_call, self._has_raised = roll_call, False
        # Modules that other ranks have called, and not left: this rank has unsharded them for its part.
        self._joined: list[FSDPState] = []

    def start(self) -> None:
        # The last forward has raised on this rank before its last vote. A rank that had called an optional module there waits
        # for this vote, and would take a vote of the new forward for it. If the error was the same on all ranks, each of them
        # votes here, and no module is called.
        if self._has_raised:
            self._has_raised = False
            self._meet(None)
        super().start()

    def forward_raised(self) -> None:
        self._has_raised = True

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

        The event is that the call of an optional module begins, or ends if ``is_exit``; None: when no rank has one. What is
        returned is what :meth:`RollCall.agree` says of it.
        """
        event = None if state is None else (state, is_exit)
        self.before_collective()  # A vote is a collective, too: ranks make sure that they run the same root.
        while True:
            agreed, needs = self._roll_call.agree(event, stays_unsharded)
            if agreed is None:  # No rank is in a call that this one has joined: one that was not left has raised there.
                while self._joined:
                    left = self._joined.pop()
                    left.leave_call(left.modules[0], needs_backward=False, must_stay=False)
            if agreed is None or agreed == event:
                return needs
            other, ends = agreed
            if ends:
                if other in self._joined:
                    self._joined.remove(other)
                other.leave_call(other.modules[0], *needs)
            else:
                self._joined.append(other)
                other.enter_call(other.context, needs[0])


def _majority_of(states: Sequence[FSDPState], value: Callable[[FSDPState], object]) -> str:
    """The value of all ``states``; if they differ, that of most of them, and then the others by name."""
    names: dict[str, list[str]] = {}
    for state in states:
        names.setdefault(str(value(state)), []).append(state.fqn)
    most, *others = sorted(names, key=lambda text: -len(names[text]))
    return most + "".join([f" ({text} for {', '.join(names[text])})" for text in others])


_SETTINGS: dict[str, Callable[[FSDPState], object]] = {
    "set_requires_gradient_sync": lambda state: state.requires_gradient_sync,
    "set_requires_all_reduce": lambda state: all(group.settings.requires_all_reduce for group in state.groups),
    "set_is_last_backward": lambda state: not state.is_root or state.is_last_backward,
    "set_reshard_after_forward": lambda state: bool(state.reshard_after_forward),
    "set_reshard_after_backward": lambda state: state.reshard_after_backward,
    "set_unshard_in_backward": lambda state: state.unshard_in_backward,
    "set_reduce_scatter_unused_params": lambda state: state.reduces_unused,
    "set_max_all_gathers_ahead": lambda state: state.comm.max_gathers,
    "set_modules_to_forward_prefetch": lambda state: _fqns(state.forward_prefetch),
    "set_modules_to_backward_prefetch": lambda state: _fqns(state.backward_prefetch),
    "parameters with requires_grad": lambda state: sum(
        param.sharded.requires_grad for group in state.groups for param in group.params
    ),
}


def _fqns(states: Sequence[FSDPState] | None) -> list[str] | None:
    return None if states is None else [state.fqn for state in states]


def _call_log_of(root: FSDPState, groups: Sequence[FSDPParamGroup]) -> CallLog | None:
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
    name = f"{type(root.modules[0]).__name__} with {group.names} in group {group.named.number}"
    return CallLog(sorted(group.dp.mesh.mesh.flatten().tolist()), timeout_of(shard_group, device_of(group.dp.mesh)), name)


class RollCall:
    """The pre-forward and post-forward events of optional modules: ranks agree which of them runs next on any rank.

    ::

        rank 0 (images)  tower pre-forward   tower post-forward   layer pre-forward
        rank 1 (text)    layer pre-forward   layer pre-forward    layer pre-forward
        agreed           tower pre-forward   tower post-forward   layer pre-forward
                         rank 1 takes part   rank 1 reshards      both unshard the layer

    The event that comes first in the tree of modules is next. A rank with another event takes part in it, and asks again.
    ``events``: of each optional module its pre-forward, those inside it, its post-forward. ``groups`` connect all ranks.
    """

    def __init__(self, events: Sequence[OptionalEvent], groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
        self._events, self._groups, self._device = list(events), list(groups), device
        self._index = {event: index for index, event in enumerate(self._events)}

    def agree(
        self, event: OptionalEvent | None, stays_unsharded: bool = False
    ) -> tuple[OptionalEvent | None, tuple[bool, bool]]:
        """The event that is next, and whether gradients are enabled, and the module stays unsharded, on any rank that has it.

        One all-reduce of 16 bytes per process group, for which the host waits. ``event`` is the rank's own; None: that of a
        module that is not optional, which is after those of all others. ``stays_unsharded``: this rank must not reshard there.
        """
        own = len(self._events) if event is None else self._index[event]
        # MIN picks the earliest event. Its last bit is 0 if any rank at that event needs it, so MIN is the OR of needs, too.
        votes = [2 * own + (not needed) for needed in (torch.is_grad_enabled(), stays_unsharded)]
        # On the device of the backend. The host reads it, and so waits for all ranks: that is the price of an optional module.
        vote = torch.tensor(votes, device=self._device)
        for group in self._groups:
            # One after the other: what the first group has found reaches ranks that only share the second one.
            reduce_min(vote, group, "the call of an optional module")
        grad, stays = vote.tolist()
        agreed = grad // 2
        return (None if agreed == len(self._events) else self._events[agreed]), (grad % 2 == 0, stays % 2 == 0)


def roll_call_of(modules: Sequence[nn.Module], states: Sequence[FSDPState]) -> RollCall | None:
    """The roll call of the optional modules inside ``modules``, the root's; None if there are none."""
    by_module = {module: state for state in states for module in state.modules}
    events: list[OptionalEvent] = []
    seen: set[nn.Module] = set()

    def visit(module: nn.Module, is_optional: bool) -> None:
        if module in seen:
            return
        # A module that is used twice has one position, so that the order is the same on all ranks.
        seen.add(module)
        state = by_module.get(module)
        is_optional |= state is not None and state.is_optional
        if state is not None and is_optional:
            # Each event is of one module: a list would begin several times and end once.
            if len(state.modules) > 1:
                names = ", ".join(type(each).__name__ for each in state.modules)
                raise ValueError(f"the modules {names} are inside an optional module and have one group: shard them one by one")
            state.is_optional = True  # Also that of a module inside an optional one.
            events.append((state, False))
        for child in module.children():
            visit(child, is_optional)
        if state is not None and is_optional:
            # After those inside it, which end before.
            events.append((state, True))

    if states[0].is_optional:
        raise ValueError(
            "the root, whose forward runs first, cannot be optional: all ranks must call it. Mark the modules inside it that a "
            "rank may skip"
        )
    for module in modules:
        visit(module, False)
    if not events:
        return None
    groups = [group for state in states for group in state.groups]
    pairs = [(group.dp.shard_group, group.dp.replicate_group) for group in groups]
    # Each process group once. They are equal on all ranks, in an order that they share.
    connecting = list(dict.fromkeys(each for pair in pairs for each in pair if each is not None))
    return RollCall(events, connecting, device_of(groups[0].dp.mesh))
