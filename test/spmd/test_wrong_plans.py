"""Plans that do not fit their model or mesh: each is refused with a text that says which rule, what is wrong and what to do."""

import pickle
import unittest

import torch
from common import error_of
from expecttest import TestCase
from spmd_common import Llama, Mixture, wrapped
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from torch_ragged import RaggedShard
from torch_ragged.granularity import rows, segments
from torch_ragged.spmd import INIT, RUN, Plan, PlanError
from torch_ragged.spmd._resolve import resolve
from torch_ragged.spmd._resolved import MeshShape

MESH = MeshShape(("dp", "tp"), (2, 4))
BASE = Plan().default(Replicate())
LAYER = r"layers\.\d+"
QKV = "qkv.weight"


def text_of(plan, make=Llama, mesh=MESH, **options):
    """Without the first line, and without the rule of BASE."""
    with torch.device("meta"):
        model = make(**options)
    error = error_of(resolve, plan, model, mesh)
    assert error.startswith("PlanError: the plan does not fit "), error
    return wrapped(error.partition("\n")[2])


class NamesTest(TestCase):
    def test_01_a_name_that_no_tensor_has(self):
        plan = BASE + Plan().shard(rf"{LAYER}\.self_attn\.q_prj\.weight", Shard(0), "tp")
        self.assertExpectedInline(
            text_of(plan),
            """\
  plan.shard(r"layers\\.\\d+\\.self_attn\\.q_prj\\.weight", Shard(0), "tp")
    matches no parameter or buffer. Nearest names: layers.0.self_attn.q_proj.weight,
    | layers.0.self_attn.v_proj.weight, layers.0.self_attn.o_proj.weight""",
        )

    def test_02_a_name_that_is_near_nothing(self):
        self.assertExpectedInline(
            text_of(BASE + Plan().shard("zzzzzz", Shard(0), "tp")),
            """\
  plan.shard("zzzzzz", Shard(0), "tp")
    matches no parameter or buffer: no name is near it""",
        )

    def test_03_a_module_where_a_tensor_should_be(self):
        plan = BASE + Plan().shard(rf"{LAYER}\.self_attn\.q_proj", Shard(0), "tp")
        self.assertExpectedInline(
            text_of(plan),
            """\
  plan.shard(r"layers\\.\\d+\\.self_attn\\.q_proj", Shard(0), "tp")
    matches the module "layers.0.self_attn.q_proj", and no parameter or buffer: name a tensor of it""",
        )

    def test_04_an_activation_of_a_module_that_is_not_there(self):
        plan = BASE + Plan().shard(rf"{LAYER}\.input_nrm.<in>", Shard(1), "tp")
        self.assertExpectedInline(
            text_of(plan),
            """\
  plan.shard(r"layers\\.\\d+\\.input_nrm.<in>", Shard(1), "tp")
    matches no module. Nearest names: layers.0.input_norm, layers.0.output_norm, layers.0.mlp""",
        )

    def test_05_an_activation_of_a_list(self):
        self.assertExpectedInline(
            text_of(BASE + Plan().shard("layers.<out>", Shard(1), "tp")),
            """\
  plan.shard("layers.<out>", Shard(1), "tp")
    names a ModuleList, which has no forward: "layers". Name its members""",
        )

    def test_06_an_argument_that_forward_does_not_take(self):
        self.assertExpectedInline(
            text_of(BASE + Plan().shard("<in:input_ids>", Shard(0), "dp")),
            """\
  plan.shard("<in:input_ids>", Shard(0), "dp")
    names the argument input_ids of the root. The forward of Llama takes tokens, mask""",
        )

    def test_07_more_arguments_than_forward_takes(self):
        self.assertExpectedInline(
            text_of(BASE + Plan().shard(rf"{LAYER}\.mlp.<in:1>", Shard(0), "dp")),
            """\
  plan.shard(r"layers\\.\\d+\\.mlp.<in:1>", Shard(0), "dp")
    names the argument 1 of "layers.0.mlp", "layers.1.mlp". The forward of FeedForward takes x""",
        )

    def test_08_a_unit_of_a_module_that_is_not_there(self):
        self.assertExpectedInline(
            text_of(BASE + Plan().unit(r"layer\.\d+", "dp")),
            """\
  plan.unit(r"layer\\.\\d+", "dp")
    matches no module. Nearest names: layers.0, layers, layers.0.mlp""",
        )

    def test_09_a_unit_of_a_list(self):
        self.assertExpectedInline(
            text_of(BASE + Plan().unit("layers", "dp")),
            """\
  plan.unit("layers", "dp")
    names a ModuleList, which has no forward: "layers". Name its members""",
        )

    def test_10_a_unit_of_a_parameter(self):
        self.assertExpectedInline(
            text_of(BASE + Plan().unit("norm.weight", "dp")),
            """\
  plan.unit("norm.weight", "dp")
    matches the tensor norm.weight, and no module: name a module""",
        )

    def test_11_factories_of_a_module_that_is_not_there(self):
        self.assertExpectedInline(
            text_of(BASE + Plan().factory("layers.7", Replicate(), "tp")),
            """\
  plan.factory("layers.7", Replicate(), "tp")
    matches no module. Nearest names: layers.0, layers, layers.0.mlp""",
        )

    def test_12_segments_of_a_tensor_that_is_not_there(self):
        self.assertExpectedInline(
            text_of(BASE + Plan().segments("qkv.wight", (8, 8), 0), Mixture),
            """\
  plan.segments("qkv.wight", (8, 8), 0)
    matches no parameter or buffer. Nearest names: qkv.weight, blocks.0.0.weight""",
        )

    def test_13_the_gradient_of_a_parameter_that_is_not_there(self):
        self.assertExpectedInline(
            text_of(BASE + Plan().annotate("nrm.weight.grad", Partial(), "tp")),
            """\
  plan.annotate("nrm.weight.grad", Partial(), "tp")
    matches no parameter or buffer. Nearest names: norm.weight, lm_head.weight, layers.0.input_norm.weight""",
        )

    def test_14_the_gradient_of_a_buffer(self):
        self.assertExpectedInline(
            text_of(BASE + Plan().annotate("frequencies.grad", Partial(), "tp")),
            """\
  plan.annotate("frequencies.grad", Partial(), "tp")
    matches only buffers, which have neither phases nor gradients: frequencies. Name parameters""",
        )

    def test_15_a_default_for_a_module_that_is_not_there(self):
        self.assertExpectedInline(
            text_of(BASE + Plan().default(Replicate(), under="decoder")),
            """\
  plan.default(Replicate(), under="decoder")
    matches no module: no name is near it""",
        )

    def test_16_a_mesh_dimension_that_the_mesh_has_not(self):
        self.assertExpectedInline(
            text_of(BASE + Plan().shard("norm.weight", Shard(0), ("dp", "cp"))),
            """\
  plan.shard("norm.weight", Shard(0), ("dp", "cp"))
    names the mesh dimension "cp": the mesh has dp, tp""",
        )

    def test_17_parameters_that_no_rule_names(self):
        self.assertExpectedInline(
            text_of(Plan().shard(".*proj.weight", Shard(0), "tp")),
            """\
  no rule
    names the parameters embed_tokens.weight, layers.0.input_norm.weight, layers.0.output_norm.weight and 4
    | more. Name them, or add plan.default(Replicate())""",
        )

    def test_18_parameters_outside_of_the_default(self):
        self.assertExpectedInline(
            text_of(Plan().default(Replicate(), under=LAYER)),
            """\
  no rule
    names the parameters embed_tokens.weight, norm.weight, lm_head.weight. Name them, or add
    | plan.default(Replicate())""",
        )


