"""Read DCP's ``.metadata`` as data: no class of the pickle is looked up, and nothing in it is called.

Only for checkpoints of earlier versions, which have no file of columns (:mod:`._chunks`).

The pickle is read into plain stand-ins. Every type, count and size is checked against the manifest, and so against the files,
before DCP's classes are built from it. Therefore a forged file can neither run code nor ask for memory beyond the files' bytes.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

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

from torch_ragged.checkpoint._chunks import check_manifest, check_places, typed
from torch_ragged.checkpoint._manifest import Manifest

__all__ = ["parse_metadata"]

_METADATA, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_KNOWN = {
    *((_METADATA, kind.__name__) for kind in (Metadata, MetadataIndex, StorageMeta, TensorProperties)),
    *((_METADATA, kind.__name__) for kind in (BytesStorageMetadata, ChunkStorageMetadata, TensorStorageMetadata)),
    *((_METADATA, "_MEM_FORMAT_ENCODING"), (_FILES, "_StorageInfo"), ("torch", "Size"), ("torch.serialization", "_get_layout")),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath", "Path")),
}
_DTYPE_OF_NAME = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


@dataclass(frozen=True)
class _Class:
    """The stand-in of a class or a function in the pickle."""

    name: str


class _Made:
    """The stand-in of an object: what it is made of, and its state."""

    def __init__(self, kind: _Class, args: tuple[Any, ...]) -> None:
        self.kind, self.args, self.state = kind.name, args, None


class _DataUnpickler(pickle._Unpickler):  # type: ignore[name-defined, misc]  # Python's own: the C one has no opcodes to limit.
    """Reads containers, numbers and strings, and stand-ins of the classes in ``_KNOWN``. Refuses everything else."""

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _DTYPE_OF_NAME:
            return _DTYPE_OF_NAME[name]
        if (module, name) not in _KNOWN:
            raise ValueError(f"it holds {module}.{name}, which is no part of DCP's metadata")
        return _Class(name)

    def make(self) -> None:
        """Opcodes REDUCE and NEWOBJ: call a class. Here they make a stand-in."""
        args = self.stack.pop()
        if not isinstance(self.stack[-1], _Class) or not isinstance(args, tuple):
            raise ValueError("it calls what is no class")
        self.stack[-1] = _Made(self.stack[-1], args)

    def build(self) -> None:
        """Opcode BUILD: set the state of an object."""
        state = self.stack.pop()
        if not isinstance(self.stack[-1], _Made):
            raise ValueError("it sets the state of what is no object")
        self.stack[-1].state = state

    def set_item(self) -> None:
        """Opcode SETITEM. Keys of other types, such as deep tuples, could exhaust the stack of the hash function."""
        self.set_items([self.stack.pop(-2), self.stack.pop()])

    def set_items(self, items: list[Any] | None = None) -> None:
        items = self.pop_mark() if items is None else items
        if not isinstance(self.stack[-1], dict) or not all(isinstance(key, (str, _Made)) for key in items[::2]):
            raise ValueError("it has a key that is neither a name nor an index")
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    _LEGAL = (
        *("PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "LONG4"),
        *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "TUPLE", "TUPLE1"),
        *("TUPLE2", "TUPLE3", "APPEND", "APPENDS", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET", "GLOBAL"),
        "STACK_GLOBAL",
    )
    _code = {op.name: ord(op.code) for op in pickletools.opcodes}
    dispatch: ClassVar[dict[int, Any]] = {
        **dict(zip(map(_code.get, _LEGAL), map(pickle._Unpickler.dispatch.get, map(_code.get, _LEGAL)))),  # type: ignore
        _code["REDUCE"]: make,
        _code["NEWOBJ"]: make,
        _code["BUILD"]: build,
        _code["SETITEM"]: set_item,
        _code["SETITEMS"]: set_items,
    }


def parse_metadata(data: bytes, manifest: Manifest) -> Metadata:
    """DCP's metadata from the bytes of ``.metadata``. Runs nothing of it.

    Raises:
        ValueError: the bytes are no pickle of DCP's metadata, hold other classes, or do not fit the manifest or its files.
    """
    try:
        found = _DataUnpickler(io.BytesIO(data)).load()
    except ValueError:
        raise
    except Exception as error:  # A broken pickle raises any type.
        raise ValueError(f"it is no pickle of DCP's metadata ({type(error).__name__}: {error})") from error
    fields = _fields(found, "Metadata")
    entries = typed(fields.get("state_dict_metadata"), dict, "state_dict_metadata")
    stored = _stored(typed(fields.get("storage_data"), dict, "storage_data"), manifest)
    listed = [_fields(entry, entry.kind).get("chunks", ()) for entry in entries.values() if isinstance(entry, _Made)]
    if sum(len(chunks) for chunks in listed if isinstance(chunks, list)) > len(stored):
        raise ValueError(f"its tensors have more chunks than the {len(stored)} that are stored")
    parsed = {typed(name, str, "a name"): _entry(name, entry, stored) for name, entry in entries.items()}
    check_manifest(parsed, manifest)
    version = fields.get("version")
    return Metadata(parsed, None, stored, StorageMeta(), version if isinstance(version, str) else None)


def _fields(value: Any, kind: str) -> dict[str, Any]:
    """The attributes of the stand-in of a ``kind``."""
    if not isinstance(value, _Made) or value.kind != kind:
        raise ValueError(f"it has {reprlib.repr(value)} in place of {kind}")
    return typed(value.state or {}, dict, kind)


def _int(value: Any, what: str) -> int:
    if not 0 <= typed(value, int, what) < 1 << 63:
        raise ValueError(f"its {what} is {reprlib.repr(value)}, expected an int >= 0")
    return int(value)


def _size(value: Any, what: str) -> torch.Size:
    """A torch.Size: a stand-in whose only argument is the tuple of integers."""
    if not isinstance(value, _Made) or value.kind != "Size" or len(value.args) != 1:
        raise ValueError(f"its {what} is {reprlib.repr(value)}, expected a torch.Size")
    numbers = typed(value.args[0], tuple, what)
    if len(numbers) > 64:  # the limit of torch
        raise ValueError(f"its {what} has {len(numbers)} dimensions, expected at most 64")
    return torch.Size([_int(number, what) for number in numbers])


def _stored(entries: dict[Any, Any], manifest: Manifest) -> dict[MetadataIndex, Any]:
    """Where each chunk is. Every chunk lies in a file of the manifest, and no two chunks share a byte."""
    result: dict[MetadataIndex, Any] = {}
    for key, value in entries.items():
        index, info = _fields(key, "MetadataIndex"), _fields(value, "_StorageInfo")
        name, file = typed(index.get("fqn"), str, "index"), typed(info.get("relative_path"), str, "relative_path")
        start, length = _int(info.get("offset"), "offset"), _int(info.get("length"), "length")
        if info.get("transform_descriptors"):
            raise ValueError(f"{name} is stored with a transform: {reprlib.repr(info['transform_descriptors'])}")
        offset = None if index.get("offset") is None else _size(index["offset"], f"offset of {name}")
        number = None if index.get("index") is None else _int(index["index"], f"index of {name}")
        result[MetadataIndex(name, offset, number)] = _StorageInfo(file, start, length)
    check_places(result, manifest)
    return result


def _entry(name: str, entry: Any, stored: dict[MetadataIndex, Any]) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(entry, _Made) and entry.kind == "BytesStorageMetadata":
        return BytesStorageMetadata()
    fields = _fields(entry, "TensorStorageMetadata")
    properties = fields.get("properties")
    state = properties.state if isinstance(properties, _Made) and properties.kind == "TensorProperties" else None
    # Since torch 2.15, the sixth item is the strides, or None.
    if not isinstance(state, tuple) or len(state) not in (5, 6) or not isinstance(state[0], torch.dtype):
        raise ValueError(f"{name} has no dtype")
    size, dtype = _size(fields.get("size"), f"size of {name}"), state[0]
    chunks = [_chunk_at(name, chunk, size, dtype, stored) for chunk in typed(fields.get("chunks"), list, f"chunks of {name}")]
    if len({tuple(chunk.offsets) for chunk in chunks if chunk.sizes.numel()}) != sum(bool(c.sizes.numel()) for c in chunks):
        raise ValueError(f"{name} has two chunks at the same offset")
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
        raise ValueError(f"the chunks of {name} do not have the {math.prod(size)} elements of the tensor")
    found = TensorProperties(dtype=dtype)
    strides = state[5] if state[5:] else None
    if strides is not None and hasattr(found, "strides"):
        of_writer = tuple(_int(each, f"stride of {name}") for each in typed(strides, tuple, f"strides of {name}"))
        # No reader uses them. Earlier versions wrote those of flat local tensors, which have one dimension.
        found.strides = of_writer if len(of_writer) == len(size) else None
    return TensorStorageMetadata(found, size, chunks)


def _chunk_at(
    name: str, chunk: Any, size: torch.Size, dtype: torch.dtype, stored: dict[MetadataIndex, Any]
) -> ChunkStorageMetadata:
    """A chunk that lies in its tensor, and whose elements fit into the bytes that are stored for it."""
    fields = _fields(chunk, "ChunkStorageMetadata")
    offsets, sizes = _size(fields.get("offsets"), f"offsets of {name}"), _size(fields.get("sizes"), f"sizes of {name}")
    if not len(offsets) == len(sizes) == len(size) or any(o + s > whole for o, s, whole in zip(offsets, sizes, size)):
        raise ValueError(f"{name} of shape {tuple(size)} has a chunk {tuple(sizes)} at {tuple(offsets)}")
    info = stored.get(MetadataIndex(name, offsets))
    if info is None:
        raise ValueError(f"the chunk of {name} at {tuple(offsets)} is not stored")
    nbytes = math.prod(sizes) * dtype.itemsize
    if nbytes > info.length:
        raise ValueError(f"{name} has {nbytes} bytes in its chunk at {tuple(offsets)}, but {info.length} are stored")
    return ChunkStorageMetadata(offsets, sizes)
