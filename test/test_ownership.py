"""Ownership against a brute-force oracle that numbers every element."""

import math
import unittest

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_ragged._ownership import Chunk, Run, Whole, boxes_of_interval, owned

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def cut_tensors(draw):
    """A shape, and a cut of it over 1 to 8 ranks."""
    shape, ranks = draw(shapes), draw(st.integers(1, 8))
    kinds = ["whole", "run"] + (["chunk"] if shape else [])
    kind = draw(st.sampled_from(kinds))
    if kind == "whole":
        return shape, ranks, Whole()
    if kind == "chunk":
        return shape, ranks, Chunk(draw(st.integers(0, len(shape) - 1)))
    ndims = draw(st.integers(0, len(shape)))
    return shape, ranks, Run(ndims, draw(units_of(math.prod(shape[:ndims]), ranks)))


def units_of(prefix, ranks):
    """Units over ``ranks`` whose sum divides ``prefix``; zeros are common."""
    totals = [d for d in range(1, prefix + 1) if prefix % d == 0] or [1, 2, 3]

    def split(pair):
        total, cuts = pair
        edges = [0, *sorted(cut % (total + 1) for cut in cuts), total]
        return tuple(b - a for a, b in zip(edges, edges[1:]))

    return st.tuples(st.sampled_from(totals), st.lists(st.integers(0, 999), min_size=ranks - 1, max_size=ranks - 1)).map(split)


def oracle(shape, ranks, cut, rank):
    """The element numbers that a rank holds, by the definitions of section 2 of the design."""
    numbers = torch.arange(math.prod(shape)).view(shape)
    if isinstance(cut, Whole):
        return numbers.flatten().tolist()
    if isinstance(cut, Chunk):
        chunks = numbers.chunk(ranks, cut.dim)
        return chunks[rank].flatten().tolist() if rank < len(chunks) else []
    unit = numbers.numel() // sum(cut.units)
    return numbers.flatten().tolist()[unit * sum(cut.units[:rank]) : unit * sum(cut.units[: rank + 1])]


class OwnershipTest(unittest.TestCase):
    @settings(max_examples=400, deadline=None)
    @given(cut_tensors())
    def test_boxes_hold_the_elements_of_the_definition(self, case):
        shape, ranks, cut = case
        numbers = torch.arange(math.prod(shape)).view(shape)
        for rank in range(ranks):
            mine = owned(shape, (ranks,), (cut,), (rank,))
            held = []
            for box in mine.boxes:
                self.assertEqual(box.local_offset, len(held))
                region = numbers
                for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes)):
                    region = region.narrow(dim, min(offset, region.shape[dim]), size)
                held += region.flatten().tolist()
            self.assertEqual(held, oracle(shape, ranks, cut, rank))
            self.assertEqual(len(held), mine.numel)

    @settings(max_examples=300, deadline=None)
    @given(st.lists(st.integers(1, 5), max_size=5).map(tuple), st.integers(0, 3000), st.integers(0, 3000))
    def test_an_interval_is_at_most_2_ndim_minus_1_boxes(self, shape, a, b):
        numel = math.prod(shape)
        start, stop = sorted((a % (numel + 1), b % (numel + 1)))
        boxes = boxes_of_interval(shape, start, stop)
        self.assertLessEqual(len(boxes), max(1, 2 * len(shape) - 1))
        self.assertEqual(sum(math.prod(sizes) for _, sizes in boxes), stop - start)

    def test_shard_then_run_and_run_then_inner_shard(self):
        numbers = torch.arange(24).view(4, 6)
        for first in range(2):
            for second in range(3):
                rows = numbers.chunk(2, 0)[first].flatten().tolist()
                mine = owned((4, 6), (2, 3), (Chunk(0), Run(1, (1, 0, 1))), (first, second))
                self.assertEqual(_numbers(numbers, mine), rows[:6] if second == 0 else rows[6:] if second == 2 else [])
                mine = owned((4, 6), (3, 2), (Run(1, (1, 0, 3)), Chunk(1)), (second, first))
                part = numbers[:1] if second == 0 else numbers[1:] if second == 2 else numbers[:0]
                self.assertEqual(_numbers(numbers, mine), part.chunk(2, 1)[first].flatten().tolist())

    def test_combinations_without_meaning(self):
        for cuts, words in (
            ((Run(1, (1, 1)), Chunk(0)), "StridedRaggedShard"),
            ((Run(1, (1, 1)), Run(1, (1, 1))), "two RaggedShard"),
            ((Run(1, (1, 4)), Whole()), "do not divide into 5 units"),
        ):
            with self.assertRaisesRegex(ValueError, words):
                owned((4, 6), (2, 2), cuts, (0, 0))


def _numbers(numbers, mine):
    return [
        n
        for box in mine.boxes
        for n in numbers[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes))].flatten().tolist()
    ]


if __name__ == "__main__":
    unittest.main()
