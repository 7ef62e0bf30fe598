"""Print a page of docs/ with its lists, which are made when the site is built: ``python docs/page.py errors``."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

SCRIPTS = {
    "combinations": ("combinations", "table"),
    "compatibility": ("measured", "compatibility"),
    "errors": ("make_errors", "entries"),
    "fsdp2_tests": ("measured", "fsdp2_tests"),
    "mutants": ("measured", "mutants"),
    "op_coverage": ("measured", "op_coverage"),
    "optimizers": ("measured", "optimizers"),
    "programs": ("measured", "programs"),
}
"""A directive to the script of docs/ and its function that make the lines."""


def made(directive: str, *arguments: str) -> list[str]:
    """The lines of Markdown of a directive."""
    script, function = SCRIPTS[directive]
    lines: list[str] = getattr(importlib.import_module(script), function)(*arguments)
    return lines


def filled(text: str) -> str:
    """The text of a page, with the lines of each directive in its place."""

    def lines(match: re.Match[str]) -> str:
        return "\n".join(made(match[1], *filter(None, [match[2]])))

    return re.sub(rf"^```\{{({'|'.join(SCRIPTS)})\}} ?(.*)\n```$", lines, text, flags=re.MULTILINE)


def main(arguments: list[str]) -> None:
    docs = Path(__file__).parent
    pages = {path.relative_to(docs).with_suffix("").as_posix(): path for path in sorted(docs.rglob("*.md"))}
    if len(arguments) != 1 or arguments[0] not in pages:
        sys.exit(f"python docs/page.py PAGE prints a page with its lists, got {arguments}; the pages: {', '.join(pages)}")
    print(filled(pages[arguments[0]].read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
