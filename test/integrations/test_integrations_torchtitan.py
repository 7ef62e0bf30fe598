"""torchtitan's trainer with ours: its losses, checkpoints, optimizers and Hugging Face files; skipped where it cannot run."""

import dataclasses
import importlib.util
import os
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.api as dcp
from common import error_of, run_ranks
from doc_pages import run_page
from torch.distributed.tensor import DTensor

from torch_ragged import RaggedShard, StridedRaggedShard
from torch_ragged.fsdp import rows

sys.path.append(str(Path(__file__).parents[1] / "clients"))
import torchtitan_cases as titan  # noqa: E402

RUNS_HERE = bool(importlib.util.find_spec("torchtitan")) and titan.CAN_RUN
WHY = "torchtitan is not installed, or this torch has no torch.distributed.set_timeout, which it calls"
STEPS = 6
MANAGERS = {"torchtitan's": [], "ours": ["torch_ragged.integrations.torchtitan.checkpoints.complete"]}


def placements_of(parts):
    return {type(p.placements[i]) for part in parts for p in part.parameters() for i in range(len(p.placements))}


# -- losses --------------------------------------------------------------------------------------------------------------


def losses_of(name, changes):
    return titan.train("fsdp2", name, changes), titan.train("ragged", name, changes)


# -- checkpoints ---------------------------------------------------------------------------------------------------------


def run_until(last, folder, overrides, name=titan.LLAMA, changes=None, implementation="ragged"):
    """Train to step ``last`` of a run of STEPS steps, from the latest checkpoint; returns (steps done before, losses)."""
    titan.use_the_cpu()
    saving = {"checkpoint.enable": True, "checkpoint.interval": 3, "checkpoint.last_save_model_only": False}
    size = {"training.local_batch_size": 8 // dist.get_world_size(), "training.steps": STEPS, "dump_folder": folder}
    given = {**saving, **size, "override.imports": overrides, **(changes or {})}
    with titan.trainer_of(titan.make_config(implementation, name, given)) as trainer, mock.patch("time.sleep"):
        trainer.should_continue_training = lambda: trainer.step < last
        trainer.train()
        return trainer.step - len(trainer.losses), trainer.losses


def check_resume(test, before, after, overrides, name=titan.LLAMA, changes=None):
    """Losses of a run that ``before`` ranks start and ``after`` ranks end are those of ``before`` ranks alone."""
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        (_, whole), *_ = run_ranks(before, run_until, STEPS, first, overrides, name, changes)
        run_ranks(before, run_until, 3, second, overrides, name, changes)
        (skipped, rest), *_ = run_ranks(after, run_until, STEPS, second, overrides, name, changes)
        names = sorted(path.name for path in (Path(second) / "checkpoint").iterdir())
    test.assertEqual(skipped, 3)
    torch.testing.assert_close(torch.tensor(rest), torch.tensor(whole[3:]), rtol=2e-5, atol=0)
    test.assertGreater(whole[0] - rest[0], 0.01)  # Otherwise a run from the first weights would have the same losses.
    test.assertEqual(names, ["step-00000003", "step-00000006"] if overrides[:1] == MANAGERS["ours"] else ["step-3", "step-6"])


def damage(folder):
    file = next(path for path in Path(folder).rglob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))


def resume_error(folder, overrides):
    try:
        run_until(STEPS, folder, overrides)
    except dcp.CheckpointException as error:  # No Exception.
        return str(error)
    return ""


# -- optimizers ----------------------------------------------------------------------------------------------------------


def optimizers_of(overrides):
    titan.use_the_cpu()
    config = titan.make_config("ragged", titan.QWEN, {"override.imports": overrides, "training.steps": 2})
    with titan.trainer_of(config) as trainer, mock.patch("time.sleep"):
        trainer.train()
        names = {p: name for part in trainer.model_parts for name, p in part.named_parameters()}
        kinds = {
            names[p]: type(optimizer).__name__
            for optimizer in trainer.optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        }
        placed = [
            value.placements == p.placements
            for optimizer in trainer.optimizers
            for p, state in optimizer.state.items()
            for value in state.values()
            if isinstance(value, DTensor) and value.shape == p.shape
        ]
        return kinds, placed


