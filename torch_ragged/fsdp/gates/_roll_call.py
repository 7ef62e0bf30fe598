"""RollCall: ranks agree on the next optional module, so that those that skip it take part in its collectives.

It calls nothing: it answers which event is next, and the gate takes part in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from torch_ragged._ranks.agreement import reduce_min
from torch_ragged._ranks.groups import device_of
from torch_ragged.fsdp.core._fsdp_state import FSDPState

__all__ = ["RollCall", "roll_call_of"]

OptionalEvent = tuple[FSDPState, bool]
"""A state and whether its call ends: its pre-forward, or its post-forward."""


class RollCall:
    """The pre-forward and post-forward events of optional modules, and which of them runs next on any rank.

    ::

        rank 0 (images)  tower pre-forward   tower post-forward   layer pre-forward
        rank 1 (text)    layer pre-forward   layer pre-forward    layer pre-forward
        agreed           tower pre-forward   tower post-forward   layer pre-forward
                         rank 1 takes part   rank 1 reshards      both unshard the layer

    Before each event of an optional module, and before the pre-forward of each other module, ranks agree on the event that
    comes first in the tree of modules. A rank with another event takes part in it, and asks again.

    Args:
        events: of each optional module: its pre-forward, the events inside it, its post-forward.
        groups: the process groups that together connect all ranks.
        device: the device of the all-reduce.
    """

    def __init__(self, events: Sequence[OptionalEvent], groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
        self._events, self._groups, self._device = list(events), list(groups), device
        self._index = {event: index for index, event in enumerate(self._events)}

    def agree(
        self, event: OptionalEvent | None, stays_unsharded: bool = False
    ) -> tuple[OptionalEvent | None, tuple[bool, bool]]:
        """The event that is next: ``event`` itself, or that of another rank, after which this rank asks again.

        One all-reduce of 16 bytes per process group. The host waits for it.

        Args:
            event: the rank's own event; None: that of a module that is not optional, which is after those of all others.
            stays_unsharded: whether this rank must not reshard at this post-forward.

        Returns:
            the event, and whether gradients are enabled, and the module stays unsharded, on any rank that has it.
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
    """The roll call of the optional modules inside ``modules``, the root's; None if there are none.

    Modules with a state inside an optional module become optional, too.

    Args:
        states: the states under the root; the root's is the first.
    """
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
            state.is_optional = True
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
