"""Transformers with the kernels that a GPU runs: flash attention, rotation, balanced experts, loss; and the settings in which
others have published their steps.

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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from benchmarks.common.fake_world import PACKAGES
from benchmarks.common.stacks import SwiGLU

__all__ = ["SETTINGS", "SHAPES", "Setting", "Training", "Transformer"]


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


@dataclass(frozen=True)
class Setting:
    """One rank's step.

    Attributes:
        saves: activations that are kept, as :class:`Transformer` says.
        layers: fewer than the model has, for its time; None: all.
    """

    model: str
    ranks: int
    batch: int
    tokens: int
    saves: str = "all"
    layers: int | None = None
    reduce_dtype: str = "float32"


SETTINGS = {
    "torchtitan, table 1": Setting("llama-3.1-8b", 8, 2, 8192, "some"),
    "torchtitan, table 3": Setting("llama-3.1-8b", 128, 2, 8192, "some"),
    "FlexShard": Setting("deepseek-v3-16b", 8, 4, 4096, "some"),
    "llama-3-70b, 64": Setting("llama-3-70b", 64, 1, 8192, "none", 8),
    "llama-3-70b, 128": Setting("llama-3-70b", 128, 1, 8192, "none", 8),
    "llama-3-70b, 1024": Setting("llama-3-70b", 1024, 1, 8192, "none", 8),
    "llama-3-70b, 10240": Setting("llama-3-70b", 10240, 1, 8192, "none", 8),
    "gpt-oss-120b, 64": Setting("gpt-oss-120b", 64, 1, 8192, "none", 6, "bfloat16"),
    "gpt-oss-120b, 128": Setting("gpt-oss-120b", 128, 1, 8192, "none", 6, "bfloat16"),
    "gpt-oss-120b, 256": Setting("gpt-oss-120b", 256, 1, 8192, "none", 6, "bfloat16"),
    "gpt-oss-120b, 1024": Setting("gpt-oss-120b", 1024, 1, 8192, "none", 6, "bfloat16"),
}
"""By name. The batch of FlexShard's run is not published: torchtitan's default for this model."""


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


class Training:
    """One rank's steps in a setting, by a package of :data:`PACKAGES`: float32 shards, bfloat16 compute, fused AdamW.

    Groups are those of torchtitan: embedding, each block, norm and head. The parameters have no values yet.
    """

    def __init__(self, setting: Setting, package: str, mesh: DeviceMesh) -> None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=getattr(torch, setting.reduce_dtype))
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
        fully_shard: Any = PACKAGES[package]
        with torch.device("meta"):
            self.model = Transformer(SHAPES[setting.model], setting.tokens, setting.saves, setting.layers)
        fully_shard(self.model.embedding, **options)
        for block in self.model.blocks:
            fully_shard(block, **options)
        fully_shard([self.model.norm, self.model.head], **options, reshard_after_forward=False)
        fully_shard(self.model, **options)
        self.model.to_empty(device=mesh.device_type)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.tokens = torch.empty(setting.batch, setting.tokens, dtype=torch.long, device=mesh.device_type)
        self.rotation = torch.empty(self.model.rotation_shape, dtype=torch.complex64, device=mesh.device_type)

    def step(self) -> torch.Tensor:
        """The loss of a step."""
        loss = self.model(self.tokens, self.rotation)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss
