"""Plans of the zoo: unchanged models of transformers and diffusers train under them as on one device."""

import unittest

import pytest
import torch
from common import ranks
from expecttest import TestCase
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from zoo_models import (
    HAS_LIBRARIES,
    SHORT,
    TABLES,
    adapted_like_peft,
    assert_trains_as_one_device,
    batch_of,
    build,
    named_like,
    placements_text,
)

from torch_ragged import InterleavedShard
from torch_ragged.spmd import Plan, deferred_init, parallelize, zoo
from torch_ragged.spmd._plan import UnitRule
from torch_ragged.spmd._resolve import resolve
from torch_ragged.spmd._resolved import MeshShape

R, MESH = Replicate(), MeshShape(("dp", "tp"), (2, 2))
ONE_DIMENSION = ({"tp": None}, {"dp": None}, {"dp": None, "tp": None})
needs_libraries = pytest.mark.skipif(not HAS_LIBRARIES, reason="transformers and diffusers are not installed")


@needs_libraries
class TrainingTest(unittest.TestCase):
    @pytest.mark.slow
    @ranks(4)
    def test_llama_trains_as_on_one_device():
        assert_trains_as_one_device("llama", zoo.llama())

    @ranks(4)
    def test_llama_with_sequence_parallelism_trains_as_on_one_device():
        assert_trains_as_one_device("llama", zoo.llama(sequence_parallel=True))

    @pytest.mark.slow
    @ranks(4)
    def test_llama_with_context_parallelism_trains_as_on_one_device():
        for unit in (True, False):
            assert_trains_as_one_device("llama", zoo.llama(tp=None, cp="tp", unit=unit), attention_dropout=0.0)
        assert_trains_as_one_device("llama", zoo.llama(dp=None, cp="dp"))  # With dropout in attention.

    @pytest.mark.slow
    @ranks(4)
    def test_a_tied_qwen3_trains_as_on_one_device():
        assert_trains_as_one_device("qwen3", zoo.qwen3())

    @ranks(4)
    def test_mixtral_trains_as_on_one_device():
        assert_trains_as_one_device("mixtral", zoo.mixtral())

    @ranks(4)
    def test_t5_trains_as_on_one_device():
        assert_trains_as_one_device("t5", zoo.t5())

    @pytest.mark.slow
    @ranks(4)
    def test_vit_trains_as_on_one_device():
        assert_trains_as_one_device("vit", zoo.vit())

    @ranks(4)
    def test_dit_trains_as_on_one_device():
        assert_trains_as_one_device("dit", zoo.dit())

    @pytest.mark.slow
    @ranks(4)
    def test_qwen3_moe_trains_as_on_one_device():
        assert_trains_as_one_device("qwen3_moe", zoo.qwen3_moe())

    @pytest.mark.slow
    @ranks(4)
    def test_gpt_oss_trains_as_on_one_device():
        assert_trains_as_one_device("gpt_oss", zoo.gpt_oss())

    @pytest.mark.slow
    @ranks(4)
    def test_deepseek_v3_trains_as_on_one_device():
        assert_trains_as_one_device("deepseek_v3", zoo.deepseek_v3())

    @ranks(4)
    def test_flux2_with_fused_blocks_trains_as_on_one_device():
        assert_trains_as_one_device("flux2", zoo.flux2())


def check_static(name, *expected, **options):
    """Trains with static modules, among them ``expected``."""
    model = assert_trains_as_one_device(name, getattr(zoo, name)(**options), mode="static")
    report = model.static_modules.report
    assert set(expected) <= set(report.modules), report


@needs_libraries
@pytest.mark.slow
class StaticTrainingTest(unittest.TestCase):
    """Losses and gradients of static modules are those of one device. Dropout keeps modules around it eager."""

    @ranks(4)
    def test_llama():
        check_static("llama", "model.norm")
        check_static("llama", "model.norm", sequence_parallel=True)

    @ranks(4)
    def test_mixtral():
        check_static("mixtral", "model.norm")
        check_static("mixtral", "model.norm", sequence_parallel=True)

    @ranks(4)
    def test_dit():
        check_static("dit", "proj_out_1", "transformer_blocks.0.attn1.to_q")
        check_static("dit", "proj_out_1", sequence_parallel=True)

    @ranks(4)
    def test_t5():
        check_static("t5", "encoder.final_layer_norm", "encoder.block.0.layer.1")
        check_static("t5", "encoder.final_layer_norm", sequence_parallel=True)

    @ranks(4)
    def test_vit():
        check_static("vit", "classifier", "vit.layers.0.mlp")  # With biases that are zero at first.
        check_static("vit", "classifier", sequence_parallel=True)


