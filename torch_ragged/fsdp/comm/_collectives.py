"""The collectives of a parameter group, as a protocol; implemented over a process group (gloo, NCCL)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional, Protocol

import torch
import torch.distributed as dist

from torch_ragged._groups import group_of
from torch_ragged._register._torch import backend_of
from torch_ragged.fsdp.comm import _gloo

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
    """A collective in flight; after ``wait()`` its result may be used on the current stream."""

    def wait(self) -> object: ...


@dataclass(frozen=True)
class Reduction:
    """How gradients are reduced: the sum over ranks (and replicas) divided by ``divisor``, by the number of them where None.

    ``sum_only``: backends may be asked for sums only, never for averages.
    """

    divisor: float | None = None
    sum_only: bool = False


class ReduceScatterTraits(NamedTuple):
    """What a group has to know of its reduce-scatters. Equal on all ranks.

    Attributes:
        adds_wide: whether the output may be wider than the input, and is then the exact sum, rounded to the output's dtype. If
            not, a group widens its gradients before the reduce-scatter.
        holds_second_buffer: whether a second buffer, for what the rank receives, is allocated until ``wait()``.
    """

    adds_wide: bool
    holds_second_buffer: bool


class Collectives(Protocol):
    """What a group needs. All calls return at once; their tensors must stay alive and untouched until ``wait()``."""

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup | None = None) -> Work:
        """Fill ``output`` (ranks * S elements) with every rank's ``shard`` (S); ``shard`` may be its slice of ``output``.

        Of all ranks that share the buffer, or of a ``group`` of some of them.
        """

    def reduce_scatter(self, output: torch.Tensor, buffer: torch.Tensor, reduction: Reduction) -> Work:
        """Reduce ``buffer`` (ranks * S elements) over ranks; this rank's slice goes to ``output`` (S)."""

    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction) -> Work:
        """Reduce ``tensor`` over replicas, in place."""

    def reduce_scatter_traits(self, device: torch.device) -> ReduceScatterTraits:
        """What a group on ``device`` has to know of its reduce-scatters."""

    def all_reduce_max(self, tensor: torch.Tensor) -> Work:
        """Element-wise maximum over ranks and replicas, in place."""


class ProcessGroupCollectives:
    """Collectives of one process group, and of one over replicas (HSDP). The same code serves gloo and NCCL.

    Without a group, where parameters are replicated only, the one rank's shard is everything.

    With NCCL, the work of a collective starts behind what the current stream holds when it is issued and overlaps what
    comes after; ``wait()`` orders the current stream behind it, without blocking the host.

    Attributes:
        reducers: what reduces, one after the other: itself, unless it reduces in several steps.
        custom_all_gather, custom_reduce_scatter: used in place of the process group's, if set. Their ``allocate`` is not
            called: what they gather into and reduce from are the group's own buffers.
        separate_group: reduces in place of the group, so that an all-gather and a reduce-scatter may run at once.
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
        if shard.dtype.itemsize == 1:  # gloo knows no float8.
            output, shard = output.view(torch.uint8), shard.view(torch.uint8)
        if custom is None and _gloo.is_worth_broadcasts(shard, group) and _is_gloo(group, shard.device):
            return _gloo.all_gather(as_real(output), as_real(shard), group)
        return _issue(_all_gather, custom, output, shard, group=group)

    def reduce_scatter(self, output: torch.Tensor, buffer: torch.Tensor, reduction: Reduction) -> Work:
        group, custom = self.separate_group or self._group, self.custom_reduce_scatter
        if _is_alone(group, custom):
            torch.div(buffer, reduction.divisor or 1, out=output)
            return done
        assert group is not None
        if custom is None and _is_gloo(group, buffer.device):
            issue = functools.partial(_exchange_and_sum, output, buffer, group)
        else:
            issue = functools.partial(_issue_divided, _reduce_scatter, custom, output, buffer, group=group)
        return reduced(issue, group, buffer, output, reduction)

    def reduce_scatter_traits(self, device: torch.device) -> ReduceScatterTraits:
        """Over gloo, a reduce-scatter is an exchange and a sum of this process: see ``_gloo.reduce_scatter``."""
        group = self._group
        is_one = self.custom_reduce_scatter is None and len(self.reducers) == 1
        is_exchange = is_one and group is not None and group.size() > 1 and _is_gloo(group, device)
        return ReduceScatterTraits(adds_wide=is_exchange, holds_second_buffer=is_exchange)

    def separate_reductions(self, enable: bool) -> None:
        """Reduce over a process group of its own, made by its members here, or over the same one again."""
        for reducer in self.reducers:
            if reducer._group is not None:
                ranks = dist.get_process_group_ranks(reducer._group)
                reducer.separate_group = group_of(ranks, "reduce_scatter") if enable else None

    def memory_pool(self, device: torch.device, is_symmetric: bool) -> torch.cuda.MemPool | None:
        """Memory of the backend's own allocator, registered with it; None if it has none for ``device`` (gloo)."""
        backend: Any = None if self._group is None else backend_of(self._group, device)
        if backend is None or not backend.supports_tensor_alloc(device):
            return None
        pool = torch.cuda.MemPool(backend.mem_allocator)
        backend.register_mem_pool(pool, symm=is_symmetric)
        return pool

    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction) -> Work:
        assert self._replicas is not None, "no replicas on a 1-D mesh"
        # A divisor of the user's was applied by the reduce-scatter.
        reduction = Reduction(None if reduction.divisor is None else 1.0, reduction.sum_only)
        if _is_alone(self._replicas):
            return done
        issue = functools.partial(_issue_divided, dist.all_reduce, None, tensor, group=self._replicas)
        return reduced(issue, self._replicas, tensor, tensor, reduction)

    def all_reduce_max(self, tensor: torch.Tensor) -> Work:
        work: Work = done
        for group in (self._group, self._replicas):
            if not _is_alone(group):
                work.wait()
                work = _issue(dist.all_reduce, None, tensor, op=dist.ReduceOp.MAX, group=group)
        return work


