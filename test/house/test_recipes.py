"""docs/recipes.md: each recipe runs behind the setup that the page shows, in a file of its own; each task has a heading."""

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

import pytest
from common import run_ranks
from doc_pages import built_site, code_of

PAGE = "recipes.md"
DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / PAGE).read_text()
TASKS = {  # What a user types into the search, and the heading of its recipe.
    "bf16": "bf16",
    "mixed precision": "bf16",
    "gradient accumulation": "Gradient accumulation",
    "clipping": "Gradient clipping",
    "activation checkpointing": "Activation checkpointing",
    "evaluation": "Evaluation",
    "generation": "Generation",
    "hugging face": "Hugging Face",
    "plain state dict": "Load pre-trained weights",
    "dcp": "Checkpoints of torch (DCP)",
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
    "fused weights": "Fused weights",
    "swiglu": "Fused weights",
    "expert parallelism": "Expert parallelism",
    "pipeline parallelism": "Pipeline parallelism",
    "muon": "Muon",
    "8-bit adam": "Adam with 8-bit states",
    "profile": "Profile",
    "memory": "Memory",
    "hang": "Hang",
    "several nodes": "Several nodes",
    "engine": "Send weights to an inference engine",
    "export weights": "Send weights to an inference engine",
    "accumulate": "Gradient accumulation",
    "clip": "Gradient clipping",
    "freeze": "Freezing",
    "learning rate groups": "Learning-rate groups",
    "pipeline": "Pipeline parallelism",
    "tensor parallel": "Tensor parallelism",
    "expert parallel": "Expert parallelism",
    "evaluate": "Evaluation",
    "generate": "Generation",
    "huggingface": "Hugging Face",
    "offload": "CPU offload",
    "8-bit": "Adam with 8-bit states",
    "multi node": "Several nodes",
}
ELSEWHERE = {  # And what other pages are about: the page, and its heading.
    "out of memory": ("troubleshooting", "Memory"),
    "OOM": ("troubleshooting", "Memory"),
    "nan": ("troubleshooting", "The numbers are wrong"),
    "checkpoint": ("checkpoints", "Checkpoints"),
    "qwen": ("tutorials/qwen3_plan", "An unchanged Qwen3: TP, FSDP, Muon, and back to `from_pretrained`"),
    "gemma": ("plans", "Plans that exist"),
    "context parallel": ("plans", "Context parallelism"),
    "sequence parallel": ("plans", "A sample"),
    "dataloader": ("plans", "What each rank passes"),
    "fp8": ("hopper", "Half-size all-gathers"),
    "dropout": ("random", "Random numbers on any number of ranks"),
    "wandb": ("operations", "Metrics"),
    "tensorboard": ("operations", "Metrics"),
    "docker": ("running", "Docker and Kubernetes"),
    "kubernetes": ("running", "Docker and Kubernetes"),
    "slurm": ("running", "Slurm"),
    "fsdp1": ("moving_here", "From FSDP1"),
    "deepspeed": ("moving_here", "From DeepSpeed"),
    "zero-2": ("meshes", "ZeRO, by placement"),
    "how many GPUs": ("tuning", "Will it fit?"),
    "NCCL timeout": ("troubleshooting", "The run hangs"),
    "mp.spawn": ("running", "Without torchrun"),
    "srun": ("running", "Without torchrun"),
    "max-restarts": ("running", "Restarts by torchrun"),
    "firewall": ("running", "What listens"),
    "upgrade": ("running", "Upgrade and uninstall"),
    "uninstall": ("running", "Upgrade and uninstall"),
    "license": ("running", "Upgrade and uninstall"),
}
WANTED = {**{word: ("recipes", heading) for word, heading in TASKS.items()}, **ELSEWHERE}
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


def anchor(heading):
    return "#" + re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-")


def other_words(page):
    """What ``also called`` says below each heading of a page."""
    found = re.findall(r"^#+ (.*)\n\n<!-- also called: (.*) -->\n\n", (DOCS / f"{page}.md").read_text(), re.MULTILINE)
    return {heading: [word.strip().lower() for word in words.split(",")] for heading, words in found}


def run(text, line, folder):
    os.chdir(folder)
    exec(compile(text, f"docs/{PAGE}, line {line}", "exec"), {"__name__": "__main__"})


class RecipesTest(unittest.TestCase):
    def test_each_task_has_a_heading_with_its_word(self):
        headings = re.findall(r"^## (.*)$", TEXT, re.MULTILINE)
        self.assertEqual(set(TASKS.values()) - set(headings), set())

    def test_what_people_type_is_a_heading_or_is_called_so_below_one(self):
        for word, (page, heading) in WANTED.items():
            words = [heading.lower(), heading.lower().removesuffix("s"), *other_words(page).get(heading, [])]
            self.assertIn(word.lower(), words, f"docs/{page}.md: add <!-- also called: {word} --> below {heading!r}")

    def test_other_words_stand_below_a_heading_and_lead_to_one_place(self):
        pages = [path.relative_to(DOCS).as_posix().removesuffix(".md") for path in DOCS.rglob("*.md")]
        placed = {page: other_words(page) for page in pages}
        for page in pages:
            comments = (DOCS / f"{page}.md").read_text().count("<!-- also called:")
            self.assertEqual(comments, len(placed[page]), f"docs/{page}.md: one follows its heading, between empty lines")
        words = [word for found in placed.values() for group in found.values() for word in group]
        self.assertEqual(sorted({word for word in words if words.count(word) > 1}), [])
        self.assertGreater(len(words), 80)

    def test_each_recipe_prints_at_its_end(self):
        for line, text, _ in recipes()[1]:
            end = ast.parse(text).body[-1]
            end = end.body[-1] if isinstance(end, ast.If) else end
            self.assertTrue(ast.unparse(end).startswith("print("), f"line {line}")

    def test_recipes_are_short(self):
        _, found = recipes()
        self.assertGreaterEqual(len(found), 24)
        for line, text, _ in found:
            statements = [each for each in ast.walk(ast.parse(text)) if isinstance(each, ast.stmt)]
            statements = [each for each in statements if not isinstance(each, (ast.Import, ast.ImportFrom))]
            self.assertLessEqual(len(statements), 11, f"line {line}")

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
    def test_the_search_of_the_site_finds_each_word_at_its_heading_first(self):
        command = ["node", "-e", SEARCH, str(built_site()), json.dumps(list(WANTED))]
        found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        for (word, (page, heading)), found_first in zip(WANTED.items(), json.loads(found.stdout), strict=True):
            self.assertEqual((found_first[0], found_first[2]), (page, anchor(heading)), f"{word}: {found_first}")
