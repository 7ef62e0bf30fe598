"""ScratchFile: a file without a name, for what does not fit into memory.

It does not know what lies in it.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import uuid
import weakref
from collections.abc import Iterator
from typing import Any

__all__ = ["BLOCK", "ScratchFile"]

BLOCK = 4096  # Direct I/O reads and writes whole blocks of the file, from addresses that are multiples of it.

# Named here, so that tests can let them fail. None: a system that is not Linux.
_open: Any = os.open
_preadv, _pwritev, _fallocate = (getattr(os, name, None) for name in ("preadv", "pwritev", "posix_fallocate"))


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
