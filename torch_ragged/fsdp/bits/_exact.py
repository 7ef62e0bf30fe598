"""Exact sums of floating-point numbers: any cut into parts, in any order, has the same result. It knows no model.

A number is an integer times a power of two. Integers of equal powers are added in bins, and integer sums are exact::

    0.75 = 3 * 2**-2      bin -2    3 + 1 = 4
    0.25 = 1 * 2**-2
    6.0  = 3 * 2**1       bin 1     3                sum = 4 * 2**-2 + 3 * 2**1, rounded once
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from torch_ragged._ranks.agreement import agreement
from torch_ragged._ranks.groups import device_of_messages
from torch_ragged._ranks.peers import issued_on, peers_named

__all__ = ["ExactSum", "reduce_exact", "same_sum"]

_POWERS = 2048  # Of float64, by its exponent field. The last one has infinities and NaN.
_FRACTION = 52  # Bits.
_LOW = 26  # Bits of an integer that are added apart, so that 2**36 integers of a bin do not overflow int64.
_CHUNK = 2**18
"""So many elements are converted at once. Their float64 and int64 copies stay in a cache."""


class ExactSum:
    """The exact sum of float16, bfloat16, float32 or float64 numbers, which grows with :meth:`add`.

    Attributes:
        bins: int64: the high and the low parts of all integers by power of two, then the number of NaN, inf and -inf.
    """

    def __init__(self, device: torch.device) -> None:
        self.bins = torch.zeros(2 * _POWERS + 3, dtype=torch.int64, device=device)

    def add(self, values: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        """Add ``values``, or a ``function`` of their float64 copies, never negative. Squares of float32 are exact there."""
        high, low, others = self.bins.split([_POWERS, _POWERS, 3])
        for chunk in values.detach().reshape(-1).split(_CHUNK) if values.numel() else ():
            numbers = chunk.to(torch.float64)
            numbers = numbers if function is None else function(numbers)
            bits = numbers.view(torch.int64)
            power = bits.bitwise_right_shift(_FRACTION).bitwise_and_(_POWERS - 1)
            # Subnormal numbers have the field 0, the power of field 1, and no leading one.
            integer = bits.bitwise_and(2**_FRACTION - 1).add_(power.clamp(max=1), alpha=2**_FRACTION)
            if int(power.max()) == _POWERS - 1:
                others += torch.stack([numbers.isnan().sum(), (numbers == math.inf).sum(), (numbers == -math.inf).sum()])
                integer.masked_fill_(power == _POWERS - 1, 0)
            if function is None:
                integer = torch.where(bits < 0, -integer, integer)
            high.scatter_add_(0, power, integer.bitwise_right_shift(_LOW))
            low.scatter_add_(0, power, integer.bitwise_and_(2**_LOW - 1))

    def value(self) -> float:
        """The sum, rounded once to a Python float."""
        *bins, nan, inf, minus = self.bins.tolist()
        if nan or (inf and minus):
            return math.nan
        if inf or minus:
            return math.inf if inf else -math.inf
        total = 0
        for power, (high, low) in enumerate(zip(bins[:_POWERS], bins[_POWERS:])):
            if high or low:
                total += ((high << _LOW) + low) << max(power - 1, 0)
        try:
            return total / (1 << 1074)  # The smallest number of float64. Python rounds a quotient of integers correctly.
        except OverflowError:
            return math.inf if total > 0 else -math.inf


def same_sum(values: torch.Tensor, group: dist.ProcessGroup | None = None) -> float:
    """The sum of all elements of all ranks' ``values``, exact and rounded once: it does not depend on who has which element::

        tokens_lost = same_sum(losses)     # equal to the bit on 1, 2, 3, ... ranks
        math.fsum(all_losses)              # and to this, in one process

    Args:
        values: a floating-point tensor of any shape, also without elements. It may differ in size between ranks.
        group: the process group; None: all ranks, or this process if there is no group.

    Collectives: an all-reduce of 33 KB. The host waits for it.

    Raises:
        TypeError: ``values`` is no floating-point tensor. All ranks raise.
        PeerError: a rank died, or did not make this call.
    """
    group = group or dist.group.WORLD
    groups = [] if group is None or group.size() == 1 else [group]
    device = torch.device("cpu") if group is None else device_of_messages(group)
    total = ExactSum(device)
    with agreement(groups, device, "same_sum") as claim:
        is_plain = isinstance(values, torch.Tensor) and not isinstance(values, DTensor) and values.layout == torch.strided
        if not is_plain or not values.dtype.is_floating_point:
            raise TypeError(f"same_sum adds a plain, dense floating-point tensor (of a DTensor: to_local()), got {values!r}")
        total.add(values.to(device))
        claim.append("same_sum")
    reduce_exact(total.bins, groups, "same_sum")
    return total.value()


def reduce_exact(numbers: torch.Tensor, groups: list[dist.ProcessGroup], call: str, op: Any = dist.ReduceOp.SUM) -> None:
    """All-reduce ``numbers``, for which the order of ranks does not matter. ``call``: its name, for errors."""
    for group in groups:
        ticket = issued_on(group).issue(call)
        with peers_named(call, "", functools.partial(dist.get_process_group_ranks, group), [ticket]):
            dist.all_reduce(numbers, op=op, group=group)
