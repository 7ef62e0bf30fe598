"""Schedules: their predicted times against measured ones, and FSDP2's settings, on a network that is stated.

    python -m benchmarks.step.schedules [--ranks 4] [--rounds 7] [--models uniform head uneven] [--json PATH]

Collectives take the time of the network (benchmarks/common/delayed_group.py), computation is a wait beside a small real part:
so schedules can be compared on a machine with fewer cores than ranks. For each model and network:

- ``set_schedule("auto")`` records passes and sets a schedule, within the memory of ``--extra`` modules more than by default;
- twelve schedules, with and without that bound, and the chosen one take turns: predicted, and the median of rounds, of the
  slowest rank;
- FSDP2 takes turns with them, on the same network: by default, and with prefetch lists and reshard values by hand, those that
  have at most ``--extra`` modules more than by default unsharded at a time.

``order`` is (pairs in the predicted order - pairs in another one) / pairs, of pairs whose predictions differ by more than 3 %.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from benchmarks.common.delayed_group import DELAYED, DelayedGroup, register_delayed
from benchmarks.common.measure import on_ranks, print_table, write_json
from benchmarks.predict.network import Link
from benchmarks.step.overlap import Busy, timed
from torch_ragged.fsdp import fully_shard
from torch_ragged.fsdp._groups import module_states
from torch_ragged.fsdp.schedule._auto import AutoSchedule
from torch_ragged.fsdp.schedule._search import Knobs, ScheduleSearch

DIM = 128
MODELS = {
    # Of each block: (factor of width, seconds of forward). The last entry is the head, in the root's group.
    "uniform": [(4, 0.006)] * 12 + [(1, 0.006)],
    "head": [(4, 0.005)] * 10 + [(16, 0.030)],
    "uneven": [(1, 0.004), (12, 0.010)] * 5 + [(2, 0.010)],
}
NETWORKS = {"fast": 0.4, "even": 1.0, "slow": 2.0}
"""Seconds of all collectives over those of computation."""
LATENCY = 3e-4


class TimedBlock(nn.Module):
    """Two linear layers, and a wait in forward and a longer one in backward."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DIM, width * DIM, bias=False), nn.Linear(width * DIM, DIM, bias=False)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Busy.apply(self.last(self.first(x)), (self.seconds, 2 * self.seconds))


def stack(shard: Callable[..., Any], name: str, mesh: DeviceMesh) -> nn.Sequential:
    """The blocks, each a group; the head is in the root's."""
    model = nn.Sequential(*(TimedBlock(*block) for block in MODELS[name]))
    for block in model[:-1]:
        shard(block, mesh=mesh)
    return shard(model, mesh=mesh)


def step(model: nn.Module) -> None:
    model(torch.ones(4, DIM)).sum().backward()
    model.zero_grad()


def link_of(name: str, network: str) -> Link:
    """The network on which all collectives of a step take the stated part of its computation."""
    numel = sum(2 * width * DIM * DIM for width, _ in MODELS[name])
    compute = 3 * sum(seconds for _, seconds in MODELS[name])
    return Link(LATENCY, 3 * 4 * numel / (NETWORKS[network] * compute))


def grid(search: ScheduleSearch) -> list[Knobs]:
    """Twelve schedules."""
    largest, kept = max(search.nbytes.values()), (0, 2, len(search.nbytes) - 1)
    return [Knobs(n * largest, n * largest, reductions, count) for n in (1, 3) for reductions in (1, 3) for count in kept]


def fsdp2_settings(units: int, most: int) -> list[tuple[int, int, int]]:
    """(ahead in forward, ahead in backward, unsharded), with at most so many modules unsharded at a time."""
    every = itertools.product((0, 1, 2, 4), (1, 2, 4), sorted({0, 2, 4, units}))
    return [each for each in every if max(each[0] + 1, each[1] + 1) + each[2] <= most]


def set_fsdp2(model: nn.Sequential, ahead: int, behind: int, unsharded: int) -> None:
    """FSDP2's prefetch lists and reshard values by hand."""
    blocks: list[Any] = list(model[:-1])
    for at, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[at + 1 : at + 1 + ahead])
        block.set_modules_to_backward_prefetch(blocks[max(0, at - behind) : at][::-1])
        block.set_reshard_after_forward(at < len(blocks) - unsharded, recurse=False)
    root: Any = model
    root.set_modules_to_forward_prefetch(blocks[:ahead])
    root.set_modules_to_backward_prefetch(blocks[::-1][:behind])


