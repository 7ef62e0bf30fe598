"""The collectives of a parameter group: the protocol, and its implementation over a process group (gloo, NCCL).

Nothing here knows of parameters, or of the layout of a buffer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional, Protocol

import torch
import torch.distributed as dist

from torch_ragged._groups import backend_of, group_of, is_gloo
from torch_ragged.fsdp.comm import _gloo
from torch_ragged.fsdp.comm._call_log import wait_for

__all__ = [
    "Collectives",
    "ProcessGroupCollectives",
    "ReduceScatterTraits",
    "Reduction",
    "Work",
    "as_real",
    "done",
    "reduced",
    "wait_all",
]

CustomCollective = Callable[..., Optional[dist.Work]]
"""FSDP2's ``AllGather`` and ``ReduceScatter``: called as torch's collectives of the same name; None if synchronous."""

# torch 2.13 renamed the two and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Work(Protocol):
    """A collective in flight. After ``wait()``, the current stream may use its result."""

    def wait(self) -> object: ...


@dataclass(frozen=True)
class Reduction:
    """How gradients are reduced: the sum over ranks, divided by ``divisor``.

    Attributes:
        divisor: None divides by the number of ranks, and by the number of replicas if there are any.
        sum_only: whether backends compute sums only, never averages.
    """

    divisor: float | None = None
    sum_only: bool = False


class ReduceScatterTraits(NamedTuple):
    """Properties of a group's reduce-scatters. Equal on all ranks, because backend, device type and settings are.

    Attributes:
        adds_wide: whether the output may have a wider dtype than the input. The sum is then computed in the output's dtype. If
            False, a group casts its gradients to the wider dtype before the reduce-scatter.
        holds_second_buffer: whether a receive buffer is allocated until ``wait()``.
    """

    adds_wide: bool
    holds_second_buffer: bool


class Collectives(Protocol):
    """The collectives that a group calls. All calls return at once.

    The caller must keep their tensors alive, and must not write to them, until ``wait()``.
    """

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup | None = None) -> Work:
        """Fill ``output`` (ranks * S elements) with every rank's ``shard`` (S elements).

        Args:
            output: gets the shards in the order of ranks.
            shard: may be this rank's slice of ``output``.
            group: a process group of some of the ranks; None for all ranks that share the buffer.
        """

    def reduce_scatter(self, output: torch.Tensor, buffer: torch.Tensor, reduction: Reduction) -> Work:
        """Reduce ``buffer`` (ranks * S elements) over ranks; ``output`` gets this rank's slice (S elements)."""

    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction) -> Work:
        """Reduce ``tensor`` over replicas, in place."""

    def reduce_scatter_traits(self, device: torch.device) -> ReduceScatterTraits:
        """The properties of reduce-scatters on ``device``."""

    def all_reduce_max(self, tensor: torch.Tensor) -> Work:
        """Element-wise maximum over ranks and replicas, in place."""


