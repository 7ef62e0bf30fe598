"""Small models whose plans tests write, and texts of a width that fits a test. Nothing of the models knows of plans."""

import textwrap

import torch
from torch import nn

__all__ = ["Llama", "Mixture", "wrapped"]


def wrapped(*texts):
    """Lines of at most 110 characters; those that go on begin with ``|``."""
    lines = [line for text in texts for line in text.splitlines()]
    options = {"width": 110, "subsequent_indent": "    | ", "break_long_words": False, "break_on_hyphens": False}
    return "\n".join(textwrap.fill(line, **options) for line in lines)


class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.k_proj, self.v_proj = nn.Linear(dim, dim // 2, bias=False), nn.Linear(dim, dim // 2, bias=False)

    def forward(self, hidden, mask=None, *, position=0):
        return self.o_proj(self.q_proj(hidden))


class FeedForward(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(dim, 2 * dim, bias=False)
        self.down_proj = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x):
        return self.down_proj(self.gate_proj(x) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.self_attn, self.mlp = Attention(dim), FeedForward(dim)
        self.input_norm, self.output_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)

    def forward(self, hidden, *masks, **options):
        return hidden + self.mlp(self.output_norm(hidden + self.self_attn(self.input_norm(hidden), *masks)))


class Llama(nn.Module):
    def __init__(self, layers=2, dim=16, vocabulary=32, tied=False):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(layers))
        self.norm, self.lm_head = nn.RMSNorm(dim), nn.Linear(dim, vocabulary, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight
        self.register_buffer("frequencies", torch.zeros(dim // 2), persistent=False)

    def forward(self, tokens, mask=None):
        hidden = self.embed_tokens(tokens)
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return self.lm_head(self.norm(hidden))


class Mixture(nn.Module):
    """A fused projection and experts."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 16, bias=False)
        self.experts = nn.Parameter(torch.zeros(6, 8, 4))
        self.scale = nn.Parameter(torch.zeros(()))
        self.blocks = nn.ModuleList(nn.ModuleList([nn.Linear(8, 8)]) for _ in range(2))

    def forward(self, x):
        return x
