"""Static modules: the bits of eager mode without DTensor inside, and a report that says what keeps a module eager."""

import contextlib
import copy
import dataclasses
import gc
import itertools
import random
import re
import textwrap
import unittest
import weakref
from types import SimpleNamespace
from unittest import mock

import expecttest
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import enter_fake_group, error_of, ranks, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._redistribute import DTensorRedistributePlanner
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from torch_ragged.fsdp import Float4Policy, Float8Policy, float8_weight
from torch_ragged.spmd import Plan, _static, parallelize
from torch_ragged.spmd._static_facts import Facts

BLOCK = r"blocks\.\d+"


class Block(nn.Module):
    def __init__(self, p=0.0, bias=False):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8, bias=bias)
        self.dropout = nn.Dropout(p)

    def forward(self, x):
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, block=Block, **options):
        super().__init__()
        self.embedding, self.head = nn.Embedding(24, 8), nn.Linear(8, 24, bias=False)
        self.blocks = nn.ModuleList(block(**options) for _ in range(2))
        self.checkpointed = False

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.checkpointed == "reentrant") if self.checkpointed else block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def plan_of(sequence=True, grad=True, first=True):
    plan = Plan().shard(rf"{BLOCK}\.up\.(weight|bias)", Shard(0), "tp").shard(rf"{BLOCK}\.down\.weight", Shard(1), "tp")
    if sequence:
        plan.shard(rf"{BLOCK}\.norm.<in>", Shard(1), "tp").shard(rf"{BLOCK}\.norm.<out>", Replicate(), "tp")
    elif grad:
        plan.shard(rf"{BLOCK}\.norm.<out>", Replicate(), "tp", grad=Replicate())
    plan.shard(rf"{BLOCK}\.down.<out>", Shard(1) if sequence else Replicate(), "tp")
    if sequence:
        plan.shard("head.<in>", Replicate(), "tp")
    if sequence and first:
        plan.shard("embedding.<out>", Shard(1), "tp")
    return plan.shard("<in:ids>", Shard(0), "dp")


def make(seed=0, **options):
    torch.manual_seed(seed)
    return Net(**options)


def losses_of(model, batches=(4, 4, 8), accumulate=1):
    torch.manual_seed(1)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for size in batches:
        for _ in range(accumulate):
            loss = model(torch.randint(24, (size, 6 if size == 4 else 7)))  # 7 is cut unevenly over the sequence.
            loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        losses.append(model(torch.arange(24).view(4, 6)).item())
    return losses


class Shifting(Block):
    """On local tensors, the mean would be that of a rank's part."""

    shifts = False

    def forward(self, x):
        x = super().forward(x)
        return x - x.mean(1, keepdim=True) if self.shifts else x


