"""Modules with the parameters of published models, real widths and fewer layers, for benchmarks on the meta device.

Names and shapes come from the planner's table (torch_ragged/offline/_models.py); experts that are stored one by one are
fused into (experts, out, in), as models are trained. The computation is a stand-in: it uses every parameter once, in order,
each weight in one matmul of its own shape, and has no softmax, routing or rotation. So buffers, collectives and the order
of gradients are those of the model, activations are not.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from torch_ragged.offline import BUILT_IN, Parameter, load_model

__all__ = ["ACTIVE_EXPERTS", "NAMES", "Block", "Stack", "active_numel", "blocks_of", "build", "rest_of", "shard"]

NAMES = ("llama-3-70b", "gpt-oss-120b", "deepseek-v3")
assert set(NAMES) <= set(BUILT_IN)

ACTIVE_EXPERTS = {"gpt-oss-120b": 4, "deepseek-v3": 8}
"""Routed experts that a token goes through (``num_experts_per_tok`` of the models' config.json)."""

_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")


_model = functools.cache(load_model)


@functools.cache
def blocks_of(name: str, layers: int | None = None) -> list[list[Parameter]]:
    """The parameters of all blocks of a model, or of the last ``layers``: the first three of DeepSeek-V3 have no experts."""
    groups = [group for key, group in _model(name).groups.items() if key != "rest"]
    return [_fused(group) for group in groups[-(layers or 0) :]]


def rest_of(name: str) -> list[Parameter]:
    """The parameters outside of blocks: embedding, norm, head."""
    return _model(name).groups["rest"]


def active_numel(name: str, parameters: Sequence[Parameter]) -> int:
    """Weights that one token is multiplied by: fused experts count as many times as it goes through them."""
    chosen = ACTIVE_EXPERTS.get(name, 0)
    found = 0
    for one in parameters:
        numel = torch.Size(one.shape).numel()
        found += numel * chosen // one.shape[0] if len(one.shape) == 3 else numel
    return found


def _fused(parameters: Sequence[Parameter]) -> list[Parameter]:
    """Experts stored one by one become one parameter for each of their matrices, in the place of the first."""
    counts: dict[str, list[Parameter]] = {}
    for one in parameters:
        counts.setdefault(_ONE_EXPERT.sub(".experts.", one.name), []).append(one)
    return [
        same[0] if len(same) == 1 else Parameter(name, (len(same), *same[0].shape), expert=True)
        for name, same in counts.items()
    ]


class Chain(nn.Module):
    """Every parameter once, in order; what is too narrow or too wide for the next is filled up with zeros or cut."""

    def __init__(self, parameters: Sequence[Parameter], **factory: Any) -> None:
        super().__init__()
        for one in parameters:
            self.register_parameter(one.name.replace(".", "_"), nn.Parameter(torch.empty(one.shape, **factory)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.parameters(recurse=False):
            x = _apply(x, weight)
        return x


class Block(Chain):
    """One transformer block's parameters, around which the input is added: (tokens, width) -> (tokens, width)."""

    def __init__(self, parameters: Sequence[Parameter], width: int, **factory: Any) -> None:
        super().__init__(parameters, **factory)
        self.width = width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + _fit(super().forward(x), self.width)


def _apply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = _fit(x, weight.shape[-1])
    if weight.ndim == 1:
        return x * weight
    if weight.ndim == 2:
        return F.linear(x, weight)
    return torch.bmm(x.expand(len(weight), -1, -1), weight.transpose(1, 2)).sum(0)


def _fit(x: torch.Tensor, width: int) -> torch.Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


class Embedding(nn.Module):
    """(tokens,) -> (tokens, width)."""

    def __init__(self, parameter: Parameter, **factory: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(parameter.shape, **factory))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, self.weight)


class Stack(nn.Module):
    """Embedding, blocks, and what follows (norm, head): (tokens,) -> (tokens, vocabulary)."""

    def __init__(self, blocks: Sequence[Sequence[Parameter]], rest: Sequence[Parameter], **factory: Any) -> None:
        super().__init__()
        width = rest[0].shape[1]
        self.embedding = Embedding(rest[0], **factory)
        self.blocks = nn.ModuleList(Block(block, width, **factory) for block in blocks)
        self.head = Chain(rest[1:], **factory)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(name: str, layers: int, **factory: Any) -> Stack:
    """A model of :data:`NAMES` with its last ``layers`` blocks."""
    return Stack(blocks_of(name, layers), rest_of(name), **factory)


def shard(model: Stack, fully_shard: Any, **options: Any) -> Stack:
    """Groups as torchtitan makes them, by either package's ``fully_shard``: embedding, each block, head; the root has none.

    The head stays gathered between forward and backward.
    """
    for module in (model.embedding, *model.blocks):
        fully_shard(module, **options)
    fully_shard(model.head, **{**options, "reshard_after_forward": False})
    fully_shard(model, **options)
    return model
