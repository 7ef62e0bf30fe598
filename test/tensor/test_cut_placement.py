"""A placement of another package, which says its boxes only: redistribution, ops, checkpoints, pictures and plans follow."""

import copy
import itertools
import pickle
import random
import tempfile
import textwrap
import unittest
from dataclasses import dataclass

import expecttest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import error_of, ranks, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import torch_ragged.checkpoint as tc
from torch_ragged import CutPlacement, RaggedShard, debug, owned_boxes
from torch_ragged.checkpoint import TrainState
from torch_ragged.optim import Muon
from torch_ragged.spmd import INIT, RUN, Plan, parallelize
from torch_ragged.tensor._placement_text import placement_text, read_placement


@dataclass(frozen=True, repr=False)
class Checkerboard(CutPlacement):
    """A matrix as ``rows`` x ``columns`` fields; the ranks get them in turn, one step further in each row of fields."""

    rows: int
    columns: int
    ndims = 2

    def boxes(self, shape, ranks):
        height, width = -(-shape[0] // self.rows), -(-shape[1] // self.columns)
        found = [[] for _ in range(ranks)]
        for i, j in itertools.product(range(self.rows), range(self.columns)):
            top, left = min(i * height, shape[0]), min(j * width, shape[1])
            field = (min(height, shape[0] - top), min(width, shape[1] - left))
            found[(i + j) % ranks].append(((top, left), field))
        return found


class Backwards(CutPlacement):
    """Ranks own the rows in reverse order; the last rank owns none."""

    def boxes(self, shape, ranks):
        edges = [shape[0] * (ranks - 1 - min(rank, ranks - 1)) // max(ranks - 1, 1) for rank in range(ranks)]
        if ranks == 1:
            return [[((0,), shape)]]
        return [[((after,), (before - after,))] for before, after in zip(edges, edges[1:])] + [[]]


@dataclass(frozen=True, repr=False)
class Wrong(CutPlacement):
    kind: str
    ndims = 2

    def boxes(self, shape, ranks):
        rows, columns = shape
        return {
            "gap": [[((0, 0), (rows, columns - 1))], []],
            "twice": [[((0, 0), (rows, columns))], [((rows - 1, 1), (1, 1))]],
            "far": [[((0, 0), (rows + 1, columns))], []],
            "negative": [[((-1, 0), (rows, columns))], []],
            "dims": [[((0,), (rows,))], []],
            "ranks": [[((0, 0), (rows, columns))]],
        }[self.kind]


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 8))

    def forward(self, x):
        return (x * self.weight).relu()


PLACEMENTS = (Checkerboard(2, 2), Checkerboard(3, 4), Backwards(), Replicate(), Shard(0), Shard(1), RaggedShard((0,), (1, 3)))


def local_part(whole, placement, rank, size):
    """The oracle: the boxes of a rank, cut out of the whole tensor, one after another."""
    lists = placement.boxes(tuple(whole.shape[: placement.ndims]), size)
    parts = [whole[tuple(slice(a, a + n) for a, n in zip(*box))].reshape(-1) for box in lists[rank]]
    return torch.cat(parts) if parts else whole.new_empty(0)


def whole_of(tensor):
    """full_tensor() by way of a placement of ours: torch's own way sends no int16 over gloo."""
    return tensor.redistribute(placements=[Backwards()]).full_tensor()


def same_bytes(one, other):
    one, other = (t.contiguous().view(-1).view(torch.uint8) if t.numel() else t.view(-1) for t in (one, other))
    return torch.equal(one, other)


