"""The script of one device goes on under a plan: it reads numbers, adds layers, and its mistakes are errors on all ranks."""

import contextlib
import copy
import functools
import itertools
import logging
import unittest
import warnings
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist
from common import error_of, ranks, run_mortal_ranks
from soon import soon
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from torch_ragged import InterleavedShard
from torch_ragged.fsdp import rows
from torch_ragged.spmd import Plan, deferred_init, parallelize
from torch_ragged.tensor import _plain_ops

SIZE = 8


class Viewing(nn.Module):
    """Views its parameters and buffers, and writes to a view of a buffer, as a cache does."""

    def __init__(self):
        super().__init__()
        self.position, self.layer = nn.Parameter(torch.randn(2 * SIZE, SIZE)), nn.Linear(SIZE, SIZE)
        self.table = nn.Parameter(torch.randn(5))
        self.register_buffer("cache", torch.zeros(4, SIZE, SIZE))
        self.register_buffer("index", torch.arange(4).view(2, 2))

    def forward(self, x):
        self.cache[:2, 1:3] = x[:2, 1:3]
        self.cache[:, 0].fill_(2)
        bias = self.table[self.index.view(-1)].view(2, 2).sum()
        x = x + self.position[: x.shape[1]].expand(len(x), -1, -1) + self.position[3].view(2, 4).flatten() + bias
        first, second = self.layer.weight.chunk(2)
        both = torch.cat([x @ first.T, x @ second.mT], -1) + self.cache.transpose(0, 1)[:, :2].sum()
        return both.unbind(0)[1]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.blocks, self.head = nn.Linear(SIZE, SIZE), nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(2)), None
        self.scale, self.down = None, nn.Linear(SIZE, 4)

    def forward(self, x):
        x = torch.relu(self.up(x))
        for block in self.blocks:
            x = block(x)
        x = x if self.scale is None else x * self.scale
        return self.down(x) if self.head is None else self.head(x)


def data_parallel(units=False):
    plan = Plan().shard("<in:x>", Shard(0), "dp")
    return plan.unit(r"blocks\.\d+", "dp") if units else plan.default(Replicate())


def make():
    torch.manual_seed(0)
    return Net().double()


def mesh_of(name="dp"):
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(name,))


def whole_tensor(tensor):
    return tensor.full_tensor().detach().clone() if isinstance(tensor, DTensor) else tensor.detach().clone()


def on_both(function, *arguments):
    """The errors of all ranks."""
    said = [""] * dist.get_world_size()
    dist.all_gather_object(said, error_of(function, *arguments))
    return said


READS = {
    "item": lambda t: t.sum().item(),
    "float": lambda t: float(t.amax()),
    "int": lambda t: int(t.argmax()),
    "bool": lambda t: (bool(t.sum() > 0), bool((t > 99).any())),
    "index": lambda t: list(range(99))[t.argmax()],
    "is_nonzero": lambda t: torch.is_nonzero(t.sum()),
    "format": lambda t: (f"{t.sum():.3f}", f"{t.sum()}", f"{t.argmax():>5d}"),
    "tolist": lambda t: (t.tolist(), t.sum().tolist(), t[0].tolist()),
    "numpy": lambda t: (t.detach().numpy().tolist(), t.numpy(force=True).tolist()),
    "array": lambda t: (numpy.asarray(t.detach()).tolist(), numpy.from_dlpack(t.detach()).tolist()),
    "len": len,
    "rows": lambda t: [int(each) for each in t[0].long()],
    "decode": lambda t: "".join(chr(65 + each) for each in t[0].long()),
    "contains": lambda t: (3.0 in t, 1000.0 in t),
}


