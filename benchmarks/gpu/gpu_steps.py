"""Part 1: training steps of transformers on one GPU, as one rank of 8 to 256, beside FSDP2: with an emulated network, and with
one that takes no time (gpu_network.py: collectives last as long as over the links of H100 servers, and move as many bytes).

The settings are those of ``rehearsal.step``, which models the same steps: real widths, flash attention, activation checkpoints,
AdamW. Both packages take turns; a step's time is the median. *Exposed* is what the network adds to a step: waiting for it, and
what its kernels take from others. Copies are kernels of ops that move data without changing its type, in one traced step; those
of activations are in both packages' numbers. On the CPU, nothing is emulated.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

from benchmarks.common.fake_world import PACKAGES, fake_world
from benchmarks.common.measure import print_table
from benchmarks.common.tracker import CollectiveLog
from benchmarks.common.transformers import SETTINGS, SHAPES, Setting, Shape, Training
from benchmarks.gpu.gpu_common import GIB, Deadline, Timer, finish, initialize, options_of, parser
from benchmarks.gpu.gpu_network import EmulatedNetwork
from benchmarks.gpu.gpu_trace import traced
from benchmarks.predict.replay import H100

CHOSEN = ("llama-3-70b, 128", "FlexShard", "gpt-oss-120b, 128", "gpt-oss-120b, 256", "torchtitan, table 1")
"""What matters most first: time may run out."""

SMOKE = Shape(layers=2, dim=128, heads=2, kv=1, head=64, hidden=256, vocabulary=512, experts=8, chosen=2)


def host_ms(step: Any, count: int) -> float:
    """Milliseconds until the host has issued a step, with nothing else in the GPU's queue; it holds about 1,024 launches.

    Without Python's garbage collector: after a trace, its next full collection takes longer than a step.
    """
    found = []
    gc.collect()
    gc.disable()
    for _ in range(count):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        found.append(1e3 * (time.perf_counter() - begin))
    gc.enable()
    return statistics.median(found)


def measure(setting: Setting, package: str, options: argparse.Namespace) -> dict[str, Any]:
    """One turn of one package: a row of numbers."""
    timer, count = Timer(options.device), options.steps
    is_gpu = options.device == "cuda"
    log = EmulatedNetwork(H100.network, setting.ranks, options.blocks) if is_gpu else CollectiveLog()
    with fake_world(setting.ranks), log.installed():
        training = Training(setting, package, init_device_mesh(options.device, (setting.ranks,)))
        initialize(training.model)
        training.tokens.random_(SHAPES[setting.model].vocabulary)
        training.rotation.copy_(torch.polar(torch.ones_like(training.rotation.real), torch.rand_like(training.rotation.real)))
        for _ in range(2):
            training.step()
        log.clear()
        if is_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        row: dict[str, Any] = {"ms": timer.median(training.step, count, warmup=1)}
        row["tokens/s"] = 1e3 * setting.batch * setting.tokens / row["ms"]
        for kind, name in (("all_gather", "gathered GiB"), ("reduce_scatter", "reduced GiB")):
            row[name] = log.nbytes[kind] / (count + 1) / GIB
        if isinstance(log, EmulatedNetwork):
            row |= _on_a_gpu(training, log, row["ms"], options)
        del training
    return row


def _on_a_gpu(training: Training, log: EmulatedNetwork, ms: float, options: argparse.Namespace) -> dict[str, Any]:
    """What the GPU knows of the steps before; and steps whose network takes no time."""
    row = {
        "collectives ms": 1e3 * log.seconds / (options.steps + 1),
        "allocated GiB": torch.cuda.max_memory_allocated() / GIB,
        "reserved GiB": torch.cuda.max_memory_reserved() / GIB,
        "retries": torch.cuda.memory_stats()["num_alloc_retries"],
    }
    if options.traces is not None:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            training.step()
        options.traces.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(options.traces / f"{len(list(options.traces.iterdir()))}.json.gz"))
    log.is_on = False
    alone = Timer("cuda").median(training.step, options.steps, warmup=1)
    trace = traced(training.step)
    row |= {"alone ms": alone, "exposed ms": ms - alone, "host ms": host_ms(training.step, 9)}
    row |= {"copies ms": sum(trace.copy_ms.values()), "casts ms": trace.cast_ms, "launches": trace.launches}
    return {**row, "copies": dict(trace.copy_ms)}


def turn(setting: Setting, package: str, options: argparse.Namespace) -> dict[str, Any]:
    """:func:`measure`, with what it raises as the row: one package's OutOfMemoryError is a result of its own."""
    try:
        return measure(setting, package, options)
    except torch.OutOfMemoryError as error:
        return {"error": f"out of memory: {str(error).splitlines()[0]}"}
    finally:
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_accumulated_memory_stats()


def combined(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The turns of one package as one row of medians; the highest memory."""
    failed = [row for row in rows if "error" in row]
    if failed:
        return failed[0]
    found = dict(rows[-1])
    for key in found:
        if key.endswith("GiB"):
            found[key] = max(row[key] for row in rows)
        elif key != "copies":
            found[key] = statistics.median(row[key] for row in rows)
    return found


def compare(name: str, setting: Setting, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Both packages by turns: a row each, and their ratio."""
    found: dict[str, list[dict[str, Any]]] = {package: [] for package in PACKAGES}
    for index in range(options.turns):
        for package in list(PACKAGES)[:: 1 if index % 2 == 0 else -1]:
            found[package].append(turn(setting, package, options))
    rows = [{"setting": name, "package": package, **combined(mine)} for package, mine in found.items()]
    ours, theirs = rows
    for key in ("ms", "alone ms", "host ms", "allocated GiB", "reserved GiB"):
        if key in ours and key in theirs:
            ours[f"{key.removesuffix(' GiB')} / FSDP2"] = ours[key] / theirs[key]
    return rows


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(CHOSEN))
    command.add_argument("--turns", type=int, default=2)
    command.add_argument("--steps", type=int, default=3, help="timed steps of a turn, with the network and without")
    command.add_argument("--blocks", type=int, default=16, help="of a collective's kernel; 0: none, as copy engines have")
    command.add_argument("--traces", type=Path, help="folder for a profiler's trace of a step of each turn, by number")
    options = options_of(command)
    if options.smoke:
        SHAPES["smoke"], options.turns = SMOKE, 1
    deadline, found = Deadline(options.budget), []
    for name in options.settings:
        setting = Setting("smoke", 8, 1, 128, SETTINGS[name].saves) if options.smoke else SETTINGS[name]
        if deadline.left(name):
            rows = compare(name, setting, options)
            found += rows
            _print(rows)
            finish(options.json, {"rows": found, "skipped": deadline.skipped})
    finish(options.json, {"rows": found, "skipped": deadline.skipped})


def _print(rows: list[dict[str, Any]]) -> None:
    keys = list(dict.fromkeys(key for row in rows for key in row if key not in ("setting", "copies")))
    title = f"{rows[0]['setting']}: rank 0"
    print_table(title, [{key: row.get(key, "") for key in keys} for row in rows])


if __name__ == "__main__":
    main()
