"""The test suite on several versions of torch, one after the other: ``make matrix``.

    python upstream/matrix.py --venvs out/venvs --json out/matrix.json --write [--versions 2.13.0] [--tests FILE ...]

Each version has its own environment in ``--venvs``, t211, t213 and so on, made where it is not there yet. Results are kept in
the JSON file version by version, so that a run can be taken up again, or done in parts. ``--write`` makes
docs/compatibility.md of them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from series import RELEASES, ROOT

VERSIONS = ("2.11.0", "2.13.0", "2.15.0")
DOCUMENT = ROOT / "docs/compatibility.md"


def environment(venvs: Path, version: str) -> Path:
    """The Python of a version's environment, with torch, this package and what its tests need; made if it is not there."""
    folder = venvs / f"t{''.join(version.split('.')[:2])}"
    python = folder / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", f"torch=={version}", f"{ROOT}[test]"], check=True)
        subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", "torch_ragged"], check=True)  # What is tested is ROOT.
    return python


def run(python: Path, tests: list[str]) -> dict[str, Any]:
    """What the test suite gives there."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    variables["PATH"] = os.pathsep.join([str(python.parent), variables["PATH"]])
    about = "import json, platform, torch; print(json.dumps([torch.__version__, platform.python_version()]))"
    version, release = json.loads(subprocess.run([python, "-c", about], check=True, stdout=subprocess.PIPE).stdout)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "-m", "not slow", "-p", "no:cacheprovider", f"--junitxml={report}", "-o", "junit_family=xunit1"]
        subprocess.run([python, "-m", "pytest", *options, *(tests or ["test"])], cwd=ROOT, env=variables, check=False)
        found = summary(ElementTree.parse(report).getroot())
    return {"torch": version, "python": release, "cpu": platform.processor() or platform.machine(), "tests": tests, **found}


def summary(report: ElementTree.Element) -> dict[str, Any]:
    """Counts, seconds, names of failures and reasons of skips, of a JUnit report."""
    counts: Counter[str] = Counter()
    failed, skipped = [], {}
    for case in report.iter("testcase"):
        name = f"{case.get('file')}::{case.get('classname', '').split('.')[-1]}::{case.get('name')}"
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            counts["failed"] += 1
            failed.append(name)
        elif skip is not None:
            counts["skipped"] += 1
            skipped[name] = skip.get("message", "")
        else:
            counts["passed"] += 1
    seconds = sum(float(suite.get("time", 0)) for suite in report.iter("testsuite"))
    numbers = {kind: counts[kind] for kind in ("passed", "failed", "skipped")}
    return {**numbers, "seconds": round(seconds), "failures": failed, "skips": skipped}


def table(results: dict[str, dict[str, Any]]) -> str:
    """A line per version, as Markdown."""
    lines = ["| torch | Python | tests | passed | failed | skipped | minutes |", "|---|---|---|---|---|---|---|"]
    for found in (results[version] for version in VERSIONS if version in results):
        tests = ", ".join(found["tests"]) or "all everyday ones"
        numbers = [str(found[kind]) for kind in ("passed", "failed", "skipped")]
        row = [found["torch"], found["python"], tests, *numbers, f"{found['seconds'] / 60:.1f}"]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def document(results: dict[str, dict[str, Any]]) -> str:
    """The text of docs/compatibility.md."""
    missing = [version for version in VERSIONS if version not in results]
    parts = [
        "# Versions of torch",
        "Written by `make matrix` (`upstream/matrix.py`): this package's test suite on each version, on CPU, where it extends "
        "a stock torch. Minutes are of a shared machine.",
        table(results),
    ]
    if missing:
        parts.append(f"Not run: {', '.join(missing)}.")
    for version, found in sorted(results.items()):
        listed = [f"- `{name}` failed" for name in found["failures"]]
        listed += [f"- `{name}`: {why}" for name, why in found["skips"].items()]
        if listed:
            parts.append(f"On {version}:\n\n" + "\n".join(listed))
    parts.append(
        f"The patches of `upstream/` are for {' and '.join(RELEASES)}; `make upstream` tests them. A newer torch than these is "
        "a warning if all that the package extends has the layout that it knows, and an `ImportError` that names what has not."
    )
    return "\n\n".join(parts) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venvs", type=Path, default=ROOT / "out/venvs", help="the folder of the versions' environments")
    parser.add_argument(
        "--versions", nargs="*", default=VERSIONS, choices=VERSIONS, help="those to run now; none with --write alone"
    )
    parser.add_argument("--tests", nargs="*", default=[], help="files of tests; all of them by default")
    parser.add_argument("--json", type=Path, default=ROOT / "out/matrix.json", help="where results are kept")
    parser.add_argument("--resume", action="store_true", help="leave out versions that the JSON file has")
    parser.add_argument("--write", action="store_true", help="write docs/compatibility.md")
    options = parser.parse_args()
    results = json.loads(options.json.read_text()) if options.json.exists() else {}
    for version in options.versions:
        if options.resume and version in results:
            continue
        results[version] = run(environment(options.venvs.resolve(), version), options.tests)
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))
    if options.write:
        DOCUMENT.write_text(document(results))
    return int(any(results[version]["failed"] for version in options.versions))


if __name__ == "__main__":
    sys.exit(main())
