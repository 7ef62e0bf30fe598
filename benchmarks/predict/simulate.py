"""Training steps of large models at any number of ranks, without them: counted on a fake process group, then predicted.

Parts (--parts, all but the last by default):

- ``count``: one forward and backward of Llama-3-70B, GPT-OSS-120B and DeepSeek-V3 (real widths, fewer layers) on the meta
  device by this package and by FSDP2: collectives and their bytes, padding, the memory timeline and its peak, Python time.
  One counter serves both (benchmarks/common/tracker.py).
- ``python``: Python time per group and step of stacks that compute nothing, in interleaved rounds (parts/python_time.py).
- ``predict``: step times of the whole models, weak and strong scaling to 10,000 ranks (predict.py), by a model of the schedule
  (step_model.py).
- ``check``: that model against steps measured with gloo at 1, 2, 4 and 8 ranks (benchmarks/predict/step_check.py).

All numbers are per rank. --plot writes the memory timelines, and needs matplotlib.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from benchmarks.common.fake_world import PACKAGES, fake_world, make_mesh, meta_training
from benchmarks.common.measure import microseconds, print_table, write_json
from benchmarks.common.models import NAMES, Stack, build, shard
from benchmarks.common.tracker import CollectiveLog, MemoryTracker

GIB = 2**30
PARTS = ("count", "python", "predict", "check")
COUNTED_RANKS = (8, 64, 256, 1024)


def options_of(package: str, options: argparse.Namespace) -> dict[str, Any]:
    """What ``fully_shard`` of a package is called with: bfloat16 compute, and how parameters are cut."""
    from torch_ragged.fsdp import elements, rows

    reduce_dtype = getattr(torch, options.reduce_dtype)
    chosen: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)}
    if package == "torch_ragged" and options.rows:
        matrices = rows(options.rows)
        chosen["orig_param_policy"] = lambda _, parameter: matrices if parameter.ndim > 1 else elements()
    if package == "FSDP2" and options.fsdp2_expert_dim:
        chosen["shard_placement_fn"] = lambda parameter: Shard(options.fsdp2_expert_dim) if parameter.ndim == 3 else None
    return chosen


def step(model: Stack, tokens: torch.Tensor) -> None:
    """A forward and a backward."""
    model(tokens).sum().backward()


def clear_gradients(model: Stack) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def milliseconds(model: Stack, tokens: torch.Tensor, repetitions: int = 5) -> float:
    """CPU time of a step, gradients dropped before it: the median. On the meta device that is Python and dispatch."""
    times = []
    for _ in range(repetitions):
        clear_gradients(model)
        times.append(microseconds(lambda: step(model, tokens)) / 1e3)
    return statistics.median(times)


def count(name: str, package: str, ranks: int, shards: int | None, options: argparse.Namespace) -> dict[str, Any]:
    """One step of a model by ``package`` on (``ranks`` / ``shards``, ``shards``), or on all of them: a row, and the timeline.

    The step counted is the second one, from when its gradients are None: the first finds out the order of groups.
    """
    log, tracker = CollectiveLog(), MemoryTracker()
    tokens = torch.zeros(options.tokens, dtype=torch.long, device="meta")
    with fake_world(ranks), meta_training(), log.installed():
        mesh = make_mesh(ranks, shards)
        with tracker:
            model = build(name, options.layers, device="meta", dtype=torch.float32)
            numel = sum(parameter.numel() for parameter in model.parameters())
            shard(model, PACKAGES[package], mesh=mesh, **options_of(package, options))
            for _ in range(2):
                clear_gradients(model)
                gc.collect()
                log.clear()
                tracker.reset_peak()
                tracker.mark("forward")
                output = model(tokens).sum()
                tracker.mark("backward")
                output.backward()
                del output
        calls, nbytes, timeline, marks = log.calls.copy(), log.nbytes.copy(), tracker.timeline[:], tracker.marks[:]
        elapsed = milliseconds(model, tokens)
    reduced = numel * getattr(torch, options.reduce_dtype).itemsize
    padding = nbytes["reduce_scatter"] / reduced - 1
    row: dict[str, Any] = {"model": name, "mesh": f"{ranks}" if shards is None else f"{ranks // shards} x {shards}"}
    row["package"] = package
    for kind in log.KINDS:
        row |= {f"{kind}s": calls[kind], f"{kind} GiB": nbytes[kind] / GIB}
    held = timeline[0][1]
    row |= {"padding %": 100 * padding, "held GiB": held / GIB, "peak GiB": tracker.peak / GIB, "Python ms": elapsed}
    return {"row": row, "timeline": timeline, "marks": marks}


def meshes(options: argparse.Namespace) -> list[tuple[int, int | None]]:
    """(ranks, shards of a replica or None) of every world asked for."""
    found: list[tuple[int, int | None]] = []
    for ranks in options.ranks:
        if options.mesh in ("1d", "both"):
            found.append((ranks, None))
        if options.mesh in ("hsdp", "both") and ranks > options.shards and ranks % options.shards == 0:
            found.append((ranks, options.shards))
    return found


def count_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every model, mesh and package; the tables of the models are printed as they are done."""
    found = []
    for name in options.model:
        plain = build(name, options.layers, device="meta", dtype=torch.bfloat16)
        alone = milliseconds(plain, torch.zeros(options.tokens, dtype=torch.long, device="meta"))
        del plain
        mine = [count(name, package, *where, options) for where in meshes(options) for package in PACKAGES]
        for each in mine:
            each["row"]["without sharding ms"] = alone
        found += mine
        print_table(
            f"{name}, {options.layers} layers, embedding and head: one step, per rank. float32 shards, bfloat16 compute, "
            f"gradients reduced in {options.reduce_dtype}.\nGiB of a collective: its larger buffer; held: before the step; "
            f"peak: in it, with {options.tokens} token(s).\nPython ms: CPU time of the step on the meta device",
            [{key: value for key, value in each["row"].items() if key != "model"} for each in mine],
        )
    return found


