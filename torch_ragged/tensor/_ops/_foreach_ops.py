"""Foreach and fused ops over DTensors of several meshes, as an optimizer over FSDP groups on two meshes issues them.

In DTensor, the tensors at one index of the lists may be on another mesh than the tensors at other indices. If each scalar has
the same value on all ranks of its index, one sharding serves all indices. Otherwise the op is called once per mesh.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils import _pytree as pytree

from torch_ragged.tensor._ops._pointwise_ops import list_rule
from torch_ragged.tensor._ops._rules import rule_of

__all__ = ["call_per_mesh"]


def call_per_mesh(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a list op over several meshes, by one call per mesh; ``NotImplemented`` if one sharding serves all of them.

    If a scalar is replicated on all ranks of the mesh of an index, it may be on another mesh.

    Raises:
        ValueError: tensors at one index, other than such scalars, are on different meshes.
    """
    if not op._schema.name.startswith(("aten::_foreach_", "aten::_fused_")) or len(op._schema.returns) > 1:
        return NotImplemented
    meshes = list(dict.fromkeys(t.device_mesh for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, DTensor)))
    if len(meshes) == 1:
        return NotImplemented
    columns = list(zip(*(arg for arg in args if _is_tensor_list(arg))))
    indices: dict[DeviceMesh, list[int]] = {}
    for index, column in enumerate(columns):
        indices.setdefault(_mesh_of(column, meshes[0]), []).append(index)
    pairs = [(tensor, mesh) for mesh, own in indices.items() for index in own for tensor in columns[index]]
    pairs += [(arg, mesh) for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor) for mesh in indices]
    if rule_of(op) is list_rule and _is_one_sharding(pairs, meshes):
        return NotImplemented
    results: list[Any] = [None] * len(columns)
    for mesh, own in indices.items():
        parts = [_of_mesh(arg, mesh, own, op) for arg in args]
        found = op(*parts, **{name: _of_mesh(value, mesh, own, op) for name, value in kwargs.items()})
        for index, result in zip(own, found or ()):
            results[index] = result
    if op is torch.ops.aten._foreach_norm.Scalar:
        return _on_one_mesh(results)
    return results if op._schema.returns else None


def _is_tensor_list(arg: Any) -> bool:
    return isinstance(arg, (list, tuple)) and len(arg) > 0 and isinstance(arg[0], torch.Tensor)


def _mesh_of(column: Sequence[Any], default: DeviceMesh) -> DeviceMesh:
    """The mesh of the tensors at one index: the mesh of the first DTensor that is not a scalar."""
    dtensors = [t for t in column if isinstance(t, DTensor)]
    return next((t.device_mesh for t in (*(t for t in dtensors if t.dim()), *dtensors)), default)


def _is_one_sharding(pairs: Iterable[tuple[Any, DeviceMesh]], meshes: list[DeviceMesh]) -> bool:
    """Whether one sharding serves all ``pairs`` of a tensor and the mesh that it is needed on.

    The dispatcher runs nothing on a rank outside the first mesh. It caches a plain scalar as replicated on the first mesh, so
    it cannot tell the scalar from a replicated DTensor.
    """
    if any(mesh.get_coordinate() is None for mesh in meshes):
        return False
    return all(_is_on(t, t.device_mesh if isinstance(t, DTensor) else meshes[0], mesh) for t, mesh in pairs)


def _is_on(tensor: torch.Tensor, own: DeviceMesh, mesh: DeviceMesh) -> bool:
    """Whether a tensor on its ``own`` mesh can be used on ``mesh`` without a change."""
    if own == mesh:
        return True
    if tensor.numel() != 1 or (isinstance(tensor, DTensor) and not all(p.is_replicate() for p in tensor.placements)):
        return False
    return _ranks(mesh) <= _ranks(own)


def _of_mesh(arg: Any, mesh: DeviceMesh, indices: list[int], op: Any) -> Any:
    """The part of an argument for the call on ``mesh``, which computes the tensors at ``indices``."""
    if isinstance(arg, (list, tuple)) and arg:
        return [_of_mesh(arg[index], mesh, [], op) for index in indices]
    if not isinstance(arg, DTensor) or arg.device_mesh == mesh:
        return arg
    if _is_on(arg, arg.device_mesh, mesh):
        return arg._local_tensor
    raise ValueError(
        f"{op}: DTensors at one index of its lists are on different meshes, {mesh} and {arg.device_mesh}: put them on one; "
        "only a scalar that is replicated on all ranks of the mesh may be on another mesh"
    )


def _ranks(mesh: DeviceMesh) -> set[int]:
    return set(mesh.mesh.flatten().tolist())


def _on_one_mesh(norms: list[DTensor]) -> list[DTensor]:
    """Norms that ``clip_grad_norm_`` can stack: norms of other meshes are reduced and replicated on the mesh of the first.

    It issues one collective for each dimension of another mesh. If the meshes have different ranks, the norms stay on their own
    meshes, and ``torch.stack`` raises an error that names both meshes.
    """
    first = norms[0].device_mesh
    others = [mesh for mesh in dict.fromkeys(norm.device_mesh for norm in norms) if mesh != first]
    if any(_ranks(mesh) != _ranks(first) for mesh in others):
        return norms
    results = list(norms)
    for mesh in others:
        own = [index for index, norm in enumerate(norms) if norm.device_mesh == mesh]
        stacked: Any = torch.stack([norms[index] for index in own])
        reduced = stacked.redistribute(placements=[Replicate()] * mesh.ndim)
        for index, value in zip(own, reduced.to_local().unbind()):
            results[index] = DTensor.from_local(value, first, [Replicate()] * first.ndim, run_check=False)
    return results
