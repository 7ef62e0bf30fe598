"""Rules of ``fsdp/core`` that one rank shows, in one process."""

import contextlib
import gc
import unittest
import warnings

import torch
import torch.distributed as dist
from common import collectives_seen, error_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_ragged.fsdp import ZERO2, blocks, elements, fully_shard, rows
from torch_ragged.fsdp.core._backward_pass import BackwardPass
from torch_ragged.fsdp.core._distribution import Distribution
from torch_ragged.fsdp.core._mesh import DataParallelMesh

WIDTH = 6


@contextlib.contextmanager
def world(ranks):
    """The last rank of a fake process group: of one rank, that is all of it; of several, no data moves."""
    dist.init_process_group("fake", store=FakeStore(), rank=ranks - 1, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
        gc.collect()


class OneRankTest(unittest.TestCase):
    """Models that train on one rank."""

    def setUp(self):
        stack = contextlib.ExitStack()
        stack.enter_context(world(1))
        self.addCleanup(stack.close)
        self.mesh = init_device_mesh("cpu", (1,))
        torch.manual_seed(0)

    def sharded(self, *modules, **knobs):
        model = nn.Sequential(*modules)
        for module in model:
            fully_shard(module, mesh=self.mesh, **knobs)
        return fully_shard(model, mesh=self.mesh, **knobs)


class Branches(nn.Module):
    """Two layers, of which a forward runs the first only."""

    def __init__(self):
        super().__init__()
        self.used, self.skipped = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.used(x)


class Interrupted(nn.Linear):
    error: "type[BaseException] | None" = None

    def forward(self, x):
        if self.error is not None:
            raise self.error("on purpose")
        return super().forward(x)


def groups_of(model):
    return model._ragged_groups(recurse=True)


class ReplacedParameterTest(OneRankTest):
    def test_a_module_that_does_not_run_registers_its_old_parameter_with_the_new_values(self):
        model = Branches()
        fully_shard(model.used, mesh=self.mesh), fully_shard(model.skipped, mesh=self.mesh), fully_shard(model, mesh=self.mesh)
        old = dict(model.named_parameters())
        new = {name: value.clone().detach() + 1 for name, value in model.state_dict().items()}
        model.load_state_dict(new, assign=True)
        model(torch.randn(2, WIDTH)).sum().backward()
        for name, parameter in model.named_parameters():
            self.assertIs(parameter, old[name])
            self.assertTrue(torch.equal(parameter.full_tensor(), new[name].full_tensor()), name)

    def test_a_conversion_keeps_values_that_were_assigned_to_some_parameters(self):
        model = self.sharded(nn.Linear(WIDTH, WIDTH))
        weight = nn.Parameter(model[0].weight.detach() + 1)
        expected = weight.detach().full_tensor().double()
        model[0].weight = weight
        model.double()
        self.assertTrue(torch.equal(model[0].weight.full_tensor(), expected))
        model(torch.randn(2, WIDTH, dtype=torch.float64)).sum().backward()
        self.assertTrue(torch.equal(model[0].weight.full_tensor(), expected))


class InterruptedForwardTest(OneRankTest):
    def test_a_module_whose_forward_raised_is_sharded(self):
        model = self.sharded(Interrupted(WIDTH, WIDTH))
        x = torch.randn(2, WIDTH)
        model(x)
        model[0].error = KeyError
        self.assertIn("on purpose", error_of(model, x))
        self.assertIsInstance(model[0].weight, DTensor)
        self.assertFalse(any(group.is_gathered for group in groups_of(model[0])))

    def test_after_a_reset_no_module_counts_as_running(self):
        model = self.sharded(Interrupted(WIDTH, WIDTH))
        x = torch.randn(2, WIDTH)
        model(x)
        model[0].error = KeyboardInterrupt  # torch calls no hooks after it.
        with self.assertRaises(KeyboardInterrupt):
            model(x)
        model.reset_iter_state()
        model[0].error = None
        model[0].weight.to_local().data.fill_(1)
        model[0].bias.to_local().data.fill_(2)
        self.assertTrue(torch.equal(model[0](x), nn.functional.linear(x, torch.ones(WIDTH, WIDTH), torch.full((WIDTH,), 2.0))))


class BackwardRuleTest(OneRankTest):
    def test_a_backward_of_a_module_whose_root_was_deleted_raises(self):
        class Root:
            def drop_raised_backward(self):
                pass

        root = Root()
        backward = BackwardPass(root)
        del root
        gc.collect()
        self.assertRegex(error_of(backward.start), "RuntimeError: the root of this fully_shard module was deleted")

    def test_gradients_with_a_graph_are_stored_without_it(self):
        for layers in ([nn.Linear(WIDTH, WIDTH)], [nn.Linear(WIDTH, WIDTH, bias=False)]):
            model = self.sharded(*layers)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns of reference cycles.
                model(torch.randn(2, WIDTH)).square().sum().backward(create_graph=True)
            for parameter in model.parameters():
                self.assertFalse(parameter.grad.requires_grad)
                self.assertFalse(parameter.grad.to_local().requires_grad)
            for group in groups_of(model):
                self.assertFalse(any(b.flat.requires_grad for part in group.buffers().values() for b in part))

    def test_what_stays_gathered_is_out_of_date_after_backward(self):
        """A write to ``.data`` changes no version counter."""
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)  # Or one rank computes with the shards themselves.
        model = self.sharded(nn.Linear(WIDTH, WIDTH), placements=ZERO2, mp_policy=policy)
        model(torch.randn(2, WIDTH)).sum().backward()
        model[0].weight.to_local().data.fill_(3)
        model[0].unshard()
        self.assertTrue(torch.equal(model[0].weight, torch.full((WIDTH, WIDTH), 3.0, dtype=torch.bfloat16)))

    def test_two_reductions_before_a_finalization_hold_one_shard(self):
        model, single = self.sharded(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH)
        single.load_state_dict({name: value.full_tensor() for name, value in model[0].state_dict().items()})
        model.set_manual_backward_finalization(True)
        logs = [group.memory.reduced for group in groups_of(model)]
        for log in logs:
            log.start()
        for step in range(2):
            x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(step))
            model(x).square().sum().backward()
            single(x).square().sum().backward()
        model.finalize_backward()
        torch.testing.assert_close(model[0].weight.grad.full_tensor(), single.weight.grad)
        shards = [group.sharded.nbytes for group in groups_of(model)]
        self.assertEqual([sum(nbytes for _, nbytes in log.events) for log in logs], shards)


