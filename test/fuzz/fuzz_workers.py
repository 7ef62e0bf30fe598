"""Worker processes for the fuzzers: many cases per process, a time limit per case, and fresh processes after a failure."""

from __future__ import annotations

import atexit
import datetime
import faulthandler
import gc
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from delays import delayed

__all__ = ["Workers"]

_START = 600.0  # Seconds in which processes import torch and connect.
_PATIENCE = 10.0  # Seconds for the other ranks after one of them has failed.
_PRELOADED = ["torch_ragged", "torch_ragged.spmd", "torch.distributed.checkpoint", "torch._dynamo", "fuzz_case"]
_BATCHES = 8  # Of one process: torch's caches have meshes, whose process groups keep their threads and connections.


def _sentences() -> Any:
    """The errors of the docs: it takes longer than three cases to read the package for them, so workers do not."""
    import fuzz_case

    return fuzz_case.sentences()


def _worker(pipe: Connection, stacks: str, path: list[str]) -> None:
    sys.path[:0] = [entry for entry in path if entry not in sys.path]
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1, file=open(stacks, "w"), all_threads=True)  # noqa: SIM115
    import fuzz_case
    import fuzz_shapes

    gc.collect()
    gc.freeze()  # Modules stay: later collections need not look at them.

    while (task := pipe.recv()) is not None:
        rank, size, port, kind, seeds, plant, known = task
        if known is not None:
            fuzz_case.know(known)
        if kind == "program" and len(seeds) > 1:  # A case that runs alone is all torch's.
            fuzz_shapes.remember_shapes()
        timeout = datetime.timedelta(seconds=300)  # The parent's limit is shorter.
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
        dist.barrier()
        pipe.send((None, "ready", ""))
        for seed in seeds:
            try:
                with delayed():
                    ((_, status, details),) = fuzz_case.run_seeds(kind, [seed], plant)
            except BaseException:
                status, details = "failed", traceback.format_exc()
            pipe.send((seed, status, details))
            if status == "failed":
                break
        dist.barrier() if status != "failed" else None
        dist.destroy_process_group()
        fuzz_case.forget_meshes()
        gc.collect()  # Groups end when nothing refers to them. Until then, their threads wake up a hundred times a second.
        pipe.send(None)


class Workers:
    """A pool of processes that run batches of cases as ranks of a fresh gloo group.

    Args:
        limit: seconds that a case may take. A case that takes longer hangs, which is a failure: the processes are killed.
    """

    def __init__(self, limit: float = 60.0) -> None:
        self.limit = limit
        self._workers: list[tuple[Any, Connection, str]] = []
        self._batches = 0
        self._ran: list[int] = []  # The seeds that these processes have run.
        atexit.register(self.stop)

    def stop(self) -> None:
        """End all processes."""
        for process, _, stacks in self._workers:
            process.kill()
            process.join()
            os.unlink(stacks)
        self._workers.clear()
        self._batches, self._ran = 0, []

    def run(self, kind: str, seeds: Iterable[int], size: int, plant: str = "") -> Iterator[tuple[int, str, str]]:
        """Yield (seed, status, details) of each case: ``ok``, ``refused``, ``failed`` or ``hangs``.

        A case that fails runs again alone, in fresh processes, and the details say whether it fails there, too.
        """
        left = list(seeds)
        while left:
            for seed, status, details in self._batch(kind, left[:], size, plant):
                left.remove(seed)
                yield seed, status, details

    def _alone(self, kind: str, seed: int, size: int, plant: str) -> tuple[str, str]:
        """The status and details of a case in fresh processes."""
        self.stop()
        ((_, status, details),) = self._batch(kind, [seed], size, plant)
        return status, details

    def _start(self, size: int) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        # Processes are copies of one that has imported torch: an import takes as long as three cases.
        context = mp.get_context("forkserver" if sys.platform == "linux" else "spawn")
        if sys.platform == "linux":
            context.set_forkserver_preload(_PRELOADED)  # What does not import is left to the copies.
        while len(self._workers) < size:
            ours, theirs = context.Pipe()
            handle, stacks = tempfile.mkstemp(prefix="fuzz-stacks-")
            os.close(handle)
            process = context.Process(target=_worker, args=(theirs, stacks, sys.path[:]), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours, stacks))

    def _batch(self, kind: str, seeds: list[int], size: int, plant: str) -> Iterator[tuple[int, str, str]]:
        if self._batches == _BATCHES:
            self.stop()
        self._batches += 1
        self._start(size)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        members = self._workers[:size]
        for rank, (_, pipe, _) in enumerate(members):
            pipe.send((rank, size, store.port, kind, seeds, plant, _sentences() if kind == "program" else None))
        pipes = [pipe for _, pipe, _ in members]
        self._answers(pipes, _START)
        for seed in seeds:
            answers, before = self._answers(pipes, self.limit), self._ran
            self._ran = [*before, seed]
            texts = [answer[2] for answer in answers.values()]
            states = {answer[1] for answer in answers.values()}
            if len(answers) == size and len(states) == 1 and "failed" not in states:
                yield seed, states.pop(), texts[0]
                continue
            details = "\n".join(dict.fromkeys(f"[{answer[1]}] {answer[2]}" for answer in answers.values() if answer[2]))
            missing = [rank for rank in range(size) if rank not in answers]
            if missing:
                details += f"\nranks without an answer: {missing}\n" + self._stacks(missing)
            status = "failed" if "failed" in states or len(states) > 1 else "hangs"
            has_died = any(answer[0] == -1 for answer in answers.values())
            if missing or has_died or states != {"failed"} or len(self._answers(pipes, _PATIENCE)) < size:
                self.stop()  # If all ranks raised, they are free, and a new process group is enough.
            if before:
                again, alone = self._alone(kind, seed, size, plant)
                is_same = again in ("failed", "hangs")
                status, details = (again, alone) if is_same else (status, f"{details}\nalone it is {again}, not after {before}")
            yield seed, status, details
            return
        self._answers(pipes, self.limit)

    def _answers(self, pipes: list[Connection], limit: float) -> dict[int, Any]:
        """What each rank answers, up to the limit; after a failure, the other ranks have little time."""
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + limit
        while len(answers) < len(pipes) and (left := deadline - time.monotonic()) > 0:
            for ready in wait([pipe for rank, pipe in enumerate(pipes) if rank not in answers], timeout=left):
                rank = pipes.index(ready)  # type: ignore[arg-type]
                try:
                    answers[rank] = pipes[rank].recv()
                except (EOFError, ConnectionError):
                    answers[rank] = (-1, "failed", f"rank {rank} died")
                if answers[rank] is not None and answers[rank][1] == "failed":
                    deadline = min(deadline, time.monotonic() + _PATIENCE)
        return answers

    def _stacks(self, ranks: list[int]) -> str:
        """Where ranks wait: the newest frames of their threads."""
        texts = []
        for rank in ranks:
            process, _, stacks = self._workers[rank]
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
                process.join(0.5)  # It writes; a live process does not end.
            with open(stacks) as file:
                texts.append(f"rank {rank}:\n" + file.read()[-4000:])
        return "\n".join(texts)
