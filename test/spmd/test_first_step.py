"""The first step under a plan: torch's rules are asked without a search, and a user who waits is told why."""

import itertools
import random
import subprocess
import sys
import unittest
from unittest import mock

import pytest
import torch
from common import enter_fake_group
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._ops import utils as op_utils
from torch.distributed.tensor.placement_types import _StridedShard

from torch_ragged._register import _spmd
from torch_ragged._register._torch import forget_shardings
from torch_ragged.spmd import Plan, parallelize
from torch_ragged.spmd._move import move_dtensor
from torch_ragged.tensor._plain_ops import all_ops

OPS = {
    "add": lambda x, y: x + y,
    "mul": lambda x, y: x * y,
    "where": lambda x, y: torch.where(x > 0, x, y),
    "lerp": lambda x, y: torch.lerp(x, y, 0.5),
    "tanh": lambda x, y: torch.tanh(x),
    "sum": lambda x, y: x.sum(1),
    "softmax": lambda x, y: x.softmax(-1),
    "cat": lambda x, y: torch.cat([x, y], 1),
}

STATIC = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch_ragged.spmd import Plan, parallelize
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
model = parallelize(torch.nn.Sequential(torch.nn.Linear(4, 4)), Plan().default(Replicate()), mesh, mode="static")
for _ in range(3):
    model(torch.ones(2, 4)).mean().backward()
print(model.static_modules.report, "torch._inductor.lowering" in sys.modules)
"""


class FirstStepTest(unittest.TestCase):
    def setUp(self):
        enter_fake_group(self, 8)
        self.mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
        parallelize(nn.Linear(2, 2), Plan().default(Replicate()), self.mesh)  # It switches on what is tested.

    def placements_of(self, cases):
        """The placements of each op's result, and how many costs of redistributions torch asked for."""
        found, costs = {}, mock.Mock(wraps=_spmd._redistribute_cost)
        forget_shardings()
        torch._C._clear_DTensor_sharding_propagator_cache()
        with mock.patch.object(op_utils, "redistribute_cost", costs):
            for case in cases:
                x, y = (distribute_tensor(torch.zeros(8, 8), self.mesh, [Replicate()] * 3) for _ in range(2))
                x, y = (move_dtensor(each, placed) for each, placed in zip((x, y), case[1:]))
                found[case] = OPS[case[0]](x, y).placements
        return found, costs.call_count

    def test_ops_have_the_placements_of_torchs_search(self):
        rng = random.Random(0)
        kinds = (Replicate(), Shard(0), Shard(1), Partial())
        all_placements = list(itertools.product(kinds, repeat=3))
        cases = [(name, placed, placed) for name in OPS for placed in rng.sample(all_placements, 3)]
        cases += [(name, rng.choice(all_placements), rng.choice(all_placements)) for name in OPS for _ in range(2)]
        found, costs = self.placements_of(cases)
        with mock.patch.object(op_utils, "expand_to_full_mesh_op_strategy", _spmd._original[4]):
            expected, all_costs = self.placements_of(cases)
        self.assertEqual(found, expected)
        self.assertLess(costs, all_costs)

    def test_ops_whose_arguments_fit_ask_for_few_costs(self):
        placed = (Shard(0), Shard(1), Replicate())
        cases = [(name, placed, placed) for name in ("add", "mul", "tanh", "lerp")]
        _, costs = self.placements_of(cases)
        with mock.patch.object(op_utils, "expand_to_full_mesh_op_strategy", _spmd._original[4]):
            _, all_costs = self.placements_of(cases)
        self.assertLess(10 * costs, 3 * all_costs)

    def test_a_strided_shard_costs_what_a_shard_costs(self):
        def spec(*placements):
            meta = TensorMeta(torch.Size((4096, 4096)), (4096, 1), torch.float32)
            ordered = {"use_strided_shard_as_shard_order": False} if strided in placements else {}
            return DTensorSpec(self.mesh, placements, tensor_meta=meta, **ordered)

        strided, whole = _StridedShard(0, split_factor=2), (Replicate(),) * 3
        for placed, wanted in (
            ((strided, Replicate(), Replicate()), whole),
            ((Replicate(), strided, Replicate()), whole),
            ((strided, Shard(0), Shard(1)), whole),
            ((strided, Replicate(), Partial()), whole),
            ((strided, Replicate(), Replicate()), (Shard(1), Replicate(), Replicate())),
        ):
            cost = op_utils.redistribute_cost(spec(*placed), spec(*wanted))
            of_shard = [Shard(0) if each == strided else each for each in placed]
            self.assertAlmostEqual(cost, _spmd._original[3](spec(*of_shard), spec(*wanted)))
            self.assertLess(cost, float("inf"))

    @pytest.mark.slow
    def test_finding_static_modules_does_not_import_inductor(self):
        ran = subprocess.run([sys.executable, "-c", STATIC], capture_output=True, text=True, timeout=600)
        self.assertEqual(ran.stdout, "static: (root) False\n", ran.stderr)

    def test_a_line_says_once_why_the_step_takes_long(self):
        with mock.patch.object(all_ops, "seconds", 0.0), mock.patch.object(all_ops, "ops", 0):
            with self.assertLogs("torch_ragged.spmd", "WARNING") as told:
                for seconds in (6.0, 3.0, 2.0, 9.0):
                    all_ops._took(seconds)
        self.assertEqual(len(told.output), 1)
        self.assertIn("torch took 11 s to find the placements of 3 ops", told.output[0])


if __name__ == "__main__":
    unittest.main()
