"""``make upstream``: check that the series applies to the installed torch, works, and does not change plain DTensor programs.

It must not change the installed torch: the patches go to a copy, made of hard links.

1. The patches are made from the package's sources, and apply to a copy of torch.
2. Each patch, together with the patches before it, passes its own tests without ``torch_ragged``.
3. With all patches, this package passes its tests. It finds torch's placements, installs no hook, and uses torch's modules.
4. Plain DTensor programs, and torch's own DTensor checks, give the same results on the patched torch and on the stock torch.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from build import TESTS, changed_lines, installed, write
from series import RELEASES, ROOT, SERIES
from tree import patched_tree

# The package's tests of placements, redistribution, operators, checkpoints, and of training with all of them.
PACKAGE_TESTS = (
    "test_placement_extension test_placement_types test_strided_ragged_shard test_redistribute test_redistribute_autograd "
    "test_ops test_row_ops test_everyday test_checkpoint test_checkpoint_interop test_fsdp_training"
).split()
LINES = 400
"""The series must change fewer lines than this in torch's own files."""


def run(title: str, command: list[str], tree: Path | None, path: tuple[Path, ...] = (), folder: Path = ROOT) -> str:
    """Run a command with the torch in ``tree`` (if None, the installed torch) and return its standard output.

    Raises:
        SystemExit: the command failed.
    """
    start = time.monotonic()
    search = os.pathsep.join(map(str, ([tree] if tree else []) + list(path)))
    environment = {**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    last = (done.stdout.strip().splitlines() or [""])[-1]
    summary = last if len(last) < 120 else "done"
    print(f"{title}: {'failed' if done.returncode else summary} ({time.monotonic() - start:.0f} s)", flush=True)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return done.stdout


def pytest(title: str, tests: list[str], tree: Path, path: tuple[Path, ...] = (), folder: Path = ROOT) -> None:
    run(title, [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *tests], tree, path, folder)


def result_of(title: str, command: list[str], tree: Path | None) -> dict[str, Any]:
    """The JSON that a program prints after ``RESULT``."""
    lines = run(title, command, tree, folder=ROOT / "upstream").splitlines()
    return json.loads(next(line for line in lines if line.startswith("RESULT ")).removeprefix("RESULT "))


def same_on_both(title: str, command: list[str], tree: Path) -> None:
    """Run a program on the stock torch and on the patched torch, and compare its results.

    Raises:
        SystemExit: the results differ.
    """
    stock, patched = (result_of(f"{title}, {kind}", command, where) for kind, where in (("stock", None), ("patched", tree)))
    different = [name for name in stock | patched if json.dumps(stock.get(name)) != json.dumps(patched.get(name))]
    if different:
        raise SystemExit(f"{title}: these results differ on the patched torch: {different}")
    print(f"{title}: {len(stock)} results, equal on both")


def check_series() -> None:
    version, _ = installed()
    if not version.startswith(RELEASES):
        raise SystemExit(f"the series is for torch {' and '.join(RELEASES)}, found {version}: install one of these")
    lines = sum(sum(counts) for files in changed_lines().values() for counts in files.values())
    if lines >= LINES:
        raise SystemExit(f"the series changes {lines} lines of torch's own files, but must change fewer than {LINES}")
    print(f"torch {version}: {len(SERIES)} patches, which change {lines} lines of torch's own files")


def _folder(path: str) -> Path:
    return Path(path).resolve()  # Absolute, because programs run in other folders.


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=_folder, default=ROOT / "out/upstream", help="the folder for patches and copies of torch")
    parser.add_argument("--quick", action="store_true", help="run only the tests of the protocol and the placements")
    options = parser.parse_args()
    check_series()
    version, _ = installed()
    patches = write(options.out / "patches")
    quick = ["test_placement_extension", "test_placement_types"]

    for number, step in enumerate(SERIES, start=1):
        tree = patched_tree(options.out / f"{version}-{number}", patches[:number])
        names = [Path(test).name for test in step.tests]
        tests = [name for name in names if name.startswith("test_") and (not options.quick or name[:-3] in quick)]
        if tests:
            pytest(f"patches 1 to {number}, tests of {step.name}", tests, tree, folder=tree / TESTS)
    whole = patched_tree(options.out / f"{version}-all", patches)
    report = run(
        "the package", [sys.executable, "-c", "import torch_ragged as r; print(r.registration_report())"], whole, (ROOT,)
    )
    assert "no hooks" in report, report
    wanted = {f"{name}.py" for name in PACKAGE_TESTS if not options.quick or name in quick}
    names = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "test").rglob("test_*.py")) if path.name in wanted]
    pytest("this package's tests, registration off", names, whole, (ROOT,))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    same_on_both("plain DTensor programs", [*launch, str(ROOT / "test/tensor/plain_dtensor_program.py")], whole)
    same_on_both("torch's DTensor checks", [sys.executable, "dtensor_checks.py"], whole)


if __name__ == "__main__":
    main()
