"""A plan on a model and a mesh: what each tensor, boundary, factory and unit becomes."""

import copy
import importlib.util
import itertools
import re
import unittest

import torch
from common import fake_group
from expecttest import TestCase
from hypothesis import given, settings
from hypothesis import strategies as st
from spmd_common import Llama, Mixture
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from torch_ragged import InterleavedShard, RaggedShard
from torch_ragged.granularity import rows
from torch_ragged.optim import matrix_groups
from torch_ragged.spmd import INIT, RUN, Plan, PlanError
from torch_ragged.spmd._resolve import resolve
from torch_ragged.spmd._resolved import Boundary, FactoryRecord, MeshShape, SegmentSizes, UnitRecord

MESH = MeshShape(("dp", "tp"), (2, 4))
LAYER = r"layers\.\d+"
R = Replicate()


def llama_plan():
    plan = Plan()
    plan.shard(rf"{LAYER}\.self_attn\.(q|k|v)_proj\.weight", Shard(0), "tp")
    plan.shard(rf"{LAYER}\.self_attn\.o_proj\.weight", Shard(1), "tp")
    plan.shard(rf"{LAYER}\.mlp\.(gate|up)_proj\.weight", Shard(0), "tp")
    plan.shard(rf"{LAYER}\.mlp\.down_proj\.weight", Shard(-1), "tp")
    plan.shard("(embed_tokens|lm_head).weight", Shard(0), "tp")
    plan.shard(rf"{LAYER}\.(input|output)_norm.<in>", Shard(1), "tp")
    plan.shard("<in:tokens>", Shard(0), "dp")
    return plan.unit(LAYER, "dp", granularity=rows(2))


def tensors_of(resolved):
    return {tensor.name: tensor for tensor in resolved.tensors}


class InterleavedTest(TestCase):
    def test_a_negative_dimension_becomes_that_of_the_tensor(self):
        plan = Plan().shard("qkv.weight", InterleavedShard(-2, (2, 1, 1)), "tp").default(R)
        found = tensors_of(resolve(plan, Mixture(), MESH))["qkv.weight"]
        self.assertEqual(found.run, (R, InterleavedShard(0, (2, 1, 1))))
        self.assertEqual(Plan.from_json(plan.to_json()), plan)

    def test_a_segment_that_ranks_do_not_divide_is_an_error(self):
        plan = Plan().shard("qkv.weight", InterleavedShard(0, (4, 2, 2)), "tp").shard("experts", InterleavedShard(0, 2), "tp")
        with self.assertRaisesRegex(PlanError, "cannot cut a dimension of size 6 over 4 ranks"):
            resolve(plan.default(R), Mixture(), MESH)

    def test_it_is_gathered_by_a_unit_if_it_is_replicated_at_run(self):
        plan = Plan().shard("qkv.weight", InterleavedShard(0, 2), "dp", phase=INIT).shard("qkv.weight", R, "dp", phase=RUN)
        self.assertEqual(tensors_of(resolve(plan.default(R), Mixture(), MESH))["qkv.weight"].unit, "")


