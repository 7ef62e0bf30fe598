"""The command torch-ragged-spmd: what it prints and writes, and one line for each wrong call."""

import contextlib
import importlib.util
import io
import json
import runpy
import sys
import tempfile
import unittest
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch.nn.functional as F
from expecttest import TestCase
from spmd_common import Llama, wrapped
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from torch_ragged.spmd import Explanation, Plan
from torch_ragged.spmd._cli import main

CONFIG = dict(
    model_type="llama",
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
)
LAYER = r"model\.layers\.\d+"
PLAN = Plan().shard(rf"{LAYER}\.mlp\.(gate|up)_proj\.weight", Shard(0), "tp").unit(LAYER, "dp")
PLAN.shard(rf"{LAYER}\.mlp\.down_proj\.weight", Shard(1), "tp").shard(rf"{LAYER}\.mlp\.<out>", Replicate(), "tp")
PLAN.shard("<in:input_ids>", Shard(0), "dp").shard("<in:labels>", Shard(0), "dp")


class LlamaForCausalLM(nn.Module):
    """It has the names of the class of transformers, for where that is not installed."""

    tp_plan = {"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise"}
    fsdp_plan = {"model.layers.*": "free_full_weight"}

    def __init__(self, config):
        super().__init__()
        assert not config.use_cache
        self.model = Llama(config.num_hidden_layers, config.hidden_size, config.vocab_size)
        self.lm_head = self.model.lm_head
        del self.model.lm_head

    def forward(self, input_ids, labels):
        hidden = self.model.embed_tokens(input_ids)
        for layer in self.model.layers:
            hidden = layer(hidden)
        logits = self.lm_head(self.model.norm(hidden))
        return SimpleNamespace(loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def stand_in():
    """A module ``transformers`` with what the command uses."""
    module = ModuleType("transformers")
    module.AutoConfig = SimpleNamespace(for_model=lambda kind, **fields: SimpleNamespace(model_type=kind, **fields))
    module.AutoModelForCausalLM = SimpleNamespace(from_config=LlamaForCausalLM)
    return module


class CommandTest(TestCase):
    def setUp(self):
        if importlib.util.find_spec("transformers") is None:
            sys.modules["transformers"] = stand_in()  # mock.patch.dict would drop what a test imports.
            self.addCleanup(sys.modules.pop, "transformers")
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        (self.folder / "config.json").write_text(json.dumps(CONFIG))
        (self.folder / "plan.json").write_text(PLAN.to_json())

    def call(self, *arguments):
        """The status, and what is printed; paths without the folder."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), mock.patch("sys.argv", ["torch-ragged-spmd"]):
            status = main([argument.replace("@", f"{self.folder}/") for argument in arguments])
        return status, (out.getvalue() + err.getvalue()).replace(f"{self.folder}/", "@")

    def usual(self, command, **options):
        chosen = {"model": "@config.json", "plan": "@plan.json", "mesh": "dp=4,tp=2", **options}
        return self.call(command, *[part for name, value in chosen.items() for part in (f"--{name}", value)])

    def test_explain_prints_and_writes_one_explanation(self):
        for options, tokens in (({"batch": "16", "sequence": "16"}, 16 * 16), ({}, 4 * 2 * 128)):
            status, text = self.usual("explain", json="@out.json", svg="@out.svg", **options)
            self.assertEqual(status, 0)
            found = Explanation.from_json((self.folder / "out.json").read_text())
            self.assertEqual(text, f"{found}\n")
            boundary = [each for each in found.collectives if each.cause == "boundary" and each.phase == "forward"]
            local = tokens // 4 * CONFIG["hidden_size"] * 4
            self.assertEqual([(each.kind, each.dims, each.nbytes) for each in boundary], [("all-reduce", ("tp",), local)] * 3)
        ElementTree.parse(self.folder / "out.svg")

    def test_check_prints_the_records(self):
        status, text = self.usual("check", model="@")
        self.assertEqual(status, 0)
        self.assertTrue(text.startswith("mesh: dp=4, tp=2\n"), text)
        self.assertIn("model.layers.2.mlp.down_proj.weight", text)

    def test_check_lists_all_errors_of_a_plan(self):
        plan = Plan(PLAN.rules).shard("lm_hed.weight", Shard(0), "tp").unit("model.layer", "dp")
        (self.folder / "plan.json").write_text(plan.to_json())
        status, text = self.usual("check")
        self.assertEqual(status, 2)
        self.assertExpectedInline(
            wrapped(text),
            """\
torch-ragged-spmd: error: the plan does not fit LlamaForCausalLM on the mesh dp=4, tp=2: 2 problems
  plan.shard("lm_hed.weight", Shard(0), "tp")
    matches no parameter or buffer. Nearest names: lm_head.weight, model.norm.weight,
    | model.embed_tokens.weight
  plan.unit("model.layer", "dp")
    matches no module. Nearest names: model.layers, model.layers.0, model.layers.0.mlp""",
        )

    def test_options_without_which_nothing_runs(self):
        told = "torch-ragged-spmd: error: the following arguments are required: command, --model, --plan, --mesh\n"
        self.assertEqual(self.call(), (2, told))

    def test_a_wrong_option_is_one_line(self):
        wrong = [
            {"mesh": "dp=4,tp"},
            {"mesh": "dp=4,dp=2"},
            {"mesh": "dp=0"},
            {"batch": "0"},
            {"plan": "@no.json"},
            {"plan": "@config.json"},
            {"model": "@no.json"},
            {"model": "@plan.json"},
            {"json": "@no/out.json"},
            {"svg": "@"},
        ]
        lines = []
        for options in wrong:
            status, text = self.usual("explain", **options)
            self.assertEqual((status, text.count("\n")), (2, 1), text)
            lines.append(text)
        self.assertExpectedInline(
            wrapped(*lines),
            """\
torch-ragged-spmd: error: --mesh 'dp=4,tp': expected different names with their sizes, such as dp=64,tp=8
torch-ragged-spmd: error: --mesh 'dp=4,dp=2': expected different names with their sizes, such as dp=64,tp=8
torch-ragged-spmd: error: --mesh 'dp=0': expected different names with their sizes, such as dp=64,tp=8
torch-ragged-spmd: error: argument --batch: expected a positive integer, got '0'
torch-ragged-spmd: error: --plan @no.json: No such file or directory: give a file that Plan.to_json() has
    | written
torch-ragged-spmd: error: --plan @config.json: the JSON has no version: pass what Plan.to_json() returned
torch-ragged-spmd: error: --model @no.json: expected the config.json of a Hugging Face model:
    | FileNotFoundError: [Errno 2] No such file or directory: '@no.json'
torch-ragged-spmd: error: --model @plan.json: expected the config.json of a Hugging Face model: KeyError:
    | 'model_type'
torch-ragged-spmd: error: --json @no/out.json: expected the path of a file in an existing folder
torch-ragged-spmd: error: --svg @: expected the path of a file in an existing folder""",
        )

    def test_a_step_that_fails_is_one_line(self):
        plan = Plan(PLAN.rules).redistribute(rf"{LAYER}\.self_attn.<out>", Shard(0), "tp", src=Shard(1))
        (self.folder / "plan.json").write_text(plan.to_json())
        status, text = self.usual("explain", batch="8", sequence="8")
        self.assertEqual((status, text.count("\n")), (2, 1), text)
        self.assertExpectedInline(
            wrapped(text),
            """\
torch-ragged-spmd: error: a step of LlamaForCausalLM fails: ValueError: model.layers.0.self_attn.<out> arrives
    | as (Shard(dim=0), Replicate()), and the plan says that it is (None, Shard(dim=1)) (rules (6,)): correct
    | src, or leave it out""",
        )

    def test_without_transformers_it_says_so(self):
        with mock.patch.dict(sys.modules, {"transformers": None}):
            status, text = self.usual("explain")
        self.assertEqual(status, 2)
        self.assertExpectedInline(
            text,
            """\
torch-ragged-spmd: error: --model needs transformers: pip install transformers
""",
        )

    def test_the_models_own_plan(self):
        for mesh, placement, is_unit in (("dp=4,tp=2", "tp=S(1)", True), ("dp=4", "R", True), ("tp=2", "tp=S(1)", False)):
            status, text = self.usual("check", plan="transformers", mesh=mesh)
            self.assertEqual(status, 0, text)
            (line,) = [line.split() for line in text.splitlines() if line.startswith("model.layers.2.mlp.down_proj.weight")]
            self.assertEqual((line[1], "model.layers.2" in line), (placement, is_unit))

    def test_the_module_runs_as_a_program(self):
        out = io.StringIO()
        with contextlib.redirect_stdout(out), mock.patch("sys.argv", ["python", "--help"]):
            with self.assertRaises(SystemExit) as end:
                runpy.run_module("torch_ragged.spmd", run_name="__main__", alter_sys=True)
        self.assertEqual(end.exception.code, 0)
        text = " ".join(out.getvalue().split())
        self.assertTrue(text.startswith("usage: python -m torch_ragged.spmd [-h] --model FILE --plan FILE --mesh"), text)
        self.assertExpectedInline(
            wrapped(text[text.index("--model FILE a ") : text.index(" examples:")]),
            """\
--model FILE a Hugging Face config.json, or a folder with one --plan FILE the JSON of a plan; or transformers,
    | for the model's own plan --mesh NAME=SIZE,... the mesh dimensions, such as dp=64,tp=8 --batch BATCH
    | sequences in the whole batch (default: one per rank) --sequence SEQUENCE tokens of a sequence (default:
    | 128) --json FILE explain: also write all results to this file --svg FILE explain: also draw the model to
    | this file""",
        )


if __name__ == "__main__":
    unittest.main()
