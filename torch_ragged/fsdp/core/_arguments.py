"""Checks of arguments of ``fully_shard`` by themselves, before any parameter is looked at. They change nothing."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from torch_ragged.granularity import Granularity

__all__ = ["check_function", "check_mp_policy", "check_offload_policy"]

_EXAMPLES = {
    "orig_param_policy": ("fqn, parameter", "rows(32)"),
    "shard_placement_fn": ("parameter", "Shard(0)"),
}
"""By argument of ``fully_shard``: the arguments of such a function, and what it may return."""


def check_mp_policy(mp_policy: Any) -> None:
    """Raise if ``mp_policy`` is no policy, or has a dtype that parameters cannot have.

    Raises:
        TypeError: it is.
    """
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        example = mp_policy if isinstance(mp_policy, torch.dtype) else torch.bfloat16
        raise TypeError(
            f"mp_policy={mp_policy!r} is no policy: pass mp_policy=MixedPrecisionPolicy(param_dtype={example}), which "
            "torch.distributed.fsdp has"
        )
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(mp_policy, name)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(
                f"{name}={dtype!r} of mp_policy is no floating-point dtype of torch: pass one, such as {name}=torch.bfloat16, "
                "or None"
            )


def check_offload_policy(offload_policy: Any) -> None:
    """Raise if ``offload_policy`` is no policy, such as the class of one. FSDP2 would ignore it; it takes None, too.

    Raises:
        TypeError: it is.
    """
    if offload_policy is not None and not isinstance(offload_policy, OffloadPolicy):
        raise TypeError(
            f"offload_policy={offload_policy!r} is no policy: pass offload_policy=CPUOffloadPolicy(), which "
            "torch.distributed.fsdp has, or leave it out"
        )


def check_function(name: str, function: Any) -> None:
    """Raise if ``function`` cannot be called as the argument ``name`` of ``fully_shard`` is.

    Raises:
        TypeError: it is no function, or takes other arguments.
    """
    if function is None:
        return
    arguments, result = _EXAMPLES[name]
    example = f"{name}=lambda {arguments}: {result}"
    if isinstance(function, Granularity):
        raise TypeError(
            f"{name}={function.text} is a granularity: pass a function that returns one for each parameter, {name}=lambda "
            f"{arguments}: {function.text}"
        )
    if not callable(function):
        raise TypeError(f"{name}={function!r} is no function: pass one of ({arguments}), such as {example}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # It is written in C.
        return
    try:
        signature.bind(*arguments.split(", "))
    except TypeError as error:
        given = f"{getattr(function, '__name__', type(function).__name__)}{signature}"
        raise TypeError(
            f"{name} got {given}, which fully_shard cannot call with ({arguments}): {error}. Pass a function of these "
            f"arguments, such as {example}"
        ) from error
