"""``make upstream``: whether the series applies to the installed torch, works, and changes nothing else there.

The installed torch stays as it is: what is patched is a copy, made of hard links.

1. The patches are made from the package's sources, and apply to a copy of torch.
2. Each of the first five, with those before it, passes the tests that it brings, with no ``torch_ragged`` in sight.
3. All of them pass this package's tests: it recognises torch's placements, installs nothing, and its modules are torch's.
4. Plain DTensor programs, and torch's own DTensor checks, give the same on the patched torch as on the stock one.
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
from series import ALONE, RELEASES, ROOT, SERIES
from tree import patched_tree

# The package's tests of placements, redistribution, operators and checkpoints, and of training on all of these.
PACKAGE_TESTS = (
    "test_placement_extension test_placement_types test_strided_ragged_shard test_redistribute test_redistribute_autograd "
    "test_ops test_row_ops test_everyday test_checkpoint test_checkpoint_interop test_fsdp_training"
).split()
LINES = 400
"""Core lines that the series may touch."""


def run(title: str, command: list[str], tree: Path | None, path: tuple[Path, ...] = (), folder: Path = ROOT) -> str:
    """Run a command under the torch in ``tree`` (the installed one where None); its standard output.

    Raises:
        SystemExit: it failed.
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
    """What a program prints after ``RESULT``."""
    lines = run(title, command, tree, folder=ROOT / "upstream").splitlines()
    return json.loads(next(line for line in lines if line.startswith("RESULT ")).removeprefix("RESULT "))


def same_on_both(title: str, command: list[str], tree: Path) -> None:
    """Raises:
    SystemExit: the program gives something else on the patched torch.
    """
    stock, patched = (result_of(f"{title}, {kind}", command, where) for kind, where in (("stock", None), ("patched", tree)))
    different = [name for name in stock | patched if json.dumps(stock.get(name)) != json.dumps(patched.get(name))]
    if different:
        raise SystemExit(f"{title}: not the same on the patched torch: {different}")
    print(f"{title}: {len(stock)} results, the same on both")


def check_series() -> None:
    version, _ = installed()
    if not version.startswith(RELEASES):
        raise SystemExit(f"the series is for torch {' and '.join(RELEASES)}, found {version}")
    lines = sum(sum(counts) for files in changed_lines().values() for counts in files.values())
    if lines >= LINES:
        raise SystemExit(f"the series touches {lines} lines of torch's files, must be under {LINES}")
    print(f"torch {version}: {len(SERIES)} patches, which touch {lines} lines of torch's own files")


def _folder(path: str) -> Path:
    return Path(path).resolve()  # Programs run in other folders.


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=_folder, default=ROOT / "out/upstream", help="where patches and copies of torch go")
    parser.add_argument("--quick", action="store_true", help="of the tests, those of the protocol and the placement only")
    options = parser.parse_args()
    check_series()
    version, _ = installed()
    patches = write(options.out / "patches")
    quick = ["test_placement_extension", "test_placement_types"]

    for number, step in enumerate(SERIES[:ALONE], start=1):
        tree = patched_tree(options.out / f"{version}-{number}", patches[:number])
        tests = [name for name in step.tests if name.startswith("test_") and (not options.quick or name[:-3] in quick)]
        if tests:
            pytest(f"patches 1 to {number}, tests of {step.name}", tests, tree, folder=tree / TESTS)
    whole = patched_tree(options.out / f"{version}-all", patches)
    report = run(
        "the package", [sys.executable, "-c", "import torch_ragged as r; print(r.registration_report())"], whole, (ROOT,)
    )
    assert "no hooks" in report, report
    names = [f"test/{name}.py" for name in PACKAGE_TESTS if not options.quick or name in quick]
    pytest("this package's tests, registration off", names, whole, (ROOT,))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    same_on_both("plain DTensor programs", [*launch, str(ROOT / "test/plain_dtensor_program.py")], whole)
    same_on_both("torch's DTensor checks", [sys.executable, "dtensor_checks.py"], whole)


if __name__ == "__main__":
    main()
