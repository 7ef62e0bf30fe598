"""One process and plain torch: the numbers that :class:`torch_ragged.fsdp.SameBits` has on any number of ranks.

    python examples/same_bits.py
    torchrun --nproc-per-node 3 examples/same_bits.py       # the same lines

A step's gradient is the sum over its pieces by one fixed tree, divided once; its norm is the root of an exact sum of squares,
rounded to float32.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterator

import torch
from torch import nn

PIECES, STEPS, MAX_NORM = 6, 5, 1.0


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32))


def batch(step: int) -> torch.Tensor:
    return torch.randn(4 * PIECES, 32, generator=torch.Generator().manual_seed(step))


def tree(leaves: list[torch.Tensor]) -> torch.Tensor:
    """The left subtree has the largest power of two below the number of leaves."""
    if len(leaves) == 1:
        return leaves[0]
    left = 1 << (len(leaves) - 1).bit_length() - 1
    return tree(leaves[:left]) + tree(leaves[left:])


def one_process(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> Iterator[tuple[float, float]]:
    """Loss and norm of each step."""
    params = list(model.parameters())
    for step in range(steps):
        leaves: list[list[torch.Tensor]] = [[] for _ in params]
        losses = []
        for piece, inputs in enumerate(batch(step).chunk(PIECES)):
            torch.manual_seed(int.from_bytes(hashlib.sha256(repr((0, step, piece)).encode()).digest()[:8], "big") % 2**63)
            loss = (model(inputs) - inputs).square().mean()
            losses.append(loss.item())
            for own, gradient in zip(leaves, torch.autograd.grad(loss, params)):
                own.append(gradient.float())
        for param, own in zip(params, leaves):
            param.grad = (tree(own) / PIECES).to(param.dtype)
        squares = math.fsum(x * x for param in params for x in param.grad.flatten().tolist())  # type: ignore[union-attr]
        norm = torch.tensor(math.sqrt(squares), dtype=torch.float32).item()
        for param in params:
            param.grad.mul_(min(1.0, MAX_NORM / (norm + 1e-6)))  # type: ignore[union-attr]
        optimizer.step()
        yield math.fsum(losses) / PIECES, norm


def many_ranks(model: nn.Module, make: Callable[[nn.Module], torch.optim.Optimizer]) -> Iterator[tuple[float, float]]:
    """The same with the model sharded."""
    from torch.distributed.device_mesh import init_device_mesh

    from torch_ragged.fsdp import SameBits, fully_shard

    fully_shard(model[0])  # type: ignore[index]
    fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    optimizer = make(model)
    same = SameBits(model, optimizer, pieces=PIECES)
    for step in range(STEPS):
        inputs = batch(step).chunk(PIECES)
        for piece in same.pieces():
            loss = (model(inputs[piece]) - inputs[piece]).square().mean()
            loss.backward()
            same.add_loss(loss)
        norm = same.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        yield same.loss(), norm


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def main() -> None:
    torch.set_num_threads(1)
    model = make_model()
    if "RANK" not in os.environ:
        steps = one_process(model, adamw(model))
    else:
        torch.distributed.init_process_group("gloo")
        steps = many_ranks(model, adamw)
    for step, (loss, norm) in enumerate(steps):
        if os.environ.get("RANK", "0") == "0":
            print(f"step {step}: loss {loss.hex()}, norm {norm.hex()}")
    if "RANK" in os.environ:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