class TableTest(TestCase):
    def test_a_plan_for_a_llama_is_a_table(self):
        self.assertExpectedInline(
            str(resolve(llama_plan(), Llama(layers=1), MESH)),
            """\
mesh: dp=2, tp=4

tensor                            init     run   unit      rules
embed_tokens.weight               tp=S(0)  same  (root)    4
layers.0.self_attn.q_proj.weight  tp=S(0)  same  layers.0  0
layers.0.self_attn.o_proj.weight  tp=S(1)  same  layers.0  1
layers.0.self_attn.k_proj.weight  tp=S(0)  same  layers.0  0
layers.0.self_attn.v_proj.weight  tp=S(0)  same  layers.0  0
layers.0.mlp.gate_proj.weight     tp=S(0)  same  layers.0  2
layers.0.mlp.up_proj.weight       tp=S(0)  same  layers.0  2
layers.0.mlp.down_proj.weight     tp=S(1)  same  layers.0  3
layers.0.input_norm.weight        R        same  layers.0
layers.0.output_norm.weight       R        same  layers.0
norm.weight                       R        same  (root)
lm_head.weight                    tp=S(0)  same  (root)    4
frequencies                       R        same

boundary                     action  placements  rules
<in:tokens>                  shard   dp=S(0)     6
layers.0.input_norm.<in:x>   shard   tp=S(1)     5
layers.0.output_norm.<in:x>  shard   tp=S(1)     5

unit      shard  params  options              rules
layers.0  dp     9       granularity=rows(2)  7
(root)    dp     3       granularity=rows(2)""",
        )

    def test_a_tied_parameter_is_one_line(self):
        self.assertExpectedInline(
            str(resolve(Plan().shard("lm_head.weight", Shard(0), "tp").unit("", "dp"), Llama(layers=0, tied=True), MESH)),
            """\
mesh: dp=2, tp=4

tensor                                init     run   unit    rules
embed_tokens.weight = lm_head.weight  tp=S(0)  same  (root)  0
norm.weight                           R        same  (root)
frequencies                           R        same

unit    shard  params  rules
(root)  dp     2       1""",
        )

    def test_replicas_and_gradients_have_columns(self):
        plan = Plan().unit("", ("dp", "tp")).shard("norm.<out>", Shard(1), "tp", grad=Partial())
        self.assertExpectedInline(
            str(resolve(plan, Llama(layers=0), MESH)),
            """\
mesh: dp=2, tp=4

tensor               init  run   unit
embed_tokens.weight  R     same  (root)
norm.weight          R     same  (root)
lm_head.weight       R     same  (root)
frequencies          R     same

boundary    action  placements  grad_dst   rules
norm.<out>  shard   tp=S(1)     tp=P(sum)  1

unit    shard  replicate  params  rules
(root)  tp     dp         3       0""",
        )

    def test_zero_by_phases_is_a_table(self):
        plan = Plan().shard(".*weight", Shard(0), "dp", phase=INIT).shard(".*weight", R, "dp", phase=RUN).default(R)
        plan.segments("qkv.weight", (8, 4, 4), 0).annotate("qkv.weight.grad", Partial(), "tp")
        plan.redistribute("<out>", R, "dp", src=Shard(0), grad_src=Partial()).factory("qkv", Shard(0), "tp", functions="zeros")
        self.assertExpectedInline(
            str(resolve(plan, Mixture(), MESH)),
            """\
mesh: dp=2, tp=4

tensor             init     run   grad       segments       unit        rules
experts            R        same                                        2
scale              R        same                                        2
qkv.weight         dp=S(0)  R     tp=P(sum)  8+4+4 along 0  (root)      0, 1, 3, 4
blocks.0.0.weight  dp=S(0)  R                               blocks.0.0  0, 1
blocks.0.0.bias    R        same                                        2
blocks.1.0.weight  dp=S(0)  R                               blocks.1.0  0, 1
blocks.1.0.bias    R        same                                        2

boundary  action        placements  src      grad_src   rules
<out>     redistribute  dp=R        dp=S(0)  dp=P(sum)  5

factories of  functions  placements  rules
qkv           zeros      tp=S(0)     6

unit        shard  params  rules
blocks.0.0  dp     1       0, 1
blocks.1.0  dp     1       0, 1
(root)      dp     1       0, 1""",
        )


