"""A rank that torchrun ends tells where it was and which rank has failed, and ends as it would without that."""

import json
import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import pytest
import terminated
from killed import ENDS, KINDS, log_of

ROOT = Path(__file__).resolve().parents[2]


class TerminationTest(unittest.TestCase):
    def test_a_program_of_one_rank_ends_as_without_it(self):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, terminated.__file__, folder]
            done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=150)
        found = {name: rest for name, *rest in map(json.loads, done.stdout.splitlines())}
        self.assertEqual(set(found), {program.__name__ for program in terminated.PROGRAMS}, done.stderr)
        for program, (code, pattern) in terminated.PROGRAMS.items():
            with self.subTest(program.__name__):
                self.assertEqual(found[program.__name__][0], code, found[program.__name__][1])
                self.assertRegex(found[program.__name__][1], pattern)

    def check(self, kind):
        logs, torchrun, codes = log_of(kind)
        told = [log for log in (logs[0], logs[2]) if re.search(KINDS[kind].log, log)]
        self.assertTrue(told, (logs, torchrun))
        for rank, log in ((0, logs[0]), (2, logs[2])):
            # The first to find out ends itself; torchrun ends the others.
            self.assertTrue(ENDS in log or "PeerError" in log or log in told, (rank, log))
            self.assertIn(codes[rank], (7,) if kind == "handler" else (-15, 1))
        if KINDS[kind].exits:
            self.assertEqual(codes[1], KINDS[kind].exits)

    def test_ranks_name_the_one_that_was_killed(self):
        self.check("backward")

    @pytest.mark.slow
    def test_ranks_name_the_one_that_failed(self):
        for kind in KINDS:
            if kind != "backward":
                with self.subTest(kind):
                    self.check(kind)


if __name__ == "__main__":
    unittest.main()
