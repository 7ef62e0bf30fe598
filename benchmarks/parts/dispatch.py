"""CPU time per op of ragged DTensors against Shard(0) DTensors, and what ``import torch_ragged`` costs plain DTensors.

    PYTHONPATH=. OMP_NUM_THREADS=1 python -m benchmarks.parts.dispatch [--json PATH] [--rounds 50] [--repetitions 5]

One process is rank 0 of 8 on the fake process group, so nothing is sent. Tensors are small: what is timed is dispatch. All
have the same global shape, and on rank 0 the same number of elements. A ratio is the median over the rounds of the ratio in a
round. The cost of the import is told from forks of one process, two without it and one with, which take turns round by round.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import statistics
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, debug, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.common.measure import interleaved, microseconds, print_table, write_json

RANKS = 8
SHAPE = (64, 8)
MANY = 100  # tensors of the foreach op
PARAMETERS = 20  # of the optimizer
BUILDS = 5  # times that the tensors are made


def operations(mesh: DeviceMesh, placement: Placement) -> dict[str, Callable[[], Any]]:
    """The timed ops on tensors under ``placement``."""

    def tensor() -> DTensor:
        return distribute_tensor(torch.ones(SHAPE), mesh, [placement])

    def adamw(foreach: bool) -> Callable[[], Any]:
        parameters = [nn.Parameter(tensor()) for _ in range(PARAMETERS)]
        for parameter in parameters:
            parameter.grad = tensor()
        return torch.optim.AdamW(parameters, foreach=foreach).step

    one, other = tensor(), tensor()
    many, others = [tensor() for _ in range(MANY)], [tensor() for _ in range(MANY)]
    return {
        "add": lambda: one + other,
        "mul_": lambda: one.mul_(1.0),
        "detach": one.detach,
        "clone": one.clone,
        "sum": one.sum,
        "norm": lambda: torch.linalg.vector_norm(one),
        f"foreach_add of {MANY}": lambda: torch._foreach_add(many, others),
        f"AdamW of {PARAMETERS}, foreach=False": adamw(foreach=False),
        f"AdamW of {PARAMETERS}, foreach=True": adamw(foreach=True),
        "redistribute to Replicate": lambda: one.redistribute(placements=[Replicate()]),
    }


def times_of(mesh: DeviceMesh, placements: dict[str, Placement], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Per op and per name of a placement: microseconds per call, over all rounds.

    Every few rounds all tensors are made anew: where they lie in memory matters for some per cent. DTensor's cache of sharding
    decisions is filled with other tensors before, as in a model: it recognizes those that filled it a little faster.
    """
    times: dict[str, dict[str, list[float]]] = {}
    for _ in range(BUILDS):
        debug._clear_sharding_prop_cache()
        for placement in placements.values():
            for function in operations(mesh, placement).values():
                function()
        functions = {name: operations(mesh, placement) for name, placement in placements.items()}
        for op in next(iter(functions.values())):
            found = interleaved({name: functions[name][op] for name in placements}, -(-rounds // BUILDS))
            for name, values in found.items():
                times.setdefault(op, {}).setdefault(name, []).extend(values)
    return times


def against_shard(mesh: DeviceMesh, rounds: int) -> list[dict[str, Any]]:
    """Per op: microseconds under each placement, and how those of the ragged ones compare."""
    from torch_ragged import RaggedShard

    ragged = {
        "even units": RaggedShard((0,), (1,) * RANKS),
        "uneven units": RaggedShard((0,), (8, 2, 14, 0, 16, 8, 12, 4)),
    }
    rows = []
    for op, times in times_of(mesh, {"Shard(0)": Shard(0), **ragged}, rounds).items():
        ratios = {name: statistics.median(mine / base for mine, base in zip(times[name], times["Shard(0)"])) for name in ragged}
        medians = {f"{name} us": statistics.median(values) for name, values in times.items()}
        rows.append({"op": op, **medians, **{f"ratio, {name}": ratio for name, ratio in ratios.items()}})
    return rows


def plain(mesh: DeviceMesh, requests: Connection, registers: bool) -> None:
    """Serve timings of ops on Shard(0): answers ``(op, calls)`` with microseconds per call, None with new tensors' ops."""
    if registers:
        import torch_ragged  # noqa: F401
    gc.disable()
    functions: dict[str, Callable[[], Any]] = {}
    while (request := requests.recv()) != "stop":
        if request is None:
            debug._clear_sharding_prop_cache()
            functions = operations(mesh, Shard(0))
            requests.send(list(functions))
            gc.collect()
        else:
            op, calls = request
            requests.send(microseconds(functions[op], calls))


KINDS = {"without": False, "again without": False, "with": True}


def import_times(mesh: DeviceMesh, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Per plain op and kind: microseconds per round, in forks of this process that take turns round by round."""
    context = multiprocessing.get_context("fork")
    pipes: dict[str, Connection] = {}
    processes = []
    for kind, registers in KINDS.items():
        pipes[kind], theirs = context.Pipe()
        processes.append(context.Process(target=plain, args=(mesh, theirs, registers), daemon=True))
        processes[-1].start()

    def ask(kind: str, request: Any) -> Any:
        pipes[kind].send(request)
        return pipes[kind].recv()

    names = list(KINDS)
    times: dict[str, dict[str, list[float]]] = {}
    for _ in range(BUILDS):
        (ops, *_) = [ask(kind, None) for kind in names]
        for op in ops:
            warm = [ask(kind, (op, 5)) for kind in (*names, *names)]
            calls = max(1, round(10_000 / max(warm[len(names) :])))  # Enough that caches, which processes share, are warm.
            found = times.setdefault(op, {kind: [] for kind in names})
            for turn in range(-(-rounds // BUILDS)):
                for index in range(len(names)):
                    kind = names[(turn + index) % len(names)]
                    found[kind].append(ask(kind, (op, calls)))
    for kind, process in zip(names, processes):
        pipes[kind].send("stop")
        process.join()
    return times


def cost_of_import(rounds: int, repetitions: int) -> list[dict[str, Any]]:
    """Per plain op: medians of microseconds without and with the import, and what that adds in a round.

    The last column is what another process without it adds: two processes never lie alike in memory.
    """
    command = [sys.executable, "-m", "benchmarks.parts.dispatch", "--rounds", str(rounds), "--import-times"]
    times: dict[str, dict[str, list[float]]] = {}
    for _ in range(repetitions):
        for op, found in json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout).items():
            for kind, values in found.items():
                times.setdefault(op, {}).setdefault(kind, []).extend(values)
    rows = []
    for op, found in times.items():
        base, medians = found["without"], {kind: statistics.median(values) for kind, values in found.items()}

        def percent(kind: str, found: dict[str, list[float]] = found, base: list[float] = base) -> float:
            return 100 * (statistics.median(mine / other for mine, other in zip(found[kind], base)) - 1)

        difference = statistics.median(mine - other for mine, other in zip(found["with"], base))
        row = {"op": op, "without us": medians["without"], "with us": medians["with"], "difference us": difference}
        rows.append({**row, "%": percent("with"), "% of a second one without": percent("again without")})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the results to this file too")
    parser.add_argument("--rounds", type=int, default=50, help="timings of each op in a process")
    parser.add_argument("--repetitions", type=int, default=5, help="sets of processes without and with the import; 0 for none")
    parser.add_argument("--import-times", action="store_true", help=argparse.SUPPRESS)  # One of these sets.
    options = parser.parse_args()
    if not options.import_times:
        import torch_ragged  # noqa: F401
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    with torch.no_grad():
        if options.import_times:
            print(json.dumps(import_times(mesh, options.rounds)))
            return
        results = {"ops": against_shard(mesh, options.rounds)}
    print_table(
        f"torch {torch.__version__}: ops on ragged DTensors against Shard(0), CPU microseconds per call", results["ops"]
    )
    if options.repetitions:
        results["import"] = cost_of_import(options.rounds, options.repetitions)
        print_table("ops on Shard(0) in processes that take turns, without and with the import", results["import"])
    write_json(options.json, results)


if __name__ == "__main__":
    main()
