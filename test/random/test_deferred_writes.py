"""What a program does to a module between deferred_init and materialize, and what a construction does unseen."""

import gc
import importlib.util
import io
import unittest
import warnings

import torch
from common import error_of, ranks
from delays import undelayed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from torch_ragged.fsdp import fully_shard
from torch_ragged.random import deferred_init, materialize
from torch_ragged.random._recording import known_ends
from torch_ragged.spmd import Plan, parallelize


def build():
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))


# --- what a program changes before the module is sharded -----------------------------------------------------------------


def init_all(model):
    def init(module):
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)

    model.apply(init)
    nn.init.orthogonal_(model[2].weight)


def reset(model):
    for module in model:
        module.reset_parameters()


def write(model):
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].weight[1:3] = 2
        model[0].weight[:, model[2].weight[0] > 0] = 3
        torch._foreach_mul_(list(model[2].parameters()), 2.0)
    model[0].bias.data.copy_(torch.arange(6.0)).mul_(3)
    model[2].weight.data[0, 1] = True
    model[1].running_mean.fill_(5)
    model[1].num_batches_tracked += 4
    with torch.inference_mode():
        model[2].bias.add_(1)


def replace(model):
    model[0].weight = nn.Parameter(model[0].weight.detach() * 2)
    model[0].bias.data = model[2].bias.data * 3
    model[1].running_var = model[1].running_var + 2


def swap(model):
    model[0].weight, model[2].weight = model[2].weight, model[0].weight


def tie(model):
    model[0].weight = model[2].weight


def convert(model):
    model.double()
    model[0].weight.data.add_(1 / 3)
    model.to(torch.bfloat16)
    model[2].weight.data.add_(1)


