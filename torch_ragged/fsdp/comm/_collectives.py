"""The collectives of a parameter group: what each kind has, and its implementation over a process group (gloo, NCCL).

Nothing here knows of parameters, or of the layout of a buffer, but for the names in errors (:class:`NamedCollectives`).
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Optional, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torch_ragged._ranks.agreement import agree, is_debug
from torch_ragged._ranks.groups import backend_of, group_of, is_gloo
from torch_ragged._ranks.peers import Issued, issued_on, peers_named
from torch_ragged._register._torch import profiler_range
from torch_ragged.fsdp.comm import _gloo
from torch_ragged.fsdp.comm._reduction import OPS, Ops, Reduction, ops_of
from torch_ragged.fsdp.layout._buffer_layout import BufferLayout
from torch_ragged.fsdp.layout._weighted import WeightedLayout

__all__ = [
    "Collectives",
    "Levels",
    "NamedCollectives",
    "ProcessGroupCollectives",
    "ReduceScatterTraits",
    "Then",
    "UnequalCollectives",
    "Work",
    "WrappedCollectives",
    "all_gather_single",
    "as_real",
    "divided",
    "done",
    "wait_all",
]


CustomCollective = Callable[..., Optional[dist.Work]]
"""FSDP2's ``AllGather`` and ``ReduceScatter``: called as torch's collectives of the same name; None if synchronous."""

# torch 2.13 renamed the two and warns about the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Work(Protocol):
    """A collective in flight. After ``wait()``, the current stream may use its result.

    ``wait()`` issues no collective: ranks call it at different moments, and in different orders.
    """

    def wait(self) -> object: ...


class ReduceScatterTraits(NamedTuple):
    """Properties of a group's reduce-scatters. Equal on all ranks, because backend, device type and settings are.

    Attributes:
        adds_wide: whether the output may have a wider dtype than the input. The sum is then computed in the output's dtype. If
            False, a group casts its gradients to the wider dtype before the reduce-scatter. False if shards are reduced in two
            steps.
        holds_second_buffer: whether a receive buffer is allocated until ``wait()``.
    """

    adds_wide: bool
    holds_second_buffer: bool


MemoryOfPass = dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
"""The bytes that a collective allocates (or frees, if negative) when it is issued, and in its wait, by its name."""


class Collectives:
    """The collectives that a group calls. All calls return at once. A subclass overrides what it carries, or :meth:`issue`.

    The caller must keep their tensors alive, and must not write to them, until ``wait()``. Argument ``group``: a process group
    of some of the ranks; None for all ranks that share the buffer.
    """

    pieces: int | None = None
    """If gradients are the mean over so many pieces of a step, and not what the reduction's divisor says."""

    def issue(self, name: str, largest: torch.Tensor, *arguments: Any) -> Work:
        """Issue the collective with that name and these arguments. ``largest``: its largest tensor."""
        raise NotImplementedError

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup | None = None) -> Work:
        """Fill ``output`` (ranks * S elements) with every rank's ``shard`` (S elements; with weights, each rank has its own S).

        Shards are in the order of ranks. ``shard`` may be this rank's slice of ``output``.
        """
        return self.issue("all_gather", output, output, shard, group)

    def reduce_scatter(
        self, output: torch.Tensor, buffer: torch.Tensor, reduction: Reduction, group: dist.ProcessGroup | None = None
    ) -> Work:
        """Reduce ``buffer`` (ranks * S elements) over ranks; ``output`` gets this rank's slice (S elements)."""
        return self.issue("reduce_scatter", buffer, output, buffer, reduction, group)

    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction, group: dist.ProcessGroup | None = None) -> Work:
        """Reduce ``tensor`` over replicas, or over the ranks of another process group, in place.

        A reduce-scatter has applied the user's divisor already: see :meth:`Reduction.rest`.
        """
        return self.issue("all_reduce", tensor, tensor, reduction, group)

    def all_reduce_max(self, tensor: torch.Tensor) -> Work:
        """Element-wise maximum over ranks and replicas, in place."""
        return self.issue("all_reduce_max", tensor, tensor)

    def reduce_scatter_traits(self, device: torch.device) -> ReduceScatterTraits:
        """The properties of reduce-scatters on ``device``."""
        raise NotImplementedError

    def memory_of_passes(self) -> tuple[MemoryOfPass, ...]:
        """What the backward passes of a step allocate here, if there are several that reduce, in their order."""
        return ()


