"""Capturable steps: the device computes what the host computes, a tensor as lr, state dicts, errors. Graphs: test/gpu."""

import copy
import pickle
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from common import error_of, run_ranks
from optim_common import set_gradients
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from torch_ragged.fsdp import fully_shard
from torch_ragged.fsdp.core._fsdp_param import local_of
from torch_ragged.optim import SOAP, Adam8bit, AdamW8bit, BlockPolicy, Muon, Shampoo, matrix_groups
from torch_ragged.optim._adam8bit import _floats, _GraphMemory, _scalar_columns
from torch_ragged.optim._quantize import hash32

SMALL = BlockPolicy((16, 16), min_numel=64)
ADAM = {"lr": 0.02, "policy": SMALL}
KINDS = {
    "AdamW8bit": lambda model, **options: AdamW8bit(model.parameters(), **ADAM, **options),
    "Adam8bit": lambda model, **options: Adam8bit(model.parameters(), **ADAM, weight_decay=0.1, **options),
    "Muon": lambda model, **options: Muon(matrix_groups(model), lr=0.02, **options),
    "NorMuon": lambda model, **options: Muon(
        matrix_groups(model), lr=0.02, neuron_beta=0.9, cautious_weight_decay=True, momentum_block=(8, 16), **options
    ),
}


