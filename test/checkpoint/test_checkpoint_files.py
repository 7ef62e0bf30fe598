"""Writer and reader in one process, file by file: which bytes are damaged, which chunks are missing, how a chunk is found."""

import io
import itertools
import json
import mmap
import tempfile
import unittest
import zipfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from common import error_of
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from torch_ragged.checkpoint import CheckpointError, _reader, _writer
from torch_ragged.checkpoint._files import FileRecord
from torch_ragged.checkpoint._manifest import CHUNKS, Manifest
from torch_ragged.checkpoint._reader import CheckpointReader, _Chunks, _FileWindow, damage
from torch_ragged.checkpoint._writer import CheckpointWriter, missing_chunks

DATA = "__0_0.distcp"


def stored(offset, length, file=DATA):
    return SimpleNamespace(relative_path=file, offset=offset, length=length)


def flip(file, *places):
    content = bytearray(file.read_bytes())
    for place in places:
        content[place] ^= 1
    file.write_bytes(content)


class Folder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = Path(folder.name) / "checkpoint"

    def save(self, state, **arguments):
        writer = CheckpointWriter(self.path, **arguments)
        dcp.save(state, storage_writer=writer, planner=_writer.SavePlannerOfViews())
        return writer

    def error(self, function, *arguments, **named):
        """The text of DCP's error, which is no ``Exception`` and quotes ours."""
        with self.assertRaises(dcp.api.CheckpointException) as caught:
            function(*arguments, **named)
        self.assertIn("CheckpointError", str(caught.exception))
        return str(caught.exception)


class DamageTest(Folder):
    def setUp(self):
        super().setUp()
        self.path.mkdir()
        content, block = bytes(range(256)) * 4, 100
        self.files = {}
        for name in ("a", "b"):
            writer = _writer.HashingFileSystem(block)
            with writer.create_stream(self.path / name, "wb") as stream:
                stream.write(content)
            self.files |= writer.records
        self.manifest = Manifest(files=self.files)

    def test_whole_files_have_no_damage(self):
        self.assertEqual(damage(self.path, self.manifest, None), [])

    def test_bytes_of_damaged_blocks_are_named(self):
        flip(self.path / "a", 250, 399, 550, 1023)
        self.assertEqual(
            damage(self.path, self.manifest, None),
            [
                f"{self.path / 'a'} is damaged: bytes {start} to {stop} have a wrong checksum; they hold no tensor"
                for start, stop in ((200, 400), (500, 600), (1000, 1024))
            ],
        )

    def test_tensors_in_damaged_bytes_are_named(self):
        def named(**places):
            return Metadata({}, storage_data={MetadataIndex(n): stored(*(*p, "a")[:3]) for n, p in places.items()})

        for place, names in (
            (250, "before, exact, inside"),
            (100, "before, left"),
            (650, "no tensor"),
            (750, "f, g, h, i, and 2 more"),
            (850, "five, four, one, three, and 1 more"),
        ):
            flip(self.path / "a", place)
            metadata = named(
                left=(150, 50), before=(199, 2), inside=(210, 5), exact=(200, 100), after=(300, 10), other=(200, 100, "b"),
                one=(800, 9), two=(850, 9), three=(800, 9), four=(890, 9), five=(810, 9),
                **{name: (700, 100) for name in "fghijk"},
            )  # fmt: skip
            (problem,) = damage(self.path, self.manifest, metadata)
            self.assertTrue(problem.endswith(f"they hold {names}"), problem)
            flip(self.path / "a", place)

    def test_four_tensors_are_named_without_a_number(self):
        flip(self.path / "b", 0)
        metadata = Metadata({}, storage_data={MetadataIndex(name): stored(0, 9, "b") for name in "wxyz"})
        (problem,) = damage(self.path, self.manifest, metadata)
        self.assertTrue(problem.endswith("they hold w, x, y, z"), problem)

    def test_ranks_share_the_blocks(self):
        flip(self.path / "a", *range(0, 1024, 100))
        flip(self.path / "b", *range(0, 1024, 100))
        for ranks in (2, 3, 7, 22, 30):
            with mock.patch.object(_reader, "check_blocks", wraps=_reader.check_blocks) as check:
                parts = [damage(self.path, self.manifest, None, rank, ranks) for rank in range(ranks)]
            blocks = [(path.name, block) for path, _, numbers in (c.args for c in check.call_args_list) for block in numbers]
            self.assertEqual(sorted(blocks), sorted(itertools.product("ab", range(11))), ranks)
            self.assertLessEqual(max(map(len, parts)), 2)  # One run of damaged blocks in each file.

    def test_sizes_of_all_files_are_checked_by_each_rank_before_checksums(self):
        flip(self.path / "a", 0)
        (self.path / "b").write_bytes(b"short")
        for rank in range(2):
            (problem,) = damage(self.path, self.manifest, None, rank, 2)
            self.assertIn(str(self.path / "b"), problem)


