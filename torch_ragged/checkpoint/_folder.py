"""The folder of a run's checkpoints: the names in it, and which checkpoints are complete.

A checkpoint is a folder ``step-00000120``. Nothing here looks at the contents of tensors. Three endings mark other folders:

- ``.incomplete``: a writer is writing it, or died while it wrote. The name has the token of the writer, as in
  ``step-00000120.0123456789abcdef.incomplete``: no two writers share a working folder.
- ``.deleting``: it is being removed.
- ``.replaced``: a complete checkpoint whose step was saved again. It counts only if ``step-00000120`` itself is not complete.

Each folder may be a symbolic link. Then the link is renamed or removed, never its target.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from torch_ragged.checkpoint import _disk
from torch_ragged.checkpoint._background import wait_for_save
from torch_ragged.checkpoint._errors import CheckpointError, on_all
from torch_ragged.checkpoint._files import check_blocks, check_size
from torch_ragged.checkpoint._manifest import MANIFEST, read_manifest

__all__ = [
    "complete_in",
    "folder_of",
    "incomplete_of",
    "keep",
    "latest",
    "publish",
    "refuse_other_folders",
    "remove",
    "remove_leftovers",
    "checkpoint_at",
]

_logger = logging.getLogger("torch_ragged.checkpoint")
_STEP_NAME = re.compile(r"step-(\d{8,})((\.[0-9a-f]{16})?\.replaced)?")
_LEFT = re.compile(r"(step-\d{8,}|.+(?=\.[0-9a-f]{16}\.))(\.(?P<token>[0-9a-f]{16}))?(\.replaced)?(\.incomplete|\.deleting)+")
_INCOMPLETE, _REPLACED, _DELETING = ".incomplete", ".replaced", ".deleting"


def folder_of(path: Path, step: int) -> Path:
    """The folder of the checkpoint of ``step``."""
    return path / f"step-{step:08d}"


def incomplete_of(folder: Path, token: str) -> Path:
    """The folder that a writer with ``token`` writes the checkpoint ``folder`` to before it is complete."""
    return folder.with_name(f"{folder.name}.{token}{_INCOMPLETE}")


def _replaced_in(folder: Path) -> list[Path]:
    """The folders that were ``folder`` before its step was saved again."""
    name = re.compile(re.escape(folder.name) + r"(\.[0-9a-f]{16})?" + re.escape(_REPLACED))
    return [path for path in folder.parent.iterdir() if name.fullmatch(path.name)]


def complete_in(path: Path) -> list[Path]:
    """The complete checkpoints in ``path``, oldest first, one per step. Checks manifests and file sizes, not checksums."""
    found: dict[int, Path] = {}
    # In descending order .replaced comes before the folder that replaces it, which then overwrites it in ``found``.
    for folder in sorted(path.iterdir(), reverse=True) if path.is_dir() else ():
        match = _STEP_NAME.fullmatch(folder.name)
        if match and _is_complete(folder):
            found[int(match[1])] = folder
    return [found[step] for step in sorted(found)]


def _is_complete(folder: Path) -> bool:
    try:
        manifest = read_manifest(folder)
    except CheckpointError:
        return False
    return not any(check_size(folder, name, record) for name, record in manifest.files.items())


def latest(path: str | os.PathLike[str], *, complete: bool = False) -> Path | None:
    """The checkpoint with the highest step in the folder ``path`` that has all its files; None if there is none.

    A checkpoint is skipped if a file is missing or truncated, or if its manifest cannot be read. :func:`load` verifies
    checksums, too, and raises if bytes were changed. No communication: while a save runs, ranks may get different answers.
    Therefore pass the folder to :func:`load`, which lets rank 0 choose.

    Args:
        path: the folder of the run's checkpoints.
        complete: also skip checkpoints with wrong checksums. This reads whole checkpoints, the newest first, until one is
            right. A job that must go on after a damage calls ``load(latest(path, complete=True), state)``. If only rank 0 calls
            it, the others may pass ``path``: :func:`load` takes what rank 0 passes.
    """
    found = reversed(complete_in(Path(path)))
    return next((folder for folder in found if not complete or _has_its_checksums(folder)), None)


def _has_its_checksums(folder: Path) -> bool:
    try:
        return not any(check_blocks(folder / name, record) for name, record in read_manifest(folder).files.items())
    except CheckpointError:  # keep() may have removed it meanwhile.
        return False


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
    wait_for_save()

    def remove_old() -> None:
        if dist.is_initialized() and dist.get_rank(process_group) != 0:
            return
        old_ones = complete_in(folder)[:-n]
        if old_ones:
            _disk.sync_folder(folder)  # The newest may have its name since a moment, from a writer that died before its sync.
        for old in old_ones:
            for path in [old, *_replaced_in(old)]:
                remove(path)

    on_all(remove_old, f"removing old checkpoints in {folder}", process_group)
    return complete_in(folder)[-n:]


def checkpoint_at(path: Path) -> Path:
    """The checkpoint to read: ``path`` if it is one, or the latest complete checkpoint in it.

    Raises:
        CheckpointError: there is no complete checkpoint. The text says why.
    """
    if (path / MANIFEST).exists():
        return path
    found = latest(path)
    if found is not None:
        step = int(_STEP_NAME.fullmatch(found.name)[1])  # type: ignore[index]
        for name in sorted(other.name for other in path.iterdir()):
            if (match := _STEP_NAME.fullmatch(name)) and int(match[1]) > step:
                _logger.warning("%s is damaged: a file of it is missing or truncated. %s is used", path / name, found)
        return found
    if not path.is_dir():
        raise CheckpointError(f"{path} is no folder: expected a checkpoint, or a folder of checkpoints")
    damaged = [folder for folder in sorted(path.iterdir()) if _STEP_NAME.fullmatch(folder.name)]
    if damaged:
        files = read_manifest(damaged[-1]).files  # If the manifest is the problem, this raises an error that says so.
        problems = list(filter(None, (check_size(damaged[-1], name, record) for name, record in files.items())))
        raise CheckpointError("; ".join(problems) or f"{damaged[-1]} was incomplete and is complete now: load again")
    if (path / ".metadata").exists():
        read_manifest(path)  # Raises: DCP wrote this checkpoint without a manifest, and the error names dcp.load.
    raise CheckpointError(f"{path} holds no complete checkpoint: expected folders step-<number> that checkpoint.save wrote")


def refuse_other_folders(names: Sequence[tuple[str, str]], what: str) -> None:
    """Raise if ranks pass different folders.

    Args:
        names: each rank's name of the folder as it was given, and without symbolic links. Hosts may mount it differently.
        what: the action that fails, for the text of the error.

    Raises:
        CheckpointError: both names differ between ranks.
    """
    if len({given for given, _ in names}) == 1 or len({real for _, real in names}) == 1:
        return
    first = names[0][0]
    rank, other = next((rank, given) for rank, (given, _) in enumerate(names) if given != first)
    raise CheckpointError(
        f"{what}: rank 0 has the folder {first}, rank {rank} has {other}. Ranks write one checkpoint together: pass the same "
        "folder on all ranks"
    )


def publish(incomplete: Path, folder: Path, token: str, check: Callable[[], None], older: Collection[Path] = ()) -> None:
    """Make a verified checkpoint visible with one rename.

    If a complete checkpoint has the name already, readers find one of the two at any moment: the old one is first renamed to
    ``.replaced``, where it still counts, and is removed last. After the rename of the new one, the checkpoint is saved: a later
    failure is only logged as a warning.

    Args:
        incomplete: the working folder of the writer.
        folder: the folder of the finished checkpoint.
        token: the token of the writer. A writer that was stopped and goes on never touches what has another token.
        check: raises if another writer took over.
        older: folders ``.replaced`` of this step that dead writers left. They are removed at the end.

    Raises:
        CheckpointError: another writer took over, and so it removed ``incomplete``. What it saved stays.
    """
    _disk.sync_folder(incomplete)  # Before the rename: after a power loss, a visible checkpoint must have all its files.
    check()
    replaced = folder.with_name(f"{folder.name}.{token}{_REPLACED}")
    with suppress(FileNotFoundError):
        _disk.rename(folder, replaced)
    try:
        _disk.rename(incomplete, folder)
    except OSError as error:  # If this process was stopped after the check, another writer has renamed the working folder.
        with suppress(OSError):
            _disk.rename(replaced, folder)  # Fails if there is a newer one, which then counts.
        check()
        raise CheckpointError(f"{incomplete} cannot be renamed to {folder}: {error.strerror}") from error
    try:
        _disk.sync_folder(folder.parent)
        for old in (replaced, *older):
            remove(old)  # After the sync: only then does the new name survive a power loss.
    except OSError as error:
        _logger.warning("%s is saved, but the cleanup after the save failed: %s", folder, error)


def remove_leftovers(path: Path, tokens: Collection[str], folder: Path) -> list[Path]:
    """Remove the unfinished folders of dead writers in the folder ``path``, and replaced checkpoints that no longer count.

    Call it while holding the lease. If a folder cannot be removed, a warning is logged: it blocks no other checkpoint.

    Args:
        path: the folder of the run's checkpoints.
        tokens: the tokens of living writers, whose folders stay.
        folder: the checkpoint that will be saved.

    Returns:
        the replaced checkpoints of the step of ``folder`` that still count. :func:`publish` removes them.
    """
    for left in list(path.iterdir()):
        match, name = _LEFT.fullmatch(left.name), _STEP_NAME.fullmatch(left.name)
        try:
            if match and match["token"] not in tokens:
                remove(left)
            elif name and name[2] and _is_complete(folder_of(path, int(name[1]))) and (name[3] or "")[1:] not in tokens:
                _disk.sync_folder(path)  # As in publish, which its writer did not finish.
                remove(left)
        except OSError as error:
            _logger.warning("%s is left from a failed save and cannot be removed: %s", left, error)
    return [left for left in _replaced_in(folder) if not any(token in left.name for token in tokens)]


def remove(folder: Path) -> None:
    """Remove a checkpoint or a working folder, a file, or a symbolic link without its target. No error if it is missing.

    A folder is renamed first: no reader sees a half-removed checkpoint, and its writer, if it still runs, cannot publish it.
    """
    if folder.is_dir() and not folder.is_symlink() and not folder.name.endswith(_DELETING):
        deleting = folder.with_name(folder.name + _DELETING)
        _disk.remove_tree(deleting)
        try:
            _disk.rename(folder, deleting)
        except FileNotFoundError:
            return
        folder = deleting
    _disk.remove_tree(folder)
