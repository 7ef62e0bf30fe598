"""What a file system may do to a checkpoint: symbolic links, leftovers that cannot be removed, a full disk."""

import errno
import os
import re
import shutil
import tempfile
import threading
import unittest
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_model import make_state, train, values
from common import error_of, run_ranks
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager

from torch_ragged import checkpoint
from torch_ragged.checkpoint import _disk, _files, _folder, _writer


def small_state(step=1):
    return checkpoint.TrainState(nn.Linear(2, 2), step=step)


def names_in(path):
    """The names in a folder, without the tokens of writers."""
    return sorted(re.sub(r"\.[0-9a-f]{16}\.", ".", name) for name in os.listdir(path))


class LinkTest(unittest.TestCase):
    """Each checkpoint that is moved away is linked: what is in the archive must stay."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path, self.archive = Path(folder.name) / "out", Path(folder.name) / "archive"
        self.archive.mkdir()

    def save(self, step):
        return checkpoint.save(self.path, small_state(step))

    def archived(self, name):
        """Move a checkpoint away, link it, and return where it is."""
        shutil.move(self.path / name, self.archive / name)
        (self.path / name).symlink_to(self.archive / name)
        return self.archive / name

    def check_archive(self, folder, step):
        state = small_state()
        self.assertEqual(checkpoint.load(folder, state).step, step)

    def test_keep_removes_a_link_and_not_what_it_leads_to(self):
        for step in (1, 2, 3):
            self.save(step)
        moved = self.archived("step-00000001")
        self.assertEqual(checkpoint.keep(self.path, 1), [self.path / "step-00000003"])
        self.assertEqual(names_in(self.path), ["step-00000003"])
        self.check_archive(moved, 1)
        self.save(4)

    def test_a_link_is_a_checkpoint_as_others_are(self):
        self.save(1)
        self.archived("step-00000001")
        self.assertEqual(checkpoint.latest(self.path), self.path / "step-00000001")
        self.assertEqual(checkpoint.load(self.path, small_state()).step, 1)

    def test_a_save_waits_for_the_one_in_flight_through_a_link_too(self):
        self.path.mkdir()
        link = self.path.with_name("link")
        link.symlink_to(self.path)
        futures, others = [], threading.Event()
        write = _files._HashingFile.write

        def waiting(file, data):
            if threading.current_thread() is threading.main_thread():
                self.assertTrue(futures[0].done())
                others.set()
            else:
                others.wait(0.01)  # A save that does not wait writes meanwhile: a checkpoint has some 200 writes.
            return write(file, data)

        with mock.patch.object(_files._HashingFile, "write", waiting):
            futures.append(checkpoint.async_save(self.path, small_state(1)))
            self.assertEqual(checkpoint.save(link, small_state(1)), link / "step-00000001")
            self.assertEqual(checkpoint.save(link, small_state(2)), link / "step-00000002")
        self.assertTrue(others.is_set())
        self.assertEqual(names_in(self.path), ["step-00000001", "step-00000002"])

    def test_a_step_is_saved_anew_in_place_of_its_link(self):
        self.save(1)
        moved = self.archived("step-00000001")
        self.assertEqual(self.save(1), self.path / "step-00000001")
        self.assertFalse((self.path / "step-00000001").is_symlink())
        self.check_archive(moved, 1)
        self.save(2)
        self.assertEqual(names_in(self.path), ["step-00000001", "step-00000002"])

    def test_a_step_is_saved_in_place_of_a_link_to_nothing_and_of_a_file(self):
        self.path.mkdir()
        (self.path / "step-00000001").symlink_to(self.archive / "gone")
        (self.path / "step-00000002").write_text("a file")
        for step in (1, 2):
            self.assertIsNone(checkpoint.latest(self.path) if step == 1 else None)
            self.assertEqual(self.save(step), checkpoint.latest(self.path))
        self.assertEqual(names_in(self.path), ["step-00000001", "step-00000002"])

    def test_leftovers_that_are_links_or_files_are_removed(self):
        self.path.mkdir()
        (self.archive / "mine").write_text("stays")
        ends = (".incomplete", ".deleting", ".replaced.deleting", ".replaced.incomplete")
        for number, end in enumerate(ends):
            (self.path / f"step-0000000{number}{end}").symlink_to(self.archive)
            (self.path / f"step-0000001{number}{end}").symlink_to(self.archive / "gone")
            (self.path / f"step-0000002{number}{end}").write_text("a file")
        self.save(0)  # Its own folder to write in is one of the links.
        self.assertEqual(names_in(self.path), ["step-00000000"])
        self.assertEqual(names_in(self.archive), ["mine"])

    def test_an_older_one_that_was_replaced_may_be_a_link(self):
        self.save(1)
        moved = self.archived("step-00000001")
        (self.path / "step-00000001").rename(self.path / "step-00000001.replaced")
        self.assertEqual(checkpoint.latest(self.path), self.path / "step-00000001.replaced")
        self.save(1)
        self.assertEqual(names_in(self.path), ["step-00000001"])
        self.check_archive(moved, 1)

    def test_a_failed_save_removes_its_link_only(self):
        write = _files._HashingFile.write

        def link_and_fail(file, data):
            folder = file.path.parent
            if not folder.is_symlink():
                folder.rename(self.archive / "moved")
                folder.symlink_to(self.archive / "moved")
            raise OSError(errno.EIO, "no more") if file.nbytes else None
            return write(file, data)

        with mock.patch.object(_files._HashingFile, "write", link_and_fail):
            self.assertIn("CheckpointError", error_of(self.save, 1))
        self.assertEqual(names_in(self.path), [])
        self.assertEqual(names_in(self.archive / "moved"), ["__0_0.distcp"])


class CleanupTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = Path(folder.name)

    def test_a_cleanup_that_fails_after_the_publish_is_a_warning(self):
        checkpoint.save(self.path, small_state())
        with mock.patch.object(_disk, "rmdir", side_effect=PermissionError(errno.EPERM, "not permitted", "x")):
            with self.assertLogs("torch_ragged.checkpoint", "WARNING") as log:
                folder = checkpoint.save(self.path, small_state())
        self.assertIn(f"{folder} is saved, but the cleanup after the save failed: [Errno 1] not permitted: 'x'", log.output[0])
        self.assertEqual(names_in(self.path), ["step-00000001", "step-00000001.replaced.deleting"])
        checkpoint.save(self.path, small_state(2))
        self.assertEqual(names_in(self.path), ["step-00000001", "step-00000002"])

    def test_the_replaced_one_stays_if_the_new_name_cannot_be_synced(self):
        checkpoint.save(self.path, small_state())
        sync = _disk.sync_folder

        def fail(folder):
            if folder == self.path:
                raise OSError(errno.EIO, "cannot sync", str(folder))
            sync(folder)

        with mock.patch.object(_disk, "sync_folder", fail), self.assertLogs("torch_ragged.checkpoint", "WARNING") as log:
            checkpoint.save(self.path, small_state())
        self.assertIn("cannot sync", log.output[0])
        self.assertEqual(names_in(self.path), ["step-00000001", "step-00000001.replaced"])

    def test_a_leftover_of_another_step_that_cannot_be_removed_is_a_warning(self):
        for step in (1, 2):
            (self.path / f"step-0000000{step}.incomplete").mkdir()
        remove = _folder.remove

        def fail(path):
            if path.name == "step-00000001.incomplete":
                raise PermissionError(errno.EACCES, "not permitted", str(path))
            remove(path)

        with mock.patch.object(_folder, "remove", fail), self.assertLogs("torch_ragged.checkpoint", "WARNING") as log:
            checkpoint.save(self.path, small_state(2))
        self.assertIn("step-00000001.incomplete", log.output[0])
        self.assertEqual(names_in(self.path), ["step-00000001.incomplete", "step-00000002"])


class FullDisk:
    """A binary file on a disk that has room for so many bytes, as the kernel has it: it takes a part, then refuses."""

    def __init__(self, raw, room):
        self.raw, self.room = raw, room

    def write(self, data):
        part = memoryview(data)[: max(self.room - self.raw.tell(), 0)]
        self.raw.write(part)
        if len(part) < len(data):
            self.raw.flush()
            raise OSError(errno.ENOSPC, "No space left on device")
        return len(part)

    def __getattr__(self, name):
        return getattr(self.raw, name)


def full_disk(name, room):
    """Have files whose names begin with ``name`` find room for so many bytes."""
    init = _files._HashingFile.__init__

    def limited(self, raw, path, block):
        init(self, FullDisk(raw, room) if path.name.startswith(name) else raw, path, block)

    return mock.patch.object(_files._HashingFile, "__init__", limited)


def check_full_disk(path):
    rank = dist.get_rank()
    group = dist.new_group(backend="gloo")
    state = make_state(0)
    train(state, 1)
    folder = checkpoint.save(path, state)
    whole = (folder / "__1_0.distcp").stat().st_size
    state.step = 2

    def saves(name, room):
        for run in (checkpoint.save, lambda *args: checkpoint.async_save(*args, process_group=group).result(timeout=100)):
            with full_disk(name, room):
                yield error_of(run, path, state)
            assert checkpoint.latest(path) == folder
            dist.barrier()

    number = r"(\d+)"
    for room in (0, 700, 4000, 5001, whole - 3000, whole - 100):  # In a header, in elements, in the end of an archive.
        for text in saves("__1_0.distcp", room):
            match = re.search(
                rf"No space left on device \(the disk is full: the file needs about {number} bytes, {number} of them are "
                rf"written, {number} bytes are free\): .*/step-00000002\.\w+\.incomplete/__1_0.distcp \(rank 1\)",
                text,
            )
            assert match is not None, (room, text)
            assert abs(int(match[1]) - whole) < 0.2 * whole and int(match[2]) == room, (room, whole, text)
            assert "enforce" not in text, text
    for name in (".metadata", "manifest"):  # Rank 0 writes them.
        for text in saves(name, 50):
            assert "the disk is full" in text and f"/{name}" in text and "(rank 0)" in text, text
    checkpoint.save(path, state)
    fresh = make_state(1)
    checkpoint.load(path, fresh)
    assert fresh.step == 2 and torch.equal(values(fresh)["experts"], values(state)["experts"]), rank


def check_error_while_writing(path):
    """Whatever fails between the first and the last byte, the text tells the file, and every rank raises."""
    rank = dist.get_rank()
    group = dist.new_group(backend="gloo")
    state = make_state(0)
    transform = _writer.SavePlannerOfViews.transform_object

    def fail(self, item, value):
        if rank == 1:
            raise RuntimeError("no such memory")
        return transform(self, item, value)

    with mock.patch.object(_writer.SavePlannerOfViews, "transform_object", fail):
        for text in (
            error_of(checkpoint.save, path, state),
            error_of(checkpoint.async_save(path, state, process_group=group).result, timeout=100),
        ):
            assert "__1_0.distcp cannot be written: RuntimeError: no such memory (rank 1)" in text, text
    assert_saves(path, state)


def assert_saves(path, state):
    dist.barrier()
    checkpoint.save(path, state)


def check_error_before_a_background_save(path):
    """It fails on all ranks: the others would wait for rank 1."""
    group, state = dist.new_group(backend="gloo"), make_state(0)
    stage = DefaultStager.stage

    def no_room(self, *arguments, **options):
        if dist.get_rank() == 1:
            raise MemoryError("no room")
        return stage(self, *arguments, **options)

    with mock.patch.object(DefaultStager, "stage", no_room):
        text = error_of(checkpoint.async_save, path, state, process_group=group)
    assert text.startswith("CheckpointError") and "MemoryError: no room (rank 1)" in text, text
    assert_saves(path, state)


def check_error_in_a_background_save(path):
    group, state = dist.new_group(backend="gloo"), make_state(0)
    with (
        mock.patch.object(dcp, "save", autospec=True),
        mock.patch("torch.distributed.checkpoint.state_dict_saver.save", side_effect=EOFError),
    ):
        text = error_of(checkpoint.async_save(path, state, process_group=group).result, timeout=100)
    assert text.startswith("CheckpointError") and "EOFError" in text, text
    assert_saves(path, state)


class FullDiskTest(unittest.TestCase):
    def test_a_full_disk_is_told_with_file_and_sizes(self):
        with tempfile.TemporaryDirectory() as path:
            run_ranks(2, check_full_disk, path)

    def test_other_errors_of_the_writer_tell_the_file(self):
        with tempfile.TemporaryDirectory() as path:
            run_ranks(2, check_error_while_writing, path)

    def test_a_background_save_that_cannot_begin_on_one_rank_fails_on_all(self):
        with tempfile.TemporaryDirectory() as path:
            run_ranks(2, check_error_before_a_background_save, path)

    def test_an_error_in_a_background_save_is_raised_by_its_result(self):
        with tempfile.TemporaryDirectory() as path:
            run_ranks(2, check_error_in_a_background_save, path)

    @unittest.skipUnless(Path("/dev/full").exists(), "needs /dev/full")
    def test_a_disk_without_a_free_byte_names_the_first_file(self):
        create = _disk.create

        def on_full_disk(path):
            create(path).close()
            return open("/dev/full", "wb")

        with tempfile.TemporaryDirectory() as path, mock.patch.object(_disk, "create", on_full_disk):
            text = error_of(checkpoint.save, path, small_state(2))
            self.assertEqual(names_in(Path(path)), [])
        room = r"\(the disk is full: the file needs about \d+ bytes, 0 of them are written, \d+ bytes are free\)"
        self.assertRegex(text, rf"No space left on device {room}: .*/writer-\w+\.lease \(rank 0\)")

    @unittest.skipUnless(Path("/dev/full").exists(), "needs /dev/full")
    def test_the_error_of_the_kernel_is_not_lost_in_an_archive(self):
        def write():
            with _files.HashingFileSystem().create_stream("/dev/full", "wb") as stream:
                torch.save(torch.zeros(100_000), stream)

        text = error_of(write)
        self.assertTrue(text.startswith("OSError: [Errno 28] No space left on device (the disk is full"), text)
        self.assertIn("/dev/full", text)
