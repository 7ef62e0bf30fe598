"""Runs a page of the documentation as its reader would: its scripts are saved, its commands are run."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import tempfile

_REPOSITORY = pathlib.Path(__file__).parent.parent
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# (\S+\.(?:py|yaml|json))\n")


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
