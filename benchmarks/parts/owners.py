"""Matrices that stay whole on an owner: padding, transfers of Muon and imbalance of large models, modelled, with no process.

    python -m benchmarks.parts.owners [--json PATH] [--models ...] [--ranks 8 16 64 512]

Everything is computed from shapes: the blocks of each model, without embeddings and heads. "flights" are the transfers of cut
matrices to their roots and back, "padding" what collectives send beyond the plan without a policy; both in milliseconds per
step. "imbalance" is the work of the most loaded rank relative to the mean, "bound" the smallest one that whole matrices allow.

A second table has the matrices that neighbours share (``Muon(row_blocks=8)``): the time of the most loaded rank, with its
exchanges, relative to the mean work, when all matrices are whole and when some are shared.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import torch

from benchmarks.common.measure import print_table, write_json
from torch_ragged.fsdp import elements
from torch_ragged.offline._models import BUILT_IN, Model
from torch_ragged.offline._muon import muon_plan
from torch_ragged.optim import Muon
from torch_ragged.optim._gather import Placed
from torch_ragged.optim._roots import assign_roots
from torch_ragged.tensor._ownership import Run
from torch_ragged.tensor._units import Units

ALIGNMENT = 64  # 128 bytes of bfloat16.


def row_of(model: str, ranks: int) -> dict[str, Any]:
    """The plan of a model under the policy, beside the plan without one: as ``torch-ragged plan --muon`` shows it."""
    plan = muon_plan(Model(model, BUILT_IN[model]().groups), ranks, lambda _: elements(), ALIGNMENT)
    return {
        "model": model,
        "ranks": ranks,
        "flights without": 1e3 * plan.flight_time_without,
        "flights": 1e3 * plan.flight_time,
        "padding": 1e3 * plan.padding_time,
        "padding %": 100 * plan.padding_fraction,
        "cut": "all" if not plan.whole else "some" if plan.cut else "none",
        "imbalance": plan.imbalance,
        "bound": plan.bound,
    }


def shared_row_of(model: str, ranks: int) -> dict[str, Any]:
    """Matrices at roots, whole or shared by neighbours."""
    shapes = [
        one.shape
        for group, parameters in BUILT_IN[model]().groups.items()
        for one in parameters
        if group != "rest" and len(one.shape) > 1 and not one.name.endswith("bias")
    ]
    times = {}
    for blocks in (1, 8):
        optimizer = Muon([torch.empty(shape, device="meta") for shape in shapes], row_blocks=blocks)
        placed = [Placed(shape, (ranks,), (Run(len(shape), Units.of([1] * ranks)),)) for shape in shapes]
        times[blocks] = assign_roots(
            [replace(optimizer._stack(each, optimizer.param_groups[0]), owners=None) for each in placed], ranks
        )
    whole, shared = times[1], times[8]
    mean = sum(whole.loads) / ranks
    return {
        "model": model,
        "ranks": ranks,
        "whole": whole.time / mean,
        "shared": shared.time / mean,
        "work only": shared.imbalance,
        "ranks per matrix": max(shared.splits),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--json", help="write the results to this file")
    add("--models", nargs="+", choices=sorted(BUILT_IN), default=sorted(BUILT_IN), help="default: all")
    add("--ranks", type=int, nargs="+", default=[8, 16, 64, 512], help="default: 8 16 64 512")
    options = parser.parse_args()
    rows = [row_of(model, ranks) for model in options.models for ranks in options.ranks]
    print_table("Muon's matrices at their owners, modelled: ms per step", rows)
    shared = [shared_row_of(model, ranks) for model in options.models for ranks in options.ranks if ranks >= 64]
    print_table("Matrices that neighbours share, modelled: the most loaded rank, relative to the mean work", shared)
    write_json(options.json, {"table": rows, "shared": shared})


if __name__ == "__main__":
    main()
