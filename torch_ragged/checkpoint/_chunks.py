"""The chunks of a checkpoint as columns of integers: what DCP's ``.metadata`` says, without a pickle.

DCP's own programs read ``.metadata``. Our reader takes this file: in a tenth of the time, on each rank, and nothing in it can
be called. Checkpoints of earlier versions have no such file; their ``.metadata`` is read as data by :mod:`._metadata`.
"""

from __future__ import annotations

import itertools
import json
import math
import operator
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from torch_ragged.checkpoint._manifest import Manifest

__all__ = ["check_manifest", "check_places", "chunks_text", "parse_chunks", "typed"]

_CHUNK_COLUMNS = ("file", "start", "length", "offsets", "sizes")
_TORCH_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def chunks_text(metadata: Metadata, stored: Mapping[MetadataIndex, Any]) -> str:
    """The file of columns for ``metadata``, whose chunks are all in ``stored``.

    ::

        {"files": ["__0_0.distcp"],                               the names that the column "file" counts
         "tensors": {"model.weight": ["float32", [4, 3], 2]},     dtype, shape, number of chunks
         "objects": ["scheduler"],
         "file": [0, 0, 0], "start": [...], "length": [...],      of each chunk of the tensors, then of each object: its bytes
         "offsets": [0, 0, 2, 0], "sizes": [2, 3, 2, 3]}          of each chunk of the tensors: a number per dimension
    """
    files: dict[str, int] = {}
    columns: dict[str, list[int]] = {name: [] for name in _CHUNK_COLUMNS}
    tensors, objects = {}, []

    def place(index: MetadataIndex) -> None:
        info = stored[index]
        columns["file"].append(files.setdefault(info.relative_path, len(files)))
        columns["start"].append(info.offset)
        columns["length"].append(info.length)

    for name, item in metadata.state_dict_metadata.items():
        if not isinstance(item, TensorStorageMetadata):
            objects.append(name)
            continue
        tensors[name] = [str(item.properties.dtype).removeprefix("torch."), list(item.size), len(item.chunks)]
        for chunk in item.chunks:
            place(MetadataIndex(name, chunk.offsets))
            columns["offsets"] += chunk.offsets
            columns["sizes"] += chunk.sizes
    # Objects last, so that the columns of offsets and sizes have the chunks of tensors alone.
    for name in objects:
        place(MetadataIndex(name))
    return json.dumps({"files": list(files), "tensors": tensors, "objects": objects, **columns}, separators=(",", ":"))


def parse_chunks(data: bytes, manifest: Manifest) -> Metadata:
    """DCP's metadata from the bytes of the file of columns.

    Every type, count and size is checked against the manifest, and so against the files: no number allocates memory.

    Raises:
        ValueError: the bytes are no such columns, or do not fit the manifest or its files.
    """
    try:
        document = json.loads(data)
    except (ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"it is no JSON ({type(error).__name__}: {error})") from error
    if type(document) is not dict or {*document} != {"files", "tensors", "objects", *_CHUNK_COLUMNS}:
        raise ValueError(f"it is {reprlib.repr(document)}, expected files, tensors, objects and columns of integers")
    files, objects = _names_once(document["files"], "files"), _names_once(document["objects"], "objects")
    columns = {name: _counts_in(document[name], name) for name in _CHUNK_COLUMNS}
    for file in files:
        if file not in manifest.files:
            raise ValueError(f"it names the file {reprlib.repr(file)}, which the manifest does not list")
    if max(columns["file"], default=-1) >= len(files):
        raise ValueError(f"it has a chunk in file {max(columns['file'])}, but there are {len(files)} files")
    shapes = {name: _tensor_entry(name, entry) for name, entry in typed(document["tensors"], dict, "tensors").items()}
    # Before any object is made: a count that is a number only must not take memory, and each rank reads this file.
    count = sum(chunks for *_, chunks in shapes.values())
    numbers = sum(chunks * len(shape) for _, shape, chunks in shapes.values())
    for name, expected in zip(_CHUNK_COLUMNS, (*(count + len(objects),) * 3, numbers, numbers)):
        if len(columns[name]) != expected:
            raise ValueError(f"its column {name} has {len(columns[name])} numbers, expected {expected}")
    names = list(map(files.__getitem__, columns["file"]))
    places = zip(names, columns["start"], columns["length"])
    offsets, sizes = iter(columns["offsets"]), iter(columns["sizes"])
    stored: dict[MetadataIndex, Any] = {}
    found: dict[str, Any] = {}
    for name, (dtype, shape, chunks) in shapes.items():
        found[name] = _tensor(name, dtype, shape, itertools.islice(places, chunks), offsets, sizes, stored)
    for name, place in zip(objects, places):
        if name in found:
            raise ValueError(f"it has {name} twice")
        found[name], stored[MetadataIndex(name)] = BytesStorageMetadata(), _StorageInfo(*place)
    check_places(stored, manifest)
    check_manifest(found, manifest)
    return Metadata(found, None, stored, StorageMeta())


