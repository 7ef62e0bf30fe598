"""InterleavedShard: content, views, split and cat, matrix products, composition with FSDP, checkpoints, random numbers."""

import itertools
import random
import tempfile
import textwrap
import unittest

import expecttest
import hypothesis
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from common import error_of, ranks, run_ranks
from hypothesis import strategies as st
from oracle import check_is_a_frozen_value, local_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard

from torch_ragged import InterleavedShard, RaggedShard, StridedRaggedShard, fsdp_placement, owned_boxes
from torch_ragged.fsdp import fully_shard
from torch_ragged.random import single_device
from torch_ragged.tensor._cut_placement import cuts_of
from torch_ragged.tensor._ownership import owned
from torch_ragged.tensor.placement_types import normalize_placements


class ValueTest(expecttest.TestCase):
    def test_it_is_a_frozen_value_whose_sizes_are_ratios(self):
        placement = InterleavedShard(0, (4, 2, 2))
        check_is_a_frozen_value(self, placement)
        self.assertEqual(placement, InterleavedShard(0, (2, 1, 1)))
        self.assertEqual(hash(placement), hash(InterleavedShard(0, (2, 1, 1))))
        self.assertEqual(InterleavedShard(1, 3), InterleavedShard(1, (1, 1, 1)))
        self.assertNotEqual(placement, InterleavedShard(1, (2, 1, 1)))
        self.assertNotEqual(InterleavedShard(0, 1), Shard(0))
        self.assertEqual(eval(repr(placement)), placement)
        self.assertExpectedInline(repr(placement), """InterleavedShard(dim=0, sizes=(2, 1, 1))""")
        self.assertExpectedInline(str(placement), """IS(0)[2,1,1]""")
        self.assertEqual(placement.segments(16), (8, 4, 4))
        self.assertTrue(placement.is_shard() and placement.is_shard(0) and not placement.is_shard(1))
        self.assertFalse(placement.is_replicate() or placement.is_partial() or isinstance(placement, Shard))

    def test_errors_say_what_is_legal(self):
        errors = [
            error_of(InterleavedShard, 0, (2, 0)),
            error_of(InterleavedShard, 0, ()),
            error_of(InterleavedShard, 0, 2.0),
            error_of(InterleavedShard, "0", 2),
            error_of(InterleavedShard, 0, 10**9),
            error_of(InterleavedShard(0, (2, 1)).segments, 8),
            error_of(normalize_placements, (InterleavedShard(0, (2, 1)),), (6,), (4,)),
            error_of(normalize_placements, (InterleavedShard(1, 2),), (6,), (2,)),
            error_of(normalize_placements, (RaggedShard((0,), (1, 1)), InterleavedShard(0, 2)), (8, 2), (2, 2)),
            error_of(normalize_placements, (StridedRaggedShard((0,), (1, 1), 4), InterleavedShard(0, 2)), (8, 2), (2, 2)),
        ]
        self.assertExpectedInline(
            "\n".join("\n    ".join(textwrap.wrap(e, 110)) for e in errors),
            """\
ValueError: InterleavedShard sizes must be positive integers, one per segment, or the number of segments, of
    which there are 1 to 65536, got (2, 0)
ValueError: InterleavedShard sizes must be positive integers, one per segment, or the number of segments, of
    which there are 1 to 65536, got ()
TypeError: InterleavedShard takes a dimension and integers, got dim=0, sizes=2.0
TypeError: InterleavedShard takes a dimension and integers, got dim='0', sizes=2
ValueError: InterleavedShard sizes must be positive integers, one per segment, or the number of segments, of
    which there are 1 to 65536, got 1000000000
ValueError: InterleavedShard(dim=0, sizes=(2, 1)) cannot cut a dimension of size 8 over 1 rank: the sum of the
    sizes must divide the dimension, and the number of ranks each segment
ValueError: InterleavedShard(dim=0, sizes=(2, 1)) cannot cut a dimension of size 6 over 4 ranks: the sum of
    the sizes must divide the dimension, and the number of ranks each segment
ValueError: Shard(1) on a tensor of 1 dimensions: shard a dimension that the tensor has
ValueError: InterleavedShard(0) to the right of a ragged placement over dims (0,) would cut its units. Use
    (StridedRaggedShard, Shard(0)) instead, or give the ragged placement at most 0 dims
ValueError: StridedRaggedShard with split_factor=4 to the left of an InterleavedShard(dim=0): the split_factor
    must be the number of ranks that shard dimension 0 to its right, 2""",
        )


