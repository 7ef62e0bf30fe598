"""load_state_dict of plain full tensors: each rank takes its part, or all ranks raise and nothing changes."""

import copy
import sys
import unittest

import torch
import torch.distributed as dist
from common import error_of, fake_group, ranks, run_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.two_tensor import TwoTensor

from torch_ragged.fsdp import fully_shard, reshard_to, rows

WIDTH = 6


class Block(nn.Module):
    """Two matrices, an optional tied one, and buffers."""

    def __init__(self, tied=False):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.scale = nn.Parameter(torch.tensor(0.5))
        if tied:
            self.other = nn.Linear(WIDTH, 8)
            self.other.weight = self.up.weight

    def forward(self, x):
        return x + self.norm(self.down(torch.relu(self.up(x)))) * self.scale


def plain(seed=1, **knobs):
    torch.manual_seed(seed)
    return nn.Sequential(Block(**knobs), Block(**knobs), nn.Linear(WIDTH, 3))


def shard(model, mesh=None, **knobs):
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model[:2]:
        fully_shard(block, mesh=mesh, **knobs)
    return fully_shard(model, mesh=mesh, **knobs)


def values_of(model, scale=3.0):
    """Other values for a plain model."""
    return {k: v * scale + 1 if v.is_floating_point() else v + 5 for k, v in model.state_dict().items()}


def full(model):
    return {name: v.full_tensor() if isinstance(v, DTensor) else v.clone() for name, v in model.state_dict().items()}


def assert_equal(found, wanted):
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value.to(found[name].dtype)), name


def assert_loads(model, values, mesh_dims=1):
    """Both forms of load_state_dict load ``values``; the parameters stay what an optimizer holds, in the groups' buffers."""
    params = list(model.parameters())
    for assign, factor in ((False, 1), (True, 2)):
        wanted = {name: value * factor for name, value in values.items()}
        with CommDebugMode() as mode:
            assert str(model.load_state_dict(wanted, assign=assign)) == "<All keys matched successfully>"
        # No data is sent: ranks agree once that all values fit, over each mesh dimension.
        assert {str(op): n for op, n in mode.get_comm_counts().items()} == {"c10d.allreduce_": mesh_dims}, mode.comm_counts
        assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
        assert_equal(full(model), wanted)
    for state in model._ragged_states(recurse=True):
        for group in state.groups:
            assert all(group.shards.holds(param.sharded.to_local()) for param in group.params)


def check_ranks_outside_of_the_mesh():
    """They hold no elements and load nothing, and hold their part after reshard_to."""
    model, values = plain(0), values_of(plain())
    shard(model, DeviceMesh("cpu", [0, 1]))
    for assign in (False, True):
        model.load_state_dict(values, assign=assign)
    error = error_of(model.load_state_dict, {**values, "2.bias": torch.ones(9)})
    reshard_to(model, None, init_device_mesh("cpu", (3,)))
    assert_equal(full(model), values)
    assert_loads(model, values_of(plain(), 5.0))
    return error


def check_some_are_dtensors():
    model, values = shard(plain(0)), values_of(plain())
    distributed = shard(plain())
    distributed.load_state_dict(values)
    for assign in (False, True):
        mixed = {k: v.clone() if "up" in k else values[k] for k, v in distributed.state_dict().items()}
        assert isinstance(mixed["0.up.weight"], DTensor) and not isinstance(mixed["0.down.weight"], DTensor)
        model.load_state_dict(mixed, assign=assign)
        assert_equal(full(model), values)
    with CommDebugMode() as mode:
        model.load_state_dict(distributed.state_dict())
    assert not mode.get_total_counts()  # Of DTensors alone nothing is asked.
    part = {"0.up.weight": values["0.up.weight"] * 2, "2.bias": values["2.bias"] * 2, "unknown": torch.ones(1)}
    missing, unexpected = model.load_state_dict(part, strict=False)
    assert unexpected == ["unknown"] and "2.weight" in missing and not {"2.bias", "0.up.weight"} & {*missing}
    assert_equal(full(model), {**values, **{k: v for k, v in part.items() if k != "unknown"}})
    return error_of(model.load_state_dict, part)


