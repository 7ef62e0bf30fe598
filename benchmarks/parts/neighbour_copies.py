"""Time and memory of NeighbourCopies: training steps with a copy after each, beside the same steps without.

    python -m benchmarks.parts.neighbour_copies [--json PATH] [--ranks 4] [--width 512] [--rounds 5]

Both kinds of steps run by turns in the same processes, on the same model. "copies / state" is the bytes of all copies over the
bytes of parameters and optimizer states on the same rank, the largest of all ranks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.common.measure import add_malloc, on_ranks, print_table, write_json
from torch_ragged.fsdp import NeighbourCopies, fully_shard


def measure(rank: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    width = options.width
    blocks = (nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(6))
    model = nn.Sequential(*blocks)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    copies = NeighbourCopies(model, optimizer, distance=1)
    x = torch.randn(options.tokens, width)

    def step(copied: bool) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if copied:
            copies.update()

    times: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(options.rounds + 2):
        for copied in (False, True):
            copies.wait()
            dist.barrier()
            start = time.perf_counter()
            for _ in range(options.steps):  # So that sending overlaps with the next step, as in training.
                step(copied)
            copies.wait()
            dist.barrier()
            if turn > 1:
                times[copied].append((time.perf_counter() - start) / options.steps)
    state = sum(param.to_local().nbytes for param in model.parameters())  # type: ignore[attr-defined]
    for states in optimizer.state.values():
        state += sum(each.to_local().nbytes for each in states.values() if hasattr(each, "to_local"))
    share = torch.tensor([copies.nbytes / state])
    dist.all_reduce(share, dist.ReduceOp.MAX)
    without, with_copies = (statistics.median(times[kind]) for kind in (False, True))
    return [
        {
            "ranks": dist.get_world_size(),
            "tokens": options.tokens,
            "state MB per rank": state / 1e6,
            "without ms": without * 1e3,
            "with ms": with_copies * 1e3,
            "with/without": with_copies / without,
            "copies / state": float(share),
        }
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    add_malloc(parser)
    options = parser.parse_args()
    table = []
    for tokens in options.tokens:
        table += on_ranks(options.ranks, measure, argparse.Namespace(**{**vars(options), "tokens": tokens}))
    print_table("A step with a copy to another rank after it, and without", table)
    write_json(options.json, {"table": table})


if __name__ == "__main__":
    main()
