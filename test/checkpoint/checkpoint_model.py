"""A small model for the tests of torch_ragged.checkpoint, trained with dropout, and what a run of it holds."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from torch_ragged.checkpoint import TrainState
from torch_ragged.fsdp import fully_shard, rows

__all__ = ["Model", "make_state", "train", "values"]


class Model(nn.Module):
    """Sizes that no number of ranks divides; a parameter that is never used, a frozen one, a buffer."""

    def __init__(self, dropout=0.0, hidden=13):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.inner = nn.Sequential(nn.Linear(6, hidden), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, 6))
        self.experts = nn.Parameter(torch.randn(3, 5, 6))
        self.unused = nn.Parameter(torch.randn(3))
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens):
        self.count += 1
        x = self.inner(self.embedding(tokens))
        return x.sum(-1, keepdim=True) + torch.einsum("bd,eod->bo", x, self.experts)


def make_state(seed, *, dropout=0.0, hidden=13, optimizer=torch.optim.AdamW, model=None, policy=None):
    """A run at its start; sharded over all ranks, or single without a process group."""
    torch.manual_seed(seed)
    model = model or Model(dropout, hidden)
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        chosen = policy or (lambda fqn, p: rows(2) if p.ndim == 3 else None)
        fully_shard(model.inner, mesh=mesh, orig_param_policy=chosen)
        fully_shard(model, mesh=mesh, orig_param_policy=chosen)
    made = optimizer(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(made, 2, 0.5)
    data = torch.Generator().manual_seed(5)
    if dist.is_initialized():
        torch.manual_seed(100 + dist.get_rank())  # Each rank drops out of its own.
    return TrainState(model, made, scheduler, data_position={"epoch": 0, "sample": 0}, rng={"data": data}, extra={"best": None})


def train(state, steps):
    """Train on a batch of 8, whatever the number of ranks; returns the losses over all ranks."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(11, (8,), generator=state.rng["data"])
        loss = state.model(tokens[rank * 8 // ranks : (rank + 1) * 8 // ranks]).square().mean()
        loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.scheduler.step()
        state.step += 1
        state.consumed_tokens += 8
        state.data_position["sample"] += 8
        total = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(total)
        losses.append(total / ranks)
    state.extra["best"] = float(min(losses))
    return torch.stack(losses)


def values(state):
    """Every tensor of model and optimizer, whole, and what else a resume must bring back."""

    def whole(value):
        return value.detach().full_tensor().clone() if isinstance(value, DTensor) else value.detach().clone()

    found = {name: whole(value) for name, value in state.model.state_dict().items()}
    for name, parameter in state.model.named_parameters():
        for key, value in state.optimizer.state.get(parameter, {}).items():
            found[f"{name}.{key}"] = whole(value)
    found["lr"] = torch.tensor(state.optimizer.param_groups[0]["lr"])
    found["progress"] = torch.tensor([state.step, state.consumed_tokens, state.data_position["sample"]])
    return found
