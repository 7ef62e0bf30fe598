"""Reduction: what a reduction over ranks computes, and how it divides. Every carrier begins its reductions here.

A new reduction is a subclass that overrides :meth:`Reduction.steps`, and no carrier changes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torch_ragged._ranks.groups import is_nccl

__all__ = ["OPS", "SUMS", "Ops", "Reduction", "Steps", "ops_of"]


class Ops(NamedTuple):
    """The ops that a carrier computes, and whether it averages: comparing ops takes longer than a reduction's other lines."""

    known: tuple[Any, ...]
    averages: bool = False


SUMS = Ops((dist.ReduceOp.SUM,))
OPS = Ops((*SUMS.known, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX))
"""The ops of every backend: one rank leaves its values as they are."""

_OPS_OF_NCCL = Ops((*OPS.known, dist.ReduceOp.AVG, dist.ReduceOp.PREMUL_SUM), averages=True)


def ops_of(group: dist.ProcessGroup, device: torch.device) -> Ops:
    """The ops of the backend that carries tensors on ``device``. Equal on all ranks, as the backend is."""
    return _OPS_OF_NCCL if is_nccl(group, device) else OPS


class Steps(NamedTuple):
    """The op of a collective, what its input is divided by before it, in place, and its output after it."""

    op: Any
    before: float = 1
    after: float = 1


@dataclass(frozen=True)
class Reduction:
    """How gradients are reduced: the sum over ranks, divided by ``divisor``. Equal on all ranks, as settings are."""

    divisor: float | None = None  # None: the number of ranks, and that of replicas if there are any.
    sum_only: bool = False  # Whether backends compute sums only, never averages.

    def steps(self, size: int, dtype: torch.dtype, averages: bool) -> Steps:
        """The steps over ``size`` ranks with an output of ``dtype``, by a carrier that may average itself."""
        divisor = size if self.divisor is None else self.divisor
        # NCCL's AVG divides inside the collective, which saves a kernel over the output.
        if averages and not self.sum_only and divisor == size and dtype != torch.float16 and size > 1:
            return Steps(dist.ReduceOp.AVG)
        # A sum of many float16 values may overflow, and dividing all of them first may underflow. So about the square root of
        # the divisor is applied before the sum, and the rest after it. One rank adds nothing.
        before = 1
        if dtype == torch.float16 and size > 1:
            while divisor % before == 0 and divisor / before > before:  # Powers of two, as FSDP2 chooses them.
                before *= 2
        return Steps(dist.ReduceOp.SUM, before, divisor / before)

    def rest(self) -> Reduction:
        """What is left for a second step, over other ranks: the first one has applied the user's divisor, if there is one."""
        return self if self.divisor in (None, 1) else dataclasses.replace(self, divisor=1.0)

    def begin(self, output: torch.Tensor, source: torch.Tensor, size: int, ops: Ops) -> tuple[Any, float]:
        """Divide ``source`` in place; return the op to issue over ``size`` ranks, and what ``output`` is divided by after that.

        If the carrier does not compute the op, all ranks raise a ValueError, and nothing is written or sent.
        """
        steps = self.steps(size, output.dtype, ops.averages)
        # An op with a factor is an object that knows its kind, and kinds do not know the object: it stands on the left.
        if steps.op not in ops.known and not any(steps.op == known for known in ops.known):
            known, name = ", ".join(each.name for each in ops.known), getattr(steps.op, "name", "an op with a factor")
            raise ValueError(
                f"these collectives compute {known} over ranks, but {self} needs {name}: choose other collectives with "
                "set_collectives(), or another reduction"
            )
        if steps.before != 1:
            source.div_(steps.before)  # On the current stream: the collective is issued behind it.
        return steps.op, steps.after
