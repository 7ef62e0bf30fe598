"""The offline planner: models, other schemes, memory arithmetic and the command line."""

import contextlib
import io
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import textwrap
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from unittest import mock

import torch
from torch import nn
from torch.testing._internal.common_utils import TestCase

from torch_ragged.fsdp import TensorSpec, blocks, elements, plan_layout, rows, segments, tensor
from torch_ragged.offline import BUILT_IN, Model, ModelPlanner, Parameter, granularity_policy, load_model, main, tensor_specs
from torch_ragged.offline._memory import Budget, CollectiveBytes, Precision, RankMemory, collectives, offload_fits, zero_memory
from torch_ragged.offline._model_plan import Sizes
from torch_ragged.offline._models import module_groups
from torch_ragged.offline._muon import muon_plan
from torch_ragged.offline._peers import RowBuffer, fsdp2_shard
from torch_ragged.offline._report import bytes_text
from torch_ragged.offline._shapes import FAMILIES

LLAMA = dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8)
# Parameters of published models as their model cards count them, by the fields of their config.json.
CONFIGS = {
    8_030_261_248: dict(LLAMA, model_type="llama", vocab_size=128256),  # Llama-3-8B
    7_241_732_096: dict(LLAMA, model_type="mistral", vocab_size=32000, head_dim=None),  # Mistral-7B
    46_702_792_704: dict(LLAMA, model_type="mixtral", vocab_size=32000, num_local_experts=8),  # Mixtral-8x7B
    494_032_768: dict(  # Qwen2.5-0.5B
        model_type="qwen2",
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=151936,
        tie_word_embeddings=True,
    ),
    8_190_735_360: dict(  # Qwen3-8B
        LLAMA, model_type="qwen3", intermediate_size=12288, num_hidden_layers=36, head_dim=128, vocab_size=151936
    ),
    20_914_757_184: dict(  # GPT-OSS-20B
        model_type="gpt_oss",
        hidden_size=2880,
        intermediate_size=2880,
        num_hidden_layers=24,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        num_local_experts=32,
        vocab_size=201088,
    ),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(8, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 4) for _ in range(2))
        self.norm = nn.LayerNorm(8)


class TinyMoE(nn.Module):
    """Two blocks with experts; the head is tied to the embedding, and a scale of the first block to that of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.decoder.layers[1].norm.weight = self.decoder.layers[0].norm.weight


def not_a_module() -> int:
    return 1


def broken() -> nn.Module:
    raise RuntimeError("no such weights")


def spec(shape, block=1, name="t"):
    return TensorSpec(name, tuple(shape), tuple(range(len(shape))), block)


class Fused:
    """A fused (4, 6, 2) tensor in blocks of 8 elements, counted anew every ``period`` elements."""

    name, shape, dims, block, numel, segments = "w", (4, 6, 2), (0, 1), 8, 48, ()

    def __init__(self, period):
        self.period = period


def run(*arguments):
    """Exit status, standard output and standard error of the tool."""
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        status = main([str(argument) for argument in arguments])
    return status, out.getvalue(), error.getvalue()


def without_ends(text):
    """``text`` without this file's name in front and without spaces at the ends of lines."""
    return re.sub(r" +$", "", text.removeprefix(f"{__name__}:"), flags=re.MULTILINE)


class Folder(TestCase):
    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def write(self, content, name="config.json"):
        path = self.folder / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path


