"""Words that pages must not use, since the field has others: ``python docs/words.py``, a part of ``make lint``.

Code, names of the API and tables of names are no prose: text in backticks is not looked at.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INSTEAD = {
    r"(?<!in )flights?\b(?! recorder)": "a batch of matrices",
    r"\b(at home|homes?)\b": "local, on the rank itself",
    r"\bplanes?\b": "codes and scales",
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\b(turn by turn|takes? turns|by turns|a turn)\b": "in chunks, alternately, a slot",
    r"\b(is|are) legal\b": "is allowed",
    r"\bstands? on\b": "is built on",
    r"\bto be had\b": "available",
    r"\bwh(at|o)ever\b": "any, for any ..., a rank that ...",
    r"\bgives? back\b": "free, return",
    r"(?<!equal gradients, )\b(the same|equal) bits on any number of ranks": "with equal gradients, the same bits ...",
}


def pages() -> list[Path]:
    """The pages that people read."""
    return [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Number and text of each line, without code and comments."""
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code:
            yield number, re.sub(r"`[^`]*`|<!--.*?-->|\]\([^)]*\)", "", line)


def found(text: str) -> Iterator[tuple[int, str, str]]:
    """Line, word and what to say instead, for each such word in ``text``."""
    for number, line in prose(text):
        for pattern, better in INSTEAD.items():
            for match in re.finditer(pattern, line, re.IGNORECASE):
                yield number, match[0], better


def main() -> int:
    lines = [
        f"{page.relative_to(ROOT)}:{number}: {word!r}: say {better!r}"
        for page in pages()
        for number, word, better in found(page.read_text())
    ]
    print(*lines, sep="\n", end="\n" if lines else "")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
