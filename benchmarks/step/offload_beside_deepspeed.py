"""Steps with optimizer states in host memory and in files, beside DeepSpeed's ZeRO-3 offload, on one CPU rank.

    python -m benchmarks.step.offload_beside_deepspeed --python VENV/bin/python [--json PATH] [--rounds 5] [--folder DIR]

The model and the optimizer (AdamW, float32) are those of ``benchmarks.step.offload``. Each run is a process; kinds take
turns. A row has the median of the runs' medians. The environment of ``--python`` has DeepSpeed, and what its extensions need:
g++, and libaio for files. All processes have one thread for computation.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.common.measure import print_table, write_json

OURS = {"host": "host 1", "files": "files 1 in backward"}
THEIRS = {"none": None, "host": "cpu", "files": "nvme"}
STEPS, WARM = 10, 3


def deepspeed_step(where: str, options: argparse.Namespace) -> Callable[[], None]:
    """A step of DeepSpeed's engine."""
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", DS_ACCELERATOR="cpu")
    import deepspeed  # type: ignore[import-not-found]

    torch.manual_seed(0)
    width = options.width
    blocks = (nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(options.blocks))
    model = nn.Sequential(*blocks)
    zero: dict[str, Any] = {"stage": 3}
    if THEIRS[where] is not None:
        zero["offload_optimizer"] = {"device": THEIRS[where]}
    if where == "files":
        # Reads and writes beside the step, as ours.
        overlap = {"pipeline_read": True, "pipeline_write": True}
        zero["offload_optimizer"] |= {"nvme_path": options.folder, "buffer_count": 5, **overlap}
    settings = {
        "train_batch_size": options.tokens,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": zero,
        # The block size, depth and threads of DeepSpeed's own guide to tuning.
        "aio": {"block_size": 1 << 20, "queue_depth": 8, "thread_count": 1, "single_submit": False, "overlap_events": True},
    }
    deepspeed.init_distributed("gloo")
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    x = torch.randn(options.tokens, width)

    def step() -> None:
        engine.backward(engine(x).square().mean())
        engine.step()

    return step


def our_step(where: str, options: argparse.Namespace) -> Callable[[], None]:
    """A step of ``fully_shard`` and ``offloaded``."""
    import torch.distributed as dist

    from benchmarks.step.offload import optimizer_of, sharded, trainer

    kind = OURS.get(where, "none")
    dist.init_process_group("gloo", init_method=f"file://{options.folder}/{os.getpid()}", rank=0, world_size=1)
    model = sharded(kind, options)
    return trainer(model, optimizer_of(kind, model, fused=True), options)


def run(name: str, where: str, options: argparse.Namespace) -> float:
    """The median milliseconds of a step, in a process of its own."""
    python = sys.executable if name == "torch_ragged" else options.python
    keys = ("width", "blocks", "tokens", "folder")
    command = [python, "-m", "benchmarks.step.offload_beside_deepspeed", "--run", name, where]
    command += [text for key in keys for text in (f"--{key}", str(getattr(options, key)))]
    path = os.path.dirname(os.path.abspath(python)) + os.pathsep + os.environ["PATH"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not found:
        raise SystemExit(f"{name} with states in {where} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return float(json.loads(found[0].removeprefix("RESULT ")))


def measured(name: str, where: str, options: argparse.Namespace) -> float:
    step, times = (our_step if name == "torch_ragged" else deepspeed_step)(where, options), []
    for _ in range(STEPS):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times[WARM:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--python", default=sys.executable, help="of an environment with deepspeed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--folder", help="of the files; default: a temporary one")
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print("RESULT", json.dumps(measured(*options.run, options)))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        options.folder = folder
        kinds = [(name, where) for where in THEIRS for name in ("torch_ragged", "DeepSpeed")]
        times: dict[tuple[str, str], list[float]] = {kind: [] for kind in kinds}
        for _ in range(options.rounds):
            for kind in kinds:
                times[kind].append(run(*kind, options))
    rows = []
    for where in THEIRS:
        ours, theirs = (statistics.median(times[name, where]) for name in ("torch_ragged", "DeepSpeed"))
        rows.append({"states in": where, "torch_ragged ms": ours, "DeepSpeed ms": theirs, "ratio": ours / theirs})
    print_table("A step on one CPU rank, beside DeepSpeed's", rows)
    write_json(options.json, {"table": rows})


if __name__ == "__main__":
    main()
