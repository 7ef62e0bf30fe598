"""States of whole matrices, at the roots of the matrices. Roots are chosen once, because the states do not move.

It must not know what the states mean.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from torch_ragged.optim._base import local, mesh_of, zeros_placed
from torch_ragged.optim._gather import Spot, mesh_ranks
from torch_ragged.optim._matrix import MatrixOptimizer
from torch_ragged.tensor._redistribute import mesh_group
from torch_ragged.tensor.placement_types import RaggedShard

__all__ = ["RootState", "RootStateOptimizer"]


class RootState(NamedTuple):
    """A state at roots: its global shape, whose last two sizes are those of one matrix's state, and the part that it is of.

    A parameter has one part, or one for each of its segments. A stack's state has the size of the stack first.
    """

    shape: tuple[int, ...]
    part: int = 0


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

    def _root_states(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, RootState]:
        """The states at the roots, by name, of a parameter of this algorithm. The rank of a matrix holds those of its part."""
        raise NotImplementedError

    def _state_shapes(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        if group["algorithm"] != self.algorithm:
            return super()._state_shapes(param, group)
        return {name: state.shape for name, state in self._root_states(param, group).items()}

    def _assign(self, indices: list[int], present: list[int], entries: list[Any], mesh: DeviceMesh | None) -> None:
        """Choose the roots of all parameters at once, and only once, because the states are at the roots."""
        self._set_roots([entries[i] for i in indices if entries[i][0] not in self._roots], mesh)

    def _roots_of_parts(self, param: torch.Tensor, group: dict[str, Any]) -> list[tuple[int, ...]]:
        """The roots of the matrices of each part: of the parameter, or of each of its segments."""
        roots = iter(self._roots[param])
        counts = [math.prod(part.matrices[:-2]) for part in self._parts(param, group)]
        return [tuple(itertools.islice(roots, count)) for count in counts]

    def _place_states(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        """Make the states at the roots if they are missing. Redistribute those that were loaded from a run with other roots."""
        states = self._root_states(param, group)
        of_parts = self._roots_of_parts(param, group) if states else []
        mesh, ranks, held = mesh_of(param), mesh_ranks(mesh_of(param))[1], self.state[param]
        for name, (shape, part) in states.items():
            units = [0] * ranks
            for root in of_parts[part] or (0,):
                units[root] += 1
            # Each rank of the flattened mesh holds the states of the matrices whose root it is.
            placement = (RaggedShard((0,) if param.ndim == 3 else (), tuple(units)),)
            if name in held:
                if isinstance(value := held[name], DTensor) and value.placements != placement:
                    held[name] = value.redistribute(placements=placement)
            elif mesh is None:
                held[name] = torch.zeros(shape, dtype=torch.float32, device=param.device)
            else:
                held[name] = zeros_placed(shape, torch.float32, self._flat(mesh), placement)

    def _flat(self, mesh: DeviceMesh) -> DeviceMesh:
        """The 1-D mesh of all ranks of ``mesh``, in row-major order."""
        if mesh not in self._meshes:
            self._meshes[mesh] = (
                mesh if mesh.ndim == 1 else DeviceMesh.from_group(mesh_group(mesh, tuple(range(mesh.ndim))), mesh.device_type)
            )
        return self._meshes[mesh]

    def _at_root(self, params: Sequence[torch.Tensor], spot: Spot, group: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Views of the states of a matrix at this rank, its root. ``params`` has the parameter of each stack."""
        param = params[spot.stack]
        part = sum(each is param for each in params[: spot.stack])
        index = spot.position - self._roots_of_parts(param, group)[part].index(mesh_ranks(mesh_of(param))[0])
        states = {name: state for name, state in self._root_states(param, group).items() if state.part == part}
        return {name: local(self.state[param][name]).view(-1, *shape[-2:])[index] for name, (shape, _) in states.items()}

    def _root_nbytes(self, param: torch.Tensor, group: dict[str, Any]) -> int:
        """The bytes of this rank's states at roots, after the first step. It chooses the roots if they are not chosen."""
        mesh = mesh_of(param)
        if param not in self._roots:
            entries = [(each, own) for own in self.param_groups for each in own["params"]]
            matrices = [i for i, (_, own) in enumerate(entries) if own["algorithm"] == self.algorithm]
            self._assign([i for i in matrices if mesh_of(entries[i][0]) == mesh], [], entries, mesh)
        mine = [roots.count(mesh_ranks(mesh)[0]) for roots in self._roots_of_parts(param, group)]
        stack = param.shape[0] if param.ndim == 3 else 1
        return 4 * sum(mine[part] * math.prod(shape) // stack for shape, part in self._root_states(param, group).values())

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
        if name not in self._root_states(param, group):
            return super().empty_state(param, group, name, shape, dtype)
        return zeros_placed(shape, dtype, self._flat(param.device_mesh), [Shard(0)])
