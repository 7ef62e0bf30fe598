"""Claims: the options of a call as text that ranks compare before anything changes. Nothing here communicates."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["compared_as", "text_of"]

_COMPARED_AS = "torch_ragged.compared_as"


def compared_as(what: Callable[[Any], object]) -> dict[str, Any]:
    """Metadata of a field that may differ between ranks: they compare ``what(value)``, not the value::

    to: str = field(default="cpu", metadata=compared_as(lambda to: to if to == "cpu" else "a folder"))

    All other fields of a dataclass are compared as they are, also those that are new to it.
    """
    return {_COMPARED_AS: what}


def text_of(value: Any) -> str:
    """A text that is equal on ranks with equal values, and differs on others.

    A dataclass is its class and all fields; a function is its module and qualified name, as its address differs between ranks.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [(each.name, each.metadata.get(_COMPARED_AS), getattr(value, each.name)) for each in dataclasses.fields(value)]
        parts = [f"{name}={text_of(given if what is None else what(given))}" for name, what, given in fields]
        return f"{type(value).__qualname__}({', '.join(parts)})"
    if isinstance(value, functools.partial):
        named = [f"{name}={text_of(each)}" for name, each in value.keywords.items()]
        return f"partial({', '.join([text_of(value.func), *map(text_of, value.args), *named])})"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(text_of, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(text_of, value)))}}}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{text_of(key)}: {text_of(each)}' for key, each in value.items())}}}"
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    text = repr(value)
    return text_of(type(value)) if " at 0x" in text else text
