"""Time of a step with SameBits, beside the same step without it.

    python -m benchmarks.step.same_bits [--json PATH] [--ranks 2] [--width 512] [--pieces 1 2 4] [--missing 0] [--cpu]

Both train one model alternately in the same processes, with clipping. ``pieces``: of each rank in a step; without SameBits,
all but the last are backward passes without gradient sync. "with": of the time without; "with subtree": each rank adds its
pieces itself; "verified": with ``verify_every``. "norm" is the part of the step in ``clip_grad_norm_``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.common.measure import add_malloc, on_ranks, print_table, write_json
from torch_ragged.fsdp import SameBits, fully_shard


def made(width: int) -> tuple[Any, torch.optim.Optimizer]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(6))
    model = nn.Sequential(*blocks)
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh), torch.optim.AdamW(model.parameters(), lr=1e-3)


def measure(rank: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    x = torch.randn(options.tokens, options.width)
    ranks, pieces = dist.get_world_size(), options.pieces
    clock = time.thread_time if options.cpu else time.perf_counter
    model, optimizer = made(options.width)

    def plain_step() -> float:
        for piece in range(pieces):
            model.set_requires_gradient_sync(piece == pieces - 1)
            (model(x).square().mean() / pieces).backward()
        start = clock()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        seconds = clock() - start
        optimizer.step()
        optimizer.zero_grad()
        return seconds

    def exact_step_of(**settings: Any) -> Callable[[], float]:
        exact, exact_optimizer = made(options.width)
        same = SameBits(exact, exact_optimizer, pieces=pieces * ranks - options.missing, **settings)

        def step() -> float:
            for _ in same.pieces():
                exact(x).square().mean().backward()
            start = clock()
            same.clip_grad_norm_(1.0)
            seconds = clock() - start
            exact_optimizer.step()
            exact_optimizer.zero_grad()
            return seconds

        return step

    steps = {"without": plain_step, "with": exact_step_of(), "verified": exact_step_of(verify_every=options.verify_every)}
    if pieces > 1:
        steps["subtree"] = exact_step_of(subtree=pieces)
    times: dict[str, list[float]] = {name: [] for name in steps}
    norms: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(options.rounds + 2):
        for name, step in steps.items():
            dist.barrier()
            start = clock()
            norm = step()
            if turn > 1:
                times[name].append(clock() - start)
                norms[name].append(norm)
    found = {name: statistics.median(each) * 1e3 for name, each in times.items()}
    return [
        {
            "ranks": ranks,
            "pieces": pieces,
            "in all": pieces * ranks - options.missing,
            "without ms": found["without"],
            "with": found["with"] / found["without"],
            "with subtree": found.get("subtree", found["with"]) / found["without"],
            "verified": found["verified"] / found["without"],
            "norm without ms": statistics.median(norms["without"]) * 1e3,
            "norm with ms": statistics.median(norms["with"]) * 1e3,
        }
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=512, help="of a piece")
    parser.add_argument("--pieces", type=int, nargs="+", default=[1, 2, 4], help="of each rank")
    parser.add_argument("--missing", type=int, default=0, help="so many pieces less in all; without SameBits, none is left out")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cpu", action="store_true", help="CPU time of the program's thread, on a machine with other programs")
    parser.add_argument("--verify-every", type=int, default=1000, help="steps; those that repeat a piece are not timed apart")
    add_malloc(parser)
    options = parser.parse_args()
    table = []
    for pieces in options.pieces:
        table += on_ranks(options.ranks, measure, argparse.Namespace(**{**vars(options), "pieces": pieces}))
    print_table("A step with SameBits, and without", table)
    write_json(options.json, {"table": table})


if __name__ == "__main__":
    main()
