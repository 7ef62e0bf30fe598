"""``copy.deepcopy`` of a parallelized model: another model under the same plan, such as a moving average or a reference.

It must not communicate: a script may copy a model on one rank alone.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from torch_ragged.fsdp import FSDPModule
from torch_ragged.spmd._boundary import is_own_hook

__all__ = ["DeepCopy"]

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_OPTIONS_OF_HOOKS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
_OWN = ("__deepcopy__", "plan_ir", "static_modules")


class DeepCopy:
    """The attribute ``__deepcopy__`` of a parallelized model, which ``copy.deepcopy`` calls.

    What a plan adds to a model, hooks and attributes, belongs to one model. It is left out of the copy and made for it anew.

    Args:
        install: makes it for a copy, whose parameters are DTensors already.
    """

    def __init__(self, model: nn.Module, install: Callable[[nn.Module, nn.Module], None]) -> None:
        # Weak: this object is an attribute of the model.
        self._model, self._install = weakref.ref(model), install

    def __call__(self, memo: dict[int, Any]) -> nn.Module:
        model = self._model()
        assert model is not None
        unit = next((name for name, module in model.named_modules() if isinstance(module, FSDPModule)), None)
        if unit is not None:
            raise RuntimeError(
                f"copy.deepcopy of a parallelized {type(model).__name__}: {unit or 'the model'} is a unit, and units are not "
                "copied. Copy the model before parallelize, give both models the plan, and load the state dict into the copy"
            )
        # No rank waits for another one here: each copies its parts, and hooks ask other ranks in the next forward.
        with _without_the_plan(model):
            # This attribute is out of the way now, or it would be called again.
            result: nn.Module = copy.deepcopy(model, memo)
        self._install(model, result)
        return result


@contextlib.contextmanager
def _without_the_plan(model: nn.Module) -> Iterator[None]:
    """While a model is copied, it has the hooks and attributes of its user alone."""
    # Shallow copies: the dicts of hooks themselves are replaced below, and never written to, so that an error leaves the model
    # as it was.
    before = [(vars(module), dict(vars(module))) for module in model.modules()]
    try:
        for attributes, _ in before:
            left: set[int] = set()
            for name in _HOOKS:
                users = {key: hook for key, hook in attributes[name].items() if not is_own_hook(hook)}
                left |= set(attributes[name]) - set(users)
                attributes[name] = type(attributes[name])(users)
            # torch keeps options of hooks by the hook's number, in other dicts.
            for name in _OPTIONS_OF_HOOKS:
                kept = {key: value for key, value in attributes[name].items() if key not in left}
                attributes[name] = type(attributes[name])(kept)
            for name in _OWN:
                attributes.pop(name, None)
            if is_own_hook(attributes.get("generate")):
                del attributes["generate"]
        yield
    finally:
        for attributes, values in before:
            attributes.clear()
            attributes.update(values)
