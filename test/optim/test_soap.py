"""SOAP: its formula, the same bits at any number of ranks, states at the roots that reshard."""

import math

import pytest
import torch
from common import error_of, in_one_process, run_ranks
from optim_common import assert_same, load_and_go_on, make_params, save_and_go_on, set_gradients, train, value, wholes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

from torch_ragged.fsdp import fully_shard
from torch_ragged.optim import SOAP
from torch_ragged.spmd import Plan, parallelize

SHAPES = ((24, 16), (13, 25), (17,), (5, 12, 8), (1, 7), (24, 16))


def make(params, **options):
    vectors = {"params": [p for p in params if p.ndim < 2], "algorithm": "adamw"}
    groups = [{"params": [p for p in params if p.ndim > 1]}, vectors]
    return SOAP([group for group in groups if group["params"]], **{"lr": 0.01, "interval": 3, **options})


@pytest.mark.parametrize("max_side", [100, 4])
def test_steps_are_those_of_the_formula(max_side):
    """In float64. A full rank keeps the order of eigenvectors; their signs cancel."""
    shape, (beta1, beta2), lr = (16, 16), (0.9, 0.8), 0.05
    param = nn.Parameter(value(0, 0, shape))
    expected = param.detach().double()
    optimizer = SOAP([param], lr=lr, weight_decay=0.2, betas=(beta1, beta2), shampoo_beta=0.7, interval=2, max_side=max_side)
    left = right = m = v = torch.zeros(shape).double()
    bases = [torch.eye(16).double()] * 2
    for step in range(1, 8):
        gradient = value(0, step, shape).double()
        param.grad = gradient.float()
        optimizer.step()
        if step > 1:
            m = beta1 * m + (1 - beta1) * gradient
            rotated, average = (bases[0].T @ x @ bases[1] for x in (gradient, m / (1 - beta1 ** (step - 1))))
            v = beta2 * v + (1 - beta2) * rotated**2
            direction = bases[0] @ (average / ((v / (1 - beta2 ** (step - 1))).sqrt() + 1e-8)) @ bases[1].T
            expected = expected * (1 - lr * 0.2) - lr * direction
        left, right = (0.7 * old + 0.3 * new for old, new in ((left, gradient @ gradient.T), (right, gradient.T @ gradient)))
        if max_side > 16 and step == 1:
            bases = [torch.linalg.eigh(factor)[1].flip(1) for factor in (left, right)]
        elif max_side > 16 and step % 2 == 0:
            for side, factor in enumerate((left, right)):
                order = (bases[side].T @ factor @ bases[side]).diagonal().argsort(descending=True)
                v = v.index_select(side, order)
                bases[side] = torch.linalg.qr(factor @ bases[side][:, order])[0]
        torch.testing.assert_close(param.detach().double(), expected, atol=2e-4, rtol=1e-3)
    names = {"step", "exp_avg", "exp_avg_sq"}
    assert set(optimizer.state[param]) == names | ({"left", "left_basis", "right", "right_basis"} if max_side > 16 else set())


def test_losses_do_not_depend_on_the_basis_of_the_problem():
    """In another basis, the same steps: Adam's are not."""
    target, scales = value(1, 0, (12, 12)), torch.logspace(0, -2, 12)
    rotations = [torch.linalg.qr(value(2, step, (12, 12)))[0] for step in (0, 1)]

    def losses(make_optimizer, left, right):
        param, found = nn.Parameter(torch.zeros(12, 12)), []
        optimizer = make_optimizer([param])
        for _ in range(40):
            optimizer.zero_grad()
            loss = ((left.T @ param @ right - target).square() * scales[:, None] * scales).sum()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return torch.tensor(found)

    gaps = {}
    for name, make_optimizer in {
        "soap": lambda params: SOAP(params, lr=0.05, weight_decay=0.0, interval=3),
        "adam": lambda params: torch.optim.Adam(params, lr=0.05),
    }.items():
        plain, rotated = losses(make_optimizer, torch.eye(12), torch.eye(12)), losses(make_optimizer, *rotations)
        gaps[name] = ((plain - rotated).abs() / plain).max().item()
        assert plain[-1] < 0.5 * plain[0], name
    assert gaps["soap"] < 0.05 and gaps["adam"] > 0.5, gaps


def _missing(index, step):
    return index == 4 or (index in (0, 3) and step % 2 == 0) or (index == 1 and step < 3)


def _poisoned(params):
    optimizer = make(params)
    for step in range(1, 5):
        set_gradients(params, step)
        with torch.no_grad():
            params[0].grad.zero_()
            params[1].grad.fill_(math.nan if step == 1 else 1.0)
            params[5].grad.fill_(math.inf if step == 3 else 0.5)
        optimizer.step()
    return wholes(params, optimizer)