class ConflictsTest(TestCase):
    def test_19_two_placements_of_one_parameter(self):
        plan = BASE + Plan().shard(r".*\.up_proj\.weight", Shard(0), "tp").shard(r"layers\.1\..*proj.weight", Shard(1), "tp")
        self.assertExpectedInline(
            text_of(plan),
            """\
  plan.shard(r".*\\.up_proj\\.weight", Shard(0), "tp")
  plan.shard(r"layers\\.1\\..*proj.weight", Shard(1), "tp")
    differ on mesh dimension "tp" of layers.1.mlp.up_proj.weight: keep one of them""",
        )

    def test_20_a_phase_and_both_phases(self):
        plan = BASE + Plan().shard("norm.weight", Shard(0), "tp").shard("norm.weight", Replicate(), "tp", phase=RUN)
        self.assertExpectedInline(
            text_of(plan),
            """\
  plan.shard("norm.weight", Shard(0), "tp")
  plan.shard("norm.weight", Replicate(), "tp", phase=RUN)
    differ on mesh dimension "tp" of norm.weight: keep one of them""",
        )

    def test_21_two_layouts_of_a_tied_parameter(self):
        plan = BASE + Plan().shard("embed_tokens.weight", Shard(0), "tp").shard("lm_head.weight", Shard(1), "tp")
        self.assertExpectedInline(
            text_of(plan, tied=True),
            """\
  plan.shard("embed_tokens.weight", Shard(0), "tp")
  plan.shard("lm_head.weight", Shard(1), "tp")
    differ on mesh dimension "tp" of one tied tensor, embed_tokens.weight = lm_head.weight: a tied tensor has
    | one layout, keep one of them""",
        )

    def test_22_two_placements_of_an_activation_under_two_names(self):
        plan = BASE + Plan().shard("<in>", Shard(0), "dp").shard("<in:tokens>", Shard(1), "dp")
        self.assertExpectedInline(
            text_of(plan),
            """\
  plan.shard("<in>", Shard(0), "dp")
  plan.shard("<in:tokens>", Shard(1), "dp")
    differ on mesh dimension "dp" of <in:tokens>: keep one of them""",
        )

    def test_23_a_shard_against_a_redistribution(self):
        plan = BASE + Plan().shard("norm.<out>", Shard(0), "tp").redistribute("norm.<out>", Replicate(), "tp")
        self.assertExpectedInline(
            text_of(plan),
            """\
  plan.shard("norm.<out>", Shard(0), "tp")
  plan.redistribute("norm.<out>", Replicate(), "tp")
    differ on mesh dimension "tp" of norm.<out>: keep one of them""",
        )

    def test_24_an_annotation_against_the_source_of_a_redistribution(self):
        plan = Plan().annotate("norm.<in>", Shard(0), "tp").redistribute("norm.<in>", Replicate(), "tp", src=Shard(1))
        self.assertExpectedInline(
            text_of(BASE + plan),
            """\
  plan.annotate("norm.<in>", Shard(0), "tp")
  plan.redistribute("norm.<in>", Replicate(), "tp", src=Shard(1))
    differ on mesh dimension "tp" of norm.<in:x>: keep one of them""",
        )

    def test_25_two_gradients_of_one_parameter(self):
        plan = Plan().shard("norm.weight", Replicate(), "tp", grad=Partial()).annotate("norm.weight.grad", Replicate(), "tp")
        self.assertExpectedInline(
            text_of(BASE + plan),
            """\
  plan.shard("norm.weight", Replicate(), "tp", grad=Partial())
  plan.annotate("norm.weight.grad", Replicate(), "tp")
    differ on mesh dimension "tp" of norm.weight: keep one of them""",
        )

    def test_26_two_factories_in_one_module(self):
        plan = Plan().factory("norm", Shard(0), "tp").factory(".*", Replicate(), "tp", functions=("zeros", "ones"))
        self.assertExpectedInline(
            text_of(BASE + plan),
            """\
  plan.factory("norm", Shard(0), "tp")
  plan.factory(".*", Replicate(), "tp", functions=("ones", "zeros"))
    differ on mesh dimension "tp" of ones in "norm", zeros in "norm": keep one of them""",
        )

    def test_27_two_segmentations_of_one_parameter(self):
        plan = BASE + Plan().segments(QKV, (8, 4, 4), 0).segments(QKV, (8, 8), 0)
        self.assertExpectedInline(
            text_of(plan, Mixture),
            """\
  plan.segments("qkv.weight", (8, 4, 4), 0)
  plan.segments("qkv.weight", (8, 8), 0)
    differ in the segments of qkv.weight: keep one of them""",
        )

    def test_28_two_defaults(self):
        plan = BASE + Plan().default(Partial(), under="norm")
        self.assertExpectedInline(
            text_of(plan),
            """\
  plan.default(Replicate())
  plan.default(Partial(), under="norm")
    differ on mesh dimension "dp" of norm.weight: keep one of them
  plan.default(Replicate())
  plan.default(Partial(), under="norm")
    differ on mesh dimension "tp" of norm.weight: keep one of them""",
        )


