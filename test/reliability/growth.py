"""What a long run holds: 500 steps of a few models, and 200 models of the table of pairs that are made, trained and dropped.

    python test/reliability/growth.py [--steps 500] [--models 200] [--json PATH]

On 2 gloo ranks. A row has what rank 0 holds after a part of the steps or models: resident memory, objects, descriptors,
threads, process groups, keys of the store, and entries of the package's caches, of which each has a limit.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import gc
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test/common"), str(ROOT / "test/fuzz")]
os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from held import held  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.fsdp import MixedPrecisionPolicy  # noqa: E402
from torch.distributed.tensor import Replicate, Shard  # noqa: E402

from benchmarks.common.measure import print_table, write_json  # noqa: E402
from torch_ragged import fsdp  # noqa: E402
from torch_ragged.fsdp import fully_shard  # noqa: E402
from torch_ragged.optim import Muon, matrix_groups, muon_policy  # noqa: E402
from torch_ragged.spmd import Plan, parallelize  # noqa: E402


def _row(what: str, done: int) -> dict[str, Any]:
    found = held()
    with open("/proc/self/status") as file:
        resident = next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))
    wrapped = functools._lru_cache_wrapper
    caches = [
        each for each in gc.get_objects() if isinstance(each, wrapped) and str(each.__module__).startswith("torch_ragged")
    ]
    names = ("descriptors", "threads of the process", "process groups", "keys of the store")
    objects = sum(count for name, count in found.items() if "." in name)
    entries = sum(cache.cache_info().currsize for cache in caches)
    return {
        "what": what,
        "done": done,
        "resident MiB": round(resident / 1024),
        "objects": objects,
        **{name: found[name] for name in names},
        "cached": entries,
    }


def _models(mesh: DeviceMesh) -> dict[str, tuple[nn.Module, Any]]:
    def sharded(**options: Any) -> nn.Module:
        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh, **options)
        return fully_shard(model, mesh=mesh, **options)

    plan = Plan().shard(r"0\.(weight|bias)", Shard(0), "dp").shard(r"2\.weight", Shard(1), "dp").default(Replicate())
    dense = sharded()
    narrow = sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16), placements=fsdp.ZERO1)
    matrices = sharded(orig_param_policy=muon_policy())
    lent = sharded(offload_policy=fsdp.Offload(optimizer=0.5))
    planned = parallelize(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)), plan, mesh, mode="static")
    return {
        "AdamW": (dense, torch.optim.AdamW(dense.parameters())),
        "bfloat16, ZeRO-1": (narrow, torch.optim.AdamW(narrow.parameters())),
        "Muon": (matrices, Muon(matrix_groups(matrices, lr=0.01), lr=0.01)),
        "offloaded states": (lent, fsdp.offloaded(torch.optim.AdamW, lent, lr=0.01)),
        "a static plan": (planned, torch.optim.AdamW(planned.parameters())),
    }


def _ranks(rank: int, steps: int, count: int, port: int, results: Any) -> None:
    timeout = datetime.timedelta(seconds=300)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=timeout)
    mesh, rows = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), []
    for name, (model, optimizer) in _models(mesh).items():
        for step in range(1, steps + 1):
            model(torch.randn(4, 32, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step in (steps // 5, steps // 2, steps):
                rows.append(_row(f"steps: {name}", step))
        del model, optimizer
    import fuzz_pairs
    import fuzz_pairs_training

    seeds, done = iter(range(10_000, 10**6)), 0  # Random runs of legal pairs.
    while done < count:
        seed = next(seeds)
        case = fuzz_pairs.random_case(seed)
        # torch keeps compiled code. It never frees a module that has kept an intermediate with hooks on it, of FSDP2 either:
        # Python's collector does not see a cycle through autograd's graph.
        if fuzz_pairs.size_of(seed) == 2 and case["recompute"] != "compiled" and case["outputs"] != "kept":
            fuzz_pairs_training.PairTraining(case).run()
            done += 1
            if done in (count // 5, count // 2, count):
                rows.append(_row("models that are made, trained and dropped", done))
    if rank == 0:
        results.put(rows)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--models", type=int, default=200)
    parser.add_argument("--port", type=int, default=29787)
    parser.add_argument("--json", help="write the table to this file too")
    options = parser.parse_args()
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_ranks, (options.steps, options.models, options.port, results), nprocs=2)
    rows = results.get()
    print_table(f"torch {torch.__version__}, 2 gloo ranks: what rank 0 holds", rows)
    write_json(options.json, {"growth": rows, "command": " ".join(["python", *sys.argv])})


if __name__ == "__main__":
    main()
