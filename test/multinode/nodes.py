"""Nodes: several hosts on one machine, as network namespaces that veth pairs connect. It needs root, iproute2 and nftables."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from typing import Any

__all__ = ["Nodes", "why_no_nodes"]

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET


def why_no_nodes() -> str:
    """Why this machine can make no nodes; empty if it can."""
    missing = [tool for tool in ("ip", "nft") if shutil.which(tool) is None]
    if missing:
        return f"needs {' and '.join(missing)} (iproute2, nftables)"
    if os.geteuid() != 0:
        return "needs root"
    name = f"probe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"cannot make network namespaces: {made.stderr.strip()}"
    rules = subprocess.run(["ip", "netns", "exec", name, "nft", "list", "ruleset"], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], check=True)
    return f"has no nftables: {rules.stderr.strip()}" if rules.returncode else ""


class Nodes:
    """Two nodes with one network between them.

    ::

        namespace of node 0   eth0 10.77.0.1  <-- veth pair -->  eth0 10.77.0.2   namespace of node 1

    A context: at its end the namespaces, and all that runs in them, are gone.
    """

    interface = "eth0"

    def __init__(self) -> None:
        self.names = [f"ragged{os.getpid()}n{node}" for node in range(2)]
        self.addresses = ["10.77.0.1", "10.77.0.2"]

    def __enter__(self) -> Nodes:
        ends = [f"r{os.getpid()}v{node}" for node in range(2)]
        for name in self.names:
            _call("ip", "netns", "add", name)
        _call("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address in zip(self.names, ends, self.addresses, strict=True):
            _call("ip", "link", "set", end, "netns", name)
            _call("ip", "-n", name, "link", "set", end, "name", self.interface)
            _call("ip", "-n", name, "addr", "add", f"{address}/24", "dev", self.interface)
            _call("ip", "-n", name, "link", "set", self.interface, "up")
            _call("ip", "-n", name, "link", "set", "lo", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
            for pid in found.stdout.split():
                subprocess.run(["kill", "-9", pid], capture_output=True)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def popen(self, node: int, *command: str, **options: Any) -> subprocess.Popen[str]:
        """Start a command on a node."""
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": self.interface, "OMP_NUM_THREADS": "1", **options.pop("env", {})}
        return subprocess.Popen(["ip", "netns", "exec", self.names[node], *command], env=environment, text=True, **options)

    def enter(self, node: int) -> None:
        """Move this process to a node."""
        with open(f"/var/run/netns/{self.names[node]}") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEW_NETWORK):
                raise OSError(ctypes.get_errno(), f"cannot enter {self.names[node]}")
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface

    def drop(self, percent: int) -> None:
        """From now on, lose so many of a hundred packets in each direction. 100 cuts the link: no end sees an error."""
        self.heal()
        rule = "drop" if percent == 100 else f"numgen random mod 100 < {percent} drop"
        for name in self.names:
            table = (
                f"table inet faults {{ chain in {{ type filter hook input priority 0; iifname {self.interface} {rule} ; }} ; }}"
            )
            _call("ip", "netns", "exec", name, "nft", table)

    def heal(self) -> None:
        """Lose no packets any more."""
        for name in self.names:
            _call("ip", "netns", "exec", name, "nft", "flush", "ruleset")

    def unplug(self, node: int, is_up: bool = False) -> None:
        """Take down the interface of a node, or up again."""
        _call("ip", "-n", self.names[node], "link", "set", self.interface, "up" if is_up else "down")


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
