"""The examples: train_moe.py trains, resumes elsewhere on the same curve, and refuses bad input on every rank; elastic.py."""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import byte_data
import pytest
import torch
from common import ranks

from torch_ragged import checkpoint

ROOT = Path(__file__).parents[2]


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def example(ranks, *arguments, file="train_moe.py"):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*command, str(ROOT / "examples" / file), *map(str, arguments)]


def run_example(ranks, *arguments, file="train_moe.py"):
    command = example(ranks, *arguments, file=file)
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=ENVIRONMENT)


def ending(done):
    """The last line that a program printed: what has happened, and where its picture is."""
    return done.stdout.splitlines()[-1]


def run_without_torchrun(ranks, *arguments, file="train_moe.py"):
    """The exit code of each rank, and what it has written to stderr. The ranks start seconds earlier than under torchrun."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    environment = {**ENVIRONMENT, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment.update(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    command = [sys.executable, str(ROOT / "examples" / file), *map(str, arguments)]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    started = [
        subprocess.Popen(command, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, **pipes)
        for rank in range(ranks)
    ]
    return [(process.communicate(timeout=300)[1], process.returncode)[::-1] for process in started]


class ExampleTest(unittest.TestCase):
    @pytest.mark.slow
    def test_resume_on_other_ranks_continues_the_curve(self):
        with tempfile.TemporaryDirectory() as folder:
            out, data = Path(folder), Path(folder) / "data"
            data.mkdir()
            for index in range(30):
                (data / f"{index}.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60)
            common = ("--data", data, "--batch", 4, "--eval-every", 1, "--granularity", "blocks:32")
            saving = ("--checkpoint", out / "ckpt", "--save-every", 1)
            whole = run_example(2, *common, "--steps", 3, *saving, "--out", out / "whole")
            self.assertEqual(whole.returncode, 0, whole.stderr)
            self.assertIn("padding", json.loads((out / "whole" / "report.json").read_text())["plans"]["blocks.0"])
            self.assertRegex(ending(whole), r"^trained on 2 ranks, saved in .*; drawn in .*/whole/loss.png$")
            saved = sorted((out / "ckpt").iterdir())
            self.assertEqual([folder.name for folder in saved], ["step-00000002", "step-00000003"])  # --keep 2
            shutil.rmtree(saved[-1])
            resumed = run_example(1, *common, "--steps", 3, "--resume", out / "ckpt", "--out", out / "second")
            self.assertEqual(resumed.returncode, 0, resumed.stderr)
            told = r"^saved on 2 ranks at step 2, resumed on 1: held-out loss (\S+) there, (\S+) here; .*/loss.png$"
            before, after = map(float, re.search(told, ending(resumed)).groups())
            self.assertAlmostEqual(before, after, delta=2e-6)
            want, got = (json.loads((out / name / "report.json").read_text())["history"] for name in ("whole", "second"))
            self.assertEqual(got["resumed_at"], [2])
            torch.testing.assert_close(torch.tensor(got["train"]), torch.tensor(want["train"]), rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(torch.tensor(got["held_out"]), torch.tensor(want["held_out"]), rtol=1e-4, atol=1e-4)
            self.assertGreater((out / "second" / "loss.png").stat().st_size, 10_000)

    @pytest.mark.slow
    def test_every_optimizer_trains_and_resumes(self):
        with tempfile.TemporaryDirectory() as folder:
            out, data = Path(folder), Path(folder) / "data"
            data.mkdir()
            (data / "one.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 2000)
            for name in ("muon", "adam8bit", "shampoo"):
                common = ("--data", data, "--batch", 4, "--eval-every", 1, "--optimizer", name, "--warmup", 1)
                first = run_example(2, *common, "--steps", 3, "--checkpoint", out / name, "--out", out / "first")
                self.assertEqual(first.returncode, 0, first.stderr)
                resumed = run_example(1, *common, "--steps", 5, "--resume", out / name, "--out", out / "second")
                self.assertEqual(resumed.returncode, 0, resumed.stderr)
                losses = json.loads((out / "second" / "report.json").read_text())["history"]["held_out"]
                self.assertLess(losses[-1], losses[0] - 0.5, name)

    @pytest.mark.slow
    def test_killed_at_any_moment_it_goes_on_from_the_last_complete_checkpoint(self):
        with tempfile.TemporaryDirectory() as folder:
            out, data = Path(folder), Path(folder) / "data"
            data.mkdir()
            for index in range(30):
                (data / f"{index}.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60)
            common = ("--data", data, "--batch", 4, "--eval-every", 100, "--checkpoint", out / "ckpt", "--save-every", 1)
            command = example(2, *common, "--steps", 1000, "--keep", 2, "--out", out)
            run = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
            while checkpoint.latest(out / "ckpt") is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.fail(f"it ended with {run.wait(0.1)}")
            ranks = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
            self.assertEqual(len(ranks), 2)
            for pid in (run.pid, *map(int, ranks)):
                os.kill(pid, signal.SIGKILL)
            run.wait()
            step = int(checkpoint.latest(out / "ckpt").name.removeprefix("step-"))
            resumed = run_example(1, *common, "--steps", step + 2, "--resume", out / "ckpt", "--out", out)
            self.assertEqual(resumed.returncode, 0, resumed.stderr)
            history = json.loads((out / "report.json").read_text())["history"]
            self.assertEqual((history["resumed_at"][0] >= step, history["steps"][-1]), (True, step + 2))

    @pytest.mark.slow
    def test_bad_input_is_an_error_on_every_rank(self):
        with tempfile.TemporaryDirectory() as folder:
            foreign = Path(folder)
            (foreign / "weights.pt").write_text("something else")
            for code, errors in run_without_torchrun(2, "--resume", foreign, "--out", foreign / "out"):
                self.assertNotEqual(code, 0)
                self.assertEqual(errors.count("holds no complete checkpoint"), 1, errors)
            self.assertFalse((foreign / "out").exists())

    @pytest.mark.slow
    def test_elastic_training_is_that_of_an_uninterrupted_run(self):
        done = run_example(4, "--steps", 2, file="elastic.py")
        self.assertEqual(done.returncode, 0, done.stderr)
        steps = re.findall(r"step +(\d+) on (\d) ranks: loss ([\d.]+), uninterrupted ([\d.]+), .* \[(.*)\]", done.stdout)
        self.assertEqual([(step, ranks) for step, ranks, *_ in steps], list(zip("123456", "443344")))
        self.assertEqual(len({loss for *_, loss, _, _ in steps}), 6)
        self.assertEqual([text.split(", ")[3] == "0" for *_, text in steps], [False] * 2 + [True] * 2 + [False] * 2)
        for _, _, loss, expected, _ in steps:
            self.assertAlmostEqual(float(loss), float(expected), delta=2e-6)

    def test_data_folders(self):
        with tempfile.TemporaryDirectory() as folder:
            with self.assertRaisesRegex(ValueError, "only 0 bytes"):
                byte_data.load_bytes(folder)
            with self.assertRaisesRegex(ValueError, "no such folder"):
                byte_data.load_bytes(folder + "/nothing")
            (Path(folder) / "one.txt").write_text("abc" * 20_000)
            train, held_out = byte_data.load_bytes(folder)
            self.assertEqual((train.numel(), held_out.numel()), (57_000, 3_000))
            self.assertAlmostEqual(byte_data.unigram_entropy(train, held_out), 1.1, delta=0.02)
        parts = [byte_data.ByteData(train, 16, 12, seed=3) for _ in range(3)]
        shares = [data.next_batch(rank, 3)[0] for rank, data in enumerate(parts)]
        self.assertTrue(torch.equal(torch.cat(shares), byte_data.ByteData(train, 16, 12, seed=3).next_batch(0, 1)[0]))

    @ranks(3)
    def test_one_process_and_three_ranks_print_the_same_lines():
        path = ROOT / "examples" / "same_bits.py"
        example = importlib.util.module_from_spec(spec := importlib.util.spec_from_file_location("example", path))
        spec.loader.exec_module(example)
        model = example.make_model()
        expected = list(example.one_process(model, example.adamw(model)))
        assert list(example.many_ranks(example.make_model(), example.adamw)) == expected
