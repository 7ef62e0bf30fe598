"""A background save ends before its program does, and one that fails makes the exit code 1, however the program ends."""

import atexit
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import checkpoint_ends
import pytest
import torch
import torch.distributed as dist
from checkpoint_ends import PROGRAMS
from checkpoint_model import make_state, train, values
from common import run_ranks
from delays import delays

from torch_ragged import checkpoint
from torch_ragged.checkpoint import _background

ROOT = Path(__file__).resolve().parents[2]


def under_delays(folder, seeds):
    """Saves in flight with all that may follow one, each rank with delays of its own: what was saved is right."""
    state, group = make_state(0), dist.new_group(backend="gloo")
    for seed in seeds:
        path, want, waited = f"{folder}/{seed}", {}, []
        with delays(seed):
            for step in (1, 2):
                state.step = step - 1
                train(state, 1)
                want[step] = values(state)
                waited.append(checkpoint.async_save(path, state, process_group=group))
            checkpoint.keep(path, 2, process_group=group)
            fresh = make_state(1)
            checkpoint.load(path, fresh, process_group=group)
            checkpoint.async_save(f"{path}/other", state, process_group=group)
            train(state, 1)
            want[3] = values(state)
            checkpoint.save(path, state)
        assert [future.result().name for future in waited] == ["step-00000001", "step-00000002"]
        for step, loaded in ((2, fresh), *((step, make_state(1)) for step in want)):
            if loaded is not fresh:
                checkpoint.load(f"{path}/step-{step:08d}", loaded)
            found = values(loaded)
            assert found.keys() == want[step].keys()
            assert [name for name in found if not torch.equal(found[name], want[step][name])] == [], (seed, step)


class EndsTest(unittest.TestCase):
    def check(self, programs):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, checkpoint_ends.__file__, folder, *(program.__name__ for program in programs)]
            environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'test/common'}", "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
            found = {name: rest for name, *rest in map(json.loads, done.stdout.splitlines())}
        self.assertEqual(list(found), [program.__name__ for program in programs], done.stderr)
        for program in programs:
            with self.subTest(program.__name__):
                codes, steps, pattern = PROGRAMS[program]
                self.assertEqual(found[program.__name__][:2], [codes, [f"step-{step:08d}" for step in steps]])
                for error in found[program.__name__][2]:
                    self.assertRegex(error, pattern)

    QUICK = (
        checkpoint_ends.groups_are_destroyed_by_an_older_name,
        checkpoint_ends.a_load_and_keep_follow,
        checkpoint_ends.it_fails,
    )

    def test_it_ends_before_the_program_and_a_failure_is_told(self):
        self.check(self.QUICK)

    @pytest.mark.slow
    def test_each_way_in_which_a_program_may_end(self):
        self.check([program for program in PROGRAMS if program not in self.QUICK])

    def test_a_child_that_ends_twice_tells_once(self):
        child = mock.patch.object(multiprocessing, "parent_process", return_value=object())
        with mock.patch.dict(_background._unasked, {1: 7}), mock.patch.object(atexit, "register"), child:
            with self.assertLogs("torch_ragged") as logs, self.assertRaises(SystemExit):
                _background._at_the_end()
            with self.assertNoLogs("torch_ragged"):
                _background._at_the_end()
        self.assertIn("exit code 1: async_save failed at step 7", logs.output[0])

    def test_delays_of_ranks_change_nothing(self):
        with tempfile.TemporaryDirectory() as folder:
            run_ranks(2, under_delays, folder, range(1))

    @pytest.mark.slow
    def test_delays_of_ranks_change_nothing_for_50_seeds(self):
        with tempfile.TemporaryDirectory() as folder:
            run_ranks(2, under_delays, folder, range(1, 51), timeout=1000)


if __name__ == "__main__":
    unittest.main()