def in_turns(actions: dict[Any, Callable[[], Any]], rounds: int) -> dict[Any, float]:
    """Seconds of each action: the median of rounds in which all take turns."""
    names, times = list(actions), {name: [] for name in actions}
    for turn in range(rounds):
        for index in range(len(names)):
            name = names[(turn + index) % len(names)]
            times[name].append(timed(actions[name]))
    return {name: statistics.median(found) for name, found in times.items()}


def order(predicted: list[float], measured: list[float]) -> float:
    """1: all pairs are in the predicted order; -1: none is."""
    pairs = [
        (predicted[a] - predicted[b]) * (measured[a] - measured[b]) > 0
        for a, b in itertools.combinations(range(len(predicted)), 2)
        if abs(predicted[a] - predicted[b]) > 0.03 * min(predicted[a], predicted[b])
    ]
    return (2 * sum(pairs) - len(pairs)) / len(pairs) if pairs else 1.0


def measure(rank: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each model and network."""
    register_delayed()
    mesh = DeviceMesh.from_group(dist.new_group(backend=DELAYED), "cpu")
    rows = []
    for name, network in itertools.product(options.models, NETWORKS):
        DelayedGroup.link = link_of(name, network)
        ours, theirs = stack(fully_shard, name, mesh), stack(torch_fully_shard, name, mesh)
        states, largest = module_states(ours), max(2 * 4 * width * DIM * DIM for width, _ in MODELS[name])
        for _ in range(2):
            step(ours)
            step(theirs)
        started = in_turns({"start": functools.partial(step, ours)}, options.rounds)["start"]
        ours.set_schedule("auto", extra_bytes=options.extra * largest)  # type: ignore[operator]
        for _ in range(5):
            step(ours)
        auto: Any = next(value for value in ours.__dict__.values() if isinstance(value, AutoSchedule))
        search: ScheduleSearch = auto.search
        chosen: Knobs = auto.knobs or Knobs(largest, largest, 1, 0)
        candidates = list(dict.fromkeys([*grid(search), chosen]))
        found = {knobs: search.evaluate(knobs) for knobs in candidates}
        plans = {knobs: search.schedule(knobs) for knobs in candidates}

        actions: dict[Any, Callable[[], Any]] = {}
        for knobs in candidates:
            actions[knobs] = functools.partial(_step_under, ours, plans[knobs], states)
        units = len(MODELS[name]) - 1
        for setting in dict.fromkeys([(0, 1, 0), *fsdp2_settings(units, 2 + options.extra)]):
            actions[("FSDP2", *setting)] = functools.partial(_fsdp2_step, theirs, setting)
        times = in_turns(actions, options.rounds)
        mine, others = {knobs: times[knobs] for knobs in candidates}, {k: v for k, v in times.items() if k not in candidates}
        fitting = [knobs for knobs in candidates if found[knobs].peak <= search.limit]
        predicted = {knobs: found[knobs].seconds for knobs in candidates}
        rows.append(
            {
                "model": name,
                "network": network,
                "start ms": 1e3 * started,
                "chosen ms": 1e3 * mine[chosen],
                "predicted ms": 1e3 * predicted[chosen],
                "bound ms": 1e3 * search.bound,
                "best of 12 that fit ms": 1e3 * min(mine[knobs] for knobs in fitting),
                "FSDP2 ms": 1e3 * others["FSDP2", 0, 1, 0],
                "FSDP2 by hand ms": 1e3 * min(others.values()),
                "order": order(list(predicted.values()), list(mine.values())),
                "schedules": [
                    {**knobs._asdict(), "predicted": predicted[knobs], "measured": mine[knobs]} for knobs in candidates
                ],
                "FSDP2 settings": {str(setting[1:]): seconds for setting, seconds in others.items()},
            }
        )
    return rows


def _step_under(model: nn.Module, schedule: Any, states: Any) -> None:
    schedule.set_on(states)
    step(model)


def _fsdp2_step(model: nn.Sequential, setting: tuple[int, int, int]) -> None:
    set_fsdp2(model, *setting)
    step(model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=7, help="default: %(default)s")
    parser.add_argument("--extra", type=int, default=2, help="modules; default: %(default)s")
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--json", help="write the results to this file too")
    options = parser.parse_args()
    rows = on_ranks(options.ranks, measure, options)
    shown = [{key: value for key, value in row.items() if key not in ("schedules", "FSDP2 settings")} for row in rows]
    print_table(f"{options.ranks} ranks, torch {torch.__version__}: medians of {options.rounds} rounds", shown)
    write_json(options.json, {"ranks": options.ranks, "rounds": options.rounds, "rows": rows})


if __name__ == "__main__":
    main()
