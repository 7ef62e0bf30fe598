"""Write several chunks of one tensor from one rank to safetensors files.

A safetensors file must not contain a name twice, nor two tensors on the same memory, such as tied parameters. Therefore each
round, with at most one chunk per tensor and per memory, gets its own file.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.futures import Future

__all__ = ["item_rounds_of", "write_rounds"]


def item_rounds_of(plan: SavePlan, planner: SavePlanner) -> list[list[WriteItem]]:
    """Split write items into rounds, so that no round has two items of one tensor, or of one memory.

    If the writer saves full tensors, it has one file per round only, so memory is not looked at.
    """
    rounds: list[list[WriteItem]] = []
    taken: list[set[Any]] = []
    for item in plan.items:
        keys: set[Any] = {item.index.fqn}
        data = planner.resolve_data(item) if "shard_index" in plan.storage_data else None
        if isinstance(data, torch.Tensor) and data.numel():
            keys.add(data.data_ptr())
        number = next((n for n, used in enumerate(taken) if not used & keys), len(rounds))
        if number == len(rounds):
            rounds.append([])
            taken.append(set())
        rounds[number].append(item)
        taken[number] |= keys
    return rounds


def write_rounds(writer: Any, plan: SavePlan, planner: SavePlanner, rounds: list[list[WriteItem]]) -> Future[list[Any]]:
    """Make a HuggingFaceStorageWriter write each round to separate files.

    File numbers are unique over all ranks: the global plan has the number of ranks that write, ``shards``, and each round adds
    it to this rank's ``shard_index``.

    Raises:
        ValueError: the writer saves full tensors, but a tensor has several chunks.
    """
    storage_plan = plan.storage_data
    if "shard_index" not in storage_plan:
        raise ValueError(
            f"HuggingFaceStorageWriter got several chunks of {rounds[1][0].index.fqn}, which is sharded: construct it with "
            "save_distributed=True, or save a full state dict"
        )
    results: list[Any] = []
    for number, items in enumerate(rounds):
        shard_index = storage_plan["shard_index"] + number * storage_plan["shards"]
        storage_data = {**storage_plan, "shard_index": shard_index}
        results += writer.write_data(dataclasses.replace(plan, items=items, storage_data=storage_data), planner).value()
    future: Future[list[Any]] = Future()
    future.set_result(results)
    return future
