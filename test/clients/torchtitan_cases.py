"""torchtitan's trainer on the CPU: each mode trains ten steps with torch's FSDP2 and with ours.

Its debug models are cut to two layers and train on made-up tokens. Weights are a function of their names, so that they are
equal in all modes. It trains on accelerators only: :func:`use_the_cpu` tells it of a CPU, and changes nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import hashlib
import importlib
import os
import tempfile
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from case import STEPS, Case, NotRun
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

PROGRAMS = ("torchtitan",)
CAN_RUN = hasattr(dist, "set_timeout")
"""torchtitan 0.3.0 calls a function that torch 2.13 does not have."""

VOCABULARY, LENGTH = 2048, 32


def use_the_cpu() -> None:
    """Call it before torchtitan's trainer is imported: its modules copy the names of the device."""
    from torchtitan.tools import utils

    def nothing(*_: Any) -> None:
        pass

    cpu = {
        "get_device_name": lambda device: "CPU",
        "get_device_properties": lambda device: types.SimpleNamespace(total_memory=2**30),
        "memory_stats": lambda device=None: {},
        "current_device": lambda: 0,
        "reset_peak_memory_stats": nothing,
        "empty_cache": nothing,
    }
    utils.device_type, utils.device_module = "cpu", types.SimpleNamespace(**{**vars(torch.cpu), **cpu})


def make_data_config() -> tuple[Any, Any]:
    """The configs of a data loader and of a tokenizer that read no files.

    The global batch of a step is a function of the step only: it is the same for any number of ranks, and after a resume.
    """
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer

    class Tokens(BaseDataLoader):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(
            self, config: Any, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
        ) -> None:
            self.ranks, self.rank, self.length, self.size = dp_world_size, dp_rank, seq_len, local_batch_size
            self.batches = 0

        def __iter__(self) -> Iterator[Any]:
            while True:
                generator = torch.Generator().manual_seed(self.batches % 3)  # Seen again and again: the loss falls.
                tokens = torch.randint(0, VOCABULARY, (self.ranks * self.size, self.length + 1), generator=generator)
                mine = tokens[self.rank * self.size : (self.rank + 1) * self.size]
                positions = torch.arange(self.length).repeat(self.size, 1)
                self.batches += 1
                yield {"input": mine[:, :-1].contiguous(), "positions": positions}, mine[:, 1:].contiguous()

        def state_dict(self) -> dict[str, Any]:
            return {"batches": self.batches}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.batches = state_dict["batches"]

    class NoTokenizer(BaseTokenizer):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Any, **_: Any) -> None:
            super().__init__()

        def encode(self, *_: Any) -> list[int]:
            return []

        def decode(self, *_: Any) -> str:
            return ""

        def get_vocab_size(self) -> int:
            return VOCABULARY

    return Tokens.Config(), NoTokenizer.Config()


def small(config: Any, attention: str = "sdpa") -> Any:
    """A config of torchtitan, made small enough for a CPU."""
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention

    config.dataloader, config.tokenizer = make_data_config()
    model = config.model_spec.model
    model.layers = model.layers[:2]
    for _, _, parent, name in list(model.traverse(FlexAttention.Config)) if attention == "sdpa" else ():
        setattr(parent, name, ScaledDotProductAttention.Config())
    training = config.training
    training.local_batch_size, training.seq_len, training.steps = 2, LENGTH, STEPS
    training.disable_cuda_graphs, training.max_norm = True, 1e9  # Norms are summed in another order than FSDP2's.
    training.mixed_precision_param = "float32"
    config.lr_scheduler.warmup_steps = 2
    return config


def make_config(
    implementation: str, name: str, changes: dict[str, Any], attention: str = "sdpa", policy: Callable[..., Any] | None = None
) -> Any:
    """The config ``module/name`` of torchtitan, with ``changes`` such as ``{"training.steps": 3}``."""
    module, function = name.split("/")
    config = getattr(importlib.import_module(f"torchtitan.models.{module}.config_registry"), function)()
    if implementation == "ragged":
        from torch_ragged.integrations.torchtitan import ragged

        config = ragged(config, orig_param_policy=policy)
    config = small(config, attention)
    for path, value in changes.items():
        parent, _, field = path.rpartition(".")
        setattr(functools.reduce(getattr, filter(None, parent.split(".")), config), field, value)
    config = dataclasses.replace(config)  # Its __post_init__ checks the changes.
    if implementation == "fsdp2":
        config.model_spec = dataclasses.replace(config.model_spec, parallelize_fn=_with_sums(config.model_spec.parallelize_fn))
    return config