@needs_libraries
@pytest.mark.slow
class LongTrainingTest(unittest.TestCase):
    @ranks(4)
    def test_twenty_steps_of_language_models_with_sequence_parallelism():
        for name in ("llama", "qwen3", "mixtral", "t5"):
            assert_trains_as_one_device(name, getattr(zoo, name)(sequence_parallel=True), steps=20)

    @ranks(4)
    def test_twenty_steps_of_vision_models_with_sequence_parallelism():
        for name in ("vit", "dit", "flux2"):
            assert_trains_as_one_device(name, getattr(zoo, name)(sequence_parallel=True), steps=20)

    @ranks(4)
    def test_twenty_steps_of_experts_with_sequence_parallelism():
        for name in ("qwen3_moe", "gpt_oss", "deepseek_v3"):
            assert_trains_as_one_device(name, getattr(zoo, name)(sequence_parallel=True), steps=20)

    @ranks(4)
    def test_a_mixtral_whose_experts_run_one_by_one_trains_as_on_one_device():
        assert_trains_as_one_device("mixtral", zoo.mixtral(), steps=2, experts_implementation="eager")

    @ranks(8)
    def test_eight_ranks_of_two_dimensions():
        """``python -m benchmarks.step.spmd_zoo`` does it for 20 steps, with sequence parallelism."""
        for name in ("llama", "mixtral", "t5", "vit", "dit"):
            assert_trains_as_one_device(name, getattr(zoo, name)(), mesh=(4, 2))

    @ranks(4)
    def test_accumulation_and_activation_checkpointing():
        for name in ("llama", "vit"):
            for options in ({"accumulate": 2}, {"checkpoints": True}):
                assert_trains_as_one_device(name, getattr(zoo, name)(sequence_parallel=True), **options)

    @ranks(4)
    def test_without_units():
        for name in ("llama", "mixtral", "dit"):
            assert_trains_as_one_device(name, getattr(zoo, name)(unit=False))

    @ranks(4)
    def test_one_dimension_alone():
        for name in ("llama", "t5", "vit"):
            assert_trains_as_one_device(name, getattr(zoo, name)(tp=None), mesh=(4, 1))
            assert_trains_as_one_device(name, getattr(zoo, name)(dp=None), mesh=(2, 2))

    @ranks(4)
    def test_replicas_of_shards():
        assert_trains_as_one_device("llama", zoo.llama(dp=("dp", "tp"), tp=None))


