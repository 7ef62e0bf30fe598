"""Part 4: a whole training step of ``fully_shard`` on one rank as a CUDA graph: the same losses as without, and its time.

Forward, backward and fused AdamW are captured together, after a few steps on a side stream; with buffers from the allocator and
with persistent ones. On the CPU the same steps run twice without a graph.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from benchmarks.common.measure import print_table
from benchmarks.common.models import shard
from benchmarks.gpu.gpu_common import Timer, finish, initialize, options_of, parser, stack
from torch_ragged.fsdp import fully_shard

WARMUP, STEPS = 3, 5


class Training:
    """A stack of one rank; ``loss`` is that of the last step."""

    def __init__(self, options: argparse.Namespace, persistent: bool) -> None:
        torch.manual_seed(0)
        mesh = init_device_mesh(options.device, (1,))
        self._model = stack("llama-3-70b", 1 if options.smoke else 8, True, device=options.device)
        initialize(self._model)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        shard(self._model, fully_shard, mesh=mesh, mp_policy=policy)
        if persistent:
            self._model.set_persistent_buffers()  # type: ignore[operator]
        is_gpu = options.device == "cuda"
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3, fused=is_gpu, capturable=is_gpu)
        self._tokens = torch.arange(64, device=options.device) % 16
        self.loss = torch.zeros((), device=options.device)

    def step(self) -> None:
        self._optimizer.zero_grad()
        loss = self._model(self._tokens).float().square().mean()
        loss.backward()
        self._optimizer.step()
        self.loss.copy_(loss.detach())


def captured(training: Training) -> Callable[[], None]:
    """``training.step`` as a graph. Its memory is the graph's: what the step allocates has the same address in each replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARMUP):
            training.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        training.step()
    return graph.replay


def run(options: argparse.Namespace, persistent: bool, use_graph: bool) -> dict[str, Any]:
    training = Training(options, persistent)
    step = training.step
    if use_graph:
        step = captured(training)
    else:
        for _ in range(WARMUP):
            step()
    losses = []
    for _ in range(STEPS):
        step()
        losses.append(training.loss.item())
    milliseconds = Timer(options.device).median(step, 2 if options.smoke else 20)
    return {"persistent": persistent, "graph": use_graph, "ms": milliseconds, "losses": losses}


def main() -> None:
    options = options_of(parser(__doc__))
    is_gpu = options.device == "cuda"
    if is_gpu:
        torch.cuda.set_device(0)
    store = dist.HashStore()
    dist.init_process_group("nccl" if is_gpu else "gloo", store=store, rank=0, world_size=1)
    rows = [run(options, persistent, graph) for persistent in (False, True) for graph in (False, is_gpu)]
    dist.destroy_process_group()
    for row in rows:
        row["same losses"] = row["losses"] == rows[0]["losses"]
    print_table("A training step on one rank", [{key: row[key] for key in row if key != "losses"} for row in rows])
    finish(options.json, {"rows": rows})
    if not all(row["same losses"] for row in rows):
        raise SystemExit(f"losses differ: {[row['losses'] for row in rows]}")


if __name__ == "__main__":
    main()
