"""Memory by torch's allocator, and what the host issues per step: ours beside FSDP2. ``python -m rehearsal.measure``.

Bytes and counts are those of a GPU, but for kernels inside an operator: an operator counts as one launch. Host times are of
this machine, and include the stand-ins: they compare two runtimes, and predict no GPU.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RANKS, LAYERS, WIDTH, STEPS = 2, 6, 256, 5
COUNTERS = ("launches", "copies", "events", "waits", "synchronizations", "cudaMalloc", "cudaFree", "collectives")


def rank(flavour: str, port: int, number: int) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if flavour == "FSDP2":
        from torch.distributed.fsdp import fully_shard
    else:
        from torch_ragged.fsdp import fully_shard
    torch.cuda.set_device(number)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("nccl", store=store, rank=number, world_size=RANKS, timeout=datetime.timedelta(seconds=120))
    mesh = init_device_mesh("cuda", (RANKS,))
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).cuda()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    issued = 0.0
    for step in range(STEPS):
        if step == 2:  # Warm: the allocator has its segments.
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            torch.ops.rehearsal.counts(True)
        start = time.process_time()
        model(torch.randn(2, 16, WIDTH, device="cuda")).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        issued += (time.process_time() - start) * (step >= 2)
        torch.cuda.synchronize()
    steps, memory = STEPS - 2, torch.cuda.memory_stats()
    counts = dict(zip(COUNTERS, torch.ops.rehearsal.counts(False)))
    found = {
        "peak allocated (MiB)": memory["allocated_bytes.all.peak"] / 2**20,
        "peak reserved (MiB)": memory["reserved_bytes.all.peak"] / 2**20,
        "segments": memory["segment.all.peak"],
        "cudaMalloc in all": memory["num_device_alloc"],
        "allocations per step": memory["allocation.all.allocated"] / STEPS,
        "host CPU time per step (ms)": issued / steps * 1000,
        **{f"{name} per step": count / steps for name, count in counts.items() if not name.startswith("cuda")},
    }
    print("RESULT" + json.dumps(found), flush=True)
    os._exit(0)


def measured(flavour: str) -> dict[str, Any]:
    """The numbers of rank 0."""
    import torch.distributed as dist

    from rehearsal.__main__ import environment

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    settings = {**os.environ, **environment(), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), flavour, str(store.port)]
    processes = [
        subprocess.Popen([*command, str(number)], env=settings, stdout=subprocess.PIPE, text=True) for number in range(RANKS)
    ]
    outputs = [process.communicate(timeout=500)[0] for process in processes]
    return json.loads(outputs[0].partition("RESULT")[2])


def main() -> None:
    if len(sys.argv) > 1:
        rank(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    ours, theirs = measured("ours"), measured("FSDP2")
    print(f"rehearsed: {RANKS} ranks, {LAYERS} layers of width {WIDTH}, bfloat16 with float32 reductions, steps 3 to {STEPS}\n")
    print("| per rank | ours | FSDP2 |\n|---|---:|---:|")
    for name, value in ours.items():
        print(f"| {name} | {value:.2f} | {theirs[name]:.2f} |")


if __name__ == "__main__":
    main()
