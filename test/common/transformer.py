"""A dense and a mixture-of-experts transformer whose experts may be distributed over ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

__all__ = ["VOCAB", "Transformer"]

DIM, HEADS, VOCAB, EXPERTS = 16, 2, 24, 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(DIM, DIM, bias=i == 0) for i in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 3 * DIM), nn.Linear(3 * DIM, DIM, bias=False)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class AllGather(torch.autograd.Function):
    """Tokens of all ranks of the group, one after the other; gradients are summed onto their owners."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _gather(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return _scatter(gradient, ctx.group), None


class ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _scatter(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return _gather(gradient, ctx.group), None


def _gather(x, group):
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


def _scatter(x, group):
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x.chunk(group.size())[group.rank()]


class Experts(nn.Module):
    """All experts on all tokens, weighted by ``scores``; with expert parallelism each rank of ``group`` has some of them."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, DIM, 2 * DIM) * 0.2)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * DIM, DIM) * 0.2)
        self.group = None

    def forward(self, x, scores):
        up, down = (p.to_local() if isinstance(p, DTensor) else p for p in (self.up, self.down))
        if self.group is not None:
            x, scores = AllGather.apply(x, self.group), AllGather.apply(scores, self.group)
            scores = scores.chunk(self.group.size(), -1)[self.group.rank()]
        hidden = torch.bmm(x.flatten(0, -2).expand(len(up), -1, -1), up)
        y = (torch.bmm(F.gelu(hidden), down) * scores.flatten(0, -2).T.unsqueeze(-1)).sum(0).view_as(x)
        return y if self.group is None else ReduceScatter.apply(y, self.group)


class MoE(nn.Module):
    """Every token goes through two of the experts."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(DIM, EXPERTS, bias=False), Experts()

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        return self.experts(x, scores * (scores >= scores.topk(2).values[..., 1:]))


class Block(nn.Module):
    def __init__(self, is_moe):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention, self.mlp = Attention(), MoE() if is_moe else FeedForward()

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, is_moe):
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(VOCAB, DIM), nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB)
        self.blocks = nn.ModuleList(Block(is_moe) for _ in range(2))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
