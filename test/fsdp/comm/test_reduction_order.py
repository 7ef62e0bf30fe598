"""Several reductions in flight: ranks wait for them in different orders, and issue collectives in one."""

import importlib
import inspect
import itertools
import pkgutil
import unittest

import pytest
import torch
import torch.distributed as dist
from common import ranks
from delays import delays
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from torch_ragged.fsdp import HIERARCHICAL, ZERO1, ZERO2, comm, fully_shard
from torch_ragged.fsdp.comm._collectives import ProcessGroupCollectives, UnequalCollectives
from torch_ragged.fsdp.comm._reduction import Reduction
from torch_ragged.fsdp.comm.experimental._copy_engine import CopyEngineCollectives
from torch_ragged.fsdp.comm.experimental._multicast import MulticastCollectives
from torch_ragged.fsdp.comm.experimental._peer_memory import HostPeerMemory
from torch_ragged.fsdp.core._grad_reduction import GradReduction

WAITS = {"wait", "synchronize"}


class Unit(nn.Module):
    """Two layers, of which a call uses one: a backward of two calls reduces after the first, and has a gradient later."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x, layer):
        return self.layers[layer](x)


class Units(nn.Module):
    def __init__(self):
        super().__init__()
        self.units = nn.ModuleList(Unit() for _ in range(3))

    def forward(self, x, order, left_out, layer):
        outputs = {at: self.units[at](x * (at + 1), layer) for at in order}
        return sum(outputs[at] for at in sorted(outputs) if at != left_out)


def loss_of(model, rank, left_out):
    """Two forwards, in two orders. Ranks 2 and 3 leave one unit out of the loss. Gradients of weights are whole numbers."""
    x = (torch.arange(16.0).view(2, 8) * (rank + 1)).requires_grad_()  # Or backward would reduce at its end only.
    left_out = left_out if rank >= 2 else None
    return model(x, (0, 1, 2), left_out, 0).sum() + model(2 * x, (2, 1, 0), left_out, 1).sum()


def world():
    return init_device_mesh("cpu", (4,))


def square():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("across", "within"))


def sharded(**options):
    model = Units()
    for unit in model.units:
        fully_shard(unit, **options)
    fully_shard(model, **options)
    model.set_reduce_scatter_max_input_buffers(2)
    return model


def in_one_process(left_out):
    model = Units()
    (sum(loss_of(model, rank, left_out) for rank in range(4)) / 4).backward()
    return [param.grad for param in model.parameters()]


def check_seeds(seeds):
    flat, nodes = world(), square()
    want = [in_one_process(left_out) for left_out in range(3)]
    models = {
        "hierarchical": sharded(mesh=nodes, placements=HIERARCHICAL),
        "HSDP": sharded(mesh=nodes),
        "ZeRO-2": sharded(mesh=flat, placements=ZERO2),
        "weights": sharded(mesh=flat, weights=[1, 2, 3, 2]),
    }
    for seed, (name, model), left_out in itertools.product(seeds, models.items(), range(3)):
        with delays(seed):
            loss_of(model, dist.get_rank(), left_out).backward()
        for (fqn, param), gradient in zip(model.named_parameters(), want[left_out], strict=True):
            assert torch.equal(param.grad.full_tensor(), gradient), (name, seed, left_out, fqn)
        model.zero_grad()


def carriers():
    """By class: how each carrier of a group's collectives is made on 4 ranks."""
    world = dist.group.WORLD
    groups = ProcessGroupCollectives(world)
    return {
        ProcessGroupCollectives: groups,
        UnequalCollectives: UnequalCollectives(world, None, [1, 1, 1, 1]),
        CopyEngineCollectives: CopyEngineCollectives(groups, world, HostPeerMemory(world, 2**20), HostPeerMemory(world, 2**20)),
    }


