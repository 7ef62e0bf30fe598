"""full_tensor() and redistribution to Replicate receive shards where they lie: the result's memory, and little beside it."""

import contextlib
import functools
import os
import random
import sys
import unittest
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
from common import ranks
from oracle import MESHES, local_of, random_placement
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.common_distributed import MultiThreadedTestCase

from torch_ragged import RaggedShard, StridedRaggedShard
from torch_ragged._ranks.groups import can_order_groups
from torch_ragged.tensor import _carry, _redistribute, _route
from torch_ragged.tensor.interleaved_placement_types import InterleavedShard
from torch_ragged.tensor.placement_types import normalize_placements

sys.path.append(str(Path(__file__).parents[2]))  # Of the benchmarks.

from benchmarks.common.peak import peak_of

SMALL = 20_000  # Bytes
EVEN, UNEVEN, OWNER = (RaggedShard((0,), units) for units in ((1, 1, 1, 1), (1, 2, 3, 4), (0, 0, 1, 0)))


def sharded(values, mesh, placements):
    """A DTensor of ``values``. No communication."""
    local = local_of(values, tuple(mesh.shape), placements, tuple(mesh.get_coordinate())).contiguous().clone()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=values.shape, stride=values.stride())


def complete(result):
    """The plain tensor; an asynchronous one is waited for, and put in order."""
    local = result.to_local() if isinstance(result, DTensor) else result
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


@contextlib.contextmanager
def smaller(slab, in_place=_redistribute._SMALLEST_IN_PLACE):
    """Tensors of a test count as large."""
    plan = _redistribute.plan_of.__wrapped__  # The plans in the cache may have their slabs already.
    with mock.patch.multiple(_redistribute, _SMALLEST_IN_PLACE=in_place, plan_of=plan):
        with mock.patch.object(_route, "_SMALLEST_SLAB", slab):
            yield


def check_random_cases(meshes, cases, seed):
    rng, kinds = random.Random(seed), set()
    for number in range(cases):
        mesh = meshes[number % len(meshes)]
        shape = tuple(rng.choice((2, 4, 5, 6, 8, 12)) for _ in range(rng.choice((1, 2, 2, 3))))
        placements = tuple(random_placement(rng, shape, tuple(mesh.shape), dim, StridedRaggedShard) for dim in range(mesh.ndim))
        try:
            placements = normalize_placements(placements, shape, tuple(mesh.shape))
        except ValueError:
            continue
        if any(p.is_partial() or p.is_replicate() for p in placements):
            continue
        dtype = rng.choice((torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.int16, torch.bool))
        values = torch.arange(torch.Size(shape).numel()).remainder(251).view(shape).to(dtype)
        is_async = rng.random() < 0.3
        local, whole = sharded(values, mesh, placements).to_local(), (Replicate(),) * mesh.ndim
        pending = _redistribute.redistribute_local(local, mesh, shape, placements, whole, is_async)
        assert pending.in_flight == is_async, (shape, placements)
        found = pending.wait()
        assert torch.equal(found, values) and found.dtype == dtype, f"{shape} {dtype} {placements}: {found}"
        assert torch.equal(pending.wait(), values), "the second wait changes nothing"
        kinds.add(tuple(type(p).__name__ for p in placements))
    return kinds


class GatherInPlaceTest(unittest.TestCase):
    @pytest.mark.slow
    @ranks(4)
    def test_peaks_are_those_of_the_result():
        """Beside the shard. What is not one stretch per rank is put in order slab by slab: such a tensor must be large."""
        line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
        small, large = (1040, 2048), (2048, 2048)
        for mesh, placements, shape in (
            (line, [EVEN], small),
            (line, [UNEVEN], small),
            (line, [OWNER], small),
            (line, [UNEVEN], (0, 4)),
            (line, [RaggedShard((0, 1), (7, 0, 1, 4))], (16, 9, 16384)),
            (square, [Replicate(), RaggedShard((0,), (1, 3))], small),
            (square, [RaggedShard((0,), (1, 3)), Replicate()], small),
            (square, [Shard(0), RaggedShard((0,), (1, 3))], small),
            (square, [StridedRaggedShard((0,), (2, 3), split_factor=2), Shard(0)], small),
            (square, [RaggedShard((0,), (1, 3)), Shard(1)], large),
            (square, [Shard(1), RaggedShard((0,), (1, 3))], large),
            (square, [RaggedShard((0,), (1, 1)), InterleavedShard(1, (1, 3))], large),
            (square, [InterleavedShard(1, (1, 3)), Replicate()], large),
            (line, [InterleavedShard(1, (1, 3))], large),
            (line, [InterleavedShard(0, (1, 3))], large),
            (line, [InterleavedShard(3, (1, 3))], (3, 16, 700, 128)),
            (line, [StridedRaggedShard((0,), (1, 3, 0, 4), split_factor=4)], large),
        ):
            for dtype in (torch.float32, torch.bfloat16):
                values = torch.arange(torch.Size(shape).numel()).remainder(251).view(shape).to(dtype)
                tensor, found = sharded(values, mesh, placements), []
                whole = [Replicate()] * mesh.ndim
                for gather in (
                    tensor.full_tensor,
                    functools.partial(tensor.redistribute, placements=whole),
                    functools.partial(tensor.redistribute, placements=whole, async_op=True),
                ):
                    found.clear()
                    with smaller(2**18):
                        complete(gather())  # Groups.
                        peak = peak_of(lambda found=found, gather=gather: found.append(complete(gather())))
                    assert torch.equal(found[0], values), (placements, dtype)
                    assert values.nbytes <= peak <= 1.1 * values.nbytes + SMALL, (placements, dtype, peak / values.nbytes)

    @ranks(4)
    def test_random_cases_are_bitwise_right():
        meshes = [init_device_mesh("cpu", shape) for shape in MESHES[4]]
        with smaller(2, (0, 0)):
            kinds = check_random_cases([*meshes, DeviceMesh("cpu", [2, 0, 3, 1])] if can_order_groups else meshes, 400, 0)
        assert len(kinds) > 20, kinds


@unittest.skipIf(torch.__version__ < "2.13", "torch 2.11 cannot destroy the process groups of threads")
class ThreadsTest(MultiThreadedTestCase):
    """Ranks that are threads: their groups are no gloo's, so they all-gather as NCCL's do."""

    @property
    def world_size(self):
        return 4

    def setUp(self):
        stack = contextlib.ExitStack()
        stack.enter_context(mock.patch.dict(os.environ))  # The harness has errors show C++ stacks, in later tests too.
        stack.enter_context(smaller(2, (0, 0)))
        stack.enter_context(mock.patch.object(_carry, "is_nccl", lambda *_: True))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        self.addCleanup(stack.close)
        super().setUp()
        self._spawn_threads()

    def test_random_cases_are_bitwise_right(self):
        check_random_cases([init_device_mesh("cpu", (4,))], 100, 1)
