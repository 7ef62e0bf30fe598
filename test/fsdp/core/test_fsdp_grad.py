"""FSDPGrad and synchronize_gradients(): gradients of passes without sync are never used in part, and none is lost."""

from __future__ import annotations

import contextlib
import copy
import pickle
import re
import tempfile
import unittest
from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.distributed as dist
from common import collectives_seen, error_of, fake_group, ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.two_tensor import TwoTensor

from torch_ragged import RaggedShard
from torch_ragged.checkpoint import TrainState, save
from torch_ragged.fsdp import ZERO1, FSDPGrad, MixedPrecisionPolicy, fully_shard, reshard_to
from torch_ragged.optim import Muon


class Branches(nn.Module):
    """Two layers, and one that only some ranks use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.other = nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, uses_other: bool = False) -> torch.Tensor:
        y = self.second(self.first(x).tanh())
        return y + self.other(x) if uses_other else y


class Sent(TwoTensor):
    """A type with its own all-gather. The model computes with a plain tensor."""

    def fsdp_pre_all_gather(self, mesh):
        return (self.a,), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        return None if out is not None else (outputs[0], outputs)


def sharded(mesh=None, model=None, **options) -> nn.Module:
    model = model or Branches()
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model.first, model.second):
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def batch(step: int, rank: int | None = None) -> torch.Tensor:
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def zeroed_beside_a_plain_one(model: nn.Module) -> None:
    model.other.bias.grad = model.other.bias.grad.clone()
    torch._foreach_zero_([param.grad for param in model.parameters()])


def backward(model: nn.Module, step: int, uses_other: bool = False) -> None:
    model(batch(step), uses_other).square().sum().backward()


def fulls(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else p.grad.full_tensor() for name, p in model.named_parameters()}


def refused(use: Callable[[], object], pattern: str) -> None:
    assert re.search(pattern, error_of(use)), (pattern, error_of(use))


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for (name, mine), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        assert type(mine.grad) is type(theirs.grad), (name, type(mine.grad), type(theirs.grad))
        if mine.grad is not None:
            assert torch.equal(mine.grad.to_local(), theirs.grad.to_local()), name


class SynchronizeTest(unittest.TestCase):
    @ranks(2)
    def test_bits_are_those_of_a_last_backward_with_sync():
        for options in (
            {},
            {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
            {"placements": ZERO1},
            {"shard_placement_fn": lambda param: Shard(param.ndim - 1)},
            {"shard_placement_fn": lambda param: Shard(0)},
        ):
            expected, model = sharded(**options), sharded(**options)
            for each in (expected, model):
                backward(each, 0)  # .grad is set before the first pass without sync.
                for step in (1, 2, 3):
                    each.set_requires_gradient_sync(each is expected and step == 3)
                    backward(each, step)
            with CommDebugMode() as mode:
                assert all(isinstance(p.grad, FSDPGrad) for p in model.first.parameters())
            assert mode.get_total_counts() == 0
            read = fulls(model)
            model.synchronize_gradients()
            assert_same(model, expected)
            for name, gradient in fulls(expected).items():  # What was read before is what has come.
                assert (gradient is None) == (read[name] is None or not read[name].any()), name
                assert gradient is None or torch.equal(gradient, read[name]), name
            with CommDebugMode() as mode:
                model.synchronize_gradients()  # There is nothing left to do.
            assert mode.get_total_counts() == 0
            assert not model.first._ragged_states(False)[0].requires_gradient_sync  # The setting stays.

    @ranks(4)
    def test_replicas():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        expected, model = sharded(mesh), sharded(mesh)
        for each in (expected, model):
            for step, (syncs, reduces) in enumerate(((True, False), (False, False), (True, False), (True, each is expected))):
                each.set_requires_gradient_sync(syncs)
                each.set_requires_all_reduce(reduces)
                backward(each, step)
                if step == 1:
                    grad = each.first.weight.grad
                    assert grad.unreduced.placements == (Partial("avg"), Partial("avg"))
                    assert grad.partial.placements[0] == Partial("avg") and isinstance(grad.partial.placements[1], RaggedShard)
        assert model.first.weight.grad.unreduced is None  # Only shards wait.
        read = fulls(model)
        model.synchronize_gradients()
        assert_same(model, expected)
        for name, gradient in fulls(expected).items():
            assert gradient is None or torch.equal(gradient, read[name]), name

    @ranks(2)
    def test_a_rank_reads_its_own_gradient_in_the_shape_of_the_parameter():
        """The buffer has the pieces of ranks one by one if columns are cut, and rows of padding for a tensor type."""
        reference = Branches()
        backward(reference, 0)
        for cut, is_typed in ((0, False), (1, False), (0, True)):
            model = Branches()
            if is_typed:
                model.first.weight = nn.Parameter(Sent(model.first.weight.detach(), model.first.weight.detach().clone()))
            model = sharded(model=model, shard_placement_fn=lambda param, cut=cut: Shard(min(cut, param.ndim - 1)))
            model.set_requires_gradient_sync(False)
            backward(model, 0)
            for name in ("first", "second"):
                weight, expected = getattr(model, name).weight, getattr(reference, name).weight.grad
                assert torch.equal(weight.grad.unreduced.to_local(), expected), (cut, is_typed, name)

    @ranks(2)
    def test_a_rank_that_has_not_used_a_parameter_takes_part():
        """Without an FSDPGrad there, the other rank would wait in the collective of a read for ever."""
        model, expected = sharded(), sharded()
        for each in (model, expected):
            each.set_requires_gradient_sync(each is expected)
            backward(each, 0, uses_other=dist.get_rank() == 0)
        assert isinstance(model.other.weight.grad, FSDPGrad)
        assert (model.other.weight.grad.unreduced is None) == (dist.get_rank() == 1)
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        theirs = nn.utils.get_total_norm([p.grad for p in expected.parameters()])
        assert torch.equal(norm.full_tensor(), theirs.full_tensor())
        model.synchronize_gradients()
        assert_same(model, expected)

    @ranks(2)
    def test_a_model_cut_by_tensor_parallelism():
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        models = []
        for syncs in (True, False):
            torch.manual_seed(0)
            model = nn.Linear(6, 4, bias=False)
            model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh["tp"], [Shard(0)]))
            fully_shard(model, mesh=mesh["dp"])
            model.set_requires_gradient_sync(syncs)
            model(
                distribute_tensor(batch(0, rank=7).repeat(1, 2)[:, :6], mesh["tp"], [Replicate()])
            ).sum().full_tensor().backward()
            models.append(model)
        assert models[1].weight.grad.unreduced.placements == (Partial("avg"), Shard(0))
        assert models[1].weight.grad.unreduced.to_local().shape == (2, 6)
        read = models[1].weight.grad.full_tensor()
        models[1].synchronize_gradients()
        assert_same(*models)
        assert torch.equal(read, models[0].weight.grad.full_tensor())

    @ranks(2)
    def test_parameters_that_stay_gathered_are_gathered_once_in_a_step():
        """The recipe of docs/recipes.md: one all-gather of a group in a step, and the bits of the loop without it."""
        kept, other = sharded(), sharded()
        kept.set_reshard_after_forward(False)
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in (kept, other)]
        for _ in range(2):
            for model, optimizer in zip((kept, other), optimizers, strict=True):
                model.set_requires_gradient_sync(False)
                model.set_reshard_after_backward(model is other)
                gathers = []
                for step in range(3):
                    with CommDebugMode() as mode:
                        backward(model, step, uses_other=True)
                    gathers.append(collectives_seen(mode))
                model.synchronize_gradients()
                assert all(isinstance(param, DTensor) for param in model.parameters())  # What the step changes.
                optimizer.step()
                optimizer.zero_grad()
                assert gathers == ([(3, 0), (0, 0), (0, 0)] if model is kept else [(5, 0)] * 3), gathers
        for mine, theirs in zip(kept.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine.to_local(), theirs.to_local())


class UseTest(unittest.TestCase):
    @ranks(2)
    def test_what_would_use_a_part_raises():
        model = sharded()
        model.set_requires_gradient_sync(False)
        optimizers = [
            torch.optim.SGD(model.parameters(), lr=0.1, foreach=False),
            torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True),
            torch.optim.AdamW(model.parameters(), lr=0.1, fused=True),
            Muon([p for p in model.parameters() if p.ndim == 2], lr=0.1),
        ]
        backward(model, 0)
        weight = model.first.weight
        before, grad = weight.full_tensor(), weight.grad
        for optimizer in optimizers:
            for _ in range(3):
                refused(optimizer.step, "RuntimeError: .* not synchronized: .*weight.*synchronize_gradients")
        for use in (
            lambda: weight.data.sub_(grad.to_local()),
            lambda: grad.add_(1),
            lambda: grad.clamp_(max=1),
            lambda: grad.mul_(grad),
            lambda: grad.mul_(torch.ones(7, 5)),
            lambda: grad.div_(2, rounding_mode="floor"),
            lambda: grad.view(-1),
            lambda: grad[0],
            lambda: grad.placements,
            lambda: grad.untyped_storage(),
            lambda: pickle.dumps(grad),
            lambda: copy.deepcopy(grad),
        ):
            refused(use, "RuntimeError: .* not synchronized.*synchronize_gradients")
        for use in (  # By hand, without an optimizer.
            lambda: weight.data.add_(grad, alpha=-0.1),
            lambda: torch._foreach_add_([weight.data], [grad]),
            lambda: weight.data.copy_(grad),
            lambda: weight.data.lerp_(grad, 0.1),
        ):
            refused(use, "RuntimeError: .*(not synchronized|mixed torch.Tensor and DTensor)")
        assert "unreduced (7, 5)" in repr(grad)
        assert torch.equal(weight.full_tensor(), before)
        model.synchronize_gradients()
        for use in (grad.full_tensor, lambda: grad.placements):
            refused(use, "RuntimeError: this FSDPGrad is out of date")
        for optimizer in optimizers:
            optimizer.step()
        assert not torch.equal(weight.full_tensor(), before)

    @ranks(2)
    def test_scaling_and_zeros_act_on_all_parts():
        mesh = init_device_mesh("cpu", (2,))
        half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for is_local, change in (
            (True, lambda model: [p.grad.mul_(0.5) for p in model.parameters()]),
            (True, lambda model: torch._foreach_mul_([p.grad for p in model.parameters()], 0.5)),
            (True, lambda model: torch._foreach_div_([p.grad for p in model.parameters()], torch.tensor(2.0))),
            (False, zeroed_beside_a_plain_one),
            (True, lambda model: model.zero_grad(set_to_none=False)),
            (True, lambda model: [p.grad.fill_(0) for p in model.parameters()]),
            (True, lambda model: model.zero_grad()),
            (False, lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.25)),
            (False, lambda model: setattr(model.first.weight, "grad", model.first.weight.grad.clone().mul_(2))),
        ):
            for policy in (MixedPrecisionPolicy(), half):
                model, expected, results = sharded(mesh, mp_policy=policy), sharded(mesh, mp_policy=policy), []
                for each in (expected, model):
                    for step in (0, 1):
                        each.set_requires_gradient_sync(each is expected or not step)
                        backward(each, step, uses_other=True)
                    fulls(each)  # What was read before the change must not be used after it.
                    with CommDebugMode() if is_local else contextlib.nullcontext() as mode:
                        change(each)
                    assert mode is None or not mode.get_total_counts()
                    results.append(fulls(each))
                    each.set_requires_gradient_sync(True)
                    backward(each, 2, uses_other=True)
                results += [fulls(expected), fulls(model)]
                for theirs, mine in (results[:2], results[2:]):
                    for name, value in mine.items():
                        torch.testing.assert_close(value, theirs[name], rtol=2e-6, atol=2e-6, msg=name)

    def test_zeros_drop_gradients_whose_memory_is_gone(self):
        with fake_group(2):
            params = list(sharded().parameters())
        for param in params:
            param.grad = FSDPGrad(SimpleNamespace(has_memory=False), 0, param, param.dtype, None)
        torch._foreach_zero_([param.grad for param in params])
        self.assertTrue(all(param.grad is None for param in params))

    @ranks(2)
    def test_dropped_gradients_stay_dropped():
        model = sharded()
        model.set_requires_gradient_sync(False)
        backward(model, 0, uses_other=True)
        model.zero_grad()
        model.synchronize_gradients()
        assert all(param.grad is None for param in model.parameters())
        backward(model, 0, uses_other=True)
        model.first.weight.grad = None  # One parameter alone.
        model.synchronize_gradients()
        assert model.first.weight.grad is None and type(model.first.bias.grad) is DTensor
        model.zero_grad()
        backward(model, 0)
        model.reset_iter_state()
        assert all(param.grad is None for param in model.parameters())
        model.synchronize_gradients()
        assert all(param.grad is None for param in model.parameters())

    @ranks(2)
    def test_a_checkpoint_between_micro_batches_changes_nothing():
        """States of an optimizer that has never stepped are made by a step with other gradients."""
        model, expected = sharded(), sharded()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for each in (model, expected):
            each.set_requires_gradient_sync(False)
            backward(each, 0, uses_other=True)
        with tempfile.TemporaryDirectory() as folder:
            folders = [folder]
            dist.broadcast_object_list(folders)
            save(folders[0], TrainState(model, optimizer))
        for each in (model, expected):
            backward(each, 1, uses_other=True)
            each.synchronize_gradients()
        assert_same(model, expected)

    @ranks(2)
    def test_grad_scaler_sees_infinities_of_other_ranks():
        for value in (1.0, float("inf")):
            model = sharded()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            model.set_requires_gradient_sync(False)
            loss = model(batch(0)).sum() * (value if dist.get_rank() == 1 else 1.0)
            scaler.scale(loss).backward()
            before = model.first.weight.grad.full_tensor()
            scaler.unscale_(optimizer)
            found = max(float(each) for each in scaler._found_inf_per_device(optimizer).values())
            found = torch.tensor(found)
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
            assert bool(found) == (value != 1.0)
            if value == 1.0:
                model.synchronize_gradients()
                assert torch.equal(model.first.weight.grad.full_tensor(), before / 4)

    @ranks(2)
    def test_hooks_run_once_and_calls_at_a_wrong_time_are_errors():
        model, calls = sharded(), []
        model.first.set_all_reduce_hook(lambda shard: calls.append(shard.mul_(2)))
        model.set_requires_gradient_sync(False)
        backward(model, 0)
        refused(model.first.synchronize_gradients, "RuntimeError: .*must be called on the root")
        assert not calls
        refused(model.first.weight.grad.full_tensor, "RuntimeError: .*set_all_reduce_hook")
        output = model(batch(1))
        errors = []
        output.register_hook(lambda _: errors.append(error_of(model.synchronize_gradients)))
        output.sum().backward()
        assert "outside of forward and backward" in errors[0], errors
        model.synchronize_gradients()
        assert len(calls) == 1
        model.synchronize_gradients()
        assert len(calls) == 1

    @ranks(2)
    def test_conversions_keep_what_waits():
        model, expected = sharded(), sharded()
        for each in (model, expected):
            backward(each, 0)
            each.set_requires_gradient_sync(each is expected)
            backward(each, 1)
            each.to(each.first.weight.device)
        refused(model.double, "RuntimeError: .*not in .grad yet")
        model.synchronize_gradients()
        assert_same(model, expected)


class DtypeTest(unittest.TestCase):
    @ranks(2)
    def test_gradients_may_have_a_wider_dtype_than_the_parameter():
        """257 has no bfloat16: sums over passes keep it only if ``.grad`` is float32."""
        mesh = init_device_mesh("cpu", (2,))
        for after in (False, True):
            model = nn.Linear(1, 2).to(torch.bfloat16)
            if not after:
                model.weight.grad_dtype = torch.float32
            fully_shard(model, mesh=mesh)
            if after:
                model.weight.grad_dtype = torch.float32
            weight = model.weight
            for syncs in ((True, True), (True, False), (False, False)):
                for sync, value in zip(syncs, (256.0, 1.0), strict=True):
                    model.set_requires_gradient_sync(sync)
                    model(torch.full((1, 1), value, dtype=torch.bfloat16)).sum().backward()
                assert (weight.grad.dtype, weight.grad.placements if syncs[1] else None) == (
                    torch.float32,
                    weight.placements if syncs[1] else None,
                )
                # Passes without sync add up in reduce_dtype: fully_shard has taken it from grad_dtype, if that was set before.
                expected = torch.full((2, 1), 257.0 if syncs[0] or not after else 256.0)
                assert torch.equal(weight.grad.full_tensor(), expected), (syncs, weight.grad.full_tensor())
                model.synchronize_gradients()
                assert torch.equal(weight.grad.full_tensor(), expected)
                assert model.bias.grad.dtype == torch.bfloat16
                model.zero_grad()
            model.set_requires_gradient_sync(True)
            model(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
            reshard_to(model, None, init_device_mesh("cpu", (2,)))
            assert model.weight.grad_dtype == model.weight.grad.dtype == torch.float32
            model.to(torch.float16)
            assert (model.weight.grad_dtype, model.bias.grad_dtype) == (torch.float32, torch.float16)


if __name__ == "__main__":
    unittest.main()
