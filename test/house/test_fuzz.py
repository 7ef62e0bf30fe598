"""Random cases agree with one process, a planted defect is found, and a hang is a failure: see test/fuzz/run.py."""

import sys
import unittest
from pathlib import Path

import pytest
from common import run_ranks, stop_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "fuzz"))

import fuzz_case  # noqa: E402
from fuzz_cover import RANDOM  # noqa: E402
from fuzz_workers import Workers  # noqa: E402

PROGRAMS = {1: [104, 113, 123, 127, 139, 160, 162, 164, 165, 178, 183, 190], 2: [101, 105, 108, 109, 110]}
"""Of each size: seeds of programs that are quick, and not refused."""


def seeds_of(kind, size, count, first=0):
    """The first seeds whose cases need that many ranks."""
    found, seed = [], first
    while len(found) < count:
        if fuzz_case.size_of(kind, seed) == size:
            found.append(seed)
        seed += 1
    return found


class FuzzTest(unittest.TestCase):
    def check(self, kind, size, count, first=0):
        seeds = seeds_of(kind, size, count, first)
        for answers in run_ranks(size, fuzz_case.run_seeds, kind, seeds):
            for seed, status, details in answers:
                self.assertIn(status, ("ok", "refused"), f"{kind} seed {seed}:\n{fuzz_case.describe(kind, seed)}\n{details}")
            self.assertEqual([seed for seed, _, _ in answers], seeds)

    def test_some_random_models_train_as_in_one_process(self):
        self.check("fsdp", 2, 3)

    def test_each_legal_pair_of_values_is_in_a_run_and_some_of_them_train_as_in_one_process(self):
        for kind, least in (("pairs", 5000), ("states", 900), ("plans", 4900)):
            cover = fuzz_case.KINDS[kind].COVER
            self.assertGreater(len(cover.legal), least)
            self.assertEqual(cover.legal - set().union(*map(cover.pairs_of, cover.runs)), set())
            for run in cover.runs:
                self.assertEqual([pair for pair in cover.pairs_of(run) if cover.why_not(pair)], [])
        runs, refused = len(fuzz_case.KINDS["pairs"].COVER.runs), [pair for pair, _ in fuzz_case.KINDS["pairs"].COVER.refused]
        self.check("pairs", 2, 3)
        self.assertGreater(len(refused), 50)
        self.check("pairs", 2, 2, runs)
        self.check("states", 4, 2)
        self.check("plans", 2, 2)

    @pytest.mark.slow
    def test_each_legal_pair_of_values_trains_as_in_one_process_and_others_are_refused(self):
        workers = Workers()
        self.addCleanup(workers.stop)
        for kind in ("pairs", "states", "plans"):
            cover = fuzz_case.KINDS[kind].COVER
            for size in (1, 2, 3, 4):
                seeds = [each for each in range(len(cover.runs) + len(cover.refused)) if fuzz_case.size_of(kind, each) == size]
                for seed, status, details in workers.run(kind, seeds, size) if seeds else ():
                    self.assertEqual(status, "ok", f"{kind} {seed}:\n{details}")

    def test_a_wrong_divisor_is_found_by_pairs(self):
        for answers in run_ranks(2, fuzz_case.run_seeds, "pairs", seeds_of("pairs", 2, 2), "divisor"):
            self.assertEqual(answers[-1][1], "failed")
            self.assertIn("Mismatch", answers[-1][2])

    def test_some_random_programs_on_dtensors_have_the_values_of_plain_tensors(self):
        self.check("dtensor", 2, 6)

    def test_some_random_transfers_are_right_bit_by_bit(self):
        self.check("transfer", 4, 12)

    @pytest.mark.slow
    def test_some_random_plans_train_as_in_one_process(self):
        self.check("plan", 2, 4)

    def check_programs(self, size, seeds):
        for answers in run_ranks(size, fuzz_case.run_seeds, "program", seeds):
            self.assertEqual([seed for seed, status, _ in answers if status == "ok"], seeds, answers[-1])

    @pytest.mark.slow
    def test_some_random_programs_are_in_static_mode_as_in_eager_mode_and_as_in_one_process(self):
        self.check_programs(1, PROGRAMS[1][:3])
        self.check_programs(2, PROGRAMS[2][:2])

    @pytest.mark.slow
    def test_more_random_programs_are_in_static_mode_as_in_eager_mode_and_as_in_one_process(self):
        self.check_programs(1, PROGRAMS[1][3:])
        self.check_programs(2, PROGRAMS[2][2:])

    @pytest.mark.slow
    def test_faults_in_guards_and_gradients_of_static_modules_are_found(self):
        for fault in ("facts", "kinds", "leaves", "hooks"):
            for answers in run_ranks(1, fuzz_case.run_seeds, "program", PROGRAMS[1], fault):
                self.assertEqual(answers[-1][1], "failed", fault)
        for answers in run_ranks(2, fuzz_case.run_seeds, "program", PROGRAMS[2], "reduction"):
            self.assertEqual(answers[-1][1], "failed")

    @pytest.mark.slow
    def test_averages_of_losses_that_a_plan_takes_by_rank_are_found(self):
        for answers in run_ranks(2, fuzz_case.run_seeds, "plan", seeds_of("plan", 2, 12), "average"):
            self.assertEqual(answers[-1][1], "failed")

    @pytest.mark.slow
    def test_a_wrong_plan_that_is_carried_out_is_found(self):
        seeds = [seed for seed in seeds_of("plan", 2, 40) if fuzz_case.KINDS["plan"].random_case(seed)["wrong"]]
        for answers in run_ranks(2, fuzz_case.run_seeds, "plan", seeds[:6], "lenient"):
            self.assertEqual(answers[-1][1], "failed")
            self.assertIn("is not refused", answers[-1][2])

    def test_some_random_draws_give_the_numbers_of_one_device(self):
        self.check("random", 2, 8)

    @pytest.mark.slow
    def test_two_numbers_in_each_others_place_are_found(self):
        for answers in run_ranks(2, fuzz_case.run_seeds, "random", seeds_of("random", 2, 8), "draw"):
            self.assertEqual(answers[-1][1], "failed")
            self.assertIn("expected", answers[-1][2])

    def test_a_wrong_division_of_gradients_is_found(self):
        for answers in run_ranks(2, fuzz_case.run_seeds, "fsdp", seeds_of("fsdp", 2, 4), "divisor"):
            self.assertEqual(answers[-1][1], "failed")
            self.assertIn("gradient of", answers[-1][2])

    def test_a_checksum_that_sees_no_change_is_found(self):
        for answers in run_ranks(4, fuzz_case.run_seeds, "transfer", seeds_of("transfer", 4, 12), "checksum"):
            self.assertEqual(answers[-1][1], "failed")
            self.assertIn("expected", answers[-1][2])

    def test_a_case_is_the_same_each_time_it_is_made(self):
        for kind in fuzz_case.KINDS:
            self.assertEqual(fuzz_case.describe(kind, 5), fuzz_case.describe(kind, 5))
            self.assertNotEqual(fuzz_case.describe(kind, 5), fuzz_case.describe(kind, 6))

    @pytest.mark.slow
    def test_a_rank_that_never_answers_is_a_failure_with_its_stack_and_the_next_case_runs(self):
        workers = Workers(limit=5.0)
        self.addCleanup(workers.stop)
        first, second = seeds_of("dtensor", 2, 2)
        ((seed, status, details),) = workers.run("dtensor", [first], 2, "hang")
        self.assertEqual((seed, status), (first, "hangs"))
        self.assertIn("ranks without an answer: [0, 1]", details)
        self.assertIn("_hang", details)
        ((seed, status, _),) = workers.run("dtensor", [second], 2)
        self.assertEqual((seed, status), (second, "ok"))

    @pytest.mark.slow
    def test_fifty_random_cases(self):
        stop_ranks()
        for kind in fuzz_case.KINDS:
            first = RANDOM if hasattr(fuzz_case.KINDS[kind], "COVER") else 100  # A table has random runs from there on.
            has_one_rank = kind not in ("plan", "plans")
            for size, count in ((1, 5), (2, 10), (4, 10))[not has_one_rank :]:
                self.check(kind, size, count, first)
