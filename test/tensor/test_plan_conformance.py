"""A sample of torch's OpInfo database and modules under a plan; the slow test runs all of it."""

import unittest

import pytest
from op_conformance import check


class PlanConformanceTest(unittest.TestCase):
    def test_sampled_ops_under_a_plan_do_too(self):
        check(self, samples=2, one=True, share=23, least=15, timeout=400, family="plan")

    @pytest.mark.slow
    def test_all_ops_under_a_plan_do_too(self):
        for family in ("plan", "plan of one rank", "plan of three"):
            check(self, samples=2, one=False, share=1, least=10000, timeout=3 * 3600, family=family)
