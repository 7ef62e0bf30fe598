"""Train a mixture-of-experts transformer on 8 ranks by one plan: dp 2, sequence and tensor parallelism 2, experts 2.

    torchrun --standalone --nproc-per-node 8 examples/one_plan.py [--steps 20] [--static]

The model is written for one device, and nothing in it knows of ranks. Each rank also trains it alone on the whole batch: the
two curves of losses, in out/one_plan.png, are one curve. Dropout is on, and each rank draws its own part of the weights, after
they are sharded.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from example_tools import start, write_curves
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional as F
from tqdm import trange

from torch_ragged.spmd import Plan, deferred_init, parallelize

# --- the model: it is that of one device ---------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head = width // heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class Experts(nn.Module):
    """Every expert sees every token; the router says how much of each answer counts."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) * (2 * width) ** -0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        share = self.router(tokens).softmax(-1).t().unsqueeze(-1)  # (experts, tokens, 1)
        hidden = F.gelu(tokens.expand(len(self.up), -1, -1) @ self.up)
        return (share * (hidden @ self.down)).sum(0).unflatten(0, x.shape[:2])


class Block(nn.Module):
    def __init__(self, width: int, heads: int, experts: int) -> None:
        super().__init__()
        self.first, self.second, self.dropout = nn.RMSNorm(width), nn.RMSNorm(width), nn.Dropout(0.1)
        self.attention, self.experts = Attention(width, heads), Experts(width, experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.first(x)))
        return x + self.dropout(self.experts(self.second(x)))


class Model(nn.Module):
    def __init__(self, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, width), nn.Linear(width, 256, bias=False)
        self.blocks = nn.ModuleList(Block(width, 4, 4) for _ in range(layers))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.embedding(text[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), text[:, 1:].flatten())


# --- the plan, beside it --------------------------------------------------------------------------------------------


def make_plan() -> Plan:
    block = r"blocks\.\d+"
    plan = Plan()
    plan.shard(rf"{block}\.attention\.(q|k|v)\.weight", Shard(0), "tp")
    plan.shard(rf"{block}\.attention\.out\.weight", Shard(1), "tp")
    plan.shard(rf"{block}\.experts\.up", (Shard(2), Shard(0)), ("tp", "ep"))
    plan.shard(rf"{block}\.experts\.down", (Shard(1), Shard(0)), ("tp", "ep"))
    plan.shard("embedding.<out>", Shard(1), "tp")
    plan.shard(rf"{block}\.(first|second).<out>", Replicate(), "tp")
    plan.shard(rf"{block}\.(attention|experts).<out>", (Shard(1), Replicate()), ("tp", "ep"))
    plan.shard("head.<in>", Replicate(), "tp")
    plan.shard("<in>", Shard(0), "dp")
    return plan.unit(block, "dp")


# --- the script: it is that of one device, too ----------------------------------------------------------------------


def train(model: nn.Module, windows: torch.Tensor, steps: int, name: str) -> list[float]:
    torch.manual_seed(1)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for _ in trange(steps, desc=name, disable=dist.get_rank() > 0):
        loss = model(windows[torch.randint(len(windows), (8,))])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--static", action="store_true", help="local tensors inside of modules that allow it")
    options = parser.parse_args()
    rank, ranks = start()
    if ranks != 8:
        parser.error(f"this example is for 8 ranks, got {ranks}: torchrun --standalone --nproc-per-node 8")
    windows = torch.tensor(list(Path(argparse.__file__).read_bytes())).unfold(0, 33, 1)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "tp", "ep"))

    torch.manual_seed(0)
    model = parallelize(deferred_init(Model), make_plan(), mesh, mode="static" if options.static else "eager")
    losses = train(model, windows, options.steps, "8 ranks")
    torch.manual_seed(0)
    alone = train(Model(), windows, options.steps, "alone")

    if rank == 0:
        difference = max(abs(a - b) for a, b in zip(losses, alone))
        if options.static:
            print(model.static_modules.report)
        steps = range(1, options.steps + 1)
        curves = {"one process": (steps, alone), "8 ranks: dp 2, tp 2, ep 2": (steps, losses)}
        write_curves(Path("out/one_plan.png"), "one plan, one device's losses", curves)
        print(
            f"trained on 8 ranks by one plan: loss {losses[0]:.4f} -> {losses[-1]:.4f}, and one process has the same "
            f"(largest difference {difference:.1e}); drawn in out/one_plan.png"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
