"""Element deltas: of the elements of an atom those whose bits differ from what its receivers hold, and where they are.

It does not know what receivers hold: an execution compares their checksums with that of the baseline.

::

    baseline   a b c d e f g h           source   a b X d e f Y h
    values     X Y                       gaps     2 3                 elements that are equal, before each that is not
    bits       the lowest k bits of each gap, then for each gap as many zeros as the rest of it says, and a one

This is Rice's code of the gaps, with the k that makes it shortest. If one of 100 elements differs, anywhere, it takes 8.11 bits
for its position; the entropy is 8.08.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Union

import torch
import torch.distributed as dist

from torch_ragged.tensor._carry import copy_into, pack, part_view
from torch_ragged.tensor._exchange import Part, parts_within
from torch_ragged.transfer._background import Handle
from torch_ragged.transfer._changes import chunk_bytes, chunks

__all__ = ["CARRIERS", "Baseline", "Delta", "apply_delta", "delta_of"]

CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""By itemsize: dtypes that carry elements of any dtype."""

_HEADER = 12  # Bytes of a chunk: the number of its values, k, and the bytes of its code, as int32. k is -1 without a code.


class Baseline:
    """What the receivers of a plan hold after the last run, as far as this rank has sent it.

    ::

        baseline = transfer.Baseline()                               # once, on every rank
        plan.run(trainer_weights, engine_weights, delta=baseline)    # after every step

    Before each round, a sender compares checksums of 128 bits. A receiver that holds the baseline gets the changed elements
    only. One that holds anything else gets all of them: a new engine, one that has missed a run, one whose weights were
    written. So a baseline may be wrong, and outlives its plan: engines join or leave by a new plan, with the same baseline.
    Engines that are updated at different times need a baseline each.

    It holds a copy of the local tensors from which this rank sends, in the smaller of the two dtypes, on their device.
    """

    def __init__(self) -> None:
        self._sent: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self._last_run: tuple[dist.ProcessGroup, Handle] | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of its memory on this rank."""
        return sum(flat.nbytes for flat in self._sent.values())

    def of(self, name: str, dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
        """What was sent of the local tensor ``like``, as flat as it would be; zeros before the first run."""
        found = self._sent.get((name, dtype))
        if found is None or found.numel() != like.numel() or found.device != like.device:
            found = self._sent[name, dtype] = torch.zeros(like.numel(), dtype=dtype, device=like.device)
        return found

    def enter(self, group: dist.ProcessGroup) -> None:
        """Raise ``ValueError`` if a run on another group is in the background: two threads would write to the baseline."""
        if self._last_run is not None and self._last_run[0] is not group and not self._last_run[1].is_completed():
            raise ValueError(
                "run(delta=): another plan's run with this Baseline is in the background: wait for its handle first"
            )

    def leave(self, group: dist.ProcessGroup, handle: Handle) -> None:
        """Remember the run in the background that was started last."""
        self._last_run = (group, handle)


Delta = Union[Literal["checksum"], Baseline]
"""What ``run(delta=)`` takes."""


def delta_of(
    flat: torch.Tensor, parts: Sequence[Part], baseline: torch.Tensor, baseline_parts: Sequence[Part]
) -> torch.Tensor | None:
    """The elements of ``parts`` whose bits differ from the baseline, with their positions: uint8, 1-D, on the device.

    Elements have the baseline's dtype. Each chunk has positions only if that is shorter. None: all elements are not longer.
    """
    dtype = baseline.dtype
    headers: list[list[int]] = []
    values: list[torch.Tensor] = []
    codes: list[torch.Tensor] = []
    nbytes, whole = 0, sum(part.numel for part in parts) * dtype.itemsize
    size = chunk_bytes(flat.device)  # Elements. It is equal on all ranks, which have devices of one type.
    for old, new in zip(chunks(baseline, baseline_parts, dtype, size), chunks(flat, parts, dtype, size)):
        old, new = _as_integers(old), _as_integers(new)
        differs = (old != new).any(1) if old.ndim == 2 else old != new
        count = int(torch.count_nonzero(differs))
        k, code = -1, new.new_empty(0, dtype=torch.uint8)
        # The code is not longer than with k = 0, a bit of each element.
        if count * dtype.itemsize + len(differs) // 8 + 1 < new.nbytes:
            positions = differs.nonzero().view(-1)
            (k, code), new = _coded(positions), new[positions]
        headers.append([len(new), k, len(code)])
        values.append(new.reshape(-1).view(torch.uint8))
        codes.append(code)
        nbytes += _HEADER + new.nbytes + len(code)
        if nbytes >= whole:
            return None
    table = torch.tensor(headers, dtype=torch.int32, device=flat.device).view(-1).view(torch.uint8)
    return torch.cat([table, *values, *codes])


def apply_delta(delta: torch.Tensor, flat: torch.Tensor, parts: Sequence[Part], dtype: torch.dtype) -> None:
    """Write the elements of :func:`delta_of`, which have ``dtype``, to the parts of a receiver's flat local tensor."""
    numel, size = sum(part.numel for part in parts), chunk_bytes(flat.device)
    table = -(-numel // size) * _HEADER
    headers = delta[:table].clone().view(torch.int32).view(-1, 3).tolist()
    at, code_at = table, table + sum(count for count, _, _ in headers) * dtype.itemsize
    for start, (count, k, code_bytes) in zip(range(0, numel, size), headers):
        values = delta[at : at + count * dtype.itemsize].clone().view(dtype)  # A view could lie where no element may begin.
        code = delta[code_at : code_at + code_bytes]
        at, code_at = at + values.nbytes, code_at + code_bytes
        if not count:
            continue
        within = list(parts_within(parts, start, min(start + size, numel)))
        if k < 0:
            copy_into(flat, values, within)
            continue
        is_view = len(within) == 1 and within[0].is_contiguous
        if is_view:
            chunk = part_view(flat, within[0])
        else:
            chunk = torch.empty(sum(part.numel for part in within), dtype=flat.dtype, device=flat.device)
            pack(chunk, flat, within)
        # As integers: torch does not index all dtypes.
        _as_integers(chunk)[_positions(code, count, k)] = _as_integers(values.to(flat.dtype))
        if not is_view:
            copy_into(flat, chunk, within)


def _as_integers(elements: torch.Tensor) -> torch.Tensor:
    """The bits of 1-D elements: integers of their size, or pairs of int64, as complex numbers would compare by value."""
    if elements.dtype.itemsize == 16:
        return elements.view(torch.int64).view(-1, 2)
    return elements.view(CARRIERS[elements.dtype.itemsize])


def _coded(positions: torch.Tensor) -> tuple[int, torch.Tensor]:
    """The shortest Rice code of ascending positions: k, and bytes of bits, lowest first."""
    if not len(positions):
        return 0, positions.new_empty(0, dtype=torch.uint8)
    gaps = torch.diff(positions, prepend=positions.new_tensor([-1])) - 1
    # A larger k is not shorter: the rests of all gaps would have no more ones and zeros in all than the bit that each gets.
    most = int(positions[-1] // len(gaps)).bit_length()
    k = int(torch.stack([(gaps >> k).sum() + k * len(gaps) for k in range(most + 1)]).argmin())
    ends = ((gaps >> k) + 1).cumsum(0) + (len(gaps) * k - 1)
    bits = torch.zeros((int(ends[-1]) + 8) // 8 * 8, dtype=torch.uint8, device=gaps.device)
    bits[: len(gaps) * k] = ((gaps[:, None] >> torch.arange(k, device=gaps.device)) & 1).view(-1)
    bits[ends] = 1
    return k, (bits.view(-1, 8) << _eight(bits)).sum(1, dtype=torch.uint8)


def _positions(code: torch.Tensor, count: int, k: int) -> torch.Tensor:
    """The reverse: int64."""
    bits = ((code[:, None] >> _eight(code)) & 1).view(-1)
    low = (bits[: count * k].view(count, k) << torch.arange(k, device=code.device)).sum(1)
    ends = bits[count * k :].nonzero().view(-1)
    high = torch.diff(ends, prepend=ends.new_tensor([-1])) - 1
    return ((high << k) + low + 1).cumsum(0) - 1


def _eight(like: torch.Tensor) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)
