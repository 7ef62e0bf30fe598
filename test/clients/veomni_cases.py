"""VeOmni: its models, its FSDP2 door, its loader of weights, its optimizer and its clipping."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from typing import Any

import torch.distributed as dist
from case import STEPS, Case, NotRun, sharding
from small_models import make_data, make_model, name_vision_operators

PROGRAMS = ("veomni", "transformers")


def make(implementation: str, name: str) -> Any:
    """The model, sharded by VeOmni, with weights that rank 0 saves for transformers."""
    from veomni.arguments import MixedPrecisionConfig
    from veomni.arguments.arguments_types import OpsImplementationConfig
    from veomni.distributed.parallel_state import init_parallel_state
    from veomni.distributed.torch_parallelize import build_parallelize_model
    from veomni.models import build_foundation_model

    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names)
    if dist.get_rank() == 0:
        make_model(name).save_pretrained(names[0])
    dist.barrier()
    init_parallel_state(dist.get_world_size(), dp_shard_size=dist.get_world_size())
    eager = {f.name: "eager" for f in dataclasses.fields(OpsImplementationConfig) if f.name.endswith("_implementation")}
    eager["qat_implementation"] = "none"
    model = build_foundation_model(
        names[0], names[0], "float32", init_device="meta", ops_implementation=OpsImplementationConfig(**eager)
    )
    with sharding(implementation):
        return build_parallelize_model(
            model,
            names[0],
            mixed_precision=MixedPrecisionConfig(enable=False),
            enable_gradient_checkpointing=False,
            init_device="meta",
        )


def train(implementation: str, name: str = "llama") -> list[float]:
    """Losses and norms."""
    name_vision_operators()
    from veomni.distributed.clip_grad_norm import veomni_clip_grad_norm
    from veomni.optim import build_optimizer

    model = make(implementation, name)
    optimizer = build_optimizer(model, lr=1e-2)
    samples, numbers = make_data(64), []
    for step in range(STEPS):
        sample = samples[step * dist.get_world_size() + dist.get_rank()]["input_ids"][None]
        loss = model(input_ids=sample, labels=sample).loss
        loss.backward()
        numbers += [loss.item(), float(veomni_clip_grad_norm(model, 1.0))]
        optimizer.step()
        optimizer.zero_grad()
    return numbers


CASES = [
    Case(PROGRAMS, "build_parallelize_model, Llama, clipping", train, exact=False),
    Case(PROGRAMS, "build_parallelize_model, Qwen3-MoE", functools.partial(train, name="qwen3_moe"), exact=False),
]
NOT_RUN = [
    NotRun(
        PROGRAMS,
        "plan of expert ranks",
        "eager experts take indices of all ranks (FSDP2: IndexError), fused ones a GPU",
    ),
    NotRun(PROGRAMS, "TextTrainer, VLMTrainer", "not tried: what they call of FSDP2 is run above"),
    NotRun(PROGRAMS, "its checkpoints of expert ranks", "they take FSDP's local tensors for pieces of Shard(1)"),
    NotRun(PROGRAMS, "DistributedMuon", "not tried: it reads placement.dim of Shard only"),
    NotRun(PROGRAMS, "fused kernels, sequence parallelism", "they need a GPU"),
]
