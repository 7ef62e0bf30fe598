"""8-bit Adam: near 32-bit Adam, the same bits at any number of ranks, no communication, states that reshard."""

import functools
import math
import pickle
import random
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from common import error_of, in_one_process, run_ranks
from optim_common import assert_same, make_params, placements_for, set_gradients, train, value, whole, wholes
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from torch_ragged import RaggedShard, StridedRaggedShard
from torch_ragged.fsdp import blocks, fully_shard
from torch_ragged.optim import Adam8bit, AdamW8bit, BlockPolicy
from torch_ragged.optim._adam8bit import AdamStep
from torch_ragged.optim._blocks import aligned_placements, flat_indices, grid_placements, regions_of
from torch_ragged.optim._gather import Placed
from torch_ragged.optim._quantize import code_book, dequantize, encode, quantize, round_to_bfloat16
from torch_ragged.tensor._cut_placement import cuts_of
from torch_ragged.tensor._ownership import owned

SMALL = BlockPolicy((8, 16), min_numel=256)
SHAPES = ((64, 48), (33, 65), (17,), (5, 40, 24), (3, 20, 16), (8, 4), (64, 48))


def make(params, cls=AdamW8bit, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return cls(params, lr=0.01, policy=options.pop("policy", SMALL), **options)


# --- blocks ---------------------------------------------------------------------------------------------------------


def test_policy_is_global_and_keeps_blocks_whole():
    policy = BlockPolicy()
    assert policy("w", nn.Parameter(torch.empty(64, 64))) == blocks(32, 32)
    assert policy("b", nn.Parameter(torch.empty(1 << 20))) is None
    assert policy("w", nn.Parameter(torch.empty(63, 65))) is None  # fewer than 4096
    assert not policy.is_blocked((1 << 16, 2)) and policy.is_blocked((1 << 16, 3)) and policy.is_blocked((8, 4096))
    assert policy.grid((5, 40, 33)) == (5, 2, 2)
    assert BlockPolicy(256).block == (1, 256) and BlockPolicy(256).is_blocked((64, 512))
    for bad in (0, (32,), (0, 3), "x", True):
        assert error_of(BlockPolicy, bad).startswith("ValueError: block must be")
    assert AdamW8bit.policy == BlockPolicy() and pickle.loads(pickle.dumps(SMALL)) == SMALL


def _random_placements(shape, rng):
    """A mesh and placements; about half of them respect blocks of 8 x 16."""
    ranks = rng.choice([1, 2, 3, 4])
    rows = math.prod(shape[:-1])
    if rng.random() < 0.5:
        return (ranks,), (Shard(rng.randrange(len(shape))),)
    unit = 8 if rows % 8 == 0 and rng.random() < 0.7 else 1
    edges = sorted(rng.randrange(rows // unit + 1) for _ in range(ranks - 1))
    units = [b - a for a, b in zip([0, *edges], [*edges, rows // unit])]
    run = RaggedShard(tuple(range(len(shape) - 1)), units)
    kind = rng.randrange(3)
    if kind == 0:
        return (ranks,), (run,)
    if kind == 1:
        return (2, ranks), (Replicate(), run)
    return (ranks, 2), (run, Shard(len(shape) - 1))


def _blocks_held(shape, mesh_shape, placements, coordinate, policy):
    """The blocks that have an element here, with the number of their elements; in local storage order."""
    held = {}
    for box in owned(shape, mesh_shape, cuts_of(placements), coordinate).boxes:
        ranges = [range(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True)]
        for row in ranges[-2]:
            for column in ranges[-1]:
                for lead in ranges[0] if len(shape) == 3 else [0]:
                    key = (lead, row // policy.block[0], column // policy.block[1])
                    held[key] = held.get(key, 0) + 1
    return held


def test_grid_placements_against_counting():
    rng, found = random.Random(0), [0, 0]
    for _ in range(300):
        shape = rng.choice([(64, 48), (40, 24), (5, 40, 24), (3, 20, 16), (33, 65)])
        mesh_shape, placements = _random_placements(shape, rng)
        grid = grid_placements(shape, mesh_shape, placements, SMALL)
        whole_everywhere = True
        for index in range(math.prod(mesh_shape)):
            coordinate = (index,) if len(mesh_shape) == 1 else divmod(index, mesh_shape[1])
            held = _blocks_held(shape, mesh_shape, placements, coordinate, SMALL)
            full = _blocks_held(shape, (1,), (Replicate(),), (0,), SMALL)
            mine = all(count == full[key] for key, count in held.items())
            whole_everywhere &= mine
            if grid is not None:
                boxes = owned(SMALL.grid(shape), mesh_shape, cuts_of(grid), coordinate).boxes
                assert mine and sum(box.numel for box in boxes) == len(held), (shape, mesh_shape, placements, grid)
        if all(isinstance(p, (RaggedShard, Replicate)) for p in placements):
            assert (grid is not None) == whole_everywhere, (shape, mesh_shape, placements)
        found[grid is not None] += 1
        near = aligned_placements(shape, mesh_shape, placements, SMALL)
        assert grid_placements(shape, mesh_shape, near, SMALL) is not None
    assert min(found) > 50, found
    strided = (StridedRaggedShard((0,), (8, 24), split_factor=2), Shard(0))
    assert grid_placements((64, 48), (2, 2), strided, SMALL) == (StridedRaggedShard((0,), (1, 3), split_factor=2), Shard(0))
    assert grid_placements((64, 48), (2, 2), (StridedRaggedShard((0,), (1, 31), split_factor=2), Shard(0)), SMALL) is None


def test_regions_are_the_blocks_of_a_rank_whatever_their_size():
    rng, found = random.Random(1), 0
    for _ in range(60):
        shape = rng.choice([(64, 48), (5, 40, 24), (33, 65)])
        mesh_shape, placements = _random_placements(shape, rng)
        grid = grid_placements(shape, mesh_shape, placements, SMALL)
        if grid is None:
            continue
        coordinate = tuple(rng.randrange(size) for size in mesh_shape)
        elements, scales = (
            flat_indices(Placed(shape_of, mesh_shape, cuts_of(cut)), coordinate, torch.device("cpu"))
            for shape_of, cut in ((shape, placements), (SMALL.grid(shape), grid))
        )
        *_, blocks_down, blocks_across = SMALL.grid(shape)
        most = rng.choice([1, 500, 2500, 1 << 30])
        regions = regions_of(Placed(shape, mesh_shape, cuts_of(placements)), coordinate, SMALL, most)
        assert sum(region.numel for region in regions) == len(elements)
        assert sum(math.prod(region.grid) for region in regions) == len(scales)
        for region in regions:
            assert region.numel <= most or region.grid[:2] == (1, 1), (region, most)
            indices = region.indices(torch.device("cpu"))
            assert torch.equal(indices, region.of(elements))
            rows, columns = indices[:, ::8, ::16] // shape[-1], indices[:, ::8, ::16] % shape[-1]
            bands = rows // shape[-2] * blocks_down + rows % shape[-2] // 8
            assert torch.equal(region.scales(scales), bands * blocks_across + columns // 16)
            found += 1
    assert found > 100, found


# --- codes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dynamic", "linear"])
def test_codes_are_the_nearest_of_the_book(kind):
    cpu = torch.device("cpu")
    for signed in (True, False):
        book = code_book(kind, signed, cpu)
        assert len(book) == 256 and len(set(book.tolist())) == 256 and bool((book[1:] > book[:-1]).all())
        assert book[-1] == 1.0 and (book[0] == 0 if not signed else book[0] < -0.99)
        assert torch.equal(encode(book, kind, signed).int(), torch.arange(256)), "every number of the book is its own code"
        values = torch.cat(
            [torch.rand(20_000, generator=torch.Generator().manual_seed(1)), 10 ** torch.linspace(-9, 0, 20_000)]
        )
        values = torch.cat([values, -values]) if signed else values
        codes = encode(values, kind, signed).long()
        assert bool((codes[values.argsort()].diff() >= 0).all()), "ascending"
        nearest = torch.bucketize(values.double(), (book[1:].double() + book[:-1].double()) / 2)
        if not signed:  # Code 0 is for 0 alone.
            nearest = torch.maximum(nearest, values > 0)
            assert encode(torch.tensor([0.0, 1e-45, 1e-30]), kind, signed).tolist() == [0, 1, 1]
        apart, least = (book.double()[codes] - values).abs(), (book.double()[nearest] - values).abs()
        # For what float32 can tell where two are equally near; and zero reaches a little too far.
        assert bool((apart <= least * (1 + 5e-4) + (6e-8 if kind == "dynamic" else 0)).all())
        zeros, nans = torch.zeros(1, 8), torch.full((1, 8), math.nan)
        for x, expected in ((zeros, zeros), (torch.full((1, 8), 1e-39), zeros)):
            codes, scales = quantize(x, (1,), kind, signed)
            assert torch.equal(dequantize(codes, scales, book).abs(), expected) and not scales.any()
        for x in (nans, torch.full((1, 8), math.inf)):
            codes, scales = quantize(x, (1,), kind, signed)
            assert dequantize(codes, scales, book).isfinite().logical_not().all()
        x = values[:64].view(4, 16)
        codes, scales = quantize(x, (1,), kind, signed)
        assert torch.equal(scales, x.abs().amax(1, keepdim=True)) and codes.dtype == torch.uint8
        assert bool((dequantize(codes, scales, book) - x).abs().max() <= scales.max() * 0.01)


def test_stochastic_rounding_is_unbiased_and_keeps_what_is_exact():
    indices = torch.arange(100_000)
    values = torch.full((100_000,), 1.0 + 0.3 * 2**-7)
    rounded = round_to_bfloat16(values, indices, 7).float()
    assert set(rounded.unique().tolist()) == {1.0, 1.0 + 2**-7}
    assert abs((rounded > 1).float().mean().item() - 0.3) < 0.01
    assert not torch.equal(rounded, round_to_bfloat16(values, indices, 8).float())
    assert torch.equal(rounded[10:20], round_to_bfloat16(values[10:20], indices[10:20], 7).float())
    exact = torch.tensor([1.0, -2.5, 0.0, math.inf, -math.inf, math.nan])
    assert_same([round_to_bfloat16(exact, torch.arange(6), 3).float()], [exact], "exact values")


# --- the step -------------------------------------------------------------------------------------------------------


def test_follows_32_bit_adam():
    """Without blocks it is Adam but for rounding; with blocks it stays near for a few steps."""
    for cls, reference in ((AdamW8bit, torch.optim.AdamW), (Adam8bit, torch.optim.Adam)):
        ours, theirs, coded = (make_params("", None, SHAPES) for _ in range(3))
        a = cls(ours, lr=0.01, weight_decay=0.1, policy=BlockPolicy(min_numel=1 << 30))
        b = reference(theirs, lr=0.01, weight_decay=0.1)
        c = cls(coded, lr=0.01, weight_decay=0.1, policy=SMALL)
        for step in range(1, 6):
            for params, optimizer in ((ours, a), (theirs, b), (coded, c)):
                set_gradients(params, step)
                optimizer.step()
        for x, y, z in zip(ours, theirs, coded, strict=True):
            torch.testing.assert_close(x, y, atol=1e-6, rtol=1e-5)
            moved = 0.05  # five steps of at most about 0.01
            assert (z - y).abs().mean() < 0.05 * moved, (z - y).abs().mean()
        assert {len(a.state[p]) for p in ours} == {3} and [len(c.state[p]) for p in coded] == [5, 5, 3, 5, 5, 3, 5]


def _idle_rows(step, generator):
    """Each second row has a gradient in each fifth step: units that are off, or tokens that are rare."""
    gradient = torch.randn(64, 96, generator=generator) * 1e-2
    gradient[1::2] *= step % 5 == 0
    return gradient


def _idle_matrix(step, generator):
    """An expert that gets no token in each second step."""
    return torch.randn(64, 96, generator=generator) * 1e-2 * (step % 2)


def _zipf_rows(step, generator):
    """An embedding: rare tokens have small gradients at times, in the blocks of frequent ones."""
    rank = torch.arange(1.0, 65.0).view(-1, 1)
    return torch.randn(64, 96, generator=generator) * 1e-2 / rank * (torch.rand(64, 1, generator=generator) < 3 / rank)


def _outlier(step, generator):
    gradient = torch.randn(64, 96, generator=generator) * 1e-2
    gradient[0, 0] = 100.0
    return gradient


@pytest.mark.parametrize("code", ["dynamic", "linear"])
@pytest.mark.parametrize("gradients", [_idle_rows, _idle_matrix, _zipf_rows, _outlier])
def test_a_step_moves_no_weight_by_much_more_than_the_learning_rate(gradients, code):
    """A second moment that rounds to 0 beside a first one that does not would move weights by hundreds of learning rates."""
    for block in ((32, 32), (1, 96)):
        param, generator = nn.Parameter(torch.zeros(64, 96)), torch.Generator().manual_seed(0)
        optimizer = AdamW8bit([param], lr=1.0, weight_decay=0.0, code=code, policy=BlockPolicy(block, min_numel=0))
        for step in range(40):
            before, param.grad = param.detach().clone(), gradients(step, generator)
            optimizer.step()
            largest = float((param.detach() - before).abs().max())
            assert largest < 2, f"step {step}: {largest} learning rates"


def test_square_roots_are_those_of_float64_rounded_once():
    """As on a GPU. Roots of the CPU's library err in the last place, by elements and by their place in a vector."""
    gradient, (param, m), v = value(0, 0, (4099,)), torch.zeros(2, 4099), value(1, 0, (4099,)).abs()
    expected = -gradient / v.double().sqrt().float()
    numbers = AdamStep(1.0, 0.0, beta1=0.0, beta2=1.0, eps=0.0, step_size=1.0, correction=1.0, rounding_key=None)
    numbers.update(param, gradient, m, v)
    assert torch.equal(param, expected)


@pytest.mark.parametrize("options", [{}, {"dtype": torch.bfloat16, "stochastic_rounding": True}])
def test_runs_of_parameters_take_the_steps_of_the_whole_ones(options):
    """As offloaded(AdamW8bit) steps: each run has its own memory, and begins and ends between bands of blocks."""
    dtype = options.get("dtype", torch.float32)
    params = make_params("", None, ((64, 48), (5, 40, 24), (1000,)), dtype)
    optimizer = make(params, **({"stochastic_rounding": True} if options else {}))
    (group,) = optimizer.param_groups
    cuts = [[optimizer.piece_cut(param, param.numel(), at) for at in (-9, 31, 200, 1000, 2000, 5000)] for param in params]
    # Bands of 8 rows have 384 and 192 elements. Without blocks, multiples of 64.
    assert cuts == [[0, 0, 384, 1152, 1920, 3072], [0, 0, 192, 960, 1920, 4800], [0, 0, 192, 1000, 1000, 1000]]
    pieces = []
    for index, (param, edges) in enumerate(zip(params, cuts)):
        flat = param.detach().flatten()
        pieces += [
            (nn.Parameter(flat[start:stop].clone()), param, index, start, stop)
            for start, stop in zip(edges, edges[1:])
            if start < stop
        ]
    of_runs = optimizer.piece_optimizer(pieces, [{**group, "params": [leaf for leaf, *_ in pieces]}])
    for step in (1, 2):
        set_gradients(params, step)
        for leaf, param, _, start, stop in pieces:
            leaf.grad = param.grad.flatten()[start:stop].clone()
        optimizer.step()
        of_runs.step()
    for leaf, param, _, start, stop in pieces:
        assert torch.equal(leaf, param.flatten()[start:stop]), (param.shape, start, stop)
        sizes = optimizer.piece_states(param, group, start, stop)
        for name, whole_state in optimizer.state[param].items():
            if name != "step":
                first, last = optimizer.piece_run(param, name, start, stop)
                state = of_runs.state[leaf][name]
                assert torch.equal(state, whole_state.flatten()[first:last]), (param.shape, start, stop, name)
                assert sizes.pop(name) == (last - first, state.dtype)
        assert not sizes


def test_state_takes_two_bytes_per_element():
    params = make_params("", None, ((256, 96), (4, 64, 64), (100, 2000)))
    optimizer = AdamW8bit(params)
    set_gradients(params, 1)
    optimizer.step()
    for param in params:
        state = [v for name, v in optimizer.state[param].items() if name != "step"]
        assert sum(v.numel() * v.element_size() for v in state) <= 2.1 * param.numel()


def _aligned(kind, index, shape, mesh):
    """Whole blocks where there are any, else anything."""
    if not SMALL.is_blocked(shape):
        return placements_for("ragged", index, shape, mesh)
    size = mesh.size(mesh.ndim - 1)
    if kind == "columns" and shape[-1] % (16 * size) == 0 and index % 2 == 0:
        return [Replicate()] * (mesh.ndim - 1) + [Shard(len(shape) - 1)]
    return list(aligned_placements(shape, tuple(mesh.shape), [Replicate()] * (mesh.ndim - 1) + [Shard(0)], SMALL))


def _train_aligned(kind, mesh_shape, dtype=torch.float32, steps=5, **options):
    mesh = init_device_mesh("cpu", mesh_shape)
    params = []
    for index, shape in enumerate(SHAPES):
        tensor = value(index, 0, shape, dtype)
        params.append(nn.Parameter(distribute_tensor(tensor, mesh, _aligned(kind, index, shape, mesh), src_data_rank=None)))
    optimizer = make(params, **options)
    for step in range(1, steps + 1):
        set_gradients(params, step)
        with CommDebugMode() as mode:
            optimizer.step()
        assert mode.get_total_counts() == 0, mode.get_comm_counts()
    return wholes(params, optimizer)


def _poison(params, step):
    set_gradients(params, step)
    with torch.no_grad():
        params[0].grad.zero_()
        params[1].grad.fill_(math.nan if step == 2 else 1.0)
    params[3].grad = None if step == 1 else params[3].grad


def _poisoned(kind, mesh):
    params = make_params(kind, mesh, SHAPES)
    optimizer = make(params)
    params[4].requires_grad_(False)
    for step in range(1, 4):
        _poison(params, step)
        params[4].grad = None
        optimizer.step()
    return wholes(params, optimizer)


ROUNDED = {"dtype": torch.bfloat16, "stochastic_rounding": True}


def test_a_parameter_that_is_not_contiguous():
    values, results = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), []
    for initial in (values.clone(), values.t().contiguous().t()):
        param = nn.Parameter(initial)
        optimizer = make([param])
        for _ in range(2):
            param.pow(2).sum().backward()
            optimizer.step()
        results.append(param.detach())
    assert torch.equal(*results) and not torch.equal(results[0], values)


def _check_ranks(mesh_shape, plain, rounded, linear, poisoned):
    for kind in ("rows", "columns"):
        assert_same(_train_aligned(kind, mesh_shape), plain, kind)
    assert_same(_train_aligned("rows", mesh_shape, **ROUNDED), rounded, "bfloat16")
    # Cuts that respect nothing: redistributed, the same numbers.
    assert_same(train(make, "mixed", mesh_shape, shapes=SHAPES), plain, "mixed")
    cut = train(lambda p: make(p, stochastic_rounding=True), "ragged", mesh_shape, dtype=torch.bfloat16, shapes=SHAPES)
    assert_same(cut, rounded, "bfloat16, cut blocks")
    mesh = init_device_mesh("cpu", mesh_shape)
    assert_same(_train_aligned("rows", mesh_shape, cls=Adam8bit, code="linear", weight_decay=0.1), linear, "linear")
    assert_same(_poisoned("ragged", mesh), poisoned, "NaN, zero and missing gradients, a frozen parameter")


OTHER_MESHES = ((1,), (2,), (4,), (8,), (2, 4))


@pytest.mark.parametrize("mesh", [(2, 2), *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in OTHER_MESHES)])
def test_bitwise_equal_at_any_number_of_ranks(mesh):
    run_ranks(math.prod(mesh), _check_ranks, mesh, *in_one_process(_of_one_process))


@functools.cache
def _of_one_process():
    plain = train(make, "", None, shapes=SHAPES)
    rounded = train(lambda p: make(p, stochastic_rounding=True), "", None, dtype=torch.bfloat16, shapes=SHAPES)
    linear = train(lambda p: make(p, cls=Adam8bit, code="linear", weight_decay=0.1), "", None, shapes=SHAPES)
    return plain, rounded, linear, _poisoned("", None)


def _check_warning():
    mesh = init_device_mesh("cpu", (2,))
    params = make_params("ragged", mesh, ((64, 48), (40, 40), (8,)))
    optimizer = AdamW8bit(params, policy=SMALL)
    texts = []
    for step in (1, 2):
        set_gradients(params, step)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with CommDebugMode() as mode:
                optimizer.step()
        texts += [str(each.message) for each in caught if "AdamW8bit" in str(each.message)]
    size = 3 * 4 * (64 * 48 + 40 * 40)
    assert len(texts) == 1 and f"{size:,} bytes" in texts[0] and "orig_param_policy=optimizer.policy" in texts[0], texts
    assert mode.get_total_counts() == 7, mode.get_comm_counts()
    state = optimizer.state[params[0]]
    assert state["exp_avg_codes"].dtype == torch.uint8 and state["exp_avg_codes"].shape == (64, 48)
    # A gradient that one rank lacks counts as zero there; nobody waits.
    set_gradients(params, 3)
    if mesh.get_rank() == 0:
        params[0].grad = None
    optimizer.step()
    # On plain DTensors without blocks of their own a missing gradient is nobody else's business.
    few = make_params("ragged", mesh, ((8,),))
    set_gradients(few, 1)
    if mesh.get_rank() == 0:
        few[0].grad = None
    AdamW8bit(few).step()


def test_cut_blocks_are_redistributed_with_one_warning():
    run_ranks(2, _check_warning)


# --- fsdp and checkpoints -------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(24, 40)
        self.experts = nn.Parameter(torch.randn(3, 40, 40) / 6)
        self.inner = nn.Linear(40, 72)
        self.head = nn.Linear(72, 24, bias=False)

    def forward(self, x):
        hidden = self.embedding(x)
        for expert in self.experts.unbind(0):
            hidden = hidden + torch.tanh(hidden @ expert.t())
        return self.head(torch.tanh(self.inner(hidden)))


def _net(mesh_shape):
    torch.manual_seed(3)
    policy = BlockPolicy((16, 16), min_numel=512)
    net = fully_shard(Net(), mesh=init_device_mesh("cpu", mesh_shape), orig_param_policy=policy)
    return net, AdamW8bit(net.parameters(), lr=0.02, policy=policy)


def _steps(net, optimizer, first, count):
    for step in range(first, first + count):
        set_gradients(list(net.parameters()), step)
        with CommDebugMode() as mode:
            optimizer.step()
        assert mode.get_total_counts() == 0
    return wholes(list(net.parameters()), optimizer)


def _save(path, mesh_shape):
    net, optimizer = _net(mesh_shape)
    _steps(net, optimizer, 1, 3)
    model, optim = get_state_dict(net, optimizer)
    dcp.save({"model": model, "optim": optim}, checkpoint_id=path)
    return _steps(net, optimizer, 4, 3)


def _load(path, mesh_shape):
    net, optimizer = _net(mesh_shape)
    model, optim = get_state_dict(net, optimizer)
    dcp.load({"model": model, "optim": optim}, checkpoint_id=path)
    set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=optim)
    assert optimizer.state[net.experts]["exp_avg_codes"].dtype == torch.uint8
    return _steps(net, optimizer, 4, 3)


def _check_checkpoint(tmp_path, mesh_shapes):
    expected = run_ranks(4, _save, str(tmp_path), (4,))[0]
    for mesh_shape in mesh_shapes:
        for result in run_ranks(math.prod(mesh_shape), _load, str(tmp_path), mesh_shape):
            assert_same(result, expected, str(mesh_shape))


def test_checkpoint_goes_on_bitwise_on_other_ranks(tmp_path):
    _check_checkpoint(tmp_path, [(2,), (2, 2), (1,)])


@pytest.mark.slow
def test_checkpoint_goes_on_bitwise_on_eight_ranks(tmp_path):
    _check_checkpoint(tmp_path, [(8,)])


def _check_training():
    net, optimizer = _net((2,))
    tokens = torch.arange(48).view(4, 12) % 24
    losses = []
    for _ in range(20):
        loss = nn.functional.cross_entropy(net(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0], losses
    codes = optimizer.state[net.experts]["exp_avg_codes"]
    assert isinstance(codes, DTensor) and codes.placements == net.experts.placements


def test_trains_a_sharded_model():
    run_ranks(2, _check_training)


def test_state_dict_keeps_dtypes():
    for dtype in (torch.float32, torch.bfloat16):
        params = make_params("", None, SHAPES, dtype)
        optimizer = make(params)
        set_gradients(params, 1)
        optimizer.step()
        twins = [nn.Parameter(param.detach().clone()) for param in params]
        twin = make(twins)
        twin.load_state_dict(optimizer.state_dict())
        assert {v.dtype for v in twin.state[twins[0]].values()} == {torch.uint8, torch.float32}
        copied, copy = pickle.loads(pickle.dumps((params, optimizer)))
        for each, optim in ((params, optimizer), (twins, twin), (copied, copy)):
            set_gradients(each, 2)
            optim.step()
        assert_same(wholes(twins, twin), wholes(params, optimizer), "state dict")
        assert_same(wholes(copied, copy), wholes(params, optimizer), "pickle")


def test_bad_input_is_refused():
    param = nn.Parameter(torch.zeros(4, 4))
    for name, bad in {"lr": -1.0, "betas": (0.9, 1.0), "eps": -1.0, "weight_decay": -1.0, "code": "x"}.items():
        message = error_of(AdamW8bit, [param], **{name: bad})
        assert message.startswith("ValueError: AdamW8bit") and name in message, message
    for name in ("lr", "eps", "weight_decay", "betas"):
        pair = torch.tensor([0.5, 0.25])
        error = error_of(AdamW8bit, [param], **{name: (pair, 0.9) if name == "betas" else pair})
        assert error.startswith(f"ValueError: AdamW8bit {name} must be ") and "tensor([0.5000, 0.2500])" in error, error
    assert error_of(AdamW8bit, [param], policy=blocks(32, 32)).startswith("TypeError: AdamW8bit policy")
    assert "bfloat16" in error_of(AdamW8bit, [param], stochastic_rounding=True)
    embedding = nn.Embedding(4, 4, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    assert "sparse" in error_of(AdamW8bit([embedding.weight]).step)
    assert whole(param) is param


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
