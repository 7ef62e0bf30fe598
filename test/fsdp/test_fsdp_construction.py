"""What fully_shard takes and makes: lists, placements, dtypes, the meta device; and that ranks agree on it."""

import copy
import unittest
from types import SimpleNamespace

import torch
import torch.distributed as dist
from common import collectives_seen, error_of, ranks, run_ranks
from soon import soon
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from torch_ragged import RaggedShard
from torch_ragged.fsdp import (
    HIERARCHICAL,
    Offload,
    blocks,
    buffer_layouts,
    elements,
    fully_shard,
    memory_report,
    offloaded,
    rows,
    tensor,
)

WIDTH = 10


class Stack(nn.Module):
    """Two blocks, a norm and a head."""

    def __init__(self, device=None):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, device=device) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH, device=device), nn.Linear(WIDTH, 7, device=device)

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(self.norm(x))


class Chunked(Stack):
    """Its forward ends before the head, which the loss calls several times."""

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.norm(x)


def world():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def batch(step=0):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def loss_of(model, x):
    return model(x).pow(2).mean()


def train(model, steps=4, loss_of=loss_of):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    curve = []
    for step in range(steps):
        loss = loss_of(model, batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        curve.append(loss.item())
    return torch.tensor(curve)


def full(model):
    return {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}


def assert_same(ours, theirs, **options):
    want, got = train(theirs, **options), train(ours, **options)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert (want[0] - want[-1]).abs() > 0.01
    ours, theirs = full(ours), full(theirs)
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-5, msg=lambda m: f"{name}: {m}")


# -- lists of modules ----------------------------------------------------------------------------------------------------


def build_listed(shard, cls=Stack, **knobs):
    torch.manual_seed(0)
    model, mesh = cls(), world()
    shard(list(model.blocks), mesh=mesh, **knobs)
    shard([model.norm, model.head], mesh=mesh, **knobs)
    return shard(model, mesh=mesh, **knobs)


def chunked_loss(model, x):
    return sum(model.head(part).pow(2).mean() for part in model(x).chunk(2))


