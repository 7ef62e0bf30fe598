"""run(delta=Baseline()) beside run(): bytes over the bytes of changed elements, the entropy beside, and time.

    python -m benchmarks.parts.element_deltas [--json PATH] [--rounds 5] [--numel 20000000]

Two ranks train, and own uneven shards; two ranks are an engine with tensor parallelism. Before each turn, elements at random
positions get other values. A turn runs the delta, and then all elements with the same values. "changed" is the share of
elements that the engine lacks. "bytes" are those that ranks send over the bytes of these elements; "entropy" is the least that
they need: values, and the entropy of random positions. "CPU s" is of the rank that has most, and other programs do not change
it. "break-even" is the bandwidth of that rank's link below which a delta is faster: where what it saves on the link takes as
long as its CPU time.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from benchmarks.common.measure import add_malloc, on_ranks, print_table, write_json
from torch_ragged import RaggedShard, transfer

WIDTH = 1024
FRACTIONS = (0.01, 0.02, 0.03, 0.3, 1.0)


def measure(rank: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    trainer, engine = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
    table = []
    for dtype in (torch.float32, torch.bfloat16):
        shapes = {f"{i}": (8 * WIDTH, WIDTH) for i in range(max(options.numel // (8 * WIDTH * WIDTH), 1))}
        numel = sum(map(math.prod, shapes.values()))
        source = {
            name: distribute_tensor(torch.randn(shape).to(dtype), trainer, [RaggedShard((0,), (5, 3))], src_data_rank=None)
            for name, shape in shapes.items()
        }
        target = {
            name: distribute_tensor(torch.zeros(shape, dtype=dtype), engine, [Shard(0)], src_data_rank=None)
            for name, shape in shapes.items()
        }
        for fraction in FRACTIONS:
            plan, baseline = transfer.plan(source, target), transfer.Baseline()
            plan.run(source, target, delta=baseline)
            times: dict[str, list[float]] = {"delta": [], "whole": []}
            cpu: dict[str, list[float]] = {"delta": [], "whole": []}
            counts, sent = [], []
            for turn in range(options.rounds + 1):
                counts.append(total(write(source, fraction) if rank < 2 else 0))
                for way, delta in (("delta", baseline), ("whole", None)):
                    dist.barrier()
                    start, busy = time.perf_counter(), time.process_time()
                    plan.run(source, target, delta=delta)
                    busy = time.process_time() - busy
                    dist.barrier()
                    if turn:  # The first turn warms up.
                        times[way].append(time.perf_counter() - start)
                        cpu[way].append(largest(busy))
                    if way == "delta":
                        sent.append(total(plan.last_sent_bytes))
            changed_bytes = sum(counts) * dtype.itemsize
            medians = {way: statistics.median(each) for way, each in times.items()}
            work = {way: statistics.median(each) for way, each in cpu.items()}
            p = sum(counts) / len(counts) / numel
            saved = 5 / 8 * (numel * dtype.itemsize - statistics.mean(sent))  # By the rank that sends most.
            table.append(
                {
                    "dtype": str(dtype).removeprefix("torch."),
                    "changed %": 100 * p,
                    "bytes": sum(sent) / changed_bytes,
                    "entropy": 1 + entropy(p) / p / (8 * dtype.itemsize),
                    "of all bytes": statistics.mean(sent) / (numel * dtype.itemsize),
                    "delta s": medians["delta"],
                    "whole s": medians["whole"],
                    "delta CPU s": work["delta"],
                    "whole CPU s": work["whole"],
                    "break-even Gbit/s": max(saved, 0) * 8 / 1e9 / work["delta"],
                }
            )
    return table


def write(source: dict[str, Any], fraction: float) -> int:
    """Give random elements other bits: the last one of each is flipped. Returns how many."""
    count = 0
    for tensor in source.values():
        local = tensor.to_local().view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)
        chosen = torch.rand(local.shape) < fraction
        local ^= chosen
        count += int(chosen.sum())
    return count


def entropy(p: float) -> float:
    """Bits of one element's answer whether it is changed."""
    return 0.0 if p in (0, 1) else -p * math.log2(p) - (1 - p) * math.log2(1 - p)


def total(value: int) -> int:
    """Over all ranks."""
    tensor = torch.tensor([value])
    dist.all_reduce(tensor)
    return int(tensor)


def largest(value: float) -> float:
    """Of all ranks."""
    tensor = torch.tensor([value])
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return float(tensor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--numel", type=int, default=20_000_000)
    add_malloc(parser)
    options = parser.parse_args()
    table = on_ranks(4, measure, options)
    print_table(f"{options.numel / 1e6:.0f} million elements, 2 ranks to 2 others", table)
    write_json(options.json, {"table": table})


if __name__ == "__main__":
    main()
