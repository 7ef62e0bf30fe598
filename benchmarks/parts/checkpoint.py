"""Time to save and load a checkpoint, beside FSDP2 with torch.distributed.checkpoint (DCP): same model, same ranks, one run.

    python -m benchmarks.parts.checkpoint [--json PATH] [--ranks 2] [--rounds 9] [--dim 1024] [--layers 4] [--chunks 51200]

Model and AdamW states of a small transformer are saved and loaded by turns, each round in another order:

    FSDP2, DCP            torch's fully_shard, get_state_dict, dcp.save; dcp.load, set_state_dict
    ragged, DCP           the same calls on a model of torch_ragged.fsdp
    ragged, checkpoint    torch_ragged.checkpoint.save, with checksums, and load, which verifies them all first

Wall time from when all ranks begin until the last one is done, files synced to disk. Loads find the files in the page cache.
CPU time is that of the rank that took most; other programs of the machine have less influence on it. Memory is the growth of
the peak resident memory over one save (VmHWM), as a share of what the rank saves.

A second table has what a rank reads first: where each of ``--chunks`` chunks lies, by ``chunks.json``, by ``.metadata`` read as
data (of older checkpoints), and by DCP's unpickler, which checks nothing.
"""

from __future__ import annotations

import argparse
import gc
import os
import pickle
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from benchmarks.common.measure import print_table, write_json
from torch_ragged import checkpoint
from torch_ragged.checkpoint._chunks import chunks_text, parse_chunks
from torch_ragged.checkpoint._files import FileRecord
from torch_ragged.checkpoint._manifest import Manifest, TensorRecord
from torch_ragged.checkpoint._metadata import parse_metadata
from torch_ragged.fsdp import fully_shard


