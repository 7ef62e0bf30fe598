"""Which versions of a program an integration knows. Nothing here imports the program."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Sequence

__all__ = ["require"]


def require(program: str, at_least: Sequence[int], reason: str) -> str:
    """The installed version of ``program``, a name of pip's.

    Raises:
        ImportError: it is not installed, or older than ``at_least``; the text ends with ``reason``.
    """
    wanted = ".".join(map(str, at_least))
    try:
        version = importlib.metadata.version(program)
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError(f"{program} is not installed: install {program} >= {wanted}, {reason}") from error
    if [int(number) for number in re.findall(r"\d+", version)[: len(at_least)]] < list(at_least):
        raise ImportError(f"{program} {version} is installed: install {program} >= {wanted}, {reason}")
    return version
