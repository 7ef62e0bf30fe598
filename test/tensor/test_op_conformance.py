"""A sample of torch's OpInfo database on ragged and interleaved DTensors, and under a plan; the slow tests run all of it."""

import math
import unittest

import pytest
from common import run_ranks
from op_conformance import FAMILIES, sweep, wrong_of


class OpConformanceTest(unittest.TestCase):
    def check(self, samples, one, share, least, timeout, family="ragged"):
        answers = run_ranks(math.prod(FAMILIES[family].mesh), sweep, ".*", samples, one, False, share, family, timeout=timeout)
        self.assertEqual(wrong_of(answers), [])
        self.assertGreater(sum(tally.equal for tally in answers[0].values()), least)

    def test_sampled_ops_equal_a_single_device_or_raise_a_clear_error(self):
        self.check(samples=4, one=True, share=17, least=15, timeout=400)

    def test_sampled_ops_on_interleaved_tensors_do_too(self):
        self.check(samples=4, one=True, share=7, least=40, timeout=400, family="interleaved")

    def test_sampled_ops_under_a_plan_do_too(self):
        self.check(samples=2, one=True, share=13, least=30, timeout=400, family="plan")

    @pytest.mark.slow
    def test_all_ops_under_a_plan_do_too(self):
        for family in ("plan", "plan of one rank", "plan of three"):
            self.check(samples=2, one=False, share=1, least=10000, timeout=3 * 3600, family=family)

    @pytest.mark.slow
    def test_all_ops_on_interleaved_tensors_do_too(self):
        self.check(samples=3, one=False, share=1, least=5000, timeout=3 * 3600, family="interleaved")

    @pytest.mark.slow
    def test_all_ops_equal_a_single_device_or_raise_a_clear_error(self):
        self.check(samples=3, one=False, share=1, least=10000, timeout=3 * 3600)
