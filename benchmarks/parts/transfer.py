"""Transfers between meshes: time to plan for large models, and time and memory of runs beside full_tensor() and broadcast.

    python -m benchmarks.parts.transfer plan [--json PATH]
    python -m benchmarks.parts.transfer run [--json PATH] [--rounds 5] [--numel 100000000]

``plan`` needs no process group: one rank's plan of a 70B-shaped model (723 tensors), with all caches cleared, and again with
the caches of the first time. The largest of several ranks is shown.

``run`` starts gloo processes. In each, the peer is what RL programs do: full_tensor() of each parameter on the source's
ranks, then a broadcast from rank 0 to all ranks of the target, which keep their part. The floor is the largest number of bytes
that a rank must send or receive, over the bandwidth that an all-to-all of large messages reaches in the same processes.
All are timed by turns. Memory is what the buffers of a rank hold at most, beside its shards, as torch's allocator counts them.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from benchmarks.common.measure import add_malloc, on_ranks, print_table, write_json
from benchmarks.common.peak import peak_of
from torch_ragged import transfer
from torch_ragged.fsdp import rows
from torch_ragged.offline import ModelPlanner, granularity_policy, load_model
from torch_ragged.tensor import _ownership, _route
from torch_ragged.transfer import Spec, _rounds, _sides

ALIGNMENT = 64


# --- planning ----------------------------------------------------------------------------------------------------------


def clear_caches() -> None:
    for module in (_ownership, _route, _sides):
        for function in vars(module).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()


def fsdp(model: Any, ranks: range) -> dict[str, tuple[Any, ...]]:
    """Shapes and placements of fully_shard on ``ranks``, blocks of 32 rows, one group per block."""
    layouts = ModelPlanner(model, granularity_policy(rows(32), every_matrix=False), ALIGNMENT).plan(len(ranks)).group_layouts()
    found = {}
    for group, parameters in model.groups.items():
        for index, parameter in enumerate(parameters):
            found[parameter.name] = (parameter.shape, torch.tensor(ranks), (layouts[group].placement(index),))
    return found


def tensor_parallel(model: Any, ranks: range, size: int) -> dict[str, tuple[Any, ...]]:
    """Replicas of ``size`` ranks, which cut rows, as engines hold a model."""
    mesh = torch.tensor(ranks).view(-1, size)
    return {p.name: (p.shape, mesh, (Replicate(), Shard(0))) for group in model.groups.values() for p in group}


def measure_plan(source: dict[str, tuple[Any, ...]], target: dict[str, tuple[Any, ...]], world: int) -> dict[str, Any]:
    first, again, atoms = [], [], 0
    for rank in (0, world // 3, world - 1):
        clear_caches()
        for times in (first, again):
            gc.collect()
            start = time.thread_time()
            sides = [
                _sides.TensorSide({name: Spec(shape, torch.bfloat16, mesh, cut) for name, (shape, mesh, cut) in side.items()})
                for side in (source, target)
            ]
            shapes = {name: tuple(shape) for name, (shape, _, _) in source.items()}
            slices = _rounds.slices_of(*sides, shapes, rank, 1 << 29)
            times.append(time.thread_time() - start)
        atoms = max(atoms, sum(len(each.atoms) for each in slices))
    return {"tensors": len(shapes), "slices": len(slices), "atoms": atoms, "first s": max(first), "again s": max(again)}


def plan_table() -> list[dict[str, Any]]:
    model = load_model("llama-3-70b")
    cases = {
        "FSDP 256 -> FSDP 64 of them": (fsdp(model, range(256)), fsdp(model, range(64))),
        "FSDP 256 -> 64 others, TP 8": (fsdp(model, range(256)), tensor_parallel(model, range(256, 320), 8)),
        "FSDP 1024 -> FSDP 512 of them": (fsdp(model, range(1024)), fsdp(model, range(512))),
        "FSDP 512 -> FSDP 1024": (fsdp(model, range(512)), fsdp(model, range(1024))),
        "FSDP 1024 -> 512 others, TP 8": (fsdp(model, range(1024)), tensor_parallel(model, range(1024, 1536), 8)),
    }
    table = []
    for name, (source, target) in cases.items():
        world = 1 + max(int(mesh.max()) for side in (source, target) for _, mesh, _ in side.values())
        table.append({"case": name, **measure_plan(source, target, world)})
    return table


# --- runs --------------------------------------------------------------------------------------------------------------


def tensors_of(
    numel: int, mesh: DeviceMesh, placements: list[Placement], dtype: torch.dtype = torch.float32
) -> dict[str, DTensor]:
    """A model of about ``numel`` parameters: 12 blocks with matrices of the shapes of a transformer."""
    width = int((numel / 12 / 12) ** 0.5) // 64 * 64
    shapes = {"qkv": (3 * width, width), "out": (width, width), "up": (4 * width, width), "down": (width, 4 * width)}
    generator = torch.Generator().manual_seed(0)
    result = {}
    for block in range(12):
        for name, shape in {**shapes, "norm": (width,)}.items():
            full = torch.empty(shape).normal_(generator=generator).to(dtype)
            cuts = [Shard(min(p.dim, full.ndim - 1)) if isinstance(p, Shard) else p for p in placements]
            result[f"{block}.{name}"] = distribute_tensor(full, mesh, cuts, src_data_rank=None)
    return result


def gather_and_broadcast(source: dict[str, DTensor], target: dict[str, DTensor], group: dist.ProcessGroup) -> None:
    """What programs do: whole tensors on the source's ranks, a broadcast from the first, and each rank keeps its part."""
    for name, tensor in target.items():
        has_source = source[name].device_mesh.get_coordinate() is not None
        full = source[name].full_tensor().to(tensor.dtype) if has_source else torch.empty(tensor.shape, dtype=tensor.dtype)
        dist.broadcast(full, 0, group=group)
        if tensor.device_mesh.get_coordinate() is not None:
            part = distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None)
            tensor.to_local().copy_(part.to_local())


