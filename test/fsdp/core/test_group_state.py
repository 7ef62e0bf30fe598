"""The states that a group goes through in a step."""

import unittest

import torch
import torch.distributed as dist
from common import fake_group, run_ranks
from torch import nn

from torch_ragged.fsdp import fully_shard
from torch_ragged.fsdp.core._fsdp_param import ReadGuard


def states_in_a_step():
    """The states of the first of two layers, seen by hooks around it."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2)))
    for module in (*model, model):
        fully_shard(module)
    group = model[0]._ragged_groups(False)[0]
    seen = []

    def see(when):
        seen.append((when, group._sharded_state.name, group.reduction.state.name))

    x = torch.ones(2, 8, requires_grad=True)
    x.register_hook(lambda gradient: see("gradient of the input"))
    see("start")
    model[0].unshard(async_op=True)
    see("unshard(async_op=True)")
    inside = model[0].register_forward_hook(lambda module, args, output: see("forward"), prepend=True)
    loss = model(x).sum()
    inside.remove()
    see("after forward")
    model.set_requires_gradient_sync(False)
    loss.backward()
    see("backward without gradient sync")
    model.set_requires_gradient_sync(True)
    model.set_manual_backward_finalization(True)
    model(x).sum().backward()
    see("backward with gradient sync")
    group.reduction.wait()
    see("its reduce-scatter waited for")
    model.finalize_backward()
    see("finalize_backward")
    assert model[0].weight.grad is not None and dist.get_world_size() == 2
    return seen


class FailedWork:
    def wait(self):
        raise KeyError


class GroupStateTest(unittest.TestCase):
    def test_after_an_all_gather_that_failed_a_group_is_sharded_and_can_gather_again(self):
        with fake_group(2):
            model = fully_shard(nn.Linear(8, 8))
            (group,) = model._ragged_groups(False)
            for call in (group.reshard, lambda: model(torch.ones(2, 8))):
                model.unshard(async_op=True)
                group._all_gather.wait()
                group._all_gather = FailedWork()
                self.assertRaises(KeyError, call)
                self.assertEqual((group._sharded_state.name, group._all_gather), ("SHARDED", None))
                self.assertFalse(group.encoding.buffer.is_allocated)
            model.unshard()
            self.assertEqual(group._sharded_state.name, "UNSHARDED")

    def test_reads_are_refused_while_parameters_are_resharded(self):
        with fake_group(1):
            (group,) = fully_shard(nn.Linear(8, 8))._ragged_groups(False)
        guard = ReadGuard(group.params)
        versions = [param.unsharded._version for param in group.params]
        self.assertFalse(guard.refuses(guard.version) or guard.refuses_view(0))
        guard.refuse_reads()
        self.assertTrue(guard.refuses(guard.version) and guard.refuses_view(0))
        self.assertFalse(guard.refuses(guard.version + 1))
        guard.allow_reads()
        self.assertFalse(guard.refuses(guard.version) or guard.refuses_view(0))
        self.assertEqual([param.unsharded._version for param in group.params], versions)

    def test_states_in_a_step(self):
        for seen in run_ranks(2, states_in_a_step):
            self.assertEqual(
                seen,
                [
                    ("start", "SHARDED", "EMPTY"),
                    ("unshard(async_op=True)", "GATHERING", "EMPTY"),
                    ("forward", "UNSHARDED", "EMPTY"),
                    ("after forward", "SHARDED", "EMPTY"),
                    ("gradient of the input", "SHARDED", "ACCUMULATING"),
                    ("backward without gradient sync", "SHARDED", "ACCUMULATING"),
                    ("gradient of the input", "SHARDED", "REDUCING"),
                    ("backward with gradient sync", "SHARDED", "REDUCING"),
                    ("its reduce-scatter waited for", "SHARDED", "REDUCED"),
                    ("finalize_backward", "SHARDED", "EMPTY"),
                ],
            )
