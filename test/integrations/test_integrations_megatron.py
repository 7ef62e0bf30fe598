"""Megatron's torch_dist checkpoints are read by rows, into separate and fused weights; a swap of segments is found.

``test/data/megatron-core-0.16.1`` was written by ``write.py`` in it: a GPT model on two ranks of tensor parallelism.
"""

import importlib.util
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from common import error_of, run_ranks
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F

from torch_ragged import InterleavedShard, checkpoint
from torch_ragged.checkpoint import RowPlanner, StoredRows, TrainState
from torch_ragged.fsdp import fully_shard, rows
from torch_ragged.integrations.megatron import llama_rows, qkv_rows

FILES = Path(__file__).parents[1] / "data" / "megatron-core-0.16.1"
HEADS, GROUPS, HEAD_DIM, WIDTH, INNER, VOCAB = 4, 2, 4, 16, 24, 32
CONFIG = SimpleNamespace(
    num_hidden_layers=2,
    hidden_size=WIDTH,
    intermediate_size=INNER,
    num_attention_heads=HEADS,
    num_key_value_heads=GROUPS,
    head_dim=HEAD_DIM,
    vocab_size=VOCAB,
    tie_word_embeddings=False,
    attention_bias=False,
    mlp_bias=False,
)
Q, KV = HEADS * HEAD_DIM, GROUPS * HEAD_DIM


def rotated(x):
    angles = torch.arange(x.size(-2))[:, None] / 10000 ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.cat([angles, angles], -1)
    first, second = x.chunk(2, -1)
    return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, size, bias=False) for size in (Q, KV, KV))
        self.o_proj = nn.Linear(Q, WIDTH, bias=False)

    def forward(self, x):
        q, k, v = (each(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for each in (self.q_proj, self.k_proj, self.v_proj))
        x = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True, enable_gqa=True)
        return self.o_proj(x.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn, self.mlp = Attention(), Mlp()
        self.input_layernorm, self.post_attention_layernorm = (nn.RMSNorm(WIDTH, 1e-5) for _ in range(2))

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """With the names of Hugging Face's LlamaForCausalLM."""

    def __init__(self):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        self.model.layers = nn.ModuleList(Layer() for _ in range(2))
        self.model.norm = nn.RMSNorm(WIDTH, 1e-5)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x)
        return self.lm_head(self.model.norm(x))


def read(model, rows_of, folder=FILES):
    dcp.load(model.state_dict(), storage_reader=FileSystemReader(folder), planner=RowPlanner(rows_of))
    return model


def logits_of(model):
    with torch.no_grad():
        return model(torch.load(FILES / "logits.pt")["tokens"])


def is_megatrons(model, folder=FILES):
    want = torch.load(Path(folder) / "logits.pt")["logits"][..., :VOCAB]
    return torch.allclose(logits_of(model), want, rtol=1e-4, atol=1e-5)


def fused_rows():
    """By the names of :class:`Fused`."""
    found = {}
    for layer in range(2):
        parts = qkv_rows("decoder.layers.self_attention.linear_qkv.weight", (layer,), HEADS, GROUPS, HEAD_DIM)
        found[f"{layer}.qkv.weight"] = sum(parts, [])
        found[f"{layer}.gate_up.weight"] = [StoredRows("decoder.layers.mlp.linear_fc1.weight", (layer,))]
    return found


class Fused(nn.Module):
    """Fused weights under tensor parallelism and FSDP, or in one process."""

    def __init__(self):
        super().__init__()
        self.qkv, self.gate_up = nn.Linear(WIDTH, Q + 2 * KV, bias=False), nn.Linear(WIDTH, 2 * INNER, bias=False)

    def shard(self, mesh, qkv, gate_up):
        for linear, placement in ((self.qkv, qkv), (self.gate_up, gate_up)):
            linear.weight = nn.Parameter(distribute_tensor(linear.weight, mesh["tp"], [placement], src_data_rank=None))
        fully_shard(self, mesh=mesh["dp"], orig_param_policy=lambda name, param: rows(3))


SEGMENTS = InterleavedShard(0, (Q, KV, KV)), InterleavedShard(0, 2)


def make_fused(shape, placements):
    model, mesh = nn.ModuleList(Fused() for _ in range(2)), init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    for layer in model:
        layer.shard(mesh, *placements)
    return model


def check_fused(model, expected):
    for name, value in model.state_dict().items():
        assert torch.equal(value.full_tensor(), expected[name]), name


def load_fused(path, expected):
    """Megatron's files into two layouts of tensor parallelism and FSDP, through our checkpoints from one to the other."""
    model = read(make_fused((2, 2), SEGMENTS), fused_rows())
    check_fused(model, expected)
    checkpoint.save(path, TrainState(model))
    local = model[0].gate_up.weight.full_tensor()
    assert torch.equal(local[:INNER], expected["0.gate_up.weight"][:INNER])
    other = make_fused((4, 1), (Shard(0), Shard(1)))
    checkpoint.load(path, TrainState(other))
    check_fused(other, expected)


class MegatronTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = folder.name

    def test_a_llama_computes_what_megatron_computed_and_a_swap_is_found(self):
        right = llama_rows(CONFIG)
        model = read(Llama(), right)
        self.assertTrue(is_megatrons(model))
        checkpoint.save(self.path, TrainState(model.requires_grad_(False), base="gpt"))
        for one, other in (("mlp.gate_proj", "mlp.up_proj"), ("self_attn.k_proj", "self_attn.v_proj")):
            one, other = f"model.layers.1.{one}.weight", f"model.layers.1.{other}.weight"
            swapped = read(Llama(), {**right, one: right[other], other: right[one]})
            self.assertFalse(is_megatrons(swapped), one)
            text = error_of(checkpoint.load, self.path, TrainState(swapped))
            self.assertIn("other values of 2 of 21: load the base into the model first", text)
            self.assertTrue(f"model.{one}" in text and f"model.{other}" in text)
        name = "model.layers.0.self_attn.q_proj.weight"  # As if all queries came first.
        wrong = [StoredRows("decoder.layers.self_attention.linear_qkv.weight", (0,), 0, Q)]
        self.assertFalse(is_megatrons(read(Llama(), {**right, name: wrong})))

    def test_fused_weights_are_read_under_tensor_parallelism_and_fsdp(self):
        separate, expected = read(Llama(), llama_rows(CONFIG)), {}
        for number, layer in enumerate(separate.model.layers):
            parts = (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
            expected[f"{number}.qkv.weight"] = torch.cat([each.weight.detach() for each in parts])
            parts = (layer.mlp.gate_proj, layer.mlp.up_proj)
            expected[f"{number}.gate_up.weight"] = torch.cat([each.weight.detach() for each in parts])
        run_ranks(4, load_fused, self.path, expected)

    def test_separate_weights_of_hugging_face_become_fused_and_back(self):
        model, fused = Llama(), nn.ModuleList(Fused() for _ in range(2))
        dcp.save(model.state_dict(), checkpoint_id=f"{self.path}/hf")
        parts = {"qkv": [f"self_attn.{x}_proj" for x in "qkv"], "gate_up": ["mlp.gate_proj", "mlp.up_proj"]}
        there = {
            f"{layer}.{name}.weight": [StoredRows(f"model.layers.{layer}.{each}.weight") for each in names]
            for layer in range(2)
            for name, names in parts.items()
        }
        read(fused, there, f"{self.path}/hf")
        self.assertTrue(torch.equal(fused[1].gate_up.weight[INNER:], model.model.layers[1].mlp.up_proj.weight))
        dcp.save(fused.state_dict(), checkpoint_id=f"{self.path}/fused")
        back, other = {}, Llama()
        for name, stored in there.items():
            start = 0
            for each in stored:
                stop = start + len(model.state_dict()[each.name])
                back[each.name], start = [StoredRows(name, (), start, stop)], stop
        state = {name: value for name, value in other.state_dict().items() if name in back}
        dcp.load(state, storage_reader=FileSystemReader(f"{self.path}/fused"), planner=RowPlanner(back))
        for name, value in state.items():
            self.assertTrue(torch.equal(value, model.state_dict()[name]), name)

    def test_rows_of_other_configs(self):
        fields = {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": None}
        found = llama_rows(SimpleNamespace(**{**vars(CONFIG), **fields}), stacked=False)
        self.assertEqual(found["lm_head.weight"], found["model.embed_tokens.weight"])
        key = StoredRows("decoder.layers.1.self_attention.linear_qkv.bias", (), 8, 12)
        self.assertEqual(found["model.layers.1.self_attn.k_proj.bias"][0], key)
        up = StoredRows("decoder.layers.0.mlp.linear_fc1.bias", (), INNER, 2 * INNER)
        self.assertEqual(found["model.layers.0.mlp.up_proj.bias"], [up])
        with self.assertRaisesRegex(ValueError, "groups that divide the heads, got 4 heads and 3 groups"):
            qkv_rows("qkv", (), 4, 3, 8)

    @pytest.mark.slow
    @unittest.skipUnless(importlib.util.find_spec("megatron"), "megatron-core is not installed")
    def test_what_the_installed_megatron_writes_is_read(self):
        folder, writer = f"{self.path}/written", self.path + "/write.py"
        shutil.copy(FILES / "write.py", writer)
        ranks = [subprocess.Popen([sys.executable, writer, str(rank), "2", folder]) for rank in range(2)]
        self.assertEqual([each.wait(300) for each in ranks], [0, 0])
        self.assertTrue(is_megatrons(read(Llama(), llama_rows(CONFIG), folder), folder))


if __name__ == "__main__":
    unittest.main()
