"""What single hooks change in torch, and what wrappers of torch's private functions answer, in one process."""

import logging
import sys
import unittest
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed.tensor as dtensor
from common import as_before, error_of, fake_group
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import graph
from torch.autograd.graph import get_gradient_edge
from torch.distributed._composable.contract import _get_registry
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._ops import utils as op_utils
from torch.distributed.tensor.parallel import loss

from torch_ragged import RaggedShard
from torch_ragged._register import _spmd, _torch
from torch_ragged._register._hook import Hook
from torch_ragged._register._random import forget_tensors, handle_random_ops
from torch_ragged._register._spmd import compute_as_before, compute_as_one_device
from torch_ragged._register._torch import (
    GradientUse,
    backward_error_handlers,
    backward_input_checks,
    dynamo_disabled,
    dynamo_disabled_in_backward,
    flatten,
    gradient_use,
    recomputation_ends,
    register_composable,
    storage_ids,
)


def of_parallelize():
    """What the report lists as changed by parallelize."""
    dispatcher = DTensor._op_dispatcher
    names = ("tolist", "numpy", "data", "__dlpack__", "__format__", "__deepcopy__")
    return {
        "_allow_implicit_replication": dispatcher._allow_implicit_replication,
        "_custom_op_handlers": dict(dispatcher._custom_op_handlers),
        "_disable_custom_loss_ops": loss._disable_custom_loss_ops,
        "redistribute_cost": op_utils.redistribute_cost,
        "expand_to_full_mesh_op_strategy": op_utils.expand_to_full_mesh_op_strategy,
        "the logger": list(logging.getLogger("torch.distributed.tensor._redistribute").filters),
        **{name: vars(DTensor).get(name) for name in names},
    }


class Asks(torch.autograd.Function):
    """Its backward asks what becomes of the gradient of ``leaf``."""

    leaf, answers = None, []

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        Asks.answers.append(gradient_use(get_gradient_edge(Asks.leaf).node))
        return gradient


