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
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from torch_ragged.checkpoint._errors import CheckpointError, agree, from_ranks, raise_on_all
from torch_ragged.checkpoint._folder import discard, folder_of, incomplete_of, remove_leftovers, resolve
from torch_ragged.checkpoint._manifest import Manifest
from torch_ragged.checkpoint._matching import CheckingPlanner
from torch_ragged.checkpoint._reader import CheckpointReader
from torch_ragged.checkpoint._rng import rng_checksums, rng_request, rng_states, set_rng
from torch_ragged.checkpoint._state import Request, TrainState, objects_of, state_dict_of
from torch_ragged.checkpoint._writer import CheckpointWriter, SavePlannerOfViews

__all__ = ["async_save", "load", "save"]

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
    Without a process group it is a checkpoint of one process.

    Args:
        path: made if it is not there. One run writes to it at a time.
        state: what to save. Nothing is changed.
        read_back: read every file again and compare checksums, before it gets its name. :func:`load` always does; here it would
            find what the operating system does to bytes on their way.
        process_group: the ranks that save; all of them where None.

    Returns:
        the checkpoint.

    Raises:
        TypeError, ValueError: a field of ``state`` cannot be saved.
        CheckpointError: it could not be written. On every rank; the text names rank and file.
    """
    state.check()
    folder = folder_of(Path(path), state.step)
    what = f"saving {folder}"
    tensors, writer = agree(lambda: _prepare(folder, state, process_group), what, process_group)
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
        CheckpointError: it could not be started.
    """
    state.check()
    kinds = {"thread": AsyncCheckpointerType.THREAD, "process": AsyncCheckpointerType.PROCESS}
    if kind not in kinds:
        raise ValueError(f"async_save kind must be one of {sorted(kinds)}, got {kind!r}")
    if dist.is_initialized() and process_group is None:
        raise ValueError("async_save needs a process group of its own: pass process_group=dist.new_group(backend='gloo')")
    folder = folder_of(Path(path), state.step)
    what = f"saving {folder}"
    tensors, writer = agree(lambda: _prepare(folder, state, process_group), what, process_group)
    _being_written.add(_key(folder))
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=False, use_shared_memory=kind == "process", use_async_staging=False, use_non_blocking_copy=False
        )
    )
    try:
        with _quiet():
            future: Any = dcp.async_save(
                tensors,
                storage_writer=writer,
                planner=SavePlannerOfViews(),
                process_group=process_group,
                async_checkpointer_type=kinds[kind],
                async_stager=stager,
                no_dist=not dist.is_initialized(),
            )
    except BaseException:
        _being_written.discard(_key(folder))
        stager.close()
        raise
    result: Future[Path] = Future()
    future.add_done_callback(lambda done: _finish(done, result, stager, what, folder))
    return result


