"""Everything that one Hopper GPU can tell, in 9 minutes at the most.

Prints tables, and writes benchmarks/results/gpu-<name>-torch<version>.json.

    benchmarks/gpu.sh                             all parts
    benchmarks/gpu.sh --parts steps graph
    benchmarks/gpu.sh --device cpu --smoke        what of it runs on a CPU, with tiny sizes, in a minute

Parts run one after the other in processes of their own, each with a budget of seconds: one that fails is reported, and the
others go on.

    steps     training steps beside FSDP2, as one rank of 8 to 256, with an emulated network (gpu_steps.py, gpu_network.py)
    peers     NCCL with one rank; several ranks on one GPU over symmetric memory (gpu_peers.py)
    kernels   the Triton kernels against copies, matmuls and other packages' (gpu_kernels.py)
    graph     a training step as a CUDA graph (gpu_graph.py)
    offload   optimizer states in host memory, beside FSDP2's CPU offload (gpu_offload.py)
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
BUDGETS = {"steps": 200.0, "peers": 60.0, "kernels": 80.0, "graph": 40.0, "offload": 90.0}
GRACE = 10.0
"""Seconds for a part to end by itself behind its budget, before it is killed: 520 for all five."""


def run_part(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The results of a part, with how it ended."""
    if not (HERE / f"gpu_{name}.py").exists():
        return {"status": "missing", "seconds": 0.0}
    budget = BUDGETS[name] * options.scale
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        command = [sys.executable, "-m", f"benchmarks.gpu.gpu_{name}", "--device", options.device, "--json", str(path)]
        if options.smoke:
            command.append("--smoke")
        elif name != "kernels":  # It has a fixed number of rounds.
            command += ["--budget", f"{budget:.0f}"]
        print(f"\n== {name}: {shlex.join(command)}", flush=True)
        start = time.monotonic()
        status = _wait(subprocess.Popen(command, env=_environment(name)), budget + GRACE)
        results = json.loads(path.read_text()) if path.exists() else {}
    return {"status": status, "seconds": round(time.monotonic() - start, 1), **results}


def _environment(name: str) -> dict[str, str]:
    """As the user has it; with segments that grow for training steps, unless the user has chosen otherwise."""
    path = os.pathsep.join(filter(None, (str(HERE.parents[1]), os.environ.get("PYTHONPATH", ""))))
    defaults = {"OMP_NUM_THREADS": "1"}
    if name == "steps":
        defaults["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    return {**defaults, **os.environ, "PYTHONPATH": path}


def _wait(process: subprocess.Popen[bytes], seconds: float) -> str:
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return f"killed after {seconds:.0f} s"
    return "done" if code == 0 else f"exit code {code}"


def machine(device: str) -> dict[str, Any]:
    """What the numbers are of."""
    found: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version(), "device": device}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "memory GiB": properties.total_memory / 2**30, "cuda": torch.version.cuda}
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["driver"] = _driver()
    else:
        found["gpu"] = platform.processor() or "cpu"
    return {**found, "command": shlex.join(sys.orig_argv)}


def _driver() -> str:
    """The version of the GPU's driver; empty without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return ""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()


def default_path(found: dict[str, Any]) -> Path:
    """Where results go: named after the GPU and torch."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", found["gpu"]).strip("-")
    return HERE.parent / "results" / f"gpu-{name}-torch{torch.__version__.partition('+')[0]}.json"


def main() -> None:
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("--parts", nargs="+", choices=BUDGETS, default=list(BUDGETS))
    command.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    command.add_argument("--smoke", action="store_true", help="tiny sizes: that everything runs")
    command.add_argument("--scale", type=float, default=1.0, help="of the parts' budgets")
    command.add_argument(
        "--json", type=Path, help="default: benchmarks/results/gpu-<name>-torch<version>.json; none with --smoke"
    )
    options = command.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        command.error("no GPU: pass --device cpu --smoke to see that everything runs")
    found = machine(options.device)
    path = options.json or (None if options.smoke else default_path(found))
    parts: dict[str, Any] = {}
    for name in options.parts:
        parts[name] = run_part(name, options)
        if path is not None:  # After each part: what is done is not lost.
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({**found, "parts": parts}, indent=1) + "\n")
    print()
    for name, part in parts.items():
        print(f"{name}: {part['status']} in {part['seconds']} s")
    if path is not None:
        print(f"results: {path}")
    if any(part["status"] not in ("done", "missing") for part in parts.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
