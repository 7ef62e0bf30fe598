"""Rules of ``fsdp/core`` that one rank shows, in one process."""

import contextlib
import gc
import unittest
import warnings
import weakref

import torch
from common import collectives_seen, error_of, fake_group
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from torch_ragged.fsdp import ZERO2, Float8Policy, blocks, elements, fully_shard, rows
from torch_ragged.fsdp.core._backward_pass import BackwardPass
from torch_ragged.fsdp.core._comm_context import FSDPCommContext
from torch_ragged.fsdp.core._distribution import Distribution
from torch_ragged.fsdp.core._mesh import DataParallelMesh

WIDTH = 6
BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)  # With it, one rank has gathered parameters beside its shards.


class OneRankTest(unittest.TestCase):
    """Models that train on one rank."""

    def setUp(self):
        stack = contextlib.ExitStack()
        stack.enter_context(fake_group(1))
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


class Watched(torch.autograd.Function):
    """The identity; ``node`` is a weak reference to its last call in backward."""

    @staticmethod
    def forward(ctx, x):
        Watched.node = weakref.ref(ctx)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class ReturnsWeight(nn.Linear):
    def forward(self, x):
        return self.weight.t()


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

    def test_a_conversion_keeps_a_value_that_was_assigned_to_one_parameter_in_the_new_dtype(self):
        model = self.sharded(nn.Linear(WIDTH, WIDTH))
        expected = model[0].weight.full_tensor().double() + 1
        model[0].weight = nn.Parameter(model[0].weight.detach().double() + 1)
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
        model = self.sharded(Interrupted(WIDTH, WIDTH, bias=False), placements=ZERO2, mp_policy=BFLOAT16)
        x = torch.ones(2, WIDTH)
        model(x)
        model[0].error = KeyboardInterrupt  # torch calls no hooks after it.
        with self.assertRaises(KeyboardInterrupt):
            model(x)
        model.reset_iter_state()
        model[0].error = None
        model[0].weight.to_local().data.fill_(1)
        self.assertTrue(torch.equal(model[0](x), torch.full((2, WIDTH), WIDTH, dtype=torch.bfloat16)))


class MemoryTest(OneRankTest):
    def test_a_new_model_has_memory_for_its_shards_only(self):
        for policy in (MixedPrecisionPolicy(), BFLOAT16, Float8Policy(tile=(1, 128))):
            model = self.sharded(nn.Linear(WIDTH, WIDTH), mp_policy=policy)
            for name, buffers in groups_of(model)[0].buffers().items():
                self.assertEqual(any(buffer.is_allocated for buffer in buffers), name == "sharded", (policy, name))

    def test_a_module_that_returns_its_weight_stays_unsharded(self):
        for is_root in (True, False):
            model = fully_shard(ReturnsWeight(WIDTH, WIDTH), mesh=self.mesh, mp_policy=BFLOAT16)
            (weight,) = (value.full_tensor() for name, value in model.state_dict().items() if name == "weight")
            if not is_root:
                model = fully_shard(nn.Sequential(model), mesh=self.mesh)
            with torch.no_grad():
                output = model(torch.ones(1))
            self.assertTrue(torch.equal(output.clone(), weight.bfloat16().t()))


class CommContextTest(unittest.TestCase):
    def test_what_was_issued_ahead_is_known_until_it_is_forgotten(self):
        context, states = FSDPCommContext(), [nn.Module() for _ in range(3)]
        self.assertFalse(context.forget_gathering(states[0]))
        for state in states[:2]:
            self.assertTrue(context.may_gather_ahead)
            context.add_gathering(state)
        self.assertFalse(context.may_gather_ahead)
        self.assertFalse(context.forget_gathering(states[2]))
        self.assertTrue(context.forget_gathering(states[0]))
        self.assertFalse(context.forget_gathering(states[0]))
        self.assertTrue(context.may_gather_ahead)


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

    def test_the_graph_of_a_gradient_is_freed_with_the_loss(self):
        model, x = self.sharded(nn.Linear(WIDTH, WIDTH)), torch.randn(2, WIDTH)
        loss = Watched.apply(model(x)).square().sum()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss.backward(create_graph=True)
        del loss
        gc.collect()
        self.assertIsNone(Watched.node())

    def test_what_stays_gathered_is_out_of_date_after_backward(self):
        """A write to ``.data`` changes no version counter."""
        model = self.sharded(nn.Linear(WIDTH, WIDTH, bias=False), placements=ZERO2, mp_policy=BFLOAT16)
        x = torch.ones(2, WIDTH, requires_grad=True)
        first, second = model(x.detach()), model(x)
        first.sum().backward()
        model[0].weight.to_local().data.fill_(3)
        second.sum().backward()
        self.assertTrue(torch.equal(x.grad, torch.full((2, WIDTH), 3.0 * WIDTH)))

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
        stack.enter_context(fake_group(8, 7))
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
