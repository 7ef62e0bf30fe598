"""docs/limits.md: what it calls silent is silent, and what it calls refused raises."""

import copy
import pickle
import unittest
import warnings

import torch
import torch.distributed as dist
from common import error_of, ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from torch_ragged.fsdp import fully_shard

INPUT = torch.ones(3, 4)


def build(*layers):
    torch.manual_seed(0)
    return nn.Sequential(*(layers or (nn.Linear(4, 4), nn.Linear(4, 2))))


def sharded(model):
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def backward(model):
    model(INPUT).sum().backward()
    return model


class Table(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("table", torch.ones(4), persistent=False)


def write_data(module, inputs):
    module.weight.data.add_(1)


def write(module, inputs):
    with torch.no_grad():
        module.weight.add_(1)


def check_hooks():
    model, before, after = build(), [], []
    for register in (model[0].weight.register_hook, model[0].weight.register_post_accumulate_grad_hook):
        register(before.append)
    sharded(model)
    model[0].weight.register_hook(after.append)
    backward(model)
    assert not before and len(after) == 1


def check_values():
    model = sharded(build())
    weight = model[0].weight.full_tensor()
    model[0].weight.data = model[0].weight.data + 1
    hook = model[0].register_forward_pre_hook(write_data)
    backward(model)
    hook.remove()
    assert torch.equal(model[0].weight.full_tensor(), weight)

    state = {name: torch.full_like(value, 7.0) for name, value in build().state_dict().items() if name != "1.bias"}
    assert "1.bias" in error_of(model.load_state_dict, state)
    assert (model[0].weight.full_tensor() == 7).all()

    with torch.device("meta"):
        table = fully_shard(Table())
    table.to_empty(device="cpu")
    table.table.fill_(3.0)  # Whatever is there.
    table.load_state_dict(Table().state_dict())
    assert (table.table == 3).all()


def check_ranks_differ():
    rank = dist.get_rank()
    torch.manual_seed(rank)
    whole = fully_shard(nn.Linear(8, 16, bias=False)).weight.full_tensor()
    torch.manual_seed(rank)
    assert torch.equal(whole.chunk(2)[rank], nn.Linear(8, 16, bias=False).weight.chunk(2)[rank])

    norm = fully_shard(nn.BatchNorm1d(4))
    norm(INPUT + rank)
    means = [None] * dist.get_world_size()
    dist.all_gather_object(means, norm.running_mean.tolist())
    assert means[0] != means[1]


def check_refused():
    model = sharded(build())
    assert "deepcopy" in error_of(copy.deepcopy, model)
    assert "PicklingError" in error_of(pickle.dumps, model)
    assert "setup_context" in error_of(torch.func.grad(lambda batch: model(batch).sum()), INPUT)
    assert "BatchedTensorImpl" in error_of(torch.func.vmap(sharded(build())), INPUT)
    model = sharded(build())
    loss = model(INPUT).sum()
    assert "got sharded parameters" in error_of(torch.autograd.grad, loss, list(model.parameters()))
    model = sharded(build())
    assert "cannot move to meta" in error_of(model.to, "meta")
    assert "full_tensor().item()" in error_of(float, model[0].weight.detach().norm())
    model[0].register_forward_pre_hook(write)
    assert "changed while unsharded" in error_of(backward, model)

    sparse = fully_shard(nn.Embedding(10, 4, sparse=True))
    assert "RuntimeError" in error_of(sparse(torch.tensor([1])).sum().backward)
    tied = build(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    assert "is tied to" in error_of(sharded, tied)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    uneven = parallelize_module(nn.Linear(4, 3), mesh["tp"], ColwiseParallel())
    assert "is cut unevenly" in error_of(fully_shard, uneven, mesh=mesh["dp"])


class LimitsTest(unittest.TestCase):
    @ranks(2)
    def test_what_is_silent_gives_no_warning():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check_hooks()
            check_values()
            check_ranks_differ()

    @ranks(2)
    def test_what_is_refused_raises():
        check_refused()
