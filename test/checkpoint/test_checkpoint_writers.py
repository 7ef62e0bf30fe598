"""Two jobs save to one folder and are killed or stopped: the loser gets an error on all ranks, the latest checkpoint loads."""

import os
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from checkpoint_jobs import POINTS, Job, state_of
from common import error_of

from torch_ragged import checkpoint
from torch_ragged.checkpoint import _lease


class TwoWritersTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = f"{folder.name}/run"
        self.folder = folder.name

    def job(self):
        job = Job(self.folder)
        self.addCleanup(job.end)
        return job

    def check_loads(self, value, step):
        state = state_of(0, 0)
        checkpoint.load(self.path, state)
        self.assertEqual((state.step, set(state.model.weight.flatten().tolist())), (step, {float(value)}))

    def start_and_stop(self, point):
        """A job that has saved, and is stopped in its next save of the same step."""
        first = self.job()
        self.assertEqual(first.save(self.path, 1, 5), ["", ""])
        first.tell("stop before", point, ranks=(0,))
        self.assertEqual(first.ranks[0][1].recv(), "")
        first.tell("save", self.path, 2, 5)
        first.wait_until_stopped()
        return first

    def check_taken_over(self, point):
        first, second = self.start_and_stop(point), self.job()
        # The lease ends by the clock of the storage: age it, in place of a sleep.
        for lease in Path(self.path).glob("writer-*.lease"):
            os.utime(lease, (1, 1))
        self.assertEqual(second.save(self.path, 3, 5), ["", ""])
        self.check_loads(3, 5)
        first.go_on()
        for text in first.answers():
            self.assertRegex(text, "CheckpointError: saving .*(was taken over|cannot be|is missing|No such file)", point)
        self.check_loads(3, 5)
        self.assertEqual(second.save(self.path, 4, 6), ["", ""])
        self.check_loads(4, 6)
        self.assertEqual(sorted(os.listdir(self.path)), ["step-00000005", "step-00000006"])

    def test_a_writer_that_was_stopped_and_goes_on_publishes_nothing(self):
        for name in ("it has its lease", "the new one is renamed"):
            with self.subTest(name):
                self.check_taken_over(POINTS[name])
                self.setUp()

    def test_stopped_at_any_point(self):
        for name, point in POINTS.items():
            with self.subTest(name):
                self.check_taken_over(point)
                self.setUp()

    def test_the_loser_is_told_the_holder_on_all_ranks_and_writes_nothing(self):
        first, second = self.start_and_stop(POINTS["the data is synced"]), self.job()
        for lease in Path(self.path).glob("writer-*.lease"):
            os.utime(lease, (2**31, 2**31))  # Renewed just now.
        before = sorted(os.listdir(self.path))
        pid = first.ranks[0][0].pid
        for text in second.save(self.path, 3, 5) + second.save(self.path, 3, 6):
            self.assertRegex(text, rf"CheckpointError: saving .* is in use: process {pid} on \S+, since \d{{4}}-.* saves to it")
        self.assertEqual(sorted(os.listdir(self.path)), before)
        first.go_on()
        self.assertEqual(first.answers(), ["", ""])  # Its lease was not taken: it goes on.
        self.check_loads(2, 5)
        self.assertEqual(second.save(self.path, 3, 6), ["", ""])
        self.check_loads(3, 6)

    def test_a_job_that_was_killed_is_replaced_at_once(self):
        first, second = self.start_and_stop(POINTS["the old one is renamed"]), self.job()
        first.end()
        self.assertEqual(len(list(Path(self.path).glob("*.lease"))), 1)
        self.check_loads(1, 5)
        self.assertEqual(second.save(self.path, 3, 5), ["", ""])
        self.check_loads(3, 5)
        self.assertEqual(os.listdir(self.path), ["step-00000005"])


class LeaseTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = Path(folder.name)

    def test_a_lease_of_another_host_ends_when_it_is_not_renewed(self):
        with mock.patch.object(_lease, "myself", return_value=_lease.Process("elsewhere/1/2", 1, "1")):
            _lease.acquire(self.path, "a" * 16, "other")
        text = error_of(_lease.acquire, self.path, "b" * 16, "me")
        self.assertRegex(text, "is in use: process 1 on elsewhere, since .* ends after 120 seconds")
        self.assertEqual(os.listdir(self.path), [f"writer-{'a' * 16}.lease"])
        os.utime(self.path / f"writer-{'a' * 16}.lease", (1, 1))
        _lease.acquire(self.path, "b" * 16, "me").release()
        self.assertEqual(os.listdir(self.path), [])

    def test_what_is_no_lease_counts_until_its_time_is_over(self):
        (self.path / f"writer-{'a' * 16}.lease").write_text("{")
        os.mkfifo(self.path / f"writer-{'0' * 16}.lease")
        self.assertIn("is in use: writer-0000000000000000.lease", error_of(_lease.acquire, self.path, "b" * 16, "me"))
        for lease in self.path.iterdir():
            os.utime(lease, (1, 1))
        _lease.acquire(self.path, "b" * 16, "me").release()

    def test_a_number_of_seconds_that_is_none_is_refused(self):
        for text in ("x", "0", "-1", "inf", "nan"):
            with mock.patch.dict(os.environ, {_lease._VARIABLE: text}):
                self.assertIn("must be a number of seconds > 0", error_of(checkpoint.save, self.path, state_of(1, 1)))
