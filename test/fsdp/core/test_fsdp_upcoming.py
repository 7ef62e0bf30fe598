"""Names of torch's open pull requests: pending gradients, offload by name, views of tensor types, gradient dtypes."""

from __future__ import annotations

import unittest
from unittest import mock

import torch
import torch.distributed as dist
from common import error_of, fake_group, ranks
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.two_tensor import TwoTensor

from torch_ragged.fsdp import (
    FSDPGrad,
    MixedPrecisionPolicy,
    Offload,
    cpu_offload_by_budget,
    fully_shard,
    offloaded,
)
from torch_ragged.fsdp._upcoming import largest_first


def layers(mesh=None, dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).to(dtype)
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[0], mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def backward(model, step, scale=1.0):
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
    (scale * model(x.to(model[0].weight.dtype)).square().sum()).backward()


def wholes(model):
    return [None if p.grad is None else p.grad.full_tensor() for p in model.parameters()]


def assert_equal(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert (one is None) == (other is None) and (one is None or torch.equal(one, other)), (one, other)


class PendingGradientsTest(unittest.TestCase):
    @ranks(2)
    def test_they_are_writable_aliases_and_come_as_those_of_an_fsdp_grad():
        for options in ({}, {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}, {"weights": [3, 1]}):
            model, expected = layers(**options), layers(**options)
            model.set_gradient_view("pending")
            for each in (model, expected):
                backward(each, 0)
                each.set_requires_gradient_sync(False)
                for step in (1, 2):
                    backward(each, step)
            reduced = [p.grad for p in model.parameters()]
            assert not any(isinstance(grad, FSDPGrad) for grad in reduced)
            assert_equal(wholes(model), [p.grad.reduced.full_tensor() for p in expected.parameters()])
            with CommDebugMode() as mode:
                pending = model.get_pending_gradients()
            assert mode.get_total_counts() == 0
            assert list(pending) == [*model[1].parameters(), *model[0].parameters()] or set(pending) == {*model.parameters()}
            for param, (unreduced, partial) in pending.items():
                assert type(unreduced) is torch.Tensor and unreduced.shape == param.shape and partial is None
                assert unreduced.dtype == torch.float32
                unreduced.mul_(0.5)
            again = model.get_pending_gradients()
            for param, (unreduced, _) in pending.items():
                assert torch.equal(again[param][0], unreduced) and again[param][0].data_ptr() == unreduced.data_ptr()
            for param in expected.parameters():
                param.grad.unreduced.mul_(0.5)
            for each in (model, expected):
                each.synchronize_gradients()
            assert_equal(wholes(model), wholes(expected))
            assert model.get_pending_gradients() == {}

    @ranks(4)
    def test_sums_within_a_replica_are_partial():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        model, expected = layers(mesh), layers(mesh)
        model.set_gradient_view("pending")
        for step, (syncs, reduces) in enumerate(((True, False), (False, False))):
            for each in (model, expected):
                each.set_requires_gradient_sync(syncs)
                each.set_requires_all_reduce(reduces)
                backward(each, step)
        pending = model.get_pending_gradients()
        assert all(p.grad is None for p in model.parameters())
        for param, theirs in zip(model.parameters(), expected.parameters()):
            unreduced, partial = pending[param]
            assert torch.equal(unreduced, theirs.grad.unreduced.to_local())
            assert torch.equal(partial, theirs.grad.partial.to_local()) and partial.shape == param.to_local().shape
            partial.mul_(2)
            theirs.grad.partial.mul_(2)
        for each in (model, expected):
            each.synchronize_gradients()
        assert_equal(wholes(model), wholes(expected))

    @ranks(2)
    def test_zero_grad_of_a_group_drops_its_own():
        for set_to_none in (True, False):
            model, expected = layers(), layers()
            model.set_gradient_view("pending")
            optimizer = torch.optim.SGD(model.parameters())
            model.set_requires_gradient_sync(False)
            backward(model, 0)
            assert "not synchronized" in error_of(optimizer.step)
            optimizer.zero_grad(set_to_none)
            assert len(model.get_pending_gradients()) == 4
            model[0].zero_grad(set_to_none)
            assert set(model.get_pending_gradients()) == {*model[1].parameters()}
            assert "not synchronized" in error_of(optimizer.step)
            backward(expected, 0)
            model.synchronize_gradients()
            assert_equal(wholes(model[0]), [None, None])
            assert_equal(wholes(model[1]), wholes(expected[1]))
            optimizer.step()
            # The next step is as if there had been no gradients.
            backward(model, 1)
            model.zero_grad(set_to_none)
            assert model.get_pending_gradients() == {}
            model.set_requires_gradient_sync(True)
            fresh = layers()
            fresh.load_state_dict(model.state_dict())
            for each in (model, fresh):
                backward(each, 2)
            assert_equal(wholes(model), wholes(fresh))

    @ranks(2)
    def test_what_waits_keeps_its_bits_beside_a_reduced_history():
        """256 + 1 is 256 in bfloat16: the history stays apart from sums that later passes take away again."""
        model = fully_shard(nn.Linear(1, 2, bias=False).to(torch.bfloat16), mesh=init_device_mesh("cpu", (2,)))
        model.set_gradient_view("pending")
        for value in (1.0, 256.0, -256.0):
            model.set_requires_gradient_sync(value == 1.0)
            model(torch.full((1, 1), value, dtype=torch.bfloat16)).sum().backward()
        model.synchronize_gradients()
        assert model.weight.grad.full_tensor().flatten().tolist() == [1.0, 1.0]

    @ranks(2)
    def test_wrong_uses_raise_before_anything_changes():
        model = layers(shard_placement_fn=lambda param: Shard(1) if param.ndim > 1 else None)
        assert "placed as Shard(1)" in error_of(lambda: model.set_gradient_view("pending"))
        assert "'fsdp_grad' or 'pending', got 'grad'" in error_of(lambda: model.set_gradient_view("grad"))
        model.set_requires_gradient_sync(False)
        backward(model, 0)
        assert all(isinstance(p.grad, FSDPGrad) for p in model.parameters())  # As before.
        assert "call synchronize_gradients() or zero_grad() first" in error_of(lambda: model.set_gradient_view("fsdp_grad"))


class OffloadByNameTest(unittest.TestCase):
    @given(st.dictionaries(st.text("abc", min_size=1, max_size=3), st.integers(0, 9), max_size=6), st.integers(0, 40))
    def test_the_largest_are_chosen_first_and_never_above_the_budget(self, sizes, budget):
        chosen = largest_first(sizes.items(), budget)
        order = sorted(sizes, key=lambda name: (-sizes[name], name))
        assert chosen == order[: len(chosen)] and sum(sizes[name] for name in chosen) <= budget
        if len(chosen) < len(order):  # One more would be too many.
            assert sum(sizes[name] for name in order[: len(chosen) + 1]) > budget
        assert chosen == largest_first(reversed(sizes.items()), budget)

    def test_a_budget_gives_policies_by_name(self):
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        model[1].weight = nn.Parameter(model[1].weight.detach().double())
        policies = cpu_offload_by_budget(model, 168 + 140, pin_memory=False)
        self.assertEqual(policies, dict.fromkeys(("1.weight", "0.weight"), CPUOffloadPolicy(pin_memory=False)))
        self.assertEqual(cpu_offload_by_budget(model, 167), {})
        for wrong in (-1, True, "1GB", float("nan")):
            self.assertIn(repr(wrong), error_of(lambda: cpu_offload_by_budget(model, wrong)))
        with fake_group(2):
            fully_shard(model[0], mesh=init_device_mesh("cpu", (2,)))
            self.assertEqual(set(cpu_offload_by_budget(model, 10_000)), {"1.weight", "1.bias"})  # What a call would shard.

    @ranks(2)
    def test_parameters_train_as_without_offload_each_where_its_policy_says():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        on_disk = Offload(optimizer=1.0)
        policies = {"0.weight": CPUOffloadPolicy(pin_memory=False), "1.weight": on_disk, "1.bias": OffloadPolicy()}
        if dist.get_rank():
            policies = dict(reversed(policies.items()))  # Their order says nothing.
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)), offload_policy=policies)
        groups = {tuple(param.fqn for param in group.params): group for group in model._ragged_groups(True)}
        assert sorted(groups) == [("0.bias", "1.bias"), ("0.weight",), ("1.weight",)]
        assert groups[("0.weight",)].offloads_params and not groups[("1.weight",)].offloads_params
        assert groups[("1.weight",)].plan.part(Offload) is on_disk or groups[("1.weight",)].plan.part(Offload) == on_disk
        expected = layers()
        pairs = (model, offloaded(torch.optim.AdamW, model)), (expected, torch.optim.AdamW(expected.parameters()))
        for each, optimizer in pairs:
            for step in range(3):
                backward(each, step)
                optimizer.step()
                optimizer.zero_grad()
        assert_equal([p.full_tensor() for p in model.parameters()], [p.full_tensor() for p in expected.parameters()])

    @ranks(2)
    def test_unknown_names_and_other_policies_on_one_rank_raise_on_all_ranks():
        mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
        cases = [
            ({"0.weight": CPUOffloadPolicy(), "2.weight": CPUOffloadPolicy()}, "offload_policy names '2.weight'"),
            ({"0.weight": CPUOffloadPolicy()} if rank else {}, "offload_policy"),
            ({"0.weight": CPUOffloadPolicy(pin_memory=bool(rank))}, "pin_memory"),
            ({"0.weight": "cpu"}, "is no policy"),
            (
                {"0.weight": CPUOffloadPolicy} if rank else {"0.weight": CPUOffloadPolicy()},
                "is no policy" if rank else "rank 1",
            ),
        ]
        for policies, text in cases:
            model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
            error = error_of(lambda: fully_shard(model, mesh=mesh, offload_policy=policies))
            assert text in error, (text, error)
            assert not any(isinstance(param, DTensor) for param in model.parameters())


