"""Plans of the zoo: unchanged models of transformers and diffusers train under them as on one device."""

import unittest

import pytest
import torch
from common import ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from zoo_models import HAS_LIBRARIES, assert_trains_as_one_device, batch_of, build

from torch_ragged.spmd import Plan, deferred_init, parallelize, zoo
from torch_ragged.spmd._plan import UnitRule
from torch_ragged.spmd._resolve import resolve
from torch_ragged.spmd._resolved import MeshShape

pytestmark = pytest.mark.skipif(not HAS_LIBRARIES, reason="transformers and diffusers are not installed")


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


class PlanTest(unittest.TestCase):
    def test_every_plan_fits_its_class_with_every_choice(self):
        for name in zoo.__all__:
            model = build(name)
            for options in (
                {},
                {"sequence_parallel": True},
                {"unit": False},
                {"tp": None},
                {"dp": None},
                {"dp": None, "tp": None},
            ):
                resolve(getattr(zoo, name)(**options), model, MeshShape(("dp", "tp"), (2, 2)))

    def test_other_names_of_mesh_dimensions_take_the_place_of_dp_and_tp(self):
        model, mesh = build("llama"), MeshShape(("replicas", "model"), (2, 2))
        resolved = resolve(zoo.llama(dp="replicas", tp="model"), model, mesh)
        self.assertEqual(str(resolved.units[0].shard), "('replicas',)")
        resolved = resolve(zoo.llama(dp=("replicas", "model"), tp=None), model, mesh)
        self.assertEqual((resolved.units[0].replicate, resolved.units[0].shard), (("replicas",), ("model",)))
        self.assertEqual({boundary.placements for boundary in resolved.boundaries}, {(Shard(0), Shard(0))})

    def test_a_plan_survives_json(self):
        for name in zoo.__all__:
            plan = getattr(zoo, name)()
            self.assertEqual(Plan.from_json(plan.to_json()), plan)

    def test_layers_are_units_that_reshard(self):
        (unit,) = [rule for rule in zoo.llama().rules if isinstance(rule, UnitRule)]
        self.assertEqual(repr(unit), r'plan.unit(r"model\.layers\.\d+", "dp")')


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
