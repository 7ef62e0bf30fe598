"""A process group over gloo on which a collective takes the time of a stated network: latency, and bytes over a bandwidth.

Collectives of a group run one after the other, as on one communicator. The network is a clock: a collective is issued to gloo
at once, and ``wait()`` sleeps until its time on the network has passed. So a wait leaves the cores to other ranks, and both
packages have the same network, not gloo's own times. Bytes have to be few enough that gloo is faster than the network.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar

import torch.distributed as dist

from benchmarks.predict.network import Link

__all__ = ["DELAYED", "DelayedGroup", "register_delayed"]

DELAYED = "delayed"
"""The name of the backend, for ``init_process_group``."""


class _DelayedWork(dist.Work):
    def __init__(self, work: dist.Work, due: float) -> None:
        super().__init__()
        self._work, self._due = work, due

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._work.wait()
        left = self._due - time.perf_counter()
        if left > 0:
            time.sleep(left)
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed() and time.perf_counter() >= self._due


class DelayedGroup(dist.ProcessGroup):
    """The group. Numbers that the host agrees on (8 bytes and less an element, few elements) take the latency.

    Attributes:
        link: of all groups.
    """

    link: ClassVar[Link] = Link(0.0, 1e12)

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._inner = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._free = 0.0

    # torch keeps the name with a backend, which a group written in Python has not.
    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def getBackendName(self) -> str:
        return DELAYED

    def _issue(self, collective: Callable[..., dist.Work], nbytes: int, *arguments: Any) -> dist.Work:
        now = time.perf_counter()
        # The share that this rank receives, as on a ring.
        seconds = self.link.latency + nbytes * (self.size() - 1) / self.size() / self.link.bandwidth
        self._free = max(now, self._free) + seconds
        return _DelayedWork(collective(*arguments), self._free)

    def _allgather_base(self, output: Any, shard: Any, options: Any = None) -> dist.Work:
        return self._issue(self._inner._allgather_base, output.nbytes, output, shard, options)

    def _reduce_scatter_base(self, output: Any, buffer: Any, options: Any = None) -> dist.Work:
        return self._issue(self._inner._reduce_scatter_base, buffer.nbytes, output, buffer, options)

    # Their names since torch 2.13.
    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base

    def allgather(self, outputs: Any, tensors: Any, options: Any = None) -> dist.Work:
        return self._issue(self._inner.allgather, sum(each.nbytes for each in outputs[0]), outputs, tensors, options)

    def allreduce(self, tensors: Any, options: Any = None) -> dist.Work:
        return self._issue(self._inner.allreduce, 2 * tensors[0].nbytes, tensors, options)

    def broadcast(self, tensors: Any, options: Any = None) -> dist.Work:
        return self._issue(self._inner.broadcast, tensors[0].nbytes, tensors, options)

    def barrier(self, options: Any = None) -> dist.Work:
        return self._inner.barrier(options)


def register_delayed() -> None:
    """Make the backend known to ``init_process_group``, once in a process."""

    def make(store: Any, rank: int, size: int, timeout: timedelta) -> DelayedGroup:
        return DelayedGroup(store, rank, size, timeout)

    if not hasattr(dist.Backend, DELAYED.upper()):
        dist.Backend.register_backend(DELAYED, make, devices=["cpu"])
