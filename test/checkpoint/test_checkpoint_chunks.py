"""The file of columns: it says what DCP's ``.metadata`` says, and no number in it is believed."""

import copy
import json
import pickle
import random
import tempfile
import unittest
from pathlib import Path

import torch
import torch.distributed as dist
from checkpoint_forger import VALUES, Untrusted, forge, make_state, nodes
from common import error_of, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from torch_ragged import RaggedShard, checkpoint
from torch_ragged.checkpoint._chunks import parse_chunks
from torch_ragged.checkpoint._manifest import CHUNKS, read_manifest
from torch_ragged.checkpoint._reader import CheckpointReader

DATA = "__0_0.distcp"


class Mixed(nn.Module):
    """Tensors of all kinds: cut anywhere, by rows, replicated, plain, without dimensions, without elements."""

    def __init__(self):
        super().__init__()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        values = {
            "ragged": ((5, 3), torch.float32, RaggedShard((0, 1), (4, 11))),
            "on_one": ((4, 2), torch.bfloat16, RaggedShard((0,), (0, 1))),
            "rows": ((7, 2), torch.float64, Shard(0)),
            "columns": ((2, 3, 5), torch.float32, Shard(2)),
            "whole": ((3,), torch.int64, Replicate()),
            "empty": ((0, 4), torch.float32, Shard(0)),
        }
        for name, (shape, dtype, placement) in values.items():
            value = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape).to(dtype)
            self.register_buffer(name, distribute_tensor(value, mesh, [placement]))
        self.register_buffer("scalar", torch.tensor(3.5))
        self.register_buffer("plain", torch.arange(4, dtype=torch.uint8))


def columns_and_metadata(path):
    """The columns say the same as the pickle, and both readers load the same values."""
    state = checkpoint.TrainState(
        Mixed(), None, extra={"best": 1, "average": torch.ones(3)}, per_rank={"loader": dist.get_rank()}
    )
    folder = checkpoint.save(path, state)
    read = CheckpointReader(folder).read_metadata()
    wrote = pickle.loads((folder / ".metadata").read_bytes())
    for name, item in wrote.state_dict_metadata.items():
        if hasattr(item, "chunks"):
            found = read.state_dict_metadata[name]
            assert (found.size, found.chunks, found.properties.dtype) == (item.size, item.chunks, item.properties.dtype), name
    assert list(map(type, read.state_dict_metadata.values())) == list(map(type, wrote.state_dict_metadata.values()))
    assert read.storage_data == wrote.storage_data and list(read.state_dict_metadata) == list(wrote.state_dict_metadata)
    dist.barrier()
    if dist.get_rank() == 0:
        forge(folder, ".metadata", (folder / ".metadata").read_bytes())  # As an earlier version wrote it.
    dist.barrier()
    assert CHUNKS not in read_manifest(folder).files
    older = checkpoint.TrainState(Mixed(), None, extra={"best": 0, "average": torch.zeros(3)}, per_rank={"loader": 9})
    for buffer in older.model.buffers():
        buffer.zero_()
    checkpoint.load(folder, older)
    for name, buffer in older.model.named_buffers():
        expected = state.model.get_buffer(name)
        here, there = (getattr(each, "_local_tensor", each) for each in (buffer, expected))
        assert torch.equal(here, there), name
    assert older.extra["best"] == 1 and older.per_rank["loader"] == dist.get_rank()


class ColumnsTest(unittest.TestCase):
    def test_columns_say_what_the_metadata_of_dcp_says(self):
        with tempfile.TemporaryDirectory() as path:
            run_ranks(2, columns_and_metadata, Path(path))


