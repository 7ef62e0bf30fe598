"""torchrun on two nodes: the example trains, and ends with a clear error if the network, a rank or the disk fails; then one
node goes on from the last checkpoint."""

import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(Path(__file__).parent))
from nodes import Nodes, why_no_nodes  # noqa: E402

STEPS = 12
TIMEOUT = 20
"""Of collectives, in seconds."""
LONGEST = 150
"""A job that has not ended so many seconds after a fault hangs."""


class Job:
    """One torchrun per node, with two ranks each."""

    def __init__(self, nodes, checkpoints, *arguments):
        self.files = [tempfile.TemporaryFile("w+") for _ in nodes.addresses]
        self.launchers = []
        for node, file in enumerate(self.files):
            command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
            command += ["--node-rank", str(node), "--master-addr", nodes.addresses[0], "--master-port", "29400"]
            command += [str(ROOT / "examples/train_moe.py"), "--batch", "4", "--eval-every", "1000", "--timeout", str(TIMEOUT)]
            command += ["--checkpoint", str(checkpoints), "--save-every", "3", *map(str, arguments)]
            environment = {"PYTHONPATH": str(ROOT)}
            self.launchers.append(nodes.popen(node, *command, env=environment, stdout=file, stderr=subprocess.STDOUT))

    def ranks(self, node):
        """The process ids of a node's ranks."""
        found = subprocess.run(["pgrep", "-P", str(self.launchers[node].pid)], capture_output=True, text=True)
        return [int(pid) for pid in found.stdout.split()]

    def wait(self):
        """The exit status and the output of each node."""
        codes = [launcher.wait(LONGEST) for launcher in self.launchers]
        texts = []
        for file in self.files:
            file.seek(0)
            texts.append(file.read())
        return codes, texts


def wait_for_checkpoint(folder, step, job):
    deadline = time.monotonic() + 300
    while not (folder / f"step-{step:08d}").exists():
        assert time.monotonic() < deadline, f"no checkpoint of step {step}: {job.wait()}"
        assert all(launcher.poll() is None for launcher in job.launchers), job.wait()
        time.sleep(0.05)


@pytest.mark.slow
@unittest.skipIf(why_no_nodes(), f"two nodes on one machine: {why_no_nodes()}")
class MultiNodeTest(unittest.TestCase):
    def setUp(self):
        self.nodes = self.enterContext(Nodes())
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.checkpoints = self.folder / "checkpoints"

    def fail(self, fault, *arguments):
        """Inject a fault after the second checkpoint; what each node wrote, when both have ended."""
        job = Job(self.nodes, self.checkpoints, "--steps", 1000, "--out", self.folder, *arguments)
        wait_for_checkpoint(self.checkpoints, 6, job)
        fault(job)
        codes, texts = job.wait()
        self.assertTrue(all(codes), texts)
        for node in range(2):
            pids = subprocess.run(["ip", "netns", "pids", self.nodes.names[node]], capture_output=True, text=True).stdout
            self.assertEqual(pids.split(), [], "a process has outlived its job")
        return texts

    def resume(self):
        """Go on with one rank, without the network, from the last checkpoint."""
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
        last = max(int(folder.name.removeprefix("step-")) for folder in self.checkpoints.glob("step-????????"))
        command += [str(ROOT / "examples/train_moe.py"), "--batch", "4", "--steps", str(last + 1), "--eval-every", "1000"]
        command += ["--resume", str(self.checkpoints), "--out", str(self.folder)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn(f"resumed step {last} of 4 ranks on 1", done.stdout)

    def test_a_job_on_two_nodes_ends_well(self):
        job = Job(self.nodes, self.checkpoints, "--steps", STEPS, "--out", self.folder)
        codes, texts = job.wait()
        self.assertEqual(codes, [0, 0], texts)
        self.resume()

    def test_a_cut_link_ends_both_nodes_and_one_goes_on(self):
        texts = self.fail(lambda job: self.nodes.drop(100))
        for text in texts:
            self.assertRegex(text, "(PeerError|CheckpointError): .*(not reachable|store|has not answered|timed out|Timed out)")
        self.resume()

    def test_a_killed_rank_is_named_on_the_other_node(self):
        texts = self.fail(lambda job: os.kill(job.ranks(1)[0], signal.SIGKILL))
        self.assertRegex(texts[0], r"(PeerError|CheckpointError): .*rank [23] (died|is not reachable)")
        self.assertRegex(texts[1], "(Signal 9|SIGKILL)")
        self.resume()

    def test_a_stopped_rank_is_named_on_the_other_node(self):
        texts = self.fail(lambda job: os.kill(job.ranks(1)[0], signal.SIGSTOP))
        self.assertRegex(texts[0], r"(PeerError|CheckpointError): .*rank 2 (is stopped|lives and has not answered)")
        self.resume()

    def test_a_lossy_network_slows_a_job_down_only(self):
        job = Job(self.nodes, self.checkpoints, "--steps", 9, "--out", self.folder)
        wait_for_checkpoint(self.checkpoints, 6, job)
        self.nodes.drop(30)
        time.sleep(2)
        self.nodes.heal()
        codes, texts = job.wait()
        self.assertEqual(codes, [0, 0], texts)
        self.resume()

    def test_a_full_disk_ends_both_nodes_and_the_last_checkpoint_stays(self):
        self.checkpoints.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600m", "tmpfs", str(self.checkpoints)], check=True)
        self.addCleanup(subprocess.run, ["umount", "-l", str(self.checkpoints)])

        def fill(job):
            with open(self.checkpoints / "other", "wb") as file:
                with self.assertRaisesRegex(OSError, "No space left"):
                    while True:
                        file.write(bytes(1 << 16))
                        file.flush()

        texts = self.fail(fill)
        for text in texts:
            self.assertRegex(text, "CheckpointError: .*No space left on device")
        os.remove(self.checkpoints / "other")
        self.resume()


if __name__ == "__main__":
    unittest.main()
