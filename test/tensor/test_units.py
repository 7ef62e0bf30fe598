"""Units against tuples: what they hold, and that their cost is that of runs, not of ranks."""

import itertools
import pickle
import unittest

from hypothesis import given, settings
from hypothesis import strategies as st

from torch_ragged.tensor._units import Units

TUPLES = st.lists(st.tuples(st.sampled_from((0, 0, 1, 2, 5)), st.integers(1, 20)), max_size=6).map(
    lambda runs: tuple(itertools.chain.from_iterable((units,) * ranks for units, ranks in runs))
)
MANY = 10**12  # ranks: what takes a step for each of them never ends.


class UnitsTest(unittest.TestCase):
    @settings(max_examples=300, deadline=None)
    @given(TUPLES)
    def test_reads_as_the_tuple(self, expected):
        units = Units.of(expected)
        self.assertEqual(tuple(units), expected)
        self.assertEqual([units[rank] for rank in range(-len(units), len(units))], [*expected, *expected])
        self.assertEqual((len(units), units.total, units[1:3]), (len(expected), sum(expected), expected[1:3]))
        self.assertEqual(eval(repr(units)), expected)
        for rank in (len(units), -len(units) - 1):
            with self.assertRaises(IndexError):
                units[rank]

    @settings(max_examples=300, deadline=None)
    @given(TUPLES, st.integers(-2, 60), st.integers(-2, 60))
    def test_counts_as_the_tuple_does(self, expected, start, stop):
        units = Units.of(expected)
        owners = [rank for rank, count in enumerate(expected) for _ in range(count)]
        self.assertEqual([units.owner(unit) for unit in range(units.total)], owners)
        self.assertEqual(list(units.owners()), sorted(set(owners)))
        for rank in range(len(units)):
            self.assertEqual(units.before(rank), sum(expected[:rank]))
        self.assertEqual(tuple(units.scaled(6, 2)), tuple(3 * count for count in expected))
        self.assertEqual(units.scaled(0), Units.of((0,) * len(units)))
        inside = owners[max(start, 0) : max(stop, 0)]
        self.assertEqual(tuple(units.within(start, stop)), tuple(inside.count(rank) for rank in range(len(units))))

    @settings(max_examples=300, deadline=None)
    @given(TUPLES, TUPLES)
    def test_equal_tuples_make_equal_units(self, one, other):
        units = Units.of(one)
        for same in (Units((count, 1) for count in one), Units([*units.runs, (7, 0)]), pickle.loads(pickle.dumps(units))):
            self.assertEqual((same, hash(same), same.key), (units, hash(units), units.key))
        self.assertEqual(units == Units.of(other), one == other)

    def test_takes_no_step_per_rank(self):
        units = Units([(0, MANY), (5, 2), (0, 1), (1, MANY)])
        self.assertEqual((len(units), units.total, units[MANY + 1], units[-1]), (2 * MANY + 3, MANY + 10, 5, 1))
        self.assertEqual((units.before(MANY + 1), units.owner(12), next(units.owners())), (5, MANY + 5, MANY))
        self.assertEqual(units.within(7, MANY + 8), Units([(0, MANY + 1), (3, 1), (0, 1), (1, MANY - 2), (0, 2)]))
        self.assertEqual(units.scaled(2), Units([(0, MANY), (10, 2), (0, 1), (2, MANY)]))
        self.assertLess(len(pickle.dumps(units)), 200)
        self.assertEqual(repr(units), f"(0,) * {MANY} + (5,) * 2 + (0,) + (1,) * {MANY}")
        self.assertEqual(str(units), f"0*{MANY},5*2,0,1*{MANY}")
