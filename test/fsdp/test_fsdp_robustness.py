"""fully_shard outside the plain training loop: errors in the middle, freezing, conversions, unusual modules."""

import itertools
import unittest
import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist
from common import error_of, ranks, run_ranks
from fsdp_collectives import LoggedCollectives, delay_collectives
from fsdp_common import CONFIG, Boom, batch, build, compare_gradients, loss_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from torch_ragged.fsdp import fully_shard, monitor


class Repeat(nn.Module):
    """Calls one of its layers three times."""

    def __init__(self):
        super().__init__()
        self.first, self.layer = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        x = self.first(x)
        for _ in range(3):
            x = self.layer(x).tanh()
        return x


def same_twice(kind):
    torch.manual_seed(0)
    model, single = kind(), kind()
    single.load_state_dict(model.state_dict())
    return model, single


def fail_backward(model):
    """A backward that raises behind blocks 2 and 1, whose reductions have begun by then."""
    hook = model.blocks[0].register_forward_hook(lambda module, args, output: Boom.apply(output))
    loss = loss_of(model, batch(0, False))
    hook.remove()
    assert error_of(loss.backward) == "KeyError: 'boom'"


def halve(model, local=False):
    with torch.no_grad():
        for param in model.parameters():
            (param.to_local() if local else param).mul_(0.5)


def unused_prefetch(model, x):
    with torch.no_grad():
        model(x)
        blocks, model.blocks = model.blocks, model.blocks[:1]
        model(x)
        model.blocks = blocks


def forward_that_raised(model, x):
    def stop(module, args):
        raise KeyError("stop")

    model.set_reshard_after_forward(False)
    hook = model.blocks[1].experts.register_forward_pre_hook(stop)
    assert error_of(model, x) == "KeyError: 'stop'"
    hook.remove()


def forward_without_backward(model, x):
    model.set_reshard_after_forward(False)
    model(x)


def explicit_unshard(model, x):
    model(x)
    model.blocks[1].unshard(), model.blocks[2].unshard(async_op=True)


def kept_after_backward(model, x):
    model.set_reshard_after_backward(False)
    model(x).sum().backward()


def backward_that_raised(model, x):
    fail_backward(model)


def pair_with_buffer():
    """The model, ours and single, with a buffer; its inputs."""
    model, single = build("ragged", tied=False), build("single", tied=False)
    for each in (model, single):
        each.blocks[1].attention.register_buffer("scale", torch.ones(2))
    return model, single, batch(0, False)[:, :-1]


def check_conversions():
    model, single, x = pair_with_buffer()
    params = list(model.parameters())
    params[0].note = "kept"
    model(x)  # The root stays gathered.
    errors = [error_of(lambda: model.to("meta")), error_of(model.share_memory)]
    nn.Sequential(model).double(), model.blocks[1].to(torch.float32)
    assert {p.dtype for p in model.blocks[1].parameters()} == {torch.float32} and params[0].dtype == torch.float64
    model.cpu().float().to("cpu", torch.float32)
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True)) and params[0].note == "kept"
    assert model.blocks[1].attention.scale.dtype == torch.float32
    assert torch.equal(model(x), single(x))
    return errors


def check_conversions_of_a_part():
    model, single, x = pair_with_buffer()
    model.set_reshard_after_forward(False)
    model(x)  # All stay gathered.
    gathered = error_of(lambda: (model.blocks[1].attention.double(), model(x)))
    assert torch.equal(model(x), single(x))
    model.reset_iter_state()
    model.blocks[1].attention.double()
    return [gathered, error_of(model, x)]


def check_conversion_with_unreduced_gradients():
    """What would lose gradients raises and changes nothing."""
    model, single = build("ragged", tied=False), build("single", tied=False)
    params, errors = list(model.parameters()), []
    for sync in (False, True):
        model.set_requires_gradient_sync(sync)
        loss_of(model, batch(0, False)).backward(), loss_of(single, batch(0, True)).backward()
        if not sync:
            errors.append(error_of(model.double))
    assert all(a is b and b.dtype == torch.float32 for a, b in zip(params, model.parameters(), strict=True))
    compare_gradients(model, single)
    model.double().float()
    compare_gradients(model, single)
    return errors


