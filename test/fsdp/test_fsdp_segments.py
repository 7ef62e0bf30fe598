"""fully_shard of fused weights whose segments have granularities of their own: numbers, boundaries, checkpoints, errors."""

import copy
import tempfile
import unittest

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from common import error_of, ranks, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from torch_ragged import InterleavedShard
from torch_ragged.fsdp import Float8Policy, buffer_layouts, elements, fully_shard, rows, segments, tensor
from torch_ragged.fsdp.codes._float8 import keeps_tiles

QKV, GATE_UP = (12, 6, 6), (10, 10)


class Layer(nn.Module):
    """A transformer layer with two fused weights."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(12, sum(QKV)), nn.Linear(12, 12)
        self.gate_up, self.down = nn.Linear(12, sum(GATE_UP), bias=False), nn.Linear(10, 12)

    def forward(self, x):
        q, k, v = self.qkv(x).split(QKV, -1)
        x = x + self.out(torch.tanh(q) * torch.cat([k, v], -1))
        gate, up = self.gate_up(x).split(GATE_UP, -1)
        return x + self.down(F.silu(gate) * up)


POLICY = {
    "qkv.weight": segments(QKV, [tensor(), rows(4), rows(4)]),
    "qkv.bias": segments(QKV, rows(1)),
    "gate_up.weight": segments(GATE_UP, rows(4)),
}


def policy(name, param):
    return POLICY.get(name)


def seeded(seed=0):
    torch.manual_seed(seed)
    return Layer().double()


def row_cuts(name):
    """The rows before which a fused weight may be cut."""
    cuts, first = set(), 0
    for size, each in zip(POLICY[name].sizes, POLICY[name].granularities, strict=True):
        cuts |= set(range(first, first + size, size if each == tensor() else each.size))
        first += size
    return cuts | {first}


def check_boundaries(model, name):
    """No rank's rows start or end inside of a block of a segment."""
    param = model.get_parameter(name)
    placement, width = param.placements[0], param[0].numel()
    assert param.numel() // placement.units.total % width == 0
    ends = {placement.units.before(rank) * param.numel() // placement.units.total // width for rank in range(5)}
    assert ends <= row_cuts(name), (name, ends)
    return ends


def train(model, batch, steps=3):
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.05), []
    for step in range(steps):
        loss = model(batch[step]).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def data():
    return torch.randn(3, 8, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def save(folder):
    model = fully_shard(seeded(1), mesh=init_device_mesh("cpu", (4,)), orig_param_policy=policy)
    train(model, data().chunk(4, 1)[dist.get_rank()])
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def load(folder, expected, granularity):
    model = fully_shard(seeded(2), mesh=init_device_mesh("cpu", (2,)), orig_param_policy=granularity)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    for name, value in expected.items():
        assert torch.equal(model.get_parameter(name).full_tensor(), value), name
    return str(model.qkv.weight.placements[0])


class FusedWeightsTest(unittest.TestCase):
    @ranks(4)
    def test_training_equals_one_process_and_no_boundary_is_inside_of_a_block():
        single, batch = seeded(), data()
        model = fully_shard(seeded(), mesh=init_device_mesh("cpu", (4,)), orig_param_policy=policy)
        ends = check_boundaries(model, "qkv.weight")
        assert ends - {0, 24}, "the weight is on several ranks"
        assert check_boundaries(model, "gate_up.weight") - {0, 20}
        (layout,) = buffer_layouts(model).values()
        assert [bool(one.segments) for one in layout.tensors] == [True, False, False, False, True, False, False]
        losses = train(model, batch.chunk(4, 1)[dist.get_rank()])
        dist.all_reduce(losses)
        torch.testing.assert_close(losses / 4, train(single, batch))
        for name, value in single.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name].full_tensor(), value, msg=name)

    @ranks(4)
    def test_tensor_parallelism_leaves_each_rank_a_part_of_each_segment():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        whole, fused = torch.arange(24.0 * 12).view(24, 12), InterleavedShard(0, QKV)

        def sharded(placement, granularity, value=whole):
            module = nn.Module()
            module.weight = nn.Parameter(distribute_tensor(value, mesh["tp"], [placement]))
            fully_shard(module, mesh=mesh["dp"], orig_param_policy=lambda name, param: granularity)
            (layout,) = buffer_layouts(module).values()
            assert torch.equal(module.weight.full_tensor(), value)
            return layout.tensors[0]

        # Each rank has 6, 3 and 3 rows of 12 elements.
        spec = sharded(fused, segments(QKV, [tensor(), rows(2), rows(2)]))
        assert (spec.shape, spec.runs) == ((12, 12), ((0, 72, 72), (72, 108, 24), (108, 144, 24)))
        # Blocks of k and v together are counted in a part of both.
        assert sharded(fused, segments((12, 12), [tensor(), rows(4)])).runs == ((0, 72, 72), (72, 144, 48))
        assert sharded(Replicate(), segments(QKV, rows(4))).runs == ((0, 216, 48), (216, 288, 48))
        # Columns that tensor parallelism cuts stay whole rows of it.
        spec = sharded(Shard(1), segments(QKV, [elements(), rows(4), rows(4)]))
        assert (spec.shape, spec.runs) == ((24, 6), ((0, 72, 6), (72, 108, 24), (108, 144, 24)))
        experts = torch.arange(4.0 * 6 * 2).view(4, 6, 2)
        spec = sharded(InterleavedShard(1, (2, 1)), segments((4, 2), rows(1), dim=1), value=experts)
        assert (spec.shape, spec.block, spec.segments) == ((4, 3, 2), 6, ())
        # A cut through segments of its own dimension: shards are whole slices, and so are parts of segments.
        spec = sharded(Shard(1), segments((4, 2), rows(1), dim=1), value=experts)
        assert (spec.shape, spec.block, spec.segments) == ((4, 3, 2), 6, ())
        error = error_of(sharded, Shard(0), segments(QKV, rows(4)))
        assert error == (
            "InvalidArgument: weight has segments((12, 6, 6), rows(4)), but the model cuts segments together, by Shard(dim=0) "
            "over 2 ranks: distribute it by InterleavedShard(0, (12, 6, 6)), or give a granularity without segments"
        ), error
        error = error_of(sharded, fused, segments((12, 4, 8), rows(4)))
        assert "the model cuts segments together, by InterleavedShard(dim=0, sizes=(2, 1, 1)) over 2 ranks" in error, error

    def test_checkpoints_load_under_another_granularity_and_number_of_ranks(self):
        with tempfile.TemporaryDirectory() as folder:
            expected = run_ranks(4, save, folder)[0]
            placements = [run_ranks(2, load, folder, expected, each)[0] for each in (policy, None)]
        self.assertNotEqual(*placements)

    @ranks(2)
    def test_sizes_that_do_not_add_up_raise_on_every_rank_before_anything_changes():
        model = seeded()
        before = copy.deepcopy(model.state_dict())
        wrong = lambda name, param: segments((12, 6, 7), rows(4)) if name == "qkv.weight" else None  # noqa: E731
        error = error_of(fully_shard, model, mesh=init_device_mesh("cpu", (2,)), orig_param_policy=wrong)
        assert error == (
            "ValueError: qkv.weight: the sizes of segments((12, 6, 7), rows(4)) add up to 25, the shape is (24, 12): give "
            "sizes that add up to its dimension 0, or another granularity for this parameter"
        ), error
        assert not any(isinstance(param, DTensor) for param in model.parameters())
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)), orig_param_policy=policy)

    @ranks(2)
    def test_ranks_whose_segments_differ_are_told_so():
        sizes = QKV if dist.get_rank() else (6, 12, 6)
        own = lambda name, param: segments(sizes, tensor()) if name == "qkv.weight" else None  # noqa: E731
        error = error_of(fully_shard, seeded(), mesh=init_device_mesh("cpu", (2,)), orig_param_policy=own)
        assert "orig_param_policy or shard_placement_fn of qkv.weight: cut segments: " in error, error

    def test_float8_needs_segments_of_whole_tiles(self):
        """The rule of :func:`keeps_tiles` against every cut."""
        for sizes, each, keeps in (
            ((256, 384), [rows(128), tensor()], True),
            ((256, 192), [tensor(), rows(128)], True),
            ((64, 256), [tensor(), rows(128)], False),  # Bands are counted from the start of the matrix.
            ((256, 128), [rows(128), rows(64)], False),
            ((256, 128), [elements(), tensor()], False),
        ):
            spec = segments(sizes, each).tensor_spec("w", (sum(sizes), 3))
            self.assertTrue(spec.segments)
            cuts = [cut for start, stop, block in spec.runs for cut in range(start, stop, block)]
            self.assertEqual(keeps_tiles(spec, 128), all(cut % (128 * 3) == 0 for cut in cuts))
            self.assertEqual(not Float8Policy().why_plain(spec, torch.float32), keeps, sizes)


if __name__ == "__main__":
    unittest.main()
