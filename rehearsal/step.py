"""The model of a step: recorded on the null device, replayed with stated costs. ``python -m rehearsal.step``.

Ours beside FSDP2, each with the same model and costs: step time, communication that no kernel hides, copies. It prints
"modelled" over its tables, compares with published numbers, and writes out/modelled-steps.json. The costs are those of
benchmarks/predict/replay.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.fake_world import PACKAGES
from benchmarks.common.transformers import SETTINGS, Setting, Training
from benchmarks.predict.replay import H100, MOVES, Entry, Gpu, Replay, replay, with_host
from rehearsal.null_training import alone, in_a_rehearsal

REDUCTIONS = ("ncclReduceScatter",)
COPY_OUT = ("aten::split_with_sizes_copy",)
COPY_IN = ("aten::_chunk_cat",)


HBM2E = dataclasses.replace(H100, memory=0.85 * 2.4e12)
"""The H100 of torchtitan's tables: 2.4 TB/s, 500 W."""


def gpu_of(name: str) -> Gpu:
    """The device of a setting."""
    return HBM2E if name.startswith("torchtitan") else H100


PUBLISHED = (
    ("torchtitan, table 1", "tokens/s", 5762),
    ("torchtitan, table 3", "tokens/s", 5605),
    ("FlexShard", "tokens/s", 9281),
    ("FlexShard", "exposed ms", 340),
    ("gpt-oss-120b, 64", "copy-out / all-gather %", 12),
    ("gpt-oss-120b, 64", "copy-in / reduce-scatter %", 14),
)
"""What others have measured of FSDP2: torchtitan on 8 and 128 H100 (its llama3_h100_202412_torchtitan.md), FlexShard's README,
and the paper of veScale-FSDP, whose model and ranks for the copies may be others."""


def recorded(setting: Setting, package: str) -> list[Entry]:
    """What rank 0 issues in its third step."""
    with alone(setting.ranks) as mesh:
        training = Training(setting, package, mesh)
        for _ in range(3):
            torch.cuda.synchronize()
            torch.ops.rehearsal.trace(True)
            training.step()
            torch.ops.rehearsal.trace(False)
        names, numbers = torch.ops.rehearsal.traced()
        del training
    return [
        Entry(int(kind), int(stream), name, int(number), int(ranks), int(on), host / 1e9, read, written, work)
        for name, (kind, stream, ranks, on, number, host, read, written, work) in zip(names, numbers.tolist())
    ]


def numbers_of(found: Replay, setting: Setting, work: float) -> dict[str, float]:
    """The row of a replay: milliseconds, and what follows."""
    gathers = found.time_of(lambda entry: entry.name == "ncclAllGather")
    reductions = found.time_of(lambda entry: entry.name in REDUCTIONS)
    return {
        "step ms": 1e3 * found.seconds,
        "tokens/s": setting.batch * setting.tokens / found.seconds,
        "kernels ms": 1e3 * found.kernels,
        "communication ms": 1e3 * found.communication,
        "exposed ms": 1e3 * found.exposed,
        "moves ms": 1e3 * found.time_of(lambda entry: entry.name in MOVES),
        "copy-out / all-gather %": 100 * found.time_of(lambda entry: entry.name in COPY_OUT) / gathers,
        "copy-in / reduce-scatter %": 100 * found.time_of(lambda entry: entry.name in COPY_IN) / reductions,
        "TFLOP/s": work / found.seconds / 1e12,
    }


def modelled(name: str, package: str) -> dict[str, Any]:
    """Both replays of a package's record: with the host's recorded time, and with a host that is never late."""
    setting = SETTINGS[name]
    entries = recorded(setting, package)
    work = sum(entry.work for entry in entries)
    launches = sum(entry.kind == 0 for entry in entries)
    rows = {
        host: numbers_of(replay(entries, with_host(gpu_of(name), factor)), setting, work)
        for host, factor in (("host as recorded", 1.0), ("host never late", 0.0))
    }
    return {"setting": name, "package": package, "launches": launches, "PFLOP": work / 1e15, **rows}


def print_table(rows: list[dict[str, Any]]) -> None:
    """A line per setting and package."""
    columns = ("step ms", "tokens/s", "exposed ms", "communication ms", "moves ms", "TFLOP/s")
    print("modelled: one step of a rank. Step with the recorded host / with a host that is never late\n")
    print(f"| setting | | {' | '.join(columns)} | step / FSDP2 |")
    print("|---|---|" + "---:|" * (len(columns) + 1))
    theirs = {row["setting"]: row for row in rows if row["package"] == "FSDP2"}
    for row in rows:
        hosts = row["host as recorded"], row["host never late"]
        cells = [" / ".join(f"{each[column]:,.0f}" for each in hosts) for column in columns]
        bases = [theirs[row["setting"]][host] for host in ("host as recorded", "host never late")]
        ratio = " / ".join(f"{each['step ms'] / base['step ms']:.3f}" for each, base in zip(hosts, bases))
        print(f"| {row['setting']} | {row['package']} | {' | '.join(cells)} | {ratio} |")


def print_errors(rows: list[dict[str, Any]]) -> None:
    """The model of FSDP2 beside what was published."""
    found = {row["setting"]: row["host as recorded"] for row in rows if row["package"] == "FSDP2"}
    print("\nmodelled FSDP2 beside published numbers, with the recorded host\n")
    print("| setting | | published | modelled | modelled / published |\n|---|---|---:|---:|---:|")
    for setting, column, published in PUBLISHED:
        if setting in found:
            value = found[setting][column]
            print(f"| {setting} | {column} | {published:,} | {value:,.0f} | {value / published:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--package", choices=PACKAGES, help="only this one, inside of a rehearsal")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--json", type=Path, default=Path("out/modelled-steps.json"))
    options = parser.parse_args()
    if options.package:
        print("RESULT" + json.dumps([modelled(name, options.package) for name in options.settings]))
        return
    rows = []
    for name in options.settings:
        for package in PACKAGES:
            rows += in_a_rehearsal("rehearsal.step", ["--package", package, "--settings", name], REHEARSAL_MEMORY="1500000")
    print_table(rows)
    print_errors(rows)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"torch": torch.__version__, "command": sys.argv, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