def build(options: argparse.Namespace, shard: Callable[..., Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model, sharded, and its optimizer with states."""
    torch.manual_seed(0)
    dim = options.dim
    layer = lambda: nn.TransformerEncoderLayer(dim, 8, 4 * dim, batch_first=True)  # noqa: E731
    model = nn.Sequential(nn.Embedding(4 * dim, dim), *(layer() for _ in range(options.layers)))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model[1:]:
        shard(block, mesh=mesh)
    shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    get_state_dict(model, optimizer)  # Makes the states.
    return model, optimizer


def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Callable[[Path], Any], Callable[[Path], Any]]:
    def save(path: Path) -> None:
        parameters, states = get_state_dict(model, optimizer)
        dcp.save({"model": parameters, "optimizer": states}, checkpoint_id=path)

    def load(path: Path) -> None:
        parameters, states = get_state_dict(model, optimizer)
        state = {"model": parameters, "optimizer": states}
        dcp.load(state, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    return save, load


def contract(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Callable[[Path], Any], Callable[[Path], Any]]:
    state = checkpoint.TrainState(model, optimizer)
    return lambda path: checkpoint.save(path, state), lambda path: checkpoint.load(path, state)


def timed(function: Callable[[Path], Any], path: Path) -> tuple[float, float]:
    """Seconds until the slowest rank is done, and the CPU seconds of the rank that took most."""
    dist.barrier()
    start = time.perf_counter(), time.process_time()
    function(path)
    seconds = torch.tensor([time.perf_counter() - start[0], time.process_time() - start[1]], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return tuple(seconds.tolist())  # type: ignore[return-value]


def peak_growth(function: Callable[[Path], Any], path: Path) -> int:
    """Bytes by which the peak resident memory of this process rises above what it holds now."""

    def status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    function(path)
    return status("VmHWM") - before


def measure(rank: int, store: str, folder: str, options: argparse.Namespace, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, options.ranks), rank=rank, world_size=options.ranks)
    ours, theirs = build(options, fully_shard), build(options, torch_fully_shard)
    ways = {"FSDP2, DCP": plain(*theirs), "ragged, DCP": plain(*ours), "ragged, checkpoint": contract(*ours)}
    nbytes = 3 * sum(p.numel() * p.element_size() for p in ours[0].parameters())
    kinds = ("save", "save CPU", "load", "load CPU")
    times: dict[tuple[str, str], list[float]] = {(name, what): [] for name in ways for what in kinds}
    names = list(ways)
    for turn in range(-1, options.rounds):  # The first is to warm up.
        for index in range(len(names)):
            name = names[(turn + index) % len(names)]
            path = Path(folder) / name.replace(", ", "-")
            if rank == 0:
                shutil.rmtree(path, ignore_errors=True)
                os.sync()
            found = timed(ways[name][0], path) + timed(ways[name][1], path)
            if turn >= 0:
                for what, seconds in zip(kinds, found):
                    times[name, what].append(seconds)
    growth = {
        name: peak_growth(save, Path(folder) / f"memory-{name}") / (nbytes / options.ranks) for name, (save, _) in ways.items()
    }
    if rank == 0:
        results.put((nbytes, times, growth))
    dist.barrier()
    dist.destroy_process_group()


def reading_of_chunks(chunks: int, rounds: int) -> list[dict[str, Any]]:
    """Microseconds a chunk, for one tensor of 256 chunks after the other, as a large model on 256 ranks has them."""
    ranks, rows, stored, entries, records = 256, 16, {}, {}, {}
    nbytes = rows * 64 * 4 + 1024  # The elements, and their archive.
    for number in range(max(1, chunks // ranks)):
        name, size = f"model.layers.{number}.weight", torch.Size((rows * ranks, 64))
        parts = [ChunkStorageMetadata(torch.Size((rows * rank, 0)), torch.Size((rows, 64))) for rank in range(ranks)]
        entries[name] = TensorStorageMetadata(TensorProperties(dtype=torch.float32), size, parts)
        records[name] = TensorRecord(tuple(size), "float32")
        for rank, part in enumerate(parts):
            stored[MetadataIndex(name, part.offsets, rank)] = _StorageInfo(f"__{rank}_0.distcp", number * nbytes, nbytes)
    metadata = Metadata(entries, None, stored, StorageMeta())
    files = {f"__{rank}_0.distcp": FileRecord(len(entries) * nbytes, ()) for rank in range(ranks)}
    manifest, text, pickled = (
        Manifest(tensors=records, files=files),
        chunks_text(metadata, stored).encode(),
        pickle.dumps(metadata),
    )
    ways = {
        "chunks.json": (lambda: parse_chunks(text, manifest), len(text)),
        ".metadata as data": (lambda: parse_metadata(pickled, manifest), len(pickled)),
        "DCP's unpickler": (lambda: pickle.loads(pickled), len(pickled)),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    gc.disable()  # As the reader does.
    for _ in range(rounds):
        for name, (read, _size) in ways.items():
            start = time.perf_counter()
            read()
            times[name].append((time.perf_counter() - start) * 1e6 / len(stored))
    gc.enable()
    return [
        {"way": name, "us a chunk": statistics.median(times[name]), "bytes a chunk": size / len(stored)}
        for name, (_, size) in ways.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the results to this file too")
    for name, default in (("ranks", 2), ("rounds", 9), ("dim", 1024), ("layers", 4), ("chunks", 51200)):
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    parser.add_argument("--folder", help="where to write (default: a temporary folder)")
    options = parser.parse_args()
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        results = context.Queue()
        arguments = (f"{folder}/store", folder, options, results)
        ranks = [context.Process(target=measure, args=(rank, *arguments)) for rank in range(options.ranks)]
        for process in ranks:
            process.start()
        nbytes, times, growth = results.get()
        for process in ranks:
            process.join()
    rows = []
    for name in growth:
        row: dict[str, Any] = {"way": name}
        for what in ("save", "save CPU", "load", "load CPU"):
            base = times["FSDP2, DCP", what]
            ratios = [mine / theirs for mine, theirs in zip(times[name, what], base)]
            row |= {f"{what} s": statistics.median(times[name, what]), f"{what} ratio": statistics.median(ratios)}
        rows.append({**row, "memory": growth[name]})
    title = f"torch {torch.__version__}: {nbytes / 1e6:.0f} MB on {options.ranks} ranks, medians of {options.rounds} rounds"
    print_table(title, rows)
    reading = reading_of_chunks(options.chunks, max(1, options.rounds // 3))
    print_table(f"reading where {options.chunks} chunks lie, one process", reading)
    write_json(
        options.json, {"reading": reading, "ranks": options.ranks, "rounds": options.rounds, "bytes": nbytes, "ways": rows}
    )


if __name__ == "__main__":
    main()
