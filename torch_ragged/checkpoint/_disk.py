"""The file-system operations of the writer, one function each, and safe opening of files for the reader.

Every change that the writer makes to a disk goes through this module: a test records the operations in their order and replays
a power loss after each. No other module of this package creates, renames, syncs or removes anything.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from torch_ragged.checkpoint._errors import CheckpointError

__all__ = [
    *("create", "make_folders", "mkdir", "remove_tree", "rename", "rmdir", "sync", "sync_folder", "unlink", "write"),
    *("kind_of", "open_regular"),
]


def create(path: Path) -> Any:
    """Create a file, or empty an existing one, and open it for writing."""
    return path.open("wb")


def write(file: Any, data: Any) -> int | None:
    """Write bytes to a file of :func:`create`. They may stay in buffers until :func:`sync`."""
    return file.write(data)


def sync(file: Any) -> None:
    """Write the contents of a file to permanent storage. Its name is durable only after :func:`sync_folder`."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Write a folder's entries to permanent storage, so that creations, renames and removals in it survive a power loss."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder)) from error
    finally:
        os.close(descriptor)


def mkdir(path: Path) -> None:
    """Create a folder. It is no error if the folder exists."""
    path.mkdir(exist_ok=True)


def make_folders(path: Path) -> None:
    """Create ``path`` and its missing parents. The entry of each is synced, so that the folder itself survives a power loss."""
    if path.is_dir():
        return
    make_folders(path.parent)
    mkdir(path)
    sync_folder(path.parent)


def rename(old: Path, new: Path) -> None:
    """Rename a file or a folder. A file or an empty folder of the new name is replaced, in one step."""
    old.rename(new)


def unlink(path: Path) -> None:
    """Remove a file, or a symbolic link without its target. It is no error if ``path`` is missing."""
    path.unlink(missing_ok=True)


def rmdir(path: Path) -> None:
    """Remove an empty folder."""
    path.rmdir()


def remove_tree(path: Path) -> None:
    """Remove a folder and its contents, a file, or a symbolic link without its target. No error if ``path`` is missing."""
    if not path.is_dir() or path.is_symlink():
        unlink(path)
        return
    for inside in path.iterdir():
        remove_tree(inside)
    rmdir(path)


_DISK_KINDS = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def kind_of(status: os.stat_result) -> str:
    """What a path is if it is no regular file, such as "a named pipe"; empty for a regular file."""
    return next((name for test, name in _DISK_KINDS if test(status.st_mode)), "")


def open_regular(path: Path, nbytes: int | None = None) -> Any:
    """Open a regular file for unbuffered reading. Nothing else is opened: a pipe would hang, a device may act, a link may leave
    the folder.

    Args:
        path: the file.
        nbytes: the size that the file must have; None accepts any.

    Raises:
        CheckpointError: ``path`` is no regular file, or has another size.
        OSError: it is missing or cannot be opened.
    """
    kind = kind_of(path.lstat())
    if not kind:  # The flags serve if another process replaces the file now.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        status = os.fstat(descriptor)
        kind = kind_of(status)
        if not kind and nbytes in (None, status.st_size):
            return os.fdopen(descriptor, "rb", buffering=0)
        os.close(descriptor)
        if not kind:
            raise CheckpointError(f"{path} has {status.st_size} bytes, expected {nbytes}")
    raise CheckpointError(f"{path} is no regular file: it is {kind}; expected a file that checkpoint.save wrote")
