"""Faults of checkpoints, injected many times: what the user saw, how soon, what was lost.

    python test/reliability/checkpoint_faults.py --times 20 --json FILE [--only NAME ...]

Prints one JSON line per kind of fault. Every trial starts from a complete checkpoint. After the fault, a checkpoint that was
complete before, or the new one, must load and hold the right values; otherwise data was lost.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ("checkpoint", "common")]
from checkpoint_crash import Recorder, crash_states, write_state  # noqa: E402
from checkpoint_jobs import POINTS, Job  # noqa: E402
from checkpoint_ranks import LOAD, PUBLISH, RANKS, SAVE, kill_one, value_in  # noqa: E402
from common import error_of  # noqa: E402

from torch_ragged import checkpoint  # noqa: E402
from torch_ragged.checkpoint import _disk  # noqa: E402
from torch_ragged.checkpoint._files import CHECKSUM_BLOCK  # noqa: E402
from torch_ragged.checkpoint._manifest import CHUNKS, _checksum  # noqa: E402

DATA = "__0_0.distcp"


@dataclass
class Seen:
    """One injection: the texts that ranks saw, the seconds until the last, whether data was lost, how many ranks hang."""

    texts: list[str]
    seconds: float
    lost: bool
    hangs: int = 0


Trial = Callable[[Path, random.Random], Seen]


@dataclass
class Kind:
    """A fault: a trial, what the user sees in words, and a pattern of each text; an empty pattern expects no error."""

    run: Trial
    saw: str
    pattern: str


def state_of(value: float, step: int, size: int = 10) -> checkpoint.TrainState:
    model = nn.Module()
    model.weight = nn.Parameter(torch.full((size, 6), float(value)))
    return checkpoint.TrainState(model, torch.optim.SGD(model.parameters(), 0.1), step=step)


def loads(path: Path, *legal: float, size: int = 10) -> bool:
    """Whether the latest checkpoint in ``path`` loads and has one of these values in every element."""
    state = state_of(0, 0, size)
    text = error_of(checkpoint.load, path, state)
    return not text and set(state.model.weight.flatten().tolist()) in [{float(value)} for value in legal]  # type: ignore


def timed(call: Callable[..., Any], *arguments: Any) -> tuple[str, float]:
    start = time.monotonic()
    return error_of(call, *arguments), time.monotonic() - start


# -- ranks that die ------------------------------------------------------------------------------------------------------


def killed(call: str) -> Trial:
    points = [(victim, point) for point in (SAVE if call == "save" else LOAD).values() for victim in range(RANKS)]
    points += [(0, point) for point in PUBLISH.values()] if call == "save" else []
    random.Random(0).shuffle(points)
    numbers = iter(range(10**9))

    def run(folder: Path, rng: random.Random) -> Seen:
        victim, point = points[next(numbers) % len(points)]
        texts, seconds = kill_one(folder, 0, victim, call, point)
        # Each text must name the victim; the pattern of the kind cannot know its number.
        named = [text if f"rank {victim} died" in text else f"the wrong rank: {text}" for text in texts.values()]
        return Seen(named, seconds, value_in(folder / "run0") != 1, list(texts.values()).count("hangs"))

    return run


def all_killed_in_a_save(folder: Path, rng: random.Random) -> Seen:
    """A job is killed at a random moment; another saves at once."""
    path, first = folder / "run", Job(folder)
    assert first.save(str(path), 1, 5) == ["", ""]
    first.tell("save", str(path), 2, 5 + rng.randrange(2))
    time.sleep(rng.uniform(0, 0.05))
    first.end()
    start = time.monotonic()
    lost = not fits(path, 1, 2)
    second = Job(folder)
    texts = second.save(str(path), 3, 6)
    second.end()
    return Seen(texts, time.monotonic() - start, lost or not fits(path, 3))


def fits(path: Path, *legal: float) -> bool:
    """As :func:`loads`, for the model of ``checkpoint_jobs``."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(12, 10))
    text = error_of(checkpoint.load, path, checkpoint.TrainState(model))
    return not text and set(model.weight.flatten().tolist()) in [{float(value)} for value in legal]


# -- two writers ---------------------------------------------------------------------------------------------------------


def stopped_job(folder: Path, point: tuple[str, int]) -> tuple[Path, Job]:
    path, first = folder / "run", Job(folder)
    assert first.save(str(path), 1, 5) == ["", ""]
    first.tell("stop before", point, ranks=(0,))
    assert first.ranks[0][1].recv() == ""
    first.tell("save", str(path), 2, 5)
    first.wait_until_stopped()
    return path, first


