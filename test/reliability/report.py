"""Writes docs/reliability.md from the files that the scripts of this folder have written to docs/data.

python test/reliability/report.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DATA = ROOT / "docs/data"

HEAD = """# Reliability

What happens if something fails? `test/reliability/report.py` writes this page from measurements of the scripts beside it.
[Running](running.md) says what to do.

## Faults

Each fault was injected into a small model that trains on {machine}, with torch {torch}; the commands are below the
table.
"Seconds" are from the fault to the error on a rank: the median over ranks and injections, and the longest. The timeout of
collectives was 6 s. Six scripts with other kinds of faults of processes ran side by side, so these times are of a busy machine.
"Lost" counts injections after which the last complete checkpoint did not load.{equal}

"""

COUNTS = {"times": "times", "hangs": "hangs", "not_as_expected": "other outcomes", "data_lost": "lost"}

TAIL = """
```
python test/reliability/process_faults.py --times 20 --json docs/data/reliability_processes.json
python test/reliability/checkpoint_faults.py --times 20 --json docs/data/reliability_checkpoint.json
```
"""


def read(name: str) -> Any:
    path = DATA / name
    return json.loads(path.read_text()) if path.exists() else None


def faults(rows: Sequence[dict[str, Any]], head: str, **values: str) -> str:
    """The table of faults. A count that is the same in all rows is said once, above the table."""
    equal = [name for name in COUNTS if len({found[name] for found in rows}) == 1]
    said = ", ".join(f"{rows[0][name]} {COUNTS[name]}" for name in equal)
    columns = ["fault", "what the user saw", "seconds", *(COUNTS[name] for name in COUNTS if name not in equal)]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for found in rows:
        seconds = "" if found.get("seconds_median") is None else f"{found['seconds_median']:.1f}, {found['seconds_max']:.1f}"
        cells = [found["fault"], found["saw"], seconds, *(found[name] for name in COUNTS if name not in equal)]
        lines.append(f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |")
    return head.format(equal=f" Each fault: {said}." if equal else "", **values) + "\n".join(lines) + "\n"


def long_run(report: dict[str, Any]) -> str:
    growth = report["growth"]
    names = {
        "tensor_bytes": "bytes of live tensors",
        "resident_bytes": "resident memory",
        "files": "open files",
        "threads": "threads",
    }
    is_equal, largest = report["losses_equal"], report["largest_difference"]
    losses = "equal, to the last bit" if is_equal else f"different by at most {largest}"
    lines = [
        "## A long run",
        "",
        f"`python test/reliability/long_run.py --steps {report['steps']} --json docs/data/long_run.json`:",
        f"examples/train_moe.py on {report['ranks']} ranks for {report['steps']} steps with 20 checkpoints, once without a",
        f"break and once with {report['resumes']} resumes (torch {report['torch']}). The losses of all steps are {losses}.",
        "",
        "| what | last fifth of the run / second fifth, by rank |",
        "|---|---|",
    ]
    return "\n".join([*lines, *(f"| {text} | {', '.join(map(str, growth[name]))} |" for name, text in names.items())]) + "\n"


def fuzzing(reports: Sequence[dict[str, Any]]) -> str:
    lines = [
        "## Random programs",
        "",
        "`make fuzz` makes random models, `fully_shard` calls and training sequences (fsdp), random programs of",
        "ragged DTensors (dtensor), and random transfers (transfer). Each is compared with the same program in one process. A",
        "refused case raised a clear error on all ranks. `--replay SEED` runs one again. What DTensor itself gets wrong",
        "without a ragged placement is not compared: `test/fuzz/fuzz_dtensor.py` says what. The seeds are new ones.",
        "",
        "| torch | kind | cases | equal | refused | hangs | wrong or failed | seeds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for report in reports:
        for kind, found in report["kinds"].items():
            counts = [found["counts"].get(status, 0) for status in ("ok", "refused", "hangs", "failed")]
            cells = [report["torch"], kind, found["cases"], *counts, "{} to {}".format(*found["seeds"])]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    files = [read("reliability_processes.json"), read("reliability_checkpoint.json")]
    rows = [each for found in files if found for each in found["rows"]]
    first = next(found for found in files if found)
    page = ROOT / "docs/reliability.md"
    parts = [faults(rows, HEAD, machine=first.get("machine", "2 cores of one machine"), torch=first["torch"]) + TAIL]
    if report := read("long_run.json"):
        parts.append(long_run(report))
    if pairs := re.search(r"^## Pairs of features\n.*?(?=^## )", page.read_text(), re.MULTILINE | re.DOTALL):
        parts.append(pairs[0].rstrip() + "\n")  # Written by hand.
    if reports := [json.loads(path.read_text()) for path in sorted(DATA.glob("fuzz_*.json"))]:
        parts.append(fuzzing(reports))
    page.write_text("\n".join(parts))


if __name__ == "__main__":
    main()
