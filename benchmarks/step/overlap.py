"""Overlap: how much of a step's communication is hidden behind compute that is long enough to hide it.

    python -m benchmarks.step.overlap [--ranks 2] [--blocks 16] [--dim 2048] [--longer 2] [--rounds 5]
        [--malloc default] [--json PATH] [--trace trace.json] [--plot overlap.png]

Most of compute is a stand-in that takes time and no CPU, as a GPU's takes none of the host's: on a machine without a core
to spare real compute and gloo's threads would take from each other what overlapping gains. A block is a float32 Linear, for
eight rows, and the stand-in. Rounds in which all take turns; times of the slowest rank, differences and ratios of the same
round, medians:

    communication  the collectives alone, over gloo, one after the other, each waited for
    compute        forward and backward of the stack, not sharded: ``longer`` times that
    step           the same of the sharded stack
    exposed        step - compute: what compute does not hide, the package's Python included

The first all-gather and the last reduce-scatter are always exposed. ``--trace`` writes a step of rank 0 for
chrome://tracing or Perfetto, ``--plot`` draws it (matplotlib).
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.common.measure import add_malloc, on_ranks, print_table, write_json
from benchmarks.common.systems import bare_collectives
from torch_ragged.fsdp import fully_shard

PACKAGES: dict[str, Callable[..., Any]] = {"torch_ragged": fully_shard, "FSDP2": torch_fully_shard}
PLAIN, COMPUTE, COMMUNICATION = "plain", "compute", "communication"


class Busy(torch.autograd.Function):
    """The identity, after some time, with nothing to do but wait; its backward too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: tuple[float, float]) -> torch.Tensor:
        ctx.seconds = seconds
        with record_function(COMPUTE):
            time.sleep(seconds[0])
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        with record_function(COMPUTE):
            time.sleep(ctx.seconds[1])
        return gradient, None


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim, bias=False)
        self.seconds = (0.0, 0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Busy.apply(self.linear(x), self.seconds)


class Stack:
    """Blocks, each a group where ``shard`` is given; ``step`` returns its seconds."""

    def __init__(self, shard: Callable[..., Any] | None, options: argparse.Namespace) -> None:
        self.model = nn.Sequential(*(Block(options.dim) for _ in range(options.blocks)))
        if shard is not None:
            mesh = init_device_mesh("cpu", (options.ranks,))
            for block in self.model:
                shard(block, mesh=mesh)
            shard(self.model, mesh=mesh)
        self.x = torch.zeros(8, options.dim, requires_grad=True)

    def by_copy_engine(self) -> Stack:
        self.model.set_persistent_buffers()  # type: ignore[operator]
        self.model.set_collectives("copy_engine")  # type: ignore[operator]
        return self

    def step(self, seconds: tuple[float, float]) -> None:
        for block in self.model:
            block.seconds = seconds
        self.model(self.x).sum().backward()
        self.model.zero_grad()


def timed(function: Callable[[], object]) -> float:
    """Seconds on the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    function()
    longest = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return float(longest)


def measure(rank: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row per package; rank 0 writes the trace."""
    bare = bare_collectives([options.dim**2 // options.ranks] * options.blocks, MixedPrecisionPolicy(), options.blocks)
    alone = statistics.median(timed(bare) for _ in range(5))
    each = options.longer * alone / (3 * options.blocks)  # two all-gathers and a reduce-scatter, taken as alike
    seconds = (each, 2 * each)
    stacks = {name: Stack(None, options) if name == PLAIN else Stack(PACKAGES[name], options) for name in (PLAIN, *PACKAGES)}
    stacks["torch_ragged, copy engine"] = Stack(fully_shard, options).by_copy_engine()
    for stack in stacks.values():
        for _ in range(2):  # The order of the first is followed by the second.
            stack.step((0.0, 0.0))
    actions = {name: functools.partial(stack.step, seconds) for name, stack in stacks.items()} | {COMMUNICATION: bare}
    names = list(actions)
    times = torch.empty(len(names), options.rounds, dtype=torch.float64)
    for turn in range(options.rounds):
        for index in range(len(names)):
            which = (turn + index) % len(names)
            times[which, turn] = timed(actions[names[which]])
    found = dict(zip(names, 1e3 * times))
    communication, compute = found.pop(COMMUNICATION), found.pop(PLAIN)
    rows = []
    for name, step in found.items():
        exposed = step - compute
        numbers = {"communication ms": communication, "compute ms": compute, "step ms": step, "exposed ms": exposed}
        numbers["exposed / communication %"] = 100 * exposed / communication
        rows.append({"package": name, **{title: float(each.median()) for title, each in numbers.items()}})
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        stacks["torch_ragged"].step(seconds)
    if rank == 0:
        profiler.export_chrome_trace(options.trace)
    return rows


def spans(trace: str) -> dict[str, list[tuple[float, float]]]:
    """(start, duration) in milliseconds of compute, all-gathers and exchanges in a trace."""
    kinds = {COMPUTE: COMPUTE, "gloo:broadcast": "all-gather", "gloo:all_to_all": "reduce-scatter"}
    events = json.loads(Path(trace).read_text())["traceEvents"]
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds.values()}
    for event in events:
        name = str(event.get("name"))
        kind = next((kinds[start] for start in kinds if name.startswith(start)), None)
        if kind is not None and event.get("ph") == "X" and event.get("cat") in ("cpu_op", "user_annotation"):
            found[kind].append((event["ts"] / 1e3, event["dur"] / 1e3))
    begin = min(start for each in found.values() for start, _ in each)
    return {kind: sorted((start - begin, length) for start, length in each) for kind, each in found.items()}


def plot(path: str, found: dict[str, list[tuple[float, float]]], title: str) -> None:
    """A line per kind, time to the right."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(10, 2.2))
    for height, each in enumerate(found.values()):
        axis.broken_barh(each, (-height - 0.4, 0.8), edgecolor="white", linewidth=0.4, facecolor=f"C{height}")
    axis.set(yticks=[-height for height in range(len(found))], yticklabels=list(found), xlabel="ms", title=title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--blocks", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--dim", type=int, default=2048, help="rows and columns of a weight; default: %(default)s")
    parser.add_argument("--longer", type=float, default=2, help="compute over communication; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    add_malloc(parser)
    parser.add_argument("--json", help="write the results to this file too")
    parser.add_argument("--trace", help="write a profiler trace of a step to this file")
    parser.add_argument("--plot", help="draw that step; needs matplotlib")
    options = parser.parse_args()
    if options.dim % options.ranks:
        parser.error(f"--dim {options.dim} does not divide by {options.ranks} ranks")
    with tempfile.TemporaryDirectory() as folder:
        options.trace = options.trace or f"{folder}/trace.json"
        rows = on_ranks(options.ranks, measure, options)
        size = f"{options.blocks} blocks of {options.dim} x {options.dim} float32"
        title = f"{size}, {options.ranks} ranks, torch {torch.__version__}"
        print_table(f"{title}: medians of {options.rounds} rounds", rows)
        if options.plot:
            plot(options.plot, spans(options.trace), title)
    write_json(options.json, {"ranks": options.ranks, "blocks": options.blocks, "dim": options.dim, "rows": rows})


if __name__ == "__main__":
    main()
