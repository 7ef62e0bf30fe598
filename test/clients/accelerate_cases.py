"""accelerate's training loop with the FSDP2 plugin: modes that users run, with FSDP2 and with ours."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from case import STEPS, Case, NotRun
from small_models import enter_ranks, make_data, make_model, on_the_cpu

from torch_ragged.fsdp import rows


def ours_in_accelerate(implementation: str) -> contextlib.AbstractContextManager[Any]:
    """The context in which accelerate shards with ours (``"ragged"``), or with torch's."""
    from torch_ragged.integrations.accelerate import use

    if implementation != "ragged":
        return contextlib.nullcontext()
    return use(orig_param_policy=lambda name, param: rows(2) if param.ndim == 2 else None)


def make_accelerator(fields: dict[str, Any], **options: Any) -> Any:
    """An Accelerator with the FSDP2 plugin, on the CPU."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    enter_ranks()
    plugin = FullyShardedDataParallelPlugin(**{"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap", **fields})
    accelerator = Accelerator(fsdp_plugin=plugin, cpu=True, **options)
    on_the_cpu(accelerator, plugin)
    if accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)
    return accelerator


def loop(
    implementation: str,
    model: Any,
    fields: dict[str, Any] | None = None,
    after_step: Any = None,
    clip: float | None = None,
    **options: Any,
) -> list[float]:
    """Losses of STEPS steps, and norms if gradients are clipped; each rank has its own samples."""
    accelerator = make_accelerator(fields or {}, **options)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=2 * STEPS)
    with ours_in_accelerate(implementation):
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    samples, numbers, micro = make_data(64), [], accelerator.gradient_accumulation_steps
    for step in range(STEPS * micro):
        sample = samples[(step * dist.get_world_size() + dist.get_rank()) % 64]["input_ids"][None]
        with accelerator.accumulate(model):
            loss = model(input_ids=sample, labels=sample).loss
            accelerator.backward(loss)
            numbers.append(loss.item())
            if clip is not None and accelerator.sync_gradients:
                numbers.append(float(accelerator.clip_grad_norm_(model.parameters(), clip)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if after_step is not None:
            after_step(model)
    return numbers


# -- cases ---------------------------------------------------------------------------------------------------------------


def plain(implementation: str) -> list[float]:
    return loop(implementation, make_model("llama"))


def clipping(implementation: str) -> list[float]:
    return loop(implementation, make_model("llama"), clip=1.0)


def mixture_of_experts(implementation: str) -> list[float]:
    return loop(implementation, make_model("qwen3_moe"))


def accumulation(implementation: str) -> list[float]:
    return loop(implementation, make_model("llama"), gradient_accumulation_steps=2)


def mixed_precision(implementation: str) -> list[float]:
    return loop(implementation, make_model("llama"), mixed_precision="bf16")


def checkpointing(implementation: str) -> list[float]:
    return loop(implementation, make_model("llama"), {"activation_checkpointing": True})


def efficient_loading(implementation: str) -> list[float]:
    return loop(implementation, make_model("tied"), {"cpu_ram_efficient_loading": True})


def no_reshard(implementation: str) -> list[float]:
    return loop(implementation, make_model("llama"), {"reshard_after_forward": False})


def ignored(implementation: str) -> list[float]:
    model = make_model("llama")
    for param in model.lm_head.parameters():
        param.requires_grad_(False)
    return loop(implementation, model, {"ignored_modules": [model.lm_head]})


def compiled(implementation: str) -> list[float]:
    try:
        return loop(implementation, make_model("llama"), dynamo_backend="aot_eager")
    finally:
        torch._dynamo.reset()


def moving_average(implementation: str) -> list[float]:
    """An exponential moving average of the shards, which is compared at the end: its sums, and those of the parameters."""
    average: dict[str, torch.Tensor] = {}
    models: list[Any] = []

    def update(model: Any) -> None:
        models[:] = [model]
        with torch.no_grad():
            for name, param in model.named_parameters():
                average.setdefault(name, param.detach().clone()).lerp_(param.detach(), 0.1)

    numbers = loop(implementation, make_model("llama"), after_step=update)
    sums = [float(value.full_tensor().double().sum()) for value in average.values()]
    with torch.no_grad():  # The averaged model is evaluated, as at the end of training.
        for name, param in models[0].named_parameters():
            param.copy_(average[name])
        sample = make_data(1)[0]["input_ids"][None]
        sums.append(float(models[0](input_ids=sample, labels=sample).loss))
    return numbers + sums


def grad_scaler(implementation: str) -> list[float]:
    """torch's GradScaler with float16, in a loop without accelerate: overflowing steps are skipped."""
    import functools

    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    from torch_ragged.fsdp import fully_shard

    function: Any = torch_fully_shard if implementation == "fsdp2" else fully_shard
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    shard = functools.partial(function, mesh=mesh, mp_policy=policy)
    model = make_model("llama")
    for layer in model.model.layers:
        shard(layer)
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
    samples, numbers = make_data(64), []
    for step in range(STEPS):
        sample = samples[step * dist.get_world_size() + dist.get_rank()]["input_ids"][None]
        loss = model(input_ids=sample, labels=sample).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        numbers += [float(loss), scaler.get_scale()]
    return numbers


_PROGRAMS = ("accelerate", "transformers")
CASES = [
    Case(_PROGRAMS, "Accelerator, Llama", plain),
    Case(_PROGRAMS, "Accelerator, clip_grad_norm_", clipping, exact=False),
    Case(_PROGRAMS, "Accelerator, Qwen3-MoE", mixture_of_experts),
    Case(_PROGRAMS, "Accelerator, gradient accumulation", accumulation),
    Case(_PROGRAMS, "Accelerator, mixed_precision bf16", mixed_precision),
    Case(_PROGRAMS, "Accelerator, activation_checkpointing", checkpointing),
    Case(_PROGRAMS, "Accelerator, cpu_ram_efficient_loading, tied embeddings", efficient_loading),
    Case(_PROGRAMS, "Accelerator, reshard_after_forward=False", no_reshard),
    Case(_PROGRAMS, "Accelerator, ignored_modules", ignored),
    Case(_PROGRAMS, "Accelerator, torch.compile", compiled),
    Case(_PROGRAMS, "Accelerator, moving average of the parameters", moving_average),
    Case(("transformers",), "fully_shard, GradScaler, float16", grad_scaler),
]
NOT_RUN = [
    NotRun(_PROGRAMS, "cpu_offload", "FSDP2 pins memory, which needs an accelerator"),
    NotRun(_PROGRAMS, "size_based_wrap", "it matches the ModuleList of layers, which FSDP2 refuses, too"),
    NotRun(_PROGRAMS, "ParallelismConfig (replicas, tensor parallelism)", "accelerate takes it for accelerators only"),
    NotRun(_PROGRAMS, "fp8", "needs a GPU"),
]
