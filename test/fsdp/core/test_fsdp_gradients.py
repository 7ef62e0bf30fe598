"""Gradients on one rank: from autograd, from programs, after errors, with graphs; how they are reduced and kept."""

import gc
import warnings
import weakref
from types import SimpleNamespace
from unittest import mock

import torch
from common import error_of, no_pipelines
from fsdp_common import Boom
from fsdp_one_rank import BFLOAT16, WIDTH, OneRankTest, groups_of
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from torch_ragged.fsdp import ZERO2, fully_shard
from torch_ragged.fsdp.core._forward_order import Pass
from torch_ragged.fsdp.grads._weight_gradient import ComputeParameter


class Watched(torch.autograd.Function):
    """The identity; ``node`` is a weak reference to its last call in backward."""

    @staticmethod
    def forward(ctx, x):
        Watched.node = weakref.ref(ctx)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class GradientTest(OneRankTest):
    def test_a_gradient_of_a_module_whose_root_was_deleted_raises(self):
        model = self.sharded(nn.Linear(WIDTH, WIDTH, bias=False))
        model(torch.ones(1, WIDTH))
        (group,) = groups_of(model)
        del model
        gc.collect()
        gradient = torch.ones(WIDTH, WIDTH)
        group.add_gradient(0, gradient)  # Of a use outside of any forward.
        group.expect_gradients(Pass())
        group._reached_in = None  # In an earlier pass.
        error = error_of(group.add_gradient, 0, gradient)
        self.assertRegex(error, "RuntimeError: the root of this fully_shard module was deleted")

    def test_a_later_forward_is_finished_when_backward_reaches_an_earlier_one(self):
        class Order:
            def __init__(self, name):
                self.restart = lambda: calls.append(f"restart {name}")
                self.finish = lambda: [name]

        model = self.sharded(nn.Linear(WIDTH, WIDTH))
        (root,) = {state.context for state in model._ragged_states(recurse=False)}
        calls, earlier, later = [], Order("earlier"), Order("later")
        root.run_skipped = lambda order, event: calls.append(f"finish {event}")
        x = torch.ones(1, requires_grad=True)

        def hook(gradient):
            root.start_backward()
            for order in (later, later, earlier):
                root.reach(order)
                self.assertIn(order, root.orders)
            root.start_backward()  # It was started: nothing happens.

        x.register_hook(hook)
        x.sum().backward()
        self.assertEqual(calls, ["restart later", "finish later", "restart earlier", "finish later", "finish earlier"])
        self.assertEqual((root.current, root.orders), (None, []))

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
        self.assertFalse(any(group.may_hold_sum for group in groups_of(model)))
        self.assertIn("boom", error_of(loss.backward))
        self.assertTrue(all(group.may_hold_sum for group in groups_of(model)))

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

    def test_a_parameter_frozen_after_forward_has_no_gradient(self):
        for smallest in (1, 2**62):  # Written by the matmul, or copied.
            name = "torch_ragged.fsdp.core._fsdp_param_group.SMALLEST_WRITTEN_IN_PLACE"
            with no_pipelines(), mock.patch(name, smallest):
                model = fully_shard(nn.Linear(WIDTH, WIDTH), mesh=self.mesh, reshard_after_forward=False)
            self.assertEqual(isinstance(groups_of(model)[0].params[0].unsharded, ComputeParameter), smallest == 1)
            sharded, loss = model.weight, model(torch.ones(1, WIDTH)).sum()
            sharded.requires_grad_(False)
            loss.backward()
            self.assertIsNone(sharded.grad)
            self.assertIsNotNone(model.bias.grad)

    def test_after_backward_nothing_is_in_flight(self):
        model = self.sharded(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        model.set_reduce_scatter_max_input_buffers(3)
        (state,) = model._ragged_states(recurse=False)
        model(torch.ones(1, WIDTH)).sum().backward()
        self.assertEqual((state.comm.reducing, state.comm.gathers), ([], 0))
        self.assertFalse(any(group.may_hold_sum or group.is_pending for group in groups_of(model)))

    def test_a_backward_after_one_that_raised_has_its_own_gradients_only(self):
        class Model(nn.Linear):
            def forward(self, x, raises):
                return nn.functional.linear(Boom.apply(x) if raises else x, self.weight, self.bias)

        model, x = fully_shard(Model(WIDTH, WIDTH), mesh=self.mesh), torch.ones(1, WIDTH, requires_grad=True)
        losses = [model(x, raises).sum() for raises in (True, False)]
        self.assertIn("boom", error_of(losses[0].backward))
        with self.assertWarnsRegex(UserWarning, "a backward pass raised"):
            losses[1].backward()
        self.assertTrue(torch.equal(model.weight.grad.full_tensor(), torch.ones(WIDTH, WIDTH)))

    def test_a_parameter_that_a_later_step_does_not_use_has_no_gradient(self):
        class Model(nn.Linear):
            def forward(self, x, has_bias):
                return nn.functional.linear(x, self.weight, self.bias if has_bias else None)

        model, used = fully_shard(Model(WIDTH, WIDTH), mesh=self.mesh), []
        for has_bias in (True, False, True):
            model(torch.ones(1, WIDTH), has_bias).sum().backward()
            used.append((model.weight.grad is not None, model.bias.grad is not None))
            model.zero_grad()
        self.assertEqual(used, [(True, True), (True, False), (True, True)])

    def test_a_reset_drops_gradients_of_modules_that_ran_without_their_root(self):
        model = self.sharded(nn.Linear(WIDTH, WIDTH))
        model.set_requires_gradient_sync(False)
        model[0](torch.ones(1, WIDTH)).sum().backward()
        (group,) = groups_of(model)
        self.assertTrue(group.is_pending)
        model.reset_iter_state()
        self.assertFalse(group.is_pending)

    def test_nothing_is_told_of_a_backward_that_raised_before_any_gradient(self):
        class Model(nn.Linear):
            def forward(self, x):
                return Boom.apply(super().forward(x))

        model, x = fully_shard(Model(WIDTH, WIDTH), mesh=self.mesh), torch.ones(1, WIDTH)
        self.assertIn("boom", error_of(model(x).sum().backward))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(x)

    def test_gradients_of_inputs_may_be_missing_or_constant(self):
        class First(nn.Linear):
            def forward(self, x, unused):
                return super().forward(x) + unused.detach()

        model = fully_shard(First(WIDTH, WIDTH).requires_grad_(False), mesh=self.mesh)
        x, unused = torch.ones(1, WIDTH, requires_grad=True), torch.ones(1, requires_grad=True)
        gradients = torch.autograd.grad(model(x, unused).sum(), (x, unused), create_graph=True, allow_unused=True)
        self.assertEqual((gradients[0].requires_grad, gradients[1]), (False, None))

    def test_the_gradient_of_a_weight_that_is_used_outside_of_forward_waits_for_the_next_pass(self):
        """As in FSDP2: other ranks may not use it, and a reduction would wait for them."""
        for smallest in (1, 2**62):  # Written by the matmul, or copied.
            with mock.patch("torch_ragged.fsdp.core._fsdp_param_group.SMALLEST_WRITTEN_IN_PLACE", smallest):
                model = fully_shard(nn.Linear(WIDTH, WIDTH, bias=False), mesh=self.mesh)
            model(torch.ones(1, WIDTH))
            model.unshard()
            nn.functional.linear(torch.ones(1, WIDTH), model.weight).sum().backward()
            model.reshard()
            self.assertIsNone(model.weight.grad)
            model(torch.ones(1, WIDTH)).sum().backward()
            self.assertTrue(torch.equal(model.weight.grad.full_tensor(), torch.full((WIDTH, WIDTH), 2.0)))

    def test_a_module_that_was_unsharded_by_hand_and_used_in_the_forward_of_another_one_is_reduced(self):
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.head = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

            def forward(self, x):
                self.head.unshard()
                return nn.functional.linear(self.body(x), self.head.weight)

        model = Model()
        for part in (model.body, model.head, model):
            fully_shard(part, mesh=self.mesh)
        x = torch.ones(1, WIDTH)
        model(x).sum().backward()
        expected = (x @ model.body.weight.full_tensor().T).expand(WIDTH, WIDTH)
        torch.testing.assert_close(model.head.weight.grad.full_tensor(), expected)

    def test_a_gradient_that_a_hook_has_kept_does_not_change(self):
        """It fills the buffer, so the buffer may be the gradient itself."""
        for passes in (1, 2):
            with mock.patch("torch_ragged.fsdp.core._fsdp_param_group.SMALLEST_WRITTEN_IN_PLACE", 2**62):
                model = fully_shard(nn.Linear(8, 16, bias=False), mesh=self.mesh)
            model.set_gradient_divide_factor(4)
            model.unshard()
            kept = []
            model.weight.register_post_accumulate_grad_hook(lambda param, kept=kept: kept.append(param.grad))
            for index in range(passes):
                model.set_requires_gradient_sync(index == passes - 1)
                model(torch.full((1, 8), 2.0)).sum().backward()
            for gradient in kept:
                self.assertTrue(torch.equal(gradient, torch.full((16, 8), 2.0)))
            self.assertTrue(torch.equal(model.weight.grad.full_tensor(), torch.full((16, 8), 0.5 * passes)))

    def test_the_first_of_two_wide_gradients_does_not_change(self):
        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        gradients = groups_of(self.sharded(nn.Linear(WIDTH, WIDTH, bias=False), mp_policy=mixed))[0].grad_buffer
        first = torch.ones(WIDTH, WIDTH)
        gradients.add(0, first)
        gradients.add(0, torch.ones(WIDTH, WIDTH))
        self.assertTrue(torch.equal(first, torch.ones(WIDTH, WIDTH)))

    def test_padding_of_wide_gradients_is_zero(self):
        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        gradients = groups_of(self.sharded(nn.Linear(3, 3), mp_policy=mixed))[0].grad_buffer
        torch.use_deterministic_algorithms(True)  # New memory is NaN.
        try:
            for _ in range(2):
                for index, shape in enumerate(((3, 3), (3,))):
                    gradients.add(index, torch.ones(shape, dtype=torch.bfloat16))
                gradients.widen()
        finally:
            torch.use_deterministic_algorithms(False)
        flat = gradients.completed(widens=True).flat
        self.assertEqual((flat.dtype, flat.numel() > 12, flat.sum().item()), (torch.float32, True, 2.0 * 12))

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
        group, one = groups_of(model)[0], torch.ones(16, 8)
        for step in range(3):
            first = one.t().contiguous().t() if step == 0 else one * 2  # Only in memory order, it can be the buffer.
            group.add_gradient(0, first)
            self.assertEqual(group.grad_buffer._is_borrowed, step > 0)
            group.add_gradient(0, one * 3)
            group.reduce_gradients()
            group.reduction.set_grads([True])
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
        group = groups_of(model)[0]
        wide = torch.full((WIDTH, WIDTH), 1 + 2**-20)
        group.add_gradient(0, wide.clone())
        self.assertTrue(group.drop_gradients())
        self.assertFalse(group.is_pending or group.drop_gradients())
        group.add_gradient(0, wide.clone())
        self.assertTrue(group.is_pending)
        group.add_gradient(0, wide.clone())
        group.reduce_gradients()
        group.reduction.set_grads([True])
        self.assertTrue(torch.equal(model[0].weight.grad.full_tensor(), 2 * wide))
        self.assertFalse(group.is_pending)

    def test_assigned_gradients_are_collected_outside_of_backward(self):
        """As ``finalize_backward()`` does after a zero-bubble schedule: no pass starts, and none is dropped."""
        model = self.sharded(nn.Linear(WIDTH, WIDTH, bias=False))
        (group,) = groups_of(model)
        model(torch.ones(1, WIDTH)).sum().backward()
        for is_unhooked in (True, False):
            model.unshard()
            group.is_unhooked = is_unhooked
            group.params[0].unsharded.grad = torch.ones(WIDTH, WIDTH)
            group.collect_assigned()
            self.assertTrue(group.is_pending)
            self.assertEqual(group.needs_reduction, is_unhooked)
            self.assertTrue(group.drop_gradients())
            group.needs_reduction = False

    def test_gradients_whose_reduction_failed_are_pending_until_they_are_dropped(self):
        model = self.sharded(nn.Linear(WIDTH, WIDTH, bias=False))
        (group,) = groups_of(model)
        group.add_gradient(0, torch.ones(WIDTH, WIDTH))
        group.reduce_gradients()
        with mock.patch.object(group.reduction.in_flight, "wait", side_effect=ConnectionError):
            self.assertRaises(ConnectionError, group.reduction.wait)
        self.assertTrue(group.is_pending)
        self.assertTrue(group.drop_gradients())
        self.assertFalse(group.is_pending)

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
