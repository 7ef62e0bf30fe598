"""NaN or infinity in the gradient of one rank: the same decision on all ranks. The average is right on every kind of mesh."""

import math
import unittest

import torch
import torch.distributed as dist
from common import error_of, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from torch_ragged.fsdp import fully_shard, rows

MESHES = {1: ((1,), (1, 1)), 2: ((2,), (1, 2), (2, 1))}


def sharded(mesh_shape):
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", mesh_shape)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    for part in (*model, model):
        fully_shard(part, mesh=mesh, orig_param_policy=lambda fqn, p: rows(2))
    return model


def check_decisions(mesh_shape):
    """A bad input on the last rank; what each rank decides."""
    last = dist.get_rank() == dist.get_world_size() - 1
    for bad in (math.nan, math.inf):
        model = sharded(mesh_shape)
        before = [p.detach().full_tensor() for p in model.parameters()]
        model(torch.full((2, 6), bad if last else 1.0)).sum().backward()
        text = error_of(nn.utils.clip_grad_norm_, model.parameters(), 1.0, error_if_nonfinite=True)
        assert text.startswith("RuntimeError: The total norm of order 2.0 for gradients") and "non-finite" in text, text
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()]).full_tensor()
        assert not norm.isfinite(), norm
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.5), torch.amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale(torch.ones(()))  # Makes the scale.
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 1.0, scaler.get_scale()
        optimizer.zero_grad()
        for old, param in zip(before, model.parameters(), strict=True):
            assert torch.equal(param.detach().full_tensor(), old)  # Skipped on every rank.
        model(torch.ones(2, 6)).sum().backward()
        assert nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True).full_tensor().isfinite()


def check_average(mesh_shape):
    model, ranks = sharded(mesh_shape), dist.get_world_size()
    torch.manual_seed(0)
    single = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    inputs = [torch.randn(2, 6, generator=torch.Generator().manual_seed(rank)) for rank in range(ranks)]
    model(inputs[dist.get_rank()]).pow(2).sum().backward()
    for x in inputs:
        (single(x).pow(2).sum() / ranks).backward()
    for param, plain in zip(model.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), plain.grad)


def check_meshes(function, mesh_shapes):
    for mesh_shape in mesh_shapes:
        function(mesh_shape)


class NonfiniteTest(unittest.TestCase):
    def test_all_ranks_decide_alike_about_a_bad_gradient_of_one(self):
        run_ranks(2, check_meshes, check_decisions, MESHES[2])

    def test_gradients_are_averaged_on_one_rank_and_with_one_shard_or_one_replica(self):
        for size, mesh_shapes in MESHES.items():
            run_ranks(size, check_meshes, check_average, mesh_shapes)
