"""``torch-ragged checkpoint inspect|verify|diff``, which is also ``python -m torch_ragged.checkpoint``.

It looks at a checkpoint from the command line. It runs in one process, needs no model, runs no code of a pickle and changes no
file.
"""

from __future__ import annotations

import argparse
import fnmatch
import io
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from torch_ragged._command_line import command_name, ends_quietly
from torch_ragged.checkpoint._data import ObjectPlanner, load_object
from torch_ragged.checkpoint._errors import CheckpointError, raise_on_all, without_warning
from torch_ragged.checkpoint._folder import checkpoint_at
from torch_ragged.checkpoint._manifest import Manifest, TensorRecord, read_manifest
from torch_ragged.checkpoint._reader import CheckpointReader, damage
from torch_ragged.checkpoint._same import bytes_of
from torch_ragged.checkpoint._writer import missing_chunks
from torch_ragged.debug import visualize_sharding

__all__ = ["main"]

_HIDDEN = {"objects", "per_rank", "rng"}  # Byte tensors of pickles and random states: not listed as tensors.


@ends_quietly
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv``. Returns the exit code: 1 if a checkpoint is damaged or missing, or if two differ; or 0."""
    parser = argparse.ArgumentParser(
        prog=command_name("torch_ragged.checkpoint"), description="Show, verify or compare checkpoints."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser("inspect", help="show the contents and how each tensor was sharded")
    verify = commands.add_parser("verify", help="read every byte and compare checksums")
    diff = commands.add_parser("diff", help="compare two checkpoints")
    for command in (inspect, verify, diff):
        command.add_argument("path", type=Path, help="a checkpoint, or a folder of checkpoints (the latest is used)")
    diff.add_argument("other", type=Path, help="the checkpoint to compare with")
    diff.add_argument("--values", action="store_true", help="compare values too, one tensor in memory at a time")
    for command in (inspect, diff):
        command.add_argument(
            "--tensors", default="*", metavar="PATTERN", help="only tensors with such names, for example 'model.*.weight'"
        )
    inspect.add_argument("--draw", action="store_true", help="draw which rank owned which part of each tensor")
    args = parser.parse_args(argv)
    try:
        if args.command == "inspect":
            return _inspect(args.path, args.tensors, args.draw)
        return _verify(args.path) if args.command == "verify" else _diff(args.path, args.other, args.tensors, args.values)
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 1


def _inspect(path: Path, pattern: str, draw: bool) -> int:
    folder = checkpoint_at(path)
    manifest = read_manifest(folder)
    print(folder)
    rows = [
        ("step", f"{manifest.step:,}"),
        ("tokens", f"{manifest.consumed_tokens:,}"),
        ("data position", str(manifest.data_position)),
        ("ranks", str(manifest.world_size)),
        ("written by", f"torch_ragged {manifest.package_version}, torch {manifest.torch_version}, format {manifest.format}"),
        ("model", f"{_elements(manifest):,} elements{_tied(manifest)}, fingerprint {manifest.fingerprint[:16]}"),
        *([("base", f"{manifest.base} ({len(manifest.frozen)} frozen tensors are there)")] if manifest.base else []),
        ("holds", ", ".join([*_top_level_parts(manifest), *manifest.objects])),
        ("random states", ", ".join(f"{name} ({kind})" for name, kind in manifest.rng.items()) or "none"),
        ("files", f"{len(manifest.files)}, {_bytes(manifest.nbytes)}"),
    ]
    _table(rows)
    named = sorted((name, t) for name, t in manifest.tensors.items() if name.partition(".")[0] not in _HIDDEN)
    tensors = {name: t for name, t in named if fnmatch.fnmatchcase(name, pattern)}
    print()
    if not tensors:
        print(f"no tensor has a name that matches {pattern}")
    elif draw:
        print("\n\n".join(f"{name} {tensor.dtype}\n{_drawn_record(tensor)}" for name, tensor in tensors.items()))
    else:
        header = ("tensor", "shape", "dtype", "placements", "mesh")
        _table([header, *((name, _shape(t.shape), t.dtype, _placements(t), _mesh(t)) for name, t in tensors.items())])
    return 0


def _verify(path: Path) -> int:
    reader = CheckpointReader(path)
    metadata = reader.read_metadata()
    problems = damage(reader.folder, reader.manifest, metadata) or missing_chunks(
        metadata, metadata.storage_data, reader.manifest.files
    )
    for problem in problems:
        print(problem)
    if not problems:
        chunks = sum(len(getattr(item, "chunks", ())) for item in metadata.state_dict_metadata.values())
        print(
            f"{reader.folder} is whole: {len(reader.manifest.files)} files, {_bytes(reader.manifest.nbytes)}, "
            f"{chunks} chunks of {len(reader.manifest.tensors)} tensors"
        )
        for refused in _refused_objects(reader, metadata):
            print(refused)
    return bool(problems)


def _refused_objects(reader: CheckpointReader, metadata: Metadata) -> list[str]:
    """Why ``load`` refuses objects of a checkpoint that has no damage, unless it trusts the checkpoint."""
    refused = []

    def check(data: bytes, name: str) -> None:
        try:
            load_object(data, name, trust=False, map_location="cpu")
        except Exception as error:
            refused.append(str(error) if isinstance(error, CheckpointError) else f"{name}: {type(error).__name__}: {error}")

    class Planner(DefaultLoadPlanner):
        def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
            check(value.read(), read_item.dest_index.fqn)

    held = {
        name: torch.empty(item.size, dtype=torch.uint8, device="cpu") if isinstance(item, TensorStorageMetadata) else None
        for name, item in metadata.state_dict_metadata.items()
        if not isinstance(item, TensorStorageMetadata) or name.partition(".")[0] in ("objects", "per_rank")
    }
    reader.verify = False  # It was verified before.
    with raise_on_all(f"reading {reader.folder}"), without_warning():
        dcp.load(held, storage_reader=reader, planner=Planner(), no_dist=True)
    objects = ", ".join(name for name in reader.manifest.objects if not name.startswith("per_rank."))
    for name, tensor in held.items():
        if tensor is not None:
            check(bytes_of(tensor), f"the pickle of {objects}" if name == "objects" else name)
    return refused


def _diff(path: Path, other: Path, pattern: str, values: bool) -> int:
    folders = [checkpoint_at(path), checkpoint_at(other)]
    first, second = map(read_manifest, folders)
    rows = [("", str(folders[0]), str(folders[1]))]
    told = ("step", "consumed_tokens", "data_position", "world_size", "torch_version", "package_version", "objects", "base")
    for name in told:
        a, b = getattr(first, name), getattr(second, name)
        if a != b:
            rows.append((name.replace("_", " "), str(a), str(b)))
    every, others = ({**manifest.frozen, **manifest.tensors} for manifest in (first, second))
    names = sorted(name for name in {*every, *others} if fnmatch.fnmatchcase(name, pattern))
    for name in names:
        a, b = every.get(name), others.get(name)
        if a != b:
            rows.append((name, _described_record(a), _described_record(b)))
    in_both = [n for n in names if n in first.tensors and n in second.tensors]
    comparable = [name for name in in_both if first.tensors[name].what == second.tensors[name].what]
    if values:
        for name in comparable:
            difference = _value_difference(name, first.tensors[name], folders)
            if difference:
                rows.append((name, "", difference))
    if len(rows) == 1:
        print(f"no difference between {folders[0]} and {folders[1]}{'' if values else ' (values: only with --values)'}")
        return 0
    _table(rows)
    if not values:
        print("values are compared only with --values")
    return 1


def _value_difference(name: str, record: TensorRecord, folders: Sequence[Path]) -> str:
    """How the values of a tensor differ between two checkpoints; empty if they are bitwise equal."""
    tensors, dtype = [], getattr(torch, record.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(
            f"{name} has dtype {record.dtype}, which torch {torch.__version__} does not have: compare without --values, or "
            "install a newer torch"
        )
    for folder in folders:
        reader = CheckpointReader(folder, verify=False)
        reader.read_metadata()  # First: it checks that the files have the bytes that the manifest promises.
        tensor = {name: torch.empty(record.shape, dtype=dtype, device="cpu")}
        with raise_on_all(f"reading {folder}"), without_warning():
            dcp.load(tensor, storage_reader=reader, planner=ObjectPlanner(), no_dist=True)
        tensors.append(tensor[name])
    a, b = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors)
    if torch.equal(a, b):
        return ""
    count = int((a != b).view(-1, tensors[0].element_size()).any(1).sum())
    text = f"{count:,} of {tensors[0].numel():,} values differ"
    if tensors[0].is_complex() or tensors[0].dtype == torch.bool:
        return text
    return f"{text}, by at most {(tensors[0].double() - tensors[1].double()).abs().max().item():.3g}"


def _described_record(tensor: TensorRecord | None) -> str:
    if tensor is None:
        return "-"
    base = f"in the base, digest {tensor.digest}" if tensor.digest else ""
    return " ".join(filter(None, (tensor.what, _placements(tensor), _mesh(tensor), base)))


def _elements(manifest: Manifest) -> int:
    """Of the model's parameters and buffers, tied ones once."""
    return sum(math.prod(t.shape) for name, t in manifest.tensors.items() if name.startswith("model.") and not t.tied_to)


