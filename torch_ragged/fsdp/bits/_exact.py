"""Exact sums of floating-point numbers: any cut into parts, in any order, has the same result. It knows no model.

Numbers are cut at powers of two into integers, whose sums are exact::

    cuts at 2**0 and 2**-40     5.25 = 5 * 2**0 + 2**38 * 2**-40      0.75 = 1 * 2**0 - 2**38 * 2**-40
    sum                         6 * 2**0 + 0 * 2**-40 = 6.0, rounded once
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from torch_ragged._ranks.agreement import agreement
from torch_ragged._ranks.groups import device_of_messages
from torch_ragged._ranks.peers import issued_on, peers_named

__all__ = ["ExactSum", "reduce_exact", "same_sum", "sum_of"]

_LOWEST = -1074  # The power of the smallest number of float64. All sums are integers times this power.
_FIRST_WIDTH = 44  # Bits of the first integer of a number. The sum of 2**18 is less than 2**63.
_CUT_STEP = 40  # Bits from one cut to the next, and of a digit of a message.
_ALL = _MESSAGE_DIGITS = 53  # Of so many bits is the largest sum.
_HUGE = 2.0**900  # Larger numbers are added one by one.
_CHUNK = 2**15
"""So many elements are added at once. Their float64 copies stay in a cache."""


class ExactSum:
    """The exact sum of float16, bfloat16, float32 or float64 numbers, which grows with :meth:`add`.

    ::

        part = ExactSum()
        part.add(values)
        sum_of(part.numbers(device))     # or of the sum of all ranks' numbers
    """

    def __init__(self) -> None:
        self._total = self._error = 0  # Integers, times 2**_LOWEST.
        self._others = [0, 0, 0]  # The number of NaN, inf and -inf.

    def add(self, values: torch.Tensor, function: Callable[..., torch.Tensor] | None = None, cuts: int = _ALL) -> None:
        """Add ``values``, or a ``function`` of their float64 copies, which is never negative and takes ``out``.

        Squares of float32 are exact there.

        ``cuts``: leave out what is below so many cuts of the largest number; :func:`sum_of` finds whether this matters.
        """
        scratch = torch.empty(2, min(_CHUNK, values.numel()), dtype=torch.float64, device=values.device)
        for chunk in values.detach().reshape(-1).split(_CHUNK) if values.numel() else ():
            rest, rounded = scratch[:, : chunk.numel()].unbind()  # Not a new one each time: pages would be faulted in again.
            rest.copy_(chunk)
            if function is not None:
                function(rest, out=rest)
            largest = float(rest.amax() if function is not None else rest.abs().amax())
            if not largest < _HUGE:
                largest = self._add_huge(rest)
            power, left = math.frexp(largest)[1] - _FIRST_WIDTH, cuts
            while largest:
                power = max(power, _LOWEST)
                # The bits of rest + shift are those of shift, plus the nearest integer to rest / 2**power.
                shift = math.ldexp(1.5, 52 + power)
                torch.add(rest, shift, out=rounded)
                total = int(rounded.view(torch.int64).sum()) - chunk.numel() * _float_bits(shift)
                total = (total + 2**63) % 2**64 - 2**63  # torch's sum wraps.
                self._total += total << power - _LOWEST
                left -= 1
                if power == _LOWEST:
                    break
                if not left:
                    self._error += chunk.numel() << power - _LOWEST  # Each number has lost less than the power of this cut.
                    break
                rest.sub_(rounded.sub_(shift))
                if cuts == _ALL and not rest.abs().amax():
                    break
                power -= _CUT_STEP

    def _add_huge(self, rest: torch.Tensor) -> float:
        """Add infinities, NaN and huge numbers of ``rest``, and set them to zero there. Returns the largest of the others."""
        for index, number in enumerate([rest.isnan().sum(), (rest == math.inf).sum(), (rest == -math.inf).sum()]):
            self._others[index] += int(number)
        rest.masked_fill_(~rest.isfinite(), 0.0)
        huge = rest.abs() >= _HUGE
        self._total += sum(map(int, rest[huge].tolist())) << -_LOWEST  # Huge numbers are integers.
        return float(rest.masked_fill_(huge, 0.0).abs().amax())

    def numbers(self, device: torch.device) -> torch.Tensor:
        """The sum as int64 numbers, those of parts may be added: digits of the sum, and of its error, and others."""
        digits = []
        for total in (self._total, self._error):
            digits += [(total >> _CUT_STEP * place) & (2**_CUT_STEP - 1) for place in range(_MESSAGE_DIGITS - 1)]
            digits.append(total >> _CUT_STEP * (_MESSAGE_DIGITS - 1))  # With the sign.
        return torch.tensor([*digits, *self._others], device=device)


def sum_of(numbers: torch.Tensor) -> float | None:
    """The sum of all that was added, rounded once to a Python float. None if what was left out may change it."""
    *digits, nan, inf, minus = numbers.tolist()
    if nan or (inf and minus):
        return math.nan
    if inf or minus:
        return math.inf if inf else -math.inf
    total = sum(digit << _CUT_STEP * place for place, digit in enumerate(digits[:_MESSAGE_DIGITS]))
    error = sum(digit << _CUT_STEP * place for place, digit in enumerate(digits[_MESSAGE_DIGITS:]))
    low, high = _nearest_float(total - error), _nearest_float(total + error)
    return low if low == high else None


def _nearest_float(total: int) -> float:
    try:
        return total / (1 << -_LOWEST)  # Python rounds a quotient of integers correctly.
    except OverflowError:
        return math.inf if total > 0 else -math.inf


def _float_bits(number: float) -> int:
    """The bits of a float64, as an integer."""
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def same_sum(values: torch.Tensor, group: dist.ProcessGroup | None = None) -> float:
    """The sum of all elements of all ranks' ``values``, exact and rounded once: it does not depend on who has which element::

        tokens_lost = same_sum(losses)     # equal to the bit on 1, 2, 3, ... ranks
        math.fsum(all_losses)              # and to this, in one process

    Args:
        values: a floating-point tensor of any shape, also without elements. It may differ in size between ranks.
        group: the process group; None: all ranks, or this process if there is no group.

    Collectives: an all-reduce of 872 bytes. The host waits for it.

    Raises:
        TypeError: ``values`` is no floating-point tensor. All ranks raise.
        PeerError: a rank died, or did not make this call.
    """
    group = group or dist.group.WORLD
    groups = [] if group is None or group.size() == 1 else [group]
    device = torch.device("cpu") if group is None else device_of_messages(group)
    total = ExactSum()
    with agreement(groups, device, "same_sum") as claim:
        is_plain = isinstance(values, torch.Tensor) and not isinstance(values, DTensor) and values.layout == torch.strided
        if not is_plain or not values.dtype.is_floating_point:
            raise TypeError(f"same_sum adds a plain, dense floating-point tensor (of a DTensor: to_local()), got {values!r}")
        total.add(values.to(device))
        claim.append("same_sum")
    numbers = total.numbers(device)
    reduce_exact(numbers, groups, "same_sum")
    value = sum_of(numbers)
    assert value is not None  # Nothing was left out.
    return value


def reduce_exact(numbers: torch.Tensor, groups: list[dist.ProcessGroup], call: str, op: Any = dist.ReduceOp.SUM) -> None:
    """All-reduce ``numbers``, for which the order of ranks does not matter. ``call``: its name, for errors."""
    for group in groups:
        ticket = issued_on(group).issue(call)
        with peers_named(call, "", functools.partial(dist.get_process_group_ranks, group), [ticket]):
            dist.all_reduce(numbers, op=op, group=group)
