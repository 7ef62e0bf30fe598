"""Part 1: training steps of real widths on one GPU, as one rank of 8 to 256, without a network: this package beside FSDP2.

Collectives return at once, so that what is timed is compute, the copies around collectives and the host. A stack of a few
layers of Llama-3-70B or GPT-OSS-120B (common/models.py: every weight in one matmul; 256 tokens go through all experts, as
8,192 tokens through 4 of 128), float32 masters, bfloat16 compute and gradients reduced in --reduce-dtype, AdamW. The packages
take turns, --turns times; a step's time is the median. Its host time ends when the last kernel is launched. Copies are kernels
of ops that move data without changing its type, in one traced step; those of activations are in both packages' numbers.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from benchmarks.common.fake_world import PACKAGES, fake_world
from benchmarks.common.measure import print_table
from benchmarks.common.models import Stack, shard
from benchmarks.common.tracker import CollectiveLog
from benchmarks.gpu.gpu_common import GIB, Deadline, Timer, finish, initialize, options_of, parser, stack
from benchmarks.gpu.gpu_trace import traced

LAYERS = {"llama-3-70b": 4, "gpt-oss-120b": 3}
WORLDS = (128, 256, 8, 64)
"""The worlds that matter most first: time may run out."""


class Training:
    """One package's model on one of many ranks, with its optimizer."""

    def __init__(self, name: str, package: str, ranks: int, options: argparse.Namespace) -> None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=getattr(torch, options.reduce_dtype))
        mesh = init_device_mesh(options.device, (ranks,))
        self.model: Stack = stack(name, 2 if options.smoke else LAYERS[name], options.smoke, device="meta", dtype=torch.float32)
        shard(self.model, PACKAGES[package], mesh=mesh, mp_policy=policy)
        self.model.to_empty(device=options.device)
        initialize(self.model)
        if package == "torch_ragged" and options.persistent:
            self.model.set_persistent_buffers()  # type: ignore[operator]
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self._tokens = torch.arange(options.tokens, device=options.device)
        self.host_ms: list[float] = []

    def step(self) -> None:
        begin = time.perf_counter()
        self.model(self._tokens).sum().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.host_ms.append(1e3 * (time.perf_counter() - begin))


def measure(name: str, package: str, ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """One turn of one package: a row of numbers."""
    is_gpu = options.device == "cuda"
    log = CollectiveLog()
    with fake_world(ranks), log.installed():
        training = Training(name, package, ranks, options)
        for _ in range(3):
            training.step()
        log.clear()
        if is_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        training.host_ms.clear()
        row: dict[str, Any] = {"ms": Timer(options.device).median(training.step, 1 if options.smoke else 6, warmup=0)}
        row["host ms"] = statistics.median(training.host_ms)
        steps = max(1, log.calls["reduce_scatter"] // (len(training.model.blocks) + 2))
        row |= {
            "gathered GiB": log.nbytes["all_gather"] / steps / GIB,
            "reduced GiB": log.nbytes["reduce_scatter"] / steps / GIB,
        }
        if is_gpu:
            stats = torch.cuda.memory_stats()
            row |= {
                "allocated GiB": torch.cuda.max_memory_allocated() / GIB,
                "reserved GiB": torch.cuda.max_memory_reserved() / GIB,
                "retries": stats["num_alloc_retries"],
            }
            trace = traced(training.step)
            row |= {"copies ms": sum(trace.copy_ms.values()), "casts ms": trace.cast_ms, "launches": trace.launches}
            row["copies"] = dict(trace.copy_ms)
        del training
    return row


def turn(name: str, package: str, ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """:func:`measure`, with what it raises as the row: one package's OutOfMemoryError is a result of its own."""
    try:
        return measure(name, package, ranks, options)
    except torch.OutOfMemoryError as error:
        return {"error": f"out of memory: {str(error).splitlines()[0]}"}
    finally:
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_accumulated_memory_stats()


def combined(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The turns of one package as one row: the median time, the highest memory."""
    failed = [row for row in rows if "error" in row]
    if failed:
        return failed[0]
    last = dict(rows[-1])
    for key in ("ms", "host ms"):
        last[key] = statistics.median(row[key] for row in rows)
    for key in ("allocated GiB", "reserved GiB", "retries"):
        if key in last:
            last[key] = max(row[key] for row in rows)
    return last


def compare(name: str, ranks: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Both packages by turns: a row each, and their ratio."""
    turns: dict[str, list[dict[str, Any]]] = {package: [] for package in PACKAGES}
    for index in range(options.turns):
        for package in list(PACKAGES)[:: 1 if index % 2 == 0 else -1]:
            turns[package].append(turn(name, package, ranks, options))
    rows = [{"model": name, "ranks": ranks, "package": package, **combined(mine)} for package, mine in turns.items()]
    ours, theirs = rows
    for key in ("ms", "host ms", "allocated GiB", "reserved GiB", "gathered GiB"):
        if key in ours and key in theirs:
            ours[f"{key.removesuffix(' GiB')} / FSDP2"] = ours[key] / theirs[key]
    return rows


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--tokens", type=int, default=256)
    command.add_argument("--turns", type=int, default=2)
    command.add_argument("--reduce-dtype", choices=("float32", "bfloat16"), default="bfloat16")
    command.add_argument("--models", nargs="+", choices=LAYERS, default=["gpt-oss-120b", "llama-3-70b"])
    command.add_argument("--ranks", nargs="+", type=int, default=list(WORLDS))
    command.add_argument("--persistent", action="store_true", help="this package with set_persistent_buffers()")
    options = options_of(command)
    if options.smoke:
        options.tokens, options.turns = 8, 1
    deadline, found = Deadline(options.budget), []
    for ranks in options.ranks:
        for name in options.models:
            if deadline.left(f"{name} on {ranks} ranks"):
                rows = compare(name, ranks, options)
                found += rows
                _print(rows)
                finish(options.json, {"rows": found, "skipped": deadline.skipped})
    finish(options.json, {"rows": found, "skipped": deadline.skipped})


def _print(rows: list[dict[str, Any]]) -> None:
    keys = list(dict.fromkeys(key for row in rows for key in row if key not in ("model", "ranks", "copies")))
    title = f"{rows[0]['model']}, rank 0 of {rows[0]['ranks']}, no network"
    print_table(title, [{key: row.get(key, "") for key in keys} for row in rows])


if __name__ == "__main__":
    main()
