"""Manifests whose checksum is right and whose content is not: ``latest`` passes them over, ``load`` says what is wrong."""

import contextlib
import copy
import io
import json
import os
import random
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from checkpoint_forger import VALUES, nodes
from common import error_of, run_ranks
from torch import nn

from torch_ragged import checkpoint
from torch_ragged.checkpoint import _cli, _reader
from torch_ragged.checkpoint._manifest import CHUNKS, _checksum
from torch_ragged.fsdp import fully_shard

DATA = "__0_0.distcp"


def make_state(step):
    """A model of DTensors if there is a process group; all fields are used."""
    torch.manual_seed(step)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    if dist.is_initialized():
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    extra = {"best": 1, "average": torch.ones(3)}
    return checkpoint.TrainState(model, optimizer, scheduler, step, 5, {"a": [1]}, extra=extra, per_rank={"loader": 3})


def forge(file, body):
    """Write a manifest as a forger does."""
    file.write_text(json.dumps({"crc32": _checksum(body), "manifest": body}))


def change(body, path, value):
    *parents, last = path
    for key in parents:
        body = body[key]
    if value is KeyError:
        del body[last]
    else:
        body[last] = value


FORGED = (  # where, what, words of the error
    (("files", DATA, "nbytes"), "x", "nbytes is 'x', expected int"),
    (("files", DATA, "nbytes"), -1, "nbytes is -1"),
    (("files", DATA, "nbytes"), 2**64, "expected an int >= 0"),
    (("files", DATA, "nbytes"), True, "nbytes is True, expected int"),
    (("files", DATA, "block"), 0, "block is 0, expected an int >= 1"),
    (("files", DATA, "block"), None, "block is None"),
    (("files", DATA, "crc32"), [], "has 0 checksums, expected 1"),  # Nothing would be verified.
    (("files", DATA, "crc32"), ["00000000"] * 1_000_000, "has 1000000 checksums, expected 1"),
    (("files", DATA, "crc32"), [None], "crc32 is None"),
    (("files", DATA, "crc32"), ["xyz"], "invalid literal"),
    (("files", DATA, "crc32"), {"0": "00000000"}, "expected list"),
    (("files", "../step-00000001/manifest.json"), {"nbytes": 0, "block": 1, "crc32": []}, "no name of a file"),
    (("files", "/dev/null"), {"nbytes": 0, "block": 1, "crc32": []}, "no name of a file"),
    (("files", "nul\0"), {"nbytes": 0, "block": 1, "crc32": []}, "no name of a file"),
    (("files", ".metadata"), KeyError, "files has no .metadata"),
    (("files",), [], "files is [], expected dict"),
    (("meshes", 0, "shape"), [2] * 10_000, "has 10000 dimensions"),
    (("meshes", 0, "ranks"), [0, 1], "has 2 ranks"),
    (("meshes", 0, "dim_names"), [1], "dim_names is 1"),
    (("tensors", "model.0.weight", "mesh"), 10**9, "mesh is 1000000000, but there are 1"),
    (("tensors", "model.0.weight", "mesh"), -1, "mesh is -1"),
    (("tensors", "model.0.weight", "shape"), 3, "shape is 3, expected list"),
    (("tensors", "model.0.weight", "shape"), [1.5], "shape is 1.5, expected int"),
    (("tensors", "model.0.weight", "tied_to"), 3, "tied_to is 3, expected str"),
    (("tensors", "model.0.weight", "dtype"), 3, "dtype is 3, expected str"),
    (("tensors", "model.0.weight", "placements"), ["Replicate()"] * 2, "has 2 placements"),
    (("tensors", "model.0.weight"), 3, "is 3, expected dict"),
    (("step",), "12", "step is '12'"),
    (("step",), float("nan"), "step is nan"),
    (("consumed_tokens",), -1, "consumed_tokens is -1"),
    (("world_size",), 0, "world_size is 0"),
    (("format",), "1", "format is '1'"),
    (("rng",), {"torch": 1}, "rng is 1"),
    (("objects",), "scheduler", "objects is 'scheduler'"),
    (("torch_version",), None, "torch_version is None"),
    (("unknown",), 1, "unknown fields ['unknown']"),
    (("meshes",), KeyError, "meshes"),
)
TEXTS = (  # whole files
    ("[" * 200_000 + "]" * 200_000, "RecursionError"),
    ('{"manifest": ' + '{"a":' * 100_000 + "1" + "}" * 100_000 + "}", "RecursionError"),
    ("[]", "damaged"),
    ("3", "damaged"),
    ("", "damaged"),
    ('{"manifest": "format", "crc32": ""}', "damaged"),
    ('{"manifest": {"format": ' + "9" * 5000 + "}}", "damaged"),
    ("\ufeff{}", "damaged"),
)


def check_refused(path, newest, good, words):
    assert checkpoint.latest(path) == good
    before = make_state(7)
    text = error_of(checkpoint.load, newest, before)
    assert text.startswith("CheckpointError") and f"{newest / 'manifest.json'} is damaged: " in text and words in text, text


