"""States of whole matrices, at the roots of the matrices. Roots are chosen once, because the states do not move.

It must not know what the states mean.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from torch_ragged.optim._aligned import aligned
from torch_ragged.optim._base import STEP_NBYTES, from_flat, local, mesh_of, zeros_placed
from torch_ragged.optim._gather import Batch, Spot, mesh_ranks
from torch_ragged.optim._matrix import MatrixOptimizer, StatesOf
from torch_ragged.tensor._redistribute import mesh_group
from torch_ragged.tensor.placement_types import RaggedShard

__all__ = ["FactoredOptimizer", "RootState", "RootStateOptimizer"]


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
        # Ranks must have chosen for the same parameters before: those that are new are balanced among themselves. Without
        # communication, nothing notices a rank that has chosen at another time.
        self._set_roots([entries[i] for i in indices if not self._has_roots(*entries[i])], mesh)

    def _has_roots(self, param: torch.Tensor, group: dict[str, Any]) -> bool:
        """Whether a parameter keeps its roots: not if ranks share a matrix that its options, which have changed, let one have.

        Such a matrix has no state at its roots.
        """
        roots, parts = self._roots.get(param), self._parts(param, group)
        return roots is not None and all(split <= self._stack(part, group).blocks for part, (_, split) in zip(parts, roots))

    def _root_placements(self, param: torch.Tensor, part: int) -> tuple[RaggedShard]:
        """Each rank of the flattened mesh holds the states of the matrices whose root it is."""
        units = [0] * mesh_ranks(mesh_of(param))[1]
        # A stack without matrices has no root: rank 0 counts as one, as a RaggedShard needs a unit.
        for root in self._roots[param][part][0] or (0,):
            units[root] += 1
        return (RaggedShard(tuple(range(param.ndim - 2)), tuple(units)),)

    def _place_states(self, param: torch.Tensor, group: dict[str, Any], elsewhere: Collection[str] = ()) -> None:
        """Make the states at the roots if they are missing. Redistribute those that were loaded from a run with other roots."""
        mesh, held = mesh_of(param), self.state[param]
        for name, (shape, part) in self._root_states(param, group).items():
            if name in elsewhere:
                continue
            placement = self._root_placements(param, part)
            if name in held:
                # By collectives: all ranks of the mesh are here, with equal placements, as they have loaded the same. Assumed:
                # a state that is no DTensor has the matrices of this rank only. Nothing notices a whole one.
                if isinstance(value := held[name], DTensor) and value.placements != placement:
                    held[name] = value.redistribute(placements=placement)
            elif mesh is None:
                held[name] = torch.zeros(shape, dtype=torch.float32, device=param.device)
            else:
                held[name] = zeros_placed(shape, torch.float32, self._flat(mesh), placement, param)

    def _flat(self, mesh: DeviceMesh) -> DeviceMesh:
        """The 1-D mesh of all ranks of ``mesh``, in row-major order."""
        if mesh not in self._meshes:
            # Not pickled, as it has a process group: it is made again when a step needs it.
            self._meshes[mesh] = (
                mesh if mesh.ndim == 1 else DeviceMesh.from_group(mesh_group(mesh, tuple(range(mesh.ndim))), mesh.device_type)
            )
        return self._meshes[mesh]

    def _of_root(self, params: Sequence[torch.Tensor], spot: Spot) -> tuple[int, int]:
        """The part of a matrix at this rank, its root, and its index among those of this rank.

        ``params`` has the parameter of each stack.
        """
        param = params[spot.stack]
        part = sum(each is param for each in params[: spot.stack])
        # Roots never descend: this rank's matrices are neighbours in the stack, and its part of the state has them in this
        # order.
        return part, spot.position - self._roots[param][part][0].index(mesh_ranks(mesh_of(param))[0])

    def states_of(self, param: torch.Tensor, group: dict[str, Any], index: Optional[int]) -> dict[str, Any]:
        """The states that lie in this optimizer: see :data:`StatesOf`."""
        return super().states_of(param, group, None) if index is None else self._at_root(param, group, index)

    def _at_root(self, param: torch.Tensor, group: dict[str, Any], index: int, part: int = 0) -> dict[str, torch.Tensor]:
        """Views of the states of a matrix at this rank, its root."""
        states = {name: state for name, state in self._root_states(param, group).items() if state.part == part}
        return {name: local(self.state[param][name]).view(-1, *shape[-2:])[index] for name, (shape, _) in states.items()}

    def _choose_roots(self, mesh: DeviceMesh | None) -> None:
        """Choose the roots of all matrices of the mesh at once, as the first step does it.

        Chosen one by one, they would be other roots.
        """
        entries = [(each, own) for own in self.param_groups for each in own["params"]]
        matrices = [i for i, (_, own) in enumerate(entries) if own["algorithm"] == self.algorithm]
        self._assign([i for i in matrices if mesh_of(entries[i][0]) == mesh], [], entries, mesh)

    # -- pieces: parts of the states that lie in different memories, for ``fsdp.offloaded`` ------------------------------

    def piece_units(self, param: torch.Tensor, group: dict[str, Any]) -> int:
        """Into how many parts of equal sizes this rank's states of a matrix parameter can be cut: the matrices at this root."""
        if param not in self._roots:
            self._choose_roots(mesh_of(param))
        return self._roots[param][0][0].count(mesh_ranks(mesh_of(param))[0])

    def piece_states(
        self, param: torch.Tensor, group: dict[str, Any], start: int, stop: int
    ) -> dict[str, tuple[int, torch.dtype]]:
        """Of the parts ``start`` to ``stop``: the number of elements and the dtype of each state that may lie elsewhere."""
        states = self._root_states(param, group).items()
        return {name: ((stop - start) * math.prod(state.shape[-2:]), torch.float32) for name, state in states}

    def piece_matrix(self, param: torch.Tensor, group: dict[str, Any], name: str, flat: torch.Tensor) -> torch.Tensor:
        """The state ``name`` of one matrix, given its elements."""
        return flat.view(self._root_states(param, group)[name].shape[-2:])

    def piece_placements(self, param: DTensor, group: dict[str, Any], name: str) -> tuple[Placement, ...]:
        """The placements of the state ``name`` of ``param``."""
        return self._root_placements(param, self._root_states(param, group)[name].part)

    def piece_joined(self, param: DTensor, group: dict[str, Any], name: str, flat: torch.Tensor) -> DTensor:
        """The state ``name`` of ``param``, given its elements on this rank."""
        shape = self._root_states(param, group)[name].shape
        return from_flat(flat, shape, self._flat(param.device_mesh), self.piece_placements(param, group, name))

    def _root_nbytes(self, param: torch.Tensor, group: dict[str, Any]) -> int:
        """The bytes of this rank's states at roots, after the first step, which chooses the roots if they are not chosen."""
        mesh, known = mesh_of(param), self._roots
        if param not in known and param not in self._foreseen:
            # Not kept: one rank may ask alone, and a step, after a further group perhaps, must choose as the others do.
            try:
                self._roots = {**known}
                self._choose_roots(mesh)
                self._foreseen.update(self._roots)
            finally:
                self._roots = known
        roots_of = known[param] if param in known else self._foreseen[param]
        mine = [roots.count(mesh_ranks(mesh)[0]) for roots, _ in roots_of]
        stack = math.prod(param.shape[:-2])
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
        return zeros_placed(shape, dtype, self._flat(param.device_mesh), [Shard(0)], param)


