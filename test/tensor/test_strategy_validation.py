"""Torch's validation of sharding rules on ragged placements: none is wrong, and what is wrong or missing is found."""

import unittest
from unittest import mock

import pytest
from common import enter_fake_group
from strategy_validation import RANKS, compare_operator, validation
from torch.distributed.tensor import Partial

from torch_ragged.tensor import _dispatch
from torch_ragged.tensor._local_tensor import as_rank
from torch_ragged.tensor._ops import Sharding

OPS = """
add exp lerp where clamp round logical_and sum mean norm amax cumsum softmax mm addmm bmm view t unflatten narrow split
unsqueeze expand index_select gather masked_fill nn.functional.layer_norm nn.functional.gelu nn.functional.silu
nn.functional.embedding
""".split()


@unittest.skipUnless(hasattr(validation, "validate_aten_combination"), "torch's tool takes aten calls from 2.13 on")
class StrategyValidationTest(unittest.TestCase):
    def setUp(self):
        enter_fake_group(self, RANKS)

    @pytest.mark.slow
    def test_no_rule_is_wrong(self):
        correct = {}
        for name in OPS:
            with self.subTest(name):
                stats = compare_operator(name, samples=2, incorrect_only=True)
                self.assertEqual(stats.false_positives, [])
                correct[name] = stats.true_positives
        self.assertGreater(sum(correct.values()), 250, correct)
        self.assertGreater(min(correct[name] for name in ("add", "exp", "sum", "mm", "view", "split")), 0, correct)

    def test_a_wrong_rule_is_found(self):
        def wrong(call):
            return Sharding([(arg.placements, None) for arg in call.args[:1]], (Partial(),))

        with mock.patch.object(_dispatch, "rules_of", lambda op: [wrong]):
            stats = compare_operator("exp", samples=2, incorrect_only=True)
        self.assertEqual(stats.true_positives, 0)
        self.assertIn(("P(sum)",), {found.output_placements for found in stats.false_positives})

    def test_a_rule_that_is_right_on_one_rank_only_is_found(self):
        """Each simulated rank runs its own sharding; a run that forgets its rank is wrong on the others."""
        original = _dispatch._local_sharding

        def first(op, schema):
            with as_rank(0):
                return original(op, schema)

        with mock.patch.object(_dispatch, "_local_sharding", first):
            stats = compare_operator("narrow", samples=4, incorrect_only=True)
        self.assertGreater(len(stats.false_positives), 0)

    def test_a_missing_rule_is_found(self):
        with mock.patch.object(_dispatch, "rules_of", lambda op: []):
            stats = compare_operator("exp", samples=2)
        self.assertEqual((stats.true_positives, stats.false_positives), (0, []))
        found = {(each.input_placements, each.output_placements) for each in stats.false_negatives}
        self.assertIn((("RS(0)[1,5,0,14]",), ("RS(0)[1,5,0,14]",)), found)


if __name__ == "__main__":
    unittest.main()
