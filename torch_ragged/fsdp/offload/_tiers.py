"""Tiers: where the states of chunks lie between steps. Nothing here knows what a state is, or steps anything."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from torch_ragged.fsdp.offload._pieces import Chunk

__all__ = [
    "WINDOW_NUMEL",
    "DeviceTier",
    "HostTier",
    "Memory",
    "Tier",
    "TierEvent",
    "WindowTier",
    "host_slabs",
    "tier_of",
    "window_numel",
]

WINDOW_NUMEL = 1 << 23
"""The most elements of a chunk that is copied to a device: enough for the full bandwidth of a bus, small beside a model."""

Memory = dict[str, torch.Tensor]
"""By the name of a state, the 1-D tensor that has it for all pieces of a chunk."""


class TierEvent(NamedTuple):
    """What happened in a tier, for a monitor.

    Attributes:
        kind: ``tier_read`` or ``tier_write``, states that moved; or ``tier_exposed``, a step that waited for them.
        nbytes: that moved.
        begin, end: ``time.perf_counter()``. Equal for copies by an accelerator, which the host does not wait for.
    """

    kind: str
    nbytes: int
    begin: float
    end: float


class Tier(Protocol):
    """Where chunks have their states.

    ::

        fetch_ahead(chunk)      the next chunk: begin to bring its states
        fetch(chunk)            its states, to step with: valid until the next fetch
        store(chunk)            they have changed
        look(chunk)             between steps: its states, to read or to write; ``store`` follows if they were written
        reset()                 a step has failed, and all states are set next

    Attributes:
        is_transient: whether what :meth:`look` returns is valid until the next call only.
        log: gets an event for what moves, if it is a list. Threads append to it.
    """

    is_transient: bool
    log: list[TierEvent] | None

    def fetch_ahead(self, chunk: Chunk) -> None: ...

    def fetch(self, chunk: Chunk) -> Memory: ...

    def store(self, chunk: Chunk) -> None: ...

    def look(self, chunk: Chunk) -> Memory: ...

    def reset(self) -> None: ...


class DeviceTier:
    """No tier: the states lie where the optimizer makes them, beside the parameters."""

    is_transient = False
    log: list[TierEvent] | None = None

    def fetch_ahead(self, chunk: Chunk) -> None:
        pass

    def fetch(self, chunk: Chunk) -> Memory:
        return {}

    def store(self, chunk: Chunk) -> None:
        pass

    def look(self, chunk: Chunk) -> Memory:
        return {}

    def reset(self) -> None:
        pass


def host_slabs(chunks: Sequence[Chunk], is_pinned: bool) -> dict[Chunk, Memory]:
    """One slab of host memory for each state of one group of ``fully_shard``, with the parts of its chunks.

    Args:
        is_pinned: whether the memory is page-locked, for copies to a GPU.
    """
    totals: dict[str, tuple[int, torch.dtype]] = {}
    for chunk in chunks:
        for name, (numel, dtype) in chunk.sizes.items():
            totals[name] = (totals.get(name, (0, dtype))[0] + numel, dtype)
    # Zeros touch each page now, so that a process without enough memory fails here and not in a step.
    rest = {
        name: torch.zeros(numel, dtype=dtype, pin_memory=is_pinned, device="cpu") for name, (numel, dtype) in totals.items()
    }
    parts: dict[Chunk, Memory] = {}
    for chunk in chunks:
        parts[chunk] = {name: rest[name][:numel] for name, (numel, _) in chunk.sizes.items()}
        rest |= {name: rest[name][numel:] for name, (numel, _) in chunk.sizes.items()}
    return parts


class HostTier:
    """States in host memory that the step itself reads and writes: the optimizer runs on the CPU.

    Args:
        slabs: the states of each chunk.
    """

    is_transient = False
    log: list[TierEvent] | None = None

    def __init__(self, slabs: Mapping[Chunk, Memory]) -> None:
        self._slabs = slabs

    def fetch_ahead(self, chunk: Chunk) -> None:
        pass

    def fetch(self, chunk: Chunk) -> Memory:
        return self._slabs[chunk]

    def store(self, chunk: Chunk) -> None:
        pass

    def look(self, chunk: Chunk) -> Memory:
        return self._slabs[chunk]

    def reset(self) -> None:
        pass


class WindowTier:
    """States in host memory that a device steps with: two windows of device memory take turns.

    ::

        copy in     | chunk 0 | chunk 1 |         | chunk 2 |
        step                  | chunk 0 | chunk 1 |         | chunk 2 |
        copy out                        | chunk 0 | chunk 1 |         | chunk 2 |

    On an accelerator, copies run on two streams beside the step, so that both directions of the bus are in use.

    Args:
        slabs: the states of each chunk, in page-locked host memory if ``device`` is an accelerator.
        device: where the optimizer steps.
    """

    is_transient = False
    log: list[TierEvent] | None = None

    def __init__(self, slabs: Mapping[Chunk, Memory], device: torch.device) -> None:
        self._slabs = slabs
        largest: dict[tuple[str, torch.dtype], int] = {}  # Groups of other dtypes have states of other dtypes.
        for chunk in slabs:
            for name, (numel, dtype) in chunk.sizes.items():
                largest[name, dtype] = max(numel, largest.get((name, dtype), 0))
        self._windows = [
            {key: torch.empty(numel, dtype=key[1], device=device) for key, numel in largest.items()} for _ in range(2)
        ]
        windows = [tensor for window in self._windows for tensor in window.values()]
        self._copies = _StreamCopies(device, windows) if device.type != "cpu" else _HostCopies()
        self._held: dict[Chunk, int] = {}  # The windows of the chunks that were fetched and not stored.
        self._stepped: Chunk | None = None  # The one that is stepped now.

    def fetch_ahead(self, chunk: Chunk) -> None:
        if chunk not in self._held:
            begin, turn = time.perf_counter(), self._free_window()
            self._held[chunk] = turn
            self._copies.copy_in(turn, self._window(chunk, turn), self._slabs[chunk])
            self._note("tier_read", chunk, begin)

    def _free_window(self) -> int:
        """A window that no chunk has. If there is none, the chunk that was fetched ahead, and not stepped, loses its own."""
        holders = {turn: chunk for chunk, turn in self._held.items()}
        for turn in range(2):
            if turn not in holders:
                return turn
        turn = 0 if holders[1] is self._stepped else 1
        del self._held[holders[turn]]
        return turn

    def fetch(self, chunk: Chunk) -> Memory:
        self.fetch_ahead(chunk)
        self._stepped, turn = chunk, self._held[chunk]
        self._copies.wait_in(turn)
        return self._window(chunk, turn)

    def store(self, chunk: Chunk) -> None:
        self._stepped, turn = None, self._held.pop(chunk, None)
        if turn is not None:  # Otherwise the slab itself was written, between steps.
            begin = time.perf_counter()
            self._copies.copy_out(turn, self._slabs[chunk], self._window(chunk, turn))
            self._note("tier_write", chunk, begin)

    def look(self, chunk: Chunk) -> Memory:
        self._held.pop(chunk, None)  # A step that raised has fetched it ahead: the next one must not use that window.
        self._copies.wait_out()
        return self._slabs[chunk]

    def reset(self) -> None:
        self._held.clear()

    def _note(self, kind: str, chunk: Chunk, begin: float) -> None:
        if self.log is not None:
            end = time.perf_counter() if isinstance(self._copies, _HostCopies) else begin
            self.log.append(TierEvent(kind, chunk.nbytes, begin, end))

    def _window(self, chunk: Chunk, turn: int) -> Memory:
        return {name: self._windows[turn][name, dtype][:numel] for name, (numel, dtype) in chunk.sizes.items()}


def window_numel(device: torch.device) -> int | None:
    """The most elements of a chunk for an optimizer that steps on ``device``; None: any number."""
    return None if device.type == "cpu" else WINDOW_NUMEL


def tier_of(slabs: Mapping[Chunk, Memory], device: torch.device) -> Tier:
    """The tier of states in ``slabs``, for an optimizer that steps on ``device``."""
    return HostTier(slabs) if device.type == "cpu" else WindowTier(slabs, device)


class _HostCopies:
    """Copies between host memory and host memory, which end at once."""

    def copy_in(self, turn: int, window: Memory, slab: Memory) -> None:
        for name, part in slab.items():
            window[name].copy_(part)

    def wait_in(self, turn: int) -> None:
        pass

    def copy_out(self, turn: int, slab: Memory, window: Memory) -> None:
        for name, part in window.items():
            slab[name].copy_(part)

    def wait_out(self) -> None:
        pass


class _StreamCopies:
    """Copies between host memory and an accelerator, on a stream for each direction. Events order them.

    Args:
        windows: the device memory of the copies. The optimizer may be deleted while some are in flight.
    """

    def __init__(self, device: torch.device, windows: Sequence[torch.Tensor]) -> None:
        self._in, self._out = torch.Stream(device), torch.Stream(device)
        for window in windows:
            window.record_stream(self._in)
            window.record_stream(self._out)
        self._arrived = [torch.Event(device), torch.Event(device)]
        self._left = [torch.Event(device), torch.Event(device)]
        # The windows may have been other tensors, which kernels in flight still use.
        self._out.wait_stream(torch.accelerator.current_stream(device))
        for event in self._left:
            event.record(self._out)

    def copy_in(self, turn: int, window: Memory, slab: Memory) -> None:
        # The window's last states are on their way to the host; the chunk's own may be, too, from the other window.
        for event in self._left:
            self._in.wait_event(event)
        with self._in:
            for name, part in slab.items():
                window[name].copy_(part, non_blocking=True)
        self._arrived[turn].record(self._in)

    def wait_in(self, turn: int) -> None:
        torch.accelerator.current_stream().wait_event(self._arrived[turn])

    def copy_out(self, turn: int, slab: Memory, window: Memory) -> None:
        self._out.wait_stream(torch.accelerator.current_stream())  # The step that has written them.
        with self._out:
            for name, part in window.items():
                slab[name].copy_(part, non_blocking=True)
        self._left[turn].record(self._out)

    def wait_out(self) -> None:
        self._out.synchronize()
