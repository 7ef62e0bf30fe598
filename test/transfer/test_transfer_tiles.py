"""A plan as regular tiles: what many-to-many collectives take, how a tensor is cut for them, and what they cannot take."""

import unittest

import torch
import torch.distributed as dist
from common import enter_fake_group, ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from torch_ragged import RaggedShard, StridedRaggedShard, transfer
from torch_ragged.transfer import Spec, TileSide
from torch_ragged.transfer._engine_layout import EngineLayout, EngineSide
from torch_ragged.transfer._sides import TensorSide
from torch_ragged.transfer._tiles import tiles_of

TRAINER, ENGINE = list(range(4)), list(range(4, 8))


def tiles(source, target, max_dims=3):
    target = EngineSide(target) if isinstance(target, EngineLayout) else TensorSide({"w": target})
    return tiles_of(TensorSide({"w": source}), target, {"w": source.shape}, max_dims)


def spec(shape, mesh, *placements, dtype=torch.bfloat16):
    return Spec(shape, dtype, torch.tensor(mesh), placements)


class TransferTilesTest(unittest.TestCase):
    def test_even_meshes_are_one_tile(self):
        """FSDP2 to tensor parallelism; HSDP to two engines of two ranks; either mesh dimension may replicate."""
        source = spec((8, 12), TRAINER, Shard(0))
        (tile,) = tiles(source, spec((8, 12), ENGINE, Shard(1))).tiles
        self.assertEqual((tile.name, tile.offsets, tile.sizes, tile.is_local), ("w", (0, 0), (8, 12), False))
        self.assertEqual(tile.source, TileSide(0, (1, 4), (Replicate(), Shard(0)), (2, 12), (0,) * 4, (12, 1)))
        self.assertEqual(tile.target, TileSide(4, (1, 4), (Replicate(), Shard(1)), (8, 3), (0,) * 4, (3, 1)))
        grid = [[0, 1], [2, 3]]
        (tile,) = tiles(
            spec((8, 12), grid, Replicate(), Shard(0)), spec((8, 12), [[4, 5], [6, 7]], Shard(1), Replicate())
        ).tiles
        self.assertEqual((tile.source.mesh_shape, tile.source.placements), ((2, 2), (Replicate(), Shard(0))))
        self.assertEqual((tile.target.mesh_shape, tile.target.placements), ((2, 2), (Shard(1), Replicate())))
        self.assertEqual((list(tile.source.ranks), list(tile.target.ranks)), (TRAINER, ENGINE))

    def test_too_many_shards_for_one_call_are_several_tiles(self):
        """M2N feeds a shard of the target by at most 16 of the source, and a shard of the source feeds at most 64."""
        many, few = list(range(32)), list(range(32, 36))
        self.assertEqual(len(tiles(spec((32, 8), many, Shard(0)), spec((32, 8), few, Shard(1))).tiles), 32)
        self.assertEqual(len(tiles(spec((32, 8), many, Shard(0)), spec((32, 8), few, Shard(0))).tiles), 1)  # 8 feed one.
        self.assertEqual(len(tiles(spec((32, 8), many, Shard(0)), spec((32, 8), [32], Shard(0))).tiles), 32)
        for rows, count in ((16, 1), (17, 17)):  # All of them feed one.
            self.assertEqual(len(tiles(spec((rows, 8), range(rows), Shard(0)), spec((rows, 8), [32], Shard(0))).tiles), count)
        wide = list(range(1, 129))
        self.assertEqual(len(tiles(spec((2, 128), [0], Shard(0)), spec((2, 128), wide, Shard(1))).tiles), 128)
        self.assertEqual(len(tiles(spec((2, 128), [0], Shard(0)), spec((2, 128), wide[:64], Shard(1))).tiles), 1)

    def test_ragged_rows_are_one_tile_per_owner(self):
        source = spec((8, 6), TRAINER, RaggedShard((0,), (3, 0, 0, 5)))
        found = tiles(source, spec((8, 6), [4, 5], Shard(1)))
        self.assertEqual([(t.offsets, t.sizes) for t in found.tiles], [((0, 0), (3, 6)), ((3, 0), (5, 6))])
        self.assertEqual([(list(t.source.ranks), t.target.local_shape) for t in found.tiles], [([0], (3, 3)), ([3], (5, 3))])
        self.assertEqual([t.target.local_offsets for t in found.tiles], [(0, 0), (9, 9)])
        self.assertEqual({t.target.mesh_shape for t in found.tiles}, {(1, 2)})
        self.assertEqual({t.source.placements for t in found.tiles}, {(Replicate(), Shard(0))})  # Over one rank.
        self.assertTrue(all(t.source.is_contiguous and t.target.is_contiguous for t in found.tiles))
        columns = spec((8, 6), [0, 1], Shard(1))
        self.assertFalse(
            tiles(columns, spec((8, 6), [4, 5], RaggedShard((0,), (1, 7)))).tiles[0].source.local_strides == (6, 1)
        )

    def test_other_cuts_are_pairs_of_ranks_with_replicas_in_one_tile(self):
        """Uneven target rows; a target whose ranks are not consecutive; a rank of both sides copies."""
        source = spec((6, 2), [0, 1], RaggedShard((0,), (1, 2)))
        found = tiles(source, spec((6, 2), [[4, 5, 6], [1, 2, 7]], Shard(0), Replicate())).tiles
        moves = [(t.offsets[0], t.sizes[0], list(t.source.ranks), list(t.target.ranks), t.is_local) for t in found]
        self.assertEqual(
            moves,
            [
                (0, 2, [0], [4, 5, 6], False),
                (2, 1, [1], [4, 5, 6], False),
                (3, 3, [1], [1], True),
                (3, 3, [1], [2], False),
                (3, 3, [1], [7], False),
            ],
        )
        nested = spec((4, 6), [[0, 1], [2, 3]], StridedRaggedShard((0,), (1, 1), split_factor=2), Shard(0))
        self.assertEqual(len(tiles(nested, spec((4, 6), ENGINE, Shard(0))).tiles), 4)

    def test_a_fused_tensor_of_an_engine_is_a_tile_per_source(self):
        layout = EngineLayout(torch.bfloat16)
        layout.add_sharded("qkv", {"w": (8, 6), "k": (4, 6)}, ranks=(4, 5))
        (tile,) = tiles(spec((8, 6), TRAINER, Shard(0)), layout).tiles
        self.assertEqual((tile.target.key, tile.target.local_shape, tile.target.local_offsets), ("qkv", (4, 6), (0, 0)))

    def test_what_is_no_tile_is_named(self):
        target = spec((8, 6), ENGINE, Shard(0))
        for source, to, text in (
            (spec((8, 6), TRAINER, Partial()), target, "the source is Partial: redistribute it first"),
            (
                spec((8, 6), TRAINER, Shard(0), dtype=torch.float32),
                target,
                "the source is torch.float32 and the target torch.bfloat16: cast",
            ),
            (spec((), TRAINER, Replicate()), spec((), ENGINE, Replicate()), "it has 0 dimensions: view it with 1 to 3"),
            (spec((2, 2, 2, 2), TRAINER, Replicate()), spec((2, 2, 2, 2), ENGINE, Replicate()), "it has 4 dimensions"),
            (
                *(spec((8, 6), mesh, Shard(0), dtype=torch.complex64) for mesh in (TRAINER, ENGINE)),
                "torch.complex64 is not moved",
            ),
        ):
            found = tiles(source, to)
            self.assertEqual(found.tiles, ())
            self.assertIn(text, found.refused["w"])
        four = spec((2, 2, 2, 2), TRAINER, Replicate())
        self.assertEqual(len(tiles(four, spec((2, 2, 2, 2), ENGINE, Replicate()), max_dims=4).tiles), 1)
        self.assertEqual(
            tiles(spec((0, 6), TRAINER, Shard(0)), spec((0, 6), ENGINE, Shard(0))),
            tiles_of(TensorSide({}), TensorSide({}), {}, 3),
        )

    @ranks(4)
    def test_all_ranks_get_the_same_tiles_which_move_the_plan():
        """Each tile is carried by messages here, as M2N would: the result is that of ``Plan.run``."""
        rank, whole = dist.get_rank(), torch.arange(48.0).view(8, 6)
        meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
        source = distribute_tensor(whole, meshes[0], [RaggedShard((0,), (3, 5))], src_data_rank=None)
        target = distribute_tensor(torch.zeros(8, 6), meshes[1], [Shard(1)], src_data_rank=None)
        plan = transfer.plan({"w": source}, {"w": target})
        found = plan.tiles()
        everyone = [None] * 4
        dist.all_gather_object(everyone, found)
        assert everyone == [found] * 4 and len(found.tiles) == 2 and not found.refused
        local = (source if rank < 2 else target).to_local().view(-1)
        for tile in found.tiles:
            (sender,) = tile.source.ranks
            for i, receiver in enumerate(tile.target.ranks):
                start, sizes = i * tile.target.local_shape[1], tile.target.local_shape
                if rank == sender:
                    whole_tile = local.as_strided(
                        tile.source.local_shape, tile.source.local_strides, tile.source.local_offsets[0]
                    )
                    dist.send(whole_tile[:, start : start + sizes[1]].contiguous(), receiver)
                elif rank == receiver:
                    part = torch.empty(sizes)
                    dist.recv(part, sender)
                    local.as_strided(sizes, tile.target.local_strides, tile.target.local_offsets[i]).copy_(part)
        if rank >= 2:
            assert torch.equal(target.to_local(), whole[:, 3 * rank - 6 : 3 * rank - 3])

    def test_it_issues_no_collective(self):
        enter_fake_group(self, 8)
        plan = transfer.plan({"w": spec((8, 12), TRAINER, Shard(0))}, {"w": spec((8, 12), ENGINE, Shard(1))})
        dist.destroy_process_group()
        self.addCleanup(dist.init_process_group, "fake", rank=0, world_size=1, store=dist.HashStore())
        self.assertEqual(len(plan.tiles().tiles), 1)


if __name__ == "__main__":
    unittest.main()
