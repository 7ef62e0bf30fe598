"""Muon: torch.optim.Muon's numbers at any number of ranks and under any placement, in a constant number of collectives."""

import functools
import io
import math
import pickle
import random
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import error_of, in_one_process, run_ranks
from optim_common import SHAPES, assert_same, make_params, set_gradients, train, value, whole, wholes
from tested_device import DEVICE
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from torch_ragged import InterleavedShard, RaggedShard
from torch_ragged.fsdp import fully_shard
from torch_ragged.offline._models import BUILT_IN
from torch_ragged.optim import Muon, Shampoo, _gather, matrix_groups
from torch_ragged.optim._gather import Placed, owners_of
from torch_ragged.optim._muon import _end_of
from torch_ragged.optim._newton_schulz import (
    COEFFICIENTS,
    EPS,
    newton_schulz,
    newton_schulz_cost,
    newton_schulz_rows,
    schedule_of,
)
from torch_ragged.optim._roots import Stack, assign_roots, split_flights
from torch_ragged.tensor._ownership import Run, Whole
from torch_ragged.tensor._units import Units

OPTIONS = {"lr": 0.02, "weight_decay": 0.1}
if DEVICE != "cpu":  # Bits of batched products depend on the batch.
    OPTIONS["foreach"] = False


def make(params, **options):
    groups = [
        {"params": [p for p in params if p.ndim > 1]},
        {"params": [p for p in params if p.ndim < 2], "algorithm": "adamw"},
    ]
    return Muon([group for group in groups if group["params"]], **{**OPTIONS, **options})


# --- against torch on one rank --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": False, "weight_decay": 0.0},
        {"momentum": 0.8, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3, "lr": torch.tensor(0.01)},
        {"ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3, "adjust_lr_fn": "original"},
    ],
)
def test_equals_torch_on_one_rank(options, dtype):
    if dtype == torch.bfloat16 and not options.get("nesterov", True) and torch.__version__ < "2.15":
        pytest.skip("torch before 2.15 overwrites the momentum there")
    shapes = [shape for shape in SHAPES if len(shape) == 2]
    if dtype == torch.bfloat16:  # Of others torch rounds the last elements otherwise: see the next test.
        shapes = [(rows, columns) for rows, columns in shapes if rows > columns > 1 or rows * columns % 64 == 0]
    for foreach in (None, True, False):
        ours, theirs = make_params("", None, shapes, dtype), make_params("", None, shapes, dtype)
        a, b = Muon(ours, foreach=foreach, **options), torch.optim.Muon(theirs, **options)
        for step in range(1, 11):
            for params, optimizer in ((ours, a), (theirs, b)):
                set_gradients(params, step)
                optimizer.step()
        assert_same(wholes(ours, a), wholes(theirs, b), f"foreach={foreach}")


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="torch rounds otherwise without vector registers"
)
@pytest.mark.parametrize("shape", [(7, 13), (5, 5), (33, 65), (64, 65), (99, 100), (7, 1), (1, 7)])
def test_only_the_last_elements_of_a_wide_bfloat16_matrix_are_rounded_otherwise(shape):
    results = []
    for optimizer in (Muon, torch.optim.Muon):
        params = make_params("", None, [shape], torch.bfloat16)
        set_gradients(params, 1)
        optimizer(params, lr=0.3, weight_decay=0.0, adjust_lr_fn="match_rms_adamw").step()
        results.append(params[0].detach().flatten().float())
    ours, theirs = results
    whole = len(ours) // 64 * 64
    assert torch.equal(ours[:whole], theirs[:whole])
    # Torch rounds the step to 8 bits before it is added: half a unit of the step's last place, and one of the sum's.
    step = (theirs - value(0, 0, shape, torch.bfloat16).flatten()).abs()
    bound = 2**-8 * step + 2**-7 * theirs.abs()
    assert ((ours - theirs).abs() <= bound)[whole:].all()


def test_spectral_unclamped_scales_by_the_root_of_the_ratio():
    results = {}
    for adjust in ("original", "spectral_unclamped"):
        params = [nn.Parameter(torch.zeros(4, 16))]
        params[0].grad = value(0, 1, (4, 16))
        Muon(params, lr=1.0, weight_decay=0.0, adjust_lr_fn=adjust).step()
        results[adjust] = params[0].detach()
    assert torch.equal(results["spectral_unclamped"], results["original"] * 0.5)


def test_stack_is_its_matrices_one_by_one():
    stack = nn.Parameter(value(0, 0, (5, 40, 24)))
    singles = [nn.Parameter(stack.detach()[i].clone()) for i in range(5)]
    optimizers = Muon([stack], **OPTIONS), torch.optim.Muon(singles, lr=OPTIONS["lr"], weight_decay=OPTIONS["weight_decay"])
    for step in range(1, 4):
        stack.grad = value(0, step, stack.shape)
        for i, single in enumerate(singles):
            single.grad = stack.grad[i].clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(stack.detach(), torch.stack([single.detach() for single in singles]))


def test_bits_of_a_matrix_do_not_depend_on_the_others():
    rng = random.Random(0)
    for seed in range(600):
        shape = (rng.randint(2, 6), rng.randint(1, 24), rng.randint(1, 24))
        stack = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        alone = torch.cat([newton_schulz(one) for one in stack.split(1)])
        assert torch.equal(newton_schulz(stack), alone), (seed, shape)


