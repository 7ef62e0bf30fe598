"""What planning a whole model costs, and the padding of its plan: four models, four granularities, many FSDP sizes.

The time is CPU time of one thread to plan every group of the model with empty caches, the median of several runs. Padding
is relative to the parameters of the whole model, beside that of the planner's lower bound. Setting: bf16, shards of a
multiple of 64 elements, one group per transformer block and one for the rest; rows are kept on expert matrices, or on
all matrices of a model without experts, and every other parameter is cut anywhere.

``--orders`` plans every group with all of the planner's orders, and without the interleaved ones and the permutations: in how
many groups each kind makes shards smaller, and by how many percentage points of padding.

``--markdown`` prints tables of padding (bound), with those of FSDP2 and of LCM cells (torch_ragged/offline/_peers.py).
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch

from benchmarks.common.measure import microseconds, print_table, write_json
from torch_ragged.fsdp import Granularity, blocks, elements, plan_layout, rows
from torch_ragged.fsdp.layout import _planner
from torch_ragged.offline import BUILT_IN, Model, ModelPlanner, granularity_policy, load_model, tensor_specs

ALIGNMENT = 64
SIZES = (8, 16, 32, 64, 128, 256, 320, 512, 1024, 2048, 4096, 8192)
GRANULARITIES = ("elements", "1", "16", "128")


def granularity_of(text: str) -> Granularity:
    return elements() if text == "elements" else rows(int(text))


def clear_caches() -> None:
    """Forget all that planning remembers."""
    for name, module in list(sys.modules.items()):
        if name.startswith("torch_ragged.fsdp."):
            for function in vars(module).values():
                if hasattr(function, "cache_clear"):
                    function.cache_clear()


def milliseconds(model: Model, granularity: str, ranks: int, repetitions: int) -> float:
    """CPU time to plan all groups of ``model``."""
    policy = granularity_policy(granularity_of(granularity), not model.has_experts)
    groups = [tensor_specs(name, parameters, policy) for name, parameters in model.groups.items()]

    def plan() -> None:
        for tensors in groups:
            plan_layout(tensors, ranks, ALIGNMENT)

    times = []
    for _ in range(repetitions):
        clear_caches()
        times.append(microseconds(plan) / 1e3)
    return statistics.median(times)


def measure(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row per granularity and FSDP size of a model."""
    model, found = load_model(name), []
    for granularity in options.granularity:
        planner = ModelPlanner(model, granularity_policy(granularity_of(granularity), not model.has_experts), ALIGNMENT)
        for ranks in options.ranks:
            plan = planner.plan(ranks)
            shardings = {"padding": plan.ragged, "bound": plan.bound, "FSDP2": plan.fsdp2, "LCM": plan.lcm}
            percents = {f"{label} %": 100 * sharding.padding_fraction for label, sharding in shardings.items()}
            row = {"model": name, "rows": granularity, "ranks": ranks, **percents}
            if options.repetitions:
                row["ms"] = milliseconds(model, granularity, ranks, options.repetitions)
            found.append(row)
    return found


def markdown(name: str, found: list[dict[str, Any]], options: argparse.Namespace) -> str:
    """Padding (bound) of a model by FSDP size and granularity, beside FSDP2 and LCM."""
    kept = {text: "elements" if text == "elements" else f"{text} row{'s' * (text != '1')}" for text in options.granularity}
    cells = {(row["ranks"], row["rows"]): row for row in found}
    lcm = [text for text in kept if text != "elements"]  # LCM cuts no rows at all: elements are the same as 1 row.
    lines = [["ranks", *kept.values(), "FSDP2", *(f"LCM, {kept[text]}" for text in lcm)]]
    lines.append(["---:"] * len(lines[0]))
    for ranks in options.ranks:
        own = {text: cells[ranks, text] for text in kept}
        padding = [f"{row['padding %']:,.2f} ({row['bound %']:,.2f})" for row in own.values()]
        others = [next(iter(own.values()))["FSDP2 %"], *(own[text]["LCM %"] for text in lcm)]
        lines.append([f"{ranks:,}", *padding, *(f"{percent:,.2f}" for percent in others)])
    return "\n".join([f"\n### {name}\n", *(f"| {' | '.join(line)} |" for line in lines)])


def gains_of_orders(names: Sequence[str]) -> list[dict[str, Any]]:
    """What each kind of orders is worth, over all groups of the models, eight granularities and sixteen numbers of ranks."""
    granularities = [elements(), *(rows(n) for n in (1, 16, 32, 96, 128)), blocks(32, 32), blocks(128, 128)]
    sizes = (8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 320, 512, 768, 1024, 2048, 4096)
    every = _planner._improvements

    def without(*left_out: str) -> dict[tuple[Any, ...], float]:
        """The padding of each group in percent, if the planner tries none of these orders."""

        def improvements(*arguments: Any) -> Iterator[tuple[str, list[int], int]]:
            for found in every(*arguments):
                if found[0] in left_out:  # Each is smaller than the last, and these come last.
                    return
                yield found

        clear_caches()
        padding = {}
        with mock.patch.object(_planner, "_improvements", improvements):
            for name, granularity in itertools.product(names, granularities):
                model = load_model(name)
                policy = granularity_policy(granularity, not model.has_experts)
                for group, parameters in model.groups.items():
                    specs = tensor_specs(group, parameters, policy)
                    for ranks in sizes:
                        layout = plan_layout(specs, ranks, ALIGNMENT)
                        padding[name, granularity.text, group, ranks] = 100 * layout.padding_fraction
        return padding

    plans, table = [without(), without("interleaved"), without("interleaved", "permuted")], []
    for kind, more, less in zip(("interleaved", "permuted"), plans, plans[1:]):
        gains = [less[key] - more[key] for key in more if less[key] > more[key]]
        points = {"median points": statistics.median(gains or [0.0]), "most points": max(gains, default=0.0)}
        table.append({"orders": kind, "groups": len(more), "smaller in": len(gains), **points})
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(BUILT_IN), default=list(BUILT_IN), metavar="NAME")
    parser.add_argument("--granularity", nargs="+", choices=GRANULARITIES, default=list(GRANULARITIES), metavar="ROWS")
    parser.add_argument("--ranks", nargs="+", type=int, default=list(SIZES), metavar="SIZE")
    parser.add_argument("--repetitions", type=int, default=5, help="timings of which the median is taken; 0: none")
    parser.add_argument("--markdown", action="store_true", help="print tables of padding (bound) only")
    parser.add_argument("--orders", action="store_true", help="print what each kind of orders is worth only")
    parser.add_argument("--json", help="write the results to this file too")
    options = parser.parse_args()
    if options.orders:
        table = gains_of_orders(options.models)
        print_table(f"what orders are worth, torch {torch.__version__}", table)
        write_json(options.json, {"orders": table})
        return
    if options.markdown:
        options.repetitions = 0
    results = []
    for name in options.models:
        found = measure(name, options)
        results += found
        if options.markdown:
            print(markdown(name, found, options))
        else:
            print_table(f"{name}, torch {torch.__version__}", found)
    if not options.markdown:
        slowest = max(results, key=lambda row: row.get("ms", 0))
        if "ms" in slowest:
            print(f"\nslowest: {slowest['model']} at {slowest['rows']} rows, {slowest['ranks']} ranks: {slowest['ms']:.1f} ms")
    write_json(options.json, {"alignment": ALIGNMENT, "plans": results})


if __name__ == "__main__":
    main()
