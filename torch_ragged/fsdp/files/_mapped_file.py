"""MappedFile: a scratch file whose bytes are memory, read ahead and written behind in the order of use.

Its memory is valid at any time. What is read ahead or dropped decides only how fast it is, and how much is in memory.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from torch_ragged.fsdp.files._scratch_file import BLOCK, ScratchFile

__all__ = ["MAPPED_IN_MEMORY", "MappedFile"]

_READ = 1 << 20  # The bytes of one read. They are read to be in the page cache, so one buffer serves all reads.
_BEHIND = 2  # The most writes that are not waited for.
MAPPED_IN_MEMORY = 5 + _BEHIND  # The most files with pages in memory: of passes three, of steps two, and those written.

# Named here, so that tests can let it fail. None: a system that is not Linux.
_fdatasync: Any = getattr(os, "fdatasync", None)


class MappedFile:
    """A scratch file that is mapped into memory.

    ::

        use        | a         | b         | c         | b         | a
        read       | a | b     | c         |           | a         |
        written                            | a         |           | c
        in memory    a b         a b c       b c         b c a       a b

    :meth:`use` reads the file, unless it was read ahead, and reads the file ahead that followed this one the last time. A
    thread writes the pages of the others, and drops them. If it is behind by more than two files, :meth:`use` waits for it. In
    passes, the file before this one stays, too: on one rank, the model computes with it while the next one is used already.
    Steps, which may run in a thread beside passes, have an order of their own.

    A page that is touched without :meth:`use` is read by the system, as late as then. If the system cannot read it, it ends the
    process with SIGBUS: :meth:`use` reads first, and raises instead. A file of 0 bytes cannot be mapped.
    """

    def __init__(self, folder: str, rank: int, nbytes: int) -> None:
        self.file = ScratchFile(folder, rank, -(-nbytes // BLOCK) * BLOCK, uses_cache=True)
        self.nbytes = nbytes
        with self.file.named(f"map {nbytes} bytes of"):
            self.memory = mmap.mmap(self.file.fd, nbytes)
        # By the file that was used before this one: the file that was used after it.
        self.following: weakref.WeakKeyDictionary[MappedFile, weakref.ref[MappedFile]] = weakref.WeakKeyDictionary()
        self._problem: tuple[Any, ...] = ()
        self.lock = threading.Lock()  # What is read is not dropped meanwhile.

    def check(self) -> None:
        """Raise in every call once the file could not be written: the system may have dropped that, and reads old bytes."""
        if self._problem:
            raise OSError(*self._problem)

    def use(self, in_step: bool = False) -> None:
        """A pass, or a step, uses the file next. Returns when its bytes are in memory: they stay there until the next use."""
        self.check()
        _fetch_order.turn_to(self, _fetch_order.of_steps if in_step else _fetch_order.of_passes)

    def release(self) -> None:
        """The file is not used soon: a thread writes its bytes and drops them from memory."""
        _fetch_order.drop(self)
        _fetch_order.await_writes()

    def read(self) -> None:
        """Bring all pages into the page cache."""
        size = -(-self.nbytes // BLOCK) * BLOCK
        buffer = memoryview(bytearray(min(_READ, size)))
        with self.lock:
            for start in range(0, size, _READ):
                self.file.read(buffer[: size - start], start)

    def write(self) -> None:
        """Write all changed pages."""
        try:
            with self.file.named("write"):
                _fdatasync(self.file.fd)
        except OSError as error:
            self._problem = error.errno, error.strerror, error.filename

    def drop_pages(self) -> None:
        """Drop the pages that are written. What is touched later is read again."""
        if not self._problem:
            with contextlib.suppress(OSError):  # Locked into memory: then they stay.
                self.memory.madvise(mmap.MADV_DONTNEED)  # The page cache drops no page that is in a page table.
                os.posix_fadvise(self.file.fd, 0, 0, os.POSIX_FADV_DONTNEED)


@dataclass
class _Turns:
    """The order of use in passes, or in steps."""

    keeps_previous: bool
    recent: list[weakref.ref[MappedFile]] = field(default_factory=list)  # The file before the last one, and the last one.
    # The last one, the one that is read ahead and, if ``keeps_previous``, the one before the last.
    kept: weakref.WeakSet[MappedFile] = field(default_factory=weakref.WeakSet)


class _Order:
    """The order in which the mapped files of this process are used. Any thread may use one."""

    def __init__(self) -> None:
        self.of_passes, self.of_steps = _Turns(keeps_previous=True), _Turns(keeps_previous=False)
        self._lock = threading.RLock()
        # The files whose pages are in memory, or are read now.
        self._reads: weakref.WeakKeyDictionary[MappedFile, Future[None]] = weakref.WeakKeyDictionary()
        self._writes: list[Future[None]] = []
        self._reader, self._writer = (ThreadPoolExecutor(1, thread_name_prefix="torch_ragged-mapped") for _ in range(2))

    def turn_to(self, file: MappedFile, turns: _Turns) -> None:
        with self._lock:
            before, last = ([None, None] + [each() for each in turns.recent])[-2:]
            if file is not last:
                if before is not None and last is not None:
                    last.following[before] = weakref.ref(file)
                turns.recent = [weakref.ref(each) for each in (last, file) if each is not None]
                after = None if last is None else file.following.get(last)
                following = None if after is None else after()
                previous = last if turns.keeps_previous else None
                turns.kept = weakref.WeakSet(each for each in (file, following, previous) if each is not None)
                kept = {*self.of_passes.kept, *self.of_steps.kept}
                for other in [each for each in self._reads if each not in kept]:
                    self.drop(other)
        self.await_writes()  # Before more is read, so that no more than MAPPED_IN_MEMORY are in memory.
        with self._lock:
            for each in (file, *turns.kept):
                if each not in self._reads:
                    self._reads[each] = self._reader.submit(self._read, each)
            reading = self._reads[file]
        reading.result()

    def _read(self, file: MappedFile) -> None:
        try:
            file.read()
        except OSError:
            with self._lock:
                self._reads.pop(file, None)  # Before a waiter hears of it: its next use tries again.
            raise

    def drop(self, file: MappedFile) -> None:
        with self._lock:
            self._reads.pop(file, None)
            self._writes.append(self._writer.submit(self._write, weakref.ref(file)))

    def await_writes(self) -> None:
        with self._lock:
            late, self._writes = self._writes[:-_BEHIND], self._writes[-_BEHIND:]
        for writing in late:
            writing.result()

    def _write(self, reference: weakref.ref[MappedFile]) -> None:
        file = reference()
        if file is None or file in self._reads:  # Deleted, or used again already.
            return
        file.write()
        with file.lock:
            if file not in self._reads:  # Otherwise it is read, and perhaps used, since then.
                file.drop_pages()


_fetch_order = _Order()
