"""What the groups of a whole model cost on a cluster, for the step model: bytes from the layouts, compute from weights.

Of a group, compute scales with the weights that a token is multiplied by, collectives and copies with its buffers: padding is
in them, as each package has it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.common.models import active_numel, blocks_of, rest_of
from benchmarks.predict.step_model import FSDP2, RAGGED, GroupCost, Link, Network, Schedule, Step, play
from torch_ragged.fsdp import elements, plan_layout, rows
from torch_ragged.offline import Parameter, tensor_specs
from torch_ragged.offline._peers import fsdp2_shard

__all__ = ["CLUSTER", "SCHEDULES", "Machine", "group_costs", "predict"]

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
