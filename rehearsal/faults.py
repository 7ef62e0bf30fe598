"""Removes the waits of the package, one by one, and checks that the simulator finds each: wrong numbers, or the sanitizer.

Run by the Python of ``make rehearsal``: ``python -m rehearsal.faults``. It finds the waits in the source (``waits.py``), and
runs for each fault the programs that reach it. FSDP2 is the control: its numbers do not depend on the order, and it has no
reports.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch.distributed as dist

from rehearsal.__main__ import environment
from rehearsal.waits import Replaced, Wait, waits

ORDERS = ("late", "early", "random")
RANKS = (2, 4)

_STEPPED = "a thread of the CPU, after a backward that raised: on a GPU, backward has waited"

NOT_FOUND = {
    ("checkpoint/_background.py", "wait_for_save"): "the host waits for its own thread",
    ("checkpoint/_lease.py", "Lease._renew"): "a pause of a thread of the host",
    ("fsdp/comm/experimental/_peer_memory.py", "_HostExchange.wait"): "the host's memory: no stream",
    ("fsdp/_fsdp_module.py", "_wait_for_users"): _STEPPED,
    ("fsdp/_state_dict.py", "before_load"): _STEPPED,
    ("fsdp/offload/_in_backward.py", "BackwardStep.drop"): _STEPPED,
    ("fsdp/offload/_in_backward.py", "BackwardStep.reset"): _STEPPED,
    ("fsdp/offload/_in_backward.py", "BackwardStep.take"): _STEPPED,
    ("fsdp/offload/_offloaded_optimizer.py", "OffloadedOptimizer._wait"): _STEPPED,
    ("fsdp/offload/_in_backward.py", "BackwardStep.finish"): (
        "on the CPU a thread steps; on a GPU, autograd orders the caller's stream behind those of backward"
    ),
    (
        "fsdp/offload/_tiers.py",
        "_StreamCopies.__init__",
    ): "the ranks' agreement at the end of offloaded() waits for the stream, too",
    ("fsdp/core/_fsdp_param_group.py", "FSDPParamGroup.make_room"): "gloo: over NCCL, a reduction has no second buffer",
    ("fsdp/tools/_timeline.py", "StreamClock.seconds"): "a wait of the host for an event: the step before has waited",
    ("fsdp/elastic/_neighbour_copies.py", "NeighbourCopies.update"): "the host waits for its own thread",
    ("fsdp/elastic/_neighbour_copies.py", "NeighbourCopies.recover"): "the host waits for its own thread, after a death",
    ("fsdp/elastic/_neighbour_copies.py", "NeighbourCopies._send"): "orders ranks: none overwrites a copy that others need",
    ("transfer/_execution.py", "Execution.run"): "gloo: over NCCL, the collective behind a run waits for the stream, too",
    ("transfer/_plan.py", "Plan._run"): "the second one orders ranks; the agreement behind it waits for the stream, too",
    ("transfer/_stream.py", "_stream"): "gloo: over NCCL, the process group keeps the tensors of dropped works",
    ("transfer/_watch.py", "_Waiter.has_ended"): "gloo: a thread of the host waits",
    ("transfer/_watch.py", "_Waiter._wait"): "the host has asked until the works were complete; this raises their errors",
}
"""Waits that order no streams of a GPU, or not with the installed torch: they are not counted."""


@dataclass
class Outcome:
    """What the ranks of a run printed: per variant, the digest and the reports of each rank; and whether a rank failed.

    Attributes:
        errors: the end of what each rank wrote to stderr.
    """

    results: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    fails: bool = False
    errors: str = ""


def _rank(
    pipe: int, errors: int, replaced: dict[Wait, str], flavour: str, rank: int, size: int, port: int, wanted: list[str] | None
) -> None:
    """The process of one rank, after a fork. It never returns."""
    with contextlib.suppress(BaseException):
        os.dup2(errors, 2)
        faulthandler.enable()
        Replaced(replaced).install()
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE="1")
        try:
            from rehearsal.fault_program import run

            for result in run(flavour, rank, size, port, wanted):
                reached = sys.__dict__.pop("_rehearsed", ())
                os.write(pipe, (json.dumps([*result, sorted(reached)]) + "\n").encode())
            os.write(pipe, b"null\n")
        except BaseException:
            __import__("traceback").print_exc()
    os._exit(0)


def run(
    size: int,
    flavour: str = "ours",
    replaced: dict[Wait, str] | None = None,
    wanted: list[str] | None = None,
    limit: float = 120,
) -> tuple[Outcome, dict[str, set[int]]]:
    """Run variants on ``size`` ranks, forked from this process, which has loaded torch and has not used a device.

    Returns:
        the outcome, and for each variant the numbers that its code has added to ``sys._rehearsed``.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    errors = [tempfile.TemporaryFile("w+") for _ in range(size)]
    ranks: dict[int, tuple[int, int]] = {}  # By the end of the pipe: the rank and its process.
    for rank in range(size):
        ours, theirs = os.pipe()
        process = os.fork()
        if process == 0:
            os.close(ours)
            _rank(theirs, errors[rank].fileno(), replaced or {}, flavour, rank, size, store.port, wanted)
        os.close(theirs)
        ranks[ours] = (rank, process)
    outcome, reached = Outcome(), {}
    texts, open_, deadline = dict.fromkeys(ranks, b""), set(ranks), time.monotonic() + limit
    while open_ and time.monotonic() < deadline:
        for pipe in select.select(list(open_), [], [], 1)[0]:
            data = os.read(pipe, 1 << 16)
            texts[pipe] += data
            if not data:
                open_.discard(pipe)
                if not texts[pipe].endswith(b"null\n"):  # The others would wait for it.
                    deadline = min(deadline, time.monotonic() + 3)
    for pipe, (rank, process) in ranks.items():
        if pipe in open_:
            os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(pipe)
        *lines, last = texts[pipe].split(b"\n")
        outcome.fails |= not lines or lines[-1] != b"null" or bool(last)
        for line in lines:
            if line not in (b"", b"null"):
                name, digest, reports, numbers = json.loads(line)
                outcome.results.setdefault(name, [("", 0)] * size)[rank] = (digest, reports)
                reached.setdefault(name, set()).update(numbers)
    for file in errors:
        file.seek(0)
        outcome.errors += file.read()[-3000:]
        file.close()
    return outcome, reached