class OfCodes(nn.Module):
    """Rows of whole tiles of float4."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x.float().square().mean()


class Pair(nn.Module):
    """Two layers, perhaps with one weight."""

    def __init__(self, tied):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
        if tied:
            self.layers[1].weight = self.layers[0].weight
        self.scale = nn.Parameter(torch.full((8,), 2.0))

    def forward(self, x):
        return (self.layers[1](F.gelu(self.layers[0](x))) * self.scale).sum()


class Inside(TorchDispatchMode):
    """Ops that see a DTensor while a static module runs, or, of an eager model, while ``module`` runs."""

    def __init__(self, model, module=None):
        super().__init__()
        self.found, self.ops, self._depth, self._is_static = [], 0, 0, hasattr(model, "static_modules")
        if module is not None:  # In a static module, a hook would make it eager.
            module.register_forward_pre_hook(lambda *_: self._move(1))
            module.register_forward_hook(lambda *_: self._move(-1), prepend=True)

    def _move(self, step):
        self._depth += step

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self._depth or (self._is_static and _static._now.region is not None):
            self.ops += 1
            if any(isinstance(leaf, DTensor) for leaf in pytree.tree_leaves((args, kwargs))):
                self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def check_bias(cases):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for sequence, unit, is_zero in cases:
        plan = plan_of(sequence)
        plan = plan.unit(BLOCK, "dp") if unit else plan.default(Replicate())
        model = make(bias=True)
        for block in model.blocks:  # The warm-up does not see how often a bias of zeros is added.
            (nn.init.zeros_ if is_zero else nn.init.normal_)(block.down.bias)
        eager = parallelize(copy.deepcopy(model), plan, mesh)
        static = parallelize(copy.deepcopy(model), plan, mesh, mode="static")
        found = losses_of(static, accumulate=2)
        assert found == losses_of(eager, accumulate=2), (sequence, unit, is_zero)
        torch.testing.assert_close(found, losses_of(model, accumulate=2), rtol=0, atol=1e-5)
        assert {"blocks.0", "blocks.1"} <= set(static.static_modules.report.modules), static.static_modules.report


def check_blocks(takes_all):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for sequence in (True, False):
        for unit in (False, True) if takes_all else [not sequence]:
            plan = plan_of(sequence)
            plan = plan.unit(BLOCK, "dp") if unit else plan.default(Replicate())
            eager, static = parallelize(make(), plan, mesh), parallelize(make(), plan, mesh, mode="static")
            found = losses_of(static, accumulate=2)
            assert found == losses_of(eager, accumulate=2), (sequence, unit)
            torch.testing.assert_close(found, losses_of(make(), accumulate=2), rtol=0, atol=1e-5)
            assert {"blocks.0", "blocks.1"} <= set(static.static_modules.report.modules), static.static_modules.report
            inside = Inside(static)
            with inside:
                static(torch.arange(24).view(4, 6))
            assert inside.found == [] and inside.ops > 8, inside.found
            watched = Inside(eager, eager.blocks[1].down)
            with watched:
                eager(torch.arange(24).view(4, 6))
            assert watched.found  # What the check above would see.
            assert isinstance(static.blocks[1].down.weight, DTensor)
            names = {name for name, _ in make().named_parameters()}
            assert {name for name, _ in static.named_parameters()} == names == set(static.state_dict())


class StaticTest(unittest.TestCase):
    def test_static_blocks_have_the_bits_of_eager_mode_and_no_dtensor_inside(self):
        run_ranks(4, check_blocks, False)

    @pytest.mark.slow
    def test_static_blocks_have_the_bits_of_eager_mode_in_all_combinations(self):
        run_ranks(4, check_blocks, True)

    @ranks(2)
    def test_checkpointed_blocks_and_dropout():
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        plan = plan_of().default(Replicate())
        for kind in ("reentrant", "not reentrant"):
            eager, static = parallelize(make(), plan, mesh), parallelize(make(), plan, mesh, mode="static")
            eager.checkpointed = static.checkpointed = kind
            assert losses_of(static) == losses_of(eager)
            assert static.static_modules.report.modules, static.static_modules.report
        eager, static = parallelize(make(p=0.2), plan, mesh), parallelize(make(p=0.2), plan, mesh, mode="static")
        found = losses_of(static)
        assert found == losses_of(eager)
        torch.testing.assert_close(found, losses_of(make(p=0.2)), rtol=0, atol=1e-5)
        report = static.static_modules.report
        assert "blocks.0.dropout" in report.reasons and {"blocks.0", "blocks.1"} <= set(report.modules), report
        static.eval(), eager.eval()
        assert static(torch.arange(24).view(4, 6)).item() == eager(torch.arange(24).view(4, 6)).item()

    def test_the_bias_of_a_row_parallel_layer_is_added_once(self):
        run_ranks(4, check_bias, [(True, True, True), (False, False, False)])

    @pytest.mark.slow
    def test_the_bias_of_a_row_parallel_layer_is_added_once_in_all_combinations(self):
        run_ranks(4, check_bias, [*itertools.product((True, False), repeat=3)])

    @ranks(2)
    def test_tied_and_frozen_parameters():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        plan = Plan().shard(r"layers\.\d+\.<out>", Replicate(), "tp", grad=Replicate()).shard("<in>", Replicate(), "tp")
        plan.default(Replicate())
        torch.manual_seed(0)
        model = Pair(tied=True)
        eager = parallelize(copy.deepcopy(model), plan, mesh)
        static = parallelize(model, plan, mesh, mode="static")
        x = torch.randn(3, 8)
        for frozen in (False, False, True, True, False):
            for each in (eager, static):
                each.scale.requires_grad_(not frozen)
                each.zero_grad()
                each(x).backward()
            assert (static.scale.grad is None) == frozen
            for (name, one), other in zip(eager.named_parameters(), static.parameters(), strict=True):
                assert (one.grad is None) == (other.grad is None), name
                assert one.grad is None or torch.equal(one.grad.to_local(), other.grad.to_local()), name
        assert static.static_modules.report.modules == ("",)

    @ranks(2)
    def test_a_shape_that_a_boundary_inside_would_cut_unevenly_runs_in_eager_mode():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        plan = Plan().shard("<in>", Replicate(), "tp").shard(r"layers\.0\.<out>", Shard(0), "tp")
        plan.shard(r"layers\.1\.<out>", Replicate(), "tp").default(Replicate())
        torch.manual_seed(0)
        single = Pair(tied=False)
        model = parallelize(copy.deepcopy(single), plan, mesh, mode="static")
        for rows in (4, 4, 3, 3, 2, 4):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(model(x).full_tensor(), single(x))
        assert model.static_modules.report.modules == ("",), model.static_modules.report

    @ranks(2)
    def test_ranks_of_which_one_is_eager_compute_the_same():
        """Facts may differ on one rank. A static call and an eager one issue the same collectives, so no rank waits."""
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        plan = plan_of().default(Replicate())
        eager, static = parallelize(make(), plan, mesh), parallelize(make(), plan, mesh, mode="static")
        static.blocks[1].flag = 0

        def change(model):
            if model is static and mesh.get_rank() == 1:
                model.blocks[1].flag += 1
            return model

        for batch in (4, 4, 4):
            change(static)
            assert losses_of(static, (batch, batch)) == losses_of(eager, (batch, batch))
        assert "blocks.0" in static.static_modules.report.modules

    @ranks(2)
    def test_a_trial_leaves_no_hook_on_parameters_and_draws_nothing():
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        plan, ids = plan_of().default(Replicate()), torch.arange(24).view(4, 6)
        model, other = parallelize(make(p=0.2), plan, mesh, mode="static"), parallelize(make(p=0.2), plan, mesh)
        hooks = [len(param._backward_hooks or ()) for param in model.parameters()]
        for _ in range(3):
            state = torch.get_rng_state()
            loss = model(ids)
            after = torch.get_rng_state()
            torch.set_rng_state(state)
            assert loss.item() == other(ids).item() and torch.equal(after, torch.get_rng_state())
            loss.backward()
        assert [len(param._backward_hooks or ()) for param in model.parameters()] == hooks
        assert "blocks.0" in model.static_modules.report.modules

    @ranks(2)
    def test_a_check_compares_a_step_with_eager_mode_to_the_bit_and_leaves_nothing():
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        for in_units in (True, False):
            plan = plan_of().unit(BLOCK, "dp") if in_units else plan_of().default(Replicate())
            model, ids = parallelize(make(block=Shifting), plan, mesh, mode="static"), torch.arange(24).view(4, 6)
            model(ids).backward()  # Gradients that are there stay.
            before = {name: (param.detach().clone(), param.grad.clone()) for name, param in model.named_parameters()}
            state = torch.get_rng_state()
            model.static_modules.check(lambda model=model: model(ids).backward())
            assert {"blocks.0", "blocks.1"} <= set(model.static_modules.report.modules), model.static_modules.report
            assert torch.equal(torch.get_rng_state(), state)
            for name, param in model.named_parameters():
                assert torch.equal(param, before[name][0]) and torch.equal(param.grad, before[name][1]), name
        check, optimizer, counter = model.static_modules.check, torch.optim.SGD(model.parameters(), lr=0.1), itertools.count()
        assert error_of(check, lambda: model(torch.randint(24, (4, 6))).backward()) == ""  # Equal random numbers in each run.
        given = None if dist.get_rank() else lambda: model(ids).backward()
        assert "takes a function that runs a step, got a NoneType" in error_of(check, given)  # On rank 0, too.
        model.register_buffer("mask", torch.ones(1, 6).expand(4, 6))  # Its memory can't be written to as a whole.
        assert error_of(check, lambda: model(ids).backward()) == ""
        text = error_of(check, lambda: (model(ids).backward(), optimizer.step()))
        assert "the step writes to " in text and "leave optimizer.step() out of it" in text, text
        text = error_of(check, lambda: (model(ids) * next(counter)).backward())
        assert re.search(r"ValueError: .*is another one in two eager runs", text), text
        for block in model.blocks:
            block.shifts = True
        with mock.patch.object(Facts, "hold", lambda self: True):  # As if no guard could see it.
            text = error_of(check, lambda: model(ids).backward())
        assert re.search(r"AssertionError: .* has other bits in static mode than in eager mode", text), text

    @ranks(2)
    def test_an_error_without_a_text_keeps_a_module_eager():
        class Strict(Block):
            def forward(self, x):
                if not isinstance(x, DTensor):
                    raise AssertionError
                return super().forward(x)

        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        model = parallelize(make(block=Strict), plan_of().default(Replicate()), mesh, mode="static")
        losses_of(model, batches=(4, 4))
        report = model.static_modules.report
        assert report.reasons["blocks.0"] == "on local tensors, its forward raises AssertionError", report
        assert "blocks.0.up" in report.modules, report

    @ranks(4)
    def test_hooks_of_users_on_parameters_are_called_as_in_eager_mode():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

        def run(unit, **options):
            plan = plan_of().unit(BLOCK, "dp") if unit else plan_of().default(Replicate())
            model, seen = parallelize(make(), plan, mesh, **options), []
            norm, up = model.blocks[0].norm.weight, model.blocks[0].up.weight
            if not unit:  # On a unit's parameters, autograd calls those of the unsharded ones.
                norm.register_hook(lambda grad: (seen.append(grad.full_tensor()), 2 * grad)[1])
            up.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.full_tensor()))
            seen.append(torch.tensor(losses_of(model, batches=(4, 4), accumulate=2)))
            if options:
                assert {"blocks.0", "blocks.1"} <= set(model.static_modules.report.modules), model.static_modules.report
            if not unit and options:
                found, before = [], len(seen)
                model.blocks[1].down.weight.register_hook(lambda grad: found.append(grad.placements))
                model(torch.arange(24).view(4, 6)).backward()
                assert len(found) == 1, found
                del seen[before:]
                loss = model(torch.arange(24).view(4, 6))
                handle = model.blocks[1].up.weight.register_hook(lambda grad: grad)
                assert "register hooks on parameters before forward" in error_of(loss.backward)
                handle.remove()
            return seen

        for unit in (False, True):
            static, eager = run(unit, mode="static"), run(unit)
            assert len(static) == len(eager) == (5 if unit else 9)  # None of the warm-up.
            for one, other in zip(static, eager):  # Buckets of gradients are in another order, and so are sums over 4 ranks.
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)

    @ranks(4)
    def test_checkpointed_units_are_static_too():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        plan = plan_of().unit(BLOCK, "dp")
        for kind in ("reentrant", "not reentrant"):
            eager, static = parallelize(make(), plan, mesh), parallelize(make(), plan, mesh, mode="static")
            eager.checkpointed = static.checkpointed = kind
            assert losses_of(static, (4, 4), accumulate=2) == losses_of(eager, (4, 4), accumulate=2)
        assert {"blocks.0", "blocks.1"} <= set(static.static_modules.report.modules), static.static_modules.report

    @ranks(2)
    def test_annotations_and_factories_inside_of_a_module_keep_it_eager():
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        for add in (
            lambda plan: plan.annotate(rf"{BLOCK}\.dropout.<in>", Shard(1), "tp"),
            lambda plan: plan.factory(rf"{BLOCK}\.dropout", Shard(0), "tp", functions="zeros"),
        ):
            plan = add(plan_of().default(Replicate()))
            eager, static = parallelize(make(p=0.2), plan, mesh), parallelize(make(p=0.2), plan, mesh, mode="static")
            assert losses_of(static) == losses_of(eager)
            assert "blocks.0" not in static.static_modules.report.modules
            assert "a rule" in static.static_modules.report.reasons["blocks.0.dropout"]

    @ranks(2)
    def test_a_trial_that_cannot_be_watched_leaves_a_module_eager_and_its_gradients():
        mesh, ids = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")), torch.arange(24).view(4, 6)
        model = parallelize(make(), plan_of().default(Replicate()), mesh, mode="static")
        eager = parallelize(make(), plan_of().default(Replicate()), mesh)
        for each in (model, eager):
            each(ids).backward()

        def stringify_transform_infos(*args, **options):
            raise ValueError("no name")

        with mock.patch.object(DTensorRedistributePlanner, "stringify_transform_infos", stringify_transform_infos):
            loss = model(ids)
        assert "raises ValueError: no name" in model.static_modules.report.reasons[""]
        assert loss.item() == eager(ids).item()
        loss.backward()
        eager(ids).backward()
        for (name, one), other in zip(model.named_parameters(), eager.parameters()):
            assert torch.equal(one.grad.full_tensor(), other.grad.full_tensor()), name

    @ranks(2)
    def test_weights_that_hold_codes_are_read_anew_in_each_step():
        mesh, losses = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), {}
        for mode, policy in itertools.product(
            ("eager", "static"), (Float4Policy(), Float8Policy(weight_factory=float8_weight))
        ):
            torch.manual_seed(0)
            plan = Plan().unit(BLOCK, "dp", mp_policy=policy).shard("<in:x>", Shard(0), "dp")
            model = parallelize(OfCodes(), plan, mesh, mode=mode)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            for step in range(4):
                loss = model(torch.randn(4, 32, generator=torch.Generator().manual_seed(step)))
                loss.backward()
                losses.setdefault((type(policy), mode), []).append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
            for block in model.blocks:  # A trial leaves memory that can be freed.
                for group in block._ragged_groups(recurse=False):
                    assert not any(buffer.is_allocated for buffer in group.encoding.buffers())
        for kind in (Float4Policy, Float8Policy):
            assert losses[kind, "eager"] == losses[kind, "static"], losses
            assert len(set(losses[kind, "eager"])) == 4

    @pytest.mark.slow
    @ranks(2)
    def test_what_is_compiled_is_eager_and_is_traced_without_a_trial():
        mesh, ids = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")), torch.arange(24).view(4, 6)
        kind_of = _static._Region._kind_of

        def kind_outside_of_a_trace(self, *args):
            assert not torch.compiler.is_compiling(), "torch.compile traces static mode"
            return kind_of(self, *args)

        for when in (0, 2):  # Before the first forward, or when the block is static already.
            plan = plan_of(sequence=False).default(Replicate())
            model, eager = (parallelize(make(), plan, mesh, mode=mode) for mode in ("static", "eager"))
            torch._dynamo.reset()
            with mock.patch.object(_static._Region, "_kind_of", kind_outside_of_a_trace):
                for step in range(4):
                    if step == when:
                        model.blocks[0].compile(backend="eager")
                    losses = [each(ids) for each in (model, eager)]
                    if when == 0:  # From the first forward on.
                        reasons = model.static_modules.report.reasons
                        assert reasons["blocks.0.up"] == "blocks.0 is compiled", reasons
                    assert losses[0].item() == losses[1].item()
                    for loss in losses:
                        loss.backward()
            for (name, one), other in zip(model.named_parameters(), eager.parameters()):
                torch.testing.assert_close(one.grad.full_tensor(), other.grad.full_tensor(), msg=name)
            report = model.static_modules.report
            assert "blocks.1" in report.modules, report

    @ranks(2)
    def test_an_error_of_the_model_is_raised_at_once_and_changes_nothing():
        mesh, ids = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")), torch.arange(24).view(4, 6)
        model, calls = parallelize(make(), plan_of().default(Replicate()), mesh, mode="static"), []
        model.head.weight.grad = torch.ones_like(model.head.weight)

        def fail(self, x):
            calls.append(x)
            return 1 / 0

        for _ in range(2):
            with mock.patch.object(nn.LayerNorm, "forward", fail):
                assert "division by zero" in error_of(model, ids)
        assert "blocks.0" not in model.static_modules.report.modules
        assert model.head.weight.grad.full_tensor().eq(1).all()
        for _ in range(2):
            model(ids).backward()
        assert "blocks.0" in model.static_modules.report.modules

    @ranks(2)
    def test_plain_inputs_that_broadcast_otherwise_and_caches_make_a_call_eager():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        single, x = make(block=Scaled).blocks[0], torch.randn(2, 6, 8)
        plan = Plan().shard("<in:x>", Shard(0), "dp").shard("<out>", Shard(0), "dp", grad=Shard(0)).default(Replicate())
        model, cache = parallelize(make(block=Scaled).blocks[0], plan, mesh, mode="static"), SimpleNamespace(kept=None)
        for rows in (1, 2, 1, 2, 1):  # A rank has one row of two.
            factor = torch.rand(rows, 1, 8)
            torch.testing.assert_close(model(x, factor).full_tensor(), single(x, factor))
        assert model.static_modules.report.modules == ("",)
        inside = Inside(model)
        with inside, torch.no_grad():
            for _ in range(2):
                model(x, factor)
            assert inside.found == [] and inside.ops
            for _ in range(3):
                model(x, factor, cache)
        assert isinstance(cache.kept, DTensor)

    @ranks(2)
    def test_ranks_that_ask_for_other_modes_raise():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        mode = "static" if mesh.get_local_rank() else "eager"
        plan = Plan().default(Replicate())
        assert "parallelize was called differently" in error_of(parallelize, make(), plan, mesh, mode=mode)
        assert "mode must be 'eager' or 'static', got 'fast'" in error_of(parallelize, make(), plan, mesh, mode="fast")


FLAG = {"center": False}
LIMIT = 6


class Options:
    def __init__(self):
        self.inner, self.sizes = SimpleNamespace(center=False), [1, 2]


class Feed(nn.Module):
    """A block whose code reads all that code can read. A mean over rows or features that are cut is not a local op."""

    center_of_class = False

    def __init__(self, kind):
        super().__init__()
        self.up, self.down, self.kind = nn.Linear(8, 16), nn.Linear(16, 8), kind
        self.drop, self.gate = nn.Dropout(0.0), nn.Parameter(torch.zeros(8))
        self.options, self.center, self.calls = Options(), False, [0]
        state = {"center": False}
        self.switch = lambda: state.update(center=True)
        self.closure = lambda: state["center"]

    def wants_center(self, x, flag):
        answers = {
            "attribute": lambda: self.center,
            "flag": lambda: flag,
            "mode": lambda: not self.training,
            "shape": lambda: x.shape[0] > LIMIT,
            "global": lambda: FLAG["center"],
            "limit": lambda: LIMIT < 3,
            "closure": lambda: self.closure(),
            "class": lambda: self.center_of_class,
            "object": lambda: self.options.inner.center,
            "list": lambda: len(self.options.sizes) > 2,
            "gradients": lambda: not torch.is_grad_enabled(),
            "frozen": lambda: not self.up.weight.requires_grad,
            "step": lambda: self.calls[0] > 3,
            "value": lambda: bool(x.sum() > 1e6),
        }
        return answers.get(self.kind, lambda: False)()

    def forward(self, x, flag=False):
        if self.kind == "step":
            self.calls[0] += 1
        h = self.drop(torch.tanh(self.up(x)))
        if self.wants_center(x, flag):
            h = h - h.mean((0, -1), keepdim=True)
        if self.kind == "gate":
            h = h * torch.arange(x.shape[0]).add(1).log()[:, None]
        if self.kind == "stored":
            self.aux = h
        h = self.down(h)
        return x + (self.gate * h if self.kind == "gate" else h)


class RandomFeed(Feed):
    def wants_center(self, x, flag):
        return random.random() < -1


class Holder(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        feed = RandomFeed(kind) if kind == "random" else Feed(kind)
        self.first, self.feed, self.head, self.flag = nn.Linear(8, 8), feed, nn.Linear(8, 4), False
        self.double()

    def forward(self, x):
        x = self.feed(self.first(x), self.flag)
        return self.head(x) + (self.feed.aux.sum() if self.feed.kind == "stored" else 0.0)


def double(module, args, output):
    return output * 2


CHANGES = {
    "attribute": lambda m: setattr(m.feed, "center", True),
    "flag": lambda m: setattr(m, "flag", True),
    "mode": lambda m: m.eval(),
    "shape": lambda m: None,
    "global": lambda m: FLAG.update(center=True),
    "limit": lambda m: globals().update(LIMIT=2),
    "closure": lambda m: m.feed.switch(),
    "class": lambda m: setattr(Feed, "center_of_class", True),
    "object": lambda m: setattr(m.feed.options.inner, "center", True),
    "list": lambda m: m.feed.options.sizes.append(3),
    "gradients": lambda m: None,
    "frozen": lambda m: m.feed.up.weight.requires_grad_(False),
    "unfrozen": lambda m: m.feed.up.requires_grad_(True),
    "step": lambda m: None,
    "value": lambda m: None,
    "random": lambda m: None,
    "gate": lambda m: None,
    "stored": lambda m: None,
    "dropout": lambda m: setattr(m.feed.drop, "p", 0.5),
    "hook": lambda m: m.feed.up.register_forward_hook(double),
    "method": lambda m: setattr(m.feed.up, "forward", lambda x, up=m.feed.up: F.linear(x, up.weight) * 2),
    "layer": lambda m: m.feed.down.register_full_backward_hook(lambda module, given, grads: (given[0] * 2,)),
    "input": lambda m: None,
    "none": lambda m: None,
}


def run_program(model, kind):
    """Losses and gradients of six steps; what the kind says changes behind the third one."""
    FLAG["center"], Feed.center_of_class, globals()["LIMIT"] = False, False, 6
    found = []
    if kind == "unfrozen":
        model.feed.up.requires_grad_(False)
    torch.manual_seed(0)
    for step in range(6):
        if step == 3:
            CHANGES[kind](model)
        rows = 4 if step < 3 or kind != "shape" else 8
        x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        if kind == "input":
            x.requires_grad_()
        with torch.set_grad_enabled(kind != "gradients" or step < 3):
            loss = model(x).square().mean()
        if loss.requires_grad:
            loss.backward()
        grads = {name: None if param.grad is None else whole(param.grad) for name, param in model.named_parameters()}
        found.append((whole(loss), {**grads, "input": None if x.grad is None else whole(x.grad)}))
        with torch.no_grad():
            for param in model.parameters():
                if param.grad is not None:
                    param.sub_(param.grad, alpha=0.1)
        model.zero_grad()
    return found


def whole(tensor):
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


BRANCHES = ["attribute", "flag", "mode", "shape", "global", "limit", "closure", "class", "object", "list", "gradients"]
LATER = ["frozen", "unfrozen", "dropout", "hook", "method", "layer", "input"]
UNSEEN = ["step", "value", "random", "gate", "stored"]


def check_kinds(kinds, takes_all=False):
    """Each kind of program under both plans, or under one, the next kind under the other."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    rows = Plan().shard("<in>", Shard(0), "a").redistribute("<out>", Replicate(), "a").default(Replicate())
    columns = Plan().shard(r"feed\.up\.(weight|bias)", Shard(0), "a").shard(r"feed\.down\.weight", Shard(1), "a")
    columns.redistribute(r"feed\.down\.<out>", Replicate(), "a").default(Replicate())
    pairs = itertools.product(kinds, (rows, columns)) if takes_all else zip(kinds, itertools.cycle((rows, columns)))
    for kind, plan in pairs:
        single = Holder(kind)
        eager, static = (parallelize(Holder(kind), plan, mesh, mode=mode) for mode in ("eager", "static"))
        expected, by_eager, by_static = (run_program(each, kind) for each in (single, eager, static))
        for step, (one, other, last) in enumerate(zip(expected, by_eager, by_static)):
            where = (kind, step, str(static.static_modules.report))
            torch.testing.assert_close(other[0], one[0], rtol=1e-12, atol=1e-12)
            assert torch.equal(last[0], other[0]), where
            for name, grad in one[1].items():
                assert (grad is None) == (other[1][name] is None) == (last[1][name] is None), (*where, name)
                if grad is not None:
                    torch.testing.assert_close(other[1][name], grad, rtol=1e-10, atol=1e-12)
                    assert torch.equal(last[1][name], other[1][name]), (*where, name)
        assert static.static_modules.report.modules, where  # The check above is not of two eager models.


