"""Mutants of a source file: one small change of one expression or statement in the body of a function.

The operators are those of mutmut and cosmic-ray: comparisons, arithmetic, boolean operators, negated conditions, constants, min
and max, deleted statements, empty loops, exceptions that are not caught. Texts of errors, assertions and annotations stay.
"""

from __future__ import annotations

import ast
import collections
import copy
import dataclasses
import gc
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_COMPARISONS: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
}
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_TEXTS = ("warn", "debug", "info", "warning", "error", "record_function")  # Calls whose strings only a reader sees.


@dataclass(frozen=True)
class Mutant:
    """One change: ``parent.field`` (its item ``index``, if it is a list) becomes ``new``."""

    file: str
    function: str
    line: int
    lines: frozenset[int]  # Lines that run if the changed node may run.
    text: str  # The source line, stripped: it names the mutant after other lines have moved.
    change: str
    parent: ast.AST
    field: str
    index: int | None
    new: ast.AST
    first_line: int  # Of the outermost function.

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.file, self.function, self.text, self.change


class Source:
    """A source file and its mutants. The syntax tree is shared, so a process applies at most one of them."""

    def __init__(self, root: Path, file: str) -> None:
        self.path, self.file = root / file, file
        self.rows = self.path.read_text().splitlines()
        self.tree = ast.parse(self.path.read_text())
        self.code = compile(self.tree, str(self.path), "exec")
        mutants = [mutant for name, function in _outermost(self.tree, "") for mutant in self._of(name, function)]
        seen: collections.Counter[tuple[str, ...]] = collections.Counter()
        self.mutants = []
        for mutant in mutants:
            seen[mutant.key] += 1
            number = f" #{seen[mutant.key]}" if seen[mutant.key] > 1 else ""
            self.mutants.append(dataclasses.replace(mutant, change=mutant.change + number))

    def _of(self, name: str, function: Any) -> Iterator[Mutant]:
        first = _first_line(function)
        for parent, field, index, node, statement in _sites(function, "body"):
            for new in _replacements(node, parent, field):
                lines = frozenset(range(node.lineno, _end_of_head(node) + 1)) | {statement.lineno}
                change = f"{_code(node)} -> {_code(new)}"
                text = self.rows[node.lineno - 1].strip()
                yield Mutant(self.file, name, node.lineno, lines, text, change, parent, field, index, new, first)

    def apply(self, mutant: Mutant) -> None:
        """Give the running function the mutated code, in this process and in those that it forks.

        Raises:
            LookupError: no function of this process has the code.
        """
        changed(mutant)
        place = (mutant.function, mutant.first_line)
        self._mention_free_variables()
        code = compile(ast.fix_missing_locations(self.tree), str(self.path), "exec")
        new = next(code for code in _codes(code) if (code.co_qualname, code.co_firstlineno) == place)
        # Inner functions may exist already: those of decorators are made at import.
        codes = {(code.co_qualname, code.co_firstlineno): code for code in (new, *_codes(new))}
        found = False
        for function in gc.get_objects():
            if isinstance(function, types.FunctionType) and function.__code__.co_filename == str(self.path):
                key = function.__code__.co_qualname, function.__code__.co_firstlineno
                if key in codes:
                    function.__code__ = codes[key]
                    found |= key == place
        if not found:
            raise LookupError(f"{mutant.file}: no function {mutant.function} at line {mutant.first_line}")

    def _mention_free_variables(self) -> None:
        """A function's code can only be replaced by code with the same free variables, which the mutant may not use."""
        free = {(code.co_name, code.co_firstlineno): code.co_freevars for code in _codes(self.code) if code.co_freevars}
        for node in ast.walk(self.tree):
            if isinstance(node, _FUNCTIONS):
                names = [ast.Expr(ast.Name(name, ast.Load())) for name in free.get((node.name, _first_line(node)), ())]
                if names:
                    node.body.insert(0, ast.copy_location(ast.If(ast.Constant(False), names, []), node.body[0]))


def changed(mutant: Mutant) -> None:
    """Change the syntax tree that the mutant is of."""
    if mutant.index is None:
        setattr(mutant.parent, mutant.field, mutant.new)
    else:
        getattr(mutant.parent, mutant.field)[mutant.index] = mutant.new


def _first_line(function: Any) -> int:
    return min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _codes(constant)


