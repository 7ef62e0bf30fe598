"""Hook on ``torch/distributed/checkpoint/hf_storage.py``: safetensors files name each tensor once."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from typing import Any

from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.futures import Future

from torch_ragged._register._hook import CHECKPOINT, has, hook


@hook(
    "HuggingFaceStorageWriter.prepare_global_plan, write_data",
    "of several chunks of a tensor on one rank, a safetensors file would hold the last only",
    CHECKPOINT,
    lambda: (
        has(HuggingFaceStorageWriter.prepare_global_plan, "self", "plans")
        and has(HuggingFaceStorageWriter.write_data, "self", "plan", "planner")
    ),
)
def _install_hugging_face_writer() -> None:
    prepare, write = HuggingFaceStorageWriter.prepare_global_plan, HuggingFaceStorageWriter.write_data

    @functools.wraps(prepare)
    def prepare_global_plan(self, plans):  # type: ignore[no-untyped-def]
        prepared = prepare(self, plans)
        return [dataclasses.replace(p, storage_data={**p.storage_data, "shards": len(plans)}) for p in prepared]

    @functools.wraps(write)
    def write_data(self, plan, planner):  # type: ignore[no-untyped-def]
        rounds = _rounds(plan.items)
        if len(rounds) < 2:
            return write(self, plan, planner)
        where = plan.storage_data
        if "shard_index" not in where:
            raise ValueError(
                f"{rounds[1][0].index.fqn} is sharded: make the HuggingFaceStorageWriter with save_distributed=True, or save "
                "a full state dict"
            )
        results: list[Any] = []
        for number, items in enumerate(rounds):  # Each into a file of its own.
            storage_data = {**where, "shard_index": where["shard_index"] + number * where["shards"]}
            results += write(self, dataclasses.replace(plan, items=items, storage_data=storage_data), planner).value()
        future: Future[list[Any]] = Future()
        future.set_result(results)
        return future

    HuggingFaceStorageWriter.prepare_global_plan = prepare_global_plan  # type: ignore[method-assign]
    HuggingFaceStorageWriter.write_data = write_data  # type: ignore[method-assign]


def _rounds(items: list[Any]) -> list[list[Any]]:
    """The write items, such that no round names a tensor twice."""
    seen: Counter[str] = Counter()
    rounds: list[list[Any]] = []
    for item in items:
        number = seen[item.index.fqn]
        seen[item.index.fqn] += 1
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(item)
    return rounds
