"""What ``torch_ragged.spmd.parallelize`` changes in torch, for the whole process. An import changes nothing of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.distributed.tensor import DTensor

from torch_ragged._register._hook import OPERATORS, Hook, has, hooks
from torch_ragged.tensor._plain_ops import plain_handlers

__all__ = ["compute_as_before", "compute_as_one_device"]

hooks.append(
    Hook(
        "OpDispatcher._allow_implicit_replication, _custom_op_handlers, after torch_ragged.spmd.parallelize",
        "plain tensors that meet DTensors count as replicated; averages of losses are those of all rows",
        OPERATORS,
        lambda: (
            hasattr(type(DTensor._op_dispatcher), "_allow_implicit_replication")
            and has(DTensor._op_dispatcher.sharding_propagator.propagate, "op_info")
        ),
        install=None,  # ``compute_as_one_device`` does it.
    )
)


def compute_as_one_device(promote: bool) -> None:
    """Let ops on plain DTensors give the results of a single device where torch's own rules do not.

    Args:
        promote: whether plain tensors that meet DTensors count as ``Replicate()``.
    """
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers.update(plain_handlers())
    DTensor._op_dispatcher._allow_implicit_replication = promote


@contextlib.contextmanager
def compute_as_before() -> Iterator[None]:
    """What :func:`compute_as_one_device` changes inside of the context is undone at its end."""
    dispatcher = DTensor._op_dispatcher
    handlers: dict[Any, Any] = dispatcher._custom_op_handlers
    before, promotes = dict(handlers), dispatcher._allow_implicit_replication
    try:
        yield
    finally:
        handlers.clear()
        handlers.update(before)
        dispatcher._allow_implicit_replication = promotes
