"""A stack of blocks under FSDP2 and under ours: the same gradients, the same training."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from torch_ragged.fsdp import fully_shard, rows

__all__ = ["WIDTH", "Block", "assert_same_gradients", "assert_same_training", "batch", "both", "build", "full_gradients"]

WIDTH = 10


def rows_of(fqn, parameter):
    return rows(3)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

    def logits(self, x):
        return self.down(torch.relu(self.up(x)))


def build(shard, mesh, blocks=3, **knobs):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(blocks)))
    for block in model:
        shard(block, mesh=mesh, **knobs)
    return shard(model, mesh=mesh, **knobs)


def both(mesh, **knobs):
    """FSDP2's model, ours by elements, ours by rows."""
    return (
        build(torch_fully_shard, mesh, **knobs),
        build(fully_shard, mesh, **knobs),
        build(fully_shard, mesh, orig_param_policy=rows_of, **knobs),
    )


def batch(step):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def full_gradients(model):
    return [p.grad.full_tensor() if p.grad is not None else None for p in model.parameters()]


def assert_same_gradients(models):
    want, *others = map(full_gradients, models)
    assert any(gradient is not None for gradient in want)
    for got in others:
        for mine, theirs in zip(got, want, strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                torch.testing.assert_close(mine, theirs)


def assert_same_training(models, steps=3, accumulate=None):
    """Losses of ``steps`` steps are equal; ``accumulate(model, micro)`` is called before each of two micro-batches."""
    curves = []
    for model in models:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        curve = []
        for step in range(steps):
            for micro in range(2 if accumulate else 1):
                if accumulate:
                    accumulate(model, micro)
                loss = model(batch(2 * step + micro)).pow(2).mean()
                loss.backward()
                curve.append(loss.item())
            curve.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor().item())
            optimizer.step()
            optimizer.zero_grad()
        curves.append(torch.tensor(curve))
    for curve in curves[1:]:
        torch.testing.assert_close(curve, curves[0], rtol=1e-4, atol=1e-5)
    assert (curves[0][-2] - curves[0][0]).abs() > 0.01  # It learns, so equal curves mean something.
