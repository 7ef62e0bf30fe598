"""Weights are read from rows of other tensors, under any placements; what cannot be filled is named before anything is read."""

import random
import tempfile
import unittest

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import run_ranks
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from torch_ragged import GlobalLayout, InterleavedShard, RaggedShard, StridedRaggedShard, with_layout
from torch_ragged.checkpoint import CheckpointReader, RowPlanner, StoredRows, TrainState, save


def write(path, stored):
    dcp.save(stored, storage_writer=FileSystemWriter(path), no_dist=True)


def of_rows(tensor):
    """All dimensions but the last one count rows; of a vector, rows are elements."""
    return tensor.reshape(-1, tensor.shape[-1]) if tensor.ndim > 1 else tensor.reshape(-1)


def by_hand(stored, parts):
    """The rows of ``parts`` one behind the other."""
    return torch.cat([of_rows(stored[part.name][part.index])[part.start : part.stop] for part in parts])


def random_parts(stored, source, ndim):
    """Parts of rows of stored tensors whose rows have 5 columns, or of vectors."""
    parts = []
    for _ in range(source.randint(1, 4)):
        name = source.choice(["stack", "experts", "plain"] if ndim > 1 else ["vectors", "vector"])
        index = tuple(source.randrange(n) for n in stored[name].shape[: -2 if ndim > 1 else -1][: 1 + (name == "experts")])
        total = len(of_rows(stored[name][index]))
        start = source.randint(0, total)
        parts.append(StoredRows(name, index, start, source.choice([None, source.randint(start, total)])))
    return parts


