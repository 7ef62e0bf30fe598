"""``save``, ``async_save`` and ``load``: the calls of a training script.

Every step that can fail on one rank runs inside ``on_all`` or ``raise_on_all``: no rank starts a collective that another rank,
after an error, does not join.
"""

from __future__ import annotations

import copy
import os
import warnings
import weakref
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from torch_ragged._ranks.agreement import agree as agree_in
from torch_ragged._ranks.agreement import before_groups
from torch_ragged._ranks.comparison import compare_before_checkpoint
from torch_ragged._ranks.groups import device_of_messages
from torch_ragged.checkpoint._background import BackgroundSave, wait_for_save
from torch_ragged.checkpoint._base import HeldBase, base_of_save, digests_of, refuse_other_base, remember_base
from torch_ragged.checkpoint._data import ObjectPlanner
from torch_ragged.checkpoint._errors import CheckpointError, gather, on_all, raise_on_all, without_warning
from torch_ragged.checkpoint._folder import checkpoint_at, complete_in, folder_of, refuse_other_folders
from torch_ragged.checkpoint._layouts import boxes_of, plain_state, refuse_gaps, relaid
from torch_ragged.checkpoint._manifest import Manifest, describe, read_manifest
from torch_ragged.checkpoint._matching import CheckingPlanner
from torch_ragged.checkpoint._reader import CheckpointReader, damage
from torch_ragged.checkpoint._rng import rng_checksums
from torch_ragged.checkpoint._same import refuse_different
from torch_ragged.checkpoint._state import Contents, Redistribute, Request, TrainState, has_lost
from torch_ragged.checkpoint._writer import CheckpointWriter, SavePlannerOfViews
from torch_ragged.fsdp._groups import check_replicas_of

__all__ = ["async_save", "load", "save"]

# The rank that was given a bad argument raises one of these types. The other ranks raise a CheckpointError.
_REFUSED = (TypeError, ValueError)

_SAVER_KINDS = {"thread": AsyncCheckpointerType.THREAD, "process": AsyncCheckpointerType.PROCESS}

_last_saves: dict[Path, tuple[int, int]] = {}  # By the folder of checkpoints: TrainState.step and the steps at the last save.
_steps_taken: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()  # Since the first save.


