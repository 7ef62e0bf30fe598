"""In a process of ``run.py --fresh``, and in the ranks that it starts: one module of the package is imported with a mutant.

``TORCH_RAGGED_MUTANT`` names it: the file and the mutant's number in :class:`mutation.Source`. Python imports this file at its
start, because its folder is on ``PYTHONPATH``.
"""

import ast
import importlib.machinery
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles the mutant's file with the mutant, and reads no cached bytecode."""

    def get_code(self, fullname):
        file, number = os.environ["TORCH_RAGGED_MUTANT"].split("|")
        if Path(self.path) != ROOT / file:
            return super().get_code(fullname)
        sys.path.insert(0, str(ROOT / "test/mutants"))
        from mutation import Source, changed

        source = Source(ROOT, file)
        changed(source.mutants[int(number)])
        return compile(ast.fix_missing_locations(source.tree), self.path, "exec")


if "TORCH_RAGGED_MUTANT" in os.environ:
    hook = importlib.machinery.FileFinder.path_hook((_Loader, importlib.machinery.SOURCE_SUFFIXES))
    package = str(ROOT / "torch_ragged")

    def only_here(path):
        if not path.startswith(package):
            raise ImportError
        return hook(path)

    sys.path_hooks.insert(0, only_here)
