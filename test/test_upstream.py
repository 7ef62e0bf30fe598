"""The patch series and torch's versions: patches are up to date and apply; a patched, a newer and an unknown torch."""

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "upstream"))

import build  # noqa: E402
import readme  # noqa: E402
from series import ALONE, RELEASES, SERIES  # noqa: E402
from tree import patched_tree, patches_of  # noqa: E402

IS_RELEASE = torch.__version__.startswith(RELEASES)


def python(program, *path):
    """Standard output and error of a Python program, with folders in front of its path, and its exit code."""
    code = f"import sys; sys.path[:0] = {[str(folder) for folder in path]}\n{program}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, cwd=ROOT)
    return done.stdout, done.stderr, done.returncode


class SeriesTest(unittest.TestCase):
    def test_patches_are_what_the_sources_make(self):
        self.assertEqual(build.stale(), "")

    def test_an_edit_that_does_not_fit_is_an_error(self):
        text = "a\nb\nc\n"
        self.assertEqual(build.apply_hunk(text, [" a", "+new", " b"], "file"), "a\nnew\nb\nc\n")
        self.assertEqual(build.apply_hunk(text, [" a", "-b", "+new"], "file"), "a\nnew\nc\n")
        for hunk, times in (([" a", " c", "+d"], 0), ([" a", "+b"], 2)):
            with self.assertRaisesRegex(ValueError, f"stand there {times} times"):
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

    def test_no_file_in_the_series_names_the_package(self):
        for step in SERIES[:ALONE]:
            for path, text in build.new_files(step):
                self.assertNotIn("torch_ragged", text, path)

    @unittest.skipUnless(IS_RELEASE, f"the series is for torch {RELEASES}")
    def test_a_patched_torch_has_the_placements_and_the_installed_one_stays_as_it_is(self):
        _, site_packages = build.installed()
        edited = {site_packages / path for step in SERIES for path, _ in build.edits(step) if (site_packages / path).exists()}
        before = {path: path.read_bytes() for path in edited}
        with tempfile.TemporaryDirectory(dir=ROOT / "out" if (ROOT / "out").exists() else None) as folder:
            for steps in (ALONE, len(SERIES)):
                tree = patched_tree(Path(folder) / str(steps), patches_of(steps))
                out, error, code = python(
                    "import torch, torch_ragged, torch_ragged.fsdp\n"
                    "from torch.distributed.tensor import RaggedShard, StridedRaggedShard\n"
                    "assert torch_ragged.RaggedShard is RaggedShard and torch_ragged.StridedRaggedShard is StridedRaggedShard\n"
                    "from torch_ragged._ops._rows import RaggedRows\n"
                    "print(RaggedRows.__module__, torch_ragged.fsdp.DBuffer.__module__)\n"
                    "print(torch_ragged.registration_report())",
                    tree,
                    ROOT,
                )
                self.assertEqual(code, 0, error)
                self.assertIn("no hooks", out)
                dbuffer = "torch.distributed.fsdp._ragged._dbuffer" if steps > ALONE else "torch_ragged.fsdp._dbuffer"
                self.assertEqual(out.splitlines()[0], f"torch.distributed.tensor._ragged._ops._rows {dbuffer}")
        self.assertEqual(before, {path: path.read_bytes() for path in edited})


class VersionsTest(unittest.TestCase):
    """Fake versions of torch, and layouts that it never had, each in a process of its own."""

    def test_an_older_torch_is_an_error(self):
        _, error, code = python("import torch; torch.__version__ = '2.10.1'; import torch_ragged", ROOT)
        self.assertEqual(code, 1)
        self.assertIn("ImportError: torch_ragged needs torch >= 2.11, found 2.10.1", error)

    def test_a_newer_torch_with_a_known_layout_is_a_warning(self):
        _, error, code = python("import torch; torch.__version__ = '2.99.0a0+git1234'; import torch_ragged", ROOT)
        self.assertEqual(code, 0, error)
        self.assertIn("UserWarning: torch_ragged was checked on torch 2.11 to 2.15, not on 2.99.0a0+git1234", error)

    def test_a_known_torch_warns_of_nothing(self):
        _, error, code = python("import warnings; warnings.simplefilter('error', UserWarning); import torch_ragged", ROOT)
        self.assertEqual((code, error), (0, ""))

    def test_an_unknown_layout_is_an_error_and_nothing_is_installed(self):
        for change, named in (
            ("dispatcher._propagate_op_sharding_dispatch_slow_path = lambda self, op_info: None", "OpDispatcher._propagate_op"),
            ("del dispatcher._dispatch_get_local_results_slow_path", "OpDispatcher._propagate_op"),
            ("tensor._redistribute.redistribute_local_tensor = lambda local: local", "_redistribute.redistribute_local_tensor"),
            ("del tensor._api._ToTorchTensor", "_api._ToTorchTensor.backward"),
            ("del tensor.placement_types._StridedShard", "_StridedShard"),
        ):
            _, error, code = python(
                "import torch; torch.__version__ = '2.99.0'\n"
                "from torch.distributed import tensor\n"
                "dispatcher = tensor._dispatch.OpDispatcher\n"
                "from_local = tensor.DTensor.from_local\n"
                f"{change}\n"
                "try:\n    import torch_ragged\n"
                "finally:\n    assert tensor.DTensor.from_local is from_local",
                ROOT,
            )
            self.assertEqual(code, 1, change)
            last = error.strip().splitlines()[-1]
            self.assertTrue(last.startswith("ImportError: torch_ragged cannot extend torch 2.99.0: "), error)
            self.assertIn(named, last)


if __name__ == "__main__":
    unittest.main()
