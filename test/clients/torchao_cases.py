"""torchao: float8 training (emulated on the CPU), low-bit optimizers, NF4 weights with LoRA, and its 8-bit training."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import torch.distributed as dist
from case import STEPS, Case, NotRun
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

PROGRAMS = ("torchao", "torch")
WIDTH = 128


class Net(nn.Module):
    """Two blocks of matrices, which torchao converts, and a norm and a head, which it does not."""

    def __init__(self) -> None:
        super().__init__()
        block = (nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH, bias=False))
        second = (nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH, bias=False))
        self.layers = nn.ModuleList([nn.Sequential(*block), nn.Sequential(*second)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x))


class LoRALinear(nn.Module):
    """A frozen NF4 weight and a trainable low-rank update."""

    def __init__(self, base: nn.Linear) -> None:
        from torchao.quantization import NF4Tensor

        super().__init__()
        weight = NF4Tensor.from_tensor(base.weight.detach(), block_size=64, scaler_block_size=256)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight) + self.up(self.down(x))


def make(convert: Any = None) -> Net:
    torch.manual_seed(0)
    model = Net()
    if convert is not None:
        convert(model)
    return model


def shard(model: Net, implementation: str, policy: Any = None) -> Net:
    """``fully_shard`` of each block and of the rest, by FSDP2 or by ours; ``policy`` is ours alone."""
    import torch.distributed.fsdp

    import torch_ragged.fsdp

    functions = {"fsdp2": torch.distributed.fsdp.fully_shard, "ragged": torch_ragged.fsdp.fully_shard}
    options = {"orig_param_policy": policy} if implementation == "ragged" else {}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        functions[implementation](layer, mesh=mesh, **options)
    return functions[implementation](model, mesh=mesh, **options)


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(100 * rank + step))


def loss_of(model: Net, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x.roll(1, 1)).square().mean()


def train(implementation: str, convert: Any = None, optimize: Any = None, policy: Any = None, after: Any = None) -> list[float]:
    """The losses of this rank. ``"one process"`` sums the gradients of both ranks' batches itself."""
    model = make(convert)
    if implementation != "one process":
        shard(model, implementation, policy)
    optimizer = (optimize or functools.partial(torch.optim.AdamW, lr=1e-3))([p for p in model.parameters() if p.requires_grad])
    losses = []
    for step in range(STEPS):
        ranks = range(dist.get_world_size()) if implementation == "one process" else [dist.get_rank()]
        found = {rank: loss_of(model, batch(step, rank)) for rank in ranks}
        for loss in found.values():
            (loss / len(found)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if after is not None and implementation != "one process":
            after(model)
        losses.append(found[dist.get_rank()].item())
    return losses


# -- float8 ---------------------------------------------------------------------------------------------------------------


def float8(model: Net, recipe: str = "", all_gather: bool = False) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe) if recipe else Float8LinearConfig()
    config = dataclasses.replace(config, emulate=True, enable_fsdp_float8_all_gather=all_gather)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: name != "head")


def train_float8(implementation: str, recipe: str = "") -> list[float]:
    return train(implementation, functools.partial(float8, recipe=recipe))


def train_float8_all_gather(implementation: str, precompute: bool = False) -> list[float]:
    """One process computes with the same codes and scales, but makes them in each forward."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    convert = functools.partial(float8, all_gather=implementation != "one process")
    return train(implementation, convert, after=precompute_float8_dynamic_scale_for_fsdp if precompute else None)


# -- optimizers -----------------------------------------------------------------------------------------------------------


def train_low_bit(implementation: str, name: str, block_size: int) -> list[float]:
    import torchao.optim

    from torch_ragged.integrations.torchao import optimizer_blocks

    # torch's cache of compiled graphs ignores the types inside a DTensor: one optimizer would get the graph of another one.
    torch._dynamo.reset()
    optimize = functools.partial(getattr(torchao.optim, name), lr=1e-3)
    with torch._functorch.config.patch(enable_autograd_cache=False):
        return train(implementation, optimize=optimize, policy=optimizer_blocks(block_size))


# -- tensor types ---------------------------------------------------------------------------------------------------------


def lora(model: Net) -> None:
    for layer in model.layers:
        layer[0], layer[2] = LoRALinear(layer[0]), LoRALinear(layer[2])


def train_lora(implementation: str) -> list[float]:
    return train(implementation, lora)


def quantized(model: Net, config: str) -> None:
    import torchao.prototype.quantized_training
    from torchao.quantization import quantize_

    quantize_(model.layers, getattr(torchao.prototype.quantized_training, config)())


def train_quantized(implementation: str, config: str) -> list[float]:
    return train(implementation, functools.partial(quantized, config=config))


_GLOO = "gloo has no all-gather of float8"
_TENSORWISE = "float8, dynamic scales per tensor"
_HP = "rowwise_with_gw_hp"
CASES = [
    Case(PROGRAMS, f"{_TENSORWISE} (emulated)", train_float8),
    Case(PROGRAMS, "float8, recipe rowwise (emulated)", functools.partial(train_float8, recipe="rowwise")),
    Case(
        PROGRAMS, "float8, recipe rowwise_with_gw_hp (emulated)", functools.partial(train_float8, recipe="rowwise_with_gw_hp")
    ),
    Case(PROGRAMS, f"{_TENSORWISE}, float8 all-gather (emulated)", train_float8_all_gather, ours_only=_GLOO),
    Case(
        PROGRAMS,
        f"{_TENSORWISE}, float8 all-gather, scales of one all-reduce (emulated)",
        functools.partial(train_float8_all_gather, precompute=True),
        ours_only=_GLOO,
    ),
    Case(PROGRAMS, "AdamW8bit", functools.partial(train_low_bit, name="AdamW8bit", block_size=256)),
    Case(PROGRAMS, "AdamW4bit", functools.partial(train_low_bit, name="AdamW4bit", block_size=128)),
    Case(PROGRAMS, "AdamWFp8", functools.partial(train_low_bit, name="AdamWFp8", block_size=256)),
    Case(PROGRAMS, "NF4Tensor, frozen, with LoRA", train_lora),
    Case(PROGRAMS, "int8 mixed-precision training", functools.partial(train_quantized, config="int8_mixed_precision_training")),
    Case(PROGRAMS, "BitNet training", functools.partial(train_quantized, config="bitnet_training")),
]

NOT_RUN = [
    NotRun(PROGRAMS, "CPUOffloadOptimizer", "it asserts a CUDA or XPU device"),
    NotRun(PROGRAMS, "float8 with real float8 matmuls", "they need a GPU; the cases above emulate them"),
    NotRun(
        PROGRAMS,
        "frozen weights of quantize_(), such as Int8WeightOnlyConfig",
        "fully_shard, FSDP2's too, cannot cut these types: pass them as ignored_params",
    ),
    NotRun(PROGRAMS, "int8_weight_only_quantized_training", "its weights have no in-place multiplication, as AdamW needs it"),
]
