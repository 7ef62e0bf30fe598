"""Plan.from_transformers: the plans that models carry become rules, style by style."""

import pytest
import torch
from common import error_of, ranks
from expecttest import TestCase
from spmd_common import wrapped
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from zoo_models import HAS_LIBRARIES, adapted_like_peft, assert_trains_as_one_device, build

from torch_ragged import InterleavedShard
from torch_ragged.spmd import Plan
from torch_ragged.spmd._resolve import resolve
from torch_ragged.spmd._resolved import MeshShape

needs_transformers = pytest.mark.skipif(not HAS_LIBRARIES, reason="transformers is not installed")


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Parameter(torch.zeros(4, 24, 8)), nn.Parameter(torch.zeros(4, 8, 12))

    def forward(self, x):
        return x


class Carrier(nn.Module):
    """Carries plans as a model of transformers does."""

    def __init__(self, tp_plan=None, fsdp_plan=None):
        super().__init__()
        self.tp_plan, self.fsdp_plan = tp_plan or {}, fsdp_plan or {}
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(8, 24), "down": nn.Linear(24, 8), "experts": Experts(), "norm": nn.LayerNorm(8)})
            for _ in range(12)
        )
        self.head = nn.Linear(8, 16, bias=False)

    def forward(self, input_ids, labels=None, position_ids=None):
        return self.head(self.embed(input_ids))


def rules_of(style, name="layers.*.up"):
    return "\n".join(map(repr, Plan.from_transformers(Carrier({name: style})).rules[:-1]))


