"""Checks of arguments, and their error."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["InvalidArgument", "check_bool", "checks_bools"]

T = TypeVar("T")


class InvalidArgument(ValueError, AssertionError):
    """A wrong argument. FSDP2 raises AssertionError for it, this package ValueError: this class is both."""


def check_bool(call: str, name: str, value: Any) -> None:
    """Raise if the argument ``name`` of ``call`` is no truth value. A string or None would be taken for one silently.

    Numbers are truth values, since FSDP2 takes ``step % 4``, and so are scalars of NumPy and tensors.
    """
    if not isinstance(value, int) and not hasattr(value, "item"):
        raise ValueError(f"{call}: {name} must be a bool, got {value!r}")


def checks_bools(cls: type[T]) -> type[T]:
    """The class ``cls``, whose public methods call :func:`check_bool` on each argument with the annotation ``bool``."""
    for name, method in list(vars(cls).items()):
        if inspect.isfunction(method) and not name.startswith("_"):
            params = enumerate(inspect.signature(method).parameters.values())
            if bools := {each.name: index for index, each in params if each.annotation in (bool, "bool")}:
                setattr(cls, name, _checked(method, bools))
    return cls


def _checked(method: Callable[..., Any], positions: dict[str, int]) -> Callable[..., Any]:
    @functools.wraps(method)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for name, index in positions.items():
            if name in kwargs or index < len(args):
                check_bool(method.__name__, name, kwargs[name] if name in kwargs else args[index])
        return method(*args, **kwargs)

    return checked
