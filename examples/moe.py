"""A decoder-only mixture-of-experts transformer on bytes, small enough for a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["MoEConfig", "MoETransformer"]


@dataclass(frozen=True)
class MoEConfig:
    """Sizes of the model; the defaults make about 5.4 million parameters."""

    vocab: int = 256
    context: int = 128
    dim: int = 192
    heads: int = 6
    layers: int = 4
    experts: int = 6
    hidden: int = 512
    top_k: int = 2
    tied: bool = True


class Attention(nn.Module):
    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, dim))


class Experts(nn.Module):
    """Top-k routed feed-forward experts, their weights fused to one 3-D parameter each: (experts, out, in)."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.router = nn.Linear(config.dim, config.experts, bias=False)
        self.up = nn.Parameter(torch.randn(config.experts, config.hidden, config.dim) * config.dim**-0.5)
        self.down = nn.Parameter(torch.randn(config.experts, config.dim, config.hidden) * config.hidden**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        scores, chosen = self.router(tokens).softmax(-1).topk(self.top_k)
        scores = scores / scores.sum(-1, keepdim=True)
        result = torch.zeros_like(tokens)
        up, down = self.up.unbind(0), self.down.unbind(0)
        for expert in range(len(up)):
            token, slot = (chosen == expert).nonzero(as_tuple=True)
            hidden = F.gelu(tokens[token] @ up[expert].t()) @ down[expert].t()
            result = result.index_add(0, token, hidden * scores[token, slot].unsqueeze(-1))
        return result.view_as(x)


class Block(nn.Module):
    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(config.dim), nn.RMSNorm(config.dim)
        self.attention, self.experts = Attention(config), Experts(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.experts(self.norm2(x))


class MoETransformer(nn.Module):
    """Bytes in, next-byte logits out: (batch, length) -> (batch, length, vocab)."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.dim)
        self.position = nn.Parameter(torch.randn(config.context, config.dim) * 0.02)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        if config.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position[: tokens.shape[-1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
