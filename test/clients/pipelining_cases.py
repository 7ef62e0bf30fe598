"""Pipeline schedules of torch over two stages, or four, each sharded over two ranks."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from case import STEPS, Case, NotRun, sharding
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

PROGRAMS = ("torch",)
_SINGLE, _V = ("GPipe", "1F1B"), ("ZBVZeroBubble", "DualPipeV")
WIDTH, MICROBATCHES = 16, 4


def train(implementation: str, schedule: str) -> list[float]:
    """Losses of the last stage, on the ranks that have it; gradient norms of the own stages on all ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    rank = mesh.get_local_rank("pp")
    indices = [rank] if schedule in _SINGLE else [rank, 3 - rank] if schedule in _V else [rank, rank + 2]
    count = 2 * len(indices)
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(4)]
    stages, params = [], []
    with sharding(implementation):
        from torch.distributed.fsdp import fully_shard

        for index in indices:
            module = nn.Sequential(*layers[index * 4 // count : (index + 1) * 4 // count])
            for layer in module:
                fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=False)
            fully_shard(module, mesh=mesh["dp"], reshard_after_forward=False)
            params += list(module.parameters())
            stages.append(PipelineStage(module, index, count, torch.device("cpu"), group=mesh.get_group("pp")))
    runner = get_schedule_class(schedule)(stages if len(stages) > 1 else stages[0], MICROBATCHES, loss_fn=F.mse_loss)
    optimizer, numbers = torch.optim.AdamW(params, 1e-2), []
    generator = torch.Generator().manual_seed(mesh.get_local_rank("dp"))
    for _ in range(STEPS):
        x, y = torch.randn(2, 2 * MICROBATCHES, WIDTH, generator=generator)
        losses: list[torch.Tensor] = []
        is_last = count - 1 in indices
        runner.step(*([x] if rank == 0 else []), **({"target": y, "losses": losses} if is_last else {}))
        optimizer.step()
        optimizer.zero_grad()
        numbers += [loss.item() for loss in losses]
        numbers.append(sum(param.detach().full_tensor().double().square().sum().item() for param in params))
    return numbers


CASES = [
    Case(PROGRAMS, f"pipelining, {name}, 2 stages x 2 data-parallel ranks", functools.partial(train, schedule=name), 4)
    for name in ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
]
NOT_RUN: list[NotRun] = []
