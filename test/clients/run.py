"""Run clients with torch's FSDP2 and with ours, compare their numbers, and write docs/data/programs.json.

    python test/clients/run.py accelerate peft --json out/clients/main.json     # in an environment that has these programs
    python test/clients/run.py --table out/clients/*.json                       # the page, from all environments' results

Each case runs in the processes of ``run_ranks``, first with FSDP2, then with ours. A case that fails is a row, too.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import math
import pathlib
import platform
import sys
import time
from typing import Any

_HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent / "common"), str(_HERE.parent.parent)]

import torch  # noqa: E402
from case import Case, versions  # noqa: E402
from common import run_ranks, stop_ranks  # noqa: E402

_DATA = _HERE.parent.parent / "docs" / "data" / "programs.json"
_ENVIRONMENTS = {
    "programs": ("pipelining accelerate transformers peft lightning trl torchao", ""),
    "swift": ("trainers", "swift "),
    "llamafactory": ("trainers", "llamafactory-cli"),
}
"""Names of environments that stand for several programs, or for some cases of one."""

_TIMEOUT = 900.0  # seconds for one training run


@dataclasses.dataclass
class Row:
    """The result of one case: ``result`` is "equal", "equal to x", "FSDP2 fails: ...", "differs: ..." or "fails: ..."."""

    programs: str
    torch: str
    what: str
    ranks: int
    result: str


def numbers_of(case: Case, implementation: str) -> list[list[float]] | str:
    """What ``train`` returned on each rank, or the last line of the error."""
    try:
        return run_ranks(case.ranks, case.train, implementation, timeout=_TIMEOUT)
    except AssertionError as error:
        lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith(" ")]
        return lines[-1][:160] if lines else "no error text"
    finally:
        stop_ranks()  # Threads of gloo that a program's process groups leave would slow down the next run (torch 2.15).


def compare(case: Case) -> str:
    """Train with both, and compare the numbers of all ranks."""
    reference, ours = ("one process" if case.ours_only else "fsdp2"), numbers_of(case, "ragged")
    expected = numbers_of(case, reference)
    if isinstance(expected, str):
        return f"FSDP2 fails ({expected}), ours {'fails, too' if isinstance(ours, str) else 'trains'}"
    if isinstance(ours, str):
        return f"fails: {ours}"
    pairs = [(a, b) for one, other in zip(ours, expected, strict=True) for a, b in zip(one, other, strict=True)]
    if not pairs or not all(math.isfinite(value) for pair in pairs for value in pair):
        return "fails: there are no numbers, or they are not finite"
    largest = max(abs(a - b) / max(abs(b), 1e-6) for a, b in pairs)
    suffix = f", to one process (FSDP2: {case.ours_only})" if case.ours_only else ""
    if largest == 0:
        return f"equal{suffix}"
    if case.exact or largest > 1e-4:
        return f"differs: by {largest:.1e} of the value{suffix}"
    return f"equal to {largest:.0e}{suffix}"


def run(names: list[str], only: str, json_file: str) -> bool:
    """Run the cases of each program of ``names``, and write the rows. Returns whether all are equal."""
    rows, not_run = [], []
    for name in names:
        module = importlib.import_module(f"{name}_cases")
        for case in [case for case in module.CASES if only in case.what]:
            start = time.monotonic()
            row = Row(versions(case.programs), torch.__version__, case.what, case.ranks, compare(case))
            print(f"{row.programs} | {row.what} | {row.result} | {time.monotonic() - start:.0f} s", flush=True)
            rows.append(row)
        not_run += [dataclasses.asdict(each) for each in module.NOT_RUN]
    result = {"rows": [dataclasses.asdict(row) for row in rows], "not_run": not_run, "machine": machine()}
    pathlib.Path(json_file).parent.mkdir(parents=True, exist_ok=True)
    pathlib.Path(json_file).write_text(json.dumps(result, indent=1))
    return all(row.result.startswith(("equal", "FSDP2 fails")) for row in rows)


def machine() -> str:
    """The processor, in words."""
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines() if pathlib.Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {len(names)} cores"


def write_table(files: list[str]) -> None:
    """Write the results of several environments to docs/data/programs.json, of which docs/measured.py makes the tables."""
    results: list[dict[str, Any]] = [json.loads(pathlib.Path(file).read_text()) for file in files]
    rows = [dataclasses.astuple(Row(**row)) for result in results for row in result["rows"]]
    not_run = [(", ".join(n["programs"]), n["what"], n["why"]) for result in results for n in result["not_run"]]
    not_run = list(dict.fromkeys(not_run))  # Programs of one file may need several environments.
    lists = (
        f' "{name}": [\n  ' + ",\n  ".join(map(json.dumps, each)) + "\n ]"
        for name, each in (("rows", rows), ("not_run", not_run))
    )
    _DATA.write_text(f'{{\n "machine": {json.dumps(results[0]["machine"])},\n' + ",\n".join(lists) + "\n}\n")
    print(f"{_DATA}: {len(rows)} rows")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", help="names of *_cases.py in this folder, or one environment")
    parser.add_argument("--json", default="out/clients.json", help="where to write the rows")
    parser.add_argument("--only", default="", metavar="TEXT", help="run the cases with this text in their description")
    parser.add_argument("--table", nargs="+", metavar="JSON", help="write docs/data/programs.json from these files")
    arguments = parser.parse_args()
    if arguments.table:
        write_table(arguments.table)
        return
    if not arguments.programs:
        parser.error(f"expected programs, of {', '.join(sorted(f.name[:-9] for f in _HERE.glob('*_cases.py')))}, or --table")
    programs, only = _ENVIRONMENTS.get(arguments.programs[0], (" ".join(arguments.programs), arguments.only))
    if not run(programs.split(), only, arguments.json):
        sys.exit("some rows are not equal")


if __name__ == "__main__":
    main()