class ReadTest(unittest.TestCase):
    @ranks(2)
    def test_a_number_of_a_plan_is_that_of_one_process_in_all_modes_of_autograd():
        model, x = nn.Linear(SIZE, SIZE, bias=False), torch.arange(4.0 * SIZE).view(4, SIZE)
        nn.init.eye_(model.weight)  # Sums of integers are exact.
        expected = {name: read(model(x)) for name, read in READS.items()}
        parallelize(model, Plan().shard("<in>", Shard(0), "dp").default(Replicate()), mesh_of())
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            for name, read in READS.items():
                with mode():
                    found = model(x)
                    assert found.placements == (Shard(0),)
                    assert read(found) == expected[name], (name, mode)

    @ranks(4)
    def test_a_sum_over_two_mesh_dimensions_is_read_without_advice_that_nobody_can_follow():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize(nn.Linear(SIZE, SIZE), Plan().default(Replicate()), mesh)
        pending = DTensor.from_local(torch.ones(2) * dist.get_rank(), mesh, [Partial(), Partial()])
        logged = []
        handler = logging.Handler()
        handler.emit = logged.append
        logging.getLogger("torch.distributed.tensor._redistribute").addHandler(handler)
        try:
            assert pending.tolist() == [6.0, 6.0] and pending.sum().item() == 12.0 and f"{pending[0]:.1f}" == "6.0"
        finally:
            logging.getLogger("torch.distributed.tensor._redistribute").removeHandler(handler)
        assert not logged, logged[0].getMessage()

    @ranks(2)
    def test_what_one_process_refuses_is_refused():
        model = parallelize(nn.Linear(SIZE, SIZE), Plan().default(Replicate()), mesh_of())
        out = model(torch.ones(2, SIZE))
        for each in (out, out.sum(), out[:, 0]):
            assert "requires grad" in error_of(each.numpy)
        assert "unsupported format" in error_of(format, out, ".3f")
        assert "DTensor(local_tensor=" in f"{out}"  # As on one process, only a number has a format.

    @ranks(2)
    def test_ranks_that_read_different_tensors_raise():
        model = parallelize(make(), data_parallel(), mesh_of())
        out = model(torch.ones(4, SIZE).double())
        for error in on_both((out.sum() if dist.get_rank() else out).tolist):
            assert "tolist() of a DTensor" in error and "shape (4, 4)" in error and "shape ()" in error, error

    def test_a_read_on_one_rank_is_an_error_on_all_ranks_that_names_it(self):
        for name, others in (("item()", "backward"), ("a format", "redistribution")):
            for rank, error in run_mortal_ranks(2, set(), read_alone, name, others, seconds=50).items():
                with self.subTest(name=name, others=others, rank=rank):
                    self.assertIn("PeerError", error)
                    self.assertIn(f"rank 0 in {name} of a DTensor, which all ranks must call, called in", error)


@soon()
def read_alone(name, others):
    """Rank 0 reads a number, and the other rank goes on with the step."""
    mesh, x = mesh_of(), torch.ones(4, SIZE).double()
    plan = data_parallel() if others == "backward" else data_parallel().shard("<out>", Replicate(), "dp")
    model = parallelize(make(), plan, mesh)
    loss = model(x).sum()
    if dist.get_rank() == 0:
        pending = DTensor.from_local(torch.ones(()), mesh, [Partial()])
        return error_of(pending.item if name == "item()" else lambda: f"{pending:.3f}")
    return error_of(loss.backward if others == "backward" else lambda: model(x))


def new_head(model):
    model.head = nn.Linear(SIZE, 3).double()
    for param in model.head.parameters():
        nn.init.ones_(param)


def new_parameter(model):
    model.scale = nn.Parameter(torch.full((SIZE,), 1.5).double())


class Adapter(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), nn.ParameterList([nn.Parameter(torch.ones(SIZE).double())])

    def forward(self, x):
        return self.base(x) + x * self.scale[0]


def adapters(model):
    for index, block in enumerate(model.blocks):
        model.blocks[index] = Adapter(block)


def replaced_parameter(model):
    model.up.bias = nn.Parameter(torch.arange(SIZE).double() / 10)


def assigned(model):
    model.load_state_dict({name: torch.full_like(value, 0.1) for name, value in whole(model).items()}, assign=True)


def tied(model):
    model.head = nn.Linear(SIZE, SIZE, bias=False).double()
    model.blocks.append(nn.Linear(SIZE, SIZE).double())
    param = nn.Parameter(torch.eye(SIZE).double())
    model.head.weight, model.blocks[2].weight = param, param


def whole(model):
    named = model.named_parameters(remove_duplicate=False)
    return {name: param.full_tensor() if isinstance(param, DTensor) else param.detach() for name, param in named}


