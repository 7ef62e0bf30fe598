"""Several chunks of a tensor on one rank in safetensors files, which name each tensor once: a file for each round of them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.futures import Future

__all__ = ["rounds_of", "write_rounds"]


def rounds_of(items: list[WriteItem]) -> list[list[WriteItem]]:
    """The write items, such that no round names a tensor twice."""
    seen: Counter[str] = Counter()
    rounds: list[list[WriteItem]] = []
    for item in items:
        number = seen[item.index.fqn]
        seen[item.index.fqn] += 1
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(item)
    return rounds


def write_rounds(writer: Any, plan: SavePlan, planner: SavePlanner, rounds: list[list[WriteItem]]) -> Future[list[Any]]:
    """Have a HuggingFaceStorageWriter write each round into files of its own; the global plan says how many ranks write.

    Raises:
        ValueError: the writer saves full tensors, but there are chunks of one.
    """
    where = plan.storage_data
    if "shard_index" not in where:
        raise ValueError(
            f"{rounds[1][0].index.fqn} is sharded: make the HuggingFaceStorageWriter with save_distributed=True, or save "
            "a full state dict"
        )
    results: list[Any] = []
    for number, items in enumerate(rounds):
        storage_data = {**where, "shard_index": where["shard_index"] + number * where["shards"]}
        results += writer.write_data(dataclasses.replace(plan, items=items, storage_data=storage_data), planner).value()
    future: Future[list[Any]] = Future()
    future.set_result(results)
    return future
