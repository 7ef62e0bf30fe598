"""The lease of a writer, a small file that names the job that saves. One job saves to a folder at a time.

A lease alone never makes a save safe, because its holder may be stopped for any time. Therefore a taker also renames the
working folder of a dead holder, which then cannot publish it. A lease is a file ``writer-<token>.lease``. No other writer uses
this name, so the file is never overwritten, and removing it takes the lease from its holder and no other.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import secrets
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch_ragged._ranks.process import Process, myself, process_state_of
from torch_ragged.checkpoint import _disk
from torch_ragged.checkpoint._errors import CheckpointError
from torch_ragged.checkpoint._files import names_file

__all__ = ["Lease", "acquire", "held_tokens", "lease_seconds", "owner_of_this_process"]

_NAME = re.compile(r"writer-([0-9a-f]{16})\.lease")
_VARIABLE = "TORCH_RAGGED_CHECKPOINT_LEASE_SECONDS"
_DEFAULT_SECONDS = 120.0
_MOST_LEASE_BYTES = 1 << 16  # of a lease file
_JOB_VARIABLES = ("SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID", "FLUX_JOB_ID", "TORCHELASTIC_RUN_ID", "JOB_NAME")
_lease_owner = secrets.token_hex(8)


def owner_of_this_process() -> str:
    """A random name of this process. All writers with one owner share the folder: the owner runs its saves in their order."""
    return f"{_lease_owner}-{os.getpid()}"  # A forked process is another writer.


def lease_seconds() -> float:
    """After so many seconds without renewal, a lease may be taken.

    Raises:
        ValueError: the environment variable ``TORCH_RAGGED_CHECKPOINT_LEASE_SECONDS`` is no positive number.
    """
    text = os.environ.get(_VARIABLE)
    if text is None:
        return _DEFAULT_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"{_VARIABLE} must be a number of seconds > 0, got {text!r}")
    return seconds


@dataclass(frozen=True)
class _Holder:
    """The contents of a lease file."""

    owner: str
    process: Process
    since: str
    job: str = ""

    def __str__(self) -> str:
        job = f" of job {self.job}" if self.job else ""
        return f"process {self.process.pid}{job} on {self.process.host.partition('/')[0]}, since {self.since}"


class Lease:
    """A lease that this process holds. A thread renews it, by a new time of its file, until :meth:`release`."""

    def __init__(self, path: Path, seconds: float) -> None:
        self.path = path
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._renew, args=(seconds / 6,), daemon=True, name="checkpoint lease")
        self._thread.start()

    def _renew(self, pause: float) -> None:
        while not self._done.wait(pause):
            try:
                os.utime(self.path)
            except FileNotFoundError:
                return  # It was taken: check() finds this too.
            except OSError:
                pass  # The storage may come back before the lease ends.

    def check(self) -> None:
        """Check that this process still holds the lease.

        Raises:
            CheckpointError: another writer took it.
        """
        if not self.path.exists():
            others = [str(holder) for holder, _ in _others(self.path.parent, "").values() if holder is not None]
            by = f" by {' and '.join(others)}" if others else ""
            raise CheckpointError(
                f"{self.path.parent} was taken over{by}: this writer did not renew its lease {self.path.name} in time, because "
                "its process was stopped or its storage did not answer. It published nothing"
            )

    def release(self) -> None:
        """Give the lease up. No error if it was taken."""
        self._done.set()
        with suppress(OSError):
            _disk.unlink(self.path)


def acquire(folder: Path, token: str, owner: str) -> Lease:
    """Take the lease of ``folder``, and those of dead writers from them.

    A lease is dead if its process is gone from this host, or if it was not renewed for :func:`lease_seconds`, by the clock of
    the storage. Takes up to two seconds if another writer tries at the same time.

    Args:
        folder: the folder of the run's checkpoints. It exists.
        token: 16 hexadecimal digits that no other writer uses.
        owner: leases of this owner are no obstacle.

    Raises:
        CheckpointError: another writer holds the lease. The text names its host, process and job, and since when.
    """
    seconds = lease_seconds()
    mine = folder / f"writer-{token}.lease"
    job = next((os.environ[name] for name in _JOB_VARIABLES if os.environ.get(name)), "")  # If the launcher has set one.
    holder = _Holder(owner, myself(), datetime.datetime.now(datetime.timezone.utc).isoformat(" ", "seconds"), job)
    text = json.dumps(asdict(holder)).encode()
    try:
        with names_file(mine, len(text)), _disk.create(mine) as file:
            _disk.write(file, text)
        _wait_for_others(folder, mine, owner, seconds)
    except BaseException:
        _disk.unlink(mine)  # Also an empty file, of a full disk: other jobs would wait for it.
        raise
    return Lease(mine, seconds)


def _wait_for_others(folder: Path, mine: Path, owner: str, seconds: float) -> None:
    """Return when ``mine`` is the only lease of a living writer. Of two that try at once, the lower name waits."""
    deadline = time.monotonic() + 2
    while True:
        living: dict[Path, _Holder | None] = {}
        now = mine.stat().st_mtime
        for path, (holder, renewed) in _others(folder, mine.name).items():
            if holder is not None and holder.owner == owner:
                continue
            if (holder is not None and process_state_of(holder.process) == "gone") or now - renewed > seconds:
                _disk.unlink(path)  # From now on its holder cannot publish: check() fails, and its folder will be removed.
            else:
                living[path] = holder
        if not living:
            return
        path = min(living)
        if path.name < mine.name or time.monotonic() > deadline:
            raise CheckpointError(
                f"{folder} is in use: {living[path] or path.name} saves to it. One job may save to a folder at a time: end "
                "that job, or save to another folder. The lease of a job that died on another host ends after "
                f"{seconds:g} seconds"
            )
        time.sleep(0.05)
        os.utime(mine)  # For the time of the storage.


def _others(folder: Path, mine: str) -> dict[Path, tuple[_Holder | None, float]]:
    """The other leases in ``folder``: the holder, None if the file cannot be read, and the time of its last renewal."""
    found: dict[Path, tuple[_Holder | None, float]] = {}
    for path in folder.iterdir():
        if not _NAME.fullmatch(path.name) or path.name == mine:
            continue
        try:
            renewed = path.lstat().st_mtime
            with _disk.open_regular(path) as file:
                found[path] = _holder(json.loads(file.read(_MOST_LEASE_BYTES))), renewed
        except FileNotFoundError:
            continue  # Released just now.
        except (OSError, ValueError, KeyError, TypeError, RecursionError, CheckpointError):
            found[path] = None, renewed  # Its writer may be about to write it: it counts until its time is over.
    return found


def _holder(body: dict[str, Any]) -> _Holder:
    process = body["process"]
    return _Holder(
        str(body["owner"]),
        Process(str(process["host"]), int(process["pid"]), str(process["started"])),
        str(body["since"])[:40],
        str(body["job"])[:80],
    )


def held_tokens(folder: Path) -> set[str]:
    """The tokens of all leases in ``folder``. Call it while holding one: the leases of dead writers are gone then."""
    return {match[1] for match in (_NAME.fullmatch(path.name) for path in folder.iterdir()) if match}
