"""Runs pages of the documentation as a reader would: scripts are saved, commands are run, other code runs block after block.

The blocks of a page follow each other. What the first ones need, such as ``model``, is a folded block of the page, which a
reader can open and copy. A comment of HTML, ``<!-- ranks: 2 -->``, says how many ranks run a page from there on. A block that
cannot run has ``<!-- not run: the reason -->`` before it, and one that needs a package ``<!-- needs: package -->``.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass

_REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# (\S+\.(?:py|yaml|json))\n")
_PIECE = re.compile(r"^<!-- (not run|ranks|needs): (.*?)-->\n|^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Code:
    """A block of Python on a page.

    Attributes:
        line: the line of the page on which it begins.
        text: the code.
        ranks: the ranks that run it.
        reason: why it does not run; empty if it does.
        is_file: it is a script, which a command of the page runs.
        needs: the package without which it is left out; empty if it needs none.
    """

    line: int
    text: str
    ranks: int
    reason: str
    is_file: bool
    needs: str = ""

    @property
    def can_run(self) -> bool:
        return not self.is_file and not self.reason and (not self.needs or importlib.util.find_spec(self.needs) is not None)


def code_of(page: str) -> list[Code]:
    """The Python code of ``docs/<page>`` in its order.

    Raises:
        ValueError: a reason or a package stands before no block, or a comment of ranks is no number.
    """
    text = (_REPOSITORY / "docs" / page).read_text()
    found, ranks, notes = list[Code](), 1, dict[str, str]()
    for piece in _PIECE.finditer(text):
        kind, note, body = piece.groups()
        line = text.count("\n", 0, piece.start()) + 2
        if kind == "ranks":
            ranks = int(note)
        elif kind:
            if not text.startswith("```python", piece.end()):
                raise ValueError(f"docs/{page}, line {line}: {kind!r} stands before no block of Python")
            notes[kind] = note.strip()
        else:
            found.append(Code(line, body, ranks, notes.get("not run", ""), bool(_FILE.match(body)), notes.get("needs", "")))
            notes = {}
    return found


def run_code(page: str, folder: str) -> None:
    """Run the code of a page on this rank, in one namespace and in ``folder``. Scripts and what cannot run are left out."""
    names: dict[str, object] = {"__name__": "__main__"}
    before = os.getcwd()
    os.chdir(folder)
    try:
        for code in code_of(page):
            if code.can_run:
                exec(compile("\n" * (code.line - 1) + code.text, f"docs/{page}", "exec"), names)
    finally:
        os.chdir(before)


def run_page(page: str, timeout: float = 300.0) -> list[str]:
    """Run each ``sh`` block of ``docs/<page>`` in one new folder; returns what each printed.

    A block whose first line is ``# name.py`` is saved there under this name first. ``python``, ``torchrun`` and other commands
    are those of this test's environment, and ``torch_ragged`` is this repository's.

    Raises:
        AssertionError: a command failed; with what it printed. Or the page has no command.
    """
    text = (_REPOSITORY / "docs" / page).read_text()
    blocks = _BLOCK.findall(text)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PATH": os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(_REPOSITORY),
    }
    printed = []
    with tempfile.TemporaryDirectory() as folder:
        for _, body in blocks:
            if name := _FILE.match(body):
                (pathlib.Path(folder) / name[1]).write_text(body)
        for language, body in blocks:
            if language != "sh":
                continue
            done = subprocess.run(
                ["bash", "-e", "-c", body], cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout
            )
            assert done.returncode == 0, f"docs/{page}:\n{body}\n{done.stdout}\n{done.stderr}"
            printed.append(done.stdout)
    assert printed, f"docs/{page} has no command"
    return printed


@functools.cache
def built_site() -> pathlib.Path:
    """The folder of the site, which is built once in a process, and deleted at its end.

    Raises:
        AssertionError: Sphinx warned; with what it said.
    """
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", str(_REPOSITORY / "docs"), folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=_REPOSITORY)
    assert done.returncode == 0, done.stderr
    return pathlib.Path(folder)
