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


# Runs the program on two ranks, as torchrun would, once for each flag. They are forks, so torch is imported once.
FORKS = """
import os, runpy, sys, traceback
import torch.distributed as dist
import torch.distributed.tensor.debug

program, *flags = sys.argv[1:]
for flag in flags:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ.update(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(server.port))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    ranks = []
    for rank in range(2):
        pid = os.fork()
        if not pid:
            os.environ["RANK"], sys.argv[:] = str(rank), [program, flag]
            try:
                runpy.run_path(program, run_name="__main__")
                sys.stdout.flush()
                os._exit(0)  # The server's thread is the parent's: the end of the interpreter would wait for it.
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        ranks.append(pid)
    assert not any(os.waitpid(pid, 0)[1] for pid in ranks)
"""


def results(*flags):
    """What the program prints with each flag."""
    command = [sys.executable, "-c", FORKS, str(PROGRAM), *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(torch_ragged.__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    lines = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or len(lines) != len(flags):
        raise AssertionError(done.stdout + done.stderr)
    return list(map(json.loads, lines))


class PlainDTensorTest(unittest.TestCase):
    def test_same_results_and_collectives(self):
        without, with_import = results("--plain", "--ragged")
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