def _control(flavour: str) -> dict[str, dict[str, list[tuple[str, int]]]]:
    """The results of all variants, in the order of this process, by number of ranks."""
    found = {}
    for size in RANKS:
        outcome, _ = run(size, flavour, limit=400)
        if outcome.fails:
            raise SystemExit(f"{flavour} on {size} ranks fails after {list(outcome.results)[-1:]}:\n{outcome.errors}")
        found[str(size)] = {name: [list(result) for result in ranks] for name, ranks in outcome.results.items()}
    return found


def _check_control(flavours: list[str]) -> dict[str, dict[str, list[list[object]]]]:
    """Raise unless all orders have equal numbers and no reports. The results of ours."""
    for flavour in flavours:
        found = {}
        for order in ORDERS:
            command = [sys.executable, "-m", "rehearsal.faults", "--results", flavour]
            variables = {**os.environ, **environment(order, 3, "report")}
            out = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=True).stdout
            found[order] = json.loads(out.rpartition("RESULTS")[2])
        reports = sum(result[1] for of in found["late"].values() for ranks in of.values() for result in ranks)
        differ = [
            f"{name} on {size} ranks"
            for size, of in found["late"].items()
            for name in of
            if any(found[order][size].get(name) != of[name] for order in ORDERS)
        ]
        count = sum(map(len, found["late"].values()))
        equal = f"the numbers of {count} programs are equal in {', '.join(ORDERS)}{f', but for {differ}' if differ else ''}"
        print(f"rehearsed: {flavour} without faults: {reports} reports; {equal}", flush=True)
        if reports or differ:
            raise SystemExit(1)
        ours = found["late"] if flavour == "ours" else None
    return ours  # type: ignore[return-value]