class Net(nn.Module):
    def __init__(self, dtype=torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(80, 60, dtype=dtype), nn.Linear(60, 33, bias=False, dtype=dtype)


def trained(make, lrs=(0.02, 0.01, 0.04), dtype=torch.float32, mesh=None, **options):
    """The parameters after a step at each learning rate, given as numbers or as one tensor that changes."""
    model = Net(dtype)
    if mesh is not None:
        fully_shard(model, mesh=mesh, orig_param_policy=SMALL)
    optimizer = make(model, **options)
    if options.get("capturable"):
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(0.0)
    for step, lr in enumerate(lrs):
        for group in optimizer.param_groups:
            if options.get("capturable"):
                group["lr"].fill_(lr)
            else:
                group["lr"] = torch.tensor(lr).item()  # The number that float32 holds.
        set_gradients(list(model.parameters()), step)
        optimizer.step()
    return [param.detach() for param in model.parameters()], optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_as_lr_steps_as_numbers_do(kind, dtype):
    plain, _ = trained(KINDS[kind], dtype=dtype)
    capturable, optimizer = trained(KINDS[kind], dtype=dtype, capturable=True)
    for p, q, before in zip(plain, capturable, Net(dtype).parameters()):
        # In bfloat16, the CPU rounds the product of lr and an update before it adds it, and lr itself.
        torch.testing.assert_close(
            p, q, rtol=1.6e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-4 if dtype == torch.bfloat16 else 1e-6
        )
        assert not torch.equal(q, before)
    assert all(group["capturable"] for group in optimizer.param_groups)
    names = {name for state in optimizer.state.values() for name in state}
    assert kind == "Muon" or any(name.endswith("_codes") for name in names), names


def test_scalars_of_the_device_are_those_of_the_host():
    optimizer = AdamW8bit(Net(torch.bfloat16).parameters(), **ADAM, capturable=True, stochastic_rounding=True, seed=-5)
    params = optimizer.param_groups[0]["params"]
    for step in (1, 2, 17, 100_000):
        for lr in (3e-4, torch.tensor([3e-4], dtype=torch.float64)):
            for param in params:
                optimizer.state[param]["step"] = torch.tensor(float(step - 1))  # It counts this step.
            group = {**optimizer.param_groups[0], "lr": lr}
            active = [(index, param, group, None, None) for index, param in zip((0, 1, 7), params)]
            found = list(optimizer._numbers_on_device(active).values())
            wanted = [optimizer._numbers({**group, "lr": 3e-4}, step, hash32(index + 1)) for index in (0, 1, 7)]
            assert [int(each.rounding_key) for each in found] == [each.rounding_key for each in wanted]
            table = _scalar_columns([found[0], found[0], *found], torch.device("cpu"))
            expected = torch.tensor([_floats(each) for each in (wanted[0], wanted[0], *wanted)])
            assert table.dtype == torch.float32 and table.shape == (5, 9)
            torch.testing.assert_close(table, expected, rtol=2**-23, atol=0)


def test_random_bits_of_the_device_are_those_of_the_host():
    """Step sizes differ by a rounding, so a few elements do; other bits, as those of another seed, would change many."""
    kind, options = KINDS["AdamW8bit"], {"dtype": torch.bfloat16, "stochastic_rounding": True}
    plain, capturable, other = (
        trained(kind, **options, **each)[0] for each in ({}, {"capturable": True}, {"capturable": True, "seed": 1})
    )
    for p, q, r in zip(plain, capturable, other):
        assert (p == q).float().mean() > 0.99 and (p == r).float().mean() < 0.9


def test_decay_below_a_step_of_16_bits_is_not_lost():
    """0.9998 is 1 in bfloat16: as a tensor without dimensions, torch would round it so."""
    results = []
    for options in ({"lr": 1e-3}, {"lr": torch.tensor(1e-3), "capturable": True}):
        param = nn.Parameter(torch.linspace(1, 2, 64 * 32).view(64, 32).bfloat16())
        optimizer = Muon([param], weight_decay=4.0, **options)
        param.grad = torch.zeros_like(param)
        optimizer.step()
        results.append(param.detach())
    assert torch.equal(*results)
    assert (results[0] < torch.linspace(1, 2, 64 * 32).view(64, 32).bfloat16()).float().mean() > 0.2


def _same_on_two_ranks():
    mesh = init_device_mesh("cpu", (2,))
    for kind, make in KINDS.items():
        options = {"capturable": True} | ({"check_gradients": False} if "Muon" in kind else {})
        alone, _ = trained(make, capturable=True)
        with mock.patch("warnings.warn"):
            both, optimizer = trained(make, mesh=mesh, **options)
        for p, q in zip(alone, both):
            assert torch.equal(p, q.full_tensor())
        states = optimizer.state_dict()
        kept = {number: dict(map(_copied, state.items())) for number, state in states["state"].items()}
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    local_of(value).zero_()
        optimizer.load_state_dict({**states, "state": kept})
        for number, state in optimizer.state_dict()["state"].items():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    assert torch.equal(local_of(value), local_of(kept[number][name])), (kind, name)


def _copied(item):
    name, value = item
    return name, value.clone() if isinstance(value, torch.Tensor) else copy.copy(value)


def test_a_pinned_table_is_left_for_each_launch_of_a_step():
    """What a capture takes: as many as the step before had, of their sizes; not those of steps before it."""
    memory, device, is_captured = _GraphMemory(), torch.device("cuda", 0), [False]
    kernel = {"torch_ragged._kernels._triton_adam8bit": SimpleNamespace(INTEGER_FIELDS=range(14))}
    allocated = mock.patch.object(torch, "empty", lambda *sizes, **_: torch.zeros(sizes))
    capturing = mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: is_captured[0])
    with allocated, capturing, mock.patch.dict(sys.modules, kernel):
        for launches in ((3, 3, 5), (3, 3, 5), (7,), (3, 3, 5)):
            assert [memory.pinned(regions, device) for regions in launches] == [None] * len(launches)
            memory.end_step()
        is_captured[0] = True
        taken = [memory.pinned(regions, device) for regions in (3, 5, 3)]
        assert [tuple(each.shape) for each in taken] == [(3, 14), (5, 14), (3, 14)] and len(set(map(id, taken))) == 3
        for regions in (3, 5, 7):
            error = error_of(memory.pinned, regions, device)
            assert "take a step with gradients on the same parameters before each capture" in error, error


def test_ranks_have_the_bits_of_one():
    run_ranks(2, _same_on_two_ranks)


@pytest.mark.parametrize("kind", KINDS)
def test_capturable_is_no_part_of_what_is_saved(kind):
    _, plain = trained(KINDS[kind])
    _, capturable = trained(KINDS[kind], capturable=True)
    capturable.load_state_dict(plain.state_dict())
    plain.load_state_dict(trained(KINDS[kind], capturable=True)[1].state_dict())
    assert {group["capturable"] for group in capturable.param_groups} == {True}
    assert {group["capturable"] for group in plain.param_groups} == {False}
    for optimizer in (plain, capturable):
        assert not any("capturable" in group for group in optimizer.state_dict()["param_groups"])
    lrs = {id(lr): lr.item() for lr in (group["lr"] for group in capturable.param_groups)}
    assert len(lrs) == len(capturable.param_groups), "the tensors that a graph reads stay"
    assert set(lrs.values()) == {torch.tensor(0.04).item()}
    for optimizer in (copy.deepcopy(capturable), pickle.loads(pickle.dumps(capturable))):
        assert {group["capturable"] for group in optimizer.param_groups} == {True}
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.ones_like(param)
        optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
