"""Checkpoints of earlier code load: 2 ranks saved test/data/checkpoint-dd032b9 with the code of that commit, on torch 2.13."""

import io
import pickle
import shutil
import tempfile
import unittest
from pathlib import Path

import torch
from common import run_ranks
from torch import nn

from torch_ragged import RaggedShard, StridedRaggedShard, checkpoint
from torch_ragged.fsdp import fully_shard
from torch_ragged.optim import AdamW8bit

SAVED = Path(__file__).parents[1] / "data" / "checkpoint-dd032b9"
OPTIMIZERS = {"adamw": torch.optim.AdamW, "adamw8bit": AdamW8bit}


def plain_model():
    """The saved model before its only step."""
    model = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 3))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.arange(param.numel()).view_as(param) / 1024)
    return model


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.arange(64)).sum().backward()
    optimizer.step()


def load(path, kind):
    """Load at another world size, under other placements, and train on."""
    model = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 3))
    fully_shard(model)
    optimizer = OPTIMIZERS[kind](model.parameters(), lr=1.0)
    state = checkpoint.TrainState(model, optimizer)
    manifest = checkpoint.load(path, state)
    assert (manifest.world_size, manifest.step, state.step) == (2, 7, 7)
    assert optimizer.param_groups[0]["lr"] == 0.125
    plain = plain_model()
    reference = OPTIMIZERS[kind](plain.parameters(), lr=0.125)
    step(plain, reference)
    assert_same(model, plain)
    step(plain, reference)
    step(model, optimizer)
    assert_same(model, plain)  # The moments were loaded too.


def assert_same(model, plain):
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.full_tensor(), expected, msg=name)


class OldCheckpointTest(unittest.TestCase):
    def test_names_of_modules_that_have_moved_are_known_to_pickle_and_to_torch_load(self):
        for name, now in {"placement_types": RaggedShard, "strided_placement_types": StridedRaggedShard}.items():
            self.assertIs(pickle.loads(f"ctorch_ragged.{name}\n{now.__name__}\n.".encode()), now)
        file, placement = io.BytesIO(), RaggedShard((0,), (2, 1))
        torch.save(placement, file, _use_new_zipfile_serialization=False)
        earlier = file.getvalue().replace(b"torch_ragged.tensor.", b"torch_ragged.")
        self.assertNotEqual(earlier, file.getvalue())
        self.assertEqual(torch.load(io.BytesIO(earlier), weights_only=True), placement)

    def test_checkpoint_of_an_earlier_version_loads(self):
        for kind in OPTIMIZERS:
            with self.subTest(kind), tempfile.TemporaryDirectory() as folder:
                shutil.copytree(
                    SAVED / kind, Path(folder) / kind
                )  # Loading writes nothing; a mistake must not change git's files.
                run_ranks(3, load, str(Path(folder) / kind), kind)