def two_writers(folder: Path, rng: random.Random) -> Seen:
    """Another job saves while the first is in its save, and renews its lease."""
    path, first = stopped_job(folder, rng.choice(list(POINTS.values())))
    for lease in path.glob("writer-*.lease"):
        os.utime(lease, (2**31, 2**31))
    second = Job(folder)
    start = time.monotonic()
    texts = second.save(str(path), 3, 5)
    seconds = time.monotonic() - start
    lost = not fits(path, 1)
    first.go_on()
    lost |= first.answers() != ["", ""] or not fits(path, 2)
    first.end()
    second.end()
    return Seen(texts, seconds, lost)


def stopped_writer(folder: Path, rng: random.Random) -> Seen:
    """A stopped writer is replaced after its lease is over, and goes on: it must publish nothing."""
    path, first = stopped_job(folder, rng.choice(list(POINTS.values())))
    for lease in path.glob("writer-*.lease"):
        os.utime(lease, (1, 1))
    second = Job(folder)
    lost = second.save(str(path), 3, 5) != ["", ""] or not fits(path, 3)
    start = time.monotonic()
    first.go_on()
    texts = first.answers()
    seconds = time.monotonic() - start
    lost |= not fits(path, 3)
    first.end()
    second.end()
    return Seen(texts, seconds, lost)


