"""Shampoo: its formula, the same bits at any number of ranks, states at the roots that reshard."""

import math
import pickle

import pytest
import torch
from common import error_of, in_one_process, run_ranks
from optim_common import assert_same, load_and_go_on, make_params, save_and_go_on, set_gradients, train, value, whole, wholes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from torch_ragged.optim import Shampoo
from torch_ragged.optim._shampoo import inverse_root

SHAPES = ((24, 16), (13, 25), (17,), (5, 12, 8), (1, 7), (24, 16))


def make(params, **options):
    vectors = {"params": [p for p in params if p.ndim < 2], "algorithm": "adamw"}
    groups = [{"params": [p for p in params if p.ndim > 1]}, vectors]
    return Shampoo([group for group in groups if group["params"]], **{"lr": 0.01, "interval": 3, **options})


def test_inverse_root_is_one_and_not_finite_only_if_its_matrix_is_not():
    matrix = value(0, 0, (6, 9)) @ value(0, 0, (6, 9)).T
    root = inverse_root(matrix, 4, 0.0)
    torch.testing.assert_close(root @ root @ root @ root @ matrix, torch.eye(6), atol=1e-3, rtol=0)
    assert inverse_root(torch.full((2, 2), math.inf), 4, 0.0).isnan().all()
    assert inverse_root(torch.zeros(2, 2), 4, 1e-6).isfinite().all()


@pytest.mark.parametrize("max_side", [100, 20, 4])
def test_steps_are_those_of_the_formula(max_side):
    shape, beta, eps = (24, 16), 0.9, 1e-5
    param = nn.Parameter(value(0, 0, shape))
    expected = param.detach().double()
    optimizer = Shampoo([param], lr=0.1, weight_decay=0.2, shampoo_beta=beta, eps=eps, interval=2, max_side=max_side)
    left, right = torch.zeros(24, 24).double(), torch.zeros(16, 16).double()
    m = v = torch.zeros(shape).double()
    sides = [side for side in shape if side <= max_side]
    for step in range(1, 6):
        gradient = value(0, step, shape).double()
        param.grad = gradient.float()
        optimizer.step()
        left, right = beta * left + (1 - beta) * gradient @ gradient.T, beta * right + (1 - beta) * gradient.T @ gradient
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        average = m / (1 - 0.9**step)
        adam = average / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
        if step == 1 or step % 2 == 0:
            correction, order = 1 - beta**step, 2 * max(len(sides), 1)
            roots = [inverse_root(factor / correction, order, eps) for factor in (left, right)]
        direction = average
        if 24 <= max_side:
            direction = roots[0] @ direction
        if 16 <= max_side:
            direction = direction @ roots[1]
        direction = direction * adam.norm() / direction.norm() if sides else adam
        expected = expected * (1 - 0.1 * 0.2) - 0.1 * direction
        torch.testing.assert_close(param.detach().double(), expected, atol=1e-4, rtol=1e-3)
    names = {"step", "exp_avg", "exp_avg_sq"}
    for name, side in (("left", 24), ("right", 16)):
        names |= {name, f"{name}_root"} if side <= max_side else set()
    assert set(optimizer.state[param]) == names


def test_learns_an_ill_conditioned_matrix_faster_than_adam():
    scales = torch.logspace(0, -2, 16)
    left, right = torch.linalg.qr(value(1, 0, (16, 16)))[0] * scales, torch.linalg.qr(value(2, 0, (16, 16)))[0] * scales

    def loss_after(make_optimizer):
        param = nn.Parameter(torch.zeros(16, 16))
        optimizer = make_optimizer([param])
        for _ in range(60):
            optimizer.zero_grad()
            loss = (left.T @ (param - 1.0) @ right).square().sum()
            loss.backward()
            optimizer.step()
        return loss.item()

    ours = loss_after(lambda params: Shampoo(params, lr=0.05, weight_decay=0.0, interval=1))
    assert ours < 0.8 * loss_after(lambda params: torch.optim.Adam(params, lr=0.05))


