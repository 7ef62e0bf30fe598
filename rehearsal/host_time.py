"""Host time per group and direction on the null device: ours beside FSDP2, in one process, by turns.

``python -m rehearsal.host_time`` prints a table and writes out/rehearsed-host.json. A stack of groups that compute nothing
(benchmarks/parts/python_time.py), 256 ranks, NCCL's process group. Time is that of this process's CPU, without the stand-ins
for kernels, and without the same stack unsharded; waits for the device are between steps. On a GPU a launch takes longer than
its stand-in, for both packages alike: the numbers of launches stand beside the times.
"""

from __future__ import annotations

import argparse
import gc
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
from benchmarks.parts.python_time import POLICIES, IdleStack
from rehearsal.measure import COUNTERS
from rehearsal.null_training import alone, in_a_rehearsal

RANKS, GROUPS, ROUNDS = 256, 32, 15
DIRECTIONS = ("forward", "backward")
COUNTED = ("launches", "copies", "events", "waits", "collectives", "allocations")


def host_us() -> float:
    """Of this process so far, without the stand-ins for kernels."""
    return (time.process_time_ns() - torch.ops.rehearsal.stand_in_ns()) / 1e3


class Stepper:
    """Steps of a stack, sharded by a package or by none: microseconds of each, and what the last one issued."""

    def __init__(self, package: str, mesh: DeviceMesh, groups: int, **options: Any) -> None:
        with torch.device("cuda"):
            self.model, self._x = IdleStack(groups), torch.zeros(1, 1, requires_grad=True)
        if package in PACKAGES:
            for module in (*self.model.blocks, self.model):
                PACKAGES[package](module, mesh=mesh, **options)
        self._parameters = list(self.model.parameters())
        self.times: dict[str, list[float]] = {direction: [] for direction in DIRECTIONS}
        self.counts: Counter[str] = Counter()

    def step(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        torch.cuda.synchronize()
        torch.ops.rehearsal.counts(True)
        allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
        start = host_us()
        output = self.model(self._x).sum()
        middle = host_us()
        output.backward()
        end = host_us()
        self.times["forward"].append(middle - start)
        self.times["backward"].append(end - middle)
        self.counts = Counter(dict(zip(COUNTERS, torch.ops.rehearsal.counts(False))))
        self.counts["allocations"] = torch.cuda.memory_stats()["allocation.all.allocated"] - allocations


def measured(policy: str, rounds: int, groups: int) -> dict[str, Any]:
    """The row of a policy: microseconds and counts per group, and the rounds' ratios."""
    with alone(RANKS) as mesh:
        steppers = {name: Stepper(name, mesh, groups, mp_policy=POLICIES[policy]) for name in ("plain", *PACKAGES)}
        names = list(steppers)
        gc.disable()
        for turn in range(rounds + 3):
            for index in range(len(names)):
                steppers[names[(turn + index) % len(names)]].step()
        gc.enable()
        plain, row = steppers.pop("plain"), {"dtypes": policy}
        for name, stepper in steppers.items():
            for direction in DIRECTIONS:
                pairs = list(zip(stepper.times[direction], plain.times[direction]))[3:]
                stepper.times[direction] = [(mine - base) / groups for mine, base in pairs]
                row[f"{name} {direction} us"] = statistics.median(stepper.times[direction])
            for counted in COUNTED:
                row[f"{name} {counted}"] = (stepper.counts[counted] - plain.counts[counted]) / groups
        totals = ([sum(pair) for pair in zip(*stepper.times.values())] for stepper in steppers.values())
        ratios = sorted(mine / theirs for mine, theirs in zip(*totals))
        del steppers, plain, stepper
    return {**row, "ratio": statistics.median(ratios), "least": ratios[0], "most": ratios[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", choices=POLICIES, help="only this one, inside of a rehearsal")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--groups", type=int, default=GROUPS)
    parser.add_argument("--json", type=Path, default=Path("out/rehearsed-host.json"))
    options = parser.parse_args()
    if options.policy:
        print("RESULT" + json.dumps(measured(options.policy, options.rounds, options.groups)))
        return
    numbers = ["--rounds", str(options.rounds), "--groups", str(options.groups)]
    rows = [in_a_rehearsal("rehearsal.host_time", ["--policy", policy, *numbers]) for policy in POLICIES]
    print(f"rehearsed: host time per group and direction, {RANKS} ranks, {options.groups} groups, torch {torch.__version__}\n")
    print("| dtypes | | forward us | backward us | " + " | ".join(COUNTED) + " | ratio (least, most) |")
    print("|---|---|" + "---:|" * (3 + len(COUNTED)))
    for row in rows:
        for name in PACKAGES:
            cells = [f"{row[f'{name} {direction} us']:.0f}" for direction in DIRECTIONS]
            cells += [f"{row[f'{name} {counted}']:.1f}" for counted in COUNTED]
            ratio = f"{row['ratio']:.2f} ({row['least']:.2f}, {row['most']:.2f})" if name != "FSDP2" else ""
            print(f"| {row['dtypes']} | {name} | {' | '.join(cells)} | {ratio} |")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"torch": torch.__version__, "command": sys.argv, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
