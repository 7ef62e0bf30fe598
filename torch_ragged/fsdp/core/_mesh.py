"""DataParallelMesh: the mesh dimensions that parameters are sharded and replicated over."""

from __future__ import annotations

import warnings
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from torch_ragged._ranks.groups import ranks_ascend
from torch_ragged._register._torch import concatenate, drop_advice_to_flatten, flatten
from torch_ragged.fsdp.comm._collectives import Levels

__all__ = ["OUTSIDE", "DataParallelMesh"]

_CONTEXT_PARALLEL = ("cp", "context", "context_parallel")
"""How programs name the mesh dimension of context parallelism."""

OUTSIDE = ": call fully_shard on ranks of the mesh only, or pass its data-parallel dimensions as the mesh"
"""What a rank can do that is not in a mesh with ``dp_mesh_dims``."""


class DataParallelMesh:
    """The mesh dimensions of a group's shards and replicas.

    ==========================  ================================  ==========================================
    mesh                        its dimensions                    parameters are placed as
    ==========================  ================================  ==========================================
    1-D                         shards                            ``(shard,)``
    2-D (HSDP)                  replicas, shards                  ``(Replicate(), shard)``
    any, with ``dp_mesh_dims``  some are shards, some replicas,   shard or ``Replicate()`` there, as the model
                                the rest is model parallelism     has them elsewhere
    ==========================  ================================  ==========================================

    Attributes:
        mesh: the replicas, if any, and the shards, if any, in this order.
        has_replicas, has_shards: whether ``mesh`` has these mesh dimensions.
        counts_once: whether a gradient that is ``Replicate()`` on a data-parallel dimension of ``spmd`` is that of all ranks
            together, as in :mod:`torch_ragged.spmd`, and not the own contribution of each rank.
        spmd: with ``dp_mesh_dims``, the whole mesh, on which parameters are DTensors; otherwise None.
        dims: ``dp_mesh_dims``.
        is_member: whether this rank is in the mesh. If not, it has no process groups, and its groups are dormant.
        shard_group, replicate_group: the process groups; None if there are no such ranks.
        ranks: the number of shards.
        rank: the index of this rank's shard; 0 if this rank is not in the mesh.
        key: equal for meshes with the same process groups.
        spmd_dims: the data-parallel dimensions of ``spmd``.
        levels: the process groups of both dimensions, if ``mesh`` is a flattened 2-D mesh.
    """

    levels: Levels | None = None

    def __init__(
        self, mesh: DeviceMesh, has_replicas: bool, has_shards: bool, spmd: DeviceMesh | None = None, dims: Any = None
    ) -> None:
        self.mesh, self.has_replicas, self.has_shards, self.spmd, self.dims = mesh, has_replicas, has_shards, spmd, dims
        self.counts_once = getattr(dims, "counts_once", False)
        self.is_member = mesh.get_coordinate() is not None  # Others may call fully_shard, too: their groups are dormant.
        # Known from here on, also after destroy_process_group, when a report may still be asked for.
        last = mesh.ndim - 1
        self.shard_group = mesh.get_group(last) if has_shards and self.is_member else None
        self.replicate_group = mesh.get_group(0) if has_replicas and self.is_member else None
        self.ranks = mesh.size(last) if has_shards else 1
        self.rank = mesh.get_local_rank(last) if has_shards and self.is_member else 0
        # By process group, not by mesh: equal meshes may have other groups, and a collective belongs to one.
        groups = (id(self.shard_group), id(self.replicate_group))
        self.key: tuple[int, ...] = groups if self.is_member else (hash(mesh),)
        self.spmd_dims: list[int] = []
        if spmd is not None:
            # As positions: DTensors of the model have their placements in the order of the whole mesh.
            names, ours = spmd.mesh_dim_names or (), (*dims.shard_names, *dims.replicate_names)
            self.spmd_dims = [dim for dim, name in enumerate(names) if name in ours]

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Of the shards, over (replicas, shards), (nodes, ranks of a node), or shards alone."""
        replicas: tuple[Placement, ...] = (Replicate(),) if self.has_replicas else ()
        # HIERARCHICAL: one dimension of shards, which is seen as two, so that a reduction can have two steps.
        return (*replicas, Shard(0)) if self.levels is None else (Shard(0), Shard(0))

    @staticmethod
    def of_info(info: Any) -> DataParallelMesh:
        """The shards and replicas of torch's ``mesh_info``, which one parameter may have for itself."""
        dims = getattr(info, "dp_mesh_dims", None)  # Torch 2.11 has none.
        return DataParallelMesh.of(info.mesh if dims is None else info.spmd_mesh, dims)

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The 1-D mesh of the shards. If the mesh has no dimension names, the whole data-parallel mesh."""
        names = self.mesh.mesh_dim_names
        return self.mesh if self.mesh.ndim == 1 or names is None else self.mesh[names[-1]]

    @staticmethod
    def check(mesh: DeviceMesh, dims: Any = None) -> None:
        """Raise if :meth:`of` would raise. No communication."""
        if mesh.get_coordinate() is None and dims is not None:
            raise ValueError(f"dp_mesh_dims does not support rank {dist.get_rank()}, which is not in the mesh {mesh}{OUTSIDE}")
        if dims is None:
            if mesh.ndim not in (1, 2):
                raise ValueError(
                    f"fully_shard expects a 1-D mesh, or a 2-D one (replicas, shards), got shape {tuple(mesh.shape)}: pass one "
                    "or two of its dimensions, mesh[name], or name them with dp_mesh_dims"
                )
            parts = [(0,), (1,)][: mesh.ndim]
        else:
            names = mesh.mesh_dim_names
            if names is None:
                raise ValueError("mesh must have mesh_dim_names when dp_mesh_dims is provided")
            for name in (*dims.shard_names, *dims.replicate_names):
                if name not in names:
                    raise ValueError(f"Mesh dim name '{name}' not found in mesh.mesh_dim_names {names}")
            # All are checked on all ranks before one flattens: flattening makes a process group, which is a collective.
            parts = [tuple(map(names.index, part)) for part in (dims.shard_names, dims.replicate_names) if part]
        for part in parts:
            # Collectives follow the order of the process group, which sorts its ranks; DTensors follow the mesh.
            if not ranks_ascend(mesh, part):
                raise ValueError(f"{mesh} does not have its ranks in ascending order: sort the ranks of each mesh dimension")

    @staticmethod
    def of(mesh: DeviceMesh, dims: Any = None) -> DataParallelMesh:
        """The shards and replicas of ``fully_shard(mesh=, dp_mesh_dims=)``. Flattening mesh dimensions makes a process group.

        Raises:
            ValueError: without ``dims``, ``mesh`` does not have one or two dimensions; with ``dims``, ``mesh`` has no names, or
                not those of ``dims``, or this rank is not in ``mesh``.
        """
        DataParallelMesh.check(mesh, dims)
        if dims is None:
            names = mesh.mesh_dim_names or ()
            for name in names if len(names) == 2 else ():
                if name in _CONTEXT_PARALLEL:
                    warnings.warn(
                        f"fully_shard takes a 2-D mesh for HSDP: the ranks of dimension {names[0]!r} are replicas, and "
                        f"parameters are sharded over {names[1]!r} only. Context parallelism ({name!r}) computes with whole "
                        "parameters: to shard them over both dimensions, flatten the mesh into one dimension",
                        stacklevel=3,
                    )
                    break
            return DataParallelMesh(mesh, has_replicas=mesh.ndim == 2, has_shards=True)
        # Replicas before shards, as in HSDP's own mesh: the shards are the last dimension everywhere.
        parts = [flatten(mesh[part]) for part in (dims.replicate_names, dims.shard_names) if part]
        return DataParallelMesh(concatenate(parts), bool(dims.replicate_names), bool(dims.shard_names), mesh, dims)

    def place(self, param: DTensor | None) -> tuple[DeviceMesh, list[Placement | None], list[bool]]:
        """The mesh and placements of a sharded parameter, and which of them are data-parallel. That of the shards is None.

        Args:
            param: the DTensor as the model has distributed it; None for a plain tensor.
        """
        mine: list[Placement | None] = [Replicate()] * self.has_replicas + [None] * self.has_shards
        if param is None:
            return self.mesh, mine, [True] * len(mine)
        drop_advice_to_flatten()  # A user cannot flatten the joint mesh.
        if self.spmd is None:
            is_mine = [True] * len(mine) + [False] * len(param.placements)
            # The data-parallel dimensions first: the model has cut the parameter before, and the group cuts its piece.
            return concatenate([self.mesh, param.device_mesh]), [*mine, *param.placements], is_mine
        meshes: list[DeviceMesh] = []
        placements: list[Placement | None] = []
        is_mine = []
        for name, placement in zip(self.spmd.mesh_dim_names or (), param.placements):
            part: tuple[str, ...] = ()  # If it is a shard or replicate dimension, all names of this kind.
            ours: Placement | None = None
            if name in self.dims.shard_names:
                part = self.dims.shard_names
            elif name in self.dims.replicate_names:
                part, ours = self.dims.replicate_names, Replicate()
            if part == () or part[0] == name:  # Flattened dimensions take the index of the first one.
                meshes.append(flatten(self.spmd[part or (name,)]))
                placements.append(placement if part == () else ours)
                is_mine.append(part != ())
        is_flattened = len(meshes) < self.spmd.ndim
        return (concatenate(meshes) if is_flattened else self.spmd), placements, is_mine