def plot(path: str, found: list[dict[str, Any]]) -> None:
    """Memory over the operations of a step: a panel per model and mesh, a line per package."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for each in found:
        panels.setdefault((each["row"]["model"], each["row"]["mesh"]), []).append(each)
    columns = len({mesh for _, mesh in panels})
    lines = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(lines, columns, figsize=(4 * columns, 3 * lines), squeeze=False)
    for axis, ((name, mesh), members) in zip(axes.flat, panels.items()):
        for each in members:
            events, nbytes = zip(*each["timeline"])
            end = max(events[-1], 1)
            axis.step([event / end for event in events], [n / GIB for n in nbytes], where="post", label=each["row"]["package"])
        axis.set(title=f"{name}, {mesh} ranks", xlabel="operations of the step (fraction)", ylabel="GiB per rank")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS[:-1]))
    made.add_argument("--check", action="store_true", help="also the part check")
    made.add_argument("--model", nargs="+", choices=NAMES, default=list(NAMES))
    made.add_argument("--ranks", nargs="+", type=int, default=list(COUNTED_RANKS), help="worlds to count in")
    made.add_argument("--mesh", choices=("1d", "hsdp", "both"), default="both")
    made.add_argument("--shards", type=int, default=64, help="ranks of a replica, HSDP")
    made.add_argument("--layers", type=int, default=4)
    made.add_argument("--tokens", type=int, default=1, help="tokens in the steps that are counted")
    made.add_argument("--reduce-dtype", choices=("float32", "bfloat16"), default="float32")
    made.add_argument("--rows", type=int, default=0, help="rows of a matrix that this package keeps together; 0: none")
    made.add_argument("--fsdp2-expert-dim", type=int, default=0, help="dimension that FSDP2 cuts fused experts on")
    made.add_argument("--json", help="write the results to this file too")
    made.add_argument("--plot", help="write the memory timelines to this picture; needs matplotlib")
    return made


def main() -> None:
    from benchmarks.parts.python_time import packages_alone, python_time
    from benchmarks.predict.predict import add_options, predict_all
    from benchmarks.predict.step_check import check

    command = parser()
    add_options(command)
    options = command.parse_args()
    torch.set_num_threads(1)
    parts: dict[str, Callable[[argparse.Namespace], Any]] = {
        "count": count_all,
        "python": python_time,
        "predict": predict_all,
        "check": check,
    }
    chosen = {*options.parts, *(["check"] if options.check else [])}
    results: dict[str, Any] = {}
    for part in PARTS:
        if part in chosen:
            results[part] = parts[part](options)
        if part == "python" and part in chosen:
            options.host_us = options.host_us or packages_alone(results[part])
    if options.plot and "count" in results:
        plot(options.plot, results["count"])
    write_json(options.json, results)


if __name__ == "__main__":
    main()
