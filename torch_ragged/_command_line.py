"""What the command lines share."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Optional

__all__ = ["command_name", "ends_quietly"]

Main = Callable[[Optional[Sequence[str]]], int]


def command_name(module: str) -> str:
    """The command that was typed: the console script, such as ``torch-ragged-plan``, or ``python -m`` and ``module``."""
    typed = Path(sys.argv[0]).name
    return typed if typed.startswith("torch-ragged-") else f"python -m {module}"


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