class ProgramTest(unittest.TestCase):
    """Static modules have the bits of eager mode in every step of programs that change behind the first ones."""

    @ranks(2)
    def test_branches_of_code_that_read_what_has_changed():
        check_kinds(BRANCHES)

    @ranks(2)
    def test_gradients_hooks_and_layers_that_come_later():
        check_kinds(LATER)

    @ranks(2)
    def test_values_steps_and_tensors_that_no_guard_can_see():
        check_kinds(UNSEEN)

    @pytest.mark.slow
    @ranks(2)
    def test_what_changes_between_steps_in_all_combinations():
        check_kinds([*BRANCHES, *LATER, *UNSEEN], takes_all=True)

    @ranks(2)
    def test_gradients_that_only_autograd_grad_asks_for_raise():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        plan = Plan().shard("<in>", Shard(0), "a").redistribute("<out>", Replicate(), "a").default(Replicate())
        model = parallelize(Holder("none"), plan, mesh, mode="static")
        for _ in range(3):
            x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
            model(x).sum().backward()
        assert model.static_modules.report.modules == ("",)
        params = list(model.parameters())
        for call in (
            lambda: torch.autograd.grad(model(x).sum(), params, allow_unused=True),
            lambda: torch.autograd.grad(model(x).sum(), [x, params[0]], allow_unused=True),
            lambda: model(x).sum().backward(inputs=params[:1]),
        ):
            told = error_of(call)
            assert "do not find a parameter of shape (8, 8) in a static module" in told, told
        (gradient,) = torch.autograd.grad(model(x).sum(), [x])
        x.grad = None
        model(x).sum().backward()
        assert torch.equal(gradient, x.grad)
        told = error_of(lambda: model(x).sum().backward(create_graph=True))
        assert "mode='eager' for second derivatives" in told, told

    @ranks(2)
    def test_two_calls_of_different_kinds_before_one_backward():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        plan = Plan().shard("<in>", Shard(0), "a").redistribute("<out>", Replicate(), "a").default(Replicate())
        single = Holder("flag")
        eager, static = (parallelize(copy.deepcopy(single), plan, mesh, mode=mode) for mode in ("eager", "static"))
        for step in range(4):
            found = []
            for model in (single, eager, static):
                model.zero_grad()
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
                short, long = model(x), model(torch.cat([x, x]))
                with torch.no_grad():
                    model(x)
                (short.sum() + long.square().sum()).backward()
                found.append([whole(param.grad) for param in model.parameters() if param.grad is not None])
            for one, other, last in zip(*found, strict=True):
                torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-12)
                assert torch.equal(other, last)
        assert static.static_modules.report.modules == ("",)

    @ranks(2)
    def test_gradients_of_static_and_eager_calls_before_one_backward_add_up_in_the_order_of_eager_mode():
        class Twice(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.eye(8) + 0.1)

            def forward(self, x):
                return (x @ self.weight).sin() @ self.weight

        class Borrows(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.calls = nn.Linear(8, 8), 0

            def forward(self, x):
                self.calls += 1  # So it is eager, and the module in it may be static.
                return F.linear(self.inner(F.linear(x, self.inner.weight)).tanh(), self.inner.weight)

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        plan = Plan().shard("<in>", Shard(0), "a").default(Replicate())
        for make in (lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), Twice, Borrows):
            single = make().double()
            eager, static = (parallelize(copy.deepcopy(single), plan, mesh, mode=mode) for mode in ("eager", "static"))
            # By rows: 4 is static from step 1 on, a number that comes first is eager.
            for step, rows in enumerate([(4,), (4,), (4, 6, 4), (8, 4, 4), (4, 4, 10, 4), (12, 4, 4, 14)]):
                grads = []
                for model in (eager, static):
                    model.zero_grad()
                    generator = torch.Generator().manual_seed(step)
                    xs = [torch.randn(n, 8, generator=generator, dtype=torch.float64) for n in rows]
                    sum((model(x) * (i + 0.3)).sin().mean() for i, x in enumerate(xs)).backward()
                    grads.append([param.grad.full_tensor() for param in model.parameters()])
                for ours, expected in zip(*reversed(grads), strict=True):
                    assert torch.equal(ours, expected), (make, step)

    @ranks(2)
    def test_inputs_whose_other_uses_are_in_an_output_of_a_class_or_stored_keep_the_order_of_eager_mode():
        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm, self.main, self.calls = nn.RMSNorm(8), nn.Linear(8, 8), 0

            def forward(self, x):
                self.calls += 1
                y = self.main(self.norm(x))
                self.stored = (x * 0.7).sin()
                return SimpleNamespace(value=x.cos() + y)

        class Both(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.block = nn.Linear(8, 8), Block()

            def forward(self, x):
                return self.block(self.first(x))

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        single = Both().double()
        plan = Plan().shard("<in>", Shard(0), "a").default(Replicate())
        eager, static = (parallelize(copy.deepcopy(single), plan, mesh, mode=mode) for mode in ("eager", "static"))
        for step in range(5):
            grads = []
            for model in (eager, static):
                model.zero_grad()
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
                (model(x).value.square().mean() + model.block.stored.mean()).backward()
                grads.append([param.grad.full_tensor() for param in model.parameters()])
            for ours, expected in zip(*reversed(grads), strict=True):
                assert torch.equal(ours, expected), step
        assert "block.main" in static.static_modules.report.modules

    @ranks(2)
    def test_gradients_that_several_modules_add_up_keep_the_order_of_eager_mode():
        """RMSNorm uses its input twice, and the residual once more: eager mode adds one gradient after the other."""

        class Residual(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm, self.main, self.calls = nn.RMSNorm(8), nn.Linear(8, 8), 0

            def forward(self, x):
                self.calls += 1  # So it is eager, and modules in it may be static.
                return x + self.main(self.norm(x))

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        plan = Plan().shard("<in>", Shard(0), "a").default(Replicate())
        single = nn.Sequential(nn.Linear(3, 8), Residual(), Residual(), nn.RMSNorm(8)).double()
        eager, static = (parallelize(copy.deepcopy(single), plan, mesh, mode=mode) for mode in ("eager", "static"))
        with mock.patch.object(_static, "try_module", wraps=_static.try_module) as trials:
            for step in range(6):
                grads = []
                for model in (eager, static):
                    model.zero_grad()
                    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
                    model(x).square().mean().backward()
                    grads.append([whole(param.grad) for param in model.parameters()])
                assert all(map(torch.equal, *grads)), step
        tried = [call.args[1] for call in trials.call_args_list]
        assert len(tried) == len(set(tried)), tried  # What has refused is not tried again.
        report = static.static_modules.report
        assert {"0", "1.main", "2.main", "3"} == set(report.modules), report
        assert report.reasons["1.norm"] == "the gradient of input 0 would be added up in another order", report

    @ranks(2)
    def test_code_around_static_modules_that_uses_their_inputs_more_often_later_keeps_the_order_of_eager_mode():
        """RMSNorm uses its input twice. A hook, an attribute, an argument of the model bring one more use, in a later step."""

        class First(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer, self.calls = nn.Linear(3, 8), 0

            def forward(self, x):
                self.calls += 1
                return self.layer(x)

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.norm, self.last, self.calls = First(), nn.RMSNorm(8), nn.Linear(8, 8), 0
                self.options, self.adds = {"adds": False}, False

            def forward(self, x, adds=False):
                self.calls += 1  # So it is eager, and modules in it may be static.
                x = self.first(x)
                y = self.last(self.norm(x))
                return x * 0.7 + y if adds or self.adds or self.options["adds"] else y

        def keep(module, args, output):
            module.seen = output

        def change(model, kind, is_on):
            if kind == "attribute":
                model.adds = is_on
            elif kind == "dict":
                model.options["adds"] = is_on
            elif kind == "hook" and is_on:
                model.first.register_forward_hook(keep)
            elif kind == "closure" and not model.calls:  # From the first step on.
                model.first.register_forward_hook(lambda module, args, output: kept.append(output))
            return {"adds": True} if kind == "argument" and is_on else {}

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        plan = Plan().shard("<in>", Shard(0), "a").default(Replicate())
        kept = []
        for kind in ("argument", "attribute", "dict", "hook", "closure"):
            single = Model().double()
            eager, static = (parallelize(copy.deepcopy(single), plan, mesh, mode=mode) for mode in ("eager", "static"))
            for step in range(7):
                grads = []
                for model in (eager, static):
                    model.zero_grad()
                    options = change(model, kind, step in (2, 4, 5, 6))
                    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
                    loss = model(x, **options).square().mean()
                    seen = kept.pop() if kept else vars(model.first).pop("seen", None)
                    (loss if seen is None else loss + seen.sin().mean()).backward()
                    grads.append([whole(param.grad) for param in model.parameters()])
                assert all(map(torch.equal, *grads)), (kind, step)
            report = static.static_modules.report
            assert "last" in report.modules and "norm" not in report.modules, report

    @ranks(2)
    def test_two_arguments_that_are_one_tensor_are_another_kind_of_call():
        """Self-attention multiplies by all of its weight at once."""

        class Attention(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.randn(16, 8, dtype=torch.float64))

            def forward(self, x, y):
                first, second = (x @ self.weight.T).chunk(2, -1) if x is y else (x @ self.weight[:8].T, y @ self.weight[8:].T)
                return first.sin() * (second if x is y else second * 2)

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        plan = Plan().shard("<in:x>", Shard(0), "a").shard("<in:y>", Shard(0), "a").default(Replicate())
        torch.manual_seed(0)
        single = nn.ModuleDict({"first": nn.Linear(8, 8), "attention": Attention()}).double()

        class Calls(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.attention, self.calls = single["first"], single["attention"], 0

            def forward(self, x, y):
                self.calls += 1
                h = self.first(x)
                return self.attention(h, h if y is None else self.first(y))

        eager, static = (parallelize(copy.deepcopy(Calls()), plan, mesh, mode=mode) for mode in ("eager", "static"))
        for step, is_one in enumerate((True, True, True, False, False, True, False, False)):
            found = []
            for model in (eager, static):
                generator = torch.Generator().manual_seed(step)
                x, y = (torch.randn(4, 8, generator=generator, dtype=torch.float64) for _ in range(2))
                model.zero_grad()
                result = model(x, None if is_one else y)
                result.square().mean().backward()
                found.append([whole(result), *(whole(param.grad) for param in model.parameters())])
            assert all(map(torch.equal, *found)), step
        assert set(static.static_modules.report.modules) == {"first", "attention"}, static.static_modules.report

    @ranks(2)
    def test_a_module_to_whose_output_the_code_around_it_writes_is_eager():
        """The output of a layer with a bias is a view. A write to a view changes how its gradient flows, and is reduced."""

        class Writes(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer, self.last, self.calls = nn.Linear(8, 8), nn.Linear(8, 4), 0

            def forward(self, x):
                self.calls += 1
                return self.last(self.layer(x).mul_(0.5).add_(1.0))

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        plan = Plan().shard("<in>", Replicate(), "tp").shard(r"last\.(weight|bias)", Shard(0), "tp").default(Replicate())
        torch.manual_seed(0)
        single = Writes().double()
        eager, static = (parallelize(copy.deepcopy(single), plan, mesh, mode=mode) for mode in ("eager", "static"))
        for step in range(4):
            grads = []
            for model in (eager, static):
                model.zero_grad()
                x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
                model(x).sin().mean().backward()
                grads.append([whole(param.grad) for param in model.parameters()])
            assert all(map(torch.equal, *grads)), step
        report = static.static_modules.report
        if report.modules != ("layer", "last"):  # Since torch 2.15, the output is no view.
            assert report.modules == ("last",) and "to which the code around it writes" in report.reasons["layer"], report

    @ranks(2)
    def test_outputs_need_gradients_as_in_eager_mode():
        class Outputs(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(8, 8)

            def forward(self, x):
                h = self.layer(x)
                return h, h.detach(), (h > 0).to(h.dtype)

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        model = parallelize(Outputs(), Plan().shard("<in>", Shard(0), "a").default(Replicate()), mesh, mode="static")
        for _ in range(3):
            h, detached, mask = model(torch.randn(4, 8))
            assert h.requires_grad and not detached.requires_grad and not mask.requires_grad
            (h * mask + detached).sum().backward()
        assert model.static_modules.report.modules == ("",), model.static_modules.report

    @ranks(2)
    def test_a_checkpoint_inside_of_a_module_keeps_it_eager():
        class Again(Feed):
            def forward(self, x, flag=False):
                inner = checkpoint(lambda h: self.drop(torch.tanh(self.up(h))), x, use_reentrant=self.kind == "reentrant")
                return x + self.down(inner)

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        plan = Plan().shard("<in>", Shard(0), "a").redistribute("<out>", Replicate(), "a").default(Replicate())
        for kind in ("reentrant", "not reentrant"):
            single = Holder("none")
            single.feed = Again(kind)
            single.feed.drop.p = 0.5
            single.double()
            eager, static = (parallelize(copy.deepcopy(single), plan, mesh, mode=mode) for mode in ("eager", "static"))
            by_eager, by_static = run_program(eager, "none"), run_program(static, "none")
            for one, other in zip(by_eager, by_static):
                assert torch.equal(one[0], other[0]), kind
                for name, grad in one[1].items():
                    assert grad is None or torch.equal(grad, other[1][name]), (kind, name)
            assert "first" in static.static_modules.report.modules, static.static_modules.report

    @ranks(1)
    def test_a_trial_keeps_no_output_that_its_own_node_saves():
        """As tanh's does. Backward frees those that it comes through, and not all are in a trial."""

        class SavesOutputs(nn.Linear):
            def forward(self, x):
                return super().forward(x).tanh().exp().sigmoid()

        plan = Plan().shard("<in:input>", Shard(0), "a").default(Replicate())
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("a",))
        model = parallelize(nn.Sequential(SavesOutputs(7, 7), SavesOutputs(7, 7)), plan, mesh, mode="static")
        for step in range(4):
            loss = model(torch.randn(3, 7)).mean()
            if step % 2:
                loss.backward()
            del loss
        assert len(model.static_modules.report.modules) == 2, model.static_modules.report
        gc.collect()
        assert [t for t in gc.get_objects() if isinstance(t, torch.Tensor) and t.shape == (3, 7)] == []

    @ranks(1)
    def test_a_refused_trial_keeps_nothing_of_its_forward():
        """An error that is kept keeps its frames, with all tensors of the forward: its calls seem to wait for backward."""

        class Reads(nn.Linear):
            def forward(self, x):
                return super().forward(x) * x.detach().mean().item()

        class AsksForClasses(nn.Linear):
            def forward(self, x):
                return super().forward(x) * (2 if isinstance(x, DTensor) else 3)

        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("a",))
        plan = Plan().shard("<in:input>", Shard(0), "a").default(Replicate())
        gc.disable()
        for kind, width in ((Reads, 4), (AsksForClasses, 5)):
            model = parallelize(nn.Sequential(nn.Linear(width, width), kind(width, width)), plan, mesh, mode="static")
            for step in range(4):
                x = torch.randn(2, width)
                given = weakref.ref(x)
                model(x).mean().backward()
                del x
                assert given() is None, (kind, step)
            gc.collect()
            weights = [t for t in gc.get_objects() if isinstance(t, DTensor) and t.shape == (width, width)]
            assert {*map(id, weights)} == {id(t) for layer in model for t in (layer.weight, layer.weight.grad)}, kind
            assert "1" in model.static_modules.report.reasons, model.static_modules.report
        gc.enable()

    @ranks(2)
    def test_gradients_keep_their_strides_on_their_way_through_static_modules():
        """Of a permuted gradient, a sum adds the elements in another order than of its row-major copy."""

        class Scaled(nn.Module):
            def __init__(self):
                super().__init__()
                self.factor, self.dropout = nn.Parameter(torch.randn(8, dtype=torch.float64)), nn.Dropout(0.2)

            def forward(self, x):
                return self.dropout(x * self.factor)

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second = Scaled(), Scaled()

            def forward(self, x):
                y = self.second(self.first(x.sin()))
                print(end="")  # So it is eager.
                return y.transpose(1, 2).contiguous().cos()

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        for cut in (Replicate(), Shard(0), Shard(1)):
            plan = Plan().shard("<in>", cut, "a").default(Replicate())
            single = Model()
            eager, static = (parallelize(copy.deepcopy(single), plan, mesh, mode=mode) for mode in ("eager", "static"))
            for step in range(5):
                grads = []
                for model in (eager, static):
                    model.zero_grad()
                    torch.manual_seed(step)
                    model(torch.randn(6, 20, 8, dtype=torch.float64)).square().mean().backward()
                    grads.append([whole(param.grad) for param in model.parameters()])
                assert all(map(torch.equal, *grads)), (cut, step)
            assert static.static_modules.report.modules == ("first", "second"), static.static_modules.report

    @ranks(3)
    def test_a_module_in_a_reentrant_checkpoint_that_is_called_outside_of_it_too_keeps_the_order_of_eager_mode():
        """The checkpoint's backward adds to .grad, after the gradient of a use that came later in forward."""

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.block = nn.Linear(3, 8), nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh())

            def forward(self, x):
                return checkpoint(self.block, self.first(x), use_reentrant=True)

        mesh = init_device_mesh("cpu", (3, 1), mesh_dim_names=("tp", "dp"))
        plan = Plan().shard("<in>", Shard(0), "dp").default(Replicate())
        torch.manual_seed(0)
        single = Model().double()
        eager, static = (parallelize(copy.deepcopy(single), plan, mesh, mode=mode) for mode in ("eager", "static"))
        for step in range(6):
            grads = []
            for model in (eager, static):
                model.zero_grad()
                for micro in range(3):
                    generator = torch.Generator().manual_seed(9 * step + micro)
                    x, y = (torch.randn(6, n, generator=generator, dtype=torch.float64) for n in (3, 8))
                    (model(x).square().mean() + model.block(y).sin().mean()).backward()
                grads.append([whole(param.grad) for param in model.parameters()])
            assert all(map(torch.equal, *grads)), step

    @ranks(2)
    def test_a_backward_that_raises_leaves_no_gradient_for_the_next_one():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        plan = Plan().shard("<in>", Replicate(), "a").default(Replicate())
        model, x = parallelize(nn.Sequential(nn.Linear(8, 8)), plan, mesh, mode="static"), torch.ones(4, 8, requires_grad=True)
        for _ in range(3):
            model(x).sum().backward()
        assert model.static_modules.report.modules == ("",), model.static_modules.report
        handle = x.register_hook(lambda gradient: gradient.no_such_attribute)
        assert "no_such_attribute" in error_of(model(x).sum().backward)
        handle.remove()
        for _ in range(3):
            model.zero_grad()
            model(x).sum().backward()
            torch.testing.assert_close(whole(model[0].bias.grad), torch.full((8,), 4.0))

    @ranks(2)
    def test_an_interrupted_call_leaves_no_local_tensors_behind():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        plan = Plan().shard("<in>", Shard(0), "a").redistribute("<out>", Replicate(), "a").default(Replicate())
        single = Holder("none")
        static, x = parallelize(Holder("none"), plan, mesh, mode="static"), torch.arange(32, dtype=torch.float64).view(4, 8)
        for _ in range(3):
            static(x).sum().backward()
        assert static.static_modules.report.modules == ("",)
        with mock.patch.object(torch, "tanh", side_effect=KeyboardInterrupt), contextlib.suppress(KeyboardInterrupt):
            static(x)
        torch.testing.assert_close(whole(static(x)), single(x).detach(), rtol=1e-12, atol=1e-12)
        assert isinstance(static.first.weight, DTensor)


class Scaled(Block):
    def forward(self, x, factor, cache=None):
        x = super().forward(x) * factor
        if cache is not None:
            cache.kept = x
        return x


class Logits(nn.Module):
    """The loss is computed outside."""

    def __init__(self, bias=False):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=bias)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


@dataclasses.dataclass
class Record:
    hidden: torch.Tensor


class Inner(Logits):
    def forward(self, x):
        return Record(super().forward(x))


class Records(nn.Module):
    """Modules that pass their tensors in a dataclass."""

    def __init__(self):
        super().__init__()
        self.inner, self.last = Inner(), nn.Linear(8, 8)

    def forward(self, x):
        return Record(self.last(self.inner(x).hidden))


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 16)

    def forward(self, x):
        hidden = self.first(x)
        return self.head(hidden), hidden


class OutputTest(unittest.TestCase):
    @ranks(2)
    def test_gradients_may_have_other_placements_than_on_trial():
        """If the loss is one of logits, the gradient of ``first`` is pending a sum. Those of other losses are not."""
        torch.manual_seed(0)
        single, x = TwoOutputs(), torch.randn(2, 6, 8)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        plan = Plan().shard(r"head\.(weight|bias)", Shard(0), "tp").shard("<in>", Replicate(), "tp").default(Replicate())
        model = parallelize(copy.deepcopy(single), plan, mesh, mode="static")
        for loss in (
            lambda logits, hidden: logits.square().sum(),
            lambda logits, hidden: logits.square().sum(),
            lambda logits, hidden: hidden.square().sum(),
            lambda logits, hidden: (
                logits.square().sum() + hidden.redistribute(placements=[Shard(2)]).square().sum()
                if isinstance(hidden, DTensor)
                else logits.square().sum() + hidden.square().sum()
            ),
            lambda logits, hidden: logits.square().sum(),
        ):
            for each in (single, model):
                each.zero_grad()
                loss(*each(x)).backward()
            torch.testing.assert_close(model.first.weight.grad.full_tensor(), single.first.weight.grad)
        report = model.static_modules.report
        # The fourth loss adds a pending gradient and a whole one, which local tensors cannot.
        assert not report.modules and "with a gradient under R, its backward redistributes" in str(report), report

    @ranks(2)
    def test_gradients_under_other_placements_have_the_bits_of_eager_mode_in_each_step():
        """One that is pending a sum adds up rows first and ranks last, a whole one has added up ranks before."""

        class Parts(nn.Module):
            """With a boundary, a module that draws and two outputs."""

            def __init__(self):
                super().__init__()
                self.up, self.drop, self.down = nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 8)

            def forward(self, x):
                h = self.drop(torch.tanh(self.up(x)))
                return self.down(h), h * 3

        class Net(nn.Module):
            def __init__(self, is_eager):
                super().__init__()
                self.first, self.parts, self.last, self.head = nn.Linear(8, 8), Parts(), nn.Linear(8, 8), nn.Linear(8, 16)
                self.is_eager, self.calls = is_eager, 0

            def forward(self, x):
                self.calls += self.is_eager  # Then the modules in it are static, each by itself.
                y, h = self.parts(self.first(x))
                y = self.last(y)
                return self.head(y), y, h

        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        losses = {
            "pending": lambda logits, y, h: (logits * 0.3).sin().mean(),
            "whole": lambda logits, y, h: (y * 0.3).sin().mean(),
            "other": lambda logits, y, h: (h * 0.3).sin().mean(),
        }
        order = ("whole", "whole", "whole", "pending", "whole", "other", "pending", "pending", "whole")
        for is_eager, in_unit in ((True, False), (True, True), (False, False)):
            torch.manual_seed(0)
            single = Net(is_eager).double()
            plan = Plan().shard(r"head\.(weight|bias)", Shard(0), "tp").default(Replicate())
            plan.shard("parts.down.<in>", Shard(2), "tp").shard(r"parts\.down\.weight", Shard(1), "tp")
            plan.shard("parts.down.<out>", Replicate(), "tp", grad=None if is_eager else Replicate())
            if in_unit:
                plan.shard("<in>", Shard(0), "dp").unit("parts", "dp")
            eager, static = (parallelize(copy.deepcopy(single), plan, mesh, mode=mode) for mode in ("eager", "static"))
            for step, name in enumerate(order):
                found = []
                for model in (eager, static):
                    torch.manual_seed(step)
                    x = torch.randn(4, 6, 8, dtype=torch.float64)
                    model.zero_grad()
                    losses[name](*model(x)).backward()
                    found.append({key: whole(p.grad) for key, p in model.named_parameters() if p.grad is not None})
                assert found[0].keys() == found[1].keys()
                for key, grad in found[0].items():
                    assert torch.equal(grad, found[1][key]), (is_eager, in_unit, step, name, key)
            report = static.static_modules.report
            # On trial, the model does not know yet with which placements gradients reach outputs without one.
            modules = {"first", "parts", "last", "head"}
            if hasattr(torch.distributed, "all_gather_single"):
                assert modules == set(report.modules), report
            # Before torch 2.13, eager mode redistributes some of these gradients: such a module is eager, and says so.
            for name in modules - set(report.modules):
                assert re.search(rf"eager: {name}.*add a rule with grad=", str(report)), report

    @ranks(2)
    def test_gradients_with_which_eager_mode_redistributes_have_its_bits_and_the_module_is_eager_from_then_on():
        """A whole output whose gradient is cut: the gradients of a layer's parameters are sums over cut rows, then."""

        class Net(nn.Module):
            def __init__(self, draws):
                super().__init__()
                between = [nn.Dropout(0.3)] if draws else []
                self.first, self.last = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 16), *between, nn.Linear(16, 8))
                self.calls = 0

            def forward(self, x):
                self.calls += 1
                return self.last(self.first(x))

        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        for in_unit, draws in itertools.product((False, True), repeat=2):
            torch.manual_seed(0)
            single, factor = Net(draws).double(), torch.randn(4, 6, 8, dtype=torch.float64)
            plan = Plan().shard("<in>", Replicate(), "tp").default(Replicate())
            if in_unit:
                plan.unit("last", "dp")
            eager, static = (parallelize(copy.deepcopy(single), plan, mesh, mode=mode) for mode in ("eager", "static"))
            for step, cut in enumerate((None, None, None, 1, None, 1, 0, None)):
                found = []
                for model in (eager, static):
                    torch.manual_seed(step)
                    model.zero_grad()
                    x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
                    x.requires_grad_()
                    y = model(x)
                    by = factor if cut is None else distribute_tensor(factor, mesh, [Replicate(), Shard(cut)])
                    (y * by).sin().mean().backward()
                    grads = {key: whole(p.grad) for key, p in model.named_parameters()}
                    found.append({**grads, "x": x.grad, "the next numbers": torch.rand(3)})
                for key, grad in found[0].items():
                    assert torch.equal(grad, found[1][key]), (in_unit, draws, step, cut, key)
            told = static.static_modules.report.reasons["last"]
            assert "with a gradient under RS(1), its backward redistributes" in told, (in_unit, draws, told)

    @ranks(2)
    def test_a_retained_graph_and_a_later_one_whose_gradients_are_placed_otherwise_raise():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        plan = Plan().shard(r"1\.(weight|bias)", Shard(0), "tp").default(Replicate())

        class Net(nn.Sequential):
            calls = 0

            def forward(self, x):
                self.calls += 1  # So each layer is static by itself.
                hidden = self[0](x)
                return self[1](hidden), hidden

        model, x = parallelize(Net(nn.Linear(8, 8), nn.Linear(8, 4)), plan, mesh, mode="static"), torch.randn(4, 8)
        for _ in range(3):
            logits, hidden = model(x)
            hidden.sum().backward(retain_graph=True)
        before = logits.sum()
        logits, hidden = model(x)
        error = error_of((before + hidden.sum()).backward)
        assert "two forwards bring gradients to a parameter of shape (8, 8)" in error, error
        model.zero_grad()
        model(x)[1].sum().backward()
        torch.testing.assert_close(whole(model[0].bias.grad), torch.full((8,), 4.0))

    def static(self, model, prefix=""):
        enter_fake_group(self, 2)
        plan = Plan().shard(rf"{prefix}up\.(weight|bias)", Shard(0), "tp").shard(rf"{prefix}down\.weight", Shard(1), "tp")
        plan.shard(rf"{prefix}<in>", Replicate(), "tp", grad=Replicate()).shard(rf"{prefix}down.<out>", Replicate(), "tp")
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = parallelize(model, plan.default(Replicate()), mesh, mode="static")
        for _ in range(2):
            model(torch.randn(2, 6, 8))
        return model.static_modules.report

    def test_what_local_tensors_cannot_do_is_told(self):
        class Twice(nn.Linear):
            def forward(self, x):
                return (x @ self.weight).sin() @ self.weight

        class Prints(nn.Linear):
            def forward(self, x):
                print(end="")
                return super().forward(x)

        class Stored(nn.Linear):
            def forward(self, x):
                return super().forward(x), self.table

        class Checkpointed(nn.Linear):
            """What runs again in backward is not of DTensors."""

            def forward(self, x):
                local = x.to_local() if isinstance(x, DTensor) else x
                local = checkpoint(lambda h: h.sin().exp(), local, use_reentrant=False)
                return super().forward(DTensor.from_local(local, mesh, x.placements) if isinstance(x, DTensor) else local)

        class Doubles(nn.Linear):
            def forward(self, x):
                y = super().forward(x)
                return torch.add(x, y, alpha=2) if isinstance(x, DTensor) else torch.add(y, x, alpha=2)

        class Constant(nn.Linear):
            def forward(self, x):
                return super().forward(x) * torch.tensor(2.0 if isinstance(x, DTensor) else 3.0)

        class WritesWeight(nn.Linear):
            def forward(self, x):
                with torch.no_grad():
                    self.weight.mul_(1.0)
                return super().forward(x)

        class Reads(nn.Linear):
            """Of its two outputs, the first one has a gradient: others may come, with which a trial is another one."""

            def forward(self, x):
                return super().forward(x) * (1.0 + bool(x.detach().isnan().any())), self.bias * 2

        enter_fake_group(self, 2)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        for kind, told in (
            (Twice, "it uses parameter weight several times"),
            (Constant, "on local tensors, output 0 is computed in another way"),
            (WritesWeight, "aten.mul_.Tensor writes to a tensor that was made before"),
            (Reads, "it reads the value of a tensor, by which the code may branch"),
            (Prints, f"its code calls print() in {Prints.forward.__qualname__}"),
            (Stored, "on local tensors, it has other outputs"),
            (Checkpointed, "activation checkpointing in it runs code again in backward"),
            (Doubles, "on local tensors, output 0 is computed in another way"),
        ):
            plan = Plan().shard("<in>", Replicate(), "tp").default(Replicate())
            model = parallelize(kind(8, 8), plan, mesh, mode="static")
            model.table = distribute_tensor(torch.ones(2), mesh, [Replicate()])
            for _ in range(2):
                pytree.tree_leaves(model(torch.randn(4, 8, requires_grad=True)))[0].sum().backward()
            self.assertEqual(model.static_modules.report.reasons, {"": told})

    def test_each_backward_of_a_retained_graph_brings_the_gradients_of_eager_mode(self):
        """With the cut gradient, eager mode computes those of static modules, and draws again what forward has drawn."""

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.first = nn.Linear(8, 8)
                self.last = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 8))
                self.calls = 0

            def forward(self, x):
                self.calls += 1  # So it is eager, and modules in it may be static.
                return self.last(self.first(x))

        enter_fake_group(self, 2)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        plan = Plan().shard("<in>", Replicate(), "tp").default(Replicate())
        torch.manual_seed(0)
        single, factor = Net(), torch.randn(4, 6, 8)
        by = {
            "whole": DTensor.from_local(factor, mesh, [Replicate()], run_check=False),
            "cut": DTensor.from_local(factor[:, :3].contiguous(), mesh, [Shard(1)], run_check=False),
        }
        eager, static = (parallelize(copy.deepcopy(single), plan, mesh, mode=mode) for mode in ("eager", "static"))
        for step, order in enumerate((["whole"], ["whole"], ["whole", "cut", "whole"], ["whole"])):
            found = []
            for model in (eager, static):
                torch.manual_seed(step)
                x, grads = torch.randn(4, 6, 8, requires_grad=True), []
                y = model(x)
                for name in order:
                    model.zero_grad()
                    x.grad = None
                    (y * by[name]).sin().mean().backward(retain_graph=True)
                    grads += [x.grad, *(whole(param.grad) for param in model.parameters())]
                found.append(grads)
            self.assertTrue(all(map(torch.equal, *found)), step)
            self.assertEqual("last" in static.static_modules.report.modules, step in (1, 2))

    def test_a_use_in_the_second_of_two_forwards_is_seen_when_it_comes_again(self):
        """RMSNorm uses its input twice. A forward before the backward of another one runs as that one."""

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.norm, self.last, self.calls = nn.Linear(3, 8), nn.RMSNorm(8), nn.Linear(8, 8), 0

            def forward(self, x, adds=False):
                self.calls += 1  # So it is eager, and modules in it may be static.
                x = self.first(x).sin()
                y = self.last(self.norm(x))
                return x * 0.7 + y if adds else y

        enter_fake_group(self, 2)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        plan = Plan().shard("<in>", Replicate(), "tp").default(Replicate())
        torch.manual_seed(0)
        single = Model()
        eager, static = (parallelize(copy.deepcopy(single), plan, mesh, mode=mode) for mode in ("eager", "static"))
        for step in range(7):
            found = []
            for model in (eager, static):
                generator = torch.Generator().manual_seed(step)
                model.zero_grad()
                calls = [
                    model(torch.randn(6, 3, generator=generator), adds=adds)
                    for adds in ((False, True) if step > 2 else (False,))
                ]
                sum(y.square().mean() for y in calls).backward()
                found.append([whole(param.grad) for param in model.parameters()])
            if step != 3:  # In which nobody has seen the second one yet.
                self.assertTrue(all(map(torch.equal, *found)), step)
        reason = "the gradient of input 0 would be added up in another order"
        self.assertEqual(static.static_modules.report.reasons["norm"], reason)

    def test_trials_count_no_calls_in_buffers_and_arguments(self):
        class Counts(nn.Linear):
            def __init__(self):
                super().__init__(8, 8)
                self.register_buffer("calls", torch.zeros(()))

            def forward(self, x, calls=None):
                (self.calls if calls is None else calls).add_(1.0)
                return super().forward(x)

        enter_fake_group(self, 2)
        mesh, plan = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), Plan().default(Replicate())
        for by_argument, told in ((False, "static: (root)"), (True, "static: no module\neager: (root): it writes to input 1")):
            model, calls = parallelize(Counts(), plan, mesh, mode="static"), torch.zeros(())
            for call in range(1, 5):
                model(torch.ones(4, 8), *([calls] if by_argument else [])).sum().backward()
                self.assertEqual((calls if by_argument else whole(model.calls)).item(), call)
            self.assertEqual(str(model.static_modules.report), told)

    def test_the_gradient_of_a_permuted_part_has_the_strides_of_the_whole_one(self):
        enter_fake_group(self, 2)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        whole = torch.empty(6, 8, 20).permute(2, 0, 1)
        for dim in range(3):
            spec = SimpleNamespace(mesh=mesh, shape=whole.shape)
            local = torch.empty(whole.chunk(2, dim)[0].permute(1, 2, 0).shape).permute(2, 0, 1)
            made = _static._with_its_strides(local, spec, (Shard(dim),))
            self.assertEqual((made.stride(), made.shape, made.placements), (whole.stride(), whole.shape, (Shard(dim),)))

    def test_a_static_module_may_call_a_copy_of_itself_and_itself(self):
        class Again(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer, self.twin = nn.Linear(8, 8), None

            def forward(self, x, ends=False):
                return x.sin() if ends else (self.twin or self)(self.layer(x), ends=True)

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.again, self.head, self.calls = Again(), nn.Linear(8, 16), 0

            def forward(self, x):
                self.calls += 1  # So it is eager, and modules in it may be static.
                y = self.again(x)
                return y, self.head(y)

        enter_fake_group(self, 2)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        plan = Plan().shard(r"head\.(weight|bias)", Shard(0), "tp").shard("<in>", Replicate(), "tp").default(Replicate())
        torch.manual_seed(0)
        single = Net()
        for by_copy in (True, False):
            eager, static = (parallelize(copy.deepcopy(single), plan, mesh, mode=mode) for mode in ("eager", "static"))
            for step, output in enumerate((0, 0, 0, 1, 0)):  # The gradient of the second one is pending a sum.
                found = []
                for model in (eager, static):
                    if by_copy:
                        model.again.twin = model.again.twin or copy.deepcopy(model.again)
                    model.zero_grad()
                    model(torch.ones(4, 8) * step)[output].square().mean().backward()
                    found.append([whole(p.grad) for p in model.parameters() if p.grad is not None])
                self.assertTrue(all(map(torch.equal, *found)), (by_copy, step))
            self.assertIn("again", static.static_modules.report.modules, by_copy)

    def test_a_module_that_takes_a_part_of_a_units_parameter_tells_why_it_is_eager(self):
        class Penalty(nn.Module):
            def __init__(self):
                super().__init__()
                self.scale = nn.Parameter(torch.ones(()))

            def forward(self, weight):
                return (weight * self.scale).sin()

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer, self.penalty, self.calls = nn.Linear(8, 8), Penalty(), 0

            def forward(self, x):
                self.calls += 1  # So it is eager, and modules in it may be static.
                return self.layer(x).mean() + self.penalty(self.layer.weight * 0.5).sum()

        enter_fake_group(self, 2)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        plan = Plan().unit("layer", "dp").shard("<in>", Shard(0), "dp").default(Replicate())
        model = parallelize(Net(), plan, mesh, mode="static")
        for _ in range(3):
            model(torch.ones(4, 8)).backward()
        told = "the gradient of a tensor under RS(0,1)[64,0] is R: add a rule with grad="
        self.assertEqual(model.static_modules.report.reasons["penalty"], told)

    def test_a_model_that_returns_logits_is_static(self):
        self.assertEqual(self.static(Logits(bias=True)).modules, ("",))

    def test_modules_that_return_dataclasses_are_eager_and_those_in_them_are_static(self):
        report = self.static(Records(), r"inner\.")
        self.assertEqual(report.modules, ("inner.up", "inner.down", "last"))
        self.assertIn("a Record enters or leaves it", report.reasons["inner"])
        self.assertIn("a Record enters or leaves it", report.reasons[""])


class HardCoded(Block):
    """Knows the global number of features."""

    def forward(self, x):
        h = self.up(self.norm(x)).view(*x.shape[:-1], 2, 8)
        return x + self.down(h.flatten(-2))


class Positions(Block):
    """The result depends on which rows a rank has."""

    def forward(self, x):
        h = self.norm(x) * torch.arange(x.size(1)).view(-1, 1)
        return x + self.down(self.up(h))


class OwnLeaf(Block):
    scale = torch.ones(8, requires_grad=True)

    def forward(self, x):
        self.scale.mul(1)
        return x + self.down(self.up(self.norm(x)))


@unittest.skipUnless(
    torch.__version__.startswith("2.13"), "ops of DTensor and texts of errors differ between versions of torch"
)
class ReportTest(expecttest.TestCase):
    def report(self, plan, **options):
        enter_fake_group(self, 4)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = parallelize(make(**options), plan.default(Replicate()), mesh, mode="static")
        for _ in range(2):
            model(torch.zeros(4, 6, dtype=torch.int64)).backward()
        report = str(model.static_modules.report)
        return "\n".join("\n  ".join(textwrap.wrap(line, 110)) for line in report.splitlines())

    def test_a_redistribution_inside_of_a_module(self):
        self.assertExpectedInline(
            self.report(plan_of(first=False)),
            """\
static: head, blocks.0.norm, blocks.0.up, blocks.0.down, blocks.1
eager: embedding: the gradient of a tensor under S(0)R is S(0)S(1): add a rule with grad=
eager: blocks.0: aten.add.Tensor redistributes S(0)R->S(0)S(1): add a rule that does it at a module's boundary""",
        )

    def test_a_gradient_without_a_rule(self):
        self.assertExpectedInline(
            self.report(plan_of(sequence=False, grad=False)),
            """\
static: head, blocks.0.up, blocks.0.down, blocks.1.up, blocks.1.down
eager: (root): aten.nll_loss_forward.default redistributes P(sum)R->RR: add a rule that does it at a module's
  boundary
eager: embedding: the gradient of a tensor under S(0)R is S(0)S(0): add a rule with grad=
eager: blocks.0: the gradient of a tensor under S(0)R is S(0)S(0): add a rule with grad=
eager: blocks.0.norm: in backward, aten.native_layer_norm_backward.default redistributes S(0)P(sum)->S(0)S(0):
  add a rule with grad= or grad_dst=
eager: blocks.1.norm: in backward, aten.native_layer_norm_backward.default redistributes S(0)P(sum)->S(0)S(0):
  add a rule with grad= or grad_dst=""",
        )

    def test_a_tensor_of_its_own(self):
        reason = "blocks.0: a tensor that is neither its argument nor its parameter has a gradient"
        self.assertIn(reason, self.report(plan_of(), block=OwnLeaf))

    def test_random_numbers(self):
        self.assertExpectedInline(
            self.report(plan_of(), p=0.1),
            """\
static: embedding, head, blocks.0, blocks.1
eager: blocks.0.dropout: aten.bernoulli_.float draws random numbers: those of one device need its placements
eager: blocks.1.dropout: aten.bernoulli_.float draws random numbers: those of one device need its placements
eager: (root): aten.nll_loss_forward.default redistributes P(sum)R->RR: add a rule that does it at a module's
  boundary""",
        )

    def test_a_shape_of_global_sizes(self):
        self.assertExpectedInline(
            self.report(plan_of(), block=HardCoded),
            """\
static: embedding, head, blocks.0.norm, blocks.0.up, blocks.0.down, blocks.1.norm, blocks.1.up, blocks.1.down
eager: (root): aten.nll_loss_forward.default redistributes P(sum)R->RR: add a rule that does it at a module's
  boundary
eager: blocks.0: on local tensors, its forward raises RuntimeError: mat1 and mat2 shapes cannot be multiplied
  (6x16 and 8x8)
eager: blocks.1: on local tensors, its forward raises RuntimeError: mat1 and mat2 shapes cannot be multiplied
  (6x16 and 8x8)""",
        )

    def test_positions_in_the_sequence(self):
        self.assertExpectedInline(
            self.report(plan_of(), block=Positions),
            """\
static: embedding, head, blocks.0.norm, blocks.0.up, blocks.0.down, blocks.1.norm, blocks.1.up, blocks.1.down
eager: (root): aten.nll_loss_forward.default redistributes P(sum)R->RR: add a rule that does it at a module's
  boundary
eager: blocks.0: on local tensors, its forward raises RuntimeError: The size of tensor a (6) must match the
  size of tensor b (3) at non-singleton dimension 1
eager: blocks.1: on local tensors, its forward raises RuntimeError: The size of tensor a (6) must match the
  size of tensor b (3) at non-singleton dimension 1""",
        )
