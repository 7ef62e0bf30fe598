"""Instructions per op of plain DTensors on a torch with the patches of ``upstream/`` and on the stock one, counted by valgrind.

    PYTHONPATH=. OMP_NUM_THREADS=1 python -m benchmarks.parts.upstream_instructions [--json PATH] [--calls 100]

A count does not depend on what else the machine does, but two runs of one torch differ: the allocator and the hashes of
addresses take other ways. So each torch runs twice, and the table has both counts. It needs ``valgrind`` and takes minutes.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.common.measure import print_table, write_json
from benchmarks.parts.dispatch import RANKS, operations

UPSTREAM = Path(__file__).resolve().parents[2] / "upstream"
KINDS = ("stock", "patched", "again stock", "again patched")
OPS = ("add", "mul_", "detach", "redistribute to Replicate")
WARM = 30  # Calls before the count: caches are full, and the interpreter has specialized its code.


def count(calls: int) -> None:
    """In a process under valgrind: one dump of counts for each op."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    functions = operations(init_device_mesh("cpu", (RANKS,)), Shard(0))
    gc.disable()
    with torch.no_grad():
        for op in OPS:
            for _ in range(WARM):
                functions[op]()
            torch._C._valgrind_toggle()
            for _ in range(calls):
                functions[op]()
            torch._C._valgrind_toggle_and_dump_stats()


def counts_of(tree: Path | None, calls: int) -> dict[str, float]:
    """Instructions per call of each op, with the torch in ``tree``; None: the installed one."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "PYTHONPATH": str(tree or "")}
        command = ["valgrind", "--tool=callgrind", "--collect-atstart=no", f"--callgrind-out-file={folder}/counts"]
        program = [sys.executable, "-m", "benchmarks.parts.upstream_instructions", "--count", "--calls", str(calls)]
        done = subprocess.run(command + program, env=environment, capture_output=True, text=True)
        dumps = sorted(Path(folder).glob("counts.*"), key=lambda path: int(path.suffix[1:]))
        if done.returncode or len(dumps) < len(OPS):
            raise RuntimeError(f"valgrind ended with {done.returncode} and {len(dumps)} counts: {done.stderr[-2000:]}")
        found = [re.search(r"^(?:summary|totals): (\d+)", dump.read_text(), re.M) for dump in dumps]
    return {op: int(match.group(1)) / calls for op, match in zip(OPS, found) if match}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the results to this file too")
    parser.add_argument("--calls", type=int, default=100, help="calls of each op that are counted")
    parser.add_argument("--out", type=Path, default=UPSTREAM.parent / "out/upstream", help="where the patched torch goes")
    parser.add_argument("--count", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.count:
        count(options.calls)
        return
    if shutil.which("valgrind") is None:
        raise SystemExit("upstream_instructions: valgrind is not installed")
    sys.path.insert(0, str(UPSTREAM))
    from build import write
    from tree import patched_tree

    tree = patched_tree(options.out / f"{torch.__version__}-benchmark", write(options.out / "patches"))
    counts = {kind: counts_of(tree if "patched" in kind else None, options.calls) for kind in KINDS}
    rows: list[dict[str, Any]] = []
    for op in OPS:
        own: dict[str, Any] = {kind: counts[kind][op] for kind in KINDS}
        least = {name: min(own[name], own[f"again {name}"]) for name in ("stock", "patched")}
        rows.append({"op": op, **own, "patched %": 100 * (least["patched"] / least["stock"] - 1)})
    print_table(f"torch {torch.__version__}: instructions per call on Shard(0); the least of two counts", rows)
    write_json(options.json, {"ops": rows})


if __name__ == "__main__":
    main()
