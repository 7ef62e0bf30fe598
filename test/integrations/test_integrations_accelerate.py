"""accelerate trains with ours as with torch's FSDP2, saves and resumes; skipped where it is not installed."""

import contextlib
import importlib.util
import tempfile
import unittest
from unittest import mock

import torch
import torch.distributed as dist
from common import error_of, run_ranks
from doc_pages import run_page
from small_models import curve, enter_ranks, make_data, make_model, make_trainer, on_the_cpu
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from torch_ragged import RaggedShard, checkpoint
from torch_ragged.fsdp import ZERO2, FSDPModule, fully_shard, rows
from torch_ragged.integrations import installed
from torch_ragged.integrations.accelerate import use

HAS_BOTH = all(importlib.util.find_spec(name) for name in ("accelerate", "transformers"))


def row_policy(fqn, param):
    return rows(4) if param.ndim == 2 else None


def make_accelerator(**fields):
    """accelerate's FSDP2 on the CPU: it takes FSDP for accelerators only, so its state is told."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    enter_ranks()
    plugin = FullyShardedDataParallelPlugin(**{"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap", **fields})
    accelerator = Accelerator(fsdp_plugin=plugin, cpu=True)
    on_the_cpu(accelerator, plugin)
    return accelerator


def steps(accelerator, model, optimizer, numbers):
    """(loss, norm of gradients) of steps with these numbers; each rank has its own samples."""
    found = []
    for number in numbers:
        sample = make_data(16)[2 * number + dist.get_rank() % 2]["input_ids"][None]
        loss = model(input_ids=sample, labels=sample).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), norm.item()))
    return found


def prepare(context, **fields):
    accelerator = make_accelerator(**fields)
    model = make_model("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with context:
        model, optimizer = accelerator.prepare(model, optimizer)
    return accelerator, model, optimizer


def train_with_both():
    """Three steps with torch's and with ours, brought in by each of two contexts."""
    runs = []
    for context in (contextlib.nullcontext(), installed(orig_param_policy=row_policy), use(orig_param_policy=row_policy)):
        prepared = prepare(context)
        runs.append(steps(*prepared, range(3)))
        if len(runs) > 1:
            model = prepared[1]
            assert isinstance(model.lm_head.weight.placements[0], RaggedShard)
            assert isinstance(model.model.layers[0], FSDPModule)
    return runs


def train_with_options():
    """A placement for every module, and a data loader that is prepared alone."""
    with use(placements=ZERO2) as installation:
        accelerator, model, optimizer = prepare(contextlib.nullcontext())
        loader = accelerator.prepare(torch.utils.data.DataLoader(make_data(8), batch_size=2))
    # Two layers and the model; accelerate 1.15 adds the embedding, and the norm with the head.
    assert len(list(loader)) == 2 and installation.calls in (3, 5)
    steps(accelerator, model, optimizer, range(1))
    from accelerate import Accelerator

    assert not hasattr(Accelerator.prepare, "__wrapped__")
    return fully_shard.state(model) is not None


def save_and_go_on(folder, state_dict_type):
    accelerator, model, optimizer = prepare(use(orig_param_policy=row_policy), state_dict_type=state_dict_type)
    steps(accelerator, model, optimizer, range(3))
    accelerator.save_state(folder)
    return steps(accelerator, model, optimizer, range(3, 6))


def resume(folder, state_dict_type):
    """At another number of ranks, with another granularity."""
    accelerator, model, optimizer = prepare(use(), state_dict_type=state_dict_type)
    accelerator.load_state(folder)
    return steps(accelerator, model, optimizer, range(3, 6))


def prepare_adapters():
    """Only the projections of queries train."""
    accelerator, model = make_accelerator(), make_model("llama")
    for name, param in model.named_parameters():
        param.requires_grad_("q_proj" in name)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    with use(orig_param_policy=row_policy):
        model, optimizer = accelerator.prepare(model, optimizer)
    return accelerator, model, optimizer, checkpoint.TrainState(model, optimizer, base="llama")


def save_adapters(folder):
    """A load right after a save in the background: the next step is the one from before, to the bit."""
    *prepared, state = prepare_adapters()
    steps(*prepared, range(2))
    future = checkpoint.async_save(folder, state, process_group=dist.new_group(backend="gloo"))
    want = steps(*prepared, range(2, 4))
    checkpoint.load(folder, state)
    assert steps(*prepared, range(2, 4)) == want
    return want, checkpoint.read_manifest(future.result())


