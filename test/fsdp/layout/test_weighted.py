"""The planner for shards of weights against brute force over all orders and offsets, its bound, and the layout's own checks."""

import itertools
import random
import unittest

from planner_oracle import fits, is_cut

from torch_ragged.fsdp import TensorSpec, plan_layout, segments
from torch_ragged.fsdp.layout._weighted import WeightedLayout
from torch_ragged.granularity import elements, rows, tensor


def spec(numel, block, name="t"):
    return TensorSpec(name, (numel,), (0,), block)


def edges_of(weights, unit):
    return [0, *itertools.accumulate(weight * unit for weight in weights)]


def violations(layout):
    """What is wrong with a layout, element by element."""
    owners, edges = [None] * layout.numel, list(layout.edges[:-1])
    for index, (offset, one) in enumerate(zip(layout.offsets, layout.tensors, strict=True)):
        for element in range(offset, offset + one.numel):
            if owners[element] is not None:
                return f"{one.name} overlaps {owners[element]}"
            owners[element] = one.name
        for edge in edges:
            if is_cut(one, edge - offset):
                return f"{edge} cuts {one.name}"
        ranges = [layout.local_range(index, rank) for rank in range(layout.ranks)]
        if sum(stop - start for start, stop in ranges) != one.numel:
            return f"{ranges} of {one.name}"
        if list(layout.placement(index).local_units) != [stop - start for start, stop in ranges] and one.numel:
            return f"{layout.placement(index)} of {one.name}, {ranges}"
    return "unaligned" if any(edge % layout.alignment for edge in edges) else ""


def cases(number, seed, most_numel=14):
    rng = random.Random(seed)
    for _ in range(number):
        tensors = [spec(rng.randint(1, most_numel), rng.randint(1, 7), f"t{i}") for i in range(rng.randint(1, 4))]
        weights = [rng.randint(0, 4) for _ in range(rng.randint(2, 4))]
        if any(weights) and len(set(weights)) > 1:
            yield tensors, weights, rng.choice((1, 1, 2, 4))


class WeightedPlannerTest(unittest.TestCase):
    def test_small_groups_are_planned_optimally(self):
        for tensors, weights, alignment in cases(200, 0):
            layout = plan_layout(tensors, len(weights), alignment, weights=weights)
            self.assertIsInstance(layout, WeightedLayout)
            self.assertEqual(violations(layout), "", layout)
            found, bound = (each // max(layout.weights) for each in (layout.shard_numel, layout.lower_bound))
            optimum = next(
                unit for unit in itertools.count(alignment, alignment) if fits(tensors, edges_of(layout.weights, unit))
            )
            self.assertEqual(found, optimum, (tensors, weights, alignment))
            self.assertLessEqual(bound, optimum, (tensors, weights, alignment))

    def test_larger_groups_are_valid_and_near_the_bound(self):
        padding = []
        for tensors, weights, alignment in cases(600, 1, most_numel=400):
            layout = plan_layout(tensors, len(weights), alignment, weights=weights)
            self.assertEqual(violations(layout), "", layout)
            self.assertGreaterEqual(layout.shard_numel, layout.lower_bound)
            padding.append(layout.shard_numel / layout.lower_bound)
        self.assertLess(sum(padding) / len(padding), 1.03)

    def test_blocks_of_a_model_reach_the_bound(self):
        """A layer with matrices of blocks of rows: the padding of weights is that of the bound."""
        cut, shapes = rows(128), ((4096, 1024), (1024, 4096), (4096, 1024), (4096,), (1024,))
        specs = [(cut if len(s) == 2 else elements()).tensor_spec(f"w{i}", s) for i, s in enumerate(shapes)]
        for weights, above in (([3, 2, 0], 1), ([80, 141], 1), ([1, 0, 0, 9], 1), ([4] * 6 + [3] * 2, 16 / 13)):
            layout = plan_layout(specs, len(weights), 64, weights=weights)
            self.assertEqual(layout.shard_numel, round(layout.lower_bound * above), (weights, layout.forced_by))
            self.assertLess(layout.padding_fraction, 0.26, weights)

    def test_segments_and_whole_tensors_are_kept(self):
        fused = segments((6, 4), [tensor(), rows(2)]).tensor_spec("fused", (10, 3))
        layout = plan_layout([fused, spec(11, 1)], 3, weights=[2, 0, 3])
        self.assertEqual(layout.local_range(0, 1)[0], layout.local_range(0, 1)[1])
        cuts = [layout.local_range(0, rank)[1] for rank in range(2)]
        self.assertTrue(all(cut % 3 == 0 and (cut // 3 in (0, 6, 8, 10)) for cut in cuts), cuts)
        layout = plan_layout([fused], 2, weights=[2, 1])
        self.assertEqual([layout.local_range(0, rank) for rank in range(2)], [(0, 24), (24, 30)])
        whole = tensor().tensor_spec("whole", (7, 3))
        layout = plan_layout([whole], 2, weights=[1, 6])
        self.assertIn(21, [stop - start for start, stop in (layout.local_range(0, rank) for rank in range(2))])

    def test_the_longest_block_must_fit_into_the_largest_shard(self):
        layout = plan_layout([spec(8, 1), spec(6, 6)], 9, weights=[2] + [1] * 8)
        self.assertEqual((layout.lower_bound, layout.shard_numel), (6, 6))
        self.assertIn("a block of 6 elements must fit into the largest shard", layout.forced_by)

    def test_equal_weights_have_the_layout_of_equal_shards(self):
        tensors = [spec(9, 3), spec(5, 1)]
        self.assertEqual(plan_layout(tensors, 3, weights=[7, 7, 7]), plan_layout(tensors, 3))

    def test_wrong_layouts_are_refused(self):
        good = plan_layout([spec(6, 3, "a"), spec(4, 2, "b")], 2, weights=[2, 1])
        arguments = {name: getattr(good, name) for name in good.__dataclass_fields__}
        for change, text in (
            ({"offsets": (0, 3)}, "overlaps"),
            ({"offsets": (good.shard_numel - 1, 0)}, "cuts a at element 1"),
            ({"offsets": (0, good.numel)}, "beyond the buffer"),
            ({"weights": (2, 1, 1)}, "2 ranks"),
        ):
            with self.assertRaisesRegex(ValueError, text):
                WeightedLayout(**{**arguments, **change})
        for weights in ([1], [1, -1], [0, 0], [1, 2.0], "ab", [1, True], {1, 2}, 3):
            with self.assertRaisesRegex(ValueError, "weights"):
                plan_layout([spec(4, 1)], 2, weights=weights)
        with self.assertRaisesRegex(ValueError, "threshold"):
            plan_layout([spec(4, 1)], 2, weights=[1, 2], threshold=0.1)


if __name__ == "__main__":
    unittest.main()