def train(model, x):
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.1, foreach=False)
    losses = []
    for _ in range(3):
        loss = model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class AddedTest(unittest.TestCase):
    @ranks(2)
    def test_what_is_added_after_parallelize_trains_as_on_one_process():
        x, mesh = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(1)).double(), mesh_of()
        for change in (new_head, new_parameter, adapters, replaced_parameter, assigned, tied):
            single = make()
            change(single)
            expected = train(single, x)
            for units in (False, change in (new_head, new_parameter, adapters)):
                model = parallelize(make(), data_parallel(units), mesh)
                change(model)
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    assert numpy.allclose(train(model, x), expected, rtol=0, atol=1e-12), change
                assert all(isinstance(param, DTensor) for param in model.parameters()), change
                found = whole(model)
                for name, value in whole(single).items():
                    torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)

    @ranks(2)
    def test_what_is_added_has_the_values_of_rank_0_and_the_placements_of_the_plan():
        mesh = mesh_of("tp")
        model = parallelize(make(), Plan().shard("up.weight", Shard(0), "tp").default(Replicate()), mesh)
        value = torch.full((SIZE, SIZE), float(dist.get_rank() + 1)).double()
        weight = nn.Parameter(value)
        weight.grad = 2 * value  # As of a layer that has been trained by itself.
        model.up.weight, model.scale = weight, nn.Parameter(value[0])
        assert model.up.weight.placements == (Shard(0),) and model.scale.placements == (Replicate(),)
        assert torch.equal(model.up.weight.full_tensor(), torch.ones_like(value))
        assert torch.equal(model.scale.to_local(), torch.ones_like(value[0]))
        assert model.up.weight.grad.placements == (Shard(0),) and model.scale.grad is None
        assert torch.equal(model.up.weight.grad.full_tensor(), torch.full_like(value, 2.0))
        model.up.weight = nn.Parameter(torch.ones(2, 2))  # Of another shape.
        assert model.up.weight.placements == (Replicate(),)

    @ranks(1)
    def test_a_layer_that_peft_wraps_is_an_error_before_peft_reads_it():
        class Wrapper(nn.Module):
            def __init__(self, layer):
                super().__init__()
                self.base_layer = layer

        model = parallelize(make(), data_parallel(), mesh_of())
        Wrapper(model.up)
        Wrapper.__module__ = "peft.tuners.lora.layer"
        assert 'plan.under("base_model.model")' in error_of(Wrapper, model.up)
        Wrapper(nn.Linear(2, 2))

    @ranks(2)
    def test_copies_of_a_model_are_models_of_their_own_under_the_plan():
        batch = torch.arange(4.0 * SIZE, dtype=torch.float64).view(4, SIZE).sin()

        def run(model):
            """A reference, an average and a copied layer, as scripts of one device have them."""
            reference, optimizer, seen = (
                copy.deepcopy(model).requires_grad_(False),
                torch.optim.SGD(model.parameters(), 0.1),
                [],
            )
            average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
            for step in range(4):
                loss = (model(batch + step) - reference(batch + step)).square().mean() + model(batch).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                average.update_parameters(model)
                seen.append(loss.item())
            model(batch).square().mean().backward()
            again, nested = copy.deepcopy(model), copy.deepcopy(nn.ModuleList([model]))[0]  # With gradients.
            again.blocks.append(copy.deepcopy(again.blocks[0]))
            again(batch).square().mean().backward()
            tensors = [*average.module.parameters(), *(p.grad for p in again.parameters()), *model.parameters()]
            return seen, [whole_tensor(each) for each in [*tensors, *nested.parameters()]]

        losses, tensors = run(make())
        mesh = mesh_of()
        for mode in ("eager", "static"):
            for plan in (data_parallel(), Plan().shard("up.(weight|bias)", Shard(0), "dp").default(Replicate())):
                found, others = run(parallelize(make(), plan, mesh, mode=mode))
                assert found == pytest.approx(losses, rel=1e-12), mode
                for one, other in zip(tensors, others, strict=True):
                    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)

    @ranks(2)
    def test_inference_mode_views_parameters_as_on_one_device():
        torch.manual_seed(0)
        single, batch = Viewing().double(), torch.randn(4, SIZE, SIZE, dtype=torch.float64)
        with torch.inference_mode():
            expected = copy.deepcopy(single)(batch)
        plans = (
            Plan().shard("<in:x>", Shard(0), "dp").default(Replicate()),
            Plan().shard("position", Shard(0), "dp").shard("layer.weight", Shard(1), "dp").shard("cache", Shard(1), "dp"),
        )
        for mode, plan in itertools.product(("eager", "static"), plans):
            model = copy.deepcopy(single)
            if mode == "eager":  # A hook that was there before views, too.
                model.register_forward_pre_hook(lambda module, args: (module.cache.view(-1), None)[1])
            model = parallelize(model, plan.default(Replicate()), mesh_of(), mode=mode)
            for _ in range(3):
                with torch.inference_mode():
                    torch.testing.assert_close(model(batch).full_tensor(), expected)
                    model(batch)[1:].view(-1)
                assert model.cache.full_tensor()[:, 0].eq(2).all() and not model.position.is_inference()
                model(batch).sum().backward()
            assert torch.ops.aten.view.default not in DTensor._op_dispatcher._custom_op_handlers

    @ranks(2)
    def test_packed_sequences_and_encoders_with_padding():
        class Packed(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.GRU(SIZE, SIZE, batch_first=True)

            def forward(self, x):
                packed = nn.utils.rnn.pack_padded_sequence(x, [5, 4, 4, 2], batch_first=True)
                return nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0]

        torch.manual_seed(0)
        batch, rows = torch.randn(4, 5, SIZE), Plan().shard("<in:x>", Shard(0), "dp").default(Replicate())
        single = Packed()
        model = parallelize(copy.deepcopy(single), rows, mesh_of())
        single(batch).square().sum().backward(), model(batch).square().sum().backward()
        for param, other in zip(model.parameters(), single.parameters()):
            torch.testing.assert_close(param.grad.full_tensor(), other.grad, rtol=1e-4, atol=1e-5)
        # On one device, its fast path gives zeros where rows are padded.
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(SIZE, 2, SIZE, batch_first=True), 1).eval()
        for plan in (Plan(), Plan().shard("<in:src>", Shard(0), "dp")):
            model = parallelize(copy.deepcopy(encoder), plan.default(Replicate()), mesh_of())
            with torch.no_grad():
                said = on_both(functools.partial(model, src_key_padding_mask=torch.arange(5).expand(4, -1) > 3), batch)
            assert all("enable_nested_tensor=False" in each for each in said), said
        for mode in ("eager", "static"):  # Layers with hooks call other ops.
            model = parallelize(copy.deepcopy(encoder), Plan().default(Replicate()), mesh_of(), mode=mode)
            with torch.inference_mode():
                said = error_of(functools.partial(model, src_key_padding_mask=torch.arange(5).expand(4, -1) > 3), batch)
            assert "enable_nested_tensor=False" in said, (mode, said)

    @ranks(2)
    def test_a_model_with_units_is_not_copied_and_the_error_says_what_to_do():
        model = parallelize(make(), data_parallel(units=True), mesh_of())
        assert "Copy the model before parallelize" in error_of(copy.deepcopy, model)

    @ranks(2)
    def test_hooks_on_parameters_run_in_units_too_and_those_of_before_are_an_error():
        losses = {}
        for name in ("one device", "replicated", "units"):
            model, batch = make(), torch.ones(4, SIZE, dtype=torch.float64)
            if name != "one device":
                model = parallelize(model, data_parallel(units=name == "units"), mesh_of())
            model.blocks[0].weight.register_hook(lambda grad: grad * 3)
            optimizer, losses[name] = torch.optim.SGD(model.parameters(), 0.1), []
            for _ in range(3):
                loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses[name].append(loss.item())
        assert losses["replicated"] == losses["units"] == pytest.approx(losses["one device"], rel=1e-12), losses
        hooked = make()
        hooked.up.weight.register_hook(lambda grad: grad * 3)
        said = on_both(parallelize, hooked, data_parallel(), mesh_of())
        assert all("up.weight has a hook" in each for each in said), said

    @ranks(2)
    def test_an_optimizer_that_reads_numbers_of_parameters_takes_the_steps_of_one_process():
        """Adafactor reads norms by ``item()``. Without a plan it is an error: see test_fsdp_silent_uses.py."""
        losses = {}
        for name in ("one device", "replicated", "units"):
            model, batch = make(), torch.ones(4, SIZE, dtype=torch.float64)
            if name != "one device":
                model = parallelize(model, data_parallel(units=name == "units"), mesh_of())
            optimizer, losses[name] = torch.optim.Adafactor(model.parameters(), 0.1), []
            for _ in range(3):
                loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses[name].append(loss.item())
        assert losses["replicated"] == pytest.approx(losses["one device"], rel=1e-12), losses
        assert losses["units"] == pytest.approx(losses["one device"], rel=1e-12), losses

    @ranks(2)
    def test_ranks_that_add_different_parameters_and_parameters_without_values_raise():
        model = parallelize(make(), data_parallel(), mesh_of())
        for error in on_both(setattr, model, "head", nn.Linear(SIZE, 3, bias=dist.get_rank() == 0)):
            assert "the addition of head.weight" in error and "rank 0 has head.bias of torch.float32 and shape (3,)" in error
        assert not hasattr(model, "head")
        for module in (nn.Linear(SIZE, 3, device="meta"), deferred_init(lambda: nn.Linear(SIZE, 3))):
            assert "head.weight is on the meta device" in error_of(setattr, model, "head", module)

    @ranks(2)
    def test_an_optimizer_of_parameters_that_are_not_in_the_model_any_more_warns():
        for units in (False, True):
            model, head = make(), nn.Linear(SIZE, 3).double()
            optimizers = [torch.optim.SGD(model.parameters(), lr=1.0), torch.optim.SGD(head.parameters(), lr=1.0)]
            parallelize(model, data_parallel(units), mesh_of())
            model.head = head
            texts = []
            for optimizer in optimizers:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    optimizer.step()
                texts.append(" ".join(str(each.message) for each in caught))
            assert "parallelize has replaced since: up.weight, up.bias, " in texts[0], texts
            assert "SGD has parameters that parallelize has replaced since: head.weight, head.bias." in texts[1], texts

    @ranks(2)
    def test_a_plain_parameter_around_a_parallelized_model_is_an_error_that_names_it():
        class Around(nn.Module):
            def __init__(self, body, head):
                super().__init__()
                self.head, self.body = head, body

            def forward(self, x):
                return self.head(self.body(x))

        mesh, x = mesh_of(), torch.ones(4, SIZE).double()
        for head in (nn.Linear(4, 3).double(), parallelize(nn.Linear(4, 3).double(), Plan().default(Replicate()), mesh)):
            is_plain = not isinstance(head.weight, DTensor)
            model = Around(parallelize(make(), data_parallel(), mesh), head)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model(x).sum().backward()
            error = error_of(optimizer.step)
            assert (
                "SGD has plain parameters, of which the gradients are DTensors: head.weight, head.bias." in error
            ) is is_plain

    @ranks(2)
    def test_an_optimizer_that_has_made_steps_before_parallelize_warns():
        parallelize(make(), data_parallel(), mesh_of())  # Steps are watched from now on.
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for _ in range(3):
            optimizer.step()
        parallelize(model, data_parallel(), mesh_of())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        assert "parallelize has replaced since: up.weight" in str(caught[0].message)

    @ranks(2)
    def test_a_parameter_that_replaces_one_of_a_unit_is_an_error_that_names_it():
        model = parallelize(make(), data_parallel(units=True), mesh_of())
        replaced_parameter(model)
        assert "up.bias was replaced by Parameter" in error_of(model, torch.ones(4, SIZE).double())


