"""ScratchFile: a file without a name, for what does not fit into memory. MappedFile: one whose bytes are memory.

They do not know what lies in them. The memory of a mapped file is valid at any time: what is read ahead or dropped decides only
how fast it is, and how much is in memory.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
import uuid
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

__all__ = ["BLOCK", "MAPPED_IN_MEMORY", "MappedFile", "ScratchFile"]

BLOCK = 4096  # Direct I/O reads and writes whole blocks of the file, from addresses that are multiples of it.
_READ = 1 << 20  # The bytes of one read. They are read to be in the page cache, so one buffer serves all reads.
_BEHIND = 2  # The most writes that are not waited for.
MAPPED_IN_MEMORY = 5 + _BEHIND  # The most files with pages in memory: of passes three, of steps two, and those written.

# Named here, so that tests can let them fail. None: a system that is not Linux.
_open: Any = os.open
_preadv, _pwritev, _fallocate = (getattr(os, name, None) for name in ("preadv", "pwritev", "posix_fallocate"))
_fdatasync: Any = getattr(os, "fdatasync", None)


class ScratchFile:
    """A file of a fixed size that has no name once it is open. So its space is free when the process ends, however it ends.

    Its ``nbytes``, a multiple of ``BLOCK``, are reserved here. If it ``uses_cache``, it is read and written through the page
    cache, as a file must be that is mapped into memory. If not, past it (``O_DIRECT``), where the file system allows it.

    Raises:
        OSError: ``folder`` is missing or read-only, or the disk is full. The error names the file, as those of all methods.
    """

    def __init__(self, folder: str, rank: int, nbytes: int, uses_cache: bool = False) -> None:
        self.path = os.path.join(folder, f"torch_ragged-offload-rank{rank}-{uuid.uuid4().hex}")
        if _fallocate is None:
            raise OSError(errno.ENOSYS, "offload to files needs Linux", folder)
        with self.named("create"):
            # Exclusive: it is an error if the name is there, which no other process has drawn.
            self.fd = _open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self.close = weakref.finalize(self, os.close, self.fd)
        with self.named("remove the name of"):
            os.unlink(self.path)
        with self.named(f"reserve {nbytes} bytes for"):
            _fallocate(self.fd, 0, nbytes)
        with self.named("write a first block of"):
            if not uses_cache:
                self._bypass_cache()

    def read(self, memory: memoryview, offset: int) -> None:
        self._run("read", _preadv, memory, offset)

    def write(self, memory: memoryview, offset: int) -> None:
        self._run("write", _pwritev, memory, offset)

    @contextlib.contextmanager
    def named(self, what: str) -> Iterator[None]:
        """Errors of what is done inside say what it was, and name the file."""
        try:
            yield
        except OSError as error:
            text = error.strerror or str(error)
            raise OSError(error.errno, f"offload could not {what} a scratch file: {text}", self.path) from error

    def _run(self, what: str, call: Any, memory: memoryview, offset: int) -> None:
        done = 0
        with self.named(f"{what} {len(memory)} bytes at {offset} of"):
            while done < len(memory):
                # Whole blocks only: direct I/O cannot go on from within one.
                count = call(self.fd, [memory[done:]], offset + done) // BLOCK * BLOCK
                if count <= 0:
                    raise OSError(errno.EIO, f"it ends after {done} bytes")
                done += count

    def _bypass_cache(self) -> None:
        """Switch to direct I/O, if a block can be written so."""
        import fcntl  # Not on every system.

        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            _pwritev(self.fd, [mmap.mmap(-1, BLOCK)], 0)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags)


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