def save(
    path: str | os.PathLike[str],
    state: TrainState,
    *,
    read_back: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> Path:
    """Save ``state`` as the checkpoint ``step-<state.step>`` in the folder ``path``, which all ranks share.

    Each rank writes its shards to one file in a folder ``*.incomplete``. Of replicas, one writes. The writer computes checksums
    while it writes, syncs the files to disk, and verifies that every file has its size and that the files hold every element of
    every tensor. The last action renames the folder. Until this rename, readers see the previous checkpoint, or none. A
    checkpoint of the same step is replaced; if this process has trained since it saved that step, a warning says so. Unfinished
    folders of writers that died are removed. If a save of this process is in flight in the background, this one waits for it.
    While it saves, rank 0 holds a lease of ``path``, a file ``writer-*.lease``: if another job holds one, no rank writes
    anything.

    Ranks exchange DCP's plan, digests and checksums, as objects. No tensor is sent between ranks, and no shard is copied. Some
    values are written by one rank for all: ``step``, ``consumed_tokens``, ``data_position``, ``scheduler``, and ``extra``
    without its DTensors. They must be equal on all ranks; their digests are compared before anything is written. Without a
    process group, this process saves a checkpoint of one rank.

    Args:
        path: the folder of the run's checkpoints, the same on all ranks. It is created if it does not exist.
        state: what to save. Nothing in it is changed. Values that differ between ranks belong in its ``per_rank``.
        read_back: read every file again and compare checksums before the rename. This finds bytes that the operating system or
            the storage changed. :func:`load` always compares checksums.
        process_group: the ranks that save; None is all ranks.

    Returns:
        the folder of the checkpoint.

    Raises:
        TypeError, ValueError: ``state`` is no TrainState, or a field of it has a wrong type; or replicas (HSDP) hold other
            parameters, of which the checkpoint would have those of one: see ``check_replicas`` of ``fully_shard``.
        CheckpointError: the checkpoint could not be written, or ranks differ in ``path`` or in a value that one rank writes for
            all, or a value is more than data, which :func:`load` would refuse. Every rank raises it; the text names the rank
            and the file, or the value. Or another job saves to ``path``: the
            text names its host and process. Or a rank died: the text names it, and the process group cannot be used again. If a
            cleanup fails after the rename, ``save`` succeeds and logs a warning.
    """
    tensors, writer = _prepare(path, state, process_group)
    folder, what = writer.folder, f"saving {writer.folder}"
    writer.read_back = read_back
    try:
        with raise_on_all(what, process_group, lambda: writer.doing), without_warning():
            dcp.save(
                tensors,
                storage_writer=writer,
                planner=SavePlannerOfViews(),
                process_group=process_group,
                no_dist=not dist.is_initialized(),
            )
    except CheckpointError as error:
        if error.group_is_broken:
            _clean_up(writer, process_group)
        else:  # A collective, so that no rank raises before rank 0 has removed the folder: the caller may save again at once.
            on_all(lambda: _clean_up(writer, process_group), what, process_group)
        raise
    return folder


def async_save(
    path: str | os.PathLike[str],
    state: TrainState,
    *,
    kind: str = "thread",
    process_group: dist.ProcessGroup | None = None,
) -> Future[Path]:
    """Save as :func:`save` does, but in the background. Training may go on as soon as ``async_save`` returns.

    ``async_save`` copies the shards of this rank to the CPU before it returns. The background save issues collectives too, for
    the plan and the checksums. Therefore it needs a separate ``process_group`` with a CPU backend, which the program does not
    use until the save has ended.

    One save is in flight at a time: the next ``async_save``, ``save``, ``load`` or ``keep`` of this process waits for it first.
    So do ``dist.destroy_process_group`` and the end of the program, also after an exception, ``sys.exit`` or Ctrl-C. A signal
    that ends the process at once, or ``os._exit``, ends the save too: readers see the previous checkpoint.

    A save that fails logs its step and the error. If the program has not asked for its ``result()`` or ``exception()`` by then,
    the program ends with exit code 1.

    Args:
        path, state: as for :func:`save`.
        kind: "thread" or "process". A process does not compete with training for this interpreter's lock, but the first start
            of the process takes seconds.
        process_group: the separate group, such as ``dist.new_group(backend="gloo")``. None is legal only if torch.distributed
            is not initialized.

    Returns:
        a future of the checkpoint's folder. If the save fails, ``result()`` raises a CheckpointError.

    Raises:
        TypeError, ValueError: ``state`` is no TrainState, a field of it cannot be saved, ``kind`` is unknown, or
            ``process_group`` is missing.
        CheckpointError: the save could not be started, or a value cannot be saved, as for :func:`save`. Every rank raises it.
    """
    with before_groups("async_save"):
        if dist.is_initialized() and process_group is None:
            raise ValueError(
                "async_save got no process_group. It needs a process group of its own, which training does not use: pass "
                "process_group=dist.new_group(backend='gloo')"
            )
    wait_for_save()  # It uses the group, too.
    if process_group is not None:  # A rank without one is found here: no other rank can ask it in its group.
        agree_in([process_group], device_of_messages(process_group), "async_save", "", None)
    tensors, writer = _prepare(path, state, process_group, kind)
    what = f"saving {writer.folder}"
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=False, use_shared_memory=kind == "process", use_async_staging=False, use_non_blocking_copy=False
        )
    )
    result = BackgroundSave(state.step)
    try:
        # Staged here and not by DCP: if staging failed inside dcp.async_save on one rank, the other ranks would hang.
        staged: Any = on_all(
            lambda: relaid(stager.stage(plain_state(tensors, with_dtensors=False)), tensors), what, process_group
        )
        with without_warning():
            future: Any = dcp.async_save(
                staged,
                storage_writer=writer,
                planner=SavePlannerOfViews(),
                process_group=process_group,
                async_checkpointer_type=_SAVER_KINDS[kind],
                async_stager=_Staged(),
                no_dist=not dist.is_initialized(),
            )
    except BaseException:
        result.forget()
        stager.close()
        raise
    future.add_done_callback(lambda done: _finish_save(done, result, stager, what, writer, process_group))
    return result