class StyleTest(TestCase):
    def test_column_styles_cut_weight_and_bias(self):
        self.assertExpectedInline(
            "\n\n".join(map(rules_of, ("colwise", "colwise_rep", "colwise_gather_output"))),
            """\
plan.shard(r"layers\\.\\d+\\.up\\.(weight|bias)", Shard(0), "tp")

plan.shard(r"layers\\.\\d+\\.up\\.(weight|bias)", Shard(0), "tp")
plan.shard(r"layers\\.\\d+\\.up\\.<out>", Replicate(), "tp")

plan.shard(r"layers\\.\\d+\\.up\\.(weight|bias)", Shard(0), "tp")
plan.shard(r"layers\\.\\d+\\.up\\.<out>", Replicate(), "tp")""",
        )

    def test_row_styles_cut_the_weight_and_add_up_the_output(self):
        self.assertExpectedInline(
            rules_of("rowwise", "layers.*.down"),
            """\
plan.shard(r"layers\\.\\d+\\.down\\.weight", Shard(1), "tp")
plan.shard(r"layers\\.\\d+\\.down\\.<out>", Replicate(), "tp")""",
        )
        for style in ("rowwise_rep", "rowwise_split_input"):
            self.assertEqual(rules_of(style), rules_of("rowwise"))

    def test_styles_of_parameters_cut_fused_experts(self):
        self.assertExpectedInline(
            "\n".join(
                [
                    rules_of("packed_colwise", "layers.*.experts.gate_up_proj"),
                    rules_of("rowwise", "layers.*.experts.down_proj"),
                    rules_of("moe_tp_experts", "layers.*.experts"),
                    rules_of("colwise", "layers.*.experts.gate_up_proj"),
                ]
            ),
            """\
plan.shard(r"layers\\.\\d+\\.experts\\.gate_up_proj", InterleavedShard(dim=1, sizes=2), "tp")
plan.shard(r"layers\\.\\d+\\.experts\\.down_proj", Shard(2), "tp")
plan.shard(r"layers\\.\\d+\\.experts\\.<out>", Replicate(), "tp")
plan.shard(r"layers\\.\\d+\\.experts\\.gate_up_proj", Shard(1), "tp")""",
        )

    def test_packed_styles_of_modules_cut_both_halves(self):
        plan = Plan.from_transformers(Carrier({"layers.*.up": "packed_colwise", "layers.*.down": "packed_rowwise"}))
        found = {tensor.name: tensor.run for tensor in resolve(plan, Carrier(), MeshShape(("tp",), (2,))).tensors}
        self.assertEqual(found["layers.11.up.weight"], (InterleavedShard(0, 2),))
        self.assertEqual(found["layers.11.up.bias"], (InterleavedShard(0, 2),))
        self.assertEqual(found["layers.0.down.weight"], (InterleavedShard(1, 2),))
        self.assertEqual(found["layers.0.down.bias"], (Replicate(),))

    def test_embeddings_sequences_and_sums(self):
        self.assertExpectedInline(
            "\n".join(
                [
                    rules_of("embedding_rowwise", "embed"),
                    rules_of("embedding_colwise", "embed"),
                    rules_of("sequence_parallel", "layers.*.norm"),
                    rules_of("all_reduce", "layers.*.norm"),
                ]
            ),
            """\
plan.shard(r"embed\\.weight", Shard(0), "tp")
plan.shard(r"embed\\.<out>", Replicate(), "tp")
plan.shard(r"embed\\.weight", Shard(1), "tp")
plan.shard(r"embed\\.<out>", Replicate(), "tp")
plan.shard(r"layers\\.\\d+\\.norm\\.<in>", Shard(1), "tp")
plan.shard(r"layers\\.\\d+\\.norm\\.<out>", Replicate(), "tp")""",
        )

    def test_styles_that_repair_local_tensors_say_nothing(self):
        repairs = ("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "moe_identity_expert", "local_params")
        for style in repairs:
            self.assertEqual(rules_of(style, "layers.*.norm"), "")

    def test_entries_for_parts_that_the_model_lacks_are_left_out(self):
        plan = Plan.from_transformers(Carrier({"layers.*.shared.up": "strange", "embed": "embedding_rowwise"}))
        self.assertEqual([rule.path for rule in plan.rules], [r"embed\.weight", r"embed\.<out>", ""])

    @needs_transformers
    def test_every_style_of_this_transformers_is_known(self):
        from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

        refused = [style for style in ALL_PARALLEL_STYLES if "no meaning" in error_of(rules_of, style)]
        self.assertEqual(sorted(refused), ["ep_dispatch_experts", "grouped_gemm"])


class UnitTest(TestCase):
    def test_units_and_the_batch(self):
        plan = {"embed": "free_full_weight", "layers.*.up": "free_full_weight", "head": "keep_full_weight"}
        self.assertExpectedInline(
            repr(Plan.from_transformers(Carrier(fsdp_plan=plan), tp=None, fsdp="dp")),
            """\
plan = Plan()
plan.shard("<in:input_ids>", Shard(0), "dp")
plan.shard("<in:labels>", Shard(0), "dp")
plan.unit("embed", "dp", reshard_after_forward=True)
plan.unit(r"layers\\.\\d+\\.up", "dp", reshard_after_forward=True)
plan.unit("head", "dp", reshard_after_forward=False)""",
        )

    def test_modules_that_share_a_parameter_stay_in_the_unit_of_the_root(self):
        model = Carrier(fsdp_plan={"embed": "free_full_weight", "layers.*.up": "free_full_weight", "head": "keep_full_weight"})
        model.head.weight = model.embed.weight
        plan = Plan.from_transformers(model, tp=None, fsdp="dp")
        units = {unit.module: unit.params for unit in resolve(plan, model, MeshShape(("dp",), (2,))).units}
        self.assertIn("embed.weight", units[""])
        self.assertEqual(len(units), 13)

    def test_without_fsdp_other_parameters_are_replicated(self):
        plan = Plan.from_transformers(Carrier({"embed": "embedding_rowwise"}))
        found = {tensor.name: tensor.run for tensor in resolve(plan, Carrier(), MeshShape(("tp",), (2,))).tensors}
        self.assertEqual(found.pop("embed.weight"), (Shard(0),))
        self.assertEqual(set(found.values()), {(Replicate(),)})


class ErrorTest(TestCase):
    def test_styles_without_a_meaning_are_named_with_what_to_write(self):
        plan = {"layers.*.experts": "ep_dispatch_experts", "layers.*.experts.down_proj": "grouped_gemm", "head": "strange"}
        self.assertExpectedInline(
            wrapped(error_of(Plan.from_transformers, Carrier(plan))),
            """\
ValueError: the tp_plan of Carrier cannot be read:
  layers.*.experts has the style 'ep_dispatch_experts': it sends tokens to experts inside of forward, by an
    | all-to-all of local tensors, which has no meaning for DTensors. Take it out of tp_plan, and cut inside
    | of each expert: style 'packed_colwise' for gate_up_proj, 'rowwise' for down_proj and 'moe_tp_experts'
    | for the experts
  layers.*.experts.down_proj has the style 'grouped_gemm': it gives each rank whole experts, and tokens must
    | follow them, which has no meaning for DTensors. Take it out of tp_plan, and cut inside of each expert:
    | style 'packed_colwise' for gate_up_proj, 'rowwise' for down_proj and 'moe_tp_experts' for the experts
  head has the unknown style 'strange'. Take it out of tp_plan, and add what it means to the plan, such as
    | plan.shard(r"head\\.weight", Shard(0), "tp"). Known styles are colwise, colwise_rep,
    | colwise_gather_output, rowwise, rowwise_rep, rowwise_split_input, packed_colwise, packed_rowwise,
    | embedding_rowwise, embedding_colwise, sequence_parallel, all_reduce, moe_tp_experts,
    | moe_identity_expert, replicate, replicated_with_grad_allreduce, mla_kv_a_proj, local_params""",
        )

    def test_a_model_without_plans(self):
        self.assertExpectedInline(
            wrapped(
                error_of(Plan.from_transformers, nn.Linear(2, 2)),
                error_of(Plan.from_transformers, Carrier({"head": "colwise"}), fsdp="dp"),
                error_of(Plan.from_transformers, Carrier(fsdp_plan={"head": "often"}), tp=None, fsdp="dp"),
            ),
            """\
ValueError: Linear has no tp_plan: take a plan of torch_ragged.spmd.zoo, or write one with Plan()
ValueError: Carrier has no fsdp_plan: take a plan of torch_ragged.spmd.zoo, or write one with Plan()
ValueError: the fsdp_plan of Carrier has the style 'often' for head: the styles are free_full_weight,
    | keep_full_weight. Leave fsdp out, and add plan.unit("head", ...)""",
        )


class PeftTest(TestCase):
    def test_the_plan_of_a_model_that_lora_wraps_has_its_names(self):
        plans = (
            {"layers.*.up": "colwise", "layers.*.down": "rowwise", "layers.*.experts.down_proj": "colwise"},
            {"layers.*": "free_full_weight"},
        )
        self.assertExpectedInline(
            wrapped(repr(Plan.from_transformers(adapted_like_peft(Carrier(*plans), ("up",)), fsdp="dp"))),
            """\
plan = Plan()
plan.shard(r"base_model\\.model\\.layers\\.\\d+\\.up\\.((base_layer|original_module|modules_to_save\\.\\w+|lora_B\\.\\w+)\\.)?(weight|bias)",
    | Shard(0), "tp")
plan.shard(r"base_model\\.model\\.layers\\.\\d+\\.down\\.weight", Shard(1), "tp")
plan.shard(r"base_model\\.model\\.layers\\.\\d+\\.down\\.<out>", Replicate(), "tp")
plan.shard(r"base_model\\.model\\.layers\\.\\d+\\.experts\\.down_proj", Shard(1), "tp")
plan.shard(r"base_model\\.model.<in:input_ids>", Shard(0), "dp")
plan.shard(r"base_model\\.model.<in:labels>", Shard(0), "dp")
plan.unit(r"base_model\\.model\\.layers\\.\\d+", "dp", reshard_after_forward=True)""",
        )


@needs_transformers
class ModelTest(TestCase):
    def test_the_plan_of_a_qwen3_as_a_user_would_write_it(self):
        self.assertExpectedInline(
            wrapped(repr(Plan.from_transformers(build("qwen3"), fsdp="dp"))),
            """\
plan = Plan()
plan.shard(r"lm_head\\.weight", Shard(0), "tp")
plan.shard(r"lm_head\\.<out>", Replicate(), "tp")
plan.shard(r"model\\.embed_tokens\\.weight", Shard(0), "tp")
plan.shard(r"model\\.embed_tokens\\.<out>", Replicate(), "tp")
plan.shard(r"model\\.layers\\.\\d+\\.self_attn\\.q_proj\\.weight", Shard(0), "tp")
plan.shard(r"model\\.layers\\.\\d+\\.self_attn\\.k_proj\\.weight", Shard(0), "tp")
plan.shard(r"model\\.layers\\.\\d+\\.self_attn\\.v_proj\\.weight", Shard(0), "tp")
plan.shard(r"model\\.layers\\.\\d+\\.self_attn\\.o_proj\\.weight", Shard(1), "tp")
plan.shard(r"model\\.layers\\.\\d+\\.self_attn\\.o_proj\\.<out>", Replicate(), "tp")
plan.shard(r"model\\.layers\\.\\d+\\.mlp\\.gate_proj\\.weight", Shard(0), "tp")
plan.shard(r"model\\.layers\\.\\d+\\.mlp\\.up_proj\\.weight", Shard(0), "tp")
plan.shard(r"model\\.layers\\.\\d+\\.mlp\\.down_proj\\.weight", Shard(1), "tp")
plan.shard(r"model\\.layers\\.\\d+\\.mlp\\.down_proj\\.<out>", Replicate(), "tp")
plan.shard("<in:input_ids>", Shard(0), "dp")
plan.shard("<in:inputs_embeds>", Shard(0), "dp")
plan.shard("<in:attention_mask>", Shard(0), "dp")
plan.shard("<in:labels>", Shard(0), "dp")
plan.unit(r"model\\.layers\\.\\d+", "dp", reshard_after_forward=True)
plan.unit(r"model\\.norm", "dp", reshard_after_forward=False)""",
        )

    def test_the_plans_of_many_models_fit_them(self):
        for name in ("llama", "qwen3", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"):
            model = build(name)
            resolved = resolve(Plan.from_transformers(model, fsdp="dp"), model, MeshShape(("dp", "tp"), (2, 2)))
            self.assertGreater(len(resolved.units), 2)

    @pytest.mark.slow
    @ranks(4)
    def test_a_tied_qwen3_trains_as_on_one_device():
        assert_trains_as_one_device("qwen3", Plan.from_transformers(build("qwen3"), fsdp="dp"))

    @pytest.mark.slow
    @ranks(4)
    def test_a_deepseek_v3_trains_as_on_one_device():
        assert_trains_as_one_device("deepseek_v3", Plan.from_transformers(build("deepseek_v3"), fsdp="dp"))

    @pytest.mark.slow
    @ranks(4)
    def test_language_models_train_as_on_one_device():
        for name in ("llama", "mixtral", "qwen3_moe", "gpt_oss"):
            assert_trains_as_one_device(name, Plan.from_transformers(build(name), fsdp="dp"), steps=20)
