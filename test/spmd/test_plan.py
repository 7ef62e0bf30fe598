"""Plan, the value: rules check themselves; plans add, move, compare, print, pickle and survive JSON."""

import copy
import functools
import inspect
import json
import pickle
import unittest

import torch
from common import error_of
from expecttest import TestCase
from hypothesis import given, settings
from hypothesis import strategies as st
from spmd_common import wrapped
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from torch_ragged import RaggedShard, StridedRaggedShard
from torch_ragged.fsdp import HIERARCHICAL, ZERO1, ZERO2, ZERO3, Float8Policy, fully_shard
from torch_ragged.granularity import blocks, elements, rows, segments, tensor
from torch_ragged.spmd import INIT, RUN, Phase, Plan
from torch_ragged.spmd._paths import under
from torch_ragged.spmd._plan import _UNIT_OPTIONS, FACTORY_FUNCTIONS, ShardRule


def every_call():
    plan = Plan()
    plan.shard(r"layers\.\d+\.up\.weight", Shard(0), "tp")
    plan.shard("head.weight", Shard(0), ("dp", "tp"), phase=INIT, grad=Partial("avg"))
    plan.shard("head.weight", (Replicate(), Shard(0)), ("dp", "tp"), phase=RUN)
    plan.redistribute("mlp.<out:0.hidden>", Shard(1), "tp", src=Partial(), grad_src=Shard(1), grad_dst=Replicate())
    plan.annotate("norm.weight.grad", Partial(), "tp")
    plan.factory("", Replicate(), "tp")
    plan.factory("rotary", Shard(0), "dp", functions=("zeros", "arange"))
    plan.segments("qkv.weight", (8, 4, 4), dim=0)
    plan.unit(r"layers\.\d+", ("replicas", "dp"), granularity=rows(2), reshard_after_forward=False)
    return plan.default(Replicate())


