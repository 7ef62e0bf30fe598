"""Which rank died: ranks tell each other their host and process once, and look at the processes after a collective failed.

Nothing here communicates: :func:`note` stores what an all-gather of the caller has brought.
"""

from __future__ import annotations

import os
import re
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

import torch.distributed as dist

__all__ = ["Process", "explain", "myself", "note", "state_of"]

_PATIENCE = 2.0  # Seconds until a process whose connections are closed is gone from the process table.
_ADDRESS = re.compile(r"\[([0-9a-fA-F.:]+)\]:\d+")  # as gloo writes the address of a peer


@dataclass(frozen=True)
class Process:
    """A process of this cluster. ``started`` tells it from a later process of the same number."""

    host: str
    pid: int
    started: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def myself() -> Process:
    """This process."""
    return Process(_host(), os.getpid(), _stat(os.getpid())[1])


def _host() -> str:
    """The host's name and the id of its boot: containers may share a name, and process numbers begin anew after a boot."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
        namespace = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    except OSError:
        return socket.gethostname()
    return f"{socket.gethostname()}/{boot}/{namespace}"


def _stat(pid: int) -> tuple[str, str]:
    """The state and the start time of a process, from /proc; ("", "") if it is gone or there is no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


def state_of(process: Process) -> str:
    """Return "running", "stopped" or "gone" for a process of this host; "" if it cannot be told from here."""
    if process.host != _host():
        return ""
    if not process.started:  # No /proc here.
        try:
            os.kill(process.pid, 0)
        except ProcessLookupError:
            return "gone"
        except PermissionError:
            pass
        return "running"
    state, started = _stat(process.pid)
    if started != process.started or state in ("Z", "X"):
        return "gone"
    return "stopped" if state in ("T", "t") else "running"


_processes: WeakKeyDictionary[dist.ProcessGroup, list[Process]] = WeakKeyDictionary()


def note(group: dist.ProcessGroup | None, processes: list[Process]) -> None:
    """Remember the processes of the ranks of ``group``, in rank order."""
    _processes[_key(group)] = processes


def _key(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    group = group or dist.group.WORLD
    assert group is not None
    return group


def _states(known: list[Process]) -> dict[int, str]:
    return {rank: state_of(process) for rank, process in enumerate(known)}


def explain(group: dist.ProcessGroup | None, error: BaseException) -> str:
    """Which ranks of ``group`` are gone or stopped, after a collective raised ``error``. Takes up to two seconds."""
    known = _processes.get(_key(group), []) if dist.is_initialized() else []
    deadline = time.monotonic() + _PATIENCE
    states = _states(known)
    while not {"gone", "stopped"} & set(states.values()) and time.monotonic() < deadline:
        time.sleep(0.02)
        states = _states(known)
    # Once more: a rank that ended because of the first dead one may have been seen, and the first not, while it was exiting.
    states = _states(known)
    found = [
        f"rank {rank} ({known[rank]}) {verb}"
        for wanted, verb in (("gone", "died"), ("stopped", "is stopped"))
        for rank, state in states.items()
        if state == wanted
    ]
    elsewhere = [rank for rank, state in states.items() if not state]
    address = _ADDRESS.search(str(error))
    if not found and elsewhere:
        at = f" at {address[1]}" if address else ""
        found.append(f"a rank on another host{at} died or does not answer: one of ranks {', '.join(map(str, elsewhere))}")
    return "; ".join(found) or "a rank died or does not answer"
