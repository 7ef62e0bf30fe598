"""DCP's file system writer, whose checkpoint is complete or invisible.

No rank writes to the folder that readers look for: the coordinator's rename creates it.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.utils.serialization import config as serialization_config

from torch_ragged.checkpoint import _disk
from torch_ragged.checkpoint._chunks import chunks_text
from torch_ragged.checkpoint._errors import CheckpointError, listed
from torch_ragged.checkpoint._files import CHECKSUM_BLOCK, FileRecord, HashingFileSystem, check_blocks, check_size
from torch_ragged.checkpoint._folder import incomplete_of, publish, remove, remove_leftovers
from torch_ragged.checkpoint._lease import Lease, acquire, held_tokens, owner_of_this_process
from torch_ragged.checkpoint._manifest import CHUNKS, MANIFEST, Manifest, TensorRecord, describe, fingerprint
from torch_ragged.tensor._checkpoint import own_storage
from torch_ragged.tensor._stored_tensor import StoredTensor

__all__ = ["CheckpointWriter", "SavePlannerOfViews"]

_ARCHIVE = 1536  # The approximate bytes that the zip archive of an item has in addition to the elements.


@dataclass
class _Report:
    """What each rank sends to the coordinator in addition to DCP's results."""

    files: dict[str, FileRecord]
    tensors: dict[str, TensorRecord]
    rng: dict[str, int]


@dataclass
class _Share:
    """What the coordinator sends to each rank with its plan: DCP's own storage data, and the working folder."""

    storage_data: Any
    path: Path


class SavePlannerOfViews(DefaultSavePlanner):
    """DCP's save planner, with tensors that DCP writes without a copy.

    DCP copies a tensor that views only a part of its storage. Therefore, a contiguous view on the CPU is passed as a tensor
    whose storage is exactly that part, on the same memory.
    """

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        value = super().transform_object(write_item, object)
        if isinstance(value, StoredTensor):  # torch.save reads it. DCP keeps what it has written until the end.
            return value
        return own_storage(value.detach().contiguous()) if isinstance(value, torch.Tensor) else value


