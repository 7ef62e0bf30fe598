"""Optimizer states in tiers: the time of a training step, its memory beside the prediction, and a run with too little memory.

    python -m benchmarks.step.offload [--parts memory] [--json PATH] [--ranks 2] [--width 1024] [--blocks 6] [--folder DIR]

Three tables:

- steps of the same model under each kind of optimizer, by turns in the same processes, medians; "floor ms" is the time to read
  and write the same files as often as a step does, without training. On a CPU, device and host are the same memory.
- for each kind in a process of its own: the largest resident set in three steps beyond that of the sharded model, beside the
  prediction: gradients, gathered parameters and states in memory (of files: their windows, or the pages of seven groups).
- AdamW's states in files, in a process whose address space is limited (RLIMIT_AS) to what it has after sharding the model and a
  forward and backward, gradients included, and a quarter of the bytes of the states.

In the last two, malloc gives freed blocks of 1 MiB back. By glibc's default, small tensors that a step makes between large ones
hold freed memory: in a model of 168 million parameters, more than the limit leaves.
"""

from __future__ import annotations

import argparse
import functools
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from benchmarks.common.measure import add_malloc, on_ranks, print_table, write_json
from torch_ragged.fsdp import CPUOffloadPolicy, Offload, fully_shard, memory_report, offloaded
from torch_ragged.fsdp.offload._tiers import FileTier
from torch_ragged.optim import AdamW8bit, BlockPolicy

POLICY = BlockPolicy()
PARTS = ["steps", "memory", "limited"]
KINDS = ("none", "FSDP2 CPUOffloadPolicy", "host 0.5", "host 1", "files 0.5", "files 1", "files 1 in backward")
_IN_BACKWARD = " in backward"
_ALL = "parameters in files, too"
MEASURED = ("none", "host 0.5", "host 1", "files 1", _ALL)
KINDS += (_ALL, _ALL + _IN_BACKWARD, "8-bit, none", "8-bit, host 1", "8-bit, files 1")


