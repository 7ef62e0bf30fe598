"""Plan.from_torchtitan: the sharding configs that modules of torchtitan carry become rules, field by field."""

import dataclasses
import functools

import pytest
import torch
from common import error_of, ranks
from expecttest import TestCase
from spmd_common import wrapped
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torchtitan_models import (
    HAS_TORCHTITAN,
    VOCABULARY,
    I,
    Layout,
    P,
    R,
    S,
    Sharding,
    V,
    build,
    build_llama3,
    train,
    whole,
)

from torch_ragged.spmd import MeshShape, Plan, deferred_init, parallelize
from torch_ragged.spmd._resolve import resolve

needs_torchtitan = pytest.mark.skipif(not HAS_TORCHTITAN, reason="torchtitan is not installed, or cannot run on this torch")


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 8))
        self.register_buffer("cache", torch.zeros(8))

    def forward(self, x, mask=None):
        return x @ self.weight


def one(**fields):
    """A model of one module, whose config has these fields."""
    model = nn.ModuleDict({"wide": Wide()})
    states = {"weight": Layout({"tp": R}), "cache": Layout({"tp": R})}
    model.wide._sharding_config = Sharding(**{"state_shardings": states, **fields})
    return model


def rules_of(model, **dims):
    return "\n".join(map(repr, Plan.from_torchtitan(model, **{"dp": "d", "cp": "c", "tp": "t", **dims}).rules[:-1]))


def states(weight, cache=R):
    return {"weight": Layout({"tp": weight}), "cache": Layout({"tp": cache})}


class FieldTest(TestCase):
    def test_states_are_cut_where_the_config_cuts_them(self):
        self.assertEqual(
            rules_of(one(state_shardings=states(S(1), S(0)))).splitlines(),
            [
                r'plan.shard(r"wide\.weight", Shard(1), "t")',
                r'plan.shard(r"wide\.cache", Shard(0), "t")',
            ],
        )
        for whole_type in (R, I):
            self.assertEqual(rules_of(one(state_shardings=states(whole_type))), "")

    def test_names_in_a_partition_spec_cut_its_dimensions(self):
        weight = Layout({"dp": R, "tp": V}, (None, "tp"))
        self.assertEqual(
            rules_of(one(state_shardings={**states(R), "weight": weight})), r'plan.shard(r"wide\.weight", Shard(1), "t")'
        )
        between = Layout({"dp": V, "cp": V, "tp": V}, ("dp", ("cp", "tp"), None))
        self.assertEqual(
            rules_of(one(in_src_shardings={"x": between})),
            'plan.shard("wide.<in:x>", (Shard(0), Shard(1), Shard(1)), ("d", "c", "t"))',
        )

    def test_axes_cut_in_the_order_of_a_partition_spec_or_not_at_all(self):
        model = one(in_src_shardings={"x": Layout({"cp": V, "tp": V, "dp": S(0)}, (None, ("tp", "cp")))})
        plan = Plan.from_torchtitan(model, cp="cp")
        self.assertEqual(plan.rules[0].dims, ("dp", "tp", "cp"))
        mesh = MeshShape(("dp", "cp", "tp"), (2, 2, 2))
        self.assertIn("DTensor cuts in the mesh's order dp, cp, tp", error_of(resolve, plan, model, mesh))
        resolve(plan, model, MeshShape(("dp", "tp", "cp"), (2, 2, 2)))

    def test_an_input_is_brought_to_its_destination_or_else_to_its_source(self):
        cut, kept = Layout({"dp": S(0), "tp": S(1)}), Layout({"dp": S(0), "tp": R})
        model = one(in_src_shardings={"x": cut, "mask": cut}, in_dst_shardings={"x": kept})
        self.assertEqual(
            rules_of(model).splitlines(),
            [
                'plan.shard("wide.<in:x>", (Shard(0), Replicate()), ("d", "t"))',
                'plan.shard("wide.<in:mask>", (Shard(0), Shard(1)), ("d", "t"))',
            ],
        )

    def test_arguments_that_forward_does_not_take_are_left_out(self):
        self.assertEqual(rules_of(one(in_src_shardings={"input": Layout({"tp": S(1)})})), "")

    def test_an_output_is_brought_to_its_destination_if_that_is_another_one(self):
        summed, cut = Layout({"dp": S(0), "tp": P}), Layout({"dp": S(0), "tp": S(-1)})
        self.assertEqual(
            rules_of(one(out_src_shardings=summed, out_dst_shardings=cut)),
            'plan.shard("wide.<out>", (Shard(0), Shard(-1)), ("d", "t"))',
        )
        self.assertEqual(rules_of(one(out_src_shardings=cut, out_dst_shardings=cut)), "")
        self.assertEqual(rules_of(one(out_src_shardings=summed)), "")
        stays = dataclasses.replace(summed, axis_types={"dp": R, "tp": P})
        self.assertEqual(
            rules_of(one(out_src_shardings=summed, out_dst_shardings=stays)), 'plan.shard("wide.<out>", Replicate(), "d")'
        )

    def test_axes_without_a_mesh_dimension_are_left_out(self):
        model = one(state_shardings=states(S(0)), in_src_shardings={"x": Layout({"dp": S(0), "efsdp": R, "tp": R})})
        self.assertEqual(rules_of(model, tp=None), 'plan.shard("wide.<in:x>", Shard(0), "d")')
        self.assertEqual(Plan.from_torchtitan(model, dp=None, tp=None), Plan().default(Replicate()))


