"""Hooks on ``torch/distributed/tensor/_redistribute.py`` and ``DTensor.redistribute``."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor, _are_we_tracing
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor import _redistribute as dtensor_redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree
from torch.utils._debug_mode import DebugMode

from torch_ragged._ops import has_ragged_rows, redistribute_rows
from torch_ragged._ownership import row_major
from torch_ragged._redistribute import REDUCTIONS, Pending, broadcast_local, redistribute_local
from torch_ragged._register._hook import PROTOCOL, extend_in_place, has, hook
from torch_ragged.placement_types import normalize_placements

_aten = torch.ops.aten


@hook(
    "DTensor.redistribute",
    "check ragged placements before any communication",
    PROTOCOL,
    lambda: has(DTensor.redistribute, "device_mesh", "placements", "async_op"),
)
def _install_redistribute() -> None:
    guard = "placements is not None and (has_ragged(placements) or has_ragged(self._spec.placements))"
    extend_in_place(DTensor.redistribute, guard, lambda original: _redistribute)  # type: ignore[arg-type]


def _redistribute(self, device_mesh=None, placements=None, **options):  # type: ignore[no-untyped-def]
    mesh = self.device_mesh
    if device_mesh not in (None, mesh):
        given = [f"{tuple(one.shape)} on {one.device_type}" for one in (mesh, device_mesh)]
        raise ValueError(f"cannot redistribute a DTensor on a mesh of {given[0]} to another, {given[1]}: use the tensor's own")
    placements = normalize_placements(tuple(placements), self.shape, mesh.shape)
    return _RaggedRedistribute.apply(self, placements, *_options(**options))


def _options(
    *, async_op: bool = False, forward_dtype: torch.dtype | None = None, backward_dtype: torch.dtype | None = None
) -> tuple[Any, ...]:
    """The keyword arguments of ``DTensor.redistribute``."""
    return async_op, forward_dtype, backward_dtype


class _RaggedRedistribute(torch.autograd.Function):
    """To other placements; the gradient goes back, to Replicate for a Partial. Differentiable any number of times."""

    @staticmethod
    def forward(ctx, tensor, placements, async_op, forward_dtype, backward_dtype, is_explicit=True):  # type: ignore[no-untyped-def]
        spec, local, dtype = tensor._spec, tensor._local_tensor, tensor.dtype
        ctx.placements = tuple(Replicate() if isinstance(p, Partial) else p for p in spec.placements)
        ctx.async_op, ctx.dtype, ctx.backward_dtype = async_op, dtype, backward_dtype or dtype
        if forward_dtype not in (None, dtype):
            local = local.to(forward_dtype)
        if placements == spec.placements and local is tensor._local_tensor:
            return DTensor(local, spec, requires_grad=tensor.requires_grad)  # type: ignore[call-arg]
        meta = TensorMeta(spec.shape, row_major(spec.shape), local.dtype)
        target = DTensorSpec(spec.mesh, placements, tensor_meta=meta)
        moved = dtensor_redistribute.redistribute_local_tensor(local, spec, target, async_op=async_op, is_explicit=is_explicit)
        return DTensor(moved, target, requires_grad=tensor.requires_grad)  # type: ignore[call-arg]

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        gradient = gradient.to(ctx.backward_dtype)
        moved = _RaggedRedistribute.apply(gradient, ctx.placements, ctx.async_op, None, None, False)
        return moved.to(ctx.dtype), *[None] * 5


@hook(
    "_redistribute.redistribute_local_tensor",
    "move data to and from ragged placements",
    PROTOCOL,
    lambda: (
        has(dtensor_redistribute.redistribute_local_tensor, "local_tensor", "current_spec", "target_spec", "is_explicit")
        and has(dtensor_redistribute.get_active_debug_mode)
        and has(DebugMode.record_redistribute_calls, "arg", "transform_info_str", "is_explicit")
    ),
)
def _install_redistribute_local_tensor() -> None:
    guard = "has_ragged(current_spec.placements) or has_ragged(target_spec.placements)"
    function = dtensor_redistribute.redistribute_local_tensor
    extend_in_place(function, guard, _make_redistribute_local_tensor)  # type: ignore[arg-type]


def _make_redistribute_local_tensor(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def redistribute_local_tensor(local_tensor, current_spec, target_spec, *, async_op=False, **kwargs):  # type: ignore
        source, target = current_spec.placements, target_spec.placements
        if current_spec.mesh != target_spec.mesh:
            raise NotImplementedError("redistribution of a ragged DTensor to another mesh: use the tensor's own mesh")
        mesh = current_spec.mesh
        if mesh.get_coordinate() is None or (source == target and current_spec.shape == target_spec.shape):
            return local_tensor
        with _recorded(local_tensor, source, target, kwargs.get("is_explicit", False)):
            if current_spec.shape != target_spec.shape:
                return broadcast_local(local_tensor, mesh, target_spec.shape, target)
            if has_ragged_rows((*source, *target)):
                return redistribute_rows(local_tensor, mesh, current_spec.shape, source, target)
            unusual = tuple(Replicate() if _is_unusual_partial(p) and p != q else p for p, q in zip(source, target))
            if unusual != source:
                middle = DTensorSpec(mesh, unusual, tensor_meta=current_spec.tensor_meta)
                local_tensor, source = original(local_tensor, current_spec, middle), unusual
            pending = redistribute_local(local_tensor, mesh, current_spec.shape, source, target)
            return _AsyncLocal.of(pending) if async_op and pending.in_flight and not _are_we_tracing() else pending.wait()

    return redistribute_local_tensor


def _recorded(local: torch.Tensor, source: Any, target: Any, is_explicit: bool) -> contextlib.AbstractContextManager[Any]:
    """Show the redistribution in ``DebugMode``, as torch's own ones are: ``trace: RS(0)[1,2,0,1]->R``."""
    mode = dtensor_redistribute.get_active_debug_mode()
    if mode is None:
        return contextlib.nullcontext()
    trace = "->".join("".join(map(str, placements)) for placements in (source, target))
    return mode.record_redistribute_calls(local, source, target, trace, is_explicit=is_explicit)


class _AsyncLocal(AsyncCollectiveTensor):
    """A local tensor whose data is under way and must be unpacked when it is there: first use waits and unpacks."""

    __slots__ = ["pending"]
    pending: Pending

    @staticmethod
    def of(pending: Pending) -> AsyncCollectiveTensor:
        """A tensor that waits on use; torch's own where the data needs no unpacking."""
        if pending.unpack is None:
            return AsyncCollectiveTensor(pending.data.view(pending.local_shape))
        return _AsyncLocal(pending)

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
        ):  # What to_local() makes of a local tensor: nothing is used yet.
            return _AsyncLocal(dataclasses.replace(first.pending, unpack=lambda _: first.trigger_wait(), in_flight=False))
        wait = functools.partial(pytree.tree_map_only, AsyncCollectiveTensor, lambda tensor: tensor.trigger_wait())
        return func(*wait(args), **wait(kwargs or {}))


def _is_unusual_partial(placement: Placement) -> bool:
    """A Partial that only torch knows to reduce: its norm and mask partials, and products."""
    if not isinstance(placement, Partial):
        return False
    return placement.reduce_op not in REDUCTIONS or type(placement)._reduce_value is not Partial._reduce_value
