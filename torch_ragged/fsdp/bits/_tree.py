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
from torch_ragged.fsdp.bits._sums import sums_of
from torch_ragged.fsdp.comm import _gloo
from torch_ragged.fsdp.comm._collectives import (
    Collectives,
    MemoryOfPass,
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

    It holds at most ``1 + log2(n)`` nodes. It writes to the leaves that it gets. None is an absent leaf.
    """

    def __init__(self) -> None:
        # With the number of leaves, which halves from one to the next.
        self._nodes: list[tuple[int, torch.Tensor | None]] = []

    def add(self, leaf: torch.Tensor | None) -> None:
        """Add the next leaf."""
        self._nodes.append((1, leaf))
        while len(self._nodes) > 1 and self._nodes[-1][0] == self._nodes[-2][0]:
            self._join()

    def _join(self) -> None:
        (count, right), (before, left) = self._nodes.pop(), self._nodes.pop()
        self._nodes.append((before + count, right if left is None else left if right is None else left.add_(right)))

    def keep(self, lent: torch.Tensor) -> None:
        """The memory of ``lent``, in which leaves are, is freed or written next: keep copies of nodes that lie there."""
        memory = lent.untyped_storage().data_ptr()
        for index, (count, node) in enumerate(self._nodes):
            if node is not None and node.untyped_storage().data_ptr() == memory:
                self._nodes[index] = count, node.clone()

    def root(self) -> torch.Tensor | None:
        """The sum; None if no leaf was present. The tree is empty afterwards."""
        while len(self._nodes) > 1:
            self._join()
        return self._nodes.pop()[1]


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

    With a ``subtree`` of 2, a rank adds two pieces itself, and sends their sum:

        round 0    rank 0 keeps piece 0, rank 1 piece 2, rank 2 piece 4
        round 1    rank 0 sends pieces 0 + 1, rank 1 pieces 2 + 3, rank 2 piece 4 alone     three leaves of this rank's shard

    A reduce-scatter is an all-to-all. Its output is negative zeros, so that ``.grad`` is zero until :meth:`TreeSum.root`
    replaces it. The receive buffer has the size of the group's gradient buffer. With replicas (HSDP), the all-reduce is an
    all-gather of the leaves that other replicas have received; ranks count replica by replica.

    Args:
        inner: the collectives of the mesh's process group, which carry all else.
        group: the group of parameters.
        now: returns the present round.
        pieces: of a step, on all ranks together.
        subtree: how many pieces a rank adds itself, a power of two.
    """

    follows_model = True

    def __init__(self, inner: Collectives, group: FSDPParamGroup, now: Callable[[], Round], pieces: int, subtree: int) -> None:
        super().__init__(inner)
        self.group, self._now, self._subtree = group, now, subtree
        self._divisor = self.pieces = pieces
        self._leaves = group.dp.mesh.size()  # Of each time that ranks send.
        self.rounds = -(-pieces // (self._leaves * subtree)) * subtree  # Of a step.
        self.start()

    def start(self) -> None:
        """A step begins."""
        self._tree, self._sent = TreeSum(), 0  # How many times ranks have sent.
        self._own, self._kept = TreeSum(), 0  # Of unsharded gradients that this rank adds, and how many leaves it has.
        self.round = -1  # The last one in which the group was reduced.
        self._received: torch.Tensor | None = None
        # Of the gradients of the noted piece, and of the repeated one (True).
        self.sums: dict[bool, list[tuple[int, int]]] = {}

    def reduce_scatter_traits(self, device: torch.device) -> ReduceScatterTraits:
        return ReduceScatterTraits(adds_wide=False, holds_second_buffer=True)

    def memory_of_passes(self) -> tuple[MemoryOfPass, ...]:
        """As if each rank had as many pieces, which use all of the group."""
        layout, passes = self.group.layout, list[MemoryOfPass]()
        shard = layout.shard_numel * self.group.reduce_dtype.itemsize
        whole, of_all = layout.ranks * shard, self._leaves * shard
        for number in range(self.rounds):
            turn, place = divmod(number, self._subtree)
            kept = len(_begins_of(place))  # Unsharded gradients of this rank.
            if place < self._subtree - 1:
                kept_next = len(_begins_of(place + 1))
                passes.append({"reduce_scatter": (((kept_next - kept) * whole,), ())})
                continue
            leaves = turn * self._leaves
            nodes = _begins_of(leaves + self._leaves)
            copies = sum(begin >= leaves for begin in nodes)
            joined = len(_begins_of(leaves)) - (len(nodes) - copies)
            received = (-joined * shard, copies * shard)
            if self.group.dp.has_replicas:
                passes.append({"reduce_scatter": ((-kept * whole, whole), ())})
                passes[-1]["all_reduce"] = (of_all,), (*received, -of_all - whole)
            else:
                passes.append({"reduce_scatter": ((-kept * whole, whole), (*received, -whole))})
        return tuple(passes)

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
        turn, place = divmod(number, self._subtree)
        if self._kept and self.round // self._subtree < turn:
            self._send_late()
        self.round = number
        for param, offset, tensor in zip(self.group.params, self.group.layout.offsets, self.group.layout.tensors):
            if is_absent:
                param.was_used = False  # Another rank says whether one of the pieces has used it.
            if not param.was_used:
                buffer[offset : offset + tensor.numel].fill_(_ABSENT)
        is_last = place == self._subtree - 1
        if self._subtree > 1:
            for _ in range(place - self._kept):  # Rounds without this group, as of a module that no rank has used.
                self._own.add(None)
            self._own.add(None if is_absent else buffer)
            self._kept = place + 1
        if not is_last:
            self._own.keep(buffer)
            with torch.no_grad():
                output.fill_(_ABSENT)
            return Then(done, functools.partial(_hold, buffer))
        if self._subtree > 1:
            self._take_own(buffer)
        received, work = self._send(buffer, turn, group)
        return Then(work, functools.partial(self._receive, received, output, buffer))

    def _take_own(self, buffer: torch.Tensor) -> None:
        """Let ``buffer`` be the sum of the pieces that this rank has kept."""
        node, self._kept = self._own.root(), 0
        if node is None:
            buffer.fill_(_ABSENT)
        elif node is not buffer:
            buffer.copy_(node)

    def _send(self, buffer: torch.Tensor, turn: int, group: dist.ProcessGroup | None = None) -> tuple[torch.Tensor, Work]:
        """Send each rank its part. Not by the transport's sum: its order depends on the ranks."""
        for _ in range(self._leaves * (turn - self._sent)):  # Turns without this group.
            self._tree.add(None)
        self._sent = turn + 1
        received = buffer.new_empty(self.group.layout.ranks, buffer.numel() // self.group.layout.ranks)
        group = group or self.group.dp.shard_group
        if self.group.layout.ranks == 1 or group is None:
            received.copy_(buffer.view_as(received))
            return received, done
        work: Work = _gloo.issued(dist.all_to_all_single, received.view(-1), buffer, group=group)
        return received, wait_all([work]) if is_gloo(group, buffer.device) else work

    def _send_late(self) -> None:
        """The group was not reduced in the last rounds of a turn: send what was kept. All ranks do, for they know it alike."""
        layout = self.group.layout
        device = self.group.sharded.flat.device
        buffer = torch.empty(layout.ranks * layout.shard_numel, dtype=self.group.reduce_dtype, device=device)
        self._take_own(buffer)
        received, work = self._send(buffer, self.round // self._subtree)
        work.wait()
        if self.group.dp.has_replicas:
            received, work = self._send_to_replicas(received)
            work.wait()
        self._take(received)

    def _sums(self, buffer: torch.Tensor) -> list[tuple[int, int]]:
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
        own, self._received = self._received, None
        if own is None:  # A repeated piece, or one that this rank keeps.
            return Then(done, functools.partial(_hold, tensor))
        received, work = self._send_to_replicas(own)
        return Then(work, functools.partial(self._take, received, own))

    def _send_to_replicas(self, own: torch.Tensor) -> tuple[torch.Tensor, Work]:
        replicas = self.group.dp.replicate_group
        assert replicas is not None
        received = own.new_empty(self._leaves, own.shape[1])
        work: Work = all_gather_single(received.view(-1), own.view(-1), group=replicas, async_op=True)
        return received, wait_all([work]) if is_gloo(replicas, own.device) else work

    def _take(self, received: torch.Tensor, *_: torch.Tensor) -> None:
        """Add the leaves of a round, in the order of ranks."""
        with torch.no_grad():
            for leaf in received.unbind():
                self._tree.add(leaf)
            self._tree.keep(received)

    def finish(self) -> torch.Tensor | None:
        """The mean over the pieces of this rank's shard, or None if no piece has used the group."""
        if self._kept:
            self._send_late()
        # Absent leaves, also those of ranks without a piece, are at the end, and adding them changes no bit. So this tree has
        # the value of the tree with as many leaves as pieces.
        for _ in range(self._leaves * (self.rounds // self._subtree - self._sent)):
            self._tree.add(None)
        root = self._tree.root()
        return None if root is None else root.div_(self._divisor)


def _begins_of(leaves: int) -> list[int]:
    """The first leaf of each node of a tree that has so many leaves: a node has a power of two of them."""
    begins, rest = [], leaves
    while rest:
        begins.append(leaves - rest)
        rest -= 1 << rest.bit_length() - 1
    return begins


def _hold(tensor: torch.Tensor) -> None:
    """The tensor lives until here: its stream may still read it."""