def test_adamw_groups_equal_torch():
    ours, theirs = (make_params("", None, ((17,), (8, 4))) for _ in range(2))
    a = Muon([{"params": ours, "algorithm": "adamw", "betas": (0.8, 0.9), "adamw_eps": 1e-6}], **OPTIONS)
    b = torch.optim.AdamW(theirs, betas=(0.8, 0.9), eps=1e-6, **OPTIONS)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5) for optimizer in (a, b)]
    for step in range(1, 6):
        for params, optimizer, schedule in ((ours, a, schedules[0]), (theirs, b, schedules[1])):
            set_gradients(params, step)
            optimizer.step()
            schedule.step()
    assert_same(wholes(ours, a), wholes(theirs, b), "adamw")


# --- at any number of ranks -----------------------------------------------------------------------------------------

CASES = {
    1: [("ragged", (1,))],
    2: [("ragged", (2,)), ("mixed", (2,)), ("replicate", (2,)), ("one owner", (2,))],
    4: [
        ("ragged", (4,)),
        ("shard0", (4,)),
        ("shard1", (4,)),
        ("ragged", (2, 2)),
        ("mixed", (2, 2)),
        ("tensor parallel", (2, 2)),
    ],
    8: [("ragged", (8,)), ("ragged", (2, 4)), ("mixed", (4, 2))],
}


def _check_ranks(cases, expected, narrow):
    for kind, mesh_shape in cases:
        assert_same(train(make, kind, mesh_shape), expected, f"{kind} {mesh_shape}")
    kind, mesh_shape = cases[0]
    for dtype, trained in narrow.items():
        assert_same(train(make, kind, mesh_shape, dtype=dtype), trained, f"{dtype} {kind} {mesh_shape}")
    capped = train(lambda params: make(params, max_root_bytes=8192, foreach=False), kind, mesh_shape)
    assert_same(capped, expected, f"capped {kind} {mesh_shape}")


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow), 4, pytest.param(8, marks=pytest.mark.slow)])
def test_bitwise_equal_at_any_number_of_ranks(ranks):
    narrow = {dtype: in_one_process(train, make, "", None, dtype=dtype) for dtype in (torch.bfloat16, torch.float16)}
    run_ranks(ranks, _check_ranks, CASES[ranks], in_one_process(train, make, "", None), narrow)


# Ranks that share matrices: free exchanges make all of them do so.
SHARED = {"row_blocks": 4, "flops_per_byte": 0.0}
SHARED_SHAPES = ((64, 128), (33, 65), (96, 32), (3, 24, 40), (7, 1), (17,))


def _make_shared(params, **options):
    return make(params, **{**SHARED, **options})


def _check_shared(cases, expected, narrow):
    for kind, mesh_shape in cases:
        optimizers = []

        def make_one(params, made=optimizers):
            made.append(_make_shared(params))
            return made[0]

        found = train(make_one, kind, mesh_shape, 3, shapes=SHARED_SHAPES)
        assert_same(found, expected, f"{kind} {mesh_shape}")
        (transfers,) = optimizers[0]._plans.values()
        splits = {split for parts in optimizers[0]._roots.values() for _, split in parts}
        if kind not in ("one owner", "replicate"):  # There, matrices are at home.
            assert max(splits) > 1, (kind, mesh_shape, splits)
            assert any(len(flight.exchanges) == 2 * 5 - 1 for flight in transfers.flights)
    kind, mesh_shape = cases[0]
    options = {"max_root_bytes": 16384, "ns_steps": 2, "nesterov": False}
    capped = train(lambda params: _make_shared(params, **options), kind, mesh_shape, 3, torch.bfloat16, shapes=SHARED_SHAPES)
    assert_same(capped, narrow, f"bfloat16, capped {kind} {mesh_shape}")
    params = make_params("ragged", init_device_mesh("cpu", (dist.get_world_size(),)), [(64, 128), (33, 65)])
    counts = _count(_make_shared(params, check_gradients=False), params)
    # Two flights that share a matrix each. On 8 ranks, one: four ranks share the large matrix, and another has the small one.
    expected = {2: 2 * (2 + 9), 4: 2 * (2 + 9), 8: 2 + 9}[dist.get_world_size()]
    assert counts["c10d_functional.all_to_all_single"] == expected, counts


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 4, pytest.param(8, marks=pytest.mark.slow)])
def test_ranks_that_share_matrices_give_the_bits_of_one_process(ranks):
    narrow = in_one_process(
        train,
        functools.partial(_make_shared, ns_steps=2, nesterov=False),
        "",
        None,
        3,
        torch.bfloat16,
        shapes=SHARED_SHAPES,
    )
    run_ranks(
        ranks, _check_shared, CASES[ranks], in_one_process(train, _make_shared, "", None, 3, shapes=SHARED_SHAPES), narrow
    )