class WrappedCollectives(Collectives):
    """The collectives of ``inner``. A subclass overrides :meth:`issue`, or what it carries itself."""

    follows_model: ClassVar[bool] = False
    """Whether its owner wraps the collectives of the model's next mesh too, so that the model may move."""

    def __init__(self, inner: Collectives) -> None:
        self.inner, self.pieces = inner, inner.pieces

    def issue(self, name: str, largest: torch.Tensor, *arguments: Any) -> Work:
        work: Work = getattr(self.inner, name)(*arguments)
        return work

    def reduce_scatter_traits(self, device: torch.device) -> ReduceScatterTraits:
        return self.inner.reduce_scatter_traits(device)

    def memory_of_passes(self) -> tuple[MemoryOfPass, ...]:
        return self.inner.memory_of_passes()


@dataclass(frozen=True, eq=False)
class Levels:
    """The ranks of a buffer as ``nodes`` nodes of ``per_node`` consecutive ranks each, with two process groups of this rank.

    Rank j of node n holds shard ``n * per_node + j``.

    Attributes:
        across: the ranks with the same j in all nodes.
        within: the ranks of this rank's node; None if a node has one rank.
    """

    across: dist.ProcessGroup
    within: dist.ProcessGroup | None

    @property
    def nodes(self) -> int:
        return self.across.size()

    @property
    def per_node(self) -> int:
        return 1 if self.within is None else self.within.size()


class _Carrier(NamedTuple):
    """What carries the tensors of a process group on one device.

    Attributes:
        is_gloo: whether gloo does. A wait blocks the host then, and looks whether other ranks have failed: :func:`wait_all`.
        ops: what its backend computes.
    """

    is_gloo: bool
    ops: Ops


