"""docs/operations.md: its loggers, lines, variables, exit codes and GPUs are those of the package; its trackers run."""

import contextlib
import importlib.util
import io
import os
import re
import tempfile
import unittest
from pathlib import Path

from common import run_ranks
from doc_pages import code_of

from torch_ragged._command_line import main
from torch_ragged.fsdp.tools._peak_flops import _PEAKS

ROOT = Path(__file__).parents[2]
PAGE = "operations.md"
TEXT = (ROOT / "docs" / PAGE).read_text()
SOURCES = {path: path.read_text() for path in (ROOT / "torch_ragged").rglob("*.py")}


def section(title):
    return re.split(r"^## ", TEXT.partition(f"## {title}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


def first_cells(title):
    """The names in backticks of the first column of a section's table, without its head."""
    rows = [line for line in section(title).splitlines() if line.startswith("|")][2:]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])]


def run_tracker(package, folder):
    """The setup of the page's samples, and the block that needs ``package``, on this rank."""
    os.chdir(folder)
    blocks = code_of(PAGE)
    names = {"__name__": "__main__"}
    for block in (blocks[0], *(block for block in blocks if block.needs == package)):
        exec(compile("\n" * (block.line - 1) + block.text, f"docs/{PAGE}", "exec"), names)
    return sorted(path.name for path in Path(folder).iterdir())


def exit_code(*arguments):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            return main(arguments)
        except SystemExit as end:  # Of argparse.
            return end.code


class OperationsTest(unittest.TestCase):
    def test_loggers_are_those_of_the_package(self):
        found = set()
        for path, source in SOURCES.items():
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found |= {
                name or module
                for name in re.findall(r'^_logger = (?:logging\.)?getLogger\((?:"(.*)"|__name__)\)', source, re.M)
            }
        self.assertEqual(set(first_cells("Loggers")), found)

    def test_lines_to_alert_on_are_written_somewhere(self):
        joined = [re.sub(r'"\s*\n\s*f?"', "", source) for source in SOURCES.values()]
        lines = first_cells("Lines to alert on")
        self.assertGreater(len(lines), 10)
        for line in lines:
            self.assertTrue(any(line in source for source in joined), line)

    def test_environment_variables_are_those_that_the_package_reads(self):
        found = {name for source in SOURCES.values() for name in re.findall(r'"(TORCH_RAGGED_[A-Z_]+)"', source)}
        self.assertEqual(set(first_cells("Environment variables")), found)

    def test_commands_end_with_the_codes_of_the_page(self):
        with tempfile.TemporaryDirectory() as folder:
            self.assertEqual(exit_code("checkpoint", "verify", folder), 1)
        for wrong in (("checkpoint", "verify"), ("plan", "no such model"), ("spmd", "explain"), ("no such command",)):
            self.assertEqual(exit_code(*wrong), 2, wrong)

    def test_gpus_with_a_peak_are_those_of_the_table(self):
        known = {words[0] for words, peak in _PEAKS if peak is not None}
        self.assertEqual(set(re.findall(r"\b(?:[ABH]|MI|L)\d+[XS]?\b", section("MFU").partition("dense bfloat16")[0])), known)

    def test_trackers_get_the_rows_of_a_run(self):
        kept = {"wandb": "wandb", "tensorboard": "runs", "mlflow": "mlflow.db"}
        self.assertEqual({block.needs for block in code_of(PAGE) if block.needs}, set(kept))
        for package, name in kept.items():
            with self.subTest(package), tempfile.TemporaryDirectory() as folder:
                if importlib.util.find_spec(package):
                    self.assertIn(name, run_ranks(2, run_tracker, package, folder, timeout=120)[0])
