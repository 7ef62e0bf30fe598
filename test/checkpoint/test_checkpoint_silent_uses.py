"""Saves that would lose a checkpoint in silence: another folder on a rank is an error, a step that stays is warned of."""

import os
import tempfile
import unittest
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from checkpoint_model import Model, make_state, train
from common import error_of, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from torch_ragged import checkpoint
from torch_ragged.fsdp import fully_shard
from torch_ragged.optim import AdamW8bit, Muon, matrix_groups


def warned(*arguments, **keywords):
    """The warnings of a save."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpoint.save(*arguments, **keywords)
    return [str(each.message) for each in caught if "TrainState.step" in str(each.message)]


def check_other_folder(path):
    rank, state = dist.get_rank(), make_state(0)
    folder = f"{path}/{'other' if rank == 1 else 'run'}"
    group = dist.new_group(backend="gloo")
    for save in (checkpoint.save, lambda *args: checkpoint.async_save(*args, process_group=group).result()):
        text = error_of(save, folder, state)
        words = f"CheckpointError: saving to {folder}: rank 0 has the folder {path}/run, rank 1 has {path}/other. Ranks write"
        assert text.startswith(words), text
    dist.barrier()
    assert not os.listdir(path)  # Nothing is written.


def check_names_of_one_folder(path):
    """A link, and a relative path, are the same folder."""
    state = make_state(0)
    if dist.get_rank() == 0:
        Path(path, "run").mkdir()
        Path(path, "link").symlink_to(Path(path, "run"))
    dist.barrier()
    names = [f"{path}/run", f"{path}/link"]
    checkpoint.save(names[dist.get_rank()], state)
    checkpoint.save(names[0] if dist.get_rank() else os.path.relpath(names[0]), state)
    assert checkpoint.latest(names[0]) == Path(names[0], "step-00000000")


def check_step_that_stays(path):
    state = make_state(0)
    assert warned(path, state) == [] and warned(path, state) == []  # Nothing was trained between.
    train(state, 1)
    assert warned(path, state) == []
    train(state, 1)
    state.step = 1
    texts = warned(path, state)
    start = f"{Path(path, 'step-00000001')} is replaced by newer weights: TrainState.step is 1, as in the last save. "
    assert [text.startswith(start) for text in texts] == [True] * (dist.get_rank() == 0), texts
    checkpoint.load(path, state)
    assert warned(path, state) == []
    assert warned(f"{path}/other", state) == []


def ragged(model):
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def theirs(model):
    return torch_fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def check_any_optimizer(path):
    """Also of optimizers that write to local tensors, and of other kinds of models."""
    kinds = {
        "SGD": (ragged, lambda model: torch.optim.SGD(model.parameters(), lr=0.1)),
        "Muon": (ragged, lambda model: Muon(matrix_groups(model))),
        "AdamW8bit": (ragged, lambda model: AdamW8bit(model.parameters())),
        "FSDP2": (theirs, lambda model: torch.optim.AdamW(model.parameters(), foreach=True)),
        "plain": (lambda model: model, lambda model: torch.optim.AdamW(model.parameters(), fused=True)),
    }
    for name, (shard, make) in kinds.items():
        torch.manual_seed(0)
        model = shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
        state = checkpoint.TrainState(model, make(model))
        texts = []
        for _ in range(2):
            model(torch.ones(2, 8)).sum().backward()
            state.optimizer.step()
            texts += warned(f"{path}/{name}", state)
        assert len(texts) == (dist.get_rank() == 0), (name, texts)


class SilentUsesTest(unittest.TestCase):
    def run_check(self, check):
        with tempfile.TemporaryDirectory() as path:
            run_ranks(2, check, path)

    def test_another_folder_on_one_rank_is_an_error_on_all_ranks(self):
        self.run_check(check_other_folder)

    def test_a_folder_may_have_several_names(self):
        self.run_check(check_names_of_one_folder)

    def test_a_step_that_does_not_advance_is_warned_of(self):
        self.run_check(check_step_that_stays)

    def test_a_step_that_does_not_advance_is_seen_with_any_optimizer(self):
        self.run_check(check_any_optimizer)

    def test_a_step_that_does_not_advance_is_seen_in_one_process(self):
        with tempfile.TemporaryDirectory() as path:
            state = make_state(0, model=Model())
            texts = []
            for _ in range(2):
                train(state, 1)
                state.step = 0
                texts += warned(path, state)
        self.assertEqual(len(texts), 1)