def resume_adapters(folder):
    *prepared, state = prepare_adapters()
    checkpoint.load(folder, state)
    return steps(*prepared, range(2, 4))


def wrong_uses():
    from accelerate import Accelerator

    def preparing(model, accelerator, optimized=None):
        optimizer = torch.optim.AdamW((model if optimized is None else optimized).parameters())
        with use():
            return error_of(accelerator.prepare, model, optimizer)

    mesh = init_device_mesh("cpu", (2,))
    ours, theirs, plain = (make_model("llama") for _ in range(3))
    fully_shard(ours.model.layers[1], mesh=mesh)
    torch_fully_shard(theirs, mesh=mesh)
    found = [preparing(ours, make_accelerator()), preparing(theirs, make_accelerator())]
    found.append(preparing(plain, make_accelerator(fsdp_version=1)))
    found.append(preparing(plain, make_accelerator(sharding_strategy="SHARD_GRAD_OP", reshard_after_forward=False)))
    accelerator = make_accelerator()
    accelerator.state.fsdp_plugin.use_orig_params = True
    found.append(preparing(plain, accelerator))
    enter_ranks()
    found.append(preparing(plain, Accelerator(cpu=True)))
    with mock.patch("accelerate.accelerator.fsdp2_prepare_model", lambda accelerator, model: model):
        found.append(preparing(plain, make_accelerator()))
    assert not any(hasattr(param, "placements") for param in plain.parameters())
    return found


# -- Trainer ---------------------------------------------------------------------------------------------------------------


def train(folder, name="llama", resume=None, context=None, **options):
    """Losses and norms of a model that Trainer trains; accelerate shards it."""
    enter_ranks()
    fsdp = options.pop("fsdp", {})
    with use(orig_param_policy=row_policy) if context is None else context:
        trainer = make_trainer(make_model(name), folder, fsdp=fsdp, **options)
        trainer.train(resume_from_checkpoint=resume)
    if context is None:
        assert isinstance(next(trainer.model.parameters()).placements[0], RaggedShard)
    return curve(trainer)


def train_and_save(folder, name, resume=None, kind="SHARDED_STATE_DICT", batch=12):
    options = {"max_steps": 7, "save_strategy": "steps", "save_steps": 3, "fsdp": {"state_dict_type": kind}}
    return train(folder, name, resume, batch=batch, **options)


def check_saved_model(folder):
    """``save_model`` writes a folder that one process loads, with the experts' names of the checkpoint."""
    from transformers import AutoModelForCausalLM

    enter_ranks()
    with use(orig_param_policy=row_policy):
        trainer = make_trainer(make_model("qwen3_moe"), folder, fsdp={}, max_steps=2)
        trainer.train()
    trainer.save_model(folder)
    dist.barrier()
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value.full_tensor(), loaded[name]), name


