"""Gradients that share memory, with each other or with what a hook has kept, are each reduced once and change nothing else."""

import unittest
from unittest import mock

import torch
import torch.distributed as dist
from common import as_before, ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from torch_ragged.spmd import Plan, _gradients, parallelize


class Sum(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.p, self.q = (nn.Parameter(torch.full((4, 8), value)) for value in (1.0, 2.0))
        self.kind, self.kept = kind, []

    def forward(self, x):
        p, q = (each.view(-1) if "view" in self.kind else each for each in (self.p, self.q))
        both = p + q
        if "hook" in self.kind:
            both.register_hook(self.kept.append)
        return (x.view(x.shape[0], *both.shape) * both).sum()


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class SharedGradientsTest(unittest.TestCase):
    def tearDown(self):
        as_before()

    @ranks(2)
    def test_each_gradient_is_reduced_once():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        rank, x = dist.get_rank(), torch.arange(64.0).view(2, 4, 8)
        plan = Plan().own_rows("<in:x>", "dp").default(Replicate())
        for bucket in (1, 1 << 20):  # Bytes: each gradient in a bucket of its own, or both in one.
            for kind in ("same", "view", "same hook", "view hook"):
                for mode in ("eager",) if "hook" in kind else ("eager", "static"):
                    model, where = parallelize(Sum(kind), plan, mesh, mode=mode), (bucket, kind, mode)
                    with mock.patch.object(_gradients, "_BUCKET", bucket):
                        for step in (1, 2, 3):
                            model(x[rank : rank + 1]).backward()
                            for param in (model.p, model.q):
                                assert torch.equal(whole(param.grad), step * x.sum(0)), (*where, step)
                            for kept in model.kept:
                                assert torch.equal(whole(kept).view(4, 8), x.sum(0)), (*where, step)
                    with torch.no_grad():
                        model.p.grad.zero_()
                    assert torch.equal(whole(model.q.grad), 3 * x.sum(0)), where


if __name__ == "__main__":
    unittest.main()
