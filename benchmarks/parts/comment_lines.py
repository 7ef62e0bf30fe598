"""How many lines carry a comment, per 100 lines of code?

    python -m benchmarks.parts.comment_lines [FOLDER OR FILE ...] [--files] [--json PATH]

A line of code has at least one token that is neither a comment nor part of a docstring; a line with a comment has a comment,
alone or behind code. Docstrings and blank lines are neither.

    percent      every comment counts. By this way FSDP2 of torch 2.13 has 16.1, DTensor 15.0, DCP 8.7, with 3,839 lines of
                 code in FSDP2: the house's figures
    for readers  without comments that speak to tools: ``# noqa``, ``# type:``, ``# mypy:``, ``# pyrefly``, ``# pyre-``,
                 ``# pragma:``, ``# ruff:``. FSDP2: 15.2

Without arguments: the package's folders, the files of its core, and torch's DTensor, DCP and FSDP2.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import io
import re
import tokenize
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).parents[2] / "torch_ragged"
_TORCH = Path(str(importlib.util.find_spec("torch").origin)).parent / "distributed"  # type: ignore[union-attr]  # Not imported.
_FOR_TOOLS = re.compile(r"#\s*(noqa|type:|mypy:|pyrefly|pyre-|pragma:|ruff:|flake8)")
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}


def count(text: str) -> tuple[int, int, int]:
    """Lines with a comment, those of them for readers, and lines of code of a module's text."""
    docstrings: set[int] = set()
    for statement in ast.walk(ast.parse(text)):
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            if isinstance(statement.value.value, str):  # Also one below a constant.
                docstrings.update(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    code: set[int] = set()
    comments: set[int] = set()
    for_tools: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            (for_tools if _FOR_TOOLS.match(token.string) else comments).add(token.start[0])
        if token.type not in _NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(comments | for_tools), len(comments), len(code - docstrings)


def row(name: str, paths: Iterable[Path]) -> dict[str, Any]:
    """The table's line of these files together."""
    found = [count(path.read_text()) for path in paths]
    comments, for_readers, code = (sum(column) for column in zip(*found)) if found else (0, 0, 0)
    percents = {"percent": 100 * comments / max(code, 1), "for readers": 100 * for_readers / max(code, 1)}
    return {"what": name, "comments": comments, "code": code, **percents}


def _under(path: Path) -> list[Path]:
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


def tables(paths: list[Path], with_files: bool) -> list[tuple[str, list[dict[str, Any]]]]:
    """Titles and tables."""
    if paths:
        rows = [row(str(path), _under(path)) for path in paths]
        if with_files:
            rows += [row(str(each), [each]) for path in paths if path.is_dir() for each in _under(path)]
        return [("comments per 100 lines of code", rows)]
    core = _PACKAGE / "fsdp/core"
    folders = [path for path in sorted(_PACKAGE.iterdir()) if path.is_dir() and path.name != "__pycache__"]
    folders += [path for path in sorted((_PACKAGE / "fsdp").iterdir()) if path.is_dir() and path.name != "__pycache__"]
    theirs = [_TORCH / "fsdp/_fully_shard", _TORCH / "tensor", _TORCH / "checkpoint"]
    rows = [row("torch_ragged", _under(_PACKAGE))]
    rows += [row(f"torch_ragged/{path.relative_to(_PACKAGE)}", _under(path)) for path in folders]
    rows += [row(f"torch/distributed/{path.relative_to(_TORCH)}", _under(path)) for path in theirs]
    files = [row(str(path.relative_to(core)), [path]) for path in _under(core)]
    return [
        ("comments per 100 lines of code, by folder", rows),
        ("fsdp/core, by file", [each for each in files if each["code"]]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, help="folders or files; default: see above")
    parser.add_argument("--files", action="store_true", help="each file of the given folders, too")
    parser.add_argument("--json", help="write the results to this file too")
    options = parser.parse_args()
    from benchmarks.common.measure import print_table, write_json  # Behind --help and bad paths: it imports torch.

    found = tables(options.paths, options.files)
    for title, rows in found:
        print_table(title, rows)
    write_json(options.json, dict(found))


if __name__ == "__main__":
    main()
