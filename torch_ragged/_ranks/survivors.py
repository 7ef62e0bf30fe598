"""Which ranks are left after a death: a decision that all of them share. It moves no tensor, and makes no process group."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from torch_ragged._ranks.groups import end_messages, is_gloo
from torch_ragged._ranks.peers import fates_of
from torch_ragged._ranks.store import SharedStore
from torch_ragged._register._torch import process_groups

__all__ = ["LeftBehind", "agree_on_survivors"]

_HOST_DEVICE = torch.device("cpu")
_REPORT_SLICE = 0.5  # Seconds. After so long a wait for reports, a rank looks which processes have ended.


class LeftBehind(RuntimeError):
    """This rank reported too late: the others have gone on without it."""


def agree_on_survivors(
    ranks: Sequence[int],
    name: str,
    groups: Sequence[dist.ProcessGroup],
    device: torch.device,
    patience: float,
    gone: Callable[[int], bool] = lambda rank: False,
) -> tuple[int, ...]:
    """The ranks of ``ranks`` that are left, equal on all of them. All that live call it, with one ``name`` for each death.

    Ranks report to the store of the default group. The call returns when each rank has reported, or its process has ended, or
    ``patience`` seconds have passed. It ends all that is in flight here on ``groups``, and over gloo on all groups with a dead
    rank: so ranks that wait there get an error, and call this too. ``gone`` tells of a rank that lives, and will not report.

    Raises:
        LeftBehind: this rank reported too late, and the others have gone on without it.
    """
    own = dist.get_rank()
    for group in groups:
        end_messages(group, device)
    store = SharedStore(name)
    deadline = time.monotonic() + patience
    keys = {rank: f"rank {rank}" for rank in ranks}
    store.set(keys[own], "")
    dead: set[int] = set()
    while True:
        missing = {rank for rank, key in keys.items() if not store.has(key)}
        ended = {rank for rank, fate in fates_of(sorted(missing)).items() if not fate.is_alive or gone(rank)}
        # Groups with them can never be used again. Ranks that wait there for this one get an error.
        for group in process_groups() if ended - dead else ():
            if (ended - dead) & set(dist.get_process_group_ranks(group)) and is_gloo(group, _HOST_DEVICE):
                end_messages(group, _HOST_DEVICE)
        dead |= ended
        if missing <= dead or time.monotonic() > deadline:
            break
        store.wait([keys[rank] for rank in missing - dead], min(_REPORT_SLICE, patience))
    # The first to be done decides for all.
    found = " ".join(str(rank) for rank in ranks if rank not in missing)
    left = tuple(int(rank) for rank in store.first("left", found).split())
    if own not in left:
        raise LeftBehind(f"rank {own} has reported too late: ranks {list(left)} have gone on without it")
    return left
