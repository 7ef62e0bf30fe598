"""Random models, as plain data and as modules. They know nothing of sharding, except where a leaf is tensor parallel.

A model is a tree of nodes, each a dict: containers have ``children``, leaves have parameters. Every node maps a tensor (rows,
width) to one of the same shape. All functions are smooth, so that small differences stay small.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

__all__ = ["CONTAINERS", "Context", "build", "leaves_of", "nodes_of", "random_tree"]

CONTAINERS = ("sequence", "twice", "checkpoint")
LEAVES = ("linear", "linear", "mlp", "mlp", "norm", "scale", "empty", "embed", "conv", "experts", "branch", "views", "odd")
LEAVES += ("transposed", "slice", "unused", "buffer", "inplace", "several")
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


class Context:
    """What a forward needs besides its input: which branches run, and the rows of tables. One per model."""

    def __init__(self) -> None:
        self.flags: list[bool] = []
        self.ids = torch.empty(0, dtype=torch.int64)


# -- as data ---------------------------------------------------------------------------------------------------------------


def random_tree(rng: Any, depth: int, parallel: bool) -> dict[str, Any]:
    """A container with leaves and containers below it. With ``parallel`` some leaves are tensor or expert parallel."""
    children = []
    for _ in range(rng.choice((1, 2, 2, 3))):
        if depth > 0 and rng.random() < 0.45:
            child = random_tree(rng, depth - 1, parallel)
            child["kind"] = rng.choice(("sequence", "sequence", *CONTAINERS))
        else:
            child = _random_leaf(rng, parallel)
        children.append(child)
    return {"kind": "sequence", "children": children}


def _random_leaf(rng: Any, parallel: bool) -> dict[str, Any]:
    if parallel and rng.random() < 0.4:
        kind = rng.choice(("tp_mlp", "tp_experts", "tp_mixed"))
    else:
        kind = rng.choice(LEAVES)
    leaf = {"kind": kind, "size": rng.randint(1, 7), "bias": rng.random() < 0.5, "flag": rng.randrange(4)}
    if rng.random() < 0.12:
        leaf["dtype"] = rng.choice(("float32", "bfloat16", "float64"))
    if rng.random() < 0.12:
        leaf["frozen"] = rng.choice(("all", "first"))
    return leaf


def nodes_of(tree: dict[str, Any], name: str = "") -> list[tuple[str, dict[str, Any]]]:
    """All nodes with their module names, parents first."""
    found = [(name, tree)]
    for index, child in enumerate(tree.get("children", ())):
        found += nodes_of(child, f"{name}.{index}" if name else str(index))
    return found


def leaves_of(tree: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The nodes without children, with their names."""
    return [(name, node) for name, node in nodes_of(tree) if "children" not in node]


# -- as modules ------------------------------------------------------------------------------------------------------------


class Container(nn.Module):
    """Its children one after the other; ``twice`` runs them two times, ``checkpoint`` runs them again in backward."""

    def __init__(self, children: list[nn.Module], kind: str) -> None:
        super().__init__()
        self.kind = kind
        for index, child in enumerate(children):
            self.add_module(str(index), child)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2 if self.kind == "twice" else 1):
            for child in self.children():
                recomputes = self.kind == "checkpoint" and torch.is_grad_enabled()
                x = checkpoint(child, x, use_reentrant=False) if recomputes else child(x)
        return x


