"""Host time per group and direction on the null device: ours beside FSDP2, in one process, by turns.

``python -m rehearsal.host_time`` prints a table and writes out/rehearsed-host.json. A stack of groups that compute nothing
(benchmarks/parts/python_time.py), or with ``--model`` the parameters of published models (benchmarks/common/models.py), and
NCCL's process group. Time is that of this process's CPU, without the stand-ins for kernels, and without the same stack
unsharded; waits for the device are between steps. On a GPU a launch takes longer than its stand-in, for both packages alike:
the numbers of launches stand beside the times. So do those of Python functions and of operators that reach torch's dispatcher.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.common.fake_world import PACKAGES
from benchmarks.common.models import NAMES, build, shard
from benchmarks.common.tracker import CallCounter, DispatchCounter
from benchmarks.parts.python_time import POLICIES, IdleStack
from rehearsal.measure import COUNTERS
from rehearsal.null_training import alone, in_a_rehearsal

RANKS, GROUPS, ROUNDS = 256, 32, 15
IDLE = "idle"
DIRECTIONS = ("forward", "backward")
COUNTED = ("calls", "dispatches", "launches", "copies", "events", "waits", "collectives", "allocations")


def host_us() -> float:
    """Of this process so far, without the stand-ins for kernels."""
    return (time.process_time_ns() - torch.ops.rehearsal.stand_in_ns()) / 1e3


def issued() -> Counter[str]:
    """What this process has issued so far."""
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
    return Counter(dict(zip(COUNTERS, torch.ops.rehearsal.counts(False))), allocations=allocations)


class Stepper:
    """Steps of a stack, sharded by a package or by none: microseconds of each, and what the last one issued."""

    def __init__(self, package: str, mesh: DeviceMesh, groups: int, model: str = IDLE, **options: Any) -> None:
        fully_shard: Any = PACKAGES.get(package, lambda module, **options: module)
        if model == IDLE:
            with torch.device("cuda"):
                self.model, self._x = IdleStack(groups), torch.zeros(1, 1, requires_grad=True)
            for module in (*self.model.blocks, self.model):
                fully_shard(module, mesh=mesh, **options)
        else:
            # The model alone computes in the dtype that the packages compute in.
            computed = options["mp_policy"].param_dtype if package == "plain" else None
            made = build(model, groups, device="meta", dtype=computed or torch.float32)
            self.model = shard(made, fully_shard, mesh=mesh, **options)
            self.model.to_empty(device="cuda")
            self._x = torch.zeros(256, dtype=torch.long, device="cuda")
        self._parameters = list(self.model.parameters())
        self.times: dict[str, list[float]] = {direction: [] for direction in DIRECTIONS}
        self.counts: dict[str, Counter[str]] = {direction: Counter() for direction in DIRECTIONS}

    def step(self) -> None:
        self._clear()
        before, start = issued(), host_us()
        output = self.model(self._x).sum()
        times, between = [host_us() - start], issued()
        start = host_us()
        output.backward()
        times.append(host_us() - start)
        for direction, us, counts in zip(DIRECTIONS, times, (between - before, issued() - between)):
            self.times[direction].append(us)
            self.counts[direction] = counts

    def count(self) -> None:
        """Two more steps, whose time does not count: one counts calls, the other one dispatches."""
        for name, counter in (("calls", CallCounter()), ("dispatches", DispatchCounter())):
            self._clear()
            with counter:
                output = self.model(self._x).sum()
            self.counts["forward"][name] = counter.count
            # A hook, because backward runs in a thread of autograd.
            output.register_hook(lambda _, see=getattr(counter, "see", None): sys.setprofile(see))
            with counter:
                output.backward()
            self.counts["backward"][name] = counter.count - self.counts["forward"][name]

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        torch.cuda.synchronize()


def measured(model: str, ranks: int, policy: str, rounds: int, groups: int) -> dict[str, Any]:
    """The row of a model and a policy: microseconds and counts per group and direction, and the rounds' ratios."""
    with alone(ranks) as mesh:
        options = {"mp_policy": POLICIES[policy]}
        steppers = {name: Stepper(name, mesh, groups, model, **options) for name in ("plain", *PACKAGES)}
        groups += 2 * (model != IDLE)  # Embedding and head.
        names = list(steppers)
        gc.disable()
        for turn in range(rounds + 3):
            for index in range(len(names)):
                steppers[names[(turn + index) % len(names)]].step()
        gc.enable()
        plain, row = steppers.pop("plain"), {"model": model, "ranks": ranks, "dtypes": policy}
        plain.count()
        totals = []
        for name, stepper in steppers.items():
            stepper.count()
            own = []
            for direction in DIRECTIONS:
                pairs = list(zip(stepper.times[direction], plain.times[direction]))[3:]
                own.append([(mine - base) / groups for mine, base in pairs])
                row[f"{name} {direction} us"] = statistics.median(own[-1])
                for counted in COUNTED:
                    difference = stepper.counts[direction][counted] - plain.counts[direction][counted]
                    row[f"{name} {direction} {counted}"] = difference / groups
            totals.append([sum(pair) for pair in zip(*own)])
        ratios = sorted(mine / theirs for mine, theirs in zip(*totals))
        del steppers, plain, stepper
    return {**row, "ratio": statistics.median(ratios), "least": ratios[0], "most": ratios[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs="+", choices=(IDLE, *NAMES), default=[IDLE])
    parser.add_argument("--ranks", nargs="+", type=int, default=[RANKS])
    parser.add_argument("--policy", choices=POLICIES, help="only this one, inside of a rehearsal")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--groups", type=int, default=GROUPS, help="of a model: its last blocks, beside embedding and head")
    parser.add_argument("--json", type=Path, default=Path("out/rehearsed-host.json"))
    options = parser.parse_args()
    if options.policy:
        (model,), (ranks,) = options.model, options.ranks
        print("RESULT" + json.dumps(measured(model, ranks, options.policy, options.rounds, options.groups)))
        return
    numbers = ["--rounds", str(options.rounds), "--groups", str(options.groups)]
    rows = []
    for model, ranks, policy in itertools.product(options.model, options.ranks, POLICIES):
        arguments = ["--model", model, "--ranks", str(ranks), "--policy", policy, *numbers]
        rows.append(in_a_rehearsal("rehearsal.host_time", arguments, REHEARSAL_MEMORY="4000000"))
    print(f"rehearsed: host time per group, in forward / in backward, {options.groups} groups, torch {torch.__version__}\n")
    print("| model, ranks | dtypes | | us | " + " | ".join(COUNTED) + " | ratio (least, most) |")
    print("|---|---|---|" + "---:|" * (2 + len(COUNTED)))
    for row in rows:
        for name in PACKAGES:
            cells = [" / ".join(f"{row[f'{name} {direction} us']:.0f}" for direction in DIRECTIONS)]
            cells += [" / ".join(f"{row[f'{name} {direction} {each}']:.1f}" for direction in DIRECTIONS) for each in COUNTED]
            ratio = f"{row['ratio']:.2f} ({row['least']:.2f}, {row['most']:.2f})" if name != "FSDP2" else ""
            print(f"| {row['model']}, {row['ranks']} | {row['dtypes']} | {name} | {' | '.join(cells)} | {ratio} |")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"torch": torch.__version__, "command": sys.argv, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
