"""StridedRaggedShard: as a value, beside others, redistributed; and which placement FSDP takes for a tensor."""

import functools
import itertools
import pickle

import pytest
import torch
from common import error_of, run_ranks
from expecttest import TestCase
from oracle import MESHES, check_is_a_frozen_value, check_is_no_other_placement, kinds_of_random_cases
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from torch_ragged import RaggedShard, StridedRaggedShard, fsdp_placement
from torch_ragged.tensor.placement_types import normalize_placements

PLACEMENT = StridedRaggedShard((0,), (1, 2, 0, 1), split_factor=2)

# ``pickle.dumps(PLACEMENT, protocol=2)`` from when placements kept their units as a tuple.
PICKLED_BEFORE = (
    b"\x80\x02c"
    + b"torch_ragged.tensor.strided_placement_types"
    + b"\nStridedRaggedShard\nK\x00\x85(K\x01K\x02K\x00K\x01tK\x02\x87R."
)


def check_beside_shard():
    """Errors of distribute_tensor, and the collectives of a redistribution to Replicate."""
    grid = init_device_mesh("cpu", (1, 2))
    errors = [
        error_of(distribute_tensor, torch.zeros(3, 4), grid, [StridedRaggedShard((0,), (1,), 2), Shard(0)]),
        error_of(distribute_tensor, torch.zeros(6, 4), grid, [StridedRaggedShard((0,), (1,), 3), Shard(0)]),
    ]
    grid = init_device_mesh("cpu", (2, 1))
    tensor = distribute_tensor(torch.arange(32.0).view(8, 4), grid, [StridedRaggedShard((0,), (1, 3), 2), Shard(0)])
    with CommDebugMode() as mode:
        assert torch.equal(tensor.full_tensor(), torch.arange(32.0).view(8, 4))
    return errors, {str(op).split(".")[-1]: n for op, n in mode.get_comm_counts().items()}


class StridedRaggedShardTest(TestCase):
    def test_repr_evaluates_back_and_shows_what_was_given(self):
        self.assertExpectedInline(
            repr(PLACEMENT), """StridedRaggedShard(dims=(0,), local_units=(1, 2, 0, 1), split_factor=2)"""
        )
        self.assertExpectedInline(str(PLACEMENT), """SRS(0)[1,2,0,1]/2""")
        self.assertEqual(eval(repr(PLACEMENT)), PLACEMENT)

    def test_units_are_relative(self):
        self.assertEqual(StridedRaggedShard((0,), (1, 1), 2), StridedRaggedShard((0,), (2, 2), 2))
        self.assertNotEqual(StridedRaggedShard((0,), (1, 1), 2), StridedRaggedShard((0,), (1, 1), 4))
        self.assertNotEqual(StridedRaggedShard((0,), (1, 1), 1), RaggedShard((0,), (1, 1)))

    def test_is_a_frozen_value_and_no_other_placement(self):
        check_is_a_frozen_value(self, PLACEMENT)
        check_is_no_other_placement(self, PLACEMENT)

    def test_what_was_pickled_with_a_tuple_of_units_loads(self):
        self.assertEqual(pickle.loads(PICKLED_BEFORE), PLACEMENT)

    def test_programs_that_ask_learn_that_each_rank_holds_a_part_only(self):
        placement = StridedRaggedShard((0,), (1, 1), 2)
        self.assertEqual([placement.is_shard(), placement.is_shard(dim=0), placement.is_shard(dim=1)], [True, True, False])

    def test_errors(self):
        self.assertExpectedInline(
            error_of(StridedRaggedShard, (0,), (1, 2), 0),
            """ValueError: StridedRaggedShard split_factor must be an integer >= 1, the number of pieces, got 0""",
        )

    def test_beside_shard(self):
        errors, counts = run_ranks(2, check_beside_shard)[0]
        self.assertEqual(counts, {"all_to_all_single": 1})
        self.assertExpectedInline(
            "\n".join(errors),
            """\
ValueError: StridedRaggedShard with split_factor=2 on a piece of shape (3, 4): uneven Shard(0) under a StridedRaggedShard has no meaning. Dimension 0 must be a multiple of 2: pad it, or shard another dimension
ValueError: Shard(0) over 2 ranks to the right of a StridedRaggedShard with split_factor=3: the split_factor must be the number of ranks that shard dimension 0 to its right, or a multiple of that number""",  # noqa: E501, B950
        )

    def test_random_cases_are_bitwise_right_and_move_the_least(self):
        kinds = set()
        for ranks in (1, 2, 5):
            kinds |= kinds_of_random_cases(((ranks,),), 30, ranks, StridedRaggedShard)
        for ranks, mesh_shapes in MESHES.items():
            kinds |= kinds_of_random_cases(mesh_shapes, 130, ranks, StridedRaggedShard)
        names = ("Replicate", "Shard", "_StridedShard", "Partial", "RaggedShard", "StridedRaggedShard")
        self.assertLessEqual(set(itertools.product(names, names)), kinds)

    @pytest.mark.slow
    def test_ten_thousand_random_cases(self):
        for seed in range(5):
            for ranks, mesh_shapes in MESHES.items():
                kinds_of_random_cases(mesh_shapes, 700, 1000 * ranks + seed, StridedRaggedShard)


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
            """ValueError: dimension 0 of shape (9, 6) is sharded unevenly over 2 ranks: FSDP needs even pieces. Pad the dimension, or shard another dimension""",  # noqa: E501, B950
        )
        self.assertExpectedInline(
            error_of(fsdp_placement, (8, 6), [Shard(1)], (2,), ranks=2, local_numels=(5, 19)),
            """ValueError: local_numels (5, 19) cannot cut a local piece of shape (8, 3) over 2 ranks: give one number per rank; they must add up to 24, and each cut must fall on a multiple of 3""",  # noqa: E501, B950
        )
        self.assertExpectedInline(
            error_of(fsdp_placement, (8, 6), [RaggedShard((0,), (1, 1))], (2,), ranks=2),
            """ValueError: FSDP cannot shard a tensor placed as RS(0)[1,1]: redistribute it to Replicate or Shard first""",  # noqa: E501, B950
        )
