"""set_reduce_wire: gradients travel in 16 bits and are added in reduce_dtype, in the order of ranks, over every carrier."""

import unittest
from unittest import mock

import torch
import torch.distributed as dist
from common import error_of, ranks
from tested_device import DEVICE
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from torch_ragged.fsdp import HIERARCHICAL, MixedPrecisionPolicy, fully_shard
from torch_ragged.fsdp.comm import _collectives
from torch_ragged.fsdp.comm._collectives import ProcessGroupCollectives
from torch_ragged.fsdp.comm._gloo import sum_parts
from torch_ragged.fsdp.comm._reduction import OPS, Ops

BF16 = torch.bfloat16
AVERAGES = Ops((*OPS.known, dist.ReduceOp.AVG), averages=True)  # Those of NCCL.


class Product(nn.Module):
    """The gradient of its weight is the input."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, 4))

    def forward(self, gradient):
        return (self.weight * gradient).sum()


def gradient_of(rank, step=0):
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def added(parts, divisor):
    """The oracle: rounded once, added in float32, in the order of ranks."""
    total = parts[0].to(BF16).float()
    for part in parts[1:]:
        total = total + part.to(BF16).float()
    return total / divisor


def other_carrier(self, group, device):
    """As if the backend were not gloo, whose sums would be its own."""
    return _collectives._Carrier(False, OPS)


class ReduceWireTest(unittest.TestCase):
    @ranks(4)
    def test_sums_are_of_rounded_gradients_and_are_not_rounded():
        world, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        mine, every = gradient_of(dist.get_rank()), [gradient_of(rank) for rank in range(4)]
        pairs = [added(every[:2], 2), added(every[2:], 2)]
        narrow = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
        cases = [
            ({"mesh": world}, added(every, 4)),
            ({"mesh": world, "weights": [3, 0, 2, 1]}, added(every, 4)),
            ({"mesh": world, "mp_policy": narrow}, added(every, 4)),
            ({"mesh": square}, (pairs[0] + pairs[1]) / 2),  # The all-reduce over replicas is as it was.
        ]
        for carrier in (None, other_carrier):
            for options, expected in cases:
                model = fully_shard(Product(), **options)
                model.set_reduce_wire(BF16)
                loss = model(mine)
                with mock.patch.object(ProcessGroupCollectives, "_carrier", carrier or ProcessGroupCollectives._carrier):
                    loss.backward()
                assert torch.equal(model.weight.grad.full_tensor(), expected), (carrier, options)
        model = fully_shard(Product(), mesh=square, placements=HIERARCHICAL)
        model.set_reduce_wire(BF16)
        model(mine).backward()
        assert torch.allclose(model.weight.grad.full_tensor(), sum(every) / 4, atol=0.05)
        # Sums over passes are sent once, rounded once.
        model = fully_shard(Product(), mesh=world)
        model.set_reduce_wire(BF16)
        for step in (0, 1):
            model.set_requires_gradient_sync(step == 1)
            model(gradient_of(dist.get_rank(), step)).backward()
        sums = [gradient_of(rank) + gradient_of(rank, 1) for rank in range(4)]
        assert torch.equal(model.weight.grad.full_tensor(), added(sums, 4))

    @ranks(2)
    def test_half_the_bytes_are_sent_until_it_is_taken_back():
        model, sent = fully_shard(Product(), mesh=init_device_mesh("cpu", (2,))), []
        exchange = dist.all_to_all_single

        def counted(output, source, *arguments, **options):
            sent.append(source.nbytes)
            return exchange(output, source, *arguments, **options)

        with mock.patch.object(dist, "all_to_all_single", counted):
            for wire in (None, BF16, torch.float16, None):
                model.set_reduce_wire(wire)
                model(gradient_of(dist.get_rank())).backward()
        # Without a wire, NCCL's own reduce-scatter sends the gradients.
        without, half = ([sent[0]], sent[0] // 2) if DEVICE == "cpu" else ([], sent[0])
        assert sent == [*without, half, half, *without], sent
        assert half >= 6 * 4 * 2

    @ranks(2)
    def test_a_custom_reduce_scatter_gets_what_it_gets_without_a_wire():
        model, got = fully_shard(Product(), mesh=init_device_mesh("cpu", (2,))), []

        def custom(output, source, *, op, group, async_op):
            got.append((op, source.dtype))
            output.zero_()

        model.set_custom_reduce_scatter(custom)
        for wire in (None, BF16):
            model.set_reduce_wire(wire)
            loss = model(gradient_of(dist.get_rank()))
            with mock.patch.object(ProcessGroupCollectives, "_carrier", lambda *_: _collectives._Carrier(False, AVERAGES)):
                loss.backward()
        assert got == [(dist.ReduceOp.AVG, torch.float32)] * 2, got

    def test_a_sum_on_an_accelerator_has_few_kernels(self):
        """A shard of 400 MB from 8 ranks."""
        kernels = []

        class Counting(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                if not func.is_view:
                    kernels.append(func)
                return func(*args, **(kwargs or {}))

        received = torch.empty(8, 100_000_000, dtype=BF16, device="meta")
        with Counting():
            sum_parts(received.unbind(), torch.empty(100_000_000, device="meta"), 8.0)
        self.assertLess(len(kernels), 100)

    @ranks(2)
    def test_what_would_not_be_smaller_is_refused():
        mesh = init_device_mesh("cpu", (2,))
        model = fully_shard(Product(), mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=BF16))
        assert "would not make smaller" in error_of(lambda: model.set_reduce_wire(BF16))
        for wrong in (torch.float32, torch.int8, "bf16"):
            assert f"or None, got {wrong!r}" in error_of(lambda: model.set_reduce_wire(wrong))
        model(gradient_of(dist.get_rank())).backward()
        assert model.weight.grad is not None


if __name__ == "__main__":
    unittest.main()
