"""The step model against measured steps: gloo worlds of 1, 2, 4 and 8 ranks on this machine.

In each world these are measured by all ranks at once, in rounds that take every one in turn: forward and backward of a stack
of plain blocks, from which the time of one block comes; all-gathers and reduce-scatters of several sizes, to which a line is
fitted (alpha + bytes * beta); the all-reduce that ends a step; and the step of the sharded stack. The Python time is that
of groups that compute and communicate nothing. From all but the step itself the model predicts the step.

Ranks and gloo's threads share the cores, with other programs too. With as many ranks as free cores, or more, what a
collective needs is taken from compute: nothing is gained by overlap, and the prediction is the schedule with everything in
turn. With fewer ranks it is the schedule with overlap. Both are shown. Free are the cores less the load when this begins.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.common.measure import print_table
from benchmarks.common.models import Block
from benchmarks.common.tracker import CollectiveLog
from benchmarks.parts.python_time import stepper
from benchmarks.predict.step_model import RAGGED, GroupCost, play
from torch_ragged.fsdp import fully_shard
from torch_ragged.fsdp.comm._collectives import ProcessGroupCollectives
from torch_ragged.fsdp.comm._reduction import Reduction
from torch_ragged.offline import Parameter

WORLDS = (1, 2, 4, 8)
WIDTH, HIDDEN, BLOCKS, TOKENS = 512, 2048, 6, 64
BLOCK = [Parameter("norm", (WIDTH,)), Parameter("up", (HIDDEN, WIDTH)), Parameter("down", (WIDTH, HIDDEN))]
NUMEL = WIDTH + 2 * HIDDEN * WIDTH
IDLE_GROUPS = 8
ROUNDS = 7


def in_rounds(functions: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Seconds of each function, called by all ranks at once: the median of this rank's rounds, the mean over ranks."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(ROUNDS + 1):
        for name, function in functions.items():
            dist.barrier()
            start = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - start)
    medians = torch.tensor([statistics.median(found[1:]) for found in times.values()], dtype=torch.float64)
    dist.all_reduce(medians)
    return dict(zip(times, (medians / dist.get_world_size()).tolist()))


def fit(sizes: list[int], times: list[float]) -> tuple[float, float]:
    """Least squares: (seconds, seconds per byte)."""
    mean_size, mean_time = statistics.mean(sizes), statistics.mean(times)
    spread = sum((size - mean_size) ** 2 for size in sizes)
    beta = sum((size - mean_size) * (t - mean_time) for size, t in zip(sizes, times)) / spread
    return mean_time - beta * mean_size, beta


def stack() -> nn.Sequential:
    """The blocks, with values that keep gradients finite."""
    model = nn.Sequential(*(Block(BLOCK, WIDTH) for _ in range(BLOCKS)))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    return model


def compute(model: nn.Module, backward: bool = True) -> Callable[[], None]:
    """A forward of ``model``, with or without a backward."""
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)

    def step() -> None:
        model.zero_grad()
        output = model(x).sum()
        if backward:
            output.backward()

    return step


def collectives_of(ranks: int) -> dict[str, Callable[[], Any]]:
    """All-gathers and reduce-scatters by the elements of the whole buffer, and the all-reduce that ends a step.

    What is gathered goes into memory that was not touched before, as a group's does.
    """
    group = ProcessGroupCollectives(dist.group.WORLD)
    flags = torch.zeros(len(BLOCK) * BLOCKS, dtype=torch.uint8)
    found: dict[str, Callable[[], Any]] = {"agreement": lambda: group.all_reduce_max(flags).wait()}
    for numel in sizes_of(ranks):
        shard, buffer = torch.zeros(numel // ranks), torch.zeros(numel)
        found[f"gather {numel}"] = lambda n=numel, shard=shard: group.all_gather(torch.empty(n), shard).wait()
        found[f"reduce {numel}"] = lambda shard=shard, buffer=buffer: group.reduce_scatter(
            torch.empty_like(shard), buffer, Reduction()
        ).wait()
    return found


def sizes_of(ranks: int) -> list[int]:
    return [ranks * (NUMEL * halves // 2 // ranks) for halves in (1, 2, 3)]


def measure_python(mesh: Any) -> float:
    """Seconds per group and step of groups that compute and communicate nothing."""
    with CollectiveLog().installed():
        steps, times = (stepper(fully_shard, IDLE_GROUPS, mesh=mesh), stepper(None, IDLE_GROUPS)), []
        for step in steps:
            step()
            start = time.perf_counter()
            for _ in range(5):
                step()
            times.append((time.perf_counter() - start) / 5)
    return max(0.0, times[0] - times[1]) / IDLE_GROUPS


def worker(rank: int, ranks: int, folder: str) -> None:
    """One rank of one world; the first writes what was found."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
    mesh = init_device_mesh("cpu", (ranks,))
    plain, sharded = stack(), stack()
    for module in (*sharded, sharded):
        fully_shard(module, mesh=mesh)
    functions = {"forward": compute(plain, backward=False), "both": compute(plain), "step": compute(sharded)}
    times = in_rounds({**functions, **collectives_of(ranks)})
    found: dict[str, Any] = {name: times[name] for name in ("step", "agreement")}
    found["forward"], found["backward"] = times["forward"] / BLOCKS, (times["both"] - times["forward"]) / BLOCKS
    sizes = sizes_of(ranks)
    for kind in ("gather", "reduce"):
        found[kind] = fit([4 * numel for numel in sizes], [times[f"{kind} {numel}"] for numel in sizes])
    found["host"] = measure_python(mesh)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def predict(found: dict[str, Any], overlaps: bool) -> float:
    """Seconds of the step, from what was measured in its world."""
    gather, reduce = (alpha + 4 * NUMEL * beta for alpha, beta in (found["gather"], found["reduce"]))
    group = GroupCost(found["forward"], found["backward"], max(0.0, gather), max(0.0, reduce))
    schedule = dataclasses.replace(
        RAGGED, overlaps=overlaps, agreement=found["agreement"], host=found["host"] / 2, runs_ahead=False
    )
    return play([group] * BLOCKS, schedule).seconds


def check(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row per world."""
    cores, load, rows = len(os.sched_getaffinity(0)), os.getloadavg()[0], []
    for ranks in WORLDS:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(worker, (ranks, folder), ranks)
            found = json.loads(Path(folder, "found.json").read_text())
        with_overlap, without = predict(found, True), predict(found, False)
        predicted = with_overlap if ranks < cores - load else without
        row: dict[str, Any] = {"ranks": ranks}
        row |= {f"{name} ms": 1e3 * found[name] for name in ("forward", "backward", "host")}
        for name in ("gather", "reduce"):
            alpha, beta = found[name]
            row |= {f"{name} alpha ms": 1e3 * alpha, f"{name} GB/s": 1e-9 / beta if beta > 0 else float("inf")}
        row |= {"overlapped ms": 1e3 * with_overlap, "in turn ms": 1e3 * without}
        row |= {"predicted ms": 1e3 * predicted, "measured ms": 1e3 * found["step"]}
        rows.append(row | {"measured / predicted": found["step"] / predicted})
    print_table(
        f"step model against measured steps: gloo, {cores} cores, load {load:.1f}, {BLOCKS} blocks of {NUMEL:,} float32 "
        f"parameters, {TOKENS} tokens per rank.\nforward, backward, host: of one block, in that world; alpha and GB/s: fitted, "
        "by the bytes of the whole buffer;\npredicted: overlapped with fewer ranks than free cores, else in turn",
        rows,
    )
    return rows
