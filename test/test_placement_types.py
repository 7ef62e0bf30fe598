"""The placements as values."""

import copy
import functools
import io
import pickle

import torch
from common import error_of
from expecttest import TestCase
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from torch_ragged import RaggedShard, StridedRaggedShard, fsdp_placement
from torch_ragged.placement_types import normalize_placements

PLACEMENT = RaggedShard((0,), (1, 2, 0, 1))
STRIDED = StridedRaggedShard((0,), (1, 2, 0, 1), split_factor=2)


class RaggedShardTest(TestCase):
    def test_repr_evaluates_back_and_shows_what_was_given(self):
        self.assertExpectedInline(repr(RaggedShard([0], [2, 4])), """RaggedShard(dims=(0,), local_units=(2, 4))""")
        self.assertExpectedInline(str(PLACEMENT), """RS(0)[1,2,0,1]""")
        self.assertExpectedInline(repr(STRIDED), """StridedRaggedShard(dims=(0,), local_units=(1, 2, 0, 1), split_factor=2)""")
        self.assertExpectedInline(str(STRIDED), """SRS(0)[1,2,0,1]/2""")
        for placement in (PLACEMENT, STRIDED):
            self.assertEqual(eval(repr(placement)), placement)

    def test_units_are_relative(self):
        self.assertEqual(RaggedShard((0,), (1, 1)), RaggedShard((0,), (2, 2)))
        self.assertEqual(hash(RaggedShard((0,), (1, 1))), hash(RaggedShard((0,), (2, 2))))
        self.assertNotEqual(RaggedShard((0,), (1, 1)), RaggedShard((0, 1), (1, 1)))
        self.assertNotEqual(RaggedShard((0,), (1, 2)), RaggedShard((0,), (2, 1)))
        self.assertEqual(StridedRaggedShard((0,), (1, 1), 2), StridedRaggedShard((0,), (2, 2), 2))
        self.assertNotEqual(StridedRaggedShard((0,), (1, 1), 2), StridedRaggedShard((0,), (1, 1), 4))
        self.assertNotEqual(StridedRaggedShard((0,), (1, 1), 1), RaggedShard((0,), (1, 1)))

    def test_is_a_frozen_value(self):
        for placement in (PLACEMENT, STRIDED):
            self.assertEqual(pickle.loads(pickle.dumps(placement)), placement)
            self.assertEqual(copy.deepcopy(placement), placement)
            with self.assertRaises(AttributeError):
                placement.dims = (1,)
            buffer = io.BytesIO()
            torch.save(placement, buffer)
            buffer.seek(0)
            self.assertEqual(torch.load(buffer, weights_only=True), placement)

    def test_is_never_taken_for_another_placement(self):
        for placement in (PLACEMENT, STRIDED):
            self.assertNotIsInstance(placement, (Shard, _StridedShard))
            self.assertFalse(placement.is_shard() or placement.is_replicate() or placement.is_partial())
            self.assertNotEqual(placement, Replicate())

    def test_negative_dims_are_normalised(self):
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
        self.assertExpectedInline(
            error_of(StridedRaggedShard, (0,), (1, 2), 0),
            """ValueError: StridedRaggedShard split_factor must be a number of pieces >= 1, got 0""",
        )
        self.assertIn("got (-1, 2)", error_of(RaggedShard, (0,), (-1, 2)))

    def test_errors_against_a_tensor(self):
        self.assertExpectedInline(
            error_of(normalize_placements, (RaggedShard((0,), (1, 2)),), (4, 3), (2,)),
            """ValueError: RaggedShard(dims=(0,), local_units=(1, 2)) cannot cut shape (4, 3): its 4 slices along these dims do not divide into 3 units. Choose units whose sum divides 4""",  # noqa: E501, B950
        )
        self.assertExpectedInline(
            error_of(normalize_placements, (RaggedShard((0,), (1, 1)),), (4, 3), (3,)),
            """ValueError: RaggedShard(dims=(0,), local_units=(1, 1)) has 2 local_units, but mesh dimension 0 has 3 ranks: give one unit count per rank""",  # noqa: E501, B950
        )
        self.assertExpectedInline(
            error_of(normalize_placements, (RaggedShard((0, 1, 2), (1, 1)),), (4, 4), (2,)),
            """ValueError: RaggedShard dims must be a prefix (0, ..., k-1) of the tensor's 2 dimensions, got (0, 1, 2)""",
        )
        self.assertIn(
            "StridedRaggedShard", error_of(normalize_placements, (RaggedShard((0,), (1, 1)), Shard(0)), (4, 4), (2, 2))
        )