class ModelTest(TestCase):
    def test_the_plan_of_a_language_model_as_a_user_would_write_it(self):
        self.assertExpectedInline(
            wrapped(repr(Plan.from_torchtitan(build(), cp="cp"))),
            """\
plan = Plan()
plan.shard(r"layers\\.\\d+\\.attention\\.wq\\.weight", Shard(0), "tp")
plan.shard(r"layers\\.\\d+\\.attention\\.wk\\.weight", Shard(0), "tp")
plan.shard(r"layers\\.\\d+\\.attention\\.wv\\.weight", Shard(0), "tp")
plan.shard(r"layers\\.\\d+\\.feed_forward\\.w1\\.weight", Shard(0), "tp")
plan.shard(r"lm_head\\.weight", Shard(0), "tp")
plan.shard(r"layers\\.\\d+\\.attention\\.wo\\.weight", Shard(1), "tp")
plan.shard(r"layers\\.\\d+\\.feed_forward\\.w2\\.weight", Shard(1), "tp")
plan.shard(r"layers\\.\\d+\\.feed_forward\\.w1\\.bias", Shard(0), "tp")
plan.shard("tok_embeddings.<in:input>", (Shard(0), Shard(1), Replicate()), ("dp", "cp", "tp"))
plan.shard("lm_head.<in:input>", (Shard(0), Shard(1), Replicate()), ("dp", "cp", "tp"))
plan.shard("tok_embeddings.<out>", (Shard(0), Shard(1), Shard(1)), ("dp", "cp", "tp"))
plan.shard(r"layers\\.\\d+\\.attention\\.wo.<out>", (Shard(0), Shard(1), Shard(1)), ("dp", "cp", "tp"))
plan.shard(r"layers\\.\\d+\\.feed_forward\\.w2.<out>", (Shard(0), Shard(1), Shard(1)), ("dp", "cp", "tp"))
plan.shard(r"layers\\.\\d+\\.attention.<in:x>", (Shard(0), Shard(1), Replicate()), ("dp", "cp", "tp"))
plan.shard(r"layers\\.\\d+\\.feed_forward.<in:x>", (Shard(0), Shard(1), Replicate()), ("dp", "cp", "tp"))
plan.shard(r"layers\\.\\d+\\.attention\\.kernel.<in:q>", (Shard(0), Shard(1), Shard(2)), ("dp", "cp", "tp"))
plan.shard(r"layers\\.\\d+\\.attention\\.kernel.<in:k>", (Shard(0), Replicate(), Shard(2)), ("dp", "cp", "tp"))
plan.shard(r"layers\\.\\d+\\.attention\\.kernel.<in:v>", (Shard(0), Replicate(), Shard(2)), ("dp", "cp", "tp"))
plan.shard("norm.<out>", (Shard(0), Shard(1), Replicate()), ("dp", "cp", "tp"))
plan.unit(r"layers\\.\\d+", ("dp", "cp"))""",
        )

    def test_without_units_parameters_are_replicated(self):
        for options in ({"unit": False}, {"dp": None}):
            plan = Plan.from_torchtitan(build(), **options)
            self.assertEqual(plan.rules[-1], Plan().default(Replicate()).rules[0])

    def test_layers_that_differ_are_named(self):
        model = build(layers=12)
        model.layers["3"].feed_forward.w1._sharding_config = None
        paths = [rule.path for rule in Plan.from_torchtitan(model).rules if "w1" in rule.path]
        self.assertEqual(len(paths), 2)
        found = {
            tensor.name: tensor.run
            for tensor in resolve(Plan.from_torchtitan(model), model, MeshShape(("dp", "tp"), (2, 2))).tensors
        }
        self.assertEqual(found["layers.3.feed_forward.w1.weight"], (Replicate(), Replicate()))
        self.assertEqual({found[f"layers.{index}.feed_forward.w1.weight"][1] for index in range(12) if index != 3}, {Shard(0)})

    def test_an_embedding_that_takes_local_rows_stays_whole_under_all_of_its_names(self):
        mesh = MeshShape(("dp", "tp"), (2, 2))
        for tied, expected in ((False, Shard(0)), (True, Replicate())):
            model = build(tied=tied)
            found = {
                name: tensor.run[1]
                for tensor in resolve(Plan.from_torchtitan(model), model, mesh).tensors
                for name in (tensor.name, *tensor.aliases)
            }
            self.assertEqual((found["tok_embeddings.weight"], found["lm_head.weight"]), (Replicate(), expected))
        model.tok_embeddings._sharding_config.local_map = None
        self.assertIn(r"tok_embeddings\.weight", [rule.path for rule in Plan.from_torchtitan(model).rules])


