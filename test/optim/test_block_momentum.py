"""Muon with 8-bit momentum: what it computes, the same bits on any number of ranks, its memory, checkpoints, errors."""

import functools
import pickle

import torch
import torch.distributed.checkpoint as dcp
from common import error_of, in_one_process, run_ranks
from optim_common import assert_same, set_gradients, value, wholes
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from torch_ragged.fsdp import fully_shard, memory_report, reshard_to
from torch_ragged.optim import BlockPolicy, Muon, matrix_groups, muon_policy
from torch_ragged.optim._block_moment import update_moment, zero_moment
from torch_ragged.optim._blocks import block_layout_of, grid_placements
from torch_ragged.optim._quantize import code_book, dequantize

BLOCK = (8, 16)
OPTIONS = {"lr": 0.02, "momentum": 0.9, "momentum_block": BLOCK}


class Net(nn.Module):
    """Matrices whose edges are no multiples of a block, a stack of matrices, one without blocks, and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(100, 72), nn.Linear(72, 61, bias=False)
        self.experts = nn.Parameter(torch.randn(3, 40, 56) / 8)
        self.small = nn.Linear(8, 8, bias=False)


def make(model, **options):
    return Muon(matrix_groups(model, lr=0.01), **{**OPTIONS, **options})


def trained(mesh_shape=None, steps=6, missing=True, **options):
    """Parameters and states after some steps, gathered."""
    torch.manual_seed(0)
    model = Net()
    if mesh_shape is not None:
        fully_shard(model, mesh=init_device_mesh("cpu", mesh_shape), orig_param_policy=BlockPolicy(BLOCK))
    optimizer = make(model, **options)
    for step in range(1, steps + 1):
        set_gradients(list(model.parameters()), step, missing=lambda index, step: missing and (index, step) == (1, 2))
        optimizer.step()
    names = {name for state in optimizer.state.values() for name in state}
    assert {"momentum_codes", "momentum_scales", "momentum_buffer"} <= names, names
    return wholes(list(model.parameters()), optimizer)


def test_the_moment_is_that_of_its_blocks():
    """Against each block by itself, in float64: the moment is right within half a code, its update within a rounding."""
    param, policy = nn.Parameter(torch.zeros(2, 61, 75)), BlockPolicy(BLOCK)
    layout, generator = block_layout_of(param, policy, 1 << 12), torch.Generator().manual_seed(0)
    state = zero_moment("m", param, layout, policy)
    for scale in (1.0, 1e-4, 30.0, 0.0):
        gradient = torch.randn(param.shape, generator=generator) * scale
        gradient[1, 8:16, 16:32] = 0.0
        before = moment_of(state)

        def update(moment, gradient):
            moment.mul_(0.9).add_(gradient * 0.1)
            return moment * 2

        result = update_moment("m", state, layout, policy, gradient, update)
        exact = 0.9 * before.double() + 0.1 * gradient.double()
        assert torch.allclose(result.double(), 2 * exact, rtol=1e-6, atol=1e-6 * float(exact.abs().max()) + 1e-30)
        after, most = moment_of(state), state["m_scales"].repeat_interleave(8, 1).repeat_interleave(16, 2)[:, :61, :75]
        assert torch.equal(most[0, 56:, 64:], exact[0, 56:, 64:].abs().max().float().expand(5, 11)), (
            "blocks at the edge are smaller"
        )
        # In the upper decade, codes are 0.9 / 64 of the scale apart.
        assert bool(((after - exact).abs() <= most * (0.9 / 64 / 2 + 1e-6)).all())
        assert before.any() or not after[1, 8:16, 16:32].any()


def moment_of(state):
    scales = state["m_scales"].repeat_interleave(8, 1).repeat_interleave(16, 2)[:, :61, :75]
    return dequantize(state["m_codes"], scales, code_book("dynamic", True, torch.device("cpu")))


def test_ranks_have_the_bits_of_one_process():
    expected = in_one_process(trained)
    for ranks, mesh_shape in ((2, (2,)), (4, (2, 2))):
        for found in run_ranks(ranks, trained, mesh_shape):
            assert_same(found, expected, f"{mesh_shape}")
    for options in ({"nesterov": False}, {"neuron_beta": 0.95, "cautious_weight_decay": True}):
        expected = in_one_process(trained, steps=3, **options)
        for found in run_ranks(3, functools.partial(trained, (3,), steps=3, **options)):
            assert_same(found, expected, f"{options}")


def _by_owners(mesh_shape):
    torch.manual_seed(0)
    policy = muon_policy(flops=1e9, bandwidth=1e12, momentum_block=BLOCK)
    model = fully_shard(Net(), mesh=init_device_mesh("cpu", mesh_shape), orig_param_policy=policy)
    optimizer = make(model)
    for step in range(1, 4):
        set_gradients(list(model.parameters()), step)
        optimizer.step()
    return wholes(list(model.parameters()), optimizer), policy.groups[0].cut


def test_the_policy_of_owners_cuts_between_blocks():
    expected = in_one_process(trained_of_one)
    for found, cut in run_ranks(4, _by_owners, (4,)):
        assert "first.weight" in cut, cut
        assert_same(found, expected, "owners")


def trained_of_one():
    return trained(steps=3, missing=False)


def _segments(mesh_shape=None):
    torch.manual_seed(0)
    model = nn.Linear(64, 96, bias=False)
    if mesh_shape is not None:
        fully_shard(model, mesh=init_device_mesh("cpu", mesh_shape), orig_param_policy=BlockPolicy(BLOCK))
    optimizer = Muon([{"params": list(model.parameters()), "segments": ((48, 24, 24), 0)}], **OPTIONS)
    for step in range(1, 4):
        set_gradients(list(model.parameters()), step)
        optimizer.step()
    return wholes(list(model.parameters()), optimizer)


def test_segments_have_blocks_of_the_whole_weight():
    expected = in_one_process(_segments)
    for found in run_ranks(3, _segments, (3,)):
        assert_same(found, expected, "segments")


def test_it_trains_nearly_as_with_a_whole_momentum():
    def losses(**options):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
        optimizer = Muon(matrix_groups(model, lr=0.01), **{**OPTIONS, **options})
        x, found = value(0, 1, (256, 64)), []
        y = torch.tanh(x @ value(1, 1, (64, 64)) / 8)
        for _ in range(60):
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    whole, blocks = losses(momentum_block=None), losses()
    assert blocks != whole, "nothing was rounded"
    assert blocks[-1] < 0.2 * blocks[0]
    assert abs(blocks[-1] / whole[-1] - 1) < 0.1, (blocks[-1], whole[-1])


def _nbytes(mesh_shape):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512, bias=False), nn.Linear(512, 256, bias=False))
    fully_shard(model, mesh=init_device_mesh("cpu", mesh_shape), orig_param_policy=BlockPolicy())
    found = {}
    for block in (None, (32, 32)):
        optimizer = Muon(model.parameters(), lr=0.02, momentum_block=block)
        report = memory_report(model, optimizer)
        set_gradients(list(model.parameters()), 1)
        optimizer.step()
        states = [each for state in optimizer.state.values() for each in state.values()]
        found[block] = sum(each.to_local().nbytes for each in states), report.peak.optimizer
    return found


def test_momentum_needs_a_quarter_of_the_bytes():
    for found in run_ranks(2, _nbytes, (2,)):
        (whole, whole_said), (blocks, blocks_said) = found[None], found[32, 32]
        assert whole == 4 * 256 * 512 == whole_said
        assert blocks == 256 * 512 + 4 * 128 == blocks_said


def _saved(path, mesh_shape):
    torch.manual_seed(0)
    model = fully_shard(Net(), mesh=init_device_mesh("cpu", mesh_shape), orig_param_policy=BlockPolicy(BLOCK))
    optimizer = make(model)
    for step in range(1, 4):
        set_gradients(list(model.parameters()), step)
        optimizer.step()
    dcp.save({"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=path)
    return _go_on(model, optimizer)


def _loaded(path, mesh_shape):
    torch.manual_seed(5)
    model = fully_shard(Net(), mesh=init_device_mesh("cpu", mesh_shape), orig_param_policy=BlockPolicy(BLOCK))
    optimizer = make(model)
    states, optim = model.state_dict(), get_optimizer_state_dict(model, optimizer)
    dcp.load({"model": states, "optim": optim}, checkpoint_id=path)
    model.load_state_dict(states)
    set_optimizer_state_dict(model, optimizer, optim)
    return _go_on(model, optimizer)


def _go_on(model, optimizer):
    for step in range(4, 7):
        set_gradients(list(model.parameters()), step)
        optimizer.step()
    return wholes(list(model.parameters()), optimizer)


def test_a_checkpoint_goes_on_bitwise_on_other_ranks(tmp_path):
    expected = run_ranks(2, _saved, str(tmp_path), (2,))[0]
    for ranks, mesh_shape in ((3, (3,)), (4, (2, 2))):
        for found in run_ranks(ranks, _loaded, str(tmp_path), mesh_shape):
            assert_same(found, expected, f"{mesh_shape}")


def _moved():
    torch.manual_seed(0)
    model = fully_shard(Net(), mesh=init_device_mesh("cpu", (4,)), orig_param_policy=BlockPolicy(BLOCK))
    optimizer = make(model)
    for step in range(1, 4):
        set_gradients(list(model.parameters()), step)
        optimizer.step()
    reshard_to(model, optimizer, init_device_mesh("cpu", (2, 2)))
    return _go_on(model, optimizer)


def _stayed():
    torch.manual_seed(0)
    model = Net()
    optimizer = make(model)
    for step in range(1, 4):
        set_gradients(list(model.parameters()), step)
        optimizer.step()
    return _go_on(model, optimizer)


def test_a_live_run_goes_on_bitwise_on_another_mesh():
    expected = in_one_process(_stayed)
    for found in run_ranks(4, _moved):
        assert_same(found, expected, "reshard_to")


def _cut():
    model = fully_shard(nn.Linear(100, 72), mesh=init_device_mesh("cpu", (3,)))
    return error_of(make, model)


def test_bad_input_is_refused():
    for text in run_ranks(3, _cut):
        assert text.startswith("ValueError: Muon momentum_block (8, 16): blocks of a parameter of shape (72, 100) are cut"), (
            text
        )
    assert "too small" in error_of(make, Net(), momentum_block=(8, 8))
    for block in (0, (8,), "x", (8, 0)):
        assert error_of(make, Net(), momentum_block=block).startswith("ValueError: block must be a positive integer"), block
    model = Net()
    whole, blocks = make(model, momentum_block=None), make(model)
    set_gradients(list(model.parameters()), 1)
    whole.step()
    saved = whole.state_dict()
    blocks.load_state_dict(saved)  # It brings its options.
    assert blocks.param_groups[0]["momentum_block"] is None
    blocks.step()
    blocks = make(model)
    for group in saved["param_groups"]:  # As before there was the option.
        del group["momentum_block"]
    assert "expects momentum_codes" in error_of(blocks.load_state_dict, saved)


def test_another_block_after_a_step_is_refused():
    for block in (None, [8, 8], (16, 16), 128):
        model = Net()
        optimizer = make(model)
        set_gradients(list(model.parameters()), 1)
        optimizer.step()
        before = wholes(list(model.parameters()), optimizer)
        optimizer.param_groups[0]["momentum_block"] = block
        assert "momentum of a parameter of shape" in error_of(optimizer.step), block
        assert_same(wholes(list(model.parameters()), optimizer), before, "nothing has changed")
        optimizer.param_groups[0]["momentum_block"] = list(BLOCK)  # As a checkpoint may have it.
        optimizer.step()


def _outside():
    mesh = DeviceMesh("cpu", [0, 1])
    param = nn.Parameter(distribute_tensor(torch.zeros(64, 96), mesh, [Shard(0)], src_data_rank=None))
    optimizer = Muon([param], **OPTIONS)
    return optimizer.first_state_nbytes(param, optimizer.param_groups[0])


def test_a_rank_outside_of_the_mesh_holds_nothing():
    assert run_ranks(3, _outside) == [32 * 96 + 4 * 4 * 6] * 2 + [0]


def test_parts_of_several_sizes_that_are_cut_again_may_cut_blocks():
    """On all ranks alike: otherwise, some would have an optimizer, and others an error."""
    placements, policy = (Shard(0), Shard(0)), BlockPolicy(BLOCK)
    assert grid_placements((46, 128), (3, 2), placements, policy) is None
    assert grid_placements((96, 128), (3, 2), placements, policy) is not None


def test_state_dict_and_pickle_keep_the_codes():
    model = Net()
    optimizer = make(model)
    set_gradients(list(model.parameters()), 1)
    optimizer.step()
    copy = pickle.loads(pickle.dumps(optimizer))
    assert copy.param_groups[0]["momentum_block"] == BLOCK
    other = make(model)
    other.load_state_dict(optimizer.state_dict())
    param = model.first.weight
    assert other.state[param]["momentum_codes"].dtype == torch.uint8
    assert torch.equal(other.state[param]["momentum_codes"], optimizer.state[param]["momentum_codes"])