def measure_runs(rank: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    world, half = dist.get_world_size(), dist.get_world_size() // 2
    everyone, first, second = (DeviceMesh("cpu", list(ranks)) for ranks in (range(world), range(half), range(half, world)))
    groups = DeviceMesh("cpu", torch.arange(world).view(2, half))
    cases = {
        "trainer -> engine, whole": ((first, [Shard(0)]), (second, [Replicate()]), torch.float32),
        "trainer -> engine, whole, bfloat16": ((first, [Shard(0)]), (second, [Replicate()]), torch.bfloat16),
        "trainer -> engine, rows": ((first, [Shard(0)]), (second, [Shard(0)]), torch.float32),
        "trainer -> engine, columns": ((first, [Shard(0)]), (second, [Shard(1)]), torch.float32),
        "fewer ranks": ((everyone, [Shard(0)]), (first, [Shard(0)]), torch.float32),
        "HSDP -> FSDP": ((groups, [Replicate(), Shard(0)]), (everyone, [Shard(0)]), torch.float32),
    }
    table = []
    for name, ((mesh, cut), (other, other_cut), dtype) in cases.items():
        source = tensors_of(options.numel, mesh, cut)
        target = {key: torch.zeros_like(each) for key, each in tensors_of(options.numel, other, other_cut, dtype).items()}
        plan = transfer.plan(source, target, max_bytes=options.max_bytes)
        ways = {
            "ours": lambda: plan.run(source, target),
            "peer": lambda: gather_and_broadcast(source, target, dist.group.WORLD),
            "wire": lambda: wire(plan),
        }
        times: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(options.rounds + 1):
            for way, function in ways.items():
                dist.barrier()
                start = time.perf_counter()
                function()
                dist.barrier()
                if turn:  # The first turn warms up.
                    times[way].append(time.perf_counter() - start)
        check(target, tensors_of(options.numel, other, other_cut, dtype))
        medians = {way: statistics.median(each) for way, each in times.items()}
        peaks = {way: largest_of_ranks(peak_of(ways[way])) for way in ("ours", "peer")}
        table.append(
            {
                "case": f"{name}, {world} ranks",
                "ours s": medians["ours"],
                "peer s": medians["peer"],
                "ours/peer": medians["ours"] / medians["peer"],
                "floor s": medians["wire"],
                "ours MB": peaks["ours"] / 1e6,
                "peer MB": peaks["peer"] / 1e6,
            }
        )
    return table


def wire(plan: transfer.Plan) -> None:
    """An all-to-all of the same bytes, in messages as large as the plan's rounds, without packing."""
    received = torch.tensor([0] * len(plan.ranks))
    sent = received.clone()
    for each in plan.slices_of(dist.get_rank()):
        for atom in each.atoms:
            nbytes = atom.numel * each.dtype.itemsize
            if atom.sender == dist.get_rank():
                sent[atom.receivers[0]] += nbytes
            else:
                received[atom.sender] += nbytes
    steps = max(plan.rounds, 1)
    buffers = [torch.empty(int(counts.sum()) // steps + len(plan.ranks), dtype=torch.uint8) for counts in (received, sent)]
    splits = [(counts // steps).tolist() for counts in (received, sent)]
    for _ in range(steps):
        dist.all_to_all_single(buffers[0][: sum(splits[0])], buffers[1][: sum(splits[1])], *splits)


def check(target: dict[str, DTensor], wanted: dict[str, DTensor]) -> None:
    for name, tensor in wanted.items():
        assert torch.equal(target[name].to_local(), tensor.to_local()), name


def largest_of_ranks(value: int) -> int:
    tensor = torch.tensor([value])
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return int(tensor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("plan", "run"))
    parser.add_argument("--json")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--numel", type=int, default=100_000_000)
    parser.add_argument("--max-bytes", type=int, default=1 << 26)
    add_malloc(parser)
    options = parser.parse_args()
    if options.what == "plan":
        table = plan_table()
        print_table("Planning of one rank, Llama-3-70B", table)
    else:
        table = [row for ranks in options.ranks for row in on_ranks(ranks, measure_runs, options)]
        print_table(f"{options.numel / 1e6:.0f} million float32, buffers of at most {options.max_bytes / 1e6:.0f} MB", table)
    write_json(options.json, {"what": options.what, "table": table})


if __name__ == "__main__":
    main()