def _poisoned_plain():
    return _poisoned(make_params("", None, SHAPES))


CASES = {1: [("ragged", (1,))], 2: [("ragged", (2,))], 4: [("mixed", (4,)), ("ragged", (2, 2))]}


def _check_ranks(cases, expected, narrow, missing, poisoned):
    for kind, mesh_shape in cases:
        assert_same(train(make, kind, mesh_shape, 7, shapes=SHAPES), expected, f"{kind} {mesh_shape}")
    kind, mesh_shape = cases[-1]
    assert_same(train(make, kind, mesh_shape, 7, dtype=torch.bfloat16, shapes=SHAPES), narrow, "bfloat16")
    assert_same(train(make, kind, mesh_shape, 7, missing=_missing, shapes=SHAPES), missing, "gradients that come and go")
    mesh = init_device_mesh("cpu", mesh_shape)
    assert_same(_poisoned(make_params(kind, mesh, SHAPES)), poisoned, "NaN, infinite and zero gradients")
    params = make_params("ragged", mesh, SHAPES[:2] * 6)
    optimizer = make(params, check_gradients=False)
    set_gradients(params, 1)
    with CommDebugMode() as mode:
        optimizer.step()
    assert mode.get_total_counts() == (4 if mesh.size() > 1 else 0)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow), 4])
def test_bitwise_equal_at_any_number_of_ranks(ranks):
    expected = in_one_process(train, make, "", None, 7, shapes=SHAPES)
    narrow = in_one_process(train, make, "", None, 7, dtype=torch.bfloat16, shapes=SHAPES)
    missing = in_one_process(train, make, "", None, 7, missing=_missing, shapes=SHAPES)
    run_ranks(ranks, _check_ranks, CASES[ranks], expected, narrow, missing, in_one_process(_poisoned_plain))


def test_checkpoint_goes_on_bitwise_on_other_ranks(tmp_path):
    expected = run_ranks(2, save_and_go_on, SOAP, str(tmp_path), (2,))[0]
    for mesh_shape in ((2, 2),):
        for result in run_ranks(math.prod(mesh_shape), load_and_go_on, SOAP, str(tmp_path), mesh_shape):
            assert_same(result, expected, str(mesh_shape))


def test_bad_input_is_refused():
    for name, bad in {"lr": -1, "betas": (1.0, 0.9), "shampoo_beta": 1.0, "interval": 0, "max_side": 0, "eps": -1}.items():
        message = error_of(SOAP, [nn.Parameter(torch.zeros(2, 2))], **{name: bad})
        assert message.startswith("ValueError: SOAP") and name in message, message
    assert "adamw" in error_of(SOAP, [nn.Parameter(torch.zeros(2))])


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))


def _trained(rows, noise=0.0, place=lambda model: model, part=lambda batch: batch):
    """The weights after four steps on batches of ``rows``, in float64; SOAP computes in float32."""
    torch.manual_seed(0)
    model = place(nn.Sequential(nn.Linear(16, 16, bias=False), nn.Tanh(), nn.Linear(16, 16, bias=False)).double())
    optimizer = SOAP(model.parameters(), lr=0.02)
    for step in range(4):
        batch = value(3, step, (rows, 16)).double()
        batch = batch * (1 + noise * value(4, step, (rows, 16)).double())
        optimizer.zero_grad()
        model(part(batch)).square().mean().backward()
        optimizer.step()
    return wholes(model.parameters(), optimizer)[:2]


def _gap(one, other):
    return max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))


def _check_ways():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    rank = mesh.get_local_rank()

    def units(model):
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    cut = Plan().shard(r"0\.weight", Shard(0), "dp").shard(r"2\.weight", Shard(1), "dp")
    for rows in (64, 6):
        expected = _trained(rows)
        assert _gap(_trained(rows, place=units, part=lambda batch: batch.chunk(2)[rank]), expected) < 1e-6, rows
        for plan in (Plan().shard("<in>", Shard(0), "dp").default(Replicate()), cut):
            assert _gap(_trained(rows, place=lambda model, plan=plan: parallelize(model, plan, mesh)), expected) < 1e-6, rows


def test_plans_and_fully_shard_take_the_steps_of_one_process():
    run_ranks(2, _check_ways)


def test_a_rounding_moves_weights_where_gradients_have_less_rank_than_the_matrix():
    """Eigenvectors of equal eigenvalues are any of their space: two runs of one process with other roundings differ."""
    assert _gap(_trained(64, noise=1e-8), _trained(64)) < 1e-3
    assert _gap(_trained(6, noise=1e-8), _trained(6)) > 1e-2