def reduced(
    issue: Callable[..., Work], group: dist.ProcessGroup, source: torch.Tensor, output: torch.Tensor, reduction: Reduction
) -> Work:
    """``issue(op=, divisor=)`` the collective, which reduces ``source`` to ``output`` and divides that."""
    size = group.size()
    divisor = size if reduction.divisor is None else reduction.divisor
    averages = dist.get_backend(group) == dist.Backend.NCCL and not reduction.sum_only
    if averages and divisor == size and output.dtype != torch.float16 and size > 1:
        return issue(op=dist.ReduceOp.AVG, divisor=1)
    # float16 has little range: part of the division goes before the sum, part behind it.
    before = _power_of_two_near_root(divisor) if output.dtype == torch.float16 else 1
    if before > 1:
        source.div_(before)
    return issue(op=dist.ReduceOp.SUM, divisor=divisor / before)


class _Done:
    def wait(self) -> None:
        """Nothing is in flight."""


done = _Done()
"""The work of a collective that was not needed, or is finished."""


class _All:
    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        errors = _gloo.errors_of(self._works)
        if errors:
            raise errors[0]


def wait_all(works: Sequence[Work]) -> Work:
    """Several collectives as one; its ``wait()`` raises the first error once none is in flight any more."""
    return _All(works)


def _is_alone(group: dist.ProcessGroup | None, custom: CustomCollective | None = None) -> bool:
    """Whether there is no other rank to communicate with; a custom collective is called in any case."""
    return group is None or (group.size() == 1 and custom is None)


def _is_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    gloo = getattr(dist, "ProcessGroupGloo", None)  # Builds without gloo lack it.
    return gloo is not None and device.type == "cpu" and isinstance(backend_of(group, device), gloo)


def _exchange_and_sum(output: torch.Tensor, buffer: torch.Tensor, group: dist.ProcessGroup, op: Any, divisor: float) -> Work:
    return _gloo.reduce_scatter(as_real(output), as_real(buffer), group, divisor)


class _ScaledWork:
    """A collective whose output is divided once it is there."""

    def __init__(self, work: Work, output: torch.Tensor, divisor: float) -> None:
        self._work, self._output, self._divisor = work, output, divisor

    def wait(self) -> None:
        self._work.wait()
        if self._divisor != 1:
            self._output.div_(self._divisor)
        self._divisor = 1


def _issue(collective: Any, custom: CustomCollective | None, *tensors: torch.Tensor, **options: Any) -> Work:
    """Issue ``custom`` if it is set, which may be synchronous, or ``collective``; complex numbers as pairs."""
    tensors = tuple(map(as_real, tensors))
    if custom is not None:
        return custom(*tensors, **options, async_op=True) or done
    work = collective(*tensors, **options, async_op=True)
    assert work is not None, "a collective on a group that this rank is not part of"
    return work


def _issue_divided(
    collective: Any, custom: CustomCollective | None, output: torch.Tensor, *inputs: torch.Tensor, divisor: float, **how: Any
) -> Work:
    """As :func:`_issue`, and divide ``output`` once it is there."""
    return _ScaledWork(_issue(collective, custom, output, *inputs, **how), output, divisor)


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs, in one dimension: what is added and divided has the same bits over any backend."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


def _power_of_two_near_root(divisor: float) -> int:
    factor = 1
    while divisor % factor == 0 and divisor / factor > factor:
        factor *= 2
    return factor