@st.composite
def layouts(draw):
    """A shape, a mesh shape and placements: up to two cuts of any dimensions, one of them interleaved."""
    mesh_shape = draw(st.sampled_from([(2,), (3,), (2, 2), (3, 2), (2, 3)]))
    ndim = draw(st.integers(1, 3))
    total = 1
    for size in mesh_shape:
        total *= size
    placements = []
    shape = [draw(st.sampled_from([0, total, 2 * total, 4 * total])) for _ in range(ndim)]
    for _ in mesh_shape:
        dim = draw(st.integers(0, ndim - 1))
        ratios = draw(st.sampled_from([(1,), (1, 1), (1, 3), (2, 1, 1), (1, 2, 1)]))
        placements.append(draw(st.sampled_from([Shard(dim), Replicate(), *[InterleavedShard(dim, ratios)] * 3])))
    return tuple(shape), mesh_shape, tuple(placements)


class OwnershipTest(unittest.TestCase):
    @hypothesis.settings(max_examples=300, deadline=None)
    @hypothesis.given(layouts())
    def test_each_rank_owns_its_chunk_of_every_segment(self, layout):
        shape, mesh_shape, placements = layout
        try:
            placements = normalize_placements(placements, shape, mesh_shape)
        except ValueError:
            hypothesis.assume(False)
        whole = torch.arange(torch.Size(shape).numel()).view(shape)
        for coordinate in torch.cartesian_prod(*map(torch.arange, mesh_shape)).view(-1, len(mesh_shape)).tolist():
            expected = local_of(whole, mesh_shape, placements, coordinate)
            found = owned(shape, mesh_shape, cuts_of(placements), tuple(coordinate))
            self.assertEqual(found.local_shape, tuple(expected.shape))
            local = torch.full(found.local_shape, -1)
            for box in found.boxes:
                part = whole[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]
                local.as_strided(box.sizes, box.local_strides, box.local_offset).copy_(part)
            self.assertTrue(torch.equal(local, expected))

    def test_equal_segments_own_what_a_strided_shard_owns(self):
        for shape, dim, count in (((12, 2), 0, 3), ((2, 16), 1, 4)):
            for rank in range(2):
                ours, torchs = (
                    owned_boxes(shape, (2,), [p], (rank,))
                    for p in (InterleavedShard(dim, count), _StridedShard(dim, split_factor=count))
                )
                self.assertEqual(ours, torchs)


def program(x, weight, bias):
    """Attention with a fused weight: 4 query heads, 2 heads of keys and values."""
    q, k, v = F.linear(x, weight, bias).split([8, 4, 4], -1)
    q, k, v = (t.unflatten(-1, (-1, 2)).transpose(1, 2) for t in (q, k, v))
    k, v = (t[:, :, None].expand(-1, -1, 2, -1, -1).reshape(x.size(0), 4, 5, 2) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.size(0), 5, 8)


def check_a_fused_layer(takes_all):
    """The rows and positions of a mesh of two dimensions, and of three: some pairs of cuts, or all."""
    x, weight, bias = torch.randn(4, 8, 6), torch.randn(16, 6), torch.randn(16)
    single = [each.clone().requires_grad_() for each in (x, weight, bias)]
    expected = F.linear(*single)
    expected.square().sum().backward()
    whole, cuts = [Replicate()], [Replicate(), Shard(0)]
    if torch.__version__ >= "2.12":  # Torch 2.11 flattens no dimension behind which one is cut, of plain shards either.
        cuts.append(Shard(1))
    for sizes, repeat in (((2, 2), 1), ((2, 2, 1), 2)):
        mesh = init_device_mesh("cpu", sizes)
        for cut in itertools.product(cuts, repeat=repeat):
            if repeat == 2 and not takes_all and cut not in zip(cuts, cuts[1:]):
                continue
            fused = [*whole * repeat, InterleavedShard(0, (2, 1, 1))]
            ours = [
                distribute_tensor(x, mesh, [*cut, *whole]),
                *(distribute_tensor(p, mesh, fused) for p in (weight, bias)),
            ]
            for each in ours:
                each.requires_grad_(repeat == 1)  # On three mesh dimensions, torch takes minutes to plan the gradients.
            result = F.linear(*ours)
            assert result.placements == (*cut, InterleavedShard(2, (2, 1, 1))), result.placements
            torch.testing.assert_close(result.full_tensor(), expected)
            if repeat == 1:
                result.square().sum().backward()
                for one, other in zip(ours, single):
                    torch.testing.assert_close(one.grad.full_tensor(), other.grad)


