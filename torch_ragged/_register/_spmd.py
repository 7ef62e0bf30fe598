"""What ``torch_ragged.spmd.parallelize`` changes in torch, for the whole process. An import changes nothing of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss

from torch_ragged._register._hook import OPERATORS, Hook, has, hooks
from torch_ragged.tensor._plain_ops import all_ops, plain_handlers

__all__ = ["compute_as_before", "compute_as_one_device", "compute_as_torch"]

hooks.append(
    Hook(
        "OpDispatcher._allow_implicit_replication, _custom_op_handlers, _propagate_op_sharding_dispatch_slow_path, "
        "loss._disable_custom_loss_ops, after torch_ragged.spmd.parallelize",
        "plain tensors that meet DTensors count as replicated; averages of losses are those of all rows, after loss_parallel() "
        "too; an op that torch cannot shard runs on replicated tensors",
        OPERATORS,
        lambda: (
            hasattr(type(DTensor._op_dispatcher), "_allow_implicit_replication")
            and has(DTensor._op_dispatcher.sharding_propagator.propagate, "op_info")
            and hasattr(loss, "_disable_custom_loss_ops")
        ),
        install=None,  # ``compute_as_one_device`` does it.
    )
)


_original: list[Any] = []
"""What torch had, while it is replaced: the dispatcher's handlers and its promotion of plain tensors, and the end of
``loss_parallel``, which removes all handlers of losses."""


def compute_as_one_device(promote: bool) -> None:
    """Let ops on plain DTensors give the results of a single device where torch's own rules do not.

    Args:
        promote: whether plain tensors that meet DTensors count as ``Replicate()``.
    """
    dispatcher = DTensor._op_dispatcher
    handlers: dict[Any, Any] = dispatcher._custom_op_handlers
    if not _original:
        kept = {op: handlers.get(op) for op in plain_handlers()}
        _original.extend((kept, dispatcher._allow_implicit_replication, loss._disable_custom_loss_ops))
        loss._disable_custom_loss_ops = _end_loss_parallel
    all_ops.run = True
    handlers.update(plain_handlers())
    dispatcher._allow_implicit_replication = promote


def _end_loss_parallel() -> None:
    _original[2]()
    DTensor._op_dispatcher._custom_op_handlers.update(plain_handlers())


def compute_as_torch() -> None:
    """Undo :func:`compute_as_one_device`."""
    if not _original:
        return
    dispatcher = DTensor._op_dispatcher
    handlers: dict[Any, Any] = dispatcher._custom_op_handlers
    kept, promotes, loss._disable_custom_loss_ops = _original
    for op, handler in kept.items():
        if handler is None:
            handlers.pop(op, None)
        else:
            handlers[op] = handler
    dispatcher._allow_implicit_replication = promotes
    all_ops.run = False
    _original.clear()


@contextlib.contextmanager
def compute_as_before() -> Iterator[None]:
    """What :func:`compute_as_one_device` changes inside of the context is undone at its end."""
    before = DTensor._op_dispatcher._allow_implicit_replication if _original else None
    try:
        yield
    finally:
        if before is None:
            compute_as_torch()
        else:
            DTensor._op_dispatcher._allow_implicit_replication = before
