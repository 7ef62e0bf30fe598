"""``save``, ``async_save`` and ``load``."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from torch_ragged.checkpoint._errors import CheckpointError, agree, gather, raise_on_all
from torch_ragged.checkpoint._folder import discard, folder_of, incomplete_of, remove_leftovers, resolve
from torch_ragged.checkpoint._manifest import Manifest
from torch_ragged.checkpoint._matching import CheckingPlanner
from torch_ragged.checkpoint._reader import CheckpointReader
from torch_ragged.checkpoint._rng import rng_checksums
from torch_ragged.checkpoint._same import refuse_different
from torch_ragged.checkpoint._state import Contents, Redistribute, Request, TrainState
from torch_ragged.checkpoint._writer import CheckpointWriter, SavePlannerOfViews

__all__ = ["async_save", "load", "save"]

_REFUSED = (TypeError, ValueError)  # Of an argument, on the rank that was given it. The others get a CheckpointError.

_being_written: set[Path] = set()  # Folders that savers of this process write to in the background.


def save(
    path: str | os.PathLike[str],
    state: TrainState,
    *,
    read_back: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> Path:
    """Save ``state`` as the checkpoint ``step-<state.step>`` in the folder ``path``, which all ranks share.

    Each rank writes what it owns to one file; of replicas one writes. It is written beside, checksums are computed on
    the way, synced, verified (presence and size of every file, a place for every element of every tensor), and it gets its name
    as the last thing: whatever happens before, the checkpoint is not there, and what was there before is. One of the same step
    is replaced. Leftovers of writers that died are removed.

    No tensor travels between ranks and the shard is not copied: ranks exchange DCP's plan and the checksums, as objects.
    What one rank writes for all (steps, ``data_position``, scheduler, ``extra`` but for DTensors) must be the same on all
    ranks: digests are compared before anything is written. Without a process group it is a checkpoint of one process.

    Args:
        path: made if it is not there. One run writes to it at a time.
        state: what to save. Nothing is changed. What each rank has of its own goes into its ``per_rank``.
        read_back: read every file again and compare checksums, before it gets its name. :func:`load` always does; here it would
            find what the operating system does to bytes on their way.
        process_group: the ranks that save; all of them where None.

    Returns:
        the checkpoint.

    Raises:
        TypeError, ValueError: a field of ``state`` cannot be saved.
        CheckpointError: it could not be written, or ranks differ in what one writes for all. On every rank; the text names rank
            and file, or the value. Once the checkpoint has its name, a failed cleanup is a warning in the log.
    """
    tensors, writer = _prepare(Path(path), state, process_group)
    folder, what = writer.folder, f"saving {writer.folder}"
    writer.read_back = read_back
    try:
        with raise_on_all(what), _quiet():
            dcp.save(
                tensors,
                storage_writer=writer,
                planner=SavePlannerOfViews(),
                process_group=process_group,
                no_dist=not dist.is_initialized(),
            )
    except CheckpointError:
        agree(lambda: _clean_up(folder, process_group), what, process_group)  # Gone when the first rank raises.
        raise
    return folder


def async_save(
    path: str | os.PathLike[str],
    state: TrainState,
    *,
    kind: str = "thread",
    process_group: dist.ProcessGroup | None = None,
) -> Future[Path]:
    """:func:`save` in the background, from one staging copy of what this rank owns, which is made before it returns.

    Ranks exchange plan and checksums in the background too: give a ``process_group`` of its own, with a CPU backend, that
    nothing else uses meanwhile. Wait for the result before the next save.

    Args:
        path, state: as for :func:`save`.
        kind: "thread" or "process". A process needs no time of this interpreter, but starting it takes seconds, the first time.
        process_group: such a group; ``dist.new_group(backend="gloo")``. None only without a process group.

    Returns:
        a future of the checkpoint. Its ``result()`` raises a CheckpointError if it could not be written.

    Raises:
        TypeError, ValueError: a field of ``state`` cannot be saved, ``kind`` is unknown, or there is no ``process_group``.
        CheckpointError: it could not be started, or ranks differ in what one writes for all. On every rank.
    """
    kinds = {"thread": AsyncCheckpointerType.THREAD, "process": AsyncCheckpointerType.PROCESS}
    if kind not in kinds:
        raise ValueError(f"async_save kind must be one of {sorted(kinds)}, got {kind!r}")
    if dist.is_initialized() and process_group is None:
        raise ValueError("async_save needs a process group of its own: pass process_group=dist.new_group(backend='gloo')")
    tensors, writer = _prepare(Path(path), state, process_group)
    folder, what = writer.folder, f"saving {writer.folder}"
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=False, use_shared_memory=kind == "process", use_async_staging=False, use_non_blocking_copy=False
        )
    )
    _being_written.add(_key(folder))
    try:
        staged: Any = agree(lambda: stager.stage(tensors), what, process_group)  # A rank that fails later would be waited for.
        with _quiet():
            future: Any = dcp.async_save(
                staged,
                storage_writer=writer,
                planner=SavePlannerOfViews(),
                process_group=process_group,
                async_checkpointer_type=kinds[kind],
                async_stager=_Staged(),
                no_dist=not dist.is_initialized(),
            )
    except BaseException:
        _being_written.discard(_key(folder))
        stager.close()
        raise
    result: Future[Path] = Future()
    future.add_done_callback(lambda done: _finish(done, result, stager, what, folder))
    return result


class _Staged(AsyncStager):
    """DCP's stager, of what is staged already."""

    _synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict

    def synchronize_staging(self) -> None:
        pass

    def close(self) -> None:
        pass


