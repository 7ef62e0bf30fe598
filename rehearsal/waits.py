"""The waits of the package, found in its source: the calls that order streams, and what stands in their places in a mutation.

It runs nothing. ``faults.py`` removes each wait, and looks whether the simulator notices.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

from rehearsal.build import HERE

PACKAGE = HERE.parent / "torch_ragged"
FOLDERS = ("fsdp", "transfer", "checkpoint", "optim", "random", "tensor")
"""Where device work is issued. Elsewhere, hosts wait for stores and for gloo."""

NAMES = ("wait", "wait_tensor", "wait_event", "wait_stream", "record", "record_event", "synchronize")


@dataclass(frozen=True)
class Wait:
    """One call that orders streams.

    Attributes:
        file: under ``torch_ragged``.
        function: the qualified name of the function that it is in.
        text: the call, as ``ast.unparse`` writes it.
        start, end: where it is in the bytes of the file.
        removed: what stands there in a mutation.
    """

    file: str
    line: int
    function: str
    text: str
    start: int
    end: int
    removed: str

    @property
    def module(self) -> str:
        """The name of the module that the file is."""
        return ".".join(("torch_ragged", *Path(self.file).with_suffix("").parts))


def waits() -> list[Wait]:
    """All waits of ``FOLDERS``, in the order of files and lines."""
    files = sorted(path for folder in FOLDERS for path in (PACKAGE / folder).rglob("*.py"))
    return [wait for path in files for wait in _waits_of(path)]


def _waits_of(path: Path) -> Iterator[Wait]:
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def visit(node: ast.AST, names: tuple[str, ...], is_statement: bool) -> Iterator[Wait]:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names = (*names, node.name)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in NAMES:
            removed = _removed(node, is_statement)
            if removed is not None:
                begin, end = (starts[line - 1] + column for line, column in _span(node))
                file = str(path.relative_to(PACKAGE))
                yield Wait(file, node.lineno, ".".join(names), ast.unparse(node), begin, end, removed)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, names, isinstance(node, ast.Expr))

    yield from visit(ast.parse(source), (), False)


def _span(node: ast.Call) -> tuple[tuple[int, int], tuple[int, int]]:
    assert node.end_lineno is not None and node.end_col_offset is not None
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def _removed(call: ast.Call, is_statement: bool) -> str | None:
    """What a mutation has instead of ``call``; None if it is no wait of a stream.

    A wait becomes what it waits for, so that a collective is issued all the same. An event that is recorded becomes one that
    never is. A wait that returns its receiver's result (``pending.wait()``) is a call of a method of the package, whose own
    wait is in the list.
    """
    assert isinstance(call.func, ast.Attribute)
    name, values = call.func.attr, call.args
    if name == "record_event":
        return "__import__('torch').cuda.Event()"
    if name not in ("wait", "wait_tensor"):
        return "None" if is_statement else None
    if len(values) > 1 or call.keywords or (values and isinstance(values[0], ast.List) and not is_statement):
        return None  # A store's, or with a timeout.
    if values:
        return ast.unparse(values[0])
    return ast.unparse(call.func.value) if is_statement else None


class Replaced:
    """While this process imports the package, calls have other texts. Enter it before the first import."""

    def __init__(self, texts: dict[Wait, str]) -> None:
        self._texts: dict[str, list[tuple[Wait, str]]] = {}
        for wait, text in texts.items():
            self._texts.setdefault(wait.module, []).append((wait, text))

    def install(self) -> None:
        """Replace the calls in all modules that are imported from now on."""
        assert not set(self._texts) & set(sys.modules), "the package was imported before"
        sys.meta_path.insert(0, self)  # type: ignore[arg-type]

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._texts:
            return None
        file = PACKAGE / self._texts[name][0][0].file
        return importlib.util.spec_from_file_location(name, file, loader=_Loader(name, str(file), self._texts[name]))


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, texts: list[tuple[Wait, str]]) -> None:
        super().__init__(name, path)
        self._replaced = texts

    def get_code(self, fullname: str) -> CodeType:
        source = Path(self.path).read_bytes()
        for wait, text in sorted(self._replaced, key=lambda pair: -pair[0].start):  # From behind: earlier offsets stay.
            source = source[: wait.start] + text.encode() + source[wait.end :]
        return compile(source, self.path, "exec", dont_inherit=True)
