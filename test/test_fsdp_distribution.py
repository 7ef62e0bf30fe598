"""Distribution: how one parameter is cut, on each rank of a fake process group."""

import math
import unittest

import torch
from common import error_of, fake_group
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from torch_ragged import RaggedShard, StridedRaggedShard
from torch_ragged.fsdp import blocks, elements, fully_shard, plan_layout, rows
from torch_ragged.fsdp.core._distribution import Distribution
from torch_ragged.fsdp.core._mesh import DataParallelMesh
from torch_ragged.fsdp.core._regroup import keep_as


def whole(*shape):
    return torch.arange(float(math.prod(shape))).view(shape)


class ShardDimTest(unittest.TestCase):
    """Parameters cut by ``Shard(d)``: pieces, buffers and DTensors are those of ``torch.chunk``."""

    def test_pieces_are_chunks(self):
        for ranks in (1, 2, 3, 5):
            for shape, dim in (((6, 4), 0), ((6, 4), 1), ((3, 2), 1), ((5, 3, 2), 1), ((5, 3, 2), -1), ((7,), 0)):
                for rank in range(ranks):
                    with self.subTest(ranks=ranks, shape=shape, dim=dim, rank=rank), fake_group(ranks, rank):
                        self.check(DataParallelMesh.of(init_device_mesh("cpu", (ranks,))), whole(*shape), dim)

    def check(self, dp, param, dim):
        distribution, chunks = Distribution("w", param, dp, dim), param.chunk(dp.ranks, dim)
        layout = distribution.even_layout(dp.ranks)
        self.assertEqual((layout.ranks, layout.order, layout.shard_numel), (dp.ranks, "even", chunks[0].numel()))
        flat = distribution.flat(param)
        self.assertTrue(torch.equal(flat, torch.cat([chunk.reshape(-1) for chunk in chunks])))
        pieces = distribution.pieces(flat)
        self.assertEqual(len(pieces), len(chunks))
        for piece, chunk in zip(pieces, chunks):
            self.assertTrue(torch.equal(piece, chunk))
        mine = flat[layout.shard_numel * dp.rank : layout.shard_numel * (dp.rank + 1)]
        sharded = distribution.sharded(mine, layout, 0)
        self.assertEqual((sharded.placements, sharded.shape), ((Shard(dim % param.ndim),), param.shape))
        self.assertEqual(sharded.stride(), param.stride())
        expected = chunks[dp.rank] if dp.rank < len(chunks) else param.narrow(dim, 0, 0)
        self.assertTrue(torch.equal(sharded.to_local(), expected))
        self.assertTrue(not mine.numel() or sharded.to_local().data_ptr() == mine.data_ptr())

    def test_parameters_without_elements_have_the_shapes_of_dtensors(self):
        for ranks in (1, 2, 3):
            for shape in ((3, 0), (0, 3), (0,)):
                for dim in range(len(shape)):
                    for rank in range(ranks):
                        with self.subTest(ranks=ranks, shape=shape, dim=dim, rank=rank), fake_group(ranks, rank):
                            dp = DataParallelMesh.of(init_device_mesh("cpu", (ranks,)))
                            distribution = Distribution("w", whole(*shape), dp, dim)
                            flat = distribution.flat(whole(*shape))
                            self.assertEqual([piece.shape for piece in distribution.pieces(flat)], [shape])
                            sharded = distribution.sharded(flat, distribution.even_layout(ranks), 0)
                            expected = distribute_tensor(whole(*shape), dp.mesh, [Shard(dim)], src_data_rank=None)
                            self.assertEqual(sharded.to_local().shape, expected.to_local().shape)

    def test_a_dimension_that_does_not_exist_is_refused(self):
        with fake_group(2):
            dp = DataParallelMesh.of(init_device_mesh("cpu", (2,)))
            for dim in (2, -3):
                error = error_of(Distribution, "w", whole(3, 2), dp, dim)
                self.assertRegex(error, rf"InvalidArgument: .*Shard\({dim}\) for w of shape \(3, 2\): .* a dimension d below 2")
            for dim in (0, 1, -1, -2):
                self.assertEqual(Distribution("w", whole(3, 2), dp, dim).shard_dim, dim % 2)