def _outermost(tree: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """The functions and methods that are not inside another one, with their qualified names."""
    for node in tree.body:
        if isinstance(node, _FUNCTIONS):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _outermost(node, f"{prefix}{node.name}.")


def _sites(parent: Any, *fields: str, statement: Any = None) -> Iterator[tuple[Any, str, int | None, Any, Any]]:
    """Every node that may change below ``parent``, with its field, index and statement."""
    for field in fields or parent._fields:
        value = getattr(parent, field)
        for index, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(node, ast.AST) or isinstance(node, (ast.JoinedStr, ast.Assert)):
                continue
            if field in ("annotation", "returns", "decorator_list", "args") and not isinstance(parent, ast.Call):
                continue
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                continue  # A docstring.
            within = node if isinstance(node, ast.stmt) else statement
            if hasattr(node, "lineno"):
                yield parent, field, index, node, within
            if not isinstance(node, ast.Raise) and not _is_text(node):
                yield from _sites(node, statement=within)


def _is_text(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name in _TEXTS


def _end_of_head(node: Any) -> int:
    """The last line of an expression, or of a statement without its body."""
    body = getattr(node, "body", None)
    return max(body[0].lineno - 1, node.lineno) if isinstance(body, list) else node.end_lineno


def _code(node: ast.AST) -> str:
    text = ast.unparse(ast.fix_missing_locations(node)).strip()
    text = " ".join(text.splitlines()[0].split()) if isinstance(node, (ast.For, ast.ExceptHandler)) else " ".join(text.split())
    return text if len(text) <= 90 else f"{text[:60]} ... {text[-25:]}"


def _with(node: Any, **fields: Any) -> Any:
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def _replacements(node: Any, parent: Any, field: str) -> Iterator[Any]:
    if _is_condition(node, parent, field):
        yield ast.copy_location(ast.UnaryOp(ast.Not(), node), node)
    if isinstance(node, ast.stmt) or isinstance(node, ast.ExceptHandler):
        yield from _statements(node)
    elif isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            yield _with(node, ops=[*node.ops[:i], _COMPARISONS[type(op)](), *node.ops[i + 1 :]])
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        yield _with(node, op=_ARITHMETIC[type(node.op)]())
    elif isinstance(node, ast.BoolOp):
        yield _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield node.operand
    elif isinstance(node, ast.Constant):
        yield from _constants(node)
    elif isinstance(node, ast.Name) and node.id in _NAMES and isinstance(node.ctx, ast.Load):
        yield _with(node, id=_NAMES[node.id])


def _is_condition(node: Any, parent: Any, field: str) -> bool:
    """Whether ``node`` decides a branch, and no other operator changes the decision."""
    if isinstance(node, (ast.Compare, ast.BoolOp, ast.Constant)) or isinstance(getattr(node, "op", None), ast.Not):
        return False
    return field in ("test", "ifs") or (isinstance(parent, ast.BoolOp) and field == "values")


def _constants(node: ast.Constant) -> Iterator[Any]:
    if isinstance(node.value, bool):
        yield _with(node, value=not node.value)
    elif isinstance(node.value, (int, float)):
        yield _with(node, value=node.value + 1)
    elif isinstance(node.value, str):
        yield _with(node, value=f"XX{node.value}")


def _statements(node: Any) -> Iterator[Any]:
    nothing = ast.copy_location(ast.Pass(), node)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and not _is_text(node.value):
        yield nothing
    elif isinstance(node, ast.Raise):
        yield nothing
    elif isinstance(node, ast.Assign) and any(isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets):
        yield nothing
    elif isinstance(node, ast.AugAssign):
        yield nothing
        if type(node.op) in _ARITHMETIC:
            yield _with(node, op=_ARITHMETIC[type(node.op)]())
    elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield _with(node, value=None)
    elif isinstance(node, ast.Continue):
        yield ast.copy_location(ast.Break(), node)
    elif isinstance(node, ast.Break):
        yield ast.copy_location(ast.Continue(), node)
    elif isinstance(node, ast.For):
        yield _with(node, iter=ast.copy_location(ast.Tuple([], ast.Load()), node.iter))
    elif isinstance(node, ast.ExceptHandler):
        yield _with(node, type=ast.copy_location(ast.Tuple([], ast.Load()), node))