def _tied(manifest: Manifest) -> str:
    tied = sum(bool(tensor.tied_to) for tensor in manifest.tensors.values())
    return f" ({tied} tied tensor{'s' * (tied > 1)} not counted again)" if tied else ""


def _top_level_parts(manifest: Manifest) -> list[str]:
    """The top-level names, such as ``model`` and ``optimizer``, each with its number of tensors."""
    parts = sorted({name.partition(".")[0] for name in manifest.tensors} - _HIDDEN)
    counts = {part: sum(name.startswith(part + ".") for name in manifest.tensors) for part in parts}
    return [f"{part} ({count} tensors)" for part, count in counts.items()]


def _drawn_record(tensor: TensorRecord) -> str:
    if not tensor.placements:
        return f"{tensor.shape}, a plain tensor"
    try:
        placements = tensor.parsed_placements()
        return visualize_sharding(tensor.shape, tensor.mesh_shape, placements, ranks=tensor.mesh_ranks, max_width=100)
    except ValueError as error:
        return f"{tensor.shape} under {_placements(tensor)}: cannot be drawn ({error})"


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _placements(tensor: TensorRecord) -> str:
    """The placements as short text, cut off after 60 characters."""
    try:
        text = ", ".join(map(str, tensor.parsed_placements()))
    except ValueError:
        text = ", ".join(tensor.placements)
    return text if len(text) <= 60 else text[:57] + "..."


def _mesh(tensor: TensorRecord) -> str:
    names = tensor.mesh_dim_names or [""] * len(tensor.mesh_shape)
    return " x ".join(f"{name}={size}" if name else str(size) for name, size in zip(names, tensor.mesh_shape))


def _bytes(count: int) -> str:
    size, units = float(count), iter(("bytes", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while size >= 1024 and unit != "TiB":
        size, unit = size / 1024, next(units)
    return f"{count} bytes" if unit == "bytes" else f"{size:.1f} {unit}"


def _table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
