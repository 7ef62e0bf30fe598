"""A sample of torch's OpInfo database on ragged and interleaved DTensors; the slow tests run all of it."""

import unittest

import pytest
from op_conformance import check


class OpConformanceTest(unittest.TestCase):
    def test_sampled_ops_equal_a_single_device_or_raise_a_clear_error(self):
        check(self, samples=4, one=True, share=17, least=15, timeout=400)

    def test_sampled_ops_on_interleaved_tensors_do_too(self):
        check(self, samples=4, one=True, share=7, least=40, timeout=400, family="interleaved")

    @pytest.mark.slow
    def test_all_ops_on_interleaved_tensors_do_too(self):
        check(self, samples=3, one=False, share=1, least=5000, timeout=3 * 3600, family="interleaved")

    @pytest.mark.slow
    def test_all_ops_equal_a_single_device_or_raise_a_clear_error(self):
        check(self, samples=3, one=False, share=1, least=10000, timeout=3 * 3600)
