"""What an optimizer says before a step: the bytes of its states, the states that it has, the operations of a step."""

import pytest
import torch
from common import error_of, fake_group
from optim_common import make_params, set_gradients, value
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import FlopCounterMode

from torch_ragged.optim import SOAP, AdamW8bit, BlockPolicy, Muon, Shampoo
from torch_ragged.optim._base import STEP_NBYTES

SHAPES = ((24, 16), (13, 25), (17,), (5, 12, 8), (32, 32))
SMALL = BlockPolicy((8, 16), min_numel=256)


def by_roots(cls, **options):
    """An optimizer of matrices, which gives vectors to AdamW."""

    def make(params):
        vectors = {"params": [p for p in params if p.ndim < 2], "algorithm": "adamw"}
        return cls([{"params": [p for p in params if p.ndim > 1]}, vectors], **options)

    return make


KINDS = {
    "AdamW8bit": lambda params: AdamW8bit(params, policy=SMALL),
    "Muon": by_roots(Muon),
    "NorMuon": by_roots(Muon, neuron_beta=0.9),
    "Muon of blocks": by_roots(Muon, momentum_block=(8, 16)),
    "Shampoo": by_roots(Shampoo, max_side=20),
    "SOAP": by_roots(SOAP),
}


def check_bytes(kind, placements, mesh):
    params = make_params(placements, mesh, SHAPES)
    optimizer = KINDS[kind](params)
    groups = [(param, group) for group in optimizer.param_groups for param in group["params"]]
    foreseen = [optimizer.first_state_nbytes(param, group) for param, group in groups]
    set_gradients(params, 1)
    optimizer.step()
    held = []
    for param, _ in groups:
        values = optimizer.state[param].values()
        held.append(sum((each.to_local() if isinstance(each, DTensor) else each).nbytes for each in values))
    assert foreseen == held, kind
    assert [optimizer.first_state_nbytes(param, group) for param, group in groups] == held, kind


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_states_are_those_of_the_first_step(kind):
    check_bytes(kind, "", None)
    for rank in (0, 1):
        with fake_group(2, rank):
            check_bytes(kind, "one owner", init_device_mesh("cpu", (2,)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_of_another_name_or_shape_is_refused(kind):
    with fake_group(2):
        params = make_params("one owner", init_device_mesh("cpu", (2,)), SHAPES)
        optimizer = KINDS[kind](params)
        set_gradients(params, 1)
        optimizer.step()
        for group in optimizer.param_groups:
            for param in group["params"]:
                of_param = f" of shape (3, 3) for a parameter of {tuple(param.shape)}"
                for name, made in optimizer.state[param].items():
                    if name != "step":
                        empty = optimizer.empty_state(param, group, name, tuple(made.shape), made.dtype)
                        assert (empty.shape, empty.dtype) == (made.shape, made.dtype), (kind, name)
                        error = error_of(optimizer.empty_state, param, group, name, (3, 3), made.dtype)
                        assert error.startswith(f"ValueError: {type(optimizer).__name__} has no state {name}{of_param}"), error
                if group.get("algorithm") != "adamw" and kind in ("Shampoo", "SOAP"):
                    error = error_of(optimizer.empty_state, param, group, "other", tuple(param.shape), torch.float32)
                    assert "has no state other of shape" in error, error


def test_states_stay_at_their_roots_if_parameters_are_added_later():
    with fake_group(2):
        mesh = init_device_mesh("cpu", (2,))
        *small, middle, large = params = make_params("shard0", mesh, ((8, 8), (8, 8), (32, 32), (64, 64)))
        optimizer, together = Shampoo(small), Shampoo(params)
        for step, of_group in enumerate((small, [middle, large])):
            if step:
                optimizer.add_param_group({"params": of_group})
            set_gradients(params, step)
            optimizer.step()
            held = [optimizer.state[param]["left"].to_local().numel() > 0 for param in small]
            assert held == [True, False], "each rank has one of the small ones"
        (group,) = together.param_groups
        held = [together.first_state_nbytes(param, group) > STEP_NBYTES for param in small]
        assert held == [False, False], "chosen together, the large one is alone on the first rank"


@pytest.mark.parametrize("shape", [(64, 48), (16, 96)])
def test_costs_are_the_operations_of_a_step(shape):
    """Roots are balanced by them: products of matrices, some operations per element, and now and then a decomposition."""
    for cls, options in (
        (Muon, {"ns_steps": 3}),
        (Shampoo, {"interval": 10**9}),
        (Shampoo, {"interval": 10**9, "max_side": 50}),
        (SOAP, {"interval": 10**9}),
        (SOAP, {"interval": 10**9, "max_side": 50}),
    ):
        param = nn.Parameter(value(0, 0, shape))
        optimizer = cls([param], **options)
        for step in range(1, 4):
            param.grad = value(0, step, shape)
            with FlopCounterMode(display=False) as counter:
                optimizer.step()
        (group,) = optimizer.param_groups
        cost, products = optimizer._cost(*shape, group), counter.get_total_flops()
        assert products <= cost <= products + 12 * param.numel(), (cls, options, cost, products)
        if cls is not Muon:  # The decompositions of all sides, in one of ``interval`` steps.
            cubes = sum(side**3 for side in shape if side <= group["max_side"])
            of_each = (optimizer._cost(*shape, {**group, "interval": 4}) - cost) * 4 / cubes
            assert 5 < of_each < 50, (cls, options, of_each)
