"""Remembers from case to case which shapes torch finds for results. It is half the time of a case, and no code of the package.

The answer depends on the op, on shapes, strides and dtypes of tensors, and on other arguments; not on placements or meshes. A
sample of the answers is found again, and must be equal.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

__all__ = ["check_shapes", "remember_shapes"]

_EVERY = 64  # One answer in so many is found again.
_others: list[str] = []


def remember_shapes() -> None:
    """From now on, torch finds the shapes of a call once in this process."""
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    if "_propagate_tensor_meta_non_cached" in vars(propagator):
        return
    find, known, asked = propagator._propagate_tensor_meta_non_cached, {}, itertools.count(1)

    def remembered(schema: Any) -> Any:
        modes = (torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        key = (schema.op, modes, _bare(schema.args_schema), _bare(tuple(schema.kwargs_schema.items())))
        if key not in known:
            known[key] = find(schema)
        elif next(asked) % _EVERY == 0 and (now := find(schema)) != known[key]:
            _others.append(f"{schema}: torch finds {now}, it had found {known[key]}")
        return known[key]

    propagator._propagate_tensor_meta_non_cached = remembered


def check_shapes() -> None:
    """Raise if an answer was another one when it was found again. At once, the dispatcher would take it for torch's error."""
    assert not _others, _others


def _bare(value: Any) -> Any:
    """An argument without placements, as a key. Equal numbers of other types are other arguments."""
    if isinstance(value, DTensorSpec):
        return value.tensor_meta
    if isinstance(value, (list, tuple)):
        return type(value), *map(_bare, value)
    return type(value), value