class CutsTest(TestCase):
    def test_29_a_dimension_that_the_tensor_has_not(self):
        self.assertExpectedInline(
            text_of(BASE + Plan().shard(r".*norm\.weight", Shard(1), "tp")),
            """\
  plan.shard(r".*norm\\.weight", Shard(1), "tp")
    cuts dimension 1 of tensors with 1 dimensions: layers.0.input_norm.weight, layers.0.output_norm.weight,
    | layers.1.input_norm.weight and 2 more. Cut another dimension, or match fewer tensors""",
        )
        rules = Plan().shard("norm.weight", Replicate(), "tp").shard("norm.weight", (Shard(1), Shard(0)), ("dp", "tp"))
        self.assertExpectedInline(
            text_of(BASE + rules),
            """\
  plan.shard("norm.weight", Replicate(), "tp")
  plan.shard("norm.weight", (Shard(1), Shard(0)), ("dp", "tp"))
    differ on mesh dimension "tp" of norm.weight: keep one of them
  plan.shard("norm.weight", (Shard(1), Shard(0)), ("dp", "tp"))
    cuts dimension 1 of tensors with 1 dimensions: norm.weight. Cut another dimension, or match fewer tensors""",
        )

    def test_30_mesh_dimensions_against_their_order(self):
        self.assertExpectedInline(
            text_of(BASE + Plan().shard("lm_head.weight", Shard(0), ("tp", "dp"))),
            """\
  plan.shard("lm_head.weight", Shard(0), ("tp", "dp"))
    cuts dimension 0 in the order tp, dp: DTensor cuts in the mesh's order dp, tp. Name dims in this order, or
    | use _StridedShard""",
        )

    def test_31_sources_and_gradients_against_the_order_of_mesh_dimensions(self):
        plan = Plan().redistribute("norm.<out>", Replicate(), ("tp", "dp"), src=Shard(0), grad_dst=Shard(1))
        self.assertExpectedInline(
            text_of(BASE + plan),
            """\
  plan.redistribute("norm.<out>", Replicate(), ("tp", "dp"), src=Shard(0), grad_dst=Shard(1))
    cuts dimension 0 in the order tp, dp: DTensor cuts in the mesh's order dp, tp. Name dims in this order, or
    | use _StridedShard
  plan.redistribute("norm.<out>", Replicate(), ("tp", "dp"), src=Shard(0), grad_dst=Shard(1))
    cuts dimension 1 in the order tp, dp: DTensor cuts in the mesh's order dp, tp. Name dims in this order, or
    | use _StridedShard""",
        )

    def test_32_a_ragged_shard_left_of_a_shard(self):
        plan = BASE + Plan().shard("lm_head.weight", (RaggedShard((0,), (1, 1)), Shard(0)), ("dp", "tp"))
        self.assertExpectedInline(
            text_of(plan),
            """\
  plan.shard("lm_head.weight", (RaggedShard(dims=(0,), local_units=(1, 1)), Shard(0)), ("dp", "tp"))
    cut lm_head.weight: Shard(0) to the right of a ragged placement over dims (0,) would cut its units. Use
    | (StridedRaggedShard, Shard(0)) instead, or give the ragged placement at most 0 dims""",
        )

    def test_33_units_for_another_number_of_ranks(self):
        self.assertExpectedInline(
            text_of(BASE + Plan().shard("norm.weight", RaggedShard((0,), (1, 1)), "tp")),
            """\
  plan.shard("norm.weight", RaggedShard(dims=(0,), local_units=(1, 1)), "tp")
    cut norm.weight: RaggedShard(dims=(0,), local_units=(1, 1)) has 2 local_units, but mesh dimension 1 has 4
    | ranks: give one number of units per rank""",
        )

    def test_34_interleaved_pieces_that_do_not_divide(self):
        plan = BASE + Plan().shard("experts", _StridedShard(0, split_factor=3), "tp")
        self.assertExpectedInline(
            text_of(plan, Mixture),
            """\
  plan.shard("experts", _StridedShard(0, split_factor=3), "tp")
    cut experts: _StridedShard(0, split_factor=3) over 4 ranks needs a dimension that is a multiple of 12, got
    | 6 elements""",
        )
        plan = BASE + Plan().shard("experts", (_StridedShard(0, split_factor=3), Shard(0)), ("dp", "tp"))
        self.assertExpectedInline(
            text_of(plan, Mixture, MeshShape(("dp", "tp", "cp"), (2, 2, 3))),
            """\
  plan.shard("experts", (_StridedShard(0, split_factor=3), Shard(0)), ("dp", "tp"))
    cut experts: _StridedShard(0, split_factor=3) is left of Shard(0) over 2 ranks, which must divide its
    | split_factor""",
        )

    def test_35_segments_that_do_not_add_up(self):
        self.assertExpectedInline(
            text_of(BASE + Plan().segments(QKV, (8, 4), 0), Mixture),
            """\
  plan.segments("qkv.weight", (8, 4), 0)
    has sizes that add up to 12, and dimension 0 has 16 elements in qkv.weight""",
        )

    def test_36_segments_that_ranks_do_not_divide(self):
        plan = BASE + Plan().segments(QKV, (10, 4, 2), -2).shard(QKV, Shard(0), "tp")
        self.assertExpectedInline(
            text_of(plan, Mixture),
            """\
  plan.segments("qkv.weight", (10, 4, 2), -2)
  plan.shard("qkv.weight", Shard(0), "tp")
    cut segments of 10, 2 elements over 4 ranks: qkv.weight. Each segment must be a multiple of the ranks""",
        )

    def test_37_segments_of_a_dimension_that_the_tensor_has_not(self):
        self.assertExpectedInline(
            text_of(BASE + Plan().segments("scale", (1, 1), 0), Mixture),
            """\
  plan.segments("scale", (1, 1), 0)
    cuts dimension 0 of tensors with 0 dimensions: scale. Cut another dimension, or match fewer tensors""",
        )


