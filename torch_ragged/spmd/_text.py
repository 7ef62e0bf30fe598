"""The text of a plan's values: placements, granularities, policies and names, as a user writes them and as JSON has them.

It must not evaluate text: what it reads becomes a literal, or a value of the tables below, or an error.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor.placement_types import Placement

from torch_ragged import granularity
from torch_ragged._ranks.agreement import text_of
from torch_ragged.fsdp import BufferPlacements, Float4Policy, Float8Policy, Offload
from torch_ragged.granularity import Granularity
from torch_ragged.tensor._placement_text import placement_text, read_call, read_placement

__all__ = [
    "compared_text",
    "nearest",
    "path_text",
    "quoted",
    "read_value",
    "value_text",
    "write_value",
]


def _named(*makers: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    return {maker.__name__: maker for maker in makers}


_GRANULARITIES = _named(granularity.elements, granularity.rows, granularity.blocks, granularity.tensor, granularity.segments)
_POLICIES = _named(MixedPrecisionPolicy, Float4Policy, Float8Policy, OffloadPolicy, CPUOffloadPolicy, Offload, BufferPlacements)


def path_text(path: str) -> str:
    """``path`` as a Python string, with as few backslashes as possible."""
    return f'r"{path}"' if "\\" in path and '"' not in path and not path.endswith("\\") else quoted(path)


def quoted(name: str) -> str:
    """``name`` in double quotes, as a Python string."""
    return f'"{name}"' if name.isprintable() and not set(name) & {'"', "\\"} else repr(name)


def value_text(value: Any) -> str:
    """The value of an option of a unit, as a user writes it."""
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    # A policy may have a function, whose address differs between ranks.
    return value.text if isinstance(value, Granularity) else re.sub(r"<function (\S+) at 0x\w+>", r"\1", repr(value))


def compared_text(value: Any) -> str:
    """The value of an option of a unit, as ranks compare it: in :class:`Offload`, for example, a folder may differ."""
    return value.text if isinstance(value, Granularity) else text_of(value)


def write_value(value: Any) -> Any:
    """The JSON of the value of an option: itself, or ``{kind: content}``.

    Raises:
        TypeError: JSON cannot hold the value, such as a function.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, tuple):
        return {"tuple": [write_value(each) for each in value]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, Placement):
        return {"placement": placement_text(value)}
    if isinstance(value, Granularity):
        return {"granularity": value.text}
    if _POLICIES.get(type(value).__name__) is type(value):
        # Defaults are left out: a newer torch has fields that an older one does not know.
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if getattr(value, f.name) != f.default}
        return {type(value).__name__: {name: write_value(each) for name, each in fields.items()}}
    raise TypeError(f"JSON cannot hold {value!r}: use a value of numbers, strings, dtypes, granularities or policies")


def read_value(value: Any) -> Any:
    """The inverse of :func:`write_value`.

    Raises:
        ValueError: ``value`` is not what :func:`write_value` makes.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict) and len(value) == 1:
        ((kind, content),) = value.items()
        if kind == "tuple" and isinstance(content, list):
            return tuple([read_value(each) for each in content])
        if kind == "dtype" and isinstance(content, str) and isinstance(getattr(torch, content, None), torch.dtype):
            return getattr(torch, content)
        if kind == "placement" and isinstance(content, str):
            return read_placement(content)
        if kind == "granularity" and isinstance(content, str):
            return read_call(content, _GRANULARITIES)
        if kind in _POLICIES and isinstance(content, dict):
            return _policy(kind, {name: read_value(each) for name, each in content.items()})
    raise ValueError(
        f"{value!r} is no option of a unit in JSON: write a number, a string, true, false, null, or an object with one key of "
        f"tuple, dtype, placement, granularity, {', '.join(_POLICIES)}"
    )


def _policy(kind: str, fields: dict[str, Any]) -> Any:
    known = [field.name for field in dataclasses.fields(_POLICIES[kind])]  # type: ignore[arg-type]
    if unknown := sorted(set(fields) - set(known)):
        raise ValueError(f"{kind} has no field {', '.join(unknown)}: the fields are {', '.join(known)}")
    return _POLICIES[kind](**fields)


def nearest(text: str, names: Iterable[str], most: int = 3) -> list[str]:
    """The ``names`` that look most like ``text``, a name or a regular expression. Of names that differ in numbers, one."""
    alike: dict[str, str] = {}
    for name in names:
        alike.setdefault(re.sub(r"\d+", "0", name), name)
    plain = re.sub(r"\\d[+*]?|\d+|\[\^?[^\]]*\][+*]?", "0", text).replace("\\", "")
    return [alike[name] for name in difflib.get_close_matches(plain, alike, most, cutoff=0.5)]
