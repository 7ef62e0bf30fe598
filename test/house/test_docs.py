"""The documentation: its code runs, its links lead somewhere, it lists every public name and every error."""

import importlib
import importlib.util
import inspect
import re
import sys
import tempfile
import unittest
from pathlib import Path
from types import ModuleType

import pytest
from common import run_ranks
from doc_pages import built_site, code_of, run_code

from torch_ragged.fsdp import fully_shard

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))

PUBLIC = (
    "torch_ragged",
    *(f"torch_ragged.{name}" for name in "fsdp optim random spmd checkpoint transfer debug granularity integrations".split()),
)


def pages_with_code():
    """The pages with code that runs in a test's process, and the ranks that it needs."""
    pages = [page for page in PAGES if page != "recipes.md"]  # Each of its blocks is a program: see test_recipes.py.
    found = {page: [code for code in code_of(page) if code.can_run] for page in pages}
    return {page: max(code.ranks for code in codes) for page, codes in found.items() if codes}


def entries():
    """The names that the API reference has an entry for, with their modules: lines of autosummary, and data."""
    found = set()
    for path in (DOCS / "api").glob("*.rst"):
        module = ""
        for line in path.read_text().splitlines():
            module = line.partition(":: ")[2] if line.startswith(".. module::") else module
            if name := re.fullmatch(r"   (\w+)", line):
                found.add(f"{module}.{name[1]}")
            elif data := re.fullmatch(r"\.\. py:data:: ([\w.]+)", line):
                found.add(data[1])
            elif entry := re.fullmatch(r"\.\. auto(?:function|class):: ([\w.]+)", line):
                found.add(entry[1])  # Of granularity, whose pages are those of fsdp.
    return found


def links(path):
    """The targets in the repository of a page's links: file and heading."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`]*`", "", text)
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        name, _, heading = target.partition("#")
        yield (path.parent / name).resolve() if name else path, heading


def headings(path):
    """The anchors of a page's headings, as GitHub and Sphinx name them. A comment in its code is no heading."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