class PlanTest(TestCase):
    def test_a_plan_prints_as_the_code_that_makes_it(self):
        self.assertExpectedInline(
            wrapped(repr(every_call())),
            """\
plan = Plan()
plan.shard(r"layers\\.\\d+\\.up\\.weight", Shard(0), "tp")
plan.shard("head.weight", Shard(0), ("dp", "tp"), phase=INIT, grad=Partial("avg"))
plan.shard("head.weight", (Replicate(), Shard(0)), ("dp", "tp"), phase=RUN)
plan.redistribute("mlp.<out:0.hidden>", Shard(1), "tp", src=Partial(), grad_src=Shard(1),
    | grad_dst=Replicate())
plan.annotate("norm.weight.grad", Partial(), "tp")
plan.factory("", Replicate(), "tp")
plan.factory("rotary", Shard(0), "dp", functions=("arange", "zeros"))
plan.segments("qkv.weight", (8, 4, 4), 0)
plan.unit(r"layers\\.\\d+", ("replicas", "dp"), granularity=rows(2), reshard_after_forward=False)
plan.default(Replicate())""",
        )
        names = {"Plan": Plan, "INIT": INIT, "RUN": RUN, "rows": rows}
        names |= {kind.__name__: kind for kind in (Shard, Replicate, Partial)}
        exec(repr(every_call()), names)
        self.assertEqual(names["plan"], every_call())

    def test_calls_chain_and_keep_their_order(self):
        plan = Plan()
        self.assertIs(plan.shard("a", Shard(0), "tp").default(Replicate()), plan)
        self.assertEqual([rule.call for rule in plan.rules], ["shard", "default"])

    def test_one_placement_holds_for_all_names(self):
        (rule,) = Plan().shard("a", Shard(0), ["dp", "tp"]).rules
        self.assertEqual(rule, ShardRule("a", (Shard(0), Shard(0)), ("dp", "tp")))

    def test_a_sum_has_the_rules_of_both_and_changes_neither(self):
        a, b = Plan().shard("a", Shard(0), "tp"), Plan().shard("b", Shard(1), "tp")
        both = a + b
        both.default(Replicate())
        self.assertEqual([len(plan.rules) for plan in (a, b, both)], [1, 1, 3])
        self.assertEqual((a + b).rules, a.rules + b.rules)
        self.assertRaises(TypeError, lambda: a + [])

    def test_a_prefix_moves_every_rule(self):
        self.assertExpectedInline(
            wrapped(repr(every_call().under("model"))),
            """\
plan = Plan()
plan.shard(r"model\\.layers\\.\\d+\\.up\\.weight", Shard(0), "tp")
plan.shard(r"model\\.head.weight", Shard(0), ("dp", "tp"), phase=INIT, grad=Partial("avg"))
plan.shard(r"model\\.head.weight", (Replicate(), Shard(0)), ("dp", "tp"), phase=RUN)
plan.redistribute(r"model\\.mlp.<out:0.hidden>", Shard(1), "tp", src=Partial(), grad_src=Shard(1),
    | grad_dst=Replicate())
plan.annotate(r"model\\.norm.weight.grad", Partial(), "tp")
plan.factory("model", Replicate(), "tp")
plan.factory(r"model\\.rotary", Shard(0), "dp", functions=("arange", "zeros"))
plan.segments(r"model\\.qkv.weight", (8, 4, 4), 0)
plan.unit(r"model\\.layers\\.\\d+", ("replicas", "dp"), granularity=rows(2), reshard_after_forward=False)
plan.default(Replicate(), under="model")""",
        )

    def test_plans_are_equal_if_their_rules_are(self):
        self.assertEqual(every_call(), every_call())
        self.assertNotEqual(every_call(), every_call().default(Replicate()))
        one, other = Plan().default(Replicate()), Plan().shard("a.weight", Shard(0), "tp")
        both = Plan().shard("a.weight", Shard(0), "tp").default(Replicate())
        self.assertEqual(one.shard("a.weight", Shard(0), "tp"), both)  # The order of rules has no meaning.
        self.assertNotEqual(other.shard("a.weight", Shard(0), "tp"), both)
        self.assertNotEqual(Plan(), [])
        self.assertRaises(TypeError, hash, Plan())

    def test_a_copy_is_equal_and_independent(self):
        for made in (pickle.loads(pickle.dumps(every_call())), copy.deepcopy(every_call())):
            self.assertEqual(made, every_call())
            made.default(Replicate())
            self.assertNotEqual(made, every_call())

    def test_a_factory_rule_holds_for_all_functions_unless_it_names_some(self):
        one, all_of_them = Plan().factory("", Shard(0), "tp", functions="zeros").factory("", Shard(0), "tp").rules
        self.assertEqual((one.functions, all_of_them.functions), (("zeros",), FACTORY_FUNCTIONS))
        self.assertTrue(all(callable(getattr(torch, name)) for name in FACTORY_FUNCTIONS))

    def test_units_take_the_options_of_fully_shard(self):
        options = set(inspect.signature(fully_shard).parameters) - {"module", "mesh", "dp_mesh_dims", "ignored_params"}
        self.assertEqual(set(_UNIT_OPTIONS), options | {"granularity"})
        plan = Plan().unit("blocks.*", "dp", weights=[3, 2, 0])
        self.assertEqual(repr(Plan.from_json(plan.to_json())), repr(plan))
        self.assertIn("weights", repr(plan))


