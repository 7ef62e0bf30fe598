"""Checkpoints of a stranger: loading runs none of their code, opens nothing but regular files, and asks for no huge memory."""

import contextlib
import io
import json
import os
import pickle
import shutil
import socket
import unittest
import warnings
import zipfile

import torch
from checkpoint_forger import Untrusted, forge, make_state, saved_unchecked
from common import error_of
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from torch_ragged import checkpoint
from torch_ragged.checkpoint import _cli, _data
from torch_ragged.checkpoint._manifest import CHUNKS, _checksum

DATA = "__0_0.distcp"


class Evil:
    """A pickle that creates a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


class ExtraState(torch.nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def get_extra_state(self):
        return self.value

    def set_extra_state(self, value):
        pass


class CodeTest(Untrusted):
    def test_objects_that_run_code_are_refused_unless_trusted(self):
        def with_extra(step):
            return make_state(step, extra={"evil": Evil(self.ran)})

        def with_per_rank(step):
            return make_state(step, per_rank={"evil": Evil(self.ran)})

        def with_group(step):
            state = make_state(step)
            state.optimizer.param_groups[0]["evil"] = Evil(self.ran)
            return state

        def with_module(step):
            state = make_state(step)
            state.model.register_module("evil", ExtraState(Evil(self.ran)))
            return state

        for make, name, in_checkpoint in (
            (with_extra, "extra.evil", "the pickle of extra.evil, scheduler"),
            (with_per_rank, "per_rank.evil", "per_rank.evil of rank 0"),
            (with_group, "optimizer.param_groups.0.evil", "optimizer.param_groups.0.evil"),
            (with_module, "model.evil._extra_state", "model.evil._extra_state"),
        ):
            with self.subTest(make.__name__):
                for save in (checkpoint.save, checkpoint.async_save):
                    text = error_of(save, self.path, make(1))
                    self.assertIn(f"saving to {self.path}: {name} holds more than data: posix.mkdir. ", text)
                    self.assertIn("Save its values, as by str(path)", text)
                    self.assertFalse(self.path.exists() or self.ran.exists())
                folder = saved_unchecked(self.path, make(1))
                self.check_refused(folder, f"{in_checkpoint} holds more than data: posix.mkdir.", "pass trust=True", make=make)
                with contextlib.redirect_stdout(io.StringIO()) as told, warnings.catch_warnings():
                    warnings.simplefilter("error")  # Nor does it print one of DCP.
                    self.assertEqual(_cli.main(["verify", str(folder)]), 0)
                said = in_checkpoint.replace("per_rank.evil of rank 0", "per_rank.0.evil")
                self.assertIn(f"\n{said} holds more than data: posix.mkdir. ", told.getvalue())
                self.assertEqual(told.getvalue().count("more than data"), 1)
                self.assertFalse(self.ran.exists())
                checkpoint.load(folder, make(7), trust=True)
                self.assertTrue(self.ran.is_dir())
                self.ran.rmdir()
                shutil.rmtree(self.path)

    def test_types_that_the_user_allows_are_loaded(self):
        state = make_state(extra={"path": Plain(3)})
        self.assertIn("extra.path holds more than data", error_of(checkpoint.save, self.path, state))
        with torch.serialization.safe_globals([Plain]):
            folder = checkpoint.save(self.path, state)
        state = make_state(2, extra={"path": None})
        self.assertIn("holds more than data", error_of(checkpoint.load, folder, state))
        with torch.serialization.safe_globals([Plain]):
            checkpoint.load(folder, state)
        self.assertEqual(state.extra["path"].value, 3)

    def test_data_needs_no_trust(self):
        extra = {"a": [1, 2.5, None, True, "x", b"y", (1, {2: 3})], "t": {"inside": torch.arange(3)}, "set": {1, 2}}
        folder = checkpoint.save(self.path, make_state(extra=dict(extra)))
        state = make_state(2, extra=dict.fromkeys(extra))
        checkpoint.load(folder, state)
        self.assertEqual(state.extra["a"], extra["a"])
        self.assertTrue(torch.equal(state.extra["t"]["inside"], torch.arange(3)))

    def test_metadata_that_runs_code_is_refused(self):
        folder = checkpoint.save(self.path, make_state())
        content = (folder / ".metadata").read_bytes()
        for where in ("version", "state_dict_metadata", "storage_meta"):
            metadata = pickle.loads(content)
            if where == "state_dict_metadata":
                metadata.state_dict_metadata["model.0.weight"] = Evil(self.ran)
            else:
                setattr(metadata, where, Evil(self.ran))
            forge(folder, ".metadata", pickle.dumps(metadata))
            self.check_refused(folder, f"{folder / '.metadata'} is damaged: it holds posix.mkdir, which is no part of DCP's")
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as told:
                self.assertEqual(_cli.main(["verify", str(folder)]), 1)
                self.assertEqual(_cli.main(["diff", "--values", str(folder), str(folder)]), 1)
            self.assertIn("posix.mkdir", told.getvalue())
            self.assertFalse(self.ran.exists())

    def test_pickles_that_are_no_metadata_are_refused(self):
        folder = checkpoint.save(self.path, make_state())
        deep = b"\x80\x04" + b"(" * 3000 + b"K\x01" + b"t" * 3000 + b"."
        key = b"\x80\x04})" + b"\x85" * 100_000 + b"K\x01s."  # A dict whose key is a tuple of depth 100,000.
        get = b"\x80\x04ctorch\nSize\n)R}(X\x01\x00\x00\x00ak\x00b."  # BUILD and an opcode that is not legal.
        for content, words in (
            (b"", "no pickle"),
            (b"x", "no pickle"),
            (pickle.dumps({}), "in place of Metadata"),
            (pickle.dumps(Metadata({}), 0), "it holds copy_reg._reconstructor"),
            (pickle.dumps(Metadata({})), "expected dict"),
            (deep, "in place of Metadata"),
            (key, "a key that is neither a name nor an index"),
            (get, "no pickle"),
            (b"\x80\x04cos\nsystem\n.", "it holds os.system"),
            (b"\x80\x04K\x01)R.", "calls what is no class"),
            (b"\x80\x04ctorch\nSize\n}b.", "sets the state of what is no object"),
            (b"\x80\x04N\x8a\xff" + b"\x00" * 9, "no pickle"),
            (b"\x80\x04r\xff\xff\xff\xff.", "no pickle"),
            (b"\x80\x04B\xff\xff\xff\x7f.", "no pickle"),
        ):
            with self.subTest(content[:20]):
                forge(folder, ".metadata", content)
                self.check_refused(folder, f"{folder / '.metadata'} is damaged: ", words)


class Plain:
    def __init__(self, value):
        self.value = value


class NumbersTest(Untrusted):
    """Numbers that do not fit the files."""

    def check_forged(self, change, *words):
        folder = checkpoint.save(self.path, make_state(extra={"x": 1}))
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        change(metadata)
        forge(folder, ".metadata", pickle.dumps(metadata))
        self.check_refused(folder, f"{folder / '.metadata'} is damaged: ", *words)

    def test_numbers_of_metadata_are_checked_against_the_files(self):
        name = "model.0.weight"
        index = MetadataIndex(name, torch.Size([0, 0]))

        def stored(**change):
            def apply(metadata):
                old = metadata.storage_data[index]
                metadata.storage_data[index] = _StorageInfo(**{**vars(old), **change})

            return apply

        def entry(name, attribute, value):
            return lambda metadata: setattr(metadata.state_dict_metadata[name], attribute, value)

        def huge(metadata):
            item = metadata.state_dict_metadata["objects"]
            item.size = torch.Size([2**50])
            item.chunks[0].sizes = item.size

        def more_chunks(metadata):
            item = metadata.state_dict_metadata[name]
            item.chunks = item.chunks * 100_000

        def shared(metadata):
            metadata.storage_data[index] = metadata.storage_data[MetadataIndex("model.1.weight", torch.Size([0, 0]))]

        def outside(metadata):
            metadata.state_dict_metadata[name].chunks = [ChunkStorageMetadata(torch.Size([1, 0]), torch.Size([4, 3]))]

        for change, words in (
            (huge, "bytes in its chunk at (0,), but"),
            (stored(offset=2**40), f"has {name} in bytes {2**40} to"),
            (stored(length=2**62), "which the manifest does not list"),
            (stored(length=-1), "length is -1"),
            (stored(offset=True), "offset is True"),
            (
                stored(relative_path="../step-00000002/__0_0.distcp"),
                "of ../step-00000002/__0_0.distcp, which",
            ),
            (stored(relative_path="/dev/zero"), "of /dev/zero, which the manifest does not list"),
            (stored(transform_descriptors=["zstd"]), "is stored with a transform"),
            (shared, "share bytes of"),
            (more_chunks, "more chunks than the"),
            (outside, "has a chunk (4, 3) at (1, 0)"),
            (entry(name, "size", torch.Size([4, 4])), "the chunks of model.0.weight do not have the 16 elements"),
            (entry(name, "size", torch.Size([2, 6])), "has a chunk (4, 3) at (0, 0)"),
            (entry(name, "size", "x"), "size of model.0.weight is 'x'"),
            (entry(name, "chunks", None), "chunks of model.0.weight is None"),
            (entry(name, "properties", 3), "model.0.weight has no dtype"),
            (lambda metadata: metadata.state_dict_metadata.pop(name), "has no tensor model.0.weight, which the manifest lists"),
            (lambda metadata: metadata.storage_data.pop(index), "the chunk of model.0.weight at (0, 0) is not stored"),
        ):
            with self.subTest(words):
                self.check_forged(change, words)

    def test_more_ranks_than_files_are_refused(self):
        folder = checkpoint.save(self.path, make_state(per_rank={"a": 1}))
        body = json.loads((folder / "manifest.json").read_text())["manifest"]
        body["world_size"] = 10**9  # A list of all ranks' states would fill the memory.
        (folder / "manifest.json").write_text(json.dumps({"crc32": _checksum(body), "manifest": body}))
        text = error_of(checkpoint.load, folder, make_state(per_rank={"a": 1}), redistribute={"a": list})
        self.assertIn("world_size is 1000000000, but there are only 1 files of ranks", text)

    def test_a_manifest_of_a_terabyte_is_not_read(self):
        folder = checkpoint.save(self.path, make_state())
        os.truncate(folder / "manifest.json", 1 << 40)  # A hole: it takes no disk.
        self.check_refused(folder, f"manifest.json is damaged: it has {1 << 40} bytes, expected at most {1 << 30}")

    def test_archives_that_are_larger_than_their_bytes_are_refused(self):
        stored, packed = io.BytesIO(), io.BytesIO()
        torch.save({"a": torch.zeros(100_000)}, stored)
        with zipfile.ZipFile(stored) as archive, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as bomb:
            for record in archive.namelist():
                bomb.writestr(record, archive.read(record))
        self.assertLess(len(packed.getvalue()), 10_000)
        legacy = io.BytesIO()
        torch.save([1], legacy, _use_new_zipfile_serialization=False)
        for data, words in (
            (packed, "its records are larger than its bytes"),
            (legacy, "is not a zip file"),
            (io.BytesIO(), "no"),
        ):
            text = error_of(_data.load_object, data.getvalue(), "extra.x", False)
            self.assertTrue(
                text.startswith("CheckpointError: extra.x is no archive as torch.save writes it") and words in text, text
            )


class KindsTest(Untrusted):
    def check_kind(self, make, words):
        for name in ("manifest.json", ".metadata", CHUNKS, DATA):
            with self.subTest(name, kind=words):
                good = checkpoint.save(self.path, make_state(1))
                newest = checkpoint.save(self.path, make_state(2))
                (newest / name).rename(self.path / "moved")
                make(newest / name)
                self.assertEqual(checkpoint.latest(self.path), good)
                self.check_refused(newest, f"{newest / name} is no regular file: it is {words}")
                with contextlib.redirect_stderr(io.StringIO()) as told, contextlib.redirect_stdout(told):
                    self.assertEqual(_cli.main(["verify", str(newest)]), 1)
                self.assertIn(f"it is {words}", told.getvalue())

    def test_links_are_refused_even_to_the_right_file(self):
        self.check_kind(lambda path: path.symlink_to(self.path / "moved"), "a symbolic link")
        self.check_kind(lambda path: path.symlink_to("/dev/zero"), "a symbolic link")

    def test_pipes_sockets_and_folders_are_refused(self):
        def listen(path):
            if len(str(path)) < 100:
                with socket.socket(socket.AF_UNIX) as server:
                    server.bind(str(path))

        self.check_kind(os.mkfifo, "a named pipe")
        self.check_kind(listen, "a socket")
        self.check_kind(os.mkdir, "a folder")

    @unittest.skipUnless(hasattr(os, "geteuid") and os.geteuid() == 0, "only root makes devices")
    def test_devices_are_refused(self):
        try:
            os.mknod(self.path.with_name("probe"), 0o600 | 0o020000, os.makedev(1, 5))
        except OSError as error:
            self.skipTest(f"devices cannot be made here: {error}")
        self.check_kind(lambda path: os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5)), "a device")
