"""Ranks for tests: a pool of processes that stays up between tests, with a fresh group for each call (``tested_device``)."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import faulthandler
import functools
import gc
import importlib
import itertools
import os
import sys
import threading
import time
import traceback
import unittest
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from delays import delayed
from tested_device import DEVICE, init_ranks, on_cpu
from torch.distributed.tensor import debug
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

_TIMEOUT = datetime.timedelta(seconds=60)
_LONGEST = 200.0  # seconds for a whole call; a rank that waits for another one gives up after _TIMEOUT
_MOST_THREADS = 300  # in a process of the pool, which is replaced then
# c10d looks up the name of each new connection. Where no server answers, glibc would try for 5 or 10 seconds.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
_PRELOADED = [
    *("pytest", "hypothesis", "numpy"),
    *(f"torch.{name}" for name in ("distributed.checkpoint", "distributed.fsdp", "testing")),
    # They import Dynamo, a second of work. Each process of ranks would do it again.
    *(f"torch.{name}" for name in ("distributed.tensor.debug", "testing._internal.distributed.fake_pg")),
    *("torch_ragged.fsdp", "torch_ragged.optim", "torch_ragged.random"),
    *("torch_ragged.spmd", "torch_ragged.transfer", "torch_ragged.checkpoint"),
]


def context_of_ranks() -> BaseContext:
    """What starts processes for ranks. On Linux they are copies of one that has imported the package: an import takes seconds.

    A copy cannot use CUDA of its own on all versions of CUDA, so on other devices than the CPU each process begins anew.
    """
    context = mp.get_context("forkserver" if sys.platform == "linux" and DEVICE == "cpu" else "spawn")
    context.set_forkserver_preload(_PRELOADED)
    return context


def as_before() -> None:
    """Undo what switches of a test have changed in this process: those of plans, and of random numbers."""
    for name, function, arguments in (("_register._spmd", "compute_as_torch", ()), ("random", "single_device", (False,))):
        module = sys.modules.get(f"torch_ragged.{name}")
        if module is not None:
            getattr(module, function)(*arguments)


def _worker(rank: int, pipe: Connection, port: int) -> None:
    faulthandler.enable()  # A rank that a signal ends says where it was.
    torch.set_num_threads(1)
    client = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=_TIMEOUT)
    gc.freeze()  # Collections need not look at what has been imported.
    modules = len(sys.modules)
    while True:
        task = pipe.recv()
        if task is None:
            return
        function, arguments, size, call = task
        try:
            init_ranks(dist.PrefixStore(f"call {call}", client), rank, size, _TIMEOUT)
            dist.barrier()  # Or a function without a collective ends while another rank is still connecting.
            torch.manual_seed(0)
            with delayed():
                answer = (True, on_cpu(function(*arguments)))
        except BaseException:  # Any error: the test waits for this rank's answer.
            answer = (False, f"rank {rank} of {size}:\n{traceback.format_exc()}")
        finally:
            if dist.is_initialized():
                groups = list(dist.distributed_c10d._world.pg_map)
                dist.destroy_process_group()
                threading.Thread(target=groups.clear).start()  # 20 ms each, for which no call waits.
            as_before()
            debug._clear_sharding_prop_cache()  # It holds meshes, whose groups are gone now.
            # A group in a cycle keeps its connections open. Another rank, whose collective is left in flight after an error,
            # would wait for its timeout when its own group is collected, in some later test.
            gc.collect()
            if len(sys.modules) > modules:
                gc.freeze()
                modules = len(sys.modules)
        pipe.send(answer)


class _Pool:
    """Processes that run functions as ranks; started when first needed."""

    def __init__(self) -> None:
        self.workers: list[tuple[Any, Connection]] = []
        self.store: dist.TCPStore | None = None  # One for all calls, each under its own prefix: connections may take seconds.
        self.calls = itertools.count()
        atexit.register(self.stop)

    def stop(self) -> None:
        for process, _ in self.workers:
            process.kill()
            process.join()
        self.workers.clear()
        self.store = None

    def run(self, function: Callable[..., Any], arguments: tuple[Any, ...], size: int, timeout: float) -> list[Any]:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        context = context_of_ranks()
        if self.store is None:
            self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # At a free port.
        while len(self.workers) < size:
            ours, theirs = context.Pipe()
            process = context.Process(target=_worker, args=(len(self.workers), theirs, self.store.port), daemon=True)
            process.start()
            self.workers.append((process, ours))
        call = next(self.calls)
        for _, pipe in self.workers[:size]:
            pipe.send((function, arguments, size, call))
        answers, deadline = [], time.monotonic() + timeout
        for rank, (process, pipe) in enumerate(self.workers[:size]):
            if not pipe.poll(max(deadline - time.monotonic(), 0)):
                answers.append((False, f"rank {rank} of {size} hangs"))
                continue
            try:
                answers.append(pipe.recv())
            except EOFError:  # The process has died. The next test gets new ones.
                process.join()
                answers.append((False, f"rank {rank} of {size} has died with exit code {process.exitcode}"))
        failures = [text for fine, text in answers if not fine]
        # Each group that torch 2.11 destroys leaves threads behind: after hundreds of groups, a process can start no more.
        is_crowded = any(_threads_of(process.pid) > _MOST_THREADS for process, _ in self.workers)
        if failures or is_crowded:
            self.stop()
        if failures:
            raise AssertionError("\n".join(failures))
        return [value for _, value in answers]


def _threads_of(pid: int) -> int:
    """The threads of a process; 0 where the system does not say."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