def another(rank, change):
    model = make()
    if rank:
        change(model)
    return model


def frozen(model):
    model.up.bias.requires_grad_(False)


def with_buffer(model):
    model.up.register_buffer("table", torch.ones(3))


def wider(model):
    model.up, model.blocks[0] = nn.Linear(SIZE, 12).double(), nn.Linear(12, SIZE).double()


def of_another_class(model):
    model.blocks[1].__class__ = Named


def without_a_layer(model):
    del model.blocks[1]


def with_dropout(model):
    model.up.register_module("dropout", nn.Dropout(0.2))


class DataTest(unittest.TestCase):
    @ranks(2)
    def test_values_assigned_to_data_arrive():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        plan = Plan().shard("weight", Shard(0), "tp").default(Replicate())
        layer = parallelize(nn.Linear(4, 5, bias=False), plan, mesh)
        value, param = torch.arange(20.0).view(5, 4), layer.weight
        param.data = value
        assert torch.equal(param.full_tensor(), value) and param.placements == (Shard(0),)
        param.data = param.data * 0.5
        assert torch.equal(param.full_tensor(), value * 0.5) and layer.weight is param
        param.data[0] = 7.0
        assert param.full_tensor()[0].eq(7).all()
        for wrong in (torch.zeros(4, 5), value.double(), 1.0):
            told = error_of(setattr, param, "data", wrong)
            assert "assign one of the same shape and dtype" in told, told


