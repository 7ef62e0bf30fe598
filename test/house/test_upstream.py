"""The patch series and torch's versions: patches are made and apply; a patched, a newer and an unknown torch."""

import ast
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import pytest
import torch

from torch_ragged import RaggedShard, StridedRaggedShard
from torch_ragged._register import hooks

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "upstream"))

import build  # noqa: E402
import readme  # noqa: E402
from series import ALONE, FIRST, MOST_LINES, RELEASES, SERIES  # noqa: E402
from tree import patched_tree  # noqa: E402

IS_RELEASE = torch.__version__.startswith(RELEASES)


@functools.cache
def patches():
    """The patches by name. To make them takes seconds."""
    return build.build(build.installed()[1])


def _imported(node):
    """The modules that a statement imports, each with the names that it takes of it."""
    if isinstance(node, ast.Import):
        return [(alias.name, []) for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [(node.module, [alias.name for alias in node.names])]
    return []


class SeriesTest(unittest.TestCase):
    @pytest.mark.slow
    @unittest.skipUnless(IS_RELEASE, f"the series is for torch {RELEASES}")
    def test_the_sources_make_each_patch_and_the_same_bytes_each_time(self):
        self.assertEqual(list(patches()), [f"{step.name}.patch" for step in SERIES])
        for step, text in zip(SERIES, patches().values(), strict=True):
            for path in [path for path, _ in (*build.new_files(step), *build.edits(step))]:
                self.assertIn(f"diff --git a/{path} b/{path}\n", text)
        self.assertEqual(build.build(build.installed()[1]), patches())

    @unittest.skipUnless(IS_RELEASE, f"the series is for torch {RELEASES}")
    def test_patches_behind_the_placements_are_small_and_name_their_tests(self):
        for step, text in zip(SERIES[ALONE:], list(patches().values())[ALONE:], strict=True):
            added = sum(line.startswith("+") and not line.startswith("+++") for line in text.splitlines())
            self.assertLessEqual(added, MOST_LINES, step.name)
            tests = {Path(test).name for test in step.tests if Path(test).name.startswith("test_")}
            self.assertTrue(tests or step.documents, step.name)
            named = {line.rpartition("/")[2] for line in build.message(step).splitlines() if line.startswith("    pytest")}
            self.assertEqual(named, tests, step.name)

    def test_a_patch_imports_what_it_and_earlier_ones_bring(self):
        """A maintainer may stop at any patch."""
        texts: dict[str, str] = {}
        helpers = {path.stem for path in (ROOT / "test").rglob("*.py") if not path.name.startswith("test_")}
        every = {path for step in SERIES for path, _ in build.new_files(step)}
        for step in SERIES:
            new = {path: text for path, text in build.new_files(step) if path.endswith(".py")}
            texts |= {path: "" for path, _ in build.edits(step)} | new
            for path, text in new.items():
                for node in ast.walk(ast.parse(text)):
                    for module, names in _imported(node):
                        if f"{build.TESTS}/" in path and module in helpers:
                            self.assertIn(f"{build.TESTS}/{module}.py", texts, f"{step.name}: {path}")
                        where = module.replace(".", "/")
                        package = f"{where}/__init__.py"
                        if f"{where}.py" in every or package in every:
                            self.assertTrue(f"{where}.py" in texts or package in texts, f"{step.name}: {path}: {module}")
                        for name in names if package in every else ():
                            is_there = f"{where}/{name}.py" in texts or f"{where}/{name}/__init__.py" in texts
                            self.assertTrue(is_there or re.search(rf"\b{name}\b", texts[package]), f"{path}: {module}.{name}")

    def test_the_series_has_all_of_fsdp(self):
        fsdp = ROOT / "torch_ragged/fsdp"
        files = {path for step in SERIES for path in step.source_files() if fsdp in path.parents}
        self.assertEqual(files, {path for path in fsdp.rglob("*.py")})

    def test_an_edit_that_does_not_fit_is_an_error(self):
        text = "a\nb\nc\n"
        self.assertEqual(build.apply_hunk(text, [" a", "+new", " b"], "file"), "a\nnew\nb\nc\n")
        self.assertEqual(build.apply_hunk(text, [" a", "-b", "+new"], "file"), "a\nnew\nc\n")
        for hunk, times in (([" a", " c", "+d"], 0), ([" a", "+b"], 2)):
            with self.assertRaisesRegex(ValueError, f"occur {times} times"):
                build.apply_hunk("a\nb\na\n", hunk, "file")

    def test_core_lines_are_listed_and_few(self):
        lines = sum(sum(counts) for files in build.changed_lines().values() for counts in files.values())
        self.assertLess(lines, 400)
        self.assertEqual(readme.README.read_text(), readme.with_table(readme.README.read_text()))

    def test_placements_are_nothing_special_to_torch(self):
        """What is added to torch's own files names the protocol; RaggedShard only where it is imported and exported."""
        for step in SERIES:
            for path, hunks in build.edits(step):
                added = [line for hunk in hunks for line in hunk if line[0] == "+"]
                named = [line for line in added if "Ragged" in line and path != "torch/distributed/tensor/__init__.py"]
                self.assertEqual([line for line in named if "_ragged/" not in path], [], path)

    def test_hooks_name_patches_of_the_series(self):
        self.assertEqual({hook.patch for hook in hooks} - {step.name for step in SERIES}, set())
        self.assertGreater(len(hooks), 10)

    def test_no_file_in_the_series_names_the_package(self):
        for step in SERIES[:ALONE]:
            for path, text in build.new_files(step):
                self.assertNotIn("torch_ragged", text, path)

    @pytest.mark.slow
    @unittest.skipUnless(IS_RELEASE, f"the series is for torch {RELEASES}")
    def test_a_patched_torch_has_the_placements_and_the_installed_one_stays_as_it_is(self):
        _, site_packages = build.installed()
        edited = {site_packages / path for step in SERIES for path, _ in build.edits(step) if (site_packages / path).exists()}
        before = {path: path.read_bytes() for path in edited}
        program = (
            "import sys, torch, torch_ragged, torch_ragged.fsdp\n"
            "from torch.distributed.tensor import RaggedShard, StridedRaggedShard\n"
            "assert torch_ragged.RaggedShard is RaggedShard and torch_ragged.StridedRaggedShard is StridedRaggedShard\n"
            "from torch_ragged.tensor._ops._rows import RaggedRows\n"
            "print(RaggedRows.__module__, torch_ragged.fsdp.DBuffer.__module__)\n"
            "print(torch_ragged.registration_report())\n"
            "loaded = torch.load(sys.argv[1], weights_only=True)\n"
            "assert loaded == [RaggedShard((0,), (1, 2)), StridedRaggedShard((0,), (1, 2), 2)], loaded"
        )
        out = ROOT / "out"
        out.mkdir(exist_ok=True)  # On the file system of the environment as a rule, so that links can be made.
        with tempfile.TemporaryDirectory(dir=out) as folder:
            with mock.patch.object(build, "build", mock.Mock(return_value=patches(), spec=build.build)):
                written = build.write(Path(folder) / "patches")
            tree = patched_tree(Path(folder) / "torch", written)
            paths = [str(tree), *filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
            saved = str(Path(folder) / "placements.pt")
            torch.save([RaggedShard((0,), (1, 2)), StridedRaggedShard((0,), (1, 2), 2)], saved)
            command = [sys.executable, "-c", program, saved]
            done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
            self.assertEqual(done.returncode, 0, done.stderr)
            names, report = done.stdout.splitlines()
            self.assertEqual(names, "torch.distributed.tensor._ragged._ops._rows torch.distributed.fsdp._ragged.core._dbuffer")
            self.assertIn("no hooks", report)
        self.assertEqual(before, {path: path.read_bytes() for path in edited})

    @pytest.mark.slow
    @unittest.skipUnless(IS_RELEASE, f"the series is for torch {RELEASES}")
    def test_the_first_step_lets_a_further_kind_of_shard_fill_placeholders(self):
        """On stock torch it has no rule; with the patch, it has. What Shard and _StridedShard fill stays as it is."""
        program = (
            "from torch.distributed.tensor import Partial, Replicate, Shard\n"
            "from torch.distributed.tensor._ops.single_dim_strategy import _fill_single_dim_strategy_placeholders as fill\n"
            "from torch.distributed.tensor._ops.single_dim_strategy import _ShardingPlaceholder as Any\n"
            "from torch.distributed.tensor.placement_types import Placement, _StridedShard\n"
            "class Cyclic(Placement):\n"
            "    def __init__(self, dim): self.dim = dim\n"
            "    def on_dim(self, dim): return Cyclic(dim)\n"
            "    def __eq__(self, other): return isinstance(other, Cyclic) and self.dim == other.dim\n"
            "    def __hash__(self): return self.dim\n"
            "    def __repr__(self): return f'Cyclic({self.dim})'\n"
            "rules = [[Partial(), Any(1), Any(0)], [Any(0), Any(0), Replicate()]]\n"
            "for given in ([Shard(1)], [Shard(0), Shard(1)], [_StridedShard(0, split_factor=2)], [Replicate()], [Cyclic(1)],\n"
            "              [Shard(0), _StridedShard(1, split_factor=2), _StridedShard(0, split_factor=3)]):\n"
            "    print(sorted(map(repr, fill(set(given), rules))))\n"
        )
        out = ROOT / "out"
        out.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out) as folder:
            tree = patched_tree(Path(folder) / "torch", build.write(Path(folder) / "patches", [FIRST]))
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            both = [  # At once.
                subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path}, **pipes)
                for path in ("", str(tree))
            ]
            answers = []
            for process in both:
                printed, errors = process.communicate(timeout=200)
                self.assertEqual(process.returncode, 0, errors)
                answers.append(printed.splitlines())
        stock, patched = answers
        self.assertEqual(stock.pop(4), "[]")
        self.assertEqual(
            patched.pop(4), str(sorted(["[Partial(sum), Cyclic(1), Cyclic(0)]", "[Cyclic(0), Cyclic(0), Replicate()]"]))
        )
        self.assertEqual(stock, patched)
        self.assertTrue(all("Shard" in line for line in (patched[0], patched[1], patched[2], patched[4])), patched)


