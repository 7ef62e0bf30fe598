"""Matrices that stay whole on an owner: padding, transfers of Muon and imbalance of large models, modelled, with no process.

    python -m benchmarks.parts.owners [--json PATH] [--models ...] [--ranks 8 16 64 512]

Everything is computed from shapes: the blocks of each model, without embeddings and heads. "flights" are the transfers of cut
matrices to their roots and back, "padding" what collectives send beyond the plan without a policy; both in milliseconds per
step. "imbalance" is the work of the most loaded rank relative to the mean, "bound" the smallest one that whole matrices allow.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

from benchmarks.common.measure import print_table, write_json
from torch_ragged.fsdp import elements, plan_layout
from torch_ragged.offline._models import BUILT_IN
from torch_ragged.optim import muon_policy

ALIGNMENT = 64  # 128 bytes of bfloat16.


def row_of(model: str, ranks: int) -> dict[str, Any]:
    """The plan of a model under the policy, beside the plan without one."""
    policy = muon_policy(lambda name, _: not name.endswith("bias"))
    padding = numel = matrices = 0
    for group, parameters in BUILT_IN[model]().items():
        if group == "rest":
            continue

        def plan(chosen: Any, parameters: Any = parameters) -> Any:
            specs = [(choice or elements()).tensor_spec(one.name, one.shape) for one, choice in zip(parameters, chosen)]
            return plan_layout(specs, ranks, ALIGNMENT)

        layout = policy.choose([(one.name, one) for one in parameters], ranks, plan)
        padding, numel = padding + layout.padding_numel, numel + sum(math.prod(one.shape) for one in parameters)
        taken = {*policy.groups[-1].whole, *policy.groups[-1].cut}
        matrices += sum(math.prod(one.shape) for one in parameters if one.name in taken)
    imbalance, bound = policy.imbalance(ranks)
    flights = sum(group.flight_time for group in policy.groups)
    return {
        "model": model,
        "ranks": ranks,
        "flights without": 1e3 * 4 * matrices * (ranks - 1) / ranks**2 / policy.bandwidth,
        "flights": 1e3 * flights,
        "padding": 1e3 * sum(group.padding_time for group in policy.groups),
        "padding %": 100 * padding / numel,
        "cut": "all" if not any(group.whole for group in policy.groups) else "some" if flights else "none",
        "imbalance": imbalance,
        "bound": bound,
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
    write_json(options.json, {"table": rows})


if __name__ == "__main__":
    main()