class ErrorTest(TestCase):
    def test_what_has_no_meaning_is_named_by_module_and_field(self):
        class FlexAttention(nn.Module):
            def forward(self, q):
                return q

        model = build(layers=3)
        for layer in model.layers.values():
            layer.attention.kernel = FlexAttention()
            layer.attention.kernel._sharding_config = Sharding(local_map=())
            layer.feed_forward._sharding_config = Sharding(local_map=())
        layer.norm._sharding_config = Sharding({"weight": Layout({"tp": P})}, {"x": Layout({"tp": V})})
        model.norm._sharding_config = Sharding({}, out_dst_shardings=Layout({"dp": P, "tp": "S(0)"}))
        model.lm_head._sharding_config = Sharding({"weight": Layout({"ep": S(0)})}, None, None, (), Layout({"tp": R}))
        model.tok_embeddings._sharding_config = Layout({})
        model.layers["0"]._sharding_config = Sharding(out_dst_shardings=Layout({"dp": P}))
        self.assertExpectedInline(
            wrapped(error_of(Plan.from_torchtitan, model)),
            """\
ValueError: the sharding configs of Model cannot be read:
  tok_embeddings (Embedding), _sharding_config: a Layout has no state_shardings, in_src_shardings,
    | in_dst_shardings, out_src_shardings, out_dst_shardings, local_map
  layers.0 (Block), out_dst_shardings: spmd.P on dp would make a tensor pending that is not. Take it out:
    | DTensor reduces when it must
  layers.0.attention.kernel (FlexAttention), layers.1.attention.kernel (FlexAttention) and 1 more, local_map:
    | it compiles flex_attention, for which DTensor has no rule. Let the config have
    | ScaledDotProductAttention.Config()
  layers.0.feed_forward (FeedForward), layers.1.feed_forward (FeedForward) and 1 more, local_map: its forward
    | takes the local part of w1.weight, and adds up or sends by itself, which has no meaning for DTensors.
    | Set _sharding_config = None for it and its submodules, and add rules to the plan
  layers.2.norm (RMSNorm), state_shardings['weight']: spmd.P is no layout of a tensor that a model keeps. Use
    | spmd.R
  layers.2.norm (RMSNorm), in_src_shardings['x']: spmd.V on tp says that ranks differ, not how. Use
    | spmd.S(dim), or name tp in partition_spec
  norm (RMSNorm), state_shardings['weight']: it is missing, and a config says how each parameter and buffer of
    | its module lies. Add it, such as spmd.R
  norm (RMSNorm), out_dst_shardings: 'S(0)' on tp is none of spmd.R, spmd.I, spmd.V, spmd.P and spmd.S(dim)
  lm_head (Linear), state_shardings['weight']: the axis ep cuts or adds, and a plan is for the axes dp, cp, tp
    | only
  lm_head (Linear), out_dst_shardings: several outputs have no layout after them. Take it out, and add rules
    | of <out:0>""",
        )

    def test_a_model_without_configs(self):
        self.assertExpectedInline(
            wrapped(error_of(Plan.from_torchtitan, nn.Linear(2, 2))),
            """\
ValueError: no module of Linear has a _sharding_config: before torchtitan builds the model, call
    | config.update_from_config(config=...), or a part of it, such as set_llama3_sharding_config(config,
    | enable_sp=True)""",
        )


