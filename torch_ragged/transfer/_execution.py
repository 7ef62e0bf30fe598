"""Execution: one run of a plan on this rank: pack, all-to-all, unpack, round by round.

::

    round 0    pack  all-to-all ------------  pass on  unpack
    round 1              pack  all-to-all -----------------------  pass on  unpack

Two rounds are in flight, so each may use half of the staging memory. The source is never written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from torch_ragged._redistribute import copy_into, part_view
from torch_ragged.transfer._atoms import Atom, Copy
from torch_ragged.transfer._rounds import Slice
from torch_ragged.transfer._watch import Lost, Watch

__all__ = ["Execution"]

_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}

_Letter = tuple[Slice, Atom]


@dataclass
class _Mail:
    """Atoms on their way in one all-to-all: for each peer, what is sent and received, and where it lies in the buffers."""

    sends: torch.Tensor
    receives: torch.Tensor
    inbox: list[tuple[_Letter, slice]]
    work: Any = None


@dataclass
class Execution:
    """One run of a plan.

    Args:
        slices: of this rank, in the plan's order.
        rounds: ranges of slices.
        source: flat local tensors by name. Tensors that this rank does not hold are missing.
        target: flat local tensors by name, or by the names of an engine.
        group: carries the rounds.
        device: of the buffers.
        passes_on: whether a round has a second all-to-all, in which receivers pass atoms on.
        travels: whether an atom of a slice is sent in this run.
        active: whether a round has anything to send on any rank.
    """

    slices: Sequence[Slice]
    rounds: Sequence[range]
    source: Mapping[str, torch.Tensor]
    target: Mapping[str, torch.Tensor]
    group: dist.ProcessGroup
    device: torch.device
    watch: Watch
    passes_on: bool
    travels: Callable[[int, Atom], bool] | None = None
    active: Sequence[bool] | None = None
    on_their_way: tuple[str, ...] = ()
    sent_bytes: int = 0
    peak_bytes: int = 0
    _held: int = 0
    _peers: list[int] = field(default_factory=list)
    _rank: int = -1

    def run(self) -> None:
        """Move all elements.

        Raises:
            Lost: another rank failed.
        """
        self._peers, self._rank = dist.get_process_group_ranks(self.group), dist.get_rank()
        before: tuple[range, _Mail] | None = None
        for number, round_ in enumerate(self.rounds):
            if self.active is None or self.active[number]:
                mail = self._send(round_)
                if before is not None:
                    self._receive(*before)
                before = (round_, mail)
            for i in round_:
                for copy in self.slices[i].copies:
                    self._copy(self.slices[i], copy)
        if before is not None:
            self._receive(*before)
        if self.device.type != "cpu":
            torch.accelerator.current_stream().synchronize()

    def _send(self, round_: range) -> _Mail:
        """Pack the atoms that this rank sends in a round, and issue the all-to-all."""
        letters = list(self._letters(round_))
        outbox = [(letter, letter[1].receivers[0]) for letter in letters if letter[1].sender == self._rank]
        inbox = [(letter, letter[1].sender) for letter in letters if letter[1].receivers[0] == self._rank]

        def pack(letter: _Letter, piece: torch.Tensor) -> None:
            slice_, atom = letter
            flat = self.source[atom.source_key or slice_.name]
            for part, place in zip(atom.source, piece.split([part.numel for part in atom.source])):
                place.view(part.sizes).copy_(part_view(flat, part))

        self.on_their_way = tuple(dict.fromkeys(self.slices[i].name for i in round_))
        return self._post(self.slices[round_[0]].dtype.itemsize, outbox, inbox, pack)

    def _receive(self, round_: range, mail: _Mail) -> None:
        """Wait for a round, pass on what is for other receivers too, and unpack."""
        self.on_their_way = tuple(dict.fromkeys(self.slices[i].name for i in round_))
        self._wait(mail)
        passed: _Mail | None = None
        if self.passes_on:
            own = {_key(letter): where for letter, where in mail.inbox}
            outbox = [(letter, peer) for letter, _ in mail.inbox for peer in letter[1].receivers[1:]]
            inbox = [(each, each[1].receivers[0]) for each in self._letters(round_) if self._rank in each[1].receivers[1:]]

            def pass_on(letter: _Letter, piece: torch.Tensor) -> None:
                piece.copy_(mail.receives[own[_key(letter)]].view(piece.dtype))

            passed = self._post(self.slices[round_[0]].dtype.itemsize, outbox, inbox, pass_on)
        self._unpack(mail)
        if passed is not None:
            self._wait(passed)
            self._unpack(passed)

    def _letters(self, round_: range) -> Iterator[_Letter]:
        for i in round_:
            slice_ = self.slices[i]
            for atom in slice_.atoms:
                if self.travels is None or self.travels(i, atom):
                    yield slice_, atom

    def _post(
        self,
        itemsize: int,
        outbox: list[tuple[_Letter, int]],
        inbox: list[tuple[_Letter, int]],
        pack: Callable[[_Letter, torch.Tensor], None],
    ) -> _Mail:
        """Pack what goes to each peer, and issue an all-to-all."""
        send_splits, sent = self._sorted(outbox)
        receive_splits, received = self._sorted(inbox)
        sends, receives = (self._allocate(sum(splits), itemsize) for splits in (send_splits, receive_splits))
        for letter, where in sent:
            pack(letter, sends[where].view(letter[0].dtype))
        self.sent_bytes += sends.nbytes
        mail = _Mail(sends, receives, received)
        splits = [[numel * itemsize for numel in each] for each in (receive_splits, send_splits)]
        try:
            mail.work = dist.all_to_all_single(
                receives.view(torch.uint8), sends.view(torch.uint8), splits[0], splits[1], group=self.group, async_op=True
            )
        except RuntimeError as error:
            raise Lost(str(error)) from error
        return mail

    def _sorted(self, letters: Iterable[tuple[_Letter, int]]) -> tuple[list[int], list[tuple[_Letter, slice]]]:
        """The elements for each peer of the group, and the letters in the order of peers, each with its interval."""
        by_peer: dict[int, list[_Letter]] = {}
        for letter, peer in letters:
            by_peer.setdefault(peer, []).append(letter)
        splits, placed, start = [], [], 0
        for peer in self._peers:
            before = start
            for letter in by_peer.get(peer, ()):
                placed.append((letter, slice(start, start + letter[1].numel)))
                start += letter[1].numel
            splits.append(start - before)
        return splits, placed

    def _allocate(self, numel: int, itemsize: int) -> torch.Tensor:
        buffer = torch.empty(numel, dtype=_CARRIERS[itemsize], device=self.device)
        self._held += buffer.nbytes
        self.peak_bytes = max(self.peak_bytes, self._held)
        return buffer

    def _wait(self, mail: _Mail) -> None:
        self.watch.wait(mail.work)
        self._held -= mail.sends.nbytes
        mail.sends = mail.sends.new_empty(0)

    def _unpack(self, mail: _Mail) -> None:
        for (slice_, atom), where in mail.inbox:
            copy_into(self.target[atom.target_key or slice_.name], mail.receives[where].view(slice_.dtype), atom.target)
        self._held -= mail.receives.nbytes
        mail.receives = mail.receives.new_empty(0)

    def _copy(self, slice_: Slice, copy: Copy) -> None:
        flats = (self.source[copy.source_key or slice_.name], self.target[copy.target_key or slice_.name])
        for box in copy.boxes:
            source, target = (
                flat.as_strided(box.sizes, strides, flat.storage_offset() + offset)
                for flat, offset, strides in zip(flats, box.offsets, box.strides)
            )
            target.copy_(source)


def _key(letter: _Letter) -> tuple[int, int]:
    """Tells letters apart: slices of tensors that lie alike share their atoms."""
    return id(letter[0]), id(letter[1])
