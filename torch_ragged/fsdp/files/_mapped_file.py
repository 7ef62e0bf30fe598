"""MappedFile: a scratch file whose bytes are memory, read ahead and written behind in the order of use.

Its memory is valid at any time. What is read ahead or dropped decides only how fast it is, and how much is in memory.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch_ragged.fsdp.files import _scratch_file
from torch_ragged.fsdp.files._scratch_file import BLOCK, ScratchFile

__all__ = ["MAPPED_IN_MEMORY", "MappedFile"]

_READ = 1 << 20
"""The bytes of one read. They are read to be in the page cache, so one buffer serves all reads."""

_BEHIND = 2
"""The most writes that are not waited for."""

MAPPED_IN_MEMORY = 3 + _BEHIND
"""The most files whose pages are in memory: the one in use, the one before it, the next one, and those that are written."""

# Named here, so that tests can let it fail. None: a system that is not Linux.
_fdatasync: Any = getattr(os, "fdatasync", None)


class MappedFile:
    """A scratch file that is mapped into memory.

    ::

        use        | a         | b         | c         | b         | a
        read       | a | b     | c         |           | a         |
        written                            | a         |           | c
        in memory    a           a b         b c         b c a       a b

    :meth:`use` says that the file is used now. It reads it, unless it was read ahead, and reads the file ahead that followed
    this one the last time. The pages of all files but these and the one that was used before are written and dropped, by a
    thread; it may be behind by two files, then :meth:`use` waits for it. So of many files, five have pages in memory at most.

    A page that is touched without :meth:`use` is read by the system, as late as then. If the system cannot read it, it ends the
    process with SIGBUS: :meth:`use` reads first, and raises instead.

    Args:
        folder, rank: as for :class:`ScratchFile`.
        nbytes: the size, not 0.

    Attributes:
        memory: the bytes of the file.
        file: the file.

    Raises:
        OSError: as :class:`ScratchFile`; or the file cannot be mapped.
    """

    def __init__(self, folder: str, rank: int, nbytes: int) -> None:
        self.file = ScratchFile(folder, rank, -(-nbytes // BLOCK) * BLOCK, uses_cache=True)
        self.nbytes = nbytes
        with self.file.named(f"map {nbytes} bytes of"):
            self.memory = mmap.mmap(self.file.fd, nbytes)
        # By the file that was used before this one: the file that was used after it.
        self.following: weakref.WeakKeyDictionary[MappedFile, weakref.ref[MappedFile]] = weakref.WeakKeyDictionary()
        # What could not be written is lost as soon as the system drops its pages, so this stays.
        self.problem: OSError | None = None

    def use(self) -> None:
        """The file is used next. Returns when its bytes are in memory.

        Raises:
            OSError: it cannot be read; or it could not be written, and never will be.
        """
        if self.problem is not None:
            raise self.problem
        reading, late = _order.turn_to(self)
        for writing in late:
            writing.result()
        try:
            reading.result()
        except OSError:
            _order.drop(self)  # The next use reads it again.
            raise

    def release(self) -> None:
        """The file is not used soon: write its bytes, and drop them from memory, by a thread."""
        _order.drop(self)

    def read(self) -> None:
        """Bring all pages into the page cache."""
        buffer = memoryview(bytearray(min(_READ, self.nbytes)))
        done = 0
        while done < self.nbytes:
            part = buffer[: self.nbytes - done]
            with self.file.named(f"read {len(part)} bytes at {done} of"):
                count = _scratch_file._preadv(self.file.fd, [part], done)
                if count <= 0:
                    raise OSError(errno.EIO, f"it ends after {done} bytes")
            done += count

    def write(self) -> None:
        """Write all changed pages, and drop all pages. What is touched later is read again."""
        try:
            with self.file.named("write"):
                _fdatasync(self.file.fd)
        except OSError as error:
            self.problem = error
            return
        self.memory.madvise(mmap.MADV_DONTNEED)  # The page cache drops no page that is in a page table.
        os.posix_fadvise(self.file.fd, 0, 0, os.POSIX_FADV_DONTNEED)


class _Order:
    """The order in which the mapped files of this process are used. Any thread may use one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recent: list[weakref.ref[MappedFile]] = []  # The file before the last one, and the last one.
        # The files whose pages are in memory, or are read now.
        self._reads: weakref.WeakKeyDictionary[MappedFile, Future[None]] = weakref.WeakKeyDictionary()
        self._writes: list[Future[None]] = []
        self._reader, self._writer = ThreadPoolExecutor(1), ThreadPoolExecutor(1)

    def turn_to(self, file: MappedFile) -> tuple[Future[None], list[Future[None]]]:
        """``file`` is used now. Returns its read, and the writes that are late: either may have ended."""
        with self._lock:
            before, last = ([None, None] + [each() for each in self._recent])[-2:]
            reading = self._read(file)
            if file is last:
                return reading, []
            if before is not None and last is not None:
                last.following[before] = weakref.ref(file)
            self._recent = [weakref.ref(each) for each in (last, file) if each is not None]
            after = None if last is None else file.following.get(last)
            following = None if after is None else after()
            if following is not None:
                self._read(following)
            kept = {last, file, following}
            for other in [each for each in self._reads if each not in kept]:
                self._drop(other)
            late, self._writes = self._writes[:-_BEHIND], self._writes[-_BEHIND:]
            return reading, late

    def _read(self, file: MappedFile) -> Future[None]:
        if file not in self._reads:
            self._reads[file] = self._reader.submit(file.read)
        return self._reads[file]

    def drop(self, file: MappedFile) -> None:
        with self._lock:
            self._drop(file)

    def _drop(self, file: MappedFile) -> None:
        self._reads.pop(file, None)
        self._writes.append(self._writer.submit(self._write, file))

    def _write(self, file: MappedFile) -> None:
        with self._lock:
            if file in self._reads:  # It is used again already.
                return
        file.write()


_order = _Order()
