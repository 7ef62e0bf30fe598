"""Paths: how a plan names parameters, buffers, and the tensors that enter and leave a module.

It must not know models: it reads a path, and answers which of given names the path means.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Optional, Union

from torch_ragged.spmd._text import path_text

__all__ = [
    "WRAPPED",
    "ActivationPath",
    "Key",
    "activation_path",
    "check_regex",
    "grad_path",
    "is_activation",
    "matches",
    "under",
    "with_adapters",
]

Key = tuple[Union[str, int], ...]

WRAPPED = r"base_layer|original_module|modules_to_save\.\w+"
"""Where PEFT puts a module that it wraps, below the module's own name."""

_BRACKETS = re.compile(r"(?P<before>.*)<(?P<side>in|out)(?::(?P<key>\w+(?:\.\w+)*))?>", re.DOTALL)
_STRAY_BRACKET = re.compile(r"(?<!\?)(?<!\?P)<")  # Not of (?<=...), (?<!...) or (?P<name>...).


@dataclass(frozen=True)
class ActivationPath:
    r"""The path of a tensor that enters or leaves modules::

        r"layers\.\d+\.mlp.<in>"       the first argument of forward, passed by position or by keyword
        "encoder.<in:2>"               the argument number 2 of forward; numbers begin with 0
        "encoder.<in:mask>"            the argument with this name
        "<out>"                        the output of the root
        "<out:0.hidden>"               in the output: the element 0, and in it the key or attribute "hidden"

    ``<in>`` is ``<in:0>``: what ``parallelize_module`` calls the input of a module. Numbers count the parameters in the
    signature of ``forward``. So a number and a name can mean one argument. If a path leads to a container, it means the first
    tensor in it.

    Attributes:
        module: a regular expression of modules' names. An empty one is the root.
        side: ``"in"`` or ``"out"``.
        key: what stands behind the colon.
    """

    module: str
    side: str
    key: Key


def is_activation(path: str) -> bool:
    """Whether ``path`` ends in brackets, and so names activations. No regular expression of a name ends in ``>``."""
    return path.endswith(">")


def activation_path(path: str) -> Optional[ActivationPath]:
    """Read ``path``. None: it names parameters and buffers.

    Raises:
        ValueError: the brackets are not as :class:`ActivationPath` says, or the rest is no regular expression.
    """
    _check_string(path)
    found = _BRACKETS.fullmatch(path)
    if _STRAY_BRACKET.search(path if found is None else found["before"]) or (found is None and is_activation(path)):
        raise ValueError(
            f"path {path_text(path)} has brackets that name no activation: end it with <in>, <in:2>, <in:name>, <out>, "
            "<out:0>, <out:key> or <out:0.key>, and use no other < and >"
        )
    if found is None:
        check_regex(path)
        return None
    before = found["before"]
    module = before.removesuffix(".").removesuffix("\\")
    if before and before == module:
        wanted = f"{before}.{path[len(before) :]}"
        raise ValueError(f"path {path_text(path)} has no dot before the brackets: write {path_text(wanted)}")
    check_regex(module)
    key = tuple([int(part) if part.isdecimal() else part for part in (found["key"] or "").split(".") if part])
    return ActivationPath(module, found["side"], key or ((0,) if found["side"] == "in" else ()))


def grad_path(path: str) -> Optional[str]:
    """The path of a parameter whose gradient ``path`` names: ``"fc.weight"`` for ``"fc.weight.grad"``. None: no gradient."""
    tensor = path.removesuffix("grad")
    return tensor.removesuffix(".").removesuffix("\\") if tensor != path and tensor.endswith(".") else None


def check_regex(path: str) -> None:
    """Raise if ``path`` is no regular expression.

    Raises:
        TypeError: ``path`` is no string.
        ValueError: it does not compile.
    """
    _check_string(path)
    try:
        re.compile(path)
    except re.error as error:
        raise ValueError(f"path {path_text(path)} is no regular expression: {error}") from error


def _check_string(path: str) -> None:
    if not isinstance(path, str):
        raise TypeError(f"a path is a string, got {path!r}")


def matches(path: str, names: Iterable[str]) -> list[str]:
    """The ``names`` that ``path`` matches as a whole, in their order."""
    pattern = re.compile(path)
    return [name for name in names if pattern.fullmatch(name)]


def with_adapters(module: str, leaf: str, dim: int) -> str:
    r"""The path of ``leaf``, a weight of modules that is cut in dimension ``dim``, and of what is cut likewise if PEFT has
    wrapped them: the weight itself, a copy that is trained, and of the matrices of LoRA the one with this dimension.
    """
    return rf"{module}\.(({WRAPPED}|lora_{'AB'[dim == 0]}\.\w+)\.)?{leaf}"


def under(prefix: str, path: str) -> str:
    """``path`` in a model that is the submodule ``prefix`` of another one.

    ``prefix`` is a regular expression of modules' names. An empty ``path`` of modules is the root, and becomes ``prefix``.
    """
    if not prefix or not path:
        return prefix or path
    module, brackets = path, ""
    if is_activation(path):
        start = path.rindex("<")
        module, brackets = path[:start], path[start:]
        if not module:
            return f"{_alone(prefix)}.{brackets}"
        dot = "\\." if module.endswith("\\.") else "."
        module, brackets = module.removesuffix(dot), dot + brackets
    return rf"{_alone(prefix)}\.{_alone(module)}{brackets}"


def _alone(regex: str) -> str:
    """``regex`` in a group if it has alternatives, so that they end where it ends."""
    depth, in_class = 0, False
    for part in re.findall(r"\\.|.", regex, re.DOTALL):
        in_class = part == "[" or (in_class and part != "]")
        depth += 0 if in_class else (part == "(") - (part == ")")
        if part == "|" and depth == 0 and not in_class:
            return f"(?:{regex})"
    return regex
