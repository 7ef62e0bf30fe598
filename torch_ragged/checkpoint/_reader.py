"""DCP's file system reader, which verifies all files before it fills any tensor, and copies directly from mapped files.

It finds the elements of a chunk in its archive and copies them as bytes. It does not read whole tensors into memory.
"""

from __future__ import annotations

import errno
import gc
import io
import math
import mmap
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from torch_ragged.checkpoint import _disk
from torch_ragged.checkpoint._chunks import parse_chunks
from torch_ragged.checkpoint._data import load_object
from torch_ragged.checkpoint._errors import CheckpointError, listed
from torch_ragged.checkpoint._files import check_blocks, check_size
from torch_ragged.checkpoint._folder import checkpoint_at
from torch_ragged.checkpoint._manifest import CHUNKS, MOST_BYTES, Manifest, read_manifest
from torch_ragged.checkpoint._metadata import parse_metadata

__all__ = ["CheckpointReader", "damage"]


def damage(folder: Path, manifest: Manifest, metadata: Metadata | None, rank: int = 0, ranks: int = 1) -> list[str]:
    """The problems of the files of a checkpoint; empty if there is none.

    Every rank checks the size of every file. Checksums are shared: rank ``rank`` of ``ranks`` reads its share of the blocks.
    """
    problems = list(filter(None, (check_size(folder, name, record) for name, record in manifest.files.items())))
    if problems:
        return problems
    blocks = [(name, block) for name, record in sorted(manifest.files.items()) for block in range(len(record.crc32))]
    mine: dict[str, list[int]] = {}
    for name, block in blocks[len(blocks) * rank // ranks : len(blocks) * (rank + 1) // ranks]:
        mine.setdefault(name, []).append(block)
    for name, numbers in mine.items():
        record = manifest.files[name]
        for first, last in _runs_of_blocks(check_blocks(folder / name, record, numbers)):
            start, stop = first * record.block, min((last + 1) * record.block, record.nbytes)
            inside = ", ".join(_stored_in(metadata, name, start, stop))
            problems.append(
                f"{folder / name} is damaged: bytes {start} to {stop} have a wrong checksum; they hold {inside or 'no tensor'}"
            )
    return problems


def _told(problems: list[str]) -> str:
    return problems[0] if len(problems) == 1 else f"damaged files:{listed(problems)}"


def _runs_of_blocks(blocks: list[int]) -> list[tuple[int, int]]:
    """The first and the last number of each run of consecutive numbers in an ascending list."""
    firsts = [block for i, block in enumerate(blocks) if i == 0 or blocks[i - 1] != block - 1]
    lasts = [block for i, block in enumerate(blocks) if i + 1 == len(blocks) or blocks[i + 1] != block + 1]
    return list(zip(firsts, lasts))


def _stored_in(metadata: Metadata | None, file: str, start: int, stop: int) -> list[str]:
    """The names of the first four tensors or objects in these bytes of a file, and the number of the rest."""
    stored = metadata.storage_data if metadata is not None else {}
    names = {
        index.fqn
        for index, info in (stored or {}).items()
        if info.relative_path == file and info.offset < stop and start < info.offset + info.length
    }
    few = sorted(names)[:4]
    return few + ([f"and {len(names) - 4} more"] if len(names) > 4 else [])


class CheckpointReader(FileSystemReader):
    """Reads a checkpoint of :class:`CheckpointWriter`, for ``dcp.load``.

    Before any tensor is changed, each rank checks that every file exists and has its size. Each rank also reads a share of all
    bytes and compares checksums. Then each rank copies the elements of its shards from the mapped files directly into the
    tensors, without a staging copy.

    Args:
        path: a checkpoint, or a folder of checkpoints. Of a folder, the latest complete one is read.
        verify: if False, checksums are not compared.

    Raises:
        CheckpointError: no checkpoint was found, or its manifest is damaged or of a newer version.
    """

    def __init__(self, path: str | os.PathLike[str], *, verify: bool = True) -> None:
        self.folder = checkpoint_at(Path(path))
        super().__init__(self.folder)
        self.manifest = read_manifest(self.folder)
        self.verify = verify
        self.group: dist.ProcessGroup | None = None
        self.metadata: Metadata | None = None
        self.doing = "reading the manifest"  # For the error if a rank dies.
        self.is_damaged = False  # Whether this rank has found damage in the files.

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """DCP's metadata, after a comparison of the checksums of its file. It is read as data: nothing in it is called.

        Raises:
            CheckpointError: the file is missing or damaged, or does not fit the manifest and the other files.
        """
        if self.metadata is None:
            name = CHUNKS if CHUNKS in self.manifest.files else ".metadata"
            self.doing, path, record = f"reading {name}", self.folder / name, self.manifest.files[name]
            # The files of all ranks, because the metadata is checked against the sizes that the manifest has for them.
            self.is_damaged = True  # Until it is read.
            problems = list(filter(None, (check_size(self.folder, *item) for item in self.manifest.files.items())))
            if problems:
                raise CheckpointError(_told(problems))
            if check_blocks(path, record):
                raise CheckpointError(f"{path} is damaged: its checksum is wrong")
            if record.nbytes > MOST_BYTES:
                raise CheckpointError(f"{path} has {record.nbytes} bytes, expected at most {MOST_BYTES}")
            collects = gc.isenabled()
            gc.disable()  # It would look at the many objects again and again: half of the time.
            try:
                with _disk.open_regular(path, record.nbytes) as file:
                    parse = parse_chunks if name == CHUNKS else parse_metadata
                    self.metadata = parse(file.read(), self.manifest)
            except ValueError as error:
                raise CheckpointError(f"{path} is damaged: {error}") from error
            finally:
                if collects:
                    gc.enable()
            self.is_damaged = False
        return self.metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Verify this rank's share of the files.

        Raises:
            CheckpointError: a file is missing, truncated or damaged. DCP raises it on every rank, before any tensor is read.
        """
        self.doing = "comparing checksums"
        in_group = dist.is_initialized()
        rank, ranks = (dist.get_rank(self.group), dist.get_world_size(self.group)) if in_group else (0, 1)
        if self.verify:
            problems = damage(self.folder, self.manifest, self.metadata, rank, ranks)
            self.is_damaged = bool(problems)
            if problems:
                raise CheckpointError(_told(problems))
        return super().prepare_local_plan(plan)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy the items of the plan from the mapped files into the tensors.

        Raises:
            CheckpointError: a file cannot be read.
        """
        self.doing = "reading their shards"
        # Objects first: they are equal on all ranks, so if one is refused, no rank has filled a tensor yet.
        for kind in (LoadItemType.BYTE_IO, LoadItemType.TENSOR):
            by_file: dict[str, list[ReadItem]] = {}
            for item in plan.items:
                if item.type == kind:
                    by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
            for name, items in by_file.items():
                self._read_file(name, items, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_file(self, name: str, items: list[ReadItem], planner: LoadPlanner) -> None:
        path = self.folder / name
        try:
            with _disk.open_regular(path, self.manifest.files[name].nbytes) as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # Stays mapped as long as a tensor views it.
            chunks = _Chunks(mapped, self.storage_data)
            for item in items:
                self._read(item, chunks, planner)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error
        except Exception as error:  # Most errors do not name the file.
            raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error

    def _read(self, item: ReadItem, chunks: _Chunks, planner: LoadPlanner) -> None:
        if item.type == LoadItemType.BYTE_IO:
            planner.load_bytes(item, io.BytesIO(chunks.pickled(item.storage_index)))
            return
        assert self.metadata is not None
        stored = self.metadata.state_dict_metadata[item.storage_index.fqn]
        assert isinstance(stored, TensorStorageMetadata)
        target = planner.resolve_tensor(item).detach()
        ranges = tuple(zip(item.storage_offsets, item.lengths))
        chunks.copy(item.storage_index, _stored_sizes(stored, item.storage_index), stored.properties.dtype, ranges, target)
        planner.commit_tensor(item, target)


def _stored_sizes(stored: TensorStorageMetadata, index: MetadataIndex) -> tuple[int, ...]:
    if index.index is not None and stored.chunks[index.index].offsets == index.offset:
        return tuple(stored.chunks[index.index].sizes)
    return next(tuple(chunk.sizes) for chunk in stored.chunks if chunk.offsets == index.offset)


class _Chunks:
    """The chunks in a mapped file. Each chunk is the file that ``torch.save`` writes for one contiguous tensor: a zip archive,
    not compressed."""

    def __init__(self, mapped: mmap.mmap, stored: dict[MetadataIndex, Any]) -> None:
        self._mapped, self._stored = mapped, stored
        self._starts: dict[MetadataIndex, int | None] = {}

    def pickled(self, index: MetadataIndex) -> bytes:
        """The bytes of a chunk, as they are in the file."""
        info = self._stored[index]
        return self._mapped[info.offset : info.offset + info.length]

    def copy(
        self,
        index: MetadataIndex,
        sizes: tuple[int, ...],
        dtype: torch.dtype,
        ranges: tuple[tuple[int, int], ...],
        target: torch.Tensor,
    ) -> None:
        """Copy a part of a chunk of shape ``sizes`` to ``target``. ``ranges`` has (start, length) of each dimension."""
        nbytes, width = math.prod(sizes) * dtype.itemsize, dtype.itemsize
        start = self._start(index, nbytes) if nbytes else None
        if start is None:  # No elements, or not an archive as torch.save writes it.
            source = load_object(self.pickled(index), index.fqn, trust=False, map_location="cpu")
            if not isinstance(source, torch.Tensor) or tuple(source.shape) != sizes:
                raise CheckpointError(f"{index.fqn} is no tensor of shape {sizes}")
            target.copy_(_narrow(source, ranges))
            return
        # As bytes, because elements may start at any byte of the file and tensors of wider dtypes need aligned memory.
        *rows, columns = sizes or (1,)
        *outer, (first, length) = ranges or ((0, 1),)
        flat = torch.frombuffer(self._mapped, dtype=torch.uint8, count=nbytes, offset=start)
        source = _narrow(flat.view(*rows, columns * width), (*outer, (first * width, length * width)))
        if target.dtype == dtype and target.shape and target.stride(-1) == 1:
            target.view(torch.uint8).copy_(source)
        else:
            aligned = source.clone(memory_format=torch.contiguous_format).view(dtype)
            target.copy_(aligned.view(target.shape))

    def _start(self, index: MetadataIndex, nbytes: int) -> int | None:
        """The byte of the file at which the elements of a chunk start; None if its archive is not as expected."""
        if index not in self._starts:
            self._starts[index] = self._find(self._stored[index].offset, self._stored[index].length, nbytes)
        return self._starts[index]

    def _find(self, offset: int, length: int, nbytes: int) -> int | None:
        with zipfile.ZipFile(_FileWindow(self._mapped, offset, length)) as archive:  # type: ignore[arg-type]
            records = [info for info in archive.infolist() if info.filename.endswith("/data/0")]
        if len(records) != 1 or records[0].file_size != nbytes or records[0].compress_type != zipfile.ZIP_STORED:
            return None
        header = offset + records[0].header_offset  # 30 bytes; the last four are the lengths of name and extra field.
        name, extra = (int.from_bytes(self._mapped[header + at : header + at + 2], "little") for at in (26, 28))
        return header + 30 + name + extra


def _narrow(tensor: torch.Tensor, ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
    for dim, (start, length) in enumerate(ranges):
        if (start, length) != (0, tensor.size(dim)):  # Quantized types have slices of the first dimension only.
            tensor = tensor.narrow(dim, start, length)
    return tensor


class _FileWindow:
    """A part of a mapped file, with the methods of a file that ``zipfile`` calls."""

    def __init__(self, mapped: mmap.mmap, offset: int, length: int) -> None:
        self._mapped, self._offset, self._length, self._position = mapped, offset, length, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        if base + position < 0:
            raise OSError(errno.EINVAL, "negative seek position")
        self._position = base + position
        return self._position

    def read(self, size: int = -1) -> bytes:
        stop = self._length if size < 0 else min(self._position + size, self._length)
        data = self._mapped[self._offset + self._position : self._offset + max(stop, self._position)]
        self._position += len(data)
        return data
