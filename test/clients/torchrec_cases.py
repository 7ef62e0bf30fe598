"""torchrec: tables that it shards row-wise and table-wise, beside dense layers that ``fully_shard`` shards, in one DLRM."""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from case import STEPS, Case, NotRun

PROGRAMS = ("torchrec", "fbgemm-gpu-cpu")
TABLES = ("rows", "table")


def make(implementation: str, dtensors: bool, kernel: str, norm: float) -> tuple[Any, Any]:
    """A DLRM in torchrec's ``DistributedModelParallel``, and one optimizer over tables and dense layers."""
    import torch.distributed.fsdp
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.distributed import DistributedModelParallel, ShardingEnv
    from torchrec.distributed.model_parallel import DataParallelWrapper, get_unwrapped_module
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
    from torchrec.distributed.types import ShardingPlan
    from torchrec.models.dlrm import DLRM
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
    from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
    from torchrec.optim.optimizers import in_backward_optimizer_filter

    import torch_ragged.fsdp

    class FullyShard(DataParallelWrapper):
        def wrap(self, dmp: Any, env: Any, device: Any) -> None:
            shard = (torch.distributed if implementation == "fsdp2" else torch_ragged).fsdp.fully_shard
            model = get_unwrapped_module(dmp)
            for part in (model.dense_arch, model.over_arch):
                shard(part, mesh=env.device_mesh)
            shard(model, mesh=env.device_mesh, ignored_params=set(model.sparse_arch.parameters()))

    torch.manual_seed(0)
    configs = [EmbeddingBagConfig(num_embeddings=50, embedding_dim=8, name=n, feature_names=[n]) for n in TABLES]
    bags = EmbeddingBagCollection(tables=configs)
    model = DLRM(bags, dense_in_features=5, dense_arch_layer_sizes=[16, 8], over_arch_layer_sizes=[9, 1])
    if kernel == "fused":
        apply_optimizer_in_backward(torch.optim.Adagrad, bags.parameters(), {"lr": 0.1})
    ways = {"rows": row_wise(compute_kernel=kernel), "table": table_wise(rank=0, compute_kernel=kernel)}
    ranks = dist.get_world_size()
    plan = construct_module_sharding_plan(bags, ways, local_size=ranks, world_size=ranks, device_type="cpu")
    env = ShardingEnv(ranks, dist.get_rank(), dist.group.WORLD, output_dtensor=dtensors)
    plans = ShardingPlan({"sparse_arch.embedding_bag_collection": plan})
    model = DistributedModelParallel(model, env, torch.device("cpu"), plans, data_parallel_wrapper=FullyShard())
    named = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense: Any = KeyedOptimizerWrapper(named, functools.partial(torch.optim.AdamW, lr=0.01))
    if norm:
        groups = {param: [dist.group.WORLD] for param in named.values()}
        dense = GradientClippingOptimizer(dense, GradientClipping.NORM, norm, 2.0, True, groups)
    return model, CombinedOptimizer([model.fused_optimizer, dense])


def batch(step: int) -> tuple[torch.Tensor, Any, torch.Tensor]:
    """This rank's samples of a step: numbers, bags of 0 to 3 rows of each table, and labels."""
    from torchrec import KeyedJaggedTensor

    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    lengths = torch.randint(0, 4, (16,), generator=generator)
    rows = torch.randint(0, 50, (int(lengths.sum()),), generator=generator)
    numbers = torch.randn(8, 5, generator=generator)
    return numbers, KeyedJaggedTensor(list(TABLES), rows, lengths=lengths), (numbers.sum(1) > 0).float()


def train(implementation: str, dtensors: bool = False, kernel: str = "fused", norm: float = 0.0) -> list[float]:
    """Losses; halfway, all is saved by torch's checkpoint, and a model of other values loads it."""
    model, optimizer = make(implementation, dtensors, kernel, norm)
    losses = []
    for step in range(STEPS):
        if step == STEPS // 2:
            model, optimizer = reloaded(model, optimizer, make(implementation, dtensors, kernel, norm))
        losses.append(train_step(model, optimizer, step))
    return losses


def train_step(model: Any, optimizer: Any, step: int) -> float:
    numbers, bags, labels = batch(step)
    optimizer.zero_grad(set_to_none=True)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(model(numbers, bags)[:, 0], labels)
    loss.backward()
    optimizer.step()
    return loss.item()


def reloaded(model: Any, optimizer: Any, other: tuple[Any, Any]) -> tuple[Any, Any]:
    """``other``, a step ahead, with the values that ``model`` and ``optimizer`` save to a folder of rank 0."""
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names)
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=names[0])
    train_step(*other, STEPS)
    state = {"model": other[0].state_dict(), "optimizer": other[1].state_dict()}
    dcp.load(state, checkpoint_id=names[0])
    other[0].load_state_dict(state["model"])
    other[1].load_state_dict(state["optimizer"])
    return other


CASES = [
    Case(PROGRAMS, "DLRM, tables as ShardedTensors, fused optimizer of the tables, checkpoint", train),
    Case(
        PROGRAMS,
        "DLRM, tables as DTensors, fused optimizer of the tables, checkpoint",
        functools.partial(train, dtensors=True),
    ),
    Case(
        PROGRAMS,
        "DLRM, tables as DTensors, one AdamW over tables and layers, clipping over all, checkpoint",
        functools.partial(train, dtensors=True, kernel="dense", norm=0.1),
        exact=False,
    ),
]
NOT_RUN = [
    NotRun(PROGRAMS, "torch.nn.utils.clip_grad_norm_ of tables and layers", "torch refuses tensors beside DTensors"),
    NotRun(PROGRAMS, "CombinedOptimizer in our TrainState", "its state dict has no param_groups, which torch's functions need"),
    NotRun(PROGRAMS, "DMPCollection", "not tried"),
]