class ModelTest(Folder):
    def test_built_in_models_have_their_published_sizes(self):
        sizes = {name: (model.numel, model.num_tensors, len(model.groups)) for name, model in map(named, BUILT_IN)}
        self.assertEqual(
            sizes,
            {
                "deepseek-v3": (671_026_419_200, 45_395, 62),
                "gemma-3-4b": (3_880_263_168, 444, 35),
                "gpt-oss-120b": (116_829_156_672, 471, 37),
                "gpt-oss-20b": (20_914_757_184, 315, 25),
                "llama-3-70b": (70_553_706_496, 723, 81),
                "llama-3-8b": (8_030_261_248, 291, 33),
                "llama-3.2-1b": (1_235_814_400, 146, 17),
                "mistral-7b": (7_241_732_096, 291, 33),
                "mixtral-8x7b": (46_702_792_704, 995, 33),
                "qwen3-0.6b": (596_049_920, 310, 29),
                "qwen3-30b-a3b": (30_532_122_624, 18_867, 49),
                "qwen3-8b": (8_190_735_360, 399, 37),
            },
        )

    def test_expert_matrices_of_built_in_models(self):
        found = {}
        for name, model in map(named, BUILT_IN):
            if model.has_experts:
                found[name] = dict(Counter(one.shape for group in model.groups.values() for one in group if one.expert))
        self.assertEqual(
            found,
            {
                "deepseek-v3": {(2048, 7168): 58 * 257 * 2, (7168, 2048): 58 * 257},
                "gpt-oss-120b": {(128, 5760, 2880): 36, (128, 2880, 2880): 36},
                "gpt-oss-20b": {(32, 5760, 2880): 24, (32, 2880, 2880): 24},
                "mixtral-8x7b": {(14336, 4096): 32 * 8 * 2, (4096, 14336): 32 * 8},
                "qwen3-30b-a3b": {(768, 2048): 48 * 128 * 2, (2048, 768): 48 * 128},
            },
        )

    def test_configs_of_published_models(self):
        for numel, fields in CONFIGS.items():
            model = load_model(str(self.write(fields)))
            self.assertEqual(model.numel, numel, fields)
            self.assertEqual(len(model.groups), fields["num_hidden_layers"] + 1)

    def test_a_config_gives_the_same_as_the_built_in_model(self):
        fields = dict(
            model_type="qwen3_moe",
            hidden_size=2048,
            intermediate_size=6144,
            moe_intermediate_size=768,
            num_experts=128,
            num_hidden_layers=48,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            vocab_size=151936,
        )
        self.write(fields)
        built_in = load_model("Qwen3-30B-A3B").groups
        self.assertTrue(load_model(str(self.folder)).groups == built_in)
        dense = load_model(str(self.write(dict(fields, mlp_only_layers=[0], decoder_sparse_step=2)))).groups
        routed = [name for name, group in dense.items() if any(one.expert for one in group)]
        self.assertEqual(routed, [f"model.layers.{layer}" for layer in range(1, 48, 2)])

    def test_deepseek_without_a_query_rank_and_with_no_shared_expert(self):
        fields = dict(
            model_type="deepseek_v3",
            hidden_size=16,
            intermediate_size=32,
            moe_intermediate_size=8,
            n_routed_experts=2,
            first_k_dense_replace=1,
            num_hidden_layers=2,
            num_attention_heads=2,
            q_lora_rank=None,
            kv_lora_rank=4,
            qk_nope_head_dim=3,
            qk_rope_head_dim=2,
            v_head_dim=5,
            vocab_size=7,
            tie_word_embeddings=True,
        )
        groups = load_model(str(self.write(fields))).groups
        shapes = {one.name.removeprefix("model.layers.1."): one.shape for one in groups["model.layers.1"]}
        expected = {
            "self_attn.q_proj.weight": (2 * 5, 16),
            "self_attn.kv_a_proj_with_mqa.weight": (4 + 2, 16),
            "self_attn.kv_a_layernorm.weight": (4,),
            "self_attn.kv_b_proj.weight": (2 * 8, 4),
            "self_attn.o_proj.weight": (16, 2 * 5),
            "mlp.gate.weight": (2, 16),
            "mlp.gate.e_score_correction_bias": (2,),
            "input_layernorm.weight": (16,),
            "post_attention_layernorm.weight": (16,),
        }
        for expert in range(2):
            for name, shape in (("gate", (8, 16)), ("up", (8, 16)), ("down", (16, 8))):
                expected[f"mlp.experts.{expert}.{name}_proj.weight"] = shape
        self.assertEqual(shapes, expected)
        self.assertEqual([one.name for one in groups["rest"]], ["model.embed_tokens.weight", "model.norm.weight"])
        missing = {name: value for name, value in fields.items() if name not in ("q_lora_rank", "first_k_dense_replace")}
        for same in (missing, dict(fields, q_lora_rank=0, first_k_dense_replace=0, n_shared_experts=0)):
            first = load_model(str(self.write(same))).groups["model.layers.0"]
            self.assertEqual({one.name.removeprefix("model.layers.0."): one.shape for one in first}, expected)

    def test_names_and_shapes_of_each_family(self):
        """Of a block with two experts, as checkpoints have it. A star marks expert matrices."""
        fields = dict(
            hidden_size=8, intermediate_size=12, moe_intermediate_size=6, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=10, num_local_experts=2, num_experts=2, n_routed_experts=2, n_shared_experts=3,
            first_k_dense_replace=1, mlp_only_layers=[0], kv_lora_rank=3, q_lora_rank=5, qk_nope_head_dim=7, qk_rope_head_dim=2,
            v_head_dim=1,
        )  # fmt: skip
        texts = []
        for family in FAMILIES:
            loaded = [
                load_model(str(self.write(dict(fields, model_type=family, **flags)))).groups
                for flags in ({}, dict(attention_bias=False, mlp_bias=False), dict(attention_bias=True, mlp_bias=True))
            ]
            default, without, biased = (described(groups["model.layers.1"], "model.layers.1.") for groups in loaded)
            self.assertEqual(default, biased if family == "gpt_oss" else without)
            texts.append(textwrap.fill(" ".join([f"{family}:", *biased]), 125))
            texts.append(f"  without biases: all but {len(biased) - len(without)}")
            rest = "model.embed_tokens.weight=10x8 model.norm.weight=8 lm_head.weight=10x8".split()
            self.assertEqual(described(loaded[0]["rest"]), rest[:2] if "gemma3" in family else rest)  # Gemma's head is tied.
            if family in ("deepseek_v3", "qwen3_moe"):
                dense = [one for one in described(loaded[0]["model.layers.0"], "model.layers.0.") if "mlp" in one]
                self.assertEqual(" ".join(dense), "mlp.gate_proj.weight=12x8 mlp.up_proj.weight=12x8 mlp.down_proj.weight=8x12")
        original = load_model("gpt-oss-120b").groups
        texts.append(textwrap.fill(" ".join(["gpt-oss-120b:", *described(original["block.35"], "block.35.")]), 125))
        texts.append("  " + " ".join(described(original["rest"])))
        self.assertExpectedInline(
            "\n".join(texts),
            """\
deepseek_v3: self_attn.q_a_proj.weight=5x8 self_attn.q_a_proj.bias=5 self_attn.q_a_layernorm.weight=5
self_attn.q_b_proj.weight=36x5 self_attn.kv_a_proj_with_mqa.weight=5x8 self_attn.kv_a_proj_with_mqa.bias=5
self_attn.kv_a_layernorm.weight=3 self_attn.kv_b_proj.weight=32x3 self_attn.o_proj.weight=8x4 self_attn.o_proj.bias=8
mlp.experts.0.gate_proj.weight*=6x8 mlp.experts.0.up_proj.weight*=6x8 mlp.experts.0.down_proj.weight*=8x6
mlp.experts.1.gate_proj.weight*=6x8 mlp.experts.1.up_proj.weight*=6x8 mlp.experts.1.down_proj.weight*=8x6 mlp.gate.weight=2x8
mlp.gate.e_score_correction_bias=2 mlp.shared_experts.gate_proj.weight*=18x8 mlp.shared_experts.up_proj.weight*=18x8
mlp.shared_experts.down_proj.weight*=8x18 input_layernorm.weight=8 post_attention_layernorm.weight=8
  without biases: all but 3
gemma3: self_attn.q_proj.weight=1024x8 self_attn.q_proj.bias=1024 self_attn.k_proj.weight=512x8 self_attn.k_proj.bias=512
self_attn.v_proj.weight=512x8 self_attn.v_proj.bias=512 self_attn.o_proj.weight=8x1024 self_attn.o_proj.bias=8
self_attn.q_norm.weight=256 self_attn.k_norm.weight=256 mlp.gate_proj.weight=12x8 mlp.up_proj.weight=12x8
mlp.down_proj.weight=8x12 input_layernorm.weight=8 post_attention_layernorm.weight=8 pre_feedforward_layernorm.weight=8
post_feedforward_layernorm.weight=8
  without biases: all but 4
gemma3_text: self_attn.q_proj.weight=1024x8 self_attn.q_proj.bias=1024 self_attn.k_proj.weight=512x8
self_attn.k_proj.bias=512 self_attn.v_proj.weight=512x8 self_attn.v_proj.bias=512 self_attn.o_proj.weight=8x1024
self_attn.o_proj.bias=8 self_attn.q_norm.weight=256 self_attn.k_norm.weight=256 mlp.gate_proj.weight=12x8
mlp.up_proj.weight=12x8 mlp.down_proj.weight=8x12 input_layernorm.weight=8 post_attention_layernorm.weight=8
pre_feedforward_layernorm.weight=8 post_feedforward_layernorm.weight=8
  without biases: all but 4
gpt_oss: self_attn.sinks=4 self_attn.q_proj.weight=256x8 self_attn.q_proj.bias=256 self_attn.k_proj.weight=128x8
self_attn.k_proj.bias=128 self_attn.v_proj.weight=128x8 self_attn.v_proj.bias=128 self_attn.o_proj.weight=8x256
self_attn.o_proj.bias=8 mlp.router.weight=2x8 mlp.router.bias=2 mlp.experts.gate_up_proj*=2x8x24
mlp.experts.gate_up_proj_bias=2x24 mlp.experts.down_proj*=2x12x8 mlp.experts.down_proj_bias=2x8 input_layernorm.weight=8
post_attention_layernorm.weight=8
  without biases: all but 4
llama: self_attn.q_proj.weight=8x8 self_attn.q_proj.bias=8 self_attn.k_proj.weight=4x8 self_attn.k_proj.bias=4
self_attn.v_proj.weight=4x8 self_attn.v_proj.bias=4 self_attn.o_proj.weight=8x8 self_attn.o_proj.bias=8
mlp.gate_proj.weight=12x8 mlp.gate_proj.bias=12 mlp.up_proj.weight=12x8 mlp.up_proj.bias=12 mlp.down_proj.weight=8x12
mlp.down_proj.bias=8 input_layernorm.weight=8 post_attention_layernorm.weight=8
  without biases: all but 7
mistral: self_attn.q_proj.weight=8x8 self_attn.q_proj.bias=8 self_attn.k_proj.weight=4x8 self_attn.k_proj.bias=4
self_attn.v_proj.weight=4x8 self_attn.v_proj.bias=4 self_attn.o_proj.weight=8x8 self_attn.o_proj.bias=8
mlp.gate_proj.weight=12x8 mlp.gate_proj.bias=12 mlp.up_proj.weight=12x8 mlp.up_proj.bias=12 mlp.down_proj.weight=8x12
mlp.down_proj.bias=8 input_layernorm.weight=8 post_attention_layernorm.weight=8
  without biases: all but 7
mixtral: self_attn.q_proj.weight=8x8 self_attn.k_proj.weight=4x8 self_attn.v_proj.weight=4x8 self_attn.o_proj.weight=8x8
block_sparse_moe.gate.weight=2x8 block_sparse_moe.experts.0.w1.weight*=12x8 block_sparse_moe.experts.0.w2.weight*=8x12
block_sparse_moe.experts.0.w3.weight*=12x8 block_sparse_moe.experts.1.w1.weight*=12x8
block_sparse_moe.experts.1.w2.weight*=8x12 block_sparse_moe.experts.1.w3.weight*=12x8 input_layernorm.weight=8
post_attention_layernorm.weight=8
  without biases: all but 0
qwen2: self_attn.q_proj.weight=8x8 self_attn.q_proj.bias=8 self_attn.k_proj.weight=4x8 self_attn.k_proj.bias=4
self_attn.v_proj.weight=4x8 self_attn.v_proj.bias=4 self_attn.o_proj.weight=8x8 mlp.gate_proj.weight=12x8
mlp.up_proj.weight=12x8 mlp.down_proj.weight=8x12 input_layernorm.weight=8 post_attention_layernorm.weight=8
  without biases: all but 0
qwen3: self_attn.q_proj.weight=512x8 self_attn.q_proj.bias=512 self_attn.k_proj.weight=256x8 self_attn.k_proj.bias=256
self_attn.v_proj.weight=256x8 self_attn.v_proj.bias=256 self_attn.o_proj.weight=8x512 self_attn.o_proj.bias=8
self_attn.q_norm.weight=128 self_attn.k_norm.weight=128 mlp.gate_proj.weight=12x8 mlp.up_proj.weight=12x8
mlp.down_proj.weight=8x12 input_layernorm.weight=8 post_attention_layernorm.weight=8
  without biases: all but 4
qwen3_moe: self_attn.q_proj.weight=8x8 self_attn.q_proj.bias=8 self_attn.k_proj.weight=4x8 self_attn.k_proj.bias=4
self_attn.v_proj.weight=4x8 self_attn.v_proj.bias=4 self_attn.o_proj.weight=8x8 self_attn.o_proj.bias=8
self_attn.q_norm.weight=2 self_attn.k_norm.weight=2 mlp.gate.weight=2x8 mlp.experts.0.gate_proj.weight*=6x8
mlp.experts.0.up_proj.weight*=6x8 mlp.experts.0.down_proj.weight*=8x6 mlp.experts.1.gate_proj.weight*=6x8
mlp.experts.1.up_proj.weight*=6x8 mlp.experts.1.down_proj.weight*=8x6 input_layernorm.weight=8
post_attention_layernorm.weight=8
  without biases: all but 4
gpt-oss-120b: attn.sinks=64 attn.norm.scale=2880 attn.qkv.weight=5120x2880 attn.qkv.bias=5120 attn.out.weight=2880x4096
attn.out.bias=2880 mlp.mlp1_weight*=128x5760x2880 mlp.mlp1_bias=128x5760 mlp.mlp2_weight*=128x2880x2880
mlp.mlp2_bias=128x2880 mlp.norm.scale=2880 mlp.gate.weight=128x2880 mlp.gate.bias=128
  embedding.weight=201088x2880 norm.scale=2880 unembedding.weight=201088x2880""",
        )

    def test_children_of_outermost_lists_are_groups_and_tied_parameters_count_once(self):
        module = TinyMoE()
        groups = module_groups(module)
        self.assertEqual(list(groups), ["decoder.layers.0", "decoder.layers.1", "rest"])
        self.assertEqual([one.name for one in groups["rest"]], ["embedding.weight"])
        self.assertIn("decoder.layers.0.norm.weight", [one.name for one in groups["decoder.layers.0"]])
        self.assertNotIn("decoder.layers.1.norm.weight", [one.name for one in groups["decoder.layers.1"]])
        numel = sum(math.prod(one.shape) for group in groups.values() for one in group)
        self.assertEqual(numel, sum(parameter.numel() for parameter in module.parameters()))
        self.assertEqual(list(module_groups(module.decoder.layers)), ["0", "1"])
        self.assertEqual(list(module_groups(module.head)), ["rest"])

    def test_expert_matrices_of_a_module_are_named(self):
        source = f"{__name__}:TinyMoE"

        def experts(pattern):
            groups = load_model(source, pattern).groups
            return [one.name for one in groups["decoder.layers.0"] if one.expert]

        self.assertEqual(experts(None), [f"decoder.layers.0.experts.{i}.weight" for i in range(2)])
        self.assertEqual(experts("attention"), ["decoder.layers.0.attention.weight"])
        self.assertEqual(experts("norm"), [])