class ProcessGroupCollectives:
    """Collectives of a process group of shards and of a process group of replicas (HSDP). One code serves gloo and NCCL.

    If there is no process group of shards, parameters are replicated only and this rank's shard is the whole buffer.

    With NCCL, a collective starts behind the work that the current stream holds when it is issued. It overlaps later work of
    this stream. ``wait()`` orders the current stream behind the collective and does not block the host.

    Attributes:
        reducers: the objects that reduce, in this order: only this one, unless it reduces in several steps.
        custom_all_gather, custom_reduce_scatter: if set, they replace the process group's collectives. Their ``allocate`` is
            never called, because they work on the group's own buffers.
        separate_group: if set, the process group for reductions. An all-gather and a reduce-scatter can then run at once.
    """

    def __init__(self, group: dist.ProcessGroup | None, replicas: dist.ProcessGroup | None = None) -> None:
        self._group, self._replicas = group, replicas
        self.reducers: Sequence[ProcessGroupCollectives] = (self,)
        self.custom_all_gather: CustomCollective | None = None
        self.custom_reduce_scatter: CustomCollective | None = None
        self.separate_group: dist.ProcessGroup | None = None

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup | None = None) -> Work:
        group, custom = group or self._group, self.custom_all_gather
        if _is_alone(group, custom):
            if output.data_ptr() != shard.data_ptr():
                output.copy_(shard)
            return done
        assert group is not None
        if shard.dtype.itemsize == 1:  # gloo does not support float8, and an all-gather only moves bytes.
            output, shard = output.view(torch.uint8), shard.view(torch.uint8)
        # Broadcasts do not match an all-gather of another rank. All ranks decide alike: their shards have the same size.
        if custom is None and _gloo.is_worth_broadcasts(shard, group) and is_gloo(group, shard.device):
            return _gloo.all_gather(as_real(output), as_real(shard), group)
        return _issue(_all_gather, custom, output, shard, group=group)

    def reduce_scatter(self, output: torch.Tensor, buffer: torch.Tensor, reduction: Reduction) -> Work:
        group, custom = self.separate_group or self._group, self.custom_reduce_scatter
        if _is_alone(group, custom):
            torch.div(buffer, reduction.divisor or 1, out=output)
            return done
        assert group is not None
        if custom is None and is_gloo(group, buffer.device):
            issue = functools.partial(_exchange_and_sum, output, buffer, group)
        else:
            issue = functools.partial(_issue_divided, _reduce_scatter, custom, output, buffer, group=group)
        return reduced(issue, group, buffer, output, reduction)

    def reduce_scatter_traits(self, device: torch.device) -> ReduceScatterTraits:
        """Over gloo, a reduce-scatter is an all-to-all and a local sum: see ``_gloo.reduce_scatter``."""
        group = self._group
        # If there are several reducers, wait() issues the next collective. Ranks wait for a second buffer at different moments,
        # so such a reduction must not report one.
        is_one = self.custom_reduce_scatter is None and len(self.reducers) == 1
        is_exchange = is_one and group is not None and group.size() > 1 and is_gloo(group, device)
        return ReduceScatterTraits(adds_wide=is_exchange, holds_second_buffer=is_exchange)

    def separate_reductions(self, enable: bool) -> None:
        """If ``enable``, make a second process group of the same ranks for reductions. Otherwise, use the first one again."""
        # Members make a group together. All ranks make these groups in the same order, because reducers have a fixed order.
        for reducer in self.reducers:
            if reducer._group is not None:
                ranks = dist.get_process_group_ranks(reducer._group)
                reducer.separate_group = group_of(ranks, "reduce_scatter", reducer._group) if enable else None

    def memory_pool(self, device: torch.device, is_symmetric: bool) -> torch.cuda.MemPool | None:
        """A pool of the backend's own allocator, registered with the backend; None if there is no such allocator (gloo)."""
        backend: Any = None if self._group is None else backend_of(self._group, device)
        if backend is None or not backend.supports_tensor_alloc(device):
            return None
        pool = torch.cuda.MemPool(backend.mem_allocator)
        backend.register_mem_pool(pool, symm=is_symmetric)
        return pool

    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction) -> Work:
        assert self._replicas is not None, "all_reduce needs replicas: a 1-D mesh has none"
        # The reduce-scatter has applied the user's divisor already.
        reduction = Reduction(None if reduction.divisor is None else 1.0, reduction.sum_only)
        if _is_alone(self._replicas):
            return done
        issue = functools.partial(_issue_divided, dist.all_reduce, None, tensor, group=self._replicas)
        return reduced(issue, self._replicas, tensor, tensor, reduction)

    def all_reduce_max(self, tensor: torch.Tensor) -> Work:
        work: Work = done
        for group in (self._group, self._replicas):
            if not _is_alone(group):
                work.wait()  # The second all-reduce reads what the first one writes.
                work = _issue(dist.all_reduce, None, tensor, op=dist.ReduceOp.MAX, group=group)
        return work


