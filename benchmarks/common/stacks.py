"""The models that are timed: stacks of blocks, each block a group, on a CPU's scale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["CASES", "Case"]


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class SwiGLU(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Experts that choose their tokens (expert choice routing), all of a kind in one 3-D parameter: shapes never vary."""

    def __init__(self, dim: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(dim, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, dim, hidden) * dim**-0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, dim) * hidden**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        capacity = -(-2 * len(tokens) // len(self.up))  # two experts per token in the mean
        weights, chosen = self.router(tokens).softmax(-1).t().topk(min(capacity, len(tokens)))
        hidden = torch.bmm(F.silu(torch.bmm(tokens[chosen], self.up)), self.down) * weights.unsqueeze(-1)
        return torch.zeros_like(tokens).index_add(0, chosen.flatten(), hidden.flatten(0, 1)).view_as(x)


class Block(nn.Module):
    def __init__(self, dim: int, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention, self.mlp = nn.RMSNorm(dim), nn.RMSNorm(dim), Attention(dim), mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Tiny(nn.Module):
    """Eight small parameters: nearly all of a step is overhead."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(dim, dim), nn.LayerNorm(dim)) for _ in range(2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


@dataclass(frozen=True)
class Case:
    """A stack: how one block is made, how many there are, and the width of what goes through, (batch, length, dim)."""

    name: str
    block: Callable[[], nn.Module]
    blocks: int
    dim: int
    batch: int = 2
    length: int = 64

    def model(self) -> nn.Sequential:
        """The stack, with the same values on every rank."""
        torch.manual_seed(0)
        return nn.Sequential(*(self.block() for _ in range(self.blocks)))

    def inputs(self, seed: int) -> torch.Tensor:
        """One rank's batch."""
        return torch.randn(self.batch, self.length, self.dim, generator=torch.Generator().manual_seed(seed))


CASES = {
    case.name: case
    for case in (
        Case("dense", lambda: Block(512, SwiGLU(512, 1408)), blocks=8, dim=512),
        Case("moe", lambda: Block(384, Experts(384, 512, experts=6)), blocks=6, dim=384),
        Case("moe-even", lambda: Block(384, Experts(384, 512, experts=8)), blocks=6, dim=384),
        Case("tiny", lambda: Tiny(32), blocks=16, dim=32, batch=1, length=8),
        Case("huge", lambda: nn.Linear(3072, 3072, bias=False), blocks=4, dim=3072, batch=1),
    )
}
"""By name. ``moe`` has experts that don't divide by 4 ranks."""