def load(
    path: str | os.PathLike[str],
    state: TrainState,
    *,
    spread: bool = True,
    redistribute: Redistribute | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Manifest:
    """Fill ``state`` from a checkpoint, on any number of ranks, under any placements.

    Everything is checked before any parameter is changed: the manifest's version and checksum, presence, size and checksums of
    every file (bytes are shared out over the ranks), and that names, shapes and dtypes of model and optimizer states are those
    of the checkpoint. Then objects are unpickled and what is per rank is redistributed. If any of this fails on a rank,
    parameters and optimizer states of all ranks are as they were. Tensors are filled in place; the ``load_state_dict`` of the
    scheduler and the like are called last. An object that the checkpoint holds was pickled: load only what you trust.

    Args:
        path: a checkpoint, or a folder of them: then the latest complete one.
        state: parameters and optimizer states are filled in place; the other fields are set. A state without an optimizer or a
            scheduler leaves the saved ones out.
        spread: replicas (HSDP) read a share each and broadcast it, one broadcast per tensor and set of replicas: for storage
            that is slower than the network. False: everybody reads what it holds. Without effect with a ``process_group``.
        redistribute: what to do with ``state.per_rank`` at another number of ranks than saved it, by name: a function, which is
            called on each rank with the list of all saved ranks' states (what ``state_dict`` returned, or the value); it
            returns this rank's. Or None, which leaves this rank's as it is. Not used at the same number of ranks.
        process_group: the ranks that load; all of them where None.

    Returns:
        the manifest, which tells what was loaded.

    Raises:
        TypeError, ValueError: ``state`` holds what could not be saved.
        CheckpointError: there is no complete checkpoint, it is damaged, of a newer version or of another model, or ``per_rank``
            is of another number of ranks. On every rank; the text names the file, the parameter or the object.
    """
    what, functions = f"loading {Path(path)}", dict(redistribute or {})
    rank, ranks = _rank_of(process_group), dist.get_world_size(process_group) if dist.is_initialized() else 1
    agree(lambda: _check_load(state, functions), what, process_group, own=_REFUSED)
    # The checkpoint that rank 0 finds, on every rank: others might see a newer one already.
    found = gather(lambda: str(resolve(Path(path))) if rank == 0 else "", what, process_group)[0]
    reader = agree(lambda: CheckpointReader(found), what, process_group)
    reader.group = process_group
    metadata = agree(reader.read_metadata, what, process_group)
    request = Request(state, functions, reader.manifest, rank, ranks)
    planner = CheckingPlanner(reader.manifest, spread=spread and dist.is_initialized() and process_group is None)
    try:  # Another model is refused before every byte is read.
        agree(lambda: planner.set_up_planner(request.prepare(metadata), metadata), what, process_group)
        _fill(request, reader, planner, what)
    except BaseException:
        request.forget()
        raise
    agree(request.apply, what, process_group)
    return reader.manifest


def _fill(request: Request, reader: CheckpointReader, planner: CheckingPlanner, what: str) -> None:
    """Have DCP fill what is requested: objects first, which may turn out to be of no use, then tensors, in place."""

    def fill(state_dict: dict[str, Any], planner: DefaultLoadPlanner) -> None:
        dcp.load(
            state_dict,
            storage_reader=reader,
            planner=planner,
            process_group=reader.group,
            no_dist=not dist.is_initialized(),
        )

    with raise_on_all(what), _quiet():
        fill(request.objects, DefaultLoadPlanner())
        agree(request.unpack, what, reader.group)
        reader.verify = False  # All files are verified by now.
        fill(request.tensors, planner)
        planner.shares.exchange()


def _check_load(state: TrainState, redistribute: Redistribute) -> None:
    state.check()
    for name, function in redistribute.items():
        if name not in state.per_rank or not (function is None or callable(function)):
            raise ValueError(
                f"load redistribute must map names of TrainState.per_rank ({', '.join(state.per_rank) or 'it is empty'}) to "
                f"functions or None, got {name!r}: {function!r}"
            )


def _rank_of(group: dist.ProcessGroup | None) -> int:
    return dist.get_rank(group) if dist.is_initialized() else 0


def _prepare(path: Path, state: TrainState, group: dist.ProcessGroup | None) -> tuple[dict[str, Any], CheckpointWriter]:
    """What to save, and the writer; and a folder without leftovers of those who died."""
    what, rank = f"saving to {path}", _rank_of(group)
    agree(state.check, what, group, own=_REFUSED)
    contents = agree(lambda: Contents(state, rank), what, group)
    refuse_different(contents.shared, what, group)
    folder = folder_of(path, state.step)
    agree(lambda: _make_room(folder, rank), f"saving {folder}", group)
    manifest = Manifest(
        step=state.step,
        consumed_tokens=state.consumed_tokens,
        data_position=copy.deepcopy(state.data_position),  # Training goes on while a background save has not written it.
        objects=contents.names,
    )
    return contents.state_dict, CheckpointWriter(folder, manifest, rng_checksums(contents.rng))


def _make_room(folder: Path, rank: int) -> None:
    """Have rank 0 make the parent of ``folder`` and remove leftovers, of which none may be in the way."""
    if _key(folder) in _being_written:
        raise CheckpointError(f"{folder} is being written in the background: wait for the result of async_save first")
    if rank == 0:
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder.parent.resolve(), _being_written)
        discard(incomplete_of(folder))


def _key(folder: Path) -> Path:
    """Where a checkpoint is written, by a path that leads there through no link."""
    return incomplete_of(folder.parent.resolve() / folder.name)


def _clean_up(folder: Path, group: dist.ProcessGroup | None) -> None:
    """Rank 0 frees the disk space of a failed save; that it failed is what matters."""
    if _rank_of(group) == 0:
        with suppress(OSError):
            discard(incomplete_of(folder))


def _finish(done: Future[Any], result: Future[Path], stager: DefaultStager, what: str, folder: Path) -> None:
    """Pass on how a save in the background ended."""
    _being_written.discard(_key(folder))
    try:
        with suppress(Exception):
            stager.close()
        with raise_on_all(what):
            done.result()
    except CheckpointError as error:
        result.set_exception(error)
    except BaseException as error:  # Such as the end of the process that saves, or of a connection.
        failure = CheckpointError(f"{what}: {type(error).__name__}: {error}")
        failure.__cause__ = error
        result.set_exception(failure)
    else:
        result.set_result(folder)


@contextmanager
def _quiet() -> Iterator[None]:
    """DCP warns of a single process, and of names in a checkpoint that are not asked for: both are meant here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