class UnitsTest(TestCase):
    def test_38_a_phase_without_its_counterpart(self):
        plan = BASE + Plan().shard(".*proj.weight", Shard(0), "dp", phase=INIT)
        self.assertExpectedInline(
            text_of(plan),
            """\
  plan.shard(".*proj.weight", Shard(0), "dp", phase=INIT)
    has no counterpart on mesh dimension "dp" for layers.0.self_attn.q_proj.weight,
    | layers.0.self_attn.o_proj.weight, layers.0.self_attn.k_proj.weight and 11 more: say how it is computed
    | with, with phase=RUN, or leave phase out""",
        )

    def test_39_phases_that_no_unit_can_do(self):
        plan = Plan().shard("norm.weight", Replicate(), "tp", phase=INIT).shard("norm.weight", Shard(0), "tp", phase=RUN)
        self.assertExpectedInline(
            text_of(BASE + plan),
            """\
  plan.shard("norm.weight", Replicate(), "tp", phase=INIT)
  plan.shard("norm.weight", Shard(0), "tp", phase=RUN)
    keep as Replicate() and compute with Shard(0): norm.weight. Only a Shard or ragged shard at INIT that is
    | Replicate() at RUN is possible""",
        )

    def test_40_phases_of_a_buffer(self):
        plan = Plan().shard("frequencies", Shard(0), "dp", phase=INIT).shard("frequencies", Replicate(), "dp", phase=RUN)
        self.assertExpectedInline(
            text_of(BASE + plan),
            """\
  plan.shard("frequencies", Shard(0), "dp", phase=INIT)
    matches only buffers, which have neither phases nor gradients: frequencies. Name parameters
  plan.shard("frequencies", Replicate(), "dp", phase=RUN)
    matches only buffers, which have neither phases nor gradients: frequencies. Name parameters""",
        )

    def test_41_phases_inside_a_unit(self):
        plan = (
            Plan().shard(".*q_proj.weight", Shard(0), "tp", phase=INIT).shard(".*q_proj.weight", Replicate(), "tp", phase=RUN)
        )
        self.assertExpectedInline(
            text_of(plan.unit(LAYER, "dp")),
            """\
  plan.shard(".*q_proj.weight", Shard(0), "tp", phase=INIT)
  plan.shard(".*q_proj.weight", Replicate(), "tp", phase=RUN)
  plan.unit(r"layers\\.\\d+", "dp")
    shard by phases what a unit shards already: layers.0.self_attn.q_proj.weight,
    | layers.1.self_attn.q_proj.weight. Keep one of the two""",
        )

    def test_42_phases_on_different_mesh_dimensions(self):
        plan = Plan().shard("norm.weight", Shard(0), "dp", phase=INIT).shard("norm.weight", Replicate(), "dp", phase=RUN)
        plan += Plan().shard("lm_head.weight", Shard(0), "tp", phase=INIT).shard("lm_head.weight", Replicate(), "tp", phase=RUN)
        self.assertExpectedInline(
            text_of(BASE + plan),
            """\
  plan.shard("norm.weight", Shard(0), "dp", phase=INIT)
  plan.shard("norm.weight", Replicate(), "dp", phase=RUN)
  plan.shard("lm_head.weight", Shard(0), "tp", phase=INIT)
  plan.shard("lm_head.weight", Replicate(), "tp", phase=RUN)
    make a second unit of the root, on other mesh dimensions: lm_head.weight. Use plan.unit for an inner
    | module""",
        )

    def test_43_parameters_beside_units_and_phases(self):
        plan = Plan().unit(LAYER, "dp").shard("norm.weight", Shard(0), "dp", phase=INIT)
        self.assertExpectedInline(
            text_of(plan.shard("norm.weight", Replicate(), "dp", phase=RUN)),
            """\
  no rule
    names the parameters embed_tokens.weight, lm_head.weight. Name them, or add plan.default(Replicate())""",
        )

    def test_44_a_unit_on_a_mesh_dimension_that_is_used(self):
        plan = Plan().shard(r".*\.q_proj\.weight", Shard(0), "dp").unit(LAYER, "dp")
        self.assertExpectedInline(
            text_of(plan),
            """\
  plan.shard(r".*\\.q_proj\\.weight", Shard(0), "dp")
  plan.unit(r"layers\\.\\d+", "dp")
    use a mesh dimension of the unit that shards layers.0.self_attn.q_proj.weight,
    | layers.1.self_attn.q_proj.weight. Use another mesh dimension, or an inner unit on another one""",
        )

    def test_45_an_uneven_shard_under_a_unit(self):
        plan = Plan().shard("experts", Shard(0), "tp").unit("", "dp")
        self.assertExpectedInline(
            text_of(plan, Mixture),
            """\
  plan.shard("experts", Shard(0), "tp")
  plan.unit("", "dp")
    put experts into a unit: dimension 0 of shape (6, 8, 4) is sharded unevenly over 4 ranks: FSDP needs even
    | pieces. Pad the dimension, or shard another dimension""",
        )

    def test_46_a_ragged_shard_under_a_unit(self):
        plan = Plan().shard("experts", RaggedShard((0,), (1, 2, 3, 0)), "tp").unit("", "dp")
        self.assertExpectedInline(
            text_of(plan, Mixture),
            """\
  plan.shard("experts", RaggedShard(dims=(0,), local_units=(1, 2, 3, 0)), "tp")
  plan.unit("", "dp")
    put experts into a unit: FSDP cannot shard a tensor placed as RS(0)[1,2,3,0]: redistribute it to Replicate
    | or Shard first""",
        )

    def test_47_two_units_of_one_module(self):
        plan = Plan().unit(LAYER, "dp", granularity=rows(2)).unit(r"layers\.1", "dp", granularity=rows(4)).unit("", "dp")
        self.assertExpectedInline(
            text_of(plan),
            """\
  plan.unit(r"layers\\.\\d+", "dp", granularity=rows(2))
  plan.unit(r"layers\\.1", "dp", granularity=rows(4))
    give different dims or options to the unit of "layers.1": keep one of them""",
        )

    def test_48_units_that_differ_and_leave_the_rest(self):
        plan = Plan().unit(r"layers\.0", "dp").unit(r"layers\.1", ("dp", "tp"))
        self.assertExpectedInline(
            text_of(plan),
            """\
  plan.unit(r"layers\\.0", "dp")
  plan.unit(r"layers\\.1", ("dp", "tp"))
    have different dims or options, and leave parameters to the root's unit: embed_tokens.weight, norm.weight,
    | lm_head.weight. Add plan.unit("", ...)""",
        )

    def test_49_a_tied_parameter_in_two_units(self):
        plan = Plan().unit("embed_tokens|lm_head", "dp").unit("", "dp")
        self.assertExpectedInline(
            text_of(plan, tied=True),
            """\
  plan.unit("embed_tokens|lm_head", "dp")
    put the names of a tied parameter into the units of "embed_tokens" and "lm_head": embed_tokens.weight =
    | lm_head.weight. Name a module that has both""",
        )

    def test_50_parts_that_do_not_divide_the_ranks(self):
        plan = Plan().unit(LAYER, "tp", reshard_after_forward=3).unit("", "dp")
        self.assertExpectedInline(
            text_of(plan),
            """\
  plan.unit(r"layers\\.\\d+", "tp", reshard_after_forward=3)
    keeps parts on 3 ranks after forward, which must divide the 4 ranks of the unit of "layers.0", "layers.1\"""",
        )

    def test_52_a_granularity_with_the_segments_of_another_tensor(self):
        plan = Plan().unit("", "dp", granularity=segments((8, 8), rows(2)))
        self.assertExpectedInline(
            text_of(plan, Mixture),
            """\
  plan.unit("", "dp", granularity=segments((8, 8), rows(2)))
    give granularity=segments((8, 8), rows(2)), which are not the segments of experts, scale,
    | blocks.0.0.weight and 3 more. Name fused weights with plan.segments(), and give the unit the granularity
    | of a segment""",
        )