class ProcessGroupCollectives(Collectives):
    """Collectives of a process group of shards and of a process group of replicas (HSDP). One code serves gloo and NCCL.

    If there is no process group of shards, parameters are replicated only and this rank's shard is the whole buffer.

    With NCCL, a collective starts behind the work that the current stream holds when it is issued. It overlaps later work of
    this stream. ``wait()`` orders the current stream behind the collective and does not block the host.

    Attributes:
        levels: the process groups of the two mesh dimensions, if shards lie over both. Each is reduced in a step of its own.
        custom_all_gather, custom_reduce_scatter: if set, they replace the process group's collectives. Their ``allocate`` is
            never called, because they work on the group's own buffers.
        separate_groups: by process group, the one for its reductions. An all-gather and a reduce-scatter can then run at once.
        wire: the dtype in which reduce-scatters send gradients; sums have the dtype of the output. None: that of the buffer.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, replicas: dist.ProcessGroup | None = None, levels: Levels | None = None
    ) -> None:
        self._group, self._replicas, self.levels = group, replicas, levels
        self.custom_all_gather: CustomCollective | None = None
        self.custom_reduce_scatter: CustomCollective | None = None
        self.separate_groups: dict[dist.ProcessGroup | None, dist.ProcessGroup] = {}
        self.wire: torch.dtype | None = None
        self._carriers: dict[tuple[dist.ProcessGroup, torch.device], _Carrier] = {}

    def _carrier(self, group: dist.ProcessGroup, device: torch.device) -> _Carrier:
        found = self._carriers.get((group, device))
        if found is None:  # Once: it does not change, and each collective of a step asks.
            found = self._carriers[group, device] = _Carrier(is_gloo(group, device), ops_of(group, device))
        return found

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup | None = None) -> Work:
        group, custom = group or self._group, self.custom_all_gather
        # The user's collective is called even for one rank: it may do more than communicate.
        if group is None or (group.size() == 1 and custom is None):
            if output.data_ptr() != shard.data_ptr():
                output.copy_(shard)
            return done
        if shard.dtype.itemsize == 1:  # gloo does not support float8, and an all-gather only moves bytes.
            output, shard = output.view(torch.uint8), shard.view(torch.uint8)
        elif shard.is_complex():
            output, shard = as_real(output), as_real(shard)
        if custom is not None:
            return custom(output, shard, group=group, async_op=True) or done  # A synchronous one returns None.
        return self._gather(output, shard, group)

    def _gather(self, output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> Work:
        is_gloo = self._carrier(group, shard.device).is_gloo
        # Broadcasts do not match an all-gather of another rank. All ranks decide alike: their shards have the same size.
        if is_gloo and _gloo.is_worth_broadcasts(shard, group):
            return _gloo.gloo_all_gather(output.chunk(group.size()), shard, group)
        work = all_gather_single(output, shard, group=group, async_op=True)
        return wait_all([work]) if is_gloo else work

    def reduce_scatter(
        self, output: torch.Tensor, buffer: torch.Tensor, reduction: Reduction, group: dist.ProcessGroup | None = None
    ) -> Work:
        group, custom = group or self._group, self.custom_reduce_scatter
        group = self.separate_groups.get(group, group)
        if group is None or (group.size() == 1 and custom is None):
            torch.div(buffer, reduction.begin(output, buffer, 1, OPS)[1], out=output)
            return done
        carrier = self._carrier(group, output.device)
        # With a wire, the sum is ours: no backend's average. A custom collective has no wire.
        is_ours = self.wire is not None and custom is None
        op, divisor = reduction.begin(output, buffer, group.size(), OPS if is_ours else carrier.ops)
        real = (as_real(output), as_real(buffer)) if buffer.is_complex() else (output, buffer)
        if custom is not None:
            return divided(custom(*real, op=op, group=group, async_op=True) or done, output, divisor)
        return self._scatter(*real, group, op, divisor)

    def _scatter(self, output: torch.Tensor, buffer: torch.Tensor, group: dist.ProcessGroup, op: Any, divisor: float) -> Work:
        is_gloo = self._carrier(group, buffer.device).is_gloo
        # All ranks decide alike: the op follows from settings.
        if op is dist.ReduceOp.SUM:
            if self.wire is not None:
                return self._exchange(output, buffer, group, divisor, [output.numel()] * group.size())
            if is_gloo:
                return _gloo.reduce_scatter(output, buffer, group, divisor)
        work = _reduce_scatter(output, buffer, op=op, group=group, async_op=True)
        return divided(wait_all([work]) if is_gloo else work, output, divisor)

    def _exchange(
        self, output: torch.Tensor, buffer: torch.Tensor, group: dist.ProcessGroup, divisor: float, sizes: Sequence[int]
    ) -> Work:
        """A reduce-scatter as an all-to-all in the dtype of the wire, and a sum in order of ranks, in that of ``output``."""
        sent = buffer if self.wire is None or buffer.element_size() <= self.wire.itemsize else buffer.to(self.wire)
        if self._carrier(group, buffer.device).is_gloo:
            return Then(_gloo.reduce_scatter(output, sent, group, divisor, sizes), functools.partial(_forget, sent))
        received = sent.new_empty(group.size(), output.numel())
        work = dist.all_to_all_single(
            received.view(-1), sent, [output.numel()] * group.size(), list(sizes), group=group, async_op=True
        )
        # Behind the exchange, on the current stream: the sum of each element has one order, which NCCL does not choose.
        return Then(work, functools.partial(_add_received, received, output, divisor, sent))

    def reduce_scatter_traits(self, device: torch.device) -> ReduceScatterTraits:
        """Over gloo, and with a :attr:`wire`, it is an all-to-all and a local sum: see ``_gloo.reduce_scatter``."""
        group, is_own = self._group, self.custom_reduce_scatter is None
        is_exchange = is_own and group is not None and group.size() > 1
        is_exchange = is_exchange and (self.wire is not None or self._carrier(group, device).is_gloo)  # type: ignore[arg-type]
        return ReduceScatterTraits(is_exchange and self.levels is None, holds_second_buffer=is_exchange)

    def separate_reductions(self, enable: bool) -> None:
        """If ``enable``, make a second process group of the same ranks for reductions. Otherwise, use the first one again."""
        groups = (self._group,) if self.levels is None else (self.levels.within, self.levels.across)
        self.separate_groups = {}
        for group in groups if enable else ():
            if group is not None:  # Members make a group together: all ranks make these groups in one order.
                ranks = dist.get_process_group_ranks(group)
                self.separate_groups[group] = group_of(ranks, "reduce_scatter", group)

    def memory_pool(self, device: torch.device, is_symmetric: bool) -> torch.cuda.MemPool | None:
        """A pool of the backend's own allocator, registered with the backend; None if there is no such allocator (gloo)."""
        backend: Any = None if self._group is None else backend_of(self._group, device)
        if backend is None or not backend.supports_tensor_alloc(device):
            return None
        pool = torch.cuda.MemPool(backend.mem_allocator)
        backend.register_mem_pool(pool, symm=is_symmetric)
        return pool

    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction, group: dist.ProcessGroup | None = None) -> Work:
        group = group or self._replicas
        assert group is not None, "all_reduce needs replicas: a 1-D mesh has none"
        if group.size() == 1:
            return done
        carrier = self._carrier(group, tensor.device)
        op, divisor = reduction.rest().begin(tensor, tensor, group.size(), carrier.ops)
        work = dist.all_reduce(as_real(tensor), op=op, group=group, async_op=True)
        return divided(wait_all([work]) if carrier.is_gloo else work, tensor, divisor)

    def all_reduce_max(self, tensor: torch.Tensor) -> Work:
        work: Work | None = None
        for group in (self._group, self._replicas):
            if group is not None and group.size() > 1:
                if work is not None:
                    work.wait()  # The second all-reduce reads what the first one writes.
                work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group, async_op=True)
                work = wait_all([work]) if self._carrier(group, tensor.device).is_gloo else work
        return work or done


class UnequalCollectives(ProcessGroupCollectives):
    """An all-gather is a broadcast of each shard to its place, and a reduce-scatter is a reduction of each part to its rank.

    NCCL issues these broadcasts, or reductions, as one call. Over gloo, small shards are padded to the largest one and
    all-gathered, and a reduce-scatter is an all-to-all and a local sum in the order of ranks, as with equal shards: sums have
    the same bits. A rank of weight 0 sends no shard, and gets none.

    Args:
        weights: of the ranks of ``group``: the elements of a buffer are divided in proportion to them.
    """

    def __init__(self, group: dist.ProcessGroup | None, replicas: dist.ProcessGroup | None, weights: Sequence[int]) -> None:
        super().__init__(group, replicas)
        self._weights = tuple(weights)

    def _gather(self, output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> Work:
        assert group is self._group, "shards of weights are gathered by all of their ranks"
        parts = self._parts(output)
        if not self._carrier(group, output.device).is_gloo:
            return dist.all_gather(parts, shard, group=group, async_op=True)
        largest = max(parts, key=torch.Tensor.numel)  # Equal on all ranks, unlike ``shard``.
        if _gloo.is_worth_broadcasts(largest, group):
            return _gloo.gloo_all_gather(parts, shard, group)
        # Padded to the largest one. ``wait()`` copies them to their places.
        own, gathered = shard.new_zeros(largest.numel()), shard.new_empty(len(parts), largest.numel())
        own[: shard.numel()] = shard
        work = all_gather_single(gathered.view(-1), own, group=group, async_op=True)
        return Then(wait_all([work]), functools.partial(_unpad, parts, gathered, own))

    def _scatter(self, output: torch.Tensor, buffer: torch.Tensor, group: dist.ProcessGroup, op: Any, divisor: float) -> Work:
        parts, is_gloo = self._parts(buffer), self._carrier(group, buffer.device).is_gloo
        if op is dist.ReduceOp.SUM and (is_gloo or self.wire is not None):
            return self._exchange(output, buffer, group, divisor, [part.numel() for part in parts])
        work = dist.reduce_scatter(output, parts, op=op, group=group, async_op=True)
        return divided(wait_all([work]) if is_gloo else work, output, divisor)

    def _parts(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        unit = buffer.numel() // sum(self._weights)
        return list(buffer.split([weight * unit for weight in self._weights]))


def _forget(*tensors: torch.Tensor) -> None:
    """What a collective reads stays alive until it has ended."""


def _add_received(received: torch.Tensor, output: torch.Tensor, divisor: float, sent: torch.Tensor) -> None:
    _gloo.sum_parts(received.unbind(), output, divisor)


def _unpad(parts: Sequence[torch.Tensor], gathered: torch.Tensor, own: torch.Tensor) -> None:
    """Copy padded shards to their places. ``own``, this rank's, must live until then: the collective has read it."""
    with torch.inference_mode():
        for part, padded in zip(parts, gathered):
            part.copy_(padded[: part.numel()])


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


done = wait_all([])
"""The work of a collective that was not issued, or has finished."""


class Then:
    """A collective in flight, and a local step on its result, which ``wait()`` does once."""

    def __init__(self, work: Work, step: Callable[[], object]) -> None:
        self._work = work
        self._step: Callable[[], object] | None = step

    def wait(self) -> None:
        # With NCCL, wait() orders the current stream behind the collective, so the step runs on complete results.
        self._work.wait()
        step, self._step = self._step, None  # A second wait() does nothing: the result may have been written since.
        if step is not None:
            step()


def divided(work: Work, output: torch.Tensor, divisor: float) -> Work:
    """A collective whose output is divided when the collective has finished."""
    return work if divisor == 1 else Then(work, functools.partial(output.div_, divisor))


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs of real numbers, in one dimension: sums and divisions have the same bits over any backend."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


_CALL = "a collective (TORCH_RAGGED_DEBUG=1)"
_NAMES = {
    "all_gather": ("all-gather", "all_gather_wait"),
    "reduce_scatter": ("reduce-scatter", "reduce_scatter_wait"),
    "all_reduce": ("all-reduce", "all_reduce_wait"),
    "all_reduce_max": ("all-reduce of used parameters", "unused_parameters_all_reduce_wait"),
}
"""By method: what errors call the collective, and the profiler's range in which a rank waits for it."""

_ADVICE = (
    "all ranks must use equal models and policies, and run the same fully_shard modules in the same order. If a rank may skip "
    "a module, shard it with fully_shard(module, optional=True)"
)

_counts: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
"""The number of collectives that this rank has compared on a process group."""

_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, itertools.count[int]] = weakref.WeakKeyDictionary()
"""The number of the groups of parameters that a process group has."""


class NamedCollectives(WrappedCollectives):
    """The collectives of one group of parameters.

    If a collective fails because of another rank, or of the network, it raises :class:`torch_ragged.PeerError`.

    With ``TORCH_RAGGED_DEBUG=1``, before each collective the ranks of its process group compare its number, its kind, the
    group's parameters and layout, and shapes and dtypes: one more all-reduce of 24 bytes, which the host waits for.

    Args:
        mesh: the mesh of the shards and the replicas.
        shards, replicas: its process groups; None if there is none.
        parameters: the first parameter's name and the number of the others.

    Attributes:
        inner: what carries them; it may be replaced.
        number: of the group among those of its process group; 0 before :meth:`take_number`.
        fqn: the name of the group's module; empty before the root's first forward.
        parameters: what the collectives carry, for errors.
    """

    def __init__(
        self,
        inner: Collectives,
        mesh: DeviceMesh,
        shards: dist.ProcessGroup | None,
        replicas: dist.ProcessGroup | None,
        parameters: str,
        layout: BufferLayout,
    ) -> None:
        super().__init__(inner)
        self._mesh, self._shards, self._replicas = mesh, shards, replicas
        self._own_parameters, self._layout = parameters, layout
        self._issued: dict[dist.ProcessGroup | None, Issued | None] = {None: None}
        self._is_debug = is_debug()
        self.number = 0
        self.join("", None)

    def join(self, fqn: str, before_all_gather: Callable[[], None] | None) -> None:
        """The group has a name under its root. Before each all-gather, call a function, which may raise."""
        self.fqn, self._before_all_gather = fqn, before_all_gather
        self.parameters = f"{self._own_parameters} in {fqn or f'group {self.number}'}"

    def take_number(self) -> None:
        """Take the next number of the process group, before :meth:`join`.

        Ranks call this when they have agreed on the group, in the same order. Before the root's first forward, groups have no
        other name that tells them apart.
        """
        key = self._shards or self._replicas
        if key is not None:
            self.number = next(_groups.setdefault(key, itertools.count(1)))

    def ranks(self) -> list[int]:
        """The global ranks of the mesh."""
        return self._mesh.mesh.flatten().tolist()

    def issue(self, name: str, largest: torch.Tensor, *arguments: Any) -> Work:
        """Issue a collective, which :func:`issued_on` notes; in debug mode, ranks compare it before. Its errors name ranks.

        Raises:
            ValueError: ranks issue different collectives.
        """
        if name == "all_reduce_max":
            groups = [self._shards, self._replicas]
        else:
            groups = [arguments[-1] or (self._replicas if name == "all_reduce" else self._shards)]
        if name == "all_gather" and self._before_all_gather is not None and groups[0] is not None:
            self._before_all_gather()
        (collective, waiting), parameters, tickets = _NAMES[name], self.parameters, []
        # None on the meta device: a memory report runs there, on one rank alone.
        for group in () if largest.is_meta else groups:
            if group is not None and group not in self._issued:
                self._issued[group] = issued_on(group) if group.size() > 1 else None  # Without other ranks, there is none.
            issued = self._issued[group]
            if issued is not None:
                if self._is_debug and group is not None:
                    self._compare(collective, group, [each for each in reversed(arguments) if isinstance(each, torch.Tensor)])
                tickets.append(issued.issue(collective, parameters))
        named = _NamedWork(collective, parameters, self.ranks, tickets)
        named.waiting, named.fqn = waiting, self.fqn
        with named:
            named.work = getattr(self.inner, name)(*arguments)
        return named

    @functools.cached_property
    def _layout_text(self) -> str:
        """Equal for equal parameters, granularities and ranks; different otherwise."""
        return hashlib.sha256(repr(self._layout).encode()).hexdigest()[:12]

    def _compare(self, collective: str, group: dist.ProcessGroup, tensors: Sequence[torch.Tensor]) -> None:
        if isinstance(self._layout, WeightedLayout):  # Shards differ between ranks. The buffer does not.
            tensors = [max(tensors, key=torch.Tensor.numel)]
        shapes = " and ".join(f"{tuple(each.shape)} {str(each.dtype).removeprefix('torch.')}" for each in tensors)
        number = _counts[group] = _counts.get(group, 0) + 1
        claim = f"collective {number} of process group {group.group_name}: {collective} of {self.parameters}, {shapes}"
        agree([group], tensors[0].device, _CALL, f"{claim}, layout {self._layout_text}", None, _ADVICE)


class _NamedWork(peers_named):
    """A collective that is issued and waited for in this context, so that its errors name it.

    Attributes:
        work: the collective in flight.
        waiting: the profiler's range in which a rank waits for it.
        fqn: the name of the group's module.
    """

    work: Work
    waiting: str
    fqn: str

    def wait(self) -> None:
        with profiler_range(self.waiting, self.fqn), self:
            self.work.wait()
