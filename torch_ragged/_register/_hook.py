"""The type of a hook, and the way in which a hook extends a function of torch."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch_ragged.tensor._placement_extension import extension_of

__all__ = ["CHECKPOINT", "OPERATORS", "PASSES", "PLACEMENT", "PROTOCOL", "Hook", "extend_in_place", "has", "hook", "hooks"]

# The patches in ``upstream/`` that make hooks unnecessary.
PROTOCOL = "0001-placement-extension"
PLACEMENT = "0002-ragged-shard"
OPERATORS = "0003-ragged-shard-operators"
CHECKPOINT = "0005-ragged-shard-checkpoint"
PASSES = "0014-fsdp-passes"


@dataclass(frozen=True)
class Hook:
    """One extension of torch.

    Attributes:
        target: the name of the torch function or attribute that is extended.
        why: the reason, for the report.
        patch: the upstream patch that makes the hook unnecessary.
        check: whether the target has the layout that the hook was written for.
        install: extends the target; None if another module does it when it is imported.
    """

    target: str
    why: str
    patch: str
    check: Callable[[], bool]
    install: Callable[[], None] | None

    def is_known(self) -> bool:
        """Whether the target has the layout that the hook was written for."""
        try:
            return self.check()
        except AttributeError:  # This torch lacks the target.
            return False


hooks: list[Hook] = []


def hook(target: str, why: str, patch: str, check: Callable[[], bool]) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register the decorated function as the ``install`` of a new hook."""

    def add(install: Callable[[], None]) -> Callable[[], None]:
        hooks.append(Hook(target, why, patch, check, install))
        return install

    return add


def has(function: Any, *parameters: str) -> bool:
    """Whether ``function`` is callable and takes these parameters."""
    return callable(function) and set(parameters) <= set(inspect.signature(function).parameters)


def extend_in_place(
    function: Any, guard: str, make: Callable[[Callable[..., Any]], Callable[..., Any]], **asked: Callable[..., bool]
) -> None:
    """Send calls for which ``guard`` holds to ``make(original)``, also in modules that imported the function's name before.

    The function object keeps its identity, signature and defaults. Its code becomes::

        if guard:
            return make(original)(...)
        return original(...)

    Args:
        guard: an expression in the function's parameters, ``extension_of`` and the names of ``asked``. Other calls pay only for
            a frame and the guard.
        asked: functions that the guard calls.
    """
    # Without defaults: it is called with all arguments.
    original = types.FunctionType(function.__code__, function.__globals__, function.__name__, closure=function.__closure__)
    names = {f"_torch_ragged_{function.__name__}": make(original), f"_torch_{function.__name__}": original}
    function.__globals__.update(names, _extension_of=extension_of, **asked)
    ours, theirs = names
    signature = inspect.signature(original)
    bare = signature.replace(
        parameters=[p.replace(default=p.empty, annotation=p.empty) for p in signature.parameters.values()],
        return_annotation=signature.empty,
    )
    passed = ", ".join(f"{p.name}={p.name}" if p.kind is p.KEYWORD_ONLY else p.name for p in signature.parameters.values())
    condition = guard.replace("extension_of", "_extension_of")
    source = f"def extended{bare}:\n    if {condition}:\n        return {ours}({passed})\n    return {theirs}({passed})\n"
    scope: dict[str, Any] = {}
    exec(source, scope)
    function.__code__ = scope["extended"].__code__