def check_conversions_of_lists():
    """``to`` and the like on one of several modules that share a group is none of the others'."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    a, b = model
    fully_shard([a, b], mesh=world())
    for module, value in ((a, 1.0), (b, 2.0)):
        assert module.weight.is_meta and "on the meta device" in error_of(model, torch.ones(1, 8))
        module.to_empty(device="cpu")
        nn.init.constant_(module.weight, value), nn.init.constant_(module.bias, value)
    params = list(model.parameters())
    loss_of(model, torch.ones(1, 8)).backward()
    grads = [p.grad.full_tensor() for p in params]

    def assert_values(value_of_a, dtype=torch.float32):
        assert all(p is q for p, q in zip(params, model.parameters(), strict=True))
        for p, value, grad in zip(params, (value_of_a, value_of_a, 2.0, 2.0), grads, strict=True):
            assert torch.equal(p.full_tensor(), torch.full(p.shape, value, dtype=dtype)), (p, value)
            assert torch.equal(p.grad.full_tensor(), grad.to(dtype))
        group = a._ragged_fsdp_state.groups[0]
        assert all(group.sharded.holds(p.to_local()) for p in params) and group.orig_dtype == dtype

    assert_values(1.0)
    a._apply(lambda t: t * 4)  # Also of a parent that is not sharded: once for every parameter.
    grads[:2] = [grad * 4 for grad in grads[:2]]
    assert_values(4.0)
    a.double()
    part = error_of(model, torch.ones(1, 8))
    b.double()
    assert_values(4.0, torch.float64)
    model.float()
    assert_values(4.0)
    assert loss_of(model, torch.ones(1, 8)) > 1
    fully_shard(model, mesh=world()).double()
    assert_values(4.0, torch.float64)
    return part


# -- placements ----------------------------------------------------------------------------------------------------------


def build(shard, cls=Stack, policy=None, mesh=None, **knobs):
    torch.manual_seed(0)
    model, mesh = cls(), mesh or world()
    for block in model.blocks:
        shard(block, mesh=mesh, **knobs)
    if policy is not None:
        knobs["orig_param_policy"] = policy
    return shard(model, mesh=mesh, **knobs)


def check_shard_placements():
    def shards(param):
        return Shard(-1) if param.ndim == 2 and param.shape[0] == WIDTH else Shard(0)

    ranks = dist.get_world_size()
    theirs = build(torch_fully_shard, shard_placement_fn=shards if WIDTH % ranks == 0 else None)
    ours = build(fully_shard, shard_placement_fn=shards)
    assert ours.blocks[0].weight.placements == (Shard(1),) and ours.head.weight.placements == (Shard(0),)
    for name, param in ours.named_parameters():
        whole = distribute_tensor(full(theirs)[name].detach(), param.device_mesh, param.placements)
        assert torch.equal(whole.to_local(), param.to_local()), name
    assert_same(ours, theirs)
    theirs.load_state_dict(ours.state_dict()), ours.load_state_dict(theirs.state_dict())


class Nothing(nn.Module):
    """Parameters without elements, and one with some."""

    def __init__(self):
        super().__init__()
        self.wide, self.tall = nn.Parameter(torch.empty(0, 5)), nn.Parameter(torch.empty(5, 0))
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return (x @ self.wide).sum() + (x.new_ones(1, 5) @ self.tall).sum() + self.scale.sum()


def check_nothing_is_cut_as_dtensor_cuts_it():
    model = fully_shard(Nothing(), shard_placement_fn=lambda p: Shard(p.ndim - 1 if p.shape[0] == 0 else 0))
    for param, whole in ((model.wide, torch.empty(0, 5)), (model.tall, torch.empty(5, 0))):
        expected = distribute_tensor(whole, param.device_mesh, param.placements)
        assert param.to_local().shape == expected.to_local().shape, (param.to_local().shape, expected.to_local().shape)
        assert param.full_tensor().shape == whole.shape
    model(torch.empty(2, 0)).backward()
    assert model.wide.grad.full_tensor().shape == (0, 5) and model.scale.grad.full_tensor().tolist() == [1, 1, 1]


def granular(param):
    return {2: rows(3), 1: None}[param.ndim]


def check_shard_placement_fn_returns_granularities():
    model = build(fully_shard, shard_placement_fn=granular)
    placement = model.head.weight.placements[0]
    assert isinstance(placement, RaggedShard) and placement.dims == (0,)
    assert buffer_layouts(model)["root"].tensors[2].block == 3 * WIDTH
    assert_same(model, build(torch_fully_shard))


def shard_placement_errors():
    return [
        error_of(fully_shard, nn.Linear(4, 4), mesh=world(), shard_placement_fn=lambda p: 3),
        error_of(fully_shard, nn.Linear(4, 4), mesh=world(), shard_placement_fn=lambda p: Shard(2)),
        error_of(
            fully_shard, nn.Linear(4, 4), mesh=world(), shard_placement_fn=granular, orig_param_policy=lambda f, p: tensor()
        ),
    ]


def step_of_complex_parameters(options):
    """A step of an optimizer that sees them as pairs of real numbers."""
    one = nn.Linear(6, 6, dtype=torch.complex64)
    two = fully_shard(copy.deepcopy(one), mesh=world(), **options)
    for model in (one, two):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-3)
        model(torch.ones(2, 6, dtype=torch.complex64)).abs().sum().backward()
        optimizer.step()
    assert all(torch.allclose(a.full_tensor(), b) for a, b in zip(two.parameters(), one.parameters(), strict=True))


# -- dtypes --------------------------------------------------------------------------------------------------------------


class Mixed(Stack):
    """Weights of bfloat16 beside float32 norms, an integer table that is frozen, and a 0-D parameter."""

    def __init__(self):
        super().__init__()
        self.blocks.bfloat16()
        self.table = nn.Parameter(torch.arange(WIDTH, dtype=torch.int32), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.tanh(block(x.bfloat16())).float() * self.scale
        return self.head(self.norm(x)) + (self.table == 3).float()[:7]


class Rotating(Stack):
    """Its first step multiplies complex numbers."""

    def __init__(self):
        super().__init__()
        self.rotation = nn.Linear(WIDTH // 2, WIDTH // 2, dtype=torch.complex64)

    def forward(self, x):
        return super().forward(torch.view_as_real(self.rotation(torch.view_as_complex(x.view(-1, WIDTH // 2, 2)))).flatten(1))


def batch_of(step, rank):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


CONVERSIONS = (lambda m: m.double(), lambda m: m.to(torch.float32), lambda m: m.bfloat16())


# -- the meta device -----------------------------------------------------------------------------------------------------


def build_meta(**knobs):
    model = Stack("meta")
    for block in model.blocks:
        fully_shard(block, mesh=world(), **knobs)
    return fully_shard(model, mesh=world(), **knobs)


def single_and_values():
    """A model of one process, and copies of its values."""
    single = Stack()
    return single, {name: value.clone() for name, value in single.state_dict().items()}


def check_assigned_values_are_trained():
    """As FSDP2's users load; an optimizer made before the first forward trains them."""
    single, state = single_and_values()
    model = build_meta(orig_param_policy=lambda f, p: rows(3))
    ragged = {k: distribute_tensor(v, world(), dict(model.named_parameters())[k].placements) for k, v in state.items()}
    missing = {k: v for k, v in ragged.items() if k != "norm.bias"}
    model.load_state_dict(missing, strict=False, assign=True)
    partly = error_of(model, batch())
    model = build_meta(orig_param_policy=lambda f, p: rows(3))
    model.load_state_dict(ragged, assign=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert torch.equal(model(batch()), single(batch()))
    loss_of(model, batch()).backward()
    optimizer.step()
    assert not torch.equal(model(batch()), single(batch()))
    return partly


def check_conversions_without_memory():
    """A dtype may be given while there is no memory, a device may not."""
    assert build_meta().bfloat16().to_empty(device="cpu").head.weight.dtype == torch.bfloat16
    return error_of(build_meta().cpu)


# -- agreement -----------------------------------------------------------------------------------------------------------


@soon()
def check_agreement():
    """What is wrong on one rank is an error on all, and leaves the module as it was."""
    rank, mesh = dist.get_rank(), world()
    errors = []

    def attempt(module, mesh=mesh, **knobs):
        errors.append(error_of(fully_shard, module, mesh=mesh, **knobs))
        assert not isinstance(module, nn.Module) or type(module) is nn.Linear
        assert not isinstance(module, nn.Module) or not any(isinstance(p, DTensor) for p in module.parameters())

    attempt(nn.Linear(4, 4 if rank else 5))
    attempt(nn.Linear(4, 4), orig_param_policy=lambda f, p: rows(2) if rank == 1 else elements())
    attempt(nn.Linear(4, 4), reshard_after_forward=rank == 0)
    attempt(nn.Linear(4, 4), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16 if rank else None))
    attempt(nn.Linear(4, 4).requires_grad_(rank != 1))
    attempt(nn.Linear(4, 4), orig_param_policy=lambda f, p: 3 if rank == 1 else None)
    attempt(nn.Linear(4, 4), reshard_after_forward=7 if rank == 0 else True)
    attempt(nn.Linear(4, 4) if rank else "module")
    attempt(nn.Linear(4, 4) if rank else [])
    attempt(nn.Linear(4, 4), placements=None if rank else HIERARCHICAL)
    attempt(nn.Linear(6, 6), shard_placement_fn=lambda p: Shard(min(rank, p.ndim - 1)))
    fully_shard(nn.Linear(4, 4), mesh=mesh)(torch.ones(1, 4)).sum().backward()  # The ranks are still in step.
    attempt(nn.Linear(4, 4), mesh=mesh if rank else "cpu")  # Last: this rank does not know which ranks wait for it.
    return errors