class WrongCallsTest(TestCase):
    def test_a_rule_checks_itself_when_it_is_made(self):
        plan = Plan()
        calls = (
            lambda: plan.shard("a", Shard, "tp"),
            lambda: plan.shard("a", None, "tp"),
            lambda: plan.shard("a", Shard(0), ()),
            lambda: plan.shard("a", Shard(0), 3),
            lambda: plan.shard("a", Shard(0), ("tp", "tp")),
            lambda: plan.shard("a", (Shard(0), Replicate()), "tp"),
            lambda: plan.shard("a(", Shard(0), "tp"),
            lambda: plan.shard(3, Shard(0), "tp"),
            lambda: plan.shard("a", Shard(0), "tp", phase="INIT"),
            lambda: plan.shard("<in>", Shard(0), "tp", phase=RUN),
            lambda: plan.shard("<inn>", Shard(0), "tp"),
            lambda: plan.shard("a", Shard(0), "tp", grad=0),
            lambda: plan.redistribute("a.weight", Shard(0), "tp"),
            lambda: plan.redistribute("<in>", Shard(0), "tp", src="R"),
            lambda: plan.annotate("a.weight", Partial(), "tp"),
            lambda: plan.annotate("a.<in>", "P", "tp"),
            lambda: plan.factory("<in>", Shard(0), "tp"),
            lambda: plan.factory("", Shard(0), "tp", functions="zeroes"),
            lambda: plan.factory("", Shard(0), "tp", functions=()),
            lambda: plan.segments("<in>", (1, 2), 0),
            lambda: plan.segments("a", (3,), 0),
            lambda: plan.segments("a", (3, -1), 0),
            lambda: plan.segments("a", (3, 1), "0"),
            lambda: plan.unit("a", "dp", reshard_after_forwards=True),
            lambda: plan.unit("a", "dp", granularity=32),
            lambda: plan.unit("a", "dp", granularity=rows(2), orig_param_policy=lambda name, param: rows(2)),
            lambda: plan.unit("a", ("a", "b", "c")),
            lambda: plan.unit("a", ("a", "b"), placements=ZERO2),
            lambda: plan.unit("a", ("a", "b"), placements=HIERARCHICAL),
            lambda: plan.unit("a", "dp", placements=ZERO1, mp_policy=Float8Policy(torch.bfloat16)),
            lambda: plan.unit("a", "dp", mp_policy=MixedPrecisionPolicy(torch.int8)),
            lambda: plan.unit("a.<in>", "dp"),
            lambda: plan.default("R"),
            lambda: Plan([1]),
            lambda: plan.under("("),
        )
        self.assertExpectedInline(
            wrapped(*(error_of(call) for call in calls)),
            """\
TypeError: shard: placement must be of Shard, Replicate, Partial, _StridedShard, InterleavedShard,
    | RaggedShard, StridedRaggedShard, got <class 'torch.distributed.tensor.placement_types.Shard'>
TypeError: shard: placement must be of Shard, Replicate, Partial, _StridedShard, InterleavedShard,
    | RaggedShard, StridedRaggedShard, got None
ValueError: shard: dims must be the name of a mesh dimension or a tuple of names, got ()
ValueError: shard: dims must be the name of a mesh dimension or a tuple of names, got 3
ValueError: shard: dims ('tp', 'tp') have a mesh dimension twice: name each mesh dimension once
ValueError: shard: placement has 2 placements for 1 mesh dimensions: give one placement, or one per name in
    | dims
ValueError: path "a(" is no regular expression: missing ), unterminated subpattern at position 1
TypeError: a path is a string, got 3
TypeError: shard: phase must be INIT, RUN or None, got 'INIT'
ValueError: shard: the activation "<in>" has no phase: leave phase out
ValueError: path "<inn>" has brackets that name no activation: end it with <in>, <in:2>, <in:name>, <out>,
    | <out:0>, <out:key> or <out:0.key>, and use no other < and >
TypeError: shard: grad must be of Shard, Replicate, Partial, _StridedShard, InterleavedShard, RaggedShard,
    | StridedRaggedShard, got 0
ValueError: redistribute: "a.weight" names no activation: end it with <in> or <out>. For a parameter, write
    | shard(..., phase=INIT) and shard(..., phase=RUN)
TypeError: redistribute: src must be of Shard, Replicate, Partial, _StridedShard, InterleavedShard,
    | RaggedShard, StridedRaggedShard, got 'R'
ValueError: annotate: "a.weight" names neither an activation nor a gradient: end it with <in>, <out> or .grad.
    | For a parameter or a buffer, use shard
TypeError: annotate: placement must be of Shard, Replicate, Partial, _StridedShard, InterleavedShard,
    | RaggedShard, StridedRaggedShard, got 'P'
ValueError: factory: "<in>" is an activation: name modules, without brackets
ValueError: factory: functions must be names of arange, empty, eye, full, linspace, logspace, ones, rand,
    | randint, randn, randperm, zeros, got 'zeroes'
ValueError: factory: functions must be names of arange, empty, eye, full, linspace, logspace, ones, rand,
    | randint, randn, randperm, zeros, got ()
ValueError: segments: "<in>" is an activation: name a parameter or a buffer
ValueError: segments: sizes must be two or more positive integers, got (3,)
ValueError: segments: sizes must be two or more positive integers, got (3, -1)
TypeError: segments: dim must be an integer, got '0'
TypeError: unit: unknown option reshard_after_forwards, did you mean reshard_after_forward? The options are
    | reshard_after_forward, mp_policy, offload_policy, placements, optional, check_replicas, weights,
    | granularity, orig_param_policy, shard_placement_fn
TypeError: unit: granularity must be a value of torch_ragged.granularity, such as rows(32), got 32
ValueError: unit: granularity and orig_param_policy say the same thing: give one of them
ValueError: unit: dims ('a', 'b', 'c') are 3 mesh dimensions: give the one of the shards, or those of replicas
    | and shards
ValueError: unit: BufferPlacements(parameters=(Replicate(),), gradients=(Shard(dim=0),),
    | optimizer=(Shard(dim=0),)) is for 1 mesh dimensions, got dims ('a', 'b'): use ZERO1, ZERO2 or ZERO3 on
    | one, and leave placements out on two
ValueError: unit: HIERARCHICAL does not support parallelize, by which parameters are DTensors on the whole
    | mesh: leave placements out, for HSDP, or pass the two data-parallel dimensions as the mesh
ValueError: unit: Float8Policy does not support ZERO1, which keeps parameters gathered: use ZERO3 or HSDP
TypeError: unit: param_dtype of mp_policy must be a floating-point dtype, got torch.int8
ValueError: unit: "a.<in>" is an activation: name modules, without brackets
TypeError: default: placement must be of Shard, Replicate, Partial, _StridedShard, InterleavedShard,
    | RaggedShard, StridedRaggedShard, got 'R'
TypeError: a Plan is made of rules, got [1]: begin with Plan() and call its methods
ValueError: path "(" is no regular expression: missing ), unterminated subpattern at position 0""",
        )
        self.assertEqual(plan, Plan())


