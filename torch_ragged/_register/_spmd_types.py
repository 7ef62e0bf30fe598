"""What this package touches of tensors that the package ``spmd_types`` has annotated. It never imports that package."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

__all__ = ["annotated_as", "attributes_of", "is_annotated", "untyped"]

_ATTRIBUTES = ("_local_type", "_partition_spec")
"""Where ``spmd_types`` stores the annotation of a tensor."""


def is_annotated(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is plain and has an annotation on a mesh axis of more than one rank."""
    return not isinstance(tensor, DTensor) and bool(getattr(tensor, _ATTRIBUTES[0], None))


def annotated_as(source: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """``result``, with the annotation of ``source``: it has the same values, perhaps in another dtype or on another device."""
    if result is not source and hasattr(source, _ATTRIBUTES[0]):
        vars(result).update({name: vars(source)[name] for name in _ATTRIBUTES if name in vars(source)})
    return result


def attributes_of(param: torch.Tensor) -> dict[str, Any]:
    """The attributes that the user has given ``param``, without its annotation, which is one of plain tensors."""
    return {name: value for name, value in vars(param).items() if name not in _ATTRIBUTES}


def untyped(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, in which ``spmd_types`` checks no types: FSDP's own operations are no part of the model."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        spmd = sys.modules.get("spmd_types")
        if spmd is None or not spmd.is_type_checking():
            return function(*args, **kwargs)
        with spmd.no_typecheck():
            return function(*args, **kwargs)

    return call
