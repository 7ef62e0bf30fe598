"""``visualize``: who sends how many bytes to whom in a plan. It follows from the plan alone: no communication."""

from __future__ import annotations

import os
from collections import Counter
from typing import TextIO, Union

import torch.distributed as dist

from torch_ragged._picture import ends
from torch_ragged.transfer._plan import Plan

__all__ = ["traffic_of", "visualize"]


def traffic_of(plan: Plan) -> tuple[Counter[tuple[int, int]], Counter[int]]:
    """The bytes of each (sender, receiver) pair of global ranks, and the bytes that each rank copies without sending them."""
    sent: Counter[tuple[int, int]] = Counter()
    kept: Counter[int] = Counter()
    for rank in plan.ranks:
        for each in plan.slices_of(rank):
            for atom in each.atoms:
                # An atom is in the slices of all of its ranks. Each message counts at the rank that sends it.
                first, *others = atom.receivers
                if atom.sender == rank:
                    sent[rank, first] += atom.numel * each.dtype.itemsize
                if first == rank:
                    for receiver in others:
                        sent[rank, receiver] += atom.numel * each.dtype.itemsize
            kept[rank] += each.dtype.itemsize * sum(box.numel for copy in each.copies for box in copy.boxes)
    return sent, kept


def visualize(plan: Plan, *, file: Union[str, os.PathLike[str], TextIO, None] = None, max_ranks: int = 16) -> str:
    """Show who sends how many bytes to whom.

    Every rank returns the same text. Only the lowest rank of the plan prints it or writes the file::

        2 tensors, from ranks 0, 1 to ranks 1, 2, 3: 39.1 KiB in 1 round, with buffers of at most 256.0 MiB per rank
        from \\ to        1        2        3   copies
        0          7.9 KiB  7.9 KiB  7.7 KiB
        1                   7.9 KiB  7.8 KiB  7.9 KiB

    Args:
        plan: of :func:`plan`.
        file: a path or an open text file; None: standard output.
        max_ranks: the most rows and columns. Those in the middle are left out.
    """
    sent, kept = traffic_of(plan)
    senders = sorted({sender for sender, _ in sent} | {rank for rank in kept if kept[rank]})
    receivers = sorted({receiver for _, receiver in sent})
    rows, columns = _shown_ranks(senders, max_ranks), _shown_ranks(receivers, max_ranks)
    table = [["from \\ to", *(_name(rank) for rank in columns), "copies"]]
    for row in rows:
        cells = ["..." if row is None or column is None else _amount(sent[row, column]) for column in columns]
        table.append([_name(row), *cells, "..." if row is None else _amount(kept[row])])
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    lines = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in table]
    text = "\n".join([_headline(plan, sum(sent.values())), *(line.rstrip() for line in lines)]) + "\n"
    if dist.get_rank() == min(plan.ranks):
        if file is None or hasattr(file, "write"):
            print(text, end="", file=file)  # type: ignore[arg-type]
        else:
            with open(file, "w") as opened:  # type: ignore[arg-type]
                opened.write(text)
    return text


def _headline(plan: Plan, sent: int) -> str:
    sides = [sorted(side.ranks) for side in (plan.source, plan.target)]
    source, target = (", ".join("..." if rank is None else str(rank) for rank in _shown_ranks(side, 8)) for side in sides)
    rounds = f"{plan.rounds} round{'' if plan.rounds == 1 else 's'}"
    return (
        f"{len(plan.shapes)} tensors, from ranks {source} to ranks {target}: {_amount(sent) or '0 B'} in {rounds}, with "
        f"buffers of at most {_amount(plan.max_bytes)} per rank"
    )


def _shown_ranks(ranks: list[int], limit: int) -> list[int | None]:
    first, hidden, last = ends(ranks, limit)
    return [*first, *([None] if hidden else []), *last]


def _name(rank: int | None) -> str:
    return "..." if rank is None else str(rank)


def _amount(count: int) -> str:
    """A number of bytes with a binary unit; nothing for zero."""
    if count < 1024:
        return f"{count} B" if count else ""
    value, units = float(count), iter(("KiB", "MiB", "GiB", "TiB"))
    while value >= 1024:
        value, unit = value / 1024, next(units)
    return f"{value:.1f} {unit}"
