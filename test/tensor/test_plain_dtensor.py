"""Importing torch_ragged changes nothing for plain DTensor programs: same values, placements and collectives."""

import json
import os
import subprocess
import sys
import unittest
from pathlib import Path

import torch

import torch_ragged

PROGRAM = Path(__file__).with_name("plain_dtensor_program.py")


def results(*flags):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(PROGRAM), *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(torch_ragged.__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise AssertionError(done.stdout + done.stderr)
    return json.loads(lines[0].removeprefix("RESULT "))


class PlainDTensorTest(unittest.TestCase):
    def test_same_results_and_collectives(self):
        without, with_import = results(), results("--ragged")
        self.assertEqual(without, with_import)
        self.assertGreater(sum(n for *_, counts in without.values() for n in counts.values()), 10)

    def test_report_names_every_hook_with_its_patch(self):
        lines = torch_ragged.registration_report().splitlines()
        self.assertIn(torch.__version__, lines[0])
        self.assertGreater(len(lines), 5)
        for line in lines[1:]:
            self.assertRegex(line, r"^  \S.*: .* \[\d{4}-[a-z-]+\]$")

    def test_names_imported_before_the_package_know_the_placement(self):
        program = (
            "from torch.distributed.tensor import distribute_tensor, DTensor\n"
            "import torch, torch_ragged, torch.distributed as dist\n"
            "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
            "mesh = dist.device_mesh.init_device_mesh('cpu', (1,))\n"
            "t = distribute_tensor(torch.ones(2, 2), mesh, [torch_ragged.RaggedShard((0,), (2,))])\n"
            "assert t.to_local().shape == (4,)\n"
        )
        environment = {**os.environ, "PYTHONPATH": str(Path(torch_ragged.__file__).parents[1])}
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=environment)
        self.assertEqual(done.returncode, 0, done.stderr)
