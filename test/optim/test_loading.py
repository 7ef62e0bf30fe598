"""What a state dict may have that this run has not: another dtype of parameters. Here, torch's optimizers are the oracle."""

import copy
import unittest

import numpy
import pytest
import torch
from common import error_of, ranks
from optim_common import place, set_gradients, value, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from torch_ragged import RaggedShard
from torch_ragged.optim import SOAP, Adam8bit, AdamW8bit, Muon, Shampoo

SHAPE = (96, 64)


SHAPE = (96, 64)


class HooksTest(unittest.TestCase):
    def test_hooks_of_users_see_and_change_what_is_loaded(self):
        """As in torch.optim: a pre-hook may rename states, a post-hook may change them."""
        for kind in (Muon, Adam8bit, SOAP, torch.optim.AdamW):
            torch.manual_seed(0)
            params = [nn.Parameter(torch.randn(32, 32)) for _ in range(2)]
            first = kind([("a", params[0]), ("b", params[1])])
            for _ in range(2):
                for param in params:
                    param.grad = torch.randn(32, 32)
                first.step()
            saved = copy.deepcopy(first.state_dict())
            second = kind([("b", params[1]), ("a", params[0])])

            def by_name(optimizer, loaded):
                places = [loaded["param_groups"][0]["param_names"].index(name) for name in ("b", "a")]
                return {**loaded, "state": {new: loaded["state"][old] for new, old in enumerate(places)}}

            def double(optimizer):
                for state in optimizer.state.values():
                    next(each for each in state.values() if each.is_floating_point() and each.ndim).mul_(2)

            second.register_load_state_dict_pre_hook(by_name)
            second.register_load_state_dict_post_hook(double)
            second.load_state_dict(saved)
            for param in params:
                doubled = [not torch.equal(first.state[param][name], each) for name, each in second.state[param].items()]
                self.assertEqual(sum(doubled), 1, kind)
            second.load_state_dict(saved)  # Once more: no hook of ours has stayed.
            self.assertEqual(len(second._optimizer_load_state_dict_pre_hooks), 1)
            self.assertEqual(len(second._optimizer_load_state_dict_post_hooks), 1)

    @ranks(2)
    def test_plain_states_of_sharded_parameters_are_an_error_and_change_nothing():
        mesh = init_device_mesh("cpu", (2,))
        for name in ("Muon", "NorMuon", "Muon, 8-bit momentum", "Shampoo", "SOAP", "AdamW8bit"):
            kind, options = MAKERS[name]
            plain = param_of(torch.float32, None)
            bands = distribute_tensor(plain.detach(), mesh, [RaggedShard((0,), (1, 2))], src_data_rank=None)
            sharded = nn.Parameter(bands)
            first, second = kind([plain], **options), kind([sharded], **options)
            for param, optimizer in ((plain, first), (sharded, second)):
                set_gradients([param], 0)
                optimizer.step()
            before = copy.deepcopy(second.state_dict())
            assert "is sharded" in error_of(second.load_state_dict, first.state_dict()), name
            for key, kept in before["state"][0].items():
                assert torch.equal(whole(second.state[sharded][key]), whole(kept)), (name, key)

    def test_numbers_of_numpy_are_learning_rates(self):
        for kind in (Muon, Shampoo, SOAP, AdamW8bit):
            params = [nn.Parameter(torch.ones(32, 32)) for _ in range(2)]
            for param, lr in zip(params, (numpy.float64(0.1), 0.1), strict=True):
                param.grad = torch.eye(32)
                optimizer = kind([param], lr=0.5)
                optimizer.param_groups[0]["lr"] = lr
                optimizer.step()
            self.assertTrue(torch.equal(*params), kind)

    def test_float64_parameters_keep_their_last_digits(self):
        for kind in (Muon, Shampoo, SOAP):
            param = nn.Parameter(torch.full((32, 32), 1 + 1e-12, dtype=torch.float64))
            param.grad = torch.eye(32, dtype=torch.float64)
            kind([param], lr=0.0, weight_decay=0.0).step()
            self.assertTrue((param.detach() == 1 + 1e-12).all(), kind)


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


class OptionsTest(unittest.TestCase):
    @ranks(2)
    def test_neuron_beta_may_be_set_after_steps_with_shared_matrices():
        """Roots that two ranks share have no states, and are chosen again."""
        mesh, results = init_device_mesh("cpu", (2,)), []
        for is_sharded in (True, False):
            start = value(0, 0, (64, 64), torch.float32)
            rows = RaggedShard((0,), (1, 1))
            param = nn.Parameter(distribute_tensor(start, mesh, [rows], src_data_rank=None) if is_sharded else start)
            optimizer = Muon([param], row_blocks=2, flops_per_byte=0.0)
            for step in range(4):
                if step == 2:
                    optimizer.param_groups[0]["neuron_beta"] = 0.9
                set_gradients([param], step)
                optimizer.step()
            results.append(whole(param.detach()))
        assert torch.equal(*results)

    @ranks(2)
    def test_a_prediction_of_one_rank_chooses_no_roots():
        mesh, results = init_device_mesh("cpu", (2,)), []
        for asks in (True, False):
            params = []
            for number, shape in enumerate(((8, 8), (32, 32), (8, 8))):
                start = distribute_tensor(value(number, 0, shape, torch.float32), mesh, [RaggedShard((0,), (1, 1))])
                params.append(nn.Parameter(start))
            optimizer = SOAP([params[0]])
            if asks and mesh.get_local_rank() == 0:
                assert optimizer.first_state_nbytes(params[0], optimizer.param_groups[0]) > 0
            optimizer.add_param_group({"params": params[1:]})
            for step in range(3):
                set_gradients(params, step)
                optimizer.step()
            results.append([whole(param.detach()) for param in params])
        assert all(map(torch.equal, *results))
