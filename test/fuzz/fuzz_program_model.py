"""Modules of whole programs: the parts of fuzz_plan_model, whose code also branches, writes, stores tensors and draws.

What an act reads besides its arguments is a *setting*: an attribute, an entry of a dict or a list, a class attribute, a global
or a closure. The script changes settings between steps.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from fuzz_plan_model import DTYPES, Network, Part, Stack, called, default_dtype
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["ACTS", "Program", "ProgramPart", "build_program", "reset", "set_gain", "set_global"]

GAIN = 1.0
SETTINGS = {"gain": 1.0}


class Options:
    """An object of the user that a module refers to."""

    def __init__(self) -> None:
        self.gain, self.names = 1.0, ["a", "b"]


def set_global(value: float) -> None:
    """Change what the code of acts reads from this file."""
    global GAIN
    GAIN = value


def set_gain(value: float) -> None:
    """Change an entry of a global dict."""
    SETTINGS["gain"] = value


def reset() -> None:
    """All that acts read and that no module has is as at first."""
    set_global(1.0)
    set_gain(1.0)
    ProgramPart.shared = 1.0
    random.seed(0)


def _scaled(x: torch.Tensor) -> torch.Tensor:
    """A function that acts call: it reads a global."""
    return x * 1.5 if SETTINGS["gain"] > 1 else x - 0.25


def _closure() -> tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[float], None]]:
    gain = 1.0

    def use(x: torch.Tensor) -> torch.Tensor:
        return x * gain if gain > 1 else x + 0.125

    def change(value: float) -> None:
        nonlocal gain
        gain = value

    return use, change


class Sizes(nn.Module):
    """So small that it is static by itself: it writes what depends on global sizes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).mul_(1 / len(x)).add_(x.shape[1] / 8)


