"""``torch-ragged plan|checkpoint|spmd``, and what these three command lines share.

It must import only the one that is called.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, Optional

__all__ = ["OneLineParser", "check_file", "command_name", "ends_quietly", "main"]

_COMMANDS = {"plan": "offline", "checkpoint": "checkpoint", "spmd": "spmd"}
"""The folder of each command."""

Main = Callable[[Optional[Sequence[str]]], int]


def command_name(module: str) -> str:
    """The command that was typed: ``torch-ragged plan``, ``torch-ragged-plan``, or ``python -m`` and a module."""
    path = Path(sys.argv[0])
    typed = "python -m torch_ragged" if path.parts[-2:] == ("torch_ragged", "__main__.py") else path.name
    if typed in ("torch-ragged", "python -m torch_ragged"):
        return next(f"{typed} {command}" for command, folder in _COMMANDS.items() if module == f"torch_ragged.{folder}")
    return typed if typed.startswith("torch-ragged-") else f"python -m {module}"


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors have one line."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def check_file(option: str, path: str | None) -> None:
    """Check that ``path``, if it is given, can be written.

    Raises:
        ValueError: it is a folder, or in no folder.
    """
    if path and (Path(path).is_dir() or not Path(path).absolute().parent.is_dir()):
        raise ValueError(f"--{option} {path}: expected the path of a file in an existing folder")


def ends_quietly(main: Main) -> Callable[..., int]:
    """A ``main`` that returns 0 if the reader of its output, such as ``head``, has ended."""

    @functools.wraps(main)
    def call(argv: Sequence[str] | None = None) -> int:
        try:
            status = main(argv)
            sys.stdout.flush()  # Or Python writes the rest at exit, where its error cannot be caught.
            return status
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # For the flush at exit.
            return 0

    return call


@ends_quietly
def main(argv: Sequence[str] | None = None) -> int:
    """Run one of the three with the arguments ``argv`` (default: the command line's). Returns its exit status."""
    arguments = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser("torch-ragged", description="Plan buffers, look at checkpoints, explain plans of a model.")
    parser.add_argument("command", choices=_COMMANDS, help="what to run; COMMAND --help documents it")
    command = parser.parse_args(arguments[:1]).command
    return int(importlib.import_module(f"torch_ragged.{_COMMANDS[command]}._cli").main(arguments[1:]))
