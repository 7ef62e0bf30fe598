"""Round trips of checkpoints over random shapes, dtypes, meshes and placements, bitwise; thousands in this process.

Ranks are played one after the other on a fake process group. DCP's own planners plan; the storage is a dict.
"""

import math
import random
import tempfile
import unittest
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import run_ranks
from oracle import local_of, random_placement, random_units
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_ragged import RaggedShard, StridedRaggedShard
from torch_ragged.checkpoint import CheckpointReader, CheckpointWriter
from torch_ragged.tensor._cut_placement import has_flat
from torch_ragged.tensor.placement_types import normalize_placements

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.complex64,
    torch.complex128,
    torch.bool,
)
MESHES = {
    1: [(1,)],
    2: [(2,), (1, 2)],
    3: [(3,)],
    4: [(4,), (2, 2), (4, 1)],
    6: [(6,), (2, 3), (3, 2)],
    8: [(8,), (2, 4), (2, 2, 2)],
}


def random_tensor(generator, shape, dtype):
    """Random bits, NaNs and all."""
    if dtype is torch.bool:
        return torch.randint(2, shape, generator=generator).bool()
    raw = torch.randint(256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


def random_layout(rng, shape):
    """A number of ranks, a mesh of them, and placements that have a meaning on it; most hold a ragged one."""
    while True:
        ranks = rng.choice(list(MESHES))
        mesh = rng.choice(MESHES[ranks])
        placements = tuple(random_placement(rng, shape, mesh, dim, StridedRaggedShard) for dim in range(len(mesh)))
        if rng.random() < 0.15 and len(mesh) == 2:
            placements = (Replicate(), RaggedShard(tuple(range(len(shape))), random_units(rng, math.prod(shape), mesh[1])))
        ragged = has_flat(placements)
        if any(isinstance(p, Partial) for p in placements):
            continue
        if not ragged and any(isinstance(p, _StridedShard) for p in placements):
            continue  # DCP's own DTensors are one box per rank.
        try:
            return ranks, mesh, normalize_placements(placements, shape, mesh)
        except ValueError:
            continue


def make_cases(count, seed):
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    cases = []
    for number in range(count):
        shape = tuple(
            rng.choice((0, 1, 1, 2, 3, 4, 5, 6, 8, 12)) if rng.random() < 0.9 else 7 for _ in range(rng.randint(0, 4))
        )
        value = random_tensor(generator, shape, rng.choice(DTYPES))
        cases.append((f"case{number}", value, random_layout(rng, shape), [random_layout(rng, shape) for _ in range(3)]))
    return cases


class _Rank:
    """One rank of a fake process group: nothing can be sent."""

    def __init__(self, rank, ranks):
        self.rank, self.ranks = rank, ranks

    def __enter__(self):
        dist.init_process_group("fake", store=FakeStore(), rank=self.rank, world_size=self.ranks)
        self.meshes = {shape: init_device_mesh("cpu", shape) for shape in MESHES[self.ranks]}
        return self

    def __exit__(self, *error):
        dist.destroy_process_group()

    def expected(self, value, mesh, placements):
        return local_of(value, mesh, placements, tuple(self.meshes[mesh].get_coordinate()))

    def dtensor(self, value, mesh, placements, blank):
        """The value's piece, in the midst of a larger storage where it is ragged, as in the buffers of FSDP."""
        local = self.expected(value, mesh, placements)
        if has_flat(placements):
            whole = torch.zeros(local.numel() + 5, dtype=value.dtype)
            piece = whole[3 : 3 + local.numel()].view(local.shape)
        else:
            piece = torch.zeros_like(local, memory_format=torch.contiguous_format)
        if not blank:
            piece.copy_(local)
        stride = value.stride() if value.numel() else torch.empty(value.shape).stride()
        return DTensor.from_local(piece, self.meshes[mesh], placements, run_check=False, shape=value.shape, stride=stride)


def save_all(cases, ranks):
    """DCP's metadata, and the chunks that its plan has the ranks write."""
    planners, plans = [], []
    for number in range(ranks):
        with _Rank(number, ranks) as rank:
            state = {
                name: rank.dtensor(value, *layout[1:], blank=False) for name, value, layout, _ in cases if layout[0] == ranks
            }
            planner = DefaultSavePlanner()
            planner.set_up_planner(state, is_coordinator=number == 0)
            plans.append(planner.create_local_plan())
            planners.append((planner, state))
    final, metadata = planners[0][0].create_global_plan(plans)  # Raises unless chunks fill every tensor and do not overlap.
    storage, written = {}, Counter()
    for number, plan in enumerate(final):
        with _Rank(number, ranks):
            planner = planners[number][0]
            plan = planner.finish_plan(plan)
            for item in plan.items:
                assert item.index not in storage, f"{item.index} is written twice"
                data = planner.resolve_data(item)
                assert tuple(data.shape) == tuple(item.tensor_data.chunk.sizes), item.index
                if data.is_contiguous() and data.numel():
                    assert data.untyped_storage().nbytes() == data.nbytes, item.index  # DCP copies what is not.
                storage[item.index] = data.clone()
                written[item.index.fqn] += data.numel()
    return metadata, storage, written


def load_all(cases, which, ranks, metadata, storage):
    """Load target ``which`` of the cases on ``ranks`` ranks; returns how many pieces came out right."""
    right = 0
    for number in range(ranks):
        with _Rank(number, ranks) as rank:
            mine = [(name, value, targets[which]) for name, value, _, targets in cases if targets[which][0] == ranks]
            state = {name: rank.dtensor(value, *layout[1:], blank=True) for name, value, layout in mine}
            planner = DefaultLoadPlanner()
            planner.set_up_planner(state, metadata, number == 0)
            for item in planner.create_local_plan().items:
                source = storage[item.storage_index]
                for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    source = source.narrow(dim, start, length)
                planner.resolve_tensor(item).copy_(source)
            for name, value, layout in mine:
                got, want = state[name].to_local(), rank.expected(value, *layout[1:])
                assert got.dtype == want.dtype and got.shape == want.shape, (name, layout)
                assert torch.equal(_bits(got), _bits(want)), (name, tuple(value.shape), layout)
                right += 1
    return right


def _bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor.new_zeros(0)


def play(count, seed):
    """Round trips of ``count`` tensors, each to three other layouts; returns their number."""
    cases = make_cases(count, seed)
    metadata, storage = None, {}
    for ranks in MESHES:
        part, chunks, written = save_all(cases, ranks)
        for name, value, layout, _ in cases:
            assert layout[0] != ranks or written[name] == value.numel(), (name, layout)
        storage |= chunks
        if metadata is None:
            metadata = part
        metadata.state_dict_metadata |= part.state_dict_metadata
        metadata.planner_data = {**(metadata.planner_data or {}), **(part.planner_data or {})}
    loaded = sum(load_all(cases, which, ranks, metadata, storage) for which in range(3) for ranks in MESHES)
    assert loaded == sum(layout[0] for *_, targets in cases for layout in targets)
    return 3 * count


def grid_of_types(blank):
    """Every dtype under placements of every kind, for real files."""
    ranks = dist.get_world_size()
    line = init_device_mesh("cpu", (ranks,))
    layouts = {"elements": (line, [RaggedShard((0, 1), (5,) + (0,) * (ranks - 2) + (43,) if ranks > 1 else (1,))])}
    layouts["columns"] = (line, [Shard(1)])
    if ranks == 4:
        grid = init_device_mesh("cpu", (2, 2))
        layouts["replicas"] = (grid, [Replicate(), RaggedShard((0, 1), (31, 17))])
        layouts["strided"] = (grid, [StridedRaggedShard((0, 1), (5, 19), 2), Shard(0)])
        layouts["nested"] = (grid, [RaggedShard((0,), (5, 3)), Shard(1)])
    state, values = {}, {}
    for index, dtype in enumerate(DTYPES):
        value = random_tensor(torch.Generator().manual_seed(index), (8, 6), dtype)
        for source in ("elements", "columns", "replicas", "strided", "nested"):
            mesh, placements = layouts.get(source if not blank else list(layouts)[index % len(layouts)], layouts["elements"])
            local = local_of(value, tuple(mesh.shape), placements, tuple(mesh.get_coordinate())).contiguous()
            local = torch.zeros_like(local) if blank else local.clone()
            name = f"{dtype}.{source}".replace("torch.", "")
            state[name] = DTensor.from_local(local, mesh, placements, run_check=False, shape=(8, 6), stride=(6, 1))
            values[name] = value
    return state, values


def save_types(path):
    state, _ = grid_of_types(blank=False)
    dcp.save(state, storage_writer=CheckpointWriter(f"{path}/ours"))
    dcp.save(state, checkpoint_id=f"{path}/plain")


def load_types(path):
    readers = (CheckpointReader(f"{path}/ours"), dcp.FileSystemReader(f"{path}/ours"), dcp.FileSystemReader(f"{path}/plain"))
    for reader in readers:
        state, want = grid_of_types(blank=True)
        dcp.load(state, storage_reader=reader)
        for name, tensor in state.items():
            place = tuple(tensor.device_mesh.get_coordinate())
            local = local_of(want[name], tuple(tensor.device_mesh.shape), tensor.placements, place)
            assert torch.equal(_bits(tensor.to_local()), _bits(local)), (name, type(reader))


class RoundTripTest(unittest.TestCase):
    def test_random_checkpoints_load_bitwise(self):
        self.assertEqual(play(250, seed=0), 750)

    @pytest.mark.slow
    def test_thousands_of_random_checkpoints_load_bitwise(self):
        self.assertEqual(play(2000, seed=1000), 6000)

    def test_every_dtype_loads_bitwise_from_files(self):
        with tempfile.TemporaryDirectory() as path:
            run_ranks(4, save_types, path)
            for ranks in (4, 2, 1):
                run_ranks(ranks, load_types, path)
