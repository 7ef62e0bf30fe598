"""A plan beside DTensor and beside hand-written parallelism: one tensor-parallel step, and single ops at a boundary.

    python -m benchmarks.step.spmd_step [--json PATH] [--rounds 9] [--layers 4] [--width 128] [--tokens 64]

Forward and backward of transformer blocks on rank 0 of a fake group of 2 ranks: collectives cost a call, and no time on a wire.
So the times are those of the host, and of compute. Candidates, by turns, CPU time of the thread:

- ``by hand``: local modules with explicit collectives, as Megatron writes them. The model is another class.
- ``static``: an unchanged model under a plan, ``parallelize(mode="static")``
- ``eager``: the same plan, ``mode="eager"``
- ``DTensor``: the unchanged model under torch's ``parallelize_module``

The second table has the cost of a boundary in eager mode, beside ``DTensor.redistribute``.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.common.measure import interleaved, print_table, write_json
from torch_ragged.spmd import Plan, parallelize
from torch_ragged.spmd._move import move_dtensor

HEAD = 16


class Block(nn.Module):
    """Attention and a gated MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class Model(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class _Enter(torch.autograd.Function):
    """Before a column-parallel layer: nothing in forward, an all-reduce in backward."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class _Exit(torch.autograd.Function):
    """After a row-parallel layer: an all-reduce in forward, nothing in backward."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad


class ByHand(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + _Exit.apply(self.attention(_Enter.apply(self.first(x))))
        return x + _Exit.apply(self.mlp(_Enter.apply(self.second(x))))


def by_hand(model: Model, ranks: int) -> Model:
    """The same blocks with local weights."""
    for block in model.blocks:
        block.__class__ = ByHand
        for name, layer in block.named_children():
            if name in ("q", "k", "v", "gate", "up"):
                layer.weight = nn.Parameter(layer.weight.detach().chunk(ranks)[dist.get_rank()].clone())
            elif name in ("o", "down"):
                layer.weight = nn.Parameter(layer.weight.detach().chunk(ranks, 1)[dist.get_rank()].clone())
    return model


def plan() -> Plan:
    block = r"blocks\.\d+"
    plan = Plan().shard(rf"{block}\.(q|k|v|gate|up)\.weight", Shard(0), "tp")
    plan.shard(rf"{block}\.(o|down)\.weight", Shard(1), "tp")
    plan.shard(rf"{block}\.(first|second).<out>", Replicate(), "tp", grad=Replicate())
    plan.shard(rf"{block}\.(o|down).<out>", Replicate(), "tp")
    return plan.shard("<in>", Replicate(), "tp").default(Replicate())


def with_torch(model: Model, mesh: DeviceMesh) -> Model:
    styles = {name: ColwiseParallel() for name in ("q", "k", "v", "gate", "up")}
    for block in model.blocks:
        parallelize_module(block, mesh, {**styles, "o": RowwiseParallel(), "down": RowwiseParallel()})
    return model


def measure(layers: int, width: int, tokens: int, rounds: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    warnings.simplefilter("ignore")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model, x = Model(width, layers), torch.randn(1, tokens, width)
    with_dtensor = with_torch(copy.deepcopy(model), mesh)
    candidates = {
        "by hand": by_hand(copy.deepcopy(model), 2),
        "static": parallelize(copy.deepcopy(model), plan(), mesh, mode="static"),
        "eager": parallelize(copy.deepcopy(model), plan(), mesh),
        "DTensor": with_dtensor,
    }

    def step(model: nn.Module) -> None:
        model(x).backward()
        for param in model.parameters():
            param.grad = None

    for _ in range(2):  # The second call finds the static modules.
        step(candidates["static"])
    report = candidates["static"].static_modules.report
    assert report.modules == ("",), report
    times = interleaved({name: lambda each=each: step(each) for name, each in candidates.items()}, rounds)
    rows = [
        {
            "a step of": name,
            "us per block": statistics.median(each) / layers,
            "/ by hand": statistics.median(a / b for a, b in zip(each, times["by hand"])),
            "/ DTensor": statistics.median(a / b for a, b in zip(each, times["DTensor"])),
        }
        for name, each in times.items()
    ]
    small = torch.randn(2, 8, 16)
    tensor = distribute_tensor(small, mesh, [Shard(1)])
    pending = DTensor.from_local(small, mesh, [Partial()])
    cases = {
        "Shard(1) -> Replicate": (tensor, (Replicate(),)),
        "Partial -> Shard(1)": (pending, (Shard(1),)),
        "Replicate -> Shard(1)": (tensor.redistribute(placements=[Replicate()]), (Shard(1),)),
    }
    boundary = []
    for name, (source, placements) in cases.items():
        pair = {
            "ours": lambda source=source, placements=placements: move_dtensor(source, placements),
            "torch": lambda source=source, placements=placements: source.redistribute(placements=placements),
        }
        found = interleaved(pair, rounds)
        row: dict[str, Any] = {"a boundary": name} | {f"{each} us": statistics.median(found[each]) for each in pair}
        row["/ torch"] = statistics.median(a / b for a, b in zip(found["ours"], found["torch"]))
        boundary.append(row)
    dist.destroy_process_group()
    return rows, boundary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, boundary = measure(options.layers, options.width, options.tokens, options.rounds)
    title = f"{options.layers} blocks of width {options.width}, {options.tokens} tokens, rank 0 of 2, torch {torch.__version__}"
    print_table(title, rows)
    print_table("One boundary, forward only", boundary)
    if options.json:
        write_json(options.json, {"steps": rows, "boundaries": boundary})


if __name__ == "__main__":
    main()
