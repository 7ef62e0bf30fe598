"""A sample of torch's OpInfo database on ragged DTensors; the slow test runs all of it."""

import unittest

import pytest
from common import run_ranks
from op_conformance import RANKS, sweep, wrong_of


class OpConformanceTest(unittest.TestCase):
    def check(self, samples, one, share, least, timeout):
        answers = run_ranks(RANKS, sweep, ".*", samples, one, False, share, timeout=timeout)
        self.assertEqual(wrong_of(answers), [])
        self.assertGreater(sum(tally.equal for tally in answers[0].values()), least)

    def test_sampled_ops_equal_a_single_device_or_raise_a_clear_error(self):
        self.check(samples=4, one=True, share=5, least=60, timeout=400)

    @pytest.mark.slow
    def test_all_ops_equal_a_single_device_or_raise_a_clear_error(self):
        self.check(samples=3, one=False, share=1, least=10000, timeout=3 * 3600)