def load(model):
    state = {name: torch.full(value.shape, 2, dtype=value.dtype) for name, value in model.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.load_state_dict(state)
    for value in state.values():  # The state dict may live on, as that of a model that trains.
        value.zero_()


def load_a_part(model):
    model.load_state_dict({"0.weight": torch.ones(6, 6)}, strict=False)


def assign(model):
    state = {name: torch.full(value.shape, 2, dtype=value.dtype) for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def assign_a_part(model):
    model.load_state_dict({"0.weight": torch.ones(6, 6)}, strict=False, assign=True)


def read(model):
    if model[0].weight.sum() > 0:
        model[0].weight.data.zero_()
    model[2].bias.data.fill_(float(f"{model[2].weight.norm():.3f}"))


def seed(model):
    torch.manual_seed(9)
    model[0].reset_parameters()


CHANGES = (init_all, reset, write, replace, swap, tie, convert, load, load_a_part, assign, assign_a_part, read, seed)


def changed(make, change):
    torch.manual_seed(3)
    model = make()
    change(model)
    return model


def check_equal(found, wanted, case):
    state = torch.get_rng_state()
    found, wanted = found.state_dict(), wanted.state_dict()
    assert list(found) == list(wanted), case
    for name, value in wanted.items():
        got = found[name].full_tensor() if isinstance(found[name], DTensor) else found[name]
        assert got.dtype == value.dtype and torch.equal(got, value), f"{case} {name}"
    return state


def by_hand(model, mesh, placements):
    done = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                if param not in done:
                    done[param] = nn.Parameter(distribute_tensor(param.detach(), mesh, placements))
                module._parameters[name] = done[param]


# --- constructions ---------------------------------------------------------------------------------------------------------


class Statistics(nn.Module):
    """Runs a forward in its constructor, to learn a size."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.InstanceNorm2d(4, track_running_stats=True))
        size = self.body(torch.randn(2, 1, 6, 6)).flatten(1).shape[1]
        self.wide = nn.BatchNorm1d(size, dtype=torch.float64)
        self.wide(torch.randn(3, size, dtype=torch.float64))
        self.wide.eval()(torch.randn(3, size, dtype=torch.float64))


class Values(nn.Module):
    """Reads numbers and masks, and computes with tensors whose sizes depend on them."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        weight = self.first.weight.data
        self.notes = [
            f"{weight.norm():.3f}",
            f"{weight[0, 0]}",
            repr(weight),
            str(self.first.bias),
            repr(nn.Parameter(weight, requires_grad=False)),
            int(weight.abs().sum() * 10),
        ]
        constant = torch.tensor([1.0, 3.0]).mul_(2)
        self.notes += [constant.tolist(), constant.tolist()]
        weight[:, weight[0] > 0] *= 2
        rows = weight[self.first.bias > 0]
        rows.mul_(2)
        weight[self.first.bias > 0] = rows
        found = (weight > 0.5).nonzero()
        weight[found[:, 0], found[:, 1]] = 0.5
        weight.masked_scatter_(weight < 0, weight.masked_select(weight < 0) / 3)
        self.first.bias.data[torch.multinomial(torch.softmax(weight[0], 0), 2)] = 0
        self.drawn = weight.sum().item()
        self.kinds = len(torch.unique(weight))


class Older(nn.Module):
    """Reads a tensor and an array that were made before."""

    def __init__(self, tensor, array):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.first.weight.data.copy_(tensor)
        self.first.bias.data.copy_(torch.from_numpy(array))


def lazy_forward():
    model = nn.Sequential(nn.LazyLinear(3))
    model(torch.randn(2, 5))
    return model


class DeferredWritesTest(unittest.TestCase):
    def test_a_change_before_materialize_is_in_the_module(self):
        for change in CHANGES:
            want = changed(build, change)
            state = torch.get_rng_state()
            got = materialize(changed(lambda: deferred_init(build), change))
            self.assertTrue(torch.equal(check_equal(got, want, change.__name__), state), change.__name__)
            self.assertEqual([type(param) for param in got.parameters()], [type(param) for param in want.parameters()])

    @ranks(2)
    def test_a_change_before_the_module_is_sharded_is_in_the_shards():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

        def shard(model):
            fully_shard(model, mesh=mesh)
            materialize(model)

        def distribute(model):
            by_hand(model, mesh, [Shard(0)])
            materialize(model)

        def plan(model):
            parallelize(model, Plan().default(Replicate()), mesh)

        for change in CHANGES:
            want = changed(build, change)
            for place in (shard, distribute, plan):
                case = f"{change.__name__}, {place.__name__}"
                model = changed(lambda: deferred_init(build), change)
                if place is distribute and change is replace:  # Nothing is known of where a shard is from.
                    error = error_of(lambda: distribute(model))
                    assert "0.weight is on the meta device, but deferred_init did not make it" in error, error
                    continue
                place(model)
                check_equal(model, want, case)

    @undelayed
    @ranks(2)
    def test_a_write_to_a_shard_before_materialize_raises_on_all_ranks():
        mesh = init_device_mesh("cpu", (2,))

        def zero(model):
            with torch.no_grad():
                model[2].weight.zero_()

        def through_data(model):
            model[2].weight.data.mul_(2)

        def on_one_rank(model):
            if mesh.get_rank():
                model[2].weight.to_local().detach().zero_()

        def draw(model):
            nn.init.normal_(model[2].weight)

        def truncated(model):
            nn.init.trunc_normal_(model[2].weight)

        def load(model):
            params = dict(model.named_parameters())
            model.load_state_dict(
                {name: distribute_tensor(torch.ones(p.shape), mesh, p.placements) for name, p in params.items()}, strict=False
            )

        for change in (zero, through_data, on_one_rank, draw, truncated, load):
            for whole in (True, False):
                model = deferred_init(build)
                if whole:
                    fully_shard(model, mesh=mesh)
                else:
                    by_hand(model, mesh, [Shard(0)])

                def change_and_materialize(model=model, change=change):
                    change(model)
                    materialize(model)

                error = error_of(change_and_materialize)
                assert "test_deferred_writes.py:" in error and "after materialize(module)" in error, f"{change} {error}"
                assert "aten." in error or "nn.init.trunc_normal_" in error, error
                assert model[2].weight.is_meta, "nothing is allocated"

    @ranks(2)
    def test_a_change_of_a_sharded_module_that_needs_no_values_is_done():
        mesh = init_device_mesh("cpu", (2,))

        def halves(model):
            params = dict(model.named_parameters())
            ones = {name: torch.ones(p.shape) for name, p in params.items() if name[0] == "0"}
            placed = {name: distribute_tensor(value, mesh, params[name].placements) for name, value in ones.items()}
            model.load_state_dict(placed, strict=False, assign=True)

        want = changed(build, lambda model: None)
        with torch.no_grad():
            for param in want[0].parameters():
                param.fill_(1)
        model = changed(lambda: deferred_init(build), lambda model: fully_shard(model, mesh=mesh))
        halves(model)
        check_equal(materialize(model), want, "half of it was assigned")

        want = changed(build, lambda model: model.to(torch.bfloat16))
        model = changed(lambda: deferred_init(build), lambda model: fully_shard(model, mesh=mesh).to(torch.bfloat16))
        check_equal(materialize(model), want, "converted")

        model = changed(lambda: deferred_init(build), lambda model: by_hand(model, mesh, [Shard(0)]))
        tie(model)
        check_equal(materialize(model), changed(build, tie), "tied afterwards")

    def test_values_that_are_needed_before_materialize_raise(self):
        model = deferred_init(build)
        for function in (
            lambda: model(torch.ones(2, 6)),
            lambda: model.cpu(),
            lambda: torch.ones(6, 6).copy_(model[0].weight.detach()),
            lambda: torch.save(model.state_dict(), io.BytesIO()),
            lambda: torch.ops._c10d_functional.all_reduce(model[0].weight.data, "sum", "a group"),
        ):
            self.assertIn("has none yet: call materialize(module) before", error_of(function))
        self.assertIn("in place: call it in the function", error_of(lambda: model[0].weight.data.t_()))
        self.assertIn("use .data.copy_(...)", error_of(lambda: setattr(model[0].weight, "data", torch.ones(6, 6))))
        self.assertTrue(model.eval()(torch.empty(2, 6, device="meta")).is_meta, "shapes need no values")
        model[0].weight.grad = torch.ones_like(model[0].weight)
        self.assertIn("0.weight has a gradient, which would be lost", error_of(lambda: materialize(model)))

    def test_numbers_that_are_drawn_before_materialize_raise(self):
        torch.manual_seed(0)
        model = deferred_init(build)
        noise = torch.randn(6, 6)
        for function in (lambda: model[0].weight.data.copy_(noise), lambda: materialize(model), lambda: deferred_init(build)):
            self.assertIn("random numbers were drawn on cpu after deferred_init", error_of(function))
        torch.manual_seed(0)  # From here, numbers are those of one device again.
        materialize(model)
        torch.manual_seed(0)
        check_equal(model, build(), "seeded again")

    def test_a_module_or_no_function_is_refused(self):
        self.assertIn("pass a function, got a Linear", error_of(lambda: deferred_init(nn.Linear(4, 4))))
        self.assertIn("pass a function, got a int", error_of(lambda: deferred_init(4)))

    def test_statistics_of_a_forward_in_a_constructor(self):
        check_equal(materialize(changed(lambda: deferred_init(Statistics), nothing)), changed(Statistics, nothing), "")

    def test_numbers_and_masks_in_a_constructor(self):
        want, got = changed(Values, nothing), changed(lambda: deferred_init(Values), nothing)
        check_equal(materialize(got), want, "")
        self.assertEqual(got.notes, want.notes)
        self.assertEqual((got.drawn, got.kinds), (want.drawn, want.kinds))

    @unittest.skipUnless(importlib.util.find_spec("numpy"), "needs NumPy")
    def test_arrays_of_numpy(self):
        import numpy

        def writes_in_place():
            layer = nn.Linear(3, 3)
            layer.weight.data.numpy()[:] = 1
            return layer

        def writes_by_a_function():
            layer = nn.Linear(3, 3)
            numpy.copyto(numpy.asarray(layer.weight.detach()), 0)
            return layer

        for function in (writes_in_place, writes_by_a_function):
            error = error_of(lambda function=function: deferred_init(function))
            self.assertIn("test_deferred_writes.py:", error)
            self.assertIn("writes to a NumPy array of a tensor without memory", error)

        def writes_by_a_tensor():
            layer = nn.Linear(3, 3)
            torch.from_numpy(layer.weight.detach().numpy()).fill_(2)
            return layer

        self.assertIn("aten.fill_", error_of(lambda: deferred_init(writes_by_a_tensor)))

        def older():
            return torch.arange(9.0).view(3, 3), numpy.ones(3, dtype=numpy.float32)

        want, given = Older(*older()), older()
        got = deferred_init(Older, *given)
        given[0].zero_(), given[1].fill(0)
        check_equal(materialize(got), want, "what is read keeps its values")

    def test_a_write_through_a_view_of_an_older_tensor_raises(self):
        old = torch.zeros(9)

        def construct():
            layer = nn.Linear(3, 3)
            layer.weight = nn.Parameter(old.view(3, 3))
            nn.init.ones_(layer.weight)
            return layer

        error = error_of(lambda: deferred_init(construct))
        self.assertIn("writes to a tensor that deferred_init has not made", error)
        self.assertEqual(old.sum(), 0)

    def test_lazy_modules_are_made_by_their_first_forward(self):
        def make():
            return nn.Sequential(nn.LazyLinear(4, dtype=torch.float64), nn.Linear(4, 4, dtype=torch.float64))

        found = []
        for construct in (make, lambda: materialize(deferred_init(make))):
            found.append(changed(construct, lambda model: model(torch.ones(2, 5, dtype=torch.float64))))
        check_equal(*found, "")
        self.assertIn("run its first forward after materialize", error_of(lambda: deferred_init(lazy_forward)))

    def test_parts_that_are_tied_stay_tied(self):
        def make():
            model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
            model.b.weight = model.a.weight
            return model

        want, got = changed(make, nothing), changed(lambda: deferred_init(make), nothing)
        materialize(got.b)
        materialize(got.a)
        check_equal(got, want, "")
        self.assertIs(got.a.weight, got.b.weight)
        other = deferred_init(make)
        other.a.weight = got.a.weight
        self.assertIs(materialize(other).a.weight, got.a.weight)

    def test_a_change_that_puts_the_generator_back_leaves_it_where_the_construction_ends(self):
        def fork(model):
            with torch.random.fork_rng():
                torch.manual_seed(7)
                nn.init.normal_(model[0].weight)

        def set_back(model):
            state = torch.get_rng_state()
            nn.init.normal_(model[0].weight)
            torch.set_rng_state(state)

        for change in (fork, set_back):
            want = changed(build, change)
            numbers = torch.rand(3)
            check_equal(materialize(changed(lambda: deferred_init(build), change)), want, change.__name__)
            self.assertTrue(torch.equal(torch.rand(3), numbers), change.__name__)

    def test_streams_that_are_continued_in_turns_are_those_of_one_device(self):
        def program(make):
            torch.manual_seed(0)
            first, second = make(lambda: nn.Linear(5, 5)), make(build)
            first.reset_parameters()
            third = make(lambda: nn.Linear(5, 5))
            second[0].reset_parameters()
            return first, second, third

        want = program(lambda function: function())
        number = torch.rand(3)
        got = program(deferred_init)
        for index in (1, 0, 2):
            check_equal(materialize(got[index]), want[index], str(index))
        self.assertTrue(torch.equal(torch.rand(3), number))
        last = program(deferred_init)[2]  # The others are gone.
        gc.collect()
        check_equal(materialize(last), want[2], "alone")

    def test_a_module_that_is_gone_leaves_what_its_stream_needs(self):
        table = torch.ones(100, 100)

        def make():
            layer = nn.Linear(100, 100)
            layer.weight.data.copy_(table)
            layer.register_buffer("order", torch.randperm(5))
            return layer

        torch.manual_seed(0)
        make()
        want = make()
        torch.manual_seed(0)
        deferred_init(make)
        gc.collect()
        tape = known_ends["cpu", bytes(torch.get_rng_state().numpy())].tape
        self.assertEqual(
            [str(entry.op) for entry in tape.entries.values()], ["aten.uniform_.default"] * 2 + ["aten.randperm.default"]
        )
        number = max(tape.entries)
        check_equal(materialize(deferred_init(make)), want, "")
        self.assertEqual(list(tape.streams["cpu"].known), [number], "its end, and no other state")
        self.assertEqual(tape.entries, {})

    def test_a_state_whose_recording_is_forgotten_raises(self):
        torch.manual_seed(0)
        model = deferred_init(build)
        state = torch.get_rng_state()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            deferred_init(build)
        gc.collect()
        deferred_init(build)  # The model keeps its tape.
        materialize(model)
        del model
        torch.manual_seed(2)
        for _ in range(4):
            deferred_init(build)
        torch.manual_seed(3)
        deferred_init(build)
        for _ in range(3):
            gc.collect()
        self.assertEqual(len(known_ends), 1, "as many as the generator may be at")
        torch.set_rng_state(state)
        self.assertIn(
            "an earlier deferred_init had left, whose numbers are no longer known", error_of(lambda: deferred_init(build))
        )
        torch.manual_seed(0)
        got = materialize(deferred_init(build))
        torch.manual_seed(0)
        check_equal(got, build(), "seeded again")


def nothing(model):
    pass


if __name__ == "__main__":
    unittest.main()
