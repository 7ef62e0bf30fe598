"""A rank that torchrun ends tells where it was and which rank has failed, and ends as it would without that."""

import json
import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import pytest
import terminated
from common import context_of_ranks
from killed import ENDS, KINDS, log_of

from torch_ragged._ranks.termination import _this_rank

ROOT = Path(__file__).resolve().parents[2]


class TerminationTest(unittest.TestCase):
    def check_programs(self, run):
        with tempfile.TemporaryDirectory() as folder:
            run(folder)
            codes = json.loads((Path(folder) / "codes").read_text())
            for program, (code, pattern) in terminated.PROGRAMS.items():
                with self.subTest(program.__name__):
                    text = (Path(folder) / program.__name__).read_text()
                    self.assertEqual(codes[program.__name__], code, text)
                    self.assertRegex(text, pattern)

    def test_a_program_of_one_rank_ends_as_without_it(self):
        def run(folder):
            process = context_of_ranks().Process(target=terminated.main, args=(folder,))
            process.start()
            process.join(150)

        self.check_programs(run)

    @pytest.mark.slow
    def test_an_interpreter_of_one_rank_ends_as_without_it(self):
        """As above, and Python itself ends too, while threads may be in calls of C++."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

        def run(folder):
            subprocess.run([sys.executable, terminated.__file__, folder], env=environment, timeout=150, check=True)

        self.check_programs(run)

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

    def test_before_there_is_a_group_the_launchers_rank_is_told(self):
        for variables, rank in (({"RANK": "3"}, 3), ({}, -1)):
            others = {name: value for name, value in os.environ.items() if name != "RANK"}
            with mock.patch.dict(os.environ, {**others, **variables}, clear=True):
                self.assertEqual(_this_rank(), rank)

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
