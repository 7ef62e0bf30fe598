"""Predicted steps of whole models on a cluster, from one layer's time: weak and strong scaling.

What is assumed, and can be set: a network (``CLUSTER`` in cluster.py), the rate of copies, the host's Python time
per group, and the time of one block, measured (--layer-ms) or from a rate of floating-point operations (--tflops).
cluster.py makes the costs of all groups of it, step_model.py the step.

Not in it: attention scores and other compute without weights, the optimizer, routing and its imbalance, stragglers, congestion,
expert and tensor parallelism, and whether the step fits in memory.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

from benchmarks.common.measure import print_table
from benchmarks.predict.cluster import SCHEDULES, predict

__all__ = ["add_options", "predict_all"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the part predict."""
    own = parser.add_argument_group("predict")
    own.add_argument("--predict-ranks", nargs="+", type=int, default=[64, 256, 1024, 4096, 10240])
    own.add_argument("--batch-tokens", type=int, default=8192, help="tokens per rank, weak scaling; of a micro-batch at most")
    own.add_argument("--global-tokens", type=int, default=2**23, help="tokens of a step, strong scaling")
    own.add_argument("--tflops", type=float, default=400.0, help="of matmuls, where no layer was measured")
    own.add_argument("--layer-ms", nargs=2, type=float, metavar=("FORWARD", "BACKWARD"), help="one block of the one --model")
    own.add_argument("--layer-tokens", type=int, default=8192, help="that --layer-ms was measured with")
    own.add_argument("--copy-gbs", type=float, default=2400.0, help="gigabytes per second of copies")
    own.add_argument(
        "--host-us",
        nargs=2,
        type=float,
        metavar=("OWN", "FSDP2"),
        help="Python per group and step; where not given, what the part python measures, without it 1000 and 2300",
    )


def _scaling(name: str, options: argparse.Namespace, strong: bool) -> list[dict[str, Any]]:
    """Rows by mesh and ranks; efficiency is relative to the fewest ranks on that mesh."""
    found = []
    for kind in ("1d", "hsdp"):
        base: dict[str, float] = {}
        for ranks in options.predict_ranks if options.mesh in (kind, "both") else ():
            shards = ranks if kind == "1d" else options.shards
            if ranks % shards or (kind == "hsdp" and ranks == shards):
                continue
            tokens = options.global_tokens / ranks if strong else options.batch_tokens
            turns = math.ceil(tokens / options.batch_tokens)
            row: dict[str, Any] = {"mesh": f"{ranks}" if kind == "1d" else f"{ranks // shards} x {shards}"}
            row["tokens per rank"] = round(tokens)
            seconds = {}
            for package in SCHEDULES:
                step = predict(name, package, ranks, shards, tokens / turns, options)
                seconds[package] = turns * step.seconds
                work = seconds[package] * (ranks if strong else 1)
                row[f"{package} ms"] = 1e3 * seconds[package]
                row[f"{package} exposed %"] = 100 * step.exposed / step.seconds
                row[f"{package} efficiency %"] = 100 * base.setdefault(package, work) / work
            found.append(row | {"ratio": seconds["torch_ragged"] / seconds["FSDP2"]})
    return found


def predict_all(options: argparse.Namespace) -> dict[str, Any]:
    """Weak and strong scaling of every model."""
    options.host_us = options.host_us or [1000.0, 2300.0]
    compute = f"{options.tflops:g} TFLOP/s assumed" if options.layer_ms is None else f"block measured, {options.layer_ms} ms"
    weak = f"weak scaling, {options.batch_tokens:,} tokens per rank"
    strong = f"strong scaling, {options.global_tokens:,} tokens in micro-batches of at most {options.batch_tokens:,}"
    python = "Python {:.0f} and {:.0f} us per group".format(*options.host_us)
    found: dict[str, Any] = {}
    for name in options.model:
        for title in (weak, strong):
            table = _scaling(name, options, title is strong)
            print_table(
                f"PREDICTED: whole {name}, forward and backward, {title}; {compute}; {python}.\nexposed: of the step, "
                "neither forward nor backward; efficiency: relative to the first row of the mesh; ratio: torch_ragged / FSDP2",
                table,
            )
            found[f"{name}, {title}"] = table
    return found
