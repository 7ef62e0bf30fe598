"""Muon's matrices under the plan of a model: which ones stay whole at an owner, and what the others cost. Modelled, no process.

The cost model is that of :func:`torch_ragged.optim.muon_policy`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from torch_ragged.fsdp.layout._buffer_layout import BufferLayout
from torch_ragged.fsdp.layout._planner import plan_layout
from torch_ragged.granularity import Granularity
from torch_ragged.offline._models import Model
from torch_ragged.offline._shapes import Parameter
from torch_ragged.optim import muon_policy

__all__ = ["MuonPlan", "muon_plan"]


@dataclass(frozen=True)
class MuonPlan:
    """A model at one FSDP size, with Muon for the matrices of its blocks and ``muon_policy`` for its buffers.

    Times are modelled, in seconds per step.

    Attributes:
        ranks: the FSDP size.
        whole, cut: how many matrices stay whole on one rank, and how many travel to roots.
        flight_time_without: the time of the flights if no matrix stays whole.
        flight_time: the time of the flights of cut matrices.
        padding_time: the time of the padding that whole matrices need.
        padding_fraction: the padding of the blocks, relative to their elements.
        imbalance: the work of the most loaded rank, relative to the mean.
        bound: the least imbalance that matrices of one root allow. Ranks that share matrices may come below it:
            ``Muon(row_blocks=8)``.
    """

    ranks: int
    whole: int
    cut: int
    flight_time_without: float
    flight_time: float
    padding_time: float
    padding_fraction: float
    imbalance: float
    bound: float


def muon_plan(model: Model, ranks: int, granularity: Callable[[Parameter], Granularity], alignment: int) -> MuonPlan:
    """The plan of all blocks of ``model``; what is in no block (embeddings, head) is trained by another optimizer."""
    policy = muon_policy(lambda name, _: not name.endswith("bias"))
    layouts: dict[object, BufferLayout] = {}
    padding = numel = 0
    matrices: dict[str, tuple[int, int]] = {}
    """By name, how many matrices a parameter has, and their elements."""
    for group, parameters in model.groups.items():
        if group == "rest":
            continue

        def plan(chosen: Sequence[Optional[Granularity]], parameters: Sequence[Parameter] = parameters) -> BufferLayout:
            specs = [
                (choice or granularity(one)).tensor_spec(str(index), one.shape)
                for index, (one, choice) in enumerate(zip(parameters, chosen))
            ]
            # Most blocks are equal.
            key = tuple([(spec.shape, spec.dims, spec.block, spec.period, spec.segments) for spec in specs])
            if key not in layouts:
                layouts[key] = plan_layout(specs, ranks, alignment)
            return layouts[key]

        layout: Any = policy.choose([(one.name, one) for one in parameters], ranks, plan)
        padding, numel = padding + layout.padding_numel, numel + sum(math.prod(one.shape) for one in parameters)
        matrices |= {one.name: (math.prod(one.shape[:-2]), math.prod(one.shape)) for one in parameters if len(one.shape) > 1}
    imbalance, bound = policy.imbalance(ranks) if policy.groups else (1.0, 1.0)
    whole = [name for owners in policy.groups for name in owners.whole]
    cut = [name for owners in policy.groups for name in owners.cut]
    taken = sum(matrices[name][1] for name in (*whole, *cut))
    return MuonPlan(
        ranks,
        sum(matrices[name][0] for name in whole),
        sum(matrices[name][0] for name in cut),
        2 * 2 * taken * (ranks - 1) / ranks**2 / policy.bandwidth,
        sum(owners.flight_time for owners in policy.groups),
        sum(owners.padding_time for owners in policy.groups),
        padding / numel if numel else 0.0,
        imbalance,
        bound,
    )