class TensorsTest(unittest.TestCase):
    def test_parameters_come_in_the_order_of_the_model_and_buffers_after_them(self):
        model = Llama()
        names = [tensor.name for tensor in resolve(llama_plan(), model, MESH).tensors]
        self.assertEqual(names, [name for name, _ in model.named_parameters()] + ["frequencies"])

    def test_negative_dimensions_are_those_of_the_tensor(self):
        tensors = tensors_of(resolve(llama_plan(), Llama(), MESH))
        self.assertEqual(tensors["layers.1.mlp.down_proj.weight"].run, (R, Shard(1)))
        plan = Plan().shard("experts", (_StridedShard(-2, split_factor=2), RaggedShard((-3,), (1, 1, 1, 0))), ("dp", "tp"))
        (experts,) = [t for t in resolve(plan.default(R), Mixture(), MESH).tensors if t.name == "experts"]
        self.assertEqual(experts.run, (_StridedShard(1, split_factor=2), RaggedShard((0,), (1, 1, 1, 0))))

    def test_several_rules_make_one_layout(self):
        plan = Plan().shard("experts", Shard(0), "dp").shard("experts", Shard(1), "tp", grad=Partial()).default(R)
        plan.shard("exp.*", Shard(0), "dp")
        experts = tensors_of(resolve(plan, Mixture(), MESH))["experts"]
        self.assertEqual((experts.init, experts.run), ((Shard(0), Shard(1)),) * 2)
        self.assertEqual((experts.grad, experts.rules), ((None, Partial()), (0, 1, 3)))

    def test_a_default_holds_for_what_no_rule_names(self):
        plan = Plan().shard("norm.weight", R, "dp").default(Shard(0), under=LAYER).default(R, under="norm|embed_tokens|lm_head")
        tensors = tensors_of(resolve(plan, Llama(), MESH))
        self.assertEqual(tensors["layers.0.input_norm.weight"].run, (Shard(0), Shard(0)))
        self.assertEqual((tensors["norm.weight"].run, tensors["norm.weight"].rules), ((R, R), (0,)))
        self.assertEqual(tensors["lm_head.weight"].rules, (2,))

    def test_buffers_need_no_rule(self):
        buffer = tensors_of(resolve(llama_plan(), Llama(), MESH))["frequencies"]
        self.assertEqual((buffer.is_parameter, buffer.run, buffer.unit, buffer.rules), (False, (R, R), None, ()))

    def test_a_rule_on_one_name_of_a_tied_parameter_holds_for_all(self):
        for name in ("embed_tokens", "lm_head"):
            plan = Plan().shard(f"{name}.weight", Shard(1), "tp").default(R)
            embed = tensors_of(resolve(plan, Llama(tied=True), MESH))["embed_tokens.weight"]
            self.assertEqual((embed.aliases, embed.run), (("lm_head.weight",), (R, Shard(1))))

    def test_segments_are_of_one_dimension(self):
        plan = Plan().segments("qkv.weight", (8, 4, 4), -2).shard("qkv.weight", Shard(0), "tp").default(R)
        qkv = tensors_of(resolve(plan, Mixture(), MESH))["qkv.weight"]
        self.assertEqual((qkv.segments, qkv.run, qkv.rules), (SegmentSizes(0, (8, 4, 4)), (R, Shard(0)), (0, 1)))
        self.assertIsNone(tensors_of(resolve(plan, Mixture(), MESH))["experts"].segments)

    def test_the_matrices_of_fused_weights_are_told_for_optimizers(self):
        plan = Plan().segments("qkv.weight", (8, 4, 4), -2).shard("experts", InterleavedShard(1, (3, 1)), "tp")
        resolved = resolve(plan.default(R), Mixture(), MeshShape(("dp", "tp"), (2, 2)))
        self.assertEqual(resolved.segments, {"qkv.weight": ((8, 4, 4), 0), "experts": ((6, 2), 1)})
        groups = matrix_groups(Mixture(), segments=resolved.segments)
        self.assertEqual([group.get("segments") for group in groups], [None, ((6, 2), 1), ((8, 4, 4), 0), None])

    def test_uneven_shards_are_legal_outside_of_units(self):
        plan = Plan().shard("experts", Shard(0), "tp").default(R)
        self.assertEqual(tensors_of(resolve(plan, Mixture(), MESH))["experts"].run, (R, Shard(0)))


