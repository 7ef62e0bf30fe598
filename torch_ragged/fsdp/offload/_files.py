"""FileTier: states in a scratch file, read ahead and written behind in the order of use, through a few windows of host memory.

Its threads read and write files only: they call no torch, and nothing of the package calls into them.
"""

from __future__ import annotations

import mmap
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from torch_ragged.fsdp.files._scratch_file import BLOCK, ScratchFile
from torch_ragged.fsdp.offload._pieces import StepChunk
from torch_ragged.fsdp.offload._tiers import Tier, TierMemory

__all__ = ["FILE_NUMEL", "WINDOWS", "FileTier"]

FILE_NUMEL = 1 << 22  # The most elements of a chunk in a file: with two float32 states, one read or write of 32 MiB.
WINDOWS = 3  # One chunk is read ahead, one is stepped, one is written behind.
_THREADS = "torch_ragged-files"  # The names of all threads of tiers begin so.


@dataclass(eq=False)
class _Window:
    """Host memory for one chunk."""

    memory: mmap.mmap  # At an address that is a multiple of a page.
    filled: Future[None] | None = None  # The read that fills it.
    saved: Future[None] | None = None  # The write that reads it.


class _Record(NamedTuple):
    """A chunk in the file: its states one after another, each in whole blocks. By name, where a state begins in the record."""

    offset: int
    nbytes: int
    starts: dict[str, int]


class FileTier(Tier):
    """States in one scratch file per rank, for an optimizer that runs on the CPU.

    ::

        reads     | chunk 0 | chunk 1 | chunk 2 |
        step                | chunk 0 | chunk 1 | chunk 2 |
        writes                        | chunk 0 | chunk 1 | chunk 2 |

    A thread reads and a thread writes, one request after the other. A chunk is read after its last write, and a window is
    filled after what it held was written. An error of a write is raised by the next read of its chunk or window, or by
    :meth:`look`.
    """

    is_transient = True

    def __init__(self, chunks: Sequence[StepChunk], folder: str, rank: int) -> None:
        super().__init__({})
        self._records: dict[StepChunk, _Record] = {}
        end = 0
        for chunk in chunks:
            starts, nbytes = {}, 0
            for name, (numel, dtype) in chunk.sizes.items():
                starts[name] = nbytes
                nbytes += -(-numel * dtype.itemsize // BLOCK) * BLOCK
            self._records[chunk] = _Record(end, nbytes, starts)
            end += nbytes
        self.file = ScratchFile(folder, rank, end)
        largest = max(record.nbytes for record in self._records.values())
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
            record, begin = self._records[chunk], time.perf_counter()
            self.file.read(memoryview(window.memory)[: record.nbytes], record.offset)
            self._note("tier_read", record.nbytes, begin)

    def _write(self, window: _Window, chunk: StepChunk) -> None:
        record, begin = self._records[chunk], time.perf_counter()
        self.file.write(memoryview(window.memory)[: record.nbytes], record.offset)
        self._note("tier_write", record.nbytes, begin)

    def _memory(self, chunk: StepChunk, window: _Window) -> TierMemory:
        starts = self._records[chunk].starts
        return {
            name: torch.frombuffer(window.memory, dtype=dtype, count=numel, offset=starts[name])
            for name, (numel, dtype) in chunk.sizes.items()
        }

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


def _shut(reader: ThreadPoolExecutor, writer: ThreadPoolExecutor, close: Any) -> None:
    # A read or write holds the tier. So in one of its threads, no other one is left, and a thread cannot wait for itself.
    waits = not threading.current_thread().name.startswith(_THREADS)
    reader.shutdown(wait=waits)
    writer.shutdown(wait=waits)
    close()
