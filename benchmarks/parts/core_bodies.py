"""Which lines of FSDP's code does FSDP2's whole contract run, of torch's and of ours? The rest are guests, or errors.

    python -m benchmarks.parts.core_bodies [--only core|FSDP2] [--programs NAME ...] [--never 40] [--json PATH]

The programs of ``benchmarks/common/contract.py`` run on 4 gloo ranks, once with each package; a line that any rank runs in any
of them counts as run.

    lines    of bodies: executable lines inside functions, without ``def`` lines, docstrings and bodies that are ``...``
    run      of these, lines that a program has run
    never    functions of which no line has run, largest first, with the lines of functions inside them

What happens at import is not counted, nor are lines on GPUs: ranks are CPUs. ``--lines FILE`` prints the lines of a file that
have not run.
"""

from __future__ import annotations

import argparse
import ast
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp

import torch_ragged.fsdp
from benchmarks.common.contract import PROGRAMS, RANKS
from benchmarks.common.measure import on_ranks, print_table, write_json

PACKAGES = {
    "core": (torch_ragged.fsdp, Path(torch_ragged.fsdp.__file__).parent / "core"),
    "FSDP2": (torch.distributed.fsdp, Path(torch.distributed.fsdp.__file__).parent / "_fully_shard"),
}
"""By name: the module that programs get, and the folder whose lines count."""

Lines = dict[str, set[int]]
"""By file: line numbers."""


@dataclass(frozen=True)
class Function:
    """One function of a file, and its body."""

    file: str
    name: str
    lines: frozenset[int]


def functions_of(path: Path) -> list[Function]:
    """The functions of a file that stand in no other function. Lines of functions inside belong to the outer one."""
    text = path.read_text()
    executable, tree = set(_executable(compile(text, str(path), "exec"), False)), ast.parse(text)
    found: list[Function] = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = executable & _body(child)
                if lines:
                    found.append(Function(str(path), prefix + child.name, frozenset(lines)))
            elif isinstance(child, ast.ClassDef):
                visit(child, f"{prefix}{child.name}.")
            else:
                visit(child, prefix)

    visit(tree, "")
    return found


def _body(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[int]:
    """The lines of a function's statements: no docstrings, no heads of functions inside it, no ``...``."""
    lines: set[int] = set()
    statements = function.body[1:] if ast.get_docstring(function, clean=False) is not None else function.body
    for statement in statements:
        is_ellipsis = isinstance(statement, ast.Expr) and getattr(statement.value, "value", None) is Ellipsis
        if not is_ellipsis:
            lines.update(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    for inner in (node for statement in statements for node in ast.walk(statement)):
        if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min([inner.lineno, *(decorator.lineno for decorator in inner.decorator_list)])
            lines.difference_update(range(first, inner.end_lineno + 1))  # type: ignore[operator]
            lines |= _body(inner)
    return lines


def _executable(code: CodeType, inside: bool) -> Iterator[int]:
    """Lines of the functions in ``code``. A class's body is none, though it may stand in a function."""
    if inside and code.co_flags & 0x2:  # A function's code has local variables that are not in a dictionary (CO_NEWLOCALS).
        yield from (line for _, _, line in code.co_lines() if line)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _executable(constant, True)


class Tracer:
    """The lines that run in files of ``folder``, in every thread that Python starts."""

    def __init__(self, folder: Path) -> None:
        self.lines: Lines = {}
        files = frozenset(map(str, folder.rglob("*.py")))
        lines = {file: self.lines.setdefault(file, set()) for file in files}

        def see_line(frame: FrameType, event: str, _: Any) -> Any:
            if event == "line":
                lines[frame.f_code.co_filename].add(frame.f_lineno)
            return see_line

        # It is called for each Python function, torch's, too.
        self._see_call = lambda frame, event, _: see_line if frame.f_code.co_filename in files else None

    def __enter__(self) -> Tracer:
        threading.settrace(self._see_call)
        sys.settrace(self._see_call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]


def lines_run(rank: int, options: tuple[str, list[str]]) -> tuple[Lines, dict[str, str]]:
    """On each rank: the lines that the programs run on all of them, and the error of each program that raised one."""
    (package, names), union, errors = options, {}, {}
    fsdp, folder = PACKAGES[package]
    _warm_up()
    for name in names:
        torch.manual_seed(0)
        with Tracer(folder) as tracer:
            try:
                PROGRAMS[name](fsdp)
            except Exception:  # One program's: the others run on, if all ranks have raised.
                errors[name] = traceback.format_exc()
        if rank == 0:  # It takes minutes on a busy machine.
            print(f"{package}: {name} {'raised' if name in errors else 'done'}", file=sys.stderr, flush=True)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (tracer.lines, errors.get(name)))
        for lines, error in everyone:
            for file, numbers in lines.items():
                union.setdefault(file, set()).update(numbers)
            if error is not None:
                errors.setdefault(name, error)
    return union, errors


def _warm_up() -> None:
    """What torch imports at the first step of an optimizer: seconds, and longer under a trace."""
    linear = torch.nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(linear.parameters())
    linear(torch.ones(1)).backward()
    optimizer.step()


def count(package: str, run: Lines) -> dict[str, Any]:
    """The tables of one package: by file, and the functions that have not run."""
    folder = PACKAGES[package][1]
    functions = {path: functions_of(path) for path in sorted(folder.rglob("*.py"))}
    files = []
    for path, found in functions.items():
        lines = {line for function in found for line in function.lines}
        if lines:
            ran = len(lines & run.get(str(path), set()))
            files.append(
                {"file": str(path.relative_to(folder)), "run": ran, "lines": len(lines), "percent": 100 * ran / len(lines)}
            )
    ran, lines = (sum(row[key] for row in files) for key in ("run", "lines"))
    files.append({"file": package, "run": ran, "lines": lines, "percent": 100 * ran / max(lines, 1)})
    never = [each for found in functions.values() for each in found if not each.lines & run.get(each.file, set())]
    never.sort(key=lambda each: -len(each.lines))
    return {
        "files": files,
        "never": [
            {"function": each.name, "file": str(Path(each.file).relative_to(folder)), "lines": len(each.lines)}
            for each in never
        ],
        "not run": {
            str(path.relative_to(folder)): sorted({x for each in found for x in each.lines} - run.get(str(path), set()))
            for path, found in functions.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PACKAGES, help="one package; default: both")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), metavar="NAME", help="default: all")
    parser.add_argument("--never", type=int, default=40, help="functions to print that have not run (default: %(default)s)")
    parser.add_argument("--lines", metavar="FILE", help="print the lines of this file that have not run")
    parser.add_argument("--json", help="write the results to this file too")
    options = parser.parse_args()
    results = {}
    for package in [options.only] if options.only else PACKAGES:
        run, errors = on_ranks(RANKS, lines_run, (package, options.programs))
        for name, error in errors.items():
            print(f"\n{package}: {name} raised\n{error}", file=sys.stderr)
        results[package] = {**count(package, run), "errors": errors}
        print_table(
            f"{package}: body lines that {len(options.programs)} programs of FSDP2's contract run", results[package]["files"]
        )
        never = results[package]["never"]
        if never and options.never:
            print_table(f"{package}: {len(never)} functions never run, the largest of them", never[: options.never])
        for line in results[package]["not run"].get(options.lines, []):
            print(f"{line:5} {(PACKAGES[package][1] / options.lines).read_text().splitlines()[line - 1]}")
    write_json(options.json, results)


if __name__ == "__main__":
    main()
