"""Comparison: ranks note what must be equal on them, such as the inputs of a model, and compare it from time to time.

It must not know what the values are for: the caller names them, and says what to do if they differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from torch_ragged._ranks.agreement import gather_numbers, reduce_min
from torch_ragged._ranks.groups import device_of_messages

__all__ = ["Comparison", "compare_before_checkpoint", "digest_of", "first_difference", "mixed"]

_FIRST_CALLS = 8
"""The first calls are all compared: most differences are there from the start."""
_WORDS = 2**18
"""A digest is computed of so many words at once: its temporary memory is 2 MiB for a tensor of any size."""
_known_weights: dict[torch.device, torch.Tensor] = {}


class _Noted(NamedTuple):
    """One value of one call.

    Attributes:
        text: must be equal on all ranks.
        dims: bit ``i`` is set if ``digest`` may differ along mesh dimension ``i``.
        digest: of the bytes of the value; 0: the text says all.
        advice: what to do if it differs.
    """

    call: int
    name: str
    text: str
    dims: int
    digest: Any
    advice: str


class Comparison:
    """Values that ranks note call by call, and compare in the first 8 calls, then in every ``every``-th one.

    All calls since the last comparison are compared: a difference is found within ``every`` calls, also if it was in one call
    only. A comparison is one all-gather of a few integers over all ranks of the mesh, for which the host waits. If values
    differ, ranks gather them as objects, and every rank raises the same error.

    Args:
        what: for errors, such as "the calls of Llama".
        group: returns the process group of all ranks of the mesh.
        coordinates: the coordinate of each rank in the mesh, by global rank.
        dim_names: the names of the mesh dimensions.
        device_type: of the mesh: its default generator is compared, too.
        every: see above.
    """

    def __init__(
        self,
        what: str,
        group: Callable[[], dist.ProcessGroup],
        coordinates: Mapping[int, tuple[int, ...]],
        dim_names: Sequence[str],
        device_type: str,
        every: int,
    ) -> None:
        self._what, self._group, self._coordinates, self._dim_names = what, group, coordinates, dim_names
        self._device_type, self._every, self._calls = device_type, every, 0
        self._noted: list[_Noted] = []

    def begin_call(self) -> bool:
        """What is noted from now on belongs to the next call. Returns whether that call is one that is compared.

        This depends on the number of calls only, so ranks that call equally often compare at the same calls.
        """
        self._calls += 1
        return self._calls <= _FIRST_CALLS or self._calls % self._every == 0

    def note(self, name: str, text: str, advice: str, value: torch.Tensor | None = None, dims: int = 0) -> None:
        """Note that ``name`` is ``text``, and the bytes of ``value``, which may differ along the mesh dimensions ``dims``."""
        self._noted.append(_Noted(self._calls, name, text, dims, 0 if value is None else digest_of(value), advice))

    def note_generator(self, when: str = "") -> None:
        """Note the state of the default generator."""
        is_cpu = self._device_type == "cpu"
        state = torch.get_rng_state() if is_cpu else torch.get_device_module(self._device_type).get_rng_state()
        self.note(
            f"the default generator of {self._device_type!r}{when}",
            f"in state {hashlib.blake2b(state.numpy().tobytes(), digest_size=6).hexdigest()}",
            "Call torch.manual_seed with one seed on all ranks, and draw equally on all of them. Give a torch.Generator of its "
            "own to what draws on one rank alone, and to a loader that draws each rank's own rows",
        )

    def compare(self) -> None:
        """Compare what was noted since the last comparison.

        Raises:
            ValueError: something differs; on every rank, with the same text.
            PeerError: a rank died, or did not take part.
        """
        noted, self._noted = self._noted, []
        group, sets = self._group(), range(2 ** len(self._dim_names))
        if dist.get_backend(group) == "fake":  # Its collectives move nothing.
            return
        claim = "\n".join([f"{each.call} {each.name} {each.dims} {each.text}" for each in noted])
        text = int.from_bytes(hashlib.blake2b(claim.encode(), digest_size=7).digest(), "big")
        # One number for each set of mesh dimensions: the message has one length on all ranks, also if they note other values.
        numbers = [torch.tensor([self._calls, text], dtype=torch.int64, device=device_of_messages(group))]
        for dims in sets:
            alike = [each.digest for each in noted if torch.is_tensor(each.digest) and each.dims == dims]
            digests = [digest.to(numbers[0].device) for digest in alike]
            numbers.append(digest_of(torch.stack(digests))[None] if digests else numbers[0].new_zeros(1))
        ranks = dist.get_process_group_ranks(group)
        table = dict(zip(ranks, gather_numbers(torch.cat(numbers), group, f"the comparison of {self._what}")))
        # All ranks have this table: either all return here, or all take part in the all-gather below.
        columns = [(0, 0), (1, 0), *((2 + dims, dims) for dims in sets)]
        if not any(self._two_ranks({rank: row[i] for rank, row in table.items()}, dims) for i, dims in columns):
            return
        received: list[list[_Noted]] = [[]] * len(ranks)
        dist.all_gather_object(received, [each._replace(digest=int(each.digest)) for each in noted], group=group)
        pair = self._two_ranks({rank: row[0] for rank, row in table.items()}, 0)
        if pair is not None:
            told = " and ".join([f"rank {rank} made call {table[rank][0]}" for rank in pair])
            raise ValueError(f"{self._what} were compared, and {told}: call the model equally often on all ranks")
        raise ValueError(self._difference(dict(zip(ranks, received))))

    def _two_ranks(self, values: Mapping[int, Any], dims: int) -> tuple[int, int] | None:
        """Two ranks with other values that are in one place of the mesh dimensions ``dims``; None: there are none."""
        listed = list(values.values())
        if listed.count(listed[0]) == len(listed):  # The usual case, also of thousands of ranks.
            return None
        lowest: dict[tuple[int, ...], int] = {}
        for rank in sorted(values):
            place = tuple([at for dim, at in enumerate(self._coordinates[rank]) if dims >> dim & 1])
            other = lowest.setdefault(place, rank)
            if values[rank] != values[other]:
                return other, rank
        return None

    def _difference(self, noted: Mapping[int, Sequence[_Noted]]) -> str:
        """What differs in the first call in which something does."""
        of_rank = {rank: {(each.call, each.name): each for each in entries} for rank, entries in noted.items()}
        keys = dict.fromkeys(key for entries in of_rank.values() for key in entries)
        found: list[str] = []
        advice: list[str] = []
        first = None
        for call, name in sorted(keys, key=lambda key: key[0]):
            if first not in (None, call):
                break
            entries = {rank: each.get((call, name)) for rank, each in of_rank.items()}
            texts = {rank: "not given" if each is None else each.text for rank, each in entries.items()}
            given = [each for each in entries.values() if each is not None]
            pair = self._two_ranks(texts, 0)
            if pair is not None:
                told = f"{name} is {texts[pair[0]]} on rank {pair[0]} and {texts[pair[1]]} on rank {pair[1]}"
            else:
                pair = self._two_ranks({rank: each and each.digest for rank, each in entries.items()}, given[0].dims)
                if pair is None:
                    continue
                told = f"{name} has other values on rank {pair[1]} than on rank {pair[0]}"
            places = zip(self._dim_names, self._coordinates[pair[0]], self._coordinates[pair[1]])
            along = " and ".join([repr(dim) for dim, one, other in places if one != other])
            found.append(f"{told}, along mesh dimension {along}")
            advice.append(given[0].advice)
            first = call
        return f"{self._what} differ between ranks in call {first}: {'; '.join(found)}. {advice[0]}"


def compare_before_checkpoint(model: nn.Module) -> None:
    """Compare what the comparisons among the hooks of ``model`` have noted, and the generators, before a checkpoint is written.

    Raises:
        ValueError: as :meth:`Comparison.compare`.
    """
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, Comparison):
                hook.note_generator(", before a checkpoint,")
                hook.compare()


def first_difference(
    tensors: Sequence[torch.Tensor],
    replicas: dist.ProcessGroup,
    others: Sequence[dist.ProcessGroup],
    device: torch.device,
    call: str,
) -> int | None:
    """The index of the first tensor that differs between the ranks of ``replicas``; None: all are equal. Equal on all ranks.

    Collectives: an all-reduce of 16 bytes over ``replicas``, and one of 8 bytes over each group of ``others``. The host waits
    for them. If there is a difference, one all-gather of 8 bytes per tensor over ``replicas``.

    Args:
        tensors: as many on all ranks. Those of ranks that are not together in ``replicas`` are not compared.
        others: the process groups that connect these ranks with the other ones.
        device: of the messages.
        call: for errors.

    Raises:
        PeerError: a rank died, or did not take part.
    """
    digests = torch.stack([digest_of(each).to(device) for each in tensors])
    digest = digest_of(digests)
    lowest = torch.stack([digest, -digest])
    reduce_min(lowest, replicas, call)
    first = torch.full((1,), len(tensors), dtype=torch.int64, device=device)
    # All ranks of ``replicas`` have the same two numbers. The other ranks learn the index by the minimum.
    if int(lowest[0]) != -int(lowest[1]):
        rows = gather_numbers(digests, replicas, call)
        first.fill_(next(index for index, column in enumerate(zip(*rows)) if len({*column}) > 1))
    for group in others:
        reduce_min(first, group, call)
    return None if int(first) == len(tensors) else int(first)


def digest_of(value: torch.Tensor) -> torch.Tensor:
    """A number (0-D, int64) that depends on every byte of ``value`` and on its position. Nothing waits for the device.

    Of 32-bit words ``w`` it is the sum of ``w[i] * weight[i]`` modulo 2^64, with fixed 64-bit weights that look random: two
    different tensors have equal digests with a probability of 2^-33 at most. It takes two passes over the tensor.
    """
    value = value.detach()
    if value.is_conj() or value.is_neg():
        value = value.resolve_conj().resolve_neg()
    flat = value.contiguous().flatten().view(torch.uint8)
    if flat.numel() % 4:
        flat = F.pad(flat, (0, -flat.numel() % 4))
    elif flat.storage_offset() % 4:
        flat = flat.clone()
    words = flat.view(torch.int32)
    while True:
        parts = [words] if words.numel() <= _WORDS else words.split(_WORDS)
        sums = [(part * _weights_of(part)).sum() for part in parts]
        if len(sums) == 1:
            return sums[0]
        words = torch.stack(sums).view(torch.int32)


def _weights_of(words: torch.Tensor) -> torch.Tensor:
    """One weight per word. They are a function of the position only, so equal on all ranks."""
    count, known = words.numel(), _known_weights.get(words.device)
    if known is None or len(known) < count:
        position = torch.arange(1, max(count, 1024) + 1, dtype=torch.int64, device=words.device)
        known = _known_weights[words.device] = mixed(position)
    return known[:count]


def mixed(position: torch.Tensor) -> torch.Tensor:
    """Numbers (int64) that look random, other ones for other positions."""
    for factor in (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15):  # Those of SplitMix64.
        position = position * factor
        position = position ^ (position >> 29)
    return position
