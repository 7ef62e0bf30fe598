"""A language model whose modules carry sharding configs as those of torchtitan do, and torchtitan's own llama3 debug model."""

import dataclasses
import enum
import importlib.util
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

__all__ = ["HAS_TORCHTITAN", "I", "Layout", "P", "R", "S", "Sharding", "V", "build", "build_llama3", "train"]

HAS_TORCHTITAN = bool(importlib.util.find_spec("torchtitan")) and hasattr(dist, "set_timeout")
VOCABULARY, WIDTH, HEADS = 64, 32, 4


class Kind(enum.Enum):
    R, I, V, P = "R", "I", "V", "P"  # noqa: E741


R, I, V, P = Kind  # noqa: E741


@dataclass(frozen=True)
class S:
    dim: int


@dataclass(frozen=True)
class Layout:
    axis_types: dict[str, Any]
    partition_spec: Optional[tuple] = None


@dataclass
class Sharding:
    state_shardings: dict[str, Layout] = field(default_factory=dict)
    in_src_shardings: Optional[dict[str, Layout]] = None
    in_dst_shardings: Optional[dict[str, Layout]] = None
    out_src_shardings: Any = None
    out_dst_shardings: Optional[Layout] = None
    local_map: Any = None


def weights(tp):
    return Layout({"dp": R, "cp": R, "tp": tp})


def rows(tp, cp=S(1)):
    return Layout({"dp": S(0), "cp": cp, "tp": tp})


SEQUENCE = Layout({"dp": V, "cp": V, "tp": V}, ("dp", ("cp", "tp"), None))


class Embedding(nn.Embedding):
    """Takes the local rows of its weight, as torchtitan's does."""

    def forward(self, input):
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        return F.embedding(input, weight)


class Kernel(nn.Module):
    def forward(self, q, k, v, *, scale=None):
        return F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, scale=scale
        ).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.kernel = Kernel()

    def forward(self, x, positions=None):
        q, k, v = [each(x).unflatten(-1, (HEADS, -1)) for each in (self.wq, self.wk, self.wv)]
        return self.wo(self.kernel(q, k, v).flatten(2))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, x):
        return x + self.feed_forward(x + self.attention(self.norm(x)))


class Model(nn.Module):
    def __init__(self, layers=2, tied=False):
        super().__init__()
        self.tok_embeddings = Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(index): Block() for index in range(layers)})
        self.norm, self.lm_head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.tok_embeddings.weight = self.lm_head.weight

    def forward(self, tokens):
        hidden = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            hidden = layer(hidden)
        return self.lm_head(self.norm(hidden))


def build(sequence_parallel=True, layers=2, tied=False):
    """The model with configs for tensor and context parallelism, in the manner of torchtitan's llama3."""
    model, between = Model(layers, tied), SEQUENCE if sequence_parallel else rows(I)
    norm = Sharding({"weight": weights(R)}, {"input": between}, None, between)
    columns = Sharding({"weight": weights(S(0)), "bias": weights(S(0))}, out_src_shardings=rows(S(-1)))
    summed = Sharding({"weight": weights(S(1)), "bias": weights(R)}, out_src_shardings=rows(P), out_dst_shardings=between)
    gathered = Sharding(in_src_shardings={"x": between}, in_dst_shardings={"x": rows(R)})
    cut, keys = rows(S(2)), rows(S(2), R)
    for layer in model.layers.values():
        attention, feed_forward = layer.attention, layer.feed_forward
        for module in (attention.wq, attention.wk, attention.wv, feed_forward.w1):
            module._sharding_config = columns
        for module in (attention.wo, feed_forward.w2):
            module._sharding_config = summed
        attention._sharding_config = feed_forward._sharding_config = gathered
        layer.norm._sharding_config = norm
        attention.kernel._sharding_config = Sharding(
            in_src_shardings={"q": cut, "k": cut, "v": cut},
            in_dst_shardings={"q": cut, "k": keys, "v": keys},
            out_src_shardings=cut,
            local_map=(cut, rows(S(2), P), rows(S(2), P)),
        )
    model.norm._sharding_config = dataclasses.replace(norm, out_dst_shardings=rows(R))
    ids = {"input": rows(R)}
    model.tok_embeddings._sharding_config = Sharding({"weight": weights(S(0))}, ids, ids, rows(P), between, local_map=())
    model.lm_head._sharding_config = Sharding({"weight": weights(S(0))}, ids, ids, rows(S(-1)), rows(S(-1)))
    return model


def build_llama3(sequence_parallel):
    """torchtitan's llama3 debug model, with two layers and attention that a CPU and DTensor have."""
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
    from torchtitan.models.llama3 import llama3_configs
    from torchtitan.models.llama3.sharding import set_llama3_sharding_config

    config = llama3_configs["debugmodel"](attn_backend="flex")
    config.layers = config.layers[:2]
    for _, _, parent, name in list(config.traverse(FlexAttention.Config)):
        setattr(parent, name, ScaledDotProductAttention.Config())
    for layer in config.layers:
        layer.attention.rope = dataclasses.replace(layer.attention.rope, max_seq_len=64)
    set_llama3_sharding_config(config, enable_sp=sequence_parallel)
    model = config.build()
    model.init_states()
    return model


def train(model, vocabulary=VOCABULARY, steps=3):
    """The script of one device; returns the loss of each step and the last gradients."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        tokens = torch.randint(vocabulary, (4, 16))
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        losses.append(whole(loss).item())
        gradients = {name: whole(param.grad) for name, param in model.named_parameters()}
        optimizer.step()
    return losses, gradients


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