class _Staged(AsyncStager):
    """A stager for ``dcp.async_save`` that copies nothing: ``async_save`` above has staged the tensors already."""

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
    trust: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> Manifest:
    """Fill ``state`` from a checkpoint, on any number of ranks, under any placements.

    ``load`` checks everything before it changes a parameter: the manifest's version and checksum; presence, size and checksums
    of every file (each rank reads a share of the bytes); and that names, shapes and dtypes of the model's tensors and the
    optimizer's states equal the saved ones. Then it unpickles objects and redistributes ``per_rank`` values. If one of these
    steps fails on one rank, parameters and optimizer states of all ranks keep their values. After that, tensors are filled in
    place. Each ``load_state_dict``, such as the scheduler's, is called last.

    Loading runs no code of the checkpoint unless ``trust`` is True. The manifest and DCP's metadata are read as data; objects
    (the scheduler, ``extra``, ``per_rank``) are read by torch's ``weights_only`` unpickler, which knows tensors, containers,
    numbers and strings. Files that are no regular files, such as links and pipes, are refused and never opened.

    Args:
        path: a checkpoint, or a folder of checkpoints. Of a folder, the latest that has all its files is loaded. If it is
            damaged, the error names the newest complete one: no training silently goes on from an older step.
        state: parameters and optimizer states are filled in place; the other fields are set. If ``state`` has no optimizer or
            no scheduler, the saved one is not loaded.
        spread: if True, each replica (HSDP) reads a share and broadcasts it to the other replicas, one broadcast per tensor.
            This helps if the storage is slower than the network. If False, each rank reads all that it holds. Ignored if
            ``process_group`` is given.
        redistribute: how to load ``state.per_rank`` at another number of ranks than the checkpoint was saved with. Maps a name
            of ``per_rank`` to a function or to None. The function runs on each rank. It takes the list of all saved ranks'
            states (each the result of ``state_dict``, or the value) and returns this rank's. None keeps this rank's value.
            Ignored at the same number of ranks.
        trust: if True, unpickle objects of any type. A pickle can run any code: pass True only for a checkpoint that you trust.
        process_group: the ranks that load; None is all ranks.

    Returns:
        the manifest of the checkpoint that was loaded.

    Raises:
        TypeError, ValueError: ``state`` is no TrainState, or a field of it or ``redistribute`` has a wrong type or value.
        CheckpointError: no complete checkpoint was found; the checkpoint is damaged, of a newer format or of another model; or
            ``per_rank`` was saved by another number of ranks and ``redistribute`` does not name it; or it has objects that are
            more than data, and ``trust`` is False. Every rank raises it; the text names the file, the parameter or the object.
            Or a rank died: the text names it. If tensors were being read then, parameters may be filled in part.
    """
    what, functions = f"loading {path}", dict(redistribute or {})
    wait_for_save()
    rank, ranks = _rank_of(process_group), dist.get_world_size(process_group) if dist.is_initialized() else 1
    on_all(lambda: _check_load(path, state, functions), what, process_group, own=_REFUSED)
    given = Path(path)
    # Equal on all ranks because rank 0 alone chooses: another rank might already see a newer checkpoint.
    answers = gather(lambda: (checkpoint_at(given) if rank == 0 else given, given, has_lost(state)), what, process_group)
    found, given, _ = answers[0]
    reader = on_all(lambda: CheckpointReader(found), what, process_group)
    reader.group = process_group
    try:
        metadata = on_all(reader.read_metadata, what, process_group)
        request = Request(state, functions, reader.manifest, rank, ranks, trust, any(lost for *_, lost in answers))
        spread = spread and dist.is_initialized() and process_group is None
        planner = CheckingPlanner(reader.manifest, spread, trust, bool(state.optimizers))
        try:  # Compare with the model first: reading all bytes of a checkpoint of another model would waste minutes.

            def compare() -> tuple[dict[str, Any], HeldBase]:
                tensors = request.prepare(metadata)
                planner.left_out = {name: describe(value) for name, value in request.left_out.items()}
                planner.set_up_planner(tensors, metadata)
                return boxes_of(tensors), request.held_base()

            held = gather(compare, what, process_group)
            refuse_gaps([boxes for boxes, _ in held], what)
            frozen = digests_of([base for _, base in held], what)
            refuse_other_base(reader.manifest, frozen, what)
            if frozen:
                remember_base(state.model, frozen, bool(reader.manifest.frozen))
            _fill_request(request, reader, planner, what)
        except BaseException:
            request.forget()
            raise
    except CheckpointError as error:  # On all ranks, so that they can look for another checkpoint together.
        if found == given or error.group_is_broken or not any(gather(lambda: reader.is_damaged, what, process_group)):
            raise
        raise CheckpointError(f"{error}. {_other_than(reader, given, rank, ranks)}") from None
    # Tensors are filled: if a load_state_dict raises now, nothing can be undone, but all ranks raise.
    on_all(request.apply, what, process_group)
    _last_saves.clear()  # Other weights are no progress now.
    return reader.manifest