class ForgedColumnsTest(Untrusted):
    def setUp(self):
        super().setUp()
        self.folder = checkpoint.save(self.path, make_state(extra={"x": 1}))
        self.document = json.loads((self.folder / CHUNKS).read_text())

    def check_forged(self, change, words):
        forged = copy.deepcopy(self.document)
        other = change(forged)
        forge(self.folder, CHUNKS, json.dumps(forged if other is None else other).encode())
        self.check_refused(self.folder, f"{self.folder / CHUNKS} is damaged: ", words)

    def test_numbers_are_checked_against_the_manifest_and_the_files(self):
        name = "model.0.weight"
        first = 0  # The number of its chunk.
        for each, (_, _, count) in self.document["tensors"].items():
            if each == name:
                break
            first += count

        def put(*path, value):
            def change(document):
                *parents, last = path
                for key in parents:
                    document = document[key]
                document[last] = value

            return change

        def shared(document):
            document["start"][first], document["length"][first] = document["start"][first + 1], document["length"][first + 1]

        def twice(document):
            document["tensors"][name][2] += 1
            for column in ("file", "start", "length"):
                document[column].insert(first, document[column][first])
            at = next(i for i in range(0, len(document["sizes"])) if document["sizes"][i : i + 2] == [4, 3])
            for column in ("offsets", "sizes"):
                document[column][at:at] = document[column][at : at + 2]

        def without(document):
            del document["tensors"][name]
            for column in ("file", "start", "length"):
                del document[column][first]
            at = next(i for i in range(0, len(document["sizes"])) if document["sizes"][i : i + 2] == [4, 3])
            for column in ("offsets", "sizes"):
                del document[column][at : at + 2]

        end = read_manifest(self.folder).files[DATA].nbytes
        for change, words in (
            (lambda document: [], "expected files, tensors, objects and columns"),
            (lambda document: {**document, "more": 1}, "expected files, tensors, objects and columns"),
            (put("files", value=["/dev/zero"]), "names the file '/dev/zero', which the manifest does not list"),
            (put("files", value=["../step-00000002/" + DATA]), "which the manifest does not list"),
            (put("files", value=[DATA, DATA]), "expected names, each once"),
            (put("files", value=[]), "has a chunk in file 0, but there are 0 files"),
            (put("file", first, value=7), "has a chunk in file 7, but there are 1 files"),
            (put("file", first, value=-1), "expected integers >= 0"),
            (put("start", first, value=2**40), f"has {name} in bytes {2**40} to"),
            (put("start", first, value=True), "expected integers >= 0"),
            (put("start", first, value=2**64), "expected integers >= 0"),
            (put("start", first, value=1.0), "expected integers >= 0"),
            (put("length", first, value=end), "which the manifest does not list"),
            (put("length", first, value=47), f"{name} has 48 bytes in its chunk at (0, 0), but 47 are stored"),
            (put("length", value=[]), "its column length has 0 numbers, expected"),
            (put("sizes", value=None), "its sizes is None, expected list"),
            (put("tensors", name, value=["float32", [4, 4], 1]), f"the chunks of {name} do not have the 16 elements"),
            (put("tensors", name, value=["float32", [2, 6], 1]), f"{name} of shape (2, 6) has a chunk (4, 3) at (0, 0)"),
            (put("tensors", name, value=["int32", [4, 3], 1]), f"{name} is (4, 3) torch.int32 in it, (4, 3) float32"),
            (put("tensors", name, value=["load", [4, 3], 1]), "is 'load', which torch"),
            (put("tensors", name, value=["float32", [1] * 65, 1]), "has 65 dimensions"),
            (put("tensors", name, value=["float32", [4, 3], 10**12]), "numbers, expected"),
            (put("tensors", name, value=["float32", "x", 1]), f"its shape of {name} is 'x', expected list"),
            (put("tensors", name, value=["float32", [4, 3]]), "expected dtype, shape and number of chunks"),
            (put("tensors", name, value=3), f"its entry of {name} is 3, expected list"),
            (put("objects", 0, value=name), f"it has {name} twice"),
            (put("objects", value=["a"] * 10**5), "expected names, each once"),
            (shared, "share bytes of"),
            (twice, f"{name} has two chunks at the same offset"),
            (without, f"has no tensor {name}, which the manifest lists"),
        ):
            with self.subTest(words):
                self.check_forged(change, words)

    def test_files_that_are_no_columns_are_refused(self):
        for content in (b"", b"x", b"[" * 200_000, b"\xff\xfe", pickle.dumps({}), b'{"files": ' + b"9" * 5000 + b"}"):
            with self.subTest(content[:10]):
                forge(self.folder, CHUNKS, content)
                self.check_refused(self.folder, f"{self.folder / CHUNKS} is damaged: it is no JSON")

    def test_no_change_of_a_value_is_an_unexpected_error(self):
        manifest, rng = read_manifest(self.folder), random.Random(0)
        places, refused = list(nodes(self.document)), 0
        for _ in range(3000):
            forged, place = copy.deepcopy(self.document), rng.choice(places)
            *parents, last = place
            inner = forged
            for key in parents:
                inner = inner[key]
            inner[last] = copy.deepcopy(rng.choice(VALUES))
            error = error_of(parse_chunks, json.dumps(forged).encode(), manifest)
            self.assertTrue(not error or error.startswith("ValueError: "), (place, error))
            refused += bool(error)
        self.assertGreater(refused, 2500)


if __name__ == "__main__":
    unittest.main()
