"""Ownership against a brute-force oracle that numbers every element."""

import itertools
import math
import random
import unittest

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import local_of, random_placement

from torch_ragged import StridedRaggedShard
from torch_ragged.tensor._cut_placement import cuts_of
from torch_ragged.tensor._ownership import (
    Box,
    Chunk,
    Owned,
    Run,
    Whole,
    _Piece,
    boxes_of_interval,
    check_cuts,
    has_single_boxes,
    is_nested,
    owned,
    owned_near,
    row_major,
)
from torch_ragged.tensor._units import Units
from torch_ragged.tensor.placement_types import normalize_placements


def run(ndims, units, split_factor=1):
    return Run(ndims, Units.of(units), split_factor)


@st.composite
def sharded_tensors(draw):
    """A shape, a mesh shape of one to three dimensions, and placements that mean something."""
    shape = draw(st.lists(st.sampled_from((0, 1, 2, 3, 4, 4, 6, 8)), max_size=4).map(tuple))
    mesh_shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))
    random = draw(st.randoms(use_true_random=False))
    while True:
        placements = tuple(
            random_placement(random, shape, mesh_shape, dim, StridedRaggedShard) for dim in range(len(mesh_shape))
        )
        try:
            return shape, mesh_shape, normalize_placements(placements, shape, mesh_shape)
        except ValueError:
            continue


def random_cuts(rng):
    """A shape, a mesh shape, and cuts that are legal together, strided ones too."""
    while True:
        shape = tuple(rng.choice((1, 2, 3, 4, 5, 6, 8, 12)) for _ in range(rng.choice((1, 2, 2, 3))))
        mesh_shape = tuple(rng.randint(1, 4) for _ in range(rng.choice((1, 2))))
        cuts = []
        for parts in mesh_shape:
            units = [rng.choice((0, 1, 1, 2)) for _ in range(parts)]
            ragged = run(rng.choice((1, 1, min(2, len(shape)))), units if any(units) else [1] * parts)
            strided = Run(ragged.ndims, ragged.units, rng.choice((2, 3, 4)))
            cuts.append(rng.choice((Whole(), Chunk(rng.randrange(len(shape))), ragged, strided)))
        try:
            check_cuts(shape, mesh_shape, tuple(cuts))
            return shape, mesh_shape, tuple(cuts)
        except ValueError:
            continue