# -- Hugging Face --------------------------------------------------------------------------------------------------------


def export_and_import(folder, name, changes, policy):
    """Export a model, import it into another with other weights; return what of the second differs, and the files."""
    from safetensors import safe_open

    titan.use_the_cpu()
    changes = {**changes, "training.steps": 1, "dump_folder": folder}
    saving = {"checkpoint.enable": True, "checkpoint.folder": "hf", "checkpoint.last_save_model_only": True}
    saving |= {"checkpoint.last_save_in_hf": True, "checkpoint.export_dtype": "float32"}
    config = titan.make_config("ragged", name, {**changes, **saving}, policy=policy)
    with titan.trainer_of(config) as trainer, mock.patch("time.sleep"):
        assert placements_of(trainer.model_parts) & {RaggedShard, StridedRaggedShard}
        trainer.train()
        trained = {key: value.full_tensor().clone() for key, value in trainer.model_parts[0].named_parameters()}
    loading = {"checkpoint.enable": True, "checkpoint.initial_load_in_hf": True, "checkpoint.folder": "other"}
    loading["checkpoint.initial_load_path"] = os.path.join(folder, "hf", "step-1")
    with titan.trainer_of(titan.make_config("ragged", name, {**changes, **loading}, policy=policy)) as trainer:
        trainer.checkpointer.load()
        loaded = {key: value.full_tensor() for key, value in trainer.model_parts[0].named_parameters()}
    different = [key for key in trained if not torch.equal(trained[key], loaded[key])]
    keys = {}
    for path in Path(loading["checkpoint.initial_load_path"]).glob("*.safetensors"):
        with safe_open(str(path), "pt") as file:
            keys |= {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}
    return different, keys


def rows_of_experts(name, param):
    return rows(24) if ".moe." in name and param.ndim == 3 else None


# -- configs -------------------------------------------------------------------------------------------------------------


def names_in_policy():
    titan.use_the_cpu()
    seen = []
    changes = {"training.steps": 1}
    config = titan.make_config(
        "ragged", titan.LLAMA, changes, policy=lambda name, param: seen.append((name, tuple(param.shape)))
    )
    with titan.trainer_of(config) as trainer:
        named = trainer.model_parts[0].named_parameters()
        return seen, [(name.replace("_checkpoint_wrapped_module.", ""), tuple(param.shape)) for name, param in named]


def errors_of_configs():
    titan.use_the_cpu()
    from torchtitan.config import ConfigManager
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    from torch_ragged.integrations.torchtitan import config_registry, ragged

    shardless = llama3_debugmodel()
    shardless.model_spec = dataclasses.replace(shardless.model_spec, parallelize_fn=lambda model, **_: model)
    spec = ragged(shardless).model_spec
    command = ["--module", "torch_ragged.integrations.torchtitan", "--config"]
    return (
        error_of(ragged, ragged(llama3_debugmodel())),
        error_of(ragged, object()),
        error_of(ragged, llama3_debugmodel(), reshard=True),
        error_of(spec.parallelize_fn, torch.nn.Linear(2, 2)),
        error_of(ConfigManager().parse_args, [*command, "llama4"]),
        sorted(name for name in dir(config_registry) if name.endswith("debugmodel")),
        error_of(ConfigManager().parse_args, [*command, "llama3_debugmodel"]),
    )