def test_optimizers_of_before_there_was_capturable_load(kind):
    """Their pickles have no such option, neither in groups nor in defaults."""
    _, optimizer = trained(KINDS[kind])
    for group in optimizer.param_groups:
        del group["capturable"]
    del optimizer.defaults["capturable"]
    loaded = pickle.loads(pickle.dumps(optimizer))
    for group in loaded.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    loaded.step()
    counts = {state["step"].item() for state in loaded.state.values() if "step" in state}
    assert counts <= {4.0}, counts


def test_16_bit_and_64_bit_parameters_and_groups_without_gradients_take_a_tensor_as_lr():
    wide = nn.Parameter(torch.linspace(1, 2, 32 * 16, dtype=torch.float64).view(32, 16))
    unused = nn.Parameter(torch.ones(3))
    groups = [{"params": [wide]}, {"params": [unused], "algorithm": "adamw"}]
    optimizer, before = Muon(groups, lr=torch.tensor(1e-3, dtype=torch.float64), capturable=True), wide.detach().clone()
    wide.grad = torch.ones_like(wide)
    with mock.patch.object(torch.Tensor, "item", side_effect=AssertionError("the host reads")):
        optimizer.step()
    moved = wide.detach() - before
    assert moved.abs().min() > 0 and not torch.equal(wide.float().double(), wide), "not rounded to float32"


def _errors_of_a_capture():
    model = fully_shard(Net(), mesh=init_device_mesh("cpu", (2,)))
    adam, muon = AdamW8bit(model.parameters()), Muon(matrix_groups(model))
    captured = Muon(matrix_groups(model), capturable=True)
    fresh, fresh_muon = AdamW8bit(Net().parameters(), capturable=True), Muon(matrix_groups(Net()), capturable=True)
    on_cpu = AdamW8bit(Net().parameters(), lr=torch.tensor(0.1), capturable=True)
    with mock.patch("warnings.warn"):
        cut = AdamW8bit(model.parameters(), policy=SMALL, capturable=True)
    others = [kind(matrix_groups(model)) for kind in (Shampoo, SOAP)]
    plain = [param for each in (fresh, fresh_muon, on_cpu) for group in each.param_groups for param in group["params"]]
    for each in (*model.parameters(), *plain):
        each.grad = torch.zeros_like(each)
    before = [param.to_local().clone() for param in model.parameters()]
    with mock.patch.multiple(torch.cuda, is_initialized=lambda: True, is_current_stream_capturing=lambda: True):
        for optimizer in (adam, muon):
            error = error_of(optimizer.step)
            assert f"make {type(optimizer).__name__} with capturable=True" in error, error
        for optimizer in others:
            error = error_of(optimizer.step)
            assert f"capture the step without {type(optimizer).__name__}" in error, error
        captures = "step is captured in a CUDA graph, and "
        agrees = "ranks agree on gradients, which the host reads: set check_gradients=False"
        assert error_of(captured.step) == f"RuntimeError: Muon.{captures}{agrees}"
        for optimizer in (fresh, fresh_muon):
            assert "take a step before the capture" in error_of(optimizer.step)
        repeats = "its lr is a tensor on the CPU, whose number the graph would repeat: give a tensor on the device"
        assert error_of(on_cpu.step) == f"RuntimeError: AdamW8bit.{captures}{repeats}"
        with mock.patch("warnings.warn"):
            assert "ranks share blocks" in error_of(cut.step)
    assert not any(each.state for each in (adam, muon, captured, fresh, fresh_muon, on_cpu, cut))
    assert all(torch.equal(p.to_local(), q) for p, q in zip(model.parameters(), before))


def test_a_capture_of_what_is_not_capturable_changes_nothing():
    run_ranks(2, _errors_of_a_capture)