class PlanTest(TestCase):
    """What plans do to models that have the names of the libraries' classes."""

    def resolved(self, name, mesh=MESH, **options):
        return resolve(getattr(zoo, name)(**options), named_like(name), mesh)

    def test_every_plan_places_what_its_table_says(self):
        self.assertEqual(set(TABLES), set(zoo.__all__))
        for name, table in TABLES.items():
            self.assertEqual(placements_text(name, named_like(name)), table, name)

    @needs_libraries
    def test_tables_have_the_names_of_the_classes(self):
        for name, table in TABLES.items():
            self.assertEqual(placements_text(name, build(name, **SHORT[name])), table, name)

    @needs_libraries
    def test_every_plan_fits_its_class_with_every_choice(self):
        for name in zoo.__all__:
            model = build(name)
            for options in ({}, {"sequence_parallel": True}, {"unit": False}, *ONE_DIMENSION):
                resolve(getattr(zoo, name)(**options), model, MESH)

    def test_a_dimension_that_is_none_has_no_rules(self):
        for name in zoo.__all__:
            both = self.resolved(name)
            for options in ONE_DIMENSION:
                found = self.resolved(name, **options)
                kept = [place for place, option in enumerate(("dp", "tp")) if option not in options]
                for one, all_rules in zip(found.tensors, both.tensors, strict=True):
                    self.assertEqual(one.run, tuple(each if i in kept else R for i, each in enumerate(all_rules.run)))
                told = {tuple(each is not None for each in boundary.placements) for boundary in found.boundaries}
                self.assertEqual(told, {(place == 0, place == 1) for place in kept})
                self.assertEqual(bool(found.units), "dp" not in options)

    def test_without_units_parameters_are_replicated_over_dp(self):
        for name in zoo.__all__:
            both, found = self.resolved(name), self.resolved(name, unit=False)
            self.assertEqual((found.units, {each.unit for each in found.tensors}), ((), {None}))
            self.assertEqual([each.init for each in found.tensors], [each.run for each in both.tensors])

    def test_context_parallelism_cuts_the_sequence_and_gathers_keys_and_values(self):
        mesh = MeshShape(("dp", "cp", "tp"), (2, 2, 2))
        self.assertExpectedInline(
            str(self.resolved("llama", mesh, cp="cp")).partition("\n\nboundary")[2],
            """\
                               action  placements       rules
<in:input_ids>                         shard   dp=S(0) cp=S(1)  5, 9
<in:labels>                            shard   dp=S(0) cp=S(1)  6, 10
model.embed_tokens.<out>               shard   tp=R             4
model.layers.0.self_attn.<out:0>       shard   tp=R             2
model.layers.0.self_attn.k_proj.<out>  shard   cp=R             11
model.layers.0.self_attn.v_proj.<out>  shard   cp=R             11
model.layers.0.mlp.<out:0>             shard   tp=R             2
lm_head.<out>                          shard   tp=R             4

unit            shard  replicate  params  rules
model.layers.0  cp     dp         9       12
(root)          cp     dp         3""",
        )
        found = self.resolved("llama", MeshShape(("cp",), (2,)), dp=None, tp=None, cp="cp", unit=False)
        self.assertEqual((found.units, {each.init for each in found.tensors}), ((), {(R,)}))

    def test_weights_that_lora_wraps_are_cut_as_before_and_adapters_with_them(self):
        layer, expected = "model.layers.0", {each.name: each.run[1] for each in self.resolved("llama").tensors}
        model = adapted_like_peft(named_like("llama"), ("q_proj", "o_proj", "down_proj"), ("lm_head",))
        found = resolve(zoo.llama().under("base_model.model"), model, MESH)
        placed = {each.name.removeprefix("base_model.model."): each.run[1] for each in found.tensors}
        adapters = {name: placed.pop(name) for name in list(placed) if "lora" in name}
        copy = placed.pop("lm_head.modules_to_save.default.weight")
        names = {name: name.replace("base_layer.", "").replace("original_module.", "") for name in placed}
        self.assertEqual({names[name]: placement for name, placement in placed.items()}, expected)
        self.assertEqual(
            (copy, {each.unit for each in found.tensors if "lora" in each.name}), (Shard(0), {f"base_model.model.{layer}"})
        )
        self.assertEqual(
            adapters,
            {
                f"{layer}.self_attn.q_proj.lora_A.default.weight": R,
                f"{layer}.self_attn.q_proj.lora_B.default.weight": Shard(0),
                f"{layer}.self_attn.o_proj.lora_A.default.weight": Shard(1),
                f"{layer}.self_attn.o_proj.lora_B.default.weight": R,
                f"{layer}.mlp.down_proj.lora_A.default.weight": Shard(1),
                f"{layer}.mlp.down_proj.lora_B.default.weight": R,
            },
        )

    def test_segments_of_flux2_are_in_the_proportions_of_its_config(self):
        fused = [rule.placement for rule in zoo.flux2(mlp_ratio=5).rules if "single" in rule.path and "weight" in rule.path]
        self.assertEqual(fused, [(InterleavedShard(0, (1, 1, 1, 5, 5)),), (InterleavedShard(1, (1, 5)),)])

    def test_other_names_of_mesh_dimensions_take_the_place_of_dp_and_tp(self):
        mesh = MeshShape(("replicas", "model"), (2, 2))
        resolved = self.resolved("llama", mesh, dp="replicas", tp="model")
        self.assertEqual(str(resolved.units[0].shard), "('replicas',)")
        resolved = self.resolved("llama", mesh, dp=("replicas", "model"), tp=None)
        self.assertEqual((resolved.units[0].replicate, resolved.units[0].shard), (("replicas",), ("model",)))
        self.assertEqual({boundary.placements for boundary in resolved.boundaries}, {(Shard(0), Shard(0))})

    def test_a_plan_survives_json(self):
        for name in zoo.__all__:
            plan = getattr(zoo, name)()
            self.assertEqual(Plan.from_json(plan.to_json()), plan)

    def test_layers_are_units_that_reshard(self):
        (unit,) = [rule for rule in zoo.llama().rules if isinstance(rule, UnitRule)]
        self.assertEqual(repr(unit), r'plan.unit(r"model\.layers\.\d+", "dp")')


@needs_libraries
class SequenceTest(unittest.TestCase):
    @ranks(4)
    def test_the_sequence_is_cut_between_attention_and_feed_forward_parts():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        torch.manual_seed(0)
        model = parallelize(deferred_init(lambda: build("llama")), zoo.llama(sequence_parallel=True), mesh)
        seen = {}
        for name, module in model.named_modules():
            if name.endswith("norm"):
                module.register_forward_hook(lambda _, args, output, name=name: seen.update({name: output.placements}))
        model(**batch_of("llama"))
        assert seen.pop("model.layers.0.input_layernorm") == (Shard(0), Replicate())
        assert len(seen) == 4 and set(seen.values()) == {(Shard(0), Shard(1))}, seen


if __name__ == "__main__":
    unittest.main()
