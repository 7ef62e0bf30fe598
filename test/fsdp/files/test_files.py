"""Scratch files have no name; mapped ones are read ahead in the order of their use, and few are in memory."""

import errno
import mmap
import os
import tempfile
import threading
import unittest
from unittest import mock

from common import error_of

from torch_ragged.fsdp.files import _scratch_file
from torch_ragged.fsdp.files._scratch_file import BLOCK, MappedFile, ScratchFile


def await_writes():
    for writing in _scratch_file._fetch_order._writes:
        writing.result()


class ScratchFileTest(unittest.TestCase):
    def test_a_file_has_no_name_and_two_jobs_do_not_meet(self):
        with tempfile.TemporaryDirectory() as folder:
            files = [ScratchFile(folder, 0, 2 * BLOCK) for _ in range(2)]
            assert os.listdir(folder) == [] and files[0].path != files[1].path
            block = memoryview(mmap.mmap(-1, BLOCK))
            for number, file in enumerate(files):
                block[:] = bytes([number + 1]) * BLOCK
                file.write(block, BLOCK)
            for number, file in enumerate(files):
                file.read(block, BLOCK)
                assert bytes(block) == bytes([number + 1]) * BLOCK
            text = error_of(files[0].read, block, 2 * BLOCK)
            assert "could not read 4096 bytes at 8192 of a scratch file: it ends after 0 bytes" in text, text
            assert files[0].path in text
            for file in files:
                file.close()


class MappedFileTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.files = [MappedFile(self.folder, 0, 3 * BLOCK + 5) for _ in range(6)]

    def use(self, *numbers):
        for number in numbers:
            self.files[number].use()
            await_writes()

    def test_files_are_read_ahead_in_the_order_of_their_use(self):
        log, read, numbers = [], MappedFile.read, {id(file): number for number, file in enumerate(self.files)}

        def reading(file):
            log.append(numbers[id(file)])
            read(file)

        order = (0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0)
        with mock.patch.object(MappedFile, "read", reading):
            self.use(*order, *order)
            log.clear()
            for number in order:
                self.assertIn(self.files[number], _scratch_file._fetch_order._reads)  # Read ahead, or in memory still.
                self.use(number)
        # Two or three files are in memory at each end of the order. The others are read each time.
        self.assertEqual(log, [2, 3, 4, 5, 3, 2, 1, 0])

    def test_what_is_written_outlives_its_pages(self):
        self.assertEqual(os.listdir(self.folder), [])
        self.use(2)
        self.files[2].memory[-3:] = b"abc"
        self.use(0, 1, 3, 4, 5, 0)
        self.assertNotIn(self.files[2], _scratch_file._fetch_order._reads)
        self.assertEqual(self.files[2].memory[-3:], b"abc")
        self.files[2].memory[:1] = b"d"  # Without use().
        self.files[2].release()
        await_writes()
        self.use(2)
        self.assertEqual((self.files[2].memory[:1], self.files[2].memory[-3:]), (b"d", b"abc"))

    def test_pages_that_are_used_again_during_their_write_are_not_dropped(self):
        sync, began, may_end = _scratch_file._fdatasync, threading.Event(), threading.Event()

        def slow(fd):
            began.set()
            may_end.wait(20)
            sync(fd)

        self.use(0, 1)
        self.files[0].memory[:1] = b"a"
        with mock.patch.object(_scratch_file, "_fdatasync", slow):
            self.files[2].use()  # Drops 0.
            self.assertTrue(began.wait(20))
            self.files[0].use()  # Drops 1.
            with mock.patch.object(MappedFile, "drop_pages", autospec=True) as dropped:
                may_end.set()
                await_writes()
        self.assertEqual([call.args for call in dropped.call_args_list], [(self.files[1],)])
        self.assertEqual(self.files[0].memory[:1], b"a")

    def test_what_could_not_be_written_is_an_error_of_each_use(self):
        def failing(*_):
            raise OSError(errno.EIO, "Input/output error")

        self.use(0)
        with mock.patch.object(_scratch_file, "_fdatasync", failing):
            self.use(1, 2, 3)
        errors = [error_of(self.files[0].use), error_of(self.files[0].check), error_of(self.files[0].use)]
        self.assertEqual(len(set(errors)), 1)
        self.assertIn("could not write a scratch file: Input/output error", errors[0])
        self.assertIn(self.folder, errors[0])
        self.files[4].check()

    def test_deleted_files_are_forgotten(self):
        self.use(*range(6))
        self.files.clear()
        self.assertEqual(len(_scratch_file._fetch_order._reads), 0)
        self.files = [MappedFile(self.folder, 0, 1) for _ in range(2)]
        self.use(0, 1, 0, 1)


if __name__ == "__main__":
    unittest.main()