class ReductionOrderTest(unittest.TestCase):
    def test_every_carrier_is_among_those_that_are_tried(self):
        found = set()
        for info in pkgutil.walk_packages(comm.__path__, f"{comm.__name__}."):
            for _, kind in inspect.getmembers(importlib.import_module(info.name), inspect.isclass):
                if hasattr(kind, "reduce_scatter_traits") and kind.__module__ == info.name:
                    found.add(kind.__name__)
        tried = {"ProcessGroupCollectives", "UnequalCollectives", "CopyEngineCollectives"}
        # The protocol; two that wrap others; and one that needs a GPU, and waits for events of streams.
        others = {"Collectives", "NamedCollectives", "WrappedCollectives", MulticastCollectives.__name__}
        self.assertEqual(found - tried, others)

    @ranks(4)
    def test_no_wait_of_any_carrier_issues_a_collective():
        for kind, carrier in carriers().items():
            for numel in (4, 2**19):  # Small parts and large ones, which gloo sends in another way.
                shard, buffer = torch.ones(numel), torch.ones(4 * numel)
                with delays(0, longest=0) as found:
                    works = [
                        carrier.all_gather(torch.empty(4 * numel), shard),
                        carrier.reduce_scatter(torch.empty(numel), buffer.clone(), Reduction()),
                        carrier.reduce_scatter(torch.empty(numel), buffer.clone(), Reduction(divisor=3.0)),
                        carrier.all_reduce_max(shard.clone()),
                        carrier.all_reduce(shard.clone(), Reduction(divisor=1.0), dist.group.WORLD),
                    ]
                    issued = len(found)
                    for work in works:
                        work.wait()
                assert set(found[issued:]) <= WAITS, (kind, found[issued:])

    @ranks(4)
    def test_no_wait_of_a_reduction_issues_a_collective():
        flat, nodes = world(), square()
        bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        waits, wait = [], GradReduction.wait
        for options in (
            {"mesh": flat},
            {"mesh": flat, "mp_policy": bf16},
            {"mesh": flat, "placements": ZERO1},
            {"mesh": flat, "reshard_after_forward": 2},
            {"mesh": flat, "weights": [1, 2, 3, 2]},
            {"mesh": nodes},
            {"mesh": nodes, "placements": HIERARCHICAL},
            {"mesh": nodes, "placements": HIERARCHICAL, "mp_policy": bf16},
        ):
            model = sharded(**options)
            with delays(0, longest=0) as found:

                def noted(self, found=found):
                    before = len(found)
                    wait(self)
                    waits.extend(found[before:])

                GradReduction.wait = noted
                try:
                    loss_of(model, dist.get_rank(), 1).backward()
                finally:
                    GradReduction.wait = wait
            assert waits and set(waits) <= WAITS, (options, waits)

    @ranks(4)
    def test_ranks_that_wait_in_different_orders_get_the_gradients_of_one_process():
        check_seeds(range(1))

    @pytest.mark.slow
    @ranks(4, timeout=600)
    def test_ranks_that_wait_in_different_orders_get_the_gradients_of_one_process_for_50_seeds():
        check_seeds(range(50))

    @ranks(4)
    def test_reading_an_unreduced_gradient_finishes_both_steps():
        model = sharded(mesh=square(), placements=HIERARCHICAL)
        model.set_requires_gradient_sync(False)
        with delays(1):
            loss_of(model, dist.get_rank(), 1).backward()
            for param, gradient in zip(model.parameters(), in_one_process(1), strict=True):
                assert torch.equal(param.grad.full_tensor(), gradient)

    @ranks(4)
    def test_hooks_on_parameters_see_and_change_what_both_steps_have_reduced():
        for options in ({"mesh": square(), "placements": HIERARCHICAL}, {"mesh": square()}):
            model, seen = sharded(**options), []
            for param in model.parameters():
                param.register_hook(lambda gradient, seen=seen: (seen.append(gradient), 3 * gradient)[1])
            for _ in range(2):  # The second one is added.
                loss_of(model, dist.get_rank(), 1).backward()
            expected = in_one_process(1)
            assert len(seen) == 2 * len(expected), len(seen)
            for param, gradient in zip(model.parameters(), expected, strict=True):
                assert torch.equal(param.grad.full_tensor(), 6 * gradient)
            of_first = [gradient.full_tensor() for gradient in seen[: len(expected)]]
            assert all(any(torch.equal(each, gradient) for each in of_first) for gradient in expected)


if __name__ == "__main__":
    unittest.main()