# -- storage -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def small_disk(folder: Path, nbytes: int) -> Iterator[None]:
    """A tmpfs of so many bytes at ``folder``."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "none", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def disk_full(folder: Path, rng: random.Random) -> Seen:
    """A disk that has room for one checkpoint and a part of the next."""
    with small_disk(folder / "disk", 4096 * rng.randrange(128, 230)):
        path, size = folder / "disk" / "run", 20_000
        checkpoint.save(path, state_of(1, 1, size))
        text, seconds = timed(checkpoint.save, path, state_of(2, 1 + rng.randrange(2), size))
        return Seen([text], seconds, not loads(path, 1, size=size))


def file_too_large(folder: Path, rng: random.Random) -> Seen:
    """A limit of the size of files, at a random size: the kernel takes a part of a write."""
    import resource

    path = folder / "run"
    checkpoint.save(path, state_of(1, 1))
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (rng.randrange(1000, 6000), old[1]))
    try:
        text, seconds = timed(checkpoint.save, path, state_of(2, 2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    return Seen([text], seconds, not loads(path, 1))


def error_of_the_disk(*operations: str) -> Trial:
    """An operation of the disk fails with EIO, at a random call of one of ``operations``."""

    def run(folder: Path, rng: random.Random) -> Seen:
        path, name = folder / "run", rng.choice(operations)
        checkpoint.save(path, state_of(1, 1))
        real, calls = getattr(_disk, name), [0]
        nth = rng.randrange({"create": 4, "sync": 3, "write": 20, "rename": 2, "sync_folder": 1, "mkdir": 1}[name])

        def fail(*arguments: Any) -> Any:
            calls[0] += 1
            if calls[0] == nth + 1:
                raise OSError(errno.EIO, "Input/output error", str(arguments[0]))
            return real(*arguments)

        with mock.patch.object(_disk, name, fail):
            text, seconds = timed(checkpoint.save, path, state_of(2, 1))
        return Seen([text], seconds, not loads(path, 1))

    return run


def read_error(folder: Path, rng: random.Random) -> Seen:
    """Reading a file fails with EIO: the newest checkpoint is refused, nothing is changed."""
    path = folder / "run"
    newest = checkpoint.save(path, state_of(1, 1))
    bad = rng.choice(["manifest.json", ".metadata", CHUNKS, DATA])
    real = _disk.open_regular

    def fail(file: Path, *arguments: Any) -> Any:
        if file.name == bad:
            raise OSError(errno.EIO, "Input/output error", str(file))
        return real(file, *arguments)

    state = state_of(7, 7)
    with mock.patch.object(_disk, "open_regular", fail):
        text, seconds = timed(checkpoint.load, newest, state)
    return Seen([text], seconds, not loads(path, 1) or not bool((state.model.weight == 7).all()))  # type: ignore[union-attr]


# -- damaged and forged files --------------------------------------------------------------------------------------------


def damaged(damage: Callable[[Path, random.Random], None]) -> Trial:
    """A file of the newest checkpoint is damaged: the load names it, changes nothing; the one before still loads."""

    def run(folder: Path, rng: random.Random) -> Seen:
        path = folder / "run"
        older = checkpoint.save(path, state_of(1, 1))
        newest = checkpoint.save(path, state_of(2, 2))
        damage(newest / rng.choice(["manifest.json", ".metadata", CHUNKS, DATA]), rng)
        state = state_of(7, 7)
        text, seconds = timed(checkpoint.load, newest, state)
        changed = not bool((state.model.weight == 7).all())  # type: ignore[union-attr]
        return Seen([text], seconds, changed or not loads(older, 1))

    return run


def truncate(file: Path, rng: random.Random) -> None:
    os.truncate(file, rng.randrange(file.stat().st_size))


def flip_a_bit(file: Path, rng: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def replace_by(make: Callable[[Path], None]) -> Callable[[Path, random.Random], None]:
    def run(file: Path, rng: random.Random) -> None:
        file.rename(file.with_name("moved"))
        make(file)

    return run


def forged_manifest(file: Path, rng: random.Random) -> None:
    """A right checksum over wrong contents."""
    file = file.with_name("manifest.json")
    body = json.loads(file.read_text())["manifest"]
    record, tensor = body["files"][DATA], body["tensors"]["model.weight"]
    changes: list[Callable[[], Any]] = [
        lambda: record.update(nbytes=rng.choice([-1, 2**40, 2**70, "1", None, True])),
        lambda: record.update(crc32=[]),
        lambda: record.update(block=0),
        lambda: tensor.update(shape=rng.choice([[2**40, 6], [-1], "x", [1] * 100])),
        lambda: tensor.update(dtype=rng.choice([3, "float77", "int8"])),
        lambda: body.update(world_size=10**9),
        lambda: body["files"].update({"../step-00000001/" + DATA: record}),
        lambda: body.update(files={}),
        lambda: body.update(step="1"),
    ]
    rng.choice(changes)()
    file.write_text(json.dumps({"crc32": _checksum(body), "manifest": body}))


def code_in(folder: Path, rng: random.Random) -> Seen:
    """A pickle that creates a file, in the place of an object or of DCP's metadata, with right checksums."""
    path, ran = folder / "run", folder / "ran"
    state = state_of(2, 2)
    where = rng.choice(["extra", "per_rank", "param_groups", ".metadata"])
    if where == "param_groups":
        state.optimizers[0].param_groups[0]["evil"] = Evil(ran)
    elif where != ".metadata":
        setattr(state, where, {"evil": Evil(ran)})
    newest = checkpoint.save(path, state)
    if where == ".metadata":
        import pickle

        content = pickle.dumps(Evil(ran))
        (newest / where).write_bytes(content)
        body = json.loads((newest / "manifest.json").read_text())["manifest"]
        del body["files"][CHUNKS]  # As of an earlier version: ``load`` reads .metadata.
        body["files"][where] = {"nbytes": len(content), "block": CHECKSUM_BLOCK, "crc32": [f"{zlib.crc32(content):08x}"]}
        (newest / "manifest.json").write_text(json.dumps({"crc32": _checksum(body), "manifest": body}))
    victim = state_of(7, 7)
    if where == "param_groups":
        victim.optimizers[0].param_groups[0]["evil"] = None
    elif where != ".metadata":
        setattr(victim, where, {"evil": None})
    text, seconds = timed(checkpoint.load, newest, victim)
    return Seen([text], seconds, ran.exists() or not bool((victim.model.weight == 7).all()))  # type: ignore[union-attr]


