"""Faster all-gather and reduce-scatter over gloo: no copy of the gathered buffer, and half the bytes of gloo's reduce-scatter.

No thread here may block in torch or call Python from a thread of gloo: the process could not exit.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from torch_ragged.fsdp.comm._call_log import wait_for_call

__all__ = ["LONGEST_STEP", "gloo_all_gather", "errors_of", "is_worth_broadcasts", "issued", "reduce_scatter", "sum_parts"]

_SMALLEST_BROADCAST = 2**18
_MOST_BROADCASTS = 8
"""If a shard has at least so many bytes, and there are at most so many ranks, broadcasts are faster than gloo's all-gather.
Otherwise they are slower: each one is a call of its own and takes several steps. Measured on 2, 4 and 8 ranks of one host."""

_SMALLEST_PAIR = 2**21
"""If a shard has at least so many bytes, two exchanges with the other ranks take about as long as one exchange with all ranks:
0.98, 1.03 and 1.05 of the time at this size, on 2, 4 and 8 ranks of one host. For smaller shards, two take longer."""

_SUMMED_AT_ONCE = 2**17
"""A sum over ranks adds so many elements of all ranks before it adds the next ones, so that the sum stays in the cache.

On an accelerator, 128 times as many: each addition is a kernel, which takes longer to launch than to add so few."""

_POLL = 1e-3
"""Seconds between two checks of the collectives in flight."""

LONGEST_STEP = 10.0
"""Seconds for which an exiting process waits until a thread has ended a sum or a copy."""


def is_worth_broadcasts(shard: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Whether :func:`gloo_all_gather` is faster than gloo's all-gather. Equal on all ranks, because shards have one size."""
    return shard.nbytes >= _SMALLEST_BROADCAST and group.size() <= _MOST_BROADCASTS


def gloo_all_gather(parts: Sequence[torch.Tensor], shard: torch.Tensor, group: dist.ProcessGroup) -> Assisted:
    """Fill ``parts``, one per rank, with every rank's ``shard``: one broadcast per rank whose part is not empty."""
    rank = group.rank()
    # All ranks issue the broadcasts in the order of source ranks, so that they match. This rank sends ``shard``, not its copy
    # in ``output``. So the copy can be made while the broadcasts are in flight.
    works = [
        issued(dist.broadcast, shard if source == rank else part, group=group, group_src=source)
        for source, part in enumerate(parts)
        if part.numel()
    ]
    return Assisted(works, _copy, parts[rank], shard, needs_works=False)


def reduce_scatter(
    output: torch.Tensor, buffer: torch.Tensor, group: dist.ProcessGroup, divisor: float, sizes: Sequence[int] | None = None
) -> Assisted:
    """Sum ``buffer`` (ranks * S elements) over ranks, divide it, and write this rank's slice to ``output`` (S elements).

    ``sizes``: the elements of each rank's slice, if they differ. ``output`` may have a wider dtype. This takes one or two
    all-to-alls and a local sum. gloo's reduce-scatter is an all-reduce of a copy of the buffer and sends twice the bytes. Until
    ``wait()``, a receive buffer is allocated: ranks - 1 parts if parts are large, otherwise as much as ``buffer``.
    """
    # Equal on all ranks, because parts have one size: one all-to-all does not match two.
    if sizes is None and output.numel() * buffer.element_size() >= _SMALLEST_PAIR:
        works, parts = _exchange_with_others(buffer, group)
    else:  # From all ranks, so that its own part is copied to the receive buffer.
        ranks = group.size()
        own = buffer.numel() // ranks if sizes is None else sizes[group.rank()]
        received = buffer.new_empty(ranks * own)
        splits = () if sizes is None else ([own] * ranks, list(sizes))
        works = [issued(dist.all_to_all_single, received, buffer, *splits, group=group)]
        parts = list(received.view(ranks, own))
    return Assisted(works, _sum, parts, output, divisor, needs_works=True)


def _exchange_with_others(buffer: torch.Tensor, group: dist.ProcessGroup) -> tuple[list[dist.Work], list[torch.Tensor]]:
    """Receive this rank's part from all other ranks. Its own part stays in ``buffer``.

    ::

        rank 1 of 4            | 0 | own | 2 3 |      the buffer
        first all-to-all    to   0           from 2 3
        second all-to-all   to         2 3   from 0

    One all-to-all cannot leave out the rank's own part: the parts before it and after it are not contiguous.
    """
    size, rank = group.size(), group.rank()
    part = buffer.numel() // size
    below, above = [part] * rank + [0] * (size - rank), [0] * (rank + 1) + [part] * (size - rank - 1)
    received = buffer.new_empty(buffer.numel() - part)
    from_below, from_above = received.split([sum(below), sum(above)])
    to_below, own, to_above = buffer.split([sum(below), part, sum(above)])
    # On all ranks, the first call sends to lower ranks and the second call sends to higher ranks: each call receives what the
    # peers send in the same call.
    works = [
        issued(dist.all_to_all_single, from_above, to_below, above, below, group=group),
        issued(dist.all_to_all_single, from_below, to_above, below, above, group=group),
    ]
    return works, [*from_below.view(rank, part), own, *from_above.view(size - rank - 1, part)]


