"""The tables of measured pages, from docs/data: ``conf.py`` prints them when the site is built. Nothing is measured here."""

from __future__ import annotations

import collections
import json
from pathlib import Path
from typing import Any

__all__ = ["mutants", "op_coverage"]

_DATA = Path(__file__).with_name("data")


def op_coverage() -> list[str]:
    """What ``test/tensor/op_conformance.py`` has counted: a row for each op."""
    found = json.loads((_DATA / "op_coverage.json").read_text())
    rows = found["rows"]
    full, none = sum(not error for *_, error, _ in rows), sum(not equal for _, equal, *_ in rows)
    equal, local, errors = (sum(row[column] for row in rows) for column in (1, 2, 3))
    return [
        f"With torch {found['torch']} on {found['machine']} CPUs, {found['ranks']} ranks, gloo:",
        "",
        f"- {len(rows)} ops: {full} always equal, {len(rows) - full - none} equal or a clear error by placement, {none} always "
        "a clear error.",
        f"- {equal} cases equal, {local} of them with no communication; {errors} clear errors; {found['wrong']} wrong.",
        f"- Left out: {found['left_out']} cases in which this torch is wrong in the same way with `Replicate` or `Shard(0)` "
        f"and no ragged tensor at all ({', '.join(found['left_out_ops']) or 'none'}).",
        "",
        "| op | equal | no communication | clear error | most frequent error |",
        "|---|---|---|---|---|",
        *(f"| `{op}` | {equal} | {local} | {error} | {reason} |" for op, equal, local, error, reason in rows),
    ]


def mutants(part: str) -> list[str]:
    """What ``test/mutants/run.py`` has found: the counts of the ``modules``, or the ``survivors``."""
    answers = json.loads((_DATA / "mutants.json").read_text())
    return _survivors(answers) if part == "survivors" else _modules(answers)


def _modules(answers: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| module | mutants | run | caught | survived | equivalent | caught of those that differ |",
        "|---|---|---|---|---|---|---|",
    ]
    for answer in answers:
        run, caught, total = answer["run"], answer["caught"], answer["total"]
        kinds = collections.Counter(each["kind"] in ("equivalent", "cost") for each in answer["survivors"])
        share = "all" if run == total else f"{run} ({run / total:.0%}, seed {answer['seed']})"
        rate = f"{100 * caught / (caught + kinds[False]):.1f} %" if caught + kinds[False] else "-"
        lines.append(f"| {answer['group']} | {total} | {share} | {caught} | {kinds[False]} | {kinds[True]} | {rate} |")
    dates, versions, machines = (sorted({answer[field] for answer in answers}) for field in ("date", "torch", "machine"))
    return [*lines, "", f"Measured on {', '.join(dates)} with torch {', '.join(versions)}, {', '.join(machines)}."]


def _survivors(answers: list[dict[str, Any]]) -> list[str]:
    rows: dict[tuple[str, ...], list[str]] = {}
    for each in (each for answer in answers for each in answer["survivors"]):
        where = f"`{each['file'].removeprefix('torch_ragged/')}` {each['function']}"
        rows.setdefault((where, each["text"], each["kind"], each["reason"]), []).append(each["change"])
    lines = ["| where | line | change | kind | reason |", "|---|---|---|---|---|"]
    for (where, text, kind, reason), changes in sorted(rows.items()):
        cells = [where, f"`{text}`", "; ".join(f"`{change}`" for change in changes), kind, reason]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines
