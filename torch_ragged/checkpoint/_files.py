"""Files with checksums: one CRC-32 per block, computed while the file is written.

One checksum per block, so that ranks can share the verification of a large file. Nothing here reads a file twice to hash it.
"""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem

from torch_ragged.checkpoint import _disk
from torch_ragged.checkpoint._errors import CheckpointError

__all__ = ["CHECKSUM_BLOCK", "FileRecord", "HashingFileSystem", "check_blocks", "check_size", "names_file"]

CHECKSUM_BLOCK = 32 * 1024 * 1024  # bytes per checksum


@dataclass(frozen=True)
class FileRecord:
    """Size of a file in bytes, and the CRC-32 of each of its blocks of ``block`` bytes."""

    nbytes: int
    crc32: tuple[int, ...]
    block: int = CHECKSUM_BLOCK


class _HashingFile:
    """A binary file, written from start to end, that computes the CRC-32 of each block during the writes.

    Wraps ``raw``, a file that is open for writing. It has the methods that DCP and ``torch.save`` call, and no ``seek``.
    """

    def __init__(self, raw: Any, path: Path, block: int) -> None:
        self.raw, self.path, self.block = raw, path, block
        self.nbytes = 0
        self.asked = 0  # The value that nbytes would have if the last write had succeeded.
        self.failure: OSError | None = None  # Kept here because torch.save's zip writer replaces it by another error.
        self.crcs: list[int] = []

    @property
    def record(self) -> FileRecord:
        return FileRecord(self.nbytes, tuple(self.crcs), self.block)

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.asked = self.nbytes + len(view)
        try:
            written = _disk.write(self.raw, view)
            if written is not None and written != len(view):
                raise OSError(errno.EIO, f"only {written} of {len(view)} bytes were written", str(self.path))
        except OSError as error:
            self.failure = self.failure or error
            raise
        while len(view):
            within = self.nbytes % self.block
            part = view[: self.block - within]
            if within:
                self.crcs[-1] = zlib.crc32(part, self.crcs[-1])
            else:
                self.crcs.append(zlib.crc32(part))
            self.nbytes += len(part)
            view = view[len(part) :]
        return len(memoryview(data).cast("B"))

    def flush(self) -> None:
        self.raw.flush()

    def tell(self) -> int:
        return self.nbytes

    def fileno(self) -> int:
        self.flush()  # Callers pass the descriptor to os.fsync, which does not see Python's buffer.
        return self.raw.fileno()

    def close(self) -> None:
        pass  # create_stream syncs the file before it closes it.


class HashingFileSystem(FileSystem):
    """DCP's local file system, which also records size and checksums of the files it writes, and names the file in errors.

    Attributes:
        records: the record of each written file, by file name.
        planned: the expected bytes of the next file; 0 if unknown. An error about a full disk names it.
    """

    def __init__(self, block: int = CHECKSUM_BLOCK) -> None:
        super().__init__()
        self.block = block
        self.records: dict[str, FileRecord] = {}
        self.planned = 0

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        path = Path(path)
        hashing = None
        try:
            with _disk.create(path) as stream:
                hashing = _HashingFile(stream, path, self.block)
                yield hashing
                _disk.sync(stream)  # Before any rename makes the file visible.
        except Exception as error:  # Errors of write, fsync and close do not name the file.
            cause = (hashing and hashing.failure) or error
            if cause is error and getattr(error, "filename", None) not in (None, str(path)):
                raise  # It names another file: what is written is read from there.
            if isinstance(cause, OSError):
                with names_file(path, max(self.planned, hashing.asked if hashing else 0)):
                    raise cause from error
            raise CheckpointError(f"{path} cannot be written: {type(error).__name__}: {error}") from error
        self.records[path.name] = hashing.record

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        _disk.mkdir(Path(path))

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        _disk.unlink(Path(path))

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        _disk.rename(Path(path), Path(new_path))
        old, new = Path(path).name, Path(new_path).name
        if old in self.records:
            self.records[new] = self.records.pop(old)


@contextmanager
def names_file(path: Path, needed: int) -> Iterator[None]:
    """Let an OSError name ``path``, which is written: errors of write, flush and close do not."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, _reason(error, path, needed), str(path)) from error


def _reason(error: OSError, path: Path, needed: int) -> str:
    """Why ``path`` could not be written. If the disk is full, also how many bytes are needed, written and free."""
    reason = error.strerror or str(error)
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return reason
    written = path.stat().st_size if path.is_file() else 0
    text = f"{reason} (the disk is full: the file needs about {needed} bytes, {written} of them are written"
    if error.errno == errno.EDQUOT or not hasattr(os, "statvfs"):  # statvfs knows no quota.
        return text + ")"
    disk = os.statvfs(path.parent)
    inodes = ", no inode is free" if disk.f_files and not disk.f_favail else ""
    return f"{text}, {disk.f_bavail * disk.f_frsize} bytes are free{inodes})"


def check_size(folder: Path, name: str, record: FileRecord) -> str:
    """The problem if a file is missing, is no regular file or has a wrong size; empty if there is no problem."""
    try:
        status = (folder / name).lstat()  # Of a link itself: its target may be any file of this machine.
    except OSError as error:
        return f"{folder / name} is missing ({error.strerror})"
    kind = _disk.kind_of(status)
    if kind:
        return f"{folder / name} is no regular file: it is {kind}; expected a file that checkpoint.save wrote"
    if status.st_size != record.nbytes:
        kind = "truncated" if status.st_size < record.nbytes else "too long"
        return f"{folder / name} is {kind}: it has {status.st_size} bytes, expected {record.nbytes}"
    return ""


def check_blocks(path: Path, record: FileRecord, blocks: Sequence[int] | None = None) -> list[int]:
    """The numbers of the blocks, among ``blocks`` (None: all), with another checksum than in ``record``.

    Raises:
        CheckpointError: the file cannot be read.
    """
    blocks = range(len(record.crc32)) if blocks is None else blocks
    if not record.nbytes or not blocks:
        return []
    try:
        with _disk.open_regular(path, record.nbytes) as file:
            return [block for block in blocks if _crc(file, block * record.block, record.block) != record.crc32[block]]
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _crc(file: Any, start: int, nbytes: int) -> int:
    """CRC-32 of ``nbytes`` bytes from ``start``, or of fewer if the file ends earlier. Uses 1 MiB of memory at most."""
    crc, buffer = 0, memoryview(bytearray(min(nbytes, 1 << 20)))
    file.seek(start)
    while nbytes:
        count = file.readinto(buffer[: min(nbytes, len(buffer))])
        if not count:
            break
        crc = zlib.crc32(buffer[:count], crc)
        nbytes -= count
    return crc