class Lent(TwoTensor):
    """A frozen parameter of one rank is computed with as it lies, in two tensors."""

    asked = 0
    declines = False

    def fsdp_get_unsharded_view(self, mesh, module, mp_policy):
        assert mesh.size() == 1 and isinstance(module, nn.Linear) and mp_policy.output_dtype == torch.float32
        Lent.asked += 1
        return None if Lent.declines else Lent(self.a, self.b)

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        return (self.a, self.b), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        if out is not None:
            return None
        return Lent(*outputs), outputs


class OnlyLent(TwoTensor):
    def fsdp_get_unsharded_view(self, mesh, module, mp_policy):
        return OnlyLent(self.a, self.b)


class UnshardedViewTest(unittest.TestCase):
    def sharded(self, kind, frozen=True):
        Lent.asked, Lent.declines = 0, False
        model = nn.Linear(8, 4).requires_grad_(not frozen)
        model.weight = nn.Parameter(kind(torch.ones(4, 8), 2 * torch.ones(4, 8)), requires_grad=not frozen)
        policy = MixedPrecisionPolicy(output_dtype=torch.float32)
        return fully_shard(model, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy, reshard_after_forward=False)

    def pointers(self, model):
        """Of what the model has computed with, and of the shard."""
        group = next(group for group in model._ragged_groups(False) if group.params[0].fqn == "weight")
        param = group.params[0]
        return [(each.a.data_ptr(), each.b.data_ptr()) for each in (param.unsharded, param.sharded._local_tensor)]

    def test_a_frozen_parameter_of_one_rank_is_computed_with_where_it_lies(self):
        with fake_group(1):
            model = self.sharded(Lent)
            local = model.weight._local_tensor
            for value in (1.0, 3.0, 5.0):
                with torch.no_grad():
                    model.load_state_dict({"weight": model.weight * 0 + value, "bias": model.bias * 0})
                    output = model(torch.ones(2, 8))
                self.assertEqual(*self.pointers(model))
                self.assertTrue(torch.equal(output.a, torch.full((2, 4), 8 * value)), output)
                model.reshard()
                self.assertTrue(local.a.untyped_storage().nbytes())  # Nobody frees it.
            self.assertEqual(Lent.asked, 1)
            model.requires_grad_(True)  # Its optimizer writes to the shard, and backward reads what autograd has saved.
            output = model(torch.ones(2, 8))
            self.assertNotEqual(*self.pointers(model))
            self.assertTrue(torch.equal(output.a, torch.full((2, 4), 40.0)), output)
            model.reshard()
            model.requires_grad_(False)
            model(torch.ones(2, 8))
            self.assertEqual(*self.pointers(model))

    def test_of_two_frozen_parameters_one_may_train_again(self):
        with fake_group(1):
            Lent.asked, Lent.declines = 0, False
            model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
            for module in model:
                module.weight = nn.Parameter(Lent(torch.ones(4, 4), torch.ones(4, 4)), requires_grad=False)
            policy = MixedPrecisionPolicy(output_dtype=torch.float32)
            fully_shard(model, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
            (group,) = model._ragged_groups(False)
            for lends in (True, False):
                model(torch.ones(2, 4))
                pointers = [(each.unsharded.a.data_ptr(), each.sharded._local_tensor.a.data_ptr()) for each in group.params]
                self.assertEqual([one == other for one, other in pointers], [True, lends])
                model.reshard()
                model[1].weight.requires_grad_(True)

    def test_a_type_may_decline_and_must_keep_shape_and_dtype(self):
        with fake_group(1):
            model = self.sharded(Lent)
            Lent.declines = True
            output = model(torch.ones(2, 8))
            self.assertNotEqual(*self.pointers(model))
            self.assertEqual(output.b.shape, (2, 4))
            with mock.patch.object(Lent, "fsdp_get_unsharded_view", lambda self, *args: self.a.double()):
                other = self.sharded(Lent)
                self.assertIn("the parameter's local shape, dtype, and device", error_of(lambda: other(torch.ones(2, 8))))

    def test_a_type_with_a_view_only_is_for_frozen_parameters_of_one_rank(self):
        with fake_group(1):
            model = self.sharded(OnlyLent)
            self.assertEqual(model(torch.ones(2, 8)).b.shape, (2, 4))
            other = self.sharded(OnlyLent, frozen=False)
            self.assertIn("give it fsdp_pre_all_gather", error_of(lambda: other(torch.ones(2, 8))))


class GradDtypeTest(unittest.TestCase):
    def test_without_a_reduce_dtype_gradients_are_reduced_in_one_that_holds_all(self):
        float16, bfloat16, float32, float64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
        cases = [
            # dtype, grad_dtype of weight and bias ("-": unset), reduce_dtype of the policy, expected
            (bfloat16, "-", "-", None, bfloat16),
            (bfloat16, float32, "-", None, float32),
            (bfloat16, float32, float32, None, float32),
            (bfloat16, float16, "-", None, float32),
            (bfloat16, None, "-", None, bfloat16),
            (bfloat16, None, float64, None, float64),
            (bfloat16, float32, "-", float64, float64),
            (float32, bfloat16, bfloat16, None, bfloat16),
            (float32, bfloat16, "-", None, float32),
        ]
        with fake_group(2):
            for dtype, weight, bias, reduce_dtype, expected in cases:
                model = nn.Linear(4, 4).to(dtype)
                for param, grad_dtype in ((model.weight, weight), (model.bias, bias)):
                    if grad_dtype != "-":
                        param.grad_dtype = grad_dtype
                mesh, policy = init_device_mesh("cpu", (2,)), MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
                fully_shard(model, mesh=mesh, mp_policy=policy)
                model(torch.ones(1, 4, dtype=dtype)).sum().backward()
                (group,) = model._ragged_groups(False)
                self.assertEqual(group.reduce_dtype, expected)
                for param, grad_dtype in ((model.weight, weight), (model.bias, bias)):
                    self.assertEqual(param.grad.dtype, {"-": dtype, None: expected}.get(grad_dtype, grad_dtype))


if __name__ == "__main__":
    unittest.main()