def units_of(*options):
    plan = Plan()
    for each in options:
        plan.unit("a", "dp", **each)
    return plan


class JsonTest(TestCase):
    def test_json_has_one_rule_a_line(self):
        self.assertExpectedInline(
            wrapped(every_call().to_json()),
            """\
{"version": 1, "rules": [
  {"kind": "shard", "path": "layers\\\\.\\\\d+\\\\.up\\\\.weight", "placement": ["Shard(0)"], "dims": ["tp"]},
  {"kind": "shard", "path": "head.weight", "placement": ["Shard(0)", "Shard(0)"], "dims": ["dp", "tp"],
    | "phase": "INIT", "grad": ["Partial(\\"avg\\")", "Partial(\\"avg\\")"]},
  {"kind": "shard", "path": "head.weight", "placement": ["Replicate()", "Shard(0)"], "dims": ["dp", "tp"],
    | "phase": "RUN"},
  {"kind": "redistribute", "path": "mlp.<out:0.hidden>", "dst": ["Shard(1)"], "dims": ["tp"], "src":
    | ["Partial()"], "grad_src": ["Shard(1)"], "grad_dst": ["Replicate()"]},
  {"kind": "annotate", "path": "norm.weight.grad", "placement": ["Partial()"], "dims": ["tp"]},
  {"kind": "factory", "path": "", "placement": ["Replicate()"], "dims": ["tp"]},
  {"kind": "factory", "path": "rotary", "placement": ["Shard(0)"], "dims": ["dp"], "functions": ["arange",
    | "zeros"]},
  {"kind": "segments", "path": "qkv.weight", "sizes": [8, 4, 4], "dim": 0},
  {"kind": "unit", "path": "layers\\\\.\\\\d+", "dims": ["replicas", "dp"], "options": {"granularity":
    | {"granularity": "rows(2)"}, "reshard_after_forward": false}},
  {"kind": "default", "path": "", "placement": ["Replicate()"]}
]}""",
        )

    def test_all_placements_and_policies_survive(self):
        placements = (
            _StridedShard(1, split_factor=3),
            RaggedShard((0,), (1, 0, 2)),
            RaggedShard((0, 1), (1,) * 40 + (0, 3) + (2,) * 100),
            StridedRaggedShard((0,), (1, 2), 2),
        )
        plan = Plan()
        for placement in placements:
            plan.shard("a", placement, "dp")
        plan += units_of(
            {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)},
            {"mp_policy": Float8Policy(torch.bfloat16, tile=(1, 128))},
            {"offload_policy": CPUOffloadPolicy(pin_memory=False), "placements": ZERO2, "optional": True},
            {"placements": ZERO3, "reshard_after_forward": 2},
            *({"granularity": each} for each in (elements(), rows(3), rows(3, within=0), blocks(2, 4), tensor())),
            {"granularity": segments((4, 2), rows(3))},
            {"granularity": segments((4, 2), [tensor(), rows(3, within=0)], dim=-2)},
        )
        plan.unit("a", ("replicas", "dp"))
        again = Plan.from_json(plan.to_json())
        self.assertEqual(again, plan)
        self.assertEqual(repr(again), repr(plan))

    def test_what_json_cannot_hold_is_refused_with_its_rule(self):
        self.assertExpectedInline(
            wrapped(error_of(units_of({"shard_placement_fn": len}).to_json)),
            """\
TypeError: plan.unit("a", "dp", shard_placement_fn=len): JSON cannot hold <built-in function len>: use a value
    | of numbers, strings, dtypes, granularities or policies""",
        )

    def test_functions_have_a_text_without_an_address_which_ranks_compare(self):
        plan = units_of({"orig_param_policy": units_of}, {"shard_placement_fn": functools.partial(units_of, {})})
        self.assertExpectedInline(
            repr(plan),
            """\
plan = Plan()
plan.unit("a", "dp", orig_param_policy=units_of)
plan.unit("a", "dp", shard_placement_fn=partial)""",
        )

    def test_text_that_is_no_plan_is_refused(self):
        rule = {"kind": "shard", "path": "a", "placement": ["Shard(0)"], "dims": ["tp"]}
        unit = {"kind": "unit", "path": "a", "dims": ["tp"]}
        wrong = (
            "{",
            "[]",
            {"rules": []},
            {"version": 2, "rules": []},
            {"version": 1, "rules": [], "model": "llama"},
            {"version": 1, "rules": {}},
            *(
                {"version": 1, "rules": [each]}
                for each in (
                    "shard",
                    {**rule, "kind": "shards"},
                    {**rule, "color": "red", "age": 3},
                    {"kind": "shard", "path": "a", "dims": ["tp"]},
                    {**rule, "placement": "Shard(0)"},
                    {**rule, "placement": ["Shard(0"]},
                    {**rule, "placement": ["Share(0)"]},
                    {**rule, "placement": ["(1, 2)"]},
                    {**rule, "placement": ["RaggedShard((0,), (1,) * 10**9)"]},
                    {**rule, "placement": ["RaggedShard((0,), (1,) * 1000000000)"]},
                    {**rule, "placement": ["__import__('os').system('true')"]},
                    {**rule, "phase": "LATER"},
                    {**rule, "dims": [["tp"]]},
                    {**unit, "options": []},
                    {**unit, "options": {"granularity": {"granularity": "rows(0)"}}},
                    {**unit, "options": {"mp_policy": {"Policy": {}}}},
                    {**unit, "options": {"offload_policy": {"CPUOffloadPolicy": {"pinned": True}}}},
                    {**unit, "options": {"mp_policy": {"dtype": "nn"}}},
                )
            ),
        )
        texts = [each if isinstance(each, str) else json.dumps(each) for each in wrong]
        self.assertExpectedInline(
            wrapped(*(error_of(Plan.from_json, text) for text in texts)),
            """\
ValueError: the text is no JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1).
    | Pass what Plan.to_json() returned
ValueError: the JSON has no version: pass what Plan.to_json() returned
ValueError: the JSON has no version: pass what Plan.to_json() returned
ValueError: the JSON is a plan of version 2, and this package reads version 1
ValueError: the JSON has unknown fields model: a plan has version and rules
ValueError: the JSON has no list of rules: pass what Plan.to_json() returned
ValueError: rule 0 of the JSON is of the unknown kind None: the kinds are shard, redistribute, annotate,
    | factory, segments, unit, default
ValueError: rule 0 of the JSON is of the unknown kind 'shards': the kinds are shard, redistribute, annotate,
    | factory, segments, unit, default
ValueError: rule 0 of the JSON (shard) has unknown fields age, color: it has path, placement, dims, phase,
    | grad
ValueError: rule 0 of the JSON (shard) has no placement: it needs each field without a default
ValueError: rule 0 of the JSON (shard) is wrong: placement must be a list of placements as text, got
    | 'Shard(0)'
ValueError: rule 0 of the JSON (shard) is wrong: cannot read 'Shard(0': it is no Python. Write a call of
    | Shard, Replicate, Partial, _StridedShard, InterleavedShard, RaggedShard, StridedRaggedShard with
    | literals
ValueError: rule 0 of the JSON (shard) is wrong: cannot read 'Share(0)': Share(0) is no literal. Write a call
    | of Shard, Replicate, Partial, _StridedShard, InterleavedShard, RaggedShard, StridedRaggedShard with
    | literals
ValueError: rule 0 of the JSON (shard) is wrong: '(1, 2)' is no placement: write one of Shard, Replicate,
    | Partial, _StridedShard, InterleavedShard, RaggedShard, StridedRaggedShard with its arguments, such as
    | Shard(0)
ValueError: rule 0 of the JSON (shard) is wrong: cannot read 'RaggedShard((0,), (1,) * 10**9)': 10 ** 9 is no
    | literal. Write a call of Shard, Replicate, Partial, _StridedShard, InterleavedShard, RaggedShard,
    | StridedRaggedShard with literals
ValueError: rule 0 of the JSON (shard) is wrong: cannot read 'RaggedShard((0,), (1,) * 1000000000)':
    | 1000000000 ranks are more than 10000000. Write a call of Shard, Replicate, Partial, _StridedShard,
    | InterleavedShard, RaggedShard, StridedRaggedShard with literals
ValueError: rule 0 of the JSON (shard) is wrong: cannot read "__import__('os').system('true')":
    | __import__('os').system('true') is no literal. Write a call of Shard, Replicate, Partial, _StridedShard,
    | InterleavedShard, RaggedShard, StridedRaggedShard with literals
ValueError: rule 0 of the JSON (shard) is wrong: phase must be INIT or RUN, got 'LATER'
ValueError: rule 0 of the JSON (shard) is wrong: shard: dims must be the name of a mesh dimension or a tuple
    | of names, got (['tp'],)
ValueError: rule 0 of the JSON (unit) is wrong: options must be an object, got []
ValueError: rule 0 of the JSON (unit) is wrong: cannot read 'rows(0)': rows() takes positive integers, got 0.
    | Write a call of elements, rows, blocks, tensor, segments with literals
ValueError: rule 0 of the JSON (unit) is wrong: {'Policy': {}} is no option of a unit in JSON: write a number,
    | a string, true, false, null, or an object with one key of tuple, dtype, placement, granularity,
    | MixedPrecisionPolicy, Float4Policy, Float8Policy, OffloadPolicy, CPUOffloadPolicy, Offload,
    | BufferPlacements
ValueError: rule 0 of the JSON (unit) is wrong: CPUOffloadPolicy has no field pinned: the fields are
    | pin_memory
ValueError: rule 0 of the JSON (unit) is wrong: {'dtype': 'nn'} is no option of a unit in JSON: write a
    | number, a string, true, false, null, or an object with one key of tuple, dtype, placement, granularity,
    | MixedPrecisionPolicy, Float4Policy, Float8Policy, OffloadPolicy, CPUOffloadPolicy, Offload,
    | BufferPlacements""",
        )


