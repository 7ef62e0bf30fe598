"""TRL: its trainers on a small Llama, sharded through accelerate, on CPU ranks."""

from __future__ import annotations

import functools
import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from case import STEPS, Case, NotRun, sharding

PROGRAMS = ("trl", "accelerate", "transformers")
WORDS = ("the", "cat", "dog", "sat", "ran", "on", "mat", "log", "and", "then")


def make_tokenizer() -> Any:
    """A tokenizer of ten words, made by hand."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ("<pad>", "<eos>", "<unk>")
    words = {word: number for number, word in enumerate((*special, *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def sentence(number: int, length: int = 9) -> str:
    return " ".join(WORDS[(number * (i + 3) + i * i) % len(WORDS)] for i in range(length))


def make_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=16, num_hidden_layers=2, pad_token_id=0, eos_token_id=1, **sizes))


def enter_ranks() -> None:
    """Let accelerate and transformers, which read the environment, see these ranks. Forget the last run's state."""
    from accelerate.state import AcceleratorState

    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, MASTER_ADDR="localhost", MASTER_PORT="1")
    AcceleratorState._reset_state(True)


def on_the_cpu(trainer: type) -> type:
    """``trainer`` with FSDP2 on the CPU: accelerate takes FSDP for accelerators only, so its state is told."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    class CPUTrainer(trainer):  # type: ignore[misc]
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
            self.accelerator.state.distributed_type, self.accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
            self.is_fsdp_enabled = True

    return CPUTrainer


def options(folder: str, **changes: Any) -> dict[str, Any]:
    """Arguments of every trainer's configuration, which reads the environment."""
    enter_ranks()
    fsdp = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "log_level": "error", "save_strategy": "no", "bf16": False}
    steps = {"max_steps": STEPS, "logging_steps": 1, "learning_rate": 1e-2, "seed": 1, "per_device_train_batch_size": 2}
    return {
        "output_dir": folder,
        "fsdp": True,
        "fsdp_config": fsdp,
        "gradient_checkpointing": False,
        **quiet,
        **steps,
        **changes,
    }


def curve(trainer: Any, implementation: str) -> list[float]:
    """Train; the loss and the norm of the gradients, step by step."""
    with sharding(implementation):
        trainer.train()
    if implementation == "ragged":
        from torch_ragged.fsdp import FSDPModule

        assert isinstance(trainer.model, FSDPModule), type(trainer.model)
    return [value for entry in trainer.state.log_history if "loss" in entry for value in (entry["loss"], entry["grad_norm"])]


def train_sft(implementation: str, lora: bool = False, **changes: Any) -> list[float]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    data = Dataset.from_list([{"text": sentence(number)} for number in range(64)])
    adapters = {}
    if lora:
        from peft import LoraConfig

        adapters["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(**options(folder, **changes), max_length=16, dataset_num_proc=None)
        trainer = on_the_cpu(SFTTrainer)(
            make_model(), config, train_dataset=data, processing_class=make_tokenizer(), **adapters
        )
        return curve(trainer, implementation)


def train_dpo(implementation: str) -> list[float]:
    """With a reference model, which ``trl.models.utils.prepare_fsdp`` shards."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    rows = [{"prompt": "the cat", "chosen": sentence(i), "rejected": sentence(i + 1)} for i in range(64)]
    with tempfile.TemporaryDirectory() as folder, sharding(implementation):
        config = DPOConfig(**options(folder), max_length=32)
        trainer = on_the_cpu(DPOTrainer)(
            make_model(),
            ref_model=make_model(),
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=make_tokenizer(),
        )
        return curve(trainer, implementation)


_accumulating = functools.partial(train_sft, gradient_accumulation_steps=2)
_checkpointing = functools.partial(train_sft, gradient_checkpointing=True)
CASES = [
    Case(PROGRAMS, "SFTTrainer, Llama", train_sft, exact=False),
    Case(PROGRAMS, "SFTTrainer, gradient accumulation", _accumulating, exact=False),
    Case(PROGRAMS, "SFTTrainer, checkpointed activations", _checkpointing, exact=False),
    Case((*PROGRAMS, "peft"), "SFTTrainer, LoRA", functools.partial(train_sft, lora=True), exact=False),
    Case(PROGRAMS, "DPOTrainer, with a reference model (prepare_fsdp)", train_dpo, exact=False),
]

NOT_RUN = [
    NotRun(PROGRAMS, "AsyncGRPOTrainer, AsyncDistillationTrainer: rollouts", "they need a vLLM server and GPUs"),
    NotRun(PROGRAMS, "GRPOTrainer with use_vllm", "vLLM needs a GPU"),
]