def check_ties_made_later():
    """What would tie parameters of two buffers, or of one, raises and changes nothing."""
    model, single, ties = build("ragged", tied=False), build("single", tied=False), []
    x = batch(0, False)[:, :-1]
    for first, second in ((model.blocks[0], model.blocks[1]), (model.blocks[0], model.blocks[0])):  # Of two groups, of one.
        own, second.norm2.weight = second.norm2.weight, first.norm1.weight
        ties.append(error_of(model, x))
        second.norm2.weight = own
    assert torch.equal(model(x), single(x))
    assert fully_shard.state(model).is_root and fully_shard.state(model.norm) is None
    return ties


def check_write_while_gathered():
    model, single, x = build("ragged"), build("single"), batch(0, False)[:, :-1]
    model(x)
    with torch.no_grad():
        model.norm.weight.fill_(2)
    error = error_of(model, x)
    assert torch.equal(model(x), single(x))
    return error


def check_replacement_while_gathered():
    model, single, x = build("ragged"), build("single"), batch(0, False)[:, :-1]
    model(x)
    model.norm.weight = nn.Parameter(torch.ones(CONFIG.dim))
    error = error_of(model.state_dict)
    assert torch.equal(model(x), single(x))
    return error


@dataclass
class Opaque:
    value: torch.Tensor


class Outputs(nn.Module):
    """Modules whose outputs, inputs and calls are unusual."""

    def __init__(self):
        super().__init__()
        self.opaque, self.table, self.partly, self.side = OpaqueOutput(), Table(), IgnoresInput(), nn.Linear(6, 6)
        self.keeps, self.scale = KeepsWeight(), nn.Parameter(torch.randn(6))

    def forward(self, x):
        x = self.opaque(x).value * self.table(3) + self.table(6)
        x = self.partly(x, self.side(x))
        (slope,) = torch.autograd.grad(self.partly(x, x).square().sum(), x, retain_graph=True)
        x = checkpoint(self.partly, x, slope, use_reentrant=False)
        return self.keeps(x) * self.scale


class OpaqueOutput(nn.Linear):
    def __init__(self):
        super().__init__(6, 6)

    def forward(self, x):
        return Opaque(super().forward(x).tanh())


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, rows):
        return self.weight[:3] if rows == 3 else self.weight.t()[:3]


class KeepsWeight(nn.Linear):
    def __init__(self):
        super().__init__(6, 6)

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name == "weight":
            self.__dict__["kept"] = value

    def forward(self, x):
        return x @ self.kept


class IgnoresInput(nn.Linear):
    def __init__(self):
        super().__init__(6, 6)

    def forward(self, x, ignored):
        return super().forward(x).tanh()


