"""Which lines of the mutated files each test runs, in its own process and in its ranks."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import pickle
import sys
import tempfile
import threading
from typing import Any

import common

_lines: set[tuple[str, int]] = set()
_files: frozenset[str] = frozenset()
_told: Any = None  # A file to which ranks with processes of their own add their lines.


def start(files: list[str]) -> None:
    """Record the lines of ``files`` from now on, in the ranks of tests too."""
    global _files, _told
    _files, _told = frozenset(files), tempfile.TemporaryFile("a+b", buffering=0)
    run = common._Pool.run

    def run_and_take(self: Any, function: Any, arguments: Any, size: int, timeout: float) -> list[Any]:
        answers = run(self, _traced, (function, arguments), size, timeout)
        for _, lines in answers:
            _lines.update(lines)
        return [value for value, _ in answers]

    common._Pool.run = run_and_take  # type: ignore[method-assign]
    mortal = common._mortal

    def mortal_that_tells(rank: int, size: int, port: int, seconds: float, pipe: Any, *call: Any) -> None:
        mortal(rank, size, port, seconds, pipe, _tell, *call)

    common._mortal = mortal_that_tells
    _trace()


def take() -> frozenset[tuple[str, int]]:
    """The lines since the last call. Caches of the package are cleared, so the next test computes all that it needs."""
    _told.seek(0)
    with contextlib.suppress(EOFError):
        while True:
            _lines.update(pickle.load(_told))
    _told.truncate(0)
    lines = frozenset(_lines)
    _forget()
    return lines


def _traced(function: Any, arguments: Any) -> tuple[Any, frozenset[tuple[str, int]]]:
    _trace()
    _forget()
    return function(*arguments), frozenset(_lines)


def _tell(function: Any, *arguments: Any) -> Any:
    """Run ``function`` in a rank that may die; if it ends, write its lines to the file."""
    _trace()
    _forget()
    try:
        return function(*arguments)
    finally:
        os.write(_told.fileno(), pickle.dumps(_lines))  # One write to the end: those of several ranks do not mix.


def _forget() -> None:
    _lines.clear()
    _clear_caches()


def _trace() -> None:
    sys.settrace(_called)
    threading.settrace(_called)


def _called(frame: Any, event: str, _: Any) -> Any:
    return _line if frame.f_code.co_filename in _files else None


def _line(frame: Any, event: str, _: Any) -> Any:
    _lines.add((frame.f_code.co_filename, frame.f_lineno))
    return _line


def _clear_caches() -> None:
    for cache in gc.get_objects():
        if isinstance(cache, functools._lru_cache_wrapper) and str(cache.__module__).startswith("torch_ragged"):
            cache.cache_clear()
