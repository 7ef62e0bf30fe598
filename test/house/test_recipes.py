"""docs/recipes.md: each recipe runs behind the setup that the page shows, in a file of its own; each task has a heading."""

import os
import re
import tempfile
import unittest
from pathlib import Path

import pytest
from common import run_ranks
from doc_pages import code_of

PAGE = "recipes.md"
TEXT = (Path(__file__).parents[2] / "docs" / PAGE).read_text()
TASKS = (
    "bf16, accumulation, clipping, activation checkpointing, evaluation, generation, Hugging Face, plain state dict, DCP, "
    "full state dict, safetensors, freezing, LoRA, EMA, compile, CPU offload, learning-rate groups, HSDP, TP, EP, PP, Muon, "
    "8-bit Adam, profile, memory, hang, several nodes, engine, resume"
).split(", ")


def recipes():
    """The setup; and the (line, text, ranks) of each recipe that runs."""
    found, ranks = [], 2
    for code in code_of(PAGE):
        if not code.text.strip():  # A comment with the ranks of the next recipe.
            ranks = code.ranks
        elif not code.reason:
            found.append((code.line, code.text, ranks))
            ranks = 2
    return found[0][1], found[1:]


def run(text, line, folder):
    os.chdir(folder)
    exec(compile(text, f"docs/{PAGE}, line {line}", "exec"), {"__name__": "__main__"})


class RecipesTest(unittest.TestCase):
    def test_each_task_has_a_heading_with_its_word(self):
        headings = re.findall(r"^## (.*)$", TEXT, re.MULTILINE)
        for task in TASKS:
            self.assertTrue(any(task.lower() in heading.lower() for heading in headings), task)

    def test_recipes_are_short(self):
        _, found = recipes()
        self.assertGreaterEqual(len(found), 24)
        for line, text, _ in found:
            lines = [each for each in text.splitlines() if each.strip() and not each.startswith(("import", "from"))]
            self.assertLessEqual(len(lines), 11, f"line {line}")

    def test_commands_start_torchrun(self):
        for command in re.findall(r"^```sh\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL):
            self.assertIn("torchrun --n", command)


@pytest.mark.slow
class RunTest(unittest.TestCase):
    def test_each_recipe_runs_behind_the_setup(self):
        setup, found = recipes()
        for line, text, ranks in found:
            with self.subTest(f"line {line}"), tempfile.TemporaryDirectory() as folder:
                run_ranks(ranks, run, f"{setup}\n{text}", line, folder)
