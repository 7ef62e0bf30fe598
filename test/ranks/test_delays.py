"""Delays that tests put before collectives: each way to issue one, and to wait for one, is delayed."""

import os
import random
import time
import unittest
from unittest import mock

import torch
import torch.distributed as dist
from common import ranks
from delays import delays
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from torch_ragged import RaggedShard
from torch_ragged.fsdp import fully_shard


def delayed(call):
    """The result of ``call``, and the names of the calls that are delayed in it."""
    with delays(0, longest=0) as found:
        return call(), found


@unittest.skipIf(os.environ.get("TORCH_RAGGED_TEST_DELAYS"), "each call is delayed already")
class DelaysTest(unittest.TestCase):
    @ranks(2)
    def test_each_collective_and_each_wait_is_delayed():
        group, rank = dist.group.WORLD, dist.get_rank()
        one, two = torch.ones(1), torch.ones(2)
        cases = {
            "allreduce": lambda: dist.all_reduce(one.clone()),
            "broadcast": lambda: dist.broadcast(one.clone(), 0),
            "reduce": lambda: dist.reduce(one.clone(), 0),
            "gather": lambda: dist.gather(one, [one.clone(), one.clone()] if rank == 0 else None),
            "scatter": lambda: dist.scatter(one.clone(), [one, one] if rank == 0 else None),
            "allgather": lambda: dist.all_gather([one.clone(), one.clone()], one),
            "barrier": dist.barrier,
            "send" if rank else "recv": lambda: dist.send(one, 0) if rank else dist.recv(one.clone(), 1),
        }
        for name, call in cases.items():
            assert name in delayed(call)[1], name
        # Names of the methods depend on torch's version.
        for call in (
            lambda: dist.all_gather_into_tensor(two.clone(), one),
            lambda: dist.reduce_scatter_tensor(one.clone(), two),
            lambda: dist.all_to_all_single(two.clone(), two),
            lambda: dist.all_gather_object([None, None], rank),
            lambda: group.allreduce([one.clone()]).wait(),
        ):
            assert delayed(call)[1]
        message = dist.P2POp(dist.isend if rank else dist.irecv, one.clone(), 1 - rank)
        assert delayed(lambda: [work.wait() for work in dist.batch_isend_irecv([message])])[1] == [
            "send" if rank else "recv",
            "wait",
        ]
        works = [dist.all_reduce(one.clone(), async_op=True) for _ in range(3)]
        assert delayed(lambda: [work.wait() for work in works])[1] == ["wait"] * 3

    @ranks(2)
    def test_functional_collectives_are_delayed():
        summed, found = delayed(lambda: functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD).wait())
        assert summed.item() == 2
        assert any("all_reduce" in name for name in found) and any("wait_tensor" in name for name in found), found

    @ranks(2)
    def test_dtensors_and_sharded_modules_are_delayed():
        mesh = init_device_mesh("cpu", (2,))
        tensor = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        assert delayed(lambda: tensor.full_tensor())[1]
        assert delayed(lambda: tensor.redistribute(placements=[RaggedShard((0,), (1, 3))]))[1]
        assert delayed(lambda: tensor.redistribute(placements=[Replicate()]))[1]
        model = fully_shard(nn.Linear(4, 4), mesh=mesh)
        output, found = delayed(lambda: model(torch.ones(2, 4)))
        assert found and "wait" in found
        assert delayed(lambda: output.sum().backward())[1]

    @ranks(2)
    def test_a_seed_gives_each_rank_its_own_delays_again():
        slept = []
        with mock.patch.object(time, "sleep", slept.append):
            for _ in range(2):
                with delays(3):
                    for _ in range(4):
                        dist.all_reduce(torch.ones(1))
        assert slept[: len(slept) // 2] == slept[len(slept) // 2 :] and len(set(slept)) == len(slept) // 2
        everyone = [None, None]
        dist.all_gather_object(everyone, slept)
        assert everyone[0] != everyone[1]
        numbers = random.Random(f"3 {dist.get_rank()}")
        assert slept[0] == 0.01 * numbers.random() ** 3

    @ranks(2)
    def test_nothing_is_delayed_after_the_context():
        before = dict(vars(dist.ProcessGroup)), dist.Work.wait, torch._ops.OpOverload.__call__
        with delays(0) as found:
            dist.barrier()
        count = len(found)
        dist.barrier()
        assert len(found) == count
        assert before == (dict(vars(dist.ProcessGroup)), dist.Work.wait, torch._ops.OpOverload.__call__)


if __name__ == "__main__":
    unittest.main()
