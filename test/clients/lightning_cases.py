"""Lightning's Trainer and Fabric with ModelParallelStrategy: modes that users run, with FSDP2 and with ours."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import torch.distributed as dist
from case import STEPS, Case, NotRun
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from torch_ragged.fsdp import MixedPrecisionPolicy, fully_shard, rows

WIDTH, CLASSES, SAMPLES = 16, 8, 8


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH)) for _ in range(2)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def shard(model: Model, mesh: DeviceMesh, implementation: str, **options: Any) -> Model:
    """What a user writes into ``configure_model``, or gives to Fabric as ``parallelize_fn``."""
    if implementation == "fsdp2":
        function = torch_fully_shard
    else:
        function = functools.partial(fully_shard, orig_param_policy=lambda name, param: rows(3) if param.ndim == 2 else None)
    for block in model.blocks:
        function(block, mesh=mesh, **options)
    return function(model, mesh=mesh, **options)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's share of the samples of ``step``, which are the same at every number of ranks."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(SAMPLES, WIDTH, generator=generator), torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    return x.chunk(ranks)[rank], y.chunk(ranks)[rank]


def mean_over_ranks(value: torch.Tensor) -> float:
    value = value.detach().double()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def enter_ranks() -> None:
    """Let Lightning, which reads torchrun's environment, see this test's ranks."""
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks, GROUP_RANK="0")
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="1", TORCHELASTIC_RUN_ID="test")


def trainer_run(
    implementation: str,
    steps: int = STEPS,
    folder: str | None = None,
    form: str = "distributed",
    resume: str | None = None,
    **trainer_options: Any,
) -> tuple[list[float], Any, Any]:
    """Losses of ``Trainer.fit``, averaged over ranks, with the trainer and its module."""
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy

    enter_ranks()
    losses: list[float] = []
    options = trainer_options.pop("shard_options", {})

    class Module(lightning.LightningModule):
        def configure_model(self) -> None:
            if not hasattr(self, "model"):
                torch.manual_seed(0)
                self.model = shard(Model(), self.device_mesh["data_parallel"], implementation, **options)

        def training_step(self, _: torch.Tensor, index: int) -> torch.Tensor:
            accumulate = self.trainer.accumulate_grad_batches
            x, y = batch(self.trainer.global_step * accumulate + index % accumulate)
            loss = nn.functional.cross_entropy(self.model(x).float(), y)
            losses.append(mean_over_ranks(loss))
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)]

    strategy = ModelParallelStrategy(
        data_parallel_size=dist.get_world_size(), tensor_parallel_size=1, save_distributed_checkpoint=form == "distributed"
    )
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(
        accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, max_steps=steps, max_epochs=-1,
        default_root_dir=folder, use_distributed_sampler=False, **quiet, **trainer_options,
    )  # fmt: skip
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(torch.zeros(1000), batch_size=1), ckpt_path=resume)
    return losses, trainer, module


def fabric_run(
    implementation: str,
    steps: int = STEPS,
    first: int = 0,
    made: tuple[Any, Any, Any] | None = None,
    resume: str | None = None,
    accumulate: int = 1,
    clip: float | None = None,
    **fabric_options: Any,
) -> tuple[list[float], Any, Any, Any]:
    """Losses of a loop with Fabric, averaged over ranks, with the fabric, the model and the optimizer."""
    import lightning
    from lightning.fabric.strategies import ModelParallelStrategy

    enter_ranks()
    options = fabric_options.pop("shard_options", {})
    if made is None:
        strategy = ModelParallelStrategy(
            parallelize_fn=lambda model, mesh: shard(model, mesh["data_parallel"], implementation, **options),
            data_parallel_size=dist.get_world_size(),
            tensor_parallel_size=1,
        )
        fabric = lightning.Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, **fabric_options)
        fabric.launch()
        torch.manual_seed(0)
        model = fabric.setup(Model())
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    else:
        fabric, model, optimizer = made
    if resume is not None:
        fabric.load(resume, {"model": model, "optimizer": optimizer})
    losses = []
    for step in range(first * accumulate, (first + steps) * accumulate):
        last = (step + 1) % accumulate == 0
        x, y = batch(step)
        with fabric.no_backward_sync(model, enabled=not last):
            loss = nn.functional.cross_entropy(model(x).float(), y)
            fabric.backward(loss / accumulate)
        losses.append(mean_over_ranks(loss))
        if last:
            if clip is not None:
                losses.append(float(fabric.clip_gradients(model, optimizer, max_norm=clip)))
            optimizer.step()
            optimizer.zero_grad()
    return losses, fabric, model, optimizer


# -- cases ---------------------------------------------------------------------------------------------------------------


def trainer_plain(implementation: str) -> list[float]:
    return trainer_run(implementation)[0]


def trainer_accumulation(implementation: str) -> list[float]:
    return trainer_run(implementation, accumulate_grad_batches=2)[0]


def trainer_bf16(implementation: str) -> list[float]:
    return trainer_run(implementation, precision="bf16-true")[0]


def trainer_mixed(implementation: str) -> list[float]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return trainer_run(implementation, shard_options={"mp_policy": policy})[0]


def fabric_plain(implementation: str) -> list[float]:
    return fabric_run(implementation)[0]


def fabric_clipping(implementation: str) -> list[float]:
    return fabric_run(implementation, clip=0.5)[0]


def fabric_accumulation(implementation: str) -> list[float]:
    return fabric_run(implementation, accumulate=2)[0]


def fabric_bf16(implementation: str) -> list[float]:
    return fabric_run(implementation, precision="bf16-true")[0]


_PROGRAMS = ("lightning",)
CASES = [
    Case(_PROGRAMS, "Trainer, ModelParallelStrategy", trainer_plain),
    Case(_PROGRAMS, "Trainer, gradient accumulation", trainer_accumulation),
    Case(_PROGRAMS, "Trainer, precision bf16-true", trainer_bf16),
    Case(_PROGRAMS, "Trainer, MixedPrecisionPolicy in configure_model", trainer_mixed),
    Case(_PROGRAMS, "Fabric, parallelize_fn", fabric_plain),
    Case(_PROGRAMS, "Fabric, clip_gradients", fabric_clipping, exact=False),
    Case(_PROGRAMS, "Fabric, no_backward_sync", fabric_accumulation),
    Case(_PROGRAMS, "Fabric, precision bf16-true", fabric_bf16),
]
NOT_RUN = [
    NotRun(_PROGRAMS, "FSDPStrategy", "it wraps with FSDP1, which does not call fully_shard"),
    NotRun(_PROGRAMS, "tensor_parallel_size above 1", "not tried here: the model above has no plan for it"),
]
