"""What tests of forged checkpoints share: a small run, and changes that a forger can make."""

import json
import tempfile
import unittest
import zlib
from pathlib import Path
from unittest import mock

import torch
from common import error_of
from torch import nn

from torch_ragged import checkpoint
from torch_ragged.checkpoint import _state
from torch_ragged.checkpoint._files import CHECKSUM_BLOCK
from torch_ragged.checkpoint._manifest import CHUNKS, _checksum

__all__ = ["VALUES", "Untrusted", "forge", "make_state", "nodes", "saved_unchecked", "values"]

VALUES = (
    *(None, True, -1, 0, 1, 2**70, 1e300, float("nan"), "", "x", "/dev/zero", "..", "a\0b", "\ud800", "float32", "load"),
    *([], [1], ["x"], [[]], {}, {"x": 1}, [2] * 70, 10**6),
    *(
        "RaggedShard(dims=(0,), local_units=(1,))",
        "(" * 5000,
        "RaggedShard(dims=(0,), local_units=(0,) * 1000000000000)",
        "Shard(dim='x')",
        "Shard(dim=99)",
        "Partial(reduce_op=1)",
    ),
)


def nodes(value, path=()):
    """The way to every value in a document but itself."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*path, key)
        yield from nodes(inner, (*path, key))


def make_state(step=1, **fields):
    torch.manual_seed(step)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return checkpoint.TrainState(model, optimizer, scheduler, step, **fields)


def values(state):
    return [p.detach().clone() for p in state.model.parameters()]


def forge(folder, name, content):
    """Replace a file of a checkpoint, and what the manifest has of it, as a forger can.

    A checkpoint with another ``.metadata`` is one of an earlier version: only of those, ``load`` reads it.
    """
    (folder / name).write_bytes(content)
    body = json.loads((folder / "manifest.json").read_text())["manifest"]
    blocks = [content[start : start + CHECKSUM_BLOCK] for start in range(0, len(content), CHECKSUM_BLOCK)]
    if name == ".metadata":
        body["files"].pop(CHUNKS, None)
    body["files"][name] |= {"nbytes": len(content), "crc32": [f"{zlib.crc32(block):08x}" for block in blocks]}
    (folder / "manifest.json").write_text(json.dumps({"crc32": _checksum(body), "manifest": body}))


def saved_unchecked(path, state, **options):
    """Save what load refuses, as earlier versions did."""
    with mock.patch.object(_state, "check_object"):
        return checkpoint.save(path, state, **options)


class Untrusted(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path, self.ran = Path(folder.name) / "run", Path(folder.name) / "ran"

    def check_refused(self, folder, *words, make=make_state):
        """The load raises, changes no parameter, and ran nothing."""
        state = make(7)
        before = values(state)
        text = error_of(checkpoint.load, folder, state)
        self.assertTrue(text.startswith("CheckpointError"), text)
        for word in words:
            self.assertIn(word, text)
        self.assertTrue(all(map(torch.equal, values(state), before)))
        self.assertFalse(self.ran.exists())
