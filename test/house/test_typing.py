"""Editors see the options: each keyword of a public call has a name and a type, which checkers know."""

import importlib
import importlib.util
import inspect
import subprocess
import sys
import tempfile
import typing
import unittest
from pathlib import Path

import pytest

from torch_ragged.fsdp import fully_shard
from torch_ragged.fsdp._options import FullyShardOptions, InstallOptions, UnitOptions
from torch_ragged.integrations import install, installed
from torch_ragged.spmd import Plan
from torch_ragged.spmd._plan import _UNIT_OPTIONS

PACKAGES = (
    *("", ".checkpoint", ".debug", ".elastic", ".fsdp", ".granularity", ".integrations", ".optim", ".random", ".spmd"),
    ".transfer",
)
OPEN = {  # What they get is another's: of the optimizer, the module, its forward, DTensor, DCP, the DataLoader.
    *("fsdp.offloaded", "random.deferred_init", "spmd.deferred_init", "spmd.explain", "spmd.Plan.explain"),
    *("fsdp.FSDPModule.zero_grad", "fsdp.FSDPGrad.full_tensor", "fsdp.FSDPGrad.redistribute", "fsdp.FSDPGrad.to_local"),
    *("fsdp.Float8Weight.__init__", "checkpoint.CheckpointReader.read_metadata", "elastic.PieceLoader.__init__"),
}
PROGRAM = """
from torch import nn
from torch_ragged.fsdp import fully_shard
from torch_ragged.integrations import install
from torch_ragged.optim import AdamW8bit
from torch_ragged.spmd import Plan

fully_shard(nn.Linear(2, 2), reshard_after_forwrd=True)
Plan().unit("", "dp", mp_polcy=None)
install(weigths=None)
AdamW8bit([], cod="dynamic")
Plan().unit("", "dp", optional="yes")
fully_shard(nn.Linear(2, 2), optional=True, mesh=None).reshard()
fully_shard([nn.Linear(2, 2)], weights=[1, 2])[0].unshard()
Plan().unit("", "dp", optional=True, weights=(1, 2))
"""
WRONG = (8, 9, 10, 11, 12)  # Lines of it, which are errors.


def public_calls():
    for package in PACKAGES:
        module = importlib.import_module(f"torch_ragged{package}")
        for name in module.__all__:
            value, where = getattr(module, name), f"{package}.{name}".strip(".")
            if not getattr(value, "__module__", "").startswith("torch_ragged"):
                continue
            if inspect.isclass(value):
                for method, function in vars(value).items():
                    if inspect.isfunction(function) and not method.startswith("_") or method == "__init__":
                        yield f"{where}.{method}", function
            elif callable(value):
                yield where, value


class TypingTest(unittest.TestCase):
    def test_no_public_call_takes_any_keyword(self):
        found, count = set(), 0
        for where, function in public_calls():
            count += 1
            function = inspect.unwrap(function)
            for each in inspect.signature(function).parameters.values():
                if each.kind is each.VAR_KEYWORD and "Unpack" not in str(each.annotation):
                    found.add(where)
        self.assertGreater(count, 200)
        self.assertLessEqual(found, OPEN)

    def test_the_types_have_the_keywords_of_the_calls(self):
        keywords = set(inspect.signature(fully_shard).parameters) - {"module"}
        self.assertEqual(set(typing.get_type_hints(FullyShardOptions)), keywords)
        self.assertEqual(set(typing.get_type_hints(InstallOptions)), keywords - {"mesh"})
        self.assertEqual(set(typing.get_type_hints(UnitOptions)), set(_UNIT_OPTIONS))
        for function, types in ((Plan.unit, UnitOptions), (install, InstallOptions), (installed, InstallOptions)):
            (options,) = [p for p in inspect.signature(function).parameters.values() if p.kind is p.VAR_KEYWORD]
            self.assertEqual(options.annotation, f"Unpack[{types.__name__}]")

    @pytest.mark.slow
    def test_type_checkers_find_a_misspelt_option(self):
        checkers = {"mypy": ["--no-error-summary", "--hide-error-context"], "pyright": []}
        installed_ones = [name for name in checkers if importlib.util.find_spec(name)]
        if not installed_ones:
            self.skipTest("neither mypy nor pyright is installed")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "program.py"
            path.write_text(PROGRAM)
            for name in installed_ones:
                command = [sys.executable, "-m", name, *checkers[name], str(path)]
                answer = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=300)
                errors = [line for line in answer.stdout.splitlines() if " error" in line and path.name in line]
                lines = {int(line.split(":")[1]) for line in errors if line.split(":")[1].isdigit()}
                self.assertEqual(sorted(lines), list(WRONG), answer.stdout + answer.stderr)


if __name__ == "__main__":
    unittest.main()