class ReaderTest(Folder):
    def test_one_problem_is_the_text_of_the_error_and_several_are_listed(self):
        self.save({"w": torch.ones(3)})
        reader, files = CheckpointReader(self.path), (self.path / DATA, self.path / ".metadata")
        (files[0]).write_bytes(b"")
        with self.assertRaisesRegex(CheckpointError, f"^{files[0]} "):
            reader.read_metadata()
        files[1].write_bytes(b"")
        with self.assertRaisesRegex(CheckpointError, "^damaged files:\n"):
            reader.read_metadata()

    def test_the_planner_learns_of_every_tensor_that_is_filled(self):
        seen = []

        class Planner(DefaultLoadPlanner):
            def commit_tensor(self, item, tensor):
                seen.append((item.dest_index.fqn, tensor.tolist()))

        self.save({"w": torch.ones(3)})
        dcp.load({"w": torch.zeros(3)}, storage_reader=CheckpointReader(self.path), planner=Planner())
        self.assertEqual(seen, [("w", [1.0, 1.0, 1.0])])

    def test_the_size_of_a_chunk_is_that_of_its_offset(self):
        chunks = [ChunkStorageMetadata(torch.Size((first,)), torch.Size((rows,))) for first, rows in ((0, 3), (3, 1), (4, 2))]
        metadata = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size((6,)), chunks)
        for hint in (None, 0, 1, 2):
            for first, rows in ((0, 3), (3, 1), (4, 2)):
                self.assertEqual(_reader._stored_sizes(metadata, MetadataIndex("w", torch.Size((first,)), hint)), (rows,))

    def test_a_damaged_file_of_chunks_is_named(self):
        self.save({"w": torch.ones(3)})
        flip(self.path / ".metadata", 5)  # DCP reads it, this reader does not.
        CheckpointReader(self.path).read_metadata()
        self.assertIn(
            "metadata is damaged", self.error(dcp.load, {"w": torch.ones(3)}, storage_reader=CheckpointReader(self.path))
        )
        flip(self.path / CHUNKS, 5)
        with self.assertRaisesRegex(CheckpointError, r"chunks\.json is damaged: its checksum is wrong"):
            CheckpointReader(self.path).read_metadata()

    def test_a_list_of_chunks_without_bound_is_not_read(self):
        self.save({"w": torch.ones(3)})
        nbytes = (self.path / CHUNKS).stat().st_size
        for most, fits in ((nbytes, True), (nbytes - 1, False)):
            with mock.patch.object(_reader, "MOST_BYTES", most):
                reader = CheckpointReader(self.path)
                if fits:
                    self.assertIs(reader.read_metadata(), reader.read_metadata())  # It is read once.
                else:
                    with self.assertRaisesRegex(CheckpointError, f"has {nbytes} bytes, expected at most {most}"):
                        reader.read_metadata()

    def test_a_missing_file_is_found_before_metadata_is_read(self):
        self.save({"w": torch.ones(3)})
        (self.path / DATA).unlink()
        with self.assertRaisesRegex(CheckpointError, DATA):
            CheckpointReader(self.path).read_metadata()

    def test_checksums_are_compared_unless_verify_is_false(self):
        self.save({"w": torch.zeros(1000)})
        content = (self.path / DATA).read_bytes()
        flip(self.path / DATA, content.index(bytes(4000)) + 2000)
        target = {"w": torch.full((1000,), 7.0)}
        text = self.error(dcp.load, target, storage_reader=CheckpointReader(self.path))
        self.assertIn("they hold w", text)
        self.assertTrue(bool((target["w"] == 7).all()))
        dcp.load(target, storage_reader=CheckpointReader(self.path, verify=False))
        self.assertEqual(int((target["w"] != 0).sum()), 1)

    def test_what_a_step_does_is_known_while_it_runs(self):
        seen = []

        class Planner(DefaultLoadPlanner):
            def create_local_plan(self):
                seen.append(reader.doing)
                return super().create_local_plan()

            def create_global_plan(self, plans):
                seen.append(reader.doing)
                return super().create_global_plan(plans)

            def resolve_tensor(self, item):
                seen.append(reader.doing)
                return super().resolve_tensor(item)

        self.save({"w": torch.ones(3)})
        reader = CheckpointReader(self.path)
        self.assertEqual((reader.doing, reader.checkpoint_id), ("reading the manifest", self.path))
        dcp.load({"w": torch.zeros(3)}, storage_reader=reader, planner=Planner())
        self.assertEqual(seen, ["reading chunks.json", "comparing checksums", "reading their shards"])

    def test_errors_of_a_chunk_name_the_file(self):
        self.save({"w": torch.ones(3)})
        for error, words in ((CheckpointError("too short"), ": too short"), (OSError("no"), " cannot be read: OSError: no")):
            with mock.patch.object(_Chunks, "copy", side_effect=error):
                text = self.error(dcp.load, {"w": torch.zeros(3)}, storage_reader=CheckpointReader(self.path))
            self.assertIn(f"CheckpointError: {self.path / DATA}{words}\n", text)

    def test_objects_are_read_before_any_tensor(self):
        seen = []

        class Planner(DefaultLoadPlanner):
            def load_bytes(self, item, value):
                seen.append(item.dest_index.fqn)
                super().load_bytes(item, value)

            def resolve_tensor(self, item):
                seen.append(item.dest_index.fqn)
                return super().resolve_tensor(item)

        self.save({"a": torch.ones(3), "b": {"x"}, "c": torch.ones(2), "d": {"y"}})
        dcp.load(
            {"a": torch.zeros(3), "b": set(), "c": torch.zeros(2), "d": set()},
            storage_reader=CheckpointReader(self.path),
            planner=Planner(),
        )
        self.assertEqual(seen, ["b", "d", "a", "c"])