def sharded(kind: str, options: argparse.Namespace) -> nn.Module:
    """The sharded model."""
    torch.manual_seed(0)
    width = options.width
    blocks = (nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(options.blocks))
    model = nn.Sequential(*blocks)
    knobs: dict[str, Any] = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),))}
    shard: Any = torch_fully_shard if kind.startswith("FSDP2") else fully_shard
    where, _, fraction = kind.removesuffix(_IN_BACKWARD).rpartition(", ")[2].partition(" ")
    if shard is torch_fully_shard:
        knobs["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    elif kind.startswith(_ALL):
        knobs["offload_policy"] = Offload(parameters="files", to=options.folder)
    elif fraction:
        knobs["offload_policy"] = Offload(float(fraction), to="cpu" if where == "host" else options.folder)
    if kind.startswith("8-bit"):
        knobs["orig_param_policy"] = POLICY
    for block in model:
        shard(block, **knobs)
    return shard(model, **knobs)


def optimizer_of(kind: str, model: nn.Module, fused: bool = False) -> Any:
    optimizer, extra = (AdamW8bit, {"policy": POLICY}) if kind.startswith("8-bit") else (torch.optim.AdamW, {"fused": fused})
    if "host" in kind or "files" in kind:
        return offloaded(optimizer, model, lr=1e-4, in_backward=kind.endswith(_IN_BACKWARD), **extra)
    return optimizer(model.parameters(), lr=1e-4, **extra)


def trainer(model: nn.Module, optimizer: torch.optim.Optimizer, options: argparse.Namespace) -> Callable[[], None]:
    x = torch.randn(options.tokens, options.width)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def traffic(optimizer: Any) -> Callable[[], None]:
    """The reads and writes of one step, by the threads of the tier and of mapped files, without training."""
    chunks = [(chunk, tier) for chunk, tier in optimizer._chunks if isinstance(tier, FileTier)]
    mapped = [group.shards for group in optimizer._of_groups if group.shards.file_nbytes]

    def move() -> None:
        for shards in (*mapped, *reversed(mapped)):  # Forward, and backward.
            shards.prepare()
        for (chunk, tier), (following, _) in zip(chunks, [*chunks[1:], *chunks[:1]]):
            for group in chunk.homes:
                if group.shards.file_nbytes:
                    group.shards.prepare()
                    group.sharded.flat[::1024].mul_(1)  # Each page has to be written.
            tier.fetch(chunk)
            tier.fetch_ahead(following)
            tier.store(chunk)

    return move


def time_steps(rank: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    models = {kind: sharded(kind, options) for kind in options.kinds}
    made = {kind: (model, optimizer_of(kind, model, options.fused)) for kind, model in models.items()}
    steps = {kind: trainer(*pair, options) for kind, pair in made.items()}
    for step in steps.values():
        step(), step()
    floors = {kind: traffic(optimizer) for kind, (_, optimizer) in made.items() if "files" in kind}
    times: dict[str, list[float]] = {kind: [] for kind in options.kinds}
    floor_times: dict[str, list[float]] = {kind: [] for kind in floors}
    for _ in range(options.rounds):
        for functions, results in ((steps, times), (floors, floor_times)):
            for kind, function in functions.items():
                dist.barrier()
                start = time.perf_counter()
                for _ in range(options.steps):  # Several, so that what is written behind is in the time.
                    function()
                dist.barrier()
                results[kind].append((time.perf_counter() - start) / options.steps)
    none = statistics.median(times["none"])
    rows = []
    for kind in options.kinds:
        median, floor = statistics.median(times[kind]), statistics.median(floor_times.get(kind, [0.0]))
        nbytes = made[kind][1].tier_nbytes() if hasattr(made[kind][1], "tier_nbytes") else {}  # type: ignore[operator]
        rows.append(
            {
                "states": kind,
                "step ms": median * 1e3,
                "of none": median / none,
                "floor ms": floor * 1e3,
                "of floor": median / floor if floor else 0.0,
                "files MB/rank": nbytes.get("files", 0) / 1e6,
            }
        )
    return rows


def _status(key: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f"{key}:"))


def mapped_nbytes() -> int:
    """The bytes of mapped scratch files that are in this process's memory."""
    found, is_ours = 0, False
    with open("/proc/self/smaps") as file:
        for line in file:
            words = line.split()
            if not words[0].endswith(":"):
                is_ours = "torch_ragged-offload" in line
            elif is_ours and words[0] == "Rss:":
                found += 1024 * int(words[1])
    return found


def warmed(options: argparse.Namespace) -> nn.Module:
    """The sharded model after a forward and backward: libraries allocate at their first use."""
    model = sharded(options.kind, options)
    # An ordinary step reads all parameters: those in files would all be in memory.
    params = [torch.zeros(1)] if options.kind.startswith(_ALL) else model.parameters()
    trainer(model, torch.optim.SGD(params, lr=0.0), options)()
    model.zero_grad()
    return model


def peak_of(rank: int, options: argparse.Namespace) -> dict[str, Any]:
    """The growth of this process's largest resident set in three steps."""
    model = warmed(options)
    before = _status("VmRSS") - mapped_nbytes()
    optimizer = optimizer_of(options.kind, model)
    report = memory_report(model, optimizer)
    for _ in range(3):
        trainer(model, optimizer, options)()
    predicted = report.peak.total - report.peak.sharded + report.peak.host
    measured = _status("VmHWM") - before
    return {
        "states": options.kind,
        "predicted MB": predicted / 1e6,
        "measured MB": measured / 1e6,
        "ratio": measured / predicted,
    }


def limited(rank: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train under RLIMIT_AS."""
    model = warmed(options)
    states = 8 * sum(param.to_local().numel() for param in model.parameters())  # type: ignore[attr-defined]
    given, gradients = states // 4, states // 2
    limit = _status("VmSize") + gradients + given
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        step = trainer(model, optimizer_of(options.kind, model), options)
        for _ in range(3):
            step()
        ended = "trains"
    except (RuntimeError, MemoryError, OSError) as error:
        ended = f"fails: {str(error).splitlines()[0][:60]}"
    return {"states": options.kind, "states MB": states / 1e6, "given MB": given / 1e6, "three steps": ended}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help='of the first table; "none" is needed')
    parser.add_argument("--fused", action="store_true", help="AdamW(fused=True): one pass over memory, not twelve")
    parser.add_argument("--folder", help="of the scratch files; default: a temporary one")
    add_malloc(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        options.folder = folder
        # Freed memory goes back to the system, so that it is not taken for memory that is held.
        run = functools.partial(argparse.Namespace, **{**vars(options), "malloc": "returning"})
        tables: dict[str, list[dict[str, Any]]] = {}
        for part in options.parts:
            if part == "steps":
                title, tables[part] = f"A step on {options.ranks} ranks", on_ranks(options.ranks, time_steps, options)
            elif part == "memory":
                title = "The largest resident set of one rank, beyond the sharded model"
                tables[part] = [on_ranks(1, peak_of, run(kind=kind)) for kind in MEASURED]
            else:
                title = "One rank in a limited address space"
                tables[part] = [on_ranks(1, limited, run(kind=kind)) for kind in ("none", "files 1")]
            print_table(title, tables[part])
    write_json(options.json, tables)


if __name__ == "__main__":
    main()
