"""Python time per group and step: a forward and backward of many tiny groups that compute nothing, on a fake process group.

A block has the parameters of a transformer block of Llama, seven matrices and two vectors, of 256 rows each, so that at 256
ranks both packages cut them evenly. Its forward is one autograd node that returns its input, and whose backward allocates
gradients and writes nothing. The same stack without sharding is subtracted. The fake process group itself takes time for
each of the ranks it pretends to have, in C++ and the same for both packages: a second set of rows has collectives that return
at once in its place, which leaves the packages alone.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from benchmarks.common.fake_world import PACKAGES, fake_world, make_mesh
from benchmarks.common.measure import interleaved, print_table
from benchmarks.common.tracker import CollectiveLog

RANKS, GROUPS, ROUNDS = 256, 32, 15
SHAPES = ((256, 8),) * 7 + ((256,),) * 2
POLICIES = {
    "float32": MixedPrecisionPolicy(),
    "bfloat16, reduced in float32": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}


class _Nothing(torch.autograd.Function):
    """The input, which every parameter has a part in."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.like = [(parameter.shape, parameter.dtype) for parameter in parameters]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return (gradient, *(torch.empty(shape, dtype=dtype, device=gradient.device) for shape, dtype in ctx.like))


class IdleBlock(nn.Module):
    """A group that computes nothing."""

    def __init__(self) -> None:
        super().__init__()
        for index, shape in enumerate(SHAPES):
            self.register_parameter(f"weight{index}", nn.Parameter(torch.zeros(shape)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Nothing.apply(x, *self.parameters())


class IdleStack(nn.Module):
    """``groups`` of them, one behind the other."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(IdleBlock() for _ in range(groups))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def stepper(fully_shard: Any, groups: int, **options: Any) -> Callable[[], None]:
    """A function that does one step of a stack; sharded unless ``fully_shard`` is None. ``zero_grad`` is part of it."""
    model = IdleStack(groups)
    if fully_shard is not None:
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
    parameters = list(model.parameters())
    x = torch.zeros(1, 1, requires_grad=True)

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        model(x).sum().backward()

    return step


def rows(title: str, mesh: DeviceMesh, rounds: int, groups: int) -> list[dict[str, Any]]:
    """A row per policy: medians of microseconds per group and step, and of the rounds' ratios."""
    found = []
    for policy_name, policy in POLICIES.items():
        steps = {"plain": stepper(None, groups)}
        for package, fully_shard in PACKAGES.items():
            steps[package] = stepper(fully_shard, groups, mesh=mesh, mp_policy=policy)
        times = interleaved(steps, rounds)
        own, other = ([(mine - plain) / groups for mine, plain in zip(times[package], times["plain"])] for package in PACKAGES)
        row = {"mesh": title, "dtypes": policy_name, "plain us": statistics.median(times["plain"]) / groups}
        row |= {"torch_ragged us": statistics.median(own), "FSDP2 us": statistics.median(other)}
        ratios = sorted(mine / theirs for mine, theirs in zip(own, other))
        found.append(row | {"ratio": statistics.median(ratios), "least": ratios[0], "most": ratios[-1]})
    return found


def python_time(options: argparse.Namespace, rounds: int = ROUNDS, groups: int = GROUPS) -> list[dict[str, Any]]:
    """Rows of 1-D and HSDP, with the fake process group's collectives and without any."""
    found = []
    with fake_world(RANKS):
        meshes = {"1-D": make_mesh(RANKS), "HSDP 32 x 8": make_mesh(RANKS, 8)}
        for collectives, replaced in (("fake", contextlib.nullcontext()), ("none", CollectiveLog().installed())):
            with replaced:
                for title, mesh in meshes.items():
                    found += [{"collectives": collectives, **row} for row in rows(title, mesh, rounds, groups)]
    print_table(
        f"Python time per group and step, CPU microseconds, {RANKS} ranks: {groups} groups of {len(SHAPES)} parameters that "
        f"compute nothing, plain module subtracted,\nmedians of {rounds} interleaved rounds; ratio: torch_ragged / FSDP2 of a "
        "round (median, least, most). collectives: those of the fake process group, or none",
        found,
    )
    return found


def packages_alone(found: list[dict[str, Any]]) -> list[float]:
    """Microseconds per group and step of each package, 1-D in mixed precision, without the fake process group's part."""
    (row,) = (row for row in found if (row["collectives"], row["mesh"], row["dtypes"]) == ("none", "1-D", list(POLICIES)[-1]))
    return [row[f"{package} us"] for package in PACKAGES]
