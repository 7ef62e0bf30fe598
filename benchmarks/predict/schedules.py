"""Schedules of whole models on a cluster, as set_schedule would find them: predicted times, and the bound that none is below.

    python -m benchmarks.predict.schedules [--model llama-3-70b ...] [--worlds 8 64 256 1024] [--extra 0 2] [--json PATH]

Models have all of their layers, on the meta device in a world of a fake process group. Costs of groups are those of cluster.py:
a network, a rate of floating-point operations, bytes of the layouts. FSDP2 is played by step_model.py with the same costs: by
default, and with prefetch lists and reshard values by hand, within as much memory: ``--extra`` modules unsharded more than by
default. The host is never late, and there is no activation checkpointing.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from benchmarks.common.fake_world import fake_world, make_mesh, meta_training
from benchmarks.common.measure import print_table, write_json
from benchmarks.common.models import NAMES, blocks_of, build, shard
from benchmarks.predict.cluster import CLUSTER, group_costs, machine_of
from benchmarks.predict.predict import add_options
from benchmarks.predict.step_model import FSDP2, GroupCost, play
from torch_ragged.fsdp import fully_shard
from torch_ragged.fsdp._groups import module_states
from torch_ragged.fsdp.core._fsdp_state import FSDPState
from torch_ragged.fsdp.schedule._play import PartCosts
from torch_ragged.fsdp.schedule._search import ScheduleSearch
from torch_ragged.fsdp.schedule._trace import Moment, Trace
from torch_ragged.fsdp.tools._replay import CallFacts, Replay


@dataclass(frozen=True)
class ClusterCosts(PartCosts):
    """Collectives take what their bytes take on the cluster. All of them are among the ranks of one mesh dimension."""

    ranks: int = 1

    def of(self, moment: Moment, is_backward: bool) -> tuple[float, float]:
        reduces = CLUSTER.all_reduce if moment.key[0].startswith("all_reduce") else CLUSTER.all_gather
        return self.factor * reduces(moment.nbytes, self.ranks), 0.0

    @property
    def factor(self) -> float:
        """The search asks what is if collectives take longer: it multiplies the costs that it knows."""
        return self.collectives[_FACTOR]


_FACTOR = ("", "factor", "")
_CALLS = CallFacts(without_gradient=frozenset(("root", "embedding")), passes_on=frozenset(["root"]))
"""The root and the embedding get tokens, and the root returns what the head returns."""


def costs_of(states: Mapping[str, FSDPState], groups: Sequence[GroupCost], ranks: int) -> ClusterCosts:
    """Of all parts of a pass, in its order."""
    replay = Replay(dict(states), calls=_CALLS)
    trace = Trace(replay.states)
    trace.start()
    replay.play(list(states.values()))
    names = ["embedding", *(name for name in states if name.startswith("blocks.")), "head"]
    seconds = {}
    for name, group in zip(names, groups, strict=True):
        seconds[("forward", name)], seconds[("backward", name)] = group.forward, group.backward + group.copy_in
    marks = [moment.key for moment in trace.moments if moment.what == "mark"]
    return ClusterCosts({key: seconds.get(key, 0.0) for key in marks}, {_FACTOR: 1.0}, ranks=ranks)


def fsdp2_by_hand(groups: Sequence[GroupCost], extra: int) -> float:
    """The least seconds of FSDP2 with lists and reshard values by hand, with so many modules more than by default."""
    found = []
    for ahead, kept in itertools.product(range(1, extra + 2), range(extra + 1)):
        if ahead - 1 + kept <= extra:
            stays = [
                dataclasses.replace(each, stays=each.stays or at >= len(groups) - 1 - kept) for at, each in enumerate(groups)
            ]
            found.append(play(stays, dataclasses.replace(FSDP2, ahead=ahead)).seconds)
    return min(found)


def rows_of(name: str, ranks: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each memory."""
    machine = machine_of(name, options)
    tokens = min(options.batch_tokens, options.global_tokens / ranks)
    groups = {package: group_costs(name, package, ranks, ranks, tokens, machine, options) for package in machine.host}
    rows = []
    policy = MixedPrecisionPolicy(torch.bfloat16, getattr(torch, options.reduce_dtype))
    with fake_world(ranks), meta_training():
        model = build(name, len(blocks_of(name)), device="meta", dtype=torch.float32)
        shard(model, fully_shard, mesh=make_mesh(ranks), mp_policy=policy)
        states = module_states(model)
        costs = costs_of(states, groups["torch_ragged"], ranks)
        largest = max(group.layout.numel * 2 for state in states.values() for group in state.groups)
        for extra in options.extra:
            order = list(states.values())
            search = ScheduleSearch(states, order, costs, {}, calls=_CALLS, extra_bytes=extra * largest)
            knobs = search.best()
            found = search.start if knobs is None else search.evaluate(knobs)
            by_hand = fsdp2_by_hand(groups["FSDP2"], extra)
            rows.append(
                {
                    "model": name,
                    "ranks": ranks,
                    "tokens": round(tokens),
                    "extra": extra,
                    "start ms": 1e3 * search.start.seconds,
                    "schedule ms": 1e3 * found.seconds,
                    "bound ms": 1e3 * search.bound,
                    "above bound %": 100 * (found.seconds / search.bound - 1),
                    "FSDP2 ms": 1e3 * play(groups["FSDP2"], FSDP2).seconds,
                    "FSDP2 by hand ms": 1e3 * by_hand,
                    "/ FSDP2 by hand": found.seconds / by_hand,
                    "bound / FSDP2": search.bound / by_hand,
                }
            )
    gc.collect()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--worlds", nargs="+", type=int, default=[8, 64, 256, 1024], help="numbers of ranks")
    parser.add_argument("--extra", nargs="+", type=int, default=[0, 2], help="memory, in modules; default: 0 and 2")
    parser.add_argument("--reduce-dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rows", type=int, default=0, help="rows of a matrix that this package keeps together; 0: none")
    parser.add_argument("--fsdp2-expert-dim", type=int, default=1, help="dimension that FSDP2 cuts fused experts on")
    parser.add_argument("--json", help="write the results to this file too")
    add_options(parser)
    options = parser.parse_args()
    options.host_us = [0.0, 0.0]
    torch.set_num_threads(1)
    rows = [row for name in options.model for ranks in options.worlds for row in rows_of(name, ranks, options)]
    title = f"MODELLED: forward and backward, gradients reduced in {options.reduce_dtype}, {options.tflops:g} TFLOP/s"
    print_table(title, rows)
    write_json(options.json, {"rows": rows})


if __name__ == "__main__":
    main()