class ChunkTest(unittest.TestCase):
    """Chunks as ``torch.save`` writes them, at odd places of a file."""

    def chunks(self, *contents, before=7):
        stream, index = io.BytesIO(b"\xff" * before), {}
        stream.seek(0, io.SEEK_END)
        for number, content in enumerate(contents):
            start = stream.tell()
            if isinstance(content, bytes):
                stream.write(content)
            else:
                one = io.BytesIO()
                torch.save(content, one)
                stream.write(one.getvalue())
            index[MetadataIndex(str(number))] = stored(start, stream.tell() - start)
            stream.write(b"\xff" * 3)
        mapped = mmap.mmap(-1, stream.tell())
        mapped.write(stream.getvalue())
        return _Chunks(mapped, index)

    def copy(self, chunks, source, ranges, target, number=0):
        with mock.patch.object(_reader, "load_object", side_effect=AssertionError("the slow way")):
            chunks.copy(MetadataIndex(str(number)), tuple(source.shape), source.dtype, ranges, target)

    def test_parts_of_chunks_are_copied_from_any_byte_of_the_file(self):
        for dtype, before in itertools.product((torch.uint8, torch.bfloat16, torch.float32, torch.complex128), range(0, 20, 3)):
            source = torch.arange(3 * 4 * 5).view(3, 4, 5).to(dtype)
            chunks = self.chunks(torch.ones(2), source, before=before)
            for ranges in (
                ((0, 3), (0, 4), (0, 5)),
                ((1, 2), (3, 1), (2, 3)),
                ((0, 1), (1, 2), (4, 1)),
                ((2, 0), (0, 4), (0, 5)),
            ):
                expected = source[tuple(slice(a, a + n) for a, n in ranges)]
                for target in (torch.zeros_like(expected), torch.zeros(expected.shape, dtype=torch.complex128)):
                    self.copy(chunks, source, ranges, target, 1)
                    self.assertTrue(torch.equal(target, expected.to(target.dtype)), (dtype, before, ranges))

    def test_targets_with_strides_are_filled(self):
        source = torch.arange(12.0).view(3, 4)
        chunks = self.chunks(source)
        for base, view in ((torch.zeros(4, 3), lambda t: t.t()), (torch.zeros(3, 8), lambda t: t[:, ::2])):
            self.copy(chunks, source, ((0, 3), (0, 4)), view(base))
            self.assertTrue(torch.equal(view(base), source))

    def test_scalars_are_copied(self):
        source, target = torch.tensor(2.5), torch.zeros(())
        self.copy(self.chunks(source), source, (), target)
        self.assertEqual(target.item(), 2.5)

    def test_an_archive_of_another_layout_is_loaded_whole(self):
        source = torch.arange(6.0).view(2, 3)
        views = torch.arange(12.0).view(2, 6)[:, :3]  # Its storage has more bytes than the tensor.
        packed = io.BytesIO()
        one = io.BytesIO()
        torch.save(source, one)
        with zipfile.ZipFile(one) as archive, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as deflated:
            for info in archive.infolist():
                deflated.writestr(info.filename, archive.read(info))
        for content in (views, packed.getvalue()):
            chunks, target = self.chunks(content), torch.zeros(1, 2)
            whole = views if content is views else source
            with mock.patch.object(_reader, "load_object", return_value=whole) as load:
                chunks.copy(MetadataIndex("0"), (2, 3), torch.float32, ((1, 1), (1, 2)), target)
                load.assert_called_once()
                self.assertEqual(load.call_args.args[1], "0")
                self.assertFalse(load.call_args.kwargs["trust"])
            self.assertTrue(torch.equal(target, whole[1:2, 1:3]))
            with mock.patch.object(_reader, "load_object", return_value=torch.ones(3)):
                text = error_of(chunks.copy, MetadataIndex("0"), (2, 3), torch.float32, ((1, 1), (1, 2)), target)
            self.assertIn("0 is no tensor of shape (2, 3)", text)

    def test_an_archive_without_a_tensor_is_refused(self):
        text = error_of(self.chunks("text").copy, MetadataIndex("0"), (3,), torch.float32, ((0, 3),), torch.zeros(3))
        self.assertEqual(text, "CheckpointError: 0 is no tensor of shape (3,)")

    def test_a_chunk_without_elements_is_no_search(self):
        target = torch.zeros(0, 4)
        self.chunks(torch.zeros(0, 4)).copy(MetadataIndex("0"), (0, 4), torch.float32, ((0, 0), (0, 4)), target)
        self.assertEqual(target.shape, (0, 4))

    def test_a_window_reads_as_a_file_does(self):
        content = bytes(range(50))
        mapped = mmap.mmap(-1, 50)
        mapped.write(content)
        window, file = _FileWindow(mapped, 10, 20), io.BytesIO(content[10:30])
        self.assertTrue(window.seekable())
        steps = (
            ("read", 3), ("tell",), ("seek", 5), ("read",), ("read", 2), ("seek", -4, 2), ("read", 9), ("seek", 2),
            ("seek", 3, 1), ("tell",), ("read", 0), ("read", -1), ("seek", 40), ("read", 5), ("tell",), ("seek", 0),
            ("read", 20), ("seek", 0, 2),
        )  # fmt: skip
        for method, *arguments in steps:
            self.assertEqual(getattr(window, method)(*arguments), getattr(file, method)(*arguments), (method, arguments))
        for arguments in ((-1,), (-21, 2)):
            with self.assertRaises(OSError):
                window.seek(*arguments)


