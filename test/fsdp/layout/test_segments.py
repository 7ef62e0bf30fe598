"""Fused weights whose segments have granularities of their own: cuts, plans against brute force, layouts and placements."""

import functools
import math
import random
import unittest

import pytest
from expecttest import TestCase

from torch_ragged.fsdp import BufferLayout, Segments, TensorSpec, advise, blocks, elements, plan_layout, rows, segments, tensor
from torch_ragged.fsdp.layout._packing import Kind, place
from torch_ragged.fsdp.layout._planner import smallest_shard
from torch_ragged.tensor._ownership import owned


def cuts_of_one(spec):
    """Where a tensor without segments may be cut."""
    period = spec.period or spec.numel
    return {cut for cut in range(spec.numel) if cut % period % spec.block == 0}


def cuts_of_each(granularity, shape):
    """Where each segment by itself may be cut, one segment after the other, in each slice of the dimensions before them."""
    cuts, offset = set(), 0
    for _ in range(math.prod(shape[: granularity.dim])):
        for size, each in zip(granularity.sizes, granularity.granularities, strict=True):
            one = each.tensor_spec("one", (size, *shape[granularity.dim + 1 :]))
            cuts |= {offset + cut for cut in cuts_of_one(one)}
            offset += one.numel
    return cuts


def cuts_of(spec):
    if not spec.segments:
        return cuts_of_one(spec)
    return {cut for start, stop, block in spec.runs for cut in range(start, stop, block)}


