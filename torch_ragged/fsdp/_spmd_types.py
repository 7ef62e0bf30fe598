"""AnnotatedParam: a plain parameter with annotations of the package ``spmd_types``, which is imported only if programs do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torch_ragged._register._spmd_types import is_annotated
from torch_ragged.fsdp.core._fsdp_param import InvalidArgument, Reading
from torch_ragged.fsdp.core._kit import FeaturePart
from torch_ragged.fsdp.core._mesh import DataParallelMesh

__all__ = ["AnnotatedParam", "AnnotationPart"]


@dataclass(frozen=True)
class AnnotationPart(FeaturePart):
    """Annotations of plain parameters. Every call of ``fully_shard`` has it, once a program has imported ``spmd_types``."""

    def read(self, fqn: str, param: torch.Tensor, dp: DataParallelMesh) -> Reading | None:
        return AnnotatedParam(fqn, param, dp) if is_annotated(param) else None


class AnnotatedParam(Reading):
    """The annotation of one parameter, as DTensor placements on the whole mesh.

    An annotation gives each mesh axis a type. Between uses, the parameter is a DTensor; the model computes with a plain tensor
    of the same annotation:

    ====================  ===========================  ==================================================
    type                  placement of the parameter   placement of its gradient
    ====================  ===========================  ==================================================
    ``R``                 ``Replicate()``              ``Partial()``: each rank has its own contribution
    ``I``                 ``Replicate()``              ``Replicate()``: the model has reduced it
    ``S(d)``              ``Shard(d)``                 ``Shard(d)``
    ====================  ===========================  ==================================================

    Axes of data parallelism are ``R``, or are not annotated. One annotated axis may span several data-parallel dimensions.

    Raises:
        ValueError: ``dp`` has no whole mesh; a data-parallel axis is not ``R``; an axis of model parallelism has no annotation
            or one without a placement (``V``, ``P``); an annotated axis is not in the mesh; or several axes cut one dimension,
            and not in the order of the mesh.
    """

    def __init__(self, fqn: str, param: torch.Tensor, dp: DataParallelMesh) -> None:
        import spmd_types as spmd

        self._types, self._partition_spec = dict(spmd.get_local_type(param)), spmd.get_partition_spec(param)
        if dp.spmd is None:
            raise InvalidArgument(
                f"{fqn} has spmd_types annotations {self._types}, but no whole mesh was given: call fully_shard with the mesh "
                "of all data- and model-parallel dimensions, and with dp_mesh_dims=DataParallelMeshDims(...)"
            )
        axes = [spmd.MeshAxis.of(dp.spmd.get_group(dim)) for dim in range(dp.spmd.ndim)]
        sharded = _sharded_axes(spmd, self._partition_spec, axes, fqn)
        types = _types_on(axes, dp.spmd_dims, {**self._types, **sharded}, fqn)
        for axis in spmd.current_mesh() or axes:  # The checker needs a type on each axis; data-parallel ones may lack it.
            if axis.size() > 1 and not any(axis <= known for known in self._types):  # type: ignore[operator, unused-ignore]
                self._types[axis] = spmd.R
        try:
            placements = [spmd.spmd_type_to_dtensor_placement(each) for each in types]
            self.gradient_placements = [spmd.spmd_type_to_dtensor_placement(each.backward_type()) for each in types]
        except ValueError as error:
            raise InvalidArgument(f"{fqn} is annotated {types} on the mesh {dp.spmd}: expected R, I or S(d)") from error
        self.value = DTensor.from_local(param.detach(), dp.spmd, placements, run_check=False)

    def mark(self, tensor: torch.Tensor) -> None:
        import spmd_types as spmd

        spmd.assert_type(tensor, self._types, partition_spec=self._partition_spec)


def _sharded_axes(spmd: Any, partition_spec: Any, axes: list[Any], fqn: str) -> dict[Any, Any]:
    """The axes that cut the tensor, with ``S(d)``. Locally they are ``V``: the partition spec tells the dimension."""
    sharded: dict[Any, Any] = {}
    for dim, entry in enumerate(partition_spec or ()):
        found = [spmd.normalize_axis(axis) for axis in (entry if isinstance(entry, tuple) else (entry,)) if axis is not None]
        positions = [axes.index(axis) for axis in found if axis in axes]
        if positions != sorted(positions):
            raise InvalidArgument(
                f"{fqn} is annotated {partition_spec}, which cuts dimension {dim} by {found}: name these axes in the order "
                f"of the mesh, {axes}"
            )
        sharded.update(dict.fromkeys(found, spmd.S(dim)))
    return sharded


def _types_on(axes: list[Any], data_dims: list[int], types: dict[Any, Any], fqn: str) -> list[Any]:
    """The type on each of ``axes``, the dimensions of the whole mesh."""
    import spmd_types as spmd
    from spmd_types._mesh_axis import flatten_axes

    region = flatten_axes(tuple(axes[dim] for dim in data_dims))  # An annotated axis may be several mesh dimensions, or a part.
    model = [axis for dim, axis in enumerate(axes) if dim not in data_dims]
    for axis, given in types.items():
        if axis <= region:
            if given is not spmd.R:
                raise InvalidArgument(
                    f"{fqn} is annotated {given} on the data-parallel axis {axis}: annotate it R, FSDP reduces its gradient"
                )
        elif axis not in model:
            raise InvalidArgument(f"{fqn} is annotated {given} on the axis {axis}, which is no dimension of the mesh {axes}")
    missing = [axis for axis in model if axis.size() > 1 and axis not in types]
    if missing:
        raise InvalidArgument(f"{fqn} is annotated {types}, but not on {missing}: annotate it on all axes of model parallelism")
    return [spmd.R if dim in data_dims else types.get(axis, spmd.R) for dim, axis in enumerate(axes)]