class HookTest(unittest.TestCase):
    def test_a_trial_of_a_plan_undoes_all_that_parallelize_changes(self):
        as_before()
        before = of_parallelize()
        with compute_as_before():
            compute_as_one_device(True)
            inside = of_parallelize()
        self.assertEqual([name for name in before if inside[name] == before[name]], [])
        self.assertEqual(of_parallelize(), before)

    def test_a_backward_that_is_given_inputs_is_checked_before_it_runs(self):
        x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
        output, seen = (x * y).sum(), []

        def check(outputs, inputs):
            seen.append((x.grad, outputs, inputs))

        backward_input_checks.append(check)
        try:
            torch.autograd.grad(output, [x], retain_graph=True)
            by_name = {"inputs": (x,), "allow_unreachable": True, "accumulate_grad": False}
            graph._engine_run_backward((output,), (torch.ones(()),), True, False, **by_name)
            output.backward(inputs=[x], retain_graph=True)
            output.backward()
        finally:
            backward_input_checks.remove(check)
        self.assertEqual([(grad, *map(list, given)) for grad, *given in seen], [(None, [output], [x])] * 3)

    def test_an_error_of_a_backward_is_handled(self):
        def failing():
            x = torch.ones(2, requires_grad=True)
            y = x.exp()
            y.detach().zero_()
            return y.sum().backward

        def say_more(error):
            raise RuntimeError("more") from error

        for handle, wanted in (
            (say_more, "RuntimeError: more"),
            (lambda error: None, "RuntimeError: one of the variables needed"),
        ):
            backward_error_handlers.append(handle)
            try:
                self.assertTrue(error_of(failing()).startswith(wanted))
            finally:
                backward_error_handlers.remove(handle)

    def test_a_backward_tells_what_becomes_of_a_gradient(self):
        x, Asks.leaf, Asks.answers = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True), []
        output = (Asks.apply(x * 1) * Asks.leaf).sum()
        output.backward(retain_graph=True)
        torch.autograd.grad(output, [x, Asks.leaf], retain_graph=True)
        torch.autograd.grad(output, x)
        self.assertEqual(Asks.answers, [GradientUse.ACCUMULATED, GradientUse.RETURNED, GradientUse.NONE])

    def test_a_mesh_is_flattened_under_the_joined_names(self):
        with fake_group(4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            flat, one = flatten(mesh), mesh["dp"]
            self.assertEqual((flat.mesh_dim_names, flat.mesh.tolist()), (("dp_tp",), [0, 1, 2, 3]))
            self.assertIs(flatten(one), one)
            error = error_of(flatten, init_device_mesh("cpu", (2, 2)))
            self.assertRegex(error, "^ValueError: .* has no dimension names: pass mesh_dim_names to init_device_mesh$")

    def test_factories_without_placements_or_a_mesh_draw_the_numbers_of_one_device(self):
        with fake_group(2):
            mesh = init_device_mesh("cpu", (2,))
            handle_random_ops(True)
            try:
                torch.manual_seed(0)
                with mesh:
                    found = [dtensor.rand(3, device_mesh=mesh), dtensor.randn(4), dtensor.rand(4, placements=[Shard(0)])]
            finally:
                handle_random_ops(False)
        torch.manual_seed(0)
        for made, expected in zip(found, (torch.rand(3), torch.randn(4), torch.rand(4)[:2]), strict=True):
            self.assertTrue(torch.equal(made.to_local(), expected), made)

    def test_a_fake_tensor_that_is_forgotten_can_be_swapped(self):
        mode = FakeTensorMode()
        one, other = (mode.from_tensor(torch.ones(2)) for _ in range(2))
        self.assertIn("weakref", error_of(torch.utils.swap_tensors, one, other))
        forget_tensors(mode)
        self.assertEqual(error_of(torch.utils.swap_tensors, one, other), "")

    def test_strategies_of_tensors_on_several_meshes_are_those_of_torch(self):
        """Of one mesh, torch gets those rows that fit a mesh dimension."""
        with fake_group(4):
            mesh, other = (init_device_mesh("cpu", (2, 2), mesh_dim_names=names) for names in (("a", "b"), ("c", "d")))
        whole, cut = [[placement] * 3 for placement in (Replicate(), Shard(0))]
        for meshes, expected in (((mesh, mesh), [[whole], [whole, cut]]), ((mesh, other), [[whole, cut]])):
            specs = [SimpleNamespace(mesh=each, placements=(Replicate(), Replicate())) for each in meshes]
            given = [SimpleNamespace(strategies=[SimpleNamespace(output_spec=spec)]) for spec in specs]
            asked = []

            def expand(mesh, schema, rows, asked=asked, **options):
                asked.append(rows)
                return SimpleNamespace(strategies=[])

            with mock.patch.object(_spmd, "_original", [None] * 4 + [expand]):
                _spmd._strategies_that_fit(mesh, SimpleNamespace(args_strategy=given, kwargs_strategy=[]), [whole, cut])
            self.assertEqual(asked, expected)

    def test_hooks_of_backward_are_hidden_while_something_is_compiled_or_types_are_checked(self):
        compiling = {"callback": None}
        with (
            mock.patch.object(_torch, "dynamo_disabled", lambda function: lambda: "hidden"),
            mock.patch.object(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: compiling["callback"]),
            mock.patch.dict(sys.modules),
        ):
            sys.modules.pop("spmd_types", None)
            call, found = dynamo_disabled_in_backward(lambda: "seen"), []
            for callback, checks in ((None, False), (print, False), (None, True), (print, True)):
                compiling["callback"] = callback
                sys.modules.pop("spmd_types", None)
                if checks:
                    sys.modules["spmd_types"] = sys
                found.append(call())
        self.assertEqual(found, ["seen", "hidden", "hidden", "hidden"])

    def test_a_module_that_an_api_has_been_applied_to_is_registered_with_its_state(self):
        module, state = torch.nn.Linear(2, 2), object()
        register_composable(fully_shard, module, state)
        self.assertEqual(list(_get_registry(module)), ["fully_shard"])
        self.assertIs(fully_shard.state(module), state)

    def test_no_recomputation_ends_outside_of_a_checkpoint(self):
        self.assertIs(recomputation_ends(1), False)
        with graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):  # Those of a program.
            self.assertIs(recomputation_ends(1), False)

    def test_a_hook_is_unknown_if_torch_lacks_its_target(self):
        known = [
            Hook("", "", "", check, None).is_known() for check in (lambda: True, lambda: False, lambda: torch.no_such_name)
        ]
        self.assertEqual(known, [True, False, False])

    def test_a_function_that_is_hidden_from_dynamo_returns_what_it_returns(self):
        self.assertEqual(dynamo_disabled(lambda x, *, y: x - y)(3, y=1), 2)

    def test_tensors_share_a_storage_and_sparse_ones_have_none(self):
        one, other = torch.ones(4), torch.ones(4)
        with fake_group(2):
            mesh = init_device_mesh("cpu", (2,))
            inside = [
                DTensor.from_local(one, mesh, [Replicate()]),
                AsyncCollectiveTensor(one),
            ]
            for tensor in (one, one[2:], *inside):
                self.assertEqual(storage_ids(tensor), storage_ids(one))
        self.assertEqual(len({*storage_ids(one), *storage_ids(other)}), 2)
        self.assertEqual(storage_ids(one.to_sparse()), [])

    def test_only_a_ragged_tensor_hides_the_offset_of_a_view(self):
        """copy.deepcopy takes offsets into different buffers for the addresses of one memory."""
        with fake_group(2):
            mesh, view = init_device_mesh("cpu", (2,)), torch.zeros(40)[8:16]
            placements = (Replicate(), Shard(0), RaggedShard((0,), (1, 1)))
            pointers = [DTensor.from_local(view, mesh, [each], shape=(16,), stride=(1,)).data_ptr() for each in placements]
            self.assertEqual(pointers, [32, 32, 0])

    def test_a_gradient_that_is_a_dtensor_is_one_of_a_whole_local_tensor(self):
        with fake_group(4), compute_as_before():
            compute_as_one_device(promote=True)
            mesh = init_device_mesh("cpu", (2, 2))
            factor = distribute_tensor(torch.ones(2, 4), mesh, [Replicate()] * 2)

            def gradient(rows, *placements):
                x = distribute_tensor(torch.ones(rows, 4), mesh, placements).requires_grad_()
                (x.to_local() * factor).sum().backward()
                return x.grad

            self.assertEqual(gradient(2, Replicate(), Replicate()).to_local().tolist(), [[1.0] * 4] * 2)
            if not torch.__version__.startswith("2.11"):  # Its from_local takes any tensor.
                for placements in ([Replicate(), Shard(0)], [Shard(0), Replicate()]):
                    self.assertIn("only accepts torch.Tensor but got", error_of(gradient, 4, *placements))


if __name__ == "__main__":
    unittest.main()
