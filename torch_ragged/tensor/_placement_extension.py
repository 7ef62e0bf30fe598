"""The extension protocol: a placement may bring its own rules, and DTensor asks it for them.

It must not change the results or collectives of plain DTensors. DTensor's code contains the meaning of Shard, Replicate and
Partial. A placement of another type names a :class:`PlacementExtension` in its class attribute ``extension``. Wherever DTensor
would check the type of a placement, it asks the extension instead of its own code. ``Placement.extension`` is None (a hook of
``_register`` sets it), so torch's own placements pay for one read of that attribute::

    extension = extension_of(placements)
    if extension is not None:
        return extension.distribute_tensor(tensor, mesh, placements, src_data_rank)

One extension answers for all placements of a tensor: it knows its own placements and the placements that they combine with.

==========================  =============================================================================================
part                        questions that it answers
==========================  =============================================================================================
:class:`PlacementExtension`  layout: which local tensor does a rank hold, how is it made, how is it moved
:class:`OpExtension`         operators and factories: how do they run on local tensors, how are their outputs placed
:class:`CheckpointExtension`  which boxes of the tensor does a rank hold, for torch.distributed.checkpoint
==========================  =============================================================================================

If an extension does not bring a part, DTensor raises an error that says so. DTensor's own rule never runs, because it would
mistake the placement for another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Optional

import torch
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._op_schema import OpInfo
    from torch.distributed.tensor.placement_types import Placement

__all__ = [
    "CheckpointExtension",
    "OpExtension",
    "PlacementExtension",
    "ask_extensions",
    "extension_of",
    "extension_of_op",
    "global_shape_fits",
    "item_of_own_rank",
    "note_pending",
]

_with_pending: set[int] = set()
"""Hashes of the meshes on which results may be pending. A mesh itself would keep its groups alive."""


class OpExtension:
    """How operators run on DTensors with such placements."""

    def propagate(
        self,
        op: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        op_info: OpInfo,
        try_cache: bool,
    ) -> Any:
        """The sharding of an op, or its result. It is called when the dispatcher's cache of shardings has no answer.

        Returns:
            an OutputSharding, which the dispatcher caches under the op's schema and runs. If it has a method
            ``local_results(op, op_info)``, this method runs the op on the local tensors. Or the op's results, as DTensors.

        Raises:
            NotImplementedError: the op cannot run; the text says what to redistribute to.
        """
        raise NotImplementedError

    def dispatch(self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an op for which the dispatcher has a handler of its own instead of sharding rules."""
        raise NotImplementedError

    def factory(
        self, function: Callable[..., Any], size: torch.Size, mesh: DeviceMesh, placements: Sequence[Placement], **options: Any
    ) -> DTensor:
        """``torch.distributed.tensor.zeros``, ``rand`` and others: the DTensor with the values of ``function`` on one device.

        Args:
            function: ``torch.zeros``, ``torch.rand`` and others.
            size: the global shape.
            options: as ``torch.distributed.tensor`` passes them on: dtype, layout, requires_grad, fill_value of ``full``.
        """
        raise NotImplementedError


class CheckpointExtension:
    """The boxes that a rank holds, for torch.distributed.checkpoint (DCP). No method may communicate."""

    def create_write_items(self, fqn: str, tensor: DTensor) -> list[Any]:
        """DCP's ``WriteItem`` of each box that this rank holds."""
        raise NotImplementedError

    def create_chunk_list(self, tensor: DTensor) -> list[Any]:
        """DCP's ``ChunkStorageMetadata`` of each box that this rank holds."""
        raise NotImplementedError

    def get_tensor_shard(self, tensor: DTensor, index: Any) -> torch.Tensor:
        """The box at ``index.offset`` (a ``MetadataIndex``), as a view of the local tensor."""
        raise NotImplementedError

    def from_full(self, tensor: DTensor, full: torch.Tensor, device: torch.device) -> DTensor:
        """``tensor`` with the values of ``full``; if ``tensor`` is a meta tensor, a new one on ``device``.

        Args:
            full: a plain tensor of the global shape, equal on every rank.
        """
        raise NotImplementedError


