"""Lightning and Fabric train with ours as with torch's FSDP2, save and resume; skipped where they are not installed."""

import importlib.util
import os
import tempfile
import unittest
from unittest import mock

import lightning_cases
import torch
import torch.distributed as dist
from common import run_ranks
from doc_pages import run_page
from lightning_cases import fabric_run, trainer_run
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from torch_ragged import checkpoint

HAS_LIGHTNING = importlib.util.find_spec("lightning") is not None


def values(module):
    """All parameters, whole, by names that do not depend on the wrapper."""
    state = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True))
    return {name.removeprefix("model."): value for name, value in state.items()}


def fit(folder, form, steps, resume=None):
    """The losses of a Trainer that saves at its end; ``form`` is that of the checkpoint."""
    losses, trainer, module = trainer_run("ragged", steps=steps, folder=folder, form=form, resume=resume)
    trainer.save_checkpoint(f"{folder}/at-{steps}.ckpt")
    dist.barrier()
    return losses


def load_in_one_process(path):
    """The keys of a full checkpoint, and a weight."""
    saved = torch.load(path, map_location="cpu", weights_only=False)
    return sorted(saved), saved["state_dict"]["model.head.weight"]


def fabric(folder, form, resume=None):
    losses, fabric, model, optimizer = fabric_run("ragged", steps=3, resume=resume, first=0 if resume is None else 3)
    if resume is None:
        fabric.save(f"{folder}/{form}", {"model": model, "optimizer": optimizer})
        dist.barrier()
        losses += fabric_run("ragged", steps=3, first=3, made=(fabric, model, optimizer))[0]
    return losses


class Frozen(lightning_cases.Model):
    """Only the head trains."""

    def __init__(self):
        super().__init__()
        self.blocks.requires_grad_(False)


def save_head(folder, how):
    """What trains, in the background; a load right after it; then a step on 2 ranks."""
    with mock.patch.object(lightning_cases, "Model", Frozen):
        if how == "trainer":
            _, trainer, model = trainer_run("ragged", steps=2)
            optimizer = trainer.optimizers[0]
        else:
            _, _, model, optimizer = fabric_run("ragged", steps=2)
    state = checkpoint.TrainState(model, optimizer, base="blocks")
    want = values(model)
    future = checkpoint.async_save(f"{folder}/{how}", state, process_group=dist.new_group(backend="gloo"))
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.zero_()
    checkpoint.load(f"{folder}/{how}", state)
    found, manifest = values(model), checkpoint.read_manifest(future.result())
    assert found.keys() == want.keys() and all(torch.equal(found[name], want[name]) for name in want)
    assert len(manifest.frozen) == 8 and all("blocks" in name for name in manifest.frozen), manifest.frozen
    return want


def load_head(folder, how, want):
    """In Lightning's model, before it trains, at another number of ranks."""
    with mock.patch.object(lightning_cases, "Model", Frozen):
        model = trainer_run("ragged", steps=0)[2] if how == "trainer" else fabric_run("ragged", steps=0)[2]
    checkpoint.load(f"{folder}/{how}", checkpoint.TrainState(model))
    found = values(model)
    assert all(torch.equal(found[name], want[name]) for name in want)


@unittest.skipUnless(HAS_LIGHTNING, "lightning is not installed")
class LightningTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def test_trainer_resumes_at_other_numbers_of_ranks_from_both_forms(self):
        want = run_ranks(2, fit, self.folder, "distributed", 6)[0]
        for form in ("distributed", "full"):
            folder = f"{self.folder}/{form}"
            first = run_ranks(2, fit, folder, form, 3)[0]
            self.assertEqual(first, want[:3])
            path = f"{folder}/at-3.ckpt"
            self.assertEqual(os.path.isdir(path), form == "distributed")
            again = run_ranks(2, fit, f"{folder}/again", form, 6, path)[0]
            self.assertEqual(again, want[3:])
            other = run_ranks(4, fit, f"{folder}/other", form, 6, path)[0]
            torch.testing.assert_close(torch.tensor(other), torch.tensor(want[3:]), rtol=1e-5, atol=1e-6)

    def test_a_full_checkpoint_is_one_file_with_whole_weights(self):
        run_ranks(2, fit, self.folder, "full", 3)
        keys, weight = load_in_one_process(f"{self.folder}/at-3.ckpt")
        self.assertIn("optimizer_states", keys)
        self.assertEqual((type(weight), tuple(weight.shape)), (torch.Tensor, (8, 16)))

    def test_fabric_saves_and_loads_at_other_numbers_of_ranks(self):
        want = run_ranks(2, fabric, self.folder, "distributed")[0]
        path = f"{self.folder}/distributed"
        self.assertEqual(run_ranks(2, fabric, self.folder, "distributed", path)[0], want[3:])
        other = run_ranks(4, fabric, self.folder, "distributed", path)[0]
        torch.testing.assert_close(torch.tensor(other), torch.tensor(want[3:]), rtol=1e-5, atol=1e-6)

    def test_what_trains_is_saved_and_loaded_at_once_and_at_other_numbers_of_ranks(self):
        for how in ("trainer", "fabric"):
            want = run_ranks(2, save_head, self.folder, how)[0]
            run_ranks(3, load_head, self.folder, how, want)

    def test_the_page_runs(self):
        (printed,) = run_page("integrations/lightning.md")
        self.assertIn("step 10", printed)
