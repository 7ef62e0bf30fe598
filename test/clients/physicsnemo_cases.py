"""physicsnemo: networks on ``ShardTensor`` inputs, whose parameters ``fully_shard`` shards, and its checkpoints."""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from case import STEPS, Case, NotRun
from small_models import name_vision_operators
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

PROGRAMS = ("nvidia-physicsnemo", "torch")


def enter_ranks() -> DeviceMesh:
    """physicsnemo's manager of this test's ranks, and a mesh of data ranks and 2 domain ranks."""
    from physicsnemo.distributed import DistributedManager
    from physicsnemo.domain_parallel import register_custom_ops

    name_vision_operators()
    state = {"_rank": dist.get_rank(), "_local_rank": dist.get_rank(), "_world_size": dist.get_world_size()}
    DistributedManager._shared_state.clear()
    DistributedManager._shared_state.update(state, _distributed=True, _is_initialized=True)
    DistributedManager()  # It sets the rest.
    register_custom_ops()  # It does so itself on GPUs only.
    return init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "domain"))


def make(implementation: str, mesh: DeviceMesh, over: str) -> tuple[Any, torch.optim.Optimizer]:
    """A Transolver, sharded over the ``over`` ranks, and its optimizer."""
    import torch.distributed.fsdp
    from physicsnemo.domain_parallel import sync_module_over_mesh
    from physicsnemo.models.transolver import Transolver

    import torch_ragged.fsdp

    torch.manual_seed(0)
    sizes = {"n_layers": 2, "n_hidden": 16, "n_head": 2, "slice_num": 4}
    model = Transolver(functional_dim=5, out_dim=2, embedding_dim=3, use_te=False, **sizes)
    sync_module_over_mesh(model, mesh["domain"])
    shard = (torch.distributed if implementation == "fsdp2" else torch_ragged).fsdp.fully_shard
    for block in model.blocks:
        shard(block, mesh=mesh[over])
    shard(model, mesh=mesh[over])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(implementation: str, over: str = "domain") -> list[float]:
    """Losses of points that the domain ranks share unevenly; halfway, physicsnemo saves, and another model loads."""
    from physicsnemo.utils import load_checkpoint, save_checkpoint

    mesh = enter_ranks()
    model, optimizer = make(implementation, mesh, over)
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names)
    losses = []
    for step in range(STEPS):
        if step == STEPS // 2:
            save_checkpoint(names[0], model, optimizer, epoch=step)
            model, optimizer = make(implementation, mesh, over)
            load_checkpoint(names[0], model, optimizer, device="cpu")
        losses.append(train_step(model, optimizer, mesh, step))
    return losses


def train_step(model: Any, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, step: int) -> float:
    from physicsnemo.domain_parallel import ShardTensor, scatter_tensor

    source = dist.get_global_rank(mesh.get_group("domain"), 0)
    generator = torch.Generator().manual_seed(100 * step + source)
    whole = [torch.randn(2, 11, width, generator=generator) for width in (5, 3)]
    features, places = (scatter_tensor(each, source, mesh["domain"], (Shard(1),)) for each in whole)
    assert type(features) is ShardTensor
    loss = (model(features, places) - places[..., :2]).square().mean()
    loss = loss.full_tensor()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


CASES = [
    Case(PROGRAMS, "Transolver, ShardTensor inputs, parameters sharded over the domain ranks, checkpoint", train),
    Case(
        PROGRAMS,
        "Transolver, ShardTensor inputs, 2 data x 2 domain ranks, parameters sharded over the data ranks, checkpoint",
        functools.partial(train, over="data"),
        4,
    ),
]
NOT_RUN = [
    NotRun(PROGRAMS, "parameters that are ShardTensors", "not tried"),
]
