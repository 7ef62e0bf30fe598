"""The tutorials of examples/: each runs to its end, draws its picture, and its result is what it says.

The quickstart is taken from the README, as a reader would copy it. train_moe.py and elastic.py are in test_example.py.
"""

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
OURS = "from torch_ragged.fsdp import fully_shard"
FSDP2 = "from torch.distributed.fsdp import fully_shard"


def quickstart():
    """The script of the README."""
    (script,) = re.findall(r"```python\n(import argparse\n.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return script


def run(folder, ranks, script, *arguments):
    """What a script prints on some ranks, in a folder; it must end well."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), str(script)]
    command += map(str, arguments)
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def is_png(path):
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5_000


class QuickstartTest(unittest.TestCase):
    def run_copied(self, ranks, text, steps=2):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "train.py").write_text(text)
            run(folder, ranks, "train.py", "--steps", steps)
            self.assertTrue(is_png(Path(folder) / "out/loss.png"))

    def test_the_script_of_the_readme_runs_in_an_empty_folder(self):
        self.run_copied(2, quickstart())

    def test_it_is_the_example_and_is_short(self):
        self.assertEqual(quickstart(), (EXAMPLES / "quickstart.py").read_text())
        self.assertLessEqual(len([line for line in quickstart().splitlines() if line]), 37)

    def test_without_torchrun_it_says_how_it_is_started(self):
        """In place of torch's error of a missing environment variable."""
        environment = {name: text for name, text in os.environ.items() if not name.startswith("TORCHELASTIC")}
        command = [sys.executable, str(EXAMPLES / "quickstart.py")]
        environment["PYTHONPATH"] = str(ROOT)
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
        self.assertEqual(done.returncode, 2, done.stderr)
        told = "quickstart.py: error: run: torchrun --nproc-per-node 2 examples/quickstart.py\n"
        self.assertTrue(done.stderr.endswith(told) and "Traceback" not in done.stderr, done.stderr)

    @pytest.mark.slow
    def test_it_runs_on_other_numbers_of_ranks_and_on_fsdp2_with_the_import_changed(self):
        self.run_copied(1, quickstart())
        self.run_copied(4, quickstart())
        self.assertEqual(quickstart().count(OURS), 1)
        self.run_copied(2, quickstart().replace(OURS, FSDP2))

    @pytest.mark.slow
    def test_it_learns(self):
        with tempfile.TemporaryDirectory() as folder:
            text = quickstart() + "\nassert sum(losses[-10:]) / 10 < 0.7 * losses[0], losses\n"
            (Path(folder) / "train.py").write_text(text)
            run(folder, 2, "train.py", "--steps", 50)


class EndingTest(unittest.TestCase):
    def test_each_has_a_sentence_that_ends_with_the_path_of_its_picture(self):
        for path in EXAMPLES.glob("*.py"):
            text = path.read_text()
            is_reference = path.name == "same_bits.py"  # It prints lines to compare.
            if ('__name__ == "__main__"' in text or path.name == "quickstart.py") and not is_reference:
                self.assertRegex(text, r'drawn in [^"\n]+"\s*\)', path.name)


@pytest.mark.slow
class TutorialTest(unittest.TestCase):
    def test_each_has_help_that_says_how_to_start_it(self):
        for name in ("moe_muon", "checkpoint_reshard", "elastic", "train_moe", "qwen3_plan"):
            command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--help"]
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn(f"torchrun --nproc-per-node 4 examples/{name}.py", done.stdout)
            self.assertIn("--steps", done.stdout)

    def test_one_plan_gives_the_losses_of_one_process(self):
        for options in ((), ("--static",)):
            with tempfile.TemporaryDirectory() as folder:
                printed = run(folder, 8, EXAMPLES / "one_plan.py", "--steps", 3, *options)
            self.assertLess(float(re.search(r"largest difference (\S+)\)", printed)[1]), 1e-5)

    def test_a_rank_is_killed_and_the_losses_are_those_of_one_process(self):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, str(EXAMPLES / "survive.py"), "--steps", "6", "--kill", "1:3", "--out", folder]
            done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
            self.assertEqual(done.returncode, 0, done.stderr)
            told = "rank 1 was killed in step 3, ranks [0, 2, 3] went on: the losses of all 6 steps are equal to those of one"
            self.assertIn(told, done.stdout)
            self.assertTrue(is_png(Path(folder) / "survive.png"))

    def test_experts_give_the_same_losses_on_any_number_of_ranks(self):
        """Tokens travel to other ranks, so a wrong divisor of gradients or a lost token would show."""
        losses = []
        with tempfile.TemporaryDirectory() as folder:
            for ranks, expert_ranks in ((1, 1), (4, 2), (4, 4)):
                options = ("--steps", 4, "--batch", 4, "--expert-ranks", expert_ranks, "--experts", 4, "--out", folder)
                printed = run(folder, ranks, EXAMPLES / "moe_muon.py", *options)
                losses.append([float(loss) for loss in re.findall(r"last loss ([\d.]+)", printed)])
            self.assertTrue(is_png(Path(folder) / "moe_muon.png"))
        for found in losses[1:]:
            self.assertAlmostEqual(found[0], losses[0][0], delta=2e-3)  # Muon computes in bfloat16.
            self.assertAlmostEqual(found[1], losses[0][1], delta=2e-4)

    def test_a_checkpoint_goes_on_under_another_layout_on_other_ranks(self):
        script = EXAMPLES / "checkpoint_reshard.py"
        with tempfile.TemporaryDirectory() as folder:
            options = ("--steps", 4, "--batch", 4, "--out", folder)
            run(folder, 4, script, *options)
            for ranks, layout in ((1, "rows"), (2, "zero2"), (2, "hsdp")):
                printed = run(folder, ranks, script, *options, "--resume", "--layout", layout)
                self.assertIn(f"saved by 4 ranks, resumed on {ranks} as {layout} at step 2", printed)
            self.assertTrue(is_png(Path(folder) / "loss.png"))

    def test_fine_tuning_explains_itself_without_transformers_and_names_it_when_it_runs(self):
        code = "import runpy, sys; sys.modules['transformers'] = None; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], "
        code += "run_name='__main__')"
        named = "pip install '.[finetune]'"
        cases = [("finetune_hf", ["--help"], 0, "--lora-rank"), ("qwen3_plan", ["--help"], 0, "--steps")]
        for name, options, status, told in (*cases, ("finetune_hf", [], 1, named), ("qwen3_plan", [], 1, named)):
            command = [sys.executable, "-c", code, str(EXAMPLES / f"{name}.py"), *options]
            environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{EXAMPLES}"}
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
            self.assertEqual(done.returncode, status, done.stderr)
            self.assertIn(told, done.stdout + done.stderr)
            self.assertNotIn("Traceback", done.stderr)

    @unittest.skipUnless(importlib.util.find_spec("transformers"), "needs transformers: the extra finetune")
    def test_an_unchanged_qwen3_trains_and_is_what_from_pretrained_reads(self):
        with tempfile.TemporaryDirectory() as folder:
            printed = run(folder, 4, EXAMPLES / "qwen3_plan.py", "--steps", 10)
            told = r"loss (\S+) -> (\S+); .* the same text, and logits that differ by (\S+) at most; drawn in (\S+)"
            before, after, difference, picture = re.search(told, printed.splitlines()[-1]).groups()
            self.assertLess(float(after), float(before) - 0.5)
            self.assertLess(float(difference), 1e-5)
            self.assertTrue(is_png(Path(folder) / picture))

    @unittest.skipUnless(importlib.util.find_spec("transformers"), "needs transformers: the extra finetune")
    def test_fine_tuning_is_what_from_pretrained_reads(self):
        script = EXAMPLES / "finetune_hf.py"
        for method in ("full", "lora"):
            with tempfile.TemporaryDirectory() as folder:
                printed = run(folder, 2, script, "--method", method, "--steps", 10, "--batch", 4, "--out", folder)
                before, after = re.search(r"docstrings ([\d.]+) -> ([\d.]+)", printed).groups()
                self.assertLess(float(after), float(before))
                self.assertIn(f"has {after} in one process", printed)
                self.assertTrue(is_png(Path(folder) / "finetune.png"))
