"""Every error message of the package, from its raise statements: the lists of docs/errors.md when `make docs` builds the site.

The page says what the messages of a part mean, and what to do; error_areas.py has the modules of each part.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from error_areas import AREAS, HINTS

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "torch_ragged"


@dataclasses.dataclass(frozen=True)
class Message:
    """An error: its type, its text with placeholders, and the module and function that raise it."""

    kind: str
    text: str
    module: str
    function: str


def placeholder(node: ast.expr) -> str:
    """A short name for a value in a message."""
    if isinstance(node, ast.Name):
        return f"<{node.id.strip('_')}>"
    if isinstance(node, ast.Attribute) and node.attr == "__name__":
        return "<type>"
    if isinstance(node, ast.Attribute):
        return f"<{node.attr.lstrip('_')}>"
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func).split(".")[-1].lstrip("_")
        if name in ("join", "repr", "list", "tuple", "sorted", "str", "len", "type", "get") and node.args:
            return placeholder(node.args[0])
        return f"<{name.removeprefix('get_')}>"
    if isinstance(node, ast.Subscript):
        return placeholder(node.value)
    if isinstance(node, ast.IfExp):
        return "<...>"
    if isinstance(node, (ast.GeneratorExp, ast.ListComp)):
        return placeholder(node.generators[0].iter)
    names = [part for part in ast.walk(node) if isinstance(part, (ast.Name, ast.Attribute))]
    return placeholder(names[0]) if names else "<...>"


def text_of(node: ast.expr) -> str:
    """The text of a message with its placeholders; empty if it has no literal part."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else placeholder(part.value) for part in node.values]  # type: ignore
        return "".join(map(str, parts))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (text_of(node.left) or placeholder(node.left)) + (text_of(node.right) or placeholder(node.right))
    if isinstance(node, ast.IfExp):
        return text_of(node.body) or text_of(node.orelse)
    if isinstance(node, ast.BoolOp):
        return next(filter(None, map(text_of, node.values)), "")
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        return text_of(node.func.value).replace("{}", "<...>")
    return ""


@functools.cache
def messages() -> tuple[Message, ...]:
    """Every error of the package that is raised with a text of its own."""
    return tuple(_messages())


def _messages() -> Iterator[Message]:
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        tree = ast.parse(path.read_text())
        functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        for node in ast.walk(tree):
            if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call) or not node.exc.args:
                continue
            text = next(filter(None, (text_of(argument) for argument in node.exc.args)), "")
            if not re.search(r"[a-z]{3,}", re.sub(r"<[^>]*>", "", text)):  # A number or a name: no message.
                continue
            around = [f for f in functions if f.lineno <= node.lineno <= (f.end_lineno or 0)]
            name = max(around, key=lambda f: f.lineno).name if around else ""
            yield Message(ast.unparse(node.exc.func).split(".")[-1].lstrip("_"), " ".join(text.split()), module, name)


@functools.cache
def area_of(module: str) -> str:
    """The title of the area of a module: that of the longest prefix in ``AREAS``.

    Raises:
        ValueError: no area has this module.
    """
    found = [(prefix, title) for title, prefixes in AREAS.items() for prefix in prefixes]
    fitting = [(len(prefix), title) for prefix, title in found if module == prefix or module.startswith(f"{prefix}.")]
    if not fitting:
        raise ValueError(f"{module} raises errors, but no area of docs/error_areas.py has it: add it to one")
    return max(fitting)[1]


def entry(message: Message) -> str:
    """One message as an item of a list."""
    kind = {"unsupported": "NotImplementedError", "NoLocalWay": "NotImplementedError", "InvalidArgument": "ValueError"}
    kind |= {"Refused": "RuntimeError", "PeerRaised": "ValueError"}
    hint = next((hint for part, hint in HINTS.items() if part in message.text), "")
    code = message.text.replace("`", "'")
    return f"- `{code}`\\\n  {kind.get(message.kind, message.kind)}, from `{message.module}`.{' ' + hint if hint else ''}"


def entries(title: str) -> list[str]:
    """The lines of the list under the heading ``title`` of docs/errors.md."""
    found = sorted(set(messages()), key=lambda message: (message.text.lower(), message.module))
    return "\n".join({entry(message): None for message in found if area_of(message.module) == title}).splitlines()