class Leaf(nn.Module):
    """x + tanh(f(x)) / 2 for one of many functions f. ``cast`` is the dtype to which a single process casts parameters."""

    def __init__(self, node: dict[str, Any], width: int, context: Context, dtype: torch.dtype, parallel: Any) -> None:
        super().__init__()
        self.node, self.context, self.tp, self.cast = node, context, parallel, None
        self.dtype = DTYPES.get(node.get("dtype", ""), dtype)
        getattr(self, "init_" + node["kind"])(width, node["size"])
        own = list(self.parameters())
        for parameter in own if node.get("frozen") == "all" else own[: "frozen" in node]:
            parameter.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = getattr(self, "run_" + self.node["kind"])(x)
        return x + torch.tanh(y).to(x.dtype) / 2

    def new(self, *shape: int) -> nn.Parameter:
        """A parameter: random in float64 first, so that its values do not depend on the dtype."""
        return nn.Parameter((torch.randn(shape, dtype=torch.float64) * 0.4).to(self.dtype))

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter if self.cast is None else parameter.to(self.cast)

    def linear(self, module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        """A call of the module; or with its parameters as casts."""
        if self.cast is None:
            return module(x.to(module.weight.dtype))
        bias = None if module.bias is None else self.of(module.bias)
        return F.linear(x.to(self.cast), self.of(module.weight), bias)

    def new_linear(self, columns: int, rows: int) -> nn.Linear:
        layer = nn.Linear(columns, rows, bias=self.node["bias"], dtype=self.dtype)
        layer.weight = self.new(rows, columns)
        if layer.bias is not None:
            layer.bias = self.new(rows)
        return layer

    def init_linear(self, width: int, size: int) -> None:
        self.main = self.new_linear(width, width)

    def run_linear(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.main, x)

    def init_mlp(self, width: int, size: int) -> None:
        self.up, self.down = self.new_linear(width, size), self.new_linear(size, width)

    def run_mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.down, torch.tanh(self.linear(self.up, x)))

    def init_norm(self, width: int, size: int) -> None:
        self.weight, self.bias = self.new(width), self.new(width)

    def run_norm(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.of(self.weight)
        x = x.to(weight.dtype)
        return (x / (1 + x.pow(2).mean(-1, keepdim=True))) * weight + self.of(self.bias)

    def init_scale(self, width: int, size: int) -> None:
        self.factor = self.new()

    def run_scale(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.of(self.factor)

    def init_empty(self, width: int, size: int) -> None:
        shapes: Any = ((0,), (0, width), (size, 0))
        self.nothing, self.some = self.new(*shapes[size % 3]), self.new(size)

    def run_empty(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.of(self.some).sum() + self.of(self.nothing).sum()

    def init_embed(self, width: int, size: int) -> None:
        self.table = nn.Embedding(size, width, dtype=self.dtype)
        self.table.weight = self.new(size, width)

    def run_embed(self, x: torch.Tensor) -> torch.Tensor:
        ids = self.context.ids[: x.size(0)] % self.node["size"]
        return self.table(ids) if self.cast is None else F.embedding(ids, self.of(self.table.weight))

    def init_conv(self, width: int, size: int) -> None:
        self.kernel = self.new(1, 1, 3) if size % 2 else self.new(2, 1, 3)

    def run_conv(self, x: torch.Tensor) -> torch.Tensor:
        kernel = self.of(self.kernel)
        return F.conv1d(x.to(kernel.dtype).unsqueeze(1), kernel, padding=1).sum(1)

    def init_experts(self, width: int, size: int) -> None:
        self.weights = self.new(size, width, width)

    def run_experts(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.of(self.weights)
        return torch.bmm(x.to(weights.dtype).unsqueeze(1), weights[self.context.ids[: x.size(0)] % self.node["size"]]).squeeze(
            1
        )

    def init_branch(self, width: int, size: int) -> None:
        self.one, self.other = self.new_linear(width, width), self.new_linear(width, width)

    def run_branch(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.other if self.context.flags[self.node["flag"]] else self.one, x)

    def init_views(self, width: int, size: int) -> None:
        self.joined = self.new(2 * width, width)

    def run_views(self, x: torch.Tensor) -> torch.Tensor:
        joined = self.of(self.joined)
        first, second = joined.view(2, *joined.shape[1:], joined.size(1)).unbind(0)
        x = x.to(joined.dtype)
        return x @ first.t() + x.flip(-1) @ second[:, torch.arange(second.size(1) - 1, -1, -1)]

    def init_odd(self, width: int, size: int) -> None:
        self.cube = self.new(size, 1 + size % 3, 3)

    def run_odd(self, x: torch.Tensor) -> torch.Tensor:
        cube = self.of(self.cube)
        return x * cube.pow(2).mean() + cube.transpose(0, 2).reshape(-1)[:1]

    def init_transposed(self, width: int, size: int) -> None:
        self.matrix = nn.Parameter(self.new(size, width).data.t())

    def run_transposed(self, x: torch.Tensor) -> torch.Tensor:
        matrix = self.of(self.matrix)
        return (x.to(matrix.dtype) @ matrix) @ matrix.t()

    def init_slice(self, width: int, size: int) -> None:
        self.table = self.new(size + 1, width)

    def run_slice(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.of(self.table)[1:].sum(0)

    def init_unused(self, width: int, size: int) -> None:
        self.used, self.unused = self.new(width), self.new(size, width)

    def run_unused(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.of(self.used)

    def init_buffer(self, width: int, size: int) -> None:
        self.main = self.new_linear(width, width)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("shift", torch.full((width,), 0.1, dtype=torch.float64))

    def run_buffer(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return self.linear(self.main, x + self.shift.to(x.dtype))

    def init_inplace(self, width: int, size: int) -> None:
        self.main = self.new_linear(width, width)
        self.gain = self.new(width)

    def run_inplace(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(self.main, x)
        y += 0.5
        y[..., :1] *= 2
        return y.mul_(self.of(self.gain).to(y.dtype)) if y.dtype == self.of(self.gain).dtype else y * self.of(self.gain)

    def init_several(self, width: int, size: int) -> None:
        self.many = nn.ParameterList(self.new(*(1 + index % 2,) * (index % 3), width) for index in range(size))

    def run_several(self, x: torch.Tensor) -> torch.Tensor:
        return sum((x * self.of(each).flatten()[-x.size(-1) :] for each in self.many), torch.zeros_like(x))

    # Model parallel leaves: with a mesh their parameters are DTensors, without one they compute the same with plain tensors.

    def place(self, parameter: nn.Parameter, placement: Any) -> nn.Parameter:
        if self.tp is None:
            return parameter
        return nn.Parameter(distribute_tensor(parameter.data, self.tp, [placement]))

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.tp is None else DTensor.from_local(x, self.tp, [Replicate()], run_check=False)

    def leave(self, y: torch.Tensor) -> torch.Tensor:
        return y.full_tensor() if isinstance(y, DTensor) else y

    def init_tp_mlp(self, width: int, size: int) -> None:
        self.up = self.place(self.new(4 * size, width), Shard(0))
        self.down = self.place(self.new(width, 4 * size), Shard(1))
        self.gain = self.place(self.new(width), Replicate())

    def run_tp_mlp(self, x: torch.Tensor) -> torch.Tensor:
        up, down = self.of(self.up), self.of(self.down)
        y = F.linear(torch.tanh(F.linear(self.enter(x.to(up.dtype)), up)), down)
        return self.leave(y) * self.leave(self.of(self.gain))

    def init_tp_mixed(self, width: int, size: int) -> None:
        self.up, self.scale = self.place(self.new(4, size, 4), Shard(size % 2 * 2)), self.new(width)

    def run_tp_mixed(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.of(self.scale) * self.leave(self.of(self.up).pow(2).sum())

    def init_tp_experts(self, width: int, size: int) -> None:
        self.weights = self.place(self.new(4, width, width), Shard(0))

    def run_tp_experts(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.of(self.weights)
        x, chosen = x.to(weights.dtype), self.context.ids[: x.size(0)] % 4
        if self.tp is None:
            return torch.bmm(x.unsqueeze(1), weights[chosen]).squeeze(1)
        mine = weights.to_local(grad_placements=[Shard(0)])
        x = self.enter(x).to_local(grad_placements=[Partial()])
        first = mine.size(0) * self.tp.get_local_rank()
        y = sum(((chosen == first + e).unsqueeze(1) * (x @ mine[e]) for e in range(mine.size(0))), torch.zeros_like(x))
        return DTensor.from_local(y, self.tp, [Partial()], run_check=False).full_tensor()


def build(case: dict[str, Any], parallel: Any = None) -> tuple[nn.Module, Context]:
    """The model of a case: plain without ``parallel``, the mesh dimension of tensor and expert parallelism."""
    torch.manual_seed(case["seed"])
    context, dtype = Context(), DTYPES[case["dtype"]]

    def make(node: dict[str, Any]) -> nn.Module:
        if "children" in node:
            return Container([make(child) for child in node["children"]], node["kind"])
        return Leaf(node, case["width"], context, dtype, parallel)

    model = make(case["tree"])
    for one, other in case["ties"]:
        setattr(model.get_submodule(other[0]), other[1], getattr(model.get_submodule(one[0]), one[1]))
    return model, context
