"""What measures the house: bodies that FSDP2's contract runs, lines with a comment, bits of losses."""

import sys
import tempfile
import unittest
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # Of the benchmarks.

import torch.distributed as dist
from common import ranks

from benchmarks.parts import comment_lines, core_bits, core_bodies

SOURCE = '''"""A module."""

LIMIT = 3  # At import.


class Kind:
    """A class."""

    def used(self, x):
        """A docstring.

        Of two paragraphs.
        """
        # Only large ones.
        if x > LIMIT:
            return [each for each in range(x)]

        def inside(y):
            return -y

        return inside(x)  # noqa: F821

    def unused(self): ...

    @property
    def guest(self):
        return (
            1 +
            2
        )
'''


class MeasuresTest(unittest.TestCase):
    def test_bodies_have_no_heads_docstrings_or_ellipses(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "kind.py")
            path.write_text(SOURCE)
            used, guest = core_bodies.functions_of(path)
            self.assertEqual((used.name, sorted(used.lines)), ("Kind.used", [15, 16, 19, 21]))
            self.assertEqual(guest.name, "Kind.guest")
            names = {}
            with core_bodies.Tracer(Path(folder)) as tracer:
                exec(compile(SOURCE, str(path), "exec"), names)
                names["Kind"]().used(1)
            self.assertEqual(used.lines & tracer.lines[str(path)], {15, 19, 21})
            self.assertFalse(guest.lines & tracer.lines[str(path)])

    @ranks(2)
    def test_a_program_of_the_contract_runs_with_both_packages():
        for package in core_bodies.PACKAGES:
            lines, errors = core_bodies.lines_run(dist.get_rank(), (package, ["frozen_unused_tied"]))
            assert not errors, errors
            table = core_bodies.count(package, lines)
            assert 10 < table["files"][-1]["percent"] < 90, table["files"][-1]
            assert any("reset" in row["function"] for row in table["never"])

    def test_comments_and_code_are_counted_by_line(self):
        self.assertEqual(comment_lines.count(SOURCE), (3, 2, 15))

    @ranks(2)
    def test_bits_of_a_run_are_the_same_again():
        first, again = (core_bits.hashes(dist.get_rank(), ["float32"]) for _ in range(2))
        assert "error" not in first["float32"], first
        assert core_bits.differences(again, first) == []
        other = {"float32": {**first["float32"], "losses": "0"}}
        assert core_bits.differences(other, first)[0].startswith("float32: losses differ")

    def test_thirty_runs_are_compared(self):
        self.assertEqual(len(core_bits.RUNS), 30)
        self.assertEqual({size for size, _ in core_bits.RUNS.values()}, {2, 3, 4})
