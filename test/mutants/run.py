"""Mutation testing: ``python test/mutants/run.py [GROUP ...] [--sample N | --all]``, see docs/mutants.md.

One process imports torch, the package and the tests once, and forks for each mutant. The fork gives one function its mutated
code and runs the tests that reach the changed line, those that catch most in their time first, until one fails. Ranks are forks
too.
"""

from __future__ import annotations

import argparse
import collections
import gc
import hashlib
import json
import multiprocessing
import os
import pickle
import random
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "test/common"), str(HERE)]
os.environ["OMP_NUM_THREADS"] = "1"  # Threads do not survive a fork.

import common  # noqa: E402
import hypothesis  # noqa: E402
import pytest  # noqa: E402
import report  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import tracing  # noqa: E402
from groups import AT_IMPORT, GROUPS, files_of, tests_of  # noqa: E402
from mutation import Mutant, Source  # noqa: E402


class Session:
    """A pytest plugin: it runs the collected tests once to learn what they reach, then once for each mutant."""

    def __init__(self, sources: list[Source], mutants: list[Mutant], args: argparse.Namespace) -> None:
        self.sources = {source.file: source for source in sources}
        self.mutants, self.args = mutants, args
        self.results: list[dict[str, Any]] = []
        self.killers: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self.kills: collections.Counter[str] = collections.Counter()
        self.runs: collections.Counter[str] = collections.Counter()
        self.reaching: collections.Counter[str] = collections.Counter()  # Mutants that a test has run with,
        self.failing: collections.Counter[str] = collections.Counter()  # and those that it has failed for.
        self.failed = ""
        self.skipped: set[str] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise session.Failed("the tests cannot be collected")
        items = {item.nodeid: item for item in session.items}
        gc.unfreeze()  # The suite freezes what it has imported, and a frozen function is not found: see Source.apply.
        reached = self._reached(items)
        waiting, running = list(reversed(self.mutants)), {}
        began = time.monotonic()
        while waiting or running:
            if time.monotonic() - began > 60 * self.args.minutes:
                waiting.clear()
                if not running:
                    break
            while waiting and len(running) < self.args.jobs:
                mutant = waiting.pop()
                names = self._order(mutant, reached)
                pid, pipe = _forked(self._test, mutant, [items[name] for name in names], reached)
                running[pid] = (mutant, pipe, time.monotonic(), len(names))
            pid, status = os.wait()
            mutant, pipe, started, count = running.pop(pid)
            _end_group(pid)
            self._note(mutant, pipe, status, time.monotonic() - started, count)
            self._show(began)
        return True

    def pytest_runtest_logreport(self, report: Any) -> None:  # pytest fixes the argument's name.
        if report.failed:
            self.failed = report.nodeid
        if report.skipped:
            self.skipped.add(report.nodeid)

    # -- what tests reach ------------------------------------------------------------------------------------------

    def _reached(self, items: dict[str, Any]) -> dict[str, Any]:
        """Seconds and lines of each test that passes: {name: (seconds, {(path, line)})}. Kept while no file changes."""
        digest = hashlib.sha256()
        for path in sorted([*ROOT.glob("torch_ragged/**/*.py"), *ROOT.glob("test/**/*.py"), HERE / "tracing.py"]):
            if not path.name.startswith("test_"):
                digest.update(path.read_bytes())
        keys = {name: f"{name} {hashlib.sha256(item.path.read_bytes()).hexdigest()}" for name, item in items.items()}
        kept = self.args.out / f"reached-{self.args.group}-{digest.hexdigest()[:16]}.pickle"
        known = pickle.loads(kept.read_bytes()) if kept.exists() else {}
        new = {name: item for name, item in items.items() if keys[name] not in known}
        while new:
            pid, pipe = _forked(self._trace, new, f"{kept}.new")
            _, status = os.waitpid(pid, 0)
            _end_group(pid)
            os.close(pipe)
            with open(f"{kept}.new", "rb") as file:
                while file.peek(1):
                    name, seen = pickle.load(file)
                    known[keys[name]] = seen
                    del new[name]
            if status and new:
                name = next(iter(new))
                _say(f"  without a mutant ends the process, left out: {name}")
                known[keys[name]] = None
                del new[name]
            kept.write_bytes(pickle.dumps(known))
        return {name: known[key] for name, key in keys.items() if known[key]}  # A skipped test has none.

    def _trace(self, _: Any, items: dict[str, Any], kept: str) -> None:
        tracing.start([str(source.path) for source in self.sources.values()])
        began = time.monotonic()
        with open(kept, "wb") as file:
            for number, (name, item) in enumerate(items.items(), 1):
                tracing.take()
                start = time.monotonic()
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
                seen = None if self.failed or name in self.skipped else (time.monotonic() - start, tracing.take())
                if self.failed:  # It must not count as one that catches.
                    _say(f"  without a mutant fails, left out: {self.failed}")
                    self.failed = ""
                pickle.dump((name, seen), file)
                file.flush()  # The next test may end this process.
                if time.monotonic() - began > 60:
                    began = time.monotonic()
                    _say(f"  {number} of {len(items)} tests run without a mutant")

    # -- one mutant ------------------------------------------------------------------------------------------------

    def _order(self, mutant: Mutant, reached: dict[str, Any]) -> list[str]:
        """The tests that reach the mutant: those that caught its neighbours first, then those that catch most in their time."""
        path, kills = str(self.sources[mutant.file].path), self.killers[f"{mutant.file}:{mutant.function}"]
        names = [name for name, (_, lines) in reached.items() if any((path, line) in lines for line in mutant.lines)]

        def merit(name: str) -> float:
            return (self.kills[name] + 1) / (self.runs[name] + 10) / (reached[name][0] + 0.2)

        return sorted(names, key=lambda name: (-kills[name] if reached[name][0] < 2 else 0, -merit(name)))

    def _test(self, write: Any, mutant: Mutant, items: list[Any], reached: dict[str, Any]) -> None:
        self.sources[mutant.file].apply(mutant)
        resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, 8 << 30))  # A mutant may allocate without end.
        spent = 0.0
        for i, item in enumerate(items):
            seconds = reached[item.nodeid][0]
            if i and spent + seconds > self.args.seconds:
                write("")
                os._exit(3)
            write(item.nodeid + "\n")
            signal.alarm(int(10 + 4 * seconds))  # It ends this process, and the parent ends the ranks.
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            if self.failed:
                if not self.args.weak:
                    os._exit(1)
                write(_FAILED + item.nodeid + "\n")
                self.failed = ""
            spent += seconds

    def _note(self, mutant: Mutant, pipe: int, status: int, seconds: float, count: int) -> None:
        lines = _read(pipe).split("\n")[:-1]
        ran = [line for line in lines if not line.startswith(_FAILED)]
        failed = [line.removeprefix(_FAILED) for line in lines if line.startswith(_FAILED)]
        code = os.waitstatus_to_exitcode(status)
        self.reaching.update(ran)
        # A signal has ended the last one.
        self.failing.update(failed or ran[-1:] if code not in (0, 3) else failed)
        if failed:
            code, ran = 1, [*ran, failed[0]]
        if count and not ran:  # Otherwise each mutant would count as caught.
            where = f"{mutant.file}:{mutant.line} {mutant.change}"
            raise RuntimeError(f"{where}: no test ran, so the mutant was not made (exit {code})")
        outcome = {0: "survived", 3: "survived"}.get(code, "caught")
        if not count:
            outcome = "not reached"
        elif code == -signal.SIGALRM:
            outcome = "caught by timeout"
        self.runs.update(ran)
        by = ran[-1] if outcome.startswith("caught") and ran else ""
        self.learn(mutant.file, mutant.function, by)
        self.results.append(
            {
                "file": mutant.file,
                "function": mutant.function,
                "line": mutant.line,
                "text": mutant.text,
                "change": mutant.change,
                "outcome": outcome,
                "by": by,
                "tests": len(ran),
                "of": count,
                "exit": code,
                "seconds": round(seconds, 2),
            }
        )

    def learn(self, file: str, function: str, by: str) -> None:
        """The test ``by`` has caught a mutant of ``function``."""
        if by:
            self.killers[f"{file}:{function}"][by] += 1
            self.kills[by] += 1

    def _show(self, began: float) -> None:
        last = self.results[-1]
        if not last["outcome"].startswith("caught"):
            where = f"{last['file']}:{last['line']} {last['function']}"
            _say(f"  {last['outcome']}: {where}: {last['change']}   [{last['tests']} tests, {last['seconds']} s]")
        if len(self.results) % 50 == 0:
            _say(f"  {len(self.results)} of {len(self.mutants)} mutants in {time.monotonic() - began:.0f} s")


def _forked(function: Any, *arguments: Any) -> tuple[int, int]:
    """Call ``function(write, *arguments)`` in a fork, a process group of its own: its pid, and a pipe of what it wrote."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        common.mp = _ForkedRanks()  # type: ignore[assignment]
        os.register_at_fork(after_in_child=_leave_group)
        function(lambda text: os.write(writing, text.encode()), *arguments)
        common.stop_ranks()
        os._exit(0)
    except BaseException:
        os._exit(2)


class _ForkedRanks:
    """In place of torch.multiprocessing: ranks are forks, so they have the mutant and need no import."""

    def get_context(self, _: str) -> Any:
        return multiprocessing.get_context("fork")


def _leave_group() -> None:
    """A test may start ranks while its own process has a fake group, which a rank that is no fork does not have."""
    if dist.is_initialized() and dist.get_backend() == "fake":
        dist.destroy_process_group()


def _end_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # No rank remains.


def _read(pipe: int) -> str:
    with os.fdopen(pipe, closefd=True) as file:
        return file.read()


def _say(text: str) -> None:
    os.write(_terminal, f"{text}\n".encode())


def _chosen(sources: list[Source], args: argparse.Namespace) -> list[Mutant]:
    """The mutants in an order that the seed gives, so that a run that ends early is a random sample too."""
    mutants = [m for source in sources for m in source.mutants if args.match in f"{m.file}:{m.function}"]
    random.Random(args.seed).shuffle(mutants)
    return mutants if args.all else mutants[: args.sample]


def run_fresh(name: str, args: argparse.Namespace) -> None:
    """Of a group, the mutants that no test has reached: code that runs at import. Each gets a process that imports it anew.

    With ``--match``, those of the matching functions only, and the survivors among them: a test may reach the line of a mutant
    after the import that runs it.
    """
    path = args.out / f"{name}.json"
    answer = json.loads(path.read_text())
    outcomes = ("not reached", "survived") if args.match else ("not reached",)
    waiting = [r for r in answer["mutants"] if r["outcome"] in outcomes and args.match in f"{r['file']}:{r['function']}"]
    numbers = {file: {m.key: i for i, m in enumerate(Source(ROOT, file).mutants)} for file in {r["file"] for r in waiting}}
    for result in waiting:
        number = numbers[result["file"]].get(_key(result))
        if number is None:  # The line has changed since.
            continue
        mutant = f"{result['file']}|{number}"
        environment = {**os.environ, "TORCH_RAGGED_MUTANT": mutant, "PYTHONPATH": str(HERE / "at_import")}
        command = [sys.executable, "-B", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", *AT_IMPORT]
        began, by, code = time.monotonic(), "", 0
        try:
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=30 * args.seconds)
            code, failed = done.returncode, re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
            by = failed.group(1) if failed else "the import"
        except subprocess.TimeoutExpired:
            code, by = -signal.SIGALRM, "the time limit"
        result.update(outcome="caught" if code else "survived", by=by if code else "", exit=code)
        result.update(tests=len(AT_IMPORT), of=len(AT_IMPORT), seconds=round(time.monotonic() - began, 2))
        _say(f"  {result['outcome']}: {mutant} {result['function']}: {result['change']}   [{by}, {result['seconds']} s]")
        path.write_text(json.dumps(answer, indent=1) + "\n")
    _say(f"{name}: {report.line(answer)}")


def _key(result: dict[str, Any]) -> tuple[str, str, str, str]:
    return result["file"], result["function"], result["text"], result["change"]


def run_group(name: str, args: argparse.Namespace) -> bool:
    sources = [Source(ROOT, file) for file in files_of(ROOT, name)]
    every = {mutant.key: mutant for source in sources for mutant in source.mutants}
    mutants, path = _chosen(sources, args), args.out / f"{name}.json"
    before: list[dict[str, Any]] = []
    kept: list[dict[str, Any]] = []
    if (args.again or args.more) and path.exists():
        before = [result for result in json.loads(path.read_text())["mutants"] if _key(result) in every]
        kept = [result for result in before if args.more or result["outcome"].startswith("caught")]
        survived = {_key(result) for result in before} - {_key(result) for result in kept}
        known = {_key(result) for result in kept}
        mutants = [m for m in mutants if m.key not in known] if args.more else [every[key] for key in survived]
    _say(f"{name}: {len(mutants)} of {len(every)} mutants")
    args.group = name
    session, began = Session(sources, mutants, args), time.monotonic()
    for result in before:
        session.learn(result["file"], result["function"], result["by"])
    files = [str(ROOT / test) for test in tests_of(ROOT, name)]
    options = [
        "-q",
        "-s",
        "--tb=line",
        "-m",
        "not slow",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:faulthandler",
        "-W",
        "ignore",
        f"--rootdir={ROOT}",
    ]
    if pytest.main([*options, *files], plugins=[session]) not in (0, 5):
        return False
    if args.weak:
        for test in sorted(set(session.reaching) - set(session.failing)):
            if session.reaching[test] >= _ENOUGH:
                _say(f"  weak: {test} fails for none of {session.reaching[test]} mutants that it reaches")
    run = {_key(result) for result in kept + session.results}
    results = kept + session.results + [result for result in before if _key(result) not in run]
    answer = {
        "group": name,
        "total": len(every),
        "seed": args.seed,
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(time.monotonic() - began),
        "mutants": results,
    }
    path.write_text(json.dumps(answer, indent=1) + "\n")
    _say(f"{name}: {report.line(answer)} in {answer['seconds']} s")
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", default=list(GROUPS), help=f"of {', '.join(GROUPS)}; all of them by default")
    parser.add_argument("--sample", type=int, default=25, help="mutants of each group, drawn at random")
    parser.add_argument("--all", action="store_true", help="all mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--match", default="", help="only mutants whose FILE:FUNCTION contains this text")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "mutants")
    parser.add_argument("--again", action="store_true", help="those that survived the last run, and keep the other results")
    parser.add_argument("--more", action="store_true", help="those that the last run did not reach, and keep its results")
    parser.add_argument("--seconds", type=float, default=30.0, help="of tests for one mutant")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no mutant of a group after so many")
    parser.add_argument(
        "--weak", action="store_true", help="let all tests run that reach a mutant; list those that fail for none"
    )
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="those that no test has reached, each in a process that imports it; with --match, survivors too",
    )
    parser.add_argument("--write", action="store_true", help="write docs/data/mutants.json from --out, and run nothing")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.write:
        report.write(args.out, list(GROUPS))
        return 0
    for name in args.groups:
        if args.fresh:
            run_fresh(name, args)
            continue
        pid = os.fork()  # Each group collects its tests in a fresh process that has torch already.
        if not pid:
            os._exit(0 if run_group(name, args) else 1)
        if os.waitpid(pid, 0)[1]:
            return 1
    return 0


_terminal = os.dup(1)
_FAILED = "failed: "
_ENOUGH = 5  # A test that reaches fewer mutants is not judged by them.

if __name__ == "__main__":
    hypothesis.settings.register_profile(
        "mutants",
        database=None,
        derandomize=True,
        print_blob=False,
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    )
    hypothesis.settings.load_profile("mutants")
    sys.exit(main())
