"""Programs under torchrun of which rank 1 fails, each in its own way: what the log says, and how each rank ends.

``python test/ranks/killed.py [NAME ...]`` runs them and prints the rows of the table in docs/running.md.
"""

from __future__ import annotations

import datetime
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from torch_ragged import checkpoint
from torch_ragged.checkpoint import _files
from torch_ragged.fsdp import fully_shard

__all__ = ["KINDS", "log_of"]

RANKS, STEP, SIZE = 3, 3, 8
ENDS = "torchrun sends SIGTERM to this process"


class Layer(nn.Linear):
    """Fails on rank 1 in forward or in backward of step 3, if the kind says so."""

    fails_in = ""

    def forward(self, x):
        if self.fails_in == "forward":
            os.kill(os.getpid(), signal.SIGKILL)
        out = super().forward(x)
        if self.fails_in == "backward":
            out.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
        return out


class Kind(NamedTuple):
    """One way to fail.

    Attributes:
        text: for the table.
        exits: the exit code of rank 1; None if torchrun has to kill it.
        log: what the log of another rank must have.
    """

    text: str
    exits: int | None
    log: str


DIED = r"rank 1 (died: process \d+ on host \S+ has ended|died: its program has ended|at the end of its program)"
KINDS = {
    "forward": Kind("SIGKILL in a forward", -9, DIED),
    "backward": Kind("SIGKILL in a backward", -9, DIED),
    "before": Kind("an exception before a collective", 1, r"rank 1 ended by ValueError: rank 1 fails before a collective"),
    "after": Kind("an exception after a collective", 1, r"rank 1 ended by ValueError: rank 1 fails after a collective"),
    "exit0": Kind("`sys.exit(0)`, early", 0, DIED),
    "exit3": Kind("`sys.exit(3)`", 3, DIED),
    "memory": Kind("out of memory", 1, r"rank 1 ended by \w+: "),
    "save": Kind("SIGKILL while it saves in the background", -9, DIED),
    "worker": Kind("its data loader's worker is killed", 1, r"rank 1 ended by RuntimeError: DataLoader worker"),
    "stopped": Kind("stopped (SIGSTOP)", None, r"rank 1 is stopped: process \d+ on host"),
    "barrier": Kind("SIGKILL while the others are in `dist.barrier()`", -9, DIED),
    "handler": Kind("SIGKILL; the others have a handler of SIGTERM", -9, DIED),
}


def killed_worker(_):
    os.kill(os.getpid(), signal.SIGKILL)


def fail(kind, model, state, group, folder):
    """What rank 1 does in step 3, and what the others do beside it."""
    is_victim = dist.get_rank() == 1
    if kind == "save":
        if is_victim:
            _files._HashingFile.write = lambda self, data: os.kill(os.getpid(), signal.SIGKILL)
        checkpoint.async_save(folder, state, process_group=group)
    elif kind == "barrier":
        if is_victim:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
    if not is_victim:
        return
    if kind in ("forward", "backward", "handler"):
        model[1].fails_in = "forward" if kind == "forward" else "backward"
    elif kind == "before":
        raise ValueError("rank 1 fails before a collective")
    elif kind == "after":
        model(torch.ones(2, SIZE))
        raise ValueError("rank 1 fails after a collective")
    elif kind.startswith("exit"):
        sys.exit(int(kind[-1]))
    elif kind == "memory":
        torch.empty(1 << 50)
    elif kind == "worker":
        next(iter(DataLoader([1], num_workers=1, collate_fn=killed_worker, multiprocessing_context="fork")))
    elif kind == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)


def leave(number, frame):
    print("the program's own handler", file=sys.stderr, flush=True)
    os._exit(7)


def main(kind, folder):
    torch.set_num_threads(1)
    if kind == "handler":
        signal.signal(signal.SIGTERM, leave)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=8 if kind == "stopped" else 60))
    group = dist.new_group(backend="gloo")
    model = nn.Sequential(*(Layer(SIZE, SIZE) for _ in range(3)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    state = checkpoint.TrainState(model, optimizer)
    while True:
        if state.step == STEP:
            fail(kind, model, state, group, folder)
        model(torch.ones(2, SIZE)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        state.step += 1


def log_of(kind):
    """Run torchrun; the log of each rank, torchrun's own, and the exit code of each rank by what torchrun says."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        command += ["--log-dir", folder, "--redirects", "3", __file__, "--rank", kind, folder]
        done = subprocess.run(command, capture_output=True, text=True, timeout=150)
        logs = [next(Path(folder).rglob(f"{rank}/stderr.log")).read_text() for rank in range(RANKS)]
    found = re.findall(r"rank +: (\d+) .*?exitcode +: (-?\d+)", done.stderr, re.DOTALL)
    return logs, done.stderr, {int(rank): int(code) for rank, code in found}


def row(kind):
    """A row of the table: the kind, the exit codes of rank 1 and of rank 0, and what rank 0 has logged."""
    logs, _, codes = log_of(kind)
    doing = re.search(rf"{re.escape(ENDS)}, which (.*?), called", logs[0])
    found = re.search(KINDS[kind].log, logs[0])
    how = f"SIGTERM: it {doing[1]}" if doing else "`PeerError`" if "PeerError" in logs[0] else ""
    cause = re.sub(r": process \d+ on host( \S+ has ended)?", "", found[0]) if found else ""
    return f"| {KINDS[kind].text} | {codes.get(1, 0)} | {codes.get(0, 0)} | {how}; {cause} |"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        main(*sys.argv[2:])
    else:
        for name in sys.argv[1:] or KINDS:
            print(row(name), flush=True)