def _check_turns():
    params = make_params("ragged", init_device_mesh("cpu", (2,)), [(64, 128)] * 3)
    optimizer = _make_shared(params, check_gradients=False)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    (plan,) = optimizer._plans.values()
    names = {}
    for number, flight in enumerate(plan.flights):
        names |= {id(lane): f"rows {number}.{step}" for step, lane in enumerate(flight.exchanges)}
        names |= {id(flight.gather): f"gather {number}", id(flight.scatter): f"scatter {number}"}
    log, start = [], _gather._start

    def started(lane, *args):
        log.append(f"start {names[id(lane)]}")
        pending = start(lane, *args)
        wait = pending.wait
        pending.wait = lambda: (log.append(f"finish {names[id(lane)]}"), wait())
        return pending

    with mock.patch.object(_gather, "_start", started):
        optimizer.step()
    expected = ["start gather 0", "start gather 1"]
    ways = [[f"gather {flight}", *(f"rows {flight}.{step}" for step in range(9)), f"scatter {flight}"] for flight in range(2)]
    for of_both in zip(*(zip(way, way[1:]) for way in ways)):
        expected += [f"{verb} {name}" for done, following in of_both for verb, name in (("finish", done), ("start", following))]
    assert log == [*expected, "finish scatter 0", "finish scatter 1"], log


def test_one_flight_computes_while_the_other_exchanges_rows():
    run_ranks(2, _check_turns)


def test_blocks_of_rows_are_as_exact_as_whole_products():
    for shape, blocks in (((96, 160), 4), ((160, 96), 8), ((5, 7), 8), ((64, 64), 3)):
        exact = matrix = value(0, 0, shape).double()
        exact = (exact.mT if shape[0] > shape[1] else exact) / exact.norm()
        for a, b, c in [COEFFICIENTS] * 5:
            gram = exact @ exact.mT
            exact = a * exact + (b * gram + c * gram @ gram) @ exact
        exact = exact.mT if shape[0] > shape[1] else exact
        rows = newton_schulz_rows(matrix.float(), [COEFFICIENTS] * 5, EPS, blocks, (0, min(shape)))
        errors = [
            (each.double() - exact).abs().max().item() for each in (_end_of(rows), newton_schulz(matrix.float()[None])[0])
        ]
        assert errors[0] <= 1.25 * errors[1] + 1e-3, (shape, errors)


# Fused weights: rows of a matrix, rows of a stack, columns.
FUSED = {(24, 16): ((12, 8, 4), 0), (3, 16, 8): ((10, 6), 1), (16, 24): ((8, 16), -1)}


def _make_fused(params, **options):
    return Muon([{"params": [param], "segments": FUSED[tuple(param.shape)]} for param in params], **OPTIONS, **options)


def _train_apart(dtype, **options):
    """Each segment is a parameter of its own; the results are put together."""
    split = [value(index, 0, shape, dtype).split(*segments) for index, (shape, segments) in enumerate(FUSED.items())]
    apart = [[nn.Parameter(part.contiguous()) for part in parts] for parts in split]
    optimizer = Muon([part for parts in apart for part in parts], **OPTIONS, **options)
    for step in range(1, 6):
        for index, ((shape, segments), parts) in enumerate(zip(FUSED.items(), apart)):
            for part, gradient in zip(parts, value(index, step, shape, dtype).split(*segments)):
                part.grad = gradient.contiguous()
        optimizer.step()
    pairs = list(zip(apart, [dim for _, dim in FUSED.values()]))
    found = [torch.cat([part.detach() for part in parts], dim) for parts, dim in pairs]
    return found + [torch.cat([optimizer.state[part]["momentum_buffer"] for part in parts], dim) for parts, dim in pairs]


def _check_fused(expected, of_family, cases):
    found = train(lambda params: _make_fused(params, **FAMILY), *cases[-1], 5, shapes=list(FUSED))
    assert_same(found[: len(FUSED)], of_family[: len(FUSED)], "NorMuon")
    segments = sum(len(sizes) for sizes, _ in FUSED.values())
    assert len(found) == 2 * len(FUSED) + segments, "parameters, momenta, and at the roots a state per segment"
    for dtype, apart in expected.items():
        for kind, mesh_shape in cases:
            found = train(_make_fused, kind, mesh_shape, 5, dtype, shapes=list(FUSED))
            assert_same(found, apart, f"{dtype} {kind} {mesh_shape}")
    mesh = init_device_mesh("cpu", cases[0][1])
    whole_value = value(0, 0, (24, 16))
    param = nn.Parameter(distribute_tensor(whole_value, mesh, [InterleavedShard(0, (12, 8, 4))], src_data_rank=None))
    optimizer = _make_fused([param])
    for step in range(1, 6):
        set_gradients([param], step)
        with CommDebugMode() as comm:
            optimizer.step()
    assert_same([whole(param.detach())], expected[torch.float32][:1], "InterleavedShard")
    assert comm.get_comm_counts().get(torch.ops.c10d_functional.all_to_all_single, 0) <= 4, comm.get_comm_counts()


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2, 4])
def test_segments_of_fused_weights_are_matrices_of_their_own(ranks):
    expected = {dtype: in_one_process(_train_apart, dtype) for dtype in (torch.float32, torch.bfloat16)}
    plain = in_one_process(train, _make_fused, "", None, 5, shapes=list(FUSED))
    assert_same(plain, expected[torch.float32], "plain tensors")
    of_family = in_one_process(_train_apart, torch.float32, **FAMILY)
    run_ranks(ranks, _check_fused, expected, of_family, CASES[ranks][: 3 if ranks < 4 else 5 : 2])


