"""The manifest of a checkpoint: its tensors and their placements, its writer, and size and checksums of every file.

A manifest may come from another program. Reading one never evaluates code, and every field is checked before use.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import reprlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

import torch_ragged
from torch_ragged.checkpoint import _disk
from torch_ragged.checkpoint._errors import CheckpointError
from torch_ragged.checkpoint._files import FileRecord
from torch_ragged.tensor._global_layout import global_layout_of
from torch_ragged.tensor._placement_text import placement_text, read_placement

__all__ = [
    "CHUNKS",
    "FORMAT",
    "MANIFEST",
    "MOST_BYTES",
    "FileRecord",
    "Manifest",
    "TensorRecord",
    "describe",
    "fingerprint",
    "read_manifest",
]

_Mesh = tuple[tuple[int, ...], tuple[str, ...], tuple[int, ...]]  # shape, names of mesh dimensions, ranks

FORMAT = 2  # Readers refuse a manifest with a higher number. A manifest without a base is written with format 1.
MANIFEST = "manifest.json"
CHUNKS = "chunks.json"
MOST_BYTES = 1 << 30  # Of a manifest, chunks.json or .metadata: a larger one is forged, and would fill the memory.
_MAX_DIMS = 64  # the limit of torch


@dataclass(frozen=True)
class TensorRecord:
    """Shape and dtype of a tensor; of a DTensor also its placements and its mesh.

    ``mesh_ranks`` are in row-major order of ``mesh_shape``. ``tied_to`` is the first name of a parameter with several names.
    ``digest`` is that of the values, of a parameter that is not in the checkpoint but in its base.
    """

    shape: tuple[int, ...]
    dtype: str
    placements: tuple[str, ...] = ()
    mesh_shape: tuple[int, ...] = ()
    mesh_dim_names: tuple[str, ...] = ()
    mesh_ranks: tuple[int, ...] = ()
    tied_to: str = field(default="", compare=False)
    digest: str = ""

    @property
    def what(self) -> str:
        """``(4, 3) float32``"""
        return f"{self.shape} {self.dtype}"

    def parsed_placements(self) -> tuple[Placement, ...]:
        """The placements as objects.

        Raises:
            ValueError: a placement is of a kind that this version does not know.
        """
        placements = []
        for text in self.placements:
            try:
                placements.append(read_placement(text))
            except ValueError as error:  # It may be a forged text of any length.
                raise ValueError(f"unknown placement {reprlib.repr(text)}") from error
        return tuple(placements)


@dataclass
class Manifest:
    """The contents of a checkpoint, as plain values.

    Attributes:
        step, consumed_tokens, data_position: as in :class:`TrainState`.
        world_size: the number of ranks that saved it.
        tensors: the record of each tensor, by its name in the checkpoint: ``model.<fqn>``, ``optimizer.state.<fqn>.<state>``,
            ...
        files: the record of each file except the manifest, by file name.
        fingerprint: SHA-256 of name, shape and dtype of all tensors of the model.
        objects: the names of the values that are not tensors: ``scheduler``, ``extra.<name>``, ``per_rank.<name>``.
        base: what the caller has named as the base (``TrainState.base``); "" if nothing was left out.
        frozen: the record of each parameter that was left out because it is in the base, by its name in the checkpoint.
        rng: by random generator: "same" if all ranks had equal states, "each" if ranks had different states.
        torch_version, package_version, format: the versions of the writer.
    """

    step: int = 0
    consumed_tokens: int = 0
    data_position: Any = None
    world_size: int = 1
    tensors: dict[str, TensorRecord] = field(default_factory=dict)
    files: dict[str, FileRecord] = field(default_factory=dict)
    fingerprint: str = ""
    rng: dict[str, str] = field(default_factory=dict)
    objects: list[str] = field(default_factory=list)
    base: str = ""
    frozen: dict[str, TensorRecord] = field(default_factory=dict)
    torch_version: str = torch.__version__
    package_version: str = torch_ragged.__version__
    format: int = 1

    @property
    def nbytes(self) -> int:
        """The bytes of all files except the manifest."""
        return sum(file.nbytes for file in self.files.values())

    def to_json(self) -> str:
        """The manifest as JSON with its own checksum. A mesh that several tensors share is written once."""
        meshes: dict[tuple[Any, ...], int] = {}
        tensors = {}
        for name, tensor in sorted(self.tensors.items()):
            entry: dict[str, Any] = {"shape": tensor.shape, "dtype": tensor.dtype}
            if tensor.placements:
                key = (tensor.mesh_shape, tensor.mesh_dim_names, tensor.mesh_ranks)
                entry |= {"placements": tensor.placements, "mesh": meshes.setdefault(key, len(meshes))}
            if tensor.tied_to:
                entry["tied_to"] = tensor.tied_to
            tensors[name] = entry
        body = {key: value for key, value in vars(self).items() if key not in ("tensors", "files", "base", "frozen")}
        body["tensors"] = tensors
        if self.base:  # Otherwise as versions before format 2 wrote and read it.
            body["base"], body["format"] = self.base, FORMAT
            body["frozen"] = {
                name: {"shape": tensor.shape, "dtype": tensor.dtype, "digest": tensor.digest}
                for name, tensor in sorted(self.frozen.items())
            }
        body["meshes"] = [dict(zip(("shape", "dim_names", "ranks"), mesh)) for mesh in meshes]
        body["files"] = {
            name: {"nbytes": file.nbytes, "block": file.block, "crc32": [f"{crc:08x}" for crc in file.crc32]}
            for name, file in sorted(self.files.items())
        }
        return json.dumps({"crc32": _checksum(body), "manifest": body}, indent=1)


def read_manifest(folder: str | os.PathLike[str]) -> Manifest:
    """The manifest of the checkpoint in ``folder``. No communication.

    Type and range of every field are checked, because the file may come from another program.

    Raises:
        CheckpointError: there is no manifest, it is damaged, or a newer version of this package wrote it.
    """
    path = Path(folder) / MANIFEST
    try:
        with _disk.open_regular(path) as file:
            nbytes = os.fstat(file.fileno()).st_size
            if nbytes > MOST_BYTES:
                raise CheckpointError(f"{path} is damaged: it has {nbytes} bytes, expected at most {MOST_BYTES}")
            text = file.read(nbytes).decode()
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}): expected a checkpoint of torch_ragged.checkpoint.save. If "
            "torch.distributed.checkpoint.save wrote it, load it with torch.distributed.checkpoint.load"
        ) from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    try:
        document = json.loads(text)
        body = document["manifest"]
        if isinstance(body["format"], int) and body["format"] > FORMAT:
            raise CheckpointError(
                f"{path} has format {body['format']}, written by torch_ragged {body.get('package_version')}. This version "
                f"({torch_ragged.__version__}) reads formats up to {FORMAT}: install a newer torch_ragged"
            )
        if document["crc32"] != _checksum(body):
            raise CheckpointError(f"{path} is damaged: its checksum is {_checksum(body)}, expected {document['crc32']}")
        return _from_body(body)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error


T = TypeVar("T")


def _exactly(kind: type[T], value: Any, what: str) -> T:
    """Return ``value`` if its type is exactly ``kind``. Not isinstance: JSON's ``true`` must not count as an int.

    Raises:
        ValueError: it has another type.
    """
    if type(value) is not kind:
        raise ValueError(f"{what} is {reprlib.repr(value)}, expected {kind.__name__}")
    return value


def _count(value: Any, what: str, least: int = 0) -> int:
    """Return ``value`` if it is an int in [``least``, 2**63). Otherwise raises ValueError."""
    if not least <= _exactly(int, value, what) < 1 << 63:
        raise ValueError(f"{what} is {reprlib.repr(value)}, expected an int >= {least}")
    return value


def _counts_of(value: Any, what: str) -> tuple[int, ...]:
    return tuple(_count(item, what) for item in _exactly(list, value, what))


def _read_shape(value: Any, what: str) -> tuple[int, ...]:
    if len(_exactly(list, value, what)) > _MAX_DIMS:
        raise ValueError(f"{what} has {len(value)} dimensions, expected at most {_MAX_DIMS}")
    return _counts_of(value, what)


def _texts_of(value: Any, what: str) -> tuple[str, ...]:
    return tuple(_exactly(str, item, what) for item in _exactly(list, value, what))


def _from_body(body: dict[str, Any]) -> Manifest:
    meshes = [_mesh_of_entry(entry) for entry in _exactly(list, body.pop("meshes"), "meshes")]
    tensors = {name: _tensor_of(name, entry, meshes) for name, entry in _exactly(dict, body.pop("tensors"), "tensors").items()}
    frozen = {name: _tensor_of(name, entry, []) for name, entry in _exactly(dict, body.pop("frozen", {}), "frozen").items()}
    files = {name: _file_of(name, entry) for name, entry in _exactly(dict, body.pop("files"), "files").items()}
    if ".metadata" not in files:
        raise ValueError("files has no .metadata")
    unknown = body.keys() - {known.name for known in fields(Manifest)}
    if unknown:
        raise ValueError(f"the manifest has unknown fields {reprlib.repr(sorted(unknown))}")
    for name, least in (("step", 0), ("consumed_tokens", 0), ("world_size", 1), ("format", 1)):
        _count(body[name], name, least)
    of_ranks = len(files.keys() - {".metadata", CHUNKS})  # Each rank writes a file.
    if body["world_size"] > max(of_ranks, 1):
        raise ValueError(f"world_size is {body['world_size']}, but there are only {of_ranks} files of ranks")
    for name in ("fingerprint", "torch_version", "package_version"):
        _exactly(str, body[name], name)
    if not _exactly(str, body.get("base", ""), "base") and frozen:
        raise ValueError(f"base is empty, but {len(frozen)} tensors are in it")
    _texts_of(body["objects"], "objects")
    _texts_of(list(_exactly(dict, body["rng"], "rng").values()), "rng")
    return Manifest(tensors=tensors, frozen=frozen, files=files, **body)


def _mesh_of_entry(entry: Any) -> _Mesh:
    mesh = _exactly(dict, entry, "a mesh")
    shape, ranks = _read_shape(mesh["shape"], "a mesh's shape"), _counts_of(mesh["ranks"], "a mesh's ranks")
    names = _texts_of(mesh["dim_names"], "a mesh's dim_names")
    if math.prod(shape) != len(ranks) or len(names) not in (0, len(shape)):
        raise ValueError(
            f"a mesh of shape {reprlib.repr(shape)} has {len(ranks)} ranks and {len(names)} names, expected one rank per "
            "coordinate, and no names or one per dimension"
        )
    return shape, names, ranks


def _tensor_of(name: str, entry: Any, meshes: list[_Mesh]) -> TensorRecord:
    tensor = _exactly(dict, entry, name)
    shape, dtype = _read_shape(tensor["shape"], f"{name}'s shape"), _exactly(str, tensor["dtype"], f"{name}'s dtype")
    tied_to = _exactly(str, tensor.get("tied_to", ""), f"{name}'s tied_to")
    digest = _exactly(str, tensor.get("digest", ""), f"{name}'s digest")
    if "mesh" not in tensor:
        return TensorRecord(shape, dtype, tied_to=tied_to, digest=digest)
    index = _count(tensor["mesh"], f"{name}'s mesh")
    if index >= len(meshes):
        raise ValueError(f"{name}'s mesh is {index}, but there are {len(meshes)} meshes")
    placements = _texts_of(tensor["placements"], f"{name}'s placements")
    if len(placements) != len(meshes[index][0]):
        raise ValueError(
            f"{name} has {len(placements)} placements on a mesh of shape {reprlib.repr(meshes[index][0])}, expected one per "
            "dimension of the mesh"
        )
    return TensorRecord(shape, dtype, placements, *meshes[index], tied_to)


def _file_of(name: str, entry: Any) -> FileRecord:
    if name in ("", ".", "..") or "/" in name or not name.isprintable():
        raise ValueError(f"{reprlib.repr(name)} is no name of a file in the checkpoint's folder")
    record = _exactly(dict, entry, name)
    nbytes, block = _count(record["nbytes"], f"{name}'s nbytes"), _count(record["block"], f"{name}'s block", 1)
    checksums = _exactly(list, record["crc32"], f"{name}'s crc32")
    if len(checksums) != -(-nbytes // block):  # Too few checksums would leave bytes unverified.
        raise ValueError(f"{name} has {len(checksums)} checksums, expected {-(-nbytes // block)} for {nbytes} bytes")
    return FileRecord(nbytes, tuple(int(crc, 16) for crc in _texts_of(checksums, f"{name}'s crc32")), block)


def _checksum(body: Mapping[str, Any]) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return f"{zlib.crc32(canonical.encode()):08x}"


def describe(tensor: torch.Tensor) -> TensorRecord:
    """The record of a tensor. No communication."""
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    if not isinstance(tensor, DTensor):
        layout = global_layout_of(tensor)
        return TensorRecord(shape if layout is None else layout.global_shape, dtype)
    return TensorRecord(shape, dtype, tuple(map(placement_text, tensor.placements)), *_mesh_fields(tensor.device_mesh))


_meshes: WeakKeyDictionary[DeviceMesh, _Mesh] = WeakKeyDictionary()  # Cached: a mesh's list of ranks is slow to read.


def _mesh_fields(mesh: DeviceMesh) -> _Mesh:
    """Shape, names of mesh dimensions, and ranks of ``mesh``."""
    if mesh not in _meshes:
        _meshes[mesh] = tuple(mesh.shape), tuple(mesh.mesh_dim_names or ()), tuple(mesh.mesh.flatten().tolist())
    return _meshes[mesh]


def fingerprint(tensors: Mapping[str, TensorRecord]) -> str:
    """SHA-256 over name, shape and dtype of each tensor of the model, sorted by name."""
    lines = [f"{name} {record.what}\n" for name, record in sorted(tensors.items()) if name.startswith("model.")]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