def _missing(index, step):
    return index == 4 or (index in (0, 3) and step % 2 == 0) or (index == 1 and step < 3)


def _poisoned(kind, mesh):
    params = make_params(kind, mesh, SHAPES)
    optimizer = make(params)
    for step in range(1, 5):
        set_gradients(params, step)
        with torch.no_grad():
            params[0].grad.zero_()
            params[1].grad.fill_(math.nan if step == 3 else 1.0)
            params[5].grad.fill_(math.inf if step == 2 else 0.5)
        optimizer.step()
    return wholes(params, optimizer)


CASES = {1: [("ragged", (1,))], 2: [("ragged", (2,)), ("one owner", (2,))], 4: [("mixed", (4,)), ("ragged", (2, 2))]}
CASES[8] = [("ragged", (8,)), ("ragged", (2, 4))]


def _check_ranks(cases, expected, narrow, missing, poisoned):
    for kind, mesh_shape in cases:
        assert_same(train(make, kind, mesh_shape, shapes=SHAPES), expected, f"{kind} {mesh_shape}")
    kind, mesh_shape = cases[-1]
    assert_same(train(make, kind, mesh_shape, dtype=torch.bfloat16, shapes=SHAPES), narrow, "bfloat16")
    assert_same(train(make, kind, mesh_shape, missing=_missing, shapes=SHAPES), missing, "gradients that come and go")
    mesh = init_device_mesh("cpu", mesh_shape)
    assert_same(_poisoned(kind, mesh), poisoned, "NaN, infinite and zero gradients")
    params = make_params("ragged", mesh, SHAPES[:2] * 6)
    optimizer = make(params, check_gradients=False)
    set_gradients(params, 1)
    with CommDebugMode() as mode:
        optimizer.step()
    assert mode.get_total_counts() == (4 if mesh.size() > 1 else 0)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow), 4, pytest.param(8, marks=pytest.mark.slow)])
def test_bitwise_equal_at_any_number_of_ranks(ranks):
    expected = in_one_process(train, make, "", None, shapes=SHAPES)
    narrow = in_one_process(train, make, "", None, dtype=torch.bfloat16, shapes=SHAPES)
    missing = in_one_process(train, make, "", None, missing=_missing, shapes=SHAPES)
    poisoned = in_one_process(_poisoned, "", None)
    run_ranks(ranks, _check_ranks, CASES[ranks], expected, narrow, missing, poisoned)


def test_checkpoint_goes_on_bitwise_on_other_ranks(tmp_path):
    expected = run_ranks(4, save_and_go_on, Shampoo, str(tmp_path), (4,))[0]
    for mesh_shape in ((2,), (2, 2), (1,)):
        for result in run_ranks(math.prod(mesh_shape), load_and_go_on, Shampoo, str(tmp_path), mesh_shape):
            assert_same(result, expected, str(mesh_shape))


def test_state_dict_and_pickle():
    params = make_params("", None, SHAPES)
    optimizer = make(params)
    set_gradients(params, 1)
    optimizer.step()
    twins = [nn.Parameter(param.detach().clone()) for param in params]
    twin = make(twins)
    twin.load_state_dict(optimizer.state_dict())
    copied, copy = pickle.loads(pickle.dumps((params, optimizer)))
    for each, optim in ((params, optimizer), (twins, twin), (copied, copy)):
        set_gradients(each, 2)
        optim.step()
    assert_same(wholes(twins, twin), wholes(params, optimizer), "state dict")
    assert_same(wholes(copied, copy), wholes(params, optimizer), "pickle")
    assert whole(params[0]) is params[0]


def test_bad_input_is_refused():
    for name, bad in {"lr": -1, "betas": (1.0, 0.9), "shampoo_beta": 1.0, "interval": 0, "max_side": 0, "eps": -1}.items():
        message = error_of(Shampoo, [nn.Parameter(torch.zeros(2, 2))], **{name: bad})
        assert message.startswith("ValueError: Shampoo") and name in message, message
    assert "adamw" in error_of(Shampoo, [nn.Parameter(torch.zeros(2))])


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
