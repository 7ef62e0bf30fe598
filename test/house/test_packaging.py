"""The package as others install it: a wheel with its metadata and commands, and types that a program outside can check."""

import contextlib
import importlib
import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import zipfile
from email.parser import Parser
from pathlib import Path
from unittest import mock

import pytest

import torch_ragged
from torch_ragged._command_line import main as command_line

ROOT = Path(__file__).parents[2]

USER = """
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from torch_ragged import RaggedShard, checkpoint, transfer
from torch_ragged.fsdp import FSDPModule, fully_shard, rows
from torch_ragged.optim import Muon, matrix_groups

model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
mesh = init_device_mesh("cpu", (2,))
sharded: FSDPModule = fully_shard(model, mesh=mesh, orig_param_policy=lambda name, param: rows(2))
optimizer = Muon(matrix_groups(model, lr=3e-4), lr=0.02)
units: tuple[int, ...] = RaggedShard((0,), (1, 2)).local_units
state = checkpoint.TrainState(model, optimizer)
checkpoint.save("out", state)
plan = transfer.plan(model, model)
rounds: int = plan.rounds
"""
WRONG = '\nmodel_or_text: int = RaggedShard((0,), "1, 2")\n'


def run(*command, cwd=None):
    return subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=280)


def environment_with_a_wheel(folder):
    """An environment in which the package lies in site-packages, as after ``pip install``."""
    folder = Path(folder)
    shutil.copytree(ROOT / "torch_ragged", folder / "source/torch_ragged", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source")
    options = ("--no-deps", "--no-build-isolation", "-q")
    done = run(sys.executable, "-m", "pip", "wheel", folder / "source", *options, "-w", folder)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    done = run(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
    assert done.returncode == 0, done.stderr
    (packages,) = (folder / "venv/lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    (packages / "others.pth").write_text(str(Path(importlib.util.find_spec("torch").origin).parents[1]))
    return wheel, folder / "venv/bin/python"


def metadata_of(wheel):
    with zipfile.ZipFile(wheel) as archive:
        files = {name.partition(".dist-info/")[2]: name for name in archive.namelist() if ".dist-info/" in name}
        return {name: archive.read(files[name]).decode() for name in ("METADATA", "entry_points.txt")}


class PackagingTest(unittest.TestCase):
    def test_setup_py_reads_the_settings_of_pyproject(self):
        lines = [line for line in (ROOT / "setup.py").read_text().splitlines() if line]
        self.assertEqual(lines[1:], ["from setuptools import setup", "setup()"])
        done = subprocess.run([sys.executable, "setup.py", "--version"], cwd=ROOT, capture_output=True, text=True, timeout=100)
        self.assertEqual((done.stdout.split()[-1:], done.returncode), ([torch_ragged.__version__], 0), done.stderr)

    def test_the_version_stands_in_one_file_and_in_the_change_log(self):
        self.assertIn('dynamic = ["version"]', (ROOT / "pyproject.toml").read_text())
        self.assertRegex((ROOT / "CHANGELOG.md").read_text(), rf"(?m)^## {re.escape(torch_ragged.__version__)}\b")

    def test_console_scripts_name_functions_that_are_there(self):
        scripts = re.findall(r'^torch-ragged[-\w]* = "([\w.]+):(\w+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
        self.assertEqual(len(scripts), 4)
        for module, function in scripts:
            self.assertTrue(callable(getattr(importlib.import_module(module), function)))

    def test_a_command_line_names_itself_by_the_command_that_was_typed(self):
        scripts = dict(re.findall(r'^(torch-ragged-\w+) = "([\w.]+)\._cli:main"$', (ROOT / "pyproject.toml").read_text(), re.M))
        self.assertEqual(set(scripts), {"torch-ragged-plan", "torch-ragged-checkpoint", "torch-ragged-spmd"})
        for script, module in scripts.items():
            of_one = script.replace("torch-ragged-", "torch-ragged ")
            for typed, name in (
                (f"/usr/bin/{script}", script),
                ("/usr/bin/torch-ragged", of_one),
                ("torch_ragged/__main__.py", of_one.replace("torch-ragged", "python -m torch_ragged")),
                (f"{module}/__main__.py", f"python -m {module}"),
            ):
                help_text, wrong = io.StringIO(), io.StringIO()
                main = importlib.import_module(f"{module}._cli").main
                with mock.patch.object(sys, "argv", [typed]), contextlib.redirect_stdout(help_text):
                    self.assertRaises(SystemExit, main, ["--help"])
                with mock.patch.object(sys, "argv", [typed]), contextlib.redirect_stderr(wrong):
                    with contextlib.suppress(SystemExit):  # argparse's own way; the planner returns 2.
                        main(["--wrong"])
                self.assertTrue(help_text.getvalue().startswith(f"usage: {name} "), help_text.getvalue())
                self.assertIn(f"{name}: error: ", wrong.getvalue())
                for other in {script, of_one, f"python -m {module}"} - {name}:
                    self.assertNotIn(other, help_text.getvalue() + wrong.getvalue())

    def test_one_command_has_the_three_others(self):
        out, err = io.StringIO(), io.StringIO()
        with mock.patch.object(sys, "argv", ["torch-ragged"]), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            self.assertEqual(command_line(["plan", "llama-3-70b", "--ranks", "8"]), 0)
            self.assertEqual(command_line(["spmd", "check"]), 2)
            self.assertEqual(command_line(["checkpoint", "verify", "no folder"]), 1)
            self.assertRaises(SystemExit, command_line, ["plans"])
        self.assertIn("llama-3-70b", out.getvalue())
        self.assertIn("torch-ragged spmd: error: ", err.getvalue())
        self.assertIn("argument command: invalid choice: 'plans'", err.getvalue())

    def test_no_text_names_a_package_that_no_registry_has(self):
        """Until the package is published, pip finds it in a clone only."""
        texts = [
            *ROOT.glob("*.md"),
            *(p for folder in ("docs", "examples", "torch_ragged") for p in (ROOT / folder).rglob("*")),
        ]
        wrong = [
            str(p)
            for p in texts
            if p.suffix in (".md", ".py", ".rst") and re.search(r"pip install '?torch_ragged", p.read_text())
        ]
        self.assertEqual(wrong, [])

    def test_a_command_line_ends_quietly_if_nobody_reads_on(self):
        command = [sys.executable, "-m", "torch_ragged.offline", "llama-3-70b", "--ranks", "8"]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
        process.stdout.close()  # As ``| head`` does after its last line.
        with process.stderr:
            self.assertEqual(process.stderr.read(), b"")
        self.assertEqual(process.wait(timeout=60), 0)

    @pytest.mark.slow
    def test_a_wheel_has_what_a_registry_shows_and_its_types_are_seen_from_outside(self):
        with tempfile.TemporaryDirectory() as folder:
            wheel, python = environment_with_a_wheel(folder)
            files = metadata_of(wheel)
            metadata = Parser().parsestr(files["METADATA"])
            self.assertEqual(metadata["Version"], torch_ragged.__version__)
            self.assertEqual(metadata.get_payload().strip(), (ROOT / "README.md").read_text().strip())
            self.assertEqual(metadata["Description-Content-Type"], "text/markdown")
            self.assertIn("Typing :: Typed", metadata.get_all("Classifier"))
            self.assertTrue(metadata.get_all("Project-URL"))
            self.assertIn("torch-ragged-plan", files["entry_points.txt"])
            with zipfile.ZipFile(wheel) as archive:
                self.assertIn("torch_ragged/py.typed", archive.namelist())
            (Path(folder) / "user.py").write_text(USER)
            (Path(folder) / "wrong.py").write_text(USER + WRONG)
            self.check_with_mypy(folder, python)
            if importlib.util.find_spec("pyright"):
                self.check_with_pyright(folder, python)

    @pytest.mark.slow
    def test_the_quickstart_runs_from_an_installed_wheel(self):
        with tempfile.TemporaryDirectory() as folder:
            _, python = environment_with_a_wheel(folder)
            shutil.copy(ROOT / "examples/quickstart.py", folder)
            torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
            where = run(python, "-c", "import torch_ragged; print(torch_ragged.__file__)", cwd=folder)
            self.assertIn(f"{folder}/venv/lib", where.stdout)
            done = run(python, *torchrun, "quickstart.py", "--steps", 3, cwd=folder)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertTrue((Path(folder) / "out/loss.png").stat().st_size)

    @pytest.mark.slow
    def test_the_commands_of_the_dockerfile_run(self):
        """In an empty environment, and folders of their own in place of the image's. pip's own index stands for torch's."""
        lines = (ROOT / "Dockerfile").read_text().splitlines()
        version = dict(line.split("=", 1) for line in lines if line.startswith("ARG "))["ARG TORCH"]
        with tempfile.TemporaryDirectory() as folder:
            done = run(sys.executable, "-m", "venv", f"{folder}/venv")
            self.assertEqual(done.returncode, 0, done.stderr)
            for line in lines:
                words = line.split()
                if words[:1] == ["COPY"]:
                    for name in words[1:-1]:
                        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
                        copy(ROOT / name, Path(folder) / name)
                elif words[:1] == ["RUN"]:
                    command = line.removeprefix("RUN ").replace("${TORCH}", version).replace(" --index-url ${TORCH_INDEX}", "")
                    self.assertNotIn("${", command)
                    done = run("bash", "-ec", f"PATH={folder}/venv/bin:$PATH; {command}", cwd=folder)
                    self.assertEqual(done.returncode, 0, f"{command}\n{done.stdout}{done.stderr}")
            (command,) = (line.removeprefix("CMD ") for line in lines if line.startswith("CMD "))
            program, *arguments = json.loads(command)
            done = run(f"{folder}/venv/bin/{program}", *arguments, "--steps", 3, cwd=folder)
            self.assertEqual(done.returncode, 0, done.stderr)

    def check_with_mypy(self, folder, python):
        mypy = (sys.executable, "-m", "mypy", "--strict", "--python-executable", python, "--follow-imports", "silent")
        done = run(*mypy, "user.py", cwd=folder)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        done = run(*mypy, "wrong.py", cwd=folder)
        self.assertIn("[assignment]", done.stdout)
        self.assertIn("[arg-type]", done.stdout)

    def check_with_pyright(self, folder, python):
        done = run(sys.executable, "-m", "pyright", "--pythonpath", python, "user.py", cwd=folder)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        done = run(sys.executable, "-m", "pyright", "--pythonpath", python, "wrong.py", cwd=folder)
        self.assertIn("reportArgumentType", done.stdout)
