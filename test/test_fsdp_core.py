"""Rules of ``fsdp/core`` that one rank shows, in one process."""

import gc
import unittest
import warnings
import weakref
from types import SimpleNamespace
from unittest import mock

import torch
from common import enter_fake_group, error_of, fake_group
from fsdp_common import Boom
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from torch_ragged.fsdp import ZERO2, Float8Policy, fully_shard
from torch_ragged.fsdp.core._backward_pass import BackwardPass
from torch_ragged.fsdp.core._comm_context import FSDPCommContext

WIDTH = 6
BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)  # With it, one rank has gathered parameters beside its shards.


class OneRankTest(unittest.TestCase):
    """Models that train on one rank."""

    def setUp(self):
        enter_fake_group(self, 1)
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


class ChangedParameterTest(OneRankTest):
    def test_a_change_of_an_unsharded_parameter_raises_and_is_undone(self):
        def write(layer):
            with torch.no_grad():
                layer.weight.add_(1)

        def write_by_a_view(layer):
            layer.weight.data.view(-1)[0] = 1

        def move(layer):
            layer.weight.data = layer.weight.data.clone()

        def reinterpret(layer):
            layer.weight.data = layer.weight.data.view(torch.float16)

        def replace(layer):
            layer.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))

        for change, is_seen in ((write, True), (write_by_a_view, False), (move, True), (reinterpret, True), (replace, True)):
            model = self.sharded(nn.Linear(WIDTH, WIDTH), mp_policy=BFLOAT16)
            (sharded,) = (p for name, p in model.named_parameters() if name == "0.weight")
            before, x = sharded.full_tensor(), torch.ones(1, WIDTH)
            model(x)
            expected = model(x)
            model[0].unshard()
            change(model[0])
            error = error_of(model[0].reshard)
            self.assertEqual("RuntimeError: weight changed while unsharded" in error, is_seen, change)
            self.assertIs(model[0].weight, sharded)
            self.assertTrue(torch.equal(sharded.full_tensor(), before))
            self.assertTrue(torch.equal(model(x), expected))

    def test_a_conversion_to_integers_is_refused(self):
        model = self.sharded(nn.Linear(WIDTH, WIDTH))
        before = {name: value.full_tensor() for name, value in model.state_dict().items()}
        error = error_of(model._apply, lambda tensor: tensor.int())
        self.assertRegex(
            error, "ValueError: weight and 1 more is sharded in a buffer of torch.float32 and cannot become torch.int32"
        )
        for name, value in model.state_dict().items():
            self.assertTrue(torch.equal(value.full_tensor(), before[name]))


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
            self.assertEqual(groups_of(model)[0].sharded.placement, Shard(0))
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


class HoldsTest(unittest.TestCase):
    @fake_group(2)
    def test_a_tensor_that_wraps_a_view_of_a_parameter_holds_it(self):
        mesh, other = init_device_mesh("cpu", (2,)), torch.zeros(2, WIDTH)
        for dim in (None, 1):
            cut = None if dim is None else (lambda parameter: Shard(1))
            model = fully_shard(nn.Linear(WIDTH, 2, bias=False), mesh=mesh, shard_placement_fn=cut)
            model.unshard()
            (group,) = groups_of(model)
            self.assertTrue(group.holds(model.weight))
            self.assertTrue(group.holds(model.weight.detach().view(-1)[1:]))
            self.assertTrue(group.holds(TwoTensor(other, model.weight.detach())))
            self.assertFalse(group.holds(other))
            self.assertFalse(group.holds(TwoTensor(other, other.clone())))


class OutputDtypeTest(OneRankTest):
    def test_every_output_has_it(self):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
        returning = fully_shard(ReturnsWeight(WIDTH, WIDTH), mesh=self.mesh, mp_policy=policy)
        self.assertEqual(returning(torch.ones(1)).dtype, torch.float64)
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
        fully_shard(layers, mesh=self.mesh, mp_policy=policy)  # The first one does not reshard.
        root, x = fully_shard(nn.Sequential(*layers), mesh=self.mesh, mp_policy=policy), torch.ones(1, WIDTH)
        seen = []
        layers[1].register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype), prepend=True)
        self.assertEqual(root(x).dtype, torch.float64)
        self.assertEqual(seen, [torch.float64])

    def test_a_recomputed_output_has_it(self):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
        dtypes = []

        class Model(nn.Sequential):
            def forward(self, x):
                return checkpoint(self.inner, x, use_reentrant=False)

            def inner(self, x):
                output = self[0](x)
                dtypes.append(output.dtype)
                return output.sin()

        layer = fully_shard(nn.Linear(WIDTH, WIDTH), mesh=self.mesh, mp_policy=policy)
        model = fully_shard(Model(layer), mesh=self.mesh)
        model(torch.ones(1, WIDTH, requires_grad=True)).sum().backward()
        self.assertEqual(dtypes, [torch.float64] * 2)


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