def _missing(index, step):
    return index == 3 or (index == 1 and step < 3) or (index in (5, 7) and step % 2 == 0)


def _poison(params, step):
    set_gradients(params, step)
    for index, param in enumerate(params):
        with torch.no_grad():
            if index == 0:
                param.grad.zero_()
            elif index == 1:
                param.grad.fill_(math.nan)
            elif index == 2 and step == 2:
                param.grad.fill_(math.inf)


def _poisoned(kind, mesh):
    params = make_params(kind, mesh)
    params[4].requires_grad_(False)
    optimizer = make(params)
    for step in range(1, 4):
        _poison(params, step)
        params[4].grad = None
        optimizer.step()
    return wholes(params, optimizer)


def _check_edges(with_missing, poisoned):
    assert_same(train(make, "ragged", (4,), missing=_missing), with_missing, "gradients that come and go")
    assert_same(train(make, "ragged", (2, 2), missing=_missing), with_missing, "gradients that come and go, HSDP")
    mesh = init_device_mesh("cpu", (4,))
    assert_same(_poisoned("ragged", mesh), poisoned, "NaN, infinite and zero gradients, a frozen parameter")
    # A matrix whose gradient only rank 1 has: zero elsewhere, and the step still is one of all ranks.
    params = make_params("ragged", mesh, ((16, 8), (8, 8)))
    set_gradients(params, 1)
    local_part = params[0].grad
    if dist.get_rank() != 1:
        params[0].grad = None
    optimizer = make(params)
    optimizer.step()
    mine = optimizer.state[params[0]]["momentum_buffer"].to_local()
    wanted = local_part.to_local() * 0.05 if dist.get_rank() == 1 else torch.zeros_like(mine)
    torch.testing.assert_close(mine, wanted)
    # Missing on some ranks, and placed elsewhere on others: an error on all.
    set_gradients(params, 2)
    params[1].grad = params[1].grad.redistribute(placements=[Replicate()])
    before = params[1].detach().clone()
    if dist.get_rank() == 2:
        params[1].grad = None
    message = error_of(optimizer.step)
    assert "no gradient on some ranks" in message and "(8, 8)" in message, message
    assert torch.equal(params[1].detach().to_local(), before.to_local())
    # Placed elsewhere on all ranks: redistributed.
    set_gradients(params, 2)
    before = whole(params[1].detach().clone())
    params[1].grad = DTensor.from_local(whole(params[1].grad) / 4, mesh, [Partial()], run_check=False)
    optimizer.step()
    after = whole(params[1].detach())
    assert torch.isfinite(after).all() and not torch.equal(after, before)


def test_missing_zero_and_nan_gradients_are_as_on_one_rank():
    with_missing = in_one_process(train, make, "", None, missing=_missing)
    run_ranks(4, _check_edges, with_missing, in_one_process(_poisoned, "", None))


# --- collectives and bytes ------------------------------------------------------------------------------------------


def _layers(count, mesh, kind):
    shapes = [(96, 32), (32, 32), (64, 32), (32, 64)] * count
    return make_params(kind, mesh, shapes)


def _count(optimizer, params):
    set_gradients(params, 1)
    with CommDebugMode() as mode:
        optimizer.step()
    return {str(op): count for op, count in mode.get_comm_counts().items() if count}


def _check_collectives():
    mesh = init_device_mesh("cpu", (4,))
    for layers in (2, 24):
        counts = _count(*reversed((params := _layers(layers, mesh, "ragged"), make(params))))
        assert counts == {"c10d_functional.all_to_all_single": 4, "c10d.allreduce_": 1}, counts
    params = _layers(2, mesh, "ragged")
    assert _count(make(params, check_gradients=False), params) == {"c10d_functional.all_to_all_single": 4}
    params = _layers(2, mesh, "one owner")
    assert _count(make(params, check_gradients=False), params) == {}, "owners keep what they own"
    pair = init_device_mesh("cpu", (2, 2))
    params = _layers(2, pair, "one owner")  # Replicas share the matrices out: nothing to gather, results to exchange.
    optimizer = make(params, check_gradients=False)
    assert _count(optimizer, params) == {"c10d_functional.all_to_all_single": 2}
    costs = [0.0] * 4
    for param in params:
        costs[optimizer._roots[param][0][0][0]] += newton_schulz_cost(*param.shape)
    assert max(costs) < 1.3 * sum(costs) / 4, costs
    # Bytes: to the root what it does not hold, and the same back.
    params = _layers(24, mesh, "ragged")
    optimizer = make(params, check_gradients=False)
    _count(optimizer, params)
    (transfers,) = optimizer._plans.values()
    mine = [param for param in params if optimizer._roots[param] == [((dist.get_rank(),), 1)]]
    of_roots, held = sum(param.numel() for param in mine), sum(param.to_local().numel() for param in mine)
    received = sum(part.numel for f in transfers.flights for places in f.gather.receives.values() for _, part in places)
    sent = sum(part.numel for f in transfers.flights for places in f.scatter.sends.values() for _, part in places)
    assert received == sent == of_roots - held


