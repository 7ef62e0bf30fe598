"""Small models of transformers with random weights, data for them, and transformers' Trainer on CPU ranks."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

VOCABULARY, LENGTH = 64, 16


def make_config(name: str, **changes: Any) -> Any:
    """The configuration of a two-layer model: ``llama``, ``tied`` (embeddings), ``qwen3_moe`` or ``gpt_oss``."""
    from transformers import GptOssConfig, LlamaConfig, Qwen3MoeConfig

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    experts = {"num_experts_per_tok": 2}
    if name == "qwen3_moe":
        return Qwen3MoeConfig(**sizes, **experts, moe_intermediate_size=16, num_experts=4, **changes)
    if name == "gpt_oss":
        layers = ["sliding_attention", "full_attention"]
        return GptOssConfig(**sizes, **experts, num_local_experts=4, layer_types=layers, **changes)
    return LlamaConfig(**sizes, tie_word_embeddings=name == "tied", **changes)


def make_model(name: str, **changes: Any) -> Any:
    """The model of :func:`make_config`, with the same weights on each rank."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(make_config(name, **changes))


def make_data(count: int = 64) -> list[dict[str, torch.Tensor]]:
    """Samples for causal language models: each continues by a rule, so a model learns from them."""
    generator = torch.Generator().manual_seed(3)
    starts = torch.randint(0, VOCABULARY, (count, 1), generator=generator)
    ids = (starts + 3 * torch.arange(LENGTH)) % VOCABULARY
    return [{"input_ids": row, "labels": row} for row in ids]


def enter_ranks() -> None:
    """Let accelerate and transformers, which read the environment, see this test's ranks. Forget the last test's state."""
    from accelerate.state import AcceleratorState

    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, MASTER_ADDR="localhost", MASTER_PORT="1")
    AcceleratorState._reset_state(True)


def on_the_cpu(accelerator: Any, plugin: Any) -> None:
    """accelerate takes FSDP for accelerators only: tell its state that it is FSDP on the CPU."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    PartialState().distributed_type = DistributedType.FSDP  # Each new AcceleratorState copies it.
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin


def make_trainer(model: Any, folder: str, *, batch: int = 4, fsdp: dict[str, Any] | None = None, **options: Any) -> Any:
    """A Trainer of ``model`` on the CPU, with ``batch`` samples per step on all ranks together and accumulation.

    Args:
        fsdp: ``fsdp_config`` of TrainingArguments: accelerate shards the model. None: the model is not sharded by accelerate.
        options: ``callbacks``, and arguments of TrainingArguments.
    """
    from accelerate import FullyShardedDataParallelPlugin
    from transformers import Trainer, TrainingArguments

    class CPUTrainer(Trainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            if fsdp is not None:
                plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
                if self.args.bf16:
                    plugin.set_mixed_precision("bf16")
                on_the_cpu(self.accelerator, plugin)
                self.is_fsdp_enabled = True

    data = {"train_dataset": make_data(), "eval_dataset": make_data(8), "callbacks": options.pop("callbacks", [])}
    accumulation = options.get("gradient_accumulation_steps", 1)
    arguments = {"max_steps": 10, "logging_steps": 1, "learning_rate": 1e-2, "save_strategy": "no", "seed": 1, **options}
    arguments["per_device_train_batch_size"] = batch // dist.get_world_size() // accumulation
    if fsdp is not None:
        arguments |= {"fsdp": True, "fsdp_config": {"version": 2, **fsdp}}
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "log_level": "error"}
    return CPUTrainer(model, TrainingArguments(folder, **quiet, **arguments), **data)


def curve(trainer: Any) -> list[float]:
    """Loss and norm of the gradients, step by step."""
    return [value for entry in trainer.state.log_history if "loss" in entry for value in (entry["loss"], entry["grad_norm"])]


def name_vision_operators() -> None:
    """Let programs import torchvision, which they do not use: its CUDA build has no operators beside torch's CPU build."""
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
