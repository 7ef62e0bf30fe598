"""The manifest, field by field: what is read, what is refused, and what is written."""

import hashlib
import json
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from torch_ragged import RaggedShard
from torch_ragged.checkpoint import CheckpointError, _manifest
from torch_ragged.checkpoint._files import FileRecord
from torch_ragged.checkpoint._manifest import Manifest, TensorRecord
from torch_ragged.tensor import _placement_text
from torch_ragged.tensor._placement_text import placement_text

DATA = "__0_0.distcp"


class ManifestTest(unittest.TestCase):
    BODY = {
        **{"step": 3, "consumed_tokens": 0, "data_position": None, "world_size": 1, "fingerprint": "", "rng": {"a": "same"}},
        **{"objects": [], "torch_version": "", "package_version": "", "format": 1},
        "meshes": [{"shape": [2], "dim_names": [], "ranks": [0, 1]}],
        "tensors": {"model.w": {"shape": [4], "dtype": "float32", "mesh": 0, "placements": ["Shard(dim=0)"]}},
        "files": {name: {"nbytes": 9, "block": 4, "crc32": ["00000000"] * 3} for name in (".metadata", DATA)},
    }

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = Path(folder.name) / "checkpoint"

    def read(self, body):
        self.path.mkdir(exist_ok=True)
        content = {"crc32": _manifest._checksum(body), "manifest": body}
        (self.path / "manifest.json").write_text(json.dumps(content))
        return _manifest.read_manifest(self.path)

    def test_fields_are_read(self):
        manifest = self.read(self.BODY)
        self.assertEqual(manifest.tensors["model.w"], TensorRecord((4,), "float32", ("Shard(dim=0)",), (2,), (), (0, 1)))
        self.assertEqual(manifest.files[DATA], FileRecord(9, (0, 0, 0), 4))
        self.assertEqual((manifest.step, manifest.rng, manifest.nbytes), (3, {"a": "same"}, 18))

    def test_fields_outside_of_their_limits_are_refused(self):
        tensor = self.BODY["tensors"]["model.w"]
        file = self.BODY["files"][DATA]
        for field, value, words in (
            ("meshes", {}, "meshes is {}, expected list"),
            ("meshes", [3], "a mesh is 3, expected dict"),
            ("meshes", [{"shape": 2, "dim_names": [], "ranks": [0, 1]}], "a mesh's shape is 2, expected list"),
            ("meshes", [{"shape": [2], "dim_names": [], "ranks": 2}], "a mesh's ranks is 2, expected list"),
            ("meshes", [{"shape": [2], "dim_names": 2, "ranks": [0, 1]}], "a mesh's dim_names is 2, expected list"),
            ("tensors", [], "tensors is [], expected dict"),
            ("tensors", {"w": {**tensor, "mesh": 1}}, "w's mesh is 1, but there are 1 meshes"),
            ("tensors", {"w": {**tensor, "mesh": "0"}}, "w's mesh is '0', expected int"),
            ("tensors", {"w": {**tensor, "shape": "4"}}, "w's shape is '4', expected list"),
            ("tensors", {"w": {**tensor, "shape": [1] * 65}}, "w's shape has 65 dimensions, expected at most 64"),
            ("tensors", {"w": {**tensor, "dtype": 4}}, "w's dtype is 4, expected str"),
            ("tensors", {"w": {**tensor, "tied_to": 4}}, "w's tied_to is 4, expected str"),
            ("tensors", {"w": {**tensor, "placements": [4]}}, "w's placements is 4, expected str"),
            ("files", [], "files is [], expected dict"),
            ("files", {**self.BODY["files"], ".": file}, "'.' is no name of a file"),
            ("files", {**self.BODY["files"], "..": file}, "'..' is no name of a file"),
            ("files", {**self.BODY["files"], "": file}, "'' is no name of a file"),
            ("files", {**self.BODY["files"], "a\n": file}, "'a\\n' is no name of a file"),
            ("files", {**self.BODY["files"], "a": {**file, "nbytes": "9"}}, "a's nbytes is '9', expected int"),
            ("files", {**self.BODY["files"], "a": {**file, "block": "4"}}, "a's block is '4', expected int"),
            ("files", {**self.BODY["files"], "a": {**file, "crc32": 4}}, "a's crc32 is 4, expected list"),
            ("files", {**self.BODY["files"], "a": {**file, "crc32": [4] * 3}}, "a's crc32 is 4, expected str"),
            ("rng", [], "rng is [], expected dict"),
            ("rng", {"a": 1}, "rng is 1, expected str"),
            ("objects", {}, "objects is {}, expected list"),
            ("step", 2**63, f"step is {2**63}, expected an int >= 0"),
            ("step", -1, "step is -1, expected an int >= 0"),
            ("consumed_tokens", "1", "consumed_tokens is '1', expected int"),
            ("world_size", 2, "world_size is 2, but there are only 1 files"),
            ("world_size", 0, "world_size is 0, expected an int >= 1"),
            ("format", 0, "format is 0, expected an int >= 1"),
            ("frozen", {"w": {"shape": [2], "dtype": "float32", "digest": "0"}}, "base is empty, but 1 tensors are in it"),
            ("frozen", {"w": {"shape": [2], "dtype": "float32", "digest": 3}}, "w's digest is 3, expected str"),
            ("frozen", ["model.w"], "frozen is ['model.w'], expected dict"),
            ("base", 3, "base is 3, expected str"),
            ("fingerprint", 1, "fingerprint is 1, expected str"),
            ("torch_version", 1, "torch_version is 1, expected str"),
            ("package_version", 1, "package_version is 1, expected str"),
        ):
            with self.assertRaises(CheckpointError) as caught:
                self.read(self.BODY | {field: value})
            self.assertIn(f"manifest.json is damaged: ValueError: {words}", str(caught.exception))

    def test_fields_at_their_limits_are_read(self):
        tensor = self.BODY["tensors"]["model.w"]
        self.assertEqual(self.read(self.BODY | {"step": 2**63 - 1}).step, 2**63 - 1)
        self.assertEqual(self.read(self.BODY | {"step": 0}).step, 0)
        tensors = {"w": {**tensor, "shape": [1] * 64}}
        self.assertEqual(len(self.read(self.BODY | {"tensors": tensors}).tensors["w"].shape), 64)
        only = {".metadata": self.BODY["files"][".metadata"]}
        self.assertEqual(self.read(self.BODY | {"files": only}).world_size, 1)

    def test_a_manifest_of_a_newer_format_names_its_writer(self):
        with self.assertRaisesRegex(CheckpointError, "has format 3, written by torch_ragged 9.9.*: install a newer"):
            self.read(self.BODY | {"format": 3, "package_version": "9.9"})

    def test_files_that_are_no_manifest_are_named(self):
        self.read(self.BODY)
        file = self.path / "manifest.json"
        nbytes = file.stat().st_size
        with mock.patch.object(_manifest, "MOST_BYTES", nbytes):
            _manifest.read_manifest(self.path)
        with (
            mock.patch.object(_manifest, "MOST_BYTES", nbytes - 1),
            self.assertRaisesRegex(CheckpointError, f"has {nbytes} bytes, expected at most {nbytes - 1}"),
        ):
            _manifest.read_manifest(self.path)
        file.write_bytes(b"\xff\xfe")
        with self.assertRaisesRegex(CheckpointError, "manifest.json is damaged: 'utf-8' codec"):
            _manifest.read_manifest(self.path)
        file.unlink()
        with self.assertRaisesRegex(CheckpointError, r"manifest.json cannot be read \(No such file or directory\)"):
            _manifest.read_manifest(self.path)

    def test_the_fingerprint_is_of_the_model_alone(self):
        tensors = {
            "model.b": TensorRecord((3, 2), "float32"),
            "model.a": TensorRecord((), "int64"),
            "opt": TensorRecord((1,), "x"),
        }
        expected = hashlib.sha256(b"model.a () int64\nmodel.b (3, 2) float32\n").hexdigest()
        self.assertEqual(_manifest.fingerprint(tensors), expected)

    def test_placements_are_texts_that_are_read_back(self):
        for placement, text in (
            (Shard(1), "Shard(1)"),
            (_StridedShard(0, split_factor=2), "_StridedShard(0, split_factor=2)"),
            (Replicate(), "Replicate()"),
            (Partial("avg"), 'Partial("avg")'),
            (RaggedShard((0,), (1, 2)), "RaggedShard(dims=(0,), local_units=(1, 2))"),
        ):
            self.assertEqual(placement_text(placement), text)
            self.assertEqual(TensorRecord((4,), "float32", (text,)).parsed_placements(), (placement,))

    def test_more_units_than_any_cluster_has_ranks_are_refused(self):
        def parsed(units):
            return TensorRecord((), "", (f"RaggedShard(dims=(0,), local_units={units})",)).parsed_placements()

        with mock.patch.object(_placement_text, "_MOST_RANKS", 8):
            self.assertEqual(parsed("(1, 2) * 4"), (RaggedShard((0,), (1, 2) * 4),))
            for units in ("(1, 2, 3) * 3", "3 * 2", "'12' * 2"):
                with self.assertRaisesRegex(ValueError, "unknown placement"):
                    parsed(units)

    def test_a_mesh_of_several_tensors_is_written_once(self):
        one, two = (("Shard(dim=0)",), (2,), ("dp",), (0, 1)), (("Replicate()",), (2,), ("dp",), (1, 0))
        tensors = {str(i): TensorRecord((4,), "float32", *(two if i == 1 else one)) for i in range(3)}
        manifest = Manifest(tensors=tensors, files={".metadata": FileRecord(0, ())})
        body = json.loads(manifest.to_json())["manifest"]
        self.assertEqual([tensor["mesh"] for tensor in body["tensors"].values()], [0, 1, 0])
        self.assertEqual([mesh["ranks"] for mesh in body["meshes"]], [[0, 1], [1, 0]])
        self.path.mkdir()
        (self.path / "manifest.json").write_text(manifest.to_json())
        self.assertEqual(_manifest.read_manifest(self.path).tensors, tensors)
