"""Advice for groups whose padding exceeds a limit: changes that reduce it. Each was planned, so its padding is exact."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch_ragged.fsdp.layout._buffer_layout import BufferLayout, TensorSpec
from torch_ragged.fsdp.layout._planner import plan_layout

__all__ = ["PADDING_LIMIT", "Remedy", "advise", "remedies"]

PADDING_LIMIT = 0.05
"""If a group's granularity causes more padding than this, ``fully_shard`` warns. :func:`advise` has the same default limit."""

_MOST_MERGED_TENSORS = 10_000  # Planning a larger group takes too long for advice.


@dataclass(frozen=True)
class Remedy:
    """A change in words, and the padding after it, relative to the elements of the changed groups."""

    text: str
    padding_fraction: float

    def __str__(self) -> str:
        return f"{self.text}: {self.padding_fraction:,.2%}"


def advise(layouts: Mapping[str, BufferLayout], limit: float = PADDING_LIMIT) -> list[str]:
    """Advice for the groups whose padding exceeds ``limit``: the reason for the padding, and changes that reduce it.

    One text per kind of group that exceeds the limit, with one line per suggestion. Groups of equal tensors are one kind. If no
    tried change is within the limit, the text says so and names the best one.

    Args:
        layouts: the layouts of all groups of a model by name, in the model's order.
        limit: the most padding, relative to the elements of the group.
    """
    kinds: dict[object, list[str]] = {}
    for name, layout in layouts.items():
        cut = tuple((one.shape, one.dims, one.block, one.period, one.segments) for one in layout.tensors)
        kinds.setdefault((cut, layout.ranks, layout.alignment), []).append(name)
    groups = [(names, layouts[names[0]]) for names in kinds.values()]
    texts = []
    for index, (names, layout) in enumerate(groups):
        if layout.padding_fraction > limit:
            neighbours = groups[index + 1 : index + 2] + groups[max(0, index - 1) : index]
            found = remedies(layout, limit, len(names), [(other[0], one) for other, one in neighbours])
            texts.append(_advice_text(names, layout, limit, found))
    return texts


def remedies(
    layout: BufferLayout, limit: float, count: int = 1, neighbours: Sequence[tuple[str, BufferLayout]] = ()
) -> list[Remedy]:
    """For each sort of change, the smallest change whose padding is within ``limit``. If a sort has none, its best change.

    Sorts yield small changes first. ``count`` groups have these tensors, and can be merged; so can one with a neighbour.
    """
    found = []
    for sort in (_finer(layout), _split_groups(layout), _merged_groups(layout, count, neighbours), _smaller_sizes(layout)):
        best = Remedy("no change", layout.padding_fraction)
        for remedy in sort:
            best = min(best, remedy, key=lambda each: each.padding_fraction)
            if remedy.padding_fraction <= limit:
                break
        if best.padding_fraction < layout.padding_fraction:
            found.append(best)
    return found


def _advice_text(names: Sequence[str], layout: BufferLayout, limit: float, found: Sequence[Remedy]) -> str:
    lines = [
        f"{_and_more(names)}: padding {layout.padding_fraction:,.2%} on {layout.ranks:,} ranks exceeds {100 * limit:g}%"
        f" (at least {layout.bound_fraction:,.2%}: {layout.forced_by})"
    ]
    chosen = [remedy for remedy in found if remedy.padding_fraction <= limit]
    if not found:
        lines.append("  no tried change reduces it")
    elif not chosen:
        lines.append("  no tried change brings it within the limit; the best one is")
        chosen = [min(found, key=lambda remedy: remedy.padding_fraction)]
    return "\n".join([*lines, *(f"  - {remedy}" for remedy in chosen)])