class AllAtOnceTest(TestCase):
    def test_51_all_problems_are_in_one_error(self):
        plan = Plan()
        plan.shard(rf"{LAYER}\.self_attn\.(q|k|v)_proj\.weight", Shard(0), "tp")
        plan.shard(rf"{LAYER}\.self_attn\.k_proj\.weight", Shard(1), "tp")
        plan.shard(r"lm_hed\.weight", Shard(0), "tp")
        plan.shard("<in:ids>", Shard(0), "ep")
        with torch.device("meta"):
            model = Llama()
        self.assertExpectedInline(
            wrapped(error_of(resolve, plan, model, MESH)),
            """\
PlanError: the plan does not fit Llama on the mesh dp=2, tp=4: 5 problems
  plan.shard(r"layers\\.\\d+\\.self_attn\\.(q|k|v)_proj\\.weight", Shard(0), "tp")
  plan.shard(r"layers\\.\\d+\\.self_attn\\.k_proj\\.weight", Shard(1), "tp")
    differ on mesh dimension "tp" of layers.0.self_attn.k_proj.weight, layers.1.self_attn.k_proj.weight: keep
    | one of them
  plan.shard(r"lm_hed\\.weight", Shard(0), "tp")
    matches no parameter or buffer. Nearest names: lm_head.weight, norm.weight, embed_tokens.weight
  plan.shard("<in:ids>", Shard(0), "ep")
    names the mesh dimension "ep": the mesh has dp, tp
  plan.shard("<in:ids>", Shard(0), "ep")
    names the argument ids of the root. The forward of Llama takes tokens, mask
  no rule
    names the parameters embed_tokens.weight, layers.0.self_attn.o_proj.weight, layers.0.mlp.gate_proj.weight
    | and 12 more. Name them, or add plan.default(Replicate())""",
        )

    def test_an_error_is_the_same_each_time_and_in_another_process(self):
        plan = Plan().shard(".*q_proj.weight", Shard(0), "xx").shard("norm.w", Shard(0), "tp")
        first, second = (error_of(resolve, plan, Llama(), MESH) for _ in range(2))
        self.assertEqual(first, second)
        with self.assertRaises(PlanError) as caught:
            resolve(plan, Llama(), MESH)
        self.assertEqual(str(pickle.loads(pickle.dumps(caught.exception))), str(caught.exception))

    def test_a_mesh_that_cannot_be_used_is_refused(self):
        texts = [
            error_of(resolve, BASE, nn.Linear(1, 1), "dp"),
            error_of(MeshShape, ("a", "a"), (1, 2)),
            error_of(MeshShape, ("a",), (1, 2)),
            error_of(MeshShape, ("a",), (0,)),
        ]
        self.assertExpectedInline(
            wrapped(*texts),
            """\
TypeError: a plan needs a DeviceMesh, got str: pass init_device_mesh(...)
ValueError: a MeshShape has one or more different names and a positive size for each, got
    | MeshShape(names=('a', 'a'), sizes=(1, 2))
ValueError: a MeshShape has one or more different names and a positive size for each, got
    | MeshShape(names=('a',), sizes=(1, 2))
ValueError: a MeshShape has one or more different names and a positive size for each, got
    | MeshShape(names=('a',), sizes=(0,))""",
        )


if __name__ == "__main__":
    unittest.main()
