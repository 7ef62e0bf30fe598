"""What the benchmarks share: timing, tables, and a record of where the numbers come from."""

from __future__ import annotations

import argparse
import gc
import json
import os
import pickle
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_MALLOC = {
    "keeping": {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**33)},
    "default": {},
    "returning": {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_ARENA_MAX": "1"},
}


def microseconds(function: Callable[[], Any], calls: int = 1) -> float:
    """CPU time of this thread per call: what other programs on the machine do is not counted."""
    start = time.thread_time_ns()
    for _ in range(calls):
        function()
    return (time.thread_time_ns() - start) / calls / 1e3


def interleaved(
    functions: dict[str, Callable[[], Any]],
    rounds: int,
    target: float = 2000.0,
    prepare: Callable[[str], Any] = lambda name: None,
) -> dict[str, list[float]]:
    """Microseconds per call of each function, in rounds that time all of them, each round in another order.

    A timing is as many calls as take about ``target`` microseconds. ``prepare(name)`` is called before it, and is not timed.
    """
    names = list(functions)
    warm = []
    for name in (*names, *names):
        prepare(name)
        warm.append(microseconds(functions[name], 5))
    calls = max(1, round(target / max(warm[len(names) :])))
    times: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.disable()
    try:
        for turn in range(rounds):
            for index in range(len(names)):
                name = names[(turn + index) % len(names)]
                prepare(name)
                times[name].append(microseconds(functions[name], calls))
    finally:
        gc.enable()
    return times


def add_malloc(parser: argparse.ArgumentParser) -> None:
    """An option for what malloc does with memory that is freed.

    Keep it, as CUDA's caching allocator does, and as jemalloc or tcmalloc, which PyTorch's tuning guide advises for CPUs; or
    glibc's default: give large blocks back, and have the kernel clear them anew. With this default, glibc begins to keep blocks
    of up to 32 MiB when the first one is freed, and small blocks between them hold them: "returning" gives all of 1 MiB back.
    """
    parser.add_argument("--malloc", choices=tuple(_MALLOC), default="keeping", help="default: %(default)s")


def on_ranks(ranks: int, measure: Callable[[int, Any], Any], options: Any) -> Any:
    """Run ``measure(rank, options)`` in so many processes, one thread each, on a gloo group; returns what rank 0's gives.

    With ``options.malloc``, if there is such an option.
    """
    settings = _MALLOC[getattr(options, "malloc", "default")]
    # glibc reads them when a process starts.
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, settings):
        mp.spawn(_as_rank, (ranks, folder, measure, options), nprocs=ranks)
        return pickle.loads(Path(folder, "found").read_bytes())


def _as_rank(rank: int, ranks: int, folder: str, measure: Callable[[int, Any], Any], options: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks)
    found = measure(rank, options)
    if rank == 0:
        Path(folder, "found").write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def print_table(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """The rows, which have the same keys, below these."""
    lines = [
        list(rows[0]),
        *([f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()] for row in rows),
    ]
    widths = [max(map(len, column)) for column in zip(*lines)]
    print(f"\n{title}\n")
    for first, *others in lines:
        print("  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]))


def write_json(path: str | None, results: dict[str, Any]) -> None:
    """Write the results with torch's and Python's versions, the CPU and the command; nothing without a path."""
    if path is not None:
        where = {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "cpu": _cpu(),
            "command": shlex.join(sys.orig_argv),
        }
        Path(path).write_text(json.dumps({**where, **results}, indent=1) + "\n")


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())
