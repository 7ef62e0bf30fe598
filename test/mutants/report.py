"""The table of mutants, and the survivors that are accepted with a reason (accepted.json)."""

from __future__ import annotations

import collections
import json
import os
import platform
from pathlib import Path
from typing import Any

_ACCEPTED = Path(__file__).resolve().parent / "accepted.json"
_DOCS = Path(__file__).resolve().parents[2] / "docs"
_RESULTS = _DOCS / "data" / "mutants.json"
_KINDS = ("equivalent", "cost", "gpu", "open")
_HEAD = """# Mutants

Question: would a test fail if one line of this code were wrong?

`make mutants` changes one expression or statement at a time and runs the tests that reach it. A *mutant* that fails no test
has *survived*. Nothing is mutated outside of functions, nor in texts of errors, assertions and annotations. Tests marked slow
do not run. A mutant that is *equivalent* gives the same results, errors and collectives (kind `cost`: they take longer or
shorter). The last column is caught / (run - equivalent).
"""
_FOOT = """
A random sample is drawn per module with `--seed`. `python test/mutants/run.py planner --all` runs one module,
`--again` runs those that survived the last time, `--match FILE:FUNCTION` chooses, `--write` makes this page.
`test/mutants/groups.py` says which files and which tests belong to a module, `test/mutants/accepted.json` which survivors are
accepted. An entry names the text of the line, so other lines may move.
"""


def accepted() -> dict[tuple[str, str, str, str], tuple[str, str]]:
    """Kind and reason of each accepted survivor."""
    result = {}
    for entry in json.loads(_ACCEPTED.read_text()):
        assert entry["kind"] in _KINDS, entry
        for change in entry["changes"]:
            result[entry["file"], entry["function"], entry["line"], change] = (entry["kind"], entry["reason"])
    return result


def _key(result: dict[str, Any]) -> tuple[str, str, str, str]:
    return result["file"], result["function"], result["text"], result["change"]


def _counts(answer: dict[str, Any]) -> dict[str, Any]:
    reasons, counts = accepted(), collections.Counter(run=answer["run"], caught=answer["caught"])
    for result in answer["survivors"]:
        kind = reasons.get(_key(result), ("open", ""))[0]
        counts["equivalent" if kind in ("equivalent", "cost") else "survived"] += 1
    return counts


def _short(answer: dict[str, Any]) -> dict[str, Any]:
    """A group's results without the mutants that a test caught."""
    survivors = [
        {field: result[field] for field in ("file", "function", "text", "change", "outcome")}
        for result in answer["mutants"]
        if not result["outcome"].startswith("caught")
    ]
    survivors.sort(key=_key)
    run = len(answer["mutants"])
    return {field: answer[field] for field in ("group", "total", "seed", "torch", "date")} | {
        "run": run,
        "caught": run - len(survivors),
        "survivors": survivors,
    }


def _rate(counts: dict[str, Any]) -> str:
    different = counts["caught"] + counts["survived"]
    return f"{100 * counts['caught'] / different:.1f} %" if different else "-"


def line(answer: dict[str, Any]) -> str:
    """One line of counts."""
    counts = _counts(_short(answer))
    return f"{counts['caught']} caught, {counts['survived']} survived, {counts['equivalent']} equivalent: {_rate(counts)}"


def write(out: Path, groups: list[str]) -> None:
    """Put the results in ``out`` into docs/data/mutants.json, in place of older ones of the same groups, and make the page."""
    kept = {answer["group"]: answer for answer in json.loads(_RESULTS.read_text())} if _RESULTS.exists() else {}
    kept |= {name: _short(json.loads(path.read_text())) for name in groups if (path := out / f"{name}.json").exists()}
    answers = [kept[name] for name in groups if name in kept]
    _RESULTS.write_text(json.dumps(answers, indent=1) + "\n")
    (_DOCS / "mutants.md").write_text(_page(answers, groups))


def _page(answers: list[dict[str, Any]], groups: list[str]) -> str:
    rows = [
        "| module | mutants | run | caught | survived | equivalent | caught of those that differ |",
        "|---|---|---|---|---|---|---|",
    ]
    for answer in answers:
        n = _counts(answer)
        share = (
            "all" if n["run"] == answer["total"] else f"{n['run']} ({n['run'] / answer['total']:.0%}, seed {answer['seed']})"
        )
        rows.append(
            f"| {answer['group']} | {answer['total']} | {share} | {n['caught']} | {n['survived']} | {n['equivalent']} | "
            f"{_rate(n)} |"
        )
    rows += [f"| {name} | | not run yet | | | | |" for name in groups if name not in {answer["group"] for answer in answers}]
    dates, versions = ({answer[field] for answer in answers} for field in ("date", "torch"))
    machine = f"{os.cpu_count()} cores ({platform.machine()})"
    text = [_HEAD, *rows, "", f"Measured on {', '.join(sorted(dates))} with torch {', '.join(sorted(versions))}, {machine}."]
    text += ["Command: `make mutants` for a sample, `make mutants ALL=1` for all.", _FOOT, "## Survivors", ""]
    return "\n".join(text + _survivors(answers)) + "\n"


def _survivors(answers: list[dict[str, Any]]) -> list[str]:
    reasons = accepted()
    rows: dict[tuple[str, ...], list[str]] = {}
    for result in (result for answer in answers for result in answer["survivors"]):
        kind, reason = reasons.get(_key(result), ("open", result["outcome"]))
        where = f"`{result['file'].removeprefix('torch_ragged/')}` {result['function']}"
        rows.setdefault((where, result["text"], kind, reason), []).append(result["change"])
    lines = ["| where | line | change | kind | reason |", "|---|---|---|---|---|"]
    for (where, text, kind, reason), changes in sorted(rows.items()):
        cells = [where, f"`{text}`", "; ".join(f"`{change}`" for change in changes), kind, reason]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines
