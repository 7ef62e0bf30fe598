"""The step model against measured steps: gloo worlds of 1, 2, 4 and 8 ranks on this machine.

In each world, and by all of its ranks at once, these are measured: forward and backward of one block; all-gathers and
reduce-scatters of several sizes, to which a line is fitted (alpha + bytes * beta); the Python time of groups that compute
nothing; the all-reduce that ends a step. From these, and the number of blocks, the model predicts the step. Then the step
of the whole stack is measured.

Ranks and gloo's threads share the cores, so that collectives beside compute take longer than alone. How much of a collective
is hidden is measured too, on one all-gather and one forward: the prediction lies so far between the schedule in which
everything runs in turn and the one in which collectives cost compute nothing. Both are shown.
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
from common import print_table
from models import Block
from python_time import stepper
from step_model import RAGGED, GroupCost, play
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from tracker import CollectiveLog

from torch_ragged.fsdp import fully_shard
from torch_ragged.fsdp._collectives import ProcessGroupCollectives, Reduction
from torch_ragged.fsdp.plan import Parameter

WORLDS = (1, 2, 4, 8)
WIDTH, HIDDEN, BLOCKS, TOKENS = 512, 2048, 6, 64
BLOCK = [Parameter("norm", (WIDTH,)), Parameter("up", (HIDDEN, WIDTH)), Parameter("down", (WIDTH, HIDDEN))]
NUMEL = WIDTH + 2 * HIDDEN * WIDTH
IDLE_GROUPS = 8


def seconds(function: Callable[[], Any], repetitions: int = 7) -> float:
    """Wall time of ``function``, called by all ranks at once: the median of this rank's, the mean over ranks."""
    times = []
    for _ in range(repetitions + 1):
        dist.barrier()
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    median = torch.tensor(statistics.median(times[1:]), dtype=torch.float64)
    dist.all_reduce(median)
    return median.item() / dist.get_world_size()


def fit(sizes: list[int], times: list[float]) -> tuple[float, float]:
    """Least squares: (seconds, seconds per byte)."""
    mean_size, mean_time = statistics.mean(sizes), statistics.mean(times)
    spread = sum((size - mean_size) ** 2 for size in sizes)
    beta = sum((size - mean_size) * (t - mean_time) for size, t in zip(sizes, times)) / spread
    return mean_time - beta * mean_size, beta


def measure_layer() -> tuple[float, float]:
    """Seconds of forward and of backward of one plain block."""
    block = Block(BLOCK, WIDTH)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.02)
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    forward = seconds(lambda: block(x))

    def both() -> None:
        block.zero_grad()
        block(x).sum().backward()

    return forward, max(0.0, seconds(both) - forward)


def measure_collectives(ranks: int) -> tuple[tuple[float, float], tuple[float, float], float]:
    """(alpha, beta) of an all-gather and of a reduce-scatter, by the bytes of the whole buffer; seconds of a small all-reduce.

    Into memory that was not touched before, as a group's is.
    """
    collectives = ProcessGroupCollectives(dist.group.WORLD)
    sizes = [ranks * (NUMEL * quarters // 4 // ranks) for quarters in (1, 2, 4, 6)]
    gathers, reductions = [], []
    for numel in sizes:
        shard, buffer = torch.zeros(numel // ranks), torch.zeros(numel)
        gathers.append(seconds(lambda: collectives.all_gather(torch.empty(numel), shard).wait()))
        reductions.append(seconds(lambda: collectives.reduce_scatter(torch.empty_like(shard), buffer, Reduction()).wait()))
    nbytes = [4 * size for size in sizes]
    flags = torch.zeros(len(BLOCK) * BLOCKS, dtype=torch.uint8)
    return fit(nbytes, gathers), fit(nbytes, reductions), seconds(lambda: collectives.all_reduce_max(flags).wait())


def measure_hidden() -> float:
    """How much of an all-gather a forward of a block hides, or the other way round: 0 to 1, of what could be hidden."""
    ranks = dist.get_world_size()
    collectives, numel = ProcessGroupCollectives(dist.group.WORLD), ranks * (NUMEL // ranks)
    block, shard, x = Block(BLOCK, WIDTH), torch.zeros(numel // ranks), torch.randn(TOKENS, WIDTH)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.02)

    def beside() -> None:
        work = collectives.all_gather(torch.empty(numel), shard)
        block(x)
        work.wait()

    def in_turn() -> None:
        collectives.all_gather(torch.empty(numel), shard).wait()
        block(x)

    least, both, together = seconds(lambda: block(x)), seconds(in_turn), seconds(beside)
    return min(1.0, max(0.0, (both - together) / min(least, both - least))) if both > least else 0.0


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


def measure_step(mesh: Any) -> float:
    """Seconds of a forward and backward of the sharded stack."""
    model = nn.Sequential(*(Block(BLOCK, WIDTH) for _ in range(BLOCKS)))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)

    def step() -> None:
        model.zero_grad()
        model(x).sum().backward()

    return seconds(step)


def worker(rank: int, ranks: int, folder: str) -> None:
    """One rank of one world; the first writes what was found."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
    mesh = init_device_mesh("cpu", (ranks,))
    forward, backward = measure_layer()
    gather, reduction, agreement = measure_collectives(ranks)
    found = {"forward": forward, "backward": backward, "gather": gather, "reduce": reduction, "agreement": agreement}
    found["hidden"] = measure_hidden()
    found["host"] = measure_python(mesh)
    found["step"] = measure_step(mesh)
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
    cores, rows = len(os.sched_getaffinity(0)), []
    for ranks in WORLDS:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(worker, (ranks, folder), ranks)
            found = json.loads(Path(folder, "found.json").read_text())
        with_overlap, without = predict(found, True), predict(found, False)
        predicted = found["hidden"] * with_overlap + (1 - found["hidden"]) * without
        row: dict[str, Any] = {"ranks": ranks}
        row |= {f"{name} ms": 1e3 * found[name] for name in ("forward", "backward", "host")}
        for name in ("gather", "reduce"):
            alpha, beta = found[name]
            row |= {f"{name} alpha ms": 1e3 * alpha, f"{name} GB/s": 1e-9 / beta if beta > 0 else float("inf")}
        row |= {"hidden %": 100 * found["hidden"], "overlapped ms": 1e3 * with_overlap, "in turn ms": 1e3 * without}
        row |= {"predicted ms": 1e3 * predicted, "measured ms": 1e3 * found["step"]}
        rows.append(row | {"measured / predicted": found["step"] / predicted})
    print_table(
        f"step model against measured steps: gloo, {cores} cores, {BLOCKS} blocks of {NUMEL:,} float32 parameters, {TOKENS} "
        "tokens per rank.\nforward, backward, host: of one block, in that world; alpha and GB/s: fitted, by the bytes of the "
        "whole buffer;\nhidden: of a collective beside compute; predicted: so far between in turn and overlapped",
        rows,
    )
    return rows
