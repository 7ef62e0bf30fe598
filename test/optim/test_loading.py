"""What a state dict may have that this run has not: another dtype of parameters. Here, torch's optimizers are the oracle."""

import copy
import unittest

import pytest
import torch
from common import ranks
from optim_common import place, set_gradients, value, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from torch_ragged.optim import SOAP, Adam8bit, AdamW8bit, Muon, Shampoo

SHAPE = (96, 64)
MAKERS = {
    "Muon": (Muon, {}),
    "NorMuon": (Muon, {"neuron_beta": 0.9}),
    "Muon, 8-bit momentum": (Muon, {"momentum_block": (32, 32)}),
    "Muon, AdamW group": (Muon, {"algorithm": "adamw"}),
    "Shampoo": (Shampoo, {}),
    "Shampoo, AdamW group": (Shampoo, {"algorithm": "adamw"}),
    "SOAP": (SOAP, {}),
    "SOAP, AdamW group": (SOAP, {"algorithm": "adamw"}),
    "Adam8bit": (Adam8bit, {}),
    "AdamW8bit": (AdamW8bit, {}),
}
FOLLOW = {"Muon": ("momentum_buffer",), "NorMuon": ("momentum_buffer",)}
FOLLOW |= {name: ("exp_avg", "exp_avg_sq") for name in MAKERS if "AdamW group" in name}


def param_of(dtype, mesh):
    start = value(0, 0, SHAPE, torch.float32)
    return nn.Parameter(start.to(dtype) if mesh is None else place(start.to(dtype), "ragged", 0, mesh))


def _check(name, old, new, mesh_shape):
    kind, options = MAKERS[name]
    mesh = None if mesh_shape is None else init_device_mesh("cpu", mesh_shape)
    first, second = param_of(old, mesh), param_of(new, mesh)
    optimizer, resumed = (kind([{"params": [param], **options}], lr=0.01) for param in (first, second))
    for step in (1, 2, 3):
        set_gradients([first], step)
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    with torch.no_grad():
        second.copy_(first.to(new))
    resumed.load_state_dict(saved)
    for state, held in saved["state"][0].items():
        mine = resumed.state[second][state]
        dtype = new if state in FOLLOW.get(name, ()) else held.dtype
        assert mine.dtype == dtype, (name, state, mine.dtype)
        assert torch.equal(whole(mine), whole(held).to(dtype)), (name, state)
    for param, each in ((first, optimizer), (second, resumed)):
        set_gradients([param], 4)
        each.step()
    assert (whole(first.detach()).float() - whole(second.detach()).float()).abs().max() < 0.05


DTYPES = ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32))


@pytest.mark.parametrize("name", MAKERS)
def test_a_run_goes_on_with_parameters_of_another_dtype(name):
    for old, new in DTYPES:
        _check(name, old, new, None)


class ShardedTest(unittest.TestCase):
    @ranks(2)
    def test_sharded_runs_go_on_with_parameters_of_another_dtype():
        for name, (kind, options) in MAKERS.items():
            if kind not in (Adam8bit, AdamW8bit) and "momentum_block" not in options:  # Their blocks are not cut.
                for old, new in DTYPES:
                    _check(name, old, new, (2,))


def test_states_are_cast_as_torch_does():
    for old, new in DTYPES:
        dtypes = []
        for kind in (torch.optim.Muon, Muon):
            first, second = param_of(old, None), param_of(new, None)
            optimizer, resumed = kind([first], lr=0.01), kind([second], lr=0.01)
            set_gradients([first], 1)
            optimizer.step()
            resumed.load_state_dict(optimizer.state_dict())
            dtypes.append({name: each.dtype for name, each in resumed.state[second].items()})
        assert dtypes[0] == dtypes[1] == {"momentum_buffer": new}, dtypes