class WriterTest(Folder):
    def missing(self, chunks, places, files=None):
        """The problems of a tensor of shape (4, 3) whose metadata has ``chunks`` as (first row, rows)."""
        properties = TensorProperties(torch.float32)
        chunk_list = [ChunkStorageMetadata(torch.Size((first, 0)), torch.Size((rows, 3))) for first, rows in chunks]
        metadata = Metadata(
            {"o": BytesStorageMetadata(), "w": TensorStorageMetadata(properties, torch.Size((4, 3)), chunk_list)}
        )
        index = {MetadataIndex("w", (first, 0)): stored(*place) for first, place in places.items()}
        return missing_chunks(metadata, index, {DATA: FileRecord(100, ())} if files is None else files)

    def test_chunks_that_fill_a_tensor_and_lie_in_the_file_are_whole(self):
        self.assertEqual(self.missing([(0, 2), (2, 2)], {0: (0, 50), 2: (50, 50)}), [])

    def test_missing_chunks_are_counted(self):
        self.assertEqual(self.missing([(0, 3), (3, 1)], {0: (0, 50)}), ["w: 9 of its 12 elements were written"])
        self.assertEqual(self.missing([(0, 3), (3, 1)], {}), ["w: 0 of its 12 elements were written"])
        self.assertEqual(self.missing([(0, 4), (2, 2)], {0: (0, 9), 2: (9, 9)}), ["w: 18 of its 12 elements were written"])
        one = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(()), [])
        self.assertEqual(missing_chunks(Metadata({"one": one}), {}, {}), ["one: 0 of its 1 elements were written"])
        none = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size((0, 3)), [])
        self.assertEqual(missing_chunks(Metadata({"none": none}), {}, {}), [])

    def test_a_checkpoint_that_is_not_complete_is_not_published(self):
        with mock.patch.object(_writer, "missing_chunks", return_value=["w: too little"]):
            text = self.error(self.save, {"w": torch.ones(3)})
        self.assertIn("the written files are not complete:\n  w: too little", text)
        self.assertFalse(self.path.exists())
        with mock.patch.object(_writer, "check_size", side_effect=lambda folder, name, _: f"{name} has another size"):
            text = self.error(self.save, {"w": torch.ones(3)})
        self.assertIn(f"{DATA} has another size", text)
        self.assertFalse(self.path.exists())

    def test_a_save_that_cannot_begin_leaves_nothing(self):
        for patched in (
            mock.patch.object(_writer._disk, "mkdir", side_effect=OSError("no space")),
            mock.patch.object(_writer.Lease, "check", side_effect=CheckpointError("another job took the lease")),
        ):
            writer = CheckpointWriter(self.path)
            with patched, self.assertRaisesRegex(dcp.api.CheckpointException, "no space|another job took the lease"):
                dcp.save({"w": torch.ones(3)}, storage_writer=writer)
            self.assertEqual(writer.fs.records, {})  # No rank wrote a file.
            self.assertEqual(list(self.path.parent.iterdir()), [])

    def test_a_lease_that_another_job_took_is_noticed_before_the_metadata_is_written(self):
        checks = [None, CheckpointError("another job took the lease")]
        writer = CheckpointWriter(self.path)
        with mock.patch.object(_writer.Lease, "check", side_effect=checks), self.assertRaises(dcp.api.CheckpointException):
            dcp.save({"w": torch.ones(3)}, storage_writer=writer)
        self.assertEqual(list(writer.fs.records), [DATA])

    def test_an_abandoned_save_leaves_nothing(self):
        writer = CheckpointWriter(self.path)
        with mock.patch.object(_writer, "missing_chunks", return_value=["w: too little"]):
            self.error(dcp.save, {"w": torch.ones(3)}, storage_writer=writer)
        lease = self.path.with_name(f"writer-{writer.token}.lease")
        self.assertTrue(lease.exists())
        writer.abandon()
        self.assertEqual(list(self.path.parent.iterdir()), [])
        writer._lease._thread.join(5)
        self.assertFalse(writer._lease._thread.is_alive())  # It renewed the lease.
        writer._lease = None  # A process that started the writer's process has no lease of its own.
        lease.touch()
        writer.abandon()
        self.assertFalse(lease.exists())

    def test_a_new_writer_plans(self):
        self.assertEqual(CheckpointWriter(self.path).doing, "planning the save")

    def test_chunks_outside_of_their_file_are_named(self):
        text = [f"w: bytes 60 to 101 are not in {DATA}"]
        self.assertEqual(self.missing([(0, 4)], {0: (60, 41)}), text)
        self.assertEqual(self.missing([(0, 4)], {0: (60, 41)}, {}), text)

    def test_the_file_system_knows_the_bytes_that_are_planned(self):
        writer = CheckpointWriter(self.path)
        planned = []

        class Planner(_writer.SavePlannerOfViews):
            def resolve_data(self, item):
                planned.append((writer.fs.planned, writer.doing))
                return super().resolve_data(item)

        dcp.save({"w": torch.ones(1000), "b": {"x"}}, storage_writer=writer, planner=Planner())
        self.assertEqual(set(planned), {(4000 + 2 * 1536, "writing their files")})
        self.assertEqual(writer.fs.planned, 0)

    def test_files_are_read_back_if_asked(self):
        for read_back in (False, True):
            with mock.patch.object(_writer, "check_blocks", wraps=_writer.check_blocks) as check:
                writer = self.save({"w": torch.ones(3)}, read_back=read_back)
            names = [call.args[0].name for call in check.call_args_list]
            self.assertEqual(names, [DATA] * read_back)
            self.assertEqual(writer.doing, "writing their files (rank 0: or publishing the checkpoint)")

    def test_files_that_read_back_wrong_are_not_published(self):
        with mock.patch.object(_writer, "check_blocks", return_value=[0]):
            text = self.error(self.save, {"w": torch.ones(3)}, read_back=True)
        self.assertIn(f"{DATA} reads back other bytes than were written", text)
        self.assertFalse(self.path.exists())

    def test_records_and_random_states_are_in_the_manifest(self):
        self.save({"o": 3, "w": torch.ones(3), "t": torch.zeros(2)}, rng={"torch": 1}, tied={"t": "w"})
        body = json.loads((self.path / "manifest.json").read_text())["manifest"]
        self.assertEqual(body["rng"], {"torch": "same"})
        self.assertEqual(body["world_size"], 1)
        self.assertEqual(
            body["tensors"],
            {"t": {"shape": [2], "dtype": "float32", "tied_to": "w"}, "w": {"shape": [3], "dtype": "float32"}},
        )
        self.assertEqual(sorted(body["files"]), [".metadata", DATA, CHUNKS])

    def test_blocks_have_the_size_that_was_asked(self):
        writer = self.save({"w": torch.ones(1000)}, block=512)
        record = CheckpointReader(self.path).manifest.files[DATA]
        self.assertEqual((record.block, len(record.crc32)), (512, -(-record.nbytes // 512)))
        self.assertEqual(record, writer.fs.records[DATA])