def reduced(
    issue: Callable[..., Work], group: dist.ProcessGroup, source: torch.Tensor, output: torch.Tensor, reduction: Reduction
) -> Work:
    """Choose the op and the divisors of a reduction, and issue it.

    Args:
        issue: called with ``op`` and ``divisor``; reduces ``source`` to ``output``, then divides ``output`` by ``divisor``.
        group: the process group of the reduction.
        source: the input. For float16 it is divided in place.
        output: the result.
        reduction: the user's divisor, and whether averages are allowed.
    """
    size = group.size()
    divisor = size if reduction.divisor is None else reduction.divisor
    # The op must be equal on all ranks. It is, because it depends on the backend, on dtypes and on settings.
    averages = dist.get_backend(group) == dist.Backend.NCCL and not reduction.sum_only
    # NCCL's AVG divides inside the collective, which saves a kernel over the output.
    if averages and divisor == size and output.dtype != torch.float16 and size > 1:
        return issue(op=dist.ReduceOp.AVG, divisor=1)
    # A sum of many float16 values may overflow, and dividing all of them first may underflow. So about the square root of the
    # divisor is applied before the sum, and the rest after it.
    before = _power_of_two_near_root(divisor) if output.dtype == torch.float16 else 1
    if before > 1:
        source.div_(before)  # On the current stream: the collective is issued behind it.
    return issue(op=dist.ReduceOp.SUM, divisor=divisor / before)


class _Done:
    def wait(self) -> None:
        """Nothing is in flight."""


done = _Done()
"""The work of a collective that was not issued, or has finished."""


class _All:
    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        # All works are waited for, also after an error: the caller then frees the tensors of all of them.
        errors = _gloo.errors_of(self._works)
        if errors:
            raise errors[0]


def wait_all(works: Sequence[Work]) -> Work:
    """Several collectives as one. If some fail, ``wait()`` raises the first error when none of them is in flight."""
    return _All(works)


def _is_alone(group: dist.ProcessGroup | None, custom: CustomCollective | None = None) -> bool:
    """Whether there is no other rank to communicate with."""
    # The user's collective is called even for one rank: it may do more than communicate.
    return group is None or (group.size() == 1 and custom is None)


def _exchange_and_sum(output: torch.Tensor, buffer: torch.Tensor, group: dist.ProcessGroup, op: Any, divisor: float) -> Work:
    return _gloo.reduce_scatter(as_real(output), as_real(buffer), group, divisor)


class _ScaledWork:
    """A collective whose output is divided when the collective has finished."""

    def __init__(self, work: Work, output: torch.Tensor, divisor: float) -> None:
        self._work, self._output, self._divisor = work, output, divisor

    def wait(self) -> None:
        # With NCCL, wait() orders the current stream behind the collective, so the division runs on complete sums.
        self._work.wait()
        if self._divisor != 1:
            self._output.div_(self._divisor)
        self._divisor = 1  # A second wait() must not divide again.


def _issue(collective: Any, custom: CustomCollective | None, *tensors: torch.Tensor, **options: Any) -> Work:
    """Issue ``custom`` if it is set, otherwise ``collective``. Complex tensors are sent as pairs of real numbers."""
    tensors = tuple(map(as_real, tensors))
    if custom is not None:
        return custom(*tensors, **options, async_op=True) or done  # A synchronous one returns None.
    work = collective(*tensors, **options, async_op=True)
    assert work is not None, "this rank is not part of the collective's process group"
    return _GlooWork(work) if is_gloo(options["group"], tensors[0].device) else work


class _GlooWork:
    """A collective of gloo, whose ``wait()`` blocks the host."""

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def wait(self) -> None:
        wait_for(self._work)


def _issue_divided(
    collective: Any, custom: CustomCollective | None, output: torch.Tensor, *inputs: torch.Tensor, divisor: float, **how: Any
) -> Work:
    """As :func:`_issue`; ``wait()`` then divides ``output`` by ``divisor``."""
    return _ScaledWork(_issue(collective, custom, output, *inputs, **how), output, divisor)


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs of real numbers, in one dimension: sums and divisions have the same bits over any backend."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


def _power_of_two_near_root(divisor: float) -> int:
    """A power of two near the square root of ``divisor``, chosen as FSDP2 does."""
    factor = 1
    while divisor % factor == 0 and divisor / factor > factor:
        factor *= 2
    return factor
