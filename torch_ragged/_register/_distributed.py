"""The hook on ``torch/distributed/distributed_c10d.py``: names of process groups that only their members create."""

from __future__ import annotations

from typing import Any

from torch.distributed import distributed_c10d

from torch_ragged._ranks.groups import group_name
from torch_ragged._register._hook import PLACEMENT, has, hook


@hook(
    "distributed_c10d._process_group_name",
    "members of a group must give it the same name, even if they are in different numbers of groups",
    PLACEMENT,
    lambda: has(distributed_c10d._process_group_name, "ranks", "use_hashed_name"),
)
def _install_group_name() -> None:
    original: Any = distributed_c10d._process_group_name

    def _process_group_name(ranks, use_hashed_name):  # type: ignore[no-untyped-def]
        return group_name.get() or original(ranks, use_hashed_name)

    distributed_c10d._process_group_name = _process_group_name