@unittest.skipUnless(RUNS_HERE, WHY)
class TorchtitanTest(unittest.TestCase):
    def test_losses_are_those_of_fsdp2_under_each_spmd_backend(self):
        for backend in ("spmd_types", "full_dtensor", "partial_dtensor"):
            changes = {"training.steps": 3, **titan.parallel(tensor_parallel_degree=2, spmd_backend=backend)}
            for theirs, ours in run_ranks(4, losses_of, titan.LLAMA, changes):
                self.assertEqual(ours, theirs, backend)
                self.assertEqual(len(ours), 3)

    def test_losses_of_experts_on_their_own_mesh_are_those_of_fsdp2(self):
        for name in (titan.QWEN, titan.DEEPSEEK):  # At two data-parallel ranks, each gradient is the sum of two, in any order.
            changes = {"training.steps": 3, **titan.parallel(expert_parallel_degree=2, tensor_parallel_degree=2)}
            for theirs, ours in run_ranks(4, losses_of, name, changes):
                self.assertEqual(ours, theirs, name)

    def test_tied_weights_stay_tied(self):
        for theirs, ours in run_ranks(2, losses_of, titan.TIED, {"training.steps": 4}):
            self.assertEqual(ours, theirs)

    def test_checkpoints_of_torchtitans_manager_resume_at_another_number_of_ranks(self):
        check_resume(self, 4, 2, MANAGERS["torchtitan's"])
        check_resume(self, 2, 4, MANAGERS["torchtitan's"])

    def test_checkpoints_of_our_manager_resume_at_another_number_of_ranks(self):
        check_resume(self, 4, 2, MANAGERS["ours"])
        check_resume(self, 2, 4, MANAGERS["ours"])

    def test_our_manager_finds_damaged_files_and_ignores_incomplete_checkpoints(self):
        with tempfile.TemporaryDirectory() as folder:
            run_ranks(2, run_until, 3, folder, MANAGERS["ours"])
            (Path(folder) / "checkpoint" / "step-00000005.incomplete").mkdir()
            (Path(folder) / "checkpoint" / "step-00000005.incomplete" / ".metadata").touch()
            damage(folder)
            for error in run_ranks(2, resume_error, folder, MANAGERS["ours"]):
                self.assertIn("damaged", error)

    def test_our_manager_loads_checkpoints_of_torchtitans(self):
        with tempfile.TemporaryDirectory() as folder:
            run_ranks(2, run_until, 3, folder, [])
            for skipped, losses in run_ranks(2, run_until, STEPS, folder, MANAGERS["ours"]):
                self.assertEqual((skipped, len(losses)), (3, 3))

    def test_optimizers_resume_at_another_number_of_ranks(self):
        for name in ("muon", "adamw8bit"):
            overrides = [*MANAGERS["ours"], f"torch_ragged.integrations.torchtitan.optimizers.{name}"]
            check_resume(self, 4, 2, overrides)

    def test_muon_trains_the_matrices_of_layers_and_adamw_the_rest(self):
        for kinds, placed in run_ranks(2, optimizers_of, ["torch_ragged.integrations.torchtitan.optimizers.muon"]):
            self.assertEqual({kinds[name] for name in kinds if "norm" in name}, {"AdamW"})
            self.assertEqual({kinds["tok_embeddings.weight"], kinds["lm_head.weight"]}, {"AdamW"})
            experts = [name for name in kinds if "inner_experts" in name]
            self.assertTrue(experts and all(kinds[name] == "Muon" for name in experts), kinds)
            self.assertTrue(placed and all(placed))

    def test_experts_are_exported_to_and_imported_from_hugging_face(self):
        for degree, policy in ((2, None), (1, None), (2, rows_of_experts)):
            with self.subTest(degree=degree, policy=policy), tempfile.TemporaryDirectory() as folder:
                changes = titan.parallel(expert_parallel_degree=degree)
                for different, keys in run_ranks(4, export_and_import, folder, titan.QWEN, changes, policy):
                    self.assertEqual(different, [])
                    experts = {key: shape for key, shape in keys.items() if ".experts." in key}
                    self.assertGreater(len(experts), 3)
                    self.assertEqual({len(shape) for shape in experts.values()}, {2})

    def test_the_page_of_the_documentation_runs(self):
        (printed,) = run_page("integrations/torchtitan.md")
        self.assertIn("step-00000004", printed)

    def test_a_policy_gets_the_names_of_the_model(self):
        for seen, names in run_ranks(2, names_in_policy):
            self.assertEqual(sorted(seen), sorted(names))

    def test_wrong_configs_are_refused(self):
        twice, no_spec, option, unsharded, unknown, configs, fine = run_ranks(1, errors_of_configs)[0]
        self.assertIn("is sharded by torch_ragged already: call ragged() once", twice)
        self.assertIn("expected a Trainer.Config of torchtitan", no_spec)
        self.assertIn("install() got reshard", option)
        self.assertIn("did not call fully_shard", unsharded)
        self.assertIn("Config function 'llama4' not found", unknown)
        self.assertIn("llama3_debugmodel", configs)
        self.assertIn("deepseek_v3_debugmodel", configs)
        self.assertEqual(fine, "")
