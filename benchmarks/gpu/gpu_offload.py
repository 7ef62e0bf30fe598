"""Training steps on one GPU with the optimizer's states in host memory, beside states on the GPU and FSDP2's CPU offload.

Four layers of Llama-3.1-8B with embedding and head, one rank, float32 parameters and AdamW; FSDP2's CPUOffloadPolicy keeps
parameters and gradients in host memory too, and steps there. "PCIe ms" is the time to copy the offloaded states to the GPU and
back in pinned memory, both directions at once: no step with all states in host memory can be shorter. Kinds run one after the
other, because pinned memory is slow to allocate; a step's time is the median.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from benchmarks.common.measure import print_table
from benchmarks.common.transformers import SHAPES, Shape, Transformer
from benchmarks.gpu.gpu_common import GIB, Deadline, Timer, finish, initialize, options_of, parser
from torch_ragged.fsdp import Offload, fully_shard, offloaded

KINDS = ("on the GPU", "host 1", "host 1 in backward", "host 0.5 in backward", "FSDP2", "FSDP2 CPUOffloadPolicy")
SMOKE = Shape(layers=2, dim=128, heads=2, kv=1, head=64, hidden=256, vocabulary=512)


class Training:
    """A model and its optimizer of a kind."""

    def __init__(self, kind: str, shape: Shape, batch: int, tokens: int, device: str) -> None:
        knobs: dict[str, Any] = {"mesh": init_device_mesh(device, (1,))}
        knobs["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        shard: Any = torch_fully_shard if kind.startswith("FSDP2") else fully_shard
        on_host = kind.endswith("CPUOffloadPolicy")
        if on_host:
            knobs["offload_policy"] = CPUOffloadPolicy(pin_memory=device == "cuda")
        elif kind.startswith("host"):
            knobs["offload_policy"] = Offload(float(kind.split()[1]))
        with torch.device("meta"):
            self.model = Transformer(shape, tokens, "some", min(4, shape.layers))
        for module in (self.model.embedding, *self.model.blocks, self.model.head, self.model):
            shard(module, **knobs)
        self.model.to_empty(device="cpu" if on_host else device)
        initialize(self.model)
        options: dict[str, Any] = {"lr": 1e-5, "fused": True}
        if kind.startswith("host"):
            self.optimizer: Any = offloaded(torch.optim.AdamW, self.model, in_backward=kind.endswith("backward"), **options)
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), **options)
        self._tokens = torch.randint(shape.vocabulary, (batch, tokens), device=device)
        angles = torch.rand(self.model.rotation_shape, device=device)
        self._rotation = torch.polar(torch.ones_like(angles), angles)

    def step(self) -> None:
        self.model(self._tokens, self._rotation).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def copies(numel: int, timer: Timer, device: str) -> float:
    """Milliseconds to copy ``numel`` float32 elements to the device and as many back at the same time, from 1 GiB of memory."""
    part = min(numel, 1 << 28)
    there, back = (torch.empty(part, device="cpu", pin_memory=device == "cuda") for _ in range(2))
    here, result = (torch.empty(part, device=device) for _ in range(2))
    streams = [torch.cuda.Stream() for _ in range(2)] if device == "cuda" else []

    def both() -> None:
        for stream, (target, source) in zip(streams, ((here, there), (back, result))):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
            torch.cuda.current_stream().wait_stream(stream)

    return timer.median(both, 3) * numel / part


def measure(kind: str, options: Any) -> dict[str, Any]:
    is_gpu, shape = options.device == "cuda", SMOKE if options.smoke else SHAPES["llama-3.1-8b"]
    timer = Timer(options.device)
    training = Training(kind, shape, 1 if options.smoke else 2, 64 if options.smoke else 8192, options.device)
    for _ in range(2):
        training.step()
    if is_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    row: dict[str, Any] = {"kind": kind, "ms": timer.median(training.step, options.steps, warmup=0)}
    if is_gpu:
        row["allocated GiB"] = torch.cuda.max_memory_allocated() / GIB
        row["reserved GiB"] = torch.cuda.max_memory_reserved() / GIB
    if kind.startswith("host"):
        held = training.optimizer.tier_nbytes()
        row["host GiB"] = held["host"] / GIB
        if is_gpu:
            row["PCIe ms"] = copies(held["host"] // 4, timer, options.device)
    return row


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    command.add_argument("--steps", type=int, default=4)
    options = options_of(command)
    if options.device == "cuda":
        torch.cuda.set_device(0)
        torch.set_num_threads(16)  # FSDP2's step on the CPU.
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    deadline, rows = Deadline(options.budget), []
    for kind in options.kinds:
        if deadline.left(kind):
            rows.append(measure(kind, options))
            gc.collect()
            if options.device == "cuda":
                torch.cuda.empty_cache()
            print(rows[-1], flush=True)
            finish(options.json, {"rows": rows, "skipped": deadline.skipped})
    dist.destroy_process_group()
    keys = list(dict.fromkeys(key for row in rows for key in row))
    print_table("Optimizer states in host memory, one GPU", [{key: row.get(key, "") for key in keys} for row in rows])


if __name__ == "__main__":
    main()
