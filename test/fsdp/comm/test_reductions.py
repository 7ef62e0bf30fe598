"""A new reduction is a subclass of Reduction: every carrier computes it, or says that it cannot. No carrier knows of it."""

import dataclasses
import unittest
from unittest import mock

import torch
import torch.distributed as dist
from common import error_of, ranks
from delays import delays
from fsdp_collectives import WrappedCollectives
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from torch_ragged.fsdp import HIERARCHICAL, fully_shard
from torch_ragged.fsdp.comm._collectives import ProcessGroupCollectives, UnequalCollectives
from torch_ragged.fsdp.comm._reduction import Reduction, Steps, ops_of
from torch_ragged.fsdp.comm.experimental._copy_engine import CopyEngineCollectives
from torch_ragged.fsdp.comm.experimental._peer_memory import HostPeerMemory


class Largest(Reduction):
    """The largest value of all ranks."""

    def steps(self, size, dtype, averages):
        return Steps(dist.ReduceOp.MAX)


@dataclasses.dataclass(frozen=True)
class Premultiplied(Reduction):
    """The sum of the ranks' values, each multiplied first: by the op of NCCL, or by this rank."""

    factor: float = 1.0

    def steps(self, size, dtype, averages):
        if averages and self.factor != 1:
            return Steps(dist._make_nccl_premul_sum(self.factor))
        return Steps(dist.ReduceOp.SUM, before=1 / self.factor)

    def rest(self):
        return dataclasses.replace(self, factor=1.0)


class Factor(Reduction):
    """The op of NCCL, for all carriers."""

    def steps(self, size, dtype, averages):
        return Steps(dist._make_nccl_premul_sum(0.5))


def carriers():
    """By name, on 4 ranks: each carrier, and the sizes of the ranks' parts."""
    world = dist.group.WORLD
    groups = ProcessGroupCollectives(world)
    memories = HostPeerMemory(world, 2**12), HostPeerMemory(world, 2**12)
    return {
        "process group": (groups, [2] * 4),
        "wrapped": (WrappedCollectives(groups), [2] * 4),
        "weights": (UnequalCollectives(world, None, [1, 2, 4, 1]), [1, 2, 4, 1]),
        "copy engine": (CopyEngineCollectives(groups, world, *memories), [2] * 4),
    }


def of_rank(rank):
    """Eight whole numbers. The largest of all ranks comes from another rank at each position."""
    return torch.arange(8.0).roll(3 * rank) * (-1) ** rank


