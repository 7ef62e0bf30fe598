"""transformers' Trainer, sharded by accelerate or while the model is loaded: with FSDP2 and with ours."""

from __future__ import annotations

import contextlib
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from accelerate_cases import ours_in_accelerate
from case import STEPS, Case, NotRun
from small_models import curve, enter_ranks, make_data, make_model, make_trainer

from torch_ragged.fsdp import rows


@contextlib.contextmanager
def shared_folder() -> Any:
    """A folder of rank 0 that all ranks see; removed after all of them are done."""
    with tempfile.TemporaryDirectory() as own:
        names = [own]
        dist.broadcast_object_list(names)
        yield names[0]
        dist.barrier()


def trainer(implementation: str, name: str, fsdp: dict[str, Any] | None = None, **options: Any) -> list[float]:
    """Losses and norms of a model that accelerate shards."""
    enter_ranks()
    with shared_folder() as folder, ours_in_accelerate(implementation):
        made = make_trainer(make_model(name), folder, fsdp=fsdp or {}, **options)
        made.train()
        return curve(made)


def loaded(implementation: str, name: str, folder: str, config: dict[str, int] | None = None) -> Any:
    """A model that is sharded while it is loaded from ``folder``, which all ranks see."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    from torch_ragged.integrations.transformers import from_pretrained

    enter_ranks()
    distributed = DistributedConfig(**(config or {"fsdp_size": dist.get_world_size()}))
    if dist.get_rank() == 0:
        make_model(name).save_pretrained(f"{folder}/model")
    dist.barrier()
    if implementation == "fsdp2":
        return AutoModelForCausalLM.from_pretrained(f"{folder}/model", distributed_config=distributed)
    policy = {"orig_param_policy": lambda fqn, param: rows(2) if param.ndim == 2 else None}
    return from_pretrained(AutoModelForCausalLM, f"{folder}/model", distributed_config=distributed, **policy)


def native(implementation: str, name: str, config: dict[str, int] | None = None, **options: Any) -> list[float]:
    """Losses and norms of Trainer with a model that is sharded while it is loaded."""
    with shared_folder() as folder:
        made = make_trainer(loaded(implementation, name, folder, config), folder, **options)
        made.train()
        return curve(made)


def native_loop(implementation: str, name: str, config: dict[str, int]) -> list[float]:
    """Losses of a loop without Trainer. Ranks of one data-parallel group have the same sample."""
    with shared_folder() as folder:
        model = loaded(implementation, name, folder, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    samples, losses, replicas = make_data(64), [], config["fsdp_size"]
    for step in range(STEPS):
        sample = samples[step * replicas + dist.get_rank() * replicas // dist.get_world_size()]["input_ids"][None]
        loss = model(input_ids=sample, labels=sample).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


# -- cases ---------------------------------------------------------------------------------------------------------------


def llama(implementation: str) -> list[float]:
    return trainer(implementation, "llama")


def llama_accumulation(implementation: str) -> list[float]:
    return trainer(implementation, "llama", gradient_accumulation_steps=2)


def llama_bf16(implementation: str) -> list[float]:
    return trainer(implementation, "llama", bf16=True)


def llama_checkpointing(implementation: str) -> list[float]:
    return trainer(implementation, "llama", {"activation_checkpointing": True})


def llama_own_checkpointing(implementation: str) -> list[float]:
    return trainer(implementation, "llama", activation_checkpointing=True)


def tied(implementation: str) -> list[float]:
    return trainer(implementation, "tied")


def qwen3_moe(implementation: str) -> list[float]:
    return trainer(implementation, "qwen3_moe", {"activation_checkpointing": True}, gradient_accumulation_steps=2)


def qwen3_moe_bf16(implementation: str) -> list[float]:
    # The norm's last bit depends on who holds what. No gradient is clipped, or bfloat16 would magnify it in the losses.
    return trainer(implementation, "qwen3_moe", bf16=True, max_grad_norm=1e9)


def gpt_oss(implementation: str) -> list[float]:
    return trainer(implementation, "gpt_oss")


def gpt_oss_all(implementation: str) -> list[float]:
    options = {"gradient_accumulation_steps": 2, "bf16": True}
    return trainer(implementation, "gpt_oss", {"activation_checkpointing": True}, **options)


def native_llama(implementation: str) -> list[float]:
    return native(implementation, "llama")


def native_accumulation(implementation: str) -> list[float]:
    return native(implementation, "llama", gradient_accumulation_steps=2)


def native_replicas(implementation: str) -> list[float]:
    return native(implementation, "tied", {"fsdp_size": 2, "dp_replicate_size": 2})


def native_qwen3_moe(implementation: str) -> list[float]:
    return native(implementation, "qwen3_moe")


def native_gpt_oss(implementation: str) -> list[float]:
    return native(implementation, "gpt_oss", activation_checkpointing=True)


def native_tensor_parallel(implementation: str) -> list[float]:
    return native_loop(implementation, "qwen3_moe", {"fsdp_size": 2, "tp_size": 2})


def native_expert_parallel(implementation: str) -> list[float]:
    return native_loop(implementation, "qwen3_moe", {"fsdp_size": 4, "ep_size": 2})


_PROGRAMS, _NATIVE = ("transformers", "accelerate"), ("transformers",)
CASES = [
    Case(_PROGRAMS, "Trainer, Llama", llama),
    Case(_PROGRAMS, "Trainer, Llama, gradient accumulation", llama_accumulation, exact=False),
    Case(_PROGRAMS, "Trainer, Llama, bf16", llama_bf16, exact=False),
    Case(_PROGRAMS, "Trainer, Llama, activation checkpointing by the plugin", llama_checkpointing),
    Case(_PROGRAMS, "Trainer, Llama, activation checkpointing by transformers", llama_own_checkpointing),
    Case(_PROGRAMS, "Trainer, Llama, tied embeddings", tied, exact=False),
    Case(_PROGRAMS, "Trainer, Qwen3-MoE, accumulation, activation checkpointing", qwen3_moe, exact=False),
    Case(_PROGRAMS, "Trainer, Qwen3-MoE, bf16", qwen3_moe_bf16, exact=False),
    Case(_PROGRAMS, "Trainer, GPT-OSS", gpt_oss, exact=False),
    Case(_PROGRAMS, "Trainer, GPT-OSS, accumulation, bf16, activation checkpointing", gpt_oss_all, exact=False),
    Case(_NATIVE, "from_pretrained(DistributedConfig), Trainer, Llama", native_llama),
    Case(_NATIVE, "from_pretrained(DistributedConfig), Trainer, gradient accumulation", native_accumulation, exact=False),
    Case(_NATIVE, "from_pretrained(DistributedConfig), Trainer, tied, 2 x 2 replicas", native_replicas, 4, exact=False),
    Case(_NATIVE, "from_pretrained(DistributedConfig), Trainer, Qwen3-MoE", native_qwen3_moe, exact=False),
    Case(_NATIVE, "from_pretrained(DistributedConfig), Trainer, GPT-OSS", native_gpt_oss, exact=False),
    Case(_NATIVE, "from_pretrained(DistributedConfig), Qwen3-MoE, 2 x 2 tensor parallel", native_tensor_parallel, 4),
    Case(_NATIVE, "from_pretrained(DistributedConfig), Qwen3-MoE, expert parallel", native_expert_parallel, 4, exact=False),
]  # fmt: skip
NOT_RUN = [
    NotRun(_NATIVE, "Trainer with tensor parallelism", "accelerate takes a ParallelismConfig for accelerators only"),
    NotRun(_PROGRAMS, "optim='adafactor'", "transformers' Adafactor mixes tensors and DTensors: it fails with FSDP2, too"),
    NotRun(_PROGRAMS, "quantized base models (bitsandbytes, fp8)", "need a GPU"),
]