def check_dtypes():
    """Copies cast. Assigned values change the dtype of a whole group, as nn.Module's change that of a parameter."""
    values = values_of(plain())
    half = {k: v.bfloat16() if v.is_floating_point() else v for k, v in values.items()}
    model = shard(plain(0))
    params = list(model.parameters())
    model.load_state_dict(half)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert_equal(full(model), half)
    model.load_state_dict(half, assign=True)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert_equal(full(model), half)
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    model(torch.randn(4, WIDTH, dtype=torch.bfloat16)).sum().backward()
    with torch.device("meta"):
        model = shard(plain(0))
    model.load_state_dict(half, assign=True)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert_equal(full(model), half)
    model = shard(plain(0))
    before = full(model)
    error = error_of(model.load_state_dict, {**values, "1.up.bias": half["1.up.bias"]}, assign=True)
    assert_equal(full(model), before)
    return error


class Renames(nn.Linear):
    """An old checkpoint has its weight as two halves."""

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        state_dict[f"{prefix}weight"] = torch.cat([state_dict.pop(f"{prefix}{half}") for half in ("top", "low")])
        super()._load_from_state_dict(state_dict, prefix, *rest)


def check_names():
    """Wrappers that state dicts leave out, modules that rename what they load, and parents that are not sharded."""
    for sharded_inside in (False, True):
        model = plain(0)
        for index in range(2):
            model[index] = checkpoint_wrapper(model[index])
        if sharded_inside:
            for wrapper in model[:2]:
                fully_shard(wrapper._checkpoint_wrapped_module)
        assert_loads(fully_shard(model), values_of(plain()))
    model, values = fully_shard(nn.Sequential(Renames(4, 6), nn.Linear(6, 2))), values_of(nn.Sequential(nn.Linear(4, 6)))
    top, low = values.pop("0.weight").chunk(2)
    model.load_state_dict({**values, "0.top": top, "0.low": low}, strict=False)
    assert torch.equal(model[0].weight.full_tensor(), torch.cat([top, low]))
    values = values_of(nn.Sequential(plain(), plain()))
    parent = nn.Sequential(shard(plain(0)), shard(plain(0)))
    parent.load_state_dict(values)
    assert_equal(full(parent), values)
    before = full(parent)
    wrong = {k: v * 2 for k, v in values.items()} | {"0.2.bias": torch.ones(9)}
    error = error_of(parent.load_state_dict, wrong)
    assert_equal(full(parent), before)
    inner = parent[0][0].up  # A module inside the one that fully_shard was called on.
    inner.load_state_dict({"weight": torch.ones(8, WIDTH), "bias": torch.ones(8)})
    assert torch.equal(inner.weight.full_tensor(), torch.ones(8, WIDTH))
    return error


def check_errors():
    """All ranks raise, and no value is copied."""
    rank, values, found = dist.get_rank(), values_of(plain()), []
    model = shard(plain(0))
    before = full(model)
    for assign in (False, True):

        def attempt(state_dict, **options):
            found.append(error_of(model.load_state_dict, state_dict, assign=assign, **options))  # noqa: B023
            assert_equal(full(model), before)

        attempt({**values, "1.up.weight": torch.ones(3, 3), "0.scale": torch.ones(2)})
        attempt({**values, "2.bias": torch.ones(4)} if rank == 1 else values)
        attempt({**values, "2.bias": [1.0]})
        attempt({**values, "2.bias": values["2.bias"].to("meta")})
        attempt({**values, "2.weight": TwoTensor(values["2.weight"], values["2.weight"])})
        attempt(values if rank == 0 else {})
        attempt(values if rank == 0 else {}, strict=False)
    model.load_state_dict({**values, "0.scale": values["0.scale"].view(1)})  # As nn.Module loads it, too.
    assert_equal(full(model), values)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    values = values_of(plain(), 5.0)
    set_model_state_dict(model, dict(values) if rank == 0 else {}, options=options)  # What the error says.
    assert_equal(
        {k: v for k, v in full(model).items() if "norm" not in k}, {k: v for k, v in values.items() if "norm" not in k}
    )
    return found


class Doubled(TwoTensor):
    """A type with its own all-gather."""

    def fsdp_pre_all_gather(self, mesh):
        return (self.a, self.b), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        return None if out is not None else (Doubled(*outputs), outputs)


