"""Run the test suite on several versions of torch, one after another: ``make matrix``.

    python upstream/matrix.py --venvs out/venvs --json out/matrix.json --write [--versions 2.13.0] [--tests FILE ...]

Each version has its own environment in ``--venvs``: t211, t213 and so on. If it is missing, it is made; it must never be the
environment of the caller. The JSON file keeps the results by version and test file, so that a run can continue or be done in
parts. ``--write`` writes docs/data/compatibility.json from them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from series import ROOT

VERSIONS = ("2.11.0", "2.13.0", "2.15.0")
DATA = ROOT / "docs/data/compatibility.json"


def environment(venvs: Path, version: str) -> Path:
    """The Python of a version's environment, with torch and the test requirements; made if it is missing."""
    folder = venvs / f"t{''.join(version.split('.')[:2])}"
    python = folder / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", f"torch=={version}", f"{ROOT}[test]"], check=True)
        subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", "torch_ragged"], check=True)  # Tests use ROOT.
    return python


def run(python: Path, tests: list[str]) -> dict[str, Any]:
    """The results of the test files: the versions of the environment, and counts per file."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    variables["PATH"] = os.pathsep.join([str(python.parent), variables["PATH"]])
    about = "import json, platform, torch; print(json.dumps([torch.__version__, platform.python_version()]))"
    version, release = json.loads(subprocess.run([python, "-c", about], check=True, stdout=subprocess.PIPE).stdout)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "-m", "not slow", "-p", "no:cacheprovider", f"--junitxml={report}", "-o", "junit_family=xunit1"]
        done = subprocess.run([python, "-m", "pytest", *options, *tests], cwd=ROOT, env=variables, check=False)
        if done.returncode not in (0, 1):  # Not 0 or 1 (passed or failed): no test ran.
            raise SystemExit(f"pytest of {python} ended with {done.returncode} and ran no test: see its output above")
        return {"torch": version, "python": release, "files": summary(ElementTree.parse(report).getroot())}


def summary(report: ElementTree.Element) -> dict[str, dict[str, Any]]:
    """For each file of a JUnit report: counts, seconds, failures, and skips with their reasons."""
    files: dict[str, dict[str, Any]] = {}
    for case in report.iter("testcase"):
        file = case.get("file") or case.get("classname", "").replace(".", "/") + ".py"
        name = f"{case.get('classname', '').split('.')[-1]}.{case.get('name')}"
        found = files.setdefault(file, {"passed": 0, "failed": [], "skipped": {}, "seconds": 0.0})
        found["seconds"] += float(case.get("time", 0))
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            found["failed"].append(name)
        elif skip is not None:
            found["skipped"][name] = skip.get("message", "")
        else:
            found["passed"] += 1
    return files


def rows(results: dict[str, dict[str, Any]]) -> list[list[str]]:
    """For each version: torch, Python, files of tests, passed, failed, skipped, minutes."""
    every, found = {path.name for path in (ROOT / "test").rglob("test_*.py")}, []
    for result in (results[version] for version in VERSIONS if version in results):
        files = result["files"].values()
        missing = every - {Path(file).name for file in result["files"]}
        counts = [
            sum(file["passed"] for file in files),
            *(sum(len(file[kind]) for file in files) for kind in ("failed", "skipped")),
        ]
        ran = f"{len(every) - len(missing)} of {len(every)}" if missing else f"all {len(every)}"
        minutes = f"{sum(file['seconds'] for file in files) / 60:.1f}"
        found.append([result["torch"], result["python"], ran, *map(str, counts), minutes])
    return found


def listed(results: dict[str, dict[str, Any]]) -> list[list[str]]:
    """What failed or was skipped: version, file, and what."""
    found = []
    for version in (version for version in VERSIONS if version in results):
        for file, result in results[version]["files"].items():
            found += [[version, file, f"{name} failed"] for name in result["failed"]]
            reasons = Counter(result["skipped"].values()).items()
            found += [[version, file, f"{count} skipped ({why})"] for why, count in reasons]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venvs", type=Path, default=ROOT / "out/venvs", help="the folder with the versions' environments")
    parser.add_argument(
        "--versions", nargs="*", default=VERSIONS, choices=VERSIONS, help="the versions to run; give none to write only"
    )
    parser.add_argument("--tests", nargs="*", default=[], help="test files; by default all")
    parser.add_argument("--json", type=Path, default=ROOT / "out/matrix.json", help="the file that keeps the results")
    parser.add_argument("--resume", action="store_true", help="skip versions that are in the JSON file")
    parser.add_argument("--write", action="store_true", help="write docs/data/compatibility.json")
    options = parser.parse_args()
    results = json.loads(options.json.read_text()) if options.json.exists() else {}
    for version in options.versions:
        if options.resume and version in results:
            continue
        found = run(environment(options.venvs.resolve(), version), options.tests or ["test"])
        if options.tests:  # Results of other files stay.
            found["files"] = {**results.get(version, {}).get("files", {}), **found["files"]}
        results[version] = found
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    print("\n".join(" ".join(row) for row in rows(results)))
    if options.write:
        lists = {"versions": rows(results), "listed": listed(results)}
        texts = [f' "{name}": [\n  ' + ",\n  ".join(map(json.dumps, each)) + "\n ]" for name, each in lists.items()]
        DATA.write_text("{\n" + ",\n".join(texts) + "\n}\n")
    return int(any(file["failed"] for version in options.versions for file in results[version]["files"].values()))


if __name__ == "__main__":
    sys.exit(main())
