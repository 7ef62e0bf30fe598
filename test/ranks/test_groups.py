"""Process groups that the package makes: they wait for other ranks as long as the groups that they were made from."""

import datetime
import types
import unittest

import torch
import torch.distributed as dist
from common import error_of, ranks, run_mortal_ranks
from torch import nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from torch_ragged import transfer
from torch_ragged._ranks.groups import backend_of, can_order_groups, group_of, is_nccl, timeout_of
from torch_ragged._register._torch import process_groups
from torch_ragged.fsdp import NeighbourCopies, fully_shard, reshard_to
from torch_ragged.fsdp.comm._reduction import Reduction, ops_of
from torch_ragged.transfer import _watch

_CPU = torch.device("cpu")


def seconds(group):
    return group._get_backend(_CPU).options._timeout.total_seconds()


def set_timeout(group, timeout):
    group.set_timeout(datetime.timedelta(seconds=timeout))


def made_by(call):
    """The result of ``call``, and the process groups that it has made."""
    before = process_groups()
    result = call()
    return result, [group for group in process_groups() if group not in before]


def sharded(mesh, layers=2, **options):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)), nn.BatchNorm1d(8))
    return fully_shard(model, mesh=mesh, **options)


def mesh_of(ranks, timeout):
    """A mesh whose group has a timeout of its own."""
    return DeviceMesh.from_group(dist.new_group(ranks, timeout=datetime.timedelta(seconds=timeout)), "cpu")


def wait_for_copies_of_a_rank_that_makes_none():
    _watch._TRANSFER_PATIENCE = 1.0  # Seconds, for the report of the other rank, which makes none.
    mesh = DeviceMesh("cpu", [0, 1])
    model = sharded(mesh)
    copies = NeighbourCopies(model, None)

    def update():
        copies.update()
        copies.wait()

    return error_of(update) if dist.get_rank() == 0 else ""


class BackendPerDevice:
    """A process group of ``init_process_group()``: gloo for tensors on the CPU, NCCL for those on a GPU."""

    def size(self) -> int:
        return 4

    def _get_backend(self, device: torch.device) -> types.SimpleNamespace:
        return types.SimpleNamespace(name=lambda: {"cpu": "gloo", "cuda": "nccl"}[device.type])


class GroupsTest(unittest.TestCase):
    def test_nccl_divides_also_in_a_group_that_has_gloo_beside_it(self):
        group, gpu, cpu = BackendPerDevice(), torch.device("cuda"), torch.device("cpu")
        self.assertEqual((is_nccl(group, gpu), is_nccl(group, cpu)), (True, False))

        def steps(device, reduction):
            return reduction.steps(group.size(), torch.float32, ops_of(group, device).averages)

        self.assertEqual(steps(gpu, Reduction()), (dist.ReduceOp.AVG, 1, 1))
        self.assertEqual(steps(gpu, Reduction(sum_only=True)), (dist.ReduceOp.SUM, 1, 4))
        self.assertEqual(steps(cpu, Reduction()), (dist.ReduceOp.SUM, 1, 4))

    def test_a_group_without_backends_per_device_is_its_own_backend(self):
        group = dist.ProcessGroup(0, 1)
        self.assertIs(backend_of(group, _CPU), group)
        self.assertEqual(timeout_of(group, _CPU), default_pg_timeout)

    @ranks(4)
    def test_groups_of_fsdp_have_the_timeout_of_the_mesh():
        ranks, rank = [0, 1, 2, 3], dist.get_rank()
        mesh = mesh_of(ranks, 17)
        model, neighbours = made_by(lambda: sharded(mesh, reshard_after_forward=2))
        _, reductions = made_by(lambda: model.set_separate_reduce_scatter_group(True))
        model.set_separate_reduce_scatter_group(False)
        _, copies = made_by(lambda: NeighbourCopies(model, None))
        assert [len(made) for made in (neighbours, reductions, copies)] == [1, 1, 1]
        assert [seconds(*made) for made in (neighbours, reductions, copies)] == [17, 17, 17]
        # A rank that joins makes a group with the lowest rank of the old mesh, for buffers.
        small = sharded(DeviceMesh("cpu", [0, 1]))
        set_timeout(mesh.get_group(), 19)
        _, joined = made_by(lambda: reshard_to(small, None, mesh, group=mesh.get_group()))
        assert rank == 1 or 19 in [seconds(group) for group in joined]

    @ranks(2)
    def test_groups_of_plans_have_the_timeout_that_the_default_group_has_now():
        set_timeout(dist.group.WORLD, 23)
        mesh = DeviceMesh("cpu", [0, 1])
        source, target = ({"w": distribute_tensor(torch.ones(4), mesh, [each])} for each in (Shard(0), Replicate()))
        (_, made) = made_by(lambda: transfer.plan(source, target))
        assert [seconds(group) for group in made] == [23]
        # Each rank keeps to its own timeout.
        set_timeout(dist.group.WORLD, 29 + dist.get_rank())
        transfer.plan(source, target)
        assert [seconds(group) for group in made] == [29 + dist.get_rank()]

    @unittest.skipUnless(can_order_groups, "needs torch 2.12")
    @ranks(2)
    def test_a_group_keeps_the_order_of_its_ranks():
        group = group_of([1, 0])
        assert dist.get_process_group_ranks(group) == [1, 0] and group.rank() == 1 - dist.get_rank()

    @ranks(2)
    def test_groups_of_one_purpose_and_several_parents_are_several():
        first, second = (dist.new_group([0, 1], timeout=datetime.timedelta(seconds=each)) for each in (11, 13))
        assert group_of([0, 1]) is dist.group.WORLD
        assert group_of([0, 1], parent=first) is first
        one, other = group_of([0, 1], "test", first), group_of([0, 1], "test", second)
        assert one is not other and one is group_of([0, 1], "test", first)
        assert (seconds(one), seconds(other), seconds(group_of([0, 1], "test"))) == (11, 13, 60)
        set_timeout(first, 7)
        assert seconds(group_of([0, 1], "test", first)) == 7
        # Ranks with different timeouts still find each other.
        set_timeout(first, 31 + dist.get_rank())
        late = group_of([0, 1], "later", first)
        dist.barrier(group=late)
        assert seconds(late) == 31 + dist.get_rank()

    def test_copies_wait_as_long_as_the_group_of_the_model(self):
        answers = run_mortal_ranks(2, set(), wait_for_copies_of_a_rank_that_makes_none, seconds=3)
        self.assertRegex(answers[0], "TransferError: .*rank 1 lives and has not answered")
