"""Removes waits of the package, one by one, and checks that the simulator finds each: by wrong numbers, or by the sanitizer.

Run by the Python of ``make rehearsal``: ``python -m rehearsal.faults``. FSDP2 is the control: its numbers do not depend on
the order, and it has no reports.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rehearsal.__main__ import environment
from rehearsal.build import HERE

PROGRAM = HERE / "fault_program.py"


@dataclass(frozen=True)
class Fault:
    """One statement of the package, and what stands there instead.

    Attributes:
        file: under ``torch_ragged``.
        before: text that is in the file once.
        redundant: why no order depends on the statement; such a fault is not counted.
    """

    file: str
    before: str
    after: str
    redundant: str = ""


FAULTS = (
    Fault("fsdp/core/_fsdp_param_group.py", "                work.wait()\n                made =", "                made ="),
    Fault(
        "fsdp/core/_fsdp_param_group.py",
        "        self.reduction.wait()\n\n    def _make_room",
        "        pass\n\n    def _make_room",
    ),
    Fault("fsdp/core/_grad_reduction.py", "            work.wait()\n        except", "            pass\n        except"),
    Fault("fsdp/core/_grad_reduction.py", "        work.wait()\n        self._add_reduced", "        self._add_reduced"),
    Fault("fsdp/core/_root.py", "                event.wait()", "                pass"),
    Fault("fsdp/core/_root.py", "named.all_reduce_max(flags).wait()", "named.all_reduce_max(flags)"),
    Fault("fsdp/comm/_collectives.py", "        self._work.wait()\n        self._output.div_", "        self._output.div_"),
    Fault("fsdp/comm/_collectives.py", "            self.work.wait()", "            pass"),
    Fault(
        "transfer/_background.py",
        ".wait_stream(self._stream)",
        "",
        redundant="a run ends with a wait of the host for the stream",
    ),
    Fault("transfer/_background.py", "        stream.wait_stream(torch.accelerator.current_stream(device))\n", ""),
)
"""The waits that order streams, of code that the program runs. Not among them: those of gloo and of the host, and those of
symmetric memory (``comm/experimental``), which has no stand-in."""

Results = list[dict[str, tuple[str, bool, int]]]
"""By rank, by variant of the program: the digest of its numbers, whether they are finite, and the sanitizer's reports."""


def run(flavour: str, package: Path | None = None, order: str = "late", seed: int = 0, *variants: str) -> Results:
    """What the ranks of the program found, of all variants or of some. A rank that fails has none."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {**os.environ, **environment(order, seed, "report"), "WORLD_SIZE": "2", "STORE": str(store.port)}
    if package is not None:
        variables["PYTHONPATH"] = os.pathsep.join([str(package), variables["PYTHONPATH"]])
    variables["OMP_NUM_THREADS"] = "1"
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), flavour, *variants],
            env={**variables, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    found = []
    for process in processes:
        try:
            out, error = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            process.kill()
            out, error = process.communicate()
        results = {}
        for part in filter(None, out.partition("RESULT ")[2].strip().split("; ")):
            name, _, rest = part.partition("=")
            digest, is_finite, reports = rest.split(",")
            results[name] = (digest, is_finite == "True", int(reports))
        if not results or any(reports for _, _, reports in results.values()):
            print(error[-3000:], file=sys.stderr)
        found.append(results)
    return found


def mutated(fault: Fault, folder: Path) -> None:
    """A copy of the package with the fault, in ``folder``."""
    shutil.copytree(HERE.parent / "torch_ragged", folder / "torch_ragged", ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "torch_ragged" / fault.file
    text = path.read_text()
    if text.count(fault.before) != 1:
        raise SystemExit(f"{fault.file} has {fault.before!r} {text.count(fault.before)} times: name the statement anew")
    path.write_text(text.replace(fault.before, fault.after))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m rehearsal.faults", description=__doc__)
    parser.add_argument("--least", type=float, default=0.95, help="the share of faults that must be found")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of faults; without the control")
    arguments = parser.parse_args()
    clean = True
    expected: dict[str, Results] = {}
    for flavour in ("ours",) if arguments.only else ("ours", "fsdp2"):
        expected[flavour] = run(flavour)
        others = [run(flavour, order=order, seed=3) for order in ("early", "random") if not arguments.only]
        is_clean = bool(expected[flavour][0]) and all(other == expected[flavour] for other in others)
        is_clean = is_clean and not any(reports for rank in expected[flavour] for _, _, reports in rank.values())
        orders = "late" if arguments.only else "late, early and random"
        verdict = f"equal numbers ({orders}), no reports" if is_clean else "NOT CLEAN"
        print(f"rehearsed: {flavour} without faults: {verdict}", flush=True)
        if not is_clean:
            print([expected[flavour], *others])
        clean = clean and is_clean
    found = 0
    chosen = arguments.only or range(len(FAULTS))
    for number in chosen:
        fault = FAULTS[number]
        with tempfile.TemporaryDirectory() as folder:
            mutated(fault, Path(folder))
            ranks = run("ours", Path(folder))
        fails = sum(not rank for rank in ranks)
        pairs = list(zip(ranks, expected["ours"], strict=True))
        wrong = sorted({name for rank, right in pairs for name in rank if rank[name][0] != right[name][0]})
        reports = sum(result[2] for rank in ranks for result in rank.values())
        is_found = bool(fails or wrong or reports)
        verdict = "found" if is_found else f"not found: {fault.redundant}" if fault.redundant else "NOT FOUND"
        found += is_found and not fault.redundant
        print(
            f"rehearsed: fault {number} in {fault.file}: {verdict} "
            f"({fails} ranks fail, {reports} reports, wrong numbers: {', '.join(wrong) or 'none'})",
            flush=True,
        )
    counted = sum(not FAULTS[number].redundant for number in chosen)
    print(f"rehearsed: {found} of {counted} faults found")
    raise SystemExit(0 if clean and found >= arguments.least * counted else 1)


if __name__ == "__main__":
    main()
