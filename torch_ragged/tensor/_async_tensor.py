"""Local tensors whose data is in flight and must be unpacked after the wait. Nothing here issues a collective."""

from __future__ import annotations

import functools

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils import _pytree as pytree

from torch_ragged.tensor._carry import Pending
from torch_ragged.tensor._ownership import row_major

__all__ = ["async_local"]

_aten = torch.ops.aten


def async_local(pending: Pending) -> AsyncCollectiveTensor:
    """A tensor that waits at first use; torch's own AsyncCollectiveTensor if torch knows what is in flight."""
    if pending.unpack is None and not pending.works:
        return AsyncCollectiveTensor(pending.data.view(pending.local_shape))
    return _AsyncLocal(pending)


class _AsyncLocal(AsyncCollectiveTensor):
    """A local tensor whose data is in flight: the first use waits and unpacks."""

    __slots__ = ["pending"]
    pending: Pending

    @staticmethod
    def __new__(cls, pending: Pending) -> _AsyncLocal:
        shape, data, dtype = torch.Size(pending.local_shape), pending.data, pending.dtype or pending.data.dtype
        self = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=row_major(shape), dtype=dtype, device=data.device, requires_grad=data.requires_grad
        )
        self.pending, self.completed = pending, False
        return self

    def trigger_wait(self) -> torch.Tensor:
        if not self.completed:
            self.elem = self.pending.wait()
            self.completed = True
        return self.elem

    wait = _get_acs_underlying_tensor = trigger_wait

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        self.trigger_wait()
        return ["elem"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        (first, *rest) = args
        if func in (_aten.detach.default, _aten.alias.default) or (
            func is _aten.view.default and isinstance(first, _AsyncLocal) and tuple(rest[0]) == tuple(first.shape)
        ):  # to_local() calls these ops, which use no element yet.
            data, dtype = first.pending.data, first.dtype
            return _AsyncLocal(Pending(data, tuple(first.shape), lambda _: first.trigger_wait(), dtype=dtype))
        wait = functools.partial(pytree.tree_map_only, AsyncCollectiveTensor, lambda tensor: tensor.trigger_wait())
        return func(*wait(args), **wait(kwargs or {}))