def test_collectives_are_constant_and_owners_move_nothing():
    run_ranks(4, _check_collectives)


# --- roots ----------------------------------------------------------------------------------------------------------


MODELS = ("deepseek-v3", "gpt-oss-120b", "llama-3-70b", "llama-3-8b", "qwen3-30b-a3b")


def _stacks(model):
    """The matrices of the blocks: embeddings and heads are in the group "rest", stacked biases are none."""
    blocks = [group for name, group in BUILT_IN[model]().groups.items() if name != "rest"]
    shapes = [p.shape for group in blocks for p in group if len(p.shape) > 1 and not p.name.endswith("bias")]
    return [Stack(shape, newton_schulz_cost(*shape[-2:])) for shape in shapes]


@pytest.mark.parametrize("model", MODELS)
def test_roots_are_balanced(model):
    _check_balance(model, (64, 256))


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_roots_of_more_ranks_are_balanced(model):
    _check_balance(model, (128, 512, 1024))


def _check_balance(model, numbers):
    stacks = _stacks(model)
    for ranks in numbers:
        roots = assign_roots(stacks, ranks)
        assert [len(of) for of in roots.of] == [stack.count for stack in stacks]
        assert all(list(of) == sorted(of) for of in roots.of)
        total = sum(stack.cost * stack.count for stack in stacks)
        assert math.isclose(sum(roots.loads), total, rel_tol=1e-9)
        optimum = LLAMA_OPTIMUM if (model, ranks) == ("llama-3-70b", 256) else max(stack.cost for stack in stacks)
        assert max(roots.loads) <= max(1.10 * total / ranks, 1.001 * optimum), (ranks, roots.imbalance)


_UNIT = 8192**3 * 5.0  # Newton-Schulz of an m x n matrix costs (4 m m n + 2 m m m) * 5: 6 units for 8192 x 8192.
# Llama has 240 matrices of 16 units and 160 of 6 (and small ones), fewer than it takes to balance many ranks. At 256 ranks
# with less than 22 units on each, no rank could hold a 16 and a 6, nor two 16s: 240 ranks hold one 16 each, and the other 16
# ranks at most three 6s each, which leaves 112 of the 160 without a place.
LLAMA_OPTIMUM = 22 * _UNIT


def test_owners_along_a_run_are_those_of_any_cut(monkeypatch):
    rng, found = random.Random(1), [0, 0]
    for _ in range(300):
        shape, ranks = rng.choice([(4, 6), (3, 4, 2), (5, 1, 3), (1, 8)]), rng.choice([1, 2, 3, 5])
        dims = rng.randrange(len(shape) + 1)
        units = [int(rank == rng.randrange(ranks)) for rank in range(ranks)]
        if rng.random() < 0.5 or not any(units):
            prefix = math.prod(shape[:dims])
            edges = sorted(rng.randrange(prefix + 1) for _ in range(ranks - 1))
            units = [b - a for a, b in zip([0, *edges], [*edges, prefix])]
        run = Run(dims, Units.of(units))
        if math.prod(shape[:dims]) % sum(units):
            continue
        for mesh_shape, cuts in (((ranks,), (run,)), ((2, ranks), (Whole(), run)), ((ranks, 2), (run, Whole()))):
            placed = Placed(shape, mesh_shape, cuts)
            fast = owners_of(placed)
            with monkeypatch.context() as patch:
                patch.setattr(_gather, "_owners_along", lambda *_: None)
                assert owners_of(placed) == fast, placed
            found[fast is None] += 1
    assert min(found) > 30, found


def test_flights_hold_the_cap_and_share_the_cost():
    stacks = [Stack((6, 8, 8), 6.0), Stack((16, 8), 9.0), Stack((8, 8), 6.0)]
    roots = assign_roots(stacks, 2)
    flights = split_flights(stacks, roots.of, itemsize=2)
    assert {f for row in flights for f in row} == {0, 1}
    capped = split_flights(stacks, roots.of, itemsize=2, max_root_bytes=256)
    for root in range(2):
        for flight in range(10):
            held = [
                math.prod(stack.matrix) * 2
                for stack, of, row in zip(stacks, roots.of, capped, strict=True)
                for r, f in zip(of, row, strict=True)
                if (r, f) == (root, flight)
            ]
            assert sum(held) <= 256
    assert "max_root_bytes=255" in error_of(split_flights, stacks, roots.of, 2, 255)
    # Roots of 1 and of 10 GiB; and of 8 GiB, where one matrix takes a third of a root's time.
    some, many, uneven = [(64, 1.0)], [(640, 1.0)], [(500, 1.0), (1, 90.0)]
    for stacks, expected in ((some, 4), (many, 8), (uneven, 3)):
        large = [Stack((count, 4096, 4096), cost) for count, cost in stacks]
        flights = split_flights(large, assign_roots(large, 2).of, itemsize=2)
        assert max(map(max, flights)) == expected - 1, stacks
    assert split_flights([], [], 2) == ()