def check_roots():
    mesh, x = init_device_mesh("cpu", (2,)), torch.ones(1, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    model[0](x)
    with monitor(model) as watch:
        found = {error_of(model, x) for _ in range(2)}  # The second call is no better than the first.
        assert len(found) == 1 and watch.step()["all_gather_calls"] == 0
    return found.pop()


class RobustnessTest(unittest.TestCase):
    @ranks(2)
    def test_results_do_not_depend_on_when_collectives_run():
        model, single = delay_collectives(build("ragged", raf=True)), build("single")
        for step in range(3):
            loss_of(model, batch(step, False)).backward()
            loss_of(single, batch(step, True)).backward()
        compare_gradients(model, single)

    @ranks(2)
    def test_gradients_that_come_beside_a_reduction_are_not_lost():
        """The second of two backwards reduces after the first of three calls; more gradients come while that is in flight."""
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        model, single = same_twice(Repeat)
        fully_shard(model.layer, mesh=mesh)
        delay_collectives(fully_shard(model, mesh=mesh))
        for each in (model, single):
            first, second = each(torch.ones(1, 6)).sum(), each(-torch.ones(1, 6)).sum()
            second.backward(), first.backward()
        compare_gradients(model, single)

    @ranks(3)
    def test_a_forward_warns_of_a_backward_that_raised_and_starts_anew():
        model, single = delay_collectives(build("ragged")), build("single")
        for sync in (True, False):
            model.set_requires_gradient_sync(sync)
            fail_backward(model)
            model.set_requires_gradient_sync(True)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                loss = loss_of(model, batch(1, False))
            assert ["a backward pass raised" in str(w.message) for w in caught] == [True], caught
            loss.backward()
            loss_of(single, batch(1, True)).backward()
            compare_gradients(model, single)

    @ranks(3)
    def test_a_backward_after_one_that_raised_starts_anew():
        """Its forward was before."""
        model, single = delay_collectives(build("ragged")), build("single")
        loss = loss_of(model, batch(2, False))
        fail_backward(model)
        loss.backward()
        loss_of(single, batch(2, True)).backward()
        compare_gradients(model, single)

    @ranks(3)
    def test_a_reset_drops_what_a_backward_that_raised_has_left():
        model, single = delay_collectives(build("ragged")), build("single")
        fail_backward(model)
        assert error_of(model.blocks[0].reset_iter_state).startswith(
            "RuntimeError: reset_iter_state must be called on the root"
        )
        model.reset_iter_state()
        assert all(isinstance(param, DTensor) for param in model.parameters())
        model.zero_grad(), single.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loss_of(model, batch(3, False)).backward()
        loss_of(single, batch(3, True)).backward()
        compare_gradients(model, single)

    @ranks(2)
    def test_groups_are_gathered_one_ahead():
        model, log, hidden = build("ragged"), [], torch.ones(1, 2, CONFIG.dim)
        for index, block in enumerate(model.blocks):
            group = block._ragged_fsdp_state.groups[0]
            group.collectives = LoggedCollectives(group.collectives, log, index)
            block.register_forward_pre_hook(lambda module, args, index=index: log.append(f"forward {index}"))

        def step():
            log.clear()
            loss_of(model, batch(0, False)).backward()
            return list(log)

        backward = ["all_gather 2", "all_gather 1", "reduce_scatter 2", "all_gather 0", "reduce_scatter 1", "reduce_scatter 0"]
        assert step() == [f"{what} {i}" for i in range(3) for what in ("all_gather", "forward")] + backward
        ahead = ["all_gather 0", "all_gather 1", "forward 0", "all_gather 2", "forward 1", "forward 2"]
        assert step() == ahead + backward
        # Calls outside the root's forward change nothing in the next one, and prefetch nothing.
        log.clear()
        for _ in range(2):
            model.blocks[1](hidden).sum().backward()
        assert log == ["all_gather 1", "forward 1", "all_gather 1", "reduce_scatter 1", "all_reduce_max 1"] * 2
        assert step() == ahead + backward

    @ranks(2)
    def test_parameters_gathered_before_a_change_are_not_used():
        x, hidden = batch(0, False)[:, :-1], torch.ones(1, 2, CONFIG.dim)
        single = build("single")
        halve(single)
        ways = (
            unused_prefetch,
            forward_that_raised,
            forward_without_backward,
            explicit_unshard,
            kept_after_backward,
            backward_that_raised,
        )
        for way, is_alone, local in itertools.product(ways, (False, True), (False, True)):
            if local and way in (explicit_unshard, kept_after_backward):
                continue  # Who keeps parameters gathered must not write to them behind DTensor's back.
            model = build("ragged")
            params = nn.ParameterList(model.parameters())  # those that an optimizer holds: always the sharded ones
            way(model, x)
            halve(params, local)
            if is_alone:
                assert torch.equal(model.blocks[1](hidden), single.blocks[1](hidden)), way
            assert torch.equal(model(x), single(x)), way

    @ranks(3)
    def test_parameters_may_be_frozen_and_unfrozen_at_any_time():
        model, single = build("ragged", frozen=1), build("single", frozen=1)
        params = list(model.blocks[2].parameters())
        for step in range(6):
            if step == 1:
                for each in (model, single):
                    each.blocks[1].requires_grad_(True), each.blocks[0].requires_grad_(False)
            if step == 2:  # while they are gathered, and back again
                model.set_reshard_after_forward(False)
                loss_of(model, batch(0, False))
                for each in (model, single):
                    each.blocks[0].requires_grad_(True), each.blocks[1].norm1.requires_grad_(False)
            if step == 3:  # while they are gathered, on those that an optimizer holds
                loss_of(model, batch(0, False))
                for param in (*params, *single.blocks[2].parameters()):
                    param.requires_grad_(False)
            if step == 4:
                for each in (model, single):
                    each.requires_grad_(True)
            got, want = loss_of(model, batch(step, False)), loss_of(single, batch(step, True))
            if step == 5:  # between forward and backward
                for each in (model, single):
                    each.head.requires_grad_(False), each.blocks[2].norm1.requires_grad_(False)
                params[-1].requires_grad_(False), [*single.blocks[2].parameters()][-1].requires_grad_(False)
            got.backward(), want.backward()
            compare_gradients(model, single)
            assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in single.parameters()], step
            model.zero_grad(), single.zero_grad()

    def test_conversions_keep_parameters_in_the_buffer_or_raise(self):
        words = ("is sharded in a buffer on cpu and cannot move to meta: expected cpu", "cannot be moved to shared memory")
        for errors in run_ranks(3, check_conversions):
            for error, text in zip(errors, words, strict=True):
                self.assertIn(text, error)

    @ranks(3)
    def test_other_functions_are_applied_once_to_parameters_and_gradients():
        """Once for every parameter and gradient."""
        model, single, x = pair_with_buffer()
        params = list(model.parameters())
        loss_of(model, batch(0, False)).backward(), loss_of(single, batch(0, True)).backward()
        for each in (model, model.blocks, model.blocks[1].attention):
            each._apply(lambda tensor: tensor * 2)
        for each in (single, single.blocks, single.blocks[1].attention):
            each._apply(lambda tensor: tensor * 2)
        compare_gradients(model, single)
        model.set_reshard_after_forward(False)
        assert torch.equal(model(x), single(x)) and torch.equal(*(m.blocks[1].attention.scale for m in (model, single)))
        assert all(a is b for a, b in zip(params, model.parameters(), strict=True) if isinstance(b, DTensor))

    def test_conversions_of_a_part_of_a_group_raise(self):
        words = (
            "RuntimeError: attention.qkv.weight, attention.out.weight changed while unsharded",
            "attention.qkv.weight was replaced by DTensor of torch.Size([72, 24]), torch.float64",
        )
        for errors in run_ranks(3, check_conversions_of_a_part):
            for error, text in zip(errors, words, strict=True):
                self.assertIn(text, error)

    def test_a_conversion_that_would_lose_gradients_raises(self):
        for (error,) in run_ranks(2, check_conversion_with_unreduced_gradients):
            self.assertIn("has gradients that are not in .grad yet and would be lost in torch.float64", error)

    def test_ties_made_later_raise(self):
        for ties in run_ranks(2, check_ties_made_later):
            self.assertEqual(len(ties), 2)
            for tie in ties:
                self.assertIn("norm2.weight was replaced by another parameter that fully_shard has sharded", tie)

    def test_a_write_to_a_gathered_parameter_raises(self):
        for error in run_ranks(2, check_write_while_gathered):
            self.assertIn("RuntimeError: norm.weight changed while unsharded by fully_shard", error)

    def test_a_replacement_of_a_gathered_parameter_raises(self):
        for error in run_ranks(2, check_replacement_while_gathered):
            self.assertIn("RuntimeError: norm.weight changed while unsharded by fully_shard", error)

    @ranks(2)
    def test_parameters_may_swap_places():
        """Replacements that are each other's."""
        model, single, x = build("ragged"), build("single"), batch(0, False)[:, :-1]
        model(x)
        model.reset_iter_state()
        for each in (model.blocks[0], single.blocks[0]):
            a, b = each.norm1.weight, each.norm2.weight
            with torch.no_grad():
                a.fill_(3), b.fill_(5)
            each.norm1.weight, each.norm2.weight = b, a
        assert torch.equal(model(x), single(x))

    @ranks(2)
    def test_a_module_may_write_to_its_own_weight():
        embeddings = []
        for each in (fully_shard, torch_fully_shard):
            torch.manual_seed(0)
            embedding = nn.Embedding(8, 6, max_norm=1.0)  # It writes to its weight.
            each(embedding, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
            embedding(torch.arange(8)).square().sum().backward()
            embeddings.append((embedding.weight.grad.full_tensor(), embedding(torch.arange(8))))
        assert all(map(torch.equal, *embeddings))

    @ranks(2)
    def test_hooks_of_parameters_run():
        def step(param):
            with torch.no_grad():
                param.sub_(param.grad, alpha=0.1)
            param.grad = None

        model, single = build("ragged"), build("single")
        for param in (*model.parameters(), *single.parameters()):
            param.register_hook(lambda grad: grad * 2)
            param.register_hook(lambda grad: None)
            param.register_post_accumulate_grad_hook(step)
        for i in range(3):
            loss_of(model, batch(i, False)).backward(), loss_of(single, batch(i, True)).backward()
        for (name, param), (_, plain) in zip(model.named_parameters(), single.named_parameters(), strict=True):
            assert param.grad is None
            torch.testing.assert_close(param.full_tensor(), plain, rtol=1e-4, atol=1e-6, msg=lambda m: f"{name}: {m}")

    @ranks(2)
    def test_unusual_outputs_inputs_and_calls_train_as_one_process():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        model, single = same_twice(Outputs)
        for child in model.children():
            fully_shard(child, mesh=mesh)
        fully_shard(model, mesh=mesh)
        x = torch.randn(3, 6, requires_grad=True)
        for _ in range(2):
            got, want = model(x), single(x)
            assert torch.equal(got, want)
            got.sum().backward()
            gradient, x.grad = x.grad, None
            want.sum().backward()
            torch.testing.assert_close(gradient, x.grad)
            x.grad = None
            compare_gradients(model, single)
            assert model.side.weight.grad is None and all(isinstance(p, DTensor) for p in model.parameters())
        with torch.no_grad():
            assert torch.equal(model.table(3), single.table(3))

    @ranks(2)
    def test_a_recomputation_casts_its_input():
        mesh, x = init_device_mesh("cpu", (dist.get_world_size(),)), torch.randn(3, 6)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
        layer, gradients = fully_shard(nn.Linear(6, 6), mesh=mesh, mp_policy=policy), []
        for call in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
            call(x.clone().requires_grad_()).square().sum().backward()
            gradients.append(layer.weight.grad.full_tensor())
            layer.zero_grad()
        assert torch.equal(*gradients)

    def test_a_module_that_was_a_root_cannot_get_another_around_it(self):
        for error in run_ranks(2, check_roots):
            self.assertIn("RuntimeError: FSDPLinear became a root when it ran its forward before the module around it", error)

    @ranks(4)
    def test_groups_of_one_root_may_be_on_several_meshes():
        """Groups of one root may reduce with different ranks, as expert parallelism needs."""
        mesh, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        x, models = torch.randn(3, 4, generator=torch.Generator().manual_seed(dist.get_rank())), []
        for shard in (torch_fully_shard, fully_shard):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
            shard(model[0], mesh=square["a"])
            shard(model[1], mesh=square["b"])
            models.append(shard(model, mesh=mesh))
            model(x).pow(2).sum().backward()
        for theirs, ours in zip(*(model.parameters() for model in models)):
            assert ours.grad.device_mesh == theirs.grad.device_mesh
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad.full_tensor())