class RaggedTest(unittest.TestCase):
    def test_shards_are_those_of_the_layout(self):
        for rank in range(3):
            with fake_group(3, rank):
                dp = DataParallelMesh.of(init_device_mesh("cpu", (3,)))
                distribution = Distribution("w", whole(7, 2), dp)
                layout = plan_layout([distribution.tensor_spec(rows(2))], 3)
                flat = distribution.flat(whole(7, 2))
                self.assertTrue(torch.equal(flat, whole(14)))
                units = layout.placement(0).local_units  # Of two elements.
                mine = flat.split([2 * count for count in units])[rank]
                sharded = distribution.sharded(mine, layout, 0)
                self.assertIsInstance(sharded.placements[0], RaggedShard)
                self.assertEqual(sharded.placements, (layout.placement(0),))
                self.assertEqual((sharded.shape, sharded.stride()), ((7, 2), (2, 1)))
                self.assertTrue(torch.equal(sharded.to_local(), mine))
                other = distribution.sharded_like(mine + 1, sharded)
                self.assertEqual((other.placements, other.shape), (sharded.placements, sharded.shape))
                self.assertTrue(torch.equal(other.to_local(), mine + 1))

    def test_what_the_model_cuts_first_is_cut_strided(self):
        """Tensor and expert parallelism of the first dimension: each rank has parts of several stretches of the whole."""
        with fake_group(12, 5):
            mesh = init_device_mesh("cpu", (2, 2, 3), mesh_dim_names=("dp", "ep", "tp"))
            dp = DataParallelMesh.of(mesh["dp"])
            weight = distribute_tensor(whole(12, 4), mesh["ep", "tp"], [Shard(0), Shard(0)], src_data_rank=None)
            distribution = Distribution("w", weight, dp)
            self.assertEqual((distribution.shape, distribution.local_shape), ((12, 4), (2, 4)))
            layout = plan_layout([distribution.tensor_spec(elements())], 2)
            ragged = layout.placement(0)
            sharded = distribution.sharded(torch.zeros(4), layout, 0)
            strided = StridedRaggedShard(ragged.dims, ragged.units, split_factor=6)
            self.assertEqual(sharded.placements, (strided, Shard(0), Shard(0)))
            self.assertEqual(sharded.device_mesh.mesh_dim_names, ("dp", "ep", "tp"))
            later = distribute_tensor(whole(12, 4), mesh["ep"], [Shard(1)], src_data_rank=None)
            distribution = Distribution("w", later, dp)
            sharded = distribution.sharded(torch.zeros(12), plan_layout([distribution.tensor_spec(blocks(1, 1))], 2), 0)
            self.assertIsInstance(sharded.placements[0], RaggedShard)
            self.assertEqual(sharded.placements[1:], (Shard(1),))

    def test_shard_of_what_the_model_cuts_first_is_strided(self):
        with fake_group(4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            dp = DataParallelMesh.of(mesh["dp"])
            weight = distribute_tensor(whole(8, 4), mesh["tp"], [Shard(0)], src_data_rank=None)
            for dim, placement in ((0, _StridedShard(0, split_factor=2)), (1, Shard(1))):
                sharded = Distribution("w", weight, dp, dim).shaped(torch.zeros((2, 4) if dim == 0 else (4, 2)))
                self.assertEqual(sharded.placements, (placement, Shard(0)))
                self.assertIs(type(sharded.placements[0]), type(placement))

    def test_parameters_that_cannot_be_cut_again_are_refused(self):
        with fake_group(4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            dp = DataParallelMesh.of(mesh["dp"])
            uneven = DTensor.from_local(whole(3, 2), mesh["tp"], [Shard(0)], shape=(5, 2), stride=(2, 1), run_check=False)
            self.assertRegex(error_of(Distribution, "w", uneven, dp), r"ValueError: w .*is cut unevenly by .*over 2 ranks.*pad it")
            ragged = DTensor.from_local(whole(3), mesh["tp"], [RaggedShard((0,), (3, 2))], shape=(5,), stride=(1,), run_check=False)
            self.assertRegex(error_of(Distribution, "w", ragged, dp), "ValueError: w is a DTensor .*sharded by fully_shard already")
            self.assertEqual(error_of(Distribution, "w", distribute_tensor(whole(5), mesh["tp"], [Replicate()]), dp), "")

    def test_a_mesh_without_names_is_refused(self):
        with fake_group(4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            unnamed = init_device_mesh("cpu", (4,))
            for dp, model in ((mesh["dp"], unnamed), (unnamed, mesh["tp"])):
                weight = distribute_tensor(whole(4, 2), model, [Replicate()], src_data_rank=None)
                error = error_of(Distribution, "w", weight, DataParallelMesh.of(dp))
                self.assertRegex(error, "ValueError: w is a DTensor on .* make both from one mesh whose dimensions have names")

    def test_a_description_is_equal_on_all_ranks(self):
        texts = set()
        for rank in range(4):
            with fake_group(4, rank):
                mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
                dp = DataParallelMesh.of(mesh["dp"])
                weight = distribute_tensor(whole(4, 2), mesh["tp"], [Shard(0)], src_data_rank=None)
                texts |= {Distribution("w", *each).text for each in ((whole(4, 2), dp), (whole(4, 2), dp, 1), (weight, dp))}
        expected = {"(4, 2) plain", "(4, 2) cut along dimension 1 plain"}
        self.assertEqual(texts, expected | {"(4, 2) placed by the model as (Shard(dim=0),) on (2,) ('tp',)"})


class KeeperTest(unittest.TestCase):
    def test_neighbours_keep_parts_if_they_are_neither_one_nor_all(self):
        with fake_group(8):
            mesh = init_device_mesh("cpu", (8,))
            names = {None: "Keeper", 1: "Keeper", 2: "Neighbours", 4: "Neighbours", 8: "Keeper", "all": "Resident"}
            for kept, name in names.items():
                (group,) = fully_shard(nn.Linear(4, 4), mesh=mesh)._ragged_groups(recurse=True)
                keep_as(group, kept)
                self.assertEqual(type(group.keeper).__name__, name, kept)


if __name__ == "__main__":
    unittest.main()
