"""Parameters that are DTensors on a whole mesh (``dp_mesh_dims``): every way to compute with them gives FSDP2's gradient."""

import unittest

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from common import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from torch_ragged.fsdp import fully_shard


def local(w, **how):
    return w.to_local(**how) if isinstance(w, DTensor) else w


def full(w):
    return w.full_tensor() if isinstance(w, DTensor) else w


def like(x, w):
    """The input as the whole batch, if the weight is a DTensor."""
    if not isinstance(w, DTensor):
        return x
    placements = [Shard(0) if name == "dp" else Replicate() for name in w.device_mesh.mesh_dim_names]
    return DTensor.from_local(x, w.device_mesh, placements, run_check=False)


def partial(w):
    placements = [Partial() if name == "dp" else Replicate() for name in w.device_mesh.mesh_dim_names]
    return w.to_local(grad_placements=placements)


# Each gives the same gradient on one process.
WAYS = {
    "as a DTensor": lambda x, w: local(like(x, w) @ w),
    "to_local()": lambda x, w: x @ local(w),
    "to_local(grad_placements=)": lambda x, w: x @ (partial(w) if isinstance(w, DTensor) else w),
    "full_tensor()": lambda x, w: x @ full(w),
    "a view of it": lambda x, w: x @ local(w.view(2, 2, 4)).view(4, 4),
    "its transpose": lambda x, w: x @ local(w.t()).t(),
    "to_local() twice": lambda x, w: (x @ local(w)).sin() @ local(w),
    "as a DTensor twice": lambda x, w: local((like(x, w) @ w).sin() @ w),
    "a DTensor and its view": lambda x, w: local((like(x, w) @ w).sin() @ w.view(16).view(4, 4)),
}
# These add contributions that DTensor takes for sums to others that it does not: FSDP2's result is not that of one process.
MIXED = {
    "to_local() and as a DTensor": lambda x, w: local(like(x, w) @ w) + x.sin() @ local(w),
    "full_tensor() and as a DTensor": lambda x, w: local(like(x, w) @ w) + x.sin() @ full(w),
}


class Product(nn.Module):
    def __init__(self, way, mesh=None):
        super().__init__()
        weight, self.way = torch.randn(4, 4, generator=torch.Generator().manual_seed(1)), way
        if mesh is not None:
            weight = distribute_tensor(weight, mesh, [Replicate()] * mesh.ndim)
        self.weight = nn.Parameter(weight)

    def forward(self, x):
        return self.way(x, self.weight)


def gradients(way, mesh, batch, index):
    """Of one process on all the data, of FSDP2 and of this package on each rank's part."""
    from torch.distributed.fsdp import DataParallelMeshDims

    one = Product(way)
    (sum(one(part).sin().mean() for part in batch) / len(batch)).backward()
    found = [one.weight.grad]
    for shard in (torch_fully_shard, fully_shard):
        model = shard(Product(way, mesh), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
        model(batch[index]).sin().mean().backward()
        found.append(model.weight.grad.full_tensor())
    return found


def check_ways(data, tensor):
    mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("dp", "tp"))
    batch = torch.randn(data, 2, 4, generator=torch.Generator().manual_seed(3))
    for name, way in {**WAYS, **MIXED}.items():
        one, theirs, ours = gradients(way, mesh, batch, mesh.get_local_rank("dp"))
        torch.testing.assert_close(ours, theirs, msg=name)
        if name in WAYS:
            torch.testing.assert_close(ours, one, msg=name)
    assert dist.get_world_size() == data * tensor


@unittest.skipUnless(hasattr(torch.distributed.fsdp, "DataParallelMeshDims"), "dp_mesh_dims is newer than this torch")
class WholeMeshTest(unittest.TestCase):
    def test_every_way_to_use_a_parameter_gives_the_gradient_of_fsdp2(self):
        run_ranks(2, check_ways, 2, 1)

    def test_every_way_to_use_a_parameter_beside_tensor_parallelism(self):
        run_ranks(4, check_ways, 2, 2)