class ReductionsTest(unittest.TestCase):
    def test_gradients_are_divided_by_the_carrier_or_before_and_after_the_sum(self):
        total, average = dist.ReduceOp.SUM, dist.ReduceOp.AVG
        for reduction, size, dtype, averages, steps in (
            (Reduction(), 2, torch.float32, True, (average, 1, 1)),
            (Reduction(2.0), 2, torch.bfloat16, True, (average, 1, 1)),
            (Reduction(3.0), 2, torch.float32, True, (total, 1, 3)),
            (Reduction(sum_only=True), 2, torch.float32, True, (total, 1, 2)),
            (Reduction(), 2, torch.float32, False, (total, 1, 2)),
            (Reduction(), 1, torch.float32, True, (total, 1, 1)),
            (Reduction(), 2, torch.float16, True, (total, 2, 1)),  # Half of it before the sum, against overflow.
            (Reduction(), 8, torch.float16, True, (total, 4, 2)),
            (Reduction(), 64, torch.float16, False, (total, 8, 8)),
            (Reduction(), 6, torch.float16, False, (total, 4, 1.5)),
            (Reduction(3.0), 2, torch.float16, False, (total, 2, 1.5)),
            (Reduction(8.0), 1, torch.float16, False, (total, 1, 8)),
        ):
            with self.subTest(reduction=reduction, size=size, dtype=dtype, averages=averages):
                self.assertEqual(reduction.steps(size, dtype, averages), steps)

    def test_nccl_computes_an_op_with_a_factor(self):
        group = mock.Mock(spec=dist.ProcessGroup)
        group._get_backend.return_value.name.return_value = "nccl"
        op, divisor = Factor().begin(torch.empty(2), torch.ones(4), 2, ops_of(group, torch.device("cuda")))
        self.assertEqual((op == dist.ReduceOp.PREMUL_SUM, divisor), (True, 1))

    @ranks(4)
    def test_carriers_compute_a_new_reduction_or_refuse_it():
        rank = dist.get_rank()
        values = torch.stack([of_rank(each) for each in range(4)])
        wanted = {Largest(): values.amax(0), Premultiplied(factor=0.25): values.sum(0) / 4}
        for name, (carrier, sizes) in carriers().items():
            for reduction, want in wanted.items():
                output, buffer = torch.full((sizes[rank],), 99.0), of_rank(rank)
                if name == "copy engine" and isinstance(reduction, Largest):
                    with delays(0, longest=0) as issued:
                        error = error_of(carrier.reduce_scatter, output, buffer, reduction)
                    assert error == (
                        "ValueError: these collectives compute SUM over ranks, but Largest(divisor=None, sum_only=False) needs "
                        "MAX: choose other collectives with set_collectives(), or another reduction"
                    ), error
                    assert not issued and torch.equal(buffer, of_rank(rank)) and output.unique().tolist() == [99.0]
                    continue
                carrier.reduce_scatter(output, buffer, reduction).wait()
                assert torch.equal(output, want.split(sizes)[rank]), (name, reduction, output)
                tensor = of_rank(rank)
                carrier.all_reduce(tensor, reduction, dist.group.WORLD).wait()
                want = want * 4 if isinstance(reduction, Premultiplied) else want  # Of the factor, nothing is left.
                assert torch.equal(tensor, want), (name, reduction, tensor)

    @ranks(2)
    def test_an_op_of_another_backend_is_an_error_before_anything_is_sent():
        carrier, buffer = ProcessGroupCollectives(dist.group.WORLD), torch.ones(4)
        replicated, known = (
            ProcessGroupCollectives(None, dist.group.WORLD),
            "ValueError: these collectives compute SUM, PRODUCT, MIN",
        )
        with delays(0, longest=0) as issued:
            for collectives in (carrier, replicated):
                assert error_of(collectives.reduce_scatter, torch.empty(2), buffer, Factor()).startswith(known)
            assert error_of(replicated.all_reduce, buffer, Factor()).startswith(known)
        assert not issued and torch.equal(buffer, torch.ones(4))

    @ranks(1)
    def test_one_rank_applies_what_is_divided():
        carrier, output = ProcessGroupCollectives(dist.group.WORLD), torch.empty(4)
        for reduction, factor in ((Largest(), 1), (Premultiplied(factor=0.5), 0.5), (Reduction(4.0), 0.25)):
            carrier.reduce_scatter(output, torch.arange(4.0), reduction).wait()
            assert torch.equal(output, torch.arange(4.0) * factor), reduction

    @ranks(4)
    def test_a_model_trains_with_a_new_reduction():
        flat, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("across", "within"))
        placements = {"mesh": square, "placements": HIERARCHICAL}
        for options in ({"mesh": flat}, {"mesh": square}, {"mesh": flat, "weights": [1, 2, 4, 1]}, placements):
            model = fully_shard(nn.Linear(8, 4, bias=False), **options)
            for group in model._ragged_fsdp_state.groups:
                group.settings.reduction = Largest()
            model(of_rank(dist.get_rank())).sum().backward()
            want = torch.stack([of_rank(each) for each in range(4)]).amax(0)
            assert torch.equal(model.weight.grad.full_tensor(), want.expand(4, 8)), options


if __name__ == "__main__":
    unittest.main()
