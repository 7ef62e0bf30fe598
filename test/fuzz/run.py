"""Run random cases: ``python test/fuzz/run.py --cases 1000 --seed 0 --kind all --json out/fuzz.json``.

``--replay SEED --kind fsdp`` runs one case again, and prints it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "common"), str(HERE.parent.parent)]
KINDS = ("fsdp", "dtensor", "transfer", "plan", "program", "random")
TABLES = ("pairs", "states", "plans", "placements")
BATCH = 100  # Seeds in a row, of which those of one size share a process group. Each mesh adds groups, whose threads poll.


def batches_of(kind: str, seeds: list[int]) -> list[tuple[str, int, list[int]]]:
    """Seeds of equal size together: (kind, size, seeds). A part of a run has done the first seeds."""
    from fuzz_case import size_of

    batches = []
    for start in range(0, len(seeds), BATCH):
        by_size: dict[int, list[int]] = {}
        for seed in seeds[start : start + BATCH]:
            by_size.setdefault(size_of(kind, seed), []).append(seed)
        batches += [(kind, size, mine) for size, mine in sorted(by_size.items())]
    return batches


def run(kinds: list[str], cases: int, seed: int, limit: float, report: dict[str, Any], path: str | None) -> None:
    """Run ``cases`` cases, split over ``kinds``; print failures, and write ``report`` after each case."""
    from fuzz_case import describe
    from fuzz_workers import Workers
    from tqdm import tqdm

    work = []
    for index, kind in enumerate(kinds):
        count = cases // len(kinds) + (index < cases % len(kinds))
        work += batches_of(kind, list(range(seed, seed + count)))
        report["kinds"][kind] = {"seeds": [seed, seed + count - 1], "cases": 0, "counts": Counter(), "operations": Counter()}
        report["kinds"][kind]["done"] = []
    workers, start = Workers(limit), time.monotonic()
    with tqdm(total=cases, unit="case", mininterval=1.0, disable=None) as bar:
        for kind, size, seeds in work:
            mine = report["kinds"][kind]
            for number, status, details in workers.run(kind, seeds, size):
                mine["cases"] += 1
                mine["done"].append(number)
                mine["counts"][status] += 1
                counted = details if kind in ("dtensor", "random", "placements") else ""
                for name, value in re.findall(r"(operations|refused|torch) (\d+)", counted):
                    mine["operations"][name] += int(value)
                if status not in ("ok", "refused"):
                    report["failures"].append({"kind": kind, "seed": number, "status": status, "details": details[-8000:]})
                    print(f"\n{'=' * 100}\n{kind} seed {number} {status}:\n{describe(kind, number)}\n{details}", flush=True)
                    print(f"replay: python test/fuzz/run.py --kind {kind} --replay {number}", flush=True)
                elif status == "refused":
                    mine.setdefault("refusals", {}).setdefault(details.strip().splitlines()[-1][:160], []).append(number)
                    if cases == 1:  # A replay.
                        print(details)
                bar.update()
                bar.set_postfix(failures=len(report["failures"]))
                report["seconds"] = round(time.monotonic() - start, 1)
                if path:
                    Path(path).parent.mkdir(parents=True, exist_ok=True)
                    Path(path).write_text(json.dumps(compact(report), indent=1) + "\n")
    workers.stop()


def compact(report: dict[str, Any]) -> dict[str, Any]:
    """The report with ranges in place of long lists of seeds."""
    kinds = {}
    for kind, found in report["kinds"].items():
        ranges: list[list[int]] = []
        for seed in sorted(found["done"]):
            if ranges and seed == ranges[-1][1] + 1:
                ranges[-1][1] = seed
            else:
                ranges.append([seed, seed])
        kinds[kind] = {**found, "done": " ".join(f"{a}-{b}" for a, b in ranges)}
    return {**report, "kinds": kinds}


def main() -> int:
    """Returns 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, help="how many, of all kinds together: 100, or all pairs of a table")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--kind", choices=(*KINDS, *TABLES, "all"), default="all")
    parser.add_argument("--json", help="write the report to this file")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds per case; a longer one hangs")
    parser.add_argument("--replay", type=int, metavar="SEED", help="run this case only, and print it")
    options = parser.parse_args()
    import torch

    kinds = list(KINDS) if options.kind == "all" else [options.kind]
    report: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
    report |= {"cpus": os.cpu_count(), "command": " ".join(["python", *sys.argv]), "kinds": {}, "failures": []}
    if options.replay is not None:
        from fuzz_case import describe

        options.cases, options.seed = len(kinds), options.replay
        for kind in kinds:
            print(f"{kind} seed {options.replay}:\n{describe(kind, options.replay)}")
    if options.kind in TABLES:
        from fuzz_case import KINDS as modules

        table = modules[options.kind].COVER
        print(
            f"{len(table.legal)} legal pairs of values in {len(table.runs)} runs, {len(table.refused)} pairs that are refused"
        )
        options.cases = options.cases or len(table.runs) + len(table.refused)
    run(kinds, options.cases or 100, options.seed, options.limit, report, options.json)
    if options.kind in TABLES and table.triples:
        seeds = report["kinds"][options.kind]["done"]
        occurred = set().union(*(table.triples_of(table.case(seed)) for seed in seeds)) & set(table.triples)
        report["triples"] = {"legal": len(table.triples), "occurred": len(occurred)}
        print(f"{len(occurred)} of {len(table.triples)} legal triples of {len(table.risky)} features")
        if options.json:
            Path(options.json).write_text(json.dumps(compact(report), indent=1) + "\n")
    counts = {kind: dict(found["counts"]) for kind, found in report["kinds"].items()}
    rate = sum(found["cases"] for found in report["kinds"].values()) / report["seconds"]
    print(f"{counts}, {report['seconds']} s, {rate:.1f} cases/s; failures: {[f['seed'] for f in report['failures']]}")
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
