"""NamedCollectives: the collectives of a group, whose errors say which rank, which collective and which parameters failed.

It moves no data. With ``TORCH_RAGGED_DEBUG=1``, ranks also compare each collective before it starts.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torch_ragged._agreement import agree
from torch_ragged._peers import peers_named
from torch_ragged._whereabouts import Issued, issued_on
from torch_ragged.fsdp.comm._collectives import Collectives, ReduceScatterTraits, Reduction, Work
from torch_ragged.fsdp.layout._buffer_layout import BufferLayout

__all__ = ["NamedCollectives", "is_debug"]

_CALL = "a collective (TORCH_RAGGED_DEBUG=1)"
_ADVICE = (
    "all ranks must use equal models and policies, and run the same fully_shard modules in the same order. If a rank may skip "
    "a module, shard it with fully_shard(module, optional=True)"
)

_counts: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
"""The number of collectives that this rank has compared on a process group."""

_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, itertools.count[int]] = weakref.WeakKeyDictionary()
"""The number of the groups of parameters that a process group has."""


def is_debug() -> bool:
    """Whether ranks compare each collective: ``TORCH_RAGGED_DEBUG=1``. It must be equal on all ranks."""
    return os.environ.get("TORCH_RAGGED_DEBUG", "0") not in ("", "0")


class NamedCollectives:
    """The collectives of one group of parameters.

    If a collective fails because of another rank, or of the network, it raises :class:`torch_ragged.PeerError`.

    With ``TORCH_RAGGED_DEBUG=1``, before each collective the ranks of its process group compare its number, its kind, the
    group's parameters and layout, and shapes and dtypes: one more all-reduce of 24 bytes, which the host waits for.

    Args:
        inner: what carries them.
        mesh: the mesh of the shards and the replicas.
        shards, replicas: its process groups; None if there is none.
        parameters: the first parameter's name and the number of the others.
        layout: the layout of their buffer.

    Attributes:
        inner: as above; it may be replaced.
        number: of the group among those of its process group; 0 before :meth:`take_number`.
        fqn: the name of the group's module; empty before the root's first forward.
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
        self.inner, self.fqn = inner, ""
        self._mesh, self._shards, self._replicas = mesh, shards, replicas
        self._own_parameters, self._layout = parameters, layout
        self._issued: dict[dist.ProcessGroup | None, Issued | None] = {}
        self._is_debug = is_debug()
        self.number = 0
        self._before_all_gather: Callable[[], None] | None = None

    def join(self, fqn: str, before_all_gather: Callable[[], None] | None) -> None:
        """The group has a name under its root. Before each all-gather, call a function, which may raise."""
        self.fqn, self._before_all_gather = fqn, before_all_gather

    def take_number(self) -> None:
        """Take the next number of the process group. Ranks call this when they have agreed on the group, in the same order.

        Before the root's first forward, groups have no other name that tells them apart.
        """
        key = self._shards or self._replicas
        if key is not None:
            self.number = next(_groups.setdefault(key, itertools.count(1)))

    def ranks(self) -> list[int]:
        """The global ranks of the mesh."""
        ranks: list[int] = self._mesh.mesh.flatten().tolist()
        return ranks

    @property
    def parameters(self) -> str:
        """What the collectives carry, for errors."""
        return f"{self._own_parameters} in {self.fqn or f'group {self.number}'}"

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup | None = None) -> Work:
        if self._before_all_gather is not None and (group or self._shards) is not None:
            self._before_all_gather()
        with self._compared("all-gather", [group or self._shards], shard, output) as named:
            return _NamedWork(named, self.inner.all_gather(output, shard, group))

    def reduce_scatter(self, output: torch.Tensor, buffer: torch.Tensor, reduction: Reduction) -> Work:
        with self._compared("reduce-scatter", [self._shards], buffer, output) as named:
            return _NamedWork(named, self.inner.reduce_scatter(output, buffer, reduction))

    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction) -> Work:
        with self._compared("all-reduce", [self._replicas], tensor) as named:
            return _NamedWork(named, self.inner.all_reduce(tensor, reduction))

    def all_reduce_max(self, tensor: torch.Tensor) -> Work:
        with self._compared("all-reduce of used parameters", [self._shards, self._replicas], tensor) as named:
            return _NamedWork(named, self.inner.all_reduce_max(tensor))

    def reduce_scatter_traits(self, device: torch.device) -> ReduceScatterTraits:
        return self.inner.reduce_scatter_traits(device)

    def _compared(self, collective: str, groups: Sequence[dist.ProcessGroup | None], *tensors: torch.Tensor) -> peers_named:
        """Note the collective that is issued next and, in debug mode, compare it. The context names the ranks if it fails.

        Raises:
            ValueError: ranks issue different collectives.
        """
        parameters, tickets = self.parameters, []
        # None on the meta device: a memory report runs there, on one rank alone.
        for group in () if tensors[0].is_meta else groups:
            issued = self._issued_on(group)
            if issued is not None:
                if self._is_debug and group is not None:
                    self._compare(collective, group, tensors)
                tickets.append(issued.issue(collective, parameters))
        return peers_named(collective, parameters, self.ranks, tickets)

    def _issued_on(self, group: dist.ProcessGroup | None) -> Issued | None:
        """The collectives of ``group``; None if there is no other rank in it."""
        if group not in self._issued:
            self._issued[group] = issued_on(group) if group is not None and group.size() > 1 else None
        return self._issued[group]

    @functools.cached_property
    def _layout_text(self) -> str:
        """Equal for equal parameters, granularities and ranks; different otherwise."""
        parts = (self._layout.tensors, self._layout.offsets, self._layout.shard_numel, self._layout.ranks)
        return hashlib.sha1(repr(parts).encode(), usedforsecurity=False).hexdigest()[:12]

    def _compare(self, collective: str, group: dist.ProcessGroup, tensors: Sequence[torch.Tensor]) -> None:
        shapes = " and ".join(f"{tuple(each.shape)} {str(each.dtype).removeprefix('torch.')}" for each in tensors)
        number = _counts[group] = _counts.get(group, 0) + 1
        claim = f"collective {number} of process group {group.group_name}: {collective} of {self.parameters}, {shapes}"
        agree([group], tensors[0].device, _CALL, f"{claim}, layout {self._layout_text}", None, _ADVICE)


class _NamedWork:
    """A collective in flight whose error names it."""

    def __init__(self, named: peers_named, work: Work) -> None:
        self._named, self._work = named, work

    def wait(self) -> None:
        with self._named:
            self._work.wait()
