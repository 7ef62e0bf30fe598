"""Capturable steps: the device computes what the host computes, a tensor as lr, state dicts, errors. Graphs: test/gpu."""

import copy
import pickle
from unittest import mock

import pytest
import torch
from common import error_of, run_ranks
from optim_common import set_gradients
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from torch_ragged.fsdp import fully_shard
from torch_ragged.optim import SOAP, Adam8bit, AdamW8bit, BlockPolicy, Muon, Shampoo, matrix_groups
from torch_ragged.optim._adam8bit import _columns, _floats

SMALL = BlockPolicy((8, 8), min_numel=64)
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
        self.first, self.second = nn.Linear(40, 24, dtype=dtype), nn.Linear(24, 33, bias=False, dtype=dtype)


def trained(make, lrs=(0.02, 0.01, 0.04), dtype=torch.float32, mesh=None, **options):
    """The parameters after a step at each learning rate, given as numbers or as one tensor that changes."""
    model = Net(dtype)
    if mesh is not None:
        fully_shard(model, mesh=mesh)
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


def test_scalars_of_the_device_are_those_of_the_host():
    optimizer = AdamW8bit(Net(torch.bfloat16).parameters(), **ADAM, capturable=True, stochastic_rounding=True, seed=-5)
    params = optimizer.param_groups[0]["params"]
    for step in (1, 2, 17, 100_000):
        for param in params:
            optimizer.state[param]["step"] = torch.tensor(float(step))
        for lr in (3e-4, torch.tensor([3e-4], dtype=torch.float64)):
            group = {**optimizer.param_groups[0], "lr": lr}
            found = list(optimizer._numbers_on_device(group, params, (0, 1, 7)))
            wanted = [optimizer._numbers({**group, "lr": 3e-4}, step, index) for index in (0, 1, 7)]
            assert [int(each.rounding_key) for each in found] == [each.rounding_key for each in wanted]
            table = _columns([found[0], found[0], *found], torch.device("cpu"))
            expected = torch.tensor([_floats(each) for each in (wanted[0], wanted[0], *wanted)])
            assert table.dtype == torch.float32 and table.shape == (5, 9)
            torch.testing.assert_close(table, expected, rtol=2**-23, atol=0)


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
    for make in KINDS.values():
        options = {"capturable": True} | ({"check_gradients": False} if "Muon" in str(make(Net())) else {})
        alone, _ = trained(make, capturable=True)
        with mock.patch("warnings.warn"):
            both, optimizer = trained(make, mesh=mesh, **options)
        for p, q in zip(alone, both):
            assert torch.equal(p, q.full_tensor())
        states = optimizer.state_dict()
        assert error_of(optimizer.load_state_dict, states) == ""


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
    for optimizer in (copy.deepcopy(capturable), pickle.loads(pickle.dumps(capturable))):
        assert {group["capturable"] for group in optimizer.param_groups} == {True}
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.ones_like(param)
        optimizer.step()


def _errors_of_a_capture():
    model = fully_shard(Net(), mesh=init_device_mesh("cpu", (2,)))
    adam, muon = AdamW8bit(model.parameters()), Muon(matrix_groups(model))
    captured = Muon(matrix_groups(model), capturable=True)
    fresh = AdamW8bit(Net().parameters(), capturable=True)
    others = [kind(matrix_groups(model)) for kind in (Shampoo, SOAP)]
    for each in (*model.parameters(), *fresh.param_groups[0]["params"]):
        each.grad = torch.zeros_like(each)
    before = [param.to_local().clone() for param in model.parameters()]
    with mock.patch.multiple(torch.cuda, is_initialized=lambda: True, is_current_stream_capturing=lambda: True):
        for optimizer in (adam, muon):
            error = error_of(optimizer.step)
            assert f"make {type(optimizer).__name__} with capturable=True" in error, error
        for optimizer in others:
            error = error_of(optimizer.step)
            assert f"capture the step without {type(optimizer).__name__}" in error, error
        assert "set check_gradients=False" in error_of(captured.step)
        assert "take a step before the capture" in error_of(fresh.step)
    assert not adam.state and not muon.state and not fresh.state
    assert all(torch.equal(p.to_local(), q) for p, q in zip(model.parameters(), before))


def test_a_capture_of_what_is_not_capturable_changes_nothing():
    run_ranks(2, _errors_of_a_capture)
