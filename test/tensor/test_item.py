"""A number that a script reads from ragged DTensors is that of one device, or an error on the rank that reads it."""

import math
import unittest

import torch
import torch.distributed as dist
from common import error_of, ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from torch_ragged import RaggedShard, StridedRaggedShard
from torch_ragged.fsdp import fully_shard

READS = {
    "item": lambda t: t.item(),
    "float": float,
    "int": int,
    "bool": bool,
    "complex": complex,
    "is_nonzero": torch.is_nonzero,
    "tolist": lambda t: t.tolist(),
    "format": lambda t: f"{t:.3f}",
    "numpy": lambda t: t.numpy(),
    "sqrt": math.sqrt,
    "tensor": lambda t: torch.tensor([t]).tolist(),
    "on a CPU": lambda t: t.cpu().double().item(),
    "two of them": lambda t: (t + t).item(),
    "in a list": lambda t: [each.item() for each in torch.stack([t, t])],
}
NUMBERS = {
    "sum": lambda x: x.sum(),
    "norm": lambda x: x.norm(),
    "norm 0": lambda x: torch.linalg.vector_norm(x, 0),
    "foreach norm": lambda x: torch._foreach_norm([x, x])[1],
    "mean": lambda x: x.mean(),
    "max": lambda x: x.max(),
    "product": lambda x: (x * x).sum(),
    "count": torch.count_nonzero,
    "loss": lambda x: nn.functional.mse_loss(x, x * 2),
    "sum of a row": lambda x: x[1].sum(),
    "element of a sum": lambda x: x.sum(0)[1],
    "softmax": lambda x: x.softmax(-1).sum(),
    "norm + 1": lambda x: x.norm() + 1,
    "var": lambda x: x.var(),
}


def same(a, b):
    return a == b or abs(complex(a) - complex(b)) <= 1e-5 * abs(complex(b)) if not isinstance(a, list) else all(map(same, a, b))


def compare_reads(tensor, full):
    """Each way to read each number of ``tensor``: the value of ``full``, or an error that each rank raises alone."""
    refused = 0
    for name, number in NUMBERS.items():
        with torch.no_grad():
            try:
                found, expected = number(tensor), number(full)
            except NotImplementedError:
                continue
            assert same(found.full_tensor().item(), expected.item()), name
            for way, read in READS.items():
                try:
                    value = read(found)
                except (RuntimeError, TypeError) as error:
                    refused += ".full_tensor().item() on all ranks" in str(error)
                else:
                    assert same(value, read(expected)), (name, way, value, read(expected))
    assert refused > 3 * len(READS), refused  # Pending numbers were read.


class ItemTest(unittest.TestCase):
    @ranks(4)
    def test_each_read_of_a_number_is_the_value_of_one_device_or_an_error():
        full = torch.arange(24.0).view(4, 6) - 3
        line, plane = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
        compare_reads(distribute_tensor(full, line, [RaggedShard((0,), (2, 0, 1, 1))]), full)
        compare_reads(distribute_tensor(full, plane, [Replicate(), RaggedShard((0, 1), (5, 19))]), full)
        compare_reads(distribute_tensor(full, plane, [StridedRaggedShard((0,), (1, 1), split_factor=2), Shard(0)]), full)

    @ranks(2)
    def test_parameters_and_gradients_of_fully_shard_are_read_so():
        torch.manual_seed(0)
        model, whole = nn.Linear(6, 4), nn.Linear(6, 4)
        whole.load_state_dict(model.state_dict())
        fully_shard(model)
        for each in (model, whole):
            each(torch.ones(2, 6)).sum().backward()
        compare_reads(model.weight, whole.weight)
        compare_reads(model.weight.grad, whole.weight.grad)

    @ranks(2)
    def test_one_rank_alone_gets_an_error_instead_of_waiting():
        model = nn.Linear(6, 4)
        fully_shard(model)
        if dist.get_rank() == 0:
            assert "Call .full_tensor().item() on all ranks" in error_of(lambda: float(model.weight.norm()))
        dist.barrier()
        assert model.weight.norm().full_tensor().item() > 0

    @ranks(2)
    def test_sums_of_plain_dtensors_are_read_as_torch_does():
        world, pair = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2,), mesh_dim_names=("pair",))
        distribute_tensor(torch.ones(4), world, [RaggedShard((0,), (1, 3))]).sum()
        plain = DTensor.from_local(torch.tensor(dist.get_rank() + 1.0), pair, [Partial()])
        assert plain.item() == dist.get_rank() + 1.0
        assert distribute_tensor(torch.ones(4), pair, [Shard(0)]).sum().item() == 2.0

    @ranks(1)
    def test_the_only_rank_has_the_number():
        tensor = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (1,)), [RaggedShard((0,), (1,))])
        assert tensor.sum().item() == 6.0 and float(tensor.norm()) == tensor.norm().full_tensor()
        assert isinstance(tensor.sum().placements[0], Partial)


if __name__ == "__main__":
    unittest.main()