def assert_trains_as_one_device(make, dims=("dp", "tp"), vocabulary=VOCABULARY, mode="eager", **options):
    """Train under the plan on 2 x 2 ranks, and on one device. Initial values are equal to the bit, classes are the same."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=dims)
    torch.manual_seed(0)
    single = make()
    torch.manual_seed(0)
    model = deferred_init(make)
    kinds = [type(module) for module in model.modules()]
    model = parallelize(model, Plan.from_torchtitan(model, **options), mesh, mode=mode)
    # A unit's class is fully_shard's, under the same name, and is one of the model's class.
    assert all(issubclass(type(module), kind) for module, kind in zip(model.modules(), kinds, strict=True))
    for name, param in single.named_parameters():
        torch.testing.assert_close(whole(model.get_parameter(name)), param.detach(), rtol=0, atol=0, msg=name)
    losses, gradients = train(model, vocabulary)
    expected, expected_gradients = train(single, vocabulary)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=0, atol=1e-5)
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-5 * gradient.abs().max().item(), msg=name)


class TrainingTest(TestCase):
    @ranks(4)
    def test_a_model_with_configs_trains_as_on_one_device():
        assert_trains_as_one_device(build)

    @pytest.mark.slow
    @ranks(4)
    def test_with_tied_weights_without_sequence_parallelism_in_static_mode_and_with_rows_over_ranks():
        assert_trains_as_one_device(functools.partial(build, tied=True))
        assert_trains_as_one_device(functools.partial(build, False))
        assert_trains_as_one_device(build, mode="static")
        assert_trains_as_one_device(build, ("cp", "tp"), dp=None, cp="cp")


@needs_torchtitan
class TorchtitanTest(TestCase):
    def test_the_plan_of_llama3_fits_it(self):
        model = build_llama3(True)
        self.assertExpectedInline(
            wrapped(repr(Plan.from_torchtitan(model))),
            """\
plan = Plan()
plan.shard(r"layers\\.\\d+\\.attention\\.qkv_linear\\.wqkv\\.weight", Shard(0), "tp")
plan.shard(r"layers\\.\\d+\\.feed_forward\\.w1\\.weight", Shard(0), "tp")
plan.shard(r"layers\\.\\d+\\.feed_forward\\.w3\\.weight", Shard(0), "tp")
plan.shard(r"lm_head\\.weight", Shard(0), "tp")
plan.shard(r"layers\\.\\d+\\.attention\\.wo\\.weight", Shard(1), "tp")
plan.shard(r"layers\\.\\d+\\.feed_forward\\.w2\\.weight", Shard(1), "tp")
plan.shard("tok_embeddings.<in:input>", (Shard(0), Replicate()), ("dp", "tp"))
plan.shard("lm_head.<in:input>", (Shard(0), Replicate()), ("dp", "tp"))
plan.shard("tok_embeddings.<out>", (Shard(0), Shard(1)), ("dp", "tp"))
plan.shard(r"layers\\.\\d+\\.attention\\.wo.<out>", (Shard(0), Shard(1)), ("dp", "tp"))
plan.shard(r"layers\\.\\d+\\.feed_forward\\.w2.<out>", (Shard(0), Shard(1)), ("dp", "tp"))
plan.shard(r"layers\\.\\d+\\.attention.<in:x_BLD>", (Shard(0), Replicate()), ("dp", "tp"))
plan.shard(r"layers\\.\\d+\\.attention\\.inner_attention.<in:q_BLNH>", (Shard(0), Shard(2)), ("dp", "tp"))
plan.shard(r"layers\\.\\d+\\.attention\\.inner_attention.<in:k_BLNH>", (Shard(0), Shard(2)), ("dp", "tp"))
plan.shard(r"layers\\.\\d+\\.attention\\.inner_attention.<in:v_BLNH>", (Shard(0), Shard(2)), ("dp", "tp"))
plan.shard(r"layers\\.\\d+\\.feed_forward.<in:x>", (Shard(0), Replicate()), ("dp", "tp"))
plan.shard("norm.<out>", (Shard(0), Replicate()), ("dp", "tp"))
plan.unit(r"layers\\.\\d+", "dp")""",
        )
        resolved = resolve(Plan.from_torchtitan(model, cp="cp"), model, MeshShape(("dp", "cp", "tp"), (2, 2, 2)))
        self.assertEqual([unit.module for unit in resolved.units], ["layers.0", "layers.1", ""])

    def test_experts_and_compiled_attention_are_refused(self):
        from torchtitan.models.qwen3 import qwen3_configs
        from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

        config = qwen3_configs["debugmodel_moe"](attn_backend="flex", moe_comm_backend="standard")
        config.layers = config.layers[:1]
        set_qwen3_sharding_config(config, enable_sp=True, enable_ep=False)
        with torch.device("meta"):
            text = error_of(Plan.from_torchtitan, config.build())
        self.assertIn("layers.0.attention.inner_attention (FlexAttention), local_map: it compiles flex_attention", text)
        self.assertIn("layers.0.moe.routed_experts (RoutedExperts), local_map: its forward takes the local part of", text)

    @ranks(4)
    def test_llama3_trains_as_on_one_device_with_and_without_sequence_parallelism():
        for sequence_parallel in (True, False):
            assert_trains_as_one_device(functools.partial(build_llama3, sequence_parallel), vocabulary=2048)

    @pytest.mark.slow
    @ranks(4)
    def test_llama3_trains_as_on_one_device_in_static_mode_and_with_context_parallelism():
        make = functools.partial(build_llama3, True)
        assert_trains_as_one_device(make, vocabulary=2048, mode="static")
        assert_trains_as_one_device(make, ("cp", "tp"), vocabulary=2048, dp=None, cp="cp")
