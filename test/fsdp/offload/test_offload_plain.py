"""Torch's optimizers with states in host memory: the bits of those without, and a state dict that loads in both."""

import copy
import unittest

import torch
import torch.distributed as dist
from common import error_of, ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from torch_ragged.fsdp import Offload, fully_shard, offloaded


def trained(make, fraction, steps=3, loads=None):
    torch.manual_seed(0)
    model, mesh = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 7)), init_device_mesh("cpu", (2,))
    knobs = {} if fraction is None else {"offload_policy": Offload(fraction)}
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh, **knobs)
    optimizer = make(model, fraction is not None)
    if loads is not None:
        optimizer.load_state_dict(copy.deepcopy(loads))  # Torch's own would share its tensors.
    for step in range(steps):
        x = torch.randn(5, 12, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.to_local().clone() for param in model.parameters()], optimizer


def adamw(model, is_offloaded):
    return offloaded(torch.optim.AdamW, model, lr=0.1) if is_offloaded else torch.optim.AdamW(model.parameters(), lr=0.1)


def sgd(model, is_offloaded):
    options = {"lr": 0.1, "momentum": 0.9}
    return offloaded(torch.optim.SGD, model, **options) if is_offloaded else torch.optim.SGD(model.parameters(), **options)


class PlainOptimizersTest(unittest.TestCase):
    @ranks(2)
    def test_any_fraction_has_the_bits_of_none():
        for make in (adamw, sgd):
            plain, optimizer = trained(make, None)
            for fraction in (0, 0.3, 1):
                mine, offloading = trained(make, fraction)
                assert all(torch.equal(p, q) for p, q in zip(mine, plain, strict=True)), fraction
                assert (offloading.tier_nbytes()["host"] > 0) == (fraction > 0)
            onwards = [trained(make, fraction, 2, optimizer.state_dict())[0] for fraction in (None, 0.5)]
            assert all(torch.equal(p, q) for p, q in zip(*onwards, strict=True))

    @ranks(2)
    def test_a_model_without_a_policy_is_refused_on_all_ranks():
        model = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
        error = error_of(offloaded, torch.optim.AdamW, model)
        assert "ValueError" in error and "Offload" in error, error


if __name__ == "__main__":
    unittest.main()
