"""Memory of one rank of 8 to 256, by torch's own caching allocator on the null device: ours beside FSDP2.

``python -m rehearsal.memory`` prints a table and writes out/rehearsed-memory.json. Every allocation, its size and stream, the
order of the calls and the allocator are real. Not in it: CUDA contexts, NCCL's and cuBLAS's buffers.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch

from rehearsal.measure import COUNTERS
from rehearsal.null_training import LAYERS, PACKAGES, Training, alone, in_a_rehearsal

RANKS, STEPS, GIB = (8, 64, 128, 256), 5, 2**30
MALLOCS = COUNTERS.index("cudaMalloc")  # Or chunks of expandable segments.


def measured(name: str, package: str, ranks: int) -> dict[str, Any]:
    """The row of one package. The peaks are those of all steps."""
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0, f"{torch.cuda.memory_allocated()} bytes are left of the last row"
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()
    mallocs = []
    torch.ops.rehearsal.counts(True)
    with alone(ranks) as mesh:
        training = Training(name, package, mesh)
        for _ in range(STEPS):
            training.step()
            mallocs.append(torch.ops.rehearsal.counts(False)[MALLOCS])
        stats = torch.cuda.memory_stats()
        del training
    return {
        "model": name,
        "ranks": ranks,
        "package": package,
        "allocated GiB": stats["allocated_bytes.all.peak"] / GIB,
        "reserved GiB": stats["reserved_bytes.all.peak"] / GIB,
        "cudaMalloc": mallocs[-1],
        "after step 2": mallocs[-1] - mallocs[1],
        "retries": stats["num_alloc_retries"],
    }


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows: a process per package and kind of segments."""
    rows = []
    for segments in options.segments:
        for package in PACKAGES:
            arguments = ["--package", package, "--models", *options.models, "--ranks", *map(str, options.ranks)]
            settings = {"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{segments == 'expandable'}"}
            found = in_a_rehearsal("rehearsal.memory", arguments, **settings)
            rows += [{"segments": segments, **row} for row in found]
    return rows


def print_rows(rows: list[dict[str, Any]]) -> None:
    """A Markdown table: a line per model, ranks and kind of segments."""
    print("rehearsed: peak of five steps in GiB, allocated / reserved, and cudaMalloc in all / after the second step\n")
    print(f"| model | ranks | segments | {' | '.join(PACKAGES)} | reserved / FSDP2 | / FSDP2, even |")
    print("|---|---:|---|---:|---:|---:|---:|---:|")
    cells: dict[tuple[str, int, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        cells.setdefault((row["model"], row["ranks"], row["segments"]), {})[row["package"]] = row
    for (model, ranks, segments), by in cells.items():
        texts = [
            f"{row['allocated GiB']:.2f} / {row['reserved GiB']:.2f}, {row['cudaMalloc']} / {row['after step 2']}"
            for row in (by[package] for package in PACKAGES)
        ]
        ratios = [f"{by[PACKAGES[0]]['reserved GiB'] / by[package]['reserved GiB']:.2f}" for package in PACKAGES[1:]]
        print(f"| {model} | {ranks} | {segments} | {' | '.join([*texts, *ratios])} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--package", choices=PACKAGES, help="only this one, inside of a rehearsal")
    parser.add_argument("--models", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--ranks", nargs="+", type=int, default=list(RANKS))
    parser.add_argument("--segments", nargs="+", choices=("fixed", "expandable"), default=["fixed", "expandable"])
    parser.add_argument("--json", type=Path, default=Path("out/rehearsed-memory.json"))
    options = parser.parse_args()
    if options.package:
        found = [measured(name, options.package, ranks) for name in options.models for ranks in options.ranks]
        print("RESULT" + json.dumps(found))
        return
    rows = run(options)
    print_rows(rows)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"torch": torch.__version__, "command": sys.argv, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
