"""DCP's file system writer, whose checkpoint is complete or invisible.

No rank writes to the folder that readers look for: the coordinator's rename creates it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
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

from torch_ragged._checkpoint import own_storage
from torch_ragged.checkpoint._errors import CheckpointError, listed
from torch_ragged.checkpoint._files import BLOCK, FileRecord, HashingFileSystem, check_blocks, check_size
from torch_ragged.checkpoint._folder import incomplete_of, publish
from torch_ragged.checkpoint._manifest import MANIFEST, Manifest, TensorRecord, describe, fingerprint

__all__ = ["CheckpointWriter", "SavePlannerOfViews"]

_ARCHIVE = 1536  # The approximate bytes that the zip archive of an item has in addition to the elements.


@dataclass
class _Report:
    """What each rank sends to the coordinator in addition to DCP's results."""

    files: dict[str, FileRecord]
    tensors: dict[str, TensorRecord]
    rng: dict[str, int]


class SavePlannerOfViews(DefaultSavePlanner):
    """DCP's save planner, with tensors that DCP writes without a copy.

    DCP copies a tensor that views only a part of its storage. Therefore, a contiguous view on the CPU is passed as a tensor
    whose storage is exactly that part, on the same memory.
    """

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        value = super().transform_object(write_item, object)
        return own_storage(value.detach().contiguous()) if isinstance(value, torch.Tensor) else value


class CheckpointWriter(FileSystemWriter):
    """Writes a DCP checkpoint to ``<folder>.incomplete``, verifies it, writes its manifest and then renames it to ``folder``.

    For ``dcp.save`` and ``dcp.async_save``. Every rank writes one file and computes its checksums during the writes. DCP sends
    the checksums, not the data, to the coordinator. The coordinator checks that every chunk of every tensor was written. If
    a step fails on any rank, DCP raises on all ranks, and readers see the previous checkpoint of that name, or none.

    Args:
        folder: the folder of the finished checkpoint. All ranks share its parent.
        manifest: the fields that the caller knows: step, tokens, data position, objects.
        rng: the checksum of this rank's state of each random generator.
        read_back: if True, every rank reads its file again and compares checksums before the rename.
        block: bytes per checksum.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        manifest: Manifest | None = None,
        rng: Mapping[str, int] | None = None,
        *,
        read_back: bool = False,
        block: int = BLOCK,
    ) -> None:
        self.folder = Path(folder)
        super().__init__(incomplete_of(self.folder))
        self.fs = HashingFileSystem(block)
        self.manifest = manifest or Manifest()
        self.rng = dict(rng or {})
        self.read_back = read_back

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's chunks to one file and sync it to disk.

        Raises:
            OSError, CheckpointError: the file cannot be written, or ``read_back`` finds other bytes. The text names the file.
        """
        self.fs.planned = sum(map(_nbytes, plan.items))
        with serialization_config.patch("save.compute_crc32", False):  # The records of the files have checksums.
            results: list[Any] = super().write_data(plan, planner).value()
        self.fs.planned = 0
        for name, record in self.fs.records.items() if self.read_back else ():
            if check_blocks(Path(self.path) / name, record):
                raise CheckpointError(f"{Path(self.path) / name} reads back other bytes than were written: check the storage")
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        mine = {item.index.fqn for item in plan.items}
        tensors = {}
        for name, value in planner.state_dict.items():  # type: ignore[attr-defined]
            if not isinstance(value, torch.Tensor):
                continue
            record = describe(value)
            # One rank reports each tensor: a DTensor's lowest rank, which may have no chunk, or the writer of a plain tensor.
            if rank == min(record.mesh_ranks) if record.mesh_ranks else name in mine:
                tensors[name] = record
        future: Future[list[WriteResult]] = Future()
        results.append(_Report(dict(self.fs.records), tensors, self.rng))
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, after all ranks have written: verify, write the manifest, rename.

        Raises:
            CheckpointError: a file is missing or has a wrong size, or elements of a tensor were not written.
        """
        reports = [item for part in results for item in part if isinstance(item, _Report)]
        written = [[item for item in part if not isinstance(item, _Report)] for part in results]
        super().finish(metadata, written)
        files = {".metadata": self.fs.records[".metadata"]}
        tensors: dict[str, TensorRecord] = {}
        for report in reports:
            files |= report.files
            tensors |= report.tensors
        problems = [check_size(Path(self.path), name, record) for name, record in files.items()]
        problems += missing_chunks(metadata, {item.index: item.storage_data for part in written for item in part}, files)
        problems = list(filter(None, problems))
        if problems:
            raise CheckpointError(f"the written files are not complete:{listed(problems)}")
        same = {name: len({report.rng.get(name) for report in reports}) == 1 for name in reports[0].rng}
        manifest = replace(
            self.manifest,
            world_size=len(reports),
            files=files,
            tensors=tensors,
            fingerprint=fingerprint(tensors),
            rng={name: "same" if is_same else "each" for name, is_same in same.items()},
        )
        with self.fs.create_stream(Path(self.path) / MANIFEST, "wb") as stream:
            stream.write(manifest.to_json().encode())
            os.fsync(stream.fileno())  # Before the rename: the manifest is what makes a folder a complete checkpoint.
        publish(Path(self.path), self.folder)


def _nbytes(item: WriteItem) -> int:
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