class PlacementExtension:
    """The rules that a family of placements brings to DTensor instead of DTensor's own rules.

    ``placements`` are all placements of a tensor, one per mesh dimension; at least one of them belongs to the family.

    Attributes:
        ops: the operator part; None if the family does not bring it.
        checkpoint: the checkpoint part; None if the family does not bring it.
    """

    ops: Optional[OpExtension] = None
    checkpoint: Optional[CheckpointExtension] = None

    def from_local(
        self, local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], run_check: bool, shape: Any
    ) -> tuple[tuple[Placement, ...], torch.Size, tuple[int, ...]]:
        """Check the local tensor of a new DTensor.

        Args:
            run_check: whether ranks must agree; if set, the method may communicate.
            shape: the global shape; None if it was not given.

        Returns:
            the normalized placements, the global shape and the global stride.

        Raises:
            ValueError: the local tensor does not have the shape that this rank holds of such a tensor.
        """
        raise self._lacks("DTensor.from_local")

    def distribute_tensor(
        self, tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], src_data_rank: Optional[int]
    ) -> DTensor:
        """``distribute_tensor``. The method must check the arguments."""
        raise self._lacks("distribute_tensor")

    def local_shape_and_global_offset(
        self, shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement], skip_offset: bool
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shape of the local tensor, and its offset in the global tensor if it is one box of it."""
        raise self._lacks("compute_local_shape_and_global_offset")

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
        """``DTensor.redistribute`` from or to such placements, with its keyword arguments. Differentiable."""
        raise self._lacks("DTensor.redistribute")

    def redistribute_local_tensor(
        self, local: torch.Tensor, current: DTensorSpec, target: DTensorSpec, *, async_op: bool, is_explicit: bool
    ) -> torch.Tensor:
        """Move a local tensor from or to such placements.

        Args:
            async_op: whether the result may be a tensor that waits at first use.
            is_explicit: whether the user called redistribute, for ``DebugMode``.
        """
        raise self._lacks("redistribution")

    def to_local_gradient(
        self, spec: DTensorSpec, placements: Optional[Sequence[Placement]], gradient: torch.Tensor
    ) -> DTensor:
        """The gradient of a DTensor with ``spec``, made from the local ``gradient`` of its ``to_local()``.

        Args:
            placements: the placements of the gradient; None if the user gave none.
        """
        raise self._lacks("the backward of DTensor.to_local")

    def op_extension(self, op: Any) -> OpExtension:
        """The operator part.

        Raises:
            NotImplementedError: the placements bring no operator part.
        """
        if self.ops is None:
            raise self._lacks(str(op))
        return self.ops

    def checkpoint_extension(self) -> CheckpointExtension:
        """The checkpoint part.

        Raises:
            NotImplementedError: the placements bring no checkpoint part.
        """
        if self.checkpoint is None:
            raise self._lacks("torch.distributed.checkpoint")
        return self.checkpoint

    def _lacks(self, name: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} brings no rule for {name}: redistribute to Replicate or Shard first")


def extension_of(placements: Sequence[Placement]) -> Optional[PlacementExtension]:
    """The extension that answers for a tensor under ``placements``; None if DTensor itself answers."""
    for placement in placements:  # Every redistribution of plain DTensors runs this, so it calls no function.
        if placement.extension is not None:  # type: ignore[attr-defined]
            return placement.extension  # type: ignore[attr-defined]
    return None


def global_shape_fits(spec: DTensorSpec, compiled: DTensorSpec, local_shape_of: Callable[..., Any]) -> bool:
    """Whether a graph that torch.compile has made for ``compiled`` may run for ``spec``, which has the same placements.

    A graph has the global shape of its inputs, and guards compare only shapes of local tensors. They do not tell if this rank
    has equally much of two shapes::

        Shard(0) on 2 ranks     6 rows: 3 and 3     7 rows: 4 and 3     on rank 1, the result of 7 rows would be one of 6

    Args:
        local_shape_of: ``compute_local_shape_and_global_offset``, whose module imports this one.
    """
    assert spec.tensor_meta is not None and compiled.tensor_meta is not None
    ours, theirs = spec.tensor_meta, compiled.tensor_meta
    if ours.shape == theirs.shape and ours.stride == theirs.stride:  # Mostly: this runs in each call of the graph.
        return True
    if extension_of(spec.placements) is not None:  # Of flat local tensors, no size belongs to one dimension.
        return False
    shapes = ours.shape, theirs.shape, *[local_shape_of(each.shape, spec.mesh, spec.placements)[0] for each in (ours, theirs)]
    if len({*map(len, shapes)}) > 1:  # A rank outside of the mesh has nothing of any shape.
        return False
    return all(here != there or size == other for size, other, here, there in zip(*shapes))


def extension_of_op(op_info: OpInfo) -> Optional[PlacementExtension]:
    """The extension that answers for an op with the arguments of ``op_info``; None if DTensor itself answers."""
    assert op_info.schema is not None
    for values in (op_info.flat_args_schema, op_info.schema.kwargs_schema.values()):
        for value in values:
            if hasattr(value, "placements") and (extension := extension_of(value.placements)) is not None:
                return extension
    return None


def ask_extensions(handlers: dict[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """The dispatcher's handlers of ops, wrapped: if a placement brings its own operators, the extension runs instead.

    Handlers that do not read placements stay as they are. ``item()`` gets a handler.
    """
    aten = torch.ops.aten
    of_any_placement = {aten.is_same_size.default, aten.as_strided.default, aten.is_pinned.default}
    wrapped = {op: handler if op in of_any_placement else _ask_extension(handler) for op, handler in handlers.items()}
    return {**wrapped, aten._local_scalar_dense.default: item_of_own_rank}


def _ask_extension(handler: Callable[..., Any]) -> Callable[..., Any]:
    def handle(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for leaf in pytree.tree_leaves((args, kwargs)):
            spec = getattr(leaf, "_spec", None)
            extension = None if spec is None else extension_of(spec.placements)
            if extension is not None:
                return extension.op_extension(op).dispatch(op, args, kwargs)
        return handler(op, args, kwargs)

    return handle


def note_pending(mesh: DeviceMesh) -> None:
    """Programs of this package get pending results on ``mesh``: see :func:`item_of_own_rank`."""
    _with_pending.add(hash(mesh))


def item_of_own_rank(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``item()``, and so ``float()``, ``bool()`` and ``int()`` of a DTensor: torch reads the local tensor.

    Of a pending result, that is the part of one rank. On a mesh where ops on such placements have returned pending results, and
    on one over which ``fully_shard`` has cut a parameter, it is an error on each rank that reads. A reduction instead would
    wait for ever if one rank alone prints the number.

    Raises:
        RuntimeError: the tensor is such a result, or was computed from one.
    """
    tensor = args[0]
    spec = tensor._spec
    extension = extension_of(spec.placements)
    if extension is not None:
        return extension.op_extension(op).dispatch(op, args, kwargs)
    pending = (spec.mesh.size(dim) > 1 for dim, placement in enumerate(spec.placements) if placement.is_partial())
    if hash(spec.mesh) in _with_pending and any(pending):
        raise RuntimeError(
            f"item(), float(), int() or bool() of a DTensor that is pending a reduction ({spec.placements}): this rank has its "
            "own part of the number only. Call .full_tensor().item() on all ranks"
        )
    return op(tensor._local_tensor) if spec.mesh.get_coordinate() is not None else None  # None: as torch, outside of the mesh.