def check_forged(path):
    good = checkpoint.save(path, make_state(1))
    newest = checkpoint.save(path, make_state(2))
    file = newest / "manifest.json"
    body = json.loads(file.read_text())["manifest"]
    for where, what, words in FORGED:
        forged = copy.deepcopy(body)
        change(forged, where, what)
        forge(file, forged)
        check_refused(path, newest, good, words)
    for text, words in TEXTS:
        file.write_text(text)
        check_refused(path, newest, good, words)
    forge(file, body)
    assert checkpoint.latest(path) == newest


def check_random_changes(path, count):
    """Whatever is changed: a checkpoint is passed over or not, refused or loaded, and nothing else is raised."""
    good = checkpoint.save(path, make_state(1))
    newest = checkpoint.save(path, make_state(2))
    state, rng = make_state(3), random.Random(0)
    file = newest / "manifest.json"
    body = json.loads(file.read_text())["manifest"]
    places, loaded, passed_over = list(nodes(body)), 0, 0
    for _ in range(count):
        forged, place = copy.deepcopy(body), rng.choice(places)
        what = rng.choice((KeyError, *VALUES)) if isinstance(place[-1], str) else rng.choice(VALUES)
        change(forged, place, copy.deepcopy(what))
        forge(file, forged)
        found = checkpoint.latest(path)
        assert found in (good, newest), (place, what, found)
        passed_over += found == good
        text = error_of(checkpoint.load, newest, state)
        assert not text or text.startswith("CheckpointError"), (place, what, text)
        assert text or found == newest, (place, what)
        loaded += not text
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            for command in (["inspect", str(newest), "--draw"], ["verify", str(newest)], ["diff", str(good), str(newest)]):
                assert _cli.main(command) in (0, 1)
    assert loaded and passed_over > count // 3, (loaded, passed_over)


def check_pipes(path):
    """A pipe in place of a file is refused; to open it would wait for a writer."""
    good = checkpoint.save(path, make_state(1))
    for name in ("manifest.json", ".metadata", CHUNKS, DATA):
        newest = checkpoint.save(path, make_state(2))
        if name != "manifest.json":
            body = json.loads((newest / "manifest.json").read_text())["manifest"]
            body["files"][name] |= {"nbytes": 0, "crc32": []}  # The size of a pipe.
            forge(newest / "manifest.json", body)
        (newest / name).unlink()
        os.mkfifo(newest / name)
        assert checkpoint.latest(path) == good
        text = error_of(checkpoint.load, newest, make_state(3))
        assert text.startswith("CheckpointError") and f"{newest / name} is no regular file" in text, text


class ForgedManifestTest(unittest.TestCase):
    def test_wrong_types_counts_and_sizes_are_passed_over_and_named(self):
        with tempfile.TemporaryDirectory() as path:
            run_ranks(1, check_forged, Path(path))

    def test_no_change_of_a_value_is_an_unexpected_error(self):
        with tempfile.TemporaryDirectory() as path:
            run_ranks(1, check_random_changes, Path(path), 100)

    @pytest.mark.slow
    def test_none_of_many_changes_of_a_value_is_an_unexpected_error(self):
        with tempfile.TemporaryDirectory() as path:
            run_ranks(1, check_random_changes, Path(path), 1000)

    @unittest.skipUnless(hasattr(os, "mkfifo"), "needs named pipes")
    def test_pipes_in_place_of_files_are_refused(self):
        with tempfile.TemporaryDirectory() as path:
            run_ranks(1, check_pipes, Path(path), timeout=60)


class ForgedFilesTest(unittest.TestCase):
    """Files that do not fit a manifest that is all right by itself."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = checkpoint.save(folder.name, make_state(1))
        self.body = json.loads((self.folder / "manifest.json").read_text())["manifest"]

    def test_data_in_a_file_that_the_manifest_leaves_out_is_refused(self):
        """Nothing would verify it."""
        del self.body["files"][DATA]
        forge(self.folder / "manifest.json", self.body)
        text = error_of(checkpoint.load, self.folder, make_state(2))
        self.assertRegex(text, rf"CheckpointError: .*chunks\.json is damaged: it names the file '{DATA}', which")

    def test_many_damaged_blocks_in_a_row_are_told_once(self):
        record = self.body["files"][DATA]
        record |= {"block": 1, "crc32": ["ffffffff"] * record["nbytes"]}
        forge(self.folder / "manifest.json", self.body)
        with mock.patch.object(_reader, "_stored_in", wraps=_reader._stored_in) as stored_in:
            text = error_of(checkpoint.load, self.folder, make_state(2))
        self.assertIn(f"bytes 0 to {record['nbytes']} have a wrong checksum", text)
        self.assertEqual(stored_in.call_count, 1)

    def test_objects_that_the_manifest_names_and_the_pickle_lacks_are_refused(self):
        self.body["objects"] = sorted([*self.body["objects"], "extra.more"])
        forge(self.folder / "manifest.json", self.body)
        state = make_state(2)
        state.extra["more"] = None
        self.assertIn("its pickled objects are not those", error_of(checkpoint.load, self.folder, state))

    def test_a_chunk_that_cannot_be_read_tells_the_file(self):
        with mock.patch.object(_reader._Chunks, "_find", side_effect=EOFError("no end")):
            text = error_of(checkpoint.load, self.folder, make_state(2))
        self.assertIn(f"CheckpointError: loading {self.folder}: {self.folder / DATA} cannot be read: EOFError: no end", text)
