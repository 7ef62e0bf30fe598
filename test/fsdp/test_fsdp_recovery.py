"""After something failed, or was never used: groups are sharded, hold no memory, and can be used again."""

import gc
import unittest
import weakref
from unittest import mock

import torch
import torch.distributed as dist
from common import error_of, run_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from torch_ragged.fsdp import ZERO2, fully_shard


class Conditional(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, both=True):
        x = self.first(x)
        return self.second(x) if both else x


def check_kept_block_after_an_unused_prefetch():
    """An all-gather ahead of a module that never ran is dropped, and keeps nothing alive."""
    model, x = shard_parts(Conditional()), torch.ones(2, 6)
    model(x).sum().backward()
    with torch.no_grad():
        model(x, both=False)
    assert not model.second._ragged_groups(False)[0].is_gathered
    block, group = model.first, weakref.ref(model.second._ragged_groups(False)[0])
    del model
    gc.collect()
    assert group() is None and block is not None


def check_kept_block_after_a_backward_that_raised():
    model, x = shard_parts(Conditional()), torch.ones(2, 6, requires_grad=True)
    model(x).sum().backward()
    handle = x.register_hook(lambda gradient: fail())
    error = error_of(model(x).sum().backward)
    handle.remove()
    block, group = model.first, weakref.ref(model.second._ragged_groups(False)[0])
    del model
    gc.collect()
    assert group() is None and block is not None
    return error


def fail():
    raise RuntimeError("no gradient for you")


def shard_parts(model, **options):
    fully_shard(model.first, **options)
    fully_shard(model.second, **options)
    return fully_shard(model, **options)


class Failing:
    """An all-gather that raises as often as it is told to: when it is issued, or when it is waited for."""

    def __init__(self):
        self.issue, self.wait_fails = 0, 0

    def __call__(self, output, shard, group, async_op):
        if self.issue:
            self.issue -= 1
            raise RuntimeError("not issued")
        work = dist.all_gather_into_tensor(output, shard, group=group, async_op=True)
        if not self.wait_fails:
            return work
        self.wait_fails -= 1
        work.wait()
        return self

    def wait(self):
        raise RuntimeError("lost a peer")


def check_failed_all_gather(placements, persistent):
    """After an all-gather that failed the group is sharded, holds no memory, and gathers the current values."""
    model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(4)])
    for layer in model:
        fully_shard(layer, placements=placements)
    fully_shard(model, placements=placements)
    if persistent:
        model.set_persistent_buffers(places=4)  # As many as there are unreduced gradients.
    x, gather = torch.ones(1, 8), Failing()
    model(x).sum().backward()
    model[2].set_custom_all_gather(gather)
    for how in ("issue", "wait_fails"):
        model.set_requires_gradient_sync(False)
        model(x).sum().backward()  # What is resident stays while gradients accumulate.
        with torch.no_grad():
            for layer in model:
                layer.weight.fill_(1.0)
        setattr(gather, how, 1)
        model[2].reshard()
        assert "RuntimeError" in error_of(model, x)
        model.set_requires_gradient_sync(True)
        model.reset_iter_state()
        for layer in model:
            layer.reshard()
        if placements is None and not persistent:
            (group,) = model[2]._ragged_groups(False)
            assert group.encoding.buffer.resident_nbytes == 0
        with torch.no_grad():
            assert torch.equal(model(x), torch.full((1, 8), 8.0**4))
        for layer in model:
            layer.reshard()
            with torch.no_grad():
                layer.weight.fill_(0.5)


def check_failed_decode():
    """A copy that fails behind the all-gather leaves the group sharded: the next forward gathers again."""
    model = fully_shard(nn.Linear(8, 8, bias=False), shard_placement_fn=lambda param: Shard(1))
    x = torch.ones(1, 8)
    expected = model(x)
    model.reshard()
    with mock.patch.object(torch, "cat", side_effect=torch.OutOfMemoryError("full")):
        assert "OutOfMemoryError" in error_of(model, x)
    assert torch.equal(model(x), expected)


class FailingReduceScatter:
    """A reduce-scatter whose wait raises while ``fails``."""

    fails = False

    def __call__(self, output, buffer, group, op, async_op):
        return Late(self, dist.reduce_scatter_tensor(output, buffer, group=group, op=op, async_op=True))


class Late:
    def __init__(self, collective, work):
        self.collective, self.work = collective, work

    def wait(self):
        self.work.wait()
        if self.collective.fails:
            raise RuntimeError("not reduced")


def check_failed_finalize_backward(dtype, accumulates):
    """The gradients of the step whose last reduce-scatter failed, and of no other one, are lost."""
    policy, reduce_scatter = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32), FailingReduceScatter()
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(dist.get_rank()))

    def step(model):
        if accumulates:
            model.set_requires_gradient_sync(False)
            model(x).sum().backward()
            model.set_requires_gradient_sync(True)
        model(x).sum().backward()
        model.finalize_backward()

    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(shard_parts(Conditional(), mp_policy=policy))
        models[-1].first.set_custom_reduce_scatter(reduce_scatter)
        models[-1].set_manual_backward_finalization(True)
    model, other = models
    reduce_scatter.fails = True
    error = error_of(step, model)
    reduce_scatter.fails = False
    model.zero_grad()
    step(model)
    step(other)
    for mine, wanted in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine.grad.to_local(), wanted.grad.to_local())
    assert not any(group.is_pending for group in model._ragged_groups(True))
    return error


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.linear = nn.Parameter(torch.ones(4, 4)), nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x)


def check_gradient_after_a_backward_that_raised():
    """The first gradient of a pass is kept if no module hook of the pass runs before it."""
    model = fully_shard(Weighted())
    output = model(torch.ones(2, 4))
    loss = (2 * model.weight).sum()
    output.register_hook(lambda gradient: fail())
    error = error_of(output.sum().backward)
    loss.backward()
    assert torch.equal(model.weight.grad.full_tensor(), torch.full((4, 4), 2.0))
    return error


class RecoveryTest(unittest.TestCase):
    def test_finalize_backward_that_failed_leaves_no_gradients_behind(self):
        for dtype in (torch.float32, torch.bfloat16):
            for accumulates in (False, True):
                for error in run_ranks(2, check_failed_finalize_backward, dtype, accumulates):
                    self.assertEqual(error, "RuntimeError: not reduced")

    def test_a_gradient_after_a_backward_that_raised_is_kept(self):
        for error in run_ranks(2, check_gradient_after_a_backward_that_raised):
            self.assertIn("no gradient for you", error)

    def test_what_was_prefetched_or_raised_keeps_no_shards(self):
        run_ranks(2, check_kept_block_after_an_unused_prefetch)
        for error in run_ranks(2, check_kept_block_after_a_backward_that_raised):
            self.assertIn("no gradient for you", error)

    def test_an_all_gather_that_failed_can_be_issued_again(self):
        for placements in (None, ZERO2):
            for persistent in (False, True):
                run_ranks(2, check_failed_all_gather, placements, persistent)
        run_ranks(2, check_failed_decode)