class PagesTest(unittest.TestCase):
    def test_code_that_does_not_run_is_rare_and_says_why(self):
        left_out = {(page, code.reason) for page in PAGES for code in code_of(page) if code.reason}
        self.assertLessEqual(len(left_out), 9, left_out)
        self.assertTrue(all(len(reason) > 20 for _, reason in left_out))

    def test_pages_with_scripts_are_run_by_a_test_of_theirs(self):
        tests = "".join(path.read_text() for path in (ROOT / "test").rglob("test_*.py"))
        run = set(re.findall(r'run_page\("([\w/.]+)"', tests))
        pages = {page for page in PAGES if any(code.is_file for code in code_of(page))}
        self.assertGreater(len(pages), 5)
        self.assertEqual(pages - run, set())

    def test_links_lead_to_pages_and_headings_that_are_there(self):
        beside = [path for part in ("benchmarks", "examples", "rehearsal", "upstream") for path in (ROOT / part).rglob("*.md")]
        anchors = 0
        for path in [*ROOT.glob("*.md"), *beside, *(DOCS / page for page in PAGES)]:
            for target, heading in links(path):
                self.assertTrue(target.exists(), f"{path}: {target}")
                if heading and target.suffix == ".md":
                    self.assertIn(heading, headings(target), f"{path}: {target.name}")
                    anchors += 1
        self.assertGreater(anchors, 50)

    def test_headings_that_python_names_are_there(self):
        """As in: see "Unequal ranks" in docs/meshes.md."""
        files = [path for folder in ("torch_ragged", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
        named = [
            (path, heading, page)
            for path in files
            for heading, page in re.findall(r'"([^"\n]+)"\s+in\s+(docs/[\w/]+\.md)', path.read_text())
        ]
        self.assertGreater(len(named), 2)
        for path, heading, page in named:
            titles = re.findall(r"^#+ (.*)$", (ROOT / page).read_text(), re.MULTILINE)
            self.assertIn(heading, titles, f"{path}: {page}")

    def test_the_commands_of_the_benchmarks_do_something(self):
        modules = set(re.findall(r"python -m (benchmarks[\w.]+)", (ROOT / "benchmarks/README.md").read_text()))
        self.assertGreater(len(modules), 10)
        for module in modules:
            self.assertIn('if __name__ == "__main__":', (ROOT / f"{module.replace('.', '/')}.py").read_text(), module)

    def test_every_page_is_in_the_contents(self):
        contents = "\n".join((DOCS / page).read_text() for page in PAGES)
        contents = "\n".join(re.findall(r"^```\{toctree\}\n(.*?)^```", contents, re.MULTILINE | re.DOTALL))
        listed = {name.rpartition("<")[2].rstrip(">") for name in contents.split("\n")}
        self.assertEqual({page.removesuffix(".md").rpartition("/")[2] for page in PAGES} - listed, {"index"})

    def test_pages_use_the_words_of_the_field(self):
        words = load("words")
        self.assertEqual(words.main(), 0)
        text = "One flight, `two flights`.\n```\nplanes\n```\nIn flight. It stands on planes. <!-- mend -->"
        self.assertEqual([each[:2] for each in words.found(text)], [(1, "flight"), (5, "planes"), (5, "stands on")])

    def test_boxes_fit_beside_the_columns_of_links(self):
        """And on GitHub. A literalinclude shows an example's source as it is."""
        wide = []
        for path in [ROOT / "README.md", *(DOCS / page for page in PAGES)]:
            for box in re.finditer(r"^(```+|~~~+).*\n((?:.*\n)*?)\1$", path.read_text(), re.MULTILINE):
                wide += [f"{path.name}: {line}" for line in box[2].splitlines() if len(line) > 88]
        self.assertEqual(wide, [])

    def test_pages_with_lists_that_are_made_say_how_a_clone_reads_them(self):
        script = load("page")
        for name, _ in script.SCRIPTS.values():
            load(name)
        directive = re.compile(rf"^```\{{({'|'.join(script.SCRIPTS)})\}}", re.MULTILINE)
        with_lists = [page for page in PAGES if directive.search((DOCS / page).read_text())]
        self.assertEqual(len(with_lists), 7)
        for page in with_lists:
            text = (DOCS / page).read_text()
            said, *_ = directive.split(text)
            self.assertIn(f"`python docs/page.py {page.removesuffix('.md')}`", said, page)
            filled = script.filled(text)
            self.assertGreater(len(filled), len(text) + 1000, page)
            self.assertIsNone(directive.search(filled), page)

    def test_switching_from_fsdp2_has_every_argument(self):
        table = (DOCS / "fsdp.md").read_text().partition("## Arguments")[2].partition("\n## ")[0]
        found = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
        self.assertEqual(sorted(inspect.signature(fully_shard).parameters), sorted(found))

    def test_the_readme_is_short(self):
        self.assertLessEqual(len((ROOT / "README.md").read_text().splitlines()), 120)

    def test_the_picture_is_what_its_script_draws(self):
        picture = load("make_picture")
        self.assertEqual((DOCS / "buffer.svg").read_text(), picture.picture())
        colours = re.findall(r"(?:fill|stroke)='([^']+)'", picture.picture())
        self.assertTrue(all(re.fullmatch(r"#[0-9a-f]{6}|none", colour) for colour in colours), set(colours))


def load(name) -> ModuleType:
    """A script of docs/, as a module."""
    sys.path.insert(0, str(DOCS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(DOCS))


class ReferenceTest(unittest.TestCase):
    def test_every_public_name_has_an_entry_and_a_docstring(self):
        listed = entries()
        for module in map(importlib.import_module, PUBLIC):
            for name in module.__all__:
                value = getattr(module, name)
                if isinstance(value, ModuleType):
                    continue
                self.assertIn(f"{module.__name__}.{name}", listed)
                if callable(value) and not hasattr(value, "__origin__"):
                    self.assertGreater(len(value.__doc__ or ""), 20, f"{module.__name__}.{name}")

    def test_every_entry_is_of_a_name_that_is_there(self):
        for entry in entries():
            module, _, name = entry.rpartition(".")
            if module in PUBLIC:
                self.assertIn(name, importlib.import_module(module).__all__)

    def test_the_page_of_errors_has_every_error_of_the_package(self):
        errors = load("make_errors")
        self.assertGreater(len(errors.messages()), 300)
        text = (DOCS / "errors.md").read_text()
        listed = re.findall(r"^```\{errors\} (.*)\n```$", text, re.MULTILINE)
        self.assertEqual(listed, re.findall(r"^## (.*)$", text, re.MULTILINE))
        self.assertEqual(set(listed), {errors.area_of(message.module) for message in errors.messages()})
        self.assertEqual(set(listed), set(errors.AREAS))
        lines = [line for title in listed for line in errors.entries(title) if line.startswith("- ")]
        self.assertGreater(len(lines), 300)
        texts = "\n".join(message.text for message in errors.messages())
        self.assertEqual([part for part in errors.HINTS if part not in texts], [], "hints that fit no message")

    def test_measured_tables_are_made_of_their_data(self):
        measured = load("measured")
        for lines, columns, least in (
            (measured.op_coverage(), 5, 600),
            (measured.mutants("modules"), 8, 6),
            (measured.compatibility("versions"), 7, 3),
            (measured.compatibility("listed"), 3, 50),
            (measured.optimizers(), 5, 10),
            (measured.programs("rows"), 5, 90),
            (measured.programs("not_run"), 3, 3),
            (measured.fsdp2_tests("counts"), 2, 5),
            (measured.fsdp2_tests("cases"), 4, 150),
            (measured.mutants("survivors"), 5, 100),
        ):
            rows = [line for line in lines if line.startswith("|")]
            self.assertEqual({len(re.split(r"(?<!\\)\|", row)) - 2 for row in rows}, {columns})
            self.assertGreater(len(rows), least)


@pytest.mark.slow
class CodeTest(unittest.TestCase):
    def test_the_code_of_every_page_runs(self):
        self.assertGreater(len(pages_with_code()), 9)
        for page, ranks in pages_with_code().items():
            with self.subTest(page), tempfile.TemporaryDirectory() as folder:
                run_ranks(ranks, run_code, page, folder)

    @unittest.skipUnless(importlib.util.find_spec("sphinx"), "needs Sphinx: the extra docs")
    def test_the_site_is_built_without_a_warning(self):
        site = built_site()
        pages = {page.stem for page in (site / "api/names").glob("*.html")}
        self.assertLessEqual({"torch_ragged.RaggedShard", "torch_ragged.fsdp.FSDPModule"}, pages)
        # Sphinx would show the signatures of its overloads, without arguments.
        text = (site / "api/names/torch_ragged.fsdp.fully_shard.html").read_text()
        shown = re.findall(r'<em class="sig-param"><span class="n"><span class="pre">(\w+)', text)
        self.assertEqual(shown, list(inspect.signature(fully_shard).parameters))