class ProgramPart(Part):
    """A part that acts on its input before it runs. An act maps a tensor (rows, length, width) to one of the same shape."""

    shared = 1.0

    def __init__(self, part: dict[str, Any], model: dict[str, Any]) -> None:
        super().__init__(part, model)
        width = model["width"]
        self.gain, self.settings, self.values, self.options = 1.0, {"gain": 1.0}, [1.0, 2.0], Options()
        self.calls_made, self.kept = 0, []
        self.closure, self.change_closure = _closure()
        self.table = {"plain": type(self).act_detach, "fast": type(self).act_length}
        self.rate = 0.0
        names = part["acts"]
        if "gate" in names:
            self.gate_of_act = nn.Parameter(torch.zeros(width))
        if "sizes" in names:
            self.sizes = Sizes(width)
        if "batch_norm" in names:
            self.statistics = nn.BatchNorm1d(width)
        if "group_norm" in names:
            self.groups = nn.GroupNorm(2, width)
        if "twice" in names or "borrowed" in names:
            self.inner = nn.Linear(width, width)
        if "written_buffer" in names:
            self.register_buffer("average_of_act", torch.zeros(width))
        self.acts = [getattr(ProgramPart, f"act_{name}") for name in names]

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, *, scale: float = 1.0, flag: bool = False) -> Any:
        if self.node["by name"]:
            for name in self.node["acts"]:
                x = getattr(self, f"act_{name}")(x)
        else:
            for act in self.acts:
                x = act(self, x)
        if flag:
            x = x * 1.25 - 0.5
        return super().forward(x, mask, scale=scale)

    # -- branches

    def act_rows(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1.5 if x.shape[0] > self.node["limit"] else x - 0.25

    def act_length(self, x: torch.Tensor) -> torch.Tensor:
        return x.flip(1) if x.size(1) > 4 else x * 0.75

    def act_by_size(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 / len(x)) + x.shape[1] / 8

    def act_training(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1.5 if self.training else x - 0.25

    def act_grad_mode(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1.5 if torch.is_grad_enabled() else x - 0.25

    def act_needs_grad(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1.5 if x.requires_grad else x - 0.25

    def act_is_frozen(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1.5 if all(each.requires_grad for each in self.parameters()) else x - 0.25

    def act_attribute(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain if self.gain > 1 else x - 0.25

    def act_entry(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1.5 if self.settings["gain"] > 1 else x - 0.25

    def act_list(self, x: torch.Tensor) -> torch.Tensor:
        for value in self.values:
            x = x * value - 0.25
        return x

    def act_object(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1.5 if self.options.gain > 1 else x - 0.25

    def act_class(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1.5 if self.shared > 1 else x - 0.25

    def act_global(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1.5 if GAIN > 1 else x - 0.25

    def act_global_entry(self, x: torch.Tensor) -> torch.Tensor:
        return _scaled(x)

    def act_closure(self, x: torch.Tensor) -> torch.Tensor:
        return self.closure(x)

    def act_table(self, x: torch.Tensor) -> torch.Tensor:
        return self.table["fast" if self.gain > 1 else "plain"](self, x)

    def act_counter(self, x: torch.Tensor) -> torch.Tensor:
        self.calls_made += 1
        return x * 1.5 if self.calls_made > 3 else x - 0.25

    def act_has(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1.5 if hasattr(self, "extra") else x - 0.25

    def act_value(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1.5 if x.detach().square().mean().item() < 1e9 else x - 0.25

    def act_python_draw(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1.5 if random.random() < 0.5 else x - 0.25

    # -- views and writes

    def act_write_row(self, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[:, 0] = 0.5
        return y

    def act_write_slice(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 1.0
        y[:, 1:].mul_(2)
        return y

    def act_write_features(self, x: torch.Tensor) -> torch.Tensor:
        y = x + 0.0
        y[..., 0].fill_(0.25)
        y.narrow(-1, 1, 1).neg_()
        return y

    def act_write_chunk(self, x: torch.Tensor) -> torch.Tensor:
        y = x.detach().clone()  # Autograd refuses a write to one of several views.
        y.chunk(2, -1)[1].neg_()
        return x + y / 2

    def act_write_tensor(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        y[:, :2] = x[:, :2] * 2
        y[:, 2:] += x[:, 2:]
        return y

    def act_add_(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 1.0).add_(0.5).clamp_(-4, 4)

    def act_write_input(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(0.5) if not x.is_leaf else x * 0.5

    def act_view(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2).contiguous().view(x.shape[0], -1).sin().view(x.shape[0], x.shape[2], -1).transpose(1, 2)

    def act_unbind(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([each * (1 + i) for i, each in enumerate(x.unbind(1))], 1) / 4

    # -- gradients, stored tensors, draws

    def act_detach(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.detach().mean(-1, keepdim=True)

    def act_no_grad(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            shift = x.mean(1, keepdim=True)
        return x - shift

    def act_hook(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 1.0
        if y.requires_grad:
            y.register_hook(lambda grad: grad * 2)
        return y

    def act_store(self, x: torch.Tensor) -> torch.Tensor:
        self.aux = x.square().mean(-1)
        return x

    def act_keep(self, x: torch.Tensor) -> torch.Tensor:
        self.kept.append(x.detach().mean())
        self.kept = self.kept[-2:]
        return x

    def act_reuse(self, x: torch.Tensor) -> torch.Tensor:
        before = getattr(self, "last", None)
        self.last = x.detach().mean()
        return x if before is None else x + before

    def act_gate(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gate_of_act * x.cos()

    def act_dropout(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, self.rate, self.training)

    def act_draw(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x) if self.training else x

    # -- modules

    def act_batch_norm(self, x: torch.Tensor) -> torch.Tensor:
        return self.statistics(x.flatten(0, 1)).view(x.shape)

    def act_group_norm(self, x: torch.Tensor) -> torch.Tensor:
        return self.groups(x.transpose(1, 2)).transpose(1, 2)

    def act_twice(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(F.silu(self.inner(x)))

    def act_borrowed(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.inner.weight, self.inner.bias) / 2

    def act_sizes(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.sizes(x) / 2

    def act_written_buffer(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.average_of_act.lerp_(x.mean((0, 1)), 0.1)
        return x - self.average_of_act


ACTS = tuple(name.removeprefix("act_") for name in vars(ProgramPart) if name.startswith("act_"))


class Program(Network):
    """A network of such parts, with a side head that some steps use."""

    def __init__(self, model: dict[str, Any]) -> None:
        super().__init__(model)
        self.depth, self.flags = len(self.blocks), {"flag": False}
        if model["side"]:
            self.side = nn.Linear(model["width"], 3)

    def _part(self, part: dict[str, Any], model: dict[str, Any]) -> nn.Module:
        return ProgramStack(part, model) if "parts" in part else ProgramPart(part, model)

    def forward(
        self,
        x: torch.Tensor,
        labels: torch.Tensor | None = None,
        *,
        mask: torch.Tensor | None = None,
        flag: bool = False,
        early: bool = False,
    ) -> Any:
        hidden = self.embedding(x)
        for index, block in enumerate(self.blocks[: self.depth]):
            hidden = _run(block, hidden, mask, flag)
            if early and index == 0:
                break
        hidden = self.norm(hidden)
        if self.model["side"] == "stored":
            self.seen = self.side(hidden).tanh()
        result = self.output(hidden, labels)
        return (result, self.side(hidden)) if self.model["side"] == "output" else result


class ProgramStack(Stack):
    """Parts one after the other; ``twice`` runs them two times."""

    def _part(self, part: dict[str, Any], model: dict[str, Any]) -> nn.Module:
        return ProgramPart(part, model)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, *, scale: float = 1.0, flag: bool = False
    ) -> torch.Tensor:
        for _ in range(2 if self.node["kind"] == "twice" else 1):
            for part in self.parts:
                x = _run(part, x, mask, flag)
        return x


def _run(part: Any, x: torch.Tensor, mask: torch.Tensor | None, flag: bool) -> torch.Tensor:
    if part.node["checkpoint"] and torch.is_grad_enabled():
        if part.node["reentrant"]:  # It takes no keywords.
            call = functools.partial(part, mask=mask, scale=0.5, flag=flag)
            return called(part, checkpoint(call, x, use_reentrant=True))
        return called(part, checkpoint(part, x, mask=mask, scale=0.5, flag=flag, use_reentrant=False))
    return called(part, part(x, mask=mask, scale=0.5, flag=flag))


def build_program(model: dict[str, Any], dtype: str = "float64") -> Program:
    """The modules of a program, with the values that the generator of random numbers gives."""
    with default_dtype(DTYPES[dtype]):
        return Program(model)
