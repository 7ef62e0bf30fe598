"""Sums of gradients over the pieces of a step, by one binary tree that depends on the number of pieces alone.

It does not know how a batch is cut into pieces, or what follows a sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from torch_ragged._ranks.groups import is_gloo
from torch_ragged.fsdp.bits._sums import Sums, sums_of
from torch_ragged.fsdp.comm import _gloo
from torch_ragged.fsdp.comm._collectives import (
    Collectives,
    ReduceScatterTraits,
    Then,
    Work,
    WrappedCollectives,
    all_gather_single,
    done,
    wait_all,
)
from torch_ragged.fsdp.comm._reduction import Reduction
from torch_ragged.fsdp.core._fsdp_param_group import FSDPParamGroup

__all__ = ["TREE_VERSION", "PieceCollectives", "Round", "TreeSum"]

TREE_VERSION = 1
"""The rule of :class:`TreeSum`. Runs with another rule have other bits."""

_ABSENT = -0.0
"""The gradient of a parameter that a piece has not used: ``x + -0.0`` has the bits of ``x``, also of ``0.0`` and ``-0.0``."""


class TreeSum:
    """The sum of leaves that come in order. The left subtree of n leaves has the largest power of two below n::

        6 leaves    ((0 + 1) + (2 + 3)) + (4 + 5)
        7 leaves    ((0 + 1) + (2 + 3)) + ((4 + 5) + 6)

    It holds at most ``1 + log2(n)`` nodes. It writes to the leaves that it gets.
    """

    def __init__(self) -> None:
        self._nodes: list[tuple[int, torch.Tensor]] = []  # With the number of leaves, which halves from one to the next.

    def add(self, leaf: torch.Tensor) -> None:
        """Add the next leaf."""
        self._nodes.append((1, leaf))
        while len(self._nodes) > 1 and self._nodes[-1][0] == self._nodes[-2][0]:
            self._join()

    def _join(self) -> None:
        (count, right), (before, left) = self._nodes.pop(), self._nodes.pop()
        self._nodes.append((before + count, left.add_(right)))

    def keep(self) -> None:
        """The memory of the leaves is freed next: keep copies of nodes that lie there."""
        self._nodes = [(count, node.clone() if node._is_view() else node) for count, node in self._nodes]

    def root(self) -> torch.Tensor:
        """The sum. The tree is empty afterwards."""
        while len(self._nodes) > 1:
            self._join()
        return self._nodes.pop()[1]

    def clear(self) -> None:
        """Forget all leaves."""
        self._nodes = []


class Round(NamedTuple):
    """What a rank computes now.

    Attributes:
        number: of the round in its step.
        is_absent: this rank has no piece of its own, and repeats another's, whose gradient does not count.
        is_noted: the sums of the gradient's bits are kept, since another rank repeats the piece.
        is_repeat: the piece of another rank, whose gradient is only summed up, and not sent.
    """

    number: int
    is_absent: bool
    is_noted: bool
    is_repeat: bool


class PieceCollectives(WrappedCollectives):
    """The collectives of a group whose reduce-scatter keeps what ranks send as leaves of a :class:`TreeSum`.

    ::

        round 0    rank 0 sends piece 0, rank 1 piece 1, rank 2 piece 2         leaves 0, 1, 2 of this rank's shard
        round 1    rank 0 sends piece 3, rank 1 piece 4, rank 2 has no piece    leaves 3, 4, and one of absent gradients

    A reduce-scatter is an all-to-all. Its output is negative zeros, so that ``.grad`` is zero until :meth:`TreeSum.root`
    replaces it. The receive buffer has the size of the group's gradient buffer. With replicas (HSDP), the all-reduce is an
    all-gather of the leaves that other replicas have received; ranks count replica by replica.

    Args:
        inner: the collectives of the mesh's process group, which carry all else.
        group: the group of parameters.
        now: returns the present round.
    """

    follows_model = True

    def __init__(self, inner: Collectives, group: FSDPParamGroup, now: Callable[[], Round]) -> None:
        super().__init__(inner)
        self.group, self.tree, self.round = group, TreeSum(), -1
        self._now, self._leaves = now, group.dp.mesh.size()  # Of a round.
        self.sums: dict[bool, list[Sums]] = {}  # Of the gradients of the noted piece, and of the repeated one (True).
        self._received: torch.Tensor | None = None

    def reduce_scatter_traits(self, device: torch.device) -> ReduceScatterTraits:
        return ReduceScatterTraits(adds_wide=False, holds_second_buffer=True)

    def reduce_scatter(
        self, output: torch.Tensor, buffer: torch.Tensor, reduction: Reduction, group: dist.ProcessGroup | None = None
    ) -> Work:
        number, is_absent, is_noted, is_repeat = self._now()
        if is_noted or is_repeat:
            self.sums[is_repeat] = self._sums(buffer)
        if is_repeat:
            with torch.no_grad():
                output.fill_(_ABSENT)
            return Then(done, functools.partial(_hold, buffer))
        if number == self.round:  # On all ranks alike: groups are reduced in one order.
            raise RuntimeError(
                f"{self.group.names} is reduced a second time for one piece: with SameBits, each piece has one backward, "
                "through one forward of each module. Add the losses of a piece"
            )
        layout = self.group.layout
        received = buffer.new_empty(layout.ranks, output.numel())
        # A round without this group, as of a module that no rank has used, has absent leaves.
        for _ in range(self._leaves * (number - self.round - 1)):
            self.tree.add(torch.full_like(output, _ABSENT))
        self.round = number
        for param, offset, tensor in zip(self.group.params, layout.offsets, layout.tensors):
            if is_absent:
                param.was_used = False  # Another rank says whether one of the pieces has used it.
            if not param.was_used:
                buffer[offset : offset + tensor.numel].fill_(_ABSENT)
        group = group or self.group.dp.shard_group
        if layout.ranks == 1 or group is None:
            return Then(done, functools.partial(self._receive, received.copy_(buffer.view_as(received)), output))
        # Not the transport's sum: its order depends on the ranks.
        work: Work = _gloo.issued(dist.all_to_all_single, received.view(-1), buffer, group=group)
        work = wait_all([work]) if is_gloo(group, buffer.device) else work
        return Then(work, functools.partial(self._receive, received, output, buffer))

    def _sums(self, buffer: torch.Tensor) -> list[Sums]:
        """Of the gradient of each parameter in the group's buffer."""
        parts = zip(self.group.params, self.group.layout.offsets, self.group.layout.tensors)
        return [sums_of(buffer[start : start + each.numel]) if param.was_used else (0, 0) for param, start, each in parts]

    def _receive(self, received: torch.Tensor, output: torch.Tensor, *_: torch.Tensor) -> None:
        """``received`` has come. What was sent has lived until here."""
        with torch.no_grad():
            output.fill_(_ABSENT)
        if self.group.dp.has_replicas:
            self._received = received  # Of this replica: ranks issue the next collective in one order, not in a wait.
        else:
            self._take(received)

    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction, group: dist.ProcessGroup | None = None) -> Work:
        if self._now().is_repeat:
            return Then(done, functools.partial(_hold, tensor))
        own, self._received = self._received, None
        replicas = self.group.dp.replicate_group
        assert own is not None and replicas is not None
        received = own.new_empty(self._leaves, own.shape[1])
        work: Work = all_gather_single(received.view(-1), own.view(-1), group=replicas, async_op=True)
        work = wait_all([work]) if is_gloo(replicas, own.device) else work
        return Then(work, functools.partial(self._take, received, own))

    def _take(self, received: torch.Tensor, *_: torch.Tensor) -> None:
        """Add the leaves of a round, in the order of ranks."""
        with torch.no_grad():
            for leaf in received.unbind():
                self.tree.add(leaf)
            self.tree.keep()

    def start(self) -> None:
        """A step begins."""
        self.tree.clear()
        self.round, self._received = -1, None
        self.sums = {}

    def finish(self, rounds: int, divisor: int) -> torch.Tensor | None:
        """The mean over the pieces of this rank's shard, or None if no piece has used the group."""
        if self.round < 0:
            return None
        like = self.group.sharded.flat
        # Absent leaves, also those of ranks without a piece, are at the end, and adding them changes no bit. So this tree has
        # the value of the tree with as many leaves as pieces.
        for _ in range(self._leaves * (rounds - 1 - self.round)):
            self.tree.add(torch.full_like(like, _ABSENT, dtype=self.group.reduce_dtype))
        return self.tree.root().div_(divisor)


def _hold(tensor: torch.Tensor) -> None:
    """The tensor lives until here: its stream may still read it."""
