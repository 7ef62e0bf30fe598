"""Transformers with the kernels that a GPU runs, for the model of a step: flash attention, rotation, balanced experts, loss.

Only shapes count, so experts get equal parts of the tokens, and no router decides. They are written as torchtitan's, in eager
mode.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from benchmarks.common.stacks import SwiGLU


@dataclass(frozen=True)
class Shape:
    """The sizes of a model.

    Attributes:
        kv: heads of keys and values.
        head: width of a head.
        hidden: of the feed-forward, or of each expert.
        experts, chosen, shared: experts of a block, those that a token goes through, and those that all tokens go through.
        dense: the first blocks, which have no experts but a feed-forward of width ``dense_hidden``.
    """

    layers: int
    dim: int
    heads: int
    kv: int
    head: int
    hidden: int
    vocabulary: int
    experts: int = 0
    chosen: int = 0
    shared: int = 0
    dense: int = 0
    dense_hidden: int = 0


SHAPES = {
    "llama-3.1-8b": Shape(layers=32, dim=4096, heads=32, kv=8, head=128, hidden=14336, vocabulary=128256),
    "llama-3-70b": Shape(layers=80, dim=8192, heads=64, kv=8, head=128, hidden=28672, vocabulary=128256),
    "gpt-oss-120b": Shape(36, 2880, heads=64, kv=8, head=64, hidden=2880, vocabulary=201088, experts=128, chosen=4),
    # Its attention has low-rank projections: here it has whole ones of about the same size.
    "deepseek-v3-16b": Shape(
        layers=27,
        dim=2048,
        heads=16,
        kv=16,
        head=128,
        hidden=1408,
        vocabulary=102400,
        experts=64,
        chosen=6,
        shared=2,
        dense=1,
        dense_hidden=10944,
    ),
}


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q = nn.Linear(shape.dim, shape.heads * shape.head, bias=False)
        self.k = nn.Linear(shape.dim, shape.kv * shape.head, bias=False)
        self.v = nn.Linear(shape.dim, shape.kv * shape.head, bias=False)
        self.out = nn.Linear(shape.heads * shape.head, shape.dim, bias=False)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, self.shape.head)) for each in (self.q, self.k, self.v))
        q, k = _rotated(q, rotation), _rotated(k, rotation)
        copies = self.shape.heads // self.shape.kv
        if copies > 1:
            k, v = (each.unsqueeze(3).expand(-1, -1, -1, copies, -1).flatten(2, 3) for each in (k, v))
        mixed = F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v)), is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


def _rotated(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation).flatten(3).to(x.dtype)


class Experts(nn.Module):
    """Each token is copied for the experts that it goes through; each expert has as many tokens."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.router = nn.Linear(shape.dim, shape.experts, bias=False)
        self.gate = nn.Parameter(torch.empty(shape.experts, shape.dim, shape.hidden))
        self.up = nn.Parameter(torch.empty(shape.experts, shape.dim, shape.hidden))
        self.down = nn.Parameter(torch.empty(shape.experts, shape.hidden, shape.dim))
        self.shared = SwiGLU(shape.dim, shape.hidden * shape.shared) if shape.shared else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        weights = self.router(tokens).softmax(-1)[:, : self.shape.chosen]
        copies = tokens.repeat(self.shape.chosen, 1).unflatten(0, (self.shape.experts, -1))
        hidden = F.silu(torch.bmm(copies, self.gate)) * torch.bmm(copies, self.up)
        answers = torch.bmm(hidden, self.down).flatten(0, 1).unflatten(0, (self.shape.chosen, -1))
        mixed = (answers * weights.t().unsqueeze(-1)).sum(0).view_as(x)
        return mixed if self.shared is None else mixed + self.shared(x)


class Block(nn.Module):
    def __init__(self, shape: Shape, index: int, saves: str) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.RMSNorm(shape.dim), nn.RMSNorm(shape.dim), Attention(shape)
        is_dense = not shape.experts or index < shape.dense
        self.mlp = SwiGLU(shape.dim, shape.dense_hidden or shape.hidden) if is_dense else Experts(shape)
        self.saves = saves

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        if self.saves == "all":
            return self.compute(x, rotation)
        options: dict[str, Any] = {"use_reentrant": False}
        if self.saves == "some":
            options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _every_second_matmul())
        return checkpoint(self.compute, x, rotation, **options)

    def compute(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), rotation)
        return x + self.mlp(self.norm2(x))


def _every_second_matmul() -> Any:
    """The policy of torchtitan's selective checkpointing: attention is saved, and every second matmul."""
    counts = {False: 0, True: 0}

    def policy(context: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if function is torch.ops.aten.mm.default:
            counts[context.is_recompute] += 1
            return CheckpointPolicy.PREFER_RECOMPUTE if counts[context.is_recompute] % 2 == 0 else CheckpointPolicy.MUST_SAVE
        saved = (torch.ops.aten._scaled_dot_product_flash_attention.default, torch.ops.aten.bmm.default)
        return CheckpointPolicy.MUST_SAVE if function in saved else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


class Transformer(nn.Module):
    """A model and its loss: (batch, tokens) -> (). ``saves``: activations of blocks, "all", "some" or "none"."""

    def __init__(self, shape: Shape, tokens: int, saves: str = "all", layers: int | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.dim)
        self.blocks = nn.ModuleList(Block(shape, index, saves) for index in range(layers or shape.layers))
        self.norm, self.head = nn.RMSNorm(shape.dim), nn.Linear(shape.dim, shape.vocabulary, bias=False)
        self.rotation_shape = (tokens, 1, shape.head // 2)

    def forward(self, tokens: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, rotation)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
