"""What ``fully_shard`` itself costs on many ranks, beside FSDP2's: CPU time per parameter, and the memory of placements.

    PYTHONPATH=. OMP_NUM_THREADS=1 python -m benchmarks.parts.construction [--json PATH] [--ranks 8 1024 8192] [--rounds 5]

Two blocks of DeepSeek-V3, a group each, whose experts are parameters of their own (1,564 parameters), on the meta device and a
fake process group of any size. A measurement is one call per block in a new process, which has sharded a tiny module before:
what is imported at the first call does not count, and no cache knows the blocks. A round measures each package at each number
of ranks; a package that took longer than ``--limit`` seconds at a number of ranks is not measured there again.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import pickle
import statistics
import tracemalloc
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from benchmarks.common.fake_world import PACKAGES, fake_world, make_mesh
from benchmarks.common.measure import microseconds, print_table, write_json
from torch_ragged.offline import Parameter, load_model

MODEL, BLOCKS = "deepseek-v3", 2


class Parameters(nn.Module):
    """A block: its parameters, without a forward."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        super().__init__()
        for one in parameters:
            self.register_parameter(one.name.replace(".", "_"), nn.Parameter(torch.empty(one.shape, device="meta")))


def placement_bytes(parameters: Sequence[Any]) -> float:
    """Python's memory for the placements of a parameter, on average."""
    texts = [pickle.dumps(parameter.placements) for parameter in parameters]
    tracemalloc.start()
    copies = [pickle.loads(text) for text in texts]
    nbytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return nbytes / len(copies)


def construct(package: str, ranks: int) -> dict[str, float]:
    """One measurement."""
    torch.set_num_threads(1)
    fully_shard = PACKAGES[package]
    with fake_world(2):
        fully_shard(nn.Linear(4, 4, device="meta"), mesh=make_mesh(2))
    groups = [parameters for name, parameters in load_model(MODEL).groups.items() if name != "rest"][-BLOCKS:]
    with fake_world(ranks):
        mesh = make_mesh(ranks)
        blocks = [Parameters(group) for group in groups]
        gc.collect()  # Otherwise it is chance in which of the packages' turns a collection of all objects is due.
        elapsed = microseconds(lambda: [fully_shard(block, mesh=mesh) for block in blocks])
        parameters = [parameter for block in blocks for parameter in block.parameters()]
        return {"parameters": len(parameters), "us": elapsed, "bytes": placement_bytes(parameters)}


def rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row per number of ranks and package."""
    found: dict[tuple[int, str], list[dict[str, float]]] = {}
    cases = [(ranks, package) for ranks in options.ranks for package in PACKAGES]
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for turn in range(options.rounds):
            for index in range(len(cases)):
                ranks, package = case = cases[(turn + index) % len(cases)]
                known = found.setdefault(case, [])
                if all(one["us"] < 1e6 * options.limit for one in known):
                    known.append(pool.apply(construct, (package, ranks)))
    table = []
    for (ranks, package), measured in sorted(found.items(), key=lambda item: cases.index(item[0])):
        count = measured[0]["parameters"]
        each = [one["us"] / 1e3 / count for one in measured]
        row = {"ranks": ranks, "package": package, "s": statistics.median(each) * count / 1e3}
        row |= {"ms per parameter": statistics.median(each), "least": min(each), "most": max(each)}
        table.append({**row, "bytes of its placements": round(measured[0]["bytes"]), "measured": len(measured)})
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 1024, 8192])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=float, default=20, help="seconds; default: %(default)s")
    parser.add_argument("--json", help="write the results to this file too")
    options = parser.parse_args()
    found = rows(options)
    print_table(
        f"torch {torch.__version__}: fully_shard of {BLOCKS} blocks of {MODEL} with single experts, CPU time of the calls, "
        "medians; least and most ms per parameter",
        found,
    )
    write_json(options.json, {"construction": found})


if __name__ == "__main__":
    main()
