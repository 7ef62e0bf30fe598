"""Which lines of the mutated files each test runs, in its own process and in all that are forked from it, such as ranks."""

from __future__ import annotations

import functools
import gc
import os
import sys
import tempfile
import threading
from typing import Any

import common

_lines: set[tuple[str, int]] = set()
_files: frozenset[str] = frozenset()
_shared = -1
"""A file of the lines of all processes. A rank that a test kills has written its lines before."""


def start(files: list[str]) -> None:
    """Record the lines of ``files`` from now on."""
    global _files, _shared
    _files = frozenset(files)
    with tempfile.NamedTemporaryFile() as file:
        _shared = os.open(file.name, os.O_RDWR | os.O_APPEND)
    os.register_at_fork(after_in_child=_lines.clear)
    run = common._Pool.run

    def run_afresh(self: Any, function: Any, arguments: Any, size: int, timeout: float) -> list[Any]:
        return run(self, _afresh, (function, arguments), size, timeout)  # type: ignore[no-any-return]

    common._Pool.run = run_afresh  # type: ignore[method-assign]
    sys.settrace(_called)
    threading.settrace(_called)


def take() -> frozenset[tuple[str, int]]:
    """The lines since the last call. Caches of the package are cleared, so the next test computes all that it needs."""
    size = os.fstat(_shared).st_size
    places = [line.partition(" ") for line in os.pread(_shared, size, 0).decode().splitlines()]
    os.ftruncate(_shared, 0)
    _forget()
    return frozenset((path, int(number)) for number, _, path in places)


def _afresh(function: Any, arguments: Any) -> Any:
    """A rank of the pool has run other tests before."""
    _forget()
    return function(*arguments)


def _forget() -> None:
    _lines.clear()
    for cache in gc.get_objects():
        if isinstance(cache, functools._lru_cache_wrapper) and str(cache.__module__).startswith("torch_ragged"):
            cache.cache_clear()


def _called(frame: Any, event: str, _: Any) -> Any:
    return _line if frame.f_code.co_filename in _files else None


def _line(frame: Any, event: str, _: Any) -> Any:
    place = frame.f_code.co_filename, frame.f_lineno
    if place not in _lines:
        _lines.add(place)
        os.write(_shared, f"{place[1]} {place[0]}\n".encode())
    return _line
