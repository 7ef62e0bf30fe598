"""A long run of examples/train_moe.py, with checkpoints and two resumes: is memory flat, and are losses those of one run?

    python test/reliability/long_run.py --steps 2000 --json FILE

Each rank notes, 40 times in a run, the bytes of its live tensors, its resident memory
after malloc_trim, its open files and its threads.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]


def sample() -> dict[str, int]:
    """What this process holds now."""
    gc.collect()
    storages = {}
    for each in gc.get_objects():
        if isinstance(each, torch.Tensor) and type(each) in (torch.Tensor, torch.nn.Parameter) and each.device.type == "cpu":
            storage = each.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    ctypes.CDLL(None).malloc_trim(0)
    resident = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return {
        "tensor_bytes": sum(storages.values()),
        "resident_bytes": int(resident.split()[1]) * 1024,
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "python_threads": threading.active_count(),
    }


def work(notes: Path, arguments: list[str]) -> None:
    """A rank: the example's own main(), with samples between its steps."""
    sys.path.insert(0, str(ROOT / "examples"))
    import train_moe

    samples: list[dict[str, int]] = []
    step = train_moe.Trainer.train_step

    def train_step(trainer: Any) -> float:
        loss = step(trainer)
        if trainer.step % int(os.environ["SAMPLE_EVERY"]) == 0:
            samples.append({"step": trainer.step, **sample()})
        return loss

    train_moe.Trainer.train_step = train_step
    sys.argv = ["train_moe.py", *arguments]
    train_moe.main()
    notes.with_name(f"{notes.name}-{os.environ['RANK']}.json").write_text(json.dumps(samples))


def launch(notes: Path, ranks: int, every: int, *arguments: object) -> list[list[dict[str, int]]]:
    """The samples of each rank of one torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [__file__, "--worker", str(notes), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "SAMPLE_EVERY": str(every)}
    subprocess.run(command, check=True, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    return [json.loads(notes.with_name(f"{notes.name}-{rank}.json").read_text()) for rank in range(ranks)]


def growth(samples: list[dict[str, int]], name: str) -> float:
    """How much larger a value is in the last fifth of a run than in its second fifth: the ratio of medians."""
    fifth = max(len(samples) // 5, 1)
    early, late = (statistics.median(each[name] for each in part) for part in (samples[fifth : 2 * fifth], samples[-fifth:]))
    return late / early


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        work(Path(sys.argv[2]), sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        folder, steps = Path(root), args.steps
        common = ["--batch", args.ranks, "--eval-every", steps, "--save-every", steps // 20, "--schedule-steps", steps]
        every = max(steps // 40, 1)
        saving = ["--checkpoint", folder / "a", "--out", folder / "1"]
        whole = launch(folder / "whole", args.ranks, every, *common, "--steps", steps, *saving)
        for part, until in enumerate((steps * 7 // 20, steps * 14 // 20, steps)):
            resume = ["--resume", folder / "b"] if part else []
            saving = ["--checkpoint", folder / "b", "--out", folder / "2"]
            launch(folder / f"part{part}", args.ranks, every, *common, "--steps", until, *saving, *resume)
        one, pieces = (json.loads((folder / name / "report.json").read_text())["history"]["train"] for name in "12")
    rows = {
        name: [round(growth(samples, name), 4) for samples in whole]
        for name in ("tensor_bytes", "resident_bytes", "files", "threads", "python_threads")
    }
    report = {
        "torch": torch.__version__,
        "steps": steps,
        "ranks": args.ranks,
        "resumes": 2,
        "growth": rows,
        "first_samples": [samples[0] for samples in whole],
        "last_samples": [samples[-1] for samples in whole],
        "losses_equal": one == pieces,
        "largest_difference": max(abs(a - b) for a, b in zip(one, pieces, strict=True)),
        "first_loss": one[0],
        "last_loss": one[-1],
    }
    print(json.dumps(report, indent=1))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))
    steady = all(abs(ratio - 1) < 0.05 for name in rows for ratio in rows[name])
    sys.exit(not (steady and one == pieces and len(one) == steps))


if __name__ == "__main__":
    main()