class NameTest(OneRankTest):
    def test_groups_have_the_names_of_their_modules(self):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        model[1].bias.data = model[1].bias.data.double()
        model[1].forward = lambda x: x @ model[1].weight
        for module in (*model, model):
            fully_shard(module, mesh=self.mesh)
        self.assertEqual([group.fqn for group in groups_of(model)], [""] * 3)
        self.assertEqual([group.gradients.fqn for group in groups_of(model)], [""] * 3)
        model(torch.randn(2, WIDTH))
        names = ["0", "1", "1[1]"]
        self.assertEqual([group.fqn for group in groups_of(model)], names)
        self.assertEqual([group.gradients.fqn for group in groups_of(model)], names)
        self.assertEqual([group.named.fqn for group in groups_of(model)], names)

    def test_a_state_of_several_modules_has_all_their_names(self):
        modules = [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)]
        fully_shard(modules, mesh=self.mesh)
        self.assertEqual(modules[0]._ragged_states(recurse=False)[0].name, "FSDPLinear, FSDPLayerNorm")


class Observer(nn.Linear):
    """Notes, at each call, which of ``others`` have been all-gathered ahead."""

    def forward(self, x):
        self.seen.append([groups_of(other)[0].is_gathered for other in self.others])
        return super().forward(x)


