"""Predicted steps of whole models on a cluster, from one layer's time: weak and strong scaling.

What is assumed, and can be set: a network (:data:`CLUSTER`), the rate of copies, the host's Python time per group, and the time
of one block, measured (--layer-ms) or from a rate of floating-point operations (--tflops). Of other groups, compute scales
with the weights that a token is multiplied by. Bytes are those of the layouts: padding is in them, as each package has it.

Not in it: attention scores and other compute without weights, the optimizer, routing and its imbalance, stragglers, congestion,
expert and tensor parallelism, and whether the step fits in memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common import print_table
from models import active_numel, blocks_of, rest_of
from step_model import FSDP2, RAGGED, GroupCost, Link, Network, Schedule, Step, play

from torch_ragged.fsdp import elements, plan_layout, rows
from torch_ragged.fsdp.plan import Parameter, tensor_specs
from torch_ragged.fsdp.plan._peers import fsdp2_shard

__all__ = ["CLUSTER", "Machine", "add_options", "group_costs", "predict_all"]

CLUSTER = Network(within=Link(2e-6, 360e9), across=Link(8e-6, 45e9))
"""Nodes of 8 H100 with NVLink, a 400 Gb/s card each: bandwidths that NCCL's own tests reach there; latencies are guesses."""

SCHEDULES = {"torch_ragged": RAGGED, "FSDP2": FSDP2}
GATHERED = 2  # bytes of an element: bfloat16
ALIGNMENT = 64  # elements: 128 bytes of bfloat16


@dataclass(frozen=True)
class Machine:
    """What a step runs on.

    Attributes:
        network: between ranks.
        forward, backward: floating-point operations per second; 2 per weight and token in forward, 4 in backward.
        copies: bytes per second that copies read and write, together.
        host: seconds of Python per group and step, by package.
    """

    network: Network
    forward: float
    backward: float
    copies: float
    host: dict[str, float]


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


def machine_of(name: str, options: argparse.Namespace) -> Machine:
    """The machine asked for; a measured block of model ``name`` sets its rates of compute."""
    forward = backward = options.tflops * 1e12
    if options.layer_ms:
        work = active_numel(name, blocks_of(name, 1)[0]) * options.layer_tokens
        forward, backward = (work * each / (ms / 1e3) for each, ms in zip((2, 4), options.layer_ms))
    host = {package: us / 1e6 for package, us in zip(SCHEDULES, options.host_us)}
    return Machine(CLUSTER, forward, backward, options.copy_gbs * 1e9, host)


def _moved(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (shape[dim], *shape[:dim], *shape[dim + 1 :])


@functools.cache
def shard_numel(package: str, shapes: tuple[tuple[int, ...], ...], shards: int, rows_kept: int, expert_dim: int = 0) -> int:
    """Elements of a rank's shard of a group, padding included.

    FSDP2 cuts fused experts on ``expert_dim`` where that is even, which it asks for; else on dimension 0.
    """
    if package == "FSDP2" and expert_dim:
        even = [len(shape) == 3 and not shape[expert_dim] % shards for shape in shapes]
        shapes = tuple(_moved(shape, expert_dim) if fits else shape for shape, fits in zip(shapes, even))
    kept = rows(rows_kept) if rows_kept else elements()
    parameters = [Parameter(f"p{index}", shape) for index, shape in enumerate(shapes)]
    specs = tensor_specs("", parameters, lambda one: kept if len(one.shape) > 1 else elements())
    return fsdp2_shard(specs, shards) if package == "FSDP2" else plan_layout(specs, shards, ALIGNMENT).shard_numel


def group_costs(
    name: str, package: str, ranks: int, shards: int, tokens: float, machine: Machine, options: argparse.Namespace
) -> list[GroupCost]:
    """Seconds of every group of a model, in forward order: embedding, blocks, head."""
    rest = rest_of(name)
    blocks = blocks_of(name)
    costs = []
    for position, group in enumerate(([rest[0]], *blocks, rest[1:])):
        shapes = tuple(one.shape for one in group)
        weights = active_numel(name, group) if position else 0  # An embedding is looked up.
        shard = shard_numel(package, shapes, shards, options.rows, options.fsdp2_expert_dim)
        costs.append(_cost(shapes, shard, weights * tokens, package, ranks, shards, machine, options))
    costs[-1] = dataclasses.replace(costs[-1], stays=True)
    return costs


def _cost(
    shapes: Sequence[tuple[int, ...]],
    shard: int,
    work: float,
    package: str,
    ranks: int,
    shards: int,
    machine: Machine,
    options: argparse.Namespace,
) -> GroupCost:
    network, numel = machine.network, sum(map(math.prod, shapes))
    reduced = 2 if options.reduce_dtype == "bfloat16" else 4
    # This package's matmuls write gradients where they are reduced from, if the dtypes agree; else they are copied, as FSDP2's.
    copied = 0 if package == "torch_ragged" and reduced == GATHERED else numel * (GATHERED + reduced)
    copied_out = shard * shards * 2 * GATHERED if package == "FSDP2" else 0
    replicas = ranks // shards
    in_node = max(1, network.per_node // shards)
    return GroupCost(
        forward=2 * work / machine.forward,
        backward=4 * work / machine.backward,
        gather=network.all_gather(shard * shards * GATHERED, shards),
        reduce=network.reduce_scatter(shard * shards * reduced, shards),
        all_reduce=network.all_reduce(shard * reduced, replicas, min(in_node, replicas)),
        copy_out=copied_out / machine.copies,
        copy_in=copied / machine.copies,
    )


def predict(name: str, package: str, ranks: int, shards: int, tokens: float, options: argparse.Namespace) -> Step:
    """One forward and backward of the whole model with ``tokens`` per rank."""
    machine = machine_of(name, options)
    costs = group_costs(name, package, ranks, shards, tokens, machine, options)
    return play(costs, schedule_of(package, machine, ranks, shards))


def schedule_of(package: str, machine: Machine, ranks: int, shards: int) -> Schedule:
    """How a package goes about a step on ``machine``: its Python, and the end of this package's backward."""
    network, replicas = machine.network, ranks // shards
    in_node = min(replicas, max(1, network.per_node // shards))
    agreement = network.all_reduce(1, shards) + network.all_reduce(1, replicas, in_node)
    return dataclasses.replace(SCHEDULES[package], agreement=agreement, host=machine.host[package] / 2)


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