def load(
    path: str | os.PathLike[str],
    state: TrainState,
    *,
    spread: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> Manifest:
    """Fill ``state`` from a checkpoint, on any number of ranks, under any placements.

    Everything is checked before any parameter is changed: the manifest's version and checksum, presence, size and checksums of
    every file (bytes are shared out over the ranks), and that names, shapes and dtypes of model and optimizer states are those
    of the checkpoint. Tensors are filled in place. An object that the checkpoint holds was pickled: load only what you trust.

    Args:
        path: a checkpoint, or a folder of them: then the latest complete one.
        state: parameters and optimizer states are filled in place; the other fields are set. A state without an optimizer or a
            scheduler leaves the saved ones out.
        spread: replicas (HSDP) read a share each and broadcast it, one broadcast per tensor and set of replicas: for storage
            that is slower than the network. False: everybody reads what it holds. Without effect with a ``process_group``.
        process_group: the ranks that load; all of them where None.

    Returns:
        the manifest, which tells what was loaded.

    Raises:
        TypeError, ValueError: ``state`` holds what could not be saved.
        CheckpointError: there is no complete checkpoint, it is damaged, of a newer version or of another model. On every rank;
            the text names the file or the parameter.
    """
    state.check()
    what = f"loading {Path(path)}"
    folder = _agreed_folder(Path(path), what, process_group)
    reader = agree(lambda: CheckpointReader(folder), what, process_group)
    reader.group = process_group
    rank = dist.get_rank(process_group) if dist.is_initialized() else 0
    metadata = agree(reader.read_metadata, what, process_group)
    request = agree(lambda: Request(state, reader.manifest, metadata), what, process_group)
    try:
        rng = agree(lambda: rng_request(state.rng, reader.manifest, metadata, rank), what, process_group)
        wanted = {**request.state_dict, "rng": rng}
        planner = CheckingPlanner(reader.manifest, spread=spread and dist.is_initialized() and process_group is None)
        with raise_on_all(what), _quiet():
            dcp.load(
                wanted, storage_reader=reader, planner=planner, process_group=process_group, no_dist=not dist.is_initialized()
            )
            planner.shares.exchange()
    except BaseException:
        request.forget()
        raise
    agree(request.apply, what, process_group)
    (states,) = rng.values()
    set_rng(state.rng, states, reader.manifest, rank)
    return reader.manifest


def _prepare(folder: Path, state: TrainState, group: dist.ProcessGroup | None) -> tuple[dict[str, Any], CheckpointWriter]:
    """What to save, and the writer; and a folder without leftovers of those who died."""
    rank = dist.get_rank(group) if dist.is_initialized() else 0
    if _key(folder) in _being_written:
        raise CheckpointError(f"{folder} is being written in the background: wait for the result of async_save first")
    if rank == 0:
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder.parent.resolve(), _being_written)
        discard(incomplete_of(folder))
    states = rng_states(state.rng)
    manifest = Manifest(
        step=state.step,
        consumed_tokens=state.consumed_tokens,
        data_position=copy.deepcopy(state.data_position),  # Training goes on while a background save has not written it.
        objects=objects_of(state),
    )
    writer = CheckpointWriter(folder, manifest, rng_checksums(states))
    return {**state_dict_of(state), "rng": {str(rank): states}}, writer


def _key(folder: Path) -> Path:
    """Where a checkpoint is written, by a path that leads there through no link."""
    return incomplete_of(folder.parent.resolve() / folder.name)


def _clean_up(folder: Path, group: dist.ProcessGroup | None) -> None:
    """Rank 0 frees the disk space of a failed save; that it failed is what matters."""
    if not dist.is_initialized() or dist.get_rank(group) == 0:
        with suppress(OSError):
            discard(incomplete_of(folder))


def _finish(done: Future[Any], result: Future[Path], stager: DefaultStager, what: str, folder: Path) -> None:
    """Pass on how a save in the background ended."""
    _being_written.discard(_key(folder))
    stager.close()
    try:
        with raise_on_all(what):
            done.result()
    except BaseException as error:
        result.set_exception(error)
    else:
        result.set_result(folder)


def _agreed_folder(path: Path, what: str, group: dist.ProcessGroup | None) -> Path:
    """The checkpoint that rank 0 finds, on every rank: others might see a newer one already. One small broadcast."""
    if not dist.is_initialized():
        return agree(lambda: resolve(path), what, group)
    answer: list[Any] = [None, None]
    if dist.get_rank(group) == 0:
        try:
            answer[0] = str(resolve(path))
        except CheckpointError as error:
            answer[1] = str(error)
    source = 0 if group is None else dist.get_global_rank(group, 0)
    dist.broadcast_object_list(answer, src=source, group=group)
    if answer[1] is not None:
        raise CheckpointError(from_ranks(what, {0: answer[1]}))
    return Path(answer[0])


@contextmanager
def _quiet() -> Iterator[None]:
    """DCP warns of a single process, and of names in a checkpoint that are not asked for: both are meant here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
