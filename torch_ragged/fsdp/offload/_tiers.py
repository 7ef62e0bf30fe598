"""Tiers: where the states of chunks lie between steps: in host memory, or in a scratch file.

Nothing here knows what a state is, or steps anything.
"""

from __future__ import annotations

import mmap
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from torch_ragged.fsdp.files._scratch_file import BLOCK, ScratchFile
from torch_ragged.fsdp.offload._pieces import Piece, StepChunk

__all__ = ["FILE_NUMEL", "WINDOWS", "WINDOW_NUMEL", "FileTier", "TierPiece", "Tier", "WindowTier", "host_slabs", "tier_of"]
__all__ += ["window_numel"]

WINDOW_NUMEL = 1 << 23  # The most elements of a chunk for a device: enough for a bus's full bandwidth, small beside a model.
FILE_NUMEL = 1 << 22  # The most elements of a chunk in a file: with two float32 states, one read or write of 32 MiB.
WINDOWS = 3  # One chunk is read ahead, one is stepped, one is written behind.
_THREADS = "torch_ragged-files"  # The names of all threads of tiers begin so.
TierMemory = dict[str, torch.Tensor]  # By the name of a state, the 1-D tensor that has it for all pieces of a chunk.


class Tier:
    """Where chunks have their states. Here: in memory that the step itself reads and writes, the slabs.

    States of a chunk without a slab lie where the optimizer makes them.
    """

    is_transient = False  # Whether what :meth:`look` returns is valid until the next call only.
    has_lost = False  # Whether states could not be written.
    window_nbytes = 0  # Of host memory through which files are read and written.
    # For a monitor. Threads append what happened: ``tier_read`` or ``tier_write``, states that moved, or ``tier_exposed``, a
    # wait for them; bytes; begin and end by ``time.perf_counter()``, equal for copies that the host does not wait for.
    log: list[tuple[str, int, float, float]] | None = None

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


class TierPiece(NamedTuple):
    """A piece with the chunk that steps it, and the tier of the chunk."""

    piece: Piece
    chunk: StepChunk
    tier: Tier

    def states(self) -> dict[str, Any]:
        """The states of the piece. If the tier is transient, they are valid until its next call only."""
        return self.chunk.states_of(self.piece, self.tier.look(self.chunk))


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


@dataclass(eq=False)
class _Window:
    """Host memory for one chunk."""

    memory: mmap.mmap  # At an address that is a multiple of a page.
    filled: Future[None] | None = None  # The read that fills it.
    saved: Future[None] | None = None  # The write that reads it.


