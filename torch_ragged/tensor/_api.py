"""The layout part of the ragged extension: it checks, makes, moves and differentiates local tensors for DTensor.

It must raise errors of bad arguments before any communication.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor, _are_we_tracing
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor import _redistribute as dtensor_redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from torch_ragged.tensor._async_tensor import async_local
from torch_ragged.tensor._cut_placement import CutPlacement, cuts_of, has_flat
from torch_ragged.tensor._local_tensor import LocalTensor, coordinate_of, current_rank, on_each_rank
from torch_ragged.tensor._ownership import has_single_boxes, owned, row_major
from torch_ragged.tensor._placement_extension import PlacementExtension
from torch_ragged.tensor._redistribute import REDUCTIONS, broadcast_local, in_order_of, is_permuted, redistribute_local
from torch_ragged.tensor.placement_types import normalize_placements, whole_shape

__all__ = ["RaggedExtension", "ragged_extension", "spec_of"]


class RaggedExtension(PlacementExtension):
    """Layout and redistribution of DTensors with a ragged placement."""

    def from_local(
        self, local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], run_check: bool, shape: Any
    ) -> tuple[tuple[Placement, ...], torch.Size, tuple[int, ...]]:
        """Check that a local tensor has the shape that ownership gives this rank.

        With ``run_check``, an error on one rank is an error on every rank, by one object all-gather per mesh dimension.

        Raises:
            ValueError: ``shape`` is missing, the local tensor has another shape, or ranks gave different shapes or placements.
        """
        if shape is None and not has_flat(placements):
            shape = whole_shape(local.shape, placements, tuple(mesh.shape))  # As DTensor supposes.
        if shape is None:
            raise ValueError(
                f"DTensor.from_local got {_short(placements)} without the global shape, which does not follow from a 1-D local "
                "tensor: pass shape=, such as DTensor.from_local(local, mesh, placements, shape=param.shape)"
            )
        shape = torch.Size(shape)
        check = functools.partial(on_each_rank, _local_placements, local, mesh, tuple(placements), shape)
        on_all = run_check and mesh.get_coordinate() is not None and not isinstance(local, LocalTensor)
        return _on_every_rank(mesh, shape, check) if on_all else check(), shape, row_major(shape)

    def distribute_tensor(
        self, tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], src_data_rank: Optional[int]
    ) -> DTensor:
        """Broadcast the source rank's data, as for DTensor's own placements, then cut it. One broadcast per mesh dimension.

        Raises:
            ValueError: the placements do not fit the tensor or contain Partial, or ``tensor`` is a DTensor placed differently.
        """
        normalized = normalize_placements(tuple(placements), tuple(tensor.shape), tuple(mesh.shape))
        if isinstance(tensor, DTensor):
            if (tensor.device_mesh, tensor.placements) != (mesh, normalized):
                raise ValueError(
                    f"distribute_tensor of a DTensor with placements {tensor.placements} on {tensor.device_mesh} to "
                    f"{normalized} on {mesh}: use DTensor.redistribute"
                )
            return tensor
        if any(isinstance(p, Partial) for p in normalized):
            raise ValueError(f"distribute_tensor to {normalized}: use Replicate in place of Partial")
        whole = tensor.contiguous() if tensor.is_leaf else tensor
        replicated = distribute_tensor(whole, mesh, [Replicate()] * mesh.ndim, src_data_rank=src_data_rank)
        local = replicated._local_tensor.detach()
        if mesh.get_coordinate() is not None:  # Other ranks hold no element.
            local = on_each_rank(broadcast_local, local, mesh, tensor.shape, normalized)
        spec = spec_of(mesh, normalized, tensor.shape, tensor.dtype)
        return DTensor(local.requires_grad_(tensor.requires_grad), spec, requires_grad=tensor.requires_grad)  # type: ignore

    def local_shape_and_global_offset(
        self, shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement], skip_offset: bool
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shape and offset of the box that this rank holds; the flat local tensor has the elements of the box in order.

        With ``skip_offset`` it is the shape of the local tensor instead, and no offset.

        Raises:
            ValueError: a rank holds several boxes. All ranks raise, also those that hold one.
        """
        shape, mesh_shape = tuple(shape), tuple(mesh.shape)
        cuts = cuts_of(normalize_placements(tuple(placements), shape, mesh_shape))
        coordinate = coordinate_of(mesh)
        if coordinate is None:
            return (0,), ()
        part = owned(shape, mesh_shape, cuts, coordinate)
        if skip_offset:
            return part.local_shape, ()
        if not has_single_boxes(shape, mesh_shape, cuts):
            raise ValueError(
                f"{_short(placements)} cuts a tensor of shape {shape} within slices of dimension 0, so that ranks hold several "
                "boxes with offsets of their own: call torch_ragged.owned_boxes(tensor), or keep whole slices together by "
                "orig_param_policy. For PEFT and transformers, call torch_ragged.integrations.install()"
            )
        box = next((box for box in part.boxes if box.numel), None)
        return ((0, *shape[1:]), (shape[0], *(0 for _ in shape[1:]))) if box is None else (box.sizes, box.offsets)

    def redistribute(
        self,
        tensor: DTensor,
        mesh: Optional[DeviceMesh],
        placements: Sequence[Placement],
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """Check the placements before any communication, then issue the collectives of ``_redistribute``.

        Raises:
            ValueError: ``mesh`` is not the tensor's own, or the placements do not fit the tensor.
        """
        own = tensor.device_mesh
        if mesh not in (None, own):
            given = [f"{tuple(one.shape)} on {one.device_type}" for one in (own, mesh)]  # type: ignore[union-attr]
            raise ValueError(
                f"cannot redistribute a DTensor on a mesh of {given[0]} to a mesh of {given[1]}: use the tensor's own mesh"
            )
        normalized = normalize_placements(tuple(placements), tensor.shape, own.shape)
        return _RaggedRedistribute.apply(tensor, normalized, async_op, forward_dtype, backward_dtype)

    def redistribute_local_tensor(
        self, local: torch.Tensor, current: DTensorSpec, target: DTensorSpec, *, async_op: bool, is_explicit: bool
    ) -> torch.Tensor:
        old, new, mesh, shape = current.placements, target.placements, current.mesh, current.shape
        if mesh != target.mesh:
            raise NotImplementedError("redistribution of a ragged DTensor to another mesh: use the tensor's own mesh")
        if mesh.get_coordinate() is None or (old == new and shape == target.shape):
            return local
        with _recorded(local, old, new, is_explicit):
            if shape != target.shape:
                return on_each_rank(broadcast_local, local, mesh, target.shape, new)
            view = next((p for p in (*old, *new) if isinstance(p, CutPlacement) and p.redistribute_view is not None), None)
            if view is not None:
                return view.redistribute_view(local, mesh, shape, old, new)  # type: ignore[misc]
            for dim, (placement, wanted) in enumerate(zip(old, new)):
                if _is_unusual_partial(placement) and placement != wanted:
                    local, old = _reduced(local, mesh, dim, placement), (*old[:dim], Replicate(), *old[dim + 1 :])
            is_async = async_op and not _are_we_tracing()
            pending = redistribute_local(local, mesh, shape, old, new, is_async)
            if is_async and pending.in_flight and not is_permuted(target.stride):
                return async_local(pending)
            return in_order_of(pending.wait(), target.stride)

    def to_local_gradient(
        self, spec: DTensorSpec, placements: Optional[Sequence[Placement]], gradient: torch.Tensor
    ) -> DTensor:
        placements = tuple(Replicate() if isinstance(p, Partial) else p for p in placements or spec.placements)
        grad_spec = spec_of(spec.mesh, placements, spec.shape, gradient.dtype)
        return DTensor(gradient.contiguous(), grad_spec, requires_grad=gradient.requires_grad)  # type: ignore[call-arg]


ragged_extension = RaggedExtension()
CutPlacement.extension = ragged_extension  # type: ignore[attr-defined]


def _short(placements: Sequence[Placement]) -> str:
    return "".join(map(str, placements))


def spec_of(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: torch.Size,
    dtype: torch.dtype,
    stride: tuple[int, ...] | None = None,
) -> DTensorSpec:
    """The spec of a DTensor. Without a ``stride``, the whole is row-major."""
    meta = TensorMeta(shape, row_major(shape) if stride is None else stride, dtype)
    return DTensorSpec(mesh, placements, tensor_meta=meta)


def _local_placements(
    local: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size
) -> tuple[Placement, ...]:
    normalized = normalize_placements(placements, tuple(shape), tuple(mesh.shape))
    coordinate = coordinate_of(mesh)
    if coordinate is not None:
        expected = owned(tuple(shape), tuple(mesh.shape), cuts_of(normalized), coordinate).local_shape
        if tuple(local.shape) != expected:
            hint = ": pass local.reshape(-1)" if (local.numel(),) == expected else ""
            if local.shape == shape:
                hint += (
                    "; a whole tensor is cut by distribute_tensor, and by PEFT and transformers after "
                    "torch_ragged.integrations.install()"
                )
            raise ValueError(
                f"shape {tuple(shape)} under {_short(normalized)}: rank {current_rank()} gave a local tensor of shape "
                f"{tuple(local.shape)}, expected {expected}{hint}"
            )
    return normalized


def _on_every_rank(mesh: DeviceMesh, shape: torch.Size, check: Callable[[], tuple[Placement, ...]]) -> tuple[Placement, ...]:
    """The placements that ``check`` returns, or one ValueError on every rank with the errors of all ranks.

    One small object all-gather per mesh dimension. All ranks reach it, because the errors of ``check`` are caught.
    """
    try:
        found = check()
        answers = [(f"{tuple(shape)} {found}", "")]
    except (TypeError, ValueError) as error:
        answers = [("", str(error))]
    for dim in range(mesh.ndim):
        group = mesh.get_group(dim)
        gathered: list[Any] = [None] * group.size()
        dist.all_gather_object(gathered, answers, group=group)
        answers = [answer for part in gathered for answer in part]
    problems = sorted({text for _, text in answers if text})
    given = sorted({layout for layout, text in answers if not text})
    if len(given) > 1:
        problems.append(f"ranks gave different shapes or placements: {', '.join(given)}")
    if problems:
        raise ValueError("DTensor.from_local: " + "; ".join(problems))
    return found


class _RaggedRedistribute(torch.autograd.Function):
    """Redistribute to other placements. The gradient gets the old placements, with Replicate instead of Partial.

    It is differentiable any number of times. Forward and backward issue the collectives of ``_redistribute``.
    """

    @staticmethod
    def forward(ctx, tensor, placements, async_op, forward_dtype, backward_dtype, is_explicit=True):  # type: ignore[no-untyped-def]
        ctx.set_materialize_grads(False)  # Zeros would be no DTensor.
        spec, local, dtype = tensor._spec, tensor._local_tensor, tensor.dtype
        ctx.placements = tuple(Replicate() if isinstance(p, Partial) else p for p in spec.placements)
        ctx.async_op, ctx.dtype, ctx.backward_dtype = async_op, dtype, backward_dtype or dtype
        if forward_dtype not in (None, dtype):
            local = local.to(forward_dtype)
        if placements == spec.placements and local is tensor._local_tensor:
            return DTensor(local, spec, requires_grad=tensor.requires_grad)  # type: ignore[call-arg]
        target = spec_of(spec.mesh, placements, spec.shape, local.dtype)
        moved = ragged_extension.redistribute_local_tensor(local, spec, target, async_op=async_op, is_explicit=is_explicit)
        return DTensor(moved, target, requires_grad=tensor.requires_grad)  # type: ignore[call-arg]

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        if gradient is None:
            return (None,) * 6
        gradient = gradient.to(ctx.backward_dtype)
        moved = _RaggedRedistribute.apply(gradient, ctx.placements, ctx.async_op, None, None, False)
        return moved.to(ctx.dtype), *[None] * 5


def _recorded(local: torch.Tensor, source: Any, target: Any, is_explicit: bool) -> contextlib.AbstractContextManager[Any]:
    """Show the redistribution in ``DebugMode``, as torch shows its own: ``trace: RS(0)[1,2,0,1]->R``."""
    mode = dtensor_redistribute.get_active_debug_mode()
    if mode is None:
        return contextlib.nullcontext()
    trace = "->".join("".join(map(str, placements)) for placements in (source, target))
    return mode.record_redistribute_calls(local, source, target, trace, is_explicit=is_explicit)


def _reduced(local: torch.Tensor, mesh: DeviceMesh, dim: int, placement: Placement) -> torch.Tensor:
    """Reduce a pending local tensor over mesh dimension ``dim`` with the method of its Partial."""
    reduced = placement._reduce_value(local, mesh, dim)  # type: ignore[attr-defined]
    return reduced.wait() if isinstance(reduced, AsyncCollectiveTensor) else reduced


def _is_unusual_partial(placement: Placement) -> bool:
    """Whether only torch can reduce this Partial: norm partials, mask partials, and products."""
    if not isinstance(placement, Partial):
        return False
    return placement.reduce_op not in REDUCTIONS or type(placement)._reduce_value is not Partial._reduce_value
