"""Which tensors an op writes, and how often DTensors were written."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_ragged.tensor._ops._rules import is_written

__all__ = ["count_writes", "writes_in_inference", "writes_unmarked", "written_by"]


def count_writes(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Count a call of an op that autograd does not count: in inference mode, and of a list of DTensors."""
    if torch.is_inference_mode_enabled():
        _in_inference[0] += 1
        return
    tensors = [each for each in written_by(op, args, kwargs) if isinstance(each, torch.Tensor)]
    torch.autograd.graph.increment_version(tensors)


_in_inference = [0]


def writes_in_inference() -> int:
    """How many calls have written to DTensors in inference mode, where autograd counts none."""
    return _in_inference[0]


@functools.cache
def writes_unmarked(op: torch._ops.OpOverload) -> bool:
    return any(is_written(argument) for argument in op._schema.arguments)


def written_by(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The tensors among the arguments that the op writes."""
    arguments = op._schema.arguments
    named = [*zip(arguments, args), *[(each, kwargs[each.name]) for each in arguments if each.name in kwargs]]
    return [leaf for argument, value in named if is_written(argument) for leaf in pytree.tree_leaves(value)]
