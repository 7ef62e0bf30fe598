"""docs/recipes.md: each recipe runs behind the setup that the page shows, in a file of its own; each task has a heading."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import pytest
from common import run_ranks
from doc_pages import code_of

PAGE = "recipes.md"
DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / PAGE).read_text()
TASKS = {  # An everyday word, and the heading of its recipe.
    "bf16": "bf16",
    "mixed precision": "bf16",
    "gradient accumulation": "Gradient accumulation",
    "clipping": "Gradient clipping",
    "activation checkpointing": "Activation checkpointing",
    "evaluation": "Evaluation",
    "generation": "Generation",
    "hugging face": "Hugging Face",
    "plain state dict": "Plain state dict",
    "dcp": "DCP",
    "resume": "Save and resume",
    "full state dict": "Full state dict",
    "safetensors": "safetensors",
    "freezing": "Freezing",
    "lora": "LoRA",
    "ema": "EMA",
    "compile": "Compile",
    "cpu offload": "CPU offload",
    "learning-rate groups": "Learning-rate groups",
    "hsdp": "HSDP",
    "tensor parallelism": "Tensor parallelism",
    "expert parallelism": "Expert parallelism",
    "pipeline parallelism": "Pipeline parallelism",
    "muon": "Muon",
    "8-bit adam": "Adam with 8-bit states",
    "profile": "Profile",
    "memory": "Memory",
    "hang": "Hang",
    "several nodes": "Several nodes",
    "engine": "Engine",
}
SEARCH = """
const fs = require("fs"), vm = require("vm"), site = process.argv[1];
const nothing = { readyState: "loading", addEventListener() {}, getElementById: () => null, documentElement: { dataset: {} } };
Object.assign(globalThis, { document: nothing, window: globalThis, localStorage: { setItem() {} } });
globalThis.SPHINX_HIGHLIGHT_ENABLED = false;
const files = ["_static/doctools.js", "_static/language_data.js", "_static/searchtools.js", "searchindex.js"];
globalThis.words = JSON.parse(process.argv[2]);
for (const file of files) vm.runInThisContext(fs.readFileSync(`${site}/${file}`, "utf8"));
const first = "JSON.stringify(words.map((word) => Search._performSearch(...Search._parseQuery(word)).pop()))";
console.log(vm.runInThisContext(first));
"""


def recipes():
    """The setup; and the (line, text, ranks) of each recipe that runs."""
    found = [(code.line, code.text, code.ranks) for code in code_of(PAGE) if not code.reason]
    return found[0][1], found[1:]


def run(text, line, folder):
    os.chdir(folder)
    exec(compile(text, f"docs/{PAGE}, line {line}", "exec"), {"__name__": "__main__"})


class RecipesTest(unittest.TestCase):
    def test_each_task_has_a_heading_with_its_word(self):
        headings = re.findall(r"^## (.*)$", TEXT, re.MULTILINE)
        self.assertEqual(set(TASKS.values()) - set(headings), set())

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

    @unittest.skipUnless(importlib.util.find_spec("sphinx") and shutil.which("node"), "needs Sphinx (the extra docs) and node")
    def test_the_search_of_the_site_finds_each_recipe_first(self):
        with tempfile.TemporaryDirectory() as site:
            command = [sys.executable, "-m", "sphinx", "-q", "-b", "html", str(DOCS), site]
            subprocess.run(command, check=True, capture_output=True, timeout=280, cwd=DOCS.parent)
            found = subprocess.run(
                ["node", "-e", SEARCH, site, json.dumps(list(TASKS))], check=True, capture_output=True, text=True, timeout=60
            )
        for task, (page, title, *_) in zip(TASKS, json.loads(found.stdout), strict=True):
            self.assertEqual(page, "recipes", f"{task}: {title}")
            self.assertIn(title, ("Recipes", f"Recipes > {TASKS[task]}"), task)