class ValueTest(expecttest.TestCase):
    def test_it_is_a_value_that_texts_name(self):
        one = Checkerboard(2, 3)
        for other in (
            copy.deepcopy(one),
            pickle.loads(pickle.dumps(one)),
            eval(repr(one)),
            read_placement(placement_text(one)),
        ):
            self.assertEqual((one, hash(one)), (other, hash(other)))
        self.assertNotEqual(one, Checkerboard(3, 2))
        self.assertNotEqual(Backwards(), one)
        self.assertEqual(repr(one), "Checkerboard(2, 3)")
        self.assertFalse(one.is_replicate() or one.is_partial() or isinstance(one, Shard))
        self.assertRegex(error_of(setattr, one, "rows", 3), "cannot assign|immutable")

    def test_lists_that_are_no_cut_are_refused_and_say_why(self):
        kinds = ("gap", "twice", "far", "negative", "dims", "ranks")
        errors = [error_of(owned_boxes, (4, 3), (2,), [Wrong(kind)], (0,)) for kind in kinds]
        errors += [
            error_of(owned_boxes, (4,), (2,), [Checkerboard(2, 2)], (0,)),
            error_of(owned_boxes, (4, 4), (2, 2), [Checkerboard(2, 2), Shard(0)], (0, 0)),
            error_of(owned_boxes, (4, 4), (2, 2), [Shard(0), Checkerboard(2, 2)], (0, 0)),
            error_of(owned_boxes, (4, 4), (2, 2), [RaggedShard((0,), (1, 1)), Checkerboard(2, 2)], (0, 0)),
        ]
        self.assertExpectedInline(
            "\n".join("\n    ".join(textwrap.wrap(e, 110)) for e in errors),
            """\
ValueError: Wrong('gap').boxes((4, 3), 2) lists 8 of 12 elements: each element must be in one box, of one rank
ValueError: Wrong('twice').boxes((4, 3), 2) lists an element twice, in the boxes at (0, 0) of (4, 3) and at
    (3, 1) of (1, 1): each element must be in one box, of one rank
ValueError: Wrong('far').boxes((4, 3), 2) lists a box at (0, 0) of (5, 3), which is not in the tensor: each
    element must be in one box, of one rank
ValueError: Wrong('negative').boxes((4, 3), 2) lists a box at (-1, 0) of (4, 3): each element must be in one
    box, of one rank
ValueError: Wrong('dims').boxes((4, 3), 2) lists a box at (0,) of (4,): each element must be in one box, of
    one rank
ValueError: Wrong('ranks').boxes((4, 3), 2) lists the boxes of 1 ranks: each element must be in one box, of
    one rank
ValueError: Checkerboard(2, 2) on a tensor of shape (4,): it cuts the first 2 dimensions
ValueError: a second cut beside Checkerboard(2, 2): it lists boxes of the whole tensor. Use Replicate or
    Partial on the other mesh dimensions
ValueError: a second cut beside Checkerboard(2, 2): it lists boxes of the whole tensor. Use Replicate or
    Partial on the other mesh dimensions
ValueError: a second cut beside Checkerboard(2, 2): it lists boxes of the whole tensor. Use Replicate or
    Partial on the other mesh dimensions""",
        )

    def test_a_picture_shows_the_fields(self):
        text = debug.visualize_sharding((4, 4), (2,), [Checkerboard(2, 2)])
        self.assertExpectedInline(
            text,
            """\
(4, 4) under Checkerboard(2, 2) on a mesh of (2)
     0:4
0:2  0 0 1 1
     0 0 1 1
2:4  1 1 0 0
     1 1 0 0

ranks  elements  share  interval  pieces
0             8    50%         -  [0:2, 0:2] [2:4, 2:4]
1             8    50%         -  [0:2, 2:4] [2:4, 0:2]""",
        )


