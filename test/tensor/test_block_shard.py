"""torch's BlockShard beside RaggedShard. No released torch has it: here, a class with its fields stands for it."""

import itertools
import math
import unittest

import torch
import torch.distributed as dist
from common import error_of, ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import Placement

from torch_ragged import RaggedShard, owned_boxes, transfer
from torch_ragged.fsdp import fully_shard, rows

# Experts' weights on 4 ranks: even; rows of one expert on two ranks; the last rank has nothing.
SHAPES = ((8, 6, 3), (3, 4, 5), (2, 3, 2))


class BlockShard(Placement):
    """The fields, equality and local tensors of the class in pytorch's branch: a local tensor is a matrix of whole rows."""

    def __init__(self, block_numels, block_repeats=None):
        super().__init__()
        self.block_numels, self.block_repeats = tuple(block_numels), tuple(block_repeats or (1,) * len(block_numels))

    def __eq__(self, other):
        return isinstance(other, BlockShard) and self.block_numels == other.block_numels

    def __hash__(self):
        return hash(self.block_numels)

    def __repr__(self):
        return f"BlockShard(block_numels={self.block_numels})"

    def local_of(self, whole, parts, rank):
        """This rank's rows: torch.chunk of the merged leading dimensions."""
        (numel,) = self.block_numels
        split = next(k for k in range(whole.ndim + 1) if math.prod(whole.shape[k:]) == numel)
        merged = whole.reshape(-1, *whole.shape[split:])
        step = -(-len(merged) // parts)
        return merged[rank * step : (rank + 1) * step]


def block_dtensor(whole, mesh, placements):
    """A DTensor as torch would make it: the constructor knows no rules."""
    dim = next(i for i, p in enumerate(placements) if isinstance(p, BlockShard))
    local = placements[dim].local_of(whole, mesh.size(dim), mesh.get_local_rank(dim)).clone()
    meta = DTensor.from_local(torch.empty(whole.shape), mesh, [Replicate()] * mesh.ndim)._spec
    spec = type(meta)(mesh, tuple(placements), tensor_meta=meta.tensor_meta)
    return DTensor(local, spec, requires_grad=False)


class BlockShardTest(unittest.TestCase):
    def test_ownership_is_that_of_whole_rows_and_converts_back(self):
        for shape, parts in itertools.product((*SHAPES, (5, 4), (4, 1, 3, 2), (2, 2, 2, 3)), range(1, 6)):
            whole = torch.arange(math.prod(shape)).view(shape)
            for split in range(2, len(shape) + 1):
                block = BlockShard((math.prod(shape[split:]),))
                if block.block_numels == (math.prod(shape[1:]),):
                    continue  # Slices of dimension 0.
                ragged = RaggedShard.from_block_shard(block, shape, parts)
                for rank in range(parts):
                    wanted = block.local_of(whole, parts, rank).reshape(-1).tolist()
                    for placement in (ragged, block):
                        boxes = owned_boxes(shape, (parts,), [placement], (rank,))
                        found = [whole[tuple(slice(o, o + n) for o, n in zip(b.offsets, b.sizes))].reshape(-1) for b in boxes]
                        self.assertEqual(torch.cat(found).tolist() if found else [], wanted)
                back = ragged.to_block_shard(shape, BlockShard)
                for rank in range(parts):
                    self.assertTrue(
                        torch.equal(
                            back.local_of(whole, parts, rank).reshape(-1), block.local_of(whole, parts, rank).reshape(-1)
                        )
                    )
        self.assertEqual(RaggedShard((0, 1), (3, 3, 3, 3)).to_block_shard((3, 4, 5), BlockShard), BlockShard((5,)))
        self.assertEqual(RaggedShard.from_block_shard(BlockShard((4, 4), (1, 2)), (3, 2, 4), 2).local_units, (3, 3))

    def test_what_is_no_run_of_whole_rows_is_refused(self):
        for block, text in (
            (BlockShard((2, 3)), "BlockShard(block_numels=(2, 3)) has blocks of several sizes"),
            (
                BlockShard((3,)),
                "does not fit a tensor of shape (3, 4, 5): its 3 elements must be a slice of the last dim",
            ),
            (BlockShard((20,)), "has blocks of whole slices of dimension 0: use Shard(0)"),
            (BlockShard((60,)), "use Shard(0)"),
        ):
            self.assertIn(text, error_of(RaggedShard.from_block_shard, block, (3, 4, 5), 2))
        self.assertIn("does not fit", error_of(RaggedShard.from_block_shard, BlockShard((5,)), (0, 4, 5), 2))
        for units, shape in (((5, 7), (3, 4, 5)), ((1, 1, 1), (3, 4)), ((6, 0, 6), (3, 4, 5)), ((7, 1), (3, 4, 5))):
            dims = (0, 1) if sum(units) > 3 else (0,)
            if units == (1, 1, 1):
                shape = (3, 5, 7)  # 5 rows of 7 on each rank are a BlockShard, too.
                self.assertEqual(RaggedShard((0,), units).to_block_shard(shape, BlockShard), BlockShard((7,)))
                continue
            self.assertIn("has no BlockShard", error_of(RaggedShard(dims, units).to_block_shard, shape, BlockShard))
        self.assertIn(
            "can stand beside Replicate and Partial only",
            error_of(owned_boxes, (3, 4, 5), (2, 2), [Shard(2), BlockShard((5,))], (0, 0)),
        )

    @ranks(4)
    def test_redistribution_both_ways_moves_what_changes_owners():
        mesh, rank = init_device_mesh("cpu", (4,)), dist.get_rank()
        for shape in SHAPES:
            whole, block = torch.randn(shape), BlockShard(shape[2:])
            dist.broadcast(whole, 0)
            wanted = block.local_of(whole, 4, rank)
            even, owner = RaggedShard.from_block_shard(block, shape, 4), RaggedShard((), (0, 0, 1, 0))
            for ragged in (even, owner):
                source = distribute_tensor(whole, mesh, [ragged])
                with CommDebugMode() as mode:
                    there = source.redistribute(placements=[block])
                    back = there.redistribute(placements=[ragged])
                assert ragged is not even or (mode.get_total_counts(), there.to_local().data_ptr()) == (
                    0,
                    source.to_local().data_ptr(),
                )
                assert there.placements == (block,) and torch.equal(there.to_local(), wanted)
                assert back.placements == (ragged,) and torch.equal(back.to_local(), source.to_local())
                later = source.redistribute(placements=[block], async_op=True)
                assert torch.equal(later.to_local(), wanted)
        leaf = distribute_tensor(whole, mesh, [owner]).requires_grad_()
        (leaf.redistribute(placements=[block]).redistribute(placements=[even]) * 3).sum().backward()
        assert leaf.grad.placements == (owner,) and torch.equal(leaf.grad.to_local(), torch.full_like(leaf.to_local(), 3))
        assert "BlockShard(block_numels=(3,)) does not fit" in error_of(leaf.redistribute, placements=[BlockShard((3,))])

        grid = init_device_mesh("cpu", (2, 2))
        whole, block = torch.arange(60.0).view(3, 4, 5), BlockShard((5,))
        source = block_dtensor(whole, grid, (Replicate(), block))
        target = source.redistribute(placements=[Replicate(), RaggedShard((0, 1, 2), (7, 53))])
        assert torch.equal(target.full_tensor(), whole)
        partial = DTensor.from_local(target.to_local(), grid, [Partial(), target.placements[1]], shape=whole.shape)
        reduced = partial.redistribute(placements=[Replicate(), block])
        assert torch.equal(reduced.to_local(), 2 * source.to_local()) and reduced.to_local().shape == (6, 5)
        moved = {"w": distribute_tensor(torch.zeros(3, 4, 5), mesh, [Shard(0)])}
        transfer.plan({"w": source}, moved).run({"w": source}, moved)
        assert torch.equal(moved["w"].full_tensor(), whole)
        transfer.plan(moved, {"w": source}).run({"w": distribute_tensor(2 * whole, mesh, [Shard(0)])}, {"w": source})
        assert torch.equal(source.to_local(), reduced.to_local())

    @ranks(2)
    def test_fully_shard_keeps_the_blocks_whole():
        mesh = init_device_mesh("cpu", (2,))

        class Experts(nn.Module):
            def __init__(self):
                super().__init__()
                self.w, self.deep, self.b = (nn.Parameter(torch.ones(shape)) for shape in ((3, 6, 7), (2, 3, 2, 2), (7, 3)))

        shards = {
            how: fully_shard(Experts(), mesh=mesh, shard_placement_fn=function).state_dict()
            for how, function in (
                ("blocks", lambda param: {3: BlockShard((7,)), 4: BlockShard((4,))}.get(param.ndim)),
                ("rows", lambda param: {3: rows(1), 4: rows(2)}.get(param.ndim)),
                ("single", lambda param: BlockShard((1,)) if param.ndim == 2 else None),
                ("none", lambda param: None),
            )
        }
        assert [v.placements for v in shards["blocks"].values()] == [v.placements for v in shards["rows"].values()]
        assert [v.placements for v in shards["single"].values()] == [v.placements for v in shards["none"].values()]
        assert shards["blocks"]["w"].to_local().numel() % 7 == shards["blocks"]["deep"].to_local().numel() % 4 == 0
        assert shards["none"]["w"].to_local().numel() % 7
        for wrong, text in (
            (BlockShard((42,)), "use Shard(0)"),
            (BlockShard((5,)), "does not fit a tensor of shape (3, 6, 7)"),
        ):
            found = error_of(
                fully_shard,
                Experts(),
                mesh=mesh,
                shard_placement_fn=lambda param, wrong=wrong: wrong if param.ndim == 3 else None,
            )
            assert found.startswith("ValueError: shard_placement_fn for w: BlockShard") and text in found, found


if __name__ == "__main__":
    unittest.main()