@unittest.skipUnless(HAS_BOTH, "accelerate and transformers are not installed")
class AccelerateTest(unittest.TestCase):
    def test_losses_and_norms_are_those_of_fsdp2(self):
        for theirs, one, other in run_ranks(2, train_with_both):
            self.assertEqual(one, other)
            for (loss, norm), (their_loss, their_norm) in zip(one, theirs, strict=True):
                self.assertEqual(loss, their_loss)
                # Shards of elements, not of rows: a norm adds up the same squares in another order.
                self.assertAlmostEqual(norm, their_norm, delta=1e-6 * their_norm)

    def test_placements_hold_for_each_module_and_nothing_stays_replaced(self):
        self.assertEqual(run_ranks(2, train_with_options), [True, True])

    def test_a_saved_state_is_loaded_at_other_numbers_of_ranks(self):
        for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
            with tempfile.TemporaryDirectory() as folder:
                want = run_ranks(2, save_and_go_on, folder, kind)
                self.assertEqual(run_ranks(2, resume, folder, kind)[0], want[0])
                found = run_ranks(4, resume, folder, kind)  # Ranks 2 and 3 have the samples of ranks 0 and 1.
                torch.testing.assert_close(torch.tensor(found[:2]), torch.tensor(want), rtol=1e-5, atol=1e-5)

    def test_what_trains_is_saved_and_loaded_at_once_and_at_other_numbers_of_ranks(self):
        with tempfile.TemporaryDirectory() as folder:
            found = run_ranks(2, save_adapters, folder)
            manifest = found[0][1]
            saved = [name for name in manifest.tensors if name.startswith("model.")]
            self.assertTrue(len(saved) == 2 and all("q_proj" in name for name in saved), saved)
            self.assertTrue(manifest.frozen and not any("q_proj" in name for name in manifest.frozen))
            want = [curve for curve, _ in found]
            self.assertEqual(run_ranks(2, resume_adapters, folder), want)
            other = run_ranks(4, resume_adapters, folder)
            torch.testing.assert_close(torch.tensor(other[:2]), torch.tensor(want), rtol=1e-5, atol=1e-5)

    def test_wrong_use_says_what_to_do(self):
        for ours, theirs, version, strategy, orig, plain, unknown in run_ranks(2, wrong_uses):
            self.assertIn("torch_ragged.fsdp.fully_shard was called on its module model.layers.1. prepare()", ours)
            self.assertIn("torch's fully_shard was called on it. prepare() would give the optimizer wrong parameters", theirs)
            self.assertIn("fsdp_version is 1, which does not call fully_shard: pass fsdp_version=2", version)
            self.assertIn("FullyShardedDataParallelPlugin.sharding_strategy is 'SHARD_GRAD_OP', a field of FSDP1", strategy)
            self.assertIn("has no effect here: set reshard_after_forward: True for FULL_SHARD", strategy)
            self.assertIn("FullyShardedDataParallelPlugin.use_orig_params is True, a field of FSDP1", orig)
            self.assertIn("this Accelerator has no FSDP plugin", plain)
            self.assertRegex(
                unknown, "RuntimeError: accelerate 1.* has prepared a LlamaForCausalLM without a call of torch.dist"
            )

    def test_options_of_the_plugin_are_refused_here(self):
        for name, where in {
            "mp_policy": "the plugin's mixed_precision_policy",
            "mesh": "Accelerator.parallelism_config=",
            "granularity": "legal are orig_param_policy, placements, shard_placement_fn",
        }.items():
            with self.assertRaisesRegex(TypeError, f"use.. got {name}, which is no option of it: .*{where}"), use(**{name: 1}):
                pass

    def test_an_unsupported_version_is_named(self):
        with mock.patch("importlib.metadata.version", return_value="1.9.2"):
            text = "accelerate 1.9.2 is installed: install accelerate >= 1.11, whose FSDP2 this module knows"
            with self.assertRaisesRegex(ImportError, text), use():
                pass

    def test_versions_that_trainers_pin_are_taken(self):
        for version in ("1.11.0", "1.13.0"):  # LLaMA-Factory 0.9.5 and axolotl 0.19.0.
            with mock.patch("importlib.metadata.version", return_value=version), use():
                pass


@unittest.skipUnless(HAS_BOTH, "accelerate and transformers are not installed")
class TrainerTest(unittest.TestCase):
    def test_activation_checkpointing_changes_nothing(self):
        with tempfile.TemporaryDirectory() as folder:
            self.assertEqual(run_ranks(2, train_checkpointed, folder), run_ranks(2, train, folder))

    def test_a_run_resumes_at_the_same_and_at_other_numbers_of_ranks(self):
        for name, kind in (("gpt_oss", "SHARDED_STATE_DICT"), ("llama", "FULL_STATE_DICT")):
            with tempfile.TemporaryDirectory() as folder:
                want = run_ranks(2, train_and_save, folder, name, None, kind)[0]
                self.assertEqual(len(want), 14)
                again = run_ranks(2, train_and_save, folder, name, f"{folder}/checkpoint-3", kind)[0]
                self.assertEqual(again, want)
                other = run_ranks(3, train_and_save, folder, name, f"{folder}/checkpoint-3", kind)[0]
                self.assertEqual(other[:6], want[:6])
                torch.testing.assert_close(torch.tensor(other), torch.tensor(want), rtol=2e-5, atol=2e-5)

    def test_the_saved_model_is_loaded_by_one_process(self):
        with tempfile.TemporaryDirectory() as folder:
            run_ranks(2, check_saved_model, folder)


def train_checkpointed(folder):
    return train(folder, fsdp={"activation_checkpointing": True})


class PageTest(unittest.TestCase):
    @unittest.skipUnless(HAS_BOTH, "accelerate and transformers are not installed")
    def test_the_page_runs(self):
        (printed,) = run_page("integrations/accelerate.md")
        self.assertIn("step 10", printed)
