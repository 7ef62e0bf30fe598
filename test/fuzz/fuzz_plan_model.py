"""Random models for plans, as plain data and as modules. They know nothing of plans, meshes or ranks.

A model is a network of parts between an embedding and a head. A part is a dict with a kind; a stack has parts in it. Each
part maps a tensor (rows, length, width) to one of the same shape. No function has jumps, so that small differences stay small.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["DTYPES", "KINDS", "build", "called", "default_dtype", "parts_of", "random_model"]

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
KINDS = ("mlp", "mlp", "gated", "fused", "attention", "attention", "fused_attention", "experts", "ops", "ops", "scale")
KINDS += ("positions", "noise", "conv", "counter")
OPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cumsum": lambda x: x.cumsum(1) / 8,
    "roll": lambda x: x.roll(1, 1),
    "flip": lambda x: x.flip(1),
    "cat": lambda x: torch.cat([x[:, 1:], x[:, :1]], 1),
    "softmax": lambda x: x.softmax(1),
    "std": lambda x: x / (1 + x.std(-1, keepdim=True)),
    "amax": lambda x: x - x.amax(1, keepdim=True),
    "where": lambda x: torch.where(x > 0, x, x / 2),
    "chunk": lambda x: torch.cat(x.chunk(2, -1)[::-1], -1),
    "gram": lambda x: x @ (x.transpose(1, 2) @ x) / 16,
    "flatten": lambda x: x.flatten(0, 1).tanh().unflatten(0, x.shape[:2]),
    "sort": lambda x: x.sort(1).values,
    "index": lambda x: x[:, torch.arange(x.shape[1] - 1, -1, -1)],
    "in place": lambda x: (x / 2).add_(1).mul_(2),
    "logsumexp": lambda x: x - x.logsumexp(-1, keepdim=True),
    "norm": lambda x: x / (1 + torch.linalg.vector_norm(x)),
}


# -- as data ---------------------------------------------------------------------------------------------------------------


def random_model(rng: Any, ranks: int, even: bool, kinds: Sequence[str] = KINDS) -> dict[str, Any]:
    """A model of parts of these ``kinds``. Its features, heads and experts are multiples of ``ranks``, if cut evenly."""
    heads = ranks * rng.choice((1, 2) if ranks > 1 else (2, 4)) if even and ranks < 5 else ranks if even else rng.randint(1, 5)
    head = rng.choice((2, 4))
    model: dict[str, Any] = {"heads": heads, "head": head, "width": heads * head, "experts": ranks * (1 + (ranks < 3))}
    model["shared_heads"] = heads if rng.random() < 0.6 else ranks if even else 1
    model["vocabulary"] = 4 * ranks * rng.randint(2, 3) if even else rng.randint(9, 30)
    model["input"] = rng.choice(("ids", "ids", "floats"))
    model["tied"] = model["input"] == "ids" and rng.random() < 0.3
    model["norm"] = rng.choice(("layer", "rms", "none"))
    model["output"] = rng.choice(("loss", "loss", "dict", "tuple", "tensor", "record"))
    model["mask"] = rng.random() < 0.25
    model["parts"] = [_random_part(rng, ranks, even, kinds, depth=1) for _ in range(rng.choice((1, 2, 2, 3)))]
    if rng.random() < 0.4:  # As in most models: one kind of block, several times.
        model["parts"] = [dict(model["parts"][0]) for _ in range(2)]
    return model


def _random_part(rng: Any, ranks: int, even: bool, kinds: Sequence[str], depth: int) -> dict[str, Any]:
    part: dict[str, Any] = {"kind": rng.choice(kinds), "norm": rng.choice(("layer", "rms", "none"))}
    part["dropout"] = rng.choice((0.0, 0.0, 0.2))
    part["returns"] = rng.choice(("tensor", "tensor", "tensor", "tuple", "dict", "record"))
    part["bias"], part["checkpoint"] = rng.random() < 0.5, rng.random() < 0.15
    part["size"] = ranks * rng.choice((1, 2, 3)) * 2 if even else rng.randint(2, 13)
    part["choice"] = rng.choice(list(OPS))
    if rng.random() < 0.08:
        part["frozen"] = True
    part["zeros"] = rng.random() < 0.3
    if depth and rng.random() < 0.2:
        part |= {"kind": rng.choice(("stack", "stack", "twice")), "returns": "tensor", "norm": "none", "dropout": 0.0}
        part.pop("frozen", None)
        part["parts"] = [_random_part(rng, ranks, even, kinds, depth - 1) for _ in range(rng.choice((1, 2)))]
    return part


def parts_of(model: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The parts with their module names, outer ones first."""
    found, todo = [], [("blocks", model)]
    for prefix, node in todo:
        for index, part in enumerate(node.get("parts", ())):
            found.append((f"{prefix}.{index}", part))
            todo.append((f"{prefix}.{index}.parts", part))
    return found


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """New floating-point tensors have ``dtype``."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def build(model: dict[str, Any], dtype: str) -> Network:
    """The modules of a model, with the values that the generator of random numbers gives."""
    with default_dtype(DTYPES[dtype]):
        return Network(model)


# -- as modules ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    hidden: torch.Tensor


class Network(nn.Module):
    """Embedding, parts, norm and head. The output has one of several forms, with or without a loss."""

    def __init__(self, model: dict[str, Any]) -> None:
        super().__init__()
        self.kind, self.model = model["output"], model
        width, vocabulary = model["width"], model["vocabulary"]
        if model["input"] == "ids":
            self.embedding: nn.Module = nn.Embedding(vocabulary, width)
        else:
            self.embedding = nn.Linear(3, width)
        self.blocks = nn.ModuleList(self._part(part, model) for part in model["parts"])
        self.norm = _norm(model["norm"], width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if model["tied"]:
            self.head.weight = self.embedding.weight
        self.register_buffer("temperature", torch.tensor(2.0))

    def _part(self, part: dict[str, Any], model: dict[str, Any]) -> nn.Module:
        return Stack(part, model) if "parts" in part else Part(part, model)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, *, mask: torch.Tensor | None = None) -> Any:
        hidden = self.embedding(x)
        for block in self.blocks:
            hidden = _call(block, hidden, mask)
        return self.output(self.norm(hidden), labels)

    def output(self, hidden: torch.Tensor, labels: torch.Tensor | None) -> Any:
        logits = self.head(hidden) / self.temperature
        if self.kind in ("loss", "dict"):
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())  # type: ignore[union-attr]
            return loss if self.kind == "loss" else {"loss": loss, "logits": logits}
        return {"tensor": logits, "tuple": (logits, [hidden, None]), "record": Output(logits, hidden)}[self.kind]


def _call(part: nn.Module, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    if part.node["checkpoint"] and torch.is_grad_enabled():
        result = checkpoint(part, x, mask=mask, scale=0.5, use_reentrant=False)
    else:
        result = part(x, mask=mask, scale=0.5)
    return called(part, result)


def called(part: nn.Module, result: Any) -> torch.Tensor:
    """The tensor in what a part returns."""
    if isinstance(result, Output):
        return result.hidden
    return {"tuple": lambda: result[0], "dict": lambda: result["hidden"]}.get(part.node["returns"], lambda: result)()


def _norm(kind: str, width: int) -> nn.Module:
    return {"layer": nn.LayerNorm, "rms": nn.RMSNorm, "none": nn.Identity}[kind](width)


class Stack(nn.Module):
    """Parts one after the other; ``twice`` runs them two times."""

    def __init__(self, part: dict[str, Any], model: dict[str, Any]) -> None:
        super().__init__()
        self.node = part
        self.parts = nn.ModuleList(self._part(each, model) for each in part["parts"])

    def _part(self, part: dict[str, Any], model: dict[str, Any]) -> nn.Module:
        return Part(part, model)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, *, scale: float = 1.0) -> torch.Tensor:
        for _ in range(2 if self.node["kind"] == "twice" else 1):
            for part in self.parts:
                x = _call(part, x, mask)
        return x


class Part(nn.Module):
    """x + dropout(f(norm(x))) * scale for one of many functions f."""

    def __init__(self, part: dict[str, Any], model: dict[str, Any]) -> None:
        super().__init__()
        self.node, self.model = part, model
        self.norm, self.dropout = _norm(part["norm"], model["width"]), nn.Dropout(part["dropout"])
        getattr(self, "init_" + part["kind"])(model["width"], part["size"], part["bias"])
        if part["zeros"]:  # As of many models: the first step does not see them.
            for name, parameter in self.named_parameters():
                nn.init.zeros_(parameter) if name.endswith("bias") else None
        if part.get("frozen"):
            for parameter in list(self.parameters())[:1]:
                parameter.requires_grad_(False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, *, scale: float = 1.0) -> Any:
        y = getattr(self, "run_" + self.node["kind"])(self.norm(x))
        if mask is not None:
            y = y.masked_fill(mask.unsqueeze(-1), 0.0)
        y = x + self.dropout(y) * scale
        return {"tensor": y, "tuple": (y, None), "dict": {"other": 3, "hidden": y}, "record": Output(y, y)}[
            self.node["returns"]
        ]

    def init_mlp(self, width: int, size: int, bias: bool) -> None:
        self.up, self.down = nn.Linear(width, size, bias=bias), nn.Linear(size, width, bias=bias)

    def run_mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))

    def init_gated(self, width: int, size: int, bias: bool) -> None:
        self.gate, self.up = nn.Linear(width, size, bias=bias), nn.Linear(width, size, bias=bias)
        self.down = nn.Linear(size, width, bias=False)

    def run_gated(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))

    def init_fused(self, width: int, size: int, bias: bool) -> None:
        self.gate_up, self.down = nn.Linear(width, 2 * size, bias=bias), nn.Linear(size, width, bias=False)

    def run_fused(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)

    def init_attention(self, width: int, size: int, bias: bool) -> None:
        shared = self.model["shared_heads"] * self.model["head"]
        self.q, self.o = nn.Linear(width, width, bias=bias), nn.Linear(width, width, bias=False)
        self.k, self.v = nn.Linear(width, shared, bias=bias), nn.Linear(width, shared, bias=bias)

    def run_attention(self, x: torch.Tensor) -> torch.Tensor:
        return self.o(self._attend(self.q(x), self.k(x), self.v(x)))

    def init_fused_attention(self, width: int, size: int, bias: bool) -> None:
        shared = self.model["shared_heads"] * self.model["head"]
        self.qkv, self.o = nn.Linear(width, width + 2 * shared, bias=bias), nn.Linear(width, width, bias=False)

    def run_fused_attention(self, x: torch.Tensor) -> torch.Tensor:
        model, qkv = self.model, self.qkv(x)
        heads = (model["heads"], model["shared_heads"], model["shared_heads"])
        sizes = [each * qkv.shape[-1] // sum(heads) for each in heads]  # Of a rank's heads, if the tensor is local.
        return self.o(self._attend(*qkv.split(sizes, -1)))

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (-1, self.model["head"])).transpose(1, 2) for each in (q, k, v))
        if k.shape[1] != q.shape[1]:
            k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
        dropout = self.node["dropout"] if self.training and self.node["bias"] else 0.0
        result = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout).transpose(1, 2)
        return result.contiguous().flatten(-2)

    def init_experts(self, width: int, size: int, bias: bool) -> None:
        count = self.model["experts"]
        self.router = nn.Linear(width, count, bias=bias)
        self.w1, self.w2 = nn.Parameter(torch.randn(count, width, size) / 4), nn.Parameter(torch.randn(count, size, width) / 4)

    def run_experts(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        chosen = self.router(flat).softmax(-1)
        hidden = torch.bmm(flat.expand(chosen.shape[-1], -1, -1), self.w1)
        each = torch.bmm(F.silu(hidden), self.w2)
        return (each * chosen.t().unsqueeze(-1)).sum(0).view(x.shape)

    def init_ops(self, width: int, size: int, bias: bool) -> None:
        self.factor = nn.Parameter(torch.randn(width))

    def run_ops(self, x: torch.Tensor) -> torch.Tensor:
        return OPS[self.node["choice"]](x) * self.factor

    def init_scale(self, width: int, size: int, bias: bool) -> None:
        self.factor, self.unused = nn.Parameter(torch.randn(())), nn.Parameter(torch.randn(size, 2))
        self.register_buffer("shift", torch.linspace(-1, 1, width), persistent=bias)

    def run_scale(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor + self.shift.to(x.dtype)

    def init_positions(self, width: int, size: int, bias: bool) -> None:
        self.table = nn.Embedding(32, width)

    def run_positions(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.table(torch.arange(x.shape[1]))

    def init_noise(self, width: int, size: int, bias: bool) -> None:
        self.main = nn.Linear(width, width, bias=bias)

    def run_noise(self, x: torch.Tensor) -> torch.Tensor:
        made = {0: torch.randn, 1: torch.rand, 2: torch.zeros, 3: torch.ones}[self.node["size"] % 4](*x.shape, dtype=x.dtype)
        return self.main(x + made) + torch.full((x.shape[-1],), 0.5, dtype=x.dtype)

    def init_conv(self, width: int, size: int, bias: bool) -> None:
        self.conv = nn.Conv1d(width, width, 3, padding=1, bias=bias)

    def run_conv(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)

    def init_counter(self, width: int, size: int, bias: bool) -> None:
        self.main = nn.Linear(width, width, bias=bias)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(width))

    def run_counter(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls.add_(1)
            self.average.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        return self.main(x - self.average.to(x.dtype))