class Evil:
    """A pickle that creates a folder when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


# -- power loss ----------------------------------------------------------------------------------------------------------


def power_loss(replayed: list[int]) -> Trial:
    """Every disk that a power loss may leave, after each operation of a save of a random kind. See checkpoint_crash."""

    def run(folder: Path, rng: random.Random) -> Seen:
        root = folder / "recorded"
        root.mkdir()
        recorder = Recorder(root)
        with recorder.record():
            checkpoint.save(root / "run", state_of(1, 5))
            before = len(recorder.log)
            checkpoint.save(root / "run", state_of(2, 5 + rng.randrange(2)))
        start, lost = time.monotonic(), False
        for number, (done, state) in enumerate(crash_states(recorder.log, before)):
            left = folder / f"left{number}"
            left.mkdir()
            write_state(state, left)
            lost |= not loads(left / "run", *((2,) if done == len(recorder.log) else (1, 2)))
            shutil.rmtree(left)
            replayed[0] += 1
        return Seen([""], time.monotonic() - start, lost)

    return run


REPLAYED = [0]
NAMED = r"CheckpointError: (saving|loading) .*rank \d died: process \d+ on host"
KINDS = {
    "kill -9 of a rank during a save": Kind(killed("save"), "the rank, and what ranks did", NAMED),
    "kill -9 of a rank during a load": Kind(killed("load"), "the rank, and what ranks did", NAMED),
    "kill -9 of all ranks during a save": Kind(
        all_killed_in_a_save, "nothing: the next job saves at once, the old or the new checkpoint loads", ""
    ),
    "two jobs save to one folder": Kind(
        two_writers,
        "the loser: the other job's host, process and start, on all ranks",
        r"CheckpointError: .* is in use: process",
    ),
    "writer stopped (SIGSTOP), replaced, continued": Kind(
        stopped_writer, "the stopped one: which job took over", r"CheckpointError: .*(was taken over|cannot be|No such file)"
    ),
    "disk full (tmpfs)": Kind(disk_full, "the file, bytes needed and free", r"CheckpointError: .*No space left .*free"),
    "file size limit": Kind(file_too_large, "the file", r"CheckpointError: .*File too large: .*step-00000002"),
    "EIO from write, fsync, rename or create": Kind(
        error_of_the_disk("create", "write", "sync", "rename", "sync_folder", "mkdir"),
        "the file",
        r"CheckpointError: .*(Input/output error|cannot be renamed)",
    ),
    "EIO from reading": Kind(read_error, "the file", r"CheckpointError: .*(Input/output error|cannot be read)"),
    "file truncated": Kind(damaged(truncate), "the file and its sizes", r"CheckpointError: .*(is truncated|is damaged)"),
    "one bit flipped": Kind(damaged(flip_a_bit), "file, bytes, tensors", r"CheckpointError: .*(is damaged|has format)"),
    "file missing": Kind(
        damaged(lambda file, rng: file.unlink()), "the file", r"CheckpointError: .*(is missing|No such file|cannot be read)"
    ),
    "forged manifest": Kind(damaged(forged_manifest), "the field", r"CheckpointError: .*(is damaged|is truncated|is missing)"),
    "named pipe in place of a file": Kind(damaged(replace_by(os.mkfifo)), "the file", r"CheckpointError: .*it is a named pipe"),
    "link that leaves the folder": Kind(
        damaged(replace_by(lambda file: file.symlink_to("/etc/hostname"))),
        "the file",
        r"CheckpointError: .*it is a symbolic link",
    ),
    "pickle that runs code": Kind(code_in, "the name", r"CheckpointError: .*(holds more than data|it holds posix)"),
    "power loss at every operation of a save": Kind(power_loss(REPLAYED), "nothing: the old or the new checkpoint loads", ""),
}


def row(name: str, kind: Kind, times: int, seed: int) -> dict[str, Any]:
    """Inject one kind of fault and count what was seen."""
    trials, problems = [], []
    for number in range(times):
        with tempfile.TemporaryDirectory() as folder:
            seen = kind.run(Path(folder), random.Random(f"{seed} {name} {number}"))
        trials.append(seen)
        for text in seen.texts:
            if not re.match(kind.pattern, text, re.DOTALL) or not kind.pattern and text:
                problems.append(text)
    for text in problems[:5]:
        print(f"{name}: not as expected: {text[:500]}", file=sys.stderr)
    seconds = [seen.seconds for seen in trials]
    return {
        "fault": name,
        "times": times,
        "saw": kind.saw,
        "pattern": kind.pattern,
        "errors": sorted({text.partition(":")[0] for seen in trials for text in seen.texts if text}),
        "seconds_median": round(statistics.median(seconds), 2),
        "seconds_max": round(max(seconds), 2),
        "hangs": sum(seen.hangs for seen in trials),
        "not_as_expected": len(problems),
        "data_lost": sum(seen.lost for seen in trials),
        **({"disks_replayed": REPLAYED[0]} if name.startswith("power loss") else {}),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Inject faults into saves and loads of checkpoints.")
    parser.add_argument("--times", type=int, default=20, help="injections of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write all rows to this file")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="kinds whose names hold one of these words")
    args = parser.parse_args()
    torch.set_num_threads(1)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    rows = []
    for name, kind in KINDS.items():
        if args.only and not any(word in name for word in args.only):
            continue
        if name.startswith("disk full") and os.geteuid():
            print(f"{name}: left out, because only root mounts a tmpfs", file=sys.stderr)
            continue
        rows.append(row(name, kind, args.times, args.seed))
        print(json.dumps(rows[-1]), flush=True)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"torch": torch.__version__, "seed": args.seed, "rows": rows}, indent=1) + "\n")
    return int(any(each["hangs"] or each["data_lost"] or each["not_as_expected"] for each in rows))


if __name__ == "__main__":
    sys.exit(main())