class FactoredOptimizer(RootStateOptimizer):
    """A matrix optimizer with Kronecker factors: all of its states are at the roots, in float32.

    Per matrix: averages of the gradient and of its square, a factor for each side of at most ``max_side``, and what is computed
    from a factor every ``interval`` steps. A subclass computes the direction of an update.
    """

    wire = torch.float32
    has_states_at_roots = True
    of_factor: str
    """The name of what is computed from a factor: its state is named ``left_`` or ``right_`` and this."""

    def __init__(self, params: Any, *, max_root_bytes: Optional[int], check_gradients: bool, **defaults: Any) -> None:
        super().__init__(params, defaults, max_root_bytes, check_gradients)

    def _direction(
        self, gradient: torch.Tensor, state: dict[str, torch.Tensor], group: dict[str, Any], step: int
    ) -> torch.Tensor:
        """Update the states of one matrix. Returns the direction of its update, without the learning rate. All are float32.

        Products and norms get aligned memory: ``gradient`` is aligned, and new tensors are. The states need not be.
        """
        raise NotImplementedError

    def _factor_beta(self, group: dict[str, Any]) -> Any:
        """The decay of the factors."""
        return group["shampoo_beta"]

    def _check_group(self, group: dict[str, Any]) -> None:
        name, beta = type(self).__name__, self._factor_beta(group)
        if not isinstance(beta, (int, float)) or not 0.0 <= beta < 1.0:
            raise ValueError(f"{name} shampoo_beta must be a number in [0, 1), got {beta!r}")
        for option in ("interval", "max_side"):
            if not isinstance(group[option], int) or group[option] < 1:
                raise ValueError(f"{name} {option} must be a positive integer, got {group[option]!r}")

    def _kind(self, group: dict[str, Any]) -> Hashable:
        return group["max_side"], group["interval"]

    def _root_states(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, RootState]:
        *lead, rows, columns = param.shape
        states = {name: RootState(tuple(param.shape)) for name in ("exp_avg", "exp_avg_sq")}
        for name, side in (("left", rows), ("right", columns)):
            if side <= group["max_side"]:
                states[name] = states[f"{name}_{self.of_factor}"] = RootState((*lead, side, side))
        return states

    def init_states(self, param: torch.Tensor, group: dict[str, Any], elsewhere: Collection[str] = ()) -> None:
        """As in the base class: the step counter, and the states at the roots."""
        state = self.state[param]
        if "step" not in state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
        self._place_states(param, group, elsewhere)

    def _send(self, param: torch.Tensor, group: dict[str, Any], gradient: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        state["step"] += 1
        return gradient

    def first_state_nbytes(self, param: torch.Tensor, group: dict[str, Any]) -> int:
        """As in the base class: the root of a matrix has all of its states in float32."""
        if group["algorithm"] != self.algorithm:
            return super().first_state_nbytes(param, group)
        return self._root_nbytes(param, group) + STEP_NBYTES

    def _compute(
        self, batch: Batch, matrices: torch.Tensor, params: Sequence[torch.Tensor], states_of: StatesOf
    ) -> torch.Tensor:
        """One matrix after the other: products of a batch may round differently from products of one matrix."""
        groups = {param: group for group in self.param_groups for param in group["params"]}
        for matrix, spot in zip(matrices, batch.spots):
            param = params[spot.stack]
            # The counter is on the CPU: no wait for the device.
            group, step = groups[param], int(self.state[param]["step"].item())
            # Into the gathered memory. Results beside it would double the memory of a flight.
            states = states_of(param, group, self._of_root(params, spot)[1])
            matrix.copy_(self._direction(aligned(matrix), states, group, step))
        return matrices

    def _receive(self, param: torch.Tensor, group: dict[str, Any], update: torch.Tensor) -> None:
        lr, mine = group["lr"], local(param)
        # In float32 at least, and rounded once: one of float64 would lose its last digits even without a step. The update is
        # memory of this rank, and can be scaled in place.
        wide = mine.to(torch.promote_types(mine.dtype, torch.float32)) * (1 - lr * group["weight_decay"])
        mine.copy_(wide.sub_(update.view(mine.shape).mul_(lr)))
