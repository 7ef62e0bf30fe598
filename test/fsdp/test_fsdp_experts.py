"""Experts beside dense layers: groups of one root on another mesh, at another ZeRO level, with other dtypes."""

import unittest

import torch
import torch.distributed as dist
from common import ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from torch_ragged.fsdp import ZERO1, ZERO2, ZERO3, fully_shard

DIM, EXPERTS, MICRO_BATCHES = 6, 4, 2


class Experts(nn.Module):
    """Experts whose tokens come from all ranks of ``mesh``; each rank has some experts. Without a mesh, it has all."""

    def __init__(self, mesh=None):
        super().__init__()
        self.mesh, self.seen = mesh, []
        weight = torch.randn(EXPERTS, DIM, DIM, dtype=torch.float64) / DIM
        self.weight = nn.Parameter(weight if mesh is None else distribute_tensor(weight, mesh, [Shard(0)]))

    def forward(self, tokens, scores):
        """Tokens (n, dim), and the score of each expert for each token, (n, experts)."""
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        self.seen.append(weight.dtype)
        if self.mesh is None:
            return torch.einsum("nd,edo,ne->no", tokens, weight, scores)
        tokens, scores = (self.gathered(each) for each in (tokens, scores))
        mine = scores.chunk(self.mesh.size(), -1)[self.mesh.get_local_rank()]
        part = DTensor.from_local(torch.einsum("nd,edo,ne->no", tokens, weight, mine), self.mesh, [Partial()], run_check=False)
        return part.redistribute(placements=[Shard(0)]).to_local()

    def gathered(self, rows):
        rows = DTensor.from_local(rows, self.mesh, [Shard(0)], run_check=False)
        return rows.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


class Block(nn.Module):
    def __init__(self, mesh=None):
        super().__init__()
        self.dense, self.router = nn.Linear(DIM, DIM), nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = Experts(mesh)

    def forward(self, x):
        x = x + self.dense(x).tanh()
        return x + self.experts(x, self.router(x).softmax(-1)).to(x.dtype)


def make(mesh=None):
    torch.manual_seed(0)
    return nn.Sequential(Block(mesh), Block(mesh)).double()


def shard(model, everyone, mesh, placements=ZERO3, mp_policy=None):
    for block in model:
        policy = mp_policy or MixedPrecisionPolicy()
        experts = fully_shard(block.experts, mesh=mesh["edp"], placements=placements, mp_policy=policy)
        experts.set_gradient_divide_factor(everyone.size())
        fully_shard(block, mesh=everyone)
    return fully_shard(model, mesh=everyone)


def train(model, rank, size, sync, steps=3):
    """A loss per step: the mean over all rows. ``sync(model, last)`` is called before each backward."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.03), []
    for step in range(steps):
        data = torch.randn(MICRO_BATCHES, 8, DIM, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        total = torch.zeros((), dtype=torch.float64)
        for index, rows in enumerate(data):
            sync(model, index == MICRO_BATCHES - 1)
            loss = model(rows.chunk(size)[rank]).pow(2).mean() / MICRO_BATCHES
            loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step(), optimizer.zero_grad()
        if size > 1:
            dist.all_reduce(total)
        losses.append((float(total) / size, float(norm.full_tensor() if isinstance(norm, DTensor) else norm)))
    return losses


def meshes():
    """A mesh of all ranks for dense layers, and (edp, ep) for experts: 2 x 2."""
    return init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))


def whole(model):
    return {name: param.detach().full_tensor() for name, param in model.named_parameters()}


class ExpertsTest(unittest.TestCase):
    @ranks(4)
    def test_experts_on_a_mesh_and_level_of_their_own_train_as_one_process():
        single = make()
        expected = train(single, 0, 1, lambda model, last: None)
        for level, sync in (
            (ZERO3, lambda model, last: None),
            (ZERO3, lambda model, last: model.set_requires_gradient_sync(last)),
            (ZERO2, lambda model, last: None),
            (ZERO1, lambda model, last: model.set_is_last_backward(last)),
        ):
            everyone, mesh = meshes()
            model = shard(make(mesh["ep"]), everyone, mesh, level)
            losses = train(model, dist.get_rank(), 4, sync)
            torch.testing.assert_close(losses, expected, rtol=1e-10, atol=1e-12)
            assert losses[0][1] > 0.5, "nothing was clipped"
            for name, value in whole(model).items():
                torch.testing.assert_close(value, single.get_parameter(name), rtol=1e-10, atol=1e-12, msg=f"{level} {name}")

    @ranks(4)
    def test_experts_compute_and_reduce_in_dtypes_of_their_own():
        """Weights of experts are float32 in forward; gradients of all passes add up in float64, and .grad is float32."""
        everyone, mesh = meshes()
        policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
        model = shard(make(mesh["ep"]), everyone, mesh, ZERO2, policy)
        for block in model:
            block.experts.weight.grad_dtype = torch.float32
        single = make()
        for each, size, rank in ((single, 1, 0), (model, 4, dist.get_rank())):
            rows = torch.randn(8, DIM, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
            for _ in range(2):
                each(rows.chunk(size)[rank]).pow(2).mean().backward()
        for (name, ours), (_, plain) in zip(model.named_parameters(), single.named_parameters(), strict=True):
            assert ours.grad.dtype == (torch.float32 if "experts" in name else torch.float64), (name, ours.grad.dtype)
            assert ours.dtype == torch.float64
            torch.testing.assert_close(ours.grad.full_tensor().double(), plain.grad, rtol=1e-4, atol=1e-6, msg=name)
        assert {dtype for block in model for dtype in block.experts.seen} == {torch.float32}


if __name__ == "__main__":
    unittest.main()