class FSDPPlacementTest(TestCase):
    def test_of_a_whole_tensor(self):
        place = functools.partial(fsdp_placement, placements=(), mesh_shape=(), ranks=4)
        self.assertEqual(str(place((8, 6))), "RS(0)[2,2,2,2]")
        self.assertEqual(str(place((8, 6), granularity=18)), "RS(0)[0,3,3,2]")
        self.assertEqual(str(place((3, 6))), "RS(0,1)[4,5,4,5]")
        self.assertEqual(str(place((3, 6), granularity=18)), "RS()[0,0,0,1]")
        self.assertEqual(str(place((8, 6), local_numels=(0, 7, 0, 41))), "RS(0,1)[0,7,0,41]")
        self.assertEqual(str(place(())), "RS()[0,0,0,1]")
        self.assertEqual(str(place((0, 3))), "RS()[1,0,0,0]")

    def test_of_a_tensor_that_is_sharded_before(self):
        place = functools.partial(fsdp_placement, (8, 6), mesh_shape=(2,), ranks=2)
        self.assertEqual(str(place(placements=[Replicate()])), "RS(0)[4,4]")
        self.assertEqual(str(place(placements=[Shard(0)])), "SRS(0)[2,2]/2")
        self.assertEqual(str(place(placements=[Shard(0)], local_numels=(5, 19))), "SRS(0,1)[5,19]/2")
        self.assertEqual(str(place(placements=[Shard(1)])), "RS(0)[4,4]")
        self.assertEqual(str(place(placements=[Shard(1)], granularity=2)), "RS(0)[4,4]")
        self.assertEqual(str(place(placements=[Shard(1)], granularity=9)), "RS(0)[3,5]")
        both = fsdp_placement((8, 6), [Shard(0), Shard(1)], (2, 3), ranks=2)
        self.assertEqual(str(both), "SRS(0)[2,2]/2")

    def test_the_result_can_stand_beside_the_placements(self):
        for placements in ([Replicate()], [Shard(0)], [Shard(1)], [Shard(2)]):
            for granularity in (1, 2, 3, 5, 12):
                first = fsdp_placement((4, 6, 8), placements, (2,), ranks=3, granularity=granularity)
                normalize_placements((first, *placements), (4, 6, 8), (3, 2))

    def test_errors(self):
        self.assertExpectedInline(
            error_of(fsdp_placement, (9, 6), [Shard(0)], (2,), ranks=2),
            """ValueError: dimension 0 of shape (9, 6) is sharded unevenly over 2 ranks: FSDP needs even pieces. Pad the dimension, or shard another one""",  # noqa: E501, B950
        )
        self.assertExpectedInline(
            error_of(fsdp_placement, (8, 6), [Shard(1)], (2,), ranks=2, local_numels=(5, 19)),
            """ValueError: local_numels (5, 19) cannot cut a local piece of shape (8, 3) over 2 ranks: give one number per rank, which add up to 24 and are multiples of 3 but for the last""",  # noqa: E501, B950
        )
        self.assertExpectedInline(
            error_of(fsdp_placement, (8, 6), [RaggedShard((0,), (1, 1))], (2,), ranks=2),
            """ValueError: a tensor placed as RS(0)[1,1] cannot be sharded by FSDP too: redistribute to Replicate or Shard first""",  # noqa: E501, B950
        )


if __name__ == "__main__":
    import unittest

    unittest.main()