# Imports torch_ragged in a fork for each case, after a change of torch; prints how that ended. Two forks run at once.
FORKS = """
import json, os, warnings
import torch, torch.distributed.checkpoint, torch.distributed.fsdp, torch.distributed.tensor.debug
from torch.distributed import tensor
dispatcher, from_local = tensor._dispatch.OpDispatcher, tensor.DTensor.from_local
cases = json.loads(os.environ["CASES"])
for number, (version, change) in enumerate(cases):
    if os.fork():
        if number:
            os.wait()
        if number == len(cases) - 1:
            os.wait()
        continue
    torch.__version__ = version
    exec(change)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            import torch_ragged
            outcome = "imported"
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
    texts = [str(w.message) for w in caught if w.category is UserWarning]
    line = json.dumps([number, outcome, texts, tensor.DTensor.from_local is not from_local])
    os.write(1, f"{line}\\n".encode())  # At once: two may print.
    os._exit(0)
"""


def outcomes(*cases):
    """For each version and change of torch: how an import ended, what it warned of, and whether hooks were installed."""
    environment = {**os.environ, "CASES": json.dumps(cases)}
    command = [sys.executable, "-c", FORKS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT, env=environment)
    found = [outcome for _, *outcome in sorted(map(json.loads, done.stdout.splitlines()))]
    if len(found) != len(cases):
        raise AssertionError(done.stdout + done.stderr)
    return found


