"""The lower bound against brute force: it never exceeds the optimum, and where it reaches the plan."""

import itertools
import unittest
from collections import Counter
from itertools import starmap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_ragged.fsdp import TensorSpec, elements, rows
from torch_ragged.fsdp.layout import _bound
from torch_ragged.fsdp.layout import _planner as planner
from torch_ragged.fsdp.layout._bound import Bound, lower_bound
from torch_ragged.fsdp.layout._orders import sorted_and_permuted
from torch_ragged.fsdp.layout._packing import Kind
from torch_ragged.offline import ModelPlanner, granularity_policy, load_model


def spec(numel, block, period=0):
    return TensorSpec("t", (numel,), (0,), block, period)


@st.composite
def groups(draw):
    """Tensors of up to three kinds, with the number of each: many equal tensors, as experts are. Some have segments."""
    found = []
    for _ in range(draw(st.integers(1, 3))):
        if draw(st.integers(0, 2)) == 2:
            parts = draw(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 10)), min_size=2, max_size=3))
            one = TensorSpec.fused("t", (sum(size for size, _ in parts),), [*starmap(spec, parts)])
            found.append((one, draw(st.integers(1, 8))))
            continue
        block, period = draw(st.integers(1, 10)), draw(st.sampled_from((0, 0, 0, 2, 3, 5, 6)))
        step = period or draw(st.sampled_from((1, block)))  # Half of the tensors have whole blocks only.
        found.append((spec(step * draw(st.integers(1, max(1, 40 // step))), block, period), draw(st.integers(1, 8))))
    return found


def kinds_of(group):
    return [Kind.of(one) for one, count in group for _ in range(count)]


def smallest_start(one, shard):
    """By offset in a shard: the smallest start from there at which no block is cut; None if there is none."""

    legal, first = set(), 0
    for part in one.segments or (one,):
        period = part.period or part.numel
        legal |= {first + cut for cut in range(part.numel) if cut % period % part.block == 0}
        first += part.numel

    def cuts_a_block(start):
        return any(cut not in legal for cut in range(shard - start, one.numel, shard))

    good = [start for start in range(shard) if not cuts_a_block(start)]
    return [next((start for start in good if start >= offset), shard + good[0] if good else None) for offset in range(shard)]


def fits(group, ranks, shard):
    """Whether the tensors fit, over all orders: by how many of each kind are placed, the smallest end of any order."""
    if sum(one.numel * count for one, count in group) > ranks * shard:
        return False
    starts = [smallest_start(one, shard) for one, _ in group]
    none = (0,) * len(group)
    ends = {none: 0}
    for counts in itertools.product(*(range(count + 1) for _, count in group)):
        for kind, (one, _) in enumerate(group):
            end = ends.get((*counts[:kind], counts[kind] - 1, *counts[kind + 1 :]))
            start = None if end is None else starts[kind][end % shard]
            if start is not None and (new := end - end % shard + start + one.numel) <= ranks * shard:
                ends[counts] = min(new, ends.get(counts, new))
    return tuple(count for _, count in group) in ends


class BoundTest(unittest.TestCase):
    @pytest.mark.slow
    @settings(max_examples=600, deadline=None)
    @given(groups(), st.integers(1, 24), st.sampled_from((1, 1, 2, 4)))
    def test_no_layout_is_below_the_bound(self, group, ranks, alignment):
        self.check_layouts(group, ranks, alignment)

    @pytest.mark.slow
    @settings(max_examples=10000, deadline=None)
    @given(groups(), st.integers(1, 24), st.sampled_from((1, 1, 2, 4)))
    def test_no_layout_of_many_is_below_the_bound(self, group, ranks, alignment):
        self.check_layouts(group, ranks, alignment)

    def check_layouts(self, group, ranks, alignment):
        bound = lower_bound(kinds_of(group), ranks, alignment).shard
        self.assertEqual(bound % alignment, 0)
        lowest = max(alignment, bound // 2 // alignment * alignment)
        for shard in range(lowest, bound, alignment):
            self.assertFalse(fits(group, ranks, shard), shard)

    @settings(max_examples=500, deadline=None)
    @given(groups(), st.integers(1, 24), st.sampled_from((1, 1, 2, 4)), st.integers(1, 40))
    def test_a_rule_excludes_only_sizes_that_do_not_fit(self, group, ranks, alignment, multiple):
        self.check_rules(group, ranks, alignment, multiple)

    @pytest.mark.slow
    @settings(max_examples=10000, deadline=None)
    @given(groups(), st.integers(1, 24), st.sampled_from((1, 1, 2, 4)), st.integers(1, 40))
    def test_a_rule_excludes_only_sizes_of_many_that_do_not_fit(self, group, ranks, alignment, multiple):
        self.check_rules(group, ranks, alignment, multiple)

    def check_rules(self, group, ranks, alignment, multiple):
        kinds, start = kinds_of(group), Bound(multiple * alignment, "")
        counts = Counter(kinds)
        raised = [_bound._of_divisor(counts, ranks, divisor, start) for divisor in range(2, 11)]
        raised += [_bound._of_single_cuts(counts, ranks, alignment, start), _bound._of_whole_shards(kinds, alignment, start)]
        for shard in range(start.shard, max(bound.shard for bound in raised), alignment):
            self.assertFalse(fits(group, ranks, shard), shard)

    def test_a_plan_that_fits_is_not_below_the_bound(self):
        self.check_plans((("deepseek-v3", rows(16), 64), ("qwen3-30b-a3b", rows(16), 64), ("qwen3-30b-a3b", rows(128), 512)))

    @pytest.mark.slow
    def test_no_plan_that_fits_is_below_the_bound(self):
        self.check_plans(itertools.product(("deepseek-v3", "qwen3-30b-a3b"), (rows(16), rows(128)), (64, 512, 1024)))

    def check_plans(self, cases):
        """The groups of the models, planned from the trivial bound on."""
        for model, granularity, ranks in cases:
            loaded = load_model(model)
            for kind in ModelPlanner(loaded, granularity_policy(granularity, False), 64).kinds:
                tensors = [Kind.of(one) for one in kind.tensors]
                trivial = -(-sum(one.numel for one in tensors) // (64 * ranks)) * 64
                bound = lower_bound(tensors, ranks, 64).shard
                for _, order in sorted_and_permuted(tensors, 0):
                    shard = planner.smallest_shard([tensors[i] for i in order], ranks, 64, trivial)
                    self.assertGreaterEqual(shard, bound, (model, granularity, ranks))

    def check_models(self, model, granularity, expected):
        loaded = load_model(model)
        plans = ModelPlanner(loaded, granularity_policy(granularity, not loaded.has_experts), 64)
        found = {}
        for ranks in expected:
            plan = plans.plan(ranks)
            found[ranks] = tuple(round(100 * one.padding_fraction, 2) for one in (plan.ragged, plan.bound))
        self.assertEqual(found, expected)

    @pytest.mark.slow
    def test_the_bound_of_models(self):
        """Padding of the plan and of the bound, in per cent."""
        expected = {64: (0.02, 0.02), 320: (0.23, 0.23), 512: (0.31, 0.31), 1024: (2.63, 2.63), 2048: (30.47, 30.47)}
        self.check_models("deepseek-v3", rows(128), expected)
        self.check_models("deepseek-v3", elements(), {1024: (0.0, 0.0)})
        self.check_models("qwen3-30b-a3b", rows(16), {64: (0.08, 0.0), 512: (0.95, 0.95)})
        self.check_models(
            "qwen3-30b-a3b", rows(128), {128: (0.95, 0.29), 256: (2.27, 0.95), 320: (0.95, 0.95), 512: (7.54, 4.9)}
        )
        self.check_models("gpt-oss-120b", rows(128), {512: (5.68, 5.68)})

    def test_what_raises_the_bound_of_experts(self):
        """An expert of DeepSeek-V3 in units of 131,072 elements: 16 blocks of 7, or 56 of 2. All elements fit at 86."""
        experts = [*[Kind.of(spec(112, 7))] * 514, *[Kind.of(spec(112, 2))] * 257]
        counts = Counter([*experts, Kind.of(spec(1427, 1))])

        def divisor(number, shard):
            return _bound._of_divisor(counts, 1024, number, Bound(shard, "")).shard

        self.assertEqual([divisor(7, shard) for shard in (84, 86, 87, 88)], [87, 87, 87, 88])
        self.assertEqual([divisor(2, shard) for shard in (84, 85, 87)], [84, 85, 87])

        def cuts(shard):
            return _bound._of_single_cuts(counts, 1024, 1, Bound(shard, "")).shard

        # At even sizes, the experts of blocks of 2 may contain whole shards.
        self.assertEqual([cuts(shard) for shard in (84, 85, 86, 87, 88, 89)], [84, 86, 86, 88, 88, 90])
        self.assertEqual(lower_bound([*counts.elements()], 1024, 1).shard, 88)

    def test_how_many_shards_another_tensor_touches(self):
        """Ten tensors of 7 in one block each, on ten ranks: a shard of 8 that no other tensor touches loses 1."""

        def bound(numel):
            tensors = Counter([*[Kind.of(spec(7, 7))] * 10, Kind.of(spec(numel, 1))])
            return _bound._of_divisor(tensors, 10, 7, Bound(8, ""))

        self.assertEqual(bound(9), Bound(12, "only multiples of 7 elements in at least 8 of 10 shards"))
        self.assertEqual(bound(10), Bound(11, "only multiples of 7 elements in at least 7 of 10 shards"))
        self.assertEqual([bound(numel).shard for numel in (0, 1, 2, 3)], [8, 8, 8, 9])

    def test_the_size_at_which_more_parts_share_shards(self):
        """Tensors of 100 elements, cut once: n of them take n + 1 shards, up to the size at which n grows."""

        def cuts(shard, number, ranks, *others):
            tensors = Counter([*others, *[Kind.of(spec(100, 99))] * number])
            return _bound._of_single_cuts(tensors, ranks, 1, Bound(shard, "")).shard

        self.assertEqual([cuts(60, 10, ranks) for ranks in (19, 20)], [67, 60])  # 1 takes 2 up to two thirds.
        self.assertEqual([cuts(67, 10, ranks) for ranks in (14, 15)], [75, 67])  # 2 take 3 up to three quarters.
        self.assertEqual([cuts(75, 9, ranks) for ranks in (11, 12)], [80, 75])  # 3 take 4 up to four fifths.
        self.assertEqual(cuts(49, 1, 100), 50)  # Two parts of at most 49 are not 100.
        self.assertEqual(cuts(100, 9, 1), 100)  # Nothing is cut.
        for numel, inside in ((398, 2), (399, 3)):  # This tensor contains shards of up to 100 elements, which have no parts.
            longer = Kind.of(spec(numel, 1))
            self.assertEqual([cuts(75, 9, ranks + inside, longer) for ranks in (11, 12)], [80, 75])
        shorter = [Kind.of(spec(62, 61))] * 5  # They add little: they lose 2 at most.
        self.assertEqual([cuts(60, 10, ranks, *shorter) for ranks in (19, 20)], [67, 60])
        self.assertEqual(cuts(60, 10, 19, Kind.of(spec(100, 31))), 67)  # Not 62, which is a multiple of 31.

    @settings(max_examples=300, deadline=None)
    @given(groups(), st.integers(1, 24), st.randoms(use_true_random=False))
    def test_the_bound_does_not_depend_on_the_order(self, group, ranks, random):
        kinds = kinds_of(group)
        shuffled = random.sample(kinds, len(kinds))
        self.assertEqual(lower_bound(shuffled, ranks, 1).shard, lower_bound(kinds, ranks, 1).shard)