def _with_sums(parallelize_fn: Callable[..., Any]) -> Callable[..., Any]:
    """FSDP2 divides gradients by a reduction that gloo has not: let it reduce with sums."""

    def parallelize(*args: Any, **keywords: Any) -> Any:
        model = parallelize_fn(*args, **keywords)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return model

    return parallelize


def all_to_all(outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: Any = None, async_op: bool = False) -> None:
    """``dist.all_to_all`` of tensors of different sizes, which gloo has only for the parts of one tensor."""
    assert not async_op
    received = torch.cat([each.reshape(-1) for each in outputs])
    sizes = [[each.numel() for each in tensors] for tensors in (outputs, inputs)]
    dist.all_to_all_single(received, torch.cat([each.reshape(-1) for each in inputs]), *sizes, group=group)
    for output, part in zip(outputs, received.split(sizes[0]), strict=True):
        output.copy_(part.view(output.shape))


@torch.no_grad()
def initialize(parts: list[Any]) -> None:
    """Random weights that are a function of their names: torch has no random numbers for DTensors on CPUs."""
    for part in parts:
        for name, param in part.named_parameters():
            name = name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
            generator = torch.Generator().manual_seed(int(hashlib.md5(name.encode()).hexdigest()[:8], 16))
            value = torch.randn(param.shape, generator=generator) * (0.02 if param.ndim > 1 else 0.1) + (param.ndim == 1)
            if isinstance(param, DTensor):
                value = distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)
            param.copy_(value)