def test_large_matrices_are_shared_where_it_saves_time():
    """Llama has 560 matrices: from 512 ranks on, the largest are above the mean, and whole ones leave ranks without work."""
    shapes = [stack.shape for stack in _stacks("llama-3-70b")]

    def stacks(blocks, flops_per_byte):
        group = {"ns_steps": 5, "row_blocks": blocks, "flops_per_byte": flops_per_byte, "neuron_beta": None, "foreach": None}
        optimizer = Muon([nn.Parameter(torch.empty(1, 1))])
        group = {**optimizer.param_groups[0], **group}
        return [optimizer._stack(Placed(shape, (1024,), (Run(2, Units.of([1] * 1024)),)), group) for shape in shapes]

    for ranks, most, between_hosts in ((512, 1.05, 1.35), (1024, 1.05, 2.3)):
        options = (1, 0.0), (8, 0.0), (8, 1333.0), (8, 8000.0)
        whole_ones, free, shared, slow = (assign_roots(stacks(*each), ranks) for each in options)
        mean = sum(whole_ones.loads) / ranks
        assert free.imbalance < 1.02, "without the cost of exchanges, work is even"
        assert shared.time < most * mean < whole_ones.time, (ranks, shared.time / mean, whole_ones.time / mean)
        assert max(shared.splits) > 1 and all(of == tuple(sorted(of)) for of in shared.of)
        assert all(root % split == 0 for of, split in zip(shared.of, shared.splits) for root in of), "teams of one host"
        assert slow.time < between_hosts * mean and 0 < slow.exchange, (ranks, slow.time / mean)
        assert set(assign_roots(stacks(8, 1e9), ranks).splits) == {1}, "exchanges cost more than they save"


def test_matrices_at_home_are_not_shared_with_others_of_their_size():
    at_home, free = Stack((1, 64, 64), 4.0, owners=((0,),), blocks=4), Stack((4, 64, 64), 4.0, blocks=4)
    roots = assign_roots([at_home, free], 4)
    assert roots.of[0] == (0,) and roots.splits[0] == 1 < roots.splits[1], roots
    assert roots.loads[0] >= 4.0 and math.isclose(sum(roots.loads), 20.0)


# --- the family -----------------------------------------------------------------------------------------------------


def test_polar_express_brings_singular_values_to_one():
    values = torch.logspace(-3, 0, 2000, dtype=torch.float64)
    spread = {}
    for name in ("polar_express", (3.4445, -4.7750, 2.0315)):
        for steps in (5, 7):
            x = values
            for a, b, c in schedule_of(name, steps):
                x = a * x + b * x**3 + c * x**5
            spread[name, steps] = (1 - x).abs().max().item()
    assert spread["polar_express", 5] < 0.16 < 0.5 < spread[(3.4445, -4.7750, 2.0315), 5]
    assert spread["polar_express", 7] < 1e-5  # Rounding aside, it converges; the other one does not.
    assert len(schedule_of("polar_express", 12)) == 12 and schedule_of("polar_express", 12)[-1] == (1.875, -1.25, 0.375)
    matrix = value(0, 0, (64, 48))
    found = torch.linalg.svdvals(newton_schulz(matrix[None], "polar_express")[0].float())
    assert 0.84 < found.min() and found.max() < 1.13, found


def test_one_triple_per_step_repeats_the_last():
    matrix, triples = value(0, 0, (1, 8, 6)), [(3.0, -3.0, 1.0), (1.875, -1.25, 0.375)]
    x = matrix[0].mT.bfloat16() / matrix[0].bfloat16().norm()
    for a, b, c in (triples[0], triples[1], triples[1]):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    assert torch.equal(newton_schulz(matrix, triples, 3)[0], x.mT)


def test_rows_are_normalised_as_in_normuon():
    """Against the formula in float64; the root's sums are in float32, Newton-Schulz in bfloat16."""
    shape, beta, lr = (24, 16), 0.8, 0.1
    param = nn.Parameter(value(0, 0, shape))
    optimizer = Muon([param], lr=lr, weight_decay=0.0, neuron_beta=beta)
    expected, momentum, moment = param.detach().double(), torch.zeros(shape), torch.zeros(24, 1).double()
    for step in range(1, 6):
        gradient = value(0, step, shape)
        param.grad = gradient.clone()
        optimizer.step()
        momentum = momentum.lerp(gradient, 0.05)
        update = newton_schulz(gradient.lerp(momentum, 0.95)[None])[0].double()
        moment = beta * moment + (1 - beta) * update.square().mean(1, keepdim=True)
        rows = update / moment.sqrt()
        rows *= update.norm() / rows.norm()
        expected -= lr * math.sqrt(24 / 16) * rows
        torch.testing.assert_close(param.detach().double(), expected, atol=2e-3, rtol=0)
        state = optimizer.state[param]
        torch.testing.assert_close(state["neuron_second_moment"].double(), moment, rtol=1e-5, atol=0)
    assert set(state) == {"momentum_buffer", "neuron_second_moment"}
    spread = [each.norm(dim=1).std() / each.norm(dim=1).mean() for each in (update, rows)]
    assert spread[1] < spread[0], "rows have more equal norms than without"


