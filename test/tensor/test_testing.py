"""check_conformance: placements that conform pass, and each kind of fault is found by the check of its name."""

from __future__ import annotations

import unittest
from dataclasses import dataclass
from unittest import mock

import torch
from common import error_of, ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from torch_ragged import CutPlacement, InterleavedShard, RaggedShard, StridedRaggedShard, testing
from torch_ragged.testing import CHECKS, check_conformance

FLOAT = [torch.float32]


@dataclass(frozen=True, repr=False)
class Quarters(CutPlacement):
    """The quarters of a matrix, for two ranks; ``fault`` names what is wrong with it."""

    fault: str = ""
    ndims = 2

    def boxes(self, shape, ranks):
        rows, columns = shape[0] // 2, shape[1] // 2
        at = [(0, 0), (0, columns), (rows, columns), (rows, 0)]
        quarters = [(offsets, (rows, columns)) for offsets in at]
        return [quarters[0::2], quarters[1::2]]


@dataclass(frozen=True, repr=False)
class Loose(Quarters):
    """A value whose copies differ."""

    def __eq__(self, other):
        return self is other

    __hash__ = object.__hash__

    def __reduce__(self):
        return type(self), ()

    def __deepcopy__(self, memo):
        return Loose()


def swapped(tensor, mesh, placements, src_data_rank):
    """As a placement would that gives each rank the part of the other one."""
    right = distribute_tensor(tensor, mesh, placements, src_data_rank=src_data_rank)
    number = (mesh.get_local_rank() + 1) % mesh.size()
    wrong = tensor.chunk(mesh.size())[number].reshape(right.to_local().shape)
    return DTensor.from_local(wrong, mesh, placements, shape=right.shape, stride=right.stride())


class TestingTest(unittest.TestCase):
    @ranks(2)
    def test_placements_of_torch_and_of_this_package_conform():
        mesh, all_passed = init_device_mesh("cpu", (2,)), dict.fromkeys(CHECKS, 2)
        for placement in (RaggedShard((0,), (1, 3)), RaggedShard((0, 1), (7, 1)), InterleavedShard(0, (3, 1)), Quarters()):
            assert check_conformance(placement, mesh, ((8, 4, 2), (8, 0)), dtypes=FLOAT) == all_passed, placement
        assert check_conformance(Shard(1), mesh, ((3, 5),), without=["redistribute", "random"])["elementwise"] == 4
        narrow = check_conformance(RaggedShard((0,), (0, 1)), mesh, ((4, 2),), dtypes=[torch.bool, torch.float16])
        assert (narrow["elementwise"], narrow["autograd"]) == (2, 1)

    @ranks(4)
    def test_two_mesh_dimensions():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        for pair in (
            (Replicate(), RaggedShard((0,), (1, 3))),
            (StridedRaggedShard((0,), (1, 3), split_factor=2), Shard(0)),
            (RaggedShard((0,), (3, 1)), Shard(1)),
        ):
            assert check_conformance(pair, mesh, ((8, 6),), dtypes=FLOAT) == dict.fromkeys(CHECKS, 1), pair

    @ranks(2)
    def test_each_fault_is_named_on_all_ranks():
        mesh = init_device_mesh("cpu", (2,))
        cases = (
            ("value", Loose(), distribute_tensor, "AssertionError: a copy of"),
            ("ownership", Partial(), distribute_tensor, "AssertionError: the local tensor of torch.int64 is of torch.float32"),
            ("redistribute", RaggedShard((0,), (1, 1)), swapped, "AssertionError: to (Replicate"),
            ("random", Shard(0), distribute_tensor, "AssertionError: random numbers"),
            ("checkpoint", Partial(), distribute_tensor, "CheckpointException: "),
        )
        for name, placement, place, text in cases:
            without = [each for each in CHECKS if each != name]
            with mock.patch.object(testing, "distribute_tensor", place):
                error = error_of(lambda: check_conformance(placement, mesh, ((4, 4),), dtypes=FLOAT, without=without))
            assert f"does not conform:\n{name} of torch.float32 (4, 4) on rank 0: {text}" in error, error
        wrong = error_of(lambda: check_conformance(Shard(0), mesh, without=["speed"]))
        assert "has no check 'speed': it has value, ownership" in wrong, wrong


if __name__ == "__main__":
    unittest.main()
