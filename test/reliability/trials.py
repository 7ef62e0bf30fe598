"""Trials: ranks that train a small model until a fault is injected, and what each of them then saw.

Ranks are forked from this process, which has imported everything: a trial takes seconds.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torch_ragged import checkpoint
from torch_ragged.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).parents[1] / "multinode"))
from nodes import Nodes  # noqa: E402

__all__ = ["SIZE", "TIMEOUT", "Outcome", "Rank", "Trial", "make_model", "summary", "train"]

SIZE, TIMEOUT = 16, 6.0
"""The width of the model; the timeout of collectives in seconds."""

_LONGEST = 60.0
"""If a rank has not ended so many seconds after the fault, it hangs."""


@dataclass
class Outcome:
    """What one rank saw: the error that it raised, or none, and how long after the fault."""

    rank: int
    error: str = ""
    text: str = ""
    seconds: float = 0.0
    hangs: bool = False
    result: Any = None


@dataclass
class Rank:
    """A rank of a trial, as its own process knows it."""

    rank: int
    ranks: int
    folder: Path
    pipe: Connection
    steps: int = 0
    made: dict[str, Any] = field(default_factory=dict)

    def ready(self) -> None:
        """Tell the parent that training runs: faults may come."""
        self.pipe.send("ready")


def make_model(**options: Any) -> nn.Module:
    """Four sharded layers and a root."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(4)))
    for layer in model:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def train(rank: Rank, steps: int = 10**6, before_step: Callable[[nn.Module, int], None] = lambda model, step: None) -> Any:
    """Train for ``steps``, with a checkpoint every third step; ready after the third."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(1, steps + 1):
        before_step(model, step)
        generator = torch.Generator().manual_seed(step * rank.ranks + rank.rank)
        model(torch.rand(4, SIZE, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 0:
            checkpoint.save(rank.folder, checkpoint.TrainState(model, optimizer, step=step))
            checkpoint.keep(rank.folder, 2)
        if step == 3:
            rank.ready()
    return [param.full_tensor().tolist() for param in model.parameters()]  # type: ignore[operator]


class Trial:
    """Ranks that run ``body``, on one node or on two.

    Args:
        body: what each rank runs; its result is the outcome's.
        ranks: their number. With ``nodes`` the first half is on node 0.
        folder: for checkpoints.
        store_in_rank_0: the store is in the process of rank 0, not in this one (as torchrun's agent has it).
    """

    def __init__(
        self, body: Callable[[Rank], Any], ranks: int, folder: Path, nodes: Nodes | None = None, store_in_rank_0: bool = False
    ) -> None:
        self.pids: list[int] = []
        self._pipes: list[Connection] = []
        self._fault = time.monotonic()
        self._keeper = 0
        port = _free_port()
        address = "127.0.0.1" if nodes is None else nodes.addresses[0]
        if not store_in_rank_0:
            self._keeper = _fork(lambda: _keep_store(port, nodes))
        for rank in range(ranks):
            ours, theirs = Pipe()
            node = 0 if rank < ranks // 2 else 1
            each = Rank(rank, ranks, folder, theirs)
            self.pids.append(_fork(lambda: _run(each, body, address, port, nodes, node, store_in_rank_0)))  # noqa: B023
            self._pipes.append(ours)
            theirs.close()

    def wait_until_ready(self, ranks: Sequence[int] | None = None) -> None:
        """Return when these ranks, or all, train."""
        for rank in range(len(self.pids)) if ranks is None else ranks:
            pipe = self._pipes[rank]
            assert pipe.poll(_LONGEST), f"rank {rank} does not get ready"
            answer = pipe.recv()
            assert answer == "ready", answer

    def inject(self, fault: Callable[[], None] = lambda: None) -> None:
        """The fault begins now."""
        self._fault = time.monotonic()
        fault()

    def kill(self, *ranks: int, how: int = signal.SIGKILL) -> None:
        """Send these ranks a signal."""
        for rank in ranks:
            os.kill(self.pids[rank], how)

    def outcomes(self, without: Sequence[int] = ()) -> list[Outcome]:
        """What the ranks saw, but for those that the fault has taken. At the end, all processes are gone."""
        found = []
        deadline = self._fault + _LONGEST
        for rank in [rank for rank in range(len(self.pids)) if rank not in without]:
            outcome = Outcome(rank, hangs=True)
            try:
                while self._pipes[rank].poll(max(deadline - time.monotonic(), 0)):
                    answer = self._pipes[rank].recv()
                    if answer != "ready":
                        moment, error, text, result = answer
                        outcome = Outcome(rank, error, text, max(moment - self._fault, 0.0), False, result)
                        break
            except EOFError:
                outcome = Outcome(rank, "the process ended without a word", hangs=False)
            found.append(outcome)
        self.end()
        return found

    def end(self) -> None:
        """Kill what still runs."""
        for pid in [*self.pids, self._keeper]:
            if pid:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        self.pids, self._keeper = [], 0


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _fork(body: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        body()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _keep_store(port: int, nodes: Nodes | None) -> None:
    if nodes is not None:
        nodes.enter(0)
    store = dist.TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)  # Reached from both nodes.
    assert store.port == port
    signal.pause()


def _run(
    rank: Rank, body: Callable[[Rank], Any], address: str, port: int, nodes: Nodes | None, node: int, has_store: bool
) -> None:
    """The process of one rank."""
    os.environ.update(MASTER_ADDR=address, TORCHELASTIC_USE_AGENT_STORE=str(not has_store))
    if nodes is not None:
        nodes.enter(node)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # Warnings of the store and of gloo.
    torch.set_num_threads(1)
    limit = timedelta(seconds=TIMEOUT)
    is_master = has_store and rank.rank == 0
    store = dist.TCPStore(address, port, is_master=is_master, wait_for_workers=False, timeout=timedelta(seconds=30))
    dist.init_process_group("gloo", store=store, rank=rank.rank, world_size=rank.ranks, timeout=limit)
    error = text = ""
    result = None
    try:
        result = body(rank)
    except BaseException as raised:
        error, text = type(raised).__name__, str(raised)
    rank.pipe.send((time.monotonic(), error, text, result))
    # A script would end here. In a while, so that slower ranks see what they would see of a script that writes its log.
    time.sleep(0.5)
    os._exit(1 if error else 0)


def summary(kind: str, trials: Sequence[Sequence[Outcome]], saw: str, problems: Sequence[str], lost: int) -> dict[str, Any]:
    """One row of the table.

    Args:
        kind: the fault.
        trials: the outcomes of each trial.
        saw: what a user sees, in words.
        problems: outcomes that are not as expected.
        lost: trials after which the last complete checkpoint was not there, or wrong.
    """
    outcomes = [each for trial in trials for each in trial]
    seconds = [each.seconds for each in outcomes if not each.hangs]
    errors = sorted({each.error for each in outcomes if each.error})
    return {
        "fault": kind,
        "times": len(trials),
        "saw": saw,
        "errors": errors,
        "seconds_median": round(statistics.median(seconds), 2) if seconds else None,
        "seconds_max": round(max(seconds), 2) if seconds else None,
        "hangs": sum(each.hangs for each in outcomes),
        "not_as_expected": len(problems),
        "data_lost": lost,
    }
