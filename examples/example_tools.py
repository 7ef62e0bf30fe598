"""What the examples share: the start of a process group, the mean of a number over ranks, and a picture of curves."""

from __future__ import annotations

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
    """Draw ``curves`` (name to steps and losses) to a PNG file; each of ``marks`` is a vertical line at a step."""
    from matplotlib.figure import Figure

    path.parent.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(8, 5))
    axes = figure.subplots()
    for name, (steps, losses) in curves.items():
        axes.plot(steps, losses, label=name, linewidth=1.2, marker="o" if len(steps) < 12 else None)
    for name, step in marks.items():
        axes.axvline(step, color="black", linestyle="--", linewidth=0.8, label=name.replace("_", " "))
    axes.set(xlabel="step", ylabel="loss", title=title)
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    print(f"wrote {path}")