def test_cautious_decay_is_where_the_update_shrinks_the_weight():
    plain, cautious = (nn.Parameter(value(0, 0, (12, 8))) for _ in range(2))
    before = plain.detach().clone()
    for param, option in ((plain, False), (cautious, True)):
        param.grad = value(0, 1, (12, 8))
        Muon([param], lr=0.1, weight_decay=0.5, cautious_weight_decay=option).step()
    update = (before * (1 - 0.1 * 0.5) - plain.detach()).double()  # lr times the direction, which is subtracted.
    shrinks = update * before >= 0
    assert 20 < shrinks.sum() < 76
    torch.testing.assert_close(cautious.detach()[shrinks], plain.detach()[shrinks], atol=0, rtol=0)
    torch.testing.assert_close((before - update).float()[~shrinks], cautious.detach()[~shrinks], atol=1e-6, rtol=0)


FAMILY = {"neuron_beta": 0.9, "ns_coefficients": "polar_express", "cautious_weight_decay": True}


def make_family(params):
    return make(params, **FAMILY)


def _is_third(index, step):
    return (index + step) % 3 == 0


def _check_family(cases, expected, narrow, missing):
    for kind, mesh_shape in cases:
        assert_same(train(make_family, kind, mesh_shape, steps=4), expected, f"{kind} {mesh_shape}")
    kind, mesh_shape = cases[-1]
    assert_same(train(make_family, kind, mesh_shape, 4, dtype=torch.bfloat16), narrow, "bfloat16")
    assert_same(train(make_family, kind, mesh_shape, 4, missing=_is_third), missing, "missing")


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_the_family_has_the_same_bits_on_any_number_of_ranks(size):
    expected = in_one_process(train, make_family, "replicate", None, steps=4)
    narrow = in_one_process(train, make_family, "replicate", None, 4, dtype=torch.bfloat16)
    missing = in_one_process(train, make_family, "replicate", None, 4, missing=_is_third)
    cases = {2: [("shard0", (2,)), ("ragged", (2,))], 4: [("tensor parallel", (2, 2)), ("mixed", (4,)), ("ragged", (2, 2))]}
    run_ranks(size, _check_family, cases[size], expected, narrow, missing)


# --- state and checkpoints ------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(12, 16)
        self.experts = nn.Parameter(torch.randn(3, 16, 16) / 4)
        self.inner = nn.Linear(16, 24)
        self.head = nn.Linear(24, 12, bias=False)

    def forward(self, x):
        hidden = self.embedding(x)
        for expert in self.experts.unbind(0):
            hidden = hidden + torch.tanh(hidden @ expert.t())
        return self.head(torch.tanh(self.inner(hidden)))


def _net(mesh_shape, **options):
    torch.manual_seed(3)
    net = fully_shard(Net(), mesh=init_device_mesh("cpu", mesh_shape))
    return net, Muon(matrix_groups(net, adamw=[net.head], lr=0.03), lr=0.05, weight_decay=0.01, **options)


def _steps(net, optimizer, first, count):
    for step in range(first, first + count):
        set_gradients(list(net.parameters()), step)
        optimizer.step()
    return wholes(list(net.parameters()), optimizer)


def _save(path, mesh_shape, options):
    net, optimizer = _net(mesh_shape, **options)
    _steps(net, optimizer, 1, 3)
    model, optim = get_state_dict(net, optimizer)
    dcp.save({"model": model, "optim": optim}, checkpoint_id=path)
    return _steps(net, optimizer, 4, 2)


def _load(path, mesh_shape, options):
    net, optimizer = _net(mesh_shape, **options)
    model, optim = get_state_dict(net, optimizer)
    dcp.load({"model": model, "optim": optim}, checkpoint_id=path)
    set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=optim)
    return _steps(net, optimizer, 4, 2)


@pytest.mark.parametrize(("options", "meshes"), [({}, ((2, 2), (1,))), (FAMILY, ((2,),))])
def test_checkpoint_goes_on_bitwise_on_other_ranks(tmp_path, options, meshes):
    expected = run_ranks(4, _save, str(tmp_path), (4,), options)[0]
    for mesh_shape in meshes:
        for result in run_ranks(math.prod(mesh_shape), _load, str(tmp_path), mesh_shape, options):
            assert_same(result, expected, str(mesh_shape))


def _check_training():
    net, optimizer = _net((2,))
    groups = [[tuple(p.shape) for p in group["params"]] for group in optimizer.param_groups]
    assert groups == [[(3, 16, 16), (24, 16)], [(12, 16), (24,), (12, 24)]], groups
    tokens = torch.arange(24).view(2, 12) % 12

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(15)]
    assert losses[-1] < 0.3 * losses[0], losses
    momentum = [optimizer.state[p]["momentum_buffer"] for p in optimizer.param_groups[0]["params"]]
    assert [m.placements for m in momentum] == [p.placements for p in optimizer.param_groups[0]["params"]]
    # A copy and a plain state dict go on alike.
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict()["param_groups"], buffer)
    names = get_optimizer_state_dict(net, optimizer)["state"]
    assert set(names["experts"]) == {"momentum_buffer"} and set(names["inner.bias"]) == {"step", "exp_avg", "exp_avg_sq"}


def test_trains_a_sharded_model_with_closures():
    run_ranks(2, _check_training)


