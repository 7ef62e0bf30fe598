"""The placements as values."""

import io
import math
import pickle
import tracemalloc
from unittest import mock

import torch
from common import error_of
from expecttest import TestCase
from oracle import check_is_a_frozen_value, check_is_no_other_placement
from torch.distributed.tensor import Shard

from torch_ragged import RaggedShard
from torch_ragged.tensor.placement_types import normalize_placements

PLACEMENT = RaggedShard((0,), (1, 2, 0, 1))

# ``pickle.dumps(PLACEMENT, protocol=2)`` from when placements kept their units as a tuple.
PICKLED_BEFORE = b"\x80\x02c" + b"torch_ragged.tensor.placement_types" + b"\nRaggedShard\nK\x00\x85(K\x01K\x02K\x00K\x01t\x86R."


def of_many(ranks):
    """What fully_shard makes: a few ranks own something, in the middle."""
    return RaggedShard((0,), (0,) * (ranks // 2) + (3, 4, 4, 1) + (0,) * (ranks - ranks // 2 - 4))


class RaggedShardTest(TestCase):
    def test_repr_evaluates_back_and_shows_what_was_given(self):
        self.assertExpectedInline(repr(RaggedShard([0], [2, 4])), """RaggedShard(dims=(0,), local_units=(2, 4))""")
        self.assertExpectedInline(str(PLACEMENT), """RS(0)[1,2,0,1]""")
        self.assertEqual(eval(repr(PLACEMENT)), PLACEMENT)

    def test_units_are_relative(self):
        self.assertEqual(RaggedShard((0,), (1, 1)), RaggedShard((0,), (2, 2)))
        self.assertEqual(hash(RaggedShard((0,), (1, 1))), hash(RaggedShard((0,), (2, 2))))
        self.assertNotEqual(RaggedShard((0,), (1, 1)), RaggedShard((0, 1), (1, 1)))
        self.assertNotEqual(RaggedShard((0,), (1, 2)), RaggedShard((0,), (2, 1)))

    def test_of_blocks_owns_what_chunks_of_blocks_are(self):
        for shape, block in (
            ((8, 6, 3), 3),
            ((3, 4, 5), 5),
            ((3, 4, 5), 10),
            ((3, 4, 5), 3),
            ((2, 3, 2), 2),
            ((12,), 4),
            ((), 1),
        ):
            flat = torch.arange(math.prod(shape))
            for ranks in (1, 2, 4, 5):
                placement = RaggedShard.of_blocks(shape, block, ranks)
                self.assertEqual(normalize_placements((placement,), shape, (ranks,)), (placement,))
                sizes = [len(chunk) for chunk in flat.view(-1, block).chunk(ranks)]
                units = placement.local_units
                self.assertEqual([unit * len(flat) // sum(units) for unit in units if unit], [size * block for size in sizes])
                self.assertEqual(len(units), ranks)
        self.assertExpectedInline(
            repr(RaggedShard.of_blocks((3, 4, 5), 5, 4)), """RaggedShard(dims=(0, 1), local_units=(3, 3, 3, 3))"""
        )
        for wrong in (((3, 4), 5, 2), ((3, 4), 0, 2), ((3, 4), 4, 0), ((0, 4), 4, 2)):
            self.assertIn("a block that divides the", error_of(RaggedShard.of_blocks, *wrong))

    def test_is_a_frozen_value(self):
        check_is_a_frozen_value(self, PLACEMENT)

    def test_what_was_pickled_with_a_tuple_of_units_loads(self):
        self.assertEqual(pickle.loads(PICKLED_BEFORE), PLACEMENT)
        self.assertEqual(pickle.loads(PICKLED_BEFORE).local_units, (1, 2, 0, 1))
        buffer = io.BytesIO()
        with mock.patch.object(RaggedShard, "__reduce__", lambda self: (RaggedShard, (self.dims, self.local_units))):
            torch.save(PLACEMENT, buffer)
        buffer.seek(0)
        self.assertEqual(torch.load(buffer, weights_only=True), PLACEMENT)

    def test_many_ranks_take_the_memory_of_few(self):
        nbytes = {}
        for ranks in (1_000, 100_000):
            tracemalloc.start()
            (placement,) = normalize_placements((of_many(ranks),), (12, 5), (ranks,))
            nbytes[ranks], _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            self.assertLess(len(pickle.dumps(placement)), 200)
        self.assertLess(nbytes[1_000], 5_000)
        self.assertLess(nbytes[100_000], nbytes[1_000] + 500)

    def test_units_of_many_ranks_read_as_a_tuple(self):
        placement, units = of_many(1_000), (0,) * 500 + (3, 4, 4, 1) + (0,) * 496
        self.assertEqual(placement.local_units, units)
        self.assertIs(type(placement.local_units), tuple)
        self.assertEqual((placement, hash(placement)), (RaggedShard((0,), units), hash(RaggedShard((0,), units))))
        self.assertEqual(placement, RaggedShard((0,), tuple(7 * count for count in units)))
        self.assertNotEqual(placement, RaggedShard((0,), units[::-1]))
        self.assertExpectedInline(
            repr(placement),
            """RaggedShard(dims=(0,), local_units=(0,) * 500 + (3,) + (4,) * 2 + (1,) + (0,) * 496)""",
        )
        self.assertExpectedInline(str(placement), """RS(0)[0*500,3,4*2,1,0*496]""")
        self.assertEqual(eval(repr(placement)).local_units, units)

    def test_is_never_taken_for_another_placement(self):
        check_is_no_other_placement(self, PLACEMENT)

    def test_programs_that_ask_learn_that_each_rank_holds_a_part_only(self):
        """``if placement.is_shard(): all_reduce(...)`` must reduce. Who goes on to ``.dim`` would compute Shard's offsets."""
        for dims, cut in (((), ()), ((0,), (0,)), ((0, 1), (0, 1))):
            placement = RaggedShard(dims, (1, 1))
            self.assertIs(placement.is_shard(), True)
            self.assertEqual([placement.is_shard(dim) for dim in range(3)], [dim in cut for dim in range(3)])
        text = error_of(getattr, PLACEMENT, "dim")
        self.assertTrue(
            text.startswith("AttributeError: RaggedShard(dims=(0,), local_units=(1, 2, 0, 1)) has no dim, as it does"), text
        )
        self.assertRegex(
            text, r"use [\w.]+\.owned_boxes\(tensor\), tensor.full_tensor\(\), or redistribute\(placements=\[Shard\(dim\)\]\)"
        )

    def test_what_was_normalized_before_does_not_matter(self):
        """Placements that are equal differ in what they divide, and in what they print."""
        for first, second in (((0, 1), (0, 2)), ((1, 1), (3, 3))):
            large, odd = (7 * sum(second),), (sum(first) * (sum(second) + 1),)
            self.assertEqual(RaggedShard((0,), first), RaggedShard((0,), second))
            for units in (first, second, first):
                (placement,) = normalize_placements((RaggedShard((0,), units),), large, (2,))
                self.assertEqual(placement.local_units, units)
            normalize_placements((RaggedShard((0,), first),), odd, (2,))
            self.assertIn(f"local_units={second}", error_of(normalize_placements, (RaggedShard((0,), second),), odd, (2,)))

    def test_negative_dims_are_normalized(self):
        (placement,) = normalize_placements((RaggedShard((-2, -1), (1, 1)),), (4, 3), (2,))
        self.assertEqual(placement, RaggedShard((0, 1), (1, 1)))

    def test_errors_of_values(self):
        self.assertExpectedInline(
            error_of(RaggedShard, (1,), (1, 1)),
            """ValueError: RaggedShard dims must be a prefix (0, ..., k-1) of the tensor's dimensions, got (1,)""",
        )
        self.assertExpectedInline(
            error_of(RaggedShard, (0,), (0, 0)),
            """ValueError: RaggedShard local_units must be integers >= 0, one per rank and not all zero, got (0, 0)""",
        )
        self.assertExpectedInline(
            error_of(RaggedShard, (0,), (1.0, 2)),
            """TypeError: RaggedShard local_units must be a sequence of integers, got (1.0, 2)""",
        )
        self.assertIn("got (-1, 2)", error_of(RaggedShard, (0,), (-1, 2)))

    def test_errors_against_a_tensor(self):
        self.assertExpectedInline(
            error_of(normalize_placements, (RaggedShard((0,), (1, 2)),), (4, 3), (2,)),
            """ValueError: RaggedShard(dims=(0,), local_units=(1, 2)) cannot cut shape (4, 3): its 4 slices over these dims do not divide into 3 units. Choose units whose sum divides 4""",  # noqa: E501, B950
        )
        self.assertExpectedInline(
            error_of(normalize_placements, (RaggedShard((0,), (1, 1)),), (4, 3), (3,)),
            """ValueError: RaggedShard(dims=(0,), local_units=(1, 1)) has 2 local_units, but mesh dimension 0 has 3 ranks: give one number of units per rank""",  # noqa: E501, B950
        )
        self.assertExpectedInline(
            error_of(normalize_placements, (RaggedShard((0, 1, 2), (1, 1)),), (4, 4), (2,)),
            """ValueError: RaggedShard dims must be a prefix (0, ..., k-1) of the tensor's 2 dimensions, got (0, 1, 2)""",
        )
        self.assertIn(
            "StridedRaggedShard", error_of(normalize_placements, (RaggedShard((0,), (1, 1)), Shard(0)), (4, 4), (2, 2))
        )


if __name__ == "__main__":
    import unittest

    unittest.main()
