"""The plot of padding against FSDP size.

Importing this file must not need matplotlib: ``plot()`` imports it.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from torch_ragged.offline._report import Report

__all__ = ["check_plot_path", "plot"]

_ENDINGS = (".png", ".svg", ".pdf")


def check_plot_path(path: str) -> None:
    """Check, before any work, that :func:`plot` can write to ``path``.

    Raises:
        ValueError: ``path`` does not end in .png, .svg or .pdf, or matplotlib is not installed.
    """
    if Path(path).suffix not in _ENDINGS:
        raise ValueError(f"--plot {path}: expected a file name that ends in {', '.join(_ENDINGS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: run pip install matplotlib")


def plot(report: Report, path: str) -> None:
    """Plot padding against FSDP size to ``path``, for torch_ragged, its lower bound, FSDP2 and LCM."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    sizes = [plan.ranks for plan in report.plans]
    for name, marker in (("FSDP2", "s"), ("LCM", "^"), ("torch_ragged", "o")):
        axes.plot(sizes, [100 * plan.schemes[name].padding_fraction for plan in report.plans], marker=marker, label=name)
    bound = [100 * plan.bound.padding_fraction for plan in report.plans]
    axes.plot(sizes, bound, color="black", linestyle="dotted", label="lower bound of torch_ragged")
    axes.axhline(100 * report.limit, color="grey", linewidth=0.8, linestyle="dashed", label=f"limit, {100 * report.limit:g}%")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=45)
    axes.minorticks_off()
    axes.set_yscale("symlog", linthresh=0.1)  # Padding ranges from zero to several times the size of the model.
    axes.set_ylim(0, 2 * max(axes.get_ylim()))
    axes.yaxis.set_major_formatter("{x:g}%")
    axes.set(
        xlabel="FSDP size (ranks)", ylabel="padding, of the parameters", title=f"{report.model.name}, {report.granularity}"
    )
    figure.legend(loc="outside lower center", ncols=3)
    with matplotlib.rc_context({"svg.hashsalt": "torch_ragged", "svg.fonttype": "none"}):
        figure.savefig(path, dpi=150)