class UnitsTest(unittest.TestCase):
    def test_inner_units_come_first(self):
        plan = Plan().unit("", "dp").unit(LAYER, "dp").unit(rf"{LAYER}\.mlp", "dp")
        units = resolve(plan, Llama(layers=2), MESH).units
        self.assertEqual([unit.module for unit in units], ["layers.0.mlp", "layers.0", "layers.1.mlp", "layers.1", ""])
        self.assertEqual(units[0].params, tuple(f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")))
        self.assertNotIn("layers.0.mlp.up_proj.weight", units[1].params)
        self.assertEqual(units[-1].params, ("embed_tokens.weight", "norm.weight", "lm_head.weight"))

    def test_the_rest_is_the_unit_of_the_root(self):
        plan = Plan().unit(LAYER, ("dp", "tp"), granularity=rows(2), reshard_after_forward=True)
        *_, last, root = resolve(plan, Llama(), MESH).units
        self.assertEqual((last.shard, last.replicate), (("tp",), ("dp",)))
        self.assertEqual(last.options, (("granularity", rows(2)), ("reshard_after_forward", True)))
        params = ("embed_tokens.weight", "norm.weight", "lm_head.weight")
        self.assertEqual(root, UnitRecord("", ("tp",), ("dp",), (("granularity", rows(2)),), params, ()))

    def test_what_rules_shard_on_the_mesh_dimension_of_units_stays_out_of_the_root(self):
        plan = Plan().unit(LAYER, "dp").shard("lm_head.weight", Shard(0), "dp")
        resolved = resolve(plan, Llama(), MESH)
        self.assertEqual(resolved.units[-1].params, ("embed_tokens.weight", "norm.weight"))
        self.assertIsNone(tensors_of(resolved)["lm_head.weight"].unit)

    def test_phases_make_a_unit_of_each_block(self):
        plan = Plan().shard(".*proj.weight|lm_head.weight", Shard(0), "dp", phase=INIT)
        plan.shard(".*proj.weight|lm_head.weight", R, "dp", phase=RUN).default(R)
        resolved = resolve(plan, Llama(), MESH)
        self.assertEqual([(unit.module, unit.shard, unit.rules) for unit in resolved.units], [
            ("layers.0", ("dp",), (0, 1)), ("layers.1", ("dp",), (0, 1)), ("", ("dp",), (0, 1))
        ])  # fmt: skip
        self.assertEqual(resolved.units[-1].params, ("lm_head.weight",))
        tensors = tensors_of(resolved)
        up = tensors["layers.0.mlp.up_proj.weight"]
        self.assertEqual((up.init, up.run, up.unit), ((Shard(0), R), (R, R), "layers.0"))
        self.assertIsNone(tensors["layers.0.input_norm.weight"].unit)

    def test_phases_and_gradients_are_of_parameters_only(self):
        plan = Plan().shard(".*", Shard(0), "dp", phase=INIT, grad=Partial()).shard(".*", R, "dp", phase=RUN)
        buffer = tensors_of(resolve(plan, Llama(), MESH))["frequencies"]
        self.assertEqual((buffer.init, buffer.run, buffer.grad, buffer.unit), ((R, R), (R, R), None, None))

    def test_units_and_phases_share_a_model(self):
        plan = Plan().unit(LAYER, "dp").shard("(embed|lm|norm).*", Shard(0), "dp", phase=INIT)
        plan.shard("(embed|lm|norm).*", R, "dp", phase=RUN)
        *_, root = resolve(plan, Llama(), MESH).units
        params = ("embed_tokens.weight", "norm.weight", "lm_head.weight")
        self.assertEqual((root.params, root.rules, root.options), (params, (1, 2), ()))

    def test_phases_on_two_mesh_dimensions_make_flattened_shards(self):
        plan = Plan().shard("norm.weight", Shard(0), ("dp", "tp"), phase=INIT).shard("norm.weight", R, ("dp", "tp"), phase=RUN)
        (unit,) = resolve(plan.default(R), Llama(), MESH).units
        self.assertEqual((unit.shard, unit.replicate), (("dp", "tp"), ()))

    def test_the_block_is_the_outermost_element_of_a_list_that_has_a_forward(self):
        plan = Plan().shard("blocks.*weight", Shard(0), "dp", phase=INIT).shard("blocks.*weight", R, "dp", phase=RUN)
        units = resolve(plan.default(R), Mixture(), MESH).units
        self.assertEqual([unit.module for unit in units], ["blocks.0.0", "blocks.1.0"])


class BoundariesTest(unittest.TestCase):
    def boundaries(self, plan, model=None):
        return resolve(plan.default(R), model or Llama(layers=1), MESH).boundaries

    def test_rules_on_one_tensor_are_one_record(self):
        plan = Plan().shard("norm.<in>", Shard(0), "dp", grad=Partial()).shard("norm.<in:x>", Shard(1), "tp")
        expected = Boundary("norm", "in", ("x",), "shard", (Shard(0), Shard(1)), None, None, (Partial(), None), (0, 1))
        model = Llama(layers=0)
        model.norm = Norm()
        self.assertEqual(self.boundaries(plan, model), (expected,))

    def test_actions_on_one_tensor_come_in_the_order_in_which_they_are_done(self):
        plan = (
            Plan()
            .redistribute("norm.<out>", R, "tp")
            .shard("norm.<out>", Shard(0), "dp")
            .annotate("norm.<out>", Partial(), "tp")
        )
        self.assertEqual([(b.action, b.placements, b.src) for b in self.boundaries(plan)], [
            ("annotate", (None, Partial()), None),
            ("shard", (Shard(0), None), None),
            ("redistribute", (None, R), None),
        ])  # fmt: skip

    def test_boundaries_come_in_the_order_of_the_model(self):
        plan = Plan().shard(".*norm.<out>", Shard(1), "tp").shard(".*norm.<in>", Shard(1), "tp").shard("<in>", Shard(0), "dp")
        self.assertEqual(
            [b.path for b in self.boundaries(plan)],
            "<in:tokens> layers.0.input_norm.<in:x> layers.0.input_norm.<out> layers.0.output_norm.<in:x> "
            "layers.0.output_norm.<out> norm.<in:x> norm.<out>".split(),
        )

    def test_an_argument_has_the_name_that_the_signature_gives_it(self):
        layer, attention = "layers.0", "layers.0.self_attn"
        for path, key in (
            (f"{layer}.<in:0>", ("hidden",)),
            (f"{layer}.<in:2>", (2,)),
            (f"{layer}.<in:anything.0>", ("anything", 0)),
            (f"{attention}.<in>", ("hidden",)),
            (f"{attention}.<in:1.mask>", ("mask", "mask")),
            (f"{attention}.<in:position>", ("position",)),
            (f"{attention}.<out:1.cache>", (1, "cache")),
        ):
            (boundary,) = self.boundaries(Plan().shard(path, Shard(0), "tp"))
            self.assertEqual(boundary.key, key, path)

    def test_a_forward_without_a_signature_takes_any_argument(self):
        model = Llama(layers=0)
        model.norm.forward = torch.relu
        for key in (("x",), (3,)):
            (boundary,) = self.boundaries(Plan().shard(f"norm.<in:{key[0]}>", Shard(0), "tp"), model)
            self.assertEqual(boundary.key, key)

    def test_a_redistribution_keeps_what_it_says_of_gradients(self):
        plan = Plan().redistribute("norm.<out>", R, "tp", src=Shard(1), grad_src=Partial(), grad_dst=Shard(1))
        (boundary,) = self.boundaries(plan)
        said = (boundary.placements, boundary.src, boundary.grad_src, boundary.grad_dst)
        self.assertEqual(said, tuple((None, each) for each in (R, Shard(1), Partial(), Shard(1))))


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x):
        return x * self.weight


class FactoriesTest(unittest.TestCase):
    def test_inner_modules_override_outer_ones_by_function_and_mesh_dimension(self):
        plan = Plan().factory("", Shard(0), ("dp", "tp"), functions=("zeros", "ones", "rand"))
        plan.factory(LAYER, R, "tp", functions="zeros").factory("norm", Shard(1), "tp", functions="empty").default(R)
        outer = (Shard(0), Shard(0))
        self.assertEqual(
            resolve(plan, Llama(layers=1), MESH).factories,
            (
                FactoryRecord("", ("ones", "rand", "zeros"), outer, (0,)),
                FactoryRecord("layers.0", ("ones", "rand"), outer, (0,)),
                FactoryRecord("layers.0", ("zeros",), (Shard(0), R), (0, 1)),
                FactoryRecord("norm", ("empty",), (None, Shard(1)), (2,)),
                FactoryRecord("norm", ("ones", "rand", "zeros"), outer, (0,)),
            ),
        )


class AnyModelTest(unittest.TestCase):
    def test_a_device_mesh_and_its_shape_give_equal_records(self):
        with fake_group(8):
            mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
            self.assertEqual(resolve(llama_plan(), Llama(), mesh), resolve(llama_plan(), Llama(), MESH))
            self.assertRaisesRegex(ValueError, "no names", resolve, llama_plan(), Llama(), init_device_mesh("cpu", (8,)))

    def test_a_mesh_dimension_of_one_rank_is_legal(self):
        resolved = resolve(llama_plan(), Llama(), MeshShape(("dp", "tp"), (1, 1)))
        self.assertEqual(resolved.tensors, resolve(llama_plan(), Llama(), MESH).tensors)

    def test_the_model_does_not_change(self):
        model = Llama()
        before = {name: copy.copy(vars(module)) for name, module in model.named_modules()}
        classes = [type(module) for module in model.modules()]
        resolve(llama_plan(), model, MESH)
        self.assertEqual({name: vars(module) for name, module in model.named_modules()}, before)
        self.assertEqual([type(module) for module in model.modules()], classes)

    def test_a_model_under_a_prefix_gets_the_same_layouts(self):
        inside = resolve(llama_plan().under("model"), nn.ModuleDict({"model": Llama()}), MESH)
        alone = resolve(llama_plan(), Llama(), MESH)
        self.assertEqual([each.run for each in inside.tensors], [each.run for each in alone.tensors])
        self.assertEqual([f"model.{each.name}" for each in alone.tensors], [each.name for each in inside.tensors])

    def test_a_module_with_two_names_is_one_module(self):
        model = Llama(layers=1)
        model.again = model.norm
        resolved = resolve(Plan().shard("again.<in>", Shard(0), "dp").default(R), model, MESH)
        self.assertEqual([each.module for each in resolved.boundaries], ["norm"])

    @unittest.skipUnless(importlib.util.find_spec("transformers"), "needs transformers")
    def test_the_plan_of_the_guide_fits_an_unchanged_llama(self):
        from transformers import LlamaConfig, LlamaForCausalLM

        layer = r"model\.layers\.\d+"
        plan = Plan()
        plan.shard(rf"{layer}\.self_attn\.(q|k|v)_proj\.weight", Shard(0), "tp")
        plan.shard(rf"{layer}\.self_attn\.o_proj\.weight", Shard(1), "tp")
        plan.shard(rf"{layer}\.mlp\.(gate|up)_proj\.weight", Shard(0), "tp")
        plan.shard(rf"{layer}\.mlp\.down_proj\.weight", Shard(1), "tp")
        plan.shard(rf"{layer}\.(input_layernorm|post_attention_layernorm)\.<in>", Shard(1), "tp")
        plan.shard("<in:input_ids>", Shard(0), "dp")
        plan.unit(layer, "dp", granularity=rows(32))
        config = LlamaConfig(num_hidden_layers=2, hidden_size=64, intermediate_size=128, vocab_size=100, num_attention_heads=4)
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        resolved = resolve(plan, model, MESH)
        self.assertEqual([unit.module for unit in resolved.units], ["model.layers.0", "model.layers.1", ""])
        self.assertEqual(resolved.units[-1].params, ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"))
        cuts = {name.rsplit(".", 2)[1]: tensor.run[1] for name, tensor in tensors_of(resolved).items() if "proj" in name}
        columns = dict.fromkeys("q_proj k_proj v_proj gate_proj up_proj".split(), Shard(0))
        self.assertEqual(cuts, columns | {"o_proj": Shard(1), "down_proj": Shard(1)})
        self.assertEqual(resolved.boundaries[0].path, "<in:input_ids>")
        self.assertEqual(resolved.boundaries[1].path, "model.layers.0.input_layernorm.<in:hidden_states>")
        self.assertTrue(all(parameter.is_meta for parameter in model.parameters()))


# -- every plan of shard rules, against brute force ----------------------------------------------------------------------

SMALL = MeshShape(("dp", "tp"), (2, 2))
MODEL = Llama(layers=2)
SHAPES = {name: tuple(value.shape) for name, value in MODEL.named_parameters()}
PATHS = (".*", ".*proj.weight", r"layers\.0\..*", "norm.weight", ".*norm.weight", "lm_head.weight", "(embed|lm).*", "nothing")
shard_rules = st.tuples(
    st.sampled_from(PATHS),
    st.sampled_from((("dp",), ("tp",), ("dp", "tp"))),
    st.sampled_from((Shard(0), Shard(0), Shard(1), R)),
    st.sampled_from((None, None, INIT, RUN)),
)


def oracle(rules, default):
    """(init and run by name, units by module), or None if the plan is wrong."""
    of_all = [rule for rule in rules if rule[-1] is None]
    named = [name for name in SHAPES if any(re.fullmatch(path, name) for path, *_ in rules)]
    names = [*SHAPES, "frequencies"]
    if not all(any(re.fullmatch(path, name) for name in names) for path, *_ in rules) or (
        not default and len(named) < len(SHAPES)
    ):
        return None
    layouts, moved = {}, {}
    for name in names:
        ndim = len(SHAPES.get(name, (8,)))
        layouts[name], speaking = [], rules if name in SHAPES else of_all
        for phase in (INIT, RUN):
            placements = []
            for dim in SMALL.names:
                said = [
                    p for path, dims, p, when in speaking if dim in dims and when in (None, phase) and re.fullmatch(path, name)
                ]
                other = [
                    1
                    for path, dims, _, when in speaking
                    if dim in dims and when not in (None, phase) and re.fullmatch(path, name)
                ]
                if len(set(said)) > 1 or Shard(1) in said and ndim < 2 or other and not said:
                    return None
                placements.append(said[0] if said else R)
            layouts[name].append(tuple(placements))
        pairs = [(dim, a, b) for dim, a, b in zip(SMALL.names, *layouts[name]) if a != b]
        if any(a == R or b != R for _, a, b in pairs):
            return None
        if pairs:
            block = name[: len("layers.0")] if name.startswith("layers") else ""
            moved.setdefault(block, {})[name] = tuple(dim for dim, _, _ in pairs)
    if any(len(set(members.values())) > 1 for members in moved.values()):
        return None
    return layouts, {block: (next(iter(members.values())), tuple(members)) for block, members in moved.items()}


class BruteForceTest(unittest.TestCase):
    def check(self, rules, default):
        plan = Plan()
        for path, dims, placement, phase in rules:
            plan.shard(path, placement, dims, phase=phase)
        plan += Plan().default(R) if default else Plan()
        expected = oracle(rules, default)
        if expected is None:
            self.assertRaises(PlanError, resolve, plan, MODEL, SMALL)
            return
        resolved = resolve(plan, MODEL, SMALL)
        self.assertEqual({each.name: [each.init, each.run] for each in resolved.tensors}, expected[0])
        self.assertEqual({each.module: (each.shard, each.params) for each in resolved.units}, expected[1])

    @given(st.lists(shard_rules, max_size=3), st.booleans())
    @settings(deadline=None, max_examples=300)
    def test_random_rules_resolve_as_brute_force_says(self, rules, default):
        self.check(rules, default)

    def test_all_pairs_of_phases_resolve_as_brute_force_says(self):
        legal = 0
        for kept, used in itertools.product((Shard(0), Shard(1), R), repeat=2):
            for dims in (("dp",), ("dp", "tp")):
                rules = [(".*proj.weight", dims, kept, INIT), (".*proj.weight", dims, used, RUN)]
                self.check(rules, True)
                legal += oracle(rules, True) is not None
        self.assertEqual(legal, 10)  # 3 equal ones and 2 that are gathered, on each of two.


if __name__ == "__main__":
    unittest.main()
