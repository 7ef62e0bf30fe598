"""Files that know their checksums: computed while they are written, one per block, so that ranks can share verifying them."""

from __future__ import annotations

import errno
import os
import stat
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem

from torch_ragged.checkpoint._errors import CheckpointError

__all__ = ["BLOCK", "FileRecord", "HashingFileSystem", "check_blocks", "check_size", "sync_folder"]

BLOCK = 32 * 1024 * 1024  # bytes of a block, which has a checksum of its own


@dataclass(frozen=True)
class FileRecord:
    """Size of a file in bytes, and the CRC-32 of each of its blocks of ``block`` bytes."""

    nbytes: int
    crc32: tuple[int, ...]
    block: int = BLOCK


class _HashingFile:
    """A binary file opened for writing, in order, that computes the CRC-32 of each block on the way."""

    def __init__(self, raw: Any, path: Path, block: int) -> None:
        self.raw, self.path, self.block = raw, path, block
        self.nbytes = 0
        self.asked = 0  # What nbytes would be if the last write had succeeded.
        self.failure: OSError | None = None  # torch.save loses it: its zip writer raises an error of its own then.
        self.crcs: list[int] = []

    @property
    def record(self) -> FileRecord:
        return FileRecord(self.nbytes, tuple(self.crcs), self.block)

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.asked = self.nbytes + len(view)
        try:
            written = self.raw.write(view)
            if written is not None and written != len(view):
                raise OSError(errno.EIO, f"only {written} of {len(view)} bytes were taken", str(self.path))
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
        self.flush()  # Who asks for it means to fsync.
        return self.raw.fileno()

    def close(self) -> None:
        self.raw.close()


class HashingFileSystem(FileSystem):
    """DCP's local file system, which records what it writes, and whose errors name the file.

    Attributes:
        records: of each file, by its name.
        planned: the bytes that the next files will have in all, if they are known: told if the disk is full.
    """

    def __init__(self, block: int = BLOCK) -> None:
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
            with path.open(mode) as stream:
                hashing = _HashingFile(stream, path, self.block)
                yield hashing
        except Exception as error:  # Writing, syncing and closing do not tell which file it was.
            cause = (hashing and hashing.failure) or error
            if isinstance(cause, OSError):
                needed = max(self.planned, hashing.asked if hashing else 0)
                raise OSError(cause.errno, _reason(cause, path, needed), str(path)) from error
            raise CheckpointError(f"{path} cannot be written: {type(error).__name__}: {error}") from error
        self.records[path.name] = hashing.record

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        old, new = Path(path).name, Path(new_path).name
        if old in self.records:
            self.records[new] = self.records.pop(old)


def _reason(error: OSError, path: Path, needed: int) -> str:
    """Why ``path`` could not be written; of a full disk also how much was needed and how much is free."""
    reason = error.strerror or str(error)
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return reason
    written = path.stat().st_size if path.exists() else 0
    text = f"{reason} (the disk is full: the file needs about {needed} bytes, {written} of them are written"
    if error.errno == errno.EDQUOT or not hasattr(os, "statvfs"):  # What a quota leaves is not known.
        return text + ")"
    disk = os.statvfs(path.parent)
    inodes = ", no inode is free" if disk.f_files and not disk.f_favail else ""
    return f"{text}, {disk.f_bavail * disk.f_frsize} bytes are free{inodes})"


def check_size(folder: Path, name: str, record: FileRecord) -> str:
    """What is wrong with the presence, the kind or the size of a file; empty if nothing is."""
    try:
        status = (folder / name).stat()
    except OSError as error:
        return f"{folder / name} is missing ({error.strerror})"
    if not stat.S_ISREG(status.st_mode):  # To open a pipe would wait for its writer.
        return f"{folder / name} is no regular file"
    if status.st_size != record.nbytes:
        kind = "truncated" if status.st_size < record.nbytes else "too long"
        return f"{folder / name} is {kind}: it has {status.st_size} bytes, expected {record.nbytes}"
    return ""


def check_blocks(path: Path, record: FileRecord, blocks: Sequence[int] | None = None) -> list[int]:
    """The blocks of a file, out of ``blocks`` (all where None), whose bytes are not those that were written.

    Raises:
        CheckpointError: the file cannot be read.
    """
    blocks = range(len(record.crc32)) if blocks is None else blocks
    if not record.nbytes or not blocks:
        return []
    try:
        with path.open("rb", buffering=0) as file:
            return [block for block in blocks if _crc(file, block * record.block, record.block) != record.crc32[block]]
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _crc(file: Any, start: int, nbytes: int) -> int:
    """CRC-32 of a part of a file, or of what there is of it, through a small buffer."""
    crc, buffer = 0, memoryview(bytearray(min(nbytes, 1 << 20)))
    file.seek(start)
    while nbytes:
        count = file.readinto(buffer[: min(nbytes, len(buffer))])
        if not count:
            break
        crc = zlib.crc32(buffer[:count], crc)
        nbytes -= count
    return crc


def sync_folder(folder: Path) -> None:
    """Have the entries of a folder on permanent storage: what was created, renamed or removed in it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder)) from error
    finally:
        os.close(descriptor)