class VersionsTest(unittest.TestCase):
    """Fake versions of torch, and layouts that it never had."""

    LAYOUTS = {
        "dispatcher._propagate_op_sharding_dispatch_slow_path = lambda self, op_info: None": "OpDispatcher._propagate_op",
        "del dispatcher._dispatch_get_local_results_slow_path": "OpDispatcher._propagate_op",
        "tensor._redistribute.redistribute_local_tensor = lambda local: 0": "_redistribute.redistribute_local_tensor",
        "del tensor._api._ToTorchTensor": "_api._ToTorchTensor.backward",
        "del tensor.placement_types._StridedShard": "_StridedShard",
        "del torch.distributed._state_dict_utils._distribute_tensors": "_state_dict_utils._distribute_tensors",
    }

    @classmethod
    def setUpClass(cls):
        known = (torch.__version__, "2.15.0a0+git1234", "2.15.0.dev20261001", "2.15.0rc1", "2.11")
        versions = [(version, "") for version in ("2.10.1", "2.99.0a0+git1234", *known)]
        found = outcomes(*versions, *(("2.99.0", change) for change in cls.LAYOUTS))
        cls.older, cls.newer, *found = found
        cls.known, cls.unknown = found[: len(known)], found[len(known) :]

    def test_a_known_version(self):
        for outcome in self.known:
            self.assertEqual(outcome, ["imported", [], True])

    def test_an_older_version_is_an_error(self):
        text = "ImportError: torch_ragged needs torch >= 2.11, found 2.10.1: install a newer torch"
        self.assertEqual(self.older, [text, [], False])

    def test_a_newer_version_with_a_known_layout_is_a_warning(self):
        self.assertEqual((self.newer[0], self.newer[2]), ("imported", True))
        (warning,) = self.newer[1]
        self.assertIn("checked on torch 2.11 to 2.15, not on 2.99.0a0+git1234", warning)

    def test_an_unknown_layout_is_an_error_that_names_it_and_nothing_is_installed(self):
        for named, (text, _, installed) in zip(self.LAYOUTS.values(), self.unknown, strict=True):
            self.assertTrue(text.startswith("ImportError: torch_ragged cannot extend torch 2.99.0: "), text)
            self.assertIn(named, text)
            self.assertFalse(installed)
