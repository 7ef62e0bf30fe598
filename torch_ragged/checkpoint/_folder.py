"""The folder of a run's checkpoints: names, and what is complete.

A checkpoint is a folder ``step-00000120``. Other names are never taken for one: ``.incomplete`` is being written, or was when
its writer died; ``.deleting`` is being removed. ``.replaced`` is a complete checkpoint whose step is being written anew; it
counts only while there is no other of its step. Each may be a symbolic link to a folder elsewhere: then only the link is
renamed or removed, never what it leads to.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path

import torch.distributed as dist

from torch_ragged.checkpoint._errors import CheckpointError, agree
from torch_ragged.checkpoint._files import check_size, sync_folder
from torch_ragged.checkpoint._manifest import MANIFEST, read_manifest

__all__ = ["complete_in", "discard", "folder_of", "incomplete_of", "keep", "latest", "publish", "remove_leftovers", "resolve"]

_logger = logging.getLogger("torch_ragged.checkpoint")
_NAME = re.compile(r"step-(\d{8,})(\.replaced)?")
_INCOMPLETE, _REPLACED, _DELETING = ".incomplete", ".replaced", ".deleting"


def folder_of(path: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` goes."""
    return path / f"step-{step:08d}"


def incomplete_of(folder: Path) -> Path:
    """Where it is written before it is complete."""
    return folder.with_name(folder.name + _INCOMPLETE)


def complete_in(path: Path) -> list[Path]:
    """The complete checkpoints in ``path``, oldest first, one per step. Manifest and sizes are checked, contents are not."""
    found: dict[int, Path] = {}
    for folder in (
        sorted(path.iterdir(), reverse=True) if path.is_dir() else ()
    ):  # .replaced comes before the one that replaces it.
        match = _NAME.fullmatch(folder.name)
        if match and _is_complete(folder):
            found[int(match[1])] = folder
    return [found[step] for step in sorted(found)]


def _is_complete(folder: Path) -> bool:
    try:
        manifest = read_manifest(folder)
    except CheckpointError:
        return False
    return not any(check_size(folder, name, record) for name, record in manifest.files.items())


def latest(path: str | os.PathLike[str]) -> Path | None:
    """The complete checkpoint with the highest step in the folder ``path``; None without any.

    One with a missing or truncated file, or without a readable manifest, is passed over. Contents are verified by :func:`load`.
    No communication: ranks that ask while another one writes may get different answers, so let :func:`load` choose.
    """
    complete = complete_in(Path(path))
    return complete[-1] if complete else None


def keep(path: str | os.PathLike[str], n: int, *, process_group: dist.ProcessGroup | None = None) -> list[Path]:
    """Remove all but the ``n`` newest complete checkpoints in the folder ``path``; call it on every rank.

    Rank 0 removes; what other programs put there stays, and so does what a symbolic link leads to. One small object all-gather.

    Returns:
        those that are kept, oldest first.

    Raises:
        ValueError: ``n`` is less than 1.
        CheckpointError: one could not be removed.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"keep expects a number of checkpoints >= 1, got {n!r}")
    folder = Path(path)

    def remove() -> None:
        if dist.is_initialized() and dist.get_rank(process_group) != 0:
            return
        for old in complete_in(folder)[:-n]:
            _remove(old)
            _remove(old.with_name(old.name + _REPLACED))

    agree(remove, f"removing old checkpoints in {folder}", process_group)
    return complete_in(folder)[-n:]


def resolve(path: Path) -> Path:
    """``path`` if it is a checkpoint itself, else the latest one in it.

    Raises:
        CheckpointError: there is none.
    """
    if (path / MANIFEST).exists():
        return path
    found = latest(path)
    if found is not None:
        return found
    if not path.is_dir():
        raise CheckpointError(f"{path} is no folder: expected a checkpoint, or a folder of checkpoints")
    damaged = [folder for folder in sorted(path.iterdir()) if _NAME.fullmatch(folder.name)]
    if damaged:
        files = read_manifest(damaged[-1]).files  # Its error says more.
        problems = list(filter(None, (check_size(damaged[-1], name, record) for name, record in files.items())))
        raise CheckpointError("; ".join(problems) or f"{damaged[-1]} was not complete a moment ago: try again")
    if (path / ".metadata").exists():
        read_manifest(path)
    raise CheckpointError(f"{path} holds no complete checkpoint: expected folders step-<number> that checkpoint.save wrote")


def publish(incomplete: Path, folder: Path) -> None:
    """Give a verified checkpoint its name: one rename. One of the same name stays complete under another until then.

    Once it has its name, it is saved: what fails after that is a warning in the log.
    """
    sync_folder(incomplete)
    replaced = folder.with_name(folder.name + _REPLACED)
    if os.path.lexists(folder):
        _remove(replaced)
        folder.rename(replaced)
    incomplete.rename(folder)
    try:
        sync_folder(folder.parent)
        _remove(replaced)  # Only if the new name is on permanent storage.
    except OSError as error:
        _logger.warning("%s is saved, but cleaning up after it failed: %s", folder, error)


def remove_leftovers(path: Path, in_use: set[Path]) -> None:
    """Remove what writers that died left in the folder ``path``, but for folders ``in_use``.

    What cannot be removed is a warning in the log: it is in the way of no other checkpoint.
    """
    for left in path.iterdir():
        if re.fullmatch(rf"step-\d{{8,}}({_REPLACED})?({_INCOMPLETE}|{_DELETING})", left.name) and left not in in_use:
            try:
                discard(left)
            except OSError as error:
                _logger.warning("%s is left of a save that failed and cannot be removed: %s", left, error)


def _remove(folder: Path) -> None:
    """Remove a checkpoint; it is none from the first moment on."""
    if folder.is_dir() and not folder.is_symlink():
        deleting = folder.with_name(folder.name + _DELETING)
        discard(deleting)
        folder.rename(deleting)
        folder = deleting
    discard(folder)


def discard(path: Path) -> None:
    """Remove a folder with all that is in it, a file, or a symbolic link but not its target; fine if there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