placements = st.one_of(
    st.builds(Shard, st.integers(-3, 3)),
    st.just(Replicate()),
    st.builds(Partial, st.sampled_from(("sum", "avg", "max"))),
    st.builds(lambda dim, factor: _StridedShard(dim, split_factor=factor), st.integers(0, 2), st.integers(2, 4)),
    st.lists(st.integers(0, 3), min_size=1, max_size=40).map(lambda units: RaggedShard((0,), (*units, 1))),
)
names = st.lists(st.sampled_from(("dp", "tp", "ep")), min_size=1, max_size=3, unique=True).map(tuple)
tensors = st.sampled_from(("a.weight", r"layers\.\d+\.w", "x|y", r'a".b', "été.w"))
modules = st.sampled_from(("", "a", r"layers\.\d+", "x|y"))
brackets = st.sampled_from(("<in>", "<in:2>", "<in:mask.0>", "<out>", "<out:0.hidden>"))
activations = st.builds(lambda module, end: f"{module}.{end}" if module else end, modules, brackets)


@st.composite
def plans(draw):
    plan = Plan()
    for call in draw(st.lists(st.sampled_from("shard activation redistribute annotate factory segments unit default".split()))):
        dims = draw(names)
        placed = st.one_of(placements, st.tuples(*[placements] * len(dims)))
        perhaps = st.one_of(st.none(), placed)
        if call == "shard":
            phase = draw(st.sampled_from((None, *Phase)))
            plan.shard(draw(tensors), draw(placed), dims, phase=phase, grad=draw(perhaps))
        elif call == "activation":
            plan.shard(draw(activations), draw(placed), dims, grad=draw(perhaps))
        elif call == "redistribute":
            others = {name: draw(perhaps) for name in ("src", "grad_src", "grad_dst")}
            plan.redistribute(draw(activations), draw(placed), dims, **others)
        elif call == "annotate":
            plan.annotate(draw(st.one_of(activations, tensors.map(lambda path: path + ".grad"))), draw(placed), dims)
        elif call == "factory":
            functions = st.lists(st.sampled_from(FACTORY_FUNCTIONS), min_size=1)
            plan.factory(draw(modules), draw(placed), dims, functions=draw(functions))
        elif call == "segments":
            plan.segments(draw(tensors), draw(st.lists(st.integers(1, 9), min_size=2)), draw(st.integers(-2, 2)))
        elif call == "unit":
            options = {"granularity": rows(draw(st.integers(1, 9)))} if draw(st.booleans()) else {}
            policy = MixedPrecisionPolicy(draw(st.sampled_from((None, torch.bfloat16, torch.float16))))
            plan.unit(draw(modules), dims[:2], mp_policy=policy, **options)
        else:
            plan.default(draw(placements), under=draw(modules))
    return plan


class RandomPlansTest(unittest.TestCase):
    @given(plans())
    @settings(deadline=None)
    def test_a_plan_survives_json_and_pickle(self, plan):
        for again in (Plan.from_json(plan.to_json()), pickle.loads(pickle.dumps(plan))):
            self.assertEqual(again, plan)
            self.assertEqual(repr(again), repr(plan))

    @given(plans(), plans(), modules)
    @settings(deadline=None)
    def test_the_parts_of_a_sum_move_with_it(self, a, b, prefix):
        moved = (a + b).under(prefix)
        self.assertEqual(moved, a.under(prefix) + b.under(prefix))
        for rule, before in zip(moved.rules, (a + b).rules):
            end = ".grad" if before.path.endswith(".grad") else ""
            self.assertEqual(rule.path, under(prefix, before.path.removesuffix(end)) + end)
        self.assertEqual(a.under(""), a)


if __name__ == "__main__":
    unittest.main()
