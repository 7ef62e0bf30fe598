"""Part 2: collectives on one GPU: NCCL with one rank, and several ranks that copy to each other over symmetric memory.

Symmetric memory lets ranks share a device where TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1; NCCL does not, so these ranks have
gloo beside it. GB/s are bytes that a rank gets per second (its own part not counted), beside a copy in the same process. All
ranks share one memory here: what NVLink brings is not measured. On the CPU: shared memory beside gloo.
"""

from __future__ import annotations

import argparse
import os
import queue
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from benchmarks.common.measure import print_table
from benchmarks.common.models import shard
from benchmarks.gpu.gpu_common import Deadline, Timer, finish, initialize, options_of, parser, stack
from torch_ragged.fsdp import fully_shard
from torch_ragged.fsdp._fully_shard import named_groups
from torch_ragged.fsdp.comm._reduction import Reduction


def sharded(options: argparse.Namespace, collectives: str | None) -> tuple[Any, tuple[str, ...]]:
    """A small model in bfloat16 on all ranks, and what collectives they have agreed on."""
    torch.manual_seed(0)
    mesh = init_device_mesh(options.device, (dist.get_world_size(),))
    model = stack("llama-3-70b", 1, True, device=options.device)
    initialize(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard(model, fully_shard, mesh=mesh, mp_policy=policy)
    return model, () if collectives is None else model.set_collectives(collectives)


def losses(model: Any, options: argparse.Namespace, steps: int = 4) -> list[float]:
    """Of a few steps of AdamW, on other tokens on each rank."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = (torch.arange(16, device=options.device) + dist.get_rank()) % 16
    found = []
    for _ in range(steps):
        loss = model(tokens).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def bandwidth(collectives: Any, nbytes: int, options: argparse.Namespace) -> dict[str, float]:
    """GB/s of an all-gather and a reduce-scatter of a buffer of ``nbytes``, float32; the results are checked."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    numel = nbytes // (4 * ranks)
    buffer = torch.empty(ranks * numel, device=options.device)
    shard_ = torch.full((numel,), float(rank), device=options.device)
    output = torch.empty_like(shard_)
    timer, repetitions = Timer(options.device), 2 if options.smoke else 10
    gather = timer.median(lambda: collectives.all_gather(buffer, shard_).wait(), repetitions)
    expected = torch.arange(float(ranks), device=options.device).repeat_interleave(numel)
    assert torch.equal(buffer, expected), "an all-gather brought something else"
    reduce = timer.median(lambda: collectives.reduce_scatter(output, buffer, Reduction(divisor=1.0)).wait(), repetitions)
    assert torch.equal(output, torch.full_like(output, float(ranks * rank))), "a reduce-scatter brought something else"
    copy = timer.median(lambda: buffer.copy_(expected), repetitions)
    moved = (ranks - 1) * numel * 4 if ranks > 1 else numel * 4
    return {
        "MB": nbytes / 1e6,
        "all-gather GB/s": moved / gather / 1e6,
        "reduce-scatter GB/s": moved / reduce / 1e6,
        "device copy GB/s": 2 * buffer.nbytes / copy / 1e6,
    }


def run_rank(rank: int, ranks: int, backend: str, store: str, options: argparse.Namespace, results: Any) -> None:
    """Each implementation on ``ranks`` ranks: its losses beside the first's, and its bandwidth."""
    torch.set_num_threads(1)
    if options.device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(backend, store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    rows, expected = [], None
    for name in ("nccl", "symm", "copy_engine") if ranks == 1 else (None, "copy_engine"):
        model, chosen = sharded(options, name)
        found = losses(model, options)
        expected = expected or found
        row: dict[str, Any] = {"asked for": name or backend, "got": ", ".join(chosen) or backend, "ranks": ranks}
        # gloo adds GPUs' gradients in another order than the ranks'.
        row["loss difference"] = max(abs(a - b) / abs(b) for a, b in zip(found, expected))
        for nbytes in (1 << 16,) if options.smoke else (1 << 24, 1 << 28):
            collectives = next(iter(named_groups(model).values())).collectives
            rows.append({**row, **bandwidth(collectives, nbytes, options)})
        del model
    if rank == 0:
        results.put(rows)
    dist.barrier()
    dist.destroy_process_group()


def spawn(ranks: int, backend: str, options: argparse.Namespace, seconds: float) -> list[dict[str, Any]]:
    """Rank 0's rows, or a row with what went wrong."""
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        results = context.Queue()
        arguments = (ranks, backend, f"{folder}/store", options, results)
        processes = [context.Process(target=run_rank, args=(rank, *arguments), daemon=True) for rank in range(ranks)]
        for process in processes:
            process.start()
        rows = _first(results, processes, seconds)
        for process in processes:
            process.join(5)
            process.kill()
        codes = [process.exitcode for process in processes]
        return rows or [{"asked for": backend, "ranks": ranks, "error": f"no result in {seconds:.0f} s, exit codes {codes}"}]


def _first(results: Any, processes: list[Any], seconds: float) -> list[dict[str, Any]]:
    """What comes first; nothing once a process has failed, or time is up."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not any(process.exitcode for process in processes):
        try:
            return results.get(timeout=0.5)
        except queue.Empty:
            pass
    return []


def main() -> None:
    options = options_of(parser(__doc__))
    os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    deadline, rows = Deadline(options.budget), []
    single = "nccl" if options.device == "cuda" else "gloo"
    for ranks, backend in ((1, single), (2, "gloo"), *(() if options.smoke else ((4, "gloo"),))):
        if deadline.left(f"{ranks} ranks"):
            found = spawn(ranks, backend, options, min(60.0, options.budget))
            keys = list(dict.fromkeys(key for row in found for key in row))
            print_table(f"{ranks} rank(s), {backend}", [{key: row.get(key, "") for key in keys} for row in found])
            rows += found
    finish(options.json, {"rows": rows, "skipped": deadline.skipped})
    wrong = [row for row in rows if "error" in row or not row["loss difference"] < 1e-3]
    if wrong:
        raise SystemExit(f"wrong: {wrong}")


if __name__ == "__main__":
    main()