def test_state_dict_and_pickle_on_one_rank():
    params = make_params("", None)
    optimizer = make(params, max_root_bytes=1 << 20)
    set_gradients(params, 1)
    optimizer.step()
    twin_params, twin = pickle.loads(pickle.dumps((params, optimizer)))
    other_params = [nn.Parameter(param.detach().clone()) for param in params]
    other = make(other_params)
    other.load_state_dict(optimizer.state_dict())
    assert twin.max_root_bytes == 1 << 20
    for each, optim in ((params, optimizer), (twin_params, twin), (other_params, other)):
        set_gradients(each, 2)
        optim.step()
    assert_same(wholes(twin_params, twin), wholes(params, optimizer), "pickle")
    assert_same(wholes(other_params, other), wholes(params, optimizer), "state dict")
    # What torch.optim.Muon saved goes on here.
    theirs, ours = make_params("", None, ((8, 8),)), make_params("", None, ((8, 8),))
    a, b = torch.optim.Muon(theirs), Muon(ours)
    set_gradients(theirs, 1)
    a.step()
    ours[0].data.copy_(theirs[0].data)
    b.load_state_dict(a.state_dict())
    for each, optim in ((theirs, a), (ours, b)):
        set_gradients(each, 2)
        optim.step()
    assert_same(wholes(ours, b), wholes(theirs, a), "torch's state")


def test_bad_input_is_refused():
    matrix, vector = nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.zeros(4))
    assert 'algorithm="adamw"' in error_of(Muon, [vector])
    assert "complex" in error_of(Muon, [nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))])
    for name, bad in {
        "lr": -1.0,
        "momentum": -0.1,
        "weight_decay": -1.0,
        "adjust_lr_fn": "x",
        "ns_steps": 100,
        "ns_coefficients": (1.0, 2.0),
        "algorithm": "sgd",
        "betas": (0.9, 1.0),
        "max_root_bytes": 0,
        "neuron_beta": 1.0,
        "segments": ((3, 2), 0),
    }.items():
        message = error_of(Muon, [matrix], **{name: bad})
        assert message.startswith("ValueError") and name in message, message
    for name in ("lr", "momentum", "weight_decay", "eps", "flops_per_byte", "max_root_bytes"):
        message = error_of(Muon, [matrix], **{name: "2e-2"})
        assert message.startswith(f"ValueError: Muon {name} must be a") and message.endswith("got '2e-2'"), message
    assert "betas must be two numbers in [0, 1), got 0.9" in error_of(Muon, [matrix], betas=0.9)
    error = error_of(Muon, [matrix], lr=torch.tensor([1.0, 2.0]))
    assert error == "ValueError: Muon lr must be a number >= 0, got tensor([1., 2.])", error
    for bad in ((32, 32), {"w": ((4, 4), 0)}, (("4", "4"), 0), ((), 0)):
        assert error_of(Muon, [matrix], segments=bad).startswith("TypeError: Muon segments must be the sizes"), bad
        text = error_of(matrix_groups, nn.Linear(8, 8), segments={"weight": bad})
        assert text.startswith("TypeError: matrix_groups segments['weight'] must be the sizes"), text
    assert "segments must be a dict" in error_of(matrix_groups, nn.Linear(8, 8), segments=["weight"])
    for bad in ("polar", [], [(1.0, 2.0, "x")], [(1.0, 2.0, 3.0), 4.0]):
        assert "['polar_express']" in error_of(Muon, [matrix], ns_coefficients=bad), bad
    assert "rows or columns" in error_of(Muon, [nn.Parameter(torch.zeros(2, 4, 4))], segments=((1, 1), 0))
    assert "no such parameter" in error_of(matrix_groups, nn.Linear(2, 2), segments={"weights": ((1, 1), 0)})
    assert "takes no segments" in error_of(Shampoo, [{"params": [matrix], "segments": ((2, 2), 0)}])
    optimizer = Muon([matrix])
    assert "two dimensions" in error_of(optimizer.add_param_group, {"params": [vector]})
    assert len(optimizer.param_groups) == 1
    embedding = nn.Embedding(4, 4, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    assert "sparse" in error_of(Muon([embedding.weight]).step)


def _check_partial():
    mesh = init_device_mesh("cpu", (2,))
    partial = nn.Parameter(DTensor.from_local(torch.zeros(4, 4), mesh, [Partial()], run_check=False))
    assert "redistribute" in error_of(Muon, [partial])
    # Two meshes in one optimizer, and a plain tensor beside them.
    other = init_device_mesh("cpu", (1, 2))
    params = [
        nn.Parameter(distribute_tensor(value(0, 0, (8, 8)), mesh, [Shard(0)])),
        nn.Parameter(distribute_tensor(value(1, 0, (8, 8)), other, [Replicate(), RaggedShard((0,), (1, 7))])),
        nn.Parameter(value(2, 0, (8, 8))),
    ]
    optimizer = Muon(params, **OPTIONS)
    plain = make_params("", None, ((8, 8),) * 3)
    reference = torch.optim.Muon(plain, **{key: OPTIONS[key] for key in OPTIONS if key != "foreach"})
    for step in range(1, 3):
        for each, optim in ((params, optimizer), (plain, reference)):
            set_gradients(each, step)
            optim.step()
    assert_same(wholes(params, optimizer), wholes(plain, reference), "two meshes")


def test_parameters_on_several_meshes_and_plain_ones_train_as_on_one_rank():
    run_ranks(2, _check_partial)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
