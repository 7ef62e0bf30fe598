"""verl: its FSDP engine for language models on CPU ranks, without Ray and vLLM."""

from __future__ import annotations

import functools
import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from case import STEPS, Case, NotRun

PROGRAMS = ("verl", "transformers")


def enter_ranks() -> None:
    """A platform of verl for the CPU, which it does not have, and what it reads of the environment."""
    from verl.plugin.platform import platform_cuda, platform_manager

    class CPUPlatform(platform_cuda.PlatformCUDA):
        device_name = "cpu"
        device_module = torch.cpu

        def is_available(self) -> bool:
            return True

        def current_device(self) -> Any:
            return torch.device("cpu")

        def communication_backend_name(self) -> str:
            return "gloo"

        def empty_cache(self) -> None:
            pass

        def synchronize(self, device_index: int | None = None) -> None:
            pass

    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, VERL_ENGINE_DEVICE="cpu")
    platform_manager._current_platform = CPUPlatform()
    # verl's checkpoints ask the device's module for the random state; torch.cpu has none of its own.
    torch.cpu.get_rng_state, torch.cpu.set_rng_state = torch.get_rng_state, torch.set_rng_state


def save_model(folder: str) -> None:
    """A small Llama with random weights, and a tokenizer, as ``from_pretrained`` reads them."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, pad_token_id=0, eos_token_id=1, **sizes))
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    fast.save_pretrained(folder)


def make_engine(implementation: str, folder: str, model: dict[str, Any] | None = None, **engine: Any) -> Any:
    """An initialized engine of the model that rank 0 saves to ``folder``."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    from torch_ragged.fsdp import rows
    from torch_ragged.integrations.verl import register

    if dist.get_rank() == 0:
        save_model(folder)
    dist.barrier()
    # Half precision has other rounding in each order of a sum, so the numbers are compared in float32.
    precision = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    options = {"mixed_precision": precision, "use_torch_compile": False, "strategy": "fsdp2", **engine}
    configs = {
        "model_config": HFModelConfig(
            path=folder, use_remove_padding=False, override_config={"attn_implementation": "eager"}, **(model or {})
        ),
        "engine_config": FSDPEngineConfig(**options),
        "optimizer_config": FSDPOptimizerConfig(lr=1e-2, total_training_steps=STEPS, lr_warmup_steps=0, clip_grad=1e9),
        "checkpoint_config": CheckpointConfig(),
    }
    if implementation == "ragged":
        register(orig_param_policy=lambda fqn, param: rows(4) if param.ndim == 2 else None, device=["cuda", "npu", "cpu"])
        object.__setattr__(configs["engine_config"], "strategy", "fsdp_ragged")  # As verl's actor configuration does.
        made = EngineRegistry.new("language_model", "fsdp_ragged", **configs)
    else:
        made = FSDPEngineWithLMHead(**configs)  # verl registers it for CUDA and NPU only.
    made.initialize()
    return made


def make_batch(step: int) -> Any:
    """This rank's four samples of a step, of lengths 6 to 9, as verl packs them."""
    from verl.utils import tensordict_utils as tu

    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    samples = [torch.randint(3, 64, (6 + number,), generator=generator) for number in range(4)]

    def nested(tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)

    tensors = {
        "input_ids": nested(samples),
        "position_ids": nested([torch.arange(len(each)) for each in samples]),
        "loss_mask": nested([torch.ones(len(each)) for each in samples]),
    }
    options = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2, "temperature": 1.0, "use_remove_padding": False}
    return tu.get_tensordict(tensors, {**options, "use_fused_kernels": False, "calculate_entropy": False})


def train_step(engine: Any, step: int) -> list[float]:
    """The sum of the losses of the micro-batches, and the norm of the gradients."""
    from verl.workers.utils.losses import sft_loss

    with engine.train_mode():
        found = engine.train_batch(make_batch(step), functools.partial(sft_loss, None))
    return [sum(found["loss"]), found["metrics"]["grad_norm"]]


def train(implementation: str, **options: Any) -> list[float]:
    enter_ranks()
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    engine = make_engine(implementation, folder[0], **options)
    return [number for step in range(STEPS) for number in train_step(engine, step)]


CASES = [
    Case(PROGRAMS, "FSDP engine, Llama, two micro-batches", train, exact=False),
    Case(
        PROGRAMS,
        "FSDP engine, gradients reduced in each micro-batch",
        functools.partial(train, use_no_sync_for_gradient_accumulation=False),
        exact=False,
    ),
    Case((*PROGRAMS, "peft"), "FSDP engine, LoRA", functools.partial(train, model={"lora_rank": 4}), exact=False),
]

NOT_RUN = [
    NotRun(PROGRAMS, "PPO, GRPO with rollouts", "they need Ray workers with GPUs, and vLLM or SGLang"),
    NotRun(PROGRAMS, "param_offload, optimizer_offload", "verl moves parameters between a GPU and the CPU"),
    NotRun(PROGRAMS, "use_remove_padding, ulysses_sequence_parallel_size > 1", "they need flash-attention"),
]
