"""Tiers: where the states of chunks lie between steps. Nothing here knows what a state is, or steps anything."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence

import torch

from torch_ragged.fsdp.offload._pieces import StepChunk

__all__ = ["WINDOW_NUMEL", "TierMemory", "Tier", "TierEvent", "WindowTier", "host_slabs", "tier_of", "window_numel"]

WINDOW_NUMEL = 1 << 23  # The most elements of a chunk for a device: enough for a bus's full bandwidth, small beside a model.
TierMemory = dict[str, torch.Tensor]  # By the name of a state, the 1-D tensor that has it for all pieces of a chunk.

# What happened in a tier, for a monitor: ``tier_read`` or ``tier_write``, states that moved, or ``tier_exposed``, a step that
# waited for them; the bytes; begin and end by ``time.perf_counter()``, equal for copies that the host does not wait for.
TierEvent = tuple[str, int, float, float]


class Tier:
    """Where chunks have their states. Here: in memory that the step itself reads and writes, the slabs.

    States of a chunk without a slab lie where the optimizer makes them.
    """

    is_transient = False  # Whether what :meth:`look` returns is valid until the next call only.
    has_lost = False  # Whether states could not be written.
    window_nbytes = 0  # Of host memory through which files are read and written.
    log: list[TierEvent] | None = None  # Gets an event for what moves, if it is a list. Threads append to it.

    def __init__(self, slabs: Mapping[StepChunk, TierMemory]) -> None:
        self._slabs = slabs

    def fetch_ahead(self, chunk: StepChunk) -> None:
        """``chunk`` is stepped next: begin to bring its states."""

    def fetch(self, chunk: StepChunk) -> TierMemory:
        """The states of ``chunk``, to step with: valid until the next fetch."""
        return self._slabs.get(chunk, {})

    def store(self, chunk: StepChunk) -> None:
        """The states of ``chunk`` have changed, after :meth:`fetch` or :meth:`look`."""

    def look(self, chunk: StepChunk) -> TierMemory:
        """Between steps: the states of ``chunk``, to read or to write. :meth:`store` follows if they were written."""
        return self._slabs.get(chunk, {})

    def reset(self) -> None:
        """A step has failed, and all states are set next."""

    def _note(self, kind: str, nbytes: int, begin: float, end: float | None = None) -> None:
        log = self.log  # One look: another thread may end the watching.
        if log is not None:
            log.append((kind, nbytes, begin, time.perf_counter() if end is None else end))


def host_slabs(chunks: Sequence[StepChunk], is_pinned: bool) -> dict[StepChunk, TierMemory]:
    """One slab of host memory for each state of one group of ``fully_shard``, with the parts of its chunks."""
    parts: dict[StepChunk, TierMemory] = {chunk: {} for chunk in chunks}
    for name in dict.fromkeys(name for chunk in chunks for name in chunk.sizes):
        holders = [chunk for chunk in chunks if name in chunk.sizes]
        numels, dtype = [chunk.sizes[name][0] for chunk in holders], holders[0].sizes[name][1]
        # Zeros touch each page now, so that a process without enough memory fails here and not in a step.
        slab = torch.zeros(sum(numels), dtype=dtype, pin_memory=is_pinned, device="cpu")
        for chunk, part in zip(holders, slab.split(numels)):
            parts[chunk][name] = part
    return parts


class WindowTier(Tier):
    """States in page-locked host memory that an accelerator steps with: two windows of device memory take turns.

    ::

        copy in     | chunk 0 | chunk 1 |         | chunk 2 |
        step                  | chunk 0 | chunk 1 |         | chunk 2 |
        copy out                        | chunk 0 | chunk 1 |         | chunk 2 |

    Copies run on two streams beside the step, so that both directions of the bus are in use.
    """

    def __init__(self, slabs: Mapping[StepChunk, TierMemory], device: torch.device) -> None:
        super().__init__(slabs)
        largest: dict[tuple[str, torch.dtype], int] = {}  # Groups of other dtypes have states of other dtypes.
        for chunk in slabs:
            for name, (numel, dtype) in chunk.sizes.items():
                largest[name, dtype] = max(numel, largest.get((name, dtype), 0))
        self._windows = [
            {key: torch.empty(numel, dtype=key[1], device=device) for key, numel in largest.items()} for _ in range(2)
        ]
        windows = [tensor for window in self._windows for tensor in window.values()]
        self._copies = _StreamCopies(device, windows)
        self._held: dict[StepChunk, int] = {}  # The windows of the chunks that were fetched and not stored.
        self._stepped: StepChunk | None = None  # The one that is stepped now.

    def fetch_ahead(self, chunk: StepChunk) -> None:
        if chunk in self._held:
            return
        begin, holders = time.perf_counter(), {turn: other for other, turn in self._held.items()}
        if len(holders) == 2:  # The chunk that was fetched ahead, and not stepped, loses its window.
            del self._held[holders.pop(0 if holders[1] is self._stepped else 1)]
        turn = self._held[chunk] = 1 if 0 in holders else 0
        self._copies.copy_in(turn, self._window(chunk, turn), self._slabs[chunk])
        self._note("tier_read", chunk.nbytes, begin, begin)

    def fetch(self, chunk: StepChunk) -> TierMemory:
        self.fetch_ahead(chunk)
        self._stepped, turn = chunk, self._held[chunk]
        self._copies.wait_in(turn)
        return self._window(chunk, turn)

    def store(self, chunk: StepChunk) -> None:
        self._stepped, turn = None, self._held.pop(chunk, None)
        if turn is not None:  # Otherwise the slab itself was written, between steps.
            begin = time.perf_counter()
            self._copies.copy_out(turn, self._slabs[chunk], self._window(chunk, turn))
            self._note("tier_write", chunk.nbytes, begin, begin)

    def look(self, chunk: StepChunk) -> TierMemory:
        if chunk in self._held:  # A step that raised has fetched it ahead: the next one must not use that window.
            self._copies.wait_in(self._held.pop(chunk))
        self._copies.wait_out()
        return self._slabs[chunk]

    def reset(self) -> None:
        for turn in self._held.values():  # The copies read slabs, which are written next.
            self._copies.wait_in(turn)
        self._held.clear()

    def _window(self, chunk: StepChunk, turn: int) -> TierMemory:
        return {name: self._windows[turn][name, dtype][:numel] for name, (numel, dtype) in chunk.sizes.items()}


def window_numel(device: torch.device) -> int:
    """The most elements of a chunk for an optimizer that steps on ``device``: any number on the CPU."""
    return sys.maxsize if device.type == "cpu" else WINDOW_NUMEL


def tier_of(slabs: Mapping[StepChunk, TierMemory], device: torch.device) -> Tier:
    """The tier of states in ``slabs``, for an optimizer that steps on ``device``."""
    return Tier(slabs) if device.type == "cpu" else WindowTier(slabs, device)


class _StreamCopies:
    """Copies between host memory and an accelerator, on a stream for each direction. Events order them."""

    def __init__(self, device: torch.device, windows: Sequence[torch.Tensor]) -> None:
        self._in, self._out = torch.Stream(device), torch.Stream(device)
        for window in windows:  # The optimizer may be deleted while copies are in flight.
            window.record_stream(self._in)
            window.record_stream(self._out)
        self._arrived = [torch.Event(device), torch.Event(device)]
        self._left = [torch.Event(device), torch.Event(device)]
        # The windows may have been other tensors, which kernels in flight still use.
        self._out.wait_stream(torch.accelerator.current_stream(device))
        for event in self._left:
            event.record(self._out)

    def copy_in(self, turn: int, target: TierMemory, source: TierMemory) -> None:
        # The window's last states are on their way to the host; the chunk's own may be, too, from the other window.
        for event in self._left:
            self._in.wait_event(event)
        self._copy(self._in, target, source, self._arrived[turn])

    def copy_out(self, turn: int, target: TierMemory, source: TierMemory) -> None:
        self._out.wait_stream(torch.accelerator.current_stream())  # The step that has written them.
        self._copy(self._out, target, source, self._left[turn])

    def _copy(self, stream: torch.Stream, target: TierMemory, source: TierMemory, ended: torch.Event) -> None:
        with stream:
            for name, part in source.items():
                target[name].copy_(part, non_blocking=True)
        ended.record(stream)

    def wait_in(self, turn: int) -> None:
        torch.accelerator.current_stream().wait_event(self._arrived[turn])

    def wait_out(self) -> None:
        self._out.synchronize()
