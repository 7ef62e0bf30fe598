"""The results of mutants, for the tables of docs/measured.py, and the survivors that are accepted with a reason."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

_ACCEPTED = Path(__file__).resolve().parent / "accepted.json"
_RESULTS = Path(__file__).resolve().parents[2] / "docs" / "data" / "mutants.json"
_KINDS = ("equivalent", "cost", "gpu", "open")


def accepted() -> dict[tuple[str, str, str, str], tuple[str, str]]:
    """Kind and reason of each accepted survivor. The line "*" is each line of a function that only a GPU runs."""
    result = {}
    for entry in json.loads(_ACCEPTED.read_text()):
        assert entry["kind"] in _KINDS, entry
        for change in entry["changes"]:
            result[entry["file"], entry["function"], entry["line"], change] = (entry["kind"], entry["reason"])
    return result


def _key(result: dict[str, Any]) -> tuple[str, str, str, str]:
    return result["file"], result["function"], result["text"], result["change"]


def _short(answer: dict[str, Any]) -> dict[str, Any]:
    """A group's results without the mutants that a test caught, and the kind and reason of each survivor."""
    survivors, reasons = [], accepted()
    for result in sorted(answer["mutants"], key=_key):
        if not result["outcome"].startswith("caught"):
            whole = reasons.get((*_key(result)[:2], "*", "*"), ("open", result["outcome"]))
            kind, reason = reasons.get(_key(result), whole)
            fields = {field: result[field] for field in ("file", "function", "text", "change")}
            survivors.append({**fields, "kind": kind, "reason": reason})
    run = len(answer["mutants"])
    return {field: answer[field] for field in ("group", "total", "seed", "torch", "date")} | {
        "run": run,
        "caught": run - len(survivors),
        "machine": f"{os.cpu_count()} cores ({platform.machine()})",
        "survivors": survivors,
    }


def line(answer: dict[str, Any]) -> str:
    """One line of counts."""
    short = _short(answer)
    kinds = [each["kind"] for each in short["survivors"]]
    return f"{short['caught']} caught, {kinds.count('open')} survived, {kinds.count('gpu')} GPU only, the others equivalent"


def write(out: Path, groups: list[str]) -> None:
    """Put the results in ``out`` into docs/data/mutants.json, in place of older ones of the same groups."""
    kept = {answer["group"]: answer for answer in json.loads(_RESULTS.read_text())} if _RESULTS.exists() else {}
    kept |= {name: _short(json.loads(path.read_text())) for name in groups if (path := out / f"{name}.json").exists()}
    answers = [kept[name] for name in groups if name in kept]
    _RESULTS.write_text(json.dumps(answers, indent=1) + "\n")
