"""PEFT adapters on a frozen base model, sharded by accelerate: with FSDP2 and with ours."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from accelerate_cases import loop, ours_in_accelerate
from case import STEPS, Case, sharding
from small_models import curve, enter_ranks, make_data, make_model, make_trainer
from transformers_cases import shared_folder

from torch_ragged.fsdp import FSDPModule


def adapted(name: str = "llama", **options: Any) -> Any:
    """A model with LoRA on its attention, base weights frozen."""
    from peft import LoraConfig, get_peft_model

    config = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **options}
    return get_peft_model(make_model(name), LoraConfig(**config))


def train_and_save(implementation: str, model: Any, fsdp: dict[str, Any] | None = None, **options: Any) -> list[float]:
    """Losses and norms with Trainer, and the sums of the adapters that ``save_model`` wrote."""
    from safetensors.torch import load_file

    enter_ranks()
    with shared_folder() as folder, ours_in_accelerate(implementation):
        made = make_trainer(model, folder, fsdp=fsdp or {}, **options)
        made.train()
        assert implementation == "fsdp2" or any(isinstance(module, FSDPModule) for module in made.model.modules())
        made.save_model(f"{folder}/adapter")
        dist.barrier()
        saved = load_file(f"{folder}/adapter/adapter_model.safetensors")
        assert saved and all("lora" in name for name in saved), list(saved)
        return curve(made) + [float(saved[name].double().sum()) for name in sorted(saved)]


def train_and_set(implementation: str) -> list[float]:
    """Losses of a sharded model whose adapters are set to those of the beginning half-way."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    model = adapted()
    first = {name: value.clone() + 0.01 for name, value in get_peft_model_state_dict(model).items()}
    numbers = []
    with sharding(implementation):
        for layer in model.base_model.model.model.layers:
            fsdp.fully_shard(layer)
        fsdp.fully_shard(model)
        optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
        for step in range(STEPS):
            if step == STEPS // 2:
                set_peft_model_state_dict(model, first)
            sample = make_data()[step * dist.get_world_size() + dist.get_rank()]["input_ids"][None]
            loss = model(input_ids=sample, labels=sample).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            numbers.append(loss.item())
    return numbers


def resume(implementation: str, model: Any, again: Any) -> list[float]:
    """Losses and norms of a run with Trainer, and those of a second run that begins at its checkpoint."""
    enter_ranks()
    options = {"fsdp": {}, "save_strategy": "steps", "save_steps": 5}
    with shared_folder() as folder, ours_in_accelerate(implementation):
        whole_run = make_trainer(model, folder, **options)
        whole_run.train()
        dist.barrier()
        resumed = make_trainer(again, folder, **options)
        resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-5")
        return curve(whole_run) + curve(resumed)


# -- cases ---------------------------------------------------------------------------------------------------------------


def lora(implementation: str) -> list[float]:
    return loop(implementation, adapted())


def lora_checkpointing(implementation: str) -> list[float]:
    model = adapted()
    model.enable_input_require_grads()
    return loop(implementation, model, {"activation_checkpointing": True}, gradient_accumulation_steps=2)


def lora_mixed_precision(implementation: str) -> list[float]:
    return loop(implementation, adapted(), mixed_precision="bf16")


def lora_saved_modules(implementation: str) -> list[float]:
    return loop(implementation, adapted(modules_to_save=["lm_head"]))


def dora(implementation: str) -> list[float]:
    return loop(implementation, adapted(use_dora=True))


def lora_trainer(implementation: str) -> list[float]:
    return train_and_save(implementation, adapted())


def lora_trainer_moe(implementation: str) -> list[float]:
    return train_and_save(implementation, adapted("qwen3_moe"), gradient_accumulation_steps=2)


def lora_trainer_resumed(implementation: str) -> list[float]:
    return resume(implementation, adapted(), adapted())


_PROGRAMS = ("peft", "accelerate", "transformers")
CASES = [
    Case(_PROGRAMS, "LoRA, Accelerator", lora),
    Case(_PROGRAMS, "LoRA, Accelerator, accumulation, activation checkpointing", lora_checkpointing),
    Case(_PROGRAMS, "LoRA, Accelerator, mixed_precision bf16", lora_mixed_precision),
    Case(_PROGRAMS, "LoRA, Accelerator, modules_to_save", lora_saved_modules),
    Case(_PROGRAMS, "DoRA, Accelerator", dora),
    Case(_PROGRAMS, "LoRA, set_peft_model_state_dict between two steps", train_and_set),
    Case(_PROGRAMS, "LoRA, Trainer, resumed from a checkpoint", lora_trainer_resumed, exact=False),
    Case(_PROGRAMS, "LoRA, Trainer, save_model", lora_trainer, exact=False),
    Case(_PROGRAMS, "LoRA, Trainer, Qwen3-MoE, save_model", lora_trainer_moe, exact=False),
]
NOT_RUN: list[Any] = []
