"""CPU time per op of plain DTensors on a torch with the patches of ``upstream/`` against the stock one.

    PYTHONPATH=. OMP_NUM_THREADS=1 python -m benchmarks.parts.upstream_dispatch [--json PATH] [--rounds 30] [--repetitions 8]

Processes with either torch take turns round by round. The ops are those of ``dispatch.py``, on Shard(0) tensors; a second stock
process tells what is noise. A percentage is from the median over all rounds of the ratio in a round.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, debug
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.common.measure import microseconds, print_table, write_json
from benchmarks.parts.dispatch import RANKS, operations

UPSTREAM = Path(__file__).resolve().parents[2] / "upstream"
KINDS = ("stock", "again stock", "patched")
CPU_PER_TIMING = 10_000  # microseconds


def serve() -> None:
    """Answer lines on standard input: ``new`` makes tensors anew and names the ops; ``op calls`` times one."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    functions: dict[str, Any] = {}
    gc.disable()
    with torch.no_grad():
        for line in sys.stdin:
            if line.strip() == "new":
                debug._clear_sharding_prop_cache()
                functions = operations(mesh, Shard(0))
                gc.collect()
                print("|".join(functions), flush=True)
            else:
                op, calls = line.rsplit(" ", 1)
                print(microseconds(functions[op], int(calls)), flush=True)


class Server:
    """A process that times ops, with the torch in ``path``."""

    def __init__(self, path: Path | None) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(path or "")}
        command = [sys.executable, "-m", "benchmarks.parts.upstream_dispatch", "--serve"]
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, request: str) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(request, file=self.process.stdin, flush=True)
        return self.process.stdout.readline().strip()

    def stop(self) -> None:
        self.process.stdin.close()  # type: ignore[union-attr]
        self.process.wait()


def times_of_one_set(tree: Path, rounds: int, times: dict[str, dict[str, list[float]]]) -> None:
    """Add the microseconds of ``rounds`` rounds, in new processes."""
    servers = {kind: Server(tree if kind == "patched" else None) for kind in KINDS}
    ops = [server.ask("new") for server in servers.values()][0].split("|")
    for op in ops:
        warm = [float(server.ask(f"{op} 5")) for _ in range(2) for server in servers.values()]
        calls = max(1, round(CPU_PER_TIMING / max(warm[len(KINDS) :])))
        found = times.setdefault(op, {kind: [] for kind in KINDS})
        for turn in range(rounds):
            for index in range(len(KINDS)):
                kind = KINDS[(turn + index) % len(KINDS)]
                found[kind].append(float(servers[kind].ask(f"{op} {calls}")))
    for server in servers.values():
        server.stop()


def rows_of(times: dict[str, dict[str, list[float]]]) -> list[dict[str, Any]]:
    rows = []
    for op, found in times.items():
        medians = {f"{kind} us": statistics.median(found[kind]) for kind in ("stock", "patched")}
        percents = {
            name: 100 * (statistics.median(mine / base for mine, base in zip(found[kind], found["stock"])) - 1)
            for name, kind in (("patched %", "patched"), ("noise %", "again stock"))
        }
        rows.append({"op": op, **medians, **percents})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the results to this file too")
    parser.add_argument("--rounds", type=int, default=30, help="timings of each op in a set of processes")
    parser.add_argument("--repetitions", type=int, default=8, help="sets of processes")
    parser.add_argument("--out", type=Path, default=UPSTREAM.parent / "out/upstream", help="where the patched torch goes")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    sys.path.insert(0, str(UPSTREAM))
    from build import write
    from tree import patched_tree

    tree = patched_tree(options.out / f"{torch.__version__}-benchmark", write(options.out / "patches"))
    times: dict[str, dict[str, list[float]]] = {}
    for _ in range(options.repetitions):
        times_of_one_set(tree, options.rounds, times)
    rows = rows_of(times)
    print_table(f"torch {torch.__version__}: ops on Shard(0), patched torch against stock, CPU microseconds per call", rows)
    write_json(options.json, {"ops": rows})


if __name__ == "__main__":
    main()
