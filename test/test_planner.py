"""The planner against brute force, and the layout's own checks."""

import itertools
import random
import unittest

from torch_ragged._ownership import Run, owned
from torch_ragged.fsdp import BufferLayout, TensorSpec, blocks, elements, plan_layout, rows, tensor
from torch_ragged.fsdp._planner import place, smallest_shard


def spec(numel, block, name="t"):
    return TensorSpec(name, (numel,), (0,), block)


def fits(tensors, ranks, shard):
    """Whether tensors fit in this order: every offset of every tensor is tried."""

    def search(index, position):
        if index == len(tensors):
            return True
        numel, block = tensors[index].numel, tensors[index].block
        for offset in range(position, ranks * shard - numel + 1):
            cuts = [b - offset for b in range(0, ranks * shard, shard) if offset < b < offset + numel]
            if all(cut % block == 0 for cut in cuts) and search(index + 1, offset + numel):
                return True
        return False

    return search(0, 0)


def brute_force(tensors, ranks, alignment):
    shard = alignment
    while not fits(tensors, ranks, shard):
        shard += alignment
    return shard


class PlannerTest(unittest.TestCase):
    def test_smallest_shard_of_an_order_is_exact(self):
        rng = random.Random(0)
        for _ in range(400):
            tensors = [spec(rng.randint(1, 18), rng.choice((1, 2, 3, 4, 6))) for _ in range(rng.randint(1, 4))]
            ranks, alignment = rng.randint(1, 5), rng.choice((1, 2, 4))
            expected = brute_force(tensors, ranks, alignment)
            found = smallest_shard(tensors, ranks, alignment, alignment)
            self.assertEqual(found, expected, (tensors, ranks, alignment))

    def test_feasibility_is_not_monotone(self):
        tensors = [spec(60, 6), spec(4, 2)]
        self.assertEqual([place(tensors, 6, s) is not None for s in (12, 14, 16, 18)], [True, False, False, True])
        self.assertEqual(plan_layout(tensors, 6).shard_numel, 12)

    def test_best_of_all_orders_is_never_below_the_bound_nor_above_the_given_order(self):
        rng = random.Random(1)
        best = 0
        for _ in range(200):
            tensors = [spec(rng.randint(1, 14), rng.choice((1, 2, 3, 5))) for _ in range(rng.randint(1, 4))]
            ranks = rng.randint(1, 6)
            layout = plan_layout(tensors, ranks, 2)
            optimum = min(brute_force(list(order), ranks, 2) for order in itertools.permutations(tensors))
            self.assertLessEqual(layout.lower_bound, optimum)
            self.assertGreaterEqual(layout.shard_numel, optimum)
            self.assertLessEqual(layout.shard_numel, brute_force(tensors, ranks, 2))
            best += layout.shard_numel == optimum
        self.assertGreater(best, 190)  # The orders tried find the optimum nearly always.

    def test_placements_own_what_the_layout_says(self):
        rng = random.Random(2)
        for _ in range(300):
            tensors = []
            for index in range(rng.randint(1, 5)):
                shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(0, 3)))
                granularity = rng.choice((elements(), rows(1), rows(3), blocks(2, 2), tensor()))
                tensors.append(TensorSpec(str(index), shape, granularity.dims(shape), granularity.block_numel(shape)))
            ranks = rng.randint(1, 8)
            layout = plan_layout(tensors, ranks, 4)
            for index, one in enumerate(tensors):
                placement = layout.placement(index)
                for rank in range(ranks):
                    start, stop = layout.local_range(index, rank)
                    cut = Run(len(placement.dims), placement.local_units)
                    self.assertEqual(owned(one.shape, (ranks,), (cut,), (rank,)).local_shape, (stop - start,))
            used = sum(t.numel for t in tensors) + sum(stop - start for start, stop in layout.gaps())
            self.assertEqual(used, layout.numel)

    def test_element_granularity_is_at_the_trivial_bound(self):
        layout = plan_layout([spec(1000, 1), spec(37, 1), spec(1, 1)], 7, 32)
        self.assertEqual(layout.shard_numel, 160)
        self.assertEqual(layout.offsets, (0, 1000, 1037))
        self.assertEqual((layout.order, layout.lower_bound), ("given", 160))

    def test_a_layout_checks_each_constraint(self):
        good = dict(tensors=(spec(8, 4, "a"), spec(4, 1, "b")), offsets=(0, 8), shard_numel=8, ranks=2)
        good.update(alignment=4, lower_bound=8, order="given")
        BufferLayout(**good)
        for change, words in (
            (dict(offsets=(0, 6)), "b at 6 overlaps a"),
            (dict(offsets=(4, 14)), "beyond the buffer"),
            (dict(offsets=(2, 10)), "cuts a at 6, inside a block of 4"),
            (dict(shard_numel=7), "multiple of 4"),
            (dict(offsets=(0,)), "2 tensors, but 1 offsets"),
        ):
            with self.assertRaisesRegex(ValueError, words):
                BufferLayout(**{**good, **change})

    def test_granularity_in_elements(self):
        for granularity, shape, block, dims in (
            (rows(4), (8, 6), 24, (0,)),
            (rows(4), (2, 3, 5), 20, (0, 1)),
            (rows(4), (9,), 4, (0,)),
            (blocks(4, 4), (8, 6), 24, (0,)),
            (blocks(2, 4), (3, 4, 5), 10, (0, 1)),
            (blocks(3, 4), (3, 4, 5), 20, (0, 1)),  # 3 does not divide 4 rows: whole matrices
            (blocks(4, 4), (9,), 1, (0,)),
            (elements(), (2, 3), 1, (0, 1)),
            (tensor(), (2, 3), 6, ()),
            (rows(100), (8, 6), 48, (0,)),
            (rows(2), (), 1, ()),
        ):
            self.assertEqual((granularity.block_numel(shape), granularity.dims(shape)), (block, dims), (granularity, shape))

    def test_bad_input(self):
        for call, words in (
            (lambda: plan_layout([], 2), "needs tensors"),
            (lambda: plan_layout([spec(1, 1)], 0), "ranks >= 1"),
            (lambda: plan_layout([spec(4, 0)], 2), "block of 0"),
            (lambda: rows(0), "positive integers"),
            (lambda: blocks(2, -1), "positive integers"),
        ):
            with self.assertRaisesRegex(ValueError, words):
                call()

    def test_tensors_without_elements(self):
        layout = plan_layout([spec(0, 1, "empty"), spec(5, 5, "whole")], 3)
        self.assertEqual(layout.shard_numel, 5)


if __name__ == "__main__":
    unittest.main()