class OwnershipTest(unittest.TestCase):
    @settings(max_examples=600, deadline=None)
    @given(sharded_tensors())
    def test_boxes_hold_the_elements_of_the_definition(self, case):
        shape, mesh_shape, placements = case
        numbers = torch.arange(math.prod(shape)).view(shape)
        for coordinate in itertools.product(*map(range, mesh_shape)):
            mine = owned(shape, mesh_shape, cuts_of(placements), coordinate)
            expected = local_of(numbers, mesh_shape, placements, coordinate)
            self.assertEqual(mine.local_shape, tuple(expected.shape))
            self.assertIs(mine.flat, any(isinstance(cut, Run) for cut in cuts_of(placements)))
            held = torch.full((mine.numel,), -1)
            for box in mine.boxes:
                place = held.as_strided(box.sizes, box.local_strides, box.local_offset)
                place.copy_(numbers[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))])
            self.assertEqual(held.tolist(), expected.flatten().tolist())

    @settings(max_examples=300, deadline=None)
    @given(sharded_tensors())
    def test_single_boxes_are_those_of_each_rank(self, case):
        shape, mesh_shape, placements = case
        coordinates = list(itertools.product(*map(range, mesh_shape)))
        counts = [sum(box.numel > 0 for box in owned(shape, mesh_shape, cuts_of(placements), c).boxes) for c in coordinates]
        expected = all(count == 1 or (count == 0 and shape) for count in counts)
        self.assertIs(has_single_boxes(shape, mesh_shape, cuts_of(placements)), bool(expected))

    @settings(max_examples=300, deadline=None)
    @given(sharded_tensors(), st.randoms(use_true_random=False))
    def test_ranks_left_out_of_the_near_ones_share_nothing(self, case, random):
        shape, mesh_shape, placements = case
        coordinate = tuple(map(random.randrange, mesh_shape))
        mesh_dims = tuple(dim for dim in range(len(mesh_shape)) if random.random() < 0.8)
        chunks = tuple(Chunk(random.randrange(len(shape))) if shape else Whole() for _ in mesh_shape)
        other = owned(shape, mesh_shape, chunks, coordinate)
        numbers = torch.arange(math.prod(shape)).view(shape)
        near = dict(owned_near(shape, mesh_shape, cuts_of(placements), coordinate, mesh_dims, other))
        ranges = [range(size) if dim in mesh_dims else (coordinate[dim],) for dim, size in enumerate(mesh_shape)]
        for position, peer in enumerate(itertools.product(*ranges)):
            mine = owned(shape, mesh_shape, cuts_of(placements), peer)
            self.assertEqual(near.get(position, mine), mine)
            if position not in near:
                self.assertFalse(set(_numbers(numbers, mine)) & set(_numbers(numbers, other)))

    def test_few_of_many_ranks_are_near(self):
        strided = (run(1, (1,) * 128, 8), Chunk(0))
        for cuts, most in ((strided, 16), ((run(1, (1,) * 128), Whole()), 8), ((Chunk(0), Chunk(1)), 8)):
            other = owned((8192, 8), (128, 8), (run(1, (1,) * 128), Whole()), (77, 3))
            self.assertLessEqual(len(owned_near((8192, 8), (128, 8), cuts, (77, 3), (0, 1), other)), most)

    @settings(max_examples=300, deadline=None)
    @given(st.lists(st.integers(1, 5), max_size=5).map(tuple), st.integers(0, 3000), st.integers(0, 3000))
    def test_an_interval_is_at_most_2_ndim_minus_1_boxes(self, shape, a, b):
        numel = math.prod(shape)
        start, stop = sorted((a % (numel + 1), b % (numel + 1)))
        boxes = boxes_of_interval(shape, start, stop)
        self.assertLessEqual(len(boxes), max(1, 2 * len(shape) - 1))
        self.assertEqual(sum(math.prod(sizes) for _, sizes in boxes), stop - start)

    def test_boxes_of_an_interval(self):
        for shape, interval, boxes in (
            ((4, 6), (4, 21), [((0, 4), (1, 2)), ((1, 0), (2, 6)), ((3, 0), (1, 3))]),
            ((4, 6), (4, 8), [((0, 4), (1, 2)), ((1, 0), (1, 2))]),  # No rows between: no box for them.
            ((4, 6), (7, 9), [((1, 1), (1, 2))]),
            ((4, 6), (6, 12), [((1, 0), (1, 6))]),
            ((4, 6), (6, 6), []),
            (
                (2, 3, 4),
                (2, 17),
                [((0, 0, 2), (1, 1, 2)), ((0, 1, 0), (1, 2, 4)), ((1, 0, 0), (1, 1, 4)), ((1, 1, 0), (1, 1, 1))],
            ),
            ((), (0, 1), [((), ())]),
            ((), (1, 1), []),
        ):
            self.assertEqual(boxes_of_interval(shape, *interval), boxes)

    def test_the_near_ranks_are_those_that_share_elements(self):
        """Exactly those, and perhaps some that own nothing: more of them would make each plan slower."""
        rng = random.Random(0)
        for _ in range(1500):
            shape, mesh_shape, cuts = random_cuts(rng)
            sizes = [rng.randint(1, size) for size in shape]
            if any(isinstance(cut, Run) and cut.ndims == 2 for cut in cuts):
                sizes[1] = shape[1]  # Only whole rows are told apart.
            offsets = [rng.randint(0, whole - size) for whole, size in zip(shape, sizes, strict=True)]
            other = Owned(tuple(sizes), (Box(tuple(offsets), tuple(sizes), 0, row_major(sizes)),), flat=False)
            coordinate = tuple(map(rng.randrange, mesh_shape))
            mesh_dims = tuple(dim for dim in range(len(mesh_shape)) if rng.random() < 0.7)
            ranges = [range(size) if dim in mesh_dims else (coordinate[dim],) for dim, size in enumerate(mesh_shape)]
            numbers = torch.arange(math.prod(shape)).view(shape)
            theirs = [owned(shape, mesh_shape, cuts, peer) for peer in itertools.product(*ranges)]
            near = owned_near(shape, mesh_shape, cuts, coordinate, mesh_dims, other)
            self.assertEqual(
                [(rank, mine) for rank, mine in near if mine.numel],
                [(r, mine) for r, mine in enumerate(theirs) if {*_numbers(numbers, mine)} & {*_numbers(numbers, other)}],
            )
            nothing = Owned((0,), (), flat=True)
            self.assertEqual(owned_near(shape, mesh_shape, cuts, coordinate, mesh_dims, nothing), [])
            self.check_tried(shape, mesh_shape, cuts, other, set(_numbers(numbers, other)))

    def check_tried(self, shape, mesh_shape, cuts, other, elements):
        """Ranks that share nothing are not even tried: a mesh may have many thousand of them."""
        numbers, box = torch.arange(math.prod(shape)).view(shape), other.boxes[0]
        bounds = [(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True)]
        first, ranks = cuts[0], mesh_shape[0]
        pieces = [owned(shape, (ranks,), (first,), (rank,)) for rank in range(ranks)]
        shares = [not elements.isdisjoint(_numbers(numbers, mine)) for mine in pieces]
        every = isinstance(first, Whole) or (isinstance(first, Run) and box.sizes[0] > shape[0] // first.split_factor)
        tried = list(_Piece(shape).indices_near(first, ranks, bounds))
        self.assertEqual(
            [r for r in tried if pieces[r].numel], [r for r in range(ranks) if pieces[r].numel and (every or shares[r])]
        )
        if isinstance(first, Run) and first.split_factor > 1 and cuts[1:] == (Chunk(0),):
            for rank in range(ranks):
                piece, parts = _Piece(shape), range(mesh_shape[1])
                piece.apply(first, ranks, rank)
                theirs = [_numbers(numbers, owned(shape, mesh_shape, cuts, (rank, part))) for part in parts]
                near = [part for part in parts if not elements.isdisjoint(theirs[part])]
                if pieces[rank].numel:
                    self.assertEqual(list(piece.indices_near(Chunk(0), len(parts), bounds)), near)

    def test_shard_then_run_and_run_then_inner_shard(self):
        numbers = torch.arange(24).view(4, 6)
        for first in range(2):
            for second in range(3):
                rows = numbers.chunk(2, 0)[first].flatten().tolist()
                mine = owned((4, 6), (2, 3), (Chunk(0), run(1, (1, 0, 1))), (first, second))
                self.assertEqual(_numbers(numbers, mine), rows[:6] if second == 0 else rows[6:] if second == 2 else [])
                mine = owned((4, 6), (3, 2), (run(1, (1, 0, 3)), Chunk(1)), (second, first))
                part = numbers[:1] if second == 0 else numbers[1:] if second == 2 else numbers[:0]
                self.assertEqual(_numbers(numbers, mine), part.chunk(2, 1)[first].flatten().tolist())

    def test_strided_runs_and_runs_of_whole_tensors_then_rows(self):
        numbers = torch.arange(24).view(4, 6)
        for a, b in itertools.product(range(2), range(2)):
            for cuts, rows in (
                ((run(1, (1, 1), 2), Chunk(0)), numbers[2 * b + a]),
                ((run(0, (1, 0), 2), Chunk(0)), numbers[2 * b : 2 * b + 2] if a == 0 else numbers[:0]),
                ((run(0, (1, 0)), Chunk(0)), numbers[2 * b : 2 * b + 2] if a == 0 else numbers[:0]),
                ((run(1, (1, 1), 4), Chunk(0)), None),  # No unit of a piece: a piece is one row.
            ):
                if rows is None:
                    with self.assertRaisesRegex(ValueError, r"each of the 4 pieces of shape .*its 1 slices .* into 2 units"):
                        owned((4, 6), (2, 2), cuts, (a, b))
                    continue
                check_cuts((4, 6), (2, 2), cuts)
                self.assertEqual(_numbers(numbers, owned((4, 6), (2, 2), cuts, (a, b))), rows.flatten().tolist())

    def test_combinations_without_meaning(self):
        for cuts, words in (
            ((run(1, (1, 1)), Chunk(0)), r"^Shard\(0\) to the right .* over dims \(0,\) .*at most 0 dims"),
            ((run(1, (1, 1)), Chunk(0, 2)), r"^_StridedShard\(0\)"),
            ((run(1, (1, 1), 2), Chunk(0, 2)), r"^_StridedShard\(0\)"),
            ((run(1, (1, 1), 2), Chunk(2)), "on a tensor of 2 dimensions"),
            ((run(3, (1, 1)), Whole()), r"^RaggedShard over dims \(0, 1, 2\) .* at most 2 dims"),
            ((run(3, (1, 1), 2), Whole()), "^StridedRaggedShard over dims"),
            ((run(1, (1, 4)), Whole()), r"^RaggedShard.* cannot cut shape \(4, 6\): its 4 slices"),
            ((run(1, (1, 1)), Chunk(0)), "StridedRaggedShard"),
            ((run(1, (1, 1)), run(1, (1, 1))), "two ragged placements"),
            ((run(1, (1, 4)), Whole()), "do not divide into 5 units"),
            ((run(1, (1, 1), 3), Chunk(0)), "uneven Shard"),
            ((run(2, (1, 1), 4), Chunk(1)), "would cut its units"),
        ):
            with self.assertRaisesRegex(ValueError, words):
                owned((4, 6), (2, 2), cuts, (0, 0))

    def test_costs_nothing_per_rank(self):
        """A step for each of so many ranks would never end."""
        many = 10**12
        units = Units([(0, many // 2), (1, 1), (2, 1), (0, many // 2 - 2)])
        cuts, mesh_shape, owner = (Run(1, units), Chunk(1)), (many, many), many // 2 + 1
        check_cuts((6, 8), mesh_shape, cuts)
        self.assertEqual(owned((6, 8), mesh_shape, cuts, (owner, 3)).local_shape, (4,))
        self.assertEqual(owned((6, 8), mesh_shape, cuts, (owner + 1, 3)).local_shape, (0,))
        rows = owned((6, 8), mesh_shape, (Run(1, units), Whole()), (owner, 0))
        near = [position for position, _ in owned_near((6, 8), mesh_shape, (Run(1, units), Whole()), (0, 0), (0,), rows)]
        self.assertEqual(near, [owner])

    def test_every_uneven_chunk_is_checked(self):
        for size, ranks in ((7, 3), (6, 3), (2, 4), (9, 4), (0, 2)):
            shapes = {owned((size,), (ranks,), (Chunk(0),), (rank,)).local_shape for rank in range(ranks)}
            refused = {shape for shape in shapes if shape[0] % 2}
            cuts = (Chunk(0), run(1, (1, 1)))
            if refused:
                with self.assertRaisesRegex(ValueError, "do not divide into 2 units"):
                    check_cuts((size,), (ranks, 2), cuts)
            else:
                check_cuts((size,), (ranks, 2), cuts)

    def test_a_few_ranks_have_the_pieces_of_all_shapes(self):
        for size, parts, factor in itertools.product(range(13), range(1, 9), (1, 1, 2)):
            shape, cut = (2, size), Chunk(1, factor)
            few = _Piece(shape).indices_of_all_shapes(cut, parts)
            shapes = {owned(shape, (parts,), (cut,), (rank,)).local_shape for rank in range(parts)}
            self.assertEqual({owned(shape, (parts,), (cut,), (rank,)).local_shape for rank in few}, shapes)
            self.assertLessEqual(set(few), set(range(parts)))
            if factor == 1:
                self.assertLessEqual(len(few), 3)
        self.assertEqual(len(_Piece((6,)).indices_of_all_shapes(run(1, (1,) * 6), 6)), 1)

    def test_a_dimension_that_the_tensor_lacks(self):
        for cut in (Chunk(2), Chunk(2, 2), Chunk(3)):
            for check in (lambda cut=cut: check_cuts((4, 6), (2,), (cut,)), lambda cut=cut: owned((4, 6), (2,), (cut,), (0,))):
                with self.assertRaisesRegex(ValueError, "on a tensor of 2 dimensions"):
                    check()

    def test_pieces_that_ranks_cannot_share_out(self):
        with self.assertRaisesRegex(ValueError, r"^Shard\(0\) over 3 ranks .* split_factor=2"):
            owned((4, 6), (2, 3), (run(1, (1, 1), 2), Chunk(0)), (0, 0))

    def test_which_cuts_depend_on_which(self):
        self.assertTrue(is_nested(Chunk(0), Chunk(0)))
        self.assertTrue(is_nested(run(2, (1, 1)), Chunk(1)))
        self.assertFalse(is_nested(run(1, (1, 1)), Chunk(1)))
        self.assertFalse(is_nested(Chunk(1), Chunk(0)))
        self.assertFalse(is_nested(Chunk(0), run(1, (1, 1), 2)))
        self.assertFalse(is_nested(run(0, (1, 0)), Chunk(0)))  # One rank has the whole chunk, of any size.
        self.assertTrue(is_nested(run(0, (1, 0), 2), Chunk(0)))  # Its pieces are pieces of the chunk.
        self.assertFalse(is_nested(run(1, (1, 1), 2), Chunk(1)))


def _numbers(numbers, mine):
    return [
        n
        for box in mine.boxes
        for n in numbers[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))].flatten().tolist()
    ]