def _other_than(reader: CheckpointReader, path: Path, rank: int, ranks: int) -> str:
    """What can be loaded instead of the damaged checkpoint of ``reader``. Ranks share the bytes to compare."""
    what = f"looking for a complete checkpoint in {path}"
    for folder in reversed(gather(lambda: complete_in(path) if rank == 0 else [], what, reader.group)[0]):

        def is_damaged(folder: Path = folder) -> bool:
            try:
                return folder == reader.folder or bool(damage(folder, read_manifest(folder), None, rank, ranks))
            except CheckpointError:
                return True

        if not any(gather(is_damaged, what, reader.group)):
            return (
                f"The newest complete checkpoint is {folder}: load({str(folder)!r}, state) loads it, and "
                f"checkpoint.latest({str(path)!r}, complete=True) finds it"
            )
    return f"{path} holds no other complete checkpoint"


def _fill_request(request: Request, reader: CheckpointReader, planner: CheckingPlanner, what: str) -> None:
    """Let DCP fill the request: objects first, because they can still be refused, then tensors, in place."""

    def fill(state_dict: dict[str, Any], planner: DefaultLoadPlanner) -> None:
        dcp.load(
            state_dict,
            storage_reader=reader,
            planner=planner,
            process_group=reader.group,
            no_dist=not dist.is_initialized(),
        )

    with raise_on_all(what, reader.group, lambda: reader.doing), without_warning():
        fill(request.objects, ObjectPlanner(planner.trust))
        on_all(request.unpack, what, reader.group)
        reader.verify = False  # The first fill has verified all files.
        fill(request.tensors, planner)
        reader.doing = "sending tensors to their replicas"
        planner.shares.exchange()


def _check_state(state: TrainState) -> None:
    if not isinstance(state, TrainState):
        raise TypeError(
            f"expected a TrainState, got {type(state).__name__}: pass checkpoint.TrainState(model, optimizer). Other values go "
            "into its extra, a dict"
        )
    state.check()


def _check_load(given: str | os.PathLike[str], state: TrainState, redistribute: Redistribute) -> None:
    _path_of(given)
    _check_state(state)
    for name, function in redistribute.items():
        if name not in state.per_rank or not (function is None or callable(function)):
            raise ValueError(
                f"load redistribute must map names of TrainState.per_rank ({', '.join(state.per_rank) or 'it is empty'}) to "
                f"functions or None, got {name!r}: {function!r}"
            )


def _path_of(given: str | os.PathLike[str]) -> Path:
    if not isinstance(given, (str, os.PathLike)):
        raise TypeError(
            f"a checkpoint's path must be a str or a path, got {given!r}: checkpoint.latest returns None if none is there"
        )
    return Path(given)


def _rank_of(group: dist.ProcessGroup | None) -> int:
    return dist.get_rank(group) if dist.is_initialized() else 0