class Closed(Doubled):
    """A type that takes no other one's values."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs):
        if func.overloadpacket.__name__ == "copy_" and not isinstance(args[1], cls):
            raise NotImplementedError(f"{cls.__name__} has no copy_ of {type(args[1]).__name__}")
        return super().__torch_dispatch__(func, types, args, kwargs)


def check_types_with_their_own_all_gather():
    values, errors = torch.randn(5, WIDTH), []
    for cls in (Doubled, Closed):
        model = nn.Sequential(nn.Linear(WIDTH, 5))
        model[0].weight = nn.Parameter(cls(torch.zeros(5, WIDTH), torch.zeros(5, WIDTH)))
        fully_shard(model)
        bias = model[0].bias.full_tensor()
        for assign in (False, True):
            for value in (values, cls(values, values)):
                error = error_of(model.load_state_dict, {"0.weight": value, "0.bias": torch.zeros(5)}, assign=assign)
                local = model[0].weight.to_local()
                errors += [error] if error else []
                loaded = torch.zeros_like(values) if cls is Closed and value is values and not errors[:-2] else values
                if not error:
                    assert torch.equal(local.a, loaded.chunk(2)[dist.get_rank()]) and torch.equal(local.a, local.b)
                    assert torch.equal(model[0].bias.full_tensor(), torch.zeros(5))
                else:
                    assert cls is Closed and value is values
                    if not assign:
                        assert not local.a.any() and torch.equal(model[0].bias.full_tensor(), bias)
    return errors


def calls_of_assignment(layers):
    """The Python calls of ``load_state_dict(assign=True)`` into as many groups."""
    model = nn.Sequential(*(fully_shard(nn.Linear(2, 2, bias=False)) for _ in range(layers)))
    values = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(values, assign=True)  # Caches are full.
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        model.load_state_dict(values, assign=True)
    finally:
        sys.setprofile(None)
    return count


class AssignmentTest(unittest.TestCase):
    def test_work_per_parameter_does_not_grow_with_the_number_of_parameters(self):
        with fake_group(2):
            one, four = calls_of_assignment(32), calls_of_assignment(128)
        self.assertLess(four, 4 * one + 200)


class PlainStateDictTest(unittest.TestCase):
    @ranks(4)
    def test_each_rank_takes_its_part_under_every_placement():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        values = values_of(plain())
        assert_loads(shard(plain(0)), values)
        assert_loads(shard(plain(0), orig_param_policy=lambda fqn, param: rows(3)), values)
        assert_loads(shard(plain(0), mesh), values, mesh_dims=2)
        assert_loads(shard(plain(0), shard_placement_fn=lambda p: Shard(p.ndim - 1) if p.ndim else None), values)
        assert_loads(shard(plain(0), offload_policy=CPUOffloadPolicy(pin_memory=False)), values)
        assert_loads(shard(plain(0, tied=True)), values_of(plain(tied=True)))
        assert_loads(fully_shard(list(plain(0)))[0], {k: v for k, v in values_of(plain()[0]).items()})

    @ranks(4)
    def test_each_rank_takes_its_part_of_parameters_under_tensor_parallelism():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = plain(0)
        for block in model[:2]:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        shard(model, mesh["dp"], orig_param_policy=lambda fqn, param: rows(1))
        assert len(model[0].up.weight.placements) == len(model[0].down.weight.placements) == 2
        assert_loads(model, values_of(plain()), mesh_dims=3)  # "dp" of plain parameters, and both of the others.

    def test_ranks_outside_of_the_mesh_load_nothing_and_load_their_part_in_a_later_mesh(self):
        for error in run_ranks(3, check_ranks_outside_of_the_mesh):
            self.assertIn("size mismatch for 2.bias", error)

    @ranks(2)
    def test_an_optimizer_trains_what_was_loaded():
        single, model = plain(), shard(plain(0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(4, WIDTH)
        model(x)  # Parameters that forward leaves unsharded are resharded first.
        model.load_state_dict(single.state_dict(), assign=True)
        reference = torch.optim.SGD(single.parameters(), lr=0.1)
        for _ in range(2):
            for each, stepper in ((model, optimizer), (single, reference)):
                each(x).square().mean().backward()
                stepper.step()
                stepper.zero_grad()
        for name, value in full(model).items():
            torch.testing.assert_close(value, single.state_dict()[name])

    def test_some_values_may_be_dtensors_and_some_missing(self):
        for error in run_ranks(2, check_some_are_dtensors):
            self.assertRegex(
                error, "RuntimeError: Error.* loading state_dict for FSDPSequential:\n.*Missing key.*\n.*Unexpected key"
            )

    @ranks(2)
    def test_a_model_on_meta_takes_assigned_values_into_the_parameters_that_it_has():
        for knobs in ({}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}, {"orig_param_policy": lambda f, p: rows(2)}):
            with torch.device("meta"):
                model = shard(plain(), **knobs)
            values, params = values_of(plain()), list(model.parameters())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model.load_state_dict(values, assign=True)
            assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
            assert_equal(full(model), values)
            model(torch.randn(4, WIDTH)).sum().backward()
            optimizer.step()
            assert not torch.equal(full(model)["2.weight"], values["2.weight"])
        with torch.device("meta"):
            model = shard(plain())
        for key, value in values.items():  # One name after the other.
            model.load_state_dict({key: value}, assign=True, strict=False)
        assert_equal(full(model), values)
        with torch.device("meta"):
            model = shard(plain())
        with unittest.TestCase().assertWarnsRegex(UserWarning, "Did you mean to pass `assign=True`"):
            model.load_state_dict(values)
        assert model[0].up.weight.is_meta

    def test_copies_cast_and_assigned_values_change_the_dtype_of_a_whole_group(self):
        for error in run_ranks(2, check_dtypes):
            self.assertIn(
                "1.up.bias is torch.bfloat16 in the state dict and torch.float32 in the model: with assign=True, all 7 "
                "parameters of its group change their dtype together",
                error,
            )

    def test_names_are_found_behind_wrappers_renaming_modules_and_parents_that_are_not_sharded(self):
        for error in run_ranks(2, check_names):
            self.assertIn("size mismatch for 0.2.bias: copying a param with shape torch.Size([9])", error)

    def test_all_ranks_raise_and_nothing_is_copied(self):
        for rank, errors in enumerate(run_ranks(2, check_errors)):
            self.assertEqual(errors[:7], errors[7:])
            shapes, one, number, meta, wrapped, empty, not_strict = errors[:7]
            for name, given, own in (("1.up.weight", [3, 3], [8, WIDTH]), ("0.scale", [2], [])):
                self.assertIn(
                    f"size mismatch for {name}: copying a param with shape torch.Size({given}) from checkpoint, the shape in "
                    f"current model is torch.Size({own}).",
                    shapes,
                )
            self.assertTrue(
                one.startswith("RuntimeError: Error(s)" if rank else "RuntimeError: load_state_dict failed on rank 1")
            )
            self.assertIn("size mismatch for 2.bias", one)
            self.assertIn('While copying the parameter named "2.bias", expected torch.Tensor or Tensor-like object', number)
            self.assertIn("2.bias is on the meta device in the state dict", meta)
            self.assertIn("2.weight is a TwoTensor in the state dict, which cannot be cut", wrapped)
            self.assertIn("rank 0 has a full tensor for 0.scale, rank 1 has no value for 0.scale", empty)
            self.assertIn(
                "set_model_state_dict(model, state_dict, options=StateDictOptions(full_state_dict=True, broadcast", empty
            )
            self.assertEqual(empty, not_strict)

    @ranks(2)
    def test_a_module_with_two_names_is_checked_under_both_before_anything_is_copied():
        layer = nn.Linear(WIDTH, WIDTH)
        single = nn.Sequential(nn.Linear(WIDTH, WIDTH), layer, layer)
        model, values = fully_shard(copy.deepcopy(single)), values_of(single)
        before = full(model)
        error = error_of(model.load_state_dict, values | {"2.weight": torch.ones(3, 3)})
        assert "size mismatch for 2.weight" in error, error
        assert_equal(full(model), before)
        assert_loads(model, values)

    def test_types_with_their_own_all_gather_take_plain_values_if_they_can_copy_them(self):
        for errors in run_ranks(2, check_types_with_their_own_all_gather):
            self.assertEqual(len(errors), 2)
            for error in errors:
                self.assertIn(
                    "0.weight is a Closed with its own all-gather, which takes no Tensor (NotImplementedError:", error
                )
