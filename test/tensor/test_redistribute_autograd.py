"""Redistribution among operators: gradients once and twice, results that are still in flight, types."""

import itertools
import unittest

import torch
import torch.distributed as dist
from common import ranks
from oracle import local_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from torch_ragged import RaggedShard


class RedistributeAutogradTest(unittest.TestCase):
    @ranks(4)
    def test_gradients_are_redistributed_back():
        rank, ranks = dist.get_rank(), dist.get_world_size()
        mesh = init_device_mesh("cpu", (ranks,))
        full, weight = torch.randn(6, 4), torch.randn(6, 4)
        ragged, other = RaggedShard((0,), (1, 2, 0, 3)), RaggedShard((0, 1), (10, 2, 12, 0))
        for source, target in itertools.product(
            (Replicate(), Shard(0), Shard(1), ragged), (Replicate(), Shard(1), ragged, other)
        ):
            leaf = distribute_tensor(full, mesh, [source]).requires_grad_()
            moved = leaf.redistribute(placements=[target])
            (moved * distribute_tensor(weight, mesh, [target])).sum().backward()
            assert leaf.grad.placements == (source,), (source, target, leaf.grad.placements)
            assert torch.equal(leaf.grad.full_tensor(), weight), (source, target)
            if ragged not in (source, target) and target != other:
                continue  # Torch's own redistributions are differentiable once only in 2.11.
            # Twice: the second derivative of x ** 3 is 6 x.
            leaf = distribute_tensor(full, mesh, [source]).requires_grad_()
            (first,) = torch.autograd.grad((leaf.redistribute(placements=[target]) ** 3).sum(), leaf, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), leaf)
            torch.testing.assert_close(second.full_tensor(), 6 * full, msg=f"{source} {target}")
        # Partial: every rank's contribution gets the whole gradient.
        local = torch.randn(6, 4, requires_grad=True)
        partial = DTensor.from_local(local, mesh, [Partial()])
        (partial.redistribute(placements=[ragged]) * distribute_tensor(weight, mesh, [ragged])).sum().backward()
        assert torch.equal(local.grad, weight)
        # from_local and to_local, with the gradient's placement given and not.
        mine = local_of(full, (ranks,), [ragged], (rank,)).clone().requires_grad_()
        tensor = DTensor.from_local(mine, mesh, [ragged], shape=full.shape)
        (tensor.to_local() * 3).sum().backward()
        assert torch.equal(mine.grad, torch.full_like(mine, 3))
        leaf = distribute_tensor(full, mesh, [ragged]).requires_grad_()
        (leaf.full_tensor() * weight).sum().backward()
        assert torch.equal(leaf.grad.full_tensor(), weight) and leaf.grad.shape == full.shape
        leaf = distribute_tensor(full, mesh, [Replicate()]).requires_grad_()
        # Each rank's local gradient is its contribution to a sum: they are reduced onto the owners of the leaf.
        (leaf.redistribute(placements=[ragged]).to_local(grad_placements=[ragged]) * 2).sum().backward()
        assert torch.equal(leaf.grad.full_tensor(), torch.full_like(full, 2))
        leaf = distribute_tensor(full, mesh, [ragged]).requires_grad_()
        (leaf.full_tensor(grad_placements=[Partial()]) * (rank + 1)).sum().backward()
        assert leaf.grad.placements == (ragged,)
        assert torch.equal(leaf.grad.full_tensor(), torch.full_like(full, sum(range(1, ranks + 1))))

    @ranks(4)
    def test_an_async_result_waits_when_it_is_used():
        """A redistribution is in flight until its result is used; code that unpacks the result waits too."""
        mesh = init_device_mesh("cpu", (4,))
        full = torch.randn(8, 4)
        for source, target in (
            ((1, 1, 1, 1), Replicate()),
            ((1, 5, 0, 2), Shard(1)),
            ((1, 5, 0, 2), RaggedShard((), (0, 0, 1, 0))),
        ):
            leaf = distribute_tensor(full, mesh, [RaggedShard((0,), source)]).requires_grad_()
            moved = leaf.redistribute(placements=[target], async_op=True)
            local = moved._local_tensor
            assert type(local) is not torch.Tensor and not local.completed, target
            viewed = moved.detach()._local_tensor
            assert type(viewed) is not torch.Tensor and not local.completed, target
            doubled = moved * 2
            assert torch.equal(doubled.full_tensor(), full * 2), target
            doubled.sum().backward()
            assert torch.equal(leaf.grad.full_tensor(), torch.full_like(full, 2)), target

    @ranks(4)
    def test_forward_and_backward_may_have_other_dtypes():
        mesh = init_device_mesh("cpu", (4,))
        ragged = RaggedShard((0,), (1, 5, 0, 2))
        leaf = distribute_tensor(torch.randn(8, 4), mesh, [ragged]).requires_grad_()
        for target in (Replicate(), Shard(0), Partial()):
            moved = leaf.redistribute(placements=[target], forward_dtype=torch.bfloat16, backward_dtype=torch.float32)
            assert moved.dtype == torch.bfloat16 and moved.to_local().dtype == torch.bfloat16, target
            (gradient,) = torch.autograd.grad(moved.redistribute(placements=[Shard(0)]).float().sum(), leaf)
            assert gradient.dtype == torch.float32 and torch.equal(gradient.full_tensor(), torch.ones(8, 4)), target

    @ranks(4)
    def test_types_that_gloo_does_not_know_travel_bitwise():
        """They travel as others, bit by bit."""
        mesh, ragged = init_device_mesh("cpu", (4,)), RaggedShard((0,), (1, 5, 0, 2))
        skewed = RaggedShard((), (0, 0, 1, 0))
        bits = torch.randint(0, 255, (8, 64), dtype=torch.uint8)
        for dtype in (torch.complex64, torch.complex128, torch.int16, torch.uint16, torch.float8_e4m3fn, torch.bool):
            full = bits.bool() if dtype == torch.bool else bits.view(dtype)
            for other in (Shard(0), Shard(1), Replicate(), skewed):
                start = DTensor.from_local(full, mesh, [Replicate()], run_check=False).redistribute(placements=[ragged])
                there = start.redistribute(placements=[other], async_op=True)
                back = there.redistribute(placements=[ragged], async_op=True).redistribute(placements=[Replicate()])
                assert torch.equal(back.to_local().view(torch.uint8), full.view(torch.uint8)), (dtype, other)
        pending = DTensor.from_local(torch.full((8, 4), 1 + 2j), mesh, [Partial()])
        assert torch.equal(pending.redistribute(placements=[ragged]).full_tensor(), torch.full((8, 4), 4 + 8j))

    @ranks(2)
    def test_a_gradient_that_does_not_exist_is_none_and_sends_nothing():
        class Nothing(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.view_as(x)

            @staticmethod
            def backward(ctx, gradient):
                return None

        mesh = init_device_mesh("cpu", (2,))
        for source, target in (([RaggedShard((0,), (1, 3))], [Replicate()]), ([Replicate()], [RaggedShard((0,), (1, 3))])):
            x = distribute_tensor(torch.randn(8, 4), mesh, source).requires_grad_()
            y = Nothing.apply(x.redistribute(placements=target))
            with CommDebugMode() as mode:
                y.to_local().sum().backward()
            assert x.grad is None and mode.get_total_counts() == 0