def check_agreement_with_model_parallelism():
    """A parameter that tensor parallelism has cut on some ranks only, in pieces that are alike; calls that make groups."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    errors = []
    for placement in (Shard(0), Shard(1)):
        linear = nn.Linear(8, 8, bias=False)
        weight = distribute_tensor(linear.weight.detach(), mesh["tp"], [placement if rank < 2 else Shard(0)])
        linear.weight = nn.Parameter(weight if rank < 2 or placement == Shard(1) else weight.to_local())
        errors.append(error_of(fully_shard, linear, mesh=mesh["dp"]))
    # Before any rank makes a process group that another does not.
    errors.append(error_of(fully_shard, nn.Linear(4, 4), mesh=mesh, placements=HIERARCHICAL if rank else None))
    errors.append(error_of(fully_shard, nn.Linear(4, 4) if rank else None, mesh=mesh, placements=HIERARCHICAL))
    dims = SimpleNamespace(shard_names=("dp", "tp") if rank else ("dp", "pp"), replicate_names=())
    errors.append(error_of(fully_shard, nn.Linear(4, 4), mesh=mesh, dp_mesh_dims=dims))
    torch.manual_seed(0)
    fully_shard(nn.Linear(4, 4), mesh=mesh)(torch.ones(1, 4)).sum().backward()
    return errors


class ConstructionTest(unittest.TestCase):
    @ranks(2)
    def test_a_list_of_modules_trains_as_fsdp2s():
        for knobs in ({}, {"reshard_after_forward": True}, {"reshard_after_forward": False}):
            assert_same(build_listed(fully_shard, **knobs), build_listed(torch_fully_shard, **knobs))

    @ranks(2)
    def test_a_list_of_modules_is_one_group():
        model = build_listed(fully_shard, reshard_after_forward=True)
        assert list(buffer_layouts(model)) == ["blocks.0", "norm"]
        assert [tensor.name for tensor in buffer_layouts(model)["norm"].tensors] == ["0.weight", "0.bias", "1.weight", "1.bias"]
        for _ in range(2):
            with CommDebugMode() as mode:
                loss_of(model, batch()).backward()
            assert collectives_seen(mode) == (4, 2), mode.get_comm_counts()  # Two groups, each once in forward and in backward.
        memory_report(model)

    @ranks(2)
    def test_modules_of_one_group_may_run_in_several_calls():
        assert_same(build_listed(fully_shard, Chunked), build_listed(torch_fully_shard, Chunked), loss_of=chunked_loss)

    def test_conversions_of_one_module_leave_the_others_of_its_group_alone(self):
        for part in run_ranks(2, check_conversions_of_lists):
            self.assertIn("0.weight was replaced by DTensor of torch.Size([8, 8]), torch.float64", part)

    def test_shard_placements_are_honoured(self):
        for size in (2, 3):
            run_ranks(size, check_shard_placements)

    def test_parameters_without_elements_are_cut_as_dtensors(self):
        for size in (2, 3):
            run_ranks(size, check_nothing_is_cut_as_dtensor_cuts_it)

    def test_a_shard_placement_may_be_a_granularity(self):
        for size in (2, 3):
            run_ranks(size, check_shard_placement_fn_returns_granularities)

    def test_bad_shard_placements_are_refused(self):
        words = ("Invalid shard_placement_fn result: 3", "returned Shard(2)", "from one")
        for size in (2, 3):
            for errors in run_ranks(size, shard_placement_errors):
                for error, text in zip(errors, words, strict=True):
                    self.assertIn(text, error)

    @ranks(2)
    def test_steps_of_complex_parameters_are_not_lost():
        for options in ({}, {"shard_placement_fn": lambda param: Shard(0)}, {"orig_param_policy": lambda *_: rows(4)}):
            step_of_complex_parameters(options)
        knobs = {"shard_placement_fn": lambda param: Shard(0), "offload_policy": Offload(0.0)}
        model = fully_shard(nn.Linear(4, 5, dtype=torch.complex64), mesh=world(), **knobs)
        own = type("Own", (torch.optim.AdamW,), {})
        for make in (torch.optim.AdamW, own, torch.optim.SGD, lambda params, lr: offloaded(torch.optim.AdamW, model, lr=lr)):
            optimizer = make(model.parameters(), lr=0.1)
            model(torch.ones(2, 4, dtype=torch.complex64)).abs().sum().backward()
            text = error_of(optimizer.step)
            assert bool(text) == (make is not torch.optim.SGD), text
            assert not text or "complex parameters that Shard(0) does not cut evenly: weight, bias" in text, text
            optimizer.zero_grad()

    @ranks(3)
    def test_each_dtype_has_a_buffer_of_its_own():
        torch.manual_seed(0)
        single = Mixed()
        torch.manual_seed(0)
        sharded = fully_shard(Mixed(), mesh=world(), orig_param_policy=lambda fqn, p: rows(2))
        assert len(buffer_layouts(sharded)) == 3  # One per dtype.
        assert {p.dtype for p in sharded.parameters()} == {torch.bfloat16, torch.float32, torch.int32}
        for step in range(3):
            x = batch(step)
            assert torch.equal(sharded(x), single(x))
            everything = torch.cat([batch_of(step, rank) for rank in range(dist.get_world_size())])
            loss_of(single, everything).backward(), loss_of(sharded, x).backward()
            for (name, mine), (_, theirs) in zip(sharded.named_parameters(), single.named_parameters(), strict=True):
                if theirs.requires_grad:
                    assert mine.grad.dtype == theirs.dtype
                    torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=3e-2, atol=3e-3, msg=name)
        assert torch.equal(sharded.table.full_tensor(), torch.arange(WIDTH, dtype=torch.int32))

    @ranks(4)
    def test_complex_parameters_train_as_fsdp2s():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for shape, knobs in (
            (world(), {}),
            (mesh, {}),
            (world(), {"shard_placement_fn": lambda p: Shard(0)}),
            (mesh, {"placements": HIERARCHICAL}),
        ):
            ours = build(fully_shard, Rotating, mesh=shape, **knobs)
            torch.manual_seed(0)
            theirs = Rotating()
            torch_fully_shard(theirs.rotation)  # By itself: FSDP2 has one dtype per call.
            torch_fully_shard(theirs)
            optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, theirs)]
            for step in range(2):
                for model, optimizer in zip((ours, theirs), optimizers, strict=True):
                    loss_of(model, batch(step)).backward()
                    optimizer.step()
                for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                    torch.testing.assert_close(mine.grad.full_tensor(), other.grad.full_tensor())
                    torch.testing.assert_close(mine.full_tensor(), other.full_tensor())
                [optimizer.zero_grad() for optimizer in optimizers]
            assert ours.rotation.weight.dtype == torch.complex64 and ours.rotation.weight.full_tensor().imag.any()
            ours.double()
            assert ours.rotation.weight.dtype == torch.complex64 and ours.head.weight.dtype == torch.float64

    @ranks(2)
    def test_new_dtypes_keep_parameters_and_gradients():
        """As with plain modules and FSDP2: ``model.to(dtype)`` after fully_shard."""
        ours, theirs = build(fully_shard, policy=lambda f, p: rows(3)), build(torch_fully_shard)
        params = list(ours.parameters())
        loss_of(ours, batch()).backward(), loss_of(theirs, batch()).backward()
        for convert in CONVERSIONS:
            convert(ours), convert(theirs)
            assert all(a is b for a, b in zip(params, ours.parameters(), strict=True))
            dtype = params[0].dtype
            for (name, mine), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
                assert mine.dtype == other.dtype == dtype and mine.grad.dtype == dtype, name
                assert torch.equal(mine.full_tensor(), other.full_tensor()), name
                if dtype != torch.bfloat16:
                    torch.testing.assert_close(mine.grad.full_tensor(), other.grad.full_tensor(), msg=name)

    @ranks(2)
    def test_models_of_new_dtypes_train_as_fsdp2s():
        ours = build(fully_shard, policy=lambda f, p: rows(3))
        loss_of(ours, batch()).backward()
        for convert in CONVERSIONS:
            convert(ours)
        ours.zero_grad()
        fresh = build(torch_fully_shard).bfloat16()  # FSDP2 takes new dtypes before its first forward only.
        for step in range(2):
            x = batch(step).bfloat16()
            assert torch.equal(ours(x), fresh(x))
            loss_of(ours, x).backward(), loss_of(fresh, x).backward()
        for mine, other in zip(ours.parameters(), fresh.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), other.grad.full_tensor(), rtol=2**-6, atol=2**-8)

    @ranks(2)
    def test_ranks_may_be_on_the_meta_device_while_rank_0_has_the_weights():
        """Rank 0 has the weights, the others the meta device: so verl loads a model once, and broadcasts it into the shards."""
        single, state = single_and_values()
        model = Stack("cpu" if dist.get_rank() == 0 else "meta")
        for block in model.blocks:
            fully_shard(block, mesh=world())
        fully_shard(model, mesh=world())
        if dist.get_rank():
            model.to_empty(device="cpu")
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, state if dist.get_rank() == 0 else {}, options=options)
        assert torch.equal(model(batch()), single(batch()))
        model(batch()).sum().backward()
        single(batch()).sum().backward()
        for mine, wanted in zip(model.parameters(), single.parameters(), strict=True):
            dist.all_reduce(wanted.grad)
            torch.testing.assert_close(mine.grad.full_tensor(), wanted.grad / dist.get_world_size())

    @ranks(2)
    def test_a_model_of_the_meta_device_loads_and_trains_once_materialized():
        single, state = single_and_values()
        for knobs in (
            {},
            {"orig_param_policy": lambda f, p: blocks(3, 3)},
            {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        ):
            model = build_meta(**knobs)
            params = list(model.parameters())
            assert all(p.is_meta and isinstance(p.placements[0], RaggedShard) for p in params)
            assert "materialize all parameters before forward" in error_of(model, batch())
            model.to_empty(device="cpu")
            assert all(a is b and not b.is_meta for a, b in zip(params, model.parameters(), strict=True))
            model.load_state_dict({k: distribute_tensor(v, world(), [Shard(0)]) for k, v in state.items()})
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            assert torch.equal(model(batch()), single(batch()))
            loss_of(model, batch()).backward()
            optimizer.step()
            assert not torch.equal(model(batch()), single(batch()))

    @ranks(2)
    def test_modules_of_the_meta_device_are_materialized_one_at_a_time():
        """One group at a time; then one module at a time, of a group that is still incomplete."""
        single, state = single_and_values()
        model = build_meta()
        for module in model.blocks:
            module.to_empty(device="cpu")
            assert model.head.weight.is_meta and not module.weight.is_meta
        for module in (model.norm, model.head):
            assert "on the meta device" in error_of(model, batch())
            module.to_empty(device="cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.load_state_dict({k: distribute_tensor(v, world(), [Shard(0)]) for k, v in state.items()})
        assert torch.equal(model(batch()), single(batch()))
        loss_of(model, batch()).backward()
        optimizer.step()
        assert not any(torch.equal(p.full_tensor(), state[name]) for name, p in model.named_parameters())

    def test_values_assigned_in_place_of_meta_ones_are_trained(self):
        for partly in run_ranks(2, check_assigned_values_are_trained):
            self.assertIn("RuntimeError: norm.bias on the meta device: materialize all parameters", partly)

    @ranks(2)
    def test_initializing_shards_gives_the_values_of_one_process():
        single, _ = single_and_values()
        initialized = build_meta(orig_param_policy=lambda f, p: rows(3)).to_empty(device="cpu")
        for module in (initialized, single):
            torch.manual_seed(7)
            for child in module.modules():
                if hasattr(child, "reset_parameters"):
                    child.reset_parameters()
        for (name, mine), (_, plain) in zip(initialized.named_parameters(), single.named_parameters(), strict=True):
            assert torch.equal(mine.full_tensor(), plain), name

    def test_parameters_of_the_meta_device_take_a_dtype_and_no_device(self):
        for moved in run_ranks(2, check_conversions_without_memory):
            self.assertIn("Cannot copy out of meta tensor", moved)

    def test_ranks_agree_or_all_raise(self):
        words = (
            "rank 0 has 128 shards",
            "in blocks of",
            "reshard_after_forward: True on rank 0, False on rank 1",
            "mp_policy: MixedPrecisionPolicy(param_dtype=None, ",
            "frozen",
            "orig_param_policy('weight') returned 3",
            "it should be a factor of 3, not 7",
            "TypeError: fully_shard expects an nn.Module or a list of them, got str",
            "TypeError: fully_shard expects an nn.Module or a list of them, got list",
            "is for a mesh with 2 dimensions",
            "cut along dimension 1",
            "TypeError: fully_shard expects a DeviceMesh, as init_device_mesh makes it, as mesh, got 'cpu'",
        )
        every = run_ranks(3, check_agreement)
        for errors in every:
            self.assertEqual(len(errors), len(words))
            self.assertTrue(all(errors), errors)
        for index, text in enumerate(words[1:], start=1):
            self.assertTrue(all(text in errors[index] for errors in every), [errors[index] for errors in every])
        self.assertTrue(all(errors[0].startswith("ValueError: fully_shard was called differently") for errors in every))

    def test_ranks_agree_on_model_parallelism_and_process_groups(self):
        words = (
            "(8, 8) placed by the model as",
            "placed by the model as",
            "placements: None on rank 0, BufferPlacements(",
            "got NoneType",
            "'pp' not found",
        )
        for errors in run_ranks(4, check_agreement_with_model_parallelism):
            for error, text in zip(errors, words, strict=True):
                self.assertIn(text, error)