def _reaching(places: list[Wait]) -> dict[int, dict[int, list[str]]]:
    """For each wait, the variants that reach it, by number of ranks."""
    marks = {
        wait: f"(__import__('sys').__dict__.setdefault('_rehearsed', set()).add({number}) or {wait.text})"
        for number, wait in enumerate(places)
    }
    reaching: dict[int, dict[int, list[str]]] = {}
    for size in RANKS:
        outcome, reached = run(size, replaced=marks, limit=400)
        if outcome.fails:
            raise SystemExit(f"the programs fail after {list(outcome.results)[-1:]}:\n{outcome.errors}")
        for name, numbers in reached.items():
            for number in numbers:
                reaching.setdefault(number, {}).setdefault(size, []).append(name)
    return reaching


def _judged(wait: Wait, reaching: dict[int, list[str]], expected: dict[str, dict[str, list[list[object]]]]) -> Iterator[str]:
    """How the fault shows, in the first program that reaches it, or else in the others; nothing if it does not."""
    # A program runs alone first: most faults show in each.
    runs = [(size, part) for part in (slice(1), slice(1, None)) for size in reaching if reaching[size][part]]
    shown = False
    for size, names in ((size, reaching[size][part]) for size, part in runs):
        if shown:
            return
        outcome, _ = run(size, replaced={wait: wait.removed}, wanted=names)
        right = expected[str(size)]
        wrong = [
            name
            for name, ranks in outcome.results.items()
            if any(digest and digest != first[0] for (digest, _), first in zip(ranks, right[name]))
        ]
        reports = sum(reports for ranks in outcome.results.values() for _, reports in ranks)
        if wrong:
            yield f"wrong numbers ({', '.join(wrong)})"
        shown = bool(wrong or reports or outcome.fails)
        if reports:
            yield f"{reports} reports"
        if outcome.fails:
            yield "a rank fails or hangs"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m rehearsal.faults", description=__doc__)
    parser.add_argument("--least", type=float, default=0.95, help="the share of faults that must be found")
    parser.add_argument("--only", nargs="+", help="parts of files or functions; without the controls")
    parser.add_argument("--controls", action="store_true", help="the controls alone")
    parser.add_argument("--results", metavar="FLAVOUR", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.results:
        print("RESULTS" + json.dumps(_control(arguments.results)), flush=True)
        return
    if "REHEARSAL_ORDER" not in os.environ:  # This process is forked for each fault, so it is rehearsed itself.
        os.environ.update(environment("late", check="report"))
        os.environ["OMP_NUM_THREADS"] = "1"
        os.execv(sys.executable, [sys.executable, "-m", "rehearsal.faults", *sys.argv[1:]])
    places = waits()
    expected = _control("ours") if arguments.only else _check_control(["fsdp2", "ours"])
    if arguments.controls:
        return
    reaching = _reaching(places)
    found = counted = 0
    print("| wait | in | found by |\n|---|---|---|")
    for number, wait in enumerate(places):
        if arguments.only and not any(part in f"{wait.file} {wait.function}" for part in arguments.only):
            continue
        shown = list(_judged(wait, reaching.get(number, {}), expected))
        reason = NOT_FOUND.get((wait.file, wait.function), "")
        missing = "NOT FOUND" if number in reaching else "NOT REACHED"
        verdict = "; ".join(shown) or (f"not counted: {reason}" if reason else missing)
        counted += bool(shown) or not reason
        found += bool(shown)
        print(f"| `{wait.text[:60]}` | {wait.file}, {wait.function} | {verdict} |", flush=True)
    print(f"rehearsed: {found} of {counted} faults found")
    raise SystemExit(0 if found >= arguments.least * counted else 1)


if __name__ == "__main__":
    main()