def _tensor(
    name: str,
    dtype: torch.dtype,
    shape: torch.Size,
    places: Iterator[tuple[str, int, int]],
    offsets: Iterator[int],
    sizes: Iterator[int],
    stored: dict[MetadataIndex, Any],
) -> TensorStorageMetadata:
    """One tensor with its chunks, which together have its elements, and lie in ``stored`` places that are long enough."""
    ndim, itemsize, filled = len(shape), dtype.itemsize, 0
    parts = []
    for file, start, length in places:  # A million times, for a large model on a thousand ranks.
        at, part = torch.Size(itertools.islice(offsets, ndim)), torch.Size(itertools.islice(sizes, ndim))
        if any(map(operator.gt, map(operator.add, at, part), shape)):
            raise ValueError(f"{name} of shape {tuple(shape)} has a chunk {tuple(part)} at {tuple(at)}")
        numel = math.prod(part)
        if numel * itemsize > length:
            raise ValueError(f"{name} has {numel * itemsize} bytes in its chunk at {tuple(at)}, but {length} are stored")
        # DCP writes one chunk at an offset, also of those without elements. So a file cannot have more of them than elements.
        index = MetadataIndex(name, at)
        if index in stored:
            raise ValueError(f"{name} has two chunks at the same offset")
        stored[index] = _StorageInfo(file, start, length)
        filled += numel
        parts.append(ChunkStorageMetadata(at, part))
    if filled != math.prod(shape):
        raise ValueError(f"the chunks of {name} do not have the {math.prod(shape)} elements of the tensor")
    return TensorStorageMetadata(TensorProperties(dtype=dtype), shape, parts)


def check_places(stored: Mapping[MetadataIndex, Any], manifest: Manifest) -> None:
    """Raise if a chunk does not lie in a file of the manifest, or two chunks share a byte.

    Raises:
        ValueError: one does.
    """
    places = []
    for index, info in stored.items():
        record, stop = manifest.files.get(info.relative_path), info.offset + info.length
        if record is None or stop > record.nbytes:
            raise ValueError(
                f"it has {index.fqn} in bytes {info.offset} to {stop} of {info.relative_path}, which the manifest does not list"
            )
        places.append((info.relative_path, info.offset, stop, index.fqn))
    # Sorted, so that each is compared with its neighbour only: there may be a million.
    places.sort()
    for one, other in itertools.pairwise(places):
        if one[0] == other[0] and one[2] > other[1]:
            raise ValueError(f"{one[3]} and {other[3]} share bytes of {one[0]}")


def check_manifest(found: Mapping[str, Any], manifest: Manifest) -> None:
    """Raise if a tensor of the manifest is missing in what was ``found``, or has another shape or dtype.

    Raises:
        ValueError: one is.
    """
    for name, record in manifest.tensors.items():
        item = found.get(name)
        if not isinstance(item, TensorStorageMetadata):
            raise ValueError(f"it has no tensor {name}, which the manifest lists")
        if (tuple(item.size), str(item.properties.dtype)) != (record.shape, f"torch.{record.dtype}"):
            raise ValueError(f"{name} is {tuple(item.size)} {item.properties.dtype} in it, {record.what} in the manifest")


def typed(value: Any, kind: type, what: str) -> Any:
    """``value``, if its type is exactly ``kind``. Otherwise raises ValueError."""
    if type(value) is not kind:
        raise ValueError(f"its {what} is {reprlib.repr(value)}, expected {kind.__name__}")
    return value


def _names_once(value: Any, what: str) -> list[str]:
    if not {*map(type, typed(value, list, what))} <= {str} or len({*value}) < len(value):
        raise ValueError(f"its {what} are {reprlib.repr(value)}, expected names, each once")
    return value  # type: ignore[no-any-return]


def _counts_in(value: Any, what: str) -> list[int]:
    """A column: no Python code runs for each number."""
    if not {*map(type, typed(value, list, what))} <= {int} or min(value, default=0) < 0 or max(value, default=0) >= 1 << 63:
        raise ValueError(f"its {what} are {reprlib.repr(value)}, expected integers >= 0")
    return value  # type: ignore[no-any-return]


def _tensor_entry(name: str, entry: Any) -> tuple[torch.dtype, torch.Size, int]:
    """Dtype, shape and number of chunks of a tensor."""
    if len(typed(entry, list, f"entry of {name}")) != 3:
        raise ValueError(f"its entry of {name} is {reprlib.repr(entry)}, expected dtype, shape and number of chunks")
    dtype, shape, chunks = entry
    (count,) = _counts_in([chunks], f"number of chunks of {name}")
    if len(_counts_in(shape, f"shape of {name}")) > 64:  # The limit of torch.
        raise ValueError(f"its shape of {name} has {len(shape)} dimensions, expected at most 64")
    if typed(dtype, str, f"dtype of {name}") not in _TORCH_DTYPES:
        raise ValueError(f"its dtype of {name} is {reprlib.repr(dtype)}, which torch {torch.__version__} does not have")
    return _TORCH_DTYPES[dtype], torch.Size(shape), count
