"""What a hook is, and how one extends a function of torch."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["CHECKPOINT", "OPERATORS", "PROTOCOL", "Hook", "extend_in_place", "has", "hook", "hooks"]

# The patches in ``upstream/`` that make hooks unnecessary.
PROTOCOL = "0001-placement-extension-protocol"
OPERATORS = "0003-ragged-shard-operators"
CHECKPOINT = "0005-checkpoint"


@dataclass(frozen=True)
class Hook:
    """One extension of torch: what is extended, why, and the upstream patch that would make it unnecessary."""

    target: str
    why: str
    patch: str
    check: Callable[[], bool]
    install: Callable[[], None]

    def is_known(self) -> bool:
        """Whether the target has the layout that the hook was written for."""
        try:
            return self.check()
        except AttributeError:  # The target has gone.
            return False


hooks: list[Hook] = []


def hook(target: str, why: str, patch: str, check: Callable[[], bool]) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Make the decorated function, which installs it, a hook."""

    def add(install: Callable[[], None]) -> Callable[[], None]:
        hooks.append(Hook(target, why, patch, check, install))
        return install

    return add


def has(function: Any, *parameters: str) -> bool:
    """Whether ``function`` still takes these parameters."""
    return callable(function) and set(parameters) <= set(inspect.signature(function).parameters)


def extend_in_place(function: types.FunctionType, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Extend a module-level function for everyone, those included who imported its name before this package.

    The function object keeps its identity; its code becomes a call of ``make(original)``.
    """
    original = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    original.__kwdefaults__ = function.__kwdefaults__
    signature = inspect.signature(original)
    slot = f"_torch_ragged_{function.__name__}"
    function.__globals__[slot] = make(original)
    # Parameters by name, with the defaults that the function has: packing them into tuple and dict takes three times as long.
    bare = signature.replace(
        parameters=[p.replace(default=p.empty, annotation=p.empty) for p in signature.parameters.values()],
        return_annotation=signature.empty,
    )
    passed = ", ".join(f"{p.name}={p.name}" if p.kind is p.KEYWORD_ONLY else p.name for p in signature.parameters.values())
    scope: dict[str, Any] = {}
    exec(f"def extended{bare}:\n    return {slot}({passed})\n", scope)
    function.__code__ = scope["extended"].__code__
