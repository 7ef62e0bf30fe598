"""The folder of a run's checkpoints: the names in it, and which checkpoints are complete.

A checkpoint is a folder ``step-00000120``. Nothing here looks at the contents of tensors. Three endings mark other folders:

- ``.incomplete``: a writer is writing it, or died while it wrote.
- ``.deleting``: it is being removed.
- ``.replaced``: a complete checkpoint whose step was saved again. It counts only if ``step-00000120`` itself is not complete.

Each folder may be a symbolic link. Then the link is renamed or removed, never its target.
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
    """The folder of the checkpoint of ``step``."""
    return path / f"step-{step:08d}"


def incomplete_of(folder: Path) -> Path:
    """The folder that the checkpoint ``folder`` is written to before it is complete."""
    return folder.with_name(folder.name + _INCOMPLETE)


def complete_in(path: Path) -> list[Path]:
    """The complete checkpoints in ``path``, oldest first, one per step. Checks manifests and file sizes, not checksums."""
    found: dict[int, Path] = {}
    # In descending order .replaced comes before the folder that replaces it, which then overwrites it in ``found``.
    for folder in sorted(path.iterdir(), reverse=True) if path.is_dir() else ():
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
    """The complete checkpoint with the highest step in the folder ``path``; None if there is no complete one.

    A checkpoint is skipped if a file is missing or truncated, or if its manifest cannot be read. :func:`load` verifies
    checksums. No communication: while a save runs, ranks may get different answers. Therefore pass the folder to :func:`load`,
    which lets rank 0 choose.
    """
    complete = complete_in(Path(path))
    return complete[-1] if complete else None


def keep(path: str | os.PathLike[str], n: int, *, process_group: dist.ProcessGroup | None = None) -> list[Path]:
    """Remove all complete checkpoints in the folder ``path`` except the ``n`` newest. Call it on every rank.

    Rank 0 removes. Other files in the folder stay, and so do the targets of symbolic links. Issues one small all-gather of
    objects.

    Args:
        path: the folder of the run's checkpoints.
        n: how many checkpoints to keep.
        process_group: the ranks that call; None is all ranks.

    Returns:
        the checkpoints that are kept, oldest first.

    Raises:
        ValueError: ``n`` is not an integer of at least 1.
        CheckpointError: a checkpoint could not be removed. Every rank raises it.
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
    """The checkpoint to read: ``path`` if it is one, or the latest complete checkpoint in it.

    Raises:
        CheckpointError: there is no complete checkpoint. The text says why.
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
        files = read_manifest(damaged[-1]).files  # If the manifest is the problem, this raises an error that says so.
        problems = list(filter(None, (check_size(damaged[-1], name, record) for name, record in files.items())))
        raise CheckpointError("; ".join(problems) or f"{damaged[-1]} was incomplete and is complete now: load again")
    if (path / ".metadata").exists():
        read_manifest(path)  # Raises: DCP wrote this checkpoint without a manifest, and the error names dcp.load.
    raise CheckpointError(f"{path} holds no complete checkpoint: expected folders step-<number> that checkpoint.save wrote")


def publish(incomplete: Path, folder: Path) -> None:
    """Make a verified checkpoint visible with one rename.

    If a complete checkpoint has the name already, readers find one of the two at any moment: the old one is first renamed to
    ``.replaced``, where it still counts, and is removed last. After the rename of the new one, the checkpoint is saved: a later
    failure is only logged as a warning.
    """
    sync_folder(incomplete)  # Before the rename: after a power loss, a visible checkpoint must have all its files.
    replaced = folder.with_name(folder.name + _REPLACED)
    if os.path.lexists(folder):
        _remove(replaced)
        folder.rename(replaced)
    incomplete.rename(folder)
    try:
        sync_folder(folder.parent)
        _remove(replaced)  # After the sync: only then does the new name survive a power loss.
    except OSError as error:
        _logger.warning("%s is saved, but the cleanup after the save failed: %s", folder, error)


def remove_leftovers(path: Path, in_use: set[Path]) -> None:
    """Remove the unfinished folders of dead writers in the folder ``path``, except the folders ``in_use``.

    If one cannot be removed, a warning is logged: it blocks no other checkpoint.
    """
    for left in path.iterdir():
        if re.fullmatch(rf"step-\d{{8,}}({_REPLACED})?({_INCOMPLETE}|{_DELETING})", left.name) and left not in in_use:
            try:
                discard(left)
            except OSError as error:
                _logger.warning("%s is left from a failed save and cannot be removed: %s", left, error)


def _remove(folder: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that no reader sees a half-removed checkpoint."""
    if folder.is_dir() and not folder.is_symlink():
        deleting = folder.with_name(folder.name + _DELETING)
        discard(deleting)
        folder.rename(deleting)
        folder = deleting
    discard(folder)


def discard(path: Path) -> None:
    """Remove a folder and its contents, a file, or a symbolic link without its target. No error if ``path`` is missing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
