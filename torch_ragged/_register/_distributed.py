"""Hooks on ``torch/distributed/distributed_c10d.py``: names of process groups that only their members create, and their end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed import distributed_c10d

from torch_ragged._ranks.groups import group_name
from torch_ragged._register._hook import CHECKPOINT, PLACEMENT, Hook, extend_in_place, has, hook, hooks

__all__ = ["before_groups_end"]


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


hooks.append(
    Hook(
        "distributed_c10d.destroy_process_group, after torch_ragged.checkpoint.async_save",
        "it first waits for the save in the background, which uses a process group",
        CHECKPOINT,
        lambda: has(distributed_c10d.destroy_process_group, "group"),
        install=None,  # ``before_groups_end`` does it.
    )
)


def before_groups_end(call: Callable[[], None]) -> None:
    """From now on, ``dist.destroy_process_group`` first calls ``call``."""

    def make(original: Callable[..., None]) -> Callable[..., None]:
        def destroy_process_group(group: Any) -> None:
            call()
            original(group)

        return destroy_process_group

    extend_in_place(distributed_c10d.destroy_process_group, "True", make)