class PrefetchTest(OneRankTest):
    def observers(self, count):
        layers = [Observer(WIDTH, WIDTH) for _ in range(count)]
        for layer in layers:
            fully_shard(layer, mesh=self.mesh)
        for layer in layers:
            object.__setattr__(layer, "others", layers), object.__setattr__(layer, "seen", [])
        return layers

    def seen(self, model, layers):
        model(torch.ones(1, WIDTH))  # The first forward only learns the order.
        for layer in layers:
            layer.seen.clear()
        model(torch.ones(1, WIDTH))
        return [layer.seen for layer in layers]

    def test_one_module_is_gathered_ahead(self):
        layers = self.observers(3)
        model = fully_shard(nn.Sequential(*layers), mesh=self.mesh)
        self.assertEqual(self.seen(model, layers), [[[True, True, False]], [[False, True, True]], [[False, False, True]]])

    def test_modules_of_one_group_gather_the_module_after_them_ahead(self):
        layers = [Observer(WIDTH, WIDTH) for _ in range(3)]
        fully_shard(layers[:2], mesh=self.mesh), fully_shard(layers[2], mesh=self.mesh)
        for layer in layers:
            object.__setattr__(layer, "others", layers[2:]), object.__setattr__(layer, "seen", [])
        model = fully_shard(nn.Sequential(*layers), mesh=self.mesh)
        self.assertEqual(self.seen(model, layers), [[[True]], [[True]], [[True]]])

    def test_before_its_last_call_a_module_gathers_no_other_one(self):
        class Model(nn.Sequential):
            def forward(self, x):
                return self[1](self[0](self[0](x)))

        layers = self.observers(2)
        model = fully_shard(Model(*layers), mesh=self.mesh)
        self.assertEqual(self.seen(model, layers), [[[True, False], [True, True]], [[False, True]]])

    def test_a_root_with_parameters_gathers_the_first_module_ahead(self):
        class Model(nn.Sequential):
            def forward(self, x):
                is_gathered.append(groups_of(layers[0])[0].is_gathered)
                return super().forward(x) * self.gain

        layers, is_gathered = self.observers(1), []
        model = Model(*layers)
        model.gain = nn.Parameter(torch.ones(WIDTH))
        self.seen(fully_shard(model, mesh=self.mesh), layers)
        self.assertEqual(is_gathered, [False, True])

    def test_a_module_that_was_gathered_ahead_and_did_not_run_has_new_values_later(self):
        class Skipping(nn.Sequential):
            def forward(self, x, layers):
                for layer in self[:layers]:
                    x = layer(x)
                return x

        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)]
        model = Skipping(*layers)
        for module in (*layers, model):
            fully_shard(module, mesh=self.mesh, mp_policy=BFLOAT16)
        x = torch.ones(1, WIDTH)
        model(x, 2)
        model(x, 1)
        self.assertTrue(groups_of(layers[1])[0].is_gathered)
        for layer in layers:
            layer.weight.to_local().data.fill_(1)
        self.assertTrue(torch.equal(model(x, 2), torch.full((1, WIDTH), WIDTH**2, dtype=torch.bfloat16)))


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

    def test_a_later_forward_is_finished_when_backward_reaches_an_earlier_one(self):
        class Order:
            def __init__(self, name):
                self.restart = lambda: calls.append(f"restart {name}")
                self.finish = lambda: calls.append(f"finish {name}")

        class Root:
            def drop_raised_backward(self):
                pass

            def root_post_backward(self):
                backward.finish_orders()

        calls, root = [], Root()
        backward, earlier, later = BackwardPass(root), Order("earlier"), Order("later")
        x = torch.ones(1, requires_grad=True)

        def hook(gradient):
            backward.start()
            for order in (later, later, earlier):
                backward.reach(order)
                self.assertTrue(backward.is_in(order))
            backward.start()  # It was started: nothing happens.

        x.register_hook(hook)
        x.sum().backward()
        self.assertEqual(calls, ["restart later", "finish later", "restart earlier", "finish later", "finish earlier"])
        self.assertFalse(backward.is_in(earlier))

    def test_a_hook_on_an_unsharded_parameter_sees_its_gradient_until_it_is_removed(self):
        for smallest in (1, 2**62):  # Written by the matmul, or copied.
            with mock.patch("torch_ragged.fsdp.core._fsdp_param_group.SMALLEST_WRITTEN_IN_PLACE", smallest):
                model, seen = self.sharded(nn.Linear(WIDTH, WIDTH, bias=False)), []
            model[0].unshard()
            handle = model[0].weight.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append(p.grad.clone()))
            for _ in range(2):
                model(torch.ones(1, WIDTH)).sum().backward()
                handle.remove()
            self.assertEqual([gradient.tolist() for gradient in seen], [torch.ones(WIDTH, WIDTH).tolist()])
            self.assertTrue(torch.equal(model[0].weight.grad.full_tensor(), torch.full((WIDTH, WIDTH), 2.0)))

    def test_a_backward_that_raises_leaves_a_note_that_gradients_accumulate(self):
        """Other ranks, whose backward does not raise, send what they add up in ``reduce_dtype``: so does this one, later."""

        class Model(nn.Linear):
            def forward(self, x):
                return super().forward(Boom.apply(x))

        model = fully_shard(Model(WIDTH, WIDTH), mesh=self.mesh)
        loss = model(torch.randn(2, WIDTH, requires_grad=True)).sum()
        model.set_requires_gradient_sync(False)  # Not known in forward.
        self.assertFalse(any(group.gradients.may_hold_sum for group in groups_of(model)))
        self.assertIn("boom", error_of(loss.backward))
        self.assertTrue(all(group.gradients.may_hold_sum for group in groups_of(model)))

    def test_a_backward_that_raised_is_told_if_one_of_several_groups_had_gradients(self):
        class Model(nn.Linear):
            def forward(self, x):
                return Boom.apply(x) @ self.weight

        model = Model(WIDTH, WIDTH)
        model.bias.data = model.bias.data.double()
        fully_shard(model, mesh=self.mesh)
        self.assertEqual(len(groups_of(model)), 2)
        self.assertIn("boom", error_of(model(torch.randn(2, WIDTH, requires_grad=True)).sum().backward))
        with self.assertWarnsRegex(UserWarning, "a backward pass raised: its gradients"):
            model(torch.randn(2, WIDTH))

    def test_a_weight_that_is_used_outside_of_its_module_has_a_gradient(self):
        for smallest in (1, 2**62):  # Written by the matmul, or copied.
            with mock.patch("torch_ragged.fsdp.core._fsdp_param_group.SMALLEST_WRITTEN_IN_PLACE", smallest):
                model = fully_shard(nn.Linear(WIDTH, WIDTH, bias=False), mesh=self.mesh)
            model(torch.ones(1, WIDTH))
            model.unshard()
            nn.functional.linear(torch.ones(1, WIDTH), model.weight).sum().backward()
            self.assertTrue(torch.equal(model.weight.grad.full_tensor(), torch.ones(WIDTH, WIDTH)))

    def test_a_module_stays_unsharded_if_only_an_opaque_output_may_reach_backward(self):
        class Hides(nn.Sequential):
            def forward(self, x):
                return torch.ones(1, requires_grad=True), SimpleNamespace(hidden=super().forward(x))

        inner = fully_shard(Hides(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)), mesh=self.mesh, mp_policy=BFLOAT16)
        model = fully_shard(nn.Sequential(inner), mesh=self.mesh)
        _, opaque = model(torch.ones(1, WIDTH))
        self.assertTrue(groups_of(inner)[0].is_unsharded)
        opaque.hidden.sum().backward()
        bias = inner[0].bias.grad.full_tensor()
        self.assertTrue(torch.equal(bias, inner[1].weight.full_tensor()[0].bfloat16().float()))

    def test_an_input_that_is_not_used_has_no_gradient(self):
        class First(nn.Linear):
            def forward(self, x, unused):
                return super().forward(x)

        model = fully_shard(First(WIDTH, WIDTH), mesh=self.mesh)
        x, unused = torch.ones(1, WIDTH, requires_grad=True), torch.ones(1, requires_grad=True)
        model(x, unused).sum().backward()
        self.assertIsNone(unused.grad)
        torch.testing.assert_close(x.grad, model.weight.full_tensor().sum(0, keepdim=True))

    def test_a_gradient_is_added_to_one_that_is_the_buffer(self):
        model = self.sharded(nn.Linear(8, 16, bias=False))  # It fills its buffer.
        gradients, one = groups_of(model)[0].gradients, torch.ones(16, 8)
        for step in range(3):
            first = one.t().contiguous().t() if step == 0 else one * 2  # Only in memory order, it can be the buffer.
            gradients._collect(0, first)
            self.assertEqual(gradients._unreduced.is_borrowed, step > 0)
            gradients._collect(0, one * 3)
            gradients.start_reduction()
            gradients.finish([True])
            self.assertTrue(torch.equal(model[0].weight.grad.full_tensor(), one * (4 + 5 * step)))

    def test_a_module_becomes_a_root_when_its_root_is_deleted(self):
        model = self.sharded(nn.Linear(WIDTH, WIDTH))
        model(torch.ones(1, WIDTH))
        layer = model[0]
        (state,) = layer._ragged_states(recurse=False)
        del model
        gc.collect()
        self.assertIs(state.context, state.context)
        layer(torch.ones(1, WIDTH)).sum().backward()
        self.assertTrue(state.is_root)
        self.assertTrue(torch.equal(layer.weight.grad.full_tensor(), torch.ones(WIDTH, WIDTH)))

    def test_an_optional_module_cannot_be_recomputed_with_others(self):
        class Model(nn.Sequential):
            def forward(self, x):
                return checkpoint(super().forward, x, use_reentrant=False)

        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
        fully_shard(layers[0], mesh=self.mesh, optional=True), fully_shard(layers[1], mesh=self.mesh)
        model = fully_shard(Model(*layers), mesh=self.mesh)
        loss = model(torch.ones(1, WIDTH, requires_grad=True)).sum()
        self.assertRegex(error_of(loss.backward), "RuntimeError: 0 is optional and is recomputed in backward")

    def test_gradients_that_would_be_rounded_are_pending_too(self):
        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = self.sharded(nn.Linear(WIDTH, WIDTH, bias=False), mp_policy=mixed)
        gradients = groups_of(model)[0].gradients
        wide = torch.full((WIDTH, WIDTH), 1 + 2**-20)
        gradients._collect(0, wide.clone())
        self.assertTrue(gradients.is_pending and gradients.needs_reduction)
        gradients._collect(0, wide.clone())
        gradients.start_reduction()
        gradients.finish([True])
        self.assertTrue(torch.equal(model[0].weight.grad.full_tensor(), 2 * wide))
        self.assertFalse(gradients.is_pending)

    def test_gradients_of_inputs_have_gradients(self):
        """Two backward passes, of which the second reads parameters that the first has freed."""
        policy = MixedPrecisionPolicy(param_dtype=torch.float64)
        model = self.sharded(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1), mp_policy=policy)
        single = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)).double()
        single.load_state_dict({name: value.full_tensor().double() for name, value in model.state_dict().items()})
        gradients = []
        for each in (model, single):
            x = torch.linspace(-1, 1, 2 * WIDTH, dtype=torch.float64).view(2, WIDTH).requires_grad_()
            (of_input,) = torch.autograd.grad(each(x).sum(), x, create_graph=True)
            of_input.square().sum().backward()
            gradients.append([parameter.grad for parameter in each.parameters()])
        for mine, plain in zip(*gradients):
            self.assertEqual(mine is None, plain is None)  # The gradient of an input does not depend on the last bias.
            if plain is not None:
                torch.testing.assert_close(mine.full_tensor(), plain.float())

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
        for reduce_dtype in (torch.float32, torch.float64):  # In place, or with a cast to the dtype of .grad.
            for at_once in (1, 2):
                with self.subTest(reduce_dtype, at_once=at_once):
                    self.check_two_reductions(MixedPrecisionPolicy(reduce_dtype=reduce_dtype), at_once)

    def check_two_reductions(self, policy, at_once):
        model, single = self.sharded(nn.Linear(WIDTH, WIDTH), mp_policy=policy), nn.Linear(WIDTH, WIDTH)
        single.load_state_dict({name: value.full_tensor() for name, value in model[0].state_dict().items()})
        model.set_manual_backward_finalization(True)
        model.set_reduce_scatter_max_input_buffers(at_once)
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


if __name__ == "__main__":
    unittest.main()
