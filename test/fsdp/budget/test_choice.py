"""The choice of fit, on curves that are written down or random, beside all sets of units."""

import itertools
import random
import unittest

from torch_ragged.fsdp.budget._choice import (
    Choice,
    Needs,
    NothingFits,
    Offloading,
    Saving,
    _by_effect,
    _candidates,
    _exchanges,
    _Peaks,
    cheapest,
    extremes,
)
from torch_ragged.fsdp.budget._dry_run import Curve, RecordedCall


def curve_of(kept, working=None, base=0):
    """Units in a row: forward of each, then backward of the last one first. ``kept`` bytes each."""
    count = len(kept)
    calls, peaks, labels = [], [base] * (4 * count + 1), ["forward"]
    for index in range(count):
        labels += [f"forward of {index}", f"after forward of {index}"]
    for index in reversed(range(count)):
        labels += [f"backward of {index}"] * 2
    for place, index in enumerate(reversed(range(count))):
        begin, again = 1 + 2 * index, 1 + 2 * count + 2 * place
        most = kept[index] if working is None else working[index]
        peaks[again], peaks[again + 1] = base + most, base + kept[index]
        calls.append(RecordedCall(str(index), begin, begin + 1, again, again, again + 1, kept[index], most))
    return Curve(peaks, [base] * len(peaks), labels, calls)


def brute(needs, device_bytes):
    """The least seconds of all ways to hold each unit, and fractions, by the curve alone."""
    best = None
    ways = [["kept", *["again"] * (unit in needs.seconds), *["away"] * (unit in needs.offloads)] for unit in map(str, range(6))]
    kept = {call.unit: call.kept for call in needs.curve.calls}
    for chosen in itertools.product(*ways):
        held, took, elsewhere = list(needs.curve.peaks), 0.0, needs.elsewhere
        for call in needs.curve.calls:
            way, more = chosen[int(call.unit)], {}
            if way == "again":
                took += needs.seconds[call.unit]
            elif way == "away":
                cost = needs.offloads[call.unit]
                took, elsewhere, more = took + cost.seconds, elsewhere - cost.nbytes, needs.curve.offloaded_of(call, cost.left)
            else:
                more = needs.curve.kept_of(call)
            for at, nbytes in more.items():
                held[at] += nbytes
        assert all(needs.offloads[unit].nbytes <= kept[unit] for unit in needs.offloads)
        staging = needs.staging if "away" in chosen else 0
        for step in range(101):
            away = step / 100
            windows = min(needs.most_windows, away * needs.window)
            if away * needs.states > elsewhere:
                break
            if needs.fixed + staging + max(held) + (1 - away) * needs.states + windows <= device_bytes:
                seconds = took + away * needs.states * needs.seconds_per_byte
                best = seconds if best is None else min(best, seconds)
                break
    return best


def savings(recomputed, offloaded=""):
    return frozenset([*map(Saving, recomputed), *(Saving(unit, True) for unit in offloaded)])