class Named(nn.Linear):
    pass


DIFFERENT_MODELS = {
    frozen: ("the parameter up.bias of torch.float64 and shape (8,), rank", "shape (8,), frozen"),
    with_buffer: ("the buffer up.table of torch.float32 and shape (3,)",),
    wider: ("up.weight of torch.float64 and shape (8, 8)", "up.weight of torch.float64 and shape (12, 8)"),
    of_another_class: ("blocks.1, Linear(", "blocks.1, Named("),
    without_a_layer: ("blocks.1.weight", "down.weight"),
    with_dropout: ("up.dropout, Dropout(p=0.2",),
    nn.Module.half: ("up.weight of torch.float64", "up.weight of torch.float16"),
}


class MistakesTest(unittest.TestCase):
    @ranks(2)
    def test_models_that_differ_raise_before_a_value_is_sent_and_name_what_differs():
        for change, parts in DIFFERENT_MODELS.items():
            for plan in (Plan().default(Replicate()), Plan().shard("up.bias", Shard(0), "tp").default(Replicate())):
                model = another(dist.get_rank(), change)
                before = dict(model.named_parameters())
                for error in on_both(parallelize, model, plan, mesh_of("tp")):
                    assert error.startswith("ValueError") and all(part in error for part in parts), (change, error)
                assert all(before[name] is param for name, param in model.named_parameters())

    @ranks(2)
    def test_addresses_and_indices_of_devices_in_the_text_of_a_module_are_no_difference():
        class Own(nn.Linear):
            def extra_repr(self):
                return f"act=<function act at {hex(1000 + dist.get_rank())}>, device=cuda:{dist.get_rank()}"

        parallelize(Own(SIZE, SIZE), Plan().default(Replicate()), mesh_of())

    @ranks(2)
    def test_an_option_that_differs_is_named_with_both_values():
        rank, unit = dist.get_rank(), lambda **options: Plan().unit("", "dp", **options)
        dtypes = (torch.bfloat16, torch.float16)
        plans = {
            ("reshard_after_forward=True", "reshard_after_forward=False"): unit(reshard_after_forward=rank == 0),
            ("granularity=rows(2)", "granularity=rows(3)"): unit(granularity=rows(2 + rank)),
            ("weights=(1, 2)", "weights=(2, 2)"): unit(weights=[1 + rank, 2]),
            ("param_dtype=torch.bfloat16", "param_dtype=torch.float16"): unit(mp_policy=MixedPrecisionPolicy(dtypes[rank])),
            ('plan.unit("", "dp"),', "optional=True"): unit(**({"optional": True} if rank else {})),
            ("plan.default(Shard(0))", "plan.default(Replicate())"): Plan().default((Shard(0), Replicate())[rank]),
        }
        for parts, plan in plans.items():
            for error in on_both(parallelize, make(), plan, mesh_of()):
                assert error.startswith("ValueError") and all(part in error for part in parts), error
        plan = Plan().default(Replicate())
        for name, values in {"mode": ("eager", "static"), "promote": (True, False)}.items():
            for error in on_both(lambda: parallelize(make(), plan, mesh_of(), **{name: values[rank]})):
                assert f"rank 0 has {name}={values[0]!r}, rank 1 has {name}={values[1]!r}" in error, error

    @ranks(2)
    def test_arguments_of_another_type_are_named():
        mesh, plan = mesh_of("tp"), Plan().default(Replicate())
        calls = {
            "expected a Plan, got a value of type dict: begin with Plan()": (make(), {"weight": Shard(0)}, mesh),
            "expected a Plan, got a value of type str: Plan.from_json(text) reads JSON": (make(), plan.to_json(), mesh),
            "expected a Plan, got a value of type NoneType": (make(), None, mesh),
            "parallelize: mesh must be a DeviceMesh, got a str": (make(), plan, "tp"),
            "parallelize: mesh must be a DeviceMesh, got a Plan": (make(), mesh, plan),
            "a plan needs an nn.Module, got a value of type function": (make, plan, mesh),
            "has no names: pass mesh_dim_names": (make(), plan, init_device_mesh("cpu", (2,))),
            'names the mesh dimension "dp": the mesh has tp': (make(), Plan().unit("", "dp"), mesh),
        }
        for text, arguments in calls.items():
            assert text in error_of(parallelize, *arguments), text
        assert "promote must be True or False" in error_of(lambda: parallelize(make(), plan, mesh, promote="yes"))
        # Of one rank, it is an error of all.
        for plans, meshes, text in (((plan, {}), (mesh, mesh), "type dict"), ((plan, plan), (mesh, "tp"), "got a str")):
            errors = on_both(parallelize, make(), plans[dist.get_rank()], meshes[dist.get_rank()])
            assert all(text in error for error in errors), errors
        for text, call in {
            "a Plan is made of rules, got 5": lambda: Plan(5),
            "from_json reads text, got a value of type dict": lambda: Plan.from_json({}),
            "Plan.from_transformers reads a model, got a value of type dict": lambda: Plan.from_transformers({}),
            "Plan.from_torchtitan reads a model, got a value of type str": lambda: Plan.from_torchtitan("llama"),
            "sizes must be two or more positive integers, got 4": lambda: Plan().segments("weight", 4, 0),
            "dims must be the name of a mesh dimension or a tuple of names, got 0": lambda: Plan().shard("w", Shard(0), 0),
            "placement must be of Shard, ": lambda: Plan().shard("w", "Shard(0)", "tp"),
            "did you mean reshard_after_forward?": lambda: Plan().unit("", "tp", reshard_after_foward=True),
        }.items():
            assert text in error_of(call), text

    def test_a_mesh_of_another_type_is_named_without_a_process_group(self):
        self.assertIn("got a str: pass init_device_mesh", error_of(parallelize, make(), Plan().default(Replicate()), "tp"))

    @ranks(2)
    def test_a_dimension_that_an_activation_does_not_have_is_named_with_its_path():
        for placement in (Shard(4), Shard(-4), _StridedShard(-4, split_factor=2), InterleavedShard(-4, 2)):
            for call in ("shard", "annotate", "redistribute"):
                for path, name in (("<in>", "<in:input>"), ("<out>", "<out>")):
                    plan = getattr(Plan().default(Replicate()), call)(path, placement, "tp")
                    model = parallelize(nn.Linear(SIZE, SIZE), plan, mesh_of("tp"))
                    error = error_of(model, torch.ones(2, SIZE))
                    assert f"{name} (rules (1,) of the plan) has 2 dimensions" in error and str(placement.dim) in error, error

    @ranks(2)
    def test_a_negative_dimension_counts_from_the_end_under_all_placements():
        for placement in (Shard(-1), _StridedShard(-1, split_factor=2), InterleavedShard(-1, 2)):
            plan = Plan().default(Replicate()).shard("<out>", placement, "tp")
            model, x = parallelize(nn.Linear(SIZE, SIZE), plan, mesh_of("tp")), torch.ones(2, SIZE)
            out = model(x)
            assert out.placements[0].dim == 1 and out.to_local().shape == (2, SIZE // 2), placement
            expected = nn.functional.linear(x, model.weight.full_tensor(), model.bias.full_tensor())
            assert torch.equal(out.full_tensor(), expected), placement

    @ranks(2)
    def test_who_waits_in_an_op_on_a_list_of_tensors_is_named():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        parallelize(make(), data_parallel(), mesh)  # Redistributions are watched from now on.
        named = []

        def look(what, of, waiting):
            named.append((what, waiting()))
            return contextlib.nullcontext()

        rows, columns = (distribute_tensor(torch.ones(4, 4), mesh, [Shard(dim)]) for dim in range(2))
        with mock.patch.object(_plain_ops, "peers_named", look):
            torch.cat([rows, columns])
            torch.stack([rows, columns])
        assert named == [(f"redistribution for aten.{name}.default", [0, 1]) for name in ("cat", "stack")], named


if __name__ == "__main__":
    unittest.main()