class CutPlacementTest(unittest.TestCase):
    @ranks(2)
    def test_every_pair_of_placements_moves_the_values_and_nothing_else():
        mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
        dtypes = (torch.float32, torch.complex128, torch.int16, torch.float8_e4m3fn, torch.bool)
        for shape, dtype in itertools.product(((4, 4), (6, 8, 3), (5, 3), (0, 4)), dtypes):
            whole = (torch.randn(*shape) * 4).to(dtype)
            for source, target in itertools.product(PLACEMENTS, repeat=2):
                is_illegal = any(isinstance(p, RaggedShard) and shape[0] % 4 for p in (source, target))
                if is_illegal or not any(isinstance(p, (Checkerboard, Backwards)) for p in (source, target)):
                    continue
                held = distribute_tensor(whole, mesh, [source], src_data_rank=None)  # gloo broadcasts no int16.
                moved, where = held.redistribute(placements=[target]), (shape, dtype, source, target)
                assert moved.placements == (target,) and same_bytes(whole_of(moved), whole), where
                if isinstance(target, (Checkerboard, Backwards)):
                    assert same_bytes(moved.to_local(), local_part(whole, target, rank, 2)), where

    @ranks(4)
    def test_beside_replicas_and_pending_sums():
        mesh, rank = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")), dist.get_rank()
        whole, board = torch.arange(48.0).view(6, 8), Checkerboard(3, 4)
        for pair in ((Replicate(), board), (board, Replicate())):
            held = distribute_tensor(whole, mesh, pair)
            index = mesh.get_local_rank(pair.index(board))
            assert torch.equal(held.to_local(), local_part(whole, board, index, 2)), pair
            for target in itertools.product((Replicate(), Shard(0), Shard(1), board), repeat=2):
                if board in target and any(p.is_shard() and p != board for p in target) or target == (board, board):
                    assert "list" in error_of(held.redistribute, placements=target), target
                    continue
                moved = held.redistribute(placements=target)
                assert torch.equal(moved.full_tensor(), whole), (pair, target)
        pending = DTensor.from_local(whole * (1 + mesh.get_local_rank("a")), mesh, (Partial(), Replicate()))
        for target in ((Replicate(), board), (board, Replicate())):
            moved = pending.redistribute(placements=target)
            index = mesh.get_local_rank(target.index(board))
            assert torch.equal(moved.to_local(), local_part(whole * 3, board, index, 2)), target
            back = moved.redistribute(placements=(Partial(), Replicate()))
            assert torch.equal(back.full_tensor(), whole * 3), target
        assert rank == dist.get_rank()

    @ranks(2)
    def test_muon_trains_it_as_one_device_would():
        mesh = init_device_mesh("cpu", (2,))
        torch.manual_seed(0)
        start, gradient = torch.randn(8, 8), torch.randn(8, 8)
        ours = nn.Parameter(distribute_tensor(start, mesh, [Checkerboard(2, 2)]))
        theirs = nn.Parameter(start.clone())
        optimizers = Muon([ours]), Muon([theirs])
        for _ in range(2):
            ours.grad, theirs.grad = distribute_tensor(gradient, mesh, [Checkerboard(2, 2)]), gradient.clone()
            for optimizer in optimizers:
                optimizer.step()
        torch.testing.assert_close(ours.detach().full_tensor(), theirs.detach(), rtol=1e-5, atol=1e-6)

    @ranks(2)
    def test_a_plan_names_it():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        torch.manual_seed(0)
        twin, x = Scale(), torch.randn(6, 8)
        model = copy.deepcopy(twin)
        plan = Plan()
        plan.shard("weight", Checkerboard(2, 2), "tp")
        assert Plan.from_json(plan.to_json()) == plan
        parallelize(model, plan, mesh)
        assert model.weight.placements == (Checkerboard(2, 2),)
        y, wanted = model(x), twin(x)
        assert torch.equal(y.full_tensor(), wanted)
        y.sum().backward()
        wanted.sum().backward()
        assert torch.equal(model.weight.grad.full_tensor(), twin.weight.grad)
        unit = Plan()
        unit.shard("weight", Checkerboard(2, 2), "tp", phase=INIT)
        unit.shard("weight", Replicate(), "tp", phase=RUN)
        assert "Checkerboard(2, 2)" in error_of(parallelize, Scale(), unit, mesh)


class CheckpointTest(unittest.TestCase):
    def test_what_one_number_of_ranks_saved_another_loads(self):
        with tempfile.TemporaryDirectory() as path:
            for saving, loading in ((2, 3), (3, 2), (1, 2)):
                run_ranks(saving, _save, f"{path}/{saving}{loading}")
                run_ranks(loading, _load, f"{path}/{saving}{loading}")


def _weights():
    return torch.arange(60.0).view(6, 10), torch.arange(21.0).view(7, 3)


def _placed(placements):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Module()
    for name, whole, placement in zip("ab", _weights(), placements):
        model.register_parameter(name, nn.Parameter(distribute_tensor(whole, mesh, [placement])))
    return model


def _save(path):
    model = _placed((Checkerboard(3, 4), Backwards()))
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"{path}/dcp")
    tc.save(f"{path}/own", TrainState(model=model, step=1))


def _load(path):
    choices = (Checkerboard(2, 2), Backwards(), Shard(1), Replicate(), Checkerboard(3, 4))
    for placements in itertools.islice(itertools.product(choices, repeat=2), 0, None, 3):
        for read in ("dcp", "own"):
            model = _placed(placements)
            with torch.no_grad():
                for param in model.parameters():
                    param.zero_()
            if read == "dcp":
                dcp.load({"model": model.state_dict()}, checkpoint_id=f"{path}/dcp")
            else:
                tc.load(f"{path}/own", TrainState(model=model))
            for param, whole in zip(model.parameters(), _weights()):
                assert torch.equal(param.detach().full_tensor(), whole), (placements, read)


if __name__ == "__main__":
    random.seed(0)
    unittest.main()
