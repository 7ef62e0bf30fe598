"""Process: names a process of the cluster, and tells on its own host whether it runs.

Nothing here communicates.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Process", "myself", "process_state_of"]


@dataclass(frozen=True)
class Process:
    """A process of this cluster. ``started`` tells it from a later process of the same number."""

    host: str
    pid: int
    started: str

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host.partition('/')[0]}"


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


def process_state_of(process: Process) -> str:
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