def _finer(layout: BufferLayout) -> Iterator[Remedy]:
    """Halve the rows of the largest block and of all blocks with as many rows. Repeat this down to single elements."""
    tensors = layout.tensors
    while any(_rows_of_block(tensor) for tensor in tensors):
        rows = _rows_of_block(max(tensors, key=lambda tensor: (_rows_of_block(tensor) > 0, tensor.block)))
        tensors = tuple(_recut(tensor, rows // 2) if _rows_of_block(tensor) == rows else tensor for tensor in tensors)
        changes: dict[tuple[str, str], list[str]] = {}
        for before, after in zip(layout.tensors, tensors):
            if before != after:
                changes.setdefault((_cut_text(after), _cut_text(before)), []).append(before.name)
        text = ", ".join(f"{new} instead of {old} for {_and_more(names)}" for (new, old), names in changes.items())
        yield Remedy(text, plan_layout(tensors, layout.ranks, layout.alignment).padding_fraction)


def _split_groups(layout: BufferLayout) -> Iterator[Remedy]:
    """Put the tensors of one block size in a group of their own. Last, make one group per block size."""
    parts: dict[int, list[TensorSpec]] = {}
    for tensor in layout.tensors:
        parts.setdefault(tensor.block, []).append(tensor)
    for block, part in parts.items():
        others = [tensor for tensor in layout.tensors if tensor.block != block]
        if others and block > 1:
            text = f"a group of its own for {_and_more([tensor.name for tensor in part])}"
            yield Remedy(text, _padding([part, others], layout))
    if len(parts) > 2:
        yield Remedy(f"{len(parts)} groups, one per block size", _padding(list(parts.values()), layout))


def _merged_groups(layout: BufferLayout, count: int, neighbours: Sequence[tuple[str, BufferLayout]]) -> Iterator[Remedy]:
    """Merge several groups with equal tensors, or merge this group with a neighbour. The neighbour's padding counts too."""
    for number in (2, 4, 8):
        if number <= count and number * len(layout.tensors) <= _MOST_MERGED_TENSORS:
            yield Remedy(f"one group for every {number} of these {count}", _padding([layout.tensors * number], layout))
    for name, neighbour in neighbours:
        if (neighbour.ranks, neighbour.alignment) == (layout.ranks, layout.alignment):
            if len(layout.tensors) + len(neighbour.tensors) <= _MOST_MERGED_TENSORS:
                yield Remedy(f"one group with {name}", _padding([layout.tensors + neighbour.tensors], layout))


def _smaller_sizes(layout: BufferLayout) -> Iterator[Remedy]:
    """Reduce the FSDP size to 7, 6, 5 and 4 eighths, and repeat this from the half. Above 8 ranks, sizes are multiples of 8."""
    whole, tried = layout.ranks, {layout.ranks}
    while whole > 1:
        for ranks in (whole * eighths // 8 for eighths in (7, 6, 5, 4)):
            ranks -= ranks % 8 if ranks > 8 else 0
            if ranks and ranks not in tried:
                tried.add(ranks)
                yield Remedy(f"FSDP size {ranks:,}", plan_layout(layout.tensors, ranks, layout.alignment).padding_fraction)
        whole //= 2


def _padding(groups: Sequence[Sequence[TensorSpec]], layout: BufferLayout) -> float:
    """The padding of all ``groups`` together, each planned with the ranks and the alignment of ``layout``."""
    planned = [plan_layout(tensors, layout.ranks, layout.alignment) for tensors in groups]
    return sum(one.padding_numel for one in planned) / max(1, sum(tensor.numel for tensors in groups for tensor in tensors))


def _rows_of_block(tensor: TensorSpec) -> int:
    """The rows of the largest block; 0 if the tensor may be cut anywhere. An element of a 1-D tensor counts as a row."""
    row = tensor.shape[-1] if len(tensor.shape) > 1 else 1
    return tensor.block // row if tensor.block > 1 and row else 0


def _recut(tensor: TensorSpec, rows: int) -> TensorSpec:
    """The tensor with blocks of ``rows``; of single elements for 0. Of segments, those with the most rows per block change."""
    ndim = len(tensor.shape)
    if tensor.segments:
        parts = [_recut(part, rows) if _rows_of_block(part) == _rows_of_block(tensor) else part for part in tensor.segments]
        return TensorSpec.fused(tensor.name, tensor.shape, parts, tensor.dtype)
    if not rows:
        return replace(tensor, block=1, dims=tuple(range(ndim)))
    row, dims = (tensor.shape[-1], tuple(range(ndim - 1))) if ndim > 1 else (1, tuple(range(ndim)))
    return replace(tensor, block=rows * row, dims=dims)


def _cut_text(tensor: TensorSpec) -> str:
    if tensor.segments:
        return f"segments ({', '.join(map(_cut_text, tensor.segments))})"
    if tensor.block == 1:
        return "cuts anywhere"
    if not tensor.dims:
        return "whole tensors"
    return f"blocks of {_rows_of_block(tensor):,} row{'s' * (_rows_of_block(tensor) > 1)}"


def _and_more(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1:,} more"