class CheckpointWriter(FileSystemWriter):
    """Writes a DCP checkpoint to a working folder, verifies it, writes its manifest and then renames it to ``folder``.

    For ``dcp.save`` and ``dcp.async_save``. Every rank writes one file and computes its checksums during the writes. DCP sends
    the checksums, not the data, to the coordinator. The coordinator checks that every chunk of every tensor was written. If
    a step fails on any rank, DCP raises on all ranks, and readers see the previous checkpoint of that name, or none.

    Before anything is written, the coordinator takes the lease of the parent folder. If another job holds it, DCP raises on all
    ranks. The working folder ``<folder>.<token>.incomplete`` is of this writer alone.

    Args:
        folder: the folder of the finished checkpoint. All ranks share its parent.
        manifest: the fields that the caller knows: step, tokens, data position, objects.
        rng: the checksum of this rank's state of each random generator.
        tied: the first name of each parameter that has several names, by its other names.
        read_back: if True, every rank reads its file again and compares checksums before the rename.
        block: bytes per checksum.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        manifest: Manifest | None = None,
        rng: Mapping[str, int] | None = None,
        *,
        tied: Mapping[str, str] | None = None,
        read_back: bool = False,
        block: int = CHECKSUM_BLOCK,
    ) -> None:
        self.folder = Path(folder)
        self.token = secrets.token_hex(8)  # The coordinator's counts.
        super().__init__(incomplete_of(self.folder, self.token), sync_files=False)  # Our file system syncs every file.
        self.fs: HashingFileSystem = HashingFileSystem(block)
        self.manifest = manifest or Manifest()
        self.rng, self.tied = dict(rng or {}), dict(tied or {})
        self.read_back = read_back
        self.doing = "planning the save"  # For the error if a rank dies.
        self._owner = owner_of_this_process()  # Kept: a background process may write for this one.
        self._lease: Lease | None = None
        self._older: list[Path] = []

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan. The coordinator creates the working folder later, when it holds the lease."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: take the lease, remove what dead writers left, and create the working folder.

        Raises:
            CheckpointError: another job saves to the parent folder.
            OSError: a folder cannot be created.
        """
        parent, path = self.folder.parent, Path(self.path)
        _disk.make_folders(parent.absolute())
        self._lease = acquire(parent, self.token, self._owner)
        try:
            self._older = remove_leftovers(parent, held_tokens(parent), self.folder)
            _disk.mkdir(path)
            self._lease.check()  # After the mkdir: a writer that takes the lease from now on finds the working folder.
        except BaseException:
            self.abandon()
            raise
        plans = super().prepare_global_plan(plans)
        return [replace(plan, storage_data=_Share(plan.storage_data, path)) for plan in plans]

    def abandon(self) -> None:
        """On the coordinator, or in the process that started it: release the lease and remove the working folder.

        Errors are ignored: the caller raises the error of the save, and the next save removes the files.
        """
        with suppress(OSError):
            remove(Path(self.path))
        if self._lease is not None:
            self._lease.release()
        with suppress(OSError):  # Of a background process that is gone.
            _disk.unlink(self.folder.with_name(f"writer-{self.token}.lease"))

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's chunks to one file and sync it to disk.

        Raises:
            OSError, CheckpointError: the file cannot be written, or ``read_back`` finds other bytes. The text names the file.
        """
        self.doing = "writing their files"
        share = plan.storage_data
        self.path = share.path
        plan = replace(plan, storage_data=share.storage_data)
        self.fs.planned = sum(map(_item_nbytes, plan.items))
        # The records of the files have checksums.
        with serialization_config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
            results: list[Any] = super().write_data(plan, planner).value()
        self.fs.planned = 0
        for name, written in self.fs.records.items() if self.read_back else ():
            if check_blocks(Path(self.path) / name, written):
                raise CheckpointError(f"{Path(self.path) / name} reads back other bytes than were written: check the storage")
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        mine = {item.index.fqn for item in plan.items}
        tensors = {}
        for name, value in planner.state_dict.items():  # type: ignore[attr-defined]
            if not isinstance(value, torch.Tensor):
                continue
            record = replace(describe(value), tied_to=self.tied.get(name, ""))
            # One rank reports each tensor: a DTensor's lowest rank, which may have no chunk, or the writer of a plain tensor.
            if rank == min(record.mesh_ranks) if record.mesh_ranks else name in mine:
                tensors[name] = record
        self.doing = "writing their files (rank 0: or publishing the checkpoint)"
        future: Future[list[WriteResult]] = Future()
        results.append(_Report(dict(self.fs.records), tensors, self.rng))
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, after all ranks have written: verify, write the manifest, rename.

        Raises:
            CheckpointError: a file is missing or has a wrong size, elements of a tensor were not written, or another writer
                took the lease.
        """
        assert self._lease is not None
        self._lease.check()
        self._write_metadata(metadata, results)
        publish(Path(self.path), self.folder, self.token, self._lease.check, self._older)
        self._lease.release()

    def _write_metadata(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Verify what all ranks have written, and write DCP's metadata and the manifest."""
        reports = [item for part in results for item in part if isinstance(item, _Report)]
        written = [[item for item in part if not isinstance(item, _Report)] for part in results]
        super().finish(metadata, written)
        stored = {item.index: item.storage_data for part in written for item in part}
        files: dict[str, FileRecord] = {".metadata": self.fs.records[".metadata"]}
        tensors: dict[str, TensorRecord] = {}
        for report in reports:
            files |= report.files
            tensors |= report.tensors
        problems = [check_size(Path(self.path), name, record) for name, record in files.items()]
        problems += missing_chunks(metadata, stored, files)
        problems = list(filter(None, problems))
        if problems:
            raise CheckpointError(f"the written files are not complete:{listed(problems)}")
        with self.fs.create_stream(Path(self.path) / CHUNKS, "wb") as stream:
            stream.write(chunks_text(metadata, stored).encode())
        files[CHUNKS] = self.fs.records[CHUNKS]
        same = {name: len({report.rng.get(name) for report in reports}) == 1 for name in reports[0].rng}
        manifest = replace(
            self.manifest,
            world_size=len(reports),
            files=files,
            tensors=tensors,
            fingerprint=fingerprint({**tensors, **self.manifest.frozen}),
            rng={name: "same" if is_same else "each" for name, is_same in same.items()},
        )
        with self.fs.create_stream(Path(self.path) / MANIFEST, "wb") as stream:
            stream.write(manifest.to_json().encode())


def _item_nbytes(item: WriteItem) -> int:
    """The approximate bytes of an item in a file: its elements, if it is a tensor, and its archive."""
    data = item.tensor_data
    return _ARCHIVE + (data.chunk.sizes.numel() * data.properties.dtype.itemsize if data is not None else 0)


def missing_chunks(metadata: Metadata, stored: Mapping[MetadataIndex, Any], files: Mapping[str, FileRecord]) -> list[str]:
    """The problems of the ``stored`` chunks of a checkpoint: they must fill each tensor and lie within the files."""
    problems = []
    filled: dict[str, int] = {}
    for index, info in stored.items():
        file = files.get(info.relative_path)
        if file is None or info.offset + info.length > file.nbytes:
            problems.append(f"{index.fqn}: bytes {info.offset} to {info.offset + info.length} are not in {info.relative_path}")
    held = {(index.fqn, tuple(index.offset)) for index in stored if index.offset is not None}
    for name, item in metadata.state_dict_metadata.items():
        if not isinstance(item, TensorStorageMetadata):
            continue
        for chunk in item.chunks:
            if (name, tuple(chunk.offsets)) in held:
                filled[name] = filled.get(name, 0) + chunk.sizes.numel()
        if filled.get(name, 0) != item.size.numel():
            problems.append(f"{name}: {filled.get(name, 0)} of its {item.size.numel()} elements were written")
    return problems
