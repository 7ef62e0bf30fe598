"""What the examples share: the start of a process group, the mean of a number over ranks, and a picture of curves."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

__all__ = ["mean_over_ranks", "start", "write_curves"]


def start() -> tuple[int, int]:
    """Join the process group that torchrun describes, and share the host's cores; this rank, and the number of ranks."""
    dist.init_process_group("gloo")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist.get_world_size()))
    return dist.get_rank(), dist.get_world_size()


def mean_over_ranks(value: torch.Tensor) -> float:
    """The mean of a scalar over all ranks. One all-reduce."""
    value = value.detach().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def write_curves(path: Path, title: str, curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], **marks: float) -> None:
    """Draw ``curves`` (name to steps and losses) to a PNG file; each of ``marks`` is a vertical line at a step.

    The first of several curves is wide and pale, so that one that lies on it does not hide it.
    """
    from matplotlib.figure import Figure

    path.parent.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(8, 5))
    axes = figure.subplots()
    for index, (name, (steps, losses)) in enumerate(curves.items()):
        is_below = index == 0 < len(curves) - 1
        look = {"linewidth": 6, "alpha": 0.35} if is_below else {"linewidth": 1.2, "marker": "o" if len(steps) < 20 else None}
        axes.plot(steps, losses, label=name, **look)
    for (name, step), style in zip(marks.items(), itertools.cycle(("dashed", "dotted", "dashdot"))):
        axes.axvline(step, color="black", linestyle=style, linewidth=1, label=name.replace("_", " "))
    axes.set(xlabel="step", ylabel="loss", title=title)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