def sum_parts(parts: Sequence[torch.Tensor], output: torch.Tensor, divisor: float) -> None:
    """Write the sum of ``parts``, in their order, divided by ``divisor``, to ``output``. Narrow sums are rounded once."""
    is_narrow = output.dtype in (torch.bfloat16, torch.float16)
    at_once = _SUMMED_AT_ONCE if output.is_cpu else 128 * _SUMMED_AT_ONCE
    with torch.inference_mode():  # Outside of it, torch refuses writes to tensors that were made in inference mode.
        for target, *pieces in zip(*(each.split(at_once) for each in (output, *parts))):
            total = torch.empty_like(target, dtype=torch.float32) if is_narrow else target
            total.copy_(pieces[0])
            for piece in pieces[1:]:
                total.add_(piece)
            if divisor != 1:
                total.div_(divisor)
            if is_narrow:
                target.copy_(total)


def _sum(parts: list[torch.Tensor], output: torch.Tensor, divisor: float) -> None:
    with record_function("gloo:sum"):
        sum_parts(parts, output, divisor)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    if target.data_ptr() != source.data_ptr():
        with torch.inference_mode(), record_function("gloo:own_shard"):
            target.copy_(source)


def issued(collective: Callable[..., Any], *arguments: Any, **options: Any) -> dist.Work:
    work = collective(*arguments, **options, async_op=True)
    assert work is not None, "this rank is not part of the collective's process group"
    return work


class Assisted:
    """Collectives in flight and a local ``step``, which runs once: on the assistant's thread or in ``wait()``."""

    def __init__(self, works: list[dist.Work], step: Callable[..., None], *arguments: Any, needs_works: bool) -> None:
        # Works and arguments are kept until wait(), also after the step: the caller's thread frees their memory, at a moment
        # that does not depend on the assistant.
        self._works, self._step = works, step
        self._needs_works = needs_works  # Whether the step reads the results of the works.
        self._arguments: tuple[Any, ...] | None = arguments
        self._is_made, self._lock = False, threading.Lock()
        _assistant.watch(self)  # Last: the assistant may run the step at once.

    def wait(self) -> None:
        """Wait for the collectives and the step. Raises their first error, when no collective is in flight any more."""
        errors = errors_of(self._works)
        if errors:
            # The results are incomplete, so the assistant must not run the step. If it is running it, the lock waits.
            with self._lock:
                self._arguments = None
            raise errors[0]
        self._make()
        self._works, self._arguments = [], None

    def advance(self) -> bool:
        """Run the step if its input is complete. Returns whether the assistant can forget this object."""
        try:
            if not self._needs_works or all(work.is_completed() for work in self._works):
                self._make()
        except Exception:  # The step is not marked as made, so wait() runs it again and raises.
            return True
        return self._is_made

    def _make(self) -> None:
        # The lock is held during the step: if the assistant runs it, wait() returns after its end.
        with self._lock:
            if not self._is_made and self._arguments is not None:
                self._step(*self._arguments)
            self._is_made = True


def errors_of(works: Iterable[Any]) -> list[Exception]:
    """The errors that ``wait()`` of ``works`` raises. All works are waited for, so that none is in flight afterwards."""
    errors = []
    for work in works:
        try:
            wait_for_call(work) if isinstance(work, dist.Work) else work.wait()
        except Exception as error:
            errors.append(error)
    return errors


class _Assistant:
    """A thread that runs the steps of collectives while the caller computes. ``wait()`` runs each step that it has not run.

    It polls and never blocks in torch, so ``_stop()`` can end it at any time. A callback in a thread of gloo cannot replace it:
    if it enters Python while the interpreter exits, it calls ``std::terminate``.
    """

    def __init__(self) -> None:
        self._forget()
        atexit.register(self._stop)
        # A forked child has no copy of the thread, and another thread may have held the lock during the fork.
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._tasks: queue.SimpleQueue[Assisted | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._has_ended, self._lock = False, threading.Lock()

    def watch(self, task: Assisted) -> None:
        with self._lock:
            if self._has_ended:
                return
            # Started by the first task, so that processes without gloo have no thread. A daemon: at exit, Python joins all
            # other threads before it calls _stop(), and this one ends only if _stop() asks it to.
            if self._thread is None:
                thread = threading.Thread(target=_assist, args=(self._tasks,), name="collectives", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # The process cannot start another thread: wait() runs all steps.
                    self._has_ended = True
                    return
                self._thread = thread
            self._tasks.put(task)

    def _stop(self) -> None:
        with self._lock:
            self._has_ended = True
        # A thread that runs torch's code while the interpreter exits would abort the process, so its step has to end first.
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join(LONGEST_STEP)


def _assist(tasks: queue.SimpleQueue[Assisted | None]) -> None:
    in_flight: list[Assisted] = []
    while True:
        # If nothing is in flight, the thread sleeps until a task comes and takes no CPU time.
        with contextlib.suppress(queue.Empty):
            task = tasks.get(timeout=_POLL if in_flight else None)
            if task is None:
                return
            in_flight.append(task)
        task = None  # While the thread sleeps, this variable must not keep the task's tensors alive.
        in_flight = [each for each in in_flight if not each.advance()]


_assistant = _Assistant()