def make_stored():
    generator = torch.Generator().manual_seed(0)
    shapes = {"stack": (3, 8, 5), "experts": (2, 3, 4, 5), "plain": (7, 5), "vectors": (3, 6), "vector": (9,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def load_random(path, seed):
    """Random parts into random placements, against rows by hand."""
    stored, source, size = make_stored(), random.Random(seed), dist.get_world_size()
    rows, want, state = {}, {}, {}
    while len(rows) < 24:
        name, ndim = f"w{len(rows)}", source.choice([1, 2, 2, 3])
        parts = random_parts(stored, source, ndim)
        value = by_hand(stored, parts)
        if ndim == 3:
            if len(value) % 2 or not len(value):
                continue
            value = value.view(2, -1, 5)
        dtype = source.choice([torch.float32, torch.float64])
        cut = [source.randint(0, 3) for _ in range(size)]
        places = [Replicate(), *(Shard(dim) for dim in range(value.ndim))]
        if sum(cut) and value.numel() % sum(cut) == 0:
            places.append(RaggedShard(range(value.ndim), cut))
        mesh = init_device_mesh("cpu", (size,))
        empty = torch.zeros(value.shape, dtype=dtype)
        state[name] = distribute_tensor(empty, mesh, [source.choice(places)], src_data_rank=None)
        rows[name], want[name] = parts, value.to(dtype)
    dcp.load(state, storage_reader=FileSystemReader(path), planner=RowPlanner(rows))
    for name, value in want.items():
        assert torch.equal(state[name].full_tensor(), value), (name, rows[name], state[name].placements)


def load_fused(path):
    """Separate weights become fused ones, which both tensor parallelism and FSDP cut."""
    stored = make_stored()
    mesh = init_device_mesh("cpu", (2, 2))
    parts = [StoredRows("stack", (1,)), StoredRows("plain", (), 1, 5), StoredRows("plain", (), 3)]
    fused = InterleavedShard(0, (2, 1, 1))
    places = [[Replicate(), fused], [StridedRaggedShard((0,), (3, 5), split_factor=2), fused]]
    state = {
        str(i): distribute_tensor(torch.zeros(16, 5), mesh, [Replicate(), fused], src_data_rank=None).redistribute(
            placements=each
        )
        for i, each in enumerate(places)
    }
    dcp.load(state, storage_reader=FileSystemReader(path), planner=RowPlanner({name: parts for name in state}))
    for value in state.values():
        assert torch.equal(value.full_tensor(), by_hand(stored, parts))
        half = value.redistribute(placements=places[0]).to_local()
        rank = mesh.get_local_rank(1)
        q, k, v = by_hand(stored, parts).split((8, 4, 4))
        assert torch.equal(half, torch.cat([each.chunk(2)[rank] for each in (q, k, v)]))


def load_wrong(path, rows, state):
    before = {name: value.clone() for name, value in state.items()}
    text = ""
    try:
        dcp.load(state, storage_reader=FileSystemReader(path), planner=RowPlanner(rows))
    except CheckpointException as error:  # No Exception, so that it ends the program.
        text = str(error)
    assert all(torch.equal(value, before[name]) for name, value in state.items())
    return text


class RowPlannerTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = folder.name
        write(self.path, make_stored())

    def test_random_rows_fill_random_placements(self):
        for size, seed in ((1, 1), (3, 2)):
            run_ranks(size, load_random, self.path, seed)

    def test_fused_weights_are_filled_under_tensor_parallelism_and_fsdp(self):
        run_ranks(4, load_fused, self.path)

    def test_a_layout_a_scalar_and_a_nested_dict_are_filled(self):
        write(
            self.path, {"plain": make_stored()["plain"], "one": torch.tensor(3.0), "same": torch.ones(2, 3, 4), "text": "hello"}
        )
        whole, rows = torch.zeros(3, 5), GlobalLayout((4, 5), ((0, 0), (3, 0)), ((0, 0), (2, 0)), ((2, 5), (1, 5)))
        state = {"a": {"w": with_layout(whole, rows), "one": torch.zeros(())}, "same": torch.zeros(2, 3, 4), "text": ""}
        planner = RowPlanner({"a.w": [StoredRows("plain", (), 2, 6)], "a.one": [StoredRows("one")]})
        dcp.load(state, storage_reader=FileSystemReader(self.path), planner=planner, no_dist=True)
        self.assertTrue(torch.equal(whole, make_stored()["plain"][[2, 3, 5]]))
        self.assertEqual((state["a"]["one"].item(), state["text"]), (3.0, "hello"))
        self.assertTrue(torch.equal(state["same"], torch.ones(2, 3, 4)))

    def test_our_own_checkpoints_are_read_by_rows_too(self):
        model = torch.nn.Linear(3, 4)
        folder = save(self.path + "/own", TrainState(model))
        state = {"upper": torch.zeros(2, 3)}
        planner = RowPlanner({"upper": [StoredRows("model.weight", (), 2, 4)]})
        dcp.load(state, storage_reader=CheckpointReader(folder), planner=planner, no_dist=True)
        self.assertTrue(torch.equal(state["upper"], model.weight[2:]))

    def test_wrong_rows_are_refused(self):
        with self.assertRaisesRegex(TypeError, "takes a list of StoredRows for w, got .'plain',."):
            RowPlanner({"w": ["plain"]})

    def test_what_does_not_fit_is_named_and_nothing_is_read(self):
        vector, matrix = torch.zeros(6), torch.zeros(8, 5)
        for rows, state, text in (
            ({"w": [StoredRows("stak")]}, {"w": matrix}, "w is read from stak, which is no tensor of the checkpoint"),
            ({"x": [StoredRows("plain")]}, {"plain": torch.zeros(7, 5)}, "x is no tensor of the state dict"),
            ({}, {"w": matrix}, "w is read from w, which is no tensor"),
            ({"w": [StoredRows("stack", (3,))]}, {"w": matrix}, r"w is read from stack at \(3,\), which has shape \(3, 8, 5\)"),
            ({"w": [StoredRows("vector", (0, 0))]}, {"w": matrix}, r"from vector at \(0, 0\), which has shape \(9,\)"),
            (
                {"w": [StoredRows("stack", (0,), 4, 9)]},
                {"w": matrix},
                r"from rows 4 to 9 of stack, which has shape \(8, 5\) at",
            ),
            ({"w": [StoredRows("stack", (0,), 4, 3)]}, {"w": matrix}, "from rows 4 to 3 of stack"),
            ({"w": [StoredRows("vectors")]}, {"w": matrix}, r"which has shape \(3, 6\) in the checkpoint"),
            ({"w": [StoredRows("stack", (0,), 1)]}, {"w": matrix}, r"w of shape \(8, 5\) has 8 rows, and is read from 7"),
            (
                {"w": [StoredRows("vectors", (0,)), StoredRows("vector", (), 0, 1)]},
                {"w": vector},
                "has 6 rows, and is read from 7",
            ),
        ):
            self.assertRegex(
                load_wrong(self.path, rows, state), f"CheckpointError: the checkpoint cannot fill the state dict:\n  .*{text}"
            )


if __name__ == "__main__":
    unittest.main()
