"""fit: training within 100, 90, 70, 50 and 35 % of the memory of a step that keeps everything, beside choices by hand.

    python -m benchmarks.step.budget [--parts limited] [--json PATH] [--width 512] [--blocks 6] [--tokens 512] [--folder DIR]

Two tables:

- on one rank in an address space that is limited (RLIMIT_AS) to what it has with the sharded model, and the budget without the
  shards: whether three steps train, with ``fit`` and without it, predicted and measured peak, and whether the parameters have
  the bits of steps without a limit. The measured peak is that of the CPU allocator, with shards, states and windows of files.
- on 2 ranks, steps under ``fit`` by turns with steps under all choices of a grid by hand: so many blocks in torch's
  ``checkpoint_wrapper`` and such a fraction of AdamW's states in files. "best by hand" is the fastest one that keeps within the
  budget by its measured peak.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from benchmarks.common.measure import add_malloc, on_ranks, print_table, write_json
from benchmarks.common.peak import peak_of
from benchmarks.step.offload import _status
from torch_ragged.fsdp import MemoryFit, Offload, fit, fully_shard, offloaded
from torch_ragged.fsdp.budget._activations import STAGING

PARTS = [1.0, 0.9, 0.7, 0.5, 0.35]
FRACTIONS = (0.0, 0.25, 0.5, 0.75, 1.0)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def build(options: argparse.Namespace, recomputed: int = 0, policy: Offload | None = None) -> nn.Module:
    torch.manual_seed(0)
    blocks: list[nn.Module] = [Block(options.width) for _ in range(options.blocks)]
    model = nn.Sequential(*(checkpoint_wrapper(each) if at < recomputed else each for at, each in enumerate(blocks)))
    knobs: dict[str, Any] = {} if policy is None else {"offload_policy": policy}
    for block in model:
        fully_shard(block, **knobs)
    return fully_shard(model, **knobs)


def backward_of(model: nn.Module, options: argparse.Namespace) -> Callable[[], None]:
    x = torch.randn(options.tokens, options.width, generator=torch.Generator().manual_seed(1 + dist.get_rank()))
    return lambda: model(x).square().mean().backward()


def trainer(model: nn.Module, optimizer: torch.optim.Optimizer, options: argparse.Namespace) -> Callable[[], None]:
    backward = backward_of(model, options)

    def step() -> None:
        backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def adamw(model: nn.Module, with_tiers: bool = True) -> Any:
    return offloaded(torch.optim.AdamW, model, lr=1e-4) if with_tiers else torch.optim.AdamW(model.parameters(), lr=1e-4)


def in_memory(model: nn.Module, optimizer: Any, chosen: MemoryFit | None = None) -> int:
    """Bytes of shards, states, and windows of files."""
    sharded = sum(param.to_local().nbytes for param in model.parameters())
    if chosen is not None and chosen.activation_bytes:
        sharded += 2 * STAGING
    if hasattr(optimizer, "tier_nbytes"):
        tiers = optimizer.tier_nbytes()
        return sharded + tiers["device"] + tiers["host"] + tiers["windows"]
    return sharded + sum(
        value.to_local().nbytes for state in optimizer.state.values() for value in state.values() if value.ndim
    )


def digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for param in model.parameters():
        found.update(memoryview(param.to_local().detach().numpy()).cast("B"))  # type: ignore[attr-defined]
    return found.hexdigest()


def unbounded(options: argparse.Namespace) -> MemoryFit:
    """Of a model that is dropped."""
    model = build(options)
    return fit(model, backward_of(model, options), torch.optim.AdamW, device_bytes=2**50, to=options.folder)


def held(chosen: MemoryFit) -> dict[str, Any]:
    """How many units recompute and offload their activations, and the part of the states in files."""
    kinds = [unit.activations for unit in chosen.units]
    states = chosen.offload.optimizer if chosen.offload else 0.0
    return {"recomputed": kinds.count("recomputed"), "offloaded": kinds.count("offloaded"), "states in files": states}


def free_run(rank: int, options: argparse.Namespace) -> dict[str, Any]:
    """Without a limit: the bits after three steps, and the numbers of fit."""
    found = unbounded(options)
    model = build(options)
    step = trainer(model, adamw(model, with_tiers=False), options)
    for _ in range(3):
        step()
    return {"digest": digest(model), "most": found.most_bytes, "least": found.least_bytes}


def limited(rank: int, options: argparse.Namespace) -> dict[str, Any]:
    model = build(options)
    # Libraries allocate at their first use, and malloc keeps an arena for each thread that was.
    peak_of(backward_of(model, options))
    model.zero_grad()
    small = argparse.Namespace(**{**vars(options), "width": 32})
    other = build(small, policy=Offload(to=options.folder))
    trainer(other, adamw(other), small)()
    del other
    shards = sum(param.to_local().nbytes for param in model.parameters())
    limit, (_, hard) = _status("VmSize") + options.budget - shards + options.slack, resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    row: dict[str, Any] = {"MB": options.budget / 1e6, "recomputed": "", "offloaded": "", "states in files": ""}
    chosen = None
    try:
        if options.with_fit:
            chosen = fit(
                model,
                backward_of(model, options),
                torch.optim.AdamW,
                device_bytes=options.budget,
                to=options.folder,
                file_bytes=2**40,
            )
            row.update(held(chosen))
            row["predicted MB"] = chosen.peak_bytes / 1e6
        optimizer = adamw(model, options.with_fit)
        step = trainer(model, optimizer, options)
        for _ in range(3):
            step()
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        row["steps"], row["digest"] = "train", digest(model)
        row["measured MB"] = (in_memory(model, optimizer, chosen) + peak_of(step)) / 1e6
    except (RuntimeError, MemoryError, OSError) as error:
        row["steps"] = f"out of memory: {type(error).__name__}"
    except ValueError as error:
        least = str(error).partition(": the ")[2].partition(", with")[0]
        row["steps"] = f"fit refuses: {least or 'no memory for the dry run'}"
    return row


def grid(rank: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    free = unbounded(options)
    fitted, runs = {}, {}
    for part in options.budgets:
        model = build(options)
        budget = round(part * free.most_bytes)
        try:
            fitted[part] = fit(
                model, backward_of(model, options), torch.optim.AdamW, device_bytes=budget, to=options.folder, file_bytes=2**40
            )
        except ValueError:
            continue
        optimizer = adamw(model)
        runs[f"fit {part}"] = model, optimizer, trainer(model, optimizer, options)
    for recomputed in range(0, options.blocks + 1, options.every):
        for fraction in FRACTIONS:
            model = build(options, recomputed, Offload(fraction, to=options.folder))
            optimizer = adamw(model)
            runs[f"{recomputed} blocks, states {fraction}"] = model, optimizer, trainer(model, optimizer, options)
    peaks = {}
    for name, (model, optimizer, step) in runs.items():
        step()
        chosen = fitted.get(float(name.removeprefix("fit "))) if name.startswith("fit ") else None
        peak = torch.tensor(in_memory(model, optimizer, chosen) + min(peak_of(step) for _ in range(2)))
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        peaks[name] = int(peak)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.rounds):
        for name, (_, _, step) in runs.items():
            dist.barrier()
            begin = time.perf_counter()
            step()
            dist.barrier()
            times[name].append(time.perf_counter() - begin)
    medians = {name: statistics.median(values) for name, values in times.items()}
    rows = []
    for part, chosen in fitted.items():
        fits = [name for name in runs if not name.startswith("fit") and peaks[name] <= chosen.device_bytes]
        best = min(fits, key=medians.__getitem__, default="")
        # By turns: the ratio of each round.
        ratios = [one / other for one, other in zip(times[f"fit {part}"], times[best])] if best else []
        rows.append(
            {
                "budget": part,
                **held(chosen),
                "unsharded": sum(not unit.reshards for unit in chosen.units),
                "predicted / measured": chosen.peak_bytes / peaks[f"fit {part}"],
                "ms": 1e3 * medians[f"fit {part}"],
                "best by hand": best or "none fits",
                "by hand ms": 1e3 * medians[best] if best else 0.0,
                "fit / by hand": statistics.median(ratios) if best else 0.0,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--every", type=int, default=2, help="the grid has every so-many-th number of recomputed blocks")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budgets", type=float, nargs="+", default=PARTS)
    parser.add_argument("--parts", nargs="+", choices=["limited", "grid"], default=["limited", "grid"])
    parser.add_argument("--slack", type=int, default=16 << 20, help="bytes of address space for what no tensor has")
    parser.add_argument("--folder", help="of the scratch files; default: a temporary one")
    add_malloc(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        options.folder = folder
        tables: dict[str, list[dict[str, Any]]] = {}
        if "limited" in options.parts:
            # Freed memory goes back to the system, so that it is not taken for memory that is held.
            run = functools.partial(argparse.Namespace, **{**vars(options), "malloc": "returning"})
            free = on_ranks(1, free_run, run())
            tables["limited"] = []
            for part in options.budgets:
                for with_fit in (True, False):
                    row = on_ranks(1, limited, run(budget=round(part * free["most"]), with_fit=with_fit))
                    same = {None: "", True: "equal", False: "different"}
                    bits = row.pop("digest", None)
                    row["bits"] = same[None if bits is None else bits == free["digest"]]
                    row["predicted / measured"] = row.get("predicted MB", 0.0) / row["measured MB"] if bits else 0.0
                    columns = ("MB", "recomputed", "offloaded", "states in files", "steps", "predicted / measured", "bits")
                    tables["limited"].append(
                        {"budget": part, "fit": "with" if with_fit else "without", **{key: row[key] for key in columns}}
                    )
            print_table("One rank in a limited address space", tables["limited"])
        if "grid" in options.parts:
            tables["grid"] = on_ranks(2, grid, options)
            print_table("Steps on 2 ranks", tables["grid"])
    write_json(options.json, tables)


if __name__ == "__main__":
    main()