class ChoiceTest(unittest.TestCase):
    def test_with_room_nothing_is_recomputed_and_units_stay_unsharded(self):
        needs = Needs(curve_of([10, 20, 30]), {"0": 1.0, "1": 1.0, "2": 1.0}, {"1": 7, "2": 7}, fixed=100)
        self.assertEqual(extremes(needs), (130, 160))
        choice = cheapest(needs, 174)
        self.assertEqual((choice.recomputed, choice.unsharded, choice.peak), (frozenset(), ("1", "2"), 174))
        self.assertEqual(cheapest(needs, 173).unsharded, ("2",))  # The one that backward needs first.
        choice = cheapest(needs, 160)
        self.assertEqual((choice.unsharded, choice.peak, choice.moment, choice.seconds), ((), 160, "forward of 2", 0.0))

    def test_the_cheapest_bytes_are_recomputed(self):
        needs = Needs(curve_of([10, 20, 30]), {"0": 1.0, "1": 1.5, "2": 9.0}, {}, fixed=0)
        self.assertEqual(cheapest(needs, 59).recomputed, {"0"})
        self.assertEqual(cheapest(needs, 40).recomputed, {"1"})
        self.assertEqual(cheapest(needs, 39).recomputed, {"0", "1"})
        self.assertEqual(cheapest(needs, 30).recomputed, {"0", "1"})  # The last one keeps what it would make again at once.
        with self.assertRaisesRegex(NothingFits, "the least of all choices needs 30 bytes") as caught:
            cheapest(needs, 29)
        self.assertEqual(caught.exception.least, 30)

    def test_what_a_recomputation_needs_beside_counts_for_a_unit_that_keeps(self):
        """In its forward, a unit that keeps its activations holds what the recomputation held at most."""
        needs = Needs(curve_of([10, 10], working=[50, 10]), {"0": 1.0, "1": 1.0}, {}, fixed=0)
        self.assertEqual(extremes(needs), (50, 50))
        self.assertEqual(cheapest(needs, 50).recomputed, frozenset())

    def test_states_leave_if_that_is_cheaper(self):
        cheap, dear = 0.001, 1.0
        for rate, chosen in ((cheap, (frozenset(), 0.1)), (dear, (frozenset({"0"}), 0.0))):
            needs = Needs(curve_of([10]), {"0": 2.0}, {}, fixed=0, states=100, elsewhere=100, seconds_per_byte=rate)
            curve = needs.curve
            curve.peaks[3:] = [0, 0]  # The recomputation is small.
            choice = cheapest(needs, 100)
            self.assertEqual((choice.recomputed, choice.fraction), chosen)

    def test_all_that_is_on_the_device_counts(self):
        needs = Needs(curve_of([10]), {}, {}, fixed=7, states=100, elsewhere=50, window=20, most_windows=5)
        for given, peak in ((200, 7 + 10 + 100), (80, 80), (72, 7 + 10 + 50 + 5)):
            self.assertEqual(cheapest(needs, given).peak, peak)

    def test_windows_of_states_elsewhere_count(self):
        needs = Needs(curve_of([0]), {}, {}, 0, states=1600, elsewhere=1600, seconds_per_byte=1.0, window=320, most_windows=50)
        self.assertEqual(cheapest(needs, 1600).fraction, 0.0)
        self.assertEqual(cheapest(needs, 1520).fraction, 0.0625)  # 100 bytes leave, and windows have 20.
        self.assertEqual(cheapest(needs, 50).fraction, 1.0)
        self.assertEqual(extremes(needs)[0], 50)
        self.assertRaises(NothingFits, cheapest, needs, 49)

    def test_no_more_states_leave_than_there_is_room_for(self):
        needs = Needs(curve_of([0]), {}, {}, fixed=0, states=100, elsewhere=30, seconds_per_byte=1.0)
        self.assertEqual(cheapest(needs, 70).fraction, 0.3)
        self.assertRaises(NothingFits, cheapest, needs, 69)
        needs = Needs(curve_of([0]), {}, {}, fixed=0, states=100_000, elsewhere=10)  # The least fraction.
        self.assertEqual(cheapest(needs, 99_990).fraction, 0.0001)

    def test_no_more_states_leave_than_there_are(self):
        needs = Needs(curve_of([0], base=5), {}, {}, fixed=0, states=100, elsewhere=300, seconds_per_byte=1.0)
        self.assertEqual(cheapest(needs, 5).fraction, 1.0)
        self.assertEqual(extremes(needs)[0], 5)
        self.assertRaises(NothingFits, cheapest, needs, 4)

    def test_of_units_that_cost_as_much_one_is_chosen(self):
        needs = Needs(curve_of([10, 10, 30]), {"0": 1.0, "1": 1.0}, {}, fixed=0)
        self.assertEqual(cheapest(needs, 40).recomputed, {"0"})

    def test_a_unit_that_must_keep_its_activations_does(self):
        needs = Needs(curve_of([10, 20]), {"1": 1.0}, {}, fixed=0)
        self.assertEqual(extremes(needs), (30, 30))  # The recomputation of 1 begins while 0 keeps its own.
        needs.curve.peaks[5:7] = [0, 0]
        self.assertEqual(cheapest(needs, 10).recomputed, {"1"})

    def test_a_unit_is_exchanged_for_any_other_one_and_for_as_many_as_it_takes(self):
        seconds = {"0": 1.0, "1": 2.0, "2": 3.0, "3": 4.0}
        needs = Needs(curve_of([10, 30, 10, 30, 40]), seconds, {}, fixed=0)
        found = list(_exchanges(needs, _Peaks(needs), savings("23"), Saving("3"), 80))
        # 0 and 1 would replace 3. Beside them, 2 is not needed any more, and it is the dearest.
        self.assertEqual(found, [savings("2"), savings("02"), savings("12"), savings("01")])

    def test_units_are_tried_in_the_order_of_forward_by_rate_and_by_effect(self):
        needs = Needs(curve_of([10, 30]), {"0": 1.0, "1": 2.0}, {}, fixed=0)
        expected = map(savings, ["", "0", "01", "1", "01", "0", "01"])
        self.assertEqual(list(_candidates(needs, _Peaks(needs))), list(expected))

    def test_the_unit_with_most_effect_a_second_is_tried_first(self):
        # The last one would be made again at the peak of backward.
        for seconds, order in (((1.0, 1.0, 4.0), "102"), ((0.1, 0.6, 4.0), "012")):
            needs = Needs(curve_of([10, 30, 20]), dict(zip("012", seconds)), {}, fixed=0)
            self.assertEqual(_by_effect(needs, _Peaks(needs), list(map(Saving, "210"))), list(map(Saving, order)))

    def test_activations_leave_if_that_is_cheaper_and_there_is_room(self):
        def needs(elsewhere, copies=0.5, **options):
            offloads = {unit: Offloading(copies, 100, 0) for unit in "012"}
            return Needs(curve, dict.fromkeys("0123", 1.0), {}, 0, 0, elsewhere, offloads=offloads, **options)

        # Backward begins small, so that what is kept counts at the end of forward only.
        curve = curve_of([100] * 4)
        curve.peaks[9:] = [0] * 8
        self.assertEqual(extremes(needs(300)), (0, 400))
        self.assertEqual(cheapest(needs(300), 300), Choice(frozenset(), frozenset("0"), 0.0, (), 300, "forward of 3", 0.5))
        choice = cheapest(needs(300, copies=0.25, staging=40), 300)  # What they go through has no room beside.
        self.assertEqual((choice.offloaded, choice.seconds), (frozenset("01"), 0.5))
        choice = cheapest(needs(100), 200)
        self.assertEqual((len(choice.offloaded), len(choice.recomputed), choice.seconds), (1, 1, 1.5))
        self.assertEqual(len(cheapest(needs(99), 200).recomputed), 2)
        self.assertEqual(len(cheapest(needs(300, copies=1.5), 200).recomputed), 2)

    def test_states_and_activations_share_the_room_elsewhere(self):
        curve = curve_of([100, 0, 100])
        curve.peaks[7:] = [0] * 6
        for room, choice in ((150, ((), "0", 0.5)), (149, ("0", (), 0.5)), (200, ((), "0", 0.5))):
            needs = Needs(curve, {"0": 5.0}, {}, 0, 100, room, 0.001, offloads={"0": Offloading(1.0, 100, 0)})
            found = cheapest(needs, 150)
            self.assertEqual((found.recomputed, found.offloaded, found.fraction), (*map(frozenset, choice[:2]), choice[2]))

    def test_moments_with_offloaded_activations(self):
        """They are there in their own forward and backward, and in those of the next unit. What cannot leave stays."""
        curve = curve_of([10, 20, 40], base=100)
        first, second, last = curve.calls[::-1]
        kept = curve.kept_of(first)
        self.assertEqual(curve.offloaded_of(first, 3), {**kept, **dict.fromkeys(range(second.end, second.again), 3)})
        self.assertEqual(sum(value == 10 for value in kept.values()) - (second.again - second.end), 5)
        self.assertEqual(curve.offloaded_of(last, 3), curve.kept_of(last))
        late = first._replace(again=6, again_ends=7)  # Its backward comes before that of the next unit.
        self.assertEqual(set(curve.offloaded_of(late, 3)), set(curve.kept_of(late)))

    def test_random_models_are_near_the_best_of_all_choices(self):
        self.check_random_models(60, lambda generator, kept: {})

    def test_random_models_with_offloads_are_near_the_best_of_all_choices(self):
        def offloads(generator, kept):
            units = {
                str(unit): Offloading(generator.uniform(0, 2.0), nbytes - (left := generator.randint(0, nbytes // 3)), left)
                for unit, nbytes in enumerate(kept)
                if generator.random() < 0.8
            }
            return {"offloads": units, "staging": generator.choice([0, 5])}

        self.check_random_models(60, offloads)

    def check_random_models(self, count, offloads):
        generator, ratios = random.Random(0), []
        for _ in range(count):
            count = generator.randint(1, 6)
            kept = [generator.randint(0, 50) for _ in range(count)]
            working = [each + generator.randint(0, 20) for each in kept]
            curve = curve_of(kept, working, generator.randint(0, 20))
            units = [str(index) for index in range(count) if generator.random() < 0.8]
            states = generator.choice([0, 100, 400])
            needs = Needs(
                curve,
                {unit: generator.uniform(0.1, 3.0) for unit in units},
                {},
                fixed=generator.randint(0, 30),
                states=states,
                elsewhere=generator.choice([0, states // 2, states]),
                seconds_per_byte=generator.uniform(0, 0.1),
                window=generator.choice([0, states // 4]),
                most_windows=generator.choice([0, 20]),
                **offloads(generator, kept),
            )
            least, most = extremes(needs)
            self.assertEqual(cheapest(needs, most).seconds, 0.0)
            self.assertLessEqual(cheapest(needs, least).peak, least)
            self.assertRaises(NothingFits, cheapest, needs, least - 1)
            for part in (0.2, 0.5, 0.8):
                given = round(least + part * (most - least))
                best, choice = brute(needs, given), cheapest(needs, given)
                self.assertLessEqual(choice.peak, given)
                if best is not None:  # Otherwise, the steps of brute are too coarse.
                    ratios.append((choice.seconds + 1e-9) / (best + 1e-9))
        self.assertGreater(len(ratios), 100)
        self.assertLess(max(ratios), 1.25)  # No search of this kind finds the best one of each model.
        self.assertLess(sum(ratio > 1.05 for ratio in ratios), 0.02 * len(ratios))


if __name__ == "__main__":
    unittest.main()
