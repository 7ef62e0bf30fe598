"""The tables of measured pages, from docs/data: ``conf.py`` prints them when the site is built. Nothing is measured here."""

from __future__ import annotations

import collections
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["compatibility", "fsdp2_tests", "mutants", "op_coverage", "optimizers", "programs"]

_DATA = Path(__file__).with_name("data")


def _read(name: str) -> Any:
    return json.loads((_DATA / f"{name}.json").read_text())


def _table(*rows: Sequence[object]) -> list[str]:
    """The lines of a table, whose first row is its head."""
    head, *others = ("| " + " | ".join(map(str, row)) + " |" for row in rows)
    return [head, "|" + "---|" * len(rows[0]), *others]


def programs(part: str) -> list[str]:
    """What ``test/clients/run.py`` has found: the ``rows``, or what was ``not_run``."""
    found = _read("programs")
    if part == "not_run":
        return _table(("program", "what", "why"), *found[part])
    equal = sum(row[-1].startswith("equal") for row in found["rows"])
    counts = f"On {found['machine']}, without a GPU, {equal} of {len(found['rows'])} rows are equal."
    return [counts, "", *_table(("program", "torch", "what", "ranks", "result"), *found["rows"])]


def optimizers() -> list[str]:
    """What ``test/clients/optimizers.py`` has found: a row for each package."""
    found = _read("optimizers")
    packages: dict[str, dict[str, list[str]]] = {}
    for row in found["rows"]:
        if "one process" in row:  # It needs a GPU, or other arguments or gradients.
            continue
        cells = packages.setdefault(row["package"], {"equal": [], "other": [], "rows": [], "refused": []})
        name, result, rows = f"`{row['optimizer']}`", row["default"], row.get("Shard(0)", "")
        values = ("close", "differs")
        if result == "equal":
            cells["equal"].append(name)
        elif rows == "equal":
            cells["rows"].append(name)
        elif result.startswith(values):
            cells["other"].append(f"{name} ({result.split()[1]})")
        elif rows.startswith(values):
            cells["other"].append(f"{name} ({rows.split()[1]} with `Shard(0)`)")
        else:
            cells["refused"].append(name)
    table: list[Sequence[object]] = [("package", "equal", "equal with `Shard(0)` only", "other values", "refused")]
    for package, each in packages.items():
        table.append((package, *(", ".join(each[kind]) for kind in ("equal", "rows", "other", "refused"))))
    versions = ", ".join(sorted({row["torch"] for row in found["rows"]}))
    return [f"On {found['machine']}, without a GPU, torch {versions}:", "", *_table(*table)]


def compatibility(part: str) -> list[str]:
    """What ``upstream/matrix.py`` has counted: the ``versions``, or what failed or was skipped, ``listed`` by version."""
    rows = _read("compatibility")[part]
    if part == "versions":
        return _table(("torch", "Python", "files of tests", "passed", "failed", "skipped", "minutes"), *rows)
    return _table(("torch", "file", "what"), *((version, f"`{file}`", what) for version, file, what in rows))


def fsdp2_tests(part: str) -> list[str]:
    """What ``upstream/fsdp2_checks.py`` has found: the ``counts`` of outcomes, or the ``cases`` of each file."""
    cases = _read("fsdp2_tests")["cases"]
    if part == "counts":
        return _table(("outcome", "cases"), *collections.Counter(outcome for _, _, outcome, _ in cases).most_common())
    rows = [(f"`{file}`", f"`{case}`", outcome, why) for file, case, outcome, why in cases]
    return _table(("file", "case", "outcome", "why"), *rows)


def op_coverage() -> list[str]:
    """What ``test/tensor/op_conformance.py`` has counted: a row for each op."""
    found = _read("op_coverage")
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
        *_table(
            ("op", "equal", "no communication", "clear error", "most frequent error"),
            *((f"`{op}`", *others) for op, *others in rows),
        ),
    ]


def mutants(part: str) -> list[str]:
    """What ``test/mutants/run.py`` has found: the counts of the ``modules``, or the ``survivors``."""
    answers = _read("mutants")
    return _survivors(answers) if part == "survivors" else _modules(answers)


def _modules(answers: list[dict[str, Any]]) -> list[str]:
    rows: list[Sequence[object]] = [
        ("module", "mutants", "run", "caught", "survived", "GPU only", "equivalent", "caught of those that differ")
    ]
    for answer in answers:
        run, caught, total = answer["run"], answer["caught"], answer["total"]
        kinds = collections.Counter(each["kind"] for each in answer["survivors"])
        share = "all" if run == total else f"{run} ({run / total:.0%}, seed {answer['seed']})"
        same = kinds["equivalent"] + kinds["cost"]
        survived = run - caught - same - kinds["gpu"]
        rate = f"{100 * caught / (caught + survived):.1f} %" if caught + survived else "-"
        rows.append((answer["group"], total, share, caught, survived, kinds["gpu"], same, rate))
    dates, versions, machines = (sorted({answer[field] for answer in answers}) for field in ("date", "torch", "machine"))
    return [*_table(*rows), "", f"Measured on {', '.join(dates)} with torch {', '.join(versions)}, {', '.join(machines)}."]


def _survivors(answers: list[dict[str, Any]]) -> list[str]:
    rows: dict[tuple[str, ...], list[str]] = {}
    for each in (each for answer in answers for each in answer["survivors"]):
        where = f"`{each['file'].removeprefix('torch_ragged/')}` {each['function']}"
        rows.setdefault((where, each["text"], each["kind"], each["reason"]), []).append(each["change"])
    table = [["where", "line", "change", "kind", "reason"]]
    for (where, text, kind, reason), changes in sorted(rows.items()):
        cells = [where, f"`{text}`", "; ".join(f"`{change}`" for change in changes), kind, reason]
        table.append([cell.replace("|", "\\|") for cell in cells])
    return _table(*table)