def random_fused(rng, most):
    """A granularity with segments, and the shape of a tensor of up to about ``most`` elements."""
    ndim = rng.choice((1, 2, 2, 2, 3))
    dim = rng.randint(0, max(0, ndim - 2))
    others = [rng.choice((1, 1, 2, 3)) for _ in range(ndim - 1)]
    sizes = [rng.randint(1, max(1, most // math.prod(others) // 3)) for _ in range(rng.randint(1, 4))]
    choices = [elements(), *map(rows, range(1, 8)), rows(2, within=0), blocks(2, 2), blocks(3, 1), tensor()]
    each = [rng.choice(choices) for _ in sizes] if rng.random() < 0.7 else rng.choice(choices)
    others.insert(dim, sum(sizes))
    return segments(sizes, each, dim), tuple(others)


def random_group(rng, most):
    """A fused tensor, or two, and others; with the cuts of each."""
    found = []
    for index in range(rng.randint(1, 2)):
        granularity, shape = random_fused(rng, most)
        found.append((granularity.tensor_spec(f"fused{index}", shape), frozenset(cuts_of_each(granularity, shape))))
    for index in range(rng.randint(0, 3)):
        one = TensorSpec(f"plain{index}", (rng.randint(1, most),), (0,), rng.choice((1, 2, 3, 4, 5, 6)))
        found.append((one, frozenset(cuts_of_one(one))))
    rng.shuffle(found)
    return found


def is_cut(cuts, numel, offset, shard):
    """Whether a shard boundary falls inside a block of a tensor at ``offset``."""
    return any(cut not in cuts for cut in range(-offset % shard, numel, shard))


def fits(group, ranks, shard):
    """Whether the tensors fit, over all orders and all offsets."""
    end = ranks * shard
    offsets = [[o for o in range(end - one.numel + 1) if not is_cut(cuts, one.numel, o, shard)] for one, cuts in group]

    @functools.cache
    def search(left, position):
        return not left or any(
            search(left - {index}, offset + group[index][0].numel)
            for index in left
            for offset in offsets[index]
            if offset >= position
        )

    return search(frozenset(range(len(group))), 0)


class SegmentsTest(TestCase):
    def test_each_segment_is_cut_as_a_tensor_of_its_own(self):
        rng = random.Random(0)
        fused = 0
        for _ in range(1500):
            granularity, shape = random_fused(rng, 40)
            spec = granularity.tensor_spec("w", shape)
            self.assertEqual(cuts_of(spec), cuts_of_each(granularity, shape), (granularity.text, shape))
            self.assertEqual((spec.shape, spec.numel), (shape, math.prod(shape)))
            slice_numel = math.prod(shape[len(spec.dims) :])
            self.assertTrue(all(cut % slice_numel == 0 for cut in cuts_of(spec)))
            fused += bool(spec.segments)
        self.assertGreater(fused, 500)

    def test_segments_of_whole_blocks_are_one_tensor_with_these_blocks(self):
        shape = (6144, 512)
        qkv = segments((4096, 1024, 1024), rows(128))
        self.assertEqual(qkv.tensor_spec("qkv", shape), rows(128).tensor_spec("qkv", shape))
        self.assertEqual(segments((4096, 2048), elements()).tensor_spec("w", shape), elements().tensor_spec("w", shape))
        self.assertEqual(segments((6144,), tensor()).tensor_spec("w", shape).block, 6144 * 512)
        # Gate and up of each expert: a matrix of a fused tensor has blocks of its own.
        gate_up = segments((2880, 2880), rows(128), dim=1).tensor_spec("w", (4, 5760, 16))
        self.assertEqual((gate_up.block, gate_up.period, gate_up.segments), (128 * 16, 2880 * 16, ()))
        self.assertEqual(segments((2, 2), rows(1), dim=-2).tensor_spec("w", (4, 4, 3)).block, 3)
        # Without elements, there is nothing to cut.
        self.assertEqual(segments((2, 1), rows(2)).tensor_spec("w", (3, 0)).numel, 0)

    def test_plans_are_those_of_brute_force(self):
        self.check_optimal(200, 1)

    @pytest.mark.slow
    def test_many_plans_are_those_of_brute_force(self):
        self.check_optimal(4000, 2)

    def check_optimal(self, cases, seed):
        rng = random.Random(seed)
        for _ in range(cases):
            group, ranks, alignment = random_group(rng, 16), rng.randint(1, 6), rng.choice((1, 1, 2, 4))
            tensors = [one for one, _ in group]
            layout = plan_layout(tensors, ranks, alignment)
            text = ([one.runs for one in tensors], ranks, alignment)
            for offset, (one, cuts) in zip(layout.offsets, group, strict=True):
                self.assertFalse(is_cut(cuts, one.numel, offset, layout.shard_numel), text)
            optimum = next(s for s in range(alignment, layout.shard_numel + 1, alignment) if fits(group, ranks, s))
            self.assertLessEqual(layout.lower_bound, optimum, text)
            if any(one.period and not one.segments for one in tensors):  # As `within`: see docs/planner.md.
                self.assertGreaterEqual(layout.shard_numel, optimum, text)
            else:
                self.assertEqual(layout.shard_numel, optimum, text)

    def test_a_shard_between_two_segments_need_not_have_whole_blocks(self):
        """(7, 4) rows in blocks of 3 are cut at 3, 6, 7 and 10: a shard of 4 fits between 3 and 7."""
        one = segments((7, 4), rows(3)).tensor_spec("w", (11, 1))
        kind = Kind.of(one)
        self.assertEqual(one.runs, ((0, 7, 3), (7, 11, 3)))
        found = {shard: place([kind], 3, shard) for shard in range(3, 8)}
        self.assertEqual(found, {3: None, 4: [1], 5: None, 6: [0], 7: [0]})
        self.assertEqual([smallest_shard([kind], 3, 1, bound) for bound in (3, 4, 5, 6, 7)], [4, 4, 6, 6, 7])
        self.assertEqual(plan_layout([one], 3).shard_numel, 4)

        self.assertEqual(
            place([Kind.of(TensorSpec("t", (2,), (0,), 1)), kind], 4, 4), [0, 5]
        )  # Two rows of a shard are too few.
        self.assertIsNone(place([Kind.of(TensorSpec("t", (2,), (0,), 1)), kind], 3, 4))

    def test_which_shards_a_tensor_with_segments_can_contain(self):
        def kind(sizes, each, lead=()):
            return Kind.of(segments(sizes, each, len(lead)).tensor_spec("w", (*lead, sum(sizes), 1)))

        for sizes, each, lead, unit, grain in (
            ((448, 256), [rows(64), rows(128)], (), 128, 64),  # A boundary at row 64 is between blocks of both.
            ((400, 300), [rows(100), rows(60)], (), 300, 20),
            ((7, 4), rows(3), (), 11, 1),  # Blocks of the second segment start at row 1 of 3.
            ((7, 7), rows(3), (), 7, 1),  # Shards of 7 rows are whole segments.
            ((7, 7), [rows(3), rows(5)], (), 14, 1),
            ((6, 7), [rows(3), tensor()], (), 13, 3),  # Nothing is cut after row 6.
            ((7, 6, 12), [elements(), rows(3), rows(6)], (), 6, 1),  # Boundaries at rows 1, 7, 13, ...
            ((7, 8), [rows(3), tensor()], (5,), 15, 1),
            ((6, 12), [rows(3), rows(2)], (4,), 6, 1),
            ((6, 8), [rows(3), tensor()], (4,), 14, 1),  # 24 rows are more than a matrix of 14.
            ((6, 12), [tensor(), rows(4)], (), 12, 2),
            ((4, 8, 12), [tensor(), tensor(), rows(4)], (), 8, 4),
        ):
            found = kind(sizes, each, lead)
            self.assertEqual((found.unit, found.grain), (unit, grain), (sizes, found))
            self.assertEqual(found.period, sum(sizes) if lead or len(set(sizes)) > 1 or isinstance(each, list) else sizes[0])
        # The last cut is before the last row.
        self.assertEqual(smallest_shard([kind((3, 4, 1), tensor())], 3, 1, 4), 4)
        # Uneven sizes are looked at from the bound on: 4,001 rows are between row 3,000 and 7,001.
        self.assertEqual(smallest_shard([kind((7001, 4000), rows(3000))], 3, 1, 3990), 4001)
        # From a bound of 1 on, uneven sizes are looked at up to 32 only: these are found as multiples of the unit.
        even = kind((10_000, 10_020), [rows(100), rows(60)])
        self.assertEqual((even.unit, smallest_shard([even], 10, 1, 1)), (300, 2100))
        alike = kind((10_007,) * 4, rows(100))
        self.assertEqual((alike.unit, smallest_shard([alike], 8, 1, 1)), (10_007, 10_007))
        experts = kind((1000, 1010), [rows(100), rows(60)], (20,))
        self.assertEqual((experts.unit, smallest_shard([experts], 100, 1, 1)), (2010, 2010))

    def test_layouts_refuse_boundaries_inside_of_blocks_only(self):
        rng, refused = random.Random(3), 0
        for _ in range(2000):
            granularity, shape = random_fused(rng, 24)
            spec = granularity.tensor_spec("w", shape)
            shard, offset = rng.randint(1, 12), rng.randint(0, 12)
            ranks = -(-(offset + spec.numel) // shard)
            wrong = is_cut(cuts_of_each(granularity, shape), spec.numel, offset, shard)
            refused += wrong
            arguments = ((spec,), (offset,), shard, ranks, 1, 1, "", "given")
            if wrong:
                self.assertRaisesRegex(ValueError, "cuts w at element", BufferLayout, *arguments)
            else:
                BufferLayout(*arguments)
        self.assertTrue(500 < refused < 1900, refused)
        spec = segments((4, 6), [tensor(), rows(3)]).tensor_spec("w", (10, 2))
        text = "shard boundary 1 cuts w at element 12, inside a block of 6 elements (blocks are counted from element 8 to 20"
        with self.assertRaises(ValueError) as caught:
            BufferLayout((spec,), (0,), 12, 2, 1, 1, "", "given")
        self.assertEqual(str(caught.exception), f"{text} there)")

    def test_placements_own_what_the_layout_says(self):
        rng = random.Random(4)
        for _ in range(300):
            tensors = [one for one, _ in random_group(rng, 30)]
            ranks = rng.randint(1, 8)
            layout = plan_layout(tensors, ranks, 4)
            for index, one in enumerate(tensors):
                placement = layout.placement(index)
                for rank in range(ranks):
                    start, stop = layout.local_range(index, rank)
                    self.assertEqual(owned(one.shape, (ranks,), (placement.cut,), (rank,)).local_shape, (stop - start,))

    def test_whole_slices_are_cut_where_both_allow_it(self):
        rng = random.Random(5)
        for _ in range(500):
            granularity, shape = random_fused(rng, 40)
            spec = granularity.tensor_spec("w", shape)
            for ndims in range(1, len(shape)):
                slice_numel, sliced = math.prod(shape[ndims:]), spec.whole_slices(ndims)
                expected = {cut for cut in cuts_of(spec) if cut % slice_numel == 0}
                if spec.segments or not spec.period:
                    self.assertEqual(cuts_of(sliced), expected, (granularity.text, shape, ndims))
                else:
                    self.assertLessEqual(cuts_of(sliced), expected)
                self.assertLessEqual(len(sliced.dims), ndims)

    def test_a_transformer_layer_with_fused_weights(self):
        """Llama-3-405B's, with queries in one block: they need one shard, which is not smaller for more ranks."""
        width = 16384
        qkv = segments((width, 1024, 1024), [tensor(), rows(64), rows(64)]).tensor_spec("qkv", (width + 2048, width))
        gate_up = segments((53248, 53248), [rows(128), rows(64)]).tensor_spec("gate_up", (2 * 53248, width))
        tensors = [qkv, rows(64).tensor_spec("out", (width, width)), gate_up, rows(16).tensor_spec("down", (width, 53248))]
        found = {}
        for ranks in (8, 12, 64, 512):
            layout = plan_layout(tensors, ranks, 64)
            found[ranks] = (round(100 * layout.padding_fraction, 2), round(100 * layout.bound_fraction, 2))
        self.assertEqual(found, {8: (2.63, 2.63), 12: (2.63, 2.63), 64: (447.37, 447.37), 512: (4278.95, 4278.95)})
        self.assertEqual(plan_layout([gate_up], 64, 64).padding_numel, 0)
        self.assertExpectedInline(
            plan_layout([gate_up], 192, 64).forced_by,
            """gate_up: a segment of 872,415,232 elements contains a whole shard, which must be a multiple of 2,097,152""",
        )

    def test_advice_makes_the_blocks_of_the_coarsest_segments_finer(self):
        spec = segments((16, 8), [tensor(), rows(6)]).tensor_spec("qkv", (24, 1))
        self.assertExpectedInline(
            "\n".join(advise({"layer": plan_layout([spec], 6)})),
            """\
layer: padding 300.00% on 6 ranks exceeds 5% (at least 300.00%: qkv: a block of 16 elements must fit into one shard)
  - segments (blocks of 2 rows, cuts anywhere) instead of segments (whole tensors, blocks of 6 rows) for qkv: 0.00%
  - FSDP size 1: 0.00%""",
        )

    def test_what_is_no_granularity_of_segments(self):
        qkv = segments((8, 4, 4), rows(2))
        self.assertIsInstance(qkv, Segments)
        part = TensorSpec("part", (2,), (0,), 2)
        for call, words in (
            (lambda: segments((), rows(1)), "segments() takes the size of each segment, such as (4096, 1024, 1024), got ()"),
            (lambda: segments(3, rows(1)), "segments() takes the size of each segment, such as (4096, 1024, 1024), got 3"),
            (lambda: segments((4, 0), rows(1)), "segments() takes positive integers, got 0"),
            (lambda: segments((4, 2.5), rows(1)), "segments() takes positive integers, got 2.5"),
            (
                lambda: segments((4, 4), [rows(1)] * 3),
                "segments() takes one granularity, or one for each of the 2 segments, got 3",
            ),
            (
                lambda: segments((4, 4), 32),
                "segments() takes elements(), rows(n), blocks(h, w) or tensor() for each segment, got 32",
            ),
            (
                lambda: segments((4, 4), [rows(1), segments((2, 2), rows(1))]),
                "segments() takes elements(), rows(n), blocks(h, w) or tensor() for each segment, got "
                "segments((2, 2), rows(1))",
            ),
            (lambda: segments((4, 4), rows(1), dim="0"), "segments(dim=) takes an integer, got '0'"),
            (
                lambda: qkv.tensor_spec("w", (17, 4)),
                "w: the sizes of segments((8, 4, 4), rows(2)) add up to 16, the shape is (17, 4): give sizes that add up to "
                "its dimension 0, or another granularity for this parameter",
            ),
            (
                lambda: segments((1, 1), rows(1), dim=2).tensor_spec("w", (2, 2)),
                "w: the sizes of segments((1, 1), rows(1), dim=2) add up to 2, the shape is (2, 2): give sizes that add up to "
                "its dimension 2, or another granularity for this parameter",
            ),
            (
                lambda: segments((1, 1), rows(1), dim=-1).tensor_spec("w", (2, 2)),
                "w: each row of (2, 2) has all segments of dimension 1, so segments((1, 1), rows(1), dim=-1) cannot cut "
                "between them: give a granularity of whole rows, without segments",
            ),
            (
                lambda: TensorSpec("w", (5,), (0,), 2, segments=(part, part)),
                "w: segments must have the 5 elements of a period together, got 4",
            ),
            (
                lambda: TensorSpec("w", (4,), (0,), 1, segments=(part, part)),
                "w: block must be 2, the largest of the segments, got 1",
            ),
        ):
            with self.assertRaises((TypeError, ValueError)) as caught:
                call()
            self.assertEqual(str(caught.exception), words)


if __name__ == "__main__":
    unittest.main()