class ManyRanksTest(unittest.TestCase):
    """Models and meshes of several ranks, without their data."""

    def setUp(self):
        stack = contextlib.ExitStack()
        stack.enter_context(world(8))
        self.addCleanup(stack.close)
        torch.manual_seed(0)

    def test_what_stays_gathered_is_used_until_a_manual_finalization(self):
        mesh = init_device_mesh("cpu", (8,))
        model = fully_shard(nn.Linear(WIDTH, WIDTH), mesh=mesh, placements=ZERO2)
        model.set_manual_backward_finalization(True)
        gathers = []
        for step in range(6):
            with CommDebugMode() as mode:
                model(torch.randn(2, WIDTH)).sum().backward()
            if step % 3 == 2:
                model.finalize_backward()
            gathers.append(collectives_seen(mode)[0])
        self.assertEqual(gathers, [1, 0, 0, 1, 0, 0])

    def test_the_mesh_of_the_shards_has_one_dimension(self):
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("replicate", "shard"))
        dp = DataParallelMesh.of(mesh)
        self.assertEqual((dp.shard_mesh.shape, dp.shard_mesh.mesh_dim_names), ((2,), ("shard",)))
        self.assertEqual(DataParallelMesh.of(mesh["shard"]).shard_mesh, mesh["shard"])
        self.assertEqual(DataParallelMesh.of(init_device_mesh("cpu", (4, 2))).shard_mesh.shape, (4, 2))

    def test_a_later_dimension_that_the_model_cuts_stays_whole_in_its_shards(self):
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
        dp = DataParallelMesh.of(mesh["dp"])
        weight = distribute_tensor(torch.zeros(3, 8, 4), mesh["tp"], [Shard(1)])
        distribution = Distribution("w", weight, dp)
        self.assertEqual(distribution.local_shape, (3, 4, 4))
        self.assertTrue(distribution.reduces_gradient)
        # Of 16 elements, the model has one slice of the first dimension here.
        for granularity, block, period in (
            (elements(), 16, 0),
            (rows(2), 16, 0),
            (rows(3), 48, 0),
            (rows(3, within=0), 16, 16),  # A block ends with its period.
            (rows(2, within=0), 16, 16),
            (blocks(3, 2), 16, 16),
        ):
            spec = distribution.tensor_spec(granularity)
            self.assertEqual((spec.shape, spec.dims, spec.block, spec.period), ((3, 4, 4), (0,), block, period), granularity)
        plain = Distribution("w", torch.zeros(3, 8, 4), dp)
        self.assertFalse(plain.reduces_gradient)
        self.assertEqual(plain.tensor_spec(rows(3, within=0)), rows(3, within=0).tensor_spec("w", (3, 8, 4)))
        columns = Distribution("w", distribute_tensor(torch.zeros(6, 4, 8), mesh["tp"], [Shard(2)]), dp)
        # Blocks of 3 rows of 4 elements, counted anew in each matrix of 4 rows.
        spec = columns.tensor_spec(rows(3, within=0))
        self.assertEqual((spec.dims, spec.block, spec.period), ((0, 1), 12, 16))
        first = Distribution("w", distribute_tensor(torch.zeros(6, 4, 8), mesh["tp"], [Shard(0)]), dp)
        self.assertEqual(first.tensor_spec(rows(3)), rows(3).tensor_spec("w", (3, 4, 8)))

    def test_of_several_dimensions_that_the_model_cuts_the_first_decides(self):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "ep", "tp"))
        weight = distribute_tensor(torch.zeros(2, 6, 4, 8), mesh["ep", "tp"], [Shard(2), Shard(1)])
        spec = Distribution("w", weight, DataParallelMesh.of(mesh["dp"])).tensor_spec(rows(1, within=1))
        self.assertEqual((spec.shape, spec.dims, spec.block, spec.period), ((2, 3, 2, 8), (0,), 48, 0))


if __name__ == "__main__":
    unittest.main()