class ProgramTest(unittest.TestCase):
    @ranks(2)
    def test_fused_attention_runs_with_one_reduction():
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (2,))
        fused = InterleavedShard(0, (2, 1, 1))
        whole = [torch.randn(*shape, dtype=torch.float64) for shape in ((3, 5, 8), (16, 8), (16,), (8, 8))]
        cut = [distribute_tensor(t, mesh, [p]) for t, p in zip(whole, (Replicate(), fused, fused, Shard(1)), strict=True)]
        for tensor in (*whole, *cut):
            tensor.requires_grad_()
        with CommDebugMode() as mode:
            output = F.linear(program(*cut[:3]), cut[3])
            assert output.placements == (Partial(),) and mode.get_total_counts() == 0
            (output.redistribute(placements=[Replicate()]) ** 2).sum().backward()
        expected = F.linear(program(*whole[:3]), whole[3])
        (expected**2).sum().backward()
        torch.testing.assert_close(output.full_tensor(), expected)
        assert mode.get_total_counts() == 1, mode.get_comm_counts()  # The input's gradient stays pending.
        for ours, single in zip(cut, whole, strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), single.grad)
        assert cut[1].grad.placements == (fused,) and cut[2].grad.placements == (fused,)

    @ranks(2)
    def test_split_at_edges_and_cat_are_local_and_other_splits_raise():
        mesh = init_device_mesh("cpu", (2,))
        whole = torch.arange(48.0).view(16, 3)
        tensor = distribute_tensor(whole, mesh, [InterleavedShard(0, (2, 1, 1))])
        with CommDebugMode() as mode:
            parts = tensor.split([8, 4, 4])
            joined = torch.cat([parts[1], parts[0], parts[2]])
            rest = tensor[8:]
            halves = tensor.chunk(2)
        assert mode.get_total_counts() == 0
        assert [p.placements for p in parts] == [(InterleavedShard(0, 1),)] * 3
        assert joined.placements == (InterleavedShard(0, (1, 2, 1)),)
        assert halves[1].placements == rest.placements == (InterleavedShard(0, 2),)
        for ours, single in zip(
            (*parts, joined, rest),
            (*whole.split([8, 4, 4]), whole[[*range(8, 12), *range(8), *range(12, 16)]], whole[8:]),
            strict=True,
        ):
            assert torch.equal(ours.full_tensor(), single)
        error = error_of(tensor.split, [2, 14])
        assert "would cut inside of a segment of IS(0)[2,1,1], at rows 0 and 2" in error, error

    @ranks(2)
    def test_views_follow_segments_through_shapes():
        """The cases of veScale's tests, among others."""
        mesh = init_device_mesh("cpu", (2,))
        whole = torch.randn(4, 12, 30)
        tensor = distribute_tensor(whole, mesh, [InterleavedShard(1, 1)])
        with CommDebugMode() as mode:
            flat = tensor.reshape(-1, 30)
            again = flat.view(4, 12, 30)
            half = flat.view(2, -1, 30)
            fused = tensor.view(4, 360).view(1440)
            back = fused.view(4, 2, 6, 30)
        assert mode.get_total_counts() == 0
        assert flat.placements == (InterleavedShard(0, 4),) and again.placements == (InterleavedShard(1, 1),)
        assert half.placements == (InterleavedShard(1, 2),) and fused.placements == (InterleavedShard(0, 4),)
        for ours, shape in (
            (flat, (48, 30)),
            (again, (4, 12, 30)),
            (half, (2, 24, 30)),
            (fused, (1440,)),
            (back, (4, 2, 6, 30)),
        ):
            assert torch.equal(ours.full_tensor(), whole.view(shape)), shape
        eighths = flat.view(8, -1, 30)
        assert eighths.placements == (InterleavedShard(0, 4),) and torch.equal(eighths.full_tensor(), whole.view(8, 6, 30))
        error = error_of(flat.view, 3, -1, 30)
        assert "would cut across the segments" in error, error
        permuted = tensor.permute(1, 0, 2)
        assert permuted.placements == (InterleavedShard(0, 1),)
        assert torch.equal(permuted.reshape(12, 120).full_tensor(), whole.permute(1, 0, 2).reshape(12, 120))

    def test_a_fused_layer_takes_rows_and_positions_that_other_mesh_dimensions_cut(self):
        run_ranks(4, check_a_fused_layer, False)

    @pytest.mark.slow
    def test_a_fused_layer_takes_all_that_other_mesh_dimensions_cut(self):
        run_ranks(4, check_a_fused_layer, True)

    @ranks(2)
    def test_redistribution_knows_equal_ownership():
        mesh = init_device_mesh("cpu", (2,))
        whole = torch.arange(24.0).view(12, 2)
        ours = distribute_tensor(whole, mesh, [InterleavedShard(0, 3)])
        for placement, target in (
            (InterleavedShard(0, 3), _StridedShard(0, split_factor=3)),
            (InterleavedShard(0, 1), Shard(0)),
            (InterleavedShard(1, 1), Shard(1)),
        ):
            tensor = distribute_tensor(whole, mesh, [placement])
            with CommDebugMode() as mode:
                moved = tensor.redistribute(placements=[target])
            assert mode.get_total_counts() == 0 and moved.to_local().data_ptr() == tensor.to_local().data_ptr()
            assert moved.redistribute(placements=[placement]).to_local().data_ptr() == tensor.to_local().data_ptr()
        for target in (Shard(0), Shard(1), InterleavedShard(0, 2), RaggedShard((0,), (1, 2)), Replicate(), Partial()):
            moved = ours.redistribute(placements=[target])
            assert torch.equal(moved.full_tensor(), whole)
            assert torch.equal(moved.redistribute(placements=[InterleavedShard(0, 3)]).to_local(), ours.to_local())

    @ranks(4)
    def test_fsdp_cuts_what_the_segments_leave():
        mesh = init_device_mesh("cpu", (2, 2))
        whole = torch.arange(64.0).view(16, 4)
        fused = InterleavedShard(0, (2, 1, 1))
        ragged = fsdp_placement((16, 4), [fused], (2,), ranks=2, granularity=12)
        assert isinstance(ragged, StridedRaggedShard) and ragged.split_factor == 2
        tensor = distribute_tensor(whole, mesh, [ragged, fused])
        dp, tp = mesh.get_coordinate()
        piece = torch.cat([segment.chunk(2)[tp] for segment in whole.split([8, 4, 4])]).view(-1)
        edge = 32 * ragged.units.before(1) // ragged.units.total
        assert torch.equal(tensor.to_local(), piece[edge:] if dp else piece[:edge])
        assert torch.equal(tensor.full_tensor(), whole)
        for target in ([Replicate(), fused], [Replicate(), Shard(0)], [Shard(1), Replicate()], [ragged, Shard(0)]):
            assert torch.equal(tensor.redistribute(placements=target).full_tensor(), whole), target
            back = tensor.redistribute(placements=target).redistribute(placements=[ragged, fused])
            assert torch.equal(back.to_local(), tensor.to_local()), target
        columns = [InterleavedShard(1, (1, 1))]
        part = whole.view(-1)[:48].view(6, 8)
        deep = [fsdp_placement((6, 8), columns, (2,), ranks=2), *columns]
        assert deep[0].dims == (0,)
        assert torch.equal(distribute_tensor(part, mesh, deep).full_tensor(), part)

    @ranks(2)
    def test_random_ops_give_one_devices_numbers():
        mesh = init_device_mesh("cpu", (2,))
        rng = random.Random(0)
        for shape, placement in (((16, 6), InterleavedShard(0, (2, 1, 1))), ((5, 20), InterleavedShard(1, (3, 2)))):
            tensor = distribute_tensor(torch.zeros(shape), mesh, [placement])
            seed = rng.randrange(100)
            torch.manual_seed(seed)
            with single_device():
                torch.nn.init.kaiming_uniform_(tensor)
                dropped = F.dropout(tensor, 0.3)
                made = torch.distributed.tensor.randn(shape, device_mesh=mesh, placements=[placement])
            torch.manual_seed(seed)
            whole = torch.nn.init.kaiming_uniform_(torch.zeros(shape))
            assert torch.equal(tensor.full_tensor(), whole)
            assert torch.equal(dropped.full_tensor(), F.dropout(whole, 0.3))
            assert torch.equal(made.full_tensor(), torch.randn(shape)) and made.placements == (placement,)

    @ranks(2)
    def test_from_local_infers_and_checks_the_shape():
        mesh = init_device_mesh("cpu", (2,))
        made = DTensor.from_local(torch.zeros(8, 3), mesh, [InterleavedShard(0, (2, 1, 1))])
        assert made.shape == (16, 3)
        error = error_of(DTensor.from_local, torch.zeros(3, 3), mesh, [InterleavedShard(0, (2, 1))])
        assert error == ""  # Segments of 4 and 2 rows.
        error = error_of(DTensor.from_local, torch.zeros(2, 3), mesh, [InterleavedShard(0, (2, 1))])
        assert "InterleavedShard(dim=0, sizes=(2, 1)) cannot cut a dimension of size 4 over 2 ranks" in error, error

    def test_checkpoints_hold_boxes_and_load_under_other_placements(self):
        with tempfile.TemporaryDirectory() as folder:
            run_ranks(2, save_and_load, folder)

    @ranks(4)
    def test_fully_shard_on_fused_weights_trains_as_one_process():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        torch.manual_seed(0)
        single, model = Fused().double(), Fused().double()
        model.load_state_dict(single.state_dict())
        fused = InterleavedShard(0, (2, 1, 1))
        for name, placement in (("weight", fused), ("bias", fused), ("out", Shard(1))):
            value = distribute_tensor(getattr(model, name).detach(), mesh["tp"], [placement])
            setattr(model, name, torch.nn.Parameter(value))
        fully_shard(model, mesh=mesh["dp"])
        assert isinstance(model.weight.placements[0], StridedRaggedShard) and model.weight.placements[1] == fused
        batch = torch.randn(6, 5, 8, dtype=torch.float64)
        for net, optim in ((net, torch.optim.AdamW(net.parameters(), lr=0.1)) for net in (single, model)):
            for _ in range(3):
                x = batch if net is single else batch.chunk(2)[mesh.get_coordinate()[0]]
                out = net(x) if net is single else net(distribute_tensor(x, mesh["tp"], [Replicate()])).full_tensor()
                out.pow(2).mean().backward()
                optim.step()
                optim.zero_grad()
        for name, value in single.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name].full_tensor(), value, msg=name)


class Fused(torch.nn.Module):
    """Attention with one weight for queries, keys and values."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(16, 8))
        self.bias = torch.nn.Parameter(torch.randn(16))
        self.out = torch.nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return F.linear(program(x, self.weight, self.bias), self.out)


def save_and_load(folder):
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(48.0).view(16, 3)
    fused = InterleavedShard(0, (2, 1, 1))
    state = {"w": distribute_tensor(whole, mesh, [fused])}
    dcp.save(state, checkpoint_id=folder)
    for placement in (fused, Replicate(), Shard(0), Shard(1), RaggedShard((0,), (5, 3)), InterleavedShard(0, 4)):
        other = {"w": distribute_tensor(torch.zeros(16, 3), mesh, [placement])}
        dcp.load(other, checkpoint_id=folder)
        assert torch.equal(other["w"].full_tensor(), whole), placement
