"""Will it fit? What a step keeps by family, its peak beside memory_report and beside a measured one, verdicts, changes."""

import contextlib
import gc
import io
import itertools
import json
import re
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.testing._internal.common_utils import TestCase

from benchmarks.common.tracker import MemoryTracker
from torch_ragged._register._torch import fake_world
from torch_ragged.fsdp import MixedPrecisionPolicy, elements, fully_shard, memory_report
from torch_ragged.offline import Model, ModelPlanner, granularity_policy, main
from torch_ragged.offline._fit import Setting, _activations, fitting, step_memory
from torch_ragged.offline._memory import Precision, zero_memory
from torch_ragged.offline._models import module_groups
from torch_ragged.offline._shapes import FAMILIES, Config, _wide_norm

RANKS = 8
TINY = dict(hidden_size=64, intermediate_size=192, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=512)
LLAMA = dict(TINY, num_hidden_layers=6)


class RMSNorm(nn.Module):
    """As those of transformers' Llama: in float32, then times the weight."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Block(nn.Module):
    """A block of Llama; of Qwen3, if it norms queries and keys."""

    def __init__(self, norms_heads):
        super().__init__()
        hidden, inner, self.head = TINY["hidden_size"], TINY["intermediate_size"], TINY["head_dim"]
        heads, groups = TINY["num_attention_heads"], TINY["num_key_value_heads"]
        self.q, self.k, self.v = (nn.Linear(hidden, n * self.head, bias=False) for n in (heads, groups, groups))
        self.o = nn.Linear(heads * self.head, hidden, bias=False)
        self.gate, self.up = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, hidden, bias=False)
        self.norms = nn.ModuleList(RMSNorm(hidden) for _ in range(2))
        self.head_norms = nn.ModuleList(RMSNorm(self.head) if norms_heads else nn.Identity() for _ in range(2))

    def forward(self, x):
        y = self.norms[0](x)
        q, k, v = (linear(y).unflatten(-1, (-1, self.head)) for linear in (self.q, self.k, self.v))
        q, k = (norm(each) + 0.0 for norm, each in zip(self.head_norms, (q, k)))  # A rotary embedding makes new tensors.
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    def __init__(self, checkpointing=False, norms_heads=False):
        super().__init__()
        self.checkpointing = checkpointing
        self.embed = nn.Embedding(TINY["vocab_size"], TINY["hidden_size"])
        self.layers = nn.ModuleList(Block(norms_heads) for _ in range(LLAMA["num_hidden_layers"]))
        self.norm = RMSNorm(TINY["hidden_size"])
        self.lm_head = nn.Linear(TINY["hidden_size"], TINY["vocab_size"], bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) if self.checkpointing else layer(x)
        logits = self.lm_head(self.norm(x))
        return logits, F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


def model_of(kind, **fields):
    decoder = FAMILIES[kind](Config(fields, "a test"))
    return Model(kind, decoder.groups, decoder)


def planner_of(model, precision=Precision()):
    return ModelPlanner(model, granularity_policy(elements(), False), precision.alignment)


def peak_of(model, setting, precision=Precision(), ranks=RANKS):
    return step_memory(model, planner_of(model, precision).plan(ranks), precision, setting)


def sharded(model, precision):
    mesh = init_device_mesh("cpu", (RANKS,))
    policy = MixedPrecisionPolicy(param_dtype=precision.param, reduce_dtype=precision.reduce)
    for layer in getattr(model, "model", model).layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def measured_peak(build, setting):
    """The peak of a second step on rank 0 of a fake group. ``build()``: a model, and a function that gives logits and loss."""
    with fake_world(RANKS), MemoryTracker("cpu") as tracker:
        torch.manual_seed(0)
        model, step = build()
        sharded(model, Precision())
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        tokens = torch.randint(TINY["vocab_size"], (setting.batch, setting.sequence))
        for _ in range(2):
            gc.collect()  # Cycles of earlier tests, and of recomputation, live until then.
            tracker.reset_peak()
            logits, loss = step(model, tokens)
            loss.backward()
            peak = tracker.peak
            optimizer.step()
            optimizer.zero_grad()
            del logits, loss
        del model, optimizer
    return peak


def saved_nbytes(model, forward):
    """Bytes of the tensors that autograd keeps, without parameters and buffers."""
    known = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage  # It lives, so no other one gets its address.
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(storage.nbytes() for storage in kept.values())


def run(*arguments):
    """Exit status, standard output and standard error of the tool."""
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        status = main([str(argument) for argument in arguments])
    return status, out.getvalue(), error.getvalue()


class SavedTest(TestCase):
    def test_a_block_keeps_what_its_family_says(self):
        for kind, dtype in itertools.product(("llama", "qwen3"), (torch.bfloat16, torch.float32)):
            block = Block(norms_heads=kind == "qwen3").to(dtype)
            x = torch.randn(2, 16, TINY["hidden_size"], dtype=dtype, requires_grad=True) * 1
            found = saved_nbytes(block, lambda: block(x))
            expected = 32 * model_of(kind, **LLAMA).decoder.saved["model.layers.3"].nbytes(dtype.itemsize)
            self.assertEqual(found, expected, msg=f"{kind} {dtype}")

    def test_a_norm_whose_weight_is_multiplied_in_float32_keeps_its_input_and_the_product(self):
        class Norm(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.ones(64))

            def forward(self, x):
                wide = x.float()
                return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight.float()).to(x.dtype)

        norm = Norm().bfloat16()
        tokens = [torch.randn(n, 64, dtype=torch.bfloat16, requires_grad=True) * 1 for n in (3, 8)]
        found = [saved_nbytes(norm, lambda x=x: norm(x)) for x in tokens]
        self.assertEqual(found[1] - found[0], 5 * _wide_norm("norm", 64).saved.nbytes(2))

    def test_blocks_of_transformers_keep_what_their_families_say(self):
        transformers = pytest.importorskip("transformers")
        moe = dict(num_experts_per_tok=4, moe_intermediate_size=32)
        kinds = {
            "llama": (transformers.LlamaConfig, transformers.LlamaModel, {}),
            "mistral": (transformers.MistralConfig, transformers.MistralModel, {}),
            "qwen3": (transformers.Qwen3Config, transformers.Qwen3Model, {}),
            "gemma3_text": (transformers.Gemma3TextConfig, transformers.Gemma3TextModel, {}),
            "mixtral": (transformers.MixtralConfig, transformers.MixtralModel, dict(num_local_experts=8)),
            "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeModel, dict(moe, num_experts=16)),
        }
        for (kind, (config_type, model_type, fields)), dtype in itertools.product(
            kinds.items(), (torch.bfloat16, torch.float32)
        ):
            found = []
            for layers in (2, 4):
                config = config_type(**TINY, **fields, num_hidden_layers=layers)
                model = model_type(config).to(dtype)
                tokens = torch.randint(TINY["vocab_size"], (2, 64))
                found.append(saved_nbytes(model, lambda: model(tokens, use_cache=False)))
            saved = FAMILIES[kind](Config(config.to_dict(), kind)).saved["model.layers.2"].nbytes(dtype.itemsize)
            self.assertEqual((found[1] - found[0]) / 2 / 128 / saved, 1.0, atol=0.02, rtol=0, msg=f"{kind} {dtype}")


class PeakTest(TestCase):
    def test_buffers_are_those_of_memory_report(self):
        for precision in (Precision(), Precision(torch.float32, torch.float32, torch.float32, 2)):
            with torch.device("meta"):
                model = Decoder()
            groups = module_groups(model)
            planned = peak_of(Model("tiny", groups), Setting(1, 16), precision)
            with fake_world(RANKS):
                report = memory_report(sharded(model, precision), torch.optim.AdamW).peak
            self.assertEqual(planned.parameters, report.sharded)
            self.assertEqual(planned.optimizer, report.optimizer, atol=4 * 200, rtol=0)  # AdamW counts steps.
            found = report.gathered + report.gradients + report.grad
            self.assertEqual((planned.gathered + planned.unreduced + planned.grad) / found, 1.0, atol=0.05, rtol=0)

    def test_a_step_has_the_peak(self):
        precision = Precision()
        for checkpointing, (batch, sequence) in itertools.product((False, True), ((1, 16), (2, 64))):
            setting = Setting(batch, sequence, checkpointing)
            planned = peak_of(model_of("llama", **LLAMA), setting, precision)
            peak = measured_peak(lambda: (Decoder(checkpointing), lambda model, tokens: model(tokens)), setting)
            self.assertEqual(planned.total / peak, 1.0, atol=0.05, rtol=0, msg=f"{setting}: {planned}, measured {peak}")

    def test_steps_of_transformers_have_the_peak(self):
        transformers = pytest.importorskip("transformers")
        fields = dict(TINY, hidden_size=256, intermediate_size=768, num_attention_heads=8, head_dim=32, vocab_size=4096)
        kinds = {
            "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
            "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {}),
            "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM, dict(num_local_experts=8)),
        }
        for (kind, (config_type, model_type, more)), checkpointing, (batch, sequence) in itertools.product(
            kinds.items(), (False, True), ((1, 32), (4, 128))
        ):
            config, setting = config_type(**fields, **more, num_hidden_layers=6), Setting(batch, sequence, checkpointing)

            def build():
                model = model_type(config).train()
                if checkpointing:
                    model.gradient_checkpointing_enable()

                def step(model, tokens):
                    output = model(tokens, labels=tokens, use_cache=False)
                    return output.logits, output.loss

                return model, step

            ratio = peak_of(model_of(kind, **config.to_dict()), setting).total / measured_peak(build, setting)
            print(f"{kind}, {setting}: {ratio:.3f} of the measured peak")
            self.assertEqual(ratio, 1.0, atol=0.05, rtol=0, msg=f"{kind}, {setting}")

    def test_a_moment_is_named_by_the_model(self):
        llama = model_of("llama", **LLAMA)
        self.assertEqual(peak_of(llama, Setting(1, 8)).moment, "backward of model.layers.1")
        self.assertEqual(peak_of(llama, Setting(64, 64, checkpointing=True)).moment, "the loss")
        wide = model_of("llama", **{**LLAMA, "vocab_size": 1024, "num_hidden_layers": 1, "hidden_size": 512})
        self.assertEqual(peak_of(wide, Setting(1, 256)).moment, "backward of the head")

    def test_its_state_is_that_of_the_table_of_memory(self):
        llama, setting = model_of("llama", **LLAMA), Setting(1, 8)
        for shard, states in itertools.product((torch.float32, torch.bfloat16), (0, 2, 3)):
            precision = Precision(states=states, shard=shard)
            peak, resident = peak_of(llama, setting, precision), zero_memory(planner_of(llama).plan(RANKS).ragged, precision)[3]
            self.assertEqual((peak.parameters, peak.optimizer), (resident.parameters, resident.optimizer))
            self.assertEqual(resident.gradients, resident.parameters)

    def test_experts_of_qwen3_are_in_some_blocks_and_their_number_has_two_names(self):
        fields = dict(LLAMA, moe_intermediate_size=32, decoder_sparse_step=3)
        one, other = (model_of("qwen3_moe", **fields, **{name: 16}) for name in ("num_experts", "num_local_experts"))
        self.assertEqual(one.groups, other.groups)
        sparse = [name for name, group in one.groups.items() if any(".experts." in parameter.name for parameter in group)]
        self.assertEqual(sparse, ["model.layers.2", "model.layers.5"])
        with self.assertRaisesRegex(ValueError, "has no field 'num_experts', which its model_type needs"):
            model_of("qwen3_moe", **fields)

    def test_experts_of_a_token_are_those_of_the_family_if_the_config_has_no_number(self):
        fields = dict(LLAMA, num_local_experts=16, num_experts=16, moe_intermediate_size=32)
        for kind, active in {"mixtral": 2, "qwen3_moe": 8, "gpt_oss": 4}.items():
            default, given = (model_of(kind, **fields, **more) for more in ({}, dict(num_experts_per_tok=active)))
            self.assertEqual(default.decoder.saved, given.decoder.saved, msg=kind)

    def test_a_checkpointed_block_keeps_its_input_and_makes_again_what_it_keeps_without(self):
        llama, precision = model_of("llama", **LLAMA), Precision()
        without, found = (
            _activations(llama, precision, Setting(2, 64, checkpointing))["model.layers.1"] for checkpointing in (False, True)
        )
        self.assertEqual(found.kept, 128 * TINY["hidden_size"] * 2)
        self.assertEqual(found.computed_again, without.kept + without.computed_again)

    def test_replicas_change_nothing(self):
        llama = model_of("llama", **LLAMA)
        self.assertEqual(peak_of(llama, Setting(2, 64)), peak_of(llama, Setting(2, 64, replicas=4)))


class FittingTest(TestCase):
    def of(self, limit, setting=Setting(2, 64), model=None):
        planner, precision = planner_of(model or model_of("llama", **LLAMA)), Precision()
        return fitting(planner, planner.plan(RANKS), precision, setting, limit)

    def test_changes_end_with_the_first_that_fits(self):
        everything = self.of(1)
        totals = [change.total for change in everything.changes]
        self.assertEqual(totals, sorted(totals, reverse=True))
        self.assertEqual(
            [change.text for change in everything.changes],
            [
                "checkpoint each block, about a third more compute",
                "batch 1, and accumulate gradients",
                "Offload(1.0): the optimizer's states in host memory",
                "Offload(parameters=True): shards in host memory too",
            ],
        )
        self.assertEqual(everything.changes[0].total, everything.ways["blocks"].total)
        self.assertFalse(everything.fits)
        self.assertIsNone(everything.enough_ranks)
        for count, change in ((1, everything.changes[0]), (3, everything.changes[2])):
            found = self.of(change.total)
            self.assertEqual((found.changes, found.fits), (everything.changes[:count], count == 1))
        enough = self.of(everything.ways["no"].total)
        self.assertEqual((enough.fits, enough.changes), (True, ()))

    def test_offload_moves_the_states_and_then_the_shards(self):
        peak = self.of(1, Setting(1, 8)).ways["blocks"]
        states, shards = self.of(1, Setting(1, 8)).changes[1:3]
        self.assertEqual(states.total, peak.total - peak.optimizer)
        self.assertEqual(shards.total, peak.gathered + peak.unreduced + peak.activations)

    def test_a_model_whose_activations_are_not_known(self):
        groups = model_of("llama", **LLAMA).groups
        found = self.of(1, model=Model("mine", groups))
        self.assertEqual([*found.ways], ["no"])
        self.assertEqual(found.changes[0].text, "Offload(1.0): the optimizer's states in host memory")


class CommandTest(TestCase):
    def test_it_says_what_fits_and_what_to_change(self):
        status, out, error = run("llama-3-8b", "--ranks", 8, "--memory", "80GB", "--batch", 1, "--sequence", 4096)
        self.assertEqual((status, error), (0, ""))
        self.assertIn("Peak of a step per rank, ZeRO-3, 1 x 4,096 tokens\n", out)
        self.assertIn("8 ranks: fits, ", out)
        (columns,) = [re.split("  +", line) for line in out.splitlines() if "  checkpointing  " in line]
        parts = ["parameters", "optimizer", ".grad", "gathered", "unreduced grads", "activations"]
        self.assertEqual(columns, ["FSDP size", "checkpointing", *parts, "total", "of 70.78 GiB", "peak"])
        self.assertIn("Recommended FSDP sizes: 8.", out)
        status, out, _ = run("llama-3-8b", "--ranks", 8, "--memory", "24GiB", "--batch", 2)
        self.assertEqual(status, 1)
        self.assertIn("8 ranks: does not fit. ", out)
        self.assertIn("What to change, least harm first, each with those above:\n  checkpoint each block", out)
        self.assertRegex(out, r"\n  batch 1, and accumulate gradients: \d+\.\d\d GiB, fits\n")
        self.assertIn("Not recommended, as a step does not fit: 8.", out)
        self.assertNotIn("\nRecommended", out)

    def test_a_step_that_fits_with_checkpointing_alone_is_recommended(self):
        status, out, _ = run("qwen3-0.6b", "--ranks", 8, "--memory", "12GB")
        self.assertEqual(status, 0)
        self.assertIn("8 ranks: does not fit without checkpointing. ", out)
        self.assertIn("Recommended FSDP sizes: 8. ", out)

    def test_recommended_sizes_fit(self):
        status, out, _ = run("llama-3-70b", "--ranks", "8,16,64", "--memory", "80GB")
        self.assertEqual(status, 0)
        self.assertIn("Recommended FSDP sizes: 64. ", out)
        self.assertIn("Not recommended, as a step does not fit: 8, 16.", out)

    def test_what_leaves_less_than_the_reserve_does_not_fit(self):
        """A peak of 9.63 GiB: 5 % of 9.9 GiB would stay free for what is not counted, and 1 % does."""
        options = ["qwen3-0.6b", "--ranks", 8, "--memory", "9.9GiB"]
        for more, expected in (((), 1), (("--reserve", 1), 0), (("--reserve", 0), 0)):
            status, out, _ = run(*options, *more)
            self.assertEqual((status, "\nRecommended FSDP sizes: 8." in out), (expected, not expected), msg=out)
        self.assertIn("506.88 MiB of 9.90 GiB are reserved for CUDA's context, NCCL's buffers", run(*options)[1])

    def test_json_has_the_peaks(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "plan.json"
            run("qwen3-0.6b", "--ranks", 2, "--memory", "1GB", "--json", path)
            (size,) = json.loads(path.read_text())["sizes"]
        step = size["step"]
        self.assertEqual((step["batch"], step["sequence"], step["memory"], step["fits"]), (1, 4096, 10**9, False))
        self.assertEqual((step["reserve"], step["enough_ranks"]), (5 * 10**7, None))
        for peak in step["peaks"].values():
            self.assertEqual(peak["total"], sum(value for part, value in peak.items() if part not in ("moment", "total")))
        self.assertEqual(step["changes"][0]["total"], step["peaks"]["blocks"]["total"])

    def test_wrong_options(self):
        for options, text in {
            ("--memory", "80"): "expected a number with MB, MiB, GB, GiB, TB or TiB, such as 80GB, got '80'",
            ("--memory", "0GB"): "expected a number with MB, MiB, GB, GiB, TB or TiB, such as 80GB, got '0GB'",
            ("--batch", "2"): "--batch needs --memory SIZE",
            ("--sequence", "2"): "--sequence needs --memory SIZE",
            ("--reserve", "0"): "--reserve needs --memory SIZE",
            ("--memory", "80GB", "--reserve", "100"): "--reserve 100: expected a percentage below 100",
            ("--weights", "1,2", "--memory", "80GB"): "--weights and --memory do not go together",
            ("--ranks", "8", "--explain", "rest", "--memory", "80GB"): "--explain and --memory do not go together",
            ("--memory", "80GB", "--param-dtype", "float8_e4m3fn"): "--memory needs the dtype of compute, such as bfloat16",
        }.items():
            try:
                status, _, error = run("llama-3-8b", *options)
            except SystemExit as end:  # argparse writes to the real stderr; what it says is tested by the type's function.
                status, error = end.code, text
            self.assertEqual((status, text in error), (2, True), msg=error)

    def test_a_process_with_a_group_is_refused_before_anything_is_planned(self):
        with fake_world(2):
            status, out, error = run("llama-3-8b", "--memory", "80GB")
        self.assertEqual((status, out), (2, ""))
        self.assertIn("--memory makes a process group of its own", error)

    def test_a_model_without_known_activations_fits_without_them(self):
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(sys, "path", [folder, *sys.path]):
            (Path(folder) / "a_model_to_plan.py").write_text("from torch import nn\ndef build(): return nn.Linear(64, 64)\n")
            _, out, _ = run("a_model_to_plan:build", "--ranks", 2, "--memory", "1GB")
        self.assertIn("WITHOUT activations, which are not known for this model\n", out)
        self.assertIn("2 ranks: fits without activations, ", out)

    def test_units_of_memory(self):
        from torch_ragged.offline._cli import _memory_option

        found = {text: _memory_option(text) for text in ("80GB", "80GiB", "1.5TB", "512 MiB", "3MB", "2TiB")}
        self.assertEqual(
            list(found.values()), [80 * 10**9, 80 * 2**30, 15 * 10**11, 512 * 2**20, 3 * 10**6, 2 * 2**40], msg=str(found)
        )


if __name__ == "__main__":
    from torch.testing._internal.common_utils import run_tests

    run_tests()
