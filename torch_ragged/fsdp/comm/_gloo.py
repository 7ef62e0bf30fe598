"""All-gather and reduce-scatter over gloo: without its own all-gather's copies, with half its own reduce-scatter's bytes."""

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

__all__ = ["all_gather", "errors_of", "is_worth_broadcasts", "reduce_scatter", "sum_parts"]

_SMALLEST_BROADCAST = 2**18
_MOST_BROADCASTS = 8
"""Bytes of a shard from which on, and ranks up to which, a broadcast of each is faster than gloo's all-gather.

Measured on 2, 4 and 8 ranks of one host. Each broadcast is a call, and several steps on a tree.
"""

_SMALLEST_PAIR = 2**21
"""Bytes of a shard from which on two exchanges without a rank's own part take about as long as one with it.

Measured on 2, 4 and 8 ranks of one host: 0.98, 1.03 and 1.05 of the time at this size, more below it.
"""

_SUMMED_AT_ONCE = 2**17
"""Elements that are added up over all ranks before the next ones, so that their sum stays in the cache."""

_POLL = 1e-3
"""Seconds between two looks at the collectives in flight."""

_LONGEST_STEP = 10.0
"""Seconds that a process which ends waits for a sum or a copy."""


def is_worth_broadcasts(shard: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Whether :func:`all_gather` is faster than gloo's, which has less to do for each call."""
    return shard.nbytes >= _SMALLEST_BROADCAST and group.size() <= _MOST_BROADCASTS


def all_gather(output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> Assisted:
    """Fill ``output`` (ranks * S) with every rank's ``shard`` (S). A broadcast of each rank's, into its place.

    gloo's own gathers into memory of its own, and copies that to where it belongs.
    """
    parts, rank = output.chunk(group.size()), group.rank()
    works = [
        _issued(dist.broadcast, shard if source == rank else part, group=group, group_src=source)
        for source, part in enumerate(parts)
    ]
    return Assisted(works, _copy, parts[rank], shard, needs_works=False)


def reduce_scatter(output: torch.Tensor, buffer: torch.Tensor, group: dist.ProcessGroup, divisor: float) -> Assisted:
    """Sum ``buffer`` (ranks * S) over ranks, divided; this rank's slice goes to ``output`` (S), which may be wider.

    One all-to-all or two, and a sum. gloo's own is an all-reduce of a copy of the buffer, twice the bytes. Meanwhile there is
    memory for the other ranks' parts, ranks - 1 of them if they are large; otherwise for another buffer.
    """
    exchange = _exchange_with_others if output.numel() * buffer.element_size() >= _SMALLEST_PAIR else _exchange
    works, parts = exchange(buffer, group)
    return Assisted(works, _sum, parts, output, divisor, needs_works=True)


def _exchange(buffer: torch.Tensor, group: dist.ProcessGroup) -> tuple[list[dist.Work], list[torch.Tensor]]:
    """This rank's part from all ranks, its own copied beside them."""
    received = torch.empty_like(buffer)
    work = _issued(dist.all_to_all_single, received, buffer, group=group)
    return [work], list(received.chunk(group.size()))


def _exchange_with_others(buffer: torch.Tensor, group: dist.ProcessGroup) -> tuple[list[dist.Work], list[torch.Tensor]]:
    """This rank's part from all ranks, its own where it is.

    ::

        rank 1 of 4            | 0 | own | 2 3 |      the buffer
        first all-to-all    to   0           from 2 3
        second all-to-all   to         2 3   from 0
    """
    size, rank = group.size(), group.rank()
    part = buffer.numel() // size
    below, above = [part] * rank + [0] * (size - rank), [0] * (rank + 1) + [part] * (size - rank - 1)
    received = buffer.new_empty(buffer.numel() - part)
    from_below, from_above = received.split([sum(below), sum(above)])
    to_below, own, to_above = buffer.split([sum(below), part, sum(above)])
    works = [
        _issued(dist.all_to_all_single, from_above, to_below, above, below, group=group),
        _issued(dist.all_to_all_single, from_below, to_above, below, above, group=group),
    ]
    return works, [*from_below.view(rank, part), own, *from_above.view(size - rank - 1, part)]


def sum_parts(parts: Sequence[torch.Tensor], output: torch.Tensor, divisor: float) -> None:
    """``output`` (S) becomes the sum of ``parts`` (S each) in their order, divided.

    Added up in the dtype of ``output``, bfloat16 and float16 in float32 and rounded once.
    """
    is_narrow = output.dtype in (torch.bfloat16, torch.float16)
    with torch.inference_mode():  # Tensors that were made in it may be written too.
        for target, *pieces in zip(*(each.split(_SUMMED_AT_ONCE) for each in (output, *parts))):
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


def _issued(collective: Callable[..., Any], *arguments: Any, **options: Any) -> dist.Work:
    work = collective(*arguments, **options, async_op=True)
    assert work is not None, "a collective on a group that this rank is not part of"
    return work


class Assisted:
    """A collective of which a ``step`` is this process's own: made by the assistant, or by ``wait()`` if that was first.

    Args:
        works: the collectives in flight. Kept until ``wait()``, as the arguments are, so that the caller's thread frees them.
        needs_works: whether the step needs what the works bring.
    """

    def __init__(self, works: list[dist.Work], step: Callable[..., None], *arguments: Any, needs_works: bool) -> None:
        self._works, self._step, self._needs_works = works, step, needs_works
        self._arguments: tuple[Any, ...] | None = arguments
        self._is_made, self._lock = False, threading.Lock()
        _assistant.watch(self)

    def wait(self) -> None:
        """Raises what the first work to fail, or the step, raises, once nothing is in flight any more."""
        errors = errors_of(self._works)
        if errors:
            with self._lock:
                self._arguments = None  # There is nothing to make the step of.
            raise errors[0]
        self._make()
        self._works, self._arguments = [], None

    def advance(self) -> bool:
        """Make the step if it can be made; whether it need not be looked at again."""
        try:
            if not self._needs_works or all(work.is_completed() for work in self._works):
                self._make()
        except Exception:  # wait() raises it.
            return True
        return self._is_made

    def _make(self) -> None:
        with self._lock:
            if not self._is_made and self._arguments is not None:
                self._step(*self._arguments)
            self._is_made = True


def errors_of(works: Iterable[Any]) -> list[Exception]:
    """What waiting for them raises. All are waited for, so that nothing is in flight afterwards."""
    errors = []
    for work in works:
        try:
            work.wait()
        except Exception as error:
            errors.append(error)
    return errors


class _Assistant:
    """A thread that hides such steps behind compute. Nobody depends on it.

    A thread of this module and not gloo's, in a callback: a gloo thread that wants Python while the interpreter ends calls
    ``std::terminate``, and ``destroy_process_group`` waits for it forever. This one looks and never blocks in torch, so that
    it stops when told.
    """

    def __init__(self) -> None:
        self._forget()
        atexit.register(self._stop)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)  # The child has no such thread.

    def _forget(self) -> None:
        self._tasks: queue.SimpleQueue[Assisted | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._has_ended, self._lock = False, threading.Lock()

    def watch(self, task: Assisted) -> None:
        """Make its step when that can be made."""
        with self._lock:
            if self._has_ended:
                return
            if self._thread is None:
                thread = threading.Thread(target=_assist, args=(self._tasks,), name="collectives", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # The process cannot start another thread.
                    self._has_ended = True
                    return
                self._thread = thread
            self._tasks.put(task)

    def _stop(self) -> None:
        with self._lock:
            self._has_ended = True
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join(_LONGEST_STEP)


def _assist(tasks: queue.SimpleQueue[Assisted | None]) -> None:
    """Advance each of ``tasks`` until it is finished; stop at None."""
    under_way: list[Assisted] = []
    while True:
        with contextlib.suppress(queue.Empty):
            task = tasks.get(timeout=_POLL if under_way else None)
            if task is None:
                return
            under_way.append(task)
        task = None  # Not to keep its tensors.
        under_way = [each for each in under_way if not each.advance()]


_assistant = _Assistant()