@contextlib.contextmanager
def trainer_of(config: Any) -> Iterator[Any]:
    """torchtitan's trainer on this process group. ``trainer.losses`` and ``trainer.norms`` grow with each step."""
    config.dump_folder = config.dump_folder if os.path.isabs(config.dump_folder) else tempfile.mkdtemp()
    environment = {"LOCAL_RANK": str(dist.get_rank()), "RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    # As torchtitan does where it makes the process group.
    patches = mock.patch.dict(os.environ, environment), mock.patch.object(dist, "all_to_all", all_to_all)
    with patches[0], patches[1], torch.autograd.set_multithreading_enabled(False):
        trainer = config.build()
        initialize(trainer.model_parts)
        trainer.losses, trainer.norms = [], []

        def log(step: int, average: float, most: float, norm: float, extra_metrics: Any = None) -> None:
            trainer.losses.append(average)
            trainer.norms.append(norm)

        trainer.metrics_processor.log = log
        try:
            yield trainer
        finally:
            trainer.close()
            gc.enable()  # torchtitan collects garbage by itself.


def train(implementation: str, name: str, changes: dict[str, Any], attention: str = "sdpa") -> list[float]:
    """The loss of each step; on ranks without the last pipeline stage, torchtitan's placeholder."""
    use_the_cpu()
    config = make_config(implementation, name, changes, attention)
    with trainer_of(config) as trainer, mock.patch("time.sleep"):
        trainer.train()
        if implementation == "ragged":
            from torch_ragged.fsdp import FSDPModule as Ours

            assert any(isinstance(module, Ours) for part in trainer.model_parts for module in part.modules())
    return trainer.losses


def parallel(**degrees: Any) -> dict[str, Any]:
    return {f"parallelism.{name}": value for name, value in degrees.items()}


LLAMA, TIED = "llama3/llama3_debugmodel", "qwen3/qwen3_debugmodel"
QWEN, DEEPSEEK = "qwen3/qwen3_moe_debug", "deepseek_v3/deepseek_v3_debugmodel"

FULL_DTENSOR, PARTIAL_DTENSOR = parallel(spmd_backend="full_dtensor"), parallel(spmd_backend="partial_dtensor")
TENSOR, EXPERT = parallel(tensor_parallel_degree=2), parallel(expert_parallel_degree=2)
PIPELINE = parallel(pipeline_parallel_degree=2, pipeline_parallel_schedule="1F1B")
INTERLEAVED = parallel(pipeline_parallel_degree=2, pipeline_parallel_schedule="Interleaved1F1B")


def case(what: str, name: str, ranks: int = 2, changes: dict[str, Any] | None = None, exact: bool = True) -> Case:
    return Case(PROGRAMS, what, functools.partial(train, name=name, changes=changes or {}), ranks, exact)


# Gradients are reduced over two data-parallel ranks, where not said otherwise: a sum of two is the same in any order.
CASES: list[Case] = [
    case("Trainer, Llama 3, selective activation checkpointing, chunked loss", LLAMA),
    case("the same on 4 data-parallel ranks, which add in another order", LLAMA, 4, exact=False),
    case("Llama 3, bfloat16 parameters, float32 reduction", LLAMA, changes={"training.mixed_precision_param": "bfloat16"}),
    case("Llama 3, gradient accumulation", LLAMA, changes={"training.global_batch_size": 8}),
    case("Llama 3, gradient clipping", LLAMA, changes={"training.max_norm": 1.0}, exact=False),
    case("Llama 3, cross entropy loss", "llama3/llama3_debugmodel_ce_loss"),
    case("Llama 3, parameters stay unsharded after forward", LLAMA, changes=parallel(fsdp_reshard_after_forward="never")),
    case("Llama 3, all modules reshard after forward", LLAMA, changes=parallel(fsdp_reshard_after_forward="always")),
    case("Llama 3, torch.compile of each block", LLAMA, changes={"compile.enable": True}),
    case("Llama 3, torchao float8 (emulated) and LoRA", "llama3/llama3_debugmodel_float8_emulate_lora"),
    case("Llama 3, HSDP", LLAMA, 4, parallel(data_parallel_replicate_degree=2)),
    case("Llama 3, tensor parallelism, spmd_types", LLAMA, 4, TENSOR),
    case("Llama 3, tensor parallelism, spmd_types with type checks", LLAMA, 4, {**TENSOR, "debug.spmd_typechecking": True}),
    case("Llama 3, tensor parallelism, full_dtensor", LLAMA, 4, {**TENSOR, **FULL_DTENSOR}),
    case("Llama 3, tensor parallelism, partial_dtensor", LLAMA, 4, {**TENSOR, **PARTIAL_DTENSOR}),
    case("Llama 3, HSDP and tensor parallelism", LLAMA, 4, {**TENSOR, **parallel(data_parallel_replicate_degree=2)}),
    case("Llama 3, pipeline parallelism, 1F1B", LLAMA, 4, PIPELINE),
    case("Llama 3, pipeline parallelism, Interleaved1F1B", LLAMA, 4, INTERLEAVED),
    case("Qwen 3, tied weights", TIED),
    case("Qwen 3, tied weights, tensor parallelism", TIED, 4, TENSOR),
    case("Qwen 3 MoE", QWEN),
    case("Qwen 3 MoE, expert parallelism", QWEN, changes=EXPERT),
    case("Qwen 3 MoE, expert and tensor parallelism, spmd_types", QWEN, 4, {**EXPERT, **TENSOR}),
    case("Qwen 3 MoE, expert and tensor parallelism, full_dtensor", QWEN, 4, {**EXPERT, **TENSOR, **FULL_DTENSOR}),
    case("Qwen 3 MoE, expert and tensor parallelism, partial_dtensor", QWEN, 4, {**EXPERT, **TENSOR, **PARTIAL_DTENSOR}),
    case("DeepSeek V3, expert parallelism", DEEPSEEK, changes=EXPERT),
    case("DeepSeek V3, expert and tensor parallelism", DEEPSEEK, 4, {**EXPERT, **TENSOR}),
    case("DeepSeek V3, multi-token prediction", "deepseek_v3/deepseek_v3_debugmodel_mtp"),
]

NOT_RUN: list[NotRun] = [
    NotRun(PROGRAMS, "context parallelism", "neither FlexAttention's backward nor DTensor's attention exists on CPUs"),
    NotRun(PROGRAMS, "CPU offload", "FSDP2 pins memory, which needs an accelerator (ours trains)"),
    NotRun(PROGRAMS, "GPT-OSS", "its attention sinks need FlexAttention or varlen attention, which have no backward on CPUs"),
    NotRun(PROGRAMS, "torchao float8 with real 8-bit matmuls, MXFP8, NVFP4", "these need a GPU"),
    NotRun(PROGRAMS, "CUDA graphs, symmetric memory, DeepEP, HybridEP", "these need a GPU"),
    NotRun(PROGRAMS, "Flux", "its data set and encoders are downloaded"),
]