class FileTier(Tier):
    """States in one scratch file per rank, read ahead and written behind, for an optimizer that runs on the CPU.

    As in a :class:`WindowTier`, one chunk is read, one stepped and one written at a time. A thread reads and a thread writes,
    one request after the other; they call no torch. A chunk is read after its last write, and a window is filled after what it
    held was written. An error of a write is raised by the next read of its chunk or window, or by :meth:`look`.
    """

    is_transient = True

    def __init__(self, chunks: Sequence[StepChunk], folder: str, rank: int) -> None:
        super().__init__({})
        self._places: dict[StepChunk, tuple[int, int]] = {}  # Where each begins in the file, and its bytes.
        end = 0
        for chunk in chunks:
            nbytes = sum(map(_in_blocks, chunk.sizes.values()))
            self._places[chunk] = end, nbytes
            end += nbytes
        self.file = ScratchFile(folder, rank, end)
        largest = max(nbytes for _, nbytes in self._places.values())
        self.window_nbytes = WINDOWS * largest
        self._windows = [_Window(mmap.mmap(-1, largest)) for _ in range(WINDOWS)]
        self._free = list(self._windows)
        self._held: dict[StepChunk, _Window] = {}  # Chunks that are read ahead or stepped.
        self._writes: dict[StepChunk, Future[None]] = {}  # The last write of each chunk.
        self._looked: StepChunk | None = None  # The chunk that is read or written between steps.
        self._is_dirty = False  # Whether the file lacks what was written to it.
        self._reader, self._writer = (ThreadPoolExecutor(1, thread_name_prefix=_THREADS) for _ in range(2))
        # First the threads, then the file.
        weakref.finalize(self, _shut, self._reader, self._writer, self.file.close)

    # -- in a step -------------------------------------------------------------------------------------------------

    def fetch_ahead(self, chunk: StepChunk) -> None:
        """Issue the read of ``chunk``, if a window is free."""
        self._flush()
        if chunk in self._held or not self._free:
            return
        window = self._held[chunk] = self._free.pop(0)
        window.filled = self._reader.submit(self._read, window, chunk)

    def fetch(self, chunk: StepChunk) -> TierMemory:
        """Wait for the read of ``chunk``."""
        if chunk not in self._held and not self._free:
            # All windows have chunks that were read ahead, and had no gradient in their step.
            self._forget(next(iter(self._held)))
        self.fetch_ahead(chunk)
        window = self._held[chunk]
        assert window.filled is not None
        begin = time.perf_counter()
        window.filled.result()
        self._note("tier_exposed", 0, begin)
        return self._memory(chunk, window)

    def store(self, chunk: StepChunk) -> None:
        """Issue the write of ``chunk``; after :meth:`look`, it is written when another chunk is used."""
        if self._looked is chunk:
            self._is_dirty = True
            return
        window = self._held.pop(chunk)
        window.saved = self._writes[chunk] = self._writer.submit(self._write, window, chunk)
        self._free.append(window)

    def _forget(self, chunk: StepChunk) -> None:
        """Free the window of a chunk that was read ahead. The next step reads it again, and raises if that fails."""
        window = self._held.pop(chunk)
        assert window.filled is not None
        window.filled.exception()  # Wait: the next read fills the window.
        self._free.append(window)

    def _read(self, window: _Window, chunk: StepChunk) -> None:
        for write in (window.saved, self._writes.get(chunk)):
            if write is not None:
                write.result()
        if not chunk.is_fresh:  # Otherwise the file has nothing yet.
            (offset, nbytes), begin = self._places[chunk], time.perf_counter()
            self.file.read(memoryview(window.memory)[:nbytes], offset)
            self._note("tier_read", nbytes, begin)

    def _write(self, window: _Window, chunk: StepChunk) -> None:
        (offset, nbytes), begin = self._places[chunk], time.perf_counter()
        self.file.write(memoryview(window.memory)[:nbytes], offset)
        self._note("tier_write", nbytes, begin)

    def _memory(self, chunk: StepChunk, window: _Window) -> TierMemory:
        memory, start = {}, 0
        for name, (numel, dtype) in chunk.sizes.items():
            memory[name] = torch.frombuffer(window.memory, dtype=dtype, count=numel, offset=start)
            start += _in_blocks((numel, dtype))
        return memory

    # -- between steps ---------------------------------------------------------------------------------------------

    def look(self, chunk: StepChunk) -> TierMemory:
        """The states of ``chunk`` in a window: valid until another chunk is used."""
        if self._looked is not chunk:
            self._flush()
            for ahead in list(self._held):
                self._forget(ahead)
            for write in self._writes.values():
                write.result()
            self._read(self._free[0], chunk)
            self._held[chunk], self._looked = self._free.pop(0), chunk
        return self._memory(chunk, self._held[chunk])

    def _flush(self) -> None:
        """End :meth:`look`: write what was written to the chunk."""
        chunk, self._looked = self._looked, None
        if chunk is None:
            return
        if self._is_dirty:
            self.store(chunk)
        else:
            self._free.append(self._held.pop(chunk))
        self._is_dirty = False

    @property
    def has_lost(self) -> bool:  # type: ignore[override]
        return any(write.done() and write.exception() is not None for write in self._writes.values())

    def reset(self) -> None:
        """Forget reads and writes that failed, and what they were to bring. All states are set next."""
        for window in self._windows:
            for future in filter(None, (window.filled, window.saved)):
                future.exception()  # Wait: a thread may still use the window.
            window.filled = window.saved = None
        self._free, self._looked, self._is_dirty = list(self._windows), None, False
        self._held.clear()
        self._writes.clear()


def _in_blocks(size: tuple[int, torch.dtype]) -> int:
    """The bytes of a state in the file: whole blocks."""
    return -(-size[0] * size[1].itemsize // BLOCK) * BLOCK


def _shut(reader: ThreadPoolExecutor, writer: ThreadPoolExecutor, close: Any) -> None:
    # A read or write holds the tier. So in one of its threads, no other one is left, and a thread cannot wait for itself.
    waits = not threading.current_thread().name.startswith(_THREADS)
    reader.shutdown(wait=waits)
    writer.shutdown(wait=waits)
    close()