_pool = _Pool()


def run_ranks(size: int, function: Callable[..., Any], *arguments: Any, timeout: float = _LONGEST) -> list[Any]:
    """Run a module-level ``function`` on ``size`` ranks of a fresh gloo group; returns what each rank returned.

    Raises:
        AssertionError: a rank raised or hung; with every rank's traceback.
    """
    return _pool.run(function, arguments, size, timeout)


def ranks(size: int, timeout: float = _LONGEST) -> Callable[[Callable[[], Any]], Callable[[Any], None]]:
    """The decorated body of a test runs on ``size`` ranks of a fresh gloo group. It takes no ``self``::

    class RedistributeTest(unittest.TestCase):
        @ranks(2)
        def test_ranks_agree():
            assert dist.get_world_size() == 2
    """

    def decorate(body: Callable[[], Any]) -> Callable[[Any], None]:
        @functools.wraps(body)
        def test(self: Any) -> None:
            run_ranks(size, _run_body, body.__module__, body.__qualname__, timeout=timeout)

        return test

    return decorate


def in_one_process(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """What ``function`` returns in one process, on the device that tests use: what ranks must compute, too."""
    if DEVICE == "cpu":
        return function(*arguments, **keywords)
    return run_ranks(1, functools.partial(function, **keywords), *arguments)[0]


def _run_body(module: str, name: str) -> None:
    """Run the body that :func:`ranks` has decorated. By name: the name in the module is that of the decorated test."""
    test = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    test.__wrapped__()


def _mortal(
    rank: int, size: int, port: int, seconds: float, pipe: Connection, function: Callable[..., Any], *arguments: Any
) -> None:
    torch.set_num_threads(1)
    gc.freeze()
    limit = datetime.timedelta(seconds=seconds)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=_TIMEOUT)
    init_ranks(store, rank, size, limit)
    torch.manual_seed(0)
    try:
        answer = (True, on_cpu(function(*arguments)))
    except BaseException:
        answer = (False, traceback.format_exc())
    pipe.send(answer)
    pipe.recv()  # Until all have answered: a rank that has ended counts as one that died.
    os._exit(0)


def run_mortal_ranks(
    size: int, victims: set[int], function: Callable[..., Any], *arguments: Any, seconds: float = 60, dead: Any = None
) -> dict[int, Any]:
    """Run ``function`` on ranks with processes of their own, of which ``victims`` die or stop. What each other rank returned.

    Args:
        seconds: the timeout of the group's collectives.
        dead: if given, another rank may die too, and this is its answer.

    Raises:
        AssertionError: another rank raised, died or hung.
    """
    context = context_of_ranks()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes, pipes = [], {}
    for rank in range(size):
        pipes[rank], theirs = context.Pipe()
        with_rank = (rank, size, store.port, seconds, theirs, function, *arguments)
        processes.append(context.Process(target=_mortal, args=with_rank, daemon=True))
        processes[-1].start()
        theirs.close()  # Or the end of the process would not be seen.
    deadline, answers = time.monotonic() + _LONGEST, {}
    try:
        for rank in sorted(set(range(size)) - victims):
            assert pipes[rank].poll(max(deadline - time.monotonic(), 0)), f"rank {rank} of {size} hangs"
            try:
                fine, answers[rank] = pipes[rank].recv()
            except EOFError:
                fine, answers[rank] = dead is not None, dead
            assert fine, f"rank {rank} of {size}:\n{answers[rank]}"
    finally:
        for process in processes:
            process.kill()  # Also one that is stopped.
            process.join()
    return answers


def stop_ranks() -> None:
    """End the processes of the pool; the next :func:`run_ranks` starts new ones."""
    _pool.stop()


@contextlib.contextmanager
def no_pipelines() -> Iterator[None]:
    """As in a process that has not imported torch's pipelines: in others, matmuls write no gradients before torch 2.13."""
    found = {name: sys.modules.pop(name) for name in ("torch.distributed.pipelining",) if name in sys.modules}
    try:
        yield
    finally:
        sys.modules.update(found)


@contextlib.contextmanager
def fake_group(ranks: int, rank: int = 0) -> Iterator[None]:
    """This process is one rank of a fake process group. Collectives of several ranks move no data."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
        as_before()
        debug._clear_sharding_prop_cache()


def enter_fake_group(test: unittest.TestCase, ranks: int, rank: int = 0) -> None:
    """:func:`fake_group` until the end of ``test``."""
    stack = contextlib.ExitStack()
    stack.enter_context(fake_group(ranks, rank))
    test.addCleanup(stack.close)


def collectives_seen(mode: CommDebugMode) -> tuple[int, int]:
    """All-gathers and reduce-scatters that ``mode`` saw; with gloo these are all-to-alls, and sums on each rank."""
    counts = {str(op): count for op, count in mode.get_comm_counts().items()}
    gathers, reductions = (
        sum(n for op, n in counts.items() if any(kind in op for kind in kinds))
        for kinds in (("allgather",), ("alltoall", "reduce_scatter"))
    )
    return gathers, reductions


def error_of(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> str:
    """``Type: text`` of the error that a call raises; empty if it raises none."""
    try:
        function(*arguments, **keywords)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
