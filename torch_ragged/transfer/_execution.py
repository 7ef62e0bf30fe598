"""Execution: one run of a plan on this rank: pack, send and receive, unpack, round by round.

::

    round 0    pack  send, receive -------------  pass on  unpack
    round 1              pack  send, receive ----------------------  pass on  unpack

Two rounds are in flight, so each may use half of the staging memory. Large contiguous parts are not packed: they travel
straight from one local tensor into another. All other atoms between two ranks are one message per round. A source that cannot
be read in place is staged: each round begins with copies of its windows. The source is never written.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Union

import torch
import torch.distributed as dist

from torch_ragged.tensor._carry import copy_into, pack, part_view
from torch_ragged.tensor._exchange import Part
from torch_ragged.transfer._atoms import Atom, Copy
from torch_ragged.transfer._changes import checksum
from torch_ragged.transfer._elements import CARRIERS, Baseline, apply_delta, delta_of
from torch_ragged.transfer._rounds import Slice
from torch_ragged.transfer._staging import Staged
from torch_ragged.transfer._watch import Lost, Watch

__all__ = ["Execution"]

_NO_ELEMENTS, _ALL_ELEMENTS = 0, -1
"""What a sender answers for an atom, or else the bytes of its element delta."""


class _Letter(NamedTuple):
    """An atom on its way to or from a peer."""

    slice_: Slice
    atom: Atom
    peer: int


_Letters = list[tuple[Slice, Atom]]
_Place = tuple[int, Union[str, None]]


class _Packed(NamedTuple):
    """Letters that are packed into one buffer, peer by peer, each with its interval, which counts elements.

    Elements of a round have one size (``rounds_of``), so one buffer serves tensors of several dtypes.
    """

    buffer: torch.Tensor
    places: list[tuple[_Letter, slice]]


@dataclass
class _Mail:
    """What is in flight between this rank and its peers in one round.

    Attributes:
        atoms: those of this rank that travel in this round.
        staged: the windows of the source that this round reads, by slice and key of the local tensor.
    """

    atoms: _Letters
    staged: list[_Place]
    sent: _Packed
    received: _Packed
    works: list[dist.Work]


@dataclass
class Execution:
    """One run of a plan.

    Args:
        slices: of this rank, in the plan's order.
        rounds: ranges of slices.
        source: flat local tensors by name, or those to be staged. Tensors that this rank does not hold are missing.
        target: flat local tensors by name, or by the names of an engine.
        group: carries the rounds.
        device: of the buffers.
        only_changed: whether an atom travels only if a receiver has other elements than its sender.
        baseline: what was sent before, for element deltas; None: atoms travel whole.
        sends_all: whether this rank sends all atoms in any case.
        on_their_way: the tensors of the round that is waited for.
        sent_bytes, peak_bytes: what this rank has sent, and the most bytes of its buffers.
    """

    slices: Sequence[Slice]
    rounds: Sequence[range]
    source: Mapping[str, torch.Tensor | Staged]
    target: Mapping[str, torch.Tensor]
    group: dist.ProcessGroup
    device: torch.device
    watch: Watch
    only_changed: bool = False
    baseline: Baseline | None = None
    sends_all: bool = False
    on_their_way: tuple[str, ...] = ()
    sent_bytes: int = 0
    peak_bytes: int = 0
    _held: int = 0
    _windows: dict[_Place, tuple[torch.Tensor, int]] = field(default_factory=dict)  # With the first element's offset.
    # By the key of an atom: the bytes of each element delta of the run, and the deltas of the round that is packed.
    _delta_bytes: dict[tuple[int, int], int] = field(default_factory=dict)
    _deltas: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    _rank: int = field(default_factory=dist.get_rank)

    def run(self) -> None:
        """Move all elements.

        Raises:
            Lost: another rank failed.
        """
        before: tuple[range, _Mail] | None = None
        for round_ in self.rounds:
            # Before the wait for the round before it, so that the network has work while this rank unpacks. All ranks have the
            # same rounds: plan() has agreed on them.
            mail = self._send(round_)
            if before is not None:
                self._receive(*before)
            before = (round_, mail)
            # What stays on this rank is copied while messages are in flight. It must be before the wait for this round: that
            # frees the staged windows, from which a copy may read.
            for i in round_:
                for copy in self.slices[i].copies:
                    self._copy(self.slices[i], copy)
        if before is not None:
            self._receive(*before)
        if (
            self.device.type != "cpu"
        ):  # Over NCCL, the collective behind a run waits for the stream, too; over gloo, nothing does.
            torch.accelerator.current_stream().synchronize()

    def _send(self, round_: range) -> _Mail:
        """Stage and pack what this rank sends in a round, and issue its messages."""
        self.on_their_way = tuple(dict.fromkeys(self.slices[i].name for i in round_))
        # A window of a Partial is reduced here, by an all-reduce. All ranks of its group take part: they hold the same piece,
        # so they have the same windows in the same order. Also with ``only_changed``, whose checksums read the windows.
        staged = [place for i in round_ for place in self._stage(self.slices[i])]
        atoms = [(self.slices[i], atom) for i in round_ for atom in self.slices[i].atoms]
        if self.only_changed:
            atoms = self._changed(atoms)
        # To the first receiver only: it passes the elements on when it has received the round.
        outbox = [_Letter(each, atom, atom.receivers[0]) for each, atom in atoms if atom.sender == self._rank]
        inbox = [_Letter(each, atom, atom.sender) for each, atom in atoms if atom.receivers[0] == self._rank]

        def pack_letter(letter: _Letter, place: torch.Tensor) -> None:
            delta = self._deltas.get(_key(letter[:2]))
            if delta is None:
                pack(place, *self._source_of(letter.slice_, letter.atom))
            else:
                place.view(torch.uint8)[: len(delta)] = delta

        def straight(letter: _Letter) -> torch.Tensor:
            flat, parts = self._source_of(letter.slice_, letter.atom)
            return part_view(flat, parts[0])

        mail = self._post(atoms, outbox, inbox, pack_letter, straight)
        mail.staged = staged
        for delta in {id(delta): delta for delta in self._deltas.values()}.values():  # They are packed.
            self._release(delta)
        self._deltas.clear()
        return mail

    def _receive(self, round_: range, mail: _Mail) -> None:
        """Wait for a round, pass on what is for other receivers too, and unpack."""
        self.on_their_way = tuple(dict.fromkeys(self.slices[i].name for i in round_))
        self._wait(mail)
        own = {_key(letter[:2]): where for letter, where in mail.received.places}
        atoms = [(each, atom) for each, atom in mail.atoms if len(atom.receivers) > 1]
        outbox = [
            _Letter(each, atom, peer) for each, atom in atoms if atom.receivers[0] == self._rank for peer in atom.receivers[1:]
        ]
        inbox = [_Letter(each, atom, atom.receivers[0]) for each, atom in atoms if self._rank in atom.receivers[1:]]

        def pass_on(letter: _Letter, place: torch.Tensor) -> None:
            place.copy_(mail.received.buffer[own[_key(letter[:2])]].view(place.dtype))

        # An atom that goes straight has no buffer: its elements lie in this rank's target now.
        def straight(letter: _Letter) -> torch.Tensor:
            return part_view(self._target_of(letter), letter.atom.target[0])

        # First the messages, then the unpacking: the other receivers wait for them.
        passed = self._post(atoms, outbox, inbox, pass_on, straight)
        self._unpack(mail)
        self._wait(passed)
        self._unpack(passed)

    def _changed(self, atoms: _Letters) -> _Letters:
        """The atoms of which a receiver has other elements than the sender, equal on all their ranks: the sender decides.

        Each receiver sends its checksum to the sender, which answers with one number.
        """
        ranks = dist.get_process_group_ranks(self.group)
        sent: dict[int, _Letters] = {rank: [] for rank in ranks}
        received: dict[int, _Letters] = {rank: [] for rank in ranks}
        for each, atom in atoms:
            for receiver in atom.receivers if atom.sender == self._rank else ():
                sent[receiver].append((each, atom))
            if self._rank in atom.receivers:
                received[atom.sender].append((each, atom))
        outbox, inbox = ([letter for letters in box.values() for letter in letters] for box in (sent, received))
        splits = [[len(letters) for letters in box.values()] for box in (sent, received)]
        known: dict[Hashable, torch.Tensor] = {}
        for each, atom in outbox:  # Receivers of equal elements have atoms of their own.
            if (key := _source_key(each, atom)) not in known:
                known[key] = checksum(*self._source_of(each, atom), each.target_dtype)
        # All ranks of the group issue both all-to-alls, also those without atoms in this round.
        ours = self._rows([known[_source_key(*letter)] for letter in outbox])
        theirs, held = (
            torch.empty_like(ours),
            self._rows(
                [checksum(self.target[atom.target_key or each.name], atom.target, each.target_dtype) for each, atom in inbox]
            ),
        )
        self._all_to_all(theirs, held, splits[0], splits[1])
        # The host reads these answers, because they decide which messages are issued. If one receiver of an atom lacks it, the
        # atom travels to all of them: the first receiver passes on what it gets.
        found: dict[tuple[int, int], int] = {}
        for letter, lacks in zip(outbox, (ours != theirs).any(1).tolist()):
            found[_key(letter)] = _ALL_ELEMENTS if lacks or self.sends_all else found.get(_key(letter), _NO_ELEMENTS)
        if self.baseline is not None:
            self._make_deltas(outbox, ours, theirs, found, self.baseline)
        answers = torch.tensor([found[_key(letter)] for letter in outbox], dtype=torch.int64, device=self.device)
        told = answers.new_empty(len(inbox))
        self._all_to_all(told, answers, splits[1], splits[0])
        found.update((_key(letter), answer) for letter, answer in zip(inbox, told.tolist()))
        self._delta_bytes.update((key, answer) for key, answer in found.items() if answer not in (_NO_ELEMENTS, _ALL_ELEMENTS))
        return [letter for letter in atoms if found[_key(letter)] != _NO_ELEMENTS]

    def _make_deltas(
        self,
        outbox: _Letters,
        ours: torch.Tensor,
        theirs: torch.Tensor,
        found: dict[tuple[int, int], int],
        baseline: Baseline,
    ) -> None:
        """Answer with the bytes of a delta where all receivers of an atom hold the baseline, and make it the new baseline."""
        sent = {_source_key(*letter): letter for letter in outbox}
        old = {key: self._baseline_of(*letter, baseline) for key, letter in sent.items()}
        known = {key: checksum(old[key], atom.source, each.target_dtype) for key, (each, atom) in sent.items()}
        before = self._rows([known[_source_key(*letter)] for letter in outbox])
        # A delta has values, not differences: a receiver that holds the source's elements already keeps them.
        fits = ((before == theirs).all(1) | (ours == theirs).all(1)).tolist()
        strangers = {_key(letter) for letter, yes in zip(outbox, fits) if not yes}
        deltas: dict[Hashable, torch.Tensor | None] = {}
        for letter in outbox if not self.sends_all else ():
            if found[_key(letter)] == _NO_ELEMENTS or _key(letter) in strangers:
                continue
            if (key := _source_key(*letter)) not in deltas:
                deltas[key] = delta_of(*self._source_of(*letter), old[key], letter[1].source)
            if (delta := deltas[key]) is not None:
                self._deltas[_key(letter)], found[_key(letter)] = delta, len(delta)
        for made in deltas.values():
            if made is not None:
                self._hold(made)
        # Behind all deltas of the round: atoms to different receivers may have elements in common. If the run fails now, some
        # receivers do not hold this, and the next run finds out.
        for key, letter in sent.items():
            flat, parts = self._source_of(*letter)
            for part, old_part in zip(parts, letter[1].source):
                part_view(old[key], old_part).copy_(part_view(flat, part))

    def _baseline_of(self, slice_: Slice, atom: Atom, baseline: Baseline) -> torch.Tensor:
        """What was sent of the local tensor of an atom. Offsets in it are those in the local tensor, also if it is staged."""
        name = atom.source_key or slice_.name
        given = self.source[name]
        return baseline.of(name, slice_.dtype, given.local if isinstance(given, Staged) else given)

    def _rows(self, sums: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(sums) if sums else torch.empty((0, 2), dtype=torch.int64, device=self.device)

    def _all_to_all(self, received: torch.Tensor, sent: torch.Tensor, receives: list[int], sends: list[int]) -> None:
        # Issued asynchronously, because a synchronous call waits in the backend. There, this rank could not look whether others
        # have failed.
        self.watch.wait([dist.all_to_all_single(received, sent, receives, sends, group=self.group, async_op=True)])

    def _post(
        self,
        atoms: _Letters,
        outbox: list[_Letter],
        inbox: list[_Letter],
        pack: Callable[[_Letter, torch.Tensor], None],
        straight: Callable[[_Letter], torch.Tensor],
    ) -> _Mail:
        """Pack the small letters, and issue all messages. Both ends of a pair have its letters in the same order."""
        sent, received = self._packed(outbox), self._packed(inbox)
        for letter, where in sent.places:
            pack(letter, sent.buffer[where].view(letter.slice_.dtype))
        messages: list[dist.P2POp] = []

        # As bytes: backends do not know all dtypes.
        def add(operation: Callable[..., Any], tensor: torch.Tensor, peer: int) -> None:
            messages.append(dist.P2POp(operation, tensor.view(torch.uint8), peer, self.group))

        # Messages of a pair of ranks match by their order. Both ends have the packed ones first, and then the straight ones in
        # the order of atoms.
        for peer, buffer in _by_peer(sent):
            add(dist.isend, buffer, peer)
        for peer, buffer in _by_peer(received):
            add(dist.irecv, buffer, peer)
        for letter in filter(self._goes_straight, outbox):
            add(dist.isend, straight(letter), letter.peer)
        for letter in filter(self._goes_straight, inbox):
            add(dist.irecv, part_view(self._target_of(letter), letter.atom.target[0]), letter.peer)
        self.sent_bytes += sum(each.tensor.nbytes for each in messages if each.op is dist.isend)
        try:
            # In one batch: NCCL runs it as one group. One after another, the sends of two ranks to each other could wait for
            # each other. A rank with nothing to send or receive issues nothing, as messages need their two ends only.
            works = dist.batch_isend_irecv(messages) if messages else []
        except RuntimeError as error:
            # A connection that a peer has closed can raise here. Then that peer has failed, and this rank reports no cause of
            # its own.
            raise Lost(str(error)) from error
        return _Mail(atoms, [], sent, received, works)

    def _packed(self, letters: list[_Letter]) -> _Packed:
        """A buffer for the letters that are packed, and where each lies in it: peer by peer, each in the letters' order."""
        # The sort is stable: both ends of a pair pack its letters in the plan's order.
        small = sorted(itertools.filterfalse(self._goes_straight, letters), key=lambda letter: letter.peer)
        places, start = [], 0
        itemsize = small[0].slice_.dtype.itemsize if small else 1
        for letter in small:
            delta_bytes = self._delta_bytes.get(_key(letter[:2]))
            numel = letter.atom.numel if delta_bytes is None else -(-delta_bytes // itemsize)
            places.append((letter, slice(start, start + numel)))
            start += numel
        buffer = torch.empty(start, dtype=CARRIERS[itemsize], device=self.device)
        self._hold(buffer)
        return _Packed(buffer, places)

    def _goes_straight(self, letter: _Letter) -> bool:
        return _key(letter[:2]) not in self._delta_bytes and letter.slice_.goes_straight(letter.atom)

    def _hold(self, buffer: torch.Tensor) -> None:
        self._held += buffer.nbytes
        self.peak_bytes = max(self.peak_bytes, self._held)

    def _release(self, buffer: torch.Tensor) -> None:
        # Its storage, not only the reference: a thread of gloo may hold the tensor for a moment after the wait, and the next
        # round would be beside it.
        self._held -= buffer.nbytes
        buffer.untyped_storage().resize_(0)

    def _wait(self, mail: _Mail) -> None:
        self.watch.wait(mail.works)
        mail.works = []
        self._release(mail.sent.buffer)
        for place in mail.staged:  # This round's copies are made by now.
            self._release(self._windows.pop(place)[0])
        mail.staged = []

    def _unpack(self, mail: _Mail) -> None:
        for letter, where in mail.received.places:
            piece = mail.received.buffer[where].view(letter.slice_.dtype)
            # An accelerator may run this copy after the buffer is freed below. Its allocator gives the memory only to later
            # work of the same stream.
            delta_bytes = self._delta_bytes.get(_key(letter[:2]))
            if delta_bytes is None:
                copy_into(self._target_of(letter), piece, letter.atom.target)
            else:
                delta = piece.view(torch.uint8)[:delta_bytes]
                apply_delta(delta, self._target_of(letter), letter.atom.target, letter.slice_.dtype)
        self._release(mail.received.buffer)
        mail.received = _Packed(mail.received.buffer, [])

    def _copy(self, slice_: Slice, copy: Copy) -> None:
        flat, first = self._readable(slice_, copy.source_key)
        flats, firsts = (flat, self.target[copy.target_key or slice_.name]), (first, 0)
        # Offsets of a plan count from the beginning of the local tensor, and a window begins at its element ``first``.
        for box in copy.boxes:
            source, target = (
                flat.as_strided(box.sizes, strides, flat.storage_offset() + offset - first)
                for flat, first, offset, strides in zip(flats, firsts, box.offsets, box.strides)
            )
            target.copy_(source)

    def _stage(self, slice_: Slice) -> Iterator[_Place]:
        """Copy the windows of a slice that cannot be read in place."""
        for key, start, stop in slice_.stretches:
            staged = self.source[key or slice_.name]
            if isinstance(staged, Staged):
                window = staged.window(start, stop, self.watch.wait)
                self._hold(window)
                self._windows[id(slice_), key] = (window, start)
                yield id(slice_), key

    def _readable(self, slice_: Slice, key: str | None) -> tuple[torch.Tensor, int]:
        """A flat tensor with the elements that a slice needs of a local tensor, and the offset of its first element there."""
        # By the identity of the slice: windows of one tensor have the same name and key.
        window = self._windows.get((id(slice_), key))
        if window is not None:
            return window
        flat = self.source[key or slice_.name]
        assert isinstance(flat, torch.Tensor)
        return flat, 0

    def _source_of(self, slice_: Slice, atom: Atom) -> tuple[torch.Tensor, Sequence[Part]]:
        """Where the elements of an atom lie: a flat tensor, and its parts."""
        flat, first = self._readable(slice_, atom.source_key)
        return flat, [part._replace(offset=part.offset - first) for part in atom.source] if first else atom.source

    def _target_of(self, letter: _Letter) -> torch.Tensor:
        return self.target[letter.atom.target_key or letter.slice_.name]


def _by_peer(packed: _Packed) -> Iterator[tuple[int, torch.Tensor]]:
    """The message to or from each peer: an interval of the buffer."""
    for peer, places in itertools.groupby(packed.places, key=lambda place: place[0].peer):
        where = [each for _, each in places]
        yield peer, packed.buffer[where[0].start : where[-1].stop]


def _source_key(slice_: Slice, atom: Atom) -> Hashable:
    """Equal for atoms of equal elements, which go to receivers that hold them at other offsets, or need their own message."""
    return slice_.name, atom.source_key, atom.source


def _key(letter: tuple[Slice, Atom]) -> tuple[int, int]:
    """Tells letters apart: slices of tensors that lie alike share their atoms."""
    return id(letter[0]), id(letter[1])