def named(name):
    return name, load_model(name)


def described(parameters, prefix=""):
    """Names without ``prefix``, with a star for expert matrices, and shapes: ``q.weight=8x4``."""
    return [f"{one.name.removeprefix(prefix)}{'*' * one.expert}={'x'.join(map(str, one.shape))}" for one in parameters]


class PeersTest(TestCase):
    def test_fsdp2_shards_are_those_of_torch_chunk(self):
        generator = random.Random(0)
        for _ in range(300):
            shape = tuple(generator.randint(1, 9) for _ in range(generator.randint(1, 3)))
            ranks = generator.randint(1, 12)
            largest = torch.empty(shape).chunk(ranks, dim=0)[0].numel()
            self.assertEqual(fsdp2_shard([spec(shape), spec((4, 2), block=3)], ranks), largest + -(-4 // ranks) * 2)
        self.assertEqual(fsdp2_shard([spec(())], 3), 1)

    def test_row_buffers_cut_no_row_and_no_block(self):
        generator = random.Random(1)
        shared, capped = 0, 0
        for _ in range(2000):
            tensors = []
            for _ in range(generator.randint(1, 7)):
                shape = tuple(generator.randint(1, 6) for _ in range(generator.randint(0, 3)))
                granularity = generator.choice((elements(), elements(), rows(1), rows(2), blocks(2, 2), tensor()))
                tensors.append(granularity.tensor_spec("t", shape))
            alignment, ranks = generator.choice((1, 4)), generator.randint(1, 6)
            buffer = RowBuffer.pack(tensors, alignment)
            shard = buffer.shard(ranks)
            self.assertEqual(shard % alignment, 0)
            total = sum(one.numel for one in tensors)
            if shard < buffer.cell:
                self.assertEqual(shard, -(-total // alignment) * alignment)
                capped += 1
                continue
            if shard % buffer.cell:  # All of it on one rank.
                self.assertGreaterEqual(shard, total)
                continue
            position = 0
            for offset, one in sorted(zip(buffer.offsets, tensors, strict=True), key=lambda pair: (pair[0], pair[1].numel)):
                self.assertGreaterEqual(offset, position)
                position = offset + one.numel
                for boundary in range(shard, ranks * shard, shard):
                    if offset < boundary < position:
                        self.assertEqual((boundary - offset) % math.prod(one.shape[1:]), 0)
                        self.assertEqual((boundary - offset) % (one.period or one.numel) % one.block, 0)
                shared += offset % buffer.cell > 0 and one.numel >= buffer.cell
            self.assertLessEqual(position, ranks * shard)
        self.assertGreater(shared, 15)  # Large tensors did end on a cell that another one begins.
        self.assertGreater(capped, 15)

    def test_row_buffer_of_two_tensors_that_share_a_cell(self):
        # Cells of 6: the first takes one and two thirds, the second its remainder of 2 and one more; the third fits nowhere.
        buffer = RowBuffer.pack([spec((5, 2)), spec((8,)), spec((1, 3))], 1)
        self.assertEqual((buffer.cell, buffer.offsets, buffer.cells), (6, (0, 10, 18), 4))
        self.assertEqual([buffer.shard(ranks) for ranks in (1, 2, 3, 4, 9)], [21, 12, 12, 6, 6])
        # A tensor of whole cells between them has no remainder, and waits.
        buffer = RowBuffer.pack([spec((5, 2)), spec((12,)), spec((8,)), spec((1, 3))], 1)
        self.assertEqual((buffer.offsets, buffer.cells), ((0, 18, 10, 30), 6))

    def test_cells_where_blocks_begin_anew_in_each_matrix(self):
        cells = [RowBuffer.pack([Fused(period)], 1).cell for period in (0, 12, 24)]
        self.assertEqual(cells, [24, 12, 24])

    def test_cells_of_fused_weights(self):
        """The multiple of all blocks if each segment begins at a multiple of its own; else the whole tensor."""
        for sizes, kept, cell in (((4, 8), (4, 2), 8), ((3, 9), (2, 3), 12), ((4, 6), (2, 3), 20), ((4, 8), (4, 8), 24)):
            fused = segments(sizes, [rows(size) for size in kept]).tensor_spec("w", (sum(sizes), 2))
            self.assertEqual(RowBuffer.pack([fused], 1).cell, cell, (sizes, kept))

    def test_of_small_tensors_the_largest_choose_their_cell_first(self):
        buffer = RowBuffer.pack([spec((2,)), spec((2,)), spec((4,)), spec((4,))], 6)
        self.assertEqual((buffer.offsets, buffer.cells), ((4, 10, 0, 6), 2))

    def test_what_peers_lose_on_gpt_oss(self):
        model = load_model("gpt-oss-120b")
        block = tensor_specs("block.0", model.groups["block.0"], granularity_policy(rows(128), False))
        numel, row_buffer = sum(one.numel for one in block), RowBuffer.pack(block, 64)
        lost = [round(100 * (ranks * row_buffer.shard(ranks) / numel - 1), 1) for ranks in (64, 512)]
        self.assertEqual(lost, [32.2, 164.3])
        self.assertEqual(round(256 * fsdp2_shard(block, 256) / numel, 1), 2.0)


class MemoryTest(TestCase):
    # Two groups of 30 elements in shards of 8, and one of 5 in shards of 2, over 4 ranks: a shard holds 18, buffers 72.
    sharding = Sizes(4, 65, ((2, 8), (1, 2)))

    def test_zero_stages_hold_parts_of_the_padded_buffers(self):
        self.assertEqual(self.sharding.padding_fraction, 7 / 65)
        self.assertEqual(
            zero_memory(self.sharding, Precision()),
            {
                1: RankMemory(72 * 2 + 18 * 4, 72 * 4, 18 * 2 * 4),
                2: RankMemory(72 * 2 + 18 * 4, 18 * 4, 18 * 2 * 4),
                3: RankMemory(18 * 4, 18 * 4, 18 * 2 * 4),
            },
        )
        self.assertEqual(RankMemory(1, 10, 100).total, 111)

    def test_dtypes_and_number_of_optimizer_states(self):
        precision = Precision(torch.float32, torch.bfloat16, torch.float8_e4m3fn, 2)
        self.assertEqual(zero_memory(self.sharding, precision)[1], RankMemory(72 * 4, 72 * 2, 18 * 2))
        self.assertEqual(zero_memory(self.sharding, precision)[3], RankMemory(18 * 4, 18 * 4, 18 * 2))
        with_master_copies = Precision(states=3, shard=torch.bfloat16)
        self.assertEqual(zero_memory(self.sharding, with_master_copies)[3], RankMemory(18 * 2, 18 * 2, 18 * 12))
        alignments = [
            Precision(param, torch.float32).alignment for param in (torch.float32, torch.bfloat16, torch.float8_e4m3fn)
        ]
        self.assertEqual(alignments, [32, 64, 128])

    def test_what_fits_with_offload(self):
        """A shard of 2**30 elements: 4 GiB of parameters, 4 of gradients, 8 of Adam's moments."""
        gib = 2**30
        sharding = Sizes(4, 4 * gib, ((1, gib),))

        def used(device, host, files):
            fits = offload_fits(sharding, Precision(), Budget(*(round(each * gib) for each in (device, host, files))))
            return {kind: fit.policy for kind, fit in fits.items() if fit.used is not None}, fits

        found, fits = used(16, 16, 0)
        self.assertEqual(
            found, {"no offload": "None", "optimizer": "Offload(0.0157)", "parameters": "Offload(parameters=True)"}
        )
        # Two windows of 2**23 elements with two moments have 1/8 GiB.
        part = math.ceil(0.0157 * 8 * gib)
        self.assertEqual(fits["optimizer"].used, Budget(16 * gib - part + gib // 8, part, 0))
        self.assertEqual(used(15.9, 15.9, 0)[0], {"optimizer": "Offload(0.0282)"})
        self.assertEqual(used(16.125, 0, 0)[0], {"no offload": "None", "optimizer": "Offload(0)"})
        self.assertEqual(used(8.125, 8, 0)[0], {"optimizer": "Offload(1)"})
        self.assertEqual(used(8.125, 7.9, 0)[0], {})
        self.assertEqual(used(8, 16, 0)[0], {"parameters": "Offload(parameters=True)"})
        found, fits = used(1, 15, 8)
        policy = "Offload(parameters=True, to=folder)"
        self.assertEqual(found, {"files": policy})
        windows = 3 * 2**22 * 8
        self.assertEqual(fits["files"].used, Budget(0, 8 * gib + windows, 8 * gib))
        self.assertEqual(used(1, 15, 7.9)[0], {})
        # The pages of the only group are all of its parameters. Of many groups, those of the seven largest.
        found, fits = used(1, 9, 12)
        self.assertEqual(found, {"files": policy, "all in files": 'Offload(parameters="files", to=folder)'})
        self.assertEqual(fits["all in files"].used, Budget(0, 8 * gib + windows, 12 * gib))
        self.assertEqual((used(1, 8, 12)[0], used(1, 9, 11.9)[0]), ({}, {"files": policy}))
        groups = Sizes(4, 4 * gib, ((7, gib // 8), (2, gib // 16)))
        needed = offload_fits(groups, Precision(), Budget(0, 0, 0))["all in files"].needed
        self.assertEqual(needed, Budget(0, 4 * gib + 7 * gib // 2 + windows, 12 * gib))

    def test_the_largest_model_with_offload_is_the_largest_that_fits(self):
        generator = random.Random(0)
        for _ in range(200):
            precision = Precision(torch.bfloat16, torch.float32, torch.float32, generator.randrange(1, 4))
            budget = Budget(*(generator.randrange(2**29, 2**36) for _ in range(3)))
            numel = generator.randrange(2**20, 2**33)
            for kind, fit in offload_fits(Sizes(1, numel, ((1, numel),)), precision, budget).items():
                for change, fits in ((0.999, True), (1.001, False)):
                    other = int(numel * min(fit.scale, 1e6) * change)
                    if other > 0 and fit.scale < 1e6:
                        scaled = offload_fits(Sizes(1, other, ((1, other),)), precision, budget)[kind]
                        self.assertIs(scaled.used is not None, fits, (kind, precision, budget, numel))
                        for name, value in vars(scaled.used or Budget(0, 0, 0)).items():
                            self.assertLessEqual(value, getattr(budget, name) * 1.0002 + 10, (kind, name))

    def test_collectives_move_the_padded_buffers(self):
        moved = {"all_gather": CollectiveBytes(4 * 8 * 2, 72 * 2), "reduce_scatter": CollectiveBytes(4 * 8 * 4, 72 * 4)}
        self.assertEqual(collectives(self.sharding, Precision()), moved)
        moved["all_reduce"] = CollectiveBytes(8 * 4, 18 * 4)
        self.assertEqual(collectives(self.sharding, Precision(), replicas=2), moved)


class ModelPlanTest(TestCase):
    def test_groups_of_equal_shapes_are_planned_once(self):
        calls = []

        def counting(tensors, *arguments, **options):
            calls.append(tensors)
            return plan_layout(tensors, *arguments, **options)

        model = load_model("gpt-oss-120b")
        with mock.patch("torch_ragged.offline._model_plan.plan_layout", counting):
            plan = ModelPlanner(model, granularity_policy(rows(16), False), 64).plan(64)
        self.assertEqual(len(calls), 2)
        self.assertEqual(list(plan.group_layouts()), list(model.groups))
        self.assertEqual(plan.ragged.shards, ((36, plan.layouts[0].shard_numel), (1, plan.layouts[1].shard_numel)))
        padding = sum(layout.padding_numel for layout in plan.group_layouts().values())
        self.assertEqual(plan.ragged.padding_fraction, padding / model.numel)

    def test_groups_of_equal_shapes_and_other_blocks_are_planned_apart(self):
        groups = {name: [Parameter(f"{name}.w", (6, 5), name != "b")] for name in "abc"}
        kinds = ModelPlanner(Model("m", groups), granularity_policy(rows(2), False), 1).kinds
        self.assertEqual([(kind.names, kind.tensors[0].block) for kind in kinds], [(("a", "c"), 10), (("b",), 1)])

    def test_each_matrix_of_a_stack_counts_for_muon(self):
        shapes = dict(experts=(4, 8, 8), query=(8, 8), norm=(8,), experts_bias=(4, 8))
        model = Model("m", {"b": [Parameter(f"b.{name}", shape) for name, shape in shapes.items()], "rest": []})
        plan = muon_plan(model, 2, granularity_policy(elements(), False), 64)
        self.assertEqual(plan.whole + plan.cut, 4 + 1)

    def test_rows_are_kept_on_the_matrices_they_apply_to(self):
        parameters = [Parameter("b.experts.w", (6, 5), True), Parameter("b.q", (6, 5)), Parameter("b.norm", (5,))]
        for every_matrix, expected in ((False, [10, 1, 1]), (True, [10, 10, 1])):
            specs = tensor_specs("b", parameters, granularity_policy(rows(2), every_matrix))
            self.assertEqual([one.block for one in specs], expected)
            self.assertEqual([one.name for one in specs], ["experts.w", "q", "norm"])

    def test_elements_are_never_above_fsdp2_nor_rows_above_lcm(self):
        for name in ("gpt-oss-120b", "llama-3-70b"):
            model = load_model(name)
            for granularity in (elements(), rows(1), rows(16)):
                planner = ModelPlanner(model, granularity_policy(granularity, not model.has_experts), 64)
                for ranks in (8, 320, 1024, 8192):
                    plan = planner.plan(ranks)
                    self.assertLessEqual(plan.bound.padding_fraction, plan.ragged.padding_fraction)
                    self.assertLessEqual(plan.ragged.padding_fraction, plan.lcm.padding_fraction)
                    if granularity.kind == "elements":
                        self.assertLessEqual(plan.ragged.shard_numel, plan.fsdp2.shard_numel + 64 * len(model.groups))


class CommandLineTest(Folder):
    def test_the_tables_of_a_built_in_model(self):
        status, out, error = run("gpt-oss-120b", "--granularity", "rows:128", "--ranks", "64,512,8", "--replicas", 2)
        self.assertEqual((status, error), (0, ""))
        title, padding, moved, memory, advice = out.strip().split("\n\n")
        self.assertEqual(
            title,
            "gpt-oss-120b: 116,829,156,672 parameters in 471 tensors, 37 groups; "
            "rows(128) on expert matrices, else elements()\n"
            "float32 parameters under MixedPrecisionPolicy(bfloat16, float32), 2 optimizer values in float32; shards are "
            "multiples of 64 elements\n"
            "For others: --shard-dtype, --param-dtype, --reduce-dtype, --states, --optimizer-dtype\n"
            "2 replicas: the world is 2 times the FSDP size",
        )
        lines = [line.split() for line in padding.splitlines()[1:]]
        self.assertEqual(lines[0], ["FSDP", "size", "world", "torch_ragged", "bound", "FSDP2", "LCM"])
        self.assertEqual([line[:2] for line in lines[1:]], [["8", "16"], ["64", "128"], ["512", "1,024"]])
        self.assertEqual([line[4:] for line in lines[1:]], [["0.00", "3.23"], ["0.00", "31.85"], ["294.60", "162.71"]])
        self.assertEqual(len(moved.splitlines()), 2 + 3 * 3)
        self.assertEqual(len(memory.splitlines()), 2 + 3 * 3)
        # FSDP2 on 64 ranks pads nothing to speak of: 4 + 4 + 8 bytes per parameter, on 64 ranks.
        total = f"{116_829_156_672 * 16 / 64 / 2**30:.1f}"
        self.assertIn(total, memory.splitlines()[7].split()[-4])
        self.assertTrue(
            advice.startswith("Recommended FSDP sizes: 8, 64. Their padding is within 5%; 64 needs the least memory")
        )
        self.assertIn("\nblock.0 and 35 more: padding ", advice)

    def test_the_whole_report(self):
        options = [
            "--ranks",
            "2,40",
            "--granularity",
            "rows:4",
            "--replicas",
            2,
            "--limit",
            70,
            "--offload",
            "0.0625,1,0",
            "--muon",
        ]
        status, out, error = run(f"{__name__}:TinyMoE", *options)
        self.assertEqual((status, error), (0, ""))
        self.assertExpectedInline(
            without_ends(out),
            """\
TinyMoE: 392 parameters in 16 tensors, 3 groups; rows(4) on expert matrices, else elements()
float32 parameters under MixedPrecisionPolicy(bfloat16, float32), 2 optimizer values in float32; shards are multiples of 64 elements
For others: --shard-dtype, --param-dtype, --reduce-dtype, --states, --optimizer-dtype
2 replicas: the world is 2 times the FSDP size

Padding, % of the parameters
FSDP size  world  torch_ragged     bound   FSDP2       LCM
        2      4         63.27     63.27    0.00     63.27
       40     80      1,859.18  1,859.18  563.27  1,859.18

Bytes per collective: of the largest group, and of all groups together
FSDP size        layout  all-gather  all-gathers  reduce-scatter  reduce-scatters  all-reduce  all-reduces
        2  torch_ragged       512 B     1.25 KiB        1.00 KiB         2.50 KiB       512 B     1.25 KiB
                  FSDP2       320 B        784 B           640 B         1.53 KiB       320 B        784 B
                    LCM       512 B     1.25 KiB        1.00 KiB         2.50 KiB       512 B     1.25 KiB
       40  torch_ragged    5.00 KiB    15.00 KiB       10.00 KiB        30.00 KiB       256 B        768 B
                  FSDP2    2.27 KiB     5.08 KiB        4.53 KiB        10.16 KiB       116 B        260 B
                    LCM    5.00 KiB    15.00 KiB       10.00 KiB        30.00 KiB       256 B        768 B

Memory per rank: torch_ragged's, and the totals of the others
FSDP size                                       ZeRO  parameters  gradients  optimizer       total      FSDP2        LCM  in host memory  in files
        2                                          1    2.50 KiB   2.50 KiB   2.50 KiB    7.50 KiB   4.59 KiB   7.50 KiB
                                                   2    2.50 KiB   1.25 KiB   2.50 KiB    6.25 KiB   3.83 KiB   6.25 KiB
                                                   3    1.25 KiB   1.25 KiB   2.50 KiB    5.00 KiB   3.06 KiB   5.00 KiB
                                       3, Offload(1)                                    128.00 MiB                              2.50 KiB       0 B
                         3, Offload(parameters=True)                                           0 B                              5.00 KiB       0 B
              3, Offload(parameters=True, to=folder)                                           0 B                             96.00 MiB  2.50 KiB
           3, Offload(parameters="files", to=folder)                                           0 B                             96.00 MiB  3.75 KiB
       40                                          1   15.75 KiB  30.00 KiB   1.50 KiB   47.25 KiB  16.00 KiB  47.25 KiB
                                                   2   15.75 KiB      768 B   1.50 KiB   18.00 KiB   6.09 KiB  18.00 KiB
                                                   3       768 B      768 B   1.50 KiB    3.00 KiB   1.02 KiB   3.00 KiB
                                       3, Offload(1)                                    128.00 MiB                              1.50 KiB       0 B
                         3, Offload(parameters=True)                                           0 B                              3.00 KiB       0 B
              3, Offload(parameters=True, to=folder)                                           0 B                             96.00 MiB  1.50 KiB
           3, Offload(parameters="files", to=folder)                                           0 B                             96.00 MiB  2.25 KiB

Offload, ZeRO-3, 64.00 MiB on the device, 1.00 GiB in host memory, 0 B in files per rank: parameters of the largest model, and what this one needs
FSDP size  no offload  optimizer  parameters  files  all in files  offload_policy  on the device  in host memory  in files
        2        5.1M       0.0M       82.2M   0.0M          0.0M            None       5.00 KiB             0 B       0 B
       40        8.6M       0.0M        0.1B   0.0M          0.0M            None       3.00 KiB             0 B       0 B

Muon's matrices under muon_policy, blocks only, modelled: ms per step, work relative to the mean
FSDP size  whole  cut  flights if all are cut  flights  padding  padding %  most loaded rank  bound
        2      6    0                    0.00     0.00     0.00      64.10              1.00   1.00
       40      6    0                    0.00     0.00     0.00   1,541.03             14.12   1.00

Recommended FSDP sizes: 2. Their padding is within 70%; 2 needs the least memory per rank, 5.00 KiB under ZeRO-3 without activations.
Not recommended, for padding above 70%: 40 (1,859.18%). At 40:
decoder.layers.0: padding 1,500.00% on 40 ranks exceeds 70% (at least 1,500.00%: all 160 elements must fit into 40 shards)
  - FSDP size 4: 60.00%
decoder.layers.1: padding 1,584.21% on 40 ranks exceeds 70% (at least 1,584.21%: all 152 elements must fit into 40 shards)
  - FSDP size 4: 68.42%
rest: padding 3,100.00% on 40 ranks exceeds 70% (at least 3,100.00%: all 80 elements must fit into 40 shards)
  - FSDP size 2: 60.00%
""",  # noqa: E501
        )
        _, out, _ = run(f"{__name__}:TinyMoE", "--weights", "3,1,0,3,3,3,3,3,3,3,3,3")
        self.assertExpectedInline(
            without_ends(out),
            """\
TinyMoE: 392 parameters in 16 tensors, 3 groups; elements()
float32 parameters under MixedPrecisionPolicy(bfloat16, float32), 2 optimizer values in float32; shards are multiples of 64 elements
For others: --shard-dtype, --param-dtype, --reduce-dtype, --states, --optimizer-dtype

Padding, % of the parameters
FSDP size  torch_ragged     bound  FSDP2     LCM
       12      1,418.37  1,418.37  98.98  487.76

Bytes per collective: of the largest group, and of all groups together
FSDP size        layout  all-gather  all-gathers  reduce-scatter  reduce-scatters
       12  torch_ragged    3.88 KiB    11.62 KiB        7.75 KiB        23.25 KiB
                  FSDP2       696 B     1.52 KiB        1.36 KiB         3.05 KiB
                    LCM    1.50 KiB     4.50 KiB        3.00 KiB         9.00 KiB

Memory per rank: torch_ragged's, and the totals of the others
FSDP size  ZeRO  parameters  gradients  optimizer      total     FSDP2        LCM
       12     1   13.88 KiB  23.25 KiB   4.50 KiB  41.62 KiB  5.33 KiB  15.75 KiB
              2   13.88 KiB   2.25 KiB   4.50 KiB  20.62 KiB  2.54 KiB   7.50 KiB
              3    2.25 KiB   2.25 KiB   4.50 KiB   9.00 KiB  1.02 KiB   3.00 KiB

Memory of each rank, ZeRO-3, in proportion to weights
weight                              ranks  parameters  gradients  optimizer     total
     3  0, 3, 4, 5, 6, 7, 8, 9 and 2 more    2.25 KiB   2.25 KiB   4.50 KiB  9.00 KiB
     1                                  1       768 B      768 B   1.50 KiB  3.00 KiB
     0                                  2         0 B        0 B        0 B       0 B
""",  # noqa: E501
        )
        status, out, _ = run(f"{__name__}:TinyMoE", "--ranks", 2, "--offload", "0,0")
        self.assertEqual(status, 1)
        (row,) = [line for line in out.splitlines() if "does not fit" in line]
        self.assertEqual(row.split(), "2 0.0M 0.0M 0.0M 0.0M 0.0M does not fit".split())

    def test_eight_ranks_of_a_weight_are_all_named(self):
        _, out, _ = run(f"{__name__}:TinyMoE", "--weights", "2,1,2,2,2,2,2,2,2")
        self.assertRegex(out, r"\n +2  +0, 2, 3, 4, 5, 6, 7, 8  +\d")

    def test_bytes_have_the_largest_unit_that_is_not_above_them(self):
        numbers = {2**10 - 1: "1023 B", 2**10: "1.00 KiB", 2**50: "1.00 PiB", 2**60: "1,024.00 PiB"}
        self.assertEqual({number: bytes_text(number) for number in numbers}, numbers)

    def test_weights_show_the_memory_of_each_rank(self):
        """16 bytes per parameter in proportion to the weights: 4 x 141 + 4 x 80 shares."""
        path = self.folder / "plan.json"
        status, out, error = run("llama-3-70b", "--weights", "141,80,141,80,141,80,141,80", "--json", path)
        self.assertEqual((status, error), (0, ""))
        title, _, largest, smallest = out.split("\n\n")[-1].splitlines()
        self.assertEqual(title, "Memory of each rank, ZeRO-3, in proportion to weights")
        for line, weight, ranks in ((largest, 141, "0, 2, 4, 6"), (smallest, 80, "1, 3, 5, 7")):
            expected = 70_553_706_496 * 16 * weight / 884 / 2**30
            self.assertIn(f"{weight}  {ranks}", line)
            self.assertAlmostEqual(float(line.split()[-2]), expected, delta=0.01 * expected)
        size = json.loads(path.read_text())["sizes"][0]
        totals = {int(weight): each["total"] for weight, each in size["memory_bytes_by_weight"].items()}
        self.assertEqual(totals[141] * 80, totals[80] * 141)
        self.assertEqual(size["layouts"]["torch_ragged"]["memory_bytes"]["zero3"]["total"], totals[141])
        whole = size["layouts"]["torch_ragged"]["collective_bytes"]["all_gather"]["total"]
        self.assertLess(abs(whole / (2 * 70_553_706_496) - 1), 0.001)

    def test_advice_is_for_the_smallest_size_that_is_not_recommended(self):
        _, out, _ = run("gpt-oss-120b", "--granularity", "rows:128", "--ranks", "64,256,512", "--limit", 0.1)
        self.assertRegex(out, r"\nNot recommended, for padding above 0.1%: 64 \(.*%\), 256 \(.*%\), 512 \(.*%\). At 64:\n")
        self.assertIn("block.0 and 35 more: padding", out)
        self.assertIn(" on 64 ranks exceeds 0.1%", out)
        self.assertNotIn("Recommended", out)

    def test_a_module_and_its_json(self):
        path = self.folder / "plan.json"
        options = ["--ranks", "2,4", "--param-dtype", "float32", "--states", 2, "--granularity", "tensor", "--replicas", 3]
        status, _, error = run(f"{__name__}:TinyMoE", *options, "--json", path)
        self.assertEqual((status, error), (0, ""))
        found = json.loads(path.read_text())
        numel = sum(parameter.numel() for parameter in TinyMoE().parameters())
        expected = dict(parameters=numel, tensors=16, groups=3, param_dtype="float32", reduce_dtype="float32", alignment=32)
        expected["shard_dtype"] = "float32"
        expected |= dict(granularity="tensor() on expert matrices, else elements()", optimizer_states=2, replicas=3, limit=0.05)
        expected |= dict(model=f"{__name__}:TinyMoE", optimizer_dtype="float32", offload_budget=None)
        others = {"sizes", "recommended", "advice"}
        self.assertEqual({key: value for key, value in found.items() if key not in others}, expected)
        two = found["sizes"][0]
        self.assertEqual([(size["ranks"], size["world"]) for size in found["sizes"]], [(2, 6), (4, 12)])
        self.assertEqual([group["names"] for group in two["groups"]], [["decoder.layers.0"], ["decoder.layers.1"], ["rest"]])
        # 160, 152 and 80 elements on two ranks, in multiples of 32: 96, 96 and 64.
        self.assertEqual([group["shard_numel"] for group in two["groups"]], [96, 96, 64])
        self.assertEqual(two["layouts"]["torch_ragged"]["padding"], (2 * 256 - numel) / numel)
        memory = dict(parameters=256 * 4, gradients=256 * 4, optimizer=256 * 8, total=256 * 16)
        self.assertEqual(two["layouts"]["torch_ragged"]["memory_bytes"]["zero3"], memory)
        moved = two["layouts"]["torch_ragged"]["collective_bytes"]
        self.assertEqual(moved["all_gather"], dict(largest=2 * 96 * 4, total=2 * 256 * 4))
        self.assertEqual(moved["all_reduce"], dict(largest=96 * 4, total=256 * 4))
        chunks = sum(parameter.chunk(2)[0].numel() for parameter in TinyMoE().parameters())
        self.assertEqual(two["layouts"]["FSDP2"]["padding"], (2 * chunks - numel) / numel)
        self.assertEqual(found["recommended"], [])
        self.assertTrue(found["advice"])

    def test_offload_shows_what_fits(self):
        path = self.folder / "plan.json"
        options = ["--ranks", "2,4,8,16,64", "--offload", "60,200,2000", "--json", path]
        status, out, error = run("llama-3-70b", *options)
        self.assertEqual((status, error), (0, ""))
        table = out[out.index("Offload, ZeRO-3, 60.00 GiB on the device, 200.00 GiB in host memory, 1.95 TiB in files") :]
        lines = [line.split() for line in table.splitlines()[2:7]]
        self.assertEqual(lines[0][:6], ["2", "8.1B", "16.1B", "26.8B", "53.7B", "97.3B"])
        policies = ['Offload(parameters="files", to=folder)', "Offload(parameters=True, to=folder)", "Offload(parameters=True)"]
        for line, policy in zip(table.splitlines()[2:7], [*policies, "Offload(0.1776)", "None"], strict=True):
            self.assertIn(policy, line)
        stages = out[out.index("Memory per rank") : out.index("Offload, ZeRO-3")].splitlines()
        self.assertEqual(stages[1].split()[-5:], ["in", "host", "memory", "in", "files"])
        of_8 = [line for line in stages if "Offload" in line][8:12]
        for line, words in zip(of_8, ["0 B", "131.42 GiB 0 B", "65.80 GiB 65.71 GiB", "36.32 GiB 98.56 GiB"], strict=True):
            self.assertTrue(" ".join(line.split()).endswith(words), line)
        found = json.loads(path.read_text())
        self.assertEqual(found["offload_budget"], dict(device=60 * 2**30, host=200 * 2**30, files=2000 * 2**30))
        self.assertEqual([size["offload"]["files"]["used"] is None for size in found["sizes"]], [True, *[False] * 4])
        self.assertNotIn("Offload", run("llama-3-70b", "--ranks", 2)[1])

    def test_muon_shows_what_stays_whole_and_the_balance(self):
        path = self.folder / "plan.json"
        status, out, error = run("llama-3-70b", "--ranks", "8,512", "--muon", "--json", path)
        self.assertEqual((status, error), (0, ""))
        table = out[out.index("Muon's matrices under muon_policy") :].splitlines()
        self.assertExpectedInline(
            "\n".join(table[1:4]),
            """\
FSDP size  whole  cut  flights if all are cut  flights  padding  padding %  most loaded rank  bound
        8    160  400                  598.95   587.20     0.00       0.00              1.00   1.00
      512      0  560                   10.67    10.67     0.00       0.00              1.70   1.70""",
        )
        few, many = (size["muon"] for size in json.loads(path.read_text())["sizes"])
        for line, plan in zip(table[2:4], (few, many), strict=True):
            size, whole, cut, *_, imbalance, bound = line.split()
            self.assertEqual((int(size), int(whole), int(cut)), (plan["ranks"], plan["whole"], plan["cut"]))
            self.assertEqual((imbalance, bound), (f"{plan['imbalance']:.2f}", f"{plan['bound']:.2f}"))
            self.assertEqual(plan["whole"] + plan["cut"], 80 * 7)  # Seven matrices in each block; embeddings are left out.
            # Of 1 / ranks of their elements, a rank sends what it does not keep: 2 bytes to the root, 2 bytes back.
            sent = 80 * (2 * 8192 + 2 * 1024 + 3 * 28672) * 8192 / plan["ranks"] * (1 - 1 / plan["ranks"])
            self.assertAlmostEqual(plan["flight_time_without"], 2 * 2 * sent / 50e9)
            self.assertLessEqual(plan["bound"], plan["imbalance"])
            # Never worse than without a policy, under the model.
            self.assertLessEqual(plan["flight_time"] + plan["padding_time"], plan["flight_time_without"] * (1 + 1e-9))
        # The matrices of 8192 x 28672 are most of the work: on 512 ranks, one is more than the mean share.
        self.assertGreater(many["bound"], 1.5)
        self.assertLess(few["imbalance"], 1.05)
        self.assertNotIn("Muon", run("llama-3-70b", "--ranks", 8)[1])

    def test_a_config_without_experts_keeps_the_rows_of_all_matrices(self):
        path = self.write(dict(CONFIGS[8_030_261_248], num_hidden_layers=2))
        status, out, _ = run(path, "--granularity", "rows:16", "--ranks", 512, "--json", self.folder / "plan.json")
        self.assertEqual(status, 0)
        self.assertIn("rows(16) on all matrices, else elements()", out)
        (size,) = json.loads((self.folder / "plan.json").read_text())["sizes"]
        self.assertEqual([group["names"] for group in size["groups"]], [["model.layers.0", "model.layers.1"], ["rest"]])
        plan = ModelPlanner(load_model(str(path)), granularity_policy(rows(16), True), 64).plan(512)
        self.assertGreater(plan.ragged.padding_fraction, 0.01)
        self.assertEqual(size["layouts"]["torch_ragged"]["padding"], plan.ragged.padding_fraction)

    def test_no_cost_grows_with_ranks(self):
        ranks = f"100000,{10**12}"
        status, out, error = run("gpt-oss-120b", "--granularity", "rows:128", "--ranks", ranks)
        self.assertEqual((status, error), (0, ""))
        self.assertIn("\n1,000,000,000,000 ", out)
        status, out, _ = run("gpt-oss-120b", "--explain", "block.3", "--ranks", 10**12, "--svg", self.folder / "a.svg")
        self.assertEqual(status, 0)
        self.assertIn("999999999999 |", out)

    def test_segments_of_fused_weights_have_granularities_of_their_own(self):
        path, model = self.folder / "plan.json", f"{__name__}:TinyMoE"
        options = ["--apply", "all", "--granularity", "rows:2", "--segments", r"0\.attention\.weight=3,5:tensor", "--ranks", 3]
        status, out, error = run(model, *options, "--json", path)
        self.assertEqual((status, error), (0, ""))
        self.assertIn("; rows(2) on all matrices, else elements(); segments of 1 fused weight\n", out)
        (size,) = json.loads(path.read_text())["sizes"]
        self.assertEqual([group["names"] for group in size["groups"]], [["decoder.layers.0"], ["decoder.layers.1"], ["rest"]])
        _, out, _ = run(model, *options, "--explain", "decoder.layers.0")
        (attention,) = [line for line in out.splitlines() if " attention.weight " in line]
        self.assertEqual(attention.split()[2:6], ["(8,", "8)", "16,", "40"])  # Blocks of 2 and of 5 rows.
        # Without a granularity, segments have that of the parameter: here, none.
        experts = ["--segments", r"0\.attention\.weight=3,5", "--ranks", 3, "--explain", "decoder.layers.0"]
        _, out, _ = run(model, *experts)
        self.assertRegex(out, r" attention.weight +\(8, 8\) +1 ")

    def test_explain_draws_a_group(self):
        svg = self.folder / "block.svg"
        arguments = [f"{__name__}:TinyMoE", "--granularity", "rows:4", "--ranks", 3, "--explain", "decoder.layers.1"]
        status, out, error = run(*arguments, "--svg", svg, "--limit", 50)
        self.assertEqual((status, error), (0, ""))
        self.assertExpectedInline(
            out,
            """\
decoder.layers.1: 7 tensors on 3 ranks, shard 64 elements, padding 26.32% (lower bound 26.32%), 384 bytes per collective, order given
the bound: all 152 elements must fit into 3 shards

rank 0 |aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa|
rank 1 |bbbbbbbbccccccccccccccccccccccccccccccccdddd////////////////////|  padding 20
rank 2 |eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeffffgggggggg////////////////////|  padding 20

   tensor              shape   block  elements  ranks
a  attention.weight    (8, 8)      1        64  0
b  attention.bias      (8,)        1         8  1
c  experts.0.weight    (4, 8)     32        32  1
d  experts.0.bias      (4,)        1         4  1
e  experts.1.weight    (4, 8)     32        32  2
f  experts.1.bias      (4,)        1         4  2
g  norm.bias           (8,)        1         8  2
/  padding, in 2 gaps                       40  1-2
""",  # noqa: E501
        )
        self.assertEqual(ElementTree.fromstring(svg.read_text()).tag, "{http://www.w3.org/2000/svg}svg")
        _, out, _ = run(*arguments, "--limit", 1)
        self.assertIn("\n\ndecoder.layers.1: padding 26.32% on 3 ranks exceeds 1%", out)

    def test_the_plot_shows_every_layout(self):
        for name in ("a.svg", "b.png"):
            status, _, error = run("gpt-oss-120b", "--ranks", "8,64", "--plot", self.folder / name)
            self.assertEqual((status, error), (0, ""))
        texts = re.findall(r">([^<>]+)</text>", (self.folder / "a.svg").read_text())
        for text in ("FSDP2", "LCM", "torch_ragged", "lower bound of torch_ragged", "gpt-oss-120b, elements()", "8", "64"):
            self.assertIn(text, texts)
        self.assertEqual((self.folder / "b.png").read_bytes()[:8], b"\x89PNG\r\n\x1a\n")

    def test_the_plotted_numbers(self):
        path = self.folder / "plan.json"
        with mock.patch("matplotlib.figure.Figure.savefig", autospec=True) as saved:
            run(f"{__name__}:TinyMoE", "--ranks", "2,64", "--plot", "a.png", "--json", path)
        sizes = json.loads(path.read_text())["sizes"]
        expected = {name: [100 * size["layouts"][name]["padding"] for size in sizes] for name in sizes[0]["layouts"]}
        expected["lower bound of torch_ragged"] = [100 * size["bound"] for size in sizes]
        figure = saved.call_args.args[0]
        saved.assert_called_once_with(figure, "a.png", dpi=150)
        self.assertEqual(tuple(figure.get_size_inches()), (7, 5))
        (axes,) = figure.axes
        *lines, limit = axes.lines
        self.assertEqual({line.get_label(): line.get_ydata().tolist() for line in lines}, expected)
        self.assertEqual([line.get_xdata().tolist() for line in lines], [[2, 64]] * 4)
        self.assertEqual([line.get_marker() for line in lines], ["s", "^", "o", "None"])
        self.assertEqual([line.get_linestyle() for line in axes.lines], ["-", "-", "-", ":", "--"])
        self.assertEqual((limit.get_label(), list(limit.get_ydata())), ("limit, 5%", [5.0, 5.0]))
        self.assertEqual((axes.get_xlabel(), axes.get_ylabel()), ("FSDP size (ranks)", "padding, of the parameters"))
        bottom, top = axes.get_ylim()
        self.assertEqual(bottom, 0)
        self.assertTrue(2 < top / max(max(values) for values in expected.values()) < 2.5)  # Room above the lines.
        self.assertEqual((axes.get_xscale(), axes.xaxis.get_transform().base), ("log", 2))
        self.assertEqual((axes.get_yscale(), axes.yaxis.get_transform().linthresh), ("symlog", 0.1))
        self.assertEqual([axes.yaxis.get_major_formatter()(value, 0) for value in (0.1, 100.0)], ["0.1%", "100%"])

    def test_help_says_what_each_option_does(self):
        out = io.StringIO()
        with mock.patch.dict(os.environ, COLUMNS="120"), contextlib.redirect_stdout(out), self.assertRaises(SystemExit):
            main(["--help"])
        self.assertExpectedInline(
            out.getvalue().split("\npositional arguments:\n")[1].split("\nexamples:")[0],
            """\
  model                 deepseek-v3, gemma-3-4b, gpt-oss-120b, gpt-oss-20b, llama-3-70b, llama-3-8b, llama-3.2-1b,
                        mistral-7b, mixtral-8x7b, qwen3-0.6b, qwen3-30b-a3b, qwen3-8b; or a Hugging Face config.json;
                        or module:callable, built on the meta device

options:
  -h, --help            show this help message and exit
  --ranks RANKS         FSDP sizes, separated by commas (default: 8 to 1024, powers of two)
  --weights W,W,...     an integer per rank, at least 0: shards in proportion to them, as by fully_shard(weights=...).
                        The FSDP size is their number; FSDP2 and LCM are shown with equal shards
  --replicas REPLICAS   HSDP replicas: the world is FSDP size * replicas (default: 1)
  --granularity GRANULARITY
                        blocks that are never cut: elements (default), rows:N, rows:N/WITHIN, blocks:HxW or tensor
  --segments REGEX=SIZE,...
                        parameters whose names match are fused weights with segments of these sizes along dimension 0;
                        each is cut by itself. SIZE:GRANULARITY gives a segment its own granularity:
                        'qkv=4096:tensor,1024:rows:64,1024:rows:64'. May be given several times
  --apply {experts,all}
                        matrices that have this granularity (default: experts, or all if the model has no experts)
  --experts REGEX       pattern of the names of expert matrices (default: the family's names; for module:callable,
                        'experts')
  --shard-dtype SHARD_DTYPE
                        dtype of sharded parameters (default: float32)
  --param-dtype PARAM_DTYPE
                        dtype in compute and all-gathers, as MixedPrecisionPolicy's (default: bfloat16)
  --reduce-dtype REDUCE_DTYPE
                        dtype in reduce-scatters (default: float32)
  --optimizer-dtype OPTIMIZER_DTYPE
                        dtype of the optimizer's values (default: float32)
  --states STATES       optimizer values per parameter (default: 2, Adam's moments; with --shard-dtype bfloat16 and a
                        master copy: 3)
  --limit LIMIT         recommend FSDP sizes with at most this percentage of padding (default: 5)
  --memory SIZE         bytes that a rank may use on the device, such as 80GB or 74GiB: does a training step fit? If
                        it fits at no FSDP size, the exit status is 1; also for --offload
  --reserve PERCENT     with --memory: percentage of it that a step must leave for CUDA's context, NCCL's buffers and
                        fragmentation, which are not counted (default: 5)
  --batch BATCH         with --memory: sequences per rank (default: 1)
  --sequence SEQUENCE   with --memory: tokens per sequence (default: 4096)
  --offload DEVICE,HOST[,FILES]
                        GiB per rank on the device, in host memory and in files: shows how large a model fits under
                        ZeRO-3 by each kind of Offload, and the policy that this one needs. Activations and gathered
                        parameters are not counted: subtract them
  --muon                also show Muon's matrices of the blocks under muon_policy: how many stay whole, what the
                        others and the padding cost, and the balance of the work, all modelled
  --explain GROUP       draw the buffer of this group at one FSDP size, instead of the tables
  --svg FILE            with --explain: also draw the buffer to this file
  --json FILE           also write all results to this file
  --plot FILE           plot padding against FSDP size (.png, .svg, .pdf; needs matplotlib)
""",
        )

    def test_as_a_program_it_needs_neither_a_process_group_nor_numpy(self):
        (self.folder / "numpy.py").write_text("raise ModuleNotFoundError(\"No module named 'numpy'\", name='numpy')\n")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(self.folder), os.environ.get("PYTHONPATH", "")])}
        command = [sys.executable, "-m", "torch_ragged", "plan", "llama-3-70b", "--ranks", "8"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertTrue(done.stdout.startswith("llama-3-70b: 70,553,706,496 parameters in 723 tensors, 81 groups"))


class BadInputTest(Folder):
    def error(self, *arguments):
        """The one line that the tool answers with, having planned nothing."""
        with mock.patch("torch_ragged.offline._cli.ModelPlanner", side_effect=AssertionError("work before all checks")):
            status, out, error = run(*arguments)
        self.assertEqual((status, out, error.count("\n"), error[-1:]), (2, "", 1, "\n"))
        return error.removeprefix("python -m torch_ragged.offline: error: ").rstrip("\n")

    def test_unknown_models_are_refused(self):
        expected = (
            "expected deepseek-v3, gemma-3-4b, gpt-oss-120b, gpt-oss-20b, llama-3-70b, llama-3-8b, llama-3.2-1b, mistral-7b, "
            "mixtral-8x7b, qwen3-0.6b, qwen3-30b-a3b, qwen3-8b, the path of a config.json, or module:callable"
        )
        self.assertEqual(self.error("deepseek-v2"), f"unknown model 'deepseek-v2' (did you mean deepseek-v3?): {expected}")
        self.assertEqual(self.error("nothing"), f"unknown model 'nothing': {expected}")
        module = __name__
        self.assertEqual(
            self.error("no_such_module:build"),
            "cannot import no_such_module:build: ModuleNotFoundError: No module named 'no_such_module'",
        )
        self.assertIn(f"cannot import {module}:missing: AttributeError: ", self.error(f"{module}:missing"))
        self.assertEqual(
            self.error(f"{module}:broken"), f"{module}:broken() failed on the meta device: RuntimeError: no such weights"
        )
        self.assertEqual(self.error(f"{module}:not_a_module"), f"{module}:not_a_module() returned int, expected an nn.Module")
        self.assertEqual(self.error("torch.nn:Identity"), "torch.nn:Identity has no parameters")

    def test_bad_configs_are_refused(self):
        llama = CONFIGS[8_030_261_248]
        cases = {
            "missing.json": (None, "cannot read {}: No such file or directory"),
            "broken.json": ("{", "cannot read {}: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
            "list.json": ("[]", "cannot read {}: expected a JSON object, got list"),
            "none.json": (
                {},
                "{}: model_type must be one of deepseek_v3, gemma3, gemma3_text, gpt_oss, llama, mistral, mixtral, qwen2, "
                "qwen3, qwen3_moe, got None",
            ),
            "field.json": ({"model_type": "llama"}, "{} has no field 'hidden_size', which its model_type needs"),
            "type.json": (dict(llama, vocab_size="many"), "{}: vocab_size must be an integer of at least 1, got 'many'"),
            "flag.json": (dict(llama, mlp_bias=1), "{}: mlp_bias must be true or false, got 1"),
            "layers.json": (
                dict(llama, model_type="qwen3_moe", num_experts=1, moe_intermediate_size=1, mlp_only_layers=3),
                "{}: mlp_only_layers must be a list of layer numbers, got 3",
            ),
        }  # fmt: skip
        for name, (content, message) in cases.items():
            path = self.folder / name if content is None else self.write(content, name)
            self.assertEqual(self.error(path), message.format(path))

    def test_bad_sizes_and_types_are_refused(self):
        gpt = "gpt-oss-120b"
        for arguments, message in (
            (["--ranks", "8,0"], "argument --ranks: expected an integer of at least 1, got '0'"),
            (["--ranks", "8,,9"], "argument --ranks: expected an integer of at least 1, got ''"),
            (["--ranks", "-8"], "argument --ranks: expected an integer of at least 1, got '-8'"),
            (["--replicas", "0"], "argument --replicas: expected an integer of at least 1, got '0'"),
            (["--states", "x"], "argument --states: expected an integer of at least 0, got 'x'"),
            (["--limit", "nan"], "argument --limit: expected a percentage, got 'nan'"),
            (
                ["--offload", "60"],
                "argument --offload: expected GiB per rank, DEVICE,HOST or DEVICE,HOST,FILES, such as 60,100,1000, got '60'",
            ),
            (
                ["--param-dtype", "int8"],
                "argument --param-dtype: expected a floating-point type of torch, such as bfloat16, got 'int8'",
            ),
            (["--granularity", "rows"], "--granularity 'rows': expected elements, rows:N, rows:N/WITHIN, blocks:HxW or tensor"),
            (["--granularity", "rows:0"], "rows() takes positive integers, got 0"),
            (["--granularity", "blocks:4x0"], "blocks() takes positive integers, got 0"),
            (["--experts", "("], "--experts '(' is not a regular expression: missing ), unterminated subpattern at position 0"),
            (["--segments", "mlp"], "--segments 'mlp': expected REGEX=SIZE,SIZE,... or REGEX=SIZE:GRANULARITY,..."),
            (["--segments", "mlp=4,x"], "--segments 'mlp=4,x': expected an integer of at least 1, got 'x'"),
            (
                ["--segments", "mlp=4,4:rows"],
                "--segments 'mlp=4,4:rows': granularity 'rows': expected elements, rows:N, rows:N/WITHIN, blocks:HxW or tensor",
            ),
            (["--segments", "(=4"], "--segments '(=4': missing ), unterminated subpattern at position 0"),
            (["--segments", "nothing=4"], "--segments 'nothing=4': gpt-oss-120b has no parameter whose name matches 'nothing'"),
            (
                ["--segments", r"0\.attn\.qkv\.weight=4096,512"],
                r"--segments '0\\.attn\\.qkv\\.weight=4096,512': block.0.attn.qkv.weight: the sizes of segments((4096, 512), "
                "elements()) add up to 4608, the shape is (5120, 2880): give sizes that add up to its dimension 0, or another "
                "granularity for this parameter",
            ),
            (
                ["--segments", "qkv.weight=4096,1024", "--segments", "block.1.attn.qkv.weight=5120"],
                "--segments 'block.1.attn.qkv.weight=5120': block.1.attn.qkv.weight matches twice: give each parameter its "
                "segments once",
            ),
            (["--weights", "3,-1"], "argument --weights: expected an integer of at least 0, got '-1'"),
            (["--weights", "3,1", "--ranks", "2"], "--weights and --ranks do not go together: leave one out"),
            (
                ["--weights", "0,0"],
                "--weights: weights=[0, 0] must be 2 integers, one per rank of the shards, at least 0 and not all 0: pass "
                "weights=[2, 1] for a first rank with twice the shard of the others",
            ),
            (["--nonsense"], "unrecognized arguments: --nonsense"),
        ):
            self.assertEqual(self.error(gpt, *arguments), message)
        self.assertEqual(self.error(), "the following arguments are required: model")
        self.assertEqual(
            self.error("llama-3-70b", "--apply", "experts"),
            "llama-3-70b has no expert matrices: use --apply all, or match their names with --experts REGEX",
        )

    def test_unknown_groups_and_bad_files_are_refused(self):
        gpt = "gpt-oss-120b"
        for arguments, message in (
            (
                ["--explain", "blok.3", "--ranks", 8],
                "gpt-oss-120b has no group 'blok.3'; close names: block.3, block.35, block.34",
            ),
            (["--explain", "#", "--ranks", 8], "gpt-oss-120b has no group '#'; close names: block.0, block.1, block.2"),
            (["--explain", "block.0"], "--explain draws one FSDP size: give one size with --ranks"),
            (["--explain", "block.0", "--ranks", "8,16"], "--explain draws one FSDP size: give one size with --ranks"),
            (["--svg", "a.svg"], "--svg needs --explain GROUP: it draws the same buffer"),
            (["--json", "/no/folder/a.json"], "--json /no/folder/a.json: expected the path of a file in an existing folder"),
            (["--json", self.folder], f"--json {self.folder}: expected the path of a file in an existing folder"),
            (["--plot", "a.gif"], "--plot a.gif: expected a file name that ends in .png, .svg, .pdf"),
        ):
            self.assertEqual(self.error(gpt, *arguments), message)
        with mock.patch("importlib.util.find_spec", return_value=None):
            self.assertEqual(self.error(gpt, "--plot", "a.png"), "--plot needs matplotlib: run pip install matplotlib")
