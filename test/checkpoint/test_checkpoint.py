"""Checkpoints of ragged DTensors: no communication for chunks, loads at any world size, bitwise."""

import itertools
import math
import tempfile
import unittest

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from torch_ragged import RaggedShard, StridedRaggedShard

SHAPES = {"matrix": (7, 6), "cube": (3, 4, 5), "vector": (11,), "scalar": (), "empty": (0, 4), "one": (1, 1)}


def full(name):
    shape = SHAPES[name]
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape) + 0.5


def placements(name, ranks, flavour):
    """A placement per world size: cutting rows, whole rows, one owner, or torch's own."""
    shape = SHAPES[name]
    numel = math.prod(shape)
    if flavour == "elements" and numel:
        edges = [numel * r * r // (ranks * ranks) for r in range(ranks + 1)]
        return RaggedShard(tuple(range(len(shape))), tuple(b - a for a, b in itertools.pairwise(edges)))
    if flavour == "shard" and shape:
        return Shard(len(shape) - 1)
    if flavour == "replicate":
        return Replicate()
    return RaggedShard((), tuple(int(r == ranks - 1) for r in range(ranks)))


def make(flavour, blank=False):
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    tensors = {}
    for name in SHAPES:
        value = torch.zeros(SHAPES[name]) if blank else full(name)
        tensors[name] = distribute_tensor(value, mesh, [placements(name, ranks, flavour)])
    return tensors


def save(path, flavour):
    state = make(flavour)
    with CommDebugMode() as mode:
        chunks = {name: tensor.__create_chunk_list__() for name, tensor in state.items()}
        for name, tensor in state.items():
            tensor.__create_write_items__(name, tensor)
    assert mode.get_total_counts() == 0
    dcp.save(state, checkpoint_id=path)
    return {name: [(tuple(c.offsets), tuple(c.sizes)) for c in part] for name, part in chunks.items()}


def load(path, flavour):
    state = make(flavour, blank=True)
    locals_before = {name: tensor.to_local().data_ptr() for name, tensor in state.items()}
    dcp.load(state, checkpoint_id=path)
    for name, tensor in state.items():
        assert tensor.to_local().data_ptr() == locals_before[name], name
        assert torch.equal(tensor.full_tensor(), full(name)), (name, flavour)


def check_tensor_parallel(path):
    """FSDP on top of tensor parallelism, and back to one mesh dimension."""
    grid, line = init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (4,))
    value = torch.randn(8, 6)
    layouts = (
        (grid, [StridedRaggedShard((0,), (1, 3), 2), Shard(0)]),
        (grid, [StridedRaggedShard((0, 1), (5, 19), 2), Shard(0)]),
        (grid, [RaggedShard((0,), (5, 3)), Shard(1)]),
        (line, [RaggedShard((0, 1), (7, 0, 30, 11))]),
        (line, [Shard(1)]),
    )
    for number, (mesh, placements) in enumerate(layouts):
        folder = f"{path}/{number}"
        tensor = distribute_tensor(value, mesh, placements)
        with CommDebugMode() as mode:
            tensor.__create_chunk_list__()
        assert mode.get_total_counts() == 0
        dcp.save({"w": tensor}, checkpoint_id=folder)
        for other_mesh, other in layouts:
            blank = {"w": distribute_tensor(torch.zeros(8, 6), other_mesh, other)}
            dcp.load(blank, checkpoint_id=folder)
            assert blank["w"].placements == tuple(other)
            assert torch.equal(blank["w"].full_tensor(), value), (placements, other)


class CheckpointTest(unittest.TestCase):
    def test_tensor_parallel_layouts_load_as_each_other(self):
        with tempfile.TemporaryDirectory() as path:
            run_ranks(4, check_tensor_parallel, path)

    def test_saved_at_4_ranks_loads_at_1_and_3(self):
        self.check_ranks(1, 3)

    @pytest.mark.slow
    def test_saved_at_4_ranks_loads_at_2_and_8(self):
        self.check_ranks(2, 8)

    def check_ranks(self, *numbers):
        with tempfile.TemporaryDirectory() as path:
            chunks = run_ranks(4, save, path, "elements")
            for name, shape in SHAPES.items():
                parts = [chunk for rank in chunks for chunk in rank[name]]
                self.assertEqual(sum(math.prod(sizes) for _, sizes in parts), math.prod(shape), name)
                for rank in chunks:
                    self.assertLessEqual(len(rank[name]), max(1, 2 * len(shape) - 1))
            for ranks, flavour in itertools.product(numbers, ("elements", "owner", "shard", "replicate")):
                with self.subTest(ranks=ranks, flavour=flavour):
                    run_ranks(ranks, load, path, flavour)

    def test_torch_placements_load_as_ragged_and_back(self):
        for saved in ("shard", "replicate", "owner"):
            with self.subTest(saved), tempfile.TemporaryDirectory() as path:
                run_ranks(2, save, path, saved)
                run_ranks(3, load, path, "elements")

    def test_a_single_process_reads_it_as_plain_tensors(self):
        with tempfile.TemporaryDirectory() as path:
            run_ranks(4, save, path, "elements")
            state = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
            dcp.load(state, checkpoint_id=path, no_dist=True)
            for name in SHAPES:
                self.assertTrue(torch.equal(state[name], full(name)), name)
            self.assertNotIsInstance(state["cube"], DTensor)
