"""Owners: which matrices stay whole on one rank, because an optimizer that needs them whole then moves nothing.

Plans with integers only, before any group exists. It must not know fsdp: the planner comes as an argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch

from torch_ragged.granularity import Granularity, GroupPolicy, rows, tensor
from torch_ragged.optim._blocks import BlockPolicy
from torch_ragged.optim._matrix_groups import MATRIX_NDIMS
from torch_ragged.optim._newton_schulz import newton_schulz_cost

__all__ = ["MuonPolicy", "Owners", "muon_policy"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Owners:
    """What a policy has decided for one buffer. Times are modelled, in seconds per step.

    Attributes:
        ranks: the shards of the buffer.
        whole: the names of the parameters whose matrices stay whole.
        cut: the names of the other parameters that the optimizer takes: their matrices go to roots.
        padding: bytes of padding that the collectives of a step send, beyond those of the plan without a policy.
        padding_time, flight_time: the time of this padding, and of the flights of cut matrices to their roots and back.
    """

    ranks: int
    whole: tuple[str, ...]
    cut: tuple[str, ...]
    padding: int
    padding_time: float
    flight_time: float


class MuonPolicy(GroupPolicy):
    """See :func:`muon_policy`, which makes it. It holds the loads of one model's ranks: use a new one for each model.

    Attributes:
        groups: what it has decided for each buffer, in the order of the calls of ``fully_shard``.
    """

    def __init__(
        self,
        takes: Callable[[str, Any], bool],
        bandwidth: float,
        flops: float,
        sent_bytes: float,
        ns_steps: int,
        momentum_block: Optional[int | tuple[int, int]] = None,
    ) -> None:
        for name, value in (("bandwidth", bandwidth), ("flops", flops), ("sent_bytes", sent_bytes)):
            if not isinstance(value, (int, float)) or not value > 0:
                raise ValueError(f"muon_policy {name} must be a positive number, got {value!r}")
        if not callable(takes):
            raise TypeError(
                f"muon_policy takes must be a function (name, parameter) -> bool, got {takes!r}: for a list of names, pass "
                "lambda name, param: name in names"
            )
        self.takes, self.bandwidth, self.flops, self.sent_bytes, self.ns_steps = takes, bandwidth, flops, sent_bytes, ns_steps
        self._blocks = None if momentum_block is None else BlockPolicy(momentum_block)  # type: ignore[arg-type]
        self.groups: list[Owners] = []
        self._loads: dict[int, _Loads] = {}

    def choose(
        self, params: Sequence[tuple[str, Any]], ranks: int, plan: Callable[[Sequence[Optional[Granularity]]], Any]
    ) -> Any:
        """The layout whose modelled time is the least: padding, flights and the most loaded rank together.

        Candidates: the plan without a policy, and for each size of matrices the plan that keeps all up to this size whole. Each
        is rotated so that ranks with little work so far own its matrices. Ties keep the plan without a policy, so none is worse
        under the model.
        """
        # Of a matrix that is cut: between blocks, if its momentum has blocks.
        uncut: list[Optional[Granularity]] = [
            self._blocks(name, value) if self._blocks is not None and self.takes(name, value) else None
            for name, value in params
        ]
        without = plan(uncut)
        # The loads grow with each call of fully_shard. Ranks call it for the same modules in the same order, so they choose the
        # same layouts without messages. A call on one rank alone would change the later layouts of that rank.
        loads = self._loads.setdefault(ranks, _Loads(torch.zeros(ranks, dtype=torch.float64, device="cpu")))
        # A parameter that tensor parallelism cuts has no whole matrix on any rank.
        mine = [
            len(value.shape) in MATRIX_NDIMS and without.tensors[i].shape == tuple(value.shape) and self.takes(name, value)
            for i, (name, value) in enumerate(params)
        ]
        shapes = [tuple(value.shape) for _, value in params]
        sizes = sorted({math.prod(shape[-2:]) for shape, flag in zip(shapes, mine) if flag})
        best: tuple[float, Any, Owners, _Loads] | None = None
        for limit in (0, *sizes):
            whole = [flag and math.prod(shape[-2:]) <= limit for shape, flag in zip(shapes, mine)]
            units = [_whole_granularity(shape) if w else unit for shape, w, unit in zip(shapes, whole, uncut)]
            layout = without if not any(whole) else plan(units)
            padding = ranks * (layout.shard_numel - without.shard_numel)
            padding_time = padding / ranks * (ranks - 1) * self.sent_bytes / self.bandwidth
            cut = [shape for shape, flag, w in zip(shapes, mine, whole) if flag and not w]
            # bfloat16 to the root and back; ranks send and receive equal parts, and a share of 1 / ranks stays.
            flight_time = 2 * 2 * sum(map(math.prod, cut)) * (ranks - 1) / ranks**2 / self.bandwidth
            # Loads never make it shorter. So it cannot be better, and a rotation need not be searched.
            if best is not None and padding_time + flight_time >= best[0]:
                continue
            layout, after = self._balanced(layout, shapes, whole, cut, loads)
            time = padding_time + flight_time + after.time / self.flops - loads.time / self.flops
            if best is None or time < best[0]:
                names = [[name for (name, _), flag in zip(params, flags) if flag] for flags in (whole, mine)]
                others = tuple(name for name in names[1] if name not in names[0])
                owners = Owners(ranks, tuple(names[0]), others, round(padding * self.sent_bytes), padding_time, flight_time)
                best = time, layout, owners, after
        assert best is not None
        _, layout, owners, self._loads[ranks] = best
        self.groups.append(owners)
        return layout

    def _balanced(
        self,
        layout: Any,
        shapes: Sequence[tuple[int, ...]],
        whole: Sequence[bool],
        cut: Sequence[tuple[int, ...]],
        loads: _Loads,
    ) -> tuple[Any, _Loads]:
        """The layout, rotated so that the most loaded rank has the least work, and the loads with it."""
        owned, shard = torch.zeros_like(loads.owned), layout.shard_numel
        for index, (shape, flag) in enumerate(zip(shapes, whole)):
            if flag:
                cost, size = self._cost(shape), math.prod(shape[-2:])
                # On the CPU by name: fully_shard may run under torch.device("meta"), and these numbers are needed.
                offsets = layout.offsets[index] + size * torch.arange(math.prod(shape[:-2]), device="cpu")
                owned.index_add_(0, offsets // shard, torch.full((len(offsets),), cost, dtype=torch.float64, device="cpu"))
        costs = [self._cost(shape) for shape in cut]
        of_cut = sum(cost * math.prod(shape[:-2]) for cost, shape in zip(costs, cut))
        first = 0
        if any(whole):
            sums = torch.stack([loads.owned + owned.roll(-boundary) for boundary in layout.free_boundaries])
            most, squares = sums.amax(1).tolist(), sums.square().sum(1).tolist()  # Of equal maxima, the most even one.
            first = layout.free_boundaries[min(range(len(most)), key=lambda index: (most[index], squares[index]))]
        after = _Loads(loads.owned + owned.roll(-first), loads.cut + of_cut, max([loads.largest, *costs]))
        return layout.rotated(first) if first else layout, after

    def _cost(self, shape: Shape) -> float:
        """The work with one matrix of a stack."""
        return newton_schulz_cost(shape[-2], shape[-1], self.ns_steps)

    def imbalance(self, ranks: int) -> tuple[float, float]:
        """The modelled work of the most loaded of ``ranks`` ranks and its lower bound, both relative to the mean.

        Raises:
            ValueError: no buffer has so many shards.
        """
        if ranks not in self._loads:
            known = " or ".join(map(str, self._loads)) or "none yet: pass the policy to fully_shard first"
            raise ValueError(
                f"MuonPolicy.imbalance takes the ranks over which fully_shard has cut buffers, {known}; got {ranks!r}"
            )
        loads = self._loads[ranks]
        mean = loads.total / ranks
        bound = max(mean, loads.largest)
        return (loads.time / mean, bound / mean) if mean else (1.0, 1.0)


@dataclass(frozen=True)
class _Loads:
    """The work of each rank with the matrices that it owns; of all matrices that are cut, and of the largest of these.

    Cut matrices may have any root, so they go where there is the least work.
    """

    owned: torch.Tensor
    cut: float = 0.0
    largest: float = 0.0

    @property
    def total(self) -> float:
        return self.owned.sum().item() + self.cut

    @property
    def time(self) -> float:
        """The work of the most loaded rank, if cut matrices fill up the others."""
        return max(self.owned.max().item(), self.total / len(self.owned), self.largest)


def _whole_granularity(shape: tuple[int, ...]) -> Granularity:
    return tensor() if len(shape) == 2 else rows(shape[-2])


def muon_policy(
    takes: Optional[Callable[[str, Any], bool]] = None,
    *,
    bandwidth: float = 50e9,
    flops: float = 400e12,
    sent_bytes: float = 8.0,
    ns_steps: int = 5,
    momentum_block: Optional[int | tuple[int, int]] = None,
) -> MuonPolicy:
    """An ``orig_param_policy`` that knows Muon: matrices stay whole on an owner where this takes less time than moving them.

    A matrix that is whole on a rank is not moved by :class:`Muon`; a step with all matrices local issues no collective. But
    whole matrices may need padding, which every all-gather and reduce-scatter sends::

        policy = muon_policy()
        for block in model.layers:
            fully_shard(block, orig_param_policy=policy)      # sees the whole buffer, chooses its layout
        fully_shard(model, orig_param_policy=muon_policy(lambda name, param: False))   # embeddings and head: AdamW
        print(policy.groups[0].whole, policy.imbalance(ranks=8))

    For each buffer it compares, under one cost model, the plan without a policy with plans that keep matrices up to some size
    whole: the padding, the flights of the other matrices to their roots and back, and the work of the most loaded rank. The
    result is never worse than the plan without a policy under the model. Buffers are rotated, so that not the same ranks own
    the expensive matrices of all layers. Values and optimizer results do not depend on it. No communication: all ranks choose
    the same from shapes.

    Args:
        takes: ``(name, parameter) -> bool``, whether Muon trains it. None: all parameters of two to four dimensions.
        bandwidth: bytes per second of a rank in collectives.
        flops: floating-point operations per second in Newton-Schulz.
        sent_bytes: bytes that a step sends per element of a buffer: by default two all-gathers in bfloat16 and one
            reduce-scatter in float32, once per step. With gradient accumulation over n steps, pass n times as much.
        ns_steps: the steps of Newton-Schulz.
        momentum_block: that of the optimizer: matrices that are cut are cut between blocks, also in the plan without a policy.

    Raises:
        TypeError: ``takes`` is no function.
        ValueError: a number is not positive, or ``momentum_block`` is none of :class:`BlockPolicy`.
    """
    return MuonPolicy(takes or (lambda name, param: True), bandwidth, flops, sent_bytes, ns_steps, momentum_block)
