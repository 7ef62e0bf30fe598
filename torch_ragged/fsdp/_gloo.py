"""All-gather and reduce-scatter over gloo: without its own all-gather's copies, with half its own reduce-scatter's bytes."""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

__all__ = ["all_gather", "is_worth_broadcasts", "reduce_scatter", "sum_parts"]

_SMALLEST_BROADCAST = 2**18
_MOST_BROADCASTS = 8
"""Bytes of a shard from which on, and ranks up to which, a broadcast of each is faster than gloo's all-gather.

Measured on 2, 4 and 8 ranks of one host. Each broadcast is a call, and several steps on a tree.
"""

_SUMMED_AT_ONCE = 2**16
"""Elements of each part that are cast to a wider dtype before they are added up: they stay in the cache."""

_POLL = 1e-3
"""Seconds between two looks at what is under way."""

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

    One all-to-all, and a sum. gloo's own is an all-reduce of a copy of the buffer, twice the bytes; both need memory for
    another buffer meanwhile.
    """
    received = torch.empty_like(buffer)
    work = _issued(dist.all_to_all_single, received, buffer, group=group)
    return Assisted([work], _sum, received.view(group.size(), -1), output, divisor, needs_works=True)


def sum_parts(parts: torch.Tensor, output: torch.Tensor, divisor: float) -> None:
    """``output`` (S) becomes the sum of ``parts`` (ranks, S) in the order of the rows, divided.

    Added up in the dtype of ``output``, bfloat16 and float16 in float32 and rounded once.
    """
    chunk = parts.shape[1] if parts.dtype == output.dtype else _SUMMED_AT_ONCE
    with torch.inference_mode():  # Tensors that were made in it may be written too.
        for narrow, target in zip(parts.split(chunk, 1), output.split(chunk)):
            torch.sum(narrow, 0, dtype=target.dtype, out=target)
        if divisor != 1:
            output.div_(divisor)


def _sum(parts: torch.Tensor, output: torch.Tensor, divisor: float) -> None:
    with record_function("gloo:sum"):
        sum_parts(parts, output, divisor)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    if target.data_ptr() != source.data_ptr():
        with torch.inference_mode(), record_function("gloo:own_shard"):
            target.copy_(source)


def _issued(collective: Callable[..., Any], *tensors: torch.Tensor, **options: Any) -> dist.Work:
    work = collective(*tensors, **options, async_op=True)
    assert work is not None, "a collective on a group that this rank is not part of"
    return work


class Assisted:
    """A collective of which a ``step`` is this process's own: made by the assistant, or by ``wait()`` if that was first.

    Args:
        works: what is under way. Kept until ``wait()``, as the arguments are, so that the caller's thread gives memory back.
        needs_works: whether the step needs what the works bring.
    """

    def __init__(self, works: list[dist.Work], step: Callable[..., None], *arguments: Any, needs_works: bool) -> None:
        self._works, self._step, self._needs_works = works, step, needs_works
        self._arguments: tuple[Any, ...] | None = arguments
        self._is_made, self._lock = False, threading.Lock()
        _assistant.watch(self)

    def wait(self) -> None:
        """Raises what the first work to fail, or the step, raises, when nothing is under way any more."""
        errors = [error for error in map(_error_of, self._works) if error is not None]
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


def _error_of(work: dist.Work) -> Exception | None:
    try:
        work.wait()
    except Exception as error:
        return error
    return None


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
                except RuntimeError:  # No thread is to be had.
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
    """Advance each of ``tasks`` until it is through; until None comes."""
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
