"""play and least_seconds, on a pass that is written down."""

import itertools
import unittest

from torch_ragged.fsdp.schedule._play import PartCosts, least_seconds, play
from torch_ragged.fsdp.schedule._trace import END, Moment


class PlayTest(unittest.TestCase):
    def pass_of(self, *parts):
        return [Moment(what, key, link=0, nbytes=100) for what, key in parts]

    def one_unit(self):
        return self.pass_of(
            ("issue", ("all_gather", "0")),
            ("wait", ("all_gather", "0")),
            ("mark", ("forward", "0")),
            ("mark", ("forward ends", "0")),
            ("mark", ("backward", "0")),
            ("issue", ("all_gather", "0")),
            ("wait", ("all_gather", "0")),
            ("mark", ("backward ends", "0")),
            ("issue", ("reduce_scatter", "0")),
            ("mark", END),
            ("wait", ("reduce_scatter", "0")),
        )

    def costs(self, gather, forward, backward, reduce):
        compute = {("forward", "0"): forward, ("backward", "0"): backward}
        kinds = {"all_gather": gather, "reduce_scatter": reduce}
        found = {(phase, kind, "0"): took for phase, (kind, took) in itertools.product(("forward", "backward"), kinds.items())}
        return PartCosts(compute, found)

    def test_a_chain_has_all_of_its_parts(self):
        costs = self.costs(1.0, 2.0, 4.0, 8.0)
        self.assertEqual(play(self.one_unit(), costs).seconds, 1 + 2 + 1 + 4 + 8)
        self.assertEqual(least_seconds(self.one_unit(), costs, {}, 0), 16)

    def test_each_half_has_its_own_times(self):
        took = {("forward", "all_gather", "0"): 1.0, ("backward", "all_gather", "0"): 3.0}
        costs = PartCosts({("forward", "0"): 2.0, ("backward", "0"): 4.0}, took)
        self.assertEqual(play(self.one_unit(), costs).seconds, 1 + 2 + 3 + 4)
        self.assertEqual(least_seconds(self.one_unit(), costs, {}, 0), 1 + 2 + 3 + 4)

    def test_room_saves_the_all_gather_of_backward(self):
        costs = self.costs(1.0, 2.0, 4.0, 8.0)
        self.assertEqual(least_seconds(self.one_unit(), costs, {"0": 100}, 100), 15)
        self.assertEqual(least_seconds(self.one_unit(), costs, {"0": 100}, 25), 15.75)

    def test_an_all_gather_of_a_module_that_backward_does_not_reach_may_be_the_first(self):
        parts = self.pass_of(("mark", ("backward", "0")), ("issue", ("all_gather", "1")), ("mark", END))
        costs = PartCosts({("backward", "0"): 4.0}, {("backward", "all_gather", "1"): 1.5})
        self.assertEqual(least_seconds(parts, costs, {}, 0), 5.5)

    def test_other_collectives_have_a_time_if_one_was_recorded(self):
        parts = self.pass_of(("issue", ("all_reduce", "0")), ("wait", ("all_reduce", "0")))
        self.assertEqual(play(parts, PartCosts({}, {})).seconds, 0.0)
        spans = play(parts, PartCosts({}, {("forward", "all_reduce", "0"): 2.0})).spans
        self.assertEqual([(span.kind, span.begin, span.end) for span in spans], [("other", 0, 2), ("exposed", 0, 2)])

    def test_the_last_collectives_of_all_links_follow_the_computation(self):
        parts = self.pass_of(("mark", ("backward", "0")), ("issue", ("all_gather", "0")))
        parts += self.pass_of(("mark", ("backward ends", "0")), ("mark", END))
        parts += [Moment("issue", (kind, "0"), link=link) for link, kind in enumerate(("reduce_scatter", "all_reduce"))]
        for reduce in (3.0, 7.0):
            took = {"all_gather": 2.0, "reduce_scatter": reduce, "all_reduce": 5.0}
            costs = PartCosts({("backward", "0"): 4.0}, {("backward", kind, "0"): each for kind, each in took.items()})
            self.assertEqual(least_seconds(parts, costs, {}, 0), 2 + 4 + max(reduce, 5))

    def test_spans_are_where_the_parts_run(self):
        spans = play(self.one_unit(), self.costs(1.0, 2.0, 4.0, 8.0)).spans
        self.assertEqual(
            [(span.kind, span.begin, span.end) for span in spans],
            [
                ("all_gather", 0, 1),
                ("exposed", 0, 1),
                ("compute", 1, 3),
                ("all_gather", 3, 4),
                ("exposed", 3, 4),
                ("compute", 4, 8),
                ("reduce_scatter", 8, 16),
                ("exposed", 8, 16),
            ],
        )


if __name__ == "__main__":
    unittest.main()
