"""Paths of plans: what they name, what they refuse, and how a prefix changes them."""

import re
import unittest

from common import error_of
from expecttest import TestCase
from hypothesis import given, settings
from hypothesis import strategies as st
from spmd_common import wrapped

from torch_ragged.spmd._paths import ActivationPath, activation_path, grad_path, matches, under
from torch_ragged.spmd._text import nearest, path_text


class ActivationPathTest(TestCase):
    def test_brackets_name_tensors_that_enter_and_leave_modules(self):
        for path, module, side, key in (
            ("<in>", "", "in", (0,)),
            ("<in:0>", "", "in", (0,)),
            ("<out>", "", "out", ()),
            ("a.b.<in:2>", "a.b", "in", (2,)),
            (r"a\.\d+\.<in:mask>", r"a\.\d+", "in", ("mask",)),
            ("a.<out:0.hidden.3>", "a", "out", (0, "hidden", 3)),
            (".*.<out:logits>", ".*", "out", ("logits",)),
            (r"(?P<which>a|b)(?<!c).<in>", r"(?P<which>a|b)(?<!c)", "in", (0,)),
        ):
            self.assertEqual(activation_path(path), ActivationPath(module, side, key), path)

    def test_a_regular_expression_without_brackets_names_parameters(self):
        for path in ("a.weight", r"(?P<n>q|k)\.weight", r"a(?<=a)\.weight", ""):
            self.assertIsNone(activation_path(path), path)

    def test_brackets_that_are_spelled_wrong_are_refused(self):
        for path in (
            "a.<inn>",
            "a.<in",
            "a.in>",
            "<input>",
            "a.<in:>",
            "a.<in:x y>",
            "a.<in>.weight",
            "a.<out:0.>",
            "<in>.<out>",
        ):
            self.assertIn("brackets that name no activation", error_of(activation_path, path), path)
        self.assertExpectedInline(
            wrapped(error_of(activation_path, "layers.<output>")),
            """\
ValueError: path "layers.<output>" has brackets that name no activation: end it with <in>, <in:2>, <in:name>,
    | <out>, <out:0>, <out:key> or <out:0.key>, and use no other < and >""",
        )

    def test_a_path_that_cannot_be_read_is_refused(self):
        self.assertExpectedInline(
            wrapped(*(error_of(activation_path, path) for path in ("mlp<in>", "a(.weight", r"a\.(b.<in>", 3))),
            """\
ValueError: path "mlp<in>" has no dot before the brackets: write "mlp.<in>"
ValueError: path "a(.weight" is no regular expression: missing ), unterminated subpattern at position 1
ValueError: path r"a\\.(b" is no regular expression: missing ), unterminated subpattern at position 3
TypeError: a path is a string, got 3""",
        )

    def test_a_gradient_is_named_behind_its_parameter(self):
        self.assertEqual(grad_path(r"a\.weight.grad"), r"a\.weight")
        self.assertEqual(grad_path(r"a\.weight\.grad"), r"a\.weight")
        self.assertIsNone(grad_path("a.weight"))
        self.assertIsNone(grad_path("a.weightgrad"))


class MatchesTest(unittest.TestCase):
    def test_a_path_matches_whole_names(self):
        names = ["a.weight", "a.weight_2", "b.a.weight", "axweight"]
        self.assertEqual(matches(r"a\.weight", names), ["a.weight"])
        self.assertEqual(matches("a.weight", names), ["a.weight", "axweight"])

    def test_nearest_names_are_one_of_those_that_differ_in_numbers(self):
        names = [f"layers.{i}.{name}.weight" for i in range(20) for name in ("q_proj", "k_proj", "norm")] + ["head.weight"]
        self.assertEqual(nearest(r"layers\.\d+\.q_prj\.weight", names, 1), ["layers.0.q_proj.weight"])
        self.assertEqual(nearest(r"layers\.[0-9]+\.nrm\.weight", names, 1), ["layers.0.norm.weight"])
        self.assertEqual(nearest("zzz", names), [])


PIECES = ("a", "bc", r"\d+", "x|y", "(a|b)", "[|]c", r"\|", "w", r"a\.b", "[ab]")
regexes = st.lists(st.sampled_from(PIECES), min_size=1, max_size=4).map("".join)
texts = st.text("abcxyw0|.", max_size=6)


class UnderTest(unittest.TestCase):
    def test_the_root_becomes_the_prefix(self):
        self.assertEqual(under("model", ""), "model")
        self.assertEqual(under("model", "<in:x>"), "model.<in:x>")
        self.assertEqual(under("", "a"), "a")

    def test_a_prefix_stands_before_every_alternative(self):
        self.assertEqual(under("m", "a|b"), r"m\.(?:a|b)")
        self.assertEqual(under("m|n", r"(a|b)\.w"), r"(?:m|n)\.(a|b)\.w")
        self.assertEqual(under("m", r"a|b.<out:0>"), r"m\.(?:a|b).<out:0>")

    @given(regexes, regexes, texts, texts)
    @settings(deadline=None)
    def test_a_name_matches_under_a_prefix_as_its_two_parts_match(self, prefix, path, first, second):
        both = re.fullmatch(under(prefix, path), f"{first}.{second}")
        if re.fullmatch(prefix, first) and re.fullmatch(path, second):
            self.assertIsNotNone(both)
        if "." not in first + second and r"\." not in prefix + path and both:
            self.assertTrue(re.fullmatch(prefix, first) and re.fullmatch(path, second))

    @given(st.text(max_size=8))
    @settings(deadline=None)
    def test_the_text_of_a_path_is_the_path(self, path):
        self.assertEqual(eval(path_text(path)), path)


if __name__ == "__main__":
    unittest.main()