def _prepare(
    given: str | os.PathLike[str], state: TrainState, group: dist.ProcessGroup | None, kind: str | None = None
) -> tuple[dict[str, Any], CheckpointWriter]:
    """Check the arguments and clear the folder. Returns the state dict to save and its writer.

    ``kind`` is that of a save in the background; None if it is none.

    Collective: every check is agreed on, so either all ranks go on to DCP or none does.
    """
    what, rank = f"saving to {given}", _rank_of(group)
    wait_for_save()
    refuse_other_folders(gather(lambda: _check_save(given, state, kind), what, group, own=_REFUSED), what)
    path = Path(given)
    compare_before_checkpoint(state.model)
    check_replicas_of(state.model)
    steps = sum(map(_steps_of, state.optimizers))  # Before the states are taken: DCP may make them by a step.
    collected: list[Contents] = []

    def collect() -> tuple[dict[str, Any], HeldBase | None]:
        collected.append(Contents(state, rank, kind is not None))
        return boxes_of(collected[0].state_dict), collected[0].base

    held = gather(collect, what, group)
    refuse_gaps([boxes for boxes, _ in held], what)
    contents = collected[0]
    refuse_different(contents.shared, what, group)
    # All ranks have a base now, or none has: it is one of the values that were compared.
    frozen = base_of_save(state.model, digests_of([base for _, base in held if base is not None], what)) if state.base else {}
    contents.leave_out(frozen)
    folder = folder_of(path, state.step)
    if rank == 0:
        _warn_of_same_step(folder, state, steps)
    manifest = Manifest(
        step=state.step,
        consumed_tokens=state.consumed_tokens,
        data_position=copy.deepcopy(state.data_position),  # Training may change it before a background save writes it.
        objects=contents.names,
        base=state.base if state.base and frozen else "",
        frozen=frozen,
    )
    return contents.state_dict, CheckpointWriter(folder, manifest, rng_checksums(contents.rng), tied=contents.tied)


def _check_save(given: str | os.PathLike[str], state: TrainState, kind: str | None) -> tuple[str, str]:
    """Check the arguments. Returns this rank's names of the folder: one as it was given, one without symbolic links."""
    if kind is not None and kind not in _SAVER_KINDS:
        raise ValueError(f"async_save kind must be one of {sorted(_SAVER_KINDS)}, got {kind!r}")
    path = _path_of(given)
    _check_state(state)
    return str(path.absolute()), str(path.resolve())


def _steps_of(optimizer: torch.optim.Optimizer) -> int:
    """The steps that ``optimizer`` has made since this function was first called with it."""
    if optimizer not in _steps_taken:
        with suppress(AttributeError):  # A wrapper that is no optimizer inside, such as accelerate's.
            optimizer.register_step_post_hook(_count_step)
        _steps_taken[optimizer] = 0
    return _steps_taken[optimizer]


def _count_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not torch.compiler.is_compiling():
        _steps_taken[optimizer] += 1


def _warn_of_same_step(folder: Path, state: TrainState, steps: int) -> None:
    """Warn if this process has trained since it saved ``folder``, and replaces it now."""
    parent = _folder_key(folder).parent
    step, before = _last_saves.get(parent, (None, steps))
    _last_saves[parent] = state.step, sum(map(_steps_of, state.optimizers))
    if step == state.step and before != steps and folder.is_dir():
        warnings.warn(
            f"{folder} is replaced by newer weights: TrainState.step is {state.step}, as in the last save. To keep the "
            "checkpoints of all steps, set state.step to the number of optimizer steps before each save",
            stacklevel=4,
        )


def _folder_key(folder: Path) -> Path:
    """The folder without symbolic links in its parents: two paths to one folder give one key."""
    return folder.parent.resolve() / folder.name


def _clean_up(writer: CheckpointWriter, group: dist.ProcessGroup | None) -> None:
    """On rank 0, release the lease and remove the files of a failed save, to free disk space."""
    if _rank_of(group) == 0:
        writer.abandon()


def _finish_save(
    done: Future[Any],
    result: BackgroundSave,
    stager: DefaultStager,
    what: str,
    writer: CheckpointWriter,
    group: dist.ProcessGroup | None,
) -> None:
    """Pass the outcome of a background save to ``result``, the future that the caller has."""
    outcome: Path | CheckpointError = writer.folder
    try:
        with suppress(Exception):
            stager.close()
        with raise_on_all(what, group, lambda: writer.doing):
            done.result()
    except CheckpointError as error:
        outcome = error
    except BaseException as error:  # Not from DCP: for example, the saving process died, or a connection broke.
        outcome = CheckpointError(f"{what}: {type(error).__name__}: {error}")
        outcome.__cause__ = error
    if isinstance(outcome, CheckpointError):
        _clean_up(writer, group)
    result.end(outcome)
