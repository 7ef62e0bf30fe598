"""Time of an optimizer step: this package's optimizers on its fully_shard against torch.optim's on FSDP2.

    python -m benchmarks.parts.muon --layers 6 --dim 240 --rounds 15

Every rank steps all optimizers in turn, each round in another order, so that what else the machine does hits them alike; a step
is timed from one barrier to the next. Gradients are given, nothing is trained. Also counted: collectives per step.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor.debug import CommDebugMode

from benchmarks.common.measure import print_table, write_json
from torch_ragged.fsdp import fully_shard
from torch_ragged.optim import AdamW8bit, Muon, Shampoo


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ranks", type=int, default=4, help="(default: %(default)s)")
    add("--layers", type=int, default=6, help="transformer blocks' worth of matrices (default: %(default)s)")
    add("--dim", type=int, default=240, help="width (default: %(default)s)")
    add("--rounds", type=int, default=15, help="timed steps of each optimizer (default: %(default)s)")
    add("--json", help="file to write the numbers to")
    return parser.parse_args()


def build(args: argparse.Namespace, shard: Any, mesh: Any, **options: Any) -> nn.Module:
    """The matrices of a transformer: fused qkv, output, up, down per layer; one group per layer."""
    torch.manual_seed(0)
    d = args.dim
    sizes = ((d, 3 * d), (d, d), (d, 4 * d), (4 * d, d))
    layers = [[nn.Linear(into, out, bias=False) for into, out in sizes] for _ in range(args.layers)]
    model = nn.Sequential(*(nn.Sequential(*layer) for layer in layers))
    for layer in model:
        shard(layer, mesh=mesh, **options)
    return shard(model, mesh=mesh)


def optimizers(args: argparse.Namespace, mesh: Any) -> dict[str, torch.optim.Optimizer]:
    def ours(**options: Any) -> Any:
        return build(args, fully_shard, mesh, **options).parameters()

    def theirs() -> Any:
        return build(args, torch_fully_shard, mesh).parameters()

    return {
        "torch.optim.Muon on FSDP2": torch.optim.Muon(theirs(), lr=1e-3),
        "torch.optim.AdamW on FSDP2": torch.optim.AdamW(theirs(), lr=1e-3),
        "Muon": Muon(ours(), lr=1e-3, check_gradients=False),
        "Muon, check_gradients": Muon(ours(), lr=1e-3),
        "Shampoo, interval 10": Shampoo(ours(), lr=1e-3, check_gradients=False),
        "AdamW8bit, whole blocks": AdamW8bit(ours(orig_param_policy=AdamW8bit.policy), lr=1e-3),
        "AdamW8bit, cut blocks": AdamW8bit(ours(), lr=1e-3),
    }


def _rank(rank: int, args: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", store=dist.FileStore(store, args.ranks), rank=rank, world_size=args.ranks)
    every = optimizers(args, init_device_mesh("cpu", (args.ranks,)))
    names, counts = list(every), {}
    times: dict[str, list[float]] = {name: [] for name in names}
    for name, optimizer in every.items():
        for param in optimizer.param_groups[0]["params"]:
            param.grad = param.detach() * 0.1 + 0.01
        optimizer.step()
        with CommDebugMode() as mode:
            optimizer.step()
        counts[name] = mode.get_total_counts()
    for turn in range(args.rounds):
        for index in range(len(names)):
            name = names[(turn + index) % len(names)]
            dist.barrier()
            start = time.perf_counter()
            every[name].step()
            dist.barrier()
            times[name].append(1e3 * (time.perf_counter() - start))
    if rank == 0:
        matrices = len(every["Muon"].param_groups[0]["params"])
        numel = sum(param.numel() for param in every["Muon"].param_groups[0]["params"])
        base = statistics.median(times["torch.optim.Muon on FSDP2"])
        rows = [
            {
                "optimizer": name,
                "step, ms": statistics.median(values),
                "fastest": min(values),
                "of torch's Muon": f"{100 * statistics.median(values) / base:.0f}%",
                "collectives": counts[name],
            }
            for name, values in times.items()
        ]
        print_table(f"{matrices} matrices, {numel:,} elements, {args.ranks} ranks, medians of {args.rounds}", rows)
        write_json(args.json, {"matrices": matrices, "elements": numel, "rows": rows, "times_ms": times})
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    args = parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (args, os.path.join(folder, "store")), nprocs=args.ranks)


if __name__ == "__main__":
    main()
