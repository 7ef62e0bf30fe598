"""States of whole matrices, at the roots of the matrices. Roots are chosen once, because the states do not move.

It must not know what the states mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from torch_ragged.optim._base import local, mesh_of, zeros_placed
from torch_ragged.optim._gather import Spot, mesh_ranks
from torch_ragged.optim._matrix import MatrixOptimizer
from torch_ragged.optim._roots import assign_roots
from torch_ragged.tensor._redistribute import mesh_group
from torch_ragged.tensor.placement_types import RaggedShard

__all__ = ["RootStateOptimizer"]


class RootStateOptimizer(MatrixOptimizer):
    """A matrix optimizer with states at the roots, in float32: each root holds those of its matrices, whole.

    Such a state is a DTensor with a RaggedShard over the flattened mesh, so checkpoints reshard. A parameter keeps its roots,
    also if it has no gradient in some steps. Other states may have the placements of their parameters.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._meshes: dict[DeviceMesh, DeviceMesh] = {}
        super().__init__(*args, **kwargs)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._meshes = {}

    def _root_shapes(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        """The global shapes of the states at the roots, by name, for a parameter of this algorithm.

        The last two sizes are those of one matrix's state. A stack's state has the size of the stack before them.
        """
        raise NotImplementedError

    def _state_shapes(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        return self._root_shapes(param, group) if group["algorithm"] == self.algorithm else super()._state_shapes(param, group)

    def _place_states(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        """Make the states at the roots if they are missing. Redistribute those that were loaded from a run with other roots."""
        state, placement = self.state[param], self._placement(param)
        for name, shape in self._root_shapes(param, group).items():
            if name not in state:
                state[name] = self._zeros(param, shape)
            elif isinstance(value := state[name], DTensor) and value.placements != placement:
                state[name] = value.redistribute(placements=placement)

    def _assign(self, indices: list[int], present: list[int], entries: list[Any], mesh: DeviceMesh | None) -> None:
        """Choose the roots of all parameters at once, and only once, because the states are at the roots."""
        new = [i for i in indices if entries[i][0] not in self._roots]
        roots = assign_roots([self._stack(*entries[i]) for i in new], mesh_ranks(mesh)[1])
        self._roots.update(zip([entries[i][0] for i in new], roots.of))

    def _placement(self, param: torch.Tensor) -> tuple[RaggedShard, ...]:
        """The placement of a parameter's states: each rank of the flattened mesh holds the matrices whose root it is."""
        roots, ranks = self._roots[param], mesh_ranks(mesh_of(param))[1]
        units = [0] * ranks
        for root in roots or (0,):
            units[root] += 1
        return (RaggedShard((0,) if param.ndim == 3 else (), tuple(units)),)

    def _zeros(self, param: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        mesh = mesh_of(param)
        if mesh is None:
            return torch.zeros(shape, dtype=torch.float32, device=param.device)
        return zeros_placed(shape, torch.float32, self._flat(mesh), self._placement(param))

    def _flat(self, mesh: DeviceMesh) -> DeviceMesh:
        """The 1-D mesh of all ranks of ``mesh``, in row-major order."""
        if mesh not in self._meshes:
            self._meshes[mesh] = (
                mesh if mesh.ndim == 1 else DeviceMesh.from_group(mesh_group(mesh, tuple(range(mesh.ndim))), mesh.device_type)
            )
        return self._meshes[mesh]

    def _at_root(self, param: torch.Tensor, spot: Spot, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
        """Views of the states of one matrix at this rank, which must be its root."""
        index = spot.position - self._roots[param].index(mesh_ranks(mesh_of(param))[0])
        return {name: local(self.state[param][name]).view(-1, *shape[-2:])[index] for name, shape in shapes.items()}

    def _root_nbytes(self, param: torch.Tensor, group: dict[str, Any]) -> int:
        """The bytes of this rank's states at roots, after the first step. It chooses the roots if they are not chosen."""
        mesh = mesh_of(param)
        if param not in self._roots:
            entries = [(each, own) for own in self.param_groups for each in own["params"]]
            matrices = [i for i, (_, own) in enumerate(entries) if own["algorithm"] == self.algorithm]
            self._assign([i for i in matrices if mesh_of(entries[i][0]) == mesh], [], entries, mesh)
        mine = self._roots[param].count(mesh_ranks(mesh)[0])
        stack = param.shape[0] if param.ndim == 3 else 1
        return 4 * mine * sum(math.prod(shape) // stack for shape in self._root_shapes(param, group).values())

    def empty_state(
        self, param: DTensor, group: dict[str, Any], name: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> DTensor:
        """As in the base class. States at roots are cut evenly: the next step chooses roots, and redistributes them once.

        On a 2-D mesh, the first call makes a process group of all its ranks.
        """
        if group["algorithm"] != self.algorithm:
            return super().empty_state(param, group, name, shape, dtype)
        if tuple(shape) != self._state_shapes(param, group).get(name):
            raise ValueError(
                f"{type(self).__name__} has no state {name} of shape {tuple(shape)} for a parameter of {tuple(param.shape)}"
            )
        if name not in self._root_shapes(param, group):
            return super().empty_state(param, group, name, shape, dtype)
        return zeros_placed(shape, dtype, self._flat(param.device_mesh), [Shard(0)])
