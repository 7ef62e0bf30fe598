"""Which lines of the mutated files each test runs, in its own process and in its ranks."""

from __future__ import annotations

import functools
import gc
import sys
import threading
from typing import Any

import common

_lines: set[tuple[str, int]] = set()
_files: frozenset[str] = frozenset()


def start(files: list[str]) -> None:
    """Record the lines of ``files`` from now on, in the ranks of tests too."""
    global _files
    _files = frozenset(files)
    run = common._Pool.run

    def run_and_take(self: Any, function: Any, arguments: Any, size: int, timeout: float) -> list[Any]:
        answers = run(self, _traced, (function, arguments), size, timeout)
        for _, lines in answers:
            _lines.update(lines)
        return [value for value, _ in answers]

    common._Pool.run = run_and_take  # type: ignore[method-assign]
    _trace()


def take() -> frozenset[tuple[str, int]]:
    """The lines since the last call. Caches of the package are cleared, so the next test computes all that it needs."""
    lines = frozenset(_lines)
    _lines.clear()
    _clear_caches()
    return lines


def _traced(function: Any, arguments: Any) -> tuple[Any, frozenset[tuple[str, int]]]:
    _trace()
    take()
    return function(*arguments), frozenset(_lines)


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
