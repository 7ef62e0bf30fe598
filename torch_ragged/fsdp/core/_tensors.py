"""Finds and replaces tensors in the inputs and outputs of modules. It does not look into opaque objects."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from torch_ragged.fsdp.core._spmd_types import annotated_as

__all__ = ["map_tensors", "tensors_in"]

_WITHOUT_TENSORS = (type(None), int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Apply ``function`` to each tensor in ``value``: in pytree's containers, sets, packed sequences and dataclasses.

    Containers in the result are new, of the same type. Other objects are not changed. A result has its tensor's annotation of
    ``spmd_types``: ``function`` must not change values, but for their dtype.
    """
    return pytree.tree_map(lambda leaf: _map_leaf(function, leaf), value, is_leaf=_is_packed)


def tensors_in(value: Any) -> tuple[list[torch.Tensor], bool]:
    """The tensors that :func:`map_tensors` finds, in its order; and whether other objects may hide more tensors."""
    tensors: list[torch.Tensor] = []
    opaque: list[Any] = []

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    for leaf in pytree.tree_leaves(value, is_leaf=_is_packed):
        _map_leaf(collect, leaf, opaque)
    return tensors, bool(opaque)


def _is_packed(value: Any) -> bool:
    """To pytree a packed sequence is a tuple of four tensors, but ``batch_sizes`` must stay on the CPU."""
    return isinstance(value, PackedSequence)


def _is_container(leaf: Any) -> bool:
    is_dataclass = dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)
    return is_dataclass or isinstance(leaf, (set, frozenset, PackedSequence))


def _map_leaf(function: Callable[[torch.Tensor], torch.Tensor], leaf: Any, opaque: list[Any] | None = None) -> Any:
    """:func:`map_tensors` of a pytree leaf. Objects that are not changed, and may hold tensors, are appended to ``opaque``."""
    if isinstance(leaf, torch.Tensor):
        return annotated_as(leaf, function(leaf))
    if not _is_container(leaf):
        if opaque is not None and not isinstance(leaf, _WITHOUT_TENSORS):
            opaque.append(leaf)
        return leaf

    def inside(part: Any) -> Any:
        return pytree.tree_map(lambda inner: _map_leaf(function, inner, opaque), part, is_leaf=_is_packed)

    if isinstance(leaf, PackedSequence):
        data = annotated_as(leaf.data, function(leaf.data))
        orders = [None if order is None else order.to(data.device) for order in (leaf.sorted_indices, leaf.unsorted_indices)]
        return PackedSequence(data, leaf.batch_sizes, *orders)
    if isinstance(leaf, (set, frozenset)):
        return type(leaf)(inside(part) for part in leaf)
    result = copy.copy(leaf)
    for field in dataclasses.fields(leaf):
        if hasattr(leaf, field.name):
            object.__setattr__(result, field.name, inside(getattr(leaf, field.name)))  # It may be frozen.
    return result
