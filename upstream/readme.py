"""Write the table of README.md with the lines that the series changes in torch's own files: ``python upstream/readme.py``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from build import changed_lines

README = Path(__file__).with_name("README.md")
_BEGIN, _END = "<!-- core lines: upstream/readme.py -->\n", "<!-- end -->\n"


def table() -> str:
    """A Markdown table of the lines added and removed, per patch and file."""
    rows = [(step, path, *counts) for step, files in changed_lines().items() for path, counts in files.items()]
    lines = [f"| {step} | `{path}` | {plus} | {minus} |" for step, path, plus, minus in rows]
    total = f"| all | | {sum(row[2] for row in rows)} | {sum(row[3] for row in rows)} |"
    return "\n".join(["| patch | file of torch | added | removed |", "|---|---|---|---|", *lines, total]) + "\n"


def with_table(text: str) -> str:
    """``text``, the README, with a new table."""
    before, _, rest = text.partition(_BEGIN)
    return before + _BEGIN + table() + _END + rest.partition(_END)[2]


if __name__ == "__main__":
    README.write_text(with_table(README.read_text()))
