"""The extension protocol: a placement may bring its own rules, and DTensor asks it for them.

DTensor knows by heart what Shard, Replicate and Partial mean. A placement of another kind names a
:class:`PlacementExtension`, in its class attribute ``extension``, and wherever DTensor would look at the kind of a placement,
it asks the extension in place of its own code. ``Placement.extension`` is None (a hook of ``_register`` sets it), so placements
that name none, torch's own, pay for one look at that attribute::

    extension = extension_of(placements)
    if extension is not None:
        return extension.distribute_tensor(tensor, mesh, placements, src_data_rank)

One extension answers for all placements of a tensor: it knows its own kind and what may stand beside it.

==========================  =============================================================================================
part                        what it answers
==========================  =============================================================================================
:class:`PlacementExtension`  layout: which local tensor a rank holds, how to make it, how to move it
:class:`OpExtension`         operators and factories: how one runs on local tensors, how its outputs are placed
:class:`CheckpointExtension`  which boxes of the tensor a rank holds, for torch.distributed.checkpoint
==========================  =============================================================================================

A part that an extension does not bring is an error that says so, never DTensor's own rule: that would take the placement
for another.
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
]


class OpExtension:
    """How operators run on DTensors with such placements."""

    def propagate(
        self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], op_info: OpInfo, try_cache: bool
    ) -> Any:
        """The sharding of an op, or its result. Called when the dispatcher's cache of shardings has no answer.

        Returns:
            an OutputSharding, which the dispatcher caches under the op's schema and runs; one that has a method
            ``local_results(op, op_info)`` runs the op on the local tensors itself. Or what the op returns, as DTensors.

        Raises:
            NotImplementedError: the op cannot run; the text says what to redistribute to.
        """
        raise NotImplementedError

    def dispatch(self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an op for which the dispatcher has a handler of its own, which takes the place of sharding rules."""
        raise NotImplementedError

    def factory(
        self, function: Callable[..., Any], size: torch.Size, mesh: DeviceMesh, placements: Sequence[Placement], **options: Any
    ) -> DTensor:
        """``torch.distributed.tensor.zeros`` and the like: the DTensor of what ``function`` makes on one device.

        Args:
            function: ``torch.zeros`` and the like.
            size: the global shape.
            options: as ``torch.distributed.tensor`` passes them on: dtype, layout, requires_grad, fill_value of ``full``.
        """
        raise NotImplementedError


class CheckpointExtension:
    """What ranks hold, for torch.distributed.checkpoint (DCP). No method communicates."""

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
        """``tensor``, or one like it on ``device`` if it is a meta tensor, with the values of ``full``.

        Args:
            full: a plain tensor of the global shape, which every rank has.
        """
        raise NotImplementedError


class PlacementExtension:
    """What a family of placements brings to DTensor in place of DTensor's own rules.

    ``placements`` are all placements of a tensor, one per mesh dimension; at least one of them is of the family.

    Attributes:
        ops, checkpoint: the other parts; None where the family does not bring them.
    """

    ops: Optional[OpExtension] = None
    checkpoint: Optional[CheckpointExtension] = None

    def from_local(
        self, local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], run_check: bool, shape: Any
    ) -> tuple[tuple[Placement, ...], torch.Size, tuple[int, ...]]:
        """Check a local tensor that a DTensor is to be made of.

        Args:
            run_check: whether ranks must agree, which may communicate.
            shape: the global shape; None if it was not given.

        Returns:
            the normalised placements, the global shape and the global stride.

        Raises:
            ValueError: the local tensor is not what this rank holds of such a tensor.
        """
        raise self._lacks("DTensor.from_local")

    def distribute_tensor(
        self, tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], src_data_rank: Optional[int]
    ) -> DTensor:
        """``distribute_tensor``; the arguments are not checked yet."""
        raise self._lacks("distribute_tensor")

    def local_shape_and_global_offset(
        self, shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement], skip_offset: bool
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shape of the local tensor, and the offset of the one box of the global tensor that it is."""
        raise self._lacks("compute_local_shape_and_global_offset")

    def redistribute(
        self, tensor: DTensor, mesh: Optional[DeviceMesh], placements: Sequence[Placement], **options: Any
    ) -> DTensor:
        """``DTensor.redistribute`` from or to such placements, with its keyword arguments. Differentiable."""
        raise self._lacks("DTensor.redistribute")

    def redistribute_local_tensor(
        self, local: torch.Tensor, current: DTensorSpec, target: DTensorSpec, *, async_op: bool, is_explicit: bool
    ) -> torch.Tensor:
        """Move a local tensor from or to such placements.

        Args:
            async_op: whether the result may be a tensor that waits when it is used.
            is_explicit: whether the user asked for it, for ``DebugMode``.
        """
        raise self._lacks("redistribution")

    def to_local_gradient(
        self, spec: DTensorSpec, placements: Optional[Sequence[Placement]], gradient: torch.Tensor
    ) -> DTensor:
        """The gradient of a DTensor of ``spec``, of the local ``gradient`` of its ``to_local()``.

        Args:
            placements: of the gradient, where the user gave them.
        """
        raise self._lacks("the backward of DTensor.to_local")

    def rank_hash(self, spec: DTensorSpec) -> str:
        """What tells apart the ranks whose compiled graphs differ; ranks of one machine share graphs on disk."""
        return ""

    def op_extension(self, op: Any) -> OpExtension:
        """``ops``.

        Raises:
            NotImplementedError: the placements bring none.
        """
        if self.ops is None:
            raise self._lacks(str(op))
        return self.ops

    def checkpoint_extension(self) -> CheckpointExtension:
        """``checkpoint``.

        Raises:
            NotImplementedError: the placements bring none.
        """
        if self.checkpoint is None:
            raise self._lacks("torch.distributed.checkpoint")
        return self.checkpoint

    def _lacks(self, what: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} brings no rule for {what}: redistribute to Replicate or Shard first")


def extension_of(placements: Sequence[Placement]) -> Optional[PlacementExtension]:
    """What answers for a tensor under ``placements``; None if DTensor itself does."""
    for placement in placements:  # Asked of every redistribution of plain DTensors: nothing is called here.
        if placement.extension is not None:  # type: ignore[attr-defined]
            return placement.extension  # type: ignore[attr-defined]
    return None


def extension_of_op(op_info: OpInfo) -> Optional[PlacementExtension]:
    """What answers for an op with such arguments; None if DTensor itself does."""
    assert op_info.schema is not None
    for values in (op_info.flat_args_schema, op_info.schema.kwargs_schema.values()):
        for value in values:
            if hasattr(value, "placements") and (extension := extension_of(value.placements)) is not None:
                return extension
    return None


def ask_extensions(handlers: dict[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """The dispatcher's handlers of ops, so that arguments whose placements bring their own operators are not given to them.

    Those that do not look at placements stay as they are.
    """
    aten = torch.ops.aten
    of_any_placement = {aten.is_same_size.default, aten.as_strided.default, aten.is_pinned.default}
    return {op: handler if op in of_any_placement else _ask_extension(handler) for op, handler in handlers.items()}


def _ask_extension(handler: Callable[..., Any]) -> Callable[..., Any]:
    def handle(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for leaf in pytree.tree_leaves((args, kwargs)):
            spec = getattr(leaf, "_spec", None)
            extension = None if spec is None else extension_of(spec.placements)
            if extension is not None:
                return extension.op_extension(op).dispatch(op, args, kwargs)
        return handler(op, args, kwargs)

    return handle
